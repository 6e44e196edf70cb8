"""Wrong calls: the exception, its sentence, what the other ranks hear; the Buffer works afterwards."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from anyep import AnyEPError, Config, Disagreement, InvalidCall
from anyep.api.buffer import Buffer
from tests.support.cases import Case, buffer_for, check_case
from tests.support.world import RankContext, get_world

TOKENS, HIDDEN, EXPERTS, TOPK = 6, 32, 4, 2
GOOD = Case(tokens=(TOKENS, TOKENS), hidden=HIDDEN, num_topk=TOPK, local_experts=2)


def good_arguments(buffer: Buffer) -> dict[str, Any]:
    """Neighbouring experts for each token: with 2 per rank, every token goes to one rank."""
    num_experts = 2 * buffer.group_size
    topk_idx = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % num_experts
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return {
        "x": torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16),
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(TOKENS, TOPK),
    }


x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
data = torch.zeros(TOKENS, HIDDEN, dtype=torch.uint8)
WRONG_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"x": [1, 2, 3]}, "x is a list of 3: it must be a tensor or (data, scales)"),
    "a number": ({"x": 3}, "x is of type int: it must be a tensor"),
    "dtype": ({"x": x.long()}, "x is int64: it must be bfloat16, float16, float32 or 1-byte data"),
    "double": ({"x": x.double()}, "x is float64"),
    "dimensions": ({"x": x[0]}, "x has shape [32]: it must be [tokens, hidden]"),
    "device": (
        {"x": x.to("meta")},
        "x is on meta, where tensors have no data: AnyEP works on CPU and CUDA tensors; materialise it",
    ),
    "experts' counts": (
        {"num_tokens_per_expert": torch.zeros(2, 2).int()},
        "num_tokens_per_expert has shape [2, 2]: it must be [experts]",
    ),
    "strides": ({"x": torch.zeros(HIDDEN, TOKENS, dtype=torch.bfloat16).t()}, "x is not contiguous"),
    "row bytes": (
        {"x": torch.zeros(TOKENS, 4, dtype=torch.bfloat16)},
        "a row of 8 bytes is no multiple of 16",
    ),
    "no columns": ({"x": torch.zeros(TOKENS, 0, dtype=torch.bfloat16)}, "x has no columns"),
    "scales of wide data": (
        {"x": (x, torch.ones(TOKENS, 1))},
        "x[0] is bfloat16: data with scales must have 1-byte",
    ),
    "scales' dtype": (
        {"x": (data, torch.ones(TOKENS, 1).double())},
        "x[1] is float64: it must be float32 or int32",
    ),
    "scales' rows": (
        {"x": (data, torch.ones(TOKENS + 1, 1))},
        "x[1] has shape [7, 1]: it must be [6, scales]",
    ),
    "too many scales": (
        {"x": (data, torch.ones(TOKENS, 129))},
        "x[1] has 129 scales per token: it must be 1 to 128",
    ),
    "three parts": ({"x": (data, data, data)}, "x is a tuple of 3"),
    "ids alone": ({"topk_weights": None}, "topk_idx is given without topk_weights: pass both or neither"),
    "weights alone": ({"topk_idx": None}, "topk_weights is given without topk_idx: pass both or neither"),
    "ids' dtype": ({"topk_idx": torch.zeros(TOKENS, TOPK).int()}, "topk_idx is int32: it must be int64"),
    "weights' shape": (
        {"topk_weights": torch.ones(TOKENS, 3)},
        "topk_weights has shape [6, 3]: it must be [6, 2]",
    ),
    "too many experts per token": (
        {"topk_idx": torch.zeros(TOKENS, 129).long(), "topk_weights": torch.ones(TOKENS, 129)},
        "topk_idx has 129 experts per token: it must be 1 to 128",
    ),
    "no counts": ({"num_tokens_per_rank": None}, "num_tokens_per_rank is missing"),
    "no mask": ({"is_token_in_rank": None}, "is_token_in_rank is missing"),
    "no expert counts": ({"num_tokens_per_expert": None}, "num_tokens_per_expert is missing"),
    "counts' shape": (
        {"num_tokens_per_rank": torch.zeros(3).int()},
        "num_tokens_per_rank has shape [3]: it must be [2]",
    ),
    "counts' dtype": (
        {"num_tokens_per_rank": torch.zeros(2)},
        "num_tokens_per_rank is float32: it must be int32",
    ),
    "mask's shape": (
        {"is_token_in_rank": torch.zeros(TOKENS, 3).bool()},
        "is_token_in_rank has shape [6, 3]: it must be [6, 2]",
    ),
    "counts that do not match": (
        {"num_tokens_per_rank": torch.tensor([1, 2]).int()},
        "num_tokens_per_rank says 1 for rank 0, but is_token_in_rank marks",
    ),
    "expert counts that do not match": (
        {"num_tokens_per_expert": torch.tensor([9, 3, 3, 3]).int()},
        "num_tokens_per_expert says 9 for expert 0, but topk_idx has another number",
    ),
    "ids that go where the mask does not": (
        {"is_token_in_rank": torch.zeros(TOKENS, 2).bool(), "num_tokens_per_rank": torch.zeros(2).int()},
        "topk_idx and is_token_in_rank disagree whether token 0 goes to rank 0",
    ),
    "a mask that goes where no id does": (
        {
            "is_token_in_rank": torch.ones(TOKENS, 2).bool(),
            "num_tokens_per_rank": torch.full((2,), TOKENS).int(),
        },
        "topk_idx and is_token_in_rank disagree whether token 0 goes to rank 1",
    ),
    "an absurd worst case": (
        {"num_worst_tokens": 1 << 62},
        "num_worst_tokens is 4611686018427387904: at most",
    ),
    "experts that do not divide": (
        {"num_tokens_per_expert": torch.zeros(5).int()},
        "5 experts do not divide over 2 ranks",
    ),
    "alignment": ({"expert_alignment": 0}, "expert_alignment is 0: it must be at least 1"),
    "negative worst case": ({"num_worst_tokens": -1}, "num_worst_tokens is -1: it must be at least 0"),
    "worst case without ids": (
        {"num_worst_tokens": 99, "topk_idx": None, "topk_weights": None},
        "num_worst_tokens needs topk_idx",
    ),
    "config": ({"config": (20, 6)}, "config is of type tuple: it must be an anyep.Config"),
    "too many channels": ({"config": Config(258, 1, 2)}, "num_sms is 258: at most 256 are possible"),
    "event": ({"previous_event": 7}, "previous_event is of type int: it must be an EventOverlap"),
    "allocation": (
        {"allocate_on_comm_stream": True},
        "allocate_on_comm_stream needs a previous_event and async_finish",
    ),
    "rows too large": (
        {"x": torch.zeros(TOKENS, 1 << 20, dtype=torch.float32), "config": Config(20, 1, 2)},
        "num_nvl_bytes is 4194304, too small for rings of 2 rows: this call needs at least",
    ),
}


def dispatch_wrongly_on_rank_0(context: RankContext, name: str) -> str:
    """Rank 0 calls with something wrong, rank 1 rightly; then both make a right call."""
    buffer = buffer_for(context, None)
    arguments = good_arguments(buffer)
    if context.rank == 0:
        arguments |= WRONG_DISPATCHES[name][0]
    try:
        buffer.dispatch(**arguments)
        message = "nothing was raised"
    except AnyEPError as error:
        message = f"{type(error).__name__}: {error}"
    check_case(context, GOOD, buffer)
    return message


@pytest.mark.parametrize("name", WRONG_DISPATCHES)
def test_wrong_dispatch(name: str) -> None:
    sentence = WRONG_DISPATCHES[name][1]
    wrong, right = get_world(2).run(dispatch_wrongly_on_rank_0, name)
    assert wrong.startswith(f"InvalidCall: {sentence}")
    assert right.startswith("Disagreement: rank 0 refused its dispatch (call ")
    assert sentence in right


def good_handle(buffer: Buffer) -> tuple[torch.Tensor, Any]:
    recv, *_, handle, _ = buffer.dispatch(**good_arguments(buffer))
    assert isinstance(recv, torch.Tensor)
    return recv.clone(), handle


def changed(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda handle: (*handle[:index], change(handle[index]), *handle[index + 1 :])


def plus(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor + value


WRONG_COMBINES: dict[str, tuple[Callable[[torch.Tensor, Any], dict[str, Any]], str]] = {
    "rows": (lambda x, h: {"x": x[:-1], "handle": h}, "x has 5 rows, but the handle's dispatch gave 6"),
    "dtype": (
        lambda x, h: {"x": x.to(torch.uint8), "handle": h},
        "x is uint8: it must be bfloat16 or float16",
    ),
    "strides": (lambda x, h: {"x": x.t().contiguous().t(), "handle": h}, "x is not contiguous"),
    "no handle": (lambda x, h: {"x": x, "handle": None}, "the handle must be the tuple of 6 tensors"),
    "part of a handle": (lambda x, h: {"x": x, "handle": h[:5]}, "the handle must be the tuple of 6 tensors"),
    "no tensors": (lambda x, h: {"x": x, "handle": (1, 2, 3, 4, 5, 6)}, "the handle must hold tensors only"),
    "a number in the handle": (
        lambda x, h: {"x": x, "handle": changed(5, lambda t: torch.tensor(1))(h)},
        "the handle must hold tensors only",
    ),
    "ranks": (
        lambda x, h: {"x": x, "handle": changed(0, lambda t: torch.zeros(3, 3).int())(h)},
        "the handle's rank_prefix_matrix is torch.int32 [3, 3] on cpu: it must be torch.int32 [2, 2]",
    ),
    "handle's dtype": (
        lambda x, h: {"x": x, "handle": changed(5, lambda t: t.long())(h)},
        "the handle's send_head is torch.int64",
    ),
    "prefix sums": (
        lambda x, h: {"x": x, "handle": changed(0, lambda t: t.flip(0))(h)},
        "the handle does not fit together: rank_prefix_matrix must not fall",
    ),
    "rows of the handle": (
        lambda x, h: {"x": x[:-1], "handle": changed(3, lambda t: t[:-1])(h)},
        "the handle does not fit together: recv_src_idx has fewer rows",
    ),
    "places": (
        lambda x, h: {"x": x, "handle": changed(5, plus(1))(h)},
        "the handle does not fit together: ",
    ),
    "mask": (
        lambda x, h: {"x": x, "handle": changed(4, torch.logical_not)(h)},
        "the handle does not fit together: is_token_in_rank and send_head differ",
    ),
    "channels sent": (
        lambda x, h: {"x": x, "handle": changed(1, plus(1))(h)},
        "the handle does not fit together: channel_prefix_matrix",
    ),
    "channels received": (
        lambda x, h: {"x": x, "handle": changed(2, plus(100))(h)},
        "the handle does not fit together: recv_channel_prefix_matrix",
    ),
    "another config": (
        lambda x, h: {"x": x, "handle": h, "config": Config(8)},
        "the config has 4 channels, but the handle was made with 10: use a Config with num_sms=20",
    ),
    "three biases": (
        lambda x, h: {"x": x, "handle": h, "bias": (x, x, x)},
        "bias is a tuple of 3: it must be a tensor or a pair of tensors",
    ),
    "one bias in a tuple": (lambda x, h: {"x": x, "handle": h, "bias": (x,)}, "bias is a tuple of 1"),
    "bias's shape": (
        lambda x, h: {"x": x, "handle": h, "bias": x[:1]},
        "bias has shape [1, 32]: it must be [6, 32]",
    ),
    "bias's dtype": (
        lambda x, h: {"x": x, "handle": h, "bias": torch.zeros(TOKENS, HIDDEN)},
        "bias is float32: it must be bfloat16",
    ),
    "weights' rows": (
        lambda x, h: {"x": x, "handle": h, "topk_weights": torch.ones(3, 2)},
        "topk_weights has shape [3, 2]: it must be [6, top-k]",
    ),
}


def combine_wrongly_on_rank_0(context: RankContext, name: str) -> str:
    buffer = buffer_for(context, None)
    rows, handle = good_handle(buffer)
    arguments = {"x": rows, "handle": handle}
    if context.rank == 0:
        arguments = WRONG_COMBINES[name][0](rows, handle)
    try:
        buffer.combine(**arguments)
        message = "nothing was raised"
    except AnyEPError as error:
        message = f"{type(error).__name__}: {error}"
    check_case(context, GOOD, buffer)
    return message


@pytest.mark.parametrize("name", WRONG_COMBINES)
def test_wrong_combine(name: str) -> None:
    sentence = WRONG_COMBINES[name][1]
    wrong, right = get_world(2).run(combine_wrongly_on_rank_0, name)
    assert wrong.startswith(f"InvalidCall: {sentence}")
    assert right.startswith("Disagreement: rank 0 refused its combine (call ")


def dispatch_again_wrongly(context: RankContext, what: str) -> str:
    buffer = buffer_for(context, None)
    arguments = good_arguments(buffer)
    _, handle = good_handle(buffer)
    rows = arguments["x"]
    try:
        if what == "rows":
            buffer.dispatch(rows[:-1], handle=handle)
        elif what == "top-k":
            buffer.dispatch(rows, handle=handle, topk_idx=arguments["topk_idx"])
        else:
            buffer.dispatch(rows, handle=handle, config=Config(4))
        message = "nothing was raised"
    except AnyEPError as error:
        message = f"{type(error).__name__}: {error}"
    check_case(context, GOOD, buffer)
    return message


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("rows", "x has 5 rows, but the handle was made for 6"),
        ("top-k", "a dispatch with a handle takes no top-k"),
        ("config", "the config has 2 channels, but the handle was made with 10"),
    ],
)
def test_wrong_cached_dispatch(what: str, sentence: str) -> None:
    for message in get_world(2).run(dispatch_again_wrongly, what):
        assert message.startswith(f"InvalidCall: {sentence}")


def disagree(context: RankContext, about: str) -> str:
    """Every rank calls rightly, but the last one otherwise than the others."""
    buffer = buffer_for(context, None)
    arguments = good_arguments(buffer)
    rows, handle = good_handle(buffer)
    last = context.rank == context.num_ranks - 1
    try:
        if about == "function" and last:
            buffer.combine(rows, handle)
        elif about == "cached" and last:
            buffer.dispatch(arguments["x"], handle=handle)
        else:
            if last:
                other = {
                    "hidden": {"x": torch.zeros(TOKENS, 2 * HIDDEN, dtype=torch.bfloat16)},
                    "dtype": {"x": torch.zeros(TOKENS, HIDDEN, dtype=torch.float16)},
                    "wide dtype": {"x": torch.zeros(TOKENS, HIDDEN)},
                    "fp8": {"x": (torch.zeros(TOKENS, HIDDEN, dtype=torch.uint8), torch.ones(TOKENS, 1))},
                    "dtype and hidden": {"x": torch.zeros(TOKENS, HIDDEN // 2)},
                    "several": {
                        "x": torch.zeros(TOKENS, HIDDEN),
                        "topk_idx": None,
                        "topk_weights": None,
                        "config": Config(4),
                    },
                    "top-k": {"topk_idx": None, "topk_weights": None},
                    "channels": {"config": Config(4)},
                    "ring": {"config": Config(20, 6, 100)},
                }
                arguments |= other.get(about, {})
            buffer.dispatch(**arguments)
        message = "nothing was raised"
    except AnyEPError as error:
        message = f"{type(error).__name__}: {error}"
    check_case(context, Case(tokens=(3,) * context.num_ranks), buffer)
    return message


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ("function", "about the function called: dispatch on ranks 0, 1; combine on rank 2"),
        ("cached", "about the function called: dispatch on ranks 0, 1; cached dispatch on rank 2"),
        ("hidden", "about the hidden size: 32 on ranks 0, 1; 64 on rank 2"),
        ("wide dtype", "about the dtype: bfloat16 on ranks 0, 1; float32 on rank 2"),
        (
            "fp8",
            "about the dtype: bfloat16 on ranks 0, 1; uint8 on rank 2,"
            " and about the number of scales per token: 0 on ranks 0, 1; 1 on rank 2",
        ),
        (
            "dtype and hidden",
            "about the dtype: bfloat16 on ranks 0, 1; float32 on rank 2,"
            " and about the hidden size: 32 on ranks 0, 1; 16 on rank 2",
        ),
        (
            "several",
            "about the dtype: bfloat16 on ranks 0, 1; float32 on rank 2,"
            " and about top-k: 2 on ranks 0, 1; 0 on rank 2,"
            " and about the number of channels (num_sms // 2): 10 on ranks 0, 1; 2 on rank 2",
        ),
        ("dtype", "about the dtype: bfloat16 on ranks 0, 1; float16 on rank 2"),
        ("top-k", "about top-k: 2 on ranks 0, 1; 0 on rank 2"),
        ("channels", "about the number of channels (num_sms // 2): 10 on ranks 0, 1; 2 on rank 2"),
        (
            "ring",
            "about the rows of a ring (config, num_nvl_bytes or num_rdma_bytes): 256 on ranks 0, 1;"
            " 100 on rank 2",
        ),
    ],
)
def test_ranks_that_disagree(about: str, sentence: str) -> None:
    for message in get_world(3).run(disagree, about):
        assert re.fullmatch(
            f"Disagreement: the ranks disagree in call [0-9]+ {re.escape(sentence)}", message
        ), message


def combine_with_other_handles(context: RankContext) -> str:
    buffer = buffer_for(context, None)
    arguments = good_arguments(buffer)
    rows, handle = good_handle(buffer)
    # A second routing: everything to rank 0.
    arguments["topk_idx"] = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(arguments["topk_idx"], EXPERTS)
    arguments |= {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": in_rank,
    }
    other_rows, *_, other_handle, _ = buffer.dispatch(**arguments)
    try:
        if context.rank == 0:
            buffer.combine(rows, handle)
        else:
            buffer.combine(other_rows, other_handle)
    except Disagreement as error:
        check_case(context, GOOD, buffer)
        return str(error)
    return "nothing was raised"


def test_handles_of_different_dispatches() -> None:
    for message in get_world(2).run(combine_with_other_handles):
        assert "about the routing in the handle" in message


def too_many_for_the_worst_case(context: RankContext) -> tuple[str, bool]:
    buffer = buffer_for(context, None)
    arguments = good_arguments(buffer) | {"num_worst_tokens": 3 if context.rank == 1 else 99}
    try:
        buffer.dispatch(**arguments)
        message = "nothing was raised"
    except InvalidCall as error:
        message = str(error)
    check_case(context, GOOD, buffer)
    return message, True


def test_more_rows_than_the_worst_case_allows() -> None:
    for message, works in get_world(2).run(too_many_for_the_worst_case):
        assert message.startswith(
            "num_worst_tokens is 3 on rank 1, but 6 rows would arrive there: nothing was sent"
        )
        assert works


def make_wrongly(context: RankContext, changes: dict[str, Any], on_rank: int) -> str:
    arguments: dict[str, Any] = {"num_nvl_bytes": 1 << 20, "device": "cpu"}
    if context.rank == on_rank or on_rank < 0:
        arguments |= changes
    try:
        Buffer(context.group, **arguments).destroy()
    except AnyEPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_nvl_bytes": 100}, "InvalidCall: num_nvl_bytes is 100: it must be a multiple of 128"),
        ({"num_nvl_bytes": -128}, "InvalidCall: num_nvl_bytes is -128: it must be at least 0"),
        ({"num_rdma_bytes": 1}, "InvalidCall: num_rdma_bytes is 1: it must be a multiple of 128"),
        ({"num_window_bytes": 64}, "InvalidCall: num_window_bytes is 64: it must be a multiple of 128"),
        ({"ranks_per_node": 3}, "InvalidCall: 2 ranks do not fill nodes of 3 evenly"),
        ({"network": "foo"}, "InvalidCall: network is 'foo': it must be 'nixl' or 'loopback', or left out"),
        ({"device": "cuda"}, "NotSupported: device is 'cuda'"),
        ({"device": "foo"}, "InvalidCall: device is 'foo': pass device='cpu'"),
    ],
)
def test_a_buffer_that_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    for message in get_world(2).run(make_wrongly, changes, -1):
        assert message.startswith(sentence)


def test_ranks_that_want_different_buffers() -> None:
    for message in get_world(2).run(make_wrongly, {"num_nvl_bytes": 1 << 21}, 1):
        expected = "Disagreement: the ranks disagree about num_nvl_bytes: 1 MiB on rank 0; 2 MiB on rank 1"
        assert message == expected


def test_one_rank_that_cannot_make_its_buffer() -> None:
    right, wrong = get_world(2).run(make_wrongly, {"num_nvl_bytes": 100}, 1)
    assert wrong == "InvalidCall: num_nvl_bytes is 100: it must be a multiple of 128"
    assert right == f"InvalidCall: rank 1 could not make its Buffer: {wrong.removeprefix('InvalidCall: ')}"


def make_with_a_timeout(context: RankContext, timeouts: list[str]) -> str:
    os.environ["ANYEP_TIMEOUT_S"] = timeouts[context.rank]
    try:
        return make_wrongly(context, {}, -1)
    finally:
        del os.environ["ANYEP_TIMEOUT_S"]


def test_a_wrong_timeout_on_one_rank() -> None:
    wrong, right = get_world(2).run(make_with_a_timeout, ["soon", "5"])
    assert wrong == "InvalidCall: ANYEP_TIMEOUT_S is 'soon': it must be a number of seconds above 0"
    assert right.startswith("InvalidCall: rank 0 could not make its Buffer: ANYEP_TIMEOUT_S is 'soon'")


def without_a_group(context: RankContext) -> list[str]:
    messages = []
    for group, comm in ((None, None), ("world", None), (None, 3)):
        try:
            Buffer(group, comm=comm)
        except InvalidCall as error:
            messages.append(str(error))
    return messages


def test_no_group() -> None:
    (messages,) = get_world(1).run(without_a_group)
    assert messages[0].startswith("neither a group nor a comm is given")
    assert messages[2] == "comm is of type int: pass an mpi4py communicator"
    assert messages[1].startswith("group is of type str: pass a torch process group")


def small_buffers(context: RankContext) -> list[str]:
    """The smallest ring buffer that works, and one that is too small."""
    config = Config(2, 1, 8)
    # For each of 2 peers 2 rows of 80 bytes (64 of hidden, 8 of meta, padding) and 16 reserved: 352 -> 384.
    topk_idx = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % EXPERTS
    outcomes = []
    for num_nvl_bytes in (384, 256):
        with Buffer(context.group, num_nvl_bytes, device="cpu", num_window_bytes=0) as buffer:
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
            x = torch.full((TOKENS, HIDDEN), float(context.rank), dtype=torch.bfloat16)
            try:
                recv = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, config=config)[0]
                outcomes.append(str(recv.sum().item()))  # type: ignore[union-attr]
            except InvalidCall as error:
                outcomes.append(str(error))
    return outcomes


def test_the_smallest_buffer() -> None:
    for works, too_small in get_world(2).run(small_buffers):
        assert float(works) == TOKENS // 2 * HIDDEN  # half of rank 1's tokens, all ones
        assert too_small.startswith(
            "num_nvl_bytes is 256, too small for rings of 2 rows: this call needs at least 384 bytes"
        )


def wrong_layouts(context: RankContext) -> list[str]:
    buffer = buffer_for(context, None)
    messages = []
    for topk_idx, num_experts in (
        (torch.zeros(3, 2).int(), 4),
        (torch.zeros(3, dtype=torch.int64), 4),
        (torch.zeros(3, 2, dtype=torch.int64), 3),
        (torch.zeros(3, 2, dtype=torch.int64), 0),
        (torch.zeros(3, 2, dtype=torch.int64), 4096),
    ):
        try:
            buffer.get_dispatch_layout(topk_idx, num_experts)
        except InvalidCall as error:
            messages.append(str(error))
    try:
        buffer.get_local_buffer_tensor(torch.int32, offset=2)
    except InvalidCall as error:
        messages.append(str(error))
    try:
        buffer.get_local_buffer_tensor(torch.int32, size=torch.Size([1 << 30]))
    except InvalidCall as error:
        messages.append(str(error))
    for wrong in ({"size": (-1,)}, {"size": 6}, {"dtype": "f"}):
        try:
            buffer.get_local_buffer_tensor(**({"dtype": torch.int32} | wrong))  # type: ignore[arg-type]
        except InvalidCall as error:
            messages.append(str(error))
    return messages


def test_wrong_layouts() -> None:
    for messages in get_world(2).run(wrong_layouts):
        assert messages[0] == "topk_idx is int32: it must be int64"
        assert messages[1] == "topk_idx has shape [3]: it must be [tokens, top-k]"
        assert messages[2].startswith("3 experts do not divide over 2 ranks")
        assert messages[3] == "num_experts is 0: it must be at least 1"
        assert messages[4].startswith("2048 experts per rank: at most 1024 are possible")
        assert messages[5] == "offset is 2: it must be a multiple of 4 in 0 to 4194304"
        assert messages[7] == "size is -1: it must be at least 0"
        assert messages[8] == "size is 6: it must be a torch.Size"
        assert messages[9] == "dtype is 'f': it must be a torch.dtype"
        assert messages[6] == "size [1073741824] takes 4294967296 bytes, but only 4194304 are there"
