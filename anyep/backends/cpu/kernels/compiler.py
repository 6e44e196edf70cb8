"""How the CPU's kernels are compiled: without the GIL, with explicit types, cached where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function now, for exactly these types.

    The machine code is kept in Numba's cache. Where no folder can be written (a read-only installation
    without a home), it is compiled anew in each process.
    """

    def compile_now(function: Callable[..., Any]) -> Any:
        options = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
        try:
            return numba.njit(signature, cache=True, **options)(function)
        except (RuntimeError, OSError):
            return numba.njit(signature, **options)(function)

    return compile_now


def inlined(function: Callable[..., Any]) -> Any:
    """Make a helper that kernels call; it is compiled with them."""
    return numba.njit(nogil=True, boundscheck=False, error_model="numpy", inline="never")(function)
