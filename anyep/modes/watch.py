"""Notices when a peer's process ends: for kernels that wait for it, and for hosts that wait for nothing."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping

from anyep import ending


class Watch(ending.Part):
    """A thread that sleeps until a peer's process ends, and then tells its rank."""

    def __init__(self, pids: Mapping[int, int], on_death: Callable[[int], None]) -> None:
        self._on_death = on_death
        self._descriptors: dict[int, int] = {}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._dead_already = []
        for rank, pid in pids.items():
            try:
                self._descriptors[os.pidfd_open(pid)] = rank
            except ProcessLookupError:
                self._dead_already.append(rank)
        self._thread = threading.Thread(target=self._look, name="anyep-watch", daemon=True)
        self._thread.start()
        ending.register(self)

    def _look(self) -> None:
        for rank in self._dead_already:
            self._on_death(rank)
        poller = select.poll()
        poller.register(self._stop, select.POLLIN)
        for descriptor in self._descriptors:
            poller.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == self._stop:
                    return
                poller.unregister(descriptor)
                self._on_death(self._descriptors[descriptor])
                if self._stop < 0:
                    # Closed by whoever heard of it: the descriptors are not ours any more.
                    return

    def join_at_end(self, until: float) -> None:
        if self._stop >= 0:
            os.eventfd_write(self._stop, 1)
            ending.join(self._thread, until)

    def close(self) -> None:
        """End the thread, and close what it watched."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for descriptor in (self._stop, *self._descriptors):
            os.close(descriptor)
        self._stop = -1
        # So that nobody lives on because we know him.
        self._on_death = _ignore


def _ignore(rank: int) -> None:
    pass
