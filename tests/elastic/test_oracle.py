"""`ElasticBuffer` in both layouts, against the dense oracle."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyep.api.elastic import ElasticBuffer
from anyep.errors import NotSupported
from tests.support.depth import examples
from tests.support.elastic_cases import ElasticCase, check_case, elastic_buffer
from tests.support.places import Place
from tests.support.world import RankContext, get_world

CASES = {
    "plain": ElasticCase((7, 5, 6, 4), num_topk=4, missing=0.0, num_biases=1),
    "an empty rank, no CPU sync": ElasticCase((0, 9, 3, 24), num_topk=4, waits=False, num_biases=2),
    "FP8, aligned": ElasticCase((5, 6, 0, 1), hidden=16, num_scales=3, alignment=8),
    "without weights, nothing chosen": ElasticCase((4, 4, 4, 4), missing=1.0, has_weights=False),
    "asynchronous": ElasticCase((7, 5, 6, 4), num_topk=4, num_biases=1, run_async=True),
    "column-major scales": ElasticCase((5, 6, 2, 1), hidden=16, num_scales=3, has_column_major_scales=True),
    "through rings": ElasticCase((20, 24, 9, 8), num_topk=6, num_window_bytes=0, num_biases=1),
}


EXPANDED = {
    "plain": ElasticCase((7, 5, 6, 4), num_topk=5, local_experts=3, missing=0.1, num_biases=1, expands=True),
    "padded, no CPU sync": ElasticCase(
        (0, 9, 3, 24), num_topk=6, local_experts=4, waits=False, alignment=8, pads=True, expands=True
    ),
    "FP8, asynchronous, column-major": ElasticCase(
        (5, 6, 0, 1),
        *(16, 8, 5, 3),
        alignment=4,
        pads=True,
        expands=True,
        has_column_major_scales=True,
        run_async=True,
    ),
    "without weights, nothing chosen": ElasticCase(
        (4, 4, 4, 4), missing=1.0, has_weights=False, expands=True
    ),
    "through rings": ElasticCase(
        (20, 24, 9, 8), num_topk=6, local_experts=3, num_window_bytes=0, expands=True, num_biases=2
    ),
    "added at the source only": ElasticCase(
        (7, 0, 6, 4), num_topk=5, local_experts=3, missing=0.1, expands=True, sums_on_the_way=False
    ),
    "added at the source only, asynchronous, no CPU sync": ElasticCase(
        (7, 5, 0, 4),
        num_topk=4,
        local_experts=3,
        expands=True,
        num_biases=2,
        sums_on_the_way=False,
        run_async=True,
        waits=False,
        has_weights=False,
    ),
}


PLACES = [Place("cpu", 4), Place("simulated", 4), Place("cuda", 4)]
SLOW_IN_THE_INTERPRETER = ("asynchronous", "without weights, nothing chosen", "column-major scales")


def everywhere(names: Iterable[str]) -> Any:
    found = []
    for place, name in product(PLACES, names):
        is_slow = place.device == "simulated" and name in SLOW_IN_THE_INTERPRETER
        marks = [pytest.mark.slow] if is_slow else []
        found.append(place.param(name, marks=marks, name=f"{place}-{name}"))
    return pytest.mark.parametrize(("place", "name"), found)


@everywhere(EXPANDED)
def test_expanded(place: Place, name: str) -> None:
    place.world().run(check_case, EXPANDED[name])


@everywhere(CASES)
def test_compact(place: Place, name: str) -> None:
    place.world().run(check_case, CASES[name])


NODES = {
    "compact": ElasticCase((7, 5, 6, 4), num_topk=6, missing=0.1, num_biases=1, num_nodes=2),
    "compact, no CPU sync, without weights": ElasticCase(
        (0, 9, 3, 24), num_topk=6, waits=False, has_weights=False, num_nodes=2, num_biases=2
    ),
    "FP8, column-major, asynchronous": ElasticCase(
        (5, 6, 0, 1),
        hidden=16,
        num_scales=3,
        has_column_major_scales=True,
        run_async=True,
        num_nodes=4,
    ),
    "expanded": ElasticCase(
        (7, 5, 6, 4), num_topk=8, local_experts=3, missing=0.1, num_biases=1, expands=True, num_nodes=2
    ),
    "expanded FP8, padded, asynchronous": ElasticCase(
        (9, 0, 2, 24),
        hidden=16,
        num_topk=7,
        local_experts=4,
        num_scales=2,
        alignment=4,
        expands=True,
        pads=True,
        run_async=True,
        num_nodes=2,
    ),
    "through rings": ElasticCase(
        (20, 24, 9, 8), num_topk=6, local_experts=3, num_window_bytes=0, expands=True, num_nodes=2
    ),
}


@pytest.mark.parametrize("name", NODES)
def test_nodes(name: str) -> None:
    get_world(4).run(check_case, NODES[name])


@st.composite
def elastic_cases(draw: st.DrawFn, num_ranks: int, num_nodes: int = 1) -> ElasticCase:
    expands = draw(st.booleans())
    return ElasticCase(
        tokens=tuple(draw(st.lists(st.integers(0, 24), min_size=num_ranks, max_size=num_ranks))),
        hidden=8 * draw(st.integers(1, 12)),
        num_topk=draw(st.integers(1, 8)),
        local_experts=draw(st.integers(1, 4)),
        num_scales=draw(st.sampled_from((0, 0, 1, 5))),
        has_weights=draw(st.booleans()),
        alignment=draw(st.sampled_from((1, 4, 7))),
        waits=draw(st.booleans()),
        num_biases=draw(st.integers(0, 2)),
        missing=draw(st.sampled_from((0.0, 0.3, 0.9, 1.0))),
        num_window_bytes=draw(st.sampled_from((None, 0))),
        expands=expands,
        pads=expands and draw(st.booleans()),
        has_column_major_scales=draw(st.booleans()),
        num_nodes=num_nodes,
        sums_on_the_way=num_nodes > 1 or draw(st.booleans()),
        run_async=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


ANYWHERE = [
    *(Place("cpu", size) for size in (1, 2, 3, 8)),
    *(Place("cpu", size, num_nodes=nodes) for size, nodes in ((4, 2), (8, 2), (8, 4))),
    Place("simulated", 2),
]
ON_A_GPU = [Place("cuda", size) for size in (1, 2, 4, 8)]


@pytest.mark.parametrize(
    "place",
    [*(place.param(marks=pytest.mark.slow) for place in ANYWHERE), *(place.param() for place in ON_A_GPU)],
)
def test_any_case(place: Place) -> None:
    @examples(8, deep=60)
    @given(elastic_cases(place.num_ranks, place.num_nodes))
    def check(case: ElasticCase) -> None:
        place.world().run(check_case, case)

    check()


def two_handles_one_pickled(context: RankContext) -> None:
    """Each expert is on one rank, so the sum over a token's ranks is a multiple of the token."""
    buffer, handles = elastic_buffer(context), []
    x = torch.ones(3, 16, dtype=torch.bfloat16, device="cpu")
    for ids in ([[0, 1], [0, -1], [-1, -1]], [[1, -1], [0, 1], [1, 0]]):
        topk_idx = torch.tensor(ids, device="cpu")
        recv_x, _, _, handle, event = buffer.dispatch(
            x, topk_idx, num_experts=2, previous_event=buffer.capture(), async_with_compute_stream=True
        )
        event.current_stream_wait()
        handles.append((recv_x, pickle.loads(pickle.dumps(handle))))
    for (rows, handle), sums in zip(reversed(handles), ([1, 2, 2], [2, 1, 0]), strict=True):
        combined, _, _ = buffer.combine(rows, handle)
        assert combined[:, 0].tolist() == sums


def test_two_handles_in_flight_and_pickled() -> None:
    get_world(2).run(two_handles_one_pickled)


def change_ids_after_dispatch(context: RankContext) -> None:
    """The order of addition is that of the dispatch, whatever becomes of the ids that the handle shares."""
    buffer = elastic_buffer(context)
    x = torch.ones(1, 16, dtype=torch.bfloat16, device="cpu")
    topk_idx = torch.tensor([[2, 1, 0]], device="cpu")
    rows, _, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=3, do_handle_copy=False)
    assert handle.topk_idx is topk_idx
    topk_idx.copy_(topk_idx.flip(1).clone())
    # In float32, 1 is lost beside 2**25: only 2**25 - 2**25 + 1 is 1.
    outputs = rows * torch.tensor([1.0, -(2.0**25), 2.0**25], device="cpu")[context.rank]
    combined, _, _ = buffer.combine(outputs.bfloat16(), handle)
    assert combined.tolist() == [[1.0] * 16]


def test_ids_that_change_after_the_dispatch() -> None:
    get_world(3).run(change_ids_after_dispatch)


def make_wrongly(context: RankContext) -> None:
    with pytest.raises(NotSupported, match="num_cpu_bytes is for remote tables"):
        ElasticBuffer(context.group, 2 << 20, num_cpu_bytes=2 << 20)
    with pytest.raises(ValueError, match="num_bytes is 3: it must be at least 2097152"):
        ElasticBuffer(context.group, 3)
    with pytest.raises(ValueError, match="num_max_tokens_per_rank is 0: it must be at least 1"):
        ElasticBuffer(context.group)
    for name in ("allow_hybrid_mode", "allow_multiple_reduction"):
        with pytest.raises(NotSupported, match=f"on 2 nodes adds up .* there: leave {name}=False out"):
            ElasticBuffer(context.group, 2 << 20, device="cpu", ranks_per_node=1, **{name: False})
    with ElasticBuffer(context.group, num_max_tokens_per_rank=4, hidden=16, device="cpu") as buffer:
        assert buffer.num_bytes == 2 << 20
        assert buffer.runtime is not None
    assert buffer.runtime is None


def test_constructor() -> None:
    get_world(2).run(make_wrongly)
