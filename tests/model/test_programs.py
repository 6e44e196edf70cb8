"""Fewer GPU programs than channels, checked in every interleaving: no deadlock if channels are ascending."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Literal

import pytest

from tests.model.explorer import DEADLOCK, explore
from tests.model.programs import RECEIVE, SEND, Job, Program, RingCall, Tokens, ascending

Kind = Literal["dispatch", "combine"]
KINDS: tuple[Kind, ...] = ("dispatch", "combine")
ALL = frozenset({0, 1})


def all_to_all(num_channels: int, num_tokens: int) -> Tokens:
    """Every token of two ranks has a row at both."""
    return (((ALL,) * num_tokens,) * num_channels,) * 2


def random_tokens(random: Random, num_ranks: int, num_channels: int, most_tokens: int) -> Tokens:
    return tuple(
        tuple(
            tuple(
                frozenset(rank for rank in range(num_ranks) if random.random() < 0.6)
                for _ in range(random.randint(0, most_tokens))
            )
            for _ in range(num_channels)
        )
        for _ in range(num_ranks)
    )


def assert_finishes(call: RingCall) -> None:
    exploration = explore(call)
    assert exploration.problem is None, f"{call}\n{exploration.problem}"


FEW = ((1, 1), (1, 2), (3, 1))
MANY = pytest.param((*FEW, (2, 2), (3, 3)), marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [FEW, MANY])
def test_any_number_of_programs(kind: Kind, counts: tuple[tuple[int, int], ...]) -> None:
    """Each rank has its own number of senders, and of receivers; rings hold one row."""
    num_channels = 3
    for of_rank_0, of_rank_1 in product(counts, repeat=2):
        programs = (ascending(num_channels, *of_rank_0), ascending(num_channels, *of_rank_1))
        assert_finishes(RingCall(all_to_all(num_channels, 1), programs, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ring_rows", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_more_rows_than_a_ring_holds(kind: Kind, ring_rows: int) -> None:
    for num_programs in product((1, 2), repeat=2):
        programs = tuple(ascending(2, number) for number in num_programs)
        assert_finishes(RingCall(all_to_all(2, 2), programs, kind, ring_rows))


@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks_with_few_rows(kind: Kind) -> None:
    """One program that sends and one that receives, on all ranks or not; some tokens go nowhere."""
    random = Random(3)
    for num_programs in [(1, 1, 1), (1, 2, 1), (2, 1, 3)]:
        for _ in range(5):
            programs = tuple(ascending(3, number) for number in num_programs)
            assert_finishes(RingCall(random_tokens(random, 3, 3, 1), programs, kind))


def test_every_channel_has_one_program_per_side() -> None:
    for num_channels, num_programs in product(range(1, 8), range(1, 10)):
        jobs = [job for program in ascending(num_channels, num_programs) for job in program]
        assert sorted(jobs) == [
            Job(side, channel) for side in (SEND, RECEIVE) for channel in range(num_channels)
        ]
    assert ascending(3, 2)[:2] == ((Job(SEND, 0), Job(SEND, 2)), (Job(SEND, 1),))


# What is needed: take it away, and ranks wait for each other.


def in_order(*channels: int) -> tuple[Program, ...]:
    """One program that sends and one that receives, in an order of their own."""
    return tuple(tuple(Job(side, channel) for channel in channels) for side in (SEND, RECEIVE))


WRONG: dict[str, tuple[tuple[Program, ...], tuple[Program, ...]]] = {
    "rotated by the rank": (in_order(0, 1), in_order(1, 0)),
    "rotated by the rank, three channels": (in_order(0, 1, 2), in_order(1, 2, 0)),
    "descending on one rank": (in_order(0, 1, 2), in_order(2, 1, 0)),
    "receivers in another order than senders": (
        (in_order(0, 1)[0], in_order(1, 0)[1]),
        (in_order(0, 1)[0], in_order(1, 0)[1]),
    ),
    "one program for both sides": (
        ((Job(SEND, 0), Job(RECEIVE, 0), Job(SEND, 1), Job(RECEIVE, 1)),),
        ((Job(SEND, 0), Job(RECEIVE, 0), Job(SEND, 1), Job(RECEIVE, 1)),),
    ),
    # More programs than fit: one begins when another one has ended.
    "receivers that begin when senders end": (
        ((Job(SEND, 0), Job(RECEIVE, 0)), (Job(SEND, 1), Job(RECEIVE, 1))),
        ((Job(SEND, 0), Job(RECEIVE, 0)), (Job(SEND, 1), Job(RECEIVE, 1))),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRONG)
def test_another_order_can_deadlock(name: str, kind: Kind) -> None:
    programs = WRONG[name]
    num_channels = 1 + max(job.channel for program in programs[0] for job in program)
    tokens = all_to_all(num_channels, 2)
    problem = explore(RingCall(tokens, programs, kind)).problem
    assert problem is not None
    assert problem.kind == DEADLOCK
    print(problem)
    # Where rings hold all rows of a channel, senders never wait, and any order is right.
    assert_finishes(RingCall(tokens, programs, kind, ring_rows=2))
