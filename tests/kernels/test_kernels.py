"""CPU kernels do what the examples in their docstrings say; `tests/support/checks/` has more of them."""

from __future__ import annotations

import time
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep.backends import cpu
from anyep.backends.cpu.kernels import counting, notify, rings, slots, windows
from anyep.backends.cpu.kernels import digests as cpu_digests
from anyep.backends.cpu.kernels.atomics import load_acquire, store_release
from anyep.backends.cpu.kernels.groups import (
    Bells,
    EntryParts,
    Outputs,
    Payload,
    RingResults,
    RingStack,
    RingSums,
    RingTokens,
    Sums,
    plain,
)
from anyep.core import digests
from anyep.layout import NUM_RING_LAYERS, Window
from tests.support.arrays import Array, flags, int32, int64
from tests.support.depth import examples

NOBODY = np.zeros(1, np.int64)
NO_WAKE_UP = int64([NOBODY.ctypes.data])


def test_fill_handle() -> None:
    rank_prefix, channel_prefix, recv_prefix = (np.empty((2, 2), np.int32) for _ in range(3))
    send_head = np.empty((1, 2), np.int32)
    counting.fill_handle(
        *(1, int32([[2, 1], [1, 3]]), int32([[1, 0], [1, 2]]), int32([[1, 0], [1, 2]])),
        *(int32([[0, 0]]), rank_prefix, channel_prefix, recv_prefix, send_head),
    )
    assert rank_prefix.tolist() == [[2, 1], [3, 4]]
    assert channel_prefix.tolist() == [[1, 1], [1, 3]]
    assert recv_prefix.tolist() == [[0, 1], [0, 1]]
    assert send_head.tolist() == [[2, 1]]


def test_count_sent() -> None:
    """The example; rank 1's rows are what its line of the prefixes adds to that of rank 0."""
    prefix, offsets = int32([[2, 1], [3, 5]]), int64([0, -1])
    for rank, is_return, expected in (
        (0, 0, [[2, 1], [200, 100], [40, 24], [0, 0]]),
        (0, 1, [[2, 1], [200, 100], [40, 20], [0, 0]]),
        (1, 0, [[1, 4], [100, 400], [20, 96], [0, 0]]),
        (1, 1, [[1, 4], [100, 400], [24, 96], [0, 0]]),
    ):
        sent = np.zeros((4, 2), np.int64)
        for times in (1, 2):
            counting.count_sent(sent, prefix, rank, is_return, offsets, 100, 20, 24)
            assert (sent // times).tolist() == expected


def test_count_read() -> None:
    """The example, with ranges' beginnings in the upper halves; a masked reader takes nothing."""
    rows = int64([[7 << 32 | 1, 2], [3, 0]])
    sent = np.zeros((4, 2), np.int64)
    slots.count_read(sent, flags([1, 0]), flags([0, 0]), rows, 100, 20, 8)
    assert sent.tolist() == [[3, 0], [300, 0], [60, 0], [20, 0]]
    slots.count_read(sent, flags([1, 1]), flags([1, 0]), rows, 100, 20, 8)
    assert sent.tolist() == [[3, 3], [300, 300], [60, 60], [20, 20]]


def test_ids_that_are_no_expert() -> None:
    per_rank, per_expert, in_rank = int32([0, 0]), int32([0] * 4), flags([[0, 0]] * 2)
    for value in (4, -2, 2**40, -(2**63), 2**63 - 1):
        ids = int64([[0, 1], [3, value]])
        assert counting.count_layout(ids, 2, per_rank, per_expert, in_rank) == 3
        assert counting.first_wrong_id(ids, 4) == 3
    assert counting.first_wrong_id(int64([[0, -1], [3, 4]]), 4) == 3
    assert counting.first_wrong_id(int64([[0, -1], [3, -2]]), 4) == 3
    assert counting.first_wrong_id(int64([[0, -1], [3, 2]]), 4) == -1
    assert counting.first_wrong_id(int64(np.zeros((0, 2))), 4) == -1


@numba.njit
def digests_in_numba(word, condition, row, token):
    """Also of what a compiler may work out in advance: with signed numbers it got another result."""
    return (
        np.int64(cpu_digests.mixed(word)),
        np.int64(cpu_digests.mixed(word if condition > 0 else 0)),
        cpu_digests.row_word(row, token),
        cpu_digests.channel_word(row, token),
    )


@examples(100, deep=1000)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_digests(word: int, row: int, token: int) -> None:
    """The same bits as in Python."""
    words = digests.row_word(row, token), digests.channel_word(row, token)
    assert digests_in_numba(word, 1, row, token) == (digests.mixed(word), digests.mixed(word), *words)
    assert digests_in_numba(word, 0, row, token) == (digests.mixed(word), digests.mixed(0), *words)


def test_digests_that_differ() -> None:
    assert counting.first_difference_of_digests(int64([[1, 2, 1, 3], [3, 4, 2, 4]])) == -1
    assert counting.first_difference_of_digests(int64([[1, 2, 1, 3], [3, 4, 9, 4]])) == 1


def test_check_handle() -> None:
    found = np.zeros(2, np.int64)

    def check(**changes: Any) -> int:
        parts: dict[str, Any] = {
            "rank": 0,
            "rank_prefix": int32([[2]]),
            "channel_prefix": int32([[2]]),
            "recv_channel_prefix": int32([[0]]),
            "recv_src_idx": int32([0, 1]),
            "in_rank": flags([[1], [1]]),
            "send_head": int32([[0], [1]]),
            "digests": found,
        }
        return int(counting.check_handle(*(parts | changes).values()))

    assert check() == 0
    right = sum(digests.mixed(word) for word in (-1, 0, 2**32 + 1))
    assert (found.view(np.uint64) == right % 2**64).all()
    assert check(recv_src_idx=int32([1, 0])) == 0
    assert found[0] != found[1]
    assert check(recv_src_idx=int32([0])) == 2
    assert check(send_head=int32([[0], [2]])) == 3
    assert check(rank_prefix=int32([[3]]), recv_src_idx=int32([0, 1, 2])) == 3
    assert check(in_rank=flags([[1], [0]])) == 4
    assert check(channel_prefix=int32([[1]])) == 5
    assert check(recv_channel_prefix=int32([[3]])) == 6
    assert check(recv_channel_prefix=int32([[-1]])) == 6
    two = counting.check_handle(
        *(0, int32([[0, 0], [-1, 0]]), int32([[0], [0]]), int32([[0], [0]]), int32([])),
        *(flags(np.zeros((0, 2))), int32(np.zeros((0, 2))), np.zeros(4, np.int64)),
    )
    assert two == 1


def test_notify() -> None:
    """Two senders, both read at peer 1."""
    counts_at, notify_words = 256, 64
    mailboxes = np.zeros((2, 2, notify_words), np.int64)  # receiver, sender
    header = int64([5, 1, *[0] * 30])

    def mailboxes_of(sender: int) -> Array:
        return int64([mailboxes[receiver, sender].ctypes.data for receiver in range(2)])

    nobody = np.zeros(2, np.int64)
    wake_ups = nobody.ctypes.data + 8 * np.arange(2)
    for sender, counts in enumerate(
        (
            (int32([3, 4]), int32([[1, 2], [4, 0]]), int32([9, 8, 7, 6])),
            (int32([1, 1]), int32([[0, 0], [1, 0]]), int32([0, 0, 0, 2])),
        )
    ):
        notify.post_notify(mailboxes_of(sender), wake_ups, 7, header, counts_at, 1, *counts)
    assert mailboxes[:, :, 0].tolist() == [[5, 5], [5, 5]]
    assert mailboxes[0, 0, 32:].view(np.int32)[:6].tolist() == [3, 4, 1, 2, 9, 8]
    at_peer_1 = int64([mailboxes[1, sender].ctypes.data for sender in range(2)])
    matrix, by_channel = np.empty((2, 2), np.int32), np.empty((2, 2), np.int32)
    experts = np.empty(2, np.int64)
    notify.read_counts(at_peer_1, counts_at, matrix, by_channel, experts)
    assert matrix.tolist() == [[3, 4], [1, 1]]
    assert by_channel.tolist() == [[4, 0], [1, 0]]
    assert experts.tolist() == [7, 8]


def test_short_notify() -> None:
    mailbox = np.full(64, 9, np.int64)
    nothing = np.zeros(1, np.int32), np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    notify.post_notify(int64([mailbox.ctypes.data]), NO_WAKE_UP, 7, int64([5, *[0] * 31]), 256, 0, *nothing)
    assert mailbox[:32].tolist() == [5, *[0] * 31]
    assert (mailbox[32:] == 9).all()


def test_read_headers() -> None:
    words = int64([[5, 0, 7], [5, 0, 8]])
    headers = np.empty((2, 3), np.int64)
    addresses = int64([row.ctypes.data for row in words])
    assert notify.read_headers(addresses, int64([5, 0, 7]), 1, 2, headers)
    assert headers.tolist() == words.tolist()
    assert not notify.read_headers(addresses, int64([5, 0, 7]), 1, 3, headers)


def test_signal_and_await() -> None:
    words = int64([0, 0])
    addresses = words.ctypes.data + 8 * np.arange(2)
    wake_ups = int64([7 << 32 | 3, 8 << 32 | 3])
    notify.signal(addresses, wake_ups.ctypes.data + 8 * np.arange(2), 7, 5)
    assert words.tolist() == [5, 5]
    assert wake_ups.tolist() == [7 << 32 | 2, 8 << 32 | 3]
    words = int64([5, 4, 0])
    addresses = words.ctypes.data + 8 * np.arange(3)
    missing, waited = flags([1, 1, 0]), np.zeros(3, np.int64)
    started = time.monotonic_ns() - 10**9
    assert (
        notify.await_counters(addresses, 5, missing, 0, cpu.MAX_POLLS, NO_WAKE_UP[0], 7, waited, started) == 1
    )
    assert missing.tolist() == [False, True, False]
    assert 10**9 <= waited[0] <= time.monotonic_ns() - started
    assert waited[1:].tolist() == [0, 0]
    assert notify.await_counters(addresses, 4, missing, 0, 1, NO_WAKE_UP[0], 7, np.zeros(0, np.int64), 0) == 0


@pytest.mark.parametrize("row_bytes", [16, 112, 128, 144, 1024, 1040])
def test_rows_that_stream_past_the_caches(row_bytes: int) -> None:
    source = np.arange(5 * row_bytes + 1, dtype=np.uint8)[1:]  # unaligned, as a user's view may be
    block = cpu.PrivateBlock(5 * row_bytes)
    windows.copy_rows(block.address, source.ctypes.data, 5, row_bytes, 1)
    assert block.array(0, 5 * row_bytes, np.uint8).tolist() == source.tolist()


def test_unpack_window() -> None:
    source, ids, weights, scales = (
        int32([7]),
        int64([[3]]),
        np.array([[0.5]], np.float32),
        np.array([[2, 4]], np.float32),
    )
    places = int64([0, *(part.ctypes.data for part in (source, ids, weights, scales))])
    results = [
        np.zeros(2, np.int32),
        int64([[8], [9]]),
        np.zeros((2, 1), np.float32),
        np.zeros((2, 2), np.float32),
    ]
    addresses = [result.ctypes.data for result in results[1:]]
    windows.unpack_window(places, 1, len(results[0]), 4, 1, 2, results[0].ctypes.data, *addresses)
    assert results[0][0] == 7
    assert results[1].tolist() == [[3], [-1]]
    assert results[2][0, 0] == 0.5
    assert results[3][0].tolist() == [2, 4]
    source[0] = 8
    windows.unpack_window(places, 1, len(results[0]), 0, 1, 2, results[0].ctypes.data, *addresses)
    assert results[0][0] == 7


def test_pad_ids() -> None:
    ids = int64([[3], [9]])
    windows.pad_ids(ids.ctypes.data, 1, 2, 1)
    assert ids.tolist() == [[3], [-1]]


def test_copy_rows() -> None:
    source, target = np.arange(8, dtype=np.int32), np.zeros(8, np.int32)
    windows.copy_rows(target.ctypes.data, source.ctypes.data, 2, 16, 0)
    assert target.tolist() == source.tolist()


def choose(
    headers: Array, matrix: Array, bytes_per_row: list[int]
) -> tuple[int, list[int], list[int], list[Any]]:
    count = len(headers)
    num_rows, offsets = np.empty(count, np.int64), np.empty(count, np.int64)
    places = np.empty((count, len(bytes_per_row)), np.int64)
    bases = np.full(count, 4096, np.int64)
    wrong = windows.choose_windows(
        headers, matrix, 0, 1, 2, int64(bytes_per_row), bases, num_rows, offsets, places
    )
    return int(wrong), num_rows.tolist(), offsets.tolist(), places.tolist()


def test_choose_windows() -> None:
    headers = int64([[-1, 2, 0, 256, 512, 1024]])
    assert choose(headers, int32([[3]]), [64, 4, 0, 0, 0]) == (
        -1,
        [3],
        [512],
        [[4608, 4864, 4992, 4992, 4992]],
    )
    assert choose(int64([[-1, 1, 0, 256]]), int32([[3]]), [64, 4, 0, 0, 0])[2:] == ([-1], [[0] * 5])
    assert choose(int64([[2, 0, 0, 0]]), int32([[3]]), [64, 4, 0, 0, 0])[0] == 0


@examples(50, deep=500)
@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_windows_of_the_kernel_are_those_of_the_layout(rows: int, words: int, topk: int, scales: int) -> None:
    window = Window(rows, 16 * words, topk, scales)
    needed = max(window.num_bytes, 128)
    bytes_per_row = list(Window(1, 16 * words, topk, scales).sizes)
    _, _, offsets, places = choose(int64([[-1, 1, 256, needed]]), int32([[rows]]), bytes_per_row)
    assert offsets == [256]
    assert [place - 4096 - 256 for place in places[0]] == list(window.offsets)
    assert choose(int64([[-1, 1, 256, needed - 1]]), int32([[rows]]), bytes_per_row)[2] == [-1]


def ring_stack(layers: list[Array], num_rows: int) -> RingStack:
    """Rings of one channel, sent one row at a time; each layer is by peer."""
    stack = int64(layers).reshape(NUM_RING_LAYERS, 1, -1)
    return RingStack(stack, *np.zeros((2, *stack.shape[1:]), np.int64), num_rows, 1, 0, 1)


def test_a_ring_of_two_rows() -> None:
    """The example of `dispatch_through_rings`: one rank that sends two tokens to itself."""
    parts, ring = EntryParts(16, 24, 24, 24, 32, 16, 0, 0), np.zeros(64, np.uint8)
    tail, head = int64([[7]]), int64([[7]])
    x = np.arange(8, dtype=np.int32).reshape(2, 4)
    result_x, source = np.zeros((2, 4), np.int32), np.zeros(2, np.int32)
    bell = int64([0])
    ring_at, tail_at, head_at = (int64([[array.ctypes.data]]) for array in (ring, tail, head))
    values = np.zeros((1, 1), np.int64)
    rings.read_counters(tail_at, values)
    assert values.tolist() == [[7]]
    stack = ring_stack([*(ring_at, tail_at, head_at, values)] * 2, 2)
    no_topk = np.zeros((0, 0), np.int64), np.zeros((0, 0), np.float32)
    unfinished = rings.dispatch_through_rings(
        *plain(
            *(0, 1, 0),
            *(stack, parts, Bells(int64([bell.ctypes.data]), NO_WAKE_UP, 0)),
            Payload(x.ctypes.data, 16, 0, 0, 0, 0, *no_topk, 0),
            RingTokens(np.zeros((1, 1), np.int64), int32([[0], [1]])),
            RingResults(int32([[0, 2]]), int64([result_x.ctypes.data, source.ctypes.data, 0, 0, 0])),
            0,
        )
    )
    assert unfinished == 0
    assert (tail[0, 0], head[0, 0]) == (9, 9)
    assert (stack.sent[0, 0], stack.taken[0, 0]) == (2, 2)
    assert bell[0] > 0
    assert result_x.tolist() == x.tolist()
    assert source.tolist() == [0, 1]


def test_a_token_from_two_rings() -> None:
    """The example of `combine_through_rings`: one token, whose rows came back from two ranks."""
    entries = np.zeros((2, 2, 48), np.uint8)  # ranks, rows, bytes of an entry: 32 of hidden
    entries[0, 0, :32] = np.arange(8, dtype=np.float32).view(np.uint8)
    entries[1, 0, :32] = np.full(8, 10, np.float32).view(np.uint8)
    tails, heads = int64([[8, 3]]), int64([[7, 2]])
    bells = np.zeros(2, np.int64)
    out, zeros = np.zeros((1, 8), np.float32), np.zeros(2, np.int64)
    rows_at = int64([entries[0].ctypes.data, entries[1].ctypes.data])
    tails_at, heads_at = (array.ctypes.data + 8 * np.arange(2) for array in (tails, heads))
    stack = ring_stack([*(zeros,) * 4, rows_at, tails_at, heads_at, int64([7, 2])], 2)
    unfinished = rings.combine_through_rings(
        *plain(
            *(0, 1, 0),
            *(stack, EntryParts(32, 40, 40, 40, 48, 32, 0, 0)),
            Bells(bells.ctypes.data + 8 * np.arange(2), np.repeat(NO_WAKE_UP, 2), 0),
            Outputs(0, 0, zeros, zeros),
            Sums(out.ctypes.data, 0, 0, 8, 32, cpu.FP32, np.zeros((1, 0), np.float32)),
            *(RingSums(np.zeros(1, np.int64), int32([[0, 0]]), np.zeros((2, 2), np.int32)), 0),
        )
    )
    assert unfinished == 0
    assert out.tolist() == [[10 + value for value in range(8)]]
    assert heads.tolist() == [[8, 3]]
    assert stack.taken.tolist() == [[1, 1]]


@numba.njit
def store_then_load(address, value):  # type: ignore[no-untyped-def]
    store_release(address, value)
    return load_acquire(address)


def test_atomics() -> None:
    word = int64([0])
    assert store_then_load(word.ctypes.data, 2**62 + 1) == 2**62 + 1
    assert word[0] == 2**62 + 1


def test_a_backend_is_its_list_of_names() -> None:
    for name in cpu.__all__:
        assert getattr(cpu, name) is not None
