"""Both modes on a simulated GPU, under other defaults of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.low_latency.test_simulated_gpu import use_simulated_gpus
from tests.normal.test_simulated_gpu import run_pairs, run_simulated_case, simulate
from tests.support import low_latency_cases
from tests.support.default_device_cases import NORMAL, set_other_defaults
from tests.support.low_latency_cases import FORMATS
from tests.support.world import World

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install 'anyep[cuda]'"
)
TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def normal_world() -> Iterator[World]:
    with World(2, set_other_defaults) as fresh:
        fresh.run(simulate)
        yield fresh


@pytest.fixture(scope="module")
def low_latency_world() -> Iterator[World]:
    with World(2, set_other_defaults) as fresh:
        fresh.run(use_simulated_gpus)
        yield fresh


@pytest.mark.parametrize("name", NORMAL)
def test_normal_mode(normal_world: World, name: str) -> None:
    normal_world.run(run_simulated_case, replace(NORMAL[name], tokens=(5, 7)), timeout=TIMEOUT_S)


def test_pairs_of_all_kinds(normal_world: World) -> None:
    normal_world.run(run_pairs, 4, timeout=TIMEOUT_S)


@pytest.mark.parametrize("how", ["in line", "hook", "async"])
@pytest.mark.parametrize("travel", FORMATS)
def test_low_latency_mode(low_latency_world: World, travel: str, how: str) -> None:
    case = low_latency_cases.Case((4, 3), hidden=512, travel=travel, how=how)
    case = replace(case, use_logfmt=how == "hook", zero_copy=how == "async")
    low_latency_world.run(low_latency_cases.run_case, case, timeout=TIMEOUT_S)
