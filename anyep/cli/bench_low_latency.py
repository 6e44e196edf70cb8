"""The cases of `anyep bench --mode low-latency`: what AnyEP does, plain copies, and the same job by Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.backends import cpu
from anyep.cli import draw
from anyep.cli.bench_measure import Case, Setup
from anyep.cli.gate import choose
from anyep.cli.ranks import Rank
from anyep.sizes import CHANNELS_PER_SCALE


def cases_of(rank: Rank, setup: Setup, tokens: int) -> list[Case]:
    """Every case at one number of tokens."""
    generator = torch.Generator().manual_seed(setup.seed + rank.rank)
    x = draw.normal(generator, tokens, setup.hidden).bfloat16()
    scores = draw.uniform(generator, tokens, setup.experts)
    topk_idx = choose(scores, setup.topk, setup.nodes)
    topk_weights = scores.gather(1, topk_idx)
    num_bytes = Buffer.get_low_latency_rdma_size_hint(tokens, setup.hidden, rank.num_ranks, setup.experts)
    buffer = Buffer(rank.group, 0, num_bytes, low_latency_mode=True, device="cpu", **setup.nodes.place)

    def dispatch(use_fp8: bool) -> Any:
        return buffer.low_latency_dispatch(x, topk_idx, tokens, setup.experts, use_fp8=use_fp8)

    rows, counts, handle, _, _ = dispatch(use_fp8=False)
    assert isinstance(rows, torch.Tensor)
    num_rows = int(counts.sum())

    def combine(outputs: torch.Tensor = rows, **options: Any) -> Any:
        return buffer.low_latency_combine(outputs, topk_idx, topk_weights, handle, **options)

    def combine_in_place() -> Any:
        return combine(buffer.get_next_low_latency_combine_buffer(handle), zero_copy=True)

    def pair(use_fp8: bool) -> Any:
        received = dispatch(use_fp8)
        # The experts' outputs are bf16 whatever they received; the values do not affect the time.
        outputs = rows if use_fp8 else received[0]
        return buffer.low_latency_combine(outputs, topk_idx, topk_weights, received[2])

    bf16_bytes = num_rows * 2 * setup.hidden
    fp8_bytes = num_rows * (setup.hidden + 4 * (setup.hidden // CHANNELS_PER_SCALE))
    source = torch.ones(max(num_rows, 1), 2 * setup.hidden, dtype=torch.uint8, device="cpu")
    target = cpu.OwnBlock("copy", source.numel())

    def copy(row_bytes: int) -> Callable[[], Any]:
        return lambda: cpu.copy_rows(target.address, source.data_ptr(), num_rows, row_bytes, 0)

    gloo = _Gloo(rank, x, topk_idx, topk_weights, setup.experts)

    def case(name: str, path: str, moved: int, work: Callable[[], Any], bound: Any, rival: str) -> Case:
        return Case(name, path, tokens, moved, work, bound, rival)

    def other(name: str, path: str, work: Callable[[], Any]) -> Case:
        return Case(name, path, tokens, bf16_bytes or 1, work)

    plain, half, both = ("bf16",), ("fp8",), ("bf16", "bf16")
    return [
        other("copy", "bf16", copy(2 * setup.hidden)),
        other("copy", "fp8", copy(fp8_bytes // max(num_rows, 1))),
        case("dispatch", "bf16", bf16_bytes, lambda: dispatch(use_fp8=False), plain, "gloo bf16"),
        case("dispatch", "fp8", fp8_bytes, lambda: dispatch(use_fp8=True), half, "gloo fp8"),
        other("dispatch", "gloo bf16", lambda: gloo.dispatch(use_fp8=False)),
        other("dispatch", "gloo fp8", lambda: gloo.dispatch(use_fp8=True)),
        case("combine", "bf16", bf16_bytes, combine, plain, "gloo"),
        other("combine", "gloo", gloo.combine),
        case("zero_copy_combine", "bf16", bf16_bytes, combine_in_place, plain, ""),
        case("logfmt_combine", "logfmt", bf16_bytes, lambda: combine(use_logfmt=True), plain, ""),
        case("pair", "bf16", 2 * bf16_bytes, lambda: pair(use_fp8=False), both, "gloo bf16"),
        case("pair", "fp8", fp8_bytes + bf16_bytes, lambda: pair(use_fp8=True), half + plain, "gloo fp8"),
        other("pair", "gloo bf16", lambda: gloo.pair(use_fp8=False)),
        other("pair", "gloo fp8", lambda: gloo.pair(use_fp8=True)),
    ]


class _Gloo:
    """The same job as a user would do it with torch.distributed: sort, exchange, regroup, add up."""

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

    def pair(self, use_fp8: bool) -> Any:
        return self.dispatch(use_fp8), self.combine()
