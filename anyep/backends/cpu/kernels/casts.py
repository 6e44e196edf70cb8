"""Casts of low-latency messages: bf16 to FP8 with scales, bf16 to LogFMT and back.

`anyep/core/formats.py` defines what the bits mean. These kernels compute them with integer operations and
float32 products, sums and quotients, each rounded, in loops without branches that the compiler vectorises.
"""

from __future__ import annotations

import numpy as np

from anyep.backends.cpu.kernels.compiler import inlined
from anyep.backends.cpu.kernels.floats import bits_of_float, float_of_bf16, float_of_bits
from anyep.backends.cpu.kernels.memory import copy_bytes, float32_at, int64_at, uint8_at, uint16_at
from anyep.core import formats

CHANNELS = formats.CHANNELS_PER_BLOCK
FP8_MAX = np.float32(formats.FP8_MAX)
FP8_MIN_AMAX = np.float32(formats.FP8_MIN_AMAX)
FP8_UNIT = np.float32(1.0 / formats.FP8_MAX)
BF16_INFINITY = np.uint16(0x7F80)
E4M3_SIGN = np.uint8(0x80)
E4M3_LARGEST = np.uint8(0x7E)
E4M3_NAN = np.uint8(0x7F)

BF16_AMAX_LIMIT = np.uint16(np.float32(formats.LOGFMT_AMAX_LIMIT).view(np.uint32) >> 16)
"""The bits of the limit; those of infinities and NaN are larger, so blocks with these are not encoded."""
NUM_STEPS = np.float32(formats.LOGFMT_NUM_STEPS)
MAX_OCTAVES = np.float32(formats.LOGFMT_MAX_OCTAVES)
MASK_BYTES = formats.LOGFMT_MASK_BYTES
HEADER_BYTES = formats.LOGFMT_HEADER_BYTES
BLOCK_BYTES = formats.LOGFMT_BLOCK_BYTES
RAW_BLOCK_BYTES = formats.LOGFMT_RAW_BLOCK_BYTES
PLANE = CHANNELS // 4
"""The high bits of codes this far apart share a byte: a vector of codes becomes a vector of bytes."""
LOG2 = tuple(np.float32(coefficient) for coefficient in formats.LOG2_COEFFICIENTS)
EXP2 = tuple(np.float32(coefficient) for coefficient in formats.EXP2_COEFFICIENTS)


@inlined
def e4m3_of_float(value):
    """Round to nearest even: 1.0 is 0x38; 448 and above, infinity included, is 0x7E; every NaN is 0x7F."""
    bits = bits_of_float(value)
    sign = np.uint32((bits >> np.uint32(24)) & np.uint32(0x80))
    unlimited = np.uint32(bits & np.uint32(0x7FFFFFFF))
    magnitude = np.uint32(min(unlimited, np.uint32(0x43E00000)))
    # Normal numbers: drop 20 bits, to nearest even, and re-bias the exponent (127 - 7 = 120).
    odd = np.uint32((magnitude >> np.uint32(20)) & np.uint32(1))
    rebiased = np.uint32(magnitude - np.uint32(120 << 23))
    normal = np.uint32(rebiased + np.uint32(0x7FFFF) + odd) >> np.uint32(20)
    # Subnormal ones: adding 2**14 lets the float unit round at the last bit of e4m3, which is 2**-9.
    shifted = np.float32(float_of_bits(magnitude) + np.float32(16384.0))
    subnormal = np.uint32(bits_of_float(shifted) - np.uint32(0x46800000))
    result = subnormal if magnitude < np.uint32(121 << 23) else normal
    return E4M3_NAN if unlimited > np.uint32(0x7F800000) else np.uint8(result | sign)


@inlined
def cast_block_to_fp8(source, data, power_of_two):
    """Cast a block of bf16 at `source` to e4m3 at `data`; returns its scale (float32)."""
    halves = uint16_at(source, CHANNELS)
    codes = uint8_at(data, CHANNELS)
    # Magnitudes of bf16 have the order of their bits.
    largest = np.uint16(0)
    for index in range(CHANNELS):
        magnitude = np.uint16(halves[index] & np.uint16(0x7FFF))
        largest = magnitude if magnitude > largest else largest
    if largest > BF16_INFINITY:
        for index in range(CHANNELS):
            codes[index] = E4M3_NAN
        return float_of_bits(np.uint32(0x7FC00000))
    if largest == BF16_INFINITY:
        for index in range(CHANNELS):
            magnitude = np.uint16(halves[index] & np.uint16(0x7FFF))
            sign = np.uint8(halves[index] >> np.uint16(8)) & E4M3_SIGN
            codes[index] = sign | (E4M3_LARGEST if magnitude == BF16_INFINITY else np.uint8(0))
        return np.float32(np.inf)
    amax = max(float_of_bf16(largest), FP8_MIN_AMAX)
    scale = np.float32(amax * FP8_UNIT)
    if power_of_two:
        exponent = np.uint32(np.uint32(bits_of_float(scale) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000))
        scale = float_of_bits(exponent)
        # This reciprocal is exact: multiplying by it equals dividing by the scale.
        factor = np.float32(np.float32(1.0) / scale)
    else:
        factor = np.float32(FP8_MAX / amax)
    for index in range(CHANNELS):
        codes[index] = e4m3_of_float(np.float32(float_of_bf16(halves[index]) * factor))
    return scale


@inlined
def cast_row_to_fp8(row, data, scales, hidden, power_of_two, as_ue8m0):
    """Cast a row of bf16, block by block. Scales are float32, or bytes (UE8M0) if they are powers of two."""
    num_blocks = hidden // CHANNELS
    float_scales = float32_at(scales, num_blocks)
    byte_scales = uint8_at(scales, num_blocks)
    for block in range(num_blocks):
        start = block * CHANNELS
        scale = cast_block_to_fp8(row + 2 * start, data + start, power_of_two)
        if as_ue8m0:
            byte_scales[block] = np.uint8((bits_of_float(scale) >> np.uint32(23)) & np.uint32(0xFF))
        else:
            float_scales[block] = scale


@inlined
def log2_of_bf16(magnitude):
    """The base-2 logarithm (float32) of a positive bf16, given by its bits: 0x3F80 gives exactly 0.0."""
    wide = np.uint32(magnitude)
    is_subnormal = wide < np.uint32(0x80)
    # A subnormal bf16 is an integer times 2**-133; as a float32 that integer is a normal number.
    whole = bits_of_float(np.float32(np.int32(wide)))
    bits = whole if is_subnormal else np.uint32(wide << np.uint32(16))
    bias = np.int32(127 + 133) if is_subnormal else np.int32(127)
    exponent = np.float32(np.int32(np.int32(bits >> np.uint32(23)) - bias))
    mantissa = np.uint32(np.uint32(bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000))
    t = np.float32(float_of_bits(mantissa) - np.float32(1.0))
    value = np.float32(np.float32(LOG2[6] * t) + LOG2[5])
    value = np.float32(np.float32(value * t) + LOG2[4])
    value = np.float32(np.float32(value * t) + LOG2[3])
    value = np.float32(np.float32(value * t) + LOG2[2])
    value = np.float32(np.float32(value * t) + LOG2[1])
    value = np.float32(np.float32(value * t) + LOG2[0])
    return np.float32(exponent + np.float32(value * t))


@inlined
def exp2_of_negative(power):
    """2 to a power (float32) from -149 to 0: -3.0 gives exactly 0.125."""
    whole = np.floor(power)
    f = np.float32(power - whole)
    value = np.float32(np.float32(EXP2[5] * f) + EXP2[4])
    value = np.float32(np.float32(value * f) + EXP2[3])
    value = np.float32(np.float32(value * f) + EXP2[2])
    value = np.float32(np.float32(value * f) + EXP2[1])
    value = np.float32(np.float32(value * f) + EXP2[0])
    # A subnormal result has no exponent bits to add to: the last 32 octaves are a product, rounded once.
    octaves = np.uint32(np.uint32(np.int32(whole) + np.int32(32)) << np.uint32(23))
    return np.float32(float_of_bits(np.uint32(bits_of_float(value) + octaves)) * np.float32(2.0**-32))


@inlined
def logfmt_range(amax, amin):
    """log_min and log_max - log_min of a block, from its two header fields (bf16 bits)."""
    log_max = log2_of_bf16(amax)
    log_min = max(log2_of_bf16(amin), np.float32(log_max - MAX_OCTAVES))
    return log_min, np.float32(log_max - log_min)


@inlined
def logfmt_code(half, log_min, steps_per_octave):
    """The 10-bit code of a bf16."""
    magnitude = np.uint16(half & np.uint16(0x7FFF))
    u = np.float32(np.float32(log2_of_bf16(magnitude) - log_min) * steps_per_octave)
    rounded = np.float32(u + np.float32(0.5))
    # With equal magnitudes there are 0 steps per octave, so a zero would not round below 0: test for it.
    is_zero = (magnitude == np.uint16(0)) | (rounded < np.float32(0.0))
    code = np.uint32(0) if is_zero else np.uint32(np.int32(rounded) + np.int32(1))
    return np.uint32(code | np.uint32(np.uint32(half & np.uint16(0x8000)) >> np.uint32(6)))


@inlined
def encode_logfmt_block(source, block, amax, amin):
    """Encode 128 bf16 at `source`, with these extreme magnitudes, into 164 bytes at `block`."""
    halves = uint16_at(source, CHANNELS)
    header = uint16_at(block, 2)
    low = uint8_at(block + HEADER_BYTES, CHANNELS)
    high = uint8_at(block + HEADER_BYTES + CHANNELS, PLANE)
    header[0] = amax
    header[1] = amin
    log_min, octaves = logfmt_range(amax, amin)
    steps_per_octave = np.float32(NUM_STEPS / octaves) if octaves > np.float32(0.0) else np.float32(0.0)
    for index in range(PLANE):
        code_0 = logfmt_code(halves[index], log_min, steps_per_octave)
        code_1 = logfmt_code(halves[index + PLANE], log_min, steps_per_octave)
        code_2 = logfmt_code(halves[index + 2 * PLANE], log_min, steps_per_octave)
        code_3 = logfmt_code(halves[index + 3 * PLANE], log_min, steps_per_octave)
        low[index] = np.uint8(code_0)
        low[index + PLANE] = np.uint8(code_1)
        low[index + 2 * PLANE] = np.uint8(code_2)
        low[index + 3 * PLANE] = np.uint8(code_3)
        tops_01 = np.uint32((code_0 >> np.uint32(8)) | np.uint32(code_1 >> np.uint32(8)) << np.uint32(2))
        tops_23 = np.uint32((code_2 >> np.uint32(8)) | np.uint32(code_3 >> np.uint32(8)) << np.uint32(2))
        high[index] = np.uint8(tops_01 | np.uint32(tops_23 << np.uint32(4)))


@inlined
def encode_logfmt(row, message, hidden):
    """Encode a row of bf16 into a message (aligned to 8 bytes); returns its number of bytes."""
    mask = int64_at(message, 2)
    mask[0] = 0
    mask[1] = 0
    offset = MASK_BYTES
    for block in range(hidden // CHANNELS):
        source = row + 2 * block * CHANNELS
        halves = uint16_at(source, CHANNELS)
        largest = np.uint16(0)
        smallest_less_one = np.uint16(0xFFFF)
        for index in range(CHANNELS):
            magnitude = np.uint16(halves[index] & np.uint16(0x7FFF))
            largest = magnitude if magnitude > largest else largest
            # Zero wraps around to the largest number, so it never becomes the minimum.
            less_one = np.uint16(magnitude - np.uint16(1))
            smallest_less_one = less_one if less_one < smallest_less_one else smallest_less_one
        if largest < BF16_AMAX_LIMIT:
            smallest = np.uint16(smallest_less_one + np.uint16(1))
            encode_logfmt_block(source, message + offset, largest, smallest)
            mask[block >> 6] |= 1 << (block & 63)
            offset += BLOCK_BYTES
        else:
            copy_bytes(message + offset, source, RAW_BLOCK_BYTES)
            offset += RAW_BLOCK_BYTES
    return offset


@inlined
def decode_logfmt_block(block, is_encoded, values):
    """Decode a block at `block` into values[:128]; a block that is not encoded holds bf16."""
    if is_encoded:
        header = uint16_at(block, 2)
        low = uint8_at(block + HEADER_BYTES, CHANNELS)
        high = uint8_at(block + HEADER_BYTES + CHANNELS, PLANE)
        log_min, octaves = logfmt_range(header[0], header[1])
        step = np.float32(octaves / NUM_STEPS)
        for plane in range(4):
            start = plane * PLANE
            for index in range(PLANE):
                top = np.uint32(np.uint32(high[index]) >> np.uint32(2 * plane))
                low_bits = np.uint32(low[start + index])
                magnitude = np.uint32(low_bits | np.uint32(np.uint32(top & np.uint32(1)) << np.uint32(8)))
                sign = np.uint32(np.uint32(top & np.uint32(2)) << np.uint32(30))
                # Keep this inline: in a function of its own, the difference and the comparison become one
                # checked subtraction, which cannot be vectorised.
                steps = np.float32(np.int32(np.int32(magnitude) - np.int32(1)))
                power = exp2_of_negative(np.float32(log_min + np.float32(steps * step)))
                bits = np.uint32(0) if magnitude == np.uint32(0) else bits_of_float(power)
                values[start + index] = float_of_bits(np.uint32(bits | sign))
    else:
        halves = uint16_at(block, CHANNELS)
        for index in range(CHANNELS):
            values[index] = float_of_bf16(halves[index])


@inlined
def is_logfmt_block_encoded(message, block):
    """Bit `block` of a message's mask."""
    return ((int64_at(message, 2)[block >> 6] >> (block & 63)) & 1) == 1
