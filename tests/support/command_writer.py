"""Writes commands for a proxy as kernels of a GPU do, in compiled code of the CPU.

write_commands(block.address, sizes, writer, commands, first)     # commands[i] is number first + i + 1
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from anyep.backends.cpu.kernels.atomics import load_acquire, monotonic_ns, pause, store_release
from anyep.backends.cpu.kernels.memory import int64_at
from anyep.core.commands import FIELDS, NUM_WORDS, TAKEN_WORDS, CommandSizes

Array = np.ndarray[Any, Any]


def write_commands(
    rings: int, sizes: CommandSizes, writer: int, commands: Array, first: int, timeout_s: float = 20.0
) -> int:
    """Write the rows of `commands` ([command, field]) into a writer's ring, which has had `first` before;
    wait for room. Returns how many were written in time."""
    ring = rings + 8 * NUM_WORDS * sizes.num_entries * writer
    taken = rings + 8 * (sizes.ring_words + TAKEN_WORDS * writer)
    return int(_write(ring, taken, sizes.num_entries, commands, first, int(timeout_s * 1e9)))


@numba.njit(nogil=True)
def _write(ring, taken, num_entries, commands, first, timeout_ns):  # type: ignore[no-untyped-def]
    until = monotonic_ns() + timeout_ns
    for index in range(len(commands)):
        number = first + index + 1
        while load_acquire(taken) + num_entries < number:
            pause()
            if monotonic_ns() > until:
                return index
        entry = ring + 8 * NUM_WORDS * ((number - 1) % num_entries)
        words = int64_at(entry, NUM_WORDS)
        for field in range(FIELDS):
            words[1 + field] = commands[index, field]
        store_release(entry, number)
    return len(commands)
