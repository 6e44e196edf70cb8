"""The transport to ranks that are reached over a network: kernels write to outboxes, an engine sends them.

This rank has an outbox for each such rank, laid out like that rank's control region. Kernels write notify
messages, completion records and counters into it as if it were that rank's memory. Then `send` copies pieces
of it to the same offsets at that rank, followed by the words that close them. The status of a remote rank
travels the other way: it is kept in the outbox for that rank, at the place where the heap of a rank of this
host has its status.

Nothing arrives and nothing leaves unless a thread polls. A rank that waits polls; between calls a background
thread polls at a low rate, and sends heartbeats. So a silent rank is not slow: it is gone, or out of reach.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from anyep import ending
from anyep.backends.cpu.heap import Block
from anyep.errors import PeerLost
from anyep.layout import STATUS_BYTES, StatusWord
from anyep.transport.base import Engine, Piece, Signal, is_done

HEARTBEAT_S: Final = 0.5
DRAIN_S: Final = 1.0
SILENT_AFTER_S: Final = 2.0
"""Every rank sends two heartbeats per second; a peer silent for longer than this is presumed unreachable."""
PUMP_S: Final = 0.002
IDLE_PUMP_S: Final = 0.005
IDLE_AFTER_S: Final = 0.1
_CLOCK: Final = struct.Struct("<q")
"""Precedes the status that a rank sends: its clock."""


class Transport(ending.Part):
    """One rank's transport to ranks on other hosts; `outboxes` are memory of this rank, one per such rank."""

    def __init__(self, engine: Engine, own_heap: Block, outboxes: Mapping[int, Block]) -> None:
        self.engine = engine
        self.ranks = tuple(sorted(outboxes))
        self._outboxes = outboxes
        self._own_status = own_heap.array(0, STATUS_BYTES, np.uint8)
        self._said_at = self._polled_at = self._moved_at = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pump = threading.Thread(target=self._keep_polling, name="anyep transport", daemon=True)
        self._pump.start()
        ending.register(self)

    def send(self, rank: int, pieces: Sequence[tuple[int, int]], signals: Sequence[Signal] = ()) -> int:
        """Send pieces of a rank's outbox to it: (offset, bytes); then raise words there: (offset, value).
        Returns the engine's ticket."""
        start = self._outboxes[rank].address
        return self.put(rank, [(start + offset, offset, num_bytes) for offset, num_bytes in pieces], signals)

    def put(self, rank: int, pieces: Sequence[Piece], signals: Sequence[Signal] = ()) -> int:
        """The same, with pieces of any memory: (address, offset there, bytes). Returns the engine's ticket.

        Nothing is sent to a lost rank. A wait for it reports the loss, and its last status.
        """
        with contextlib.suppress(PeerLost):
            return self.engine.put(rank, pieces, list(signals))
        return 0

    def is_sent(self, rank: int, ticket: int) -> bool:
        """Whether a put is done here, or never will be."""
        return rank in self.engine.lost or self.engine.num_done(rank) >= ticket

    def is_idle(self, rank: int) -> bool:
        """Whether every put to a rank is done here, or never will be."""
        return is_done(self.engine, rank)

    def drop(self, rank: int, why: str) -> None:
        """Give up a rank for good: what is under way to it has no effect there, and nothing more is sent."""
        self.engine.drop(rank, why)

    def address(self, rank: int) -> int:
        """Where a rank's outbox begins."""
        return self._outboxes[rank].address

    def outbox(self, rank: int, offset: int, num_bytes: int) -> np.ndarray[Any, Any]:
        """A part of a rank's outbox, as bytes."""
        return self._outboxes[rank].array(offset, num_bytes, np.uint8)

    def poll(self) -> bool:
        """Receive what has arrived, and make progress with sends. Returns whether anything moved."""
        moved = self.engine.poll()
        self._polled_at = time.monotonic()
        if moved:
            self._moved_at = self._polled_at
            # The polling thread and a waiting caller may both be here: the later status must be kept.
            with self._lock:
                for rank, words in self.engine.heard():
                    self._keep_status(rank, words)
        return moved

    def _keep_polling(self) -> None:
        """Poll when no other thread does, and send heartbeats with this rank's status."""
        while not self._stop.wait(
            PUMP_S if time.monotonic() - self._moved_at < IDLE_AFTER_S else IDLE_PUMP_S
        ):
            if time.monotonic() - self._said_at > HEARTBEAT_S:
                self.say_status()
            if time.monotonic() - self._polled_at > PUMP_S:
                self.poll()

    def say_status(self) -> None:
        """Send this rank's status to every remote rank; it may not arrive."""
        self._said_at = time.monotonic()
        words = _CLOCK.pack(time.monotonic_ns()) + self._own_status.tobytes()
        for rank in self.ranks:
            self.engine.say(rank, words)

    def lost(self) -> set[int]:
        """Ranks that the engine has lost."""
        return set(self.engine.lost)

    def seconds_since_heard(self, rank: int) -> float:
        return time.monotonic() - self.engine.last_heard(rank)

    def drain(self, timeout_s: float) -> None:
        """Poll until everything that was sent has left, but no longer than `timeout_s`."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and not self._is_done():
            self.poll()

    def _is_done(self) -> bool:
        return all(self.is_idle(rank) for rank in self.ranks)

    def close(self) -> None:
        """Send this rank's last status, and release the engine."""
        self._stop.set()
        if threading.current_thread() is not self._pump:
            self._pump.join()
        self.drain(DRAIN_S)
        self.say_status()
        self.poll()
        self.engine.close()

    def is_working(self) -> bool:
        return not self._stop.is_set() and not self._is_done()

    def join_at_end(self, until: float) -> None:
        self._stop.set()
        ending.join(self._pump, until)
        if not self._pump.is_alive():
            # This rank's last status still has to be sent.
            self.poll()

    def _keep_status(self, rank: int, words: bytes) -> None:
        """Keep the status of a rank; its times are converted from its clock to this rank's."""
        (clock,) = _CLOCK.unpack_from(words)
        status = self._outboxes[rank].array(0, STATUS_BYTES, np.uint8)
        status[:] = np.frombuffer(words, np.uint8, offset=_CLOCK.size)
        since = self._outboxes[rank].array(8 * StatusWord.SINCE_NS, 1)
        since += time.monotonic_ns() - clock
