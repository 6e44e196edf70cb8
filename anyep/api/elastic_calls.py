"""The calls of `ElasticBuffer` once their arguments are checked: those of normal mode, and what the layouts
of received rows add to them.

A dispatch of normal mode gives compact rows, one per token. What follows it (`_finish`) fills the handle and,
in the expanded layout, copies the rows; what precedes a combine adds up the copies again. On every device
this runs in the order of the calls (`ElasticOps.follow`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from anyep.api.arguments import FLOAT_DTYPES
from anyep.api.elastic_arguments import Streams, Tokens
from anyep.api.elastic_handle import EPHandle
from anyep.api.elastic_nodes import Source, fold, with_tokens, without_tokens
from anyep.backends.base import CombineInput, Payload, Rows
from anyep.backends.expanded import (
    ElasticOps,
    ExpertPlaces,
    Origins,
    OriginTensors,
    RowTensors,
    empty_scales,
)
from anyep.core import elastic_sizes
from anyep.core.calls import Call
from anyep.core.terms import Terms
from anyep.events import EventHandle, EventOverlap
from anyep.modes.normal import Combined, Dispatch, Dispatched, NormalMode
from anyep.sizes import ROW_ALIGNMENT_BYTES, Config
from anyep.topology import Topology

Event = EventHandle | EventOverlap
BARRIER_ROW_BYTES: Final = 16


class Layout(NamedTuple):
    """How received rows are to lie."""

    expands: bool = False
    pads: bool = False
    has_column_major_scales: bool = False


class Received(NamedTuple):
    """What a dispatch returns."""

    rows: Rows
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: EPHandle
    event: EventHandle | None


class First(NamedTuple):
    """The checked arguments of a dispatch without a handle."""

    payload: Payload
    counts: Any
    config: Config
    tokens: Tokens
    kept_idx: torch.Tensor
    """What the handle keeps of the caller's ids."""
    stats: torch.Tensor | None
    waits: bool


class Outputs(NamedTuple):
    """The input of a combine."""

    x: torch.Tensor
    weights: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]
    routing: Any
    ready: EventOverlap | None
    """After this event rows and weights are there."""
    has_weights: bool
    """Whether the caller passed weights."""


class ElasticCalls:
    """The calls of one rank."""

    def __init__(self, normal: NormalMode[Any, Any], ops: ElasticOps, topology: Topology, rank: int) -> None:
        self._normal = normal
        self._ops = ops
        self._rank, self._num_ranks = rank, topology.num_ranks
        self._ranks_per_node = topology.ranks_per_node
        self._has_nodes = topology.num_nodes > 1
        self._last: tuple[Any, Any] | None = None
        """The last handle's tensors, and their routing."""

    def sent(self, payload: Payload) -> Payload:
        """What a first dispatch sends."""
        return with_tokens(payload) if self._has_nodes else payload

    def first(self, call: Call, first: First, layout: Layout, streams: Streams) -> Received:
        """A dispatch that determines its routing."""
        tokens = first.tokens
        has_weights = tokens.topk_weights is not None
        terms = Terms(
            *(tokens.num_max_tokens_per_rank, has_weights, tokens.alignment, first.waits, layout.expands)
        )
        most = 0 if first.waits else tokens.num_max_tokens_per_rank * self._num_ranks
        request = Dispatch(first.payload, first.counts, first.config, most, tokens.alignment, terms.word)
        done = self._normal.dispatch(call, request, None, streams.run_async)
        handle = self._new_handle(first, done, layout)
        sources = None
        if self._has_nodes:
            assert done.scales is not None
            scales, sources = without_tokens(done.scales)
            done = done._replace(scales=scales)
        source = Source.of(handle.routing, sources)
        fill = partial(self._fill_handle, handle, done, source, tokens.topk_idx, first.stats)
        received = self._finish(done, handle, layout, has_weights, streams, fill)
        handle.filled = received.event
        self._last = (handle.routing, done.routing)
        return received

    def routing_of(self, handle: EPHandle) -> Any:
        """The routing of a handle; that of the last dispatch is known."""
        return self._normal.ops.routing_of(handle.routing, self._last)

    def cached(
        self,
        call: Call,
        payload: Payload,
        routing: Any,
        config: Config,
        handle: EPHandle,
        layout: Layout,
        streams: Streams,
    ) -> Received:
        """A dispatch along the routing of a handle."""
        has_weights = payload.topk_weights is not None
        num_experts = handle.num_experts if has_weights else 0
        done = self._normal.cached_dispatch(
            *(call, payload, routing, config, _overlap(streams.previous), streams.run_async, num_experts)
        )
        return self._finish(done, handle, layout, has_weights, streams, None)

    def cached_again(self, x: Any, handle: Any, layout: Layout, config: Config) -> Received | None:
        """A dispatch along a handle with no other argument, made with less work if one like it was made
        before. None if not: then nothing has happened."""
        is_allowed = _is_filled(handle) and layout.expands == handle.do_expand
        if not is_allowed or (layout.pads and not layout.expands):
            return None
        rows = self._normal.ops.dispatch_again(x, handle.routing, config)
        if rows is None:
            return None
        data, scales = rows if isinstance(rows, tuple) else (rows, None)
        done: Dispatched[Any] = Dispatched(data, scales, None, None, [], None, None)
        return self._finish(done, handle, layout, False, Streams(), None)

    def combine_again(self, x: Any, handle: Any, config: Config) -> torch.Tensor | None:
        """The same for the sums of a combine. Expanded rows may have been added up in vain."""
        if not _is_filled(handle):
            return None
        if handle.do_expand:
            if not self._can_reduce(x, handle):
                return None
            x, _, _ = self.prepared(x, None, handle, Streams())
        return self._normal.ops.combine_again(x, handle.routing, config, handle.order)

    def _can_reduce(self, x: Any, handle: EPHandle) -> bool:
        """Whether these are expanded rows that need no other check, and calls may be repeated."""
        return (
            self._normal.ops.is_quiet()
            and not self._has_nodes
            and x.__class__ is torch.Tensor
            and x.dtype in FLOAT_DTYPES
            and x.dim() == 2
            and x.shape[0] == handle.num_expanded_tokens
            and x.shape[1] * x.element_size() % ROW_ALIGNMENT_BYTES == 0
            and x.device == handle.order.device
            and x.layout is torch.strided
            and x.is_contiguous()
            and not (x.requires_grad and torch.is_grad_enabled())
            and not x.is_neg()
        )

    def barrier(self, call: Call, config: Config, device: torch.device) -> None:
        """Wait until all ranks have made this call: a dispatch of no tokens."""
        ops = self._normal.ops
        ids = torch.empty((0, 1), dtype=torch.int64, device=device)
        weights = torch.empty((0, 1), dtype=torch.float32, device=device)
        x = torch.empty((0, BARRIER_ROW_BYTES), dtype=torch.uint8, device=device)
        payload = Payload(x, None, ids, weights, ops.source_bytes)
        layout = ops.layout(ids, self._num_ranks, None, False)
        counts = ops.counts_of(
            *(payload, layout.in_rank, layout.tokens_per_rank, layout.tokens_per_node),
            *(layout.tokens_per_expert, config.num_channels),
        )
        request: Dispatch[Any] = Dispatch(payload, counts, config, 1, 1)
        self._normal.dispatch(call, request, None, False)

    def prepared(
        self,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        handle: EPHandle,
        streams: Streams,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap | None]:
        """The compact rows and weights of a combine, and the event after which they are there."""
        events = (streams.previous, streams.before_epilogue)
        has_nodes = self._has_nodes
        if weights is None and not handle.do_expand and not has_nodes and events == (None, None):
            return x, None, None
        compact_x, compact_weights = x, weights
        outputs = self._normal.ops.outputs
        num_rows, num_topk = handle.num_recv_tokens, handle.topk_idx.shape[1]
        num_weights = num_topk if weights is not None else 0
        if weights is not None or has_nodes:
            compact_weights = outputs((num_rows, num_weights + has_nodes), torch.float32)
        if handle.do_expand:
            compact_x = outputs((num_rows, x.shape[1]), x.dtype)

        def work() -> None:
            found = compact_weights
            if found is not None and has_nodes:
                # The key, beside weights that are contiguous.
                found[:, -1] = handle.recv_src_metadata[:, 1] % num_topk
                found = torch.empty((num_rows, num_topk), dtype=torch.float32, device=x.device)
            if handle.do_expand:
                expanded = RowTensors(x, weights)
                compact = RowTensors(compact_x, found if weights is not None else None)
                received = handle.psum_num_recv_tokens_per_scaleup_rank
                self._ops.reduce(expanded, received, _places_of(handle), compact)
            elif weights is not None:
                assert found is not None
                # The weights of other ranks' experts mean nothing.
                found.copy_(torch.where(handle.recv_topk_idx >= 0, weights, 0.0))
            if has_nodes and weights is not None:
                assert compact_weights is not None
                assert found is not None
                compact_weights[:, :-1] = found

        ready = self._ops.follow(work, events, streams.run_async)
        return compact_x, compact_weights, _overlap(ready)

    def combine(
        self,
        call: Call,
        outputs: Outputs,
        handle: EPHandle,
        config: Config,
        run_async: bool,
    ) -> Combined:
        """Add up what `prepared` made."""
        done = self._normal.combine(call, self.input_of(outputs, handle, config), outputs.ready, run_async)
        if not self._has_nodes:
            return done
        if not outputs.has_weights:
            return done._replace(topk_weights=None)
        keyed = done.topk_weights
        assert keyed is not None
        weights = torch.empty((len(keyed), keyed.shape[1] - 1), dtype=keyed.dtype, device=keyed.device)

        def work() -> None:
            weights.copy_(keyed[:, :-1])

        return Combined(done.x, weights, self._ops.follow(work, (done.event,), run_async))

    def input_of(self, outputs: Outputs, handle: EPHandle, config: Config) -> CombineInput[Any]:
        order = None if self._has_nodes else handle.order
        return CombineInput(
            *(outputs.x, outputs.routing, outputs.weights, outputs.biases, config, order),
            is_keyed=self._has_nodes,
        )

    def after(self, streams: Streams) -> EventOverlap | None:
        """An event after what a call waits for."""
        events = (streams.previous, streams.before_epilogue)
        return _overlap(self._ops.follow(_nothing, events, streams.run_async))

    def combine_unsummed(
        self,
        call: Call,
        next_call: Callable[[], Call],
        outputs: Outputs,
        handle: EPHandle,
        config: Config,
        run_async: bool,
    ) -> Combined:
        """Add up expanded rows at their sources only, with one rounding: a call for each choice, which brings
        back the row of this choice's rank and zeros of the others."""
        x, positions = outputs.x, handle.recv_src_metadata[:, 2:]
        num_tokens, num_topk = handle.topk_idx.shape
        num_rows, hidden = handle.num_recv_tokens, x.shape[1]
        total = torch.zeros((num_tokens, hidden), dtype=torch.float32, device=x.device)
        sums, weights, ready, event = (
            self._ops.empty((num_tokens, hidden), x.dtype),
            None,
            outputs.ready,
            None,
        )
        for choice in range(num_topk):
            rows = self._normal.ops.outputs((num_rows, hidden), x.dtype)
            row_weights = None
            if choice == 0 and outputs.weights is not None:
                row_weights = self._normal.ops.outputs((num_rows, num_topk), torch.float32)
            take = partial(_take, outputs, positions, choice, rows, row_weights)
            ready = _overlap(self._ops.follow(take, (ready,), run_async))
            one = CombineInput(rows, outputs.routing, row_weights, (), config, handle.order)
            done = self._normal.combine(call if choice == 0 else next_call(), one, ready, run_async)
            weights = done.topk_weights if choice == 0 else weights
            is_last = choice == num_topk - 1
            add = partial(
                _add, total, done.x, outputs.biases if choice == 0 else (), sums if is_last else None
            )
            event = self._ops.follow(add, (done.event,), run_async)
        return Combined(sums, weights, event)

    def _new_handle(self, first: First, done: Dispatched[Any], layout: Layout) -> EPHandle:
        """A handle whose tensors are still to be filled."""
        tokens, ids = first.tokens, done.topk_idx
        assert ids is not None
        num_local = tokens.num_experts // self._num_ranks
        num_rows, num_topk = ids.shape
        num_expanded = sum(done.tokens_per_expert)
        if not first.waits:
            num_expanded = elastic_sizes.expanded_rows(num_rows, num_topk, num_local, tokens.alignment)
        empty = partial(torch.empty, dtype=torch.int32, device=ids.device)
        return EPHandle(
            do_expand=layout.expands,
            num_experts=tokens.num_experts,
            expert_alignment=tokens.alignment,
            num_max_tokens_per_rank=tokens.num_max_tokens_per_rank,
            num_sms=first.config.num_sms,
            topk_idx=first.kept_idx,
            num_recv_tokens=num_rows,
            num_expanded_tokens=num_expanded,
            num_recv_tokens_per_expert_list=done.tokens_per_expert if first.waits else [],
            psum_num_recv_tokens_per_scaleup_rank=empty(self._ranks_per_node),
            psum_num_recv_tokens_per_expert=empty(num_local),
            num_unaligned_recv_tokens_per_expert=empty(num_local),
            recv_src_metadata=empty((num_rows, 2 + num_topk)),
            dst_buffer_slot_idx=empty(tuple(tokens.topk_idx.shape)),
            routing=done.routing.tensors(),
            # Of the compact layout the caller gets them, and may change them.
            recv_topk_idx=empty((0, num_topk), dtype=ids.dtype) if layout.expands else torch.empty_like(ids),
            order=empty((tokens.topk_idx.shape[0], self._num_ranks)),
        )

    def _fill_handle(
        self,
        handle: EPHandle,
        done: Dispatched[Any],
        source: Source,
        topk_idx: torch.Tensor,
        stats: torch.Tensor | None,
    ) -> None:
        ids = done.topk_idx
        assert ids is not None
        received = handle.psum_num_recv_tokens_per_scaleup_rank
        # Not of the kept ids, which may be the caller's and may change.
        origins = Origins(
            *(*source, topk_idx, ids, self._rank, handle.num_experts, handle.num_max_tokens_per_rank)
        )
        kept_ids = None if handle.do_expand else handle.recv_topk_idx
        by_rank = torch.empty_like(source.rank_prefix[0]) if self._has_nodes else received
        tensors = OriginTensors(
            by_rank, handle.recv_src_metadata, handle.dst_buffer_slot_idx, handle.order, kept_ids
        )
        self._ops.tell_origins(origins, tensors)
        if self._has_nodes:
            fold(by_rank, received)
        places = _places_of(handle)
        self._ops.place(ids, received, handle.expert_alignment, places, handle.do_expand)
        if stats is not None:
            stats.add_(places.counts)

    def _finish(
        self,
        done: Dispatched[Any],
        handle: EPHandle,
        layout: Layout,
        has_weights: bool,
        streams: Streams,
        fill: Callable[[], None] | None,
    ) -> Received:
        """Fill the handle and lay the rows out as the caller wants them, after the call."""
        compact = RowTensors(done.x, done.topk_weights if has_weights else None, done.scales)
        out, expanded = compact, None
        column_major = layout.has_column_major_scales
        if layout.expands:
            out = expanded = self._new_expanded(compact, handle.num_expanded_tokens, column_major)
        elif compact.scales is not None and (column_major or not compact.scales.is_contiguous()):
            out = compact._replace(scales=_empty_scales_like(compact.scales, len(compact.x), column_major))

        def work() -> None:
            if fill is not None:
                fill()
            if expanded is not None:
                received = handle.psum_num_recv_tokens_per_scaleup_rank
                padded_to = handle.expert_alignment if layout.pads else 0
                scales = compact.scales.contiguous() if compact.scales is not None else None
                contiguous = compact._replace(scales=scales)
                self._ops.expand(contiguous, received, _places_of(handle), expanded, padded_to)
            elif out.scales is not None and out.scales is not compact.scales:
                assert compact.scales is not None
                out.scales.copy_(compact.scales)

        event = self._ops.follow(work, (done.event, streams.before_epilogue), streams.run_async)
        ids = None
        if not layout.expands:
            # A later call of the caller's may change what it got.
            ids = done.topk_idx if fill is not None else handle.recv_topk_idx.clone()
        rows: Rows = out.x if out.scales is None else (out.x, out.scales)
        return Received(rows, ids, out.weights, handle, event)

    def _new_expanded(self, compact: RowTensors, num_rows: int, column_major: bool) -> RowTensors:
        x = self._ops.empty((num_rows, compact.x.shape[1]), compact.x.dtype)
        weights = None if compact.weights is None else self._ops.empty((num_rows,), torch.float32)
        scales = compact.scales
        if scales is not None:
            scales = _empty_scales_like(scales, num_rows, column_major)
        return RowTensors(x, weights, scales)


def _is_filled(handle: Any) -> bool:
    return handle.__class__ is EPHandle and handle.filled is None


def _nothing() -> None:
    """Only events are waited for."""


def _take(
    outputs: Outputs,
    positions: torch.Tensor,
    choice: int,
    rows: torch.Tensor,
    row_weights: torch.Tensor | None,
) -> None:
    """Take the row of a choice, zeros where it has none; and the weights of all choices."""
    has_row, at = positions >= 0, positions.clamp(min=0).long()
    if len(outputs.x) == 0:
        rows.zero_()
    else:
        rows.copy_(torch.where(has_row[:, choice, None], outputs.x[at[:, choice]], 0))
    if row_weights is not None:
        assert outputs.weights is not None
        if len(outputs.x) == 0:
            row_weights.zero_()
        else:
            row_weights.copy_(torch.where(has_row, outputs.weights[at], 0.0))


def _add(
    total: torch.Tensor, rows: torch.Tensor, biases: Sequence[torch.Tensor], sums: torch.Tensor | None
) -> None:
    """Add biases and rows in float32; at the end the sums are rounded."""
    for part in (*biases, rows):
        total.add_(part)
    if sums is not None:
        sums.copy_(total)


def _empty_scales_like(scales: torch.Tensor, num_rows: int, column_major: bool) -> torch.Tensor:
    return empty_scales(num_rows, scales.shape[1], scales.dtype, column_major, scales.device)


def _places_of(handle: EPHandle) -> ExpertPlaces:
    return ExpertPlaces(
        handle.num_unaligned_recv_tokens_per_expert,
        handle.psum_num_recv_tokens_per_expert,
        handle.recv_src_metadata[:, 2:],
    )


def _overlap(event: Event | None) -> EventOverlap | None:
    return EventOverlap(event) if isinstance(event, EventHandle) else event


def wait_for(events: Sequence[Event | None]) -> None:
    """Wait on the host."""
    for event in events:
        if event is not None:
            event.current_stream_wait()
