"""Ranks on several (virtual) nodes that die, fail, hang, are interrupted or leave: the others hear of it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anyep import BufferBroken, Config, PeerLost
from anyep.buffer import Buffer
from anyep.modes.status import Phase
from tests.support.cases import Case, check_case
from tests.support.world import RankContext, RankDied, World

SOON_S = 4
"""A peer's death or failure is noticed in milliseconds; there may be many processes for each core."""
DISPATCH, CACHED, COMBINE = 1, 2, 3
"""The calls of the first round of `check_case`."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank, in which of its calls and in which phase."""

    rank: int
    call: int
    phase: str
    what: str = "kill"
    path: str = "window"
    per_node: int = 2


@dataclass(frozen=True)
class Outcome:
    """How a rank's calls ended."""

    kind: str
    message: str
    seconds: float
    later: str
    status: str


@pytest.fixture(params=[(2, 2), (2, 1)], ids=["2x2", "2x1"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks of its own, on two nodes: what happens to them is nobody else's business."""
    nodes, per_node = request.param
    with World(nodes * per_node) as fresh:
        yield fresh


def case_for(num_ranks: int, path: str = "window") -> Case:
    """With rings, far more rows than they hold: whoever is missing is missed."""
    return Case(
        tokens=(40,) * num_ranks,
        num_topk=4,
        config=Config(4, 1, 2, 1, 2),
        num_window_bytes=0 if path == "ring" else None,
        ranks_per_node=num_ranks // 2,
    )


def new_buffer(context: RankContext, path: str = "window") -> Buffer:
    return Buffer(
        context.group,
        1 << 20,
        1 << 20,
        device="cpu",
        num_window_bytes=0 if path == "ring" else None,
        ranks_per_node=context.num_ranks // 2,
    )


def call_until_it_fails(context: RankContext, fault: Fault) -> Outcome:
    """Dispatches, cached dispatches and combines, over and over, until the fault has struck."""
    buffer = new_buffer(context, fault.path)
    conversation = buffer.runtime.conversation
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
            time.sleep(2.5 * conversation.timeout_s)

    conversation.between_steps = strike
    case = case_for(context.num_ranks, fault.path)
    try:
        for _ in range(4):
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
    Fault(0, DISPATCH, "notify"),
    Fault(1, CACHED, "notify"),
    Fault(0, COMBINE, "notify"),
    Fault(1, DISPATCH, "rings"),
    Fault(0, CACHED, "rings"),
    Fault(1, COMBINE, "rings"),
    Fault(0, DISPATCH, "receive"),
    Fault(1, CACHED, "receive"),
    Fault(1, COMBINE, "stage"),
    Fault(0, COMBINE, "acknowledge"),
    Fault(1, DISPATCH, "rings", path="ring"),
    Fault(0, CACHED, "rings", path="ring"),
    Fault(1, COMBINE, "rings", path="ring"),
    Fault(0, COMBINE, "acknowledge", path="ring"),
    Fault(1, DISPATCH, "rings", per_node=1),
    Fault(0, CACHED, "receive", per_node=1),
    Fault(1, COMBINE, "rings", path="ring", per_node=1),
]


@pytest.mark.parametrize("fault", KILLS, ids=str)
def test_a_killed_rank(fault: Fault) -> None:
    with World(2 * fault.per_node) as world:
        pids = world.pids
        outcomes = world.gather(call_until_it_fails, fault, timeout=40)
    assert isinstance(outcomes[fault.rank], RankDied)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != fault.rank]
    for outcome in survivors:
        assert outcome.kind == "PeerLost", outcome
        assert outcome.seconds < SOON_S
        # A survivor names the dead rank, also if it waited for another survivor.
        assert f"rank {fault.rank} (pid {pids[fault.rank]}) died while rank" in outcome.message
        assert outcome.later.startswith("BufferBroken: this Buffer is broken since an earlier call: rank")
        assert f"rank {fault.rank} (pid {pids[fault.rank]}) is dead" in outcome.status
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    assert not [path for path in Path("/dev/shm").iterdir() if "anyep" in path.name]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(1, CACHED, "rings", "raise"),
        Fault(0, COMBINE, "stage", "raise"),
        Fault(1, DISPATCH, "notify", "raise", per_node=1),
        Fault(1, COMBINE, "rings", "raise", "ring"),
    ],
    ids=str,
)
def test_a_rank_that_raises(fault: Fault) -> None:
    with World(2 * fault.per_node) as world:
        outcomes = world.gather(call_until_it_fails, fault, timeout=40)
    for rank, outcome in enumerate(outcomes):
        assert outcome.seconds < SOON_S
        assert "the experts are on fire" in outcome.message
        assert outcome.later.startswith("BufferBroken")
        assert outcome.kind == ("ValueError" if rank == fault.rank else "PeerLost")
        if rank != fault.rank:
            assert f"rank {fault.rank}" in outcome.message


def set_timeout(context: RankContext, seconds: str) -> None:
    os.environ["ANYEP_TIMEOUT_S"] = seconds


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (Fault(1, 4, "notify", "sleep"), "letter"),
        (Fault(1, 4, "rings", "sleep", per_node=1), "rows"),
        (Fault(1, COMBINE, "rings", "sleep"), "rows|acknowledgement"),
        (Fault(1, DISPATCH, "rings", "sleep", "ring"), "rows|room in its network ring|room in its ring"),
        (Fault(1, COMBINE, "rings", "sleep", "ring"), "rows|room in its network ring|room in its ring"),
    ],
    ids=str,
)
def test_a_slow_rank(fault: Fault, what: str) -> None:
    with World(2 * fault.per_node) as world:
        world.run(set_timeout, "1")
        outcomes = world.gather(call_until_it_fails, fault, timeout=40)
    late = [outcome for outcome in outcomes if outcome.kind == "WaitTimeout"]
    assert late, outcomes
    pattern = (
        rf"rank \d waited 1 s for the ({what}) of rank (\d).* in .*\(call {fault.call}\), phase \w+.*:"
        rf" counter \d+ seen, \d+ expected\. What rank \2 said last: rank \2 \(pid \d+\) is in .*"
        rf"\(call {fault.call}\), phase \w+, for .* s.*ANYEP_TIMEOUT_S"
    )
    for outcome in late:
        assert re.match(pattern, outcome.message), outcome.message
        # Whoever waits for one that waits for the slow rank says so.
        assert re.search(rf"(of|waiting for) rank {fault.rank}\b", outcome.message), outcome.message
    # The slow rank and whoever did not wait for it hear that a peer gave up.
    assert outcomes[fault.rank].kind == "PeerLost"
    assert "waited 1 s for" in outcomes[fault.rank].message
    assert all(outcome.later.startswith("BufferBroken") for outcome in outcomes)


def wait_in_vain(context: RankContext) -> tuple[str, str, float]:
    """Rank 0 is interrupted while it waits; the others wait for it."""
    buffer = new_buffer(context)
    case = case_for(context.num_ranks)
    check_case(context, case, buffer)
    interrupted = [0.0]
    if context.rank == context.num_ranks - 1:
        time.sleep(1.5)  # so that all others wait
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


def leave(context: RankContext) -> str:
    buffer = new_buffer(context)
    case = case_for(context.num_ranks)
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
    for rank, outcome in enumerate(outcomes):
        if rank != 1:
            assert outcome.startswith("PeerLost: ")
            assert "rank 1 (pid " in outcome
            assert "destroyed its Buffer while rank" in outcome


def finish_and_exit(context: RankContext, path: str) -> float:
    """Rank 0 leaves for good as soon as its own last call is done; the others are slower."""
    buffer = new_buffer(context, path)
    if context.rank:
        buffer.runtime.conversation.between_steps = lambda call, phase: time.sleep(0.02)
    for seed in range(3):
        check_case(context, replace(case_for(context.num_ranks, path), seed=seed), buffer)
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


@pytest.mark.parametrize("path", ["window", "ring"])
def test_a_rank_that_is_done_may_die(world: World, path: str) -> None:
    for _ in range(2):
        outcomes = world.gather(finish_and_exit, path)
        assert isinstance(outcomes[0], RankDied)
        assert outcomes[1:] == [1.0] * (world.num_ranks - 1)
        world.restart()


def interrupted_async(context: RankContext) -> str:
    """An error beside the caller is raised where its event is waited for, and breaks later calls."""
    buffer = new_buffer(context)
    x = torch.zeros(4, 16)
    topk_idx = torch.arange(4)[:, None] % context.num_ranks
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, context.num_ranks)
    rows, *_, handle, _ = buffer.dispatch(x, None, per_rank, per_node, in_rank, per_expert)

    def fail(call: Any, phase: Phase) -> None:
        if context.rank == 0 and phase is Phase.RINGS:
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
        assert outcome.startswith("PeerLost: rank ")
        assert "rank 0" in outcome
        assert "the worker is on fire" in outcome
