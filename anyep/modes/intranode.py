"""Normal mode on one node: dispatch and combine between ranks that share memory.

A dispatch: letters with counts; every rank then knows the whole count matrix and everyone's free windows, and
decides for each receiver alike: rows that fit its window go straight to their final place, others through its
rings. A combine: each source reads the rows of its tokens where they lie at its peers, adds them up in rank
order, and says so; an owner's call ends when all have read. Rows that lie in no window go through rings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from anyep.errors import AnyEPError, Disagreement, InvalidCall, no_expert
from anyep.events import EventHandle, EventOverlap
from anyep.layout import SOURCE_INDEX_BYTES, ControlRegion, RingArea, Window, window_of
from anyep.modes.conversation import Array, Call, Conversation, Stall, Topic
from anyep.modes.letters import (
    NUM_OFFERS,
    OFFERS,
    RESULT_ROWS,
    ROUTING,
    WEIGHTS_OFFSET,
    X_OFFSET,
    dtype_word,
    signature,
)
from anyep.modes.offers import dispatch_header, offer_exactly, offer_what_is_free
from anyep.modes.ring_areas import RingAreas
from anyep.modes.routing import Routing, checked_routing, difference_between, with_digests
from anyep.modes.status import Phase, name_of_call
from anyep.modes.windows import WarmMemory, WindowHeap
from anyep.sizes import Config, TokenLayout, align, token_layout
from anyep.topology import Topology

WORTH_SPLITTING_BYTES = 1 << 20
WORTH_STREAMING_BYTES = 1 << 22
MIN_RING_ROWS = 2
NO_SOURCES = np.zeros(0, np.int32)
NO_IDS = np.zeros((0, 0), np.int64)
NO_WEIGHTS = np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class Payload:
    """What a dispatch sends: rows, perhaps with scales, perhaps with top-k ids and weights."""

    x: torch.Tensor
    scales: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    source_bytes: int = SOURCE_INDEX_BYTES
    """What is kept of each received row's origin."""

    @cached_property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @cached_property
    def token(self) -> TokenLayout:
        num_scales = self.scales.shape[1] if self.scales is not None else 0
        num_topk = self.topk_idx.shape[1] if self.topk_idx is not None else 0
        return token_layout(self.x.shape[1] * self.x.element_size(), num_scales, num_topk)

    def window(self, num_rows: int) -> Window:
        """The window of a receiver that gets so many rows."""
        token = self.token
        return window_of(num_rows, token.hidden_bytes, token.num_topk, token.num_scales, self.source_bytes)

    @cached_property
    def bytes_per_row(self) -> Array:
        return np.array(self.window(1).sizes, np.int64)

    @cached_property
    def ids(self) -> Array:
        return self.topk_idx.numpy() if self.topk_idx is not None else NO_IDS

    def arguments(self, experts_per_rank: int) -> tuple[Any, ...]:
        """What the sending kernels take."""
        scales = self.scales
        return (
            self.x.data_ptr(),
            self.token.hidden_bytes,
            *((scales.data_ptr(), *scales.stride(), scales.shape[1]) if scales is not None else (0, 0, 0, 0)),
            self.ids,
            self.topk_weights.numpy() if self.topk_weights is not None else NO_WEIGHTS,
            experts_per_rank,
        )


class Outputs(NamedTuple):
    """What a combine adds up: the experts' rows, perhaps weights, where they go, what the sums start from."""

    x: torch.Tensor
    routing: Any
    """A `Routing`, or that of the mode or of the device that the rows are on."""
    topk_weights: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]
    config: Config


class Received(NamedTuple):
    """What a dispatch brought."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    tokens_per_expert: list[int]
    routing: Any
    """A `Routing`, or that of the mode or of the device that the rows are on."""
    event: EventHandle | None


class Combined(NamedTuple):
    """What a combine brought."""

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    event: EventHandle | None


class Results(NamedTuple):
    """What a dispatch fills. x may lie in a window; what came beside the rows is copied out of it."""

    x: torch.Tensor
    source: Array
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    scales: torch.Tensor | None

    def addresses(self) -> tuple[int, int, int]:
        """Of ids, weights and scales; 0 where there are none."""
        parts = (self.topk_idx, self.topk_weights, self.scales)
        return tuple(part.data_ptr() if part is not None else 0 for part in parts)  # type: ignore[return-value]


class Intranode:
    """Normal mode of one rank, on one node. It does not check what the user passed; `Buffer` does."""

    source_bytes = SOURCE_INDEX_BYTES
    """What a row's window tells of its origin."""

    def __init__(
        self,
        backend: Any,
        conversation: Conversation,
        control: ControlRegion,
        topology: Topology,
        heaps: list[Any],
        window_blocks: dict[int, Any],
        num_nvl_bytes: int,
        stream: Any,
        team: Any,
        memory: WarmMemory,
    ) -> None:
        self.conversation = conversation
        self.stream = stream
        self.windows = WindowHeap(window_blocks[conversation.rank])
        self._memory = memory
        self._ring_addresses: _RingAddresses | None = None
        self._areas = RingAreas(control.num_bytes, num_nvl_bytes, topology.ranks_per_node, topology.num_nodes)
        self._backend = backend
        self._rank = conversation.rank
        self._num_ranks = conversation.num_ranks
        self._node_ranks = topology.ranks_on(topology.node_of(self._rank))
        self._control = control
        self._heap_addresses = np.array([heap.address for heap in heaps], np.int64)
        # Calls may go on when the Buffer has been dropped: they know windows by their addresses alone.
        self._window_blocks = window_blocks
        # Windows are for the ranks of this node; of others they are nowhere.
        self._window_bases = np.zeros(self._num_ranks, np.int64)
        for rank, block in window_blocks.items():
            self._window_bases[rank] = block.address
        self._team = team
        self._dtype_codes = {
            torch.bfloat16: backend.BF16,
            torch.float16: backend.FP16,
            torch.float32: backend.FP32,
        }
        # Where each call's decision is written; the calls of a stream follow each other.
        self._num_rows = np.empty(self._num_ranks, np.int64)
        self._offsets = np.empty(self._num_ranks, np.int64)
        self._places = np.empty((self._num_ranks, 5), np.int64)
        no_rows = np.zeros((self._num_ranks, self._num_ranks), np.int32)
        self._no_counts = LetterCounts(no_rows, no_rows, no_rows)
        # Letters without counts by channel and by expert.
        no_channels = np.zeros((self._num_ranks, 0), np.int32)
        self._nothing_said = no_channels, np.zeros(0, np.int32)
        self._nothing_read = no_channels, np.zeros(0, np.int64)
        self._said = no_channels
        """What all handles say, in a call by handle."""
        arrival, pulled = control.block("window arrival"), control.block("window pulled")
        own_index = topology.nvl_rank_of(self._rank)
        self._arrival_at_peers = conversation.counters_at(self._node_ranks, arrival, own_index)
        self._own_arrival = conversation.counters_of(arrival)
        self._pulled_at_peers = conversation.counters_at(self._node_ranks, pulled, own_index)
        self._own_pulled = conversation.counters_of(pulled)

    # What a Buffer asks for before and after calls

    def before(self, run_async: bool) -> None:
        """Raise what went wrong in an earlier call beside the caller that nobody has waited for."""
        if not run_async:
            self.stream.synchronize()
        self.stream.raise_unheard()

    def wait_until_readable(self, previous: EventOverlap | None) -> None:
        """Wait until the host may read what a caller passed."""
        if previous is not None:
            previous.current_stream_wait()

    def refuse(self, call: Call, error: AnyEPError) -> None:
        """Tell the peers that this rank's call was wrong."""
        self.stream.run(lambda: self.conversation.refuse(call, error))

    def check_config(self, config: Config, token: TokenLayout) -> None:
        """Any number of channels works: they are turns of a loop."""

    def default_config(self, config: Config) -> Config:
        return config

    def stop(self) -> None:
        """End the waits of calls that are still under way."""
        self.conversation.stop()

    @property
    def is_idle(self) -> bool:
        idle: bool = self.stream.is_idle
        return idle

    def check_can_close(self) -> None:
        """Calls that are under way can always be waited for."""

    @staticmethod
    def free_what_died() -> None:
        """Memory is given back where it dies."""

    def close_later(self, low_latency: Any) -> None:
        """Close after all calls, without waiting for them; they hold all that they need."""
        self.stream.close_after(self.conversation.close)

    def close(self, low_latency: Any) -> None:
        """Finish the calls of both modes that are under way, and give back what they needed."""
        self.stream.close()
        self._team.close()

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous: EventOverlap | None, run_async: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventHandle | None]:
        """Count tokens per rank, per node (None if there is one) and per expert, and mark which token goes to
        which rank."""
        num_ranks = self._num_ranks
        tokens_per_rank = torch.empty(num_ranks, dtype=torch.int32, device="cpu")
        tokens_per_expert = torch.empty(num_experts, dtype=torch.int32, device="cpu")
        in_rank = torch.empty((topk_idx.shape[0], num_ranks), dtype=torch.bool, device="cpu")
        tokens_per_node = self._new_node_counts()

        def count() -> None:
            self.wait_until_readable(previous)
            wrong = self._backend.count_layout(
                topk_idx.numpy(),
                num_experts // num_ranks,
                tokens_per_rank.numpy(),
                tokens_per_expert.numpy(),
                in_rank.numpy(),
            )
            if wrong >= 0:
                raise wrong_id(topk_idx, wrong, num_experts)
            if tokens_per_node is not None:
                self._count_nodes(in_rank, tokens_per_node)

        event = None
        if run_async:
            event = self.stream.submit(count)
        else:
            count()
        return tokens_per_rank, tokens_per_node, tokens_per_expert, in_rank, event

    def _new_node_counts(self) -> torch.Tensor | None:
        """Where the tokens that go to each node are to be counted."""
        return None

    def _count_nodes(self, in_rank: torch.Tensor, counts: torch.Tensor) -> None:
        """Count the tokens that go to each node, each once."""

    def routing_of(self, handle: Any, last: tuple[Any, Routing] | None) -> Routing:
        """What a handle says; the very tuple that the last dispatch returned needs no unpacking."""
        if last is not None and handle is last[0]:
            return with_digests(self._backend, last[1], self._rank)
        return checked_routing(self._backend, handle, self._rank, self._num_ranks)

    def counts_of(
        self,
        payload: Payload,
        in_rank: torch.Tensor,
        per_rank: torch.Tensor,
        per_node: Any,
        per_expert: torch.Tensor,
        num_channels: int,
    ) -> Counts:
        """Where each token's rows go; a caller's counts that contradict each other are refused.

        On one node nobody looks at those by node.
        """
        places, wrong = self._place(in_rank, per_rank, num_channels)
        if wrong >= 0:
            raise InvalidCall(
                f"num_tokens_per_rank says {int(per_rank[wrong])} for rank {wrong}, but is_token_in_rank"
                f" marks {places.by_rank[wrong]}: pass both from one get_dispatch_layout"
            )
        counts = per_expert.numpy()
        if payload.topk_idx is not None:
            wrong = self._backend.first_contradiction(payload.ids, counts, places.in_rank)
            if wrong >= len(counts):
                raise wrong_id(payload.topk_idx, wrong - len(counts), len(counts))
            if wrong >= 0:
                raise InvalidCall(
                    f"num_tokens_per_expert says {int(per_expert[wrong])} for expert {wrong}, but topk_idx"
                    f" has another number: pass both from one get_dispatch_layout"
                )
            if wrong < -1:
                token, rank = divmod(-2 - wrong, self._num_ranks)
                raise InvalidCall(
                    f"topk_idx and is_token_in_rank disagree whether token {token} goes to rank {rank}:"
                    f" pass both from one get_dispatch_layout"
                )
        return Counts(places, counts)

    def _place(
        self, is_token_in_rank: torch.Tensor, tokens_per_rank: torch.Tensor, num_channels: int
    ) -> tuple[Places, int]:
        """Where each token's rows go, and the first rank whose count is not `tokens_per_rank` (or -1)."""
        rank_counts = np.empty(self._num_ranks, np.int32)
        channel_counts = np.empty((self._num_ranks, num_channels), np.int32)
        in_rank = is_token_in_rank.numpy()
        position = np.empty(in_rank.shape, np.int32)
        wrong = self._backend.place_tokens(
            in_rank, tokens_per_rank.numpy(), rank_counts, channel_counts, position
        )
        return Places(in_rank, rank_counts, channel_counts, position), int(wrong)

    # Dispatch

    def dispatch(
        self,
        call: Call,
        payload: Payload,
        counts: Counts,
        config: Config,
        num_worst_tokens: int,
        expert_alignment: int,
        previous: EventOverlap | None,
        run_async: bool,
    ) -> Received:
        """A dispatch that finds out its routing; `previous` has come already."""
        what = (call, payload, *counts, config)
        if num_worst_tokens:
            return self.conversation.guarded(
                call, lambda: self._dispatch_worst_case(*what, num_worst_tokens, run_async)
            )
        return self.conversation.guarded(
            call, lambda: self._dispatch_as_counted(*what, expert_alignment, run_async)
        )

    def _dispatch_as_counted(
        self,
        call: Call,
        payload: Payload,
        places: Places,
        tokens_per_expert: Array,
        config: Config,
        expert_alignment: int,
        run_async: bool,
    ) -> Received:
        """The letters tell how many rows come; then there is a place for each of them."""
        # What is offered must still be free when the counts are known.
        self.stream.synchronize()
        header = self._dispatch_header(payload, config, len(tokens_per_expert))
        offer_what_is_free(header, self.windows)
        routing = self._new_routing(places)
        counts = self._notify(call, header, places, tokens_per_expert, routing)
        decision = self._choose_windows(self.conversation.headers, counts, payload)
        window = int(decision.offsets[self._rank])
        if window >= 0:
            self.windows.allocate_at(window, payload.window(decision.num_rows).num_bytes)
        routing = self._with_rows(routing, decision.num_rows, is_counted=True)
        results = self._new_results(payload, routing, window)
        experts_per_rank = len(tokens_per_expert) // self._num_ranks

        def transfer() -> None:
            self._transfer(call, payload, routing, results, decision, config, experts_per_rank)

        event = self._run(call, transfer, run_async)
        by_expert = counts.by_expert.tolist()
        if expert_alignment > 1:
            by_expert = [align(count, expert_alignment) for count in by_expert]
        return _received(results, by_expert, routing, event)

    def _dispatch_worst_case(
        self,
        call: Call,
        payload: Payload,
        places: Places,
        tokens_per_expert: Array,
        config: Config,
        num_worst_tokens: int,
        run_async: bool,
    ) -> Received:
        """The number of rows is given, so the call can go on by itself without waiting for anything first."""
        header = self._dispatch_header(payload, config, len(tokens_per_expert))
        window = offer_exactly(header, self.windows, payload, num_worst_tokens)
        routing = self._with_rows(self._new_routing(places), num_worst_tokens, is_counted=False)
        results = self._new_results(payload, routing, window)
        experts_per_rank = len(tokens_per_expert) // self._num_ranks

        def whole_call() -> None:
            counts = self._notify(call, header, places, tokens_per_expert, routing)
            decision = self._choose_windows(self.conversation.headers, counts, payload)
            self._transfer(call, payload, routing, results, decision, config, experts_per_rank)

        return _received(results, [], routing, self._run(call, whole_call, run_async))

    def cached_dispatch(
        self,
        call: Call,
        payload: Payload,
        routing: Routing,
        config: Config,
        previous: EventOverlap | None,
        run_async: bool,
    ) -> Received:
        """A dispatch along a known routing: a short letter, no counts."""
        return self.conversation.guarded(
            call, lambda: self._cached_dispatch(call, payload, routing, config, previous, run_async)
        )

    def _cached_dispatch(
        self,
        call: Call,
        payload: Payload,
        routing: Routing,
        config: Config,
        previous: EventOverlap | None,
        run_async: bool,
    ) -> Received:
        header = self._dispatch_header(payload, config, 0)
        window = offer_exactly(header, self.windows, payload, routing.num_recv_rows)
        results = self._new_results(payload, routing, window)

        def whole_call() -> None:
            self._wait_for(call, previous)
            headers = self._exchange_by_handle(call, header, routing)
            # Every letter says how many rows its sender takes, so no counts are needed.
            decision = self._choose_windows(headers, self._no_counts, payload)
            decision = decision._replace(num_rows=routing.num_rows_for(self._rank))
            self._transfer(call, payload, routing, results, decision, config, 0, is_new=False)

        return _received(results, [], routing, self._run(call, whole_call, run_async))

    def _exchange_by_handle(self, call: Call, header: Array, routing: Any) -> Array:
        """Exchange short letters, and make sure that all ranks' handles are of one dispatch.

        Every rank hears what all handles say, so that every rank finds the same.
        """
        header[ROUTING] = routing.checksum
        own, said = routing.said, self._said
        headers = self.conversation.exchange(call, header, (own, *self._nothing_said))
        if said.shape[1] != len(own):
            said = self._said = np.empty((self._num_ranks, len(own)), np.int32)
        self.conversation.read_counts(call, said, *self._nothing_read)
        difference = self._difference_between(said)
        if difference:
            raise Disagreement(
                f"the ranks disagree in {name_of_call(call.number)} about the routing in the handle:"
                f" {difference}"
            )
        return headers

    def _difference_between(self, said: Array) -> str:
        """What handles differ in, or nothing; in row r of `said` is what rank r's says."""
        return difference_between(self._backend, said)

    def _new_routing(self, places: Places) -> Any:
        """A routing with nothing but the tokens in it."""
        return places.new_routing()

    def _with_rows(self, routing: Any, num_rows: int, is_counted: bool) -> Any:
        """A routing with room for what is to be known of each row: of as many as the letters counted, or as
        the caller said."""
        return routing._replace(recv_src_idx=np.empty(num_rows, np.int32))

    def _notify(
        self, call: Call, header: Array, places: Places, tokens_per_expert: Array, routing: Routing
    ) -> LetterCounts:
        """Exchange letters, and fill the routing with what they say."""
        counts = LetterCounts(
            np.empty((self._num_ranks, self._num_ranks), np.int32),
            np.empty(places.by_channel.shape, np.int32),
            np.empty(len(tokens_per_expert) // self._num_ranks, np.int64),
        )
        self.conversation.exchange(call, header, (places.by_rank, places.by_channel, tokens_per_expert))
        self.conversation.read_counts(call, counts.matrix, counts.by_channel, counts.by_expert)
        self._backend.fill_handle(
            self._rank,
            counts.matrix,
            places.by_channel,
            counts.by_channel,
            places.position,
            routing.rank_prefix_matrix,
            routing.channel_prefix_matrix,
            routing.recv_channel_prefix_matrix,
            routing.send_head,
        )
        return counts

    def _dispatch_header(self, payload: Payload, config: Config, num_experts: int) -> Array:
        ring_rows = self.ring_area(config, payload.token).num_rows
        return dispatch_header(payload, num_experts, config.num_channels, ring_rows)

    def _choose_windows(self, headers: Array, counts: LetterCounts, payload: Payload) -> Decision:
        matrix = counts.matrix
        num_rows, offsets, places = self._num_rows, self._offsets, self._places
        too_small = self._backend.choose_windows(
            headers,
            matrix,
            RESULT_ROWS,
            NUM_OFFERS,
            OFFERS,
            payload.bytes_per_row,
            self._window_bases,
            num_rows,
            offsets,
            places,
        )
        if too_small >= 0:
            limit, arriving = headers[too_small, RESULT_ROWS], matrix[:, too_small].sum()
            raise InvalidCall(
                f"num_worst_tokens is {limit} on rank {too_small}, but {arriving} rows would arrive there:"
                f" nothing was sent; pass at least the largest number of rows that can arrive"
            )
        return Decision(int(num_rows[self._rank]), offsets, places, counts)

    def _new_results(self, payload: Payload, routing: Routing, window: int) -> Results:
        """The tensors that a dispatch fills; x lies in the window at `window`, or (-1) in own memory."""
        token, num_rows = payload.token, routing.num_recv_rows
        shape, dtype = (num_rows, payload.x.shape[1]), payload.x.dtype
        return Results(
            self._memory.empty(shape, dtype) if window < 0 else self.windows.lend(window, shape, dtype),
            routing.sources,
            torch.empty((num_rows, token.num_topk), dtype=torch.int64, device="cpu")
            if token.num_topk
            else None,
            torch.empty((num_rows, token.num_topk), dtype=torch.float32, device="cpu")
            if token.num_topk
            else None,
            torch.empty((num_rows, token.num_scales), dtype=payload.scales.dtype, device="cpu")
            if payload.scales is not None
            else None,
        )

    def _transfer(
        self,
        call: Call,
        payload: Payload,
        routing: Routing,
        results: Results,
        decision: Decision,
        config: Config,
        experts_per_rank: int,
        is_new: bool = True,
    ) -> None:
        """Move the rows: by window where the receiver has one, else through its rings."""
        conversation, backend = self.conversation, self._backend
        token = payload.token
        row_arguments = payload.arguments(experts_per_rank)
        send_head, places = routing.send_head, decision.places
        offsets = decision.offsets.tolist()
        streaming = int(decision.num_rows * token.hidden_bytes >= WORTH_STREAMING_BYTES)
        if max(offsets) >= 0:
            conversation.enter(call, Phase.SEND)
            self._team.run(
                lambda first, end: backend.send_to_windows(
                    first, end, streaming, send_head, places, *row_arguments
                ),
                payload.num_tokens,
                worth_splitting=payload.num_tokens * token.hidden_bytes >= WORTH_SPLITTING_BYTES,
            )
            conversation.announce(self._arrival_at_peers, Topic.ROWS, call.number)
        if min(offsets) < 0:
            self._send_through_rings(call, payload, routing, results, decision, config, row_arguments)
        self._finish_results(call, payload, results, decision, is_new)
        conversation.end(call)

    def _finish_results(
        self, call: Call, payload: Payload, results: Results, decision: Decision, is_new: bool
    ) -> None:
        """Wait until all rows are in the window, and take out of it what is beside them; then pad."""
        token, num_result_rows = payload.token, results.x.shape[0]
        if decision.offsets[self._rank] >= 0:
            self.conversation.wait_for_counters(
                call, Phase.RECEIVE, self._own_arrival, Topic.ROWS, "rows", self._node_ranks
            )
            self._backend.unpack_window(
                decision.places[self._rank],
                decision.num_rows,
                num_result_rows,
                payload.source_bytes if is_new else 0,
                token.num_topk,
                token.num_scales,
                results.source.ctypes.data,
                *results.addresses(),
            )
        elif results.topk_idx is not None:
            self._backend.pad_ids(
                results.topk_idx.data_ptr(), decision.num_rows, num_result_rows, token.num_topk
            )

    def _send_through_rings(
        self,
        call: Call,
        payload: Payload,
        routing: Routing,
        results: Results,
        decision: Decision,
        config: Config,
        row_arguments: tuple[Any, ...],
    ) -> None:
        by_ring = decision.offsets < 0
        receive = bool(by_ring[self._rank])
        rings = self._rings(self.ring_area(config, payload.token), by_ring, np.full(self._num_ranks, receive))
        cursor = first_tokens(payload.num_tokens, config.num_channels)
        source = results.source.ctypes.data
        matrix = routing.count_matrix()
        to_send = np.where(by_ring, matrix[self._rank], 0)
        self._run_rings(
            call,
            self._backend.dispatch_through_rings,
            rings,
            config,
            payload.token,
            np.repeat(cursor[:, None], self._num_ranks, axis=1),
            (
                routing.send_head,
                *row_arguments,
                routing.rows_by_lane(self._rank),
                np.array([results.x.data_ptr(), source, *results.addresses()], np.int64),
            ),
            decision.num_rows,
            to_send,
            matrix[:, self._rank] if receive else np.zeros_like(to_send),
        )

    # Combine

    def combine(
        self, call: Call, outputs: Outputs, previous: EventOverlap | None, run_async: bool
    ) -> Combined:
        """The way back: every token's rows, added up at its source."""
        return self.conversation.guarded(call, lambda: self._combine(call, outputs, previous, run_async))

    def _combine(
        self, call: Call, outputs: Outputs, previous: EventOverlap | None, run_async: bool
    ) -> Combined:
        x, weights, num_tokens = outputs.x, outputs.topk_weights, outputs.routing.num_tokens
        num_topk = weights.shape[1] if weights is not None else 0
        out = self._memory.empty((num_tokens, x.shape[1]), x.dtype)
        out_weights = torch.empty((num_tokens, num_topk), dtype=torch.float32, device="cpu")

        def whole_call() -> None:
            self._wait_for(call, previous)
            staged = self._stage(call, x, weights)
            try:
                self._pull_or_push(call, outputs, out, out_weights, staged)
            finally:
                for window in staged.to_free:
                    self.windows.free(window)

        event = self._run(call, whole_call, run_async)
        return Combined(out, out_weights if weights is not None else None, event)

    def _combine_header(
        self, dtype: torch.dtype, token: TokenLayout, config: Config, staged: Staged
    ) -> Array:
        header = signature(
            row_bytes=token.hidden_bytes,
            dtype=dtype_word(dtype),
            num_topk=token.num_topk,
            num_channels=config.num_channels,
            ring_rows=self.ring_area(config, token).num_rows,
        )
        header[X_OFFSET], header[WEIGHTS_OFFSET] = staged.x, staged.weights
        return header

    def _pull_or_push(
        self, call: Call, outputs: Outputs, out: torch.Tensor, out_weights: torch.Tensor, staged: Staged
    ) -> None:
        x, routing, topk_weights, biases, config = outputs
        conversation, backend = self.conversation, self._backend
        hidden = x.shape[1]
        row_bytes = hidden * x.element_size()
        num_topk = out_weights.shape[1]
        token = token_layout(row_bytes, 0, num_topk)
        header = self._combine_header(x.dtype, token, config, staged)
        headers = self._exchange_by_handle(call, header, routing)

        x_offsets = headers[:, X_OFFSET]
        all_in_windows = min(x_offsets.tolist()) >= 0
        x_of = self._window_bases + x_offsets
        weights_of = self._window_bases + headers[:, WEIGHTS_OFFSET]
        bias_addresses = [bias.data_ptr() for bias in biases] + [0] * (2 - len(biases))
        dtype = self._dtype_codes[x.dtype]
        sum_arguments = (out.data_ptr(), *bias_addresses, hidden, row_bytes, dtype, out_weights.numpy())
        send_head = routing.send_head
        if all_in_windows:
            conversation.enter(call, Phase.PULL)
            self._team.run(
                lambda first, end: backend.pull_and_sum(
                    first, end, send_head, x_of, weights_of, *sum_arguments
                ),
                routing.num_tokens,
                worth_splitting=routing.num_tokens * row_bytes >= WORTH_SPLITTING_BYTES,
            )
        else:
            in_window = x_offsets >= 0
            x_of = np.where(in_window, x_of, 0)
            mine = not in_window[self._rank]
            matrix = routing.count_matrix()
            self._run_rings(
                call,
                backend.combine_through_rings,
                self._rings(self.ring_area(config, token), np.full(self._num_ranks, mine), ~in_window),
                config,
                token,
                first_tokens(routing.num_tokens, config.num_channels),
                (
                    routing.rows_by_lane(self._rank),
                    x.data_ptr(),
                    topk_weights.data_ptr() if topk_weights is not None else 0,
                    send_head,
                    x_of,
                    weights_of,
                    *sum_arguments,
                ),
                x.shape[0],
                matrix[:, self._rank] if mine else np.zeros(self._num_ranks, np.int32),
                np.where(in_window, 0, matrix[self._rank]),
            )
        conversation.announce(self._pulled_at_peers, Topic.PULLED, call.number)
        # Until every reader is done, x must stay as it is.
        conversation.wait_for_counters(
            call, Phase.ACKNOWLEDGE, self._own_pulled, Topic.PULLED, "acknowledgement"
        )
        conversation.end(call)

    def _stage(self, call: Call, x: torch.Tensor, topk_weights: torch.Tensor | None) -> Staged:
        """Where peers can read x and the weights: where they are, if that is a window, else in a copy."""
        taken: list[int] = []
        offsets: list[int] = []
        self.conversation.enter(call, Phase.STAGE)
        for tensor in (x, topk_weights):
            if tensor is None or tensor.numel() == 0:
                offsets.append(0)
                continue
            offset = self.windows.block.offset_of(tensor)
            if offset is None:
                offset = self.windows.allocate(tensor.numel() * tensor.element_size())
                if offset is None:
                    for window in taken:
                        self.windows.free(window)
                    return Staged(-1, -1, ())
                taken.append(offset)
                self._copy_to_window(tensor, offset)
            offsets.append(offset)
        return Staged(offsets[0], offsets[1], tuple(taken))

    def _copy_to_window(self, tensor: torch.Tensor, offset: int) -> None:
        row_bytes = tensor.shape[1] * tensor.element_size()
        destination = self.windows.block.address + offset
        # Streaming stores need aligned rows; those of top-k weights may not be.
        streaming = int(row_bytes % 16 == 0 and tensor.shape[0] * row_bytes >= WORTH_STREAMING_BYTES)
        source = tensor.data_ptr()
        self._team.run(
            lambda first, end: self._backend.copy_rows(
                destination + first * row_bytes, source + first * row_bytes, end - first, row_bytes, streaming
            ),
            tensor.shape[0],
            worth_splitting=tensor.shape[0] * row_bytes >= WORTH_SPLITTING_BYTES,
        )

    # Rings

    def ring_area(self, config: Config, token: TokenLayout) -> RingArea:
        """The rings of a call."""
        return self._areas.area_for(config, token)

    def _rings(self, area: RingArea, send_to: Array, receive_from: Array) -> _Rings:
        """The rings of a call that begins: to some ranks, from some ranks."""
        if self._ring_addresses is None or self._ring_addresses.area is not area:
            self._ring_addresses = self._addresses_of(area)
        at = self._ring_addresses
        shape = (area.num_channels, self._num_ranks)
        send_base, recv_base = np.empty(shape, np.int64), np.empty(shape, np.int64)
        # This rank alone advances the tail where it sends and the head where it receives.
        self._backend.read_counters(at.send_tail, send_base)
        self._backend.read_counters(at.recv_head, recv_base)
        return _Rings(
            num_rows=area.num_rows,
            send_rows=at.send_rows * send_to,
            send_tail=at.send_tail,
            send_head=at.send_head,
            send_base=send_base,
            recv_rows=at.recv_rows * receive_from,
            recv_tail=at.recv_tail,
            recv_head=at.recv_head,
            recv_base=recv_base,
            sent=np.zeros(shape, np.int64),
            taken=np.zeros(shape, np.int64),
        )

    def _addresses_of(self, area: RingArea) -> _RingAddresses:
        """Where the rows, tails and heads of all rings lie, by (channel, peer)."""
        channels = np.arange(area.num_channels, dtype=np.int64)[:, None]
        peers = np.arange(self._num_ranks, dtype=np.int64)[None, :]
        tail, head = self._control.block("ring tail"), self._control.block("ring head")
        heaps, own = self._heap_addresses[None, :], self._heap_addresses[self._rank]
        return _RingAddresses(
            area=area,
            send_rows=heaps + area.start + (channels * self._num_ranks + self._rank) * area.ring_bytes,
            send_tail=heaps + tail.start + self._rank * tail.stride + 8 * channels,
            send_head=own + head.start + peers * head.stride + 8 * channels,
            recv_rows=own + area.start + (channels * self._num_ranks + peers) * area.ring_bytes,
            recv_tail=own + tail.start + peers * tail.stride + 8 * channels,
            recv_head=heaps + head.start + self._rank * head.stride + 8 * channels,
        )

    def _run_rings(
        self,
        call: Call,
        kernel: Callable[..., int],
        rings: _Rings,
        config: Config,
        token: TokenLayout,
        cursor: Array,
        arguments: tuple[Any, ...],
        num_rows: int,
        to_send: Array,
        to_take: Array,
    ) -> None:
        """Send and receive until both are done, the channels shared among the team's threads.

        Both ring kernels begin and end with the same arguments; `cursor` and `arguments` are a kernel's own.
        """
        conversation = self.conversation
        conversation.enter(call, Phase.RINGS)
        before = (
            config.num_channels,
            *rings.arrays(),
            cursor,
            rings.sent,
            rings.taken,
            rings.num_rows,
            config.num_max_nvl_chunked_send_tokens,
            slot_offsets(token),
            *arguments,
        )
        streaming = int(num_rows * token.hidden_bytes >= WORTH_STREAMING_BYTES)
        after = (conversation.sleepers, conversation.doorbells, self._rank, streaming)
        unfinished: list[int] = []

        def all_channels(num_spins: int) -> int:
            unfinished.clear()
            self._team.run(
                lambda first, end: unfinished.append(kernel(first, end, *before, num_spins, *after)),
                config.num_channels,
            )
            return sum(unfinished)

        def stalled() -> Stall:
            return rings.stall(to_send, to_take)

        def progress() -> int:
            return int(rings.sent.sum() + rings.taken.sum())

        conversation.wait_until(call, all_channels, stalled, progress)

    def _wait_for(self, call: Call, previous: EventOverlap | None) -> None:
        """Wait until x is there. If what makes it failed, the peers hear of it instead."""
        if previous is None:
            return
        try:
            previous.current_stream_wait()
        except AnyEPError as error:
            self.conversation.refuse(call, error)
            raise

    def _run(self, call: Call, work: Callable[[], None], run_async: bool) -> EventHandle | None:
        if not run_async:
            self.stream.run(work)
            return None
        event: EventHandle = self.stream.submit(lambda: self.conversation.guarded(call, work))
        return event


class Counts(NamedTuple):
    """What a dispatch knows of its own tokens: where they go, and how many there are for each expert."""

    places: Places
    by_expert: Array


class Places(NamedTuple):
    """Where the tokens of a dispatch go: the rows for each rank, the same by channel, each token's number."""

    in_rank: Array
    by_rank: Array
    by_channel: Array
    position: Array

    def new_routing(self) -> Routing:
        """A routing with nothing but the tokens in it."""
        num_ranks, num_channels = self.by_channel.shape
        return Routing(
            np.empty((num_ranks, num_ranks), np.int32),
            np.empty((num_ranks, num_channels), np.int32),
            np.empty((num_ranks, num_channels), np.int32),
            NO_SOURCES,
            # The user may use his mask again; the handle keeps its own.
            self.in_rank.copy(),
            np.empty(self.position.shape, np.int32),
        )


class LetterCounts(NamedTuple):
    """What the letters said: rows from rank to rank, from each rank by channel, tokens per local expert."""

    matrix: Array
    by_channel: Array
    by_expert: Array
    relayed: Any = None
    """Between nodes: rows and tokens that this rank relays, by [node, rank of this node, channel]."""


class Decision(NamedTuple):
    """This rank's rows, each receiver's window (-1: rings), the addresses of its results, and the counts that
    it was made by."""

    num_rows: int
    offsets: Array
    places: Array
    counts: LetterCounts


class Staged(NamedTuple):
    """Offsets of x and its weights in the window heap (-1: they go through rings), and what to free after."""

    x: int
    weights: int
    to_free: tuple[int, ...]


@dataclass(frozen=True)
class _RingAddresses:
    """The addresses of an area's rings, by (channel, peer): to send to a peer, and to receive from one."""

    area: RingArea
    send_rows: Array
    send_tail: Array
    send_head: Array
    recv_rows: Array
    recv_tail: Array
    recv_head: Array


@dataclass(frozen=True)
class _Rings:
    """The addresses, bases and counts of a call's rings, by (channel, peer)."""

    num_rows: int
    send_rows: Array
    send_tail: Array
    send_head: Array
    send_base: Array
    recv_rows: Array
    recv_tail: Array
    recv_head: Array
    recv_base: Array
    sent: Array
    taken: Array

    def arrays(self) -> tuple[Array, ...]:
        return (
            self.send_rows,
            self.send_tail,
            self.send_head,
            self.send_base,
            self.recv_rows,
            self.recv_tail,
            self.recv_head,
            self.recv_base,
        )

    def stall(self, to_send: Array, to_take: Array) -> Stall:
        """The peers with rows that are still to come, or else with rings that are still full."""
        for what, counts, expected in (
            ("rows", self.taken, to_take),
            ("room in its ring", self.sent, to_send),
        ):
            done = counts.sum(axis=0)
            peers = [int(peer) for peer in np.flatnonzero(done < expected)]
            if peers:
                channel = int(counts[:, peers[0]].argmin())
                return Stall(peers, what, int(done[peers[0]]), int(expected[peers[0]]), channel)
        return Stall(range(self.sent.shape[1]), "rows", 0, 0)


def wrong_id(topk_idx: torch.Tensor, place: int, num_experts: int) -> InvalidCall:
    """What to raise for an id that is no expert; `place` is token * top-k + column."""
    token, column = divmod(place, topk_idx.shape[1])
    return no_expert(token, column, int(topk_idx[token, column]), num_experts)


def first_tokens(num_tokens: int, num_channels: int) -> Array:
    """Where each channel's range of tokens begins."""
    return np.arange(num_channels, dtype=np.int64) * max(1, -(-num_tokens // num_channels))


def slot_offsets(token: TokenLayout) -> Array:
    """Where source meta, scales, ids and weights lie in a slot, and the bytes of a slot."""
    parts = token.parts()
    offsets = np.cumsum(list(parts.values()))
    return np.array([*offsets[:4], token.token_bytes], np.int64)


def _received(
    results: Results, tokens_per_expert: list[int], routing: Routing, event: EventHandle | None
) -> Received:
    return Received(
        results.x,
        results.scales,
        results.topk_idx,
        results.topk_weights,
        tokens_per_expert,
        routing,
        event,
    )
