"""Low-latency dispatch and combine against the dense reference, bit for bit, in every place.

On GPUs memory that nobody has written holds NaN, so that a result which is not filled does not look right.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from anyep.api.buffer import Buffer
from tests.support.depth import examples
from tests.support.low_latency_cases import FORMATS, Case, check_case, in_process_of, run_case
from tests.support.places import Place, buffer_device
from tests.support.strategies import low_latency_cases
from tests.support.world import RankContext

TIMEOUT_S = 240.0
HOW_TO_COMBINE = {"plain": "in line", "logfmt": "hook", "zero copy": "async"}


def draw(place: Place, quick: int, deep: int, slow: bool = False) -> Any:
    """A place, and how many examples are drawn for it."""
    return place.param(quick, deep, marks=[in_process_of(place), *([pytest.mark.slow] if slow else [])])


@pytest.mark.property
@pytest.mark.parametrize(
    ("place", "quick", "deep"),
    [
        draw(Place("cpu", 1), 8, 60),
        draw(Place("cpu", 2), 20, 150),
        draw(Place("cpu", 3), 12, 100),
        draw(Place("cpu", 4), 12, 100),
        draw(Place("cpu", 5), 6, 25, slow=True),
        draw(Place("cpu", 7), 6, 25, slow=True),
        draw(Place("cpu", 8), 6, 60),
        draw(Place("cpu", 2, num_nodes=2), 6, 40),
        draw(Place("cpu", 4, num_nodes=2), 10, 60),
        draw(Place("cpu", 4, num_nodes=4), 6, 30),
        draw(Place("cpu", 8, num_nodes=2), 4, 20, slow=True),
        draw(Place("cpu", 4, num_nodes=2, hosts=True), 12, 80),
        draw(Place("simulated", 1), 1, 6),
        draw(Place("simulated", 2), 3, 20),
        draw(Place("simulated", 3), 2, 8, slow=True),
        draw(Place("simulated", 4), 2, 4, slow=True),
        draw(Place("simulated", 2, num_nodes=2), 2, 8),
        draw(Place("simulated", 4, num_nodes=2), 1, 4),
        draw(Place("simulated", 2, heap="host"), 1, 10),
        draw(Place("cuda", 2, heap="host"), 10, 40),
        draw(Place("cuda", 8, heap="host"), 6, 20),
        draw(Place("cuda", 2), 60, 60),
        draw(Place("cuda", 4), 40, 40),
        draw(Place("cuda", 8), 25, 25),
        draw(Place("cuda", 2, num_nodes=2), 20, 20),
        draw(Place("cuda", 4, num_nodes=2), 25, 25),
        draw(Place("cuda", 8, num_nodes=2), 20, 20),
    ],
)
def test_any_case(place: Place, quick: int, deep: int) -> None:
    is_interpreted = place.device == "simulated"

    @examples(quick, deep=deep)
    @given(low_latency_cases(place.num_ranks, max_tokens=5 if is_interpreted else None))
    def check(case: Case) -> None:
        case = replace(case, delay_seed=None) if is_interpreted else case
        place.world().run(run_case, case.at(place), timeout=TIMEOUT_S)

    check()


def run_on_a_buffer_of_the_hint(context: RankContext, case: Case) -> None:
    """The size hint is enough, to the byte, and no call before the first one is needed."""
    sizes = (case.max_tokens, case.hidden, case.num_ranks, case.num_experts)
    hint = Buffer.get_low_latency_rdma_size_hint(*sizes)
    nodes = case.ranks_per_node
    with Buffer(
        context.group, 0, hint, low_latency_mode=True, device=buffer_device(), ranks_per_node=nodes
    ) as buffer:
        for seed in range(2):
            check_case(context.rank, replace(case, seed=seed), buffer)


REAL = Case((), hidden=7168, num_topk=8, local_experts=8)
SIZES = {
    Place("cpu", 2): replace(REAL, tokens=(16, 9), max_tokens=16),
    Place("simulated", 2): Case((5, 3), hidden=512),
    Place("simulated", 4, num_nodes=2): Case((5, 0, 1, 3), hidden=512),
    Place("cuda", 4): replace(REAL, tokens=(128, 60, 128, 1), max_tokens=128),
    Place("cuda", 4, heap="host"): replace(REAL, tokens=(128, 60, 128, 1), max_tokens=128),
    Place("cuda", 4, num_nodes=2): replace(REAL, tokens=(128, 60, 128, 1), max_tokens=128),
}


def format_param(place: Place) -> Any:
    """Between nodes interpreted kernels are the same as on one node: most of their formats are for later."""
    is_slow = place.device == "simulated" and place.num_nodes > 1
    return place.param(marks=[in_process_of(place), *([pytest.mark.slow] if is_slow else [])])


USUAL = [("bf16", "logfmt"), ("fp8", "zero copy"), ("fp8 rounded", "plain"), ("fp8 ue8m0", "logfmt")]


@pytest.mark.parametrize(
    ("travel", "combine"),
    [
        pytest.param(*pair, marks=() if pair in USUAL else pytest.mark.slow)
        for pair in itertools.product(FORMATS, HOW_TO_COMBINE)
    ],
)
@pytest.mark.parametrize("place", [format_param(place) for place in SIZES])
def test_every_format(place: Place, travel: str, combine: str) -> None:
    case = replace(
        SIZES[place],
        travel=travel,
        how=HOW_TO_COMBINE[combine],
        use_logfmt=combine == "logfmt",
        zero_copy=combine == "zero copy",
    )
    place.world().run(run_on_a_buffer_of_the_hint, case.at(place), timeout=TIMEOUT_S)


@pytest.mark.parametrize("place", [Place("cuda", 8).param(), Place("cuda", 8, num_nodes=2).param()])
def test_the_sizes_of_a_real_model(place: Place) -> None:
    case = replace(REAL, tokens=(128,) * 8, max_tokens=128, local_experts=32, travel="fp8")
    place.world().run(run_on_a_buffer_of_the_hint, case.at(place), timeout=TIMEOUT_S)
