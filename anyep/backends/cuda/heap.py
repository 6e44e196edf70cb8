"""Symmetric memory of the GPUs of a node: torch's, which several ranks on one GPU may share as well.

Every rank allocates the same number of bytes; `addresses` says where each rank's lie in this process. The
group that the ranks meet in may be Gloo's.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch


class SymmetricBlock:
    """A rank's memory, and the addresses of its peers'. It lives until the last tensor over it is gone."""

    def __init__(self, group: Any, num_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        # Several ranks on one GPU are a way to work, not a mistake.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self.num_bytes = num_bytes
        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        # The handle holds the peers' memory: without it the next kernel would fault.
        self._handle = symmetric_memory.rendezvous(self._memory, group)
        self.addresses = [int(address) for address in self._handle.buffer_ptrs]
        self.address = self._memory.data_ptr()

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a part of this rank's memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._memory[offset : offset + num_bytes].view(dtype).view(shape)
