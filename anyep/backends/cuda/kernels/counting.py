"""Layout: who gets how many tokens, and where each token's row will lie."""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda import facts as words_of

IS_WRONG = tl.constexpr(words_of.IS_WRONG)
WRONG_RANK_COUNT = tl.constexpr(words_of.WRONG_RANK_COUNT)
WRONG_EXPERT_COUNT = tl.constexpr(words_of.WRONG_EXPERT_COUNT)
WRONG_TOKEN = tl.constexpr(words_of.WRONG_TOKEN)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def local_choices(
    topk_idx,
    tokens,
    is_token,
    num_topk,
    rank,
    local_experts,
    TOPK_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Which of a rank's experts some tokens chose, slot by slot; and for each token whether it chose any.

    What is not here counts as one expert more: of experts 2 and 3 at rank 1, a token's slots [3, 0] are
    [1, 2].
    """
    slots = tl.arange(0, TOPK_BLOCK)
    is_slot = is_token[:, None] & (slots < num_topk)[None, :]
    ids = tl.load(topk_idx + tokens[:, None] * num_topk + slots[None, :], mask=is_slot, other=-1)
    local = ids - rank * local_experts
    is_here = is_slot & (local >= 0) & (local < local_experts)
    numbers = tl.where(is_here, local, local_experts).to(tl.int32)
    return tl.reshape(numbers, (TILE_TOKENS * TOPK_BLOCK,)), tl.max(is_here.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["num_tokens", "num_topk", "local_experts"])
def count_layout(
    topk_idx,
    tokens_per_rank,
    tokens_per_expert,
    in_rank,
    num_tokens,
    num_topk,
    local_experts,
    NUM_RANKS: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Count tokens per rank (a token once per rank) and per expert (every slot), and mark token-in-rank.

    With topk_idx [[0, 1], [3, -1]] and 2 experts per rank on 2 ranks: tokens_per_rank [1, 1],
    tokens_per_expert [1, 1, 0, 1], in_rank [[1, 0], [0, 1]].

    One program per rank looks at all tokens: so nothing has to be cleared before, which would take longer.
    The blocks are powers of two that hold a token's slots and, with one more for "not here", the experts of a
    rank.
    """
    rank = tl.program_id(0)
    num_here = 0
    by_expert = tl.zeros((EXPERT_BLOCK,), tl.int32)
    for start in range(0, num_tokens, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        is_token = tokens < num_tokens
        numbers, here = local_choices(
            topk_idx, tokens, is_token, num_topk, rank, local_experts, TOPK_BLOCK, TILE_TOKENS
        )
        tl.store(in_rank + tokens * NUM_RANKS + rank, here.to(tl.int8), mask=is_token)
        num_here += tl.sum(here, axis=0)
        by_expert += tl.histogram(numbers, EXPERT_BLOCK)
    tl.store(tokens_per_rank + rank, num_here)
    experts = tl.arange(0, EXPERT_BLOCK)
    tl.store(tokens_per_expert + rank * local_experts + experts, by_expert, mask=experts < local_experts)


# What varies from call to call is not to be compiled in.
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
):
    """Number the rows that go to each rank, count them by channel, and check what the caller counted.

    Channels are contiguous ranges of `tokens_per_channel` tokens. With in_rank [[1, 0], [1, 1], [0, 1]] and 2
    channels of 2 tokens: position [[0, -1], [1, 0], [-1, 1]] and channel_counts [[2, 0], [1, 1]] (rank,
    channel). Where tokens_per_rank is not [2, 2] a word of `state` says so; and if there are choices of
    experts (TOPK_BLOCK is not 0), also where they contradict in_rank or tokens_per_expert.

    One program per rank. The blocks are powers of two that hold a token's slots and, with one more for "not
    here", the experts of a rank.
    """
    rank = tl.program_id(0)
    before = 0
    wrong_token = tl.full((), NO_TOKEN, tl.int64)
    by_expert = tl.zeros((EXPERT_BLOCK,), tl.int32)
    for channel in range(num_channels):
        counted = 0
        first = channel * tokens_per_channel
        end = tl.minimum(first + tokens_per_channel, num_tokens)
        for start in range(first, end, TILE_TOKENS):
            tokens = start + tl.arange(0, TILE_TOKENS)
            is_token = tokens < end
            here = tl.load(in_rank + tokens * NUM_RANKS + rank, mask=is_token, other=0).to(tl.int32)
            place = before + counted + tl.cumsum(here, axis=0) - here
            tl.store(position + tokens * NUM_RANKS + rank, tl.where(here > 0, place, -1), mask=is_token)
            counted += tl.sum(here, axis=0)
            if TOPK_BLOCK:
                numbers, chosen = local_choices(
                    topk_idx, tokens, is_token, num_topk, rank, local_experts, TOPK_BLOCK, TILE_TOKENS
                )
                is_wrong = is_token & (chosen != (here > 0).to(tl.int32))
                wrong_token = tl.minimum(
                    wrong_token, tl.min(tl.where(is_wrong, tokens, NO_TOKEN), axis=0).to(tl.int64)
                )
                by_expert += tl.histogram(numbers, EXPERT_BLOCK)
        tl.store(channel_counts + rank * num_channels + channel, counted)
        before += counted
    problem = tl.full((), 0, tl.int64)
    if TOPK_BLOCK:
        experts = tl.arange(0, EXPERT_BLOCK)
        said = tl.load(
            tokens_per_expert + rank * local_experts + experts, mask=experts < local_experts, other=0
        )
        is_wrong = (experts < local_experts) & (said != by_expert)
        wrong_expert = tl.min(tl.where(is_wrong, experts, NO_TOKEN), axis=0).to(tl.int64)
        if wrong_expert < NO_TOKEN:
            problem = WRONG_EXPERT_COUNT + 4 * (rank * local_experts + wrong_expert)
        if wrong_token < NO_TOKEN:
            problem = WRONG_TOKEN + 4 * (wrong_token * NUM_RANKS + rank)
    if tl.load(tokens_per_rank + rank) != before:
        problem = tl.full((), WRONG_RANK_COUNT, tl.int64) + 4 * rank
    tl.atomic_max(state + IS_WRONG, problem, mask=problem != 0, sem="relaxed")
