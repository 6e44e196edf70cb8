"""Ranks whose deadlines pass together mask the one that is silent, and nobody else; each rule is needed."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.model.deadlines import Deadlines, Rules
from tests.model.explorer import explore


@pytest.mark.parametrize("num_callers", [1, 2, 3])
def test_only_the_silent_rank_is_masked(num_callers: int) -> None:
    exploration = explore(Deadlines(num_callers))
    print(f"{exploration.num_states} states")
    assert exploration.problem is None, exploration.problem
    actions = {str(step) for step in exploration.steps_taken}
    assert {f"rank {rank}: give up" for rank in range(num_callers)} <= actions
    assert {f"rank {num_callers}: {action}" for action in ("judge", "decide")} <= actions


HOLES = {
    "who waits for this rank is late": Rules(spare_who_waits=False),
    "a look, and then the judgement": Rules(look_last=False),
    "who masks goes on before all know": Rules(tell_first=False),
    "a mask is not passed on": Rules(pass_on=False),
}


@pytest.mark.parametrize("rules", HOLES.values(), ids=HOLES)
def test_without_this_rule_a_rank_is_masked_that_came_in_time(rules: Rules) -> None:
    problem = explore(Deadlines(2, rules)).problem
    assert problem is not None
    print(problem)
    assert problem.kind == "masks"


def test_no_rule_is_left_without_a_hole() -> None:
    changed = {
        field.name
        for rules in HOLES.values()
        for field in fields(Rules)
        if getattr(rules, field.name) != field.default
    }
    assert changed == {field.name for field in fields(Rules)}
