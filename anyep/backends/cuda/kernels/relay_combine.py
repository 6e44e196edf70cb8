"""A combine between nodes: the relay sums a token's rows on its node, and one row per node crosses back.

Even programs are relays: they put the sums of this node into the rings to the sources on other nodes, as
there is room, and never wait for a single node. Odd programs sum this rank's own tokens: the rows of its own
node, rounded as a relay's are, and what has come from other nodes. All rows are read from windows. The
channels are those of `rings`, and so are waits and their ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.atomics import nanoseconds
from anyep.backends.cuda.kernels.beside import choices_of
from anyep.backends.cuda.kernels.floats import (
    BF16,
    FP16,
    FP32,
    as_floats,
    bf16_of_float,
    fp16_of_float,
    load_rows,
    store_rows,
    sum_of_biases,
    values_at,
)
from anyep.backends.cuda.kernels.groups import Beside, Biases, NodeTokens, Relayed, RingArea, Sums, Tables
from anyep.backends.cuda.kernels.links import advance_heads, advance_tails
from anyep.backends.cuda.kernels.node_rings import lanes_of_nodes, rank_beside, relay_on, rings_of_nodes
from anyep.backends.cuda.kernels.pointers import float32_at
from anyep.backends.cuda.kernels.rings import (
    TARGET_WEIGHTS,
    TARGET_WORDS,
    USES_RINGS,
    WAITED_FOR,
    any_of,
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
from anyep.backends.cuda.kernels.windows import is_below, num_rows_there, refuse_rows_of

NETWORK_TAIL_AT = tl.constexpr(words_of.NETWORK_TAIL_AT)


# Values that vary from call to call must not be compiled in.
@triton.jit(do_not_specialize=["own_x", "area", "beside", "num_tokens"])
def combine_between_nodes(
    out: Sums,
    biases: Biases,
    tokens_of: NodeTokens,
    relayed: Relayed,
    tables: Tables,
    area: RingArea,
    beside: Beside,
    own_x: tl.int64,
    num_tokens,
    hidden,
    DTYPE: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    IN_HARDWARE: tl.constexpr = True,
):
    """Return the sums of this node to the sources on other nodes, and sum this rank's own tokens.

    `targets[r]` holds the address of rank r's rows, of their weights, and their number, for the ranks of this
    node; this rank's own rows are at the address `own_x`. A node's sum starts from +0.0, ranks ascending, and
    is rounded. A token's sum starts from the sum of the biases, or from the first one, or from +0.0, nodes
    ascending, and is rounded. Top-k weights are summed likewise, per choice, without bias. A row that a rank
    does not have is left out: BAD_ROWS is then 5 (bad handle) + 16 * the rank. The kernel does nothing if the
    outcome so far, the first word of the call's state, is not 0, or if rows go through rings within the node.

    Example:
    With 2 nodes of 1 rank, counters at 2, rings of 3 entries, and a token of rank 0 that went to both: rank 1
    puts 0 + its row into entry 2 of its ring at rank 0, whose tail becomes 3; rank 0 adds its own row and
    that entry, and the head at rank 1 becomes 3.
    """
    channel = tl.program_id(0) // 2
    num_channels = area.num_channels.to(tl.int32)
    per_channel = num_tokens_of(num_channels, num_tokens)
    waiting = waiting_of(tables)
    state = tables.state
    # Tells the compiler that rows begin at multiples of 16 bytes.
    hidden = hidden // 4 * 4 if DTYPE == FP32 else hidden // 8 * 8
    if is_good(state) & (tl.load(state + USES_RINGS) == 0):
        tl.store(state + WAITED_FOR, NETWORK_TAIL_AT)
        while channel < num_channels:
            if tl.program_id(0) % 2 == 0:
                return_sums(
                    relayed,
                    tables,
                    rings_of_nodes(tables, area, channel, True, NUM_NODES, NODE_BLOCK, RANKS_PER_NODE),
                    waiting,
                    beside,
                    own_x,
                    channel,
                    num_channels,
                    hidden,
                    DTYPE,
                    NUM_NODES,
                    NODE_BLOCK,
                    RANKS_PER_NODE,
                    TOPK_BLOCK,
                    TILE_TOKENS,
                    TILE_VALUES,
                    IN_HARDWARE,
                )
            else:
                first_token = channel * per_channel
                sum_own(
                    out,
                    biases,
                    tokens_of.send_rdma_head,
                    relayed,
                    tables,
                    rings_of_nodes(tables, area, channel, False, NUM_NODES, NODE_BLOCK, RANKS_PER_NODE),
                    waiting,
                    beside,
                    own_x,
                    first_token,
                    tl.minimum(first_token + per_channel, num_tokens),
                    hidden,
                    DTYPE,
                    NUM_BIASES,
                    NUM_NODES,
                    NODE_BLOCK,
                    RANKS_PER_NODE,
                    TOPK_BLOCK,
                    TILE_TOKENS,
                    TILE_VALUES,
                    IN_HARDWARE,
                )
            channel = next_channel(channel, num_channels, state)


@triton.jit
def rounded(sums, DTYPE: tl.constexpr, IN_HARDWARE: tl.constexpr):
    """Float32 values as they are after being stored as rows and loaded again.

    Example:
    As bf16, 257.0 becomes 256.0.
    """
    if DTYPE == BF16:
        sums = as_floats(bf16_of_float(sums, IN_HARDWARE), sums == sums, BF16, True)
    elif DTYPE == FP16:
        sums = as_floats(fp16_of_float(sums), sums == sums, FP16, True)
    return sums


@triton.jit
def rows_here(relayed, tables, virtual, is_row, index, waiting, RANKS_PER_NODE: tl.constexpr):
    """The rows of virtual tokens at a rank of this node, and which of them are there."""
    rank = rank_beside(waiting.rank, index, RANKS_PER_NODE)
    heads = relayed.send_nvl_head + virtual * RANKS_PER_NODE + index
    rows = tl.load(heads, mask=is_row, other=-1)
    return rows.to(tl.int64), is_below(rows, num_rows_there(tables.targets, rank))


@triton.jit
def sources_here(
    relayed,
    tables,
    virtual,
    is_row,
    own_x,
    waiting,
    row_bytes,
    RANKS_PER_NODE: tl.constexpr,
):
    """The addresses of virtual tokens' rows at each rank of this node, 0 where there is none.

    A rank that lacks a row is noted in BAD_ROWS.

    Example:
    With the heads [[4, -1], [-1, 0]], rows of 16 bytes, and the ranks' rows at 1024 and 2048: [1088, 0] at
    the first rank, and [0, 2048] at the second one.
    """
    sources = tl.tuple(())
    for index in tl.static_range(RANKS_PER_NODE):
        rank = rank_beside(waiting.rank, index, RANKS_PER_NODE)
        rows, is_there = rows_here(relayed, tables, virtual, is_row, index, waiting, RANKS_PER_NODE)
        refuse_rows_of(tables.state, rank, any_of((rows >= 0) & ~is_there))
        place = tl.load(tables.targets + TARGET_WORDS * rank)
        window = tl.where(rank == waiting.rank, own_x, place)
        sources += (tl.where(is_there, window + rows * row_bytes, 0),)
    return sources


@triton.jit
def sums_here(sources, columns, hidden, DTYPE: tl.constexpr, RANKS_PER_NODE: tl.constexpr):
    """A piece of the sums of rows on this node, in float32, ranks ascending.

    Example:
    With a row [1, 2] at the node's first rank, and [3, 4] at the second: [4, 6].
    """
    sums = tl.zeros((sources[0].shape[0], columns.shape[0]), tl.float32)
    for index in tl.static_range(RANKS_PER_NODE):
        values = values_at(sources[index], DTYPE)[:, None] + columns[None, :]
        is_there = (sources[index] != 0)[:, None] & (columns < hidden)[None, :]
        sums += load_rows(values, is_there, DTYPE, True)
    return sums


@triton.jit
def weights_here(
    relayed,
    tables,
    virtual,
    is_row,
    beside,
    waiting,
    RANKS_PER_NODE: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
):
    """The sums of virtual tokens' weights on this node, per choice."""
    sums = tl.zeros((virtual.shape[0], TOPK_BLOCK), tl.float32)
    for index in tl.static_range(RANKS_PER_NODE):
        rank = rank_beside(waiting.rank, index, RANKS_PER_NODE)
        rows, is_there = rows_here(relayed, tables, virtual, is_row, index, waiting, RANKS_PER_NODE)
        window = float32_at(tl.load(tables.targets + TARGET_WORDS * rank + TARGET_WEIGHTS))
        choices, is_choice = choices_of(is_there, beside, TOPK_BLOCK)
        source = window + rows[:, None] * beside.num_topk + choices[None, :]
        sums += tl.load(source, mask=is_choice, other=0.0)
    return sums


@triton.jit
def return_sums(
    relayed,
    tables,
    rings,
    waiting,
    beside,
    own_x,
    channel,
    num_channels,
    hidden,
    DTYPE: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    IN_HARDWARE: tl.constexpr,
):
    """Put the sums of a channel's virtual tokens into the rings to their sources, as these have room."""
    row_bytes = 4 * hidden if DTYPE == FP32 else 2 * hidden
    nodes = tl.arange(0, NODE_BLOCK)
    numbers = tl.arange(0, TILE_TOKENS)
    sent = tl.load(rings.ours, mask=rings.is_rank, other=0, volatile=True)
    left, virtuals = lanes_of_nodes(relayed, rings, channel, num_channels, NUM_NODES, NODE_BLOCK)
    deadline = nanoseconds() + waiting.timeout_ns
    is_over = tl.full((), False, tl.int1)
    is_open = left > 0
    while any_of(is_open):
        counts = num_ready(rings, sent, left, True, TILE_TOKENS)
        if any_of(counts > 0):
            for node in range(NUM_NODES):
                count = value_of(counts, nodes, node)
                if count > 0:
                    is_row = numbers < count
                    virtual = value_of(virtuals, nodes, node) + numbers
                    here = sources_here(
                        relayed, tables, virtual, is_row, own_x, waiting, row_bytes, RANKS_PER_NODE
                    )
                    relay = relay_on(node, waiting.rank, RANKS_PER_NODE)
                    entry = tl.where(is_row, entries_at(rings, relay, sent, numbers), 0)
                    for start in tl.range(0, hidden, TILE_VALUES, num_stages=1):
                        columns = start + tl.arange(0, TILE_VALUES)
                        sums = sums_here(here, columns, hidden, DTYPE, RANKS_PER_NODE)
                        to = values_at(entry, DTYPE)[:, None] + columns[None, :]
                        mask = is_row[:, None] & (columns < hidden)[None, :]
                        store_rows(to, sums, mask, DTYPE, IN_HARDWARE)
                    if TOPK_BLOCK:
                        weights = weights_here(
                            relayed, tables, virtual, is_row, beside, waiting, RANKS_PER_NODE, TOPK_BLOCK
                        )
                        choices, is_choice = choices_of(is_row, beside, TOPK_BLOCK)
                        to = float32_at(entry + beside.weights_at)[:, None] + choices[None, :]
                        tl.store(to, weights, mask=is_choice)
            virtuals += counts
            left -= counts
            sent += counts
            advance_tails(tables, rings.ours, sent, nodes, counts > 0)
            deadline = nanoseconds() + waiting.timeout_ns
            is_open = left > 0
        else:
            is_open, is_over = keep_waiting(is_open, is_over, deadline, rings, waiting)


@triton.jit
def sum_own(
    out,
    biases,
    heads,
    relayed,
    tables,
    rings,
    waiting,
    beside,
    own_x,
    token,
    end_token,
    hidden,
    DTYPE: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NODE_BLOCK: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    IN_HARDWARE: tl.constexpr,
):
    """Sum the rows of all nodes for this rank's own tokens of a channel, tile by tile."""
    row_bytes = 4 * hidden if DTYPE == FP32 else 2 * hidden
    nodes = tl.arange(0, NODE_BLOCK)
    choices = tl.arange(0, TOPK_BLOCK if TOPK_BLOCK else 1)
    own_node = waiting.rank // RANKS_PER_NODE
    first_virtual = tl.load(relayed.first_virtual + own_node)
    taken = tl.load(rings.ours, mask=rings.is_rank, other=0, volatile=True)
    arrived = tl.zeros_like(taken)
    while token < end_token:
        tokens = (token + tl.arange(0, TILE_TOKENS)).to(tl.int64)
        is_token = tokens < end_token
        counts, first_numbers = rows_of_tile(heads, tokens, is_token, rings.is_rank, nodes, NUM_NODES)
        expected = tl.where(counts > 0, taken + counts, 0)
        arrived = wait_for_counters(rings.theirs, arrived, expected, waiting)
        if any_of(arrived < expected):
            give_up(arrived < expected, rings, waiting)
            token = end_token
        else:
            own_numbers = tl.load(heads + tokens * NUM_NODES + own_node, mask=is_token, other=-1)
            is_own = own_numbers >= 0
            virtual = first_virtual + own_numbers
            here = sources_here(relayed, tables, virtual, is_own, own_x, waiting, row_bytes, RANKS_PER_NODE)
            sources = tl.tuple(())
            for node in tl.static_range(NUM_NODES):
                numbers = tl.load(heads + tokens * NUM_NODES + node, mask=is_token, other=-1)
                relay = relay_on(node, waiting.rank, RANKS_PER_NODE)
                entry = entries_at(rings, relay, taken, numbers - value_of(first_numbers, nodes, node))
                sources += (tl.where((numbers >= 0) & (node != own_node), entry, 0),)
            for start in tl.range(0, hidden, TILE_VALUES, num_stages=1):
                columns = start + tl.arange(0, TILE_VALUES)
                is_column = (columns < hidden)[None, :]
                is_value = is_token[:, None] & is_column
                index = tokens[:, None] * hidden + columns[None, :]
                own = sums_here(here, columns, hidden, DTYPE, RANKS_PER_NODE)
                own = rounded(own, DTYPE, IN_HARDWARE)
                sums = sum_of_biases(biases, index, is_value, DTYPE, NUM_BIASES)
                for node in tl.static_range(NUM_NODES):
                    values = values_at(sources[node], DTYPE)[:, None] + columns[None, :]
                    is_there = (sources[node] != 0)[:, None] & is_column
                    loaded = load_rows(values, is_there, DTYPE, NUM_BIASES == 0)
                    # A row that is not there is -0.0 in `loaded`, which changes no sum.
                    sums += tl.where(is_own[:, None] & (node == own_node), own, loaded)
                store_rows(out.x + index, sums, is_value, DTYPE, IN_HARDWARE)
            if TOPK_BLOCK:
                own = weights_here(
                    relayed, tables, virtual, is_own, beside, waiting, RANKS_PER_NODE, TOPK_BLOCK
                )
                sums = tl.zeros((TILE_TOKENS, TOPK_BLOCK), tl.float32)
                is_choice = (choices < beside.num_topk)[None, :]
                for node in tl.static_range(NUM_NODES):
                    source = float32_at(sources[node] + beside.weights_at)[:, None] + choices[None, :]
                    mask = (sources[node] != 0)[:, None] & is_choice
                    loaded = tl.load(source, mask=mask, other=0.0)
                    sums += tl.where(is_own[:, None] & (node == own_node), own, loaded)
                to = out.topk_weights + tokens[:, None] * beside.num_topk + choices[None, :]
                tl.store(to, sums, mask=is_token[:, None] & is_choice)
            taken += counts
            advance_heads(tables, rings.ours, taken, nodes, counts > 0)
            token += TILE_TOKENS
