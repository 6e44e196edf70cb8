"""The CPU's communication stream: one worker thread per Buffer, started when it is first needed.

`run` does a piece of work in the caller's thread, after all work that was submitted before; `submit` hands it
to the worker, which runs concurrently with the caller (kernels release the GIL). Either way work is done in
the order of the calls.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from anyep import ending
from anyep.events import EventHandle

T = TypeVar("T")


class Stream(ending.Part):
    """Does work in order, in the caller's thread or in the worker."""

    def __init__(self) -> None:
        # A hook may be called in any thread: pieces of work never run at the same time.
        self._one_at_a_time = threading.RLock()
        self._work: queue.SimpleQueue[tuple[Callable[[], None], EventHandle] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._last: threading.Event | None = None
        self._unheard: EventHandle | None = None
        ending.register(self)

    def run(self, work: Callable[[], T]) -> T:
        """Do the work in this thread, after all earlier work is done."""
        self.synchronize()
        with self._one_at_a_time:
            return work()

    def submit(self, work: Callable[[], None]) -> EventHandle:
        """Do the work in the worker; the event completes when it is done, and carries its error."""
        if ending.has_begun() and (self._worker is None or not self._worker.is_alive()):
            # A handler that runs after the threads were ended: no worker is left to do it.
            event = EventHandle.pending()
            self._do(work, event)
            return event
        if self._worker is None:
            self._worker = threading.Thread(target=self._serve, name="anyep-stream", daemon=True)
            self._worker.start()
        event = EventHandle.pending()
        self._last = event.finished
        self._work.put((work, event))
        return event

    def synchronize(self) -> None:
        """Return when all submitted work is done. Its errors are raised by its events, not here."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def raise_unheard(self) -> None:
        """Raise the error of finished work whose event was never waited for, once."""
        event, self._unheard = self._unheard, None
        if event is not None and not event.was_waited_for:
            event.current_stream_wait()

    @property
    def is_idle(self) -> bool:
        return self._last is None or self._last.is_set()

    def close_after(self, work: Callable[[], None]) -> None:
        """Do a last piece of work after all others, then end the worker; returns without waiting."""
        self.submit(work)
        self._work.put(None)

    def close(self) -> None:
        """End the worker after its last work."""
        if self._worker is not None:
            self._work.put(None)
            # The garbage collector may drop a Buffer in any thread, the worker's own included.
            if self._worker is not threading.current_thread():
                self._worker.join()
            self._worker = None

    def is_working(self) -> bool:
        return not self.is_idle

    def join_at_end(self, until: float) -> None:
        self._work.put(None)
        ending.join(self._worker, until)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, event = item
            self._do(work, event)
            # They hold references to what the call holds: drop them while waiting for more work.
            del work, item, event

    def _do(self, work: Callable[[], None], event: EventHandle) -> None:
        error: BaseException | None = None
        try:
            with self._one_at_a_time:
                work()
        except BaseException as caught:  # it is raised where the event is waited for
            error = caught
        if error is not None:
            self._unheard = event
        event.finish(error)
        # Its traceback holds this frame.
        del error
