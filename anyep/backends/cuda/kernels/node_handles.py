"""Handles between nodes: their digests, and what is kept about the origin of rows.

Two ranks know the same facts about the rows that one of them sent to the other, about the tokens that one of
them relayed for the other, and about the rows that a relay gave to a rank of its node. The digest for a rank
is the sum of the hashes of all three, so one comparison of two words finds any difference between handles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.digests import mixed, mixed_channels
from anyep.backends.cuda.kernels.groups import NodeHandle, Tables
from anyep.backends.cuda.kernels.pointers import int32_at
from anyep.backends.cuda.kernels.relay_dispatch import ranks_wanted
from anyep.core import digests as numbers

RANK = tl.constexpr(words_of.RANK)
OUTCOME = tl.constexpr(words_of.OUTCOME)
NUM_ROWS = tl.constexpr(words_of.NUM_ROWS)
TARGET_WORDS = tl.constexpr(words_of.TARGET_WORDS)
TARGET_SOURCES = tl.constexpr(words_of.TARGET_SOURCES)
NODE_FACTOR = tl.constexpr(numbers.NODE_FACTOR)
OF_ROWS = tl.constexpr(1 << 16)
OF_TOKENS = tl.constexpr(2 << 16)
OF_RELAYS = tl.constexpr(3 << 16)
OF_CHANNELS = tl.constexpr(4 << 16)
OF_ALL_ROWS = tl.constexpr(5 << 16)
OF_ALL_TOKENS = tl.constexpr(6 << 16)


@triton.jit
def facts(first, second, kind, is_fact):
    """Hashes of two numbers, for a kind of facts and a node; 0 where there is no fact.

    Example:
        With m that mixes a word, 5 and 3 of kind 7 have the hash m((5 << 32) + 3 + 7 * NODE_FACTOR).
    """
    words = (first.to(tl.int64) << 32) | (second.to(tl.int64) & 0xFFFFFFFF)
    kinds = tl.zeros_like(words) + kind
    return tl.where(is_fact, mixed(words + kinds * NODE_FACTOR), 0)


@triton.jit
def before_in(prefix, index):
    """What comes before an index according to an inclusive prefix sum, 0 before the first.

    Example:
        [3, 5] give 0 and 3.
    """
    return tl.load(prefix + index - 1, mask=index > 0, other=0)


# Values that vary from call to call must not be compiled in.
@triton.jit(do_not_specialize=["num_tokens", "num_recv_rows", "num_relayed", "num_channels"])
def digest_node_handle(
    constants,
    handle: NodeHandle,
    digests,
    num_tokens,
    num_recv_rows,
    num_relayed,
    num_channels,
    NUM_NODES: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Fill the digests of a handle with any contents; it has room for so many received and relayed rows.

    Program (p, 0) takes what went to rank p, program (p, 1) what came from it, `TILE_ROWS` at a time.
    `CHANNEL_BLOCK` is a power of two that holds the channels. What a handle names beyond its parts does not
    count.

    Example:
        After a dispatch of one token from rank 0 to rank 1, which are different nodes: what rank 0 has for
        "to rank 1" is what rank 1 has for "from rank 0"; and for each rank and itself, both are equal.
    """
    peer, rank = tl.program_id(0), tl.load(constants + RANK).to(tl.int32)
    channels = tl.arange(0, CHANNEL_BLOCK)
    is_channel = channels < num_channels
    node, index = peer // RANKS_PER_NODE, peer % RANKS_PER_NODE
    is_relay = index == rank % RANKS_PER_NODE
    is_here = node == rank // RANKS_PER_NODE
    if tl.program_id(1) == 0:
        total = digest_of_sent(
            handle,
            peer,
            rank // RANKS_PER_NODE,
            is_relay,
            num_tokens,
            NUM_NODES,
            RANKS_PER_NODE,
            TILE_ROWS,
        )
        ends = handle.gbl_prefix + peer * num_channels + channels
        starts = tl.load(ends - 1, mask=is_channel & (channels > 0), other=0)
        num_rows_there = tl.load(handle.gbl_prefix + (peer + 1) * num_channels - 1)
        num_tokens_there = tl.load(handle.rdma_prefix + (node + 1) * num_channels - 1)
        tokens = tl.load(handle.rdma_prefix + node * num_channels + channels, mask=is_channel, other=0)
        if is_here:
            total += digest_of_given(handle, index, num_relayed, NUM_NODES, RANKS_PER_NODE, TILE_ROWS)
    else:
        first = before_in(handle.recv_gbl_sum, peer)
        end = tl.load(handle.recv_gbl_sum + peer)
        total = digest_of_rows(handle, first, end, num_recv_rows, TILE_ROWS)
        starts = tl.load(handle.recv_gbl_prefix + peer * num_channels + channels, mask=is_channel, other=0)
        num_rows_there = end - first
        num_tokens_there = tl.load(handle.recv_rdma_sum + node) - before_in(handle.recv_rdma_sum, node)
        tokens = tl.load(handle.recv_rdma_prefix + node * num_channels + channels, mask=is_channel, other=0)
        if is_relay:
            total += digest_of_relayed(handle, node, num_relayed, RANKS_PER_NODE, TILE_ROWS)
        if is_here:
            for source_node in range(NUM_NODES):
                source = source_node * RANKS_PER_NODE + index
                first = before_in(handle.recv_gbl_sum, source)
                end = tl.load(handle.recv_gbl_sum + source)
                total += digest_of_taken(source_node, first, end, num_recv_rows, TILE_ROWS)
    of_channels = mixed_channels(channels, starts, is_channel)
    of_channels += facts(channels, num_rows_there, OF_ALL_ROWS, channels == 0)
    of_channels += facts(channels, tokens, OF_CHANNELS, is_channel & is_relay)
    of_channels += facts(channels, num_tokens_there, OF_ALL_TOKENS, (channels == 0) & is_relay)
    digest = tl.sum(total, axis=0) + tl.sum(of_channels, axis=0)
    tl.store(digests + tl.program_id(1) * (NUM_NODES * RANKS_PER_NODE) + peer, digest)


@triton.jit
def digest_of_sent(
    handle,
    peer,
    own_node,
    is_relay,
    num_tokens,
    NUM_NODES: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Hashes of the rows to a rank, with the ranks of its node; of a relay also those of the tokens to it."""
    node, index = peer // RANKS_PER_NODE, peer % RANKS_PER_NODE
    total = tl.zeros((TILE_ROWS,), tl.int64)
    count = tl.full((), 0, tl.int32)
    for start in range(0, num_tokens, TILE_ROWS):
        tokens = start + tl.arange(0, TILE_ROWS)
        is_token = tokens < num_tokens
        masks = ranks_wanted(handle.in_rank, tokens, is_token, node, NUM_NODES, RANKS_PER_NODE)
        is_row = masks >> index & 1
        rows = count + tl.cumsum(is_row, axis=0) - is_row
        total += facts(rows, masks, OF_ROWS + own_node, is_row != 0)
        count += tl.sum(is_row, axis=0)
        if is_relay:
            place = handle.send_rdma_head + tokens * NUM_NODES + node
            sent = tl.load(place, mask=is_token, other=-1)
            total += facts(sent, masks, OF_TOKENS, sent >= 0)
    return total


@triton.jit
def digest_of_given(
    handle,
    index,
    num_relayed,
    NUM_NODES: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Hashes of the rows that this rank gave as a relay to a rank of its node, with their source nodes."""
    total = tl.zeros((TILE_ROWS,), tl.int64)
    for node in range(NUM_NODES):
        end = tl.minimum(tl.load(handle.recv_rdma_sum + node), num_relayed)
        for start in range(tl.maximum(before_in(handle.recv_rdma_sum, node), 0), end, TILE_ROWS):
            virtual = start + tl.arange(0, TILE_ROWS)
            place = handle.send_nvl_head + virtual.to(tl.int64) * RANKS_PER_NODE + index
            rows = tl.load(place, mask=virtual < end, other=-1)
            total += facts(rows, tl.zeros_like(rows), OF_RELAYS + node, rows >= 0)
    return total


@triton.jit
def digest_of_rows(handle, first, end, num_recv_rows, TILE_ROWS: tl.constexpr):
    """Hashes of the rows from a rank, with the ranks of this node that have them."""
    total = tl.zeros((TILE_ROWS,), tl.int64)
    for start in range(tl.maximum(first, 0), tl.minimum(end, num_recv_rows), TILE_ROWS):
        rows = start + tl.arange(0, TILE_ROWS)
        is_row = (rows < end) & (rows < num_recv_rows)
        meta = handle.recv_src_meta + 2 * rows.to(tl.int64)
        nodes = tl.load(meta, mask=is_row, other=0)
        masks = tl.load(meta + 1, mask=is_row, other=0)
        total += facts(rows - first, masks, OF_ROWS + nodes.to(tl.int64), is_row)
    return total


@triton.jit
def digest_of_relayed(handle, node, num_relayed, RANKS_PER_NODE: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Hashes of the tokens from a node that this rank relays, with the ranks that each goes to."""
    total = tl.zeros((TILE_ROWS,), tl.int64)
    first = tl.maximum(before_in(handle.recv_rdma_sum, node), 0)
    end = tl.minimum(tl.load(handle.recv_rdma_sum + node), num_relayed)
    for start in range(first, end, TILE_ROWS):
        virtual = start + tl.arange(0, TILE_ROWS)
        masks = tl.zeros_like(virtual)
        for index in tl.static_range(RANKS_PER_NODE):
            place = handle.send_nvl_head + virtual.to(tl.int64) * RANKS_PER_NODE + index
            rows = tl.load(place, mask=virtual < end, other=-1)
            masks += tl.where(rows >= 0, 1 << index, 0)
        total += facts(virtual - first, masks, OF_TOKENS, virtual < end)
    return total


@triton.jit
def digest_of_taken(node, first, end, num_recv_rows, TILE_ROWS: tl.constexpr):
    """Hashes of the rows that came from a node through one relay."""
    total = tl.zeros((TILE_ROWS,), tl.int64)
    for start in range(tl.maximum(first, 0), tl.minimum(end, num_recv_rows), TILE_ROWS):
        rows = start + tl.arange(0, TILE_ROWS)
        is_row = (rows < end) & (rows < num_recv_rows)
        total += facts(rows, tl.zeros_like(rows), OF_RELAYS + node, is_row)
    return total


@triton.jit(do_not_specialize=["num_result_rows", "num_heads", "num_topk"])
def unpack_meta(
    tables: Tables,
    handle: NodeHandle,
    ids,
    num_result_rows,
    num_heads,
    num_topk,
    NUM_NODES: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    PAD: tl.constexpr,
    PAD_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the origins of the rows out of this rank's window, for a handle that outlives it.

    Programs take blocks of `BLOCK` words. With PAD, the origins of rows that did not arrive become 0, and
    the rows of `send_nvl_head` (`num_heads` in all) that belong to no token -1; with PAD_IDS also the top-k
    ids of rows that did not arrive.

    Example:
        With 1 row received where 2 were allowed for, 1 token relayed, and ids [[3], [?]]: the ids become
        [[3], [-1]], and the second row of `send_nvl_head` -1.
    """
    state = tables.state
    # In a call that went wrong nothing has arrived: a reader of its ids finds no expert in them.
    is_good = tl.load(state + OUTCOME) == 0
    num_rows = tl.where(is_good, tl.load(state + NUM_ROWS), 0)
    rank = tl.load(tables.constants + RANK)
    sources = tl.load(tables.targets + TARGET_WORDS * rank + TARGET_SOURCES)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    num_words = 2 * num_result_rows.to(tl.int64)
    for start in range(begin, num_words, step):
        words = start + tl.arange(0, BLOCK)
        is_there = (words < 2 * num_rows) & (words < num_words) & (sources != 0)
        found = tl.load(int32_at(sources) + words, mask=is_there, other=0, volatile=True)
        is_kept = is_there
        if PAD:
            is_kept = words < num_words
        tl.store(handle.recv_src_meta + words, found, mask=is_kept)
    if PAD:
        num_used = tl.load(handle.recv_rdma_sum + NUM_NODES - 1).to(tl.int64)
        num_used = tl.where(is_good, num_used, 0) * RANKS_PER_NODE
        num_all = num_heads.to(tl.int64) * RANKS_PER_NODE
        for start in range(begin, num_all, step):
            words = start + tl.arange(0, BLOCK)
            is_pad = (words >= num_used) & (words < num_all)
            tl.store(handle.send_nvl_head + words, tl.full((BLOCK,), -1, tl.int32), mask=is_pad)
    if PAD_IDS:
        num_ids = num_result_rows.to(tl.int64) * num_topk
        for start in range(begin, num_ids, step):
            words = start + tl.arange(0, BLOCK)
            is_pad = (words >= num_rows * num_topk) & (words < num_ids)
            tl.store(ids + words, tl.full((BLOCK,), -1, tl.int64), mask=is_pad)
