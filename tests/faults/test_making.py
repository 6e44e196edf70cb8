"""Ranks that are lost while a Buffer is made: every survivor names them, in time, and nothing remains."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from anyep import connection
from anyep.join import roll_call
from anyep.join.rendezvous import GroupRendezvous
from tests.support.commands import wait_until
from tests.support.communicator import FakeComm
from tests.support.making import KINDS, NUM_STEPS, SOON_S, Fault, Outcome, die, make, struck
from tests.support.namespaces import TwoHosts
from tests.support.patience import scaled
from tests.support.places import become_simulated
from tests.support.world import RankContext, RankDied, World

pytestmark = pytest.mark.xdist_group("making")
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
SLOW = pytest.mark.slow
NUM_RANKS = 3
DEADLINE_S = "2"
"""Of ranks on simulated GPUs, which wait for a rank that dies while it connects."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Ranks that make nothing but the Buffers of these tests."""
    with World(NUM_RANKS) as pool:
        yield pool


@pytest.fixture(scope="module")
def simulated() -> Iterator[World]:
    with World(NUM_RANKS, become_simulated) as pool:
        yield pool


@pytest.fixture(autouse=True)
def living_ranks(request: pytest.FixtureRequest) -> None:
    """Restart the ranks that the previous test lost."""
    for name in {"world", "simulated"} & set(request.fixturenames):
        request.getfixturevalue(name).revive()


def make_until_it_fails(context: RankContext, fault: Fault) -> Outcome:
    # Only here: a rank that is started again in the place of the lost one has the usual deadline.
    with pytest.MonkeyPatch.context() as patch:
        if fault.kind == "simulated gpu":
            patch.setenv("ANYEP_TIMEOUT_S", DEADLINE_S)
        if context.rank != fault.rank:
            return make(fault.kind)
        if fault.step == 0:
            die()
        with struck(fault.step, fault.moment, die):
            return make(fault.kind)


def check_survivors(world: World, fault: Fault, knows_pid: bool = True) -> None:
    who = f"rank {fault.rank} (pid {world.pids[fault.rank]})"
    outcomes = world.gather(make_until_it_fails, fault, timeout=60)
    assert isinstance(outcomes[fault.rank], RankDied), outcomes[fault.rank]
    for rank, outcome in enumerate(outcomes):
        if rank == fault.rank:
            continue
        if knows_pid:
            assert outcome.error == f"PeerLost: {who} died while the Buffer was being made"
        else:
            assert outcome.error.startswith(
                f"PeerLost: rank {fault.rank} died, or is out of reach, while the Buffer was being made ("
            )
        assert outcome.seconds < scaled(SOON_S)
        assert outcome.left_behind == []


MOMENTS = ("working", "exchanging", "exchanged")
# After the last step of all, it is the first call that notices.
UNNOTICED = (3, "exchanged")
FEW = [
    Fault(3, 0, 1, "exchanging"),
    Fault(3, 1, 1, "exchanged"),
    Fault(3, 1, 2, "working"),
    Fault(3, 0, 2, "exchanged"),
    Fault(3, 2, 3, "exchanging"),
    Fault(3, 1, 2, "working", "low latency"),
    Fault(3, 2, 1, "working", "virtual nodes"),
    Fault(3, 0, 3, "exchanging", "virtual nodes"),
    Fault(3, 2, 2, "working", "nixl"),
    Fault(3, 2, 5, "exchanging", "nixl"),
]
FEW_ON_A_GPU = [
    Fault(3, 1, 1, "exchanging", "simulated gpu"),
    Fault(3, 0, 6, "working", "simulated gpu"),
    Fault(3, 1, 8, "connecting", "simulated gpu"),
    Fault(3, 2, NUM_STEPS["simulated gpu"], "exchanging", "simulated gpu"),
]


def more_faults() -> list[Fault]:
    """Every rank in every step, of three; for other numbers of ranks every rank in some step."""
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
        *(
            Fault(2 + (step % 6 == 0), step % 2, step, MOMENTS[step % 2], "simulated gpu")
            for step in range(1, NUM_STEPS["simulated gpu"] + 1)
        ),
    ]
    faults = [fault for fault in (*every, *some) if (fault.step, fault.moment) != UNNOTICED]
    return [fault for fault in (*faults, *others) if fault not in (*FEW, *FEW_ON_A_GPU)]


def skip_without(kind: str) -> None:
    package = {"nixl": "nixl_cu12", "simulated gpu": "triton"}.get(kind)
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("fault", FEW, ids=str)
def test_a_killed_rank(world: World, fault: Fault) -> None:
    skip_without(fault.kind)
    check_survivors(world, fault)


@NEEDS_TRITON
@pytest.mark.parametrize("fault", FEW_ON_A_GPU, ids=str)
def test_a_killed_rank_on_a_gpu(simulated: World, fault: Fault) -> None:
    check_survivors(simulated, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", more_faults(), ids=str)
def test_a_killed_rank_in_any_step(fault: Fault) -> None:
    skip_without(fault.kind)
    with World(fault.num_ranks, become_simulated if fault.kind == "simulated gpu" else None) as world:
        check_survivors(world, fault)


def grow(context: RankContext, step: int) -> str:
    """A dispatch finds no window; rank 1 dies in a step of adding some."""
    from tests.support.gpu_scenarios import attempt, good_arguments, new_buffer

    buffer = new_buffer(context)
    windows = buffer.runtime.windows
    assert windows.allocate(windows.num_bytes) is not None
    with struck(step, "working", die if context.rank == 1 else lambda: None):
        outcome: str = attempt(buffer.dispatch, **good_arguments(buffer))
    return outcome


@NEEDS_TRITON
@pytest.mark.parametrize("step", [pytest.param(1, marks=SLOW), 3])
def test_a_rank_that_is_killed_while_windows_grow(simulated: World, step: int) -> None:
    pid = simulated.pids[1]
    outcomes = simulated.gather(grow, step)
    for rank in (0, 2):
        assert outcomes[rank] == f"PeerLost: rank 1 (pid {pid}) died while the windows of the Buffer grew"


def count_steps(context: RankContext, kind: str) -> tuple[int, str]:
    steps: list[int] = []
    barrier = GroupRendezvous.all_gather

    def all_gather(self: GroupRendezvous, thing: Any) -> list[Any]:
        steps.append(1)
        return barrier(self, thing)

    GroupRendezvous.all_gather = all_gather  # type: ignore[method-assign]
    try:
        error = make(kind).error
    finally:
        GroupRendezvous.all_gather = barrier  # type: ignore[method-assign]
    return len(steps), error


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "simulated gpu"])
def test_every_step_is_in_the_faults(world: World, kind: str) -> None:
    skip_without(kind)
    assert world.run(count_steps, kind) == [(NUM_STEPS[kind], "nothing was raised")] * NUM_RANKS


@NEEDS_TRITON
def test_every_step_is_in_the_faults_on_a_gpu(simulated: World) -> None:
    kind = "simulated gpu"
    assert simulated.run(count_steps, kind) == [(NUM_STEPS[kind], "nothing was raised")] * NUM_RANKS


@pytest.mark.parametrize(
    "fault",
    [Fault(2, 1, 0), pytest.param(Fault(4, 0, 0), marks=SLOW), pytest.param(Fault(4, 2, 0), marks=SLOW)],
    ids=str,
)
def test_a_rank_that_died_before_it_said_who_it_is(fault: Fault) -> None:
    with World(fault.num_ranks) as world:
        check_survivors(world, fault, knows_pid=False)


@pytest.mark.parametrize("fault", [Fault(3, 2, 0), Fault(3, 0, 0)], ids=str)
def test_a_rank_that_was_met_before(world: World, fault: Fault) -> None:
    """Its process is known from an earlier Buffer of the group."""
    assert world.run(make_until_it_fails, Fault(3, -1, 0)) == [Outcome("nothing was raised")] * 3
    check_survivors(world, fault)


# Where the store of the group goes with a rank


def join_by_tcp(context: RankContext, port: int) -> None:
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, context.num_ranks, context.rank == 0)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.num_ranks)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    "fault",
    [
        Fault(3, 0, 2, "working"),
        pytest.param(Fault(4, 0, 1), marks=SLOW),
        pytest.param(Fault(4, 0, 2, "working"), marks=SLOW),
        pytest.param(Fault(3, 0, 3), marks=SLOW),
        pytest.param(Fault(4, 2, 2), marks=SLOW),
    ],
    ids=str,
)
def test_a_store_in_the_process_of_a_rank(fault: Fault) -> None:
    with World(fault.num_ranks) as world:
        world.run(join_by_tcp, free_port())
        check_survivors(world, fault)


@pytest.mark.slow
def test_a_store_that_goes_before_the_ranks_know_each_other() -> None:
    """A survivor names rank 0 whether or not it has already read which process rank 0 is."""
    with World(4) as world:
        world.run(join_by_tcp, free_port())
        pid = world.pids[0]
        outcomes = world.gather(make_until_it_fails, Fault(4, 0, 1, "working"))
    for outcome in outcomes[1:]:
        assert re.match(rf"PeerLost: rank 0( \(pid {pid}\))? died", outcome.error), outcome.error
        assert outcome.seconds < scaled(SOON_S)


# Survivors that leave, ranks that are slow, or give up


def be_quick(context: RankContext) -> None:
    """Let ranks wait for each other for a shorter time than they usually do."""
    roll_call.SEARCH_S, roll_call.LINGER_S = 1.0, 0.25  # type: ignore[misc]


def one_is_slow_and_others_leave(context: RankContext, slow: int) -> Outcome:
    be_quick(context)
    if context.rank == 0:
        with struck(2, "working", die):
            make()
    if context.rank == slow:
        # Much longer than the others stay to tell what they know.
        with struck(2, "working", partial(time.sleep, 2.0)):
            return make()
    make()
    os._exit(1)


@pytest.mark.parametrize("slow", [2, pytest.param(1, marks=SLOW)])
def test_survivors_that_leave_are_not_taken_for_the_lost(slow: int) -> None:
    with World(3) as world:
        pid = world.pids[0]
        outcomes = world.gather(one_is_slow_and_others_leave, slow, timeout=60)
    assert outcomes[slow].error == f"PeerLost: rank 0 (pid {pid}) died while the Buffer was being made"


def one_is_slow(context: RankContext, step: int, seconds: float) -> Outcome:
    roll_call.SEARCH_S, usual = seconds / 2, roll_call.SEARCH_S  # type: ignore[misc]
    try:
        with struck(step, "working", partial(time.sleep, seconds) if context.rank == 1 else lambda: None):
            return make()
    finally:
        roll_call.SEARCH_S = usual  # type: ignore[misc]


@pytest.mark.parametrize("step", [1, pytest.param(3, marks=SLOW)])
def test_a_slow_rank_is_waited_for(world: World, step: int) -> None:
    assert world.run(one_is_slow, step, 1.0) == [Outcome("nothing was raised")] * 3


def stop_and_interrupt(context: RankContext, working: bool, raised: Path) -> str:
    """Rank 1 is interrupted, while it works or while it waits for rank 0."""
    if context.rank == 0 and not working:
        # It comes only when rank 1 has been interrupted.
        with struck(1, "working", partial(wait_until, raised.exists)):
            return make().error
    if context.rank != 1:
        return make().error
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    identity = connection.host_identity
    if working:
        # In the work of a step, not in its exchange.
        connection.host_identity = partial(time.sleep, 60)  # type: ignore[attr-defined]
    timer.start()
    try:
        return make().error
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        raised.touch()
        connection.host_identity = identity  # type: ignore[attr-defined]


@pytest.mark.parametrize("working", [False, True])
def test_ctrl_c(tmp_path: Path, working: bool) -> None:
    # Ranks of its own: the group of an interrupted rank has collectives that Gloo will never finish.
    with World(NUM_RANKS) as world:
        pid = world.pids[1]
        first, interrupted, last = world.run(stop_and_interrupt, working, tmp_path / "raised")
    assert interrupted == "interrupted"
    sentence = f"PeerLost: rank 1 (pid {pid}) gave up while the Buffer was being made: KeyboardInterrupt"
    assert [first, last] == [sentence] * 2


def one_never_comes(context: RankContext, folder: Path) -> str:
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), context.num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=context.rank, world_size=context.num_ranks, timeout=timedelta(seconds=3)
    )
    if context.rank == 1:
        wait_until(lambda: all((folder / str(rank)).exists() for rank in (0, 2)))
        return "did not come"
    error = make().error
    (folder / str(context.rank)).touch()
    return error


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    """The group's own timeout is the deadline; the sentence says who is missing."""
    with World(3) as world:
        outcomes = world.run(one_never_comes, tmp_path)
    for rank in (0, 2):
        assert outcomes[rank].startswith(
            f"WaitTimeout: rank {rank} waited for rank 1 while the Buffer was being made, until the timeout"
            f" of the process group"
        )


# Other ways to join


def make_with_a_communicator(context: RankContext, step: int) -> Outcome:
    comm = FakeComm(context.group)
    gather, steps = comm.allgather, []

    def allgather(thing: Any) -> list[Any]:
        steps.append(1)
        if context.rank == 1 and len(steps) == step:
            die()
        return gather(thing)

    comm.allgather = allgather  # type: ignore[method-assign]
    return make(comm=comm)


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


@pytest.mark.parametrize("ranks_per_host", [1, pytest.param(2, marks=SLOW)])
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
        assert outcome.seconds < scaled(SOON_S)
