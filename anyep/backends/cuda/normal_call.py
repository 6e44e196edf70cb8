"""One call of normal mode on a GPU: its operations, as launches of kernels on the communication stream.

A call is a few kernels: one exchanges notify messages, one writes rows into windows or sums rows where they
lie, and a barrier waits until every rank has done its part. Rows without a window go through rings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from anyep.backends.base import CombineInput, Payload, Results, Totals
from anyep.backends.cuda import constants
from anyep.backends.cuda.kernels import counting, digests, groups, sums, windows
from anyep.backends.cuda.kernels import notify as notify_kernels
from anyep.backends.cuda.launch import Seen
from anyep.backends.cuda.routing import GpuCounts, GpuRouting
from anyep.backends.cuda.row_kernels import prefixes_of
from anyep.backends.cuda.tiles import (
    COPY_WARPS,
    COPY_WORDS,
    COUNTED_EXPERTS,
    DIGEST_TILE,
    DIGEST_WARPS,
    HEAD_TOKENS,
    UNPACK_BLOCK,
    block_of,
)
from anyep.core.calls import Array, Call, Phase
from anyep.core.headers import EXPERTS, NUM_OFFERS, OFFERS, WEIGHTS_OFFSET, X_OFFSET
from anyep.errors import AnyEPError, InvalidCall
from anyep.events import EventHandle, EventOverlap
from anyep.sizes import Config

if TYPE_CHECKING:
    from anyep.backends.cuda.ops_normal import GpuNormalOps

FLAGS_OF: Final = {Phase.RECEIVE: constants.ARRIVED_AT, Phase.ACKNOWLEDGE: constants.PULLED_AT}
"""By phase of a barrier: the device constant that holds the offset of its flags."""


class GpuCall:
    """The operations of one call."""

    def __init__(self, ops: GpuNormalOps, call: Call, previous: EventOverlap | None, run_async: bool) -> None:
        self._ops = ops
        self._gpu = ops.gpu
        self._device_control = ops.device_control
        self._call = call
        self._previous = previous
        self._run_async = run_async
        self._rank, self._num_ranks = ops.device_control.rank, ops.device_control.num_ranks
        self._stream = ops.stream
        self._used: list[torch.Tensor | None] = []
        """Tensors to keep until the call is over."""
        self._staged: list[tuple[int, int]] = []
        """The windows that hold staged copies, with their bytes."""
        self._source: torch.Tensor | None = None
        """The source indices of a new routing."""
        self._ticket = 0
        self._is_sent = False
        """Whether all rows were sent before the host knew the totals."""
        self._has_begun = False
        self._took_memory = False
        """Whether memory was allocated since the communication stream last waited for the caller's."""

    def prepare_to_wait(self) -> None:
        if self._gpu.stream.is_capturing():
            raise InvalidCall(
                "a dispatch that waits for its counts cannot be captured in a CUDA graph:"
                " pass num_worst_tokens, or a handle"
            )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._took_memory = self._has_begun
        return self._ops.empty(self._previous, shape, dtype)

    def begin(self) -> None:
        self._ops.device_control.control.enter(self._call, Phase.SEND)
        self._gpu.stream.begin(self._previous)
        self._has_begun = True

    def _wait_for_memory(self) -> None:
        """Make the communication stream wait for the caller's again, for memory that was just allocated."""
        if self._took_memory and self._previous is None:
            self._gpu.stream.begin(None)
        self._took_memory = False

    def new_routing(self, payload: Payload, counts: GpuCounts, config: Config) -> GpuRouting:
        """A routing that kernels will fill, without source indices yet."""
        num_ranks = self._num_ranks
        by_rank = (payload.num_tokens, num_ranks)
        by_channel = (num_ranks, config.num_channels)
        head = self.empty(by_rank, torch.int32)
        return GpuRouting(
            self.empty((num_ranks, num_ranks), torch.int32),
            self.empty(by_channel, torch.int32),
            self.empty(by_channel, torch.int32),
            head,
            self.empty(by_rank, torch.bool),
            head,
            self.empty((2 * num_ranks,), torch.int64),
        )

    def with_rows(self, routing: GpuRouting, num_rows: int, is_counted: bool) -> GpuRouting:
        """Add the source indices. They are not in a window, because a handle outlives the rows."""
        source = self.empty((num_rows,), torch.int32)
        self._used.append(source)
        self._source = source
        return routing._replace(recv_src_idx=source)

    def new_results(self, payload: Payload, routing: GpuRouting, window: int) -> Results:
        token, scales, num_rows = payload.token, payload.scales, routing.num_recv_rows
        kinds: list[tuple[int, torch.dtype] | None] = [
            (payload.x.shape[1], payload.x.dtype),
            None,
            (token.num_topk, torch.int64) if token.num_topk else None,
            (token.num_topk, torch.float32) if token.num_topk else None,
            (token.num_scales, scales.dtype) if scales is not None else None,
        ]
        layout, num_bytes = payload.window(num_rows), payload.window_bytes(num_rows)
        if window >= 0 and num_rows:
            wanted = [
                (offset, (num_rows, kind[0]), kind[1])
                for kind, offset in zip(kinds, layout.offsets, strict=True)
                if kind is not None
            ]
            made = self._ops.windows.lend(window, num_bytes, wanted)
        else:
            made = [self.empty((num_rows, kind[0]), kind[1]) for kind in kinds if kind is not None]
            if window >= 0:
                # No rows: the window is not needed.
                self._ops.windows.give_back(window, num_bytes)
        if window < 0:
            self._used += made
        tensors = iter(made)
        x, _, ids, weights, new_scales = (None if kind is None else next(tensors) for kind in kinds)
        assert x is not None
        source = self._source
        if source is None:
            # A handle has them already, but the ring kernels write them again.
            source = self._device_control.state
            if window < 0:
                source = self.empty((num_rows,), torch.int32)
                self._used.append(source)
        return Results(x, source, ids, weights, new_scales)

    # Notify

    def notify(
        self,
        header: Array,
        payload: Payload,
        counts: GpuCounts,
        config: Config,
        routing: GpuRouting,
        host_waits: bool,
    ) -> None:
        self._place(payload, counts, config, routing)
        device_control, local_experts = self._device_control, counts.num_experts // self._num_ranks
        assert routing.digests is not None
        ids = payload.topk_idx if payload.topk_idx is not None else device_control.state
        self._ticket = device_control.exchange_counts(
            header,
            self._call.kind,
            prefixes_of(routing, routing.digests),
            groups.Counts(counts.by_rank, counts.by_expert, ids),
            (config.num_channels, local_experts),
            host_waits,
        )
        self._fill(payload, routing)
        self._used += [*counts, *routing]
        if host_waits:
            # If all receivers have windows, rows are sent before the host knows how many there are.
            self._ops.rows.send_to_windows(payload, routing, config, local_experts, all_or_none=True)
            device_control.barrier(constants.ARRIVED_AT, unless_rings=True)
            self._is_sent = True

    def _place(self, payload: Payload, counts: GpuCounts, config: Config, routing: GpuRouting) -> None:
        """Number the rows for each receiver, and check the counts."""
        num_tokens, num_channels, num_ranks = payload.num_tokens, config.num_channels, self._num_ranks
        local_experts = counts.num_experts // num_ranks
        num_topk, state = payload.token.num_topk, self._device_control.state
        checks_experts = -(-local_experts // COUNTED_EXPERTS) + 1 if num_topk else 0
        self._ops.counting(counting.place_tokens, num_topk)(
            self._stream,
            (num_ranks, num_channels + checks_experts),
            Seen(counts.in_rank, torch.int8),
            payload.topk_idx if payload.topk_idx is not None else state,
            counts.by_rank,
            counts.by_expert,
            # Numbers and counts of this rank's rows; notify messages turn them into places and prefix sums.
            routing.send_head,
            routing.channel_prefix_matrix,
            state,
            num_tokens,
            num_channels,
            _tokens_per_channel(num_tokens, config),
            num_topk,
            local_experts,
        )

    def _fill(self, payload: Payload, routing: GpuRouting) -> None:
        """Turn the numbers of rows into their places at the receivers."""
        fill = self._device_control.launcher(
            notify_kernels.fill_send_head,
            4,
            NUM_RANKS=self._num_ranks,
            RANK_BLOCK=self._device_control.rank_block,
            TILE_TOKENS=HEAD_TOKENS,
        )
        fill(
            self._stream,
            (-(-payload.num_tokens // HEAD_TOKENS),),
            self._device_control.constants,
            self._device_control.state,
            routing.send_head,
            routing.rank_prefix_matrix,
            # The handle keeps a copy of the mask: the user may change it afterwards.
            Seen(routing.is_token_in_rank, torch.int8),
            routing.digests,
            payload.num_tokens,
        )

    def notify_by_handle(self, header: Array, payload: Payload | None, routing: GpuRouting) -> None:
        """In a graph, the contents of a handle may differ in each replay: the graph computes its digests."""
        found = routing.digests
        if found is None or self._gpu.stream.is_capturing():
            found = self._ops.scratch_digests
            self._digest(routing, found)
        self._device_control.exchange(
            header, self._call.kind, routing.rank_prefix_matrix, found, is_combine=payload is None
        )
        self._used += routing

    def _digest(self, routing: GpuRouting, found: torch.Tensor) -> None:
        launch = self._device_control.launcher(
            digests.digest_handle,
            DIGEST_WARPS,
            NUM_RANKS=self._num_ranks,
            CHANNEL_BLOCK=block_of(routing.num_channels),
            TILE_ROWS=DIGEST_TILE,
        )
        launch(
            self._stream,
            (self._num_ranks, 2),
            self._device_control.constants,
            routing.rank_prefix_matrix,
            routing.channel_prefix_matrix,
            routing.recv_channel_prefix_matrix,
            routing.recv_src_idx,
            routing.send_head,
            found,
            routing.num_tokens,
            routing.num_recv_rows,
            routing.num_channels,
        )

    def totals(self, header: Array, payload: Payload) -> Totals:
        words = self._device_control.wait_for_totals(self._ticket)
        if words[constants.TOTAL_OUTCOME]:
            # Kernels of the call may still write to memory that is now free and may be allocated again.
            self._gpu.stream.end(False)
            try:
                self._ops.raise_reported()
            except AnyEPError:
                self._ops.forget_layout()
                raise
        num_rows = int(words[constants.TOTAL_ROWS])
        by_expert = words[constants.TOTAL_BY_EXPERT :][: self._local_experts(header)].tolist()
        uses_rings = bool(words[constants.TOTAL_USES_RINGS])
        self._is_sent = not uses_rings
        window = self._take_offered(header, payload, num_rows)
        return Totals(num_rows, by_expert, window, uses_rings and bool(words[constants.TOTAL_ALL_WAIT]))

    def _local_experts(self, header: Array) -> int:
        return int(header[EXPERTS]) // self._num_ranks

    def _take_offered(self, header: Array, payload: Payload, num_rows: int) -> int:
        """Take the window that every rank chose from this rank's offers; -1 if none was large enough."""
        needed = payload.window_bytes(num_rows)
        for index in range(int(header[NUM_OFFERS])):
            offset, size = int(header[OFFERS + 2 * index]), int(header[OFFERS + 2 * index + 1])
            if size >= needed:
                self._ops.windows.allocate_at(offset, needed)
                return offset
        return -1

    def grow(self, payload: Payload, totals: Totals) -> int:
        """Some rank has no window, and all ranks know it: they add windows if allowed. Return this rank's
        window."""
        needed = max(payload.window_bytes(int(rows)) for rows in self._device_control.rows_of)
        first = self._ops.grow(self._call, needed)
        if first is None:
            return totals.window
        token = payload.token
        self._device_control.place_in_new_block(first, token.hidden_bytes, token.num_topk, token.num_scales)
        if totals.window >= 0:
            return totals.window
        self._ops.windows.allocate_at(first, payload.window_bytes(totals.num_rows))
        return first

    # Rows

    def send_rows(
        self,
        payload: Payload,
        routing: GpuRouting,
        results: Results,
        config: Config,
        experts_per_rank: int,
        is_new: bool,
    ) -> None:
        self._wait_for_memory()
        if self._is_sent:
            return
        if self._ops.windows.num_bytes:
            self._ops.rows.send_to_windows(payload, routing, config, experts_per_rank, all_or_none=False)
        self._ops.rows.send_through_rings(payload, routing, results, config, experts_per_rank)

    def unpack(
        self, payload: Payload, routing: GpuRouting, results: Results, is_new: bool, pads: bool
    ) -> None:
        """Copy the source indices out of the window and finish the digests; a user's handle has both
        already."""
        if not is_new:
            return
        ids, num_rows = results.topk_idx, routing.num_recv_rows
        unpack = self._device_control.launcher(
            windows.unpack_window,
            4,
            NUM_RANKS=self._num_ranks,
            PAD=pads and ids is not None,
            BLOCK=UNPACK_BLOCK,
        )
        unpack(
            self._stream,
            (-(-num_rows // UNPACK_BLOCK),),
            self._device_control.targets,
            self._device_control.state,
            self._rank,
            routing.recv_src_idx,
            ids if ids is not None else self._device_control.state,
            routing.rank_prefix_matrix,
            routing.digests,
            num_rows,
            ids.shape[1] if ids is not None else 0,
        )

    # Combine

    def stage(self, combined: CombineInput, header: Array) -> None:
        """Copy rows into a window for the peers. If it has no room, rows go through rings. Without any
        windows the ring kernel runs even if there are no rows, because the results must be filled."""
        header[X_OFFSET], header[WEIGHTS_OFFSET] = -1, -1
        gpu_windows = self._ops.windows
        if not gpu_windows.num_bytes:
            return
        offsets: list[int] = []
        for tensor in (combined.x, combined.topk_weights):
            if tensor is None or tensor.numel() == 0:
                offsets.append(0)
                continue
            offset = gpu_windows.offset_of(tensor)
            if offset is None:
                num_bytes = tensor.numel() * tensor.element_size()
                offset = gpu_windows.allocate(num_bytes)
                if offset is None:
                    self._give_back()
                    return
                self._staged.append((offset, num_bytes))
                window = gpu_windows.tensor(offset, tuple(tensor.shape), tensor.dtype)
                if tensor is combined.x:
                    self._copy_for_peers(combined, window)
                else:
                    with self._gpu.on_communication_stream():
                        window.copy_(tensor)
            offsets.append(offset)
        header[X_OFFSET], header[WEIGHTS_OFFSET] = offsets

    def _copy_for_peers(self, combined: CombineInput, window: torch.Tensor) -> None:
        """Copy the rows that other ranks read; this rank reads its own rows where they are."""
        x, routing = combined.x, combined.routing
        launch = self._device_control.launcher(
            sums.copy_for_peers, COPY_WARPS, NUM_RANKS=self._num_ranks, TILE_WORDS=COPY_WORDS
        )
        launch(
            self._stream,
            (self._ops.rows.num_programs(combined.config),),
            _words(x),
            _words(window),
            routing.rank_prefix_matrix,
            self._rank,
            x.shape[0],
            x.shape[1] * x.element_size() // 4,
        )

    def _give_back(self) -> None:
        """Free the staged windows at once: later calls on the communication stream run after this one."""
        for window, num_bytes in self._staged:
            self._ops.windows.give_back(window, num_bytes)
        self._staged = []

    def reduce(self, combined: CombineInput, out: torch.Tensor, out_weights: torch.Tensor | None) -> None:
        if self._ops.windows.num_bytes:
            self._ops.rows.pull_and_sum(combined, out, out_weights)
        self._ops.rows.combine_through_rings(combined, out, out_weights)

    # The end

    def barrier(self, phase: Phase) -> None:
        if not self._is_sent:
            self._device_control.barrier(FLAGS_OF[phase])

    def end(self, *used: torch.Tensor | None) -> EventHandle | None:
        event: EventHandle | None = self._gpu.stream.end(self._run_async)
        self._device_control.control.end(self._call)
        self._ops.keep(self._run_async, self._previous, *used, *self._used)
        self._give_back()
        return event


def _tokens_per_channel(num_tokens: int, config: Config) -> int:
    return max(1, -(-num_tokens // config.num_channels))


def _words(x: torch.Tensor) -> Seen:
    """Rows as words of 4 bytes."""
    return Seen(x, torch.int32)
