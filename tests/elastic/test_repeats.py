"""Calls of `ElasticBuffer` on GPUs that are made with less work because one like them was made before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.elastic_cases import ElasticCase, elastic_buffer, inputs_of, there
from tests.support.gpu_elastic import experts
from tests.support.oracle import same_bits
from tests.support.places import Place
from tests.support.repeats import Watched
from tests.support.world import RankContext

CASES = {
    "compact": ElasticCase((9, 7, 0, 8), num_topk=5, hidden=32, missing=0.0),
    "expanded FP8": ElasticCase((9, 7, 0, 8), num_topk=4, num_scales=3, hidden=32, expands=True, alignment=4),
}


def repeat(context: RankContext, case: ElasticCase) -> None:
    """The same bits as step by step, along another handle each time."""
    buffer = elastic_buffer(context)
    watched = Watched(buffer)  # type: ignore[arg-type]
    for seed in range(4):
        given = inputs_of(ElasticCase(**{**vars(case), "seed": seed}))[context.rank]
        x: Any = there(given.x if given.scales is None else (given.x, given.scales))
        of_layout: Any = {"do_expand": case.expands, "do_zero_padding": case.expands}
        how = {"num_experts": case.shape.num_experts, "expert_alignment": case.alignment, **of_layout}
        *_, handle, _ = buffer.dispatch(x, there(given.topk_idx), there(given.topk_weights), **how)

        def send(handle: Any = handle, x: Any = x, of_layout: Any = of_layout) -> Any:
            return buffer.dispatch(x, handle=handle, num_sms=handle.num_sms, **of_layout)

        right = watched.step_by_step(send)
        before = watched.num_repeats
        again = send()
        assert watched.num_repeats == before + 1
        assert again[3] is handle
        assert (again[1] is None) == case.expands
        for found, wanted in zip(tensors_of(again), tensors_of(right), strict=True):
            assert same_bits(found, wanted)
        outputs = experts(tensors_of(again)[0], context.rank)
        given_back = [outputs]
        if not case.expands:
            given_back.append(again[0].copy_(outputs))  # in a window
        for rows in given_back:

            def give_back(rows: torch.Tensor = rows, handle: Any = handle) -> torch.Tensor:
                return buffer.combine(rows, handle)[0]

            sums = watched.step_by_step(give_back)
            before = watched.num_repeats
            assert same_bits(give_back(), sums)
            assert watched.num_repeats == before + 1
        shape = (len(outputs),) if case.expands else handle.recv_topk_idx.shape
        weights = there(torch.ones(shape, device="cpu"))
        found, found_weights, _ = buffer.combine(outputs, handle, weights)
        assert found_weights is not None
        assert same_bits(found, sums)


def tensors_of(received: tuple[Any, ...]) -> list[torch.Tensor]:
    rows, ids = received[:2]
    return [*(rows if isinstance(rows, tuple) else (rows,)), *([] if ids is None else [ids])]


@pytest.mark.parametrize("place", [place.param() for place in (Place("simulated", 4), Place("cuda", 4))])
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(place: Place, name: str) -> None:
    place.world().run(repeat, CASES[name])
