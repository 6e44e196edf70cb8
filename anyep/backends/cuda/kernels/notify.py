"""Notify on the device: each rank posts a notify message to every peer and waits for all of theirs first.

A notify message lies in the receiver's mailbox as 64-bit words. Its first word is the call's number, which is
stored last. The number lives in the heap and is advanced here, which lets a captured graph be replayed. The
values that are constant for a Buffer (`constants`), and those that a call leaves for its later kernels
(`state`), are tables; see anyep/backends/cuda/constants.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep import layout
from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.atomics import (
    is_aborted,
    load_acquire,
    store_release,
    tell_host,
    wait_for_all,
)
from anyep.backends.cuda.kernels.counting import LAST_PLACE, wrong_word
from anyep.backends.cuda.kernels.digests import mixed_channels, mixed_rows
from anyep.backends.cuda.kernels.groups import Counts, HostWords, Prefixes, Tables
from anyep.backends.cuda.kernels.links import close_messages, raise_flags
from anyep.backends.cuda.kernels.pointers import words_at
from anyep.core import outcomes
from anyep.core.headers import MAX_OFFERS as MOST_OFFERS
from anyep.core.headers import REFUSED_BY_COUNTS as BY_COUNTS
from anyep.core.headers import REFUSED_BY_IDS as BY_IDS
from anyep.core.headers import Field

NO_PLACE = tl.constexpr(2**63 - 1)
GOOD = tl.constexpr(outcomes.GOOD)
LATE = tl.constexpr(outcomes.LATE)
DIFFERENT = tl.constexpr(outcomes.DIFFERENT)
STOPPED = tl.constexpr(outcomes.STOPPED)
TOO_MANY = tl.constexpr(outcomes.TOO_MANY)
NO_WINDOW = tl.constexpr(outcomes.NO_WINDOW)
BAD_HANDLE = tl.constexpr(outcomes.BAD_HANDLE)
OUT = tl.constexpr(outcomes.OUT)
NUM_CODES = tl.constexpr(outcomes.NUM_CODES)

RANK = tl.constexpr(words_of.RANK)
OWN_HEAP = tl.constexpr(words_of.OWN_HEAP)
TIMEOUT_NS = tl.constexpr(words_of.TIMEOUT_NS)
GIVEN_UP_AT = tl.constexpr(words_of.GIVEN_UP_AT)
ABORT_AT = tl.constexpr(words_of.ABORT_AT)
NUMBER_AT = tl.constexpr(words_of.NUMBER_AT)
MAILBOX_AT = tl.constexpr(words_of.MAILBOX_AT)
BOX_STRIDE = tl.constexpr(words_of.BOX_STRIDE)
NOTIFY_STRIDE = tl.constexpr(words_of.NOTIFY_STRIDE)
FLAG_STRIDE = tl.constexpr(words_of.FLAG_STRIDE)
REPORT = tl.constexpr(words_of.REPORT)

OUTCOME = tl.constexpr(words_of.OUTCOME)
BAD_ROWS = tl.constexpr(words_of.BAD_ROWS)
NUMBER = tl.constexpr(words_of.NUMBER)
NUM_ROWS = tl.constexpr(words_of.NUM_ROWS)
USES_RINGS = tl.constexpr(words_of.USES_RINGS)
IS_REPORTED = tl.constexpr(words_of.IS_REPORTED)
IS_WRONG = tl.constexpr(words_of.IS_WRONG)
WAITED_FOR = tl.constexpr(words_of.WAITED_FOR)
KIND = tl.constexpr(words_of.KIND)

NUM_REPORTS = tl.constexpr(words_of.NUM_REPORTS)
NUM_READ = tl.constexpr(words_of.NUM_READ)
REPORTED_OUTCOME = tl.constexpr(words_of.REPORTED_OUTCOME)
REPORTED_NUMBER = tl.constexpr(words_of.REPORTED_NUMBER)
REPORTED_KIND = tl.constexpr(words_of.REPORTED_KIND)
REPORTED_WAIT = tl.constexpr(words_of.REPORTED_WAIT)
REPORTED_WRONG = tl.constexpr(words_of.REPORTED_WRONG)
REPORTED_VALUE = tl.constexpr(words_of.REPORTED_VALUE)
WRONG_SHIFT = tl.constexpr(words_of.WRONG_SHIFT)
WRONG_ID = tl.constexpr(words_of.WRONG_ID)
OTHER_ROUTING = tl.constexpr(words_of.OTHER_ROUTING)
REPORTED_HEADERS = tl.constexpr(words_of.REPORTED_HEADERS)

TARGET_WORDS = tl.constexpr(words_of.TARGET_WORDS)
TARGET_ROWS = tl.constexpr(words_of.TARGET_ROWS)
MAX_WINDOW_BLOCKS = tl.constexpr(words_of.MAX_WINDOW_BLOCKS)
WINDOW_BLOCK_BITS = tl.constexpr(words_of.WINDOW_BLOCK_BITS)
OFFSET_MASK = tl.constexpr((1 << words_of.WINDOW_BLOCK_BITS) - 1)
TOTAL_OUTCOME = tl.constexpr(words_of.TOTAL_OUTCOME)
TOTAL_ROWS = tl.constexpr(words_of.TOTAL_ROWS)
TOTAL_USES_RINGS = tl.constexpr(words_of.TOTAL_USES_RINGS)
TOTAL_RELAYED = tl.constexpr(words_of.TOTAL_RELAYED)
TOTAL_ALL_WAIT = tl.constexpr(words_of.TOTAL_ALL_WAIT)
TOTAL_BY_EXPERT = tl.constexpr(words_of.TOTAL_BY_EXPERT)

KIND_WORD = tl.constexpr(int(Field.KIND))
REFUSED = tl.constexpr(int(Field.REFUSED))
ROUTING = tl.constexpr(int(Field.ROUTING))
RESULT_ROWS = tl.constexpr(int(Field.RESULT_ROWS))
X_OFFSET = tl.constexpr(int(Field.X_OFFSET))
WEIGHTS_OFFSET = tl.constexpr(int(Field.WEIGHTS_OFFSET))
ROW_BYTES = tl.constexpr(int(Field.ROW_BYTES))
TOPK = tl.constexpr(int(Field.TOPK))
SCALES = tl.constexpr(int(Field.SCALES))
NUM_OFFERS = tl.constexpr(int(Field.NUM_OFFERS))
OFFERS = tl.constexpr(int(Field.OFFERS))
MAX_OFFERS = tl.constexpr(MOST_OFFERS)
REFUSED_BY_COUNTS = tl.constexpr(BY_COUNTS)
REFUSED_BY_IDS = tl.constexpr(BY_IDS)
NUM_WORDS = tl.constexpr(layout.NOTIFY_HEADER_BYTES // layout.COUNTER_BYTES)
HEADER_BYTES = tl.constexpr(layout.NOTIFY_HEADER_BYTES)


@triton.jit
def word_of(headers, is_rank, WORD: tl.constexpr):
    """One word of every header.

    Example:
        Word 1 of the headers [1, 2] and [3, 4] is [2, 4].
    """
    return tl.load(headers + WORD, mask=is_rank, other=0, volatile=True)


@triton.jit
def first_bad(bad, ranks, is_rank, RANK_BLOCK: tl.constexpr):
    """The outcome of the first rank where something went wrong; 0 if nothing did.

    Example:
        The codes [0, 1, 2] give 1 + 16 * 1.
    """
    first = tl.min(tl.where(is_rank & (bad > 0), ranks, RANK_BLOCK), axis=0)
    what = tl.sum(tl.where(ranks == first, bad, 0), axis=0)
    return tl.where(first < RANK_BLOCK, what + NUM_CODES * first, 0).to(tl.int64)


@triton.jit
def why_not_there(seen, expected, abort, constants, heaps, ranks, is_rank):
    """For each flag that does not have the expected value, the reason why the wait for it ended.

    If there is such a flag, this rank gives up and tells every rank.

    Example:
        With 5 expected, flags [5, 4, 6] and a raised abort flag, the result is [0, 3, 3] (stopped); without
        the abort flag, the entry of rank 1 is 1 (late). Rank 2 has skipped this call.
    """
    bad = tl.full(seen.shape, GOOD, tl.int32)
    if tl.max((seen != expected).to(tl.int32), axis=0) > 0:
        why = tl.where(is_aborted(abort) | (seen > expected), STOPPED, LATE)
        bad = tl.where(seen != expected, why, GOOD)
        stop_everyone(constants, heaps, ranks, is_rank)
    return bad


@triton.jit
def stop_everyone(constants, heaps, ranks, is_rank):
    """Tell all ranks, including this one, to stop waiting: this rank gives up."""
    rank = tl.load(constants + RANK)
    there = tl.load(heaps + ranks, mask=is_rank, other=0)
    given_up = there + tl.load(constants + GIVEN_UP_AT) + rank * tl.load(constants + FLAG_STRIDE)
    raise_flags(heaps, given_up, 1, ranks, is_rank)
    abort = there + tl.load(constants + ABORT_AT)
    # A flag that is up may name the rank that is to blame.
    is_down = load_acquire(words_at(abort), is_rank) == 0
    raise_flags(heaps, abort, rank + 1, ranks, is_rank & is_down)


@triton.jit
def has_given_up(constants):
    """Whether this rank gave up in an earlier call, in a kernel or on its host; if so, it takes no part."""
    given_up = tl.load(constants + GIVEN_UP_AT) + tl.load(constants + RANK) * tl.load(constants + FLAG_STRIDE)
    return tl.load(words_at(tl.load(constants + OWN_HEAP) + given_up)) != 0


@triton.jit
def report(constants, state, outcome):
    """Report the outcome to the host, once per call, unless the host has not yet read the previous report."""
    if outcome != 0:  # noqa: SIM102 - what is not needed is not to be loaded
        if tl.load(state + IS_REPORTED) == 0:
            words = words_at(tl.load(constants + REPORT))
            num_reports = tl.load(words + NUM_REPORTS, volatile=True)
            if num_reports == tl.load(words + NUM_READ, volatile=True):
                tl.store(words + REPORTED_OUTCOME, outcome)
                tl.store(words + REPORTED_NUMBER, tl.load(state + NUMBER))
                tl.store(words + REPORTED_KIND, tl.load(state + KIND))
                tl.store(words + REPORTED_WAIT, tl.load(state + WAITED_FOR))
                tell_host(words + NUM_REPORTS, num_reports + 1)
            tl.store(state + IS_REPORTED, 1)


@triton.jit
def outcome_so_far(state):
    """The outcome up to now, once all programs that look for bad rows are done."""
    outcome = tl.load(state + OUTCOME, volatile=True)
    return tl.where(outcome == 0, tl.load(state + BAD_ROWS, volatile=True), outcome)


@triton.jit
def checksum(routing, ranks, is_rank, NUM_RANKS: tl.constexpr):
    """A number that is equal for equal prefix matrices, and almost never for different ones."""
    is_pair = is_rank[:, None] & is_rank[None, :]
    index = ranks[:, None] * NUM_RANKS + ranks[None, :]
    prefix = tl.load(routing + index, mask=is_pair, other=0).to(tl.int64)
    # Different odd factors: a plain sum would not detect two entries that changed places.
    mixed = (prefix + 1) * (index.to(tl.int64) * 2654435761 + 40503)
    return tl.sum(tl.sum(tl.where(is_pair, mixed & 0xFFFFFFFFFFFF, 0), axis=1), axis=0) & 0xFFFFFFFF


@triton.jit
def address_in_window(bases, ranks, is_rank, offsets):
    """The address here of an offset (>= 0) in each rank's windows; its upper bits name a block of windows."""
    block = tl.maximum(offsets, 0) >> WINDOW_BLOCK_BITS
    base = tl.load(bases + ranks * MAX_WINDOW_BLOCKS + block, mask=is_rank, other=0)
    return base + (offsets & OFFSET_MASK)


@triton.jit
def aligned(num_bytes):
    """Round up to a multiple of 128.

    Example:
        130 gives 256.
    """
    return (num_bytes + 127) // 128 * 128


@triton.jit
def bytes_of_window(rows, row_bytes, num_topk, num_scales, SOURCE_BYTES: tl.constexpr):
    """The number of bytes that the results of `rows` rows take; `SOURCE_BYTES` are kept about each origin.

    Example:
        3 rows of 64 bytes without top-k and scales take 256 + 128.
    """
    parts = aligned(rows * row_bytes) + aligned(rows * SOURCE_BYTES) + aligned(rows * num_topk * 8)
    return tl.maximum(parts + aligned(rows * num_topk * 4) + aligned(rows * num_scales * 4), 128)


@triton.jit
def write_targets(targets, place, rows, row_bytes, num_topk, ranks, mask, SOURCE_BYTES: tl.constexpr):
    """Store where each receiver's results lie: side by side from `place`, the window; 0 is no window."""
    has_target = place != 0
    table = targets + ranks * TARGET_WORDS
    tl.store(table, place, mask=mask)
    place += aligned(rows * row_bytes)
    tl.store(table + 1, tl.where(has_target, place, 0), mask=mask)
    place += aligned(rows * SOURCE_BYTES)
    tl.store(table + 2, tl.where(has_target, place, 0), mask=mask)
    place += aligned(rows * num_topk * 8)
    tl.store(table + 3, tl.where(has_target, place, 0), mask=mask)
    place += aligned(rows * num_topk * 4)
    tl.store(table + 4, tl.where(has_target, place, 0), mask=mask)
    tl.store(table + TARGET_ROWS, rows, mask=mask)


@triton.jit
def choose_windows(headers, rows, ranks, is_rank, bases, targets, SOURCE_BYTES: tl.constexpr):
    """Find where each receiver's results lie: in the first of its offers that is large enough, as on the CPU.

    Returns whether each receiver has a place.

    Example:
        A receiver of 3 rows of 64 bytes (256 + 128 bytes) with the offers (0, 256) and (512, 1024) in windows
        at 4096 has the places [4608, 4864, 4992, 4992, 4992] and 3 rows. A receiver without a large enough
        offer has [0, 0, 0, 0, 0].
    """
    row_bytes, num_topk = word_of(headers, is_rank, ROW_BYTES), word_of(headers, is_rank, TOPK)
    num_scales, num_offers = word_of(headers, is_rank, SCALES), word_of(headers, is_rank, NUM_OFFERS)
    needed = bytes_of_window(rows, row_bytes, num_topk, num_scales, SOURCE_BYTES)
    chosen = tl.full(rows.shape, -1, tl.int64)
    for offer in tl.static_range(MAX_OFFERS):
        offset = word_of(headers, is_rank, OFFERS + 2 * offer)
        fits = (offer < num_offers) & (word_of(headers, is_rank, OFFERS + 2 * offer + 1) >= needed)
        chosen = tl.where((chosen < 0) & fits, offset, chosen)
    has_target = chosen >= 0
    place = tl.where(has_target, address_in_window(bases, ranks, is_rank, chosen), 0)
    write_targets(targets, place, rows, row_bytes, num_topk, ranks, is_rank, SOURCE_BYTES)
    return has_target


@triton.jit(do_not_specialize=["offset", "row_bytes", "num_topk"])
def place_in_new_block(
    bases,
    state,
    targets,
    offset: tl.int64,
    row_bytes: tl.int64,
    num_topk: tl.int64,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SOURCE_BYTES: tl.constexpr,
):
    """Give every receiver without a window one at `offset`, the start of a block that all ranks just added.

    One program. After it, no rows go through rings.
    """
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    has_none = is_rank & (tl.load(targets + ranks * TARGET_WORDS, mask=is_rank, other=1) == 0)
    rows = tl.load(targets + ranks * TARGET_WORDS + TARGET_ROWS, mask=is_rank, other=0)
    place = address_in_window(bases, ranks, is_rank, tl.zeros((RANK_BLOCK,), tl.int64) + offset)
    write_targets(targets, place, rows, row_bytes, num_topk, ranks, has_none, SOURCE_BYTES)
    tl.store(state + USES_RINGS, 0)


@triton.jit
def find_outputs(headers, rows, ranks, is_rank, bases, targets):
    """Find where each rank's rows and their weights lie for a combine; 0 where they are not in a window."""
    x_offset, weights_offset = word_of(headers, is_rank, X_OFFSET), word_of(headers, is_rank, WEIGHTS_OFFSET)
    has_target = x_offset >= 0
    x = address_in_window(bases, ranks, is_rank, x_offset)
    weights = address_in_window(bases, ranks, is_rank, weights_offset)
    table = targets + ranks * TARGET_WORDS
    tl.store(table, tl.where(has_target, x, 0), mask=is_rank)
    tl.store(table + 3, tl.where(has_target & (weights_offset >= 0), weights, 0), mask=is_rank)
    tl.store(table + TARGET_ROWS, rows, mask=is_rank)
    return has_target


@triton.jit
def post_counts(
    there,
    counts,
    channel_counts,
    num_channels,
    local_experts,
    ranks,
    is_rank,
    NUM_RANKS: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
):
    """Add this rank's counts to its notify messages.

    These are the rows to each rank, the rows to the peer by channel, and the tokens for the peer's experts;
    between nodes also the tokens for each node.

    Example:
        With counts [3, 4] by rank and [9, 8, 7, 6] by expert, and channel_counts [[1, 2], [4, 0]], peer 1
        gets 3, 4, 4, 0, 7 and 6.
    """
    words = (there + HEADER_BYTES).to(tl.pointer_type(tl.int32))
    is_count = is_rank[:, None] & is_rank[None, :]
    row = tl.load(counts.by_rank + ranks, mask=is_rank, other=0)
    tl.store(
        words[:, None] + ranks[None, :],
        tl.broadcast_to(row[None, :], (ranks.shape[0], ranks.shape[0])),
        mask=is_count,
    )
    channels = tl.arange(0, CHANNEL_BLOCK)
    is_channel = is_rank[:, None] & (channels < num_channels)[None, :]
    by_channel = channel_counts + ranks[:, None] * num_channels + channels[None, :]
    to = words[:, None] + NUM_RANKS + channels[None, :]
    tl.store(to, tl.load(by_channel, mask=is_channel), mask=is_channel)
    experts = tl.arange(0, EXPERT_BLOCK)
    is_expert = is_rank[:, None] & (experts < local_experts)[None, :]
    by_expert = counts.by_expert + ranks[:, None] * local_experts + experts[None, :]
    to = words[:, None] + NUM_RANKS + num_channels + experts[None, :]
    tl.store(to, tl.load(by_expert, mask=is_expert), mask=is_expert)
    if NUM_RANKS > RANKS_PER_NODE:
        for node in tl.static_range(NUM_RANKS // RANKS_PER_NODE):
            by_node = tl.load(
                counts.by_node + node * num_channels + channels, mask=channels < num_channels, other=0
            )
            at = words + NUM_RANKS + num_channels + local_experts + node
            tl.store(at, tl.sum(by_node, axis=0) + tl.zeros_like(ranks), mask=is_rank)


@triton.jit
def relayed_by(
    here,
    num_channels,
    local_experts,
    ranks,
    is_rank,
    NUM_RANKS: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
):
    """How many tokens each rank relays to its node, according to the notify messages at `here`.

    Example:
        With 2 nodes of 1 rank, and the tokens [3, 1] and [2, 4] for each node in the notify messages: [5, 5].
    """
    words = (here + HEADER_BYTES).to(tl.pointer_type(tl.int32))
    is_pair = is_rank[:, None] & is_rank[None, :]
    has_same_index = (ranks % RANKS_PER_NODE)[:, None] == (ranks % RANKS_PER_NODE)[None, :]
    nodes = (ranks // RANKS_PER_NODE)[None, :]
    theirs = words[:, None] + NUM_RANKS + num_channels + local_experts + nodes
    tokens = tl.load(theirs, mask=is_pair & has_same_index, other=0, volatile=True)
    return tl.sum(tokens, axis=0).to(tl.int64)


@triton.jit
def begin_digests(digests, channels, first_rows, is_channel, ranks, is_rank):
    """Start each rank's digest with the first rows of its channels.

    Example:
        first_rows [0, 3] gives m(-1) + m(-1 - (2**32 + 3)), where m mixes a word.
    """
    hashes = mixed_channels(tl.broadcast_to(channels[None, :], first_rows.shape), first_rows, is_channel)
    tl.store(digests + ranks, tl.sum(hashes, axis=1), mask=is_rank)


@triton.jit
def post_digests(there, digests, is_told, NUM_RANKS: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """Add this rank's digests to its notify messages: every peer finds all of them after the header."""
    index = tl.arange(0, 2 * RANK_BLOCK)
    is_digest = index < 2 * NUM_RANKS
    mine = tl.load(digests + index, mask=is_digest, other=0)
    tl.store(
        words_at(there + HEADER_BYTES)[:, None] + index[None, :],
        tl.broadcast_to(mine[None, :], (RANK_BLOCK, 2 * RANK_BLOCK)),
        mask=is_told[:, None] & is_digest[None, :],
    )


@triton.jit
def first_other_rows(here, ranks, is_rank, NUM_RANKS: tl.constexpr):
    """Find the first two ranks whose notify messages have different digests of the rows between them.

    Returns sender * ranks + receiver, or NO_PLACE if there are no such ranks.

    Example:
        If the notify message of rank 0 has the digests [1, 2, 1, 3] and that of rank 1 has [3, 4, 9, 4], the
        result is 1: the digest of the rows that rank 0 sent to rank 1 (2) differs from that of the rows that
        rank 1 received (9).
    """
    words = words_at(here + HEADER_BYTES)
    is_pair = is_rank[:, None] & is_rank[None, :]
    sent = tl.load(words[:, None] + ranks[None, :], mask=is_pair, other=0, volatile=True)
    received = tl.load(words[None, :] + NUM_RANKS + ranks[:, None], mask=is_pair, other=0, volatile=True)
    pairs = (ranks[:, None] * NUM_RANKS + ranks[None, :]).to(tl.int64)
    return tl.min(tl.min(tl.where(sent != received, pairs, NO_PLACE), axis=1), axis=0)


@triton.jit
def read_counts(
    here,
    num_channels,
    local_experts,
    prefixes,
    totals,
    ranks,
    is_rank,
    NUM_RANKS: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
):
    """Turn the counts in all notify messages into the prefix sums of a handle; return the rows to each rank.

    `here` holds the addresses of the notify messages. `totals` receives the tokens for each local expert. The
    digests start with the first rows of the channels, in both directions.

    Example:
        For rank 1 of 2, with the rows [2, 1] and [1, 3] in the notify messages, rank_prefix is [[2, 1], [3,
        4]] and the rows [3, 4] are returned. The counts in channel_prefix, [[1, 0], [1, 2]], become [[1, 1],
        [1, 3]] (inclusive). The counts by channel in the notify messages, [1, 0] and [1, 2], give
        recv_channel_prefix [[0, 1], [0, 1]] (exclusive). Channels begin at 0 and 1 for each rank, in both
        directions.
    """
    words = (here + HEADER_BYTES).to(tl.pointer_type(tl.int32))
    is_pair = is_rank[:, None] & is_rank[None, :]
    matrix = tl.load(words[:, None] + ranks[None, :], mask=is_pair, other=0, volatile=True)
    to = prefixes.rank_prefix + ranks[:, None] * NUM_RANKS + ranks[None, :]
    tl.store(to, tl.cumsum(matrix, axis=0), mask=is_pair)
    channels = tl.arange(0, CHANNEL_BLOCK)
    is_channel = is_rank[:, None] & (channels < num_channels)[None, :]
    place = ranks[:, None] * num_channels + channels[None, :]
    sent = tl.load(prefixes.channel_prefix + place, mask=is_channel, other=0)
    until = tl.cumsum(sent, axis=1)
    tl.store(prefixes.channel_prefix + place, until, mask=is_channel)
    begin_digests(prefixes.digests, channels, until - sent, is_channel, ranks, is_rank)
    theirs = words[:, None] + NUM_RANKS + channels[None, :]
    received = tl.load(theirs, mask=is_channel, other=0, volatile=True)
    before = tl.cumsum(received, axis=1) - received
    tl.store(prefixes.recv_channel_prefix + place, before, mask=is_channel)
    begin_digests(prefixes.digests + NUM_RANKS, channels, before, is_channel, ranks, is_rank)
    experts = tl.arange(0, EXPERT_BLOCK)
    is_expert = is_rank[:, None] & (experts < local_experts)[None, :]
    theirs = words[:, None] + NUM_RANKS + num_channels + experts[None, :]
    tokens = tl.sum(tl.load(theirs, mask=is_expert, other=0, volatile=True), axis=0)
    tl.store(totals + experts, tokens.to(tl.int64), mask=experts < local_experts)
    return tl.sum(matrix, axis=0).to(tl.int64)


@triton.jit
def begin_call(tables):
    """Take the next call number, and clear what the state says about the previous call.

    Example:
        With the call number 4 in the heap, the number there and in the state becomes 5.
    """
    constants, state = tables.constants, tables.state
    number_at = words_at(tl.load(constants + OWN_HEAP) + tl.load(constants + NUMBER_AT))
    call = tl.load(number_at) + 1
    tl.store(number_at, call)
    tl.store(state + NUMBER, call)
    tl.store(state + IS_REPORTED, 0)
    tl.store(state + BAD_ROWS, 0)
    tl.store(state + WAITED_FOR, MAILBOX_AT)
    return call


@triton.jit
def own_header(
    state,
    message,
    rank_prefix,
    ranks,
    is_rank,
    NUM_RANKS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    IS_REFUSED: tl.constexpr,
):
    """This rank's header, and what is wrong with its counts: a word of the state, which is cleared.

    If something is wrong, the header refuses the call. Without counts, it has the checksum of the handle.

    Example:
        If the state says that an id is no expert, the word REFUSED of the header says so, too.
    """
    index = tl.arange(0, NUM_WORDS)
    mine = tl.load(words_at(message) + index)
    tl.store(state + KIND, tl.sum(tl.where(index == KIND_WORD, mine, 0), axis=0))
    is_wrong = tl.load(state + IS_WRONG)
    if HAS_COUNTS:
        tl.store(state + IS_WRONG, 0)
        refusal = tl.where(is_wrong >> WRONG_SHIFT == WRONG_ID, REFUSED_BY_IDS, REFUSED_BY_COUNTS)
        mine = tl.where((index == REFUSED) & (is_wrong != 0), refusal, mine)
    elif not IS_REFUSED:
        mine = tl.where(index == ROUTING, checksum(rank_prefix, ranks, is_rank, NUM_RANKS), mine)
    return mine, is_wrong


@triton.jit
def mailboxes(tables, call, ranks, is_rank):
    """The addresses of this rank's messages at all peers, and of theirs here; two mailboxes alternate.

    Example:
        On rank 1, with heaps at 0 and 1000, inboxes at 1000, mailboxes at 100 and 300, and 50 bytes for each
        message, the messages of call 5 lie at 350 and 1350, and those from the peers at 1300 and 1350.
    """
    constants = tables.constants
    box = call % 2 * tl.load(constants + BOX_STRIDE) + tl.load(constants + MAILBOX_AT)
    stride = tl.load(constants + NOTIFY_STRIDE)
    heaps = tl.load(tables.heaps + ranks, mask=is_rank, other=0)
    there = heaps + box + tl.load(constants + RANK) * stride
    return there, tl.load(tables.inboxes + ranks, mask=is_rank, other=0) + box + ranks * stride


@triton.jit
def post_header(there, mine, is_told, RANK_BLOCK: tl.constexpr):
    """Write this rank's header into its messages, without the number, which closes them later."""
    index = tl.arange(0, NUM_WORDS)
    tl.store(
        words_at(there)[:, None] + index[None, :],
        tl.broadcast_to(mine[None, :], (RANK_BLOCK, NUM_WORDS)),
        mask=is_told[:, None] & (index > 0)[None, :],
    )


@triton.jit
def compare_headers(theirs, mine, bad):
    """Mark the ranks whose headers differ from this rank's, or refuse the call, as different.

    Headers are compared only if all have arrived: a rank that lacks one has given up, and that outcome must
    not be replaced.

    Example:
        With the hidden sizes 64 and 32 in two headers and 64 in this rank's, `bad` becomes [0, 2]; if rank 0
        is late, [1, 0] stays as it is.
    """
    index = tl.arange(0, NUM_WORDS)
    is_agreeing = (index >= REFUSED) & (index <= ROUTING)
    is_refusing = (index == REFUSED)[None, :] & (theirs != 0)
    is_other = (is_agreeing[None, :] & (theirs != mine[None, :])) | is_refusing
    differ = tl.max(is_other.to(tl.int32), axis=1) > 0
    return tl.where((tl.max(bad, axis=0) == GOOD) & differ, DIFFERENT, bad)


@triton.jit
def compare_digests(here, bad, is_wrong, ranks, is_rank, NUM_RANKS: tl.constexpr):
    """Mark the first rank whose digests differ from another one's; return also the word that names both.

    Any other difference also explains why digests differ, and is kept.

    Example:
        If the rows that rank 0 sent to rank 1 differ from those that rank 1 received, `bad` becomes [2, 0],
        and the word names the pair 0 * 2 + 1.
    """
    other = first_other_rows(here, ranks, is_rank, NUM_RANKS)
    is_other = (other != NO_PLACE) & (tl.max(tl.where(is_rank, bad, GOOD), axis=0) == GOOD)
    bad = tl.where(is_other & (ranks == other // NUM_RANKS), DIFFERENT, bad)
    return bad, tl.where(is_other, wrong_word(OTHER_ROUTING, other), is_wrong)


@triton.jit
def report_messages(tables, theirs, is_wrong, topk_idx, outcome, ranks, is_rank, HAS_COUNTS: tl.constexpr):
    """Report the outcome, with all headers, from which the host explains it, and with the id that is wrong.

    Example:
        If the id at place 7 of `topk_idx` is wrong, the host finds 7 in REPORTED_WRONG, and the id.
    """
    words = words_at(tl.load(tables.constants + REPORT))
    if tl.load(words + NUM_REPORTS, volatile=True) == tl.load(words + NUM_READ, volatile=True):
        index = tl.arange(0, NUM_WORDS)
        to = words + REPORTED_HEADERS + ranks[:, None] * NUM_WORDS + index[None, :]
        tl.store(to, theirs, mask=is_rank[:, None] & (index >= 0)[None, :])
        tl.store(words + REPORTED_WRONG, is_wrong)
        if HAS_COUNTS:
            is_id = is_wrong >> WRONG_SHIFT == WRONG_ID
            place = LAST_PLACE - (is_wrong & LAST_PLACE)
            tl.store(words + REPORTED_VALUE, tl.load(topk_idx + place, mask=is_id, other=0))
    report(tables.constants, tables.state, outcome)


@triton.jit
def tell_totals(host, state, outcome, uses_rings, all_wait, rows, relayed, ranks, is_rank):
    """Tell the host that waits how many rows come; the ticket is stored last.

    Example:
        With 3 rows for this rank, which relays 2, the words at `totals` are [ticket, 0, 3, 0, 2, 1] if all
        ranks wait.
    """
    words = words_at(host.totals)
    tl.store(words + TOTAL_OUTCOME, outcome)
    tl.store(words + TOTAL_ROWS, tl.load(state + NUM_ROWS))
    tl.store(words + TOTAL_USES_RINGS, uses_rings)
    tl.store(words + TOTAL_RELAYED, relayed)
    tl.store(words + TOTAL_ALL_WAIT, all_wait.to(tl.int64))
    tl.store(words_at(host.rows_of) + ranks, rows, mask=is_rank)
    tell_host(words, host.ticket)


# Values that vary from call to call must not be compiled in.
@triton.jit(do_not_specialize=["host", "num_channels", "local_experts"])
def exchange_notify(
    tables: Tables,
    prefixes: Prefixes,
    counts: Counts,
    host: HostWords,
    num_channels,
    local_experts,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    IS_COMBINE: tl.constexpr,
    IS_REFUSED: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
):
    """Post this call's notify message to every peer, wait for theirs, and find where each rank's rows lie.

    One program. If the words of the signature are equal in all notify messages, the outcome in the state is
    0; else it is 2 (different) and names the first rank that differs. A notify message that does not arrive
    in time gives the outcome 1 and ends the waits of all ranks. After that the outcome is 8 (out), and this
    rank posts no more notify messages: peers may still look for its notify message of the previous call.

    With blocks for channels and experts (powers of two that hold them), the notify messages have counts: by
    rank, by channel (in channel_prefix) and by expert. The prefix sums are filled and the digests are
    started. If there is a ticket, the host finds its totals, closed by the ticket. If a word of the state
    says that an id is no expert, the host is told which one.

    Without these blocks, a checksum of rank_prefix must agree. The digests of the rows between each two ranks
    must agree too; if they do not, the outcome is also 2, and the host is told which two ranks.

    Between nodes rows go to windows only: if a rank has none, the outcome is 10 (no window) and names it,
    unless all hosts wait and may add windows together.

    Example:
        With the call number 4 in the heap, the number becomes 5, and so does the first word of the notify
        messages.
    """
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    constants, state = tables.constants, tables.state
    rank, own = tl.load(constants + RANK), tl.load(constants + OWN_HEAP)
    abort = own + tl.load(constants + ABORT_AT)
    is_out = has_given_up(constants)
    is_told = is_rank & ~is_out
    call = begin_call(tables)
    mine, is_wrong = own_header(
        state,
        host.message,
        prefixes.rank_prefix,
        ranks,
        is_rank,
        NUM_RANKS,
        CHANNEL_BLOCK > 0,
        IS_REFUSED,
    )
    there, here = mailboxes(tables, call, ranks, is_rank)
    post_header(there, mine, is_told, RANK_BLOCK)
    if CHANNEL_BLOCK:
        post_counts(
            there,
            counts,
            prefixes.channel_prefix,
            num_channels,
            local_experts,
            ranks,
            is_told,
            NUM_RANKS,
            RANKS_PER_NODE,
            CHANNEL_BLOCK,
            EXPERT_BLOCK,
        )
    elif not IS_REFUSED:
        post_digests(there, prefixes.digests, is_told, NUM_RANKS, RANK_BLOCK)
    close_messages(tables, there, call, ranks, is_told)

    headers = words_at(here)
    seen = wait_for_all(headers, is_told, call, tl.load(constants + TIMEOUT_NS), abort)
    bad = why_not_there(seen, call, abort, constants, tables.heaps, ranks, is_rank)
    are_all_there = tl.max(bad, axis=0) == GOOD
    words = headers[:, None] + tl.arange(0, NUM_WORDS)[None, :]
    theirs = tl.load(words, mask=is_rank[:, None], other=0, volatile=True)
    # A lane without a rank differs from everything; it is not looked at.
    bad = compare_headers(theirs, mine, bad)
    if (not CHANNEL_BLOCK) and (not IS_REFUSED):
        bad, is_wrong = compare_digests(here, bad, is_wrong, ranks, is_rank, NUM_RANKS)
    rows = word_of(headers, is_rank, RESULT_ROWS)
    all_wait = False
    relayed = tl.zeros_like(rows)
    if CHANNEL_BLOCK:
        arriving = read_counts(
            here,
            num_channels,
            local_experts,
            prefixes,
            words_at(host.totals) + TOTAL_BY_EXPERT,
            ranks,
            is_rank,
            NUM_RANKS,
            CHANNEL_BLOCK,
            EXPERT_BLOCK,
        )
        all_wait = tl.max(tl.where(is_rank, rows, -1), axis=0) < 0
        if NUM_RANKS > RANKS_PER_NODE:
            relayed = relayed_by(here, num_channels, local_experts, ranks, is_rank, NUM_RANKS, RANKS_PER_NODE)
        is_too_many = are_all_there & (rows >= 0) & ((arriving > rows) | (relayed > rows))
        bad = tl.where((bad == GOOD) & is_too_many, TOO_MANY, bad)
        rows = tl.where(rows >= 0, rows, arriving)
        tl.store(state + NUM_ROWS, tl.sum(tl.where(ranks == rank, arriving, 0), axis=0))
    if IS_COMBINE:
        has_target = find_outputs(headers, rows, ranks, is_rank, tables.bases, tables.targets)
    else:
        has_target = choose_windows(
            *(headers, rows, ranks, is_rank, tables.bases, tables.targets),
            SOURCE_BYTES=8 if NUM_RANKS > RANKS_PER_NODE else 4,
        )
    if (NUM_RANKS > RANKS_PER_NODE) and (not IS_REFUSED):
        is_good = tl.max(tl.where(is_rank, bad, GOOD), axis=0) == GOOD
        has_none = is_rank & ~has_target & is_good & (all_wait == 0)
        bad = tl.where(has_none, NO_WINDOW, bad)
    uses_rings = tl.max(tl.where(is_rank & ~has_target, 1, 0), axis=0).to(tl.int64)
    outcome = tl.where(is_out, OUT + NUM_CODES * rank, first_bad(bad, ranks, is_rank, RANK_BLOCK))
    tl.store(state + USES_RINGS, uses_rings)
    tl.store(state + OUTCOME, outcome)
    # A rank that refuses already knows that the notify messages differ.
    if (outcome != 0) & ((not IS_REFUSED) | (outcome % NUM_CODES != DIFFERENT)):
        report_messages(tables, theirs, is_wrong, counts.topk_idx, outcome, ranks, is_rank, CHANNEL_BLOCK > 0)
    if CHANNEL_BLOCK:  # noqa: SIM102 - a condition of compile time, and one of run time
        if host.ticket != 0:
            # After the report: the host reads the report when it finds the ticket.
            relays = tl.sum(tl.where(ranks == rank, relayed, 0), axis=0)
            tell_totals(host, state, outcome, uses_rings, all_wait, rows, relays, ranks, is_rank)


@triton.jit
def barrier(
    constants,
    heaps,
    state,
    FLAGS_AT: tl.constexpr,
    UNLESS_RINGS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    RANKS_PER_NODE: tl.constexpr,
):
    """Signal to the peers on this node that this rank's part of the call is done, and wait for their signals.

    One program; a rank that acquires its flags sees everything that earlier kernels stored. FLAGS_AT is the
    device constant that says where the flags lie. A call that went wrong on all ranks has no flags; a call
    with a bad handle on this rank alone has. With UNLESS_RINGS, a call in which some rows go through rings
    has no flags either. If this rank waited in vain before, for example in rings, it gives up here and tells
    every rank.

    Example:
        In call 5, this rank's flags at its peers become 5. With flags [5, 4] here and no time left, the
        outcome is 1 (late) + 16 * 1 (rank 1).
    """
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    outcome = outcome_so_far(state)
    value = tl.load(state + NUMBER)
    rank, own = tl.load(constants + RANK), tl.load(constants + OWN_HEAP)
    flags_at, stride = tl.load(constants + FLAGS_AT), tl.load(constants + FLAG_STRIDE)
    abort, timeout_ns = own + tl.load(constants + ABORT_AT), tl.load(constants + TIMEOUT_NS)
    # A flag belongs to the rank with its index on this node.
    first = rank // RANKS_PER_NODE * RANKS_PER_NODE
    is_here = is_rank & (ranks >= first) & (ranks < first + RANKS_PER_NODE)
    there = tl.load(heaps + ranks, mask=is_rank, other=0) + flags_at + (rank - first) * stride
    code = outcome % NUM_CODES
    takes_part = (code == GOOD) | (code == BAD_HANDLE)
    if UNLESS_RINGS:
        takes_part = takes_part & (tl.load(state + USES_RINGS) == 0)
    if (code == LATE) | (code == STOPPED):
        stop_everyone(constants, heaps, ranks, is_rank)
    if takes_part:
        store_release(words_at(there), value, is_here)
        here = words_at(own + flags_at + (ranks - first) * stride)
        seen = wait_for_all(here, is_here, value, timeout_ns, abort)
        bad = why_not_there(seen, value, abort, constants, heaps, ranks, is_rank)
        late = first_bad(bad, ranks, is_rank, RANK_BLOCK)
        if late != 0:
            tl.store(state + WAITED_FOR, FLAGS_AT)
            outcome = tl.where(outcome == 0, late, outcome)
    tl.store(state + OUTCOME, outcome)
    report(constants, state, outcome)


@triton.jit(do_not_specialize=["num_tokens"])
def fill_send_head(
    constants,
    state,
    send_head,
    rank_prefix,
    in_rank,
    digests,
    num_tokens,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Find where each token's row lies at each receiver, after rows of lower ranks, and whether it has one.

    The hashes of the rows are added to the digests. In a call that went wrong nothing is added, since nothing
    arrives either.

    Example:
        For rank 1 with rank_prefix [[2, 1], ...], send_head [[0, 0], [-1, 1]], which numbers the rows that
        this rank sends, becomes [[2, 1], [-1, 2]], and in_rank is [[1, 1], [0, 1]]. m(2 << 32) is added to
        the digest of the rows to rank 0, and m(1 << 32) + m((2 << 32) + 1) to that of the rows to rank 1,
        where m mixes a word.
    """
    rank = tl.load(constants + RANK)
    is_good = tl.load(state + OUTCOME) == GOOD
    tokens = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    peers = tl.arange(0, RANK_BLOCK)
    is_peer = peers < NUM_RANKS
    before = tl.load(rank_prefix + (rank - 1) * NUM_RANKS + peers, mask=is_peer & (rank > 0), other=0)
    is_place = (tokens < num_tokens)[:, None] & is_peer[None, :]
    index = tokens[:, None] * NUM_RANKS + peers[None, :]
    place = tl.load(send_head + index, mask=is_place, other=-1)
    rows = tl.where(place >= 0, place + before[None, :], -1)
    tl.store(send_head + index, rows, mask=is_place)
    hashes = mixed_rows(rows, tl.broadcast_to(tokens[:, None], rows.shape), (place >= 0) & is_good)
    tl.atomic_add(digests + peers, tl.sum(hashes, axis=0), mask=is_peer, sem="relaxed", scope="gpu")
    tl.store(in_rank + index, (place >= 0).to(tl.int8), mask=is_place)
