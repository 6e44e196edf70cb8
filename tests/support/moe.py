"""A layer over ranks and the same layer in one process, written as plainly as possible.

`check_layer` compares outputs and gradients, `check_decode` low-latency calls bit for bit; in any place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyep.nn import ExpertParallelMoE, FeedForward, TopKGate, make_buffer
from tests.support.places import buffer_device, tensor_device
from tests.support.world import RankContext

HIDDEN, INNER, NUM_EXPERTS, TOPK = 16, 24, 8, 3
MAX_DECODE_TOKENS = 6
TOKENS = (4, 6, 0, 2)
ON_CPU: Any = {"device": "cpu", "dtype": torch.float32}
"""Stated, as some tests run with other defaults of torch."""


def make_expert(index: int) -> FeedForward:
    torch.manual_seed(1000 + index)
    return FeedForward(HIDDEN, INNER, **ON_CPU)


def make_gate(num_groups: int, topk_groups: int) -> TopKGate:
    torch.manual_seed(7)
    return TopKGate(HIDDEN, NUM_EXPERTS, TOPK, num_groups, topk_groups, **ON_CPU)


def make_layer(
    context: RankContext,
    make_one: Callable[[int], torch.nn.Module] = make_expert,
    num_groups: int = 4,
    topk_groups: int = 2,
    ranks_per_node: int | None = None,
) -> ExpertParallelMoE:
    """A layer with the Buffer that all layers of these tests share."""
    key = ("layer's buffer", ranks_per_node)
    if key not in context.keep:
        context.keep[key] = make_buffer(
            context.group, HIDDEN, NUM_EXPERTS, MAX_DECODE_TOKENS, buffer_device(), ranks_per_node
        )
    layer = ExpertParallelMoE(
        make_gate(num_groups, topk_groups),
        make_one,
        context.group,
        NUM_EXPERTS,
        HIDDEN,
        MAX_DECODE_TOKENS,
        buffer=context.keep[key],
    )
    return layer.to(tensor_device())


def rows_of(rank: int) -> Tensor:
    return torch.randn(TOKENS[rank], HIDDEN, generator=torch.Generator().manual_seed(rank), **ON_CPU)


def dense(x: Tensor, gate: TopKGate, experts: list[FeedForward]) -> Tensor:
    """Every expert on every token; what was not chosen counts for nothing."""
    topk_idx, weights = gate(x)
    output = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        share = torch.where(topk_idx == index, weights, 0.0).sum(dim=1, keepdim=True)
        output = output + expert(x) * share
    return output


def run_layer(layer: Any, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input, the gate and this rank's experts."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    output = layer(x)
    output.pow(3).sum().backward()
    gradients = [parameter.grad for parameter in (x, layer.gate.weight, *layer.experts.parameters())]
    return [
        output.detach(),
        *(torch.zeros((), **ON_CPU) if grad is None else grad.clone() for grad in gradients),
    ]


def check_layer(
    context: RankContext, num_groups: int, topk_groups: int, ranks_per_node: int | None = None
) -> None:
    layer = make_layer(context, make_expert, num_groups, topk_groups, ranks_per_node)
    x = rows_of(context.rank).to(tensor_device())
    results = run_layer(layer, x.view(2, -1, HIDDEN))
    output, grad_x, grad_gate, *grads = (result.cpu() for result in results)
    dist.all_reduce(grad_gate, group=context.group)

    gate, experts = make_gate(num_groups, topk_groups), [make_expert(index) for index in range(NUM_EXPERTS)]
    all_x = torch.cat([rows_of(rank) for rank in range(context.num_ranks)]).requires_grad_()
    right = dense(all_x, gate, experts)
    right.pow(3).sum().backward()  # type: ignore[no-untyped-call]
    first = sum(TOKENS[: context.rank])
    mine = slice(first, first + TOKENS[context.rank])
    num_local = NUM_EXPERTS // context.num_ranks
    own = experts[context.rank * num_local : (context.rank + 1) * num_local]
    assert all_x.grad is not None
    expected = [right.detach()[mine], all_x.grad[mine], gate.weight.grad]
    expected += [parameter.grad for expert in own for parameter in expert.parameters()]
    ours = [output.view(-1, HIDDEN), grad_x.view(-1, HIDDEN), grad_gate, *grads]
    for mine_, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine_, reference, rtol=1e-4, atol=1e-5)


def num_nodes(context: RankContext, ranks_per_node: int | None = None) -> int:
    buffer = make_layer(context, ranks_per_node=ranks_per_node).buffer
    assert buffer is not None
    return buffer.topology.num_nodes


def make_exact_expert(index: int) -> torch.nn.Linear:
    """On small whole numbers its products and sums are exact, in whatever order they are made."""
    expert = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, **ON_CPU)
    generator = torch.Generator().manual_seed(index)
    expert.weight.data = torch.randint(-1, 2, expert.weight.shape, generator=generator, **ON_CPU)
    return expert


def check_decode(context: RankContext, ranks_per_node: int | None = None) -> int:
    """Bit for bit: the experts' outputs are summed in float32 in the order of the choice, rounded once."""
    layer = make_layer(context, make_exact_expert, ranks_per_node=ranks_per_node).bfloat16()
    layer.low_latency = True
    generator = torch.Generator().manual_seed(context.rank)
    x = torch.randint(-3, 4, (TOKENS[context.rank], HIDDEN), generator=generator, **ON_CPU)
    x = x.bfloat16().to(tensor_device())
    output = layer(x.unsqueeze(1)).squeeze(1)
    assert not output.requires_grad
    topk_idx, weights = layer.gate(x)
    rows, shares_of, outputs = x.cpu(), weights.detach().cpu(), output.cpu()
    for row, chosen, shares, ours in zip(rows, topk_idx.tolist(), shares_of, outputs, strict=True):
        total = torch.zeros(HIDDEN, **ON_CPU)
        for index, share in zip(chosen, shares, strict=True):
            total = total + share * (make_exact_expert(index).weight.data @ row.float())
        assert torch.equal(ours, total.bfloat16())
    return len(output)
