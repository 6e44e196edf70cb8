"""Remembers which arguments were accepted, so that tensors like these are not checked again.

    accepted = Accepted(device)
    if not accepted.covers(x, topk_idx):
        ...                              # check them
        accepted.remember(x, topk_idx)

A model calls with tensors of the same types and shapes many times. Only what the checks look at is compared:
whatever they also look at must be part of what is compared, or be checked in every call.
"""

from __future__ import annotations

from typing import Any, Final

import torch

Kind = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...], int]
"""The last one is the number of the GPU, below 0 if it is none."""
# Looked up once: every call asks for them.
STRIDED: Final = torch.strided
TENSOR: Final = torch.Tensor
IS_GRAD_ENABLED: Final = torch.is_grad_enabled


class Accepted:
    """The types, shapes and strides of the tensors of the last call of one kind."""

    __slots__ = ("_device", "_kinds")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kinds: tuple[Kind | None, ...] | None = None

    def remember(self, *tensors: Any) -> None:
        """These were accepted as they are; None stands for an argument that was left out."""
        kinds = tuple(map(_kind_of, tensors))
        are_plain = all(
            tensor is None if kind is None else kind[1] == self._device
            for tensor, kind in zip(tensors, kinds, strict=True)
        )
        self._kinds = kinds if are_plain else None

    def covers(self, *tensors: Any) -> bool:
        """Whether checks would accept these as they are."""
        kinds = self._kinds
        if kinds is None or len(kinds) != len(tensors):
            return False
        for tensor, kind in zip(tensors, kinds, strict=True):
            if tensor is None or kind is None:
                if tensor is not kind:
                    return False
                continue
            # As in `_kind_of`, without a function or a tuple for every tensor of every call.
            dtype, device, shape, stride, index = kind
            if (
                tensor.__class__ is not TENSOR
                or tensor.dtype is not dtype
                or tensor.layout is not STRIDED
                or tensor.shape != shape
                or tensor.stride() != stride
                or (tensor.get_device() != index if index >= 0 else tensor.device != device)
                or (tensor.requires_grad and IS_GRAD_ENABLED())
                or tensor.is_neg()
            ):
                return False
        return True


def _kind_of(tensor: Any) -> Kind | None:
    """What checks look at, of a tensor that calls take without making another one of it; else None."""
    if (
        tensor.__class__ is torch.Tensor
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and tensor.layout is STRIDED
        and not tensor.is_neg()
    ):
        return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.get_device()
    return None
