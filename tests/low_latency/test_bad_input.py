"""Wrong low-latency calls: the exception, its sentence, what the other ranks hear; the Buffer works
afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anyep import AnyEPError
from anyep.buffer import Buffer
from tests.support import cases
from tests.support.low_latency_cases import NVL_BYTES, RDMA_BYTES, Case, buffer_for, check_case, finish
from tests.support.world import RankContext, get_world

TOKENS, MAX_TOKENS, HIDDEN, EXPERTS, TOPK = 6, 8, 128, 4, 2
LOCAL_EXPERTS = EXPERTS // 2
GOOD = Case(tokens=(TOKENS, TOKENS), max_tokens=MAX_TOKENS, hidden=HIDDEN, num_topk=TOPK, local_experts=2)
Arguments = dict[str, Any]
HOWS: dict[str, Arguments] = {
    "in line": {},
    "async": {"async_finish": True},
    "hook": {"return_recv_hook": True},
}


def outcome(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    try:
        call(*arguments, **named)
    except AnyEPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def ready_buffer(context: RankContext, hidden: int = HIDDEN) -> Buffer:
    """The Buffer that the cases share, laid out for these ones."""
    buffer = buffer_for(context)
    buffer.clean_low_latency_buffer(MAX_TOKENS, hidden, 2 * context.num_ranks)
    return buffer


def good_case(context: RankContext, hidden: int = HIDDEN) -> Case:
    return replace(GOOD, tokens=(TOKENS,) * context.num_ranks, hidden=hidden)


def rows_of(num_tokens: int = TOKENS, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.zeros(num_tokens, hidden, dtype=torch.bfloat16)


def good_dispatch(num_ranks: int = 2) -> Arguments:
    """Neighbouring experts for each token: every token goes to one rank, which has 2 experts."""
    topk_idx = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % (2 * num_ranks)
    return {
        "x": rows_of(),
        "topk_idx": topk_idx,
        "num_max_dispatch_tokens_per_rank": MAX_TOKENS,
        "num_experts": 2 * num_ranks,
        "use_fp8": False,
    }


def good_combine(handle: Any) -> Arguments:
    """Every row is 1 and every weight is 1: all sums are 2."""
    src_info, _, _, hidden, _ = handle
    return {
        "x": torch.ones(*src_info.shape, hidden, dtype=torch.bfloat16),
        "topk_idx": good_dispatch(src_info.shape[1] // MAX_TOKENS)["topk_idx"],
        "topk_weights": torch.ones(TOKENS, TOPK),
        "handle": handle,
    }


def good_handle(buffer: Buffer, **changes: Any) -> Any:
    return buffer.low_latency_dispatch(**(good_dispatch(buffer.group_size) | changes))[2]


def empty_handle(num_ranks: int = 2) -> Any:
    """A handle of a dispatch that brought nothing: it is judged by its contents."""
    ranges = torch.zeros(LOCAL_EXPERTS, num_ranks).long()
    src_info = torch.zeros(LOCAL_EXPERTS, num_ranks * MAX_TOKENS).int()
    return src_info, ranges, MAX_TOKENS, HIDDEN, LOCAL_EXPERTS * num_ranks


def is_right(combined: torch.Tensor) -> bool:
    return combined.tolist() == [[2.0] * combined.shape[1]] * TOKENS


def heard(
    function: str, reason: str, own_function: str = "", refuser: int = 0, rank: int = 1
) -> re.Pattern[str]:
    """What a rank hears of the refusal of another one."""
    own_function = own_function or function
    return re.compile(
        f"Disagreement: rank {refuser} refused its {re.escape(function)} \\(call \\d+\\), so rank {rank}"
        f" cannot go on with its {re.escape(own_function)}: {re.escape(reason)}"
    )


# A wrong dispatch on one rank

LAID_OUT = (
    f"but the slots are for {MAX_TOKENS} tokens per rank at most, hidden {HIDDEN}, {EXPERTS} experts:"
    f" call clean_low_latency_buffer on every rank before the sizes change"
)
ids = good_dispatch()["topk_idx"]
EXPERT_STATS = "cumulative_local_expert_recv_stats"
WAIT_STATS = "dispatch_wait_recv_cost_stats"
IN_PLACE = "is not contiguous: it is added to in place, pass a contiguous tensor"
ON_META = "is on meta, where tensors have no data: AnyEP works on CPU and CUDA tensors; materialise it first"
WRONG_DISPATCHES: dict[str, tuple[Arguments, str]] = {
    "too many tokens": (
        {"x": rows_of(9), "topk_idx": torch.zeros(9, TOPK).long()},
        "x has 9 tokens, but num_max_dispatch_tokens_per_rank is 8",
    ),
    "another maximum": (
        {"num_max_dispatch_tokens_per_rank": 16},
        f"this call is for 16 tokens per rank at most, hidden 128, 4 experts, {LAID_OUT}",
    ),
    "a smaller maximum": (
        {"num_max_dispatch_tokens_per_rank": 7},
        f"this call is for 7 tokens per rank at most, hidden 128, 4 experts, {LAID_OUT}",
    ),
    "another hidden": (
        {"x": rows_of(hidden=256)},
        f"this call is for 8 tokens per rank at most, hidden 256, 4 experts, {LAID_OUT}",
    ),
    "other experts": (
        {"num_experts": 8},
        f"this call is for 8 tokens per rank at most, hidden 128, 8 experts, {LAID_OUT}",
    ),
    "no room": (
        {"num_max_dispatch_tokens_per_rank": 1 << 40},
        f"num_rdma_bytes is {RDMA_BYTES}, too small: 1099511627776 tokens per rank, hidden 128 and 4 experts"
        f" need 4785074604081280 bytes; Buffer.get_low_latency_rdma_size_hint tells it",
    ),
    "no maximum": (
        {"num_max_dispatch_tokens_per_rank": 0},
        "num_max_dispatch_tokens_per_rank is 0: it must be at least 1",
    ),
    "a maximum that is no number": (
        {"num_max_dispatch_tokens_per_rank": "8"},
        "num_max_dispatch_tokens_per_rank is '8': it must be a whole number",
    ),
    "experts that do not divide": (
        {"num_experts": 5},
        "5 experts do not divide over 2 ranks: every rank holds the same number of experts",
    ),
    "no experts": ({"num_experts": 0}, "num_experts is 0: it must be at least 1"),
    "too many experts": (
        {"num_experts": 4096},
        "2048 experts per rank: at most 1024 are possible, use more ranks",
    ),
    "hidden with FP8": (
        {"x": rows_of(hidden=136), "use_fp8": True},
        "hidden is 136: with use_fp8 it must be a multiple of 128",
    ),
    "hidden with UE8M0": (
        {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
        "hidden is 128: with use_ue8m0 it must be a multiple of 512",
    ),
    "UE8M0 alone": (
        {"use_fp8": True, "use_ue8m0": True},
        "use_ue8m0 needs round_scale=True: only powers of two have no mantissa",
    ),
    "both ways to go on": (
        {"async_finish": True, "return_recv_hook": True},
        "async_finish and return_recv_hook do not go together: choose one",
    ),
    "no tensor": ({"x": [1, 2, 3]}, "x is of type list: it must be a tensor"),
    "a pair": ({"x": (rows_of(), rows_of())}, "x is of type tuple: it must be a tensor"),
    "x's dtype": ({"x": rows_of().half()}, "x is float16: it must be bfloat16"),
    "x's device": ({"x": rows_of().to("meta")}, f"x {ON_META}"),
    "x's dimensions": ({"x": rows_of()[0]}, "x has shape [128]: it must be [tokens, hidden]"),
    "x's strides": (
        {"x": torch.zeros(HIDDEN, TOKENS, dtype=torch.bfloat16).t()},
        "x is not contiguous: pass x.contiguous()",
    ),
    "x's columns": ({"x": rows_of(hidden=0)}, "x has no columns: the hidden size must be at least 1"),
    "x's row bytes": (
        {"x": rows_of(hidden=4)},
        "a row of 8 bytes is no multiple of 16 bytes: choose a hidden size that makes it one",
    ),
    "no ids": ({"topk_idx": None}, "topk_idx is of type NoneType: it must be a tensor"),
    "ids' dtype": ({"topk_idx": ids.int()}, "topk_idx is int32: it must be int64"),
    "ids' device": ({"topk_idx": ids.to("meta")}, f"topk_idx {ON_META}"),
    "ids' rows": ({"topk_idx": ids[:-1]}, "topk_idx has shape [5, 2]: it must be [6, top-k]"),
    "ids' dimensions": ({"topk_idx": ids[:, 0]}, "topk_idx has shape [6]: it must be [6, top-k]"),
    "no experts per token": (
        {"topk_idx": ids[:, :0]},
        "topk_idx has 0 experts per token: it must be 1 to 128",
    ),
    "too many experts per token": (
        {"topk_idx": torch.zeros(TOKENS, 129).long()},
        "topk_idx has 129 experts per token: it must be 1 to 128",
    ),
    "no expert stats": ({EXPERT_STATS: [0, 0]}, f"{EXPERT_STATS} is of type list: it must be a tensor"),
    "expert stats' dtype": (
        {EXPERT_STATS: torch.zeros(2).long()},
        f"{EXPERT_STATS} is int64: it must be int32",
    ),
    "expert stats' shape": (
        {EXPERT_STATS: torch.zeros(4).int()},
        f"{EXPERT_STATS} has shape [4]: it must be [2]",
    ),
    "expert stats' device": ({EXPERT_STATS: torch.zeros(2).int().to("meta")}, f"{EXPERT_STATS} {ON_META}"),
    "expert stats' strides": ({EXPERT_STATS: torch.zeros(4).int()[::2]}, f"{EXPERT_STATS} {IN_PLACE}"),
    "wait stats' dtype": ({WAIT_STATS: torch.zeros(2)}, f"{WAIT_STATS} is float32: it must be int64"),
    "wait stats' shape": (
        {WAIT_STATS: torch.zeros(2, 1).long()},
        f"{WAIT_STATS} has shape [2, 1]: it must be [2]",
    ),
    "wait stats' device": ({WAIT_STATS: torch.zeros(2).long().to("meta")}, f"{WAIT_STATS} {ON_META}"),
    "wait stats' strides": ({WAIT_STATS: torch.zeros(4).long()[::2]}, f"{WAIT_STATS} {IN_PLACE}"),
}


def dispatch_wrongly_on_rank_0(context: RankContext, name: str) -> str:
    """Rank 0 calls with something wrong, rank 1 rightly; then both make a right call."""
    buffer = ready_buffer(context)
    arguments = good_dispatch()
    if context.rank == 0:
        arguments |= WRONG_DISPATCHES[name][0]
    message = outcome(buffer.low_latency_dispatch, **arguments)
    check_case(context.rank, GOOD, buffer)
    return message


@pytest.mark.parametrize("name", WRONG_DISPATCHES)
def test_wrong_dispatch(name: str) -> None:
    sentence = WRONG_DISPATCHES[name][1]
    wrong, right = get_world(2).run(dispatch_wrongly_on_rank_0, name)
    assert wrong.startswith(f"InvalidCall: {sentence}")
    assert heard("low-latency dispatch", wrong.removeprefix("InvalidCall: ")).fullmatch(right)


# A wrong combine on one rank


def with_part(index: int, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    """Another handle, of which one part is changed."""

    def changed(given: Arguments) -> Arguments:
        handle = given["handle"]
        return {"handle": (*handle[:index], change(handle[index]), *handle[index + 1 :])}

    return changed


def with_entry(index: int, place: tuple[int, int], value: int) -> Callable[[Arguments], Arguments]:
    """Another handle, of which one entry is changed. On rank 0 every expert has the tokens 0, 2 and 4 of both
    ranks: a row of ranges is [3, 3 << 32 | 3].
    """

    def change(part: torch.Tensor) -> torch.Tensor:
        assert part.shape[0] == LOCAL_EXPERTS
        part = part.clone()
        assert int(part[place]) != value
        part[place] = value
        return part

    return with_part(index, change)


NOT_A_HANDLE = (
    "handle is not that of a low-latency dispatch: it must be (src_info, layout_range,"
    " num_max_dispatch_tokens_per_rank, hidden, num_experts)"
)
IMPOSSIBLE = "the handle's contents do not fit together:"
NOT_FOLLOWING = f"{IMPOSSIBLE} its ranges do not follow each other"
TOO_MANY_ROWS = f"{IMPOSSIBLE} it has more rows of a rank than num_max_dispatch_tokens_per_rank"
WRONG_TOKENS = (
    f"{IMPOSSIBLE} its source indices are not in order, or not below num_max_dispatch_tokens_per_rank"
)
COMBINE_STATS = "combine_wait_recv_cost_stats"
WRONG_COMBINES: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "too many tokens": (
        lambda given: {"topk_idx": torch.zeros(9, TOPK).long(), "topk_weights": torch.ones(9, TOPK)},
        "topk_idx has 9 tokens, but num_max_dispatch_tokens_per_rank is 8",
    ),
    "zero_copy and use_logfmt": (
        lambda given: {"zero_copy": True, "use_logfmt": True},
        "zero_copy and use_logfmt do not go together: what is encoded is copied; choose one",
    ),
    "zero_copy without its buffer": (
        lambda given: {"zero_copy": True},
        "zero_copy needs get_next_low_latency_combine_buffer before this call: the buffer it gave is for the"
        " very next low-latency call, and none may lie between",
    ),
    "both ways to go on": (
        lambda given: {"async_finish": True, "return_recv_hook": True},
        "async_finish and return_recv_hook do not go together: choose one",
    ),
    "no handle": (lambda given: {"handle": None}, NOT_A_HANDLE),
    "a number": (lambda given: {"handle": 5}, NOT_A_HANDLE),
    "a tensor": (lambda given: {"handle": given["handle"][0]}, NOT_A_HANDLE),
    "a part of a handle": (lambda given: {"handle": given["handle"][:4]}, NOT_A_HANDLE),
    "six tensors": (lambda given: {"handle": (given["handle"][0],) * 6}, NOT_A_HANDLE),
    "handle of another maximum": (
        with_part(2, lambda _: 16),
        f"this call is for 16 tokens per rank at most, hidden 128, 4 experts, {LAID_OUT}",
    ),
    "handle of another hidden": (
        with_part(3, lambda _: 256),
        f"this call is for 8 tokens per rank at most, hidden 256, 4 experts, {LAID_OUT}",
    ),
    "handle of other experts": (
        with_part(4, lambda _: 8),
        f"this call is for 8 tokens per rank at most, hidden 128, 8 experts, {LAID_OUT}",
    ),
    "handle without a maximum": (
        with_part(2, lambda _: None),
        "num_max_dispatch_tokens_per_rank is None: it must be a whole number",
    ),
    "handle of rows that cannot be": (with_part(3, lambda _: 100), "a row of 200 bytes is no multiple of 16"),
    "handle of experts that do not divide": (
        with_part(4, lambda _: 3),
        "3 experts do not divide over 2 ranks: every rank holds the same number of experts",
    ),
    "no source indices": (
        with_part(0, lambda part: part.tolist()),
        "handle[0] is of type list: it must be a tensor",
    ),
    "source indices' dtype": (with_part(0, torch.Tensor.long), "handle[0] is int64: it must be int32"),
    "source indices' shape": (
        with_part(0, lambda part: part[:, :-1]),
        "handle[0] has shape [2, 15]: it must be [2, 16]",
    ),
    "source indices' device": (with_part(0, lambda part: part.to("meta")), f"handle[0] {ON_META}"),
    "ranges' dtype": (with_part(1, torch.Tensor.int), "handle[1] is int32: it must be int64"),
    "ranges' shape": (
        with_part(1, lambda part: part[:1]),
        "handle[1] has shape [1, 2]: it must be [2, 2]",
    ),
    "ranges' device": (with_part(1, lambda part: part.to("meta")), f"handle[1] {ON_META}"),
    "ranges that overlap": (with_entry(1, (0, 1), 2 << 32 | 3), NOT_FOLLOWING),
    "ranges with a gap": (with_entry(1, (1, 1), 4 << 32 | 3), NOT_FOLLOWING),
    "ranges that begin late": (with_entry(1, (1, 0), 1 << 32 | 3), NOT_FOLLOWING),
    "ranges that begin below 0": (with_entry(1, (0, 0), (-1 << 32) | 3), NOT_FOLLOWING),
    "more rows than the maximum": (with_entry(1, (0, 0), MAX_TOKENS + 1), TOO_MANY_ROWS),
    "far too many rows": (with_entry(1, (1, 1), 3 << 32 | 0xFFFFFFFF), TOO_MANY_ROWS),
    "a source index that is too large": (with_entry(0, (0, 2), MAX_TOKENS), WRONG_TOKENS),
    "a source index below 0": (with_entry(0, (1, 0), -1), WRONG_TOKENS),
    "a source index twice": (with_entry(0, (1, 1), 0), WRONG_TOKENS),
    "source indices in no order": (with_entry(0, (0, 3), 3), WRONG_TOKENS),
    "no rows": (lambda given: {"x": None}, "x is of type NoneType: it must be a tensor"),
    "x's dtype": (lambda given: {"x": given["x"].float()}, "x is float32: it must be bfloat16"),
    "x's shape": (
        lambda given: {"x": given["x"][:, :-1]},
        "x has shape [2, 15, 128]: it must be [2, 16, 128]",
    ),
    "x's dimensions": (
        lambda given: {"x": given["x"].flatten(0, 1)},
        "x has shape [32, 128]: it must be [2, 16, 128]",
    ),
    "x's device": (lambda given: {"x": given["x"].to("meta")}, f"x {ON_META}"),
    "x's strides": (
        lambda given: {"x": given["x"].transpose(0, 1).contiguous().transpose(0, 1)},
        "x is not contiguous: pass x.contiguous()",
    ),
    "ids' dtype": (lambda given: {"topk_idx": ids.int()}, "topk_idx is int32: it must be int64"),
    "ids' device": (lambda given: {"topk_idx": ids.to("meta")}, f"topk_idx {ON_META}"),
    "ids' dimensions": (
        lambda given: {"topk_idx": ids[:, 0]},
        "topk_idx has shape [6]: it must be [tokens, top-k]",
    ),
    "no weights": (
        lambda given: {"topk_weights": None},
        "topk_weights is of type NoneType: it must be a tensor",
    ),
    "weights' dtype": (
        lambda given: {"topk_weights": given["topk_weights"].bfloat16()},
        "topk_weights is bfloat16: it must be float32",
    ),
    "weights' shape": (
        lambda given: {"topk_weights": torch.ones(TOKENS, 3)},
        "topk_weights has shape [6, 3]: it must be [6, 2]",
    ),
    "weights' device": (
        lambda given: {"topk_weights": given["topk_weights"].to("meta")},
        f"topk_weights {ON_META}",
    ),
    "out's dtype": (
        lambda given: {"out": torch.zeros(TOKENS, HIDDEN)},
        "out is float32: it must be bfloat16",
    ),
    "out's shape": (lambda given: {"out": rows_of(7)}, "out has shape [7, 128]: it must be [6, 128]"),
    "out's device": (lambda given: {"out": rows_of().to("meta")}, f"out {ON_META}"),
    "out's strides": (
        lambda given: {"out": rows_of(HIDDEN, TOKENS).t()},
        "out is not contiguous: it is written in place, pass a contiguous tensor",
    ),
    "no stats": (
        lambda given: {COMBINE_STATS: [0, 0]},
        f"{COMBINE_STATS} is of type list: it must be a tensor",
    ),
    "stats' dtype": (
        lambda given: {COMBINE_STATS: torch.zeros(2).int()},
        f"{COMBINE_STATS} is int32: it must be int64",
    ),
    "stats' shape": (
        lambda given: {COMBINE_STATS: torch.zeros(3).long()},
        f"{COMBINE_STATS} has shape [3]: it must be [2]",
    ),
    "stats' device": (
        lambda given: {COMBINE_STATS: torch.zeros(2).long().to("meta")},
        f"{COMBINE_STATS} {ON_META}",
    ),
    "stats' strides": (
        lambda given: {COMBINE_STATS: torch.zeros(4).long()[::2]},
        f"{COMBINE_STATS} {IN_PLACE}",
    ),
}


def combine_wrongly_on_rank_0(context: RankContext, name: str) -> str:
    buffer = ready_buffer(context)
    arguments = good_combine(good_handle(buffer))
    if context.rank == 0:
        arguments |= WRONG_COMBINES[name][0](arguments)
    message = outcome(buffer.low_latency_combine, **arguments)
    check_case(context.rank, GOOD, buffer)
    return message


@pytest.mark.parametrize("name", WRONG_COMBINES)
def test_wrong_combine(name: str) -> None:
    sentence = WRONG_COMBINES[name][1]
    wrong, right = get_world(2).run(combine_wrongly_on_rank_0, name)
    assert wrong.startswith(f"InvalidCall: {sentence}")
    assert heard("low-latency combine", wrong.removeprefix("InvalidCall: ")).fullmatch(right)


def combine_with_a_normal_handle(context: RankContext) -> str:
    buffer = ready_buffer(context)
    arguments = good_combine(good_handle(buffer))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    handle = buffer.dispatch(rows_of(), None, per_rank, None, in_rank, per_expert)[4]
    assert handle is not None
    assert len(handle) == 6
    if context.rank == 0:
        arguments["handle"] = handle
    message = outcome(buffer.low_latency_combine, **arguments)
    check_case(context.rank, GOOD, buffer)
    cases.check_case(context, cases.Case(tokens=(3, 3)), buffer)
    return message


def test_the_handle_of_a_normal_dispatch() -> None:
    wrong, right = get_world(2).run(combine_with_a_normal_handle)
    assert wrong == f"InvalidCall: {NOT_A_HANDLE}"
    assert heard("low-latency combine", NOT_A_HANDLE).fullmatch(right)


def logfmt_of_hidden(context: RankContext, hidden: int) -> str:
    buffer = ready_buffer(context, hidden)
    arguments = good_combine(good_handle(buffer, x=rows_of(hidden=hidden)))
    if context.rank == 0:
        arguments["use_logfmt"] = True
    message = outcome(buffer.low_latency_combine, **arguments)
    check_case(context.rank, good_case(context, hidden), buffer)
    return message


@pytest.mark.parametrize("hidden", [136, 16512])
def test_logfmt_of_a_hidden_that_has_none(hidden: int) -> None:
    wrong, right = get_world(2).run(logfmt_of_hidden, hidden)
    sentence = f"hidden is {hidden}: with use_logfmt it must be a multiple of 128 and at most 16384"
    assert wrong == f"InvalidCall: {sentence}"
    assert heard("low-latency combine", sentence).fullmatch(right)


# Other ways to be wrong, and to hear of it


def hear_in_another_way(context: RankContext, how: str) -> tuple[list[str], bool]:
    """Rank 0 refuses a dispatch and a combine; rank 1 hears of it where it waits, and nothing is written."""
    buffer = ready_buffer(context)
    handle = good_handle(buffer)
    chosen = HOWS[how] if context.rank else {"async_finish": True, "return_recv_hook": True}
    stats, out = torch.full((LOCAL_EXPERTS,), 3).int(), torch.full((TOKENS, HIDDEN), 3.0).bfloat16()
    calls: list[tuple[Callable[..., Any], Arguments]] = [
        (buffer.low_latency_dispatch, good_dispatch() | {EXPERT_STATS: stats}),
        (buffer.low_latency_combine, good_combine(handle) | {"out": out}),
    ]
    messages, at_once = [], True
    for function, arguments in calls:
        try:
            *_, event, hook = function(**arguments, **chosen)
            at_once = False
            messages.append(outcome(finish, event, hook))
            if hook is not None:
                hook()  # a second time it does nothing
        except AnyEPError as error:
            messages.append(f"{type(error).__name__}: {error}")
    assert stats.tolist() == [3] * LOCAL_EXPERTS
    assert (out == 3).all()
    check_case(context.rank, replace(GOOD, how=how), buffer)
    return messages, at_once


@pytest.mark.parametrize("how", HOWS)
def test_peers_hear_where_they_wait(how: str) -> None:
    (_, at_once_on_0), (messages, at_once_on_1) = get_world(2).run(hear_in_another_way, how)
    assert at_once_on_0
    assert at_once_on_1 == (how == "in line")
    reason = "async_finish and return_recv_hook do not go together: choose one"
    for function, message in zip(("dispatch", "combine"), messages, strict=True):
        assert heard(f"low-latency {function}", reason).fullmatch(message)


def never_wait(context: RankContext) -> list[str]:
    """Rank 1 sends a call that rank 0 refuses, and never looks at its event."""
    buffer = ready_buffer(context)
    arguments = good_dispatch()
    if context.rank == 0:
        arguments["num_experts"] = 5
    else:
        arguments["async_finish"] = True
    messages = [outcome(buffer.low_latency_dispatch, **arguments)]
    messages.append(outcome(good_handle, buffer))
    check_case(context.rank, GOOD, buffer)
    return messages


def test_what_nobody_waited_for_is_raised_by_the_next_call() -> None:
    (wrong, next_on_0), (nothing, next_on_1) = get_world(2).run(never_wait)
    reason = wrong.removeprefix("InvalidCall: ")
    assert nothing == "nothing was raised"
    assert heard("low-latency dispatch", reason).fullmatch(next_on_1)
    unheard = next_on_1.removeprefix("Disagreement: ")
    assert heard("low-latency dispatch", unheard, refuser=1, rank=0).fullmatch(next_on_0)


def refuse_in_a_row(context: RankContext) -> list[str]:
    """Rank 0 refuses one call after the other, each for its own reason, while rank 1 may be far behind."""
    buffer = ready_buffer(context)
    messages = []
    for number in range(9, 18):
        arguments = good_dispatch()
        if context.rank == 0:
            arguments |= {"x": rows_of(number), "topk_idx": torch.zeros(number, TOPK).long()}
        messages.append(outcome(buffer.low_latency_dispatch, **arguments))
    check_case(context.rank, GOOD, buffer)
    return messages


def test_many_refusals_in_a_row() -> None:
    wrong, right = get_world(2).run(refuse_in_a_row)
    for number, told, message in zip(range(9, 18), wrong, right, strict=True):
        reason = f"x has {number} tokens, but num_max_dispatch_tokens_per_rank is 8"
        assert told == f"InvalidCall: {reason}"
        assert heard("low-latency dispatch", reason).fullmatch(message)


def refuse_on_two_ranks(context: RankContext) -> str:
    """Ranks 1 and 2 refuse, each its own function."""
    buffer = ready_buffer(context)
    handle = good_handle(buffer)
    calls: list[Callable[[], Any]] = [
        lambda: buffer.low_latency_dispatch(**good_dispatch(3)),
        lambda: buffer.low_latency_combine(**good_combine(handle) | {"handle": None}),
        lambda: buffer.clean_low_latency_buffer(0, HIDDEN, 6),
    ]
    message = outcome(calls[context.rank])
    check_case(context.rank, good_case(context), buffer)
    return message


def test_two_ranks_that_refuse() -> None:
    right, wrong, wrong_too = get_world(3).run(refuse_on_two_ranks)
    assert wrong == f"InvalidCall: {NOT_A_HANDLE}"
    assert wrong_too == "InvalidCall: num_max_dispatch_tokens_per_rank is 0: it must be at least 1"
    expected = heard("low-latency combine", NOT_A_HANDLE, "low-latency dispatch", refuser=1, rank=0)
    assert expected.fullmatch(right)


def ask_for_a_row_that_is_not_there(context: RankContext, how: str) -> tuple[str, bool]:
    """Rank 0 asks for its token 1 at expert 0, which has only the even ones; rank 1 asks rightly."""
    buffer = ready_buffer(context)
    arguments = good_combine(good_handle(buffer))
    if context.rank == 0:
        topk_idx = arguments["topk_idx"].clone()
        topk_idx[1, 1] = 0
        arguments["topk_idx"] = topk_idx
    combined = []

    def combine() -> None:
        result, event, hook = buffer.low_latency_combine(**arguments, **HOWS[how])
        combined.append(result)
        finish(event, hook)

    message = outcome(combine)
    check_case(context.rank, replace(GOOD, how=how), buffer)
    return message, bool(combined) and is_right(combined[0])


@pytest.mark.parametrize("how", HOWS)
def test_ids_of_another_dispatch(how: str) -> None:
    (wrong, _), (right, is_right_there) = get_world(2).run(ask_for_a_row_that_is_not_there, how)
    assert wrong == (
        "InvalidCall: topk_idx sends token 1 to expert 0, which has no row of it: pass the topk_idx of the"
        " dispatch that the handles come from"
    )
    assert right == "nothing was raised"
    assert is_right_there


# Ranks that disagree


def disagree(context: RankContext, about: str) -> str:
    """Every rank calls rightly, but the last one otherwise than the others."""
    hidden = 512
    buffer = ready_buffer(context, hidden)
    num_experts = 2 * context.num_ranks
    dispatch = good_dispatch(context.num_ranks) | {"x": rows_of(hidden=hidden)}
    combine = good_combine(good_handle(buffer, x=dispatch["x"]))
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "dispatch and combine": (
            lambda: buffer.low_latency_dispatch(**dispatch),
            lambda: buffer.low_latency_combine(**combine),
        ),
        "combine and clean": (
            lambda: buffer.low_latency_combine(**combine),
            lambda: buffer.clean_low_latency_buffer(MAX_TOKENS, hidden, num_experts),
        ),
        "use_fp8": (
            lambda: buffer.low_latency_dispatch(**dispatch),
            lambda: buffer.low_latency_dispatch(**dispatch | {"use_fp8": True}),
        ),
        "round_scale": (
            lambda: buffer.low_latency_dispatch(**dispatch | {"use_fp8": True}),
            lambda: buffer.low_latency_dispatch(**dispatch | {"use_fp8": True, "round_scale": True}),
        ),
        "use_ue8m0": (
            lambda: buffer.low_latency_dispatch(**dispatch | {"use_fp8": True, "round_scale": True}),
            lambda: buffer.low_latency_dispatch(
                **dispatch | {"use_fp8": True, "round_scale": True, "use_ue8m0": True}
            ),
        ),
        "use_logfmt": (
            lambda: buffer.low_latency_combine(**combine),
            lambda: buffer.low_latency_combine(**combine, use_logfmt=True),
        ),
        "maximum of clean": (
            lambda: buffer.clean_low_latency_buffer(MAX_TOKENS, hidden, num_experts),
            lambda: buffer.clean_low_latency_buffer(MAX_TOKENS + 1, hidden, num_experts),
        ),
    }
    message = outcome(calls[about][context.rank == context.num_ranks - 1])
    check_case(context.rank, good_case(context, hidden), buffer)
    return message


FORMATS = "how values travel (use_fp8, round_scale, use_ue8m0, use_logfmt)"


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        (
            "dispatch and combine",
            "the function called: low-latency dispatch on ranks 0, 1; low-latency combine on rank 2",
        ),
        (
            "combine and clean",
            "the function called: low-latency combine on ranks 0, 1; clean_low_latency_buffer on rank 2",
        ),
        ("use_fp8", f"{FORMATS}: bf16 on ranks 0, 1; fp8 on rank 2"),
        ("round_scale", f"{FORMATS}: fp8 on ranks 0, 1; fp8 rounded on rank 2"),
        ("use_ue8m0", f"{FORMATS}: fp8 rounded on ranks 0, 1; fp8 ue8m0 on rank 2"),
        ("use_logfmt", f"{FORMATS}: bf16 on ranks 0, 1; logfmt on rank 2"),
        ("maximum of clean", "num_max_dispatch_tokens_per_rank: 8 on ranks 0, 1; 9 on rank 2"),
    ],
)
def test_ranks_that_disagree(about: str, sentence: str) -> None:
    expected = re.compile(f"Disagreement: the ranks disagree in call \\d+ about {re.escape(sentence)}")
    messages = get_world(3).run(disagree, about)
    assert expected.fullmatch(messages[0])
    assert messages == [messages[0]] * 3


OTHER_SIZES: dict[str, Arguments] = {
    "maximum": {"num_max_dispatch_tokens_per_rank": 16},
    "hidden": {"x": rows_of(hidden=256)},
    "experts": {"num_experts": 12},
    "format": {"use_fp8": True},
}
ABOUT_SIZES = {
    "maximum": "num_max_dispatch_tokens_per_rank: 8 on ranks 0, 1; 16 on rank 2",
    "hidden": "the hidden size: 128 on ranks 0, 1; 256 on rank 2",
    "experts": "the number of experts: 6 on ranks 0, 1; 12 on rank 2",
    "format": f"{FORMATS}: bf16 on ranks 0, 1; fp8 on rank 2",
}
ABOUT_FUNCTIONS = "the function called: low-latency dispatch on ranks 0, 1; low-latency combine on rank 2"


def new_buffer(context: RankContext, num_rdma_bytes: int = 1 << 23, **wishes: Any) -> Buffer:
    return Buffer(context.group, NVL_BYTES, num_rdma_bytes, low_latency_mode=True, device="cpu", **wishes)


def disagree_at_first(context: RankContext, about: str, how: str) -> str:
    """In the very first call; then all ranks agree about yet other sizes."""
    num_ranks = context.num_ranks
    with new_buffer(context) as buffer:
        function: Callable[..., Any] = buffer.low_latency_dispatch
        arguments = good_dispatch(num_ranks)
        if context.rank == num_ranks - 1 and about == "function":
            function, arguments = buffer.low_latency_combine, good_combine(empty_handle(num_ranks))
        elif context.rank == num_ranks - 1:
            arguments |= OTHER_SIZES[about]
        message = outcome(lambda: finish(*function(**arguments, **HOWS[how])[-2:]))
        check_case(context.rank, replace(good_case(context, 256), max_tokens=12, local_experts=3), buffer)
    return message


@pytest.mark.parametrize(
    ("about", "how"),
    [
        ("maximum", "in line"),
        ("maximum", "hook"),
        ("hidden", "in line"),
        ("experts", "async"),
        ("format", "in line"),
        ("function", "hook"),
    ],
)
def test_ranks_that_disagree_in_the_first_call(about: str, how: str) -> None:
    for message in get_world(3).run(disagree_at_first, about, how):
        what = ABOUT_SIZES.get(about, ABOUT_FUNCTIONS)
        assert message == f"Disagreement: the ranks disagree in call 1 about {what}"


def disagree_about_everything(context: RankContext) -> list[str]:
    """One disagreement after the other; then the sizes of the first ranks are right, and stay."""
    with new_buffer(context) as buffer:
        messages = []
        for other in OTHER_SIZES.values():
            arguments = good_dispatch(context.num_ranks)
            if context.rank == context.num_ranks - 1:
                arguments |= other
            messages.append(outcome(buffer.low_latency_dispatch, **arguments))
        check_case(context.rank, good_case(context), buffer)
        larger = good_dispatch(context.num_ranks) | OTHER_SIZES["maximum"]
        messages.append(outcome(buffer.low_latency_dispatch, **larger))
        check_case(context.rank, good_case(context), buffer)
    return messages


def test_a_new_buffer_survives_all_disagreements() -> None:
    for messages in get_world(3).run(disagree_about_everything):
        *disagreements, last = messages
        for call, (message, about) in enumerate(zip(disagreements, ABOUT_SIZES.values(), strict=True), 1):
            assert message == f"Disagreement: the ranks disagree in call {call} about {about}"
        assert last.startswith("InvalidCall: this call is for 16 tokens per rank at most, hidden 128, 6 exp")


def refuse_at_first(context: RankContext) -> str:
    """Rank 0 refuses the very first call; the other one's sizes were never agreed about, and may change."""
    with new_buffer(context) as buffer:
        arguments = good_dispatch()
        if context.rank == 0:
            arguments["x"] = None
        message = outcome(buffer.low_latency_dispatch, **arguments)
        check_case(context.rank, replace(GOOD, max_tokens=16), buffer)
    return message


def test_a_refusal_in_the_first_call() -> None:
    wrong, right = get_world(2).run(refuse_at_first)
    reason = "x is of type NoneType: it must be a tensor"
    assert wrong == f"InvalidCall: {reason}"
    assert heard("low-latency dispatch", reason).fullmatch(right)


def change_sizes_in_flight(context: RankContext) -> tuple[str, str]:
    """A second size while the first call is not yet received."""
    with new_buffer(context) as buffer:
        *_, hook = buffer.low_latency_dispatch(**good_dispatch(), return_recv_hook=True)
        larger = good_dispatch() | OTHER_SIZES["maximum"]
        message = outcome(buffer.low_latency_dispatch, **larger)
        cleaning = outcome(buffer.clean_low_latency_buffer, 16, HIDDEN, EXPERTS)
        assert hook is not None
        hook()
        buffer.clean_low_latency_buffer(16, HIDDEN, EXPERTS)
        check_case(context.rank, replace(GOOD, max_tokens=16), buffer)
    return message, cleaning


def test_sizes_that_change_while_a_call_is_in_flight() -> None:
    for message, cleaning in get_world(2).run(change_sizes_in_flight):
        assert message == (
            f"InvalidCall: this call is for 16 tokens per rank at most, hidden 128, 4 experts, {LAID_OUT}"
        )
        assert cleaning.startswith(
            "InvalidCall: low-latency dispatch (call 1) was sent and is not yet received"
        )


# Cleaning


def clean_wrongly_on_rank_0(context: RankContext, sizes: tuple[Any, Any, Any]) -> str:
    buffer = ready_buffer(context)
    chosen = sizes if context.rank == 0 else (MAX_TOKENS, HIDDEN, EXPERTS)
    message = outcome(buffer.clean_low_latency_buffer, *chosen)
    check_case(context.rank, GOOD, buffer)
    return message


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((0, 128, 4), "num_max_dispatch_tokens_per_rank is 0: it must be at least 1"),
        ((8, 128.5, 4), "hidden is 128.5: it must be a whole number"),
        ((8, 4, 4), "a row of 8 bytes is no multiple of 16 bytes"),
        ((8, 128, 3), "3 experts do not divide over 2 ranks"),
        (
            (1 << 20, 128, 4),
            f"num_rdma_bytes is {RDMA_BYTES}, too small: 1048576 tokens per rank, hidden 128 and 4 experts"
            f" need",
        ),
    ],
)
def test_wrong_cleaning(sizes: tuple[Any, Any, Any], sentence: str) -> None:
    wrong, right = get_world(2).run(clean_wrongly_on_rank_0, sizes)
    assert wrong.startswith(f"InvalidCall: {sentence}")
    assert heard("clean_low_latency_buffer", wrong.removeprefix("InvalidCall: ")).fullmatch(right)


# Room


def use_all_room(context: RankContext, case: Case, spare_bytes: int) -> str:
    hint = Buffer.get_low_latency_rdma_size_hint(
        case.max_tokens, case.hidden, context.num_ranks, case.num_experts
    )
    with new_buffer(context, hint + spare_bytes) as buffer:
        message = outcome(check_case, context.rank, case, buffer)
        if spare_bytes < 0:
            fewer = replace(case, max_tokens=case.max_tokens - 1)
            check_case(context.rank, replace(fewer, tokens=(3, 3)), buffer)
    return message


@pytest.mark.parametrize(
    "case",
    [
        replace(GOOD, tokens=(MAX_TOKENS, MAX_TOKENS), routing="one rank"),
        replace(GOOD, tokens=(MAX_TOKENS, 0), hidden=512, travel="fp8", use_logfmt=True),
    ],
)
def test_the_hint_suffices_and_less_does_not(case: Case) -> None:
    assert get_world(2).run(use_all_room, case, 0) == ["nothing was raised"] * 2
    hint = Buffer.get_low_latency_rdma_size_hint(case.max_tokens, case.hidden, 2, case.num_experts)
    for message in get_world(2).run(use_all_room, case, -128):
        assert message == (
            f"InvalidCall: num_rdma_bytes is {hint - 128}, too small: 8 tokens per rank, hidden {case.hidden}"
            f" and 4 experts need {hint} bytes; Buffer.get_low_latency_rdma_size_hint tells it"
        )


def use_no_room(context: RankContext) -> str:
    with new_buffer(context, 0) as buffer:
        return outcome(buffer.low_latency_dispatch, **good_dispatch())


def test_a_buffer_without_rdma_bytes() -> None:
    for message in get_world(2).run(use_no_room):
        assert message.startswith(
            "InvalidCall: num_rdma_bytes is 0, too small: 8 tokens per rank, hidden 128"
        )


# Zero copy


def come_between(context: RankContext, what: str) -> tuple[str, bool]:
    """Rank 0 asks where to put its rows, makes another call, and only then the combine."""
    buffer = ready_buffer(context)
    arguments = good_combine(good_handle(buffer))
    zero_copy = dict(arguments)
    if context.rank == 0:
        buffer.get_next_low_latency_combine_buffer(arguments["handle"]).fill_(1)
        zero_copy["zero_copy"] = True
    if what == "dispatch":
        good_handle(buffer)
    elif what == "clean":
        buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS)
    else:
        outcome(buffer.low_latency_combine, **arguments | {"x": None})
    message = outcome(buffer.low_latency_combine, **zero_copy)
    # Asked again, it works, and the other rank need not do it in the same way.
    if context.rank == 0:
        buffer.get_next_low_latency_combine_buffer(arguments["handle"]).fill_(1)
    combined, _, _ = buffer.low_latency_combine(**zero_copy)
    check_case(context.rank, replace(GOOD, zero_copy=True), buffer)
    return message, is_right(combined)


@pytest.mark.parametrize("what", ["dispatch", "clean", "a refused call"])
def test_a_call_between_the_buffer_and_its_combine(what: str) -> None:
    (wrong, right_on_0), (heard_there, right_on_1) = get_world(2).run(come_between, what)
    sentence = WRONG_COMBINES["zero_copy without its buffer"][1]
    assert wrong == f"InvalidCall: {sentence}"
    assert heard("low-latency combine", sentence).fullmatch(heard_there)
    assert right_on_0
    assert right_on_1


def use_a_buffer_twice(context: RankContext) -> str:
    """What the buffer was for is over after one combine."""
    buffer = ready_buffer(context)
    arguments = good_combine(good_handle(buffer))
    buffer.get_next_low_latency_combine_buffer(arguments["handle"]).fill_(1)
    combined, _, _ = buffer.low_latency_combine(**arguments, zero_copy=True)
    assert is_right(combined)
    message = outcome(buffer.low_latency_combine, **arguments, zero_copy=True)
    check_case(context.rank, GOOD, buffer)
    return message


def test_a_combine_buffer_that_is_used_twice() -> None:
    sentence = WRONG_COMBINES["zero_copy without its buffer"][1]
    assert get_world(2).run(use_a_buffer_twice) == [f"InvalidCall: {sentence}"] * 2


def ask_wrongly_for_the_buffer(context: RankContext) -> list[str]:
    """No peer takes part in this, so none hears of it."""
    buffer = ready_buffer(context)
    handle = good_handle(buffer)
    messages = []
    if context.rank == 0:
        overlapping = with_entry(1, (0, 1), 2 << 32 | 3)({"handle": handle})["handle"]
        wrong_handles = (None, handle[:4], (*handle[:3], 256, EXPERTS), overlapping)
        messages = [outcome(buffer.get_next_low_latency_combine_buffer, wrong) for wrong in wrong_handles]
    check_case(context.rank, replace(GOOD, zero_copy=True), buffer)
    return messages


def test_wrong_questions_for_the_combine_buffer() -> None:
    messages, nothing = get_world(2).run(ask_wrongly_for_the_buffer)
    assert nothing == []
    assert messages[0] == f"InvalidCall: {NOT_A_HANDLE}"
    assert messages[1] == f"InvalidCall: {NOT_A_HANDLE}"
    assert messages[2].startswith("InvalidCall: this call is for 8 tokens per rank at most, hidden 256")
    assert messages[3] == f"InvalidCall: {NOT_FOLLOWING}"


# Hooks


def combine_before_the_hook(context: RankContext) -> tuple[list[str], bool]:
    buffer = ready_buffer(context)
    _, _, handle, _, hook = buffer.low_latency_dispatch(**good_dispatch(), return_recv_hook=True)
    assert hook is not None
    messages = []
    if context.rank == 0:
        messages.append(outcome(buffer.get_next_low_latency_combine_buffer, handle))
    else:
        hook()
    messages.append(outcome(buffer.low_latency_combine, **good_combine(handle)))
    hook()
    combined, _, _ = buffer.low_latency_combine(**good_combine(handle))
    check_case(context.rank, GOOD, buffer)
    return messages, is_right(combined)


def test_the_handle_of_a_dispatch_that_is_not_received() -> None:
    (wrong, right_on_0), ((heard_there,), right_on_1) = get_world(2).run(combine_before_the_hook)
    sentence = "the handle's dispatch is not yet received: call its hook first"
    assert wrong == [f"InvalidCall: {sentence}"] * 2
    assert heard("low-latency combine", sentence).fullmatch(heard_there)
    assert right_on_0
    assert right_on_1


def send_a_third_call(context: RankContext, what: str) -> tuple[str, int, bool]:
    """Two calls are in flight; the third is refused, and made again when the first has been received."""
    buffer = ready_buffer(context)
    handle = good_handle(buffer)

    def last_call() -> int:
        return buffer.status()[context.rank].call

    def third() -> Any:
        if what == "dispatch":
            *_, hook = buffer.low_latency_dispatch(**good_dispatch(), return_recv_hook=True)
        elif what == "combine":
            *_, hook = buffer.low_latency_combine(**good_combine(handle), return_recv_hook=True)
        elif what == "async":
            buffer.low_latency_dispatch(**good_dispatch(), async_finish=True)[3].current_stream_wait()
            hook = None
        elif what == "wrong":
            *_, hook = buffer.low_latency_dispatch(**good_dispatch() | {"x": None})
        else:
            buffer.get_next_low_latency_combine_buffer(handle).fill_(1)
            *_, hook = buffer.low_latency_combine(**good_combine(handle), zero_copy=True)
        return hook

    *_, hook_1 = buffer.low_latency_dispatch(**good_dispatch(), return_recv_hook=True)
    combined, _, hook_2 = buffer.low_latency_combine(**good_combine(handle), return_recv_hook=True)
    assert hook_1 is not None
    assert hook_2 is not None
    before = last_call()
    message = outcome(third)
    # Nothing was sent, and no number taken: the same call later has the next one.
    assert last_call() == before
    hook_1()
    if what == "wrong":
        assert outcome(third).startswith("InvalidCall: x is of type NoneType")
    else:
        hook_3 = third()
        if hook_3 is not None:
            hook_3()
    assert last_call() == before + 1
    hook_2()
    check_case(context.rank, replace(GOOD, how="hook"), buffer)
    return message, before, is_right(combined)


@pytest.mark.parametrize("what", ["dispatch", "combine", "async", "wrong", "zero copy"])
def test_a_third_call_in_flight(what: str) -> None:
    for message, before, second_is_right in get_world(2).run(send_a_third_call, what):
        assert message == (
            f"InvalidCall: low-latency dispatch (call {before - 1}) was sent and is not yet received, and its"
            f" slots are needed: call its hook. At most 2 low-latency calls may be in flight"
        )
        assert second_is_right


# Buffers that cannot


def call_everything(buffer: Buffer) -> dict[str, str]:
    handle = empty_handle()
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: buffer.low_latency_dispatch(**good_dispatch()),
        "combine": lambda: buffer.low_latency_combine(**good_combine(handle)),
        "combine buffer": lambda: buffer.get_next_low_latency_combine_buffer(handle),
        "clean": lambda: buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS),
    }
    return {name: outcome(call) for name, call in calls.items()} | call_masks(buffer)


def call_masks(buffer: Buffer) -> dict[str, str]:
    status = torch.zeros(2).int()
    calls: dict[str, Callable[[], Any]] = {
        "mask": lambda: buffer.low_latency_update_mask_buffer(1, mask=True),
        "unmask": lambda: buffer.low_latency_update_mask_buffer(1),
        "query": lambda: buffer.low_latency_query_mask_buffer(status),
        "clean masks": buffer.low_latency_clean_mask_buffer,
    }
    return {name: outcome(call) for name, call in calls.items()}


def use_a_normal_buffer(context: RankContext) -> dict[str, str]:
    buffer = cases.buffer_for(context, None)
    messages = call_everything(buffer)
    cases.check_case(context, cases.Case(tokens=(3, 3)), buffer)
    return messages


def test_a_buffer_without_low_latency_mode() -> None:
    for messages in get_world(2).run(use_a_normal_buffer):
        assert len(messages) == 8
        for message in messages.values():
            assert message == (
                "InvalidCall: this Buffer has no low-latency mode: make it with low_latency_mode=True"
            )


def use_masks_that_are_not_there(context: RankContext) -> dict[str, str]:
    buffer = ready_buffer(context)
    messages = call_masks(buffer)
    check_case(context.rank, GOOD, buffer)
    return messages


def test_a_buffer_without_masks() -> None:
    for messages in get_world(2).run(use_masks_that_are_not_there):
        assert len(messages) == 4
        for message in messages.values():
            assert message == "InvalidCall: this Buffer has no masks: make it with enable_shrink=True"


def use_masks_wrongly(context: RankContext) -> list[str]:
    buffer = buffer_for(context, enable_shrink=True)
    buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS)
    update, query = buffer.low_latency_update_mask_buffer, buffer.low_latency_query_mask_buffer
    statuses = ([0, 0], torch.zeros(2).long(), torch.zeros(3).int(), torch.zeros(2).int().to("meta"))
    messages = [outcome(update, rank, mask) for rank in (2, -1, "one") for mask in (False, True)]
    messages += [outcome(query, status) for status in statuses]
    right = torch.full((2,), 7).int()
    buffer.low_latency_query_mask_buffer(right)
    assert right.tolist() == [0, 0]
    check_case(context.rank, GOOD, buffer)
    return messages


def test_wrong_masks() -> None:
    expected = [
        "rank_to_mask is 2: there are 2 ranks, counted from 0",
        "rank_to_mask is -1: it must be at least 0",
        "rank_to_mask is 'one': it must be a whole number",
    ]
    for messages in get_world(2).run(use_masks_wrongly):
        assert messages[:6] == [f"InvalidCall: {sentence}" for sentence in expected for _ in range(2)]
        assert messages[6] == "InvalidCall: mask_status is of type list: it must be a tensor"
        assert messages[7] == "InvalidCall: mask_status is int64: it must be int32"
        assert messages[8] == "InvalidCall: mask_status has shape [3]: it must be [2]"
        assert messages[9].startswith(f"InvalidCall: mask_status {ON_META}")


def unmask_in_flight(context: RankContext) -> list[str]:
    buffer = buffer_for(context, enable_shrink=True)
    buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS)
    *_, hook = buffer.low_latency_dispatch(**good_dispatch(), return_recv_hook=True)
    messages = [
        outcome(buffer.low_latency_update_mask_buffer, 1),
        outcome(buffer.low_latency_clean_mask_buffer),
    ]
    assert hook is not None
    hook()
    buffer.low_latency_update_mask_buffer(1)
    check_case(context.rank, GOOD, buffer)
    return messages


def test_a_rank_is_not_taken_back_while_a_call_is_in_flight() -> None:
    for messages in get_world(2).run(unmask_in_flight):
        for message in messages:
            assert re.fullmatch(
                "InvalidCall: low-latency dispatch \\(call \\d+\\) was sent and is not yet received:"
                " call its hook first",
                message,
            )


def refuse_without_rank_2(context: RankContext) -> list[str]:
    """Rank 2 is masked: it is told so, whatever it calls, and the others do not hear of it."""
    case = good_case(context)
    with new_buffer(context, enable_shrink=True) as buffer:
        check_case(context.rank, case, buffer)
        dist.barrier(context.group)
        if context.rank == 0:
            buffer.low_latency_update_mask_buffer(2, mask=True)
        dist.barrier(context.group)
        arguments = good_dispatch(context.num_ranks)
        wrong = arguments | ({"x": None} if context.rank != 1 else {})
        messages = [outcome(buffer.low_latency_dispatch, **wrong) for _ in range(3)]
        if context.rank != 2:
            arguments["use_fp8"] = context.rank == 1
            messages.append(outcome(buffer.low_latency_dispatch, **arguments))
            check_case(context.rank, case, buffer, absent=frozenset({2}))
        dist.barrier(context.group)
        buffer.low_latency_clean_mask_buffer()
        check_case(context.rank, case, buffer)
        dist.barrier(context.group)
    return messages


def test_refusals_while_a_rank_is_masked() -> None:
    (*wrong, last), (*right, last_there), masked = get_world(3).run(refuse_without_rank_2)
    reason = "x is of type NoneType: it must be a tensor"
    assert wrong == [f"InvalidCall: {reason}"] * 3
    for message in right:
        assert heard("low-latency dispatch", reason).fullmatch(message)
    assert last == last_there
    assert last.endswith(f"about {FORMATS}: bf16 on rank 0; fp8 on rank 1")
    assert len(masked) == 3
    for message in masked:
        assert message.startswith("Masked: the other ranks go on without rank 2: ")


def use_after_destroy(context: RankContext) -> tuple[dict[str, str], str]:
    buffer = new_buffer(context, enable_shrink=True)
    *_, hook = buffer.low_latency_dispatch(**good_dispatch(), return_recv_hook=True)
    assert hook is not None
    buffer.destroy()
    buffer.destroy()
    return call_everything(buffer), outcome(hook)


def test_use_after_destroy() -> None:
    for messages, of_hook in get_world(2).run(use_after_destroy):
        assert len(messages) == 8
        for message in messages.values():
            assert message == "BufferBroken: this Buffer was destroyed: make a new one"
        assert of_hook == "BufferBroken: this Buffer is broken since an earlier call: it was destroyed"
