"""`deep_ep.hybrid_ep_buffer`: the class of the hybrid-ep branch, and the map of a routing."""

from anyep import HybridEPBuffer
from anyep.api.hybrid_routing import indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
