"""Rings: any number of rows through a fixed number of entries; one kernel both sends and receives.

The ring of one (channel, sender) lies at the receiver. It has `ring_rows` entries, each for a row and its
metadata, scales, ids and weights; row n lies in entry n % ring_rows. The sender advances the counter `tail`,
which lies at the receiver; the receiver advances the counter `head`, which lies at the sender: each counter
lies where it is polled. Counters only grow, over all calls, and each is written by one program only. A call
starts from their current values, so no argument has to change from call to call.

Even programs of a kernel send and odd ones receive; the programs of all ranks must be resident at once. With
two programs per channel, each serves one side of one channel. With fewer, each serves every n-th channel, one
after the other, in ascending order. The number of programs may differ between ranks: the lowest unfinished
channel has all its senders and receivers at work (`tests/model/programs.py`).

A program that sends tokens, or sums them, takes the next tile when all peers are ready for it. A program that
drains rings, or pushes rows, takes what is available and never waits for a single peer; this rules out
circular waits. A tile may not hold more tokens than a ring has entries.

A wait ends when nothing has moved in its channel for `timeout_ns`, or when the abort flag is raised; the
outcome then names the rank that was waited for. Addresses and sizes of rows and entries are multiples of 16
bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anyep.backends.cuda import constants
from anyep.backends.cuda.kernels.atomics import (
    abort_of_host,
    is_aborted,
    is_time_to_ask,
    load_acquire,
    load_one,
    nanoseconds,
    store_release,
)
from anyep.backends.cuda.kernels.beside import (
    carried_by_tokens,
    carried_in_entries,
    carried_to,
    choices_of,
    store_in_entries,
    store_in_results,
)
from anyep.backends.cuda.kernels.floats import FP32, load_rows, store_rows, sum_of_biases, values_at
from anyep.backends.cuda.kernels.groups import (
    Beside,
    Biases,
    Outputs,
    Payload,
    Prefixes,
    RingArea,
    RingResults,
    Scales,
    Sums,
    Tables,
)
from anyep.backends.cuda.kernels.pointers import float32_at, int32_at, row_words_at, words_at
from anyep.backends.cuda.kernels.sums import ranks_at
from anyep.core import outcomes

GOOD = tl.constexpr(outcomes.GOOD)
LATE = tl.constexpr(outcomes.LATE)
STOPPED = tl.constexpr(outcomes.STOPPED)
BAD_HANDLE = tl.constexpr(outcomes.BAD_HANDLE)
BAD_ROWS = tl.constexpr(constants.BAD_ROWS)
NUM_CODES = tl.constexpr(outcomes.NUM_CODES)

TARGET_WORDS = tl.constexpr(constants.TARGET_WORDS)
TARGET_ROWS = tl.constexpr(constants.TARGET_ROWS)
TARGET_WEIGHTS = tl.constexpr(constants.TARGET_WEIGHTS)
USES_RINGS = tl.constexpr(constants.USES_RINGS)
WAITED_FOR = tl.constexpr(constants.WAITED_FOR)
TAIL_AT = tl.constexpr(constants.TAIL_AT)
HEAD_AT = tl.constexpr(constants.HEAD_AT)
RING_STRIDE = tl.constexpr(constants.RING_STRIDE)
RANK = tl.constexpr(constants.RANK)
OWN_HEAP = tl.constexpr(constants.OWN_HEAP)
ABORT_AT = tl.constexpr(constants.ABORT_AT)
TIMEOUT_NS = tl.constexpr(constants.TIMEOUT_NS)


class Rings(NamedTuple):
    """The rings of a channel between this rank and its peers, from the sender's or the receiver's side."""

    ranks: Any
    is_rank: Any
    rows: Any
    """Addresses of their first entries."""
    ours: Any
    """The counters that this side advances; they lie at the peers."""
    theirs: Any
    """The counters that the other side advances; they lie here."""
    num_entries: Any
    entry_bytes: Any


class Waiting(NamedTuple):
    """How long this rank waits, and where it writes the outcome if the wait fails."""

    rank: Any
    timeout_ns: Any
    abort: Any
    outcome: Any


@triton.jit
def waiting_of(tables):
    """How long this rank waits, and where it writes the outcome."""
    constants = tables.constants
    return Waiting(
        rank=tl.load(constants + RANK).to(tl.int32),
        timeout_ns=tl.load(constants + TIMEOUT_NS),
        abort=tl.load(constants + OWN_HEAP) + tl.load(constants + ABORT_AT),
        outcome=tables.state,
    )


@triton.jit
def rings_of(
    tables, area, channel, TO_PEERS: tl.constexpr, NUM_RANKS: tl.constexpr, RANK_BLOCK: tl.constexpr
):
    """A channel's rings to the peers (`TO_PEERS`) or from them.

    The entries and tails of rings to peers lie at the peers, and their heads lie here.

    Example:
    On rank 1 of 2, with heaps at 0 and 1024, rows at 96 and 3 entries of 16 bytes: channel 0 has its rings to
    the peers at 144 and 1168, and those from the peers at 1120 and 1168. With tails at 16, heads at 48 and
    strides of 8, it advances the tails at 24 and 1048, and the peers advance the heads at 1072 and 1080.
    """
    constants = tables.constants
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    rank, here = tl.load(constants + RANK), tl.load(constants + OWN_HEAP)
    tail_at, head_at = tl.load(constants + TAIL_AT), tl.load(constants + HEAD_AT)
    stride = tl.load(constants + RING_STRIDE)
    there = tl.load(tables.heaps + ranks, mask=is_rank, other=0)
    if TO_PEERS:
        heaps, ring = there, rank
        ours = there + tail_at + rank * stride
        theirs = here + head_at + ranks * stride
    else:
        heaps, ring = here, ranks
        ours = there + head_at + rank * stride
        theirs = here + tail_at + ranks * stride
    return rings_in(area, ranks, is_rank, heaps, channel * NUM_RANKS + ring, ours, theirs, channel)


@triton.jit
def rings_in(area, ranks, is_rank, heaps, index, ours, theirs, channel):
    """A channel's rings: in each of these heaps that with this index; with the counters of channel 0.

    Example:
    With rows at 96 and 3 entries of 16 bytes, ring 1 in the heap at 1024 begins at 1168; for channel 2 its
    counter is 16 bytes after that of channel 0.
    """
    # Tells the compiler that the size is a multiple of 16.
    entry_bytes = area.entry_bytes.to(tl.int32) // 16 * 16
    ring_bytes = area.ring_rows.to(tl.int64) * entry_bytes
    return Rings(
        ranks=ranks,
        is_rank=is_rank,
        rows=heaps + index * ring_bytes + area.rows_at,
        ours=words_at(ours + 8 * channel),
        theirs=words_at(theirs + 8 * channel),
        num_entries=area.ring_rows.to(tl.int32),
        entry_bytes=entry_bytes,
    )


@triton.jit
def entries_at(rings, rank, counters, numbers):
    """The addresses of the entries that lie `numbers` after the counter of a rank's ring.

    Example:
    With 3 entries of 16 bytes at 1168, a counter at 4 and numbers [0, 1, 2, 3]: [1184, 1200, 1168, 1184].
    """
    next_entry = value_of(counters % rings.num_entries, rings.ranks, rank)
    entries = (next_entry.to(tl.uint32) + numbers.to(tl.uint32)) % rings.num_entries.to(tl.uint32)
    return value_of(rings.rows, rings.ranks, rank) + entries.to(tl.int64) * rings.entry_bytes


@triton.jit
def any_of(conditions):
    """Whether any of a vector's conditions holds."""
    return tl.max(conditions.to(tl.int32), axis=0) > 0


@triton.jit
def value_of(values, ranks, rank):
    """One rank's value out of a vector.

    Example:
    With values [7, 9], rank 1 has 9.
    """
    return tl.sum(tl.where(ranks == rank, values, 0), axis=0)


@triton.jit
def next_channel(channel, num_channels, outcome):
    """The channel that a program serves after this one; `num_channels` or more if there is none.

    Example:
    With 6 programs, 3 of which send, and 8 channels, the program that served channel 1 then serves 4 and 7,
    and no others; after a failure it serves none at all.
    """
    channel += tl.num_programs(0) // 2
    if channel < num_channels:
        # After a failure the abort flag is raised, and all ranks give up.
        channel = tl.where(is_good(outcome), channel, num_channels)
    return channel


@triton.jit
def num_tokens_of(num_channels, num_tokens):
    """The tokens of each channel but the last ones, which may have fewer; at least 1.

    Example:
    3 channels share 7 tokens: 3, 3 and 1.
    """
    return tl.maximum(tl.cdiv(num_tokens, num_channels), 1)


@triton.jit
def lanes(prefixes, rank, channel, num_channels, rings, NUM_RANKS: tl.constexpr):
    """The begin and the end of this rank's rows of a channel, for each peer.

    Example:
    On rank 1, with rank_prefix [[0, 2], [0, 3]] and recv_channel_prefix [[0, 1], [0, 0]]: in channel 0 the
    rows are [0, 1) for peer 0 and [2, 2) (none) for peer 1; in channel 1 they are [1, 2) and [2, 3).
    """
    ranks, is_rank = rings.ranks, rings.is_rank
    by_peer = prefixes.rank_prefix + ranks * NUM_RANKS + rank
    before = tl.load(by_peer - NUM_RANKS, mask=is_rank & (ranks > 0), other=0)
    by_channel = prefixes.recv_channel_prefix + ranks * num_channels + channel
    is_last = channel == num_channels - 1
    next_begin = before + tl.load(by_channel + 1, mask=is_rank & ~is_last, other=0)
    begin = before + tl.load(by_channel, mask=is_rank, other=0)
    return begin, tl.where(is_last, tl.load(by_peer, mask=is_rank, other=0), next_begin)


@triton.jit
def is_good(outcome):
    """Whether nothing has failed so far. Other programs may write the outcome now, but all warps of this
    program read the same value."""
    return load_one(outcome) == 0


@triton.jit
def rows_of_tile(send_head, tokens, is_token, is_wanted, ranks, NUM_RANKS: tl.constexpr):
    """How many rows the tokens of a tile have at each wanted rank, and the first of them.

    At each rank, a token's row follows that of the token before it without a gap.

    Example:
    With send_head [[4, 0], [-1, 1]] for 2 tokens: counts [1, 2], first rows [4, 0].
    """
    at = send_head + tokens[:, None] * NUM_RANKS + ranks[None, :]
    rows = tl.load(at, mask=is_token[:, None] & is_wanted[None, :], other=-1)
    is_row = rows >= 0
    return tl.sum(is_row.to(tl.int32), axis=0), tl.min(tl.where(is_row, rows, 2147483647), axis=0)


@triton.jit
def is_hopeless(deadline, waiting):
    """Whether to stop waiting, because the abort flag is raised. This program raises it when its deadline has
    passed, or when the host reports that a rank is gone.

    Warps read different times, so they do not decide by their own clocks: some would leave a loop while the
    others wait at its barriers. One thread raises the abort flag, and all warps read the same flag.
    """
    abort = words_at(waiting.abort)
    now = nanoseconds()
    flag = abort_of_host(waiting.abort, is_time_to_ask(now, deadline - waiting.timeout_ns))
    is_late = now >= deadline
    store_release(abort, tl.where(is_late, 1 + waiting.rank, flag).to(tl.int64), is_late | (flag != 0))
    return is_aborted(waiting.abort)


@triton.jit
def wait_for_counters(counters, seen, expected, waiting):
    """Spin until every counter has reached its expected value; return the values read last.

    Counters hold at least `seen`; only those for which that is not enough are read. The rank that raised the
    abort flag may have left because it had finished, so counters are read once more after the flag.
    """
    if any_of(seen < expected):
        deadline = nanoseconds() + waiting.timeout_ns
        seen = tl.where(seen < expected, load_acquire(counters, seen < expected), seen)
        is_over = tl.full((), False, tl.int1)
        while any_of(seen < expected) & ~is_over:
            is_over = is_hopeless(deadline, waiting)
            seen = tl.where(seen < expected, load_acquire(counters, seen < expected), seen)
        tl.debug_barrier()
    return seen


@triton.jit
def give_up(is_missing, rings, waiting):
    """Write the outcome that names the rank this rank waited for, unless an outcome is written already; the
    abort flag is raised.

    Example:
    If rank 2 is missing, and this rank itself raised the abort flag, the outcome is 1 (late) + 16 * 2; if
    another rank raised it, the outcome is 3 (stopped) + 16 * 2.
    """
    is_other = is_missing & (rings.ranks != waiting.rank)
    # A rank's own rows are missing only if it also waits for another rank.
    silent = tl.min(tl.where(is_other, rings.ranks, 2147483647), axis=0)
    silent = tl.where(any_of(is_other), silent, waiting.rank)
    raised_by = load_one(words_at(waiting.abort)) - 1
    outcome = tl.where(raised_by == waiting.rank, LATE, STOPPED) + NUM_CODES * silent
    is_news = load_one(waiting.outcome) == 0
    tl.store(waiting.outcome, outcome.to(tl.int64), mask=is_news)


@triton.jit
def num_ready(rings, moved, left, TO_PEERS: tl.constexpr, TILE_TOKENS: tl.constexpr):
    """How many of the rows that are left can be put into each ring, or taken out of it, now: a tile at most.
    `moved` is this side's own counter.

    Example:
    With rings of 3 entries, tails at 4 and heads at 2: the sender has room for 1 of 5 rows, and the receiver
    finds 2 of them.
    """
    is_open = left > 0
    ready = load_acquire(rings.theirs, is_open) - moved
    if TO_PEERS:
        ready += rings.num_entries
    tl.debug_barrier()
    return tl.minimum(tl.minimum(tl.where(is_open, ready, 0), left), TILE_TOKENS).to(tl.int32)


@triton.jit
def keep_waiting(is_open, is_over, deadline, rings, waiting):
    """Which rings are still open after nothing was ready in them, and whether the wait is over.

    The counters are read once more after it is over: then all rings that are still open are given up.
    """
    if is_over:
        give_up(is_open, rings, waiting)
        is_open = is_open & False
    else:
        is_over = is_hopeless(deadline, waiting)
    return is_open, is_over


@triton.jit
def copy_rows(source, target, is_row, row_words, TILE_WORDS: tl.constexpr, STAGES: tl.constexpr):
    """Copy rows of words from `source` to `target` addresses, with STAGES - 1 pieces in flight."""
    for start in tl.range(0, row_words, TILE_WORDS, num_stages=STAGES):
        words = start + tl.arange(0, TILE_WORDS)
        mask = is_row[:, None] & (words < row_words)[None, :]
        values = tl.load(row_words_at(source)[:, None] + words[None, :], mask=mask)
        tl.store(row_words_at(target)[:, None] + words[None, :], values, mask=mask)


# Values that vary from call to call must not be compiled in.
@triton.jit(do_not_specialize=["results", "area", "beside", "num_tokens", "experts_per_rank"])
def dispatch_through_rings(
    payload: Payload,
    scales: Scales,
    send_head,
    tables: Tables,
    results: RingResults,
    prefixes: Prefixes,
    area: RingArea,
    beside: Beside,
    num_tokens,
    row_words,
    experts_per_rank,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Send this rank's tokens to all receivers without a window; receive rows if it has no window itself.

    `targets[r]` begins with 0 where rank r has no window, and ends with the number of rows that it has room
    for. `results` are the addresses of this rank's x, source indices, ids, weights and scales, 0 for those
    that are absent. Ids and weights are those that `send_to_windows` writes. The kernel does
    nothing if the outcome so far, the first word of the call's state, is not 0, or if no rows go through
    rings.

    x is read as words of 4 bytes; ids travel as int32. `SCALE_BLOCK` and `TOPK_BLOCK` are powers of two that
    hold a token's scales and choices; 0 where there are none.

    Example:
    With one channel, rings of 3 entries whose counters are at 2, and no windows, rank 0 has send_head
    [[0, -1], [1, 0]]. The row of its token 1 goes into entry 2 of the ring at rank 1, whose tail becomes 3;
    rank 1 makes it row 0 of its result, with source index 1, and the head at rank 0 becomes 3. Rank 0's rows
    to itself go through entries 2 and 0, and both counters become 4.
    """
    channel = tl.program_id(0) // 2
    num_channels = area.num_channels.to(tl.int32)
    tokens_per_channel = num_tokens_of(num_channels, num_tokens)
    waiting = waiting_of(tables)
    state, rank = tables.state, waiting.rank
    own_target = tables.targets + TARGET_WORDS * rank
    # Tells the compiler that a row is a multiple of 4 words.
    row_words = row_words // 4 * 4
    if is_good(state) & (tl.load(state + USES_RINGS) != 0):
        tl.store(state + WAITED_FOR, TAIL_AT)
        if tl.program_id(0) % 2 == 0:
            while channel < num_channels:
                first_token = channel * tokens_per_channel
                send_tokens(
                    payload,
                    scales,
                    send_head,
                    tables.targets,
                    rings_of(tables, area, channel, True, NUM_RANKS, RANK_BLOCK),
                    waiting,
                    beside,
                    first_token,
                    tl.minimum(first_token + tokens_per_channel, num_tokens),
                    row_words,
                    experts_per_rank,
                    NUM_RANKS,
                    SCALE_BLOCK,
                    TOPK_BLOCK,
                    TILE_TOKENS,
                    TILE_WORDS,
                    STAGES,
                )
                channel = next_channel(channel, num_channels, state)
        elif tl.load(own_target) == 0:
            while channel < num_channels:
                rings = rings_of(tables, area, channel, False, NUM_RANKS, RANK_BLOCK)
                begin, end = lanes(prefixes, rank, channel, num_channels, rings, NUM_RANKS)
                take_rows(
                    results,
                    tl.load(own_target + TARGET_ROWS),
                    begin,
                    end,
                    rings,
                    waiting,
                    beside,
                    row_words,
                    NUM_RANKS,
                    SCALE_BLOCK,
                    TOPK_BLOCK,
                    TILE_TOKENS,
                    TILE_WORDS,
                    STAGES,
                )
                channel = next_channel(channel, num_channels, state)


@triton.jit
def send_tokens(
    payload,
    scales,
    send_head,
    targets,
    rings,
    waiting,
    beside,
    token,
    end_token,
    row_words,
    experts_per_rank,
    NUM_RANKS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Send the tokens of a channel, tile by tile: each row is read once and written to all its rings."""
    ranks = rings.ranks
    by_ring = rings.is_rank & (tl.load(targets + TARGET_WORDS * ranks, mask=rings.is_rank, other=1) == 0)
    sent = tl.load(rings.ours, mask=by_ring, other=0, volatile=True)
    taken = tl.zeros_like(sent)
    end_token = tl.where(any_of(by_ring), end_token, token)
    while token < end_token:
        tokens = (token + tl.arange(0, TILE_TOKENS)).to(tl.int64)
        is_token = tokens < end_token
        # Small loads are issued first: they complete while the program waits for room.
        carried = carried_by_tokens(payload, scales, beside, tokens, is_token, SCALE_BLOCK, TOPK_BLOCK)
        counts, first_rows = rows_of_tile(send_head, tokens, is_token, by_ring, ranks, NUM_RANKS)
        expected = tl.where(counts > 0, sent + counts - rings.num_entries, 0)
        taken = wait_for_counters(rings.theirs, taken, expected, waiting)
        if any_of(taken < expected):
            give_up(taken < expected, rings, waiting)
            token = end_token
        else:
            addresses = tl.tuple(())
            is_read = is_token & False
            for receiver in tl.static_range(NUM_RANKS):
                rows = tl.load(send_head + tokens * NUM_RANKS + receiver, mask=is_token, other=-1)
                is_sent = (rows >= 0) & (value_of(counts, ranks, receiver) > 0)
                numbers = rows - value_of(first_rows, ranks, receiver)
                target = tl.where(is_sent, entries_at(rings, receiver, sent, numbers), 0)
                tl.store(int32_at(target + beside.meta_at), tokens.to(tl.int32), mask=is_sent)
                local = carried_to(carried, receiver, experts_per_rank)
                store_in_entries(local, target, is_sent, beside, SCALE_BLOCK, TOPK_BLOCK)
                addresses += (target,)
                is_read |= is_sent
            for start in tl.range(0, row_words, TILE_WORDS, num_stages=STAGES):
                words = start + tl.arange(0, TILE_WORDS)
                is_word = (words < row_words)[None, :]
                source = payload.x + tokens[:, None] * row_words + words[None, :]
                values = tl.load(source, mask=is_read[:, None] & is_word)
                for receiver in tl.static_range(NUM_RANKS):
                    row = row_words_at(addresses[receiver])[:, None] + words[None, :]
                    tl.store(row, values, mask=(addresses[receiver] != 0)[:, None] & is_word)
            sent += counts
            store_release(rings.ours, sent, counts > 0)
            token += TILE_TOKENS


@triton.jit
def take_rows(
    results,
    num_rows,
    begin,
    end,
    rings,
    waiting,
    beside,
    row_words,
    NUM_RANKS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Take the rows of a channel from all rings as they arrive: those of each peer become rows [begin, end).

    Rows from `num_rows` on are not written.
    """
    ranks = rings.ranks
    numbers = tl.arange(0, TILE_TOKENS)
    taken = tl.load(rings.ours, mask=rings.is_rank, other=0, volatile=True)
    deadline = nanoseconds() + waiting.timeout_ns
    is_over = tl.full((), False, tl.int1)
    is_open = begin < end
    while any_of(is_open):
        counts = num_ready(rings, taken, end - begin, False, TILE_TOKENS)
        if any_of(counts > 0):
            for sender in range(NUM_RANKS):
                count = value_of(counts, ranks, sender)
                if count > 0:
                    rows = value_of(begin, ranks, sender).to(tl.int64) + numbers
                    is_row = (numbers < count) & (rows < num_rows)
                    entry = entries_at(rings, sender, taken, numbers)
                    sources = tl.load(int32_at(entry + beside.meta_at), mask=is_row)
                    carried = carried_in_entries(entry, beside, is_row, SCALE_BLOCK, TOPK_BLOCK)
                    x_at = results.x + rows * (4 * row_words)
                    copy_rows(entry, x_at, is_row, row_words, TILE_WORDS, STAGES)
                    tl.store(int32_at(results.sources) + rows, sources, mask=is_row & (results.sources != 0))
                    store_in_results(
                        carried,
                        rows,
                        is_row,
                        results.topk_idx,
                        results.topk_weights,
                        results.scales,
                        beside,
                        SCALE_BLOCK,
                        TOPK_BLOCK,
                    )
            begin += counts
            taken += counts
            store_release(rings.ours, taken, counts > 0)
            deadline = nanoseconds() + waiting.timeout_ns
            is_open = begin < end
        else:
            is_open, is_over = keep_waiting(is_open, is_over, deadline, rings, waiting)


# Values that vary from call to call must not be compiled in.
@triton.jit(do_not_specialize=["area", "beside", "num_tokens"])
def combine_through_rings(
    outputs: Outputs,
    out: Sums,
    biases: Biases,
    send_head,
    tables: Tables,
    prefixes: Prefixes,
    area: RingArea,
    beside: Beside,
    num_tokens,
    hidden,
    DTYPE: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    IN_HARDWARE: tl.constexpr = True,
    ORDERED: tl.constexpr = False,
):
    """Push this rank's rows back to their sources, unless they lie in a window, and sum its own tokens' rows.

    `targets[r]` holds the address of rank r's rows, or 0 if they come through rings, the address of their
    weights, and their number. The rows of a channel arrive in the order of its tokens. Sums are in float32,
    ranks ascending, or in the order of `out.order` if ORDERED is set, starting from the sum of the biases, or
    from the first one, or from +0.0. Top-k weights are summed likewise, per choice, without bias. A row that
    a window does not have is left out: BAD_ROWS is
    then 5 (bad handle) + 16 * its rank. The kernel does nothing if the outcome so far, the first word of the
    call's state, is not 0, or if no rows go through rings.

    x is read as words of 4 bytes, out and biases as their bits (uint16) or as float32. Rows are pushed in
    tiles of `TILE_TOKENS` x `TILE_WORDS`, and summed in tiles of `TILE_TOKENS` x `TILE_VALUES`. `TOPK_BLOCK`
    is a power of two that holds a token's choices; 0 where there are none.

    Example:
    With one channel, rings of 3 entries whose counters are at 2, and no windows, rank 0 has send_head
    [[0, -1], [1, 0]]. Its first row of out is the row that it put into entry 2 of its ring to itself; the
    second is entry 0 of that ring plus entry 2 of the ring from rank 1. The heads become 4 and 3.
    """
    tl.static_assert(TILE_WORDS != TILE_VALUES, "tiles of one shape get one layout, which suits one of them")
    channel = tl.program_id(0) // 2
    num_channels = area.num_channels.to(tl.int32)
    tokens_per_channel = num_tokens_of(num_channels, num_tokens)
    waiting = waiting_of(tables)
    state, rank = tables.state, waiting.rank
    own_target = tables.targets + TARGET_WORDS * rank
    # Tells the compiler that a row is a multiple of 4 words.
    row_words = hidden // 4 * 4 if DTYPE == FP32 else hidden // 8 * 4
    if is_good(state) & (tl.load(state + USES_RINGS) != 0):
        tl.store(state + WAITED_FOR, TAIL_AT)
        if tl.program_id(0) % 2 == 0:
            if tl.load(own_target) == 0:
                while channel < num_channels:
                    rings = rings_of(tables, area, channel, True, NUM_RANKS, RANK_BLOCK)
                    begin, end = lanes(prefixes, rank, channel, num_channels, rings, NUM_RANKS)
                    push_rows(
                        outputs,
                        tl.load(own_target + TARGET_ROWS),
                        begin,
                        end,
                        rings,
                        waiting,
                        beside,
                        row_words,
                        NUM_RANKS,
                        TOPK_BLOCK,
                        TILE_TOKENS,
                        TILE_WORDS,
                        STAGES,
                    )
                    channel = next_channel(channel, num_channels, state)
        else:
            while channel < num_channels:
                first_token = channel * tokens_per_channel
                sum_tokens(
                    outputs.x,
                    out,
                    biases,
                    send_head,
                    tables.targets,
                    rings_of(tables, area, channel, False, NUM_RANKS, RANK_BLOCK),
                    waiting,
                    beside,
                    first_token,
                    tl.minimum(first_token + tokens_per_channel, num_tokens),
                    row_words,
                    DTYPE,
                    NUM_BIASES,
                    NUM_RANKS,
                    TOPK_BLOCK,
                    TILE_TOKENS,
                    TILE_VALUES,
                    IN_HARDWARE,
                    ORDERED,
                )
                channel = next_channel(channel, num_channels, state)


@triton.jit
def push_rows(
    outputs,
    num_rows,
    begin,
    end,
    rings,
    waiting,
    beside,
    row_words,
    NUM_RANKS: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Push the rows [begin, end) of a channel to each peer, as its ring has room.

    Rows from `num_rows` on are not read: the contents of their entries in the ring are then undefined.
    """
    ranks = rings.ranks
    numbers = tl.arange(0, TILE_TOKENS)
    sent = tl.load(rings.ours, mask=rings.is_rank, other=0, volatile=True)
    deadline = nanoseconds() + waiting.timeout_ns
    is_over = tl.full((), False, tl.int1)
    is_open = begin < end
    while any_of(is_open):
        counts = num_ready(rings, sent, end - begin, True, TILE_TOKENS)
        if any_of(counts > 0):
            for receiver in range(NUM_RANKS):
                count = value_of(counts, ranks, receiver)
                if count > 0:
                    rows = value_of(begin, ranks, receiver).to(tl.int64) + numbers
                    is_row = (numbers < count) & (rows < num_rows)
                    entry = entries_at(rings, receiver, sent, numbers)
                    choices, is_choice = choices_of(is_row, beside, TOPK_BLOCK)
                    if TOPK_BLOCK:
                        index = rows[:, None] * beside.num_topk + choices[None, :]
                        weights = tl.load(outputs.topk_weights + index, mask=is_choice)
                    source = outputs.x.to(tl.int64) + rows * (4 * row_words)
                    copy_rows(source, entry, is_row, row_words, TILE_WORDS, STAGES)
                    if TOPK_BLOCK:
                        to = float32_at(entry + beside.weights_at)[:, None] + choices[None, :]
                        tl.store(to, weights, mask=is_choice)
            begin += counts
            sent += counts
            store_release(rings.ours, sent, counts > 0)
            deadline = nanoseconds() + waiting.timeout_ns
            is_open = begin < end
        else:
            is_open, is_over = keep_waiting(is_open, is_over, deadline, rings, waiting)


@triton.jit
def of_ranks(by_rank, ranks, NUM_RANKS: tl.constexpr):
    """What the tuple `by_rank` has for each of some ranks.

    Example:
    Of ([1, 2], [3, 4]), the ranks [1, 0] have [3, 2].
    """
    found = by_rank[0]
    for rank in tl.static_range(1, NUM_RANKS):
        found = tl.where(ranks == rank, by_rank[rank], found)
    return found


@triton.jit
def sum_tokens(
    x,
    out,
    biases,
    send_head,
    targets,
    rings,
    waiting,
    beside,
    token,
    end_token,
    row_words,
    DTYPE: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    IN_HARDWARE: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Add up the rows of a channel's tokens, tile by tile, reading them from windows or from rings.

    This rank's own rows are read from `x`, unless they come through a ring.
    """
    ranks, is_rank = rings.ranks, rings.is_rank
    hidden = row_words if DTYPE == FP32 else 2 * row_words
    target = targets + TARGET_WORDS * ranks
    windows = tl.load(target, mask=is_rank, other=1)
    weight_windows = tl.load(target + TARGET_WEIGHTS, mask=is_rank, other=0)
    num_rows = tl.load(target + TARGET_ROWS, mask=is_rank, other=0)
    # A staged window lacks this rank's own rows (`copy_for_peers`): they are read where they are. Without
    # rows, x has no address.
    is_own = (ranks == waiting.rank) & (windows != 0) & (num_rows > 0)
    windows = tl.where(is_own, x.to(tl.int64), windows)
    by_ring = windows == 0
    choices = tl.arange(0, TOPK_BLOCK if TOPK_BLOCK else 1)
    taken = tl.load(rings.ours, mask=by_ring, other=0, volatile=True)
    arrived = tl.zeros_like(taken)
    bad = tl.full((), GOOD, tl.int32)
    while token < end_token:
        tokens = (token + tl.arange(0, TILE_TOKENS)).to(tl.int64)
        is_token = tokens < end_token
        counts, first_rows = rows_of_tile(send_head, tokens, is_token, by_ring, ranks, NUM_RANKS)
        expected = tl.where(counts > 0, taken + counts, 0)
        arrived = wait_for_counters(rings.theirs, arrived, expected, waiting)
        if any_of(arrived < expected):
            give_up(arrived < expected, rings, waiting)
            token = end_token
        else:
            sources = tl.tuple(())
            weights = tl.tuple(())
            for rank in tl.static_range(NUM_RANKS):
                rows = tl.load(send_head + tokens * NUM_RANKS + rank, mask=is_token, other=-1)
                window = value_of(windows, ranks, rank)
                is_pushed = (rows >= 0) & (window == 0)
                is_pulled = (rows >= 0) & (window != 0) & (rows < value_of(num_rows, ranks, rank))
                is_beyond = any_of((rows >= 0) & ~is_pushed & ~is_pulled)
                bad = tl.where(is_beyond, BAD_HANDLE + NUM_CODES * rank, bad)
                entry = entries_at(rings, rank, taken, rows - value_of(first_rows, ranks, rank))
                rows = rows.to(tl.int64)
                source = tl.where(is_pushed, entry, window + rows * (4 * row_words))
                sources += (tl.where(is_pushed | is_pulled, source, 0),)
                if TOPK_BLOCK:
                    in_window = value_of(weight_windows, ranks, rank) + rows * (4 * beside.num_topk)
                    source = float32_at(tl.where(is_pushed, entry + beside.weights_at, in_window))
                    mask = (is_pushed | is_pulled)[:, None] & (choices < beside.num_topk)[None, :]
                    weights += (tl.load(source[:, None] + choices[None, :], mask=mask, other=0.0),)
            if ORDERED:
                sources_by_rank = sources
                weights_by_rank = weights
                sources = tl.tuple(())
                weights = tl.tuple(())
                for place in tl.static_range(NUM_RANKS):
                    next_ranks = ranks_at(out.order, tokens, is_token, place, NUM_RANKS)
                    sources += (of_ranks(sources_by_rank, next_ranks, NUM_RANKS),)
                    if TOPK_BLOCK:
                        weights += (of_ranks(weights_by_rank, next_ranks[:, None], NUM_RANKS),)
            for start in tl.range(0, hidden, TILE_VALUES, num_stages=1):
                columns = start + tl.arange(0, TILE_VALUES)
                is_column = (columns < hidden)[None, :]
                is_value = is_token[:, None] & is_column
                index = tokens[:, None] * hidden + columns[None, :]
                sums = sum_of_biases(biases, index, is_value, DTYPE, NUM_BIASES)
                for rank in tl.static_range(NUM_RANKS):
                    values = values_at(sources[rank], DTYPE)[:, None] + columns[None, :]
                    is_there = (sources[rank] != 0)[:, None] & is_column
                    sums += load_rows(values, is_there, DTYPE, NUM_BIASES == 0)
                store_rows(out.x + index, sums, is_value, DTYPE, IN_HARDWARE)
            if TOPK_BLOCK:
                sums = tl.zeros((TILE_TOKENS, TOPK_BLOCK), tl.float32)
                for rank in tl.static_range(NUM_RANKS):
                    sums += weights[rank]
                to = out.topk_weights + tokens[:, None] * beside.num_topk + choices[None, :]
                tl.store(to, sums, mask=is_token[:, None] & (choices < beside.num_topk)[None, :])
            taken += counts
            store_release(rings.ours, taken, counts > 0)
            token += TILE_TOKENS
    # Not written to the outcome: programs decide by it whether to begin, and all of them must take part.
    tl.store(waiting.outcome + BAD_ROWS, bad.to(tl.int64), mask=bad != GOOD)
