"""Rounds that take masked ranks back, one right after the other."""

from __future__ import annotations

import time

import torch

from anyep.api.buffer import Buffer
from anyep.modes.masks import SEQUENCE, _Round
from tests.support.low_latency_cases import RDMA_BYTES, Case, check_case
from tests.support.world import RankContext, get_world

NUM_RANKS = 3


def take_back_twice(context: RankContext) -> None:
    """The last rank is masked. It looks for requests when one is still missing; before it looks for newer
    rounds, the others have ended this round and begun the next."""
    rank, last = context.rank, context.num_ranks - 1
    case = Case(tokens=(3,) * context.num_ranks, hidden=64)
    with Buffer(
        context.group, 0, RDMA_BYTES, low_latency_mode=True, enable_shrink=True, device="cpu"
    ) as buffer:
        if rank == 0:
            buffer.low_latency_update_mask_buffer(last, mask=True)
        torch.distributed.barrier(context.group)
        follow = _Round._follow_newer_requests

        def follow_late(self: _Round) -> bool:
            torch.distributed.barrier(context.group)
            _Round._follow_newer_requests = follow  # type: ignore[method-assign]
            others = [other for other in range(last) if other != rank]
            while not all(self._words[other, SEQUENCE] == 4 for other in others):
                time.sleep(0.001)
                self._read(2)
            return follow(self)

        if rank == last:
            _Round._follow_newer_requests = follow_late  # type: ignore[method-assign]
        else:
            # Only now: the last rank has looked, and found nothing.
            torch.distributed.barrier(context.group)
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_clean_mask_buffer()
        check_case(rank, case, buffer)


def test_a_masked_rank_does_not_skip_the_round_that_takes_it_back() -> None:
    get_world(NUM_RANKS).run(take_back_twice)
