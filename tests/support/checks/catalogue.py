"""All checks of kernels that run on several backends: "numba", "cpu" (Triton's interpreter) and "cuda".

A module lists those that are `ON_ALL_BACKENDS`, and those of Triton's kernels alone, `ON_TRITON`. They are
functions of the backend, which raise if something is wrong.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.checks import casts, letters, normal, rings, slots

MODULES = {"casts": casts, "normal": normal, "letters": letters, "rings": rings, "slots": slots}


def checks_for(backend: str) -> list[Any]:
    """As parameters of a test: the backend and a check."""
    return [
        pytest.param(backend, check, id=f"{backend}-{name}-{check.__name__.removeprefix('check_')}")
        for name, module in MODULES.items()
        for check in (
            *getattr(module, "ON_ALL_BACKENDS", ()),
            *(() if backend == "numba" else module.ON_TRITON),
        )
    ]
