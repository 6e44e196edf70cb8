"""The words that every kernel of a Buffer finds in device memory: its device constants, and the state of its
call.

Facts stay the same as long as the Buffer lives, so a kernel takes one pointer instead of many numbers. The
state is that of the call that runs on the communication stream. A report tells the host, in memory of the
host, what went wrong in a call that it did not wait for.
"""

from __future__ import annotations

from typing import Final

# Facts.
RANK: Final = 0
TIMEOUT_NS: Final = 1
ABORT_AT: Final = 2
"""In the heap: not 0 when nobody should wait any more, since a rank has given up or is gone. The next word is
the address of the one by which the host says so, 0 where kernels cannot read it."""
NUMBER_AT: Final = 3
"""In the heap: the number of the last call."""
MAILBOX_AT: Final = 4
BOX_STRIDE: Final = 5
NOTIFY_STRIDE: Final = 6
ARRIVED_AT: Final = 7
PULLED_AT: Final = 8
FLAG_STRIDE: Final = 9
REPORT: Final = 10
"""The address of the report."""
TAIL_AT: Final = 11
HEAD_AT: Final = 12
RING_STRIDE: Final = 13
"""From one peer's tails or heads to the next one's."""
GIVEN_UP_AT: Final = 14
"""In the heap, and in the host's region: a word per rank, not 0 when it has given up or is gone; as far apart
as flags are."""
OWN_HEAP: Final = 15
"""The address of this rank's heap."""
AT_HOST: Final = 16
"""The address of this rank's control region in the host's memory, laid out like that of the heap; 0 where
kernels cannot read it."""
NUM_CONSTANTS: Final = 32

# The state of a call.
OUTCOME: Final = 0
NUMBER: Final = 1
NUM_ROWS: Final = 2
"""Rows that come to this rank."""
USES_RINGS: Final = 3
"""Whether some rows go through rings."""
IS_REPORTED: Final = 4
IS_WRONG: Final = 5
"""Set before a call's notify messages: its counts contradict its choices; how (below) and where, as
`wrong_word`."""
WRONG_RANK_COUNT: Final = 1
WRONG_EXPERT_COUNT: Final = 2
WRONG_TOKEN: Final = 3
WRONG_ID: Final = 4
"""Where: token * top-k + column of an id that is neither an expert nor -1."""
OTHER_ROUTING: Final = 5
"""Found in notify messages: sender * ranks + receiver of rows of which their handles tell different
things."""
WRONG_SHIFT: Final = 48
LAST_PLACE: Final = (1 << WRONG_SHIFT) - 1
WAITED_FOR: Final = 6
"""The device constant that says where the flags lie that did not come."""
KIND: Final = 7
BAD_ROWS: Final = 8
"""What a program found wrong with a handle, as an outcome; not in OUTCOME, by which the other programs of its
kernel, and all their warps, decide whether to begin."""
NUM_STATES: Final = 9

# A report.
NUM_REPORTS: Final = 0
NUM_READ: Final = 1
"""Written by the host; no report is made while one is unread."""
REPORTED_OUTCOME: Final = 2
REPORTED_NUMBER: Final = 3
REPORTED_WRONG: Final = 4
REPORTED_KIND: Final = 5
REPORTED_WAIT: Final = 6
REPORTED_VALUE: Final = 7
"""An id that is no expert."""
REPORTED_EXPERTS: Final = 8
REPORTED_HEADERS: Final = 10

# The report of a layout: the number of reports and of those the host has read, as above, and an id that is no
# expert: token, column, value, and how many experts there are.
LAYOUT_TOKEN: Final = 2
LAYOUT_COLUMN: Final = 3
LAYOUT_VALUE: Final = 4
LAYOUT_EXPERTS: Final = 5
NUM_LAYOUT_WORDS: Final = 6

TARGET_WORDS: Final = 6
"""Of a rank's row in the table of targets: x, source indices, ids, weights, scales, and its number of
rows."""
TARGET_ROWS: Final = 5
MAX_WINDOW_BLOCKS: Final = 16
WINDOW_BLOCK_BITS: Final = 40
"""A window's offset has the number of its block above these bits."""

# What the host waits for in a dispatch that has to find out its rows.
TICKET: Final = 0
TOTAL_OUTCOME: Final = 1
TOTAL_ROWS: Final = 2
TOTAL_USES_RINGS: Final = 3
TOTAL_ALL_WAIT: Final = 5
"""Whether all hosts wait for their rows: only then can they do something together."""
TOTAL_BY_EXPERT: Final = 8

# More device constants: the table of low-latency mode has them after the others.
CALLS_AT: Final = NUM_CONSTANTS
"""In the heap: the number of the last low-latency call."""
RECORD_AT: Final = NUM_CONSTANTS + 1
RECORD_STRIDE: Final = NUM_CONSTANTS + 2
"""From one sender's completion record to the next one's."""
RECORD_SET_STRIDE: Final = NUM_CONSTANTS + 3
PACKED_AT: Final = NUM_CONSTANTS + 4
PACKED_SET_STRIDE: Final = NUM_CONSTANTS + 5
MASK_AT: Final = NUM_CONSTANTS + 6
MASK_STRIDE: Final = NUM_CONSTANTS + 7
NUM_LOW_LATENCY_CONSTANTS: Final = NUM_CONSTANTS + 8

# The state of a low-latency call has more words, too, and is its own.
NUM_SENT: Final = NUM_STATES
"""Programs that have done their part of the sending; the last of them posts the completion records."""
NUM_TAKEN: Final = NUM_STATES + 1
"""Programs that have done their part of the receiving."""
MISSING_ROW: Final = NUM_STATES + 2
WRONG_PLACE: Final = NUM_STATES + 3
"""The first place (token * top-k + column) of an id that is no expert, and the id."""
WRONG_VALUE: Final = NUM_STATES + 4
RECORD_HEADER: Final = 16
"""The header of this rank's completion records."""
RANGES: Final = 24
"""What everyone's completion records say, by (rank, local expert)."""


def wrong_word(how: int, where: int) -> int:
    """What contradicts what, and where: of several words the greatest is the one that the CPU would name.

    >>> words = wrong_word(WRONG_TOKEN, 7), wrong_word(WRONG_TOKEN, 5), wrong_word(WRONG_RANK_COUNT, 0)
    >>> how_and_where(max(words))
    (3, 5)
    """
    return (how << WRONG_SHIFT) + LAST_PLACE - where


def how_and_where(word: int) -> tuple[int, int]:
    """What a `wrong_word` was made of."""
    return word >> WRONG_SHIFT, LAST_PLACE - (word & LAST_PLACE)
