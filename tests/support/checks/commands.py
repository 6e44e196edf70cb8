"""Checks of how kernels write commands for the proxy: on a GPU, or in Triton's interpreter ("cpu")."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from anyep.backends import cpu
from anyep.backends.cuda import constants
from anyep.backends.cuda.pinned import pinned_words
from anyep.core.commands import NO_COUNTER, NUM_WORDS, TAKEN_WORDS, CommandSizes
from tests.support.checks.launching import launch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

import triton.language as tl  # noqa: E402 - Triton is optional

from anyep.backends.cuda.kernels.atomics import load_acquire  # noqa: E402
from anyep.backends.cuda.kernels.commands import has_proxy, put  # noqa: E402

TIMEOUT_NS = 20 * 10**9
ABORT_WORD = 2
RANK = 3


@triton.jit(do_not_specialize=["first", "num_commands"])
def put_many(constants, commands, was_put, first, num_commands, room: tl.constexpr):
    """Each program is a writer, and puts commands `first` and following of a table [writer, number,
    field]."""
    writer = tl.program_id(0)
    number = first
    while number < first + num_commands:
        command = commands + (writer * room + number) * 6
        is_put = put(
            constants,
            writer,
            tl.load(command),
            tl.load(command + 1),
            tl.load(command + 2),
            tl.load(command + 3),
            tl.load(command + 4),
            tl.load(command + 5),
        )
        tl.store(was_put + writer * room + number, is_put.to(tl.int64))
        number += 1


@triton.jit
def acquire_some(constants, words, wanted, found, count: tl.constexpr):
    indices = tl.arange(0, count)
    is_wanted = tl.load(wanted + indices) != 0
    tl.store(found + indices, load_acquire(words + indices, is_wanted))
    tl.store(found + count, has_proxy(constants).to(tl.int64))


class Rings:
    """The rings of some writers, and the tables by which kernels find them."""

    def __init__(self, device: str, num_writers: int, num_entries: int, timeout_ns: int = TIMEOUT_NS) -> None:
        self.sizes = CommandSizes(num_writers, num_entries)
        self.device = device
        self.words = pinned_words(self.sizes.num_words)
        self.entries = self.words[: self.sizes.ring_words].reshape(num_writers, num_entries, NUM_WORDS)
        self.taken = self.words[self.sizes.ring_words :].reshape(num_writers, TAKEN_WORDS)[:, 0]
        self.counts = torch.zeros((num_writers, 2), dtype=torch.int64, device=device)
        self.heap = torch.zeros(8, dtype=torch.int64, device=device)
        table = [0] * constants.NUM_CONSTANTS
        table[constants.RANK] = RANK
        table[constants.OWN_HEAP] = self.heap.data_ptr()
        table[constants.ABORT_AT] = 8 * ABORT_WORD
        table[constants.TIMEOUT_NS] = timeout_ns
        table[constants.COMMANDS] = self.words.ctypes.data
        table[constants.COMMANDS_TAKEN] = self.taken.ctypes.data
        table[constants.COMMAND_ENTRIES] = num_entries
        table[constants.COMMAND_COUNTS] = self.counts.data_ptr()
        self.constants = torch.tensor(table, dtype=torch.int64, device=device)

    def put(self, commands: Any, first: int, count: int, num_warps: int = 4) -> list[list[int]]:
        """Put some commands of [writer, number, field]; returns for each whether it was put (-1: not
        tried)."""
        table = torch.tensor(commands, dtype=torch.int64, device=self.device)
        was_put = torch.full(table.shape[:2], -1, dtype=torch.int64, device=self.device)
        arguments = (self.constants, table, was_put, first, count)
        launch(put_many, self.device, len(table), *arguments, num_warps=num_warps, room=table.shape[1])
        found: list[list[int]] = was_put.tolist()
        return found

    def take(self) -> list[list[int]]:
        """What the proxy takes now."""
        commands = np.zeros((self.sizes.most_commands, 6), np.int64)
        count = cpu.take_commands(self.words.ctypes.data, *self.sizes, commands, 0, 0)
        taken: list[list[int]] = commands[:count].tolist()
        return taken


def command(writer: int, number: int) -> list[int]:
    return [writer + 1, 4096 + number, 2**40 + 64 * number, 128, NO_COUNTER if number % 2 else 72, number]


def check_command(device: str) -> None:
    """The example of `put`: with 3 commands written and 2 taken, command 4 goes into entry 1 of its ring."""
    rings = Rings(device, num_writers=2, num_entries=2)
    commands = [[command(writer, number) for number in range(4)] for writer in range(2)]
    assert rings.put(commands, 0, 2) == [[1, 1, -1, -1]] * 2
    assert rings.take() == [*commands[0][:2], *commands[1][:2]]
    assert rings.put(commands, 2, 1) == [[-1, -1, 1, -1]] * 2
    assert rings.put(commands, 3, 1) == [[-1, -1, -1, 1]] * 2
    assert rings.taken.tolist() == [2, 2]
    assert rings.entries[1, :, 0].tolist() == [3, 4]
    assert rings.entries[1, 1, 1:7].tolist() == commands[1][3]
    assert rings.counts.tolist() == [[4, 4], [4, 4]]
    assert rings.take() == [*commands[0][2:], *commands[1][2:]]
    assert rings.taken.tolist() == [4, 4]


def check_room_is_waited_for(device: str) -> None:
    """The example of `wait_for_room`: with 2 entries, command 5 has room when command 3 is taken."""
    rings = Rings(device, num_writers=1, num_entries=2)
    commands = [[command(0, number) for number in range(5)]]
    assert rings.put(commands, 0, 2) == [[1, 1, -1, -1, -1]]
    taken = rings.take()

    def take_slowly() -> None:
        while len(taken) < 4:
            time.sleep(0.02)
            taken.extend(rings.take())

    thread = threading.Thread(target=take_slowly)
    thread.start()
    assert rings.put(commands, 2, 3) == [[-1, -1, 1, 1, 1]]
    thread.join()
    taken += rings.take()
    assert taken == commands[0]
    assert rings.heap.tolist() == [0] * 8


def check_no_room(device: str) -> None:
    """A proxy that takes nothing: the command is not written, and this rank's abort flag is raised."""
    rings = Rings(device, num_writers=1, num_entries=1, timeout_ns=50_000_000)
    commands = [[command(0, number) for number in range(2)]]
    assert rings.put(commands, 0, 2) == [[1, 0]]
    assert int(rings.heap[ABORT_WORD]) == 1 + RANK
    assert rings.entries[0, 0, 1:7].tolist() == commands[0][0]
    # The ring can be used again, once there is room.
    assert rings.take() == commands[0][:1]
    assert rings.put(commands, 1, 1) == [[-1, 1]]
    assert rings.take() == commands[0][1:]


def check_abort_ends_the_wait_for_room(device: str) -> None:
    rings = Rings(device, num_writers=1, num_entries=1)
    rings.heap[ABORT_WORD] = 1
    assert rings.put([[command(0, 0), command(0, 1)]], 0, 2) == [[1, 0]]
    assert int(rings.heap[ABORT_WORD]) == 1


def check_many_commands(device: str) -> None:
    """Programs of many warps, whose commands are taken while they write."""
    rings = Rings(device, num_writers=3, num_entries=4)
    commands = [[command(writer, number) for number in range(40)] for writer in range(3)]
    taken: list[list[int]] = []

    def take_all() -> None:
        while len(taken) < 120:
            taken.extend(rings.take())

    thread = threading.Thread(target=take_all)
    thread.start()
    assert rings.put(commands, 0, 40, num_warps=16) == [[1] * 40] * 3
    thread.join()
    for writer in range(3):
        assert [fields for fields in taken if fields[0] == writer + 1] == commands[writer]


def check_words_of_the_host(device: str) -> None:
    """The example of `load_acquire`."""
    rings = Rings(device, num_writers=1, num_entries=1)
    words = pinned_words(4)
    words[:] = [5, 6, 7, 8]
    # On a GPU, memory of the host has the same address.
    there = torch.from_numpy(words) if device == "cpu" else torch.from_numpy(words).pin_memory()
    wanted = torch.tensor([1, 0, 1, 0], dtype=torch.int64, device=device)
    found = torch.zeros(5, dtype=torch.int64, device=device)
    launch(acquire_some, device, 1, rings.constants, there, wanted, found, num_warps=8, count=4)
    assert found.tolist() == [5, 0, 7, 0, 1]
