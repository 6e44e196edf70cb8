"""Random numbers for commands. They are drawn on the CPU, so every rank draws the same on every device."""

from __future__ import annotations

import torch


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Normally distributed float32 numbers."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def uniform(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Evenly distributed float32 numbers from 0 to 1."""
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
