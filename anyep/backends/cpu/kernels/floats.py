"""Conversions between 16-bit floats and float32, in integer arithmetic: the same bits on every machine.

bf16 and fp16 are represented as uint16. Conversions from float32 round to nearest, ties to even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from anyep.backends.cpu.kernels.compiler import inlined


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 with these bits (uint32)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of_float(typing_context: Any, value: Any) -> Any:
    """The bits (uint32) of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@inlined
def float_of_bf16(bits):
    """0x3F80 is 1.0."""
    return float_of_bits(np.uint32(np.uint32(bits) << np.uint32(16)))


@inlined
def bf16_of_float(value):
    """1.0 is 0x3F80; every NaN is 0x7FC0."""
    bits = bits_of_float(value)
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(np.uint32(0x7FC0) if is_nan else rounded)


@inlined
def float_of_fp16(bits):
    """0x3C00 is 1.0. The exponent is re-biased by a multiplication, which makes subnormals exact too."""
    wide = np.uint32(bits)
    magnitude = np.uint32(np.uint32(wide & np.uint32(0x7FFF)) << np.uint32(13))
    scaled = bits_of_float(np.float32(float_of_bits(magnitude) * np.float32(2.0**112)))
    special = np.uint32(magnitude | np.uint32(0x7F800000))
    is_special = magnitude >= np.uint32(0x0F800000)
    sign = np.uint32(np.uint32(wide & np.uint32(0x8000)) << np.uint32(16))
    return float_of_bits(np.uint32((special if is_special else scaled) | sign))


@inlined
def fp16_of_float(value):
    """1.0 is 0x3C00; 65520 and above is infinity; every NaN is 0x7E00."""
    bits = bits_of_float(value)
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Normal numbers: drop 13 bits, to nearest even, and re-bias the exponent (127 - 15 = 112).
    odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(magnitude - np.uint32(112 << 23)) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    # Subnormal ones: adding 0.5 lets the float unit round at the last bit of fp16, which is 2**-24.
    shifted = np.float32(float_of_bits(magnitude) + np.float32(0.5))
    subnormal = np.uint32(bits_of_float(shifted) - np.uint32(0x3F000000))
    small = magnitude < np.uint32(113 << 23)
    result = subnormal if small else normal
    result = np.uint32(0x7C00) if magnitude >= np.uint32(0x477FF000) else result
    result = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else result
    return np.uint16(result | sign) if magnitude <= np.uint32(0x7F800000) else np.uint16(0x7E00)
