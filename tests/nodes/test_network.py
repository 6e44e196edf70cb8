"""Normal mode between hosts that a real network joins: two network namespaces, two ranks in each.

Its results are compared in `tests/normal/test_oracle.py`, its faults are in `tests/faults/test_normal.py`.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from anyep import AnyEPError, InvalidCall
from anyep.api.buffer import Buffer
from tests.support.cases import Case, buffer_for, check_case, delays
from tests.support.faults import case_for
from tests.support.places import Place
from tests.support.world import RankContext

HOSTS = Place("cpu", 4, num_nodes=2, hosts=True)
pytestmark = pytest.mark.xdist_group("hosts")


# A wrong call


GOOD = Case(tokens=(6, 0, 3, 9), ranks_per_node=2, network="nixl")


def kept_buffer(context: RankContext) -> Buffer:
    return buffer_for(context, None, ranks_per_node=2, network="nixl")


def refuse_on(context: RankContext, wrong_rank: int) -> list[str]:
    """Twice: in a dispatch and in a combine. Then a right pair."""
    buffer = kept_buffer(context)
    topk_idx = torch.arange(8).view(4, 2)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 8)
    layout = (per_rank, per_node, in_rank, per_expert)
    recv, *_, handle, _ = buffer.dispatch(torch.zeros(4, 16), None, *layout)
    assert isinstance(recv, torch.Tensor)
    assert handle is not None
    is_wrong = context.rank == wrong_rank
    messages = []
    for call in (
        lambda: buffer.dispatch(torch.zeros(4, 4 if not is_wrong else 3), None, *layout),
        lambda: buffer.combine(recv[:-1] if is_wrong else recv, handle),
    ):
        try:
            call()
            messages.append("nothing was raised")
        except AnyEPError as error:
            messages.append(f"{type(error).__name__}: {error}")
    check_case(context, GOOD, buffer)
    return messages


@pytest.mark.parametrize("wrong_rank", [0, 3])
def test_a_refused_call(wrong_rank: int) -> None:
    for rank, messages in enumerate(HOSTS.world().run(refuse_on, wrong_rank)):
        sentences = (
            "a row of 12 bytes is no multiple of 16",
            "x has 3 rows, but the handle's dispatch gave 4",
        )
        for message, sentence, function in zip(messages, sentences, ("dispatch", "combine"), strict=True):
            if rank == wrong_rank:
                assert message.startswith(f"InvalidCall: {sentence}")
            else:
                assert message.startswith(f"Disagreement: rank {wrong_rank} refused its {function} (call ")
                assert sentence in message


def too_many_for_the_worst_case(context: RankContext) -> str:
    """All tokens go to rank 3, half of them by way of rank 2, which has room for 3."""
    buffer = kept_buffer(context)
    topk_idx = torch.full((8, 1), 3)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 4)
    try:
        buffer.dispatch(
            torch.zeros(8, 16),
            None,
            per_rank,
            per_node,
            in_rank,
            per_expert,
            topk_idx,
            torch.ones(8, 1),
            num_worst_tokens=3 if context.rank == 2 else 99,
        )
        message = "nothing was raised"
    except InvalidCall as error:
        message = str(error)
    check_case(context, GOOD, buffer)
    return message


def test_more_rows_than_the_worst_case_allows() -> None:
    for message in HOSTS.world().run(too_many_for_the_worst_case):
        assert message.startswith("num_worst_tokens is 3 on rank 2, but it relays 16 tokens to its node")


def status_while_one_is_idle(context: RankContext) -> list[str]:
    """Rank 0 looks while all others wait for its notify message."""
    buffer = kept_buffer(context)
    check_case(context, GOOD, buffer)
    status = []
    if context.rank == 0:
        # Heartbeats, which come twice a second, say it.
        deadline = time.monotonic() + 30
        while True:
            status = [str(rank) for rank in buffer.status()]
            has_come = all("phase notify" in rank and "waiting for rank 0" in rank for rank in status[1:])
            if has_come or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    check_case(context, GOOD, buffer)
    return status


def test_status_shows_the_ranks_of_other_hosts() -> None:
    status = HOSTS.world().run(status_while_one_is_idle)[0]
    assert re.match(r"rank 0 \(pid \d+\) is idle for \d+\.\d s; its last call was combine", status[0])
    for rank in range(1, HOSTS.num_ranks):
        pid = HOSTS.world().pids[rank]
        assert re.match(
            rf"rank {rank} \(pid {pid}\) is in dispatch \(call \d+\), phase notify, for \d+\.\d s,"
            rf" waiting for rank 0",
            status[rank],
        ), status


# A Buffer detects which ranks share its node, and how it reaches the others


def call_across(context: RankContext, ranks_per_node: int | None, path: Any) -> tuple[int, ...]:
    """The ranks that are reached over the network, when some calls were right."""
    with Buffer(
        context.group,
        1 << 20,
        1 << 20,
        device="cpu",
        num_window_bytes=0 if path == "ring" else None,
        ranks_per_node=ranks_per_node,
    ) as buffer:
        transport = buffer.runtime.control.transport
        for seed in range(4):
            case = replace(case_for(HOSTS, path), ranks_per_node=ranks_per_node or 2, seed=seed)
            buffer.runtime.control.between_steps = delays(seed, context.rank)
            check_case(context, case, buffer)
        return tuple(transport.ranks)


@pytest.mark.parametrize(
    ("ranks_per_node", "path"),
    [
        (None, "ring"),
        (1, "window"),
        pytest.param(None, "window", marks=pytest.mark.slow),
        pytest.param(2, "window", marks=pytest.mark.slow),
        pytest.param(2, "ring", marks=pytest.mark.slow),
        pytest.param(1, "ring", marks=pytest.mark.slow),
    ],
)
def test_what_is_on_another_host_is_reached_by_network(ranks_per_node: int | None, path: str) -> None:
    """With nodes of one rank, there are two on each host: memory joins these, the network the others."""
    assert HOSTS.world().run(call_across, ranks_per_node, path) == [(2, 3), (2, 3), (0, 1), (0, 1)]


def make_wrongly(context: RankContext, changes: dict[str, Any]) -> str:
    try:
        Buffer(context.group, 1 << 20, 1 << 20, device="cpu", **changes).destroy()
    except AnyEPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"network": "loopback"},
            "InvalidCall: network is 'loopback', but the ranks are on 2 hosts: leave it",
        ),
        ({"ranks_per_node": 4}, "InvalidCall: ranks_per_node is 4, but host 'anyep-host-0 "),
    ],
)
def test_a_buffer_that_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    for message in HOSTS.world().run(make_wrongly, changes):
        assert message.startswith(sentence)
