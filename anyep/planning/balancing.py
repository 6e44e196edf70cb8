"""What a trace loads, sends and costs, and what another placement of its experts would change.

before = measure(trace, in_place(256, 32), Topology(32, 8), rows)
after = measure(trace, place(before.expert_load, 288, 4, 32), Topology(32, 8), rows)
after.rank_load.max() / before.rank_load.max()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from anyep.core.traffic import Amount
from anyep.errors import InvalidCall
from anyep.planning import sent
from anyep.planning.counts import Array, Counts, count_choices
from anyep.planning.placement import Placement, placement_of
from anyep.planning.times import COMBINE, DISPATCH, NORMAL, Call, Load, time_of
from anyep.planning.traces import Trace
from anyep.topology import Topology


class LowLatencyShape(NamedTuple):
    """Of the rows of low-latency calls, if these are counted too."""

    hidden: int
    payload_bytes: int
    num_scale_words: int
    num_max_tokens: int


class Shape(NamedTuple):
    """Of the rows that are sent: those of a dispatch and of a combine, and of the call."""

    dispatch_rows: sent.Rows
    combine_rows: sent.Rows
    num_channels: int
    low_latency: LowLatencyShape | None = None


class Measured(NamedTuple):
    """One placement: means over the steps of the trace, and what the most loaded rank has in each."""

    topology: Topology
    steps: tuple[Counts, ...]
    expert_load: Array
    """[expert]: choices per step."""
    rank_load: Array
    """[rank]: rows that its experts compute per step: one for each choice."""
    received: Array
    """[rank]: rows that a rank receives per step: one for each token."""
    dispatch: sent.CallTraffic
    """Of all steps together."""
    combine: sent.CallTraffic
    scale: float
    low_latency: dict[str, sent.CallTraffic]
    """A dispatch and a combine in low-latency mode; empty unless asked for."""

    @property
    def node_load(self) -> Array:
        """[node]: rows that its ranks compute per step."""
        load: Array = self.rank_load.reshape(self.topology.num_nodes, -1).sum(axis=1)
        return load

    @property
    def imbalance(self) -> float:
        """The load of the most loaded rank, as a multiple of the mean."""
        return float(self.rank_load.max() / max(self.rank_load.mean(), 1e-9))

    def per_step(self, call: sent.CallTraffic) -> dict[str, Amount]:
        """What a call sends by each kind of link, per step."""
        return {
            link: Amount(*(round(number / len(self.steps)) for number in amount))
            for link, amount in call.by_link().items()
        }

    def loads(self) -> list[Load]:
        """The most loaded rank and link of each step."""
        return [load_of(counts, self.scale) for counts in self.steps]


def measure(trace: Trace, placement: Placement, topology: Topology, shape: Shape) -> Measured:
    """Count a trace with a placement of its experts."""
    steps = []
    for step, tokens in zip(trace.steps, trace.num_tokens, strict=True):
        moved = in_places(step, placement)
        steps.append(count_choices(moved, topology, len(placement.experts))._replace(tokens=tokens))
    factor = trace.scale / len(steps)
    by_place = sum(counts.to_experts.sum(axis=0) for counts in steps) * factor
    load = np.bincount(placement.experts, by_place, minlength=len(placement.num_places))
    dispatches = [sent.dispatch(each, shape.dispatch_rows, shape.num_channels) for each in steps]
    combines = [sent.combine(each, shape.combine_rows) for each in steps]
    return Measured(
        topology,
        tuple(steps),
        load,
        by_place.reshape(topology.num_ranks, -1).sum(axis=1),
        sum(counts.to_ranks.sum(axis=0) for counts in steps) * factor,
        _sum(dispatches, trace.scale),
        _sum(combines, trace.scale),
        trace.scale,
        _low_latency(steps, shape.low_latency, topology, trace.scale),
    )


def _low_latency(
    steps: list[Counts], shape: LowLatencyShape | None, topology: Topology, scale: float
) -> dict[str, sent.CallTraffic]:
    if shape is None:
        return {}
    hidden, payload_bytes, scale_words, most = shape
    dispatches = [
        sent.low_latency_dispatch(each, payload_bytes, scale_words, most, topology) for each in steps
    ]
    combines = [sent.low_latency_combine(each, hidden, most, topology) for each in steps]
    return {DISPATCH: _sum(dispatches, scale), COMBINE: _sum(combines, scale)}


def in_place(num_experts: int, num_ranks: int) -> Placement:
    """Every expert once, in order."""
    if num_experts % num_ranks:
        raise InvalidCall(
            f"{num_experts} experts cannot be shared by {num_ranks} ranks: pass the model's --experts"
        )
    return placement_of(np.arange(num_experts), num_experts)


def in_places(topk_idx: Array, placement: Placement) -> Array:
    """The places that tokens go to: an expert's replicas take turns, from token to token and rank to rank.

    >>> in_places(np.array([[[0, 1], [1, -1]]]), placement_of(np.array([0, 1, 1]), 2)).tolist()
    [[[0, 1], [2, -1]]]
    """
    ranks, tokens = topk_idx.shape[:2]
    turn = (np.arange(ranks)[:, None] + np.arange(tokens)[None, :])[..., None]
    experts = np.maximum(topk_idx, 0)
    places = placement.places[experts, turn % placement.num_places[experts]]
    return np.where(topk_idx >= 0, places, -1)


def load_of(counts: Counts, scale: float = 1.0) -> Load:
    """The most loaded rank and link of a routing in normal mode."""
    near = max(counts.to_ranks.sum(axis=0).max(), counts.relayed().sum(axis=1).max())
    if counts.topology.num_nodes == 1:
        near = max(near, counts.to_ranks.sum(axis=1).max())
    crossing = counts.crossing()
    nodes, per_node = counts.topology.num_nodes, counts.topology.ranks_per_node
    arriving = crossing.reshape(nodes, per_node, nodes).sum(axis=0)
    far = max(crossing.sum(axis=1).max(), arriving.max())
    return Load(float(near) * scale, float(far) * scale)


def step_us(
    measured: Measured, call: Call, constants: Mapping[str, float], row_bytes: tuple[int, int]
) -> Array:
    """[step, dispatch or combine]: predicted times."""
    times = []
    for load in measured.loads():
        of_step = []
        for what, num_bytes in zip((DISPATCH, COMBINE), row_bytes, strict=True):
            mine = call._replace(mode=NORMAL, what=what, row_bytes=num_bytes)
            of_step.append(time_of(mine, constants, load).total_us)
        times.append(of_step)
    return np.array(times)


class Moved(NamedTuple):
    """What it takes to bring experts to their new places."""

    within_bytes: int
    between_bytes: int
    num_experts: int
    """Experts that some rank did not have before."""
    busiest_within_bytes: int
    """Of the rank that receives or sends most."""
    busiest_between_bytes: int


def move(before: Placement, after: Placement, topology: Topology, expert_bytes: int) -> Moved:
    """Every rank fetches the experts that it did not have: from its own node if a rank there had it, else
    from the first rank that had it."""
    ranks, experts = topology.num_ranks, len(before.num_places)
    had, has = (_held(placement, ranks) for placement in (before, after))
    nodes = np.arange(ranks) // topology.ranks_per_node
    to, what = np.nonzero(np.logical_and(has, np.logical_not(had)))
    on_node = had.reshape(topology.num_nodes, topology.ranks_per_node, experts)
    is_near = on_node.max(axis=1)[nodes[to], what]
    near_source = nodes[to] * topology.ranks_per_node + on_node.argmax(axis=1)[nodes[to], what]
    source = np.where(is_near, near_source, had.argmax(axis=0)[what])

    def busiest(chosen: Array) -> int:
        received = np.bincount(to[chosen], minlength=ranks)
        given = np.bincount(source[chosen], minlength=ranks)
        return int(max(received.max(), given.max())) * expert_bytes

    return Moved(
        int(is_near.sum()) * expert_bytes,
        int(np.logical_not(is_near).sum()) * expert_bytes,
        len(np.unique(what)),
        busiest(is_near),
        busiest(np.logical_not(is_near)),
    )


def _held(placement: Placement, num_ranks: int) -> Array:
    """[rank, expert]: whether the rank has it."""
    held = np.zeros((num_ranks, len(placement.num_places)), bool)
    per_rank = len(placement.experts) // num_ranks
    held[np.arange(len(placement.experts)) // per_rank, placement.experts] = True
    return held


def move_us(moved: Moved, constants: Mapping[str, float]) -> float:
    """How long the busiest rank takes; NVLink and the network work at once."""
    near = moved.busiest_within_bytes / constants[f"{DISPATCH}_nvlink_gbs"] / 1e3
    far = moved.busiest_between_bytes / constants["network_gbs"] / 1e3 if moved.between_bytes else 0.0
    return max(near, far)


def _sum(calls: list[sent.CallTraffic], scale: float) -> sent.CallTraffic:
    """All steps together; each row stands for `scale` rows, messages are sent once."""
    rows, payload, beside, messages = (
        np.sum(each, axis=0) for each in zip(*(call[1:] for call in calls), strict=True)
    )
    if scale != 1:
        rows, payload, beside = (np.rint(each * scale).astype(np.int64) for each in (rows, payload, beside))
    return sent.CallTraffic(calls[0].topology, rows, payload, beside, messages)
