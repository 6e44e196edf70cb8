"""What the clock of `anyep bench` asks of a GPU, on a simulated one (`simulated_gpu.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Tensors for "cuda" are made on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = {name: "cpu" if value == "cuda" else value for name, value in (kwargs or {}).items()}
        return function(
            *("cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in args), **options
        )


def captured(work: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """In place of a graph: a replay makes the call again, and leaves its results in the same tensors."""
    result = work()

    def parts_of(thing: Any) -> Iterator[torch.Tensor]:
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, tuple):
            for part in thing:
                yield from parts_of(part)

    def replay() -> None:
        for ours, new in zip(parts_of(result), parts_of(work()), strict=True):
            ours.copy_(new)

    return replay, result


@contextmanager
def stand_ins(group: Any, milliseconds: Callable[[], float] = lambda: 1.0) -> Iterator[None]:
    """What the clock asks of CUDA and NCCL; a run of calls takes as long as `milliseconds` says."""
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda _: milliseconds())
    facts = SimpleNamespace(multi_processor_count=8, name="Stand-in")
    with (
        mock.patch.multiple(
            torch.cuda,
            Event=lambda enable_timing: event,
            synchronize=lambda: None,
            current_device=lambda: 0,
            get_device_properties=lambda _: facts,
        ),
        mock.patch("torch.distributed.new_group", return_value=group),
        mock.patch("anyep.cli.bench.clock._captured", captured),
        mock.patch.dict("anyep.cli.bench.clock.CALLS_IN_A_RUN", {"normal": 2, "low-latency": 2}),
        CudaIsCpu(),
    ):
        yield
