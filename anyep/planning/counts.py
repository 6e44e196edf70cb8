"""How many rows a routing makes each rank send to each rank, node and expert.

counts = count_choices(topk_idx, Topology(16, 8), num_experts=256)      # topk_idx: [rank, token, top-k]
counts.to_ranks[3, 5]       # tokens of rank 3 with an expert on rank 5, each once
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from anyep.errors import InvalidCall
from anyep.topology import Topology

Array = np.ndarray[Any, Any]
CHOICES_AT_ONCE: Final = 1 << 22


class Counts(NamedTuple):
    """What each rank sends; whole numbers, or expectations."""

    topology: Topology
    num_experts: int
    tokens: Array
    """[rank]"""
    to_ranks: Array
    """[source, destination]: tokens with at least one expert on a rank."""
    to_nodes: Array
    """[source, node]: tokens with at least one expert on a node."""
    to_experts: Array
    """[source, expert]: tokens that chose an expert."""

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.topology.num_ranks

    @property
    def choices(self) -> Array:
        """[source, destination]: rows where a token has one for each of its experts."""
        ranks = self.topology.num_ranks
        choices: Array = self.to_experts.reshape(ranks, ranks, -1).sum(axis=2)
        return choices

    def relayed(self) -> Array:
        """[relay, rank of its node]: rows that a relay gives to each rank of its node, its own included."""
        nodes, per_node = self.topology.num_nodes, self.topology.ranks_per_node
        by_place = self.to_ranks.reshape(nodes, per_node, nodes, per_node).sum(axis=0)
        # [NVL rank of the source, node, rank there] -> [node, NVL rank of the relay, rank there]
        relayed: Array = by_place.transpose(1, 0, 2).reshape(nodes * per_node, per_node)
        return relayed

    def crossing(self) -> Array:
        """[source, node]: tokens that cross to another node; those of the own node are 0."""
        crossing = self.to_nodes.copy()
        ranks = np.arange(self.topology.num_ranks)
        crossing[ranks, ranks // self.topology.ranks_per_node] = 0
        return crossing


def count_choices(topk_idx: Array, topology: Topology, num_experts: int) -> Counts:
    """Count a routing exactly; -1 is no expert, and an expert chosen twice by a token counts once.

    Example:
        2 ranks on a node each, 2 experts each, and one token per rank: rank 0's goes to experts 0 and 1 (rank
        0), rank 1's to experts 1 and 2 (ranks 0 and 1):

        >>> counts = count_choices(np.array([[[0, 1]], [[1, 2]]]), Topology(2, 1), num_experts=4)
        >>> counts.to_ranks.tolist(), counts.to_experts.tolist()
        ([[1, 0], [1, 1]], [[1, 1, 0, 0], [0, 1, 1, 0]])
    """
    ranks, tokens, topk = topk_idx.shape
    local_experts = num_experts // topology.num_ranks
    to_ranks = np.zeros((ranks, topology.num_ranks), np.int64)
    to_nodes = np.zeros((ranks, topology.num_nodes), np.int64)
    to_experts = np.zeros((ranks, num_experts), np.int64)
    ranks_at_once = max(1, CHOICES_AT_ONCE // max(1, tokens * topk))
    for first in range(0, ranks, ranks_at_once):
        some = slice(first, first + ranks_at_once)
        experts = np.sort(topk_idx[some], axis=-1).astype(np.int32)
        to_experts[some] = _count_each_once(experts, num_experts)
        # Sorted experts have sorted ranks, and -1 stays -1.
        holders = experts // local_experts
        to_ranks[some] = _count_each_once(holders, topology.num_ranks)
        to_nodes[some] = _count_each_once(holders // topology.ranks_per_node, topology.num_nodes)
    return Counts(topology, num_experts, np.full(ranks, tokens, np.int64), to_ranks, to_nodes, to_experts)


def _count_each_once(places: Array, num_places: int) -> Array:
    """[rank, place]: the tokens with at least one entry that is this place; entries are sorted by token."""
    is_first = places >= 0
    is_first[..., 1:] &= places[..., 1:] != places[..., :-1]
    rank, _, _ = np.nonzero(is_first)
    at = rank * num_places + places[is_first]
    return np.bincount(at, minlength=places.shape[0] * num_places).reshape(places.shape[0], num_places)


def check_choices(topk_idx: Array, num_experts: int, what: str) -> None:
    """Refuse ids that are neither experts nor -1; `what` names their source."""
    if not topk_idx.size:
        return
    lowest, highest = int(topk_idx.min()), int(topk_idx.max())
    if lowest < -1 or highest >= num_experts:
        wrong = lowest if lowest < -1 else highest
        raise InvalidCall(
            f"{what} has the expert {wrong}: experts are 0 to {num_experts - 1}, and -1 is no expert;"
            f" pass the number of experts of the model with --experts"
        )
