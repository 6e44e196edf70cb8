"""Rows within a node: written directly to the receiver's window, or through its rings; a combine sums rows in
place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from anyep.backends import cpu
from anyep.backends.base import CombineInput, Payload, Results
from anyep.backends.cpu.routing import NodeHandle, checked_routing, difference_between, with_digests
from anyep.backends.cpu.rows import (
    DTYPE_CODES,
    WORTH_SPLITTING_BYTES,
    WORTH_STREAMING_BYTES,
    CpuCounts,
    Decision,
    NotifyCounts,
    RowMover,
    TokenPlaces,
    addresses_beside,
    first_tokens,
    row_arguments,
)
from anyep.calls import Array, Call, Phase, Stall
from anyep.headers import WEIGHTS_OFFSET, X_OFFSET
from anyep.layout import SOURCE_INDEX_BYTES, RingArea
from anyep.rings import part_offsets
from anyep.sizes import Config, TokenLayout

NO_SOURCES: Final = np.zeros(0, np.int32)


class WithinNode:
    """How rows travel where all ranks share memory."""

    source_bytes = SOURCE_INDEX_BYTES

    def __init__(self, mover: RowMover) -> None:
        self._mover = mover
        self._rank, self._num_ranks = mover.rank, mover.num_ranks
        self._ring_addresses: _RingAddresses | None = None

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
        arguments = row_arguments(payload, experts_per_rank)
        send_head, targets = routing.send_head, decision.targets
        offsets = decision.offsets.tolist()
        streaming = int(decision.num_rows * token.hidden_bytes >= WORTH_STREAMING_BYTES)
        if max(offsets) >= 0:
            mover.control.enter(call, Phase.SEND)
            mover.team.run(
                lambda first, end: cpu.send_to_windows(first, end, streaming, send_head, targets, *arguments),
                payload.num_tokens,
                worth_splitting=payload.num_tokens * token.hidden_bytes >= WORTH_SPLITTING_BYTES,
            )
            mover.signal_arrival(call)
        if min(offsets) < 0:
            self._send_through_rings(call, payload, routing, results, decision, config, arguments)

    def _send_through_rings(
        self,
        call: Call,
        payload: Payload,
        routing: NodeHandle,
        results: Results,
        decision: Decision,
        config: Config,
        arguments: tuple[Any, ...],
    ) -> None:
        by_ring = decision.offsets < 0
        receive = bool(by_ring[self._rank])
        area = self._mover.rings.node.area_for(config, payload.token)
        rings = self._rings(area, by_ring, np.full(self._num_ranks, receive))
        cursor = first_tokens(payload.num_tokens, config.num_channels)
        matrix = routing.count_matrix()
        to_send = np.where(by_ring, matrix[self._rank], 0)
        results_at = [results.x.data_ptr(), results.source.ctypes.data, *addresses_beside(results)]
        self._run_rings(
            call,
            cpu.dispatch_through_rings,
            rings,
            config,
            payload.token,
            np.repeat(cursor[:, None], self._num_ranks, axis=1),
            (
                routing.send_head,
                *arguments,
                routing.rows_by_lane(self._rank),
                np.array(results_at, np.int64),
            ),
            decision.num_rows,
            to_send,
            matrix[:, self._rank] if receive else np.zeros_like(to_send),
        )

    # Combine

    def reduce(
        self,
        call: Call,
        combined: CombineInput,
        headers: Array,
        out: torch.Tensor,
        out_weights: torch.Tensor,
    ) -> None:
        """Sum each token's rows: those in windows in place, others as they arrive through rings."""
        mover = self._mover
        x, routing, topk_weights, biases, config = combined
        token, hidden = combined.token, x.shape[1]
        x_offsets = headers[:, X_OFFSET]
        x_of = mover.window_bases + x_offsets
        weights_of = mover.window_bases + headers[:, WEIGHTS_OFFSET]
        bias_addresses = [bias.data_ptr() for bias in biases] + [0] * (2 - len(biases))
        sum_arguments = (
            out.data_ptr(),
            *bias_addresses,
            hidden,
            token.hidden_bytes,
            DTYPE_CODES[x.dtype],
            out_weights.numpy(),
        )
        send_head = routing.send_head
        if min(x_offsets.tolist()) >= 0:
            mover.control.enter(call, Phase.PULL)
            mover.team.run(
                lambda first, end: cpu.pull_and_sum(first, end, send_head, x_of, weights_of, *sum_arguments),
                routing.num_tokens,
                worth_splitting=routing.num_tokens * token.hidden_bytes >= WORTH_SPLITTING_BYTES,
            )
            return
        in_window = x_offsets >= 0
        mine = not in_window[self._rank]
        matrix = routing.count_matrix()
        area = mover.rings.node.area_for(config, token)
        self._run_rings(
            call,
            cpu.combine_through_rings,
            self._rings(area, np.full(self._num_ranks, mine), ~in_window),
            config,
            token,
            first_tokens(routing.num_tokens, config.num_channels),
            (
                routing.rows_by_lane(self._rank),
                x.data_ptr(),
                topk_weights.data_ptr() if topk_weights is not None else 0,
                send_head,
                np.where(in_window, x_of, 0),
                weights_of,
                *sum_arguments,
            ),
            x.shape[0],
            matrix[:, self._rank] if mine else np.zeros(self._num_ranks, np.int32),
            np.where(in_window, 0, matrix[self._rank]),
        )

    # Rings

    def _rings(self, area: RingArea, send_to: Array, receive_from: Array) -> _Rings:
        """The rings of a new call: to some ranks, from some ranks."""
        if self._ring_addresses is None or self._ring_addresses.area is not area:
            self._ring_addresses = self._addresses_of(area)
        at = self._ring_addresses
        shape = (area.num_channels, self._num_ranks)
        send_base, recv_base = np.empty(shape, np.int64), np.empty(shape, np.int64)
        # Only this rank advances the tail where it sends and the head where it receives.
        cpu.read_counters(at.send_tail, send_base)
        cpu.read_counters(at.recv_head, recv_base)
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
        """The addresses of the rows, tails and heads of all rings, by (channel, peer)."""
        channels = np.arange(area.num_channels, dtype=np.int64)[:, None]
        peers = np.arange(self._num_ranks, dtype=np.int64)[None, :]
        tail, head = self._mover.region.blocks.ring_tail, self._mover.region.blocks.ring_head
        addresses = self._mover.heap_addresses
        heaps, own = addresses[None, :], addresses[self._rank]
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
        """Send and receive until both are done; the team's threads share the channels.

        Both ring kernels have the same first and last arguments; `cursor` and `arguments` are specific to
        one kernel.
        """
        control, team = self._mover.control, self._mover.team
        control.enter(call, Phase.RINGS)
        before = (
            config.num_channels,
            *rings.arrays(),
            cursor,
            rings.sent,
            rings.taken,
            rings.num_rows,
            config.num_max_nvl_chunked_send_tokens,
            part_offsets(token),
            *arguments,
        )
        streaming = int(num_rows * token.hidden_bytes >= WORTH_STREAMING_BYTES)
        after = (control.sleepers, control.doorbells, self._rank, streaming)
        unfinished: list[int] = []

        def all_channels(num_spins: int) -> int:
            unfinished.clear()
            team.run(
                lambda first, end: unfinished.append(kernel(first, end, *before, num_spins, *after)),
                config.num_channels,
            )
            return sum(unfinished)

        control.wait_until(call, all_channels, lambda: rings.stall(to_send, to_take), rings.progress)


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

    def progress(self) -> int:
        return int(self.sent.sum() + self.taken.sum())

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
