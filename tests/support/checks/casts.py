"""The casts of low-latency messages give, bit for bit, what slow and obvious versions of them give.

A check takes a backend: "numba", or the device of Triton's kernels ("cpu" is the interpreter, which is slow
and so gets fewer rows).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import torch

from anyep.backends.cpu.kernels import casts as cpu_casts
from anyep.core import formats
from tests.support.checks import cast_kernels, deeper, row_casts
from tests.support.checks.launching import launch
from tests.support.depth import IS_DEEP
from tests.support.slow_logfmt import (
    bf16_rows,
    floats_of,
    slow_decode,
    slow_encode,
)

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")
tl = importlib.import_module("triton.language")
casts = importlib.import_module("anyep.backends.cuda.kernels.casts")

Array = np.ndarray[Any, Any]
BLOCK = formats.CHANNELS_PER_BLOCK
GUARD = 0xA5
FP8_MODES = ((False, False), (True, False), (True, True))
"""power_of_two and as_ue8m0."""


def padded(*values: float) -> list[float]:
    """A block that starts with these values and goes on with zeros."""
    return [*values, *[0.0] * (BLOCK - len(values))]


def assert_same_bits(ours: Array, expected: Array) -> None:
    assert ours.dtype == expected.dtype
    np.testing.assert_array_equal(ours.view(np.uint8), expected.view(np.uint8))


# Rows that hurt: each kind makes bf16 patterns from a generator.

KINDS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "zeros": lambda random, count: random.choice([0, 0x8000], count),
    "subnormal": lambda random, count: random.integers(0, 0x80, count) | random.choice([0, 0x8000], count),
    "tiny": lambda random, count: bf16_rows(random.normal(size=count) * 1e-5),
    "ordinary": lambda random, count: bf16_rows(random.normal(size=count)),
    "below one": lambda random, count: bf16_rows(random.uniform(-0.99, 0.99, size=count)),
    "huge": lambda random, count: random.integers(0x7F00, 0x7F80, count) | random.choice([0, 0x8000], count),
    "constant": lambda random, count: np.full(count, random.integers(0, 0x7F80)),
    "neighbours": lambda random, count: random.integers(0, 0x7F7F) + random.integers(0, 2, count),
    "all magnitudes below one": lambda random, count: random.integers(0, 0x3F80, count),
    "any bits": lambda random, count: random.integers(0, 2**16, count),
}
SPECIAL = [0, 0x8000, 1, 0x8001, 0x3F7F, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1]


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


def blocks_of_every_range(num_rows: int) -> Array:
    """Pairs of amax and amin over all exponents, with all distances, in rows of the largest hidden size."""
    random = np.random.default_rng(6)
    amax = random.integers(0, 0x3FA0, num_rows * 128)
    amin = amax - (amax * random.random(len(amax)) ** 3).astype(np.int64)
    blocks = random.integers(amin[:, None], amax[:, None] + 1, (len(amax), BLOCK))
    blocks[:, 5], blocks[:, 99], blocks[:, 17] = amax, amin, 0
    blocks |= random.choice([0, 0x8000], blocks.shape)
    return blocks.astype(np.uint16).reshape(num_rows, formats.LOGFMT_MAX_HIDDEN)


# The backends: each writes into guarded memory, and nothing else.


@numba.njit(error_model="numpy")
def narrow_in_numba(values, codes):  # type: ignore[no-untyped-def]
    for index in range(values.shape[0]):
        codes[index] = cpu_casts.e4m3_of_float(values[index])


class Numba:
    num_repeats = 1

    def narrow(self, values: Array) -> Array:
        """float32 to e4m3."""
        codes = np.empty(len(values), np.uint8)
        narrow_in_numba(values, codes)
        return codes

    def fp8(self, rows: Array, power_of_two: bool, as_ue8m0: bool = False) -> tuple[Array, Array]:
        """Data (uint8) and scales (float32, or exponents as uint8)."""
        num_rows, hidden = rows.shape
        data = np.full((num_rows + 2, hidden), GUARD, np.uint8)
        scales = np.full((num_rows + 2, (1 if as_ue8m0 else 4) * (hidden // BLOCK)), GUARD, np.uint8)
        parts = (rows.ctypes.data, data[1:].ctypes.data, scales[1:].ctypes.data)
        row_casts.cast_to_fp8(0, num_rows, *parts, hidden, power_of_two, as_ue8m0)
        for written in (data, scales):
            assert (written[[0, -1]] == GUARD).all()
        return data[1:-1], scales[1:-1] if as_ue8m0 else scales[1:-1].view(np.float32)

    def encode(self, rows: Array, stride: int) -> Array:
        """Messages of LogFMT, with guards behind each."""
        num_rows, hidden = rows.shape
        messages = np.full((num_rows, stride), GUARD, np.uint8)
        row_casts.encode_logfmt_rows(0, num_rows, rows.ctypes.data, messages.ctypes.data, stride, hidden)
        return messages

    def decode(self, messages: Array, hidden: int) -> Array:
        num_rows, stride = messages.shape
        out = np.full((num_rows + 2, hidden), np.nan, np.float32)
        row_casts.decode_logfmt_rows(0, num_rows, messages.ctypes.data, stride, out[1:].ctypes.data, hidden)
        assert np.isnan(out[[0, -1]]).all()
        return out[1:-1]


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


class Triton:
    """As Numba's."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.num_repeats = 1 if device == "cpu" else 50

    def there(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def rows_there(self, rows: Array) -> torch.Tensor:
        return self.there(rows.view(np.int16)).view(torch.bfloat16)

    def narrow_both(self, values: Array) -> tuple[Array, Array]:
        """float32 to e4m3, and to bf16."""
        count, step = len(values), 2**17 if self.device == "cpu" else 1024
        e4m3 = torch.empty(count, dtype=torch.uint8, device=self.device)
        bf16 = torch.empty(count, dtype=torch.uint16, device=self.device)
        launch(
            *(narrow_kernel, self.device, triton.cdiv(count, step)),
            *(self.there(values), e4m3, bf16, count),
            step=step,
        )
        return e4m3.cpu().numpy(), bf16.cpu().numpy()

    def narrow(self, values: Array) -> Array:
        return self.narrow_both(values)[0]

    def fp8(self, rows: Array, power_of_two: bool, as_ue8m0: bool = False) -> tuple[Array, Array]:
        num_rows, hidden = rows.shape
        kind = torch.uint8 if as_ue8m0 else torch.float32
        data = torch.full((num_rows + 2, hidden), GUARD, dtype=torch.uint8, device=self.device)
        # Rows of guards, so that the first scale is aligned whatever their number.
        scales = torch.full((num_rows + 32, hidden // BLOCK), GUARD, dtype=kind, device=self.device)
        ours = data[1:-1].view(torch.float8_e4m3fn), scales[16:-16]
        cast_kernels.cast_to_fp8(self.rows_there(rows), *ours, power_of_two, as_ue8m0)
        assert (data[[0, -1]] == GUARD).all()
        assert (scales[[*range(16), *range(-16, 0)]] == GUARD).all()
        return data[1:-1].cpu().numpy(), scales[16:-16].cpu().numpy()

    def encode(self, rows: Array, stride: int) -> Array:
        messages = torch.full((len(rows), stride), GUARD, dtype=torch.uint8, device=self.device)
        cast_kernels.encode_logfmt_rows(self.rows_there(rows), messages)
        return messages.cpu().numpy()

    def decode(self, messages: Array, hidden: int) -> Array:
        out = torch.full((len(messages) + 2, hidden), torch.nan, device=self.device)
        cast_kernels.decode_logfmt_rows(self.there(messages), out[1:-1])
        assert out[[0, -1]].isnan().all()
        return out[1:-1].cpu().numpy()


def casts_of(backend: str) -> Numba | Triton:
    return Numba() if backend == "numba" else Triton(backend)


# FP8, slowly.


def slow_e4m3(values: torch.Tensor) -> torch.Tensor:
    codes = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F, codes)


def slow_fp8(rows: Array, power_of_two: bool, as_ue8m0: bool) -> tuple[Array, Array]:
    """As the contract says it."""
    values = torch.from_numpy(floats_of(rows)).view(len(rows), -1, BLOCK)
    amax = torch.clamp(values.abs().amax(-1, keepdim=True), min=1e-4)
    scale = amax * torch.tensor(1 / 448, dtype=torch.float32)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        rounded = torch.ldexp(torch.ones_like(scale), exponent)
        scale = torch.where(scale.isfinite(), rounded, scale)
        scaled = values / scale
    else:
        scaled = values * (torch.full_like(amax, 448.0) / amax)
    scaled = torch.where(values.isinf(), values, scaled)
    codes = torch.where(amax.isnan(), 0x7F, slow_e4m3(scaled)).view(rows.shape).numpy()
    if as_ue8m0:
        biased = torch.where(scale.isfinite(), exponent + 127, 255)
        return codes, biased.squeeze(-1).numpy().astype(np.uint8)
    bits = torch.where(scale.isnan(), 0x7FC00000, scale.view(torch.int32))
    return codes, bits.squeeze(-1).numpy().view(np.float32)


def assert_fp8_like_the_slow_one(backend: Numba | Triton, rows: Array) -> None:
    for mode in FP8_MODES:
        for ours, expected in zip(backend.fp8(rows, *mode), slow_fp8(rows, *mode), strict=True):
            assert_same_bits(ours, expected)


def halfway_cases_of_e4m3() -> Array:
    """All numbers of e4m3, what lies between two of them, what is too large; and the neighbours of these."""
    positive = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    middles = (positive[1:] + positive[:-1]) / np.float32(2)
    beyond = np.array([464, 465, 480, 1e9, 3.4e38, np.inf], np.float32)
    cases = np.concatenate([positive, middles, beyond])
    near = [np.nextafter(cases, np.float32(side), dtype=np.float32) for side in (-np.inf, np.inf)]
    everything = np.concatenate([cases, *near])
    return np.concatenate([everything, -everything])


def check_floats_narrow_like_torch(backend: str) -> None:
    # Sign, exponent and 8 bits of mantissa, followed by what decides ties: nothing, one bit, all bits.
    tops = np.arange(2**17, dtype=np.uint32) << 15
    patterns = np.concatenate([tops, tops | 1, tops | 0x7FFF, tops >> 15]).view(np.float32)
    for values in (patterns, halfway_cases_of_e4m3()):
        assert_same_bits(casts_of(backend).narrow(values), slow_e4m3(torch.from_numpy(values)).numpy())
    values = np.array([448, 449, 464, 465, 1e30, np.inf], np.float32)
    assert casts_of(backend).narrow(np.concatenate([values, -values])).tolist() == [0x7E] * 6 + [0xFE] * 6
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert casts_of(backend).narrow(nans).tolist() == [0x7F] * 4


def check_bf16(device: str) -> None:
    """Every bf16 widens to its float, and floats of all exponents narrow to nearest even."""
    halves = np.arange(2**16).astype(np.uint16)
    values = torch.empty(2**16, device=device)
    launch(widen_kernel, device, 1, torch.from_numpy(halves).to(device), values, step=2**16)
    assert_same_bits(values.cpu().numpy(), floats_of(halves))
    tops = np.arange(2**17, dtype=np.uint32) << 15
    wide = np.concatenate([tops, tops | 1, tops | 0x7FFF, tops >> 15]).view(np.float32)
    expected = np.where(np.isnan(wide), 0x7FC0, bf16_rows(wide)).astype(np.uint16)
    assert_same_bits(Triton(device).narrow_both(wide)[1], expected)


def check_the_example_of_cast_to_fp8(backend: str) -> None:
    fp8 = casts_of(backend).fp8
    data, scales = fp8(bf16_rows([padded(1.0, -3.5)]), False)
    assert data[0].tolist() == padded(0x70, 0xFE)
    assert scales.tolist() == [[2.0**-7]]
    rows = bf16_rows([padded(1.0, -3.0)])
    data, scales = fp8(rows, True)
    assert data[0].tolist() == padded(0x70, 0xFC)
    assert scales.tolist() == [[2.0**-7]]
    assert fp8(rows, False)[1].tolist() == [[np.float32(3) * np.float32(1 / 448)]]
    assert fp8(rows, True, True)[1].tolist() == [[120]]
    # Four exponents are one little-endian int32.
    rows = bf16_rows([[value] * BLOCK for value in (448.0, 896.0, 1792.0, 3584.0)]).reshape(1, -1)
    assert fp8(rows, True, True)[1].view("<u4").tolist() == [[127 | 128 << 8 | 129 << 16 | 130 << 24]]


def check_special_values_of_fp8(backend: str) -> None:
    fp8 = casts_of(backend).fp8
    rows = np.array(
        [
            [0x7FC0, 0x3F80, 0x7F80, *[0] * 125],
            [0x7F80, 0xFF80, 0x3F80, 0xBF80, *[0] * 124],
            [0] * BLOCK,
            [0x8001] * BLOCK,
        ],
        np.uint16,
    )
    for power_of_two in (False, True):
        data, scales = fp8(rows, power_of_two)
        assert data[0].tolist() == [0x7F] * BLOCK
        assert data[1].tolist() == padded(0x7E, 0xFE, 0x00, 0x80)
        assert scales.view(np.uint32)[:2].tolist() == [[0x7FC00000], [0x7F800000]]
    assert fp8(rows, True, True)[1][:2].tolist() == [[0xFF], [0xFF]]
    assert_fp8_like_the_slow_one(casts_of(backend), rows)


@deeper
def check_rows_become_fp8(backend: str) -> None:
    kernels = casts_of(backend)
    for seed, (num_rows, num_blocks) in enumerate([(1, 1), (3, 16), (7, 5), (5, 56), (2, 128)]):
        rows = rows_of_blocks(seed, num_rows * kernels.num_repeats, num_blocks)
        assert_fp8_like_the_slow_one(kernels, rows)
    step = 1 if backend == "cuda" or IS_DEEP else 61
    assert_fp8_like_the_slow_one(kernels, blocks_of_every_amax(step))


# LogFMT, slowly.


def assert_logfmt_like_the_slow_one(backend: Numba | Triton, rows: Array, spare_bytes: int = 48) -> None:
    hidden = rows.shape[1]
    messages = [slow_encode(row) for row in rows]
    stride = formats.LOGFMT_MASK_BYTES + 2 * hidden + spare_bytes
    # Behind a message there are the guards.
    guarded = [np.frombuffer(message.ljust(stride, bytes([GUARD])), np.uint8) for message in messages]
    assert_same_bits(backend.encode(rows, stride), np.stack(guarded))
    expected = np.stack([slow_decode(message, hidden) for message in messages])
    assert_same_bits(backend.decode(np.stack(guarded), hidden), expected)


def check_the_examples_of_logfmt(backend: str) -> None:
    kernels = casts_of(backend)
    row = bf16_rows([padded(0.5, -0.125, 0.25), [2.0] * BLOCK]).reshape(-1)
    messages = kernels.encode(np.stack([row, row]), 448)
    first = messages[0].tobytes()
    assert first[:16] == bytes([1, *[0] * 15])
    assert first[16:20] == bytes([0x00, 0x3F, 0x00, 0x3E])
    assert first[20:148] == bytes([0xFF, 0x01, 0x00, *[0] * 125])
    assert first[148:180] == bytes([0x01, 0x02, 0x01, *[0] * 29])
    assert first[180:436] == bytes([0x00, 0x40] * BLOCK)
    assert first[436:] == bytes([GUARD] * 12)
    assert messages[1].tobytes() == first
    values = [*padded(0.5, -0.125, 0.25), *[2.0] * BLOCK]
    assert kernels.decode(messages, 256).tolist() == [values, values]
    messages[0, 16:20] = [0x00, 0x3F, 0x00, 0x3F]
    out = kernels.decode(messages, 256)
    assert out.tolist() == [[*padded(0.5, -0.5, 0.5), *[2.0] * BLOCK], values]


def check_which_blocks_are_raw(backend: str) -> None:
    kernels = casts_of(backend)
    patterns = [0x3F7F, 0xBF7F, 0x0000, 0x0001, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFF81]
    rows = np.array([[pattern, *[0x3F00] * 127] for pattern in patterns], np.uint16)
    assert kernels.encode(rows, 448)[:, 0].tolist() == [1] * 4 + [0] * 6
    zeros = np.array([[0, 0x8000] * 64], np.uint16)
    message = kernels.encode(zeros, 448)
    assert not message[0, 16:20].any()
    assert_same_bits(kernels.decode(message, BLOCK), floats_of(zeros))


def check_a_message_has_its_raw_blocks_and_its_encoded_ones(backend: str) -> None:
    places_of_raw_blocks: list[list[int]] = [[], [0], [63, 64], [127], list(range(128))]
    values = np.random.default_rng(7).uniform(-0.9, 0.9, (len(places_of_raw_blocks), 128, BLOCK))
    for row, raw in enumerate(places_of_raw_blocks):
        values[row, raw, 3] = 1.0
    rows = bf16_rows(values).reshape(len(values), -1)
    assert_logfmt_like_the_slow_one(casts_of(backend), rows)
    for message, raw in zip(casts_of(backend).encode(rows, 33024), places_of_raw_blocks, strict=True):
        assert int.from_bytes(message[:16].tobytes(), "little") == 2**128 - 1 - sum(1 << n for n in raw)
        assert (message[16 + 164 * (128 - len(raw)) + 256 * len(raw) :] == GUARD).all()


def check_rows_become_logfmt(backend: str) -> None:
    kernels = casts_of(backend)
    for seed, (num_rows, num_blocks) in enumerate([(1, 1), (4, 5), (2, 17), (3, 56), (2, 128)]):
        rows = rows_of_blocks(seed, num_rows * kernels.num_repeats, num_blocks)
        # Messages that begin at multiples of 16 bytes, and of 8 only.
        assert_logfmt_like_the_slow_one(kernels, rows, spare_bytes=48 if seed % 2 else 56)
    num_rows = {"numba": 8, "cpu": 2}.get(backend, 200)
    assert_logfmt_like_the_slow_one(kernels, blocks_of_every_range(num_rows))


def check_all_codes_mean_what_they_mean(backend: str) -> None:
    # Codes that no block of these extremes would have, too.
    kernels = casts_of(backend)
    num_rows = 4 * kernels.num_repeats
    random = np.random.default_rng(9)
    messages = random.integers(0, 256, (num_rows, 16 + 16 * formats.LOGFMT_BLOCK_BYTES), np.uint8)
    messages[:, :16] = [0xFF, 0xFF, *[0] * 14]
    headers: Array = np.sort(random.integers(1, 0x3F80, (num_rows, 16, 2)), axis=2)[..., ::-1]
    blocks = messages[:, 16:].reshape(num_rows, 16, formats.LOGFMT_BLOCK_BYTES)
    blocks[..., :4] = np.ascontiguousarray(headers, "<u2").view(np.uint8)
    messages[:, 16:] = blocks.reshape(num_rows, -1)
    expected = np.stack([slow_decode(message.tobytes(), 16 * BLOCK) for message in messages])
    assert_same_bits(kernels.decode(messages, 16 * BLOCK), expected)


def check_no_rows_are_no_work(backend: str) -> None:
    kernels = casts_of(backend)
    rows: Array = np.empty((0, 2 * BLOCK), np.uint16)
    data, scales = kernels.fp8(rows, False)
    assert (data.shape, scales.shape) == ((0, 256), (0, 2))
    assert kernels.encode(rows, 528).shape == (0, 528)
    assert kernels.decode(np.empty((0, 528), np.uint8), 256).shape == (0, 256)
