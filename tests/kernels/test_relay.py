"""The kernels between nodes do what the examples in their docstrings say.

Two nodes of one rank each, in one process: each rank's kernel runs until it can do no more, then the other's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anyep.backends import cpu
from anyep.backends.cpu.kernels import relay_dispatch
from anyep.backends.cpu.kernels.groups import (
    Bells,
    NodeSums,
    NodeTokens,
    Outputs,
    Payload,
    Pushed,
    Received,
    Relayed,
    RingStack,
    Sums,
    plain,
)
from anyep.backends.cpu.rows import entry_parts
from anyep.layout import NUM_RING_LAYERS
from anyep.sizes import token_layout
from tests.support.arrays import Array, from_python, int32, int64

BASE = 5
"""The rows that went through each ring in earlier calls."""
NODES = 2


class Nodes:
    """The rings between two nodes of one rank, with one channel; and perhaps one ring within each node."""

    def __init__(self, row_bytes: int, num_topk: int, ring_rows: int, within_node: bool = False) -> None:
        self.token = token_layout(row_bytes, 0, num_topk)
        self.ring_rows = ring_rows
        shape = (NODES, NODES, ring_rows, self.token.token_bytes)
        self.rows = np.zeros(shape, np.uint8)
        """By receiver and sender; so are tails. Heads are by sender and receiver."""
        self.tails, self.heads = np.full((NODES, NODES), BASE), np.full((NODES, NODES), BASE)
        self.own_rows = np.zeros((NODES, ring_rows, self.token.token_bytes), np.uint8)
        self.own_tails, self.own_heads = np.full(NODES, BASE), np.full(NODES, BASE)
        self.within_node = within_node
        self.bells = np.zeros((2, NODES), np.int64)
        self.stacks = [(self.net(node), self.nvl(node)) for node in range(NODES)]

    def net(self, node: int) -> RingStack:
        layers = np.zeros((NUM_RING_LAYERS, 1, NODES), np.int64)
        for other in range(NODES):
            layers[:, 0, other] = (
                self.rows[other, node].ctypes.data,
                self.tails[other, node : node + 1].ctypes.data,
                self.heads[node, other : other + 1].ctypes.data,
                BASE,
                self.rows[node, other].ctypes.data,
                self.tails[node, other : other + 1].ctypes.data,
                self.heads[other, node : node + 1].ctypes.data,
                BASE,
            )
        return self.stack(layers, 0)

    def nvl(self, node: int) -> RingStack:
        rows = self.own_rows[node].ctypes.data if self.within_node else 0
        tail, head = self.own_tails[node:].ctypes.data, self.own_heads[node:].ctypes.data
        layers = int64([rows, tail, head, BASE, rows, tail, head, BASE]).reshape(-1, 1, 1)
        return self.stack(layers, node)

    def stack(self, layers: Array, first_rank: int) -> RingStack:
        """One row is sent at a time."""
        sent, taken = np.zeros((2, *layers.shape[1:]), np.int64)
        return RingStack(layers, sent, taken, self.ring_rows, 1, first_rank, 1)

    def arguments(self, node: int) -> tuple[Any, ...]:
        """Looks once more than it has to, and does not sleep."""
        addresses = [int64([bell[node:].ctypes.data for node in range(NODES)]) for bell in self.bells]
        return 0, 1, 1, 0, node, *self.stacks[node], entry_parts(self.token), Bells(*addresses, node)


class Dispatcher:
    """What one rank of a dispatch holds."""

    def __init__(
        self, nodes: Nodes, node: int, x: torch.Tensor, in_rank: Any, from_nodes: Any, ids: Any
    ) -> None:
        self.nodes, self.node, self.x = nodes, node, x
        self.in_rank = np.array(in_rank, np.bool_).reshape(-1, NODES)
        self.send_rdma_head = np.where(self.in_rank, np.cumsum(self.in_rank, 0, np.int32) - 1, -1).astype(
            np.int32
        )
        self.from_nodes = int32(from_nodes)
        num_rows = int(self.from_nodes.sum())
        self.results = [
            np.full((num_rows, 4), -1, np.int32),
            np.full((num_rows, 2), -1, np.int32),
            np.full((num_rows, 1), -9, np.int64),
            np.full((num_rows, 1), -9, np.float32),
        ]
        self.send_nvl_head = np.full((num_rows, 1), -9, np.int32)
        self.ids = np.array(ids, np.int64).reshape(-1, 1)
        self.cursor = np.zeros((1, NODES), np.int64)
        first = np.cumsum(self.from_nodes) - self.from_nodes
        self.first_virtual = int64(first).reshape(1, NODES)
        self.next_row = int64(first).reshape(1, NODES, 1)
        self.next_result = int64(first).reshape(1, 1, NODES)

    def run(self) -> int:
        """The lanes that are not done yet."""
        nodes = self.nodes
        addresses = int64([part.ctypes.data for part in self.results] + [0])
        places = np.zeros((1, 5), np.int64) if nodes.within_node else addresses.reshape(1, 5)
        weights = np.full(self.ids.shape, 0.5, np.float32)
        unfinished: int = cpu.dispatch_between_nodes(
            *plain(
                *nodes.arguments(self.node),
                Payload(self.x.data_ptr(), 16, 0, 0, 0, 0, self.ids, weights, 2),
                NodeTokens(self.cursor, self.in_rank, self.send_rdma_head),
                Relayed(
                    *(self.send_nvl_head, self.first_virtual, self.from_nodes.reshape(NODES, 1)),
                    *(self.next_row, places, 1),
                ),
                Received(int32([[self.from_nodes.sum()]]), self.next_result, addresses),
                0,
            )
        )
        return unfinished


def test_wanted_by() -> None:
    in_rank = np.array([[0, 0, 0, 0, 1, 0, 1, 0]], np.bool_)
    wanted_by = from_python(relay_dispatch.wanted_by)
    assert wanted_by(in_rank, 0, 1, 4) == 5
    assert wanted_by(in_rank, 0, 0, 4) == 0


def test_dispatch_between_nodes() -> None:
    """The example: a token at rank 0 that goes to both."""
    nodes = Nodes(16, 1, ring_rows=2)
    x = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    sender = Dispatcher(nodes, 0, x, [[1, 1]], [1, 0], [3])
    receiver = Dispatcher(nodes, 1, x[:0], [], [1, 0], [])
    assert receiver.run() == 1
    assert sender.run() == 0
    # Its own window, as row 0; and entry 0 of its ring at rank 1, whose tail becomes base + 1.
    assert sender.results[0].tolist() == [[1, 2, 3, 4]]
    assert nodes.rows[1, 0, 0, :16].view(np.int32).tolist() == [1, 2, 3, 4]
    assert nodes.tails.tolist() == [[BASE, BASE], [BASE + 1, BASE]]
    assert nodes.heads.tolist() == [[BASE, BASE], [BASE, BASE]]
    assert receiver.run() == 0
    # Rank 1 writes it to row 0 of its window, and the head becomes base + 1.
    assert receiver.results[0].tolist() == [[1, 2, 3, 4]]
    assert nodes.heads.tolist() == [[BASE, BASE + 1], [BASE, BASE]]
    # Node 0 and, among its ranks, rank 0; expert 3 is the second one of rank 1.
    assert [rank.results[1].tolist() for rank in (sender, receiver)] == [[[0, 1]], [[0, 1]]]
    assert [rank.results[2].tolist() for rank in (sender, receiver)] == [[[-1]], [[1]]]
    assert [rank.results[3].tolist() for rank in (sender, receiver)] == [[[0.0]], [[0.5]]]
    assert [rank.send_nvl_head.tolist() for rank in (sender, receiver)] == [[[0]], [[0]]]


def test_full_rings_let_a_dispatch_wait() -> None:
    """Three tokens of rank 0 for rank 1, through rings of two rows both between nodes and within one."""
    nodes = Nodes(16, 1, ring_rows=2, within_node=True)
    x = torch.arange(12, dtype=torch.int32).view(3, 4)
    sender = Dispatcher(nodes, 0, x, [[0, 1]] * 3, [0, 0], [2, 1 << 32, 3])
    receiver = Dispatcher(nodes, 1, x[:0], [], [3, 0], [])
    assert sender.run() == 1
    assert nodes.tails[1, 0] == BASE + 2
    # What is not there yet is missing both where rows are relayed and where they end.
    assert receiver.run() == 2
    assert nodes.heads[0, 1] == BASE + 2
    assert receiver.results[0][:2].tolist() == x[:2].tolist()
    assert sender.run() == 0
    assert receiver.run() == 0
    assert receiver.results[0].tolist() == x.tolist()
    assert receiver.results[2].tolist() == [[0], [-1], [1]]
    assert nodes.own_tails[1] == nodes.own_heads[1] == BASE + 3
    assert nodes.own_tails[0] == BASE


class Combiner:
    """What one rank of a combine holds: its outputs, and the tokens that it adds up."""

    def __init__(self, nodes: Nodes, node: int, x: torch.Tensor, in_rank: Any, from_nodes: Any) -> None:
        self.nodes, self.node, self.x = nodes, node, x
        in_rank = np.array(in_rank, np.bool_).reshape(-1, NODES)
        self.send_rdma_head = np.where(in_rank, np.cumsum(in_rank, 0, np.int32) - 1, -1).astype(np.int32)
        self.from_nodes = int32(from_nodes)
        self.send_nvl_head = np.arange(len(x), dtype=np.int32).reshape(-1, 1)
        self.out = torch.full((len(in_rank), x.shape[1]), -9.0, dtype=x.dtype)
        self.weights = np.full((len(x), 1), 0.25, np.float32)
        self.out_weights = np.full((len(in_rank), 1), -9, np.float32)
        self.cursor = np.zeros(1, np.int64)

    def run(self) -> int:
        nodes = self.nodes
        first = int64(np.cumsum(self.from_nodes) - self.from_nodes)
        before = np.concatenate([first, [self.from_nodes.sum()]]).reshape(1, 1, -1)
        x_at, weights_at = self.x.data_ptr(), self.weights.ctypes.data
        peers = [int64([0 if nodes.within_node else address]) for address in (x_at, weights_at)]
        unfinished: int = cpu.combine_between_nodes(
            *plain(
                *nodes.arguments(self.node),
                Outputs(x_at, weights_at, *peers),
                Sums(
                    *(self.out.data_ptr(), 0, 0, self.x.shape[1], self.x.shape[1] * 4, cpu.FP32),
                    self.out_weights,
                ),
                Pushed(first.reshape(1, 1, NODES), before),
                NodeSums(
                    *(self.cursor, self.send_rdma_head, self.send_nvl_head, first.reshape(1, NODES)),
                    *(self.from_nodes.reshape(NODES, 1), int(first[self.node])),
                ),
                0,
            )
        )
        return unfinished


def test_combine_between_nodes() -> None:
    """The example: a token of rank 0 that went to both."""
    nodes = Nodes(16, 1, ring_rows=2)
    own = Combiner(nodes, 0, torch.tensor([[1.0, 2.0, 3.0, 4.0]]), [[1, 1]], [1, 0])
    other = Combiner(nodes, 1, torch.tensor([[10.0, 20.0, 30.0, -0.0]]), [], [1, 0])
    assert own.run() == 1
    assert other.run() == 0
    # Rank 1 rounds 0 + its row, and puts it into entry 0 of its ring at rank 0.
    assert nodes.rows[0, 1, 0, :16].view(np.float32).tolist() == [10, 20, 30, 0]
    assert nodes.tails.tolist() == [[BASE, BASE + 1], [BASE, BASE]]
    # Rank 0 adds up its own row, rounded alike, and that entry.
    assert own.run() == 0
    assert own.out.tolist() == [[11, 22, 33, 4]]
    assert own.out_weights.tolist() == [[0.5]]
    assert nodes.heads.tolist() == [[BASE, BASE], [BASE + 1, BASE]]


def test_full_rings_let_a_combine_wait() -> None:
    """Three tokens of rank 0 that went to rank 1, back through rings of two rows; a fourth went nowhere."""
    nodes = Nodes(16, 1, ring_rows=2, within_node=True)
    own = Combiner(nodes, 0, torch.zeros(0, 4), [[0, 1], [0, 1], [0, 0], [0, 1]], [0, 0])
    outputs = torch.arange(12.0).view(3, 4)
    other = Combiner(nodes, 1, outputs, [], [3, 0])
    assert own.run() == 1
    assert other.run() > 0
    assert nodes.tails[0, 1] == BASE + 2
    assert own.run() == 1
    assert nodes.heads[1, 0] == BASE + 2
    assert own.out[:3].tolist() == [*outputs[:2].tolist(), [0.0] * 4]
    assert other.run() == 0
    assert own.run() == 0
    assert own.out.tolist() == [*outputs[:2].tolist(), [0.0] * 4, outputs[2].tolist()]
    assert own.out_weights.tolist() == [[0.25], [0.25], [0.0], [0.25]]
    assert nodes.own_tails[1] == nodes.own_heads[1] == BASE + 3
