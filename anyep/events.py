"""Events of streams: `EventHandle` is one event, `EventOverlap` is what calls return.

A call that has finished when it returns has no event to wait for: its `EventOverlap.event` is None. A call
that runs beside the caller (`async_finish`) has an event. On the CPU, `current_stream_wait` waits for it and
raises the call's error; on a GPU, it makes the current CUDA stream wait, and the host continues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from anyep.errors import InvalidCall
from anyep.requirements import check_requirements

check_requirements()


class EventHandle:
    """A point in a stream. If a caller makes it, it means "now": on a GPU, the current point of the current
    stream; on the CPU, everything that the caller did has happened already."""

    def __init__(self) -> None:
        self.finished: threading.Event | None = None
        """Set when the event has occurred; None if it occurred before any wait was possible."""
        self.was_waited_for = False
        self.moment: Any = None
        """A CUDA event, if CUDA is in use."""
        self._error: BaseException | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._record(torch.cuda.current_stream())

    @classmethod
    def pending(cls) -> EventHandle:
        """An event that occurs when `finish` is called."""
        event = cls.__new__(cls)
        event.finished = threading.Event()
        event.was_waited_for = False
        event.moment = None
        event._error = None
        return event

    @classmethod
    def on(cls, stream: Any) -> EventHandle:
        """The current point of a CUDA stream.

        Args:
            stream: The CUDA stream.
        """
        event = cls.pending()
        event.finished = None
        event._record(stream)
        return event

    def _record(self, stream: Any) -> None:
        self.moment = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.moment.record(stream)

    def finish(self, error: BaseException | None = None) -> None:
        """Mark a pending event as occurred.

        Args:
            error: What the work before the event raised, for those who wait for it; None if all went well.
        """
        assert self.finished is not None
        self._error = error
        self.finished.set()

    @property
    def raw(self) -> int:
        """The CUDA event, as the driver knows it; 0 if there is none."""
        return int(self.moment.cuda_event) if self.moment is not None else 0

    @property
    def is_finished(self) -> bool:
        return self.finished is None or self.finished.is_set()

    def current_stream_wait(self) -> None:
        """Return when the event has occurred; raise the error of the work before it."""
        if self.moment is not None:
            torch.cuda.current_stream().wait_event(self.moment)
        if self.finished is not None:
            self.finished.wait()
        self.was_waited_for = True
        if self._error is not None:
            raise self._error


class EventOverlap:
    """An event, and the tensors that must live until it has occurred. Use it in `with` to overlap work:

    ```
    with event:
        compute_something_else()
    # here the event has occurred
    ```

    Args:
        event: The event; None where nothing is to be waited for.
        extra_tensors: Any object; it is kept as long as this one.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hook: Callable[[], Any] | None = None
        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Return when the event has occurred; at once if there is none.

        Args:
            release_handle: Forget the event and the tensors afterwards.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = self.extra_tensors = None

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Let the next `current_stream_wait` call a function, once, after it has waited.

        Args:
            hook: The function; there can be one at a time.
        """
        if self._hook is not None:
            raise InvalidCall("this event has a hook already: wait for it before another one is registered")
        self._hook = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """The same event, for `with event(release_handle=True):`.

        Args:
            release_handle: Forget the event and the tensors at the end of the block.
        """
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        releases, self._releases = self._releases, False
        self.current_stream_wait(releases)
