"""Tensors without memory, for `empty_like`: torch reads their shapes faster than it reads arguments."""

from __future__ import annotations

import torch

from anyep.backends.cuda.gpu import Gpu


def template(
    gpu: Gpu, shape: tuple[int, ...], dtype: torch.dtype, is_transposed: bool = False
) -> torch.Tensor:
    """What looks like a contiguous tensor of this shape, or like one whose last two dimensions are exchanged
    in memory."""
    stored = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
    memory: torch.Tensor = gpu.empty(stored, dtype)
    made = memory.transpose(-2, -1) if is_transposed else memory
    made.untyped_storage().resize_(0)
    return made
