"""Digests of handles: hashes that are the same on every device (`anyep/core/digests.py`).

A handle's digests are words: those of the rows to each rank, then those of the rows from each rank. The
kernels of a dispatch fill them along with its handle; `digest_handle` computes those of any other handle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import constants as words_of
from anyep.core import digests as numbers

RANK = tl.constexpr(words_of.RANK)
FIRST = tl.constexpr(numbers.FIRST)
FACTOR_1 = tl.constexpr(numbers.FACTOR_1)
FACTOR_2 = tl.constexpr(numbers.FACTOR_2)
SHIFT_1 = tl.constexpr(numbers.SHIFT_1)
SHIFT_2 = tl.constexpr(numbers.SHIFT_2)
SHIFT_3 = tl.constexpr(numbers.SHIFT_3)
MASK_1 = tl.constexpr(numbers.MASK_1)
MASK_2 = tl.constexpr(numbers.MASK_2)
MASK_3 = tl.constexpr(numbers.MASK_3)
TOKEN_BITS = tl.constexpr(numbers.TOKEN_BITS)


@triton.jit
def mixed(words):
    """Like `digests.mixed`, for 64-bit words.

    Example:
        0 gives 7015083136346030574, 1 gives -841461272716353273.
    """
    words += FIRST
    words = (words ^ ((words >> SHIFT_1) & MASK_1)) * FACTOR_1
    words = (words ^ ((words >> SHIFT_2) & MASK_2)) * FACTOR_2
    return words ^ ((words >> SHIFT_3) & MASK_3)


@triton.jit
def mixed_rows(rows, tokens, is_row):
    """Hashes of rows with their tokens; 0 where there is no row."""
    words = (rows.to(tl.int64) << TOKEN_BITS) | tokens.to(tl.int64)
    return tl.where(is_row, mixed(words), 0)


@triton.jit
def mixed_channels(channels, first_rows, is_channel):
    """Hashes of channels with the numbers of their first rows; 0 where there is no channel."""
    words = -1 - ((channels.to(tl.int64) << TOKEN_BITS) | first_rows.to(tl.int64))
    return tl.where(is_channel, mixed(words), 0)


# Values that vary from call to call must not be compiled in.
@triton.jit(do_not_specialize=["num_tokens", "num_recv_rows", "num_channels"])
def digest_handle(
    constants,
    rank_prefix,
    channel_prefix,
    recv_channel_prefix,
    source,
    send_head,
    digests,
    num_tokens,
    num_recv_rows,
    num_channels,
    NUM_RANKS: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Fill the digests of a handle with any contents.

    Program (p, 0) takes the rows to rank p, program (p, 1) those from rank p, `TILE_ROWS` at a time.
    `CHANNEL_BLOCK` is a power of two that holds the channels.

    Example:
        For rank 0 of 1 with 2 tokens in 1 channel, rank_prefix [[2]], channel_prefix [[2]],
        recv_channel_prefix [[0]], source [0, 1] and send_head [[0], [1]], both digests are m(-1) + m(0) +
        m(2**32 + 1), where m mixes a word.
    """
    peer, rank = tl.program_id(0), tl.load(constants + RANK).to(tl.int32)
    channels = tl.arange(0, CHANNEL_BLOCK)
    is_channel = channels < num_channels
    total = tl.zeros((TILE_ROWS,), tl.int64)
    if tl.program_id(1) == 0:
        for start in range(0, num_tokens, TILE_ROWS):
            tokens = start + tl.arange(0, TILE_ROWS)
            rows = tl.load(send_head + tokens * NUM_RANKS + peer, mask=tokens < num_tokens, other=-1)
            total += mixed_rows(rows, tokens, rows >= 0)
        ends = channel_prefix + peer * num_channels + channels
        first_rows = tl.load(ends - 1, mask=is_channel & (channels > 0), other=0)
    else:
        first = tl.load(rank_prefix + (peer - 1) * NUM_RANKS + rank, mask=peer > 0, other=0)
        end = tl.load(rank_prefix + peer * NUM_RANKS + rank)
        # If a handle names more rows than it has, only those that it has count.
        for start in range(tl.maximum(first, 0), tl.minimum(end, num_recv_rows), TILE_ROWS):
            rows = start + tl.arange(0, TILE_ROWS)
            is_row = (rows < end) & (rows < num_recv_rows)
            total += mixed_rows(rows, tl.load(source + rows, mask=is_row, other=0), is_row)
        starts = recv_channel_prefix + peer * num_channels + channels
        first_rows = tl.load(starts, mask=is_channel, other=0)
    of_channels = tl.sum(mixed_channels(channels, first_rows, is_channel), axis=0)
    tl.store(digests + tl.program_id(1) * NUM_RANKS + peer, tl.sum(total, axis=0) + of_channels)
