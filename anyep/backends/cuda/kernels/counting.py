"""Layout: how many tokens each rank gets, and where each token's row will lie."""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import constants as words_of
from anyep.backends.cuda.kernels.atomics import tell_host

IS_WRONG = tl.constexpr(words_of.IS_WRONG)
WRONG_RANK_COUNT = tl.constexpr(words_of.WRONG_RANK_COUNT)
WRONG_EXPERT_COUNT = tl.constexpr(words_of.WRONG_EXPERT_COUNT)
WRONG_TOKEN = tl.constexpr(words_of.WRONG_TOKEN)
WRONG_ID = tl.constexpr(words_of.WRONG_ID)
LAST_PLACE = tl.constexpr(words_of.LAST_PLACE)
NO_TOKEN = tl.constexpr(2**31 - 1)
NUM_REPORTS = tl.constexpr(words_of.NUM_REPORTS)
NUM_READ = tl.constexpr(words_of.NUM_READ)
LAYOUT_TOKEN = tl.constexpr(words_of.LAYOUT_TOKEN)
LAYOUT_COLUMN = tl.constexpr(words_of.LAYOUT_COLUMN)
LAYOUT_VALUE = tl.constexpr(words_of.LAYOUT_VALUE)
LAYOUT_EXPERTS = tl.constexpr(words_of.LAYOUT_EXPERTS)


@triton.jit
def local_choices(topk_idx, tokens, is_token, num_topk, rank, local_experts, TOPK_BLOCK: tl.constexpr):
    """Find which of a rank's experts each choice of some tokens names, and whether it names one at all.

    Example:
        With experts 2 and 3 at rank 1, a token's choices [3, 0] give [1, -2], and only the first is here.
    """
    choices = tl.arange(0, TOPK_BLOCK)
    is_choice = is_token[:, None] & (choices < num_topk)[None, :]
    ids = tl.load(topk_idx + tokens[:, None] * num_topk + choices[None, :], mask=is_choice, other=-1)
    local = ids - rank * local_experts
    return local.to(tl.int32), is_choice & (local >= 0) & (local < local_experts)


@triton.jit
def first_wrong_id(
    topk_idx,
    num_tokens,
    num_topk,
    num_experts,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ARE_DISTINCT: tl.constexpr = False,
):
    """The first place (token * top-k + choice) of an id that is neither an expert nor -1; -1 if none is.

    If ARE_DISTINCT is set, an expert that an earlier choice of its token names is wrong as well.

    A separate program looks at all ids: in the programs that also use the ids for other work, they would not
    fit into registers.

    Example:
        With 4 experts, the ids [[0, -1], [3, 4]] have such an id at place 3, and [[0, 1], [2, 2]] have one
        there if experts are to be distinct.
    """
    choices = tl.arange(0, TOPK_BLOCK)
    wrong_tokens = tl.full((TILE_TOKENS,), NO_TOKEN, tl.int32)
    for start in range(0, num_tokens, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        is_choice = (tokens < num_tokens)[:, None] & (choices < num_topk)[None, :]
        ids = tl.load(topk_idx + tokens[:, None] * num_topk + choices[None, :], mask=is_choice, other=-1)
        is_wrong = ((ids < -1) | (ids >= num_experts)).to(tl.int32)
        if ARE_DISTINCT:
            for choice in range(num_topk):
                chosen = tl.load(topk_idx + tokens * num_topk + choice, mask=tokens < num_tokens, other=-1)
                is_later = is_choice & (choices > choice)[None, :] & (ids >= 0)
                is_wrong |= (is_later & (ids == chosen[:, None])).to(tl.int32)
        found = tl.where(tl.max(is_wrong, axis=1) > 0, tokens, NO_TOKEN)
        wrong_tokens = tl.minimum(wrong_tokens, found)
    wrong_token = tl.min(wrong_tokens, axis=0)
    place = tl.full((), -1, tl.int64)
    if wrong_token < NO_TOKEN:
        first = wrong_token.to(tl.int64) * num_topk
        ids = tl.load(topk_idx + first + choices, mask=choices < num_topk, other=-1)
        is_bad = (ids < -1) | (ids >= num_experts)
        if ARE_DISTINCT:
            for choice in range(num_topk):
                chosen = tl.load(topk_idx + first + choice)
                is_bad |= (choices > choice) & (ids >= 0) & (ids == chosen)
        place = first + tl.min(tl.where(is_bad, choices, TOPK_BLOCK), axis=0)
    return place


@triton.jit
def wrong_word(HOW: tl.constexpr, where):
    """Like `constants.wrong_word`: the greatest of several words is the first of the worst kind."""
    return tl.full((), HOW, tl.int64) * (LAST_PLACE + 1) + LAST_PLACE - where


@triton.jit
def count_experts(local, is_here, first_expert, EXPERT_BLOCK: tl.constexpr):
    """Count the choices of each of `EXPERT_BLOCK` experts, from `first_expert` on.

    Example:
        The local choices [1, 3, 1] give [2, 0] from expert 1 on.
    """
    number = local - first_expert
    is_counted = is_here & (number >= 0) & (number < EXPERT_BLOCK)
    # One tensor holds both: values and a mask that are flattened separately may be in different orders.
    flat = tl.ravel(tl.where(is_counted, number, EXPERT_BLOCK))
    return tl.histogram(flat, EXPERT_BLOCK, mask=flat < EXPERT_BLOCK)


@triton.jit(do_not_specialize=["told", "num_tokens", "num_topk", "local_experts"])
def count_layout(
    topk_idx,
    tokens_per_rank,
    tokens_per_expert,
    in_rank,
    told: tl.int64,
    num_tokens,
    num_topk,
    local_experts,
    NUM_RANKS: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Count tokens per rank (a token once per rank) and per expert (every choice), and mark token-in-rank.

    An id that is neither an expert nor -1 goes nowhere; the first such id is reported to the host, in words
    at `told` in host memory.

    One program per rank and `EXPERT_BLOCK` of its experts looks at all tokens: nothing has to be cleared
    before, which would take longer. One more program per rank is launched, of which the first looks for such
    ids. `TOPK_BLOCK` is a power of two that holds a token's choices.

    Example:
        With topk_idx [[0, 1], [3, -1]] and 2 experts per rank on 2 ranks: tokens_per_rank [1, 1],
        tokens_per_expert [1, 1, 0, 1], in_rank [[1, 0], [0, 1]]. With topk_idx [[0, 1], [3, 9]] the words at
        `told` are [n + 1, n, 1, 1, 9, 4] if the first two were both n.
    """
    rank, first_expert = tl.program_id(0), tl.program_id(1) * EXPERT_BLOCK
    if first_expert >= local_experts:
        if rank == 0:
            num_experts = NUM_RANKS * local_experts
            place = first_wrong_id(topk_idx, num_tokens, num_topk, num_experts, TOPK_BLOCK, TILE_TOKENS)
            if place >= 0:
                tell_of_wrong_id(told, topk_idx, place, num_topk, num_experts)
    else:
        num_here = tl.zeros((TILE_TOKENS,), tl.int32)
        by_expert = tl.zeros((EXPERT_BLOCK,), tl.int32)
        for start in range(0, num_tokens, TILE_TOKENS):
            tokens = start + tl.arange(0, TILE_TOKENS)
            is_token = tokens < num_tokens
            local, is_here = local_choices(
                topk_idx, tokens, is_token, num_topk, rank, local_experts, TOPK_BLOCK
            )
            by_expert += count_experts(local, is_here, first_expert, EXPERT_BLOCK)
            if first_expert == 0:
                here = tl.max(is_here.to(tl.int32), axis=1)
                num_here += here
                tl.store(in_rank + tokens * NUM_RANKS + rank, here.to(tl.int8), mask=is_token)
        if first_expert == 0:
            tl.store(tokens_per_rank + rank, tl.sum(num_here, axis=0))
        experts = first_expert + tl.arange(0, EXPERT_BLOCK)
        tl.store(tokens_per_expert + rank * local_experts + experts, by_expert, mask=experts < local_experts)


@triton.jit
def tell_of_wrong_id(told, topk_idx, place, num_topk, num_experts):
    """Report the place of an id that is no expert, unless the host has not yet read the previous report."""
    words = told.to(tl.pointer_type(tl.int64))
    num_reports = tl.load(words + NUM_REPORTS, volatile=True)
    if num_reports == tl.load(words + NUM_READ, volatile=True):
        tl.store(words + LAYOUT_TOKEN, place // num_topk)
        tl.store(words + LAYOUT_COLUMN, place % num_topk)
        tl.store(words + LAYOUT_VALUE, tl.load(topk_idx + place))
        tl.store(words + LAYOUT_EXPERTS, num_experts.to(tl.int64))
        tell_host(words + NUM_REPORTS, num_reports + 1)


# Values that vary from call to call must not be compiled in.
@triton.jit(
    do_not_specialize=["num_tokens", "num_channels", "tokens_per_channel", "num_topk", "local_experts"]
)
def place_tokens(
    in_rank,
    topk_idx,
    tokens_per_rank,
    tokens_per_expert,
    position,
    channel_counts,
    state,
    num_tokens,
    num_channels,
    tokens_per_channel,
    num_topk,
    local_experts,
    NUM_RANKS: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ARE_DISTINCT: tl.constexpr = False,
):
    """Number the rows that go to each rank, count them by channel, and check the caller's counts.

    Channels are contiguous ranges of `tokens_per_channel` tokens. A word of `state` says whether
    tokens_per_rank is wrong. If there are choices of experts (TOPK_BLOCK is not 0), it also says whether they
    contradict in_rank or tokens_per_expert, or whether one of them is neither an expert nor -1, or (if
    ARE_DISTINCT is set) an expert that its token has already chosen.

    There is one program per rank and channel. If there are choices, these are followed by one program per
    rank and `EXPERT_BLOCK` of its experts, and by one more per rank, of which the first looks at all ids.
    `TOPK_BLOCK` is a power of two that holds a token's choices.

    Example:
        With in_rank [[1, 0], [1, 1], [0, 1]] and 2 channels of 2 tokens: position [[0, -1], [1, 0], [-1, 1]]
        and channel_counts [[2, 0], [1, 1]] (rank, channel). Where tokens_per_rank is not [2, 2], a word of
        `state` says so.
    """
    rank, share = tl.program_id(0), tl.program_id(1)
    if share < num_channels:
        problem = place_channel(
            in_rank,
            topk_idx,
            tokens_per_rank,
            position,
            channel_counts,
            rank,
            share,
            num_tokens,
            num_channels,
            tokens_per_channel,
            num_topk,
            local_experts,
            NUM_RANKS,
            TOPK_BLOCK,
            TILE_TOKENS,
        )
    elif (share - num_channels) * EXPERT_BLOCK >= local_experts:
        problem = tl.full((), 0, tl.int64)
        if TOPK_BLOCK:  # noqa: SIM102 - it decides what is compiled
            if rank == 0:
                num_experts = NUM_RANKS * local_experts
                place = first_wrong_id(
                    topk_idx, num_tokens, num_topk, num_experts, TOPK_BLOCK, TILE_TOKENS, ARE_DISTINCT
                )
                problem = tl.where(place >= 0, wrong_word(WRONG_ID, place), 0)
    else:
        problem = check_experts(
            topk_idx,
            tokens_per_expert,
            rank,
            (share - num_channels) * EXPERT_BLOCK,
            num_tokens,
            num_topk,
            local_experts,
            TOPK_BLOCK,
            EXPERT_BLOCK,
            TILE_TOKENS,
        )
    tl.atomic_max(state + IS_WRONG, problem, mask=problem != 0, sem="relaxed")


@triton.jit
def place_channel(
    in_rank,
    topk_idx,
    tokens_per_rank,
    position,
    channel_counts,
    rank,
    channel,
    num_tokens,
    num_channels,
    tokens_per_channel,
    num_topk,
    local_experts,
    NUM_RANKS: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """The part of `place_tokens` for one rank and channel; returns what is wrong there, 0 if nothing is."""
    first = tl.minimum(channel * tokens_per_channel, num_tokens)
    end = tl.minimum(first + tokens_per_channel, num_tokens)
    # Counted again in each channel: waiting for the programs of earlier channels would take longer.
    earlier = tl.zeros((TILE_TOKENS,), tl.int32)
    for start in range(0, first, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        earlier += tl.load(in_rank + tokens * NUM_RANKS + rank, mask=tokens < first, other=0)
    before = tl.sum(earlier, axis=0)
    counted = 0
    wrong_token = tl.full((), NO_TOKEN, tl.int64)
    for start in range(first, end, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        is_token = tokens < end
        here = tl.load(in_rank + tokens * NUM_RANKS + rank, mask=is_token, other=0).to(tl.int32)
        place = before + counted + tl.cumsum(here, axis=0) - here
        tl.store(position + tokens * NUM_RANKS + rank, tl.where(here > 0, place, -1), mask=is_token)
        counted += tl.sum(here, axis=0)
        if TOPK_BLOCK:
            _, is_here = local_choices(topk_idx, tokens, is_token, num_topk, rank, local_experts, TOPK_BLOCK)
            is_wrong = is_token & (tl.max(is_here.to(tl.int32), axis=1) != here)
            first_wrong = tl.min(tl.where(is_wrong, tokens, NO_TOKEN), axis=0)
            wrong_token = tl.minimum(wrong_token, first_wrong.to(tl.int64))
    tl.store(channel_counts + rank * num_channels + channel, counted)
    problem = tl.full((), 0, tl.int64)
    if wrong_token < NO_TOKEN:
        problem = wrong_word(WRONG_TOKEN, wrong_token * NUM_RANKS + rank)
    elif (channel == num_channels - 1) & (tl.load(tokens_per_rank + rank) != before + counted):
        problem = wrong_word(WRONG_RANK_COUNT, rank.to(tl.int64))
    return problem


@triton.jit
def check_experts(
    topk_idx,
    tokens_per_expert,
    rank,
    first_expert,
    num_tokens,
    num_topk,
    local_experts,
    TOPK_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """The part of `place_tokens` for some experts of a rank: check the counts of their tokens."""
    by_expert = tl.zeros((EXPERT_BLOCK,), tl.int32)
    if TOPK_BLOCK:
        for start in range(0, num_tokens, TILE_TOKENS):
            tokens = start + tl.arange(0, TILE_TOKENS)
            is_token = tokens < num_tokens
            local, is_here = local_choices(
                topk_idx, tokens, is_token, num_topk, rank, local_experts, TOPK_BLOCK
            )
            by_expert += count_experts(local, is_here, first_expert, EXPERT_BLOCK)
    experts = first_expert + tl.arange(0, EXPERT_BLOCK)
    is_expert = experts < local_experts
    given = tl.load(tokens_per_expert + rank * local_experts + experts, mask=is_expert, other=0)
    wrong_expert = tl.min(tl.where(is_expert & (given != by_expert), experts, NO_TOKEN), axis=0).to(tl.int64)
    problem = tl.full((), 0, tl.int64)
    if wrong_expert < NO_TOKEN:
        problem = wrong_word(WRONG_EXPERT_COUNT, rank * local_experts + wrong_expert)
    return problem
