"""Which tensors calls take as they are, without another check or a copy."""

from __future__ import annotations

from typing import Any, Final

import torch

ALIGNMENT: Final = 16
"""Rows begin at a multiple of so many bytes."""


def is_plain(tensor: Any, dtype: torch.dtype, shape: tuple[int, ...], device_index: int) -> bool:
    """Whether this is a contiguous tensor of a type and shape on a GPU, with nothing special about it.

    >>> is_plain(torch.zeros(3, 2), torch.float32, (3, 2), device_index=-1)
    True
    >>> is_plain(torch.zeros(2, 3).T, torch.float32, (3, 2), device_index=-1)
    False
    """
    return (
        tensor.__class__ is torch.Tensor
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.get_device() == device_index
        and not tensor.requires_grad
        and not tensor.is_neg()
    )


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins where kernels expect rows to begin."""
    return tensor.data_ptr() % ALIGNMENT == 0
