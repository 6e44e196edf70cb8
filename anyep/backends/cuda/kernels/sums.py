"""Combine: add up the rows of each token in float32, in rank order or in another one, and round once."""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.floats import load_rows, store_rows, sum_of_biases, values_at
from anyep.backends.cuda.kernels.groups import Biases, Sums, Tables
from anyep.backends.cuda.kernels.pointers import float32_at
from anyep.backends.cuda.kernels.windows import (
    TARGET_WEIGHTS,
    is_below,
    num_rows_there,
    refuse_rows_beyond,
    rows_at,
    rows_of_tokens,
)

TARGET_WORDS = tl.constexpr(words_of.TARGET_WORDS)
TARGET_ROWS = tl.constexpr(words_of.TARGET_ROWS)
OUTCOME = tl.constexpr(words_of.OUTCOME)
USES_RINGS = tl.constexpr(words_of.USES_RINGS)


# These vary from call to call: the kernel is not specialized for their values.
@triton.jit(do_not_specialize=["own_x", "own_rank", "num_tokens", "num_topk"])
def pull_and_sum(
    out: Sums,
    biases: Biases,
    send_head,
    tables: Tables,
    own_x: tl.int64,
    own_rank,
    num_tokens,
    hidden,
    num_topk,
    DTYPE: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    IN_HARDWARE: tl.constexpr = True,
    ORDERED: tl.constexpr = False,
):
    """Read the rows of each token where they lie at the peers, and add them up, ranks ascending.

    If ORDERED is set, the rows of each token are added in the order of the ranks in `out.order`.

    `targets[r]` holds the addresses of rank r's rows and of their top-k weights, and the number of the rows.
    This rank's own rows are at the address `own_x`. Sums start from the sum of the biases, or from the first
    one, or from +0.0. Top-k weights are summed likewise, per choice, without bias; TOPK_BLOCK is 0 if there
    are none. A row that rank r does not have is left out: BAD_ROWS in the state is then 5 (bad handle) +
    16 * r. The kernel does nothing if the outcome so far is not 0, or if some rows come through rings.

    Example:
    With send_head [[0, 2], [-1, 3]] the first row of out is row 0 of rank 0 plus row 2 of rank 1, and the
    second is row 3 of rank 1. With the order [[1, 0], [0, 1]] the first is row 2 of rank 1 plus row 0 of
    rank 0.
    """
    state, targets = tables.state, tables.targets
    is_mine = (tl.load(state + OUTCOME) == 0) & (tl.load(state + USES_RINGS) == 0)
    # Work is split into pieces of rows: no program still has a whole row to do when the others are done.
    num_pieces = tl.cdiv(hidden, TILE_VALUES)
    num_tiles = tl.where(is_mine, tl.cdiv(num_tokens, TILE_TOKENS) * num_pieces, 0)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        sum_tile(
            out,
            biases,
            send_head,
            targets,
            own_x,
            own_rank,
            tile,
            num_tokens,
            hidden,
            DTYPE,
            NUM_BIASES,
            NUM_RANKS,
            TILE_TOKENS,
            TILE_VALUES,
            IN_HARDWARE,
            ORDERED,
        )
    sum_weights(
        out,
        send_head,
        targets,
        state,
        tl.where(is_mine, num_tokens, 0),
        num_topk,
        NUM_RANKS,
        RANK_BLOCK,
        TOPK_BLOCK,
        CHUNK_TOKENS,
        ORDERED,
    )


@triton.jit
def ranks_at(order, tokens, is_token, index, NUM_RANKS: tl.constexpr):
    """The ranks whose rows of some tokens are added at place `index`.

    Example:
    With the order [[2, 0, 1], [0, 1, 2]], the ranks 2 and 0 come first.
    """
    ranks = tl.load(order + tokens * NUM_RANKS + index, mask=is_token, other=0)
    # Memory that is no order must not lead outside of the tables.
    return tl.minimum(tl.maximum(ranks, 0), NUM_RANKS - 1)


@triton.jit
def sum_tile(
    out,
    biases,
    send_head,
    targets,
    own_x,
    own_rank,
    tile,
    num_tokens,
    hidden,
    DTYPE: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    IN_HARDWARE: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Add up one piece of the rows of `TILE_TOKENS` tokens.

    Example:
    With 3 pieces per row, tile 4 is piece 1 of the second group of tokens.
    """
    num_pieces = tl.cdiv(hidden, TILE_VALUES)
    tokens = tile // num_pieces * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    is_token = tokens < num_tokens
    columns = tile % num_pieces * TILE_VALUES + tl.arange(0, TILE_VALUES)
    is_column = columns < hidden
    index = tokens.to(tl.int64)[:, None] * hidden + columns[None, :]
    sums = sum_of_biases(biases, index, is_token[:, None] & is_column[None, :], DTYPE, NUM_BIASES)
    for place in tl.static_range(NUM_RANKS):
        rank = ranks_at(out.order, tokens, is_token, place, NUM_RANKS) if ORDERED else place
        rows = tl.load(send_head + tokens * NUM_RANKS + rank, mask=is_token, other=-1)
        there = tl.load(targets + TARGET_WORDS * rank)
        window = values_at(tl.where(rank == own_rank, own_x, there), DTYPE)
        is_there = is_below(rows, num_rows_there(targets, rank))
        if ORDERED:
            # One per token.
            window = window[:, None]
        source = window + rows.to(tl.int64)[:, None] * hidden + columns[None, :]
        is_row = is_there[:, None] & is_column[None, :]
        sums += load_rows(source, is_row, DTYPE, NUM_BIASES == 0)
    # Computed after the loop: addresses that live through it would take registers that the rows need.
    target = out.x + tokens.to(tl.int64)[:, None] * hidden + columns[None, :]
    store_rows(target, sums, is_token[:, None] & is_column[None, :], DTYPE, IN_HARDWARE)


@triton.jit
def sum_weights(
    out,
    send_head,
    targets,
    state,
    num_tokens,
    num_topk,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Add up the tokens' top-k weights, if there are any, and check for rows that do not exist."""
    ranks = tl.arange(0, RANK_BLOCK)
    num_chunks = tl.cdiv(num_tokens, CHUNK_TOKENS)
    # Last programs first: they had fewer tiles.
    for chunk in range(tl.num_programs(0) - 1 - tl.program_id(0), num_chunks, tl.num_programs(0)):
        tokens = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
        is_token = tokens < num_tokens
        rows_of_all = rows_of_tokens(send_head, tokens, is_token, ranks, NUM_RANKS)
        refuse_rows_beyond(state, rows_of_all, rows_at(targets, ranks, NUM_RANKS), ranks)
        if TOPK_BLOCK:
            choices = tl.arange(0, TOPK_BLOCK)
            is_choice = (choices < num_topk)[None, :]
            weights = tl.zeros((CHUNK_TOKENS, TOPK_BLOCK), tl.float32)
            for place in tl.static_range(NUM_RANKS):
                rank = ranks_at(out.order, tokens, is_token, place, NUM_RANKS) if ORDERED else place
                rows = tl.load(send_head + tokens * NUM_RANKS + rank, mask=is_token, other=-1)
                theirs = float32_at(tl.load(targets + TARGET_WORDS * rank + TARGET_WEIGHTS))
                if ORDERED:
                    theirs = theirs[:, None]
                is_there = is_below(rows, num_rows_there(targets, rank))[:, None] & is_choice
                source = theirs + rows.to(tl.int64)[:, None] * num_topk + choices[None, :]
                weights += tl.load(source, mask=is_there, other=0.0)
            to = out.topk_weights + tokens.to(tl.int64)[:, None] * num_topk + choices[None, :]
            tl.store(to, weights, mask=is_token[:, None] & is_choice)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def copy_for_peers(
    x,
    window,
    rank_prefix,
    rank,
    num_rows,
    row_words,
    NUM_RANKS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Copy the rows of other ranks' tokens to the same places in a window.

    x is read as words of 4 bytes; programs take `TILE_WORDS` at a time.

    Example:
    On rank 1 of 2 with rank_prefix [[2, 1], [3, 4]] rows 1 to 3 are its own. Of 5 rows, the last of which is
    beyond the rows that were received, rows 0 and 4 are copied.
    """
    row_words = row_words // 4 * 4
    limit = num_rows.to(tl.int64)
    end = tl.minimum(tl.load(rank_prefix + rank * NUM_RANKS + rank).to(tl.int64), limit)
    before = rank_prefix + (rank - 1) * NUM_RANKS + rank
    first = tl.minimum(tl.load(before, mask=rank > 0, other=0).to(tl.int64), end)
    num_words = (limit - (end - first)) * row_words
    for start in range(
        tl.program_id(0).to(tl.int64) * TILE_WORDS, num_words, tl.num_programs(0) * TILE_WORDS
    ):
        words = start + tl.arange(0, TILE_WORDS)
        # This rank's own rows are skipped: the words after them lie that much further on.
        at = tl.where(words < first * row_words, words, words + (end - first) * row_words)
        at = tl.max_contiguous(tl.multiple_of(at, 4), 4)
        tl.store(window + at, tl.load(x + at, mask=words < num_words), mask=words < num_words)
