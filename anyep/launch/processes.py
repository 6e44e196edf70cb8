"""What everything that starts ranks needs to know about processes: how they end, and ending them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> None:
    """Let the kernel kill this process with its parent.

    It has no effect if the parent is dead already: check that afterwards.
    """
    word = ctypes.c_ulong
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, word(signal.SIGKILL), word(0), word(0), word(0))


def signal_group(group: int, number: int) -> None:
    """Send a signal to all processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def ending_in_words(exit_code: int) -> str:
    """How a process ended, by its exit code, which is negative for a signal.

    >>> ending_in_words(7), ending_in_words(-9), ending_in_words(-40)
    ('exit code 7', 'killed by SIGKILL', 'killed by signal 40')
    """
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def failed_first(exit_codes: dict[int, int]) -> int:
    """Of ranks that ended at about the same time, the one that failed first.

    Peers of a killed rank fail within microseconds, so a killed rank comes before those that complain.

    >>> failed_first({0: 1, 1: -9, 2: 1})
    1
    """
    return min(exit_codes, key=lambda rank: (exit_codes[rank] >= 0, rank))
