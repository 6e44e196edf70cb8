"""The protocol, checked in every interleaving: no race, no deadlock; and each of its rules is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

import pytest

from tests.model.explorer import (
    DEADLOCK,
    Hole,
    Violation,
    actions,
    assert_needed,
    assert_no_rule_without_a_hole,
    assert_right,
    explore,
    models_of,
)
from tests.model.protocol import Call, Protocol, Rules, put

# The explorer itself, on toys: threads that run a list of steps on a shared tuple.

Shared = tuple[int, ...]
ToyStep = Callable[[Shared], Shared | None]
ToyState = tuple[tuple[int, ...], Shared]


@dataclass(frozen=True)
class Toy:
    programs: tuple[tuple[ToyStep, ...], ...]
    shared: Shared

    def start(self) -> ToyState:
        return (0,) * len(self.programs), self.shared

    def steps(self, state: ToyState) -> Iterator[tuple[str, ToyState]]:
        counters, shared = state
        for thread, program in enumerate(self.programs):
            if counters[thread] < len(program):
                after = program[counters[thread]](shared)
                if after is not None:
                    advanced = tuple(count + (i == thread) for i, count in enumerate(counters))
                    yield f"{thread}.{counters[thread]}", (advanced, after)

    def is_finished(self, state: ToyState) -> bool:
        return all(count == len(program) for count, program in zip(state[0], self.programs, strict=True))


def lock(index: int) -> ToyStep:
    return lambda locks: None if locks[index] else put(locks, index, 1)


def unlock(index: int) -> ToyStep:
    return lambda locks: put(locks, index, 0)


def test_explorer_finds_a_deadlock() -> None:
    a_then_b = (lock(0), lock(1), unlock(1), unlock(0))
    b_then_a = (lock(1), lock(0), unlock(0), unlock(1))
    problem = explore(Toy((a_then_b, b_then_a), (0, 0))).problem
    assert problem is not None
    assert problem.kind == DEADLOCK
    assert len(problem.trace) == 2
    assert set(problem.trace) == {"0.0", "1.0"}
    # Of 5 x 5 pairs of positions, only the 3 x 3 in which both threads hold a lock are out of reach.
    exploration = explore(Toy((a_then_b, a_then_b), (0, 0)))
    assert exploration.problem is None
    assert exploration.num_states == 16


def test_explorer_finds_a_race_by_a_shortest_trace() -> None:
    """Two threads add 1 to a count, each by a load into a register of its own and a store."""

    def thread(register: int) -> tuple[ToyStep, ...]:
        def check(shared: Shared) -> Shared:
            if shared[0] < shared[3]:
                raise Violation("lost update", f"count {shared[0]} after {shared[3]} stores")
            return shared

        return (
            lambda shared: put(shared, register, shared[0]),
            lambda shared: put(put(shared, 0, shared[register] + 1), 3, shared[3] + 1),
            check,
        )

    problem = explore(Toy((thread(1), thread(2)), (0, 0, 0, 0))).problem
    assert problem is not None
    assert (problem.kind, problem.detail) == ("lost update", "count 1 after 2 stores")
    assert len(problem.trace) == 4
    assert set(problem.trace) == {"0.0", "0.1", "1.0", "1.1"}
    assert str(problem).endswith("\nlost update: count 1 after 2 stores")
    assert explore(Toy((thread(1),), (0, 0, 0, 0))).problem is None


# The protocol as it is.

NOTIFY = {"start", "notify message", "number", "read"}
WINDOW, RING, PULL = {"write", "arrived"}, {"put", "tail", "take", "head"}, {"pull", "pulled"}
BY_0, BY_1, BY_2 = (frozenset({rank}) for rank in range(3))

DISPATCH = Call(frees="any")
CACHED = Call("cached", num_rows=2, ring_rows=1, frees="any")
COMBINE = Call("combine", frees="any")
COMBINE_OTHER = Call("combine", x_in_result=False, num_rows=2, ring_rows=1, frees="any")
REFUSED_BY_0 = Call("cached", refused_by=BY_0, frees="any")
REFUSED_BY_1 = Call("combine", refused_by=BY_1, frees="any")
ONE_WAY = Call(silent=frozenset({(1, 0)}), frees="any")
KINDS = (DISPATCH, CACHED, COMBINE, COMBINE_OTHER, REFUSED_BY_0, REFUSED_BY_1, ONE_WAY)


@pytest.mark.parametrize("num_calls", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_ranks_every_program(num_calls: int) -> None:
    """With one window per rank, and results freed or kept, a call meets a window that is free or is not."""
    moves = actions(assert_right(*(Protocol((1, 1), calls) for calls in product(KINDS, repeat=num_calls))))
    assert moves >= WINDOW | RING | PULL


@pytest.mark.parametrize(
    "num_blocks", [(1, 0), *(pytest.param(num, marks=pytest.mark.slow) for num in ((2, 2), (2, 1)))]
)
def test_two_ranks_some_programs_of_six_calls(num_blocks: tuple[int, ...]) -> None:
    random = Random(6)
    programs = [tuple(random.choices(KINDS, k=6)) for _ in range(16)]
    programs.append((DISPATCH, CACHED, COMBINE, REFUSED_BY_1, COMBINE_OTHER, DISPATCH))
    programs.append((DISPATCH, COMBINE, ONE_WAY, COMBINE, CACHED, COMBINE))
    programs.append((DISPATCH, REFUSED_BY_1, REFUSED_BY_1, REFUSED_BY_0, REFUSED_BY_0, COMBINE))
    moves = actions(assert_right(*(Protocol(num_blocks, calls) for calls in programs)))
    assert moves >= WINDOW | RING | PULL


def test_two_ranks_rings_of_changing_size() -> None:
    """Calls without windows: rows lie elsewhere in the ring memory in each call, and counters go on."""
    calls = (
        Call("dispatch", num_rows=3, ring_rows=1),
        Call("combine", num_rows=3, ring_rows=2),
        Call("cached", num_rows=2, ring_rows=3),
        Call("combine", num_rows=4, ring_rows=2),
        Call("dispatch", num_rows=1, ring_rows=1),
        Call("combine", num_rows=3, ring_rows=2),
    )
    assert actions(assert_right(Protocol((0, 0), calls))) == NOTIFY | RING


SPARSE = frozenset({(1, 0), (2, 1)})
THREE_RANKS = {
    "refused at last": ((1, 1, 1), (Call(), Call("combine"), Call(refused_by=BY_1)), WINDOW | PULL),
    "staged x": ((1, 1, 1), (Call(), Call("cached"), Call("combine", x_in_result=False)), WINDOW | PULL),
    "any result is kept": ((2, 1, 1), (DISPATCH, COMBINE, DISPATCH), WINDOW | PULL | RING),
    "refused by one, then another": (
        (1, 1, 1),
        (Call(refused_by=BY_1), Call("cached", refused_by=BY_2), Call()),
        WINDOW,
    ),
    "one rank without windows": (
        (0, 1, 1),
        (Call(), Call("combine"), Call(refused_by=BY_1)),
        WINDOW | PULL | RING,
    ),
    "pairs without rows": (
        (0, 1, 1),
        (Call(silent=SPARSE), Call("combine", silent=SPARSE), Call()),
        WINDOW | PULL | RING,
    ),
    "full rings": (
        (1, 1, 0),
        (Call(num_rows=2, ring_rows=1), Call("combine", ring_rows=1)),
        WINDOW | PULL | RING,
    ),
    "no windows": ((0, 0, 0), (Call(), Call("combine", ring_rows=1)), RING),
}


SLOW = ("any result is kept", "one rank without windows", "full rings", "no windows")


@pytest.mark.parametrize(
    ("num_blocks", "calls", "moves"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, case in THREE_RANKS.items()
    ],
)
def test_three_ranks(num_blocks: tuple[int, ...], calls: tuple[Call, ...], moves: set[str]) -> None:
    assert actions(assert_right(Protocol(num_blocks, calls))) == NOTIFY | moves


# Each rule is needed: without it, a program that was right goes wrong, and in the way that is expected.


HOLES = {
    "combine returns before x is pulled": Hole(
        Rules(exit_ack=False), "pull", Protocol((1, 1), (Call(), Call("combine")))
    ),
    "combine returns before a staged x is pulled": Hole(
        Rules(exit_ack=False), "pull", Protocol((1, 1), (Call("combine"), Call("combine")))
    ),
    "cached dispatch without a notify message, into windows": Hole(
        Rules(notify_for_cached=False), "block", Protocol((1, 1), (Call(), Call("cached")))
    ),
    "cached dispatch without a notify message, into rings": Hole(
        Rules(notify_for_cached=False),
        "ring",
        Protocol((0, 0), (Call(num_rows=2, ring_rows=1), Call("cached"))),
    ),
    "a rank that refuses twice runs ahead": Hole(
        Rules(await_previous_notify=False),
        "notify message",
        Protocol((1, 1), (Call(refused_by=BY_1), Call(refused_by=BY_1), Call())),
    ),
    "one mailbox, refused call": Hole(
        Rules(num_mailboxes=1), "notify message", Protocol((1, 1), (Call(refused_by=BY_1), Call()))
    ),
    "one mailbox, no rows to wait for": Hole(
        Rules(num_mailboxes=1), "notify message", Protocol((1, 1), (ONE_WAY, Call()))
    ),
    "rows move before a refusal is read": Hole(
        Rules(all_notify_first=False), "block", Protocol((1, 1, 1), (Call(refused_by=BY_2), Call()))
    ),
    "x is pulled before a refusal is read": Hole(
        Rules(all_notify_first=False), "pull", Protocol((1, 1, 1), (Call("combine", refused_by=BY_2),))
    ),
    "a refusal overtakes the call before it": Hole(
        Rules(notify_in_order=False),
        "notify message",
        Protocol((1, 1), (ONE_WAY, Call(refused_by=BY_1), Call())),
    ),
    "number before notify message": Hole(
        Rules(flag_before="notify message"), "notify message", Protocol((1, 1), (Call(),))
    ),
    "arrived before rows": Hole(Rules(flag_before="write"), "rows", Protocol((1, 1), (Call(),))),
    "pulled before pull": Hole(Rules(flag_before="pull"), "pull", Protocol((1, 1), (Call("combine"),))),
    "tail before row": Hole(Rules(flag_before="put"), "rows", Protocol((0, 0), (Call(),))),
    "head before row is taken": Hole(
        Rules(flag_before="take"), "ring", Protocol((0, 0), (Call(num_rows=2, ring_rows=1),))
    ),
    "no look at the room in a ring": Hole(
        Rules(ring_has_room=False), "ring", Protocol((0, 0), (Call(num_rows=2, ring_rows=1),))
    ),
    "send everything, then receive": Hole(
        Rules(both_at_once=False), DEADLOCK, Protocol((0, 0), (Call(num_rows=2, ring_rows=1),))
    ),
    "push everything, then receive": Hole(
        Rules(both_at_once=False), DEADLOCK, Protocol((0, 0), (Call("combine", num_rows=2, ring_rows=1),))
    ),
}


def test_with_all_rules_it_is_right() -> None:
    assert_right(*models_of(HOLES.values()))


@pytest.mark.parametrize("hole", HOLES.values(), ids=HOLES)
def test_without_this_rule_it_fails(hole: Hole) -> None:
    assert_needed(hole)


def test_no_rule_is_left_without_a_hole() -> None:
    assert_no_rule_without_a_hole(HOLES.values())
