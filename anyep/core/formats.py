"""The number formats of low-latency messages: FP8 with scales and LogFMT, as constants for every backend.

Backends that compute in float32 with these numbers, round after every product and every sum (no fused
multiply-add) and keep the order given here produce identical bits.

FP8: e4m3fn data and a scale for each block of `CHANNELS_PER_BLOCK` values of a token. Let amax be the largest
magnitude of the block, but at least `FP8_MIN_AMAX`. The scale is `amax * float32(1 / FP8_MAX)` and data is
`x * (FP8_MAX / amax)`, rounded to nearest even; or the scale is that number rounded up to a power of two, and
data is `x / scale`. A NaN makes its whole block NaN: scale 0x7FC00000, data 0x7F. An infinity becomes
`FP8_MAX` with its sign; the scale is infinite, and finite values of the block become zeros with their signs.

LogFMT: a message is a mask of `LOGFMT_MASK_BYTES` (bit b of the little-endian number: block b is encoded) and
the blocks one after the other. A block whose largest magnitude is below `LOGFMT_AMAX_LIMIT` is encoded; any
other block is sent as bf16. An encoded block is

    amax, amin     two bf16: the largest magnitude of the block, and the smallest that is not 0 (0 if none is)
    128 bytes      byte i: the low 8 bits of code i
    32 bytes       byte j: the high 2 bits of the codes j, j + 32, j + 64 and j + 96, from the lowest bits up

and a code has 10 bits: the sign, then 9 bits of magnitude. Magnitude 0 is zero; magnitude c from 1 to 511 is
`exp2(log_min + (c - 1) * step)` with `log_max = log2(amax)`, `log_min = max(log2(amin), log_max - 32)` and
`step = (log_max - log_min) / 510`. The encoder writes `c = floor(u + 0.5) + 1`, but
at least 0, with `u = (log2(|x|) - log_min) * (510 / (log_max - log_min))`; if amax equals amin, the quotient
is taken as 0.

The polynomials are minimax fits (Remez exchange in float64), their coefficients rounded to float32. Errors
were measured in float32 arithmetic, for every t and for the multiples of 2**-22 as f; at 0 both are exact.

    log2(1 + t) = t * (c[0] + t * (c[1] + ...)),  0 <= t < 1:  absolute error at most 4.5e-7
    exp2(f)     = c[0] + f * (c[1] + ...),        0 <= f < 1:  relative error at most 1.7e-7

Both are evaluated by Horner's rule from the last coefficient; the last product of log2 is that with t. The
logarithm of a number is its exponent, as a float32, plus the logarithm of its mantissa; a subnormal bf16 is
treated as an integer times 2**-133. exp2 uses `f = x - floor(x)`.
"""

from __future__ import annotations

from typing import Final

from anyep.sizes import CHANNELS_PER_SCALE

CHANNELS_PER_BLOCK: Final = CHANNELS_PER_SCALE

RAW, FP8, FP8_ROUNDED, FP8_UE8M0, LOGFMT = range(5)
"""The format of a row's values: unchanged; FP8; FP8 with scales that are powers of two; the same, sending
only the exponents of the scales; LogFMT."""

FP8_MAX: Final = 448.0
"""The largest e4m3fn."""
FP8_MIN_AMAX: Final = 1e-4
"""The lower bound of amax: blocks of smaller values are scaled as if this were their largest magnitude."""

LOGFMT_BITS: Final = 10
LOGFMT_MAX_CODE: Final = 2 ** (LOGFMT_BITS - 1) - 1
LOGFMT_NUM_STEPS: Final = LOGFMT_MAX_CODE - 1
"""Steps between the code of the smallest magnitude, 1, and that of the largest."""
LOGFMT_MAX_OCTAVES: Final = 32
LOGFMT_AMAX_LIMIT: Final = 1.0
LOGFMT_MASK_BYTES: Final = 16
LOGFMT_HEADER_BYTES: Final = 4
LOGFMT_BLOCK_BYTES: Final = LOGFMT_HEADER_BYTES + CHANNELS_PER_BLOCK * LOGFMT_BITS // 8
LOGFMT_RAW_BLOCK_BYTES: Final = CHANNELS_PER_BLOCK * 2
LOGFMT_MAX_HIDDEN: Final = 8 * LOGFMT_MASK_BYTES * CHANNELS_PER_BLOCK
"""`hidden` is a multiple of `CHANNELS_PER_BLOCK` and at most this."""

LOG2_COEFFICIENTS: Final = (
    1.442667841911316,
    -0.7205854654312134,
    0.4735534191131592,
    -0.32590198516845703,
    0.19429433345794678,
    -0.07955773919820786,
    0.015529919415712357,
)
EXP2_COEFFICIENTS: Final = (
    1.0,
    0.6931512951850891,
    0.24016444385051727,
    0.05579991266131401,
    0.009017030708491802,
    0.0018671300495043397,
)
