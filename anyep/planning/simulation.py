"""A dispatch in virtual time: ranks, rings with credits, relays, and links with a rate and a latency.

    result = simulate(units_of(topk_idx, topology, 256, shape), shape, speeds)
    result.total_us, result.waits.sender_us

The state machine is that of a dispatch through rings (`tests/model/relay.py` explores it): a rank *sends*
rows of its tokens into the ring at its relay of each other node while that has room; a relay *relays* a row,
or an own token for its own node, into the rings of all ranks of the node that want it, if all have room; a
rank *takes* rows out of them. Here rows move in chunks of consecutive tokens, and each step takes time. A
test replays runs with chunks of one token in the model.

Every rank has, for each channel, a sender, a relay and a receiver that work at once.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from anyep.planning.virtual_time import Ranks, Result, Shape, Speeds, Trouble, Units

PACKED, ARRIVED, RELAYED, CREDITED, TAKEN = range(5)


class Rules(NamedTuple):
    """What the protocol promises; switched off in tests only, to see it fail."""

    both_at_once: bool = True
    """Ranks take rows while they relay; else they take none before they have relayed everything."""


def simulate(
    units: Units,
    shape: Shape,
    speeds: Speeds,
    trouble: Trouble | None = None,
    rules: Rules | None = None,
    watch: int = 0,
    with_steps: bool = False,
) -> Result:
    """Run one dispatch to its end, or until nothing can move."""
    run = _Dispatch(units, shape, speeds, trouble or Trouble(), rules or Rules(), watch, with_steps)
    return run.result()


class _Dispatch(Ranks):
    """One dispatch. What a ring holds is counted where it is filled."""

    def __init__(
        self,
        units: Units,
        shape: Shape,
        speeds: Speeds,
        trouble: Trouble,
        rules: Rules,
        watch: int,
        with_steps: bool,
    ) -> None:
        super().__init__(units, shape, speeds, trouble, watch, with_steps)
        self.rules, self.limit = rules, shape.nvl_rows
        # Senders
        self.sent = [0] * (self.lanes * self.nodes)
        self.in_ring = [0] * (self.lanes * self.nodes)
        self.sender_is_free = [True] * self.lanes
        self.next_sent = [lane // self.channels // self.per_node for lane in range(self.lanes)]
        # Relays
        self.arrived: list[deque[int]] = [deque() for _ in range(self.lanes * self.nodes)]
        self.relay_is_free = [True] * self.lanes
        self.next_relayed = [0] * self.lanes
        self.nvl_ring = [0] * (self.lanes * self.per_node)
        self.to_relay = self._units_to_relay()
        # Receivers
        self.receiver_free_at = [0.0] * self.lanes
        self.held: list[list[tuple[int, int, int]]] = [[] for _ in range(self.lanes)]
        self.missing = self._rows_by_receiver()

    def _units_to_relay(self) -> list[int]:
        """[lane]: units that its relay has to pass on."""
        counts = [0] * (self.ranks * self.channels)
        for number, units in enumerate(self.units.lists):
            lane, node = divmod(number, self.nodes)
            counts[self._relay_lane(lane, node)] += len(units)
        return counts

    def _rows_by_receiver(self) -> list[int]:
        missing = [0] * self.ranks
        for number, units in enumerate(self.units.lists):
            node = number % self.nodes
            for unit in units:
                for index, rows in enumerate(self.units.rows[unit]):
                    missing[node * self.per_node + index] += rows
        return missing

    # Steps

    def result(self) -> Result:
        self.now = self.begin_us()
        for lane in range(self.lanes):
            self._try_send(lane)
            self._try_relay(lane)
        self.run((self._packed, self._arrive, self._relayed, self._credited, self._taken))
        return self.report(self._stuck())

    def _try_send(self, lane: int) -> None:
        """Begin to pack the next unit for a node whose ring has room."""
        if not self.sender_is_free[lane] or self.nodes == 1:
            return
        rank = lane // self.channels
        own = rank // self.per_node
        lists, waiting = self.units.lists, False
        for step in range(self.nodes):
            node = (self.next_sent[lane] + step) % self.nodes
            at = lane * self.nodes + node
            if node == own or self.sent[at] == len(lists[at]):
                continue
            unit = lists[at][self.sent[at]]
            tokens = self.units.tokens[unit]
            if self.in_ring[at] + tokens > self.shape.net_rows:
                waiting = True
                continue
            self.sent[at] += 1
            self.in_ring[at] += tokens
            self.next_sent[lane] = node + 1
            self.sender_is_free[lane] = False
            self._unblock("sender", lane)
            took = tokens * self.pack_us[rank] * next(self.chance)
            self._work("pack", rank, self.now, self.now + took)
            self._note(rank, "send", self._relay_lane(lane, node) // self.channels)
            self._post(self.now + took, PACKED, lane, node, unit)
            return
        self._block("sender", lane, waiting)

    def _packed(self, lane: int, node: int, unit: int) -> None:
        """The NIC takes it; the relay has it after the wire."""
        self.sender_is_free[lane] = True
        relay_lane = self._relay_lane(lane, node)
        rank, relay = lane // self.channels, relay_lane // self.channels
        there = self._over_network(rank, relay, self.units.tokens[unit])
        own = rank // self.per_node
        self._post(there, ARRIVED, relay_lane, own, unit)
        self._try_send(lane)

    def _arrive(self, lane: int, node: int, unit: int) -> None:
        self.arrived[lane * self.nodes + node].append(unit)
        self._try_relay(lane)

    def _try_relay(self, lane: int) -> None:
        """Begin to relay the next unit from a node, if all rings that it goes to have room."""
        if not self.relay_is_free[lane]:
            return
        rank = lane // self.channels
        own = rank // self.per_node
        waiting = False
        for step in range(self.nodes):
            node = (self.next_relayed[lane] + step) % self.nodes
            at = lane * self.nodes + node
            if node == own:
                if self.sent[at] == len(self.units.lists[at]):
                    continue
                unit = self.units.lists[at][self.sent[at]]
            elif self.arrived[at]:
                unit = self.arrived[at][0]
            else:
                continue
            if not self._has_room(lane, unit):
                waiting = True
                continue
            if node == own:
                self.sent[at] += 1
            else:
                self.arrived[at].popleft()
            self.next_relayed[lane] = node + 1
            self._begin_relay(lane, node, unit)
            return
        self._block("relay", lane, waiting)

    def _has_room(self, lane: int, unit: int) -> bool:
        at, ring, limit = lane * self.per_node, self.nvl_ring, self.limit
        for rows in self.units.rows[unit]:
            if rows and ring[at] + rows > limit:
                return False
            at += 1
        return True

    def _begin_relay(self, lane: int, node: int, unit: int) -> None:
        rank = lane // self.channels
        first, num_rows = lane * self.per_node, 0
        for index, rows in enumerate(self.units.rows[unit]):
            self.nvl_ring[first + index] += rows
            num_rows += rows
        self.relay_is_free[lane] = False
        self._unblock("relay", lane)
        took = num_rows * self.relay_us[rank] * next(self.chance)
        self._work("relay", rank, self.now, self.now + took)
        self._post(self.now + took, RELAYED, lane, node, unit)

    def _relayed(self, lane: int, node: int, unit: int) -> None:
        """The ring of the source has room again, and the rows are on their way to their receivers."""
        rank, channel = divmod(lane, self.channels)
        self.relay_is_free[lane] = True
        self._note(rank, "relay", self.units.source[unit])
        if node != rank // self.per_node:
            source_lane = self.units.source[unit] * self.channels + channel
            later = self.now + self.speeds.network_latency_us
            self._post(later, CREDITED, source_lane, rank // self.per_node, unit)
        first_rank = rank - rank % self.per_node
        for index, rows in enumerate(self.units.rows[unit]):
            if rows:
                self._pass_on(lane, rank, first_rank + index, rows)
        self.to_relay[lane] -= 1
        if not self.rules.both_at_once and not self.to_relay[lane]:
            held, self.held[lane] = self.held[lane], []
            for relay_lane, receiver, rows in held:
                self._receive(relay_lane, receiver, rows, self.now)
        self._try_relay(lane)

    def _pass_on(self, lane: int, rank: int, receiver: int, rows: int) -> None:
        there = self._over_nvlink(rank, receiver, rows)
        own_lane = receiver * self.channels + lane % self.channels
        if not self.rules.both_at_once and self.to_relay[own_lane] - (own_lane == lane):
            self.held[own_lane].append((lane, receiver, rows))
        else:
            self._receive(lane, receiver, rows, there)

    def _receive(self, lane: int, receiver: int, rows: int, there: float) -> None:
        """The receiver takes rows in the order in which they were relayed to it."""
        own_lane = receiver * self.channels + lane % self.channels
        begin = max(there, self.receiver_free_at[own_lane])
        end = begin + rows * self.receive_us[receiver] * next(self.chance)
        self.receiver_free_at[own_lane] = end
        self._work("receive", receiver, begin, end)
        self._post(end, TAKEN, lane, receiver, rows)

    def _taken(self, lane: int, receiver: int, rows: int) -> None:
        self.nvl_ring[lane * self.per_node + receiver % self.per_node] -= rows
        self.missing[receiver] -= rows
        self.finished[receiver] = max(self.finished[receiver], self.now)
        self._note(receiver, "take", lane // self.channels)
        self._try_relay(lane)

    def _credited(self, lane: int, node: int, unit: int) -> None:
        self.in_ring[lane * self.nodes + node] -= self.units.tokens[unit]
        self._try_send(lane)

    def _stuck(self) -> tuple[str, ...]:
        """What the lanes that are not finished wait for."""
        if not any(self.missing):
            return ()
        sentences = [
            f"rank {rank} lacks {missing} rows" for rank, missing in enumerate(self.missing) if missing
        ]
        for who, what in (("sender", "a ring between nodes"), ("relay", "a ring within its node")):
            for lane, since in enumerate(self.blocked_since[who]):
                if since >= 0:
                    rank, channel = divmod(lane, self.channels)
                    sentences.append(f"the {who} of rank {rank}, channel {channel}, waits for room in {what}")
        return tuple(sentences)
