"""The pool of ranks that other tests stand on: it must not lose answers, hide failures or leave processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from anyep.errors import InvalidCall, PeerLost
from tests.support import world as world_module
from tests.support.commands import is_gone, wait_until
from tests.support.patience import scaled
from tests.support.programs import ROOT, Program, run_program
from tests.support.world import RankContext, RankDied, RankErrors, RankHung, World, get_world, shared_world


def who(context: RankContext, *args: Any) -> tuple[Any, ...]:
    return context.rank, context.num_ranks, *args


def process_facts(context: RankContext) -> tuple[int, int, int]:
    return os.getpid(), os.getsid(0), torch.get_num_threads()


def add_ranks(context: RankContext, start: int) -> int:
    total = torch.tensor([start + context.rank])
    dist.all_reduce(total, group=context.group)
    return int(total.item())


def count(context: RankContext) -> int:
    context.keep["calls"] = context.keep.get("calls", 0) + 1
    return context.keep["calls"]


def echo(context: RankContext, thing: Any) -> Any:
    return thing


def fail_on_odd_ranks(context: RankContext) -> str:
    if context.rank % 2:
        raise PeerLost(f"rank {context.rank} lost its way")
    return "fine"


def fail_everywhere(context: RankContext) -> None:
    raise InvalidCall("all the same")


class Stubborn(Exception):
    """Can be pickled, but not read again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail_stubbornly(context: RankContext) -> None:
    raise Stubborn("cannot", "travel")


def leave(context: RankContext) -> None:
    sys.exit(3)


def give_something_local(context: RankContext) -> Any:
    return lambda: None


def a_place_to_hang() -> None:
    time.sleep(300)


def hang_on_rank_1(context: RankContext) -> str:
    if context.rank == 1:
        a_place_to_hang()
    if context.rank == 2:
        raise PeerLost("rank 2 has a problem of its own")
    return "fine"


def hang_holding_the_gil(context: RankContext) -> None:
    ctypes.PyDLL(None).sleep(300)


def die_on_rank_1(context: RankContext, number: int, seconds: float) -> str:
    if context.rank == 1:
        os.kill(os.getpid(), number)
    if context.rank == 2:
        time.sleep(seconds)
    return "survived"


def crash_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        ctypes.string_at(0)
    a_place_to_hang()


def start_a_child(context: RankContext) -> int:
    context.keep["child"] = subprocess.Popen(["sleep", "300"])
    return context.keep["child"].pid


def say(context: RankContext, text: str) -> None:
    print(text, context.rank)


def all_gone(pids: list[int]) -> None:
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_results_are_in_the_order_of_ranks() -> None:
    assert get_world(4).run(who, "x", 2) == [(rank, 4, "x", 2) for rank in range(4)]
    assert get_world(4).run_each(who, [(rank * 10,) for rank in range(4)]) == [
        (rank, 4, rank * 10) for rank in range(4)
    ]
    with pytest.raises(ValueError, match="3 tuples of arguments for 4 ranks"):
        get_world(4).run_each(who, [(), (), ()])


def test_ranks_are_processes_with_one_thread_each() -> None:
    facts = get_world(4).run(process_facts)
    assert [pid for pid, _, _ in facts] == get_world(4).pids
    assert len({os.getpid(), *get_world(4).pids}) == 5
    assert all(session == pid and num_threads == 1 for pid, session, num_threads in facts)


def test_the_group_works_again_and_again() -> None:
    for start in range(20):
        assert get_world(4).run(add_ranks, start) == [4 * start + 6] * 4


def test_keep_lives_as_long_as_the_process() -> None:
    with World(2) as world:
        assert world.run(count) == [1, 1]
        assert world.run(count) == [2, 2]
        world.restart()
        assert world.run(count) == [1, 1]


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.int64, torch.bool],
    ids=str,
)
def test_tensors_travel_by_value(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3, 0), (5,), (4, 6)):
        tensor = (10 * torch.randn(shape)).to(dtype)
        for arrived in get_world(2).run(echo, tensor):
            assert (arrived.dtype, arrived.shape) == (dtype, tensor.shape)
            assert not arrived.is_shared()
            assert torch.equal(arrived.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_only_what_a_tensor_shows_travels() -> None:
    whole = torch.arange(1_000_000, dtype=torch.float32).reshape(1000, 1000)
    assert len(world_module._pickled(whole[:, 0])) < 10_000
    assert torch.equal(get_world(2).run(echo, whole[::100, ::250].t())[1], whole[::100, ::250].t())
    weight = torch.ones(3, requires_grad=True)
    assert get_world(2).run(echo, weight)[0].requires_grad
    grid = np.arange(6).reshape(2, 3)
    assert (get_world(2).run(echo, {"grid": grid})[1]["grid"] == grid).all()


def test_large_things_travel() -> None:
    tensor = torch.arange(4_000_000, dtype=torch.float32)
    assert all(torch.equal(arrived, tensor) for arrived in get_world(2).run(echo, tensor))


def test_exceptions_come_back() -> None:
    with pytest.raises(RankErrors) as caught:
        get_world(4).run(fail_on_odd_ranks)
    assert set(caught.value.errors) == {1, 3}
    assert type(caught.value.errors[3]) is PeerLost
    assert str(caught.value.errors[3]) == "rank 3 lost its way"
    message = str(caught.value)
    assert "--- rank 1 ---" in message
    assert "in fail_on_odd_ranks" in message
    assert "PeerLost: rank 3 lost its way" in message
    # The ranks are still the same, and usable.
    assert get_world(4).run(add_ranks, 0) == [6] * 4


def test_ranks_that_say_the_same_share_a_paragraph() -> None:
    with pytest.raises(RankErrors, match="--- rank 0, 1, 2, 3 ---") as caught:
        get_world(4).run(fail_everywhere)
    assert str(caught.value).count("InvalidCall: all the same") == 1


def test_gather_returns_exceptions() -> None:
    results = get_world(4).gather(fail_on_odd_ranks)
    assert results[0] == results[2] == "fine"
    assert [type(results[rank]) for rank in (1, 3)] == [PeerLost, PeerLost]


def test_exceptions_and_results_that_cannot_travel() -> None:
    stubborn, left, local = (
        get_world(2).gather(function)[1] for function in (fail_stubbornly, leave, give_something_local)
    )
    assert type(stubborn) is RuntimeError
    assert str(stubborn) == "Stubborn: cannot travel"
    assert isinstance(left, SystemExit)
    assert "local" in str(local)
    with pytest.raises(Exception, match="lambda"):
        get_world(2).run(lambda context: None)
    assert get_world(2).run(add_ranks, 0) == [1, 1]


def test_a_rank_that_hangs_is_shown_and_replaced() -> None:
    with World(3) as world:
        pids = world.pids
        with pytest.raises(RankErrors) as caught:
            world.run(hang_on_rank_1, timeout=5.0)
        assert set(caught.value.errors) == {1, 2}
        assert isinstance(caught.value.errors[1], RankHung)
        message = str(caught.value)
        assert "rank 1 did not answer within 5 s" in message
        assert "in a_place_to_hang" in message
        assert "rank 2 has a problem of its own" in message
        all_gone(pids)
        assert world.run(add_ranks, 0) == [3, 3, 3]


def test_a_stack_is_shown_even_where_python_cannot_run() -> None:
    with World(1) as world:
        # Its imports take time, too.
        assert world.run(who) == [(0, 1)]
        with pytest.raises(RankErrors, match="in hang_holding_the_gil"):
            world.run(hang_holding_the_gil, timeout=scaled(0.5))


def test_a_dead_rank_is_noticed_at_once() -> None:
    with World(3) as world:
        pids = world.pids
        start = time.monotonic()
        with pytest.raises(RankErrors) as caught:
            world.run(die_on_rank_1, signal.SIGKILL, 60.0)
        assert time.monotonic() - start < 60.0  # rank 2 sleeps for longer
        assert isinstance(caught.value.errors[1], RankDied)
        assert "rank 1 died: killed by SIGKILL" in str(caught.value)
        all_gone(pids)
        assert world.run(add_ranks, 0) == [3, 3, 3]


def test_survivors_can_be_asked_what_they_saw() -> None:
    with World(3) as world:
        results = world.gather(die_on_rank_1, signal.SIGKILL, 0.2)
        assert (results[0], results[2]) == ("survived", "survived")
        assert isinstance(results[1], RankDied)
        assert [type(result) for result in world.gather(count)] == [int, RankDied, int]
        # Who needs all ranks gets new ones.
        assert world.run(count) == [1, 1, 1]


def test_a_rank_that_dies_between_calls() -> None:
    with World(2) as world:
        os.kill(world.pids[0], signal.SIGKILL)
        with pytest.raises(RankErrors, match="rank 0 died: killed by SIGKILL"):
            world.run(count)
        assert world.run(count) == [1, 1]


def test_a_crash_shows_where() -> None:
    with World(2) as world, pytest.raises(RankErrors) as caught:
        world.run(crash_on_rank_1)
    assert "rank 1 died: killed by SIGSEGV" in str(caught.value)
    assert "in crash_on_rank_1" in str(caught.value)


def test_closing_leaves_nothing() -> None:
    world = World(2)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    pids = world.pids + world.run(start_a_child)
    world.close()
    all_gone(pids)
    world.close()
    assert world.run(count) == [1, 1]
    world.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 4  # the fork server's own


def test_few_shared_worlds_live_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "_shared", OrderedDict())
    monkeypatch.setattr(world_module, "MAX_SHARED_WORLDS", 1)
    first = get_world(1)
    assert get_world(1) is first
    pids = first.pids
    with shared_world("another", partial(World, 1)) as another:
        all_gone(pids)
        assert list(world_module._shared.values()) == [another]


def test_what_ranks_print_comes_before_their_answer() -> None:
    code = (
        "from tests.unit.test_world import say\nfrom tests.support.world import World\n"
        "World(1).run(say, 'hello from')\nprint('done', flush=True)\n"
    )
    finished = run_program("-c", code, cwd=ROOT, has_anyep=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "hello from 0\ndone\n"


OUTSIDE = """
import os
from tests.unit import test_world
from tests.support.commands import children_of
from tests.support.world import World, get_world
idle, busy = get_world(1), World(2)
# Children are the server that ranks are forked from, and multiprocessing's tracker of resources.
print(*idle.pids, *busy.pids, *children_of(os.getpid()), flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "number"),
    [
        ("", None),
        ("busy.run(test_world.hang_holding_the_gil)", signal.SIGKILL),
        ("busy.run(test_world.hang_holding_the_gil)", signal.SIGINT),
    ],
    ids=["end", "killed", "interrupted"],
)
def test_nothing_outlives_the_one_who_started_it(then: str, number: signal.Signals | None) -> None:
    with Program("-c", OUTSIDE.format(then=then), cwd=ROOT, has_anyep=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 5
        if number is not None:
            time.sleep(0.3)
            process.send_signal(number)
        process.wait()
        all_gone(pids)
