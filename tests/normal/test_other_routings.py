"""A handle of another dispatch with the same counts is refused on all ranks; right handles never are."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.normal.test_simulated_gpu import simulate
from tests.support.cases import buffer_for
from tests.support.other_routings import Mix, check_answers, is_mixed, mix_handles, mixes
from tests.support.world import RankContext, World, get_world

ONE_PASSES_ANOTHER = Mix(3, 8, 2, (0, 0, 1), frozenset({0}), False, False, 1)
ALL_BUT_ONE_DO = Mix(3, 8, 2, (0, 0, 1), frozenset({1, 2}), True, False, 1)
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


def mix_on_one_node(context: RankContext, mix: Mix, num_window_bytes: int | None) -> tuple[str, bool]:
    return mix_handles(context, buffer_for(context, num_window_bytes), mix)


def test_the_examples_are_mixed() -> None:
    assert is_mixed(ONE_PASSES_ANOTHER)
    assert is_mixed(ALL_BUT_ONE_DO)


@settings(max_examples=25, **COMMON)  # type: ignore[arg-type]
@given(mixes(3), st.sampled_from([None, 0]))
@example(ONE_PASSES_ANOTHER, None)
@example(ALL_BUT_ONE_DO, 0)
def test_on_one_node(mix: Mix, num_window_bytes: int | None) -> None:
    check_answers(mix, get_world(3).run(mix_on_one_node, mix, num_window_bytes))


def mix_between_nodes(context: RankContext, mix: Mix, num_window_bytes: int | None) -> tuple[str, bool]:
    return mix_handles(context, buffer_for(context, num_window_bytes, ranks_per_node=2), mix)


@settings(max_examples=25, **COMMON)  # type: ignore[arg-type]
@given(mixes(4), st.sampled_from([None, 0]))
def test_between_nodes(mix: Mix, num_window_bytes: int | None) -> None:
    check_answers(mix, get_world(4).run(mix_between_nodes, mix, num_window_bytes), ranks_per_node=2)


@pytest.fixture(scope="module")
def simulated() -> Iterator[World]:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'anyep[cuda]'")
    with World(2) as world:
        world.run(simulate)
        yield world


def mix_on_a_simulated_gpu(context: RankContext, mix: Mix) -> tuple[str, bool]:
    return mix_handles(context, buffer_for(context, None, device="cuda"), mix)


def test_on_a_simulated_gpu(simulated: World) -> None:
    @settings(max_examples=6, **COMMON)  # type: ignore[arg-type]
    @given(mixes(2))
    @example(Mix(2, 8, 2, (0, 0, 1), frozenset({0}), False, False, 0))
    @example(Mix(2, 8, 2, (1, 0, 1), frozenset({0}), True, False, 0))
    def check(mix: Mix) -> None:
        check_answers(mix, simulated.run(mix_on_a_simulated_gpu, mix))

    check()
