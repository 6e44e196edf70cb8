"""Kernels that cast rows with the CPU's functions for single rows and blocks, as calls of low latency do."""

from __future__ import annotations

import numba

from anyep.backends.cpu.kernels.casts import (
    BLOCK_BYTES,
    CHANNELS,
    MASK_BYTES,
    RAW_BLOCK_BYTES,
    cast_row_to_fp8,
    decode_logfmt_block,
    encode_logfmt,
    is_logfmt_block_encoded,
)
from anyep.backends.cpu.kernels.memory import float32_at


@numba.njit(error_model="numpy")
def cast_to_fp8(first_row, end_row, x, data, scales, hidden, power_of_two, as_ue8m0):  # type: ignore[no-untyped-def]
    """Cast the rows of x [rows, hidden], bf16, to FP8: data [rows, hidden], scales [rows, hidden / 128].

    Example:
        A row of 128 values 1.0, -3.5, 0.0, 0.0, ... has amax 3.5, the scale 3.5 / 448 = 2**-7, and data
        0x70 (128), 0xFE (-448), 0x00, ... With power_of_two a row 1.0, -3.0, 0.0, 0.0, ... has the scale
        2**-7 too, not 3 / 448; its data is 0x70 (128), 0xFC (-384), 0x00, ... As UE8M0 that scale is the
        byte 120.
    """
    scale_bytes = 1 if as_ue8m0 else 4
    num_scales = hidden // CHANNELS
    for row in range(first_row, end_row):
        cast_row_to_fp8(
            x + 2 * row * hidden,
            data + row * hidden,
            scales + scale_bytes * row * num_scales,
            hidden,
            power_of_two,
            as_ue8m0,
        )


@numba.njit(error_model="numpy")
def encode_logfmt_rows(first_row, end_row, x, messages, message_stride, hidden):  # type: ignore[no-untyped-def]
    """Encode the rows of x [rows, hidden], bf16, each into its message, `message_stride` bytes apart.

    Example:
        A row of two blocks, 0.5, -0.125, 0.25, 0.0, 0.0, ... and 2.0, 2.0, ..., makes 16 + 164 + 256 bytes:

        01 00 00 ...        the mask: only the first block is below 1
        00 3F 00 3E         0.5 and 0.125: 510 steps span 2 octaves
        FF 01 00 00 ...     the low bits of the codes 0x1FF, 0x201 (the sign is 0x200), 0x100, 0, 0, ...
        01 02 01 00 ...     the high bits of these codes
        00 40 00 40 ...     2.0
    """
    for row in range(first_row, end_row):
        encode_logfmt(x + 2 * row * hidden, messages + row * message_stride, hidden)


@numba.njit(error_model="numpy")
def decode_logfmt_rows(first_row, end_row, messages, message_stride, out, hidden):  # type: ignore[no-untyped-def]
    """Decode messages, `message_stride` bytes apart, into the rows of out [rows, hidden], float32.

    Example:
        The message in the example of `encode_logfmt_rows` becomes 0.5, -0.125, 0.25, 0.0, 0.0, ... and 2.0,
        2.0, ... again. With the header 00 3F 00 3F every code of its first block but 0 would mean 0.5.
    """
    for row in range(first_row, end_row):
        message = messages + row * message_stride
        offset = MASK_BYTES
        for block in range(hidden // CHANNELS):
            is_encoded = is_logfmt_block_encoded(message, block)
            values = float32_at(out + 4 * (row * hidden + block * CHANNELS), CHANNELS)
            decode_logfmt_block(message + offset, is_encoded, values)
            offset += BLOCK_BYTES if is_encoded else RAW_BLOCK_BYTES
