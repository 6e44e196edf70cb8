"""What Ctrl-C does to a command: until it has started something that must be ended, it leaves at once.

Python raises KeyboardInterrupt wherever it happens to be. In the middle of an import that can be inside a
library which turns it into another error, or prints it and goes on; and as nothing has begun then, there is
nothing to clean up. A command that starts processes calls `raise_from_here_on` before, and cleans up after
them when KeyboardInterrupt comes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

INTERRUPTED = 130


def leave_at_once() -> None:
    """Let Ctrl-C end this process with one line; where it is ignored, as in the background, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_from_here_on() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as Python does by itself."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"anyep: interrupted\n")
    os._exit(INTERRUPTED)
