"""Normal mode between nodes, against the dense reference, bit for bit: virtual nodes on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from anyep import Config
from tests.support.cases import Case, run_case
from tests.support.strategies import node_cases
from tests.support.world import get_world

TOPOLOGIES = {(2, 1): 40, (2, 2): 40, (4, 1): 15, (3, 2): 12, (4, 2): 10, (2, 4): 10}
"""Nodes and ranks per node, and how many cases are drawn."""
REAL_SIZE = Case(
    tokens=(100,) * 4,
    hidden=7168,
    num_topk=8,
    local_experts=8,
    config=Config(4, 2, 4, 2, 4),
    num_biases=2,
    combine_weights=True,
    ranks_per_node=2,
)


@pytest.mark.parametrize(("nodes", "per_node"), TOPOLOGIES)
def test_any_case(nodes: int, per_node: int) -> None:
    @settings(
        max_examples=TOPOLOGIES[nodes, per_node],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(node_cases(nodes, per_node))
    def check(case: Case) -> None:
        get_world(nodes * per_node).run(run_case, case, timeout=100)

    check()


@pytest.mark.parametrize("num_window_bytes", [None, 0])
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_rows_of_a_real_size(num_window_bytes: int | None, dtype: str) -> None:
    get_world(4).run(run_case, replace(REAL_SIZE, dtype=dtype, num_window_bytes=num_window_bytes))


@pytest.mark.parametrize("config", [Config(2, 1, 2, 1, 2), Config(20, 1, 2, 1, 2), Config(2, 9, 10, 1, 2)])
def test_the_smallest_rings_with_the_most_unequal_loads(config: Config) -> None:
    case = Case(
        tokens=(200, 0, 3, 90),
        routing="one rank",
        num_topk=2,
        config=config,
        num_window_bytes=0,
        delay_seed=1,
        ranks_per_node=2,
    )
    get_world(4).run(run_case, case)
