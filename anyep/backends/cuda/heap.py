"""Symmetric memory of the GPUs of a node: torch's, which also works for several ranks on one GPU.

Every rank allocates the same number of bytes; `addresses` holds the address of each rank's memory in this
process. The process group of the rendezvous may use Gloo.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from anyep.backends.cuda.postponed import postpone
from anyep.errors import NotSupported

TYPES: Final = {
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.uint8: "|u1",
}
"""torch's types as named by `__cuda_array_interface__`, which has no bfloat16 and no float8."""
TYPES_BY_SIZE: Final = {1: "|u1", 2: "<i2"}


class SymmetricBlock:
    """A rank's memory, and the addresses of its peers' memory. It lives until the last lent tensor is gone;
    then it is freed with other postponed work."""

    _memory: Any = None
    _handle: Any = None
    """Keeps the peers' memory mapped: without it the next kernel would fault."""

    def __init__(self, num_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        # Several ranks on one GPU are supported, not a mistake.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self.num_bytes = num_bytes
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            self._memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise NotSupported(
                f"could not allocate {num_bytes:,} bytes of GPU memory: pass Buffer smaller num_nvl_bytes and"
                f" num_rdma_bytes, which `anyep plan` tells"
            ) from error
        self.address = self._memory.data_ptr()
        self.addresses: list[int] = []

    def connect(self, group: Any) -> None:
        """Map the memory of all ranks of a group, after all have allocated theirs."""
        import torch.distributed._symmetric_memory as symmetric_memory

        self._handle = symmetric_memory.rendezvous(self._memory, group)
        self.addresses = [int(address) for address in self._handle.buffer_ptrs]

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a part of this rank's memory, valid while the block lives; not to be returned to
        callers."""
        num_bytes = math.prod(shape) * dtype.itemsize
        tensor: torch.Tensor = self._memory[offset : offset + num_bytes].view(dtype).view(shape)
        return tensor

    def lend(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, on_death: Callable[[], None]
    ) -> torch.Tensor:
        """A tensor with a storage of its own; `on_death` is called when it and all its views are gone."""
        return lent(self, self.address + offset, shape, dtype, self._memory.device, on_death)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            postpone(partial(_let_go, self._handle, self._memory))


def lent(
    block: object,
    address: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    on_death: Callable[[], None],
) -> torch.Tensor:
    """A tensor of a GPU over memory that its kernels reach at an address; it keeps this memory's block."""
    known_as = TYPES.get(dtype)
    loan = _Loan(block, address, shape, known_as or TYPES_BY_SIZE[dtype.itemsize], on_death)
    tensor = torch.as_tensor(loan, device=device)
    return tensor if known_as else tensor.view(dtype)


class _Loan:
    """Held by a lent tensor: torch drops it with the tensor's storage."""

    def __init__(
        self,
        block: object,
        address: int,
        shape: tuple[int, ...],
        typestr: str,
        on_death: Callable[[], None],
    ) -> None:
        self._block = block
        self._on_death = on_death
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        self._on_death()


def _let_go(*held: Any) -> None:
    """Drop the last references to the arguments."""
