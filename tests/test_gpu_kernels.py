"""The GPU's kernels for normal mode on a GPU, against the CPU's, bit for bit."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'anyep[cuda]'")

from tests import letter_checks, triton_checks
from tests.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("name", [check.__name__ for check in triton_checks.CHECKS])
def test_data_kernels(name: str) -> None:
    getattr(triton_checks, name)("cuda")


@pytest.mark.parametrize("name", [check.__name__ for check in letter_checks.CHECKS])
def test_letter_kernels(name: str) -> None:
    getattr(letter_checks, name)("cuda")


def test_ranks_that_wait_for_each_other() -> None:
    letter_checks.check_ranks_that_wait("cuda")
