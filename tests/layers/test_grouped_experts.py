"""Experts on rows that are grouped by expert, and the layer with an `ElasticBuffer`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from anyep import ElasticBuffer, InvalidCall, NotSupported
from anyep.grouped_experts import LOOP, run_grouped_experts, way_of
from anyep.nn import ExpertParallelMoE, FeedForward, TopKGate
from tests.support.places import Place, buffer_device, tensor_device
from tests.support.world import RankContext

HIDDEN, INNER, NUM_EXPERTS, TOPK, TOKENS = 16, 32, 8, 3, 10


def experts_of(count: int, dtype: torch.dtype = torch.float32) -> list[FeedForward]:
    torch.manual_seed(0)
    return [FeedForward(HIDDEN, INNER, device="cpu", dtype=dtype) for _ in range(count)]


def outputs_and_gradients(way: str, counts: list[int]) -> list[Tensor]:
    experts, random = experts_of(len(counts)), torch.Generator(device="cpu").manual_seed(1)
    rows = torch.randn((sum(counts), HIDDEN), generator=random, device="cpu").requires_grad_()
    outputs = run_grouped_experts(rows, counts, experts, way)
    outputs.square().sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    gradients = [expert.up.weight.grad for expert in experts]
    return [outputs, rows.grad, *(torch.zeros(1) if grad is None else grad for grad in gradients)]


@pytest.mark.parametrize("counts", [[16, 32, 16], [0, 16, 0]])
@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_grouped_products_are_those_of_the_loop(counts: list[int]) -> None:
    for one, other in zip(
        outputs_and_gradients("grouped_mm", counts), outputs_and_gradients("loop", counts), strict=True
    ):
        torch.testing.assert_close(one, other.expand_as(one))


def test_the_way_is_a_loop_on_the_cpu_and_for_other_experts() -> None:
    rows = torch.zeros((16, HIDDEN), dtype=torch.bfloat16, device="cpu")
    assert way_of(rows, experts_of(2, torch.bfloat16)) == LOOP
    assert way_of(rows, [lambda x: x]) == LOOP


def test_counts_that_do_not_fit() -> None:
    rows = torch.zeros((4, HIDDEN), dtype=torch.float32, device="cpu")
    with pytest.raises(
        InvalidCall, match=r"counts are 1 groups of 3 rows together: there are 2 experts and 4"
    ):
        run_grouped_experts(rows, [3], experts_of(2))


def reference(gate: TopKGate, experts: list[FeedForward], x: Tensor) -> Tensor:
    topk_idx, weights = gate(x)
    total = torch.zeros_like(x)
    for expert, module in enumerate(experts):
        weight = torch.where(topk_idx == expert, weights, 0.0).sum(dim=1, keepdim=True)
        total = total + weight * module(x)
    return total


def check_layer(context: RankContext, ranks_per_node: int | None) -> None:
    """The same outputs and gradients as in one process; and no low-latency mode."""
    local, rank = NUM_EXPERTS // context.num_ranks, context.rank
    torch.manual_seed(3)
    gate = TopKGate(HIDDEN, NUM_EXPERTS, TOPK).to(tensor_device())
    experts = [expert.to(tensor_device()) for expert in experts_of(NUM_EXPERTS)]
    own = nn.ModuleList(experts[rank * local : (rank + 1) * local])
    random = torch.Generator(device="cpu").manual_seed(rank)
    # The last rank has no tokens.
    num_tokens = TOKENS if rank < context.num_ranks - 1 else 0
    x = torch.randn((num_tokens, HIDDEN), generator=random, device="cpu").to(tensor_device())
    with ElasticBuffer(
        context.group,
        num_max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        device=buffer_device(),
        ranks_per_node=ranks_per_node,
    ) as buffer:
        layer = ExpertParallelMoE(gate, own, context.group, buffer=buffer)
        found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
        output = layer(found)
        assert layer.expert_way == LOOP
        output.square().sum().backward()
        of_gate = gate.weight.grad
        gate.weight.grad = None
        dense = reference(gate, experts, wanted)
        dense.square().sum().backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(output, dense, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)
        if num_tokens:
            torch.testing.assert_close(of_gate, gate.weight.grad, rtol=1e-4, atol=1e-5)
        layer.low_latency = True
        with pytest.raises(NotSupported, match="an ElasticBuffer has no low-latency mode"):
            layer(x)


@pytest.mark.parametrize("place", [Place("cpu", 2).param(), Place("cpu", 4, num_nodes=2).param()])
def test_layer(place: Place) -> None:
    place.world().run(check_layer, place.ranks_per_node)
