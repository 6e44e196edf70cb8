"""The words in device memory that every kernel of a Buffer reads: the device constants, and the state of the
call.

Device constants do not change during the life of a Buffer, so a kernel takes one pointer instead of many
numbers. The state is that of the call that runs on the communication stream. A report, in memory of the host,
tells the host what went wrong in a call that it did not wait for.
"""

from __future__ import annotations

from typing import Final

# Device constants.
RANK: Final = 0
TIMEOUT_NS: Final = 1
ABORT_AT: Final = 2
"""In the heap: not 0 when no kernel should wait any more, because a rank has given up or is gone. The next
word is the address of the host's own abort flag, 0 if kernels cannot read it."""
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
"""In the heap, and in the host's region: a word per rank, not 0 when it has given up or is gone; the stride
is that of flags."""
OWN_HEAP: Final = 15
"""The address of this rank's heap."""
AT_HOST: Final = 16
"""The address of this rank's control region in the host's memory, laid out like that of the heap; 0 if
kernels cannot read it."""
NETWORK_TAIL_AT: Final = 17
"""The tails and heads of rings between nodes, by node."""
NETWORK_HEAD_AT: Final = 18
NETWORK_STRIDE: Final = 19
"""From one node's tails or heads to the next one's."""
COMMANDS: Final = 20
"""The address of the rings of commands in memory of the host (anyep/core/commands.py); 0 without a proxy."""
COMMANDS_TAKEN: Final = 21
"""The address of the counts of commands that the proxy has taken, also in memory of the host."""
COMMAND_ENTRIES: Final = 22
COMMAND_COUNTS: Final = 23
"""The address of two words per writer, in memory of the GPU: the commands that it has written, and the
last one that its ring is known to have room for."""
NETWORK_COUNTS_AT: Final = 24
"""The counts for relays, by source node; two sets alternate."""
NETWORK_COUNTS_STRIDE: Final = 25
NETWORK_COUNTS_SET_STRIDE: Final = 26
NUM_CONSTANTS: Final = 27

# The state of a call.
OUTCOME: Final = 0
NUMBER: Final = 1
NUM_ROWS: Final = 2
"""The number of rows that this rank receives."""
USES_RINGS: Final = 3
"""Whether some rows go through rings."""
IS_REPORTED: Final = 4
IS_WRONG: Final = 5
"""Set before a call's notify messages if its counts contradict its choices: how (below) and where, encoded by
`wrong_word`."""
WRONG_NODE_COUNT: Final = 0
WRONG_RANK_COUNT: Final = 1
WRONG_EXPERT_COUNT: Final = 2
WRONG_TOKEN: Final = 3
WRONG_ID: Final = 4
"""`where` is token * top-k + column of an id that is neither an expert nor -1."""
OTHER_ROUTING: Final = 5
"""Found in notify messages: the handles of two ranks disagree about the rows between them. `where` is
sender * ranks + receiver."""
WRONG_SHIFT: Final = 48
LAST_PLACE: Final = (1 << WRONG_SHIFT) - 1
WAITED_FOR: Final = 6
"""The device constant that holds the offset of the flags that did not arrive."""
KIND: Final = 7
BAD_ROWS: Final = 8
"""What a program found wrong with a handle, as an outcome. It is not written to OUTCOME, because the other
programs of the kernel, and all their warps, decide by OUTCOME whether to begin."""
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
"""An id that is not an expert."""
REPORTED_EXPERTS: Final = 8
REPORTED_HEADERS: Final = 10

# The report of a layout: the numbers of reports and of reports read by the host, as above, and an id that is
# not an expert: token, column, value, and the number of experts.
LAYOUT_TOKEN: Final = 2
LAYOUT_COLUMN: Final = 3
LAYOUT_VALUE: Final = 4
LAYOUT_EXPERTS: Final = 5
NUM_LAYOUT_WORDS: Final = 6

TARGET_WORDS: Final = 6
"""The words of a rank's row in the table of targets: x, source indices, ids, weights, scales, and the number
of rows."""
TARGET_SOURCES: Final = 1
TARGET_IDS: Final = 2
TARGET_WEIGHTS: Final = 3
TARGET_SCALES: Final = 4
TARGET_ROWS: Final = 5
MAX_WINDOW_BLOCKS: Final = 16
WINDOW_BLOCK_BITS: Final = 40
"""The number of a window's block is stored above these bits of the window's offset."""

# The words that the host waits for in a dispatch that does not know yet how many rows it receives.
TICKET: Final = 0
TOTAL_OUTCOME: Final = 1
TOTAL_ROWS: Final = 2
TOTAL_USES_RINGS: Final = 3
TOTAL_RELAYED: Final = 4
"""The tokens that this rank relays, between nodes."""
TOTAL_ALL_WAIT: Final = 5
"""Whether all hosts wait for their totals: only then can they act together."""
TOTAL_BY_EXPERT: Final = 8

# More device constants: in the table of low-latency mode they follow the others.
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

# The state of a low-latency call also has more words; each call has its own state.
NUM_SENT: Final = NUM_STATES
"""Programs that have done their part of the sending; the last of them posts the completion records."""
NUM_TAKEN: Final = NUM_STATES + 1
"""Programs that have done their part of the receiving."""
MISSING_ROW: Final = NUM_STATES + 2
WRONG_PLACE: Final = NUM_STATES + 3
"""The first place (token * top-k + column) of an id that is not an expert; WRONG_VALUE is the id."""
WRONG_VALUE: Final = NUM_STATES + 4
RECORD_HEADER: Final = 16
"""The header of this rank's completion records."""
RANGES: Final = 24
"""The contents of all ranks' completion records, by (rank, local expert)."""


def wrong_word(how: int, where: int) -> int:
    """Encode a contradiction and its place; the greatest of several words is the one the CPU reports.

    >>> words = wrong_word(WRONG_TOKEN, 7), wrong_word(WRONG_TOKEN, 5), wrong_word(WRONG_RANK_COUNT, 0)
    >>> how_and_where(max(words))
    (3, 5)
    """
    return (how << WRONG_SHIFT) + LAST_PLACE - where


def how_and_where(word: int) -> tuple[int, int]:
    """Decode a `wrong_word`."""
    return word >> WRONG_SHIFT, LAST_PLACE - (word & LAST_PLACE)
