"""What a handle of the elastic API says beside its routing: where received rows come from, where the choices
of tokens went, and in which order a combine adds."""

from __future__ import annotations

import triton
import triton.language as tl

NUM_COLUMNS = tl.constexpr(2)
"""Of the metadata, before those of choices."""


@triton.jit(do_not_specialize=["rank", "room", "num_topk", "most_tokens"])
def tell_origins(
    rank_prefix,
    sources,
    ids,
    received,
    metadata,
    kept_ids,
    rank,
    room,
    num_topk,
    most_tokens,
    NUM_RANKS: tl.constexpr,
    EXPANDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Say of each received row which token of which rank it is, and which choice was the last one for here.

    `received` becomes this rank's column of `rank_prefix`. A row of the metadata begins with the number of
    its token among those of all ranks, of which each has room for `most_tokens`, and with the number of the
    choice among those of one token of each rank. The rest, a column for each choice, is -1, unless EXPANDS is
    set: then others fill it. Rows past the received ones are -1. If EXPANDS is not set, the ids are copied to
    `kept_ids`.

    Example:
        For rank 1 of 2 with rank_prefix [[0, 1], [5, 2]], sources [3, 1, ?], ids [[0, -1], [1, 0], [-1, -1]]
        and 5 tokens at most: received [1, 2] and metadata [[3, 0, -1, -1], [6, 3, -1, -1], [-1, -1, -1, -1]].
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = rows < room
    source = tl.zeros((TILE_ROWS,), tl.int32)
    end = tl.full((), 0, tl.int32)
    for peer in range(NUM_RANKS):
        end = tl.load(rank_prefix + peer * NUM_RANKS + rank)
        source += (rows >= end).to(tl.int32)
        if tl.program_id(0) == 0:
            tl.store(received + peer, end)
    is_received = is_row & (rows < end)
    last = tl.full((TILE_ROWS,), -1, tl.int32)
    wide = rows.to(tl.int64)
    to = metadata + wide * (NUM_COLUMNS + num_topk)
    for choice in range(num_topk):
        chosen = tl.load(ids + wide * num_topk + choice, mask=is_row, other=-1)
        last = tl.where(chosen >= 0, choice, last)
        if not EXPANDS:
            tl.store(kept_ids + wide * num_topk + choice, chosen, mask=is_row)
            tl.store(to + NUM_COLUMNS + choice, tl.full((TILE_ROWS,), -1, tl.int32), mask=is_row)
    token = tl.load(sources + wide, mask=is_received, other=0)
    tl.store(to, tl.where(is_received, source * most_tokens + token, -1), mask=is_row)
    tl.store(to + 1, tl.where(is_received, source * num_topk + last, -1), mask=is_row)


@triton.jit(do_not_specialize=["num_tokens", "num_topk", "local_experts"])
def order_ranks(
    topk_idx,
    send_head,
    slots,
    order,
    num_tokens,
    num_topk,
    local_experts,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Put the ranks of each token into the order of its last choice on each; ranks without one come first.

    `slots` gets the row of each choice at its rank, -1 where there is none. Ids that are no experts are none.

    Example:
        With 2 experts on each of 3 ranks, the choices [5, 0, 4, -1] give the order [1, 0, 2]; with send_head
        [7, -1, 9] they are in the rows [9, 7, 9, -1].
    """
    tokens = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    is_token = tokens < num_tokens
    wide = tokens.to(tl.int64)
    ranks = tl.arange(0, RANK_BLOCK)
    last = tl.full((TILE_TOKENS, RANK_BLOCK), -1, tl.int32)
    for choice in range(num_topk):
        expert = tl.load(topk_idx + wide * num_topk + choice, mask=is_token, other=-1)
        is_expert = (expert >= 0) & (expert < NUM_RANKS * local_experts)
        owner = tl.where(is_expert, expert // local_experts, -1).to(tl.int32)
        last = tl.where(owner[:, None] == ranks[None, :], choice, last)
        row = tl.load(send_head + wide * NUM_RANKS + owner, mask=is_expert, other=-1)
        tl.store(slots + wide * num_topk + choice, row, mask=is_token)
    keys = last * RANK_BLOCK + ranks[None, :]
    place = tl.zeros((TILE_TOKENS, RANK_BLOCK), tl.int32)
    for rank in range(NUM_RANKS):
        key = tl.sum(tl.where(ranks[None, :] == rank, keys, 0), axis=1)
        place += (key[:, None] < keys).to(tl.int32)
    to = order + wide[:, None] * NUM_RANKS + place
    is_rank = is_token[:, None] & (ranks < NUM_RANKS)[None, :]
    tl.store(to, tl.broadcast_to(ranks[None, :], place.shape), mask=is_rank)
