"""Normal mode between hosts that a real network joins: two network namespaces, two ranks in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from tests.cases import Case, run_case
from tests.namespaces import TwoHosts
from tests.strategies import node_cases

NUM_EXAMPLES = 40


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts(ranks_per_host=2) as hosts:
        yield hosts


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
