"""Every low-latency kernel does what its docstring's example and a plain reference say, bit for bit.

A check takes a backend: "numba", or the device of Triton's kernels ("cpu" is the interpreter, which is slow
and so gets fewer tokens). All memory is filled with a guard: what a kernel does not write is compared, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from anyep.backends.cpu.kernels import slots as cpu
from anyep.backends.cuda import constants
from anyep.backends.cuda.kernels import groups
from anyep.backends.cuda.kernels.groups import LowLatencyCall, Slots
from anyep.backends.cuda.pinned import pinned_words
from anyep.core import formats, outcomes
from anyep.core.calls import Kind
from anyep.layout import RECORD_HEADER_BYTES, ControlRegion
from anyep.sizes import LOW_LATENCY_HEADER_BYTES, LowLatencySizes
from tests.support.checks.casts import rows_of_blocks, slow_fp8
from tests.support.checks.launching import launch
from tests.support.slow_logfmt import slow_decode, slow_encode

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")
casts = importlib.import_module("anyep.backends.cuda.kernels.casts")
gpu = importlib.import_module("anyep.backends.cuda.kernels.slots")

GUARD = 0x5A
RECORD_WORDS = RECORD_HEADER_BYTES // 8
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
    """What every kernel finds: the control regions of all ranks, this rank's device constants, and a call's
    state."""

    def __init__(
        self,
        device: str,
        num_ranks: int,
        rank: int = 0,
        number: int = 7,
        masked: Iterable[int] = (),
        outcome: int = 0,
        local_experts: int = 1,
        timeout_ns: int = 0,
    ) -> None:
        self.device, self.num_ranks, self.rank, self.number = device, num_ranks, rank, number
        self.region = ControlRegion(num_ranks, num_ranks)
        self.heaps = words([[0] * (self.region.num_bytes // 8)] * num_ranks, device)
        self.table = addresses(self.heaps, device)
        self.report = words([0] * (constants.REPORTED_HEADERS + RECORD_WORDS * num_ranks), device)
        self.generations = words([*masked, *[0] * num_ranks][:num_ranks], device)
        self.state = words([0] * (constants.RANGES + num_ranks * local_experts), device)
        self.state[constants.NUMBER], self.state[constants.OUTCOME] = number, outcome
        self.state[constants.MISSING_ROW] = gpu.NO_ROWS_MISSING
        self.state[constants.WRONG_PLACE] = gpu.NO_ROWS_MISSING
        self.local_experts = local_experts
        record, packed = (
            self.region.blocks.record,
            self.region.blocks.packed,
        )
        mask = self.region.blocks.mask
        here = [0] * constants.NUM_LOW_LATENCY_CONSTANTS
        here[constants.RANK], here[constants.OWN_HEAP] = rank, self.heaps[rank].data_ptr()
        here[constants.TIMEOUT_NS] = timeout_ns
        here[constants.ABORT_AT] = self.region.blocks.abort.start
        here[constants.GIVEN_UP_AT] = self.region.blocks.given_up.start
        here[constants.FLAG_STRIDE] = packed.stride
        here[constants.REPORT] = self.report.data_ptr()
        here[constants.CALLS_AT] = self.region.blocks.status.start + 8
        here[constants.RECORD_AT], here[constants.RECORD_STRIDE] = record.start, record.stride
        here[constants.RECORD_SET_STRIDE] = record.offset(0, 1) - record.start
        here[constants.PACKED_AT] = packed.start
        here[constants.PACKED_SET_STRIDE] = packed.offset(0, 1) - packed.start
        here[constants.MASK_AT], here[constants.MASK_STRIDE] = mask.start, mask.stride
        self.constants = words(here, device)
        self.decoy = guarded((1 << 12,), torch.uint8).to(device)

    @property
    def call(self) -> LowLatencyCall:
        """The argument that every kernel begins with."""
        return LowLatencyCall(self.constants, self.table, self.generations, self.state)

    def slots(
        self, messages: torch.Tensor, lists: torch.Tensor, message_bytes: int, rows_per_expert: int
    ) -> Slots:
        """Where the messages of all ranks (their addresses) and their lists lie."""
        tables = self.both_sets(messages), self.both_sets(addresses(lists))
        return Slots(*tables, message_bytes, 4 * lists.stride(1), self.local_experts, rows_per_expert)

    @property
    def blocks(self) -> dict[str, int]:
        return {"NUM_RANKS": self.num_ranks, "RANK_BLOCK": max(2, block_of(self.num_ranks))}

    def both_sets(self, of_this_call: torch.Tensor) -> torch.Tensor:
        """A table of addresses whose other set leads astray."""
        other = torch.full_like(of_this_call, self.decoy.data_ptr())
        sets = [of_this_call, other] if self.number % 2 == 0 else [other, of_this_call]
        return torch.cat(sets).to(self.device)

    def record(self, reader: int, sender: int) -> torch.Tensor:
        """A sender's completion record at a reader."""
        offset = self.region.blocks.record.offset(sender, self.number % 2) // 8
        return self.heaps[reader, offset : offset + RECORD_WORDS + self.local_experts]

    def word(self, rank: int, block: str, writer: int, slot_set: int = 0, index: int = 0) -> torch.Tensor:
        return self.heaps[rank, getattr(self.region.blocks, block).offset(writer, slot_set) // 8 + index]

    def packed(self, rank: int, writer: int) -> int:
        """What a rank was told about the set of this call."""
        return int(self.word(rank, "packed", writer, self.number % 2))

    @property
    def outcome(self) -> int:
        return int(self.state[constants.OUTCOME])

    def put_header(self, header: list[int]) -> None:
        self.state[constants.RECORD_HEADER : constants.RECORD_HEADER + len(header)] = words(
            header, self.device
        )

    def guard_ranges(self) -> None:
        """In the completion records of this rank at its readers."""
        for reader in range(self.num_ranks):
            self.record(reader, self.rank)[RECORD_WORDS:] = GUARD


# What all calls have


def open_call(setting: Setting, can_shrink: bool = False, **how: bool) -> None:
    launch(
        *(gpu.open_call, setting.device, 1, setting.call),
        *(int(Kind.LOW_LATENCY_DISPATCH), 8, 128, 4, formats.FP8, 0),
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
        setting.word(1, "packed", writer, 1).fill_(5)
    open_call(setting, posts=True)
    assert setting.outcome == 0
    assert int(setting.word(1, "status", 0, index=1)) == 7
    header = [7, 0, int(Kind.LOW_LATENCY_DISPATCH), 8, 128, 4, formats.FP8, 0]
    for reader in range(2):
        assert setting.record(reader, 1)[:RECORD_WORDS].tolist() == header
        assert not setting.record(reader, 0).any()
    # The set of even calls is not known to be free.
    setting = Setting(device, 2, rank=1)
    setting.word(1, "status", 0, index=1).fill_(7)
    setting.word(1, "packed", 0, 0).fill_(6)
    setting.word(1, "packed", 1, 0).fill_(4)
    open_call(setting, advances=False)
    assert setting.outcome == outcomes.outcome_of(outcomes.LATE, 1)
    assert int(setting.word(1, "status", 0, index=1)) == 7
    assert setting.report[: constants.REPORTED_WAIT + 1].tolist() == [
        *(1, 0, setting.outcome, 8, 0, Kind.LOW_LATENCY_DISPATCH, constants.PACKED_AT)
    ]
    assert int(setting.word(0, "abort", 0)) == 2
    # The first two calls of a round need no telling.
    for before, expected in ((3 << 32, 0), ((3 << 32) + 1, 0), ((3 << 32) + 2, 1)):
        setting = Setting(device, 2)
        setting.word(0, "status", 0, index=1).fill_(before)
        open_call(setting)
        assert outcomes.code_of(setting.outcome) == expected
    # The example: rank 2 has given up before.
    for can_shrink in (False, True):
        setting = Setting(device, 3, rank=2)
        setting.word(2, "given_up", 2).fill_(1)
        open_call(setting, can_shrink=can_shrink, posts=True)
        assert setting.outcome == outcomes.outcome_of(outcomes.OUT, 2) == 8 + 16 * 2
        finish(setting, can_shrink=can_shrink)
        assert not any(setting.packed(reader, 2) for reader in range(3))
        assert not any(setting.record(reader, slot_set).any() for reader in range(3) for slot_set in range(2))


def check_masks(device: str) -> None:
    # Rank 1 does not come, and is masked in round 3; everyone hears of it.
    setting = Setting(device, 3, number=0)
    setting.word(0, "status", 0, index=1).fill_((3 << 32) + 6)
    for writer in (0, 2):
        setting.word(0, "packed", writer, 1).fill_((3 << 32) + 5)
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
    assert not setting.heaps[1, setting.region.blocks.record.start // 8 :].eq(2).any()
    finish(setting, can_shrink=True)
    assert setting.packed(0, 2) == 0
    setting = Setting(device, 2)
    launch(gpu.mask_rank, device, 1, setting.constants, setting.table, 1, 3, **setting.blocks, num_warps=1)
    assert [int(setting.word(rank, "mask", 0, index=1)) for rank in range(2)] == [3, 3]


def finish(setting: Setting, can_shrink: bool = False) -> None:
    launch(
        *(gpu.finish_call, setting.device, 1, setting.call),
        CAN_SHRINK=can_shrink,
        **setting.blocks,
        num_warps=1,
    )


def check_finish_call(device: str) -> None:
    out = (outcomes.LATE, outcomes.STOPPED, outcomes.MASKED, outcomes.OUT)
    for code in (outcomes.GOOD, outcomes.DIFFERENT, *out):
        told = 0 if code in out else 7
        setting = Setting(device, 2, rank=1, outcome=code)
        finish(setting)
        assert [setting.packed(rank, 1) for rank in range(2)] == [told, told]
        assert [setting.packed(rank, 0) for rank in range(2)] == [0, 0]
        assert int(setting.report[constants.NUM_REPORTS]) == int(code != 0)


def receive(setting: Setting, stats: torch.Tensor | None = None, can_shrink: bool = False) -> None:
    launch(
        *(gpu.receive_records, setting.device, 1, setting.call),
        setting.state if stats is None else stats,
        setting.local_experts,
        HAS_STATS=stats is not None,
        CAN_SHRINK=can_shrink,
        **setting.blocks,
        TILE_EXPERTS=4,
        num_warps=1,
    )


def check_receive_record(device: str) -> None:
    for num_ranks, local_experts, masked in ((2, 1, []), (3, 5, [0, 1]), (1, 4, [])):
        setting = Setting(device, num_ranks, masked=masked, local_experts=local_experts)
        setting.put_header([7, 0, 4, 9])
        right = torch.zeros(num_ranks, local_experts, dtype=torch.int64)
        for sender in range(num_ranks):
            if not int(setting.generations[sender]):
                setting.record(0, sender)[:4] = words([7, 0, 4, 9], device)
                right[sender] = sender << 32 | torch.arange(local_experts)
                setting.record(0, sender)[RECORD_WORDS:] = right[sender].to(device)
        stats = words([5] * num_ranks, device)
        receive(setting, stats)
        assert setting.outcome == 0
        assert_same(setting.state[constants.RANGES :].view_as(right), right)
        assert (stats >= 5).all()
    # They disagree; the second call that goes wrong is not reported before the first was heard.
    setting = Setting(device, 3)
    setting.put_header([7, 0, 4])
    for sender, word in ((0, 4), (1, 4), (2, 5)):
        setting.record(0, sender)[:3] = words([7, 0, word], device)
    for _ in range(2):
        setting.state[constants.OUTCOME] = setting.state[constants.IS_REPORTED] = 0
        receive(setting)
        assert setting.outcome == outcomes.outcome_of(outcomes.DIFFERENT, 2)
    assert setting.report[: constants.NUM_READ + 1].tolist() == [1, 0]
    headers = setting.report[constants.REPORTED_HEADERS :].view(3, RECORD_WORDS)[:, :3]
    assert headers.tolist() == [[7, 0, 4], [7, 0, 4], [7, 0, 5]]
    # One is late; or the call went wrong before, and nobody is waited for.
    setting = Setting(device, 2, rank=1)
    setting.put_header([7])
    setting.record(1, 1)[0] = 7
    receive(setting)
    assert setting.outcome == outcomes.outcome_of(outcomes.LATE, 0)
    setting = Setting(device, 2, outcome=outcomes.BAD_HANDLE, timeout_ns=10**11)
    receive(setting)
    assert setting.outcome == outcomes.BAD_HANDLE
    # Or it is masked.
    setting = Setting(device, 2, rank=1)
    setting.put_header([7])
    setting.record(1, 1)[0] = 7
    receive(setting, can_shrink=True)
    assert setting.outcome == 0
    assert setting.generations.tolist() == [1, 0]


def check_what_the_host_says(device: str) -> None:
    """Who waits long enough is told by the host, too."""
    for can_shrink, block, index, value, generations in (
        (False, "abort", 1, 1, [0, 0]),
        # Rank 0 is gone, and masked for it; or the host was told that it is masked, in round 1.
        (True, "given_up", 0, 1, [1, 0]),
        (True, "mask", 0, 3, [3, 0]),
        # This rank itself has given up: it masks nobody.
        (True, "given_up", 16, 1, [0, 0]),
    ):
        setting = Setting(device, 2, rank=1, timeout_ns=10**11)
        host = pinned_words(setting.region.num_bytes // 8)
        setting.constants[constants.AT_HOST] = int(host.ctypes.data)
        abort_at = setting.region.blocks.abort.start + 8
        setting.word(1, "abort", 0, index=1).fill_(int(host.ctypes.data) + abort_at)
        host[getattr(setting.region.blocks, block).start // 8 + index] = value
        setting.put_header([7])
        setting.record(1, 1)[0] = 7
        receive(setting, can_shrink=can_shrink)
        assert setting.outcome == (0 if any(generations) else outcomes.outcome_of(outcomes.STOPPED, 0))
        assert setting.generations.tolist() == generations


# The plain reference


class Sent(NamedTuple):
    """What a rank leaves for its readers: in its messages, and in the lists and ranges of each reader."""

    messages: torch.Tensor
    lists: torch.Tensor
    ranges: torch.Tensor


def assert_all_same(ours: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> None:
    for mine, expected in zip(ours, right, strict=True):
        assert_same(mine, expected)


@dataclass(frozen=True)
class Send:
    """What a dispatch sends. The sender is the last rank."""

    ids: torch.Tensor
    local_experts: int
    hidden: int
    travel: int
    masked: list[int]
    number: int = 7

    @property
    def num_experts(self) -> int:
        return len(self.masked) * self.local_experts

    @property
    def x(self) -> torch.Tensor:
        return rows_of(len(self.ids), len(self.ids), self.hidden)

    def untouched(self) -> Sent:
        num_tokens, num_ranks = len(self.ids), len(self.masked)
        return Sent(
            guarded((num_tokens + 1, message_bytes_of(self.hidden)), torch.uint8),
            guarded((num_ranks, self.local_experts, num_tokens + 4 - num_tokens % 4), torch.int32),
            guarded((num_ranks, self.local_experts), torch.int64),
        )

    def right(self) -> Sent:
        sent, x = self.untouched(), self.x
        payloads = x.view(torch.uint8)
        if self.travel != formats.RAW:
            how = self.travel != formats.FP8, self.travel == formats.FP8_UE8M0
            parts = [torch.from_numpy(part).view(torch.uint8) for part in slow_fp8(x.numpy(), *how)]
            payloads = torch.cat(parts, 1)
        goes_anywhere = ((self.ids >= 0) & (self.ids < self.num_experts)).any(1)
        for token in goes_anywhere.nonzero().flatten().tolist():
            sent.messages[token, LOW_LATENCY_HEADER_BYTES:][: payloads.shape[1]] = payloads[token]
        for expert in range(self.num_experts):
            reader, local = divmod(expert, self.local_experts)
            if not self.masked[reader]:
                tokens = (self.ids == expert).any(1).nonzero().flatten()
                sent.lists[reader, local, : len(tokens)] = tokens.int()
                sent.ranges[reader, local] = len(tokens)
        return sent


class Packed(NamedTuple):
    x: torch.Tensor
    scales: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor
    counts: torch.Tensor
    stats: torch.Tensor


@dataclass(frozen=True)
class Pack:
    """What a dispatch receives: by sender and expert the number of rows, and the list of their tokens."""

    counts: torch.Tensor
    lists: torch.Tensor
    max_tokens: int
    row_bytes: int
    num_scale_words: int = 0
    with_stats: bool = True

    @property
    def messages(self) -> torch.Tensor:
        num_bytes = LOW_LATENCY_HEADER_BYTES + self.row_bytes + 4 * self.num_scale_words
        shape = (len(self.counts), self.max_tokens, num_bytes + -num_bytes % 16)
        random = np.random.default_rng(self.row_bytes)
        return torch.from_numpy(random.integers(0, 256, shape).astype(np.uint8))

    def untouched(self) -> Packed:
        num_senders, num_experts = self.counts.shape
        rows = num_senders * self.max_tokens
        return Packed(
            guarded((num_experts, rows, self.row_bytes // 4), torch.int32),
            guarded((num_experts, self.num_scale_words, rows), torch.int32),
            guarded((num_experts, rows), torch.int32),
            guarded((num_experts, num_senders), torch.int64),
            guarded((num_experts,), torch.int32),
            guarded((num_experts if self.with_stats else 0,), torch.int32),
        )

    def right(self) -> Packed:
        packed = self.untouched()
        words = self.messages[:, :, LOW_LATENCY_HEADER_BYTES:].contiguous().view(torch.int32)
        row_words = self.row_bytes // 4
        for expert, of_senders in enumerate(self.counts.t().tolist()):
            row = 0
            for sender, count in enumerate(of_senders):
                packed.layout_range[expert, sender] = row << 32 | count
                # What is outside, as in a list that is written over, is brought inside.
                for token in self.lists[sender, expert, :count].clamp(0, self.max_tokens - 1).tolist():
                    message = words[sender, token]
                    packed.x[expert, row] = message[:row_words]
                    packed.scales[expert, :, row] = message[row_words:][: self.num_scale_words]
                    packed.src_info[expert, row] = token
                    row += 1
            packed.counts[expert] = row
            packed.stats[expert : expert + 1] += row
        return packed


@dataclass(frozen=True)
class Return:
    """What a combine returns, of a handle. The rank that returns it is the last one."""

    layout_range: torch.Tensor
    src_info: torch.Tensor
    hidden: int
    use_logfmt: bool
    masked: list[int]
    number: int = 7

    @property
    def x(self) -> torch.Tensor:
        return rows_of(self.hidden, self.src_info.numel(), self.hidden)

    def untouched(self) -> Sent:
        (num_experts, rows_per_expert), num_ranks = self.src_info.shape, len(self.masked)
        return Sent(
            guarded((self.src_info.numel() + 1, message_bytes_of(self.hidden)), torch.uint8),
            guarded((num_ranks, num_experts, rows_per_expert), torch.int32),
            guarded((num_ranks, num_experts), torch.int64),
        )

    def right(self) -> Sent:
        sent, x, rows_per_expert = self.untouched(), self.x, self.src_info.shape[1]
        for expert, ranges in enumerate(self.layout_range.tolist()):
            for reader, both in enumerate(ranges):
                begin, count = both >> 32, both & 0xFFFFFFFF
                for row in range(expert * rows_per_expert + begin, expert * rows_per_expert + begin + count):
                    put_row(sent.messages[row], x[row], self.use_logfmt)
                if not self.masked[reader]:
                    sent.lists[reader, expert, :count] = self.src_info[expert, begin : begin + count]
                    sent.ranges[reader, expert] = both
        return sent


def put_row(message: torch.Tensor, row: torch.Tensor, use_logfmt: bool) -> None:
    """A row of bf16 into the message that it is returned in."""
    if use_logfmt:
        encoded = torch.frombuffer(bytearray(slow_encode(row.numpy())), dtype=torch.uint8)
        message[: len(encoded)] = encoded
    else:
        message[LOW_LATENCY_HEADER_BYTES:][: 2 * len(row)] = row.view(torch.uint8)


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
        self.rows = torch.stack([rows_of(rank, num_rows, hidden) for rank in range(num_ranks)])
        self.weights = torch.from_numpy(random.normal(0, 2, ids.shape).astype(np.float32))
        self.weights[ids < 0] = torch.inf  # weights of entries that select no expert must not be read
        self.weights.view(-1)[::5] = -0.0

    @property
    def messages(self) -> torch.Tensor:
        messages = guarded((*self.rows.shape[:2], message_bytes_of(self.hidden)), torch.uint8)
        for message, row in zip(messages.flatten(0, 1), self.rows.flatten(0, 1), strict=True):
            put_row(message, row, self.use_logfmt)
        return messages

    def untouched(self) -> torch.Tensor:
        return guarded((len(self.ids) + 1, self.hidden), torch.uint16)

    def right(self, masked: list[int]) -> tuple[torch.Tensor, int]:
        """The sums, and the first row that is missing; beyond that token nothing is said about them."""
        local_experts = self.ranges.shape[1]
        out = self.untouched()
        for token, choices in enumerate(self.ids.tolist()):
            total = torch.zeros(self.hidden)
            for slot, expert in enumerate(choices):
                rank, local = divmod(expert, local_experts)
                if not 0 <= expert < self.ranges.numel() or masked[rank]:
                    continue
                begin, count = divmod(int(self.ranges[rank, local]), 1 << 32)
                listed = self.lists[rank, local, :count].tolist()
                if token not in listed:
                    return out, token * len(choices) + slot
                row = self.rows[rank, local * self.rows_per_expert + begin + listed.index(token)]
                values = row.view(torch.bfloat16).float()
                if self.use_logfmt:
                    values = torch.from_numpy(slow_decode(slow_encode(row.numpy()), self.hidden))
                total = total + values * self.weights[token, slot]
            bits = total.bfloat16().view(torch.int16)
            out[token] = torch.where(total.isnan(), 0x7FC0, bits).to(torch.int16).view(torch.uint16)
        return out, -1

    def check(self, backend: str, masked: list[int]) -> tuple[torch.Tensor, int]:
        """That a backend gives what is right; and that."""
        right, missing = self.right(masked)
        num_compared = len(self.ids) if missing < 0 else missing // self.ids.shape[1]
        for kernels in kernels_of(backend):
            ours, found = kernels.add_up(self, masked)
            assert found == missing
            assert_same(ours[:num_compared], right[:num_compared])
            assert_same(ours[-1], right[-1])
        return right, missing


# The backends


@dataclass(frozen=True)
class Numba:
    streaming: bool = False
    """Whether rows pass by the caches."""

    def send(self, call: Send, tokens: range | None = None) -> Sent:
        sent, x, ids = call.untouched(), call.x, call.ids.numpy()
        tokens = range(len(ids)) if tokens is None else tokens
        messages = sent.messages.data_ptr(), sent.messages.stride(0)
        kind = call.hidden, call.travel
        cpu.send_tokens(tokens.start, tokens.stop, x.data_ptr(), *kind, ids, call.num_experts, *messages)
        records, counts = new_record(*sent.ranges.shape), np.full(call.num_experts, -9, np.int64)
        places = addresses(sent.lists).numpy(), strides(sent.lists), addresses(records).numpy()
        cpu.list_tokens(ids, *places, masks(call.masked), counts)
        assert (records[:, :RECORD_WORDS] == GUARD).all()
        ranges = records[:, RECORD_WORDS:]
        is_masked = torch.tensor(call.masked, dtype=torch.bool)[:, None]
        assert counts.tolist() == torch.where(is_masked, 0, ranges).flatten().tolist()
        return sent._replace(ranges=ranges)

    def pack(self, call: Pack, experts: range | None = None) -> Packed:
        packed, messages = call.untouched(), call.messages
        experts = range(call.counts.shape[1]) if experts is None else experts
        cpu.pack_tokens(
            *(experts.start, experts.stop, call.counts.numpy()),
            *(addresses(call.lists).numpy(), strides(call.lists)),
            *(addresses(messages).numpy(), messages.stride(1)),
            *(call.row_bytes, call.num_scale_words, int(self.streaming)),
            *(packed.x.data_ptr(), packed.scales.data_ptr()),
            *(part.numpy() for part in packed[2:]),
        )
        return packed

    def give_back(self, call: Return, experts: range | None = None) -> Sent:
        sent, x, (num_experts, rows_per_expert) = call.untouched(), call.x, call.src_info.shape
        experts = range(num_experts) if experts is None else experts
        layout_range = call.layout_range.numpy()
        cpu.stage_rows(
            *(experts.start, experts.stop, x.data_ptr(), call.hidden, layout_range, rows_per_expert),
            *(int(call.use_logfmt), int(self.streaming), sent.messages.data_ptr(), sent.messages.stride(0)),
        )
        records = new_record(*sent.ranges.shape)
        places = addresses(sent.lists).numpy(), strides(sent.lists), addresses(records).numpy()
        cpu.list_returns(call.src_info.numpy(), layout_range, *places, masks(call.masked))
        assert (records[:, :RECORD_WORDS] == GUARD).all()
        return sent._replace(ranges=records[:, RECORD_WORDS:])

    def add_up(
        self, returned: Returned, masked: list[int], tokens: range | None = None
    ) -> tuple[torch.Tensor, int]:
        out, messages = returned.untouched(), returned.messages
        tokens = range(len(returned.ids)) if tokens is None else tokens
        missing = cpu.sum_tokens(
            *(tokens.start, tokens.stop, returned.ids.numpy(), returned.weights.numpy()),
            *(returned.ranges.numpy(), addresses(returned.lists).numpy(), strides(returned.lists)),
            *(addresses(messages).numpy(), messages.stride(1), returned.rows_per_expert, masks(masked)),
            *(int(returned.use_logfmt), out.data_ptr(), returned.hidden),
        )
        return out, int(missing)


def new_record(num_ranks: int, local_experts: int) -> torch.Tensor:
    return guarded((num_ranks, RECORD_WORDS + local_experts), torch.int64)


@dataclass(frozen=True)
class Triton:
    """Beside what the CPU's kernels do, these close a call, and do nothing after something went wrong."""

    device: str

    def there(self, parts: Any) -> Any:
        return type(parts)(*(part.to(self.device, copy=True) for part in parts))

    def setting(self, call: Send | Return, num_experts: int) -> Setting:
        rank, local = len(call.masked) - 1, num_experts
        return Setting(self.device, rank + 1, rank, call.number, call.masked, local_experts=local)

    def sent(self, setting: Setting, sent: Sent) -> Sent:
        """With the ranges out of the completion records, which only readers that are not masked have got."""
        readers = range(setting.num_ranks)
        records = torch.stack([setting.record(reader, setting.rank) for reader in readers]).cpu()
        header = setting.state[constants.RECORD_HEADER :][:4].tolist()
        is_masked = [int(generation) % 2 for generation in setting.generations]
        assert records[:, :4].tolist() == [[0] * 4 if masked else header for masked in is_masked]
        assert (setting.decoy == GUARD).all()
        return Sent(sent.messages.cpu(), sent.lists.cpu(), records[:, RECORD_WORDS:])

    def send(self, call: Send) -> Sent:
        setting = self.setting(call, call.local_experts)
        setting.put_header([call.number, 0, 4, 5])
        setting.guard_ranges()
        sent = self.there(call.untouched())
        for outcome in (outcomes.LATE, 0):
            setting.state[constants.OUTCOME], setting.state[constants.NUM_SENT] = outcome, 0
            send_tokens(setting, call.x, call.ids, sent.messages, sent.lists, call.travel)
            if outcome:  # something went wrong before: nothing may be sent
                assert (sent.messages == GUARD).all()
                assert not setting.record(0, setting.rank)[:RECORD_WORDS].any()
        return self.sent(setting, sent)

    def pack(self, call: Pack) -> Packed:
        num_senders, num_experts = call.counts.shape
        packed = self.there(call.untouched())
        lists, messages = call.lists.to(self.device), call.messages.to(self.device)
        setting = Setting(self.device, num_senders, local_experts=num_experts)
        setting.state[constants.RANGES :] = call.counts.flatten().to(self.device)
        for outcome in (outcomes.STOPPED, 0):
            setting.state[constants.OUTCOME], setting.state[constants.NUM_TAKEN] = outcome, 0
            launch(
                *(gpu.pack_tokens, self.device, (num_experts, num_senders, 2), setting.call),
                setting.slots(addresses(messages), lists, messages.stride(1), num_senders * call.max_tokens),
                groups.Packed(
                    packed.x,
                    packed.scales if call.num_scale_words else setting.state,
                    *packed[2:5],
                    packed.stats if call.with_stats else setting.state,
                ),
                *(call.row_bytes // 4, call.num_scale_words),
                HAS_SCALES=call.num_scale_words > 0,
                HAS_STATS=call.with_stats,
                CAN_SHRINK=False,
                **setting.blocks,
                TILE_ROWS=2,
                TILE_WORDS=64,
                TILE_SCALES=4,
            )
            if outcome:  # something went wrong before: nothing may be taken
                assert all((part == GUARD).all() for part in packed)
                assert setting.packed(0, 0) == 0
        assert [setting.packed(rank, 0) for rank in range(num_senders)] == [7] * num_senders
        return packed

    def give_back(self, call: Return) -> Sent:
        setting = self.setting(call, len(call.src_info))
        setting.put_header([call.number])
        setting.guard_ranges()
        sent = self.there(call.untouched())
        return_rows(setting, call.x, call.layout_range, call.src_info, sent, call.use_logfmt)
        assert setting.outcome == 0
        return self.sent(setting, sent)

    def add_up(self, returned: Returned, masked: list[int]) -> tuple[torch.Tensor, int]:
        num_tokens, num_topk = returned.ids.shape
        num_ranks, local_experts = returned.ranges.shape
        lists, messages = returned.lists.to(self.device), returned.messages.to(self.device)
        out = returned.untouched().to(self.device)
        setting = Setting(self.device, num_ranks, masked=masked, local_experts=local_experts)
        setting.state[constants.RANGES :] = returned.ranges.flatten().to(self.device)
        for outcome in (outcomes.DIFFERENT, 0):
            setting.state[constants.OUTCOME], setting.state[constants.NUM_TAKEN] = outcome, 0
            launch(
                *(gpu.sum_tokens, self.device, (max(1, num_tokens), 2), setting.call),
                setting.slots(addresses(messages), lists, messages.stride(1), returned.rows_per_expert),
                *(returned.ids.to(self.device), returned.weights.to(self.device), out),
                *(num_tokens, returned.hidden),
                USE_LOGFMT=returned.use_logfmt,
                CAN_SHRINK=False,
                **setting.blocks,
                NUM_TOPK=num_topk,
                TOPK_BLOCK=max(2, block_of(num_topk)),
                TILE_LIST=8,
                TILE_BLOCKS=2,
                IN_HARDWARE=self.device != "cpu",
            )
            if outcome:  # something went wrong before: nothing may be added up
                assert_same(out, returned.untouched())
                assert int(setting.state[constants.MISSING_ROW]) == gpu.NO_ROWS_MISSING
            assert [setting.packed(rank, 0) for rank in range(num_ranks)] == [7] * num_ranks
            setting.report[constants.NUM_READ] = setting.report[constants.NUM_REPORTS]
            setting.state[constants.IS_REPORTED] = 0
        found = int(setting.state[constants.MISSING_ROW])
        missing = -1 if found == gpu.NO_ROWS_MISSING else found
        assert setting.outcome == (outcomes.outcome_of(outcomes.MISSING, 0) if missing >= 0 else 0)
        if missing >= 0:
            token, slot = divmod(missing, num_topk)
            wrong = token << 32 | int(returned.ids[token, slot])
            assert int(setting.report[constants.REPORTED_WRONG]) == wrong
        return out.cpu(), missing


def send_tokens(
    setting: Setting,
    x: torch.Tensor,
    ids: torch.Tensor,
    messages: torch.Tensor,
    lists: torch.Tensor,
    travel: int = formats.RAW,
) -> None:
    num_shares, num_experts = 2, setting.num_ranks * setting.local_experts
    (num_tokens, num_topk), hidden = ids.shape, x.shape[1]
    own = torch.full((setting.num_ranks,), messages.data_ptr())
    launch(
        *(gpu.send_tokens, setting.device, num_experts + num_tokens * num_shares, setting.call),
        setting.slots(own, lists, messages.stride(0), setting.num_ranks * num_tokens),
        *(x.to(setting.device), ids.to(setting.device), num_tokens, hidden),
        TRAVEL=travel,
        NUM_TOPK=num_topk,
        TOPK_BLOCK=max(2, block_of(num_topk)),
        NUM_SHARES=num_shares,
        TILE_BLOCKS=4,
        TILE_TOKENS=16,
        **setting.blocks,
    )


def return_rows(
    setting: Setting,
    x: torch.Tensor,
    layout_range: torch.Tensor,
    src_info: torch.Tensor,
    sent: Sent,
    use_logfmt: bool = False,
    ids: torch.Tensor | None = None,
) -> None:
    num_experts, rows_per_expert = src_info.shape
    ids = words([[0, -1]]) if ids is None else ids
    messages, lists = sent.messages, sent.lists
    own = torch.full((setting.num_ranks,), messages.data_ptr())
    launch(
        *(gpu.return_rows, setting.device, num_experts * (setting.num_ranks + 3), setting.call),
        setting.slots(own, lists, messages.stride(0), rows_per_expert),
        *(part.to(setting.device) for part in (x, ids, src_info, layout_range)),
        *(ids.numel(), x.shape[1]),
        USE_LOGFMT=use_logfmt,
        NUM_TOPK=ids.shape[1],
        NUM_SHARES=3,
        TILE_BLOCKS=4,
        TILE_ROWS=8,
        **setting.blocks,
    )


def kernels_of(backend: str) -> list[Any]:
    return [Numba(), Numba(streaming=True)] if backend == "numba" else [Triton(backend)]


# Dispatch


def assert_send(backend: str, call: Send) -> Sent:
    """Check a backend against the reference; return the reference."""
    right = call.right()
    assert_all_same(kernels_of(backend)[0].send(call), right)
    return right


def check_send_tokens(backend: str) -> None:
    example = Send(words([[1, 0], [-1, 1]]), 1, 128, formats.RAW, [0, 0], number=6)
    messages, lists, ranges = assert_send(backend, example)
    assert (messages[:, :LOW_LATENCY_HEADER_BYTES] == GUARD).all()
    assert_same(messages[:2, LOW_LATENCY_HEADER_BYTES:], rows_of(2, 2, 128))
    assert lists[0, 0, :2].tolist() == [0, GUARD]
    assert lists[1, 0, :3].tolist() == [0, 1, GUARD]
    assert ranges.tolist() == [[1], [2]]
    # Of these only the third goes anywhere.
    nowhere = words([[-1, -1], [-1, -1], [-1, 1], [-1, -1]])
    for travel in (formats.RAW, *FP8_FORMATS):
        messages, _, _ = assert_send(backend, Send(nowhere, 1, 512, travel, [0, 0]))
        assert (messages[[0, 1, 3]] == GUARD).all()
        assert not (messages[2] == GUARD).all()
    num_tokens = 200 if backend == "cuda" else 6
    for hidden in (8, 72, 768, 1152):
        assert_send(backend, Send(routing(num_tokens, 3, 6, hidden), 3, hidden, formats.RAW, [0, 0]))
    for travel in FP8_FORMATS:
        for hidden in (512, 1536):
            assert_send(backend, Send(routing(num_tokens, 2, 4, hidden), 2, hidden, travel, [0, 0]))
    assert_send(backend, Send(words([[]]).view(0, 1), 2, 128, formats.RAW, [0, 0]))


def check_lists_of_tokens(backend: str) -> None:
    # Chosen twice, also with another expert between; and token 2 is not taken for the one before it.
    twice = assert_send(backend, Send(words([[0, 0, 1], [1, 0, 1], [1, 1, 1]]), 2, 8, formats.RAW, [0]))
    assert twice.ranges.tolist() == [[2, 3]]
    sizes = [(37, 3, 2), (16, 8, 1), (1, 1, 3), (0, 2, 2)]
    for seed, (num_tokens, num_topk, local_experts) in enumerate(
        [*sizes, (999, 8, 32)] if backend == "cuda" else sizes
    ):
        for masked in ([0, 0, 0], [0, 1, 0], [1, 1, 0]):
            ids = routing(num_tokens, num_topk, len(masked) * local_experts, seed)
            assert_send(backend, Send(ids, local_experts, 8, formats.RAW, masked, number=seed))


def assert_pack(backend: str, call: Pack) -> Packed:
    """Check a backend against the reference; return the reference."""
    right = call.right()
    for kernels in kernels_of(backend):
        assert_all_same(kernels.pack(call), right)
    return right


def check_pack_tokens(backend: str) -> None:
    lists = guarded((2, 1, 4), torch.int32)
    lists[0, 0, :2], lists[1, 0, :1] = torch.tensor([0, 3]), torch.tensor([1])
    packed = assert_pack(backend, Pack(words([[2], [1]]), lists, 4, 128))
    assert packed.src_info[0, :4].tolist() == [0, 3, 1, GUARD]
    assert packed.layout_range.tolist() == [[2, SECOND_OF_TWO]]
    assert packed.counts.tolist() == [3]
    assert packed.stats.tolist() == [GUARD + 3]
    random = np.random.default_rng(2)
    max_tokens = 150 if backend == "cuda" else 9
    for num_senders, num_experts, row_bytes, num_scale_words in (
        (2, 3, 16, 0),
        (3, 2, 528, 0),
        (3, 1, 512, 4),
        (1, 2, 1152, 9),
        (4, 2, 512, 1),
    ):
        counts = random.integers(0, max_tokens + 1, (num_senders, num_experts))
        counts[0, 0], counts[-1, -1] = max_tokens, 0
        listed = random.integers(-2, max_tokens + 2, (num_senders, num_experts, max_tokens))
        tables = torch.from_numpy(counts), torch.from_numpy(listed.astype(np.int32))
        assert_pack(backend, Pack(*tables, max_tokens, row_bytes, num_scale_words, num_senders != 1))


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


def assert_return(backend: str, call: Return) -> Sent:
    """Check a backend against the reference; return the reference."""
    right = call.right()
    for kernels in kernels_of(backend):
        assert_all_same(kernels.give_back(call), right)
    return right


def check_return_rows(backend: str) -> None:
    src_info = torch.tensor([[0, 3, 1, 0, 0, 0, 0, 0]], dtype=torch.int32)
    example = Return(words([[2, SECOND_OF_TWO]]), src_info, 64, False, [0, 0], number=6)
    messages, lists, ranges = assert_return(backend, example)
    assert_same(messages[:3, LOW_LATENCY_HEADER_BYTES:], example.x[:3])
    assert (messages[3:] == GUARD).all()
    assert lists[0, 0, :3].tolist() == [0, 3, GUARD]
    assert lists[1, 0, :3].tolist() == [1, GUARD, GUARD]
    assert ranges.tolist() == [[2], [SECOND_OF_TWO]]
    counts = (
        [[90, 0, 1], [0, 0, 0], [70, 99, 100]] if backend == "cuda" else [[3, 0, 1], [0, 0, 0], [2, 3, 3]]
    )
    max_tokens = 100 if backend == "cuda" else 3
    for hidden in (8, 72, 1152):
        assert_return(backend, Return(*handle_of(counts, max_tokens), hidden, False, [0, 0, 0]))
    for hidden in (128, 768, 2048):
        assert_return(backend, Return(*handle_of(counts, max_tokens), hidden, True, [0, 1, 0]))
    random = np.random.default_rng(5)
    for max_tokens in (4, 21):
        counts = random.integers(0, max_tokens + 1, (2, 3))
        counts[0, 1] = 0
        for masked in ([0, 0, 0], [1, 0, 0]):
            assert_return(backend, Return(*handle_of(counts.tolist(), max_tokens), 8, False, masked))


HANDLES: tuple[tuple[list[list[int]], list[list[int]], int], ...] = (
    ([[2, SECOND_OF_TWO]], [[0, 3, 1]], 3),
    ([[2, SECOND_OF_TWO]], [[3, 0, 1]], -3),
    ([[2, SECOND_OF_TWO]], [[0, 0, 1]], -3),
    ([[2, SECOND_OF_TWO]], [[-1, 3, 1]], -3),
    ([[2, SECOND_OF_TWO]], [[0, 4, 1]], -3),
    ([[2, 1 << 32 | 1]], [[0, 3, 1]], -1),
    ([[2, 3 << 32 | 1]], [[0, 3, 1]], -1),
    ([[1 << 32 | 2, 3 << 32]], [[0, 3, 1]], -1),
    ([[-1 << 32 | 2, 1]], [[0, 3, 1]], -1),
    ([[2, -1]], [[0, 3]], -1),
    ([[5, 5 << 32]], [[0, 1, 2, 3, 4]], -2),
    ([[2, 2 << 32 | 0xFFFFFFFF]], [[0, 3]], -2),
    ([[1 << 31, (1 << 63) - 1]], [[0, 3]], -2),
    ([[4, 4 << 32 | 4]], [[0, 1, 2, 3, 0, 1, 2, 3]], 8),
    ([[0, 0]], [[]], 0),
    ([[2, SECOND_OF_TWO], [0, 1]], [[0, 3, 1], [2]], 4),
    ([[2, SECOND_OF_TWO], [0, 3]], [[0, 3, 1], [0, 3, 1]], -3),
    ([[2, SECOND_OF_TWO], [3 << 32, 3 << 32 | 1]], [[0, 3, 1], [0, 1, 2, 2]], -1),
)
"""layout_range, src_info, and how many rows of at most 4 tokens they have; or why they cannot be."""


def check_handles(backend: str) -> None:
    """count_rows; and return_rows, which refuses what cannot be."""
    for ranges, tokens, num_rows in HANDLES:
        src_info = guarded((len(ranges), 8), torch.int32)
        for expert, listed in enumerate(tokens):
            src_info[expert, : len(listed)] = torch.tensor(listed)
        if backend == "numba":
            assert cpu.count_rows(words(ranges).numpy(), src_info.numpy(), 4) == num_rows
            continue
        setting = Setting(backend, 2, rank=1, local_experts=len(ranges))
        setting.put_header([7])
        sent = Triton(backend).there(Return(words(ranges), src_info, 8, False, [0, 0]).untouched())
        x = torch.zeros(8 * len(ranges), 8, dtype=torch.uint16)
        return_rows(setting, x, words(ranges), src_info, sent)
        assert setting.outcome == (outcomes.outcome_of(outcomes.BAD_HANDLE, 1) if num_rows < 0 else 0)
        is_refused = [int(setting.record(reader, 1)[1]) for reader in range(2)]
        assert is_refused == [gpu.BY_HANDLE * (num_rows < 0)] * 2
        assert int(setting.record(0, 1)[0]) == 7


def bits_of(value: float) -> int:
    return int(torch.tensor(value).bfloat16().view(torch.int16))


def check_sum_tokens(backend: str) -> None:
    returned = Returned(words([[1, 0]]), 2, 1, 8, False)
    returned.weights[:] = torch.tensor([[0.5, 2.0]])
    for rank, value in enumerate((1.0, 4.0)):
        returned.rows.view(torch.int16)[rank] = bits_of(value)
    out, missing = returned.check(backend, [0, 0])
    assert out[0].tolist() == [bits_of(4.0)] * 8
    assert missing == -1
    num_tokens = 300 if backend == "cuda" else 11
    for num_ranks, local_experts, num_topk, hidden in ((3, 2, 3, 72), (2, 1, 4, 1152), (1, 3, 1, 256)):
        ids = routing(num_tokens, num_topk, num_ranks * local_experts, hidden)
        returned = Returned(ids, num_ranks, local_experts, hidden, False)
        for masked in ([0] * num_ranks, [*[0] * (num_ranks - 1), 1]):
            assert returned.check(backend, masked)[1] == -1
    assert Returned(words([[]]).view(0, 2), 2, 1, 128, False).check(backend, [0, 0])[1] == -1


def check_sum_tokens_of_logfmt(backend: str) -> None:
    num_tokens = 100 if backend == "cuda" else 5
    sizes = [(2, 2, 256), (3, 1, 896)]
    # Rows longer than what the CPU sums at once.
    for num_ranks, local_experts, hidden in [*sizes, (2, 1, 8448)] if backend == "numba" else sizes:
        ids = routing(num_tokens, 3, num_ranks * local_experts, hidden)
        returned = Returned(ids, num_ranks, local_experts, hidden, True)
        for masked in ([0] * num_ranks, [1, *[0] * (num_ranks - 1)]):
            assert returned.check(backend, masked)[1] == -1


def check_a_sum_begins_with_plus_zero(backend: str) -> None:
    for use_logfmt in (False, True):
        returned = Returned(words([[0], [-1]]), 2, 1, 128, use_logfmt)
        returned.rows.view(torch.int16).fill_(bits_of(-0.0))
        returned.weights.fill_(1.0)
        out, missing = returned.check(backend, [0, 0])
        assert missing == -1
        assert out[:2].tolist() == [[0] * 128] * 2


def check_rows_that_are_missing(backend: str) -> None:
    for use_logfmt in (False, True):
        ids = words([[0, 1], [-1, 1], [0, 1], [1, 0]])
        returned = Returned(ids, 2, 1, 128, use_logfmt)
        returned.lists[1, 0, :4] = torch.tensor([0, 2, 3, 9])
        returned.ranges[0, 0] = 2
        # Token 1 is not in the list of rank 1, and token 3 behind the end of rank 0's.
        assert returned.check(backend, [0, 0])[1] == 1 * 2 + 1
        assert returned.check(backend, [0, 1])[1] == 3 * 2 + 1
        assert returned.check(backend, [1, 1])[1] == -1
        returned.ranges[:] = 0
        assert returned.check(backend, [0, 0])[1] == 0


def assert_wrong_id(setting: Setting, ids: torch.Tensor, place: int) -> None:
    """That the host hears of it."""
    token, column = divmod(place, ids.shape[1])
    words = setting.report
    assert int(words[constants.REPORTED_WRONG]) == token << 32 | column
    assert int(words[constants.REPORTED_VALUE]) == int(ids[token, column])
    assert int(words[constants.REPORTED_EXPERTS]) == setting.num_ranks * setting.local_experts


WRONG_IDS = (-2, -7, 2**40, -(2**63), 2**63 - 1)


def check_returns_for_wrong_ids(device: str) -> None:
    """return_rows, where an id is neither an expert nor -1: the call is refused."""
    for wrong in (4, *WRONG_IDS):
        # More ids than one tile of a list's program holds.
        ids = words([[0, 1], [-1, 3]] * 30)
        ids[41, 1], ids[59, 0] = wrong, 99
        setting = Setting(device, 2, rank=1, local_experts=2)
        setting.put_header([7, 0, 5, 5, 6, 4])
        call = Return(words([[0, 0], [0, 0]]), torch.zeros(2, 8, dtype=torch.int32), 8, False, [0, 0])
        sent = Triton(device).there(call.untouched())
        return_rows(setting, call.x, call.layout_range, call.src_info, sent, ids=ids)
        assert setting.outcome == outcomes.outcome_of(outcomes.BAD_IDS, 1)
        assert [int(setting.record(reader, 1)[1]) for reader in range(2)] == [gpu.BY_IDS] * 2
        finish(setting)
        assert_wrong_id(setting, ids, 41 * 2 + 1)


def check_sending_wrong_ids(device: str) -> None:
    """send_tokens, where an id is neither an expert nor -1: the call is refused, masked ranks or not."""
    for wrong, masked in [(4, [0, 0]), (4, [1, 0]), *((value, [0, 0]) for value in WRONG_IDS)]:
        ids = words([[0, 1], [-1, 3], [2, wrong], [99, 0]])
        setting = Setting(device, 2, rank=1, masked=masked, local_experts=2)
        setting.put_header([7, 0, 4, 5, 6, 4])
        sent = Triton(device).there(Send(ids, 2, 128, formats.RAW, masked).untouched())
        send_tokens(setting, rows_of(4, 4, 128), ids, sent.messages, sent.lists)
        assert setting.outcome == outcomes.outcome_of(outcomes.BAD_IDS, 1)
        for reader, is_masked in enumerate(masked):
            posted = setting.record(reader, setting.rank)[:3].tolist()
            assert posted == ([0, 0, 0] if is_masked else [7, gpu.BY_IDS, 4])
        finish(setting)
        assert_wrong_id(setting, ids, 5)
        assert [setting.packed(rank, 1) for rank in range(2)] == [7, 7]
