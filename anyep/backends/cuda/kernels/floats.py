"""Rows of bf16, fp16 or float32: loaded as float32 to be summed, and rounded once when they are stored.

16-bit numbers are handled as their bits (uint16). The stored bits equal those of the CPU's kernels: round to
nearest, ties to even, and one NaN per type. The exception is float32, which keeps the NaN of the addition.

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
"""The codes that the CPU's kernels use."""


@triton.jit
def bf16_of_float(value, IN_HARDWARE: tl.constexpr):
    """The bits of the nearest bf16, ties to even; every NaN becomes 0x7FC0.

    The hardware has an instruction for this, but it produces another NaN. Triton's interpreter would truncate
    instead of rounding, so it uses integer arithmetic.

    Example:
    1.0 is 0x3F80.
    """
    if IN_HARDWARE:
        rounded = value.to(tl.bfloat16).to(tl.uint16, bitcast=True)
        return tl.where(value == value, rounded, 0x7FC0).to(tl.uint16)
    return float_to_bf16_bits(value)


@triton.jit
def fp16_of_float(value):
    """The bits of the nearest fp16, ties to even; every NaN becomes 0x7E00.

    Example:
    1.0 is 0x3C00, and 65520 is infinity.
    """
    rounded = value.to(tl.float16).to(tl.uint16, bitcast=True)
    return tl.where(value == value, rounded, 0x7E00).to(tl.uint16)


@triton.jit
def values_at(address, DTYPE: tl.constexpr):
    """The pointer to the values at an address (int64), which is a multiple of 16 bytes."""
    # The compiler cannot know the alignment of a pointer loaded from a table; these are aligned.
    if DTYPE == FP32:
        values = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    else:
        values = tl.multiple_of(address.to(tl.pointer_type(tl.uint16)), 16)
    return values


@triton.jit
def load_rows(pointers, mask, DTYPE: tl.constexpr, STARTS_FROM_ZERO: tl.constexpr = False):
    """Load values as float32.

    Masked-out values are -0.0, which changes no sum; +0.0 would change a sum that is -0.0 so far. A sum that
    starts from +0.0 is never -0.0, so +0.0 is used there. (A 16-bit load cannot use 0x8000 for masked-out
    values: Triton 3.6 would turn two of them into 0xFFFF8000.)

    Example:
    The bf16 0x3F80 and the fp16 0x3C00 are loaded as 1.0.
    """
    values = tl.load(pointers, mask=mask, other=0)
    return as_floats(values, mask, DTYPE, STARTS_FROM_ZERO)


@triton.jit
def as_floats(values, mask, DTYPE: tl.constexpr, STARTS_FROM_ZERO: tl.constexpr = False):
    """Loaded values as float32; masked-out ones as `load_rows` says."""
    if DTYPE == FP16:
        values = values.to(tl.float16, bitcast=True).to(tl.float32)
    elif DTYPE != FP32:
        values = bf16_bits_to_float(values)
    if not STARTS_FROM_ZERO:
        # Written as bits: Triton treats the literal -0.0 as +0.0.
        values = tl.where(mask, values, tl.full((), 0x80000000, tl.uint32).to(tl.float32, bitcast=True))
    return values


@triton.jit
def sum_of_biases(biases, index, mask, DTYPE: tl.constexpr, NUM_BIASES: tl.constexpr):
    """Where the sums at these indices start: at the sum of two biases, at the only one, or at +0.0.

    Example:
    With the biases [1, 2] and [3, 4], sums 0 and 1 start at 4 and 6.
    """
    sums = tl.zeros(index.shape, tl.float32)
    if NUM_BIASES > 0:
        sums = load_rows(biases.first + index, mask, DTYPE)
    if NUM_BIASES > 1:
        sums += load_rows(biases.second + index, mask, DTYPE)
    return sums


@triton.jit
def store_rows(pointers, sums, mask, DTYPE: tl.constexpr, IN_HARDWARE: tl.constexpr):
    """Round float32 to the nearest value of the type and store it."""
    if DTYPE == BF16:
        tl.store(pointers, bf16_of_float(sums, IN_HARDWARE), mask=mask)
    elif DTYPE == FP16:
        tl.store(pointers, fp16_of_float(sums), mask=mask)
    else:
        tl.store(pointers, sums, mask=mask)
