"""What the transport asks of an engine, which puts bytes and signals into the memory of other hosts.

    engine.register(address, num_bytes)                # memory that is sent from
    engine.connect({1: description_of_rank_1})         # everyone's `describe()`
    ticket = engine.put(1, [(address, 4096, 512)], signals=[(64, 7)])
    while engine.num_done(1) < ticket:                 # from then on the memory may be overwritten
        engine.poll()

The bytes of puts may arrive in any order, bit by bit. The signals of a put are visible after its bytes and
after those of every earlier put to the same peer, since a counter speaks for all that was counted before.
Nothing arrives and nothing leaves unless the process polls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol

REGION_BITS: Final = 40
"""In a place, the number of a region is stored above these bits of the offset."""
OFFSET_MASK: Final = (1 << REGION_BITS) - 1


class MemoryKind(StrEnum):
    """Where memory is, as engines name it."""

    HOST = "DRAM"
    GPU = "VRAM"


Piece = tuple[int, int, int]
"""Own address, place in the peer's memory, bytes."""
Signal = tuple[int, int]
"""Offset of a 64-bit word in the peer's heap, and the value that it is raised to."""


def place(region: int, offset: int) -> int:
    """Where something lies in a peer's memory; region 0 is its heap.

    >>> place(0, 128), place(2, 128) == (2 << 40) + 128
    (128, True)
    """
    return (region << REGION_BITS) + offset


def split_place(at: int) -> tuple[int, int]:
    """The region and the offset of a place.

    >>> split_place(place(2, 128))
    (2, 128)
    """
    return at >> REGION_BITS, at & OFFSET_MASK


class Engine(Protocol):
    """Puts data into the memory of ranks on other hosts, and receives what they put into this rank's."""

    lost: dict[int, str]
    """Ranks to which a transfer has failed, with the error message."""
    bytes_put: dict[int, int]
    num_puts: dict[int, int]

    def register(self, address: int, num_bytes: int, kind: MemoryKind = ..., device: int = ...) -> None:
        """Allow puts from this memory; `device` is the index of its GPU. Must be called before `describe`."""

    def expose(self, address: int, num_bytes: int, kind: MemoryKind = ..., device: int = ...) -> int:
        """The same, and allow peers to put into it; returns the number of its region, for `place`. All ranks
        expose the same regions in the same order."""

    def describe(self) -> bytes:
        """What peers need to know about this rank; they pass it to `connect`."""

    def connect(self, descriptions: Mapping[int, bytes]) -> None:
        """Register the ranks on other hosts, each with its description."""

    def put(self, peer: int, pieces: Sequence[Piece], signals: Sequence[Signal] = ()) -> int:
        """Start to copy pieces; signals are stored after them. Returns a ticket, which grows by peer."""

    def num_done(self, peer: int) -> int:
        """Puts up to this ticket are done here: their memory may be overwritten."""

    def is_idle(self, peer: int) -> bool:
        """Whether every put to this peer is done here."""

    def drop(self, peer: int, why: str) -> None:
        """Give up a peer for good: the signals of puts that are under way never arrive there, and nothing
        more is sent."""

    def say(self, peer: int, words: bytes) -> None:
        """Send bytes that the peer's `heard` returns. If they cannot be sent, nothing happens."""

    def heard(self) -> list[tuple[int, bytes]]:
        """The (rank, bytes) that peers sent by `say` and `poll` received since the last call."""

    def last_heard(self, peer: int) -> float:
        """When this peer was last heard from, by `time.monotonic`."""

    def poll(self) -> bool:
        """Make progress: finish transfers, store received signals. Returns whether there were any."""

    def close(self) -> None:
        """Release all resources. Data that is still in flight may or may not arrive."""


def is_done(engine: Engine, rank: int) -> bool:
    """Whether everything that was sent to a rank has left, or never will."""
    return rank in engine.lost or engine.is_idle(rank)
