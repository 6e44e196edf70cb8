"""Greedy decoding of a Hugging Face model in low-latency mode gives the tokens of one process.

    anyep run -n 4 examples/decode.py

Everything is bfloat16, and rows travel as such (no FP8). Each rank has its own prompts and calls `generate`.
The reference is the whole model in one process, on the prompts of all ranks. It rounds where low-latency
mode rounds: each expert's output to bfloat16, and their weighted sum, made in float32 in the order in which
the router chose, once more. The model as transformers runs it rounds after every product and sum instead; its
tokens are compared too, for information.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from qwen3_moe import VOCABULARY, Expert, make_model, router_of, shard
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

from anyep.nn import expert_layers


class InOneProcess(nn.Module):
    """A block with all of its experts, which rounds as low-latency mode does."""

    def __init__(self, block: Any, config: Any) -> None:
        super().__init__()
        self.gate = router_of(block, config)
        self.experts = nn.ModuleList(Expert(block.experts, index) for index in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        chosen, weights = self.gate(flat)
        outputs = torch.zeros(*chosen.shape, flat.shape[1], dtype=torch.float32, device=x.device)
        for index, expert in enumerate(self.experts):
            token, place = torch.nonzero(chosen == index, as_tuple=True)
            outputs[token, place] = expert(flat[token]).float()
        total = torch.zeros(flat.shape, dtype=torch.float32, device=x.device)
        for place in range(chosen.shape[1]):
            total = total + weights[:, place, None] * outputs[:, place]
        return total.to(x.dtype).view(x.shape)


def generate(model: Qwen3MoeForCausalLM, prompts: Tensor, num_new: int) -> Tensor:
    """The new tokens: the same number for every prompt, so that all ranks make the same calls."""
    with torch.no_grad():
        tokens = model.eval().generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
        )
    return tokens[:, prompts.shape[1] :]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=4, help="on each rank")
    parser.add_argument("--length", type=int, default=6, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    prompts = torch.randint(VOCABULARY, (num_ranks * options.prompts, options.length), device="cpu")
    mine = slice(rank * options.prompts, (rank + 1) * options.prompts)

    model = make_model().bfloat16()
    shard(model, group, max_decode_tokens=options.prompts * options.length)
    for layer in expert_layers(model):
        layer.low_latency = True
    ours = generate(model, prompts[mine], options.new_tokens)

    reference = make_model().bfloat16()
    plain = generate(reference, prompts, options.new_tokens)[mine]
    for decoder in reference.model.layers:
        decoder.mlp = InOneProcess(decoder.mlp, reference.config)
    right = generate(reference, prompts, options.new_tokens)[mine]

    counts = [int((ours == right).sum()), int((ours == plain).sum()), ours.numel()]
    equal = torch.tensor(counts, dtype=torch.int64, device="cpu")
    print(f"first prompt: {ours[0].tolist()}", flush=True)
    dist.all_reduce(equal, group=group)
    if rank == 0:
        print(f"{equal[0]} of {equal[2]} tokens are those of one process", flush=True)
        print(
            f"{equal[1]} of {equal[2]} are those of transformers' own blocks, which round otherwise",
            flush=True,
        )
    dist.destroy_process_group()
    sys.exit(int(equal[0] != equal[2]))


if __name__ == "__main__":
    main()
