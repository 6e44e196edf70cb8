"""Detects when the process of a peer ends: `Processes` when asked, `Watch` by itself.

Hosts that wait in a call ask between two steps. Kernels of a GPU cannot ask, so a thread watches for them.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping

from anyep import ending


class Processes:
    """The processes of the peers on this host, by rank."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._descriptors, self._dead = open_all(pids)
        self._poller = select.poll()
        for descriptor in self._descriptors:
            self._poller.register(descriptor, select.POLLIN)

    def dead(self) -> set[int]:
        """The ranks whose processes have ended."""
        self._dead |= {self._descriptors[descriptor] for descriptor, _ in self._poller.poll(0)}
        return self._dead

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = {}
        self._poller = select.poll()


class Watch(ending.Part):
    """A thread that sleeps until the process of a peer ends, and then reports its rank."""

    def __init__(self, pids: Mapping[int, int], on_death: Callable[[int], None]) -> None:
        self._on_death = on_death
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._descriptors, self._dead_already = open_all(pids)
        self._thread = threading.Thread(target=self._look, name="anyep-watch", daemon=True)
        self._thread.start()
        ending.register(self)

    def _look(self) -> None:
        for rank in sorted(self._dead_already):
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
                    # The callback closed this watch: the descriptors may have been reused by now.
                    return

    def join_at_end(self, until: float) -> None:
        if self._stop >= 0:
            os.eventfd_write(self._stop, 1)
            ending.join(self._thread, until)

    def close(self) -> None:
        """End the thread, and close the descriptors."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for descriptor in (self._stop, *self._descriptors):
            os.close(descriptor)
        self._stop = -1
        # The callback may hold the object that holds this watch.
        self._on_death = _ignore


def open_all(pids: Mapping[int, int]) -> tuple[dict[int, int], set[int]]:
    """A descriptor for each process with its rank, and the ranks whose processes have already ended."""
    descriptors: dict[int, int] = {}
    dead: set[int] = set()
    for rank, pid in pids.items():
        try:
            descriptors[os.pidfd_open(pid)] = rank
        except ProcessLookupError:
            dead.add(rank)
    return descriptors, dead


def _ignore(rank: int) -> None:
    pass
