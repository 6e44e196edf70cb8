"""The versions of other packages that AnyEP needs, and a check of the installed versions.

A package manager enforces them, but not if AnyEP is used through PYTHONPATH. The modules that load torch call
`check_requirements()` before they load anything that needs a recent version.
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
    """Raise `Outdated` if a package is older than AnyEP needs. Missing packages are ignored."""
    for package in MINIMUM:
        if problem := problem_with(package):
            raise Outdated(f"{problem}: {how_to_install(package)}")


def problem_with(package: str) -> str | None:
    """A message about a package whose version is too old; None if it is not."""
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
    """Whether a version is older than a minimum; False for a version without numbers.

    >>> [is_older(version, (2, 11)) for version in ("2.9.1+cpu", "2.11.0+cu130", "2.13.0a0+git", "unknown")]
    [True, False, False, False]
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < minimum


def _version_of(package: str) -> str | None:
    """The version of the module if it is loaded, else of the distribution, as loading it may take long."""
    if package in sys.modules:
        version = getattr(sys.modules[package], "__version__", None)
        return None if version is None else str(version)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
