"""The alternative to normal mode that is measured for comparison: torch's all-to-all, over Gloo or NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class AllToAll:
    """The same job as a user would do it with torch.distributed: pack, exchange, add up."""

    def __init__(self, group: Any, x: torch.Tensor, in_rank: torch.Tensor) -> None:
        self._group = group
        self._x = x
        self._order = torch.cat([torch.nonzero(to_rank).flatten() for to_rank in in_rank.unbind(1)])
        self._to_send = in_rank.sum(0)
        self._to_receive = torch.empty_like(self._to_send)
        self.dispatch()

    def dispatch(self) -> torch.Tensor:
        """Exchange the counts, then the rows."""
        dist.all_to_all_single(self._to_receive, self._to_send, group=self._group)
        self._sends, self._receives = self._to_send.tolist(), self._to_receive.tolist()
        self._received = self.send_rows()
        return self._received

    def send_rows(self) -> torch.Tensor:
        """Pack the rows by receiver and exchange them."""
        packed = self._x.index_select(0, self._order)
        received = packed.new_empty((sum(self._receives), packed.shape[1]))
        dist.all_to_all_single(received, packed, self._receives, self._sends, group=self._group)
        return received

    def combine(self) -> torch.Tensor:
        """Send the rows back and add them up in float32."""
        returned = self._x.new_empty((len(self._order), self._x.shape[1]))
        dist.all_to_all_single(returned, self._received, self._sends, self._receives, group=self._group)
        total = torch.zeros(self._x.shape, dtype=torch.float32, device=self._x.device)
        return total.index_add_(0, self._order, returned.float()).to(self._x.dtype)
