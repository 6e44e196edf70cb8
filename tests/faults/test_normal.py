"""Ranks that die, fail, hang, are interrupted or leave: the others hear of it in time; nothing remains."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from anyep import BufferBroken, PeerLost, WaitTimeout
from anyep.buffer import Buffer
from anyep.modes.status import Phase
from tests.support.cases import Case, check_case
from tests.support.world import RankContext, RankDied, World


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
    """How a rank's calls ended."""

    kind: str
    message: str
    seconds: float
    later: str
    status: str


@pytest.fixture
def world() -> Iterator[World]:
    """Three ranks of its own: what happens to them is nobody else's business."""
    with World(3) as fresh:
        yield fresh


def new_buffer(context: RankContext, path: str = "window") -> Buffer:
    return Buffer(context.group, 1 << 20, device="cpu", num_window_bytes=0 if path == "ring" else None)


def call_until_it_fails(context: RankContext, fault: Fault) -> Outcome:
    """Dispatches, cached dispatches and combines, over and over, until the fault has struck."""
    buffer = new_buffer(context, fault.path)
    assert buffer.runtime is not None
    struck = [time.monotonic()]

    def strike(call: Any, phase: Phase) -> None:
        struck[0] = time.monotonic()
        if (context.rank, call.number, phase.name.lower()) != (fault.rank, fault.call, fault.phase):
            return
        if fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.what == "raise":
            raise ValueError("the experts are on fire")
        elif fault.what == "sleep":
            time.sleep(2.5)

    buffer.runtime.conversation.between_steps = strike
    case = Case(tokens=(20,) * context.num_ranks, num_window_bytes=0 if fault.path == "ring" else None)
    try:
        for _ in range(10):
            check_case(context, case, buffer)
    except BaseException as error:
        seconds = time.monotonic() - struck[0]
        try:
            check_case(context, case, buffer)
            later = "worked"
        except BaseException as second:
            later = f"{type(second).__name__}: {second}"
        return Outcome(type(error).__name__, str(error), seconds, later, "\n".join(map(str, buffer.status())))
    return Outcome("none", "", 0, "", "")


KILLS = [
    Fault(0, 1, "notify"),
    Fault(1, 2, "notify"),
    Fault(2, 3, "notify"),
    Fault(1, 1, "send"),
    Fault(2, 1, "receive"),
    Fault(0, 2, "send"),
    Fault(1, 3, "stage"),
    Fault(1, 3, "pull"),
    Fault(2, 3, "acknowledge"),
    Fault(1, 1, "rings", path="ring"),
    Fault(0, 3, "rings", path="ring"),
    Fault(2, 6, "acknowledge", path="ring"),
]


@pytest.mark.parametrize("fault", KILLS, ids=str)
def test_a_killed_rank(world: World, fault: Fault) -> None:
    pids = world.pids
    outcomes = world.gather(call_until_it_fails, fault, timeout=30)
    assert isinstance(outcomes[fault.rank], RankDied)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != fault.rank]
    for outcome in survivors:
        assert outcome.kind == "PeerLost", outcome
        assert outcome.seconds < 2
        # A survivor names the dead rank, also if it waited for the other survivor.
        assert f"rank {fault.rank} (pid {pids[fault.rank]}) died while rank" in outcome.message
        assert outcome.later.startswith("BufferBroken: this Buffer is broken since an earlier call: rank")
        assert f"rank {fault.rank} (pid {pids[fault.rank]}) is dead" in outcome.status
    world.close()
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    assert not [path for path in Path("/dev/shm").iterdir() if "anyep" in path.name]


@pytest.mark.parametrize(
    "fault",
    [Fault(1, 2, "send", "raise"), Fault(0, 3, "pull", "raise"), Fault(2, 1, "notify", "raise")],
    ids=str,
)
def test_a_rank_that_raises(world: World, fault: Fault) -> None:
    outcomes = world.gather(call_until_it_fails, fault, timeout=30)
    for rank, outcome in enumerate(outcomes):
        assert outcome.seconds < 2
        assert "the experts are on fire" in outcome.message
        assert outcome.later.startswith("BufferBroken")
        assert outcome.kind == ("ValueError" if rank == fault.rank else "PeerLost")
        if rank != fault.rank:
            assert f"rank {fault.rank}" in outcome.message


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (Fault(1, 4, "notify", "sleep"), "letter"),
        (Fault(1, 4, "send", "sleep"), "rows"),
        (Fault(1, 6, "pull", "sleep"), "acknowledgement"),
        (Fault(1, 1, "rings", "sleep", "ring"), "rows"),
    ],
    ids=str,
)
def test_a_slow_rank(world: World, monkeypatch: pytest.MonkeyPatch, fault: Fault, what: str) -> None:
    monkeypatch.setenv("ANYEP_TIMEOUT_S", "1")
    world.run(set_timeout, "1")
    outcomes = world.gather(call_until_it_fails, fault, timeout=30)
    late = [outcome for outcome in outcomes if outcome.kind == "WaitTimeout"]
    assert late, outcomes
    for outcome in late:
        pattern = (
            rf"rank \d waited 1 s for the {what} of rank 1.* in .*\(call {fault.call}\), phase \w+.*:"
            rf" counter \d+ seen, \d+ expected\. What rank 1 said last: rank 1 \(pid \d+\) is in .*"
            rf"\(call {fault.call}\), phase {fault.phase}, for .* s.*ANYEP_TIMEOUT_S"
        )
        assert re.match(pattern, outcome.message), outcome.message
    # The slow rank and whoever did not wait for it hear that a peer gave up.
    assert outcomes[1].kind == "PeerLost"
    assert "waited 1 s for" in outcomes[1].message


def set_timeout(context: RankContext, seconds: str) -> None:
    os.environ["ANYEP_TIMEOUT_S"] = seconds


def wait_in_vain(context: RankContext) -> tuple[str, str, float]:
    """Rank 0 is interrupted while it waits; the others wait for it."""
    buffer = new_buffer(context)
    case = Case(tokens=(4,) * context.num_ranks)
    check_case(context, case, buffer)
    interrupted = [0.0]
    if context.rank == 2:
        time.sleep(1.5)  # so that rank 0 and rank 1 wait
    if context.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupt() -> None:
            interrupted[0] = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(0.4, interrupt).start()
    try:
        check_case(context, case, buffer)
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - interrupted[0]
    return "none", "", 0.0


def test_ctrl_c_out_of_a_wait(world: World) -> None:
    outcomes = world.run(wait_in_vain)
    kind, _, seconds = outcomes[0]
    assert kind == "KeyboardInterrupt"
    assert seconds < 0.5
    for kind, message, _ in outcomes[1:]:
        assert kind == "PeerLost"
        assert "rank 0" in message
        assert "KeyboardInterrupt" in message


def leave_with_an_error(context: RankContext) -> float:
    """A call beside the caller waits in vain; an error takes the caller out of the `with` at once."""
    if context.rank:
        buffer = new_buffer(context)
        time.sleep(1.5)
        buffer.destroy()
        return 0.0
    topk_idx = torch.zeros(4, 1, dtype=torch.int64)
    started = time.monotonic()
    try:
        with new_buffer(context) as buffer:
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, context.num_ranks)
            buffer.dispatch(
                torch.zeros(4, 16),
                None,
                per_rank,
                None,
                in_rank,
                per_expert,
                topk_idx,
                torch.ones(4, 1),
                num_worst_tokens=99,
                async_finish=True,
            )
            raise KeyError("out of here")
    except KeyError:
        return time.monotonic() - started
    return 99.0


def test_an_error_does_not_wait_for_what_is_under_way(world: World) -> None:
    assert world.run(leave_with_an_error)[0] < 1


def a_broken_buffer(context: RankContext) -> str:
    buffer = new_buffer(context)
    assert buffer.runtime is not None
    buffer.runtime.conversation.fail(buffer.runtime.conversation.begin(1), ValueError("spilled coffee"))
    try:
        buffer.get_dispatch_layout(torch.zeros(1, 1, dtype=torch.int64), context.num_ranks)
    except BufferBroken as error:
        return str(error)
    return "it works"


def test_a_broken_buffer_does_nothing_more(world: World) -> None:
    for message in world.run(a_broken_buffer):
        assert "spilled coffee" in message


def leave(context: RankContext) -> str:
    buffer = new_buffer(context)
    case = Case(tokens=(4,) * context.num_ranks)
    check_case(context, case, buffer)
    if context.rank == 1:
        buffer.destroy()
        buffer.destroy()
    try:
        check_case(context, case, buffer)
    except (PeerLost, BufferBroken) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_rank_that_destroyed_its_buffer(world: World) -> None:
    outcomes = world.run(leave)
    assert outcomes[1] == "BufferBroken: this Buffer was destroyed: make a new one"
    for rank in (0, 2):
        assert outcomes[rank].startswith("PeerLost: ")
        assert "destroyed its Buffer while rank" in outcomes[rank]


def finish_and_exit(context: RankContext) -> float:
    """Rank 0 leaves for good as soon as its own last call is done; the others are slower."""
    buffer = new_buffer(context)
    assert buffer.runtime is not None
    if context.rank:
        buffer.runtime.conversation.between_steps = lambda call, phase: time.sleep(0.02)
    for seed in range(3):
        check_case(context, Case(tokens=(9,) * context.num_ranks, seed=seed), buffer)
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def test_a_rank_that_is_done_may_die(world: World) -> None:
    for _ in range(3):
        outcomes = world.gather(finish_and_exit)
        assert isinstance(outcomes[0], RankDied)
        assert outcomes[1:] == [1.0, 1.0]
        world.restart()


def interrupted_async(context: RankContext) -> str:
    """An error beside the caller is raised where its event is waited for, and breaks later calls."""
    buffer = new_buffer(context)
    assert buffer.runtime is not None
    x = torch.zeros(4, 16)
    topk_idx = torch.zeros(4, 1, dtype=torch.int64)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, context.num_ranks)
    rows, *_, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert)

    def fail(call: Any, phase: Phase) -> None:
        if context.rank == 0 and phase is Phase.PULL:
            raise ValueError("the worker is on fire")

    buffer.runtime.conversation.between_steps = fail
    _, _, event = buffer.combine(rows, handle, async_finish=True)  # type: ignore[arg-type]
    try:
        event.current_stream_wait()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "nothing was raised"
    try:
        buffer.combine(rows, handle)  # type: ignore[arg-type]
    except BufferBroken:
        return message
    return "the Buffer still works"


def test_an_error_beside_the_caller(world: World) -> None:
    outcomes = world.run(interrupted_async)
    assert outcomes[0] == "ValueError: the worker is on fire"
    for outcome in outcomes[1:]:
        assert outcome.startswith("PeerLost: rank 0")
        assert "the worker is on fire" in outcome


def refuse_after_an_async_call(context: RankContext) -> list[str]:
    """An event with an error as previous_event: the call is refused, the peers hear of it, all go on."""
    buffer = new_buffer(context)
    case = Case(tokens=(4,) * context.num_ranks)
    x = torch.zeros(4, 16)
    topk_idx = torch.zeros(4, 1, dtype=torch.int64)
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
    check_case(context, case, buffer)
    return messages


def test_a_previous_event_that_failed(world: World) -> None:
    assert world.run(refuse_after_an_async_call) == [
        ["InvalidCall", "Disagreement"],
        ["Disagreement"],
        ["Disagreement"],
    ]


def fork_with_a_buffer(context: RankContext) -> str:
    buffer = new_buffer(context)
    case = Case(tokens=(4,) * context.num_ranks)
    check_case(context, case, buffer)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            buffer.status()
            answer = "no error"
        except BufferBroken as error:
            answer = str(error)
        buffer.destroy()
        os.write(writer, answer.encode())
        os._exit(0)
    os.waitpid(child, 0)
    answer = os.read(reader, 1000).decode()
    check_case(context, case, buffer)
    return answer


def test_a_forked_child_may_not_call(world: World) -> None:
    for rank, answer in enumerate(world.run(fork_with_a_buffer)):
        assert (
            answer == f"this Buffer belongs to process {world.pids[rank]}: a forked child must make its own"
        )


def test_errors_are_of_the_documented_kinds() -> None:
    assert issubclass(WaitTimeout, TimeoutError)
