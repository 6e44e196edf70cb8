"""Explores every interleaving of a model's atomic steps.

A model says where it starts, which steps a state allows and whether a state is finished. `explore(model)`
visits every state that can be reached, each once, and stops at the first problem: a step that raises
`Violation`, or a deadlock, which is a state that is not finished and allows no step. The search is breadth
first, so the trace to a problem is a shortest one. States and steps must be hashable.

    exploration = explore(model)
    assert exploration.problem is None, exploration.problem

`assert_right` does so for several models. A model has `rules`, of which each is needed: a `Hole` switches one
off in a model that was right, and `assert_needed` sees it go wrong in the way that is expected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, TypeVar

DEADLOCK = "deadlock"

State = TypeVar("State", bound=Hashable)


class Violation(Exception):
    """A step broke an invariant; `kind` names the invariant, `detail` says who did what."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Model(Protocol[State]):
    def start(self) -> State: ...

    def steps(self, state: State) -> Iterable[tuple[Hashable, State]]:
        """Every (step, state after it); raises `Violation` where a step breaks an invariant."""
        ...

    def is_finished(self, state: State) -> bool: ...


@dataclass(frozen=True)
class Problem:
    """What went wrong after the steps of `trace`; where a step broke an invariant, `detail` is that step."""

    kind: str
    detail: str
    trace: tuple[Hashable, ...]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.trace), f"{self.kind}: {self.detail}"])


@dataclass(frozen=True)
class Exploration:
    num_states: int
    steps_taken: frozenset[Hashable]
    problem: Problem | None


def explore(model: Model[State]) -> Exploration:
    start = model.start()
    came_from: dict[State, tuple[State, Hashable] | None] = {start: None}
    steps_taken: set[Hashable] = set()
    frontier = deque([start])
    problem = None
    while frontier and problem is None:
        state = frontier.popleft()
        is_stuck = True
        try:
            for step, after in model.steps(state):
                is_stuck = False
                steps_taken.add(step)
                if after not in came_from:
                    came_from[after] = (state, step)
                    frontier.append(after)
        except Violation as violation:
            problem = Problem(violation.kind, violation.detail, _trace(came_from, state))
        else:
            if is_stuck and not model.is_finished(state):
                problem = Problem(DEADLOCK, f"no step in {state}", _trace(came_from, state))
    return Exploration(len(came_from), frozenset(steps_taken), problem)


def _trace(came_from: dict[State, tuple[State, Hashable] | None], state: State) -> tuple[Hashable, ...]:
    steps = []
    while (arrival := came_from[state]) is not None:
        state, step = arrival
        steps.append(step)
    return tuple(reversed(steps))


def assert_right(*models: Model[Any]) -> set[Any]:
    """Explore them all; the steps that occurred."""
    num_states, steps = 0, set()
    for model in models:
        exploration = explore(model)
        assert exploration.problem is None, f"{model}\n{exploration.problem}"
        num_states += exploration.num_states
        steps |= exploration.steps_taken
    print(f"{len(models)} models, {num_states} states")
    return steps


def actions(steps: Iterable[Any]) -> set[str]:
    return {step.action for step in steps}


class Hole(NamedTuple):
    """A rule that is switched off, the kind of problem that follows, and the model where it does."""

    rules: Any
    kind: str
    model: Any


def assert_needed(hole: Hole) -> None:
    """The model goes wrong without the rule. It is right with it: `models_of` lists what to explore."""
    exploration = explore(replace(hole.model, rules=hole.rules))
    assert exploration.problem is not None
    print(f"{exploration.num_states} states until\n{exploration.problem}")
    assert exploration.problem.kind == hole.kind


def models_of(holes: Iterable[Hole], explored: Iterable[Any] = ()) -> list[Any]:
    """Each model of these once, unless it is explored elsewhere."""
    others = {repr(model) for model in explored}
    models = {repr(hole.model): hole.model for hole in holes}
    return [model for name, model in models.items() if name not in others]


def assert_no_rule_without_a_hole(holes: Iterable[Hole]) -> None:
    rules = [hole.rules for hole in holes]
    for rule in fields(rules[0]):
        assert any(getattr(changed, rule.name) != rule.default for changed in rules), rule.name
