"""Memory for results, lent to tensors and taken back when the tensors are freed.

`WindowHeap` is memory that peers write to and read from; `WarmMemory` is private to this rank.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from functools import partial
from typing import Any, Final

import torch

from anyep.core.freelist import FreeList

WORTH_REUSING_BYTES: Final = 1 << 16


class WindowHeap:
    """The windows of one rank, in a block that its peers write to and read from."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self._free_list = FreeList(block.num_bytes)
        # Tensors may be freed at any time; their windows wait here until the next call takes them back.
        self._returned: deque[int] = deque()
        # The caller allocates windows for later calls while the stream stages those of earlier calls.
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

    def lend(self, window: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the window at `window`; it is taken back when the tensor and its views are freed."""
        if 0 in shape:
            self.free(window)
            return torch.empty(shape, dtype=dtype, device="cpu")
        # Called by the garbage collector, at any time and in any thread: appending is all that is safe.
        tensor: torch.Tensor = self.block.lend(window, shape, dtype, partial(self._returned.append, window))
        return tensor

    def _take_back(self) -> None:
        while self._returned:
            self._free_list.free(self._returned.popleft())


class WarmMemory:
    """Uninitialised tensors; large ones reuse the memory of earlier results.

    Fresh memory is faulted in page by page, which takes longer than filling it.
    """

    def __init__(self, block: Any) -> None:
        self._heap = WindowHeap(block)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        offset = self._heap.allocate(num_bytes) if num_bytes >= WORTH_REUSING_BYTES else None
        if offset is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return self._heap.lend(offset, shape, dtype)
