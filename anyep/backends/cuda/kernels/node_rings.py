"""The rings between nodes: a ring per (channel, source node) at each relay.

They work like the rings of `rings`. Their peers are the ranks with this rank's index on the other nodes, its
relays; `Rings.ranks` has the relay of each node, so that an outcome names a rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.rings import Rings

RANK = tl.constexpr(words_of.RANK)
OWN_HEAP = tl.constexpr(words_of.OWN_HEAP)
NETWORK_TAIL_AT = tl.constexpr(words_of.NETWORK_TAIL_AT)
NETWORK_HEAD_AT = tl.constexpr(words_of.NETWORK_HEAD_AT)
NETWORK_STRIDE = tl.constexpr(words_of.NETWORK_STRIDE)


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
    relays = nodes * RANKS_PER_NODE + rank % RANKS_PER_NODE
    is_other = (nodes < NUM_NODES) & (nodes != own_node)
    tail_at, head_at = tl.load(constants + NETWORK_TAIL_AT), tl.load(constants + NETWORK_HEAD_AT)
    stride = tl.load(constants + NETWORK_STRIDE)
    there = tl.load(tables.heaps + relays, mask=is_other, other=0)
    inbox = tl.load(tables.inboxes + relays, mask=is_other, other=0)
    # Tells the compiler that the size is a multiple of 16.
    entry_bytes = area.entry_bytes.to(tl.int32) // 16 * 16
    ring_bytes = area.ring_rows.to(tl.int64) * entry_bytes
    if TO_RELAYS:
        first = tl.load(tables.net_rows + 2 * nodes, mask=is_other, other=0)
        ring = tl.load(tables.net_rows + 2 * nodes + 1, mask=is_other, other=0)
        rows = first + (channel * NUM_NODES + ring) * ring_bytes
        ours = there + tail_at + own_node * stride
        theirs = inbox + head_at + nodes * stride
    else:
        rows = here + (channel * NUM_NODES + nodes) * ring_bytes
        ours = there + head_at + own_node * stride
        theirs = inbox + tail_at + nodes * stride
    return Rings(
        ranks=relays,
        is_rank=is_other,
        rows=rows + area.rows_at,
        ours=(ours + 8 * channel).to(tl.pointer_type(tl.int64)),
        theirs=(theirs + 8 * channel).to(tl.pointer_type(tl.int64)),
        num_entries=area.ring_rows.to(tl.int32),
        entry_bytes=entry_bytes,
    )
