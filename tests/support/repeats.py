"""Calls that are repeated with less work, beside the same calls made step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anyep.api.buffer import Buffer
from tests.support.gpu_scenarios import FEW_SMS, device_of
from tests.support.places import Place

PLACES = [
    place.param(marks=pytest.mark.xdist_group(f"oracle of {place}"))
    for place in (Place("simulated", 2), Place("cuda", 2), Place("cuda", 8))
]
HIDDEN = 32


class Watched:
    """A Buffer, and how many of its calls were repeated."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.num_repeats = 0
        ops = buffer.runtime.normal.ops
        for name in ("dispatch_again", "combine_again", "counted_again"):
            setattr(ops, name, self._counting(getattr(ops, name)))

    def _counting(self, repeat: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            found = repeat(*arguments)
            self.num_repeats += found is not None
            return found

        return counted

    def step_by_step(self, call: Callable[[], Any]) -> Any:
        """The call, made while something follows its phases, so that it is not repeated."""
        control = self.buffer.runtime.control
        control.between_steps = lambda call, phase: None
        try:
            return call()
        finally:
            control.between_steps = None


def arguments_for(buffer: Buffer, tokens: int, seed: int, hidden: int = HIDDEN) -> dict[str, Any]:
    """Those of a dispatch without top-k: ranks have different numbers of tokens, and each token some
    ranks."""
    counted = counted_arguments(buffer, tokens, seed, hidden)
    return {name: value for name, value in counted.items() if not name.startswith("topk")}


def counted_arguments(buffer: Buffer, tokens: int, seed: int, hidden: int = HIDDEN) -> dict[str, Any]:
    """The same, with top-k ids and weights."""
    generator = torch.Generator().manual_seed(31 * seed + buffer.rank)
    device, num_experts = device_of(buffer), 2 * buffer.group_size
    count = tokens + buffer.rank
    topk_idx = torch.rand(count, num_experts, generator=generator).topk(2, dim=1).indices.to(device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return {
        "x": torch.randn(count, hidden, generator=generator).bfloat16().to(device),
        "topk_idx": topk_idx,
        "topk_weights": torch.rand(count, 2, generator=generator).to(device),
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "config": FEW_SMS,
    }


def pair_of(x: torch.Tensor, factor: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Data of one byte, and a scale for each row of it, made of these rows."""
    data = (x.float() * 20 * factor).to(torch.int8).view(torch.uint8)
    return data, x.float().abs().amax(dim=1, keepdim=True) * factor


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, from an address that is not a multiple of 16."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    memory[1:] = tensor.flatten()
    return memory[1:].view(tensor.shape)


def column_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T.contiguous().T


def without_gradients(call: Callable[[], Any]) -> Any:
    """As autograd functions make calls: arguments may require gradients."""
    with torch.no_grad():
        return call()
