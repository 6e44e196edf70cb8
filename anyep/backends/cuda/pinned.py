"""Memory of the host that kernels read and write.

A kernel reads a call's header when it runs, which may be long after the host launched it. `Headers` gives
each call its own place. Most places are in a circular array and are reused when the calls of a whole page are
over. A call that is captured in a graph may be replayed at any time, so it gets a permanent place; there are
as many of these as memory allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
NUM_PAGES = 4
HEADERS_PER_PAGE = 256


def pinned_words(count: int) -> Array:
    """64-bit words, all 0, at the same address for the host and for kernels."""
    words = torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=torch.cuda.is_available())
    # The array keeps the tensor, and therefore its memory, alive.
    array: Array = words.numpy()
    return array


class Headers:
    """Places for headers of `num_words` words. `now` gives an event of the stream that the calls run on."""

    def __init__(self, num_words: int, new_words: Callable[[int], Array], now: Callable[[], Any]) -> None:
        self._now = now
        self._new_words = new_words
        self._num_words = num_words
        self._ring = new_words(NUM_PAGES * HEADERS_PER_PAGE * num_words).reshape(-1, num_words)
        self._place_bytes = 8 * num_words
        self._num_used = 0
        """Counted from the beginning of the array."""
        self._over: list[Any] = [None] * NUM_PAGES
        """By page: the event after which its places are free."""
        self._for_good: list[Array] = []
        """Pages of permanent places; the last one has free places."""
        self._num_for_good = 0
        self.memory = self._ring.reshape(-1).data.cast("B")
        """The places that are reused, as bytes."""
        self.address = int(self._ring.ctypes.data)
        """Where a kernel finds them."""

    def keep(self, header: Array | Sequence[int], for_good: bool) -> int:
        """Store a header; return the address where a kernel finds it."""
        if for_good:
            index = self._num_for_good % HEADERS_PER_PAGE
            if index == 0:
                page = self._new_words(HEADERS_PER_PAGE * self._num_words)
                self._for_good.append(page.reshape(-1, self._num_words))
            self._num_for_good += 1
            self._for_good[-1][index] = header
            return int(self._for_good[-1].ctypes.data) + 8 * self._num_words * index
        at = self.next_place()
        self._ring[at // self._place_bytes] = header
        return self.address + at

    def next_place(self) -> int:
        """A place for a header that a call uses once: its offset in `memory`."""
        index = self._num_used
        if index % HEADERS_PER_PAGE == 0:
            index = self._open_page(index // HEADERS_PER_PAGE % NUM_PAGES)
        self._num_used = index + 1
        return index * self._place_bytes

    def _open_page(self, page: int) -> int:
        """Wait until the calls of a page are over; returns its first place."""
        self._over[page - 1] = self._now()
        if self._over[page] is not None:
            self._over[page].synchronize()
        return page * HEADERS_PER_PAGE
