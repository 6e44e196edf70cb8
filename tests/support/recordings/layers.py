"""Gradients and layers, as rounds. On small whole numbers every sum is exact, in whatever order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from anyep import autograd
from tests.support.recorder import Player, seed_of, uniform
from tests.support.recordings.normal import MANY, choices, num_received


@dataclass(frozen=True)
class Gradients:
    """Dispatch and combine with gradients. On whole numbers every sum is exact, in whatever order."""

    name: str
    worst: bool = False

    def play(self, player: Player) -> None:
        tokens = MANY[player.rank % len(MANY)]
        ids, _ = choices(self.name, "some missing", 3, 2, player, tokens)
        seed = seed_of(self.name, player.rank)
        x, weights = whole(player, seed, tokens, 16), whole(player, seed + 1, tokens, 3)
        x.requires_grad_()
        weights.requires_grad_()
        worst = 60 if self.worst else 0
        received = autograd.dispatch(player.buffer, x, ids, weights, 2 * player.num_ranks, worst)
        num_rows = num_received(player, received.handle)
        here = (received.topk_idx >= 0).any(1)
        used = torch.where(here.unsqueeze(1), received.x, 0)
        used_weights = torch.where(received.topk_idx >= 0, received.topk_weights, 0)
        combined, combined_weights = autograd.combine(
            player.buffer, used * (player.rank + 2), received.handle, used_weights
        )
        again = autograd.dispatch_again(player.buffer, x, received.handle)
        again = torch.where(here.unsqueeze(1), again, 0)
        assert combined_weights is not None
        loss = (combined * whole(player, seed + 2, tokens, 16)).sum() + (again * 2).sum()
        (loss + (combined_weights * whole(player, seed + 3, tokens, 3)).sum()).backward()
        player.note(
            self.name,
            rows=received.x[:num_rows],
            ids=received.topk_idx,
            combined=combined,
            weights=combined_weights,
            again=again[:num_rows],
            x_grad=x.grad,
            weights_grad=weights.grad,
        )


def whole(player: Player, seed: int, *shape: int) -> torch.Tensor:
    """Small whole numbers in float32."""
    return player.there(torch.floor(uniform(seed, *shape) * 9) - 4)


class _Gate(nn.Module):
    """Has chosen already."""

    def __init__(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        super().__init__()
        self.ids, self.weights = ids, weights

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids, self.weights


class _Times(nn.Module):
    def __init__(self, factor: int, device: str) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(float(factor), device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor.to(x.dtype)


@dataclass(frozen=True)
class Layer:
    """The layer of `anyep.nn`, with experts that multiply by small whole numbers; forward and backward, or
    decoding."""

    name: str
    decode: bool = False

    def play(self, player: Player) -> None:
        from anyep.nn import ExpertParallelMoE

        tokens, hidden = MANY[player.rank % len(MANY)], 128 if self.decode else 16
        seed = seed_of(self.name, player.rank)
        ids, _ = choices(self.name, "some missing", 2, 2, player, tokens)
        weights = (whole(player, seed, tokens, 2) / 4).requires_grad_()
        x = whole(player, seed + 1, tokens, hidden).requires_grad_()
        experts = [_Times(2 * player.rank + local + 1, player.device) for local in range(2)]
        layer = ExpertParallelMoE(
            _Gate(ids, weights), experts, player.group, max_decode_tokens=8, buffer=player.buffer
        )
        if self.decode:
            player.buffer.clean_low_latency_buffer(8, hidden, 2 * player.num_ranks)
            player.note(self.name, output=layer.decode(x.detach().bfloat16()))
            return
        output = layer(x)
        assert isinstance(output, torch.Tensor)
        (output * whole(player, seed + 2, tokens, hidden)).sum().backward()
        grads = {f"factor_{local}": expert.factor.grad for local, expert in enumerate(experts)}
        player.note(self.name, output=output, x_grad=x.grad, weights_grad=weights.grad, **grads)
