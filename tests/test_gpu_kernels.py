"""The GPU's kernels on a GPU: the checks that run in Triton's interpreter, and those that need a real one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'anyep[cuda]'")

from tests import cast_checks, letter_checks, ring_checks, slot_checks, triton_checks
from tests.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
MODULES = (triton_checks, letter_checks, cast_checks, slot_checks, ring_checks)


@pytest.mark.parametrize(
    "check", [check for module in MODULES for check in module.CHECKS], ids=lambda check: check.__name__
)
def test_like_the_cpu(check: Callable[[str], None]) -> None:
    check("cuda")


def test_ranks_that_wait_for_each_other() -> None:
    letter_checks.check_ranks_that_wait("cuda")
