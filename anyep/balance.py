"""Keeping the load of experts even: losses of router logits, a bias per expert, and where experts are placed.

    y, logits = layer(x, output_router_logits=True)
    topk_idx, _ = layer.gate.choose(logits)
    loss = loss + 0.01 * load_balancing_loss(logits, topk_idx, group) + 0.001 * router_z_loss(logits)

T is the number of tokens, E of experts, K of experts per token; p[t, e] is the softmax of a token's logits.

A loss needs communication only if the loss of the whole batch is not the mean of the losses of its parts.
Gradients of ranks are averaged (or their means are summed), so a mean over tokens or over sequences needs
no communication. The load-balancing loss is a product of two means, which is not the mean of the products
of the parts: `load_balancing_loss` over a batch that is spread over ranks needs `group`, and sums the counts
over its ranks. `group` has the ranks whose tokens differ and whose gradients are averaged, the data-parallel
ones; ranks that share tokens (tensor parallelism) must not be in it, and it need not be the group of the
experts.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from anyep.errors import InvalidCall, whole_number
from anyep.planning.counts import Array
from anyep.planning.placement import Placement, place


def expert_counts(topk_idx: Tensor, num_experts: int) -> Tensor:
    """How many tokens chose each expert, int64 [..., num_experts], from choices [..., tokens, topk].

    -1 means "no expert" and is not counted.

    Args:
        topk_idx: int64 ids of experts, of any shape.
        num_experts: The experts of all ranks together.

    >>> expert_counts(torch.tensor([[0, 2], [2, -1]]), num_experts=3)
    tensor([1, 0, 2])
    """
    choices = topk_idx.flatten(-2)
    # One more entry than there are experts, for -1.
    counts = choices.new_zeros((*choices.shape[:-1], num_experts + 1), dtype=torch.int64)
    places = torch.where(choices >= 0, choices, num_experts)
    return counts.scatter_add(-1, places, torch.ones_like(places))[..., :num_experts]


def load_balancing_loss(
    router_logits: Tensor, topk_idx: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The auxiliary loss of Switch and Mixtral: E * sum over experts of f[e] * P[e].

    f[e] is the fraction of the choices that are expert e, count[e] / (T * K), without a gradient; P[e] is the
    mean of p[t, e] over the tokens. The loss is 1 if the load is even, and at most E. (transformers does not
    divide by K, so its loss is K times this one.)

    Args:
        router_logits: [tokens, num_experts]. With dimensions before these, [sequences, tokens, num_experts],
            the loss is that of each sequence, averaged over the sequences: DeepSeek-V3's sequence-wise loss.
            A sequence is on one rank, so this needs no group.
        topk_idx: The choices, [tokens, topk] or [sequences, tokens, topk]; -1 is not counted. To exclude
            padding, omit its rows from both.
        group: The ranks that hold the other tokens of the batch. Then count and T are sums over these ranks,
            and the loss of the whole batch is the mean of the ranks' results, also if ranks have different
            numbers of tokens. Only counts are sent; P[e] of other ranks is not needed, because averaging the
            gradients includes theirs. Every rank of the group makes this call.

    Two tokens with one expert each, both chose expert 0: f = (1, 0), P = (0.75, 0.25), loss 2 * 0.75:

    >>> logits = torch.tensor([[3.0, 1.0], [3.0, 1.0]]).log()
    >>> load_balancing_loss(logits, torch.tensor([[0], [0]]))
    tensor(1.5000)
    """
    if group is not None and router_logits.dim() != 2:
        raise InvalidCall(
            f"router_logits have {router_logits.dim()} dimensions, and there is a group: a loss by sequence"
            " needs none, since a sequence is on one rank; for the loss of all ranks' tokens pass"
            " [tokens, num_experts]"
        )
    num_experts = router_logits.shape[-1]
    probabilities = router_logits.float().softmax(dim=-1)
    counts = expert_counts(topk_idx, num_experts)
    if group is None:
        means = probabilities.sum(dim=-2) / max(router_logits.shape[-2], 1)
    else:
        sums = torch.cat([counts, counts.new_full((1,), router_logits.shape[0])])
        dist.all_reduce(sums, group=group)
        counts, num_tokens = sums[:-1], sums[-1].clamp(min=1).float()
        # This rank's share of the mean over all tokens, times the number of ranks: the mean over ranks then
        # adds up the shares.
        means = probabilities.sum(dim=0) * (group.size() / num_tokens)
    counts = counts.float()
    fractions = counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
    return num_experts * (fractions * means).sum(dim=-1).mean()


def router_z_loss(router_logits: Tensor) -> Tensor:
    """The z-loss of ST-MoE, which keeps logits small: the mean over tokens of logsumexp(logits) squared.

    It is a mean over tokens, like the loss of the model: only gradients are reduced over ranks.

    Args:
        router_logits: float32 [..., num_experts].

    >>> router_z_loss(torch.zeros(3, 4))  # log(4) squared
    tensor(1.9218)
    """
    squares = router_logits.float().logsumexp(dim=-1).square()
    return squares.sum() / max(squares.numel(), 1)


@torch.no_grad()
def update_bias(
    bias: Tensor, counts: Tensor, rate: float = 1e-3, group: dist.ProcessGroup | None = None
) -> None:
    """Balancing without a loss, as in DeepSeek-V3: bias[e] += rate * sign(mean of counts - counts[e]).

    The bias is changed in place. Call this after each optimizer step.

    Args:
        bias: One number per expert, the buffer of `TopKGate(..., has_bias=True)`.
        counts: The sum of `expert_counts` over all micro-batches of the step.
        rate: The size of the change.
        group: As for `load_balancing_loss`: counts are summed over these ranks. Without it ranks with
            different tokens would get different biases, which averaging gradients does not correct.

    >>> bias = torch.zeros(3)
    >>> update_bias(bias, torch.tensor([5, 1, 3]), rate=0.5)
    >>> bias
    tensor([-0.5000,  0.5000,  0.0000])
    """
    if group is not None:
        counts = counts.clone()
        dist.all_reduce(counts, group=group)
    # In integers, so all ranks compute the same sign: E * (mean - count) has the sign of mean - count.
    bias += rate * (counts.sum() - len(counts) * counts).sign()


def place_experts(
    load: Array | Tensor, num_replicas: int, num_nodes: int, num_ranks: int, num_groups: int = 1
) -> Placement:
    """Where experts and their replicas go, so that all ranks have nearly the same load.

    It is greedy: the experts with the highest load per replica get the further replicas, and the heaviest
    replicas go to the ranks with the least load that have room, replicas of one expert to different ranks
    where possible. With several groups that divide over the nodes, whole groups go to nodes first, and their
    replicas stay on that node: so a gate that limits the nodes of a token keeps doing so. The same load
    always gives the same placement.

    Args:
        load: One number per expert, such as the sum of `expert_counts` over some steps and all ranks; an
            array, or a tensor on any device.
        num_replicas: Places for experts on all ranks together: at least as many as experts, and a multiple
            of `num_ranks`.
        num_nodes: The nodes of the ranks.
        num_ranks: The ranks; rank r has the places r * num_replicas / num_ranks and following.
        num_groups: The groups of experts that the gate chooses from, if it limits them.

    Returns:
        Three NumPy arrays: `experts`, the expert of each place; `places`, the places of each expert in
        ascending order, then -1; `num_places`, how many places each expert has.

    Expert 0 has most of the load, and gets the fourth place:

    >>> place_experts(np.array([60, 20, 30]), num_replicas=4, num_nodes=1, num_ranks=2).experts
    array([0, 2, 0, 1])
    """
    array = load.detach().cpu().numpy() if isinstance(load, Tensor) else np.asarray(load)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise InvalidCall(
            f"load has {array.ndim} dimensions of {array.dtype}: pass one number for each expert of a layer"
        )
    for name, count in (("num_replicas", num_replicas), ("num_nodes", num_nodes), ("num_ranks", num_ranks)):
        whole_number(name, count, minimum=1)
    whole_number("num_groups", num_groups, minimum=1)
    return place(array.astype(np.float64), num_replicas, num_nodes, num_ranks, num_groups)
