"""Work that is postponed until no graph is captured: while any thread captures one, CUDA frees no memory, and
torch aborts a process that tries.

A tensor or a Buffer may become garbage at any time and in any thread. Therefore memory is not freed at that
moment, but when a Buffer is destroyed or the next one is made.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

log = logging.getLogger("anyep")
_waiting: deque[Callable[[], object]] = deque()


def postpone(work: Callable[[], object]) -> None:
    """Keep a piece of work, and everything that it refers to, for later."""
    _waiting.append(work)


def do_postponed(synchronize: Callable[[], None]) -> None:
    """Run the postponed work, each piece after the device has finished all its work.

    >>> do_postponed(lambda: None)  # what others have left
    >>> postpone(lambda: print("freed"))
    >>> do_postponed(lambda: print("nothing runs"))
    nothing runs
    freed
    """
    while _waiting:
        try:
            # This raises while another thread captures a graph; freeing memory would then end the process.
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
            # Only logged: the caller did not cause the error.
            log.warning("what a Buffer left behind could not be given back: %s", error)
        # Objects that die with it postpone work of their own, which this loop then runs.
        del work
