"""Faults as data: what happens to a rank, in which of its calls and in which phase; and how calls end then.

    fault = Fault(Place("cpu", 4, num_nodes=2), rank=1, call=COMBINE, phase="rings", path="ring")
    struck = strike(fault)
    for rank, outcome in struck.survivors.items():
        assert outcome.kind == "PeerLost" and outcome.was_noticed

Calls are counted from 1. A round of normal mode is a dispatch, a cached dispatch and a combine; one of
low-latency mode a dispatch and a combine. An empty phase is the first of its call. What can happen to a rank:

- kill: it gets SIGKILL;
- raise: its host raises an error;
- sleep: it goes on when the others have given up waiting for it;
- stop: the same by SIGSTOP, so that none of its threads runs;
- cut: its host loses the network (only between hosts);
- destroy: when the others wait for it in this call, it destroys its Buffer instead;
- interrupt: it gets SIGINT while it waits in this call for the last rank.

`strike` takes the ranks of the place that all tests share, and leaves them usable. What else a test does when
faults strike, it builds from `new_buffer`, `patient_s` and `arm`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pytest
import torch

from anyep import Config
from anyep.api.buffer import Buffer
from anyep.core.calls import Phase
from tests.support import cases, low_latency_cases
from tests.support.namespaces import TwoHosts, cut_own_link
from tests.support.patience import patience_s
from tests.support.places import Place, buffer_device, tensor_device
from tests.support.world import RankContext, RankDied, World, close_shared_worlds

Mode = Literal["normal", "low latency"]
What = Literal["kill", "raise", "sleep", "stop", "cut", "destroy", "interrupt"]
Path = Literal["window", "ring"]
DISPATCH, CACHED, COMBINE = 1, 2, 3
"""The calls of the first round in normal mode."""
NUM_ROUNDS: Final = 4
TIMED: Final = ("sleep", "stop", "cut")
"""What others do not notice: they give up waiting."""
NAP: Final = 2.5
"""How long a rank sleeps, in timeouts."""
UNTIMED_S: Final = 100.0
"""The timeout where none should pass; ranks that do not answer for ANSWER_S have not noticed a fault."""
ANSWER_S: Final = 60.0
ANSWER_TIMED_S: Final = 240.0
REASON: Final = "the experts are on fire"


@dataclass(frozen=True)
class Fault:
    """What happens to a rank, in which of its calls and in which phase."""

    place: Place
    rank: int
    call: int
    phase: str = ""
    what: What = "kill"
    path: Path = "window"
    mode: Mode = "normal"

    def __str__(self) -> str:
        parts = [str(self.place), self.path if self.path != "window" else "", self.what]
        parts += [f"rank{self.rank}", f"call{self.call}", self.phase]
        return "-".join(part for part in parts if part)

    def param(self, *more: Any, marks: Sequence[Any] = ()) -> Any:
        """For `parametrize`, with the marks that the place needs; those of a place run in one process."""
        group = pytest.mark.xdist_group("hosts" if self.place.hosts else f"faults of {self.place}")
        return self.place.param(*more, marks=[group, *marks], value=self, name=str(self))


@dataclass(frozen=True)
class Outcome:
    """How a rank's calls ended."""

    kind: str
    """The type of the error, or "none"."""
    message: str
    at: float
    """On the clock that all processes share; as `struck_at`, when this rank let something happen."""
    struck_at: float
    seconds: float
    """From the beginning of its last phase to the error."""
    timeout_s: float
    later: str
    """What another call raised."""
    status: str

    @property
    def was_noticed(self) -> bool:
        """Whether something else ended the wait than its deadline."""
        return self.kind != "WaitTimeout" and self.seconds < self.timeout_s


@dataclass(frozen=True)
class Struck:
    """What became of the ranks."""

    outcomes: list[Outcome | RankDied]
    pids: list[int]

    @property
    def survivors(self) -> dict[int, Outcome]:
        return {rank: outcome for rank, outcome in enumerate(self.outcomes) if isinstance(outcome, Outcome)}

    @property
    def dead(self) -> list[int]:
        return [rank for rank, outcome in enumerate(self.outcomes) if isinstance(outcome, RankDied)]


def strike(*faults: Fault, world: World | None = None) -> Struck:
    """Let ranks make calls until the faults, of one place, have struck."""
    if world is None:
        if any(fault.what == "kill" for fault in faults) and faults[0].place.device == "cuda":
            # A process that dies may take others with it that share the multi-process service.
            close_shared_worlds()
        world = faults[0].place.world()
    is_timed = any(fault.what in TIMED for fault in faults)
    killed = sorted({fault.rank for fault in faults if fault.what == "kill"})
    pids = world.pids
    forgotten: list[Any] = []
    try:
        outcomes = world.gather(call_until_it_fails, faults, timeout=ANSWER_TIMED_S if is_timed else ANSWER_S)
        for outcome in outcomes:
            if not isinstance(outcome, (Outcome, RankDied)):
                raise outcome
    finally:
        kinds = {fault.what for fault in faults}
        if "kill" in kinds and faults[0].place.device == "cuda":
            world.close()
        elif "cut" in kinds:
            assert isinstance(world, TwoHosts)
            world.mend()
            world.restart()
        else:
            forgotten = world.gather(forget)
            world.revive()
    struck = Struck(outcomes, pids)
    assert struck.dead == killed, outcomes
    for rank, answer in enumerate(forgotten):
        if isinstance(answer, BaseException) and not (isinstance(answer, RankDied) and rank in killed):
            raise answer
    return struck


def new_buffer(
    context: RankContext,
    place: Place,
    mode: Mode = "normal",
    path: Path = "window",
    timeout_s: float = UNTIMED_S,
    enable_shrink: bool = False,
) -> Buffer:
    """A Buffer whose ranks wait so long for each other; rings are small."""
    is_fast = mode == "low latency"
    usual = os.environ.get("ANYEP_TIMEOUT_S")
    os.environ["ANYEP_TIMEOUT_S"] = str(timeout_s)
    try:
        return Buffer(
            context.group,
            1 << 20,
            low_latency_cases.RDMA_BYTES if is_fast else 1 << 20 if place.num_nodes > 1 else 0,
            low_latency_mode=is_fast,
            enable_shrink=enable_shrink,
            device=buffer_device(),
            num_window_bytes=0 if path == "ring" else None,
            ranks_per_node=place.ranks_per_node,
            network=place.network,
        )
    finally:
        if usual is None:
            del os.environ["ANYEP_TIMEOUT_S"]
        else:
            os.environ["ANYEP_TIMEOUT_S"] = usual


def case_for(place: Place, path: Path = "window") -> cases.Case:
    """A case in normal mode with far more rows than rings hold: a missing rank blocks all others."""
    return cases.Case(
        tokens=(40,) * place.num_ranks,
        num_topk=4,
        config=Config(4, 1, 2, 1, 2),
        num_window_bytes=0 if path == "ring" else None,
        ranks_per_node=place.ranks_per_node,
    )


def round_of_calls(
    context: RankContext, buffer: Buffer, place: Place, mode: Mode = "normal", path: Path = "window"
) -> list[tuple[int, Callable[[], object]]]:
    """What ranks do over and over: functions that make so many calls.

    On the CPU results are compared with the reference. On a GPU what went wrong is heard of in the next call,
    and results may be wrong until then.
    """
    if mode == "low latency":
        case = low_latency_cases.Case(tokens=(4,) * place.num_ranks, hidden=64)
        if place.device == "cpu":
            return [(2, lambda: low_latency_cases.check_case(context.rank, case, buffer))]
        mine = low_latency_cases.on(tensor_device(), low_latency_cases.inputs_of(case)[context.rank])
        sent: list[Any] = []
        return [
            (
                1,
                lambda: sent.append(
                    buffer.low_latency_dispatch(
                        mine.x, mine.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
                    )
                ),
            ),
            (
                1,
                lambda: buffer.low_latency_combine(
                    sent[-1][0], mine.topk_idx, mine.topk_weights, sent[-1][2]
                ),
            ),
        ]
    if place.device == "cpu":
        return [(3, lambda: cases.check_case(context, case_for(place, path), buffer))]
    from tests.support.gpu_scenarios import FEW_SMS, good_arguments

    arguments = good_arguments(buffer)
    received: list[Any] = []
    return [
        (1, lambda: received.append(buffer.dispatch(**arguments))),
        (1, lambda: buffer.dispatch(arguments["x"], handle=received[-1][4], config=FEW_SMS)),
        (1, lambda: buffer.combine(received[-1][0], received[-1][4], config=FEW_SMS)),
    ]


def patient_s(
    context: RankContext, place: Place, least_s: float, mode: Mode = "normal", path: Path = "window"
) -> float:
    """How long ranks wait for each other where one of them is to be late: the others never are."""
    with new_buffer(context, place, mode, path) as buffer:
        calls = round_of_calls(context, buffer, place, mode, path)

        def go_round() -> None:
            for _, call in calls:
                call()
            if tensor_device() == "cuda":
                torch.cuda.synchronize()

        # A round has many waits; in Triton's interpreter it takes seconds.
        is_slow = place.device == "simulated"
        return patience_s(context, go_round, least_s, factor=4 if is_slow else 15, turns=1 if is_slow else 2)


def arm(
    buffer: Buffer, faults: Sequence[Fault], nap_s: float = 0.0, nap: Callable[[], object] | None = None
) -> list[float]:
    """Let the faults of this rank happen. When its last step began, and when a fault struck here.

    A rank that sleeps does so for `nap_s` seconds, or until `nap` returns.
    """
    mine = {(fault.call, fault.phase): fault.what for fault in faults if fault.rank == buffer.rank}
    times = [time.monotonic(), 0.0]

    def step(call: Any, phase: Phase) -> None:
        times[0] = time.monotonic()
        what = mine.pop((call.number, phase.name.lower()), None) or mine.pop((call.number, ""), None)
        if what not in (None, "destroy", "interrupt"):
            times[1] = times[0]
        if what == "kill":
            if tensor_device() == "cuda":
                # A process whose kernels still run may take the multi-process service with it.
                torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "raise":
            raise ValueError(REASON)
        elif what == "sleep":
            time.sleep(nap_s) if nap is None else nap()
        elif what == "stop":
            subprocess.Popen(["/bin/sh", "-c", f"sleep {nap_s}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "cut":
            cut_own_link()

    buffer.runtime.control.between_steps = step
    return times


def call_until_it_fails(context: RankContext, faults: tuple[Fault, ...]) -> Outcome:
    """Rounds of calls; then one call more."""
    place, mode, path = faults[0].place, faults[0].mode, faults[0].path
    is_timed = any(fault.what in TIMED for fault in faults)
    timeout_s = UNTIMED_S
    if is_timed or place.device == "cuda":
        # On a GPU also because kernels are compiled and loaded here.
        least_s = 2.0 if place.hosts else 0.6
        patience = patient_s(context, place, least_s, mode, path)
        timeout_s = patience if is_timed else UNTIMED_S
    buffer = context.keep["struck"] = new_buffer(context, place, mode, path, timeout_s)
    calls = round_of_calls(context, buffer, place, mode, path)
    times = arm(buffer, faults, NAP * timeout_s)
    if any(fault.what == "interrupt" and fault.rank == context.rank for fault in faults):
        context.keep["usual SIGINT"] = signal.signal(signal.SIGINT, signal.default_int_handler)
    number, kind, message, status = 1, "none", "", ""
    try:
        for _ in range(NUM_ROUNDS):
            for num_calls, call in calls:
                for fault in faults:
                    if fault.call == number:
                        times[1] = _strike_between_calls(buffer, fault) or times[1]
                call()
                if mode == "low latency" and tensor_device() == "cuda":
                    # What went wrong is heard of in the next call, once kernels have noticed it.
                    torch.cuda.synchronize()
                number += num_calls
    except BaseException as error:
        kind, message = type(error).__name__, str(error)
    at = time.monotonic()
    later = "worked"
    try:
        calls[0][1]()
    except BaseException as error:
        later = f"{type(error).__name__}: {error}"
    if buffer.runtime is not None:
        status = "\n".join(map(str, buffer.status()))
    return Outcome(kind, message, at, times[1], at - times[0], timeout_s, later, status)


def _strike_between_calls(buffer: Buffer, fault: Fault) -> float:
    """Instead of this call, when all others are in it. When that was, or 0."""
    striker = {"destroy": fault.rank, "interrupt": buffer.group_size - 1}.get(fault.what)
    if striker != buffer.rank:
        return 0.0
    wait_until_others_wait(buffer, fault.call)
    if fault.what == "destroy":
        buffer.destroy()
        # Once more does nothing.
        buffer.destroy()
    else:
        os.kill(buffer.status()[fault.rank].pid, signal.SIGINT)
    return time.monotonic()


def wait_until_others_wait(buffer: Buffer, call: int) -> None:
    """Until every other rank is in this call, and waits for a rank."""
    deadline = time.monotonic() + ANSWER_S
    waits_on_host = buffer_device() == "cpu"
    while not all(
        status.call == call and (status.waits_for is not None or not waits_on_host)
        for status in buffer.status()
        if status.rank != buffer.rank
    ):
        assert time.monotonic() < deadline, buffer.status()
        time.sleep(0.005)
    if not waits_on_host:
        # The kernels that wait are launched a little later than the call is announced.
        time.sleep(0.2)


def forget(context: RankContext) -> None:
    """Let go of the Buffer that was struck, and hear Ctrl-C as before."""
    usual = context.keep.pop("usual SIGINT", None)
    if usual is not None:
        signal.signal(signal.SIGINT, usual)
    buffer = context.keep.pop("struck", None)
    if buffer is not None and buffer.runtime is not None:
        buffer.destroy()
