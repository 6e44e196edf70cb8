"""NumPy arrays of the types that the CPU's kernels take, and how tests call what only kernels call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

Array = np.ndarray[Any, Any]


def int32(values: Any) -> Array:
    return np.array(values, np.int32)


def int64(values: Any) -> Array:
    return np.array(values, np.int64)


def flags(values: Any) -> Array:
    return np.array(values, np.bool_)


def from_python(helper: Any) -> Callable[..., Any]:
    """A helper of kernels, to be called from Python; its first call compiles it."""

    @numba.njit
    def call(*arguments: Any) -> Any:
        return helper(*arguments)

    return call  # type: ignore[no-any-return]
