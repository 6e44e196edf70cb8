"""How long things may take in tests, on a machine that may be busy with other things.

`scaled(2)` is a bound for what takes less than 2 s on an idle machine; `patience_s` is a deadline to give to
ranks. Better than either is to assert the cause: which event ended a wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from tests.support.world import RankContext

PROBE_S: Final = 0.1
MARGIN: Final = 2.0


def scaled(seconds: float) -> float:
    """As many seconds as `seconds` of an idle machine may become on this one, now.

    The factor is the wall time of a little work over its processor time, with a margin. Call it after what it
    bounds, when the machine is as busy as it was then.
    """
    wall, busy = time.perf_counter(), time.thread_time()
    while time.thread_time() - busy < PROBE_S:
        sum(range(1000))
    factor = (time.perf_counter() - wall) / (time.thread_time() - busy)
    return seconds * MARGIN * max(1.0, factor)


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
