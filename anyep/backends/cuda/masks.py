"""Which ranks are masked, as kernels know it, in the memory of this rank's GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from anyep.backends.cuda.gpu import Gpu
from anyep.backends.cuda.heap import SymmetricBlock
from anyep.backends.cuda.host_heap import HostBlock
from anyep.core.calls import Array
from anyep.layout import ControlRegion


class GpuMasks:
    """The masks that kernels know, in the memory of this rank's GPU."""

    def __init__(
        self,
        region: ControlRegion,
        heap: SymmetricBlock | HostBlock,
        gpu: Gpu,
        num_ranks: int,
        tell_kernels: Callable[[int, int], None],
    ) -> None:
        block = region.blocks.mask
        self._gpu = gpu
        self._num_ranks = num_ranks
        self._rows = heap.tensor(block.start, (num_ranks * block.stride // 8,), torch.int64)
        self.tell = tell_kernels

    def newest(self) -> Array:
        with self.beside_kernels():
            rows: Array = self._rows.cpu().numpy().reshape(self._num_ranks, -1)
        newest: Array = rows[:, : self._num_ranks].max(axis=0)
        return newest

    def beside_kernels(self) -> contextlib.AbstractContextManager[Any]:
        """Work of torch inside this context does not wait for waiting kernels (but see `side_stream`)."""
        side = self._gpu.side_stream
        return contextlib.nullcontext() if side is None else torch.cuda.stream(side)
