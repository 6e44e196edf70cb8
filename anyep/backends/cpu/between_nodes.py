"""Rows between nodes: through rings to a relay on each node, and from there by window or ring to its ranks.

The plan (`anyep.core.relay`) says which rank relays which rows. Between virtual nodes on one machine, rows
and counters are written directly to the memory of the relay. Between hosts they are written to local memory,
from which a proxy forwards them through an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from anyep.backends import cpu
from anyep.backends.base import CombineInput, Payload, Results
from anyep.backends.cpu.kernels import groups
from anyep.backends.cpu.relay_routing import RelayRouting, checked, difference_between, relay_routing_of
from anyep.backends.cpu.ring_addresses import RingAddresses, rows_moved
from anyep.backends.cpu.rows import (
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
from anyep.core.relay import RelayPlan, RelayWork
from anyep.core.rings import NetworkRings
from anyep.errors import InvalidCall
from anyep.layout import NUM_MAILBOXES, RECV_BASE, RECV_TAIL, SEND_BASE, SEND_HEAD, RingArea
from anyep.sizes import SOURCE_META_BYTES, Config, TokenLayout

ROUNDS_AT_ONCE: Final = 32
NO_ROWS: Final = np.zeros((0, SOURCE_META_BYTES), np.uint8)


class Proxy(Protocol):
    """Forwards the contents of a call's rings to other hosts."""

    def forward(self) -> None: ...


class BetweenNodes:
    """How rows travel where some ranks are on other nodes; `remote` are the ranks on other hosts."""

    source_bytes = SOURCE_META_BYTES

    def __init__(
        self,
        mover: RowMover,
        plan: RelayPlan,
        remote: Sequence[int] = (),
        new_proxy: Callable[[Mapping[int, int], CallRings], Proxy] | None = None,
    ) -> None:
        assert mover.rings.network is not None
        self._network: NetworkRings = mover.rings.network
        self._mover = mover
        self._plan = plan
        self._topology = plan.topology
        self._rank, self._num_ranks = mover.rank, mover.num_ranks
        self._remote = list(remote)
        self._remote_relays = {node: relay for node, relay in enumerate(plan.relays) if relay in remote}
        self._new_proxy = new_proxy
        blocks, per_node = mover.region.blocks, self._topology.ranks_per_node
        self._net_rings = RingAddresses(
            *(mover.heap_addresses, mover.rank, range(plan.index, mover.num_ranks, per_node), plan.node),
            *(blocks.network_tail, blocks.network_head, self._remote, self._network.half_bytes),
        )
        self._nvl_rings = RingAddresses(
            *(mover.heap_addresses, mover.rank, mover.node_ranks, plan.index),
            *(blocks.ring_tail, blocks.ring_head),
        )

    # Counts and handles

    def new_node_counts(self) -> torch.Tensor | None:
        """A tensor for the number of tokens that go to each node."""
        return torch.empty(self._topology.num_nodes, dtype=torch.int32, device="cpu")

    def count_nodes(self, in_rank: torch.Tensor, counts: torch.Tensor) -> None:
        """Count the tokens that go to each node, each once."""
        by_channel, _ = self._place_in_nodes(in_rank.numpy(), 1)
        counts.numpy()[:] = by_channel[:, 0]

    def with_nodes(self, counts: CpuCounts, per_node: Any) -> CpuCounts:
        """Add the counts by node; a user's counts per node that contradict the mask are refused."""
        places = counts.places
        by_channel, numbers = self._place_in_nodes(places.in_rank, places.by_channel.shape[1])
        _check_node_counts(per_node, by_channel.sum(axis=1))
        return CpuCounts(
            places._replace(by_node_channel=by_channel, send_rdma_head=numbers), counts.by_expert
        )

    def _place_in_nodes(self, in_rank: Array, num_channels: int) -> tuple[Array, Array]:
        """[node, channel]: the tokens that go to a node; [token, node]: their numbers among them, or -1."""
        num_nodes = self._topology.num_nodes
        by_channel = np.empty((num_nodes, num_channels), np.int32)
        numbers = np.empty((len(in_rank), num_nodes), np.int32)
        cpu.place_in_nodes(in_rank, self._topology.ranks_per_node, by_channel, numbers)
        return by_channel, numbers

    def routing_of(self, handle: Any, last: tuple[Any, Any] | None) -> RelayRouting:
        """The routing of a handle; the tuple object that the last dispatch returned needs no unpacking."""
        is_last = last is not None and handle is last[0]
        routing = last[1] if last is not None and is_last else relay_routing_of(handle, self._topology)
        return checked(routing, self._topology, self._rank)

    def new_routing(self, places: TokenPlaces) -> RelayRouting:
        assert places.by_node_channel is not None
        assert places.send_rdma_head is not None
        ranks, channels = places.by_channel.shape
        nodes = self._topology.num_nodes
        return RelayRouting(
            # The user may change the mask afterwards; the handle keeps a copy.
            places.in_rank.copy(),
            np.cumsum(places.by_node_channel, axis=1, dtype=np.int32),
            np.cumsum(places.by_channel, axis=1, dtype=np.int32),
            np.empty((nodes, channels), np.int32),
            np.empty(nodes, np.int32),
            np.empty((ranks, channels), np.int32),
            np.empty(ranks, np.int32),
            NO_ROWS,
            places.send_rdma_head,
            np.empty((0, self._topology.ranks_per_node), np.int32),
        )

    def with_rows(self, routing: RelayRouting, num_rows: int, is_counted: bool) -> RelayRouting:
        """Add room for received and relayed rows: as many as were counted, or the most that are received."""
        num_relayed = routing.num_relayed if is_counted else num_rows
        return routing._replace(
            recv_src_meta=np.zeros((num_rows, SOURCE_META_BYTES), np.uint8),
            send_nvl_head=np.full((num_relayed, self._topology.ranks_per_node), -1, np.int32),
        )

    def difference_between(self, digests: Array) -> str:
        return difference_between(digests, self._topology)

    # Notify

    def notify(self, call: Call, header: Array, counts: CpuCounts, routing: RelayRouting) -> NotifyCounts:
        """Exchange notify messages, and fill the routing from them."""
        places, control = counts.places, self._mover.control
        assert places.by_node_channel is not None
        ranks, nodes = self._num_ranks, self._topology.num_nodes
        channels = places.by_channel.shape[1]
        by_rank_and_node = np.concatenate(
            [places.by_rank, places.by_node_channel.sum(axis=1, dtype=np.int32)]
        )
        matrix = np.empty((ranks, ranks + nodes), np.int32)
        by_channel = np.empty((ranks, channels), np.int32)
        by_expert = np.empty(counts.num_experts // ranks, np.int64)
        headers = control.exchange(
            call,
            header,
            (by_rank_and_node, places.by_channel, counts.by_expert),
            lambda: self._write_counts(call, places),
        )
        control.read_counts(call, matrix, by_channel, by_expert)
        self._plan.check_room(headers, matrix[:, ranks:])
        relayed = self._read_counts(call, channels)
        routing.recv_rdma_channel_prefix_matrix[:] = np.cumsum(relayed[:, -1], axis=1)
        routing.recv_rdma_rank_prefix_sum[:] = np.cumsum(relayed[:, -1].sum(axis=1))
        routing.recv_gbl_channel_prefix_matrix[:] = np.cumsum(by_channel, axis=1) - by_channel
        routing.recv_gbl_rank_prefix_sum[:] = np.cumsum(matrix[:, self._rank])
        return NotifyCounts(np.ascontiguousarray(matrix[:, :ranks]), by_channel, by_expert, relayed)

    def _write_counts(self, call: Call, places: TokenPlaces) -> dict[int, list[tuple[int, int]]]:
        """Tell every relay how many rows each channel has for each rank of its node, and how many tokens."""
        assert places.by_node_channel is not None
        block, plan = self._mover.region.blocks.network_counts, self._plan
        per_node, channels = self._topology.ranks_per_node, places.by_channel.shape[1]
        offset = block.offset(plan.node, call.number % NUM_MAILBOXES)
        for node, relay in enumerate(plan.relays):
            counts = self._mover.heaps[relay].array(offset, (per_node + 1) * channels, np.int32)
            counts = counts.reshape(per_node + 1, channels)
            counts[:per_node] = places.by_channel[node * per_node : (node + 1) * per_node]
            counts[per_node] = places.by_node_channel[node]
        num_bytes = 4 * (per_node + 1) * channels
        relays = slice(plan.index, None, per_node)
        self._mover.control.traffic.normal.add_message(relays, num_bytes)
        return {relay: [(offset, num_bytes)] for relay in plan.relays}

    def _read_counts(self, call: Call, channels: int) -> Array:
        """[node, rank of this node, channel]: the rows that this rank relays; then the tokens."""
        block, own_heap = self._mover.region.blocks.network_counts, self._mover.heaps[self._rank]
        rows = self._topology.ranks_per_node + 1
        return np.stack(
            [
                own_heap.array(
                    block.offset(node, call.number % NUM_MAILBOXES), rows * channels, np.int32
                ).reshape(rows, channels)
                for node in range(self._topology.num_nodes)
            ]
        )

    # Dispatch

    def send_rows(
        self,
        call: Call,
        payload: Payload,
        routing: RelayRouting,
        results: Results,
        decision: Decision,
        config: Config,
        experts_per_rank: int,
        is_new: bool,
    ) -> None:
        """Send the rows: between nodes through rings, within this one by window or through rings."""
        mover, plan = self._mover, self._plan
        here = list(mover.node_ranks)
        in_window = decision.offsets[here] >= 0
        mine = bool(in_window[plan.index])
        token, channels = payload.token, config.num_channels
        rings = self._rings(config, token, ~in_window, not mine)
        lanes = routing.lanes(self._topology)
        cursor = first_tokens(payload.num_tokens, channels)
        next_rows, relayed_to = np.zeros((0, 0, 0), np.int64), lanes.relayed_to
        if is_new:
            # The kernel is about to write into the new handle which rows go where; the messages say how many.
            relayed = decision.counts.relayed
            assert relayed is not None
            next_rows = plan.next_rows(decision.counts.matrix, relayed)
            relayed_to = relayed[:, : len(here)].sum(axis=(0, 2))
        arguments = (
            payload_group(payload, experts_per_rank),
            groups.NodeTokens(
                np.repeat(cursor[:, None], self._topology.num_nodes, axis=1),
                routing.is_token_in_rank,
                routing.send_rdma_head,
            ),
            groups.Relayed(
                routing.send_nvl_head,
                lanes.first_relayed,
                lanes.relayed,
                next_rows,
                np.ascontiguousarray(decision.targets[here]),
                int(is_new),
            ),
            groups.Received(
                np.ascontiguousarray(lanes.num_rows.sum(axis=2).T.astype(np.int32)),
                lanes.first_row,
                addresses_of(results),
            ),
        )
        streaming = int(decision.num_rows * token.hidden_bytes >= WORTH_STREAMING_BYTES)
        sent, to_relay = routing.rdma_channel_prefix_matrix[:, -1], lanes.relayed.sum(axis=1)
        to_take = lanes.num_rows.sum(axis=(0, 2)) if not mine else np.zeros(len(here), np.int64)
        self._run(
            call,
            cpu.dispatch_between_nodes,
            rings,
            config,
            token,
            (*arguments, streaming),
            RelayWork(sent, to_relay, relayed_to * ~in_window, to_take),
        )
        if in_window.any():
            mover.signal_arrival(call)
        self._count_sent(rings, token, relayed_to[None], in_window, payload.bytes_beside_row)

    # Combine

    def reduce(
        self,
        call: Call,
        combined: CombineInput[RelayRouting],
        headers: Array,
        out: torch.Tensor,
        out_weights: torch.Tensor,
    ) -> None:
        """Sum each token's rows: within a node at the relay, then at the source."""
        mover, plan = self._mover, self._plan
        x, routing, config, token = combined.x, combined.routing, combined.config, combined.token
        here = list(mover.node_ranks)
        in_window = headers[here, X_OFFSET] >= 0
        bases = mover.window_bases[here]
        x_of = np.where(in_window, bases + headers[here, X_OFFSET], 0)
        weights_of = np.where(in_window, bases + headers[here, WEIGHTS_OFFSET], 0)
        mine = bool(in_window[plan.index])
        rings = self._rings(config, token, not mine, ~in_window)
        lanes = routing.lanes(self._topology)
        before = np.zeros((*lanes.num_rows.shape[:2], self._topology.num_nodes + 1), np.int64)
        np.cumsum(lanes.num_rows, axis=2, out=before[:, :, 1:])
        own_virtual = int(routing.recv_rdma_rank_prefix_sum[plan.node - 1]) if plan.node else 0
        arguments = (
            outputs_group(combined, x_of, weights_of),
            sums_group(combined, out, out_weights),
            groups.Pushed(lanes.first_row, before),
            groups.NodeSums(
                first_tokens(routing.num_tokens, config.num_channels),
                routing.send_rdma_head,
                routing.send_nvl_head,
                lanes.first_relayed,
                lanes.relayed,
                own_virtual,
            ),
        )
        streaming = int(x.shape[0] * token.hidden_bytes >= WORTH_STREAMING_BYTES)
        to_push = before[:, :, -1].sum(axis=0) if not mine else np.zeros(len(here), np.int64)
        self._run(
            call,
            cpu.combine_between_nodes,
            rings,
            config,
            token,
            (*arguments, streaming),
            RelayWork(
                lanes.relayed.sum(axis=1),
                routing.rdma_channel_prefix_matrix[:, -1],
                to_push,
                lanes.relayed_to * ~in_window,
            ),
        )
        # A rank with a window lets its relays read rows and weights; another pushes whole entries of rings.
        has_window = np.full(len(here), mine)
        self._count_sent(rings, token, before[:, :, -1], has_window, 4 * token.num_topk)

    # Rings

    def _rings(
        self, config: Config, token: TokenLayout, send_to: Array | bool, receive_from: Array | bool
    ) -> CallRings:
        """The rings of a new call: between nodes, and to and from some ranks of this node."""
        net_area = self._network.area_for(config, token)
        nvl_area = self._mover.rings.node.area_for(config, token)
        return CallRings(
            net_area,
            self._net_rings.begin(net_area, config.num_max_rdma_chunked_send_tokens),
            self._nvl_rings.begin(nvl_area, config.num_max_nvl_chunked_send_tokens, send_to, receive_from),
        )

    def _run(
        self,
        call: Call,
        kernel: Callable[..., int],
        rings: CallRings,
        config: Config,
        token: TokenLayout,
        arguments: tuple[Any, ...],
        work: RelayWork,
    ) -> None:
        """Send, relay and receive until all is done; the team's threads share the channels.

        Both kernels have the same first arguments; `arguments` are specific to one kernel.
        """
        control, plan, team = self._mover.control, self._plan, self._mover.team
        control.enter(call, Phase.RINGS)
        arguments = groups.plain(
            *(plan.node, rings.net_stack, rings.nvl_stack, entry_parts(token), self._mover.bells),
            *arguments,
        )
        unfinished: list[int] = []

        def all_channels(num_spins: int, max_polls: int = cpu.MAX_POLLS) -> int:
            unfinished.clear()
            team.run(
                lambda first, end: unfinished.append(kernel(first, end, num_spins, max_polls, *arguments)),
                config.num_channels,
            )
            return sum(unfinished)

        step: Callable[[int], int] = all_channels
        if self._new_proxy is not None:
            proxy = self._new_proxy(self._remote_relays, rings)

            def do_some() -> tuple[int, bool]:
                """Do a part of the work, so that the network can already send its results."""
                done = rings.progress()
                num_left = all_channels(0, -ROUNDS_AT_ONCE)
                proxy.forward()
                return num_left, rings.progress() != done

            def step_and_forward(num_spins: int) -> int:
                return control.poll_until_done(do_some)

            step = step_and_forward

        control.wait_until(
            call,
            step,
            lambda: rings.stall(work, plan.relays, self._mover.node_ranks, plan.node),
            rings.progress,
        )

    def _count_sent(
        self, rings: CallRings, token: TokenLayout, to_ranks: Array, in_window: Array, beside_bytes: int
    ) -> None:
        """Count what was put into the rings of the network, and rows to ranks of this node; beside a row go
        so many bytes by window, and by ring what its entry has room for."""
        cpu.count_relayed(
            *(self._mover.control.traffic.normal.words, self._rank),
            *(rings.net_sent, to_ranks, in_window),
            *(token.hidden_bytes, beside_bytes, token.token_bytes - token.hidden_bytes),
        )


class CallRings:
    """The rings of one call, and its progress."""

    def __init__(self, net_area: RingArea, net: groups.RingStack, nvl: groups.RingStack) -> None:
        self.net_area = net_area
        self.net_stack, self.nvl_stack = net, nvl
        # What the proxy of the network looks at.
        self.net, self.net_sent, self.net_taken = net.layers, net.sent, net.taken

    def progress(self) -> int:
        return rows_moved([self.net_stack, self.nvl_stack])

    def stall(
        self, work: RelayWork, relays: Sequence[int], node_ranks: Sequence[int], own_node: int
    ) -> Stall:
        """The peers whose rows are still to come, and those whose rings are full; the real cause comes first.

        A peer whose rows are in a ring here but cannot be taken yet is not the cause: something else is full.
        """
        to_nodes, from_nodes = work.to_nodes.copy(), work.from_nodes.copy()
        to_nodes[own_node] = from_nodes[own_node] = 0
        blocking: list[Stall] = []
        owing: list[Stall] = []
        net, nvl = self.net_stack, self.nvl_stack
        for what, rings, counts, expected, ranks in (
            ("rows", net, net.taken, from_nodes, relays),
            ("rows", nvl, nvl.taken, work.from_ranks, node_ranks),
            ("room in its network ring", net, net.sent, to_nodes, relays),
            ("room in its ring", nvl, nvl.sent, work.to_ranks, node_ranks),
        ):
            layers = rings.layers
            counters = np.empty_like(counts)
            done = counts.sum(axis=0)
            if what == "rows":
                cpu.read_counters(layers[RECV_TAIL], counters)
                arrived = counters - layers[RECV_BASE]
                is_owing = arrived.sum(axis=0) < expected
                is_blocking = (arrived <= counts).all(axis=0)
            else:
                cpu.read_counters(layers[SEND_HEAD], counters)
                is_full = counts - (counters - layers[SEND_BASE]) >= rings.num_rows
                is_owing = is_blocking = (done < expected) & is_full.any(axis=0)
            for index in np.flatnonzero(is_owing).tolist():
                channel = int(counts[:, index].argmin())
                stall = Stall([int(ranks[index])], what, int(done[index]), int(expected[index]), channel)
                (blocking if is_blocking[index] else owing).append(stall)
        other_node = next(rank for rank in relays if rank not in node_ranks)
        stall, *also = [*blocking, *owing] or [Stall([other_node], "rows", 0, 0)]
        return stall._replace(also=also)


def _check_node_counts(per_node: Any, right: Array) -> None:
    """Refuse a user's counts per node that contradict the mask; they may be omitted."""
    if per_node is None:
        return
    is_tensor = isinstance(per_node, torch.Tensor) and per_node.is_cpu
    if not is_tensor or per_node.dtype != torch.int32:
        raise InvalidCall("num_tokens_per_rdma_rank must be the int32 tensor of get_dispatch_layout")
    if tuple(per_node.shape) != right.shape:
        raise InvalidCall(
            f"num_tokens_per_rdma_rank has shape {list(per_node.shape)}: it must be [{len(right)}]"
        )
    for node in np.flatnonzero(per_node.numpy() != right).tolist():
        raise InvalidCall(
            f"num_tokens_per_rdma_rank says {int(per_node[node])} for node {node}, but"
            f" is_token_in_rank marks {right[node]}: pass both from one get_dispatch_layout"
        )
