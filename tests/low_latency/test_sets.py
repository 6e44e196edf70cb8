"""A set of slots is written again only when every reader has taken its rows out of it."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from anyep import Masked
from anyep.api.buffer import Buffer
from tests.support.low_latency_cases import RDMA_BYTES
from tests.support.world import RankContext, get_world

TOKENS, HIDDEN = 4, 64
NAP_S = 0.2
"""Longer than a rank needs to send two calls, if it waits for nobody."""


def read_late(context: RankContext) -> list[list[float]]:
    """Three dispatches, of which two are in flight at a time; the third needs the slots of the first. Rank 0
    is slow to take its rows. What each dispatch brought."""
    num_experts = context.num_ranks
    topk_idx = torch.arange(TOKENS * num_experts, device="cpu").view(TOKENS, num_experts) % num_experts
    with Buffer(context.group, 0, RDMA_BYTES, low_latency_mode=True, device="cpu") as buffer:
        session: Any = buffer.runtime
        mode = session.low_latency.ops
        pack = mode._pack

        def pack_late(*arguments: Any) -> None:
            time.sleep(NAP_S)
            pack(*arguments)

        if context.rank == 0:
            mode._pack = pack_late
        received: list[torch.Tensor] = []
        hooks = []
        for number in range(3):
            rows = torch.full((TOKENS, HIDDEN), float(number), dtype=torch.bfloat16, device="cpu")
            x, _, _, _, hook = buffer.low_latency_dispatch(
                rows, topk_idx, TOKENS, num_experts, use_fp8=False, return_recv_hook=True
            )
            received.append(x)
            hooks.append(hook)
            if number == 0:
                hook()
        for hook in hooks[1:]:
            hook()
        return [x[0].unique().tolist() for x in received]


def test_rows_stay_until_the_last_reader_has_them() -> None:
    assert get_world(2).run(read_late) == [[[0.0], [1.0], [2.0]]] * 2


def be_masked_while_reading(context: RankContext) -> str:
    """Rank 0 is masked while it takes rows, which their senders may write over from then on."""
    num_experts = context.num_ranks
    topk_idx = torch.arange(TOKENS * num_experts, device="cpu").view(TOKENS, num_experts) % num_experts
    rows = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cpu")
    with Buffer(
        context.group, 0, RDMA_BYTES, low_latency_mode=True, enable_shrink=True, device="cpu"
    ) as buffer:
        session: Any = buffer.runtime
        mode = session.low_latency.ops
        pack = mode._pack

        def wait_for_the_mask() -> None:
            dist.barrier(context.group)
            if context.rank == 1:
                buffer.low_latency_update_mask_buffer(0, mask=True)
            dist.barrier(context.group)

        def pack_late(*arguments: Any) -> None:
            wait_for_the_mask()
            pack(*arguments)

        if context.rank == 0:
            mode._pack = pack_late
        try:
            buffer.low_latency_dispatch(rows, topk_idx, TOKENS, num_experts, use_fp8=False)
        except Masked:
            return "masked"
        if context.rank != 0:
            wait_for_the_mask()
        return "worked"


def test_a_rank_that_is_masked_while_it_reads_gets_no_rows() -> None:
    assert get_world(3).run(be_masked_while_reading) == ["masked", "worked", "worked"]
