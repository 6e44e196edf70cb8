"""Low-latency mode on a real GPU: many calls that nobody waits for, CUDA graphs, streams.

Memory that nobody has written holds NaN here, so that a result which is not filled does not look right.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from anyep.api.buffer import Buffer
from anyep.backends.cuda import postponed
from anyep.errors import InvalidCall
from tests.support import low_latency_oracle, oracle
from tests.support.cases import ROUTINGS
from tests.support.gpu import NEEDS_GPU, let_die_in_a_capture
from tests.support.low_latency_cases import (
    FORMATS,
    Case,
    buffer_for,
    check_case,
    check_received,
    dispatch_by_hook,
    inputs_of,
    on,
)
from tests.support.places import Place
from tests.support.world import RankContext

pytestmark = NEEDS_GPU
TIMEOUT_S = 240
ONE_NODE = [Place("cuda", num_ranks) for num_ranks in (2, 4, 8)]
PLACES = [
    place.param() for place in (*ONE_NODE, Place("cuda", 4, num_nodes=2), Place("cuda", 8, num_nodes=2))
]


def new_buffer(context: RankContext, case: Case) -> Buffer:
    """A Buffer with room for just this case."""
    sizes = (case.max_tokens, case.hidden, case.num_ranks, case.num_experts)
    hint = Buffer.get_low_latency_rdma_size_hint(*sizes)
    nodes = case.ranks_per_node
    return Buffer(context.group, 0, hint, low_latency_mode=True, device="cuda", ranks_per_node=nodes)


# Many calls


def soak(context: RankContext, place: Place, seed: int, num_steps: int) -> None:
    """Calls of all kinds, with other routings, one after the other or two in flight."""
    chance = random.Random(seed)
    ranks = context.num_ranks
    sizes = Case((64,) * ranks, max_tokens=64, hidden=1024, num_topk=6, local_experts=8).at(place)
    with new_buffer(context, sizes) as buffer:
        for step in range(num_steps):
            case = replace(
                sizes,
                tokens=tuple(chance.randint(0, 64) for _ in range(ranks)),
                routing=chance.choice(ROUTINGS),
                travel=chance.choice(FORMATS),
                use_logfmt=chance.random() < 0.3,
                how=chance.choice(["in line", "async", "hook"]),
                combines=chance.randint(1, 2),
                in_place=chance.random() < 0.5,
                seed=seed + step,
            )
            if chance.random() < 0.3:
                send_two(context.rank, case, buffer)
            check_case(context.rank, case, buffer)


def send_two(rank: int, case: Case, buffer: Buffer) -> None:
    """Two dispatches in flight; the second one is received first."""
    batches = [replace(case, travel="bf16", seed=case.seed + 5000 + index) for index in range(2)]
    sent = [dispatch_by_hook(buffer, batch, rank) for batch in batches]
    for batch, (received, counts, handle, hook) in reversed(list(zip(batches, sent, strict=True))):
        hook()
        check_received(rank, batch, inputs_of(batch), received, counts, handle)


@pytest.mark.parametrize("place", PLACES)
def test_soak(place: Place) -> None:
    place.world().run(soak, place, place.num_ranks, 30, timeout=TIMEOUT_S)


def repeat_without_looking(context: RankContext, num_pairs: int) -> None:
    """Many calls in a row that the host does not wait for; every result is right."""
    case = Case((32,) * context.num_ranks, max_tokens=32, hidden=2048, num_topk=4, local_experts=4)
    with new_buffer(context, case) as buffer:
        seeds = range(5)
        inputs = [inputs_of(replace(case, seed=seed)) for seed in seeds]
        mine = [on("cuda", given_[context.rank]) for given_ in inputs]
        results = []
        for index in range(num_pairs):
            x, ids, weights = mine[index % 5].x, mine[index % 5].topk_idx, mine[index % 5].topk_weights
            received, _, handle, _, hook = buffer.low_latency_dispatch(
                x, ids, 32, case.num_experts, use_fp8=False, return_recv_hook=index % 3 == 0
            )
            if hook is not None:
                hook()
            assert isinstance(received, torch.Tensor)
            results.append(buffer.low_latency_combine(received, ids, weights, handle)[0])
        torch.cuda.synchronize()
        right = [echoed(given_, context.rank, case) for given_ in inputs]
        for index, result in enumerate(results):
            assert oracle.same_bits(result.cpu(), right[index % 5]), index


def echoed(inputs: list[Any], rank: int, case: Case) -> torch.Tensor:
    """What comes back from experts that return what they get."""
    sources = [low_latency_oracle.rows_of_expert(inputs, expert) for expert in range(case.num_experts)]
    return low_latency_oracle.combine(inputs[rank], rank, [source.x for source in sources], sources)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_many_calls_that_nobody_waits_for(num_ranks: int) -> None:
    Place("cuda", num_ranks).world().run(repeat_without_looking, 300, timeout=TIMEOUT_S)


# Graphs and streams


def replay(context: RankContext, place: Place, how: str, num_combines: int) -> None:
    """A captured dispatch and its combines, replayed with other inputs, beside other calls."""
    rank, ranks = context.rank, context.num_ranks
    case = Case((24,) * ranks, max_tokens=24, hidden=1024, num_topk=4, local_experts=4).at(place)
    by_hook = {"return_recv_hook": how == "hook"}
    with new_buffer(context, case) as buffer:
        held = on("cuda", inputs_of(case)[rank])

        def step() -> tuple[torch.Tensor, ...]:
            received, counts, handle, _, hook = buffer.low_latency_dispatch(
                held.x, held.topk_idx, 24, case.num_experts, use_fp8=False, **by_hook
            )
            assert isinstance(received, torch.Tensor)
            if hook is not None:
                hook()
            results = []
            for _ in range(num_combines):
                combined, _, hook = buffer.low_latency_combine(
                    received, held.topk_idx, held.topk_weights, handle, **by_hook
                )
                if hook is not None:
                    hook()
                results.append(combined)
            return received, counts, handle[0], handle[1], *results

        for _ in range(2):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            received, counts, source, ranges, *results = step()
        for seed in range(20):
            batch = replace(case, seed=100 + seed)
            inputs = inputs_of(batch)
            for there, new in zip(
                (held.x, held.topk_idx, held.topk_weights),
                (inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights),
                strict=True,
            ):
                there.copy_(new)
            for part in (received, *results):
                part.fill_(torch.nan)
            for part in (counts, source, ranges):
                part.fill_(-7)
            graph.replay()
            handle = (source, ranges, 24, 1024, case.num_experts)
            check_received(rank, batch, inputs, received, counts, handle)
            for result in results:
                assert oracle.same_bits(result.cpu(), echoed(inputs, rank, case))
            if seed % 7 == 3:
                check_case(rank, replace(case, how=how, seed=seed), buffer)
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
        assert oracle.same_bits(results[0].cpu(), echoed(inputs, rank, case))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["in line", "hook"])
@pytest.mark.parametrize("num_combines", [1, 2])
def test_replays_of_a_graph(place: Place, how: str, num_combines: int) -> None:
    """With two combines each replay makes three calls: the sets of slots alternate from one to the next."""
    place.world().run(replay, place, how, num_combines, timeout=TIMEOUT_S)


def use_several_streams(context: RankContext) -> None:
    buffer = buffer_for(context)
    case = Case((6,) * context.num_ranks, hidden=256)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    for seed in range(30):
        batch = replace(case, seed=seed)
        inputs = inputs_of(batch)
        sender, receiver = streams[seed % 3], streams[(seed // 3) % 3]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(sender):
            received, counts, handle, hook = dispatch_by_hook(buffer, batch, context.rank)
        with torch.cuda.stream(receiver):
            hook()
            check_received(context.rank, batch, inputs, received, counts, handle)
        check_case(context.rank, batch, buffer)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_halves_on_other_streams(num_ranks: int) -> None:
    Place("cuda", num_ranks).world().run(use_several_streams, timeout=TIMEOUT_S)


def receive_in_a_graph(context: RankContext) -> None:
    """A hook of a call that was sent before the capture: a graph would receive it in every replay."""
    case = Case((6,) * context.num_ranks, hidden=256)
    with new_buffer(context, case) as buffer:
        check_case(context.rank, case, buffer)
        mine = on("cuda", inputs_of(case)[context.rank])
        dispatch = (mine.x, mine.topk_idx, case.max_tokens, case.num_experts)
        *_, hook = buffer.low_latency_dispatch(*dispatch, use_fp8=False, return_recv_hook=True)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(InvalidCall, match="call it before"):
            hook()
        hook()
        check_case(context.rank, case, buffer)


def test_a_hook_in_a_later_graph() -> None:
    Place("cuda", 2).world().run(receive_in_a_graph, timeout=TIMEOUT_S)


# The end of a Buffer


def end_around_a_graph(context: RankContext, what: str) -> None:
    """A Buffer ends before a graph is captured, or while it is; what callers still hold dies there, too."""
    case = Case((6,) * context.num_ranks, hidden=256)
    buffer = new_buffer(context, case)
    check_case(context.rank, case, buffer)
    mine = on("cuda", inputs_of(case)[context.rank])
    dispatch = (mine.x, mine.topk_idx, case.max_tokens, case.num_experts)
    received, _, handle, _, _ = buffer.low_latency_dispatch(*dispatch, use_fp8=False)
    rows = buffer.get_next_low_latency_combine_buffer(handle)
    *_, hook = buffer.low_latency_dispatch(*dispatch, use_fp8=False, return_recv_hook=True)
    torch.cuda.synchronize()
    torch.distributed.barrier(context.group)
    heap = weakref.ref(buffer.runtime.device_control.heap)
    dying = [received, handle, rows, hook]
    if what == "destroyed":
        buffer.destroy()
    elif what == "dropped in a call":
        torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]
        buffer.low_latency_dispatch(*dispatch, use_fp8=False, async_finish=True)
    else:
        dying.append(buffer)
    del buffer, received, handle, rows, hook
    assert let_die_in_a_capture(dying) == (what == "dropped in a call")
    with new_buffer(context, case) as other:
        assert heap() is None
        assert not postponed._waiting
        check_case(context.rank, case, other)
        torch.distributed.barrier(context.group)


@pytest.mark.parametrize("what", ["destroyed", "dropped in a graph", "dropped in a call"])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_the_end_around_a_graph(num_ranks: int, what: str) -> None:
    Place("cuda", num_ranks).world().run(end_around_a_graph, what, timeout=TIMEOUT_S)
