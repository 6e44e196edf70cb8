"""Triton's casts beside the CPU's, bit for bit: in the interpreter (device "cpu") and on a GPU ("cuda").

On a GPU there are more rows, for the interpreter is slow.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from anyep import formats
from anyep.backends.cpu.kernels import casts as cpu_casts
from tests.kernels.test_casts import (
    BLOCK,
    GUARD,
    KINDS,
    SPECIAL,
    Array,
    assert_same_bits,
    bf16_rows,
    floats_of,
    fp8,
    narrow,
    padded,
)

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")
tl = importlib.import_module("triton.language")
casts = importlib.import_module("anyep.backends.cuda.kernels.casts")

FP8_MODES = ((False, False), (True, False), (True, True))
"""power_of_two and as_ue8m0."""


@triton.jit
def narrow_kernel(values, e4m3, bf16, count, step: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * step + tl.arange(0, step)
    value = tl.load(values + places, mask=places < count)
    tl.store(e4m3 + places, casts.e4m3_of_float(value), mask=places < count)
    tl.store(bf16 + places, casts.float_to_bf16_bits(value), mask=places < count)


@triton.jit
def widen_kernel(halves, values, step: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, step)
    tl.store(values + places, casts.bf16_bits_to_float(tl.load(halves + places)))


def tensor_of(array: Array, device: str) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def rows_of_blocks(seed: int, num_rows: int, num_blocks: int) -> Array:
    """Blocks of kinds that hurt, in any order; some have special values too."""
    random = np.random.default_rng(seed)
    kinds = random.choice(sorted(KINDS), (num_rows, num_blocks))
    rows = np.array([[KINDS[kind](random, BLOCK) for kind in row] for row in kinds]).astype(np.uint16)
    has_special = random.random(rows.shape) < 1 / 512
    rows[has_special] = random.choice(SPECIAL, int(has_special.sum()))
    return rows.reshape(num_rows, num_blocks * BLOCK)


def blocks_of_every_amax(step: int) -> Array:
    """A block for every step-th magnitude of bf16, NaN and infinity included, as its last value."""
    random = np.random.default_rng(5)
    amax = np.arange(0, 2**15, step, dtype=np.uint16)[:, None]
    rows = (random.random((len(amax), BLOCK)) * (amax + 1)).astype(np.uint16)
    rows[:, -1:] = amax
    return rows | random.choice(np.array([0, 0x8000], np.uint16), rows.shape)


def gpu_fp8(rows: Array, power_of_two: bool, as_ue8m0: bool, device: str) -> tuple[Array, Array]:
    """What Triton's kernel gives; it writes nothing else."""
    num_rows, hidden = rows.shape
    scale_type = torch.uint8 if as_ue8m0 else torch.float32
    data = torch.full((num_rows + 2, hidden), GUARD, dtype=torch.uint8, device=device)
    # Rows of guards, so that the first scale is aligned whatever their number.
    scales = torch.full((num_rows + 32, hidden // BLOCK), GUARD, dtype=scale_type, device=device)
    x = tensor_of(rows.view(np.int16), device).view(torch.bfloat16)
    casts.cast_to_fp8(x, data[1:-1].view(torch.float8_e4m3fn), scales[16:-16], power_of_two, as_ue8m0)
    assert (data[[0, -1]] == GUARD).all()
    assert (scales[:16] == GUARD).all()
    assert (scales[-16:] == GUARD).all()
    return data[1:-1].cpu().numpy(), scales[16:-16].cpu().numpy()


def assert_fp8_like_the_cpu(rows: Array, device: str) -> None:
    for power_of_two, as_ue8m0 in FP8_MODES:
        ours, expected = gpu_fp8(rows, power_of_two, as_ue8m0, device), fp8(rows, power_of_two, as_ue8m0)
        assert_same_bits(ours[0], expected[0])
        assert_same_bits(ours[1], expected[1])


def gpu_encode(rows: Array, stride: int, device: str) -> Array:
    messages = torch.full((len(rows), stride), GUARD, dtype=torch.uint8, device=device)
    x = tensor_of(rows.view(np.int16), device).view(torch.bfloat16)
    casts.encode_logfmt_rows(x, messages)
    return messages.cpu().numpy()


def gpu_decode(messages: Array, hidden: int, device: str) -> Array:
    out = torch.full((len(messages) + 2, hidden), torch.nan, device=device)
    casts.decode_logfmt_rows(tensor_of(messages, device), out[1:-1])
    assert out[[0, -1]].isnan().all()
    return out[1:-1].cpu().numpy()


def cpu_encode(rows: Array, stride: int) -> Array:
    num_rows, hidden = rows.shape
    messages = np.full((num_rows, stride), GUARD, np.uint8)
    cpu_casts.encode_logfmt_rows(0, num_rows, rows.ctypes.data, messages.ctypes.data, stride, hidden)
    return messages


def cpu_decode(messages: Array, hidden: int) -> Array:
    num_rows, stride = messages.shape
    out = np.empty((num_rows, hidden), np.float32)
    cpu_casts.decode_logfmt_rows(0, num_rows, messages.ctypes.data, stride, out.ctypes.data, hidden)
    return out


def assert_logfmt_like_the_cpu(rows: Array, device: str, spare_bytes: int = 48) -> None:
    hidden = rows.shape[1]
    messages = cpu_encode(rows, formats.LOGFMT_MASK_BYTES + 2 * hidden + spare_bytes)
    # The guards behind a message are compared with it.
    assert_same_bits(gpu_encode(rows, messages.shape[1], device), messages)
    assert_same_bits(gpu_decode(messages, hidden, device), cpu_decode(messages, hidden))


def check_floats_narrow_like_on_the_cpu(device: str) -> None:
    # Sign, exponent and 8 bits of mantissa, followed by what decides ties: nothing, one bit, all bits.
    tops = np.arange(2**17, dtype=np.uint32) << 15
    patterns = np.concatenate([tops, tops | 1, tops | 0x7FFF, tops >> 15])
    values = patterns.view(np.float32)
    count, step = len(values), 2**17 if device == "cpu" else 1024
    e4m3 = torch.empty(count, dtype=torch.uint8, device=device)
    bf16 = torch.empty(count, dtype=torch.uint16, device=device)
    narrow_kernel[(triton.cdiv(count, step),)](
        tensor_of(values, device), e4m3, bf16, count, step, **casts.OPTIONS
    )
    expected_e4m3 = np.empty(count, np.uint8)
    narrow(values, expected_e4m3)
    expected_bf16 = np.where(np.isnan(values), 0x7FC0, bf16_rows(values)).astype(np.uint16)
    assert_same_bits(e4m3.cpu().numpy(), expected_e4m3)
    assert_same_bits(bf16.cpu().numpy(), expected_bf16)


def check_every_bf16_widens(device: str) -> None:
    patterns = np.arange(2**16).astype(np.uint16)
    values = torch.empty(2**16, device=device)
    widen_kernel[(1,)](tensor_of(patterns, device), values, 2**16, **casts.OPTIONS)
    assert_same_bits(values.cpu().numpy(), floats_of(patterns))


def check_the_example_of_cast_to_fp8(device: str) -> None:
    data, scales = gpu_fp8(bf16_rows([padded(1.0, -3.5)]), False, False, device)
    assert data[0].tolist() == padded(0x70, 0xFE)
    assert scales.tolist() == [[2.0**-7]]
    rows = bf16_rows([padded(1.0, -3.0)])
    data, scales = gpu_fp8(rows, True, False, device)
    assert data[0].tolist() == padded(0x70, 0xFC)
    assert scales.tolist() == [[2.0**-7]]
    assert gpu_fp8(rows, False, False, device)[1].tolist() == [[np.float32(3) * np.float32(1 / 448)]]
    assert gpu_fp8(rows, True, True, device)[1].tolist() == [[120]]


def check_special_values_of_fp8(device: str) -> None:
    first = [0x7FC0, 0x3F80, 0x7F80, *[0] * 125]
    second = [0x7F80, 0xFF80, 0x3F80, 0xBF80, *[0] * 124]
    rows = np.array([first, second, [0] * BLOCK, [0x8001] * BLOCK], np.uint16)
    for power_of_two in (False, True):
        data, scales = gpu_fp8(rows, power_of_two, False, device)
        assert data[0].tolist() == [0x7F] * BLOCK
        assert data[1].tolist() == padded(0x7E, 0xFE, 0x00, 0x80)
        assert scales.view(np.uint32)[:2].tolist() == [[0x7FC00000], [0x7F800000]]
    assert_fp8_like_the_cpu(rows, device)


def check_rows_become_fp8_like_on_the_cpu(device: str) -> None:
    repeats, step = (1, 61) if device == "cpu" else (50, 1)
    for seed, (num_rows, num_blocks) in enumerate([(1, 1), (3, 16), (7, 5), (5, 56), (2, 128)]):
        assert_fp8_like_the_cpu(rows_of_blocks(seed, num_rows * repeats, num_blocks), device)
    assert_fp8_like_the_cpu(blocks_of_every_amax(step), device)


def check_the_examples_of_logfmt(device: str) -> None:
    row = bf16_rows([padded(0.5, -0.125, 0.25), [2.0] * BLOCK]).reshape(-1)
    messages = gpu_encode(np.stack([row, row]), 448, device)
    first = messages[0].tobytes()
    assert first[:16] == bytes([1, *[0] * 15])
    assert first[16:20] == bytes([0x00, 0x3F, 0x00, 0x3E])
    assert first[20:148] == bytes([0xFF, 0x01, 0x00, *[0] * 125])
    assert first[148:180] == bytes([0x01, 0x02, 0x01, *[0] * 29])
    assert first[180:436] == bytes([0x00, 0x40] * BLOCK)
    assert first[436:] == bytes([GUARD] * 12)
    assert messages[1].tobytes() == first
    values = [*padded(0.5, -0.125, 0.25), *[2.0] * BLOCK]
    assert gpu_decode(messages, 256, device).tolist() == [values, values]
    messages[0, 16:20] = [0x00, 0x3F, 0x00, 0x3F]
    out = gpu_decode(messages, 256, device)
    assert out.tolist() == [[*padded(0.5, -0.5, 0.5), *[2.0] * BLOCK], values]


def check_rows_become_logfmt_like_on_the_cpu(device: str) -> None:
    repeats = 1 if device == "cpu" else 50
    for seed, (num_rows, num_blocks) in enumerate([(1, 1), (4, 5), (2, 17), (3, 56), (2, 128)]):
        # Messages that begin at multiples of 16 bytes, and of 8 only.
        for spare_bytes in (48, 56):
            rows = rows_of_blocks(seed, num_rows * repeats, num_blocks)
            assert_logfmt_like_the_cpu(rows, device, spare_bytes)


def check_blocks_of_every_amax_become_logfmt_like_on_the_cpu(device: str) -> None:
    # Pairs of amax and amin over all exponents, with all distances, in rows of the largest hidden size.
    num_rows = 2 if device == "cpu" else 200
    random = np.random.default_rng(6)
    amax = random.integers(0, 0x3FA0, num_rows * 128)
    amin = amax - (amax * random.random(len(amax)) ** 3).astype(np.int64)
    blocks = random.integers(amin[:, None], amax[:, None] + 1, (len(amax), BLOCK))
    blocks[:, 5], blocks[:, 99] = amax, amin
    blocks[:, 17] = 0
    blocks |= random.choice([0, 0x8000], blocks.shape)
    assert_logfmt_like_the_cpu(blocks.astype(np.uint16).reshape(num_rows, -1), device)


def check_a_message_has_its_raw_blocks_and_its_encoded_ones(device: str) -> None:
    random = np.random.default_rng(7)
    places_of_raw_blocks: list[list[int]] = [[], [0], [63, 64], [127], list(range(128))]
    values = random.uniform(-0.9, 0.9, (len(places_of_raw_blocks), 128, BLOCK))
    for row, raw in enumerate(places_of_raw_blocks):
        values[row, raw, 3] = 1.0
    rows = bf16_rows(values).reshape(len(values), -1)
    assert_logfmt_like_the_cpu(rows, device)
    for message, raw in zip(gpu_encode(rows, 33024, device), places_of_raw_blocks, strict=True):
        assert int.from_bytes(message[:16].tobytes(), "little") == 2**128 - 1 - sum(1 << n for n in raw)


def check_all_codes_mean_what_they_mean_on_the_cpu(device: str) -> None:
    # Codes that no block of these extremes would have, too.
    num_rows = 4 if device == "cpu" else 400
    random = np.random.default_rng(9)
    messages = random.integers(0, 256, (num_rows, 16 + 16 * formats.LOGFMT_BLOCK_BYTES), np.uint8)
    messages[:, :16] = [0xFF, 0xFF, *[0] * 14]
    headers: Array = np.sort(random.integers(1, 0x3F80, (num_rows, 16, 2)), axis=2)[..., ::-1]
    blocks = messages[:, 16:].reshape(num_rows, 16, formats.LOGFMT_BLOCK_BYTES)
    blocks[..., :4] = np.ascontiguousarray(headers, "<u2").view(np.uint8)
    messages[:, 16:] = blocks.reshape(num_rows, -1)
    assert_same_bits(gpu_decode(messages, 16 * BLOCK, device), cpu_decode(messages, 16 * BLOCK))


def check_no_rows_are_no_work(device: str) -> None:
    rows: Array = np.empty((0, 2 * BLOCK), np.uint16)
    data, scales = gpu_fp8(rows, False, False, device)
    assert (data.shape, scales.shape) == ((0, 256), (0, 2))
    assert gpu_encode(rows, 528, device).shape == (0, 528)
    assert gpu_decode(np.empty((0, 528), np.uint8), 256, device).shape == (0, 256)


CHECKS: tuple[Any, ...] = (
    check_floats_narrow_like_on_the_cpu,
    check_every_bf16_widens,
    check_the_example_of_cast_to_fp8,
    check_special_values_of_fp8,
    check_rows_become_fp8_like_on_the_cpu,
    check_the_examples_of_logfmt,
    check_rows_become_logfmt_like_on_the_cpu,
    check_blocks_of_every_amax_become_logfmt_like_on_the_cpu,
    check_a_message_has_its_raw_blocks_and_its_encoded_ones,
    check_all_codes_mean_what_they_mean_on_the_cpu,
    check_no_rows_are_no_work,
)
