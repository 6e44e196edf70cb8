"""The low-latency protocol, checked in every interleaving; and each of its rules is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

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
from tests.model.low_latency import Call, LowLatency, Rules, Step

BY_0, BY_1, BY_2 = (frozenset({rank}) for rank in range(3))
CLEAN = Call(is_clean=True)
KINDS = (
    Call(),
    Call(),
    CLEAN,
    Call(refused_by=BY_0),
    Call(refused_by=BY_1),
    Call(disagreed_by=BY_1),
    Call(refused_by=BY_1, is_clean=True),
)
ACTIONS = {"fill", "send", "receive", "return from", "raise from"}
SLOW_1, SLOW_2 = frozenset({(0, 1)}), frozenset({(0, 2)})


def params(models: dict[str, LowLatency], slow: set[str]) -> list[Any]:
    """For `parametrize`: those that take seconds are for `make test-all`."""
    return [
        pytest.param(model, id=name, marks=[pytest.mark.slow] if name in slow else [])
        for name, model in models.items()
    ]


def orders(num_calls: int, at_once: frozenset[int] = frozenset()) -> Iterator[str]:
    """Every order of sends and receives with at most two calls in flight; those `at_once` have no hook.

    `orders(2)`: "s1 r1 s2 r2", "s1 s2 r1 r2" and "s1 s2 r2 r1".
    """

    def extend(done: tuple[str, ...], num_sent: int, in_flight: tuple[int, ...]) -> Iterator[str]:
        if num_sent == num_calls and not in_flight:
            yield " ".join(done)
        must = [call for call in in_flight if call in at_once]
        for call in must or in_flight:
            others = tuple(other for other in in_flight if other != call)
            yield from extend((*done, f"r{call}"), num_sent, others)
        call = num_sent + 1
        # Its set was used by the call two before.
        if not must and num_sent < num_calls and call - 2 not in in_flight:
            yield from extend((*done, f"s{call}"), call, (*in_flight, call))

    return extend((), 0, ())


# No rank is masked: the calls, their hooks, refusals, cleans and filled send areas.


def test_two_ranks_every_order_of_four_calls() -> None:
    assert list(orders(2)) == ["s1 r1 s2 r2", "s1 s2 r1 r2", "s1 s2 r2 r1"]
    programs = list(orders(4))
    print(f"{len(programs)} orders")
    assert_right(*(LowLatency(pair) for pair in product(programs, repeat=2)))


def some_models(num_ranks: int, num_calls: int, num_models: int, is_fine: bool = False) -> list[LowLatency]:
    """Calls of any kind, in any order of hooks, another one at each rank; some send areas are filled."""
    random = Random(num_ranks)
    models = []
    for _ in range(num_models):
        calls = dict(enumerate(random.choices(KINDS, k=num_calls), 1))
        cleans = frozenset(number for number, call in calls.items() if call.is_clean)
        programs = random.choices(list(orders(num_calls, cleans)), k=num_ranks)
        for number in calls.keys() - cleans:
            if random.random() < 0.3:
                programs = [program.replace(f"s{number}", f"f{number} s{number}") for program in programs]
        models.append(LowLatency(tuple(programs), calls, is_fine=is_fine))
    return models


def test_two_ranks_some_programs_of_five_calls() -> None:
    assert actions(assert_right(*some_models(2, 5, 150))) == ACTIONS


def test_three_ranks_some_programs_of_four_calls() -> None:
    assert actions(assert_right(*some_models(3, 4, 50))) == ACTIONS


def test_all_ranks_raise_from_a_call_that_one_refuses_and_later_calls_work() -> None:
    for bad in (Call(refused_by=BY_1), Call(disagreed_by=BY_1)):
        steps = assert_right(LowLatency(("s1 s2 r1 s3 r2 r3",) * 3, {1: bad}))
        for rank in range(3):
            assert Step(rank, "return from", 1) not in steps
            # Who refuses raises from the send.
            assert (Step(rank, "raise from", 1) in steps) == (rank not in bad.refused_by)
            assert {Step(rank, "return from", 2), Step(rank, "return from", 3)} <= steps


def test_a_third_call_before_the_first_is_received_fails_and_harms_nobody() -> None:
    steps = assert_right(LowLatency(("s1 s2 s3 r1 s3 r2 s4 r4 r3",) * 2))
    assert {Step(rank, "return from", call) for rank in range(2) for call in (1, 2, 3, 4)} <= steps


@pytest.mark.slow
def test_nothing_is_lost_by_merging() -> None:
    """The same with a step for each peer and each part."""
    assert_right(
        *some_models(2, 5, 30, is_fine=True),
        LowLatency(("s1 s2 r2 r1",) * 3, is_fine=True),
        LowLatency(("s1 s2 r1 s3 r2 r3",) * 2, slow=SLOW_1, may_die=BY_0, is_fine=True),
        LowLatency(("s1 r1",) * 3, slow=SLOW_2, may_die=BY_0, is_fine=True),
        LowLatency(("s1 r1 u1 s2 r2",) * 2, slow=SLOW_1, num_slow=2, may_die=BY_1, is_fine=True),
        LowLatency(("s1 r1 u2",) * 3, slow=SLOW_2, is_fine=True),
    )


# Ranks die, or are found slow.

THREE = "s1 r1 s2 r2 s3 r3"
HOOKS = "s1 s2 r1 s3 r2 r3"
MASKS = {
    "two of three die": LowLatency((THREE,) * 3, may_die=BY_1 | BY_2),
    "one dies, hooks": LowLatency((HOOKS, HOOKS, "s1 s2 r2 r1 s3 r3"), may_die=BY_2),
    "who refuses dies": LowLatency((HOOKS,) * 3, {2: Call(refused_by=BY_2)}, may_die=BY_2),
    "one is slow": LowLatency((THREE,) * 3, slow=SLOW_2),
    "one is slow, hooks": LowLatency((HOOKS,) * 3, slow=SLOW_2),
    "one is slow, the sizes change": LowLatency((THREE,) * 3, {2: CLEAN}, slow=SLOW_2),
    "one is slow, who masks it dies": LowLatency(("s1 r1 s2 r2",) * 3, slow=SLOW_2, may_die=BY_0),
    "one is slow and dies, as does who masks it": LowLatency(
        ("s1 r1 s2 r2",) * 3, slow=SLOW_2, may_die=BY_0 | BY_2
    ),
    "two find each other slow": LowLatency((f"{HOOKS} s4 r4",) * 2, slow=frozenset({(0, 1), (1, 0)})),
    "each finds the next one slow": LowLatency(("s1 r1",) * 3, slow=frozenset({(0, 1), (1, 2), (2, 0)})),
}


SLOW_MASKS = {
    "one is slow, hooks",
    "one is slow, the sizes change",
    "one is slow, who masks it dies",
    "one is slow and dies, as does who masks it",
    "each finds the next one slow",
}


@pytest.mark.parametrize("model", params(MASKS, SLOW_MASKS))
def test_who_is_left_goes_on_with_the_same_masks(model: LowLatency) -> None:
    last = model.programs[0].split()[-1]
    assert Step(0, "return from", int(last[1:])) in assert_right(model)


# Masked ranks come back.

AHEAD = LowLatency(
    ("s1 r1 w2 u2 s3 r3", "s1 r1 w2 u2 s3 r3", "s1 s2 r1 u2 r2 s3 r3"), slow=SLOW_2, may_die=BY_2
)
"""The last rank has sent a call that the others do not make any more, and calls its hook when it is over."""
EARLY = LowLatency(
    ("s1 r1 w2 b0 u012 s3 r3", "s1 r1 w2 b0 u012 s3 r3", "s1 r1 w2 a2 b0 u012 s3 r3"), slow=SLOW_2
)
"""The last rank wants to come back before the others want it, and gives up before they take all back."""
ASKING = LowLatency(("s1 r1 w2 u012 s3 r3", "s1 r1 w2 u012 s3 r3", "s1 r1 w2 a2 u012 s3 r3"), slow=SLOW_2)
"""The same, but nobody waits until it has given up."""
TWO_ROUNDS = LowLatency(("s1 r1 u1 u2 s3 r3", "u1 u2 s3 r3", "u1 u2 s3 r3"), slow=frozenset({(0, 1), (0, 2)}))
TWICE = LowLatency(("s1 r1 u1 u1 s3 r3",) * 2, slow=SLOW_1)
ROUNDS = {
    "nobody is masked": LowLatency(("s1 s2 r1 r2 u012 s3 s4 r4 r3",) * 3),
    "once": LowLatency(("s1 r1 s2 r2 u1 s3 s4 r3 r4",) * 2, slow=SLOW_1),
    "twice in a row": TWICE,
    "and again": LowLatency(("s1 r1 u1 s2 r2 u1 s3 r3",) * 2, slow=SLOW_1, num_slow=2),
    "both": LowLatency(("s1 r1 u01 s3 r3",) * 2, slow=frozenset({(0, 1), (1, 0)}), num_slow=2),
    "of three": LowLatency(("s1 r1 u2 s3 r3",) * 3, slow=SLOW_2),
    "whoever is masked": LowLatency(("s1 r1 u012 s3 r3",) * 3, slow=frozenset({(0, 2), (1, 2)})),
    "who was ahead": replace(AHEAD, may_die=frozenset()),
    "who was ahead and may die": AHEAD,
    "who missed a clean": LowLatency(("s1 r1 s2 r2 u2 s3 r3",) * 3, {2: CLEAN}, slow=SLOW_2),
    "who asked too early": EARLY,
    "who asks alone": ASKING,
    "who asks and asks again": LowLatency(
        ("s1 r1 u2 s3 r3", "s1 r1 u2 s3 r3", "a2 a2 u2 s3 r3"), slow=SLOW_2, num_slow=2
    ),
    "two, one after the other": TWO_ROUNDS,
    "two at once": LowLatency(
        ("s1 r1 u12 s3 r3", "u12 s3 r3", "u12 s3 r3"), slow=frozenset({(0, 1), (0, 2)})
    ),
    "who masked it dies": LowLatency(("s1 r1 u2 s3",) * 3, slow=SLOW_2, may_die=BY_0),
    "slow in the round, too": LowLatency(
        ("s1 r1 u2 s3 r3", "s1 r1 u2 s3 r3", "u2 s3 r3"), slow=SLOW_2, num_slow=2
    ),
}


SLOW_ROUNDS = {
    "whoever is masked",
    "who was ahead and may die",
    "who missed a clean",
    "who asks and asks again",
    "two, one after the other",
    "two at once",
    "who masked it dies",
    "slow in the round, too",
}


@pytest.mark.parametrize("model", params(ROUNDS, SLOW_ROUNDS))
def test_a_masked_rank_comes_back(model: LowLatency) -> None:
    steps = assert_right(model)
    for rank, program in enumerate(model.programs):
        assert any(step[:2] == (rank, "join") for step in steps)
        assert Step(rank, "send", 3) in steps
        assert (Step(rank, "return from", 3) in steps) == ("r3" in program)


def test_after_a_round_all_take_rows_from_all() -> None:
    """Rank 1 makes no call before the round, so call 2 needs it: without the round, rank 0 waits for ever."""
    steps = assert_right(LowLatency(("s1 r1 u1 s2 r2", "u1 s2 r2"), slow=SLOW_1, is_fine=True))
    assert {Step(0, "pull", 2, 1), Step(1, "pull", 2, 0)} <= steps
    assert not {Step(0, "pull", 1, 1), Step(1, "pull", 1, 0)} & steps


# Each rule is needed: without it, what was right goes wrong, and in the way that is expected.


HOLES = {
    "no wait for acknowledgements": Hole(
        Rules(await_acks=False), "completion record", LowLatency((HOOKS,) * 2)
    ),
    "a rank that refuses three times runs ahead": Hole(
        Rules(await_acks=False),
        "completion record",
        LowLatency((THREE,) * 2, {call: Call(refused_by=BY_1) for call in (1, 2, 3)}),
    ),
    "the send area is handed out too early": Hole(
        Rules(fill_awaits_acks=False), "rows", LowLatency(("s1 s2 r1 f3 s3 r2 r3",) * 2)
    ),
    "one set": Hole(Rules(num_sets=1), "completion record", LowLatency(("s1 s2 r1 r2",) * 2)),
    "one set, no hooks": Hole(Rules(num_sets=1), "completion record", LowLatency(("s1 r1 s2 r2",) * 2)),
    "acknowledged before rows are read": Hole(
        Rules(ack_after_pull=False), "list", LowLatency((HOOKS,) * 2, is_fine=True)
    ),
    "arrived before the completion record": Hole(
        Rules(flag_last=False), "completion record", LowLatency(("s1 r1",) * 2, is_fine=True)
    ),
    "a refused call is not acknowledged": Hole(
        Rules(refusal_acks=False), DEADLOCK, LowLatency((THREE,) * 2, {1: Call(refused_by=BY_1)})
    ),
    "three calls in flight": Hole(
        Rules(refuse_third=False), DEADLOCK, LowLatency(("s1 s2 s3 r1 r2 r3",) * 2)
    ),
    "a third call in flight takes a number": Hole(
        Rules(third_takes_number=True), DEADLOCK, LowLatency(("s1 s2 s3 r1 r2 s4 r4 s5 r5",) * 2)
    ),
    "each rank cleans for itself": Hole(
        Rules(clean_takes_number=False), "rows", LowLatency((THREE,) * 2, {2: CLEAN})
    ),
    "a masked rank writes lists to the places before a clean": Hole(
        Rules(lists_stay=False), "list", LowLatency((THREE, THREE, "s1 r1"), {2: CLEAN}, slow=SLOW_2)
    ),
    "no look while waiting": Hole(
        Rules(look_while_waiting=False), DEADLOCK, LowLatency((THREE,) * 2, slow=SLOW_1)
    ),
    "no look after rows are read": Hole(
        Rules(look_last=False), "rows", LowLatency((THREE,) * 2, slow=SLOW_1)
    ),
    "sent to a peer that has not acknowledged": Hole(
        Rules(mask_silent=False), "completion record", LowLatency((HOOKS,) * 2, slow=SLOW_1)
    ),
    "a mask is told to nobody": Hole(Rules(tell="nobody"), "rows", LowLatency((THREE,) * 2, slow=SLOW_1)),
    "a mask is told to its subject alone": Hole(
        Rules(tell="subject"), "masks", LowLatency(("s1 r1", "s1", "s1 r1"), slow=SLOW_2)
    ),
    "a mask is told when rows are written": Hole(
        Rules(tell_first=False), "rows", LowLatency((THREE,) * 2, slow=SLOW_1)
    ),
    "a third rank has the mask before its subject has": Hole(
        Rules(pass_on=False), "rows", LowLatency((THREE,) * 3, slow=SLOW_2)
    ),
    "who masks dies before all know": Hole(
        Rules(pass_on=False), DEADLOCK, LowLatency(("s1 r1",) * 3, slow=SLOW_2, may_die=BY_0)
    ),
    "no round for who sees nobody masked": Hole(
        Rules(always_a_round=False), DEADLOCK, LowLatency(("s1 r1 u2 s3 r3",) * 3, slow=SLOW_2)
    ),
    "a round ends when who comes back dies": Hole(
        Rules(whole_round=False),
        "completion record",
        LowLatency(("s1 s2 r1 r2 u2 s3", "s1 s2 r1 r2 u2 s3", "s1 s2 u2"), may_die=BY_2),
    ),
    "one request at a time": Hole(Rules(num_requests=1), DEADLOCK, TWO_ROUNDS),
    "a masked rank joins the round of another": Hole(Rules(named_round=False), "verdict", TWO_ROUNDS),
    "a masked rank skips the round that took it back": Hole(
        Rules(stay_where_taken_back=False), "verdict", TWICE
    ),
    "the request of who gave up lies there": Hole(Rules(ignore_other_requests=False), "verdict", EARLY),
    "a masked rank knows better whom to unmask": Hole(Rules(follow=False), "verdict", ASKING),
    "masks of before": Hole(Rules(take_masks=False), DEADLOCK, TWO_ROUNDS),
    "places of before": Hole(
        Rules(take_places=False),
        "verdict",
        LowLatency(("s1 r1 s2 r2 u1 s3 r3",) * 2, {2: CLEAN}, slow=SLOW_1),
    ),
    "numbers of before": Hole(
        Rules(align="nobody"), "completion record", LowLatency(("s1 r1 u1 s3 r3",) * 2, slow=SLOW_1)
    ),
    "the highest number, that of one who dies": Hole(Rules(align="highest"), DEADLOCK, AHEAD),
    "acknowledgements of before": Hole(
        Rules(forget_acks=False), DEADLOCK, LowLatency(("s1 r1 u1 s3 r3",) * 2, slow=SLOW_1)
    ),
    "hooks of before": Hole(
        Rules(forget_hooks=False),
        DEADLOCK,
        LowLatency(("s1 r1 w1 u1 s3 r3", "s1 s2 r1 u1 r2 s3 r3"), slow=SLOW_1),
    ),
}


@pytest.mark.parametrize(
    "model", models_of(HOLES.values(), ROUNDS.values()), ids=lambda model: " | ".join(model.programs)
)
def test_with_all_rules_it_is_right(model: LowLatency) -> None:
    assert_right(model)


@pytest.mark.parametrize("hole", HOLES.values(), ids=HOLES)
def test_without_this_rule_it_fails(hole: Hole) -> None:
    assert_needed(hole)


def test_no_rule_is_left_without_a_hole() -> None:
    assert_no_rule_without_a_hole(HOLES.values())
