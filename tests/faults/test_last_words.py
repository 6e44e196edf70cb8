"""What a rank says of itself at its end: its first word stays, and nobody else speaks for it."""

from __future__ import annotations

import contextlib
import os

import torch.distributed as dist

from anyep import ending
from anyep.api.buffer import Buffer
from tests.support.world import RankContext, get_world


def leave_by_an_error(context: RankContext) -> str:
    """Rank 1 leaves its block by an error, which destroys its Buffer, too. What rank 0 then hears of it."""
    heard = ""
    with contextlib.suppress(ValueError), Buffer(context.group, 1 << 20, device="cpu") as buffer:
        if context.rank == 1:
            raise ValueError("boom")
        dist.barrier(context.group)
        heard = str(buffer.status()[1])
    if context.rank == 1:
        dist.barrier(context.group)
    return heard


def test_the_reason_to_leave_stays() -> None:
    heard, _ = get_world(2).run(leave_by_an_error)
    assert heard.endswith("left its `with Buffer(...)` block by ValueError: boom")


def end_a_child(context: RankContext) -> list[str]:
    """A forked child ends as a process ends. What the ranks then say of themselves."""
    with Buffer(context.group, 1 << 20, device="cpu") as buffer:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                ending.end_process()
            os._exit(0)
        os.waitpid(child, 0)
        dist.barrier(context.group)
        states = [status.state for status in buffer.status()]
        dist.barrier(context.group)
        return states


def test_a_child_that_ends_does_not_speak_for_its_parent() -> None:
    assert get_world(2).run(end_a_child) == [["alive", "alive"]] * 2
