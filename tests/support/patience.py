"""How long ranks are to be waited for in tests, on a machine that may be busy with other things."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.support.world import RankContext


def patience_s(
    context: RankContext, work: Callable[[], object], least_s: float, factor: float = 15, turns: int = 2
) -> float:
    """A deadline that no rank misses unless a test lets it: many times what work takes, here and now.

    All ranks do the work together, once to warm up and then a few times; the longest time of any rank counts,
    so all ranks have the same deadline. On an idle machine it is `least_s`.
    """
    work()
    longest = 0.0
    for _ in range(turns):
        dist.barrier(group=context.group)
        started = time.monotonic()
        work()
        longest = max(longest, time.monotonic() - started)
    of_all = torch.tensor([longest], dtype=torch.float64, device="cpu")
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=context.group)
    return max(least_s, factor * float(of_all))
