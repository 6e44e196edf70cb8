"""More threads for one rank, where cores outnumber ranks: a range of work is cut into equal parts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise


def parts_of(count: int, num_parts: int) -> list[tuple[int, int]]:
    """Cut range(count) into at most `num_parts` contiguous parts of nearly equal size; none is empty.

    >>> parts_of(7, 3), parts_of(2, 4), parts_of(0, 2)
    ([(0, 2), (2, 4), (4, 7)], [(0, 1), (1, 2)], [])
    """
    num_parts = min(num_parts, count)
    bounds = [count * index // num_parts for index in range(num_parts + 1)] if num_parts else [0]
    return list(pairwise(bounds))


class Team:
    """Runs a kernel over the parts of a range, one part per thread; the caller's thread takes the first."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._helpers = (
            ThreadPoolExecutor(num_threads - 1, thread_name_prefix="anyep-team") if num_threads > 1 else None
        )

    def run(self, work: Callable[[int, int], object], count: int, *, worth_splitting: bool = True) -> None:
        """Call `work(first, end)` for every part of range(count) and wait for all."""
        if self._helpers is None or not worth_splitting:
            if count:
                work(0, count)
            return
        (first, *others) = parts_of(count, self.num_threads) or [(0, 0)]
        futures = [self._helpers.submit(work, *part) for part in others]
        try:
            if first[1]:
                work(*first)
        finally:
            # Also after Ctrl-C: what the helpers read and write must live until they are done.
            wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)
