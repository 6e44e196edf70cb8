"""The handles of `HybridEPBuffer`: tuples of what its programs expect, with the routing that AnyEP uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anyep.api.elastic_handle import EPHandle
from anyep.errors import InvalidCall


@dataclass
class BufferConfig:
    """The sizes of a buffer, as programs read and update them."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int
    pad_multiple: int = 1
    use_fp8: bool = False


@dataclass(frozen=True)
class Configurer:
    """Where programs find the sizes of a buffer."""

    buffer_config: BufferConfig


class HybridHandle(tuple[Any, ...]):
    """A handle: `dispatch` gives 7 parts, `dispatch_with_permute` 11. Parts that AnyEP does not need are
    None."""

    routing: EPHandle
    """What the calls of AnyEP use."""

    @staticmethod
    def of(parts: tuple[Any, ...], routing: EPHandle) -> HybridHandle:
        handle = HybridHandle(parts)
        handle.routing = routing
        return handle


def checked_handle(handle: Any, is_permuted: bool) -> EPHandle:
    """The routing of a handle of the right call."""
    maker = "dispatch_with_permute" if is_permuted else "dispatch"
    routing = getattr(handle, "routing", None) if isinstance(handle, HybridHandle) else None
    if not isinstance(routing, EPHandle):
        raise InvalidCall(
            f"handle is of type {type(handle).__name__}: pass what {maker} of HybridEPBuffer returned last,"
            f" and not a copy of its parts"
        )
    if routing.do_expand is not is_permuted:
        raise InvalidCall(
            f"the handle was not made by {maker}: pass the handle of the call that gave the rows"
        )
    return routing
