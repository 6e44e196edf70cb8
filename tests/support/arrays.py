"""NumPy arrays of the types that the CPU's kernels take."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def int32(values: Any) -> Array:
    return np.array(values, np.int32)


def int64(values: Any) -> Array:
    return np.array(values, np.int64)


def flags(values: Any) -> Array:
    return np.array(values, np.bool_)
