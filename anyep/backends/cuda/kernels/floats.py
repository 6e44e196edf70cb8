"""Rows of bf16, fp16 or float32: loaded as float32 to be summed, and rounded once when they are stored.

Numbers of 16 bits are seen as their bits (uint16). The bits that are stored are those of the CPU's kernels:
nearest, ties to even, and one NaN for each type; only a float32 NaN is whatever the addition made of it.

    window = values_at(address, DTYPE)
    sums += load_rows(window + rows[:, None] * hidden + columns[None, :], mask, DTYPE)
    store_rows(out + tokens[:, None] * hidden + columns[None, :], sums, mask, DTYPE, IN_HARDWARE)
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda.kernels.casts import bf16_bits_to_float, float_to_bf16_bits

BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
FP32 = tl.constexpr(3)
"""The numbers that the CPU's kernels use."""


@triton.jit
def bf16_of_float(value, IN_HARDWARE: tl.constexpr):
    """The bits of the nearest bf16, ties to even: 1.0 is 0x3F80; every NaN is 0x7FC0.

    The hardware has an instruction for it, which makes another NaN; Triton's interpreter would cut bits off
    instead, so there it is integer arithmetic.
    """
    if IN_HARDWARE:
        rounded = value.to(tl.bfloat16).to(tl.uint16, bitcast=True)
        return tl.where(value == value, rounded, 0x7FC0).to(tl.uint16)
    return float_to_bf16_bits(value)


@triton.jit
def fp16_of_float(value):
    """The bits of the nearest fp16, ties to even: 1.0 is 0x3C00, 65520 infinity; every NaN is 0x7E00."""
    rounded = value.to(tl.float16).to(tl.uint16, bitcast=True)
    return tl.where(value == value, rounded, 0x7E00).to(tl.uint16)


@triton.jit
def values_at(address, DTYPE: tl.constexpr):
    """The pointer to the values at an address (int64), which is a multiple of 16 bytes."""
    # A pointer out of a table is not known to be aligned; ours are.
    if DTYPE == FP32:
        values = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    else:
        values = tl.multiple_of(address.to(tl.pointer_type(tl.uint16)), 16)
    return values


@triton.jit
def load_rows(pointers, mask, DTYPE: tl.constexpr, STARTS_FROM_ZERO: tl.constexpr = False):
    """The values there as float32: of the bf16 0x3F80 or the fp16 0x3C00 it is 1.0.

    Outside the mask it is -0.0, which changes no sum: +0.0 would change one that is -0.0 so far. A sum that
    began with +0.0 never is; there +0.0 will do. (A load of 16 bits cannot have 0x8000 for what is masked:
    Triton 3.6 would make 0xFFFF8000 of two of them.)
    """
    values = tl.load(pointers, mask=mask, other=0)
    if DTYPE == FP16:
        values = values.to(tl.float16, bitcast=True).to(tl.float32)
    elif DTYPE != FP32:
        values = bf16_bits_to_float(values)
    if not STARTS_FROM_ZERO:
        # By its bits: Triton takes the literal -0.0 for +0.0.
        values = tl.where(mask, values, tl.full((), 0x80000000, tl.uint32).to(tl.float32, bitcast=True))
    return values


@triton.jit
def store_rows(pointers, sums, mask, DTYPE: tl.constexpr, IN_HARDWARE: tl.constexpr):
    """Round float32 to the nearest value of the type, and store it."""
    if DTYPE == BF16:
        tl.store(pointers, bf16_of_float(sums, IN_HARDWARE), mask=mask)
    elif DTYPE == FP16:
        tl.store(pointers, fp16_of_float(sums), mask=mask)
    else:
        tl.store(pointers, sums, mask=mask)
