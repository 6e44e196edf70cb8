"""What the transport asks of an engine, which puts bytes and signals into the memory of other hosts.

    engine.register(address, num_bytes)                # memory that is sent from
    engine.connect({1: description_of_rank_1})         # everyone's `describe()`
    ticket = engine.put(1, [(address, 4096, 512)], signals=[(64, 7)])
    while engine.num_done(1) < ticket:                 # from then on the memory may be overwritten
        engine.poll()

No order between two puts may be relied upon. The signals of a put are visible after its bytes. Nothing
arrives and nothing leaves unless the process polls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Piece = tuple[int, int, int]
"""Own address, offset in the peer's heap, bytes."""
Signal = tuple[int, int]
"""Offset of a 64-bit word in the peer's heap, and the value that it is raised to."""


class Engine(Protocol):
    """Puts data into the heaps of ranks on other hosts, and receives what they put into this rank's."""

    lost: dict[int, str]
    """Ranks to which a transfer has failed, with the error message."""
    bytes_put: dict[int, int]
    num_puts: dict[int, int]

    def register(self, address: int, num_bytes: int) -> None:
        """Allow puts from this memory. Must be called before `describe`."""

    def describe(self) -> bytes:
        """What peers need to know about this rank; they pass it to `connect`."""

    def connect(self, descriptions: Mapping[int, bytes]) -> None:
        """Register the ranks on other hosts, each with its description."""

    def put(self, peer: int, pieces: Sequence[Piece], signals: Sequence[Signal] = ()) -> int:
        """Start to copy pieces; signals are stored after them. Returns a ticket: 1, 2, 3 for each peer."""

    def num_done(self, peer: int) -> int:
        """Puts up to this ticket are done here: their memory may be overwritten."""

    def is_idle(self, peer: int) -> bool:
        """Whether every put to this peer is done here."""

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
