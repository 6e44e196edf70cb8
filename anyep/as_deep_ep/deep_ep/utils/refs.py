"""`deep_ep.utils.refs`: dispatch and combine by torch's own collectives, to compare results with.

Dispatch exchanges rows between all ranks of the job. Combine needs no exchange: it takes what the experts
would return for each choice of the rank's own tokens, and adds it up as `ElasticBuffer.combine` does.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from anyep import InvalidCall

from .envs import get_global_seed

PRIME: Final = 131071


def dispatch(
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Any, Tensor, Tensor | None, Tensor, Tensor]:
    """Each rank's tokens, one row each, in order of source rank, then token.

    Returns the rows (with their scales, if they have any); local ids, -1 for experts elsewhere; the senders'
    weights; source rank x `num_max_tokens_per_rank` + source token; and on the CPU the rows from each rank.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_local = _experts_per_rank(num_experts, num_ranks)
    _check_tokens(x[0] if isinstance(x, tuple) else x, topk_idx, num_max_tokens_per_rank, num_experts)
    target = torch.where(topk_idx >= 0, topk_idx // num_local, -1)
    tokens = [torch.nonzero((target == other).any(1)).flatten() for other in range(num_ranks)]
    sent = torch.tensor([len(part) for part in tokens], dtype=torch.int32, device=topk_idx.device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    order = torch.cat(tokens)
    counts = received.tolist(), sent.tolist()

    def exchange(rows: Tensor) -> Tensor:
        return _exchange(rows[order], *counts)

    data, scales = x if isinstance(x, tuple) else (x, None)
    rows = exchange(data) if scales is None else (exchange(data), exchange(scales))
    ids = exchange(topk_idx) - rank * num_local
    ids = ids.masked_fill((ids < 0) | (ids >= num_local), -1)
    weights = None if topk_weights is None else exchange(topk_weights)
    own = torch.arange(len(data), dtype=torch.int32, device=data.device) + rank * num_max_tokens_per_rank
    return rows, ids, weights, exchange(own), received.cpu()


def _experts_per_rank(num_experts: int, num_ranks: int) -> int:
    if num_ranks < 1 or num_experts < 1 or num_experts % num_ranks:
        raise InvalidCall(f"num_experts={num_experts} must be a multiple of the {num_ranks} ranks")
    return num_experts // num_ranks


def _check_tokens(data: Tensor, topk_idx: Tensor, num_max_tokens_per_rank: int, num_experts: int) -> None:
    """What would give wrong rows without an error."""
    if len(data) != len(topk_idx):
        raise InvalidCall(f"x has {len(data)} tokens and topk_idx {len(topk_idx)}: they must match")
    if len(data) > num_max_tokens_per_rank:
        raise InvalidCall(
            f"x has {len(data)} tokens, but num_max_tokens_per_rank is {num_max_tokens_per_rank}: raise it on"
            " all ranks"
        )
    if ((topk_idx < -1) | (topk_idx >= num_experts)).any():
        raise InvalidCall(
            f"topk_idx has {int(topk_idx.min())} to {int(topk_idx.max())}: ids must be"
            f" 0 to {num_experts - 1}, or -1 for no expert"
        )


def _exchange(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
    """All-to-all of rows of any dtype, as bytes."""
    width = rows.element_size() * math.prod(rows.shape[1:])
    out = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    dist.all_to_all_single(
        out.view(-1).view(torch.uint8),
        rows.reshape(-1).view(torch.uint8),
        [width * count for count in received],
        [width * count for count in sent],
    )
    return out


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """Bfloat16 [tokens, top-k, hidden] that every rank can compute for any token, from the token's source.

    With s = source x top-k + choice and m = ranks x `num_max_tokens_per_rank` x top-k, channel c (from 1) of
    a choice is sin((131071 s mod m + 1) / m x c + sin(global seed)).
    """
    num_values = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    device = src_token_global_idx.device
    choices = torch.arange(num_topk, dtype=torch.int64, device=device)
    seeds = (src_token_global_idx.long().unsqueeze(1) * num_topk + choices) * PRIME % num_values
    slopes = (seeds.float() + 1) / num_values
    channels = torch.arange(1, hidden + 1, dtype=torch.float32, device=device)
    return torch.sin(slopes.unsqueeze(2) * channels + math.sin(get_global_seed())).bfloat16()


def ordered_accumulate(data: Tensor, initial_value: Tensor | None = None) -> Tensor:
    """The sum over the second dimension [tokens, top-k, hidden], one after the other in float32."""
    total = torch.zeros_like(data[:, 0], dtype=torch.float32)
    if initial_value is not None:
        total = initial_value.float()
    for choice in range(data.shape[1]):
        total = total + data[:, choice].float()
    return total.to(data.dtype)


def combine(
    y: Tensor,
    topk_idx: Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Tensor | tuple[Tensor, Tensor] | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> Tensor:
    """The sum of `y` [tokens, top-k, hidden] over each token's choices.

    With `reduce_in_local` the choices of each rank are added first, and with `reduce_in_scaleup` the ranks of
    each node, too; such a sum is rounded, and stands where the last of its choices was.
    """
    experts_per_rank = _experts_per_rank(num_experts, num_scaleout_ranks * num_scaleup_ranks)
    if y.shape[:2] != topk_idx.shape:
        raise InvalidCall(
            f"y is {list(y.shape)} and topk_idx {list(topk_idx.shape)}: both begin with [tokens, top-k]"
        )
    if reduce_in_local:
        y = _reduce_groups(y, topk_idx // experts_per_rank)
    if reduce_in_scaleup:
        y = _reduce_groups(y, topk_idx // (experts_per_rank * num_scaleup_ranks))
    return ordered_accumulate(y, _sum_of_biases(bias))


def _reduce_groups(y: Tensor, groups: Tensor) -> Tensor:
    """The sum of each group of choices at its last choice, 0 at the others."""
    num_topk = y.shape[1]
    reduced = torch.zeros_like(y)
    for last in range(num_topk):
        same = groups == groups[:, last : last + 1]
        is_last = ~same[:, last + 1 :].any(1)
        total = torch.zeros_like(y[:, 0], dtype=torch.float32)
        for choice in range(last + 1):
            total = total + y[:, choice].float().where(same[:, choice, None], 0.0)
        reduced[:, last] = total.to(y.dtype).where(is_last[:, None], 0.0)
    return reduced


def _sum_of_biases(bias: Tensor | tuple[Tensor, Tensor] | None) -> Tensor | None:
    if isinstance(bias, tuple):
        return bias[0].float() + bias[1].float()
    return None if bias is None else bias.float()
