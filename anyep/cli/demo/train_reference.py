"""The layer that `anyep demo` trains, in one process and as plain as possible.

Each rank has its own tokens and its own experts; the reference has all of them, on the CPU. Both start from
the same numbers and take the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from anyep.cli import draw
from anyep.cli.demo.job import Job
from anyep.cli.gate import choose, misrouting

LEARNING_RATE = 0.05


def weights_of(scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The weights of each token's experts: softmax over the chosen ones."""
    return scores.gather(1, experts).softmax(dim=-1)


class Gate(nn.Module):
    """Chooses each token's experts, and remembers its latest choice."""

    choices: torch.Tensor

    def __init__(self, job: Job, weight: torch.Tensor) -> None:
        super().__init__()
        self._job = job
        self.weight = nn.Parameter(weight)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores(x)
        self.choices = choose(scores.detach(), self._job.topk, self._job.nodes)
        return self.choices, weights_of(scores, self.choices)


class Expert(nn.Module):
    """A network of two matrices."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # A smooth function: at a kink, sums that differ in their last bits would have different gradients.
        return functional.silu(rows @ self.up) @ self.down


def networks_of(job: Job, device: str = "cpu") -> tuple[Gate, list[Expert]]:
    """The gate and all experts, with the numbers that everyone starts from."""
    generator = torch.Generator().manual_seed(job.seed)
    hidden, inner = job.hidden, 2 * job.hidden

    def normal(*shape: int) -> torch.Tensor:
        scale: float = shape[-2] ** -0.5
        return (draw.normal(generator, *shape) * scale).to(device)

    gate = Gate(job, normal(hidden, job.experts))
    ups = [normal(hidden, inner) for _ in range(job.experts)]
    downs = [normal(inner, hidden) for _ in range(job.experts)]
    return gate, [Expert(up, down) for up, down in zip(ups, downs, strict=True)]


def tokens_of(job: Job, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(job.seed * 1_000_003 + step * 1009 + rank)
    return draw.normal(generator, job.tokens, job.hidden)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)


def results_of(
    output: torch.Tensor, x: torch.Tensor, gate: Gate, experts: Iterable[Expert]
) -> list[torch.Tensor]:
    """Everything about a rank's step that is compared: the output and all gradients."""
    gradients = [x, gate.weight, *(weight for expert in experts for weight in (expert.up, expert.down))]
    return [output.detach(), *map(gradient_of, gradients)]


def descend(parameters: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(LEARNING_RATE * parameter.grad)
                parameter.grad = None


class Reference:
    """The layer in one process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._gate, self._experts = networks_of(job)

    def difference_of(self, step: int, by_rank: list[tuple[torch.Tensor, list[torch.Tensor]]]) -> float:
        """Take a step; the largest relative difference of the ranks' choices and results from it."""
        job = self._job
        x = torch.cat([tokens_of(job, rank, step) for rank in range(job.ranks)]).requires_grad_()
        output, largest = self.apply(x, torch.cat([choices for choices, _ in by_rank]))
        (output.square().sum() / (len(x) or 1)).backward()  # type: ignore[no-untyped-call]
        local = job.experts // job.ranks
        for rank, (_, theirs) in enumerate(by_rank):
            tokens = slice(rank * job.tokens, (rank + 1) * job.tokens)
            experts = self._experts[rank * local : (rank + 1) * local]
            expected = results_of(output[tokens], x, self._gate, experts)
            expected[1] = expected[1][tokens]
            for ours, right in zip(theirs, expected, strict=True):
                largest = max(largest, _relative_difference(ours, right))
        descend(parameter for network in (self._gate, *self._experts) for parameter in network.parameters())
        return largest

    def apply(self, x: torch.Tensor, choices: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Every token through each of its experts; also how wrong the choice of experts is."""
        scores = self._gate.scores(x)
        weights = weights_of(scores, choices)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self._experts):
            chosen, slot = torch.nonzero(choices == index, as_tuple=True)
            result = expert(x[chosen])
            output = output.index_add(0, chosen, result * weights[chosen, slot].unsqueeze(1))
        return output, misrouting(scores.detach(), choices, self._job.nodes)


def _relative_difference(ours: torch.Tensor, right: torch.Tensor) -> float:
    if not right.numel():
        return 0.0
    difference = float((ours - right).abs().max()) / float(right.abs().max().clamp(min=1e-12))
    return difference if difference == difference else float("inf")
