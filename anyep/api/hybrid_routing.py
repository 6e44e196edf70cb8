"""Routing as maps: which experts each token goes to as booleans [tokens, experts], with dense probabilities;
and as the choices of tokens, which is what travels. All of it runs on the device, without reading a number on
the host."""

from __future__ import annotations

import torch


def indices_to_map(
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_of_tokens: int,
    num_of_experts: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The map of a routing, and its dense probabilities (None without `topk_weights`).

    Args:
        topk_idx: Integers [tokens, top-k]; below 0 is "no expert".
        topk_weights: float32 [tokens, top-k].
        num_of_tokens: The rows of `topk_idx`.
        num_of_experts: The experts of all ranks together.

    >>> ids = torch.tensor([[2, 0], [1, -1]], device="cpu")
    >>> weights = torch.tensor([[0.5, 0.25], [1.0, 9.0]], device="cpu")
    >>> found = indices_to_map(ids, weights, 2, 3)
    >>> found[0].int().tolist(), found[1].tolist()
    ([[1, 0, 1], [0, 1, 0]], [[0.25, 0.0, 0.5], [0.0, 1.0, 0.0]])
    """
    ids = topk_idx.reshape(num_of_tokens, topk_idx.shape[-1]).to(torch.int64)
    chosen = torch.ones_like(ids, dtype=torch.bool)
    routing_map = spread(chosen, ids, num_of_experts)
    return routing_map, None if topk_weights is None else spread(topk_weights, ids, num_of_experts)


def choices_of(routing_map: torch.Tensor, num_topk: int) -> torch.Tensor:
    """The first `num_topk` experts of each token in ascending order, -1 where there are fewer.

    >>> choices_of(torch.tensor([[False, True, True], [False, False, False]], device="cpu"), 2).tolist()
    [[1, 2], [-1, -1]]
    """
    num_experts = routing_map.shape[1]
    experts = torch.arange(num_experts, dtype=torch.int64, device=routing_map.device)
    ids = torch.where(routing_map, experts, num_experts).sort(dim=1).values[:, :num_topk]
    return torch.where(ids < num_experts, ids, -1)


def most_choices(routing_map: torch.Tensor) -> torch.Tensor:
    """The most experts of a token, as a tensor.

    >>> int(most_choices(torch.tensor([[True, True], [False, True]], device="cpu")))
    2
    """
    if routing_map.shape[0] == 0:
        return torch.zeros((), dtype=torch.int64, device=routing_map.device)
    return routing_map.sum(dim=1).max()


def gathered(probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The probabilities of choices, 0 where there is none.

    >>> probs = torch.tensor([[0.5, 0.25, 1.0]], device="cpu")
    >>> gathered(probs, torch.tensor([[2, -1]], device="cpu")).tolist()
    [[1.0, 0.0]]
    """
    return torch.where(ids >= 0, probs.gather(1, ids.clamp(min=0)), 0.0)


def spread(values: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The values of choices as columns of experts; 0 elsewhere.

    >>> values, ids = torch.tensor([[3.0, 4.0]], device="cpu"), torch.tensor([[1, -1]], device="cpu")
    >>> spread(values, ids, 3).tolist()
    [[0.0, 3.0, 0.0]]
    """
    shape = (ids.shape[0], num_experts + 1)
    dense = torch.zeros(shape, dtype=values.dtype, device=values.device)
    # The last column takes what belongs to no expert.
    dense.scatter_(1, torch.where(ids >= 0, ids, num_experts), values)
    return dense[:, :num_experts].contiguous()


def rows_that_fit(counts: torch.Tensor, alignment: int, num_rows: int | None) -> torch.Tensor:
    """The rows of each expert with their padding; with a number of rows, as many of them as fit.

    >>> counts = torch.tensor([3, 0, 5], dtype=torch.int32, device="cpu")
    >>> rows_that_fit(counts, 4, None).tolist(), rows_that_fit(counts, 4, 8).tolist()
    ([4, 0, 8], [4, 0, 4])
    """
    padded = (counts.to(torch.int64) + alignment - 1) // alignment * alignment
    if num_rows is None:
        return padded
    starts = padded.cumsum(0) - padded
    return torch.minimum(padded, (num_rows - starts).clamp(min=0))
