"""The obvious reference: what dispatch and combine must return, in dense PyTorch, from all ranks' inputs.

Nothing here knows about notify messages, windows or rings. Results are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RankInput:
    """What one rank passes to dispatch; `is_token_in_rank` decides where its tokens go."""

    x: torch.Tensor
    is_token_in_rank: torch.Tensor
    scales: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None

    def to(self, device: str) -> RankInput:
        """The same on a device; the strides of scales stay."""
        parts = (self.x, self.is_token_in_rank, self.scales, self.topk_idx, self.topk_weights)
        return RankInput(*(part if part is None else part.to(device) for part in parts))  # type: ignore


@dataclass(frozen=True)
class RankOutput:
    """What one rank gets back from dispatch."""

    x: torch.Tensor
    source: torch.Tensor
    source_rank: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    tokens_per_expert: list[int] | None


def layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens per rank, tokens per expert, token in rank; -1 is no expert."""
    per_rank = num_experts // num_ranks
    in_rank = torch.zeros(topk_idx.shape[0], num_ranks, dtype=torch.bool, device="cpu")
    per_expert = torch.zeros(num_experts, dtype=torch.int32, device="cpu")
    for token, experts in enumerate(topk_idx.tolist()):
        for expert in experts:
            if expert != -1:
                in_rank[token, expert // per_rank] = True
                per_expert[expert] += 1
    return in_rank.sum(0, dtype=torch.int32), per_expert, in_rank


def dispatch(inputs: list[RankInput], rank: int, num_experts: int, alignment: int = 1) -> RankOutput:
    """What `rank` receives: rows in order of source rank, then source token."""
    num_ranks = len(inputs)
    local_experts = num_experts // num_ranks
    tokens = [torch.nonzero(given.is_token_in_rank[:, rank]).flatten() for given in inputs]

    def gather(name: str) -> torch.Tensor | None:
        parts = [getattr(given, name) for given in inputs]
        if parts[0] is None:
            return None
        return torch.cat([part[index] for part, index in zip(parts, tokens, strict=True)])

    ids, weights = gather("topk_idx"), gather("topk_weights")
    per_expert = None
    if ids is not None and weights is not None:
        local = ids - rank * local_experts
        here = (local >= 0) & (local < local_experts)
        ids = torch.where(here, local, -1)
        weights = torch.where(here, weights, 0.0)
        counts = [int((ids == expert).sum()) for expert in range(local_experts)]
        per_expert = [-(-count // alignment) * alignment for count in counts]
    sources = [torch.full_like(index, source) for source, index in enumerate(tokens)]
    x = gather("x")
    assert x is not None
    return RankOutput(
        x, torch.cat(tokens).int(), torch.cat(sources), gather("scales"), ids, weights, per_expert
    )


def combine(
    expert_rows: list[torch.Tensor],
    in_rank: list[torch.Tensor],
    rank: int,
    biases: tuple[torch.Tensor, ...] = (),
    ranks_per_node: int | None = None,
) -> torch.Tensor:
    """What `rank` gets: per token, biases then the rows of its ranks in ascending order, added in float32.

    With several nodes, the sum of each node's rows is rounded, and these sums are added in the same way.
    """
    num_tokens, num_ranks = in_rank[rank].shape
    if ranks_per_node not in (None, num_ranks):
        node_rows, in_node = node_sums(expert_rows, in_rank, rank, ranks_per_node)
        return combine(node_rows, [in_node], 0, biases)
    dtype = expert_rows[0].dtype
    hidden = expert_rows[0].shape[1]
    total = torch.zeros(num_tokens, hidden, dtype=torch.float32, device="cpu")
    if biases:
        total = biases[0].float().clone()
        for bias in biases[1:]:
            total = total + bias.float()
    for expert_rank in range(num_ranks):
        first = sum(int(in_rank[source][:, expert_rank].sum()) for source in range(rank))
        mine = in_rank[rank][:, expert_rank]
        rows = expert_rows[expert_rank][first : first + int(mine.sum())]
        total[mine] = total[mine] + rows.float()
    return total.to(dtype)


def node_sums(
    expert_rows: list[torch.Tensor], in_rank: list[torch.Tensor], rank: int, ranks_per_node: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """For each node the sums of its rows of `rank`'s tokens, rounded; and which token goes to which node."""
    num_tokens, num_ranks = in_rank[rank].shape
    sums = []
    for first in range(0, num_ranks, ranks_per_node):
        here = torch.zeros(num_ranks, dtype=torch.bool, device="cpu")
        here[first : first + ranks_per_node] = True
        # Only this rank's own rows are left out: where they begin depends on the other ranks' tokens.
        only_here = [mask & here if source == rank else mask for source, mask in enumerate(in_rank)]
        whole = combine(expert_rows, only_here, rank)
        sums.append(whole[only_here[rank].any(1)])
    in_node = in_rank[rank].reshape(num_tokens, num_ranks // ranks_per_node, ranks_per_node).any(2)
    return sums, in_node


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit (and NaN where NaN is)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = left.cpu(), right.cpu()
    if left.is_floating_point() and left.element_size() > 1:
        nan = left.isnan()
        if not torch.equal(nan, right.isnan()):
            return False
        left, right = left.masked_fill(nan, 0), right.masked_fill(nan, 0)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.contiguous().view(width), right.contiguous().view(width))
