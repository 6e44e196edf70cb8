"""Low-latency calls while ranks die, sleep or are masked: the others hear of it, or go on without them.

No rank sleeps for a fixed time: a late rank waits until the others have finished their part without it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anyep import PeerLost
from anyep.api.buffer import Buffer
from anyep.core.calls import Kind, Phase, Stall
from tests.support import faults, low_latency_oracle, oracle
from tests.support.faults import ANSWER_S, ANSWER_TIMED_S, UNTIMED_S, Fault, arm, forget, strike
from tests.support.gpu_scenarios import wait_until_gone, warnings_heard
from tests.support.low_latency_cases import Case, check_case, dispatch_by_hook, inputs_of, on
from tests.support.patience import patience_s
from tests.support.places import Place, tensor_device
from tests.support.world import RankContext, RankDied, close_shared_worlds

FOUR = Place("cpu", 4)
NODES = Place("cpu", 4, num_nodes=2)
HOSTS = Place("cpu", 4, num_nodes=2, hosts=True)
SIMULATED, GPU = Place("simulated", 3), Place("cuda", 3)
SIMULATED_WITH_HOST_HEAP = Place("simulated", 3, heap="host")
GPU_WITH_HOST_HEAP = Place("cuda", 3, heap="host")
SIMULATED_NODES, GPU_NODES = Place("simulated", 4, num_nodes=2), Place("cuda", 4, num_nodes=2)
LOW_LATENCY: Any = "low latency"
NUM_PAIRS = {"cpu": 6, "simulated": 2, "cuda": 4}
"""Interpreted kernels take long."""
LEAST_PATIENCE_ON_GPU_S = 5.0


def fault(rank: int, call: int, phase: str, what: Any = "kill", place: Place = FOUR) -> Fault:
    """Odd calls are dispatches, even ones combines."""
    return Fault(place, rank, call, phase, what, mode=LOW_LATENCY)


def group_of(place: Place) -> Any:
    return pytest.mark.xdist_group("hosts" if place.hosts else f"faults of {place}")


def at(place: Place, *more: Any, slow: bool = False) -> Any:
    return place.param(*more, marks=[group_of(place), *([pytest.mark.slow] if slow else [])])


def outcomes_of(
    place: Place, function: Callable[..., Any], *arguments: Any, is_deadly: bool = False
) -> list[Any]:
    """What ranks return; for those that died `RankDied`. What they keep as "struck" is destroyed."""
    if is_deadly and place.device == "cuda":
        # A process that dies may take others with it that share the multi-process service.
        close_shared_worlds()
    world = place.world()
    outcomes: list[Any] = []
    try:
        outcomes = world.gather(function, place, *arguments, timeout=ANSWER_TIMED_S)
    finally:
        if is_deadly and place.device == "cuda":
            world.close()
        else:
            world.gather(forget)
            world.revive()
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, RankDied):
            raise outcome
    return outcomes


class Events:
    """What ranks of one function tell each other, apart from the Buffer under test."""

    def __init__(self, context: RankContext) -> None:
        number = context.keep["events"] = context.keep.get("events", 0) + 1
        store = dist.distributed_c10d._get_process_group_store(context.group)
        self._store = dist.PrefixStore(f"events/{number}", store)

    def tell(self, name: str, rank: int) -> None:
        self._store.set(f"{name}/{rank}", "")

    def was_told(self, name: str, rank: int) -> bool:
        return self._store.check([f"{name}/{rank}"])

    def wait(self, name: str, ranks: Iterable[int]) -> None:
        self._store.wait([f"{name}/{rank}" for rank in ranks])


def new_buffer(
    context: RankContext, place: Place, timeout_s: float = UNTIMED_S, enable_shrink: bool = True
) -> Buffer:
    """A Buffer with masks, which lives until the function has ended on all ranks."""
    buffer = faults.new_buffer(context, place, LOW_LATENCY, timeout_s=timeout_s, enable_shrink=enable_shrink)
    context.keep["struck"] = buffer
    return buffer


def patient_s(context: RankContext, place: Place, least_s: float = 0.5) -> float:
    """How long ranks wait for each other where one of them is to be late: the others never are."""
    if place.device == "cpu":
        return faults.patient_s(context, place, least_s, LOW_LATENCY)
    case = Case(tokens=(5,) * context.num_ranks, hidden=128)
    with faults.new_buffer(context, place, LOW_LATENCY) as buffer:
        # Interpreted kernels take long: a few times as long as a pair of calls is long enough.
        least_s = max(least_s, LEAST_PATIENCE_ON_GPU_S)
        return patience_s(context, lambda: check_case(context.rank, case, buffer), least_s, factor=3, turns=1)


def message_of(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """What it raises; kernels have run then."""
    try:
        call(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if tensor_device() == "cuda":
            torch.cuda.synchronize()
    return "nothing was raised"


def dispatch(buffer: Buffer, case: Case) -> Any:
    mine = on(tensor_device(), inputs_of(case)[buffer.rank])
    return buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
    )


def masked_by(buffer: Buffer) -> list[int]:
    mask = torch.full((buffer.group_size,), 7, dtype=torch.int32, device=tensor_device())
    buffer.low_latency_query_mask_buffer(mask)
    return mask.tolist()


def mask_for_all(context: RankContext, buffer: Buffer, rank: int) -> None:
    """One rank masks another; when this returns, all know."""
    dist.barrier(context.group)
    if context.rank == 0:
        buffer.low_latency_update_mask_buffer(rank, mask=True)
        buffer.low_latency_update_mask_buffer(rank, mask=True)
    dist.barrier(context.group)
    if buffer.runtime.control.transport is not None:
        # Between hosts it takes a moment.
        wait_until(lambda: masked_by(buffer)[rank] == 1)
        dist.barrier(context.group)
    assert masked_by(buffer)[rank]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ANSWER_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def wait_until_waited_for(buffer: Buffer, *ranks: int) -> None:
    """Until each of these ranks says that it waits for this one."""
    wait_until(lambda: all(buffer.status()[rank].waits_for == buffer.rank for rank in ranks))


def small(context: RankContext, seed: int = 0) -> Case:
    return Case(tokens=(5,) * context.num_ranks, hidden=64, seed=seed)


def to_rank_0(context: RankContext, tokens: int, seed: int) -> Case:
    return Case(
        (tokens,) * context.num_ranks, hidden=64, routing="one rank", local_experts=1, num_topk=1, seed=seed
    )


def check_rows(rank: int, case: Case, received: torch.Tensor, absent: frozenset[int] = frozenset()) -> None:
    """What a rank with one expert has received."""
    expected = low_latency_oracle.rows_of_expert(inputs_of(case), rank, absent).x
    assert oracle.same_bits(received[0, : len(expected)], expected)


# Without masks


@pytest.mark.parametrize(
    "fault",
    [
        fault(0, 1, "send").param(),
        fault(3, 4, "receive").param(),
        fault(1, 3, "acknowledge").param(),
        fault(2, 2, "send", place=NODES).param(),
        fault(1, 2, "send", place=SIMULATED).param(),
        fault(1, 3, "send", place=GPU).param(),
        fault(1, 2, "send", place=SIMULATED_WITH_HOST_HEAP).param(marks=[pytest.mark.slow]),
        fault(1, 3, "send", place=GPU_WITH_HOST_HEAP).param(),
        fault(2, 3, "send", place=GPU_NODES).param(),
        *(
            slow.param(marks=[pytest.mark.slow])
            for slow in (
                fault(1, 1, "receive"),
                fault(2, 2, "send"),
                fault(0, 6, "acknowledge"),
                fault(3, 3, "receive", place=NODES),
                fault(0, 4, "acknowledge", place=NODES),
                fault(3, 3, "receive", place=HOSTS),
            )
        ),
    ],
)
def test_a_killed_rank(fault: Fault) -> None:
    struck = strike(fault)
    assert struck.dead == [fault.rank]
    pid = struck.pids[fault.rank]
    for outcome in struck.survivors.values():
        assert outcome.kind == "PeerLost", outcome
        assert outcome.was_noticed
        died = f"rank {fault.rank} (pid {pid}) died while rank" in outcome.message
        assert died or (fault.place.hosts and f"rank {fault.rank} is out of reach" in outcome.message)
        assert outcome.later.startswith("BufferBroken: ")


@pytest.mark.parametrize(
    "fault",
    [
        fault(1, 3, "send", "sleep").param(),
        fault(1, 3, "send", "sleep", NODES).param(marks=[pytest.mark.slow]),
    ],
)
def test_a_slow_rank(fault: Fault) -> None:
    messages = [
        outcome.message for outcome in strike(fault).survivors.values() if outcome.kind == "WaitTimeout"
    ]
    assert messages
    pattern = (
        r"rank \d waited .* s for the completion record of rank 1.* in low-latency dispatch \(call 3\),"
        r" phase receive: counter 1 seen, 3 expected\. Last status of rank 1: rank 1 \(pid \d+\) is in"
        r" low-latency dispatch \(call 3\), phase send, for .* s.*ANYEP_TIMEOUT_S"
    )
    for message in messages:
        assert re.match(pattern, message), message


def forget_a_hook(context: RankContext, place: Place) -> str:
    events = Events(context)
    buffer = new_buffer(context, place, patient_s(context, place), enable_shrink=False)
    hooks = [dispatch_by_hook(buffer, small(context), context.rank)[3] for _ in range(2)]
    if context.rank == 1:
        events.wait("failed", (0, 2, 3))
        return "waited"
    for hook in hooks:
        hook()
    message = message_of(dispatch_by_hook, buffer, small(context), context.rank)
    events.tell("failed", context.rank)
    return message


@group_of(FOUR)
def test_a_rank_that_does_not_call_its_hook() -> None:
    outcomes = outcomes_of(FOUR, forget_a_hook)
    blamed = [outcome for outcome in outcomes if "for the receipt of call 1 (by its hook" in outcome]
    assert blamed
    assert all("of rank 1" in outcome for outcome in blamed)


# On a GPU: what goes wrong is raised by the next call


def come_late(context: RankContext, place: Place) -> list[str]:
    """To rank 1, which comes when the others have raised, the first call looks good."""
    events = Events(context)
    # On a real GPU kernels are compiled first, which takes longer.
    timeout_s = patient_s(context, place) if place.device == "cuda" else 0.5
    buffer = new_buffer(context, place, timeout_s, enable_shrink=False)
    if context.rank == 1:
        events.wait("failed", (0, 2))
    messages = [message_of(dispatch, buffer, small(context)) for _ in range(3)]
    events.tell("failed", context.rank)
    return messages


@pytest.mark.parametrize("place", [at(SIMULATED, slow=True), at(GPU)])
def test_a_slow_rank_on_a_gpu(place: Place) -> None:
    for rank, messages in enumerate(outcomes_of(place, come_late)):
        heard = messages[1 if rank != 1 else 2]
        assert heard.startswith(("WaitTimeout: ", "PeerLost: ")), messages
        assert "completion record" in heard
        if rank != 1:
            assert messages[2].startswith("BufferBroken: ")


def go_on_in_normal_mode(context: RankContext, place: Place) -> list[str]:
    """Rank 1 does not come to a low-latency call; the others hear of it in a call of the other mode."""
    buffer = new_buffer(context, place, patient_s(context, place, 2), enable_shrink=False)
    mine = on(tensor_device(), inputs_of(small(context))[context.rank])
    messages = []
    if context.rank != 1:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.topk_idx, 2 * context.num_ranks)
        normal = functools.partial(buffer.dispatch, mine.x, None, per_rank, None, in_rank, per_expert)
        first = functools.partial(dispatch, buffer, small(context))
        messages = [message_of(call) for call in (first, normal, normal)]
    dist.barrier(context.group)
    return messages


@pytest.mark.parametrize("place", [at(SIMULATED, slow=True), at(GPU)])
def test_normal_mode_tells_what_low_latency_mode_waited_for(place: Place) -> None:
    for rank, messages in enumerate(outcomes_of(place, go_on_in_normal_mode)):
        if rank != 1:
            assert messages[0] == "nothing was raised"
            pattern = r"(WaitTimeout|PeerLost): .*rank 1\b.* in low-latency dispatch \(.*\), phase receive"
            assert re.match(pattern, messages[1]), messages
            assert messages[2].startswith("BufferBroken: ")


def die_before_a_slow_rank_comes(context: RankContext, place: Place) -> str:
    """Rank 1 dies. Rank 2 stops waiting for it and for rank 0, which comes later, and fails for the same
    reason before rank 2 looks for its own."""
    events = Events(context)
    buffer = new_buffer(context, place, enable_shrink=False)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == 0:
        events.wait("returned", [2])
    assert message_of(dispatch, buffer, small(context)) == "nothing was raised"
    events.tell("returned", context.rank)
    if context.rank == 2:
        wait_until_gone(buffer, 0)
    return message_of(dispatch, buffer, small(context))


@pytest.mark.parametrize("place", [at(SIMULATED)])
def test_who_died_is_named_and_not_who_failed_because_of_it(place: Place) -> None:
    outcomes = outcomes_of(place, die_before_a_slow_rank_comes)
    for rank in (0, 2):
        pattern = rf"PeerLost: rank 1 \(pid \d+\) died while rank {rank} waited for its completion record"
        assert re.match(pattern, outcomes[rank]), outcomes


# With masks: the others go on


@dataclass(frozen=True)
class Survival:
    """What a rank knows in the end: its mask, the time of its calls, what was raised and logged."""

    mask: list[int]
    seconds: float
    """Of the longest pair of calls; where a rank sleeps, of the last one."""
    timeout_s: float
    raised: str
    warnings: list[str]


def echo(buffer: Buffer, case: Case, rank: int, may_be_absent: frozenset[int]) -> frozenset[int]:
    """Dispatch and combine with experts that return what they get; nothing may come from absent ranks.

    Each of `may_be_absent` may be there or not, in each of the two calls; returns who was not there.
    """
    inputs = inputs_of(case)
    given = on(tensor_device(), inputs[rank])
    received, counts, handle, _, _ = buffer.low_latency_dispatch(
        given.x, given.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
    )
    absent = frozenset(
        source
        for source in may_be_absent
        if not any(int(handle[1][local, source]) & 0xFFFFFFFF for local in range(case.local_experts))
    )
    for local in range(case.local_experts):
        expected = low_latency_oracle.rows_of_expert(inputs, rank * case.local_experts + local, absent)
        assert int(counts[local]) == len(expected.x)
        assert oracle.same_bits(received[local, : len(expected.x)].cpu(), expected.x)
    combined, _, _ = buffer.low_latency_combine(received, given.topk_idx, given.topk_weights, handle)
    sources = [low_latency_oracle.rows_of_expert(inputs, expert) for expert in range(case.num_experts)]
    rows = [source.x for source in sources]
    for number in range(len(may_be_absent) + 1):
        for missing in itertools.combinations(sorted(may_be_absent), number):
            experts = frozenset(e for e in range(case.num_experts) if e // case.local_experts in missing)
            right = low_latency_oracle.combine(inputs[rank], rank, rows, sources, experts)
            if oracle.same_bits(combined.cpu(), right):
                return absent | frozenset(missing)
    raise AssertionError("the sums are right for no set of absent ranks")


def for_all_experts(context: RankContext, seed: int, tokens: int) -> Case:
    """Every rank has rows for every expert, so that absence shows."""
    return Case((tokens,) * context.num_ranks, hidden=64, num_topk=2 * context.num_ranks, seed=seed)


def go_on(context: RankContext, place: Place, plan: tuple[Fault, ...]) -> Survival:
    """Pairs of calls; once a fault has been noticed, the rank it struck must stay absent."""
    events = Events(context)
    is_timed = any(fault.what == "sleep" for fault in plan)
    timeout_s = patient_s(context, place) if is_timed else UNTIMED_S
    buffer = new_buffer(context, place, timeout_s)
    struck = frozenset(fault.rank for fault in plan)
    others = set(range(context.num_ranks)) - struck
    arm(buffer, plan, nap=lambda: events.wait("done", others))
    tokens = 5 if place.device == "cpu" else 2
    known = frozenset[int]()
    seconds, raised = 0.0, ""
    with warnings_heard() as warnings:
        for seed in range(NUM_PAIRS[place.device]):
            before = frozenset(rank for rank, is_masked in enumerate(masked_by(buffer)) if is_masked)
            assert known <= before
            known = before
            started = time.monotonic()
            try:
                absent = echo(buffer, for_all_experts(context, seed, tokens), context.rank, struck)
            except PeerLost as error:
                raised = str(error)
                break
            elapsed = time.monotonic() - started
            seconds = elapsed if is_timed else max(seconds, elapsed)
            assert known <= absent <= struck
    events.tell("done", context.rank)
    return Survival(masked_by(buffer), seconds, timeout_s, raised, warnings)


def plan(*faults: Fault, slow: bool = False) -> Any:
    place = faults[0].place
    marks = [group_of(place), *([pytest.mark.slow] if slow else [])]
    return place.param(marks=marks, value=faults, name="+".join(map(str, faults)))


@pytest.mark.parametrize(
    "plan",
    [
        plan(fault(0, 3, "send"), fault(2, 3, "send")),
        plan(fault(0, 2, "send"), fault(1, 4, "receive"), fault(3, 7, "acknowledge")),
        plan(fault(1, 4, "receive", "sleep")),
        plan(fault(1, 2, "send", "sleep"), fault(3, 2, "send")),
        plan(fault(2, 3, "send", place=NODES), fault(3, 3, "send", place=NODES)),
        plan(fault(1, 1, "send", place=SIMULATED)),
        plan(fault(1, 3, "send", place=GPU)),
        plan(fault(1, 1, "send", place=SIMULATED_WITH_HOST_HEAP), slow=True),
        plan(fault(1, 3, "send", place=GPU_WITH_HOST_HEAP)),
        plan(fault(2, 3, "send", place=GPU_NODES), fault(3, 3, "send", place=GPU_NODES)),
        plan(
            fault(2, 2, "send", place=SIMULATED_NODES), fault(3, 2, "send", place=SIMULATED_NODES), slow=True
        ),
        plan(fault(3, 3, "send", place=HOSTS)),
        plan(fault(1, 4, "receive", place=HOSTS), fault(2, 3, "acknowledge", place=HOSTS), slow=True),
        plan(fault(2, 3, "send", place=HOSTS), fault(3, 3, "send", place=HOSTS), slow=True),
        plan(fault(3, 3, "send", "sleep", HOSTS), slow=True),
        plan(fault(0, 1, "send"), slow=True),
        plan(fault(1, 1, "receive"), slow=True),
        plan(fault(2, 2, "send"), slow=True),
        plan(fault(3, 4, "receive"), slow=True),
        plan(fault(1, 3, "acknowledge"), slow=True),
        plan(fault(0, 6, "acknowledge"), slow=True),
        plan(fault(1, 2, "receive"), fault(3, 5, "send"), slow=True),
        plan(fault(2, 3, "send", "sleep"), slow=True),
        plan(fault(0, 5, "acknowledge", "sleep"), slow=True),
        # A whole node: in a dispatch, in a combine, its ranks in different calls.
        plan(fault(0, 1, "send", place=NODES), fault(1, 1, "send", place=NODES), slow=True),
        plan(fault(2, 4, "receive", place=NODES), fault(3, 4, "receive", place=NODES), slow=True),
        plan(fault(0, 3, "acknowledge", place=NODES), fault(1, 4, "send", place=NODES), slow=True),
        plan(fault(2, 4, "send", "sleep", NODES), fault(3, 4, "send", "sleep", NODES), slow=True),
    ],
)
def test_the_others_go_on(plan: tuple[Fault, ...]) -> None:
    place = plan[0].place
    outcomes = outcomes_of(place, go_on, plan, is_deadly=True)
    struck = {fault.rank: fault.what for fault in plan}
    expected = [int(rank in struck) for rank in range(place.num_ranks)]
    warnings = []
    for rank, outcome in enumerate(outcomes):
        if struck.get(rank) == "kill":
            assert isinstance(outcome, RankDied)
            continue
        assert outcome.mask == expected
        if rank in struck:
            assert f"the other ranks go on without rank {rank}" in outcome.raised
            assert f"low_latency_update_mask_buffer({rank}, mask=False)" in outcome.raised
        else:
            assert not outcome.raised
            # A death is noticed, not timed out; and in the end nobody waits for those that are masked.
            assert outcome.seconds < outcome.timeout_s
            warnings += outcome.warnings
    heard = [(warning, re.match(r"rank \d goes on without rank (\d)(.*)", warning)) for warning in warnings]
    if place.device == "cpu":
        named = {int(match[1]) for _, match in heard if match}
        # The rank that noticed a fault may have been killed later.
        last_kill = max((fault.call for fault in plan if fault.what == "kill"), default=0)
        assert {fault.rank for fault in plan if fault.call >= last_kill} <= named <= set(struck), warnings
    # The rank that notices a fault gives the reason; kernels give none.
    for warning, match in heard:
        assert match, warning
        died = "(died|was lost) while rank" if place.hosts else "died while rank"
        reason = died if struck[int(match[1])] == "kill" else r"rank \d waited"
        assert re.search(reason, match[2]) or place.device != "cpu", warning


# Between hosts


def go_on_between_hosts(context: RankContext, place: Place, what: str) -> tuple[list[int], str]:
    """In the third pair host 0 dies, or loses the network, or rank 3 is stopped until the others have gone
    on for a while. Who is masked at the end, and what was raised; a rank is absent once it is masked."""
    events, rank = Events(context), context.rank
    is_timed = what != "host 0 dies"
    timeout_s = patient_s(context, place, 2.0) if is_timed else UNTIMED_S
    buffer = new_buffer(context, place, timeout_s)
    others = {"rank 3 is stopped": {3}}.get(what, {0, 1} if rank >= 2 else {2, 3})
    # Too large for a notification: what is under way is in this rank's memory.
    case = Case((7,) * context.num_ranks, hidden=2048, num_topk=8)
    known = frozenset[int]()
    for seed in range(7):
        if seed == 2:
            dist.barrier(context.group)
            if what == "host 0 dies" and rank < 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "the link is cut":
                arm(buffer, [fault(0, 6, "send", "cut", place)])
            if what == "rank 3 is stopped" and rank == 3:
                arm(buffer, [fault(3, 6, "send", "stop", place)], nap_s=6 * timeout_s)
        before = known
        try:
            known = echo(buffer, replace(case, seed=seed), rank, frozenset(others))
        except PeerLost as error:
            return masked_by_hosts(buffer), str(error)
        assert before <= known
    if what == "rank 3 is stopped":
        events.tell("done", rank)
    return masked_by_hosts(buffer), ""


def masked_by_hosts(buffer: Buffer) -> list[int]:
    """As far as this rank knows, without looking once more."""
    assert buffer.runtime.low_latency is not None
    masked: list[int] = buffer.runtime.low_latency.masks.masked.astype(int).tolist()
    return masked


@pytest.mark.parametrize(
    ("what", "survivors"),
    [
        ("host 0 dies", ()),
        ("the link is cut", (0, 1)),
        pytest.param("rank 3 is stopped", (0, 1, 2), marks=pytest.mark.slow),
    ],
)
@group_of(HOSTS)
def test_hosts_that_do_not_reach_each_other(what: str, survivors: tuple[int, ...]) -> None:
    world = HOSTS.world()
    try:
        outcomes = world.gather(go_on_between_hosts, HOSTS, what, timeout=ANSWER_TIMED_S)
    finally:
        if what == "the link is cut":
            world.mend()
        world.restart()
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, RankDied):
            assert (what, rank < 2) == ("host 0 dies", True)
            continue
        assert not isinstance(outcome, BaseException), outcome
        masked, raised = outcome
        if rank in survivors:
            assert (masked, raised) == ([int(other not in survivors) for other in range(4)], "")
        else:
            sentence = "cannot go on without rank|the other ranks go on without rank"
            assert re.match(
                sentence if "stopped" in what else r"rank \d cannot go on without ranks? .*0", raised
            )
            assert "make a new Buffer" in raised or "stopped" in what


def speak_when_masked(context: RankContext, place: Place) -> list[int]:
    """Host 1 is masked, and then says that host 0 is: it may have lost the network for a while."""
    buffer, case = new_buffer(context, place), small(context)
    assert buffer.runtime.low_latency is not None
    check_case(context.rank, case, buffer)
    dist.barrier(context.group)
    if context.rank == 0:
        for rank in (2, 3):
            buffer.low_latency_update_mask_buffer(rank, mask=True)
    wait_until(lambda: masked_by(buffer)[2:] == [1, 1])
    dist.barrier(context.group)
    if context.rank >= 2:
        for rank in (0, 1):
            buffer.runtime.low_latency.masks.mask_in(rank, 1, "it was out of reach")
    dist.barrier(context.group)
    if context.rank < 2:
        for seed in range(3):
            check_case(context.rank, replace(case, seed=seed), buffer, frozenset([2, 3]))
    return masked_by_hosts(buffer)


@group_of(HOSTS)
def test_masked_hosts_are_not_heard() -> None:
    assert outcomes_of(HOSTS, speak_when_masked) == [[0, 0, 1, 1]] * 2 + [[1] * 4] * 2


def change_sizes_late(context: RankContext, place: Place) -> list[str]:
    """While rank 3 is masked the slots stay where they are: it may still put rows there. It comes back, and
    all can change them."""
    buffer, case = new_buffer(context, place), small(context)
    check_case(context.rank, case, buffer)
    mask_for_all(context, buffer, 3)
    other = replace(case, max_tokens=2 * case.max_tokens)
    messages = []
    if context.rank != 3:
        buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        clean = buffer.clean_low_latency_buffer
        messages.append(message_of(clean, other.max_tokens, other.hidden, other.num_experts))
        for seed in range(3):
            check_case(context.rank, replace(case, seed=seed), buffer, frozenset([3]))
    dist.barrier(context.group)
    buffer.low_latency_update_mask_buffer(3)
    for seed in range(3):
        check_case(context.rank, replace(case, seed=seed), buffer)
    buffer.clean_low_latency_buffer(other.max_tokens, other.hidden, other.num_experts)
    check_case(context.rank, other, buffer)
    return messages


@group_of(HOSTS)
def test_sizes_that_cannot_change_between_hosts() -> None:
    *others, last = outcomes_of(HOSTS, change_sizes_late)
    assert last == []
    for messages in others:
        assert messages[0].startswith("InvalidCall: the sizes cannot change while ranks are masked"), messages


def come_back_after_words(context: RankContext, place: Place) -> None:
    """Host 1 is masked, and says that host 0 is, which nobody there hears; then all take it back."""
    buffer, case = new_buffer(context, place), small(context)
    assert buffer.runtime.low_latency is not None
    for turn in range(3):
        check_case(context.rank, replace(case, seed=turn), buffer)
        for rank in (2, 3):
            mask_for_all(context, buffer, rank)
        if context.rank >= 2:
            masks = buffer.runtime.low_latency.masks
            for rank in (0, 1):
                masks.mask_in(rank, 2 * masks.round + 1, "it was out of reach")
        dist.barrier(context.group)
        if turn == 2:
            buffer.low_latency_clean_mask_buffer()
        else:
            if context.rank != 3:
                buffer.low_latency_update_mask_buffer(2)
            dist.barrier(context.group)
            buffer.low_latency_update_mask_buffer(3)
        assert masked_by(buffer) == [0] * 4
        for seed in range(2):
            check_case(context.rank, replace(case, seed=seed), buffer)


@group_of(HOSTS)
def test_a_host_comes_back() -> None:
    outcomes_of(HOSTS, come_back_after_words)


# Back again


def mask_itself(context: RankContext, place: Place) -> list[str]:
    buffer = new_buffer(context, place, UNTIMED_S)
    with warnings_heard() as warnings:
        if context.rank == 1:
            buffer.low_latency_update_mask_buffer(1, mask=True)
    dist.barrier(context.group)
    return warnings


def test_a_rank_that_masks_itself_says_so() -> None:
    warnings = outcomes_of(FOUR, mask_itself)
    assert warnings[1] == ["the others go on without rank 1, which is this one: it was masked by a call"]


def come_back(
    context: RankContext, place: Place, by_hand: bool, by_cleaning: bool, turns: int
) -> list[list[int]]:
    """Rank 2 is masked, by hand or since it does not come; the others go on, then all take it back."""
    rank = context.rank
    buffer = new_buffer(context, place, UNTIMED_S if by_hand else patient_s(context, place))
    case = Case(tokens=(5, 0, 7, 3)[: context.num_ranks], hidden=128, travel="fp8")
    masks = []
    for turn in range(turns):
        check_case(rank, case, buffer)
        if by_hand:
            mask_for_all(context, buffer, 2)
        if rank != 2:
            for seed in range(turns + turn):
                check_case(rank, replace(case, seed=seed), buffer, frozenset([2]))
        dist.barrier(context.group)
        if rank == 2:
            # On a GPU its kernels find out, and the host hears of it in the next call.
            messages = [message_of(dispatch, buffer, case) for _ in range(3)]
            assert all("go on without rank 2" in message for message in messages[1:]), messages
            assert place.device != "cpu" or messages[0] == messages[1], messages
        masks.append(masked_by(buffer))
        dist.barrier(context.group)
        if by_cleaning:
            buffer.low_latency_clean_mask_buffer()
            buffer.low_latency_clean_mask_buffer()
        else:
            buffer.low_latency_update_mask_buffer(2)
        masks.append(masked_by(buffer))
        for seed in range(turns):
            check_case(rank, replace(case, seed=seed), buffer)
    return masks


@pytest.mark.parametrize(
    ("place", "by_hand", "by_cleaning", "turns"),
    [
        at(FOUR, True, True, 2),
        at(FOUR, False, False, 2),
        at(FOUR, False, True, 3, slow=True),
        at(NODES, True, True, 2),
        at(NODES, False, False, 2, slow=True),
        at(HOSTS, True, True, 2),
        at(HOSTS, False, False, 2, slow=True),
        at(HOSTS, False, True, 3, slow=True),
        at(SIMULATED, True, True, 1),
        at(SIMULATED, True, True, 2, slow=True),
        at(SIMULATED, False, False, 2, slow=True),
        at(SIMULATED_NODES, True, True, 1, slow=True),
        at(Place("cuda", 4), True, True, 2),
        at(GPU_NODES, True, True, 2),
    ],
)
def test_a_rank_comes_back(place: Place, by_hand: bool, by_cleaning: bool, turns: int) -> None:
    masked = [int(rank == 2) for rank in range(place.num_ranks)]
    for masks in outcomes_of(place, come_back, by_hand, by_cleaning, turns):
        assert masks == [masked, [0] * place.num_ranks] * turns


def come_back_in_other_words(context: RankContext, place: Place) -> None:
    """Rank 2 asks for itself, the others for all: they mean the same."""
    buffer = new_buffer(context, place)
    check_case(context.rank, small(context), buffer)
    for turn in range(4):
        mask_for_all(context, buffer, 2)
        # Sometimes it asks first, sometimes they do.
        first = (2,) if turn % 2 else (0, 1, 3)
        if context.rank not in first:
            wait_until(lambda: all(buffer.status()[rank].waits_for is not None for rank in first))  # noqa: B023
        if context.rank == 2:
            buffer.low_latency_update_mask_buffer(2)
        else:
            buffer.low_latency_clean_mask_buffer()
        check_case(context.rank, small(context, turn), buffer)
        assert masked_by(buffer) == [0] * context.num_ranks


def miss_a_cleaning(context: RankContext, place: Place) -> None:
    """Rank 3 is masked while the others change their sizes, and takes them over when it comes back."""
    buffer = new_buffer(context, place)
    other = Case(tokens=(3,) * context.num_ranks, max_tokens=3, hidden=128, local_experts=3)
    check_case(context.rank, small(context), buffer)
    mask_for_all(context, buffer, 3)
    if context.rank != 3:
        buffer.clean_low_latency_buffer(other.max_tokens, other.hidden, other.num_experts)
        check_case(context.rank, other, buffer, frozenset([3]))
    dist.barrier(context.group)
    buffer.low_latency_update_mask_buffer(3)
    for seed in range(3):
        check_case(context.rank, replace(other, seed=seed), buffer)


def come_back_with_a_call_in_flight(context: RankContext, place: Place) -> None:
    """Rank 2 has sent and not received when it is masked, and does not know; then it is taken back."""
    buffer = new_buffer(context, place)
    check_case(context.rank, small(context), buffer)
    hook = dispatch_by_hook(buffer, small(context), context.rank)[3]
    if context.rank != 2:
        hook()
    mask_for_all(context, buffer, 2)
    buffer.low_latency_clean_mask_buffer()
    check_case(context.rank, small(context, 0), buffer)
    if context.rank == 2:
        message = message_of(hook)
        assert message.startswith("InvalidCall: low-latency dispatch (call 3) was given up when the other"), (
            message
        )
    check_case(context.rank, small(context, 1), buffer)


def unmask_nobody(context: RankContext, place: Place) -> None:
    """All but rank 0 have received and clean their masks, of which there are none; rank 0 receives late."""
    buffer = new_buffer(context, place)
    batches = [to_rank_0(context, 6, seed) for seed in (1, 2, 3)]
    sent = [dispatch_by_hook(buffer, batch, context.rank) for batch in batches[:2]]
    if context.rank == 0:
        wait_until_waited_for(buffer, 1, 2, 3)
    for batch, (received, *_, hook) in zip(batches, sent, strict=False):
        hook()
        check_rows(context.rank, batch, received)
    buffer.low_latency_clean_mask_buffer()
    dispatch_by_hook(buffer, batches[2], context.rank)[3]()


def destroy_gives_the_memory_back(context: RankContext, place: Place) -> None:
    def num_mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("anyep-heap")

    before = num_mapped()
    buffer = new_buffer(context, place)
    check_case(context.rank, small(context), buffer)
    assert num_mapped() > before
    buffer.destroy()
    assert num_mapped() == before


def refuse_to_take_back(context: RankContext, place: Place, how: str) -> None:
    """One rank's call to take rank 3 back is wrong: the others hear of it at once, and all go on."""
    buffer = new_buffer(context, place)
    check_case(context.rank, small(context), buffer)
    hook = dispatch_by_hook(buffer, small(context), context.rank)[3]
    if context.rank != 1 or how == "a wrong rank":
        hook()
    wrong = how == "a wrong rank" and context.rank == 1
    message = message_of(buffer.low_latency_update_mask_buffer, 77 if wrong else 3)
    if context.rank == 1:
        assert message.startswith("InvalidCall: "), message
    else:
        assert message == "Disagreement: ranks requested different ranks to unmask; none were unmasked"
    hook()
    buffer.low_latency_update_mask_buffer(3)
    check_case(context.rank, small(context), buffer)


def sleep_through_a_deadline(context: RankContext, place: Place) -> None:
    """A step finds that something is missing; then this process does not run until long after the deadline.
    Meanwhile it has come: nobody is late."""
    buffer = new_buffer(context, place, 0.2)
    control = buffer.runtime.control
    missing = [1, 1]

    def stalled() -> Stall:
        if not missing:
            time.sleep(0.5)
        return Stall((1 - context.rank % 2,), "something", 0, 1)

    call = control.begin(Kind.LOW_LATENCY_DISPATCH)
    control.wait_until(call, lambda _: missing.pop() if missing else 0, stalled)
    control.end(call)
    assert not missing


def lossless(place: Place, scenario: Callable[..., None], *arguments: str, slow: bool = False) -> Any:
    marks = [group_of(place), *([pytest.mark.slow] if slow else [])]
    words = (str(place) if place != FOUR else "", scenario.__name__, *arguments)
    name = "-".join(word for word in words if word)
    return pytest.param(place, scenario, arguments, marks=marks, id=name)


@pytest.mark.parametrize(
    ("place", "scenario", "arguments"),
    [
        lossless(FOUR, come_back_in_other_words),
        lossless(FOUR, miss_a_cleaning),
        lossless(FOUR, come_back_with_a_call_in_flight),
        lossless(FOUR, unmask_nobody),
        lossless(FOUR, destroy_gives_the_memory_back),
        lossless(FOUR, refuse_to_take_back, "a wrong rank"),
        lossless(FOUR, refuse_to_take_back, "a call in flight"),
        lossless(FOUR, sleep_through_a_deadline),
        lossless(HOSTS, come_back_in_other_words, slow=True),
        lossless(HOSTS, come_back_with_a_call_in_flight, slow=True),
        lossless(HOSTS, unmask_nobody, slow=True),
        lossless(HOSTS, refuse_to_take_back, "a wrong rank", slow=True),
        lossless(HOSTS, refuse_to_take_back, "a call in flight", slow=True),
    ],
)
def test_nobody_is_lost(place: Place, scenario: Callable[..., None], arguments: tuple[str, ...]) -> None:
    outcomes_of(place, scenario, *arguments)


def one_dead_one_back(context: RankContext, place: Place) -> list[int]:
    """Rank 1 is killed and rank 2 masked; cleaning brings rank 2 back, and rank 1 stays masked."""
    buffer = new_buffer(context, place)
    check_case(context.rank, small(context), buffer)
    mask_for_all(context, buffer, 2)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank != 2:
        # Rank 1 is found dead in this call; rank 2 takes no part in it.
        echo(buffer, small(context), context.rank, frozenset([1, 2]))
    wait_until(lambda: masked_by(buffer)[1] == 1)
    buffer.low_latency_clean_mask_buffer()
    check_case(context.rank, small(context), buffer, frozenset([1]))
    return masked_by(buffer)


def die_while_coming_back(context: RankContext, place: Place) -> list[int]:
    """Rank 2 dies while the others wait for it in a round."""
    buffer = new_buffer(context, place)
    check_case(context.rank, small(context), buffer)
    mask_for_all(context, buffer, 2)
    if context.rank == 2:
        wait_until_waited_for(buffer, 0, 1, 3)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost, match="rank 2 did not come back"):
        buffer.low_latency_update_mask_buffer(2)
    check_case(context.rank, small(context), buffer, frozenset([2]))
    return masked_by(buffer)


@pytest.mark.parametrize(
    ("place", "scenario", "dead"),
    [
        at(FOUR, one_dead_one_back, 1),
        at(FOUR, die_while_coming_back, 2),
        at(HOSTS, one_dead_one_back, 1, slow=True),
        at(HOSTS, die_while_coming_back, 2),
    ],
)
def test_a_dead_rank_stays_masked(place: Place, scenario: Callable[..., list[int]], dead: int) -> None:
    outcomes = outcomes_of(place, scenario)
    assert isinstance(outcomes.pop(dead), RankDied)
    assert outcomes == [[int(rank == dead) for rank in range(4)]] * 3


# Ranks that want different things


def leave_a_round_early(context: RankContext, place: Place) -> str:
    """Rank 1 wants rank 2 back, which died, while ranks 0 and 3 have still to receive what rank 1 sent: they
    learn of it before it writes over that."""
    events = Events(context)
    buffer = new_buffer(context, place, patient_s(context, place))
    mask_for_all(context, buffer, 2)
    if context.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    batches = [to_rank_0(context, 3, seed) for seed in range(4)]
    sent = [dispatch_by_hook(buffer, batch, context.rank) for batch in batches[:2]]
    if context.rank == 1:
        for *_, hook in sent:
            hook()
        with pytest.raises(PeerLost, match="rank 2 did not come back"):
            buffer.low_latency_update_mask_buffer(2)
        for batch in batches[2:]:
            dispatch_by_hook(buffer, batch, context.rank)
        events.tell("sent", 1)
        return "sent"
    events.wait("sent", [1])
    received, *_, hook = sent[0]
    try:
        hook()
    except PeerLost as error:
        return str(error)
    check_rows(context.rank, batches[0], received, frozenset([2]))
    return "right"


@pytest.mark.slow
@group_of(FOUR)
def test_a_round_waits_for_all() -> None:
    for outcome in outcomes_of(FOUR, leave_a_round_early):
        assert isinstance(outcome, RankDied) or outcome in ("sent", "right") or "go on without" in outcome


def wake_up_after_a_cleaning(context: RankContext, place: Place) -> str:
    """Rank 2 sleeps in the middle of sending; the others mask it and lay out their slots anew. When they have
    sent there, it goes on."""
    events = Events(context)
    buffer = new_buffer(context, place, patient_s(context, place))
    arm(buffer, [fault(2, 1, "send", "sleep")], nap=lambda: events.wait("sent", (0, 1, 3)))
    small = Case(tokens=(4,) * context.num_ranks, max_tokens=4, hidden=128, local_experts=1, num_topk=4)
    large = replace(small, hidden=2048)
    try:
        echo(buffer, small, context.rank, frozenset([2]))
    except PeerLost as error:
        events.tell("awake", 2)
        return str(error)
    buffer.clean_low_latency_buffer(4, 2048, large.num_experts)
    received, *_, hook = dispatch_by_hook(buffer, large, context.rank)
    events.tell("sent", context.rank)
    events.wait("awake", [2])
    hook()
    check_rows(context.rank, large, received, frozenset([2]))
    return ""


def go_on_until(
    context: RankContext, buffer: Buffer, events: Events, name: str, rank: int, absent: frozenset[int]
) -> None:
    """Pairs of calls until a rank says something; all that make them stop after the same one."""
    for number in itertools.count():
        check_case(context.rank, small(context, number), buffer, absent)
        if context.rank == 0:
            events.tell("stop" if events.was_told(name, rank) else "go on", number)
        wait_until(lambda: events.was_told("stop", number) or events.was_told("go on", number))  # noqa: B023
        if events.was_told("stop", number):
            return


def ask_too_early(context: RankContext, place: Place) -> str:
    """Rank 2 is masked and wants to come back before the others want it; later they do."""
    events = Events(context)
    buffer = new_buffer(context, place, patient_s(context, place))
    check_case(context.rank, small(context), buffer)
    mask_for_all(context, buffer, 2)
    message = ""
    if context.rank == 2:
        message = message_of(buffer.low_latency_update_mask_buffer, 2)
        events.tell("heard", 2)
        # The others find what is left of the first try.
        wait_until_waited_for(buffer, 0, 1, 3)
    else:
        go_on_until(context, buffer, events, "heard", 2, frozenset([2]))
    buffer.low_latency_clean_mask_buffer()
    for seed in range(3):
        check_case(context.rank, small(context, seed), buffer)
    return message


def want_a_round_alone(context: RankContext, place: Place, whom: tuple[int, ...]) -> str:
    """A rank waits for a round, unmasked, while the others make calls, and mask it for its silence."""
    events = Events(context)
    buffer = new_buffer(context, place, patient_s(context, place))
    check_case(context.rank, small(context), buffer)
    message = ""
    if context.rank == 2:
        clean, update = buffer.low_latency_clean_mask_buffer, buffer.low_latency_update_mask_buffer
        message = message_of(update, *whom) if whom else message_of(clean)
        events.tell("heard", 2)
    else:
        go_on_until(context, buffer, events, "heard", 2, frozenset([2]))
        assert masked_by(buffer) == [0, 0, 1, 0]
    dist.barrier(context.group)
    buffer.low_latency_clean_mask_buffer()
    for seed in range(3):
        check_case(context.rank, small(context, seed), buffer)
    return message


def be_masked_while_it_decides(context: RankContext, place: Place) -> str:
    """Rank 2 wants a round, and its deadline passes first. The others wait for it in a call, and mask it in
    the very moment when it decides who is late: they are not."""
    buffer = new_buffer(context, place, patient_s(context, place, 1.0))
    assert buffer.runtime.low_latency is not None
    control, masks = buffer.runtime.control, buffer.runtime.low_latency.masks
    others = (0, 1, 3)
    check_case(context.rank, small(context), buffer)
    dist.barrier(context.group)
    message = ""
    if context.rank != 2:
        for seed in range(3):
            check_case(context.rank, small(context, seed), buffer, frozenset([2]))
    else:
        wait_until_waited_for(buffer, *others)
        control.timeout_s = 0.1
        adopt = masks.adopt

        def adopt_and_pause() -> None:
            """Nothing is found; but before this rank does anything else, all others have masked it."""
            adopt()
            if any(frame.name == "give_up" for frame in traceback.extract_stack()):
                wait_until(lambda: all(control.blame.waits_for(peer) != 2 for peer in others))

        masks.adopt = adopt_and_pause  # type: ignore[method-assign]
        message = message_of(buffer.low_latency_update_mask_buffer, 3)
        masks.adopt = adopt  # type: ignore[method-assign]
    dist.barrier(context.group)
    assert masked_by(buffer) == [0, 0, 1, 0]
    return message


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("scenario", "arguments"),
    [
        pytest.param(wake_up_after_a_cleaning, (), id="wake_up_after_a_cleaning"),
        pytest.param(ask_too_early, (), id="ask_too_early"),
        pytest.param(want_a_round_alone, ((3,),), id="want_a_round_alone_for_another"),
        pytest.param(want_a_round_alone, ((2,),), id="want_a_round_alone_for_itself", marks=SLOW),
        pytest.param(want_a_round_alone, ((),), id="want_a_round_alone_for_all", marks=SLOW),
        pytest.param(be_masked_while_it_decides, (), id="be_masked_while_it_decides"),
    ],
)
@group_of(FOUR)
def test_a_masked_rank_can_do_no_harm(scenario: Callable[..., str], arguments: tuple[Any, ...]) -> None:
    outcomes = outcomes_of(FOUR, scenario, *arguments)
    assert "go on without rank 2" in outcomes.pop(2)
    assert outcomes == ["", "", ""]


def live_with_naps(context: RankContext, place: Place, seed: int, turns: int) -> list[list[int]]:
    """In each turn some ranks sleep somewhere, longer than they are waited for or not; then all come back.

    Who was masked in each turn, as this rank saw it in the end.
    """
    common, own = random.Random(seed), random.Random(seed * 10 + context.rank)
    timeout_s = patient_s(context, place, 0.8)
    buffer = new_buffer(context, place, timeout_s)
    control = buffer.runtime.control
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

        control.between_steps = functools.partial(
            sleep, at=sleepers.get(context.rank), nap_s=nap_s, steps=steps
        )
        others = frozenset(range(num_ranks)) - {context.rank}
        with contextlib.suppress(PeerLost):
            for pair in range(8):
                before = frozenset(rank for rank, is_masked in enumerate(masked_by(buffer)) if is_masked)
                assert before <= echo(buffer, for_all_experts(context, seed + pair, 4), context.rank, others)
        control.between_steps = None
        dist.barrier(context.group)
        masks.append(masked_by(buffer))
        buffer.low_latency_clean_mask_buffer()
        assert not any(masked_by(buffer))
        for again in range(3):
            check_case(context.rank, Case(tokens=tuple(range(num_ranks)), hidden=64, seed=again), buffer)
    return masks


@pytest.mark.parametrize(
    ("place", "seed"), [at(FOUR, 1, slow=True), at(FOUR, 2, slow=True), at(HOSTS, 3, slow=True)]
)
def test_naps_at_random(place: Place, seed: int) -> None:
    by_rank = outcomes_of(place, live_with_naps, seed, 3)
    for masks in by_rank:
        assert masks == by_rank[0]
