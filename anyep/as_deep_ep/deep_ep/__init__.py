"""`deep_ep`, for code that was written for it: AnyEP under that name."""

from anyep.deep_ep_modules import refuse_to_hide_another

refuse_to_hide_another()

# ruff: noqa: E402 - nothing heavy before it is clear that there is no other deep_ep
from anyep import Buffer, Config, EventHandle, EventOverlap, __version__, topk_idx_t

from . import buffer, utils

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "EventOverlap",
    "__version__",
    "buffer",
    "topk_idx_t",
    "utils",
]
