"""The steps of the ring and relay kernels do what the examples in their docstrings say.

A step reads its groups by name, so a test can pass them as they are on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anyep.backends.cpu.kernels import (
    lanes,
    node_handles,
    relay_combine,
    relay_dispatch,
    rings,
    sums,
    windows,
)
from anyep.backends.cpu.kernels.groups import (
    NO_ORDER,
    Bells,
    EntryParts,
    NodeHandle,
    NodeSums,
    NodeTokens,
    Outputs,
    Payload,
    Pushed,
    Received,
    Relayed,
    RingResults,
    RingStack,
    RingSums,
    RingTokens,
    Scratch,
    Sums,
)
from anyep.backends.cpu.kernels.sums import BLOCK, FP32
from tests.support.arrays import Array, flags, from_python, int32, int64

BASE = 5
"""The rows that went through each ring in earlier calls."""
ROW_BYTES = 16
PARTS = EntryParts(ROW_BYTES, 24, 24, 24, 32, ROW_BYTES, 0, 0)
NO_TOPK = np.zeros((0, 0), np.int64), np.zeros((0, 0), np.float32)


class Ends:
    """One channel between this rank and some peers: its rings to them, and theirs to it."""

    def __init__(self, num_peers: int, num_rows: int, chunk: int = 8, first_rank: int = 0) -> None:
        self.to, self.of = np.zeros((2, num_peers, num_rows, PARTS.num_bytes), np.uint8)
        self.counters = np.full((4, num_peers), BASE, np.int64)
        """The tails and heads of the rings to the peers, then of those from them."""
        self.bells = np.zeros(num_peers, np.int64)
        self.nobody = np.zeros(num_peers, np.int64)
        at = [part.ctypes.data + 8 * np.arange(num_peers) for part in self.counters]
        rows = [part.ctypes.data + part[0].nbytes * np.arange(num_peers) for part in (self.to, self.of)]
        bases = self.counters[0].copy()
        layers = int64([rows[0], at[0], at[1], bases, rows[1], at[2], at[3], bases])
        sent, taken = np.zeros((2, 1, num_peers), np.int64)
        self.rings = RingStack(layers.reshape(8, 1, -1), sent, taken, num_rows, chunk, first_rank, 1)
        self.wake = Bells(
            *(part.ctypes.data + 8 * np.arange(num_peers) for part in (self.bells, self.nobody)), 0
        )

    def row(self, entries: Array, peer: int, entry: int) -> list[float]:
        return list(entries[peer, entry, :ROW_BYTES].view(np.float32))

    def arrive(self, peer: int, rows: list[list[float]], source: int = 0) -> None:
        """Rows come from a peer."""
        for entry, row in enumerate(rows):
            self.of[peer, entry, :ROW_BYTES].view(np.float32)[:] = row
            self.of[peer, entry, ROW_BYTES:24].view(np.int32)[:] = source, 1
        self.counters[2, peer] += len(rows)


def rows_of(*values: int) -> Array:
    """Rows of one value each."""
    return np.repeat(np.array(values, np.float32)[:, None], 4, axis=1)


def payload(x: Array) -> Payload:
    return Payload(x.ctypes.data, ROW_BYTES, 0, 0, 0, 0, *NO_TOPK, 1)


def outputs(x: Array, in_place: list[int]) -> Outputs:
    return Outputs(x.ctypes.data, 0, int64(in_place), np.zeros(len(in_place), np.int64))


def sums_to(out: Array) -> Sums:
    return Sums(out.ctypes.data, 0, 0, 4, ROW_BYTES, FP32, np.zeros((len(out), 0), np.float32))


def scratch(num_rows: int) -> Scratch:
    return Scratch(*np.zeros((2, num_rows), np.int64), np.zeros(BLOCK, np.float32))


def test_lanes() -> None:
    ends = [from_python(lanes.end_of_channel)(channel, 2, 5) for channel in range(2)]
    assert ends == [3, 5]
    one = Ends(1, 4)
    one.counters[1] += 3
    one.counters[2] += 2
    assert from_python(lanes.end_of_room)(one.rings, 0, 0) == 7
    assert from_python(lanes.end_of_arrived)(one.rings, 0, 0) == 2
    to = from_python(lanes.entry_to)(one.rings, PARTS, 0, 0, 5)
    assert to == one.to[0, 1].ctypes.data
    assert from_python(lanes.entry_from)(one.rings, PARTS, 0, 0, 5) == one.of[0, 1].ctypes.data
    from_python(lanes.publish_tail)(one.rings, 0, 0, 2, one.wake)
    from_python(lanes.publish_head)(one.rings, 0, 0, 1, one.wake)
    assert (one.counters[0, 0], one.counters[3, 0]) == (BASE + 2, BASE + 1)
    assert (one.rings.sent[0, 0], one.rings.taken[0, 0]) == (2, 1)
    assert one.bells[0] == 2


def test_a_peer_is_woken_by_its_rank() -> None:
    """Peer 1 of a node whose first rank is 2 is rank 3."""
    ends = Ends(4, 1, first_rank=2)
    from_python(lanes.publish_tail)(ends.rings, 0, 1, 1, ends.wake)
    assert ends.bells.tolist() == [0, 0, 0, 1]


def test_polls_after_a_round() -> None:
    after_round, ends = from_python(lanes.polls_after_round), Ends(1, 1)
    polls = [after_round(num_polls, 0, 22, 0, 0, ends.wake) for num_polls in (3, 22)]
    assert [after_round(3, True, 22, 0, 0, ends.wake), *polls] == [0, 4, -1]


def test_rows_in_place_and_in_rings() -> None:
    ends, here, found = Ends(3, 2), rows_of(0, 1, 2, 3, 4), scratch(3)
    find, heads = from_python(lanes.find_rows), int32([[4, -1, 0]])
    summed = outputs(here, [here.ctypes.data, 0, 0])
    assert find(heads, 0, 0, ends.rings, PARTS, summed, found, NO_ORDER) == -1
    ends.arrive(2, [[9] * 4])
    assert find(heads, 0, 0, ends.rings, PARTS, summed, found, NO_ORDER) == 2
    assert found.rows[:2].tolist() == [here[4].ctypes.data, ends.of[2, 0].ctypes.data]
    assert find(heads, 0, 0, ends.rings, PARTS, summed, found, int32([[2, 1, 0]])) == 2
    assert found.rows[:2].tolist() == [ends.of[2, 0].ctypes.data, here[4].ctypes.data]
    from_python(lanes.release_rows)(heads, 0, 0, ends.rings, summed, ends.wake)
    assert ends.counters[3].tolist() == [BASE, BASE, BASE + 1]


def test_rows_sorted_by_their_keys() -> None:
    weights, found = np.array([[0.5, 2], [0.7, 1], [0.1, 2]], np.float32), scratch(3)
    found.rows[:], found.weights[:] = (10, 11, 12), [row.ctypes.data for row in weights]
    from_python(relay_combine.sort_by_key)(found, 3, 2)
    assert found.rows.tolist() == [11, 10, 12]
    assert found.weights.tolist() == [weights[row].ctypes.data for row in (1, 0, 2)]


def test_order_of_ranks() -> None:
    rank_at = from_python(sums.rank_at)
    assert rank_at(int32([[2, 0, 1]]), 0, 0) == 2
    assert rank_at(NO_ORDER, 5, 0) == 0


def test_sum_token() -> None:
    rows, out, found = rows_of(1, 3), rows_of(-9), scratch(2)
    rows[:, 1] = 2, 4
    found.rows[:] = [row.ctypes.data for row in rows]
    from_python(sums.sum_token)(0, 2, sums_to(out), found)
    assert out[0, :2].tolist() == [4, 6]


def test_local_ids() -> None:
    ids, weights = np.zeros(2, np.int64), np.zeros(2, np.float32)
    sent = Payload(0, 0, 0, 0, 0, 0, int64([[3, 1]]), np.array([[0.5, 0.25]], np.float32), 2)
    from_python(windows.write_local_ids)(ids, weights, sent, 0, 1)
    assert (ids.tolist(), weights.tolist()) == ([1, -1], [0.5, 0])


# Rings


def test_send_chunk() -> None:
    ends, x = Ends(1, 1), rows_of(0, 1, 2)
    tokens = RingTokens(np.zeros((1, 1), np.int64), int32([[0], [-1], [1]]))
    send = from_python(rings.send_chunk)
    assert send(0, 0, ends.rings, PARTS, ends.wake, payload(x), tokens, 0) == (1, False)
    assert tokens.cursor[0, 0] == 2
    assert ends.counters[0, 0] == BASE + 1
    ends.counters[1, 0] += 1
    assert send(0, 0, ends.rings, PARTS, ends.wake, payload(x), tokens, 0) == (1, True)
    assert ends.row(ends.to, 0, 0) == [2] * 4


def test_take_arrived() -> None:
    ends, x, sources = Ends(1, 2), rows_of(*[-9] * 8), np.full(8, -9, np.int32)
    ends.arrive(0, [[1] * 4, [2] * 4], source=7)
    results = RingResults(int32([[5, 3]]), int64([x.ctypes.data, sources.ctypes.data, 0, 0, 0]))
    take = from_python(rings.take_arrived)
    assert take(0, 0, ends.rings, PARTS, ends.wake, results, 0) == (2, False)
    assert x[:, 0].tolist() == [-9] * 5 + [1, 2, -9]
    assert sources.tolist() == [-9] * 5 + [7, 7, -9]
    assert ends.counters[3, 0] == BASE + 2


def test_push_chunk() -> None:
    ends, x = Ends(1, 2), rows_of(*range(8))
    push = from_python(rings.push_chunk)
    arguments = ends.rings, PARTS, ends.wake, outputs(x, [0]), int32([[5, 3]]), 0
    assert push(0, 0, *arguments) == (2, False)
    assert [ends.row(ends.to, 0, entry)[0] for entry in range(2)] == [5, 6]
    assert from_python(rings.lane_of)(int32([[0, 2], [2, 3]]), 0, 1, ends.rings) == (2, 3)


def test_sum_arrived() -> None:
    ends, out = Ends(1, 2), rows_of(-9, -9)
    ends.arrive(0, [[3] * 4])
    tokens = RingSums(np.zeros(1, np.int64), int32([[0], [1]]), int32([[0, 0]]))
    arguments = ends.rings, PARTS, ends.wake, outputs(out, [0]), sums_to(out), tokens, scratch(1)
    assert from_python(rings.sum_arrived)(0, *arguments) == (1, False)
    assert (tokens.cursor.tolist(), out[:, 0].tolist()) == ([1], [3, -9])


# Relays


def test_send_to_node() -> None:
    ends, x = Ends(2, 1), rows_of(0, 1)
    tokens = NodeTokens(np.zeros((1, 2), np.int64), flags([[0, 1]] * 2), int32([[-1, 0], [-1, 1]]))
    send = from_python(relay_dispatch.send_to_node)
    assert send(0, 1, ends.rings, PARTS, ends.wake, payload(x), tokens, 0) == (1, False)
    assert tokens.cursor.tolist() == [[0, 1]]
    assert ends.row(ends.to, 1, 0) == [0] * 4


def relayed_to(places: list[list[int]], next_row: list[int], num_rows: int = 1, is_new: int = 1) -> Relayed:
    """From two nodes to the ranks of this one; all rows come from node 0."""
    return Relayed(
        np.full((num_rows, len(places)), -9, np.int32),
        int64([[0, num_rows]]),
        int32([[num_rows], [0]]),
        int64([[next_row, next_row]]),
        int64(places),
        is_new,
    )


def test_which_row_a_rank_gets() -> None:
    assert from_python(relay_dispatch.known_ranks)(int32([[4, -1, 0]]), 0) == 5
    row_at, relayed = from_python(relay_dispatch.row_at), relayed_to([[0] * 5], [7])
    assert row_at(0, 0, 0, 0, relayed) == 7
    assert (relayed.next_row[0, 0].tolist(), relayed.send_nvl_head.tolist()) == ([8], [[7]])
    assert row_at(0, 0, 0, 0, relayed._replace(is_new=0)) == 7


def test_relay_rows() -> None:
    """On node 1: one rank has a window, the other one a ring."""
    net, nvl = Ends(2, 1), Ends(2, 1)
    nvl.rings.layers[0, 0, 0] = 0
    net.arrive(0, [[6] * 4])
    net.of[0, 0, 20:24].view(np.int32)[:] = 3
    x, meta = rows_of(-9), np.full((1, 2), -9, np.int32)
    relayed = relayed_to([[x.ctypes.data, meta.ctypes.data, 0, 0, 0], [0] * 5], [0, 4])
    tokens = NodeTokens(np.zeros((1, 2), np.int64), flags(np.zeros((0, 4))), int32(np.zeros((0, 2))))
    relay, own_entry = from_python(relay_dispatch.relay_rows), np.zeros(PARTS.num_bytes, np.uint8)
    done = relay(*(0, 0, net.rings, nvl.rings, PARTS, net.wake, payload(x), tokens, relayed, 1, own_entry, 0))
    assert done == (1, True)
    assert (x.tolist(), meta.tolist()) == ([[6] * 4], [[0, 3]])
    assert nvl.row(nvl.to, 1, 0) == [6] * 4
    assert net.counters[3].tolist() == [BASE + 1, BASE]
    assert nvl.counters[0].tolist() == [BASE, BASE + 1]
    assert relayed.send_nvl_head.tolist() == [[0, 4]]


def test_take_from_a_ring_of_the_node() -> None:
    nvl, x, meta = Ends(1, 1), rows_of(*[-9] * 10), np.full((10, 2), -9, np.int32)
    nvl.arrive(0, [[2] * 4], source=1)
    places = int64([x.ctypes.data, meta.ctypes.data, 0, 0, 0])
    received = Received(int32([[1]]), int64([[[5, 9]]]), places)
    take = from_python(relay_dispatch.take_from_ring)
    assert take(0, 0, nvl.rings, PARTS, nvl.wake, received, 0, 1, 0) == (1, True)
    assert (x[9].tolist(), received.next_row.tolist()) == ([2] * 4, [[[5, 10]]])


def test_push_to_relay() -> None:
    nvl, x = Ends(1, 4), rows_of(*range(10))
    pushed = Pushed(int64([[[5, 9]]]), int64([[[0, 2, 3]]]))
    push = from_python(relay_combine.push_to_relay)
    assert push(0, 0, nvl.rings, PARTS, nvl.wake, outputs(x, [0]), pushed, 0) == (3, True)
    assert [nvl.row(nvl.to, 0, entry)[0] for entry in range(3)] == [5, 6, 9]


def test_return_sums() -> None:
    """Two tokens of node 1; rank 0's row is read in place, that of rank 1 comes through a ring."""
    net, nvl, here = Ends(2, 2), Ends(2, 2), rows_of(1, 1)
    here[:, 1] = 2
    nvl.arrive(1, [[3, 4, 3, 3]])
    tokens = NodeSums(
        *(np.zeros(1, np.int64), int32(np.zeros((0, 2))), int32([[0, 0], [1, 1]])),
        *(int64([[0, 0]]), int32([[0], [2]]), 0),
    )
    combined, found = outputs(here, [here.ctypes.data, 0]), scratch(2)
    arguments = net.rings, nvl.rings, PARTS, net.wake, combined, sums_to(here), tokens, found
    assert from_python(relay_combine.return_sums)(0, 1, *arguments) == (1, False)
    assert net.row(net.to, 1, 0)[:2] == [4, 6]
    assert net.counters[0].tolist() == [BASE, BASE + 1]
    assert nvl.counters[3].tolist() == [BASE, BASE + 1]


def test_sum_own() -> None:
    """On node 0: token 0 went to both nodes, token 1 to node 1 alone."""
    net, nvl, here, out = Ends(2, 2), Ends(1, 1), rows_of(1), rows_of(-9, -9)
    here[:, 1] = 2
    net.arrive(1, [[3, 4, 3, 3]])
    tokens = NodeSums(
        *(np.zeros(1, np.int64), int32([[0, 0], [-1, 1]]), int32([[0]])),
        *(int64([[0, 1]]), int32([[1], [0]]), 0),
    )
    combined, own_row = outputs(here, [here.ctypes.data]), np.zeros(PARTS.num_bytes, np.uint8)
    arguments = net.rings, nvl.rings, PARTS, net.wake, combined, sums_to(out), tokens, scratch(2), own_row
    assert from_python(relay_combine.sum_own)(0, 0, *arguments) == (1, False)
    assert out[0, :2].tolist() == [4, 6]
    assert tokens.cursor.tolist() == [1]
    assert net.counters[3].tolist() == [BASE, BASE + 1]


# Handles between nodes

HANDLE = NodeHandle(
    *(flags([[0, 1]]), int32([[0], [1]]), int32([[0], [1]]), int32([[0], [0]]), int32([0, 0])),
    *(int32([[0], [0]]), int32([0, 0]), np.zeros((0, 8), np.uint8), int32([[-1, 0]])),
    np.zeros((0, 1), np.int32),
)


@pytest.mark.parametrize(
    ("step", "arguments", "changes", "fault"),
    [
        (node_handles.fault_of_sent, (1,), {}, 0),
        (node_handles.fault_of_sent, (1,), {"send_rdma_head": int32([[0, -1]])}, 1),
        (node_handles.fault_of_received, (), {}, 0),
        (
            node_handles.fault_of_received,
            (),
            {"recv_gbl_sum": int32([1, 3]), "recv_src_meta": np.zeros((2, 8), np.uint8)},
            4,
        ),
        (node_handles.fault_of_relayed, (0,), {}, 0),
        (node_handles.fault_of_relayed, (0,), {"recv_rdma_sum": int32([2, 1])}, 6),
        (
            node_handles.fault_of_relayed,
            (0,),
            {"recv_rdma_sum": int32([1, 2]), "send_nvl_head": int32([[0]])},
            7,
        ),
    ],
)
def test_faults_of_handles(step: Any, arguments: Any, changes: dict[str, Array], fault: int) -> None:
    assert from_python(step)(HANDLE._replace(**changes), *arguments) == fault


def test_first_rows() -> None:
    find, counts = from_python(node_handles.find_first_rows), int32([-9] * 6)
    handle = HANDLE._replace(recv_rdma_sum=int32([3, 3]), send_nvl_head=int32([[4], [-1], [5]]))
    assert find(handle, 2, 1, counts) == 0
    assert counts.tolist() == [-9] * 4 + [4, -1]
    assert find(handle._replace(send_nvl_head=int32([[4], [-1], [6]])), 2, 1, counts) == 9
    assert [from_python(node_handles.before_in)(int32([3, 5]), index) for index in range(3)] == [0, 3, 5]
