"""Deadlines that pass at the same time, as atomic steps that `explorer.explore` interleaves.

    explore(Deadlines())

is two ranks that wait in a low-latency call for a third one, which wants a round with them that nobody else
wants: all wait, and the deadlines of all have passed. The third rank is silent, so one of the others masks
it. It must not mask them: they came in time, and are late only because of it. `Rules` switches single rules
off, to see that each is needed.

A rank's status names the rank that it waits for. What callers (the first ranks) and the last rank do:

    give up   look, and unless this rank is masked itself: mask the last rank, and tell everyone
    look      take over the masks that are told, and tell everyone
    tell      one mask to one peer
    go on     with the call, and the next ones: the status changes
    judge     the last rank reads the status of its peers: who waits for it is not late
    decide    look, and unless this rank is masked: mask those that it has found late

`tests.model.low_latency` has all else about masks. There a rank may give up on a slow one at any time; here
time counts: a deadline has passed when all ranks have done what they could do without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tests.model.explorer import Violation

WAITS, JUDGED, LOOKED, OVER = range(4)


@dataclass(frozen=True)
class Rules:
    spare_who_waits: bool = True
    """In a round, who waits for this rank is not late."""
    look_last: bool = True
    """A rank looks whether it is masked after it has judged its peers; else before."""
    tell_first: bool = True
    """Who masks a rank, or takes a mask over, tells everyone before its own status changes."""
    pass_on: bool = True
    """Who takes over a mask tells it as well."""


class Rank(NamedTuple):
    phase: int = WAITS
    known: frozenset[int] = frozenset()
    """Who is masked."""
    told: frozenset[int] = frozenset()
    """Masks that peers have written into this rank's memory."""
    untold: frozenset[tuple[int, int]] = frozenset()
    """(subject, peer): masks to tell."""
    late: frozenset[int] = frozenset()
    """The ranks that this rank has found late."""


State: TypeAlias = tuple[Rank, ...]


class Step(NamedTuple):
    rank: int
    action: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.action}"


@dataclass(frozen=True)
class Deadlines:
    num_callers: int = 2
    rules: Rules = Rules()

    @property
    def last(self) -> int:
        return self.num_callers

    def start(self) -> State:
        return (Rank(),) * (self.num_callers + 1)

    def is_finished(self, state: State) -> bool:
        return all(rank.phase == OVER for rank in state)

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        for me, rank in enumerate(state):
            for action, changed in self._steps_of(me, rank, state):
                after = {**dict(enumerate(state)), **changed}
                masked = frozenset[int]().union(*(other.known for other in after.values())) - {self.last}
                if masked:
                    raise Violation("masks", f"{Step(me, action)}: masked {set(masked)}, which came in time")
                yield Step(me, action), tuple(after.values())

    def _steps_of(self, me: int, rank: Rank, state: State) -> Iterator[tuple[str, dict[int, Rank]]]:
        """What a rank can do, and the ranks that it changes."""
        for subject, peer in rank.untold:
            heard = state[peer]._replace(told=state[peer].told | {subject})
            done = rank._replace(untold=rank.untold - {(subject, peer)})
            yield f"tell rank {peer} about {subject}", {me: done, peer: heard}
        if rank.phase == OVER or (rank.untold and self.rules.tell_first):
            return
        looked = self._look(me, rank)
        if me == self.last:
            action, after = self._step_of_last(rank, looked, state)
            yield action, {me: after}
        elif self.last in rank.known:
            yield "go on", {me: rank._replace(phase=OVER)}
        else:
            if looked != rank:
                yield "look", {me: looked}
            yield "give up", {me: self._mask(me, looked, frozenset({self.last}))}

    def _step_of_last(self, rank: Rank, looked: Rank, state: State) -> tuple[str, Rank]:
        late = frozenset(
            peer
            for peer in range(self.num_callers)
            if state[peer].phase == OVER or not self.rules.spare_who_waits
        )
        is_masked = self.last in looked.known
        if rank.phase == WAITS and is_masked:
            return "find itself masked", looked._replace(phase=OVER)
        if rank.phase == WAITS and self.rules.look_last:
            return "judge", rank._replace(phase=JUDGED, late=late)
        if rank.phase == WAITS:
            return "look", looked._replace(phase=LOOKED)
        if rank.phase == LOOKED:
            return "judge and decide", self._mask(self.last, rank, late)._replace(phase=WAITS)
        if is_masked:
            return "decide", looked._replace(phase=OVER)
        # A deadline later it does so again, unless it has heard of its mask.
        return "decide", self._mask(self.last, looked, rank.late)._replace(phase=WAITS, late=frozenset())

    def _look(self, me: int, rank: Rank) -> Rank:
        news = rank.told - rank.known
        if not news:
            return rank
        known = rank._replace(known=rank.known | news)
        return self._to_tell(me, known, news) if self.rules.pass_on else known

    def _mask(self, me: int, rank: Rank, subjects: frozenset[int]) -> Rank:
        news = subjects - rank.known
        return self._to_tell(me, rank._replace(known=rank.known | news), news)

    def _to_tell(self, me: int, rank: Rank, subjects: frozenset[int]) -> Rank:
        peers = [peer for peer in range(self.num_callers + 1) if peer != me]
        return rank._replace(untold=rank.untold | {(subject, peer) for subject in subjects for peer in peers})
