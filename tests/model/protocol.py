"""The normal-mode protocol on one node, as atomic steps that `explorer.explore` interleaves.

    explore(Protocol(num_blocks=(2, 1), calls=(Call(), Call("combine"))))

is two ranks, with two and one blocks in their window heaps, that dispatch and then combine. `Rules` switches
single rules off, to see that each is needed. A call at a rank runs in lanes, four per peer, that take turns
in any order, as in a progress loop or in parallel GPU programs:

    post      once message n-1 of every peer was read: notify message n, then its number
    read      once all messages are posted and the peer's number is n: its message
    send      once all messages are read: rows into the peer's window, then `arrived`; or rows into its ring
    receive   once all messages are read: rows out of this rank's ring; or the peer's x, then `pulled`

It ends when all lanes are done, and what others do for it: its rows have arrived, its x is pulled. A rank
that refuses the call only posts. Where a notify message says refused, the call ends when all notify messages
are read.

The invariants, by the kind of their violation:

    notify message   a message read in call n is its sender's n-th
    block            rows are written only into a block that is open for them in this very call
    ring             no row overwrites one that was not taken yet
    rows             the rows received are those that the sender sent in this call
    pull             the rows pulled are those that the owner put there for this call

Every step advances a counter, so no state comes back: without a deadlock every rank finishes its program.

What is merged into one step, and why nothing is lost by it:
- A wait and the step after it. What is waited for only grows: once it holds, it goes on holding.
- The words of a notify message; the rows into a window; the rows pulled from one. Between them the rank
  publishes nothing and waits for nothing, so a rank that can interfere between two of them can do so before
  the first or after the last as well, and breaks the same invariant there.
- The end of a call, what the user does then (free blocks, write the next x) and the choice of the next
  call's block. All this is private to the rank, unless another rank touches its blocks too early or too late.
  A rank that does so between two of these can do so before the first, if early, or after the last, if late,
  and violates an invariant there: a block is open for one call number only, and a row carries its number.

The user writes over x the moment that combine returns, the worst moment there is. Tensors that die during a
call need no step of their own, as blocks are chosen only when a call starts. A rank's rows for itself, and
channels beyond one, are left out: `tests.model.programs` has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from typing import Any, Literal, NamedTuple, TypeAlias

from tests.model.explorer import Violation

FREE, LENT = 0, -1  # the use of a block; or it is the number of the call that uses it
# POST_EARLY posts the next call's notify message during this one; only without the rule `notify_in_order`.
POST, READ, SEND, RECEIVE, POST_EARLY = SIDES = range(5)


@dataclass(frozen=True)
class Rules:
    num_mailboxes: int = 2
    await_previous_notify: bool = True
    """A rank writes message n only after it has read message n-1 of every peer."""
    all_notify_first: bool = True
    """No data moves before all notify messages are read; else: to and from a peer once its own notify message
    is read."""
    notify_for_cached: bool = True
    """Else a cached dispatch starts writing at once, to the places of the call before it."""
    notify_in_order: bool = True
    """The notify message of a refused call waits until the call before it has ended; else it may overtake
    it."""
    exit_ack: bool = True
    """The owner's combine waits until every reader has pulled."""
    flag_before: Literal["notify message", "write", "pull", "put", "take"] | None = None
    """Flags follow their data, but the flag of this: number, `arrived`, `pulled`, tail or head."""
    ring_has_room: bool = True
    """A row goes into a ring only while tail - head leaves room."""
    both_at_once: bool = True
    """Sending and receiving take turns; else a rank receives when it has sent everything."""


@dataclass(frozen=True)
class Call:
    """The n-th call of every rank: what the ranks agree on, and what the user does before it."""

    kind: Literal["dispatch", "cached", "combine"] = "dispatch"
    refused_by: frozenset[int] = frozenset()
    silent: frozenset[tuple[int, int]] = frozenset()
    """(rank of tokens, rank of experts) that have no rows for each other, in dispatch and in combine."""
    num_rows: int = 1
    """Of each sender for each receiver."""
    ring_rows: int = 2
    x_in_result: bool = True
    """combine: x is the last dispatch's result, if that lies in a window; else it is staged, or pushed."""
    frees: Literal["all", "any"] = "all"
    """Which results the user frees before this call (never x); any: every choice, each rank for itself."""


class Message(NamedTuple):
    number: int
    is_refused: bool
    place: int | None
    """The block on offer, or that of x; None: rows pass through rings."""


class Row(NamedTuple):
    sender: int
    number: int
    position: int = 0


class Rank(NamedTuple):
    """What a rank keeps to itself."""

    number: int
    """Of the call that it is in."""
    lanes: tuple[int, ...]
    """The number of steps done, by side and peer."""
    place: int | None
    peer_places: tuple[int | None, ...]
    peer_refused: bool
    blocks: tuple[int, ...]
    """What each block is used for: FREE, LENT or a call's number."""
    result: int | None
    """The block of the last dispatch's result, while it is lent."""


class Heap(NamedTuple):
    """What a rank's peers can touch. Numbers and notify messages go by mailbox and sender, the next four by
    peer."""

    numbers: tuple[int, ...]
    messages: tuple[Message | None, ...]
    arrived: tuple[int, ...]
    pulled: tuple[int, ...]
    tails: tuple[int, ...]
    heads: tuple[int, ...]
    rings: tuple[Row | None, ...]
    """One piece of memory: how the senders share it depends on the call's `ring_rows`."""
    blocks: tuple[tuple[Row | None, ...], ...]
    """The window heap: in each block a row per peer."""


State: TypeAlias = tuple[tuple[Rank, ...], tuple[Heap, ...]]


class Step(NamedTuple):
    rank: int
    number: int
    action: str
    peer: int | None = None

    def __str__(self) -> str:
        peer = "" if self.peer is None else f", peer {self.peer}"
        return f"rank {self.rank}, call {self.number}: {self.action}{peer}"


@dataclass(frozen=True)
class Protocol:
    num_blocks: tuple[int, ...]
    """In the window heap of each rank."""
    calls: tuple[Call, ...]
    rules: Rules = Rules()

    def start(self) -> State:
        zeros, nothing = (0,) * self.num_ranks, (None,) * self.num_ranks
        rings = nothing * max(call.ring_rows for call in self.calls)
        return (
            tuple(
                Rank(0, zeros * len(SIDES), None, nothing, False, (FREE,) * num_blocks, None)
                for num_blocks in self.num_blocks
            ),
            tuple(
                Heap(zeros * 2, nothing * 2, zeros, zeros, zeros, zeros, rings, (nothing,) * num_blocks)
                for num_blocks in self.num_blocks
            ),
        )

    def is_finished(self, state: State) -> bool:
        return all(rank.number > len(self.calls) for rank in state[0])

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        for me, rank in enumerate(state[0]):
            if rank.number > len(self.calls):
                continue
            for side in SIDES if rank.number > 0 else ():
                for peer in self._peers[me]:
                    actions = self._actions(side, me, peer, rank)
                    num_done = rank.lanes[self._lane(side, peer)]
                    if num_done < len(actions) and self._may_act(side, actions[num_done], me, peer, state):
                        step = Step(me, rank.number + (side == POST_EARLY), actions[num_done], peer)
                        yield step, self._act(side, step, state)
            if rank.number == 0 or self._may_end(me, state):
                for after in self._next_call(me, state):
                    yield Step(me, rank.number + 1, "start"), after

    # What there is to do, and when.

    def _actions(self, side: int, me: int, peer: int, rank: Rank) -> tuple[str, ...]:
        """The steps of a lane in this call; of sending and receiving, once the peer's notify message is
        read."""
        call = self.calls[rank.number - 1]
        if side == POST_EARLY:
            overtakes = rank.number < len(self.calls) and me in self.calls[rank.number].refused_by
            return (
                self._pair("notify message", "number") if overtakes and not self.rules.notify_in_order else ()
            )
        if side == POST:
            return self._pair("notify message", "number") if self._has_notify(rank.number) else ()
        if me in call.refused_by:
            return ()
        if side == READ:
            return ("read",) if self._has_notify(rank.number) else ()
        place_of_rows = rank.place if (side == SEND) == (call.kind == "combine") else rank.peer_places[peer]
        sender, receiver = (me, peer) if side == SEND else (peer, me)
        if not self._has_rows(call, sender, receiver):
            return ()
        if place_of_rows is None:
            return self._pair(*(("put", "tail") if side == SEND else ("take", "head"))) * call.num_rows
        if call.kind == "combine":
            return self._pair("pull", "pulled") if side == RECEIVE else ()
        return self._pair("write", "arrived") if side == SEND else ()

    def _may_act(self, side: int, action: str, me: int, peer: int, state: State) -> bool:
        ranks, heaps = state
        rank, mine = ranks[me], heaps[me]
        if side in (POST, POST_EARLY):
            previous = self._previous_notify(rank.number) if side == POST else rank.number
            return (side == POST or self._are_done(POST, me, rank)) and (
                not self.rules.await_previous_notify
                or all(self._is_seen(mine, previous, other) for other in self._peers[me])
            )
        if side == READ:
            return self._are_done(POST, me, rank) and self._is_seen(mine, rank.number, peer)
        if self.rules.all_notify_first:
            may_move = self._are_done(READ, me, rank)
        else:
            may_move = rank.lanes[self._lane(READ, peer)] == len(self._actions(READ, me, peer, rank))
        if not may_move or rank.peer_refused:
            return False
        if side == RECEIVE and not self.rules.both_at_once and not self._are_done(SEND, me, rank):
            return False
        if rank.lanes[self._lane(side, peer)] % 2:
            return True  # the wait was before the first of a pair
        if action in ("put", "tail") and self.rules.ring_has_room:
            return heaps[peer].tails[me] - heaps[peer].heads[me] < self.calls[rank.number - 1].ring_rows
        if action in ("take", "head"):
            # Combine adds up a token when its rows are there from every ring; dispatch takes what it finds.
            adds_up = self.calls[rank.number - 1].kind == "combine"
            num_taken = rank.lanes[self._lane(RECEIVE, peer)] // 2
            return all(
                mine.tails[other] - mine.heads[other] + rank.lanes[self._lane(RECEIVE, other)] // 2
                > num_taken
                for other in (self._peers[me] if adds_up else [peer])
                if action in self._actions(RECEIVE, me, other, rank)
            )
        return True

    def _may_end(self, me: int, state: State) -> bool:
        rank, mine = state[0][me], state[1][me]
        call = self.calls[rank.number - 1]
        if not self._are_done(POST, me, rank) or not self._are_done(READ, me, rank):
            return False
        if me in call.refused_by or rank.peer_refused:
            return True
        if not self._are_done(SEND, me, rank) or not self._are_done(RECEIVE, me, rank):
            return False
        if rank.place is None or (call.kind == "combine" and not self.rules.exit_ack):
            return True
        by_peer = mine.pulled if call.kind == "combine" else mine.arrived
        return all(
            by_peer[peer] >= rank.number
            for peer in self._peers[me]
            if self._has_rows(call, *((me, peer) if call.kind == "combine" else (peer, me)))
        )

    # Doing it.

    def _act(self, side: int, step: Step, state: State) -> State:
        ranks, heaps = state
        me, number, action, peer = step
        assert peer is not None
        rank, mine, theirs = ranks[me], heaps[me], heaps[peer]
        call = self.calls[number - 1]
        lane = self._lane(side, peer)
        # In a ring: which row of this call it is, and whether its counter has moved on already.
        position, is_second = divmod(rank.lanes[lane], 2)
        rank = rank._replace(lanes=put(rank.lanes, lane, rank.lanes[lane] + 1))
        if action == "notify message":
            is_refused = me in call.refused_by
            message = Message(number, is_refused, None if is_refused else rank.place)
            theirs = theirs._replace(messages=put(theirs.messages, self._mailbox(number, me), message))
        elif action == "number":
            theirs = theirs._replace(numbers=put(theirs.numbers, self._mailbox(number, me), number))
        elif action == "read":
            found = mine.messages[self._mailbox(number, peer)]
            if found is None or found.number != number:
                raise Violation("notify message", f"{step}: found {found}")
            places = put(rank.peer_places, peer, found.place)
            rank = rank._replace(peer_places=places, peer_refused=rank.peer_refused or found.is_refused)
        elif action == "write":
            block = rank.peer_places[peer]
            assert block is not None
            if ranks[peer].blocks[block] != number:
                raise Violation("block", f"{step}: block {block} is not open for this call; {ranks[peer]}")
            rows = put(theirs.blocks[block], me, Row(me, number))
            theirs = theirs._replace(blocks=put(theirs.blocks, block, rows))
        elif action == "arrived":
            theirs = theirs._replace(arrived=put(theirs.arrived, me, number))
        elif action == "put":
            entry = me * call.ring_rows + (theirs.tails[me] - is_second) % call.ring_rows
            if theirs.rings[entry] is not None:
                raise Violation("ring", f"{step}: over {theirs.rings[entry]}")
            theirs = theirs._replace(rings=put(theirs.rings, entry, Row(me, number, position)))
        elif action == "tail":
            theirs = theirs._replace(tails=put(theirs.tails, me, theirs.tails[me] + 1))
        elif action == "take":
            entry = peer * call.ring_rows + (mine.heads[peer] - is_second) % call.ring_rows
            if mine.rings[entry] != Row(peer, number, position):
                raise Violation("rows", f"{step}: found {mine.rings[entry]}")
            mine = mine._replace(rings=put(mine.rings, entry, None))
        elif action == "head":
            mine = mine._replace(heads=put(mine.heads, peer, mine.heads[peer] + 1))
        elif action == "pull":
            block = rank.peer_places[peer]
            assert block is not None
            row = theirs.blocks[block][me]
            if row != Row(peer, number):
                raise Violation("pull", f"{step}: found {row}")
        else:
            assert action == "pulled"
            theirs = theirs._replace(pulled=put(theirs.pulled, me, number))
        return put(ranks, me, rank), put(put(heaps, me, mine), peer, theirs)

    def _next_call(self, me: int, state: State) -> Iterator[State]:
        """Ends the call, lets the user free blocks and write x, and starts the next call."""
        ranks, heaps = state
        ended, heap = self._end(me, ranks[me], heaps[me])
        number = ended.number + 1
        early = self._lane(POST_EARLY, 0)
        lanes = ended.lanes[early:] + (0,) * early
        ended = ended._replace(number=number, lanes=lanes, peer_refused=False)
        if number > len(self.calls):
            yield put(ranks, me, ended), put(heaps, me, heap)
            return
        call = self.calls[number - 1]
        x = ended.result if call.kind == "combine" and call.x_in_result else None
        lent = [block for block, use in enumerate(ended.blocks) if use == LENT and block != x]
        for freed in subsets(lent) if call.frees == "any" else [tuple(lent)]:
            uses = tuple(FREE if block in freed else use for block, use in enumerate(ended.blocks))
            if me in call.refused_by:
                place = None
            elif not self._has_notify(number):
                place = ended.place
            elif x is not None:
                place = x
            else:
                place = uses.index(FREE) if FREE in uses else None
            contents = heap.blocks
            if place is not None:
                uses = put(uses, place, number)
                if call.kind == "combine":
                    contents = put(contents, place, (Row(me, number),) * self.num_ranks)
            result = None if ended.result in freed else ended.result
            rank = ended._replace(blocks=uses, place=place, result=result)
            yield put(ranks, me, rank), put(heaps, me, heap._replace(blocks=contents))

    def _end(self, me: int, rank: Rank, heap: Heap) -> tuple[Rank, Heap]:
        """The call's block becomes its result, or what it was before the call."""
        if rank.number == 0 or rank.place is None:
            return rank, heap
        call, place = self.calls[rank.number - 1], rank.place
        if call.kind == "combine" or rank.peer_refused:
            overwritten = put(heap.blocks, place, (None,) * self.num_ranks)
            uses = put(rank.blocks, place, LENT if place == rank.result else FREE)
            return rank._replace(blocks=uses), heap._replace(blocks=overwritten)
        for peer in self._peers[me]:
            row = heap.blocks[place][peer]
            if self._has_rows(call, peer, me) and row != Row(peer, rank.number):
                raise Violation("rows", f"{Step(me, rank.number, 'end', peer)}: found {row}")
        return rank._replace(blocks=put(rank.blocks, place, LENT), result=place), heap

    # Small questions.

    @cached_property
    def num_ranks(self) -> int:
        return len(self.num_blocks)

    @cached_property
    def _peers(self) -> list[list[int]]:
        return [[peer for peer in range(self.num_ranks) if peer != me] for me in range(self.num_ranks)]

    def _lane(self, side: int, peer: int) -> int:
        return side * self.num_ranks + peer

    def _are_done(self, side: int, me: int, rank: Rank) -> bool:
        return all(
            rank.lanes[self._lane(side, peer)] == len(self._actions(side, me, peer, rank))
            for peer in self._peers[me]
        )

    def _pair(self, data: str, flag: str) -> tuple[str, str]:
        return (flag, data) if self.rules.flag_before == data else (data, flag)

    def _has_rows(self, call: Call, sender: int, receiver: int) -> bool:
        pair = (receiver, sender) if call.kind == "combine" else (sender, receiver)
        return pair not in call.silent

    def _has_notify(self, number: int) -> bool:
        return self.rules.notify_for_cached or self.calls[number - 1].kind != "cached"

    def _previous_notify(self, number: int) -> int:
        """The number of the notify message before notify message `number`; 0: there is none."""
        return next((n for n in range(number - 1, 0, -1) if self._has_notify(n)), 0)

    def _mailbox(self, number: int, sender: int) -> int:
        return number % self.rules.num_mailboxes * self.num_ranks + sender

    def _is_seen(self, heap: Heap, number: int, sender: int) -> bool:
        return heap.numbers[self._mailbox(number, sender)] >= number


def put(values: tuple[Any, ...], index: int, value: object) -> tuple[Any, ...]:
    """`put((1, 2, 3), 1, 5)` is `(1, 5, 3)`."""
    return (*values[:index], value, *values[index + 1 :])


def subsets(values: list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(values, size) for size in range(len(values) + 1))
