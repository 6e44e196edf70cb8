"""`deep_ep`, for code that was written for it: AnyEP under that name.

`ANYEP_DEEP_EP_API=v1` leaves out the names of version 2.
"""

from typing import TYPE_CHECKING

from anyep.deep_ep_modules import V1, V2, has_v2_names, refuse_to_hide_another

refuse_to_hide_another()

# ruff: noqa: E402 - nothing heavy before it is clear that there is no other deep_ep
from anyep import Buffer, Config, EventHandle, EventOverlap, topk_idx_t

from . import buffer, utils

__version__ = V2 if has_v2_names() else V1
"""The version of deep_ep whose names are here; `anyep.__version__` is AnyEP's."""

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

if TYPE_CHECKING or has_v2_names():
    from .buffers.elastic import ElasticBuffer as ElasticBuffer
    from .buffers.elastic import EPHandle as EPHandle
    from .buffers.elastic import get_logical_domain_size as get_logical_domain_size
    from .buffers.elastic import get_physical_domain_size as get_physical_domain_size

    __all__ += ["EPHandle", "ElasticBuffer", "get_logical_domain_size", "get_physical_domain_size"]
