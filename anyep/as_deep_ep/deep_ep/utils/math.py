"""`deep_ep.utils.math`: arithmetic of sizes, differences of tensors, rows in FP8."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from anyep import InvalidCall

FP8_MAX: Final = 448.0
FP8_CHANNELS: Final = 128
"""Channels that share a scale."""
SMALLEST_AMAX: Final = 1e-4
EXPONENT_SHIFT: Final = 23
"""Where a float32 has its exponent."""


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The next multiple of y."""
    return ceil_div(x, y) * y


def safe_div(a: Any, b: Any) -> Any:
    """a / b, and 0 for 0 / 0."""
    return 0 if a == 0 and b == 0 else a / b


def count_bytes(*tensors: Any) -> int:
    """The bytes of tensors, and of those in tuples and lists; None counts nothing."""
    total = 0
    for part in tensors:
        if isinstance(part, (tuple, list)):
            total += count_bytes(*part)
        elif part is not None:
            total += part.numel() * part.element_size()
    return total


def calc_diff(x: Tensor, y: Tensor) -> float:
    """How different tensors are, 0 for equal ones: 1 - 2ab / (a^2 + b^2) with a = x + 1 and b = y + 1."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a.square() + b.square()).sum())


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as float8_e4m3fn, and a float32 scale for each 128 channels of a row."""
    blocks = _blocks_of(x).float()
    amax = blocks.abs().amax(2, keepdim=True).clamp(min=SMALLEST_AMAX)
    data = (blocks * (FP8_MAX / amax)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return data.flatten(1)[:, : x.shape[1]].contiguous(), (amax / FP8_MAX).squeeze(2)


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """The rows as bfloat16. Scales are float32, or int32 that hold four UE8M0 exponents each."""
    blocks = _blocks_of(x_fp8.float())
    scales = x_scales
    if scales.dtype == torch.int32:
        exponents = scales.contiguous().view(torch.uint8).int()
        scales = (exponents << EXPONENT_SHIFT).view(torch.float32)[:, : blocks.shape[1]]
    if scales.shape != blocks.shape[:2]:
        raise InvalidCall(
            f"x_scales is {x_scales.dtype} {list(x_scales.shape)}: rows {list(x_fp8.shape)} have"
            f" {list(blocks.shape[:2])} scales, a float32 each, or four to an int32"
        )
    rows = (blocks * scales.unsqueeze(2)).flatten(1)
    return rows[:, : x_fp8.shape[1]].bfloat16().contiguous()


def _blocks_of(x: Tensor) -> Tensor:
    """Rows in blocks of 128 channels; the last block is filled up with zeros."""
    if x.dim() != 2:
        raise InvalidCall(f"x is {list(x.shape)}: it must be [tokens, hidden]")
    num_rows, hidden = x.shape
    num_blocks = ceil_div(hidden, FP8_CHANNELS)
    padded = functional.pad(x, (0, num_blocks * FP8_CHANNELS - hidden))
    return padded.view(num_rows, num_blocks, FP8_CHANNELS)
