"""A rank's window heap: memory that results live in, lent to tensors and taken back when they die."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from anyep.freelist import FreeList


class _Lease:
    """A window that some tensors share; it goes back to its heap with the last of them."""

    def __init__(self, returned: deque[int], offset: int, num_holders: int) -> None:
        self._returned = returned
        self._offset = offset
        # Popping is atomic, so tensors may die in several threads at once.
        self._others = [None] * (num_holders - 1)

    def give_up(self) -> None:
        """One tensor less. Called by the garbage collector, at any time and in any thread."""
        try:
            self._others.pop()
        except IndexError:
            self._returned.append(self._offset)


class WindowHeap:
    """The windows of one rank, in a block that its peers write to and read from."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self._free_list = FreeList(block.num_bytes)
        # Tensors die whenever they like; their windows wait here until the next call looks.
        self._returned: deque[int] = deque()
        # The caller takes windows for calls to come while the stream stages those of earlier ones.
        self._lock = threading.Lock()

    def offers(self, most: int) -> list[tuple[int, int]]:
        with self._lock:
            self._take_back()
            return self._free_list.offers(most)

    def allocate(self, num_bytes: int) -> int | None:
        with self._lock:
            self._take_back()
            return self._free_list.allocate(num_bytes)

    def allocate_at(self, offset: int, num_bytes: int) -> None:
        with self._lock:
            self._free_list.allocate_at(offset, num_bytes)

    def free(self, offset: int) -> None:
        with self._lock:
            self._free_list.free(offset)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return self._free_list.used_bytes

    def lend(self, window: int, parts: list[tuple[int, tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
        """Tensors over the window allocated at `window`; each part is (offset in it, shape, dtype).

        The window returns when all of them are gone; empty ones do not count.
        """
        lent = [shape for _, shape, _ in parts if 0 not in shape]
        lease = _Lease(self._returned, window, len(lent))
        if not lent:
            self.free(window)
        return [
            self.block.lend(window + offset, shape, dtype, lease.give_up)
            if 0 not in shape
            else torch.empty(shape, dtype=dtype)
            for offset, shape, dtype in parts
        ]

    def _take_back(self) -> None:
        while self._returned:
            self._free_list.free(self._returned.popleft())
