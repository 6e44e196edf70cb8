"""Low-latency mode between virtual nodes of GPUs, without a GPU: all ranks map each other's memory, so a call
is the same as on one node. What does not work there so far is refused in time, on all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from anyep import NotSupported
from anyep.api.buffer import Buffer
from tests.support import cases as normal
from tests.support.low_latency_cases import (
    RDMA_BYTES,
    Case,
    buffer_for,
    check_case,
    in_process_of,
    inputs_of,
    run_case,
)
from tests.support.places import Place
from tests.support.world import RankContext

FOUR, PAIR = Place("simulated", 4, num_nodes=2), Place("simulated", 2, num_nodes=2)
TIMEOUT_S = 240.0
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: pip install anyep[cuda]"
)


def results_on(context: RankContext, case: Case) -> list[torch.Tensor]:
    """Everything that a pair of calls returns, as far as it is defined."""
    run_case(context, case)
    buffer = buffer_for(context, ranks_per_node=case.ranks_per_node)
    mine = inputs_of(case)[context.rank]
    (data, scales), counts, handle, _, hook = buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, case.max_tokens, case.num_experts, return_recv_hook=True
    )
    assert hook is not None
    hook()
    source, ranges, *_ = handle
    rows = torch.arange(data.shape[1], device="cpu")[None, :] < counts[:, None]
    outputs = torch.ones(data.shape, dtype=torch.bfloat16, device="cpu") * source.unsqueeze(-1)
    lent = buffer.get_next_low_latency_combine_buffer(handle)
    lent[rows] = outputs[rows]
    combined, *_ = buffer.low_latency_combine(lent, mine.topk_idx, mine.topk_weights, handle, zero_copy=True)
    return [data.view(torch.uint8)[rows], scales[rows], counts, source[rows], ranges, combined]


def same_as_on_one_node(context: RankContext, case: Case) -> bool:
    here, there = results_on(context, case), results_on(context, replace(case, ranks_per_node=None))
    return all(torch.equal(one, other) for one, other in zip(here, there, strict=True))


@in_process_of(FOUR)
def test_the_same_bits_as_on_one_node() -> None:
    case = Case((4, 0, 3, 5), hidden=256, num_topk=3, travel="fp8", zero_copy=True, how="hook").at(FOUR)
    assert FOUR.world().run(same_as_on_one_node, case, timeout=TIMEOUT_S) == [True] * 4


def both_modes(context: RankContext) -> None:
    """Of one Buffer, in turns: their rows lie in different parts of its memory."""
    key = ("both modes", PAIR)
    if key not in context.keep:
        context.keep[key] = Buffer(
            context.group, 1 << 20, RDMA_BYTES, low_latency_mode=True, device="cuda", ranks_per_node=1
        )
    buffer = context.keep[key]
    rows = normal.Case((5, 9), num_topk=3, combine_weights=True).at(PAIR)
    for seed in range(2):
        normal.check_case(context, replace(rows, seed=seed), buffer)
        few = Case((3, 3), seed=seed).at(PAIR)
        buffer.clean_low_latency_buffer(few.max_tokens, few.hidden, few.num_experts)
        check_case(context.rank, few, buffer)


@in_process_of(PAIR)
def test_both_modes() -> None:
    PAIR.world().run(both_modes, timeout=TIMEOUT_S)


def make(context: RankContext, options: dict[str, Any]) -> str:
    with pytest.raises(NotSupported) as raised:
        Buffer(context.group, 0, RDMA_BYTES, device="cuda", ranks_per_node=1, **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"low_latency_mode": True, "network": "nixl"}, "on GPUs nodes are connected by memory only, so far"),
    ],
)
@in_process_of(PAIR)
def test_buffers_that_cannot_be_made(options: dict[str, Any], sentence: str) -> None:
    for message in PAIR.world().run(make, options):
        assert message.startswith(f"2 nodes of 1 ranks: {sentence}"), message
