"""Train a Hugging Face model whose experts are spread over ranks; its losses are those of one process.

    anyep run -n 4 examples/train.py --steps 60 --plot losses.png

Each rank reads its part of every batch. Experts get the gradients of all ranks' tokens through AnyEP; the
gradients of everything else are summed over the ranks, as in data parallelism. Rank 0 then trains the whole
model in one process, on the same batches, and compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from qwen3_moe import VOCABULARY, make_model, shard, sum_shared_gradients
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

LEARNING_RATE = 1e-3
TOLERANCE = 1e-4


def batch_of(step: int, sequences: int, length: int) -> Tensor:
    """Sequences of a small language: each token follows from the last by a fixed rule, most of the time."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (sequences, length), generator=generator, device="cpu")
    is_noise = torch.rand(tokens.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.1
    for at in range(1, length):
        tokens[:, at] = torch.where(is_noise[:, at], tokens[:, at], (5 * tokens[:, at - 1] + 3) % VOCABULARY)
    return tokens


def train(
    model: Qwen3MoeForCausalLM, batches: list[Tensor], num_parts: int, reduce: Callable[[], None]
) -> list[float]:
    """The losses of some steps; `reduce` is called between the gradients and the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for tokens in batches:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss / num_parts
        loss.backward()
        reduce()
        optimizer.step()
        losses.append(loss.item())
    return losses


def draw(ours: list[float], right: list[float], num_ranks: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot()
    axes.plot(right, color="#e4572e", linewidth=6, alpha=0.4, label="one process")
    axes.plot(ours, color="#2e86ab", linewidth=1.5, label=f"{num_ranks} ranks, AnyEP")
    axes.set(xlabel="step", ylabel="loss", title="Qwen3-MoE, tiny, trained in one process and over ranks")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sequences", type=int, default=16, help="of all ranks together")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    if options.sequences % num_ranks:
        parser.error(f"{options.sequences} sequences do not divide over {num_ranks} ranks")
    batches = [batch_of(step, options.sequences, options.length) for step in range(options.steps)]
    model = make_model()
    shard(model, group)
    mine = [tokens.chunk(num_ranks)[rank] for tokens in batches]
    of_mine = train(model, mine, num_ranks, lambda: sum_shared_gradients(model, group))
    losses = torch.tensor(of_mine, dtype=torch.float32, device="cpu")
    dist.all_reduce(losses, group=group)

    farthest = torch.zeros((), dtype=torch.float32, device="cpu")
    if rank == 0:
        ours, right = losses.tolist(), train(make_model(), batches, 1, lambda: None)
        farthest += max(abs(a - b) / b for a, b in zip(ours, right, strict=True))
        print(f"losses {ours[0]:.4f} to {ours[-1]:.4f}; one process {right[0]:.4f} to {right[-1]:.4f}")
        print(f"farthest apart: {farthest:.1e}, relative", flush=True)
        if options.plot:
            draw(ours, right, num_ranks, options.plot)
    dist.broadcast(farthest, 0, group=group)
    dist.destroy_process_group()
    sys.exit(not float(farthest) <= TOLERANCE)


if __name__ == "__main__":
    main()
