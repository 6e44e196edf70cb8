"""Combine: add the rows of a token, in float32, in the order of the ranks, and round once."""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda.kernels.casts import bf16_bits_to_float, float_to_bf16_bits


@triton.jit
def bf16_of_float(value, IN_HARDWARE: tl.constexpr):
    """The bits of the nearest bf16, ties to even; every NaN is 0x7FC0.

    The hardware has an instruction for it, which makes another NaN; Triton's interpreter would cut bits off
    instead, so there it is integer arithmetic.
    """
    if IN_HARDWARE:
        rounded = value.to(tl.bfloat16).to(tl.uint16, bitcast=True)
        return tl.where(value == value, rounded, 0x7FC0).to(tl.uint16)
    return float_to_bf16_bits(value)


@triton.jit
def pull_and_sum(
    out,
    send_head,
    places,
    place_stride,
    num_tokens,
    hidden,
    NUM_RANKS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    IN_HARDWARE: tl.constexpr = True,
):
    """Read the rows of each token where they lie at the peers, and add them up, ranks ascending.

    `places[r * place_stride]` is the address of rank r's rows of bf16. With send_head [[0, 2], [-1, 3]] the
    first row of out is row 0 of rank 0 plus row 2 of rank 1, and the second one is row 3 of rank 1.
    """
    first = tl.program_id(0)
    for tile in range(first, tl.cdiv(num_tokens, TILE_TOKENS), tl.num_programs(0)):
        tokens = tile * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
        is_token = tokens < num_tokens
        for start in range(0, hidden, TILE_VALUES):
            columns = start + tl.arange(0, TILE_VALUES)
            is_column = columns < hidden
            sums = tl.zeros((TILE_TOKENS, TILE_VALUES), tl.float32)
            for rank in tl.static_range(NUM_RANKS):
                rows = tl.load(send_head + tokens * NUM_RANKS + rank, mask=is_token, other=-1)
                place = tl.load(places + rank * place_stride).to(tl.pointer_type(tl.uint16))
                window = tl.multiple_of(place, 16)
                source = window + rows.to(tl.int64)[:, None] * hidden + columns[None, :]
                # Adding +0.0 changes nothing: a sum that began with +0.0 is never -0.0.
                values = tl.load(source, mask=(rows >= 0)[:, None] & is_column[None, :], other=0)
                sums += bf16_bits_to_float(values)
            target = out + tokens.to(tl.int64)[:, None] * hidden + columns[None, :]
            tl.store(target, bf16_of_float(sums, IN_HARDWARE), mask=is_token[:, None] & is_column[None, :])
