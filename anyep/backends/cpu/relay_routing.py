"""The routing of one dispatch: the handle of normal mode between nodes, and its checks.

A rank relays the tokens of the ranks with its own index on every node, its own node included. These tokens
are numbered by source node, then by token. Channels are contiguous ranges of a source's tokens.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch

from anyep.backends import cpu
from anyep.backends.cpu.routing import array_of
from anyep.core.calls import Array
from anyep.core.diagnosis import other_rows
from anyep.errors import InvalidCall
from anyep.sizes import SOURCE_META_BYTES
from anyep.topology import Topology

NUM_TENSORS: Final = 10
NOTHING: Final = np.zeros(0, np.int32)


class RelayRouting(NamedTuple):
    """The ten parts of a handle, in their order, as arrays over the memory of its tensors.

    Prefix sums over channels or ranks are inclusive, except `recv_gbl_channel_prefix_matrix`, which is where
    the rows of a channel begin among those of its source.
    """

    is_token_in_rank: Array
    rdma_channel_prefix_matrix: Array
    gbl_channel_prefix_matrix: Array
    recv_rdma_channel_prefix_matrix: Array
    recv_rdma_rank_prefix_sum: Array
    recv_gbl_channel_prefix_matrix: Array
    recv_gbl_rank_prefix_sum: Array
    recv_src_meta: Array
    send_rdma_head: Array
    send_nvl_head: Array
    digest_words: Array = NOTHING
    """Not part of the handle: what this rank sends to all ranks about it: digests, then counts, as words of 4
    bytes; set once the parts are known to be consistent."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The flat tuple that clients keep."""
        return tuple(torch.from_numpy(part) for part in self[:NUM_TENSORS])

    @property
    def sources(self) -> Array:
        """The origin of each received row."""
        return self.recv_src_meta

    @property
    def checksum(self) -> int:
        """Always 0: no part of these handles is the same on all ranks."""
        return 0

    @property
    def num_tokens(self) -> int:
        return int(self.is_token_in_rank.shape[0])

    @property
    def num_recv_rows(self) -> int:
        return int(self.recv_src_meta.shape[0])

    @property
    def num_channels(self) -> int:
        return int(self.gbl_channel_prefix_matrix.shape[1])

    @property
    def num_relayed(self) -> int:
        """The number of rows of `send_nvl_head` that are in use."""
        return int(self.recv_rdma_rank_prefix_sum[-1])

    def num_rows_for(self, rank: int) -> int:
        """The number of rows that this rank received; the handle may have room for more."""
        return int(self.recv_gbl_rank_prefix_sum[-1])

    def lanes(self, topology: Topology) -> Lanes:
        """The lanes of this routing, for the kernels that move rows."""
        channels, nodes, per_node = self.num_channels, topology.num_nodes, topology.ranks_per_node
        lanes = Lanes(
            np.empty((channels, per_node, nodes), np.int64),
            np.empty((channels, per_node, nodes), np.int64),
            np.empty((nodes, channels), np.int32),
            np.empty((channels, nodes), np.int64),
            np.empty(per_node, np.int64),
        )
        cpu.plan_lanes(
            per_node,
            self[:NUM_TENSORS],
            *lanes,
        )
        return lanes


class Lanes(NamedTuple):
    """Where the rows and tokens of a handle begin, channel by channel, and how many there are."""

    first_row: Array
    """[channel, rank of this node, node]: the first row received from a node through a rank."""
    num_rows: Array
    relayed: Array
    """[node, channel]: the tokens that this rank relays."""
    first_relayed: Array
    """[channel, node]"""
    relayed_to: Array
    """[rank of this node]: the rows that this rank relays to it."""


WHAT_DOES_NOT_FIT: Final = {
    1: "send_rdma_head does not number the tokens of is_token_in_rank",
    2: "rdma_channel_prefix_matrix does not count the tokens of is_token_in_rank",
    3: "gbl_channel_prefix_matrix does not count the tokens of is_token_in_rank",
    4: "recv_gbl_rank_prefix_sum falls, or has more rows than recv_src_meta",
    5: "recv_gbl_channel_prefix_matrix leaves the rows of its sources",
    6: "recv_rdma_rank_prefix_sum or recv_rdma_channel_prefix_matrix falls",
    7: "recv_rdma_rank_prefix_sum does not count what send_nvl_head has",
    8: "what this rank sends to its own node is not what it relays there",
    9: "send_nvl_head does not number the rows of its sources one after the other",
}


def relay_routing_of(handle: Any, topology: Topology) -> RelayRouting:
    """Check the types and shapes of the parts of a client's handle."""
    if not isinstance(handle, tuple | list) or len(handle) != NUM_TENSORS:
        raise InvalidCall(
            f"the handle must be the tuple of {NUM_TENSORS} tensors that dispatch returned between nodes"
        )
    for part in handle:
        if not isinstance(part, torch.Tensor) or part.dim() == 0:
            raise InvalidCall("the handle must hold tensors only, as dispatch returned it")
    ranks, nodes = topology.num_ranks, topology.num_nodes
    num_tokens, channels = handle[0].shape[0], max(1, handle[2].shape[-1])
    num_rows, num_relayed = handle[7].shape[0], handle[9].shape[0]
    shapes = (
        (torch.bool, (num_tokens, ranks)),
        (torch.int32, (nodes, channels)),
        (torch.int32, (ranks, channels)),
        (torch.int32, (nodes, channels)),
        (torch.int32, (nodes,)),
        (torch.int32, (ranks, channels)),
        (torch.int32, (ranks,)),
        (torch.uint8, (num_rows, SOURCE_META_BYTES)),
        (torch.int32, (num_tokens, nodes)),
        (torch.int32, (num_relayed, topology.ranks_per_node)),
    )
    parts = [
        array_of(name, tensor, *shape)
        for name, tensor, shape in zip(RelayRouting._fields[:NUM_TENSORS], handle, shapes, strict=True)
    ]
    return RelayRouting(*parts)


def checked(routing: RelayRouting, topology: Topology, rank: int) -> RelayRouting:
    """Refuse a routing with inconsistent parts: with it a kernel could access memory outside of its rows."""
    digests = np.empty(num_digests(topology), np.int64)
    counts = np.empty(3 * topology.num_ranks, np.int32)
    code = cpu.read_node_handle(
        rank,
        topology.ranks_per_node,
        routing[:NUM_TENSORS],
        digests,
        counts,
    )
    if code:
        raise InvalidCall(f"the handle does not fit together: {WHAT_DOES_NOT_FIT[code]}")
    return routing._replace(digest_words=np.concatenate([digests.view(np.int32), counts]))


def num_digests(topology: Topology) -> int:
    """The number of digests: of rows to and from each rank, and of tokens to and relayed from each node."""
    return 2 * topology.num_ranks + 2 * topology.num_nodes


def difference_between(words: Array, topology: Topology) -> str:
    """The first difference between handles, or ""; row r has the words of rank r's handle."""
    digests, counts = np.split(words, [2 * num_digests(topology)], axis=1)
    digests, counts = np.ascontiguousarray(digests).view(np.int64), np.ascontiguousarray(counts)
    code = cpu.first_difference(digests, counts, topology.ranks_per_node)
    if code < 0:
        return ""
    ranks = topology.num_ranks
    what, pair = divmod(code, ranks * ranks)
    sender, receiver = divmod(pair, ranks)
    if what == 0:
        return (
            f"in that of rank {sender} it sent {counts[sender, receiver]} rows to rank {receiver}, which got"
            f" {counts[receiver, ranks + sender]} according to its own"
        )
    if what == 1:
        return other_rows(sender, receiver)
    return f"that of rank {receiver} relays other rows from rank {sender} than that one sent"
