"""The low-latency protocol on one node, as atomic steps that `explorer.explore` interleaves.

    explore(LowLatency(("s1 s2 r2 r1 s3 r3",) * 2))

is two ranks that send calls 1 and 2, receive them by their hooks, 2 first, and then make call 3. `Rules`
switches single rules off, to see that each is needed. What a rank's program is made of:

    s1    send call 1: once every peer has acknowledged the call two numbers before, rows into the own send
          area, a list and a completion record to each peer, then `arrived`. A rank that refuses the call
          sends a refused completion record and acknowledges at once. A third call before the first is
          received takes no number: it fails.
    r1    receive call 1: once it has arrived from every peer, the completion records; if they agree, the
          lists, and the rows out of the peers' send areas; acknowledge; look whether this rank is masked;
          return
    f1    fill: the user writes the rows of call 1, which comes next, into the send area
    w2    wait until rank 2 is masked
    u2    unmask rank 2 (u12: ranks 1 and 2) in a round of these and all that are not masked: a request to
          every rank; once all of them have made theirs, go on
    a2    ask too early: a masked rank 2 makes its request for such a round, and gives up when it has waited
          for long enough
    b0    a barrier of the user's: go on once all that live have come here, or further

A rank waits for, sends to and reads from those alone that it has not masked. While it waits it may
    look      take over the masks that it finds in its memory, and pass them on
    give up   mask the peer that it waits for, if that one is dead, or if this rank may find it slow
A mask is a generation: 2n + 1 says masked after n rounds, 2n unmasked by round n. It is told to each peer by
a step of its own, and nothing else is done before all are told. A rank that finds itself masked raises, and
goes to where its program unmasks it, or to the end. A rank of `may_die` may die between any two steps.

Every unmasking is a round, whether or not a rank sees anybody masked. After round n all go on with call
number n * ROUND + 1, and what has lower numbers is over. A masked rank does not know how many rounds it has
missed, nor who was masked or unmasked and what was cleaned without it: it takes all this from the requests.

The invariants, by the kind of their violation:

    completion record   one that is read in a call is its sender's for this call
    list      a list read in a call is its sender's for this call
    rows      the rows that a call returns are those that their sender wrote for this call
    verdict   a call that an unmasked rank refuses or disagrees with raises; no other does, unless masked;
              who goes on after a round goes on unmasked, and with all others who do so
    masks     when all is over, those that are alive and unmasked have the same masks; unless some may be
              found slow, only dead ranks are masked

That no rows are written over while somebody reads them who will return them is `rows`: who can do so while
they are read can do so just before, and the reader finds out. Every step advances a counter, so no state
comes back: without a deadlock every rank that lives and is not masked finishes its program.

What is merged into one step, and why nothing is lost by it:
- A wait and the step after it. What is waited for only grows: once it holds, it goes on holding.
- The look before a call and the end of the call before. To look later is to look while waiting.
- The telling of a mask, where the peer has it from somebody else already.
- Unless `is_fine`: all of a send; all of a receive but its last look and the return; all of a request. Each
  reads what others wrote before it writes what others read, and does not wait in between. So whoever can
  interfere between two parts can do so before the first or after the last as well, and breaks the same
  invariant there. A peer that gets its flag later than others do is one that looks later. If the rank dies
  between two flags, a peer never gets its flag and gives up: so who waits for a dead rank may give up
  although the flag is there.
Never merged are the reading of rows and the look after it, and the tellings of a mask to different peers.

A clean is a call with completion records but no lists and no rows. After it the send areas lie elsewhere:
whatever is written at the new places is taken to be in the way of everything at the old ones, and the other
way round. What a rank sends to itself is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from tests.model.explorer import Violation
from tests.model.protocol import put

# What a rank is at: a send, a receive, a wait for a mask, a round. Here it waits, and may look:
START, ROWS, POST, FLAG, RECORD, PULL, ACK, END, AWAIT, REJOIN, JOIN, BARRIER = range(12)
WAITS = (ROWS, RECORD, AWAIT, REJOIN, JOIN)
BY_PEER = {
    POST: "post",
    FLAG: "arrived",
    RECORD: "read record",
    PULL: "pull",
    ACK: "ack",
    REJOIN: "request",
}
ROUND = 100
"""More than the calls between two rounds."""


@dataclass(frozen=True)
class Rules:
    num_sets: int = 2
    await_acks: bool = True
    """A send waits until every peer has acknowledged the call two numbers before."""
    fill_awaits_acks: bool = True
    """So does who hands out the send area before the send."""
    ack_after_pull: bool = True
    flag_last: bool = True
    """`arrived` follows the list and the completion record."""
    refusal_acks: bool = True
    """A rank that refuses a call acknowledges it."""
    refuse_third: bool = True
    third_takes_number: bool = False
    clean_takes_number: bool = True
    """Else each rank changes the places for itself."""
    lists_stay: bool = True
    """A clean moves the send areas, but not the lists: they are written into the memory of others."""
    look_while_waiting: bool = True
    look_last: bool = True
    """A rank looks whether it is masked after it has read the rows; else only before."""
    mask_silent: bool = True
    """A peer that does not acknowledge in time is masked; else it is sent to as if it had."""
    tell: Literal["everyone", "subject", "nobody"] = "everyone"
    tell_first: bool = True
    """A mask is told before anything else is done."""
    pass_on: bool = True
    """Who takes over a mask tells it as well."""
    always_a_round: bool = True
    """Else who sees that nobody is masked goes on at once."""
    whole_round: bool = True
    """A round ends when all are there; else also when those to be unmasked are given up."""
    num_requests: int = 2
    """The requests of a rank take turns: in round n + 1 it may be that somebody still has to see those of
    n."""
    follow: bool = True
    """A masked rank takes over whom the others unmask in the round that names it."""
    ignore_other_requests: bool = True
    """The request of a masked rank counts if it is for the same ranks; else it may be one that was given
    up."""
    named_round: bool = True
    """A masked rank joins a round that names it; else any."""
    stay_where_taken_back: bool = True
    """A masked rank leaves a round for a newer one only if it is masked there: else it was taken back."""
    align: Literal["round", "highest", "nobody"] = "round"
    """After a round all go on from a number of the round's; or from the highest that one of them had."""
    forget_acks: bool = True
    """After a round, calls before it need no acknowledgement."""
    forget_hooks: bool = True
    """After a round, hooks of calls before it do nothing."""
    take_masks: bool = True
    """An unmasked rank takes over the masks that the others had when they made their requests."""
    take_places: bool = True
    """An unmasked rank takes over the places: it may have missed a clean."""


@dataclass(frozen=True)
class Call:
    refused_by: frozenset[int] = frozenset()
    disagreed_by: frozenset[int] = frozenset()
    """Ranks that call with another signature than the rest."""
    is_clean: bool = False


PLAIN = Call()


class Op(NamedTuple):
    action: str
    call: int
    ranks: tuple[int, ...]


class Sent(NamedTuple):
    """A call that is sent and not received."""

    call: int
    number: int
    places: int


class Record(NamedTuple):
    call: int
    number: int
    signature: tuple[bool, int]
    is_refused: bool


class Data(NamedTuple):
    """Rows or a list."""

    sender: int
    call: int
    places: int


class Request(NamedTuple):
    round: int
    ranks: tuple[int, ...]
    """To be unmasked."""
    number: int
    places: int
    generations: tuple[int, ...]


class Rank(NamedTuple):
    """What a rank keeps to itself."""

    is_alive: bool
    position: int
    """In the program."""
    phase: int
    todo: tuple[int, ...]
    """The peers that the phase is still to be done for."""
    number: int
    """Of the last call that was sent."""
    over: int
    """Calls up to this number are over for everybody."""
    sent: tuple[Sent, ...]
    filled: int
    """The call whose rows the user has put into the send area."""
    places: int
    """How often a clean has moved the places."""
    round: int
    """The last one that has ended."""
    requested: int
    """The round that this rank is in."""
    returning: tuple[int, ...]
    """Whom it wants to be unmasked there."""
    generations: tuple[int, ...]
    untold: tuple[tuple[int, int], ...]
    """(subject, peer): masks still to be told."""
    is_refused: bool
    """In the call being received, a completion record was refused or disagrees."""
    wrong: tuple[int, Data | None] | None
    """In the call being received, (peer, what was found) where rows were not those of this call."""


class Heap(NamedTuple):
    """What a rank's peers can touch."""

    arrived: tuple[int, ...]
    """By set and sender; so are acknowledgements, completion records and lists."""
    acked: tuple[int, ...]
    records: tuple[Record | None, ...]
    lists: tuple[Data | None, ...]
    rows: tuple[Data | None, ...]
    """The send areas, by set."""
    masks: tuple[int, ...]
    """Generations, by writer and subject."""
    requests: tuple[Request | None, ...]
    """By turn and writer."""


State: TypeAlias = tuple[tuple[Rank, ...], tuple[Heap, ...]]


class Step(NamedTuple):
    rank: int
    action: str
    key: int | None = None
    """A call, the subject of a mask or the number of a round."""
    peer: int | None = None

    def __str__(self) -> str:
        key = "" if self.key is None else f" {self.key}"
        peer = "" if self.peer is None else f", peer {self.peer}"
        return f"rank {self.rank}: {self.action}{key}{peer}"


@dataclass(frozen=True, eq=False)
class LowLatency:
    programs: tuple[str, ...]
    """Of each rank."""
    calls: dict[int, Call] = field(default_factory=dict)
    """Those that are not plain."""
    may_die: frozenset[int] = frozenset()
    slow: frozenset[tuple[int, int]] = frozenset()
    """(rank, peer): the rank may give up on the peer at any time that it waits for it."""
    num_slow: int = 1
    """How often: in the round that unmasks the peer, and after it, only if this is 2."""
    rules: Rules = Rules()
    is_fine: bool = False

    def start(self) -> State:
        num_ranks, num_sets = self.num_ranks, self.rules.num_sets
        zeros, nothing = (0,) * num_sets * num_ranks, (None,) * num_sets * num_ranks
        masks, requests = (0,) * num_ranks * num_ranks, (None,) * self.rules.num_requests * num_ranks
        heap = Heap(zeros, zeros, nothing, nothing, (None,) * num_sets, masks, requests)
        rank = self._dead._replace(is_alive=True)
        return tuple(self._settle(me, rank) for me in range(num_ranks)), (heap,) * num_ranks

    def is_finished(self, state: State) -> bool:
        """All are at their ends; or all are masked; or somebody waits for a mask that nobody has."""
        alive = [(me, rank) for me, rank in enumerate(state[0]) if rank.is_alive]
        ops = [op for me, rank in alive if (op := self._op(me, rank)) is not None]
        return (
            not ops
            or all(rank.generations[me] % 2 for me, rank in alive)
            or any(
                op.action == "w" and all(rank.generations[op.ranks[0]] % 2 == 0 for _, rank in alive)
                for op in ops
            )
        )

    def steps(self, state: State) -> list[tuple[Step, State]]:
        steps = [(step, self._drop_known(after)) for step, after in self._steps(state)]
        if not steps and self.is_finished(state):
            self._check_masks(state[0])
        return steps

    def _steps(self, state: State) -> Iterator[tuple[Step, State]]:
        ranks, heaps = state
        for me, rank in enumerate(ranks):
            if not rank.is_alive:
                continue
            op = self._op(me, rank)
            if me in self.may_die and op is not None:
                yield Step(me, "die"), (put(ranks, me, self._dead), heaps)
            for subject, peer in rank.untold:
                yield Step(me, "tell mask", subject, peer), self._tell(me, subject, peer, state)
            if rank.untold and self.rules.tell_first:
                continue
            if op is None or (rank.phase in WAITS and self.rules.look_while_waiting):
                looked = self._look(me, rank, heaps[me])
                if looked != rank:
                    yield Step(me, "look"), (put(ranks, me, looked), heaps)
            if op is None:
                continue
            for peer in self._waits_for(me, op, rank, heaps[me]):
                is_slow = (me, peer) in self.slow and rank.generations[peer] + 1 < 2 * self.num_slow
                if is_slow or not ranks[peer].is_alive:
                    yield Step(me, "give up on", peer), self._give_up(me, op, peer, state)
            yield from self._act(me, op, state)

    def _check_masks(self, ranks: tuple[Rank, ...]) -> None:
        views = {
            me: rank.generations
            for me, rank in enumerate(ranks)
            if rank.is_alive and rank.generations[me] % 2 == 0
        }
        if len({tuple(generation % 2 for generation in view) for view in views.values()}) > 1:
            raise Violation("masks", f"ranks end with different masks: {views}")
        if not self.slow:
            for me, rank in enumerate(ranks):
                if rank.is_alive and any(view[me] % 2 for view in [*views.values(), rank.generations]):
                    raise Violation("masks", f"rank {me} is masked, and was never slow")

    # What there is to do, and for whom.

    def _act(self, me: int, op: Op, state: State) -> Iterator[tuple[Step, State]]:
        ranks, heaps = state
        rank = ranks[me]
        if rank.phase == ROWS:
            if self._has_acks(me, op, rank, heaps[me]):
                if op.action == "f":
                    yield Step(me, "fill", op.call), self._fill(me, op, state)
                else:
                    yield Step(me, "send", op.call), self._send(me, op, state)
        elif rank.phase == RECORD:
            ready = [peer for peer in rank.todo if self._has_arrived(op, rank, peer, heaps[me])]
            if self.is_fine:
                for peer in ready:
                    yield Step(me, "read record", op.call, peer), self._do(me, op, peer, state)
            elif len(ready) == len(rank.todo):
                yield Step(me, "receive", op.call), self._do_all(me, op, state, (RECORD, PULL, ACK))
        elif rank.phase == REJOIN:
            is_masked = any(rank.generations[subject] % 2 for subject in op.ranks)
            if not is_masked and not self.rules.always_a_round:
                yield Step(me, "need no round"), (put(ranks, me, self._next_op(me, rank)), heaps)
            elif self.is_fine:
                for peer in rank.todo:
                    yield Step(me, "request", rank.requested, peer), self._do(me, op, peer, state)
            else:
                yield Step(me, "request", rank.requested), self._do_all(me, op, state, (REJOIN,))
        elif rank.phase in BY_PEER:
            for peer in rank.todo:
                yield Step(me, BY_PEER[rank.phase], op.call, peer), self._do(me, op, peer, state)
        elif rank.phase == END:
            yield from self._end(me, op, state)
        elif rank.phase == AWAIT:
            if rank.generations[op.ranks[0]] % 2:
                yield Step(me, "see masked", op.ranks[0]), (put(ranks, me, self._next_op(me, rank)), heaps)
        elif rank.phase == BARRIER:
            if all(self._has_come(op, peer, ranks[peer]) for peer in self._peers[me]):
                yield Step(me, "pass barrier", op.call), (put(ranks, me, self._next_op(me, rank)), heaps)
        else:
            if op.action == "a":
                yield Step(me, "give up asking"), (put(ranks, me, self._next_op(me, rank)), heaps)
            yield from self._join(me, op, state)

    def _has_come(self, barrier: Op, peer: int, rank: Rank) -> bool:
        return not rank.is_alive or rank.position >= self._ops[peer].index(barrier)

    def _waits_for(self, me: int, op: Op, rank: Rank, mine: Heap) -> tuple[int, ...]:
        if rank.phase == ROWS:
            needs_acks = self.rules.await_acks and rank.number - 1 > rank.over
            return self._unmasked_peers(me, rank.generations) if needs_acks else ()
        if rank.phase == RECORD:
            return rank.todo
        if rank.phase == JOIN:
            return self._taking_part(me, rank, self._view(me, rank, mine))
        return ()

    def _has_acks(self, me: int, op: Op, rank: Rank, mine: Heap) -> bool:
        previous = rank.number - 1  # this call takes number + 1, and its set was last used two calls before
        is_asked = self.rules.fill_awaits_acks if op.action == "f" else self.rules.await_acks
        is_lent = rank.filled == op.call and self.rules.fill_awaits_acks
        return (
            not is_asked
            or is_lent
            or previous <= rank.over
            or all(
                mine.acked[self._slot(previous, peer)] >= previous
                for peer in self._unmasked_peers(me, rank.generations)
            )
        )

    def _has_arrived(self, op: Op, rank: Rank, peer: int, mine: Heap) -> bool:
        number = self._sent(op, rank).number
        return mine.arrived[self._slot(number, peer)] >= number

    # Calls.

    def _fill(self, me: int, op: Op, state: State) -> State:
        ranks, heaps = state
        rank = ranks[me]
        mine = self._write_rows(heaps[me], rank.number + 1, Data(me, op.call, rank.places))
        rank = self._next_op(me, rank._replace(filled=op.call))
        return put(ranks, me, rank), put(heaps, me, mine)

    def _send(self, me: int, op: Op, state: State) -> State:
        """Rows into the own send area; and, if merged, all the rest of the send."""
        ranks, heaps = state
        rank, mine, call = ranks[me], heaps[me], self._call(op)
        number = rank.number + 1
        if me not in call.refused_by:
            if not call.is_clean and rank.filled != op.call:
                mine = self._write_rows(mine, number, Data(me, op.call, rank.places))
            rank = rank._replace(sent=(*rank.sent, Sent(op.call, number, rank.places)))
        rank = rank._replace(number=number, phase=self._after(op, ROWS), todo=self._peers[me])
        state = put(ranks, me, self._advance(me, rank)), put(heaps, me, mine)
        return state if self.is_fine else self._do_all(me, op, state, (POST, FLAG))

    def _do_all(self, me: int, op: Op, state: State, phases: tuple[int, ...]) -> State:
        position = state[0][me].position
        while (rank := state[0][me]).position == position and rank.phase in phases:
            state = self._do(me, op, rank.todo[0], state)
        return state

    def _do(self, me: int, op: Op, peer: int, state: State) -> State:
        """What the phase does for one peer."""
        ranks, heaps = state
        rank, mine, theirs, call = ranks[me], heaps[me], heaps[peer], self._call(op)
        if rank.phase == POST:
            record = Record(
                op.call, rank.number, self._signature(me, call, rank.places), me in call.refused_by
            )
            theirs = theirs._replace(records=put(theirs.records, self._slot(rank.number, me), record))
            if not record.is_refused and not call.is_clean:
                theirs = self._write_list(theirs, rank.number, Data(me, op.call, rank.places))
        elif rank.phase == FLAG:
            slot = self._slot(rank.number, me)
            theirs = theirs._replace(arrived=put(theirs.arrived, slot, rank.number))
            if me in call.refused_by and self.rules.refusal_acks:
                theirs = theirs._replace(acked=put(theirs.acked, slot, rank.number))
        elif rank.phase == REJOIN:
            request = Request(rank.requested, rank.returning, rank.number, rank.places, rank.generations)
            theirs = theirs._replace(
                requests=put(theirs.requests, self._request_slot(rank.requested, me), request)
            )
        else:
            sent = self._sent(op, rank)
            slot = self._slot(sent.number, peer)
            if rank.phase == RECORD:
                found = mine.records[slot]
                if found is None or (found.call, found.number) != (sent.call, sent.number):
                    raise Violation(
                        "completion record", f"{Step(me, 'read record', op.call, peer)}: found {found}"
                    )
                is_other = found.signature != self._signature(me, call, sent.places)
                rank = rank._replace(is_refused=rank.is_refused or found.is_refused or is_other)
            elif rank.phase == PULL:
                expected, rows = Data(peer, sent.call, sent.places), theirs.rows[self._set(sent.number)]
                if mine.lists[slot] != expected:
                    raise Violation("list", f"{Step(me, 'pull', op.call, peer)}: found {mine.lists[slot]}")
                if rows != expected:
                    rank = rank._replace(wrong=rank.wrong or (peer, rows))
            else:
                acked = put(theirs.acked, self._slot(sent.number, me), sent.number)
                theirs = theirs._replace(acked=acked)
        rank = self._advance(me, rank._replace(todo=tuple(other for other in rank.todo if other != peer)))
        return put(ranks, me, rank), put(heaps, peer, theirs)

    def _end(self, me: int, op: Op, state: State) -> Iterator[tuple[Step, State]]:
        ranks, heaps = state
        rank, call = ranks[me], self._call(op)
        looked = self._look(me, rank, heaps[me]) if self.rules.look_last else rank
        if looked.generations[me] % 2:
            yield Step(me, "find itself masked in", op.call), (put(ranks, me, looked), heaps)
            return
        if rank.is_refused:
            step = Step(me, "raise from", op.call)
            if not call.refused_by and not call.disagreed_by:
                raise Violation("verdict", f"{step}, which nobody refused")
        else:
            step = Step(me, "return from", op.call)
            if rank.wrong is not None:
                raise Violation("rows", f"{step._replace(peer=rank.wrong[0])}: found {rank.wrong[1]}")
            for peer in self._unmasked_peers(me, rank.generations):
                if peer in call.refused_by or (peer in call.disagreed_by) != (me in call.disagreed_by):
                    raise Violation("verdict", f"{step}, although rank {peer} refused or disagrees")
        looked = looked._replace(
            sent=tuple(sent for sent in looked.sent if sent.call != op.call),
            places=looked.places + (call.is_clean and not rank.is_refused),
            is_refused=False,
            wrong=None,
        )
        yield step, (put(ranks, me, self._next_op(me, looked)), heaps)

    def _write_rows(self, heap: Heap, number: int, data: Data) -> Heap:
        if not self.rules.lists_stay:
            heap = heap._replace(lists=self._only_at(data.places, heap.lists))
        return heap._replace(rows=put(self._only_at(data.places, heap.rows), self._set(number), data))

    def _write_list(self, heap: Heap, number: int, data: Data) -> Heap:
        if not self.rules.lists_stay:
            rows, lists = (self._only_at(data.places, area) for area in (heap.rows, heap.lists))
            heap = heap._replace(rows=rows, lists=lists)
        return heap._replace(lists=put(heap.lists, self._slot(number, data.sender), data))

    def _only_at(self, places: int, area: tuple[Data | None, ...]) -> tuple[Data | None, ...]:
        """What is left of an area when something is written at these places."""
        return tuple(data if data is not None and data.places == places else None for data in area)

    # Masks.

    def _look(self, me: int, rank: Rank, mine: Heap) -> Rank:
        if not any(mine.masks):
            return rank
        seen = [max(mine.masks[subject :: self.num_ranks]) for subject in range(self.num_ranks)]
        masked = {
            subject: generation
            for subject, generation in enumerate(seen)
            if generation > rank.generations[subject]
        }
        return self._mask(me, rank, masked, self.rules.pass_on) if masked else rank

    def _give_up(self, me: int, op: Op, peer: int, state: State) -> State:
        ranks, heaps = state
        rank = ranks[me]
        if op.action == "s" and not self.rules.mask_silent:
            return self._send(me, op, state)
        num_rounds = rank.requested if rank.phase == JOIN else rank.round
        return put(ranks, me, self._mask(me, rank, {peer: 2 * num_rounds + 1}, True)), heaps

    def _mask(self, me: int, rank: Rank, masked: dict[int, int], tell: bool) -> Rank:
        generations, untold = rank.generations, set(rank.untold)
        for subject, generation in masked.items():
            generations = put(generations, subject, generation)
            if tell and self.rules.tell != "nobody":
                peers = self._peers[me] if self.rules.tell == "everyone" else {subject} - {me}
                untold |= {(subject, peer) for peer in peers}
        rank = rank._replace(generations=generations, untold=tuple(sorted(untold)))
        return self._to_round(me, rank) if me in masked else self._advance(me, rank)

    def _tell(self, me: int, subject: int, peer: int, state: State) -> State:
        ranks, heaps = state
        rank, theirs = ranks[me], heaps[peer]
        masks = put(theirs.masks, me * self.num_ranks + subject, rank.generations[subject])
        rank = rank._replace(untold=tuple(pair for pair in rank.untold if pair != (subject, peer)))
        return put(ranks, me, rank), put(heaps, peer, theirs._replace(masks=masks))

    def _drop_known(self, state: State) -> State:
        """Forgets about telling a mask to those who are dead or have it from somebody else."""
        ranks, heaps = state
        for me, rank in enumerate(ranks):
            if rank.untold:
                untold = tuple(
                    (subject, peer)
                    for subject, peer in rank.untold
                    if ranks[peer].is_alive
                    and ranks[peer].generations[subject] < rank.generations[subject]
                    and max(heaps[peer].masks[subject :: self.num_ranks]) < rank.generations[subject]
                )
                ranks = put(ranks, me, rank._replace(untold=untold))
        return ranks, heaps

    # Rounds.

    def _view(self, me: int, rank: Rank, mine: Heap) -> tuple[int, ...]:
        """The masks that count in this round; to a rank that was masked the others say them."""
        views = [rank.generations]
        if rank.generations[me] % 2 and self.rules.take_masks:
            views += [
                request.generations
                for peer, request in self._requests(me, rank, mine).items()
                if request.generations[peer] % 2 == 0
            ]
        return put(tuple(map(max, zip(*views, strict=True))), me, rank.generations[me])

    def _taking_part(self, me: int, rank: Rank, view: tuple[int, ...]) -> tuple[int, ...]:
        """Those who are masked since this round began are no longer waited for."""
        return tuple(
            peer
            for peer in self._peers[me]
            if (view[peer] % 2 == 0 or peer in rank.returning) and view[peer] <= 2 * rank.requested
        )

    def _requests(self, me: int, rank: Rank, mine: Heap) -> dict[int, Request]:
        is_masked = rank.generations[me] % 2 == 1
        return {
            peer: request
            for peer in self._peers[me]
            if (request := mine.requests[self._request_slot(rank.requested, peer)]) is not None
            and request.round == rank.requested
            and (me in request.ranks or not is_masked or not self.rules.named_round)
            and (
                request.ranks == rank.returning
                or not (request.generations[peer] % 2 or (rank.generations[peer] % 2 and not is_masked))
                or not self.rules.ignore_other_requests
            )
        }

    def _join(self, me: int, op: Op, state: State) -> Iterator[tuple[Step, State]]:
        ranks, heaps = state
        rank, mine, rules = ranks[me], heaps[me], self.rules
        is_masked = rank.generations[me] % 2 == 1
        newer = [
            request.round
            for request in mine.requests
            if request is not None
            and me in request.ranks
            and (request.generations[me] % 2 or not rules.stay_where_taken_back)
        ]
        requests, view = self._requests(me, rank, mine), self._view(me, rank, mine)
        taking_part = self._taking_part(me, rank, view)
        all_given_up = all(view[subject] > 2 * rank.requested for subject in rank.returning)
        others = {request.ranks for peer, request in requests.items() if request.generations[peer] % 2 == 0}
        if is_masked and rules.follow and others - {rank.returning}:
            after = rank._replace(phase=REJOIN, todo=self._peers[me], returning=max(others))
            yield Step(me, "follow", rank.requested), (put(ranks, me, after), heaps)
            return
        has_newer = is_masked and max(newer, default=0) > rank.requested
        if has_newer:
            # Also when all requests are there: one may have been missing when this rank looked for it, and
            # have come before this rank looked for newer ones.
            if any(request and request.generations[me] == 2 * rank.requested for request in mine.requests):
                raise Violation("verdict", f"{Step(me, 'find round', max(newer))}: it skips a round")
            after = rank._replace(phase=REJOIN, todo=self._peers[me], requested=max(newer))
            yield Step(me, "find round", max(newer)), (put(ranks, me, after), heaps)
        if all(peer in requests for peer in taking_part) and (taking_part or not is_masked):
            requests = {peer: requests[peer] for peer in taking_part}
        elif has_newer or rules.whole_round or not all_given_up:
            return
        if any(request.ranks != rank.returning for request in requests.values()):
            raise Violation("verdict", f"{Step(me, 'join', rank.requested)}: disagrees about whom to unmask")
        if is_masked and me not in rank.returning:
            raise Violation("verdict", f"{Step(me, 'join', rank.requested)}: it stays masked there")
        number = rank.requested * ROUND if rules.align == "round" else rank.number
        if rules.align == "highest":
            number = max([number, *(request.number for request in requests.values())])
        places = rank.places
        if rules.take_places:
            places = max([places, *(request.places for request in requests.values())])
        unmasked = tuple(
            max(generation, 2 * rank.requested) if subject in rank.returning else generation
            for subject, generation in enumerate(view)
        )
        joined = rank._replace(
            position=self._rounds[me][rank.requested - 1],
            number=number,
            over=number if rules.forget_acks else rank.over,
            sent=() if rules.forget_hooks else rank.sent,
            filled=0,
            places=places,
            round=rank.requested,
            generations=unmasked,
        )
        yield Step(me, "join", rank.requested), (put(ranks, me, self._next_op(me, joined)), heaps)

    def _to_round(self, me: int, rank: Rank) -> Rank:
        """A rank that finds itself masked goes to the next round that can unmask it, or stays in it."""
        op, generation = self._op(me, rank), rank.generations[me]
        if op is not None and op.action in "au" and me in op.ranks and generation < 2 * rank.requested:
            return rank
        position = next(
            (
                position
                for number, position in enumerate(self._rounds[me], 1)
                if number > max(rank.round, generation // 2) and me in self._ops[me][position].ranks
            ),
            len(self._ops[me]),
        )
        before = range(rank.position, position)
        position = next((at for at in before if self._ops[me][at].action in "ab"), position)
        return self._settle(me, rank._replace(position=position, is_refused=False, wrong=None))

    # Through the program and the phases.

    def _settle(self, me: int, rank: Rank) -> Rank:
        """Passes over what there is nothing to do for, and begins the first phase of what comes next."""
        rules = self.rules
        while (op := self._op(me, rank)) is not None:
            if op.action == "r":
                if any(sent.call == op.call for sent in rank.sent):
                    return self._advance(me, rank._replace(phase=RECORD, todo=self._peers[me]))
            elif op.action == "w":
                return rank._replace(phase=AWAIT, todo=())
            elif op.action == "b":
                return rank._replace(phase=BARRIER, todo=())
            elif op.action == "u" or (op.action == "a" and rank.generations[me] % 2):
                generation = rank.generations[me]
                requested = max(rank.round, generation // 2 if generation % 2 else 0) + 1
                rank = rank._replace(requested=requested, returning=op.ranks)
                return self._advance(me, rank._replace(phase=REJOIN, todo=self._peers[me]))
            elif op.action == "a":
                pass
            elif self._call(op).is_clean and not rules.clean_takes_number:
                rank = rank._replace(places=rank.places + 1)
            elif rules.refuse_third and any(sent.number == rank.number - 1 for sent in rank.sent):
                rank = rank._replace(number=rank.number + rules.third_takes_number)
            else:
                return rank._replace(phase=ROWS, todo=())
            rank = rank._replace(position=rank.position + 1)
        return rank._replace(phase=START, todo=())

    def _next_op(self, me: int, rank: Rank) -> Rank:
        return self._settle(me, rank._replace(position=rank.position + 1))

    def _advance(self, me: int, rank: Rank) -> Rank:
        """Goes on to the next phase once nothing is to be done in this one."""
        while rank.phase in BY_PEER:
            todo = rank.todo
            if rank.phase != REJOIN:
                todo = tuple(peer for peer in todo if rank.generations[peer] % 2 == 0)
            if todo:
                return rank._replace(todo=todo)
            op = self._op(me, rank)
            assert op is not None
            phase = self._after(op, rank.phase)
            if phase == PULL and (rank.is_refused or self._call(op).is_clean):
                phase = self._after(op, phase)
            if phase == START:
                return self._next_op(me, rank)
            rank = rank._replace(phase=phase, todo=self._peers[me] if phase in BY_PEER else ())
        return rank

    def _after(self, op: Op, phase: int) -> int:
        if op.action == "s":
            order = (ROWS, POST, FLAG, START) if self.rules.flag_last else (ROWS, FLAG, POST, START)
        elif op.action == "r":
            order = (RECORD, PULL, ACK, END) if self.rules.ack_after_pull else (RECORD, ACK, PULL, END)
        else:
            order = (REJOIN, JOIN)
        return order[order.index(phase) + 1]

    # Small questions.

    @cached_property
    def num_ranks(self) -> int:
        return len(self.programs)

    @cached_property
    def _ops(self) -> list[list[Op]]:
        return [
            [
                Op(word[0], 0, tuple(map(int, word[1:])))
                if word[0] in "auw"
                else Op(word[0], int(word[1:]), ())
                for word in program.split()
            ]
            for program in self.programs
        ]

    @cached_property
    def _rounds(self) -> list[list[int]]:
        """Their positions in each rank's program."""
        return [[position for position, op in enumerate(ops) if op.action == "u"] for ops in self._ops]

    @cached_property
    def _peers(self) -> list[tuple[int, ...]]:
        return [tuple(peer for peer in range(self.num_ranks) if peer != me) for me in range(self.num_ranks)]

    @cached_property
    def _dead(self) -> Rank:
        return Rank(False, 0, START, (), 0, 0, (), 0, 0, 0, 0, (), (0,) * self.num_ranks, (), False, None)

    def _op(self, me: int, rank: Rank) -> Op | None:
        return self._ops[me][rank.position] if rank.position < len(self._ops[me]) else None

    def _call(self, op: Op) -> Call:
        return self.calls.get(op.call, PLAIN)

    def _sent(self, op: Op, rank: Rank) -> Sent:
        return next(sent for sent in rank.sent if sent.call == op.call)

    def _signature(self, me: int, call: Call, places: int) -> tuple[bool, int]:
        return me in call.disagreed_by, places

    def _unmasked_peers(self, me: int, generations: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(peer for peer in self._peers[me] if generations[peer] % 2 == 0)

    def _set(self, number: int) -> int:
        return number % self.rules.num_sets

    def _slot(self, number: int, sender: int) -> int:
        return self._set(number) * self.num_ranks + sender

    def _request_slot(self, number: int, writer: int) -> int:
        return number % self.rules.num_requests * self.num_ranks + writer
