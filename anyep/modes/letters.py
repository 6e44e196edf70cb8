"""What stands in the header of a letter: 64-bit words that every rank sends to every peer in every call."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

from anyep.layout import LETTER_HEADER_BYTES

NUM_WORDS: Final = LETTER_HEADER_BYTES // 8
MAX_OFFERS: Final = 8


class Kind(IntEnum):
    """What a rank called."""

    DISPATCH = 1
    CACHED_DISPATCH = 2
    COMBINE = 3


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


SIGNATURE: Final = tuple(field for field in Field if Field.KIND <= field <= Field.ROUTING)
SIGNATURE_WORDS: Final = {
    Field.KIND: "the function called",
    Field.ROW_BYTES: "the bytes of a row (hidden size)",
    Field.DTYPE: "the dtype",
    Field.TOPK: "top-k",
    Field.SCALES: "the number of scales per token",
    Field.EXPERTS: "the number of experts",
    Field.CHANNELS: "the number of channels (num_sms // 2)",
    Field.RING_ROWS: "the rows of a ring (config or num_nvl_bytes)",
    Field.ROUTING: "the routing in the handle",
}


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


def new_header() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    header = np.zeros(NUM_WORDS, np.int64)
    header[Field.RESULT_ROWS] = -1
    header[Field.X_OFFSET] = -1
    header[Field.WEIGHTS_OFFSET] = -1
    return header


def word_for_people(field: Field, word: int) -> str:
    """A word of the signature as a message says it."""
    if field is Field.KIND:
        return Kind(word).name.lower().replace("_", " ") if word in list(Kind) else str(word)
    if field is Field.ROUTING:
        return f"checksum {word:08x}"
    if field is Field.DTYPE:
        return DTYPES[word]
    return str(word)


def dtype_word(name: str) -> int:
    """A dtype's number in letters, by its name.

    >>> word_for_people(Field.DTYPE, dtype_word("torch.bfloat16"))
    'bfloat16'
    """
    name = name.removeprefix("torch.")
    return DTYPES.index(name) if name in DTYPES else 0
