"""What the calls of `anyep selftest` must return: dense PyTorch on the CPU, from the inputs of all ranks.

Nothing here knows about messages, windows or rings; results are compared bit for bit. Every rank can compute
the inputs of all ranks, and what an expert returns is a function of its rows, so nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anyep.cli.fp8 import from_fp8, to_fp8
from anyep.errors import AnyEPError

FP8_CHANNELS = 128


class WrongResult(AnyEPError):
    """A call returned something else than the reference."""


@dataclass(frozen=True)
class Tokens:
    """What one rank passes: rows [tokens, hidden], perhaps scales, and the experts of each token."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    scales: torch.Tensor | None = None

    def to(self, device: str) -> Tokens:
        scales = None if self.scales is None else self.scales.to(device)
        return Tokens(self.x.to(device), self.topk_idx.to(device), self.topk_weights.to(device), scales)


def same(name: str, ours: torch.Tensor, right: torch.Tensor) -> None:
    """Raise `WrongResult` unless both have the same bits: how many entries differ, and where first."""
    ours = ours.cpu()
    if ours.dtype != right.dtype or ours.shape != right.shape:
        raise WrongResult(
            f"{name} is {ours.dtype} {list(ours.shape)}, and should be {right.dtype} {list(right.shape)}"
        )
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[right.element_size()]
    if ours.dtype == torch.bool:
        differs = ours != right
    else:
        differs = ours.contiguous().view(width) != right.contiguous().view(width)
    if bool(differs.any()):
        first = torch.nonzero(differs)[0].tolist()
        raise WrongResult(
            f"{name} differs from the reference in {int(differs.sum())} of {differs.numel()} entries, first"
            f" at {first}: {ours[tuple(first)].item()!r} instead of {right[tuple(first)].item()!r}"
        )


# Normal mode


def in_rank(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """Which token goes to which rank.

    Four experts on two ranks: experts 0 and 1 are on rank 0.

    >>> in_rank(torch.tensor([[0, 1], [3, -1], [-1, -1]]), num_experts=4, num_ranks=2).int().tolist()
    [[1, 0], [0, 1], [0, 0]]
    """
    ranks = torch.where(topk_idx < 0, num_ranks, topk_idx // (num_experts // num_ranks))
    marks = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool, device="cpu")
    return marks.scatter_(1, ranks, True)[:, :num_ranks]


def received(inputs: Sequence[Tokens], rank: int, num_experts: int) -> Tokens:
    """What `rank` receives: rows in order of source rank, then source token; experts of other ranks are -1.

    >>> rows = Tokens(torch.tensor([[5.0], [6.0]]), torch.tensor([[0], [3]]), torch.tensor([[0.5], [0.25]]))
    >>> got = received([rows, rows], rank=1, num_experts=4)
    >>> got.x.tolist(), got.topk_idx.tolist()
    ([[6.0], [6.0]], [[1], [1]])
    """
    local = num_experts // len(inputs)
    parts = []
    for given in inputs:
        comes = in_rank(given.topk_idx, num_experts, len(inputs))[:, rank]
        ids = given.topk_idx[comes] - rank * local
        is_here = (ids >= 0) & (ids < local)
        weights = torch.where(is_here, given.topk_weights[comes], 0.0)
        own_scales = None if given.scales is None else given.scales[comes]
        parts.append(Tokens(given.x[comes], torch.where(is_here, ids, -1), weights, own_scales))
    scales = [part.scales for part in parts if part.scales is not None]
    return Tokens(
        torch.cat([part.x for part in parts]),
        torch.cat([part.topk_idx for part in parts]),
        torch.cat([part.topk_weights for part in parts]),
        torch.cat(scales) if scales else None,
    )


def output_of(owner: int, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What an expert, or all experts of a rank, return for rows: another multiple of them for each owner."""
    numbers = rows.view(torch.uint8).float() - 128.0 if rows.element_size() == 1 else rows.float()
    return (numbers * (1.0 + 0.375 * owner)).to(dtype)


def combined(
    given: Tokens, num_experts: int, num_ranks: int, ranks_per_node: int, biases: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """What a combine of all ranks' outputs returns: float32 sums, biases, then ranks ascending, rounded once.

    Between nodes the rows of each node are added and rounded first.
    """
    dtype = given.x.dtype if given.x.element_size() > 1 else torch.bfloat16
    goes = in_rank(given.topk_idx, num_experts, num_ranks)
    total = torch.zeros(given.x.shape, dtype=torch.float32, device="cpu")
    for bias in biases:
        total = total + bias.float()
    for first in range(0, num_ranks, ranks_per_node):
        part = torch.zeros_like(total) if ranks_per_node < num_ranks else total
        for rank in range(first, first + ranks_per_node):
            row = output_of(rank, given.x, dtype).float()
            part = torch.where(goes[:, rank, None], part + row, part)
        if ranks_per_node < num_ranks:
            is_there = goes[:, first : first + ranks_per_node].any(1, keepdim=True)
            total = torch.where(is_there, total + part.to(dtype).float(), total)
        else:
            total = part
    return total.to(dtype)


# Low-latency mode


def travelled(x: torch.Tensor, travel: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Rows as they arrive, their scales as they arrive, and the numbers that both stand for."""
    if travel == "bf16":
        return x, None, x.float()
    if travel == "fp8":
        data, scales = to_fp8(x)
        return data, scales, from_fp8(data, scales)
    blocks = x.float().view(len(x), -1, FP8_CHANNELS)
    least = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) * torch.tensor(
        1 / 448, dtype=torch.float32, device="cpu"
    )
    # The smallest power of two that is large enough.
    mantissa, exponent = torch.frexp(least)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scales = torch.ldexp(torch.ones_like(least), exponent).squeeze(-1)
    data = (blocks / scales.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn).view(x.shape)
    # As exponents, four bytes in an int32.
    bits = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return data, bits.view(torch.int32), from_fp8(data, scales)


def rows_of_expert(inputs: Sequence[Tokens], expert: int) -> list[torch.Tensor]:
    """By source rank: the tokens that chose an expert, ascending.

    >>> tokens = Tokens(torch.zeros(3, 1), torch.tensor([[0], [1], [0]]), torch.ones(3, 1))
    >>> [chosen.tolist() for chosen in rows_of_expert([tokens, tokens], 0)]
    [[0, 2], [0, 2]]
    """
    return [torch.nonzero((given.topk_idx == expert).any(1)).flatten() for given in inputs]


def combined_by_choice(given: Tokens, num_experts: int, travel: str) -> torch.Tensor:
    """What a low-latency combine returns: the weighted float32 sum in top-k order, rounded once."""
    _, _, numbers = travelled(given.x, travel)
    total = torch.zeros(given.x.shape, dtype=torch.float32, device="cpu")
    for place in range(given.topk_idx.shape[1]):
        for expert in range(num_experts):
            chose = (given.topk_idx[:, place] == expert).unsqueeze(1)
            row = output_of(expert, numbers, torch.bfloat16).float()
            total = torch.where(chose, total + row * given.topk_weights[:, place, None], total)
    return total.to(torch.bfloat16)
