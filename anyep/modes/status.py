"""The line that each rank keeps about itself in its control region, for all others to read."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any, Final

import numpy as np

from anyep.layout import STATUS_BYTES

TEXT_BYTES: Final = 1080
FAILURE_TEXT_AT: Final = 512
REFUSAL_TEXTS_AT: Final = (1600, 2800, 4000, 5200)
"""Two texts for normal-mode calls, two for low-latency ones; they alternate, as mailboxes and slots do."""
assert REFUSAL_TEXTS_AT[0] >= FAILURE_TEXT_AT + TEXT_BYTES
assert all(start + TEXT_BYTES <= end for start, end in pairwise((*REFUSAL_TEXTS_AT, STATUS_BYTES)))


CALLS_PER_ROUND: Final = 1 << 32
"""Low-latency calls begin anew, above all numbers before, when masked ranks were taken back."""


def name_of_call(number: int) -> str:
    """A call's number as messages say it.

    >>> name_of_call(7), name_of_call(2 * CALLS_PER_ROUND + 7)
    ('call 7', 'call 7 of round 2')
    """
    rounds, number = divmod(number, CALLS_PER_ROUND)
    return f"call {number} of round {rounds}" if rounds else f"call {number}"


OUT_OF_REACH: Final = "out of reach"
"""The state of a rank on another host that was lost without a word."""


class State(IntEnum):
    """Whether a rank goes on."""

    ALIVE = 0
    FAILED = 1
    DESTROYED = 2
    LEFT = 3
    """An exception took it out of its `with Buffer(...)` block."""
    ENDED = 4
    """Its process ended without `destroy()`."""


class Phase(IntEnum):
    """What a rank is doing."""

    IDLE = 0
    NOTIFY = 1
    STAGE = 2
    SEND = 3
    RECEIVE = 4
    RINGS = 5
    PULL = 6
    ACKNOWLEDGE = 7


class Word(IntEnum):
    """The words of the status block, by index."""

    STATE = 0
    CALL = 1
    KIND = 2
    PHASE = 3
    SINCE_NS = 4
    WAITS_FOR = 5
    FAILURE_BYTES = 6
    NOBODY = 7
    """Stays 0: nobody sleeps on a status word."""
    REFUSAL_BYTES = 8
    """The first of as many words as there are texts."""


_DOING: Final = struct.Struct("=qqqqq")
"""CALL, KIND, PHASE, SINCE_NS and WAITS_FOR, written at once."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank said of itself last."""

    rank: int
    pid: int
    alive: bool
    state: str
    call: int
    function: str
    phase: str
    seconds_in_phase: float
    waits_for: int | None
    failure: str

    def __str__(self) -> str:
        if not self.alive:
            return f"rank {self.rank} (pid {self.pid}) is dead"
        if self.state == "failed":
            return f"rank {self.rank} (pid {self.pid}) failed: {self.failure}"
        if self.state == OUT_OF_REACH:
            return f"rank {self.rank} (pid {self.pid}) is out of reach: its process or host is gone"
        if self.state == "destroyed":
            return f"rank {self.rank} (pid {self.pid}) has destroyed its Buffer"
        if self.state == "left":
            return f"rank {self.rank} (pid {self.pid}) left its `with Buffer(...)` block by {self.failure}"
        if self.state == "ended":
            return f"rank {self.rank} (pid {self.pid}) ended its process without destroy()"
        if self.phase == "idle":
            last = (
                f"its last call was {self.function} ({name_of_call(self.call)})"
                if self.call
                else "it has not called yet"
            )
            return f"rank {self.rank} (pid {self.pid}) is idle for {self.seconds_in_phase:.1f} s; {last}"
        waiting = f", waiting for rank {self.waits_for}" if self.waits_for is not None else ""
        return (
            f"rank {self.rank} (pid {self.pid}) is in {self.function} ({name_of_call(self.call)}),"
            f" phase {self.phase},"
            f" for {self.seconds_in_phase:.1f} s{waiting}"
        )


FUNCTIONS: Final = (
    "nothing",
    "dispatch",
    "cached dispatch",
    "combine",
    "low-latency dispatch",
    "low-latency combine",
    "clean_low_latency_buffer",
    "unmasking",
)


class StatusBlock:
    """One rank's status words. Only their owner writes them."""

    def __init__(self, backend: Any, block: Any, rank: int, pid: int) -> None:
        self._backend = backend
        self._state_address = np.array([block.address + 8 * Word.STATE], np.int64)
        self._nobody = np.array([block.address + 8 * Word.NOBODY], np.int64)
        self._words = block.array(0, Word.REFUSAL_BYTES + len(REFUSAL_TEXTS_AT))
        self._bytes = block.array(0, STATUS_BYTES, np.uint8)
        self._goes_once = threading.Lock()
        self.rank = rank
        self.pid = pid

    def start(self) -> None:
        self._words[Word.WAITS_FOR] = -1
        self._words[Word.SINCE_NS] = time.monotonic_ns()

    def enter(self, call: int, kind: int, phase: Phase) -> None:
        _DOING.pack_into(self._bytes, 8 * Word.CALL, call, kind, phase, time.monotonic_ns(), -1)

    def wait_for(self, peer: int) -> None:
        self._words[Word.WAITS_FOR] = peer

    def go(self, how: State, reason: str = "") -> None:
        """Say that the rank goes on no more, how that came, and why. What was said first stays."""
        with self._goes_once:
            if self.state is not State.ALIVE:
                return
            self._write_text(FAILURE_TEXT_AT, Word.FAILURE_BYTES, reason)
            self._backend.announce(self._state_address, self._nobody, 0, int(how))

    def refuse(self, text: int, reason: str) -> None:
        """Say why in one of the texts; a letter or a note tells peers when to look."""
        self._write_text(REFUSAL_TEXTS_AT[text], Word.REFUSAL_BYTES + text, reason)

    @property
    def state(self) -> State:
        return State(int(self._words[Word.STATE]))

    @property
    def failure(self) -> str:
        return self._read_text(FAILURE_TEXT_AT, Word.FAILURE_BYTES)

    def refusal(self, text: int) -> str:
        """Why the rank refused the call of this text, which its letter or note says it did."""
        return self._read_text(REFUSAL_TEXTS_AT[text], Word.REFUSAL_BYTES + text)

    def read(self, alive: bool, in_reach: bool = True) -> RankStatus:
        waits_for = int(self._words[Word.WAITS_FOR])
        state = self.state
        return RankStatus(
            rank=self.rank,
            pid=self.pid,
            alive=alive,
            state=state.name.lower() if in_reach or state is not State.ALIVE else OUT_OF_REACH,
            call=int(self._words[Word.CALL]),
            function=FUNCTIONS[int(self._words[Word.KIND])],
            phase=Phase(int(self._words[Word.PHASE])).name.lower(),
            seconds_in_phase=(time.monotonic_ns() - int(self._words[Word.SINCE_NS])) / 1e9,
            waits_for=waits_for if waits_for >= 0 else None,
            failure=self.failure if state is not State.ALIVE else "",
        )

    def _write_text(self, offset: int, length_word: int, text: str) -> None:
        encoded = text.encode(errors="replace")[:TEXT_BYTES]
        self._bytes[offset : offset + len(encoded)] = np.frombuffer(encoded, np.uint8)
        self._words[length_word] = len(encoded)

    def _read_text(self, offset: int, length_word: int) -> str:
        length = int(self._words[length_word])
        encoded: bytes = self._bytes[offset : offset + length].tobytes()
        return encoded.decode(errors="replace")
