"""Symmetric memory of the GPUs of a node: torch's, which several ranks on one GPU may share as well.

Every rank allocates the same number of bytes; `addresses` says where each rank's lie in this process. The
group that the ranks meet in may be Gloo's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch

from anyep.errors import NotSupported


class SymmetricBlock:
    """A rank's memory, and the addresses of its peers'. It lives until the last tensor over it is gone."""

    def __init__(self, num_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        # Several ranks on one GPU are a way to work, not a mistake.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self.num_bytes = num_bytes
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            self._memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise NotSupported(
                f"{num_bytes:,} bytes of GPU memory cannot be had: ask for less; `anyep plan` tells what is"
                f" needed"
            ) from error
        self.address = self._memory.data_ptr()
        self.addresses: list[int] = []

    def connect(self, group: Any) -> None:
        """Open the memory of all ranks of a group, when all have made theirs."""
        import torch.distributed._symmetric_memory as symmetric_memory

        # The handle holds the peers' memory: without it the next kernel would fault.
        self._handle = symmetric_memory.rendezvous(self._memory, group)
        self.addresses = [int(address) for address in self._handle.buffer_ptrs]

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a part of this rank's memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._memory[offset : offset + num_bytes].view(dtype).view(shape)

    def lend(self, offset: int, num_bytes: int, on_death: Callable[[], None]) -> torch.Tensor:
        """Bytes; `on_death` is called when the tensor and all its views are gone."""
        return torch.as_tensor(_Loan(self, offset, num_bytes, on_death), device=self._memory.device)


class _Loan:
    """What a lent tensor holds on to: torch drops it with the tensor's storage."""

    def __init__(
        self, block: SymmetricBlock, offset: int, num_bytes: int, on_death: Callable[[], None]
    ) -> None:
        self._block = block
        self._on_death = on_death
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (block.address + offset, False),
            "version": 2,
        }

    def __del__(self) -> None:
        self._on_death()
