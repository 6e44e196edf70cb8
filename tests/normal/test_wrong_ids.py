"""Ids that are neither an expert nor -1 are refused with a sentence; once they were dropped silently."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.low_latency.test_simulated_gpu import use_simulated_gpus
from tests.support import low_latency_cases
from tests.support.cases import buffer_for
from tests.support.world import World, get_world
from tests.support.wrong_ids import (
    VALUES,
    check_on_a_gpu,
    check_on_the_cpu,
    refuse_in_low_latency_mode,
    refuse_in_normal_mode,
)

NODES: dict[str, dict[str, Any]] = {
    "one node": {},
    "nodes": {"ranks_per_node": 1},
    "loopback": {"ranks_per_node": 1, "network": "loopback"},
}
NUM_RANKS = 3
BUFFER_OF = low_latency_cases.buffer_for


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("value", VALUES)
def test_normal_mode(value: int, nodes: str) -> None:
    world = get_world(NUM_RANKS)
    check_on_the_cpu(world.run(refuse_in_normal_mode, value, buffer_for, NODES[nodes], "cpu"), value)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("value", VALUES)
def test_low_latency_mode(value: int, nodes: str) -> None:
    world = get_world(NUM_RANKS)
    check_on_the_cpu(world.run(refuse_in_low_latency_mode, value, BUFFER_OF, NODES[nodes], "cpu"), value)


@pytest.fixture(scope="module")
def simulated() -> Iterator[World]:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'anyep[cuda]'")
    with World(NUM_RANKS) as world:
        world.run(use_simulated_gpus)
        yield world


@pytest.mark.parametrize("value", VALUES[1:3])
def test_normal_mode_on_a_simulated_gpu(simulated: World, value: int) -> None:
    how = {"device": "cuda"}
    check_on_a_gpu(simulated.run(refuse_in_normal_mode, value, buffer_for, how, "cpu", timeout=200.0), value)


@pytest.mark.parametrize("value", VALUES[1:3])
def test_low_latency_mode_on_a_simulated_gpu(simulated: World, value: int) -> None:
    answers = simulated.run(refuse_in_low_latency_mode, value, BUFFER_OF, {}, "cpu", timeout=200.0)
    check_on_a_gpu(answers, value)
