"""The communication stream of a Buffer on a GPU: calls run on it in order, beside the caller's stream.

A call starts after the earlier work of the caller's stream (or after an event). Unless the call is
asynchronous, the caller's stream waits for it. The host waits for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, Final

import torch

from anyep.events import EventHandle, EventOverlap

RELAXED: Final = 2
"""The mode of a thread whose other work cannot harm the graph that is captured."""


class Stream:
    """A CUDA stream, and the events that tie it to the caller's."""

    def __init__(self) -> None:
        self.stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._device = torch.cuda.current_device()
        self._begin = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._known: dict[int, Any] = {}

    def current(self) -> Any:
        """The caller's stream. It is cached: torch's own query takes longer than a kernel launch."""
        raw = torch._C._cuda_getCurrentRawStream(self._device)
        stream = self._known.get(raw)
        if stream is None:
            stream = self._known[raw] = torch.cuda.current_stream()
        return stream

    def begin(self, previous: EventOverlap | None) -> None:
        """Make later work on the communication stream wait for the caller's stream, or for its event."""
        event = previous.event.moment if previous is not None and previous.event is not None else None
        if event is None:
            event = self._begin
            event.record(self.current())
        self.stream.wait_event(event)

    def end(self, run_async: bool) -> EventHandle | None:
        """Make the caller's stream wait for the launched work, or return an event that follows it."""
        if run_async:
            return EventHandle.on(self.stream)
        self._end.record(self.stream)
        self.current().wait_event(self._end)
        return None

    def is_capturing(self) -> bool:
        """Whether calls are recorded into a CUDA graph instead of being run."""
        capturing: bool = torch._C._cuda_isCurrentStreamCapturing()
        return capturing

    def graph(self) -> int:
        """The number of the graph that is being captured, different for each graph; 0 if it is not known."""
        status, number = ctypes.c_int(0), ctypes.c_uint64(0)
        with contextlib.suppress(OSError, AttributeError):
            ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
            stream = ctypes.c_void_p(self.current().cuda_stream)
            if ask(stream, ctypes.byref(status), ctypes.byref(number), None, None, None) == 0:
                return number.value
        return 0

    @staticmethod
    @contextlib.contextmanager
    def relaxed() -> Iterator[None]:
        """A context in which this thread may allocate memory of the host while it captures a graph."""
        mode = ctypes.c_int(RELAXED)
        exchange: Any = None
        with contextlib.suppress(OSError, AttributeError):
            exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
            exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            if exchange is not None:
                exchange(ctypes.byref(mode))

    @staticmethod
    def relax_this_thread() -> None:
        """Allow this thread to wait for events without harm to graphs that other threads capture."""
        relaxed = ctypes.c_int(RELAXED)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
