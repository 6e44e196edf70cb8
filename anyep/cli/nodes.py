"""Nodes for the commands that start ranks: virtual ones, on this machine.

A node is a set of ranks that share memory; in normal mode a token crosses once from one node to another. On
one machine all ranks could share memory; ranks of different virtual nodes do not, to emulate several hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from anyep.errors import InvalidCall, whole_number
from anyep.sizes import NUM_DEFAULT_SMS, size_hints
from anyep.topology import Topology, check_nodes

NETWORKS: Final = ("auto", "loopback", "nixl")


@dataclass(frozen=True)
class Nodes:
    """The ranks of a command by node, how many nodes a token's experts come from, and what joins the nodes.

    >>> Nodes(num_nodes=2, ranks_per_node=4).topology.node_of(5)
    1
    """

    num_nodes: int = 1
    ranks_per_node: int = 1
    topk_nodes: int = 1
    network: str = "auto"

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def topology(self) -> Topology:
        return Topology(self.num_ranks, self.ranks_per_node)

    @property
    def are_several(self) -> bool:
        return self.num_nodes > 1

    def of_buffer(self, row_bytes: int, num_sms: int = NUM_DEFAULT_SMS) -> dict[str, Any]:
        """The arguments of a Buffer for dispatch and combine with rows of `row_bytes` bytes."""
        num_nvl_bytes, num_rdma_bytes = size_hints(row_bytes, self.num_ranks, self.ranks_per_node, num_sms)
        return {"num_nvl_bytes": num_nvl_bytes, "num_rdma_bytes": num_rdma_bytes, **self.place}

    @property
    def place(self) -> dict[str, Any]:
        """The arguments of a Buffer that say where its ranks are."""
        if not self.are_several:
            return {}
        network = None if self.network == "auto" else self.network
        return {"ranks_per_node": self.ranks_per_node, "network": network}


ONE_NODE: Final = Nodes()


def nodes_in_words(num_nodes: int, ranks_per_node: int, more: str = "") -> str:
    """The text after a number of ranks if they are on several nodes; it ends with `more`, if more follows.

    >>> nodes_in_words(2, 4), nodes_in_words(2, 4, ","), nodes_in_words(1, 8, ",")
    (' on 2 nodes of 4', ' on 2 nodes of 4,', '')
    """
    return f" on {num_nodes} nodes of {ranks_per_node}{more}" if num_nodes > 1 else ""


def limit_in_words(num_nodes: int, topk_nodes: int) -> str:
    """The text after a number of experts.

    >>> limit_in_words(2, 1), limit_in_words(1, 1)
    (' on 1 of the nodes', '')
    """
    return f" on {topk_nodes} of the nodes" if num_nodes > 1 else ""


def count_ranks(
    ranks: int | None, nodes: int | None, ranks_per_node: int | None, usual_ranks: int
) -> tuple[int, int]:
    """Nodes and ranks per node from the options; a missing one follows from the number of ranks.

    >>> count_ranks(None, 2, 4, 8), count_ranks(None, 4, None, 8), count_ranks(6, None, 3, 8)
    ((2, 4), (4, 2), (2, 3))
    >>> count_ranks(None, None, None, 8)
    (1, 8)
    """
    for name, value in (("--ranks", ranks), ("--nodes", nodes), ("--ranks-per-node", ranks_per_node)):
        if value is not None:
            whole_number(name, value, minimum=1)
    if nodes is not None and ranks_per_node is not None:
        if ranks is not None and ranks != nodes * ranks_per_node:
            raise InvalidCall(
                f"{nodes} nodes of {ranks_per_node} ranks have {nodes * ranks_per_node} ranks, but --ranks is"
                f" {ranks}: leave one of the three out"
            )
        return nodes, ranks_per_node
    total = usual_ranks if ranks is None else ranks
    if nodes is not None:
        if total % nodes:
            raise InvalidCall(f"{total} ranks do not fill {nodes} nodes evenly: say --ranks-per-node instead")
        return nodes, total // nodes
    per_node = total if ranks_per_node is None else ranks_per_node
    if total % per_node:
        raise InvalidCall(f"{total} ranks do not fill nodes of {per_node} evenly: say --nodes, too")
    return total // per_node, per_node


def nodes_of(
    counts: tuple[int, int],
    device: str,
    mode: str,
    topk: int,
    experts: int,
    topk_nodes: int | None,
    network: str | None,
) -> Nodes:
    """The nodes that the options request. By default, a token's experts come from half of them."""
    num_nodes, ranks_per_node = counts
    if network is not None and network not in NETWORKS:
        raise InvalidCall(f"--network is {network!r}: choose one of {', '.join(NETWORKS)}")
    if num_nodes == 1:
        for name, value in (("--topk-nodes", topk_nodes), ("--network", network)):
            if value is not None:
                raise InvalidCall(f"{name} is for several nodes: add --nodes 2, or leave it out")
        return Nodes(1, ranks_per_node)
    if device != "cpu" and network == "nixl":
        raise InvalidCall(f"--network nixl is for the CPU so far: leave it out, or --device {device}")
    fewest = -(-topk * num_nodes // experts)
    if topk_nodes is None:
        topk_nodes = max(num_nodes // 2, fewest)
    whole_number("--topk-nodes", topk_nodes, minimum=1)
    if not fewest <= topk_nodes <= num_nodes:
        raise InvalidCall(
            f"--topk-nodes is {topk_nodes}: top-{topk} of {experts} experts on {num_nodes} nodes come from"
            f" {fewest} to {num_nodes} of them"
        )
    check_nodes(num_nodes * ranks_per_node, ranks_per_node, "--ranks-per-node")
    return Nodes(num_nodes, ranks_per_node, topk_nodes, network or "auto")
