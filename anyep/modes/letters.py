"""What stands in the header of a letter: 64-bit words that every rank sends to every peer in every call."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache, lru_cache
from typing import Final

import numpy as np
import torch

from anyep.headers import Field
from anyep.layout import LETTER_HEADER_BYTES

NUM_WORDS: Final = LETTER_HEADER_BYTES // 8


class Kind(IntEnum):
    """What a rank called."""

    DISPATCH = 1
    CACHED_DISPATCH = 2
    COMBINE = 3
    # Low-latency calls have numbers of their own, and notes instead of letters.
    LOW_LATENCY_DISPATCH = 4
    LOW_LATENCY_COMBINE = 5
    CLEAN = 6
    UNMASK = 7


SIGNATURE: Final = tuple(field for field in Field if Field.KIND <= field <= Field.ROUTING)
# In the order in which they explain a disagreement: what comes later may follow from what comes first.
SIGNATURE_WORDS: Final = {
    Field.KIND: "the function called",
    Field.DTYPE: "the dtype",
    Field.ROW_BYTES: "the hidden size",
    Field.TOPK: "top-k",
    Field.SCALES: "the number of scales per token",
    Field.EXPERTS: "the number of experts",
    Field.CHANNELS: "the number of channels (num_sms // 2)",
    Field.RING_ROWS: "the rows of a ring (config, num_nvl_bytes or num_rdma_bytes)",
    Field.ROUTING: "the routing in the handle",
}
DERIVED_FIELDS: Final = frozenset({Field.RING_ROWS})
"""These differ wherever the rows or the channels do, and explain nothing then."""


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
"""Bytes of a value; all others have one."""


# Plain numbers, for code that is run in every call.
RING_ROWS: Final = int(Field.RING_ROWS)
RESULT_ROWS: Final = int(Field.RESULT_ROWS)
X_OFFSET: Final = int(Field.X_OFFSET)
WEIGHTS_OFFSET: Final = int(Field.WEIGHTS_OFFSET)
NUM_OFFERS: Final = int(Field.NUM_OFFERS)
OFFERS: Final = int(Field.OFFERS)
ROUTING: Final = int(Field.ROUTING)
NETWORK_ROWS_SHIFT: Final = 32
"""In the word RING_ROWS: above the rows of rings within a node are those of rings between nodes."""
_NO_FACTS: Final = (-1, -1, -1, *[0] * (NUM_WORDS - Field.RESULT_ROWS - 3))


def signature(
    row_bytes: int = 0,
    dtype: int = 0,
    num_topk: int = 0,
    num_scales: int = 0,
    num_experts: int = 0,
    num_channels: int = 0,
    ring_rows: int = 0,
    routing: int = 0,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A header with a signature, and no facts about its sender yet."""
    return _header(
        (row_bytes, dtype, num_topk, num_scales, num_experts, num_channels, ring_rows, routing)
    ).copy()


@lru_cache(maxsize=64)
def _header(words: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array((0, 0, 0, *words, *_NO_FACTS), np.int64)


def word_for_people(field: int, header: Sequence[int]) -> str:
    """A word of a header's signature as a message says it.

    >>> header = signature(row_bytes=256, dtype=dtype_word(torch.bfloat16))
    >>> word_for_people(Field.DTYPE, header), word_for_people(Field.ROW_BYTES, header)
    ('bfloat16', '128')
    """
    word = int(header[field])
    if field == Field.KIND:
        return Kind(word).name.lower().replace("_", " ") if word in list(Kind) else str(word)
    if field == Field.ROUTING:
        return f"checksum {word:08x}"
    if field == Field.DTYPE:
        return DTYPES[word]
    if field == Field.ROW_BYTES:
        # Rows of the same hidden size differ in bytes where their dtypes do, which is said then.
        return str(word // WIDE_DTYPES.get(DTYPES[int(header[Field.DTYPE])], 1))
    if field == Field.RING_ROWS and word >> NETWORK_ROWS_SHIFT:
        return f"{word % (1 << NETWORK_ROWS_SHIFT)} and {word >> NETWORK_ROWS_SHIFT} between nodes"
    return str(word)


@cache
def dtype_word(dtype: torch.dtype) -> int:
    """A dtype's number in letters.

    >>> DTYPES[dtype_word(torch.bfloat16)]
    'bfloat16'
    """
    name = str(dtype).removeprefix("torch.")
    return DTYPES.index(name) if name in DTYPES else 0
