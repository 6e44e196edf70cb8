"""A layer of experts with all ranks' inputs, for frameworks whose parts are compared with a dense one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_EXPERTS = 8
TOPK = 3
HIDDEN = 64
INNER = 32


@dataclass(frozen=True)
class Layer:
    """All ranks' tokens and all experts' weights, with gradients: tokens[r] goes to experts[r]."""

    tokens: list[torch.Tensor]
    experts: list[torch.Tensor]
    probs: list[torch.Tensor]
    output_grads: list[torch.Tensor]
    up: torch.Tensor
    down: torch.Tensor


def layer_of(num_ranks: int, dtype: torch.dtype) -> Layer:
    chance = torch.Generator().manual_seed(1000 + num_ranks)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=chance).to(dtype)

    num_tokens = [11 + 5 * rank for rank in range(num_ranks)]
    probs, experts = [], []
    for count in num_tokens:
        chosen, ids = torch.rand((count, NUM_EXPERTS), generator=chance).topk(TOPK)
        probs.append(chosen.requires_grad_())
        experts.append(ids)
    return Layer(
        [draw(count, HIDDEN).requires_grad_() for count in num_tokens],
        experts,
        probs,
        [draw(count, HIDDEN) for count in num_tokens],
        (draw(NUM_EXPERTS, HIDDEN, INNER) / HIDDEN**0.5).requires_grad_(),
        (draw(NUM_EXPERTS, INNER, HIDDEN) / INNER**0.5).requires_grad_(),
    )
