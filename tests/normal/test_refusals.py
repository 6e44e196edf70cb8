"""A rank that refuses calls one after the other: its peers hear the reason of each."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref

import pytest
import torch

from anyep import Disagreement, InvalidCall
from anyep.api.buffer import Buffer
from tests.support.cases import Case, check_case
from tests.support.world import RankContext, get_world

NUM_CALLS = 4
NAP_S = 0.3
"""As long as rank 0 needs to refuse all calls, if it waits for nobody."""


def refuse_in_a_row(context: RankContext) -> list[str]:
    """What each call raises. Rank 0 calls wrongly, in another way each time; rank 1 rightly, and later."""
    num_experts = context.num_ranks
    topk_idx = torch.arange(2 * num_experts, device="cpu").view(-1, 1) % num_experts
    messages = []
    with Buffer(context.group, 1 << 20, device="cpu") as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        if context.rank == 1:
            time.sleep(NAP_S)
        for number in range(NUM_CALLS):
            # Rows of 2, 4, ... bytes are too short.
            hidden = 1 + number if context.rank == 0 else 32
            rows = torch.zeros(len(topk_idx), hidden, dtype=torch.bfloat16, device="cpu")
            with pytest.raises((InvalidCall, Disagreement)) as raised:
                buffer.dispatch(
                    rows,
                    num_tokens_per_rank=per_rank,
                    is_token_in_rank=in_rank,
                    num_tokens_per_expert=per_expert,
                )
            messages.append(str(raised.value))
        check_case(context, Case(tokens=(3,) * context.num_ranks), buffer)
    return messages


def test_every_reason_is_heard() -> None:
    wrong, right = get_world(2).run(refuse_in_a_row)
    for number, (of_rank_0, of_rank_1) in enumerate(zip(wrong, right, strict=True)):
        reason = f"a row of {2 + 2 * number} bytes is no multiple of 16 bytes"
        assert of_rank_0.startswith(reason)
        assert of_rank_1.startswith(f"rank 0 refused its dispatch (call {1 + number})")
        assert reason in of_rank_1


def refuse_and_destroy(context: RankContext) -> bool:
    """Whether anything of a Buffer stays after a refused call, without the garbage collector."""
    buffer = Buffer(context.group, 1 << 20, device="cpu")
    session = weakref.ref(buffer.runtime)
    gc.collect()
    gc.disable()
    try:
        rows = torch.zeros(2, 32, dtype=torch.bfloat16, device="cpu")
        with contextlib.suppress(InvalidCall):
            buffer.internode_dispatch(rows)
        with contextlib.suppress(InvalidCall):
            buffer.combine(rows, ())
        buffer.destroy()
        return session() is not None
    finally:
        gc.enable()


def test_a_refused_call_keeps_nothing() -> None:
    assert get_world(2).run(refuse_and_destroy) == [False, False]
