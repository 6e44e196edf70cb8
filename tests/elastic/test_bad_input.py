"""Wrong calls of `ElasticBuffer`: the sentence, what the other rank hears; the buffer works afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch

from anyep.errors import AnyEPError
from tests.support.elastic_cases import ElasticCase, check_case, elastic_buffer, there
from tests.support.places import Place
from tests.support.world import RankContext, get_world

PLACES = [Place("cpu", 2), Place("simulated", 2), Place("cuda", 2)]
UNNOTICED_ON_GPUS = ("sync",)
"""A rank whose host does not wait hears of errors in its next call."""
QUICK_IN_THE_INTERPRETER = ("no expert", "an expert twice", "stats", "Tm")
GOOD = ElasticCase((3, 4))
ids = torch.tensor([[0, 1], [2, 3]])
WRONG_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"topk_idx": None}, "topk_idx is missing"),
    "no experts": ({"num_experts": None}, "num_experts is missing"),
    "experts": ({"num_experts": 3}, "3 experts do not divide over 2 ranks"),
    "an expert twice": ({"topk_idx": ids * 0}, "topk_idx has expert 0 twice for token 0"),
    "no expert": ({"topk_idx": ids + 2}, "topk_idx is 4 for token 1 in column 0: it must be 0 to 3"),
    "too many tokens": ({"num_max_tokens_per_rank": 1}, "x has 2 tokens, but num_max_tokens_per_rank is 1"),
    "too large": ({"num_max_tokens_per_rank": 2**30}, "num_max_tokens_per_rank is 1073741824: with 2 ranks"),
    "ids' rows": ({"topk_idx": ids[:1]}, "topk_idx has shape [1, 2]: it must be [2, top-k]"),
    "weights": ({"topk_weights": torch.ones(2, 3)}, "topk_weights has shape [2, 3]: it must be [2, 2]"),
    "x": ({"x": 3}, "x is of type int: it must be a tensor"),
    "stats": (
        {"cumulative_local_expert_recv_stats": torch.zeros(3).int()},
        "cumulative_local_expert_recv_stats has shape [3]: it must be [2]",
    ),
    "alignment": ({"expert_alignment": 0}, "expert_alignment is 0: it must be at least 1"),
    "event": ({"previous_event": 3}, "previous_event is of type int"),
    "SMs": ({"num_sms": -1}, "num_sms is -1"),
    "padding": ({"do_zero_padding": True}, "do_zero_padding is for expanded rows: pass do_expand=True"),
    "large alignment": ({"expert_alignment": 2**24}, "expert_alignment is 16777216: it must be at most"),
    "no handle": ({"handle": (1, 2)}, "handle is of type tuple: it must be the EPHandle"),
}


def good_arguments() -> dict[str, Any]:
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    return {"x": x, "topk_idx": ids, "topk_weights": torch.ones(2, 2), "num_experts": 4}


def everywhere(names: Iterable[str]) -> Any:
    """Each of these in every place where it is noticed at once."""
    found = []
    for place, name in product(PLACES, names):
        if place.device == "cpu" or name not in UNNOTICED_ON_GPUS:
            is_slow = place.device == "simulated" and name not in QUICK_IN_THE_INTERPRETER
            marks = [pytest.mark.slow] if is_slow else []
            found.append(place.param(name, marks=marks, name=f"{place}-{name}"))
    return pytest.mark.parametrize(("place", "name"), found)


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: there(argument) for name, argument in arguments.items()}


def dispatch_wrongly_on_rank_0(context: RankContext, name: str) -> str:
    buffer, arguments = elastic_buffer(context), good_arguments()
    if context.rank == 0:
        arguments |= WRONG_DISPATCHES[name][0]
        if "handle" in arguments:
            del arguments["topk_idx"]
    try:
        buffer.dispatch(**on_device(arguments))
        message = "nothing was raised"
    except AnyEPError as error:
        message = str(error)
    check_case(context, GOOD, buffer)
    return message


@everywhere(WRONG_DISPATCHES)
def test_wrong_dispatch(place: Place, name: str) -> None:
    wrong, right = place.world().run(dispatch_wrongly_on_rank_0, name)
    assert wrong.startswith(WRONG_DISPATCHES[name][1])
    assert right.startswith("rank 0 refused its ")
    # A kernel that finds a wrong id tells its own host where it is.
    assert wrong in right or (place.device != "cpu" and "an id that is no expert" in right)


WRONG_LATER: dict[str, tuple[dict[str, Any], str]] = {
    "ids": ({"topk_idx": ids}, "a dispatch with a handle takes no topk_idx"),
    "sync": ({"do_cpu_sync": True}, "a dispatch with a handle takes no topk_idx"),
    "experts": ({"num_experts": 8}, "num_experts is 8, but the handle was made with 4: leave it out"),
    "tokens": ({"x": torch.ones(3, 16)}, "x has 3 rows, but the handle was made for 2"),
    "weights": ({"topk_weights": torch.ones(2)}, "topk_weights has shape [2]: it must be [2, 2]"),
    "layout": ({"do_expand": True}, "do_expand is True, but the handle was made with do_expand=False"),
}
WRONG_COMBINES: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"x": torch.ones(9, 16)}, "x has 9 rows, but the handle's dispatch gave "),
    "dtype": ({"x": torch.ones(2, 16).long()}, "x is int64: it must be bfloat16 or float16 or float32"),
    "weights": ({"topk_weights": torch.ones(2)}, "topk_weights has shape [2]: it must be ["),
    "bias": ({"bias": torch.ones(1, 16)}, "bias is float32: it must be bfloat16"),
    "handle": ({"handle": None}, "handle is of type NoneType: it must be the EPHandle"),
}


def go_on_wrongly_on_rank_0(context: RankContext, name: str, combines: bool) -> str:
    buffer, arguments = elastic_buffer(context), good_arguments()
    rows, _, _, handle, _ = buffer.dispatch(**on_device(arguments))
    later: dict[str, Any] = {"x": rows if combines else arguments["x"], "handle": handle}
    if context.rank == 0:
        later |= (WRONG_COMBINES if combines else WRONG_LATER)[name][0]
    try:
        (buffer.combine if combines else buffer.dispatch)(**on_device(later))
        message = "nothing was raised"
    except AnyEPError as error:
        message = str(error)
    check_case(context, GOOD, buffer)
    return message


@pytest.mark.parametrize("name", WRONG_LATER)
def test_wrong_dispatch_by_handle(name: str) -> None:
    wrong, right = get_world(2).run(go_on_wrongly_on_rank_0, name, False)
    assert wrong.startswith(WRONG_LATER[name][1])
    assert wrong in right


@pytest.mark.parametrize("name", WRONG_COMBINES)
def test_wrong_combine(name: str) -> None:
    wrong, right = get_world(2).run(go_on_wrongly_on_rank_0, name, True)
    assert wrong.startswith(WRONG_COMBINES[name][1])
    assert wrong in right


TERMS = (
    "about the terms of the dispatch: num_max_tokens_per_rank={}, expert_alignment={}, do_cpu_sync={},"
    " do_expand={},"
)
DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "Tm": (
        {"num_max_tokens_per_rank": 5},
        f"{TERMS.format(5, 1, True, False)} with topk_weights on rank 0;"
        " num_max_tokens_per_rank=24, expert_alignment=1, do_cpu_sync=True, do_expand=False,"
        " with topk_weights on rank 1",
    ),
    "weights": (
        {"topk_weights": None},
        f"{TERMS.format(24, 1, True, False)} no topk_weights on rank 0;",
    ),
    "alignment": (
        {"expert_alignment": 4},
        f"{TERMS.format(24, 4, True, False)} with topk_weights on rank 0;",
    ),
    "sync": ({"do_cpu_sync": False}, f"{TERMS.format(24, 1, False, False)} with topk_weights on rank 0;"),
    "layout": ({"do_expand": True}, f"{TERMS.format(24, 1, True, True)} with topk_weights on rank 0;"),
    "experts": ({"num_experts": 8}, "about the number of experts: 8 on rank 0; 4 on rank 1"),
}


def differ_on_rank_0(context: RankContext, name: str) -> str:
    buffer, arguments = elastic_buffer(context), good_arguments()
    if context.rank == 0:
        arguments |= DISAGREEMENTS[name][0]
    with pytest.raises(AnyEPError) as raised:
        buffer.dispatch(**on_device(arguments))
    check_case(context, GOOD, buffer)
    return str(raised.value)


@everywhere(DISAGREEMENTS)
def test_disagreement(place: Place, name: str) -> None:
    for message in place.world().run(differ_on_rank_0, name):
        assert DISAGREEMENTS[name][1] in message
