"""A rank with a proxy, and compiled code of the CPU instead of kernels: rings of rows to ranks on other
hosts.

    rank = ProxyRank(context, peers=[1], num_channels=2, ring_rows=4, row_words=16)
    rank.send(peer, channel, rows)       # up to the room that the ring has
    rank.take(peer, channel)             # what has arrived
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from anyep.backends import cpu
from anyep.backends.cpu.heap import OwnBlock
from anyep.core.commands import NO_COUNTER, CommandSizes
from anyep.transport import NixlEngine
from anyep.transport.base import place
from anyep.transport.gpu_proxy import Commands, GpuProxy
from tests.support.command_writer import write_commands
from tests.support.world import RankContext

Array = np.ndarray[Any, Any]
ABORT_AT = 0
LINE_WORDS = 16
NUM_ENTRIES = 4


class KnownPeers:
    """Which ranks are gone, as a test says, and which ones the kernels were told to forget."""

    def __init__(self) -> None:
        self.said: set[int] = set()
        self.forgotten: list[int] = []

    def gone(self) -> set[int]:
        return self.said

    def forget(self, rank: int) -> None:
        self.forgotten.append(rank)


class ProxyRank:
    """Memory, engine and proxy of a rank. A ring for each (channel, peer) lies in the receiver's rows; its
    sender keeps the rows that it sends at the same place of a sending half."""

    def __init__(
        self,
        context: RankContext,
        peers: list[int],
        num_channels: int,
        ring_rows: int,
        row_words: int,
        num_entries: int = NUM_ENTRIES,
    ) -> None:
        cpu.compile_kernels(cpu.Group.CONTROL, cpu.Group.NODES, cpu.Group.PROXY)
        self.rank, self.num_ranks, self.peers = context.rank, context.num_ranks, peers
        self.num_channels, self.ring_rows, self.row_words = num_channels, ring_rows, row_words
        num_rings = num_channels * self.num_ranks
        self.inbox = OwnBlock("inbox", 8 * LINE_WORDS * (1 + 2 * num_rings))
        half = num_rings * ring_rows * row_words
        self.rows = OwnBlock("rows", 2 * 8 * half)
        shape = (num_channels, self.num_ranks, ring_rows, row_words)
        self.received = self.rows.array(0, half).reshape(shape)
        self.to_send = self.rows.array(8 * half, half).reshape(shape)
        self.words = self.inbox.array(0, self.inbox.num_bytes // 8)
        self.sizes = CommandSizes(2 * num_channels, num_entries)
        self.commands = OwnBlock("commands", 8 * self.sizes.num_words)
        engine = NixlEngine(self.rank, self.inbox)
        self.region = engine.expose(self.rows.address, self.rows.num_bytes)
        everyone: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(everyone, engine.describe(), group=context.group)
        engine.connect({peer: everyone[peer] for peer in peers})
        self.known = KnownPeers()
        self.proxy = GpuProxy(
            self.rank,
            engine,
            Commands(self.commands.address, self.sizes, cpu.take_commands),
            self.inbox.address + 8 * ABORT_AT,
            self.known,
            has_core=False,
        )
        self.sent = np.zeros((num_channels, self.num_ranks), np.int64)
        self.taken = np.zeros((num_channels, self.num_ranks), np.int64)
        self.num_commands = [0] * self.sizes.num_writers
        # Compiles it before anything is measured.
        write_commands(self.commands.address, self.sizes, 0, np.zeros((0, 6), np.int64), 0)

    def counter_at(self, kind: int, channel: int, writer: int) -> int:
        """Where the tail (0) or the head (1) of a ring lies in an inbox."""
        return 8 * LINE_WORDS * (1 + (kind * self.num_channels + channel) * self.num_ranks + writer)

    def counter(self, kind: int, channel: int, writer: int) -> int:
        return int(self.words[self.counter_at(kind, channel, writer) // 8])

    def command(self, writer: int, *fields: int) -> None:
        commands = np.array([fields], np.int64)
        number = self.num_commands[writer]
        assert write_commands(self.commands.address, self.sizes, writer, commands, number) == 1
        self.num_commands[writer] += 1

    def room(self, peer: int, channel: int) -> int:
        return self.ring_rows - int(self.sent[channel, peer]) + self.counter(1, channel, peer)

    def send(self, peer: int, channel: int, rows: Array) -> None:
        """Rows for which there is room: a command for each run of places, the tail with the last one."""
        sent = int(self.sent[channel, peer])
        after = sent + len(rows)
        while len(rows):
            at = sent % self.ring_rows
            count = min(len(rows), self.ring_rows - at)
            mine = self.to_send[channel, peer, at : at + count]
            mine[:] = rows[:count]
            there = self.received[channel, self.rank, at:]
            offset = there.ctypes.data - self.rows.address
            sent, rows = sent + count, rows[count:]
            tail_at = self.counter_at(0, channel, self.rank) if sent == after else NO_COUNTER
            where = place(self.region, offset)
            self.command(2 * channel, peer, mine.ctypes.data, where, mine.nbytes, tail_at, sent)
        self.sent[channel, peer] = sent

    def take(self, peer: int, channel: int) -> Array:
        """The rows that have arrived; tells the sender that they were taken."""
        taken, tail = int(self.taken[channel, peer]), self.counter(0, channel, peer)
        rows = self.received[channel, peer, np.arange(taken, tail) % self.ring_rows]
        if tail > taken:
            self.received[channel, peer, np.arange(taken, tail) % self.ring_rows] = -1
            head_at = self.counter_at(1, channel, self.rank)
            self.command(2 * channel + 1, peer, 0, 0, 0, head_at, tail)
            self.taken[channel, peer] = tail
        return rows

    def close(self) -> None:
        self.proxy.close()
        for block in (self.inbox, self.rows, self.commands):
            block.close()
