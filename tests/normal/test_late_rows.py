"""Rows are signalled when they are there: a receiver sees none before."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from anyep.api.buffer import Buffer
from tests.support.cases import Case, check_case
from tests.support.places import Place, buffer_device, tensor_device
from tests.support.world import RankContext, get_world

NAP_S = 0.2
"""Longer than a receiver needs to take rows that it takes to be there."""


def send_late(context: RankContext) -> None:
    """Rank 0 is slow to copy the rows of its first dispatch into the windows of all."""
    with Buffer(context.group, 1 << 20, device="cpu") as buffer:
        session: Any = buffer.runtime
        team = session.normal.ops.mover.team
        run = team.run

        def run_late(*arguments: Any, **options: Any) -> None:
            team.run = run
            time.sleep(NAP_S)
            run(*arguments, **options)

        if context.rank == 0:
            team.run = run_late
        check_case(context, Case(tokens=(5,) * context.num_ranks), buffer)


def test_a_rank_that_copies_late() -> None:
    get_world(3).run(send_late)


def send_rows_late(buffer: Buffer) -> None:
    """Rank 0 sends the rows of its next dispatch some time after its notify messages."""
    if buffer_device() == "cuda":
        from anyep.backends.cuda import batch

        interpret = batch.interpret

        def interpret_late(launch: batch.Launch, values: Any) -> None:
            if launch.kernel.fn.__name__ == "send_to_windows":
                batch.interpret = interpret
                time.sleep(NAP_S)
            interpret(launch, values)

        batch.interpret = interpret_late
        return
    session: Any = buffer.runtime
    start = session.normal.ops.start

    def start_late(*arguments: Any) -> Any:
        """The operations of a call whose rows are sent late."""
        call = start(*arguments)
        notify = call.notify_by_handle

        def notify_and_sleep(*arguments: Any) -> None:
            notify(*arguments)
            call._steps.append(lambda: time.sleep(NAP_S))

        call.notify_by_handle = notify_and_sleep
        return call

    session.normal.ops.start = start_late


def dispatch_again_late(context: RankContext) -> list[float]:
    """Rank 0 is slow in a dispatch along a known routing. What it brought."""
    num_tokens, num_ranks, device = 4, context.num_ranks, tensor_device()
    topk_idx = torch.arange(num_tokens * num_ranks, device=device).view(num_tokens, num_ranks) % num_ranks
    with Buffer(context.group, 1 << 20, device=buffer_device(), num_window_bytes=1 << 20) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_ranks)
        x = torch.zeros(num_tokens, 64, dtype=torch.bfloat16, device=device)
        counts = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert}
        *_, handle, _ = buffer.dispatch(x, is_token_in_rank=in_rank, **counts)
        if context.rank == 0:
            send_rows_late(buffer)
        again = buffer.dispatch(x + context.rank + 1, handle=handle)[0]
        found: list[float] = again.float().unique().tolist()  # type: ignore[union-attr]
        return found


@pytest.mark.parametrize("place", [place.param() for place in (Place("cpu", 2), Place("simulated", 2))])
def test_a_dispatch_along_a_known_routing(place: Place) -> None:
    assert place.world().run(dispatch_again_late) == [[1.0, 2.0]] * 2
