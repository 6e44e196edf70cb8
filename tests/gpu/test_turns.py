"""Ranks that take turns on a GPU, without the multi-process service: slow, and right all the same."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from anyep.backends.cuda.mps import MultiProcessService
from tests.support import low_latency_cases
from tests.support.cases import Case, run_case
from tests.support.faults import CACHED, COMBINE, REASON, Fault, strike
from tests.support.gpu import NEEDS_GPU
from tests.support.gpu_pairs import soak
from tests.support.gpu_scenarios import new_buffer, warnings_heard
from tests.support.places import Place, become_cuda
from tests.support.world import RankContext, World

pytestmark = NEEDS_GPU
MPS_ENABLED = 133
"""The driver's number of this attribute of a device."""
NUM_PAIRS = 30
GPU = Place("cuda", 3)
TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def leave_the_service(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], None]:
    """Lets a rank on GPU 0 look for the service where none is."""
    return partial(become_cuda, {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path_factory.mktemp("no-service"))})


@pytest.fixture(scope="module", params=[2, 4, 8])
def world(request: pytest.FixtureRequest, leave_the_service: Callable[[int], None]) -> Iterator[World]:
    with World(request.param, leave_the_service) as world:
        yield world


def is_served(context: RankContext) -> bool:
    """Whether the driver has this process served by the multi-process service."""
    answer = ctypes.c_int(-1)
    assert ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(answer), MPS_ENABLED, 0) == 0
    return answer.value == 1


def test_they_are_not_served(world: World) -> None:
    assert not any(world.run(is_served, timeout=TIMEOUT_S))
    if MultiProcessService.is_installed():
        with Place("cuda", 2).new_world() as served:
            assert all(served.run(is_served, timeout=TIMEOUT_S))


def warnings_of_a_new_buffer(context: RankContext) -> list[str]:
    with warnings_heard() as heard:
        new_buffer(context).destroy()
    return heard


def test_it_says_how_slow_that_is(world: World) -> None:
    first, *others = world.run(warnings_of_a_new_buffer, timeout=TIMEOUT_S)
    assert len(first) == 1
    assert first[0].startswith(f"{world.num_ranks} ranks share a GPU without NVIDIA's multi-process service")
    assert "they take turns of some milliseconds" in first[0]
    assert not any(others)


@pytest.mark.parametrize("num_window_bytes", [None, 0])
def test_normal_mode(world: World, num_window_bytes: int | None) -> None:
    case = Case((100, 0, *(60,) * (world.num_ranks - 2)), num_window_bytes=num_window_bytes, num_biases=1)
    world.run(run_case, case, timeout=TIMEOUT_S)


@pytest.mark.parametrize("how", ["in line", "hook"])
def test_low_latency(world: World, how: str) -> None:
    tokens = (7, 0, *(5,) * (world.num_ranks - 2))
    case = low_latency_cases.Case(tokens, travel="fp8", how=how, combines=2)
    world.run(low_latency_cases.run_case, case, timeout=TIMEOUT_S)


def test_pairs(world: World) -> None:
    seconds = max(world.run(soak, NUM_PAIRS, 1 << 20, NUM_PAIRS, timeout=TIMEOUT_S))
    print(f"{NUM_PAIRS} pairs between {world.num_ranks} ranks: {seconds / NUM_PAIRS * 1e3:.1f} ms each")


@pytest.fixture
def three_ranks(leave_the_service: Callable[[int], None]) -> Iterator[World]:
    with World(GPU.num_ranks, leave_the_service) as world:
        yield world


@pytest.mark.parametrize("call", [CACHED, COMBINE])
def test_a_killed_rank(three_ranks: World, call: int) -> None:
    struck = strike(Fault(GPU, 1, call), world=three_ranks)
    assert struck.dead == [1]
    for rank, outcome in struck.survivors.items():
        assert outcome.kind == "PeerLost", outcome
        assert outcome.was_noticed
        assert f"rank 1 (pid {struck.pids[1]}) died while rank {rank} waited for its" in outcome.message
        assert f"rank 1 (pid {struck.pids[1]}) is dead" in outcome.status


def test_a_rank_that_raises(three_ranks: World) -> None:
    for rank, outcome in strike(Fault(GPU, 1, CACHED, "", "raise"), world=three_ranks).survivors.items():
        assert outcome.kind == ("ValueError" if rank == 1 else "PeerLost"), outcome
        assert REASON in outcome.message
        assert outcome.was_noticed
