"""The rings of commands, between a process that writes and one that takes."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from anyep.backends import cpu
from anyep.core.commands import FIELDS, NUM_WORDS, CommandSizes
from tests.support.command_writer import write_commands
from tests.support.depth import examples
from tests.support.world import RankContext, get_world

MAX_WAIT_S = 30.0


def fields_of(writer: int, number: int) -> list[int]:
    """A command that shows whether any of its words is that of another one."""
    return [writer * 1_000_003 + number % 10_000 * 7 + field for field in range(FIELDS)]


def exchange(context: RankContext, sizes: CommandSizes, num_commands: int, first: int, seed: int) -> Any:
    """Rank 0 writes, as all writers in turn; rank 1 takes. Both stop for a moment now and then."""
    shared: list[Any] = [None]
    if context.rank == 0:
        own = cpu.OwnBlock("commands", 8 * sizes.num_words)
        own.array(0, sizes.num_words)[sizes.ring_words :: 16] = first
        entries = own.array(0, sizes.ring_words).reshape(sizes.num_writers, sizes.num_entries, NUM_WORDS)
        for number in range(max(1, first - sizes.num_entries + 1), first + 1):
            entries[:, (number - 1) % sizes.num_entries, 0] = number
        shared = [own.share()]
    dist.broadcast_object_list(shared, src=0, group=context.group)
    block = own if context.rank == 0 else cpu.open_block(shared[0], 0)
    chance = random.Random(seed + context.rank)
    found: list[list[int]] = []
    if context.rank == 0:
        write_all(block.address, sizes, num_commands, first, chance)
    else:
        commands = np.zeros((sizes.most_commands, FIELDS), np.int64)
        deadline = time.monotonic() + MAX_WAIT_S
        while len(found) < sizes.num_writers * num_commands and time.monotonic() < deadline:
            nap_us = chance.choice((0, 10))
            count = cpu.take_commands(block.address, *sizes, commands, 1_000_000, nap_us)
            found += commands[:count].tolist()
            if chance.random() < 0.05:
                time.sleep(0.001)
        assert cpu.take_commands(block.address, *sizes, commands, 0, 0) == 0
    dist.barrier(group=context.group)
    if context.rank == 0:
        own.close()
    return found


def write_all(rings: int, sizes: CommandSizes, num_commands: int, first: int, chance: random.Random) -> None:
    """A few commands of one writer after a few of another, until all have written theirs."""
    written = [0] * sizes.num_writers
    while min(written) < num_commands:
        writer = chance.choice([index for index, count in enumerate(written) if count < num_commands])
        count = min(chance.randint(1, 2 * sizes.num_entries), num_commands - written[writer])
        numbers = range(first + written[writer], first + written[writer] + count)
        commands = np.array([fields_of(writer, number) for number in numbers], np.int64)
        assert write_commands(rings, sizes, writer, commands, first + written[writer]) == count
        written[writer] += count


@examples(6, deep=150)
@given(
    num_writers=st.integers(1, 5),
    num_entries=st.integers(1, 4),
    num_commands=st.integers(0, 60),
    first=st.sampled_from((0, 1, 5, 2**40)),
    seed=st.integers(0, 1000),
)
def test_every_command_is_taken_once_and_in_order(
    num_writers: int, num_entries: int, num_commands: int, first: int, seed: int
) -> None:
    sizes = CommandSizes(num_writers, num_entries)
    _, found = get_world(2).run(exchange, sizes, num_commands, first, seed)
    by_writer: list[list[list[int]]] = [[] for _ in range(num_writers)]
    for fields in found:
        by_writer[fields[0] // 1_000_003].append(fields)
    numbers = range(first, first + num_commands)
    assert by_writer == [[fields_of(writer, number) for number in numbers] for writer in range(num_writers)]


def test_commands_are_taken_from_every_ring_in_turn() -> None:
    """The example of the kernel; a command whose number is not there yet stays."""
    sizes = CommandSizes(2, 2)
    words = np.zeros(sizes.num_words, np.int64)
    entries = words[: sizes.ring_words].reshape(2, 2, NUM_WORDS)
    words[sizes.ring_words] = 3
    entries[0, :, 0] = 5, 4
    entries[0, :, 1] = 55, 44
    entries[1, 0, :2] = 0, 66
    commands = np.zeros((sizes.most_commands, FIELDS), np.int64)
    assert cpu.take_commands(words.ctypes.data, *sizes, commands, 0, 0) == 2
    assert commands[:2, 0].tolist() == [44, 55]
    assert words[sizes.ring_words] == 5
    assert cpu.take_commands(words.ctypes.data, *sizes, commands, 0, 0) == 0
    entries[1, 0, 0] = 1
    entries[0, :, 0] = 3, 4
    assert cpu.take_commands(words.ctypes.data, *sizes, commands, 0, 0) == 1
    assert commands[0, 0] == 66


def test_nothing_to_take_ends_in_time() -> None:
    cpu.compile_kernels(cpu.Group.PROXY)
    sizes = CommandSizes(3, 2)
    words = np.zeros(sizes.num_words, np.int64)
    commands = np.zeros((sizes.most_commands, FIELDS), np.int64)
    for nap_us in (0, 200):
        began = time.monotonic()
        assert cpu.take_commands(words.ctypes.data, *sizes, commands, 5_000_000, nap_us) == 0
        assert time.monotonic() - began >= 0.005
