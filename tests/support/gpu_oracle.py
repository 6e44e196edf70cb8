"""The dense reference on the GPU itself: fast enough to compare every one of thousands of calls, bit for bit.

Every rank makes all ranks' inputs from seeds, so it knows what it has to get. The host looks at nothing until
`Tally.check`.

    truth, tally = Truth(Shape(num_ranks=4), 7, rank, "cuda"), Tally("cuda")
    ... dispatch truth.x, let the experts work, combine ...
    tally.compare(number, (recv_x, truth.rows), (combined_x, truth.combined))
    tally.check()
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

NEVER = 1 << 62


@dataclass(frozen=True)
class Shape:
    """Of all inputs; a rank has at most so many tokens."""

    num_ranks: int
    max_tokens: int = 16
    hidden: int = 256
    num_topk: int = 4
    local_experts: int = 2
    num_nodes: int = 1
    is_full: bool = False
    """Whether every rank has all of its tokens."""

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.local_experts

    @property
    def most_rows(self) -> int:
        return self.num_ranks * self.max_tokens


def experts(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """What the experts of a rank make of their rows, whichever they are."""
    return (rows.float() * (1.25 + 0.37 * rank)).to(rows.dtype)


class Truth:
    """The inputs of all ranks, and what one rank gets; `rows_seed` changes the rows alone."""

    def __init__(
        self,
        shape: Shape,
        seed: int,
        rank: int,
        device: str,
        rows_seed: int | None = None,
        all_to: int | None = None,
    ) -> None:
        self.shape, self.rank = shape, rank
        chance = random.Random(seed)
        full = [shape.max_tokens] * shape.num_ranks
        tokens = full if shape.is_full else [chance.randint(0, shape.max_tokens) for _ in full]
        generator = torch.Generator(device).manual_seed(seed)
        ids = self._choices(chance, generator, device, all_to)
        is_there = (
            torch.arange(shape.max_tokens, dtype=torch.int64, device=device)
            < torch.tensor(tokens, dtype=torch.int64, device=device)[:, None]
        )
        ids = torch.where(is_there[:, :, None], ids, -1)
        size = (shape.num_ranks, shape.max_tokens)
        drawn: Any = {"generator": generator, "dtype": torch.float32, "device": device}
        weights = torch.rand((*size, shape.num_topk), **drawn)
        if rows_seed is not None:
            generator.manual_seed(rows_seed)
        x = (torch.randn((*size, shape.hidden), **drawn) * 3).bfloat16()

        self.num_tokens = tokens[rank]
        self.x = x[rank, : self.num_tokens].clone()
        self.topk_idx = ids[rank, : self.num_tokens].clone()
        self.topk_weights = weights[rank, : self.num_tokens].clone()
        ranks = torch.arange(shape.num_ranks, dtype=torch.int64, device=device)
        in_rank = (ids[..., None].div(shape.local_experts, rounding_mode="floor") == ranks).any(2)
        self._receive(x, ids, weights, in_rank[:, :, rank])
        self._combine(in_rank[rank, : self.num_tokens])

    def _choices(
        self, chance: random.Random, generator: torch.Generator, device: str, all_to: int | None
    ) -> torch.Tensor:
        """The experts of every token: evenly or not, all of them or not."""
        shape = self.shape
        size = (shape.num_ranks, shape.max_tokens)
        drawn: Any = {"generator": generator, "dtype": torch.float32, "device": device}
        scores = torch.rand((*size, shape.num_experts), **drawn)
        favourite = chance.randrange(shape.num_ranks) if chance.random() < 0.3 else None
        favourite = favourite if all_to is None else all_to
        if favourite is not None:
            first = favourite * shape.local_experts
            scores[:, :, first : first + shape.local_experts] += 1 if all_to is None else 2
        ids = scores.topk(shape.num_topk, dim=-1).indices
        missing = torch.rand(ids.shape, **drawn)
        share = chance.choice([0.0, 0.3, 0.3, 0.9]) if all_to is None else 0.0
        return torch.where(missing < share, -1, ids)

    def _receive(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, is_here: torch.Tensor
    ) -> None:
        """In the order of source rank, then token."""
        shape = self.shape
        chosen = is_here.reshape(-1).nonzero().flatten()
        self.num_rows = len(chosen)
        self.rows = x.reshape(-1, shape.hidden)[chosen]
        local = ids.reshape(-1, shape.num_topk)[chosen] - self.rank * shape.local_experts
        is_local = (local >= 0) & (local < shape.local_experts)
        self.local_ids = torch.where(is_local, local, -1)
        self.local_weights = torch.where(is_local, weights.reshape(-1, shape.num_topk)[chosen], 0.0)
        counts = torch.bincount(self.local_ids[is_local], minlength=shape.local_experts)
        self.tokens_per_expert: list[int] = counts.tolist()

    def _combine(self, in_rank: torch.Tensor) -> None:
        """The sum of what each rank's experts made of the row, in float32, ranks ascending, rounded once;
        between nodes the rounded sums of nodes are added, and rounded."""
        zeros = torch.zeros(self.x.shape, dtype=torch.float32, device=self.x.device)
        of_nodes, per_node = [], self.shape.num_ranks // self.shape.num_nodes
        for node in range(self.shape.num_nodes):
            total = zeros
            for rank in range(node * per_node, (node + 1) * per_node):
                total = torch.where(in_rank[:, rank, None], total + experts(self.x, rank).float(), total)
            of_nodes.append(total.bfloat16())
        self.combined = of_nodes[0] if len(of_nodes) == 1 else sum(of_nodes, zeros).bfloat16()
        # Each slot has its weight at one rank, and zeros at the others.
        self.combined_weights = torch.where(self.topk_idx >= 0, self.topk_weights, 0.0)


class Tally:
    """How many comparisons found a difference, and which was the first; counted on the device."""

    def __init__(self, device: str) -> None:
        self._wrong = torch.zeros((), dtype=torch.int64, device=device)
        self._first = torch.full((), NEVER, dtype=torch.int64, device=device)

    def compare(self, number: int, *pairs: tuple[torch.Tensor | None, torch.Tensor]) -> None:
        """Compare results with what they should be; of equal shape, or that is raised at once."""
        found = []
        for ours, right in pairs:
            assert ours is not None
            assert ours.shape == right.shape, f"comparison {number}: {ours.shape} instead of {right.shape}"
            if right.numel():
                found.append((_bits(ours) != _bits(right)).any())
        if found:
            is_different = torch.stack(found).any()
            self._wrong += is_different
            self._first = torch.minimum(self._first, torch.where(is_different, number, NEVER))

    def check(self, what: str = "comparisons") -> None:
        """Raise if there was a difference."""
        wrong, first = int(self._wrong), int(self._first)
        assert not wrong, f"{wrong} {what} found a difference, the first of them number {first}"


def _bits(values: torch.Tensor) -> torch.Tensor:
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.contiguous().view(width)
