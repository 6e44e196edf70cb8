"""The windows of a rank on a GPU: pieces of symmetric memory, lent to results until the last of them dies.

A tensor may die on the host before the kernels that read it have run. Its window is reused only after the
stream that was current at its death, and the communication stream, have reached that point. A window that was
lent while a graph was captured stays with that graph, which may be replayed at any time: only later calls in
the same graph may reuse it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from anyep.backends.cpu.kernels.driver_calls import NO_STREAM
from anyep.backends.cuda.constants import WINDOW_BLOCK_BITS
from anyep.backends.cuda.gpu import Gpu, Use
from anyep.backends.cuda.heap import SymmetricBlock
from anyep.backends.cuda.plain import Part
from anyep.core.freelist import FreeList

WITHIN: Final = (1 << WINDOW_BLOCK_BITS) - 1
"""The bits of an offset that say where in its block a window begins."""
Uses = Sequence[Any]
"""How the uses of the tensors over a window ended, each a `Use`; or None for one that died while a graph was
captured."""


class GpuWindows:
    """Blocks of windows; the number of a block is stored above the lowest `WINDOW_BLOCK_BITS` bits of an
    offset."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._blocks: list[SymmetricBlock] = []
        self._free_lists: list[FreeList] = []
        self._returned: deque[tuple[int, Uses]] = deque()
        """Windows whose tensors are gone, with the end of each tensor's use."""
        self.followed = NO_STREAM
        """The stream that the call under way follows, if it waits for its caller's stream: tensors whose use
        ended there need no other wait."""
        self._of_graphs: dict[int, tuple[int, int]] = {}
        """By window that no tensor uses any more: the graph that it belongs to, and its bytes."""
        self._lock = threading.Lock()

    def add(self, block: SymmetricBlock) -> int:
        """Add a block of windows; return the offset where it begins."""
        self._blocks.append(block)
        self._free_lists.append(FreeList(block.num_bytes))
        return (len(self._blocks) - 1) << WINDOW_BLOCK_BITS

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self._blocks)

    def addresses(self) -> list[list[int]]:
        """The addresses of each rank's blocks in this process, by block."""
        return [block.addresses for block in self._blocks]

    def offers(self, most: int, is_captured: bool | None = None) -> list[tuple[int, int]]:
        """Free windows as (offset, bytes), beginning with those of the newest block, which is the largest.

        `is_captured` says whether a graph is captured, where the caller has asked already; so in the other
        methods.
        """
        with self._lock:
            self._take_back(is_captured)
            if len(self._blocks) == 1:
                return self._free_lists[0].offers(most)
            found: list[tuple[int, int]] = []
            for index in reversed(range(len(self._blocks))):
                first = index << WINDOW_BLOCK_BITS
                room = most - len(found)
                if room:
                    found += [(first + offset, size) for offset, size in self._free_lists[index].offers(room)]
            return found

    def allocate(self, num_bytes: int, is_captured: bool | None = None) -> int | None:
        with self._lock:
            self._take_back(is_captured)
            if self._of_graphs and is_captured is not False and self._gpu.stream.is_capturing():
                graph = self._gpu.stream.graph()
                for window, (owner, size) in self._of_graphs.items():
                    if graph == owner != 0 and size >= num_bytes:
                        del self._of_graphs[window]
                        # The new user of the window runs after all earlier readers in this graph.
                        self._gpu.stream.begin(None)
                        return window
            for index in reversed(range(len(self._blocks))):
                offset = self._free_lists[index].allocate(num_bytes)
                if offset is not None:
                    return (index << WINDOW_BLOCK_BITS) + offset
            return None

    def allocate_at(self, offset: int, num_bytes: int) -> None:
        with self._lock:
            self._free_lists[offset >> WINDOW_BLOCK_BITS].allocate_at(offset & WITHIN, num_bytes)

    def free(self, offset: int) -> None:
        with self._lock:
            self._free_lists[offset >> WINDOW_BLOCK_BITS].free(offset & WITHIN)

    def give_back(self, window: int, num_bytes: int) -> None:
        """Free a window that only calls on the communication stream have used."""
        if self._gpu.stream.is_capturing():
            self._of_graphs[window] = (self._gpu.stream.graph(), num_bytes)
        else:
            self.free(window)

    def lend(
        self, window: int, num_bytes: int, parts: Sequence[Part], is_captured: bool | None = None
    ) -> list[torch.Tensor]:
        """Tensors in a window, each with its own storage, because a torch custom operator may not return
        views of one storage. The window is returned when the tensors and their views are gone."""
        block = self._blocks[window >> WINDOW_BLOCK_BITS]
        start = window & WITHIN
        if is_captured is not False and self._gpu.stream.is_capturing():
            keep = (self._gpu.stream.graph(), num_bytes)
            loan = _Loan(len(parts), lambda: None, lambda _: self._of_graphs.__setitem__(window, keep))
            on_death: Callable[[], None] = loan.one_died
        elif len(parts) == 1:
            on_death = partial(self._came_back, window)
        else:
            came_back = self._returned.append
            on_death = _Loan(
                len(parts), self._gpu.end_of_use, lambda uses: came_back((window, uses))
            ).one_died
        return [block.lend(start + offset, shape, dtype, on_death) for offset, shape, dtype in parts]

    def _came_back(self, window: int) -> None:
        """The only tensor over a window is gone."""
        self._returned.append((window, (self._gpu.end_of_use(),)))

    def tensor(self, window: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a window that is not lent."""
        block = self._blocks[window >> WINDOW_BLOCK_BITS]
        found: torch.Tensor = block.tensor(window & WITHIN, shape, dtype)
        return found

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """The offset of a tensor's data in the windows, or None if it lies elsewhere."""
        return self.place_of(tensor.data_ptr()) if tensor.numel() else None

    def place_of(self, address: int) -> int | None:
        """The offset of an address in the windows, or None if it lies elsewhere."""
        for index, block in enumerate(self._blocks):
            offset: int = address - block.address
            if 0 <= offset < block.num_bytes:
                return (index << WINDOW_BLOCK_BITS) + offset
        return None

    def fill_free(self, value: int) -> None:
        """Fill all free memory with a byte; for tests that detect reads of memory that was not written."""
        with self._lock:
            self._take_back()
            for block, free_list in zip(self._blocks, self._free_lists, strict=True):
                for offset, num_bytes in free_list.blocks():
                    block.tensor(offset, (num_bytes,), torch.uint8).fill_(value)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return sum(free_list.used_bytes for free_list in self._free_lists)

    def _take_back(self, is_captured: bool | None = None) -> None:
        if not self._returned or (is_captured is not False and self._gpu.stream.is_capturing()):
            return
        gpu, followed = self._gpu, self.followed
        while self._returned:
            window, uses = self._returned.popleft()
            if None in uses:
                # At least one of its tensors died while a graph was captured.
                continue
            for use in uses:
                if use.stream != followed:
                    gpu.wait_for_use(use)
                gpu.forget_use(use)
            self._free_lists[window >> WINDOW_BLOCK_BITS].free(window & WITHIN)


class _Loan:
    """The tensors over one window. They die one by one, at any time and in any thread."""

    def __init__(
        self, num_tensors: int, end_of_use: Callable[[], Use | None], on_end: Callable[[Uses], None]
    ) -> None:
        self._left = list(range(num_tensors))
        self._end_of_use = end_of_use
        self._uses: list[Use | None] = []
        self._on_end = on_end

    def one_died(self) -> None:
        """Record the end of a tensor's use; the loan ends with the last one."""
        self._uses.append(self._end_of_use())
        # Two threads may run this at once, but only one of them pops the 0.
        if self._left.pop() == 0:
            self._on_end(self._uses)
