"""What waits until no graph is captured: while one is, CUDA frees no memory, and torch ends a process that
tries.

A tensor or a Buffer may become garbage between any two calls, so also between two that a graph captures. What
would be done then is done when the next Buffer is made or destroyed, or windows grow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_waiting: deque[Callable[[], object]] = deque()


def postpone(work: Callable[[], object]) -> None:
    """Keep a piece of work, and all that it holds, for later."""
    _waiting.append(work)


def do_postponed() -> None:
    """Do what was postponed; not while a graph is captured."""
    for _ in range(len(_waiting)):
        try:
            work = _waiting.popleft()
        except IndexError:
            return  # another thread was faster
        work()
