"""LogFMT, slow and obvious: messages of rows in numpy, bit for bit what kernels write and read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anyep.core import formats

Array = np.ndarray[Any, Any]
BLOCK = formats.CHANNELS_PER_BLOCK


def bf16_rows(values: Any) -> Array:
    """Numbers as bf16 patterns."""
    exact = torch.from_numpy(np.array(values, np.float32))
    return exact.bfloat16().view(torch.int16).numpy().view(np.uint16)


def floats_of(rows: Array) -> Array:
    return np.left_shift(rows.astype(np.uint32), 16).view(np.float32)


def slow_polynomial(coefficients: tuple[float, ...], t: Array) -> Array:
    value = np.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * t
        value = value + np.float32(coefficient)
    return value


def slow_log2(values: Array) -> Array:
    half_mantissa, exponent = np.frexp(values)
    t = half_mantissa * np.float32(2) - np.float32(1)
    return (exponent - 1).astype(np.float32) + slow_polynomial(formats.LOG2_COEFFICIENTS, t) * t


def slow_exp2(powers: Array) -> Array:
    whole = np.floor(powers)
    return np.ldexp(slow_polynomial(formats.EXP2_COEFFICIENTS, powers - whole), whole.astype(np.int32))


def slow_range(amax: Array, amin: Array) -> tuple[Array, Array]:
    """The logarithm of the smallest magnitude, and the octaves above it; of each block, as a column."""
    log_max, log_min = slow_log2(amax)[:, None], slow_log2(amin)[:, None]
    log_min = np.maximum(log_min, log_max - np.float32(32))
    return log_min, log_max - log_min


def slow_codes(values: Array) -> tuple[Array, Array, Array]:
    """The codes of blocks that are encoded, their largest and their smallest magnitudes."""
    magnitudes = np.abs(values)
    amax = magnitudes.max(1)
    amin = np.where(amax > 0, magnitudes.min(1, where=magnitudes > 0, initial=np.inf), np.float32(0))
    log_min, octaves = slow_range(amax, amin)
    with np.errstate(divide="ignore"):
        factor = np.where(octaves > 0, np.float32(510) / octaves, np.float32(0))
    steps = np.floor((slow_log2(magnitudes) - log_min) * factor + np.float32(0.5))
    codes = np.where(magnitudes > 0, np.maximum(steps + 1, 0), 0).astype(np.int64)
    assert codes.max(initial=0) <= 511
    return codes + 512 * np.signbit(values), amax, amin


def slow_encode(row: Array) -> bytes:
    blocks = row.reshape(-1, BLOCK)
    is_encoded = np.abs(floats_of(blocks)).max(1) < 1
    codes, amax, amin = slow_codes(floats_of(blocks[is_encoded]))
    tops = (codes >> 8).reshape(-1, 4, BLOCK // 4)
    encoded = np.concatenate(
        [
            bf16_rows(np.stack([amax, amin], 1)).astype("<u2").view(np.uint8),
            (codes & 0xFF).astype(np.uint8),
            (tops << np.array([0, 2, 4, 6])[:, None]).sum(1).astype(np.uint8),
        ],
        axis=1,
    )
    mask = sum(1 << number for number in np.flatnonzero(is_encoded).tolist())
    next_encoded = iter(encoded)
    body = [
        (next(next_encoded) if is_code else block.astype("<u2")).tobytes()
        for is_code, block in zip(is_encoded, blocks, strict=True)
    ]
    return mask.to_bytes(16, "little") + b"".join(body)


def slow_decode(message: bytes, hidden: int) -> Array:
    mask, offset = int.from_bytes(message[:16], "little"), 16
    out = np.empty((hidden // BLOCK, BLOCK), np.float32)
    encoded = []
    for number in range(len(out)):
        is_encoded = mask >> number & 1
        num_bytes = 164 if is_encoded else 256
        part = np.frombuffer(message, np.uint8, num_bytes, offset)
        offset += num_bytes
        if is_encoded:
            encoded.append((number, part))
        else:
            out[number] = floats_of(part.view("<u2"))
    assert offset == len(message)
    if encoded:
        numbers, parts = (np.stack(column) for column in zip(*encoded, strict=True))
        amax, amin = floats_of(np.ascontiguousarray(parts[:, :4]).view("<u2")).T
        high = parts[:, None, 132:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
        codes = parts[:, 4:132].astype(np.int64) | high.reshape(-1, BLOCK).astype(np.int64) << 8
        log_min, octaves = slow_range(amax, amin)
        powers = log_min + (codes % 512 - 1).astype(np.float32) * (octaves / np.float32(510))
        values = np.where((codes % 512 > 0) & (amax > 0)[:, None], slow_exp2(powers), np.float32(0))
        out[numbers] = np.where(codes >= 512, -values, values)
    return out.reshape(-1)
