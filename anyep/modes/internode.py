"""Normal mode between nodes: a token crosses the network once per node that wants it.

It goes to the rank with the sender's own index on that node, its relay there, through a ring in that rank's
RDMA bytes; the relay gives it to each rank of its node that wants it, in its window or through its rings, as
on one node. A combine goes the other way: the relay adds up its node's rows, and one row per node crosses
back. Letters go to everyone, so every rank knows how many rows go from whom to whom; to the relays goes, too,
how many of them each channel has.

What differs between virtual nodes on one machine and nodes that are joined by a network is where rows and
counters for another node are written: right there, or where an engine takes them from (`Wire`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from anyep.errors import InvalidCall
from anyep.layout import (
    COUNTER_BYTES,
    NUM_RING_LAYERS,
    RECV_BASE,
    RECV_HEAD,
    RECV_ROWS,
    RECV_TAIL,
    SEND_BASE,
    SEND_HEAD,
    SEND_ROWS,
    SEND_TAIL,
    ControlRegion,
    RingArea,
    rdma_rings,
    ring_rows_that_fit,
)
from anyep.modes.conversation import Array, Call, Pieces, Stall, Topic
from anyep.modes.intranode import (
    MIN_RING_ROWS,
    WORTH_STREAMING_BYTES,
    Counts,
    Decision,
    Intranode,
    LetterCounts,
    Outputs,
    Payload,
    Results,
    Staged,
    first_tokens,
    slot_offsets,
)
from anyep.modes.letters import (
    NETWORK_ROWS_SHIFT,
    RESULT_ROWS,
    RING_ROWS,
    WEIGHTS_OFFSET,
    X_OFFSET,
)
from anyep.modes.node_routing import (
    NodeRouting,
    checked,
    difference_between,
    node_routing_of,
)
from anyep.modes.ring_areas import MAX_KNOWN_AREAS
from anyep.modes.status import Phase
from anyep.modes.windows import WarmMemory
from anyep.modes.wire import Wire
from anyep.sizes import (
    NUM_BUFFER_ALIGNMENT_BYTES,
    SOURCE_META_BYTES,
    Config,
    TokenLayout,
    align,
    token_layout,
)
from anyep.topology import Topology

ROUNDS_AT_ONCE = 32
NO_ROWS = np.zeros((0, SOURCE_META_BYTES), np.uint8)


@dataclass
class Traffic:
    """What this rank has sent in normal mode: rows and bytes, within its node and to other nodes."""

    rows_within_node: int = 0
    bytes_within_node: int = 0
    rows_between_nodes: int = 0
    bytes_between_nodes: int = 0


class NodePlaces(NamedTuple):
    """Where the tokens of a dispatch go: `Places`, and the same by node."""

    in_rank: Array
    by_rank: Array
    by_channel: Array
    position: Array
    by_node_channel: Array
    send_rdma_head: Array


class Internode(Intranode):
    """Normal mode of one rank, between nodes. It does not check what the user passed; `Buffer` does."""

    source_bytes = SOURCE_META_BYTES

    def __init__(
        self,
        backend: Any,
        conversation: Any,
        control: Any,
        topology: Topology,
        heaps: list[Any],
        window_blocks: dict[int, Any],
        num_nvl_bytes: int,
        stream: Any,
        team: Any,
        memory: WarmMemory,
        rdma_start: int,
        num_rdma_bytes: int,
    ) -> None:
        super().__init__(
            backend,
            conversation,
            control,
            topology,
            heaps,
            window_blocks,
            num_nvl_bytes,
            stream,
            team,
            memory,
        )
        self.traffic = Traffic()
        self._topology = topology
        self._node = topology.node_of(self._rank)
        self._index = topology.nvl_rank_of(self._rank)
        self._relays = [topology.rank_at(node, self._index) for node in range(topology.num_nodes)]
        """The ranks of this rank's index: those that relay its tokens, and whose tokens it relays."""
        self._heaps = heaps
        self._known_layers: dict[RingArea, Array] = {}
        self._known_areas: dict[tuple[Config, TokenLayout], RingArea] = {}
        self._rdma_start = rdma_start
        self._num_rdma_bytes = num_rdma_bytes
        self._num_rdma_half = num_rdma_bytes // 2 // NUM_BUFFER_ALIGNMENT_BYTES * NUM_BUFFER_ALIGNMENT_BYTES
        self._alarms_here = conversation.alarms[list(self._node_ranks)]
        self._beyond = list(conversation.wire.ranks) if conversation.wire is not None else []
        """The ranks beyond the wire."""

    # What a Buffer asks for

    def _new_node_counts(self) -> torch.Tensor | None:
        return torch.empty(self._topology.num_nodes, dtype=torch.int32, device="cpu")

    def _count_nodes(self, in_rank: torch.Tensor, counts: torch.Tensor) -> None:
        by_channel, _ = self._place_in_nodes(in_rank.numpy(), 1)
        counts.numpy()[:] = by_channel[:, 0]

    def check_config(self, config: Config, token: TokenLayout) -> None:
        """Refuse a call whose rows do not fit the RDMA bytes."""
        if self._network_rows(config, token) < MIN_RING_ROWS:
            area = self._network_area(config, token)
            per_ring = area.token_bytes * MIN_RING_ROWS + area.control_bytes
            needed = 2 * align(area.num_channels * area.num_peers * per_ring, NUM_BUFFER_ALIGNMENT_BYTES)
            raise InvalidCall(
                f"num_rdma_bytes is {self._num_rdma_bytes}, too small for rings of {MIN_RING_ROWS} rows"
                f" between {self._topology.num_nodes} nodes: this call needs at least {needed} bytes;"
                f" Config.get_rdma_buffer_size_hint(..., ranks_per_node={self._topology.ranks_per_node})"
                f" tells a good size"
            )

    def routing_of(self, handle: Any, last: tuple[Any, Any] | None) -> Any:
        """What a handle says; the very tuple that the last dispatch returned needs no unpacking."""
        if last is not None and handle is last[0]:
            routing = last[1]
        else:
            routing = node_routing_of(handle, self._topology)
        return checked(self._backend, routing, self._topology, self._rank)

    def counts_of(
        self,
        payload: Payload,
        in_rank: torch.Tensor,
        per_rank: torch.Tensor,
        per_node: Any,
        per_expert: torch.Tensor,
        num_channels: int,
    ) -> Counts:
        """Where each token's rows go; a caller's counts that contradict each other are refused."""
        counts = super().counts_of(payload, in_rank, per_rank, per_node, per_expert, num_channels)
        by_node = self._place_in_nodes(counts.places.in_rank, num_channels)
        self._check_nodes(per_node, by_node[0].sum(axis=1))
        places: Any = NodePlaces(*counts.places, *by_node)
        return Counts(places, counts.by_expert)

    def _check_nodes(self, per_node: Any, right: Array) -> None:
        """Refuse a caller's counts per node that his mask contradicts; he may leave them out."""
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

    def _place_in_nodes(self, in_rank: Array, num_channels: int) -> tuple[Array, Array]:
        """[node, channel]: the tokens that go to a node; [token, node]: their numbers among them, or -1."""
        num_nodes = self._topology.num_nodes
        by_channel = np.empty((num_nodes, num_channels), np.int32)
        numbers = np.empty((len(in_rank), num_nodes), np.int32)
        self._backend.place_in_nodes(in_rank, self._topology.ranks_per_node, by_channel, numbers)
        return by_channel, numbers

    # Dispatch

    def _dispatch_header(self, payload: Payload, config: Config, num_experts: int) -> Array:
        header = super()._dispatch_header(payload, config, num_experts)
        header[RING_ROWS] |= self._network_rows(config, payload.token) << NETWORK_ROWS_SHIFT
        return header

    def _new_routing(self, places: Any) -> Any:
        ranks, channels = places.by_channel.shape
        nodes = self._topology.num_nodes
        return NodeRouting(
            # The user may use his mask again; the handle keeps its own.
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

    def _with_rows(self, routing: Any, num_rows: int, is_counted: bool) -> Any:
        """Room for received rows and for relayed ones: as many as came, or as are received at most."""
        num_relayed = routing.num_relayed if is_counted else num_rows
        return routing._replace(
            recv_src_meta=np.zeros((num_rows, SOURCE_META_BYTES), np.uint8),
            send_nvl_head=np.full((num_relayed, self._topology.ranks_per_node), -1, np.int32),
        )

    def _notify(
        self, call: Call, header: Array, places: Any, tokens_per_expert: Array, routing: Any
    ) -> LetterCounts:
        """Exchange letters, and fill the routing with what they say."""
        topology = self._topology
        ranks, nodes = self._num_ranks, topology.num_nodes
        channels = places.by_channel.shape[1]
        by_rank_and_node = np.concatenate(
            [places.by_rank, places.by_node_channel.sum(axis=1, dtype=np.int32)]
        )
        matrix = np.empty((ranks, ranks + nodes), np.int32)
        by_channel = np.empty((ranks, channels), np.int32)
        by_expert = np.empty(len(tokens_per_expert) // ranks, np.int64)
        headers = self.conversation.exchange(
            call,
            header,
            (by_rank_and_node, places.by_channel, tokens_per_expert),
            lambda: self._write_counts(call, places),
        )
        self.conversation.read_counts(call, matrix, by_channel, by_expert)
        self._check_room_for_relayed(headers, matrix[:, ranks:])
        relayed = self._read_counts(call, channels)
        routing.recv_rdma_channel_prefix_matrix[:] = np.cumsum(relayed[:, -1], axis=1)
        routing.recv_rdma_rank_prefix_sum[:] = np.cumsum(relayed[:, -1].sum(axis=1))
        routing.recv_gbl_channel_prefix_matrix[:] = np.cumsum(by_channel, axis=1) - by_channel
        routing.recv_gbl_rank_prefix_sum[:] = np.cumsum(matrix[:, self._rank])
        return LetterCounts(np.ascontiguousarray(matrix[:, :ranks]), by_channel, by_expert, relayed)

    def _check_room_for_relayed(self, headers: Array, by_node: Array) -> None:
        """Where the caller says how many rows there can be, that is how many a rank can relay, too."""
        if (headers[:, RESULT_ROWS] < 0).all():
            return
        topology = self._topology
        by_index = by_node.reshape(topology.num_nodes, topology.ranks_per_node, topology.num_nodes).sum(
            axis=0
        )
        for rank in range(self._num_ranks):
            limit = int(headers[rank, RESULT_ROWS])
            relayed = int(by_index[topology.nvl_rank_of(rank), topology.node_of(rank)])
            if 0 <= limit < relayed:
                raise InvalidCall(
                    f"num_worst_tokens is {limit} on rank {rank}, but it relays {relayed} tokens to its"
                    f" node: nothing was sent; pass at least the largest number of rows that can arrive at"
                    f" any rank of the node"
                )

    def _write_counts(self, call: Call, places: Any) -> Pieces:
        """Tell every relay how many rows each channel has for each rank of its node, and how many tokens."""
        block = self._control.block("network counts")
        per_node, channels = self._topology.ranks_per_node, places.by_channel.shape[1]
        offset = block.offset(self._node, call.number % 2)
        for node, relay in enumerate(self._relays):
            counts = self._heaps[relay].array(offset, (per_node + 1) * channels, np.int32)
            counts = counts.reshape(per_node + 1, channels)
            counts[:per_node] = places.by_channel[node * per_node : (node + 1) * per_node]
            counts[per_node] = places.by_node_channel[node]
        return {relay: [(offset, 4 * (per_node + 1) * channels)] for relay in self._relays}

    def _read_counts(self, call: Call, channels: int) -> Array:
        """[node, rank of this node, channel]: the rows that this rank relays; then the tokens."""
        block = self._control.block("network counts")
        rows = self._topology.ranks_per_node + 1
        return np.stack(
            [
                self._heaps[self._rank]
                .array(block.offset(node, call.number % 2), rows * channels, np.int32)
                .reshape(rows, channels)
                for node in range(self._topology.num_nodes)
            ]
        )

    def _next_rows(self, counts: LetterCounts) -> Array:
        """[channel, node, rank of this node]: where the next row that comes from a node goes at a rank."""
        matrix = counts.matrix[:, list(self._node_ranks)]
        before = np.cumsum(matrix, axis=0, dtype=np.int64) - matrix
        by_channel = counts.relayed[:, : self._topology.ranks_per_node].astype(np.int64)
        in_earlier_channels = np.cumsum(by_channel, axis=2) - by_channel
        rows = before[self._relays][:, :, None] + in_earlier_channels
        return np.ascontiguousarray(rows.transpose(2, 0, 1))

    def _transfer(
        self,
        call: Call,
        payload: Payload,
        routing: Any,
        results: Results,
        decision: Decision,
        config: Config,
        experts_per_rank: int,
        is_new: bool = True,
    ) -> None:
        """Move the rows: between nodes through rings, within this one by window or through rings."""
        here = list(self._node_ranks)
        in_window = decision.offsets[here] >= 0
        mine = bool(in_window[self._index])
        token, channels = payload.token, config.num_channels
        rings = self._node_rings(config, token, ~in_window, np.full(len(here), not mine))
        lanes = routing.lanes(self._backend, self._topology)
        cursor = first_tokens(payload.num_tokens, channels)
        result = [results.x.data_ptr(), results.source.ctypes.data, *results.addresses()]
        next_rows = self._next_rows(decision.counts) if is_new else np.zeros((0, 0, 0), np.int64)
        arguments = (
            np.repeat(cursor[:, None], self._topology.num_nodes, axis=1),
            *rings.counts(),
            lanes.relayed,
            np.ascontiguousarray(lanes.num_rows.sum(axis=2).T.astype(np.int32)),
            lanes.first_relayed,
            next_rows,
            lanes.first_row,
            routing.is_token_in_rank,
            routing.send_rdma_head,
            routing.send_nvl_head,
            int(is_new),
            np.ascontiguousarray(decision.places[here]),
            np.array(result, np.int64),
            slot_offsets(token),
            *payload.arguments(experts_per_rank),
        )
        streaming = int(decision.num_rows * token.hidden_bytes >= WORTH_STREAMING_BYTES)
        sent, to_relay = routing.rdma_channel_prefix_matrix[:, -1], lanes.relayed.sum(axis=1)
        to_take = lanes.num_rows.sum(axis=(0, 2)) if not mine else np.zeros(len(here), np.int64)
        # In a new handle the kernel is about to say which rows go where; the letters say how many.
        relayed_to = decision.counts.relayed[:, : len(here)].sum(axis=(0, 2)) if is_new else lanes.relayed_to
        self._run_relay(
            call,
            self._backend.dispatch_between_nodes,
            rings,
            config,
            arguments,
            streaming,
            _Work(sent, to_relay, relayed_to * ~in_window, to_take),
        )
        if in_window.any():
            self.conversation.announce(self._arrival_at_peers, Topic.ROWS, call.number, self._alarms_here)
        self._count_traffic(rings, token, int(relayed_to.sum()))
        self._finish_results(call, payload, results, decision, is_new)
        self.conversation.end(call)

    # Combine

    def _combine_header(
        self, dtype: torch.dtype, token: TokenLayout, config: Config, staged: Staged
    ) -> Array:
        header = super()._combine_header(dtype, token, config, staged)
        header[RING_ROWS] |= self._network_rows(config, token) << NETWORK_ROWS_SHIFT
        return header

    def _pull_or_push(
        self, call: Call, outputs: Outputs, out: torch.Tensor, out_weights: torch.Tensor, staged: Staged
    ) -> None:
        x, routing, topk_weights, biases, config = outputs
        conversation, here = self.conversation, list(self._node_ranks)
        hidden, num_topk = x.shape[1], out_weights.shape[1]
        row_bytes = hidden * x.element_size()
        token = token_layout(row_bytes, 0, num_topk)
        header = self._combine_header(x.dtype, token, config, staged)
        headers = self._exchange_by_handle(call, header, routing)

        in_window = headers[here, X_OFFSET] >= 0
        bases = self._window_bases[here]
        x_of = np.where(in_window, bases + headers[here, X_OFFSET], 0)
        weights_of = np.where(in_window, bases + headers[here, WEIGHTS_OFFSET], 0)
        mine = bool(in_window[self._index])
        rings = self._node_rings(config, token, np.full(len(here), not mine), ~in_window)
        lanes = routing.lanes(self._backend, self._topology)
        before = np.zeros((*lanes.num_rows.shape[:2], self._topology.num_nodes + 1), np.int64)
        np.cumsum(lanes.num_rows, axis=2, out=before[:, :, 1:])
        own_relayed = np.concatenate([np.zeros(1, np.int64), routing.recv_rdma_rank_prefix_sum])[self._node]
        bias_addresses = [bias.data_ptr() for bias in biases] + [0] * (2 - len(biases))
        arguments = (
            first_tokens(routing.num_tokens, config.num_channels),
            *rings.counts(),
            lanes.relayed,
            lanes.first_row,
            before,
            lanes.first_relayed,
            np.array([own_relayed], np.int64),
            routing.send_rdma_head,
            routing.send_nvl_head,
            x_of,
            weights_of,
            x.data_ptr(),
            topk_weights.data_ptr() if topk_weights is not None else 0,
            slot_offsets(token),
            out.data_ptr(),
            *bias_addresses,
            hidden,
            row_bytes,
            self._dtype_codes[x.dtype],
            out_weights.numpy(),
        )
        streaming = int(x.shape[0] * row_bytes >= WORTH_STREAMING_BYTES)
        relayed = lanes.relayed.sum(axis=1)
        to_push = before[:, :, -1].sum(axis=0) if not mine else np.zeros(len(here), np.int64)
        to_take = lanes.relayed_to * ~in_window
        self._run_relay(
            call,
            self._backend.combine_between_nodes,
            rings,
            config,
            arguments,
            streaming,
            _Work(relayed, routing.rdma_channel_prefix_matrix[:, -1], to_push, to_take),
        )
        self._count_traffic(rings, token, int(lanes.relayed_to.sum()))
        conversation.announce(self._pulled_at_peers, Topic.PULLED, call.number, self._alarms_here)
        # Until every reader is done, x must stay as it is.
        conversation.wait_for_counters(
            call, Phase.ACKNOWLEDGE, self._own_pulled, Topic.PULLED, "acknowledgement", self._node_ranks
        )
        conversation.end(call)

    # Letters by handle

    def _difference_between(self, said: Array) -> str:
        return difference_between(self._backend, said, self._topology)

    # Rings

    def _network_area(self, config: Config, token: TokenLayout) -> RingArea:
        """The rings between nodes that the config asks for."""
        return rdma_rings(
            "rdma receive",
            self._rdma_start,
            config.num_channels,
            self._topology.num_nodes,
            config.num_max_rdma_chunked_recv_tokens,
            token.token_bytes,
        )

    def _network_rows(self, config: Config, token: TokenLayout) -> int:
        """The rows that they have."""
        return self._fitting_area(config, token).num_rows

    def _fitting_area(self, config: Config, token: TokenLayout) -> RingArea:
        """The rings that fit: half of the RDMA bytes is for them, half for rows that an engine takes."""
        known = self._known_areas.get((config, token))
        if known is None:
            wanted = self._network_area(config, token)
            known = replace(wanted, num_rows=ring_rows_that_fit(wanted, self._num_rdma_half))
            if len(self._known_areas) >= MAX_KNOWN_AREAS:
                self._known_areas.clear()
            self._known_areas[config, token] = known
        return known

    def _node_rings(
        self, config: Config, token: TokenLayout, send_to: Array, receive_from: Array
    ) -> _NodeRings:
        """The rings of a call that begins: between nodes, and to and from some ranks of this node."""
        area = self._fitting_area(config, token)
        nvl_area = self.ring_area(config, token)
        net = self._ring_layers(area, self._relays, self._node, "network tail", "network head")
        nvl = self._ring_layers(nvl_area, self._node_ranks, self._index, "ring tail", "ring head")
        nvl[SEND_ROWS] *= send_to
        nvl[RECV_ROWS] *= receive_from
        return _NodeRings(area, nvl_area, net, nvl)

    def _ring_layers(self, area: RingArea, ranks: Any, own: int, tail_block: str, head_block: str) -> Array:
        """[layer, channel, peer]: addresses of rows, tails and heads, and where the counters stand now."""
        known = self._known_layers.get(area)
        if known is None:
            if len(self._known_layers) >= MAX_KNOWN_AREAS:
                self._known_layers.clear()
            known = self._new_layers(area, ranks, own, tail_block, head_block)
            for index in np.flatnonzero(np.isin(ranks, self._beyond)).tolist():
                # What goes over the wire is put together here, in the other half of the RDMA bytes.
                known[SEND_ROWS, :, index] = known[RECV_ROWS, :, index] + self._num_rdma_half
            self._known_layers[area] = known
        layers = known.copy()
        # This rank alone advances the tail where it sends and the head where it receives.
        self._backend.read_counters(layers[SEND_TAIL], layers[SEND_BASE])
        self._backend.read_counters(layers[RECV_HEAD], layers[RECV_BASE])
        return layers

    def _new_layers(self, area: RingArea, ranks: Any, own: int, tail_block: str, head_block: str) -> Array:
        """The same, without counters."""
        tail, head = self._control.block(tail_block), self._control.block(head_block)
        channels = np.arange(area.num_channels, dtype=np.int64)[:, None]
        peers = np.arange(area.num_peers, dtype=np.int64)[None, :]
        heaps, here = self._heap_addresses[list(ranks)][None, :], self._heap_addresses[self._rank]
        layers = np.zeros((NUM_RING_LAYERS, area.num_channels, area.num_peers), np.int64)
        layers[SEND_ROWS] = heaps + area.start + (channels * area.num_peers + own) * area.ring_bytes
        layers[SEND_TAIL] = heaps + tail.start + own * tail.stride + 8 * channels
        layers[SEND_HEAD] = here + head.start + peers * head.stride + 8 * channels
        layers[RECV_ROWS] = here + area.start + (channels * area.num_peers + peers) * area.ring_bytes
        layers[RECV_TAIL] = here + tail.start + peers * tail.stride + 8 * channels
        layers[RECV_HEAD] = heaps + head.start + own * head.stride + 8 * channels
        return layers

    def _run_relay(
        self,
        call: Call,
        kernel: Callable[..., int],
        rings: _NodeRings,
        config: Config,
        arguments: tuple[Any, ...],
        streaming: int,
        work: _Work,
    ) -> None:
        """Send, relay and receive until all is done, the channels shared among the team's threads."""
        conversation = self.conversation
        conversation.enter(call, Phase.RINGS)
        limits = np.array(
            [
                rings.net_area.num_rows,
                config.num_max_rdma_chunked_send_tokens,
                rings.nvl_area.num_rows,
                config.num_max_nvl_chunked_send_tokens,
            ],
            np.int64,
        )
        before = (config.num_channels, self._node, self._index, rings.net, rings.nvl, limits, *arguments)
        after = (conversation.sleepers, conversation.doorbells, streaming)
        unfinished: list[int] = []

        def all_channels(num_spins: int, patience: int = self._backend.PATIENCE) -> int:
            unfinished.clear()
            self._team.run(
                lambda first, end: unfinished.append(
                    kernel(first, end, *before, num_spins, patience, *after)
                ),
                config.num_channels,
            )
            return sum(unfinished)

        step: Callable[[int], int] = all_channels
        if conversation.wire is not None:
            beyond = {node: relay for node, relay in enumerate(self._relays) if relay in self._beyond}
            carrier = Carrier(conversation.wire, self._control, self._node, beyond, rings)

            def do_some() -> tuple[int, bool]:
                """A little at a time, so that the network has something to do meanwhile."""
                done = rings.progress()
                unfinished = all_channels(0, -ROUNDS_AT_ONCE)
                carrier.carry()
                return unfinished, rings.progress() != done

            def step_and_carry(num_spins: int) -> int:
                return conversation.poll_until_done(do_some)

            step = step_and_carry

        conversation.wait_until(
            call,
            step,
            lambda: rings.stall(self._backend, work, self._relays, self._node_ranks, self._node),
            rings.progress,
        )

    def _count_traffic(self, rings: _NodeRings, token: TokenLayout, rows_within_node: int) -> None:
        """What went over the network is what was put into its rings."""
        between = int(rings.net_sent.sum())
        self.traffic.rows_between_nodes += between
        self.traffic.bytes_between_nodes += between * token.token_bytes
        self.traffic.rows_within_node += rows_within_node
        self.traffic.bytes_within_node += rows_within_node * token.hidden_bytes


class Carrier:
    """Carries the rows and counters of one call's rings over the wire, as kernels have left them.

    `beyond` are the relays on nodes beyond the wire, by node.
    """

    def __init__(
        self, wire: Wire, control: ControlRegion, own_node: int, beyond: dict[int, int], rings: _NodeRings
    ) -> None:
        self._wire = wire
        self._own_node = own_node
        self._beyond = beyond
        self._rings = rings
        self._tail, self._head = control.block("network tail"), control.block("network head")
        self._put = np.zeros_like(rings.net_sent)
        self._told = np.zeros_like(rings.net_taken)

    def carry(self) -> None:
        """Send what is new, in one put per node."""
        for node, relay in self._beyond.items():
            pieces, signals = self._new_rows(node)
            signals += self._new_heads(node)
            if signals:
                self._wire.put(relay, pieces, signals)

    def _new_rows(self, node: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
        """The rows that a node has not got yet, and the tails that tell of them."""
        rings, area = self._rings, self._rings.net_area
        pieces: list[tuple[int, int, int]] = []
        signals: list[tuple[int, int]] = []
        for channel in np.flatnonzero(rings.net_sent[:, node] > self._put[:, node]).tolist():
            sent = int(rings.net_sent[channel, node])
            here = int(rings.net[SEND_ROWS, channel, node])
            there = area.rows_offset(channel, self._own_node)
            for first, count in slots_between(int(self._put[channel, node]), sent, area.num_rows):
                start = first * area.token_bytes
                pieces.append((here + start, there + start, count * area.token_bytes))
            tail = int(rings.net[SEND_BASE, channel, node]) + sent
            signals.append((self._tail.offset(self._own_node) + COUNTER_BYTES * channel, tail))
            self._put[channel, node] = sent
        return pieces, signals

    def _new_heads(self, node: int) -> list[tuple[int, int]]:
        """What this rank has taken since, so that a node may send more."""
        rings = self._rings
        signals: list[tuple[int, int]] = []
        for channel in np.flatnonzero(rings.net_taken[:, node] > self._told[:, node]).tolist():
            taken = int(rings.net_taken[channel, node])
            head = int(rings.net[RECV_BASE, channel, node]) + taken
            signals.append((self._head.offset(self._own_node) + COUNTER_BYTES * channel, head))
            self._told[channel, node] = taken
        return signals


def slots_between(first: int, end: int, num_slots: int) -> list[tuple[int, int]]:
    """The slots of a ring that rows number `first` to `end` - 1 are in: (first slot, how many), in order.

    >>> slots_between(3, 5, 8), slots_between(6, 10, 8), slots_between(8, 16, 8)
    ([(3, 2)], [(6, 2), (0, 2)], [(0, 8)])
    """
    runs = []
    while first < end:
        slot = first % num_slots
        count = min(end - first, num_slots - slot)
        runs.append((slot, count))
        first += count
    return runs


class _Work(NamedTuple):
    """How many rows a call sends to and gets from nodes, and through the rings of ranks of this node."""

    to_nodes: Array
    from_nodes: Array
    to_ranks: Array
    from_ranks: Array


class _NodeRings:
    """The rings of one call, and how far it has come."""

    def __init__(self, net_area: RingArea, nvl_area: RingArea, net: Array, nvl: Array) -> None:
        self.net_area, self.nvl_area = net_area, nvl_area
        self.net, self.nvl = net, nvl
        self.net_sent = np.zeros(net.shape[1:], np.int64)
        self.net_taken = np.zeros(net.shape[1:], np.int64)
        self.nvl_sent = np.zeros(nvl.shape[1:], np.int64)
        self.nvl_taken = np.zeros(nvl.shape[1:], np.int64)

    def counts(self) -> tuple[Array, ...]:
        return self.net_sent, self.net_taken, self.nvl_sent, self.nvl_taken

    def progress(self) -> int:
        return int(sum(count.sum() for count in self.counts()))

    def stall(self, backend: Any, work: _Work, relays: Any, node_ranks: Any, own_node: int) -> Stall:
        """Whose rows are still to come, and whose rings are full; first what it really waits for.

        Whoever has rows in a ring here that cannot be taken yet is not to blame: something else is full.
        """
        to_nodes, from_nodes = work.to_nodes.copy(), work.from_nodes.copy()
        to_nodes[own_node] = from_nodes[own_node] = 0
        blocking: list[Stall] = []
        owing: list[Stall] = []
        for what, layers, counts, expected, ranks in (
            ("rows", self.net, self.net_taken, from_nodes, relays),
            ("rows", self.nvl, self.nvl_taken, work.from_ranks, node_ranks),
            ("room in its network ring", self.net, self.net_sent, to_nodes, relays),
            ("room in its ring", self.nvl, self.nvl_sent, work.to_ranks, node_ranks),
        ):
            counters = np.empty_like(counts)
            done = counts.sum(axis=0)
            if what == "rows":
                backend.read_counters(layers[RECV_TAIL], counters)
                arrived = counters - layers[RECV_BASE]
                is_owing = arrived.sum(axis=0) < expected
                is_blocking = (arrived <= counts).all(axis=0)
            else:
                backend.read_counters(layers[SEND_HEAD], counters)
                num_rows = (self.net_area if layers is self.net else self.nvl_area).num_rows
                is_full = counts - (counters - layers[SEND_BASE]) >= num_rows
                is_owing = is_blocking = (done < expected) & is_full.any(axis=0)
            for index in np.flatnonzero(is_owing).tolist():
                channel = int(counts[:, index].argmin())
                stall = Stall([int(ranks[index])], what, int(done[index]), int(expected[index]), channel)
                (blocking if is_blocking[index] else owing).append(stall)
        other_node = next(rank for rank in relays if rank not in node_ranks)
        stall, *also = [*blocking, *owing] or [Stall([other_node], "rows", 0, 0)]
        return stall._replace(also=also)
