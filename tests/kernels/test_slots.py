"""Every kernel of low-latency slots does what the example in its docstring says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anyep import formats
from anyep.backends.cpu.kernels import slots
from anyep.layout import NOTE_HEADER_BYTES
from anyep.modes.notes import Format
from anyep.sizes import LOW_LATENCY_HEADER_BYTES, LowLatencySizes
from tests.support import low_latency_oracle, oracle
from tests.support.low_latency_cases import through_logfmt

Array = np.ndarray[Any, Any]
UNTOUCHED = 0xAA
HEADER_WORDS = NOTE_HEADER_BYTES // 8
SECOND_OF_TWO = 2 << 32 | 1
"""One row that begins after two others."""


def int32(values: Any) -> Array:
    return np.array(values, np.int32)


def int64(values: Any) -> Array:
    return np.array(values, np.int64)


def flags(values: Any) -> Array:
    return np.array(values, np.bool_)


def addresses(parts: Any) -> Array:
    return int64([part.ctypes.data if isinstance(part, np.ndarray) else part.data_ptr() for part in parts])


def strides(lists: Array) -> Array:
    """From one expert's list to the next one's, for each rank."""
    return np.full(len(lists), lists.strides[1], np.int64)


def some_rows(num_rows: int, hidden: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16()


def bytes_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)


def new_messages(num_messages: int, hidden: int) -> torch.Tensor:
    num_bytes = LowLatencySizes(num_messages, hidden, 1).dispatch_message_bytes
    return torch.full((num_messages, num_bytes), UNTOUCHED, dtype=torch.uint8)


def payload_of(messages: torch.Tensor) -> torch.Tensor:
    return messages[:, LOW_LATENCY_HEADER_BYTES:]


def is_untouched(part: torch.Tensor | Array) -> bool:
    return bool((part == UNTOUCHED).all())


def new_lists(num_readers: int, num_experts: int, length: int) -> Array:
    """The lists of one sender at its readers."""
    return np.full((num_readers, num_experts, length), UNTOUCHED, np.int32)


def new_notes(num_ranks: int, num_experts: int) -> Array:
    return np.full((num_ranks, HEADER_WORDS + num_experts), UNTOUCHED, np.int64)


# What a dispatch sends


def send(x: torch.Tensor, travel: int, topk_idx: Any, num_experts: int, tokens: range) -> torch.Tensor:
    messages = new_messages(len(x), x.shape[1])
    slots.send_tokens(
        tokens.start,
        tokens.stop,
        x.data_ptr(),
        x.shape[1],
        travel,
        int64(topk_idx),
        num_experts,
        messages.data_ptr(),
        messages.stride(0),
    )
    return messages


def test_send_tokens() -> None:
    x = some_rows(2, 128)
    messages = send(x, formats.RAW, [[1], [-1]], 2, range(2))
    assert is_untouched(messages[0, :LOW_LATENCY_HEADER_BYTES])
    assert torch.equal(payload_of(messages)[0], bytes_of(x)[0])
    assert is_untouched(messages[1])


@pytest.mark.parametrize("travel", [formats.FP8, formats.FP8_ROUNDED, formats.FP8_UE8M0])
def test_tokens_that_are_sent_as_fp8(travel: int) -> None:
    hidden = 512
    x = some_rows(2, hidden)
    messages = send(x, travel, [[1], [-1]], 2, range(2))
    data, scales = low_latency_oracle.fp8(x[:1], travel != formats.FP8)
    if travel == formats.FP8_UE8M0:
        scales = low_latency_oracle.ue8m0(scales)
    sent = torch.cat([bytes_of(data), bytes_of(scales)], 1)
    assert torch.equal(payload_of(messages)[:1, : sent.shape[1]], sent)
    assert is_untouched(payload_of(messages)[0, sent.shape[1] :])
    assert is_untouched(messages[:, :LOW_LATENCY_HEADER_BYTES])
    assert is_untouched(messages[1])


def test_only_tokens_of_the_range_that_go_anywhere_are_sent() -> None:
    x = some_rows(5, 8)
    # Token 1 goes to one expert, 2 to none (2 is not below the number of experts), 3 by its last choice.
    messages = send(x, formats.RAW, [[0, 0], [0, -1], [-1, 2], [7, 1], [0, 1]], 2, range(1, 4))
    for token, sent in enumerate([False, True, False, True, False]):
        if sent:
            assert torch.equal(payload_of(messages)[token], bytes_of(x)[token])
        else:
            assert is_untouched(messages[token])


def test_formats_have_the_numbers_of_the_notes() -> None:
    kernels = (formats.RAW, formats.FP8, formats.FP8_ROUNDED, formats.FP8_UE8M0, formats.LOGFMT)
    notes = (Format.BF16, Format.FP8, Format.FP8_ROUNDED, Format.FP8_UE8M0, Format.LOGFMT)
    assert kernels == notes


def list_tokens(topk_idx: Any, num_readers: int, num_experts: int, masked: Any) -> tuple[Array, Array, Array]:
    local_experts = num_experts // num_readers
    lists = new_lists(num_readers, local_experts, 4)
    notes = new_notes(num_readers, local_experts)
    counts = np.full(num_experts, -9, np.int64)
    slots.list_tokens(
        int64(topk_idx), addresses(lists), strides(lists), addresses(notes), flags(masked), counts
    )
    assert is_untouched(notes[:, :HEADER_WORDS])
    return lists, notes[:, HEADER_WORDS:], counts


def test_list_tokens() -> None:
    lists, ranges, counts = list_tokens([[1, 0], [-1, 1]], 2, 2, [0, 0])
    assert lists[0, 0, 0] == 0
    assert lists[1, 0, :2].tolist() == [0, 1]
    assert is_untouched(lists[0, 0, 1:])
    assert is_untouched(lists[1, 0, 2:])
    assert ranges.tolist() == [[1], [2]]
    assert counts.tolist() == [1, 2]


def test_a_token_that_chose_an_expert_twice_is_listed_once() -> None:
    # Also with another expert between; and token 2 is not taken for the one before it.
    lists, ranges, counts = list_tokens([[0, 0, 1], [1, 0, 1], [1, 1, 1]], 1, 2, [0])
    assert lists[0, 0, :2].tolist() == [0, 1]
    assert lists[0, 1, :3].tolist() == [0, 1, 2]
    assert is_untouched(lists[0, 0, 2:])
    assert is_untouched(lists[0, 1, 3:])
    assert ranges.tolist() == [[2, 3]]
    assert counts.tolist() == [2, 3]


def test_lists_of_several_experts_per_reader() -> None:
    lists, ranges, counts = list_tokens([[3, 0], [2, 4], [3, -1]], 2, 4, [0, 0])
    assert lists[0, 0, 0] == 0
    assert lists[1, 0, 0] == 1
    assert lists[1, 1, :2].tolist() == [0, 2]
    assert is_untouched(lists[0, 1])
    assert ranges.tolist() == [[1, 0], [1, 2]]
    assert counts.tolist() == [1, 0, 1, 2]


def test_nothing_is_left_for_a_masked_reader() -> None:
    lists, ranges, counts = list_tokens([[1, 0], [-1, 1]], 2, 2, [0, 1])
    assert lists[0, 0, 0] == 0
    assert is_untouched(lists[1])
    assert is_untouched(ranges[1])
    assert ranges[0].tolist() == [1]
    assert counts.tolist() == [1, 0]


# Notes


def test_post_notes() -> None:
    notes = new_notes(2, 1)
    alarms = int64([7 << 32 | 3, 8 << 32 | 3])
    slots.post_notes(addresses(notes), flags([0, 0]), addresses(alarms.reshape(2, 1)), 7, int64([7, 0, 4]))
    for note in notes:
        assert note[:3].tolist() == [7, 0, 4]
        assert is_untouched(note[3:])
    assert alarms.tolist() == [7 << 32 | 2, 8 << 32 | 3]


def test_a_masked_reader_gets_no_note() -> None:
    notes = new_notes(2, 1)
    alarms = int64([7 << 32 | 3, 7 << 32 | 3])
    slots.post_notes(addresses(notes), flags([1, 0]), addresses(alarms.reshape(2, 1)), 7, int64([7, 0, 4]))
    assert is_untouched(notes[0])
    assert notes[1, :3].tolist() == [7, 0, 4]
    assert alarms.tolist() == [7 << 32 | 3, 7 << 32 | 2]


def notes_with(headers: Any, ranges: Any) -> Array:
    notes = new_notes(len(headers), len(ranges[0]))
    notes[:, : len(headers[0])] = headers
    notes[:, HEADER_WORDS:] = ranges
    return notes


def test_read_notes() -> None:
    notes = notes_with([[7, 0, 4], [7, 0, 5]], [[1], [1]])
    headers, ranges = np.empty((2, 3), np.int64), np.empty((2, 1), np.int64)

    def read(first: int, end: int) -> int:
        headers[:] = ranges[:] = -9
        return int(
            slots.read_notes(addresses(notes), flags([0, 0]), int64([7, 0, 4]), first, end, headers, ranges)
        )

    assert read(1, 2) == 2
    # What disagrees is read, too: somebody must tell it.
    assert read(1, 3) == -1
    assert headers.tolist() == [[7, 0, 4], [7, 0, 5]]
    assert ranges.tolist() == [[1], [1]]


def test_rows_are_counted_by_the_low_bits_of_the_ranges() -> None:
    notes = notes_with([[7], [7]], [[2, 1], [SECOND_OF_TWO, 5 << 32]])
    headers, ranges = np.empty((2, 1), np.int64), np.empty((2, 2), np.int64)
    arguments = (addresses(notes), flags([0, 0]), int64([7]), 0, 1, headers, ranges)
    assert slots.read_notes(*arguments) == 4
    assert ranges.tolist() == [[2, 1], [SECOND_OF_TWO, 5 << 32]]


def test_a_masked_sender_is_not_asked() -> None:
    notes = notes_with([[7, 0, 4], [3, 1, 9]], [[2], [5]])
    headers, ranges = np.full((2, 3), -9, np.int64), np.full((2, 1), -9, np.int64)
    own = int64([7, 0, 4])
    assert slots.read_notes(addresses(notes), flags([0, 1]), own, 1, 3, headers, ranges) == 2
    assert headers.tolist() == [[7, 0, 4], [0, 0, 0]]
    assert ranges.tolist() == [[2], [0]]


# What a dispatch receives


class Packed:
    """The results of `pack_tokens` for 2 senders, each of which has as many messages as `sent` has rows."""

    def __init__(
        self,
        ranges: Any,
        tokens: dict[tuple[int, int], list[int]],
        sent: list[torch.Tensor],
        num_scale_words: int = 0,
        streaming: bool = False,
        experts: range | None = None,
        rows_per_expert: int = 8,
        with_stats: bool = True,
    ) -> None:
        num_experts = len(ranges[0])
        messages = [new_messages(len(rows), 512) for rows in sent]
        for message, rows in zip(messages, sent, strict=True):
            payload_of(message)[:, : rows.shape[1]] = rows
        lists = new_lists(2, num_experts, 8)
        for (sender, expert), listed in tokens.items():
            lists[sender, expert, : len(listed)] = listed
        row_bytes = sent[0].shape[1] - 4 * num_scale_words
        self.x = torch.full((num_experts, rows_per_expert, row_bytes), UNTOUCHED, dtype=torch.uint8)
        self.scales = torch.full((num_experts, num_scale_words, rows_per_expert), UNTOUCHED).int()
        self.src_info = np.full((num_experts, rows_per_expert), UNTOUCHED, np.int32)
        self.layout_range = np.full((num_experts, 2), UNTOUCHED, np.int64)
        self.counts = np.full(num_experts, UNTOUCHED, np.int32)
        self.stats = np.full(num_experts if with_stats else 0, 10, np.int32)
        experts = range(num_experts) if experts is None else experts
        slots.pack_tokens(
            experts.start,
            experts.stop,
            int64(ranges),
            addresses(lists),
            strides(lists),
            addresses(messages),
            messages[0].stride(0),
            row_bytes,
            num_scale_words,
            int(streaming),
            self.x.data_ptr(),
            self.scales.data_ptr(),
            self.src_info,
            self.layout_range,
            self.counts,
            self.stats,
        )


def sent_bytes(num_bytes: int) -> list[torch.Tensor]:
    """Of 2 senders, 4 messages each."""
    generator = torch.Generator().manual_seed(5)
    shape = (4, num_bytes)
    return [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for _ in range(2)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("row_bytes", [16, 128, 144, 1024])
def test_pack_tokens(row_bytes: int, streaming: bool) -> None:
    sent = sent_bytes(row_bytes)
    packed = Packed([[2], [1]], {(0, 0): [0, 3], (1, 0): [1]}, sent, streaming=streaming)
    assert torch.equal(packed.x[0, :3], torch.stack([sent[0][0], sent[0][3], sent[1][1]]))
    assert is_untouched(packed.x[0, 3:])
    assert packed.src_info[0, :3].tolist() == [0, 3, 1]
    assert is_untouched(packed.src_info[0, 3:])
    assert packed.layout_range.tolist() == [[2, SECOND_OF_TWO]]
    assert packed.counts.tolist() == [3]
    assert packed.stats.tolist() == [13]


def test_packing_without_stats() -> None:
    packed = Packed([[2], [1]], {(0, 0): [0, 3], (1, 0): [1]}, sent_bytes(16), with_stats=False)
    assert packed.counts.tolist() == [3]


def test_only_the_experts_of_the_range_are_packed() -> None:
    sent = sent_bytes(16)
    tokens = {(0, 0): [0], (0, 1): [1, 2], (1, 1): [3], (1, 2): [0, 1, 2, 3]}
    packed = Packed([[1, 2, 0], [0, 1, 4]], tokens, sent, experts=range(1, 3))
    assert is_untouched(packed.x[0])
    assert is_untouched(packed.src_info[0])
    assert torch.equal(packed.x[1, :3], torch.stack([sent[0][1], sent[0][2], sent[1][3]]))
    assert torch.equal(packed.x[2, :4], sent[1])
    assert packed.layout_range.tolist() == [[UNTOUCHED] * 2, [2, SECOND_OF_TWO], [0, 4]]
    assert packed.counts.tolist() == [UNTOUCHED, 3, 4]
    assert packed.stats.tolist() == [10, 13, 14]


def test_a_sender_that_is_masked_has_no_rows() -> None:
    """`read_notes` gives the range 0 for it."""
    sent = sent_bytes(16)
    packed = Packed([[0], [1]], {(1, 0): [1]}, sent)
    assert torch.equal(packed.x[0, 0], sent[1][1])
    assert packed.layout_range.tolist() == [[0, 1]]
    assert packed.counts.tolist() == [1]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("travel", [formats.FP8, formats.FP8_UE8M0])
def test_scales_go_to_columns(travel: int, streaming: bool) -> None:
    """As float32 4 words for 512 channels, as UE8M0 one word of 4 exponents."""
    x = some_rows(8, 512)
    data, scales = low_latency_oracle.fp8(x, travel == formats.FP8_UE8M0)
    if travel == formats.FP8_UE8M0:
        scales = low_latency_oracle.ue8m0(scales)
    num_words = scales.shape[1]
    assert num_words == (1 if travel == formats.FP8_UE8M0 else 4)
    messages = torch.cat([bytes_of(data), bytes_of(scales)], 1)
    tokens = {(0, 0): [2], (0, 1): [0, 3], (1, 1): [1]}
    packed = Packed(
        [[1, 2], [0, 1]], tokens, [messages[:4], messages[4:]], num_words, streaming, rows_per_expert=8
    )
    words = bytes_of(scales).view(torch.int32)
    # The first expert's row is token 2 of sender 0; sender 1's token 1 is row 4 + 1 of x.
    for expert, rows in enumerate([[2], [0, 3, 5]]):
        assert torch.equal(packed.x[expert, : len(rows)], bytes_of(data)[rows])
        for word in range(num_words):
            column = packed.scales.view(-1)[(expert * num_words + word) * 8 :][:8]
            assert column[: len(rows)].tolist() == words[rows, word].tolist()
            assert is_untouched(column[len(rows) :])


# What a combine returns


def test_count_rows() -> None:
    def count(ranges: Any, tokens: Any) -> int:
        src_info = np.full((len(ranges), 8), UNTOUCHED, np.int32)
        for expert, listed in enumerate(tokens):
            src_info[expert, : len(listed)] = listed
        return int(slots.count_rows(int64(ranges), src_info, 4))

    two_senders = [[2, SECOND_OF_TWO]]
    assert count(two_senders, [[0, 3, 1]]) == 3
    assert count(two_senders, [[3, 0, 1]]) == -3
    assert count(two_senders, [[0, 0, 1]]) == -3
    assert count(two_senders, [[-1, 3, 1]]) == -3
    assert count(two_senders, [[0, 4, 1]]) == -3
    assert count([[2, 1 << 32 | 1]], [[0, 3, 1]]) == -1
    assert count([[2, 3 << 32 | 1]], [[0, 3, 1]]) == -1
    assert count([[1 << 32 | 2, 3 << 32]], [[0, 3, 1]]) == -1
    assert count([[-1 << 32 | 2, 1]], [[0, 3, 1]]) == -1
    assert count([[5, 5 << 32]], [[0, 1, 2, 3, 4]]) == -2
    assert count([[2, 2 << 32 | 0xFFFFFFFF]], [[0, 3]]) == -2
    assert count([[4, 4 << 32 | 4]], [[0, 1, 2, 3, 0, 1, 2, 3]]) == 8
    assert count([[0, 0]], [[]]) == 0
    assert count([[2, SECOND_OF_TWO], [0, 1]], [[0, 3, 1], [2]]) == 4
    assert count([[2, SECOND_OF_TWO], [3 << 32, 3 << 32 | 1]], [[0, 3, 1], [0, 1, 2, 2]]) == -1


def stage(
    x: torch.Tensor,
    ranges: Any,
    use_logfmt: bool = False,
    streaming: bool = False,
    experts: range | None = None,
) -> torch.Tensor:
    num_experts, rows_per_expert, hidden = x.shape
    messages = new_messages(num_experts * rows_per_expert, hidden)
    experts = range(num_experts) if experts is None else experts
    slots.stage_rows(
        experts.start,
        experts.stop,
        x.data_ptr(),
        hidden,
        int64(ranges),
        rows_per_expert,
        int(use_logfmt),
        int(streaming),
        messages.data_ptr(),
        messages.stride(0),
    )
    return messages


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("hidden", [16, 64, 72, 512])
def test_stage_rows(hidden: int, streaming: bool) -> None:
    x = some_rows(4, hidden).view(1, 4, hidden)
    messages = stage(x, [[2, SECOND_OF_TWO]], streaming=streaming)
    assert torch.equal(payload_of(messages)[:3], bytes_of(x)[0, :3])
    assert is_untouched(messages[:, :LOW_LATENCY_HEADER_BYTES])
    assert is_untouched(messages[3])


def test_only_the_experts_of_the_range_are_staged() -> None:
    x = some_rows(12, 16).view(3, 4, 16)
    messages = stage(x, [[1, 1 << 32], [0, 2], [4, 4 << 32]], experts=range(1, 3))
    assert is_untouched(messages[:4])
    assert torch.equal(payload_of(messages)[4:6], bytes_of(x)[1, :2])
    assert is_untouched(messages[6:8])
    assert torch.equal(payload_of(messages)[8:], bytes_of(x)[2])


def test_rows_that_are_staged_as_logfmt() -> None:
    """The message of `casts.encode_logfmt_rows`: it has no header, and may be shorter than the rows."""
    first, second = torch.zeros(128), torch.full((128,), 2.0)
    first[:3] = torch.tensor([0.5, -0.125, 0.25])
    x = torch.zeros(1, 3, 256, dtype=torch.bfloat16)
    x[0, 1] = torch.cat([first, second]).bfloat16()
    messages = stage(x, [[2]], use_logfmt=True)
    message = messages[1]
    assert message[:16].tolist() == [1, *[0] * 15]
    assert message[16:20].tolist() == [0x00, 0x3F, 0x00, 0x3E]
    assert message[20:24].tolist() == [0xFF, 0x01, 0x00, 0x00]
    assert message[148:152].tolist() == [0x01, 0x02, 0x01, 0x00]
    assert torch.equal(message[180:436], bytes_of(second.bfloat16()))
    assert is_untouched(message[436:])
    assert messages[0, :16].tolist() == [3, *[0] * 15]
    assert is_untouched(messages[2])


def list_returns(masked: Any) -> tuple[Array, Array]:
    lists, notes = new_lists(2, 1, 4), new_notes(2, 1)
    slots.list_returns(
        int32([[0, 3, 1]]),
        int64([[2, SECOND_OF_TWO]]),
        addresses(lists),
        strides(lists),
        addresses(notes),
        flags(masked),
    )
    assert is_untouched(notes[:, :HEADER_WORDS])
    return lists[:, 0], notes[:, HEADER_WORDS:]


def test_list_returns() -> None:
    lists, ranges = list_returns([0, 0])
    assert lists[0, :2].tolist() == [0, 3]
    assert lists[1, :1].tolist() == [1]
    assert is_untouched(lists[0, 2:])
    assert is_untouched(lists[1, 1:])
    assert ranges.tolist() == [[2], [SECOND_OF_TWO]]


def test_nothing_is_returned_to_a_masked_reader() -> None:
    lists, ranges = list_returns([1, 0])
    assert is_untouched(lists[0])
    assert is_untouched(ranges[0])
    assert lists[1, :1].tolist() == [1]
    assert ranges[1].tolist() == [SECOND_OF_TWO]


def test_returns_of_several_experts() -> None:
    lists, notes = new_lists(2, 2, 4), new_notes(2, 2)
    slots.list_returns(
        int32([[0, 3, 1], [2, 0, 1]]),
        int64([[2, SECOND_OF_TWO], [0, 3]]),
        addresses(lists),
        strides(lists),
        addresses(notes),
        flags([0, 0]),
    )
    assert notes[:, HEADER_WORDS:].tolist() == [[2, 0], [SECOND_OF_TWO, 3]]
    assert lists[0, 0, :2].tolist() == [0, 3]
    assert lists[1, 1, :3].tolist() == [2, 0, 1]
    assert is_untouched(lists[0, 1])


# What a combine adds up


class Returned:
    """Rows that came back from 2 ranks, 1 expert on each: `tokens[r]` of them, from row `begins[r]` on."""

    def __init__(self, rows: list[torch.Tensor], tokens: Any, begins: Any = (0, 0), logfmt: bool = False):
        self.hidden = rows[0].shape[1]
        self.logfmt = logfmt
        self.messages = [stage(part.view(1, *part.shape), [[len(part)]], use_logfmt=logfmt) for part in rows]
        self.lists = new_lists(2, 1, 8)
        for rank, listed in enumerate(tokens):
            self.lists[rank, 0, : len(listed)] = listed
        self.ranges = int64(
            [[begin << 32 | len(listed)] for begin, listed in zip(begins, tokens, strict=True)]
        )

    def sum(
        self, topk_idx: Any, weights: Any, masked: Any = (0, 0), tokens: range | None = None
    ) -> tuple[torch.Tensor, int]:
        out = torch.full((len(topk_idx), self.hidden), UNTOUCHED, dtype=torch.bfloat16)
        tokens = range(len(topk_idx)) if tokens is None else tokens
        missing = slots.sum_tokens(
            tokens.start,
            tokens.stop,
            int64(topk_idx),
            np.array(weights, np.float32),
            self.ranges,
            addresses(self.lists),
            strides(self.lists),
            addresses(self.messages),
            self.messages[0].stride(0),
            8,
            flags(masked),
            int(self.logfmt),
            out.data_ptr(),
            self.hidden,
        )
        return out, int(missing)


def ones(num_rows: int, value: float = 1.0, hidden: int = 8) -> torch.Tensor:
    return torch.full((num_rows, hidden), value, dtype=torch.bfloat16)


def test_sum_tokens() -> None:
    returned = Returned([ones(1), ones(1, 4.0)], [[0], [0]])
    out, missing = returned.sum([[1, 0]], [[0.5, 2.0]])
    assert out.tolist() == [[4.0] * 8]
    assert missing == -1


def test_experts_that_are_none_or_masked_are_skipped() -> None:
    # Rank 1 is masked: its list and its messages are not looked at.
    returned = Returned([ones(2), ones(1, 4.0)], [[0, 1], []])
    out, missing = returned.sum([[1, 0], [-1, 0], [2, -1]], [[9.0, 2.0], [9.0, 3.0], [9.0, 9.0]], [0, 1])
    assert out.tolist() == [[2.0] * 8, [3.0] * 8, [0.0] * 8]
    assert missing == -1


def test_a_token_that_chose_an_expert_twice_has_one_row_for_both() -> None:
    returned = Returned([torch.cat([ones(1, 3.0), ones(1, 5.0)]), ones(1, 7.0)], [[0, 1], [0]])
    out, missing = returned.sum([[0, 1, 0], [0, 0, -1]], [[1.0, 1.0, 2.0], [1.0, 10.0, 9.0]])
    assert out.tolist() == [[16.0] * 8, [55.0] * 8]
    assert missing == -1


def test_a_row_that_is_missing_is_reported() -> None:
    rows = [ones(2), ones(2)]
    right = [[0, 1], [-1, 1], [0, -1]]
    weights = [[1.0, 1.0]] * 3
    assert Returned(rows, [[0, 2], [0, 1]]).sum(right, weights)[1] == -1
    # Token 1 is not in the list of expert 1 at all, or the list is at its end before.
    assert Returned(rows, [[0, 2], [0, 2]]).sum(right, weights)[1] == 1 * 2 + 1
    assert Returned(rows, [[0, 2], [0]]).sum(right, weights)[1] == 1 * 2 + 1
    assert Returned(rows, [[1, 2], [0, 1]]).sum(right, weights)[1] == 0
    assert Returned(rows, [[], [0, 1]]).sum(right, weights)[1] == 0
    # What the list has and nobody asks for is passed over.
    assert Returned(rows, [[0, 2], [0, 1]]).sum([[-1, -1], [1, -1], [0, -1]], weights)[1] == -1


def test_rows_begin_where_the_range_says_and_a_part_of_the_tokens_is_summed() -> None:
    values = torch.arange(8.0).view(8, 1).expand(8, 8).bfloat16()
    returned = Returned([values, 10 * values], [[0, 1, 2], [1, 2]], begins=[2, 5])
    out, missing = returned.sum([[0, -1], [1, 0], [0, 1]], [[1.0, 1.0]] * 3, tokens=range(1, 3))
    assert missing == -1
    assert is_untouched(out[0].float())
    # Rows 3 and 4 of rank 0, rows 5 and 6 of rank 1.
    assert out[1:].tolist() == [[53.0] * 8, [64.0] * 8]


def test_sums_of_several_experts_per_rank() -> None:
    """Expert e of rank r has its list `list_stride` after that of e - 1, and its rows 8 messages further."""
    x = torch.arange(16.0).view(2, 8, 1).expand(2, 8, 8).bfloat16().contiguous()
    messages = stage(x, [[8], [8]])
    lists = new_lists(1, 2, 4)
    lists[0, 0, :2], lists[0, 1, :1] = [0, 1], [1]
    out = torch.empty(2, 8, dtype=torch.bfloat16)
    missing = slots.sum_tokens(
        0,
        2,
        int64([[0, -1], [1, 0]]),
        np.ones((2, 2), np.float32),
        int64([[2, 3 << 32 | 1]]),
        addresses(lists),
        strides(lists),
        addresses([messages]),
        messages.stride(0),
        8,
        flags([0]),
        0,
        out.data_ptr(),
        8,
    )
    assert missing == -1
    assert out.tolist() == [[0.0] * 8, [12.0] * 8]  # row 3 of expert 1 is 8 + 3, and row 1 of expert 0


@pytest.mark.parametrize("logfmt", [False, True])
@pytest.mark.parametrize("hidden", [128, 1024, 1152, 8448])
def test_products_and_sums_are_rounded_in_top_k_order(hidden: int, logfmt: bool) -> None:
    """Blocks of LogFMT that are encoded and others, in rows longer than what is summed at once."""
    first, second = some_rows(3, hidden, seed=1), some_rows(3, hidden, seed=2)
    first[:, :128] *= 0.01
    second[:, -128:] *= 0.01
    weights = torch.rand(3, 3, generator=torch.Generator().manual_seed(3)) * 3
    topk_idx = torch.tensor([[1, 0, 0], [0, 1, -1], [1, -1, 1]])
    out, missing = Returned([first, second], [[0, 1], [0, 1, 2]], logfmt=logfmt).sum(
        topk_idx.tolist(), weights.tolist()
    )
    assert missing == -1
    outputs = [through_logfmt(rows) if logfmt else rows for rows in (first[:2], second)]
    sources = [
        low_latency_oracle.ExpertRows(rows, torch.zeros(len(rows)), torch.arange(len(rows)))
        for rows in outputs
    ]
    given = low_latency_oracle.RankInput(first, topk_idx, weights)
    assert oracle.same_bits(out, low_latency_oracle.combine(given, 0, outputs, sources))


@pytest.mark.parametrize("logfmt", [False, True])
def test_a_sum_begins_with_plus_zero(logfmt: bool) -> None:
    returned = Returned([ones(1, -0.0, 128), ones(1, -0.0, 128)], [[0], []], logfmt=logfmt)
    out, missing = returned.sum([[0], [-1]], [[1.0], [1.0]])
    assert missing == -1
    assert not torch.signbit(out.float()).any()


# Masks
