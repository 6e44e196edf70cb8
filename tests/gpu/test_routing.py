"""Wrong ids and mixed handles in CUDA graphs: kernels find them, and all ranks raise."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.support.cases import buffer_for
from tests.support.gpu import NEEDS_GPU
from tests.support.gpu_scenarios import attempt
from tests.support.other_routings import Mix, call, first_dispatch
from tests.support.places import Place
from tests.support.world import RankContext, World
from tests.support.wrong_ids import Calls, sentence

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]
TIMEOUT_S = 200.0


@pytest.fixture(scope="module", params=[2, 3, 8])
def world(request: pytest.FixtureRequest) -> World:
    return Place("cuda", request.param).world()


def replay_with_other_handles(context: RankContext, mix: Mix) -> list[str]:
    """A graph along a handle reads what the handle holds when it is replayed; once rank 0's is another."""
    buffer, rank = buffer_for(context, None), context.rank
    first = first_dispatch(buffer, mix, rank, False)
    second = first_dispatch(buffer, mix, rank, True)
    rows = first[0].clone()
    handle = tuple(part.clone() for part in first[1])
    call(buffer, mix, rank, rows, handle)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(buffer, mix, rank, rows, handle)
    answers = []
    for others in (first, second if rank == 0 else first, second, first):
        for part, other in zip(handle, others[1], strict=True):
            part.copy_(other)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        answers.append(attempt(first_dispatch, buffer, mix, rank, False))
    return answers


@pytest.mark.parametrize("is_combine", [False, True])
def test_a_graph_finds_mixed_handles(world: World, is_combine: bool) -> None:
    mix = Mix(world.num_ranks, 8, 2, (0, 0, 1), frozenset(), is_combine, False, 0)
    for first, mixed, *rest in world.run(replay_with_other_handles, mix, timeout=TIMEOUT_S):
        assert first == "fine"
        assert mixed.startswith("Disagreement: the ranks disagree in call ")
        assert "about the routing in the handle: the rows that rank " in mixed
        assert rest == ["fine", "fine"]


def replay_a_layout(context: RankContext, value: int) -> list[str]:
    """A captured layout: a wrong id is heard of after the replay that finds it."""
    calls = Calls(context, buffer_for(context, None))
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
