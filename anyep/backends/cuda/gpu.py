"""The GPU that a Buffer works on: its memory, its streams, and how many programs run on it at once."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from anyep.backends.cuda.heap import SymmetricBlock
from anyep.backends.cuda.pinned import Array, pinned_words
from anyep.backends.cuda.stream import Stream


class Gpu:
    """The current CUDA device."""

    rounds_in_hardware = True
    """Whether floats are rounded by the hardware's instructions; Triton's interpreter has none."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = Stream()
        self.side_stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        """For what must run while a kernel waits."""
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

    def is_idle(self) -> bool:
        idle: bool = self.stream.stream.query()
        return idle

    def synchronize(self) -> None:
        """Return when all calls are done."""
        self.stream.stream.synchronize()
        self.side_stream.synchronize()

    def synchronize_device(self) -> None:
        """Return when all streams are done."""
        torch.cuda.synchronize(self.device)

    def look_for_errors(self) -> None:
        """Raise what CUDA found wrong."""
        self.stream.stream.query()

    def free_memory_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)
