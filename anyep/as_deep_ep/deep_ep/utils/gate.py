"""`deep_ep.utils.gate`: scores whose top-k choices send one rank more tokens than the others.

    scores = get_unbalanced_scores(4096, 256, 8, 6, ratio=2.0, precise=False)
    topk_idx = scores.topk(6).indices     # rank 0 gets about twice as many tokens as another rank

A token counts once for each rank that it goes to. Scores are on torch's default device.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from anyep import InvalidCall
from anyep.errors import whole_number

NUM_HALVINGS: Final = 30
LARGEST_FACTOR: Final = 1000.0
CHOSEN: Final = 0.9
"""Scores of chosen experts are above this, all others are below."""


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> Tensor:
    """Float32 scores [tokens, experts], with which rank 0 gets `ratio` times the tokens of another rank,
    or as nearly that as choices of experts allow. They lie on torch's default device.

    Not precise: scores are random, those of rank 0's experts on a larger scale. Precise: tokens are dealt to
    the ranks, so that the other ranks get equal numbers, up to one token.
    """
    whole_number("num_tokens", num_tokens, minimum=0)
    whole_number("num_ranks", num_ranks, minimum=1)
    if num_experts % num_ranks or not 0 < num_topk <= num_experts:
        raise InvalidCall(
            f"num_experts={num_experts} must be a multiple of num_ranks={num_ranks}, and"
            f" num_topk={num_topk} at most that and at least 1"
        )
    if not ratio >= 1:
        raise InvalidCall(f"ratio={ratio} is less than 1: rank 0 gets the most tokens")
    scores = torch.rand((num_tokens, num_experts), dtype=torch.float32, device=torch.get_default_device())
    if precise:
        return _dealt_scores(scores, num_ranks, num_topk, ratio)
    if ratio == 1 or num_ranks == 1:
        return scores
    return _scaled(scores, num_ranks, _factor_for(scores, num_ranks, num_topk, ratio))


def _scaled(scores: Tensor, num_ranks: int, factor: float) -> Tensor:
    scaled = scores.clone()
    scaled[:, : scores.shape[1] // num_ranks] *= factor
    return scaled


def _factor_for(scores: Tensor, num_ranks: int, num_topk: int, ratio: float) -> float:
    """The scale of rank 0's scores with which it gets `ratio` times as many tokens, found by halving."""
    low, high = 1.0, LARGEST_FACTOR
    for _ in range(NUM_HALVINGS):
        middle = math.sqrt(low * high)
        counts = tokens_per_rank(_scaled(scores, num_ranks, middle), num_ranks, num_topk).float()
        if counts[0] > ratio * counts[1:].mean():
            high = middle
        else:
            low = middle
    return low


def tokens_per_rank(scores: Tensor, num_ranks: int, num_topk: int) -> Tensor:
    """How many tokens have a choice on each rank."""
    return _ranks_of(scores, num_ranks, num_topk).sum(0)


def _ranks_of(scores: Tensor, num_ranks: int, num_topk: int) -> Tensor:
    """Bool [tokens, ranks]."""
    ranks = scores.topk(num_topk).indices // (scores.shape[1] // num_ranks)
    goes_to = torch.zeros((len(scores), num_ranks), dtype=torch.bool, device=scores.device)
    return goes_to.scatter_(1, ranks, True)


# Dealing tokens


def _dealt_scores(scores: Tensor, num_ranks: int, num_topk: int, ratio: float) -> Tensor:
    num_local = scores.shape[1] // num_ranks
    goes_to = _deal(_ranks_of(scores, num_ranks, num_topk).sum(1), num_ranks, num_topk, num_local, ratio)
    chosen = _choose(goes_to, num_topk, num_local)
    return torch.where(chosen, CHOSEN + (1 - CHOSEN) * (0.01 + 0.99 * scores), CHOSEN * scores)


def _deal(widths: Tensor, num_ranks: int, num_topk: int, num_local: int, ratio: float) -> Tensor:
    """Bool [tokens, ranks]: token t goes to `widths[t]` ranks, or to fewer where the ratio needs it."""
    num_others, num_tokens, device = num_ranks - 1, len(widths), widths.device
    goes_to = torch.zeros((num_tokens, num_ranks), dtype=torch.bool, device=device)
    if num_others == 0:
        return ~goes_to
    widths = _narrowed(widths, math.ceil(num_topk / num_local), num_tokens * (1 + num_others / ratio))
    for_rank_0 = min(num_tokens, round(int(widths.sum()) * ratio / (ratio + num_others)))
    # Tokens that go to all ranks go to rank 0; the others are drawn.
    drawn = torch.rand(num_tokens, dtype=torch.float32, device=device) + (widths == num_ranks)
    goes_to[drawn.topk(max(for_rank_0, int((widths == num_ranks).sum()))).indices, 0] = True
    # The others take turns, in an order of their own: a token's ranks follow each other, so they differ.
    num_turns = widths - goes_to[:, 0].long()
    first = num_turns.cumsum(0) - num_turns
    turn = torch.arange(num_others, dtype=torch.int64, device=device)
    is_turn = (turn - first.unsqueeze(1)) % num_others < num_turns.unsqueeze(1)
    goes_to[:, 1:] = is_turn[:, torch.randperm(num_others, device=device)]
    return goes_to


def _narrowed(widths: Tensor, least: int, most_in_all: float) -> Tensor:
    """The same sum if it is at most `most_in_all`; else the widest tokens go to fewer ranks."""
    limit = int(widths.max()) if len(widths) else least
    while limit > least and widths.clamp(max=limit).sum() > most_in_all:
        limit -= 1
    narrowed = widths.clamp(max=limit)
    # Some of those that were cut may be one wider.
    spare = int(most_in_all - narrowed.sum())
    if spare > 0:
        cut = torch.nonzero(widths > limit).flatten()[:spare]
        narrowed[cut] += 1
    return narrowed


def _choose(goes_to: Tensor, num_topk: int, num_local: int) -> Tensor:
    """Bool [tokens, experts]: each token's choices, spread evenly over its ranks, at random experts there."""
    num_tokens, num_ranks = goes_to.shape
    widths = goes_to.sum(1, keepdim=True)
    # The ranks of a token are numbered in random order; the first ones get one choice more.
    keys = torch.rand((num_tokens, num_ranks), dtype=torch.float32, device=goes_to.device) + ~goes_to
    order = keys.argsort(1).argsort(1)
    per_rank = num_topk // widths + (order < num_topk % widths).long()
    per_rank = torch.where(goes_to, per_rank, 0)
    shape = (num_tokens, num_ranks, num_local)
    drawn = torch.rand(shape, dtype=torch.float32, device=goes_to.device)
    return (drawn.argsort(2).argsort(2) < per_rank.unsqueeze(2)).flatten(1)
