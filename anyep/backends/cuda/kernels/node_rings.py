"""The rings between nodes: a ring per (channel, source node) at each relay.

They work like the rings of `rings`. Their peers are the ranks with this rank's index on the other nodes, its
relays; `Rings.ranks` has the relay of each node, so that an outcome names a rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.rings import OWN_HEAP, RANK, rings_in

NETWORK_TAIL_AT = tl.constexpr(words_of.NETWORK_TAIL_AT)
NETWORK_HEAD_AT = tl.constexpr(words_of.NETWORK_HEAD_AT)
NETWORK_STRIDE = tl.constexpr(words_of.NETWORK_STRIDE)


@triton.jit
def relay_on(node, rank, RANKS_PER_NODE: tl.constexpr):
    """A rank's relay on a node: the rank there with its index.

    Example:
    With 4 ranks per node, the relay of rank 6 on node 2 is rank 10.
    """
    return node * RANKS_PER_NODE + rank % RANKS_PER_NODE


@triton.jit
def rank_beside(rank, index, RANKS_PER_NODE: tl.constexpr):
    """The rank with an index on a rank's own node.

    Example:
    With 4 ranks per node, index 1 beside rank 6 is rank 5.
    """
    return rank // RANKS_PER_NODE * RANKS_PER_NODE + index


@triton.jit
def rings_of_nodes(
    tables,
    area,
    channel,
    TO_RELAYS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
):
    """A channel's rings to the relays on other nodes (`TO_RELAYS`), or those from there.

    This rank's own node has none: `is_rank` is false for it.

    Example:
    On rank 2 of 4, with 2 ranks per node: the ring to node 0 is ring 1 of the channel at rank 0, its tail is
    that of node 1 there, and its head that of node 0 here.
    """
    constants = tables.constants
    nodes = tl.arange(0, NODE_BLOCK)
    rank, here = tl.load(constants + RANK).to(tl.int32), tl.load(constants + OWN_HEAP)
    own_node = rank // RANKS_PER_NODE
    relays = relay_on(nodes, rank, RANKS_PER_NODE)
    is_other = (nodes < NUM_NODES) & (nodes != own_node)
    tail_at, head_at = tl.load(constants + NETWORK_TAIL_AT), tl.load(constants + NETWORK_HEAD_AT)
    stride = tl.load(constants + NETWORK_STRIDE)
    there = tl.load(tables.heaps + relays, mask=is_other, other=0)
    inbox = tl.load(tables.inboxes + relays, mask=is_other, other=0)
    if TO_RELAYS:
        heaps = tl.load(tables.net_rows + 2 * nodes, mask=is_other, other=0)
        ring = tl.load(tables.net_rows + 2 * nodes + 1, mask=is_other, other=0)
        ours = there + tail_at + own_node * stride
        theirs = inbox + head_at + nodes * stride
    else:
        heaps, ring = here, nodes
        ours = there + head_at + own_node * stride
        theirs = inbox + tail_at + nodes * stride
    return rings_in(area, relays, is_other, heaps, channel * NUM_NODES + ring, ours, theirs, channel)


@triton.jit
def lanes_of_nodes(relayed, rings, channel, num_channels, NUM_NODES: tl.constexpr, NODE_BLOCK: tl.constexpr):
    """How many virtual tokens of a channel come from each other node, and the first of them.

    Example:
    With 2 channels, expected [[3, 1], [2, 4]] and first_virtual [[0, 4], [3, 6]]: on node 0, channel 1 has 4
    virtual tokens from node 1, and the first one is 6.
    """
    nodes = tl.arange(0, NODE_BLOCK)
    count = tl.load(relayed.expected + nodes * num_channels + channel, mask=rings.is_rank, other=0)
    first = tl.load(relayed.first_virtual + channel * NUM_NODES + nodes, mask=rings.is_rank, other=0)
    return count, first
