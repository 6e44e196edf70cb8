"""How a kernel on a GPU reports an error: one word, 0 if there is none, else a code and a rank.

Kernels never raise, and the host may not read the word at once: a later call on the host does.

    >>> outcome_of(LATE, 3), code_of(49), rank_of(49)
    (49, 1, 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

GOOD: Final = 0
LATE: Final = 1
"""A rank did not arrive in time."""
DIFFERENT: Final = 2
"""A rank called something else, or refused its call."""
STOPPED: Final = 3
"""A rank failed or died, and its peers were told not to wait."""
TOO_MANY: Final = 4
"""More rows would arrive at a rank than the maximum that it has given."""
BAD_HANDLE: Final = 5
"""A handle names rows that a rank does not have."""
MASKED: Final = 6
"""This rank is masked: the other ranks go on without it."""
MISSING: Final = 7
"""A rank has no row for a token that should have been there."""
OUT: Final = 8
"""This rank has given up in an earlier call, and takes no part in this one."""
BAD_IDS: Final = 9
"""A top-k id is neither an expert nor -1."""
NO_WINDOW: Final = 10
"""A rank has no window for its rows, and they cannot go another way."""

NUM_CODES: Final = 16
"""A power of two; the rank is in the bits above the code."""


def outcome_of(code: int, rank: int) -> int:
    return code + NUM_CODES * rank


def code_of(outcome: int) -> int:
    return outcome % NUM_CODES


def rank_of(outcome: int) -> int:
    return outcome // NUM_CODES


def still_missing(seen: Sequence[int], expected: int, reported: int) -> list[int]:
    """The ranks to name for a failed wait. A kernel reports the first missing rank, but that rank may have
    arrived since, like others that were only late and have failed for the same reason as this rank.

    >>> still_missing([7, 6, 5, 7], expected=7, reported=0)
    [1, 2]
    >>> still_missing([7, 7], expected=7, reported=0)
    [0]
    """
    return [rank for rank, flag in enumerate(seen) if flag < expected] or [reported]
