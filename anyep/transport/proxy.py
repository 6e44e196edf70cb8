"""Moves the contents of rings over the network: rows that were sent become puts, counters become signals.

A device writes rows for a node on another host into the sending half of its rings, and advances its counts.
The proxy puts new rows to the receiver, and then raises the tail there; where this rank has taken rows, it
raises the head at their sender. It needs no other knowledge of the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from anyep.core.calls import Array
from anyep.layout import COUNTER_BYTES, RECV_BASE, SEND_BASE, SEND_ROWS, ControlRegion, RingArea
from anyep.transport.remote import Transport


class NetworkRingState(Protocol):
    """The rings between nodes in one call, and the call's progress, by [channel, node]."""

    @property
    def net_area(self) -> RingArea: ...
    @property
    def net(self) -> Array:
        """[layer, channel, node]: addresses, and counters at the start of the call."""

    @property
    def net_sent(self) -> Array: ...
    @property
    def net_taken(self) -> Array: ...


class RingProxy:
    """Forwards the rows and counters of one call; `remote` are the relays on other hosts, by node."""

    def __init__(
        self,
        transport: Transport,
        region: ControlRegion,
        own_node: int,
        remote: Mapping[int, int],
        rings: NetworkRingState,
    ) -> None:
        self._transport = transport
        self._own_node = own_node
        self._remote = remote
        self._rings = rings
        self._tail, self._head = region.blocks.network_tail, region.blocks.network_head
        self._put = np.zeros_like(rings.net_sent)
        self._acknowledged = np.zeros_like(rings.net_taken)

    def forward(self) -> None:
        """Send new rows and counters, in one put per node."""
        for node, relay in self._remote.items():
            pieces, signals = self._new_rows(node)
            signals += self._new_heads(node)
            if signals:
                self._transport.put(relay, pieces, signals)

    def _new_rows(self, node: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
        """The rows that were not yet put to a node, and the tails that signal them."""
        rings, area = self._rings, self._rings.net_area
        pieces: list[tuple[int, int, int]] = []
        signals: list[tuple[int, int]] = []
        for channel in np.flatnonzero(rings.net_sent[:, node] > self._put[:, node]).tolist():
            sent = int(rings.net_sent[channel, node])
            here = int(rings.net[SEND_ROWS, channel, node])
            there = area.rows_offset(channel, self._own_node)
            for first, count in rows_between(int(self._put[channel, node]), sent, area.num_rows):
                start = first * area.token_bytes
                pieces.append((here + start, there + start, count * area.token_bytes))
            tail = int(rings.net[SEND_BASE, channel, node]) + sent
            signals.append((self._tail.offset(self._own_node) + COUNTER_BYTES * channel, tail))
            self._put[channel, node] = sent
        return pieces, signals

    def _new_heads(self, node: int) -> list[tuple[int, int]]:
        """The heads that tell a node how many rows this rank has taken, and so that it may send more."""
        rings = self._rings
        signals: list[tuple[int, int]] = []
        for channel in np.flatnonzero(rings.net_taken[:, node] > self._acknowledged[:, node]).tolist():
            taken = int(rings.net_taken[channel, node])
            head = int(rings.net[RECV_BASE, channel, node]) + taken
            signals.append((self._head.offset(self._own_node) + COUNTER_BYTES * channel, head))
            self._acknowledged[channel, node] = taken
        return signals


def rows_between(first: int, end: int, num_rows: int) -> list[tuple[int, int]]:
    """Where rows number `first` to `end` - 1 lie in a ring of `num_rows` rows: (first place, count), in
    order.

    >>> rows_between(3, 5, 8), rows_between(6, 10, 8), rows_between(8, 16, 8)
    ([(3, 2)], [(6, 2), (0, 2)], [(0, 8)])
    """
    runs = []
    while first < end:
        place = first % num_rows
        count = min(end - first, num_rows - place)
        runs.append((place, count))
        first += count
    return runs
