"""Casts of whole tensors, by the functions that low-latency kernels use: for checks of them."""

from __future__ import annotations

import importlib

import pytest
import torch

from anyep.backends.cuda.slot_kernels import CAST_BLOCKS
from anyep.core import formats
from tests.support.checks.launching import launch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")
tl = importlib.import_module("triton.language")
casts = importlib.import_module("anyep.backends.cuda.kernels.casts")

CHANNELS = casts.CHANNELS
TILE_BLOCKS = CAST_BLOCKS


# The number of blocks differs between calls: the kernel is not specialized for its value.
@triton.jit(do_not_specialize=["num_blocks"])
def cast_to_fp8_kernel(
    x,
    data,
    scales,
    num_blocks,
    power_of_two: tl.constexpr,
    as_ue8m0: tl.constexpr,
    tile_blocks: tl.constexpr,
):
    """Cast blocks of bf16, x [num_blocks, 128], to FP8: data [num_blocks, 128], scales [num_blocks].

    Any number of contiguous rows forms such blocks.

    Example:
    A row of 128 values 1.0, -3.5, 0.0, 0.0, ... has amax 3.5, the scale 3.5 / 448 = 2**-7, and data 0x70
    (128), 0xFE (-448), 0x00, ... With power_of_two a row 1.0, -3.0, 0.0, 0.0, ... also has the scale 2**-7,
    not 3 / 448; its data is 0x70 (128), 0xFC (-384), 0x00, ... As UE8M0 that scale is the byte 120.
    """
    blocks = tl.program_id(0) * tile_blocks + tl.arange(0, tile_blocks)
    is_block = blocks < num_blocks
    values = blocks.to(tl.int64)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    halves = tl.load(x + values, mask=is_block[:, None], other=0)
    codes, scale = casts.fp8_block(halves, power_of_two)
    tl.store(data + values, codes, mask=is_block[:, None])
    if as_ue8m0:
        tl.store(scales + blocks, casts.ue8m0_of_scale(scale), mask=is_block)
    else:
        tl.store(scales + blocks, scale, mask=is_block)


def cast_to_fp8(
    x: torch.Tensor, data: torch.Tensor, scales: torch.Tensor, power_of_two: bool, as_ue8m0: bool
) -> None:
    """Cast the rows of x [rows, hidden], bf16, to FP8: data [rows, hidden], scales [rows, hidden / 128].

    Data is e4m3fn; scales are float32, or bytes with as_ue8m0, which needs power_of_two. All tensors are
    contiguous and begin at multiples of 16 bytes.
    """
    num_blocks = x.numel() // formats.CHANNELS_PER_BLOCK
    launch(
        *(cast_to_fp8_kernel, x.device.type, triton.cdiv(num_blocks, TILE_BLOCKS)),
        *(x.view(torch.uint16), data.view(torch.uint8), scales, num_blocks),
        power_of_two=power_of_two,
        as_ue8m0=as_ue8m0,
        tile_blocks=TILE_BLOCKS,
    )


@triton.jit
def encode_logfmt_kernel(x, messages, message_stride, hidden, tile_blocks: tl.constexpr):
    """Encode each row of x [rows, hidden], bf16, into its message; messages are `message_stride` bytes apart.

    A program encodes one message, `tile_blocks` blocks at a time: a power of two up to 64.

    Example:
    A row of two blocks, 0.5, -0.125, 0.25, 0.0, 0.0, ... and 2.0, 2.0, ..., becomes 16 + 164 + 256 bytes:

        01 00 00 ...        the mask: only the first block is below 1
        00 3F 00 3E         0.5 and 0.125: 510 steps are 2 octaves
        FF 01 00 00 ...     the low bits of the codes 0x1FF, 0x201 (the sign is 0x200), 0x100, 0, 0, ...
        01 02 01 00 ...     their high bits
        00 40 00 40 ...     2.0
    """
    row = tl.program_id(0).to(tl.int64)
    casts.encode_logfmt(x + row * hidden, messages + row * message_stride, hidden, tile_blocks)


def encode_logfmt_rows(x: torch.Tensor, messages: torch.Tensor) -> None:
    """Encode each row of x [rows, hidden], bf16, into its row of messages, uint8.

    A row of messages has room for `hidden` values that are not encoded, and begins at a multiple of 8 bytes;
    bytes after the end of a message are not changed.
    """
    num_rows, hidden = x.shape
    launch(
        *(encode_logfmt_kernel, x.device.type, num_rows),
        *(x.view(torch.uint16), messages, messages.stride(0), hidden),
        tile_blocks=TILE_BLOCKS,
    )


@triton.jit
def decode_logfmt_kernel(messages, message_stride, out, hidden, tile_blocks: tl.constexpr):
    """Decode messages, `message_stride` bytes apart, into the rows of out [rows, hidden], float32.

    A program decodes `tile_blocks` blocks of a message; the mask determines where they begin.

    Example:
    The message of `encode_logfmt_kernel` is decoded to 0.5, -0.125, 0.25, 0.0, 0.0, ... and 2.0, 2.0, ...
    With the header 00 3F 00 3F every code of its first block except 0 would mean 0.5.
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * tile_blocks + tl.arange(0, tile_blocks)
    is_block = blocks < hidden // CHANNELS
    values = casts.load_logfmt_blocks(messages + row * message_stride, blocks, is_block)
    places = out + row * hidden + blocks[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    tl.store(places, values, mask=is_block[:, None])


def decode_logfmt_rows(messages: torch.Tensor, out: torch.Tensor) -> None:
    """Decode each row of messages, uint8, into its row of out [rows, hidden], float32.

    A row of messages begins at a multiple of 8 bytes.
    """
    num_rows, hidden = out.shape
    num_blocks = hidden // formats.CHANNELS_PER_BLOCK
    launch(
        *(decode_logfmt_kernel, out.device.type, (num_rows, triton.cdiv(num_blocks, TILE_BLOCKS))),
        *(messages, messages.stride(0), out, hidden),
        tile_blocks=TILE_BLOCKS,
    )
