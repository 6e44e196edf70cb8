"""Which NIXL package is used: there is one per major version of CUDA, and one that selects among them.

    package = find_nixl(torch.version.cuda)         # NixlPackage("nixl_cu13", "1.5.0"), or None
    package, api = load_nixl(torch.version.cuda)

The package for torch's own CUDA version comes first; all of them work without CUDA.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from anyep.errors import NotSupported

NAMES: Final = ("nixl_cu13", "nixl_cu12", "nixl")
"""The last one selects one of the others, or is a NIXL that was built from source."""
HOW_TO_INSTALL: Final = (
    "pip install 'anyep[network]', which is nixl-cu12; with a torch for CUDA 13, 'anyep[network-cu13]'"
)


@dataclass(frozen=True)
class NixlPackage:
    """An installed package: the name that it is imported by, and its version ("" if unknown)."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()


def names_in_order(cuda: str | None) -> list[str]:
    """NIXL's packages, the preferred one first; `cuda` is the CUDA version of torch.

    >>> names_in_order("12.8"), names_in_order(None)
    (['nixl_cu12', 'nixl_cu13', 'nixl'], ['nixl_cu13', 'nixl_cu12', 'nixl'])
    """
    own = f"nixl_cu{cuda.partition('.')[0]}" if cuda else ""
    return sorted(NAMES, key=lambda name: name != own)


def installed_packages(cuda: str | None) -> Iterator[NixlPackage]:
    """The installed packages, the preferred one first. Nothing is imported."""
    for name in names_in_order(cuda):
        if _is_there(name):
            yield NixlPackage(name, _version_of(name))


def find_nixl(cuda: str | None) -> NixlPackage | None:
    """The package that `load_nixl` tries first, or None if there is none."""
    return next(installed_packages(cuda), None)


def load_nixl(cuda: str | None) -> tuple[NixlPackage, Any]:
    """The first package that can be imported, and its API; or `NotSupported`, which says what to install."""
    failures = []
    for package in installed_packages(cuda):
        try:
            return package, importlib.import_module(f"{package.name}._api")
        except ImportError as error:
            failures.append(f"{package} cannot be imported: {error}")
    if failures:
        raise NotSupported(
            f"NIXL, which puts bytes into other hosts' memory, is installed but does not work"
            f" ({'; '.join(failures)}): reinstall it, {HOW_TO_INSTALL}"
        )
    raise NotSupported(
        f"NIXL is not installed, which puts bytes into other hosts' memory: {HOW_TO_INSTALL};"
        f" looked for {', '.join(names_in_order(cuda))}"
    )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        # Its entry in sys.modules is not a module.
        return False


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return ""
