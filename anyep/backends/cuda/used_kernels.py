"""The kernels that Buffers of a kind have used on this machine, so that a new one has them before its calls.

    used = UsedKernels("8 ranks, 9.0")
    for machine in used.earlier():                   # when a Buffer is made
        ...
    used.add(machine)                                # when a call uses it

A kernel that is first needed in a call delays it: by seconds if it has to be compiled, and as long as other
kernels run if it has to be loaded. Which kernels calls need depends on their shapes, which a Buffer does not
know. But programs start many times, with the same shapes.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Final

from anyep.backends.cache_folder import Folder, Unusable
from anyep.backends.cuda import compiled, tuned
from anyep.backends.cuda.compiled import Machine

MOST: Final = 256
"""Kernels that are remembered for a kind of Buffer; those that were added first are forgotten first."""
PATIENCE_S: Final = 1.0
"""The list is a help only: a call does not wait long for a process that holds it."""
IDENTITY: Final = "used kernels"


class UsedKernels:
    """A list in the cache folder, beside the kernels; without a folder it stays empty."""

    def __init__(self, kind: str) -> None:
        self._name = "used." + re.sub("[^0-9a-z]+", "-", kind)
        self._known: set[str] = set()
        """The files of kernels that are in the list."""

    def earlier(self) -> Iterator[Machine]:
        """What earlier processes have used, as far as the folder still has it."""
        folder = compiled.folder()
        if folder is None:
            return
        for file, identity in self._read(folder):
            machine = compiled.read(folder, file, identity)
            if machine is not None:
                self._known.add(file)
                yield machine

    def add(self, machine: Machine) -> None:
        """Remember a kernel that is used now, unless a sweep only tries it."""
        folder = compiled.folder()
        if folder is None or not machine.file or machine.file in self._known or tuned.is_trial():
            return
        self._known.add(machine.file)
        if any(machine.file == file for file, _ in self._read(folder)):
            # Ranks of one machine use the same kernels: most find them in the list, without the lock.
            return
        with contextlib.suppress(Unusable), folder.locked(_wait_silently, f"lock-{self._name}", PATIENCE_S):
            others = [entry for entry in self._read(folder) if entry[0] != machine.file]
            entries = [*others, (machine.file, machine.identity)][-MOST:]
            folder.write(self._name, IDENTITY, json.dumps(entries).encode())

    def _read(self, folder: Folder) -> list[tuple[str, str]]:
        payload = folder.read(self._name, IDENTITY)
        return [(file, identity) for file, identity in json.loads(payload)] if payload is not None else []


def _wait_silently(holder: int) -> None:
    """Another process adds a kernel, which takes milliseconds."""
