"""More threads for one rank, if cores outnumber ranks: a range of work is split into equal parts."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from itertools import pairwise

from anyep import ending

Work = Callable[[int, int], object]


def parts_of(count: int, num_parts: int) -> list[tuple[int, int]]:
    """Split range(count) into at most `num_parts` contiguous parts of nearly equal size; none is empty.

    >>> parts_of(7, 3), parts_of(2, 4), parts_of(0, 2)
    ([(0, 2), (2, 4), (4, 7)], [(0, 1), (1, 2)], [])
    """
    num_parts = min(num_parts, count)
    bounds = [count * index // num_parts for index in range(num_parts + 1)] if num_parts else [0]
    return list(pairwise(bounds))


class Team(ending.Part):
    """Runs a kernel over the parts of a range, one part per thread; the caller's thread takes the first.

    `concurrent.futures` is not used: its threads take no more work once the main thread has ended, but other
    threads of a program may go on.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._waiting: deque[_Part] = deque()
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """One True for each waiting part; False ends a helper."""
        self._helpers: list[threading.Thread] = []
        ending.register(self)

    def run(self, work: Work, count: int, *, worth_splitting: bool = True) -> None:
        """Call `work(first, end)` for every part of range(count) and wait for all."""
        if self.num_threads == 1 or not worth_splitting:
            if count:
                work(0, count)
            return
        (first, *others) = parts_of(count, self.num_threads) or [(0, 0)]
        parts = [_Part(work, *part) for part in others]
        self._start_helpers()
        self._waiting.extend(parts)
        try:
            for _ in parts:
                self._bell.put(True)
            if first[1]:
                work(*first)
        finally:
            # Parts that no helper has taken yet are done here: all of them, if the helpers have ended.
            while _run_next(self._waiting):
                pass
            _wait_for(parts)
        error = next((part.error for part in parts if part.error is not None), None)
        del parts
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback holds this frame, and with it the frames of all callers.
            del error

    def _start_helpers(self) -> None:
        if not self._helpers:
            self._helpers = [
                # They hold the queues but not the team: a team that is garbage-collected can end them.
                threading.Thread(
                    target=_help, args=(self._bell, self._waiting), name=f"anyep-team-{index}", daemon=True
                )
                for index in range(1, self.num_threads)
            ]
            for helper in self._helpers:
                helper.start()

    def close(self) -> None:
        """End the helpers after the parts that still wait; returns without waiting for them."""
        for _ in self._helpers:
            self._bell.put(False)

    def join_at_end(self, until: float) -> None:
        self.close()
        for helper in self._helpers:
            ending.join(helper, until)

    def __del__(self) -> None:
        self.close()


class _Part:
    """A part of a range: its work, whether it is done, and its error."""

    def __init__(self, work: Work, first: int, end: int) -> None:
        self.is_done = False
        self.done = threading.Lock()
        """Held until the part is done."""
        self.done.acquire()
        self.error: BaseException | None = None
        self._work = work
        self._first, self._end = first, end

    def run(self) -> None:
        try:
            self._work(self._first, self._end)
        except BaseException as error:  # it is raised where the parts are waited for
            self.error = error
        finally:
            self.is_done = True
            self.done.release()


def _wait_for(parts: list[_Part]) -> None:
    """Return when all are done. Ctrl-C is raised only then: helpers read and write this memory until then."""
    interruption: BaseException | None = None
    for part in parts:
        while not part.is_done:
            try:
                part.done.acquire()
            except BaseException as error:
                interruption = interruption or error
    if interruption is not None:
        raise interruption


def _run_next(waiting: deque[_Part]) -> bool:
    """Take the part that has waited longest, and do it; returns whether there was one."""
    try:
        part = waiting.popleft()
    except IndexError:
        return False
    part.run()
    return True


def _help(bell: queue.SimpleQueue[bool], waiting: deque[_Part]) -> None:
    while bell.get():
        _run_next(waiting)
