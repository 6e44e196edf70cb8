"""The data kernels of normal mode do what their docstrings' examples and plain references say, bit for bit.

A check takes a backend: "numba", or the device of Triton's kernels ("cpu" is the interpreter).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numba
import numpy as np
import torch
import triton
import triton.language as tl

from anyep.backends import cpu
from anyep.backends.cpu.kernels import groups
from anyep.backends.cpu.kernels.floats import bf16_of_float, float_of_bf16, float_of_fp16, fp16_of_float
from anyep.backends.cuda import constants
from anyep.backends.cuda.kernels import atomics, counting, notify, sums, windows
from anyep.backends.cuda.kernels import digests as digest_kernels
from anyep.backends.cuda.kernels.floats import load_rows, store_rows
from anyep.backends.cuda.kernels.groups import Biases, Payload, Scales, Sums, Tables
from anyep.backends.cuda.pinned import pinned_words
from anyep.core import digests, outcomes
from tests.support.checks import deeper
from tests.support.checks.launching import launch
from tests.support.depth import IS_DEEP

Array = np.ndarray[Any, Any]
GUARD = 7
EXPERT_BLOCK = 8
NUM_PROGRAMS = 3
NANS = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
CPU_DTYPES = {torch.bfloat16: cpu.BF16, torch.float16: cpu.FP16, torch.float32: cpu.FP32}


def device_of(backend: str) -> str:
    return "cpu" if backend == "numba" else backend


def power_of_two(count: int) -> int:
    return int(triton.next_power_of_2(max(2, count)))


def int32(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def int64(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def there(values: Array, device: str) -> torch.Tensor:
    """A copy on the device."""
    return torch.from_numpy(values.copy()).to(device)


def guarded(shape: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Where nothing is written it stays what it is here."""
    return torch.full(tuple(shape), GUARD, dtype=dtype, device=device)


def state_of(device: str, **words: int) -> torch.Tensor:
    """The state of a call; all other words are 0."""
    state = torch.zeros(constants.NUM_STATES, dtype=torch.int64, device=device)
    for name, value in words.items():
        state[getattr(constants, name)] = value
    return state


def routing(num_tokens: int, num_topk: int, num_experts: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(num_topk, dim=-1).indices
    missing = torch.rand(ids.shape, generator=generator) < 0.2
    return torch.where(missing, -1, ids)


# Layout


@dataclass(frozen=True)
class Layout:
    """Who gets how many tokens."""

    ids: torch.Tensor
    num_experts: int
    num_ranks: int
    per_rank: Array
    per_expert: Array
    in_rank: Array

    @staticmethod
    def of(ids: torch.Tensor, num_experts: int, num_ranks: int) -> Layout:
        chosen = ids[:, :, None] == torch.arange(num_experts)
        in_rank = chosen.any(1).view(len(ids), num_ranks, num_experts // num_ranks).any(2)
        counts = (in_rank.sum(0).int().numpy(), chosen.sum((0, 1)).int().numpy())
        return Layout(ids, num_experts, num_ranks, *counts, in_rank.numpy())


EXAMPLE = Layout.of(int64([[0, 1], [3, -1]]), 4, 2)


def layouts() -> Iterator[Layout]:
    yield EXAMPLE
    for num_tokens, num_topk, num_experts, num_ranks in (
        (37, 3, 12, 3),
        (70, 8, 64, 8),
        (5, 1, 5, 1),
        (3, 2, 1024, 1),
        (40, 5, 60, 3),
        (0, 3, 12, 3),
    ):
        yield Layout.of(routing(num_tokens, num_topk, num_experts, num_tokens), num_experts, num_ranks)


def count(layout: Layout, backend: str, told: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """The counts per rank and per expert, and the mask; the CPU's kernel tells what is wrong by itself."""
    num_tokens, num_topk = layout.ids.shape
    device = device_of(backend)
    counts = guarded((layout.num_ranks + layout.num_experts,), torch.int32, device)
    local_experts = layout.num_experts // layout.num_ranks
    mask = guarded((num_tokens, layout.num_ranks), torch.int8, device)
    if backend == "numba":
        parts = (counts[: layout.num_ranks], counts[layout.num_ranks :], mask.view(torch.bool))
        assert cpu.count_layout(layout.ids.numpy(), local_experts, *(part.numpy() for part in parts)) == -1
        return counts, mask
    launch(
        counting.count_layout,
        device,
        (layout.num_ranks, triton.cdiv(local_experts, EXPERT_BLOCK) + 1),
        layout.ids.to(device),
        *(counts, counts[layout.num_ranks :], mask, int(told.ctypes.data)),
        *(num_tokens, num_topk, local_experts),
        NUM_RANKS=layout.num_ranks,
        TOPK_BLOCK=power_of_two(num_topk),
        EXPERT_BLOCK=EXPERT_BLOCK,
        TILE_TOKENS=16,
    )
    if device != "cpu":
        torch.cuda.synchronize()
    return counts.cpu(), mask


def check_layout_of_wrong_ids(device: str) -> None:
    """count_layout, where an id is neither an expert nor -1: the host hears of the first, once."""
    told = pinned_words(constants.NUM_LAYOUT_WORDS)
    # The example, of rank 0 of 2, with n = 6.
    told[:2] = 6
    count(replace(EXAMPLE, ids=int64([[0, 1], [3, 9]])), device, told)
    assert told.tolist() == [7, 6, 1, 1, 9, 4]
    count(replace(EXAMPLE, ids=int64([[8, 1], [3, 9]])), device, told)
    assert told.tolist() == [7, 6, 1, 1, 9, 4], "the first one is not read yet"
    layout = Layout.of(routing(40, 3, 12, 3), 12, 3)
    for wrong in (12, -2, 2**40, -(2**63), 2**63 - 1):
        ids = layout.ids.clone()
        ids[38, 2], ids[17, 1] = 99, wrong
        told[constants.NUM_READ] = told[constants.NUM_REPORTS]
        counts, _ = count(replace(layout, ids=ids), device, told)
        assert told[2:].tolist() == [17, 1, wrong, 12]
        assert counts[3:].sum() == int(((ids >= 0) & (ids < 12)).sum()), "it goes nowhere"
        assert told[constants.NUM_REPORTS] == told[constants.NUM_READ] + 1


def check_layout(backend: str) -> None:
    """count_layout."""
    assert EXAMPLE.per_rank.tolist() == [1, 1]
    assert EXAMPLE.per_expert.tolist() == [1, 1, 0, 1]
    assert EXAMPLE.in_rank.tolist() == [[True, False], [False, True]]
    for right in layouts():
        told = pinned_words(constants.NUM_LAYOUT_WORDS) if backend != "numba" else np.zeros(1, np.int64)
        counts, mask = count(right, backend, told)
        assert not told.any()
        assert counts.tolist() == [*right.per_rank.tolist(), *right.per_expert.tolist()]
        assert torch.equal(mask.cpu(), torch.from_numpy(right.in_rank).to(torch.int8))


def place(
    layout: Layout, num_channels: int, backend: str, with_ids: bool = True, are_distinct: bool = False
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The positions, the rows by channel, and what is wrong with the counts."""
    num_tokens, num_topk = layout.ids.shape
    device = device_of(backend)
    position = guarded((num_tokens, layout.num_ranks), torch.int32, device)
    by_channel = guarded((layout.num_ranks, num_channels), torch.int32, device)
    if backend == "numba":
        counts = np.empty(layout.num_ranks, np.int32)
        tables = (counts, by_channel.numpy(), position.numpy())
        rank = cpu.place_tokens(layout.in_rank, layout.per_rank, *tables)
        assert counts.tolist() == layout.in_rank.sum(0).tolist()
        return position, by_channel, wrong_word_of(layout, rank, with_ids)
    state = guarded((constants.NUM_STATES,), torch.int64, device)
    state[constants.IS_WRONG] = 0
    local_experts = layout.num_experts // layout.num_ranks
    launch(
        counting.place_tokens,
        device,
        (layout.num_ranks, num_channels + (triton.cdiv(local_experts, EXPERT_BLOCK) + 1 if with_ids else 0)),
        there(layout.in_rank, device).view(torch.int8),
        *(layout.ids.to(device) if with_ids else state, there(layout.per_rank, device)),
        there(layout.per_expert, device),
        *(position, by_channel, state, num_tokens, num_channels),
        *(max(1, -(-num_tokens // num_channels)), num_topk if with_ids else 0, local_experts),
        NUM_RANKS=layout.num_ranks,
        TOPK_BLOCK=power_of_two(num_topk) if with_ids else 0,
        EXPERT_BLOCK=EXPERT_BLOCK,
        TILE_TOKENS=16,
        ARE_DISTINCT=are_distinct,
    )
    wrong = int(state[constants.IS_WRONG])
    state[constants.IS_WRONG] = GUARD
    assert (state == GUARD).all(), "other words of the state were written"
    return position.cpu(), by_channel.cpu(), wrong


def wrong_word_of(layout: Layout, wrong_rank: int, with_ids: bool) -> int:
    """What the CPU's kernels find wrong, as those of GPUs say it."""
    found = cpu.first_contradiction(layout.ids.numpy(), layout.per_expert, layout.in_rank) if with_ids else -1
    if found >= layout.num_experts:
        return constants.wrong_word(constants.WRONG_ID, found - layout.num_experts)
    if found >= 0:
        return constants.wrong_word(constants.WRONG_EXPERT_COUNT, found)
    if found < -1:
        return constants.wrong_word(constants.WRONG_TOKEN, -2 - found)
    return constants.wrong_word(constants.WRONG_RANK_COUNT, wrong_rank) if wrong_rank >= 0 else 0


@deeper
def check_place_tokens(backend: str) -> None:
    """place_tokens, where the counts are right."""
    in_rank = np.array([[1, 0], [1, 1], [0, 1]], np.bool_)
    counts = np.array([2, 2], np.int32)
    example = Layout(int64([[0, -1], [0, 1], [1, -1]]), 2, 2, counts, counts, in_rank)
    position, by_channel, wrong = place(example, 2, backend)
    assert position.tolist() == [[0, -1], [1, 0], [-1, 1]]
    assert by_channel.tolist() == [[2, 0], [1, 1]]
    assert not wrong
    for index, (layout, num_channels, with_ids) in enumerate(product(layouts(), (1, 4, 9), (True, False))):
        # In the interpreter every fifth may do: each layout, number of channels and way is among them.
        if backend == "cpu" and index % 5 and not IS_DEEP:
            continue
        position, by_channel, wrong = place(layout, num_channels, backend, with_ids)
        mask = layout.in_rank
        assert position.tolist() == np.where(mask, mask.cumsum(0) - 1, -1).tolist()
        per_channel = max(1, -(-len(mask) // num_channels))
        channels = [mask[channel * per_channel :][:per_channel] for channel in range(num_channels)]
        assert by_channel.t().tolist() == [channel.sum(0).tolist() for channel in channels]
        assert not wrong


def changed(values: Array, at: Any, value: int) -> Array:
    values = values.copy()
    values[at] = value
    return values


def check_experts_chosen_twice(device: str) -> None:
    """place_tokens where the experts of a token must be distinct: the later one of the first two is named."""

    def wrong(ids: torch.Tensor, num_experts: int, num_ranks: int, are_distinct: bool = True) -> int:
        layout = Layout.of(ids, num_experts, num_ranks)
        return place(layout, 3, device, are_distinct=are_distinct)[2]

    assert wrong(int64([[0, 1], [2, 2]]), 4, 2) == constants.wrong_word(constants.WRONG_ID, 3)
    assert wrong(int64([[0, 1], [2, 2]]), 4, 2, are_distinct=False) == 0
    assert wrong(int64([[-1, -1], [1, 0], [0, 1]]), 4, 2) == 0
    ids = routing(40, 3, 12, 3)
    assert wrong(ids, 12, 3) == 0
    ids[33], ids[35] = int64([7, 2, 7]), int64([5, 5, 5])
    assert wrong(ids, 12, 3) == constants.wrong_word(constants.WRONG_ID, 33 * 3 + 2)


def check_contradictions(backend: str) -> None:
    """place_tokens and first_contradiction; with choices of experts and without."""

    def wrong(layout: Layout, with_ids: bool = True, **changes: Any) -> int:
        return place(replace(layout, **changes), 4, backend, with_ids)[2]

    in_rank = np.array([[1, 1], [0, 1]], np.bool_)
    counts = np.array([1, 2], np.int32)
    example = Layout(int64([[0, 1], [1, -1]]), 2, 2, counts, counts, in_rank)
    assert wrong(example) == 0
    assert wrong(example, per_expert=changed(counts, 1, 1)) == constants.wrong_word(
        constants.WRONG_EXPERT_COUNT, 1
    )
    assert wrong(example, ids=int64([[0, 1], [1, 2]])) == constants.wrong_word(constants.WRONG_ID, 3)
    for token, rank in ((1, 0), (0, 1)):
        mask = changed(in_rank, (token, rank), not in_rank[token, rank])
        where = constants.wrong_word(constants.WRONG_TOKEN, 2 * token + rank)
        assert wrong(example, in_rank=mask, per_rank=mask.sum(0).astype(np.int32)) == where
    layout = Layout.of(routing(40, 3, 12, 3), 12, 3)
    for rank, count in ((0, 0), (2, 41), (1, -1)):
        for with_ids in (True, False):
            found = wrong(layout, with_ids, per_rank=changed(layout.per_rank, rank, count))
            assert found == constants.wrong_word(constants.WRONG_RANK_COUNT, rank)
    for expert in (0, 3, 11):
        per_expert = changed(layout.per_expert, expert, layout.per_expert[expert] + 1)
        assert wrong(layout, per_expert=per_expert) == constants.wrong_word(
            constants.WRONG_EXPERT_COUNT, expert
        )
        assert wrong(layout, with_ids=False, per_expert=per_expert) == 0
    for token, rank in ((0, 0), (17, 1), (39, 2)):
        mask = changed(layout.in_rank, (token, rank), not layout.in_rank[token, rank])
        both: dict[str, Any] = {"in_rank": mask, "per_rank": mask.sum(0).astype(np.int32)}
        assert wrong(layout, **both) == constants.wrong_word(constants.WRONG_TOKEN, 3 * token + rank)
        assert wrong(layout, with_ids=False, **both) == 0
    # An id that is no expert; on a GPU it comes before all else.
    for value in (12, -2, 2**40, -(2**63), 2**63 - 1):
        ids = layout.ids.clone()
        ids[33, 0], ids[17, 1] = 99, value
        assert wrong(layout, ids=ids) == constants.wrong_word(constants.WRONG_ID, 17 * 3 + 1)
        ids[3] = (ids[3] + 4) % 12  # contradicts in_rank
        assert backend == "numba" or wrong(layout, ids=ids) == constants.wrong_word(
            constants.WRONG_ID, 17 * 3 + 1
        )
    # Of much that is wrong, the first token is named, then the first expert.
    layout = Layout.of(routing(40, 5, 60, 7), 60, 3)
    per_expert = layout.per_expert + 1
    found = wrong(layout, in_rank=~layout.in_rank, per_expert=per_expert)
    assert found == constants.wrong_word(constants.WRONG_TOKEN, 0)
    found = wrong(layout, per_rank=layout.per_rank + 1, per_expert=per_expert)
    assert found == constants.wrong_word(constants.WRONG_EXPERT_COUNT, 0)


def assert_same_words(ours: torch.Tensor, right: list[int]) -> None:
    """Equal modulo 2**64."""
    assert [word % 2**64 for word in ours.tolist()] == [word % 2**64 for word in right]


def digests_of(device: str, rank: int, handle: list[Array]) -> torch.Tensor:
    """By digest_handle: of rank_prefix, channel_prefix, recv_channel_prefix, source, send_head."""
    num_ranks, num_channels = handle[1].shape
    found = guarded((2 * num_ranks,), torch.int64, device)
    launch(
        *(digest_kernels.digest_handle, device, (num_ranks, 2), int64([rank], device)),
        *(there(part, device) for part in handle),
        *(found, len(handle[4]), len(handle[3]), num_channels),
        NUM_RANKS=num_ranks,
        CHANNEL_BLOCK=power_of_two(num_channels),
        TILE_ROWS=16,
    )
    return found.cpu()


def check_digests(device: str) -> None:
    """digest_handle, against the CPU's."""
    example = [np.array(part, np.int32) for part in ([[2]], [[2]], [[0]], [0, 1], [[0], [1]])]
    assert_same_words(
        digests_of(device, 0, example), [sum(digests.mixed(word) for word in (-1, 0, 2**32 + 1))] * 2
    )
    random = np.random.default_rng(5)
    for rank, num_ranks, num_tokens, num_channels in (
        (1, 2, 9, 3),
        (0, 3, 40, 1),
        (7, 8, 21, 4),
        (0, 1, 0, 2),
    ):
        in_rank = random.random((num_tokens, num_ranks)) < 0.5
        matrix = random.integers(0, 30, (num_ranks, num_ranks)).astype(np.int32)
        matrix[rank] = in_rank.sum(0)
        position, by_channel = (
            np.empty(in_rank.shape, np.int32),
            np.empty((num_ranks, num_channels), np.int32),
        )
        cpu.place_tokens(in_rank, matrix[rank], np.empty(num_ranks, np.int32), by_channel, position)
        prefixes = [np.empty(shape, np.int32) for shape in (matrix.shape, by_channel.shape, by_channel.shape)]
        head = np.empty(in_rank.shape, np.int32)
        # What comes, comes in the first channel.
        received = np.zeros_like(by_channel)
        received[:, 0] = matrix[:, rank]
        cpu.fill_handle(rank, matrix, by_channel, received, position, *prefixes, head)
        source = random.integers(0, 2**31 - 1, int(matrix[:, rank].sum()) + 3).astype(np.int32)
        right = np.empty(2 * num_ranks, np.int64)
        assert cpu.check_handle(rank, *prefixes, source, in_rank, head, right) == 0
        assert digests_of(device, rank, [*prefixes, source, head]).tolist() == right.tolist()
        # With garbage in it, a handle has some digests, and nothing outside is touched.
        prefixes[0][:] = random.integers(-(2**31), 2**31 - 1, prefixes[0].shape)
        digests_of(device, rank, [*prefixes, source, head])


def check_send_head(device: str) -> None:
    """fill_send_head."""
    m = digests.mixed
    random = np.random.default_rng(0)
    cases = [(1, np.array([[2, 1], [5, 5]], np.int32), np.array([[0, 0], [-1, 1]], np.int32))]
    for rank, num_ranks, num_tokens in ((0, 3, 9), (2, 3, 4), (7, 8, 21), (0, 1, 5)):
        prefix = random.integers(0, 99, (num_ranks, num_ranks)).cumsum(0).astype(np.int32)
        cases.append((rank, prefix, random.integers(-1, 9, (num_tokens, num_ranks)).astype(np.int32)))
    outcomes_and_cases = [(0, case) for case in cases] + [(outcomes.DIFFERENT, cases[0])]
    for outcome, (rank, prefix, position) in outcomes_and_cases:
        num_tokens, num_ranks = position.shape
        send_head = guarded(position.shape, torch.int32, device)
        send_head.copy_(torch.from_numpy(position))
        in_rank = guarded(position.shape, torch.int8, device)
        begun = int64(range(2 * num_ranks), device)
        launch(
            *(notify.fill_send_head, device, triton.cdiv(num_tokens, 4), int64([rank], device)),
            *(int64([outcome], device), send_head, there(prefix, device), in_rank, begun, num_tokens),
            NUM_RANKS=num_ranks,
            RANK_BLOCK=power_of_two(num_ranks),
            TILE_TOKENS=4,
        )
        before = prefix[rank - 1] if rank else 0
        assert send_head.tolist() == np.where(position >= 0, position + before, -1).tolist()
        assert in_rank.tolist() == (position >= 0).tolist()
        if outcome:
            assert begun.tolist() == [*range(2 * num_ranks)]
            continue
        if prefix is cases[0][1]:
            assert send_head.tolist() == [[2, 1], [-1, 2]]
            assert in_rank.tolist() == [[1, 1], [0, 1]]
            added = [m(2 << 32), m(1 << 32) + m((2 << 32) + 1), 0, 0]
            assert_same_words(begun, [index + word for index, word in enumerate(added)])
        rows = send_head.tolist()
        added = [
            sum(m(digests.row_word(row[peer], token)) for token, row in enumerate(rows) if row[peer] >= 0)
            for peer in range(num_ranks)
        ]
        assert_same_words(begun[:num_ranks], [index + word for index, word in enumerate(added)])
        assert begun[num_ranks:].tolist() == [*range(num_ranks, 2 * num_ranks)]


# Windows


def send_head_of(layout: Layout) -> tuple[torch.Tensor, list[int]]:
    """As for a rank before which others send 2 rows to each receiver; and the rows of each receiver."""
    mask = torch.from_numpy(layout.in_rank)
    head = torch.where(mask, mask.cumsum(0) + 1, -1).int()
    return head, [int(count) + 2 for count in layout.per_rank]


@dataclass(frozen=True)
class Dispatch:
    """What one rank sends to `num_ranks` receivers, of which some have no window."""

    num_ranks: int
    num_tokens: int
    num_topk: int
    num_scales: int = 0
    strided: bool = False
    without_window: tuple[int, ...] = ()
    row_words: int = 40

    experts_per_rank = 4
    margin = 3
    """Rows behind a receiver's, which nobody may touch."""

    @cached_property
    def layout(self) -> Layout:
        num_experts = self.experts_per_rank * self.num_ranks
        ids = routing(self.num_tokens, self.num_topk or 2, num_experts, 5)
        return Layout.of(ids, num_experts, self.num_ranks)

    @cached_property
    def x(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        shape = (self.num_tokens, self.row_words)
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).int()

    @cached_property
    def weights(self) -> torch.Tensor:
        return torch.rand(self.layout.ids.shape, generator=torch.Generator().manual_seed(2))

    @cached_property
    def scales(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        scales = torch.rand(self.num_tokens, max(self.num_scales, 1), generator=generator)
        return scales.t().contiguous().t() if self.strided else scales

    def new_results(self, num_rows: list[int], device: str) -> list[list[torch.Tensor]]:
        kinds = (
            (self.row_words, torch.int32),
            (1, torch.int32),
            (max(self.num_topk, 1), torch.int64),
            (max(self.num_topk, 1), torch.float32),
            (max(self.num_scales, 1), torch.float32),
        )
        return [
            [guarded((rows + self.margin, width), dtype, device) for width, dtype in kinds]
            for rows in num_rows
        ]

    def places(self, results: list[list[torch.Tensor]], num_rows: list[int]) -> torch.Tensor:
        addresses = [[part.data_ptr() for part in parts] for parts in results]
        for receiver in self.without_window:
            addresses[receiver] = [0] * 5
        return int64([[*parts, rows] for parts, rows in zip(addresses, num_rows, strict=True)])

    def right(self, head: torch.Tensor, num_rows: list[int]) -> list[list[torch.Tensor]]:
        results = self.new_results(num_rows, "cpu")
        for token, receiver in (head >= 0).nonzero().tolist():
            if receiver not in self.without_window:
                x, source, ids, weights, scales = (part[head[token, receiver]] for part in results[receiver])
                x[:], source[:] = self.x[token], token
                if self.num_topk:
                    local = self.layout.ids[token] - receiver * self.experts_per_rank
                    is_here = (local >= 0) & (local < self.experts_per_rank)
                    ids[:] = torch.where(is_here, local, -1)
                    weights[:] = torch.where(is_here, self.weights[token], 0.0)
                if self.num_scales:
                    scales[:] = self.scales[token]
        return results

    def in_numba(self, head: torch.Tensor, num_rows: list[int], streaming: bool) -> list[list[torch.Tensor]]:
        results = self.new_results(num_rows, "cpu")
        cpu.send_to_windows(
            *groups.plain(
                *(0, self.num_tokens, head.numpy()),
                self.places(results, num_rows)[:, :5].contiguous().numpy(),
                groups.Payload(
                    *(self.x.data_ptr(), 4 * self.row_words),
                    *(self.scales.data_ptr(), *self.scales.stride(), self.num_scales),
                    self.layout.ids.numpy() if self.num_topk else np.zeros((0, 0), np.int64),
                    self.weights.numpy() if self.num_topk else np.zeros((0, 0), np.float32),
                    self.experts_per_rank,
                ),
                int(streaming),
            )
        )
        return results

    def ours(
        self,
        device: str,
        head: torch.Tensor,
        num_rows: list[int],
        all_or_none: bool = False,
        **words: int,
    ) -> tuple[list[list[torch.Tensor]], int]:
        """The results, and what was found wrong with the handle; `words` are those of the state."""
        results, state = self.new_results(num_rows, device), state_of(device, **words)
        scales = self.scales.to(device)
        launch(
            *(windows.send_to_windows, device, NUM_PROGRAMS),
            Payload(self.x.to(device), self.layout.ids.to(device), self.weights.to(device)),
            Scales(scales.view(torch.int32), self.num_scales, *scales.stride()),
            head.to(device),
            Tables(state, state, state, self.places(results, num_rows).to(device), *[state] * 3),
            *(self.num_tokens, self.row_words),
            self.num_topk,
            self.experts_per_rank,
            NUM_RECEIVERS=self.num_ranks,
            RECEIVER_BLOCK=power_of_two(self.num_ranks),
            SCALE_BLOCK=power_of_two(self.num_scales) if self.num_scales else 0,
            TOPK_BLOCK=power_of_two(self.num_topk) if self.num_topk else 0,
            TILE_TOKENS=4,
            TILE_WORDS=16,
            CHUNK_TOKENS=8,
            ALL_OR_NONE=all_or_none,
        )
        assert int(state[constants.OUTCOME]) == words.get("OUTCOME", 0)
        return results, int(state[constants.BAD_ROWS])


DISPATCHES = (
    Dispatch(2, 9, 2),
    Dispatch(2, 4, 0, num_scales=2),
    Dispatch(3, 21, 3, num_scales=5, strided=True, without_window=(2,)),
    Dispatch(5, 30, 1, without_window=(0, 3), row_words=4),
    Dispatch(1, 3, 2, row_words=100),
    Dispatch(8, 17, 6),
)


def assert_same_results(ours: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> None:
    for mine, theirs in zip(ours, right, strict=True):
        for part, expected in zip(mine, theirs, strict=True):
            assert torch.equal(part.cpu(), expected)


def check_windows(backend: str) -> None:
    """send_to_windows: rows, source indices, top-k ids and weights, scales; receivers without a window."""
    example, example_head = Dispatch(2, 2, 0), int32([[0, 2], [-1, 3]])
    right = example.right(example_head, [1, 4])
    assert torch.equal(right[0][0][0], example.x[0])
    assert torch.equal(right[1][0][2:4], example.x)
    assert [*right[0][1][0].tolist(), *right[1][1][2:4].flatten().tolist()] == [0, 0, 1]
    cases = [(example, example_head, [1, 4])]
    cases += [(dispatch, *send_head_of(dispatch.layout)) for dispatch in DISPATCHES]
    for dispatch, head, num_rows in cases:
        right = dispatch.right(head, num_rows)
        if backend == "numba":
            for streaming in (False, True):
                assert_same_results(dispatch.in_numba(head, num_rows, streaming), right)
            continue
        for all_or_none in (False, True):
            ours, outcome = dispatch.ours(backend, head, num_rows, all_or_none)
            assert_same_results(ours, right)
            assert outcome == 0
        # Something went wrong before, or some receiver has no window: nothing may be written.
        for how, words in ((False, {"OUTCOME": outcomes.TOO_MANY}), (True, {"USES_RINGS": 1})):
            ours, outcome = dispatch.ours(backend, head, num_rows, all_or_none=how, **words)
            assert all((part == GUARD).all() for parts in ours for part in parts)
            assert outcome == 0


def check_rows_that_are_not_there(device: str) -> None:
    """send_to_windows with a handle that names rows which a receiver does not have: those are left out."""
    for dispatch, receiver, beyond in (
        (DISPATCHES[0], 1, 0),
        (DISPATCHES[2], 0, 1),
        (DISPATCHES[3], 3, 2),  # one without a window
        (DISPATCHES[4], 0, 2),
        (DISPATCHES[5], 7, 2**30),
    ):
        head, num_rows = send_head_of(dispatch.layout)
        token = int(np.flatnonzero(dispatch.layout.in_rank[:, receiver])[0])
        without = head.clone()
        without[token, receiver] = -1
        head[token, receiver] = num_rows[receiver] + beyond
        ours, outcome = dispatch.ours(device, head, num_rows)
        assert_same_results(ours, dispatch.right(without, num_rows))
        assert outcome == outcomes.outcome_of(outcomes.BAD_HANDLE, receiver)
        head[token, receiver] = -(2**31) + beyond
        ours, outcome = dispatch.ours(device, head, num_rows)
        assert_same_results(ours, dispatch.right(without, num_rows))
        assert outcome == 0


def check_unpack(device: str) -> None:
    """unpack_window: source indices out of the window, ids padded, digests of rows."""
    found, m = int64([0] * 4, device), digests.mixed
    window = int32([4, 0, 2], device)
    launch(
        *(windows.unpack_window, device, 1),
        int64([[0, window.data_ptr(), 0, 0, 0, 3], [0] * 6], device),
        *(state_of(device, NUM_ROWS=3), 0, guarded((3,), torch.int32, device), int64([0], device)),
        *(int32([[1, 0], [3, 0]], device), found, 3, 0),
        NUM_RANKS=2,
        PAD=False,
        IF_ALL_FIT=False,
        BLOCK=16,
    )
    assert_same_words(found, [0, 0, m(4), m(1 << 32) + m((2 << 32) + 2)])
    random = np.random.default_rng(3)
    # Rows received, rows of the result, slots; the first is the kernel's example.
    for num_rows, num_result_rows, num_topk in ((1, 2, 1), (5, 40, 3), (0, 9, 2), (33, 33, 6)):
        in_window = random.integers(0, 99, num_result_rows).astype(np.int32)
        ids = random.integers(0, 99, (num_result_rows, num_topk))
        right_source = np.where(np.arange(num_result_rows) < num_rows, in_window, GUARD)
        right_ids = np.concatenate([ids[:num_rows], np.full_like(ids[num_rows:], -1)])
        for pad, has_window in product((True, False), (True, False)):
            source, ours = guarded((num_result_rows,), torch.int32, device), there(ids, device)
            window = there(in_window, device)
            # This is rank 1, and all but the first 2 rows are from rank 1.
            prefix = int32([[0, min(2, num_rows)], [0, num_rows]], device)
            found = int64([5, 6, 7, 8], device)
            table = [[0] * 6, [0, window.data_ptr() if has_window else 0, 0, 0, 0, num_result_rows]]
            launch(
                *(windows.unpack_window, device, triton.cdiv(num_result_rows, 16)),
                *(int64(table, device), state_of(device, NUM_ROWS=num_rows), 1, source, ours, prefix),
                *(found, num_result_rows, num_topk),
                NUM_RANKS=2,
                PAD=pad,
                IF_ALL_FIT=False,
                BLOCK=16,
            )
            right_now = right_source if has_window else np.full_like(right_source, GUARD)
            hashes = [digests.mixed(digests.row_word(row, int(right_now[row]))) for row in range(num_rows)]
            assert_same_words(found, [5, 6, 7 + sum(hashes[:2]), 8 + sum(hashes[2:])])
            assert source.tolist() == right_now.tolist()
            assert ours.tolist() == (right_ids if pad else ids).tolist()


def check_unpack_early(device: str) -> None:
    """unpack_window, before the host knows the number of rows: all of them, or none."""
    in_window = [7, 1, 4]
    for room, uses_rings, is_done in ((3, 0, True), (9, 0, True), (2, 0, False), (3, 1, False)):
        window, source = int32(in_window, device), guarded((room,), torch.int32, device)
        found = int64([1, 2], device)
        launch(
            *(windows.unpack_window, device, triton.cdiv(room, 16)),
            int64([[0, window.data_ptr(), 0, 0, 0, 3]], device),
            *(state_of(device, NUM_ROWS=3, USES_RINGS=uses_rings), 0, source, int64([0], device)),
            *(int32([[3]], device), found, room, 0),
            NUM_RANKS=1,
            PAD=False,
            IF_ALL_FIT=True,
            BLOCK=16,
        )
        hashes = [digests.mixed(digests.row_word(row, token)) for row, token in enumerate(in_window)]
        assert_same_words(found, [1, 2 + sum(hashes) if is_done else 2])
        assert source.tolist() == (in_window if is_done else []) + [GUARD] * (room - 3 * is_done)


# Sums

SPECIAL = (torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 65504.0, 3.0e38, -3.0e38, 1e-41, 6e-8)


def special_values(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of which many are special."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 3
    which = torch.randint(0, 4 * len(SPECIAL), shape, generator=generator)
    special = torch.tensor(SPECIAL)[which.clamp(max=len(SPECIAL) - 1)]
    return torch.where(which < len(SPECIAL), special, values).to(dtype)


def bits(values: torch.Tensor) -> torch.Tensor:
    """As kernels take them: those of 16 bits by their bits."""
    return values.view(torch.uint16) if values.element_size() == 2 else values


def assert_same_bits(ours: torch.Tensor, right: torch.Tensor) -> None:
    ours = ours.cpu()
    if ours.dtype == torch.float32:
        # A NaN is whatever the addition made of it.
        assert torch.equal(ours.isnan(), right.isnan())
        ours, right = ours.nan_to_num(nan=1.0), right.nan_to_num(nan=1.0)
    width = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    assert torch.equal(ours.view(width), right.view(width))


def with_one_nan(values: torch.Tensor) -> torch.Tensor:
    """The NaN of 16 bits that kernels write."""
    if values.dtype == torch.float32:
        return values
    nan = torch.tensor(NANS[values.dtype], dtype=torch.int16)
    return torch.where(values.isnan(), nan, values.view(torch.int16)).view(values.dtype)


@dataclass(frozen=True)
class Sum:
    """Rows of `num_ranks` ranks that are added up for one of them."""

    num_ranks: int
    num_tokens: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16
    num_biases: int = 0
    num_topk: int = 0
    is_ordered: bool = False
    """Whether the rows of each token are added in an order of ranks of its own."""

    margin = 2

    @cached_property
    def layout(self) -> Layout:
        num_experts = 2 * self.num_ranks
        ids = routing(self.num_tokens, min(3, num_experts), num_experts, 9)
        # One that goes nowhere: its sum is its bias.
        ids[self.num_tokens // 2] = -1
        return Layout.of(ids, num_experts, self.num_ranks)

    @cached_property
    def num_rows(self) -> list[int]:
        return send_head_of(self.layout)[1]

    @cached_property
    def rows(self) -> list[torch.Tensor]:
        return [
            special_values((count, self.hidden), self.dtype, rank) for rank, count in enumerate(self.num_rows)
        ]

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        return [
            special_values((count, self.num_topk), torch.float32, 50 + rank)
            for rank, count in enumerate(self.num_rows)
        ]

    @cached_property
    def biases(self) -> list[torch.Tensor]:
        shape = (self.num_tokens, self.hidden)
        return [special_values(shape, self.dtype, 90 + index) for index in range(self.num_biases)]

    @cached_property
    def order(self) -> torch.Tensor:
        """The ranks of each token, in the order of the sums."""
        ranks = torch.arange(self.num_ranks, dtype=torch.int32).repeat(self.num_tokens, 1)
        if not self.is_ordered:
            return ranks
        generator = torch.Generator().manual_seed(self.num_tokens)
        shuffled = torch.rand(ranks.shape, generator=generator).argsort(dim=1)
        return shuffled.to(torch.int32)

    def right(self, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Biases and rows in the order of the sums, in float32, rounded once; without biases from +0.0."""
        out = torch.zeros(self.num_tokens, self.hidden)
        weights = torch.zeros(self.num_tokens, self.num_topk)
        for index, bias in enumerate(self.biases):
            out = out + bias.float() if index else bias.float()
        for ranks, (rank, rows) in product(self.order.t(), enumerate(head.t())):
            tokens = ((rows >= 0) & (ranks == rank)).nonzero().flatten()
            out[tokens] += self.rows[rank][rows[tokens]].float()
            weights[tokens] += self.weights[rank][rows[tokens]]
        return with_one_nan(out.to(self.dtype)), weights

    def in_numba(self, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = guarded((self.num_tokens + self.margin, self.hidden), self.dtype, "cpu")
        weights = np.empty((self.num_tokens, self.num_topk), np.float32)
        cpu.pull_and_sum(
            *groups.plain(
                *(0, self.num_tokens, head.numpy()),
                np.array([rows.data_ptr() for rows in self.rows]),
                np.array([part.data_ptr() for part in self.weights]),
                groups.Sums(
                    out.data_ptr(),
                    *[*(bias.data_ptr() for bias in self.biases), 0, 0][:2],
                    *(self.hidden, self.hidden * self.dtype.itemsize, CPU_DTYPES[self.dtype], weights),
                    self.order.numpy() if self.is_ordered else groups.NO_ORDER,
                ),
            )
        )
        assert (out[self.num_tokens :] == GUARD).all()
        guards = guarded((self.num_tokens, 1), torch.float32, "cpu")
        return out[: self.num_tokens], torch.from_numpy(weights) if self.num_topk else guards

    def ours(self, device: str, head: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of rows and of weights, with a margin behind them."""
        num_rows = self.num_tokens + self.margin
        out = guarded((num_rows, self.hidden), self.dtype, device)
        out_weights = guarded((num_rows, max(1, self.num_topk)), torch.float32, device)
        rows, weights = ([part.to(device) for part in parts] for parts in (self.rows, self.weights))
        places = [
            [x.data_ptr(), 0, 0, part.data_ptr(), 0, len(x)] for x, part in zip(rows, weights, strict=True)
        ]
        # A rank's own rows are not where the table says.
        own_rank, places[-1][0] = self.num_ranks - 1, 16
        order = (self.order.to(device),) if self.is_ordered else ()
        launch(
            *(sums.pull_and_sum, device, NUM_PROGRAMS, Sums(bits(out), out_weights, *order)),
            Biases(*[*(bits(bias).to(device) for bias in self.biases), state, state][:2]),
            head.to(device),
            Tables(state, state, state, int64(places, device), *[state] * 3),
            *(rows[-1].data_ptr(), own_rank),
            *(self.num_tokens, self.hidden, self.num_topk),
            DTYPE=CPU_DTYPES[self.dtype],
            NUM_BIASES=self.num_biases,
            NUM_RANKS=self.num_ranks,
            RANK_BLOCK=power_of_two(self.num_ranks),
            TOPK_BLOCK=power_of_two(self.num_topk) if self.num_topk else 0,
            TILE_TOKENS=4,
            TILE_VALUES=64,
            CHUNK_TOKENS=8,
            IN_HARDWARE=device != "cpu",
            ORDERED=self.is_ordered,
        )
        assert (out[self.num_tokens :] == GUARD).all()
        assert (out_weights[self.num_tokens :] == GUARD).all()
        return out[: self.num_tokens], out_weights[: self.num_tokens]


def assert_same_sums(case: Sum, ours: tuple[torch.Tensor, torch.Tensor], head: torch.Tensor) -> None:
    right, right_weights = case.right(head)
    assert_same_bits(ours[0], right)
    if case.num_topk:
        assert_same_bits(ours[1], right_weights)
    else:
        assert (ours[1] == GUARD).all()


def check_sums(backend: str) -> None:
    """pull_and_sum, for each dtype, with biases and weights; special values everywhere."""
    example, head = Sum(2, 2, 64), int32([[0, 2], [-1, 3]])
    object.__setattr__(example, "rows", [special_values((4, 64), example.dtype, rank) for rank in range(2)])
    object.__setattr__(example, "weights", [torch.zeros(4, 0)] * 2)
    first = torch.zeros(64) + example.rows[0][0].float() + example.rows[1][2].float()
    second = torch.zeros(64) + example.rows[1][3].float()
    assert_same_bits(example.right(head)[0], with_one_nan(torch.stack([first, second]).bfloat16()))
    cases = [(example, head)]
    # Rows longer than what the CPU adds up at once.
    sizes = ((2, 9, 64, 0), (4, 13, 1032 if backend == "numba" else 136, 3), (1, 5, 16, 1), (8, 21, 72, 5))
    for dtype, num_biases in product(CPU_DTYPES, range(3)):
        for num_ranks, num_tokens, hidden, num_topk in sizes[: 4 if num_biases else 2]:
            case = Sum(num_ranks, num_tokens, hidden, dtype, num_biases, num_topk)
            cases.append((case, send_head_of(case.layout)[0]))
            if num_ranks == 4:
                cases.append((replace(case, is_ordered=True), cases[-1][1]))
    for case, head in cases:
        if backend == "numba":
            assert_same_sums(case, case.in_numba(head), head)
            continue
        state = state_of(backend)
        assert_same_sums(case, case.ours(backend, head, state), head)
        assert not state.any()


def check_copies_for_peers(device: str) -> None:
    """copy_for_peers: all rows but a rank's own."""
    for rank, prefix, num_rows, copied in (
        (1, [[2, 1], [3, 4]], 5, [0, 4]),
        (0, [[2, 1], [3, 4]], 3, [2]),
        (0, [[4]], 4, []),
        (2, [[0, 0, 3], [0, 0, 3], [0, 0, 5]], 9, [0, 1, 2, 5, 6, 7, 8]),
        # A handle that names more rows than there are.
        (1, [[2, 6], [3, 9]], 5, [0, 1, 2, 3, 4]),
    ):
        x = torch.arange(num_rows * 20, dtype=torch.int32).view(num_rows, 20).to(device)
        window = guarded((num_rows + 1, 20), torch.int32, device)
        launch(
            *(sums.copy_for_peers, device, 3, x, window, int32(prefix).to(device), rank, num_rows, 20),
            NUM_RANKS=len(prefix),
            TILE_WORDS=16,
        )
        for row in range(num_rows):
            assert torch.equal(window[row], x[row]) == (row in copied)
            assert (row in copied) or (window[row] == GUARD).all()
        assert (window[num_rows] == GUARD).all()


def check_sums_that_are_not_made(device: str) -> None:
    """pull_and_sum after something went wrong; where rows come otherwise; with rows that are not there."""
    case = Sum(3, 11, 32, torch.float16, 1, 2)
    head, _ = send_head_of(case.layout)
    for words in ({"OUTCOME": outcomes.DIFFERENT}, {"USES_RINGS": 1}):
        state = state_of(device, **words)
        for part in case.ours(device, head, state):
            assert (part == GUARD).all()
        assert torch.equal(state, state_of(device, **words))
    for rank, beyond in ((0, 0), (2, 1), (1, 2**30)):
        token = int(np.flatnonzero(case.layout.in_rank[:, rank])[0])
        without, bad = head.clone(), head.clone()
        without[token, rank], bad[token, rank] = -1, case.num_rows[rank] + beyond
        state = state_of(device)
        assert_same_sums(case, case.ours(device, bad, state), without)
        assert int(state[constants.BAD_ROWS]) == outcomes.outcome_of(outcomes.BAD_HANDLE, rank)
        bad[token, rank] = -2 - beyond
        state = state_of(device)
        assert_same_sums(case, case.ours(device, bad, state), without)
        assert not state.any()


# What kernels are made of


@triton.jit
def ask_parts(codes, headers, rows, times, answers):  # type: ignore[no-untyped-def]
    """What the small functions say in the examples of their docstrings."""
    ranks = tl.arange(0, 4)
    is_rank = ranks < 3
    # What lies outside is no rank's.
    bad = tl.load(codes + ranks, mask=is_rank, other=3)
    tl.store(answers, notify.first_bad(bad, ranks, is_rank, 4))
    pair = tl.arange(0, 2)
    tl.store(answers + 1 + pair, notify.word_of(headers + 2 * pair, pair < 2, 1))
    below = windows.is_below(tl.load(rows + ranks), tl.full((), 3, tl.int32))
    tl.store(answers + 3 + ranks, below.to(tl.int64))
    tl.store(answers + 7, notify.aligned(tl.full((), 130, tl.int64)))
    tl.store(answers + 8, notify.bytes_of_window(tl.full((), 3, tl.int64), 64, 0, 0, 4))
    tl.store(answers + 9, notify.bytes_of_window(tl.full((), 0, tl.int64), 64, 0, 0, 4))
    for index in tl.static_range(3):
        now = tl.load(times + index)
        tl.store(answers + 10 + index, atomics.is_time_to_ask(now, 0).to(tl.int64))


def check_parts(device: str) -> None:
    """The small functions."""
    answers = guarded((13,), torch.int64, device)
    codes, headers = int32([0, 1, 2], device), int64([1, 2, 3, 4], device)
    times = int64([98_304, 110_592, 131_072], device)
    launch(ask_parts, device, 1, codes, headers, int32([-1, 0, 3, 2], device), times, answers)
    assert answers.tolist() == [1 + 16 * 1, 2, 4, 0, 1, 0, 1, 256, 256 + 128, 128, 0, 0, 1]


@triton.jit(do_not_specialize=["num_loaded"])
def copy_values(
    source,
    out,
    num_loaded,
    count,
    dtype: tl.constexpr,
    to: tl.constexpr,
    from_zero: tl.constexpr,
    in_hardware: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """From one dtype to another one; those from `num_loaded` on are not loaded."""
    index = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    values = load_rows(source + index, index < num_loaded, dtype, from_zero)
    store_rows(out + index, values, index < count, to, in_hardware)


@numba.njit(error_model="numpy")
def copy_values_in_numba(source, out, dtype, to):  # type: ignore[no-untyped-def]
    """As copy_values, of values as their bits where they have 16 of them; all are loaded."""
    for index in range(source.shape[0]):
        value = np.float32(source[index])
        if dtype == 1:
            value = float_of_bf16(np.uint16(source[index]))
        elif dtype == 2:
            value = float_of_fp16(np.uint16(source[index]))
        if to == 1:
            out[index] = bf16_of_float(value)
        elif to == 2:
            out[index] = fp16_of_float(value)
        else:
            out[index] = value


def copied(
    backend: str, values: torch.Tensor, to: torch.dtype, num_loaded: int = -1, from_zero: bool = False
) -> torch.Tensor:
    device = device_of(backend)
    out = guarded(values.shape, to, device)
    codes = CPU_DTYPES[values.dtype], CPU_DTYPES[to]
    if backend == "numba":
        copy_values_in_numba(bits(values).numpy(), bits(out).numpy(), *codes)
        return out
    launch(
        *(copy_values, device, triton.cdiv(len(values), 1024), bits(values).to(device), bits(out)),
        *(len(values) if num_loaded < 0 else num_loaded, len(values)),
        dtype=codes[0],
        to=codes[1],
        from_zero=from_zero,
        in_hardware=device != "cpu",
    )
    return out.cpu()


def hard_floats(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of 16 bits, the middles between two of them, what is next to those; and any others."""
    exact = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).float().numpy()
    finite = np.sort(exact[np.isfinite(exact)])
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middles, np.float32(side), dtype=np.float32) for side in (-np.inf, np.inf)]
    special = np.array([np.inf, -np.inf, np.nan, 65519.99, 65520, 65536, 1e-45, -1e-45, 3.4e38], np.float32)
    random = np.random.default_rng(4).integers(0, 2**32, 1 << 14, dtype=np.uint32).view(np.float32)
    return torch.from_numpy(np.concatenate([exact, middles, *near, special, random]))


def check_floats(backend: str) -> None:
    """load_rows and store_rows: every number of 16 bits, and float32 numbers that are rounded."""
    for dtype in NANS:
        halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
        assert_same_bits(copied(backend, halves, torch.float32), halves.float())
        for values in (halves, hard_floats(dtype)):
            assert_same_bits(copied(backend, values, dtype), with_one_nan(values.to(dtype)))


def check_floats_that_are_not_loaded(device: str) -> None:
    for dtype in CPU_DTYPES:
        values = torch.ones(300, dtype=dtype)
        ours = copied(device, values, torch.float32, 7)
        assert torch.equal(ours.signbit(), torch.arange(300) >= 7)
        ours = copied(device, values, torch.float32, 7, from_zero=True)
        assert not ours.signbit().any()
        assert ours.tolist() == [1.0] * 7 + [0.0] * 293
