"""Ranks, nodes and experts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep import InvalidCall
from anyep.topology import Topology, topology_of_hosts


@given(st.integers(1, 24), st.integers(1, 32))
def test_every_rank_has_one_place(num_nodes: int, per_node: int) -> None:
    topology = Topology(num_nodes * per_node, per_node)
    assert topology.num_nodes == num_nodes
    places = [(topology.node_of(rank), topology.nvl_rank_of(rank)) for rank in range(topology.num_ranks)]
    assert places == [(node, index) for node in range(num_nodes) for index in range(per_node)]
    assert [topology.rank_at(*place) for place in places] == list(range(topology.num_ranks))
    assert [rank for node in range(num_nodes) for rank in topology.ranks_on(node)] == list(
        range(topology.num_ranks)
    )


@given(
    st.lists(st.text(max_size=3), min_size=1, max_size=6, unique=True), st.integers(1, 6), st.integers(1, 4)
)
def test_hosts_become_nodes(names: list[str], virtual: int, per_node: int) -> None:
    hosts = [name for name in names for _ in range(virtual * per_node)]
    assert topology_of_hosts(hosts) == Topology(len(hosts), virtual * per_node)
    assert topology_of_hosts(hosts, per_node) == Topology(len(hosts), per_node)


def test_one_node_may_have_any_number_of_ranks() -> None:
    assert Topology(64, 64).num_nodes == 1
    assert Topology(64, 32).num_nodes == 2
    assert Topology(1, 1).num_nodes == 1


def test_experts_are_shared_out() -> None:
    assert Topology(8, 8).experts_per_rank(256) == 32
    assert Topology(8, 4).experts_per_rank(8) == 1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Topology(0, 1), "num_ranks is 0: it must be at least 1"),
        (lambda: Topology(8, 0), "ranks_per_node is 0: it must be at least 1"),
        (lambda: Topology(12, 8), "12 ranks do not fill nodes of 8 evenly:"),
        (lambda: Topology(66, 33), "ranks_per_node is 33: with several nodes it may be at most 32;"),
        (lambda: Topology(4, 2).node_of(4), "there is no rank 4: ranks are 0 to 3"),
        (lambda: Topology(4, 2).nvl_rank_of(-1), "there is no rank -1: ranks are 0 to 3"),
        (lambda: Topology(4, 2).rank_at(2, 0), "there is no rank 0 on node 2: 2 nodes have 2 ranks each"),
        (lambda: Topology(4, 2).rank_at(0, 2), "there is no rank 2 on node 0: 2 nodes have 2 ranks each"),
        (lambda: Topology(4, 2).rank_at(-1, 0), "there is no rank 0 on node -1:"),
        (lambda: Topology(4, 2).rank_at(0, -1), "there is no rank -1 on node 0:"),
        (lambda: Topology(4, 2).experts_per_rank(6), "6 experts do not divide over 4 ranks:"),
        (lambda: Topology(4, 2).experts_per_rank(0), "num_experts is 0: it must be at least 1"),
        (lambda: topology_of_hosts([]), "there are no ranks"),
        (lambda: topology_of_hosts(["a", "b", "a"]), "the ranks of host 'a' are not consecutive:"),
        (
            lambda: topology_of_hosts(["a", "a", "b"]),
            "nodes must have equal numbers of ranks, but 'a' has 2, 'b' has 1",
        ),
        (
            lambda: topology_of_hosts(["a", "a", "a", "b"], 2),
            "ranks_per_node is 2, but host 'a' has 3 ranks:",
        ),
    ],
)
def test_topology_refuses(call, sentence: str) -> None:
    with pytest.raises(InvalidCall) as caught:
        call()
    assert str(caught.value).startswith(sentence)
