"""Normal mode when ranks die, fail, hang, are interrupted or leave: the others hear of it in time; nothing
remains. On one node, between virtual nodes and hosts, and on GPUs.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anyep import WaitTimeout
from anyep.core.calls import Kind, Phase
from anyep.core.outcomes import OUT, code_of
from tests.support.cases import Case, check_case, run_case
from tests.support.faults import (
    CACHED,
    COMBINE,
    DISPATCH,
    REASON,
    Fault,
    case_for,
    forget,
    new_buffer,
    strike,
)
from tests.support.gpu_scenarios import (
    FEW_SMS,
    GOOD,
    attempt,
    fail_from_now_on,
    good_arguments,
    good_dispatch,
    load_kernels,
    rows_of,
    wait_until_gone,
)
from tests.support.patience import scaled
from tests.support.places import Place
from tests.support.world import RankContext, RankDied

ONE = Place("cpu", 3)
PAIR = Place("cpu", 2, num_nodes=2)
NODES = Place("cpu", 4, num_nodes=2)
HOSTS = Place("cpu", 4, num_nodes=2, hosts=True)
SIMULATED = Place("simulated", 3)
SIMULATED_NODES = Place("simulated", 4, num_nodes=2)
GPU = Place("cuda", 3)
GPU_NODES = Place("cuda", 4, num_nodes=2)
GPU_WITH_HOST_HEAP = Place("cuda", 3, heap="host")
FUNCTIONS = ("dispatch", "cached dispatch", "combine")
RING = {"path": "ring"}


def soon_s(place: Place) -> float:
    """What ranks need to notice that another one is gone. Between hosts, NIXL notices a lost connection."""
    return scaled(5 if place.hosts else 2)


def params(quick: Iterable[Fault], slow: Iterable[Fault] = ()) -> list[Any]:
    return [*(fault.param() for fault in quick), *(fault.param(marks=[pytest.mark.slow]) for fault in slow)]


def each(places: Iterable[Place], slow: Iterable[Place] = ()) -> list[Any]:
    """Places for tests that may kill their ranks."""
    marks = [([], place) for place in places] + [([pytest.mark.slow], place) for place in slow]
    groups = {place: "hosts" if place.hosts else f"faults of {place}" for _, place in marks}
    return [place.param(marks=[*mark, pytest.mark.xdist_group(groups[place])]) for mark, place in marks]


# Killed


@pytest.mark.parametrize(
    "fault",
    params(
        [
            Fault(ONE, 0, DISPATCH, "notify"),
            Fault(ONE, 0, CACHED, "send"),
            Fault(ONE, 2, DISPATCH, "receive"),
            Fault(ONE, 1, COMBINE, "pull"),
            Fault(ONE, 2, COMBINE, "acknowledge"),
            Fault(ONE, 1, DISPATCH, "rings", **RING),
            Fault(NODES, 1, CACHED, "notify"),
            Fault(NODES, 1, DISPATCH, "rings"),
            Fault(NODES, 0, DISPATCH, "receive"),
            Fault(NODES, 1, COMBINE, "stage"),
            Fault(NODES, 1, COMBINE, "rings", **RING),
            Fault(PAIR, 0, CACHED, "receive"),
            Fault(SIMULATED, 1, CACHED),
            Fault(GPU, 1, CACHED),
            Fault(GPU, 1, COMBINE),
            Fault(GPU_NODES, 1, CACHED),
            Fault(GPU_NODES, 2, COMBINE),
            Fault(GPU_WITH_HOST_HEAP, 1, CACHED),
            Fault(GPU_WITH_HOST_HEAP, 1, COMBINE),
        ],
        slow=[
            Fault(ONE, 1, CACHED, "notify"),
            Fault(ONE, 2, COMBINE, "notify"),
            Fault(ONE, 1, DISPATCH, "send"),
            Fault(ONE, 1, COMBINE, "stage"),
            Fault(ONE, 0, COMBINE, "rings", **RING),
            Fault(ONE, 2, 3 + COMBINE, "acknowledge", **RING),
            Fault(NODES, 0, DISPATCH, "notify"),
            Fault(NODES, 0, COMBINE, "notify"),
            Fault(NODES, 0, CACHED, "rings"),
            Fault(NODES, 1, COMBINE, "rings"),
            Fault(NODES, 1, CACHED, "receive"),
            Fault(NODES, 0, COMBINE, "acknowledge"),
            Fault(NODES, 1, DISPATCH, "rings", **RING),
            Fault(NODES, 0, CACHED, "rings", **RING),
            Fault(NODES, 0, COMBINE, "acknowledge", **RING),
            Fault(PAIR, 1, DISPATCH, "rings"),
            Fault(PAIR, 1, COMBINE, "rings", **RING),
            Fault(HOSTS, 3, 3 + DISPATCH, "notify"),
            Fault(HOSTS, 2, 3 + CACHED, "receive"),
            Fault(HOSTS, 2, 3 + COMBINE, "rings", **RING),
            Fault(SIMULATED_NODES, 1, CACHED),
            Fault(SIMULATED_NODES, 2, COMBINE),
            Fault(SIMULATED, 1, DISPATCH),
            Fault(SIMULATED, 1, COMBINE),
        ],
    ),
)
def test_a_killed_rank(fault: Fault) -> None:
    struck = strike(fault)
    assert struck.dead == [fault.rank]
    pid = struck.pids[fault.rank]
    name = f"rank {fault.rank} (pid {pid})"
    for rank, outcome in struck.survivors.items():
        assert outcome.kind == "PeerLost", outcome
        assert outcome.was_noticed
        assert outcome.seconds < soon_s(fault.place)
        # A survivor names the dead rank, also if it waited for another survivor.
        is_far = fault.place.hosts and rank // 2 != fault.rank // 2
        died = f"{name} died while rank" in outcome.message
        assert died or (fault.place.hosts and f"rank {fault.rank} is out of reach" in outcome.message)
        assert outcome.later.startswith("BufferBroken: this Buffer is broken since an earlier call: rank")
        assert is_far or f"{name} is dead" in outcome.status.splitlines()
    if fault.place.device == "cuda":
        # The GPU works as before.
        Place("cuda", 2).world().run(run_case, Case((5, 6), num_biases=1), timeout=200)
    assert not Path(f"/proc/{pid}").exists()
    assert not [path for path in Path("/dev/shm").iterdir() if "anyep" in path.name]


def finish_and_exit(context: RankContext, place: Place, path: Any) -> tuple[str, str]:
    """Rank 0 leaves for good as soon as its own last call is done; the others are slower, and have the right
    results. What a rank sees of rank 0, and of itself."""
    buffer = new_buffer(context, place, path=path)
    case = case_for(place, path) if place.device == "cpu" else GOOD
    if context.rank:
        buffer.runtime.control.between_steps = lambda call, phase: time.sleep(0.02)
    for seed in range(3):
        check_case(context, replace(case, seed=seed), buffer)
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not place.hosts and buffer.status()[0].alive and time.monotonic() < deadline:
        time.sleep(0.01)
    status = buffer.status()
    return str(status[0]), str(status[context.rank])


@pytest.mark.parametrize("path", ["window", "ring"])
@pytest.mark.parametrize("place", each([ONE, NODES], slow=[PAIR, HOSTS, SIMULATED]))
def test_a_rank_that_is_done_may_die(place: Place, path: str) -> None:
    if place.device != "cpu" and path == "ring":
        pytest.skip("programs of kernels that wait for each other cannot be simulated")
    world = place.world()
    died, *outcomes = world.gather(finish_and_exit, place, path)
    world.revive()
    assert isinstance(died, RankDied)
    for first, own in outcomes:
        assert first.startswith("rank 0 (pid ")
        assert place.hosts or first.endswith("is dead")
        assert own.endswith("its last call was combine (call 9)")


# Failed


@pytest.mark.parametrize(
    "fault",
    params(
        [
            Fault(ONE, 1, CACHED, "send", "raise"),
            Fault(ONE, 0, COMBINE, "pull", "raise"),
            Fault(ONE, 2, DISPATCH, "notify", "raise"),
            Fault(NODES, 1, CACHED, "rings", "raise"),
            Fault(NODES, 0, COMBINE, "stage", "raise"),
            Fault(NODES, 1, COMBINE, "rings", "raise", "ring"),
            Fault(PAIR, 1, DISPATCH, "notify", "raise"),
            Fault(HOSTS, 3, 3 + CACHED, "rings", "raise"),
            Fault(SIMULATED, 1, COMBINE, "", "raise"),
            Fault(GPU, 1, CACHED, "", "raise"),
        ],
        slow=[Fault(SIMULATED, 1, DISPATCH, "", "raise")],
    ),
)
def test_a_rank_that_raises(fault: Fault) -> None:
    for rank, outcome in strike(fault).survivors.items():
        assert outcome.kind == ("ValueError" if rank == fault.rank else "PeerLost"), outcome
        assert REASON in outcome.message
        assert rank == fault.rank or f"rank {fault.rank}" in outcome.message
        assert outcome.was_noticed
        assert outcome.seconds < soon_s(fault.place)
        assert outcome.later.startswith("BufferBroken")
        assert re.search(rf"rank {fault.rank} \(pid \d+\) failed: ", outcome.status)


def fail_beside_the_caller(context: RankContext, place: Place, phase: str) -> list[str]:
    """An error beside the caller is raised where its event is waited for, and breaks later calls."""
    buffer = context.keep["struck"] = new_buffer(context, place)
    topk_idx = torch.arange(4)[:, None] % context.num_ranks
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, context.num_ranks)
    rows, *_, handle, _ = buffer.dispatch(torch.zeros(4, 16), None, per_rank, per_node, in_rank, per_expert)

    def fail(call: Any, phase_now: Phase) -> None:
        if context.rank == 0 and phase_now.name.lower() == phase:
            raise ValueError(REASON)

    buffer.runtime.control.between_steps = fail
    _, _, event = buffer.combine(rows, handle, async_finish=True)  # type: ignore[arg-type]
    return [attempt(event.current_stream_wait), attempt(buffer.combine, rows, handle)]


@pytest.mark.parametrize(
    ("fault"),
    params(
        [Fault(ONE, 0, CACHED, "pull", "raise"), Fault(NODES, 0, CACHED, "rings", "raise")],
        slow=[Fault(PAIR, 0, CACHED, "rings", "raise")],
    ),
)
def test_an_error_beside_the_caller(fault: Fault) -> None:
    world = fault.place.world()
    for rank, (outcome, later) in enumerate(world.run(fail_beside_the_caller, fault.place, fault.phase)):
        assert outcome.startswith("PeerLost: rank " if rank else f"ValueError: {REASON}")
        assert REASON in outcome
        assert not rank or "rank 0" in outcome
        assert later.startswith("BufferBroken: ")
    world.run(forget)


def fail_by_hand(context: RankContext) -> str:
    buffer = context.keep["struck"] = new_buffer(context, ONE)
    control = buffer.runtime.control
    control.fail(control.begin(1), ValueError(REASON))
    return attempt(buffer.get_dispatch_layout, torch.zeros(1, 1, dtype=torch.int64), context.num_ranks)


def test_a_broken_buffer_does_nothing_more() -> None:
    for outcome in ONE.world().run(fail_by_hand):
        assert outcome.startswith("BufferBroken")
        assert REASON in outcome
    ONE.world().run(forget)


# Slow


ROWS_OR_ROOM = "rows|room in its ring|room in its network ring"


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        Fault(ONE, 1, 3 + DISPATCH, "notify", "sleep").param("notify message"),
        Fault(ONE, 1, 3 + DISPATCH, "send", "stop").param("rows"),
        Fault(ONE, 1, 3 + COMBINE, "pull", "sleep").param("acknowledgement"),
        Fault(ONE, 1, DISPATCH, "rings", "sleep", "ring").param("rows"),
        Fault(NODES, 1, 3 + DISPATCH, "notify", "sleep").param("notify message", marks=[pytest.mark.slow]),
        Fault(NODES, 1, COMBINE, "rings", "sleep").param("rows|acknowledgement"),
        Fault(NODES, 1, DISPATCH, "rings", "stop", "ring").param(ROWS_OR_ROOM),
        Fault(NODES, 1, COMBINE, "rings", "sleep", "ring").param(ROWS_OR_ROOM, marks=[pytest.mark.slow]),
        Fault(PAIR, 1, 3 + DISPATCH, "rings", "sleep").param("rows"),
        Fault(HOSTS, 3, 3 + DISPATCH, "notify", "sleep").param("notify message"),
        Fault(HOSTS, 2, 3 + COMBINE, "rings", "sleep", "ring").param(ROWS_OR_ROOM, marks=[pytest.mark.slow]),
        Fault(SIMULATED, 1, DISPATCH, "", "sleep").param("notify message", marks=[pytest.mark.slow]),
        Fault(SIMULATED, 1, CACHED, "", "sleep").param("notify message", marks=[pytest.mark.slow]),
        Fault(SIMULATED, 1, 3 + COMBINE, "", "sleep").param("notify message"),
        Fault(GPU, 1, DISPATCH, "", "sleep").param("notify message"),
        Fault(GPU, 1, 3 + COMBINE, "", "sleep").param("notify message"),
    ],
)
def test_a_slow_rank(fault: Fault, what: str) -> None:
    """Also between hosts it says that it lives all the time: it is slow, and not out of reach."""
    outcomes = strike(fault).survivors
    late = [outcome for outcome in outcomes.values() if outcome.kind == "WaitTimeout"]
    assert late, outcomes
    call = rf"{FUNCTIONS[(fault.call - 1) % 3]} \(call {fault.call}\), phase"
    # Between nodes the awaited rank may give up on the slow one at the same moment.
    failed = r"failed: .* waited .* s for .*" if fault.place.num_nodes > 1 else "(?!)"
    for outcome in late:
        found = re.match(
            rf"rank \d waited {outcome.timeout_s:g} s for the ({what}) of rank (\d).* in {call} \w+.*:"
            rf" counter (\d+) seen, (\d+) expected\. Last status of rank \2: rank \2 \(pid \d+\)"
            rf" (?:is in {call} (\w+), for .* s.*|{failed})If it only needs longer, set ANYEP_TIMEOUT_S",
            outcome.message,
        )
        assert found is not None, outcome.message
        if fault.place.num_nodes == 1:
            assert found[2] == str(fault.rank)
            assert found[5] == (fault.phase or "send")
        if fault.place.device != "cpu":
            assert (found[3], found[4]) == (str(max(0, fault.call - 2)), str(fault.call))
        # A rank that waits for one that waits for the slow rank says so.
        assert re.search(rf"(of|waiting for) rank {fault.rank}\b", outcome.message), outcome.message
    # The slow rank, and ranks that did not wait for it, hear that a peer gave up.
    assert {outcome.kind for outcome in outcomes.values()} <= {"WaitTimeout", "PeerLost"}
    assert outcomes[fault.rank].kind == "PeerLost"
    if fault.place.device == "cpu":
        assert f"waited {late[0].timeout_s:g} s for" in outcomes[fault.rank].message
    assert all(outcome.later.startswith("BufferBroken") for outcome in outcomes.values())


@pytest.mark.parametrize(
    "fault",
    params(
        [Fault(HOSTS, 0, 3 + CACHED, "rings", "cut", "ring")],
        slow=[Fault(HOSTS, 0, 3 + DISPATCH, "receive", "cut")],
    ),
)
def test_a_cut_link(fault: Fault) -> None:
    outcomes = strike(fault).survivors
    cut_at = outcomes[fault.rank].struck_at
    for rank, outcome in outcomes.items():
        assert outcome.kind == "PeerLost", outcome
        assert 0 < outcome.at - cut_at < scaled(2 * outcome.timeout_s + 2)
        others = (2, 3) if rank < 2 else (0, 1)
        out_of_reach = re.search(
            r"ranks? (\d)(?:, (\d))? (?:is|are) out of reach: rank (\d) waited", outcome.message
        )
        assert out_of_reach is not None, outcome.message
        assert {int(name) for name in out_of_reach.group(1, 2) if name is not None} <= set(others)
        # It is this rank that waited in vain, or the other one of its host.
        assert int(out_of_reach[3]) not in others
        assert "Is the network between the hosts up" in outcome.message
        assert outcome.later.startswith("BufferBroken")


# Interrupted


@pytest.mark.parametrize(
    "fault",
    params(
        [Fault(place, 0, 3 + DISPATCH, "", "interrupt") for place in (ONE, NODES, GPU)],
        slow=[Fault(PAIR, 0, 3 + DISPATCH, "", "interrupt")],
    ),
)
def test_ctrl_c_out_of_a_wait(fault: Fault) -> None:
    interrupted, *others = strike(fault).survivors.values()
    assert interrupted.kind == "KeyboardInterrupt", interrupted
    assert interrupted.at - others[-1].struck_at < scaled(0.5)
    for outcome in others:
        assert outcome.kind == "PeerLost"
        assert "rank 0" in outcome.message
        assert fault.place == GPU or "KeyboardInterrupt" in outcome.message


# Gone


@pytest.mark.parametrize(
    "fault",
    params(
        [
            Fault(ONE, 1, 3 + DISPATCH, "", "destroy"),
            Fault(NODES, 1, 3 + DISPATCH, "", "destroy"),
            Fault(HOSTS, 3, 3 + DISPATCH, "", "destroy"),
            Fault(SIMULATED, 1, COMBINE, "", "destroy"),
            Fault(GPU, 1, 3 + DISPATCH, "", "destroy"),
        ],
        slow=[Fault(PAIR, 1, 3 + DISPATCH, "", "destroy"), Fault(SIMULATED, 1, DISPATCH, "", "destroy")],
    ),
)
def test_a_rank_that_destroys_its_buffer(fault: Fault) -> None:
    struck = strike(fault)
    for rank, outcome in struck.survivors.items():
        if rank == fault.rank:
            assert (outcome.kind, outcome.message) == (
                "BufferBroken",
                "this Buffer was destroyed: make a new one",
            )
            continue
        name = f"rank {fault.rank} (pid {struck.pids[fault.rank]})"
        assert outcome.kind == "PeerLost", outcome
        assert outcome.was_noticed
        assert outcome.seconds < soon_s(fault.place)
        # On the CPU a rank may wait for another one that waits for the one that is gone.
        waited = "" if fault.place.device == "cpu" else f" {rank} waited for its"
        assert f"{name} destroyed its Buffer while rank{waited}" in outcome.message
        assert f"{name} has destroyed its Buffer" in outcome.status


def leave_with_an_error(context: RankContext) -> float:
    """A call beside rank 0 waits in vain; an error takes rank 0 out of the `with` at once."""
    buffer = context.keep["struck"] = new_buffer(context, ONE)
    if context.rank:
        deadline = time.monotonic() + 60
        while buffer.status()[0].state == "alive" and time.monotonic() < deadline:
            time.sleep(0.01)
        return 0.0
    topk_idx = torch.zeros(4, 1, dtype=torch.int64)
    started = time.monotonic()
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, context.num_ranks)
    layout = (None, per_rank, None, in_rank, per_expert, topk_idx, torch.ones(4, 1))
    try:
        with buffer:
            buffer.dispatch(torch.zeros(4, 16), *layout, num_worst_tokens=99, async_finish=True)
            raise KeyError("out of here")
    except KeyError:
        return time.monotonic() - started
    return 1e9


def test_an_error_does_not_wait_for_what_is_under_way() -> None:
    assert ONE.world().run(leave_with_an_error)[0] < scaled(1)
    ONE.world().run(forget)


def fork_with_a_buffer(context: RankContext) -> str:
    with new_buffer(context, ONE) as buffer:
        case = case_for(ONE)
        check_case(context, case, buffer)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            answer = attempt(buffer.status)
            buffer.destroy()
            os.write(writer, answer.encode())
            os._exit(0)
        os.waitpid(child, 0)
        answer = os.read(reader, 1000).decode()
        check_case(context, case, buffer)
        dist.barrier(group=context.group)
    return answer


def test_a_forked_child_may_not_call() -> None:
    world = ONE.world()
    for pid, answer in zip(world.pids, world.run(fork_with_a_buffer), strict=True):
        reason = f"this Buffer belongs to process {pid}: a forked child must make its own"
        assert answer == f"BufferBroken: {reason}"


def refuse_after_an_async_call(context: RankContext) -> list[str]:
    """An event with an error as previous_event: the call is refused, the peers hear of it, all go on."""
    with new_buffer(context, ONE) as buffer:
        x, topk_idx = torch.zeros(4, 16), torch.zeros(4, 1, dtype=torch.int64)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, context.num_ranks)
        rows, *_, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert)
        messages = []
        event = None
        try:
            bad = context.rank == 0  # all rows went there
            _, _, event = buffer.combine(rows[:-1] if bad else rows, handle, async_finish=True)  # type: ignore[index, arg-type]
        except Exception as error:
            messages.append(type(error).__name__)
        try:
            buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, previous_event=event)
        except Exception as error:
            messages.append(type(error).__name__)
        check_case(context, case_for(ONE), buffer)
        dist.barrier(group=context.group)
    return messages


def test_a_previous_event_that_failed() -> None:
    assert ONE.world().run(refuse_after_an_async_call) == [
        ["InvalidCall", "Disagreement"],
        ["Disagreement"],
        ["Disagreement"],
    ]


def test_errors_are_of_the_documented_kinds() -> None:
    assert issubclass(WaitTimeout, TimeoutError)


# What only GPUs do: kernels wait, and hosts hear of it at the next contact


def fail_to_grow(context: RankContext, step: int) -> str:
    """Rank 1 has all notify messages of a dispatch that needs windows, and fails in a step before it adds
    any: before it has told the others that it will, or after that. Rank 2 is late."""
    buffer = context.keep["struck"] = new_buffer(context, SIMULATED)
    runtime, steps = buffer.runtime, []
    assert runtime.windows.allocate(runtime.windows.num_bytes) is not None

    def strike(call: Any, phase: Phase) -> None:
        if phase is Phase.NOTIFY:
            steps.append(phase)
            if context.rank == 1 and len(steps) == step:
                raise ValueError(REASON)
            if context.rank == 2:
                time.sleep(0.5)

    arguments = good_arguments(buffer)
    runtime.control.between_steps = strike
    outcome = attempt(buffer.dispatch, **arguments)
    assert runtime.windows.num_blocks == 1
    return outcome


@pytest.mark.parametrize("step", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", each([SIMULATED]))
def test_a_rank_that_fails_before_windows_grow(place: Place, step: int) -> None:
    for rank, outcome in enumerate(place.world().run(fail_to_grow, step)):
        assert outcome.startswith("ValueError" if rank == 1 else "PeerLost"), outcome
        assert REASON in outcome
        if rank != 1:
            assert f"rank {rank} waited for its word that it adds windows in dispatch (call 1)" in outcome
    place.world().run(forget)


def take_part_after_a_failure(context: RankContext) -> tuple[str, int]:
    """Rank 1 fails before anything of its second call is launched; then it launches what a graph would."""
    from anyep.backends.cuda import constants
    from anyep.core.headers import signature

    buffer = context.keep["struck"] = new_buffer(context, SIMULATED)
    rows, *_, handle, _ = good_dispatch(buffer)
    runtime, routing = buffer.runtime, handle[0]
    if context.rank == 1:
        fail_from_now_on(buffer)
    outcome = attempt(buffer.dispatch, rows_of(buffer, 1), handle=handle, config=FEW_SMS)
    if context.rank == 1:
        control = runtime.device_control
        recipes = (
            (control.kernels.exchange_by_handle, False),
            (control.kernels.barrier, constants.ARRIVED_AT, False),
        )
        values = {
            "rank_prefix": routing,
            "digests": torch.zeros(2 * context.num_ranks, dtype=torch.int64),
            "message": control.keep_header(signature(), Kind.CACHED_DISPATCH),
            "ticket": 0,
        }
        control.batches.run(recipes, control.gpu.stream.moment(True, True), values)
    else:
        outcome = attempt(buffer.combine, rows, handle, config=FEW_SMS)
    dist.barrier(group=context.group)
    return outcome, int(runtime.device_control.state[constants.OUTCOME])


@pytest.mark.parametrize("place", each([SIMULATED]))
def test_no_kernel_takes_part_after_a_failure(place: Place) -> None:
    for rank, (outcome, code) in enumerate(place.world().run(take_part_after_a_failure)):
        assert outcome.startswith("ValueError" if rank == 1 else "PeerLost: rank 1 "), outcome
        assert REASON in outcome
        assert code_of(code) == OUT
    place.world().run(forget)


def refuse_alone(context: RankContext) -> list[str]:
    """Rank 0 refuses its call, in which rank 2 does not take part."""
    buffer = context.keep["struck"] = new_buffer(context, SIMULATED, timeout_s=1)
    arguments = good_arguments(buffer)
    dist.barrier(group=context.group)
    outcomes = []
    if context.rank == 0:
        outcomes.append(attempt(buffer.dispatch, **(arguments | {"topk_idx": None})))
    if context.rank != 2:
        outcomes += [attempt(buffer.dispatch, **arguments) for _ in range(1 + context.rank)]
    dist.barrier(group=context.group)
    return outcomes


@pytest.mark.parametrize("place", each([SIMULATED]))
def test_who_did_not_come_to_a_refused_call_is_named(place: Place) -> None:
    (refused, heard), (late, broken), _ = place.world().run(refuse_alone)
    assert refused.startswith("InvalidCall: ")
    # Both wait for rank 2; the one that gives up first stops the other.
    in_time = r"WaitTimeout: rank \d waited 1 s for the notify message of rank 2 in dispatch \(call 1\)"
    waiting = r"while rank \d waited for rank 2's notify message in dispatch \(call 1\)"
    stopped = rf"PeerLost: .* (?:gave up|failed) {waiting}"
    for message in (heard, late):
        assert re.match(rf"{in_time}|{stopped}", message), message
    assert any(re.match(in_time, message) for message in (heard, late))
    assert broken.startswith("BufferBroken: ")
    place.world().run(forget)


def destroy_before_a_slow_rank_comes(context: RankContext, place: Place) -> str:
    """Rank 1 destroys its Buffer. Rank 2 stops waiting for it and for rank 0, which comes later, and fails
    for the same reason before rank 2 looks for its own."""
    load_kernels(context)
    buffer = context.keep["struck"] = new_buffer(context, place)
    arguments = good_arguments(buffer)
    rows, *_, handle, _ = buffer.dispatch(**arguments)
    buffer.runtime.device_control.gpu.synchronize_device()
    dist.barrier(group=context.group)
    if context.rank == 1:
        buffer.destroy()
    if context.rank == 0:
        dist.recv(torch.zeros(1), src=2, group=context.group)
    outcome = attempt(buffer.combine, rows, handle, config=FEW_SMS)
    assert (outcome == "fine") is (context.rank != 1)
    if context.rank == 2:
        dist.send(torch.zeros(1), dst=0, group=context.group)
        wait_until_gone(buffer, 0)
    return attempt(buffer.dispatch, **arguments)


@pytest.mark.parametrize("place", each([SIMULATED, GPU]))
def test_who_destroyed_its_buffer_is_named(place: Place) -> None:
    outcomes = place.world().run(destroy_before_a_slow_rank_comes, place)
    place.world().run(forget)
    for rank in (0, 2):
        waiting = f"while rank {rank} waited for its notify message"
        pattern = rf"PeerLost: rank 1 \(pid \d+\) destroyed its Buffer {waiting}"
        assert re.match(pattern, outcomes[rank]), outcomes


def die_in_a_call(context: RankContext) -> str:
    """Rank 0 dies in a combine, when its notify message is there. Rank 1 stops waiting for the notify message
    of rank 2, which comes later, and has failed when rank 1 looks for the reason."""
    buffer = new_buffer(context, SIMULATED)
    arguments = good_arguments(buffer)
    rows, *_, handle, _ = buffer.dispatch(**arguments)
    dist.barrier(group=context.group)
    if context.rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if context.rank == 2:
        dist.recv(torch.zeros(1), src=1, group=context.group)
    assert attempt(buffer.combine, rows, handle, config=FEW_SMS) == "fine"
    if context.rank == 1:
        dist.send(torch.zeros(1), dst=2, group=context.group)
        wait_until_gone(buffer, 2)
    return attempt(buffer.dispatch, **arguments)


@pytest.mark.parametrize("place", each([SIMULATED]))
def test_who_died_in_a_call_is_named(place: Place) -> None:
    died, *outcomes = place.world().gather(die_in_a_call)
    place.world().revive()
    assert isinstance(died, RankDied)
    waits = ((1, "rank 2's notify message"), (2, "its acknowledgement"))
    for outcome, (rank, whose) in zip(outcomes, waits, strict=True):
        pattern = rf"PeerLost: rank 0 \(pid \d+\) died while rank {rank} waited for {whose} in combine"
        assert re.match(pattern, outcome), outcomes
