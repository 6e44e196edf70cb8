"""What has been accepted covers only arguments that the checks would accept as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyep.api.accepted import Accepted

X, IDS = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64)


class Other(torch.Tensor):
    """A type of tensor that somebody else made."""


@pytest.fixture
def accepted() -> Accepted:
    made = Accepted(torch.device("cpu"))
    made.remember(X, IDS, None)
    return made


def test_equal_kinds_are_covered(accepted: Accepted) -> None:
    assert accepted.covers(torch.ones(4, 8), IDS + 1, None)


@pytest.mark.parametrize(
    "x",
    [
        None,
        [0.0],
        (X, None),
        torch.zeros(4, 9),
        torch.zeros(5, 8),
        torch.zeros(8, 4).t(),
        torch.zeros(4, 16)[:, :8],
        torch.zeros(4, 8, dtype=torch.float16),
        torch.zeros(4, 8, requires_grad=True),
        torch.zeros(4, 8, device="meta"),
        torch.zeros(4, 8).to_sparse(),
        torch.zeros(4, 8, dtype=torch.complex64).conj().imag,
        torch.zeros(4, 8).as_subclass(Other),
        torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False),
    ],
    ids=lambda x: type(x).__name__,
)
def test_anything_else_is_checked(accepted: Accepted, x: Any) -> None:
    assert not accepted.covers(x, IDS, None)


def test_what_is_given_and_what_is_not_must_agree(accepted: Accepted) -> None:
    assert not accepted.covers(X, None, None)
    assert not accepted.covers(X, IDS, IDS)
    assert not accepted.covers(X, IDS)


def test_nothing_is_covered_that_checks_would_change() -> None:
    accepted = Accepted(torch.device("cpu"))
    assert not accepted.covers()
    accepted.remember(X)
    assert accepted.covers(X)
    accepted.remember(X.clone().requires_grad_())
    assert not accepted.covers(X)
