"""Gradients of dispatch and combine against a dense computation in float64, in any place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyep.api.buffer import Buffer
from anyep.autograd import combine, dispatch
from tests.support.cases import buffer_for
from tests.support.places import buffer_device, tensor_device
from tests.support.world import RankContext

LOCAL_EXPERTS, TOPK, HIDDEN = 2, 3, 8
TOKENS = (5, 0, 7, 2)


def routing_of(rank: int, num_ranks: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Experts, some of them none, and weights."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    num_experts = LOCAL_EXPERTS * num_ranks
    ids = torch.randint(-1, num_experts, (TOKENS[rank], TOPK), generator=generator, device="cpu")
    ids[:1] = -1  # a token that goes nowhere
    return ids, torch.rand(ids.shape, generator=generator, dtype=torch.float32, device="cpu")


def rows_of(rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(7000 + 100 * seed + rank)
    return torch.randn(TOKENS[rank], HIDDEN, generator=generator, dtype=torch.float32, device="cpu")


def matrix_of(rank: int) -> Tensor:
    numbers = torch.arange(HIDDEN * HIDDEN, dtype=torch.float32, device="cpu")
    return (numbers * (rank + 1.0)).sin().view(HIDDEN, HIDDEN) / 3


def squares(combined: Tensor, combined_weights: Tensor) -> Tensor:
    return combined.square().sum() + combined_weights.pow(3).sum()


def on_ranks(buffer: Buffer, x: Tensor, ids: Tensor, weights: Tensor, num_worst: int = 0) -> Any:
    """Something that is not linear in rows and weights, and different on every rank."""
    num_experts = LOCAL_EXPERTS * buffer.group_size
    received = dispatch(buffer, x, ids, weights, num_experts, num_worst)
    # Rows past the received ones are undefined, and belong to no expert.
    is_row = (received.topk_idx >= 0).any(dim=1, keepdim=True)
    rows = torch.where(is_row, received.x, 0.0)
    row_weights = torch.where(is_row, received.topk_weights, 0.0)
    outputs = (rows @ matrix_of(buffer.rank).to(rows)).tanh() * row_weights.sum(1, keepdim=True)
    return combine(buffer, outputs.to(x.dtype), received.handle, row_weights.square())


def dense(x: Tensor, ids: Tensor, weights: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    combined, combined_weights = torch.zeros_like(x), torch.zeros_like(weights)
    for rank in range(num_ranks):
        there = torch.where((ids >= rank * LOCAL_EXPERTS) & (ids < (rank + 1) * LOCAL_EXPERTS), weights, 0.0)
        combined = combined + (x @ matrix_of(rank).to(x)).tanh() * there.sum(1, keepdim=True)
        combined_weights = combined_weights + there.square()
    return combined, combined_weights


def check_against_dense(context: RankContext, ranks_per_node: int | None = None) -> None:
    buffer = buffer_for(context, None, device=buffer_device(), ranks_per_node=ranks_per_node)
    ids, weights = (part.to(tensor_device()) for part in routing_of(context.rank, context.num_ranks))
    x = rows_of(context.rank).to(tensor_device()).requires_grad_()
    weights.requires_grad_()
    results = on_ranks(buffer, x, ids, weights)
    grads = torch.autograd.grad(squares(*results), (x, weights), create_graph=True)
    second = torch.autograd.grad(grads[0].square().sum() + grads[1].square().sum(), (x, weights))

    right_x, right_weights = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    right = dense(right_x, ids, right_weights, context.num_ranks)
    right_grads = torch.autograd.grad(squares(*right), (right_x, right_weights), create_graph=True)
    right_second = torch.autograd.grad(
        right_grads[0].square().sum() + right_grads[1].square().sum(), (right_x, right_weights)
    )
    for ours, reference in zip(
        (*results, *grads, *second), (*right, *right_grads, *right_second), strict=True
    ):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-4, atol=1e-5)


def values_and_gradients(function: Any, buffer: Buffer, dtype: torch.dtype, seed: int) -> list[Tensor]:
    ids, weights = routing_of(buffer.rank, buffer.group_size, seed)
    x = rows_of(buffer.rank, seed).to(dtype).requires_grad_()
    weights.requires_grad_()
    results = function(buffer, x, ids, weights)
    squares(*results).backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [*(result.detach() for result in results), x.grad, weights.grad]
