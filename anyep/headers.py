"""The words of a letter's header, by index: what modes write, and kernels that read letters look for."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

MAX_OFFERS: Final = 8
REFUSED_BY_COUNTS: Final = 3
REFUSED_BY_IDS: Final = 4
"""In the word REFUSED: the counts contradict the choices of experts, or one of those is no expert. Others say
where the reason stands."""


class Field(IntEnum):
    """The words of a header, by index."""

    CALL = 0
    REFUSED = 1
    # The signature: equal on all ranks, or every rank raises.
    KIND = 2
    ROW_BYTES = 3
    DTYPE = 4
    TOPK = 5
    SCALES = 6
    EXPERTS = 7
    CHANNELS = 8
    RING_ROWS = 9
    ROUTING = 10
    # Facts about the sender.
    RESULT_ROWS = 11
    X_OFFSET = 12
    WEIGHTS_OFFSET = 13
    NUM_OFFERS = 14
    OFFERS = 16
