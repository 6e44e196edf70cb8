"""Rows and messages between nodes of GPUs by way of proxies, as atomic steps that `explorer.explore`
interleaves.

    explore(Proxies(num_calls=2, per_node=2, num_rows=2, ring_rows=1))

is two nodes of two ranks that make two calls. In a call, every rank first puts a message for each rank of
the other node, and waits for the messages of all ranks; those of its own node it reads in memory. Then
two programs work at once: one sends rows to the relay on the other node, the rank of the same index, the
other one takes rows.

    write     a kernel writes a message into its outbox, or a row into its sending half; and a command, in
    two parts take      the proxy reads a complete command, and posts its put land      the bytes of a put
    are copied, from where they lie now; puts land in any order signal    the counter of a put is raised
    at the receiver receive   a kernel takes a row out of its ring, and commands that the head be raised
    at the sender

What is copied is what lies at the source when the put lands. So a source that is overwritten too early
gives a wrong row or message, which the receiver finds. `Rules` switches single rules off, to see that
each is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tests.model.explorer import Violation
from tests.model.protocol import put

NOTIFY, SEND, TAKE = range(3)
"""The programs of a kernel. The first two are one after the other, so they share a ring of commands."""
NO_WORD = -1


class Step(NamedTuple):
    rank: int
    action: str
    detail: int

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.action} {self.detail}"


@dataclass(frozen=True)
class Rules:
    number_last: bool = True
    """The number of a command is stored after its fields."""
    waits_for_command_room: bool = True
    """An entry of a command ring is not written again before its command was taken."""
    taken_after_reading: bool = True
    """The proxy says that it has taken a command after it has read it."""
    signal_after_bytes: bool = True
    signals_in_order: bool = True
    """The signals of a put are applied after those of all earlier puts to the same rank."""
    num_mailboxes: int = 2
    waits_for_all_messages: bool = True
    """Rows are sent after the messages of all ranks, not only after the relay's."""
    waits_for_credit: bool = True
    """A place of a ring is written again when the receiver has said that it has taken the row; a put that
    is done here says no such thing."""
    tail_after_rows: bool = True
    """The tail is raised by the command of the last row that it counts, or by a later one."""


class Command(NamedTuple):
    """Words of the sender and of the receiver, by index; NO_WORD for none."""

    peer: int
    source: int
    place: int
    counter: int
    value: int


EMPTY = Command(NO_WORD, NO_WORD, NO_WORD, NO_WORD, 0)


class Ring(NamedTuple):
    """A command ring: (number, command) of each entry."""

    entries: tuple[tuple[int, Command], ...]
    written: int
    taken: int
    half: tuple[Command, Command | None] | None = None
    """The command that a kernel has written in part. Then the fields that the proxy had better not
    overlook."""
    announced: int = 0
    """With `taken_after_reading` switched off: the commands that were said to be taken, of which `taken` were
    read."""


class Flight(NamedTuple):
    """A put on its way."""

    ticket: int
    command: Command
    has_landed: bool


class Rank(NamedTuple):
    call: int
    posted: int
    """The last call whose message the ranks of this node can read."""
    notified: int
    """Messages of this call whose commands were written."""
    sent: int
    taken: int
    """Rows of all calls."""
    rings: tuple[Ring, Ring]
    """Of the programs that send, and of the one that takes rows."""
    memory: tuple[Any, ...]
    tickets: tuple[int, ...]
    """Puts posted, by peer."""
    applied: tuple[int, ...]
    """The last ticket of each peer whose signals were applied here."""
    flights: tuple[tuple[Flight, ...], ...]
    """By peer."""


State = tuple[Rank, ...]


@dataclass(frozen=True)
class Proxies:
    num_calls: int
    per_node: int = 1
    num_rows: int = 1
    """That each rank sends to its relay in each call."""
    ring_rows: int = 1
    num_entries: int = 1
    """Of a command ring."""
    detailed: frozenset[int] = frozenset(range(8))
    """The ranks whose proxies and puts take several steps; those of the others happen at once, at any
    time."""
    rules: Rules = Rules()

    # Words of a rank's memory

    @cached_property
    def num_boxes(self) -> int:
        return self.rules.num_mailboxes * self.per_node

    def outbox(self, call: int, peer: int) -> int:
        return call % self.rules.num_mailboxes * self.per_node + peer

    def row_to_send(self, number: int) -> int:
        return self.num_boxes + number % self.ring_rows

    def mailbox(self, call: int, peer: int) -> int:
        return self.num_boxes + self.ring_rows + self.outbox(call, peer)

    def row(self, number: int) -> int:
        return 2 * self.num_boxes + self.ring_rows + number % self.ring_rows

    def number(self, call: int, peer: int) -> int:
        return 2 * (self.num_boxes + self.ring_rows) + self.outbox(call, peer)

    @cached_property
    def tail(self) -> int:
        return 3 * self.num_boxes + 2 * self.ring_rows

    @cached_property
    def head(self) -> int:
        return self.tail + 1

    # The model

    def start(self) -> State:
        ring = Ring(((0, EMPTY),) * self.num_entries, 0, 0)
        nothing: tuple[Any, ...] = (None,) * (2 * (self.num_boxes + self.ring_rows))
        memory = (*nothing, *(0,) * (self.num_boxes + 2))
        none = (0,) * self.per_node
        rank = Rank(1, 0, 0, 0, 0, (ring, ring), memory, none, none, ((),) * self.per_node)
        return (rank,) * (2 * self.per_node)

    def is_finished(self, state: State) -> bool:
        return all(
            rank.call > self.num_calls and not any(rank.flights) and all(map(_is_empty, rank.rings))
            for rank in state
        )

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        for me in range(len(state)):
            yield from self._write(state, me)
            yield from self._next_call(state, me)
            for ring in range(2):
                yield from self._take(state, me, ring)
            for peer in range(self.per_node):
                yield from self._fly(state, me, peer)

    def _rank_of(self, me: int, peer: int) -> int:
        """A rank of the other node, by its index there."""
        return (1 - me // self.per_node) * self.per_node + peer

    # What kernels do

    def _write(self, state: State, me: int) -> Iterator[tuple[Step, State]]:
        rank = state[me]
        for index, ring in enumerate(rank.rings):
            if ring.half is not None:
                command, late = ring.half
                yield self._second_half(state, me, index, command, late)
                return
        if rank.call > self.num_calls:
            return
        if rank.notified < self.per_node:
            yield from self._notify(state, me)
        elif self._has_messages(state, me):
            yield from self._send(state, me)
            yield from self._receive(state, me)

    def _notify(self, state: State, me: int) -> Iterator[tuple[Step, State]]:
        rank, peer, own = state[me], state[me].notified, me % self.per_node
        at = self.outbox(rank.call, peer)
        command = Command(peer, at, self.mailbox(rank.call, own), self.number(rank.call, own), rank.call)
        memory = put(rank.memory, at, (me, rank.call))
        after = rank._replace(notified=peer + 1, posted=rank.call, memory=memory)
        yield from self._command(put(state, me, after), state, me, 0, command, "message", peer)

    def _has_messages(self, state: State, me: int) -> bool:
        """Whether the messages of all ranks are there. What is there must be of this call: when a rank
        puts its message after the next into the same mailbox, this rank has left the call."""
        rank, waits_for_all = state[me], self.rules.waits_for_all_messages
        node, own = divmod(me, self.per_node)
        near = range(node * self.per_node, (node + 1) * self.per_node)
        is_there = not waits_for_all or all(state[other].posted >= rank.call for other in near)
        for peer in range(self.per_node):
            if rank.memory[self.number(rank.call, peer)] < rank.call:
                is_there = is_there and not (waits_for_all or peer == own)
                continue
            found, expected = rank.memory[self.mailbox(rank.call, peer)], (self._rank_of(me, peer), rank.call)
            if found != expected:
                raise Violation("message", f"rank {me} in call {rank.call} finds {found} of {expected}")
        return is_there

    def _send(self, state: State, me: int) -> Iterator[tuple[Step, State]]:
        rank, own = state[me], me % self.per_node
        number = rank.sent
        if number == self.num_rows * rank.call:
            return
        if self.rules.waits_for_credit:
            has_room = number - rank.memory[self.head] < self.ring_rows
        else:
            # As soon as the put of the row that lies there is done here.
            has_room = number < self.ring_rows or not rank.flights[own]
        if not has_room:
            return
        memory = put(rank.memory, self.row_to_send(number), (me, number))
        tail = number + 1 if self.rules.tail_after_rows else number + 2
        command = Command(own, self.row_to_send(number), self.row(number), self.tail, tail)
        after = rank._replace(sent=number + 1, memory=memory)
        yield from self._command(put(state, me, after), state, me, 0, command, "row", number)

    def _receive(self, state: State, me: int) -> Iterator[tuple[Step, State]]:
        rank, own = state[me], me % self.per_node
        number = rank.taken
        if number == self.num_rows * rank.call or rank.memory[self.tail] <= number:
            return
        expected = (self._rank_of(me, own), number)
        found = rank.memory[self.row(number)]
        if found != expected:
            raise Violation("row", f"rank {me} takes {found} for {expected}")
        command = Command(own, NO_WORD, NO_WORD, self.head, number + 1)
        after = rank._replace(taken=number + 1, memory=put(rank.memory, self.row(number), None))
        yield from self._command(put(state, me, after), state, me, 1, command, "receive", number)

    def _command(
        self, after: State, before: State, me: int, index: int, command: Command, action: str, detail: int
    ) -> Iterator[tuple[Step, State]]:
        """Write the first part of a command: all fields, or the number; or, of a rank that is not
        detailed, put at once."""
        step = Step(me, action, detail)
        if me not in self.detailed:
            yield step, self._arrive(after, me, command)
            return
        ring = before[me].rings[index]
        said_taken = max(ring.taken, ring.announced)
        if ring.written - said_taken == self.num_entries and self.rules.waits_for_command_room:
            return
        entry = ring.written % self.num_entries
        number, old = ring.entries[entry]
        if self.rules.number_last:
            entries, late = put(ring.entries, entry, (number, command)), None
        else:
            entries, late = put(ring.entries, entry, (ring.written + 1, old)), command
        ring = ring._replace(entries=entries, half=(command, late))
        yield step, self._with_ring(after, me, index, ring)

    def _second_half(
        self, state: State, me: int, index: int, command: Command, late: Command | None
    ) -> tuple[Step, State]:
        ring = state[me].rings[index]
        entry = ring.written % self.num_entries
        number = ring.written + 1
        entries = put(ring.entries, entry, (number, command if late is None else late))
        ring = ring._replace(entries=entries, written=number, half=None)
        return Step(me, "number", number), self._with_ring(state, me, index, ring)

    def _next_call(self, state: State, me: int) -> Iterator[tuple[Step, State]]:
        rank = state[me]
        if rank.call > self.num_calls or rank.notified < self.per_node:
            return
        if not self._has_messages(state, me) or any(ring.half is not None for ring in rank.rings):
            return
        if rank.sent == rank.taken == self.num_rows * rank.call:
            after = rank._replace(call=rank.call + 1, notified=0)
            yield Step(me, "call", rank.call + 1), put(state, me, after)

    # What proxies and puts do

    def _take(self, state: State, me: int, index: int) -> Iterator[tuple[Step, State]]:
        ring = state[me].rings[index]
        number = ring.taken + 1
        found, command = ring.entries[ring.taken % self.num_entries]
        if not self.rules.taken_after_reading and ring.announced < number:
            if found == number:
                announced = ring._replace(announced=number)
                yield Step(me, "announce", number), self._with_ring(state, me, index, announced)
            return
        if self.rules.taken_after_reading and found < number:
            return
        if found > number:
            raise Violation("command", f"the proxy of rank {me} finds command {found} in place of {number}")
        if command == EMPTY:
            raise Violation("command", f"the proxy of rank {me} takes command {number} before it is there")
        after = self._with_ring(state, me, index, ring._replace(taken=number))
        rank = after[me]
        ticket = rank.tickets[command.peer] + 1
        flight = Flight(ticket, command, command.source == NO_WORD)
        rank = rank._replace(
            tickets=put(rank.tickets, command.peer, ticket),
            flights=put(rank.flights, command.peer, (*rank.flights[command.peer], flight)),
        )
        yield Step(me, "take", number), put(after, me, rank)

    def _fly(self, state: State, me: int, peer: int) -> Iterator[tuple[Step, State]]:
        """Of the puts of a rank to a peer, each that has not landed lands; those that have are signalled."""
        flights = state[me].flights[peer]
        there = self._rank_of(me, peer)
        own = me % self.per_node
        for index, flight in enumerate(flights):
            command = flight.command
            may_signal = flight.has_landed or not self.rules.signal_after_bytes
            if self.rules.signals_in_order and state[there].applied[own] + 1 != flight.ticket:
                may_signal = False
            if not flight.has_landed:
                after = self._copy(state, me, there, command)
                landed = put(flights, index, flight._replace(has_landed=True))
                yield Step(me, "land", flight.ticket), self._with_flights(after, me, peer, landed)
            if may_signal:
                after = self._raise(state, there, command)
                rank = after[there]
                applied = max(rank.applied[own], flight.ticket)
                after = put(after, there, rank._replace(applied=put(rank.applied, own, applied)))
                left = (*flights[:index], *flights[index + 1 :])
                if not flight.has_landed:
                    # Its bytes come later: copied here into a flight that only lands.
                    late = flight._replace(command=command._replace(counter=NO_WORD))
                    left = (*flights[:index], late, *flights[index + 1 :])
                yield Step(me, "signal", flight.ticket), self._with_flights(after, me, peer, left)

    def _arrive(self, state: State, me: int, command: Command) -> State:
        there = self._rank_of(me, command.peer)
        return self._raise(self._copy(state, me, there, command), there, command)

    def _copy(self, state: State, me: int, there: int, command: Command) -> State:
        if command.source == NO_WORD:
            return state
        content = state[me].memory[command.source]
        memory = put(state[there].memory, command.place, content)
        return put(state, there, state[there]._replace(memory=memory))

    def _raise(self, state: State, there: int, command: Command) -> State:
        if command.counter == NO_WORD:
            return state
        memory = state[there].memory
        memory = put(memory, command.counter, max(memory[command.counter], command.value))
        return put(state, there, state[there]._replace(memory=memory))

    def _with_ring(self, state: State, me: int, index: int, ring: Ring) -> State:
        return put(state, me, state[me]._replace(rings=put(state[me].rings, index, ring)))

    def _with_flights(self, state: State, me: int, peer: int, flights: tuple[Flight, ...]) -> State:
        return put(state, me, state[me]._replace(flights=put(state[me].flights, peer, flights)))


def _is_empty(ring: Ring) -> bool:
    return ring.taken == ring.written
