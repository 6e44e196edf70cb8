"""AnyEP moves the tokens of Mixture-of-Experts models to the ranks that hold their experts, and back.

Importing this package is cheap: what takes time, such as torch and Numba, is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import sys

if sys.platform != "linux":
    raise ImportError(
        f"AnyEP runs on Linux only, and this is {sys.platform!r}: it shares memory between processes with"
        " memfd and pidfd. Use a Linux machine, a Linux container or virtual machine, or WSL 2 on Windows."
    )

from anyep.errors import (
    AnyEPError,
    BufferBroken,
    Disagreement,
    InvalidCall,
    NotSupported,
    PeerLost,
    WaitTimeout,
)
from anyep.version import __version__

TYPE_CHECKING = False  # that of typing, which `import anyep` need not wait for
if TYPE_CHECKING:
    from typing import Any

    import torch

    from anyep.buffer import Buffer
    from anyep.deep_ep_modules import install_as_deep_ep
    from anyep.events import EventHandle, EventOverlap
    from anyep.sizes import Config

    topk_idx_t: torch.dtype

__all__ = [
    "AnyEPError",
    "Buffer",
    "BufferBroken",
    "Config",
    "Disagreement",
    "EventHandle",
    "EventOverlap",
    "InvalidCall",
    "NotSupported",
    "PeerLost",
    "WaitTimeout",
    "__version__",
    "install_as_deep_ep",
    "topk_idx_t",
]

_LOADED_WHEN_USED = {
    "Buffer": ("anyep.buffer", "Buffer"),
    "Config": ("anyep.sizes", "Config"),
    "EventHandle": ("anyep.events", "EventHandle"),
    "EventOverlap": ("anyep.events", "EventOverlap"),
    "install_as_deep_ep": ("anyep.deep_ep_modules", "install_as_deep_ep"),
    "topk_idx_t": ("torch", "int64"),
}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module 'anyep' has no attribute {name!r}")
    module, attribute = _LOADED_WHEN_USED[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value
