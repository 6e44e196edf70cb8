"""A mask that a rank hears of is passed on to all: who set it may be gone before all have been told."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.core.calls import Topic
from tests.support.low_latency_cases import RDMA_BYTES
from tests.support.world import RankContext, get_world


def tell_one_rank(context: RankContext) -> list[int]:
    """Rank 0 tells rank 1 alone that rank 2 is masked. What each rank knows when rank 1 has looked."""
    with Buffer(
        context.group, 0, RDMA_BYTES, low_latency_mode=True, enable_shrink=True, device="cpu"
    ) as buffer:
        mode: Any = buffer.runtime.low_latency
        masks, control = mode.masks, mode.masks.control
        known = torch.zeros(context.num_ranks, dtype=torch.int32, device="cpu")
        if context.rank == 0:
            control.signal(masks._at_peers[1:2] + 8 * 2, Topic.MASK, 1, control.wake_ups[1:2])
        dist.barrier(context.group)
        if context.rank == 1:
            buffer.low_latency_query_mask_buffer(known)
        dist.barrier(context.group)
        buffer.low_latency_query_mask_buffer(known)
        found: list[int] = known.tolist()
        return found


def test_what_one_rank_hears_all_hear() -> None:
    assert get_world(3).run(tell_one_rank) == [[0, 0, 1]] * 3
