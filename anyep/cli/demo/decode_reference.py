"""The reference of `anyep demo --mode low-latency`: its layer in one process, as plain as possible.

It rounds where the real layer rounds: tokens to FP8 on their way to the experts, the experts' outputs to bf16
on their way back, and the sum to bf16.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from anyep.cli import draw
from anyep.cli.demo.job import DecodeJob, Difference
from anyep.cli.demo.train_reference import weights_of
from anyep.cli.fp8 import through_fp8
from anyep.cli.gate import misrouting
from anyep.cli.nodes import ONE_NODE, Nodes


def _normal(seed: int, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale: float = rows**-0.5
    return draw.normal(generator, rows, columns) * scale


def gate_of(job: DecodeJob) -> torch.Tensor:
    return _normal(job.seed, job.hidden, job.experts)


class Experts:
    """The networks of some experts. Each has its own seed, so a rank need not make them all."""

    def __init__(self, job: DecodeJob, indices: range, device: str = "cpu") -> None:
        seeds = {index: (job.seed + 1) * 1_000_003 + 2 * index for index in indices}
        self.indices = indices
        size = (job.hidden, job.hidden)
        self._up = {index: _normal(seed, *size).to(device) for index, seed in seeds.items()}
        self._down = {index: _normal(seed + 1, *size).to(device) for index, seed in seeds.items()}

    def apply(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        return functional.silu(rows @ self._up[index]) @ self._down[index]


def layer_in_one_process(
    x: torch.Tensor, choices: torch.Tensor, gate: torch.Tensor, experts: Experts, nodes: Nodes = ONE_NODE
) -> tuple[torch.Tensor, float]:
    """The reference: every token through each of its experts; also how wrong the choice of experts is."""
    scores = x.float() @ gate
    weights = weights_of(scores, choices)
    rows = through_fp8(x)
    outputs = torch.zeros(*choices.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for expert in experts.indices:
        chosen, slot = torch.nonzero(choices == expert, as_tuple=True)
        outputs[chosen, slot] = experts.apply(expert, rows[chosen]).bfloat16().float()
    combined = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place in range(choices.shape[1]):
        combined = combined + weights[:, place, None] * outputs[:, place]
    return combined.bfloat16(), misrouting(scores, choices, nodes)


def compare(ours: torch.Tensor, right: torch.Tensor) -> Difference:
    """The difference of bf16 results from the right ones.

    >>> right = torch.tensor([[4.0, 2.0], [1.0, 0.5]]).bfloat16()
    >>> compare(right, right)
    Difference(largest=0.0, num_different=0, num_entries=4)
    >>> compare(right + torch.tensor([[0.0, 0.0], [0.5, 0.0]]), right)
    Difference(largest=0.125, num_different=1, num_entries=4)
    """
    distance = (ours.float() - right.float()).abs()
    largest = float(distance.max() / right.float().abs().max().clamp(min=1e-12))
    if largest != largest:
        largest = float("inf")
    return Difference(largest, int((distance != 0).sum()), right.numel())
