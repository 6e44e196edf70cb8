"""The proxy of GPU kernels, between processes: commands become puts of NIXL, over memory of the host."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from anyep.core.commands import NO_COUNTER
from anyep.nixl_packages import find_nixl
from anyep.transport.gpu_proxy import GRACE_S
from tests.support.depth import examples
from tests.support.patience import scaled
from tests.support.proxies import ABORT_AT, ProxyRank
from tests.support.world import RankContext, RankDied, World, get_world

pytestmark = pytest.mark.skipif(
    find_nixl(torch.version.cuda) is None,
    reason="NIXL is not installed: pip install 'anyep[network]'",
)
MAX_WAIT_S: Final = 40.0


def use_loopback() -> None:
    os.environ.setdefault("UCX_TLS", "tcp,self")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")


def row_of(sender: int, receiver: int, channel: int, number: int, row_words: int) -> list[int]:
    start = ((sender * 7 + receiver) * 11 + channel) * 1_000_003 + number * 101
    return list(range(start, start + row_words))


def exchange_rows(
    context: RankContext, num_channels: int, ring_rows: int, row_words: int, num_rows: int, seed: int
) -> tuple[int, int]:
    """All ranks send rows to all others through tiny rings, a few at a time and in any order of channels."""
    use_loopback()
    peers = [rank for rank in range(context.num_ranks) if rank != context.rank]
    rank = ProxyRank(context, peers, num_channels, ring_rows, row_words)
    chance = random.Random(seed + context.rank)
    lanes = [(peer, channel) for peer in peers for channel in range(num_channels)]
    deadline = time.monotonic() + MAX_WAIT_S
    done = False
    while not done:
        assert time.monotonic() < deadline, f"rank {rank.rank}: sent {rank.sent}, taken {rank.taken}"
        for peer, channel in chance.sample(lanes, len(lanes)):
            first = int(rank.sent[channel, peer])
            count = min(rank.room(peer, channel), num_rows - first, chance.randint(1, 2 * ring_rows))
            numbers = range(first, first + count)
            rows = [row_of(rank.rank, peer, channel, number, row_words) for number in numbers]
            if rows:
                rank.send(peer, channel, np.array(rows))
            first = int(rank.taken[channel, peer])
            found = rank.take(peer, channel).tolist()
            numbers = range(first, first + len(found))
            assert found == [row_of(peer, rank.rank, channel, number, row_words) for number in numbers]
        done = all(
            rank.taken[channel, peer] == num_rows and rank.counter(1, channel, peer) == num_rows
            for peer, channel in lanes
        )
        if chance.random() < 0.05:
            time.sleep(0.001)
    assert rank.proxy.error is None
    assert rank.known.forgotten == []
    dist.barrier(group=context.group)
    rank.close()
    return rank.proxy.num_commands, rank.proxy.num_puts


@examples(3, deep=60)
@given(
    num_channels=st.integers(1, 3),
    ring_rows=st.integers(1, 3),
    row_words=st.sampled_from((1, 40, 2000)),
    num_rows=st.integers(0, 25),
    seed=st.integers(0, 1000),
)
def test_rows_through_tiny_rings(
    num_channels: int, ring_rows: int, row_words: int, num_rows: int, seed: int
) -> None:
    found = get_world(2).run(exchange_rows, num_channels, ring_rows, row_words, num_rows, seed)
    for num_commands, num_puts in found:
        assert num_commands >= num_puts
        assert (num_puts > 0) == (num_rows > 0)


@pytest.mark.slow
def test_rows_between_four_ranks() -> None:
    get_world(4).run(exchange_rows, 2, 3, 500, 100, 5)


def gather_commands(context: RankContext) -> tuple[int, int]:
    """Commands that are there at once become one put; counters are raised once, to the last value."""
    use_loopback()
    peer = 1 - context.rank
    rank = ProxyRank(context, [peer], num_channels=4, ring_rows=8, row_words=1000, num_entries=8)
    step = threading.Event()
    take = rank.proxy._commands.take

    def take_later(*arguments: Any) -> int:
        # As if the thread had been busy for a while.
        step.wait()
        return take(*arguments)

    rank.proxy._commands = rank.proxy._commands._replace(take=take_later)
    time.sleep(0.05)
    for channel in range(4):
        for number in range(8):
            rank.send(peer, channel, np.array([row_of(rank.rank, peer, channel, number, 1000)]))
    before = rank.proxy.num_puts
    step.set()
    deadline = time.monotonic() + MAX_WAIT_S
    while min(rank.counter(0, channel, peer) for channel in range(4)) < 8:
        assert time.monotonic() < deadline
    for channel in range(4):
        expected = [row_of(peer, rank.rank, channel, number, 1000) for number in range(8)]
        assert rank.received[channel, peer].tolist() == expected
    posted = rank.proxy.num_puts - before, rank.proxy.engine.num_puts[peer]
    dist.barrier(group=context.group)
    rank.close()
    return posted


def test_commands_are_gathered() -> None:
    assert get_world(2).run(gather_commands) == [(1, 1)] * 2


def lose_a_rank(context: RankContext, how: str) -> tuple[float, list[int]]:
    """Rank 1 is killed, or says that it gives up: rank 0's kernels are told, once and in time."""
    use_loopback()
    peer = 1 - context.rank
    rank = ProxyRank(context, [peer], num_channels=1, ring_rows=4, row_words=2000)
    rank.send(peer, 0, np.array([row_of(rank.rank, peer, 0, 0, 2000)]))
    deadline = time.monotonic() + MAX_WAIT_S
    while rank.counter(0, 0, peer) < 1:
        assert time.monotonic() < deadline
    dist.barrier(group=context.group)
    if context.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "abort":
            rank.command(0, peer, 0, 0, 0, 8 * ABORT_AT, 1 + context.rank)
        else:
            rank.close()
            return 0.0, []
    else:
        began = time.monotonic()
        if how == "said":
            rank.known.said = {peer}
        while not rank.known.forgotten:
            assert time.monotonic() < began + MAX_WAIT_S
            if how == "kill":
                # The engine finds out when it has something to send.
                rank.command(0, peer, 0, 0, 0, rank.counter_at(1, 0, 0), 1)
            time.sleep(0.01)
        seconds = time.monotonic() - began
        time.sleep(0.1)
        rank.close()
        assert rank.proxy.error is None
        return seconds, rank.known.forgotten
    rank.close()
    return 0.0, []


@pytest.mark.parametrize("how", ["kill", "abort", "said"])
def test_kernels_are_told_of_a_rank_that_is_gone(how: str) -> None:
    with World(2) as world:
        answers = world.gather(lose_a_rank, how)
        assert isinstance(answers[1], RankDied) == (how == "kill")
        seconds, forgotten = answers[0]
        assert forgotten == [1]
        assert seconds < scaled(1.5)
        assert how != "said" or seconds >= GRACE_S


def ask_for_something_wrong(context: RankContext) -> str:
    use_loopback()
    peer = 1 - context.rank
    rank = ProxyRank(context, [peer], num_channels=1, ring_rows=4, row_words=16)
    if context.rank == 0:
        rank.command(0, peer, 0, 0, 8, NO_COUNTER, 0)
        rank.proxy._thread.join(MAX_WAIT_S)
        assert not rank.proxy._thread.is_alive()
        assert rank.known.forgotten == [0]
    dist.barrier(group=context.group)
    rank.close()
    rank.close()
    assert not any(thread.name == "anyep proxy" for thread in threading.enumerate())
    return str(rank.proxy.error)


def test_a_wrong_command_stops_the_kernels() -> None:
    """It is a mistake of a kernel; ranks must not wait for it until their time is up."""
    first, second = get_world(2).run(ask_for_something_wrong)
    assert first == "8 bytes at 0x0 cannot be sent: register that memory first"
    assert second == "None"
