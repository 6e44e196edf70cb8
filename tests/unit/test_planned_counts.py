"""Counts of a routing against loops over its tokens, and against the relays of the library's own plan."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep.core.relay import RelayPlan
from anyep.core.traffic import LINKS, link_between
from anyep.errors import InvalidCall
from anyep.planning import sent
from anyep.planning.counts import Counts, check_choices, count_choices
from anyep.topology import Topology
from tests.support.depth import examples
from tests.support.patience import scaled


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, Topology, int]:
    topology = Topology((nodes := draw(st.integers(1, 3))) * (per_node := draw(st.integers(1, 3))), per_node)
    assert nodes == topology.num_nodes
    experts = topology.num_ranks * draw(st.integers(1, 3))
    shape = (topology.num_ranks, draw(st.integers(0, 4)), draw(st.integers(1, 4)))
    seed = draw(st.integers(0, 1000))
    return np.random.default_rng(seed).integers(-1, experts, shape), topology, experts


@examples(60, deep=1000)
@given(routings())
def test_counts(routing: tuple[np.ndarray, Topology, int]) -> None:
    topk_idx, topology, experts = routing
    counts = count_choices(topk_idx, topology, experts)
    ranks, local = topology.num_ranks, experts // topology.num_ranks
    to_ranks = np.zeros((ranks, ranks), int)
    to_nodes = np.zeros((ranks, topology.num_nodes), int)
    to_experts = np.zeros((ranks, experts), int)
    relayed = np.zeros((ranks, ranks), int)
    for source in range(ranks):
        for token in topk_idx[source]:
            chosen = {int(expert) for expert in token if expert >= 0}
            holders = {expert // local for expert in chosen}
            for expert in chosen:
                to_experts[source, expert] += 1
            for holder in holders:
                to_ranks[source, holder] += 1
                relayed[RelayPlan(topology, source).relays[topology.node_of(holder)], holder] += 1
            for node in {topology.node_of(holder) for holder in holders}:
                to_nodes[source, node] += 1
    assert np.array_equal(counts.to_ranks, to_ranks)
    assert np.array_equal(counts.to_nodes, to_nodes)
    assert np.array_equal(counts.to_experts, to_experts)
    assert np.array_equal(counts.choices, to_experts.reshape(ranks, ranks, local).sum(2))
    for relay in range(ranks):
        here = topology.ranks_on(topology.node_of(relay))
        assert counts.relayed()[relay].tolist() == relayed[relay, here.start : here.stop].tolist()
        crossing = counts.crossing()[relay]
        own = topology.node_of(relay)
        assert crossing[own] == 0
        assert crossing.sum() == to_nodes[relay].sum() - to_nodes[relay, own]


@examples(20, deep=200)
@given(routings())
def test_links_add_up(routing: tuple[np.ndarray, Topology, int]) -> None:
    topk_idx, topology, experts = routing
    call = sent.dispatch(count_choices(topk_idx, topology, experts), sent.Rows(64, num_topk=2), 4)
    by_link, by_rank, received = call.by_link(), call.by_rank(), call.received_by_rank()
    for link in LINKS:
        pairs = [
            (source, destination)
            for source in range(topology.num_ranks)
            for destination in range(topology.num_ranks)
            if link_between(topology, source, destination) == link
        ]
        assert by_link[link].rows == sum(call.rows[pair] for pair in pairs)
        assert by_link[link].num_bytes == sum(call.bytes[pair] for pair in pairs)
        assert by_rank[link].sum() == received[link].sum() == by_link[link].num_bytes
        for rank in range(topology.num_ranks):
            assert by_rank[link][rank] == sum(call.bytes[pair] for pair in pairs if pair[0] == rank)
            assert received[link][rank] == sum(call.bytes[pair] for pair in pairs if pair[1] == rank)


def test_sums_of_expectations_are_rounded_once() -> None:
    topology = Topology(2, 2)
    half = np.full((2, 2), 0.5)
    counts = Counts(topology, 2, np.ones(2), half, np.ones((2, 1)), half)
    within = sent.cached_dispatch(counts, sent.Rows(16)).by_link()["within the node"]
    assert (within.rows, within.payload_bytes) == (1, 16)


def test_wrong_choices() -> None:
    check_choices(np.array([[[0, -1, 3]]]), 4, "the trace")
    check_choices(np.zeros((0, 1, 1), int), 4, "the trace")
    with pytest.raises(InvalidCall, match="the trace has the expert 4: experts are 0 to 3"):
        check_choices(np.array([[[0, 4]]]), 4, "the trace")
    with pytest.raises(InvalidCall, match="the trace has the expert -2"):
        check_choices(np.array([[[0, -2]]]), 4, "the trace")


@pytest.mark.slow
def test_large_clusters_take_seconds() -> None:
    """2,048 ranks with 1,024 tokens each."""
    topology = Topology(2048, 8)
    topk_idx = np.random.default_rng(1).integers(0, 4096, (2048, 1024, 8), dtype=np.int32)
    started = time.monotonic()
    counts = count_choices(topk_idx, topology, 4096)
    call = sent.dispatch(counts, sent.Rows(14336, num_topk=8), num_channels=10)
    assert call.by_link()["between nodes"].rows == counts.crossing().sum()
    assert time.monotonic() - started < scaled(12)
