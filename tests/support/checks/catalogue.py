"""All checks of kernels: functions `check_...` that raise if something is wrong on a backend.

One whose argument is called `backend` is for all of them; one that takes a `device` is for Triton's kernels.
There are no others: helpers are called `assert_...`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import isfunction, signature
from types import ModuleType
from typing import Any

import pytest

from tests.support.checks import (
    DEEPER,
    casts,
    commands,
    expand,
    node_parts,
    normal,
    notify,
    origins,
    parts,
    relays,
    rings,
    slots,
)

MODULES = (casts, commands, expand, node_parts, normal, notify, origins, parts, relays, rings, slots)


def checks_for(backend: str) -> list[Any]:
    """As parameters of a test: the backend and a check."""
    wanted = ("backend",) if backend == "numba" else ("backend", "device")
    return [
        pytest.param(
            backend,
            check,
            id=f"{backend}-{module.__name__.rpartition('.')[2]}-{name.removeprefix('check_')}",
            marks=[pytest.mark.property] if check in DEEPER else [],
        )
        for module in MODULES
        for name, check, argument in checks_of(module)
        if argument in wanted
    ]


def checks_of(module: ModuleType) -> Iterator[tuple[str, Callable[[str], None], str]]:
    """The name of each check of a module, the check, and what its argument is called."""
    for name, check in vars(module).items():
        if name.startswith("check_") and isfunction(check):
            arguments = [*signature(check).parameters]
            if arguments not in (["backend"], ["device"]):
                raise TypeError(
                    f"{module.__name__}.{name} takes {arguments}: a check takes backend or device"
                )
            yield name, check, arguments[0]
