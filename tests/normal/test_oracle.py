"""Dispatch, cached dispatch and combine of normal mode against the dense reference, bit for bit, everywhere:
on one node, between virtual nodes and hosts, on the simulated GPU and on a real one.

The simulated GPU has no rings within a node: the interpreter runs the programs of a kernel one after the
other, so one that waits for another would wait for ever.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep import Config
from tests.support.cases import Case, run_case
from tests.support.depth import examples
from tests.support.places import Place
from tests.support.strategies import cases_at, with_many_sms

TIMEOUT_S = 400.0
HOSTS = Place("cpu", 4, num_nodes=2, hosts=True)
NODES = Place("cpu", 4, num_nodes=2)


def group(place: Place) -> Any:
    """Tests with the same ranks run in one process."""
    return pytest.mark.xdist_group("hosts" if place.hosts else f"oracle of {place.device}-{place.num_ranks}")


def drawn(place: Place, quick: int, deep: int, *, slow: bool = False) -> Any:
    """A place, with the number of cases that are drawn there."""
    return place.param(quick, deep, marks=[group(place), *([pytest.mark.slow] if slow else [])])


@pytest.mark.property
@pytest.mark.parametrize(
    ("place", "quick", "deep"),
    [
        drawn(Place("cpu", 1), 4, 50),
        drawn(Place("cpu", 2), 8, 100),
        drawn(Place("cpu", 2, num_nodes=2), 6, 80),
        drawn(Place("cpu", 3), 6, 80),
        drawn(Place("cpu", 4), 8, 80),
        drawn(Place("cpu", 4, num_nodes=2), 8, 80),
        drawn(Place("cpu", 4, num_nodes=4), 4, 30),
        drawn(Place("cpu", 5), 6, 12, slow=True),
        drawn(Place("cpu", 6), 6, 12, slow=True),
        drawn(Place("cpu", 6, num_nodes=3), 6, 24, slow=True),
        drawn(Place("cpu", 7), 6, 12, slow=True),
        drawn(Place("cpu", 8), 4, 40),
        drawn(Place("cpu", 8, num_nodes=4), 3, 20),
        drawn(Place("cpu", 8, num_nodes=2), 3, 20),
        drawn(HOSTS, 4, 60),
        drawn(Place("simulated", 1), 2, 6),
        drawn(Place("simulated", 2), 3, 16),
        drawn(Place("simulated", 3), 2, 10),
        drawn(Place("simulated", 2, num_nodes=2), 3, 16),
        drawn(Place("simulated", 4, num_nodes=2), 2, 10),
        drawn(Place("simulated", 3, num_nodes=3), 1, 6),
        drawn(Place("cuda", 2), 20, 80),
        drawn(Place("cuda", 4), 12, 60),
        drawn(Place("cuda", 8), 8, 40),
        drawn(Place("cuda", 2, heap="host"), 10, 40),
        drawn(Place("cuda", 8, heap="host"), 6, 30),
        drawn(Place("cuda", 2, num_nodes=2), 10, 60),
        drawn(Place("cuda", 4, num_nodes=2), 10, 60),
        drawn(Place("cuda", 8, num_nodes=2), 8, 40),
        drawn(Place("cuda", 8, num_nodes=4), 4, 20),
    ],
)
def test_any_case(place: Place, quick: int, deep: int) -> None:
    @examples(quick, deep=deep)
    @given(cases_at(place))
    def check(case: Case) -> None:
        place.world().run(run_case, case, timeout=TIMEOUT_S)

    check()


@pytest.mark.property
@pytest.mark.parametrize("place", [Place("cuda", 8).param()])
def test_any_case_with_more_sms_than_a_rank_has(place: Place) -> None:
    @examples(8, deep=60)
    @given(with_many_sms(cases_at(place, max_tokens=60)))
    def check(case: Case) -> None:
        place.world().run(run_case, case, timeout=TIMEOUT_S)

    check()


CASES = {
    "as simple as can be": Case((3, 4)),
    "float16, two biases, weights": Case(
        (17, 9), dtype="float16", num_biases=2, combine_weights=True, num_topk=3, hidden=1040
    ),
    "float32, one bias": Case((5, 12, 7), dtype="float32", num_biases=1, hidden=272),
    "bytes": Case((4, 6), dtype="uint8", hidden=48),
    "fp8 with strided scales": Case(
        (9, 3, 14), dtype="float8_e4m3fn", num_scales=5, strided_scales=True, combine_from="other memory"
    ),
    "the worst case": Case((8, 3), worst=True, combine_weights=True),
    "the worst case of bytes with scales": Case((2, 0, 5), dtype="uint8", num_scales=3, worst=True),
    "asynchronous": Case((5, 6), run_async=True, num_biases=1),
    "asynchronous worst case": Case((5, 6, 1), run_async=True, worst=True),
    "without choices of experts": Case((7, 2), send_topk=False),
    "alignment": Case((9, 9), alignment=4, num_topk=4),
    "a rank without tokens": Case((0, 7, 3), combine_weights=True),
    "no tokens at all": Case((0, 0)),
    "tokens that go nowhere": Case((6, 5), routing="none", num_biases=2),
    "some choices missing": Case((12, 11, 9), routing="some missing", num_topk=4, num_biases=1),
    "all to one rank": Case((30, 20, 10), routing="one rank"),
    "each to itself": Case((6, 6), routing="own rank", combine_from="other memory"),
    "more slots than experts": Case((6, 5), num_topk=7, local_experts=1),
    "many tokens": Case((200, 150), num_topk=4, local_experts=4, config=Config(8, 2, 9)),
    "one rank alone": Case((11,), num_biases=1, combine_weights=True),
}
RARE = ("many tokens", "bytes", "alignment", "float32, one bias", "asynchronous", "a rank without tokens")
"""What others of the cases have, too."""


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(
            name,
            place,
            marks=[group(place), *([pytest.mark.slow] if name in RARE else [])],
            id=f"{place}-{name}",
        )
        for name, case in CASES.items()
        for place in [Place("simulated", case.num_ranks)]
    ],
)
def test_case(name: str, place: Place) -> None:
    pytest.importorskip("triton")
    place.world().run(run_case, CASES[name], timeout=TIMEOUT_S)


NODE_CASES = {
    "two nodes, two biases, weights": Case(
        (17, 9), dtype="float16", num_biases=2, combine_weights=True, num_topk=3, hidden=1040
    ),
    "two by two": Case((13, 0, 9, 4), num_topk=3, combine_weights=True, num_biases=1),
    "FP8 with strided scales": Case(
        (9, 3, 14, 6), dtype="float8_e4m3fn", num_scales=5, strided_scales=True, combine_from="other memory"
    ),
    "the worst case": Case((8, 3, 0, 5), worst=True, combine_weights=True, routing="some missing"),
    "asynchronous worst case": Case((8, 3), worst=True, run_async=True, routing="skewed"),
    "without choices of experts, asynchronous": Case((7, 2, 3, 5), send_topk=False, run_async=True),
    "tokens that go nowhere": Case((6, 5), routing="none", num_biases=2),
    "all to one rank": Case((30, 20, 10, 7), routing="one rank", combine_from="combine buffer"),
    "each to itself": Case((6, 6), routing="own rank", dtype="float32", hidden=272),
}
RARE_ON_NODES = ("without choices of experts, asynchronous", "tokens that go nowhere", "each to itself")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(
            name,
            place,
            marks=[group(place), *([pytest.mark.slow] if name in RARE_ON_NODES else [])],
            id=f"{place}-{name}",
        )
        for name, case in NODE_CASES.items()
        for place in [Place("simulated", case.num_ranks, num_nodes=2)]
    ],
)
def test_case_between_nodes(name: str, place: Place) -> None:
    """Rings hold all rows of a channel: the interpreter runs its sender before its relay."""
    pytest.importorskip("triton")
    place.world().run(run_case, NODE_CASES[name].at(place), timeout=TIMEOUT_S)


REAL_SIZE = Case(
    tokens=(),
    hidden=7168,
    num_topk=8,
    local_experts=8,
    config=Config(4, 2, 4, 2, 4),
    num_biases=2,
    combine_weights=True,
)
GPU_NODES = [Place("cuda", size, num_nodes=2) for size in (2, 4, 8)]
REAL_PLACES = [
    *(Place("cpu", 2), Place("cpu", 4), NODES, HOSTS),
    *(Place("cuda", size) for size in (2, 4, 8)),
    *GPU_NODES,
]


def real_sizes() -> list[Any]:
    """In `make test`: every dtype on one node, and all paths in the one that is sent most often."""
    quick = {("cpu-2", "float16"), ("cpu-2", "float32"), ("cpu-2", "uint8"), ("cpu-4", "bfloat16")}
    quick.add((str(NODES), "bfloat16"))
    found = []
    for place in REAL_PLACES:
        for dtype in ("bfloat16", "float16", "float32", "uint8"):
            is_quick = place.device == "cuda" or (str(place), dtype) in quick
            if place.num_nodes > 1 and dtype.startswith("float") and place.device == "cpu":
                continue
            marks = [group(place), *([] if is_quick else [pytest.mark.slow])]
            found.append(place.param(dtype, marks=marks, name=f"{place}-{dtype}"))
    return found


@pytest.mark.parametrize(("place", "dtype"), real_sizes())
def test_rows_of_a_real_size(place: Place, dtype: str) -> None:
    case = replace(REAL_SIZE, tokens=(100,) * place.num_ranks, dtype=dtype).at(place)
    # Between nodes on GPUs rows go to windows only.
    without_windows = [] if place in GPU_NODES else [0]
    few = [1 << 16] if place.device == "cuda" and place.num_nodes == 1 else []
    for num_window_bytes in (None, *without_windows, *few):
        place.world().run(run_case, replace(case, num_window_bytes=num_window_bytes), timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    "config", [Config(2, 1, 2, 1, 2), Config(20, 1, 2, 1, 2), Config(2, 9, 10, 1, 2)], ids=str
)
@pytest.mark.parametrize("place", [place.param(marks=group(place)) for place in (Place("cpu", 4), NODES)])
def test_the_smallest_rings_with_the_most_unequal_loads(place: Place, config: Config) -> None:
    case = Case(tokens=(200, 0, 3, 90), routing="one rank", config=config, num_window_bytes=0, delay_seed=1)
    place.world().run(run_case, case.at(place))


@pytest.mark.xdist_group("oracle of cpu-3")
@examples(3, deep=20)
@given(st.integers(0, 1000))
def test_some_receivers_have_windows_and_some_do_not(seed: int) -> None:
    # 64 KiB hold the rows of the ranks with little to receive, not those of rank 0.
    case = Case(
        tokens=(60, 5, 80), hidden=512, routing="skewed", local_experts=1, num_window_bytes=1 << 16, seed=seed
    )
    Place("cpu", 3).world().run(run_case, case)
