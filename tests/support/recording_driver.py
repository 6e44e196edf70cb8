"""A CUDA driver that records what it is asked to do, for machines without a GPU.

    with recording_driver() as driver:
        Batch([...]).run(Moment(7), {...})
    driver.calls == [Launched("copy_for_peers", (24, 1, 1), 128, 0, 7, b"..."), Recorded(event, stream), ...]

Kernels are compiled for an H100 and never run. Each call returns `driver.status`, 0 unless it was set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_uint
FIRST_FUNCTION = 1000
CONTEXT = 77


class Launched(NamedTuple):
    """A kernel on a stream, with its packed arguments."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    stream: int
    packed: bytes


class Recorded(NamedTuple):
    """An event was recorded on a stream."""

    event: int
    stream: int


class Waits(NamedTuple):
    """A stream waits for an event."""

    stream: int
    event: int


class RecordingDriver:
    """The functions of the driver that AnyEP calls."""

    def __init__(self) -> None:
        self.calls: list[Launched | Recorded | Waits] = []
        self.statuses: dict[int, int] = {}
        """What the call of an index returns instead of 0."""
        self.context = 0
        """The current one."""
        self._names: list[str] = []
        launch_types = (POINTER, *[NUMBER] * 7, POINTER, POINTER, POINTER)
        self.cuLaunchKernel = ctypes.CFUNCTYPE(ctypes.c_int, *launch_types)(self._launch)
        self.cuEventRecord = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER)(self._record)
        self.cuCtxPushCurrent_v2 = ctypes.CFUNCTYPE(ctypes.c_int, POINTER)(self._push)
        self.cuCtxPopCurrent_v2 = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(POINTER))(self._pop)
        self.cuStreamWaitEvent = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, NUMBER)(self._wait)

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels that were launched."""
        return [call.kernel for call in self.calls if isinstance(call, Launched)]

    def _answer(self, call: Launched | Recorded | Waits) -> int:
        assert self.context == CONTEXT
        self.calls.append(call)
        return self.statuses.pop(len(self.calls) - 1, 0)

    def _launch(self, *arguments: Any) -> int:
        function, x, y, z, threads, _, _, shared_bytes, stream, _, extra = arguments
        words = (ctypes.c_void_p * 5).from_address(extra)
        assert (words[0], words[2], words[4]) == (1, 2, None), "the array of CU_LAUNCH_PARAM_..."
        num_bytes = ctypes.c_size_t.from_address(words[3] or 0).value
        packed = ctypes.string_at(words[1] or 0, num_bytes)
        name = self._names[function - FIRST_FUNCTION]
        return self._answer(Launched(name, (x, y, z), threads, shared_bytes, stream or 0, packed))

    def _record(self, event: int, stream: int | None) -> int:
        return self._answer(Recorded(event, stream or 0))

    def _wait(self, stream: int | None, event: int, flags: int) -> int:
        assert flags == 0
        return self._answer(Waits(stream or 0, event))

    # What loads kernels

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802
        context._obj.value = CONTEXT
        return 0

    def _push(self, context: int) -> int:
        assert self.context == 0
        self.context = context
        return 0

    def _pop(self, popped: Any) -> int:
        popped[0], self.context = self.context, 0
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:  # noqa: N802
        assert self.context == CONTEXT
        assert cubin.startswith(b"\x7fELF")
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        function._obj.value = FIRST_FUNCTION + len(self._names)
        self._names.append(name.decode())
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"what went wrong"
        return 0


@contextmanager
def recording_driver() -> Iterator[RecordingDriver]:
    """Kernels of this process are compiled for an H100, and launched by a driver that records."""
    from anyep.backends.cuda import batch, driver

    recorder = RecordingDriver()
    for known in (batch._loaded, driver.context_of):
        known.cache_clear()
    with (
        mock.patch.object(driver, "_library", return_value=recorder),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        yield recorder
    for known in (batch._loaded, driver.context_of):
        known.cache_clear()
