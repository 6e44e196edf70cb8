"""Memory of the host that the GPUs of all ranks of a node map, where GPUs cannot reach each other's memory.

It takes the place of a `SymmetricBlock` as a heap: a block of shared memory, as on the CPU, which every rank
maps and registers with CUDA. Kernels and hosts reach it at the same addresses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from anyep.backends import cpu
from anyep.backends.cpu.heap import Block, BlockAddress, OwnBlock
from anyep.backends.cuda.postponed import postpone
from anyep.errors import NotSupported


class Registrar(Protocol):
    """The GPU whose kernels use memory of the host."""

    def let_kernels_read(self, address: int, num_bytes: int) -> bool: ...
    def let_no_kernel_read(self, address: int) -> None: ...
    def lend_at(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        block: object,
        on_death: Callable[[], None],
    ) -> torch.Tensor: ...


class HostBlock:
    """A rank's memory, all zeros at first, and the addresses of its peers' memory. It lives until the last
    lent tensor is gone; then it is freed with other postponed work."""

    def __init__(self, gpu: Registrar, num_bytes: int, rank: int) -> None:
        self._gpu = gpu
        self._rank = rank
        self._registered: list[int] = []
        self._blocks: list[Block] = []
        self.num_bytes = num_bytes
        self.addresses: list[int] = []
        self._own = OwnBlock("heap for kernels", num_bytes, rank)
        self.address = self._own.address
        self._map(self._own)

    def share(self) -> BlockAddress:
        """What peers need to open this block."""
        return self._own.share()

    def connect(self, shared: Sequence[BlockAddress]) -> None:
        """Map the memory of all ranks, after all have allocated theirs."""
        for rank, address in enumerate(shared):
            if rank != self._rank:
                self._map(cpu.open_block(address, rank, self._rank))
            self.addresses.append(self._blocks[-1].address if rank != self._rank else self.address)

    def close(self) -> None:
        """All ranks have opened it: no other process can open it any more."""
        self._own.close()

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the CPU over a part of this rank's memory, valid while the block lives; not to be
        returned to callers."""
        return self._own.tensor(offset, shape, dtype)

    def lend(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, on_death: Callable[[], None]
    ) -> torch.Tensor:
        """A tensor of the GPU with a storage of its own; `on_death` is called when it and all its views are
        gone."""
        return self._gpu.lend_at(self.address + offset, shape, dtype, self, on_death)

    def _map(self, block: Block) -> None:
        if not self._gpu.let_kernels_read(block.address, block.num_bytes):
            raise NotSupported(
                f"rank {self._rank} could not let its GPU use {block.num_bytes:,} bytes of the host's memory"
                " (cudaHostRegister): pass Buffer smaller num_nvl_bytes and num_rdma_bytes, which `anyep"
                " plan` tells; a container may need a higher limit of locked memory (ulimit -l)"
            )
        self._registered.append(block.address)
        self._blocks.append(block)

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_own"):
            self._own.close()
            postpone(partial(_let_go, self._gpu.let_no_kernel_read, self._registered, self._blocks))


def _let_go(unregister: Callable[[int], None], addresses: list[int], blocks: list[Block]) -> None:
    """End the kernels' use of memory, then drop it."""
    for address in addresses:
        unregister(address)
    blocks.clear()
