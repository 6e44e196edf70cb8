"""The communication stream of a Buffer on a GPU: calls run on it in their order, beside the caller's own.

A call begins after what the caller's stream was given before (or after an event), and unless it is
asynchronous, the caller's stream goes on after it. The host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from anyep.events import EventHandle, EventOverlap


class Stream:
    """A CUDA stream, and the events that tie it to the caller's."""

    def __init__(self) -> None:
        self.stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._begin = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self, previous: EventOverlap | None) -> None:
        """Let what comes wait for the caller's stream, or for an event of his."""
        event = previous.event.moment if previous is not None and previous.event is not None else None
        if event is None:
            event = self._begin
            event.record(torch.cuda.current_stream())
        self.stream.wait_event(event)

    def end(self, run_async: bool) -> EventHandle | None:
        """Let the caller's stream wait for what was launched; or give him an event that comes after it."""
        if run_async:
            return EventHandle.on(self.stream)
        self._end.record(self.stream)
        torch.cuda.current_stream().wait_event(self._end)
        return None

    def is_capturing(self) -> bool:
        """Whether calls are recorded into a CUDA graph instead of being run."""
        return torch.cuda.is_current_stream_capturing()
