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

from anyep import formats, outcomes
from anyep.backends.cpu.kernels import slots as cpu
from anyep.backends.cuda import facts
from anyep.backends.cuda.pinned import pinned_words
from anyep.layout import NOTE_HEADER_BYTES, ControlRegion
from anyep.modes.letters import Kind
from anyep.sizes import LOW_LATENCY_HEADER_BYTES, LowLatencySizes
from tests.support.checks.cast_checks import cpu_encode, rows_of_blocks

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")
casts = importlib.import_module("anyep.backends.cuda.kernels.casts")
gpu = importlib.import_module("anyep.backends.cuda.kernels.slots")

GUARD = 0x5A
NOTE_WORDS = NOTE_HEADER_BYTES // 8
SECOND_OF_TWO = 2 << 32 | 1
"""One row that begins after two others."""
FP8_FORMATS = (formats.FP8, formats.FP8_ROUNDED, formats.FP8_UE8M0)
block_of = triton.next_power_of_2


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, GUARD, dtype=dtype)


def addresses(parts: Iterable[torch.Tensor], device: str = "cpu") -> torch.Tensor:
    return torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=device)


def strides(lists: torch.Tensor) -> np.ndarray[Any, Any]:
    """From one expert's list to the next one's, for each rank, as the CPU's kernels take it."""
    return np.full(len(lists), 4 * lists.stride(1), np.int64)


def words(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def masks(values: Iterable[int]) -> Any:
    return np.array(list(values), np.bool_)


def assert_same(ours: torch.Tensor, right: torch.Tensor) -> None:
    assert torch.equal(ours.cpu().contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def routing(num_tokens: int, num_topk: int, num_experts: int, seed: int) -> torch.Tensor:
    """Choices with repetitions, and with some that are no expert (-1)."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, num_experts, (num_tokens, num_topk))
    return torch.from_numpy(np.where(random.random(ids.shape) < 0.25, -1, ids))


def rows_of(seed: int, num_rows: int, hidden: int) -> torch.Tensor:
    """Rows of bf16 as their bits (uint16), with blocks of kinds that hurt."""
    num_blocks = -(-hidden // formats.CHANNELS_PER_BLOCK)
    rows = rows_of_blocks(seed, num_rows, num_blocks)[:, :hidden]
    return torch.from_numpy(np.ascontiguousarray(rows))


def message_bytes_of(hidden: int) -> int:
    return LowLatencySizes(1, hidden, 1).dispatch_message_bytes


class Setting:
    """What every kernel finds: the control regions of all ranks, this rank's facts, and a call's state."""

    def __init__(
        self,
        device: str,
        num_ranks: int,
        rank: int = 0,
        number: int = 7,
        masked: Iterable[int] = (),
        outcome: int = 0,
        local_experts: int = 1,
        patience_ns: int = 0,
    ) -> None:
        self.device, self.num_ranks, self.rank, self.number = device, num_ranks, rank, number
        self.control = ControlRegion(num_ranks, num_ranks)
        self.heaps = words([[0] * (self.control.num_bytes // 8)] * num_ranks, device)
        self.table = addresses(self.heaps, device)
        self.report = words([0] * (facts.REPORTED_HEADERS + NOTE_WORDS * num_ranks), device)
        self.generations = words([*masked, *[0] * num_ranks][:num_ranks], device)
        self.state = words([0] * (facts.RANGES + num_ranks * local_experts), device)
        self.state[facts.NUMBER], self.state[facts.OUTCOME] = number, outcome
        self.state[facts.MISSING_ROW] = gpu.NO_ROWS_MISSING
        self.state[facts.WRONG_PLACE] = gpu.NO_ROWS_MISSING
        self.local_experts = local_experts
        note, packed = self.control.block("low-latency note"), self.control.block("low-latency packed")
        mask = self.control.block("mask")
        here = [0] * facts.NUM_LOW_LATENCY_FACTS
        here[facts.RANK], here[facts.OWN_HEAP] = rank, self.heaps[rank].data_ptr()
        here[facts.PATIENCE_NS] = patience_ns
        here[facts.ALARM_AT] = self.control.block("alarm").start
        here[facts.GIVEN_UP_AT] = self.control.block("given up").start
        here[facts.FLAG_STRIDE] = packed.stride
        here[facts.REPORT] = self.report.data_ptr()
        here[facts.CALLS_AT] = self.control.block("status").start + 8
        here[facts.NOTE_AT], here[facts.NOTE_STRIDE] = note.start, note.stride
        here[facts.NOTE_SET_STRIDE] = note.offset(0, 1) - note.start
        here[facts.PACKED_AT] = packed.start
        here[facts.PACKED_SET_STRIDE] = packed.offset(0, 1) - packed.start
        here[facts.MASK_AT], here[facts.MASK_STRIDE] = mask.start, mask.stride
        self.facts = words(here, device)
        self.decoy = guarded((1 << 12,), torch.uint8).to(device)

    @property
    def common(self) -> tuple[torch.Tensor, ...]:
        """The arguments that every kernel begins with."""
        return self.facts, self.table, self.generations, self.state

    @property
    def blocks(self) -> dict[str, int]:
        return {"NUM_RANKS": self.num_ranks, "RANK_BLOCK": max(2, block_of(self.num_ranks))}

    def both_sets(self, of_this_call: torch.Tensor) -> torch.Tensor:
        """A table of addresses whose other set leads astray."""
        other = torch.full_like(of_this_call, self.decoy.data_ptr())
        sets = [of_this_call, other] if self.number % 2 == 0 else [other, of_this_call]
        return torch.cat(sets).to(self.device)

    def note(self, reader: int, sender: int) -> torch.Tensor:
        """A sender's note at a reader."""
        offset = self.control.block("low-latency note").offset(sender, self.number % 2) // 8
        return self.heaps[reader, offset : offset + NOTE_WORDS + self.local_experts]

    def word(self, rank: int, block: str, writer: int, slot_set: int = 0, index: int = 0) -> torch.Tensor:
        return self.heaps[rank, self.control.block(block).offset(writer, slot_set) // 8 + index]

    def packed(self, rank: int, writer: int) -> int:
        """What a rank was told about the set of this call."""
        return int(self.word(rank, "low-latency packed", writer, self.number % 2))

    @property
    def outcome(self) -> int:
        return int(self.state[facts.OUTCOME])

    def put_header(self, header: list[int]) -> None:
        self.state[facts.NOTE_HEADER : facts.NOTE_HEADER + len(header)] = words(header, self.device)


# What all calls have


def open_call(setting: Setting, can_shrink: bool = False, **how: bool) -> None:
    gpu.open_call[(1,)](
        *setting.common,
        int(Kind.LOW_LATENCY_DISPATCH),
        8,
        128,
        4,
        formats.FP8,
        0,
        ADVANCES=how.get("advances", True),
        POSTS=how.get("posts", False),
        CAN_SHRINK=can_shrink,
        **setting.blocks,
        num_warps=1,
    )


def check_open_call(device: str) -> None:
    setting = Setting(device, 2, rank=1)
    setting.word(1, "status", 0, index=1).fill_(6)
    for writer in range(2):
        setting.word(1, "low-latency packed", writer, 1).fill_(5)
    open_call(setting, posts=True)
    assert setting.outcome == 0
    assert int(setting.word(1, "status", 0, index=1)) == 7
    header = [7, 0, int(Kind.LOW_LATENCY_DISPATCH), 8, 128, 4, formats.FP8, 0]
    for reader in range(2):
        assert setting.note(reader, 1)[:NOTE_WORDS].tolist() == header
        assert not setting.note(reader, 0).any()
    # The set of even calls is not known to be free.
    setting = Setting(device, 2, rank=1)
    setting.word(1, "status", 0, index=1).fill_(7)
    setting.word(1, "low-latency packed", 0, 0).fill_(6)
    open_call(setting, advances=False)
    assert setting.outcome == outcomes.outcome_of(outcomes.LATE, 1)
    assert int(setting.word(1, "status", 0, index=1)) == 7
    assert setting.report[: facts.REPORTED_WAIT + 1].tolist() == [
        *(1, 0, setting.outcome, 8, 0, Kind.LOW_LATENCY_DISPATCH, facts.PACKED_AT)
    ]
    assert int(setting.word(0, "alarm", 0)) == 2
    # The first two calls of a round need no telling.
    for before, expected in ((3 << 32, 0), ((3 << 32) + 1, 0), ((3 << 32) + 2, 1)):
        setting = Setting(device, 2)
        setting.word(0, "status", 0, index=1).fill_(before)
        open_call(setting)
        assert outcomes.code_of(setting.outcome) == expected
    # The example: rank 2 has given up before.
    for can_shrink in (False, True):
        setting = Setting(device, 3, rank=2)
        setting.word(2, "given up", 2).fill_(1)
        open_call(setting, can_shrink=can_shrink, posts=True)
        assert setting.outcome == outcomes.outcome_of(outcomes.OUT, 2) == 8 + 16 * 2
        finish(setting, can_shrink=can_shrink)
        assert not any(setting.packed(reader, 2) for reader in range(3))
        assert not any(setting.note(reader, slot_set).any() for reader in range(3) for slot_set in range(2))


def check_masks(device: str) -> None:
    # Rank 1 does not come, and is masked in round 3; everyone hears of it.
    setting = Setting(device, 3, number=0)
    setting.word(0, "status", 0, index=1).fill_((3 << 32) + 6)
    for writer in (0, 2):
        setting.word(0, "low-latency packed", writer, 1).fill_((3 << 32) + 5)
    open_call(setting, can_shrink=True)
    assert setting.outcome == 0
    assert setting.generations.tolist() == [0, 7, 0]
    for rank in range(3):
        assert int(setting.word(rank, "mask", 0, index=1)) == 7
    # What another rank told is passed on; a rank that finds itself masked does nothing.
    setting = Setting(device, 3, rank=2)
    setting.word(2, "mask", 1, index=0).fill_(3)
    open_call(setting, can_shrink=True)
    assert setting.outcome == 0
    assert int(setting.word(1, "mask", 2, index=0)) == 3
    setting.word(2, "mask", 0, index=2).fill_(1)
    open_call(setting, can_shrink=True, posts=True)
    assert setting.outcome == outcomes.outcome_of(outcomes.MASKED, 2)
    assert not setting.heaps[1, setting.control.block("low-latency note").start // 8 :].eq(2).any()
    finish(setting, can_shrink=True)
    assert setting.packed(0, 2) == 0
    setting = Setting(device, 2)
    gpu.mask_rank[(1,)](setting.facts, setting.table, 1, 3, **setting.blocks, num_warps=1)
    assert [int(setting.word(rank, "mask", 0, index=1)) for rank in range(2)] == [3, 3]


def finish(setting: Setting, can_shrink: bool = False) -> None:
    gpu.finish_call[(1,)](*setting.common, CAN_SHRINK=can_shrink, **setting.blocks, num_warps=1)


def check_finish_call(device: str) -> None:
    for code, told in ((0, 7), (outcomes.DIFFERENT, 7), (outcomes.LATE, 0), (outcomes.STOPPED, 0)):
        setting = Setting(device, 2, rank=1, outcome=code)
        finish(setting)
        assert [setting.packed(rank, 1) for rank in range(2)] == [told, told]
        assert [setting.packed(rank, 0) for rank in range(2)] == [0, 0]
        assert int(setting.report[facts.NUM_REPORTS]) == int(code != 0)


def receive(setting: Setting, stats: torch.Tensor | None = None, can_shrink: bool = False) -> None:
    gpu.receive_notes[(1,)](
        *setting.common,
        setting.state if stats is None else stats,
        setting.local_experts,
        HAS_STATS=stats is not None,
        CAN_SHRINK=can_shrink,
        **setting.blocks,
        TILE_EXPERTS=4,
        num_warps=1,
    )


def check_receive_notes(device: str) -> None:
    for num_ranks, local_experts, masked in ((2, 1, []), (3, 5, [0, 1]), (1, 4, [])):
        setting = Setting(device, num_ranks, masked=masked, local_experts=local_experts)
        setting.put_header([7, 0, 4, 9])
        right = torch.zeros(num_ranks, local_experts, dtype=torch.int64)
        for sender in range(num_ranks):
            if not int(setting.generations[sender]):
                setting.note(0, sender)[:4] = words([7, 0, 4, 9], device)
                right[sender] = sender << 32 | torch.arange(local_experts)
                setting.note(0, sender)[NOTE_WORDS:] = right[sender].to(device)
        stats = words([5] * num_ranks, device)
        receive(setting, stats)
        assert setting.outcome == 0
        assert_same(setting.state[facts.RANGES :].view_as(right), right)
        assert (stats >= 5).all()
    # They disagree; the second call that goes wrong is not reported before the first was heard.
    setting = Setting(device, 3)
    setting.put_header([7, 0, 4])
    for sender, word in ((0, 4), (1, 4), (2, 5)):
        setting.note(0, sender)[:3] = words([7, 0, word], device)
    for _ in range(2):
        setting.state[facts.OUTCOME] = setting.state[facts.IS_REPORTED] = 0
        receive(setting)
        assert setting.outcome == outcomes.outcome_of(outcomes.DIFFERENT, 2)
    assert setting.report[: facts.NUM_READ + 1].tolist() == [1, 0]
    headers = setting.report[facts.REPORTED_HEADERS :].view(3, NOTE_WORDS)[:, :3]
    assert headers.tolist() == [[7, 0, 4], [7, 0, 4], [7, 0, 5]]
    # One is late; or the call went wrong before, and nobody is waited for.
    setting = Setting(device, 2, rank=1)
    setting.put_header([7])
    setting.note(1, 1)[0] = 7
    receive(setting)
    assert setting.outcome == outcomes.outcome_of(outcomes.LATE, 0)
    setting = Setting(device, 2, outcome=outcomes.BAD_HANDLE, patience_ns=10**11)
    receive(setting)
    assert setting.outcome == outcomes.BAD_HANDLE
    # Or it is masked.
    setting = Setting(device, 2, rank=1)
    setting.put_header([7])
    setting.note(1, 1)[0] = 7
    receive(setting, can_shrink=True)
    assert setting.outcome == 0
    assert setting.generations.tolist() == [1, 0]


def check_what_the_host_says(device: str) -> None:
    """Who waits long enough is told by the host, too."""
    for can_shrink, block, index, value, generations in (
        (False, "alarm", 1, 1, [0, 0]),
        # Rank 0 is gone, and masked for it; or the host was told that it is masked, in round 1.
        (True, "given up", 0, 1, [1, 0]),
        (True, "mask", 0, 3, [3, 0]),
        # This rank itself has given up: it masks nobody.
        (True, "given up", 16, 1, [0, 0]),
    ):
        setting = Setting(device, 2, rank=1, patience_ns=10**11)
        host = pinned_words(setting.control.num_bytes // 8)
        setting.facts[facts.AT_HOST] = int(host.ctypes.data)
        alarm_at = setting.control.block("alarm").start + 8
        setting.word(1, "alarm", 0, index=1).fill_(int(host.ctypes.data) + alarm_at)
        host[setting.control.block(block).start // 8 + index] = value
        setting.put_header([7])
        setting.note(1, 1)[0] = 7
        receive(setting, can_shrink=can_shrink)
        assert setting.outcome == (0 if any(generations) else outcomes.outcome_of(outcomes.STOPPED, 0))
        assert setting.generations.tolist() == generations


# Dispatch


def compare_send(
    ids: torch.Tensor,
    local_experts: int,
    hidden: int,
    travel: int,
    masked: list[int],
    device: str,
    number: int = 7,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Messages, lists, and the ranges in the notes of each reader."""
    num_ranks, (num_tokens, num_topk) = len(masked), ids.shape
    num_experts = num_ranks * local_experts
    setting = Setting(device, num_ranks, num_ranks - 1, number, masked, local_experts=local_experts)
    x = rows_of(num_tokens, num_tokens, hidden)
    messages = guarded((num_tokens + 1, message_bytes_of(hidden)), torch.uint8)
    lists = guarded((num_ranks, local_experts, num_tokens + 4 - num_tokens % 4), torch.int32)
    notes = torch.zeros(num_ranks, NOTE_WORDS + local_experts, dtype=torch.int64)
    our_messages, our_lists = messages.to(device, copy=True), lists.to(device, copy=True)
    cpu.send_tokens(
        *(0, num_tokens, x.data_ptr(), hidden, travel, ids.numpy(), num_experts),
        *(messages.data_ptr(), messages.stride(0)),
    )
    list_stride = 4 * lists.stride(1)
    cpu.list_tokens(
        ids.numpy(),
        addresses(lists).numpy(),
        strides(lists),
        addresses(notes).numpy(),
        masks(masked),
        np.empty(num_experts, np.int64),
    )
    header = [number, 0, 4, 5]
    setting.put_header(header)
    own = torch.full((num_ranks,), our_messages.data_ptr())
    num_shares = 2
    for outcome in (outcomes.LATE, 0):
        setting.state[facts.OUTCOME], setting.state[facts.NUM_SENT] = outcome, 0
        gpu.send_tokens[(num_experts + num_tokens * num_shares,)](
            *setting.common,
            x.to(device),
            ids.to(device),
            setting.both_sets(own),
            setting.both_sets(addresses(our_lists)),
            num_tokens,
            hidden,
            our_messages.stride(0),
            list_stride,
            local_experts,
            TRAVEL=travel,
            NUM_TOPK=num_topk,
            SLOT_BLOCK=max(2, block_of(num_topk)),
            NUM_SHARES=num_shares,
            TILE_BLOCKS=4,
            TILE_TOKENS=16,
            **setting.blocks,
            **casts.OPTIONS,
        )
        if outcome:  # something went wrong before: nothing may be sent
            assert (our_messages == GUARD).all()
            assert not setting.note(0, setting.rank).any()
    assert_same(our_messages, messages)
    assert_same(our_lists, lists)
    assert (setting.decoy == GUARD).all()
    ranges = torch.stack([setting.note(reader, setting.rank)[NOTE_WORDS:] for reader in range(num_ranks)])
    assert_same(ranges, notes[:, NOTE_WORDS:])
    for reader, is_masked in enumerate(masked):
        posted = setting.note(reader, setting.rank)[:4].tolist()
        assert posted == ([0] * 4 if is_masked else header)
    return our_messages.cpu(), our_lists.cpu(), ranges.cpu()


def check_send_tokens(device: str) -> None:
    messages, lists, ranges = compare_send(
        words([[1, 0], [-1, 1]]), 1, 128, formats.RAW, [0, 0], device, number=6
    )
    assert (messages[:, :LOW_LATENCY_HEADER_BYTES] == GUARD).all()
    assert_same(messages[:2, LOW_LATENCY_HEADER_BYTES:], rows_of(2, 2, 128))
    assert lists[0, 0, :1].tolist() == [0]
    assert lists[1, 0, :2].tolist() == [0, 1]
    assert ranges.tolist() == [[1], [2]]
    # Of these only the third goes anywhere.
    nowhere = words([[-1, -1], [-1, -1], [-1, 1], [-1, -1]])
    for travel in (formats.RAW, *FP8_FORMATS):
        messages, _, _ = compare_send(nowhere, 1, 512, travel, [0, 0], device)
        assert (messages[[0, 1, 3]] == GUARD).all()
        assert not (messages[2] == GUARD).all()
    num_tokens = 6 if device == "cpu" else 200
    for hidden in (8, 72, 768, 1152):
        compare_send(routing(num_tokens, 3, 6, hidden), 3, hidden, formats.RAW, [0, 0], device)
    for travel in FP8_FORMATS:
        for hidden in (512, 1536):
            compare_send(routing(num_tokens, 2, 4, hidden), 2, hidden, travel, [0, 0], device)
    compare_send(words([[]]).view(0, 1), 2, 128, formats.RAW, [0, 0], device)


def check_lists_of_tokens(device: str) -> None:
    sizes = [(37, 3, 2), (16, 8, 1), (1, 1, 3), (0, 2, 2)]
    for seed, (num_tokens, num_topk, local_experts) in enumerate(
        sizes if device == "cpu" else [*sizes, (999, 8, 32)]
    ):
        for masked in ([0, 0, 0], [0, 1, 0], [1, 1, 0]):
            ids = routing(num_tokens, num_topk, len(masked) * local_experts, seed)
            compare_send(ids, local_experts, 8, formats.RAW, masked, device, number=seed)


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
        strides(lists),
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
    setting = Setting(device, num_senders, local_experts=num_experts)
    setting.state[facts.RANGES :] = ranges.flatten().to(device)
    for outcome in (outcomes.STOPPED, 0):
        setting.state[facts.OUTCOME], setting.state[facts.NUM_TAKEN] = outcome, 0
        gpu.pack_tokens[(num_experts, num_senders, 2)](
            *setting.common,
            setting.both_sets(addresses(messages_there)),
            setting.both_sets(addresses(lists_there)),
            ours["x"],
            ours["scales"] if num_scale_words else setting.state,
            ours["src_info"],
            ours["layout_range"],
            ours["counts"],
            ours["stats"] if with_stats else setting.state,
            message_bytes,
            4 * lists.stride(1),
            row_bytes // 4,
            num_scale_words,
            num_experts,
            rows_per_expert,
            HAS_SCALES=num_scale_words > 0,
            HAS_STATS=with_stats,
            CAN_SHRINK=False,
            **setting.blocks,
            TILE_ROWS=2,
            TILE_WORDS=64,
            TILE_SCALES=4,
        )
        if outcome:  # something went wrong before: nothing may be taken
            assert all((part == GUARD).all() for part in ours.values())
            assert setting.packed(0, 0) == 0
    for name, part in ours.items():
        assert_same(part, right[name])
    assert [setting.packed(rank, 0) for rank in range(num_senders)] == [7] * num_senders
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


# Combine


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


def compare_return(
    layout_range: torch.Tensor,
    src_info: torch.Tensor,
    hidden: int,
    use_logfmt: bool,
    masked: list[int],
    device: str,
    number: int = 7,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Messages, lists and ranges of each reader, and x."""
    (num_experts, rows_per_expert), num_ranks = src_info.shape, len(masked)
    setting = Setting(device, num_ranks, num_ranks - 1, number, masked, local_experts=num_experts)
    x = rows_of(hidden, num_experts * rows_per_expert, hidden)
    messages = guarded((len(x) + 1, message_bytes_of(hidden)), torch.uint8)
    lists = guarded((num_ranks, num_experts, rows_per_expert), torch.int32)
    notes = torch.zeros(num_ranks, NOTE_WORDS + num_experts, dtype=torch.int64)
    our_messages, our_lists = messages.to(device, copy=True), lists.to(device, copy=True)
    cpu.stage_rows(
        *(0, num_experts, x.data_ptr(), hidden, layout_range.numpy(), rows_per_expert, int(use_logfmt), 0),
        *(messages.data_ptr(), messages.stride(0)),
    )
    cpu.list_returns(
        src_info.numpy(),
        layout_range.numpy(),
        addresses(lists).numpy(),
        strides(lists),
        addresses(notes).numpy(),
        masks(masked),
    )
    give_back(setting, x, layout_range, src_info, our_messages, our_lists, use_logfmt)
    assert setting.outcome == 0
    assert_same(our_messages, messages)
    assert_same(our_lists, lists)
    assert (setting.decoy == GUARD).all()
    ranges = torch.stack([setting.note(reader, setting.rank)[NOTE_WORDS:] for reader in range(num_ranks)])
    assert_same(ranges, notes[:, NOTE_WORDS:])
    for reader, is_masked in enumerate(masked):
        assert int(setting.note(reader, setting.rank)[0]) == (0 if is_masked else number)
    return our_messages.cpu(), our_lists.cpu(), ranges.cpu(), x


def give_back(
    setting: Setting,
    x: torch.Tensor,
    layout_range: torch.Tensor,
    src_info: torch.Tensor,
    messages: torch.Tensor,
    lists: torch.Tensor,
    use_logfmt: bool = False,
    ids: torch.Tensor | None = None,
) -> None:
    num_experts, rows_per_expert = src_info.shape
    setting.put_header([setting.number])
    ids = words([[0, -1]]) if ids is None else ids
    gpu.return_rows[(num_experts * (setting.num_ranks + 3),)](
        *setting.common,
        x.to(setting.device),
        ids.to(setting.device),
        src_info.to(setting.device),
        layout_range.to(setting.device),
        setting.both_sets(torch.full((setting.num_ranks,), messages.data_ptr())),
        setting.both_sets(addresses(lists)),
        ids.numel(),
        x.shape[1],
        messages.stride(0),
        4 * lists.stride(1),
        num_experts,
        rows_per_expert,
        USE_LOGFMT=use_logfmt,
        NUM_TOPK=ids.shape[1],
        NUM_SHARES=3,
        TILE_BLOCKS=4,
        TILE_ROWS=8,
        **setting.blocks,
        **casts.OPTIONS,
    )


def check_return_rows(device: str) -> None:
    src_info = torch.tensor([[0, 3, 1, 0, 0, 0, 0, 0]], dtype=torch.int32)
    both = words([[2, SECOND_OF_TWO]])
    messages, lists, ranges, x = compare_return(both, src_info, 64, False, [0, 0], device, number=6)
    assert_same(messages[:3, LOW_LATENCY_HEADER_BYTES:], x[:3])
    assert (messages[3:] == GUARD).all()
    assert lists[0, 0, :3].tolist() == [0, 3, GUARD]
    assert lists[1, 0, :3].tolist() == [1, GUARD, GUARD]
    assert ranges.tolist() == [[2], [SECOND_OF_TWO]]
    counts = [[3, 0, 1], [0, 0, 0], [2, 3, 3]] if device == "cpu" else [[90, 0, 1], [0, 0, 0], [70, 99, 100]]
    max_tokens = 3 if device == "cpu" else 100
    for hidden in (8, 72, 1152):
        compare_return(*handle_of(counts, max_tokens), hidden, False, [0, 0, 0], device)
    for hidden in (128, 768, 2048):
        compare_return(*handle_of(counts, max_tokens), hidden, True, [0, 1, 0], device)
    random = np.random.default_rng(5)
    for max_tokens in (4, 21):
        counts = random.integers(0, max_tokens + 1, (2, 3))
        counts[0, 1] = 0
        for masked in ([0, 0, 0], [1, 0, 0]):
            compare_return(*handle_of(counts.tolist(), max_tokens), 8, False, masked, device)


def check_handles_that_cannot_be(device: str) -> None:
    def outcome_of(ranges: Any, tokens: list[int]) -> int:
        setting = Setting(device, 2, rank=1, local_experts=len(ranges))
        src_info = guarded((len(ranges), 8), torch.int32)
        src_info[:, : len(tokens)] = torch.tensor(tokens)
        messages = guarded((8 * len(ranges), 32), torch.uint8).to(device)
        lists = guarded((2, len(ranges), 8), torch.int32).to(device)
        x = torch.zeros(8 * len(ranges), 8, dtype=torch.uint16)
        give_back(setting, x, words(ranges), src_info, messages, lists)
        is_refused = [int(setting.note(reader, 1)[1]) for reader in range(2)]
        assert is_refused == [gpu.BY_HANDLE * (setting.outcome != 0)] * 2
        assert int(setting.note(0, 1)[0]) == 7
        return setting.outcome

    two_senders = [[2, SECOND_OF_TWO]]
    bad = outcomes.outcome_of(outcomes.BAD_HANDLE, 1)
    assert outcome_of(two_senders, [0, 3, 1]) == 0
    assert outcome_of(two_senders, [3, 0, 1]) == bad
    assert outcome_of(two_senders, [0, 0, 1]) == bad
    assert outcome_of(two_senders, [-1, 3, 1]) == bad
    assert outcome_of(two_senders, [0, 4, 1]) == bad
    assert outcome_of([[2, 1 << 32 | 1]], [0, 3, 1]) == bad
    assert outcome_of([[-1 << 32 | 2, 1]], [0, 3, 1]) == bad
    assert outcome_of([[5, 5 << 32]], [0, 1, 2, 3, 4]) == bad
    assert outcome_of([[2, 2 << 32 | 0xFFFFFFFF]], [0, 3]) == bad
    assert outcome_of([[2, -1]], [0, 3]) == bad
    assert outcome_of([[1 << 31, (1 << 63) - 1]], [0, 3]) == bad
    assert outcome_of([[2, SECOND_OF_TWO], [0, 3]], [0, 3, 1]) == bad


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
            strides(self.lists),
            addresses(self.messages).numpy(),
            self.messages.stride(1),
            self.rows_per_expert,
            masks(masked),
            int(self.use_logfmt),
            right.data_ptr(),
            self.hidden,
        )
        lists, messages = self.lists.to(device), self.messages.to(device)
        setting = Setting(device, num_ranks, masked=masked, local_experts=local_experts)
        setting.state[facts.RANGES :] = self.ranges.flatten().to(device)
        for outcome in (outcomes.DIFFERENT, 0):
            setting.state[facts.OUTCOME], setting.state[facts.NUM_TAKEN] = outcome, 0
            gpu.sum_tokens[(max(1, num_tokens), 2)](
                *setting.common,
                self.ids.to(device),
                self.weights.to(device),
                setting.both_sets(addresses(messages)),
                setting.both_sets(addresses(lists)),
                ours,
                num_tokens,
                self.hidden,
                messages.stride(1),
                4 * lists.stride(1),
                local_experts,
                self.rows_per_expert,
                USE_LOGFMT=self.use_logfmt,
                CAN_SHRINK=False,
                **setting.blocks,
                NUM_TOPK=num_topk,
                SLOT_BLOCK=max(2, block_of(num_topk)),
                TILE_LIST=8,
                TILE_BLOCKS=2,
                IN_HARDWARE=device != "cpu",
                **casts.OPTIONS,
            )
            if outcome:  # something went wrong before: nothing may be added up
                assert_same(ours, guarded((num_tokens + 1, self.hidden), torch.uint16))
                assert int(setting.state[facts.MISSING_ROW]) == gpu.NO_ROWS_MISSING
            assert [setting.packed(rank, 0) for rank in range(num_ranks)] == [7] * num_ranks
            setting.report[facts.NUM_READ] = setting.report[facts.NUM_REPORTS]
            setting.state[facts.IS_REPORTED] = 0
        found = int(setting.state[facts.MISSING_ROW])
        found = -1 if found == gpu.NO_ROWS_MISSING else found
        assert found == missing
        assert setting.outcome == (outcomes.outcome_of(outcomes.MISSING, 0) if missing >= 0 else 0)
        if missing >= 0:
            token, slot = divmod(missing, num_topk)
            wrong = token << 32 | int(self.ids[token, slot])
            assert int(setting.report[facts.REPORTED_WRONG]) == wrong
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


def assert_wrong_id(setting: Setting, ids: torch.Tensor, place: int) -> None:
    """That the host hears of it."""
    token, column = divmod(place, ids.shape[1])
    words = setting.report
    assert int(words[facts.REPORTED_WRONG]) == token << 32 | column
    assert int(words[facts.REPORTED_VALUE]) == int(ids[token, column])
    assert int(words[facts.REPORTED_EXPERTS]) == setting.num_ranks * setting.local_experts


WRONG_IDS = (-2, -7, 2**40, -(2**63), 2**63 - 1)


def check_returns_for_wrong_ids(device: str) -> None:
    """return_rows, where an id is neither an expert nor -1: the call is refused."""
    for wrong in (4, *WRONG_IDS):
        # More ids than one tile of a list's program holds.
        ids = words([[0, 1], [-1, 3]] * 30)
        ids[41, 1], ids[59, 0] = wrong, 99
        setting = Setting(device, 2, rank=1, local_experts=2)
        setting.put_header([7, 0, 5, 5, 6, 4])
        src_info = torch.zeros(2, 8, dtype=torch.int32)
        messages = guarded((16, 32), torch.uint8).to(device)
        lists = guarded((2, 2, 8), torch.int32).to(device)
        x = torch.zeros(16, 8, dtype=torch.uint16)
        give_back(setting, x, words([[0, 0], [0, 0]]), src_info, messages, lists, ids=ids)
        assert setting.outcome == outcomes.outcome_of(outcomes.BAD_IDS, 1)
        assert [int(setting.note(reader, 1)[1]) for reader in range(2)] == [gpu.BY_IDS] * 2
        finish(setting)
        assert_wrong_id(setting, ids, 41 * 2 + 1)


def check_sending_wrong_ids(device: str) -> None:
    """send_tokens, where an id is neither an expert nor -1: the call is refused, whoever is masked."""
    for wrong, masked in [(4, [0, 0]), (4, [1, 0]), *((value, [0, 0]) for value in WRONG_IDS)]:
        ids = words([[0, 1], [-1, 3], [2, wrong], [99, 0]])
        setting = Setting(device, 2, rank=1, masked=masked, local_experts=2)
        setting.put_header([7, 0, 4, 5, 6, 4])
        messages = guarded((5, message_bytes_of(128)), torch.uint8).to(device)
        lists = guarded((2, 2, 8), torch.int32).to(device)
        gpu.send_tokens[(4 + 4 * 2,)](
            *setting.common,
            rows_of(4, 4, 128).to(device),
            ids.to(device),
            setting.both_sets(torch.full((2,), messages.data_ptr())),
            setting.both_sets(addresses(lists)),
            4,
            128,
            messages.stride(0),
            4 * lists.stride(1),
            2,
            TRAVEL=formats.RAW,
            NUM_TOPK=2,
            SLOT_BLOCK=2,
            NUM_SHARES=2,
            TILE_BLOCKS=4,
            TILE_TOKENS=16,
            **setting.blocks,
            **casts.OPTIONS,
        )
        assert setting.outcome == outcomes.outcome_of(outcomes.BAD_IDS, 1)
        for reader, is_masked in enumerate(masked):
            posted = setting.note(reader, setting.rank)[:3].tolist()
            assert posted == ([0, 0, 0] if is_masked else [7, gpu.BY_IDS, 4])
        finish(setting)
        assert_wrong_id(setting, ids, 5)
        assert [setting.packed(rank, 1) for rank in range(2)] == [7, 7]


CHECKS: tuple[Any, ...] = (
    check_open_call,
    check_masks,
    check_finish_call,
    check_receive_notes,
    check_what_the_host_says,
    check_send_tokens,
    check_lists_of_tokens,
    check_pack_tokens,
    check_return_rows,
    check_handles_that_cannot_be,
    check_sum_tokens,
    check_sum_tokens_of_logfmt,
    check_rows_that_are_missing,
    check_returns_for_wrong_ids,
    check_sending_wrong_ids,
)
