"""Where the rings of a rank lie: the addresses of their rows and counters, as kernels take them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from anyep.backends import cpu
from anyep.backends.cpu.kernels.groups import RingStack
from anyep.core.calls import Array
from anyep.core.rings import MAX_KNOWN_AREAS
from anyep.layout import (
    NUM_RING_LAYERS,
    RECV_BASE,
    RECV_HEAD,
    RECV_ROWS,
    RECV_TAIL,
    SEND_BASE,
    SEND_HEAD,
    SEND_ROWS,
    SEND_TAIL,
    ControlBlock,
    RingArea,
)


class RingAddresses:
    """The rings between this rank and some ranks, its peers, each of which has an index among them.

    `own_index` is this rank's index at its peers. Rows for `remote` ranks are assembled here: `half_bytes`
    further on than the rows that come from them.
    """

    def __init__(
        self,
        heap_addresses: Array,
        rank: int,
        peers: range,
        own_index: int,
        tail: ControlBlock,
        head: ControlBlock,
        remote: Collection[int] = (),
        half_bytes: int = 0,
    ) -> None:
        self._heap_addresses = heap_addresses
        self._rank = rank
        self._peers = peers
        self._own_index = own_index
        self._tail, self._head = tail, head
        self._remote, self._half_bytes = remote, half_bytes
        self._known: dict[RingArea, Array] = {}

    def begin(
        self, area: RingArea, chunk: int, send_to: Array | bool = True, receive_from: Array | bool = True
    ) -> RingStack:
        """The rings of a new call: to some peers, and from some; the others are not used."""
        known = self._known.get(area)
        if known is None:
            if len(self._known) >= MAX_KNOWN_AREAS:
                self._known.clear()
            known = self._known[area] = self._layers_of(area)
        layers = known.copy()
        # Only this rank advances the tail where it sends and the head where it receives.
        cpu.read_counters(layers[SEND_TAIL], layers[SEND_BASE])
        cpu.read_counters(layers[RECV_HEAD], layers[RECV_BASE])
        layers[SEND_ROWS] *= send_to
        layers[RECV_ROWS] *= receive_from
        sent, taken = np.zeros((2, *layers.shape[1:]), np.int64)
        return RingStack(layers, sent, taken, area.num_rows, chunk, self._peers.start, self._peers.step)

    def _layers_of(self, area: RingArea) -> Array:
        """[layer, channel, peer]: the addresses of rows, tails and heads; bases are 0."""
        channels = np.arange(area.num_channels, dtype=np.int64)[:, None]
        indices = np.arange(area.num_peers, dtype=np.int64)[None, :]
        own, tail, head = self._own_index, self._tail, self._head
        heaps, here = self._heap_addresses[list(self._peers)][None, :], self._heap_addresses[self._rank]
        layers = np.zeros((NUM_RING_LAYERS, area.num_channels, area.num_peers), np.int64)
        layers[SEND_ROWS] = heaps + area.start + (channels * area.num_peers + own) * area.ring_bytes
        layers[SEND_TAIL] = heaps + tail.start + own * tail.stride + 8 * channels
        layers[SEND_HEAD] = here + head.start + indices * head.stride + 8 * channels
        layers[RECV_ROWS] = here + area.start + (channels * area.num_peers + indices) * area.ring_bytes
        layers[RECV_TAIL] = here + tail.start + indices * tail.stride + 8 * channels
        layers[RECV_HEAD] = heaps + head.start + own * head.stride + 8 * channels
        for index, peer in enumerate(self._peers):
            if peer in self._remote:
                layers[SEND_ROWS, :, index] = layers[RECV_ROWS, :, index] + self._half_bytes
        return layers


def rows_moved(stacks: Sequence[RingStack]) -> int:
    """How many rows have gone through the rings of a call, both ways."""
    return sum(int(rings.sent.sum() + rings.taken.sum()) for rings in stacks)
