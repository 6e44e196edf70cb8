"""What low-latency calls may do at the same time, and what they leave behind: hooks, handles and results."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.support import cases
from tests.support.depth import examples
from tests.support.faults import wait_until_others_wait
from tests.support.low_latency_cases import (
    FORMATS,
    Case,
    buffer_for,
    check_case,
    check_combine,
    check_received,
    dispatch_by_hook,
    in_process_of,
    inputs_of,
    on,
)
from tests.support.places import Place, tensor_device
from tests.support.world import RankContext

TIMEOUT_S = 240.0
CPU, NODES = Place("cpu", 3), Place("cpu", 4, num_nodes=2)
SIMULATED, CUDA = Place("simulated", 2), Place("cuda", 4)
GPU_NODES = Place("simulated", 4, num_nodes=2), Place("cuda", 4, num_nodes=2)


def at(place: Place, *more: Any, slow: bool = False, name: str = "") -> Any:
    return place.param(*more, marks=[in_process_of(place), *([pytest.mark.slow] if slow else [])], name=name)


def small_case(place: Place, tokens: int = 5) -> Case:
    return Case(tokens=(tokens,) * place.num_ranks, hidden=64).at(place)


def laid_out(context: RankContext, case: Case) -> Any:
    """The Buffer that these tests share, with slots for a case."""
    buffer = buffer_for(context, ranks_per_node=case.ranks_per_node, network=case.network)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    return buffer


# Scenarios that hold everywhere


def two_in_flight(context: RankContext, place: Place) -> None:
    """They are received in either order."""
    case = small_case(place)
    buffer = laid_out(context, case)
    batches = [replace(case, seed=seed) for seed in (1, 2)]
    for order in ((0, 1), (1, 0)):
        for _ in range(3 if place.device == "cpu" else 1):
            sent = [dispatch_by_hook(buffer, batch, context.rank) for batch in batches]
            for index in order:
                sent[index][3]()
            for batch, (received, counts, handle, hook) in zip(batches, sent, strict=True):
                hook()  # once more does nothing
                inputs = inputs_of(batch)
                check_received(context.rank, batch, inputs, received, counts, handle)
                check_combine(context.rank, batch, inputs, buffer, handle)


def odd_numbers_of_calls(context: RankContext, place: Place) -> None:
    """A dispatch may have either set of slots, and so may its combine."""
    case = replace(small_case(place, 4), combines=2)
    buffer = laid_out(context, case)
    for seed in range(3):
        check_case(context.rank, replace(case, seed=seed), buffer)


def hold_results(context: RankContext, place: Place) -> None:
    """Results of many calls are held and must not change; a handle is combined long after its dispatch."""
    case = Case(tokens=(6,) * place.num_ranks, hidden=256, travel="fp8").at(place)
    buffer = laid_out(context, case)
    held: list[tuple[Any, Any]] = []
    first = None
    for seed in range(12 if place.device == "cpu" else 3):
        mine = on(tensor_device(), inputs_of(replace(case, seed=seed))[context.rank])
        (data, scales), counts, handle, _, _ = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, case.max_tokens, case.num_experts
        )
        first = first or handle
        for expert, count in enumerate(counts.tolist()):
            results = (data[expert, :count].view(torch.uint8), scales[expert, :count], *handle[:2])
            held += [(result, result.clone()) for result in results]
    for result, copy in held:
        assert result.equal(copy)
    assert first is not None
    copies = (first[0].clone(), first[1].clone(), *first[2:])
    for seed, handle in ((7, first), (8, first), (9, copies)):
        check_combine(context.rank, replace(case, seed=seed), inputs_of(case), buffer, handle)


def normal_calls_beside_one_in_flight(context: RankContext, place: Place) -> None:
    case = small_case(place, 3)
    buffer = laid_out(context, case)
    received, counts, handle, hook = dispatch_by_hook(buffer, case, context.rank)
    cases.check_case(context, cases.Case(tokens=(9,) * place.num_ranks).at(place), buffer)
    hook()
    check_received(context.rank, case, inputs_of(case), received, counts, handle)


def drop_hooks(context: RankContext, place: Place) -> None:
    """Hooks that nobody can call any more do not keep slots."""
    case = small_case(place)
    buffer = laid_out(context, case)
    for seed in range(5):
        dispatch_by_hook(buffer, replace(case, seed=seed), context.rank)
    check_case(context.rank, case, buffer)
    dispatch_by_hook(buffer, case, context.rank)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    check_case(context.rank, case, buffer)


SCENARIOS = (two_in_flight, hold_results, drop_hooks, odd_numbers_of_calls, normal_calls_beside_one_in_flight)
NUM_QUICK_ON_SIMULATED = 3


def scenario_params() -> Iterator[Any]:
    """Interpreted kernels take long, so some of their scenarios are for `make test-all`."""
    for place in (CPU, NODES, SIMULATED, CUDA):
        for index, scenario in enumerate(SCENARIOS):
            is_slow = place == SIMULATED and index >= NUM_QUICK_ON_SIMULATED
            yield at(place, scenario, slow=is_slow, name=f"{place}-{scenario.__name__}")
    # Normal mode does not work there so far.
    for place in GPU_NODES:
        for scenario in SCENARIOS[:-1]:
            is_slow = place.device == "simulated" and scenario is not two_in_flight
            yield at(place, scenario, slow=is_slow, name=f"{place}-{scenario.__name__}")


@pytest.mark.parametrize(("place", "scenario"), list(scenario_params()))
def test_everywhere(place: Place, scenario: Callable[..., None]) -> None:
    place.world().run(scenario, place, timeout=TIMEOUT_S)


@pytest.mark.parametrize("place", [at(Place("cpu", 1))])
def test_two_calls_of_a_rank_that_is_alone(place: Place) -> None:
    place.world().run(two_in_flight, place)


def mix_modes(context: RankContext, place: Place, seed: int, num_steps: int) -> None:
    """Normal and low-latency calls on one Buffer: neither may touch what the other one needs."""
    chance = random.Random(seed)
    ranks = context.num_ranks
    buffer = buffer_for(context, ranks_per_node=place.ranks_per_node, network=place.network)
    sizes = None
    for step in range(num_steps):
        tokens = tuple(chance.randint(0, 7) for _ in range(ranks))
        if chance.random() < 0.5:
            normal = cases.Case(tokens, run_async=chance.random() < 0.5, seed=seed + step)
            cases.check_case(context, normal.at(place), buffer)
            continue
        if sizes is None or chance.random() < 0.5:
            sizes = Case(
                tokens,
                max_tokens=chance.randint(7, 12),
                hidden=chance.choice([512, 1024]),
                local_experts=chance.randint(1, 3),
            ).at(place)
            buffer.clean_low_latency_buffer(sizes.max_tokens, sizes.hidden, sizes.num_experts)
        for _ in range(chance.randint(1, 3)):
            case = replace(
                sizes,
                tokens=tokens,
                travel=chance.choice(FORMATS),
                how=chance.choice(["in line", "async", "hook"]),
                seed=seed + step,
            )
            check_case(context.rank, case, buffer)


@pytest.mark.property
@pytest.mark.parametrize(
    ("place", "quick", "deep", "num_steps"),
    [
        at(Place("cpu", 2), 3, 12, 8),
        at(Place("cpu", 4), 2, 12, 8),
        at(NODES, 2, 12, 8),
        at(Place("cpu", 4, num_nodes=2, hosts=True), 1, 3, 20),
        at(SIMULATED, 1, 4, 6, slow=True),
        at(CUDA, 3, 3, 8),
    ],
)
def test_modes_mix_in_any_order(place: Place, quick: int, deep: int, num_steps: int) -> None:
    @examples(quick, deep=deep)
    @given(st.integers(0, 10_000))
    def check(seed: int) -> None:
        place.world().run(mix_modes, place, seed, num_steps, timeout=TIMEOUT_S)

    check()


# Who waits for whom


def decode(context: RankContext, place: Place, num_steps: int) -> None:
    """Two micro-batches. The experts of rank 0 are not done with the first one before rank 1 is busy with the
    second, nor those of rank 1 with the second one before rank 0 is: in line, this would never end."""
    rank = context.rank
    case = small_case(place, 4)
    buffer = laid_out(context, case)
    batches = [replace(case, seed=seed) for seed in (1, 2)]
    word = torch.zeros(1, device="cpu")
    for _ in range(num_steps):
        sent = [dispatch_by_hook(buffer, batch, rank) for batch in batches]
        hooks, said = [], []
        for index, (batch, (received, _, handle, hook)) in enumerate(zip(batches, sent, strict=True)):
            hook()
            if index == 1:
                said.append(dist.isend(word, 1 - rank, context.group))
            if index == rank:
                dist.recv(torch.zeros(1, device="cpu"), 1 - rank, context.group)
            mine = on(tensor_device(), inputs_of(batch)[rank])
            combine = (received, mine.topk_idx, mine.topk_weights, handle)
            hooks.append(buffer.low_latency_combine(*combine, return_recv_hook=True)[2])
        for hook in hooks:
            hook()
        for work in said:
            work.wait()


@pytest.mark.parametrize("place", [at(Place("cpu", 2)), at(SIMULATED, slow=True)])
def test_hooks_hide_the_waiting(place: Place) -> None:
    place.world().run(decode, place, 4 if place.device == "cpu" else 1)


def weights_with_gradients(context: RankContext, place: Place) -> None:
    """Grad mode belongs to a thread: that of a hook, or of the stream, may be another than the call's."""
    case = small_case(place)
    buffer = laid_out(context, case)
    mine = inputs_of(case)[context.rank]
    rows, _, handle, received = dispatch_by_hook(buffer, case, context.rank)
    received()
    results = []
    for how in ({}, {"async_finish": True}, {"return_recv_hook": True}):
        given = mine.topk_weights.clone().requires_grad_() if how else mine.topk_weights
        with torch.no_grad():
            combined, event, hook = buffer.low_latency_combine(rows, mine.topk_idx, given, handle, **how)
        if hook is not None:
            hook()
        event.current_stream_wait()
        results.append(combined)
    assert all(torch.equal(combined, results[0]) for combined in results)


def test_weights_with_gradients() -> None:
    CPU.world().run(weights_with_gradients, CPU)


PAUSE_S = 0.2


def who_was_late(context: RankContext, place: Place) -> list[list[int]]:
    """The last rank makes its calls when all others wait for it, and then only after a pause."""
    case = small_case(place, 4)
    buffer = laid_out(context, case)
    mine = on(tensor_device(), inputs_of(case)[context.rank])
    stats = [torch.full((context.num_ranks,), 5, dtype=torch.int64, device=tensor_device()) for _ in range(2)]

    def be_late() -> None:
        dist.barrier(group=context.group)
        if context.rank == context.num_ranks - 1:
            wait_until_others_wait(buffer, buffer.status()[context.rank].call + 1)
            time.sleep(PAUSE_S)

    be_late()
    received, _, handle, _, _ = buffer.low_latency_dispatch(
        mine.x,
        mine.topk_idx,
        case.max_tokens,
        case.num_experts,
        dispatch_wait_recv_cost_stats=stats[0],
        use_fp8=False,
    )
    be_late()
    buffer.low_latency_combine(
        received, mine.topk_idx, mine.topk_weights, handle, combine_wait_recv_cost_stats=stats[1]
    )
    return [part.tolist() for part in stats]


@pytest.mark.parametrize("place", [at(CPU), at(SIMULATED)])
def test_statistics_say_who_was_waited_for(place: Place) -> None:
    *others, late = place.world().run(who_was_late, place, timeout=TIMEOUT_S)
    for parts in others:
        for call, waited in enumerate(parts):
            assert min(waited) >= 5
            assert waited[-1] >= PAUSE_S * 1e9
            assert waited[-1] == max(waited)
            if place.device == "cpu":
                # It found everything there; interpreted kernels take long all the same.
                assert max(late[call]) < waited[-1]


def hook_in_a_thread(context: RankContext, place: Place, num_pairs: int) -> None:
    """The hook of one call is called in another thread while the next call is made."""
    case = small_case(place)
    buffer = laid_out(context, case)
    for seed in range(num_pairs):
        first, second = replace(case, seed=seed), replace(case, seed=seed + 1000)
        *results, hook = dispatch_by_hook(buffer, first, context.rank)
        thread = threading.Thread(target=hook)
        thread.start()
        *others, other_hook = dispatch_by_hook(buffer, second, context.rank)
        thread.join()
        other_hook()
        check_received(context.rank, first, inputs_of(first), *results)
        check_received(context.rank, second, inputs_of(second), *others)


@pytest.mark.parametrize(
    ("place", "num_pairs"),
    [at(Place("cpu", 2), 20), at(Place("cpu", 4), 10), at(Place("cpu", 4), 200, slow=True)],
)
def test_hooks_in_other_threads(place: Place, num_pairs: int) -> None:
    place.world().run(hook_in_a_thread, place, num_pairs)
