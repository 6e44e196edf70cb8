"""Dispatches and combines of all kinds on a GPU, one after the other, compared on the GPU, bit for bit."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from anyep import Config
from anyep.api.buffer import Buffer
from tests.support.cases import NVL_BYTES, RDMA_BYTES, overlap_of
from tests.support.gpu_oracle import Shape, Tally, Truth, experts
from tests.support.gpu_scenarios import POISON, device_of
from tests.support.world import RankContext

CONFIG = Config(8, 6, 64)
KINDS = ("counted", "counted", "worst", "cached", "async", "async worst", "async cached")


def layout_of(buffer: Buffer, topk_idx: torch.Tensor, num_experts: int) -> dict[str, Any]:
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "config": CONFIG,
    }


def check_pair(
    buffer: Buffer, truth: Truth, kind: str, in_window: bool, tally: Tally, number: int
) -> tuple[Any, ...]:
    """A dispatch and a combine, and what they should be. What they return, for those who want to hold it."""
    shape, rank, is_async = truth.shape, buffer.rank, "async" in kind
    num_worst = shape.most_rows if "worst" in kind else 0
    # No peer writes to these windows before it has a notify message, which comes after this.
    buffer.runtime.windows.fill_free(POISON)
    recv, ids, weights, counts, handle, event = buffer.dispatch(
        truth.x,
        topk_idx=truth.topk_idx,
        topk_weights=truth.topk_weights,
        num_worst_tokens=num_worst,
        **layout_of(buffer, truth.topk_idx, shape.num_experts),
        **overlap_of(buffer, is_async),
    )
    event.current_stream_wait()
    assert isinstance(recv, torch.Tensor)
    assert ids is not None
    assert weights is not None
    assert handle is not None
    assert counts == ([] if num_worst else truth.tokens_per_expert)
    assert len(recv) == (num_worst or truth.num_rows)
    num_rows = truth.num_rows
    pairs: list[tuple[torch.Tensor | None, torch.Tensor]] = [
        (recv[:num_rows].clone(), truth.rows),
        (ids[:num_rows], truth.local_ids),
        (weights[:num_rows], truth.local_weights),
    ]
    if num_worst:
        pairs.append((ids[num_rows:], torch.full_like(ids[num_rows:], -1)))
    if "cached" in kind:
        again, *_, event = buffer.dispatch(
            truth.x, handle=handle, config=CONFIG, **overlap_of(buffer, is_async)
        )
        event.current_stream_wait()
        assert isinstance(again, torch.Tensor)
        recv = again
        pairs.append((recv[:num_rows].clone(), truth.rows))
    outputs = experts(recv, rank)
    if in_window:
        outputs = recv.copy_(outputs)
    combined, combined_weights, event = buffer.combine(
        outputs, handle, topk_weights=weights, config=CONFIG, **overlap_of(buffer, is_async)
    )
    event.current_stream_wait()
    pairs += [(combined, truth.combined), (combined_weights, truth.combined_weights)]
    tally.compare(number, *pairs)
    return recv, ids, weights, handle, combined


def soak(
    context: RankContext, num_pairs: int, num_window_bytes: int | None, seed: int, num_nodes: int = 1
) -> float:
    """Pairs of all kinds, with changing routings; some results are held for a while. The seconds it took."""
    of_nodes: dict[str, Any] = {}
    if num_nodes > 1:
        of_nodes = {"num_rdma_bytes": RDMA_BYTES, "ranks_per_node": context.num_ranks // num_nodes}
    buffer = Buffer(context.group, NVL_BYTES, device="cuda", num_window_bytes=num_window_bytes, **of_nodes)
    device, shape = device_of(buffer), Shape(context.num_ranks, num_nodes=num_nodes)
    truths = [Truth(shape, seed + index, context.rank, device) for index in range(min(200, num_pairs))]
    # All ranks draw the same.
    chance, tally = random.Random(seed), Tally(device)
    held: deque[Any] = deque(maxlen=4)
    started = time.monotonic()
    for number in range(num_pairs):
        truth, kind, in_window = chance.choice(truths), chance.choice(KINDS), chance.random() < 0.5
        results = check_pair(buffer, truth, kind, in_window, tally, number)
        if chance.random() < 0.3:
            held.append(results)
        if chance.random() < 0.1:
            held.clear()
        if number % 500 == 499:
            tally.check("pairs")
    tally.check("pairs")
    seconds = time.monotonic() - started
    dist.barrier(group=context.group)
    buffer.destroy()
    return seconds
