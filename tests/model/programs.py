"""GPU programs that serve the channels of one call, as atomic steps that `explorer.explore` interleaves.

    explore(RingCall(tokens, (ascending(4, 1), ascending(4, 3))))

is a dispatch of two ranks through four channels: the first rank has one program that sends and one that
receives, the second rank three of each. A program serves its channels one after the other, and begins the
next one when all rows of the last one have passed. All programs are resident; what they do in a channel is
what the kernels do (`anyep/backends/cuda/kernels/rings.py`):

    dispatch    the sender of a channel takes its tokens in order, and waits until all receivers of the next
                one have room; the receiver takes whatever has come, from any rank
    combine     the sender pushes rows to any rank that has room; the receiver takes its tokens in order, and
                waits until the rows of the next one have come from all ranks

`tests.model.protocol` has the rest of a call: notify messages, windows, and that no row is written over
another. Here a row is a number: the state is how many have passed each ring. These numbers only grow, and a
step that is possible remains so until it is taken.

Why no deadlock is possible, whatever number of programs each rank has, if all programs serve their channels
in ascending order: let c be the lowest channel that is not finished on all ranks. Every program that serves c
is finished with its channels below c, so c has all its senders and receivers at work, as if each channel had
programs of its own; and the channels of that case do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

SEND, RECEIVE = SIDES = range(2)


class Job(NamedTuple):
    """One side of a channel: what a program has to finish before it begins its next job."""

    side: int
    channel: int


class Step(NamedTuple):
    rank: int
    job: Job
    peer: int | None
    """None: a token's rows, those of all ranks that it concerns."""

    def __str__(self) -> str:
        peer = "a token" if self.peer is None else f"a row of peer {self.peer}"
        return f"rank {self.rank}, channel {self.job.channel}: {('send', 'receive')[self.job.side]} {peer}"


Program: TypeAlias = tuple[Job, ...]
Tokens: TypeAlias = tuple[tuple[tuple[frozenset[int], ...], ...], ...]
"""[rank][channel][token]: the ranks that the token has rows at."""
State: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""How many tokens are done, by rank and channel; how many rows are, by rank, channel and peer."""


def ascending(num_channels: int, num_senders: int, num_receivers: int | None = None) -> tuple[Program, ...]:
    """A rank's programs as they are: each takes every n-th channel.

    `ascending(3, 2)` has senders of the channels 0 and 2, and 1, and receivers likewise.
    """
    counts = (num_senders, num_senders if num_receivers is None else num_receivers)
    return tuple(
        tuple(Job(side, channel) for channel in range(first, num_channels, counts[side]))
        for side in SIDES
        for first in range(counts[side])
    )


@dataclass(frozen=True)
class RingCall:
    tokens: Tokens
    programs: tuple[tuple[Program, ...], ...]
    """Of each rank."""
    kind: Literal["dispatch", "combine"] = "dispatch"
    ring_rows: int = 1

    def start(self) -> State:
        num_counts = self.num_ranks * self.num_channels
        return (0,) * num_counts, (0,) * (num_counts * self.num_ranks)

    def is_finished(self, state: State) -> bool:
        jobs = [(rank, Job(side, channel)) for rank, side, channel in self._all_jobs]
        return all(self._is_done(rank, job, state) for rank, job in jobs)

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        for rank, programs in enumerate(self.programs):
            for program in programs:
                job = next((job for job in program if not self._is_done(rank, job, state)), None)
                if job is not None:
                    yield from self._steps_of(rank, job, state)

    def _steps_of(self, rank: int, job: Job, state: State) -> Iterator[tuple[Step, State]]:
        done, moved = state
        channel = job.channel
        if job.side == self._side_in_order:
            at = self._at(rank, channel)
            ranks = self.tokens[rank][channel][done[at]]
            if all(self._may_pass(rank, channel, peer, job.side, state) for peer in ranks):
                yield Step(rank, job, None), (_plus_1(done, at), moved)
            return
        for peer in range(self.num_ranks):
            at = self._at(rank, channel, peer)
            if moved[at] < self._total(peer, channel, rank) and self._may_pass(
                peer, channel, rank, job.side, state
            ):
                yield Step(rank, job, peer), (done, _plus_1(moved, at))

    def _may_pass(self, owner: int, channel: int, other: int, side: int, state: State) -> bool:
        """Whether the ring between the owner of tokens and another rank has room, or a row."""
        in_order = self._rows[owner, channel, other][state[0][self._at(owner, channel)]]
        at_will = state[1][self._at(other, channel, owner)]
        tail, head = (in_order, at_will) if self._side_in_order == SEND else (at_will, in_order)
        return tail - head < self.ring_rows if side == SEND else tail > head

    def _is_done(self, rank: int, job: Job, state: State) -> bool:
        done, moved = state
        if job.side == self._side_in_order:
            return done[self._at(rank, job.channel)] == len(self.tokens[rank][job.channel])
        return all(
            moved[self._at(rank, job.channel, peer)] == self._total(peer, job.channel, rank)
            for peer in range(self.num_ranks)
        )

    # Small questions.

    @cached_property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @cached_property
    def num_channels(self) -> int:
        return len(self.tokens[0])

    @cached_property
    def _side_in_order(self) -> int:
        """The side that goes by tokens."""
        return SEND if self.kind == "dispatch" else RECEIVE

    @cached_property
    def _all_jobs(self) -> list[tuple[int, int, int]]:
        return [
            (rank, side, channel)
            for rank in range(self.num_ranks)
            for side in SIDES
            for channel in range(self.num_channels)
        ]

    @cached_property
    def _rows(self) -> dict[tuple[int, int, int], tuple[int, ...]]:
        """The rows that the owner's first tokens of a channel have at another rank, by their number."""
        return {
            (owner, channel, other): tuple(accumulate((other in ranks for ranks in tokens), initial=0))
            for owner, channels in enumerate(self.tokens)
            for channel, tokens in enumerate(channels)
            for other in range(self.num_ranks)
        }

    def _total(self, owner: int, channel: int, other: int) -> int:
        return self._rows[owner, channel, other][-1]

    def _at(self, rank: int, channel: int, peer: int | None = None) -> int:
        index = rank * self.num_channels + channel
        return index if peer is None else index * self.num_ranks + peer


def _plus_1(counts: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*counts[:index], counts[index] + 1, *counts[index + 1 :])
