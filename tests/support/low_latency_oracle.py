"""The obvious reference of low-latency mode: dense PyTorch, from all ranks' inputs, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128


@dataclass(frozen=True)
class RankInput:
    """What one rank passes."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class ExpertRows:
    """The rows of one expert, in order of source rank, then token; a token that chose it twice comes once."""

    x: torch.Tensor
    source_rank: torch.Tensor
    source_token: torch.Tensor


def rows_of_expert(inputs: list[RankInput], expert: int, absent: frozenset[int] = frozenset()) -> ExpertRows:
    rows, ranks, tokens = [], [], []
    for rank, given in enumerate(inputs):
        if rank in absent:
            continue
        for token, choices in enumerate(given.topk_idx.tolist()):
            if expert in choices:
                rows.append(given.x[token])
                ranks.append(rank)
                tokens.append(token)
    hidden = inputs[0].x.shape[1]
    x = torch.stack(rows) if rows else torch.empty(0, hidden, dtype=torch.bfloat16, device="cpu")
    source_rank, source_token = (
        torch.tensor(numbers, dtype=torch.int64, device="cpu") for numbers in (ranks, tokens)
    )
    return ExpertRows(x, source_rank, source_token)


def fp8(x: torch.Tensor, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of finite bf16 as e4m3fn with a scale per 128 channels."""
    blocks = x.float().view(len(x), x.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = amax * torch.tensor(1 / 448, dtype=torch.float32, device="cpu")
    if round_scale:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2**exponent, 0.5 <= mantissa < 1
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
        data = blocks / scale
    else:
        data = blocks * (torch.full_like(amax, 448.0) / amax)
    data = data.clamp(-448, 448).to(torch.float8_e4m3fn)
    return data.view(x.shape), scale.squeeze(-1)


def ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two as exponent bytes, 4 to an int32, the first in the lowest byte."""
    exponents = (scales.contiguous().view(torch.int32) >> 23) & 0xFF
    parts = exponents.view(*scales.shape[:-1], scales.shape[-1] // 4, 4)
    packed = sum(parts[..., index].to(torch.int64) << (8 * index) for index in range(4))
    assert isinstance(packed, torch.Tensor)
    return packed.to(torch.int32)


def combine(
    given: RankInput,
    rank: int,
    outputs: list[torch.Tensor],
    sources: list[ExpertRows],
    absent: frozenset[int] = frozenset(),
) -> torch.Tensor:
    """The weighted float32 sum in top-k order; `outputs` are the rows that each expert made of its rows,
    `absent` the experts of ranks that are not there."""
    combined = torch.zeros(given.x.shape, dtype=torch.float32, device="cpu")
    for token, choices in enumerate(given.topk_idx.tolist()):
        for slot, expert in enumerate(choices):
            if not 0 <= expert < len(outputs) or expert in absent:
                continue
            mine = (sources[expert].source_rank == rank) & (sources[expert].source_token == token)
            row = outputs[expert][int(torch.nonzero(mine))]
            combined[token] = combined[token] + row.float() * given.topk_weights[token, slot]
    return combined.bfloat16()
