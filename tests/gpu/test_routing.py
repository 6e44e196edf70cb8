"""Wrong ids and mixed handles on a GPU: kernels find them, and all ranks raise; also after CUDA graphs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.support import low_latency_cases
from tests.support.cases import buffer_for
from tests.support.gpu import NEEDS_GPU, gpu_world, prepare_rank
from tests.support.gpu_scenarios import attempt
from tests.support.other_routings import Mix, call, check_answers, first_dispatch, mix_handles, mixes
from tests.support.world import RankContext, World
from tests.support.wrong_ids import (
    VALUES,
    Calls,
    check_on_a_gpu,
    refuse_in_low_latency_mode,
    refuse_in_normal_mode,
    sentence,
)

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]
TIMEOUT_S = 200.0


@pytest.fixture(scope="module", params=[2, 3, 8])
def world(request: pytest.FixtureRequest) -> World:
    return gpu_world(request.param)


def mix_on_a_gpu(context: RankContext, mix: Mix, num_window_bytes: int | None) -> tuple[str, bool]:
    prepare_rank()
    return mix_handles(context, buffer_for(context, num_window_bytes, device="cuda"), mix, "cuda")


@pytest.mark.parametrize("num_window_bytes", [None, 0])
def test_mixed_handles(world: World, num_window_bytes: int | None) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(mixes(world.num_ranks))
    def check(mix: Mix) -> None:
        check_answers(mix, world.run(mix_on_a_gpu, mix, num_window_bytes, timeout=TIMEOUT_S))

    check()


def replay_with_other_handles(context: RankContext, mix: Mix) -> list[str]:
    """A graph along a handle reads what the handle holds when it is replayed; once rank 0's is another."""
    prepare_rank()
    buffer, rank = buffer_for(context, None, device="cuda"), context.rank
    first = first_dispatch(buffer, mix, rank, False, "cuda")
    second = first_dispatch(buffer, mix, rank, True, "cuda")
    rows = first[0].clone()
    handle = tuple(part.clone() for part in first[1])
    call(buffer, mix, rank, rows, handle, "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(buffer, mix, rank, rows, handle, "cuda")
    answers = []
    for others in (first, second if rank == 0 else first, second, first):
        for part, other in zip(handle, others[1], strict=True):
            part.copy_(other)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        answers.append(attempt(first_dispatch, buffer, mix, rank, False, "cuda"))
    return answers


@pytest.mark.parametrize("is_combine", [False, True])
def test_a_graph_finds_mixed_handles(world: World, is_combine: bool) -> None:
    mix = Mix(world.num_ranks, 8, 2, (0, 0, 1), frozenset(), is_combine, False, 0)
    for first, mixed, *rest in world.run(replay_with_other_handles, mix, timeout=TIMEOUT_S):
        assert first == "fine"
        assert mixed.startswith("Disagreement: the ranks disagree in call ")
        assert "about the routing in the handle: the rows that rank " in mixed
        assert rest == ["fine", "fine"]


def refuse_ids(context: RankContext, value: int) -> dict[str, list[str]]:
    prepare_rank()
    return refuse_in_normal_mode(context, value, buffer_for, {"device": "cuda"}, "cuda")


@pytest.mark.parametrize("value", [value for value in VALUES if value != 6])
def test_wrong_ids(world: World, value: int) -> None:
    check_on_a_gpu(world.run(refuse_ids, value, timeout=TIMEOUT_S), value)


def refuse_low_latency_ids(context: RankContext, value: int) -> dict[str, list[str]]:
    prepare_rank()
    context.keep["device"] = "cuda"
    return refuse_in_low_latency_mode(context, value, low_latency_cases.buffer_for, {}, "cuda")


@pytest.mark.parametrize("value", [value for value in VALUES if value != 6])
def test_wrong_ids_in_low_latency_mode(world: World, value: int) -> None:
    check_on_a_gpu(world.run(refuse_low_latency_ids, value, timeout=TIMEOUT_S), value)


def replay_a_layout(context: RankContext, value: int) -> list[str]:
    """A captured layout: a wrong id is heard of after the replay that finds it."""
    prepare_rank()
    calls = Calls(context, buffer_for(context, None, device="cuda"), "cuda")
    calls.good()
    ids = torch.zeros(4, 2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.buffer.get_dispatch_layout(ids, calls.num_experts)
    answers = []
    for wrong in (0, value, 0):
        ids[3, 1] = wrong
        graph.replay()
        torch.cuda.synchronize()
        answers.append(attempt(calls.layout))
    calls.good()
    return answers


def test_a_graph_finds_wrong_ids(world: World) -> None:
    for answers in world.run(replay_a_layout, 77, timeout=TIMEOUT_S):
        right = sentence(77, world.num_ranks).replace("column 2", "column 1")
        assert answers == ["fine", right, "fine"]
