"""Ranks that take turns on a GPU, without the multi-process service: slow, and right all the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial

import pytest

from tests import gpu_scenarios, low_latency_cases, test_gpu_low_latency
from tests.cases import Case
from tests.gpu import NEEDS_GPU, prepare_rank, run_gpu_case
from tests.gpu_pairs import soak
from tests.gpu_scenarios import NUM_RANKS, new_buffer
from tests.world import RankContext, World

pytestmark = NEEDS_GPU
NUM_PAIRS = 30
TIMEOUT_S = 200.0


def leave_the_service(folder: str, rank: int) -> None:
    """Look for the service where none is, before this rank uses the GPU."""
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = folder


@pytest.fixture(scope="module")
def nobody_serves(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("no-service"))


@pytest.fixture(scope="module", params=[2, 4, 8])
def world(request: pytest.FixtureRequest, nobody_serves: str) -> Iterator[World]:
    with World(request.param, partial(leave_the_service, nobody_serves)) as world:
        yield world


@pytest.fixture
def three_ranks(nobody_serves: str) -> Iterator[World]:
    with World(NUM_RANKS, partial(leave_the_service, nobody_serves)) as world:
        world.run(set_timeout, "60")
        yield world


def set_timeout(context: RankContext, timeout_s: str) -> None:
    prepare_rank()
    os.environ["ANYEP_TIMEOUT_S"] = timeout_s


def warnings_of_a_new_buffer(context: RankContext) -> list[str]:
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    prepare_rank()
    log, listener = logging.getLogger("anyep"), Listener(logging.WARNING)
    log.addHandler(listener)
    try:
        new_buffer(context).destroy()
    finally:
        log.removeHandler(listener)
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


def take_turns(context: RankContext, num_pairs: int) -> float:
    prepare_rank()
    return soak(context, num_pairs, 1 << 20, seed=num_pairs)


def test_pairs(world: World) -> None:
    seconds = max(world.run(take_turns, NUM_PAIRS, timeout=TIMEOUT_S))
    print(f"{NUM_PAIRS} pairs between {world.num_ranks} ranks: {seconds / NUM_PAIRS * 1e3:.1f} ms each")


@pytest.mark.parametrize("call", [2, 3])
def test_a_killed_rank(three_ranks: World, call: int) -> None:
    gpu_scenarios.check_a_killed_rank(three_ranks, call)


def test_a_rank_that_raises(three_ranks: World) -> None:
    gpu_scenarios.check_a_rank_that_raises(three_ranks, 2)
