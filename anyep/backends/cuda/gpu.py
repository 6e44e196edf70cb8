"""The GPU that a Buffer uses: its memory, its streams, and how many programs run on it at once."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from anyep.backends.cpu.kernels.driver_calls import NO_STREAM
from anyep.backends.cuda import driver, postponed, reach
from anyep.backends.cuda.heap import SymmetricBlock, lent
from anyep.backends.cuda.pinned import Array, pinned_words
from anyep.backends.cuda.stream import Stream
from anyep.sizes import align

REGISTER_MAPPED: Final = 1 | 2
"""Memory that the kernels of all GPUs of the process access at its host address."""


class Use(NamedTuple):
    """The end of a tensor's use: an event of torch and of the driver, and the stream it was recorded on."""

    event: Any
    raw_event: int
    stream: int


class Gpu:
    """The current CUDA device."""

    rounds_in_hardware = True
    """Whether floats are rounded by the hardware's instructions; Triton's interpreter has none."""

    def __init__(self) -> None:
        self.index = torch.cuda.current_device()
        self.device = torch.device("cuda", self.index)
        self._thread = threading.get_ident()
        self.stream = Stream()
        self.side_stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        """For work that need not wait for AnyEP's kernels. If ranks share a GPU, it waits nevertheless, for
        as long as the caller's stream waits for them."""
        self._events: list[tuple[Any, int]] = []
        """Events that can be reused, of torch and of the driver."""
        names = "cuEventRecord", "cuStreamWaitEvent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"
        words = [*map(driver.address_of, names), driver.context_of(self.index), 0]
        self._driver_words = np.array(words, np.int64)
        self._driver_address = int(self._driver_words.ctypes.data)
        # Bound here: it is compiled when a Buffer is made.
        from anyep.backends.cpu import record_and_wait

        self._record_and_wait: Callable[[int, int, int, int], int] = record_and_wait
        properties = torch.cuda.get_device_properties(self.device)
        self.num_sms = int(properties.multi_processor_count)
        self.name = str(properties.name)
        self.architecture = f"sm{properties.major}{properties.minor}"
        """GPUs of the same one run the same machine code."""
        self.identity = str(properties.uuid)
        """Equal for ranks that share a GPU."""

    def new_block(self, num_bytes: int) -> SymmetricBlock:
        """A block of symmetric memory, which all ranks of a group allocate and then connect."""
        return SymmetricBlock(num_bytes)

    def words(self, count: int) -> Array:
        """Words that both the host and kernels read and write."""
        with driver.relaxed():
            return pinned_words(count)

    def let_kernels_read(self, address: int, num_bytes: int) -> bool:
        """Let kernels read and write memory of the host that begins at a page; return whether they can."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        whole_pages = align(num_bytes, mmap.PAGESIZE)
        if runtime.cudaHostRegister(address, whole_pages, REGISTER_MAPPED) == runtime.cudaError.success:
            return True
        with contextlib.suppress(RuntimeError):
            # Clears CUDA's last error, which would otherwise be raised by an unrelated call.
            torch.zeros(1, dtype=torch.uint8, device=self.device)
        return False

    def let_no_kernel_read(self, address: int) -> None:
        """Undo `let_kernels_read`, when no kernel runs any more and before the memory is freed."""
        with torch.cuda.device(self.device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(address)

    def lend_at(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        block: object,
        on_death: Callable[[], None],
    ) -> torch.Tensor:
        """A tensor of this GPU over memory of the host that its kernels use; it keeps the memory's block."""
        return lent(block, address, shape, dtype, self.device, on_death)

    def why_not_shared(self, identities: Iterable[str]) -> str:
        """Why the kernels of GPUs with these identities cannot use each other's memory, as far as CUDA tells;
        empty if they can."""
        return reach.why_not_shared(self.index, identities)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    empty_like: Callable[[torch.Tensor], torch.Tensor] = staticmethod(torch.empty_like)
    """Torch's own function: calls allocate several results."""

    def table(self, words: list[int]) -> torch.Tensor:
        return torch.tensor(words, dtype=torch.int64, device=self.device)

    def now(self) -> Any:
        """An event recorded now on the communication stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream.stream)
        return event

    def on_communication_stream(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which torch's work runs on the communication stream."""
        return torch.cuda.stream(self.stream.stream)

    def used_by_both(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until both streams have run their current work, even if the tensor dies."""
        tensor.record_stream(self.stream.stream)
        tensor.record_stream(self.stream.current())

    def last_use(self) -> Any:
        """An event after the current stream's work so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream.current())
        return event

    def end_of_use(self) -> Use | None:
        """The same, for `wait_for_use`; None while a graph is captured."""
        # Each result that dies needs this: torch is asked at once.
        if torch._C._cuda_isCurrentStreamCapturing():
            return None
        try:
            event, raw = self._events.pop()
        except IndexError:
            # Asking first would not do: another thread may take the last one.
            event = self.last_use()
            raw = self.stream.raw_event(event)
        current: int = torch._C._cuda_getCurrentRawStream(self.index)
        if status := self._record_and_wait(self._driver_address, raw, current, NO_STREAM):
            driver.check(status, "cuEventRecord")
        return Use(event, raw, current)

    def wait_for_use(self, use: Use) -> None:
        """Make later work of the communication stream wait for the end of a use."""
        status = self._record_and_wait(self._driver_address, use.raw_event, NO_STREAM, self.stream.raw)
        driver.check(status, "cuStreamWaitEvent")

    def forget_use(self, use: Use) -> None:
        """Nothing else will wait for this end: its event can be recorded again."""
        self._events.append(use[:2])

    def may_record_events(self) -> bool:
        """Whether this thread may record events on streams: it must know that they are not captured."""
        return threading.get_ident() == self._thread and not self.stream.is_capturing()

    def synchronize(self) -> None:
        """Return when all calls are done."""
        self.stream.stream.synchronize()
        self.side_stream.synchronize()

    def is_running(self, *events: Any) -> bool:
        """Whether the streams of calls have work left, or one of these events is not complete; False if CUDA
        can no longer tell. Only for the end of a process, when no graph is captured that this could
        harm."""
        self.stream.relax_this_thread()
        try:
            streams = (self.stream.stream, self.side_stream, torch.cuda.current_stream(self.device))
            return not all(moment.query() for moment in (*streams, *events))
        except RuntimeError:
            return False

    def synchronize_device(self) -> None:
        """Return when all streams are done."""
        torch.cuda.synchronize(self.device)

    def postpone(self, work: Callable[[], object]) -> None:
        """Run a piece of work later, when no graph is captured."""
        postponed.postpone(work)

    def do_postponed(self) -> None:
        """Run postponed work, such as freeing memory, unless a graph is captured."""
        if not self.stream.is_capturing():
            postponed.do_postponed(self.synchronize_device)

    def look_for_errors(self) -> None:
        """Raise an error that CUDA has found."""
        self.stream.stream.query()

    def free_memory_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)
