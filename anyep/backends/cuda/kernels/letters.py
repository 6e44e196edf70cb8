"""Notify on the device: a letter to every peer, and everyone's letter before anything else.

A letter lies in the receiver's mailbox: 64-bit words, the first of them the call's number, which is stored
last. The number lives in the heap and is advanced here, so that a captured graph can be replayed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda.kernels.atomics import release_max, wait_for_all

GOOD = tl.constexpr(0)
LATE = tl.constexpr(1)
DIFFERENT = tl.constexpr(2)


@triton.jit
def exchange_letters(
    call_number,
    letter,
    mailboxes,
    own_mailboxes,
    box_stride,
    peer_stride,
    bases,
    places,
    place_stride,
    outcome,
    patience_ns,
    counts,
    channel_counts,
    expert_counts,
    counts_at,
    num_channels,
    local_experts,
    FIRST_AGREEING: tl.constexpr,
    END_AGREEING: tl.constexpr,
    OFFSET_WORD: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr = 0,
    EXPERT_BLOCK: tl.constexpr = 0,
):
    """Post this call's letter to every peer, wait for theirs, and find where each one's rows lie.

    One program. `mailboxes[r]` is the address of this rank's first mailbox at peer r, `own_mailboxes` that of
    peer 0's first mailbox here; calls alternate between two, `box_stride` bytes apart. With call_number 4,
    letter [-, 0, 7, 256] (word 3 is the offset) and bases [4096, 8192], where peer 1's letter is
    [5, 0, 7, 512]: call_number becomes 5, places [4352, 8704], and the outcome is 0. If word 2 there is 8,
    and words [1, 3) must agree, it is 2 in its low bits and 1, the peer, above; after `patience_ns` without
    a letter it is 1. An offset below 0 is no place: 0. Places are written `place_stride` words apart.

    With blocks for channels and experts (powers of two that hold them), a letter has counts too, `counts_at`
    bytes after its begin: of counts [3, 4], channel_counts [[1, 2], [4, 0]] and expert_counts [9, 8, 7, 6]
    peer 1 gets 3, 4, 4, 0, 7 and 6.
    """
    call = tl.load(call_number) + 1
    tl.store(call_number, call)
    box = call % 2
    index = tl.arange(0, NUM_WORDS)
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    mine = tl.load(letter + index)
    there = (tl.load(mailboxes + ranks, mask=is_rank) + box * box_stride).to(tl.pointer_type(tl.int64))
    is_word = is_rank[:, None] & (index > 0)[None, :]
    tl.store(
        there[:, None] + index[None, :], tl.broadcast_to(mine[None, :], (RANK_BLOCK, NUM_WORDS)), mask=is_word
    )
    if CHANNEL_BLOCK:
        # A letter with counts: rows to each rank, rows to this peer by channel, tokens for its experts.
        columns = tl.arange(0, RANK_BLOCK)
        is_count = is_rank[:, None] & (columns < NUM_RANKS)[None, :]
        words = (there.to(tl.int64) + counts_at).to(tl.pointer_type(tl.int32))
        row = tl.load(counts + columns, mask=columns < NUM_RANKS, other=0)
        row = tl.broadcast_to(row[None, :], (RANK_BLOCK, RANK_BLOCK))
        tl.store(words[:, None] + columns[None, :], row, mask=is_count)
        channels = tl.arange(0, CHANNEL_BLOCK)
        is_channel = is_rank[:, None] & (channels < num_channels)[None, :]
        by_channel = channel_counts + ranks[:, None] * num_channels + channels[None, :]
        to = words[:, None] + NUM_RANKS + channels[None, :]
        tl.store(to, tl.load(by_channel, mask=is_channel), mask=is_channel)
        experts = tl.arange(0, EXPERT_BLOCK)
        is_expert = is_rank[:, None] & (experts < local_experts)[None, :]
        by_expert = expert_counts + ranks[:, None] * local_experts + experts[None, :]
        to = words[:, None] + NUM_RANKS + num_channels + experts[None, :]
        tl.store(to, tl.load(by_expert, mask=is_expert), mask=is_expert)
    release_max(there, call, is_rank)
    here = (own_mailboxes + box * box_stride + ranks * peer_stride).to(tl.pointer_type(tl.int64))
    seen = wait_for_all(here, is_rank, call, patience_ns)
    theirs = tl.load(here[:, None] + index[None, :], mask=is_rank[:, None], other=0, volatile=True)
    offsets = tl.sum(tl.where((index == OFFSET_WORD)[None, :], theirs, 0), axis=1)
    bases_there = tl.load(bases + ranks, mask=is_rank, other=0)
    tl.store(places + ranks * place_stride, tl.where(offsets >= 0, bases_there + offsets, 0), mask=is_rank)
    is_agreeing = (index >= FIRST_AGREEING) & (index < END_AGREEING)
    differ = tl.max((is_agreeing[None, :] & (theirs != mine[None, :])).to(tl.int32), axis=1)
    bad = tl.where(seen < call, LATE, tl.where(differ > 0, DIFFERENT, GOOD))
    tl.store(outcome, first_bad(bad, ranks, is_rank, RANK_BLOCK))


@triton.jit
def first_bad(bad, ranks, is_rank, RANK_BLOCK: tl.constexpr):
    """What went wrong at the first rank where something did, and four times that rank; 0 if nothing did."""
    first = tl.min(tl.where(is_rank & (bad > 0), ranks, RANK_BLOCK), axis=0)
    what = tl.sum(tl.where(ranks == first, bad, 0), axis=0)
    return tl.where(first < RANK_BLOCK, what + 4 * first, 0).to(tl.int64)


@triton.jit
def meet(
    flags_there,
    flags_here,
    flag_stride,
    number,
    outcome,
    patience_ns,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Say at every peer that this rank's part of the call is done, and wait until all have said so here.

    One program; what kernels before it stored is visible to who acquires its flags. `flags_there[r]` is the
    address of this rank's flag at peer r, `flags_here` that of peer 0's flag here. With number [5] the flags
    there become 5; with flags [5, 4] here and no patience left the outcome is 1 (late) + 4 * 1 (rank 1). An
    outcome that is not 0 stays as it is.
    """
    value = tl.load(number)
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    there = tl.load(flags_there + ranks, mask=is_rank).to(tl.pointer_type(tl.int64))
    release_max(there, value, is_rank)
    here = (flags_here + ranks * flag_stride).to(tl.pointer_type(tl.int64))
    seen = wait_for_all(here, is_rank, value, patience_ns)
    late = first_bad(tl.where(seen < value, LATE, GOOD), ranks, is_rank, RANK_BLOCK)
    before = tl.load(outcome)
    tl.store(outcome, tl.where(before == 0, late, before))


@triton.jit
def read_counts(
    rank,
    letters,
    peer_stride,
    channel_counts,
    num_channels,
    local_experts,
    rank_prefix,
    channel_prefix,
    recv_channel_prefix,
    totals,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
):
    """Turn the counts of everyone's letters into the prefix sums of a handle; one program.

    `letters` is the address of peer 0's counts here. For rank 1 of 2 with the rows [2, 1] and [1, 3] in the
    letters: rank_prefix [[2, 1], [3, 4]]. channel_counts [[1, 0], [1, 2]] gives channel_prefix [[1, 1],
    [1, 3]] (inclusive); by channel [1, 0] and [1, 2] in the letters give recv_channel_prefix [[0, 1], [0, 1]]
    (exclusive); totals are 4, the rows that come, and the tokens for each local expert.
    """
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    words = (letters + ranks * peer_stride).to(tl.pointer_type(tl.int32))
    is_pair = is_rank[:, None] & is_rank[None, :]
    matrix = tl.load(words[:, None] + ranks[None, :], mask=is_pair, other=0, volatile=True)
    tl.store(
        rank_prefix + ranks[:, None] * NUM_RANKS + ranks[None, :], tl.cumsum(matrix, axis=0), mask=is_pair
    )
    tl.store(totals, tl.sum(tl.sum(tl.where((ranks == rank)[None, :], matrix, 0), axis=1), axis=0))
    channels = tl.arange(0, CHANNEL_BLOCK)
    is_channel = is_rank[:, None] & (channels < num_channels)[None, :]
    place = ranks[:, None] * num_channels + channels[None, :]
    sent = tl.load(channel_counts + place, mask=is_channel, other=0)
    tl.store(channel_prefix + place, tl.cumsum(sent, axis=1), mask=is_channel)
    theirs = words[:, None] + NUM_RANKS + channels[None, :]
    received = tl.load(theirs, mask=is_channel, other=0, volatile=True)
    tl.store(recv_channel_prefix + place, tl.cumsum(received, axis=1) - received, mask=is_channel)
    experts = tl.arange(0, EXPERT_BLOCK)
    is_expert = is_rank[:, None] & (experts < local_experts)[None, :]
    theirs = words[:, None] + NUM_RANKS + num_channels + experts[None, :]
    tokens = tl.sum(tl.load(theirs, mask=is_expert, other=0, volatile=True), axis=0)
    tl.store(totals + 1 + experts, tokens, mask=experts < local_experts)


@triton.jit
def fill_send_head(
    rank,
    position,
    rank_prefix,
    send_head,
    num_tokens,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Where each token's row lies at each receiver: after the rows of lower ranks.

    For rank 1 with rank_prefix [[2, 1], ...] position [[0, 0], [-1, 1]] gives send_head [[2, 1], [-1, 2]].
    """
    tokens = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    peers = tl.arange(0, RANK_BLOCK)
    is_peer = peers < NUM_RANKS
    before = tl.load(rank_prefix + (rank - 1) * NUM_RANKS + peers, mask=is_peer & (rank > 0), other=0)
    is_place = (tokens < num_tokens)[:, None] & is_peer[None, :]
    index = tokens[:, None] * NUM_RANKS + peers[None, :]
    place = tl.load(position + index, mask=is_place, other=-1)
    tl.store(send_head + index, tl.where(place >= 0, place + before[None, :], -1), mask=is_place)
