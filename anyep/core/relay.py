"""Which rank relays which rows between nodes: the plan of normal mode for one rank, pure arithmetic.

A token crosses the network once per destination node. It goes to the rank with the sender's NVL rank on that
node, its relay there, which forwards it to each destination rank of its node. A combine takes the opposite
direction: the relay sums the rows of its node, and one row per node crosses back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from anyep.core.calls import Array
from anyep.core.headers import RESULT_ROWS
from anyep.errors import InvalidCall
from anyep.topology import Topology


class RelayWork(NamedTuple):
    """The rows that a call sends to and receives from nodes, and through the rings of this node's ranks."""

    to_nodes: Array
    from_nodes: Array
    to_ranks: Array
    from_ranks: Array


@dataclass(frozen=True)
class RelayPlan:
    """One rank's part in the traffic between nodes."""

    topology: Topology
    rank: int

    @cached_property
    def node(self) -> int:
        return self.topology.node_of(self.rank)

    @cached_property
    def index(self) -> int:
        """The NVL rank of this rank."""
        return self.topology.nvl_rank_of(self.rank)

    @cached_property
    def relays(self) -> list[int]:
        """For each node, the rank that relays this rank's tokens there; this rank relays its tokens here.

        >>> RelayPlan(Topology(4, 2), rank=1).relays
        [1, 3]
        """
        return [self.topology.rank_at(node, self.index) for node in range(self.topology.num_nodes)]

    def next_rows(self, matrix: Array, relayed: Array) -> Array:
        """[channel, node, rank of this node]: the place at a rank for the next row from a node.

        `matrix` has the rows from rank to rank, `relayed` the rows that this rank relays, by [node, rank of
        this node, channel].
        """
        here = matrix[:, list(self.topology.ranks_on(self.node))]
        before = np.cumsum(here, axis=0, dtype=np.int64) - here
        by_channel = relayed[:, : self.topology.ranks_per_node].astype(np.int64)
        in_earlier_channels = np.cumsum(by_channel, axis=2) - by_channel
        rows = before[self.relays][:, :, None] + in_earlier_channels
        return np.ascontiguousarray(rows.transpose(2, 0, 1))

    def check_room(self, headers: Array, tokens_by_node: Array) -> None:
        """Refuse a worst case that is too small for a relay: a rank can relay as many rows as it can receive.

        `tokens_by_node` has the tokens from each rank to each node.
        """
        if (headers[:, RESULT_ROWS] < 0).all():
            return
        topology = self.topology
        shape = (topology.num_nodes, topology.ranks_per_node, topology.num_nodes)
        by_index = tokens_by_node.reshape(shape).sum(axis=0)
        for rank in range(topology.num_ranks):
            limit = int(headers[rank, RESULT_ROWS])
            relayed = int(by_index[topology.nvl_rank_of(rank), topology.node_of(rank)])
            if 0 <= limit < relayed:
                raise InvalidCall(
                    f"num_worst_tokens is {limit} on rank {rank}, but it relays {relayed} tokens to its"
                    f" node: nothing was sent; pass at least the largest number of rows that can arrive at"
                    f" any rank of the node"
                )
