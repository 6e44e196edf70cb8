"""The effect of Ctrl-C on a command: it exits at once until it has started something that must be ended.

Python raises KeyboardInterrupt wherever it happens to be. During an import that can be inside a library that
turns it into another error, or prints it and continues; at that time nothing has started, so there is nothing
to clean up. A command that starts processes first calls `raise_from_here_on`, and cleans up after them on
KeyboardInterrupt. From then on SIGTERM does the same: by default it would leave the folder
in /tmp by which ranks are started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

INTERRUPTED = 130
TERMINATED = 143
_COMMANDS: set[int] = set()
"""This process, if it is a command. A library must not change what SIGTERM does to a program."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, in a command that has something to clean up."""


def leave_at_once() -> None:
    """Let Ctrl-C end this process with one line; if it is ignored, as in the background, it stays ignored."""
    _COMMANDS.add(os.getpid())
    if signal.getsignal(signal.SIGTERM) is _raise_terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_from_here_on() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as Python does by default, and in a command SIGTERM, too."""
    if os.getpid() in _COMMANDS and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _raise_terminated)
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _raise_terminated(number: int, frame: object) -> None:
    # Once: `timeout`, for one, sends it twice, and the clean-up is not to be interrupted.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def _leave(number: int, frame: object) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"anyep: interrupted\n")
    os._exit(INTERRUPTED)
