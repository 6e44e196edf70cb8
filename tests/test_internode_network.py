"""Normal mode between hosts that a real network joins: two network namespaces, two ranks in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from anyep.buffer import Buffer
from tests.cases import NVL_BYTES, RDMA_BYTES, Case, check_case, run_case
from tests.namespaces import TwoHosts
from tests.strategies import node_cases
from tests.world import RankContext

NUM_EXAMPLES = 40


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts(ranks_per_host=2) as hosts:
        yield hosts


def find_out(context: RankContext) -> tuple[int, tuple[int, ...]]:
    """What a Buffer finds that is told nothing about hosts."""
    case = Case((5, 3, 8, 0), ranks_per_node=2)
    with Buffer(context.group, NVL_BYTES, RDMA_BYTES, device="cpu") as buffer:
        check_case(context, case, buffer)
        wire = buffer.runtime.conversation.wire
        return buffer.runtime.traffic.rows_between_nodes, wire.ranks


def test_hosts_are_found(hosts: TwoHosts) -> None:
    found = hosts.run(find_out, timeout=100)
    assert [ranks for _, ranks in found] == [(2, 3), (2, 3), (0, 1), (0, 1)]
    assert sum(rows for rows, _ in found) > 0


def test_any_case(hosts: TwoHosts) -> None:
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(node_cases(2, 2))
    def check(case: Case) -> None:
        hosts.run(run_case, replace(case, network="nixl"), timeout=100)

    check()
