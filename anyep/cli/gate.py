"""Which experts a token is sent to: the best of the best nodes, and how wrong a choice is."""

from __future__ import annotations

import torch

from anyep.cli.nodes import Nodes


def choose(scores: torch.Tensor, topk: int, nodes: Nodes) -> torch.Tensor:
    """Each token's top-k experts, limited to the nodes with its best experts.

    With 2 nodes of 2 experts, and experts from one of them: 0.9 is the best, so its node is chosen.

    >>> choose(torch.tensor([[0.9, 0.1, 0.8, 0.7]]), 2, Nodes(num_nodes=2, topk_nodes=1)).tolist()
    [[0, 1]]
    """
    if nodes.topk_nodes < nodes.num_nodes:
        best = _by_node(scores, nodes).amax(dim=2).topk(nodes.topk_nodes, dim=1).indices
        is_open = torch.zeros(len(scores), nodes.num_nodes, dtype=torch.bool, device=scores.device)
        is_open = is_open.scatter(1, best, True).repeat_interleave(scores.shape[1] // nodes.num_nodes, dim=1)
        scores = scores.masked_fill(~is_open, float("-inf"))
    return scores.topk(topk, dim=-1).indices


def misrouting(scores: torch.Tensor, experts: torch.Tensor, nodes: Nodes) -> float:
    """The score gap between the right choice and the worst expert or node chosen; 0 for a right choice.

    Two sums of the same numbers may differ in their last bits, so a tie may be decided either way.

    >>> misrouting(torch.tensor([[0.75, 0.0, 1.0, 0.5]]), torch.tensor([[0, 1]]), Nodes(2, 1, 1))
    0.25
    """
    if not experts.numel():
        return 0.0
    is_used = torch.zeros(len(scores), nodes.num_nodes, dtype=torch.bool, device=scores.device)
    is_used = is_used.scatter(1, experts * nodes.num_nodes // scores.shape[1], True)
    num_used = is_used.sum(dim=1, keepdim=True)
    if int(num_used.max()) > nodes.topk_nodes:
        return float("inf")
    worst_chosen = scores.gather(1, experts).amin(dim=1, keepdim=True)
    best_of_node = _by_node(scores, nodes).amax(dim=2)
    worst_node = best_of_node.masked_fill(~is_used, float("inf")).amin(dim=1, keepdim=True)
    # If no more nodes were allowed, a node must beat a chosen node; else one of its experts a chosen expert.
    to_beat = torch.where(is_used | (num_used < nodes.topk_nodes), worst_chosen, worst_node)
    best_other = _by_node(scores.scatter(1, experts, float("-inf")), nodes).amax(dim=2)
    return max(0.0, float((best_other - to_beat).max()))


def _by_node(scores: torch.Tensor, nodes: Nodes) -> torch.Tensor:
    """[token, node, expert of the node]"""
    return scores.view(len(scores), nodes.num_nodes, scores.shape[1] // nodes.num_nodes)
