"""The header of a completion record: the words that close the sending of a low-latency call at each peer.

A completion record has a fixed place for each sender in each of the two sets. After the header comes a range
of rows for each of the receiver's experts (in a dispatch) or of the sender's (in a combine): the begin in the
high 32 bits, the count in the low ones. The call number is stored last, with release semantics.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final

import numpy as np

from anyep.core import formats
from anyep.core.calls import FUNCTIONS
from anyep.layout import NUM_MAILBOXES, RECORD_HEADER_BYTES
from anyep.sizes import LowLatencySizes

NUM_WORDS: Final = RECORD_HEADER_BYTES // 8
REFUSAL_TEXTS: Final = NUM_MAILBOXES
"""The number of the first text for low-latency calls; those before it are for normal-mode calls."""


class Format(IntEnum):
    """How the values of a row travel."""

    BF16 = formats.RAW
    FP8 = formats.FP8
    FP8_ROUNDED = formats.FP8_ROUNDED
    FP8_UE8M0 = formats.FP8_UE8M0
    LOGFMT = formats.LOGFMT


class Field(IntEnum):
    """The words of a header, by index."""

    CALL = 0
    REFUSED = 1
    # The signature: equal on all ranks, or every rank raises.
    KIND = 2
    MAX_TOKENS = 3
    HIDDEN = 4
    EXPERTS = 5
    FORMAT = 6


SIGNATURE: Final = tuple(field for field in Field if field >= Field.KIND)
SIGNATURE_WORDS: Final = {
    Field.KIND: "the function called",
    Field.MAX_TOKENS: "num_max_dispatch_tokens_per_rank",
    Field.HIDDEN: "the hidden size",
    Field.EXPERTS: "the number of experts",
    Field.FORMAT: "how values travel (use_fp8, round_scale, use_ue8m0, use_logfmt)",
}
AGREEING_WORDS: Final = (int(Field.REFUSED), int(SIGNATURE[-1]) + 1)


def header_of(kind: int, sizes: LowLatencySizes | None = None, travel: int = Format.BF16) -> Any:
    """A header with a signature; without sizes, the header of a refused call."""
    return _header(kind, sizes, travel).copy()


@lru_cache(maxsize=64)
def _header(kind: int, sizes: LowLatencySizes | None, travel: int) -> Any:
    words = np.zeros(NUM_WORDS, np.int64)
    words[Field.KIND] = kind
    if sizes is None:
        words[Field.REFUSED] = 1
    else:
        words[Field.MAX_TOKENS : Field.FORMAT + 1] = (
            sizes.num_max_tokens,
            sizes.hidden,
            sizes.num_experts,
            travel,
        )
    return words


def word_for_people(field: int, header: Sequence[int]) -> str:
    """A word of a header's signature, as error messages show it.

    >>> word_for_people(Field.FORMAT, [0, 0, 4, 128, 512, 256, Format.FP8_ROUNDED])
    'fp8 rounded'
    """
    word = int(header[field])
    if field == Field.KIND:
        return FUNCTIONS[word]
    if field == Field.FORMAT:
        return Format(word).name.lower().replace("_", " ")
    return str(word)
