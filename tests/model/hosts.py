"""Low-latency calls between hosts, with masks, as atomic steps that `explorer.explore` interleaves.

    explore(Hosts((3, 3), slow=frozenset({1})))

is two hosts of one rank each that make three calls; rank 0 may find rank 1 slow at any time. Ranks of one
host are those of `low_latency.py`. In a call every rank

    send      waits until all that it has not masked have acknowledged the call before the last one, and until
              nothing is under way to those that it has masked; writes its rows into the send set, and puts
              them to every rank that it has not masked
    receive   waits for the completion records, reads the rows that were put into its slots
    return    looks whether it is masked; acknowledges, and returns the rows
    clean     is a call without rows, after which the slots lie elsewhere; it raises where a rank is masked

    load      the bytes of a put are read, as they are now
    land      they are written into the slots; puts land in any order
    signal    the words of the oldest put to a rank are stored there: a completion record, an acknowledgement
              or a mask
    give up   a rank that waits masks one that it may find slow, and tells all others
    drop      a rank gives up what is under way to a rank that it has masked: nothing more arrives there
    request   in a round, which takes all ranks back: a rank waits until nothing that it has put is under
              way, and sends a request to all others; with those of all it goes on, with new numbers of calls

A rank that finds itself masked goes on to the next round, or stops. A rank stops, too, if its host is in the
minority: hosts of ranks that it has not masked are less than half of all, or half and without rank 0. A rank
of `may_die` may die at any time; what it has put may still arrive.

The invariants, by the kind of their violation:

    rows     the rows that a call returns are those that their sender wrote for this call
    layout   no put lands in slots that were laid out anew since
    split    no two groups of ranks that have no rank in common go on, each without the other

Every step advances a counter, so without a deadlock every rank ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.explorer import Violation
from tests.model.protocol import put

SEND, RECEIVE, RETURN, DONE, MASKED, CUT_OFF, REFUSED, DEAD, REQUEST, JOIN = range(10)
ENDS = (DONE, MASKED, CUT_OFF, REFUSED, DEAD)
ROWS, RECORD, ACK, MASK, ROUND = "rows", "record", "ack", "mask", "round"
CALLS_PER_ROUND = 100
NUM_SETS = 2


class Step(NamedTuple):
    rank: int
    action: str
    detail: int

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.action} {self.detail}"


@dataclass(frozen=True)
class Rules:
    puts_nothing_to_masked: bool = True
    waits_until_sent: bool = True
    """A send set is not written while it is still being put to a masked rank."""
    dropped_for_good: bool = True
    """Of what was dropped no completion record arrives, and nothing that was put later."""
    needs_majority: bool = True
    keeps_layout: bool = True
    """The slots do not move while a rank is masked."""
    idle_before_a_round: bool = True
    """A request is sent when nothing is under way."""


class Put(NamedTuple):
    kind: str
    value: int
    """The call, or the rank that is masked."""
    layout: int
    has_landed: bool
    content: int = 0
    """What was read, once it was."""


class Rank(NamedTuple):
    at: int = SEND
    call: int = 1
    masked: frozenset[int] = frozenset()
    layout: int = 0
    sets: tuple[int, int] = (0, 0)
    """The call whose rows lie in each send set."""
    slots: tuple[tuple[int, int], ...] = ()
    """By sender and set: the call whose rows lie there."""
    records: tuple[int, ...] = ()
    acks: tuple[int, ...] = ()
    """By rank: the last call."""
    heard: frozenset[int] = frozenset()
    """The ranks that are masked according to words that have arrived."""
    read: tuple[int, ...] = ()
    """The calls of the rows that were read."""
    round: int = 0
    requests: frozenset[int] = frozenset()
    """The ranks whose requests for the next round have arrived."""


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    wires: tuple[tuple[Put, ...], ...]
    """By sender * ranks + receiver: what was put and has not arrived, the oldest first."""
    dropped: frozenset[int]
    """Wires by which nothing arrives any more."""


@dataclass(frozen=True)
class Hosts:
    calls: tuple[int, ...] = (3, 3)
    """Of each rank."""
    slow: frozenset[int] = frozenset()
    """Those that others may find slow."""
    may_die: frozenset[int] = frozenset()
    cleans: frozenset[int] = frozenset()
    """The calls that move the slots."""
    calls_before: int = 0
    """After so many calls there is a round, and then so many calls as `calls` says."""
    rules: Rules = Rules()

    @property
    def num_ranks(self) -> int:
        return len(self.calls)

    def start(self) -> State:
        ranks = range(self.num_ranks)
        rank = Rank(slots=((0, 0),) * len(ranks), records=(0,) * len(ranks), acks=(0,) * len(ranks))
        return State((rank,) * len(ranks), ((),) * len(ranks) ** 2, frozenset())

    def is_finished(self, state: State) -> bool:
        return all(rank.at in ENDS for rank in state.ranks)

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        for rank, own in enumerate(state.ranks):
            if own.at in ENDS:
                continue
            if rank in self.may_die:
                yield Step(rank, "die", own.call), self._with(state, rank, own._replace(at=DEAD))
            if own.at == SEND:
                yield from self._send(state, rank, own)
            elif own.at == REQUEST:
                yield from self._request(state, rank, own)
            elif own.at == JOIN:
                if len(own.requests) == self.num_ranks - 1:
                    yield Step(rank, "join", own.round + 1), self._with(state, rank, self._joined(own))
            elif own.at == RECEIVE:
                yield from self._receive(state, rank, own)
            else:
                yield self._return(state, rank, own)
        for wire in range(len(state.wires)):
            yield from self._arrive(state, wire)

    def _others(self, rank: int) -> list[int]:
        return [other for other in range(self.num_ranks) if other != rank]

    def _open(self, rank: int, own: Rank) -> list[int]:
        return [other for other in self._others(rank) if other not in own.masked]

    def _with(self, state: State, rank: int, own: Rank) -> State:
        return state._replace(ranks=put(state.ranks, rank, own))

    def _put(self, state: State, rank: int, other: int, *puts: Put) -> State:
        wire = rank * self.num_ranks + other
        if wire in state.dropped:
            return state
        return state._replace(wires=put(state.wires, wire, state.wires[wire] + puts))

    # What a rank knows about masks

    def _adopt(self, state: State, rank: int, own: Rank, masked: frozenset[int]) -> State:
        """Take over masks and pass them on, or stop."""
        new = masked - own.masked
        if not new:
            return state
        known = own.masked | new
        left = self.num_ranks - len(known)
        is_cut_off = 2 * left < self.num_ranks or (2 * left == self.num_ranks and 0 in known)
        own = own._replace(masked=known)
        if rank in known:
            own = own._replace(at=REQUEST if self._has_round(own) else MASKED, read=())
        elif is_cut_off and self.rules.needs_majority:
            # Nobody is told what a minority thinks.
            return self._with(state, rank, own._replace(at=CUT_OFF))
        state = self._with(state, rank, own)
        for other in self._others(rank):
            words = (Put(MASK, each, 0, True) for each in sorted(new))
            state = self._put(state, rank, other, *words)
        return state

    def _waits(self, state: State, rank: int, own: Rank, awaited: list[int]) -> Iterator[tuple[Step, State]]:
        """What a rank may do that waits for others."""
        if own.heard - own.masked:
            yield Step(rank, "look", own.call), self._adopt(state, rank, own, own.heard)
            return
        for other in awaited:
            # One that has ended, or from which nothing arrives, is late in the end.
            is_gone = state.ranks[other].at in ENDS or other * self.num_ranks + rank in state.dropped
            if other in self.slow or is_gone:
                after = self._adopt(state, rank, own, frozenset({other}))
                yield Step(rank, "give up", other), after

    def _has_round(self, own: Rank) -> bool:
        return own.round == 0 and self.calls_before > 0

    def _request(self, state: State, rank: int, own: Rank) -> Iterator[tuple[Step, State]]:
        wires = [rank * self.num_ranks + other for other in self._others(rank)]
        is_idle = all(each.has_landed for wire in wires for each in state.wires[wire])
        if not is_idle and self.rules.idle_before_a_round:
            return
        after = self._with(state, rank, own._replace(at=JOIN))
        for other in self._others(rank):
            after = self._put(after, rank, other, Put(ROUND, rank, 0, True))
        yield Step(rank, "request", own.round + 1), after

    def _joined(self, own: Rank) -> Rank:
        nobody = frozenset[int]()
        number = own.round + 1
        return own._replace(
            at=SEND,
            call=number * CALLS_PER_ROUND + 1,
            masked=nobody,
            heard=nobody,
            requests=nobody,
            round=number,
        )

    # Calls

    def _send(self, state: State, rank: int, own: Rank) -> Iterator[tuple[Step, State]]:
        call, set_ = own.call, own.call % 2
        awaited = [other for other in self._open(rank, own) if own.acks[other] < call - 2]
        if call % CALLS_PER_ROUND <= NUM_SETS:
            awaited = []
        yield from self._waits(state, rank, own, awaited)
        if awaited:
            return
        if self.rules.waits_until_sent:
            for other in own.masked:
                wire = rank * self.num_ranks + other
                held = [each for each in state.wires[wire] if each.kind == ROWS and not each.has_landed]
                if wire not in state.dropped and any(each.value % 2 == set_ for each in held):
                    if self.rules.dropped_for_good:
                        wires = put(state.wires, wire, ())
                        after = state._replace(wires=wires, dropped=state.dropped | {wire})
                    else:
                        after = self._posted(state, rank, own)
                    yield Step(rank, "drop", other), after
                    return
        yield Step(rank, "send", call), self._posted(state, rank, own)

    def _posted(self, state: State, rank: int, own: Rank) -> State:
        call = own.call
        readers = self._open(rank, own) if self.rules.puts_nothing_to_masked else self._others(rank)
        if call in self.cleans:
            after = self._with(state, rank, own._replace(at=RECEIVE))
            for other in readers:
                after = self._put(after, rank, other, Put(RECORD, call, 0, True))
            return after
        after = self._with(state, rank, own._replace(at=RECEIVE, sets=put(own.sets, call % 2, call)))
        for other in readers:
            after = self._put(after, rank, other, Put(ROWS, call, own.layout, False))
        return after

    def _receive(self, state: State, rank: int, own: Rank) -> Iterator[tuple[Step, State]]:
        call, opened = own.call, self._open(rank, own)
        awaited = [other for other in opened if own.records[other] < call]
        yield from self._waits(state, rank, own, awaited)
        if not awaited:
            rows = () if call in self.cleans else tuple(own.slots[other][call % 2] for other in opened)
            yield Step(rank, "receive", call), self._with(state, rank, own._replace(at=RETURN, read=rows))

    def _return(self, state: State, rank: int, own: Rank) -> tuple[Step, State]:
        step = Step(rank, "return", own.call)
        if own.heard - own.masked:
            after = self._adopt(state, rank, own, own.heard)
            if after.ranks[rank].at != RETURN:
                return step, after
            state, own = after, after.ranks[rank]
        if any(call != own.call for call in own.read):
            raise Violation("rows", f"rank {rank} returns rows of {own.read} in call {own.call}")
        if own.call in self.cleans and own.masked and self.rules.keeps_layout:
            return step, self._with(state, rank, own._replace(at=REFUSED))
        num_calls = self.calls_before if self._has_round(own) else self.calls[rank]
        is_last = own.call % CALLS_PER_ROUND == num_calls
        opened = self._open(rank, own)
        layout = own.layout + (own.call in self.cleans)
        at = SEND if not is_last else REQUEST if self._has_round(own) else DONE
        after = own._replace(at=at, call=own.call + 1, read=(), layout=layout)
        state = self._with(state, rank, after)
        for other in opened:
            state = self._put(state, rank, other, Put(ACK, own.call, 0, True))
        for other in after.masked:
            there = state.ranks[other]
            groups = {rank, *self._open(rank, after)}, {other, *self._open(other, there)}
            if at == DONE and there.at == DONE and groups[0].isdisjoint(groups[1]):
                raise Violation("split", f"ranks {groups[0]} and {groups[1]} go on without each other")
        return step, state

    # What arrives

    def _arrive(self, state: State, wire: int) -> Iterator[tuple[Step, State]]:
        sender, receiver = divmod(wire, self.num_ranks)
        puts, there = state.wires[wire], state.ranks[receiver]
        for index, each in enumerate(puts):
            set_ = each.value % 2
            if not each.content and not each.has_landed:
                held = each._replace(content=state.ranks[sender].sets[set_])
                wires = put(state.wires, wire, put(puts, index, held))
                yield Step(sender, "load", each.value), state._replace(wires=wires)
            elif not each.has_landed:
                slots = put(there.slots, sender, put(there.slots[sender], set_, each.content))
                if each.layout < there.layout:
                    raise Violation("layout", f"rows of rank {sender} land where the slots of others may be")
                after = self._with(state, receiver, there._replace(slots=slots))
                wires = put(after.wires, wire, put(puts, index, each._replace(has_landed=True)))
                yield Step(sender, "land", each.value), after._replace(wires=wires)
        if puts and puts[0].has_landed:
            first = puts[0]
            if first.kind == ROUND:
                there = there._replace(requests=there.requests | {first.value})
            elif first.kind == MASK:
                there = there._replace(heard=there.heard | {first.value})
            elif first.kind == ACK:
                there = there._replace(acks=put(there.acks, sender, first.value))
            else:
                there = there._replace(records=put(there.records, sender, first.value))
            after = self._with(state, receiver, there)
            yield (
                Step(sender, f"signal {first.kind}", first.value),
                after._replace(wires=put(after.wires, wire, puts[1:])),
            )
