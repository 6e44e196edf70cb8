"""What is special in low-latency mode on GPUs, without a GPU: what goes wrong is raised by the next call, and
memory lives as long as kernels may read it. Ranks are real processes with kernels in Triton's interpreter.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from tests.support.gpu_scenarios import closing_threads
from tests.support.low_latency_cases import (
    RDMA_BYTES,
    Case,
    check_case,
    dispatch_by_hook,
    in_process_of,
    inputs_of,
)
from tests.support.places import Place
from tests.support.world import RankContext

PLACE = Place("simulated", 2)
pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="Triton is not installed: pip install anyep[cuda]"
    ),
    in_process_of(PLACE),
]
TIMEOUT_S = 240.0


def new_buffer(context: RankContext) -> Buffer:
    return Buffer(context.group, 0, RDMA_BYTES, low_latency_mode=True, device="cuda")


def message_of(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    try:
        call(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# Memory


def end_without_garbage_collection(context: RankContext, how: str) -> None:
    buffer = new_buffer(context)
    case = Case(tokens=(3,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    held: list[Any] = []
    if "hook" in how:
        held = [dispatch_by_hook(buffer, case, context.rank)[-1]]
        if how == "a hook that was called":
            held[0]()
        elif how == "a dropped hook":
            held.clear()
    dist.barrier(group=context.group)
    # What the interpreter of kernels left; the Buffer itself must leave nothing of the kind.
    gc.collect()
    heap = weakref.ref(buffer.runtime.device_control.heap._own)
    gc.disable()
    try:
        buffer.destroy()
        assert (heap() is None) is (how != "a hook that was not called")
        if held:
            message = message_of(held.pop())
            assert message.startswith("nothing" if how == "a hook that was called" else "BufferBroken")
        with new_buffer(context):
            assert heap() is None
            dist.barrier(group=context.group)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "how",
    [
        "calls in line",
        "a hook that was not called",
        pytest.param("a hook that was called", marks=pytest.mark.slow),
        pytest.param("a dropped hook", marks=pytest.mark.slow),
    ],
)
def test_memory_is_freed_with_the_buffer(how: str) -> None:
    PLACE.world().run(end_without_garbage_collection, how)


def drop_while_a_call_is_under_way(context: RankContext) -> None:
    """What kernels of low-latency calls read lives as long as they do."""
    buffer = new_buffer(context)
    check_case(context.rank, Case(tokens=(3,) * context.num_ranks, hidden=64), buffer)
    dist.barrier(group=context.group)
    mode = weakref.ref(buffer.runtime.low_latency.ops)
    over = threading.Event()
    buffer.runtime.low_latency.ops._order.done = SimpleNamespace(query=over.is_set)  # type: ignore[union-attr]
    del buffer
    gc.collect()
    assert mode() is not None
    over.set()
    for thread in closing_threads():
        thread.join(20)
    gc.collect()
    assert mode() is not None
    with new_buffer(context):
        assert mode() is None
        dist.barrier(group=context.group)


def test_a_buffer_dropped_while_a_call_is_under_way() -> None:
    PLACE.world().run(drop_while_a_call_is_under_way)


# What goes wrong is raised by the next call


def disagree(context: RankContext) -> None:
    """Every rank calls rightly, but the last one otherwise than the others; then all call alike, and hear."""
    rank, ranks = context.rank, context.num_ranks
    buffer = new_buffer(context)
    case = Case(tokens=(3,) * ranks, hidden=128)
    topk_idx = torch.zeros(3, 1, dtype=torch.int64)

    def dispatch(hidden: int = 128, max_tokens: int = case.max_tokens, use_fp8: bool = False) -> Any:
        x = torch.ones(3, hidden, dtype=torch.bfloat16)
        return buffer.low_latency_dispatch(x, topk_idx, max_tokens, case.num_experts, use_fp8=use_fp8)

    for other, sentence in (
        ({"hidden": 256}, "about the hidden size: 128 on rank 0; 256 on rank 1"),
        ({"use_fp8": True}, "about how values travel (use_fp8, round_scale, use_ue8m0, use_logfmt)"),
        ({}, "about the function called"),
        ({"max_tokens": 2}, "rank 1 refused its low-latency dispatch (call "),
    ):
        is_other = rank == ranks - 1
        if is_other and "max_tokens" in other:
            message = message_of(dispatch, **other)
            assert message.startswith("InvalidCall: x has 3 tokens, but num_max"), message
            rows, *_ = dispatch()
            assert rows.shape[-1] == 128
            continue
        if is_other and not other:
            # It waits for the others, so it hears at once.
            message = message_of(buffer.clean_low_latency_buffer, case.max_tokens, 128, case.num_experts)
            rows, *_ = dispatch()
            assert rows.shape[-1] == 128
        else:
            dispatch(**(other if is_other else {}))
            message = message_of(dispatch)
        assert message.startswith("Disagreement: "), message
        assert sentence in message, message
    check_case(rank, case, buffer)


def test_ranks_that_disagree() -> None:
    PLACE.world().run(disagree, timeout=TIMEOUT_S)


def pass_wrong_things(context: RankContext) -> None:
    """Rank 0 combines with a handle that cannot be, or asks for a row that is not there."""
    buffer = new_buffer(context)
    case = Case(tokens=(4,) * context.num_ranks, hidden=64)
    mine = inputs_of(case)[context.rank]
    good_idx, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)

    def dispatch() -> Any:
        arguments = (mine.x, good_idx, case.max_tokens, case.num_experts)
        return buffer.low_latency_dispatch(*arguments, use_fp8=False)

    for call, what in zip((2, 5, 8, 11), ("ranges", "counts", "tokens", "row"), strict=True):
        received, _, handle, _, _ = dispatch()
        topk_idx = good_idx
        wrong = f"InvalidCall: the contents of the handle of low-latency combine (call {call})"
        right = f"Disagreement: rank 0 refused its low-latency combine (call {call})"
        if what == "row":
            wrong = "InvalidCall: topk_idx sends token 2 to expert 1, which has no row of it"
            right = "nothing was raised"
        if context.rank == 0:
            source, ranges, *sizes = handle
            handle = {
                "ranges": (source, ranges.roll(1, 1).contiguous(), *sizes),
                "counts": (source, ranges + 1000, *sizes),
                "tokens": (source.flip(1).contiguous(), ranges, *sizes),
                "row": handle,
            }[what]
            topk_idx = torch.tensor([[0], [0], [1], [0]]) if what == "row" else good_idx
        assert message_of(buffer.low_latency_combine, received, topk_idx, weights, handle).startswith(
            "nothing"
        )
        message = message_of(dispatch)
        assert message.startswith(right if context.rank else wrong), (what, message)
    check_case(context.rank, case, buffer)


def test_wrong_handles_and_ids() -> None:
    PLACE.world().run(pass_wrong_things, timeout=TIMEOUT_S)
