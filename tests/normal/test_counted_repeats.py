"""Dispatches that count their rows and are repeated with less work give the same results as step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from anyep import Config, EventOverlap, autograd
from anyep.api.buffer import Buffer
from anyep.backends.cuda import counted_repeats
from tests.support.gpu_scenarios import FEW_SMS, NVL_BYTES, attempt, device_of, new_buffer
from tests.support.places import Place
from tests.support.repeats import (
    PLACES,
    Watched,
    column_major,
    counted_arguments,
    pair_of,
    shifted,
    without_gradients,
)
from tests.support.world import RankContext

MANY_TOKENS = 60
SMALL_WINDOWS = 8192
"""Bytes that rows of many tokens do not fit in."""


def results_of(dispatched: tuple[Any, ...]) -> list[Any]:
    """Everything that a dispatch without a handle returns, except for its event."""
    rows, ids, weights, per_expert, handle, event = dispatched
    event.current_stream_wait()
    return [rows, ids, weights, per_expert, *handle]


def used_rows(results: list[Any]) -> list[Any]:
    """The same without the contents of padding."""
    rows, ids, weights, per_expert, *handle = results
    is_used = (ids >= 0).any(dim=1)
    handle[3] = handle[3][is_used]
    return [rows[is_used], ids, weights[is_used], per_expert, *handle]


def are_equal(found: list[Any], right: list[Any]) -> bool:
    if isinstance(found[0], tuple):
        # A pair of data and scales.
        found, right = [*found[0], *found[1:]], [*right[0], *right[1:]]
    return all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(found, right, strict=True)
    )


def follow_sizes(context: RankContext, room_block: int) -> None:
    """Calls of many sizes, in turns; results that are held or dropped, and used by other calls.

    With a `room_block` of 1, some calls receive more rows than were expected.
    """
    with new_buffer(context) as buffer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(counted_repeats, "ROOM_BLOCK", room_block)
        watched = Watched(buffer)
        made = [counted_arguments(buffer, tokens, tokens) for tokens in (5, 1, 17, 9)]
        buffer.dispatch(**made[0])
        held = []
        for turn in range(14):
            arguments = dict(made[turn % len(made)])
            arguments["x"] = (arguments["x"].float() * (turn + 1)).bfloat16()
            arguments["topk_weights"] = arguments["topk_weights"] + turn
            before = watched.num_repeats
            found = results_of(buffer.dispatch(**arguments))
            assert watched.num_repeats == before + 1
            right = results_of(watched.step_by_step(lambda of=arguments: buffer.dispatch(**of)))
            assert are_equal(found, right)
            rows, handle = found[0], tuple(found[4:])
            total = buffer.combine(rows, handle, config=FEW_SMS)[0]
            again = buffer.dispatch(arguments["x"], handle=handle, config=FEW_SMS)[0]
            assert torch.equal(again, rows)
            expected = watched.step_by_step(
                lambda of=right: buffer.combine(of[0], tuple(of[4:]), config=FEW_SMS)[0]
            )
            assert torch.equal(total, expected)
            if turn % 3 == 0:
                held.append((found, [each.clone() if hasattr(each, "clone") else each for each in found]))
        for found, kept in held:
            assert are_equal(found, kept)


@pytest.mark.parametrize("room_block", [1, 64])
@pytest.mark.parametrize("place", PLACES)
def test_the_same_results(place: Place, room_block: int) -> None:
    place.world().run(follow_sizes, room_block, timeout=200)


@dataclass(frozen=True)
class Change:
    """What is different from the repeatable call; a repeat would be wrong, or is not supported."""

    name: str
    arguments: Callable[[dict[str, Any]], dict[str, Any]]
    is_repeated: bool = False

    def __str__(self) -> str:
        return self.name


def with_(**more: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: more


def to_all_ranks(given: dict[str, Any]) -> dict[str, Any]:
    return {"topk_idx": given["topk_idx"].flip(1), "topk_weights": given["topk_weights"].flip(1)}


CHANGES = [
    Change("nothing", lambda given: {}, is_repeated=True),
    Change("other rows", lambda given: {"x": given["x"] * 2}, is_repeated=True),
    Change("the order of experts", to_all_ranks, is_repeated=True),
    Change("an alignment of counts", with_(expert_alignment=16), is_repeated=True),
    Change("the address of ids", lambda given: {"topk_idx": shifted(given["topk_idx"])}, is_repeated=True),
    Change("the address of weights", lambda given: {"topk_weights": shifted(given["topk_weights"])}, True),
    Change(
        "the address of counts",
        lambda given: {"num_tokens_per_expert": shifted(given["num_tokens_per_expert"])},
        True,
    ),
    Change("the address of rows", lambda given: {"x": shifted(given["x"])}),
    Change("another type", lambda given: {"x": given["x"].half()}),
    Change("wider rows", lambda given: {"x": torch.cat([given["x"], given["x"]], dim=1)}),
    Change("a gradient", lambda given: {"x": given["x"].clone().requires_grad_()}),
    Change("ids by column", lambda given: {"topk_idx": column_major(given["topk_idx"])}),
    Change("no top-k", with_(topk_idx=None, topk_weights=None)),
    Change("the worst case", with_(num_worst_tokens=64)),
    Change("counts of nodes", lambda given: {"num_tokens_per_rdma_rank": given["num_tokens_per_rank"][:1]}),
    Change("scales", lambda given: {"x": (given["x"].view(torch.uint8), torch.ones(len(given["x"]), 1))}),
    Change("another config", with_(config=Config(FEW_SMS.num_sms, 4, 8))),
    Change("an equal config", with_(config=Config(**vars(FEW_SMS)))),
    Change("asynchronous", with_(async_finish=True)),
    Change("an empty event", with_(previous_event=EventOverlap())),
]


def try_changes(context: RankContext) -> None:
    with new_buffer(context) as buffer:
        watched = Watched(buffer)
        good = counted_arguments(buffer, 7, 3)
        for change in CHANGES:
            for _ in range(2):
                buffer.dispatch(**good)
            arguments = {**good, **change.arguments(good)}
            if isinstance(arguments["x"], tuple):
                rows, scales = arguments["x"]
                arguments["x"] = rows, scales.to(device_of(buffer))
            before = watched.num_repeats
            found = results_of(buffer.dispatch(**arguments))
            assert watched.num_repeats == before + change.is_repeated, change
            right = results_of(watched.step_by_step(lambda of=arguments: buffer.dispatch(**of)))
            if "num_worst_tokens" in arguments:
                found, right = used_rows(found), used_rows(right)
            assert are_equal(found, right), change


PAIRS = [
    Change("nothing", lambda given: {}, is_repeated=True),
    Change("other scales", lambda given: {"x": (given["x"][0], given["x"][1] * 2)}, is_repeated=True),
    Change("the address of scales", lambda given: {"x": (given["x"][0], shifted(given["x"][1]))}, True),
    Change("the address of data", lambda given: {"x": (shifted(given["x"][0]), given["x"][1])}),
    Change("a list", lambda given: {"x": list(given["x"])}),
    Change("integers", lambda given: {"x": (given["x"][0], given["x"][1].view(torch.int32))}),
    Change("two scales", lambda given: {"x": (given["x"][0], given["x"][1].repeat(1, 2))}),
    Change(
        "scales by column", lambda given: {"x": (given["x"][0], column_major(given["x"][1].repeat(1, 2)))}
    ),
    Change("another type", lambda given: {"x": (given["x"][0].view(torch.int8), given["x"][1])}),
    Change("no scales", lambda given: {"x": given["x"][0]}),
]


def try_pairs(context: RankContext) -> None:
    with new_buffer(context) as buffer:
        watched = Watched(buffer)
        good = counted_arguments(buffer, 7, 3, hidden=128)
        good["x"] = pair_of(good["x"])
        for change in PAIRS:
            for _ in range(2):
                buffer.dispatch(**good)
            arguments = {**good, **change.arguments(good)}
            before = watched.num_repeats
            found = results_of(buffer.dispatch(**arguments))
            assert watched.num_repeats == before + change.is_repeated, change
            right = results_of(watched.step_by_step(lambda of=arguments: buffer.dispatch(**of)))
            assert are_equal(found, right), change


@pytest.mark.parametrize("place", PLACES)
def test_pairs(place: Place) -> None:
    place.world().run(try_pairs, timeout=200)


@pytest.mark.parametrize("place", PLACES)
def test_whatever_is_different(place: Place) -> None:
    place.world().run(try_changes, timeout=200)


def train(context: RankContext) -> None:
    """Calls of `anyep.autograd`, forth and back, and of autograd functions of others."""
    with new_buffer(context) as buffer:
        watched = Watched(buffer)
        arguments = counted_arguments(buffer, 7, 3)
        num_experts = 2 * buffer.group_size

        def step() -> list[torch.Tensor]:
            x, weights = (arguments[name].clone().requires_grad_() for name in ("x", "topk_weights"))
            rows, _, row_weights, handle = autograd.dispatch(
                buffer, x, arguments["topk_idx"], weights, num_experts
            )
            total, _ = autograd.combine(buffer, rows * 2, handle)
            (total.float().sum() + row_weights.sum()).backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            assert weights.grad is not None
            return [rows.detach(), total.detach(), x.grad, weights.grad]

        right = watched.step_by_step(step)
        step()
        before = watched.num_repeats
        found = step()
        assert watched.num_repeats >= before + 2
        assert all(map(torch.equal, found, right))
        arguments["x"].requires_grad_()
        arguments["topk_weights"].requires_grad_()
        del arguments["config"]
        before = watched.num_repeats
        dispatched = without_gradients(lambda: buffer.dispatch(**arguments))
        assert watched.num_repeats == before + 1
        assert torch.equal(dispatched[0], right[0])


@pytest.mark.parametrize("place", PLACES)
def test_training(place: Place) -> None:
    place.world().run(train, timeout=200)


def run_out_of_room(context: RankContext, window_bytes: int | None) -> None:
    """Calls that begin as repeats and go on step by step: no rows, or more than windows have room for.

    Windows without a given size grow.
    """
    from anyep import gpu_connection

    usual = gpu_connection.FIRST_WINDOW_BYTES, gpu_connection.BLOCK_BYTES
    gpu_connection.FIRST_WINDOW_BYTES, gpu_connection.BLOCK_BYTES = SMALL_WINDOWS, 4096  # type: ignore[misc]
    try:
        with Buffer(context.group, NVL_BYTES, device="cuda", num_window_bytes=window_bytes) as buffer:
            run_out_of(buffer)
            num_blocks: int = buffer.runtime.normal.windows.num_blocks
    finally:
        gpu_connection.FIRST_WINDOW_BYTES, gpu_connection.BLOCK_BYTES = usual  # type: ignore[misc]
    assert (num_blocks > 1) == (window_bytes is None)


def with_experts(buffer: Buffer, arguments: dict[str, Any], topk_idx: torch.Tensor) -> dict[str, Any]:
    """The same tokens for other experts."""
    layout = buffer.get_dispatch_layout(topk_idx, 2 * buffer.group_size)
    per_rank, _, per_expert, in_rank, _ = layout
    return {
        **arguments,
        "topk_idx": topk_idx,
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": in_rank,
    }


def run_out_of(buffer: Buffer) -> None:
    watched = Watched(buffer)
    few, many = (counted_arguments(buffer, tokens, tokens) for tokens in (4, MANY_TOKENS))
    none = with_experts(buffer, few, torch.full_like(few["topk_idx"], -1))
    # Only rank 0 has no window that is large enough.
    to_rank_0 = torch.zeros_like(many["topk_idx"])
    to_rank_0[0], to_rank_0[1:, 1] = torch.tensor([0, 2 * buffer.group_size - 1]), 1
    lopsided = with_experts(buffer, many, to_rank_0)
    for _ in range(2):
        # The first one may have found the windows too small.
        buffer.dispatch(**few)
    for arguments in (few, none, few, many, few, lopsided, few, many, none, lopsided):
        before = watched.num_repeats
        found = results_of(buffer.dispatch(**arguments))
        assert watched.num_repeats == before + 1
        right = results_of(watched.step_by_step(lambda of=arguments: buffer.dispatch(**of)))
        assert are_equal(found, right)


@pytest.mark.parametrize("window_bytes", [SMALL_WINDOWS, None])
@pytest.mark.parametrize("place", PLACES)
def test_no_rows_and_too_many(place: Place, window_bytes: int | None) -> None:
    place.world().run(run_out_of_room, window_bytes, timeout=200)


def change_modes(context: RankContext) -> None:
    """The memory that a repeat has ready is for one size, one stream, and for or not for inference."""
    with new_buffer(context) as buffer:
        watched = Watched(buffer)
        made = [counted_arguments(buffer, tokens, tokens) for tokens in (6, 11)]
        rights = [results_of(buffer.dispatch(**arguments)) for arguments in made]
        contexts: list[Callable[[], Any]] = [contextlib.nullcontext, torch.inference_mode]
        if torch.cuda.is_available():
            stream = torch.cuda.Stream()
            contexts.append(lambda: torch.cuda.stream(stream))
        for turn in range(24):
            with contexts[turn // 2 % len(contexts)]():
                if torch.cuda.is_available():
                    torch.cuda.current_stream().synchronize()
                found = results_of(buffer.dispatch(**made[turn // 3 % 2]))
                is_inference = torch.is_inference_mode_enabled()
                assert all(each.is_inference() == is_inference for each in found[4:])
                assert are_equal(found, rights[turn // 3 % 2])
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
        assert watched.num_repeats == 25


@pytest.mark.parametrize("place", PLACES)
def test_streams_and_inference(place: Place) -> None:
    place.world().run(change_modes, timeout=200)


def make_mistakes(context: RankContext) -> list[str]:
    """Rank 0 is wrong about its counts, an id, or its rows, after calls that were good."""
    with new_buffer(context) as buffer:
        watched = Watched(buffer)
        good = counted_arguments(buffer, 6, 1)
        right = results_of(buffer.dispatch(**good))
        wrong_counts = {"num_tokens_per_rank": good["num_tokens_per_rank"] + 1}
        wrong_id = {"topk_idx": good["topk_idx"] + 1000}
        said = []
        for wrong in (wrong_counts, wrong_id, {"x": good["x"][:-1]}):
            buffer.dispatch(**good)
            arguments = {**good, **wrong} if context.rank == 0 else good
            said.append(attempt(lambda of=arguments: buffer.dispatch(**of)))
            before = watched.num_repeats
            assert are_equal(results_of(buffer.dispatch(**good)), right)
            assert watched.num_repeats == before + 1
        return said


@pytest.mark.parametrize("place", PLACES)
def test_wrong_calls(place: Place) -> None:
    said = place.world().run(make_mistakes, timeout=200)
    counts, expert, rows = said[0]
    assert "disagree about rank 0: pass both from one get_dispatch_layout" in counts
    assert "topk_idx is 10" in expert
    assert "topk_idx" in rows
    for counts, expert, rows in said[1:]:
        assert "rank 0 refused its dispatch" in counts
        assert "rank 0 refused its dispatch" in expert
        assert "rank 0 refused its dispatch" in rows
