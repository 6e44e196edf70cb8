"""How ranks of `anyep bench` start a case together."""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import torch.distributed as dist

from anyep.cli.bench.clock import Barrier
from anyep.cli.ranks import Rank
from anyep.errors import WaitTimeout
from tests.support.world import RankContext, get_world


def wait_for_a_late_rank(context: RankContext) -> str:
    with patch.dict(os.environ, ANYEP_TIMEOUT_S="0.5"):
        barrier = Barrier(Rank(context.rank, context.num_ranks, context.group, print))
    barrier.wait()
    try:
        if context.rank == 1:
            # It comes once rank 0 has given up.
            dist.barrier(context.group)
        started = time.monotonic()
        barrier.wait()
    except WaitTimeout as error:
        assert time.monotonic() - started >= 0.5
        return str(error)
    finally:
        if context.rank == 0:
            dist.barrier(context.group)
    return ""


def test_a_rank_that_does_not_come_is_named() -> None:
    told, late = get_world(2).run(wait_for_a_late_rank)
    assert told == (
        "for 0.5 s the ranks have waited for rank 1 to start a case together."
        " If a case only takes longer, set ANYEP_TIMEOUT_S"
    )
    assert late == ""
