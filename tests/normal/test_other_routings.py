"""A handle of another dispatch with the same counts is refused on all ranks; right handles never are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.cases import buffer_for
from tests.support.depth import examples
from tests.support.other_routings import Mix, check_answers, is_mixed, mix_handles, mixes
from tests.support.places import Place
from tests.support.world import RankContext

TIMEOUT_S = 200.0


def one_passes_another(num_ranks: int) -> Mix:
    return Mix(num_ranks, 8, 2, (0, 0, 1), frozenset({0}), False, False, 1)


def all_but_one_do(num_ranks: int) -> Mix:
    return Mix(num_ranks, 8, 2, (0, 0, 1), frozenset(range(1, num_ranks)), True, False, 1)


def drawn(place: Place, quick: int, deep: int) -> Any:
    return place.param(
        quick, deep, marks=pytest.mark.xdist_group(f"oracle of {place.device}-{place.num_ranks}")
    )


def mix_here(
    context: RankContext, mix: Mix, num_window_bytes: int | None, ranks_per_node: int | None
) -> tuple[str, bool]:
    return mix_handles(context, buffer_for(context, num_window_bytes, ranks_per_node=ranks_per_node), mix)


@pytest.mark.property
@pytest.mark.parametrize(
    ("place", "quick", "deep"),
    [
        drawn(Place("cpu", 3), 8, 50),
        drawn(Place("cpu", 4, num_nodes=2), 8, 50),
        drawn(Place("simulated", 2), 1, 8),
        drawn(Place("cuda", 2), 15, 30),
        drawn(Place("cuda", 3), 15, 30),
        drawn(Place("cuda", 8), 15, 30),
    ],
)
def test_mixed_handles(place: Place, quick: int, deep: int) -> None:
    first, second = one_passes_another(place.num_ranks), all_but_one_do(place.num_ranks)
    assert place.num_nodes > 1 or (is_mixed(first) and is_mixed(second))
    paths = (None,) if place.device == "simulated" else (None, 0)

    @examples(quick, deep=deep)
    @given(mixes(place.num_ranks), st.sampled_from(paths))
    @example(first, None)
    @example(second, paths[-1])
    def check(mix: Mix, num_window_bytes: int | None) -> None:
        answers = place.world().run(mix_here, mix, num_window_bytes, place.ranks_per_node, timeout=TIMEOUT_S)
        check_answers(mix, answers, place.ranks_per_node)

    check()
