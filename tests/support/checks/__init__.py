"""Checks of kernels on several backends: "numba", "cpu" (Triton's interpreter) and "cuda"."""

from __future__ import annotations

from collections.abc import Callable

Check = Callable[[str], None]
DEEPER: set[Check] = set()
"""The checks that do more in `make test-all`."""


def deeper(check: Check) -> Check:
    """Mark such a check."""
    DEEPER.add(check)
    return check
