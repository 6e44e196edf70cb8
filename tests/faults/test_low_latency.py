"""Low-latency calls while ranks die, sleep or are masked: the others hear of it, or go on without them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anyep import PeerLost
from anyep.buffer import Buffer
from anyep.modes.conversation import Stall
from anyep.modes.letters import Kind
from anyep.modes.status import Phase
from tests.support import low_latency_oracle, oracle
from tests.support.low_latency_cases import RDMA_BYTES, Case, check_case, inputs_of
from tests.support.patience import patience_s
from tests.support.world import RankContext, RankDied, World

NUM_RANKS = 4
PAIRS = 6
TIMEOUT_S = 240.0
"""For tests in which deadlines pass: these are long on a machine that is busy."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank, in which of its calls (odd: dispatch, even: combine), in which phase."""

    rank: int
    call: int
    phase: str
    what: str = "kill"


@dataclass(frozen=True)
class Survival:
    """What a rank saw: its mask at the end, how long its calls took, and what was raised."""

    mask: list[int]
    seconds: list[float]
    timeout_s: float
    raised: str = ""


@pytest.fixture
def world() -> Iterator[World]:
    """Ranks of its own: what happens to them is nobody else's business."""
    with World(NUM_RANKS) as fresh:
        yield fresh


def new_buffer(context: RankContext, enable_shrink: bool, timeout_s: float = 100) -> Buffer:
    os.environ["ANYEP_TIMEOUT_S"] = str(timeout_s)
    return Buffer(
        context.group, 0, RDMA_BYTES, low_latency_mode=True, enable_shrink=enable_shrink, device="cpu"
    )


def patient_s(context: RankContext, least_s: float) -> float:
    """How long ranks wait for each other where one of them is to be late: the others never are."""
    case = Case(tokens=(5,) * context.num_ranks, hidden=64, num_topk=2 * context.num_ranks)
    with new_buffer(context, True) as buffer:
        return patience_s(context, lambda: check_case(context.rank, case, buffer), least_s)


def strike_at(buffer: Buffer, rank: int, faults: tuple[Fault, ...], nap_s: float = 2.0) -> None:
    """Let the faults of this rank happen."""
    mine = {(fault.call, fault.phase): fault.what for fault in faults if fault.rank == rank}

    def strike(call: Any, phase: Phase) -> None:
        what = mine.pop((call.number, phase.name.lower()), "")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "sleep":
            time.sleep(nap_s)

    assert buffer.runtime is not None
    buffer.runtime.conversation.between_steps = strike


def masked_by(buffer: Buffer) -> list[int]:
    mask = torch.full((buffer.group_size,), 7, dtype=torch.int32, device="cpu")
    buffer.low_latency_query_mask_buffer(mask)
    return mask.tolist()


def mask_for_all(context: RankContext, buffer: Buffer, rank: int) -> None:
    """One rank masks another; when this returns, all know."""
    torch.distributed.barrier(context.group)
    if context.rank == 0:
        buffer.low_latency_update_mask_buffer(rank, mask=True)
    torch.distributed.barrier(context.group)
    assert masked_by(buffer)[rank]


# Without masks


def call_until_it_fails(context: RankContext, faults: tuple[Fault, ...]) -> tuple[str, str]:
    is_timed = any(fault.what == "sleep" for fault in faults)
    timeout_s = patient_s(context, 0.6) if is_timed else 100
    buffer = new_buffer(context, False, timeout_s)
    strike_at(buffer, context.rank, faults, nap_s=3 * timeout_s)
    messages = []
    for _ in range(2):
        try:
            for seed in range(PAIRS):
                case = Case(tokens=(4,) * context.num_ranks, hidden=64, seed=seed)
                check_case(context.rank, case, buffer)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages[0], messages[1]


KILLS = [
    Fault(0, 1, "send"),
    Fault(1, 1, "receive"),
    Fault(2, 2, "send"),
    Fault(3, 4, "receive"),
    Fault(1, 3, "acknowledge"),
    Fault(0, 6, "acknowledge"),
]


@pytest.mark.parametrize("fault", KILLS, ids=str)
def test_a_killed_rank(world: World, fault: Fault) -> None:
    pids = world.pids
    outcomes = world.gather(call_until_it_fails, (fault,))
    assert isinstance(outcomes[fault.rank], RankDied)
    for rank, outcome in enumerate(outcomes):
        if rank != fault.rank:
            message, later = outcome
            assert message.startswith("PeerLost: ")
            assert f"rank {fault.rank} (pid {pids[fault.rank]}) died while rank" in message
            assert later.startswith("BufferBroken: ")


def test_a_slow_rank(world: World) -> None:
    outcomes = world.gather(call_until_it_fails, (Fault(1, 3, "send", "sleep"),), timeout=TIMEOUT_S)
    late = [message for message, _ in outcomes if message.startswith("WaitTimeout")]
    assert late
    for message in late:
        pattern = (
            r"WaitTimeout: rank \d waited .* s for the note of rank 1.* in low-latency dispatch \(call 3\),"
            r" phase receive: counter 1 seen, 3 expected\. What rank 1 said last: rank 1 \(pid \d+\) is in"
            r" low-latency dispatch \(call 3\), phase send, for .* s.*ANYEP_TIMEOUT_S"
        )
        assert re.match(pattern, message), message


def forget_a_hook(context: RankContext) -> str:
    timeout_s = patient_s(context, 0.5)
    buffer = new_buffer(context, False, timeout_s)
    case = Case(tokens=(4,) * context.num_ranks, hidden=64)
    given = inputs_of(case)[context.rank]

    def dispatch() -> Any:
        return buffer.low_latency_dispatch(
            given.x, given.topk_idx, case.max_tokens, case.num_experts, return_recv_hook=True, use_fp8=False
        )[-1]

    hooks = [dispatch(), dispatch()]
    if context.rank == 1:
        time.sleep(3 * timeout_s)
        return "slept"
    for hook in hooks:
        hook()
    try:
        dispatch()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_rank_that_does_not_call_its_hook(world: World) -> None:
    outcomes = world.run(forget_a_hook, timeout=TIMEOUT_S)
    blamed = [outcome for outcome in outcomes if "for the receipt of call 1 (by its hook" in outcome]
    assert blamed
    assert all("of rank 1" in outcome for outcome in blamed)


# With masks


def echo(buffer: Buffer, case: Case, rank: int, may_be_absent: frozenset[int]) -> frozenset[int]:
    """Dispatch and combine with experts that return what they get; nothing may come from absent ranks.

    Each of `may_be_absent` may be there or not, in each of the two calls; returns who was not there.
    """
    inputs = inputs_of(case)
    given = inputs[rank]
    received, counts, handle, _, _ = buffer.low_latency_dispatch(
        given.x, given.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
    )
    absent = set()
    for source in may_be_absent:
        if not any(int(handle[1][local, source]) & 0xFFFFFFFF for local in range(case.local_experts)):
            absent.add(source)
    for local in range(case.local_experts):
        expected = low_latency_oracle.rows_of_expert(
            inputs, rank * case.local_experts + local, frozenset(absent)
        )
        assert int(counts[local]) == len(expected.x)
        assert oracle.same_bits(received[local, : len(expected.x)], expected.x)
    combined, _, _ = buffer.low_latency_combine(received, given.topk_idx, given.topk_weights, handle)
    sources = [low_latency_oracle.rows_of_expert(inputs, expert) for expert in range(case.num_experts)]
    rows = [source.x for source in sources]
    for missing in subsets(may_be_absent):
        experts = frozenset(e for e in range(case.num_experts) if e // case.local_experts in missing)
        if oracle.same_bits(combined, low_latency_oracle.combine(given, rank, rows, sources, experts)):
            return frozenset(absent) | missing
    raise AssertionError("the sums are right for no set of absent ranks")


def subsets(ranks: frozenset[int]) -> list[frozenset[int]]:
    result = [frozenset[int]()]
    for rank in sorted(ranks):
        result += [known | {rank} for known in result]
    return result


def go_on(context: RankContext, faults: tuple[Fault, ...]) -> Survival:
    """Pairs of calls; after a fault has been noticed, whoever it struck must be absent for good."""
    is_timed = any(fault.what == "sleep" for fault in faults)
    timeout_s = patient_s(context, 0.7) if is_timed else 20
    buffer = new_buffer(context, True, timeout_s)
    strike_at(buffer, context.rank, faults, nap_s=3 * timeout_s)
    struck = frozenset(fault.rank for fault in faults)
    known = frozenset[int]()
    seconds = []
    for seed in range(PAIRS):
        case = Case(
            tokens=(5,) * context.num_ranks,
            hidden=64,
            # Every rank has rows for every expert, so that absence shows.
            num_topk=2 * context.num_ranks,
            local_experts=2,
            seed=seed,
        )
        before = frozenset(rank for rank, is_masked in enumerate(masked_by(buffer)) if is_masked)
        assert known <= before
        known = before
        started = time.monotonic()
        try:
            absent = echo(buffer, case, context.rank, struck)
        except PeerLost as error:
            return Survival(masked_by(buffer), seconds, timeout_s, str(error))
        seconds.append(time.monotonic() - started)
        assert known <= absent
        assert absent <= struck
    return Survival(masked_by(buffer), seconds, timeout_s)


PLANS = [
    *((fault,) for fault in KILLS),
    (Fault(0, 3, "send"), Fault(2, 3, "send")),
    (Fault(1, 2, "receive"), Fault(3, 5, "send")),
    (Fault(0, 2, "send"), Fault(1, 4, "receive"), Fault(3, 7, "acknowledge")),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_others_go_on_without_killed_ranks(world: World, plan: tuple[Fault, ...]) -> None:
    outcomes = world.gather(go_on, plan)
    dead = {fault.rank for fault in plan}
    expected = [int(rank in dead) for rank in range(NUM_RANKS)]
    for rank, outcome in enumerate(outcomes):
        if rank in dead:
            assert isinstance(outcome, RankDied)
        else:
            assert isinstance(outcome, Survival), outcome
            assert outcome.mask == expected
            assert not outcome.raised
            # Noticed, not timed out.
            assert max(outcome.seconds) < outcome.timeout_s


@pytest.mark.parametrize(
    "plan",
    [
        (Fault(2, 3, "send", "sleep"),),
        (Fault(1, 4, "receive", "sleep"),),
        (Fault(0, 5, "acknowledge", "sleep"),),
        (Fault(1, 2, "send", "sleep"), Fault(3, 2, "send")),
    ],
    ids=str,
)
def test_the_others_go_on_without_a_slow_rank(world: World, plan: tuple[Fault, ...]) -> None:
    outcomes = world.gather(go_on, plan, timeout=TIMEOUT_S)
    struck = {fault.rank: fault.what for fault in plan}
    expected = [int(rank in struck) for rank in range(NUM_RANKS)]
    for rank, outcome in enumerate(outcomes):
        if struck.get(rank) == "kill":
            assert isinstance(outcome, RankDied)
            continue
        assert isinstance(outcome, Survival), outcome
        assert outcome.mask == expected
        if rank in struck:
            assert f"the other ranks go on without rank {rank}" in outcome.raised
            assert f"low_latency_update_mask_buffer({rank}, mask=False)" in outcome.raised
        else:
            assert not outcome.raised
            # One deadline, or two where the sleeper seemed to wait; none when it is masked.
            assert 0.7 * outcome.timeout_s < max(outcome.seconds) < 3 * outcome.timeout_s
            assert outcome.seconds[-1] < outcome.timeout_s


def come_back(context: RankContext, by_cleaning: bool) -> list[list[int]]:
    """Rank 2 does not come and is masked, the others go on; then all take it back. Twice."""
    buffer = new_buffer(context, True, patient_s(context, 0.5))
    case = Case(tokens=(5, 0, 7, 3), hidden=128, travel="fp8")
    masks = []
    for turn in range(2):
        check_case(context.rank, case, buffer)
        if context.rank != 2:
            for _ in range(turn + 2):
                check_case(context.rank, case, buffer, frozenset([2]))
        torch.distributed.barrier(context.group)
        if context.rank == 2:
            with pytest.raises(PeerLost, match="go on without rank 2"):
                check_case(context.rank, case, buffer)
        masks.append(masked_by(buffer))
        torch.distributed.barrier(context.group)
        if by_cleaning:
            buffer.low_latency_clean_mask_buffer()
        else:
            buffer.low_latency_update_mask_buffer(2)
        masks.append(masked_by(buffer))
        for seed in range(4):
            check_case(context.rank, Case((5, 0, 7, 3), hidden=128, travel="fp8", seed=seed), buffer)
    return masks


@pytest.mark.parametrize("by_cleaning", [False, True])
def test_a_rank_comes_back(world: World, by_cleaning: bool) -> None:
    for masks in world.run(come_back, by_cleaning, timeout=TIMEOUT_S):
        assert masks == [[0, 0, 1, 0], [0, 0, 0, 0]] * 2


def mask_by_hand(context: RankContext) -> str:
    buffer = new_buffer(context, True)
    case = Case(tokens=(5,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    torch.distributed.barrier(context.group)
    if context.rank == 0:
        buffer.low_latency_update_mask_buffer(3, mask=True)
        buffer.low_latency_update_mask_buffer(3, mask=True)
    torch.distributed.barrier(context.group)
    assert masked_by(buffer) == [0, 0, 0, 1]
    if context.rank == 3:
        try:
            check_case(context.rank, case, buffer)
        except PeerLost as error:
            message = str(error)
    else:
        check_case(context.rank, case, buffer, frozenset([3]))
        message = ""
    torch.distributed.barrier(context.group)
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_clean_mask_buffer()
    check_case(context.rank, case, buffer)
    return message


def test_masks_set_by_hand(world: World) -> None:
    outcomes = world.run(mask_by_hand)
    assert outcomes[:3] == ["", "", ""]
    assert "go on without rank 3" in outcomes[3]


def one_dead_one_back(context: RankContext) -> list[int]:
    """Rank 1 is killed and rank 2 masked; cleaning brings rank 2 back, and rank 1 stays masked."""
    buffer = new_buffer(context, True, 20)
    case = Case(tokens=(5,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    torch.distributed.barrier(context.group)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == 0:
        buffer.low_latency_update_mask_buffer(2, mask=True)
    while not masked_by(buffer)[2]:
        time.sleep(0.01)
    if context.rank != 2:
        # Rank 1 is found dead in this call; rank 2 takes no part in it.
        echo(buffer, case, context.rank, frozenset([1, 2]))
    while not masked_by(buffer)[1]:
        time.sleep(0.01)
    buffer.low_latency_clean_mask_buffer()
    check_case(context.rank, case, buffer, frozenset([1]))
    return masked_by(buffer)


def test_a_dead_rank_stays_masked(world: World) -> None:
    outcomes = world.gather(one_dead_one_back)
    assert isinstance(outcomes[1], RankDied)
    for rank in (0, 2, 3):
        assert outcomes[rank] == [0, 1, 0, 0]


def die_while_coming_back(context: RankContext) -> list[int]:
    buffer = new_buffer(context, True, 20)
    case = Case(tokens=(5,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    mask_for_all(context, buffer, 2)
    if context.rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost, match="rank 2 did not come back"):
        buffer.low_latency_update_mask_buffer(2)
    check_case(context.rank, case, buffer, frozenset([2]))
    return masked_by(buffer)


def test_a_rank_that_dies_instead_of_coming_back(world: World) -> None:
    outcomes = world.gather(die_while_coming_back)
    assert isinstance(outcomes[2], RankDied)
    for rank in (0, 1, 3):
        assert outcomes[rank] == [0, 0, 1, 0]


def send(buffer: Buffer, case: Case, rank: int) -> tuple[Any, Any]:
    """A dispatch by hook; its rows and its hook."""
    given = inputs_of(case)[rank]
    received, *_, hook = buffer.low_latency_dispatch(
        given.x, given.topk_idx, case.max_tokens, case.num_experts, use_fp8=False, return_recv_hook=True
    )
    return received, hook


def unmask_nobody(context: RankContext) -> bool:
    """All but rank 0 have received and clean their masks, of which there are none; rank 0 receives late."""
    buffer = new_buffer(context, True, 20)
    case = Case(tokens=(6,) * context.num_ranks, hidden=64, routing="one rank", local_experts=1, num_topk=1)
    batches = [replace(case, seed=seed) for seed in (1, 2, 3)]
    sent = [send(buffer, batch, context.rank) for batch in batches[:2]]
    if context.rank:
        for _, hook in sent:
            hook()
        buffer.low_latency_clean_mask_buffer()
        send(buffer, batches[2], context.rank)[1]()
        return True
    time.sleep(0.4)
    sent[0][1]()
    expected = low_latency_oracle.rows_of_expert(inputs_of(batches[0]), 0).x
    right = oracle.same_bits(sent[0][0][0, : len(expected)], expected)
    sent[1][1]()
    buffer.low_latency_clean_mask_buffer()
    send(buffer, batches[2], context.rank)[1]()
    return right


def test_unmasking_nobody_changes_nothing(world: World) -> None:
    assert world.run(unmask_nobody) == [True] * NUM_RANKS


def masked_with_a_call_in_flight(context: RankContext) -> str:
    """Rank 2 has sent and not received when it is masked, and does not know; then it is taken back."""
    buffer = new_buffer(context, True)
    case = Case(tokens=(5,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    _, hook = send(buffer, case, context.rank)
    if context.rank != 2:
        hook()
    mask_for_all(context, buffer, 2)
    buffer.low_latency_clean_mask_buffer()
    message = ""
    for seed in range(2):
        check_case(context.rank, Case((5,) * context.num_ranks, hidden=64, seed=seed), buffer)
        if context.rank == 2 and not message:
            try:
                hook()
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
    return message


def test_a_rank_with_a_call_in_flight_comes_back(world: World) -> None:
    outcomes = world.run(masked_with_a_call_in_flight)
    assert outcomes[2].startswith("InvalidCall: low-latency dispatch (call 3) was given up when the other")


def what_is_left_mapped(context: RankContext) -> int:
    buffer = new_buffer(context, True)
    check_case(context.rank, Case(tokens=(5,) * context.num_ranks, hidden=64), buffer)
    buffer.destroy()
    return Path("/proc/self/maps").read_text().count("anyep-heap")


def test_destroy_gives_the_memory_back(world: World) -> None:
    assert world.run(what_is_left_mapped) == [0] * NUM_RANKS


def leave_a_round_early(context: RankContext) -> str:
    """Rank 0 wants rank 2 back, which dies; rank 1 has still to receive what rank 0 sent before."""
    timeout_s = patient_s(context, 1)
    buffer = new_buffer(context, True, timeout_s)
    case = Case(tokens=(3,) * context.num_ranks, hidden=64, routing="one rank", local_experts=1, num_topk=1)
    if context.rank == 0:
        buffer.low_latency_update_mask_buffer(2, mask=True)
    while not masked_by(buffer)[2]:
        time.sleep(0.01)
    torch.distributed.barrier(context.group)
    if context.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    batches = [replace(case, seed=seed) for seed in range(4)]
    sent = [send(buffer, batch, context.rank) for batch in batches[:2]]
    try:
        if context.rank == 1:
            for _, hook in sent:
                hook()
            with pytest.raises(PeerLost, match="rank 2 did not come back"):
                buffer.low_latency_update_mask_buffer(2)
            for batch in batches[2:]:
                send(buffer, batch, context.rank)
            time.sleep(timeout_s)
            return "sent"
        time.sleep(2.5 * timeout_s)
        sent[0][1]()
    except PeerLost as error:
        return str(error)
    expected = low_latency_oracle.rows_of_expert(inputs_of(batches[0]), context.rank, frozenset([2])).x
    return "right" if oracle.same_bits(sent[0][0][0, : len(expected)], expected) else "wrong rows"


def test_a_round_waits_for_all(world: World) -> None:
    for outcome in world.gather(leave_a_round_early, timeout=TIMEOUT_S):
        assert isinstance(outcome, RankDied) or outcome in ("sent", "right") or "go on without" in outcome


def wake_up_after_a_cleaning(context: RankContext) -> str:
    """Rank 2 sleeps in the middle of sending; the others mask it and lay out their slots anew."""
    timeout_s = patient_s(context, 0.5)
    buffer = new_buffer(context, True, timeout_s)
    strike_at(buffer, context.rank, (Fault(2, 1, "send", "sleep"),), nap_s=4 * timeout_s)
    small = Case(tokens=(4,) * context.num_ranks, max_tokens=4, hidden=128, local_experts=1, num_topk=4)
    large = replace(small, hidden=2048)
    try:
        echo(buffer, small, context.rank, frozenset([2]))
    except PeerLost as error:
        return str(error)
    buffer.clean_low_latency_buffer(4, 2048, large.num_experts)
    received, hook = send(buffer, large, context.rank)
    time.sleep(5 * timeout_s)
    hook()
    expected = low_latency_oracle.rows_of_expert(inputs_of(large), context.rank, frozenset([2])).x
    return "right" if oracle.same_bits(received[0, : len(expected)], expected) else "wrong rows"


def test_a_masked_rank_can_do_no_harm(world: World) -> None:
    outcomes = world.run(wake_up_after_a_cleaning, timeout=TIMEOUT_S)
    assert "go on without rank 2" in outcomes.pop(2)
    assert outcomes == ["right"] * 3


def miss_a_cleaning(context: RankContext) -> None:
    """Rank 3 is masked while the others change their sizes, and takes them over when it comes back."""
    buffer = new_buffer(context, True)
    case = Case(tokens=(5,) * context.num_ranks, hidden=64)
    other = Case(tokens=(3,) * context.num_ranks, max_tokens=3, hidden=128, local_experts=3)
    check_case(context.rank, case, buffer)
    mask_for_all(context, buffer, 3)
    if context.rank != 3:
        buffer.clean_low_latency_buffer(other.max_tokens, other.hidden, other.num_experts)
        check_case(context.rank, other, buffer, frozenset([3]))
    torch.distributed.barrier(context.group)
    buffer.low_latency_update_mask_buffer(3)
    for seed in range(3):
        check_case(context.rank, replace(other, seed=seed), buffer)


def test_a_rank_that_missed_a_cleaning(world: World) -> None:
    world.run(miss_a_cleaning)


def ask_too_early(context: RankContext) -> str:
    """Rank 2 is masked and wants to come back before the others want it; later they do."""
    timeout_s = patient_s(context, 1.2)
    buffer = new_buffer(context, True, timeout_s)
    case = Case(tokens=(5,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    mask_for_all(context, buffer, 2)
    message = ""
    if context.rank == 2:
        try:
            buffer.low_latency_update_mask_buffer(2)
        except PeerLost as error:
            message = str(error)
    else:
        for seed in range(40):
            check_case(context.rank, replace(case, seed=seed), buffer, frozenset([2]))
            time.sleep(timeout_s / 20)
    torch.distributed.barrier(context.group)
    if context.rank == 2:
        # Long enough for the others to find what is left of the first try.
        time.sleep(0.2)
    buffer.low_latency_clean_mask_buffer()
    for seed in range(3):
        check_case(context.rank, replace(case, seed=seed), buffer)
    return message


def test_a_masked_rank_that_asks_too_early_masks_nobody(world: World) -> None:
    outcomes = world.run(ask_too_early, timeout=TIMEOUT_S)
    assert "go on without rank 2" in outcomes.pop(2)
    assert outcomes == ["", "", ""]


def want_a_round_alone(context: RankContext, whom: tuple[int, ...]) -> str:
    """Rank 3 waits for a round, unmasked, while the others make calls, and mask it for its silence."""
    timeout_s = patient_s(context, 1.2)
    buffer = new_buffer(context, True, timeout_s)
    case = Case(tokens=(5,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    message = ""
    if context.rank == 3:
        try:
            if len(whom) == context.num_ranks:
                buffer.low_latency_clean_mask_buffer()
            else:
                buffer.low_latency_update_mask_buffer(*whom)
        except PeerLost as error:
            message = str(error)
    else:
        for seed in range(60):
            check_case(context.rank, replace(case, seed=seed), buffer, frozenset([3]))
            time.sleep(timeout_s / 20)
        assert masked_by(buffer) == [0, 0, 0, 1]
    torch.distributed.barrier(context.group)
    buffer.low_latency_clean_mask_buffer()
    for seed in range(3):
        check_case(context.rank, replace(case, seed=seed), buffer)
    return message


@pytest.mark.parametrize("whom", [(2,), (3,), (0, 1, 2, 3)], ids=["another", "itself", "all"])
def test_a_round_that_only_one_rank_wants(world: World, whom: tuple[int, ...]) -> None:
    outcomes = world.run(want_a_round_alone, whom, timeout=TIMEOUT_S)
    assert "go on without rank 3" in outcomes.pop(3)
    assert outcomes == ["", "", ""]


def be_masked_while_it_decides(context: RankContext) -> str:
    """Rank 3 wants a round, and its deadline passes first. The others wait for it in a call, and mask it in
    the very moment when it decides who is late: they are not."""
    timeout_s = patient_s(context, 0.5)
    buffer = new_buffer(context, True, 4 * timeout_s)
    assert buffer.runtime is not None
    assert buffer._low_latency is not None
    conversation, masks = buffer.runtime.conversation, buffer._low_latency.masks
    case = Case(tokens=(5,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    torch.distributed.barrier(context.group)
    message = ""
    if context.rank != 3:
        for seed in range(3):
            check_case(context.rank, replace(case, seed=seed), buffer, frozenset([3]))
    else:
        while any(conversation.whom_it_waits_for(peer) != 3 for peer in range(3)):
            time.sleep(0.001)
        conversation.timeout_s = timeout_s
        adopt = masks.adopt

        def adopt_and_pause() -> None:
            """Nothing is found; but before this rank does anything else, all others have masked it."""
            adopt()
            if any(frame.name == "give_up" for frame in traceback.extract_stack()):
                while any(conversation.whom_it_waits_for(peer) == 3 for peer in range(3)):
                    time.sleep(0.001)

        masks.adopt = adopt_and_pause  # type: ignore[method-assign]
        try:
            buffer.low_latency_update_mask_buffer(2)
        except PeerLost as error:
            message = str(error)
        masks.adopt = adopt  # type: ignore[method-assign]
    torch.distributed.barrier(context.group)
    assert masked_by(buffer) == [0, 0, 0, 1]
    return message


def test_a_rank_that_is_masked_masks_nobody_who_came_in_time(world: World) -> None:
    outcomes = world.run(be_masked_while_it_decides, timeout=TIMEOUT_S)
    assert "go on without rank 3" in outcomes.pop(3)
    assert outcomes == ["", "", ""]


def sleep_through_a_deadline(context: RankContext) -> int:
    """A step finds that something is missing; then this process does not run until long after the deadline.
    Meanwhile it has come: nobody is late."""
    buffer = new_buffer(context, True, 0.2)
    assert buffer.runtime is not None
    conversation = buffer.runtime.conversation
    missing = [1, 1]

    def stalled() -> Stall:
        if not missing:
            time.sleep(0.5)
        return Stall((1 - context.rank % 2,), "something", 0, 1)

    call = conversation.begin(Kind.LOW_LATENCY_DISPATCH)
    conversation.wait_until(call, lambda _: missing.pop() if missing else 0, stalled)
    conversation.end(call)
    torch.distributed.barrier(context.group)
    return len(missing)


def test_who_came_while_this_rank_did_not_run_is_not_late(world: World) -> None:
    assert world.run(sleep_through_a_deadline) == [0] * NUM_RANKS


def come_back_with_other_words(context: RankContext) -> None:
    """Rank 2 asks for itself, the others for all: they mean the same."""
    buffer = new_buffer(context, True)
    case = Case(tokens=(5,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    for turn in range(4):
        mask_for_all(context, buffer, 2)
        # Sometimes it asks first, sometimes they do.
        if (context.rank == 2) == bool(turn % 2):
            time.sleep(0.1)
        if context.rank == 2:
            buffer.low_latency_update_mask_buffer(2)
        else:
            buffer.low_latency_clean_mask_buffer()
        check_case(context.rank, replace(case, seed=turn), buffer)
        assert masked_by(buffer) == [0] * context.num_ranks


def test_a_masked_rank_follows_the_others(world: World) -> None:
    world.run(come_back_with_other_words)


def refuse_to_take_back(context: RankContext, how: str) -> str:
    """One rank's call to take rank 3 back is wrong: the others hear of it at once, and all go on."""
    buffer = new_buffer(context, True, 20)
    case = Case(tokens=(5,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    hook = send(buffer, case, context.rank)[1]
    if context.rank != 1 or how == "a wrong rank":
        hook()
    started = time.monotonic()
    try:
        wrong = how == "a wrong rank" and context.rank == 1
        buffer.low_latency_update_mask_buffer(77 if wrong else 3)
        message = "nothing was raised"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    # At once, and not when the deadline has passed.
    assert time.monotonic() - started < 15
    hook()
    buffer.low_latency_update_mask_buffer(3)
    check_case(context.rank, case, buffer)
    return message


@pytest.mark.parametrize("how", ["a wrong rank", "a call in flight"])
def test_a_round_that_one_rank_refuses(world: World, how: str) -> None:
    outcomes = world.run(refuse_to_take_back, how)
    assert outcomes.pop(1).startswith("InvalidCall: ")
    assert outcomes == ["Disagreement: the ranks disagree about whom to take back: nobody was"] * 3


def live_with_naps(context: RankContext, seed: int, turns: int) -> list[list[int]]:
    """In each turn some ranks sleep somewhere, longer than they are waited for or not; then all come back.

    Who was masked in each turn, as this rank saw it in the end.
    """
    common, own = random.Random(seed), random.Random(seed * 10 + context.rank)
    timeout_s = patient_s(context, 0.8)
    buffer = new_buffer(context, True, timeout_s)
    assert buffer.runtime is not None
    conversation = buffer.runtime.conversation
    num_ranks = context.num_ranks
    masks = []
    for _ in range(turns):
        sleepers = {rank: common.randint(1, 30) for rank in common.sample(range(num_ranks), 2)}
        nap_s = common.choice([0.5, 2.5]) * timeout_s
        steps = itertools.count(1)

        def sleep(call: Any, phase: Phase, at: int | None, nap_s: float, steps: Iterator[int]) -> None:
            if next(steps) == at:
                time.sleep(nap_s)
            elif own.random() < 0.15:
                time.sleep(own.random() * 0.004)

        conversation.between_steps = functools.partial(
            sleep, at=sleepers.get(context.rank), nap_s=nap_s, steps=steps
        )
        others = frozenset(range(num_ranks)) - {context.rank}
        with contextlib.suppress(PeerLost):
            for pair in range(8):
                case = Case((4,) * num_ranks, hidden=64, num_topk=2 * num_ranks, seed=seed + pair)
                before = frozenset(rank for rank, is_masked in enumerate(masked_by(buffer)) if is_masked)
                assert before <= echo(buffer, case, context.rank, others)
        conversation.between_steps = None
        torch.distributed.barrier(context.group)
        masks.append(masked_by(buffer))
        buffer.low_latency_clean_mask_buffer()
        assert not any(masked_by(buffer))
        for again in range(3):
            check_case(context.rank, Case(tokens=tuple(range(num_ranks)), hidden=64, seed=again), buffer)
    return masks


@pytest.mark.parametrize("seed", [1, 2])
def test_naps_at_random(world: World, seed: int) -> None:
    by_rank = world.run(live_with_naps, seed, 3, timeout=TIMEOUT_S)
    for masks in by_rank:
        assert masks == by_rank[0]
