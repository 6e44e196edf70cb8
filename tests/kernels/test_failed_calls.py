"""GPU kernels after a failed call: what they write."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

import torch

from anyep.backends.cuda.kernels import windows
from anyep.core import outcomes
from tests.support.checks.normal import guarded, int32, int64, launch, state_of
from tests.support.triton_interpreter import run_interpreted


def unpack_after_a_failure(device: str) -> list[list[int]]:
    """The ids that a result of 2 rows has, where the notify messages had said that both would come."""
    ids = int64([[3], [4]], device)
    launch(
        *(windows.unpack_window, device, 1, int64([[0] * 6], device)),
        *(state_of(device, OUTCOME=outcomes.LATE, NUM_ROWS=2), 0, guarded((2,), torch.int32, device)),
        *(ids, int32([[2]], device), int64([0, 0], device), 2, 1),
        NUM_RANKS=1,
        PAD=True,
        IF_ALL_FIT=False,
        BLOCK=16,
    )
    found: list[list[int]] = ids.tolist()
    return found


def test_no_row_of_a_failed_call_has_an_expert() -> None:
    assert run_interpreted(unpack_after_a_failure, "cpu") == [[-1], [-1]]
