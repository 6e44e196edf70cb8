"""`deep_ep`, for code that was written for it: AnyEP under that name.

    anyep.install_as_deep_ep()  # in this process, and in those that multiprocessing starts from it
    from deep_ep import Buffer, Config, EventOverlap

The modules are in the folder `as_deep_ep`, and are found when that folder is on the path: by the call above;
for one script by `python -m anyep.run_as_deep_ep script.py`; or permanently by the distribution
`anyep-deep-ep` (`pip install ./compat/deep_ep`), which holds the same files.

If there is another deep_ep, none of these replaces it unless told to.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final

from anyep.errors import NotSupported
from anyep.settings import DEEP_EP_API, REPLACE_DEEP_EP

FOLDER: Final = Path(__file__).parent / "as_deep_ep"
TOP_LEVEL: Final = ("deep_ep", "deep_ep_cpp")
MODULES: Final = ("deep_ep", "deep_ep.buffer", "deep_ep.utils", "deep_ep_cpp")
REPLACE: Final = REPLACE_DEEP_EP.name
"""If set to 1, AnyEP replaces another deep_ep; child processes inherit it."""
OURS: Final = "from anyep import"
"""Only the files of the drop-in contain this text, wherever they were installed."""


V1: Final = "1.2.1"
V2: Final = "2.1.0"
"""The versions of deep_ep whose names the drop-in has, as programs parse and compare them."""


def has_v2_names() -> bool:
    """Whether the drop-in has the names of version 2; with `ANYEP_DEEP_EP_API=v1` it does not."""
    return DEEP_EP_API.choose().value == "v2"


def install_as_deep_ep(replace: bool = False) -> None:
    """Make `import deep_ep` import AnyEP. Call it before any import of deep_ep.

    If there is another deep_ep, this raises `NotSupported`; with `replace`, AnyEP replaces it.

    Args:
        replace: Take the place of another deep_ep, instead of raising `NotSupported`.
    """
    if replace:
        os.environ[REPLACE] = "1"
        _forget_another()
    refuse_to_hide_another()
    for name in TOP_LEVEL:
        if name in sys.modules and sys.modules[name] is None:  # it was marked as a module that does not exist
            del sys.modules[name]
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    importlib.invalidate_caches()
    for name in MODULES:
        importlib.import_module(name)


def refuse_to_hide_another() -> None:
    """Raise if there is a deep_ep that is not AnyEP's, unless AnyEP is to replace it."""
    if REPLACE_DEEP_EP.choose().value:
        return
    for place in _places_of_another():
        raise NotSupported(
            f"there is another deep_ep here ({place}), and AnyEP does not hide it unasked: uninstall it (pip"
            f" uninstall deep_ep), or let AnyEP take its place by install_as_deep_ep(replace=True), by"
            f" python -m anyep.run_as_deep_ep --replace, or by {REPLACE}=1 in the environment"
        )


def _places_of_another() -> Iterator[str]:
    for name in TOP_LEVEL:
        module = sys.modules.get(name)
        if module is not None and not _is_ours(module.__spec__):
            yield f"{name} is imported already, from {getattr(module, '__file__', None) or 'no file'}"
        for spec in _specs(name):
            # A folder without an __init__.py has no origin, and any module of that name takes precedence.
            if spec.origin is not None and not _is_ours(spec):
                yield spec.origin
    # Two distributions that contain a deep_ep overwrite each other's files.
    for distribution in Distribution.discover(name="deep-ep"):
        yield f"the distribution {distribution.metadata['Name']} {distribution.version}"


def _specs(name: str) -> Iterator[ModuleSpec]:
    """Every module that an import of this name could find, not only the first."""
    for entry in sys.path:
        if (spec := PathFinder.find_spec(name, [entry])) is not None:
            yield spec
    for finder in sys.meta_path:
        if finder is not PathFinder and (spec := finder.find_spec(name, None)) is not None:
            yield spec


def _is_ours(spec: ModuleSpec | None) -> bool:
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    try:
        return OURS in Path(spec.origin).read_text()
    except OSError:
        return False


def _forget_another() -> None:
    """Remove the modules of another deep_ep from this process; names that were imported from them stay."""
    for name in TOP_LEVEL:
        module = sys.modules.get(name)
        if module is not None and not _is_ours(module.__spec__):
            for loaded in list(sys.modules):
                if loaded == name or loaded.startswith(f"{name}."):
                    del sys.modules[loaded]
