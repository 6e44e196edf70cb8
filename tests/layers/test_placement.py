"""Placing experts: every expert has a place, ranks are even, limited gates stay limited; bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyep import InvalidCall
from anyep.balance import place_experts
from anyep.planning.placement import pack, replicate
from tests.support.depth import examples


@st.composite
def loads(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int, int]:
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, nodes, 2 * nodes]))
    experts = groups * draw(st.integers(1, 4))
    ranks = nodes * per_node
    replicas = -(-experts // ranks) * ranks + ranks * draw(st.integers(0, 2))
    load = np.array(draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)))
    return load, replicas, nodes, ranks, groups


@examples(80, deep=1000)
@given(loads())
def test_every_expert_has_its_places(case: tuple[np.ndarray, int, int, int, int]) -> None:
    load, replicas, nodes, ranks, groups = case
    placement = place_experts(load, replicas, nodes, ranks, groups)
    assert len(placement.experts) == replicas
    assert np.array_equal(np.bincount(placement.experts, minlength=len(load)), placement.num_places)
    assert placement.num_places.min() >= 1
    for expert, places in enumerate(placement.places):
        mine = places[: placement.num_places[expert]]
        assert (placement.experts[mine] == expert).all()
        assert list(mine) == sorted(mine)
        assert (places[len(mine) :] == -1).all()
    if groups > 1 and groups % nodes == 0:
        # All replicas of all experts of a group are on one node, and nodes have equally many groups.
        node = np.arange(replicas) // (replicas // nodes)
        group = placement.experts // (len(load) // groups)
        of_group = [set(node[group == each]) for each in range(groups)]
        assert all(len(on) == 1 for on in of_group)
        assert (
            np.bincount([on.pop() for on in of_group], minlength=nodes).tolist() == [groups // nodes] * nodes
        )


def rank_loads(load: np.ndarray, placement, ranks: int) -> np.ndarray:  # type: ignore[no-untyped-def]
    share = (load / placement.num_places)[placement.experts]
    return share.reshape(ranks, -1).sum(axis=1)


@pytest.mark.parametrize("skew", [0.3, 0.8, 1.2])
def test_a_power_law_becomes_even(skew: float) -> None:
    load = np.random.default_rng(3).permutation(np.arange(1, 257) ** -skew)
    placement = place_experts(load, 288, 4, 32)
    after = rank_loads(load, placement, 32)
    before = load.reshape(32, -1).sum(axis=1)
    assert after.max() / after.mean() < min(1.06, before.max() / before.mean())


def test_replicas_of_an_expert_are_on_different_ranks() -> None:
    placement = place_experts(np.array([90.0, 1.0, 1.0, 1.0]), 8, 1, 4)
    ranks = placement.places[0][: placement.num_places[0]] // 2
    assert placement.num_places[0] > 2
    assert set(ranks) == {0, 1, 2, 3}


def test_replicas_go_where_the_load_is() -> None:
    assert replicate(np.array([8.0, 4.0, 2.0]), 6).tolist() == [3, 2, 1]
    assert pack(np.array([1.0, 1.0, 1.0, 9.0]), 2).tolist() == [1, 1, 0, 0]


def test_tensors_are_taken() -> None:
    load = torch.tensor([5, 1, 1, 1], device="cpu", dtype=torch.int64)
    placement = place_experts(load, 4, 1, 2)
    assert isinstance(placement.experts, np.ndarray)
    assert sorted(placement.experts.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((np.ones(8), 7, 1, 1), "num_replicas is 7, but there are 8 experts"),
        ((np.ones(8), 9, 1, 2), "num_replicas is 9, which 2 ranks cannot share"),
        ((np.ones(8), 9, 2, 3), "num_ranks is 3, which 2 nodes cannot share"),
        ((np.ones(8), 8, 1, 2, 3), "8 experts cannot be 3 groups"),
        ((np.ones(8), 8, 0, 2), "num_nodes is 0: it must be at least 1"),
        ((np.ones((2, 4)), 8, 1, 2), "load has 2 dimensions of float64: pass one number for each expert"),
        ((np.array(["a"]), 8, 1, 2), "load has 1 dimensions of <U1"),
        ((np.array([1.0, np.nan]), 2, 1, 2), "load must be one finite number of at least 0"),
        ((np.array([1.0, -1.0]), 2, 1, 2), "load must be one finite number of at least 0"),
        ((np.array([]), 2, 1, 2), "load must be one finite number of at least 0"),
    ],
)
def test_wrong_arguments(arguments: tuple, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(InvalidCall, match=said):
        place_experts(*arguments)
