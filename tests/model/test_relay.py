"""Rows between nodes, in every interleaving: no deadlock, no row for another; and each rule is needed."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from tests.model.explorer import (
    DEADLOCK,
    Hole,
    actions,
    assert_needed,
    assert_no_rule_without_a_hole,
    assert_right,
    models_of,
)
from tests.model.relay import Combine, Dispatch, Mask, Nodes, Rules


def to(*tokens: str) -> Mask:
    """A rank's tokens; `to("02", "1")` has two, of which the first goes to ranks 0 and 2."""
    return tuple(frozenset(map(int, token)) for token in tokens)


def random_masks(random: Random, num_ranks: int, num_tokens: int) -> tuple[Mask, ...]:
    """Any routing; a token may go nowhere."""
    return tuple(
        tuple(
            frozenset(rank for rank in range(num_ranks) if random.random() < 0.6)
            for _ in range(random.randint(0, num_tokens))
        )
        for _ in range(num_ranks)
    )


TWO_NODES = (to("01", "01", "01"),) * 2
THREE_NODES = (to("012", "012"),) * 3
TWO_BY_TWO = (to("0123", "23"), to("13", "02"), to("01", "0123"), to("02", "13"))
ROUTINGS = {
    "two nodes": (TWO_NODES, 1),
    "three nodes": (THREE_NODES, 1),
    "two by two": (TWO_BY_TWO, 2),
    "one way": ((to("23", "3", "2"), to("23"), (), ()), 2),
    "own node": ((to("0", "01"), to("01", "1"), to("2"), to("23", "3")), 2),
    "nowhere": ((to("", "1"), to("0", "")), 1),
}


@pytest.mark.parametrize("rows", [(1, 1), (2, 1)])
@pytest.mark.parametrize(("masks", "per_node"), ROUTINGS.values(), ids=ROUTINGS)
def test_combine_through_rings_of_few_rows(
    masks: tuple[Mask, ...], per_node: int, rows: tuple[int, int]
) -> None:
    assert "add" in actions(assert_right(Combine(masks, per_node, *rows)))


DISPATCHES = ROUTINGS | {
    "three nodes": ((to("12", "12", "12"), to("02"), to("0")), 1),
    "two by two": ((to("0123", "23", "3"), to("23"), (), to("0")), 2),
}
"""Relays take rows from everywhere in any order, so there are far more interleavings."""


@pytest.mark.parametrize(("masks", "per_node"), DISPATCHES.values(), ids=DISPATCHES)
def test_dispatch_through_rings_of_one_row(masks: tuple[Mask, ...], per_node: int) -> None:
    assert "take" in actions(assert_right(Dispatch(masks, per_node, 1, 1)))


@pytest.mark.parametrize(("nodes", "per_node", "num_tokens"), [(2, 1, 4), (3, 1, 2), (2, 2, 1)])
def test_any_routing(nodes: int, per_node: int, num_tokens: int) -> None:
    random = Random(nodes * 10 + per_node)
    num_ranks = nodes * per_node
    assert_right(
        *(Combine(random_masks(random, num_ranks, num_tokens), per_node, 1, 1) for _ in range(20)),
        *(Dispatch(random_masks(random, num_ranks, max(1, 4 - num_ranks)), per_node, 1, 1) for _ in range(8)),
    )


def test_windows_on_some_nodes() -> None:
    """Where rows lie in windows, nodes are served in any order; others keep theirs, and all is well."""
    for masks, per_node in ROUTINGS.values():
        for windows in product((False, True), repeat=len(masks) // per_node):
            nodes = frozenset(node for node, has_windows in enumerate(windows) if has_windows)
            assert_right(Combine(masks, per_node, 1, 1, windows=nodes))


# Each rule is needed: without it, a routing that was right goes wrong, and in the way that is expected.


HOLES = {
    "two nodes serve each other first": Hole(Rules(order="rotated"), DEADLOCK, Combine(TWO_NODES, 1, 1, 1)),
    "three nodes serve the next one first": Hole(
        Rules(order="rotated"), DEADLOCK, Combine(THREE_NODES, 1, 1, 1)
    ),
    "relays serve nodes in another order than rows come": Hole(
        Rules(order="rotated", pushed_alike=False), "row", Combine(TWO_NODES, 1, 1, 1)
    ),
    "relay everything, then take": Hole(Rules(both_at_once=False), DEADLOCK, Dispatch(TWO_NODES, 1, 1, 1)),
    "no look at the room for tokens": Hole(Rules(looks_for_room=False), "ring", Dispatch(TWO_NODES, 1, 1, 1)),
    "no look at the room for rows and sums": Hole(
        Rules(looks_for_room=False), "ring", Combine(TWO_BY_TWO, 2, 1, 1)
    ),
}


def test_with_all_rules_it_is_right() -> None:
    explored = [Combine(masks, per_node, 1, 1) for masks, per_node in ROUTINGS.values()]
    assert_right(*models_of(HOLES.values(), explored))


@pytest.mark.parametrize("hole", HOLES.values(), ids=HOLES)
def test_without_this_rule_it_fails(hole: Hole) -> None:
    assert_needed(hole)


def test_no_rule_is_left_without_a_hole() -> None:
    assert_no_rule_without_a_hole(HOLES.values())


def test_rings_between_nodes_alone_need_no_order() -> None:
    """With windows on all nodes, a rotated order is as good: only rows that share a ring need one."""
    everywhere = frozenset(range(3))
    for masks, per_node in ROUTINGS.values():
        assert_right(Combine(masks, per_node, 1, 1, Rules(order="rotated"), windows=everywhere))


def test_the_relay_of_a_rank_has_its_index() -> None:
    nodes = Nodes(TWO_BY_TWO, 2, 1, 1)
    assert [nodes.relay(3, node) for node in range(2)] == [1, 3]
    assert nodes.tokens(0, 1) == [frozenset({2, 3}), frozenset({2, 3})]
