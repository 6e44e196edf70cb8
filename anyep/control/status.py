"""The status that each rank publishes about itself in its control region, for all others to read."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final

import numpy as np

from anyep.backends import cpu
from anyep.backends.cpu.heap import Block
from anyep.core.calls import FUNCTIONS, Phase, name_of_call
from anyep.layout import STATUS_BYTES, TEXT_BYTES, StatusWord

FAILURE_TEXT_AT: Final = 512
REFUSAL_TEXTS_AT: Final = (1600, 2800, 4000, 5200)
"""Two texts for normal-mode calls, two for low-latency ones; they alternate like mailboxes and slots."""
assert REFUSAL_TEXTS_AT[0] >= FAILURE_TEXT_AT + TEXT_BYTES
assert all(start + TEXT_BYTES <= end for start, end in pairwise((*REFUSAL_TEXTS_AT, STATUS_BYTES)))


OUT_OF_REACH: Final = "out of reach"
"""The state of a rank on another host that was lost without reporting a failure."""


class State(IntEnum):
    """Whether a rank is still working, and if not, how it ended."""

    ALIVE = 0
    FAILED = 1
    DESTROYED = 2
    LEFT = 3
    """An exception ended its `with Buffer(...)` block."""
    ENDED = 4
    """Its process ended without `destroy()`."""


_DOING: Final = struct.Struct("=qqqqq")
"""CALL, KIND, PHASE, SINCE_NS and WAITS_FOR, written at once."""
_DOING_AT: Final = 8 * int(StatusWord.CALL)


@dataclass(frozen=True)
class RankStatus:
    """The last status that a rank published."""

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


class StatusBlock:
    """One rank's status words. Only their owner writes them."""

    def __init__(self, block: Block, rank: int, pid: int) -> None:
        self._state_address = np.array([block.address + 8 * StatusWord.STATE], np.int64)
        self._no_wake_up = np.array([block.address + 8 * StatusWord.NO_WAKE_UP], np.int64)
        self._words = block.array(0, StatusWord.REFUSAL_BYTES + len(REFUSAL_TEXTS_AT))
        self._bytes = block.array(0, STATUS_BYTES, np.uint8)
        self._view = self._bytes.data
        self._goes_once = threading.Lock()
        self.rank = rank
        self.pid = pid

    def start(self) -> None:
        self._words[StatusWord.WAITS_FOR] = -1
        self._words[StatusWord.SINCE_NS] = time.monotonic_ns()

    def enter(self, call: int, kind: int, phase: int) -> None:
        _DOING.pack_into(self._view, _DOING_AT, call, kind, phase, time.monotonic_ns(), -1)

    def wait_for(self, peer: int) -> None:
        self._words[StatusWord.WAITS_FOR] = peer

    def go(self, how: State, reason: str = "") -> None:
        """Publish that the rank has ended, how, and why. Only the first such report is kept."""
        with self._goes_once:
            if self.state is not State.ALIVE:
                return
            self._write_text(FAILURE_TEXT_AT, StatusWord.FAILURE_BYTES, reason)
            cpu.signal(self._state_address, self._no_wake_up, 0, int(how))

    def refuse(self, text: int, reason: str) -> None:
        """Write the reason into one of the texts; a notify message or completion record refers to it."""
        self._write_text(REFUSAL_TEXTS_AT[text], StatusWord.REFUSAL_BYTES + text, reason)

    @property
    def state(self) -> State:
        return State(int(self._words[StatusWord.STATE]))

    @property
    def failure(self) -> str:
        return self._read_text(FAILURE_TEXT_AT, StatusWord.FAILURE_BYTES)

    def refusal(self, text: int) -> str:
        """Why the rank refused the call of this text; its notify message or completion record says that it
        did."""
        return self._read_text(REFUSAL_TEXTS_AT[text], StatusWord.REFUSAL_BYTES + text)

    def read(self, alive: bool, in_reach: bool = True) -> RankStatus:
        waits_for = int(self._words[StatusWord.WAITS_FOR])
        state = self.state
        return RankStatus(
            rank=self.rank,
            pid=self.pid,
            alive=alive,
            state=state.name.lower() if in_reach or state is not State.ALIVE else OUT_OF_REACH,
            call=int(self._words[StatusWord.CALL]),
            function=FUNCTIONS[int(self._words[StatusWord.KIND])],
            phase=Phase(int(self._words[StatusWord.PHASE])).name.lower(),
            seconds_in_phase=(time.monotonic_ns() - int(self._words[StatusWord.SINCE_NS])) / 1e9,
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
