"""How many ranks and nodes a token's experts are on, on average, where no routing is given.

Reach(num_ranks=32, num_nodes=4, num_experts=256, num_topk=8).nodes      # 3.6 of the 4
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple


class Reach(NamedTuple):
    """Experts are drawn uniformly, without repetition, from the nodes that a token may use.

    >>> round(Reach(num_ranks=8, num_nodes=1, num_experts=256, num_topk=8).ranks, 2)
    5.29
    >>> Reach(num_ranks=16, num_nodes=2, num_experts=256, num_topk=1).nodes
    1.0
    """

    num_ranks: int
    num_nodes: int
    num_experts: int
    num_topk: int
    num_group_nodes: int | None = None
    """Nodes that a token's experts may be on; all of them where None."""

    @property
    def ranks(self) -> float:
        """Ranks with at least one of a token's experts."""
        return self._places(self.num_ranks)

    @property
    def nodes(self) -> float:
        """Nodes with at least one of a token's experts, the token's own node included."""
        return self._places(self.num_nodes)

    @property
    def other_nodes(self) -> float:
        """Nodes that a token crosses to."""
        return self.nodes * (self.num_nodes - 1) / self.num_nodes

    def _places(self, num_places: int) -> float:
        used_nodes = min(self.num_nodes, self.num_group_nodes or self.num_nodes)
        experts = self.num_experts * used_nodes / self.num_nodes
        of_one = self.num_experts / num_places
        missed = 1.0
        for drawn in range(self.num_topk):
            missed *= max(0.0, experts - of_one - drawn) / (experts - drawn)
        return num_places * used_nodes / self.num_nodes * (1 - missed)


def largest(mean: float, num_ranks: int) -> float:
    """The rows of the most loaded of some ranks, if each has `mean` on average and rows come independently.

    >>> round(largest(1024, 1)), round(largest(1024, 64))
    (1024, 1099)
    """
    if num_ranks == 1 or not mean:
        return mean
    deviations = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
    return mean + deviations * math.sqrt(mean)
