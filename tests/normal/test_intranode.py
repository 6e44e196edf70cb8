"""Dispatch and combine between real processes, against the dense reference, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anyep import Config
from tests.support.cases import Case, run_case
from tests.support.strategies import cases
from tests.support.world import get_world

NUM_EXAMPLES = {1: 25, 2: 50, 3: 40, 4: 40, 5: 6, 6: 6, 7: 6, 8: 25}


@pytest.mark.parametrize("num_ranks", NUM_EXAMPLES)
def test_any_case(num_ranks: int) -> None:
    @settings(
        max_examples=NUM_EXAMPLES[num_ranks],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(cases(num_ranks))
    def check(case: Case) -> None:
        get_world(num_ranks).run(run_case, case)

    check()


@pytest.mark.parametrize("num_window_bytes", [None, 0])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8"])
def test_rows_of_a_real_size(num_ranks: int, num_window_bytes: int | None, dtype: str) -> None:
    case = Case(
        tokens=(100,) * num_ranks,
        hidden=7168,
        dtype=dtype,
        num_topk=8,
        local_experts=8,
        config=Config(4, 2, 4),
        num_window_bytes=num_window_bytes,
        num_biases=2,
        combine_weights=True,
    )
    get_world(num_ranks).run(run_case, case)


@pytest.mark.parametrize("config", [Config(2, 1, 2), Config(20, 1, 2), Config(2, 9, 10)])
def test_the_smallest_rings_with_the_most_unequal_loads(config: Config) -> None:
    case = Case(
        tokens=(200, 0, 3, 90),
        routing="one rank",
        num_topk=2,
        config=config,
        num_window_bytes=0,
        delay_seed=1,
    )
    get_world(4).run(run_case, case)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_some_receivers_have_windows_and_some_do_not(seed: int) -> None:
    # 64 KiB hold the rows of the ranks with little to receive, not those of rank 0.
    case = Case(
        tokens=(60, 5, 80), hidden=512, routing="skewed", local_experts=1, num_window_bytes=1 << 16, seed=seed
    )
    get_world(3).run(run_case, case)
