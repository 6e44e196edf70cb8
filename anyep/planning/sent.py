"""The bytes that a call of AnyEP sends, from every rank to every rank and kind by kind, before it is made.

    counts = count_choices(topk_idx, Topology(16, 8), num_experts=256)
    sent = dispatch(counts, Rows(hidden_bytes=14336, num_topk=8), num_channels=10)
    sent.by_link()["between nodes"].num_bytes
    sent.bytes[3, 11]

It is what `Buffer.runtime.traffic` counts while the call runs on CPUs, to the byte. "Sent" is defined there
(`core/traffic.py`): rows that relays pass on count again, counters do not count.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from anyep.core.traffic import BETWEEN_NODES, LINKS, SAME_RANK, WITHIN_NODE, Amount
from anyep.layout import (
    COUNTER_BYTES,
    DIGEST_BYTES,
    NOTIFY_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    SOURCE_INDEX_BYTES,
)
from anyep.planning.counts import Array, Counts
from anyep.sizes import (
    LOW_LATENCY_HEADER_BYTES,
    SCALE_BYTES,
    SOURCE_META_BYTES,
    TOPK_WEIGHT_BYTES,
    TokenLayout,
)
from anyep.topology import Topology

ID_BYTES = 8
"""Of an expert's id in a window; in rings it takes 4."""


class Rows(NamedTuple):
    """The rows of a normal-mode call, and what travels beside them; without ids, `num_topk` is 0."""

    hidden_bytes: int
    num_scales: int = 0
    num_topk: int = 0

    @property
    def token_bytes(self) -> int:
        return TokenLayout(self.hidden_bytes, self.num_scales, self.num_topk).token_bytes


class CallTraffic(NamedTuple):
    """What every rank sends in one call: arrays [source, destination]."""

    topology: Topology
    rows: Array
    payload_bytes: Array
    beside_bytes: Array
    message_bytes: Array

    @property
    def bytes(self) -> Array:
        return self.payload_bytes + self.beside_bytes + self.message_bytes

    def by_link(self) -> dict[str, Amount]:
        """The sums over all pairs of ranks joined by each kind of link."""
        links = link_numbers(self.topology)
        return {
            link: Amount(*(_plain(words[links == number].sum()) for words in self[1:]))
            for number, link in enumerate(LINKS)
        }

    def by_rank(self) -> dict[str, Array]:
        """[rank]: the bytes that each rank sends by each kind of link."""
        return self._sums(axis=1)

    def received_by_rank(self) -> dict[str, Array]:
        """[rank]: the bytes that each rank receives by each kind of link."""
        return self._sums(axis=0)

    def _sums(self, axis: int) -> dict[str, Array]:
        links = link_numbers(self.topology)
        return {
            link: np.where(links == number, self.bytes, 0).sum(axis=axis) for number, link in enumerate(LINKS)
        }


def link_numbers(topology: Topology) -> Array:
    """[source, destination]: the index in `LINKS` of what joins two ranks.

    >>> link_numbers(Topology(4, 2))[0].tolist()
    [0, 1, 2, 2]
    """
    node = np.arange(topology.num_ranks) // topology.ranks_per_node
    numbers = np.where(
        node[:, None] == node[None, :], LINKS.index(WITHIN_NODE), LINKS.index(BETWEEN_NODES)
    ).astype(np.int8)
    np.fill_diagonal(numbers, LINKS.index(SAME_RANK))
    return numbers


def dispatch(counts: Counts, rows: Rows, num_channels: int, *, by_window: bool = True) -> CallTraffic:
    """A dispatch that determines its routing. `by_window`: rows go to windows, not through rings, within a
    node."""
    topology = counts.topology
    num_counts = topology.num_ranks + num_channels + counts.local_experts
    if topology.num_nodes > 1:
        num_counts += topology.num_nodes
    call = _forward(counts, rows, _notify(topology, 4 * num_counts), by_window)
    if topology.num_nodes > 1:
        # A relay also learns how many rows of each channel go to each rank of its node.
        sources, relays = _relays(topology)
        call.message_bytes[sources, relays] += 4 * (topology.ranks_per_node + 1) * num_channels
    return call


def cached_dispatch(counts: Counts, rows: Rows, *, by_window: bool = True) -> CallTraffic:
    """A dispatch along a handle."""
    return _forward(counts, rows, _notify_by_handle(counts.topology), by_window)


def combine(counts: Counts, rows: Rows, *, by_window: bool = True) -> CallTraffic:
    """A combine; `num_topk` of the rows is 0 if it passes no weights."""
    topology = counts.topology
    beside = TOPK_WEIGHT_BYTES * rows.num_topk if by_window else rows.token_bytes - rows.hidden_bytes
    messages = _notify_by_handle(topology)
    if topology.num_nodes == 1:
        return _of_rows(topology, counts.to_ranks.T, rows.hidden_bytes, beside, messages)
    near = _spread(topology, counts.relayed()).T
    call = _of_rows(topology, near, rows.hidden_bytes, beside, messages)
    return _add_crossing(call, counts, rows, is_back=True)


def low_latency_dispatch(
    counts: Counts, payload_bytes: int, num_scale_words: int, num_max_tokens: int, hosts: Topology
) -> CallTraffic:
    """A low-latency dispatch. Ranks of one host read rows in place, one for each choice; to another host each
    token is put once for each rank."""
    scale_bytes = SCALE_BYTES * num_scale_words
    beside = (scale_bytes, LOW_LATENCY_HEADER_BYTES + scale_bytes)
    return _low_latency(counts, counts.to_ranks, False, payload_bytes, beside, num_max_tokens, hosts)


def low_latency_combine(counts: Counts, hidden: int, num_max_tokens: int, hosts: Topology) -> CallTraffic:
    """A low-latency combine: one bf16 row for each choice."""
    beside = (0, LOW_LATENCY_HEADER_BYTES)
    return _low_latency(counts, counts.choices, True, 2 * hidden, beside, num_max_tokens, hosts)


def _low_latency(
    counts: Counts,
    far_rows: Array,
    is_back: bool,
    payload_bytes: int,
    beside_bytes: tuple[int, int],
    num_max_tokens: int,
    hosts: Topology,
) -> CallTraffic:
    near_rows = counts.choices
    if is_back:
        near_rows, far_rows = near_rows.T, far_rows.T
    is_near = link_numbers(hosts) != LINKS.index(BETWEEN_NODES)
    rows = np.where(is_near, near_rows, far_rows)
    record = RECORD_HEADER_BYTES - COUNTER_BYTES + COUNTER_BYTES * counts.local_experts
    lists = np.where(is_near, 4 * near_rows, 4 * num_max_tokens * counts.local_experts)
    beside = np.where(is_near, *beside_bytes)
    return CallTraffic(counts.topology, rows, rows * payload_bytes, rows * beside, lists + record)


def _forward(counts: Counts, rows: Rows, messages: Array, by_window: bool) -> CallTraffic:
    topology = counts.topology
    is_several = topology.num_nodes > 1
    source_bytes = SOURCE_META_BYTES if is_several else SOURCE_INDEX_BYTES
    beside = source_bytes + SCALE_BYTES * rows.num_scales + (ID_BYTES + TOPK_WEIGHT_BYTES) * rows.num_topk
    if not by_window:
        beside = rows.token_bytes - rows.hidden_bytes
    if not is_several:
        return _of_rows(topology, counts.to_ranks, rows.hidden_bytes, beside, messages)
    near = _spread(topology, counts.relayed())
    call = _of_rows(topology, near, rows.hidden_bytes, beside, messages)
    return _add_crossing(call, counts, rows, is_back=False)


def _of_rows(topology: Topology, rows: Array, payload: int, beside: int, messages: Array) -> CallTraffic:
    return CallTraffic(topology, rows.copy(), rows * payload, rows * beside, messages)


def _add_crossing(call: CallTraffic, counts: Counts, rows: Rows, is_back: bool) -> CallTraffic:
    """Add the rows between nodes: each token once per node, as an entry of a ring; also on its way back."""
    sources, relays = _relays(call.topology)
    crossing = counts.crossing()
    pairs = (relays, sources) if is_back else (sources, relays)
    call.rows[pairs] += crossing
    call.payload_bytes[pairs] += crossing * rows.hidden_bytes
    call.beside_bytes[pairs] += crossing * (rows.token_bytes - rows.hidden_bytes)
    return call


def _relays(topology: Topology) -> tuple[Array, Array]:
    """Each rank, and its relay on each node: [rank, node]."""
    ranks = np.arange(topology.num_ranks)[:, None]
    nodes = np.arange(topology.num_nodes)[None, :]
    relays = nodes * topology.ranks_per_node + ranks % topology.ranks_per_node
    return np.broadcast_to(ranks, relays.shape), relays


def _spread(topology: Topology, within: Array) -> Array:
    """[rank, rank] from [rank, rank of its node]."""
    nodes, per_node = topology.num_nodes, topology.ranks_per_node
    spread = np.zeros((nodes, per_node, nodes, per_node), within.dtype)
    same = np.arange(nodes)
    spread[same, :, same, :] = within.reshape(nodes, per_node, per_node)
    return spread.reshape(topology.num_ranks, topology.num_ranks)


def _notify(topology: Topology, count_bytes: int) -> Array:
    shape = (topology.num_ranks, topology.num_ranks)
    return np.full(shape, NOTIFY_HEADER_BYTES - COUNTER_BYTES + count_bytes, np.int64)


def _notify_by_handle(topology: Topology) -> Array:
    """Digests of the rows to and from each rank; with several nodes also of tokens, and three counts."""
    ranks, nodes = topology.num_ranks, topology.num_nodes
    if nodes == 1:
        return _notify(topology, 2 * DIGEST_BYTES * ranks)
    return _notify(topology, 2 * DIGEST_BYTES * (ranks + nodes) + 3 * 4 * ranks)


def _plain(number: Array) -> int:
    """Whole numbers as they are; expectations are rounded."""
    return round(float(number)) if number.dtype.kind == "f" else int(number)
