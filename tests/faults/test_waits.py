"""When a wait gives up: nothing has come for as long as the timeout says, or who is waited for is gone."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from anyep import PeerLost, WaitTimeout
from anyep.api.buffer import Buffer
from anyep.core.calls import Kind, Stall
from tests.support.world import RankContext, get_world

TIMEOUT_S = 0.2
NUM_STEPS = 12
STEP_S = 0.04


def wait_slowly(context: RankContext) -> int:
    """Two waits that take more than twice the timeout: in the first something comes with every step."""
    usual = os.environ.get("ANYEP_TIMEOUT_S")
    os.environ["ANYEP_TIMEOUT_S"] = str(TIMEOUT_S)
    try:
        buffer = Buffer(context.group, 1 << 20, device="cpu")
    finally:
        del os.environ["ANYEP_TIMEOUT_S"]
        if usual is not None:
            os.environ["ANYEP_TIMEOUT_S"] = usual
    with buffer:
        assert buffer.runtime is not None
        control = buffer.runtime.control
        call = control.begin(Kind.DISPATCH)
        num_steps = 0

        def step(_: int) -> int:
            nonlocal num_steps
            time.sleep(STEP_S)
            num_steps += 1
            return NUM_STEPS - num_steps

        def stalled() -> Stall:
            return Stall([context.rank], "rows", num_steps, NUM_STEPS)

        control.wait_until(call, step, stalled, progress=lambda: num_steps)
        steps_with_progress, num_steps = num_steps, -1000
        with pytest.raises(WaitTimeout, match=r"waited 0\.2 s for the rows of rank"):
            control.wait_until(call, step, stalled)
    return steps_with_progress


def test_the_deadline_counts_from_what_came_last() -> None:
    assert get_world(2).run(wait_slowly) == [NUM_STEPS] * 2


def wait_for_a_rank_that_is_gone(context: RankContext) -> list[int]:
    """Rank 1 has destroyed its Buffer. Rank 0 waits for it three times: what it sent before has come by the
    first look, by the second one, and never."""
    buffer = Buffer(context.group, 1 << 20, device="cpu")
    if context.rank == 1:
        buffer.destroy()
    dist.barrier(context.group)
    looks: list[int] = []
    if context.rank == 0:
        assert buffer.runtime is not None
        control = buffer.runtime.control
        call = control.begin(Kind.DISPATCH)
        for comes_at in (2, 3):
            seen: list[int] = []

            def step(num_spins: int, seen: list[int] = seen, comes_at: int = comes_at) -> int:
                seen.append(num_spins)
                return int(len(seen) < comes_at)

            control.wait_until(call, step, lambda: Stall([1], "rows", 0, 1))
            looks.append(len(seen))
        with pytest.raises(PeerLost, match=r"rank 1 .* destroyed its Buffer"):
            control.wait_until(call, lambda _: 1, lambda: Stall([1], "rows", 0, 1))
        buffer.destroy()
    return looks


def test_what_was_sent_before_a_rank_was_gone_is_looked_for_once_more() -> None:
    assert get_world(2).run(wait_for_a_rank_that_is_gone) == [[2, 3], []]
