"""What travels beside rows: ids and weights by choice, and scales.

It is loaded from tokens or from entries of rings, and stored in entries or in results.

    carried = carried_by_tokens(payload, scales, beside, tokens, is_token, SCALE_BLOCK, TOPK_BLOCK)
    store_in_entries(carried, entries, is_sent, beside, SCALE_BLOCK, TOPK_BLOCK)

`SCALE_BLOCK` and `TOPK_BLOCK` are powers of two that hold a row's scales and choices; 0 where there are none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anyep.backends.cuda.kernels.pointers import float32_at, int32_at, words_at


class Carried(NamedTuple):
    """What rows carry; undefined for rows that are not there, and zeros where there are no such parts."""

    ids: Any
    weights: Any
    scales: Any
    """As words of 4 bytes."""


@triton.jit
def choices_of(is_row, beside, TOPK_BLOCK: tl.constexpr):
    """The indices of a row's choices, and which choices of these rows exist."""
    choices = tl.arange(0, TOPK_BLOCK if TOPK_BLOCK else 1)
    return choices, is_row[:, None] & (choices < beside.num_topk)[None, :]


@triton.jit
def scales_of(is_row, beside, SCALE_BLOCK: tl.constexpr):
    """The indices of a row's scales, and which scales of these rows exist."""
    columns = tl.arange(0, SCALE_BLOCK if SCALE_BLOCK else 1)
    return columns, is_row[:, None] & (columns < beside.num_scales)[None, :]


@triton.jit
def carried_by_tokens(
    payload, scales, beside, tokens, is_token, SCALE_BLOCK: tl.constexpr, TOPK_BLOCK: tl.constexpr
):
    """What tokens of this rank carry."""
    choices, is_choice = choices_of(is_token, beside, TOPK_BLOCK)
    columns, is_scale = scales_of(is_token, beside, SCALE_BLOCK)
    ids = tl.zeros(is_choice.shape, tl.int64)
    weights = tl.zeros(is_choice.shape, tl.float32)
    factors = tl.zeros(is_scale.shape, tl.int32)
    if TOPK_BLOCK:
        index = tokens[:, None] * beside.num_topk + choices[None, :]
        ids = tl.load(payload.topk_idx + index, mask=is_choice, other=-1)
        weights = tl.load(payload.topk_weights + index, mask=is_choice, other=0.0)
    if SCALE_BLOCK:
        at = tokens[:, None] * scales.stride_token + columns.to(tl.int64)[None, :] * scales.stride_scale
        factors = tl.load(scales.words + at, mask=is_scale, other=0)
    return Carried(ids=ids, weights=weights, scales=factors)


@triton.jit
def carried_in_entries(entries, beside, is_row, SCALE_BLOCK: tl.constexpr, TOPK_BLOCK: tl.constexpr):
    """What the rows in entries of rings carry; ids are of 32 bits there."""
    choices, is_choice = choices_of(is_row, beside, TOPK_BLOCK)
    columns, is_scale = scales_of(is_row, beside, SCALE_BLOCK)
    ids = tl.zeros(is_choice.shape, tl.int32)
    weights = tl.zeros(is_choice.shape, tl.float32)
    factors = tl.zeros(is_scale.shape, tl.int32)
    if TOPK_BLOCK:
        ids = tl.load(int32_at(entries + beside.ids_at)[:, None] + choices[None, :], mask=is_choice)
        weights = tl.load(float32_at(entries + beside.weights_at)[:, None] + choices[None, :], mask=is_choice)
    if SCALE_BLOCK:
        factors = tl.load(int32_at(entries + beside.scales_at)[:, None] + columns[None, :], mask=is_scale)
    return Carried(ids=ids, weights=weights, scales=factors)


@triton.jit
def local_choices(ids, weights, rank, experts_per_rank):
    """Ids and weights as a rank needs them: local ids; -1 and weight 0 where an expert is on another rank.

    Example:
    With experts 4 and 5 at rank 2, the ids [5, 1] become [1, -1] there, and the weights [0.5, 0.25] [0.5, 0].
    """
    local = ids - rank * experts_per_rank
    is_local = (local >= 0) & (local < experts_per_rank)
    return tl.where(is_local, local, -1), tl.where(is_local, weights, 0.0)


@triton.jit
def carried_to(carried, rank, experts_per_rank):
    """The same, with the choices that a rank needs."""
    ids, weights = local_choices(carried.ids, carried.weights, rank, experts_per_rank)
    return Carried(ids=ids, weights=weights, scales=carried.scales)


@triton.jit
def store_in_entries(carried, entries, is_row, beside, SCALE_BLOCK: tl.constexpr, TOPK_BLOCK: tl.constexpr):
    """Store what rows carry beside them in entries of rings."""
    choices, is_choice = choices_of(is_row, beside, TOPK_BLOCK)
    columns, is_scale = scales_of(is_row, beside, SCALE_BLOCK)
    if TOPK_BLOCK:
        to = int32_at(entries + beside.ids_at)[:, None] + choices[None, :]
        tl.store(to, carried.ids.to(tl.int32), mask=is_choice)
        to = float32_at(entries + beside.weights_at)[:, None] + choices[None, :]
        tl.store(to, carried.weights, mask=is_choice)
    if SCALE_BLOCK:
        to = int32_at(entries + beside.scales_at)[:, None] + columns[None, :]
        tl.store(to, carried.scales, mask=is_scale)


@triton.jit
def store_in_results(
    carried,
    rows,
    is_row,
    ids_there,
    weights_there,
    scales_there,
    beside,
    SCALE_BLOCK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
):
    """Store what rows carry in results at these addresses; 0 for a part that is not needed.

    Example:
    With 2 choices, row 3 has its ids in words 6 and 7 of the ids there.
    """
    choices, is_choice = choices_of(is_row, beside, TOPK_BLOCK)
    columns, is_scale = scales_of(is_row, beside, SCALE_BLOCK)
    if TOPK_BLOCK:
        to = rows[:, None] * beside.num_topk + choices[None, :]
        tl.store(words_at(ids_there) + to, carried.ids.to(tl.int64), mask=is_choice & (ids_there != 0))
        tl.store(float32_at(weights_there) + to, carried.weights, mask=is_choice & (weights_there != 0))
    if SCALE_BLOCK:
        to = rows[:, None] * beside.num_scales + columns[None, :]
        tl.store(int32_at(scales_there) + to, carried.scales, mask=is_scale & (scales_there != 0))
