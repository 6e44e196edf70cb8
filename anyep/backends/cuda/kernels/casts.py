"""Casts of low-latency messages: bf16 to FP8 with scales, bf16 to LogFMT and back.

`anyep/core/formats.py` defines the bits; they equal those of the CPU's kernels. Helpers work on tiles of
blocks, [blocks, 128], and handle bf16 as its bits (uint16). Conversions are integer arithmetic, because
Triton's interpreter rounds Triton's own conversions differently. Kernels are compiled without fused products
and sums (`anyep/backends/cuda/batch.py`). Divisions are `tl.div_rn`, because `/` is only an approximation on
a GPU. The mask bits of the LogFMT blocks of a tile lie in one word of the message's mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.core import formats

CHANNELS = tl.constexpr(formats.CHANNELS_PER_BLOCK)
FP8_MAX = tl.constexpr(formats.FP8_MAX)
FP8_MIN_AMAX = tl.constexpr(formats.FP8_MIN_AMAX)
FP8_UNIT = tl.constexpr(1.0 / formats.FP8_MAX)
BF16_INFINITY = tl.constexpr(0x7F80)
FLOAT_INFINITY = tl.constexpr(0x7F800000)
E4M3_LARGEST = tl.constexpr(0x7E)
E4M3_NAN = tl.constexpr(0x7F)

BF16_AMAX_LIMIT = tl.constexpr(0x3F80)
"""The bits of LOGFMT_AMAX_LIMIT. Infinities and NaN have larger bits: such blocks are not encoded."""
NUM_STEPS = tl.constexpr(float(formats.LOGFMT_NUM_STEPS))
MAX_OCTAVES = tl.constexpr(float(formats.LOGFMT_MAX_OCTAVES))
MASK_BYTES = tl.constexpr(formats.LOGFMT_MASK_BYTES)
HEADER_BYTES = tl.constexpr(formats.LOGFMT_HEADER_BYTES)
BLOCK_BYTES = tl.constexpr(formats.LOGFMT_BLOCK_BYTES)
RAW_BLOCK_BYTES = tl.constexpr(formats.LOGFMT_RAW_BLOCK_BYTES)
PLANE = tl.constexpr(formats.CHANNELS_PER_BLOCK // 4)
"""Codes this far apart have their high bits in the same byte."""
LOG2 = tl.constexpr(formats.LOG2_COEFFICIENTS)
EXP2 = tl.constexpr(formats.EXP2_COEFFICIENTS)


@triton.jit
def bits_of_float(value):
    """The bits (uint32) of a float32."""
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def float_of_bits(bits):
    """The float32 with these bits (uint32)."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits_to_float(bits):
    """The float32 value of a bf16.

    Example:
    0x3F80 is 1.0.
    """
    return float_of_bits(bits.to(tl.uint32) << 16)


@triton.jit
def float_to_bf16_bits(value):
    """The bits of the nearest bf16, ties to even; every NaN becomes 0x7FC0.

    Example:
    1.0 is 0x3F80.
    """
    bits = bits_of_float(value)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > FLOAT_INFINITY, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def e4m3_of_float(value):
    """The bits of the nearest e4m3, ties to even; every NaN becomes 0x7F.

    Values from 448 on, including infinity, become 448 (0x7E).

    Example:
    1.0 is 0x38.
    """
    bits = bits_of_float(value)
    sign = (bits >> 24) & 0x80
    unlimited = bits & 0x7FFFFFFF
    magnitude = tl.minimum(unlimited, 0x43E00000)
    # Normal numbers: drop 20 bits, to nearest even, and re-bias the exponent (127 - 7 = 120).
    normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Subnormal numbers: adding 2**14 makes the float unit round at the last bit of e4m3, which is 2**-9.
    subnormal = bits_of_float(float_of_bits(magnitude) + 16384.0) - 0x46800000
    result = tl.where(magnitude < (121 << 23), subnormal, normal) | sign
    return tl.where(unlimited > FLOAT_INFINITY, E4M3_NAN, result).to(tl.uint8)


@triton.jit
def fp8_block(halves, POWER_OF_TWO: tl.constexpr):
    """Cast blocks of bf16 to e4m3 (uint8, the same shape) and their scales (float32, [blocks]).

    Example:
    A block 1.0, -3.5, 0.0, ... becomes 0x70, 0xFE, 0x00, ... and the scale 2**-7.
    """
    # Magnitudes of bf16 are ordered like their bits.
    magnitudes = halves & 0x7FFF
    largest = tl.max(magnitudes.to(tl.int32), axis=1)
    is_nan = largest > BF16_INFINITY
    amax = tl.maximum(bf16_bits_to_float(largest), FP8_MIN_AMAX)
    scale = amax * FP8_UNIT
    if POWER_OF_TWO:
        scale = float_of_bits((bits_of_float(scale) + 0x7FFFFF) & FLOAT_INFINITY)
        # Exact: multiplying by it equals dividing by the scale.
        factor = tl.div_rn(1.0, scale)
    else:
        factor = tl.div_rn(FP8_MAX, amax)
    # In a block with an infinity the factor is 0: finite values become 0, but the infinity would become NaN.
    codes = e4m3_of_float(bf16_bits_to_float(halves) * factor[:, None])
    saturated = ((halves >> 8) & 0x80) | E4M3_LARGEST
    codes = tl.where(magnitudes == BF16_INFINITY, saturated.to(tl.uint8), codes)
    codes = tl.where(is_nan[:, None], E4M3_NAN, codes).to(tl.uint8)
    scale_bits = tl.where(is_nan, 0x7FC00000, bits_of_float(scale))
    return codes, float_of_bits(scale_bits)


@triton.jit
def ue8m0_of_scale(scale):
    """The exponent (uint8) of a scale that is a power of two; 255 for infinity and NaN.

    Example:
    2**-7 gives 120.
    """
    return ((bits_of_float(scale) >> 23) & 0xFF).to(tl.uint8)


@triton.jit
def log2_of_bf16(magnitude):
    """The base-2 logarithm (float32) of a positive bf16, given by its bits.

    Example:
    0x3F80 gives exactly 0.0.
    """
    wide = magnitude.to(tl.uint32)
    is_subnormal = wide < 0x80
    # A subnormal number is an integer times 2**-133; converted to float32, that integer is a normal number.
    whole = bits_of_float(wide.to(tl.int32).to(tl.float32))
    bits = tl.where(is_subnormal, whole, wide << 16)
    exponent = (bits >> 23).to(tl.int32) - tl.where(is_subnormal, 127 + 133, 127)
    t = float_of_bits((bits & 0x7FFFFF) | 0x3F800000) - 1.0
    value = LOG2[6] * t + LOG2[5]
    value = value * t + LOG2[4]
    value = value * t + LOG2[3]
    value = value * t + LOG2[2]
    value = value * t + LOG2[1]
    value = value * t + LOG2[0]
    return exponent.to(tl.float32) + value * t


@triton.jit
def exp2_of_negative(power):
    """2 to a power (float32) from -149 to 0.

    Example:
    -3.0 gives exactly 0.125.
    """
    # On a GPU this floor treats subnormal numbers as 0; sums of logarithms are never subnormal.
    whole = tl.floor(power)
    f = power - whole
    value = EXP2[5] * f + EXP2[4]
    value = value * f + EXP2[3]
    value = value * f + EXP2[2]
    value = value * f + EXP2[1]
    value = value * f + EXP2[0]
    # A subnormal result has no exponent to add to: the last 32 octaves are a product, which rounds once.
    octaves = (whole.to(tl.int32) + 32).to(tl.uint32) << 23
    return float_of_bits(bits_of_float(value) + octaves) * (2.0**-32)


@triton.jit
def logfmt_range(amax, amin):
    """log_min and log_max - log_min of blocks, from their two header fields (bf16 bits)."""
    log_max = log2_of_bf16(amax)
    log_min = tl.maximum(log2_of_bf16(amin), log_max - MAX_OCTAVES)
    return log_min, log_max - log_min


@triton.jit
def logfmt_extremes(halves):
    """The header fields of blocks (uint32, [blocks]): the largest and the smallest nonzero magnitude.

    Example:
    A block 0.5, -0.125, 0.0, ... gives 0x3F00 and 0x3E00; only a block of zeros gives 0 and 0.
    """
    magnitudes = (halves & 0x7FFF).to(tl.int32)
    # Zero wraps around to the largest number, so it is not the minimum.
    smallest_less_one = tl.min((magnitudes - 1) & 0xFFFF, axis=1)
    return tl.max(magnitudes, axis=1).to(tl.uint32), ((smallest_less_one + 1) & 0xFFFF).to(tl.uint32)


@triton.jit
def encode_logfmt_block(halves, amax, amin):
    """The codes of blocks with these extreme magnitudes: low bits [blocks, 128], high bits [blocks, 32].

    Example:
    The block 0.5, -0.125, 0.25, 0.0, ... with 0x3F00 and 0x3E00 gives the bytes FF 01 00 00 ...
    and 01 02 01 00 ...
    """
    log_min, octaves = logfmt_range(amax, amin)
    is_range = octaves > 0.0
    steps_per_octave = tl.where(is_range, tl.div_rn(NUM_STEPS, tl.where(is_range, octaves, 1.0)), 0.0)
    wide = halves.to(tl.uint32)
    magnitudes = wide & 0x7FFF
    u = (log2_of_bf16(magnitudes) - log_min[:, None]) * steps_per_octave[:, None]
    rounded = u + 0.5
    # If all magnitudes are equal there are 0 steps per octave: then `rounded` does not identify zeros.
    is_zero = (magnitudes == 0) | (rounded < 0.0)
    codes = tl.where(is_zero, 0, rounded.to(tl.int32) + 1).to(tl.uint32) | ((wide & 0x8000) >> 6)
    tops = tl.reshape(codes >> 8, (halves.shape[0], 4, PLANE)) << (2 * tl.arange(0, 4))[None, :, None]
    return codes.to(tl.uint8), tl.sum(tops, axis=1).to(tl.uint8)


@triton.jit
def decode_logfmt_block(low, high, amax, amin):
    """The values (float32, [blocks, 128]) of blocks with these header fields; low and high bits are uint8.

    Byte i of `high`, [blocks, 128], is the byte that holds the high bits of code i: byte i % 32 of its block.
    """
    log_min, octaves = logfmt_range(amax, amin)
    step = tl.div_rn(octaves, NUM_STEPS)
    planes = tl.arange(0, CHANNELS) // PLANE
    tops = high.to(tl.uint32) >> (2 * planes)[None, :]
    magnitudes = low.to(tl.uint32) | ((tops & 1) << 8)
    steps = (magnitudes.to(tl.int32) - 1).to(tl.float32)
    powers = exp2_of_negative(log_min[:, None] + steps * step[:, None])
    bits = tl.where(magnitudes == 0, 0, bits_of_float(powers))
    return float_of_bits(bits | ((tops & 2) << 30))


@triton.jit
def count_bits(words):
    """How many bits of each word (uint64) are set.

    Example:
    0b1011 gives 3.
    """
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((words * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def is_logfmt_block_encoded(mask_low, mask_high, blocks):
    """Bit b of a message's mask, for every b of `blocks`; the mask is two words (uint64)."""
    words = tl.where(blocks < 64, mask_low, mask_high)
    return ((words >> (blocks & 63).to(tl.uint64)) & 1) == 1


@triton.jit
def logfmt_block_offsets(mask_low, mask_high, blocks):
    """The byte offsets at which blocks (numbers below 128) begin in a message.

    A message holds every block, encoded or raw. An offset depends only on the mask bits of earlier blocks.

    Example:
    With the mask 0b101, the blocks 0, 1, 2, 3 begin at 16, 180, 436 and 600.
    """
    below = (tl.full(blocks.shape, 1, tl.uint64) << (blocks & 63).to(tl.uint64)) - 1
    is_low = blocks < 64
    num_encoded_low = count_bits(tl.where(is_low, mask_low & below, mask_low))
    num_encoded_high = count_bits(tl.where(is_low, 0, mask_high & below))
    # Written as a multiple of 4 to tell the compiler that it is one.
    saved = (RAW_BLOCK_BYTES - BLOCK_BYTES) // 4 * (num_encoded_low + num_encoded_high)
    return 4 * (MASK_BYTES // 4 + RAW_BLOCK_BYTES // 4 * blocks - saved)


@triton.jit
def store_logfmt_blocks(message, offsets, halves, amax, amin, is_encoded, is_raw):
    """Write encoded and raw blocks to their places in a message (pointer to uint8)."""
    low, high = encode_logfmt_block(halves, amax, amin)
    channels = tl.arange(0, CHANNELS)[None, :]
    header = message + offsets
    tl.store(header.to(tl.pointer_type(tl.uint32)), amax | (amin << 16), mask=is_encoded)
    tl.store((header + HEADER_BYTES)[:, None] + channels, low, mask=is_encoded[:, None])
    planes = (header + HEADER_BYTES + CHANNELS)[:, None] + tl.arange(0, PLANE)[None, :]
    tl.store(planes, high, mask=is_encoded[:, None])
    tl.store(header.to(tl.pointer_type(tl.uint16))[:, None] + channels, halves, mask=is_raw[:, None])


@triton.jit
def encode_logfmt(row, message, hidden, TILE_BLOCKS: tl.constexpr):
    """Encode a row of bf16 (pointer to uint16) into a message (pointer to uint8, aligned to 8 bytes)."""
    num_blocks = hidden // CHANNELS
    mask_low = tl.full((), 0, tl.uint64)
    mask_high = tl.full((), 0, tl.uint64)
    for first in range(0, num_blocks, TILE_BLOCKS):
        blocks = first + tl.arange(0, TILE_BLOCKS)
        is_block = blocks < num_blocks
        values = blocks[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        halves = tl.load(row + values, mask=is_block[:, None], other=0)
        amax, amin = logfmt_extremes(halves)
        is_encoded = is_block & (amax < BF16_AMAX_LIMIT)
        bits = tl.sum(is_encoded.to(tl.uint64) << (blocks & 63).to(tl.uint64), axis=0)
        mask_low |= tl.where(first < 64, bits, 0)
        mask_high |= tl.where(first < 64, 0, bits)
        offsets = logfmt_block_offsets(mask_low, mask_high, blocks)
        store_logfmt_blocks(message, offsets, halves, amax, amin, is_encoded, is_block & ~is_encoded)
    mask = message.to(tl.pointer_type(tl.uint64))
    tl.store(mask, mask_low)
    tl.store(mask + 1, mask_high)


@triton.jit
def load_logfmt_blocks(message, blocks, is_block):
    """Decode blocks of a message (pointer to uint8) for which `is_block` holds: float32, [blocks, 128]."""
    mask = message.to(tl.pointer_type(tl.uint64))
    mask_low, mask_high = tl.load(mask), tl.load(mask + 1)
    is_encoded = is_block & is_logfmt_block_encoded(mask_low, mask_high, blocks)
    is_raw = is_block & ~is_encoded
    header = message + logfmt_block_offsets(mask_low, mask_high, blocks)
    channels = tl.arange(0, CHANNELS)[None, :]
    extremes = tl.load(header.to(tl.pointer_type(tl.uint32)), mask=is_encoded, other=0)
    low = tl.load((header + HEADER_BYTES)[:, None] + channels, mask=is_encoded[:, None], other=0)
    planes = (header + HEADER_BYTES + CHANNELS)[:, None] + channels % PLANE
    high = tl.load(planes, mask=is_encoded[:, None], other=0)
    halves = tl.load(header.to(tl.pointer_type(tl.uint16))[:, None] + channels, mask=is_raw[:, None], other=0)
    decoded = decode_logfmt_block(low, high, extremes & 0xFFFF, extremes >> 16)
    return tl.where(is_encoded[:, None], decoded, bf16_bits_to_float(halves))
