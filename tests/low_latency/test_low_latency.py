"""Low-latency dispatch and combine between real processes, against the dense reference, bit for bit."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anyep.buffer import Buffer
from tests.support import cases
from tests.support.low_latency_cases import (
    FORMATS,
    RDMA_BYTES,
    Case,
    buffer_for,
    check_case,
    check_combine,
    check_received,
    inputs_of,
    run_case,
)
from tests.support.strategies import low_latency_cases
from tests.support.world import RankContext, get_world

NUM_EXAMPLES = {1: 20, 2: 50, 3: 40, 4: 40, 5: 6, 7: 6, 8: 25}


@pytest.mark.parametrize("num_ranks", NUM_EXAMPLES)
def test_any_case(num_ranks: int) -> None:
    @settings(
        max_examples=NUM_EXAMPLES[num_ranks],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(low_latency_cases(num_ranks))
    def check(case: Case) -> None:
        get_world(num_ranks).run(run_case, case)

    check()


@pytest.mark.parametrize("travel", FORMATS)
@pytest.mark.parametrize("combine", ["plain", "logfmt", "zero copy"])
def test_rows_of_a_real_size(travel: str, combine: str) -> None:
    case = Case(
        tokens=(16, 9),
        max_tokens=16,
        hidden=7168,
        num_topk=8,
        local_experts=8,
        travel=travel,
        use_logfmt=combine == "logfmt",
        zero_copy=combine == "zero copy",
    )
    get_world(2).run(run_case_on_a_buffer_of_the_hint, case)


def run_case_on_a_buffer_of_the_hint(context: RankContext, case: Case) -> None:
    """The size hint is enough, to the byte, and no call before the first one is needed."""
    hint = Buffer.get_low_latency_rdma_size_hint(
        case.max_tokens, case.hidden, case.num_ranks, case.num_experts
    )
    with Buffer(context.group, 0, hint, low_latency_mode=True, device="cpu") as buffer:
        for seed in range(3):
            check_case(context.rank, replace(case, seed=seed), buffer)


# Hooks


def dispatch_by_hook(buffer: Buffer, case: Case, rank: int) -> tuple[Any, Any, Any, Any]:
    given = inputs_of(case)[rank]
    received, counts, handle, event, hook = buffer.low_latency_dispatch(
        given.x, given.topk_idx, case.max_tokens, case.num_experts, use_fp8=False, return_recv_hook=True
    )
    assert event.event is None
    return received, counts, handle, hook


def two_in_flight(context: RankContext, order: tuple[int, int]) -> None:
    buffer = buffer_for(context)
    batches = [Case(tokens=(5,) * context.num_ranks, hidden=64, seed=seed) for seed in (1, 2)]
    buffer.clean_low_latency_buffer(8, 64, batches[0].num_experts)
    for _ in range(3):
        sent = [dispatch_by_hook(buffer, case, context.rank) for case in batches]
        for batch in order:
            sent[batch][3]()
        for case, (received, counts, handle, hook) in zip(batches, sent, strict=True):
            hook()  # once more does nothing
            inputs = inputs_of(case)
            check_received(context.rank, case, inputs, received, counts, handle, frozenset())
            check_combine(context.rank, case, inputs, buffer, handle, frozenset())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_two_calls_in_flight(num_ranks: int, order: tuple[int, int]) -> None:
    get_world(num_ranks).run(two_in_flight, order)


FAST_S, SLOW_S = 0.01, 0.08


def decode(context: RankContext, by_hooks: bool, num_steps: int) -> float:
    """Two micro-batches whose experts take turns to be slow: now on rank 0, now on rank 1."""
    buffer = buffer_for(context)
    batches = [Case(tokens=(4,) * context.num_ranks, hidden=64, seed=seed) for seed in (1, 2)]
    inputs = [inputs_of(case) for case in batches]
    buffer.clean_low_latency_buffer(8, 64, batches[0].num_experts)
    torch.distributed.barrier(context.group)

    def experts(batch: int) -> None:
        time.sleep(SLOW_S if batch == context.rank else FAST_S)

    def combine(batch: int, received: Any, handle: Any, by_hook: bool) -> Any:
        mine = inputs[batch][context.rank]
        return buffer.low_latency_combine(
            received, mine.topk_idx, mine.topk_weights, handle, return_recv_hook=by_hook
        )[-1]

    started = time.monotonic()
    for _ in range(num_steps):
        if by_hooks:
            sent = [dispatch_by_hook(buffer, case, context.rank) for case in batches]
            hooks = []
            for batch, (received, _, handle, hook) in enumerate(sent):
                hook()
                experts(batch)
                hooks.append(combine(batch, received, handle, by_hook=True))
            for hook in hooks:
                hook()
        else:
            for batch, case in enumerate(batches):
                received, _, handle, hook = dispatch_by_hook(buffer, case, context.rank)
                hook()
                experts(batch)
                combine(batch, received, handle, by_hook=False)
    return time.monotonic() - started


def test_hooks_hide_the_waiting() -> None:
    """In line each micro-batch takes as long as its slower rank, 2 * SLOW_S for two. With hooks a rank goes
    on with the second one while the other is busy with the first, so that two take SLOW_S + FAST_S."""
    num_steps = 4
    in_line = max(get_world(2).run(decode, False, num_steps)) / num_steps
    by_hooks = max(get_world(2).run(decode, True, num_steps)) / num_steps
    hidden = in_line - by_hooks
    print(f"in line {in_line * 1e3:.1f} ms a step, by hooks {by_hooks * 1e3:.1f}, {hidden * 1e3:.1f} hidden")
    assert in_line >= 2 * SLOW_S
    assert hidden >= (SLOW_S - FAST_S) / 2


def who_was_late(context: RankContext, late: int) -> list[list[int]]:
    buffer = buffer_for(context)
    case = Case(tokens=(4,) * context.num_ranks, hidden=64)
    buffer.clean_low_latency_buffer(8, 64, case.num_experts)
    given = inputs_of(case)[context.rank]
    stats = [torch.full((context.num_ranks,), 5, dtype=torch.int64) for _ in range(2)]
    torch.distributed.barrier(context.group)
    if context.rank == late:
        time.sleep(0.2)
    received, _, handle, _, _ = buffer.low_latency_dispatch(
        given.x,
        given.topk_idx,
        8,
        case.num_experts,
        dispatch_wait_recv_cost_stats=stats[0],
        use_fp8=False,
    )
    torch.distributed.barrier(context.group)
    if context.rank == late:
        time.sleep(0.2)
    buffer.low_latency_combine(
        received, given.topk_idx, given.topk_weights, handle, combine_wait_recv_cost_stats=stats[1]
    )
    return [part.tolist() for part in stats]


def test_statistics_say_who_was_waited_for() -> None:
    for rank, parts in enumerate(get_world(3).run(who_was_late, 1)):
        for waited in parts:
            assert all(nanoseconds >= 5 for nanoseconds in waited)
            if rank != 1:
                assert waited[1] > 0.15e9
                assert waited[1] > 3 * max(waited[0], waited[2])
            else:
                assert max(waited) < 0.15e9


# Results, handles, sizes


def hold_results(context: RankContext) -> None:
    """Results of many calls are held and must not change; a handle is combined long after its dispatch."""
    buffer = buffer_for(context)
    case = Case(tokens=(6,) * context.num_ranks, hidden=256, travel="fp8")
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    held: list[tuple[Any, Any]] = []
    first = None
    for seed in range(12):
        given = inputs_of(replace(case, seed=seed))[context.rank]
        (data, scales), counts, handle, _, _ = buffer.low_latency_dispatch(
            given.x, given.topk_idx, case.max_tokens, case.num_experts
        )
        first = first or handle
        for expert, count in enumerate(counts.tolist()):
            results = (data[expert, :count].view(torch.uint8), scales[expert, :count], *handle[:2])
            held += [(result, result.clone()) for result in results]
    for result, copy in held:
        assert result.equal(copy)
    for seed in (7, 8):
        inputs = inputs_of(replace(case, seed=0))
        check_combine(context.rank, replace(case, seed=seed), inputs, buffer, first, frozenset())
    assert first is not None
    copies = (first[0].clone(), first[1].clone(), *first[2:])
    check_combine(context.rank, replace(case, seed=9), inputs, buffer, copies, frozenset())


def test_results_may_be_held_and_handles_used_again() -> None:
    get_world(3).run(hold_results)


def mix_modes(context: RankContext, seed: int) -> None:
    """Normal and low-latency calls on one Buffer, in any order, with other sizes after each cleaning."""
    chance = random.Random(seed)
    buffer = buffer_for(context)
    ranks = context.num_ranks
    for step in range(8):
        if chance.random() < 0.5:
            normal = cases.Case(
                tokens=tuple(chance.randint(0, 9) for _ in range(ranks)),
                run_async=chance.random() < 0.5,
                seed=seed + step,
            )
            cases.check_case(context, normal, buffer)
        else:
            case = Case(
                tokens=tuple(chance.randint(0, 7) for _ in range(ranks)),
                max_tokens=chance.randint(7, 12),
                hidden=chance.choice([128, 512, 640]),
                local_experts=chance.randint(1, 3),
                travel=chance.choice(["bf16", "fp8"]),
                how=chance.choice(["in line", "async", "hook"]),
                seed=seed + step,
            )
            buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
            for _ in range(chance.randint(1, 3)):
                check_case(context.rank, case, buffer)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2, 4]))
def test_modes_mix_in_any_order(seed: int, num_ranks: int) -> None:
    get_world(num_ranks).run(mix_modes, seed)


def normal_calls_beside_one_in_flight(context: RankContext) -> None:
    buffer = buffer_for(context)
    case = Case(tokens=(3,) * context.num_ranks, hidden=64)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    received, counts, handle, hook = dispatch_by_hook(buffer, case, context.rank)
    cases.check_case(context, cases.Case(tokens=(9,) * context.num_ranks), buffer)
    hook()
    inputs = inputs_of(case)
    check_received(context.rank, case, inputs, received, counts, handle, frozenset())


def test_normal_calls_between_send_and_receive() -> None:
    get_world(3).run(normal_calls_beside_one_in_flight)


def drop_a_hook(context: RankContext) -> str:
    """A Buffer may be destroyed with a call in flight; its hook then says so."""
    buffer = Buffer(context.group, 0, RDMA_BYTES, low_latency_mode=True, device="cpu")
    *_, hook = dispatch_by_hook(buffer, Case(tokens=(3,) * context.num_ranks, hidden=64), context.rank)
    torch.distributed.barrier(context.group)
    buffer.destroy()
    try:
        hook()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_destroy_with_a_call_in_flight() -> None:
    for message in get_world(2).run(drop_a_hook):
        assert message.startswith("BufferBroken: ")


def hook_in_a_thread(context: RankContext) -> None:
    """The hook of one call is called in another thread while the next call is made."""
    buffer = buffer_for(context)
    case = Case(tokens=(6,) * context.num_ranks, hidden=64)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    for seed in range(60):
        first, second = replace(case, seed=seed), replace(case, seed=seed + 1000)
        received, counts, handle, hook = dispatch_by_hook(buffer, first, context.rank)
        thread = threading.Thread(target=hook)
        thread.start()
        other = dispatch_by_hook(buffer, second, context.rank)
        thread.join()
        other[3]()
        check_received(context.rank, first, inputs_of(first), received, counts, handle, frozenset())
        check_received(context.rank, second, inputs_of(second), *other[:3], frozenset())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_hooks_in_other_threads(num_ranks: int) -> None:
    get_world(num_ranks).run(hook_in_a_thread)


def drop_hooks(context: RankContext) -> None:
    """Hooks that nobody can call any more do not keep slots."""
    buffer = buffer_for(context)
    case = Case(tokens=(6,) * context.num_ranks, hidden=64)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    for seed in range(5):
        dispatch_by_hook(buffer, replace(case, seed=seed), context.rank)
    check_case(context.rank, case, buffer)
    dispatch_by_hook(buffer, case, context.rank)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    check_case(context.rank, case, buffer)


def test_dropped_hooks() -> None:
    get_world(3).run(drop_hooks)
