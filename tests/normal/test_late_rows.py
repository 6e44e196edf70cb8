"""Rows are announced when they are there: a receiver sees none before."""

from __future__ import annotations

import time
from typing import Any

from anyep.buffer import Buffer
from tests.support.cases import Case, check_case
from tests.support.world import RankContext, get_world

NAP_S = 0.2
"""Longer than a receiver needs to take rows that it takes to be there."""


def send_late(context: RankContext) -> None:
    """Rank 0 is slow to copy the rows of its first dispatch into the windows of all."""
    with Buffer(context.group, 1 << 20, device="cpu") as buffer:
        runtime: Any = buffer.runtime
        run = runtime._team.run

        def run_late(*arguments: Any, **options: Any) -> None:
            runtime._team.run = run
            time.sleep(NAP_S)
            run(*arguments, **options)

        if context.rank == 0:
            runtime._team.run = run_late
        check_case(context, Case(tokens=(5,) * context.num_ranks), buffer)


def test_a_rank_that_copies_late() -> None:
    get_world(3).run(send_late)
