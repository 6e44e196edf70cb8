"""The key of the folder where the CPU's compiled kernels are kept (anyep/backends/cache_folder.py)."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from typing import Final

import llvmlite
import numba
import numpy

from anyep.backends.cache_folder import Unusable, hash_of_files

HASHED_MODULES: Final = ("core/commands", "core/digests", "core/formats", "errors", "layout", "sizes")
"""The modules of anyep, besides those of the kernels, whose constants kernels contain."""
_PACKAGE: Final = Path(__file__).parents[2]


def source_files() -> list[Path]:
    """The sources that kernels are made of."""
    kernels = sorted((_PACKAGE / "backends" / "cpu" / "kernels").glob("*.py"))
    return [*kernels, *(_PACKAGE / f"{name}.py" for name in HASHED_MODULES)]


def _hash_sources() -> str:
    return hash_of_files(source_files())


try:
    # At import, like the kernels themselves: they do not contain later edits of the sources.
    _SOURCES = _hash_sources()
except OSError:
    _SOURCES = ""


def source_key() -> str:
    """A hash of the sources of all kernels, the constants in them, and the versions of what compiles them."""
    if not _SOURCES:
        raise Unusable(f"the sources in {_PACKAGE} cannot be read, so nobody knows what was compiled")
    parts = [_SOURCES, sys.implementation.name, sys.version]
    parts += [f"{package.__name__} {package.__version__}" for package in (numba, llvmlite, numpy)]
    for name in HASHED_MODULES:
        # These may have been imported long before, and their sources edited since.
        constants = vars(importlib.import_module("anyep." + name.replace("/", ".")))
        parts += [
            f"{name}.{constant} {value!r}"
            for constant, value in sorted(constants.items())
            if constant.isupper() and isinstance(value, int | float | str | tuple)
        ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
