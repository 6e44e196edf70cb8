"""Ranks that share a GPU, for the tests that need one."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import pytest
import torch

from anyep.backends.cuda.mps import MultiProcessService
from tests.support.gpu_scenarios import closing_threads
from tests.support.world import World, set_environment

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]
_open = ExitStack()


def new_gpu_world(num_ranks: int) -> World:
    """Ranks that run side by side on GPU 0, by way of NVIDIA's multi-process service."""
    return World(num_ranks, partial(set_environment, service_variables()))


@cache
def service_variables() -> dict[str, str]:
    """The variables by which ranks find the service. It is started here, and ends with pytest."""
    atexit.register(_open.close)
    return _open.enter_context(MultiProcessService()) if MultiProcessService.is_installed() else {}


def prepare_rank() -> None:
    """Fill new memory with NaN and the like, so that reads of unwritten memory show in the results."""
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)


def let_die_in_a_capture(dying: list[Any], meanwhile: Callable[[], None] = lambda: None) -> int:
    """Empty a list while a graph is captured, and check that graph. How many threads that close Buffers were
    waiting when that began; when it ends they are done."""
    numbers = torch.zeros(8, device="cuda")
    gc.collect()
    closing = closing_threads()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        # As torch captures unless told otherwise: no thread of the process may disturb it.
        graph.capture_begin(capture_error_mode="global")
        num_waiting = sum(thread.is_alive() for thread in closing)
        numbers += 1
        dying.clear()
        meanwhile()
        for thread in closing:
            thread.join()
        numbers *= 2
        graph.capture_end()
    for _ in range(3):
        graph.replay()
    assert numbers.tolist() == [14.0] * 8
    return num_waiting
