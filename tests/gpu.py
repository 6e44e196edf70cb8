"""Ranks that share a GPU, for the tests that need one."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from anyep.backends.cuda.mps import MultiProcessService
from anyep.buffer import Buffer
from tests.cases import Case, buffer_for, check_case, delays
from tests.world import RankContext, World

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]
_open = ExitStack()
_worlds: dict[int, World] = {}


def gpu_world(num_ranks: int) -> World:
    """Ranks that run side by side on GPU 0, by way of NVIDIA's multi-process service."""
    if not _worlds:
        if MultiProcessService.is_installed():
            os.environ.update(_open.enter_context(MultiProcessService()))
        atexit.register(_open.close)
    for other in [size for size in _worlds if size != num_ranks]:
        _open_world = _worlds.pop(other)
        _open_world.close()
    if num_ranks not in _worlds:
        _worlds[num_ranks] = World(num_ranks)
        _open.callback(_worlds[num_ranks].close)
    return _worlds[num_ranks]


def prepare_rank() -> None:
    """Memory that nobody has written yet holds NaN and the like: who reads it is found out."""
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)


def poison_windows(buffer: Buffer) -> None:
    """Fill the windows that are free, on every rank, before any rank goes on."""
    assert buffer.runtime is not None
    windows: Any = buffer.runtime.windows
    windows.fill_free(0xA5)
    torch.cuda.synchronize()
    torch.distributed.barrier(group=buffer.group)


def run_gpu_case(context: RankContext, case: Case) -> None:
    """Dispatch, dispatch again by handle, and combine, on CUDA tensors."""
    prepare_rank()
    buffer = buffer_for(context, case.num_window_bytes, device="cuda")
    poison_windows(buffer)
    conversation = buffer.runtime.conversation
    conversation.between_steps = None if case.delay_seed is None else delays(case.delay_seed, context.rank)
    try:
        check_case(context, case, buffer, "cuda")
    finally:
        conversation.between_steps = None
