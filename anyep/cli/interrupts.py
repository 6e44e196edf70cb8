"""The effect of Ctrl-C on a command: it exits at once until it has started something that must be ended.

Python raises KeyboardInterrupt wherever it happens to be. During an import that can be inside a library that
turns it into another error, or prints it and continues; at that time nothing has started, so there is nothing
to clean up. A command that starts processes first calls `raise_from_here_on`, and cleans up after them on
KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

INTERRUPTED = 130


def leave_at_once() -> None:
    """Let Ctrl-C end this process with one line; if it is ignored, as in the background, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_from_here_on() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as Python does by default."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"anyep: interrupted\n")
    os._exit(INTERRUPTED)
