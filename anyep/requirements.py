"""The versions of other packages that AnyEP needs, and the check of what is installed.

A package manager sees to it, but not where AnyEP is used by way of PYTHONPATH. The modules that load torch
call `check_requirements()` before they load anything that needs a recent one.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from typing import Final

from anyep.errors import Outdated

MINIMUM: Final = {"torch": (2, 11), "numba": (0, 60), "numpy": (1, 26)}
"""As in pyproject.toml."""


def check_requirements() -> None:
    """Raise `Outdated` where a package is older than AnyEP needs. One that is missing is not looked for."""
    for package in MINIMUM:
        if problem := problem_with(package):
            raise Outdated(f"{problem}: {how_to_install(package)}")


def problem_with(package: str) -> str | None:
    """What is wrong with the version of a package, in words; None if nothing is."""
    found = _version_of(package)
    if found is None or not is_older(found, MINIMUM[package]):
        return None
    path = getattr(sys.modules.get(package), "__file__", None)
    place = f" (loaded from {path})" if path else ""
    return f"{package} {found}{place} is too old, AnyEP needs {_text(MINIMUM[package])} or later"


def how_to_install(package: str) -> str:
    """
    >>> how_to_install("torch")
    "pip install 'torch>=2.11'"
    """
    return f"pip install '{package}>={_text(MINIMUM[package])}'"


def is_older(version: str, minimum: tuple[int, int]) -> bool:
    """Whether a version comes before a minimum; one that has no numbers does not.

    >>> [is_older(version, (2, 11)) for version in ("2.9.1+cpu", "2.11.0+cu130", "2.13.0a0+git", "unknown")]
    [True, False, False, False]
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < minimum


def _version_of(package: str) -> str | None:
    """That of the loaded module; or, as loading it may take long, that of the installed distribution."""
    if package in sys.modules:
        version = getattr(sys.modules[package], "__version__", None)
        return None if version is None else str(version)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
