"""Checks of the arguments that users pass to `ElasticBuffer`; each message says what to do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from anyep import sizes
from anyep.api.arguments import FLOAT_DTYPES, check_biases, check_tensor, check_topk_idx, check_x
from anyep.api.elastic_handle import EPHandle
from anyep.api.elastic_hints import domains_of
from anyep.core import elastic_sizes
from anyep.core.elastic_sizes import BUFFER_ALIGNMENT
from anyep.core.terms import MAX_ALIGNMENT
from anyep.errors import InvalidCall, NotSupported, expert_twice, no_expert, whole_number
from anyep.events import EventHandle, EventOverlap
from anyep.sizes import check_num_experts
from anyep.topology import Topology


class Streams(NamedTuple):
    """What a call waits for, and whether the caller waits for it."""

    previous: EventHandle | EventOverlap | None = None
    before_epilogue: EventHandle | EventOverlap | None = None
    run_async: bool = False


class Tokens(NamedTuple):
    """The checked routing of a dispatch without a handle."""

    topk_idx: torch.Tensor
    """With -1 for every choice without an expert."""
    topk_weights: torch.Tensor | None
    num_experts: int
    num_max_tokens_per_rank: int
    alignment: int


def checked_num_bytes(num_bytes: Any) -> int:
    """The size of a buffer as the user gives it."""
    value = whole_number("num_bytes", num_bytes, minimum=BUFFER_ALIGNMENT)
    if value % BUFFER_ALIGNMENT:
        raise InvalidCall(f"num_bytes is {value}: it must be a multiple of {BUFFER_ALIGNMENT} (2 MiB)")
    return value


def checked_streams(previous: Any, before_epilogue: Any, run_async: Any) -> Streams:
    """The events that a call follows: `EventHandle`s, or what calls return."""
    for name, event in (
        ("previous_event", previous),
        ("previous_event_before_epilogue", before_epilogue),
    ):
        if event is not None and not isinstance(event, EventHandle | EventOverlap):
            raise InvalidCall(
                f"{name} is of type {type(event).__name__}: pass what ElasticBuffer.capture() returned"
            )
    return Streams(previous, before_epilogue, bool(run_async))


def checked_num_sms(num_sms: Any) -> int:
    """The number of SMs, even as a Config needs it; 0 leaves the choice to the Buffer."""
    value = whole_number("num_sms", num_sms, minimum=0)
    return value + value % 2


def checked_tokens(
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    num_experts: Any,
    num_max_tokens_per_rank: Any,
    expert_alignment: Any,
    num_ranks: int,
    reads_ids: bool,
) -> Tokens:
    """The routing of a dispatch without a handle. If the host does not read the ids, kernels check them."""
    if topk_idx is None:
        raise InvalidCall("topk_idx is missing: pass the experts of each token, or the handle of a dispatch")
    if num_experts is None:
        raise InvalidCall("num_experts is missing: pass the number of experts of all ranks together")
    rows = x[0] if isinstance(x, tuple | list) and x else x
    num_tokens = rows.shape[0] if isinstance(rows, torch.Tensor) and rows.dim() else None
    ids = check_topk_idx(topk_idx, num_tokens)
    experts = check_num_experts(num_experts, num_ranks)
    most = whole_number("num_max_tokens_per_rank", num_max_tokens_per_rank, minimum=1)
    if ids.shape[0] > most:
        raise InvalidCall(
            f"x has {ids.shape[0]} tokens, but num_max_tokens_per_rank is {most}:"
            f" pass a larger one on all ranks"
        )
    if most * num_ranks * ids.shape[1] >= 2**31:
        raise InvalidCall(
            f"num_max_tokens_per_rank is {most}: with {num_ranks} ranks and top-{ids.shape[1]} the rows"
            f" cannot be numbered in 31 bits; pass a smaller one"
        )
    if topk_weights is not None:
        topk_weights = check_tensor("topk_weights", topk_weights, (torch.float32,), tuple(ids.shape))
        topk_weights = topk_weights.contiguous()
    alignment = 1 if expert_alignment is None else whole_number("expert_alignment", expert_alignment, 1)
    if alignment > MAX_ALIGNMENT:
        raise InvalidCall(f"expert_alignment is {alignment}: it must be at most {MAX_ALIGNMENT}")
    local_experts = experts // num_ranks
    if elastic_sizes.expanded_rows(most * num_ranks, ids.shape[1], local_experts, alignment) >= 2**31:
        raise InvalidCall(
            f"expert_alignment is {alignment}: the rows of {local_experts} local experts cannot be numbered"
            f" in 31 bits; pass a smaller one"
        )
    ids = _checked_ids(ids, experts) if reads_ids else ids.clamp(min=-1)
    return Tokens(ids, topk_weights, experts, most, alignment)


def _checked_ids(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Ids below 0 become -1; those of no expert, and an expert chosen twice by a token, are refused."""
    if ids.numel() == 0:
        return ids
    if int(ids.max()) >= num_experts:
        token, column = (int(place[0]) for place in torch.where(ids >= num_experts))
        raise no_expert(token, column, int(ids[token, column]), num_experts)
    if int(ids.min()) < -1:
        ids = ids.clamp(min=-1)
    ordered = ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        token, place = (int(index[0]) for index in torch.where(twice))
        raise expert_twice(token, int(ordered[token, place]))
    return ids


def checked_handle(handle: Any, num_ranks: int) -> EPHandle:
    """A handle of a dispatch of a group of so many ranks."""
    if not isinstance(handle, EPHandle):
        raise InvalidCall(
            f"handle is of type {type(handle).__name__}: it must be the EPHandle that dispatch returned"
        )
    if handle.num_experts % num_ranks:
        raise InvalidCall("the handle is of a group with another number of ranks")
    handle.wait()
    return handle


def check_same(handle: EPHandle, **given: Any) -> None:
    """With a handle its numbers hold: refuse others."""
    for name, value in given.items():
        if value is not None and value != getattr(handle, name):
            raise InvalidCall(
                f"{name} is {value!r}, but the handle was made with {getattr(handle, name)!r}: leave it out"
            )


def check_layout(handle: EPHandle, do_expand: Any) -> None:
    """Rows go where they went in the dispatch that made the handle."""
    if bool(do_expand) != handle.do_expand:
        raise InvalidCall(
            f"do_expand is {bool(do_expand)}, but the handle was made with do_expand={handle.do_expand}:"
            f" pass the same"
        )


def checked_stats(stats: Any, num_local_experts: int) -> torch.Tensor | None:
    if stats is None:
        return None
    name = "cumulative_local_expert_recv_stats"
    return check_tensor(name, stats, (torch.int32,), (num_local_experts,))


def checked_outputs(
    x: Any, topk_weights: Any, bias: Any, handle: EPHandle
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """The rows, the weights and the biases of a combine."""
    rows = check_x("x", x, FLOAT_DTYPES)
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.recv_src_metadata.shape[0]
    if rows.shape[0] != num_rows:
        raise InvalidCall(f"x has {rows.shape[0]} rows, but the handle's dispatch gave {num_rows}")
    num_tokens, num_topk = handle.topk_idx.shape
    if topk_weights is not None:
        shape = (num_rows,) if handle.do_expand else (num_rows, num_topk)
        topk_weights = check_tensor("topk_weights", topk_weights, (torch.float32,), shape).contiguous()
    return rows, topk_weights, check_biases(bias, (num_tokens, rows.shape[1]), rows.dtype)


def ring_bytes(num_bytes: int, hidden: int, group: Any, ranks_per_node: int | None) -> tuple[int, int]:
    """The bytes of rings within a node, which carry rows where windows have no room, at most those of the
    buffer; and of rings between nodes, as many as they need."""
    num_ranks = group.size()
    per_node = ranks_per_node or domains_of(group).num_nvlink_ranks
    config = sizes.get_dispatch_config(num_ranks, sizes.NUM_DEFAULT_SMS)
    row_bytes = sizes.align(max(hidden, 1) * 4, 16)
    within = config.get_nvl_buffer_size_hint(row_bytes, num_ranks, ranks_per_node=per_node)
    between = config.get_rdma_buffer_size_hint(row_bytes, num_ranks, ranks_per_node=per_node)
    alignment = sizes.NUM_BUFFER_ALIGNMENT_BYTES
    return min(num_bytes, sizes.align(within, alignment)), sizes.align(between, alignment)


def check_nodes(
    topology: Topology, device: torch.device, allow_hybrid_mode: bool, allow_multiple_reduction: bool
) -> None:
    """Refuse what does not work on several nodes."""
    if topology.num_nodes == 1:
        return
    nodes = f"ElasticBuffer on {topology.num_nodes} nodes"
    if device.type != "cpu":
        raise NotSupported(
            f"{nodes} works on CPUs so far: use anyep.Buffer; programs written for deep_ep choose it where"
            f" ANYEP_DEEP_EP_API=v1 hides ElasticBuffer from them"
        )
    if not allow_hybrid_mode or not allow_multiple_reduction:
        name = "allow_multiple_reduction" if allow_hybrid_mode else "allow_hybrid_mode"
        raise NotSupported(f"{nodes} adds up the rows of each node there: leave {name}=False out")
