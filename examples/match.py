"""Logits and gradients of a Hugging Face model whose experts are spread over ranks are those of one process.

    anyep run -n 4 examples/match.py

Each rank has a part of the batch. It also runs the whole model on the whole batch, and compares its part.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from qwen3_moe import (
    VOCABULARY,
    make_model,
    reference_gradient,
    relative_difference,
    shard,
    sum_shared_gradients,
)

TOLERANCE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=2, help="on each rank")
    parser.add_argument("--length", type=int, default=32)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (num_ranks * options.sequences, options.length), device="cpu")
    mine = slice(rank * options.sequences, (rank + 1) * options.sequences)

    whole = make_model()
    right = whole(input_ids=tokens, labels=tokens)
    right.loss.backward()

    model = make_model()
    shard(model, group)
    ours = model(input_ids=tokens[mine], labels=tokens[mine])
    (ours.loss / num_ranks).backward()  # the loss is a mean over the ranks' tokens
    sum_shared_gradients(model, group)

    differences = {
        name: relative_difference(parameter.grad, reference_gradient(name, whole))
        for name, parameter in model.named_parameters()
    }
    worst = max(differences, key=differences.__getitem__)
    of_both = [relative_difference(ours.logits, right.logits[mine]), differences[worst]]
    found = torch.tensor(of_both, dtype=torch.float32, device="cpu")
    print(f"{len(differences)} gradients; farthest off: {worst}, {differences[worst]:.1e}", flush=True)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    if rank == 0:
        print(f"relative difference of logits {found[0]:.1e}, of gradients {found[1]:.1e}", flush=True)
    dist.destroy_process_group()
    sys.exit(not bool((found <= TOLERANCE).all()))


if __name__ == "__main__":
    main()
