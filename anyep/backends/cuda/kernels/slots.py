"""Low latency on the GPU: rows wait in fixed places of the sender's memory, and readers take them from there.

A dispatch is `open_call` and `send_tokens` on the sender, and `receive_records` and `pack_tokens` on the
receiver; a combine is `open_call`, `return_rows`, `receive_records` and `sum_tokens`. They run one after the
other on a stream: each kernel sees what the previous ones stored. The last program of a sending kernel posts
the completion records; the last program of a kernel that takes rows closes the call. A call without rows is
opened and posted at once, and closed by `finish_call`.

A call's number, its outcome and the contents of its completion records are in its own `state`: its two halves
may lie far apart, and a captured graph can be replayed. Where something went wrong, no later kernel of the
call takes anything. `generations` says which ranks are masked: those whose number is odd. Tables hold
addresses, one per rank, for either set of slots; the addresses of messages are multiples of 16, as are the
sizes of messages.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep import layout, sizes
from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.atomics import (
    abort_of_host,
    is_aborted,
    is_time_to_ask,
    load_acquire,
    nanoseconds,
    raise_abort,
    store_release,
)
from anyep.backends.cuda.kernels.casts import (
    CHANNELS,
    bf16_bits_to_float,
    encode_logfmt,
    fp8_block,
    load_logfmt_blocks,
    ue8m0_of_scale,
)
from anyep.backends.cuda.kernels.floats import bf16_of_float
from anyep.backends.cuda.kernels.groups import LowLatencyCall, Packed, Slots
from anyep.backends.cuda.kernels.notify import (
    ABORT_AT,
    BAD_HANDLE,
    BAD_ROWS,
    DIFFERENT,
    FLAG_STRIDE,
    GIVEN_UP_AT,
    GOOD,
    IS_REPORTED,
    IS_WRONG,
    KIND,
    LATE,
    NUM_CODES,
    NUM_READ,
    NUM_REPORTS,
    NUMBER,
    OUT,
    OUTCOME,
    OWN_HEAP,
    RANK,
    REPORT,
    REPORTED_HEADERS,
    REPORTED_VALUE,
    REPORTED_WRONG,
    STOPPED,
    TIMEOUT_NS,
    WAITED_FOR,
    first_bad,
    has_given_up,
    outcome_so_far,
    report,
    why_not_there,
)
from anyep.backends.cuda.kernels.pointers import words_at
from anyep.core import formats, outcomes
from anyep.core.headers import Field

RAW = tl.constexpr(formats.RAW)
FP8 = tl.constexpr(formats.FP8)
FP8_UE8M0 = tl.constexpr(formats.FP8_UE8M0)
MESSAGE_HEADER_BYTES = tl.constexpr(sizes.LOW_LATENCY_HEADER_BYTES)
RECORD_HEADER_BYTES = tl.constexpr(layout.RECORD_HEADER_BYTES)
RECORD_WORDS = tl.constexpr(layout.RECORD_HEADER_BYTES // layout.COUNTER_BYTES)
REFUSED = tl.constexpr(int(Field.REFUSED))
NUM_SETS = tl.constexpr(layout.NUM_SLOT_SETS)
COUNT_BITS = tl.constexpr(32)
COUNT_MASK = tl.constexpr((1 << 32) - 1)
ROUND_BITS = tl.constexpr(32)
NUMBER_IN_ROUND = tl.constexpr((1 << 32) - 1)
MASKED = tl.constexpr(outcomes.MASKED)
MISSING = tl.constexpr(outcomes.MISSING)
BAD_IDS = tl.constexpr(outcomes.BAD_IDS)

CALLS_AT = tl.constexpr(words_of.CALLS_AT)
RECORD_AT = tl.constexpr(words_of.RECORD_AT)
RECORD_STRIDE = tl.constexpr(words_of.RECORD_STRIDE)
RECORD_SET_STRIDE = tl.constexpr(words_of.RECORD_SET_STRIDE)
PACKED_AT = tl.constexpr(words_of.PACKED_AT)
PACKED_SET_STRIDE = tl.constexpr(words_of.PACKED_SET_STRIDE)
AT_HOST = tl.constexpr(words_of.AT_HOST)
MASK_AT = tl.constexpr(words_of.MASK_AT)
MASK_STRIDE = tl.constexpr(words_of.MASK_STRIDE)
NUM_SENT = tl.constexpr(words_of.NUM_SENT)
NUM_TAKEN = tl.constexpr(words_of.NUM_TAKEN)
MISSING_ROW = tl.constexpr(words_of.MISSING_ROW)
WRONG_PLACE = tl.constexpr(words_of.WRONG_PLACE)
WRONG_VALUE = tl.constexpr(words_of.WRONG_VALUE)
REPORTED_EXPERTS = tl.constexpr(words_of.REPORTED_EXPERTS)
RECORD_HEADER = tl.constexpr(words_of.RECORD_HEADER)
RANGES = tl.constexpr(words_of.RANGES)
EXPERTS_WORD = tl.constexpr(5)

NO_ROWS_MISSING = 2**63 - 1
"""The value that `sum_tokens` leaves unchanged if it finds all rows."""
NONE_MISSING = tl.constexpr(NO_ROWS_MISSING)
BY_HANDLE = 1
BY_IDS = 2
"""In the word REFUSED of a completion record: the handle's contents are wrong, or an id is no expert. Other
values say where the reason is written."""
REFUSED_BY_HANDLE = tl.constexpr(BY_HANDLE)
REFUSED_BY_IDS = tl.constexpr(BY_IDS)


# Masks


@triton.jit
def known_generations(call, ranks, is_rank):
    """The generation of every rank: the largest that any rank has reported here.

    Example:
        After [0, 1] from rank 0 and [0, 0] from rank 1, the result is [0, 1]: rank 1 is masked.
    """
    constants = call.constants
    own = tl.load(constants + OWN_HEAP)
    rows = words_at(own + tl.load(constants + MASK_AT) + ranks * tl.load(constants + MASK_STRIDE))
    is_pair = is_rank[:, None] & is_rank[None, :]
    told = tl.where(is_pair, load_acquire(rows[:, None] + ranks[None, :], is_pair), 0)
    return tl.maximum(tl.load(call.generations + ranks, mask=is_rank, other=0), tl.max(told, axis=0))


@triton.jit
def hear_the_host(constants, ranks, is_rank):
    """Copy into the heap what hosts have told this host: which ranks are gone, and all generations.

    Example:
        If the host's word for rank 1 is 1, the word here becomes 1. If the host's rows say that rank 1 has
        generation 3, this rank's own row here says so, too.
    """
    own, host = tl.load(constants + OWN_HEAP), tl.load(constants + AT_HOST)
    is_asked = is_rank & (host != 0)
    given_up = tl.load(constants + GIVEN_UP_AT) + ranks * tl.load(constants + FLAG_STRIDE)
    gone = tl.load(words_at(host + given_up), mask=is_asked, other=0, volatile=True)
    store_release(words_at(own + given_up), gone, gone != 0)
    mask_at, stride = tl.load(constants + MASK_AT), tl.load(constants + MASK_STRIDE)
    rows = words_at(host + mask_at + ranks * stride)
    is_pair = is_asked[:, None] & is_asked[None, :]
    told = tl.max(tl.load(rows[:, None] + ranks[None, :], mask=is_pair, other=0, volatile=True), axis=0)
    row = words_at(own + mask_at + tl.load(constants + RANK) * stride) + ranks
    is_new = told > tl.load(row, mask=is_asked, other=0, volatile=True)
    store_release(row, told, is_new)


@triton.jit
def tell_generations(call, known, ranks, is_rank, RANK_BLOCK: tl.constexpr):
    """Pass on the generations that are new to this rank, to every rank, before it does anything else."""
    constants, generations = call.constants, call.generations
    is_new = is_rank & (known > tl.load(generations + ranks, mask=is_rank, other=0))
    if tl.max(is_new.to(tl.int32), axis=0) > 0:
        row = tl.load(constants + MASK_AT) + tl.load(constants + RANK) * tl.load(constants + MASK_STRIDE)
        there = words_at(tl.load(call.heaps + ranks, mask=is_rank, other=0) + row)
        store_release(
            there[:, None] + ranks[None, :],
            tl.broadcast_to(known[None, :], (RANK_BLOCK, RANK_BLOCK)),
            is_rank[:, None] & is_new[None, :],
        )
        tl.store(generations + ranks, known, mask=is_new)


@triton.jit(do_not_specialize=["masked", "generation"])
def mask_rank(
    constants, heaps, masked, generation: tl.int64, NUM_RANKS: tl.constexpr, RANK_BLOCK: tl.constexpr
):
    """Tell every rank, including this one, the generation of rank `masked`; -1 is no rank.

    One program, launched beside kernels that may wait.

    Example:
        With masked 1 and generation 3 on 2 ranks, word 1 of this rank's row becomes 3 on both.
    """
    ranks = tl.arange(0, RANK_BLOCK)
    is_told = (ranks < NUM_RANKS) & (masked >= 0)
    row = tl.load(constants + MASK_AT) + tl.load(constants + RANK) * tl.load(constants + MASK_STRIDE)
    there = words_at(tl.load(heaps + ranks, mask=is_told, other=0) + row)
    store_release(there + masked, generation, is_told)


# Waiting


@triton.jit
def await_flags(
    call: LowLatencyCall,
    flags_at,
    flags,
    expected,
    stats,
    HAS_STATS: tl.constexpr,
    CAN_SHRINK: tl.constexpr,
    ranks,
    is_rank,
    RANK_BLOCK: tl.constexpr,
):
    """Wait until every unmasked rank has raised its flag here; return the outcome and which ranks are there.

    If ranks do not arrive in time or have given up, the outcome names the first of them. Where ranks can be
    masked, these ranks are masked instead, and the call goes on without them. `flags_at` is the device
    constant that says where the flags lie. The nanoseconds that each rank was waited for are added to
    `stats`. Only for programs of one warp: each warp reads its own clock.

    Example:
        With flags [7, 6], 7 expected and no time left, the outcome is 1 (late) + 16 * 1 (rank 1); where ranks
        can be masked, it is 0, and only rank 0 is there.
    """
    constants, generations, state = call.constants, call.generations, call.state
    rank = tl.load(constants + RANK)
    own = tl.load(constants + OWN_HEAP)
    abort = own + tl.load(constants + ABORT_AT)
    given_up = words_at(own + tl.load(constants + GIVEN_UP_AT) + ranks * tl.load(constants + FLAG_STRIDE))
    start = nanoseconds()
    deadline = start + tl.load(constants + TIMEOUT_NS)
    if CAN_SHRINK:
        known = known_generations(call, ranks, is_rank)
    else:
        known = tl.load(generations + ranks, mask=is_rank, other=0)
    is_open = is_rank & (known % 2 == 0)
    seen = tl.where(is_open, load_acquire(flags, is_open), expected)
    took = tl.where(seen >= expected, nanoseconds() - start, -1)
    goes_on = tl.min(seen, axis=0) < expected
    while goes_on:
        is_time = is_time_to_ask(nanoseconds(), start)
        if CAN_SHRINK:
            if is_time:
                hear_the_host(constants, ranks, is_rank)
            known = known_generations(call, ranks, is_rank)
            is_open = is_rank & (known % 2 == 0)
            is_gone = load_acquire(given_up, is_rank) != 0
            seen = tl.where(is_open, load_acquire(flags, is_open), expected)
            is_waited_for = (seen < expected) & ~is_gone
            # A rank that is masked or has given up waits for no rank.
            is_in = tl.max((is_open & ~is_gone & (ranks == rank)).to(tl.int32), axis=0) > 0
            goes_on = (tl.max(is_waited_for.to(tl.int32), axis=0) > 0) & is_in
        else:
            # Relaxed, and before the flags: then all loads are in flight at once.
            raised = tl.atomic_add(words_at(abort), 0, sem="relaxed", scope="sys")
            flag = abort_of_host(abort, is_time)
            seen = tl.where(is_open, load_acquire(flags, is_open), expected)
            raise_abort(abort, flag)
            goes_on = (tl.min(seen, axis=0) < expected) & (raised == 0)
        now = nanoseconds()
        took = tl.where((took < 0) & (seen >= expected), now - start, took)
        goes_on = goes_on & (now < deadline)
    if HAS_STATS:
        took = tl.where(took < 0, nanoseconds() - start, took)
        waited = tl.load(stats + ranks, mask=is_open, other=0)
        tl.store(stats + ranks, waited + took, mask=is_open)
    if CAN_SHRINK:
        is_gone = ranks < 0
        if tl.min(seen, axis=0) < expected:
            is_gone = load_acquire(given_up, is_rank) != 0
            # A rank that is gone may have sent everything before, so the flags are read once more.
            seen = tl.where(is_open, load_acquire(flags, is_open), expected)
        is_in = tl.max((is_open & (ranks == rank)).to(tl.int32), axis=0) > 0
        has_given_up = tl.max((is_gone & (ranks == rank)).to(tl.int32), axis=0) > 0
        is_late = is_open & (seen < expected)
        generation = 2 * (tl.load(state + NUMBER) >> ROUND_BITS) + 1
        known = tl.where(is_late & is_in & ~has_given_up & (ranks != rank), generation, known)
        tell_generations(call, known, ranks, is_rank, RANK_BLOCK)
        is_open = is_rank & (known % 2 == 0)
        # Late ranks are masked: they are no reason to fail, unless this rank has given up itself.
        why = tl.where(has_given_up, STOPPED, tl.where(ranks == rank, LATE, GOOD))
        late = first_bad(tl.where(is_late, why, GOOD), ranks, is_rank, RANK_BLOCK)
        outcome = tl.where(is_in, late, rank * NUM_CODES + MASKED)
    else:
        if tl.min(seen, axis=0) < expected:
            # A rank may raise the abort flag because all flags arrived and it has left: read them once more.
            is_aborted(abort)
            seen = tl.where(is_open, load_acquire(flags, is_open), expected)
        # A flag may be larger than expected: the first calls of a round expect nothing.
        late = tl.minimum(seen, expected)
        bad = why_not_there(late, expected, abort, constants, call.heaps, ranks, is_rank)
        outcome = first_bad(bad, ranks, is_open, RANK_BLOCK)
    if outcome != 0:
        tl.store(state + WAITED_FOR, flags_at)
    tl.debug_barrier()
    return outcome, is_open


# Steps common to all calls


@triton.jit
def record_of(constants, address, number):
    """Where the completion records of a call begin in the heap at `address`, which has two sets of them."""
    return (
        address + tl.load(constants + RECORD_AT) + number % NUM_SETS * tl.load(constants + RECORD_SET_STRIDE)
    )


@triton.jit
def post_records(call, NUM_RANKS: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """Post this rank's completion record, which closes its sending, to every reader that is not masked.

    If the handle or an id was found to be wrong, the completion record says so; if the call went wrong in
    another way, nothing is posted.

    Example:
        With number 7 and the header [-, 0, 4, ...] in the state, a reader that acquires 7 in word 0 of its
        completion record finds 0 and 4 after it, and everything that was written before.
    """
    constants, state = call.constants, call.state
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    number = tl.load(state + NUMBER)
    outcome = outcome_so_far(state)
    tl.store(state + OUTCOME, outcome)
    code = outcome % NUM_CODES
    is_good = (code == GOOD) | (code == BAD_HANDLE) | (code == BAD_IDS)
    known = tl.load(call.generations + ranks, mask=is_rank, other=1)
    is_open = is_rank & (known % 2 == 0) & is_good
    there = record_of(constants, tl.load(call.heaps + ranks, mask=is_rank, other=0), number)
    there = words_at(there + tl.load(constants + RANK) * tl.load(constants + RECORD_STRIDE))
    index = tl.arange(0, RECORD_WORDS)
    words = tl.load(state + RECORD_HEADER + index)
    words = tl.where((index == REFUSED) & (code == BAD_HANDLE), REFUSED_BY_HANDLE, words)
    words = tl.where((index == REFUSED) & (code == BAD_IDS), REFUSED_BY_IDS, words)
    tl.store(
        there[:, None] + index[None, :],
        tl.broadcast_to(words[None, :], (RANK_BLOCK, RECORD_WORDS)),
        mask=is_open[:, None] & (index > 0)[None, :],
    )
    store_release(there, number, is_open)


@triton.jit
def close_call(
    call: LowLatencyCall,
    CAN_SHRINK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Tell every sender that this rank is done with the sender's data, and the host what went wrong.

    A rank that finds that it was masked meanwhile may have read data that was overwritten.

    Example:
        In call 7, this rank's words in the set of odd calls become 7 on every rank, unless the call failed.
    """
    constants, state = call.constants, call.state
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    rank = tl.load(constants + RANK)
    outcome = tl.load(state + OUTCOME, volatile=True)
    if CAN_SHRINK:
        known = known_generations(call, ranks, is_rank)
        tell_generations(call, known, ranks, is_rank, RANK_BLOCK)
        is_out = tl.max((is_rank & (ranks == rank) & (known % 2 == 1)).to(tl.int32), axis=0) > 0
        outcome = tl.where(is_out, rank * NUM_CODES + MASKED, outcome)
    code = outcome % NUM_CODES
    is_told = (code != LATE) & (code != STOPPED) & (code != MASKED) & (code != OUT)
    number = tl.load(state + NUMBER)
    flags_at = tl.load(constants + PACKED_AT) + number % NUM_SETS * tl.load(constants + PACKED_SET_STRIDE)
    heaps = tl.load(call.heaps + ranks, mask=is_rank, other=0)
    there = heaps + flags_at + rank * tl.load(constants + FLAG_STRIDE)
    store_release(words_at(there), number, is_rank & is_told)
    tl.store(state + OUTCOME, outcome)
    if outcome != 0:
        words = words_at(tl.load(constants + REPORT))
        is_read = tl.load(words + NUM_REPORTS, volatile=True) == tl.load(words + NUM_READ, volatile=True)
        is_heard = is_read & (tl.load(state + IS_REPORTED) == 0)
        tl.store(words + REPORTED_WRONG, tl.load(state + IS_WRONG), mask=is_heard)
        tl.store(words + REPORTED_VALUE, tl.load(state + WRONG_VALUE), mask=is_heard)
        tl.store(words + REPORTED_EXPERTS, tl.load(state + RECORD_HEADER + EXPERTS_WORD), mask=is_heard)
        report(constants, state, outcome)


@triton.jit
def is_last(counter):
    """Whether all other programs of the kernel have been here before; the last one sees what they stored.

    `counter` is 0 at first.
    """
    num_programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_programs - 1


# Values that vary from call to call must not be compiled in.
@triton.jit(do_not_specialize=["kind", "max_tokens", "hidden", "num_experts", "travel", "refused"])
def open_call(
    call: LowLatencyCall,
    kind,
    max_tokens,
    hidden,
    num_experts,
    travel,
    refused,
    ADVANCES: tl.constexpr,
    POSTS: tl.constexpr,
    CAN_SHRINK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Take the next call number, and wait until no rank needs what this rank wrote two calls before.

    One program. The call's completion records will say what it is: [number, refused, kind, max_tokens,
    hidden, num_experts, travel]; if it `POSTS`, they are posted at once. Unless it `ADVANCES`, the number
    stays unchanged, and the next call finds its slots free. On a rank that has given up before, the outcome
    is 8 (out), and no completion records are posted.

    Example:
        With 6 in the heap, the call is number 7. If all unmasked ranks have reported that they packed call 5,
        the outcome in its state is 0. If this is rank 2 and it has given up before, the outcome is 8 (out) +
        16 * 2.
    """
    constants, state = call.constants, call.state
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    own = tl.load(constants + OWN_HEAP)
    number_at = words_at(own + tl.load(constants + CALLS_AT))
    number = tl.load(number_at) + 1
    # Read before the wait below, in which this rank may give up.
    is_out = has_given_up(constants)
    if ADVANCES:
        tl.store(number_at, number)
    tl.store(state + NUMBER, number)
    tl.store(state + KIND, kind)
    tl.store(state + IS_REPORTED, 0)
    tl.store(state + BAD_ROWS, 0)
    tl.store(state + IS_WRONG, 0)
    tl.store(state + NUM_SENT, 0)
    tl.store(state + NUM_TAKEN, 0)
    tl.store(state + MISSING_ROW, NONE_MISSING)
    tl.store(state + WRONG_PLACE, NONE_MISSING)
    tl.store(state + WRONG_VALUE, 0)
    header = state + RECORD_HEADER
    tl.store(header, number)
    tl.store(header + 1, refused)
    tl.store(header + 2, kind)
    tl.store(header + 3, max_tokens)
    tl.store(header + 4, hidden)
    tl.store(header + EXPERTS_WORD, num_experts)
    tl.store(header + 6, travel)
    tl.store(header + 7, 0)
    tl.debug_barrier()

    flags_at = tl.load(constants + PACKED_AT) + number % NUM_SETS * tl.load(constants + PACKED_SET_STRIDE)
    flags = words_at(own + flags_at + ranks * tl.load(constants + FLAG_STRIDE))
    # The first calls of a round wait for no flags: every rank was done before the round.
    expected = tl.where((number & NUMBER_IN_ROUND) > NUM_SETS, number - NUM_SETS, 0)
    outcome, _ = await_flags(
        call,
        PACKED_AT,
        flags,
        expected,
        state,
        False,
        CAN_SHRINK,
        ranks,
        is_rank,
        RANK_BLOCK,
    )
    outcome = tl.where(is_out, OUT + NUM_CODES * tl.load(constants + RANK), outcome)
    tl.store(state + OUTCOME, outcome)
    tl.debug_barrier()
    report(constants, state, outcome)
    if POSTS:
        post_records(call, NUM_RANKS, RANK_BLOCK)


@triton.jit(do_not_specialize=["local_experts"])
def receive_records(
    call: LowLatencyCall,
    stats,
    local_experts,
    HAS_STATS: tl.constexpr,
    CAN_SHRINK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,
):
    """Wait for all completion records, and copy their ranges: row s of those in the state is sender s's.

    One program; ranges are copied in tiles of `TILE_EXPERTS` experts. Everything of a masked sender is 0.

    Example:
        With the headers [7, 0, 4, ...] and [7, 0, 5, ...] the outcome is 2 (different) + 16 * 1 (rank 1), and
        the host gets all headers to report what the ranks disagree about.
    """
    constants, state = call.constants, call.state
    ranks = tl.arange(0, RANK_BLOCK)
    is_rank = ranks < NUM_RANKS
    if tl.load(state + OUTCOME) == 0:
        number = tl.load(state + NUMBER)
        own = tl.load(constants + OWN_HEAP)
        here = record_of(constants, own, number) + ranks * tl.load(constants + RECORD_STRIDE)
        words = words_at(here)
        outcome, is_open = await_flags(
            call,
            RECORD_AT,
            words,
            number,
            stats,
            HAS_STATS,
            CAN_SHRINK,
            ranks,
            is_rank,
            RANK_BLOCK,
        )
        index = tl.arange(0, RECORD_WORDS)
        mine = tl.load(state + RECORD_HEADER + index)
        theirs = tl.load(words[:, None] + index[None, :], mask=is_open[:, None], other=0, volatile=True)
        differ = tl.max(((index > 0)[None, :] & (theirs != mine[None, :])).to(tl.int32), axis=1)
        different = first_bad(tl.where(differ > 0, DIFFERENT, GOOD), ranks, is_open, RANK_BLOCK)
        outcome = tl.where(outcome == 0, different, outcome)
        their_ranges = words_at(here + RECORD_HEADER_BYTES)
        for first in range(0, tl.where(outcome == 0, local_experts, 0), TILE_EXPERTS):
            experts = first + tl.arange(0, TILE_EXPERTS)
            is_expert = experts < local_experts
            rows = tl.load(
                their_ranges[:, None] + experts[None, :],
                mask=is_open[:, None] & is_expert[None, :],
                other=0,
                volatile=True,
            )
            to = state + RANGES + ranks[:, None] * local_experts + experts[None, :]
            tl.store(to, rows, mask=is_rank[:, None] & is_expert[None, :])
        tl.store(state + OUTCOME, outcome)
        if outcome != 0:
            to = words_at(tl.load(constants + REPORT))
            if tl.load(to + NUM_REPORTS, volatile=True) == tl.load(to + NUM_READ, volatile=True):
                headers = to + REPORTED_HEADERS + ranks[:, None] * RECORD_WORDS + index[None, :]
                tl.store(headers, theirs, mask=is_rank[:, None] & (index >= 0)[None, :])
            report(constants, state, outcome)


@triton.jit
def finish_call(
    call: LowLatencyCall,
    CAN_SHRINK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Close a call that takes no rows, as `close_call` does. One program."""
    close_call(call, CAN_SHRINK, NUM_RANKS, RANK_BLOCK)


# Ids


@triton.jit
def look_for_wrong_ids(state, ids, places, num_experts, is_told):
    """Record the first place of an id that is neither an expert nor -1.

    Example:
        With 4 experts, the ids [-1, 4] at the places [6, 7] leave 7 in the state, if it held none or a later
        one.
    """
    is_wrong = (ids < -1) | (ids >= num_experts)
    place = tl.min(tl.where(is_wrong, places, NONE_MISSING), axis=0)
    is_new = is_told & (place != NONE_MISSING)
    tl.atomic_min(state + WRONG_PLACE, place, mask=is_new, sem="relaxed", scope="gpu")


@triton.jit
def refuse_wrong_ids(constants, state, topk_idx, NUM_TOPK: tl.constexpr):
    """If some program found an id that is no expert, record that in the state, and which id it is.

    For one program, after all others.

    Example:
        With 7 as the first place and 2 ids per token, the word IS_WRONG is 3 << 32 | 1.
    """
    place = tl.load(state + WRONG_PLACE, volatile=True)
    if place != NONE_MISSING:
        tl.store(state + IS_WRONG, (place // NUM_TOPK << COUNT_BITS) | (place % NUM_TOPK))
        tl.store(state + WRONG_VALUE, tl.load(topk_idx + place))
        tl.store(state + BAD_ROWS, tl.load(constants + RANK) * NUM_CODES + BAD_IDS)
        tl.debug_barrier()


# Dispatch


@triton.jit
def cast_token(
    state,
    x,
    hidden,
    topk_idx,
    num_experts,
    messages,
    message_bytes,
    token,
    share,
    TRAVEL: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Put a share of a token into its message, cast to its travel format, if it goes to any expert."""
    choices = tl.arange(0, TOPK_BLOCK)
    experts = tl.load(topk_idx + token * NUM_TOPK + choices, mask=choices < NUM_TOPK, other=-1)
    is_wanted = tl.max(((experts >= 0) & (experts < num_experts)).to(tl.int32), axis=0) > 0
    look_for_wrong_ids(state, experts, token * NUM_TOPK + choices, num_experts, share == 0)
    source = x + token * hidden
    payload = messages + token * message_bytes + MESSAGE_HEADER_BYTES
    for start in range(share * TILE_BLOCKS * CHANNELS, hidden, NUM_SHARES * TILE_BLOCKS * CHANNELS):
        # Tokens that go nowhere are loaded, too: otherwise the load would wait for the choices.
        if TRAVEL == RAW:
            columns = start + tl.arange(0, TILE_BLOCKS * CHANNELS)
            values = tl.load(source + columns, mask=columns < hidden)
            to = payload.to(tl.pointer_type(tl.uint16)) + columns
            tl.store(to, values, mask=is_wanted & (columns < hidden))
        else:
            blocks = start // CHANNELS + tl.arange(0, TILE_BLOCKS)
            is_block = blocks < hidden // CHANNELS
            columns = blocks[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
            halves = tl.load(source + columns, mask=is_block[:, None], other=0)
            codes, scale = fp8_block(halves, TRAVEL != FP8)
            is_sent = is_wanted & is_block
            tl.store(payload + columns, codes, mask=is_sent[:, None])
            if TRAVEL == FP8_UE8M0:
                tl.store(payload + hidden + blocks, ue8m0_of_scale(scale), mask=is_sent)
            else:
                tl.store((payload + hidden).to(tl.pointer_type(tl.float32)) + blocks, scale, mask=is_sent)


@triton.jit
def list_tokens(
    topk_idx,
    listed,
    ranges,
    expert,
    local,
    num_tokens,
    NUM_TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """List the tokens that chose an expert, each once, and store their number in the completion record."""
    choices = tl.arange(0, TOPK_BLOCK)
    count = tl.full((), 0, tl.int32)
    for start in range(0, num_tokens, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        is_choice = (tokens < num_tokens)[:, None] & (choices < NUM_TOPK)[None, :]
        chosen = tl.load(topk_idx + tokens[:, None] * NUM_TOPK + choices[None, :], mask=is_choice, other=-1)
        here = tl.max((chosen == expert).to(tl.int32), axis=1)
        tl.store(listed + count + tl.cumsum(here, axis=0) - here, tokens, mask=here > 0)
        count += tl.sum(here, axis=0)
    tl.store(ranges + local, count.to(tl.int64))


@triton.jit(do_not_specialize=["num_tokens"])
def send_tokens(
    call: LowLatencyCall,
    slots: Slots,
    x,
    topk_idx,
    num_tokens,
    hidden,
    TRAVEL: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Put tokens that go anywhere into messages, list the tokens of each expert, and post completion records.

    The tokens of each expert are listed for its rank. A token that chose an expert twice is listed once.
    Nothing is written for a masked reader.

    messages[set, r] is the address of rank r's first message, lists[set, r] that of the list for reader r's
    first expert; the next expert's list is `list_stride` further on. Each of the first programs lists the
    tokens of one expert, `TILE_TOKENS` at a time; then `NUM_SHARES` programs cast each token, `TILE_BLOCKS`
    blocks of 128 values at a time. x is uint16.

    Example:
        With topk_idx [[1, 0], [-1, 1]] and 1 expert on each of 2 ranks, both tokens are written: as RAW, the
        2 * hidden bytes of token 1 follow a 16-byte header, `message_bytes` after those of token 0; as FP8,
        hidden bytes and their scales do. Reader 0 finds the list [0], and 1 in its completion record; reader
        1 finds [0, 1] and 2. With topk_idx [[1, 0], [-1, 5]] the outcome is 9 (bad ids), and the completion
        records say that this call is refused.
    """
    program = tl.program_id(0)
    constants, state, local_experts = call.constants, call.state, slots.local_experts
    num_experts = NUM_RANKS * local_experts
    number = tl.load(state + NUMBER)
    if tl.load(state + OUTCOME) == 0:
        table = number % NUM_SETS * NUM_RANKS
        if program < num_experts:
            reader = program // local_experts
            local = (program - reader * local_experts).to(tl.int64)
            is_open = tl.load(call.generations + reader) % 2 == 0
            record = record_of(constants, tl.load(call.heaps + reader), number)
            record += tl.load(constants + RANK) * tl.load(constants + RECORD_STRIDE)
            place = tl.load(slots.lists + table + reader) + local * slots.list_stride
            if is_open:
                list_tokens(
                    topk_idx,
                    place.to(tl.pointer_type(tl.int32)),
                    words_at(record + RECORD_HEADER_BYTES),
                    program,
                    local,
                    num_tokens,
                    NUM_TOPK,
                    TOPK_BLOCK,
                    TILE_TOKENS,
                )
        else:
            # The compiler cannot know that a pointer loaded from a table is aligned; these pointers are.
            own = tl.load(slots.messages + table + tl.load(constants + RANK)).to(tl.pointer_type(tl.uint8))
            token = (program - num_experts) // NUM_SHARES
            cast_token(
                state,
                x,
                hidden,
                topk_idx,
                num_experts,
                tl.multiple_of(own, 16),
                slots.message_bytes,
                token.to(tl.int64),
                program - num_experts - token * NUM_SHARES,
                TRAVEL,
                NUM_TOPK,
                TOPK_BLOCK,
                NUM_SHARES,
                TILE_BLOCKS,
            )
    if is_last(state + NUM_SENT):
        refuse_wrong_ids(constants, state, topk_idx, NUM_TOPK)
        post_records(call, NUM_RANKS, RANK_BLOCK)


@triton.jit
def pack_tokens(
    call: LowLatencyCall,
    slots: Slots,
    results: Packed,
    row_words,
    num_scale_words,
    HAS_SCALES: tl.constexpr,
    HAS_STATS: tl.constexpr,
    CAN_SHRINK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    TILE_SCALES: tl.constexpr,
):
    """Take the rows of each local expert from their senders, in order of sender, then token; close the call.

    The ranges in the state count the rows of sender s for expert e, lists[set, s] is the address of its list
    for expert 0, messages[set, s] that of its first message. A row's scales, words of 4 bytes, go to a
    column: word w of row r of expert e goes to ((e * num_scale_words) + w) * rows_per_expert + r.

    Program (e, s, i) takes the i-th share of what sender s has for expert e, `TILE_ROWS` rows at a time, in
    pieces of `TILE_WORDS` words: each thread then moves 16 bytes at a time. x and scales are words of 4
    bytes.

    Example:
        With ranges [[2], [1]] and the lists [0, 3] and [1], the rows of expert 0 are tokens 0 and 3 of sender
        0 and token 1 of sender 1: src_info [[0, 3, 1, ...]], layout_range [[2, 2 << 32 | 1]], counts [3], and
        stats grows by 3.
    """
    state, rows_per_expert = call.state, slots.rows_per_expert
    expert = tl.program_id(0)
    sender = tl.program_id(1)
    share = tl.program_id(2)
    is_good = tl.load(state + OUTCOME) == 0
    table = tl.load(state + NUMBER) % NUM_SETS * NUM_RANKS
    senders = tl.arange(0, RANK_BLOCK)
    ranges = state + RANGES
    theirs = tl.load(ranges + senders * slots.local_experts + expert, mask=senders < NUM_RANKS, other=0)
    their_counts = tl.where(is_good, theirs & COUNT_MASK, 0).to(tl.int32)
    begin = tl.sum(tl.where(senders < sender, their_counts, 0), axis=0)
    count = tl.sum(tl.where(senders == sender, their_counts, 0), axis=0)
    is_first = is_good & (share == 0)
    whole_range = (begin.to(tl.int64) << COUNT_BITS) | count.to(tl.int64)
    tl.store(results.layout_range + expert * NUM_RANKS + sender, whole_range, mask=is_first)
    total = tl.sum(their_counts, axis=0)
    is_first = is_first & (sender == 0)
    tl.store(results.counts + expert, total, mask=is_first)
    if HAS_STATS:
        tl.store(results.stats + expert, tl.load(results.stats + expert) + total, mask=is_first)

    max_tokens = rows_per_expert // NUM_RANKS
    place = tl.load(slots.lists + table + sender) + expert.to(tl.int64) * slots.list_stride
    listed = place.to(tl.pointer_type(tl.int32))
    # The compiler cannot know that a pointer loaded from a table is aligned; these pointers are.
    their_messages = tl.load(slots.messages + table + sender).to(tl.pointer_type(tl.uint8))
    their_messages = tl.multiple_of(their_messages, 16)
    for first in range(share * TILE_ROWS, count, tl.num_programs(2) * TILE_ROWS):
        indices = first + tl.arange(0, TILE_ROWS)
        is_row = indices < count
        # The list of a sender that has masked this rank may be overwritten while it is read, and the compiler
        # may read it more than once.
        tokens = tl.load(listed + indices, mask=is_row, other=0)
        tokens = tl.minimum(tl.maximum(tokens, 0), max_tokens - 1)
        rows = expert.to(tl.int64) * rows_per_expert + begin + indices
        tl.store(results.src_info + rows, tokens, mask=is_row)
        payload = their_messages + tokens.to(tl.int64) * slots.message_bytes + MESSAGE_HEADER_BYTES
        source = payload.to(tl.pointer_type(tl.int32))
        for start in range(0, row_words, TILE_WORDS):
            words = start + tl.arange(0, TILE_WORDS)
            is_word = is_row[:, None] & (words < row_words)[None, :]
            values = tl.load(source[:, None] + words[None, :], mask=is_word)
            tl.store(results.x + rows[:, None] * row_words + words[None, :], values, mask=is_word)
        if HAS_SCALES:
            for start in range(0, num_scale_words, TILE_SCALES):
                words = start + tl.arange(0, TILE_SCALES)
                is_word = is_row[:, None] & (words < num_scale_words)[None, :]
                values = tl.load((source + row_words)[:, None] + words[None, :], mask=is_word)
                columns = (expert.to(tl.int64) * num_scale_words + words) * rows_per_expert
                to = results.scales + columns[None, :] + (begin + indices)[:, None]
                tl.store(to, values, mask=is_word)
    if is_last(state + NUM_TAKEN):
        close_call(call, CAN_SHRINK, NUM_RANKS, RANK_BLOCK)


# Combine


@triton.jit
def list_returns(
    state,
    src_info,
    layout_range,
    listed,
    ranges,
    expert,
    reader,
    rank,
    is_open,
    max_tokens,
    rows_per_expert,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Copy an expert's range and tokens of one reader, if they are valid; else report a bad handle.

    A range begins where the previous one ends and has at most `max_tokens` rows; its tokens are in order, and
    below that number.
    """
    readers = tl.arange(0, RANK_BLOCK)
    row = tl.load(layout_range + expert * NUM_RANKS + readers, mask=readers < NUM_RANKS, other=0)
    begin = tl.sum(tl.where(readers < reader, row & COUNT_MASK, 0), axis=0)
    theirs = tl.sum(tl.where(readers == reader, row, 0), axis=0)
    count = theirs & COUNT_MASK
    # Other programs check the ranges before, but everything that is read here must lie inside.
    is_wrong = (theirs >> COUNT_BITS != begin) | (count > max_tokens) | (begin > reader * max_tokens)
    tl.store(ranges + expert, theirs, mask=is_open & ~is_wrong)
    tokens_at = src_info + expert * rows_per_expert + tl.where(is_wrong, 0, begin)
    num_rows = tl.where(is_wrong, 0, count).to(tl.int32)
    for first in range(0, num_rows, TILE_ROWS):
        indices = first + tl.arange(0, TILE_ROWS)
        is_row = indices < num_rows
        tokens = tl.load(tokens_at + indices, mask=is_row, other=0)
        before = tl.load(tokens_at + indices - 1, mask=is_row & (indices > 0), other=-1)
        is_disorder = is_row & ((tokens <= before) | (tokens >= max_tokens))
        is_wrong = is_wrong | (tl.max(is_disorder.to(tl.int32), axis=0) > 0)
        tl.store(listed + indices, tokens, mask=is_row & is_open)
    tl.atomic_max(state + BAD_ROWS, rank * NUM_CODES + BAD_HANDLE, mask=is_wrong, sem="relaxed", scope="gpu")


@triton.jit
def stage_rows(
    x,
    hidden,
    layout_range,
    rows_per_expert,
    messages,
    message_bytes,
    expert,
    share,
    USE_LOGFMT: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Put a share of an expert's rows into the messages of the same index, unchanged or in LogFMT."""
    last = tl.load(layout_range + expert * NUM_RANKS + NUM_RANKS - 1)
    end = (last >> COUNT_BITS) + (last & COUNT_MASK)
    num_rows = tl.minimum(tl.maximum(end, 0), rows_per_expert).to(tl.int32)
    for index in range(share, num_rows, NUM_SHARES):
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


@triton.jit(do_not_specialize=["num_ids"])
def return_rows(
    call: LowLatencyCall,
    slots: Slots,
    x,
    topk_idx,
    src_info,
    layout_range,
    num_ids,
    hidden,
    USE_LOGFMT: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """Put the rows of local experts into messages of the same index, list them, and post completion records.

    The list for each reader holds its tokens whose rows are returned. Nothing is written for a masked reader.
    If one of the `num_ids` ids by which rows will be added up is neither an expert nor -1, the outcome is 9
    (bad ids), and the completion records say that this call is refused.

    messages[set, r] is the address of rank r's first message, lists[set, r] that of the list for reader r of
    expert 0's rows; the next expert's list is `list_stride` further on. Each of the first programs writes the
    list of one (expert, reader) and checks some ids; then `NUM_SHARES` programs copy each expert's rows,
    `TILE_BLOCKS` blocks of 128 values at a time, unchanged or in LogFMT. If these copying programs are not
    launched, the rows are already in place. x is uint16.

    Example:
        With src_info [[0, 3, 1]] and layout_range [[2, 2 << 32 | 1]], rows 0 to 2 of expert 0 are put into
        messages; reader 0 finds the tokens [0, 3] and the range 2, reader 1 finds [1] and the range 2 << 32 |
        1. With tokens [[3, 0, 1]] the outcome is 5 (bad handle), and the completion records say that this
        call is refused.
    """
    program = tl.program_id(0)
    constants, state, rows_per_expert = call.constants, call.state, slots.rows_per_expert
    num_lists = NUM_RANKS * slots.local_experts
    number = tl.load(state + NUMBER)
    if tl.load(state + OUTCOME) == 0:
        table = number % NUM_SETS * NUM_RANKS
        rank = tl.load(constants + RANK)
        if program < num_lists:
            for first in range(program * TILE_ROWS, num_ids, num_lists * TILE_ROWS):
                places = first + tl.arange(0, TILE_ROWS)
                ids = tl.load(topk_idx + places, mask=places < num_ids, other=-1)
                look_for_wrong_ids(state, ids, places.to(tl.int64), num_lists, True)
            expert = (program // NUM_RANKS).to(tl.int64)
            reader = program % NUM_RANKS
            record = record_of(constants, tl.load(call.heaps + reader), number) + rank * tl.load(
                constants + RECORD_STRIDE
            )
            place = tl.load(slots.lists + table + reader) + expert * slots.list_stride
            list_returns(
                state,
                src_info,
                layout_range,
                place.to(tl.pointer_type(tl.int32)),
                words_at(record + RECORD_HEADER_BYTES),
                expert,
                reader,
                rank,
                tl.load(call.generations + reader) % 2 == 0,
                rows_per_expert // NUM_RANKS,
                rows_per_expert,
                NUM_RANKS,
                RANK_BLOCK,
                TILE_ROWS,
            )
        else:
            own = tl.load(slots.messages + table + rank).to(tl.pointer_type(tl.uint8))
            staged = program - num_lists
            stage_rows(
                x,
                hidden,
                layout_range,
                rows_per_expert,
                tl.multiple_of(own, 16),
                slots.message_bytes,
                (staged // NUM_SHARES).to(tl.int64),
                staged % NUM_SHARES,
                USE_LOGFMT,
                NUM_RANKS,
                NUM_SHARES,
                TILE_BLOCKS,
            )
    if is_last(state + NUM_SENT):
        refuse_wrong_ids(constants, state, topk_idx, NUM_TOPK)
        post_records(call, NUM_RANKS, RANK_BLOCK)


@triton.jit
def find_places(listed, counts, token, TOPK_BLOCK: tl.constexpr, TILE_LIST: tl.constexpr):
    """Find the place of a token in each of these lists (pointers to int32); -1 where it is not listed.

    Example:
        Token 3 in the lists [0, 3], [1] and [3, 4] is at [1, -1, 0].
    """
    places = tl.full((TOPK_BLOCK,), -1, tl.int32)
    for first in range(0, tl.max(counts, axis=0), TILE_LIST):
        indices = first + tl.arange(0, TILE_LIST)
        is_listed = indices[None, :] < counts[:, None]
        tokens = tl.load(listed[:, None] + indices[None, :], mask=is_listed, other=-1)
        here = tl.where(tokens == token, indices[None, :], -1)
        places = tl.maximum(places, tl.max(here, axis=1))
    return places


@triton.jit
def sum_raw_rows(addresses, choices, weights, columns, hidden, NUM_TOPK: tl.constexpr):
    """0 + row * weight + ... of the messages at these addresses, by choice; address 0 is no message."""
    sums = tl.zeros(columns.shape, tl.float32)
    for choice in tl.static_range(NUM_TOPK):
        address = tl.sum(tl.where(choices == choice, addresses, 0), axis=0)
        is_there = address != 0
        weight = tl.load(weights + choice, mask=is_there, other=0.0)
        payload = (address + MESSAGE_HEADER_BYTES).to(tl.pointer_type(tl.uint16))
        row = tl.multiple_of(payload, 16)
        values = tl.load(row + columns, mask=is_there & (columns < hidden), other=0)
        # Adding +0.0 changes nothing: a sum that began with +0.0 is never -0.0.
        sums += bf16_bits_to_float(values) * weight
    return sums


@triton.jit
def sum_logfmt_rows(addresses, choices, weights, blocks, hidden, NUM_TOPK: tl.constexpr):
    """Like `sum_raw_rows`, for messages in LogFMT: sums [blocks, 128]."""
    sums = tl.zeros((blocks.shape[0], CHANNELS), tl.float32)
    for choice in range(NUM_TOPK):
        address = tl.sum(tl.where(choices == choice, addresses, 0), axis=0)
        if address != 0:
            message = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
            values = load_logfmt_blocks(message, blocks, blocks < hidden // CHANNELS)
            sums += values * tl.load(weights + choice)
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def sum_tokens(
    call: LowLatencyCall,
    slots: Slots,
    topk_idx,
    topk_weights,
    out,
    num_tokens,
    hidden,
    USE_LOGFMT: tl.constexpr,
    CAN_SHRINK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_LIST: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    IN_HARDWARE: tl.constexpr,
):
    """Add up each token's rows where they lie, and close the call.

    out = 0 + row * weight + ..., in top-k order, in float32. The ranges in the state say which rows of expert
    e of rank r are this rank's, lists[set, r] is the address of the list of their tokens for expert 0,
    messages[set, r] that of the first row's message. Choices of no expert (-1) and of masked ranks are
    skipped. Where rank r returned no row for a token that should have been there, the outcome is 7 (missing),
    and the first such row is reported to the host.

    Program (t, i) takes the i-th share of token t's values, `TILE_BLOCKS` blocks of 128 at a time. It
    searches the lists of all choices at once, `TILE_LIST` tokens of each at a time. out is uint16.

    Example:
        With 1 expert per rank, topk_idx [[1, 0]], weights [[0.5, 2]] and a row of 4s at rank 1, of 1s at rank
        0, out is a row of 4s: 4 * 0.5 + 1 * 2.
    """
    state, local_experts = call.state, slots.local_experts
    token = tl.program_id(0).to(tl.int64)
    is_good = (tl.load(state + OUTCOME) == 0) & (token < num_tokens)
    table = tl.load(state + NUMBER) % NUM_SETS * NUM_RANKS
    choices = tl.arange(0, TOPK_BLOCK)
    is_choice = (choices < NUM_TOPK) & (token < num_tokens)
    chosen = tl.load(topk_idx + token * NUM_TOPK + choices, mask=is_choice, other=-1)
    is_expert = (chosen >= 0) & (chosen < NUM_RANKS * local_experts)
    experts = tl.where(is_expert, chosen, 0)
    ranks = experts // local_experts
    locals_there = experts - ranks * local_experts
    is_wanted = is_expert & is_good & (tl.load(call.generations + ranks) % 2 == 0)
    theirs = tl.load(state + RANGES + experts)
    counts = tl.where(is_wanted, theirs & COUNT_MASK, 0).to(tl.int32)
    listed = tl.load(slots.lists + table + ranks) + locals_there * slots.list_stride
    listed = listed.to(tl.pointer_type(tl.int32))
    places = find_places(listed, counts, token, TOPK_BLOCK, TILE_LIST)
    is_missing = is_wanted & (places < 0)
    first_missing = tl.min(tl.where(is_missing, token * NUM_TOPK + choices, NONE_MISSING), axis=0)
    is_told = (first_missing != NONE_MISSING) & (tl.program_id(1) == 0)
    tl.atomic_min(state + MISSING_ROW, first_missing, mask=is_told, sem="relaxed", scope="gpu")

    rows = locals_there * slots.rows_per_expert + (theirs >> COUNT_BITS) + places
    is_there = is_wanted & ~is_missing
    messages = tl.load(slots.messages + table + ranks)
    addresses = tl.where(is_there, messages + rows * slots.message_bytes, 0)
    end = tl.where(is_good, hidden, 0)
    step = TILE_BLOCKS * CHANNELS
    for start in range(tl.program_id(1) * step, end, tl.num_programs(1) * step):
        weights = topk_weights + token * NUM_TOPK
        if USE_LOGFMT:
            blocks = start // CHANNELS + tl.arange(0, TILE_BLOCKS)
            columns = blocks[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
            sums = sum_logfmt_rows(addresses, choices, weights, blocks, hidden, NUM_TOPK)
        else:
            columns = start + tl.arange(0, TILE_BLOCKS * CHANNELS)
            sums = sum_raw_rows(addresses, choices, weights, columns, hidden, NUM_TOPK)
        tl.store(out + token * hidden + columns, bf16_of_float(sums, IN_HARDWARE), mask=columns < hidden)
    if is_last(state + NUM_TAKEN):
        missing = tl.load(state + MISSING_ROW, volatile=True)
        if missing != NONE_MISSING:
            wrong = (missing // NUM_TOPK << COUNT_BITS) | tl.load(topk_idx + missing)
            tl.store(state + IS_WRONG, wrong)
            tl.store(state + OUTCOME, tl.load(call.constants + RANK) * NUM_CODES + MISSING)
            tl.debug_barrier()
        close_call(call, CAN_SHRINK, NUM_RANKS, RANK_BLOCK)
