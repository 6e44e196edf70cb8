"""A communicator for Buffers that are made without a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class FakeComm:
    """As much of an mpi4py communicator as a Buffer needs."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def Get_rank(self) -> int:  # noqa: N802
        return int(self._group.rank())

    def Get_size(self) -> int:  # noqa: N802
        return int(self._group.size())

    def allgather(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self._group.size()
        dist.all_gather_object(things, thing, group=self._group)
        return things
