"""Low latency on the GPU: rows wait in fixed places of their sender's memory, and readers take them there.

A dispatch is `send_tokens`, `list_tokens`, `post_notes` here, and `await_notes`, `read_notes`, `pack_tokens`
where the rows go; a combine is `stage_rows`, `list_returns`, `post_notes`, then `await_notes`, `read_notes`,
`sum_tokens`. One after the other on a stream: what a kernel stored is there for the next one, and a note is
posted after all that it speaks of. Who waits is one program; it says in the outcome, as letters do, what went
wrong, and after that no kernel takes anything.

Tables hold addresses, one per rank; those of messages are multiples of 16, as are the sizes of messages.
Kernels that cast or sum are compiled with `casts.OPTIONS`: else products and sums would be fused.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep import formats, layout, sizes
from anyep.backends.cuda.kernels.atomics import release_max, wait_for_all
from anyep.backends.cuda.kernels.casts import (
    CHANNELS,
    bf16_bits_to_float,
    encode_logfmt,
    fp8_block,
    load_logfmt_blocks,
    ue8m0_of_scale,
)
from anyep.backends.cuda.kernels.letters import DIFFERENT, GOOD, LATE, first_bad
from anyep.backends.cuda.kernels.sums import bf16_of_float

RAW = tl.constexpr(formats.RAW)
FP8 = tl.constexpr(formats.FP8)
FP8_UE8M0 = tl.constexpr(formats.FP8_UE8M0)
MESSAGE_HEADER_BYTES = tl.constexpr(sizes.LOW_LATENCY_HEADER_BYTES)
NOTE_HEADER_BYTES = tl.constexpr(layout.NOTE_HEADER_BYTES)
NOTE_WORDS = tl.constexpr(layout.NOTE_HEADER_BYTES // layout.COUNTER_BYTES)
COUNT_BITS = tl.constexpr(32)
COUNT_MASK = tl.constexpr((1 << 32) - 1)

NO_ROWS_MISSING = 2**63 - 1
"""What `sum_tokens` leaves alone if it finds all rows."""
NONE_MISSING = tl.constexpr(NO_ROWS_MISSING)


@triton.jit
def send_tokens(
    x,
    hidden,
    topk_idx,
    num_experts,
    messages,
    message_bytes,
    TRAVEL: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Put each token that goes anywhere into its message, cast as it travels.

    With topk_idx [[1], [-1]] and 2 experts only token 0 is written: as RAW its 2 * hidden bytes follow the
    16-byte header at `messages`; as FP8 hidden bytes and their scales do. Token 1 would be `message_bytes`
    further on.

    Program (t, i) casts the i-th `TILE_BLOCKS` blocks of 128 values of token t. x is uint16, messages uint8;
    `SLOT_BLOCK` is a power of two that holds a token's slots.
    """
    token = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOT_BLOCK)
    experts = tl.load(topk_idx + token * NUM_TOPK + slots, mask=slots < NUM_TOPK, other=-1)
    is_wanted = tl.max(((experts >= 0) & (experts < num_experts)).to(tl.int32), axis=0) > 0
    source = x + token * hidden
    payload = messages + token * message_bytes + MESSAGE_HEADER_BYTES
    if TRAVEL == RAW:
        columns = tl.program_id(1) * TILE_BLOCKS * CHANNELS + tl.arange(0, TILE_BLOCKS * CHANNELS)
        is_sent = is_wanted & (columns < hidden)
        values = tl.load(source + columns, mask=is_sent)
        tl.store(payload.to(tl.pointer_type(tl.uint16)) + columns, values, mask=is_sent)
    else:
        blocks = tl.program_id(1) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
        is_sent = is_wanted & (blocks < hidden // CHANNELS)
        columns = blocks[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        halves = tl.load(source + columns, mask=is_sent[:, None], other=0)
        codes, scale = fp8_block(halves, TRAVEL != FP8)
        tl.store(payload + columns, codes, mask=is_sent[:, None])
        if TRAVEL == FP8_UE8M0:
            tl.store(payload + hidden + blocks, ue8m0_of_scale(scale), mask=is_sent)
        else:
            tl.store((payload + hidden).to(tl.pointer_type(tl.float32)) + blocks, scale, mask=is_sent)


# Calls differ in their number of tokens, and are not to be compiled for each kind of number.
@triton.jit(do_not_specialize=["num_tokens"])
def list_tokens(
    topk_idx,
    lists,
    list_stride,
    notes,
    masked,
    counts,
    num_tokens,
    local_experts,
    NUM_TOPK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Leave a list of this rank's tokens for each expert of each reader, and their counts in his note.

    lists[r] is the address of the list for reader r's first expert, the next expert's is `list_stride`
    further on. With 1 expert on each of 2 readers and topk_idx [[1, 0], [-1, 1]], reader 0 finds the tokens
    [0] and reader 1 finds [0, 1]; the ranges in their notes are 1 and 2, as are the counts [1, 2]. A token
    that chose an expert twice is listed once. Nothing is left for a masked reader.

    One program per expert: it looks at all choices, `TILE_TOKENS` tokens at a time.
    """
    expert = tl.program_id(0)
    reader = expert // local_experts
    local = (expert - reader * local_experts).to(tl.int64)
    is_open = tl.load(masked + reader) == 0
    place = tl.load(lists + reader) + local * list_stride
    listed = place.to(tl.pointer_type(tl.int32))
    slots = tl.arange(0, SLOT_BLOCK)
    count = tl.full((), 0, tl.int32)
    for start in range(0, tl.where(is_open, num_tokens, 0), TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        is_slot = (tokens < num_tokens)[:, None] & (slots < NUM_TOPK)[None, :]
        chosen = tl.load(topk_idx + tokens[:, None] * NUM_TOPK + slots[None, :], mask=is_slot, other=-1)
        here = tl.max((chosen == expert).to(tl.int32), axis=1)
        tl.store(listed + count + tl.cumsum(here, axis=0) - here, tokens, mask=here > 0)
        count += tl.sum(here, axis=0)
    tl.store(counts + expert, count.to(tl.int64))
    ranges = (tl.load(notes + reader) + NOTE_HEADER_BYTES).to(tl.pointer_type(tl.int64))
    tl.store(ranges + local, count.to(tl.int64), mask=is_open)


@triton.jit
def post_notes(
    notes,
    masked,
    number,
    header,
    NUM_WORDS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Close this rank's sending at every reader that is not masked.

    With number [7] and header [-, 0, 4] a reader that acquires 7 in word 0 of its note finds 0 and 4 after
    it, and all that was written before.

    One program. The number lives in memory, so that a captured graph can be replayed; it only grows.
    """
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    is_open = is_rank & (tl.load(masked + ranks, mask=is_rank, other=1) == 0)
    there = tl.load(notes + ranks, mask=is_rank, other=0).to(tl.pointer_type(tl.int64))
    index = tl.arange(0, NOTE_WORDS)
    is_word = (index > 0) & (index < NUM_WORDS)
    words = tl.load(header + index, mask=is_word, other=0)
    tl.store(
        there[:, None] + index[None, :],
        tl.broadcast_to(words[None, :], (RANK_BLOCK, NOTE_WORDS)),
        mask=is_open[:, None] & is_word[None, :],
    )
    release_max(there, tl.load(number), is_open)


@triton.jit
def await_notes(
    notes,
    masked,
    number,
    outcome,
    patience_ns,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Wait for the note of every sender that is not masked; else the outcome says who is late.

    One program. `notes[s]` is the address of sender s's note here. With the first words [7, 6], number [7]
    and no patience left the outcome is 1 (late) + 4 * 1 (rank 1); if rank 1 is masked, nobody waits for it.
    An outcome that is not 0 stays as it is.
    """
    call = tl.load(number)
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    is_open = is_rank & (tl.load(masked + ranks, mask=is_rank, other=1) == 0)
    here = tl.load(notes + ranks, mask=is_rank, other=0).to(tl.pointer_type(tl.int64))
    seen = wait_for_all(here, is_open, call, patience_ns)
    late = first_bad(tl.where(seen < call, LATE, GOOD), ranks, is_open, RANK_BLOCK)
    before = tl.load(outcome)
    tl.store(outcome, tl.where(before == 0, late, before))


@triton.jit
def read_notes(
    notes,
    masked,
    own_header,
    headers,
    ranges,
    num_rows,
    outcome,
    local_experts,
    FIRST_AGREEING: tl.constexpr,
    END_AGREEING: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
):
    """Copy every sender's header and ranges (row s comes from sender s); num_rows is that of all ranges.

    It is -1 if the headers do not agree in the words [first, end). Of a masked sender all is 0. With the
    headers [7, 0, 4] and [7, 0, 5] and one row each, words [1, 2) give 2 and words [1, 3) give -1; then the
    outcome is 2 (different) + 4 * 1 (rank 1). An outcome that is not 0 stays as it is.

    One program, after `await_notes`; ranges are copied in tiles of `TILE_EXPERTS` experts.
    """
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    is_open = is_rank & (tl.load(masked + ranks, mask=is_rank, other=1) == 0)
    here = tl.load(notes + ranks, mask=is_rank, other=0)
    index = tl.arange(0, NOTE_WORDS)
    is_word = index < NUM_WORDS
    mine = tl.load(own_header + index, mask=is_word, other=0)
    words = here.to(tl.pointer_type(tl.int64))
    theirs = tl.load(
        words[:, None] + index[None, :], mask=is_open[:, None] & is_word[None, :], other=0, volatile=True
    )
    tl.store(
        headers + ranks[:, None] * NUM_WORDS + index[None, :],
        theirs,
        mask=is_rank[:, None] & is_word[None, :],
    )
    is_agreeing = (index >= FIRST_AGREEING) & (index < END_AGREEING)
    differ = tl.max((is_agreeing[None, :] & (theirs != mine[None, :])).to(tl.int32), axis=1)
    different = first_bad(tl.where(differ > 0, DIFFERENT, GOOD), ranks, is_open, RANK_BLOCK)
    before = tl.load(outcome)
    tl.store(outcome, tl.where(before == 0, different, before))
    total = tl.full((), 0, tl.int64)
    their_ranges = (here + NOTE_HEADER_BYTES).to(tl.pointer_type(tl.int64))
    for first in range(0, local_experts, TILE_EXPERTS):
        experts = first + tl.arange(0, TILE_EXPERTS)
        is_expert = experts < local_experts
        rows = tl.load(
            their_ranges[:, None] + experts[None, :],
            mask=is_open[:, None] & is_expert[None, :],
            other=0,
            volatile=True,
        )
        tl.store(
            ranges + ranks[:, None] * local_experts + experts[None, :],
            rows,
            mask=is_rank[:, None] & is_expert[None, :],
        )
        total += tl.sum(tl.sum(rows & COUNT_MASK, axis=1), axis=0)
    tl.store(num_rows, tl.where(different == 0, total, -1))


@triton.jit
def pack_tokens(
    ranges,
    lists,
    list_stride,
    messages,
    message_bytes,
    row_words,
    num_scale_words,
    x,
    scales,
    src_info,
    layout_range,
    counts,
    stats,
    outcome,
    local_experts,
    rows_per_expert,
    NUM_SENDERS: tl.constexpr,
    SENDER_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    TILE_SCALES: tl.constexpr,
):
    """Take the rows of each local expert from their senders: in order of sender, then token.

    ranges[s, e] counts the rows of sender s for expert e, lists[s] is the address of its list for expert 0,
    messages[s] that of its first message. With ranges [[2], [1]] and the lists [0, 3] and [1], the rows of
    expert 0 are tokens 0 and 3 of sender 0 and token 1 of sender 1: src_info [[0, 3, 1, ...]], layout_range
    [[2, 2 << 32 | 1]], counts [3], and stats (unless it is None) grows by 3. A row's scales, words of 4
    bytes, go to a column: word w of row r of expert e to ((e * num_scale_words) + w) * rows_per_expert + r.
    Nothing is taken if the outcome of what came before is not 0.

    Program (e, s, i) takes the i-th share of what sender s has for expert e, `TILE_ROWS` rows at a time, in
    pieces of `TILE_WORDS` words: each thread then moves 16 bytes at a time. x and scales are words of 4
    bytes; without scales they are None.
    """
    expert = tl.program_id(0)
    sender = tl.program_id(1)
    share = tl.program_id(2)
    is_good = tl.load(outcome) == 0
    senders = tl.arange(0, SENDER_BLOCK)
    theirs = tl.load(ranges + senders * local_experts + expert, mask=senders < NUM_SENDERS, other=0)
    their_counts = (theirs & COUNT_MASK).to(tl.int32)
    begin = tl.sum(tl.where(senders < sender, their_counts, 0), axis=0)
    count = tl.sum(tl.where(senders == sender, their_counts, 0), axis=0)
    is_first = is_good & (share == 0)
    whole_range = (begin.to(tl.int64) << COUNT_BITS) | count.to(tl.int64)
    tl.store(layout_range + expert * NUM_SENDERS + sender, whole_range, mask=is_first)
    total = tl.sum(their_counts, axis=0)
    is_first = is_first & (sender == 0)
    tl.store(counts + expert, total, mask=is_first)
    if stats is not None:
        tl.store(stats + expert, tl.load(stats + expert) + total, mask=is_first)

    max_tokens = rows_per_expert // NUM_SENDERS
    place = tl.load(lists + sender) + expert.to(tl.int64) * list_stride
    listed = place.to(tl.pointer_type(tl.int32))
    # A pointer out of a table is not known to be aligned; ours are.
    their_messages = tl.multiple_of(tl.load(messages + sender).to(tl.pointer_type(tl.uint8)), 16)
    end = tl.where(is_good, count, 0)
    for first in range(share * TILE_ROWS, end, tl.num_programs(2) * TILE_ROWS):
        indices = first + tl.arange(0, TILE_ROWS)
        is_row = indices < count
        # Of a sender that has masked this rank, the list may be written over while it is read; and a compiler
        # may read it more than once.
        tokens = tl.load(listed + indices, mask=is_row, other=0)
        tokens = tl.minimum(tl.maximum(tokens, 0), max_tokens - 1)
        rows = expert.to(tl.int64) * rows_per_expert + begin + indices
        tl.store(src_info + rows, tokens, mask=is_row)
        payload = their_messages + tokens.to(tl.int64) * message_bytes + MESSAGE_HEADER_BYTES
        source = payload.to(tl.pointer_type(tl.int32))
        for start in range(0, row_words, TILE_WORDS):
            words = start + tl.arange(0, TILE_WORDS)
            is_word = is_row[:, None] & (words < row_words)[None, :]
            values = tl.load(source[:, None] + words[None, :], mask=is_word)
            tl.store(x + rows[:, None] * row_words + words[None, :], values, mask=is_word)
        if scales is not None:
            for start in range(0, num_scale_words, TILE_SCALES):
                words = start + tl.arange(0, TILE_SCALES)
                is_word = is_row[:, None] & (words < num_scale_words)[None, :]
                values = tl.load((source + row_words)[:, None] + words[None, :], mask=is_word)
                columns = (expert.to(tl.int64) * num_scale_words + words) * rows_per_expert
                to = scales + columns[None, :] + (begin + indices)[:, None]
                tl.store(to, values, mask=is_word)


@triton.jit
def count_rows(
    layout_range,
    src_info,
    rows,
    max_tokens,
    rows_per_expert,
    NUM_SENDERS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """The rows of a handle, for each expert, if ranges and tokens are possible: no kernel reaches outside.

    Else -1: a range does not begin where the one before ends; -2: it has more than `max_tokens` rows; -3: a
    token is not in [0, max_tokens), or does not follow the one before. With at most 4 tokens and 2 senders,
    ranges [[2, 2 << 32 | 1]] and src_info [[0, 3, 1, ...]] give [3]; with [[3, 0, 1, ...]] it is [-3].

    One program per expert.
    """
    expert = tl.program_id(0).to(tl.int64)
    begin = tl.full((), 0, tl.int64)
    problem = tl.full((), 0, tl.int32)
    for sender in range(NUM_SENDERS):
        theirs = tl.load(layout_range + expert * NUM_SENDERS + sender)
        count = theirs & COUNT_MASK
        found = tl.where((theirs >> COUNT_BITS) != begin, -1, tl.where(count > max_tokens, -2, 0))
        problem = tl.where(problem == 0, found, problem)
        end = tl.where(problem == 0, count, 0).to(tl.int32)
        for first in range(0, end, TILE_ROWS):
            indices = first + tl.arange(0, TILE_ROWS)
            is_row = indices < end
            tokens_at = src_info + expert * rows_per_expert + begin + indices
            tokens = tl.load(tokens_at, mask=is_row, other=0)
            before = tl.load(tokens_at - 1, mask=is_row & (indices > 0), other=-1)
            is_wrong = is_row & ((tokens <= before) | (tokens >= max_tokens))
            problem = tl.where(tl.max(is_wrong.to(tl.int32), axis=0) > 0, -3, problem)
        begin += tl.where(problem == 0, count, 0)
    tl.store(rows + expert, tl.where(problem == 0, begin, problem))


@triton.jit
def stage_rows(
    x,
    hidden,
    layout_range,
    rows_per_expert,
    messages,
    message_bytes,
    USE_LOGFMT: tl.constexpr,
    NUM_SENDERS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Put the rows of each local expert into the messages of the same index, as they are or in LogFMT.

    With layout_range [[2, 2 << 32 | 1]] rows 0 to 2 of expert 0 are put there.

    Program (e, i) takes the i-th share of expert e's rows, `TILE_BLOCKS` blocks of 128 values at a time. x is
    uint16, messages uint8.
    """
    expert = tl.program_id(0).to(tl.int64)
    last = tl.load(layout_range + expert * NUM_SENDERS + NUM_SENDERS - 1)
    num_rows = ((last >> COUNT_BITS) + (last & COUNT_MASK)).to(tl.int32)
    for index in range(tl.program_id(1), num_rows, tl.num_programs(1)):
        row = expert * rows_per_expert + index
        source = x + row * hidden
        message = messages + row * message_bytes
        if USE_LOGFMT:
            encode_logfmt(source, message, hidden, TILE_BLOCKS)
        else:
            payload = (message + MESSAGE_HEADER_BYTES).to(tl.pointer_type(tl.uint16))
            for start in range(0, hidden, TILE_BLOCKS * CHANNELS):
                columns = start + tl.arange(0, TILE_BLOCKS * CHANNELS)
                values = tl.load(source + columns, mask=columns < hidden)
                tl.store(payload + columns, values, mask=columns < hidden)


@triton.jit
def list_returns(
    src_info,
    layout_range,
    lists,
    list_stride,
    notes,
    masked,
    rows_per_expert,
    NUM_READERS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Leave for each reader the list of its tokens whose rows this rank's experts return, and their ranges.

    lists[r] is the address of the list for reader r of expert 0's rows, the next expert's is `list_stride`
    further on. With src_info [[0, 3, 1]] and layout_range [[2, 2 << 32 | 1]] reader 0 finds the tokens
    [0, 3] and the range 2, reader 1 finds [1] and the range 2 << 32 | 1. Nothing is left for a masked reader.

    Program (e, r) leaves the list of expert e for reader r, `TILE_ROWS` rows at a time.
    """
    expert = tl.program_id(0).to(tl.int64)
    reader = tl.program_id(1)
    is_open = tl.load(masked + reader) == 0
    theirs = tl.load(layout_range + expert * NUM_READERS + reader)
    ranges = (tl.load(notes + reader) + NOTE_HEADER_BYTES).to(tl.pointer_type(tl.int64))
    tl.store(ranges + expert, theirs, mask=is_open)
    listed = (tl.load(lists + reader) + expert * list_stride).to(tl.pointer_type(tl.int32))
    tokens = src_info + expert * rows_per_expert + (theirs >> COUNT_BITS)
    count = tl.where(is_open, theirs & COUNT_MASK, 0).to(tl.int32)
    for first in range(0, count, TILE_ROWS):
        indices = first + tl.arange(0, TILE_ROWS)
        tl.store(listed + indices, tl.load(tokens + indices, mask=indices < count), mask=indices < count)


@triton.jit
def find_places(listed, counts, token, SLOT_BLOCK: tl.constexpr, TILE_LIST: tl.constexpr):
    """Where a token is in each of these lists (pointers to int32), -1 where it is not.

    Token 3 in the lists [0, 3], [1] and [3, 4] is at [1, -1, 0].
    """
    places = tl.full((SLOT_BLOCK,), -1, tl.int32)
    for first in range(0, tl.max(counts, axis=0), TILE_LIST):
        indices = first + tl.arange(0, TILE_LIST)
        is_listed = indices[None, :] < counts[:, None]
        tokens = tl.load(listed[:, None] + indices[None, :], mask=is_listed, other=-1)
        here = tl.where(tokens == token, indices[None, :], -1)
        places = tl.maximum(places, tl.max(here, axis=1))
    return places


@triton.jit
def sum_raw_rows(addresses, slots, weights, columns, hidden, NUM_TOPK: tl.constexpr):
    """0 + row * weight + ... of the messages at these addresses, slot by slot; address 0 is no message."""
    sums = tl.zeros(columns.shape, tl.float32)
    for slot in tl.static_range(NUM_TOPK):
        address = tl.sum(tl.where(slots == slot, addresses, 0), axis=0)
        is_there = address != 0
        weight = tl.load(weights + slot, mask=is_there, other=0.0)
        payload = (address + MESSAGE_HEADER_BYTES).to(tl.pointer_type(tl.uint16))
        row = tl.multiple_of(payload, 16)
        values = tl.load(row + columns, mask=is_there & (columns < hidden), other=0)
        # Adding +0.0 changes nothing: a sum that began with +0.0 is never -0.0.
        sums += bf16_bits_to_float(values) * weight
    return sums


@triton.jit
def sum_logfmt_rows(addresses, slots, weights, blocks, hidden, NUM_TOPK: tl.constexpr):
    """The same of messages in LogFMT: sums [blocks, 128]."""
    sums = tl.zeros((blocks.shape[0], CHANNELS), tl.float32)
    for slot in range(NUM_TOPK):
        address = tl.sum(tl.where(slots == slot, addresses, 0), axis=0)
        if address != 0:
            message = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
            values = load_logfmt_blocks(message, blocks, blocks < hidden // CHANNELS)
            sums += values * tl.load(weights + slot)
    return sums


@triton.jit
def sum_tokens(
    topk_idx,
    topk_weights,
    ranges,
    lists,
    list_stride,
    messages,
    message_bytes,
    rows_per_expert,
    masked,
    out,
    hidden,
    missing,
    outcome,
    local_experts,
    USE_LOGFMT: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    TILE_LIST: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    IN_HARDWARE: tl.constexpr = True,
):
    """Add up each token's rows where they lie: out = 0 + row * weight + ..., in top-k order, in float32.

    ranges[r, e] says which rows of expert e of rank r are this rank's, lists[r] is the address of the list of
    their tokens for expert 0, messages[r] that of the first row's message. With 1 expert per rank, topk_idx
    [[1, 0]], weights [[0.5, 2]] and a row of 4s at rank 1, of 1s at rank 0, out is a row of 4s: 4 * 0.5 +
    1 * 2. Experts that are none or masked are skipped. `missing` falls to the smallest token * top-k + slot
    where rank r returned no row for a token that should have been there; that row is skipped, too. Nothing
    is added up if the outcome of what came before is not 0.

    Program (t, i) takes the i-th share of token t's values, `TILE_BLOCKS` blocks of 128 at a time. It looks
    at the lists of all slots at once, at `TILE_LIST` tokens of each. out is uint16.
    """
    token = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOT_BLOCK)
    chosen = tl.load(topk_idx + token * NUM_TOPK + slots, mask=slots < NUM_TOPK, other=-1)
    is_expert = (chosen >= 0) & (chosen < NUM_RANKS * local_experts) & (tl.load(outcome) == 0)
    experts = tl.where(is_expert, chosen, 0)
    ranks = experts // local_experts
    locals_there = experts - ranks * local_experts
    is_wanted = is_expert & (tl.load(masked + ranks) == 0)
    theirs = tl.load(ranges + experts, mask=is_wanted, other=0)
    counts = (theirs & COUNT_MASK).to(tl.int32)
    listed = (tl.load(lists + ranks) + locals_there * list_stride).to(tl.pointer_type(tl.int32))
    places = find_places(listed, counts, token, SLOT_BLOCK, TILE_LIST)
    is_missing = is_wanted & (places < 0)
    first_missing = tl.min(tl.where(is_missing, token * NUM_TOPK + slots, NONE_MISSING), axis=0)
    is_told = (first_missing != NONE_MISSING) & (tl.program_id(1) == 0)
    tl.atomic_min(missing, first_missing, mask=is_told, sem="relaxed")

    rows = locals_there * rows_per_expert + (theirs >> COUNT_BITS) + places
    addresses = tl.where(is_wanted & ~is_missing, tl.load(messages + ranks) + rows * message_bytes, 0)
    end = tl.where(tl.load(outcome) == 0, hidden, 0)
    step = TILE_BLOCKS * CHANNELS
    for start in range(tl.program_id(1) * step, end, tl.num_programs(1) * step):
        weights = topk_weights + token * NUM_TOPK
        if USE_LOGFMT:
            blocks = start // CHANNELS + tl.arange(0, TILE_BLOCKS)
            columns = blocks[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
            sums = sum_logfmt_rows(addresses, slots, weights, blocks, hidden, NUM_TOPK)
        else:
            columns = start + tl.arange(0, TILE_BLOCKS * CHANNELS)
            sums = sum_raw_rows(addresses, slots, weights, columns, hidden, NUM_TOPK)
        tl.store(out + token * hidden + columns, bf16_of_float(sums, IN_HARDWARE), mask=columns < hidden)
