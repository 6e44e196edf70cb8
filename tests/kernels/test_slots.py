"""What only the CPU's kernels of low-latency slots do; `tests/support/checks/slots.py` has the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anyep.backends.cpu.kernels import slots
from anyep.core import formats
from anyep.core.records import Format
from tests.support.arrays import Array, flags, int64
from tests.support.checks.slots import (
    GUARD,
    RECORD_WORDS,
    SECOND_OF_TWO,
    Numba,
    Pack,
    Return,
    Returned,
    Send,
    assert_all_same,
    assert_same,
    handle_of,
    routing,
    words,
)


def addresses(parts: Array) -> Array:
    return int64([part.ctypes.data for part in parts])


def is_untouched(part: Array) -> bool:
    return bool((part == GUARD).all())


def new_record(num_ranks: int, num_experts: int) -> Array:
    return np.full((num_ranks, RECORD_WORDS + num_experts), GUARD, np.int64)


def test_formats_have_the_numbers_of_the_record() -> None:
    kernels = (formats.RAW, formats.FP8, formats.FP8_ROUNDED, formats.FP8_UE8M0, formats.LOGFMT)
    records = (Format.BF16, Format.FP8, Format.FP8_ROUNDED, Format.FP8_UE8M0, Format.LOGFMT)
    assert kernels == records


# A kernel may be asked for a part.


def test_only_tokens_of_the_range_are_sent() -> None:
    # Token 2 goes nowhere: 2 and 7 are no experts here.
    call = Send(words([[0, 0], [0, -1], [-1, 2], [7, 1], [0, 1]]), 1, 8, formats.RAW, [0, 0])
    right = call.right()
    assert [bool((message != GUARD).any()) for message in right.messages[:5]] == [
        True,
        True,
        False,
        True,
        True,
    ]
    right.messages[[0, 4]] = GUARD
    assert_all_same(Numba().send(call, range(1, 4)), right)


def test_only_experts_of_the_range_are_packed() -> None:
    lists = torch.arange(24, dtype=torch.int32).view(2, 3, 4) % 5
    call = Pack(words([[1, 2, 0], [0, 1, 4]]), lists, 4, 16)
    right = call.right()
    for part, before in zip(right, call.untouched(), strict=True):
        part[[0, 2]] = before[[0, 2]]
    assert_all_same(Numba().pack(call, range(1, 2)), right)


def test_only_experts_of_the_range_are_staged() -> None:
    call = Return(*handle_of([[2, 1], [0, 3], [4, 0]], 4), 16, False, [0, 0])
    right = call.right()
    right.messages[:8] = GUARD
    right.messages[16:] = GUARD
    assert_all_same(Numba().give_back(call, range(1, 2)), right)


def test_only_tokens_of_the_range_are_summed() -> None:
    returned = Returned(routing(7, 2, 4, 1), 2, 2, 8, False)
    # One that is no expert.
    returned.ids[3, 0] = 4
    right, _ = returned.right([0, 0])
    for token in (0, 1, 5, 6):
        right[token] = returned.untouched()[token]
    ours, missing = Numba().add_up(returned, [0, 0], range(2, 5))
    assert missing == -1
    assert_same(ours, right)


# Completion records


def test_post_record() -> None:
    records = new_record(2, 1)
    wake_ups = int64([7 << 32 | 3, 8 << 32 | 3])
    slots.post_records(
        addresses(records), flags([0, 0]), addresses(wake_ups.reshape(2, 1)), 7, int64([7, 0, 4])
    )
    for record in records:
        assert record[:3].tolist() == [7, 0, 4]
        assert is_untouched(record[3:])
    assert wake_ups.tolist() == [7 << 32 | 2, 8 << 32 | 3]


def test_a_masked_reader_gets_no_record() -> None:
    records = new_record(2, 1)
    wake_ups = int64([7 << 32 | 3, 7 << 32 | 3])
    slots.post_records(
        addresses(records), flags([1, 0]), addresses(wake_ups.reshape(2, 1)), 7, int64([7, 0, 4])
    )
    assert is_untouched(records[0])
    assert records[1, :3].tolist() == [7, 0, 4]
    assert wake_ups.tolist() == [7 << 32 | 3, 7 << 32 | 2]


def record_with(headers: Any, ranges: Any) -> Array:
    records = new_record(len(headers), len(ranges[0]))
    records[:, : len(headers[0])] = headers
    records[:, RECORD_WORDS:] = ranges
    return records


def test_read_record() -> None:
    records = record_with([[7, 0, 4], [7, 0, 5]], [[1], [1]])
    headers, ranges = np.empty((2, 3), np.int64), np.empty((2, 1), np.int64)

    def read(first: int, end: int) -> int:
        headers[:] = ranges[:] = -9
        return int(
            slots.read_records(
                addresses(records), flags([0, 0]), int64([7, 0, 4]), first, end, headers, ranges
            )
        )

    assert read(1, 2) == 2
    # What disagrees is read, too: somebody must tell it.
    assert read(1, 3) == -1
    assert headers.tolist() == [[7, 0, 4], [7, 0, 5]]
    assert ranges.tolist() == [[1], [1]]


def test_rows_are_counted_by_the_low_bits_of_the_ranges() -> None:
    records = record_with([[7], [7]], [[2, 1], [SECOND_OF_TWO, 5 << 32]])
    headers, ranges = np.empty((2, 1), np.int64), np.empty((2, 2), np.int64)
    arguments = (addresses(records), flags([0, 0]), int64([7]), 0, 1, headers, ranges)
    assert slots.read_records(*arguments) == 4
    assert ranges.tolist() == [[2, 1], [SECOND_OF_TWO, 5 << 32]]


def test_a_masked_sender_is_not_asked() -> None:
    records = record_with([[7, 0, 4], [3, 1, 9]], [[2], [5]])
    headers, ranges = np.full((2, 3), -9, np.int64), np.full((2, 1), -9, np.int64)
    own = int64([7, 0, 4])
    assert slots.read_records(addresses(records), flags([0, 1]), own, 1, 3, headers, ranges) == 2
    assert headers.tolist() == [[7, 0, 4], [0, 0, 0]]
    assert ranges.tolist() == [[2], [0]]
