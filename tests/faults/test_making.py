"""Ranks that are lost while a Buffer is made: every survivor names them, in time, and nothing remains."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from anyep import AnyEPError
from anyep.backends.cuda import postponed
from anyep.buffer import Buffer
from anyep.modes import connection
from anyep.rendezvous import GroupRendezvous
from tests.normal.test_buffer import FakeComm
from tests.support.namespaces import TwoHosts
from tests.support.world import RankContext, RankDied, World

KINDS: dict[str, dict[str, Any]] = {
    "one node": {},
    "low latency": {"num_rdma_bytes": 1 << 20, "low_latency_mode": True},
    "virtual nodes": {"num_rdma_bytes": 1 << 20, "ranks_per_node": 1},
    "nixl": {"num_rdma_bytes": 1 << 20, "ranks_per_node": 1, "network": "nixl"},
    "simulated gpu": {"device": "cuda", "num_window_bytes": 1 << 20},
}
NUM_STEPS = {"one node": 4, "low latency": 4, "virtual nodes": 5, "nixl": 7, "simulated gpu": 13}
"""How often the ranks meet to make such a Buffer."""
SOON_S = 10.0


@dataclass(frozen=True)
class Fault:
    """Which rank is killed in which step of making, and when: step 0 is before it has said who it is."""

    num_ranks: int
    rank: int
    step: int
    moment: str = "meeting"
    """`working`: before the rank meets the others; `meeting`: it has told them the size of what it says;
    `met`: right after the step; `connecting`: while it opens the memory of the other GPUs in this step."""
    kind: str = "one node"

    def __str__(self) -> str:
        return f"{self.kind}, rank {self.rank} of {self.num_ranks}, step {self.step}, {self.moment}"


@dataclass(frozen=True)
class Outcome:
    """How making a Buffer ended on a rank."""

    error: str
    seconds: float = 0.0
    left_behind: list[str] = field(default_factory=list)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def strike(step: int, moment: str, what: Callable[[], None]) -> None:
    """Let something happen in a step of this rank's next meetings."""
    meet, send = GroupRendezvous.all_gather, GroupRendezvous._gather_tensors
    at = {"step": 0, "sent": 0}

    def all_gather(self: GroupRendezvous, thing: Any) -> list[Any]:
        at["step"] += 1
        at["sent"] = 0
        if (at["step"], moment) == (step, "working"):
            what()
        met = meet(self, thing)
        if (at["step"], moment) == (step, "met"):
            what()
        if (at["step"] + 1, moment) == (step, "connecting"):
            from tests.support.simulated_gpu import SimulatedBlock

            SimulatedBlock.connect = lambda *_: what()  # type: ignore[method-assign]
        return met

    def gather_tensors(self: GroupRendezvous, *arguments: Any) -> list[Any]:
        at["sent"] += 1
        if (at["step"], at["sent"], moment) == (step, 2, "meeting"):
            what()
        return send(self, *arguments)

    GroupRendezvous.all_gather = all_gather  # type: ignore[method-assign]
    GroupRendezvous._gather_tensors = gather_tensors  # type: ignore[method-assign]


def what_remains() -> list[str]:
    gc.collect()
    # The memory of GPUs is freed when the next Buffer is made.
    postponed.do_postponed(lambda: None)
    threads = [thread.name for thread in threading.enumerate() if "anyep" in thread.name]
    descriptors = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return threads + [
        line for line in (*descriptors, *mapped) if "memfd:anyep-" in line and "-test-" not in line
    ]


def make(context: RankContext, kind: str = "one node", comm: Any = None) -> Outcome:
    """Make a Buffer; what was raised, after how long, and what remains of it."""
    arguments = {"device": "cpu"} | KINDS[kind]
    started = time.monotonic()
    try:
        Buffer(None if comm else dist.group.WORLD, 1 << 20, comm=comm, **arguments).destroy()
    except AnyEPError as error:
        text, seconds = f"{type(error).__name__}: {error}", time.monotonic() - started
    else:
        return Outcome("nothing was raised")
    # Only now, as the error's traceback held what was made.
    return Outcome(text, seconds, what_remains())


def make_until_it_fails(context: RankContext, fault: Fault) -> Outcome:
    if fault.kind == "simulated gpu":
        from tests.normal.test_simulated_gpu import simulate

        simulate(context, "2")
    if context.rank == fault.rank:
        if fault.step == 0:
            die()
        strike(fault.step, fault.moment, die)
    return make(context, fault.kind)


def check_survivors(world: World, fault: Fault, pid: int | None = None) -> None:
    outcomes = world.gather(make_until_it_fails, fault, timeout=60)
    assert isinstance(outcomes[fault.rank], RankDied), outcomes[fault.rank]
    who = f"rank {fault.rank} (pid {pid})" if pid else f"rank {fault.rank}"
    for rank, outcome in enumerate(outcomes):
        if rank == fault.rank:
            continue
        if pid:
            assert outcome.error == f"PeerLost: {who} died while the Buffer was being made"
        else:
            assert outcome.error.startswith(
                f"PeerLost: {who} died, or is out of reach, while the Buffer was being made ("
            )
        assert outcome.seconds < SOON_S
        assert outcome.left_behind == []


MOMENTS = ("working", "meeting", "met")


def faults() -> list[Fault]:
    # Every rank in every step, of three; for other numbers of ranks every rank in some step.
    every = [Fault(3, rank, step, MOMENTS[(rank + step) % 3]) for rank in range(3) for step in (1, 2, 3)]
    some = [
        Fault(num_ranks, rank, (rank + num_ranks) % 3 + 1, MOMENTS[rank % 2])
        for num_ranks in (2, 4, 5)
        for rank in range(num_ranks)
    ]
    others = [
        Fault(2, 1, 2, "working", "low latency"),
        *(Fault(4, rank, rank % 3 + 1, MOMENTS[rank % 2], "virtual nodes") for rank in range(4)),
        *(Fault(3, step % 3, step, MOMENTS[step % 2], "nixl") for step in range(1, 6)),
    ]
    # After the last step of all, it is the first call that notices.
    last = {fault for fault in [*every, *some] if (fault.step, fault.moment) == (3, "met")}
    return [fault for fault in [*every, *some, *others] if fault not in last]


@pytest.mark.parametrize("fault", faults(), ids=str)
def test_a_killed_rank(fault: Fault) -> None:
    if fault.kind == "nixl" and find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed: pip install 'anyep[network]'")
    with World(fault.num_ranks) as world:
        check_survivors(world, fault, world.pids[fault.rank])


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install 'anyep[cuda]'")
@pytest.mark.parametrize(
    "fault",
    [
        *(
            Fault(2 + (step % 6 == 0), step % 2, step, MOMENTS[step % 2], "simulated gpu")
            for step in range(1, NUM_STEPS["simulated gpu"] + 1)
        ),
        Fault(3, 1, 8, "connecting", "simulated gpu"),
    ],
    ids=str,
)
def test_a_killed_rank_on_a_gpu(fault: Fault) -> None:
    with World(fault.num_ranks) as world:
        check_survivors(world, fault, world.pids[fault.rank])


def grow(context: RankContext, step: int) -> str:
    """A dispatch finds no window; rank 1 dies in a step of adding some."""
    from tests.normal.test_simulated_gpu import simulate
    from tests.support.gpu_scenarios import attempt, good_arguments, new_buffer

    simulate(context)
    buffer = new_buffer(context)
    windows = buffer.runtime.windows
    assert windows.allocate(windows.num_bytes) is not None
    if context.rank == 1:
        strike(step, "working", die)
    outcome: str = attempt(buffer.dispatch, **good_arguments(buffer))
    return outcome


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install 'anyep[cuda]'")
@pytest.mark.parametrize("step", [1, 3])
def test_a_rank_that_is_killed_while_windows_grow(step: int) -> None:
    with World(3) as world:
        pid = world.pids[1]
        outcomes = world.gather(grow, step)
    for rank in (0, 2):
        assert outcomes[rank] == f"PeerLost: rank 1 (pid {pid}) died while the windows of the Buffer grew"


def count_steps(context: RankContext, kind: str) -> tuple[int, str]:
    if kind == "simulated gpu":
        from tests.normal.test_simulated_gpu import simulate

        simulate(context)
    steps: list[int] = []
    meet = GroupRendezvous.all_gather

    def all_gather(self: GroupRendezvous, thing: Any) -> list[Any]:
        steps.append(1)
        return meet(self, thing)

    GroupRendezvous.all_gather = all_gather  # type: ignore[method-assign]
    error = make(context, kind).error
    return len(steps), error


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_in_the_faults(kind: str) -> None:
    for module in {"nixl": ["nixl_cu12"], "simulated gpu": ["triton"]}.get(kind, []):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    with World(2) as world:
        assert world.run(count_steps, kind) == [(NUM_STEPS[kind], "nothing was raised")] * 2


@pytest.mark.parametrize("fault", [Fault(2, 1, 0), Fault(4, 0, 0), Fault(4, 2, 0)], ids=str)
def test_a_rank_that_died_before_it_said_who_it_is(fault: Fault) -> None:
    with World(fault.num_ranks) as world:
        check_survivors(world, fault)


@pytest.mark.parametrize("fault", [Fault(3, 2, 0), Fault(3, 0, 0)], ids=str)
def test_a_rank_that_was_met_before(fault: Fault) -> None:
    """Its process is known from an earlier Buffer of the group."""
    with World(fault.num_ranks) as world:
        assert world.run(make) == [Outcome("nothing was raised")] * 3
        check_survivors(world, fault, world.pids[fault.rank])


# Where the store of the group goes with a rank


def meet_by_tcp(context: RankContext, port: int) -> None:
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, context.num_ranks, context.rank == 0)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.num_ranks)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    "fault", [Fault(4, 0, 1), Fault(4, 0, 2, "working"), Fault(3, 0, 3), Fault(4, 2, 2)], ids=str
)
def test_a_store_in_the_process_of_a_rank(fault: Fault) -> None:
    with World(fault.num_ranks) as world:
        world.run(meet_by_tcp, free_port())
        check_survivors(world, fault, world.pids[fault.rank])


def test_a_store_that_goes_before_the_ranks_know_each_other() -> None:
    """Whether a survivor has read who rank 0 is depends on its luck; it names rank 0 all the same."""
    with World(4) as world:
        world.run(meet_by_tcp, free_port())
        pid = world.pids[0]
        outcomes = world.gather(make_until_it_fails, Fault(4, 0, 1, "working"))
    for outcome in outcomes[1:]:
        assert re.match(rf"PeerLost: rank 0( \(pid {pid}\))? died", outcome.error), outcome.error
        assert outcome.seconds < SOON_S


# Survivors that leave, ranks that are slow, or give up


def one_is_slow_and_others_leave(context: RankContext, slow: int, leave_at_once: bool) -> Outcome:
    if context.rank == 0:
        strike(2, "working", die)
    if context.rank == slow:
        strike(2, "working", lambda: time.sleep(4))
    outcome = make(context)
    if context.rank != slow and leave_at_once:
        os._exit(1)
    return outcome


@pytest.mark.parametrize("slow", [1, 3])
def test_survivors_that_leave_are_not_taken_for_the_lost(slow: int) -> None:
    with World(4) as world:
        pid = world.pids[0]
        outcomes = world.gather(one_is_slow_and_others_leave, slow, True, timeout=60)
    assert outcomes[slow].error == f"PeerLost: rank 0 (pid {pid}) died while the Buffer was being made"


def one_is_slow(context: RankContext, step: int) -> Outcome:
    if context.rank == 1:
        strike(step, "working", lambda: time.sleep(7))
    return make(context)


@pytest.mark.parametrize("step", [1, 3])
def test_a_slow_rank_is_waited_for(step: int) -> None:
    with World(3) as world:
        assert [outcome.error for outcome in world.run(one_is_slow, step)] == ["nothing was raised"] * 3


def stop_and_interrupt(context: RankContext, working: bool) -> tuple[str, float]:
    """Rank 1 is interrupted, while it works or while it waits for rank 0."""
    if context.rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
        if working:
            # In the work of a step, not in its meeting.
            do = connection.host_identity
            connection.host_identity = lambda: (time.sleep(3), do())[1]  # type: ignore[attr-defined]
        timer.start()
    elif context.rank == 0 and not working:
        strike(1, "working", lambda: time.sleep(3))
    started = time.monotonic()
    try:
        error = make(context).error
    except KeyboardInterrupt:
        error = "interrupted"
    return error, time.monotonic() - started


@pytest.mark.parametrize("working", [False, True])
def test_ctrl_c(working: bool) -> None:
    with World(3) as world:
        pid = world.pids[1]
        outcomes = world.run(stop_and_interrupt, working)
    assert outcomes[1][0] == "interrupted"
    assert outcomes[1][1] < 2.5
    sentence = f"PeerLost: rank 1 (pid {pid}) gave up while the Buffer was being made: KeyboardInterrupt"
    assert [outcomes[0][0], outcomes[2][0]] == [sentence] * 2


def one_never_comes(context: RankContext) -> Outcome:
    from datetime import timedelta

    dist.destroy_process_group()
    store = dist.FileStore(os.environ["ANYEP_TEST_STORE"], context.num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=context.rank, world_size=context.num_ranks, timeout=timedelta(seconds=3)
    )
    if context.rank == 1:
        time.sleep(6)
        return Outcome("did not come")
    return make(context)


def set_store(context: RankContext, path: str) -> None:
    os.environ["ANYEP_TEST_STORE"] = path


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    """The group's own timeout is the deadline; the sentence says who is missing."""
    with World(3) as world:
        world.run(set_store, str(tmp_path / "store"))
        outcomes = world.run(one_never_comes)
    for rank in (0, 2):
        assert outcomes[rank].error.startswith(
            f"WaitTimeout: rank {rank} waited for rank 1 while the Buffer was being made, until the timeout"
            f" of the process group"
        )


# Other ways to meet


def make_with_a_communicator(context: RankContext, step: int) -> Outcome:
    comm = FakeComm(context.group)
    gather, steps = comm.allgather, []

    def allgather(thing: Any) -> list[Any]:
        steps.append(1)
        if context.rank == 1 and len(steps) == step:
            die()
        return gather(thing)

    comm.allgather = allgather  # type: ignore[method-assign]
    return make(context, comm=comm)


@pytest.mark.parametrize("step", [1, 2])
def test_a_communicator(step: int) -> None:
    """Before the first exchange nobody's process is known, and the error says so."""
    with World(2) as world:
        pid = world.pids[1]
        survivor, lost = world.gather(make_with_a_communicator, step)
    assert isinstance(lost, RankDied)
    if step == 1:
        assert survivor.error.startswith(
            "PeerLost: the communicator failed while the Buffer was being made, before the ranks knew"
        )
    else:
        assert survivor.error == f"PeerLost: rank 1 (pid {pid}) died while the Buffer was being made"


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_a_rank_of_another_host(ranks_per_host: int) -> None:
    """Alone on its host, only the network tells of its end; else its neighbour does."""
    with TwoHosts(ranks_per_host) as hosts:
        lost = 2 * ranks_per_host - 1
        pid = hosts.pids[lost]
        fault = Fault(2 * ranks_per_host, lost, 2)
        outcomes = hosts.gather(make_until_it_fails, fault, timeout=60)
    for rank, outcome in enumerate(outcomes[:-1]):
        where = "" if rank >= ranks_per_host else " on host "
        assert f"PeerLost: rank {lost} (pid {pid}{where}" in outcome.error
        assert ("died while" in outcome.error) == (ranks_per_host == 2), outcome.error
        assert outcome.seconds < SOON_S
