"""Signals that arrived over the network, stored into this rank's memory."""

from __future__ import annotations

from anyep.backends.cpu.kernels.atomics import load_acquire, store_release
from anyep.backends.cpu.kernels.compiler import kernel


@kernel("int64(int64, int64[::1], int64[::1])")
def raise_words(base, offsets, values):
    """Raise the 64-bit word at each offset to its value, in order; a word that is already as high stays.

    Returns how many were raised. A process that acquires a raised word reads everything stored before it. No
    other thread or process may store to these words at the same time.

    Example:
        With words [5, 0], offsets [0, 8, 8] and values [4, 1, 2], the words become [5, 2], and 2 is returned.
    """
    num_raised = 0
    for index in range(offsets.shape[0]):
        address = base + offsets[index]
        if values[index] > load_acquire(address):
            store_release(address, values[index])
            num_raised += 1
    return num_raised
