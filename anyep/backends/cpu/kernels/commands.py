"""Takes the commands that kernels of a GPU write, out of all their rings (anyep/core/commands.py)."""

from __future__ import annotations

from numba import types

from anyep.backends.cpu.kernels.atomics import load_acquire, monotonic_ns, pause, store_release, usleep
from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.memory import int64_at
from anyep.core.commands import FIELDS, NUM_WORDS, TAKEN_WORDS


@inlined
def _take_from_ring(ring, taken_at, num_entries, commands, num_commands):
    """Copy the complete commands of one ring behind the first `num_commands`; returns how many there are
    then."""
    first = taken = load_acquire(taken_at)
    # No more than a ring holds: a writer that is as fast as this loop must not keep it from the other rings.
    while taken < first + num_entries:
        entry = ring + 8 * NUM_WORDS * (taken % num_entries)
        if load_acquire(entry) != taken + 1:
            break
        words = int64_at(entry, NUM_WORDS)
        for index in range(FIELDS):
            commands[num_commands, index] = words[1 + index]
        num_commands += 1
        taken += 1
    if taken > first:
        store_release(taken_at, taken)
    return num_commands


@kernel("int64(int64, int64, int64, int64[:, ::1], int64, int64)")
def take_commands(rings, num_writers, num_entries, commands, patience_ns, nap_us):
    """Take all commands that are complete, of every ring in turn; wait for the first one for `patience_ns`.

    Between two looks at all rings this sleeps for `nap_us`, unless that is 0. `rings` is followed by the
    taken counts. `commands` has room for all entries of all rings. Returns how many commands it has taken,
    0 if there was none in time.

    Example:
        With one ring of 2 entries, 3 commands taken, and the numbers [5, 4] in its entries: commands 4 and 5
        are taken, in this order, and the taken count becomes 5. With the numbers [3, 4], only command 4 is.
    """
    ring_bytes = 8 * NUM_WORDS * num_entries
    taken = rings + ring_bytes * num_writers
    until = monotonic_ns() + patience_ns
    while True:
        num_commands = 0
        for writer in range(num_writers):
            num_commands = _take_from_ring(
                rings + ring_bytes * writer,
                taken + 8 * TAKEN_WORDS * writer,
                num_entries,
                commands,
                num_commands,
            )
        if num_commands > 0 or monotonic_ns() >= until:
            return num_commands
        if nap_us > 0:
            usleep(types.uint32(nap_us))
        else:
            pause()
