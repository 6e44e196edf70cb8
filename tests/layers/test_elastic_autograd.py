"""Gradients of `ElasticBuffer`, in both layouts: exact on whole numbers, where dispatch and combine are
linear; and against a dense computation in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anyep import Buffer
from anyep.autograd import ElasticReceived, elastic_combine, elastic_dispatch
from anyep.errors import InvalidCall
from tests.support.elastic_cases import elastic_buffer
from tests.support.places import Place, tensor_device
from tests.support.world import RankContext

HIDDEN, TOPK, LOCAL_EXPERTS, ALIGNMENT = 8, 3, 2, 4
TOKENS = (5, 0, 7, 2)
PLACES = [Place("cpu", 2), Place("cpu", 4), Place("cuda", 4)]
EVERYWHERE = pytest.mark.parametrize("place", [place.param() for place in PLACES])
LAYOUTS = pytest.mark.parametrize("expands", [False, True], ids=["compact", "expanded"])


def routing_of(rank: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Distinct experts, some of them none, and weights."""
    random = torch.Generator(device="cpu").manual_seed(rank)
    ids = torch.rand((TOKENS[rank], num_experts), generator=random, device="cpu").argsort(dim=1)[:, :TOPK]
    ids[torch.rand(ids.shape, generator=random, device="cpu") < 0.2] = -1
    ids[:1] = -1  # a token that goes nowhere
    weights = torch.rand(ids.shape, generator=random, device="cpu")
    return ids.to(tensor_device()), weights.to(tensor_device())


def whole_numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    random = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=random, device="cpu").float().to(tensor_device())


def total(context: RankContext, value: Tensor) -> float:
    summed = value.detach().double().cpu()
    dist.all_reduce(summed, group=context.group)
    return summed.item()


def is_filled(received: ElasticReceived) -> Tensor:
    """float32 [rows, 1]: 1 for a row that is not padding."""
    handle = received.handle
    if not handle.do_expand:
        return torch.ones((len(received.x), 1), dtype=torch.float32, device=received.x.device)
    filled = torch.zeros((len(received.x), 1), dtype=torch.float32, device=received.x.device)
    starts = torch.tensor([0, *handle.num_recv_tokens_per_expert_list], device="cpu").cumsum(0).tolist()
    for start, end in zip(starts, handle.psum_num_recv_tokens_per_expert.tolist(), strict=False):
        filled[start:end] = 1
    return filled


def check_adjoint(context: RankContext, expands: bool) -> None:
    """<dispatch(x, w), (y, v)> == <(x, w), combine(y, v)> over all ranks; the gradients are these."""
    buffer, rank, num_experts = elastic_buffer(context), context.rank, LOCAL_EXPERTS * context.num_ranks
    ids, _ = routing_of(rank, num_experts)
    x, weights = whole_numbers((len(ids), HIDDEN), rank), whole_numbers((len(ids), TOPK), 10 + rank)
    x.requires_grad_()
    weights.requires_grad_()
    received = elastic_dispatch(
        buffer, x, ids, weights, num_experts, do_expand=expands, expert_alignment=ALIGNMENT
    )
    row_weights = received.topk_weights
    assert row_weights is not None
    y = (whole_numbers(tuple(received.x.shape), 20 + rank) * is_filled(received)).requires_grad_()
    v = whole_numbers(tuple(row_weights.shape), 30 + rank).requires_grad_()
    combined, combined_weights = elastic_combine(buffer, y, received.handle, v)
    assert combined_weights is not None
    forth = (received.x * y.detach()).sum() + (row_weights * v.detach()).sum()
    back = (x.detach() * combined).sum() + (weights.detach() * combined_weights).sum()
    assert total(context, forth) == total(context, back) != 0
    (forth + 0 * back).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weights.grad is not None
    assert torch.equal(x.grad, combined)
    assert torch.equal(weights.grad, combined_weights)
    y.grad = v.grad = None
    received = elastic_dispatch(
        buffer, x, ids, weights, num_experts, do_expand=expands, expert_alignment=ALIGNMENT
    )
    combined, combined_weights = elastic_combine(buffer, y, received.handle, v)
    assert combined_weights is not None
    back = (x.detach() * combined).sum() + (weights.detach() * combined_weights).sum()
    back.backward()  # type: ignore[no-untyped-call]
    assert y.grad is not None
    assert v.grad is not None
    assert torch.equal(y.grad, received.x)
    assert torch.equal(v.grad, received.topk_weights)


@EVERYWHERE
@LAYOUTS
def test_each_is_the_others_transpose(place: Place, expands: bool) -> None:
    place.world().run(check_adjoint, expands)


def matrix_of(expert: int) -> Tensor:
    numbers = torch.arange(HIDDEN * HIDDEN, dtype=torch.float64, device=tensor_device())
    return (numbers * (expert + 1.0)).sin().view(HIDDEN, HIDDEN) / 3


def expert_output(rows: Tensor, expert: int) -> Tensor:
    return (rows @ matrix_of(expert).to(rows)).tanh()


def layer(
    context: RankContext, x: Tensor, ids: Tensor, weights: Tensor, expands: bool
) -> tuple[Tensor, Tensor]:
    """Experts that are not linear, weighted; and the weights' squares, carried back."""
    buffer, num_experts = elastic_buffer(context), LOCAL_EXPERTS * context.num_ranks
    received = elastic_dispatch(
        buffer, x, ids, weights, num_experts, do_expand=expands, expert_alignment=ALIGNMENT
    )
    row_weights, first = received.topk_weights, LOCAL_EXPERTS * context.rank
    assert row_weights is not None
    if expands:
        groups = received.x.split(received.handle.num_recv_tokens_per_expert_list)
        outputs = torch.cat([expert_output(rows, first + local) for local, rows in enumerate(groups)])
        outputs = outputs * row_weights[:, None]
    else:
        assert received.topk_idx is not None
        outputs = torch.zeros_like(received.x)
        for local in range(LOCAL_EXPERTS):
            weight = torch.where(received.topk_idx == local, row_weights, 0.0).sum(1, keepdim=True)
            outputs = outputs + weight * expert_output(received.x, first + local)
    combined, squares = elastic_combine(buffer, outputs, received.handle, row_weights.square())
    assert squares is not None
    return combined, squares


def dense(x: Tensor, ids: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    combined = torch.zeros_like(x)
    for expert in range(num_experts):
        weight = torch.where(ids == expert, weights, 0.0).sum(1, keepdim=True)
        combined = combined + weight * expert_output(x, expert)
    return combined, torch.where(ids >= 0, weights, 0.0).square()


def gradients(outputs: tuple[Tensor, Tensor], x: Tensor, weights: Tensor) -> list[Tensor]:
    """The first derivatives, and derivatives of their squares."""
    value = outputs[0].square().sum() + outputs[1].pow(3).sum()
    first = torch.autograd.grad(value, (x, weights), create_graph=True)
    second = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (x, weights))
    return [*first, *second]


def check_dense(context: RankContext, expands: bool) -> None:
    num_experts = LOCAL_EXPERTS * context.num_ranks
    ids, weights = routing_of(context.rank, num_experts)
    random = torch.Generator(device="cpu").manual_seed(7 + context.rank)
    x = torch.randn((len(ids), HIDDEN), generator=random, device="cpu").to(tensor_device())
    x.requires_grad_()
    weights.requires_grad_()
    found = gradients(layer(context, x, ids, weights, expands), x, weights)
    precise = [part.detach().double().requires_grad_() for part in (x, weights)]
    wanted = gradients(dense(precise[0], ids, precise[1], num_experts), *precise)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@EVERYWHERE
@LAYOUTS
def test_gradients_are_those_of_a_dense_computation(place: Place, expands: bool) -> None:
    place.world().run(check_dense, expands)


def check_checkpoint(context: RankContext, expands: bool) -> None:
    """Run again in the backward pass, the layer has the same gradients."""
    ids, weights = routing_of(context.rank, LOCAL_EXPERTS * context.num_ranks)
    x, found = whole_numbers((len(ids), HIDDEN), context.rank) / 8, []
    for again in (False, True):
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        call = (context, x, ids, weights, expands)
        combined, squares = checkpoint(layer, *call, use_reentrant=False) if again else layer(*call)
        (combined.square().sum() + squares.sum()).backward()
        found.append((x.grad, weights.grad))
    for plain, repeated in zip(*found, strict=True):
        assert torch.equal(plain, repeated)


@LAYOUTS
def test_checkpointed(expands: bool) -> None:
    Place("cpu", 2).world().run(check_checkpoint, expands)


def pass_another_buffer(context: RankContext) -> None:
    with Buffer(context.group, 1 << 20, device="cpu") as buffer:
        x, ids = torch.ones((1, HIDDEN), device="cpu"), torch.zeros((1, 1), dtype=torch.int64, device="cpu")
        with pytest.raises(InvalidCall, match=r"buffer is of type Buffer: it must be an anyep.ElasticBuffer"):
            elastic_dispatch(buffer, x, ids, None, 2)  # type: ignore[arg-type]


def test_another_buffer() -> None:
    Place("cpu", 2).world().run(pass_another_buffer)
