"""Checks of the GPU's data kernels against the CPU's, bit for bit; on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from anyep.backends import cpu
from anyep.backends.cuda.kernels import counting, letters, sums, windows


def routing(num_tokens: int, num_topk: int, num_experts: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(num_topk, dim=-1).indices
    missing = torch.rand(ids.shape, generator=generator) < 0.2
    return torch.where(missing, torch.where(ids % 2 == 0, -1, num_experts + 3), ids)


def check_layout(device: str) -> None:
    """count_layout and place_tokens."""
    for num_tokens, num_topk, num_experts, num_ranks, num_channels in (
        (2, 2, 4, 2, 2),
        (37, 3, 12, 3, 4),
        (70, 8, 64, 8, 5),
        (5, 1, 5, 1, 9),
    ):
        ids = routing(num_tokens, num_topk, num_experts, num_tokens)
        per_rank, per_expert = np.empty(num_ranks, np.int32), np.empty(num_experts, np.int32)
        in_rank = np.empty((num_tokens, num_ranks), np.bool_)
        cpu.count_layout(ids.numpy(), num_experts // num_ranks, per_rank, per_expert, in_rank)
        counts = torch.zeros(num_ranks + num_experts, dtype=torch.int32, device=device)
        mask = torch.full((num_tokens, num_ranks), 7, dtype=torch.int8, device=device)
        tile = 16
        counting.count_layout[(triton.cdiv(num_tokens, tile),)](
            ids.to(device),
            counts,
            counts[num_ranks:],
            mask,
            num_tokens,
            num_topk,
            num_experts,
            num_experts // num_ranks,
            NUM_RANKS=num_ranks,
            TOPK_BLOCK=triton.next_power_of_2(num_topk),
            EXPERT_BLOCK=triton.next_power_of_2(num_experts + 1),
            TILE_TOKENS=tile,
        )
        assert counts.tolist() == [*per_rank.tolist(), *per_expert.tolist()]
        assert torch.equal(mask.cpu(), torch.from_numpy(in_rank).to(torch.int8))

        position = np.empty((num_tokens, num_ranks), np.int32)
        channel_counts = np.empty((num_ranks, num_channels), np.int32)
        cpu.place_tokens(in_rank, per_rank, np.empty(num_ranks, np.int32), channel_counts, position)
        placed = torch.full((num_tokens, num_ranks), 7, dtype=torch.int32, device=device)
        by_channel = torch.full((num_ranks, num_channels), 7, dtype=torch.int32, device=device)
        counting.place_tokens[(num_ranks,)](
            mask,
            placed,
            by_channel,
            num_tokens,
            num_channels,
            max(1, -(-num_tokens // num_channels)),
            NUM_RANKS=num_ranks,
            TILE_TOKENS=16,
        )
        assert torch.equal(placed.cpu(), torch.from_numpy(position))
        assert torch.equal(by_channel.cpu(), torch.from_numpy(channel_counts))


def send_head_of(ids: torch.Tensor, num_experts: int, num_ranks: int) -> tuple[torch.Tensor, list[int]]:
    """As for a rank before which others send 2 rows to each receiver; and the rows of each receiver."""
    per_rank, per_expert = np.empty(num_ranks, np.int32), np.empty(num_experts, np.int32)
    in_rank = np.empty((len(ids), num_ranks), np.bool_)
    cpu.count_layout(ids.numpy(), num_experts // num_ranks, per_rank, per_expert, in_rank)
    mask = torch.from_numpy(in_rank)
    head = torch.where(mask, mask.cumsum(0) + 1, -1).int()
    return head, [int(count) + 2 for count in per_rank]


@dataclass(frozen=True)
class Dispatch:
    """What one rank sends to `num_ranks` receivers, of which the last has no window."""

    num_ranks: int
    num_tokens: int
    num_topk: int
    num_scales: int
    strided: bool

    row_words = 40

    @property
    def experts_per_rank(self) -> int:
        return 4

    def new_results(self, num_rows: list[int], device: str) -> list[list[torch.Tensor]]:
        kinds = (
            (self.row_words, torch.int32),
            (1, torch.int32),
            (max(self.num_topk, 1), torch.int64),
            (max(self.num_topk, 1), torch.float32),
            (max(self.num_scales, 1), torch.float32),
        )
        return [
            [torch.full((rows, width), 7, dtype=dtype, device=device) for width, dtype in kinds]
            for rows in num_rows
        ]

    def addresses(self, results: list[list[torch.Tensor]]) -> torch.Tensor:
        table = [[part.data_ptr() for part in parts] for parts in results]
        table[-1] = [0] * 5
        return torch.tensor(table, dtype=torch.int64)

    def check(self, device: str) -> None:
        num_experts = self.experts_per_rank * self.num_ranks
        ids = routing(self.num_tokens, self.num_topk or 2, num_experts, 5)
        head, num_rows = send_head_of(ids, num_experts, self.num_ranks)
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(-(2**31), 2**31 - 1, (self.num_tokens, self.row_words), generator=generator).int()
        weights = torch.rand(ids.shape, generator=generator)
        scales = torch.rand(self.num_tokens, max(self.num_scales, 1), generator=generator)
        if self.strided:
            scales = scales.t().contiguous().t()
        right, ours = self.new_results(num_rows, "cpu"), self.new_results(num_rows, device)
        cpu.send_to_windows(
            0,
            self.num_tokens,
            0,
            head.numpy(),
            self.addresses(right).numpy(),
            x.data_ptr(),
            4 * self.row_words,
            scales.data_ptr(),
            *scales.stride(),
            self.num_scales,
            ids.numpy() if self.num_topk else np.zeros((0, 0), np.int64),
            weights.numpy() if self.num_topk else np.zeros((0, 0), np.float32),
            self.experts_per_rank,
        )
        for outcome in (4, 0):
            there = scales.to(device)
            windows.send_to_windows[(3,)](
                x.to(device),
                there.view(torch.int32),
                ids.to(device),
                weights.to(device),
                head.to(device),
                self.addresses(ours).to(device),
                torch.tensor([outcome], dtype=torch.int64, device=device),
                self.num_tokens,
                self.row_words,
                self.num_scales,
                *there.stride(),
                self.num_topk,
                self.experts_per_rank,
                NUM_RECEIVERS=self.num_ranks,
                SCALE_BLOCK=triton.next_power_of_2(self.num_scales) if self.num_scales else 0,
                TOPK_BLOCK=triton.next_power_of_2(self.num_topk) if self.num_topk else 0,
                TILE_TOKENS=4,
                TILE_WORDS=16,
                CHUNK_TOKENS=8,
            )
            if outcome:  # something went wrong before: nothing may be written
                assert all((part == 7).all() for parts in ours for part in parts)
        for mine, theirs in zip(ours, right, strict=True):
            for part, expected in zip(mine, theirs, strict=True):
                assert torch.equal(part.cpu(), expected)


def check_windows(device: str) -> None:
    """send_to_windows: rows, source indices, top-k ids and weights, scales; a receiver without a window."""
    Dispatch(2, 9, 2, 0, False).check(device)
    Dispatch(3, 21, 3, 5, True).check(device)
    Dispatch(2, 4, 0, 2, False).check(device)


def check_sums(device: str) -> None:
    """pull_and_sum of bf16, with infinities and NaN among the values."""
    for num_ranks, num_tokens, hidden in ((2, 9, 64), (4, 13, 136)):
        num_experts = 2 * num_ranks
        ids = routing(num_tokens, 3, num_experts, 9)
        head, num_rows = send_head_of(ids, num_experts, num_ranks)
        generator = torch.Generator().manual_seed(3)
        rows = [(torch.randn(count, hidden, generator=generator) * 3).bfloat16() for count in num_rows]
        rows[0][3, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 3e38])
        right = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
        cpu.pull_and_sum(
            0,
            num_tokens,
            head.numpy(),
            np.array([part.data_ptr() for part in rows]),
            np.zeros(num_ranks, np.int64),
            right.data_ptr(),
            0,
            0,
            hidden,
            2 * hidden,
            cpu.BF16,
            np.zeros((num_tokens, 0), np.float32),
        )
        there = [part.to(device) for part in rows]
        ours = torch.full((num_tokens, hidden), 7, dtype=torch.bfloat16, device=device)
        sums.pull_and_sum[(3,)](
            ours.view(torch.uint16),
            head.to(device),
            torch.tensor([part.data_ptr() for part in there], dtype=torch.int64, device=device),
            1,
            num_tokens,
            hidden,
            NUM_RANKS=num_ranks,
            TILE_TOKENS=4,
            TILE_VALUES=64,
            IN_HARDWARE=device != "cpu",
            **({"enable_fp_fusion": False} if device != "cpu" else {}),
        )
        assert torch.equal(ours.cpu().view(torch.int16), right.view(torch.int16))


def check_counts(device: str) -> None:
    """read_counts and fill_send_head: the prefix sums of a handle out of everyone's letters."""
    for rank, num_ranks, num_channels, local_experts, num_tokens in ((1, 2, 2, 1, 5), (0, 3, 5, 4, 9)):
        generator = np.random.default_rng(rank)
        words = num_ranks + num_channels + local_experts
        in_letters = generator.integers(0, 9, (num_ranks, words + 3)).astype(np.int32)
        sent = generator.integers(0, 9, (num_ranks, num_channels)).astype(np.int32)
        position = generator.integers(-1, 9, (num_tokens, num_ranks)).astype(np.int32)
        matrix = np.empty((num_ranks, num_ranks), np.int32)
        received = np.empty((num_ranks, num_channels), np.int32)
        by_expert = np.empty(local_experts, np.int64)
        mailboxes = in_letters.ctypes.data + in_letters.strides[0] * np.arange(num_ranks)
        cpu.read_counts(mailboxes, 0, matrix, received, by_expert)
        right = [
            np.empty(shape, np.int32) for shape in (matrix.shape, sent.shape, sent.shape, position.shape)
        ]
        cpu.fill_handle(rank, matrix, sent, received, position, *right)

        def there(values: np.ndarray[Any, Any]) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        letters_there = there(in_letters)
        ours = [torch.full(part.shape, 7, dtype=torch.int32, device=device) for part in right]
        totals = torch.full((1 + local_experts,), 7, dtype=torch.int32, device=device)
        blocks = {"NUM_RANKS": num_ranks, "RANK_BLOCK": triton.next_power_of_2(max(2, num_ranks))}
        letters.read_counts[(1,)](
            rank,
            letters_there.data_ptr(),
            in_letters.strides[0],
            there(sent),
            num_channels,
            local_experts,
            *ours[:3],
            totals,
            CHANNEL_BLOCK=triton.next_power_of_2(num_channels),
            EXPERT_BLOCK=triton.next_power_of_2(local_experts),
            **blocks,
        )
        letters.fill_send_head[(triton.cdiv(num_tokens, 4),)](
            rank, there(position), ours[0], ours[3], num_tokens, TILE_TOKENS=4, **blocks
        )
        for part, expected in zip(ours, right, strict=True):
            assert torch.equal(part.cpu(), torch.from_numpy(expected))
        assert totals.tolist() == [int(matrix[:, rank].sum()), *by_expert.tolist()]


class TwoRanks:
    """Two ranks in one process, each on a stream of its own: they exchange letters, and meet."""

    words, num_channels, local_experts, letter_bytes = 32, 3, 2, 512

    def __init__(self, device: str) -> None:
        self.heaps = [torch.zeros(1 << 14, dtype=torch.uint8, device=device) for _ in range(2)]
        self.bases = torch.tensor([heap.data_ptr() for heap in self.heaps], device=device)
        self.counts = torch.tensor([[3, 4], [5, 6]], dtype=torch.int32, device=device)
        self.by_channel = torch.arange(12, dtype=torch.int32, device=device).view(2, 2, 3)
        self.by_expert = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
        self.streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        self.places = torch.zeros(2, 2, dtype=torch.int64, device=device)
        self.outcomes = torch.zeros(2, 1, dtype=torch.int64, device=device)
        self.letters = torch.zeros(2, self.words, dtype=torch.int64, device=device)
        self.letters[:, 3] = torch.tensor([256, 512], device=device)

    def call(self, last_words: tuple[int, int], patience_ns: int) -> list[int]:
        """What went wrong, if anything, on each rank; the last word of a letter must agree."""
        self.outcomes.zero_()
        self.letters[:, 2] = torch.tensor(last_words, device=self.letters.device)
        blocks: dict[str, Any] = {"NUM_RANKS": 2, "RANK_BLOCK": 2, "num_warps": 1}
        mailboxes = [self.bases + 4096 + self.letter_bytes * rank for rank in range(2)]
        flags = [self.bases + 8192 + 128 * rank for rank in range(2)]
        # From here on nothing may wait: each kernel waits for the other one.
        torch.cuda.synchronize()
        for rank, stream in enumerate(self.streams):
            own, number = self.heaps[rank].data_ptr(), self.heaps[rank][:8].view(torch.int64)
            with torch.cuda.stream(stream):
                letters.exchange_letters[(1,)](
                    number,
                    self.letters[rank],
                    mailboxes[rank],
                    own + 4096,
                    2 * self.letter_bytes,
                    self.letter_bytes,
                    self.bases,
                    self.places[rank],
                    1,
                    self.outcomes[rank],
                    patience_ns,
                    self.counts[rank],
                    self.by_channel[rank],
                    self.by_expert[rank],
                    256,
                    self.num_channels,
                    self.local_experts,
                    FIRST_AGREEING=1,
                    END_AGREEING=3,
                    OFFSET_WORD=3,
                    NUM_WORDS=self.words,
                    CHANNEL_BLOCK=4,
                    EXPERT_BLOCK=2,
                    **blocks,
                )
                letters.meet[(1,)](
                    flags[rank], own + 8192, 128, number, self.outcomes[rank], patience_ns, **blocks
                )
        torch.cuda.synchronize()
        found: list[int] = self.outcomes.flatten().tolist()
        return found

    def letter(self, reader: int, sender: int, number: int) -> list[int]:
        """The counts in a letter."""
        at = 4096 + (number % 2 * 2 + sender) * self.letter_bytes + 256
        found: list[int] = self.heaps[reader][at : at + 4 * 7].view(torch.int32).tolist()
        return found


def check_letters(device: str) -> None:
    """exchange_letters and meet; on a GPU only, as they wait for each other."""
    patience_ns = 5 * 10**9
    # To load a kernel may have to wait for running ones: here one without patience comes first.
    assert TwoRanks(device).call((7, 7), -patience_ns)[0] == 1 + 4 * 1, "rank 0 did not find rank 1 late"
    ranks = TwoRanks(device)
    for number, last_word in enumerate((7, 7, 8, 7), 1):
        # Each finds the other one different.
        expected = [0, 0] if last_word == 7 else [2 + 4 * 1, 2 + 4 * 0]
        assert ranks.call((7, last_word), patience_ns) == expected
        assert (ranks.places - ranks.bases).tolist() == [[256, 512]] * 2
        for reader in range(2):
            assert int(ranks.heaps[reader][:8].view(torch.int64)) == number
            for sender in range(2):
                of_expert = ranks.by_expert[sender, 2 * reader : 2 * reader + 2].tolist()
                of_channel = ranks.by_channel[sender, reader].tolist()
                right = [*ranks.counts[sender].tolist(), *of_channel, *of_expert]
                assert ranks.letter(reader, sender, number) == right


CHECKS = (check_layout, check_windows, check_sums, check_counts)
