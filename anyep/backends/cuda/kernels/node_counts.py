"""Counts between nodes: how many tokens go to each node, and what a relay must know before rows arrive.

A rank's tokens for a node are numbered by token. Its relay there gets, besides the notify messages, how many
rows each channel has for each rank of its node, and how many tokens; so it knows the place of every row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.counting import wrong_word
from anyep.backends.cuda.kernels.groups import NodeHandle, Relayed, Tables
from anyep.backends.cuda.kernels.node_rings import relay_on
from anyep.backends.cuda.kernels.notify import has_given_up
from anyep.backends.cuda.kernels.pointers import int32_at, words_at
from anyep.backends.cuda.kernels.relay_dispatch import ranks_wanted

RANK = tl.constexpr(words_of.RANK)
OWN_HEAP = tl.constexpr(words_of.OWN_HEAP)
NUMBER_AT = tl.constexpr(words_of.NUMBER_AT)
COUNTS_AT = tl.constexpr(words_of.NETWORK_COUNTS_AT)
COUNTS_STRIDE = tl.constexpr(words_of.NETWORK_COUNTS_STRIDE)
COUNTS_SET_STRIDE = tl.constexpr(words_of.NETWORK_COUNTS_SET_STRIDE)
OUTCOME = tl.constexpr(words_of.OUTCOME)
NUMBER = tl.constexpr(words_of.NUMBER)
IS_WRONG = tl.constexpr(words_of.IS_WRONG)
WRONG_NODE_COUNT = tl.constexpr(words_of.WRONG_NODE_COUNT)


@triton.jit(do_not_specialize=["num_tokens"])
def count_nodes(
    in_rank,
    tokens_per_node,
    num_tokens,
    NUM_NODES: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Count the tokens that go to each node, each once. One program per node looks at all tokens.

    Example:
        With in_rank [[1, 1, 0, 0], [0, 1, 1, 0]] and 2 ranks per node: tokens_per_node [2, 1].
    """
    node = tl.program_id(0)
    count = 0
    for start in range(0, num_tokens, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        masks = ranks_wanted(in_rank, tokens, tokens < num_tokens, node, NUM_NODES, RANKS_PER_NODE)
        count += tl.sum((masks != 0).to(tl.int32), axis=0)
    tl.store(tokens_per_node + node, count)


# Values that vary from call to call must not be compiled in.
@triton.jit(do_not_specialize=["num_tokens", "num_channels", "tokens_per_channel"])
def place_in_nodes(
    in_rank,
    tokens_per_node,
    numbers,
    channel_counts,
    handle_in_rank,
    state,
    num_tokens,
    num_channels,
    tokens_per_channel,
    NUM_NODES: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    IS_CHECKED: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Number the tokens that go to each node, count them by channel, and copy the mask for the handle.

    One program per node and channel, a contiguous range of `tokens_per_channel` tokens. With IS_CHECKED a
    word of `state` says whether tokens_per_node is wrong.

    Example:
        With in_rank [[1, 0], [1, 1], [0, 1]], nodes of 1 rank, and 2 channels of 2 tokens: numbers [[0, -1],
        [1, 0], [-1, 1]] and channel_counts [[2, 0], [1, 1]] (node, channel). Where tokens_per_node is not [2,
        2], a word of `state` says so.
    """
    node, channel = tl.program_id(0), tl.program_id(1)
    first = tl.minimum(channel * tokens_per_channel, num_tokens)
    end = tl.minimum(first + tokens_per_channel, num_tokens)
    # Counted again in each channel: waiting for the programs of earlier channels would take longer.
    earlier = tl.zeros((TILE_TOKENS,), tl.int32)
    for start in range(0, first, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        masks = ranks_wanted(in_rank, tokens, tokens < first, node, NUM_NODES, RANKS_PER_NODE)
        earlier += (masks != 0).to(tl.int32)
    before = tl.sum(earlier, axis=0)
    counted = 0
    for start in range(first, end, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        is_token = tokens < end
        masks = ranks_wanted(in_rank, tokens, is_token, node, NUM_NODES, RANKS_PER_NODE)
        here = (masks != 0).to(tl.int32)
        number = before + counted + tl.cumsum(here, axis=0) - here
        tl.store(numbers + tokens * NUM_NODES + node, tl.where(here > 0, number, -1), mask=is_token)
        counted += tl.sum(here, axis=0)
        for index in tl.static_range(RANKS_PER_NODE):
            at = tokens * (NUM_NODES * RANKS_PER_NODE) + node * RANKS_PER_NODE + index
            tl.store(handle_in_rank + at, (masks >> index & 1).to(tl.int8), mask=is_token)
    tl.store(channel_counts + node * num_channels + channel, counted)
    if IS_CHECKED:  # noqa: SIM102 - a condition of compile time, and one of run time
        if channel == num_channels - 1:
            is_wrong = tl.load(tokens_per_node + node) != before + counted
            problem = wrong_word(WRONG_NODE_COUNT, node.to(tl.int64))
            tl.atomic_max(state + IS_WRONG, problem, mask=is_wrong, sem="relaxed")


@triton.jit(do_not_specialize=["num_channels"])
def post_node_counts(
    tables: Tables,
    by_channel,
    by_node,
    num_channels,
    NUM_NODES: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tell each relay how many rows every channel has for each rank of its node, and how many tokens.

    One program per node, before the notify message of the call: that message says that the counts are there.
    A rank that has given up writes nothing.

    Example:
        On rank 0 of 2 nodes of 1 rank, with by_channel [[1, 2], [3, 0]] (rank, channel), by_node [[1, 2], [3,
        0]] (node, channel) and the call number 4, rank 1 finds 3, 0, 3, 0 where the counts of node 0 for call
        5 lie.
    """
    constants = tables.constants
    node, rank = tl.program_id(0), tl.load(constants + RANK).to(tl.int32)
    number = tl.load(words_at(tl.load(constants + OWN_HEAP) + tl.load(constants + NUMBER_AT))) + 1
    is_out = has_given_up(constants)
    there = tl.load(tables.heaps + relay_on(node, rank, RANKS_PER_NODE))
    there += counts_at(constants, number, rank // RANKS_PER_NODE)
    num_rows = RANKS_PER_NODE * num_channels
    for start in range(0, num_rows, BLOCK):
        places = start + tl.arange(0, BLOCK)
        counts = tl.load(by_channel + node * num_rows + places, mask=places < num_rows, other=0)
        tl.store(int32_at(there) + places, counts, mask=(places < num_rows) & ~is_out)
    for start in range(0, num_channels, BLOCK):
        places = start + tl.arange(0, BLOCK)
        counts = tl.load(by_node + node * num_channels + places, mask=places < num_channels, other=0)
        tl.store(int32_at(there) + num_rows + places, counts, mask=(places < num_channels) & ~is_out)


@triton.jit
def counts_at(constants, number, node):
    """Where in a heap the counts from a node lie for a call; two sets alternate.

    Example:
        With counts at 1000, 64 bytes for each node and 256 for each set, those of node 1 for call 5 lie at
        1320.
    """
    at = tl.load(constants + COUNTS_AT) + number % 2 * tl.load(constants + COUNTS_SET_STRIDE)
    return at + node * tl.load(constants + COUNTS_STRIDE)


@triton.jit(do_not_specialize=["num_channels"])
def read_node_counts(
    tables: Tables,
    handle: NodeHandle,
    relayed: Relayed,
    rank_prefix,
    num_channels,
    NUM_NODES: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    """Turn the counts for this relay into the prefix sums of a handle, and into the lanes of its channels.

    One program, after the notify messages; `rank_prefix` has their prefix sums of rows, by source and
    receiver. The counts in the handle's `rdma_prefix` become inclusive prefix sums. `CHANNEL_BLOCK` is a
    power of two that holds the channels. Nothing is done if the outcome so far is not 0.

    Example:
        On rank 1 of 2 nodes of 1 rank, with 2 channels, the counts [3, 1, 3, 1] from node 0 and [2, 4, 2, 4]
        from node 1, and rank_prefix [[0, 4], [1, 10]]: recv_rdma_prefix [[3, 4], [2, 6]], recv_rdma_sum [4,
        10], recv_gbl_sum [4, 10], expected [[3, 1], [2, 4]], first_virtual [[0, 4], [3, 6]] (channel, node)
        and next_row [[0, 4], [3, 6]].
    """
    constants, state = tables.constants, tables.state
    rank = tl.load(constants + RANK).to(tl.int32)
    number = tl.load(state + NUMBER)
    channels = tl.arange(0, CHANNEL_BLOCK)
    is_channel = channels < num_channels
    first_rank = rank // RANKS_PER_NODE * RANKS_PER_NODE
    num_ranks = NUM_NODES * RANKS_PER_NODE
    if tl.load(state + OUTCOME) == 0:
        total = tl.full((), 0, tl.int32)
        for node in range(NUM_NODES):
            here = int32_at(tl.load(constants + OWN_HEAP) + counts_at(constants, number, node))
            at = here + RANKS_PER_NODE * num_channels + channels
            tokens = tl.load(at, mask=is_channel, other=0, volatile=True)
            until = tl.cumsum(tokens, axis=0)
            lane = node * num_channels + channels
            tl.store(handle.recv_rdma_prefix + lane, until, mask=is_channel)
            tl.store(relayed.expected + lane, tokens, mask=is_channel)
            first = (total + until - tokens).to(tl.int64)
            tl.store(relayed.first_virtual + channels * NUM_NODES + node, first, mask=is_channel)
            total += tl.sum(tokens, axis=0)
            tl.store(handle.recv_rdma_sum + node, total)
            sent = tl.load(handle.rdma_prefix + lane, mask=is_channel, other=0)
            tl.store(handle.rdma_prefix + lane, tl.cumsum(sent, axis=0), mask=is_channel)
            source = relay_on(node, rank, RANKS_PER_NODE)
            for index in range(RANKS_PER_NODE):
                rows = tl.load(
                    here + index * num_channels + channels, mask=is_channel, other=0, volatile=True
                )
                earlier = rank_prefix + (source - 1) * num_ranks + first_rank + index
                first_row = tl.load(earlier, mask=source > 0, other=0) + tl.cumsum(rows, axis=0) - rows
                to = relayed.next_row + (channels * NUM_NODES + node) * RANKS_PER_NODE + index
                tl.store(to, first_row.to(tl.int64), mask=is_channel)
        for source in range(num_ranks):
            tl.store(handle.recv_gbl_sum + source, tl.load(rank_prefix + source * num_ranks + rank))


@triton.jit(do_not_specialize=["num_channels"])
def plan_lanes(
    state,
    handle: NodeHandle,
    relayed: Relayed,
    num_channels,
    NUM_NODES: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    """Find the lanes of a handle: how many tokens this rank relays by node and channel, and their firsts.

    One program. `CHANNEL_BLOCK` is a power of two that holds the channels. Nothing is done if the outcome so
    far is not 0: the parts of the handle may contradict each other.

    Example:
        With recv_rdma_prefix [[3, 4], [2, 6]] (node, channel) and recv_rdma_sum [4, 10]: expected [[3, 1],
        [2, 4]] and first_virtual [[0, 4], [3, 6]] (channel, node).
    """
    channels = tl.arange(0, CHANNEL_BLOCK)
    is_channel = channels < num_channels
    if tl.load(state + OUTCOME) == 0:
        begin = tl.full((), 0, tl.int32)
        for node in range(NUM_NODES):
            lane = node * num_channels + channels
            until = tl.load(handle.recv_rdma_prefix + lane, mask=is_channel, other=0)
            before = tl.load(handle.recv_rdma_prefix + lane - 1, mask=is_channel & (channels > 0), other=0)
            tl.store(relayed.expected + lane, until - before, mask=is_channel)
            first = (begin + before).to(tl.int64)
            tl.store(relayed.first_virtual + channels * NUM_NODES + node, first, mask=is_channel)
            begin = tl.load(handle.recv_rdma_sum + node)
