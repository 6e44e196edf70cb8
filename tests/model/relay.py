"""Rows between nodes, as atomic steps that `explorer.explore` interleaves: who waits for room, and for whom.

    explore(Combine((ALL, ALL), per_node=1, net_rows=1, nvl_rows=1))

is two nodes of one rank; `ALL` says for each of a rank's tokens which ranks it goes to. Ranks are numbered
node by node; the relay of a rank's tokens on a node is the rank of the same index there.

    Dispatch   send    a token into the ring at a relay of another node
               relay   a row from there, or an own token for the own node, into the rings of all ranks of the
                       node that want it, or into none
               take    a row out of the ring from a relay, to the place that the next row from its source has
    Combine    push    a row into the ring at a relay of this node: those for one node after those for another
               send    the sum of a token's rows into the ring at its source, once they are all there
               add     up an own token, once the sums of all nodes are there

There is one channel: lanes share nothing. `Rules` switches single rules off, to see that each is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from tests.model.explorer import Violation
from tests.model.protocol import put

Mask: TypeAlias = tuple[frozenset[int], ...]
"""For each token of a rank, the ranks that it goes to."""
Counts: TypeAlias = tuple[int, ...]


class Step(NamedTuple):
    rank: int
    action: str
    peer: int

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.action}, {self.peer}"


@dataclass(frozen=True)
class Rules:
    order: str = "ascending"
    """In which order the nodes are served whose rows share a ring; "rotated" begins after the own node."""
    pushed_alike: bool = True
    """Rows are pushed in the order in which relays serve nodes."""
    both_at_once: bool = True
    """Ranks take rows while they relay; else they take none before they have relayed everything."""
    looks_for_room: bool = True


@dataclass(frozen=True)
class Nodes:
    masks: tuple[Mask, ...]
    per_node: int
    net_rows: int
    nvl_rows: int
    """0: rows within a node lie in windows, and need no ring."""
    rules: Rules = Rules()

    @cached_property
    def num_ranks(self) -> int:
        return len(self.masks)

    @cached_property
    def num_nodes(self) -> int:
        return self.num_ranks // self.per_node

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def ranks_on(self, node: int) -> range:
        return range(node * self.per_node, (node + 1) * self.per_node)

    def relay(self, rank: int, node: int) -> int:
        """The rank of this one's index on a node."""
        return node * self.per_node + rank % self.per_node

    def tokens(self, rank: int, node: int) -> list[frozenset[int]]:
        """Of a rank's tokens that go to a node: who wants them there."""
        return self._tokens[rank, node]

    @cached_property
    def _tokens(self) -> dict[tuple[int, int], list[frozenset[int]]]:
        return {
            (rank, node): [here for wanted in mask if (here := wanted & frozenset(self.ranks_on(node)))]
            for rank, mask in enumerate(self.masks)
            for node in range(self.num_nodes)
        }

    def index(self, rank: int, other: int) -> int:
        """Of a pair of ranks, or of a rank and a node."""
        return rank * self.num_ranks + other

    def zeros(self) -> Counts:
        return (0,) * self.num_ranks * self.num_ranks


class DispatchState(NamedTuple):
    sent: Counts
    """By rank and node."""
    relayed: Counts
    """By rank and source node."""
    rings: tuple[tuple[tuple[int, int], ...], ...]
    """By receiver and relay: (source, number) of the rows that lie there."""
    taken: Counts
    """By receiver and source."""


@dataclass(frozen=True)
class Dispatch(Nodes):
    def start(self) -> DispatchState:
        rings = ((),) * self.num_ranks * self.num_ranks
        return DispatchState(self.zeros(), self.zeros(), rings, self.zeros())

    def is_finished(self, state: DispatchState) -> bool:
        return all(
            state.taken[self.index(rank, source)] == self._num_rows(source, rank)
            for rank in range(self.num_ranks)
            for source in range(self.num_ranks)
        )

    def steps(self, state: DispatchState) -> Iterator[tuple[Step, DispatchState]]:
        for rank in range(self.num_ranks):
            for node in range(self.num_nodes):
                if node != self.node_of(rank):
                    yield from self._send(state, rank, node)
                yield from self._relay(state, rank, node)
            if self.rules.both_at_once or self._has_relayed(state, rank):
                for relay in self.ranks_on(self.node_of(rank)):
                    yield from self._take(state, rank, relay)

    def _num_rows(self, source: int, rank: int) -> int:
        return sum(rank in wanted for wanted in self.masks[source])

    def _has_relayed(self, state: DispatchState, rank: int) -> bool:
        return all(
            state.relayed[self.index(rank, node)]
            == len(self.tokens(self.relay(rank, node), self.node_of(rank)))
            for node in range(self.num_nodes)
        )

    def _send(self, state: DispatchState, rank: int, node: int) -> Iterator[tuple[Step, DispatchState]]:
        at = self.index(rank, node)
        relay = self.relay(rank, node)
        num_lying = state.sent[at] - state.relayed[self.index(relay, self.node_of(rank))]
        if state.sent[at] == len(self.tokens(rank, node)):
            return
        if num_lying == self.net_rows:
            if not self.rules.looks_for_room:
                raise Violation("ring", f"rank {rank} overwrites a row in its ring at rank {relay}")
            return
        yield Step(rank, "send", relay), state._replace(sent=put(state.sent, at, state.sent[at] + 1))

    def _relay(self, state: DispatchState, rank: int, node: int) -> Iterator[tuple[Step, DispatchState]]:
        """From the rank of this one's index on a node."""
        at, source, own_node = self.index(rank, node), self.relay(rank, node), self.node_of(rank)
        number = state.relayed[at]
        arrived = state.sent[self.index(source, own_node)]
        tokens = self.tokens(source, own_node)
        if number == (len(tokens) if source == rank else arrived):
            return
        receivers = sorted(tokens[number])
        if any(len(state.rings[self.index(to, rank)]) == self.nvl_rows for to in receivers):
            return
        rings = state.rings
        for to in receivers:
            rows = rings[self.index(to, rank)]
            rings = put(rings, self.index(to, rank), (*rows, (source, number)))
        relayed = put(state.relayed, at, number + 1)
        yield Step(rank, "relay", source), state._replace(relayed=relayed, rings=rings)

    def _take(self, state: DispatchState, rank: int, relay: int) -> Iterator[tuple[Step, DispatchState]]:
        rows = state.rings[self.index(rank, relay)]
        if not rows:
            return
        (source, number), *rest = rows
        at = self.index(rank, source)
        mine = [index for index, to in enumerate(self.tokens(source, self.node_of(rank))) if rank in to]
        if mine[state.taken[at]] != number:
            raise Violation("place", f"rank {rank} takes token {number} of rank {source} for another one")
        yield (
            Step(rank, "take", relay),
            state._replace(
                rings=put(state.rings, self.index(rank, relay), tuple(rest)),
                taken=put(state.taken, at, state.taken[at] + 1),
            ),
        )


class CombineState(NamedTuple):
    pushed: Counts
    """By rank and relay."""
    sent: Counts
    """By relay and node: sums; for the own node, own tokens that were added up."""


@dataclass(frozen=True)
class Combine(Nodes):
    windows: frozenset[int] = frozenset()
    """Nodes whose rows lie in windows: they need no ring within the node, and no order."""

    def start(self) -> CombineState:
        return CombineState(self.zeros(), self.zeros())

    def is_finished(self, state: CombineState) -> bool:
        return all(
            self._is_served(state, rank, node) for rank in range(self.num_ranks) for node in self._nodes
        )

    def steps(self, state: CombineState) -> Iterator[tuple[Step, CombineState]]:
        for rank in range(self.num_ranks):
            own_node = self.node_of(rank)
            if own_node not in self.windows:
                for relay in self.ranks_on(own_node):
                    yield from self._push(state, rank, relay)
            for node in self._order(own_node):
                if not self._is_served(state, rank, node):
                    yield from self._serve(state, rank, node)
                    if own_node not in self.windows:
                        break

    @property
    def _nodes(self) -> range:
        return range(self.num_nodes)

    def _order(self, own_node: int) -> list[int]:
        if self.rules.order == "ascending":
            return list(self._nodes)
        return [(own_node + 1 + step) % self.num_nodes for step in self._nodes]

    def _num_to_serve(self, rank: int, node: int) -> int:
        """Sums for a node; of its own tokens, a rank adds up all."""
        if node == self.node_of(rank):
            return len(self.masks[rank])
        return len(self.tokens(self.relay(rank, node), self.node_of(rank)))

    def _is_served(self, state: CombineState, rank: int, node: int) -> bool:
        return state.sent[self.index(rank, node)] == self._num_to_serve(rank, node)

    def _rows_for(self, rank: int, relay: int, order: list[int]) -> list[tuple[int, int]]:
        """(node, number of the token there) of the rows that go back by way of a relay, in this order."""
        own_node = self.node_of(rank)
        return [
            (node, number)
            for node in order
            for number, wanted in enumerate(self.tokens(self.relay(relay, node), own_node))
            if rank in wanted
        ]

    def _num_returned(self, state: CombineState, relay: int, node: int) -> int:
        """How many of the tokens that came from a node to this one are summed."""
        served = state.sent[self.index(relay, node)]
        own_node = self.node_of(relay)
        if node != own_node:
            return served
        here = frozenset(self.ranks_on(own_node))
        return sum(bool(wanted & here) for wanted in self.masks[relay][:served])

    def _num_taken(self, state: CombineState, rank: int, relay: int) -> int:
        """The rows that a relay has taken out of the ring from a rank."""
        own_node = self.node_of(relay)
        return sum(
            sum(
                rank in wanted
                for wanted in self.tokens(self.relay(relay, node), own_node)[
                    : self._num_returned(state, relay, node)
                ]
            )
            for node in self._nodes
        )

    def _push(self, state: CombineState, rank: int, relay: int) -> Iterator[tuple[Step, CombineState]]:
        at = self.index(rank, relay)
        number = state.pushed[at]
        if number == len(self._rows_for(rank, relay, list(self._nodes))):
            return
        if number - self._num_taken(state, rank, relay) == self.nvl_rows:
            if not self.rules.looks_for_room:
                raise Violation("ring", f"rank {rank} overwrites a row in its ring at rank {relay}")
            return
        yield Step(rank, "push", relay), state._replace(pushed=put(state.pushed, at, number + 1))

    def _serve(self, state: CombineState, relay: int, node: int) -> Iterator[tuple[Step, CombineState]]:
        """Send a sum to a node, or add up an own token."""
        own_node, at = self.node_of(relay), self.index(relay, node)
        number = state.sent[at]
        after = state._replace(sent=put(state.sent, at, number + 1))
        if node != own_node:
            source = self.relay(relay, node)
            if number - self._num_added(state, source, own_node) == self.net_rows:
                if not self.rules.looks_for_room:
                    raise Violation("ring", f"rank {relay} overwrites a sum in its ring at rank {source}")
                return
            if self._rows_are_there(state, relay, node, number):
                yield Step(relay, "send", source), after
            return
        wanted = self.masks[relay][number]
        for other in self._nodes:
            if other == own_node or not wanted & frozenset(self.ranks_on(other)):
                continue
            if state.sent[self.index(self.relay(relay, other), own_node)] <= self._num_added(
                state, relay, other
            ):
                return
        here = wanted & frozenset(self.ranks_on(own_node))
        if not here or self._rows_are_there(state, relay, node, self._num_returned(state, relay, node)):
            yield Step(relay, "add", relay), after

    def _num_added(self, state: CombineState, rank: int, node: int) -> int:
        """The sums from a node that a rank has added up."""
        there = frozenset(self.ranks_on(node))
        served = state.sent[self.index(rank, self.node_of(rank))]
        return sum(bool(wanted & there) for wanted in self.masks[rank][:served])

    def _rows_are_there(self, state: CombineState, relay: int, node: int, number: int) -> bool:
        """Whether the rows of a node's token lie at the heads of the rings of those who have it."""
        own_node = self.node_of(relay)
        if own_node in self.windows:
            return True
        order = self._order(own_node) if self.rules.pushed_alike else list(self._nodes)
        for rank in self.tokens(self.relay(relay, node), own_node)[number]:
            taken = self._num_taken(state, rank, relay)
            if state.pushed[self.index(rank, relay)] <= taken:
                return False
            found = self._rows_for(rank, relay, order)[taken]
            if found != (node, number):
                raise Violation("row", f"rank {relay} takes {found} of rank {rank} for {(node, number)}")
        return True
