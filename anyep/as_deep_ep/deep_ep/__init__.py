"""`deep_ep`, for code that was written for it: AnyEP under that name."""

from anyep import Buffer, Config, EventHandle, EventOverlap, __version__, topk_idx_t
from anyep.deep_ep_modules import refuse_to_hide_another

refuse_to_hide_another()

from . import buffer, utils  # noqa: E402 - not before it is clear whose deep_ep this is

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
