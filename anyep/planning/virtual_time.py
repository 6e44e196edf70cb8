"""Ranks in virtual time: what the simulated dispatch and combine share.

Every rank has, for each channel, workers that run at once; a NIC that sends and one that receives; and a port
of NVLink in each direction. A *lane* is a channel of a rank. Rows move in *units*, chunks of tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import cycle
from typing import Final, NamedTuple

import numpy as np

from anyep.planning.counts import Array
from anyep.topology import Topology

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


class Units(NamedTuple):
    """The chunks of a routing: what one step moves."""

    lists: list[list[int]]
    """By source rank, channel and node: numbers of units, in the order of tokens."""
    tokens: list[int]
    rows: list[list[int]]
    """By unit and rank of its node."""
    source: list[int]
    chunk: list[int]
    """By unit: which chunk of its rank and channel."""
    num_chunks: list[int]
    """By source rank and channel, chunks without rows included."""


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
    """Which rank waits for which, if the run ended before all rows were taken; empty otherwise."""
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
    units = Units(lists, [], [], [], [], [])
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
            units.num_chunks.append(-(-int((channel == lane).sum()) // shape.chunk_tokens))
            for node in range(nodes):
                some = np.flatnonzero(crossing[lane, :, node])
                begin = len(units.tokens)
                units.tokens.extend(crossing[lane, some, node].tolist())
                units.rows.extend(by_lane[lane, some, node].tolist())
                units.source.extend([source] * len(some))
                units.chunk.extend(some.tolist())
                lists.append(list(range(begin, len(units.tokens))))
    return units


class Ranks:
    """The clock, the events, the links of all ranks, and what is reported of them."""

    def __init__(
        self, units: Units, shape: Shape, speeds: Speeds, trouble: Trouble, watch: int, with_steps: bool
    ) -> None:
        self.units, self.shape, self.speeds, self.watch = units, shape, speeds, watch
        topology = shape.topology
        self.ranks, self.nodes, self.per_node = (
            topology.num_ranks,
            topology.num_nodes,
            topology.ranks_per_node,
        )
        self.channels = shape.num_channels
        self.lanes = self.ranks * self.channels
        self.now = 0.0
        self.events: list[tuple[float, int, int, int, int, int]] = []
        self.num_events = 0
        self._make_rates(trouble)
        self.finished = [speeds.start_us + self.late[rank] for rank in range(self.ranks)]
        self.nic_out, self.nic_in, self.port_out, self.port_in = ([0.0] * self.ranks for _ in range(4))
        self.busy = {stage: [0.0] * self.ranks for stage in STAGES}
        self.watched: dict[str, list[tuple[float, float]]] = {stage: [] for stage in STAGES}
        self.blocked_since = {"sender": [-1.0] * self.lanes, "relay": [-1.0] * self.lanes}
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

    def _relay_lane(self, lane: int, node: int) -> int:
        rank, channel = divmod(lane, self.channels)
        return (node * self.per_node + rank % self.per_node) * self.channels + channel

    def begin_us(self) -> float:
        """Messages of all ranks must be there before the first row moves."""
        return self.speeds.start_us + max(self.late)

    def run(self, handlers: tuple[Callable[[int, int, int], None], ...]) -> None:
        """Handle events in the order of time until there are none."""
        events, pop = self.events, heapq.heappop
        while events:
            self.now, _, kind, lane, other, unit = pop(events)
            handlers[kind](lane, other, unit)

    def report(self, stuck: tuple[str, ...]) -> Result:
        total = max(self.finished)
        span = max(total - self.begin_us(), EPSILON)
        stages = {
            stage: [each / span / (1 if stage == "network" else self.channels) for each in of_ranks]
            for stage, of_ranks in self.busy.items()
        }
        waits = Waits(self.blocked["sender"] / self.lanes, self.blocked["relay"] / self.lanes)
        steps = self.steps or []
        return Result(total, self.finished, stages, waits, self.num_events, stuck, self.watched, steps)

    def _post(self, time: float, kind: int, lane: int, other: int, unit: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, kind, lane, other, unit))

    def _over_network(self, rank: int, to: int, tokens: int) -> float:
        """When rows that a NIC takes now are at another node's rank."""
        factor: float = next(self.chance)
        begin = max(self.now, self.nic_out[rank])
        out = begin + tokens * self.network_us[rank] * factor
        self.nic_out[rank] = out
        into = max(out, self.nic_in[to] + tokens * self.network_us[to] * factor)
        self.nic_in[to] = into
        self._work("network", rank, begin, out)
        return into + self.speeds.network_latency_us

    def _over_nvlink(self, rank: int, to: int, rows: int) -> float:
        """When rows of a rank are at another one of its node. Rows for the own rank take their time as well:
        the rate of NVLink was fitted to all rows of a rank."""
        took = rows * self.nvlink_us
        out = max(self.now, self.port_out[rank]) + took
        self.port_out[rank] = out
        there = max(out, self.port_in[to] + took)
        self.port_in[to] = there
        return there + (self.speeds.nvlink_latency_us if to != rank else 0.0)

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
