"""Train a small language model over ranks: experts spread by AnyEP, the rest by torch. A recipe to copy.

    anyep run -n 4 examples/train.py                        # DistributedDataParallel for all but the experts
    anyep run -n 4 examples/train.py --parallel fsdp        # FSDP2 instead
    anyep run -n 4 examples/train.py --save checkpoint      # torch.distributed.checkpoint, at the end
    anyep run -n 2 examples/train.py --resume checkpoint    # on another number of ranks

Each rank reads its part of every batch, in several micro-batches. Losses keep the load of the experts even;
gradients are clipped by their norm over all ranks. At the end one process reads the checkpoint of all ranks,
and compares it with the same model, trained in one process without AnyEP.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from anyep import Buffer
from anyep.nn import (
    ExpertParallelMoE,
    FeedForward,
    TopKGate,
    load_balancing_loss,
    make_buffer,
    router_z_loss,
    run_experts,
)
from anyep.training import (
    TrainingState,
    average_expert_gradients,
    clip_grad_norm,
    data_parallel,
    expert_parameters,
)

VOCABULARY, HIDDEN, NUM_BLOCKS, NUM_HEADS, NUM_EXPERTS, TOPK = 64, 32, 2, 4, 8, 2
BALANCE, Z = 0.02, 0.001
TOLERANCE, TOLERANCE_OF_AUTOCAST = 1e-4, 1e-2
"""Relative: of losses and parameters in float32; of losses alone under autocast."""


# The model


class WholeMoE(nn.Module):
    """The layer with all experts in one process, and parameters of the same names: what must come out."""

    def __init__(self, gate: TopKGate, experts: list[nn.Module]) -> None:
        super().__init__()
        self.gate, self.experts = gate, nn.ModuleDict({str(i): expert for i, expert in enumerate(experts)})

    def forward(self, x: Tensor, output_router_logits: bool = True) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, -2)
        topk_idx, weights, logits = self.gate(rows, output_router_logits=True)
        return run_experts(rows, topk_idx, weights, list(self.experts.values())).view(x.shape), logits


class Block(nn.Module):
    """Causal attention, then the experts."""

    def __init__(self, index: int, buffer: Buffer | None) -> None:
        super().__init__()
        self.attention_norm, self.expert_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        # Without a bias: that of keys has no influence, so its gradient is rounding, which AdamW scales up.
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        gate = TopKGate(HIDDEN, NUM_EXPERTS, TOPK)

        def expert(number: int) -> FeedForward:
            # Its own seed: whichever rank makes it, it is the same expert.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1000 * index + number)
                return FeedForward(HIDDEN, 2 * HIDDEN)

        if buffer is None:
            self.moe: nn.Module = WholeMoE(gate, [expert(number) for number in range(NUM_EXPERTS)])
        else:
            self.moe = ExpertParallelMoE(gate, expert, buffer.group, NUM_EXPERTS, buffer=buffer)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (
            part.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        y, router_logits = self.moe(self.expert_norm(x), output_router_logits=True)
        return x + y, router_logits


class Model(nn.Module):
    """A language model; without a Buffer it is whole, in one process."""

    def __init__(self, buffer: Buffer | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(index, buffer) for index in range(NUM_BLOCKS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, router_logits = self.embedding(tokens), []
        for block in self.blocks:
            x, logits = block(x)
            router_logits.append(logits)
        return self.head(self.norm(x)), router_logits


def batch_of(step: int, sequences: int, length: int) -> Tensor:
    """Sequences of a small language: each token follows from the last by a fixed rule, most of the time."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (sequences, length), generator=generator, device="cpu")
    is_noise = torch.rand(tokens.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.1
    for at in range(1, length):
        tokens[:, at] = torch.where(is_noise[:, at], tokens[:, at], (5 * tokens[:, at - 1] + 3) % VOCABULARY)
    return tokens


# The recipe


@dataclass(frozen=True)
class Plan:
    """What every run of one training shares, whatever the number of ranks."""

    sequences: int = 16
    """Of a batch, on all ranks together."""
    length: int = 16
    num_micro_batches: int = 2
    learning_rate: float = 1e-2
    max_norm: float = 0.5
    autocast: bool = False
    optimizer: str = "adamw"


def spread(model: nn.Module, parallel: str, group: dist.ProcessGroup) -> nn.Module:
    """Let torch average (ddp) or shard (fsdp) everything but the experts."""
    if parallel == "ddp":
        return data_parallel(model, process_group=group)
    experts = set(expert_parameters(model).values())
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=experts)
    return fully_shard(model, mesh=mesh, ignored_params=experts)


def make_optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """Experts are a group of their own: FSDP2 shards the others, and one group cannot hold both kinds."""
    experts = expert_parameters(model)
    rest = [parameter for name, parameter in model.named_parameters() if name not in experts]
    groups = [{"params": params} for params in (rest, list(experts.values())) if params]
    if plan.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=plan.learning_rate, momentum=0.9)
    return torch.optim.AdamW(groups, lr=plan.learning_rate)


@contextlib.contextmanager
def gradients_reduced(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Ranks exchange the gradients of the dense part in the last micro-batch of a step only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    elif isinstance(model, DistributedDataParallel) and not is_last:
        with model.no_sync():
            yield
        return
    yield


def loss_of(model: nn.Module, tokens: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's loss, of a kind whose mean over the ranks is the loss of the whole batch."""
    logits, router_logits = model(tokens)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    for of_block in router_logits:
        topk_idx = of_block.topk(TOPK).indices
        loss = loss + BALANCE * load_balancing_loss(of_block, topk_idx, group) + Z * router_z_loss(of_block)
    return loss


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[Tensor],
    plan: Plan,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """One step; returns the loss of the batch on all ranks. Without a group, in one process."""
    optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float32, device=micro_batches[0].device)
    for index, tokens in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with (
            gradients_reduced(model, is_last),
            torch.autocast(tokens.device.type, torch.bfloat16, enabled=plan.autocast),
        ):
            loss = loss_of(model, tokens, group) / len(micro_batches)
            loss.backward()
        total += loss.detach().cpu()
    if group is None:
        nn.utils.clip_grad_norm_(model.parameters(), plan.max_norm)
    else:
        average_expert_gradients(model, group.size())
        clip_grad_norm(model, plan.max_norm, group)
        dist.all_reduce(total, group=group)
        total /= group.size()
    optimizer.step()
    return total


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    plan: Plan,
    group: dist.ProcessGroup | None,
    device: str = "cpu",
) -> list[float]:
    """The losses of some steps. A micro-batch is the same sequences on any number of ranks."""
    losses = []
    for step in steps:
        micro_batches = batch_of(step, plan.sequences, plan.length).chunk(plan.num_micro_batches)
        if group is not None:
            micro_batches = tuple(tokens.chunk(group.size())[group.rank()] for tokens in micro_batches)
        mine = [tokens.to(device) for tokens in micro_batches]
        losses.append(train_step(model, optimizer, mine, plan, group).item())
    return losses


# Checkpoints


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    dcp.save({"training": TrainingState(model, optimizer), "step": step}, checkpoint_id=path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, alone: bool = False) -> int:
    """The number of steps that were made; `alone`: by one process, whatever the others do."""
    state: dict[str, Any] = {"training": TrainingState(model, optimizer), "step": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=path, no_dist=alone)
    return int(state["step"])


# The program


def farthest_apart(ours: nn.Module, right: nn.Module) -> float:
    """The largest difference of two models' parameters, relative to the largest entry of its tensor."""
    theirs = right.state_dict()
    return max(
        float((tensor - theirs[name]).abs().max() / theirs[name].abs().max())
        for name, tensor in ours.state_dict().items()
    )


def draw(ours: list[float], right: list[float], num_ranks: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot()
    axes.plot(right, color="#e4572e", linewidth=6, alpha=0.4, label="one process")
    axes.plot(ours, color="#2e86ab", linewidth=1.5, label=f"{num_ranks} ranks, AnyEP")
    axes.set(xlabel="step", ylabel="loss", title="A small model, trained in one process and over ranks")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def check(path: Path, ours: list[float], steps: range, options: argparse.Namespace, plan: Plan) -> float:
    """Train the whole model in one process, and compare losses and parameters with those of all ranks."""
    whole, merged = Model(), Model()
    optimizer = make_optimizer(whole, plan)
    if options.resume:
        load(options.resume, whole, optimizer, alone=True)
    right = train(whole, optimizer, steps, plan, None)
    load(path, merged, make_optimizer(merged, plan), alone=True)
    losses = max((abs(a - b) / b for a, b in zip(ours, right, strict=True)), default=0.0)
    parameters = farthest_apart(merged, whole)
    print(f"one process: loss {right[0]:.4f} to {right[-1]:.4f}", flush=True)
    print(f"farthest apart, relative: losses {losses:.1e}, parameters {parameters:.1e}", flush=True)
    if options.plot:
        draw(ours, right, dist.get_world_size(), options.plot)
    return losses if plan.autocast else max(losses, parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp", help="for all but the experts")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=16, help="of a batch, on all ranks together")
    parser.add_argument("--micro-batches", type=int, default=2, help="per step, gradients add up")
    parser.add_argument("--autocast", action="store_true", help="bfloat16; the comparison is coarse then")
    parser.add_argument("--save", type=Path, help="write a checkpoint here, at the end")
    parser.add_argument("--resume", type=Path, help="start from this checkpoint")
    parser.add_argument("--plot", type=Path, help="draw the losses")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    if options.sequences % (num_ranks * options.micro_batches):
        parser.error(f"{options.sequences} sequences do not divide by {num_ranks} ranks and micro-batches")
    plan = Plan(options.sequences, num_micro_batches=options.micro_batches, autocast=options.autocast)
    verdict = torch.zeros((), dtype=torch.float32, device="cpu")
    with (
        make_buffer(group, HIDDEN, NUM_EXPERTS, device="cpu") as buffer,
        tempfile.TemporaryDirectory() as folder,
    ):
        model = spread(Model(buffer), options.parallel, group)
        optimizer = make_optimizer(model, plan)
        first = load(options.resume, model, optimizer) if options.resume else 0
        steps = range(first, first + options.steps)
        losses = train(model, optimizer, steps, plan, group)
        if rank == 0:
            print(f"{num_ranks} ranks: loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
        places = [options.save or Path(folder)]
        dist.broadcast_object_list(places, 0, group=group)
        save(places[0], model, optimizer, steps.stop)
        if rank == 0:
            verdict += check(places[0], losses, steps, options, plan)
        dist.broadcast(verdict, 0, group=group)
    dist.destroy_process_group()
    sys.exit(not float(verdict) <= (TOLERANCE_OF_AUTOCAST if options.autocast else TOLERANCE))


if __name__ == "__main__":
    main()
