"""`deep_ep._C`: what others import from deep_ep's compiled part since version 2."""

# ruff: noqa: N999 - the name that deep_ep gave it

from anyep import Buffer, Config, EventHandle, topk_idx_t
from anyep.core.elastic_sizes import BUFFER_ALIGNMENT

is_sm90_compiled = Buffer.is_sm90_compiled


def get_elastic_buffer_alignment() -> int:
    """The sizes of an `ElasticBuffer` are multiples of so many bytes."""
    return BUFFER_ALIGNMENT


__all__ = ["Config", "EventHandle", "get_elastic_buffer_alignment", "is_sm90_compiled", "topk_idx_t"]
