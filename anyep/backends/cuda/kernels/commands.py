"""Puts into the memory of other hosts: a kernel writes a command, and the proxy of its rank executes it.

    if put(tables.constants, tl.program_id(0), relay, rows, place, num_bytes, tail_at, tail):
        ...

The commands of a program lie in a ring of its own in memory of the host (anyep/core/commands.py). A put
may begin as soon as its command is written, and its bytes must not change until the receiver has told
that they are there. Bytes that other programs have stored can be put as well, by a program that has
acquired a flag of theirs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.atomics import (
    abort_of_host,
    is_aborted,
    is_time_to_ask,
    load_one,
    nanoseconds,
    store_release,
    tell_host,
)
from anyep.backends.cuda.kernels.pointers import words_at
from anyep.core import commands as layout

RANK = tl.constexpr(words_of.RANK)
OWN_HEAP = tl.constexpr(words_of.OWN_HEAP)
ABORT_AT = tl.constexpr(words_of.ABORT_AT)
TIMEOUT_NS = tl.constexpr(words_of.TIMEOUT_NS)
COMMANDS = tl.constexpr(words_of.COMMANDS)
COMMANDS_TAKEN = tl.constexpr(words_of.COMMANDS_TAKEN)
COMMAND_ENTRIES = tl.constexpr(words_of.COMMAND_ENTRIES)
COMMAND_COUNTS = tl.constexpr(words_of.COMMAND_COUNTS)

PEER = tl.constexpr(layout.PEER)
SOURCE = tl.constexpr(layout.SOURCE)
PLACE = tl.constexpr(layout.PLACE)
NUM_BYTES = tl.constexpr(layout.NUM_BYTES)
COUNTER_AT = tl.constexpr(layout.COUNTER_AT)
COUNTER = tl.constexpr(layout.COUNTER)
NUM_WORDS = tl.constexpr(layout.NUM_WORDS)
TAKEN_WORDS = tl.constexpr(layout.TAKEN_WORDS)


@triton.jit
def has_proxy(constants):
    """Whether this rank has a proxy: else all ranks' memory is mapped."""
    return tl.load(constants + COMMANDS) != 0


@triton.jit
def put(constants, writer, peer, source, place, num_bytes, counter_at, counter):
    """Let the proxy put bytes at a rank on another host, then raise a counter there; all but the
    constants are scalars. Only one program at a time may be this writer.

    Returns whether the command was written: not if the ring had no room within the time that waits have,
    or if this rank was told to stop waiting. The abort flag is raised then.

    Example:
        With rings of 2 entries, of which writer 1 has filled 3 and 2 are taken, command 4 goes into entry 1
        of its ring: [4, peer, source, place, num_bytes, counter_at, counter]. Command 5 has to wait until
        a third one is taken.
    """
    num_entries = tl.load(constants + COMMAND_ENTRIES)
    counts = words_at(tl.load(constants + COMMAND_COUNTS)) + 2 * writer
    # One thread reads for all warps: the first of them may have stored the next count already.
    number = load_one(counts) + 1
    room_until = load_one(counts + 1)
    if number > room_until:
        room_until = wait_for_room(constants, writer, number, num_entries)
        tl.store(counts + 1, room_until)
    has_room = number <= room_until
    if has_room:
        index = writer * num_entries + (number - 1) % num_entries
        entry = words_at(tl.load(constants + COMMANDS)) + index * NUM_WORDS
        tl.store(entry + PEER, peer)
        tl.store(entry + SOURCE, source)
        tl.store(entry + PLACE, place)
        tl.store(entry + NUM_BYTES, num_bytes)
        tl.store(entry + COUNTER_AT, counter_at)
        tl.store(entry + COUNTER, counter)
        tl.store(counts, number)
        tell_host(entry, number)
    return has_room


@triton.jit
def wait_for_room(constants, writer, number, num_entries):
    """Spin until a writer's ring has room for a command; return the last command that it has room for.

    That is an earlier one if the abort flag is raised, which this program does itself when its time is up.

    Example:
        With 2 entries, and a third command that is taken while this waits for the room of command 5, it
        returns 5.
    """
    taken = words_at(tl.load(constants + COMMANDS_TAKEN)) + writer * TAKEN_WORDS
    abort = tl.load(constants + OWN_HEAP) + tl.load(constants + ABORT_AT)
    timeout_ns = tl.load(constants + TIMEOUT_NS)
    start = nanoseconds()
    room_until = load_one(taken) + num_entries
    is_over = tl.full((), False, tl.int1)
    while (room_until < number) & ~is_over:
        # Warps read different times, so all decide by the flag, which one thread raises and reads.
        now = nanoseconds()
        flag = abort_of_host(abort, is_time_to_ask(now, start))
        is_late = now >= start + timeout_ns
        flag = tl.where(is_late, 1 + tl.load(constants + RANK), flag)
        store_release(words_at(abort), flag, flag != 0)
        is_over = is_aborted(abort)
        room_until = load_one(taken) + num_entries
    return room_until
