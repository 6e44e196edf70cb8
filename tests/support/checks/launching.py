"""Launches GPU kernels as a Buffer does it: on a GPU, or in Triton's interpreter ("cpu")."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from anyep.backends.cuda.launch import Launcher


@cache
def launcher(kernel: Any, num_warps: int, constants: tuple[tuple[str, Any], ...]) -> Launcher:
    return Launcher(kernel, num_warps, dict(constants))


def launch(
    kernel: Any,
    device: str,
    grid: int | tuple[int, ...],
    *arguments: Any,
    num_warps: int = 4,
    **constants: Any,
) -> None:
    """On the current stream."""
    stream = torch.cuda.current_stream() if device != "cpu" else None
    launcher(kernel, num_warps, tuple(constants.items()))(
        stream, grid if isinstance(grid, tuple) else (grid,), *arguments
    )
