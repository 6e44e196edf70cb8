"""Normal mode, on every device: dispatch, cached dispatch, worst-case dispatch and combine.

A dispatch exchanges notify messages with counts. Every rank then knows the whole count matrix and the free
windows of all ranks, and all ranks decide the same for each receiver: rows that fit its window go directly to
their final place, others through its rings. A combine sums each token's rows at its source, in rank order;
the call of a rank that owns rows ends when all readers have read them.

This module decides what happens; a backend (`NormalOps`) implements it. Arguments of the user are not checked
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

import torch

from anyep.backends.base import (
    C,
    CombineInput,
    CountedTokens,
    NormalCall,
    NormalOps,
    Payload,
    R,
    R_co,
    Results,
    StartedDispatch,
    Windows,
)
from anyep.control.plane import ControlPlane
from anyep.core.calls import Array, Call, Phase
from anyep.core.headers import MAX_OFFERS, RESULT_ROWS, dtype_word, signature, write_offers
from anyep.core.rings import Rings
from anyep.events import EventHandle, EventOverlap
from anyep.sizes import Config, TokenLayout, align

T = TypeVar("T")
NO_EXPERTS: Final = 0


class Dispatch(NamedTuple, Generic[C]):
    """The checked arguments of a dispatch without a handle."""

    payload: Payload
    counts: C
    config: Config
    num_worst_tokens: int
    expert_alignment: int
    terms: int = 0
    """`core.terms.Terms` as a word; 0 where an API has none. All ranks must have the same."""


class Dispatched(NamedTuple, Generic[R_co]):
    """What a dispatch returns."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    tokens_per_expert: list[int]
    routing: R_co
    event: EventHandle | None


class Combined(NamedTuple):
    """What a combine returns."""

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    event: EventHandle | None


class NormalMode(Generic[R, C]):
    """Normal mode of one rank."""

    def __init__(self, control: ControlPlane, ops: NormalOps[R, C], rings: Rings) -> None:
        self.ops = ops
        self.rings = rings
        self._control = control
        self._num_ranks = control.num_ranks

    @property
    def windows(self) -> Windows:
        return self.ops.windows

    def check_rings(self, config: Config, token: TokenLayout) -> None:
        """Refuse a config whose rings do not fit the Buffer."""
        self.ops.check_config(config)
        self.rings.check(config, token)

    def dispatch(
        self, call: Call, request: Dispatch[C], previous: EventOverlap | None, run_async: bool
    ) -> Dispatched[R]:
        """A dispatch that determines its routing."""
        work = self._dispatch_worst_case if request.num_worst_tokens else self._dispatch_counted
        ops = self.ops.start(call, previous, run_async)

        def whole_call() -> Dispatched[R]:
            payload = self.ops.aligned_payload(request.payload)
            is_aligned = payload is request.payload
            return work(ops, request if is_aligned else request._replace(payload=payload))

        return self._guarded(call, whole_call, checks_ids=request.payload.topk_idx is not None)

    def _dispatch_counted(self, ops: NormalCall[R, C], request: Dispatch[C]) -> Dispatched[R]:
        """Learn the number of rows from the notify messages, then allocate exactly as many."""
        payload, counts, config, *_ = request
        ops.prepare_to_wait()
        header = self._dispatch_header(payload, config, counts.num_experts, request.terms)
        offer_what_is_free(header, self.windows)
        routing = ops.new_routing(payload, counts, config)
        ops.begin()
        ops.notify(header, payload, counts, config, routing, host_waits=True)
        return self._take_counted(ops, request, routing, header)

    def _take_counted(
        self, ops: NormalCall[R, C], request: Dispatch[C], routing: R, header: Array
    ) -> Dispatched[R]:
        """The rest of such a dispatch, once its notify messages are sent."""
        payload = request.payload
        totals = ops.totals(header, payload)
        window = ops.grow(payload, totals) if totals.may_grow else totals.window
        routing = ops.with_rows(routing, totals.num_rows, is_counted=True)
        results = ops.new_results(payload, routing, window)
        event = self._move(ops, request, routing, results, pads=False)
        by_expert = _aligned_counts(totals.tokens_per_expert, request.expert_alignment)
        return _dispatched(results, by_expert, routing, event)

    def _dispatch_worst_case(self, ops: NormalCall[R, C], request: Dispatch[C]) -> Dispatched[R]:
        """The number of rows is given, so the host does not wait."""
        payload, counts, config, num_rows, *_ = request
        header = self._dispatch_header(payload, config, counts.num_experts, request.terms)
        window = offer_exactly(header, self.windows, payload, num_rows)
        routing = ops.with_rows(ops.new_routing(payload, counts, config), num_rows, is_counted=False)
        results = ops.new_results(payload, routing, window)
        ops.begin()
        ops.notify(header, payload, counts, config, routing, host_waits=False)
        event = self._move(ops, request, routing, results, pads=True)
        return _dispatched(results, [], routing, event)

    def _move(
        self, ops: NormalCall[R, C], request: Dispatch[C], routing: R, results: Results, pads: bool
    ) -> EventHandle | None:
        payload = request.payload
        experts_per_rank = request.counts.num_experts // self._num_ranks
        ops.send_rows(payload, routing, results, request.config, experts_per_rank, is_new=True)
        ops.barrier(Phase.RECEIVE)
        ops.unpack(payload, routing, results, is_new=True, pads=pads)
        return ops.end(*_tensors_of(payload))

    def cached_dispatch(
        self,
        call: Call,
        payload: Payload,
        routing: R,
        config: Config,
        previous: EventOverlap | None,
        run_async: bool,
        num_experts: int = NO_EXPERTS,
    ) -> Dispatched[R]:
        """A dispatch along the routing of a handle: short messages, no counts.

        `num_experts` are those of a payload with top-k.
        """
        ops = self.ops.start(call, previous, run_async)

        def whole_call() -> Dispatched[R]:
            rows = self.ops.aligned_payload(payload)
            header = self._dispatch_header(rows, config, num_experts)
            window = offer_exactly(header, self.windows, rows, routing.num_recv_rows)
            results = ops.new_results(rows, routing, window)
            ops.begin()
            ops.notify_by_handle(header, rows, routing)
            experts_per_rank = num_experts // self._num_ranks
            ops.send_rows(rows, routing, results, config, experts_per_rank, is_new=False)
            ops.barrier(Phase.RECEIVE)
            ops.unpack(rows, routing, results, is_new=False, pads=False)
            return _dispatched(results, [], routing, ops.end(*_tensors_of(rows)))

        return self._guarded(call, whole_call)

    def combine(
        self, call: Call, combined: CombineInput[R], previous: EventOverlap | None, run_async: bool
    ) -> Combined:
        """The reverse direction: sum every token's rows at its source."""
        ops = self.ops.start(call, previous, run_async)

        def whole_call() -> Combined:
            rows = self.ops.aligned_input(combined)
            x, weights, num_tokens = rows.x, rows.topk_weights, rows.routing.num_tokens
            out = ops.empty((num_tokens, x.shape[1]), x.dtype)
            out_weights = None
            if weights is not None:
                out_weights = ops.empty((num_tokens, weights.shape[1]), torch.float32)
            header = self._combine_header(rows)
            ops.begin()
            ops.stage(rows, header)
            ops.notify_by_handle(header, None, rows.routing)
            ops.reduce(rows, out, out_weights)
            # x must not change until every reader is done.
            ops.barrier(Phase.ACKNOWLEDGE)
            return Combined(out, out_weights, ops.end(x, weights, out, out_weights, *rows.biases))

        return self._guarded(call, whole_call)

    # Calls like earlier ones, with less work; None where that is not possible

    def counted_again(self, tokens: CountedTokens, config: Config, alignment: int) -> Dispatched[R] | None:
        """The results of a dispatch that counts its rows."""
        done = self.ops.counted_again(tokens, config)
        if done is None:
            return None
        if isinstance(done, StartedDispatch):
            request = Dispatch(done.payload, done.counts, config, 0, alignment)
            rest = done.call, request, done.routing, done.header
            return self._control.guarded(done.started, lambda: self._take_counted(*rest))
        by_expert = _aligned_counts(done.tokens_per_expert, alignment)
        return _dispatched(done.results, by_expert, done.routing, None)

    def _guarded(self, call: Call, work: Callable[[], T], checks_ids: bool = False) -> T:
        done = self._control.guarded(call, work)
        self.ops.raise_earlier(checks_ids)
        return done

    def _dispatch_header(self, payload: Payload, config: Config, num_experts: int, terms: int = 0) -> Array:
        token = payload.token
        return signature(
            row_bytes=token.hidden_bytes,
            dtype=dtype_word(payload.x.dtype),
            num_topk=token.num_topk,
            num_scales=token.num_scales,
            num_experts=num_experts,
            num_channels=config.num_channels,
            ring_rows=self.rings.header_word(config, token),
            routing=terms,
        )

    def _combine_header(self, combined: CombineInput[R]) -> Array:
        token, config = combined.token, combined.config
        header = signature(
            row_bytes=token.hidden_bytes,
            dtype=dtype_word(combined.x.dtype),
            num_topk=token.num_topk,
            num_channels=config.num_channels,
            ring_rows=self.rings.header_word(config, token),
        )
        header[RESULT_ROWS] = combined.x.shape[0]
        return header


def offer_what_is_free(header: Array, windows: Windows) -> None:
    """Offer all free windows; the size that is needed depends on the number of rows, not known yet."""
    write_offers(header, windows.offers(MAX_OFFERS))


def offer_exactly(header: Array, windows: Windows, payload: Payload, num_rows: int) -> int:
    """Allocate a window for a known number of rows, and offer only that one; -1 if there is none."""
    num_bytes = payload.window_bytes(num_rows)
    offset = windows.allocate(num_bytes)
    header[RESULT_ROWS] = num_rows
    if offset is None:
        return -1
    write_offers(header, [(offset, num_bytes)])
    return offset


def _aligned_counts(counts: list[int], alignment: int) -> list[int]:
    """Counts of experts, rounded up to a multiple of `expert_alignment`."""
    return counts if alignment == 1 else [align(count, alignment) for count in counts]


def _tensors_of(payload: Payload) -> tuple[torch.Tensor | None, ...]:
    return payload.x, payload.scales, payload.topk_idx, payload.topk_weights


def _dispatched(
    results: Results, tokens_per_expert: list[int], routing: R, event: EventHandle | None
) -> Dispatched[R]:
    return Dispatched(
        results.x,
        results.scales,
        results.topk_idx,
        results.topk_weights,
        tokens_per_expert,
        routing,
        event,
    )
