"""The GPU that a Buffer works on: its memory, its streams, and how many programs run on it at once."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from anyep.backends.cuda import postponed
from anyep.backends.cuda.heap import SymmetricBlock
from anyep.backends.cuda.pinned import Array, pinned_words
from anyep.backends.cuda.stream import Stream
from anyep.sizes import align

REGISTER_MAPPED: Final = 1 | 2
"""Memory that the kernels of all GPUs of the process see at its own address."""


class Gpu:
    """The current CUDA device."""

    rounds_in_hardware = True
    """Whether floats are rounded by the hardware's instructions; Triton's interpreter has none."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._thread = threading.get_ident()
        self.stream = Stream()
        self.side_stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        """For what need not wait for our kernels. Where ranks share a GPU it does all the same, as long as
        the caller's stream waits for them."""
        self._events: list[Any] = []
        """Events to be used again."""
        properties = torch.cuda.get_device_properties(self.device)
        self.num_sms = int(properties.multi_processor_count)
        self.identity = str(properties.uuid)
        """The same for ranks that share a GPU."""

    def new_block(self, num_bytes: int) -> SymmetricBlock:
        """Memory that all ranks of a group make, and then connect."""
        return SymmetricBlock(num_bytes)

    def words(self, count: int) -> Array:
        """Words that both the host and kernels read and write."""
        return pinned_words(count)

    def let_kernels_read(self, address: int, num_bytes: int) -> bool:
        """Let kernels read memory of the host, from the start of a page on; whether they can."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        whole_pages = align(num_bytes, mmap.PAGESIZE)
        if runtime.cudaHostRegister(address, whole_pages, REGISTER_MAPPED) == runtime.cudaError.success:
            return True
        with contextlib.suppress(RuntimeError):
            # Or somebody else is told of the error.
            torch.zeros(1, dtype=torch.uint8, device=self.device)
        return False

    def let_no_kernel_read(self, address: int) -> None:
        """The end of that, before the memory goes, and when no kernel runs any more."""
        with torch.cuda.device(self.device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(address)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def table(self, words: list[int]) -> torch.Tensor:
        return torch.tensor(words, dtype=torch.int64, device=self.device)

    def now(self) -> Any:
        """An event of the communication stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream.stream)
        return event

    def on_communication_stream(self) -> contextlib.AbstractContextManager[Any]:
        """What torch does inside happens on the communication stream."""
        return torch.cuda.stream(self.stream.stream)

    def used_by_both(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until what both streams were given has run, however soon the tensor dies."""
        tensor.record_stream(self.stream.stream)
        tensor.record_stream(self.stream.current())

    def last_use(self) -> Any:
        """An event after what the current stream was given; None while a graph is captured."""
        if self.stream.is_capturing():
            return None
        event = self._events.pop() if self._events else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream.current())
        return event

    def wait_before_next_call(self, event: Any) -> None:
        """Let what the communication stream is given from here on wait for an event."""
        self.stream.stream.wait_event(event)
        self._events.append(event)

    def may_record_events(self) -> bool:
        """Whether streams may be given events here: in a thread that knows that they are not captured."""
        return threading.get_ident() == self._thread and not self.stream.is_capturing()

    def synchronize(self) -> None:
        """Return when all calls are done."""
        self.stream.stream.synchronize()
        self.side_stream.synchronize()

    def is_running(self, *events: Any) -> bool:
        """Whether the streams of calls have something left to do, or one of these events has not come; False
        where CUDA cannot tell any more. For the end of a process: no graph is captured then that could be
        harmed."""
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
        """Do a piece of work when no graph is captured."""
        postponed.postpone(work)

    def do_postponed(self) -> None:
        """Free what died, unless a graph is captured."""
        if not self.stream.is_capturing():
            postponed.do_postponed(self.synchronize_device)

    def look_for_errors(self) -> None:
        """Raise what CUDA found wrong."""
        self.stream.stream.query()

    def free_memory_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)
