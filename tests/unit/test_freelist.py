"""Free neighbours are one block: what was cut into small pieces can be had whole again."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from anyep.core.freelist import FreeList
from tests.support.depth import examples


@examples(50, deep=500)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_free_neighbours_are_merged(sizes: list[int], chance: Random) -> None:
    heap = FreeList(1 << 15)
    offsets = [heap.allocate(size) for size in sizes]
    chance.shuffle(offsets)
    for offset in offsets:
        assert offset is not None
        heap.free(offset)
        ends = [start + size for start, size in heap.blocks()]
        assert not {start for start, _ in heap.blocks()}.intersection(ends)
    assert heap.blocks() == [(0, 1 << 15)]
