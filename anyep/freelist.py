"""Which parts of a heap are free: pure bookkeeping of offsets, for window heaps.

The lowest place that fits is taken, so that memory that was used before is used again.

    >>> heap = FreeList(1024)
    >>> heap.allocate(100), heap.allocate(200)
    (0, 128)
    >>> heap.free(0)
    >>> heap.blocks()
    [(0, 128), (384, 640)]
"""

from __future__ import annotations

from anyep.sizes import NUM_BUFFER_ALIGNMENT_BYTES, align


class FreeList:
    """The free blocks of `num_bytes` bytes, in order of their offsets; neighbours are always merged."""

    def __init__(self, num_bytes: int) -> None:
        self._free = [(0, num_bytes)] if num_bytes else []
        self._used: dict[int, int] = {}

    def blocks(self) -> list[tuple[int, int]]:
        """Every free block as (offset, bytes)."""
        return list(self._free)

    def offers(self, most: int) -> list[tuple[int, int]]:
        """At most `most` free blocks: the lowest ones, and the largest in any case."""
        if len(self._free) <= most:
            return list(self._free)
        largest = max(self._free, key=lambda block: block[1])
        lowest = [block for block in self._free if block != largest][: most - 1]
        return sorted([*lowest, largest])

    def allocate(self, num_bytes: int) -> int | None:
        """The offset of a block of at least `num_bytes`, or None where there is none."""
        offset = first_fit(self._free, num_bytes)
        if offset is not None:
            self.allocate_at(offset, num_bytes)
        return offset

    def allocate_at(self, offset: int, num_bytes: int) -> None:
        """Take the start of the free block at `offset`."""
        num_bytes = align(max(num_bytes, 1), NUM_BUFFER_ALIGNMENT_BYTES)
        for index, (start, size) in enumerate(self._free):
            if start == offset and size >= num_bytes:
                rest = [(offset + num_bytes, size - num_bytes)] if size > num_bytes else []
                self._free[index : index + 1] = rest
                self._used[offset] = num_bytes
                return
        raise ValueError(f"there is no free block of {num_bytes} bytes at {offset}")

    def free(self, offset: int) -> None:
        """Give back what was allocated at `offset`."""
        self._free.append((offset, self._used.pop(offset)))
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for start, size in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged

    @property
    def used_bytes(self) -> int:
        return sum(self._used.values())


def first_fit(blocks: list[tuple[int, int]], num_bytes: int) -> int | None:
    """The offset of the first block that holds `num_bytes`; every rank decides alike from a peer's offers.

    >>> first_fit([(0, 128), (384, 640)], 200)
    384
    """
    needed = align(max(num_bytes, 1), NUM_BUFFER_ALIGNMENT_BYTES)
    return next((offset for offset, size in blocks if size >= needed), None)
