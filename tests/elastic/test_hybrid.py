"""`HybridEPBuffer` against dense maps: both pairs of calls, and what is refused."""

from __future__ import annotations

import inspect
import pickle
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyep import HybridEPBuffer
from anyep.errors import AnyEPError
from tests.support.depth import examples
from tests.support.elastic_cases import there
from tests.support.hybrid_cases import (
    HIDDEN,
    HybridCase,
    check_permuted,
    check_unpermuted,
    hybrid_buffer,
    inputs_of,
)
from tests.support.places import Place
from tests.support.world import RankContext, get_world

PLACES = [Place("cpu", 4), Place("cpu", 4, 2), Place("simulated", 4), Place("cuda", 4)]
QUICK_IN_THE_INTERPRETER = ("no room at all",)
PERMUTED = {
    "map": HybridCase((7, 5, 6, 4)),
    "padded, an empty rank": HybridCase((0, 9, 24, 1), pad_multiple=8),
    "FP8, choices": HybridCase((5, 6, 0, 2), is_fp8=True, as_map=False, pad_multiple=4),
    "without probabilities": HybridCase((3, 4, 5, 6), has_probs=False, pad_multiple=2),
    "a capacity": HybridCase((9, 9, 9, 9), capacity=96, pad_multiple=8),
    "too small a capacity": HybridCase((20, 20, 20, 20), capacity=32, pad_multiple=8),
    "non-blocking": HybridCase((9, 0, 9, 5), capacity=64, pad_multiple=4, non_blocking=True),
    "non-blocking, too many rows": HybridCase((20, 20, 20, 20), capacity=24, non_blocking=True),
    "no room at all": HybridCase((4, 4, 4, 4), capacity=0, non_blocking=True),
}
UNPERMUTED = {
    "map": HybridCase((7, 5, 6, 4)),
    "FP8, an empty rank": HybridCase((0, 9, 24, 1), is_fp8=True),
    "choices, without probabilities": HybridCase((5, 6, 2, 2), as_map=False, has_probs=False),
    "choices": HybridCase((5, 6, 2, 2), as_map=False),
}


def everywhere(names: Any) -> Any:
    found = []
    for place, name in product(PLACES, names):
        is_slow = place.device == "simulated" and name not in QUICK_IN_THE_INTERPRETER
        marks = [pytest.mark.slow] if is_slow else []
        found.append(place.param(name, marks=marks, name=f"{place}-{name}"))
    return pytest.mark.parametrize(("place", "name"), found)


@everywhere(PERMUTED)
def test_permuted(place: Place, name: str) -> None:
    place.world().run(check_permuted, PERMUTED[name], place.num_nodes)


@everywhere(UNPERMUTED)
def test_unpermuted(place: Place, name: str) -> None:
    place.world().run(check_unpermuted, UNPERMUTED[name], place.num_nodes)


@st.composite
def hybrid_cases(draw: st.DrawFn, num_ranks: int) -> HybridCase:
    tokens = tuple(draw(st.lists(st.integers(0, 24), min_size=num_ranks, max_size=num_ranks)))
    pad_multiple = draw(st.sampled_from([None, 1, 2, 8]))
    capacity = draw(st.sampled_from([None, 0, 8, 40, 200]))
    return HybridCase(
        tokens,
        local_experts=draw(st.integers(1, 4)),
        most_choices=draw(st.integers(1, 6)),
        has_probs=draw(st.booleans()),
        is_fp8=draw(st.booleans()),
        as_map=draw(st.booleans()),
        pad_multiple=pad_multiple,
        capacity=capacity,
        non_blocking=capacity is not None and draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
    )


@pytest.mark.property
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_any_case(num_ranks: int) -> None:
    @examples(10, deep=60)
    @given(hybrid_cases(num_ranks))
    def check(case: HybridCase) -> None:
        get_world(num_ranks).run(check_permuted, case)
        if case.capacity is None:
            get_world(num_ranks).run(check_unpermuted, case)

    check()


GOOD = HybridCase((3, 4), local_experts=2)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no routing": (
        {"routing_map": None, "probs": None},
        "the routing is missing: pass routing_map, topk_idx",
    ),
    "choices in one dimension": (
        {"routing_map": None, "probs": None, "topk_idx": torch.zeros(3).long()},
        "topk_idx must be a tensor of integers [tokens, top-k]",
    ),
    "a map as choices": (
        {"routing_map": None, "probs": None, "topk_idx": torch.ones(3, 4).bool()},
        "topk_idx must be a tensor of integers [tokens, top-k]",
    ),
    "weights with a map": (
        {"topk_weights": torch.ones(3, 2), "probs": None},
        "topk_weights go with topk_idx, and probs with routing_map",
    ),
    "both": ({"topk_idx": torch.zeros(3, 1).long()}, "pass routing_map and probs, or topk_idx and"),
    "a map of numbers": (
        {"routing_map": torch.ones(3, 4)},
        "routing_map is of torch.float32 and shape [3, 4]",
    ),
    "a small map": ({"routing_map": torch.ones(3, 3).bool()}, "it must be of torch.bool and shape [3, 4]"),
    "probabilities": ({"probs": torch.ones(3, 5)}, "probs is of torch.float32 and shape [3, 5]"),
    "no rows": ({"hidden": 3}, "hidden must be a tensor [tokens, hidden]"),
    "sparse rows": ({"hidden": torch.ones(3, HIDDEN).to_sparse()}, "x is sparse: pass x.to_dense()"),
    "a map without data": (
        {"routing_map": torch.ones(3, 4, dtype=torch.bool, device="meta")},
        "routing_map is on meta, where tensors have no data",
    ),
    "experts": ({"num_of_experts": 5}, "5 experts do not divide over 2 ranks"),
    "experts per rank": ({"num_of_experts_per_rank": 3}, "it must be of torch.bool and shape [3, 6]"),
    "experts, twice": (
        {"num_of_experts": 4, "num_of_experts_per_rank": 3},
        "num_of_experts is 4, but num_of_experts_per_rank is 3 on 2 ranks: leave one of them out",
    ),
    "no capacity": ({"non_blocking": True}, "non_blocking needs num_permuted_tokens"),
    "capacity": (
        {"num_permuted_tokens": 9, "pad_multiple": 4},
        "num_permuted_tokens is 9: it must be a multiple of pad_multiple, 4",
    ),
    "a capacity as text": (
        {"num_permuted_tokens": "8"},
        "num_permuted_tokens is '8': it must be a whole number",
    ),
    "padding": ({"pad_multiple": -1}, "pad_multiple is -1: it must be at least 1"),
    "FP8": ({"use_fp8": True}, "use_fp8 is set, but hidden is of torch.bfloat16"),
    "FP8, no rows": ({"hidden": 3, "use_fp8": True}, "hidden must be a tensor [tokens, hidden]"),
    "a handle and a map": ({"handle": "good"}, "a dispatch with a handle takes no routing_map"),
    "a copied handle": ({"handle": (1, 2), "routing_map": None}, "handle is of type tuple: pass what"),
    "too many rows": (
        {"hidden": torch.ones(25, HIDDEN).bfloat16()},
        "routing_map is of torch.bool and shape",
    ),
}


def dispatch_wrongly_on_rank_0(context: RankContext, name: str) -> str:
    buffer, mine = hybrid_buffer(context, 2), inputs_of(GOOD)[context.rank]
    good = there({"hidden": mine.hidden, "routing_map": mine.routing_map, "probs": mine.probs})
    *_, handle = buffer.dispatch_with_permute(**good)
    arguments: dict[str, Any] = dict(good)
    if context.rank == 0:
        arguments |= WRONG[name][0]
        if arguments.get("handle") == "good":
            arguments["handle"] = handle
    try:
        buffer.dispatch_with_permute(**arguments)
        message = "nothing was raised"
    except AnyEPError as error:
        message = str(error)
    check_permuted(context, GOOD)
    return message


@pytest.mark.parametrize("name", WRONG)
def test_wrong_dispatch(name: str) -> None:
    first, second = get_world(2).run(dispatch_wrongly_on_rank_0, name)
    assert WRONG[name][1] in first
    assert "rank 0" in second


def combine_wrongly_on_rank_0(context: RankContext, name: str) -> str:
    buffer, mine = hybrid_buffer(context, 2), inputs_of(GOOD)[context.rank]
    good = {"hidden": there(mine.hidden), "routing_map": there(mine.routing_map), "probs": there(mine.probs)}
    rows, probs, _, _, handle = buffer.dispatch_with_permute(**good)
    *_, other = buffer.dispatch(**good)
    if context.rank == 0:
        wrong: dict[str, Any] = {
            "another handle": {"handle": other},
            "no handle": {"handle": None},
            "a rebuilt handle": {"handle": type(handle)(handle)},
            "probabilities": {"probs": torch.ones(1)},
            "probabilities without data": {"probs": torch.ones(len(rows), device="meta")},
            "rows": {"hidden": rows[1:]},
        }
        arguments = {"hidden": rows, "probs": probs, "handle": handle} | wrong[name]
    else:
        arguments = {"hidden": rows, "probs": probs, "handle": handle}
    try:
        buffer.combine_with_unpermute(**arguments)
        message = "nothing was raised"
    except AnyEPError as error:
        message = str(error)
    check_permuted(context, GOOD)
    return message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another handle", "the handle was not made by dispatch_with_permute"),
        ("no handle", "handle is of type NoneType: pass what dispatch_with_permute"),
        ("a rebuilt handle", "handle is of type HybridHandle: pass what dispatch_with_permute"),
        ("probabilities", "probs is of torch.float32 and shape [1]"),
        ("probabilities without data", "probs is on meta, where tensors have no data"),
        ("rows", "rows, but the handle's dispatch gave"),
    ],
)
def test_wrong_combine(name: str, words: str) -> None:
    first, second = get_world(2).run(combine_wrongly_on_rank_0, name)
    assert words in first
    assert "rank 0" in second


def dispatch_along_a_handle(context: RankContext) -> None:
    """With probabilities and without, in turn: a call is not repeated as one of the other kind."""
    buffer, mine = hybrid_buffer(context, 2), inputs_of(GOOD)[context.rank]
    hidden, probs = there(mine.hidden), there(mine.probs)
    rows, row_probs, _, handle = buffer.dispatch(hidden, routing_map=there(mine.routing_map), probs=probs)
    for given_probs in (probs, None, None, None, probs, None):
        again, found, _, _ = buffer.dispatch(hidden, probs=given_probs, handle=handle)
        assert torch.equal(again, rows)
        assert (found is None) is (given_probs is None)
        assert found is None or torch.equal(found, row_probs)


@pytest.mark.parametrize(
    "place", [Place("cpu", 2).param(), Place("simulated", 2).param(), Place("cuda", 2).param()]
)
def test_probabilities_along_a_handle(place: Place) -> None:
    place.world().run(dispatch_along_a_handle)


def use_a_buffer(context: RankContext) -> None:
    """Attributes, sizes, and a map with more experts than the buffer was made for."""
    with HybridEPBuffer(context.group, HIDDEN, 8, 4, device="cpu", num_topk=2) as buffer:
        assert (buffer.rank, buffer.group_size) == (context.rank, 2)
        assert (buffer.local_rank, buffer.node_rank, buffer.num_of_nodes) == (context.rank, 0, 1)
        assert buffer.num_of_hybrid_ep_ranks_per_nvlink_domain == 2
        sizes = buffer.configurer.buffer_config
        assert (sizes.hidden_dim, sizes.max_num_of_tokens_per_rank) == (HIDDEN, 8)
        assert sizes.num_of_experts_per_rank == 4
        assert sizes is buffer.config
        assert buffer.runtime is not None
        buffer.empty_jit_cache()
        x, wide = torch.ones(9, HIDDEN).bfloat16(), torch.ones(9, 8, dtype=torch.bool)
        with pytest.raises(
            AnyEPError, match=r"a token with 8 experts, but the buffer was made for 2.*num_topk=8"
        ):
            buffer.dispatch_with_permute(hidden=x, routing_map=wide)
        narrow = wide.clone()
        narrow[:, 2:] = False
        how: dict[str, Any] = {"num_permuted_tokens": 64, "non_blocking": True}
        with pytest.raises(AnyEPError, match="hidden has 9 tokens, but a non-blocking call may have 8: call"):
            buffer.dispatch_with_permute(hidden=x, routing_map=narrow, **how)
        assert buffer.update_template_config(num_of_tokens_per_rank=9, pad_multiple=16) is sizes
        rows, _, _, counts, handle = buffer.dispatch_with_permute(hidden=x, routing_map=narrow)
        # 9 tokens of each of 2 ranks for experts 0 and 1, padded to a multiple of 16.
        expected = [32, 32, 0, 0] if context.rank == 0 else [0] * 4
        assert counts is not None
        assert (counts.tolist(), len(rows)) == (expected, sum(expected))
        # Along the handle its own padding holds.
        sizes.pad_multiple = 24
        how_again: dict[str, Any] = {"hidden": x, "num_permuted_tokens": len(rows)}
        assert torch.equal(buffer.dispatch_with_permute(handle=handle, **how_again)[0], rows)
        sizes.pad_multiple = 16
        # Without the host no token is refused: choices that are too many are dropped, and the flag tells.
        *_, flagged = buffer.dispatch_with_permute(hidden=x, routing_map=wide, **how)
        assert flagged[-1].tolist() == [1]
        kept = pickle.loads(pickle.dumps(handle))
        assert type(kept) is type(handle)
        combined, _ = buffer.combine_with_unpermute(hidden=rows, handle=kept)
        assert torch.equal(combined, 2 * x)
        buffer.update_template_config(num_local_experts=128)
        with pytest.raises(AnyEPError, match="a token with 256 experts: it must be at most 128"):
            buffer.dispatch_with_permute(hidden=x[:1], routing_map=torch.ones(1, 256, dtype=torch.bool))
    assert buffer.runtime is None


def test_a_buffer() -> None:
    get_world(2).run(use_a_buffer)


class _Dispatch(torch.autograd.Function):
    """As programs that train write it, and so is `_Combine`: the backward goes along the handle."""

    @staticmethod
    def forward(ctx: Any, buffer: HybridEPBuffer, *tensors: torch.Tensor) -> Any:
        hidden, routing_map, probs = tensors
        given = buffer.dispatch_with_permute(
            hidden=hidden, routing_map=routing_map, probs=probs, pad_multiple=4
        )
        ctx.buffer, ctx.handle = buffer, given[4]
        return given

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, probs = ctx.buffer.combine_with_unpermute(hidden=grads[0], probs=grads[1], handle=ctx.handle)
        return None, hidden, None, probs


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: HybridEPBuffer, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        ctx.buffer, ctx.handle, ctx.num_rows = buffer, handle, len(rows)
        return buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        how = {"pad_multiple": 4, "num_permuted_tokens": ctx.num_rows}
        return None, ctx.buffer.dispatch_with_permute(hidden=grads[0], handle=ctx.handle, **how)[0], None


def train_a_step(context: RankContext) -> None:
    """Experts multiply by the probability. The gradient of a sum is one expanded value: not contiguous."""
    buffer, mine = hybrid_buffer(context, 2), inputs_of(GOOD)[context.rank]
    hidden, probs = mine.hidden.float().requires_grad_(), mine.probs.clone().requires_grad_()
    rows, row_probs, _, _, handle = _Dispatch.apply(buffer, hidden, mine.routing_map, probs)  # type: ignore[no-untyped-call]
    combined = _Combine.apply(buffer, rows * row_probs[:, None], handle)  # type: ignore[no-untyped-call]
    combined.sum().backward()
    assert hidden.grad is not None
    assert probs.grad is not None
    torch.testing.assert_close(hidden.grad, mine.probs.sum(1, keepdim=True).expand(-1, HIDDEN))
    wanted = mine.hidden.float().sum(1, keepdim=True) * mine.routing_map
    torch.testing.assert_close(probs.grad, wanted, atol=1e-4, rtol=1e-4)
    columns = mine.hidden.T.contiguous().T
    assert not columns.is_contiguous()
    how: dict[str, Any] = {"handle": handle}
    assert torch.equal(buffer.dispatch_with_permute(hidden=columns, **how)[0], rows.detach().bfloat16())


def test_gradients() -> None:
    get_world(2).run(train_a_step)


def test_what_programs_ask_for() -> None:
    parameters = inspect.signature(HybridEPBuffer.dispatch_with_permute).parameters
    assert "fuse_permute_dispatch" in parameters
    assert all(
        each.kind is inspect.Parameter.KEYWORD_ONLY for name, each in parameters.items() if name != "self"
    )
