"""Normal mode between nodes, against the dense reference, bit for bit: virtual nodes on this machine."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.cases import Case, run_case
from tests.strategies import node_cases
from tests.world import get_world

TOPOLOGIES = {(2, 1): 40, (2, 2): 40, (4, 1): 15, (3, 2): 12, (4, 2): 10, (2, 4): 10}
"""Nodes and ranks per node, and how many cases are drawn."""


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
