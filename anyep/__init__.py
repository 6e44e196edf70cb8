"""AnyEP moves the tokens of Mixture-of-Experts models to the ranks that hold their experts, and back.

Importing this package is cheap: torch and Numba are loaded when a buffer, an event, `anyep.autograd` or
`anyep.nn` is first used.
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
    Masked,
    NotSupported,
    PeerLost,
    WaitTimeout,
)
from anyep.version import __version__

TYPE_CHECKING = False  # that of typing, which `import anyep` need not wait for
if TYPE_CHECKING:
    from typing import Any

    import torch

    from anyep import autograd as autograd
    from anyep import balance as balance
    from anyep import errors as errors
    from anyep import layout as layout
    from anyep import nn as nn
    from anyep import sizes as sizes
    from anyep import topology as topology
    from anyep import training as training
    from anyep.api.buffer import Buffer
    from anyep.api.elastic import ElasticBuffer
    from anyep.api.elastic_handle import EPHandle
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
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "InvalidCall",
    "Masked",
    "NotSupported",
    "PeerLost",
    "WaitTimeout",
    "__version__",
    "install_as_deep_ep",
    "topk_idx_t",
]

_LOADED_WHEN_USED = {
    "Buffer": ("anyep.api.buffer", "Buffer"),
    "Config": ("anyep.sizes", "Config"),
    "EPHandle": ("anyep.api.elastic_handle", "EPHandle"),
    "ElasticBuffer": ("anyep.api.elastic", "ElasticBuffer"),
    "EventHandle": ("anyep.events", "EventHandle"),
    "EventOverlap": ("anyep.events", "EventOverlap"),
    "install_as_deep_ep": ("anyep.deep_ep_modules", "install_as_deep_ep"),
    "topk_idx_t": ("torch", "int64"),
}


_MODULES = ("autograd", "balance", "errors", "layout", "nn", "sizes", "topology", "training")
"""Attributes of the package as well. Not in `__all__`: `from anyep import *` would hide torch's `nn`."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"anyep.{name}")
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module 'anyep' has no attribute {name!r}")
    module, attribute = _LOADED_WHEN_USED[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
