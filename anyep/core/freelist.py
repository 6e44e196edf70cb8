"""Which parts of a heap are free: pure bookkeeping of offsets, for window heaps.

The lowest place that fits is taken, so memory that was used before is used again. Blocks begin at multiples
of 256 bytes, whatever was requested: with other alignments of a window's rows, a GPU wrote them up to 15 %
slower.

    >>> heap = FreeList(1000)
    >>> heap.allocate(100), heap.allocate(300)
    (0, 256)
    >>> heap.free(0)
    >>> heap.blocks()
    [(0, 256), (768, 232)]
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

ALIGNMENT_BYTES: Final = 256


class FreeList:
    """The free blocks of `num_bytes` bytes, in order of their offsets; neighbours are always merged."""

    def __init__(self, num_bytes: int) -> None:
        self._free = [(0, num_bytes)] if num_bytes else []
        self._used: dict[int, int] = {}

    def blocks(self) -> list[tuple[int, int]]:
        """Every free block as (offset, bytes)."""
        return list(self._free)

    def offers(self, most: int) -> list[tuple[int, int]]:
        """At most `most` free blocks: the lowest ones, and always the largest."""
        if len(self._free) <= most:
            return list(self._free)
        largest = max(self._free, key=lambda block: block[1])
        lowest = [block for block in self._free if block != largest][: most - 1]
        return sorted([*lowest, largest])

    def allocate(self, num_bytes: int) -> int | None:
        """The offset of a block of at least `num_bytes`, or None if there is none."""
        for index, (start, size) in enumerate(self._free):
            if size >= num_bytes:
                self._take(index, num_bytes)
                return start
        return None

    def allocate_at(self, offset: int, num_bytes: int) -> None:
        """Take the start of the free block at `offset`."""
        for index, (start, size) in enumerate(self._free):
            if start == offset and size >= num_bytes:
                self._take(index, num_bytes)
                return
        raise ValueError(f"there is no free block of {num_bytes} bytes at {offset}")

    def _take(self, index: int, num_bytes: int) -> None:
        """Take the start of the free block with this index."""
        start, size = self._free[index]
        # The last block of the heap may end anywhere.
        taken = min(-(-max(num_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, size)
        if size > taken:
            self._free[index] = (start + taken, size - taken)
        else:
            del self._free[index]
        self._used[start] = taken

    def free(self, offset: int) -> None:
        """Free the block that was allocated at `offset`."""
        blocks, end = self._free, offset + self._used.pop(offset)
        index = bisect_left(blocks, (offset, 0))
        if index < len(blocks) and blocks[index][0] == end:
            end += blocks.pop(index)[1]
        if index > 0 and sum(blocks[index - 1]) == offset:
            index -= 1
            offset = blocks.pop(index)[0]
        blocks.insert(index, (offset, end - offset))

    @property
    def used_bytes(self) -> int:
        return sum(self._used.values())


def first_fit(blocks: list[tuple[int, int]], num_bytes: int) -> int | None:
    """The offset of the first block that holds `num_bytes`; ranks also choose among a peer's offers this way.

    >>> first_fit([(0, 256), (768, 512)], 300)
    768
    """
    return next((offset for offset, size in blocks if size >= num_bytes), None)
