"""A dispatch in virtual time: ranks, rings with credits, relays, and links with a rate and a latency.

    result = simulate(units_of(topk_idx, topology, 256, shape), shape, speeds)
    result.total_us, result.waits.sender_us

The state machine is that of a dispatch through rings (`tests/model/relay.py` explores it): a rank *sends*
rows of its tokens into the ring at its relay of each other node while that has room; a relay *relays* a row,
or an own token for its own node, into the rings of all ranks of the node that want it, if all have room; a
rank *takes* rows out of them. Here rows move in chunks of consecutive tokens, and each step takes time. A
test replays runs with chunks of one token in the model.

Every rank has, for each channel, a sender, a relay and a receiver that work at once; a NIC that sends and one
that receives; and a port of NVLink in each direction.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import cycle
from typing import Final, NamedTuple

import numpy as np

from anyep.planning.counts import Array
from anyep.topology import Topology

PACKED, ARRIVED, RELAYED, CREDITED, TAKEN = range(5)
STAGES: Final = ("pack", "network", "relay", "receive")
NUM_FACTORS: Final = 1 << 14
EPSILON: Final = 1e-9


class Shape(NamedTuple):
    """Who is where, and how rows move."""

    topology: Topology
    num_channels: int
    chunk_tokens: int
    """A step moves the rows of as many consecutive tokens, or fewer."""
    net_rows: int
    """Rows of a ring between nodes, for each channel."""
    nvl_rows: int
    """Rows of a ring within a node, for each channel."""
    row_bytes: int


class Speeds(NamedTuple):
    """Of each rank; GB/s of a channel where SMs work."""

    start_us: float
    pack_gbs: float
    relay_gbs: float
    receive_gbs: float
    nvlink_gbs: float
    network_gbs: float
    nvlink_latency_us: float = 1.0
    network_latency_us: float = 5.0


class Trouble(NamedTuple):
    """What differs between ranks, and by chance."""

    slow_rank: int | None = None
    slow_by: float = 1.0
    """The SMs of the slow rank take as many times as long."""
    late_us: float = 0.0
    """The slow rank begins the call so much later than the others."""
    slow_link: int | None = None
    """A rank whose NIC is slower."""
    link_share: float = 1.0
    """Of its rate, what that NIC reaches."""
    jitter: float = 0.0
    """The relative deviation of each step's time."""
    seed: int = 0


class Rules(NamedTuple):
    """What the protocol promises; switched off in tests only, to see it fail."""

    both_at_once: bool = True
    """Ranks take rows while they relay; else they take none before they have relayed everything."""


class Units(NamedTuple):
    """The chunks of a routing: what one step moves."""

    lists: list[list[int]]
    """By source rank, channel and node: numbers of units, in the order of tokens."""
    tokens: list[int]
    rows: list[list[int]]
    """By unit and rank of its node."""
    source: list[int]


class Waits(NamedTuple):
    """Mean time of a channel that had something to do, and no room for it."""

    sender_us: float
    relay_us: float


class Result(NamedTuple):
    total_us: float
    finished_us: list[float]
    """[rank]: when it had all its rows, from the beginning of the call on."""
    busy: dict[str, list[float]]
    """Of each stage and rank, the part of the time in which it works; of channels the mean."""
    waits: Waits
    num_steps: int
    stuck: tuple[str, ...]
    """Who waits for whom, if the run ended before all rows were taken; empty otherwise."""
    watched: dict[str, list[tuple[float, float]]]
    """When each stage of the watched rank worked: from, to."""
    steps: list[tuple[int, str, int]]
    """(rank, step, peer) in the order of time, if asked for."""


def units_of(topk_idx: Array, num_experts: int, shape: Shape) -> Units:
    """Cut the tokens of each rank into channels, and those into chunks."""
    topology = shape.topology
    ranks, tokens, _ = topk_idx.shape
    per_node, nodes = topology.ranks_per_node, topology.num_nodes
    holders = np.where(topk_idx >= 0, topk_idx // (num_experts // ranks), ranks)
    channel = np.arange(tokens) * shape.num_channels // max(tokens, 1)
    first = np.searchsorted(channel, np.arange(shape.num_channels))
    chunk = (np.arange(tokens) - first[channel]) // shape.chunk_tokens
    num_chunks = int(chunk.max(initial=-1)) + 1
    piece = channel * num_chunks + chunk
    lists: list[list[int]] = []
    units = Units(lists, [], [], [])
    for source in range(ranks):
        wanted = np.zeros((tokens, ranks + 1), bool)
        wanted[np.arange(tokens)[:, None], holders[source]] = True
        wanted = wanted[:, :ranks].reshape(tokens, nodes, per_node)
        counts = np.zeros((shape.num_channels * num_chunks, nodes, per_node), np.int64)
        np.add.at(counts, piece, wanted)
        some_rank = np.zeros((shape.num_channels * num_chunks, nodes), np.int64)
        np.add.at(some_rank, piece, wanted.any(axis=2))
        by_lane = counts.reshape(shape.num_channels, num_chunks, nodes, per_node)
        crossing = some_rank.reshape(shape.num_channels, num_chunks, nodes)
        for lane in range(shape.num_channels):
            for node in range(nodes):
                some = np.flatnonzero(crossing[lane, :, node])
                begin = len(units.tokens)
                units.tokens.extend(crossing[lane, some, node].tolist())
                units.rows.extend(by_lane[lane, some, node].tolist())
                units.source.extend([source] * len(some))
                lists.append(list(range(begin, len(units.tokens))))
    return units


def simulate(
    units: Units,
    shape: Shape,
    speeds: Speeds,
    trouble: Trouble | None = None,
    rules: Rules | None = None,
    watch: int = 0,
    with_steps: bool = False,
) -> Result:
    """Run one dispatch to its end, or until nothing can move."""
    run = _Run(units, shape, speeds, trouble or Trouble(), rules or Rules(), watch, with_steps)
    return run.result()


class _Run:
    """One dispatch. A *lane* is a channel of a rank; what a ring holds is counted where it is filled."""

    def __init__(
        self,
        units: Units,
        shape: Shape,
        speeds: Speeds,
        trouble: Trouble,
        rules: Rules,
        watch: int,
        with_steps: bool,
    ) -> None:
        self.units, self.shape, self.speeds, self.rules, self.watch = units, shape, speeds, rules, watch
        topology = shape.topology
        self.ranks, self.nodes, self.per_node = (
            topology.num_ranks,
            topology.num_nodes,
            topology.ranks_per_node,
        )
        self.channels = shape.num_channels
        lanes = self.ranks * self.channels
        self.limit = shape.nvl_rows
        self.now = 0.0
        self.events: list[tuple[float, int, int, int, int, int]] = []
        self.num_events = 0
        self._make_rates(trouble)
        # Senders
        self.sent = [0] * (lanes * self.nodes)
        self.in_ring = [0] * (lanes * self.nodes)
        self.sender_is_free = [True] * lanes
        self.next_sent = [topology.node_of(lane // self.channels) for lane in range(lanes)]
        # Relays
        self.arrived: list[deque[int]] = [deque() for _ in range(lanes * self.nodes)]
        self.relay_is_free = [True] * lanes
        self.next_relayed = [0] * lanes
        self.nvl_ring = [0] * (lanes * self.per_node)
        self.to_relay = self._units_to_relay()
        # Receivers
        self.receiver_free_at = [0.0] * lanes
        self.held: list[list[tuple[int, int, int]]] = [[] for _ in range(lanes)]
        self.missing = self._rows_by_receiver()
        self.finished = [speeds.start_us + self.late[rank] for rank in range(self.ranks)]
        # Links
        self.nic_out, self.nic_in, self.port_out, self.port_in = ([0.0] * self.ranks for _ in range(4))
        # What is reported
        self.busy = {stage: [0.0] * self.ranks for stage in STAGES}
        self.watched: dict[str, list[tuple[float, float]]] = {stage: [] for stage in STAGES}
        self.blocked_since = {"sender": [-1.0] * lanes, "relay": [-1.0] * lanes}
        self.blocked = {"sender": 0.0, "relay": 0.0}
        self.steps: list[tuple[int, str, int]] | None = [] if with_steps else None

    def _make_rates(self, trouble: Trouble) -> None:
        """Microseconds per row of each rank's parts, and the factors of chance."""
        ranks, row = self.ranks, self.shape.row_bytes / 1e3
        slow = [trouble.slow_by if rank == trouble.slow_rank else 1.0 for rank in range(ranks)]
        share = [trouble.link_share if rank == trouble.slow_link else 1.0 for rank in range(ranks)]
        speeds = self.speeds
        self.pack_us = [row / speeds.pack_gbs * each for each in slow]
        self.relay_us = [row / speeds.relay_gbs * each for each in slow]
        self.receive_us = [row / speeds.receive_gbs * each for each in slow]
        self.network_us = [row / speeds.network_gbs / each for each in share]
        self.nvlink_us = row / speeds.nvlink_gbs
        self.late = [trouble.late_us if rank == trouble.slow_rank else 0.0 for rank in range(ranks)]
        rng = np.random.default_rng(trouble.seed)
        sigma = float(np.sqrt(np.log1p(trouble.jitter**2)))
        factors = np.exp(rng.normal(-(sigma**2) / 2, sigma, NUM_FACTORS)) if sigma else np.ones(1)
        self.chance = cycle(factors.tolist())

    def _units_to_relay(self) -> list[int]:
        """[lane]: units that its relay has to pass on."""
        counts = [0] * (self.ranks * self.channels)
        for number, units in enumerate(self.units.lists):
            lane, node = divmod(number, self.nodes)
            counts[self._relay_lane(lane, node)] += len(units)
        return counts

    def _rows_by_receiver(self) -> list[int]:
        missing = [0] * self.ranks
        for number, units in enumerate(self.units.lists):
            node = number % self.nodes
            for unit in units:
                for index, rows in enumerate(self.units.rows[unit]):
                    missing[node * self.per_node + index] += rows
        return missing

    def _relay_lane(self, lane: int, node: int) -> int:
        rank, channel = divmod(lane, self.channels)
        return (node * self.per_node + rank % self.per_node) * self.channels + channel

    # Steps

    def result(self) -> Result:
        begin = self.speeds.start_us + max(self.late)
        # Counts of all ranks must be there before the first row moves.
        self.now = begin
        for lane in range(self.ranks * self.channels):
            self._try_send(lane)
            self._try_relay(lane)
        handlers = (self._packed, self._arrive, self._relayed, self._credited, self._taken)
        events, pop = self.events, heapq.heappop
        while events:
            self.now, _, kind, lane, other, unit = pop(events)
            handlers[kind](lane, other, unit)
        total = max(self.finished)
        span = max(total - begin, EPSILON)
        stages = {
            stage: [each / span / (1 if stage == "network" else self.channels) for each in of_ranks]
            for stage, of_ranks in self.busy.items()
        }
        lanes = self.ranks * self.channels
        waits = Waits(self.blocked["sender"] / lanes, self.blocked["relay"] / lanes)
        steps = self.steps or []
        return Result(
            total, self.finished, stages, waits, self.num_events, self._stuck(), self.watched, steps
        )

    def _post(self, time: float, kind: int, lane: int, other: int, unit: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, kind, lane, other, unit))

    def _try_send(self, lane: int) -> None:
        """Begin to pack the next unit for a node whose ring has room."""
        if not self.sender_is_free[lane] or self.nodes == 1:
            return
        rank = lane // self.channels
        own = rank // self.per_node
        lists, waiting = self.units.lists, False
        for step in range(self.nodes):
            node = (self.next_sent[lane] + step) % self.nodes
            at = lane * self.nodes + node
            if node == own or self.sent[at] == len(lists[at]):
                continue
            unit = lists[at][self.sent[at]]
            tokens = self.units.tokens[unit]
            if self.in_ring[at] + tokens > self.shape.net_rows:
                waiting = True
                continue
            self.sent[at] += 1
            self.in_ring[at] += tokens
            self.next_sent[lane] = node + 1
            self.sender_is_free[lane] = False
            self._unblock("sender", lane)
            took = tokens * self.pack_us[rank] * next(self.chance)
            self._work("pack", rank, self.now, self.now + took)
            self._note(rank, "send", self._relay_lane(lane, node) // self.channels)
            self._post(self.now + took, PACKED, lane, node, unit)
            return
        self._block("sender", lane, waiting)

    def _packed(self, lane: int, node: int, unit: int) -> None:
        """The NIC takes it; the relay has it after the wire."""
        self.sender_is_free[lane] = True
        relay_lane = self._relay_lane(lane, node)
        rank, relay = lane // self.channels, relay_lane // self.channels
        tokens, factor = self.units.tokens[unit], next(self.chance)
        begin = max(self.now, self.nic_out[rank])
        out = begin + tokens * self.network_us[rank] * factor
        self.nic_out[rank] = out
        into = max(out, self.nic_in[relay] + tokens * self.network_us[relay] * factor)
        self.nic_in[relay] = into
        self._work("network", rank, begin, out)
        own = rank // self.per_node
        self._post(into + self.speeds.network_latency_us, ARRIVED, relay_lane, own, unit)
        self._try_send(lane)

    def _arrive(self, lane: int, node: int, unit: int) -> None:
        self.arrived[lane * self.nodes + node].append(unit)
        self._try_relay(lane)

    def _try_relay(self, lane: int) -> None:
        """Begin to relay the next unit from a node, if all rings that it goes to have room."""
        if not self.relay_is_free[lane]:
            return
        rank = lane // self.channels
        own = rank // self.per_node
        waiting = False
        for step in range(self.nodes):
            node = (self.next_relayed[lane] + step) % self.nodes
            at = lane * self.nodes + node
            if node == own:
                if self.sent[at] == len(self.units.lists[at]):
                    continue
                unit = self.units.lists[at][self.sent[at]]
            elif self.arrived[at]:
                unit = self.arrived[at][0]
            else:
                continue
            if not self._has_room(lane, unit):
                waiting = True
                continue
            if node == own:
                self.sent[at] += 1
            else:
                self.arrived[at].popleft()
            self.next_relayed[lane] = node + 1
            self._begin_relay(lane, node, unit)
            return
        self._block("relay", lane, waiting)

    def _has_room(self, lane: int, unit: int) -> bool:
        at, ring, limit = lane * self.per_node, self.nvl_ring, self.limit
        for rows in self.units.rows[unit]:
            if rows and ring[at] + rows > limit:
                return False
            at += 1
        return True

    def _begin_relay(self, lane: int, node: int, unit: int) -> None:
        rank = lane // self.channels
        first, num_rows = lane * self.per_node, 0
        for index, rows in enumerate(self.units.rows[unit]):
            self.nvl_ring[first + index] += rows
            num_rows += rows
        self.relay_is_free[lane] = False
        self._unblock("relay", lane)
        took = num_rows * self.relay_us[rank] * next(self.chance)
        self._work("relay", rank, self.now, self.now + took)
        self._post(self.now + took, RELAYED, lane, node, unit)

    def _relayed(self, lane: int, node: int, unit: int) -> None:
        """The ring of the source has room again, and the rows are on their way to their receivers."""
        rank, channel = divmod(lane, self.channels)
        self.relay_is_free[lane] = True
        self._note(rank, "relay", self.units.source[unit])
        if node != rank // self.per_node:
            source_lane = self.units.source[unit] * self.channels + channel
            later = self.now + self.speeds.network_latency_us
            self._post(later, CREDITED, source_lane, rank // self.per_node, unit)
        first_rank = rank - rank % self.per_node
        for index, rows in enumerate(self.units.rows[unit]):
            if rows:
                self._pass_on(lane, rank, first_rank + index, rows)
        self.to_relay[lane] -= 1
        if not self.rules.both_at_once and not self.to_relay[lane]:
            held, self.held[lane] = self.held[lane], []
            for relay_lane, receiver, rows in held:
                self._receive(relay_lane, receiver, rows, self.now)
        self._try_relay(lane)

    def _pass_on(self, lane: int, rank: int, receiver: int, rows: int) -> None:
        # Rows for the own rank take their time as well: the rate of NVLink was fitted to all rows of a rank.
        took = rows * self.nvlink_us
        out = max(self.now, self.port_out[rank]) + took
        self.port_out[rank] = out
        there = max(out, self.port_in[receiver] + took)
        self.port_in[receiver] = there
        if receiver != rank:
            there += self.speeds.nvlink_latency_us
        own_lane = receiver * self.channels + lane % self.channels
        if not self.rules.both_at_once and self.to_relay[own_lane] - (own_lane == lane):
            self.held[own_lane].append((lane, receiver, rows))
        else:
            self._receive(lane, receiver, rows, there)

    def _receive(self, lane: int, receiver: int, rows: int, there: float) -> None:
        """The receiver takes rows in the order in which they were relayed to it."""
        own_lane = receiver * self.channels + lane % self.channels
        begin = max(there, self.receiver_free_at[own_lane])
        end = begin + rows * self.receive_us[receiver] * next(self.chance)
        self.receiver_free_at[own_lane] = end
        self._work("receive", receiver, begin, end)
        self._post(end, TAKEN, lane, receiver, rows)

    def _taken(self, lane: int, receiver: int, rows: int) -> None:
        self.nvl_ring[lane * self.per_node + receiver % self.per_node] -= rows
        self.missing[receiver] -= rows
        self.finished[receiver] = max(self.finished[receiver], self.now)
        self._note(receiver, "take", lane // self.channels)
        self._try_relay(lane)

    def _credited(self, lane: int, node: int, unit: int) -> None:
        self.in_ring[lane * self.nodes + node] -= self.units.tokens[unit]
        self._try_send(lane)

    # Reports

    def _work(self, stage: str, rank: int, begin: float, end: float) -> None:
        self.busy[stage][rank] += end - begin
        if rank == self.watch:
            self.watched[stage].append((begin, end))

    def _note(self, rank: int, step: str, peer: int) -> None:
        if self.steps is not None:
            self.steps.append((rank, step, peer))

    def _block(self, who: str, lane: int, is_waiting: bool) -> None:
        if is_waiting and self.blocked_since[who][lane] < 0:
            self.blocked_since[who][lane] = self.now

    def _unblock(self, who: str, lane: int) -> None:
        since = self.blocked_since[who]
        if since[lane] >= 0:
            self.blocked[who] += self.now - since[lane]
            since[lane] = -1.0

    def _stuck(self) -> tuple[str, ...]:
        """What the lanes that are not finished wait for."""
        if not any(self.missing):
            return ()
        sentences = [
            f"rank {rank} lacks {missing} rows" for rank, missing in enumerate(self.missing) if missing
        ]
        for who, what in (("sender", "a ring between nodes"), ("relay", "a ring within its node")):
            for lane, since in enumerate(self.blocked_since[who]):
                if since >= 0:
                    rank, channel = divmod(lane, self.channels)
                    sentences.append(f"the {who} of rank {rank}, channel {channel}, waits for room in {what}")
        return tuple(sentences)
