"""Combine of rows that lie in ordinary memory: they are staged in a window while the peers already read them.

Staging goes in steps: step k are the rows of every source's tokens [k * STEP_TOKENS, (k + 1) * STEP_TOKENS).
When all programs of a rank have copied their part of a step, the last of them raises the rank's flag at every
peer. A step is small enough for the cache: its rows are still there when they are read. Each program stages
`STEPS_AHEAD` steps more than it has summed, so that nobody waits in a circle, and flags have time to come.
What a rank wants itself it reads where it is.

The programs of all ranks must be resident at once. Triton's interpreter, where one program runs after the
other, gets one program. Addresses and sizes of rows are multiples of 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import facts as words_of
from anyep.backends.cuda.kernels.atomics import release_max
from anyep.backends.cuda.kernels.floats import FP32
from anyep.backends.cuda.kernels.letters import (
    ALARM_AT,
    FLAG_STRIDE,
    NUMBER,
    OWN_HEAP,
    PATIENCE_NS,
    PLACE_ROWS,
    PLACE_WORDS,
    RANK,
    STAGERS,
    WAITED_FOR,
    words_at,
)
from anyep.backends.cuda.kernels.rings import (
    Rings,
    Waiting,
    any_of,
    give_up,
    is_good,
    wait_for_counters,
)
from anyep.backends.cuda.kernels.sums import sum_tile, sum_weights

STAGED_AT = tl.constexpr(words_of.STAGED_AT)
STAGED = tl.constexpr(words_of.STAGED)
NUM_STAGED = tl.constexpr(words_of.NUM_STAGED)

STEP_BITS = tl.constexpr(32)
"""A flag is the number of its call above these bits, and below them the number of steps that are done."""
ALL_STEPS = tl.constexpr((1 << 32) - 1)
MOST_STEPS = tl.constexpr(1 << 20)
"""A handle that was tampered with might name any number."""


# What varies from call to call is not to be compiled in.
@triton.jit(do_not_specialize=["num_tokens", "num_topk"])
def stage_and_sum(
    x,
    window,
    out,
    out_weights,
    bias_0,
    bias_1,
    send_head,
    rank_prefix,
    source_tokens,
    places,
    facts,
    heaps,
    state,
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
    STEP_TOKENS: tl.constexpr,
    STEPS_AHEAD: tl.constexpr,
    COPY_WORDS: tl.constexpr,
    IN_HARDWARE: tl.constexpr = True,
):
    """Copy this rank's rows to its window, if it is one of the stagers; sum its tokens' rows as they come.

    `source_tokens` are the tokens of this rank's rows, ascending for each source; those of source r end at
    `rank_prefix[r][rank]`. On rank 0 of 3 these are [2, 5, 6]: with steps of 2 tokens and source_tokens
    [0, 1, 0, 1, 3, 1] call 5 copies the rows 2, 3 and 5 in step 0, after which its flags are 5 * 2**32 + 1,
    and row 4 in step 1, after which they are 5 * 2**32 + 2**32 - 1: there is no more. It sums its tokens 0
    and 1 after step 1, when the flags of all stagers say that step 0 is done; its own rows 0 and 1 it finds
    in x, which it notes in `places`.

    Sums are those of `pull_and_sum`, which does the work if nobody stages; then nothing is done here, nor if
    the outcome of what came before is not 0. Flags that do not come are an outcome of 1 (late) or 3
    (stopped), as with rings.

    x is seen as words of 4 bytes, out and biases as their bits (uint16) or as float32. Programs copy pieces
    of `COPY_WORDS`, and sum tiles of `TILE_TOKENS` x `TILE_VALUES`; a step is a whole number of these.
    """
    tl.static_assert(STEP_TOKENS % TILE_TOKENS == 0, "a tile must not need rows of two steps")
    tl.static_assert(STEPS_AHEAD + 2 <= NUM_STAGED, "programs may be so many steps apart")
    stagers = tl.load(state + STAGERS)
    has_work = stagers != 0
    if has_work:
        has_work = is_good(state)
    if has_work:
        ranks = tl.arange(0, RANK_BLOCK)
        is_rank = ranks < NUM_RANKS
        is_stager = is_rank & (((stagers >> ranks) & 1) != 0)
        rank, own = tl.load(facts + RANK), tl.load(facts + OWN_HEAP)
        at, stride = tl.load(facts + STAGED_AT), tl.load(facts + FLAG_STRIDE)
        flags_here = words_at(own + at + ranks * stride)
        there = tl.load(heaps + ranks, mask=is_rank, other=0)
        flags_there = words_at(there + at + rank * stride)
        waiting = Waiting(
            rank=rank,
            patience_ns=tl.load(facts + PATIENCE_NS),
            alarm=own + tl.load(facts + ALARM_AT),
            outcome=state,
        )
        call = tl.load(state + NUMBER) << STEP_BITS
        # A row is a multiple of 4 words, and the compiler is to know it.
        row_words = hidden // 4 * 4 if DTYPE == FP32 else hidden // 8 * 4

        num_rows = tl.load(places + PLACE_WORDS * rank + PLACE_ROWS).to(tl.int32)
        end = tl.load(rank_prefix + ranks * NUM_RANKS + rank, mask=is_rank, other=0)
        before = rank_prefix + (ranks - 1) * NUM_RANKS + rank
        begin = tl.load(before, mask=is_rank & (ranks > 0), other=0)
        end = tl.minimum(tl.maximum(end, 0), num_rows)
        begin = tl.where(ranks == rank, end, tl.minimum(tl.maximum(begin, 0), end))
        last = tl.load(source_tokens + end - 1, mask=begin < end, other=0)
        num_stagings = tl.minimum(tl.max(last, axis=0) // STEP_TOKENS + 1, MOST_STEPS)
        is_staging = any_of(is_stager & (ranks == rank))
        num_stagings = tl.where(is_staging, num_stagings, 0)
        tl.store(places + PLACE_WORDS * rank, x.to(tl.int64), mask=is_staging)
        tl.debug_barrier()

        num_pieces = tl.cdiv(hidden, TILE_VALUES)
        num_tiles = tl.cdiv(num_tokens, TILE_TOKENS) * num_pieces
        tiles_per_step = STEP_TOKENS // TILE_TOKENS * num_pieces
        num_sums = tl.cdiv(num_tokens, STEP_TOKENS)
        num_steps = tl.maximum(num_stagings, num_sums + STEPS_AHEAD)
        seen = tl.zeros((RANK_BLOCK,), tl.int64)
        step = tl.full((), 0, tl.int32)
        while step < num_steps:
            if step < num_stagings:
                begin = stage_rows(
                    x, window, source_tokens, begin, end, step, row_words, STEP_TOKENS, COPY_WORDS
                )
                done = tl.where(step == num_stagings - 1, ALL_STEPS, step.to(tl.int64) + 1)
                raise_flags(state + STAGED + step % NUM_STAGED, flags_there, call + done, is_rank)
            summed = step - STEPS_AHEAD
            # Programs without tokens to sum wait for each other all the same: they share few counters.
            is_awaited = is_stager & ((summed < num_sums) | ((ranks == rank) & (step < num_stagings)))
            expected = tl.where(is_awaited & (summed >= 0), call + summed + 1, 0)
            seen = wait_for_counters(flags_here, seen, expected, waiting)
            if any_of(seen < expected):
                tl.store(state + WAITED_FOR, STAGED_AT)
                # It asks for the ranks only.
                flags = Rings(ranks, is_rank, 0, 0, 0, 0, 0)
                give_up(seen < expected, flags, waiting)
                step = num_steps
                num_tiles = 0
            first = tl.maximum(summed, 0) * tiles_per_step
            end_tile = tl.where(summed >= 0, tl.minimum(first + tiles_per_step, num_tiles), 0)
            # Tiles go round: a step need not have as many as there are programs.
            turn = (tl.program_id(0) + tl.num_programs(0) - first % tl.num_programs(0)) % tl.num_programs(0)
            for tile in range(first + turn, end_tile, tl.num_programs(0)):
                sum_tile(
                    out,
                    bias_0,
                    bias_1,
                    send_head,
                    places,
                    tile,
                    num_tokens,
                    hidden,
                    DTYPE,
                    NUM_BIASES,
                    NUM_RANKS,
                    TILE_TOKENS,
                    TILE_VALUES,
                    IN_HARDWARE,
                )
            step += 1
        sum_weights(
            out_weights,
            send_head,
            places,
            state,
            tl.where(num_tiles > 0, num_tokens, 0),
            num_topk,
            NUM_RANKS,
            TOPK_BLOCK,
            CHUNK_TOKENS,
        )


@triton.jit
def stage_rows(
    x,
    window,
    source_tokens,
    begin,
    end,
    step,
    row_words,
    STEP_TOKENS: tl.constexpr,
    COPY_WORDS: tl.constexpr,
):
    """Copy this program's share of a step's rows to the window; where the next step's rows begin.

    Those of each source lie side by side: with begin [0, 3], end [3, 4], source_tokens [0, 1, 3, 1] and steps
    of 2 tokens, step 0 has the rows [0, 2) and [3, 4), and the next one begins at [2, 4].
    """
    rows = begin[:, None] + tl.arange(0, STEP_TOKENS)[None, :]
    tokens = tl.load(source_tokens + rows, mask=rows < end[:, None], other=2147483647)
    counts = tl.sum((tokens < (step + 1) * STEP_TOKENS).to(tl.int32), axis=1)
    num_pieces = tl.cdiv(counts * row_words, COPY_WORDS)
    ends = tl.cumsum(num_pieces, axis=0)
    firsts = ends - num_pieces
    # Other programs begin in every step: a step need not have as many pieces as there are programs.
    turn = (tl.program_id(0) + step) % tl.num_programs(0)
    for piece in range(turn, tl.max(ends, axis=0), tl.num_programs(0)):
        is_source = (firsts <= piece) & (piece < ends)
        row = tl.sum(tl.where(is_source, begin, 0), axis=0).to(tl.int64)
        num_words = tl.sum(tl.where(is_source, counts, 0), axis=0) * row_words
        done = (piece - tl.sum(tl.where(is_source, firsts, 0), axis=0)) * COPY_WORDS
        words = done + tl.arange(0, COPY_WORDS)
        is_word = words < num_words
        # Nobody reads x again; what is stored, everybody does.
        values = tl.load(x + row * row_words + words, mask=is_word, eviction_policy="evict_first")
        tl.store(window + row * row_words + words, values, mask=is_word)
    return begin + counts


@triton.jit
def raise_flags(counter, flags, value, is_rank):
    """When all programs have been here, raise this rank's flags: what they all stored is visible then.

    `counter` is 0 before and after.
    """
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(counter, 0)
        release_max(flags, value, is_rank)
