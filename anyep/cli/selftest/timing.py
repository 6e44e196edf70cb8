"""Short benchmarks: how long calls take here, beside a plain copy of the received rows in the same run.

Every round begins with a barrier of the process group and counts until the slowest rank is done, so times
include how far apart ranks leave the barrier: enough to notice what is very slow. `anyep bench` measures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.cli.demo.job import now
from anyep.cli.selftest import low_latency, normal
from anyep.cli.selftest.plan import LL_HIDDEN, LL_MAX_TOKENS, LowLatencyCase, NormalCase, Place, Plan
from anyep.cli.selftest.reference import Tokens, received
from anyep.cli.selftest.report import Timing

HIDDEN: Final = 7168
TOPK: Final = 8
WARM_UP: Final = 2


def time_normal(buffer: Buffer, plan: Plan, place: Place) -> list[Timing]:
    """The calls of normal mode."""
    return [timing for tokens in plan.timed_tokens for timing in _normal_timings(buffer, plan, place, tokens)]


def _normal_timings(buffer: Buffer, plan: Plan, place: Place, tokens: int) -> list[Timing]:
    # As many tokens on all ranks.
    case = NormalCase("", tokens + buffer.group_size, HIDDEN, topk=TOPK)
    experts = normal.LOCAL_EXPERTS * buffer.group_size
    inputs = [_first(given, tokens) for given in normal.inputs_of(case, buffer.group_size, plan.seed)]
    given = inputs[buffer.rank].to(place.device)
    layout = buffer.get_dispatch_layout(given.topk_idx, experts)
    per_rank, per_node, per_expert, is_in_rank, _ = layout

    def dispatch() -> Any:
        return buffer.dispatch(
            given.x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=given.topk_idx,
            topk_weights=given.topk_weights,
        )

    recv, *_, handle, _ = dispatch()
    source = received(inputs, buffer.rank, experts).x.to(place.device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": dispatch,
        "dispatch along a handle": lambda: buffer.dispatch(given.x, handle=handle),
        "combine": lambda: buffer.combine(recv, handle),
        "plain copy of the rows": lambda: target.copy_(source),
    }
    num_bytes = source.numel() * source.element_size()
    return [
        _timing(buffer, plan, place, (name, tokens, HIDDEN, num_bytes), call) for name, call in calls.items()
    ]


def time_low_latency(buffer: Buffer, plan: Plan, place: Place) -> list[Timing]:
    """A low-latency dispatch with its combine."""
    case = LowLatencyCase("", LL_MAX_TOKENS)
    experts = low_latency.LOCAL_EXPERTS * buffer.group_size
    inputs = low_latency.inputs_of(case, buffer.group_size, plan.seed)
    given = inputs[buffer.rank].to(place.device)
    shape = (low_latency.LOCAL_EXPERTS, buffer.group_size * LL_MAX_TOKENS, LL_HIDDEN)
    outputs = torch.zeros(shape, dtype=torch.bfloat16, device=place.device)

    def pair() -> None:
        handle = buffer.low_latency_dispatch(given.x, given.topk_idx, LL_MAX_TOKENS, experts, use_fp8=False)[
            2
        ]
        buffer.low_latency_combine(outputs, given.topk_idx, given.topk_weights, handle)

    num_rows = sum(
        int((tokens.topk_idx // low_latency.LOCAL_EXPERTS == buffer.rank).sum()) for tokens in inputs
    )
    size = ("low-latency pair, bf16", LL_MAX_TOKENS, LL_HIDDEN, 2 * LL_HIDDEN * num_rows)
    return [_timing(buffer, plan, place, size, pair)]


def _first(given: Tokens, tokens: int) -> Tokens:
    return Tokens(given.x[:tokens], given.topk_idx[:tokens], given.topk_weights[:tokens])


def _timing(
    buffer: Buffer, plan: Plan, place: Place, size: tuple[str, int, int, int], call: Callable[[], Any]
) -> Timing:
    """The median over rounds of the slowest rank's time; the same on all ranks."""
    name, tokens, hidden, num_bytes = size
    spans = []
    for _ in range(WARM_UP + plan.num_rounds):
        dist.barrier(group=buffer.group)
        start = now(place.device)
        call()
        spans.append(now(place.device) - start)
    by_rank: list[Any] = [None] * buffer.group_size
    dist.all_gather_object(by_rank, (spans[WARM_UP:], num_bytes), group=buffer.group)
    slowest = [max(of_round) for of_round in zip(*(times for times, _ in by_rank), strict=True)]
    mean_bytes = round(statistics.mean(count for _, count in by_rank))
    return Timing(name, str(place), tokens, hidden, statistics.median(slowest), mean_bytes)
