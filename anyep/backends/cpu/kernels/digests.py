"""Digests of handles: hashes that are the same on every device (`anyep/core/digests.py`).

They and their sums must be unsigned here: LLVM assumes that signed numbers do not overflow.
"""

from __future__ import annotations

import numpy as np

from anyep.backends.cpu.kernels.compiler import inlined
from anyep.core import digests

FIRST, FACTOR_1, FACTOR_2 = (
    np.uint64(number) for number in (digests.FIRST, digests.FACTOR_1, digests.FACTOR_2)
)
SHIFT_1, SHIFT_2, SHIFT_3 = (
    np.uint64(number) for number in (digests.SHIFT_1, digests.SHIFT_2, digests.SHIFT_3)
)
TOKEN_BITS = digests.TOKEN_BITS


@inlined
def mixed(word):
    """Like `digests.mixed`, but unsigned: 0 gives 7015083136346030574, 1 gives 2**64 - 841461272716353273."""
    bits = np.uint64(word) + FIRST
    bits = (bits ^ (bits >> SHIFT_1)) * FACTOR_1
    bits = (bits ^ (bits >> SHIFT_2)) * FACTOR_2
    return bits ^ (bits >> SHIFT_3)


@inlined
def row_word(row, token):
    """Like `digests.row_word`: row 1 and token 2 give 2**32 + 2."""
    return (np.int64(row) << TOKEN_BITS) | np.int64(token)


@inlined
def channel_word(channel, first_row):
    """Like `digests.channel_word`: channel 0 and row 3 give -4."""
    return -1 - row_word(channel, first_row)
