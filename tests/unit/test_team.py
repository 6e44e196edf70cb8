"""The threads that share a rank's work: every part is done once, whatever becomes of the helpers."""

from __future__ import annotations

import gc
import signal
import threading
import time

import pytest

from anyep.backends.cpu.team import Team

NUM_THREADS = 4


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("anyep-team")]


def wait_until_none_is_left(before: list[threading.Thread]) -> None:
    deadline = time.monotonic() + 20
    while set(helpers()) - set(before):
        assert time.monotonic() < deadline, helpers()
        time.sleep(0.01)


def covered(team: Team, count: int) -> list[int]:
    """Every index that some part was asked to do."""
    done: list[int] = []
    team.run(lambda first, end: done.extend(range(first, end)), count)
    return sorted(done)


@pytest.mark.parametrize("num_threads", [1, 2, NUM_THREADS])
def test_everything_is_done_once(num_threads: int) -> None:
    team = Team(num_threads)
    for count in (0, 1, 3, 100):
        assert covered(team, count) == list(range(count))
    team.close()


def test_parts_run_at_the_same_time() -> None:
    team = Team(NUM_THREADS)
    all_there = threading.Barrier(NUM_THREADS)
    team.run(lambda first, end: all_there.wait(20), NUM_THREADS)
    team.close()


def test_a_closed_team_still_works() -> None:
    before = helpers()
    team = Team(NUM_THREADS)
    covered(team, 8)
    team.close()
    wait_until_none_is_left(before)
    assert covered(team, 8) == list(range(8))


def test_a_dropped_team_ends_its_threads() -> None:
    before = helpers()
    team = Team(NUM_THREADS)
    covered(team, 8)
    assert len(set(helpers()) - set(before)) == NUM_THREADS - 1
    del team
    gc.collect()
    wait_until_none_is_left(before)


@pytest.mark.parametrize("where", [0, NUM_THREADS - 1])
def test_an_error_is_raised_when_all_parts_are_done(where: int) -> None:
    team = Team(NUM_THREADS)
    done: list[int] = []

    def work(first: int, end: int) -> None:
        if first == where:
            raise ValueError("boom")
        time.sleep(0.05)
        done.append(first)

    with pytest.raises(ValueError, match="boom"):
        team.run(work, NUM_THREADS)
    assert sorted(done) == [part for part in range(NUM_THREADS) if part != where]
    team.close()


def test_ctrl_c_is_raised_when_the_helpers_are_done() -> None:
    team = Team(2)
    has_begun, is_over = threading.Event(), threading.Event()

    def work(first: int, end: int) -> None:
        if first == 0:
            assert has_begun.wait(20)
        else:
            has_begun.set()
            # By then the caller has done its own part, and waits for this one.
            time.sleep(0.2)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.2)
            is_over.set()

    with pytest.raises(KeyboardInterrupt):
        team.run(work, 2)
    assert is_over.is_set()
    team.close()
