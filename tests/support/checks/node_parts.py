"""Checks of the GPU's kernels that count between nodes, and of those for handles, by their examples and
against handles of a dense reference: on a GPU, or interpreted ("cpu").
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from anyep.backends.cuda import constants
from anyep.backends.cuda.kernels.groups import NodeHandle, Relayed, Tables
from anyep.core.digests import NODE_FACTOR, mixed
from anyep.layout import ControlRegion
from tests.support.checks.launching import launch
from tests.support.checks.normal import GUARD, guarded, int32, int64, state_of

triton = importlib.import_module("triton")
tl = importlib.import_module("triton.language")
counts = importlib.import_module("anyep.backends.cuda.kernels.node_counts")
handles = importlib.import_module("anyep.backends.cuda.kernels.node_handles")
notify = importlib.import_module("anyep.backends.cuda.kernels.notify")

ONE_EACH = {"NUM_NODES": 2, "RANKS_PER_NODE": 1}


class Two:
    """The heaps and tables of two nodes of one rank; the last call was number 4."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.region = ControlRegion(2, 1)
        self.heaps = torch.zeros(2, self.region.num_bytes, dtype=torch.uint8, device=device)
        self.states = [state_of(device, NUMBER=5) for _ in range(2)]
        for rank in range(2):
            self.words(rank, self.region.blocks.status.start, 1)[0] = 4

    def words(self, rank: int, at: int, count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return self.heaps[rank, at : at + count * dtype.itemsize].view(dtype)

    def counts_of(self, rank: int, node: int, number: int, count: int) -> torch.Tensor:
        block = self.region.blocks.network_counts
        return self.words(rank, block.offset(node, number % 2), count, torch.int32)

    def tables(self, rank: int, targets: torch.Tensor | None = None) -> Tables:
        blocks, here = self.region.blocks, [0] * constants.NUM_CONSTANTS
        addresses = [heap.data_ptr() for heap in self.heaps]
        here[constants.RANK], here[constants.OWN_HEAP] = rank, addresses[rank]
        here[constants.NUMBER_AT] = blocks.status.start
        here[constants.GIVEN_UP_AT] = blocks.given_up.start
        here[constants.FLAG_STRIDE] = blocks.given_up.stride
        here[constants.NETWORK_COUNTS_AT] = blocks.network_counts.start
        here[constants.NETWORK_COUNTS_STRIDE] = blocks.network_counts.stride
        here[constants.NETWORK_COUNTS_SET_STRIDE] = 2 * blocks.network_counts.stride
        heaps, state = int64(addresses, self.device), self.states[rank]
        others = targets if targets is not None else state
        return Tables(int64(here, self.device), heaps, state, others, state, heaps, heaps)

    def handle(self, **parts: torch.Tensor) -> NodeHandle:
        """Of these parts; the others are not used."""
        rest = dict.fromkeys(NodeHandle._fields, int32([GUARD], self.device))
        return NodeHandle(**{**rest, **parts})


def check_counts_of_nodes(device: str) -> None:
    """count_nodes and place_in_nodes: their examples, and masks of nodes of two."""
    in_rank = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.int8, device=device)
    per_node = guarded((2,), torch.int32, device)
    of_two = {"NUM_NODES": 2, "RANKS_PER_NODE": 2, "TILE_TOKENS": 2}
    launch(counts.count_nodes, device, 2, in_rank, per_node, 2, **of_two)
    assert per_node.tolist() == [2, 1]
    for rows, ranks_per_node, numbers, channels in (
        ([[1, 0], [1, 1], [0, 1]], 1, [[0, -1], [1, 0], [-1, 1]], [[2, 0], [1, 1]]),
        ([[0, 1, 0, 0], [1, 1, 0, 1], [0, 0, 1, 1]], 2, [[0, -1], [1, 0], [-1, 1]], [[2, 0], [1, 1]]),
    ):
        for wrong in (0, 1):
            mask = torch.tensor(rows, dtype=torch.int8, device=device)
            found, by_channel = guarded((3, 2), torch.int32, device), guarded((2, 2), torch.int32, device)
            copy, state = guarded(mask.shape, torch.int8, device), state_of(device)
            given = int32([2, 2 + wrong], device)
            launch(
                *(counts.place_in_nodes, device, (2, 2), mask, given, found, by_channel, copy, state),
                *(3, 2, 2),
                NUM_NODES=2,
                RANKS_PER_NODE=ranks_per_node,
                IS_CHECKED=True,
                TILE_TOKENS=2,
            )
            assert found.tolist() == numbers
            assert by_channel.tolist() == channels
            assert torch.equal(copy, mask)
            expected = constants.wrong_word(constants.WRONG_NODE_COUNT, 1) if wrong else 0
            assert int(state[constants.IS_WRONG]) == expected


def check_counts_for_relays(device: str) -> None:
    """post_node_counts, read_node_counts and plan_lanes: their examples."""
    two = Two(device)
    by_channel, by_node = int32([[1, 2], [3, 0]], device), int32([[1, 2], [3, 0]], device)
    launch(*(counts.post_node_counts, device, 2, two.tables(0), by_channel, by_node, 2), **ONE_EACH, BLOCK=4)
    assert two.counts_of(1, 0, 5, 4).tolist() == [3, 0, 3, 0]
    assert two.counts_of(0, 0, 5, 4).tolist() == [1, 2, 1, 2]
    assert not two.counts_of(1, 0, 4, 4).any()
    # A rank that has given up writes nothing.
    two.words(0, two.region.blocks.given_up.offset(0), 1)[0] = 1
    launch(
        *(counts.post_node_counts, device, 2, two.tables(0), by_channel + 1, by_node, 2), **ONE_EACH, BLOCK=4
    )
    assert two.counts_of(1, 0, 5, 4).tolist() == [3, 0, 3, 0]

    for node, words in enumerate(([3, 1, 3, 1], [2, 4, 2, 4])):
        two.counts_of(1, node, 5, 4).copy_(int32(words, device))
    for outcome in (2, 0):
        two.states[1][constants.OUTCOME] = outcome
        parts = {
            name: guarded(shape, torch.int32, device)
            for name, shape in (("recv_rdma_prefix", (2, 2)), ("recv_rdma_sum", (2,)), ("recv_gbl_sum", (2,)))
        }
        handle = two.handle(**parts, rdma_prefix=int32([[1, 2], [3, 0]], device))
        lanes = [guarded((2, 2), dtype, device) for dtype in (torch.int64, torch.int32, torch.int64)]
        relayed = Relayed(handle.send_nvl_head, *lanes)
        rank_prefix = int32([[0, 4], [1, 10]], device)
        blocks = {**ONE_EACH, "CHANNEL_BLOCK": 4}
        arguments = (two.tables(1), handle, relayed, rank_prefix, 2)
        launch(counts.read_node_counts, device, 1, *arguments, num_warps=1, **blocks)
        if outcome:
            assert all((part == GUARD).all() for part in (*parts.values(), *lanes))
    assert handle.recv_rdma_prefix.tolist() == [[3, 4], [2, 6]]
    assert handle.recv_rdma_sum.tolist() == handle.recv_gbl_sum.tolist() == [4, 10]
    assert handle.rdma_prefix.tolist() == [[1, 3], [3, 3]]
    first_virtual, expected, next_row = (lane.tolist() for lane in lanes)
    assert (first_virtual, expected, next_row) == ([[0, 4], [3, 6]], [[3, 1], [2, 4]], [[0, 4], [3, 6]])

    again = [guarded((2, 2), dtype, device) for dtype in (torch.int64, torch.int32)]
    launch(
        *(counts.plan_lanes, device, 1, two.states[1], handle),
        *(Relayed(handle.send_nvl_head, *again, two.states[1]), 2),
        num_warps=1,
        NUM_NODES=2,
        CHANNEL_BLOCK=4,
    )
    assert [lane.tolist() for lane in again] == [first_virtual, expected]


@triton.jit
def ask_facts(answers, prefix, constants_of):
    """What small functions return, by their examples."""
    five = tl.full((1,), 5, tl.int32)
    hashes = handles.facts(five, tl.full((1,), 3, tl.int32), 7, five > 0)
    tl.store(answers + tl.arange(0, 1), hashes)
    tl.store(answers + 1 + tl.arange(0, 1), handles.facts(five, five, 7, five < 0))
    tl.store(answers + 2, handles.before_in(prefix, 0).to(tl.int64))
    tl.store(answers + 3, handles.before_in(prefix, 1).to(tl.int64))
    tl.store(answers + 4, counts.counts_at(constants_of, tl.full((), 5, tl.int64), 1))


def check_facts(device: str) -> None:
    answers, here = guarded((5,), torch.int64, device), int64([0] * constants.NUM_CONSTANTS, device)
    here[constants.NETWORK_COUNTS_AT], here[constants.NETWORK_COUNTS_STRIDE] = 1000, 64
    here[constants.NETWORK_COUNTS_SET_STRIDE] = 256
    launch(ask_facts, device, 1, answers, int32([3, 5], device), here)
    assert answers.tolist() == [mixed((5 << 32) + 3 + 7 * NODE_FACTOR), 0, 0, 3, 1320]


def handles_of_one_token(device: str) -> list[NodeHandle]:
    """Of rank 0, which sent one token to rank 1 on another node, and of rank 1."""

    def part(values: Any) -> torch.Tensor:
        return int32(values, device)

    def mask(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int8, device=device)

    nothing = part([[0], [0]])
    return [
        NodeHandle(
            *(mask([[0, 1]]), part([[0], [1]]), part([[0], [1]]), nothing, part([0, 0]), nothing),
            *(part([0, 0]), part([[GUARD, GUARD]]), part([[-1, 0]]), part([[GUARD]])),
        ),
        NodeHandle(
            *(mask([[0, 0]]), nothing, nothing, part([[1], [0]]), part([1, 1]), nothing),
            *(part([1, 1]), part([[0, 1]]), part([[-1, -1]]), part([[0]])),
        ),
    ]


def check_digests_of_node_handles(device: str) -> None:
    """digest_node_handle: its example, and that each part counts."""
    two = Two(device)

    def digests(of_handles: list[NodeHandle]) -> list[list[int]]:
        found = []
        for rank, handle in enumerate(of_handles):
            words = guarded((4,), torch.int64, device)
            launch(
                *(handles.digest_node_handle, device, (2, 2), two.tables(rank).constants, handle, words),
                *(1 - rank, rank, rank, 1),
                **ONE_EACH,
                CHANNEL_BLOCK=2,
                TILE_ROWS=2,
            )
            found.append(words.tolist())
        return found

    def agree(found: list[list[int]]) -> bool:
        """What one has for "to" the other, the other has for "from" it."""
        matrix = np.array(found)
        return bool((matrix[:, :2] == matrix[:, 2:].T).all())

    right = handles_of_one_token(device)
    assert agree(digests(right))
    for rank, part in ((0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (0, 8), (1, 9)):
        changed = [*right]
        values = right[rank][part].clone()
        values.view(-1)[-1] = 1 - values.view(-1)[-1]
        changed[rank] = NodeHandle(*right[rank][:part], values, *right[rank][part + 1 :])
        assert not agree(digests(changed)), NodeHandle._fields[part]


def check_unpack_meta(device: str) -> None:
    """unpack_meta: its example; and where nothing is padded, and where a call went wrong."""
    for pads, outcome in ((True, 0), (False, 0), (True, 2)):
        two = Two(device)
        two.states[1][constants.NUM_ROWS], two.states[1][constants.OUTCOME] = 1, outcome
        window = int32([[1, 3], [GUARD, GUARD]], device)
        targets = int64([[GUARD] * constants.TARGET_WORDS] * 2, device)
        targets[1, constants.TARGET_SOURCES] = window.data_ptr()
        meta, heads = guarded((2, 2), torch.int32, device), int32([[4], [5]], device)
        ids = int64([[3], [GUARD]], device)
        handle = two.handle(recv_rdma_sum=int32([1, 1], device), recv_src_meta=meta, send_nvl_head=heads)
        launch(
            *(handles.unpack_meta, device, 2, two.tables(1, targets), handle, ids, 2, 2, 1),
            **ONE_EACH,
            PAD=pads,
            PAD_IDS=pads,
            BLOCK=2,
        )
        if outcome:
            assert (meta.tolist(), heads.tolist(), ids.tolist()) == (
                [[0, 0], [0, 0]],
                [[-1], [-1]],
                [[-1], [-1]],
            )
        elif pads:
            assert (meta.tolist(), heads.tolist(), ids.tolist()) == (
                [[1, 3], [0, 0]],
                [[4], [-1]],
                [[3], [-1]],
            )
        else:
            assert (meta.tolist(), heads.tolist(), ids.tolist()) == (
                [[1, 3], [GUARD, GUARD]],
                [[4], [5]],
                [[3], [GUARD]],
            )


@triton.jit
def ask_relayed(answers, here, num_ranks: tl.constexpr, ranks_per_node: tl.constexpr, block: tl.constexpr):
    ranks = tl.arange(0, block)
    is_rank = ranks < num_ranks
    messages = tl.load(here + ranks, mask=is_rank, other=0)
    relayed = notify.relayed_by(messages, 1, 1, ranks, is_rank, num_ranks, ranks_per_node)
    tl.store(answers + ranks, relayed, mask=is_rank)


def check_relayed_by(device: str) -> None:
    """relayed_by: its example, and nodes of two."""
    for ranks_per_node, tokens, right in (
        (1, [[3, 1], [2, 4]], [5, 5]),
        (2, [[3, 1], [2, 4], [5, 6], [7, 8]], [3 + 5, 2 + 7, 1 + 6, 4 + 8]),
    ):
        num_ranks = len(tokens)
        before = notify.HEADER_BYTES.value // 4 + num_ranks + 2
        messages = [int32([*[GUARD] * before, *row], device) for row in tokens]
        answers = guarded((num_ranks,), torch.int64, device)
        addresses = int64([message.data_ptr() for message in messages], device)
        launch(
            *(ask_relayed, device, 1, answers, addresses),
            num_ranks=num_ranks,
            ranks_per_node=ranks_per_node,
            block=num_ranks,
        )
        assert answers.tolist() == right
