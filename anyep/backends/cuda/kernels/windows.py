"""Dispatch by window: rows go straight to their final place in the receiver's memory."""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.beside import local_choices
from anyep.backends.cuda.kernels.digests import mixed_rows
from anyep.backends.cuda.kernels.groups import Payload, Scales, Tables
from anyep.backends.cuda.kernels.pointers import float32_at, int32_at, words_at
from anyep.core import outcomes

TARGET_WORDS = tl.constexpr(words_of.TARGET_WORDS)
TARGET_SOURCES = tl.constexpr(words_of.TARGET_SOURCES)
TARGET_IDS = tl.constexpr(words_of.TARGET_IDS)
TARGET_WEIGHTS = tl.constexpr(words_of.TARGET_WEIGHTS)
TARGET_SCALES = tl.constexpr(words_of.TARGET_SCALES)
TARGET_ROWS = tl.constexpr(words_of.TARGET_ROWS)
OUTCOME = tl.constexpr(words_of.OUTCOME)
BAD_ROWS = tl.constexpr(words_of.BAD_ROWS)
NUM_ROWS = tl.constexpr(words_of.NUM_ROWS)
USES_RINGS = tl.constexpr(words_of.USES_RINGS)
BAD_HANDLE = tl.constexpr(outcomes.BAD_HANDLE)
NUM_CODES = tl.constexpr(outcomes.NUM_CODES)


@triton.jit
def num_rows_there(targets, receiver):
    """The number of rows of a receiver's window; 0 where it has no window."""
    has_window = tl.load(targets + TARGET_WORDS * receiver) != 0
    return tl.where(has_window, tl.load(targets + TARGET_WORDS * receiver + TARGET_ROWS), 0).to(tl.int32)


@triton.jit
def rows_of_tokens(send_head, tokens, is_token, receivers, NUM_RECEIVERS: tl.constexpr):
    """Where the rows of some tokens lie at all receivers, -1 for no row: a part of send_head, unchanged."""
    index = tokens[:, None] * NUM_RECEIVERS + receivers[None, :]
    return tl.load(send_head + index, mask=is_token[:, None] & (receivers < NUM_RECEIVERS)[None, :], other=-1)


@triton.jit
def rows_at(targets, receivers, NUM_RECEIVERS: tl.constexpr):
    """The number of rows that each receiver has room for."""
    return tl.load(targets + TARGET_WORDS * receivers + TARGET_ROWS, mask=receivers < NUM_RECEIVERS, other=0)


@triton.jit
def refuse_rows_beyond(state, rows, limit, receivers):
    """Record in `state` that a receiver lacks a row: 5 (bad handle) + 16 * receiver; of several, any one.

    Example:
        With 2 rows at each receiver, the rows [[0, 2], [-1, 1]] are too many for receiver 1.
    """
    problem = receivers.to(tl.int64) * NUM_CODES + BAD_HANDLE
    # Each value by itself: finding the first one would require all threads to synchronize.
    bad_rows = state + BAD_ROWS + 0 * rows
    tl.store(bad_rows, tl.broadcast_to(problem[None, :], rows.shape), mask=rows >= limit[None, :])


@triton.jit
def refuse_rows_of(state, rank, is_refused):
    """Record in `state` that a rank lacks a row, if `is_refused`: 5 (bad handle) + 16 * rank.

    Not written to the outcome: programs decide by it whether to begin, and all of them must take part.
    """
    tl.store(state + BAD_ROWS, rank.to(tl.int64) * NUM_CODES + BAD_HANDLE, mask=is_refused)


@triton.jit
def is_below(rows, limit):
    """Whether 0 <= rows < limit, in one comparison.

    Example:
        Of [-1, 0, 3], only the 0 is below 3.
    """
    return rows.to(tl.uint32, bitcast=True) < limit.to(tl.uint32, bitcast=True)


# Values that vary from call to call must not be compiled in.
@triton.jit(do_not_specialize=["num_tokens", "num_topk", "experts_per_rank"])
def send_to_windows(
    payload: Payload,
    scales: Scales,
    send_head,
    tables: Tables,
    num_tokens,
    row_words,
    num_topk,
    experts_per_rank,
    NUM_RECEIVERS: tl.constexpr,
    RECEIVER_BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    ALL_OR_NONE: tl.constexpr,
):
    """Read each token's row once and write it to every receiver with a window.

    `targets[r]` holds the addresses of receiver r's x, source indices, top-k ids, top-k weights and scales,
    or zeros where r has no window, and the number of its rows. An expert id is written as the receiver's
    local id; where the expert is not on the receiver, -1 and weight 0 are written. Nothing is sent if the
    outcome so far is not 0, or if ALL_OR_NONE is set and some receiver has no window. A row that receiver r
    does not have is not written: BAD_ROWS in the state is then 5 (bad handle) + 16 * r.

    x is read as words of 4 bytes. A program takes tiles of `TILE_TOKENS` tokens, and a tile in pieces of
    `TILE_WORDS` columns: each thread then moves 16 bytes at a time. Source indices and top-k are sent in
    chunks of `CHUNK_TOKENS` tokens. The other blocks are powers of two that hold the receivers, a token's
    scales and its choices; 0 where there are none.

    Example:
        With send_head [[0, 2], [-1, 3]], row 0 of x goes to row 0 at receiver 0 and to row 2 at receiver 1;
        row 1 goes to row 3 at receiver 1. The source indices there are 0, 0 and 1.
    """
    state, targets = tables.state, tables.targets
    is_good = tl.load(state + OUTCOME) == 0
    if ALL_OR_NONE:
        is_good = is_good & (tl.load(state + USES_RINGS) == 0)
    # In pieces of rows: otherwise a program may still have a whole row left when the others are done.
    num_pieces = tl.cdiv(row_words, TILE_WORDS)
    num_tiles = tl.where(is_good, tl.cdiv(num_tokens, TILE_TOKENS) * num_pieces, 0)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tokens = tile // num_pieces * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
        is_token = tokens < num_tokens
        words = tile % num_pieces * TILE_WORDS + tl.arange(0, TILE_WORDS)
        is_word = words < row_words
        source = payload.x + tokens.to(tl.int64)[:, None] * row_words + words[None, :]
        values = tl.load(source, mask=is_token[:, None] & is_word[None, :])
        if SCALE_BLOCK:
            # Scales go with the first piece of their row: both are in flight at once.
            is_first = tile % num_pieces == 0
            columns = tl.arange(0, SCALE_BLOCK)
            is_scale = is_first & (columns < scales.count)
            at = tokens.to(tl.int64)[:, None] * scales.stride_token + columns[None, :] * scales.stride_scale
            carried = tl.load(scales.words + at, mask=is_token[:, None] & is_scale[None, :])
        for receiver in tl.static_range(NUM_RECEIVERS):
            rows = tl.load(send_head + tokens * NUM_RECEIVERS + receiver, mask=is_token, other=-1)
            place = tl.load(targets + TARGET_WORDS * receiver)
            # The compiler cannot know that a pointer loaded from a table is aligned; these pointers are.
            window = tl.multiple_of(place.to(tl.pointer_type(tl.int32)), 16)
            target = window + rows.to(tl.int64)[:, None] * row_words + words[None, :]
            is_sent = is_below(rows, num_rows_there(targets, receiver))
            tl.store(target, values, mask=is_sent[:, None] & is_word[None, :])
            if SCALE_BLOCK:  # noqa: SIM102 - a condition of compile time, and one of run time
                if is_first:
                    scales_there = int32_at(tl.load(targets + TARGET_WORDS * receiver + TARGET_SCALES))
                    to = rows.to(tl.int64)[:, None] * scales.count + columns[None, :]
                    tl.store(scales_there + to, carried, mask=is_sent[:, None] & is_scale[None, :])
    # The rest is little data, but each chunk takes time. Last programs first: they had fewer tiles.
    num_chunks = tl.where(is_good, tl.cdiv(num_tokens, CHUNK_TOKENS), 0)
    for chunk in range(tl.num_programs(0) - 1 - tl.program_id(0), num_chunks, tl.num_programs(0)):
        tokens = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
        is_token = tokens < num_tokens
        send_sources(send_head, targets, state, tokens, is_token, NUM_RECEIVERS, RECEIVER_BLOCK)
        if TOPK_BLOCK:
            send_choices(
                payload,
                send_head,
                targets,
                tokens,
                is_token,
                num_topk,
                experts_per_rank,
                NUM_RECEIVERS,
                TOPK_BLOCK,
            )


@triton.jit
def send_sources(
    send_head,
    targets,
    state,
    tokens,
    is_token,
    NUM_RECEIVERS: tl.constexpr,
    RECEIVER_BLOCK: tl.constexpr,
):
    """Tell all receivers at once which token each of their rows is: it takes as long as telling one."""
    receivers = tl.arange(0, RECEIVER_BLOCK)
    rows = rows_of_tokens(send_head, tokens, is_token, receivers, NUM_RECEIVERS)
    limit = rows_at(targets, receivers, NUM_RECEIVERS)
    refuse_rows_beyond(state, rows, limit, receivers)
    is_receiver = receivers < NUM_RECEIVERS
    there = tl.load(targets + TARGET_WORDS * receivers + TARGET_SOURCES, mask=is_receiver, other=0)
    has_window = tl.load(targets + TARGET_WORDS * receivers, mask=is_receiver, other=0) != 0
    is_sent = is_below(rows, tl.where(has_window, limit, 0).to(tl.int32)[None, :])
    sources = int32_at(there)[None, :] + rows.to(tl.int64)
    tl.store(sources, tl.broadcast_to(tokens[:, None], rows.shape), mask=is_sent)


@triton.jit
def send_choices(
    payload,
    send_head,
    targets,
    tokens,
    is_token,
    num_topk,
    experts_per_rank,
    NUM_RECEIVERS: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
):
    """Send the top-k ids and weights of some tokens in the form that each receiver needs.

    Example:
        With 2 experts per rank, receiver 1 gets [-1, 1] for the ids [0, 3].
    """
    choices = tl.arange(0, TOPK_BLOCK)
    is_choice = is_token[:, None] & (choices < num_topk)[None, :]
    index = tokens[:, None] * num_topk + choices[None, :]
    ids = tl.load(payload.topk_idx + index, mask=is_choice, other=-1)
    weights = tl.load(payload.topk_weights + index, mask=is_choice, other=0.0)
    # Not unrolled: the values for all receivers at once would not fit into registers.
    for receiver in range(NUM_RECEIVERS):
        rows = tl.load(send_head + tokens * NUM_RECEIVERS + receiver, mask=is_token, other=-1)
        is_sent = is_below(rows, num_rows_there(targets, receiver))[:, None] & is_choice
        local_ids, local_weights = local_choices(ids, weights, receiver, experts_per_rank)
        to = rows.to(tl.int64)[:, None] * num_topk + choices[None, :]
        ids_there = words_at(tl.load(targets + TARGET_WORDS * receiver + TARGET_IDS))
        weights_there = float32_at(tl.load(targets + TARGET_WORDS * receiver + TARGET_WEIGHTS))
        tl.store(ids_there + to, local_ids, mask=is_sent)
        tl.store(weights_there + to, local_weights, mask=is_sent)


@triton.jit(do_not_specialize=["num_result_rows", "num_topk"])
def unpack_window(
    targets,
    state,
    rank,
    source,
    ids,
    rank_prefix,
    digests,
    num_result_rows,
    num_topk,
    NUM_RANKS: tl.constexpr,
    PAD: tl.constexpr,
    IF_ALL_FIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the source indices out of this rank's window, for a handle that outlives it; pad the top-k ids.

    Without a window, the indices are already in place. Programs take blocks of `BLOCK` indices and ids. The
    hashes of the rows from each rank are added to the digest of these rows; the digests of the rows from each
    rank follow those of the rows to each rank. IF_ALL_FIT is set where the host does not know yet whether the
    rows go through rings, and how many there are: if they do, or if they are more than the result has room
    for, nothing is done.

    Example:
        With 1 row received where 2 were allowed for, and ids [[3], [?]], the ids become [[3], [-1]] (if PAD).
        For rank 0 with rank_prefix [[1, 0], [3, 0]] and the indices [4, 0, 2], m(4) is added for rank 0 and
        m(1 << 32) + m((2 << 32) + 2) for rank 1, where m mixes a word.
    """
    # In a call that went wrong nothing has arrived: a reader of its ids finds no expert in them.
    num_rows = tl.where(tl.load(state + OUTCOME) == 0, tl.load(state + NUM_ROWS), 0)
    if IF_ALL_FIT:
        do_all_fit = (tl.load(state + USES_RINGS) == 0) & (num_rows <= num_result_rows)
        num_rows = tl.where(do_all_fit, num_rows, 0)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sources = tl.load(targets + TARGET_WORDS * rank + TARGET_SOURCES)
    is_row = (offsets < num_rows) & (offsets < num_result_rows)
    in_window = is_row & (sources != 0)
    there = tl.load(int32_at(sources) + offsets, mask=in_window, other=0, volatile=True)
    here = tl.load(source + offsets, mask=is_row & (sources == 0), other=0)
    tokens = tl.where(sources != 0, there, here)
    tl.store(source + offsets, tokens, mask=in_window)
    hashes = mixed_rows(offsets, tokens, is_row)
    first = 0
    for peer in range(NUM_RANKS):
        end = tl.load(rank_prefix + peer * NUM_RANKS + rank)
        is_from = (offsets >= first) & (offsets < end)
        total = tl.sum(tl.where(is_from, hashes, 0), axis=0)
        tl.atomic_add(digests + NUM_RANKS + peer, total, mask=total != 0, sem="relaxed", scope="gpu")
        first = end
    if PAD:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(0, num_result_rows.to(tl.int64) * num_topk, step):
            index = start + offsets
            is_pad = (index >= num_rows * num_topk) & (index < num_result_rows.to(tl.int64) * num_topk)
            tl.store(ids + index, tl.full((BLOCK,), -1, tl.int64), mask=is_pad)
