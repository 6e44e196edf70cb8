"""A GPU without a GPU: kernels run in Triton's interpreter, on CPU tensors in memory that processes share.

Streams are the order of the program, and what is launched has run when the launch returns. A kernel that
waits for another rank waits for another process, so the whole protocol runs; only kernels whose own programs
wait for each other cannot. `use_simulated_gpu()` makes Buffers of this process with device "cuda" use it: in
a process that has not loaded any kernels yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from anyep.backends import cpu
from anyep.backends.cuda import postponed
from anyep.backends.cuda.gpu import Use
from anyep.backends.cuda.moment import Moment
from anyep.events import EventHandle, EventOverlap
from tests.support.depth import IS_DEEP

_numbers = itertools.count()
registered: list[int] = []
"""Memory of the host that kernels may use."""
_lenders: dict[int, SimulatedBlock] = {}
"""They live as long as what they lent."""


class SimulatedBlock:
    """Symmetric memory out of shared memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._own = cpu.OwnBlock("simulated", num_bytes)
        self.address = self._own.address
        self.addresses: list[int] = []
        self._opened: list[Any] = []

    def connect(self, group: Any) -> None:
        for rank, share in enumerate(_exchange(group, self._own.share())):
            self._opened.append(self._own if rank == group.rank() else cpu.open_block(share, rank))
        _exchange(group, None)
        self._own.close()
        self.addresses = [block.address for block in self._opened]

    def __del__(self) -> None:
        self._own.close()
        postponed.postpone(partial(list, [self._own, *self._opened]))

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._own.tensor(offset, shape, dtype)

    def lend(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, on_death: Callable[[], None]
    ) -> torch.Tensor:
        def died() -> None:
            on_death()
            del _lenders[number]

        number = next(_numbers)
        _lenders[number] = self
        return self._own.lend(offset, shape, dtype, died)


def _exchange(group: Any, thing: Any) -> list[Any]:
    """Everyone's thing, through the store of the group and with its timeout, as torch does it for GPUs."""
    store = dist.distributed_c10d._get_process_group_store(group)
    number = store.add(f"simulated/{group.rank()}", 1)
    store.set(f"simulated/{number}/{group.rank()}", pickle.dumps(thing))
    return [pickle.loads(store.get(f"simulated/{number}/{rank}")) for rank in range(group.size())]


class SimulatedStream:
    """The order of the program."""

    stream = None
    raw = 0

    def moment(self, begins: bool, ends: bool, previous: EventOverlap | None = None) -> Moment:
        return Moment(self.raw)

    def whole_call(self) -> Moment:
        return Moment(self.raw)

    def beside_caller(self) -> Moment:
        return Moment(self.raw)

    def caller(self) -> int:
        return self.raw

    def on(self, stream: None) -> Moment:
        return Moment(self.raw)

    def raw_event(self, event: SimulatedEvent) -> int:
        return 1

    def current(self) -> None:
        """The one stream that there is."""

    def begin(self, previous: EventOverlap | None) -> None:
        pass

    def end(self, run_async: bool) -> EventHandle | None:
        return EventHandle() if run_async else None

    def is_capturing(self) -> bool:
        return False

    def relax_this_thread(self) -> None:
        pass


class SimulatedEvent:
    """A moment that has come."""

    def record(self, stream: None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class SimulatedGpu:
    """What `Gpu` is, of CPU memory."""

    rounds_in_hardware = False
    num_sms = 132
    identity = "simulated"
    name = "simulated"
    architecture = "none"
    index = 0

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._thread = threading.get_ident()
        self.stream = SimulatedStream()
        self.side_stream = None

    def new_block(self, num_bytes: int) -> SimulatedBlock:
        return SimulatedBlock(num_bytes)

    def words(self, count: int) -> Any:
        return np.zeros(count, np.int64)

    def let_kernels_read(self, address: int, num_bytes: int) -> bool:
        registered.append(address)
        return True

    def let_no_kernel_read(self, address: int) -> None:
        registered.remove(address)

    def lend_at(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        block: object,
        on_death: Callable[[], None],
    ) -> torch.Tensor:
        memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
        weakref.finalize(memory, lambda _: on_death(), block)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def why_not_shared(self, identities: Iterable[str]) -> str:
        return ""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # Whatever is read before it is written should be noticed.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.full((num_bytes,), 0x5A, dtype=torch.uint8, device="cpu").view(dtype).view(shape)

    def empty_like(self, template: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(template)
        made.untyped_storage().fill_(0x5A)
        return made

    def table(self, words: list[int]) -> torch.Tensor:
        return torch.tensor(words, dtype=torch.int64, device="cpu")

    def now(self) -> SimulatedEvent:
        return SimulatedEvent()

    def on_communication_stream(self) -> Any:
        return contextlib.nullcontext()

    def used_by_both(self, tensor: torch.Tensor) -> None:
        pass

    def last_use(self) -> SimulatedEvent:
        return SimulatedEvent()

    def end_of_use(self) -> Use:
        return Use(None, 1, self.stream.raw)

    def wait_for_use(self, use: Use) -> None:
        pass

    def forget_use(self, use: Use) -> None:
        pass

    def may_record_events(self) -> bool:
        return threading.get_ident() == self._thread and not self.stream.is_capturing()

    def synchronize(self) -> None:
        pass

    def is_running(self, *events: Any) -> bool:
        return not all(event.query() for event in events)

    def synchronize_device(self) -> None:
        pass

    def postpone(self, work: Callable[[], object]) -> None:
        postponed.postpone(work)

    def do_postponed(self) -> None:
        if not self.stream.is_capturing():
            postponed.do_postponed(self.synchronize_device)

    def look_for_errors(self) -> None:
        pass

    def free_memory_bytes(self) -> int:
        return 1 << 30


class SimulatedDevice:
    """A device that is called cuda, and has CPU tensors."""

    type = "cuda"

    def __eq__(self, other: object) -> bool:
        return other == torch.device("cpu")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def use_simulated_gpu() -> None:
    """Let Buffers with device "cuda" take CPU tensors, and run their kernels in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.support import triton_interpreter

    triton_interpreter.prepare()
    if not IS_DEEP:
        # Overflow is checked in tests/kernels; here it would be too slow.
        triton_interpreter.look_for_no_overflow()
    from anyep.api import options
    from anyep.backends.cuda import gpu

    gpu.Gpu = SimulatedGpu  # type: ignore[assignment,misc]
    checked = options.checked_device

    options.checked_device = lambda device: SimulatedDevice() if device == "cuda" else checked(device)  # type: ignore
