"""Wrong low-latency calls: the exception, its sentence, what the other ranks hear; the Buffer works
afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from anyep import AnyEPError
from anyep.api.buffer import Buffer
from tests.support import cases
from tests.support.low_latency_cases import (
    NVL_BYTES,
    RDMA_BYTES,
    Case,
    buffer_for,
    check_case,
    finish,
    in_process_of,
)
from tests.support.places import Place
from tests.support.world import RankContext, get_world

TOKENS, MAX_TOKENS, HIDDEN, EXPERTS, TOPK = 6, 8, 128, 4, 2
LOCAL_EXPERTS = EXPERTS // 2
GOOD = Case(tokens=(TOKENS, TOKENS), max_tokens=MAX_TOKENS, hidden=HIDDEN, num_topk=TOPK, local_experts=2)
DISPATCH, COMBINE, CLEAN = "low-latency dispatch", "low-latency combine", "clean_low_latency_buffer"
SIMULATED = Place("simulated", 2)
NOTHING: Final = "nothing was raised"
Arguments = dict[str, Any]
HOWS: dict[str, Arguments] = {
    "in line": {},
    "async": {"async_finish": True},
    "hook": {"return_recv_hook": True},
}


# Right calls


def ready_buffer(context: RankContext, hidden: int = HIDDEN, enable_shrink: bool = False) -> Buffer:
    """The Buffer that the cases share, laid out for these ones."""
    buffer = buffer_for(context, enable_shrink)
    buffer.clean_low_latency_buffer(MAX_TOKENS, hidden, 2 * context.num_ranks)
    return buffer


def new_buffer(context: RankContext, num_rdma_bytes: int = 1 << 23, **options: Any) -> Buffer:
    return Buffer(context.group, NVL_BYTES, num_rdma_bytes, low_latency_mode=True, device="cpu", **options)


def good_case(context: RankContext, hidden: int = HIDDEN) -> Case:
    return replace(GOOD, tokens=(TOKENS,) * context.num_ranks, hidden=hidden)


def rows_of(num_tokens: int = TOKENS, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.zeros(num_tokens, hidden, dtype=torch.bfloat16)


def good_dispatch(num_ranks: int = 2, **changes: Any) -> Arguments:
    """Neighbouring experts for each token: every token goes to one rank, which has 2 experts."""
    return {
        "x": rows_of(),
        "topk_idx": torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % (2 * num_ranks),
        "num_max_dispatch_tokens_per_rank": MAX_TOKENS,
        "num_experts": 2 * num_ranks,
        "use_fp8": False,
        **changes,
    }


def good_combine(handle: Any, **changes: Any) -> Arguments:
    """Every row is 1 and every weight is 1: all sums are 2."""
    src_info, _, _, hidden, _ = handle
    return {
        "x": torch.ones(*src_info.shape, hidden, dtype=torch.bfloat16),
        "topk_idx": good_dispatch(src_info.shape[1] // MAX_TOKENS)["topk_idx"],
        "topk_weights": torch.ones(TOKENS, TOPK),
        "handle": handle,
        **changes,
    }


def good_handle(buffer: Buffer, **changes: Any) -> Any:
    return buffer.low_latency_dispatch(**good_dispatch(buffer.group_size, **changes))[2]


def dispatch_by_hook(buffer: Buffer) -> Any:
    return buffer.low_latency_dispatch(**good_dispatch(), return_recv_hook=True)


def empty_handle(num_ranks: int = 2) -> Any:
    """A handle of a dispatch that brought nothing: it is judged by its contents."""
    ranges = torch.zeros(LOCAL_EXPERTS, num_ranks).long()
    src_info = torch.zeros(LOCAL_EXPERTS, num_ranks * MAX_TOKENS).int()
    return src_info, ranges, MAX_TOKENS, HIDDEN, LOCAL_EXPERTS * num_ranks


def check_sums(combined: torch.Tensor) -> None:
    assert combined.tolist() == [[2.0] * combined.shape[1]] * TOKENS


# What is raised


def outcome(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    try:
        call(*arguments, **named)
    except AnyEPError as error:
        return f"{type(error).__name__}: {error}"
    return NOTHING


def expect(message: str, pattern: str) -> None:
    """On a rank, where pytest does not explain what is wrong with an assertion."""
    assert re.fullmatch(pattern, message, re.DOTALL), f"{message!r} does not match {pattern!r}"


def invalid(sentence: str, beginning: bool = False) -> str:
    return re.escape(f"InvalidCall: {sentence}") + (".*" if beginning else "")


def refusal(function: str, reason: str, own_function: str = "", refuser: int = 0, rank: int = 1) -> str:
    """What a rank hears of the refusal of another one; the reason is a pattern."""
    return (
        f"rank {refuser} refused its {re.escape(function)} \\(call \\d+\\), so rank {rank}"
        f" cannot go on with its {re.escape(own_function or function)}: {reason}"
    )


def check_refusal(
    context: RankContext,
    function: str,
    sentence: str,
    call: Callable[..., Any],
    *arguments: Any,
    **named: Any,
) -> None:
    """Rank 0 refuses its call; rank 1 hears of it."""
    message = outcome(call, *arguments, **named)
    heard = "Disagreement: " + refusal(function, re.escape(sentence))
    expect(message, heard if context.rank else invalid(sentence))


# One wrong call of rank 0, as data: what is changed (functions change what is there), and what is said of it.

MAX = "num_max_dispatch_tokens_per_rank"
STATS = "cumulative_local_expert_recv_stats"
WAIT_STATS, COMBINE_STATS = "dispatch_wait_recv_cost_stats", "combine_wait_recv_cost_stats"
ON_META = "is on meta, where tensors have no data: AnyEP works on CPU and CUDA tensors; materialise it first"
OPTIONAL: Arguments = {
    STATS: torch.zeros(LOCAL_EXPERTS).int(),
    WAIT_STATS: torch.zeros(2).long(),
    COMBINE_STATS: torch.zeros(2).long(),
    "out": rows_of(),
}
Change = tuple[str, Arguments, str]


def sizes(*numbers: int) -> str:
    return "{} tokens per rank at most, hidden {}, {} experts".format(*numbers)


def not_laid_out(*numbers: int) -> str:
    return (
        f"this call is for {sizes(*numbers)}, but the slots are for {sizes(MAX_TOKENS, HIDDEN, EXPERTS)}:"
        f" call clean_low_latency_buffer on every rank before the sizes change"
    )


def part(index: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Another handle, of which one part is changed."""
    return lambda handle: (*handle[:index], change(handle[index]), *handle[index + 1 :])


def entry(index: int, place: tuple[int, int], value: int) -> Callable[[Any], Any]:
    """Another handle, of which one entry is changed. On rank 0 every expert has the tokens 0, 2 and 4 of both
    ranks: a row of ranges is [3, 3 << 32 | 3].
    """

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        assert int(tensor[place]) != value
        tensor[place] = value
        return tensor

    return part(index, change)


def first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[0]


def longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:1]])


def shorter(tensor: torch.Tensor, dimension: int = 0) -> torch.Tensor:
    return tensor.narrow(dimension, 0, tensor.shape[dimension] - 1)


def wrong_tensors(
    function: str,
    name: str,
    good: torch.Tensor,
    other: str,
    shape: str,
    strides: str = "",
) -> list[Change]:
    """What may be wrong with any tensor: it is none, has another dtype, no data, another shape, or gaps.

    `shape` is as sentences show it: the numbers in it are sizes that must be met.
    """
    right = str(good.dtype).removeprefix("torch.")

    def change(how: Callable[[Any], Any]) -> Arguments:
        return {"handle": part(int(name[7]), how)} if name.startswith("handle[") else {name: how}

    rows = [
        (change(torch.Tensor.tolist), "is of type list: it must be a tensor"),
        (change(lambda tensor: tensor.to(getattr(torch, other))), f"is {other}: it must be {right}"),
        (change(lambda tensor: tensor.to("meta")), ON_META),
    ]
    fixed = [size.isdigit() for size in shape.strip("[]").split(", ")]
    reshapes: list[Callable[[Any], Any]] = [first, *([longer] if fixed[0] else [])]
    reshapes += (partial(shorter, dimension=dimension) for dimension in range(good.ndim) if fixed[dimension])
    rows += (
        (change(reshape), f"has shape {list(reshape(good).shape)}: it must be {shape}")
        for reshape in reshapes
    )
    if strides:
        gaps = change(lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2])
        rows.append((gaps, f"is not contiguous: {strides}"))
    return [(function, arguments, f"{name} {sentence}") for arguments, sentence in rows]


NOT_A_HANDLE = (
    "handle is not that of a low-latency dispatch: it must be (src_info, layout_range,"
    " num_max_dispatch_tokens_per_rank, hidden, num_experts)"
)
IMPOSSIBLE = "the handle's contents do not fit together:"
NOT_FOLLOWING = f"{IMPOSSIBLE} its ranges do not follow each other"
TOO_MANY_ROWS = f"{IMPOSSIBLE} it has more rows of a rank than {MAX}"
WRONG_TOKENS = f"{IMPOSSIBLE} its source indices are not in order, or not below {MAX}"
NOT_ASKED = (
    "zero_copy needs get_next_low_latency_combine_buffer before this call: the buffer it gave is for the"
    " very next low-latency call, and none may lie between"
)
NOT_BOTH = "async_finish and return_recv_hook do not go together: choose one"
BOTH_WAYS = {"async_finish": True, "return_recv_hook": True}
ADDED = "it is added to in place, pass a contiguous tensor"
COPY = "pass x.contiguous()"
DO_NOT_DIVIDE = "experts do not divide over 2 ranks: every rank holds the same number of experts"
TOO_SMALL = f"num_rdma_bytes is {RDMA_BYTES}, too small:"
NINE = torch.zeros(9, TOPK).long()
ids, handle_of_none = good_dispatch()["topk_idx"], empty_handle()
WRONG: list[Change] = [
    # Sizes
    (DISPATCH, {"x": rows_of(9), "topk_idx": NINE}, f"x has 9 tokens, but {MAX} is 8"),
    (DISPATCH, {MAX: 16}, not_laid_out(16, 128, 4)),
    (DISPATCH, {MAX: 7}, not_laid_out(7, 128, 4)),
    (DISPATCH, {"x": rows_of(hidden=256)}, not_laid_out(8, 256, 4)),
    (DISPATCH, {"num_experts": 8}, not_laid_out(8, 128, 8)),
    (
        DISPATCH,
        {MAX: 1 << 40},
        f"{TOO_SMALL} 1099511627776 tokens per rank, hidden 128 and 4 experts need 4785074604081280 bytes;"
        f" Buffer.get_low_latency_rdma_size_hint tells it",
    ),
    (DISPATCH, {MAX: 0}, f"{MAX} is 0: it must be at least 1"),
    (DISPATCH, {MAX: "8"}, f"{MAX} is '8': it must be a whole number"),
    (DISPATCH, {"num_experts": 5}, f"5 {DO_NOT_DIVIDE}"),
    (DISPATCH, {"num_experts": 0}, "num_experts is 0: it must be at least 1"),
    (DISPATCH, {"num_experts": 4096}, "2048 experts per rank: at most 1024 are possible, use more ranks"),
    (CLEAN, {MAX: 0}, f"{MAX} is 0: it must be at least 1"),
    (CLEAN, {"hidden": 128.5}, "hidden is 128.5: it must be a whole number"),
    (CLEAN, {"hidden": 4}, "a row of 8 bytes is no multiple of 16 bytes"),
    (CLEAN, {"num_experts": 3}, f"3 {DO_NOT_DIVIDE}"),
    (CLEAN, {MAX: 1 << 20}, f"{TOO_SMALL} 1048576 tokens per rank, hidden 128 and 4 experts need"),
    # Formats, and ways to go on
    (
        DISPATCH,
        {"x": rows_of(hidden=136), "use_fp8": True},
        "hidden is 136: with use_fp8 it must be a multiple of 128",
    ),
    (
        DISPATCH,
        {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
        "hidden is 128: with use_ue8m0 it must be a multiple of 512",
    ),
    (
        DISPATCH,
        {"use_fp8": True, "use_ue8m0": True},
        "use_ue8m0 needs round_scale=True: only powers of two have no mantissa",
    ),
    (DISPATCH, BOTH_WAYS, NOT_BOTH),
    (COMBINE, BOTH_WAYS, NOT_BOTH),
    (
        COMBINE,
        {"zero_copy": True, "use_logfmt": True},
        "zero_copy and use_logfmt do not go together: what is encoded is copied; choose one",
    ),
    (COMBINE, {"zero_copy": True}, NOT_ASKED),
    # Tensors of a dispatch
    *wrong_tensors(DISPATCH, "x", rows_of(), "float16", "[tokens, hidden]", COPY),
    (DISPATCH, {"x": (rows_of(), rows_of())}, "x is of type tuple: it must be a tensor"),
    (DISPATCH, {"x": rows_of(hidden=0)}, "x has no columns: the hidden size must be at least 1"),
    (DISPATCH, {"x": rows_of(hidden=4)}, "a row of 8 bytes is no multiple of 16 bytes: choose a hidden size"),
    *wrong_tensors(DISPATCH, "topk_idx", ids, "int32", "[6, top-k]"),
    (DISPATCH, {"topk_idx": None}, "topk_idx is of type NoneType: it must be a tensor"),
    (DISPATCH, {"topk_idx": ids[:, :0]}, "topk_idx has 0 experts per token: it must be 1 to 128"),
    (
        DISPATCH,
        {"topk_idx": torch.zeros(TOKENS, 129).long()},
        "topk_idx has 129 experts per token: it must be 1 to 128",
    ),
    *wrong_tensors(DISPATCH, STATS, OPTIONAL[STATS], "int64", "[2]", ADDED),
    *wrong_tensors(DISPATCH, WAIT_STATS, OPTIONAL[WAIT_STATS], "float32", "[2]", ADDED),
    # Tensors of a combine
    *wrong_tensors(COMBINE, "x", torch.ones(2, 16, HIDDEN).bfloat16(), "float32", "[2, 16, 128]", COPY),
    (COMBINE, {"x": None}, "x is of type NoneType: it must be a tensor"),
    *wrong_tensors(COMBINE, "topk_idx", ids, "int32", "[tokens, top-k]"),
    (
        COMBINE,
        {"topk_idx": NINE, "topk_weights": torch.ones(9, TOPK)},
        f"topk_idx has 9 tokens, but {MAX} is 8",
    ),
    *wrong_tensors(COMBINE, "topk_weights", torch.ones(TOKENS, TOPK), "bfloat16", "[6, 2]"),
    (COMBINE, {"topk_weights": None}, "topk_weights is of type NoneType: it must be a tensor"),
    (COMBINE, {"topk_weights": torch.ones(6, 3)}, "topk_weights has shape [6, 3]: it must be [6, 2]"),
    *wrong_tensors(
        COMBINE, "out", rows_of(), "float32", "[6, 128]", "it is written in place, pass a contiguous tensor"
    ),
    *wrong_tensors(COMBINE, COMBINE_STATS, OPTIONAL[COMBINE_STATS], "int32", "[2]", ADDED),
    # Handles
    *wrong_tensors(COMBINE, "handle[0]", handle_of_none[0], "int64", "[2, 16]"),
    *wrong_tensors(COMBINE, "handle[1]", handle_of_none[1], "int32", "[2, 2]"),
    (COMBINE, {"handle": None}, NOT_A_HANDLE),
    (COMBINE, {"handle": 5}, NOT_A_HANDLE),
    (COMBINE, {"handle": lambda handle: handle[0]}, NOT_A_HANDLE),
    (COMBINE, {"handle": lambda handle: handle[:4]}, NOT_A_HANDLE),
    (COMBINE, {"handle": lambda handle: (handle[0],) * 6}, NOT_A_HANDLE),
    (COMBINE, {"handle": part(2, lambda _: 16)}, not_laid_out(16, 128, 4)),
    (COMBINE, {"handle": part(3, lambda _: 256)}, not_laid_out(8, 256, 4)),
    (COMBINE, {"handle": part(4, lambda _: 8)}, not_laid_out(8, 128, 8)),
    (COMBINE, {"handle": part(2, lambda _: None)}, f"{MAX} is None: it must be a whole number"),
    (COMBINE, {"handle": part(3, lambda _: 100)}, "a row of 200 bytes is no multiple of 16"),
    (COMBINE, {"handle": part(4, lambda _: 3)}, f"3 {DO_NOT_DIVIDE}"),
    (COMBINE, {"handle": entry(1, (0, 1), 2 << 32 | 3)}, NOT_FOLLOWING),
    (COMBINE, {"handle": entry(1, (1, 1), 4 << 32 | 3)}, NOT_FOLLOWING),
    (COMBINE, {"handle": entry(1, (1, 0), 1 << 32 | 3)}, NOT_FOLLOWING),
    (COMBINE, {"handle": entry(1, (0, 0), (-1 << 32) | 3)}, NOT_FOLLOWING),
    (COMBINE, {"handle": entry(1, (0, 0), MAX_TOKENS + 1)}, TOO_MANY_ROWS),
    (COMBINE, {"handle": entry(1, (1, 1), 3 << 32 | 0xFFFFFFFF)}, TOO_MANY_ROWS),
    (COMBINE, {"handle": entry(0, (0, 2), MAX_TOKENS)}, WRONG_TOKENS),
    (COMBINE, {"handle": entry(0, (1, 0), -1)}, WRONG_TOKENS),
    (COMBINE, {"handle": entry(0, (1, 1), 0)}, WRONG_TOKENS),
    (COMBINE, {"handle": entry(0, (0, 3), 3)}, WRONG_TOKENS),
]


def call_wrongly_on_rank_0(context: RankContext, index: int) -> str:
    """Rank 0 calls with something wrong, rank 1 rightly; then both make right calls."""
    function, changes, _ = WRONG[index]
    buffer = ready_buffer(context)
    if function == DISPATCH:
        call, arguments = buffer.low_latency_dispatch, good_dispatch()
    elif function == COMBINE:
        call, arguments = buffer.low_latency_combine, good_combine(good_handle(buffer))
    else:
        call = buffer.clean_low_latency_buffer
        arguments = {MAX: MAX_TOKENS, "hidden": HIDDEN, "num_experts": EXPERTS}
    if context.rank == 0:
        for name, change in changes.items():
            there = arguments.get(name, OPTIONAL.get(name))
            arguments[name] = change(there) if callable(change) else change
    message = outcome(call, **arguments)
    check_case(context.rank, GOOD, buffer)
    return message


@pytest.mark.parametrize(
    "index",
    range(len(WRONG)),
    ids=[f"{function.split('_')[0].split()[-1]}: {text[:50]}" for function, _, text in WRONG],
)
@in_process_of(Place("cpu", 2))
def test_wrong_call(index: int) -> None:
    function, _, sentence = WRONG[index]
    wrong, right = get_world(2).run(call_wrongly_on_rank_0, index)
    assert wrong.startswith(f"InvalidCall: {sentence}")
    expect(right, "Disagreement: " + refusal(function, re.escape(wrong.removeprefix("InvalidCall: "))))


# Other wrong calls of rank 0, and how rank 1 hears of them


def combine_with_a_normal_handle(context: RankContext) -> None:
    buffer = ready_buffer(context)
    arguments = good_combine(good_handle(buffer))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    handle = buffer.dispatch(rows_of(), None, per_rank, None, in_rank, per_expert)[4]
    assert handle is not None
    assert len(handle) == 6
    if context.rank == 0:
        arguments["handle"] = handle
    check_refusal(context, COMBINE, NOT_A_HANDLE, buffer.low_latency_combine, **arguments)
    check_case(context.rank, GOOD, buffer)
    cases.check_case(context, cases.Case(tokens=(3, 3)), buffer)


def use_logfmt_where_there_is_none(context: RankContext, hidden: int) -> None:
    buffer = ready_buffer(context, hidden)
    arguments = good_combine(good_handle(buffer, x=rows_of(hidden=hidden)), use_logfmt=context.rank == 0)
    sentence = f"hidden is {hidden}: with use_logfmt it must be a multiple of 128 and at most 16384"
    check_refusal(context, COMBINE, sentence, buffer.low_latency_combine, **arguments)
    check_case(context.rank, good_case(context, hidden), buffer)


def hear_where_one_waits(context: RankContext, how: str) -> None:
    """Rank 0 refuses a dispatch and a combine; rank 1 hears of it where it waits, and nothing is written."""
    buffer = ready_buffer(context)
    handle = good_handle(buffer)
    chosen = HOWS[how] if context.rank else BOTH_WAYS
    stats, out = torch.full((LOCAL_EXPERTS,), 3).int(), torch.full((TOKENS, HIDDEN), 3.0).bfloat16()
    calls: list[tuple[str, Callable[..., Any], Arguments]] = [
        (DISPATCH, buffer.low_latency_dispatch, good_dispatch(**{STATS: stats})),
        (COMBINE, buffer.low_latency_combine, good_combine(handle, out=out)),
    ]
    for name, function, arguments in calls:
        sent: list[Any] = []

        def call(function: Any = function, arguments: Arguments = arguments, sent: list[Any] = sent) -> None:
            sent.extend(function(**arguments, **chosen)[-2:])
            finish(*sent)

        check_refusal(context, name, NOT_BOTH, call)
        assert bool(sent) == (context.rank == 1 and how != "in line")
        if sent and sent[1] is not None:
            sent[1]()  # a second time it does nothing
    assert stats.tolist() == [3] * LOCAL_EXPERTS
    assert (out == 3).all()
    check_case(context.rank, replace(GOOD, how=how), buffer)


def never_wait(context: RankContext) -> None:
    """Rank 1 sends a call that rank 0 refuses, and never looks at its event: its next call raises."""
    buffer = ready_buffer(context)
    sentence = f"5 {DO_NOT_DIVIDE}; choose a multiple of 2, such as 6"
    unheard = refusal(DISPATCH, re.escape(sentence))
    if context.rank == 0:
        expect(outcome(good_handle, buffer, num_experts=5), invalid(sentence))
        expect(outcome(good_handle, buffer), "Disagreement: " + refusal(DISPATCH, unheard, "", 1, 0))
    else:
        expect(outcome(good_handle, buffer, async_finish=True), NOTHING)
        expect(outcome(good_handle, buffer), "Disagreement: " + unheard)
    check_case(context.rank, GOOD, buffer)


def refuse_in_a_row(context: RankContext) -> None:
    """Rank 0 refuses one call after the other, each for its own reason, while rank 1 may be far behind."""
    buffer = ready_buffer(context)
    for number in range(9, 18):
        arguments = good_dispatch()
        if context.rank == 0:
            arguments |= {"x": rows_of(number), "topk_idx": torch.zeros(number, TOPK).long()}
        sentence = f"x has {number} tokens, but {MAX} is 8"
        check_refusal(context, DISPATCH, sentence, buffer.low_latency_dispatch, **arguments)
    check_case(context.rank, GOOD, buffer)


def refuse_on_two_ranks(context: RankContext) -> None:
    """Ranks 1 and 2 refuse, each its own function."""
    buffer = ready_buffer(context)
    handle = good_handle(buffer)
    calls: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: buffer.low_latency_dispatch(**good_dispatch(3)),
            "Disagreement: " + refusal(COMBINE, re.escape(NOT_A_HANDLE), DISPATCH, 1, 0),
        ),
        (
            lambda: buffer.low_latency_combine(**good_combine(handle) | {"handle": None}),
            invalid(NOT_A_HANDLE),
        ),
        (
            lambda: buffer.clean_low_latency_buffer(0, HIDDEN, 6),
            invalid(f"{MAX} is 0: it must be at least 1"),
        ),
    ]
    call, pattern = calls[context.rank]
    expect(outcome(call), pattern)
    check_case(context.rank, good_case(context), buffer)


def ask_for_a_row_that_is_not_there(context: RankContext, how: str) -> None:
    """Rank 0 asks for its token 1 at expert 0, which has only the even ones; rank 1 asks rightly."""
    buffer = ready_buffer(context)
    arguments = good_combine(good_handle(buffer))
    if context.rank == 0:
        arguments["topk_idx"] = arguments["topk_idx"].clone()
        arguments["topk_idx"][1, 1] = 0

    def combine() -> None:
        result, event, hook = buffer.low_latency_combine(**arguments, **HOWS[how])
        finish(event, hook)
        check_sums(result)

    sentence = (
        "topk_idx sends token 1 to expert 0, which has no row of it: pass the topk_idx of the dispatch that"
        " the handles come from"
    )
    expect(outcome(combine), NOTHING if context.rank else invalid(sentence))
    check_case(context.rank, replace(GOOD, how=how), buffer)


# Ranks that disagree

FORMATS = "how values travel (use_fp8, round_scale, use_ue8m0, use_logfmt)"
ROUNDED = {"use_fp8": True, "round_scale": True}
Call = tuple[str, Arguments]
CLEANING: Arguments = {MAX: MAX_TOKENS, "hidden": 512, "num_experts": 6}
DISAGREEMENTS: list[tuple[Call, Call, str]] = [
    ((DISPATCH, {}), (COMBINE, {}), f"the function called: {DISPATCH} on ranks 0, 1; {COMBINE} on rank 2"),
    ((COMBINE, {}), (CLEAN, CLEANING), f"the function called: {COMBINE} on ranks 0, 1; {CLEAN} on rank 2"),
    ((DISPATCH, {}), (DISPATCH, {"use_fp8": True}), f"{FORMATS}: bf16 on ranks 0, 1; fp8 on rank 2"),
    (
        (DISPATCH, {"use_fp8": True}),
        (DISPATCH, ROUNDED),
        f"{FORMATS}: fp8 on ranks 0, 1; fp8 rounded on rank 2",
    ),
    (
        (DISPATCH, ROUNDED),
        (DISPATCH, ROUNDED | {"use_ue8m0": True}),
        f"{FORMATS}: fp8 rounded on ranks 0, 1; fp8 ue8m0 on rank 2",
    ),
    ((COMBINE, {}), (COMBINE, {"use_logfmt": True}), f"{FORMATS}: bf16 on ranks 0, 1; logfmt on rank 2"),
    ((CLEAN, CLEANING), (CLEAN, CLEANING | {MAX: 9}), f"{MAX}: 8 on ranks 0, 1; 9 on rank 2"),
]


def disagree(context: RankContext) -> None:
    """Every rank calls rightly, but the last one otherwise than the others."""
    hidden = 512
    buffer = ready_buffer(context, hidden)
    dispatch = good_dispatch(context.num_ranks, x=rows_of(hidden=hidden))
    combine = good_combine(good_handle(buffer, x=dispatch["x"]))
    functions: dict[str, tuple[Callable[..., Any], Arguments]] = {
        DISPATCH: (buffer.low_latency_dispatch, dispatch),
        COMBINE: (buffer.low_latency_combine, combine),
        CLEAN: (buffer.clean_low_latency_buffer, {}),
    }
    for usual, other, sentence in DISAGREEMENTS:
        name, changes = other if context.rank == 2 else usual
        function, arguments = functions[name]
        message = outcome(function, **arguments | changes)
        expect(message, f"Disagreement: the ranks disagree in call \\d+ about {re.escape(sentence)}")
        check_case(context.rank, good_case(context, hidden), buffer)


OTHER_SIZES: list[tuple[Arguments, str, str]] = [
    ({MAX: 16}, "in line", f"{MAX}: 8 on ranks 0, 1; 16 on rank 2"),
    ({MAX: 16}, "hook", f"{MAX}: 8 on ranks 0, 1; 16 on rank 2"),
    ({"x": rows_of(hidden=256)}, "in line", "the hidden size: 128 on ranks 0, 1; 256 on rank 2"),
    ({"num_experts": 12}, "async", "the number of experts: 6 on ranks 0, 1; 12 on rank 2"),
    ({"use_fp8": True}, "in line", f"{FORMATS}: bf16 on ranks 0, 1; fp8 on rank 2"),
    ({}, "hook", f"the function called: {DISPATCH} on ranks 0, 1; {COMBINE} on rank 2"),
]


def disagree_at_first(context: RankContext, index: int) -> None:
    """In the very first call; then all ranks agree about yet other sizes."""
    other, how, sentence = OTHER_SIZES[index]
    with new_buffer(context) as buffer:
        function: Callable[..., Any] = buffer.low_latency_dispatch
        arguments = good_dispatch(context.num_ranks)
        if context.rank == 2 and not other:
            function, arguments = buffer.low_latency_combine, good_combine(empty_handle(context.num_ranks))
        elif context.rank == 2:
            arguments |= other
        message = outcome(lambda: finish(*function(**arguments, **HOWS[how])[-2:]))
        expect(message, re.escape(f"Disagreement: the ranks disagree in call 1 about {sentence}"))
        check_case(context.rank, replace(good_case(context, 256), max_tokens=12, local_experts=3), buffer)


def disagree_about_everything(context: RankContext) -> None:
    """One disagreement after the other; then the sizes of the first ranks are right, and stay."""
    with new_buffer(context) as buffer:
        for call, (other, _, sentence) in enumerate(OTHER_SIZES[:-1], 1):
            message = outcome(good_handle, buffer, **other if context.rank == 2 else {})
            expect(message, re.escape(f"Disagreement: the ranks disagree in call {call} about {sentence}"))
        check_case(context.rank, good_case(context), buffer)
        expect(
            outcome(good_handle, buffer, **{MAX: 16}), invalid(f"this call is for {sizes(16, 128, 6)}", True)
        )
        check_case(context.rank, good_case(context), buffer)


def refuse_at_first(context: RankContext) -> None:
    """Rank 0 refuses the very first call; the other one's sizes were never agreed about, and may change."""
    with new_buffer(context) as buffer:
        wrong = {"x": None} if context.rank == 0 else {}
        sentence = "x is of type NoneType: it must be a tensor"
        check_refusal(context, DISPATCH, sentence, good_handle, buffer, **wrong)
        check_case(context.rank, replace(GOOD, max_tokens=16), buffer)


def change_sizes_in_flight(context: RankContext) -> None:
    """A second size while the first call is not yet received."""
    with new_buffer(context) as buffer:
        *_, hook = dispatch_by_hook(buffer)
        expect(outcome(good_handle, buffer, **{MAX: 16}), invalid(not_laid_out(16, 128, 4)))
        cleaning = outcome(buffer.clean_low_latency_buffer, 16, HIDDEN, EXPERTS)
        expect(cleaning, invalid(f"{DISPATCH} (call 1) was sent and is not yet received", True))
        hook()
        buffer.clean_low_latency_buffer(16, HIDDEN, EXPERTS)
        check_case(context.rank, replace(GOOD, max_tokens=16), buffer)


# Room

FULL = [
    replace(GOOD, tokens=(MAX_TOKENS, MAX_TOKENS), routing="one rank"),
    replace(GOOD, tokens=(MAX_TOKENS, 0), hidden=512, travel="fp8", use_logfmt=True),
]


def use_all_room(context: RankContext, index: int) -> None:
    """The hint suffices, and less does not."""
    case = FULL[index]
    hint = Buffer.get_low_latency_rdma_size_hint(case.max_tokens, case.hidden, 2, case.num_experts)
    with new_buffer(context, hint) as buffer:
        check_case(context.rank, case, buffer)
    with new_buffer(context, hint - 128) as buffer:
        sentence = (
            f"num_rdma_bytes is {hint - 128}, too small: 8 tokens per rank, hidden {case.hidden} and 4"
            f" experts need {hint} bytes; Buffer.get_low_latency_rdma_size_hint tells it"
        )
        expect(outcome(check_case, context.rank, case, buffer), invalid(sentence))
        check_case(context.rank, replace(case, tokens=(3, 3), max_tokens=case.max_tokens - 1), buffer)


def use_no_room(context: RankContext) -> None:
    with new_buffer(context, 0) as buffer:
        sentence = "num_rdma_bytes is 0, too small: 8 tokens per rank, hidden 128"
        expect(outcome(good_handle, buffer), invalid(sentence, True))


# Zero copy


def come_between(context: RankContext, what: str) -> None:
    """Rank 0 asks where to put its rows, makes another call, and only then the combine."""
    buffer = ready_buffer(context)
    arguments = good_combine(good_handle(buffer))
    zero_copy = arguments | {"zero_copy": context.rank == 0}

    def ask() -> None:
        if context.rank == 0:
            buffer.get_next_low_latency_combine_buffer(arguments["handle"]).fill_(1)

    ask()
    if what == "dispatch":
        good_handle(buffer)
    elif what == "clean":
        buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS)
    else:
        outcome(buffer.low_latency_combine, **arguments | {"x": None})
    check_refusal(context, COMBINE, NOT_ASKED, buffer.low_latency_combine, **zero_copy)
    # Asked again, it works, and the other rank need not do it in the same way.
    ask()
    check_sums(buffer.low_latency_combine(**zero_copy)[0])
    check_case(context.rank, replace(GOOD, zero_copy=True), buffer)


def use_a_combine_buffer_twice(context: RankContext) -> None:
    """What the buffer was for is over after one combine."""
    buffer = ready_buffer(context)
    arguments = good_combine(good_handle(buffer), zero_copy=True)
    buffer.get_next_low_latency_combine_buffer(arguments["handle"]).fill_(1)
    check_sums(buffer.low_latency_combine(**arguments)[0])
    expect(outcome(buffer.low_latency_combine, **arguments), invalid(NOT_ASKED))
    check_case(context.rank, GOOD, buffer)


def ask_wrongly_for_the_combine_buffer(context: RankContext) -> None:
    """No peer takes part in this, so none hears of it."""
    buffer = ready_buffer(context)
    handle = good_handle(buffer)
    if context.rank == 0:
        for wrong, sentence in (
            (None, NOT_A_HANDLE),
            (handle[:4], NOT_A_HANDLE),
            ((*handle[:3], 256, EXPERTS), not_laid_out(8, 256, 4)),
            (entry(1, (0, 1), 2 << 32 | 3)(handle), NOT_FOLLOWING),
        ):
            expect(outcome(buffer.get_next_low_latency_combine_buffer, wrong), invalid(sentence))
    check_case(context.rank, replace(GOOD, zero_copy=True), buffer)


# Hooks


def combine_before_the_hook(context: RankContext) -> None:
    buffer = ready_buffer(context)
    _, _, handle, _, hook = dispatch_by_hook(buffer)
    sentence = "the handle's dispatch is not yet received: call its hook first"
    if context.rank == 0:
        expect(outcome(buffer.get_next_low_latency_combine_buffer, handle), invalid(sentence))
    else:
        hook()
    check_refusal(context, COMBINE, sentence, buffer.low_latency_combine, **good_combine(handle))
    hook()
    check_sums(buffer.low_latency_combine(**good_combine(handle))[0])
    check_case(context.rank, GOOD, buffer)


def send_a_third_call(context: RankContext, what: str) -> None:
    """Two calls are in flight; the third is refused, and made again when the first has been received."""
    buffer = ready_buffer(context)
    handle = good_handle(buffer)

    def last_call() -> int:
        return buffer.status()[context.rank].call

    def zero_copy() -> Any:
        buffer.get_next_low_latency_combine_buffer(handle).fill_(1)
        return buffer.low_latency_combine(**good_combine(handle), zero_copy=True)

    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: buffer.low_latency_dispatch(**good_dispatch(), **HOWS["hook"]),
        "combine": lambda: buffer.low_latency_combine(**good_combine(handle), **HOWS["hook"]),
        "async": lambda: buffer.low_latency_dispatch(**good_dispatch(), **HOWS["async"]),
        "wrong": lambda: buffer.low_latency_dispatch(**good_dispatch(x=None)),
        "zero copy": zero_copy,
    }
    hook_1 = dispatch_by_hook(buffer)[4]
    combined, _, hook_2 = calls["combine"]()
    before = last_call()
    sentence = (
        f"{DISPATCH} (call {before - 1}) was sent and is not yet received, and its slots are needed: call its"
        f" hook. At most 2 low-latency calls may be in flight"
    )
    expect(outcome(calls[what]), invalid(sentence))
    # Nothing was sent, and no number taken: the same call later has the next one.
    assert last_call() == before
    hook_1()
    message = outcome(lambda: finish(*calls[what]()[-2:]))
    expect(message, invalid("x is of type NoneType", True) if what == "wrong" else NOTHING)
    assert last_call() == before + 1
    hook_2()
    check_sums(combined)
    check_case(context.rank, replace(GOOD, how="hook"), buffer)


# Buffers that cannot, and masks


def call_everything(buffer: Buffer, pattern: str) -> None:
    handle = empty_handle()
    calls: list[Callable[[], Any]] = [
        lambda: buffer.low_latency_dispatch(**good_dispatch()),
        lambda: buffer.low_latency_combine(**good_combine(handle)),
        lambda: buffer.get_next_low_latency_combine_buffer(handle),
        lambda: buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS),
    ]
    for call in calls:
        expect(outcome(call), pattern)
    call_masks(buffer, pattern)


def call_masks(buffer: Buffer, pattern: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: buffer.low_latency_update_mask_buffer(1, mask=True),
        lambda: buffer.low_latency_update_mask_buffer(1),
        lambda: buffer.low_latency_query_mask_buffer(torch.zeros(2).int()),
        buffer.low_latency_clean_mask_buffer,
    ]
    for call in calls:
        expect(outcome(call), pattern)


def use_a_normal_buffer(context: RankContext) -> None:
    buffer = cases.buffer_for(context, None)
    call_everything(
        buffer, invalid("this Buffer has no low-latency mode: make it with low_latency_mode=True")
    )
    cases.check_case(context, cases.Case(tokens=(3, 3)), buffer)


def use_masks_that_are_not_there(context: RankContext) -> None:
    buffer = ready_buffer(context)
    call_masks(buffer, invalid("this Buffer has no masks: make it with enable_shrink=True"))
    check_case(context.rank, GOOD, buffer)


def use_masks_wrongly(context: RankContext) -> None:
    buffer = ready_buffer(context, enable_shrink=True)
    for rank, sentence in (
        (2, "rank_to_mask is 2: there are 2 ranks, counted from 0"),
        (-1, "rank_to_mask is -1: it must be at least 0"),
        ("one", "rank_to_mask is 'one': it must be a whole number"),
    ):
        for mask in (False, True):
            expect(outcome(buffer.low_latency_update_mask_buffer, rank, mask), invalid(sentence))
    right = torch.full((2,), 7).int()
    for _, changes, sentence in wrong_tensors("", "mask_status", right, "int64", "[2]"):
        wrong = changes["mask_status"](right)
        expect(outcome(buffer.low_latency_query_mask_buffer, wrong), invalid(sentence, True))
    buffer.low_latency_query_mask_buffer(right)
    assert right.tolist() == [0, 0]
    check_case(context.rank, GOOD, buffer)


def unmask_in_flight(context: RankContext) -> None:
    buffer = ready_buffer(context, enable_shrink=True)
    *_, hook = dispatch_by_hook(buffer)
    pattern = f"InvalidCall: {DISPATCH} \\(call \\d+\\) was sent and is not yet received: call its hook first"
    expect(outcome(buffer.low_latency_update_mask_buffer, 1), pattern)
    expect(outcome(buffer.low_latency_clean_mask_buffer), pattern)
    hook()
    buffer.low_latency_update_mask_buffer(1)
    check_case(context.rank, GOOD, buffer)


def refuse_without_rank_2(context: RankContext) -> None:
    """Rank 2 is masked: it is told so, whatever it calls, and the others do not hear of it."""
    case = good_case(context)
    with new_buffer(context, enable_shrink=True) as buffer:
        check_case(context.rank, case, buffer)
        dist.barrier(context.group)
        if context.rank == 0:
            buffer.low_latency_update_mask_buffer(2, mask=True)
        dist.barrier(context.group)
        wrong = {} if context.rank == 1 else {"x": None}
        for _ in range(3):
            if context.rank == 2:
                expect(
                    outcome(good_handle, buffer, **wrong), "Masked: the other ranks go on without rank 2: .*"
                )
            else:
                sentence = "x is of type NoneType: it must be a tensor"
                check_refusal(context, DISPATCH, sentence, good_handle, buffer, **wrong)
        if context.rank != 2:
            message = outcome(good_handle, buffer, use_fp8=context.rank == 1)
            about = re.escape(f"about {FORMATS}: bf16 on rank 0; fp8 on rank 1")
            expect(message, f"Disagreement: the ranks disagree in .* {about}")
            check_case(context.rank, case, buffer, absent=frozenset({2}))
        dist.barrier(context.group)
        buffer.low_latency_clean_mask_buffer()
        check_case(context.rank, case, buffer)
        dist.barrier(context.group)


def use_after_destroy(context: RankContext) -> None:
    buffer = new_buffer(context, enable_shrink=True)
    *_, hook = dispatch_by_hook(buffer)
    buffer.destroy()
    buffer.destroy()
    call_everything(buffer, "BufferBroken: this Buffer was destroyed: make a new one")
    expect(outcome(hook), "BufferBroken: this Buffer is broken since an earlier call: it was destroyed")


SCENARIOS: list[tuple[int, Callable[..., None], list[Any]]] = [
    (2, combine_with_a_normal_handle, []),
    (2, use_logfmt_where_there_is_none, [136, 16512]),
    (2, hear_where_one_waits, list(HOWS)),
    (2, never_wait, []),
    (2, refuse_in_a_row, []),
    (3, refuse_on_two_ranks, []),
    (2, ask_for_a_row_that_is_not_there, list(HOWS)),
    (3, disagree, []),
    (3, disagree_at_first, list(range(len(OTHER_SIZES)))),
    (3, disagree_about_everything, []),
    (2, refuse_at_first, []),
    (2, change_sizes_in_flight, []),
    (2, use_all_room, [0, 1]),
    (2, use_no_room, []),
    (2, come_between, ["dispatch", "clean", "a refused call"]),
    (2, use_a_combine_buffer_twice, []),
    (2, ask_wrongly_for_the_combine_buffer, []),
    (2, combine_before_the_hook, []),
    (2, send_a_third_call, ["dispatch", "combine", "async", "wrong", "zero copy"]),
    (2, use_a_normal_buffer, []),
    (2, use_masks_that_are_not_there, []),
    (2, use_masks_wrongly, []),
    (2, unmask_in_flight, []),
    (3, refuse_without_rank_2, []),
    (2, use_after_destroy, []),
]


@pytest.mark.parametrize(
    ("num_ranks", "scenario", "arguments"),
    [
        pytest.param(
            num_ranks,
            scenario,
            given,
            id="-".join([scenario.__name__, *map(str, given)]),
            marks=in_process_of(Place("cpu", num_ranks)),
        )
        for num_ranks, scenario, variants in SCENARIOS
        for given in ([(variant,) for variant in variants] or [()])
    ],
)
def test_scenario(num_ranks: int, scenario: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    get_world(num_ranks).run(scenario, *arguments)


@pytest.mark.parametrize("place", [SIMULATED.param(marks=in_process_of(SIMULATED))])
def test_a_third_call_on_a_gpu(place: Place) -> None:
    place.world().run(send_a_third_call, "dispatch")
