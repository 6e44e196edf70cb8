"""What one dispatch knew about the routing: the handle of normal mode between nodes, and its checks.

A rank relays the tokens that come from the ranks of its own index on every node, its own node included: they
are numbered by source node, then by token. Channels are contiguous ranges of a source's tokens.
"""

from __future__ import annotations

import zlib
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from anyep.errors import InvalidCall
from anyep.modes.routing import Array, array_of
from anyep.sizes import SOURCE_META_BYTES
from anyep.topology import Topology

NUM_TENSORS: Final = 10


class NodeRouting(NamedTuple):
    """The ten parts of a handle, in their order, as arrays over the memory of its tensors.

    Prefix sums over channels or ranks are inclusive; only `recv_gbl_channel_prefix_matrix` says where the
    rows of a channel begin among those of its source.
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

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The flat tuple that clients keep."""
        return tuple(torch.from_numpy(part) for part in self)

    @property
    def sources(self) -> Array:
        """What is known of each received row's origin."""
        return self.recv_src_meta

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
        """The rows of `send_nvl_head` that are in use."""
        return int(self.recv_rdma_rank_prefix_sum[-1])

    def num_rows_for(self, rank: int) -> int:
        """The rows that this rank received, of those that the handle has room for."""
        return int(self.recv_gbl_rank_prefix_sum[-1])

    @property
    def sent_by_rank(self) -> Array:
        """This rank's rows for every rank."""
        return self.gbl_channel_prefix_matrix[:, -1]

    @property
    def received_by_rank(self) -> Array:
        """The rows from every rank."""
        return counts_of_prefix(self.recv_gbl_rank_prefix_sum)

    def first_relayed(self) -> Array:
        """[channel, node]: the number of the first token that came from a node in a channel."""
        by_node = np.concatenate([np.zeros(1, np.int64), self.recv_rdma_rank_prefix_sum[:-1]])
        by_channel = np.zeros(self.recv_rdma_channel_prefix_matrix.shape, np.int64)
        by_channel[:, 1:] = self.recv_rdma_channel_prefix_matrix[:, :-1]
        return np.ascontiguousarray((by_node[:, None] + by_channel).T)

    def received_by_channel(self) -> Array:
        """[rank, channel]: the rows that came from a rank."""
        counts = np.empty_like(self.recv_gbl_channel_prefix_matrix)
        counts[:, :-1] = self.recv_gbl_channel_prefix_matrix[:, 1:]
        counts[:, -1] = self.received_by_rank
        counts -= self.recv_gbl_channel_prefix_matrix
        return counts

    def relayed_rows(self, topology: Topology) -> tuple[Array, Array, bool]:
        """[node, rank of this node]: where at a rank the rows that came from a node begin (-1: nowhere);
        [node, rank of this node, channel]: how many they are; and whether they follow each other there."""
        nodes, per_node = topology.num_nodes, topology.ranks_per_node
        firsts = np.full((nodes, per_node), -1, np.int32)
        counts = np.zeros((nodes, per_node, self.num_channels), np.int32)
        follow = True
        ends = np.concatenate([np.zeros(1, np.int64), self.recv_rdma_rank_prefix_sum])
        for node in range(nodes):
            heads = self.send_nvl_head[ends[node] : ends[node + 1]]
            is_sent = heads >= 0
            number = np.cumsum(is_sent, axis=0, dtype=np.int32)
            begins = np.where(is_sent, heads - number + 1, -1)
            if len(heads):
                firsts[node] = begins.max(axis=0)
            follow = follow and bool((is_sent <= (begins == firsts[node])).all())
            total = np.concatenate([np.zeros((1, per_node), np.int32), number])
            counts[node] = counts_of_prefix(total[self.recv_rdma_channel_prefix_matrix[node]].T)
        return firsts, counts, follow

    def relayed_by_channel(self) -> Array:
        """[node, channel]: the tokens that came from a node."""
        return counts_of_prefix(self.recv_rdma_channel_prefix_matrix)

    def rows_by_lane(self, topology: Topology) -> tuple[Array, Array]:
        """[channel, rank of this node, node]: the first row that came by way of a rank from a node, and how
        many did.

        With 2 nodes of 1 rank, one channel, and 3 rows from rank 0 and 2 from rank 1: [[[0, 3]]], [[[3, 2]]].
        """
        before = np.concatenate([np.zeros(1, np.int64), self.recv_gbl_rank_prefix_sum[:-1]])
        first = before[:, None] + self.recv_gbl_channel_prefix_matrix
        end = np.concatenate([first[:, 1:], self.recv_gbl_rank_prefix_sum[:, None]], axis=1)
        shape = (topology.num_nodes, topology.ranks_per_node, self.num_channels)
        return _by_lane(first.reshape(shape)), _by_lane((end - first).reshape(shape))


def _by_lane(array: Array) -> Array:
    """[node, rank, channel] as [channel, rank, node]."""
    return np.ascontiguousarray(array.transpose(2, 1, 0).astype(np.int64))


def counts_of_prefix(prefix: Array) -> Array:
    """Inclusive prefix sums along the last axis, undone.

    >>> counts_of_prefix(np.array([[2, 2, 5]], np.int32)).tolist()
    [[2, 0, 3]]
    """
    counts = np.array(prefix, np.int32, order="C")
    counts[..., 1:] -= prefix[..., :-1]
    return counts


def tokens_in_nodes(in_rank: Array, ranks_per_node: int) -> Array:
    """[token, node]: whether some rank of a node wants a token.

    >>> tokens_in_nodes(np.array([[True, False, False, False], [False, True, True, True]]), 2).tolist()
    [[True, False], [True, True]]
    """
    num_tokens, num_ranks = in_rank.shape
    by_node = in_rank.reshape(num_tokens, num_ranks // ranks_per_node, ranks_per_node)
    return np.asarray(by_node.any(axis=2))


def number_tokens(in_node: Array) -> Array:
    """Each token's number among those that go to a node; -1 where it does not go.

    >>> number_tokens(np.array([[True, False], [True, True]])).tolist()
    [[0, -1], [1, 0]]
    """
    numbers = np.cumsum(in_node, axis=0, dtype=np.int32) - np.int32(1)
    return np.ascontiguousarray(np.where(in_node, numbers, np.int32(-1)).astype(np.int32))


def count_by_channel(marks: Array, num_channels: int) -> Array:
    """[column, channel]: the marks of each column in contiguous ranges of ceil(tokens / channels) tokens.

    >>> count_by_channel(np.array([[True, False], [True, True], [False, True]]), 2).tolist()
    [[2, 0], [1, 1]]
    """
    num_tokens, num_columns = marks.shape
    per_channel = max(1, -(-num_tokens // num_channels))
    counts = np.zeros((num_columns, num_channels), np.int32)
    for channel in range(min(num_channels, -(-num_tokens // per_channel))):
        counts[:, channel] = marks[channel * per_channel : (channel + 1) * per_channel].sum(axis=0)
    return counts


def checked_node_routing(handle: Any, topology: Topology, rank: int) -> NodeRouting:
    """A client's handle, judged by its contents."""
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
        for name, tensor, shape in zip(NodeRouting._fields, handle, shapes, strict=True)
    ]
    routing = NodeRouting(*parts)
    check_contents(routing, topology, rank)
    return routing


def check_contents(routing: NodeRouting, topology: Topology, rank: int) -> None:
    """Refuse a routing whose parts do not fit together: with it a kernel could reach outside of its rows."""
    wrong = _what_does_not_fit(routing, topology, rank)
    if wrong:
        raise InvalidCall(f"the handle does not fit together: {wrong}")


def _what_does_not_fit(routing: NodeRouting, topology: Topology, rank: int) -> str:
    in_rank, channels = routing.is_token_in_rank, routing.num_channels
    in_node = tokens_in_nodes(in_rank, topology.ranks_per_node)
    if not np.array_equal(number_tokens(in_node), routing.send_rdma_head):
        return "send_rdma_head does not number the tokens of is_token_in_rank"
    for name, marks in (("rdma_channel_prefix_matrix", in_node), ("gbl_channel_prefix_matrix", in_rank)):
        if not np.array_equal(np.cumsum(count_by_channel(marks, channels), axis=1), getattr(routing, name)):
            return f"{name} does not count the tokens of is_token_in_rank"
    if (routing.received_by_rank < 0).any() or routing.recv_gbl_rank_prefix_sum[-1] > routing.num_recv_rows:
        return "recv_gbl_rank_prefix_sum falls, or has more rows than recv_src_meta"
    starts_wrong = routing.recv_gbl_channel_prefix_matrix[:, 0] != 0
    if starts_wrong.any() or (routing.received_by_channel() < 0).any():
        return "recv_gbl_channel_prefix_matrix leaves the rows of its sources"
    relayed = counts_of_prefix(routing.recv_rdma_rank_prefix_sum)
    by_channel = routing.recv_rdma_channel_prefix_matrix
    if (relayed < 0).any() or (counts_of_prefix(by_channel) < 0).any():
        return "recv_rdma_rank_prefix_sum or recv_rdma_channel_prefix_matrix falls"
    if not np.array_equal(by_channel[:, -1], relayed) or routing.num_relayed > len(routing.send_nvl_head):
        return "recv_rdma_rank_prefix_sum does not count what send_nvl_head has"
    if not np.array_equal(
        by_channel[topology.node_of(rank)], routing.rdma_channel_prefix_matrix[topology.node_of(rank)]
    ):
        return "what this rank sends to its own node is not what it relays there"
    if not routing.relayed_rows(topology)[2]:
        return "send_nvl_head does not number the rows of its sources one after the other"
    return ""


def what_a_handle_says(routing: NodeRouting, topology: Topology) -> Array:
    """What a rank tells everyone of its handle: rows to and from everyone, the same by channel (a checksum),
    the rows that it relays and where they begin, and by node the tokens that it sent and relays."""
    firsts, relayed, _ = routing.relayed_rows(topology)
    parts = (
        routing.sent_by_rank,
        routing.received_by_rank,
        _checksums(counts_of_prefix(routing.gbl_channel_prefix_matrix)),
        _checksums(routing.received_by_channel()),
        _checksums(relayed.reshape(topology.num_ranks, -1)),
        firsts.reshape(-1),
        _checksums(counts_of_prefix(routing.rdma_channel_prefix_matrix)),
        _checksums(routing.relayed_by_channel()),
    )
    return np.concatenate(parts).astype(np.int32)


def first_difference(said: Array, topology: Topology) -> str:
    """The first thing about which handles differ, or nothing; row r of `said` is what rank r's handle says.

    >>> first_difference(np.array([[1, 2, 1, 2, *[0] * 12], [2, 3, 7, 3, *[0] * 12]]), Topology(2, 1))
    'in that of rank 0 it sent 2 rows to rank 1, which got 7 according to its own'
    """
    ranks, nodes, per_node = topology.num_ranks, topology.num_nodes, topology.ranks_per_node
    ends = np.cumsum([ranks] * 6 + [nodes])
    sent, received, by_channel, received_by_channel, relayed, firsts, tokens, relayed_tokens = np.split(
        said, ends, axis=1
    )
    for sender, receiver in zip(*np.nonzero(sent != received.T), strict=True):
        return (
            f"in that of rank {sender} it sent {sent[sender, receiver]} rows to rank {receiver}, which got"
            f" {received[receiver, sender]} according to its own"
        )
    for sender, receiver in zip(*np.nonzero(by_channel != received_by_channel.T), strict=True):
        return (
            f"those of ranks {sender} and {receiver} have the rows that rank {sender} sent to rank {receiver}"
            f" in other channels"
        )
    begin = np.cumsum(received, axis=1, dtype=np.int32) - received
    for relay in range(ranks):
        node, index = divmod(relay, per_node)
        sources, here = slice(index, None, per_node), slice(node * per_node, (node + 1) * per_node)
        expected = np.where(sent[sources, here] > 0, begin[here, sources].T, -1)
        differs = (by_channel[sources, here] != relayed[relay].reshape(nodes, per_node)).any(axis=1)
        differs |= (expected != firsts[relay].reshape(nodes, per_node)).any(axis=1)
        differs |= tokens[sources, node] != relayed_tokens[relay]
        for source_node in np.flatnonzero(differs):
            source = int(source_node) * per_node + index
            return f"that of rank {relay} relays other rows from rank {source} than that one sent"
    return ""


def _checksums(rows: Array) -> Array:
    """A number for each row; rows that differ hardly ever have the same."""
    words = [zlib.crc32(row) for row in np.ascontiguousarray(rows, np.int32)]
    return np.array(words, np.uint32).view(np.int32)
