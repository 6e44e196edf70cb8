"""Shows the progress of a long compilation: one changing line on a terminal, a few lines in a file.

    progress = CompileProgress(sys.stderr)
    for done in range(15):
        progress.show(done, 14)
        ...
    progress.finish()

Nothing is printed in the first second: short compilations stay silent.
"""

from __future__ import annotations

import time
from typing import Final, TextIO

QUIET_S: Final = 1.0
"""Shorter compilations print nothing."""
FIRST_PAUSE_S: Final = 5.0
"""Time between the first two lines where a line cannot be rewritten; each later pause is twice as long."""


def compile_sentence(num_done: int, num_kernels: int) -> str:
    """
    >>> compile_sentence(5, 14)
    'compiling 14 kernels, once per version: 5/14'
    """
    plural = "" if num_kernels == 1 else "s"
    return f"compiling {num_kernels} kernel{plural}, once per version: {num_done}/{num_kernels}"


class CompileProgress:
    """Prints to one stream how many kernels have been compiled."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._started = time.monotonic()
        self._next_line_at = self._started + QUIET_S
        self._pause_s = FIRST_PAUSE_S
        self._has_begun = False

    def show(self, num_done: int, num_kernels: int) -> None:
        """Show that `num_done` of `num_kernels` are done."""
        now = time.monotonic()
        if now - self._started < QUIET_S:
            return
        text = f"AnyEP: {compile_sentence(num_done, num_kernels)}"
        if self._is_terminal:
            self._print("\r" + text)
        elif now >= self._next_line_at or num_done == num_kernels:
            self._print(text + "\n")
            self._next_line_at = now + self._pause_s
            self._pause_s *= 2
        self._has_begun = True

    def finish(self) -> None:
        """End the line."""
        if self._is_terminal and self._has_begun:
            self._print("\n")

    def _print(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The stream has no reader: no reason to fail.
            self._is_terminal = False
