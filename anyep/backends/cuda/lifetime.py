"""Ends the GPU part of a Buffer: after its kernels, and without hanging or aborting.

Some kernels are in graphs, or on the caller's streams. Memory is freed when none of them can run any more,
and never while a graph is captured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from anyep import ending
from anyep.backends.cuda.device_control import DeviceControl
from anyep.errors import InvalidCall

LOOK_S: Final = 0.002
"""The interval at which a thread checks whether the last calls of a dropped Buffer are over."""


class HostSide(Protocol):
    """The host's part, which has to be ended."""

    def stop(self) -> None: ...
    def close(self) -> None: ...
    def stop_at_end(self, last_error: str) -> None: ...


class Reporter(Protocol):
    """Watches the peers on behalf of the kernels."""

    def stop_watching(self) -> None: ...
    def close(self) -> None: ...


class LowLatencyPart(Protocol):
    """The part of low-latency mode that has to be ended."""

    def last_use(self) -> Any: ...
    def close(self) -> None: ...


class GpuLifetime(ending.Part):
    """Ends the calls and the memory of one rank on its GPU."""

    is_idle = False
    """Whether no call is running; always False, because a query could harm a graph that another thread
    captures."""

    def __init__(
        self,
        device_control: DeviceControl,
        reports: Reporter,
        control: HostSide,
        low_latency: LowLatencyPart | None,
        memory: object,
    ) -> None:
        """`memory` may still be used by kernels: it is kept until all calls are over."""
        self._device_control = device_control
        self._gpu = device_control.gpu
        self._reports = reports
        self._control = control
        self._low_latency = low_latency
        self._memory: object = memory
        self.free_what_died: Callable[[], None] = self._gpu.do_postponed
        """To be called after this object is closed and dropped."""
        self._closing: threading.Thread | None = None
        self._is_over = threading.Event()
        """Set when the process ends: threads stop waiting."""
        ending.register(self)

    def stop(self) -> None:
        """End the waits of calls that are still running."""
        self._control.stop()
        self._device_control.give_up()

    def check_can_close(self) -> None:
        """Raise an error while a graph is captured: calls cannot be waited for then."""
        if self._gpu.stream.is_capturing():
            raise InvalidCall(
                "a Buffer cannot be destroyed while a CUDA graph is captured: do it before or afterwards"
            )

    def close(self) -> None:
        """Finish the running calls of both modes; afterwards no kernel of a peer waits for this rank."""
        try:
            self._free()
        finally:
            self._report_closed()

    def close_later(self) -> None:
        """Close after all calls, without waiting for them."""
        if not self._gpu.may_record_events():
            self._gpu.postpone(self.close)
            return
        last_uses = [self._gpu.last_use(), self._gpu.now()]
        if self._low_latency is not None:
            last_uses.append(self._low_latency.last_use())

        def wait_and_report() -> None:
            self._gpu.stream.relax_this_thread()
            try:
                # Not `synchronize`: the interpreter must be able to end while this waits.
                while not all(last_use.query() for last_use in last_uses):
                    if self._is_over.wait(LOOK_S):
                        break
            finally:
                self._report_closed()
                # Not in this thread: another thread may be capturing a graph.
                self._gpu.postpone(partial(self._free))

        self._closing = threading.Thread(target=wait_and_report, name="anyep-close", daemon=True)
        self._closing.start()

    def _free(self) -> None:
        self._gpu.synchronize_device()
        self._reports.close()
        if self._low_latency is not None:
            self._low_latency.close()
        self._memory = None

    def _report_closed(self) -> None:
        self._reports.stop_watching()
        # Hosts are told first: the host of a kernel that is told to stop looks for the reason there.
        self._control.close()
        self._device_control.give_up()

    # The end of the process

    def is_working(self) -> bool:
        running: bool = self._gpu.is_running()
        return running

    def stop_at_end(self, last_error: str) -> None:
        # Hosts are told first: the host of a kernel that is told to stop looks for the reason there.
        self._control.stop_at_end(last_error)
        self._device_control.give_up()
        self._is_over.set()

    def join_at_end(self, until: float) -> None:
        ending.join(self._closing, until)
        # Kernels that were told to stop do so shortly. If they do not, their memory must stay valid.
        ending.keep_for_ever(self)
        while self._gpu.is_running() and time.monotonic() < until:
            time.sleep(LOOK_S)
