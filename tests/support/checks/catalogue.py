"""All checks of kernels: functions `check_...` that raise if something is wrong on a backend.

One whose argument is called `backend` is for all of them; one that takes a `device` is for Triton's kernels.
"""

from __future__ import annotations

from inspect import isfunction, signature
from typing import Any

import pytest

from tests.support.checks import DEEPER, casts, letters, normal, rings, slots


def checks_for(backend: str) -> list[Any]:
    """As parameters of a test: the backend and a check."""
    arguments = [["backend"]] if backend == "numba" else [["backend"], ["device"]]
    return [
        pytest.param(
            backend,
            check,
            id=f"{backend}-{module.__name__.rpartition('.')[2]}-{name.removeprefix('check_')}",
            marks=[pytest.mark.property] if check in DEEPER else [],
        )
        for module in (casts, normal, letters, rings, slots)
        for name, check in vars(module).items()
        if name.startswith("check_") and isfunction(check) and [*signature(check).parameters] in arguments
    ]
