"""Proxies of GPU kernels, in every interleaving: what arrives is right, nothing is stuck; each rule is
needed."""

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
from tests.model.proxy import Proxies, Rules

FIRST = frozenset({0})
"""The proxy of one rank in full detail; what the others put arrives at any time, but whole."""
TWO = Proxies(num_calls=2, num_rows=2, num_entries=2)
MESSAGES = Proxies(num_calls=3, num_rows=0)
ROWS = Proxies(num_calls=1, num_rows=3, ring_rows=2, num_entries=2, detailed=FIRST)
ONE_SLOT = Proxies(num_calls=1, num_rows=3, ring_rows=2, detailed=FIRST)
TWO_BY_TWO = Proxies(num_calls=3, per_node=2, num_rows=1, detailed=FIRST)
EXPLORED = {
    "two nodes": TWO,
    "messages": MESSAGES,
    "rows": ROWS,
    "two by two": TWO_BY_TWO,
}


@pytest.mark.parametrize("model", EXPLORED.values(), ids=EXPLORED)
def test_what_arrives_is_right(model: Proxies) -> None:
    found = actions(assert_right(model))
    assert {"message", "number", "take", "land", "signal", "call"} <= found
    assert ({"row", "receive"} <= found) == (model.num_rows > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        Proxies(num_calls=2, per_node=2, num_rows=0, detailed=frozenset({0, 3})),
        Proxies(num_calls=1, per_node=2, num_rows=2, detailed=frozenset({0, 2})),
        Proxies(num_calls=2, per_node=2, num_rows=2, num_entries=2, detailed=FIRST),
        Proxies(num_calls=3, num_rows=3, ring_rows=2, num_entries=2),
    ],
    ids=["messages", "both ends of a ring", "more rows", "three calls"],
)
def test_more_proxies_in_full_detail(model: Proxies) -> None:
    assert_right(model)


# Each rule is needed: without it, a model that was right goes wrong, and in the way that is expected.


HOLES = {
    "the number of a command first": Hole(Rules(number_last=False), "command", TWO),
    "no look at the room for commands": Hole(Rules(waits_for_command_room=False), "command", ONE_SLOT),
    "taken before it is read": Hole(Rules(taken_after_reading=False), "command", ONE_SLOT),
    "a signal before its bytes": Hole(Rules(signal_after_bytes=False), "message", MESSAGES),
    "a tail before its rows": Hole(Rules(tail_after_rows=False), "row", ROWS),
    "signals that overtake each other": Hole(Rules(signals_in_order=False), "row", ROWS),
    "one mailbox": Hole(Rules(num_mailboxes=1), "message", MESSAGES),
    "messages of the relay only": Hole(Rules(waits_for_all_messages=False), "message", TWO_BY_TWO),
    "no look at the room for rows": Hole(Rules(waits_for_credit=False), "row", ROWS),
}


def test_with_all_rules_it_is_right() -> None:
    assert_right(*models_of(HOLES.values(), EXPLORED.values()))


@pytest.mark.parametrize("hole", HOLES.values(), ids=HOLES)
def test_without_this_rule_it_fails(hole: Hole) -> None:
    assert_needed(hole)


def test_no_rule_is_left_without_a_hole() -> None:
    assert_no_rule_without_a_hole(HOLES.values())
