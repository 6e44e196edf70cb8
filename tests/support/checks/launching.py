"""Launches single GPU kernels: on a GPU, or in Triton's interpreter ("cpu")."""

from __future__ import annotations

from typing import Any

import torch

from anyep.backends.cuda.batch import Batch, Launch
from anyep.backends.cuda.moment import Moment


def launch(
    kernel: Any,
    device: str,
    grid: int | tuple[int, ...],
    *arguments: Any,
    num_warps: int = 4,
    **constants: Any,
) -> None:
    """On the current stream."""
    stream = torch.cuda.current_stream().cuda_stream if device != "cpu" else 0
    blocks = grid if isinstance(grid, tuple) else (grid,)
    Batch([Launch(kernel, num_warps, constants, blocks, arguments)], device=0).run(Moment(stream), {})
