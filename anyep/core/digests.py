"""Digests: checksums by which ranks verify that their handles come from the same dispatch.

Two ranks know the same about the rows that one of them sent to the other: their numbers and tokens, and where
channels begin. The digest is the sum of the hashes of all that, modulo 2**64. The order of addition
therefore does not matter, and kernels on every device get the same bits.

    >>> sent = sum(mixed(row_word(row, token)) for row, token in ((3, 0), (4, 2)))
    >>> received = sum(mixed(row_word(row, token)) for row, token in ((4, 2), (3, 0)))
    >>> sent == received, sent == sum(mixed(row_word(row, token)) for row, token in ((3, 2), (4, 0)))
    (True, False)
"""

from __future__ import annotations

from typing import Final

FIRST: Final = 0x2D98A6F3C1B7E459
FACTOR_1: Final = 0x5B1F3C9D7A24E8B3
FACTOR_2: Final = 0x3E97C2D8146BF5A7
NODE_FACTOR: Final = 0x6C8E9CF570932BD5
"""Arbitrary odd numbers below 2**63, which fit signed words."""
SHIFT_1: Final = 30
SHIFT_2: Final = 27
SHIFT_3: Final = 31
MASK_1: Final = (1 << (64 - SHIFT_1)) - 1
MASK_2: Final = (1 << (64 - SHIFT_2)) - 1
MASK_3: Final = (1 << (64 - SHIFT_3)) - 1
"""Shifting a signed word to the right copies its sign bit; these masks remove the copies."""
TOKEN_BITS: Final = 32


def row_word(row: int, token: int) -> int:
    """A row's number and its token in one word: (1, 2) gives 2**32 + 2."""
    return (row << TOKEN_BITS) | token


def channel_word(channel: int, first_row: int) -> int:
    """A channel and the number of its first row in one word, negative unlike the words of rows.

    >>> channel_word(0, 0), channel_word(0, 3)
    (-1, -4)
    """
    return -1 - row_word(channel, first_row)


def mixed(word: int) -> int:
    """A 64-bit hash as a signed number: each bit of the word changes about half of its bits.

    >>> mixed(0), mixed(1)
    (7015083136346030574, -841461272716353273)
    """
    word = _signed(word + FIRST)
    word = _signed((word ^ ((word >> SHIFT_1) & MASK_1)) * FACTOR_1)
    word = _signed((word ^ ((word >> SHIFT_2) & MASK_2)) * FACTOR_2)
    return word ^ ((word >> SHIFT_3) & MASK_3)


def _signed(word: int) -> int:
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
