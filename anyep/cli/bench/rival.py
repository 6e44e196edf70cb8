"""The alternatives that are measured for comparison: torch's all-to-all, over Gloo or NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from anyep.cli.ranks import Rank
from anyep.sizes import CHANNELS_PER_SCALE


class AllToAll:
    """Normal mode as a user would do it with torch.distributed: pack, exchange, add up."""

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


class ByExpert:
    """Low-latency mode as a user would do it with torch.distributed: sort, exchange, regroup, add up."""

    def __init__(self, rank: Rank, x: Any, topk_idx: Any, topk_weights: Any, num_experts: int) -> None:
        self._group = rank.group
        self._num_ranks = rank.num_ranks
        self._x = x
        self._num_experts = num_experts
        order = topk_idx.flatten().argsort(stable=True)
        self._token = order // topk_idx.shape[1]
        self._weight = topk_weights.flatten()[order].unsqueeze(1)
        self._per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        self.dispatch(use_fp8=False)

    def dispatch(self, use_fp8: bool) -> Any:
        """Exchange the counts, then the rows, and sort them by expert."""
        theirs = torch.empty_like(self._per_expert)
        dist.all_to_all_single(theirs, self._per_expert, group=self._group)
        to_send = self._per_expert.view(self._num_ranks, -1).sum(1).tolist()
        by_source = theirs.view(self._num_ranks, -1)
        to_receive = by_source.sum(1).tolist()
        local = torch.arange(by_source.shape[1], dtype=torch.int64, device=theirs.device).repeat(
            self._num_ranks
        )
        self._by_expert = local.repeat_interleave(theirs).argsort(stable=True)
        self._splits = (to_send, to_receive)

        def exchange(values: torch.Tensor) -> torch.Tensor:
            packed = values.index_select(0, self._token)
            received = packed.new_empty((sum(to_receive), packed.shape[1]))
            dist.all_to_all_single(received, packed, to_receive, to_send, group=self._group)
            return received.index_select(0, self._by_expert)

        if not use_fp8:
            self._rows = exchange(self._x)
            return self._rows
        blocks = self._x.float().view(len(self._x), -1, CHANNELS_PER_SCALE)
        scales = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
        data = (blocks / scales).to(torch.float8_e4m3fn).view(self._x.shape)
        return exchange(data.view(torch.uint8)), exchange(scales.squeeze(-1))

    def combine(self) -> Any:
        """Send the rows back and add them up in float32, weighted."""
        to_send, to_receive = self._splits
        packed = torch.empty_like(self._rows)
        packed[self._by_expert] = self._rows
        returned = packed.new_empty((len(self._token), packed.shape[1]))
        dist.all_to_all_single(returned, packed, to_send, to_receive, group=self._group)
        total = torch.zeros(self._x.shape, dtype=torch.float32, device=self._x.device)
        return total.index_add_(0, self._token, returned.float() * self._weight).to(self._x.dtype)
