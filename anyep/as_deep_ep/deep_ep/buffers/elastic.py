"""`deep_ep.buffers.elastic`: the class of version 2, and how the ranks of a group are grouped."""

from typing import Any

from anyep.deep_ep_modules import has_v2_names

if not has_v2_names():
    raise ImportError("ANYEP_DEEP_EP_API=v1 leaves out deep_ep.buffers.elastic: unset it, or set it to v2")


from anyep import ElasticBuffer, EPHandle, EventHandle, EventOverlap
from anyep.api.elastic_hints import domains_of


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """The nodes of a group, and the ranks of a node, as far as the environment tells."""
    return domains_of(group)[:2]


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """The ranks that a row reaches over the network, and those that it reaches from there."""
    return domains_of(group, allow_hybrid_mode)[2:]


__all__ = [
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
]
