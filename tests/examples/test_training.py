"""The recipe of examples/train.py over ranks, step by step, against one process that has every token.

The one process is plain PyTorch: all experts in one module, `torch.nn.utils.clip_grad_norm_`, no collectives.
SGD is used where values must be close: it shows a gradient that is too large by a factor, which AdamW hides.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from anyep.nn import ExpertParallelMoE, TopKGate, expert_layers, load_balancing_loss, make_buffer
from anyep.training import average_expert_gradients, clip_grad_norm, data_parallel, expert_parameters
from tests.support.places import Place, buffer_device, tensor_device
from tests.support.world import RankContext, get_world

TIMEOUT_S = 240.0
State = dict[str, Tensor]


@cache
def example_of(name: str) -> Any:
    """An example as a module."""
    path = Path(__file__).parents[2] / f"examples/{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe() -> Any:
    return example_of("train")


def plan_of(optimizer: str = "sgd") -> Any:
    return recipe().Plan(sequences=16, length=8, num_micro_batches=2, optimizer=optimizer, max_norm=0.5)


def make_model(context: RankContext) -> nn.Module:
    example = recipe()
    key = "training buffer"
    if key not in context.keep:
        sizes = (example.HIDDEN, example.NUM_EXPERTS)
        context.keep[key] = make_buffer(context.group, *sizes, device=buffer_device())
    model: nn.Module = example.Model(context.keep[key]).to(tensor_device())
    return model


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def state_of(model: nn.Module) -> State:
    return {name.removeprefix("module."): full(tensor) for name, tensor in model.state_dict().items()}


def check_states(states: list[State], right: State, rtol: float = 1e-4, atol: float = 2e-6) -> None:
    """What the ranks hold together is the whole; what several of them hold is the same to the last bit."""
    assert {name for state in states for name in state} == set(right)
    seen: State = {}
    for state in states:
        for name, tensor in state.items():
            torch.testing.assert_close(
                tensor, right[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
            )
            assert torch.equal(tensor, seen.setdefault(name, tensor)), name


# Several steps


def train(context: RankContext, parallel: str) -> tuple[list[float], State]:
    example, plan = recipe(), plan_of()
    model = example.spread(make_model(context), parallel, context.group)
    optimizer = example.make_optimizer(model, plan)
    losses = example.train(model, optimizer, range(4), plan, context.group, tensor_device())
    return losses, state_of(model)


@cache
def trained_in_one_process() -> tuple[list[float], State]:
    example, plan = recipe(), plan_of()
    model = example.Model()
    optimizer = example.make_optimizer(model, plan)
    return example.train(model, optimizer, range(4), plan, None), state_of(model)


@pytest.mark.parametrize(
    ("place", "parallel"),
    [
        Place("cpu", 2).param("fsdp"),
        Place("cpu", 4).param("ddp"),
        Place("cpu", 2).param("ddp", marks=pytest.mark.slow),
        Place("cpu", 4).param("fsdp", marks=pytest.mark.slow),
        Place("cuda", 2).param("ddp"),
        Place("cuda", 4).param("ddp"),
    ],
)
def test_parameters_are_those_of_one_process(place: Place, parallel: str) -> None:
    """After steps with micro-batches, clipping, and losses for an even load."""
    answers = place.world().run(train, parallel, timeout=TIMEOUT_S)
    right_losses, right = trained_in_one_process()
    rtol, atol = (1e-3, 1e-5) if place.device == "cuda" else (1e-4, 2e-6)
    for losses, _ in answers:
        assert losses == pytest.approx(right_losses, rel=rtol)
    check_states([state for _, state in answers], right, rtol, atol)


# Gradients and their norm


def gradients_of_one_step(context: RankContext, parallel: str, divide: bool) -> tuple[float, float, State]:
    example = recipe()
    model = example.spread(make_model(context), parallel, context.group)
    tokens = example.batch_of(9, 8, 8).chunk(context.num_ranks)[context.rank]
    example.loss_of(model, tokens, context.group).backward()
    if divide:
        average_expert_gradients(model, context.num_ranks)
    norm = clip_grad_norm(model, 0.25, context.group)
    clipped = clip_grad_norm(model, 1e9, context.group)
    gradients = {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}
    return norm.item(), clipped.item(), gradients


def gradients_in_one_process() -> tuple[float, State]:
    example = recipe()
    model = example.Model()
    example.loss_of(model, example.batch_of(9, 8, 8), None).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    return norm.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_and_norm_are_those_of_one_process(parallel: str) -> None:
    right_norm, right = gradients_in_one_process()
    assert right_norm > 0.5  # so that clipping does something
    answers = get_world(4).run(gradients_of_one_step, parallel, True, timeout=TIMEOUT_S)
    assert len({norm for norm, _, _ in answers}) == 1
    for norm, clipped, _ in answers:
        assert norm == pytest.approx(right_norm, rel=1e-5)
        assert clipped == pytest.approx(0.25, rel=1e-4)
    check_states([gradients for *_, gradients in answers], right)


def test_experts_gradients_are_sums_until_they_are_divided() -> None:
    """The trap itself: without the division they are larger by the number of ranks, and so is the norm."""
    right_norm, right = gradients_in_one_process()
    norm, _, gradients = get_world(2).run(gradients_of_one_step, "ddp", False, timeout=TIMEOUT_S)[0]
    assert norm > 1.05 * right_norm
    for name, gradient in gradients.items():
        factor = (2 if ".experts." in name else 1) * right_norm / norm
        torch.testing.assert_close(gradient, factor * right[name], rtol=1e-4, atol=2e-6)


def check_hugging_face_model(context: RankContext) -> float:
    """The largest relative difference of its gradients, and of their norm, from those of the whole model."""
    example = example_of("qwen3_moe")
    tokens = torch.randint(example.VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(2))
    whole, sharded = example.make_model(), example.make_model()
    whole(input_ids=tokens, labels=tokens).loss.backward()
    right_norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    example.shard(sharded, context.group)
    model = data_parallel(sharded, process_group=context.group)
    mine = tokens.chunk(context.num_ranks)[context.rank]
    model(input_ids=mine, labels=mine).loss.backward()
    average_expert_gradients(model, context.num_ranks)
    norm = clip_grad_norm(model, 0.1, context.group)
    differences = [
        example.relative_difference(parameter.grad, example.reference_gradient(name, whole))
        for name, parameter in sharded.named_parameters()
    ]
    (layer, *_) = expert_layers(sharded)
    layer.buffer.destroy()
    return max(*differences, abs(float(norm / right_norm) - 1))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="pip install 'anyep[examples]'")
def test_a_hugging_face_model() -> None:
    assert max(get_world(2).run(check_hugging_face_model, timeout=TIMEOUT_S)) < 1e-5


# Several groups that hold the same experts


def train_in_two_groups(context: RankContext) -> State:
    """Ranks 0 and 1 hold all experts, and so do 2 and 3."""
    example, world = recipe(), context.group
    halves, pairs = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    group, replicas = (
        next(made for ranks, made in [(r, dist.new_group(r)) for r in several] if context.rank in ranks)
        for several in (halves, pairs)
    )
    with make_buffer(group, example.HIDDEN, example.NUM_EXPERTS, device="cpu") as buffer:
        model = data_parallel(example.Model(buffer), process_group=world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            tokens = example.batch_of(step, 8, 8).chunk(4)[context.rank]
            example.loss_of(model, tokens, world).backward()
            average_expert_gradients(model, 4, replicas)
            clip_grad_norm(model, 0.5, group)
            optimizer.step()
        return state_of(model)


def test_experts_that_several_groups_hold() -> None:
    example = recipe()
    model = example.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        example.loss_of(model, example.batch_of(step, 8, 8), None).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    check_states(get_world(4).run(train_in_two_groups, timeout=TIMEOUT_S), state_of(model))


# Checkpoints


def train_and_save(context: RankContext, parallel: str, path: Path) -> State:
    """Three steps, a checkpoint, three more."""
    example, plan = recipe(), plan_of("adamw")
    model = example.spread(make_model(context), parallel, context.group)
    optimizer = example.make_optimizer(model, plan)
    example.train(model, optimizer, range(3), plan, context.group)
    example.save(path, model, optimizer, 3)
    example.train(model, optimizer, range(3, 6), plan, context.group)
    return state_of(model)


def load_and_train(context: RankContext, parallel: str, path: Path) -> State:
    example, plan = recipe(), plan_of("adamw")
    model = make_model(context)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)  # nothing of it may be left
    model = example.spread(model, parallel, context.group)
    optimizer = example.make_optimizer(model, plan)
    assert example.load(path, model, optimizer) == 3
    example.train(model, optimizer, range(3, 6), plan, context.group)
    return state_of(model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ddp", "fsdp"),
        pytest.param("ddp", "ddp", marks=pytest.mark.slow),
        pytest.param("fsdp", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_four_ranks_go_on_as_two_or_as_one(tmp_path: Path, before: str, after: str) -> None:
    example, plan = recipe(), plan_of("adamw")
    states = get_world(4).run(train_and_save, before, tmp_path, timeout=TIMEOUT_S)
    uninterrupted = {name: tensor for state in states for name, tensor in state.items()}
    check_states(get_world(2).run(load_and_train, after, tmp_path, timeout=TIMEOUT_S), uninterrupted)

    whole = example.Model()
    optimizer = example.make_optimizer(whole, plan)
    assert example.load(tmp_path, whole, optimizer, alone=True) == 3
    example.train(whole, optimizer, range(3, 6), plan, None)
    check_states([state_of(whole)], uninterrupted)


# What is kept out of DDP


class Counting(nn.Module):
    """An expert with a buffer, which DistributedDataParallel would overwrite with that of rank 0."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("index", torch.tensor([index]))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output


def check_buffers(context: RankContext) -> None:
    torch.manual_seed(context.rank)
    layer = ExpertParallelMoE(TopKGate(16, 4, 2), Counting, context.group, 4, device="cpu")
    before = [parameter.detach().clone() for parameter in expert_parameters(layer).values()]
    model = data_parallel(nn.Sequential(nn.Linear(16, 16), layer), process_group=context.group)
    y, logits = layer(model.module[0](torch.randn(3, 16)), output_router_logits=True)
    (y.sum() + load_balancing_loss(logits, logits.topk(2).indices)).backward()
    model(torch.randn(3, 16))
    first = 2 * context.rank
    assert [int(expert.index) for expert in layer.experts.values()] == [first, first + 1]
    after = expert_parameters(model)
    assert set(after) == {
        f"module.1.experts.{index}.linear.{kind}"
        for index in (first, first + 1)
        for kind in ("weight", "bias")
    }
    assert all(torch.equal(a, b) for a, b in zip(before, after.values(), strict=True))
    assert layer.buffer is not None
    layer.buffer.destroy()


def test_experts_are_left_out_of_ddp_with_their_buffers() -> None:
    get_world(2).run(check_buffers)
