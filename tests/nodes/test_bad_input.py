"""Wrong calls between nodes: the exception, its sentence, what the other ranks hear; the Buffer works on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from anyep import AnyEPError, Config, InvalidCall
from anyep.api.buffer import Buffer
from tests.support.cases import RDMA_BYTES, Case, buffer_for, check_case
from tests.support.world import RankContext, get_world

RANKS, PER_NODE, TOKENS, HIDDEN, EXPERTS = 4, 2, 8, 32, 8
GOOD = Case(tokens=(6, 0, 3, 9), hidden=HIDDEN, local_experts=2, ranks_per_node=PER_NODE)
WRONG_RANK = 1


def buffer_of(context: RankContext, ranks_per_node: int = PER_NODE) -> Buffer:
    return buffer_for(context, None, ranks_per_node=ranks_per_node)


def good_arguments(buffer: Buffer, shift: int = 3) -> dict[str, Any]:
    """Every token goes to two ranks; all pairs of neighbours come, within nodes and across."""
    topk_idx = torch.arange(TOKENS)[:, None] + torch.tensor([0, shift])
    topk_idx %= EXPERTS
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    return {
        "x": torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16),
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(TOKENS, 2),
    }


def good_handle(buffer: Buffer) -> tuple[torch.Tensor, Any]:
    recv, *_, handle, _ = buffer.dispatch(**good_arguments(buffer))
    assert isinstance(recv, torch.Tensor)
    return recv.clone(), handle


def what_happens(context: RankContext, buffer: Buffer, call: Callable[[], Any]) -> str:
    """What a call raises; a dispatch, a cached one and a combine after it must be right, bit for bit."""
    try:
        call()
        message = "nothing was raised"
    except AnyEPError as error:
        message = f"{type(error).__name__}: {error}"
    check_case(context, GOOD, buffer)
    return message


def assert_refused(messages: list[str], function: str, sentence: str) -> None:
    """The wrong rank says what is wrong; all others hear it from that one."""
    for rank, message in enumerate(messages):
        if rank == WRONG_RANK:
            assert message.startswith(f"InvalidCall: {sentence}"), message
        else:
            assert message.startswith(f"Disagreement: rank {WRONG_RANK} refused its {function} (call "), (
                message
            )
            assert sentence in message


WRONG_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "node counts": (
        {"num_tokens_per_rdma_rank": torch.tensor([5, 7]).int()},
        "num_tokens_per_rdma_rank says 5 for node 0, but is_token_in_rank marks 7: pass both from one",
    ),
    "node counts' dtype": (
        {"num_tokens_per_rdma_rank": torch.tensor([6, 6])},
        "num_tokens_per_rdma_rank must be the int32 tensor of get_dispatch_layout",
    ),
    "node counts' shape": (
        {"num_tokens_per_rdma_rank": torch.zeros(4).int()},
        "num_tokens_per_rdma_rank has shape [4]: it must be [2]",
    ),
    "node counts' type": (
        {"num_tokens_per_rdma_rank": [6, 6]},
        "num_tokens_per_rdma_rank must be the int32 tensor of get_dispatch_layout",
    ),
    "rank counts": (
        {"num_tokens_per_rank": torch.tensor([4, 4, 4, 5]).int()},
        "num_tokens_per_rank says 5 for rank 3, but is_token_in_rank marks 4",
    ),
    "dtype": ({"x": torch.zeros(TOKENS, HIDDEN).long()}, "x is int64: it must be bfloat16"),
    "rows too large for the network rings": (
        {"x": torch.zeros(TOKENS, 1 << 16, dtype=torch.float32), "config": Config(20, 1, 2, 1, 2)},
        f"num_rdma_bytes is {RDMA_BYTES}, too small for rings of 2 rows between 2 nodes: this call needs at"
        f" least",
    ),
}


def dispatch_wrongly(context: RankContext, name: str) -> str:
    buffer = buffer_of(context)
    arguments = good_arguments(buffer)
    if context.rank == WRONG_RANK:
        arguments |= WRONG_DISPATCHES[name][0]
    return what_happens(context, buffer, lambda: buffer.dispatch(**arguments))


@pytest.mark.parametrize("name", WRONG_DISPATCHES)
def test_wrong_dispatch(name: str) -> None:
    assert_refused(get_world(RANKS).run(dispatch_wrongly, name), "dispatch", WRONG_DISPATCHES[name][1])


def leave_out_the_config(context: RankContext, function: str) -> str:
    """On one rank; the others call the same with a config."""
    buffer = buffer_of(context)
    config = None if context.rank == WRONG_RANK else GOOD.config
    if function == "dispatch":
        arguments = good_arguments(buffer)
        return what_happens(context, buffer, lambda: buffer.internode_dispatch(**arguments, config=config))
    arguments = good_arguments(buffer)
    rows, *_, handle, _ = buffer.internode_dispatch(**arguments, config=GOOD.config)
    if function == "combine":
        return what_happens(context, buffer, lambda: buffer.internode_combine(rows, handle, config=config))
    x = arguments["x"]
    return what_happens(context, buffer, lambda: buffer.internode_dispatch(x, handle=handle, config=config))


@pytest.mark.parametrize("function", ["dispatch", "cached dispatch", "combine"])
def test_the_config_is_missing(function: str) -> None:
    name = "get_combine_config" if function == "combine" else "get_dispatch_config"
    sentence = f"config is missing: pass one, such as Buffer.{name}(4)"
    assert_refused(get_world(RANKS).run(leave_out_the_config, function), function, sentence)


def without_node_counts(context: RankContext) -> str:
    buffer = buffer_of(context)
    arguments = good_arguments(buffer) | {"num_tokens_per_rdma_rank": None}
    return what_happens(context, buffer, lambda: buffer.dispatch(**arguments))


def test_node_counts_may_be_left_out() -> None:
    assert get_world(RANKS).run(without_node_counts) == ["nothing was raised"] * RANKS


Change = Callable[[torch.Tensor], torch.Tensor]


def changed(index: int, change: Change) -> Callable[[Any], Any]:
    return lambda handle: (*handle[:index], change(handle[index].clone()), *handle[index + 1 :])


def plus(value: int) -> Change:
    return lambda tensor: tensor + value


def all_in_the_first_channel(prefix: torch.Tensor) -> torch.Tensor:
    """As if all tokens of node 1 had come in channel 0; the sums are right. (Rank 1 is on node 0.)"""
    prefix[1] = prefix[1, -1]
    return prefix


def one_row_further(heads: torch.Tensor) -> torch.Tensor:
    return torch.where(heads >= 0, heads + 1, heads)


NOT_TOGETHER = "the handle does not fit together: "
REFUSED_HANDLES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "six tensors": (lambda h: h[:6], "the handle must be the tuple of 10 tensors that dispatch returned"),
    "no tensors": (lambda h: tuple(range(10)), "the handle must hold tensors only"),
    "nothing": (lambda h: (), "the handle must be the tuple of 10 tensors"),
    "0 is_token_in_rank": (
        changed(0, torch.logical_not),
        NOT_TOGETHER + "send_rdma_head does not number the tokens of is_token_in_rank",
    ),
    "0 shape": (changed(0, lambda t: t[:, :3]), "the handle's is_token_in_rank is torch.bool [8, 3]"),
    "1 rdma_channel_prefix_matrix": (
        changed(1, plus(1)),
        NOT_TOGETHER + "rdma_channel_prefix_matrix does not count the tokens",
    ),
    "2 gbl_channel_prefix_matrix": (
        changed(2, plus(1)),
        NOT_TOGETHER + "gbl_channel_prefix_matrix does not count the tokens",
    ),
    "2 nodes": (changed(1, lambda t: t.repeat(2, 1)), "the handle's rdma_channel_prefix_matrix is"),
    "3 recv_rdma_channel_prefix_matrix": (
        changed(3, plus(1)),
        NOT_TOGETHER + "recv_rdma_rank_prefix_sum does not count what send_nvl_head has",
    ),
    "3 falling": (
        changed(3, lambda t: t.flip(1)),
        NOT_TOGETHER + "recv_rdma_rank_prefix_sum or recv_rdma_channel_prefix_matrix falls",
    ),
    "4 recv_rdma_rank_prefix_sum": (
        changed(4, plus(1000)),
        NOT_TOGETHER + "recv_rdma_rank_prefix_sum does not count what send_nvl_head has",
    ),
    "4 falling": (changed(4, lambda t: t.flip(0)), NOT_TOGETHER + "recv_rdma_rank_prefix_sum or"),
    "5 recv_gbl_channel_prefix_matrix": (
        changed(5, plus(100)),
        NOT_TOGETHER + "recv_gbl_channel_prefix_matrix leaves the rows of its sources",
    ),
    "6 recv_gbl_rank_prefix_sum": (
        changed(6, plus(1000)),
        NOT_TOGETHER + "recv_gbl_rank_prefix_sum falls, or has more rows than recv_src_meta",
    ),
    "6 falling": (changed(6, lambda t: t.flip(0)), NOT_TOGETHER + "recv_gbl_rank_prefix_sum falls"),
    "7 recv_src_meta": (changed(7, lambda t: t[:, :4]), "the handle's recv_src_meta is torch.uint8 [16, 4]"),
    "7 dtype": (changed(7, lambda t: t.int()), "the handle's recv_src_meta is torch.int32"),
    "8 send_rdma_head": (changed(8, plus(1)), NOT_TOGETHER + "send_rdma_head does not number the tokens"),
    "9 send_nvl_head": (changed(9, plus(1)), NOT_TOGETHER + "send_nvl_head does not number the rows"),
    "9 rows": (
        changed(9, lambda t: t[:-1]),
        NOT_TOGETHER + "recv_rdma_rank_prefix_sum does not count what send_nvl_head has",
    ),
    "9 order": (changed(9, lambda t: t.flip(0)), NOT_TOGETHER + "send_nvl_head does not number the rows"),
}


def use_a_wrong_handle(
    context: RankContext, name: str, handles: dict[str, tuple[Callable[[Any], Any], str]]
) -> list[str]:
    buffer = buffer_of(context)
    rows, handle = good_handle(buffer)
    if context.rank == WRONG_RANK:
        handle = handles[name][0](handle)
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    return [
        what_happens(context, buffer, lambda: buffer.combine(rows, handle)),
        what_happens(context, buffer, lambda: buffer.dispatch(x, handle=handle)),
    ]


def refuse_a_handle(context: RankContext, name: str) -> list[str]:
    return use_a_wrong_handle(context, name, REFUSED_HANDLES)


@pytest.mark.parametrize("name", REFUSED_HANDLES)
def test_a_handle_that_is_refused(name: str) -> None:
    messages = get_world(RANKS).run(refuse_a_handle, name)
    sentence = REFUSED_HANDLES[name][1]
    assert_refused([message[0] for message in messages], "combine", sentence)
    assert_refused([message[1] for message in messages], "cached dispatch", sentence)


FOREIGN_HANDLES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "3 recv_rdma_channel_prefix_matrix": (
        changed(3, all_in_the_first_channel),
        "that of rank 1 relays other rows from rank 3 than that one sent",
    ),
    "5 recv_gbl_channel_prefix_matrix": (
        changed(5, torch.zeros_like),
        "the rows that rank 0 sent to rank 1 are of other tokens, or in other channels, in the handle of"
        " rank 0 than in that of rank 1; pass the handles of one dispatch on all ranks",
    ),
    "9 send_nvl_head": (
        changed(9, one_row_further),
        "that of rank 1 relays other rows from rank 1 than that one sent",
    ),
    "9 ranks": (
        changed(9, lambda t: t.flip(1)),
        "that of rank 1 relays other rows from rank 1 than that one sent",
    ),
}


def differ_by_a_handle(context: RankContext, name: str) -> list[str]:
    return use_a_wrong_handle(context, name, FOREIGN_HANDLES)


@pytest.mark.parametrize("name", FOREIGN_HANDLES)
def test_a_handle_that_only_peers_can_judge(name: str) -> None:
    for messages in get_world(RANKS).run(differ_by_a_handle, name):
        for message in messages:
            assert message.startswith("Disagreement: the ranks disagree in call ")
            assert "about the routing in the handle: " in message
            assert message.endswith(FOREIGN_HANDLES[name][1])


def use_handles_of_two_dispatches(context: RankContext) -> str:
    buffer = buffer_of(context)
    first, handle = good_handle(buffer)
    second, *_, other, _ = buffer.dispatch(**good_arguments(buffer, shift=0))
    use_first = context.rank != WRONG_RANK
    return what_happens(
        context,
        buffer,
        lambda: buffer.combine(first, handle) if use_first else buffer.combine(second, other),  # type: ignore[arg-type]
    )


def test_handles_of_different_dispatches() -> None:
    for message in get_world(RANKS).run(use_handles_of_two_dispatches):
        assert message.startswith("Disagreement: the ranks disagree in call ")
        assert message.endswith(
            "about the routing in the handle: in that of rank 0 it sent 4 rows to rank 1, which got 2"
            " according to its own"
        )


def use_a_handle_of_another_buffer(context: RankContext, which: str) -> str:
    """Of other nodes it is refused; of the same ones, it is as good as any."""
    buffer = buffer_of(context)
    if which == "one node":
        other = buffer_for(context, None)
    elif which == "other nodes":
        other = buffer_of(context, 1)
    else:
        other = buffer_for(context, 0, ranks_per_node=PER_NODE)
    rows, handle = good_handle(other)
    return what_happens(context, buffer, lambda: buffer.combine(rows, handle))


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("one node", "InvalidCall: the handle must be the tuple of 10 tensors that dispatch returned"),
        (
            "other nodes",
            "InvalidCall: the handle's rdma_channel_prefix_matrix is torch.int32 [4, 10] on cpu: it must be"
            " torch.int32 [2, 10] on the CPU; is the handle from another Buffer?",
        ),
        ("the same nodes", "nothing was raised"),
    ],
)
def test_a_handle_of_another_buffer(which: str, message: str) -> None:
    for said in get_world(RANKS).run(use_a_handle_of_another_buffer, which):
        assert said.startswith(message)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": (
        {"x": torch.zeros(TOKENS, 2 * HIDDEN, dtype=torch.bfloat16)},
        "about the hidden size: 32 on ranks 0, 1, 2; 64 on rank 3",
    ),
    "wide dtype": (
        {"x": torch.zeros(TOKENS, HIDDEN)},
        "about the dtype: bfloat16 on ranks 0, 1, 2; float32 on rank 3",
    ),
    "dtype and hidden": (
        {"x": torch.zeros(TOKENS, HIDDEN // 2)},
        "about the dtype: bfloat16 on ranks 0, 1, 2; float32 on rank 3,"
        " and about the hidden size: 32 on ranks 0, 1, 2; 16 on rank 3",
    ),
    "dtype": (
        {"x": torch.zeros(TOKENS, HIDDEN, dtype=torch.float16)},
        "about the dtype: bfloat16 on ranks 0, 1, 2; float16 on rank 3",
    ),
    "top-k": (
        {"topk_idx": None, "topk_weights": None},
        "about top-k: 2 on ranks 0, 1, 2; 0 on rank 3",
    ),
    "channels": (
        {"config": Config(4)},
        "about the number of channels (num_sms // 2): 10 on ranks 0, 1, 2; 2 on rank 3",
    ),
    "rows between nodes": (
        {"config": Config(20, 6, 256, 4, 100)},
        "about the rows of a ring (config, num_nvl_bytes or num_rdma_bytes): 256 and 128 between nodes on"
        " ranks 0, 1, 2; 256 and 100 between nodes on rank 3",
    ),
    "function": (
        {},
        "about the function called: dispatch on ranks 0, 1, 2; combine on rank 3",
    ),
}


def disagree(context: RankContext, about: str) -> str:
    """Every rank calls rightly, but the last one otherwise than the others."""
    buffer = buffer_of(context)
    rows, handle = good_handle(buffer)
    arguments = good_arguments(buffer) | {"config": Config(20, 6, 256, 4, 128)}
    if context.rank < RANKS - 1:
        return what_happens(context, buffer, lambda: buffer.dispatch(**arguments))
    if about == "function":
        return what_happens(context, buffer, lambda: buffer.combine(rows, handle))
    return what_happens(context, buffer, lambda: buffer.dispatch(**arguments | OTHERS[about][0]))


@pytest.mark.parametrize("about", OTHERS)
def test_ranks_that_disagree(about: str) -> None:
    for message in get_world(RANKS).run(disagree, about):
        sentence = re.escape(OTHERS[about][1])
        assert re.fullmatch(f"Disagreement: the ranks disagree in call [0-9]+ {sentence}", message), message


def too_many_for_the_worst_case(context: RankContext, relayed: bool) -> tuple[str, bool, bool]:
    """Rank 2 has room for 15 rows. Either all tokens go to rank 3, half of them by way of rank 2; or those of
    ranks 1 and 3 go to rank 2, by way of rank 3, and the others to rank 0."""
    buffer = buffer_of(context)
    target = 3 if relayed else 2 if context.rank % 2 else 0
    topk_idx = torch.full((TOKENS, 2), target * EXPERTS // RANKS)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    arguments = good_arguments(buffer) | {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": in_rank,
        "topk_idx": topk_idx,
    }
    arguments["num_worst_tokens"] = 15 if context.rank == 2 else 99
    traffic = buffer.runtime.traffic
    before = (traffic.rows_between_nodes, traffic.rows_within_node)
    try:
        buffer.dispatch(**arguments)
        message = "nothing was raised"
    except InvalidCall as error:
        message = str(error)
    nothing_sent = before == (traffic.rows_between_nodes, traffic.rows_within_node)
    check_case(context, GOOD, buffer)
    return message, nothing_sent, before != (traffic.rows_between_nodes, traffic.rows_within_node)


@pytest.mark.parametrize(
    ("relayed", "sentence"),
    [
        (False, "num_worst_tokens is 15 on rank 2, but 16 rows would arrive there: nothing was sent;"),
        (True, "num_worst_tokens is 15 on rank 2, but it relays 16 tokens to its node: nothing was sent;"),
    ],
)
def test_more_rows_than_the_worst_case_allows(relayed: bool, sentence: str) -> None:
    for message, nothing_sent, works in get_world(RANKS).run(too_many_for_the_worst_case, relayed):
        assert message.startswith(sentence), message
        assert nothing_sent
        assert works


def smallest_rdma_bytes(context: RankContext, num_rdma_bytes: int) -> str:
    """A dispatch and a combine with two rows in each ring between nodes, if there is room for them."""
    with Buffer(context.group, 1 << 20, num_rdma_bytes, device="cpu", ranks_per_node=PER_NODE) as buffer:
        try:
            check_case(context, GOOD, buffer)
        except InvalidCall as error:
            return str(error)
    return "it works"


def test_the_smallest_rdma_bytes() -> None:
    world = get_world(RANKS)
    # 2 channels with 2 nodes; rows of 64 bytes, 8 of meta, 2 ids and weights, 8 more to fill up to 16.
    needed = 2 * 2 * 2 * (2 * 96 + 32 + 16)
    for num_bytes in (0, needed - 128):
        for message in world.run(smallest_rdma_bytes, num_bytes):
            assert message.startswith(f"num_rdma_bytes is {num_bytes}, too small for rings of 2 rows")
            words = "this call needs at least "
            needed = int(message.split(words)[1].split()[0])
            assert "Config.get_rdma_buffer_size_hint(..., ranks_per_node=2) tells a good size" in message
    assert world.run(smallest_rdma_bytes, needed) == ["it works"] * RANKS
    assert world.run(smallest_rdma_bytes, needed - 128)[0].startswith("num_rdma_bytes is")


def make_wrongly(context: RankContext, changes: dict[str, Any], on_rank: int) -> str:
    arguments: dict[str, Any] = {"num_rdma_bytes": 1 << 20, "device": "cpu", "ranks_per_node": PER_NODE}
    if context.rank == on_rank or on_rank < 0:
        arguments |= changes
    try:
        Buffer(context.group, 1 << 20, **arguments).destroy()
    except AnyEPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks_per_node": 3}, "InvalidCall: 4 ranks do not fill nodes of 3 evenly"),
        ({"ranks_per_node": 0}, "InvalidCall: ranks_per_node is 0: it must be at least 1"),
        ({"network": "foo"}, "InvalidCall: network is 'foo': it must be 'nixl' or 'loopback', or left out"),
        ({"num_rdma_bytes": 100}, "InvalidCall: num_rdma_bytes is 100: it must be a multiple of 128"),
        ({"network": "loopback"}, "nothing was raised"),
    ],
)
def test_a_buffer_that_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    for message in get_world(RANKS).run(make_wrongly, changes, -1):
        assert message.startswith(sentence)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks_per_node": 1}, "ranks_per_node: 2 on ranks 0, 1, 2; 1 on rank 3"),
        (
            {"network": "loopback"},
            "network: none on ranks 0, 1, 2; loopback on rank 3",
        ),
        (
            {"num_rdma_bytes": 1 << 19},
            "num_rdma_bytes: 1 MiB on ranks 0, 1, 2; 512 KiB on",
        ),
    ],
)
def test_ranks_that_want_different_buffers(changes: dict[str, Any], sentence: str) -> None:
    for message in get_world(RANKS).run(make_wrongly, changes, RANKS - 1):
        assert message.startswith(f"Disagreement: the ranks disagree about {sentence}")


def by_loopback(context: RankContext) -> None:
    buffer = buffer_for(context, None, ranks_per_node=PER_NODE, network="loopback")
    check_case(context, GOOD, buffer)


def test_loopback_is_what_virtual_nodes_use_anyway() -> None:
    get_world(RANKS).run(by_loopback)
