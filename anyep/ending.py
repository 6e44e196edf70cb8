"""How a process ends if its Buffers were not destroyed: with its own exit code, soon, and silently.

When its interpreter shuts down, Python stops daemon threads wherever they are. A thread in native code is
unwound through it, and if that is C++ (torch, NIXL) the process aborts; or memory is unmapped that a kernel
still reads. So every object that has a thread, or calls that run beside the caller, is a `Part`, and
registers here when it is made. When the program and its own threads have ended, `end_process` does this:

1. Running calls get `FINISH_S` to finish: peers may be about to read what they send.
2. Calls that still wait stop waiting, and the peers are told that this process has ended.
3. Threads are joined, and kernels that were stopped may leave the GPU, within `JOIN_S`.

Nothing is freed; the operating system does that. Parts are held by weak references; a forked child has none.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Final

FINISH_S: Final = 0.4
JOIN_S: Final = 0.4
LOOK_S: Final = 0.002
MAX_REASON_CHARACTERS: Final = 400
log = logging.getLogger("anyep")


class Part:
    """An object that has to be ended with the process. Each kind of part overrides the methods it needs."""

    def is_working(self) -> bool:
        """Whether calls are running that could still finish."""
        return False

    def stop_at_end(self, last_error: str) -> None:
        """Stop waiting for peers, and tell them that this process ends. `last_error` is the exception that
        ended the program, or empty. Returns at once."""

    def join_at_end(self, until: float) -> None:
        """End the threads of this part; wait until this time of `time.monotonic` at most."""


_parts: weakref.WeakSet[Part] = weakref.WeakSet()
_begun = False


def register(part: Part) -> None:
    """End this part with the process, if the part still exists then."""
    _parts.add(part)


def has_begun() -> bool:
    """Whether the process is ending: no thread may be started any more."""
    return _begun


def keep_for_ever(part: Part) -> None:
    """Keep a part, and all that it holds, until the process has ended: kernels may still use its memory."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))


def join(thread: threading.Thread | None, until: float) -> None:
    """Wait for a thread that was told to end, until this time at most."""
    if thread is not None and thread is not threading.current_thread():
        thread.join(max(0.0, until - time.monotonic()))


def describe(error: BaseException) -> str:
    """The type and the text of an exception, shortened to one line; this never raises.

    >>> describe(ValueError("boom")), describe(KeyboardInterrupt())
    ('ValueError: boom', 'KeyboardInterrupt')
    """
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its text is not available)"
    name = type(error).__name__
    return f"{name}: {text}"[:MAX_REASON_CHARACTERS] if text else name


def end_process() -> None:
    """End all parts. Python calls this when all non-daemon threads of the program have ended."""
    global _begun  # noqa: PLW0603 - there is one process
    _begun = True
    parts = list(_parts)
    try:
        until = time.monotonic() + FINISH_S
        while any(_attempt(part.is_working) for part in parts) and time.monotonic() < until:
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        pass  # the user does not want to wait
    last_error = _last_uncaught()
    for part in parts:
        _attempt(partial(part.stop_at_end, last_error))
    until = time.monotonic() + JOIN_S
    for part in parts:
        _attempt(partial(part.join_at_end, until))


def _attempt(step: Callable[[], bool | None]) -> bool | None:
    """Do a step for one part. An error in it must not keep the other parts from ending."""
    try:
        return step()
    except Exception as error:
        log.debug("a part of a Buffer could not be ended with the process: %s", describe(error))
        return None


def _last_uncaught() -> str:
    """The last uncaught exception, which Python keeps for debuggers; empty if there was none."""
    error = getattr(sys, "last_value", None)
    return describe(error) if isinstance(error, BaseException) else ""


def _forget_in_child() -> None:
    """A forked child has none of its parent's threads, and must not speak for it."""
    global _begun  # noqa: PLW0603
    _begun = False
    _parts.clear()


os.register_at_fork(after_in_child=_forget_in_child)
# `threading._register_atexit` would be too early: non-daemon threads of the program continue after it, and
# may use Buffers.
atexit.register(end_process)
