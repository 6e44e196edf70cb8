"""The header of a notify message: 64-bit words that every rank sends to every peer in every call."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache, lru_cache
from typing import Final

import numpy as np
import torch

from anyep.core.calls import Array
from anyep.layout import NOTIFY_HEADER_BYTES

NUM_WORDS: Final = NOTIFY_HEADER_BYTES // 8
MAX_OFFERS: Final = 8
REFUSED_BY_COUNTS: Final = 3
REFUSED_BY_IDS: Final = 4
"""In the word REFUSED: the counts contradict the choices of experts, or a choice is not an expert. Other
values say where the reason is written."""


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
    # Words that concern only the sender.
    RESULT_ROWS = 11
    X_OFFSET = 12
    WEIGHTS_OFFSET = 13
    NUM_OFFERS = 14
    OFFERS = 16


SIGNATURE: Final = tuple(field for field in Field if Field.KIND <= field <= Field.ROUTING)
DTYPES: Final = (
    "other 1-byte data",
    "bfloat16",
    "float16",
    "float32",
    "uint8",
    "int8",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
WIDE_DTYPES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a value; values of all other dtypes have one."""


# Plain numbers, for code that runs in every call.
EXPERTS: Final = int(Field.EXPERTS)
RING_ROWS: Final = int(Field.RING_ROWS)
RESULT_ROWS: Final = int(Field.RESULT_ROWS)
X_OFFSET: Final = int(Field.X_OFFSET)
WEIGHTS_OFFSET: Final = int(Field.WEIGHTS_OFFSET)
NUM_OFFERS: Final = int(Field.NUM_OFFERS)
OFFERS: Final = int(Field.OFFERS)
ROUTING: Final = int(Field.ROUTING)
NETWORK_ROWS_SHIFT: Final = 32
"""In the word RING_ROWS: the rows of rings between nodes, in the bits above those of rings within a node."""
_NOTHING_YET: Final = (-1, -1, -1, *[0] * (NUM_WORDS - Field.RESULT_ROWS - 3))


def signature(
    row_bytes: int = 0,
    dtype: int = 0,
    num_topk: int = 0,
    num_scales: int = 0,
    num_experts: int = 0,
    num_channels: int = 0,
    ring_rows: int = 0,
    routing: int = 0,
) -> Array:
    """A header with a signature, and nothing about its sender yet."""
    return _header(
        (row_bytes, dtype, num_topk, num_scales, num_experts, num_channels, ring_rows, routing)
    ).copy()


def write_offers(header: Array, offers: Sequence[tuple[int, int]]) -> None:
    """Offer windows: where each begins, and its bytes.

    >>> header = signature()
    >>> write_offers(header, [(0, 512), (1024, 256)])
    >>> header[NUM_OFFERS : OFFERS + 4].tolist()
    [2, 0, 0, 512, 1024, 256]
    """
    header[NUM_OFFERS] = len(offers)
    for index, offer in enumerate(offers):
        at = OFFERS + 2 * index
        header[at : at + 2] = offer


@lru_cache(maxsize=64)
def _header(words: tuple[int, ...]) -> Array:
    return np.array((0, 0, 0, *words, *_NOTHING_YET), np.int64)


@cache
def dtype_word(dtype: torch.dtype) -> int:
    """A dtype's number in notify messages.

    >>> DTYPES[dtype_word(torch.bfloat16)]
    'bfloat16'
    """
    name = str(dtype).removeprefix("torch.")
    return DTYPES.index(name) if name in DTYPES else 0
