"""A dispatch between nodes: a token crosses once per node, to its relay there, which writes it to windows.

Even programs send this rank's tokens into the rings to its relays on other nodes. Odd programs are relays:
they write this rank's own tokens, and whatever has come from other nodes, to the windows of the ranks of this
node. A relay never waits for a single node and always has room in the windows, so the rings always drain, and
senders may wait for all nodes at once. The channels are those of `rings`, and so are waits and their ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.atomics import nanoseconds
from anyep.backends.cuda.kernels.beside import (
    carried_by_tokens,
    carried_in_entries,
    carried_to,
    store_in_entries,
    store_in_results,
)
from anyep.backends.cuda.kernels.groups import Beside, NodeTokens, Payload, Relayed, RingArea, Scales, Tables
from anyep.backends.cuda.kernels.links import advance_heads, advance_tails
from anyep.backends.cuda.kernels.node_rings import lanes_of_nodes, rank_beside, relay_on, rings_of_nodes
from anyep.backends.cuda.kernels.pointers import int32_at
from anyep.backends.cuda.kernels.rings import (
    TARGET_WORDS,
    USES_RINGS,
    WAITED_FOR,
    any_of,
    copy_rows,
    entries_at,
    give_up,
    is_good,
    keep_waiting,
    next_channel,
    num_ready,
    num_tokens_of,
    rows_of_tile,
    value_of,
    wait_for_counters,
    waiting_of,
)
from anyep.backends.cuda.kernels.windows import (
    TARGET_IDS,
    TARGET_SCALES,
    TARGET_SOURCES,
    TARGET_WEIGHTS,
    is_below,
    num_rows_there,
    refuse_rows_of,
)

NETWORK_TAIL_AT = tl.constexpr(words_of.NETWORK_TAIL_AT)


# Values that vary from call to call must not be compiled in.
@triton.jit(do_not_specialize=["area", "beside", "num_tokens", "experts_per_rank"])
def dispatch_between_nodes(
    payload: Payload,
    scales: Scales,
    tokens_of: NodeTokens,
    relayed: Relayed,
    tables: Tables,
    area: RingArea,
    beside: Beside,
    num_tokens,
    row_words,
    experts_per_rank,
    IS_NEW: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Send this rank's tokens to the relays of other nodes; relay tokens to the windows of this node.

    `targets[r]` holds the addresses of rank r's x, source meta (node, and the ranks there as bits), ids,
    weights and scales, and the number of rows that it has room for. If `IS_NEW` is set, the mask of a row
    says to which ranks it goes, its place is the next one of its lane, and `send_nvl_head` is filled; else
    `send_nvl_head` says both. A row for which there is no room is left out: BAD_ROWS is then 5 (bad handle) +
    16 * the rank. The kernel does nothing if the outcome so far, the first word of the call's state, is not
    0, or if rows go through rings within the node.

    x is read as words of 4 bytes; ids travel as int32. `SCALE_BLOCK` and `TOPK_BLOCK` are powers of two that
    hold a token's scales and choices; 0 where there are none.

    Example:
    With 2 nodes of 1 rank, one channel, counters at 2, rings of 3 entries, and a token of rank 0 that goes to
    both: rank 0 writes it to row 0 of its own window with meta (0, 1), and into entry 2 of its ring at rank
    1, whose tail becomes 3; rank 1 writes it to row 0 of its window, and the head at rank 0 becomes 3.
    """
    channel = tl.program_id(0) // 2
    num_channels = area.num_channels.to(tl.int32)
    per_channel = num_tokens_of(num_channels, num_tokens)
    waiting = waiting_of(tables)
    state = tables.state
    # Tells the compiler that a row is a multiple of 4 words.
    row_words = row_words // 4 * 4
    if is_good(state) & (tl.load(state + USES_RINGS) == 0):
        tl.store(state + WAITED_FOR, NETWORK_TAIL_AT)
        while channel < num_channels:
            first_token = channel * per_channel
            end_token = tl.minimum(first_token + per_channel, num_tokens)
            if tl.program_id(0) % 2 == 0:
                send_to_nodes(
                    payload,
                    scales,
                    tokens_of,
                    tables,
                    rings_of_nodes(tables, area, channel, True, NUM_NODES, NODE_BLOCK, RANKS_PER_NODE),
                    waiting,
                    beside,
                    first_token,
                    end_token,
                    row_words,
                    NUM_NODES,
                    NODE_BLOCK,
                    RANKS_PER_NODE,
                    SCALE_BLOCK,
                    TOPK_BLOCK,
                    TILE_TOKENS,
                    TILE_WORDS,
                    STAGES,
                )
            else:
                relay_own(
                    payload,
                    scales,
                    tokens_of,
                    relayed,
                    tables,
                    waiting,
                    beside,
                    channel,
                    first_token,
                    end_token,
                    row_words,
                    experts_per_rank,
                    IS_NEW,
                    NUM_NODES,
                    RANKS_PER_NODE,
                    SCALE_BLOCK,
                    TOPK_BLOCK,
                    TILE_TOKENS,
                    TILE_WORDS,
                    STAGES,
                )
                relay_arrived(
                    relayed,
                    tables,
                    rings_of_nodes(tables, area, channel, False, NUM_NODES, NODE_BLOCK, RANKS_PER_NODE),
                    waiting,
                    beside,
                    channel,
                    num_channels,
                    row_words,
                    experts_per_rank,
                    IS_NEW,
                    NUM_NODES,
                    NODE_BLOCK,
                    RANKS_PER_NODE,
                    SCALE_BLOCK,
                    TOPK_BLOCK,
                    TILE_TOKENS,
                    TILE_WORDS,
                    STAGES,
                )
            channel = next_channel(channel, num_channels, state)


@triton.jit
def ranks_wanted(in_rank, tokens, is_token, node, NUM_NODES: tl.constexpr, RANKS_PER_NODE: tl.constexpr):
    """The ranks of a node that tokens go to, as bits.

    Example:
    A token that goes to ranks 4 and 6, of 4 ranks per node, has 5 on node 1.
    """
    masks = tl.zeros_like(tokens).to(tl.int32)
    for index in tl.static_range(RANKS_PER_NODE):
        at = in_rank + tokens * (NUM_NODES * RANKS_PER_NODE) + node * RANKS_PER_NODE + index
        is_wanted = tl.load(at, mask=is_token, other=0) != 0
        masks += tl.where(is_wanted, 1 << index, 0)
    return masks


@triton.jit
def send_to_nodes(
    payload,
    scales,
    tokens_of,
    tables,
    rings,
    waiting,
    beside,
    token,
    end_token,
    row_words,
    NUM_NODES: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Pack the tokens of a channel into the rings to other nodes, tile by tile."""
    nodes = tl.arange(0, NODE_BLOCK)
    own_node = waiting.rank // RANKS_PER_NODE
    sent = tl.load(rings.ours, mask=rings.is_rank, other=0, volatile=True)
    taken = tl.zeros_like(sent)
    heads = tokens_of.send_rdma_head
    while token < end_token:
        tokens = (token + tl.arange(0, TILE_TOKENS)).to(tl.int64)
        is_token = tokens < end_token
        # Small loads are issued first: they complete while the program waits for room.
        carried = carried_by_tokens(payload, scales, beside, tokens, is_token, SCALE_BLOCK, TOPK_BLOCK)
        counts, first_numbers = rows_of_tile(heads, tokens, is_token, rings.is_rank, nodes, NUM_NODES)
        expected = tl.where(counts > 0, sent + counts - rings.num_entries, 0)
        taken = wait_for_counters(rings.theirs, taken, expected, waiting)
        if any_of(taken < expected):
            give_up(taken < expected, rings, waiting)
            token = end_token
        else:
            for node in range(NUM_NODES):
                if value_of(counts, nodes, node) > 0:
                    numbers = tl.load(heads + tokens * NUM_NODES + node, mask=is_token, other=-1)
                    is_sent = numbers >= 0
                    relay = relay_on(node, waiting.rank, RANKS_PER_NODE)
                    entry = entries_at(rings, relay, sent, numbers - value_of(first_numbers, nodes, node))
                    entry = tl.where(is_sent, entry, 0)
                    masks = ranks_wanted(tokens_of.in_rank, tokens, is_sent, node, NUM_NODES, RANKS_PER_NODE)
                    meta = int32_at(entry + beside.meta_at)
                    tl.store(meta, own_node + tl.zeros_like(masks), mask=is_sent)
                    tl.store(meta + 1, masks, mask=is_sent)
                    store_in_entries(carried, entry, is_sent, beside, SCALE_BLOCK, TOPK_BLOCK)
                    source = payload.x.to(tl.int64) + tokens * (4 * row_words)
                    copy_rows(source, entry, is_sent, row_words, TILE_WORDS, STAGES)
            sent += counts
            advance_tails(tables, rings.ours, sent, nodes, counts > 0)
            token += TILE_TOKENS


@triton.jit
def place_rows(
    source,
    is_row,
    node,
    masks,
    carried,
    virtual,
    next_row,
    relayed,
    tables,
    waiting,
    beside,
    row_words,
    experts_per_rank,
    IS_NEW: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write rows that came from a node to the windows of this node's ranks.

    In a new dispatch, `next_row` points to the next row of the lane at each rank, and is advanced.

    Example:
    With next_row [7, 9] in a new dispatch, and 2 rows with masks 3 and 2: they are rows 7 and 9, and row 10
    at rank 1; next_row becomes [8, 11], and the heads are [[7, 9], [-1, 10]].
    """
    for index in range(RANKS_PER_NODE):
        rank = rank_beside(waiting.rank, index, RANKS_PER_NODE)
        heads = relayed.send_nvl_head + virtual * RANKS_PER_NODE + index
        if IS_NEW:
            is_wanted = is_row & ((masks >> index & 1) != 0)
            first = tl.load(next_row + index)
            # All warps have read it before one of them stores its successor.
            tl.debug_barrier()
            rows = tl.where(is_wanted, first + tl.cumsum(is_wanted.to(tl.int32), axis=0) - 1, -1)
            tl.store(next_row + index, first + tl.sum(is_wanted.to(tl.int64), axis=0))
            # And it is stored before one of them reads it for the next tile.
            tl.debug_barrier()
            tl.store(heads, rows.to(tl.int32), mask=is_row)
        else:
            rows = tl.load(heads, mask=is_row, other=-1)
        rows = rows.to(tl.int32)
        limit = num_rows_there(tables.targets, rank)
        is_sent = is_below(rows, limit)
        refuse_rows_of(tables.state, rank, any_of((rows >= 0) & ~is_sent))
        if any_of(is_sent):
            places = rows.to(tl.int64)
            target = tables.targets + TARGET_WORDS * rank
            copy_rows(
                source, tl.load(target) + places * (4 * row_words), is_sent, row_words, TILE_WORDS, STAGES
            )
            meta = int32_at(tl.load(target + TARGET_SOURCES)) + 2 * places
            tl.store(meta, node + tl.zeros_like(masks), mask=is_sent)
            tl.store(meta + 1, masks, mask=is_sent)
            store_in_results(
                carried_to(carried, rank, experts_per_rank),
                places,
                is_sent,
                tl.load(target + TARGET_IDS),
                tl.load(target + TARGET_WEIGHTS),
                tl.load(target + TARGET_SCALES),
                beside,
                SCALE_BLOCK,
                TOPK_BLOCK,
            )


@triton.jit
def relay_own(
    payload,
    scales,
    tokens_of,
    relayed,
    tables,
    waiting,
    beside,
    channel,
    token,
    end_token,
    row_words,
    experts_per_rank,
    IS_NEW: tl.constexpr,
    NUM_NODES: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write this rank's own tokens of a channel to the windows of its node."""
    own_node = waiting.rank // RANKS_PER_NODE
    # `send_rdma_head` numbers the tokens of all channels.
    first_virtual = tl.load(relayed.first_virtual + own_node)
    next_row = relayed.next_row + (channel * NUM_NODES + own_node) * RANKS_PER_NODE
    while token < end_token:
        tokens = (token + tl.arange(0, TILE_TOKENS)).to(tl.int64)
        is_token = tokens < end_token
        heads = tokens_of.send_rdma_head + tokens * NUM_NODES + own_node
        numbers = tl.load(heads, mask=is_token, other=-1)
        is_row = numbers >= 0
        carried = carried_by_tokens(payload, scales, beside, tokens, is_row, SCALE_BLOCK, TOPK_BLOCK)
        masks = ranks_wanted(tokens_of.in_rank, tokens, is_row, own_node, NUM_NODES, RANKS_PER_NODE)
        place_rows(
            payload.x.to(tl.int64) + tokens * (4 * row_words),
            is_row,
            own_node,
            masks,
            carried,
            first_virtual + numbers,
            next_row,
            relayed,
            tables,
            waiting,
            beside,
            row_words,
            experts_per_rank,
            IS_NEW,
            RANKS_PER_NODE,
            SCALE_BLOCK,
            TOPK_BLOCK,
            TILE_WORDS,
            STAGES,
        )
        token += TILE_TOKENS


@triton.jit
def relay_arrived(
    relayed,
    tables,
    rings,
    waiting,
    beside,
    channel,
    num_channels,
    row_words,
    experts_per_rank,
    IS_NEW: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the rows of a channel that come from other nodes to windows, in the order in which they come."""
    nodes = tl.arange(0, NODE_BLOCK)
    numbers = tl.arange(0, TILE_TOKENS)
    taken = tl.load(rings.ours, mask=rings.is_rank, other=0, volatile=True)
    left, virtuals = lanes_of_nodes(relayed, rings, channel, num_channels, NUM_NODES, NODE_BLOCK)
    deadline = nanoseconds() + waiting.timeout_ns
    is_over = tl.full((), False, tl.int1)
    is_open = left > 0
    while any_of(is_open):
        counts = num_ready(rings, taken, left, False, TILE_TOKENS)
        if any_of(counts > 0):
            for node in range(NUM_NODES):
                count = value_of(counts, nodes, node)
                if count > 0:
                    is_row = numbers < count
                    relay = relay_on(node, waiting.rank, RANKS_PER_NODE)
                    entry = tl.where(is_row, entries_at(rings, relay, taken, numbers), 0)
                    masks = tl.load(int32_at(entry + beside.meta_at) + 1, mask=is_row, other=0)
                    carried = carried_in_entries(entry, beside, is_row, SCALE_BLOCK, TOPK_BLOCK)
                    place_rows(
                        entry,
                        is_row,
                        node,
                        masks,
                        carried,
                        value_of(virtuals, nodes, node) + numbers,
                        relayed.next_row + (channel * NUM_NODES + node) * RANKS_PER_NODE,
                        relayed,
                        tables,
                        waiting,
                        beside,
                        row_words,
                        experts_per_rank,
                        IS_NEW,
                        RANKS_PER_NODE,
                        SCALE_BLOCK,
                        TOPK_BLOCK,
                        TILE_WORDS,
                        STAGES,
                    )
            virtuals += counts
            left -= counts
            taken += counts
            advance_heads(tables, rings.ours, taken, nodes, counts > 0)
            deadline = nanoseconds() + waiting.timeout_ns
            is_open = left > 0
        else:
            is_open, is_over = keep_waiting(is_open, is_over, deadline, rings, waiting)
