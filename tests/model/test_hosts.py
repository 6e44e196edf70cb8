"""Masks between hosts, in every interleaving: rows are right, nothing is stuck; each rule is needed."""

from __future__ import annotations

import pytest

from tests.model.explorer import (
    Hole,
    actions,
    assert_needed,
    assert_no_rule_without_a_hole,
    assert_right,
    models_of,
)
from tests.model.hosts import Hosts, Rules

FIRST, SECOND, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})
ONE_IS_SLOW = Hosts((3, 3), slow=SECOND)
BOTH_ARE_SLOW = Hosts((3, 3), slow=BOTH)
ONE_DIES = Hosts((4, 4), may_die=SECOND)
CLEANED = Hosts((3, 3), slow=SECOND, cleans=frozenset({2}))
ROUND = Hosts((2, 2), slow=SECOND, calls_before=2)
EXPLORED = {
    "one is slow": ONE_IS_SLOW,
    "both are slow": BOTH_ARE_SLOW,
    "one dies": ONE_DIES,
    "the first one dies": Hosts((3, 3), may_die=FIRST),
    "cleaned": CLEANED,
    "a round": ROUND,
}


@pytest.mark.parametrize("model", EXPLORED.values(), ids=EXPLORED)
def test_what_is_returned_is_right(model: Hosts) -> None:
    found = actions(assert_right(model))
    assert {"send", "land", "signal rows", "receive", "return", "give up"} <= found
    assert ("die" in found) == bool(model.may_die)
    assert {"request", "join"} <= found or model is not ROUND
    assert "drop" in found or model is not ONE_IS_SLOW


@pytest.mark.slow
def test_three_hosts() -> None:
    assert_right(Hosts((1, 1, 1), may_die=frozenset({2})))


HOLES = {
    "puts to a masked rank": Hole(Rules(puts_nothing_to_masked=False), "rows", ONE_IS_SLOW),
    "a set written while it is sent": Hole(Rules(waits_until_sent=False), "rows", ONE_IS_SLOW),
    "dropped, and delivered": Hole(Rules(dropped_for_good=False), "rows", ONE_IS_SLOW),
    "a minority goes on": Hole(Rules(needs_majority=False), "split", BOTH_ARE_SLOW),
    "a request before rows": Hole(Rules(idle_before_a_round=False), "rows", ROUND),
    "slots that move": Hole(Rules(keeps_layout=False), "layout", CLEANED),
}


def test_with_all_rules_it_is_right() -> None:
    assert_right(*models_of(HOLES.values(), EXPLORED.values()))


@pytest.mark.parametrize("hole", HOLES.values(), ids=HOLES)
def test_without_this_rule_it_fails(hole: Hole) -> None:
    assert_needed(hole)


def test_no_rule_is_left_without_a_hole() -> None:
    assert_no_rule_without_a_hole(HOLES.values())
