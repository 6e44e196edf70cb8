"""Symmetric memory between the processes of a machine.

A `SharedBlock` is a memfd: it has no name, is not limited by the size of /dev/shm, takes memory only for
pages that were touched, and is freed when the last process that maps it has ended, even if it was killed.
Peers open it through /proc/<pid>/fd. A tensor over a part of it (`lend`) calls a function when it is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from anyep.errors import NotSupported
from anyep.machine import memory_limits_in_words

STAMP_BYTES: Final = 16
MAP_NORESERVE: Final = 0x4000
"""Linux's value on every architecture that torch supports; Python 3.11 has no constant for it."""


@dataclass(frozen=True)
class BlockAddress:
    """What a peer needs to open a block. The stamp proves that the peer opened the right one."""

    pid: int
    descriptor: int
    num_bytes: int
    stamp: bytes
    name: str


class Block:
    """Mapped memory, and tensors and arrays over parts of it."""

    def __init__(self, mapping: mmap.mmap, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._view = memoryview(mapping)
        self._watches: dict[int, weakref.ref[memoryview]] = {}
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) if num_bytes else 0

    def array(self, offset: int, count: int, dtype: Any = np.int64) -> np.ndarray[Any, Any]:
        """A NumPy array over a part of the block."""
        return np.frombuffer(self._view, dtype=dtype, count=count, offset=offset)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor's data lies in this block, or None if it lies elsewhere."""
        offset = tensor.data_ptr() - self.address
        if tensor.numel() and 0 <= offset < self.num_bytes:
            return offset
        return None

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a part of the block."""
        return _tensor_over(self._view, offset, shape, dtype)

    def lend(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, on_death: Callable[[], None]
    ) -> torch.Tensor:
        """Like `tensor`; `on_death` is called when the tensor and all its views are gone."""
        part = self._view[offset : offset + math.prod(shape) * dtype.itemsize]
        watches, key = self._watches, id(part)

        def part_died(_: weakref.ref[memoryview]) -> None:
            del watches[key]
            on_death()

        watches[key] = weakref.ref(part, part_died)
        return _tensor_over(part, 0, shape, dtype)


class PrivateBlock(Block):
    """Private memory of this process, used for `what`; only pages that were touched take memory."""

    def __init__(self, num_bytes: int, what: str = "its own use", rank: int | None = None) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            mapping = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=flags)
        except OSError as error:
            raise _not_mapped(rank, num_bytes, what, error) from error
        # Huge pages are faster; a kernel without them works too.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(mapping, num_bytes)


class SharedBlock(Block):
    """Memory that this process and its peers map. The last `STAMP_BYTES` of the file are not part of it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        super().__init__(mmap.mmap(descriptor, num_bytes + STAMP_BYTES), num_bytes)

    @property
    def stamp(self) -> bytes:
        return bytes(self._view[self.num_bytes :])


class OwnBlock(SharedBlock):
    """A block that this process made; after `close` no further process can open it."""

    def __init__(self, name: str, num_bytes: int, rank: int | None = None) -> None:
        self._name = name
        self._descriptor = os.memfd_create(f"anyep-{name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, num_bytes + STAMP_BYTES)
            super().__init__(self._descriptor, num_bytes)
        except OSError as error:
            os.close(self._descriptor)
            raise _not_mapped(rank, num_bytes, f"its {name}", error) from error
        self._view[num_bytes:] = secrets.token_bytes(STAMP_BYTES)

    def share(self) -> BlockAddress:
        return BlockAddress(os.getpid(), self._descriptor, self.num_bytes, self.stamp, self._name)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def open_block(address: BlockAddress, owner: int, rank: int | None = None) -> SharedBlock:
    """Map the block of rank `owner`, as rank `rank`."""
    path = f"/proc/{address.pid}/fd/{address.descriptor}"
    advice = (
        "all ranks of a node need to see each other's processes; run them in one container or with a shared"
        " pid namespace, as the same user"
    )
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NotSupported(f"the memory of rank {owner} cannot be opened ({error}): {advice}") from error
    try:
        if os.fstat(descriptor).st_size != address.num_bytes + STAMP_BYTES:
            raise NotSupported(f"{path} is not the memory of rank {owner}: {advice}")
        try:
            block = SharedBlock(descriptor, address.num_bytes)
        except OSError as error:
            what = f"the {address.name} of rank {owner}"
            raise _not_mapped(rank, address.num_bytes, what, error) from error
    finally:
        os.close(descriptor)
    if block.stamp != address.stamp:
        raise NotSupported(f"{path} is not the memory of rank {owner}: {advice}")
    return block


def _not_mapped(rank: int | None, num_bytes: int, what: str, error: OSError) -> NotSupported:
    """The error for memory that cannot be mapped: its size and use, the limits that apply, what to do."""
    who = "this process" if rank is None else f"rank {rank}"
    return NotSupported(
        f"{who} could not map {num_bytes:,} bytes for {what} ({error.strerror}): {memory_limits_in_words()}."
        f" Every rank maps the heap and the windows of all ranks of its node. Pass Buffer a smaller"
        f" num_window_bytes (0 works, too: rows then go through rings) or smaller num_nvl_bytes and"
        f" num_rdma_bytes, which `anyep plan` tells; or raise the limit (ulimit -v unlimited)"
    )


def _tensor_over(view: memoryview, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(view, dtype=dtype, count=count, offset=offset).view(shape)
