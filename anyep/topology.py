"""Which rank is on which node, and which rank holds which expert.

Ranks are numbered node by node: node 0 has ranks 0 to p-1, node 1 has p to 2p-1, and so on. A node's
index is its "RDMA rank"; a rank's index within its node is its "NVL rank".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from anyep.errors import InvalidCall, whole_number
from anyep.sizes import experts_per_rank

MAX_RANKS_PER_NODE_OF_SEVERAL: Final = 32
"""Between nodes a token carries a 32-bit mask of the ranks of the node that it goes to."""


def check_nodes(num_ranks: int, ranks_per_node: int, name: str = "ranks_per_node") -> None:
    """Refuse nodes that the ranks cannot form; `name` is the caller's name for `ranks_per_node`."""
    whole_number("num_ranks", num_ranks, minimum=1)
    whole_number(name, ranks_per_node, minimum=1)
    if num_ranks % ranks_per_node:
        raise InvalidCall(
            f"{num_ranks} ranks do not fill nodes of {ranks_per_node} evenly: {name} must divide {num_ranks}"
        )
    if num_ranks > ranks_per_node > MAX_RANKS_PER_NODE_OF_SEVERAL:
        raise InvalidCall(
            f"{name} is {ranks_per_node}: with several nodes it may be at most"
            f" {MAX_RANKS_PER_NODE_OF_SEVERAL}; a smaller one makes more nodes"
        )


@dataclass(frozen=True)
class Topology:
    """`num_ranks` ranks on nodes of `ranks_per_node` each.

    Args:
        num_ranks: The ranks of the group.
        ranks_per_node: The ranks of each node; divides `num_ranks`.

    >>> cluster = Topology(num_ranks=16, ranks_per_node=8)
    >>> cluster.num_nodes, cluster.node_of(11), cluster.nvl_rank_of(11), cluster.rank_at(node=1, nvl_rank=3)
    (2, 1, 3, 11)
    """

    num_ranks: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        check_nodes(self.num_ranks, self.ranks_per_node)

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """The index of a rank's node.

        Args:
            rank: A rank of the group.
        """
        return self._known(rank) // self.ranks_per_node

    def nvl_rank_of(self, rank: int) -> int:
        """The index of a rank within its node.

        Args:
            rank: A rank of the group.
        """
        return self._known(rank) % self.ranks_per_node

    def rank_at(self, node: int, nvl_rank: int) -> int:
        """The rank at a place in a node.

        Args:
            node: The index of a node.
            nvl_rank: The index of the rank within that node.
        """
        if not (0 <= node < self.num_nodes and 0 <= nvl_rank < self.ranks_per_node):
            raise InvalidCall(
                f"there is no rank {nvl_rank} on node {node}:"
                f" {self.num_nodes} nodes have {self.ranks_per_node} ranks each"
            )
        return node * self.ranks_per_node + nvl_rank

    def ranks_on(self, node: int) -> range:
        """The ranks of a node.

        Args:
            node: The index of a node.
        """
        first = self.rank_at(node, 0)
        return range(first, first + self.ranks_per_node)

    def experts_per_rank(self, num_experts: int) -> int:
        """How many experts each rank holds.

        Args:
            num_experts: The experts of all ranks together.
        """
        return experts_per_rank(num_experts, self.num_ranks)

    def _known(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise InvalidCall(f"there is no rank {rank}: ranks are 0 to {self.num_ranks - 1}")
        return rank


def topology_of_hosts(hosts: Sequence[str], ranks_per_node: int | None = None) -> Topology:
    """The topology of ranks that run on these hosts (one name per rank, in rank order).

    Without `ranks_per_node` a host is a node. With it, hosts are split into virtual nodes of that size.

    Args:
        hosts: The name of each rank's host, in rank order.
        ranks_per_node: The ranks of a virtual node; by default a host is a node.

    >>> topology_of_hosts(["a", "a", "b", "b"])
    Topology(num_ranks=4, ranks_per_node=2)
    >>> topology_of_hosts(["a", "a", "a", "a"], ranks_per_node=1)
    Topology(num_ranks=4, ranks_per_node=1)
    """
    if not hosts:
        raise InvalidCall("there are no ranks: a topology needs at least one")
    runs = _runs(hosts)
    names = [name for name, _ in runs]
    scattered = sorted({name for name in names if names.count(name) > 1})
    if scattered:
        raise InvalidCall(
            f"the ranks of host {scattered[0]!r} are not consecutive: number ranks host by host"
        )
    if ranks_per_node is None:
        if len({length for _, length in runs}) > 1:
            listing = ", ".join(f"{name!r} has {length}" for name, length in runs)
            raise InvalidCall(f"nodes must have equal numbers of ranks, but {listing}")
        return Topology(len(hosts), runs[0][1])
    topology = Topology(len(hosts), ranks_per_node)
    for name, length in runs:
        if length % ranks_per_node:
            raise InvalidCall(
                f"ranks_per_node is {ranks_per_node}, but host {name!r} has {length} ranks:"
                f" a node may not reach over two hosts"
            )
    return topology


def _runs(names: Sequence[str]) -> list[tuple[str, int]]:
    """Run lengths of equal neighbours: a a b gives (a, 2) (b, 1)."""
    runs: list[tuple[str, int]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return runs
