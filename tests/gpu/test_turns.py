"""Ranks that take turns on a GPU, without the multi-process service: slow, and right all the same."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from anyep.backends.cuda.mps import MultiProcessService
from tests.gpu import test_low_latency as test_gpu_low_latency
from tests.gpu import test_normal as test_gpu_normal
from tests.support import gpu_scenarios, low_latency_cases
from tests.support.cases import Case
from tests.support.gpu import NEEDS_GPU, new_gpu_world, prepare_rank, run_gpu_case
from tests.support.gpu_scenarios import NUM_RANKS, new_buffer, warnings_heard
from tests.support.world import RankContext, World, set_environment

pytestmark = NEEDS_GPU
MPS_ENABLED = 133
"""The driver's number of this attribute of a device."""
NUM_PAIRS = 30
TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def leave_the_service(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], None]:
    """Lets a rank look for the service where none is."""
    return partial(set_environment, {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path_factory.mktemp("no-service"))})


@pytest.fixture(scope="module", params=[2, 4, 8])
def world(request: pytest.FixtureRequest, leave_the_service: Callable[[int], None]) -> Iterator[World]:
    with World(request.param, leave_the_service) as world:
        yield world


@pytest.fixture
def three_ranks(leave_the_service: Callable[[int], None]) -> Iterator[World]:
    with World(NUM_RANKS, leave_the_service) as world:
        world.run(test_gpu_normal.prepare, "60")
        yield world


def is_served(context: RankContext) -> bool:
    """Whether the driver has this process served by the multi-process service."""
    prepare_rank()
    answer = ctypes.c_int(-1)
    assert ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(answer), MPS_ENABLED, 0) == 0
    return answer.value == 1


def test_they_are_not_served(world: World) -> None:
    assert not any(world.run(is_served, timeout=TIMEOUT_S))
    if MultiProcessService.is_installed():
        with new_gpu_world(2) as served:
            assert all(served.run(is_served, timeout=TIMEOUT_S))


def warnings_of_a_new_buffer(context: RankContext) -> list[str]:
    prepare_rank()
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
    world.run(run_gpu_case, case, timeout=TIMEOUT_S)


@pytest.mark.parametrize("how", ["in line", "hook"])
def test_low_latency(world: World, how: str) -> None:
    tokens = (7, 0, *(5,) * (world.num_ranks - 2))
    case = low_latency_cases.Case(tokens, travel="fp8", how=how, combines=2)
    world.run(test_gpu_low_latency.run_gpu_case, case, timeout=TIMEOUT_S)


def test_pairs(world: World) -> None:
    seconds = max(world.run(test_gpu_normal.soak_on_a_gpu, NUM_PAIRS, 1 << 20, NUM_PAIRS, timeout=TIMEOUT_S))
    print(f"{NUM_PAIRS} pairs between {world.num_ranks} ranks: {seconds / NUM_PAIRS * 1e3:.1f} ms each")


@pytest.mark.parametrize("call", [2, 3])
def test_a_killed_rank(three_ranks: World, call: int) -> None:
    gpu_scenarios.check_a_killed_rank(three_ranks, call)


def test_a_rank_that_raises(three_ranks: World) -> None:
    gpu_scenarios.check_a_rank_that_raises(three_ranks, 2)
