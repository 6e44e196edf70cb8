"""Router logits, losses and the bias: against plain loops, and over ranks against one process."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anyep import InvalidCall
from anyep.nn import TopKGate, expert_counts, load_balancing_loss, router_z_loss, update_bias
from tests.support.depth import examples
from tests.support.moe import HIDDEN, NUM_EXPERTS, TOKENS, TOPK, make_layer, rows_of
from tests.support.places import Place, tensor_device
from tests.support.world import RankContext, get_world

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def plain_load_balancing_loss(logits: Tensor, topk_idx: Tensor) -> float:
    num_tokens, num_experts = logits.shape
    loss = 0.0
    for expert in range(num_experts):
        fraction = (topk_idx == expert).sum().item() / topk_idx.numel()
        probability = sum(float(row.double().softmax(0)[expert]) for row in logits) / num_tokens
        loss += num_experts * fraction * probability
    return loss


@examples(20, deep=100)
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3))
def test_losses_by_their_definition(seed: int, num_tokens: int, num_experts: int, num_sequences: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    topk = min(2, num_experts)
    logits = 3 * torch.randn(num_sequences, num_tokens, num_experts, generator=generator)
    topk_idx = torch.rand(logits.shape, generator=generator).topk(topk).indices
    right = [plain_load_balancing_loss(*both) for both in zip(logits, topk_idx, strict=True)]
    for sequence, alone in enumerate(right):
        loss = load_balancing_loss(logits[sequence], topk_idx[sequence])
        assert math.isclose(loss.item(), alone, rel_tol=1e-5)
    assert math.isclose(load_balancing_loss(logits, topk_idx).item(), sum(right) / len(right), rel_tol=1e-5)
    squares = [math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits.flatten(0, 1).tolist()]
    assert math.isclose(router_z_loss(logits).item(), sum(squares) / len(squares), rel_tol=1e-4)
    counts = expert_counts(topk_idx, num_experts)
    assert counts.tolist() == [
        [int((chosen == expert).sum()) for expert in range(num_experts)] for chosen in topk_idx
    ]


@pytest.mark.slow  # for the import
@pytest.mark.skipif(find_spec("transformers") is None, reason="pip install 'anyep[examples]'")
def test_loss_is_that_of_transformers() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    theirs = load_balancing_loss_func((logits,), num_experts=8, top_k=3)
    torch.testing.assert_close(3 * load_balancing_loss(logits, logits.topk(3).indices), theirs)


def test_even_and_uneven_loads() -> None:
    even = torch.arange(8).view(4, 2)
    assert load_balancing_loss(torch.zeros(4, 8), even).item() == pytest.approx(1.0)
    certain = torch.full((4, 8), -100.0)
    certain[:, 3] = 100.0
    assert load_balancing_loss(certain, torch.full((4, 1), 3)).item() == pytest.approx(8.0)
    nothing = torch.zeros(0, 8)
    assert load_balancing_loss(nothing, torch.zeros(0, 2, dtype=torch.int64)).item() == 0.0
    assert router_z_loss(nothing).item() == 0.0


def test_losses_do_not_depend_on_the_default_dtype() -> None:
    logits, topk_idx = torch.randn(6, 4), torch.arange(6).view(6, 1) % 4
    right = load_balancing_loss(logits, topk_idx)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(load_balancing_loss(logits, topk_idx), right)
    finally:
        torch.set_default_dtype(torch.float32)


# Over ranks


def make_balanced_gate() -> TopKGate:
    torch.manual_seed(11)
    return TopKGate(HIDDEN, NUM_EXPERTS, TOPK, has_bias=True)


def gradient_of_batch(context: RankContext, with_group: bool) -> tuple[float, Tensor]:
    """The mean over ranks of the loss, and of its gradients, as data parallelism makes it."""
    gate = make_balanced_gate()
    topk_idx, _, logits = gate(rows_of(context.rank), output_router_logits=True)
    loss = load_balancing_loss(logits, topk_idx, context.group if with_group else None)
    loss.backward()  # type: ignore[no-untyped-call]
    mean, gradient = loss.detach().clone(), gate.weight.grad
    assert gradient is not None
    for tensor in (mean, gradient):
        dist.all_reduce(tensor, group=context.group)
        tensor.div_(context.num_ranks)
    return mean.item(), gradient


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_loss_of_a_batch_over_ranks(num_ranks: int) -> None:
    """Ranks have different numbers of tokens, one of them has none."""
    gate = make_balanced_gate()
    topk_idx, _, logits = gate(
        torch.cat([rows_of(rank) for rank in range(num_ranks)]), output_router_logits=True
    )
    right = load_balancing_loss(logits, topk_idx)
    right.backward()  # type: ignore[no-untyped-call]
    for loss, gradient in get_world(num_ranks).run(gradient_of_batch, True):
        assert loss == pytest.approx(right.item(), rel=1e-6)
        torch.testing.assert_close(gradient, gate.weight.grad, **TOLERANCE)


def test_the_mean_of_the_ranks_own_losses_is_another_loss() -> None:
    (with_group, gradient), _ = get_world(2).run(gradient_of_batch, True)
    (without, other_gradient), _ = get_world(2).run(gradient_of_batch, False)
    assert abs(without - with_group) > 0.01 * with_group
    assert (gradient - other_gradient).abs().max() > 0.01 * gradient.abs().max()


def sequences_of(rank: int) -> Tensor:
    return torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(50 + rank))


def gradient_of_sequences(context: RankContext) -> Tensor:
    gate = make_balanced_gate()
    topk_idx, _, logits = gate(sequences_of(context.rank), output_router_logits=True)
    with pytest.raises(
        InvalidCall, match="3 dimensions, and there is a group: a loss by sequence needs none"
    ):
        load_balancing_loss(logits, topk_idx, context.group)
    (load_balancing_loss(logits, topk_idx) + router_z_loss(logits)).backward()  # type: ignore[no-untyped-call]
    assert gate.weight.grad is not None
    dist.all_reduce(gate.weight.grad, group=context.group)
    return gate.weight.grad / context.num_ranks


def test_losses_by_sequence_and_by_token_need_no_group() -> None:
    gate = make_balanced_gate()
    topk_idx, _, logits = gate(
        torch.cat([sequences_of(rank) for rank in range(4)]), output_router_logits=True
    )
    (load_balancing_loss(logits, topk_idx) + router_z_loss(logits)).backward()  # type: ignore[no-untyped-call]
    for gradient in get_world(4).run(gradient_of_sequences):
        torch.testing.assert_close(gradient, gate.weight.grad, **TOLERANCE)


# The bias


def biases(context: RankContext, with_group: bool) -> Tensor:
    gate = make_balanced_gate()
    assert gate.bias is not None
    for _ in range(5):
        topk_idx, _ = gate(rows_of(context.rank))
        counts = expert_counts(topk_idx, NUM_EXPERTS)
        update_bias(gate.bias, counts, 0.01, context.group if with_group else None)
        assert int(counts.sum()) == TOKENS[context.rank] * TOPK
    return gate.bias


def test_ranks_have_the_bias_of_one_process() -> None:
    gate = make_balanced_gate()
    assert gate.bias is not None
    for _ in range(5):
        topk_idx, _ = gate(torch.cat([rows_of(rank) for rank in range(4)]))
        update_bias(gate.bias, expert_counts(topk_idx, NUM_EXPERTS), 0.01)
    assert gate.bias.abs().max() > 0.01
    assert all(torch.equal(bias, gate.bias) for bias in get_world(4).run(biases, True))
    first, *others = get_world(4).run(biases, False)
    assert not all(torch.equal(bias, first) for bias in others)


def test_the_bias_evens_the_load() -> None:
    gate = make_balanced_gate()
    x = torch.randn(400, HIDDEN, generator=torch.Generator().manual_seed(5)) + 2.0  # uneven by the shift
    assert gate.bias is not None
    loads = []
    for _ in range(150):
        counts = expert_counts(gate(x)[0], NUM_EXPERTS)
        loads.append(counts.max().item() / counts.float().mean().item())
        update_bias(gate.bias, counts, 0.004)
    assert loads[0] > 1.5
    assert loads[-1] < 1.1


def test_the_bias_chooses_but_does_not_weigh() -> None:
    gate, x = make_balanced_gate(), torch.randn(6, HIDDEN)
    assert gate.bias is not None
    gate.bias[2], gate.bias[5] = 10.0, -10.0
    topk_idx, weights, logits = gate(x, output_router_logits=True)
    assert bool((topk_idx[:, 0] == 2).all())
    assert not bool((topk_idx == 5).any())
    shares = logits.softmax(-1).gather(-1, topk_idx)
    torch.testing.assert_close(weights, shares / shares.sum(-1, keepdim=True))
    for chosen, again in zip((topk_idx, weights), gate.choose(logits), strict=True):
        assert torch.equal(chosen, again)
    assert "bias" in gate.state_dict()
    assert "bias" not in TopKGate(HIDDEN, NUM_EXPERTS, TOPK).state_dict()


def test_a_gate_has_shapes_on_the_meta_device() -> None:
    gate = TopKGate(HIDDEN, NUM_EXPERTS, TOPK, has_bias=True).to("meta")
    topk_idx, weights = gate(torch.empty(5, HIDDEN, device="meta"))
    assert topk_idx.shape == weights.shape == (5, TOPK)


def test_a_low_bias_does_not_open_other_groups() -> None:
    gate = TopKGate(HIDDEN, 8, 2, num_groups=4, topk_groups=1, has_bias=True)
    assert gate.bias is not None
    gate.bias -= 5.0
    topk_idx, _ = gate(torch.randn(50, HIDDEN))
    assert bool((topk_idx[:, 0] // 2 == topk_idx[:, 1] // 2).all())


# The layer


def check_logits(context: RankContext) -> None:
    layer, x = make_layer(context), rows_of(context.rank).to(tensor_device())
    output = layer(x)
    again, logits = layer(x.view(2, -1, HIDDEN), output_router_logits=True)
    assert torch.equal(again.view(-1, HIDDEN), output)
    assert (logits.dtype, logits.shape) == (torch.float32, (len(x), NUM_EXPERTS))
    assert torch.equal(layer.gate.choose(logits)[0], layer.gate(x)[0])
    logits.sum().backward()
    torch.testing.assert_close(layer.gate.weight.grad, x.sum(0).expand(NUM_EXPERTS, -1), **TOLERANCE)
    with torch.autocast(tensor_device(), dtype=torch.bfloat16):
        _, under_autocast = layer(x, output_router_logits=True)
    assert torch.equal(under_autocast, logits)
    layer.low_latency = True
    layer.bfloat16()
    rows = x.bfloat16()
    decoded, logits = layer(rows, output_router_logits=True)
    assert torch.equal(decoded, layer(rows))
    assert torch.equal(logits, layer.gate(rows, output_router_logits=True)[2])


@pytest.mark.parametrize("place", [Place("cpu", 4).param(), Place("cuda", 2).param()])
def test_layer_returns_logits_when_asked(place: Place) -> None:
    place.world().run(check_logits, timeout=240.0)


def check_compiled_logits(context: RankContext) -> None:
    torch._dynamo.reset()
    layer, x = make_layer(context), rows_of(context.rank)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, output_router_logits=True)
    for ours, eager in zip(compiled, layer(x, output_router_logits=True), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.slow
def test_logits_of_a_compiled_layer() -> None:
    get_world(2).run(check_compiled_logits, timeout=180.0)


def test_a_bias_that_chooses_experts_without_a_score() -> None:
    gate = TopKGate(HIDDEN, 4, 2, has_bias=True)
    assert gate.bias is not None
    gate.bias.copy_(torch.tensor([0.0, 0.0, 5.0, 5.0]))
    topk_idx, weights = gate.choose(torch.tensor([[200.0, 0.0, 0.0, 0.0]]))
    assert sorted(topk_idx[0].tolist()) == [2, 3]
    assert weights.tolist() == [[0.0, 0.0]]
