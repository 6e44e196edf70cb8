"""Normal mode on one node: dispatch and combine between ranks that share memory.

A dispatch: letters with counts; every rank then knows the whole count matrix and everyone's free windows, and
decides for each receiver alike: rows that fit its window go straight to their final place, others through its
rings. A combine: each source reads the rows of its tokens where they lie at its peers, adds them up in rank
order, and says so; an owner's call ends when all have read. Rows that lie in no window go through rings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anyep.errors import InvalidCall
from anyep.events import EventHandle
from anyep.layout import ControlRegion, RingArea, Window, nvl_rings, ring_rows_that_fit
from anyep.modes.conversation import Array, Call, Conversation, Stall
from anyep.modes.letters import MAX_OFFERS, Field, dtype_word, new_header
from anyep.modes.routing import IntranodeHandle
from anyep.modes.status import Phase
from anyep.modes.windows import WindowHeap
from anyep.sizes import Config, TokenLayout

WORTH_SPLITTING_BYTES = 1 << 20
WORTH_REUSING_BYTES = 1 << 16
NO_IDS = np.zeros((0, 0), np.int64)
NO_WEIGHTS = np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class Payload:
    """What a dispatch sends: rows, perhaps with scales, perhaps with top-k ids and weights."""

    x: torch.Tensor
    scales: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def row_bytes(self) -> int:
        return self.x.shape[1] * self.x.element_size()

    @property
    def num_scales(self) -> int:
        return self.scales.shape[1] if self.scales is not None else 0

    @property
    def num_topk(self) -> int:
        return self.topk_idx.shape[1] if self.topk_idx is not None else 0

    @property
    def token(self) -> TokenLayout:
        return TokenLayout(self.row_bytes, self.num_scales, self.num_topk)


@dataclass(frozen=True)
class Received:
    """What a dispatch brought."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    tokens_per_expert: list[int]
    handle: IntranodeHandle
    event: EventHandle | None


@dataclass(frozen=True)
class Combined:
    """What a combine brought."""

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    event: EventHandle | None


@dataclass(frozen=True)
class _Results:
    """The tensors that a dispatch fills, and their addresses in the order of a window."""

    x: torch.Tensor
    source: Array
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    scales: torch.Tensor

    def addresses(self) -> Array:
        others = [tensor.data_ptr() for tensor in (self.topk_idx, self.topk_weights, self.scales)]
        return np.array([self.x.data_ptr(), self.source.ctypes.data, *others], np.int64)


class Intranode:
    """Normal mode of one rank, on one node. It does not check what the user passed; `Buffer` does."""

    def __init__(
        self,
        backend: Any,
        conversation: Conversation,
        control: ControlRegion,
        heaps: list[Any],
        window_blocks: list[Any],
        num_nvl_bytes: int,
        num_arena_bytes: int,
        num_threads: int,
    ) -> None:
        self.conversation = conversation
        self.stream = backend.Stream()
        self.windows = WindowHeap(window_blocks[conversation.rank])
        self._arena = WindowHeap(backend.PrivateBlock(num_arena_bytes))
        self._ring_areas: dict[tuple[Config, TokenLayout], RingArea] = {}
        self._backend = backend
        self._rank = conversation.rank
        self._num_ranks = conversation.num_ranks
        self._control = control
        self._num_nvl_bytes = num_nvl_bytes
        self._heap_addresses = np.array([heap.address for heap in heaps], np.int64)
        self._window_bases = np.array([block.address for block in window_blocks], np.int64)
        self._team = backend.Team(num_threads)
        self._no_counts = np.zeros((self._num_ranks, self._num_ranks), np.int32)
        arrival, pulled = control.block("window arrival"), control.block("window pulled")
        self._arrival_at_peers = conversation.peer_counters(arrival)
        self._own_arrival = conversation.own_counters(arrival)
        self._pulled_at_peers = conversation.peer_counters(pulled)
        self._own_pulled = conversation.own_counters(pulled)

    def close(self) -> None:
        self.stream.close()
        self._team.close()

    # Dispatch

    def dispatch(
        self,
        call: Call,
        payload: Payload,
        is_token_in_rank: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        position: tuple[Array, Array, Array],
        config: Config,
        num_worst_tokens: int,
        expert_alignment: int,
        run_async: bool,
    ) -> Received:
        """A dispatch that finds out its routing; `position` is what `place` gave."""
        return self.conversation.guarded(
            call,
            lambda: self._dispatch(
                call,
                payload,
                is_token_in_rank,
                tokens_per_expert,
                position,
                config,
                num_worst_tokens,
                expert_alignment,
                run_async,
            ),
        )

    def place(self, is_token_in_rank: torch.Tensor, num_channels: int) -> tuple[Array, Array, Array]:
        """Rows per receiver, the same by (receiver, channel), and each token's place among them."""
        rank_counts = np.empty(self._num_ranks, np.int32)
        channel_counts = np.empty((self._num_ranks, num_channels), np.int32)
        position = np.empty(tuple(is_token_in_rank.shape), np.int32)
        self._backend.place_tokens(is_token_in_rank.numpy(), rank_counts, channel_counts, position)
        return rank_counts, channel_counts, position

    def _dispatch(
        self,
        call: Call,
        payload: Payload,
        is_token_in_rank: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        places: tuple[Array, Array, Array],
        config: Config,
        num_worst_tokens: int,
        expert_alignment: int,
        run_async: bool,
    ) -> Received:
        num_ranks, num_channels = self._num_ranks, config.num_channels
        rank_counts, channel_counts, position = places
        num_experts = tokens_per_expert.shape[0]
        header = self._dispatch_header(payload, config, num_experts)
        own_window = None
        if not num_worst_tokens:
            # The window on offer must still be free when the counts are known.
            self.stream.synchronize()
        if num_worst_tokens:
            header[Field.RESULT_ROWS] = num_worst_tokens
            own_window = self._offer_exactly(header, self._window(num_worst_tokens, payload))
        else:
            self._offer(header)

        matrix = np.empty((num_ranks, num_ranks), np.int32)
        by_channel = np.empty((num_ranks, num_channels), np.int32)
        by_expert = np.empty(num_experts // num_ranks, np.int64)
        handle = _empty_handle(num_ranks, num_channels, payload.num_tokens, is_token_in_rank)

        def notify() -> Array:
            counts = (rank_counts, channel_counts, tokens_per_expert.numpy())
            headers = self.conversation.exchange(call, header, counts)
            self.conversation.read_counts(call, matrix, by_channel, by_expert)
            self._backend.fill_handle(
                self._rank,
                matrix,
                channel_counts,
                by_channel,
                position,
                handle.rank_prefix_matrix.numpy(),
                handle.channel_prefix_matrix.numpy(),
                handle.recv_channel_prefix_matrix.numpy(),
                handle.send_head.numpy(),
            )
            return headers

        if num_worst_tokens:
            # Everything but the counts is known, so nothing has to be waited for here.
            results = self._new_results(num_worst_tokens, payload, own_window)
            handle = _with_sources(handle, num_worst_tokens)

            def whole_call() -> None:
                _, places_of, num_rows = self._place_windows(notify(), matrix, payload)
                self._transfer(call, payload, handle, results, places_of, config, num_experts)
                results.topk_idx[num_rows:] = -1
                handle.recv_src_idx.numpy()[:] = results.source

            event = self._run(call, whole_call, run_async)
            return _received(payload, results, [], handle, event)

        headers = notify()
        offsets, places_of, num_rows = self._place_windows(headers, matrix, payload)
        if offsets[self._rank] >= 0:
            own_window = int(offsets[self._rank])
            self.windows.allocate_at(own_window, self._window(num_rows, payload).num_bytes)
        results = self._new_results(num_rows, payload, own_window)
        handle = _with_sources(handle, num_rows)

        def transfer() -> None:
            self._transfer(call, payload, handle, results, places_of, config, num_experts)
            handle.recv_src_idx.numpy()[:] = results.source

        event = self._run(call, transfer, run_async)
        aligned = -(-by_expert // expert_alignment) * expert_alignment
        return _received(payload, results, aligned.tolist(), handle, event)

    def cached_dispatch(
        self, call: Call, payload: Payload, handle: IntranodeHandle, config: Config, run_async: bool
    ) -> Received:
        """A dispatch along a known routing: a short letter, no counts."""
        return self.conversation.guarded(
            call, lambda: self._cached_dispatch(call, payload, handle, config, run_async)
        )

    def _cached_dispatch(
        self, call: Call, payload: Payload, handle: IntranodeHandle, config: Config, run_async: bool
    ) -> Received:
        header = self._dispatch_header(payload, config, 0)
        header[Field.ROUTING] = handle.checksum
        header[Field.RESULT_ROWS] = handle.num_recv_rows
        own_window = self._offer_exactly(header, self._window(handle.num_recv_rows, payload))
        results = self._new_results(handle.num_recv_rows, payload, own_window)

        def whole_call() -> None:
            headers = self.conversation.exchange(call, header)
            # Every letter says how many rows its sender takes, so no counts are needed.
            _, places_of, _ = self._place_windows(headers, self._no_counts, payload)
            self._transfer(call, payload, handle, results, places_of, config, 0)

        event = self._run(call, whole_call, run_async)
        return _received(payload, results, [], handle, event)

    def _dispatch_header(self, payload: Payload, config: Config, num_experts: int) -> Array:
        header = new_header()
        header[Field.ROW_BYTES] = payload.row_bytes
        header[Field.DTYPE] = dtype_word(str(payload.x.dtype))
        header[Field.TOPK] = payload.num_topk
        header[Field.SCALES] = payload.num_scales
        header[Field.EXPERTS] = num_experts
        header[Field.CHANNELS] = config.num_channels
        header[Field.RING_ROWS] = self.ring_area(config, payload.token).num_rows
        return header

    def _offer(self, header: Array) -> None:
        """Offer what is free; the receiver's rows will tell how much of it is needed."""
        offers = self.windows.offers(MAX_OFFERS)
        header[Field.NUM_OFFERS] = len(offers)
        header[Field.OFFERS : Field.OFFERS + 2 * len(offers)] = np.array(offers, np.int64).reshape(-1)

    def _offer_exactly(self, header: Array, window: Window) -> int | None:
        """Take a window now, where the number of rows is known, and offer just that."""
        offset = self.windows.allocate(window.num_bytes)
        if offset is not None:
            header[Field.NUM_OFFERS] = 1
            header[Field.OFFERS] = offset
            header[Field.OFFERS + 1] = max(window.num_bytes, 128)
        return offset

    def _window(self, num_rows: int, payload: Payload) -> Window:
        return Window(num_rows, payload.row_bytes, payload.num_topk, payload.num_scales)

    def _place_windows(self, headers: Array, matrix: Array, payload: Payload) -> tuple[Array, Array, int]:
        """Each receiver's window offset (-1: rings), the addresses of its results, and this rank's rows."""
        num_rows = np.empty(self._num_ranks, np.int64)
        offsets = np.empty(self._num_ranks, np.int64)
        places = np.empty((self._num_ranks, 5), np.int64)
        too_small = self._backend.choose_windows(
            headers,
            matrix,
            int(Field.RESULT_ROWS),
            int(Field.NUM_OFFERS),
            int(Field.OFFERS),
            np.array(self._window(1, payload).sizes(), np.int64),
            self._window_bases,
            num_rows,
            offsets,
            places,
        )
        if too_small >= 0:
            limit, arriving = headers[too_small, Field.RESULT_ROWS], matrix[:, too_small].sum()
            raise InvalidCall(
                f"num_worst_tokens is {limit} on rank {too_small}, but {arriving} rows would arrive there:"
                f" nothing was sent; pass at least the largest number of rows that can arrive"
            )
        return offsets, places, int(num_rows[self._rank])

    def _new_results(self, num_rows: int, payload: Payload, window: int | None) -> _Results:
        """The tensors that a dispatch fills: in the window allocated at `window`, or in memory of this rank."""
        hidden = payload.x.shape[1]
        scale_dtype = payload.scales.dtype if payload.scales is not None else torch.float32
        parts = (
            ((num_rows, hidden), payload.x.dtype),
            ((num_rows, payload.num_topk), torch.int64),
            ((num_rows, payload.num_topk), torch.float32),
            ((num_rows, payload.num_scales), scale_dtype),
        )
        if window is None:
            x, ids, weights, scales = (self._empty(shape, dtype) for shape, dtype in parts)
            return _Results(x, torch.empty(num_rows, dtype=torch.int32).numpy(), ids, weights, scales)
        x_at, source_at, *others_at = self._window(num_rows, payload).offsets()
        # Source indices go into the handle; it gets a copy, so that it does not hold the window.
        source = self.windows.block.array(window + source_at, num_rows, np.int32)
        lent = [(offset, *part) for offset, part in zip((x_at, *others_at), parts, strict=True)]
        x, ids, weights, scales = self.windows.lend(window, lent)
        return _Results(x, source, ids, weights, scales)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor; a large one in memory that earlier results have warmed up."""
        num_bytes = math.prod(shape) * dtype.itemsize
        offset = self._arena.allocate(num_bytes) if num_bytes >= WORTH_REUSING_BYTES else None
        if offset is None:
            return torch.empty(shape, dtype=dtype)
        return self._arena.lend(offset, [(0, shape, dtype)])[0]

    def _transfer(
        self,
        call: Call,
        payload: Payload,
        handle: IntranodeHandle,
        results: _Results,
        places: Array,
        config: Config,
        num_experts: int,
    ) -> None:
        """Move the rows: by window where the receiver has one, else through its rings."""
        conversation, backend = self.conversation, self._backend
        x = payload.x
        scales = payload.scales
        scale_arguments = (
            (scales.data_ptr(), scales.stride(0), scales.stride(1), scales.shape[1])
            if scales is not None
            else (0, 0, 0, 0)
        )
        topk_idx = payload.topk_idx.numpy() if payload.topk_idx is not None else NO_IDS
        topk_weights = payload.topk_weights.numpy() if payload.topk_weights is not None else NO_WEIGHTS
        row_arguments = (
            x.data_ptr(),
            payload.row_bytes,
            *scale_arguments,
            topk_idx,
            topk_weights,
            num_experts // self._num_ranks,
        )
        send_head = handle.send_head.numpy()
        by_ring = places[:, 0] == 0
        if not by_ring.all():
            conversation.enter(call, Phase.SEND)
            self._team.run(
                lambda first, end: backend.send_to_windows(first, end, send_head, places, *row_arguments),
                payload.num_tokens,
                worth_splitting=payload.num_tokens * payload.row_bytes >= WORTH_SPLITTING_BYTES,
            )
            backend.announce(self._arrival_at_peers, call.number)
        if by_ring.any():
            conversation.enter(call, Phase.RINGS)
            rings = self._rings(self.ring_area(config, payload.token), by_ring, bool(by_ring[self._rank]))
            cursor = np.repeat(
                np.arange(config.num_channels)[:, None]
                * _tokens_per_channel(payload.num_tokens, config.num_channels),
                self._num_ranks,
                axis=1,
            )
            lanes = handle.rows_by_lane(self._rank)
            result = results.addresses()
            slots = _slot_offsets(payload.token)

            def step(first: int, end: int, num_spins: int) -> int:
                return int(
                    backend.dispatch_through_rings(
                        first,
                        end,
                        config.num_channels,
                        *rings.arrays(),
                        cursor,
                        rings.sent,
                        rings.taken,
                        rings.num_rows,
                        config.num_max_nvl_chunked_send_tokens,
                        slots,
                        send_head,
                        *row_arguments,
                        lanes,
                        result,
                        num_spins,
                    )
                )

            matrix = handle.count_matrix()
            to_send = np.where(by_ring, matrix[self._rank], 0)
            to_take = matrix[:, self._rank] if by_ring[self._rank] else np.zeros_like(to_send)
            self._run_rings(call, rings, step, to_send, to_take)
        if not by_ring[self._rank]:
            conversation.wait_for_counters(call, Phase.RECEIVE, self._own_arrival, "rows")
        conversation.end(call)

    # Combine

    def combine(
        self,
        call: Call,
        x: torch.Tensor,
        handle: IntranodeHandle,
        topk_weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
        config: Config,
        run_async: bool,
    ) -> Combined:
        """The way back: every token's rows, added up at its source."""
        return self.conversation.guarded(
            call, lambda: self._combine(call, x, handle, topk_weights, biases, config, run_async)
        )

    def _combine(
        self,
        call: Call,
        x: torch.Tensor,
        handle: IntranodeHandle,
        topk_weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
        config: Config,
        run_async: bool,
    ) -> Combined:
        hidden = x.shape[1]
        num_topk = topk_weights.shape[1] if topk_weights is not None else 0
        out = self._empty((handle.num_tokens, hidden), x.dtype)
        out_weights = torch.empty((handle.num_tokens, num_topk), dtype=torch.float32)

        def whole_call() -> None:
            self._combine_now(call, x, handle, topk_weights, biases, config, out, out_weights)

        event = self._run(call, whole_call, run_async)
        return Combined(out, out_weights if topk_weights is not None else None, event)

    def _combine_now(
        self,
        call: Call,
        x: torch.Tensor,
        handle: IntranodeHandle,
        topk_weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
        config: Config,
        out: torch.Tensor,
        out_weights: torch.Tensor,
    ) -> None:
        staged = self._stage(call, x, topk_weights)
        try:
            self._pull_or_push(call, x, handle, topk_weights, biases, config, out, out_weights, staged)
        finally:
            for window in staged.to_free:
                self.windows.free(window)

    def _pull_or_push(
        self,
        call: Call,
        x: torch.Tensor,
        handle: IntranodeHandle,
        topk_weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
        config: Config,
        out: torch.Tensor,
        out_weights: torch.Tensor,
        staged: _Staged,
    ) -> None:
        conversation, backend = self.conversation, self._backend
        hidden = x.shape[1]
        row_bytes = hidden * x.element_size()
        num_topk = out_weights.shape[1]
        token = TokenLayout(row_bytes, 0, num_topk)
        header = new_header()
        header[Field.ROW_BYTES] = row_bytes
        header[Field.DTYPE] = dtype_word(str(x.dtype))
        header[Field.TOPK] = num_topk
        header[Field.CHANNELS] = config.num_channels
        header[Field.RING_ROWS] = self.ring_area(config, token).num_rows
        header[Field.ROUTING] = handle.checksum
        header[Field.X_OFFSET], header[Field.WEIGHTS_OFFSET] = staged.x, staged.weights
        headers = conversation.exchange(call, header)

        in_window = headers[:, Field.X_OFFSET] >= 0
        x_of = np.where(in_window, self._window_bases + headers[:, Field.X_OFFSET], 0)
        weights_of = np.where(in_window, self._window_bases + headers[:, Field.WEIGHTS_OFFSET], 0)
        bias_addresses = [bias.data_ptr() for bias in biases] + [0] * (2 - len(biases))
        dtype = {torch.bfloat16: backend.BF16, torch.float16: backend.FP16, torch.float32: backend.FP32}[
            x.dtype
        ]
        sum_arguments = (out.data_ptr(), *bias_addresses, hidden, row_bytes, dtype, out_weights.numpy())
        send_head = handle.send_head.numpy()
        if in_window.all():
            conversation.enter(call, Phase.PULL)
            self._team.run(
                lambda first, end: backend.pull_and_sum(
                    first, end, send_head, x_of, weights_of, *sum_arguments
                ),
                handle.num_tokens,
                worth_splitting=handle.num_tokens * row_bytes >= WORTH_SPLITTING_BYTES,
            )
        else:
            conversation.enter(call, Phase.RINGS)
            mine = not in_window[self._rank]
            rings = self._rings(
                self.ring_area(config, token),
                np.full(self._num_ranks, mine),
                receive=True,
                receive_from=~in_window,
            )
            per_channel = _tokens_per_channel(handle.num_tokens, config.num_channels)
            cursor = np.arange(config.num_channels, dtype=np.int64) * per_channel
            lanes = handle.rows_by_lane(self._rank)
            slots = _slot_offsets(token)
            weights_address = topk_weights.data_ptr() if topk_weights is not None else 0

            def step(first: int, end: int, num_spins: int) -> int:
                return int(
                    backend.combine_through_rings(
                        first,
                        end,
                        config.num_channels,
                        *rings.arrays(),
                        cursor,
                        rings.sent,
                        rings.taken,
                        rings.num_rows,
                        config.num_max_nvl_chunked_send_tokens,
                        slots,
                        lanes,
                        x.data_ptr(),
                        weights_address,
                        send_head,
                        x_of,
                        weights_of,
                        *sum_arguments,
                        num_spins,
                    )
                )

            matrix = handle.count_matrix()
            to_send = matrix[:, self._rank] if mine else np.zeros(self._num_ranks, np.int32)
            to_take = np.where(in_window, 0, matrix[self._rank])
            self._run_rings(call, rings, step, to_send, to_take)
        backend.announce(self._pulled_at_peers, call.number)
        # Until every reader is done, x must stay as it is.
        conversation.wait_for_counters(call, Phase.ACKNOWLEDGE, self._own_pulled, "acknowledgement")
        conversation.end(call)

    def _stage(self, call: Call, x: torch.Tensor, topk_weights: torch.Tensor | None) -> _Staged:
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
                    return _Staged(-1, -1, ())
                taken.append(offset)
                self._copy_to_window(tensor, offset)
            offsets.append(offset)
        return _Staged(offsets[0], offsets[1], tuple(taken))

    def _copy_to_window(self, tensor: torch.Tensor, offset: int) -> None:
        row_bytes = tensor.shape[1] * tensor.element_size()
        destination = self.windows.block.address + offset
        source = tensor.data_ptr()
        self._team.run(
            lambda first, end: self._backend.copy_rows(
                destination + first * row_bytes, source + first * row_bytes, end - first, row_bytes
            ),
            tensor.shape[0],
            worth_splitting=tensor.shape[0] * row_bytes >= WORTH_SPLITTING_BYTES,
        )

    # Rings

    def ring_area(self, config: Config, token: TokenLayout) -> RingArea:
        """The rings of a call; their rows are what the config asks for, or what `num_nvl_bytes` holds."""
        known = self._ring_areas.get((config, token))
        if known is not None:
            return known

        def area(num_rows: int) -> RingArea:
            start = self._control.num_bytes
            return nvl_rings(start, config.num_channels, self._num_ranks, 1, num_rows, token.token_bytes)

        wanted = area(config.num_max_nvl_chunked_recv_tokens)
        fitting = area(ring_rows_that_fit(wanted, self._num_nvl_bytes))
        self._ring_areas[config, token] = fitting
        return fitting

    def _rings(
        self, area: RingArea, send_to: Array, receive: bool, receive_from: Array | None = None
    ) -> _Rings:
        channels = np.arange(area.num_channels, dtype=np.int64)[:, None]
        peers = np.arange(self._num_ranks, dtype=np.int64)[None, :]
        tail, head = self._control.block("ring tail"), self._control.block("ring head")
        heaps, own = self._heap_addresses[None, :], self._heap_addresses[self._rank]
        used_bytes = area.ring_bytes
        send_rows = heaps + area.start + (channels * self._num_ranks + self._rank) * used_bytes
        recv_rows = own + area.start + (channels * self._num_ranks + peers) * used_bytes
        receives = np.full(self._num_ranks, receive) if receive_from is None else receive_from
        send_tail = heaps + tail.start + self._rank * tail.stride + 8 * channels
        recv_tail = own + tail.start + peers * tail.stride + 8 * channels
        recv_head = heaps + head.start + self._rank * head.stride + 8 * channels
        send_head = own + head.start + peers * head.stride + 8 * channels
        shape = (area.num_channels, self._num_ranks)
        send_base, recv_base = np.empty(shape, np.int64), np.empty(shape, np.int64)
        # This rank alone advances the tail where it sends and the head where it receives.
        self._backend.read_counters(send_tail, send_base)
        self._backend.read_counters(recv_head, recv_base)
        return _Rings(
            num_rows=area.num_rows,
            send_rows=np.where(send_to[None, :], send_rows, 0),
            send_tail=send_tail,
            send_head=send_head,
            send_base=send_base,
            recv_rows=np.where(receives[None, :], recv_rows, 0),
            recv_tail=recv_tail,
            recv_head=recv_head,
            recv_base=recv_base,
            sent=np.zeros(shape, np.int64),
            taken=np.zeros(shape, np.int64),
        )

    def _run_rings(
        self,
        call: Call,
        rings: _Rings,
        step: Callable[[int, int, int], int],
        to_send: Array,
        to_take: Array,
    ) -> None:
        """Send and receive until both are done, the channels shared among the team's threads."""
        num_channels = rings.sent.shape[0]
        unfinished: list[int] = []

        def all_channels(num_spins: int) -> int:
            unfinished.clear()
            self._team.run(lambda first, end: unfinished.append(step(first, end, num_spins)), num_channels)
            return sum(unfinished)

        def stalled() -> Stall:
            return rings.stall(to_send, to_take)

        def progress() -> int:
            return int(rings.sent.sum() + rings.taken.sum())

        self.conversation.wait_until(call, all_channels, stalled, progress)

    def _run(self, call: Call, work: Callable[[], None], run_async: bool) -> EventHandle | None:
        if not run_async:
            self.stream.run(work)
            return None
        return self.stream.submit(lambda: self.conversation.guarded(call, work))


@dataclass(frozen=True)
class _Staged:
    """Offsets of x and its weights in the window heap (-1: they go through rings), and what to free after."""

    x: int
    weights: int
    to_free: tuple[int, ...]


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
        return Stall([], "rows", 0, 0)


def _tokens_per_channel(num_tokens: int, num_channels: int) -> int:
    return max(1, -(-num_tokens // num_channels))


def _slot_offsets(token: TokenLayout) -> Array:
    """Where source meta, scales, ids and weights lie in a slot, and the bytes of a slot."""
    parts = token.parts()
    offsets = np.cumsum(list(parts.values()))
    return np.array([*offsets[:4], token.token_bytes], np.int64)


def _empty_handle(
    num_ranks: int, num_channels: int, num_tokens: int, is_token_in_rank: torch.Tensor
) -> IntranodeHandle:
    return IntranodeHandle(
        torch.empty((num_ranks, num_ranks), dtype=torch.int32),
        torch.empty((num_ranks, num_channels), dtype=torch.int32),
        torch.empty((num_ranks, num_channels), dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
        is_token_in_rank,
        torch.empty((num_tokens, num_ranks), dtype=torch.int32),
    )


def _with_sources(handle: IntranodeHandle, num_rows: int) -> IntranodeHandle:
    """The handle keeps source indices of its own, so that it does not hold a window."""
    parts = list(handle.tensors())
    parts[3] = torch.empty(num_rows, dtype=torch.int32)
    return IntranodeHandle(*parts)


def _received(
    payload: Payload,
    results: _Results,
    tokens_per_expert: list[int],
    handle: IntranodeHandle,
    event: EventHandle | None,
) -> Received:
    has_topk = payload.topk_idx is not None
    return Received(
        results.x,
        results.scales if payload.scales is not None else None,
        results.topk_idx if has_topk else None,
        results.topk_weights if has_topk else None,
        tokens_per_expert,
        handle,
        event,
    )
