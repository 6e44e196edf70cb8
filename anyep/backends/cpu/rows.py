"""Common parts of moving rows on the CPU, within a node and between nodes: addresses, windows, threads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import torch

from anyep.backends import cpu
from anyep.backends.base import CombineInput, Control, Payload, Results, Routing
from anyep.backends.cpu.heap import Block
from anyep.backends.cpu.kernels import groups
from anyep.backends.cpu.memory import WindowHeap
from anyep.backends.cpu.team import Team
from anyep.core.calls import Array, Call, Phase, Topic
from anyep.core.diagnosis import too_many_rows
from anyep.core.headers import NUM_OFFERS, OFFERS, RESULT_ROWS
from anyep.core.rings import Rings, part_offsets
from anyep.errors import InvalidCall, no_expert
from anyep.layout import ControlRegion
from anyep.sizes import TokenLayout
from anyep.topology import Topology

WORTH_SPLITTING_BYTES: Final = 1 << 20
WORTH_STREAMING_BYTES: Final = 1 << 22
NO_IDS: Final = np.zeros((0, 0), np.int64)
NO_WEIGHTS: Final = np.zeros((0, 0), np.float32)
DTYPE_CODES: Final = {torch.bfloat16: cpu.BF16, torch.float16: cpu.FP16, torch.float32: cpu.FP32}


class TokenPlaces(NamedTuple):
    """Where the tokens of a dispatch go: the rows for each rank, the same by channel, each token's number."""

    in_rank: Array
    by_rank: Array
    by_channel: Array
    position: Array
    by_node_channel: Array | None = None
    """Between nodes, [node, channel]: the tokens that go to a node."""
    send_rdma_head: Array | None = None
    """Between nodes, [token, node]: the number of a token among those, or -1."""


class CpuCounts(NamedTuple):
    """What a rank knows about the tokens of its dispatch: where they go, and how many go to each expert."""

    places: TokenPlaces
    by_expert: Array

    @property
    def num_experts(self) -> int:
        return len(self.by_expert)


class NotifyCounts(NamedTuple):
    """The counts of all notify messages: rows from rank to rank, from each rank by channel, and tokens per
    local expert."""

    matrix: Array
    by_channel: Array
    by_expert: Array
    relayed: Array | None = None
    """Between nodes: rows and tokens that this rank relays, by [node, rank of this node, channel]."""


class Decision(NamedTuple):
    """Where rows go: this rank's rows, each receiver's window (-1: rings), the addresses of its results, and
    the counts from which this was decided."""

    num_rows: int
    offsets: Array
    targets: Array
    counts: NotifyCounts


class RowMover:
    """The memory of all ranks as mapped by one rank, and the steps that all ways of moving rows share."""

    def __init__(
        self,
        control: Control,
        region: ControlRegion,
        topology: Topology,
        heaps: Sequence[Block],
        window_blocks: dict[int, Block],
        rings: Rings,
        team: Team,
    ) -> None:
        self.control = control
        self.region = region
        self.topology = topology
        self.rings = rings
        self.team = team
        self.rank = control.rank
        self.num_ranks = control.num_ranks
        self.windows = WindowHeap(window_blocks[self.rank])
        self.node_ranks = topology.ranks_on(topology.node_of(self.rank))
        self.heaps = heaps
        self.heap_addresses = np.array([heap.address for heap in heaps], np.int64)
        # Calls may continue after the Buffer was dropped, and hold only the addresses of windows.
        self._window_blocks = window_blocks
        # The windows of ranks on other nodes cannot be reached.
        self.window_bases = np.zeros(self.num_ranks, np.int64)
        for rank, block in window_blocks.items():
            self.window_bases[rank] = block.address
        # Each call writes its decision here; the calls of a stream run one after the other.
        self._num_rows = np.empty(self.num_ranks, np.int64)
        self._offsets = np.empty(self.num_ranks, np.int64)
        self._targets = np.empty((self.num_ranks, 5), np.int64)
        no_rows = np.zeros((self.num_ranks, self.num_ranks), np.int32)
        self.no_counts = NotifyCounts(no_rows, no_rows, no_rows)
        blocks, own_index = region.blocks, topology.nvl_rank_of(self.rank)
        self.arrival_at_peers = control.counters_at(self.node_ranks, blocks.arrival, own_index)
        self._own_arrival = control.own_counters(blocks.arrival)
        self.pulled_at_peers = control.counters_at(self.node_ranks, blocks.pulled, own_index)
        self._own_pulled = control.own_counters(blocks.pulled)
        self.bells = groups.Bells(control.doorbells, control.sleepers, self.rank)
        self.node_wake_ups = control.wake_ups[list(self.node_ranks)]

    def choose_windows(self, headers: Array, counts: NotifyCounts, payload: Payload) -> Decision:
        """Decide for each receiver whether its rows fit a window it offers; all ranks decide the same."""
        num_rows, offsets, targets = self._num_rows, self._offsets, self._targets
        too_small = cpu.choose_windows(
            headers,
            counts.matrix,
            RESULT_ROWS,
            NUM_OFFERS,
            OFFERS,
            payload.bytes_per_row,
            self.window_bases,
            num_rows,
            offsets,
            targets,
        )
        if too_small >= 0:
            arriving = int(counts.matrix[:, too_small].sum())
            raise too_many_rows(too_small, int(headers[too_small, RESULT_ROWS]), arriving)
        return Decision(int(num_rows[self.rank]), offsets, targets, counts)

    def signal_arrival(self, call: Call) -> None:
        """Tell the ranks of this node that this rank's rows are in their windows."""
        self.control.signal(self.arrival_at_peers, Topic.ROWS, call.number, self.node_wake_ups)

    def wait_for_arrival(self, call: Call, decision: Decision) -> None:
        """Wait until all rows are in this rank's window, if it has one."""
        if decision.offsets[self.rank] >= 0:
            self.control.wait_for_counters(
                call, Phase.RECEIVE, self._own_arrival, Topic.ROWS, "rows", self.node_ranks
            )

    def acknowledge(self, call: Call) -> None:
        """Signal the owners of rows that this rank has read them, and wait until its own have been read."""
        self.control.signal(self.pulled_at_peers, Topic.PULLED, call.number, self.node_wake_ups)
        self.control.wait_for_counters(
            call, Phase.ACKNOWLEDGE, self._own_pulled, Topic.PULLED, "acknowledgement", self.node_ranks
        )

    def unpack(self, payload: Payload, results: Results, decision: Decision, is_new: bool) -> None:
        """Copy the data beside the rows out of the window; mark the ids of rows that are not in use."""
        token, num_result_rows = payload.token, results.x.shape[0]
        if decision.offsets[self.rank] >= 0:
            cpu.unpack_window(
                decision.targets[self.rank],
                decision.num_rows,
                num_result_rows,
                payload.source_bytes if is_new else 0,
                token.num_topk,
                token.num_scales,
                results.source.ctypes.data,
                *addresses_beside(results),
            )
        elif results.topk_idx is not None:
            cpu.pad_ids(results.topk_idx.data_ptr(), decision.num_rows, num_result_rows, token.num_topk)

    def stage(self, tensors: Sequence[torch.Tensor | None]) -> tuple[list[int], list[int]]:
        """Where peers can read each tensor: offsets in the windows, and the windows allocated for copies.

        The offsets are all -1 if there is no room.
        """
        taken: list[int] = []
        offsets: list[int] = []
        for tensor in tensors:
            if tensor is None or tensor.numel() == 0:
                offsets.append(0)
                continue
            offset = self.windows.block.offset_of(tensor)
            if offset is None:
                offset = self.windows.allocate(tensor.numel() * tensor.element_size())
                if offset is None:
                    for window in taken:
                        self.windows.free(window)
                    return [-1] * len(tensors), []
                taken.append(offset)
                self._copy_to_window(tensor, offset)
            offsets.append(offset)
        return offsets, taken

    def _copy_to_window(self, tensor: torch.Tensor, offset: int) -> None:
        row_bytes = tensor.shape[1] * tensor.element_size()
        destination = self.windows.block.address + offset
        # Streaming stores need aligned rows; those of top-k weights may be unaligned.
        streaming = int(row_bytes % 16 == 0 and tensor.shape[0] * row_bytes >= WORTH_STREAMING_BYTES)
        source = tensor.data_ptr()
        self.team.run(
            lambda first, end: cpu.copy_rows(
                destination + first * row_bytes, source + first * row_bytes, end - first, row_bytes, streaming
            ),
            tensor.shape[0],
            worth_splitting=tensor.shape[0] * row_bytes >= WORTH_SPLITTING_BYTES,
        )


def ids_of(payload: Payload) -> Array:
    return payload.topk_idx.numpy() if payload.topk_idx is not None else NO_IDS


def payload_group(payload: Payload, experts_per_rank: int) -> groups.Payload:
    """What the kernels of a dispatch send."""
    # A stream's thread runs this in grad mode, whatever the caller's thread has: hence `detach`.
    weights = payload.topk_weights.detach().numpy() if payload.topk_weights is not None else NO_WEIGHTS
    scales = payload.scales
    scales_at = stride_token = stride_scale = num_scales = 0
    if scales is not None:
        scales_at, num_scales = scales.data_ptr(), scales.shape[1]
        stride_token, stride_scale = scales.stride()
    return groups.Payload(
        *(payload.x.data_ptr(), payload.token.hidden_bytes),
        *(scales_at, stride_token, stride_scale, num_scales),
        topk_idx=ids_of(payload),
        topk_weights=weights,
        experts_per_rank=experts_per_rank,
    )


def outputs_group(combined: CombineInput[Routing], x_of: Array, weights_of: Array) -> groups.Outputs:
    """What the kernels of a combine sum: this rank's rows, and those of its peers that are read in place."""
    weights = combined.topk_weights
    return groups.Outputs(
        combined.x.data_ptr(), weights.data_ptr() if weights is not None else 0, x_of, weights_of
    )


def sums_group(combined: CombineInput[Routing], out: torch.Tensor, out_weights: torch.Tensor) -> groups.Sums:
    """What the kernels of a combine fill."""
    x = combined.x
    biases = [bias.data_ptr() for bias in combined.biases] + [0] * (2 - len(combined.biases))
    return groups.Sums(
        out.data_ptr(),
        biases[0],
        biases[1],
        x.shape[1],
        x.shape[1] * x.element_size(),
        DTYPE_CODES[x.dtype],
        out_weights.numpy(),
        combined.order.numpy() if combined.order is not None else groups.NO_ORDER,
        int(combined.is_keyed),
    )


@cache
def entry_parts(token: TokenLayout) -> groups.EntryParts:
    """The parts of a ring's entry."""
    meta_at, scales_at, ids_at, weights_at, num_bytes = part_offsets(token).tolist()
    return groups.EntryParts(
        *(meta_at, scales_at, ids_at, weights_at, num_bytes),
        token.hidden_bytes,
        token.num_scales,
        token.num_topk,
    )


def addresses_of(results: Results) -> Array:
    """The addresses of rows, sources, ids, weights and scales."""
    return np.array([results.x.data_ptr(), results.source.ctypes.data, *addresses_beside(results)], np.int64)


def addresses_beside(results: Results) -> tuple[int, int, int]:
    """The addresses of ids, weights and scales; 0 where there are none."""
    parts = (results.topk_idx, results.topk_weights, results.scales)
    return tuple(part.data_ptr() if part is not None else 0 for part in parts)  # type: ignore[return-value]


def first_tokens(num_tokens: int, num_channels: int) -> Array:
    """Where each channel's range of tokens begins."""
    return np.arange(num_channels, dtype=np.int64) * max(1, -(-num_tokens // num_channels))


def wrong_id(topk_idx: torch.Tensor, place: int, num_experts: int) -> InvalidCall:
    """The error for an id that is not an expert; `place` is token * top-k + column."""
    token, column = divmod(place, topk_idx.shape[1])
    return no_expert(token, column, int(topk_idx[token, column]), num_experts)
