"""What waits until no graph is captured: while one is, in whatever thread, CUDA frees no memory, and torch
ends a process that tries.

A tensor or a Buffer may become garbage at any time and in any thread. So nothing is freed where it dies, but
when a Buffer is destroyed or the next one is made.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

log = logging.getLogger("anyep")
_waiting: deque[Callable[[], object]] = deque()


def postpone(work: Callable[[], object]) -> None:
    """Keep a piece of work, and all that it holds, for later."""
    _waiting.append(work)


def do_postponed(synchronize: Callable[[], None]) -> None:
    """Do what was postponed, each piece when the device is done with all that it was given.

    >>> do_postponed(lambda: None)  # what others have left
    >>> postpone(lambda: print("freed"))
    >>> do_postponed(lambda: print("nothing runs"))
    nothing runs
    freed
    """
    while _waiting:
        try:
            # While another thread captures a graph it raises, and to free memory would end the process.
            synchronize()
            work = _waiting.popleft()
        except IndexError:
            return  # another thread was faster
        except Exception as error:
            log.warning("memory of Buffers that are gone is freed later, since CUDA says now: %s", error)
            return
        try:
            work()
        except Exception as error:
            # Whoever comes by has nothing to do with it.
            log.warning("what a Buffer left behind could not be given back: %s", error)
        # What dies with it is postponed, too, and its turn comes now.
        del work
