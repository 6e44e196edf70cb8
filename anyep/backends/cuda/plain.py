"""Which tensors calls take as they are, without another check or a copy."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

# Looked up once: every call asks for them.
STRIDED: Final = torch.strided
TENSOR: Final = torch.Tensor
IS_GRAD_ENABLED: Final = torch.is_grad_enabled
ALIGNMENT: Final = 16
"""Rows begin at a multiple of so many bytes."""
Part = tuple[int, tuple[int, ...], torch.dtype]
"""Where in a window a tensor begins, in bytes, and its shape and type."""


def is_plain(tensor: Any, dtype: torch.dtype, shape: tuple[int, ...], device_index: int) -> bool:
    """Whether this is a contiguous tensor of a type and shape on a GPU, with nothing special about it.

    >>> is_plain(torch.zeros(3, 2), torch.float32, (3, 2), device_index=-1)
    True
    >>> is_plain(torch.zeros(2, 3).T, torch.float32, (3, 2), device_index=-1)
    False
    """
    return (
        tensor.__class__ is TENSOR
        and tensor.dtype is dtype
        and tensor.layout is STRIDED
        and tensor.shape == shape
        and tensor.is_contiguous()
        and tensor.get_device() == device_index
        # In autograd functions, which disable gradients, it says nothing.
        and not (tensor.requires_grad and IS_GRAD_ENABLED())
        and not tensor.is_neg()
    )


class RowKind(NamedTuple):
    """The type and width of rows, and of their scales if they have any."""

    dtype: torch.dtype
    hidden: int
    scales_dtype: torch.dtype | None = None
    num_scales: int = 0

    @classmethod
    def of(cls, x: torch.Tensor, scales: torch.Tensor | None) -> RowKind | None:
        """What calls with these rows have in common; None if their scales do not lie row by row."""
        if scales is None:
            return cls(x.dtype, x.shape[1])
        if scales.stride() != (scales.shape[1], 1):
            return None
        return cls(x.dtype, x.shape[1], scales.dtype, scales.shape[1])

    def is_of(self, x: Any, scales: Any, num_rows: int, device_index: int) -> bool:
        """Whether calls take these rows as they are."""
        return (
            is_plain(x, self.dtype, (num_rows, self.hidden), device_index)
            and x.data_ptr() % ALIGNMENT == 0
            and (
                scales is None
                if self.scales_dtype is None
                else is_plain(scales, self.scales_dtype, (num_rows, self.num_scales), device_index)
            )
        )

    def parts(self, num_rows: int, x_at: int, scales_at: int) -> list[Part]:
        """Where in a window rows and scales begin, and what they look like."""
        made: list[Part] = [(x_at, (num_rows, self.hidden), self.dtype)]
        if self.scales_dtype is not None:
            made.append((scales_at, (num_rows, self.num_scales), self.scales_dtype))
        return made


def rows_and_scales(x: Any) -> tuple[Any, Any]:
    """The two tensors of a pair; anything else has no scales.

    >>> rows_and_scales((1, 2)), rows_and_scales(3), rows_and_scales((4, None))
    ((1, 2), (3, None), ((4, None), None))
    """
    if x.__class__ is tuple and len(x) == 2 and x[1] is not None:
        return x[0], x[1]
    return x, None
