"""Rows in FP8, as plainly as possible: what the references of commands compare with."""

from __future__ import annotations

import torch

FP8_MAX = 448.0
FP8_CHANNELS = 128


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in FP8, and a float32 scale per 128 channels."""
    blocks = x.float().view(len(x), -1, FP8_CHANNELS)
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    data = (blocks * (torch.full_like(amax, FP8_MAX) / amax)).clamp(-FP8_MAX, FP8_MAX)
    scales = amax * torch.tensor(1 / FP8_MAX, dtype=torch.float32, device="cpu")
    return data.to(torch.float8_e4m3fn).view(x.shape), scales.squeeze(-1)


def from_fp8(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 rows from FP8 rows and their scales."""
    return data.float() * scales.repeat_interleave(FP8_CHANNELS, dim=1)


def through_fp8(x: torch.Tensor) -> torch.Tensor:
    """Rows after a conversion to FP8 and back."""
    return from_fp8(*to_fp8(x))
