"""Normal mode between hosts that a real network joins: two network namespaces, two ranks in each."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from anyep import AnyEPError, BufferBroken, Config, InvalidCall
from anyep.buffer import Buffer
from anyep.modes.status import Phase
from tests.layers.test_nn import TOKENS, check_decode, check_layer, num_nodes
from tests.nodes.test_internode import REAL_SIZE
from tests.support.cases import Case, buffer_for, check_case, delays, run_case
from tests.support.namespaces import TwoHosts
from tests.support.strategies import node_cases
from tests.support.world import RankContext, RankDied

NUM_EXAMPLES = 40
NUM_RANKS = 4
TIMEOUT_S = 2
DISPATCH, CACHED, COMBINE = 1, 2, 3
"""The first calls after those of `make_buffer`."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts(ranks_per_host=2) as hosts:
        yield hosts


def test_any_case(hosts: TwoHosts) -> None:
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(node_cases(2, 2))
    def check(case: Case) -> None:
        hosts.run(run_case, replace(case, network="nixl"), timeout=100)

    check()


@pytest.mark.parametrize("num_window_bytes", [None, 0])
def test_rows_of_a_real_size(hosts: TwoHosts, num_window_bytes: int | None) -> None:
    hosts.run(run_case, replace(REAL_SIZE, num_window_bytes=num_window_bytes, network="nixl"))


def test_a_layer(hosts: TwoHosts) -> None:
    """Nobody says how many ranks a host has."""
    hosts.run(check_layer, 2, 1)
    assert hosts.run(num_nodes) == [2] * NUM_RANKS
    assert hosts.run(check_decode) == list(TOKENS)


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
def test_a_refused_call(hosts: TwoHosts, wrong_rank: int) -> None:
    for rank, messages in enumerate(hosts.run(refuse_on, wrong_rank)):
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


def test_more_rows_than_the_worst_case_allows(hosts: TwoHosts) -> None:
    for message in hosts.run(too_many_for_the_worst_case):
        assert message.startswith("num_worst_tokens is 3 on rank 2, but it relays 16 tokens to its node")


def status_while_one_is_idle(context: RankContext) -> list[str]:
    """Rank 0 looks while all others wait for its letter."""
    buffer = kept_buffer(context)
    check_case(context, GOOD, buffer)
    status = []
    if context.rank == 0:
        time.sleep(1.5)  # heartbeats come twice a second
        status = [str(rank) for rank in buffer.status()]
    check_case(context, GOOD, buffer)
    return status


def test_status_shows_the_ranks_of_other_hosts(hosts: TwoHosts) -> None:
    status = hosts.run(status_while_one_is_idle)[0]
    assert re.match(r"rank 0 \(pid \d+\) is idle for [12]\.\d s; its last call was combine", status[0])
    for rank in range(1, NUM_RANKS):
        pid = hosts.pids[rank]
        assert re.match(
            rf"rank {rank} \(pid {pid}\) is in dispatch \(call \d+\), phase notify, for [012]\.\d s,"
            rf" waiting for rank 0",
            status[rank],
        ), status


def leave(context: RankContext) -> str:
    """Rank 3 destroys its Buffer; the others wait for it."""
    buffer = Buffer(context.group, 1 << 20, 1 << 20, device="cpu", ranks_per_node=2, network="nixl")
    case = replace(GOOD, config=Config(4, 1, 2, 1, 2))
    check_case(context, case, buffer)
    if context.rank == 3:
        buffer.destroy()
    try:
        check_case(context, case, buffer)
        message = "nothing was raised"
    except AnyEPError as error:
        message = f"{type(error).__name__}: {error}"
    buffer.destroy()
    return message


def test_a_rank_that_destroyed_its_buffer(hosts: TwoHosts) -> None:
    started = time.monotonic()
    *outcomes, last = hosts.run(leave)
    assert time.monotonic() - started < 20
    assert last == "BufferBroken: this Buffer was destroyed: make a new one"
    for outcome in outcomes:
        assert outcome.startswith("PeerLost: ")
        assert f"rank 3 (pid {hosts.pids[3]}) destroyed its Buffer while rank" in outcome


# Failures


@dataclass(frozen=True)
class Fault:
    """What happens to a rank, in which of its calls and in which phase."""

    rank: int
    call: int
    phase: str
    what: str = "kill"
    path: str = "window"


@dataclass(frozen=True)
class Outcome:
    """How a rank's calls ended: the last of them, how long it was in its phase, and when."""

    kind: str
    message: str
    seconds: float
    at: float
    later: str
    status: list[str]


def make_buffer(context: RankContext, path: str, timeout_s: int) -> None:
    os.environ["ANYEP_TIMEOUT_S"] = str(timeout_s)
    context.keep["buffer"] = buffer = Buffer(
        context.group,
        1 << 20,
        1 << 20,
        device="cpu",
        num_window_bytes=0 if path == "ring" else None,
        ranks_per_node=2,
        network="nixl",
    )
    check_case(context, case_for(path), buffer)


def case_for(path: str) -> Case:
    """With rings, far more rows than they hold: whoever is missing is missed."""
    return Case(
        tokens=(40,) * NUM_RANKS,
        num_topk=4,
        config=Config(4, 1, 2, 1, 2),
        num_window_bytes=0 if path == "ring" else None,
        ranks_per_node=2,
    )


def call_until_it_fails(context: RankContext, path: str, fault: Fault | None = None) -> Outcome:
    """Dispatches, cached dispatches and combines, over and over."""
    buffer = context.keep["buffer"]
    struck = [time.monotonic()]

    def strike(call: Any, phase: Phase) -> None:
        struck[0] = time.monotonic()
        if fault is None or context.rank != fault.rank:
            return
        if (call.number - COMBINE, phase.name.lower()) != (fault.call, fault.phase):
            return
        if fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.what == "raise":
            raise ValueError("the experts are on fire")
        elif fault.what == "sleep":
            time.sleep(2 * TIMEOUT_S)

    buffer.runtime.conversation.between_steps = strike
    try:
        while True:
            check_case(context, case_for(path), buffer)
    except Exception as error:
        now = time.monotonic()
        try:
            check_case(context, case_for(path), buffer)
            later = "worked"
        except AnyEPError as second:
            later = type(second).__name__
        status = [str(rank) for rank in buffer.status()]
        buffer.destroy()
        return Outcome(type(error).__name__, str(error), now - struck[0], now, later, status)


@pytest.mark.parametrize("path", ["window", "ring"])
def test_a_cut_link(path: str) -> None:
    with TwoHosts(ranks_per_host=2) as hosts, ThreadPoolExecutor(1) as pool:
        hosts.run(make_buffer, path, TIMEOUT_S)
        calls = pool.submit(hosts.gather, call_until_it_fails, path)
        time.sleep(1)
        assert not calls.done()
        hosts.cut()
        cut = time.monotonic()
        outcomes = calls.result()
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == "PeerLost", outcome
        # A call that had all it needed may have ended after the cut, and have waited for what it sent.
        assert outcome.at - cut < 2 * TIMEOUT_S + 2
        others = (2, 3) if rank < 2 else (0, 1)
        out_of_reach = re.search(
            r"ranks? (\d)(?:, (\d))? (?:is|are) out of reach: rank (\d) waited", outcome.message
        )
        assert out_of_reach is not None, outcome.message
        named = {int(name) for name in out_of_reach.group(1, 2) if name is not None}
        assert named <= set(others)
        # It is this rank that waited in vain, or the other one of its host.
        assert int(out_of_reach.group(3)) not in others
        assert "Is the network between the hosts up" in outcome.message
        assert outcome.later == BufferBroken.__name__


@pytest.mark.parametrize(
    "fault",
    [Fault(3, DISPATCH, "notify"), Fault(2, CACHED, "receive"), Fault(2, COMBINE, "rings", path="ring")],
    ids=str,
)
def test_a_killed_rank(fault: Fault) -> None:
    with TwoHosts(ranks_per_host=2) as hosts:
        pids = hosts.pids
        hosts.run(make_buffer, fault.path, 100)
        outcomes = hosts.gather(call_until_it_fails, fault.path, fault, timeout=60)
    assert isinstance(outcomes[fault.rank], RankDied)
    for rank, outcome in enumerate(outcomes):
        if rank == fault.rank:
            continue
        assert outcome.kind == "PeerLost", outcome
        # NIXL notices that a connection is gone, or a rank of the other host says it.
        assert outcome.seconds < 10
        dead = rf"rank {fault.rank} (is out of reach|\(pid {pids[fault.rank]}\) died while)"
        assert re.search(dead, outcome.message), outcome.message
        assert outcome.later == BufferBroken.__name__
        if rank >= 2:
            assert outcome.status[fault.rank] == f"rank {fault.rank} (pid {pids[fault.rank]}) is dead"


def test_a_rank_that_raises() -> None:
    fault = Fault(3, CACHED, "rings", "raise")
    with TwoHosts(ranks_per_host=2) as hosts:
        hosts.run(make_buffer, fault.path, 100)
        outcomes = hosts.gather(call_until_it_fails, fault.path, fault, timeout=60)
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == ("ValueError" if rank == 3 else "PeerLost")
        assert "the experts are on fire" in outcome.message
        assert outcome.seconds < 10
        assert outcome.later == BufferBroken.__name__


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (Fault(3, DISPATCH, "notify", "sleep"), "letter"),
        (Fault(2, COMBINE, "rings", "sleep", "ring"), "rows|room in its ring|room in its network ring"),
    ],
    ids=str,
)
def test_a_slow_rank(fault: Fault, what: str) -> None:
    """It says that it lives all the time: it is slow, and not out of reach."""
    with TwoHosts(ranks_per_host=2) as hosts:
        hosts.run(make_buffer, fault.path, TIMEOUT_S)
        outcomes = hosts.gather(call_until_it_fails, fault.path, fault, timeout=60)
    late = [outcome for outcome in outcomes if outcome.kind == "WaitTimeout"]
    assert late, outcomes
    pattern = (
        rf"rank \d waited {TIMEOUT_S} s for the ({what}) of rank (\d).* in .*\(call {fault.call + COMBINE}\),"
        rf" phase \w+.*: counter \d+ seen, \d+ expected\. What rank \2 said last: rank \2 \(pid \d+\) is in"
        rf" .*\(call {fault.call + COMBINE}\), phase \w+, for [1-9]\.\d s.*ANYEP_TIMEOUT_S"
    )
    for outcome in late:
        assert re.match(pattern, outcome.message), outcome.message
        assert re.search(rf"(of|waiting for) rank {fault.rank}\b", outcome.message), outcome.message
    # The slow rank hears, even over the wire and long after, that a peer gave up.
    assert outcomes[fault.rank].kind == "PeerLost"
    assert f"waited {TIMEOUT_S} s for" in outcomes[fault.rank].message


def finish_and_exit(context: RankContext, path: str) -> float:
    """Rank 0 leaves for good as soon as its own last call is done; the others are slower."""
    make_buffer(context, path, 100)
    buffer = context.keep["buffer"]
    if context.rank:
        buffer.runtime.conversation.between_steps = lambda call, phase: time.sleep(0.02)
    for _ in range(2):
        check_case(context, case_for(path), buffer)
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


@pytest.mark.parametrize("path", ["window", "ring"])
def test_a_rank_that_is_done_may_die(path: str) -> None:
    with TwoHosts(ranks_per_host=2) as hosts:
        outcomes = hosts.gather(finish_and_exit, path)
    assert isinstance(outcomes[0], RankDied)
    assert outcomes[1:] == [1.0] * (NUM_RANKS - 1)


# Hosts that have names of their own: a Buffer finds out for itself what is a node, and whom it reaches how


CLONE_NEWUTS = 0x04000000


def name_the_host(context: RankContext) -> None:
    """From now on this process is on another host than those with another name."""
    assert ctypes.CDLL(None).unshare(CLONE_NEWUTS) == 0
    socket.sethostname(f"host-{context.rank // 2}")


@pytest.fixture(scope="module")
def named_hosts() -> Iterator[TwoHosts]:
    with TwoHosts(ranks_per_host=2) as hosts:
        hosts.run(name_the_host)
        yield hosts


def call_across(context: RankContext, ranks_per_node: int | None, path: str) -> tuple[int, ...]:
    """The ranks that are reached over the network, when some calls were right."""
    with Buffer(
        context.group,
        1 << 20,
        1 << 20,
        device="cpu",
        num_window_bytes=0 if path == "ring" else None,
        ranks_per_node=ranks_per_node,
    ) as buffer:
        wire = buffer.runtime.conversation.wire
        for seed in range(4):
            case = replace(case_for(path), ranks_per_node=ranks_per_node or 2, seed=seed, delay_seed=seed)
            buffer.runtime.conversation.between_steps = delays(seed, context.rank)
            check_case(context, case, buffer)
        return tuple(wire.ranks)


@pytest.mark.parametrize("path", ["window", "ring"])
@pytest.mark.parametrize("ranks_per_node", [None, 2, 1])
def test_what_is_on_another_host_is_reached_by_network(
    named_hosts: TwoHosts, ranks_per_node: int | None, path: str
) -> None:
    """With nodes of one rank, there are two on each host: memory joins these, the network the others."""
    assert named_hosts.run(call_across, ranks_per_node, path) == [(2, 3), (2, 3), (0, 1), (0, 1)]


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
        ({"ranks_per_node": 4}, "InvalidCall: ranks_per_node is 4, but host 'host-0 "),
    ],
)
def test_a_buffer_that_cannot_be(named_hosts: TwoHosts, changes: dict[str, Any], sentence: str) -> None:
    for message in named_hosts.run(make_wrongly, changes):
        assert message.startswith(sentence)
