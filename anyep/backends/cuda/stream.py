"""The communication stream of a Buffer on a GPU: calls run on it in order, beside the caller's stream.

A call starts after the earlier work of the caller's stream (or after an event). Unless the call is
asynchronous, the caller's stream waits for it. The host waits for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

from anyep.backends.cpu.kernels.driver_calls import NO_STREAM
from anyep.backends.cuda import driver
from anyep.backends.cuda.moment import Moment
from anyep.events import EventHandle, EventOverlap


class Stream:
    """A CUDA stream, and the events that tie it to the caller's."""

    def __init__(self) -> None:
        self.stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._device = torch.cuda.current_device()
        self._begin = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        for event in (self._begin, self._end):
            # Torch makes an event when it is first recorded.
            event.record(self.stream)
        self._raw_begin, self._raw_end = self.raw_event(self._begin), self.raw_event(self._end)
        self.raw = int(self.stream.cuda_stream)
        """The stream as the driver knows it."""
        self._known: dict[int, Any] = {}
        self._whole_calls: dict[int, Moment] = {}
        self._beside: dict[int, Moment] = {}

    def current(self) -> Any:
        """The caller's stream. It is cached: torch's own query takes longer than a kernel launch."""
        raw = torch._C._cuda_getCurrentRawStream(self._device)
        stream = self._known.get(raw)
        if stream is None:
            stream = self._known[raw] = torch.cuda.current_stream()
        return stream

    def caller(self) -> int:
        """The caller's stream as the driver knows it."""
        raw: int = torch._C._cuda_getCurrentRawStream(self._device)
        return raw

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

    def moment(self, begins: bool, ends: bool, previous: EventOverlap | None = None) -> Moment:
        """When a batch runs on the communication stream: it `begins` a call as `begin` says; and if it `ends`
        one, the caller's stream waits for it."""
        caller: int = torch._C._cuda_getCurrentRawStream(self._device)
        waits_for = 0
        if begins and previous is not None and previous.event is not None:
            waits_for = previous.event.raw
        return Moment(
            self.raw,
            self._raw_begin if begins and not waits_for else 0,
            caller,
            waits_for,
            self._raw_end if ends else 0,
            caller if ends else NO_STREAM,
        )

    def whole_call(self) -> Moment:
        """The same as `moment(True, True)`, for calls that are made often."""
        caller: int = torch._C._cuda_getCurrentRawStream(self._device)
        found = self._whole_calls.get(caller)
        if found is None:
            found = self._whole_calls[caller] = self.moment(True, True)
        return found

    def on(self, stream: Any) -> Moment:
        """A batch runs on another stream of torch, after its earlier work."""
        return Moment(stream.cuda_stream)

    @staticmethod
    def raw_event(event: Any) -> int:
        """An event of torch that was recorded, as the driver knows it."""
        return int(event.cuda_event)

    def beside_caller(self) -> Moment:
        """A batch runs on the caller's stream. Calls of this Buffer wait for it, even those that wait for an
        earlier event of the caller and not for its stream."""
        caller: int = torch._C._cuda_getCurrentRawStream(self._device)
        found = self._beside.get(caller)
        if found is None:
            moment = Moment(caller, event_after=self._raw_begin, stream_after=self.raw)
            found = self._beside[caller] = moment
        return found

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
    def relax_this_thread() -> None:
        """Allow this thread to wait for events without harm to graphs that other threads capture."""
        driver.relax_this_thread()
