"""Low-latency mode between nodes, against the dense reference, bit for bit: virtual ones, and two hosts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support import cases
from tests.support.low_latency_cases import FORMATS, Case, buffer_for, check_case, run_case
from tests.support.namespaces import TwoHosts
from tests.support.strategies import low_latency_cases
from tests.support.world import RankContext, World, get_world

VIRTUAL = {(2, 1): 10, (2, 2): 15, (4, 1): 8, (2, 4): 4}
NUM_EXAMPLES = 40
NUM_ROUNDS = 30


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts(ranks_per_host=2) as hosts:
        yield hosts


def check_any(world: World, num_examples: int, ranks_per_node: int, network: str | None) -> None:
    @settings(
        max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    @given(low_latency_cases(world.num_ranks))
    def check(case: Case) -> None:
        world.run(run_case, replace(case, ranks_per_node=ranks_per_node, network=network), timeout=100)

    check()


@pytest.mark.parametrize(("nodes", "per_node"), VIRTUAL)
def test_any_case_between_virtual_nodes(nodes: int, per_node: int) -> None:
    check_any(get_world(nodes * per_node), VIRTUAL[nodes, per_node], per_node, None)


def test_any_case_between_hosts(hosts: TwoHosts) -> None:
    check_any(hosts, NUM_EXAMPLES, 2, "nixl")


def alternate(context: RankContext, network: str | None) -> None:
    """Low-latency and normal calls on one Buffer: neither may touch what the other one needs."""
    chance = random.Random(7)
    buffer = buffer_for(context, ranks_per_node=2, network=network)
    sizes = Case((6, 3, 0, 8), hidden=512, ranks_per_node=2)
    buffer.clean_low_latency_buffer(sizes.max_tokens, sizes.hidden, sizes.num_experts)
    for seed in range(NUM_ROUNDS):
        if chance.random() < 0.5:
            case = replace(
                sizes, travel=chance.choice(FORMATS), how=chance.choice(["in line", "hook"]), seed=seed
            )
            check_case(context.rank, case, buffer)
        else:
            cases.check_case(context, cases.Case((5, 9, 2, 7), ranks_per_node=2, seed=seed), buffer)


def test_both_modes_on_one_buffer() -> None:
    get_world(4).run(alternate, None, timeout=100)


def test_both_modes_on_one_buffer_between_hosts(hosts: TwoHosts) -> None:
    hosts.run(alternate, "nixl", timeout=100)
