"""The GPU's low-latency kernels beside the CPU's, bit for bit: in Triton's interpreter ("cpu"), or on a GPU.

Every kernel gets the same memory on both sides, filled with a guard: what it does not write is compared, too.
On a GPU there are more tokens, for the interpreter is slow.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from anyep import formats
from anyep.backends.cpu.kernels import slots as cpu
from anyep.layout import NOTE_HEADER_BYTES
from anyep.sizes import LOW_LATENCY_HEADER_BYTES, LowLatencySizes
from tests.cast_checks import cpu_encode, rows_of_blocks

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")
casts = importlib.import_module("anyep.backends.cuda.kernels.casts")
gpu = importlib.import_module("anyep.backends.cuda.kernels.slots")

GUARD = 0x5A
NOTE_WORDS = NOTE_HEADER_BYTES // 8
SECOND_OF_TWO = 2 << 32 | 1
"""One row that begins after two others."""
DIFFERENT = 2
FP8_FORMATS = (formats.FP8, formats.FP8_ROUNDED, formats.FP8_UE8M0)
block_of = triton.next_power_of_2


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, GUARD, dtype=dtype)


def addresses(parts: Iterable[torch.Tensor], device: str = "cpu") -> torch.Tensor:
    return torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=device)


def words(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def flags(values: Iterable[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int8, device=device)


def masks(values: Iterable[int]) -> Any:
    return np.array(list(values), np.bool_)


def assert_same(ours: torch.Tensor, right: torch.Tensor) -> None:
    assert torch.equal(ours.cpu().contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def routing(num_tokens: int, num_topk: int, num_experts: int, seed: int) -> torch.Tensor:
    """Choices with repetitions, and with some that are no experts."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, num_experts, (num_tokens, num_topk))
    none = random.choice([-1, -7, num_experts, num_experts + 3, 2**40], ids.shape)
    return torch.from_numpy(np.where(random.random(ids.shape) < 0.25, none, ids))


def rows_of(seed: int, num_rows: int, hidden: int) -> torch.Tensor:
    """Rows of bf16 as their bits (uint16), with blocks of kinds that hurt."""
    num_blocks = -(-hidden // formats.CHANNELS_PER_BLOCK)
    rows = rows_of_blocks(seed, num_rows, num_blocks)[:, :hidden]
    return torch.from_numpy(np.ascontiguousarray(rows))


def message_bytes_of(hidden: int) -> int:
    return LowLatencySizes(1, hidden, 1).dispatch_message_bytes


# What a dispatch sends


def compare_send(ids: torch.Tensor, num_experts: int, hidden: int, travel: int, device: str) -> torch.Tensor:
    num_tokens, num_topk = ids.shape
    x = rows_of(num_tokens, num_tokens, hidden)
    right = guarded((num_tokens + 1, message_bytes_of(hidden)), torch.uint8)
    ours = right.to(device, copy=True)
    cpu.send_tokens(
        0,
        num_tokens,
        x.data_ptr(),
        hidden,
        travel,
        ids.numpy(),
        num_experts,
        right.data_ptr(),
        right.stride(0),
    )
    tile_blocks = 4
    gpu.send_tokens[(num_tokens, triton.cdiv(hidden, tile_blocks * formats.CHANNELS_PER_BLOCK))](
        x.to(device),
        hidden,
        ids.to(device),
        num_experts,
        ours,
        ours.stride(0),
        TRAVEL=travel,
        NUM_TOPK=num_topk,
        SLOT_BLOCK=block_of(num_topk),
        TILE_BLOCKS=tile_blocks,
        **casts.OPTIONS,
    )
    assert_same(ours, right)
    return ours.cpu()


def check_send_tokens(device: str) -> None:
    messages = compare_send(words([[1], [-1]]), 2, 128, formats.RAW, device)
    assert (messages[0, :LOW_LATENCY_HEADER_BYTES] == GUARD).all()
    assert_same(messages[0, LOW_LATENCY_HEADER_BYTES:], rows_of(2, 2, 128)[0])
    assert (messages[1] == GUARD).all()
    # Of these only the third goes anywhere.
    nowhere = words([[2, -1], [2**40, -7], [5, 1], [-1, -1]])
    for travel in (formats.RAW, *FP8_FORMATS):
        messages = compare_send(nowhere, 2, 512, travel, device)
        assert (messages[[0, 1, 3]] == GUARD).all()
        assert not (messages[2] == GUARD).all()
    num_tokens = 6 if device == "cpu" else 200
    for hidden in (8, 72, 768, 1152):
        compare_send(routing(num_tokens, 3, 6, hidden), 6, hidden, formats.RAW, device)
    for travel in FP8_FORMATS:
        for hidden in (512, 1536):
            compare_send(routing(num_tokens, 2, 4, hidden), 4, hidden, travel, device)
    compare_send(words([[]]).view(0, 1), 4, 128, formats.RAW, device)


def compare_list_tokens(
    ids: torch.Tensor, local_experts: int, masked: list[int], device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_readers, (num_tokens, num_topk) = len(masked), ids.shape
    lists = guarded((num_readers, local_experts, num_tokens + 3), torch.int32)
    notes = guarded((num_readers, NOTE_WORDS + local_experts), torch.int64)
    counts = guarded((num_readers * local_experts,), torch.int64)
    there = [part.to(device, copy=True) for part in (lists, notes, counts)]
    stride = 4 * lists.stride(1)
    cpu.list_tokens(
        ids.numpy(),
        addresses(lists).numpy(),
        stride,
        addresses(notes).numpy(),
        masks(masked),
        counts.numpy(),
    )
    gpu.list_tokens[(len(counts),)](
        ids.to(device),
        addresses(there[0], device),
        stride,
        addresses(there[1], device),
        flags(masked, device),
        there[2],
        num_tokens,
        local_experts,
        NUM_TOPK=num_topk,
        SLOT_BLOCK=block_of(num_topk),
        TILE_TOKENS=16,
    )
    for ours, right in zip(there, (lists, notes, counts), strict=True):
        assert_same(ours, right)
    return there[0].cpu(), there[1].cpu()[:, NOTE_WORDS:], there[2].cpu()


def check_list_tokens(device: str) -> None:
    lists, ranges, counts = compare_list_tokens(words([[1, 0], [-1, 1]]), 1, [0, 0], device)
    assert lists[0, 0, :1].tolist() == [0]
    assert lists[1, 0, :2].tolist() == [0, 1]
    assert ranges.tolist() == [[1], [2]]
    assert counts.tolist() == [1, 2]
    sizes = [(37, 3, 2), (16, 8, 1), (1, 1, 3), (0, 2, 2)]
    for seed, (num_tokens, num_topk, local_experts) in enumerate(
        sizes if device == "cpu" else [*sizes, (999, 8, 32)]
    ):
        for masked in ([0, 0, 0], [0, 1, 0], [1, 1, 1]):
            ids = routing(num_tokens, num_topk, len(masked) * local_experts, seed)
            compare_list_tokens(ids, local_experts, masked, device)


# Notes


def check_post_notes(device: str) -> None:
    for num_ranks, header, masked in (
        (2, [7, 0, 4], [0, 0]),
        (2, [7, 0, 4], [1, 0]),
        (3, [2**40, 1, -2, 3, 4, 5, 6, 7], [0, 0, 1]),
        (1, [1], [0]),
    ):
        notes = guarded((num_ranks, NOTE_WORDS + 2), torch.int64)
        # Numbers only grow: the one before is smaller.
        notes[:, 0] = header[0] - 1
        there = notes.to(device, copy=True)
        alarms = torch.zeros(num_ranks, 1, dtype=torch.int64)
        cpu.post_notes(
            addresses(notes).numpy(), masks(masked), addresses(alarms).numpy(), 0, words(header).numpy()
        )
        gpu.post_notes[(1,)](
            addresses(there, device),
            flags(masked, device),
            words(header[:1], device),
            words([-99, *header[1:]], device),
            NUM_WORDS=len(header),
            NUM_RANKS=num_ranks,
            RANK_BLOCK=block_of(num_ranks),
            num_warps=1,
        )
        assert_same(there, notes)
        for note, is_masked in zip(there.tolist(), masked, strict=True):
            assert is_masked or note[: len(header)] == header


def compare_read_notes(
    notes: torch.Tensor, num_words: int, masked: list[int], first: int, end: int, before: int, device: str
) -> tuple[int, int]:
    """The number of rows, and the outcome; `before` is what it was."""
    num_ranks, local_experts = len(notes), notes.shape[1] - NOTE_WORDS
    headers = guarded((num_ranks, num_words), torch.int64)
    ranges = guarded((num_ranks, local_experts), torch.int64)
    our_headers, our_ranges = headers.to(device, copy=True), ranges.to(device, copy=True)
    num_rows, outcome = words([GUARD], device), words([before], device)
    own = notes[0, :num_words].clone()
    right = cpu.read_notes(
        addresses(notes).numpy(), masks(masked), own.numpy(), first, end, headers.numpy(), ranges.numpy()
    )
    there = notes.to(device)
    gpu.read_notes[(1,)](
        addresses(there, device),
        flags(masked, device),
        own.to(device),
        our_headers,
        our_ranges,
        num_rows,
        outcome,
        local_experts,
        FIRST_AGREEING=first,
        END_AGREEING=end,
        NUM_WORDS=num_words,
        NUM_RANKS=num_ranks,
        RANK_BLOCK=block_of(num_ranks),
        TILE_EXPERTS=4,
    )
    assert_same(our_headers, headers)
    assert_same(our_ranges, ranges)
    assert num_rows.item() == right
    return int(num_rows.item()), int(outcome.item())


def check_read_notes(device: str) -> None:
    notes = guarded((2, NOTE_WORDS + 1), torch.int64)
    notes[:, :3] = words([[7, 0, 4], [7, 0, 5]])
    notes[:, NOTE_WORDS:] = 1
    assert compare_read_notes(notes, 3, [0, 0], 1, 2, 0, device) == (2, 0)
    assert compare_read_notes(notes, 3, [0, 0], 1, 3, 0, device) == (-1, DIFFERENT + 4 * 1)
    assert compare_read_notes(notes, 3, [0, 0], 1, 3, 9, device) == (-1, 9)
    assert compare_read_notes(notes, 3, [0, 1], 1, 3, 0, device) == (1, 0)
    random = np.random.default_rng(1)
    for num_ranks, local_experts in ((3, 5), (5, 4), (1, 1)):
        notes = torch.from_numpy(random.integers(0, 2**40, (num_ranks, NOTE_WORDS + local_experts)))
        notes[:, 1:NOTE_WORDS] = notes[0, 1:NOTE_WORDS].clone()
        masked = [int(rank == 1) for rank in range(num_ranks)]
        assert compare_read_notes(notes, 8, masked, 1, 7, 0, device)[1] == 0
        if num_ranks > 2:
            notes[1, 3] += 1
            notes[2, 6] += 1
            assert compare_read_notes(notes, 8, masked, 1, 7, 0, device) == (-1, DIFFERENT + 4 * 2)
            assert compare_read_notes(notes, 8, [0] * num_ranks, 1, 7, 0, device) == (-1, DIFFERENT + 4 * 1)
            assert compare_read_notes(notes, 8, masked, 1, 6, 0, device)[1] == 0


# What a dispatch receives


def compare_pack(
    ranges: Any,
    lists: torch.Tensor,
    max_tokens: int,
    row_bytes: int,
    num_scale_words: int,
    device: str,
    with_stats: bool = True,
) -> dict[str, torch.Tensor]:
    num_senders, num_experts = ranges.shape
    rows_per_expert = num_senders * max_tokens
    message_bytes = LOW_LATENCY_HEADER_BYTES + row_bytes + 4 * num_scale_words
    message_bytes += -message_bytes % 16
    random = np.random.default_rng(row_bytes)
    messages = torch.from_numpy(
        random.integers(0, 256, (num_senders, max_tokens, message_bytes)).astype(np.uint8)
    )
    right = {
        "x": guarded((num_experts, rows_per_expert, row_bytes // 4), torch.int32),
        "scales": guarded((num_experts, num_scale_words, rows_per_expert), torch.int32),
        "src_info": guarded((num_experts, rows_per_expert), torch.int32),
        "layout_range": guarded((num_experts, num_senders), torch.int64),
        "counts": guarded((num_experts,), torch.int32),
        "stats": guarded((num_experts if with_stats else 0,), torch.int32),
    }
    ours = {name: part.to(device, copy=True) for name, part in right.items()}
    cpu.pack_tokens(
        0,
        num_experts,
        ranges.numpy(),
        addresses(lists).numpy(),
        4 * lists.stride(1),
        addresses(messages).numpy(),
        message_bytes,
        row_bytes,
        num_scale_words,
        0,
        right["x"].data_ptr(),
        right["scales"].data_ptr(),
        *(right[name].numpy() for name in ("src_info", "layout_range", "counts", "stats")),
    )
    lists_there, messages_there = lists.to(device), messages.to(device)
    for outcome in (5, 0):
        gpu.pack_tokens[(num_experts, num_senders, 2)](
            ranges.to(device),
            addresses(lists_there, device),
            4 * lists.stride(1),
            addresses(messages_there, device),
            message_bytes,
            row_bytes // 4,
            num_scale_words,
            ours["x"],
            ours["scales"] if num_scale_words else None,
            ours["src_info"],
            ours["layout_range"],
            ours["counts"],
            ours["stats"] if with_stats else None,
            words([outcome], device),
            num_experts,
            rows_per_expert,
            NUM_SENDERS=num_senders,
            SENDER_BLOCK=block_of(num_senders),
            TILE_ROWS=2,
            TILE_WORDS=64,
            TILE_SCALES=4,
        )
        if outcome:  # something went wrong before: nothing may be taken
            assert all((part == GUARD).all() for part in ours.values())
    for name, part in ours.items():
        assert_same(part, right[name])
    return {name: part.cpu() for name, part in ours.items()}


def check_pack_tokens(device: str) -> None:
    lists = guarded((2, 1, 4), torch.int32)
    lists[0, 0, :2], lists[1, 0, :1] = torch.tensor([0, 3]), torch.tensor([1])
    packed = compare_pack(words([[2], [1]]), lists, 4, 128, 0, device)
    assert packed["src_info"][0, :4].tolist() == [0, 3, 1, GUARD]
    assert packed["layout_range"].tolist() == [[2, SECOND_OF_TWO]]
    assert packed["counts"].tolist() == [3]
    assert packed["stats"].tolist() == [GUARD + 3]
    random = np.random.default_rng(2)
    max_tokens = 9 if device == "cpu" else 150
    for num_senders, num_experts, row_bytes, num_scale_words in (
        (2, 3, 16, 0),
        (3, 2, 528, 0),
        (3, 1, 512, 4),
        (1, 2, 1152, 9),
        (4, 2, 512, 1),
    ):
        counts = random.integers(0, max_tokens + 1, (num_senders, num_experts))
        counts[0, 0], counts[-1, -1] = max_tokens, 0
        # Some tokens are outside, as in a list that is written over.
        listed = random.integers(-2, max_tokens + 2, (num_senders, num_experts, max_tokens))
        compare_pack(
            torch.from_numpy(counts),
            torch.from_numpy(listed.astype(np.int32)),
            max_tokens,
            row_bytes,
            num_scale_words,
            device,
            with_stats=num_senders != 1,
        )


# What a combine returns


def handle_of(counts: Any, max_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """layout_range and src_info of experts that have counts[e][s] rows of sender s."""
    random = np.random.default_rng(seed)
    num_experts, num_senders = len(counts), len(counts[0])
    src_info = guarded((num_experts, num_senders * max_tokens), torch.int32)
    layout_range = torch.zeros(num_experts, num_senders, dtype=torch.int64)
    for expert, of_senders in enumerate(counts):
        begin = 0
        for sender, count in enumerate(of_senders):
            tokens = np.sort(random.permutation(max_tokens)[:count]).astype(np.int32)
            src_info[expert, begin : begin + count] = torch.from_numpy(tokens)
            layout_range[expert, sender] = begin << 32 | count
            begin += count
    return layout_range, src_info


def check_count_rows(device: str) -> None:
    def compare(layout_range: torch.Tensor, src_info: torch.Tensor, max_tokens: int) -> list[int]:
        rows = words([GUARD] * len(layout_range), device)
        gpu.count_rows[(len(layout_range),)](
            layout_range.to(device),
            src_info.to(device),
            rows,
            max_tokens,
            src_info.shape[1],
            NUM_SENDERS=layout_range.shape[1],
            TILE_ROWS=4,
        )
        problems = [int(number) for number in rows if number < 0]
        right = cpu.count_rows(layout_range.numpy(), src_info.numpy(), max_tokens)
        assert right == (problems[0] if problems else int(rows.sum()))
        return [int(number) for number in rows]

    def count(ranges: Any, tokens: list[int]) -> list[int]:
        src_info = guarded((len(ranges), 8), torch.int32)
        src_info[:, : len(tokens)] = torch.tensor(tokens)
        return compare(words(ranges), src_info, 4)

    two_senders = [[2, SECOND_OF_TWO]]
    assert count(two_senders, [0, 3, 1]) == [3]
    assert count(two_senders, [3, 0, 1]) == [-3]
    assert count(two_senders, [0, 0, 1]) == [-3]
    assert count(two_senders, [-1, 3, 1]) == [-3]
    assert count(two_senders, [0, 4, 1]) == [-3]
    assert count([[2, 1 << 32 | 1]], [0, 3, 1]) == [-1]
    assert count([[-1 << 32 | 2, 1]], [0, 3, 1]) == [-1]
    assert count([[5, 5 << 32]], [0, 1, 2, 3, 4]) == [-2]
    assert count([[2, 2 << 32 | 0xFFFFFFFF]], [0, 3]) == [-2]
    assert count([[2, SECOND_OF_TWO], [0, 3], [0, 5]], [0, 3, 1]) == [3, -3, -2]
    random = np.random.default_rng(4)
    for max_tokens in (9, 20):
        counts = random.integers(0, max_tokens + 1, (3, 3))
        layout_range, src_info = handle_of(counts.tolist(), max_tokens)
        assert compare(layout_range, src_info, max_tokens) == counts.sum(1).tolist()
        src_info[1, 6] = src_info[1, 5]
        compare(layout_range, src_info, max_tokens)


def compare_stage(
    counts: Any, max_tokens: int, hidden: int, use_logfmt: bool, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    layout_range, src_info = handle_of(counts, max_tokens)
    num_experts, rows_per_expert = src_info.shape
    x = rows_of(hidden, num_experts * rows_per_expert, hidden)
    right = guarded((len(x) + 1, message_bytes_of(hidden)), torch.uint8)
    ours = right.to(device, copy=True)
    cpu.stage_rows(
        0,
        num_experts,
        x.data_ptr(),
        hidden,
        layout_range.numpy(),
        rows_per_expert,
        int(use_logfmt),
        0,
        right.data_ptr(),
        right.stride(0),
    )
    gpu.stage_rows[(num_experts, 3)](
        x.to(device),
        hidden,
        layout_range.to(device),
        rows_per_expert,
        ours,
        ours.stride(0),
        USE_LOGFMT=use_logfmt,
        NUM_SENDERS=layout_range.shape[1],
        TILE_BLOCKS=4,
        **casts.OPTIONS,
    )
    assert_same(ours, right)
    return ours.cpu(), x


def check_stage_rows(device: str) -> None:
    messages, x = compare_stage([[2, 1]], 2, 64, False, device)
    assert_same(messages[:3, LOW_LATENCY_HEADER_BYTES:], x[:3])
    assert (messages[3:] == GUARD).all()
    counts = [[3, 0, 1], [0, 0, 0], [2, 3, 3]] if device == "cpu" else [[90, 0, 1], [0, 0, 0], [70, 99, 100]]
    max_tokens = 3 if device == "cpu" else 100
    for hidden in (8, 72, 1152):
        compare_stage(counts, max_tokens, hidden, False, device)
    for hidden in (128, 768, 2048):
        compare_stage(counts, max_tokens, hidden, True, device)


def compare_list_returns(
    layout_range: torch.Tensor, src_info: torch.Tensor, masked: list[int], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    num_experts, num_readers = layout_range.shape
    lists = guarded((num_readers, num_experts, src_info.shape[1]), torch.int32)
    notes = guarded((num_readers, NOTE_WORDS + num_experts), torch.int64)
    our_lists, our_notes = lists.to(device, copy=True), notes.to(device, copy=True)
    cpu.list_returns(
        src_info.numpy(),
        layout_range.numpy(),
        addresses(lists).numpy(),
        4 * lists.stride(1),
        addresses(notes).numpy(),
        masks(masked),
    )
    gpu.list_returns[(num_experts, num_readers)](
        src_info.to(device),
        layout_range.to(device),
        addresses(our_lists, device),
        4 * lists.stride(1),
        addresses(our_notes, device),
        flags(masked, device),
        src_info.shape[1],
        NUM_READERS=num_readers,
        TILE_ROWS=8,
    )
    assert_same(our_lists, lists)
    assert_same(our_notes, notes)
    return our_lists.cpu(), our_notes.cpu()[:, NOTE_WORDS:]


def check_list_returns(device: str) -> None:
    src_info = torch.tensor([[0, 3, 1]], dtype=torch.int32)
    lists, ranges = compare_list_returns(words([[2, SECOND_OF_TWO]]), src_info, [0, 0], device)
    assert lists[0, 0].tolist() == [0, 3, GUARD]
    assert lists[1, 0].tolist() == [1, GUARD, GUARD]
    assert ranges.tolist() == [[2], [SECOND_OF_TWO]]
    random = np.random.default_rng(5)
    for max_tokens in (4, 21):
        counts = random.integers(0, max_tokens + 1, (2, 3))
        counts[0, 1] = 0
        for masked in ([0, 0, 0], [0, 0, 1]):
            compare_list_returns(*handle_of(counts.tolist(), max_tokens), masked, device)


# What a combine adds up


class Returned:
    """What the experts of all ranks have returned to this one: lists, ranges and messages, for a routing."""

    def __init__(
        self, ids: torch.Tensor, num_ranks: int, local_experts: int, hidden: int, use_logfmt: bool
    ) -> None:
        self.ids, self.hidden, self.use_logfmt = ids, hidden, use_logfmt
        num_tokens = len(ids)
        random = np.random.default_rng(hidden)
        self.rows_per_expert = num_tokens + 4
        self.ranges = torch.zeros(num_ranks, local_experts, dtype=torch.int64)
        self.lists = guarded((num_ranks, local_experts, num_tokens + 1), torch.int32)
        for rank in range(num_ranks):
            for local in range(local_experts):
                tokens = (ids == rank * local_experts + local).any(1).nonzero().flatten()
                begin = int(random.integers(0, 4))
                self.ranges[rank, local] = begin << 32 | len(tokens)
                self.lists[rank, local, : len(tokens)] = tokens.int()
        num_rows = local_experts * self.rows_per_expert
        rows = [rows_of(rank, num_rows, hidden) for rank in range(num_ranks)]
        self.messages = guarded((num_ranks, num_rows, message_bytes_of(hidden)), torch.uint8)
        for rank in range(num_ranks):
            self.set_rows(rank, rows[rank])
        self.weights = torch.from_numpy(random.normal(0, 2, ids.shape).astype(np.float32))
        self.weights[ids < 0] = torch.inf  # of what is no expert nobody asks
        self.weights.view(-1)[::5] = -0.0

    def set_rows(self, rank: int, rows: torch.Tensor) -> None:
        if self.use_logfmt:
            messages = cpu_encode(rows.numpy(), self.messages.shape[2])
            self.messages[rank] = torch.from_numpy(messages)
        else:
            payload = self.messages[rank, :, LOW_LATENCY_HEADER_BYTES:][:, : 2 * self.hidden]
            payload.copy_(rows.view(torch.uint8))

    def compare(self, masked: list[int], device: str) -> tuple[torch.Tensor, int]:
        """Out, and the row that is missing: beyond it the CPU adds up nothing."""
        num_tokens, num_topk = self.ids.shape
        num_ranks, local_experts = self.ranges.shape
        right = guarded((num_tokens + 1, self.hidden), torch.uint16)
        ours = right.to(device, copy=True)
        missing = cpu.sum_tokens(
            0,
            num_tokens,
            self.ids.numpy(),
            self.weights.numpy(),
            self.ranges.numpy(),
            addresses(self.lists).numpy(),
            4 * self.lists.stride(1),
            addresses(self.messages).numpy(),
            self.messages.stride(1),
            self.rows_per_expert,
            masks(masked),
            int(self.use_logfmt),
            right.data_ptr(),
            self.hidden,
        )
        lists, messages = self.lists.to(device), self.messages.to(device)
        our_missing = words([gpu.NO_ROWS_MISSING], device)
        for outcome in (9, 0):
            gpu.sum_tokens[(num_tokens, 2)](
                self.ids.to(device),
                self.weights.to(device),
                self.ranges.to(device),
                addresses(lists, device),
                4 * lists.stride(1),
                addresses(messages, device),
                messages.stride(1),
                self.rows_per_expert,
                flags(masked, device),
                ours,
                self.hidden,
                our_missing,
                words([outcome], device),
                local_experts,
                USE_LOGFMT=self.use_logfmt,
                NUM_RANKS=num_ranks,
                NUM_TOPK=num_topk,
                SLOT_BLOCK=block_of(num_topk),
                TILE_LIST=8,
                TILE_BLOCKS=2,
                IN_HARDWARE=device != "cpu",
                **casts.OPTIONS,
            )
            if outcome:  # something went wrong before: nothing may be added up
                assert_same(ours, guarded((num_tokens + 1, self.hidden), torch.uint16))
                assert our_missing.item() == gpu.NO_ROWS_MISSING
        found = -1 if our_missing.item() == gpu.NO_ROWS_MISSING else int(our_missing.item())
        assert found == missing
        compared = num_tokens if missing < 0 else missing // num_topk
        assert_same(ours[:compared], right[:compared])
        assert_same(ours[-1], right[-1])
        return ours.cpu(), found


def bits_of(value: float) -> int:
    return int(torch.tensor(value).bfloat16().view(torch.int16))


def check_sum_tokens(device: str) -> None:
    returned = Returned(words([[1, 0]]), 2, 1, 8, False)
    returned.weights[:] = torch.tensor([[0.5, 2.0]])
    num_rows = returned.rows_per_expert
    returned.set_rows(0, torch.full((num_rows, 8), bits_of(1.0), dtype=torch.uint16))
    returned.set_rows(1, torch.full((num_rows, 8), bits_of(4.0), dtype=torch.uint16))
    out, missing = returned.compare([0, 0], device)
    assert out[0].tolist() == [bits_of(4.0)] * 8
    assert missing == -1
    num_tokens = 11 if device == "cpu" else 300
    for num_ranks, local_experts, num_topk, hidden in ((3, 2, 3, 72), (2, 1, 4, 1152), (1, 3, 1, 256)):
        ids = routing(num_tokens, num_topk, num_ranks * local_experts, hidden)
        returned = Returned(ids, num_ranks, local_experts, hidden, False)
        for masked in ([0] * num_ranks, [*[0] * (num_ranks - 1), 1]):
            assert returned.compare(masked, device)[1] == -1
    assert Returned(words([[]]).view(0, 2), 2, 1, 128, False).compare([0, 0], device)[1] == -1


def check_sum_tokens_of_logfmt(device: str) -> None:
    num_tokens = 5 if device == "cpu" else 100
    for num_ranks, local_experts, hidden in ((2, 2, 256), (3, 1, 896)):
        ids = routing(num_tokens, 3, num_ranks * local_experts, hidden)
        returned = Returned(ids, num_ranks, local_experts, hidden, True)
        for masked in ([0] * num_ranks, [1, *[0] * (num_ranks - 1)]):
            assert returned.compare(masked, device)[1] == -1


def check_rows_that_are_missing(device: str) -> None:
    for use_logfmt in (False, True):
        ids = words([[0, 1], [-1, 1], [0, 1], [1, 0]])
        returned = Returned(ids, 2, 1, 128, use_logfmt)
        returned.lists[1, 0, :4] = torch.tensor([0, 2, 3, 9])
        returned.ranges[0, 0] = 2
        # Token 1 is not in the list of rank 1, and token 3 behind the end of rank 0's.
        assert returned.compare([0, 0], device)[1] == 1 * 2 + 1
        assert returned.compare([0, 1], device)[1] == 3 * 2 + 1
        assert returned.compare([1, 1], device)[1] == -1
        returned.ranges[:] = 0
        assert returned.compare([0, 0], device)[1] == 0


CHECKS: tuple[Any, ...] = (
    check_send_tokens,
    check_list_tokens,
    check_post_notes,
    check_read_notes,
    check_pack_tokens,
    check_count_rows,
    check_stage_rows,
    check_list_returns,
    check_sum_tokens,
    check_sum_tokens_of_logfmt,
    check_rows_that_are_missing,
)
