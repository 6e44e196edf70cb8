"""Rows within a node: written directly to the receiver's window, or through its rings; a combine sums rows in
place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from anyep.backends import cpu
from anyep.backends.base import CombineInput, Payload, Results
from anyep.backends.cpu.kernels import groups
from anyep.backends.cpu.ring_addresses import RingAddresses, rows_moved
from anyep.backends.cpu.routing import NodeHandle, checked_routing, difference_between, with_digests
from anyep.backends.cpu.rows import (
    WORTH_SPLITTING_BYTES,
    WORTH_STREAMING_BYTES,
    CpuCounts,
    Decision,
    NotifyCounts,
    RowMover,
    TokenPlaces,
    addresses_of,
    entry_parts,
    first_tokens,
    outputs_group,
    payload_group,
    sums_group,
)
from anyep.core.calls import Array, Call, Phase, Stall
from anyep.core.headers import WEIGHTS_OFFSET, X_OFFSET
from anyep.layout import SOURCE_INDEX_BYTES
from anyep.sizes import Config, TokenLayout

NO_SOURCES: Final = np.zeros(0, np.int32)


class WithinNode:
    """How rows travel where all ranks share memory."""

    source_bytes = SOURCE_INDEX_BYTES

    def __init__(self, mover: RowMover) -> None:
        self._mover = mover
        self._rank, self._num_ranks = mover.rank, mover.num_ranks
        blocks = mover.region.blocks
        self._rings = RingAddresses(
            *(mover.heap_addresses, mover.rank, range(mover.num_ranks), mover.rank),
            *(blocks.ring_tail, blocks.ring_head),
        )

    # Counts and handles

    def new_node_counts(self) -> torch.Tensor | None:
        """None: with one node there are no counts per node."""
        return None

    def count_nodes(self, in_rank: torch.Tensor, counts: torch.Tensor) -> None:
        """Nothing to count."""

    def with_nodes(self, counts: CpuCounts, per_node: Any) -> CpuCounts:
        """On one node the user's counts per node do not matter."""
        return counts

    def routing_of(self, handle: Any, last: tuple[Any, Any] | None) -> NodeHandle:
        """The routing of a handle; the tuple object that the last dispatch returned needs no unpacking."""
        if last is not None and handle is last[0]:
            return with_digests(last[1], self._rank)
        return checked_routing(handle, self._rank, self._num_ranks)

    def new_routing(self, places: TokenPlaces) -> NodeHandle:
        num_ranks, num_channels = places.by_channel.shape
        return NodeHandle(
            np.empty((num_ranks, num_ranks), np.int32),
            np.empty((num_ranks, num_channels), np.int32),
            np.empty((num_ranks, num_channels), np.int32),
            NO_SOURCES,
            # The user may change the mask afterwards; the handle keeps a copy.
            places.in_rank.copy(),
            np.empty(places.position.shape, np.int32),
        )

    def with_rows(self, routing: NodeHandle, num_rows: int, is_counted: bool) -> NodeHandle:
        return routing._replace(recv_src_idx=np.empty(num_rows, np.int32))

    def difference_between(self, digests: Array) -> str:
        return difference_between(digests)

    # Notify

    def notify(self, call: Call, header: Array, counts: CpuCounts, routing: NodeHandle) -> NotifyCounts:
        """Exchange notify messages, and fill the routing from them."""
        places, control = counts.places, self._mover.control
        found = NotifyCounts(
            np.empty((self._num_ranks, self._num_ranks), np.int32),
            np.empty(places.by_channel.shape, np.int32),
            np.empty(counts.num_experts // self._num_ranks, np.int64),
        )
        control.exchange(call, header, (places.by_rank, places.by_channel, counts.by_expert))
        control.read_counts(call, found.matrix, found.by_channel, found.by_expert)
        cpu.fill_handle(
            self._rank,
            found.matrix,
            places.by_channel,
            found.by_channel,
            places.position,
            routing.rank_prefix_matrix,
            routing.channel_prefix_matrix,
            routing.recv_channel_prefix_matrix,
            routing.send_head,
        )
        return found

    # Dispatch

    def send_rows(
        self,
        call: Call,
        payload: Payload,
        routing: NodeHandle,
        results: Results,
        decision: Decision,
        config: Config,
        experts_per_rank: int,
        is_new: bool,
    ) -> None:
        """Send the rows: by window where the receiver has one, else through its rings."""
        mover, token = self._mover, payload.token
        group = payload_group(payload, experts_per_rank)
        send_head, targets = routing.send_head, decision.targets
        offsets = decision.offsets.tolist()
        streaming = int(decision.num_rows * token.hidden_bytes >= WORTH_STREAMING_BYTES)
        if max(offsets) >= 0:
            plain_group = tuple(group)
            mover.control.enter(call, Phase.SEND)
            mover.team.run(
                lambda first, end: cpu.send_to_windows(
                    first, end, send_head, targets, plain_group, streaming
                ),
                payload.num_tokens,
                worth_splitting=payload.num_tokens * token.hidden_bytes >= WORTH_SPLITTING_BYTES,
            )
            mover.signal_arrival(call)
        if min(offsets) < 0:
            self._send_through_rings(call, token, group, routing, results, decision, config, streaming)
        self._count_sent(routing, decision.offsets, token, payload.bytes_beside_row, is_return=False)

    def _send_through_rings(
        self,
        call: Call,
        token: TokenLayout,
        payload: groups.Payload,
        routing: NodeHandle,
        results: Results,
        decision: Decision,
        config: Config,
        streaming: int,
    ) -> None:
        by_ring = decision.offsets < 0
        receive = bool(by_ring[self._rank])
        rings = self._begin(config, token, by_ring, receive)
        cursor = first_tokens(routing.num_tokens, config.num_channels)
        arguments = (
            payload,
            groups.RingTokens(np.repeat(cursor[:, None], self._num_ranks, axis=1), routing.send_head),
            groups.RingResults(routing.rows_by_lane(self._rank), addresses_of(results)),
            streaming,
        )
        matrix = routing.count_matrix()
        to_send = np.where(by_ring, matrix[self._rank], 0)
        to_take = matrix[:, self._rank] if receive else np.zeros_like(to_send)
        self._run_rings(
            *(call, cpu.dispatch_through_rings, rings, config, token, arguments, to_send, to_take)
        )

    # Combine

    def reduce(
        self,
        call: Call,
        combined: CombineInput[NodeHandle],
        headers: Array,
        out: torch.Tensor,
        out_weights: torch.Tensor,
    ) -> None:
        """Sum each token's rows: those in windows in place, others as they arrive through rings."""
        mover = self._mover
        x, routing, config, token = combined.x, combined.routing, combined.config, combined.token
        x_offsets = headers[:, X_OFFSET]
        self._count_sent(routing, x_offsets, token, 4 * token.num_topk, is_return=True)
        x_of = mover.window_bases + x_offsets
        weights_of = mover.window_bases + headers[:, WEIGHTS_OFFSET]
        send_head, sums = routing.send_head, sums_group(combined, out, out_weights)
        if min(x_offsets.tolist()) >= 0:
            plain_sums = tuple(sums)
            mover.control.enter(call, Phase.PULL)
            mover.team.run(
                lambda first, end: cpu.pull_and_sum(first, end, send_head, x_of, weights_of, plain_sums),
                routing.num_tokens,
                worth_splitting=routing.num_tokens * token.hidden_bytes >= WORTH_SPLITTING_BYTES,
            )
            return
        in_window = x_offsets >= 0
        mine = not in_window[self._rank]
        arguments = (
            outputs_group(combined, np.where(in_window, x_of, 0), weights_of),
            sums,
            groups.RingSums(
                first_tokens(routing.num_tokens, config.num_channels),
                send_head,
                routing.rows_by_lane(self._rank),
            ),
            int(x.shape[0] * token.hidden_bytes >= WORTH_STREAMING_BYTES),
        )
        matrix = routing.count_matrix()
        to_push = matrix[:, self._rank] if mine else np.zeros(self._num_ranks, np.int32)
        to_take = np.where(in_window, 0, matrix[self._rank])
        rings = self._begin(config, token, mine, ~in_window)
        self._run_rings(*(call, cpu.combine_through_rings, rings, config, token, arguments, to_push, to_take))

    def _count_sent(
        self, routing: NodeHandle, offsets: Array, token: TokenLayout, beside_bytes: int, is_return: bool
    ) -> None:
        """Count the rows; beside one go so many bytes by window, and by ring what its entry has room for."""
        cpu.count_sent(
            self._mover.control.traffic.normal.words,
            *(routing.rank_prefix_matrix, self._rank, int(is_return), offsets),
            *(token.hidden_bytes, beside_bytes, token.token_bytes - token.hidden_bytes),
        )

    # Rings

    def _begin(
        self, config: Config, token: TokenLayout, send_to: Array | bool, receive_from: Array | bool
    ) -> groups.RingStack:
        """The rings of a new call: to some ranks, from some ranks."""
        area = self._mover.rings.node.area_for(config, token)
        return self._rings.begin(area, config.num_max_nvl_chunked_send_tokens, send_to, receive_from)

    def _run_rings(
        self,
        call: Call,
        kernel: Callable[..., int],
        rings: groups.RingStack,
        config: Config,
        token: TokenLayout,
        arguments: tuple[Any, ...],
        to_send: Array,
        to_take: Array,
    ) -> None:
        """Send and receive until both are done; the team's threads share the channels.

        Both ring kernels have the same first arguments; `arguments` are specific to one kernel.
        """
        control, team = self._mover.control, self._mover.team
        control.enter(call, Phase.RINGS)
        arguments = groups.plain(rings, entry_parts(token), self._mover.bells, *arguments)
        unfinished: list[int] = []

        def all_channels(num_spins: int) -> int:
            unfinished.clear()
            team.run(
                lambda first, end: unfinished.append(kernel(first, end, num_spins, *arguments)),
                config.num_channels,
            )
            return sum(unfinished)

        control.wait_until(
            call, all_channels, lambda: _stall(rings, to_send, to_take), lambda: rows_moved([rings])
        )


def _stall(rings: groups.RingStack, to_send: Array, to_take: Array) -> Stall:
    """The peers with rows that are still to come, or else with rings that are still full."""
    for what, counts, expected in (
        ("rows", rings.taken, to_take),
        ("room in its ring", rings.sent, to_send),
    ):
        done = counts.sum(axis=0)
        peers = [int(peer) for peer in np.flatnonzero(done < expected)]
        if peers:
            channel = int(counts[:, peers[0]].argmin())
            return Stall(peers, what, int(done[peers[0]]), int(expected[peers[0]]), channel)
    return Stall(range(rings.sent.shape[1]), "rows", 0, 0)
