"""Kernels that do the same on every backend: Numba's, and Triton's in its interpreter.

`tests/gpu/test_kernels.py` runs Triton's on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

from tests.support.checks.catalogue import checks_for
from tests.support.triton_interpreter import run_interpreted


@pytest.mark.parametrize(("backend", "check"), [*checks_for("numba"), *checks_for("cpu")])
def test_kernel(backend: str, check: Callable[[str], None]) -> None:
    if backend == "numba":
        check(backend)
    else:
        run_interpreted(check, backend)
