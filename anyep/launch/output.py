"""Prints what the ranks of a program print, line by line, each line with its rank."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_PIPE_BYTES: Final = 2**20
"""The most bytes that a pipe can hold."""
MAX_LINE_BYTES: Final = 2**16
"""A line that has grown to this length is printed without waiting for its end."""
WRITE_BYTES: Final = 2**14
STUCK_S: Final = 1.0
"""If the launcher's output is not read for this long at the end, the rest of it is dropped."""
STDOUT: Final = 1
STDERR: Final = 2


class LinePrefixer:
    """Puts a prefix before each line of a stream that comes in pieces of any size.

    >>> prefixer = LinePrefixer("[rank 3] ")
    >>> prefixer.take(b"one\\ntw"), prefixer.take(b"o\\n"), prefixer.take(b"three"), prefixer.rest()
    (b'[rank 3] one\\n', b'[rank 3] two\\n', b'', b'[rank 3] three\\n')
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._unfinished = b""

    def take(self, piece: bytes) -> bytes:
        """The text to print now: whole lines, and a line that has become too long to wait for its end."""
        *lines, self._unfinished = (self._unfinished + piece).split(b"\n")
        printable = b"".join(self._prefix + line + b"\n" for line in lines)
        return printable + self.rest() if len(self._unfinished) >= MAX_LINE_BYTES else printable

    def rest(self) -> bytes:
        """The last line, if the stream ended without a newline."""
        line, self._unfinished = self._unfinished, b""
        return self._prefix + line + b"\n" if line else b""


@dataclass(frozen=True)
class _Stream:
    """One output of one rank, and where it goes."""

    target: int
    prefixer: LinePrefixer


class Printer(threading.Thread):
    """Prints what the ranks print, line by line.

    It is a separate thread: if the launcher's output is not read, a write blocks, and the job must still be
    able to notice failures and signals.
    """

    def __init__(self, on_broken_output: Callable[[], None]) -> None:
        super().__init__(name="anyep-printer", daemon=True)
        self.output_is_broken = False
        self._on_broken_output = on_broken_output
        self._streams: dict[int, _Stream] = {}
        self._num_written = 0
        self._given_up = False
        self._finish = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._finish, select.POLLIN)

    def add(self, source: int, target: int, prefix: str) -> None:
        """Print `source`, the end of a pipe, to `target`. Call before start()."""
        os.set_blocking(source, False)
        self._streams[source] = _Stream(target, LinePrefixer(prefix))
        self._poll.register(source, select.POLLIN)

    def run(self) -> None:
        try:
            while self._streams:
                ready = [descriptor for descriptor, _ in self._poll.poll()]
                if self._finish in ready:
                    break
                for source in ready:
                    self._pump(source)
            # All ranks have ended, and one read empties a pipe. Waiting for the end of the pipe could take
            # forever: a process that left the rank's group may hold it open.
            for source in list(self._streams):
                self._pump(source)
            for stream in self._streams.values():
                self._write(stream.target, stream.prefixer.rest())
        except OSError:
            self.output_is_broken = True
            if not self._given_up:
                self._on_broken_output()

    def finish(self) -> None:
        """Print the remaining output of ranks that have ended, unless it is not read."""
        os.eventfd_write(self._finish, 1)
        num_written = -1
        while self.is_alive() and num_written != self._num_written:
            num_written = self._num_written
            self.join(STUCK_S)
        self._given_up = self.is_alive()
        if not self._given_up:
            os.close(self._finish)

    def _pump(self, source: int) -> None:
        stream = self._streams[source]
        try:
            piece = os.read(source, MAX_PIPE_BYTES)
        except BlockingIOError:
            return
        if not piece:
            self._poll.unregister(source)
            del self._streams[source]
        self._write(stream.target, stream.prefixer.take(piece) if piece else stream.prefixer.rest())

    def _write(self, target: int, text: bytes) -> None:
        while text:
            try:
                # In small parts, to distinguish a slow reader from one that does not read.
                num_bytes = os.write(target, text[:WRITE_BYTES])
            except BlockingIOError:
                # Another program left the terminal in non-blocking mode.
                select.select([], [target], [])
                continue
            if self._given_up:
                raise BrokenPipeError
            text = text[num_bytes:]
            self._num_written += num_bytes
