"""Ranks whose deadlines pass together mask the one that is silent, and nobody else; each rule is needed."""

from __future__ import annotations

import pytest

from tests.model.deadlines import Deadlines, Rules
from tests.model.explorer import Hole, assert_needed, assert_no_rule_without_a_hole, assert_right


@pytest.mark.parametrize("num_callers", [1, 2, 3])
def test_only_the_silent_rank_is_masked(num_callers: int) -> None:
    steps = {str(step) for step in assert_right(Deadlines(num_callers))}
    assert {f"rank {rank}: give up" for rank in range(num_callers)} <= steps
    assert {f"rank {num_callers}: {action}" for action in ("judge", "decide")} <= steps


HOLES = {
    name: Hole(rules, "masks", Deadlines(2))
    for name, rules in {
        "who waits for this rank is late": Rules(spare_who_waits=False),
        "a look, and then the judgement": Rules(look_last=False),
        "who masks goes on before all know": Rules(tell_first=False),
        "a mask is not passed on": Rules(pass_on=False),
    }.items()
}


@pytest.mark.parametrize("hole", HOLES.values(), ids=HOLES)
def test_without_this_rule_a_rank_is_masked_that_came_in_time(hole: Hole) -> None:
    assert_needed(hole)


def test_no_rule_is_left_without_a_hole() -> None:
    assert_no_rule_without_a_hole(HOLES.values())
