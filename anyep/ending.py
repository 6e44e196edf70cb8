"""How a process ends whose Buffers nobody destroyed: with its own exit code, soon, and without a word.

Python stops daemon threads where they are when its interpreter shuts down, and a thread that is in native code
is unwound through it: where that is C++ (torch, NIXL), the process aborts. Memory that a kernel still reads may
be unmapped under it. So whatever has a thread, or calls that go on beside the caller, is a `Part`, and
registers here when it is made. At the end, when the program's own threads are done:

1. calls that are under way get `PATIENCE_S` to finish: peers may be about to read what they send;
2. whatever still waits stops waiting, and peers are told that this process has ended;
3. threads are ended, and work that has stopped may leave the GPU, within `JOIN_S`.

Nothing is freed: the operating system does that. Parts are known weakly. A forked child knows none of them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from typing import Final

PATIENCE_S: Final = 0.4
JOIN_S: Final = 0.4
LOOK_S: Final = 0.002
MAX_REASON_CHARACTERS: Final = 400


class Part:
    """What has to be ended; each kind of part does some of this."""

    def is_working(self) -> bool:
        """Whether calls are under way that could still be finished."""
        return False

    def stop_at_end(self, last_error: str) -> None:
        """Wait for no peer any more, and tell them; `last_error` may say why. Returns at once."""

    def join_at_end(self, until: float) -> None:
        """End the threads, but do not wait longer than until this time (on the clock of `time.monotonic`)."""


_parts: weakref.WeakSet[Part] = weakref.WeakSet()
_begun = False


def register(part: Part) -> None:
    """Let a part be ended with the process. It is forgotten when it dies."""
    _parts.add(part)


def has_begun() -> bool:
    """Whether the process ends: nothing may be started any more."""
    return _begun


def keep_for_ever(part: Part) -> None:
    """Let a part live until the process is gone, and with it what it holds: kernels may still use that."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))


def join(thread: threading.Thread | None, until: float) -> None:
    """Wait for a thread that was told to end, but not longer than until this time."""
    if thread is not None and thread is not threading.current_thread():
        thread.join(max(0.0, until - time.monotonic()))


def describe(error: BaseException) -> str:
    """The type and the text of an exception, on one line; whatever its own methods do.

    >>> describe(ValueError("boom")), describe(KeyboardInterrupt())
    ('ValueError: boom', 'KeyboardInterrupt')
    """
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its text cannot be had)"
    name = type(error).__name__
    return f"{name}: {text}"[:MAX_REASON_CHARACTERS] if text else name


def end_process() -> None:
    """End all parts. Python calls it when the threads of the program are done that are no daemons."""
    global _begun  # noqa: PLW0603 - there is one process
    _begun = True
    parts = list(_parts)
    try:
        until = time.monotonic() + PATIENCE_S
        while any(part.is_working() for part in parts) and time.monotonic() < until:
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        pass  # it can end at once
    last_error = _last_uncaught()
    for part in parts:
        part.stop_at_end(last_error)
    until = time.monotonic() + JOIN_S
    for part in parts:
        part.join_at_end(until)


def _last_uncaught() -> str:
    """The exception that ended the program, or nothing. Python keeps it for debuggers."""
    error = getattr(sys, "last_value", None)
    return describe(error) if isinstance(error, BaseException) else ""


def _forget_in_child() -> None:
    """A forked child has none of the threads, and its parent goes on."""
    global _begun  # noqa: PLW0603
    _begun = False
    _parts.clear()


os.register_at_fork(after_in_child=_forget_in_child)
# Not `threading._register_atexit`: that comes before the program's own threads are joined, and those may still
# use Buffers.
atexit.register(end_process)
