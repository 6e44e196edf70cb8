"""The description of a call, for every layer: its number and kind, its phases, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

CALLS_PER_ROUND: Final = 1 << 32
"""Low-latency call numbers restart above the next multiple of this each time masked ranks rejoin."""


class Kind(IntEnum):
    """The function that a rank called."""

    DISPATCH = 1
    CACHED_DISPATCH = 2
    COMBINE = 3
    # Low-latency calls have their own numbers, and completion records instead of notify messages.
    LOW_LATENCY_DISPATCH = 4
    LOW_LATENCY_COMBINE = 5
    CLEAN = 6
    UNMASK = 7
    BARRIER = 8


FUNCTIONS: Final = (
    "nothing",
    "dispatch",
    "cached dispatch",
    "combine",
    "low-latency dispatch",
    "low-latency combine",
    "clean_low_latency_buffer",
    "unmasking",
    "barrier",
)
"""The names of kinds in messages."""


class Phase(IntEnum):
    """What a rank does in a call."""

    IDLE = 0
    NOTIFY = 1
    STAGE = 2
    SEND = 3
    RECEIVE = 4
    RINGS = 5
    PULL = 6
    ACKNOWLEDGE = 7


class Topic:
    """The kinds of counters that a sleeping rank can wait for; a topic with two sets has two numbers.

    Plain integers: passing an IntEnum to a kernel takes twenty times as long.
    """

    ROWS: Final = 1
    PULLED: Final = 2
    MASK: Final = 3
    NOTIFY: Final = 4
    RECORD: Final = 6
    PACKED: Final = 8
    REJOIN: Final = 10


class Call(NamedTuple):
    """A call of this rank: its number and its kind (a `Kind`)."""

    number: int
    kind: int
    is_captured: bool = False
    """Whether it is recorded into a CUDA graph, which may be replayed at any time."""

    def __str__(self) -> str:
        return f"{FUNCTIONS[self.kind]} ({name_of_call(self.number)})"


class Stall(NamedTuple):
    """What a wait still waits for."""

    peers: Sequence[int]
    what: str
    seen: int
    expected: int
    channel: int | None = None
    also: Sequence[Stall] = ()
    """What it waits for from other peers at the same time."""

    @property
    def parts(self) -> list[Stall]:
        return [self, *self.also]


def name_of_call(number: int) -> str:
    """A call's number as messages show it.

    >>> name_of_call(7), name_of_call(2 * CALLS_PER_ROUND + 7)
    ('call 7', 'call 7 of round 2')
    """
    rounds, number = divmod(number, CALLS_PER_ROUND)
    return f"call {number} of round {rounds}" if rounds else f"call {number}"
