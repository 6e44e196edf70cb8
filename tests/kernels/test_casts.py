"""The casts of low-latency messages give, bit for bit, what slow and obvious versions of them give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyep import formats
from anyep.backends.cpu.kernels import casts
from anyep.sizes import LowLatencySizes

Array = np.ndarray[Any, Any]
BLOCK = formats.CHANNELS_PER_BLOCK
GUARD = 0xA5


# Not cached: Numba's cache would keep an old version of what these call.


@numba.njit("void(float32[::1], uint8[::1])", error_model="numpy")
def narrow(values, codes):  # type: ignore[no-untyped-def]
    for index in range(values.shape[0]):
        codes[index] = casts.e4m3_of_float(values[index])


@numba.njit("int64(int64, int64, int64)", error_model="numpy")
def encode_one(row, message, hidden):  # type: ignore[no-untyped-def]
    return casts.encode_logfmt(row, message, hidden)


def bf16_rows(values: Any) -> Array:
    """Numbers as bf16 patterns."""
    exact = torch.from_numpy(np.array(values, np.float32))
    return exact.bfloat16().view(torch.int16).numpy().view(np.uint16)


def floats_of(rows: Array) -> Array:
    return np.left_shift(rows.astype(np.uint32), 16).view(np.float32)


def padded(*values: float) -> list[float]:
    """A block that starts with these values and goes on with zeros."""
    return [*values, *[0.0] * (BLOCK - len(values))]


# Rows that hurt: each kind makes bf16 patterns from a generator.

ANY_BITS = "any bits"
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
    ANY_BITS: lambda random, count: random.integers(0, 2**16, count),
}
SPECIAL = [0, 0x8000, 1, 0x8001, 0x3F7F, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1]


@st.composite
def rows_that_hurt(draw: st.DrawFn) -> Array:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5))
    row = np.concatenate([KINDS[kind](random, BLOCK) for kind in kinds]).astype(np.uint16)
    places = st.integers(0, len(row) - 1)
    for place, pattern in draw(st.dictionaries(places, st.sampled_from(SPECIAL), max_size=4)).items():
        row[place] = pattern
    return row


# FP8, slowly.


def slow_e4m3(values: torch.Tensor) -> torch.Tensor:
    codes = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F, codes)


def slow_fp8(rows: Array, power_of_two: bool) -> tuple[Array, Array]:
    """Data (uint8) and scales (float32), as the contract says it."""
    values = torch.from_numpy(floats_of(rows)).view(len(rows), -1, BLOCK)
    amax = torch.clamp(values.abs().amax(-1, keepdim=True), min=1e-4)
    scale = amax * torch.tensor(1 / 448, dtype=torch.float32)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        rounded = torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
        scale = torch.where(scale.isfinite(), rounded, scale)
        scaled = values / scale
    else:
        scaled = values * (torch.full_like(amax, 448.0) / amax)
    scaled = torch.where(values.isinf(), values, scaled)
    codes = torch.where(amax.isnan(), 0x7F, slow_e4m3(scaled))
    bits = torch.where(scale.isnan(), 0x7FC00000, scale.view(torch.int32))
    return codes.view(rows.shape).numpy(), bits.squeeze(-1).numpy().view(np.float32)


def fp8(rows: Array, power_of_two: bool, as_ue8m0: bool = False) -> tuple[Array, Array]:
    """What the kernel gives; it writes nothing else."""
    assert rows.flags.c_contiguous
    num_rows, hidden = rows.shape
    scale_bytes = (1 if as_ue8m0 else 4) * (hidden // BLOCK)
    data = np.full((num_rows + 2, hidden), GUARD, np.uint8)
    scales = np.full((num_rows + 2, scale_bytes), GUARD, np.uint8)
    casts.cast_to_fp8(
        0,
        num_rows,
        rows.ctypes.data,
        data[1:].ctypes.data,
        scales[1:].ctypes.data,
        hidden,
        power_of_two,
        as_ue8m0,
    )
    for written in (data, scales):
        assert (written[[0, -1]] == GUARD).all()
    return data[1:-1], scales[1:-1] if as_ue8m0 else scales[1:-1].view(np.float32)


def assert_same_bits(ours: Array, expected: Array) -> None:
    assert ours.dtype == expected.dtype
    np.testing.assert_array_equal(ours.view(np.uint8), expected.view(np.uint8))


def assert_narrows_like_torch(values: Array) -> None:
    codes = np.empty(len(values), np.uint8)
    narrow(values, codes)
    assert_same_bits(codes, slow_e4m3(torch.from_numpy(values)).numpy())


@pytest.mark.parametrize("scale", [1.0, 448.0, 2.0**-6, 2.0**-9, 1 / 3, 1e-4, 2.0**120, 2.0**-126])
def test_every_bf16_narrows_like_torch(scale: float) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        assert_narrows_like_torch(floats_of(np.arange(65536)) * np.float32(scale))


def test_floats_of_all_exponents_narrow_like_torch() -> None:
    # Sign, exponent and 8 bits of mantissa, followed by what decides ties: nothing, one bit, all bits.
    tops = np.arange(2**17, dtype=np.uint32) << 15
    assert_narrows_like_torch(np.concatenate([tops, tops | 1, tops | 0x7FFF]).view(np.float32))


def test_halfway_cases_of_e4m3_go_to_even() -> None:
    positive = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    middles = (positive[1:] + positive[:-1]) / np.float32(2)
    beyond = np.array([464, 480, 1e9, 3.4e38, np.inf], np.float32)
    cases = np.concatenate([positive, middles, beyond])
    near = [np.nextafter(cases, np.float32(side), dtype=np.float32) for side in (-np.inf, np.inf)]
    everything = np.concatenate([cases, *near])
    assert_narrows_like_torch(np.concatenate([everything, -everything]))
    codes = np.empty(len(middles), np.uint8)
    narrow(middles, codes)
    assert (codes % 2 == 0).all()


def test_e4m3_saturates_and_has_one_nan() -> None:
    values = np.array([448, 449, 464, 465, 1e30, np.inf], np.float32)
    codes = np.empty(len(values), np.uint8)
    narrow(values, codes)
    assert codes.tolist() == [0x7E] * len(values)
    narrow(-values, codes)
    assert codes.tolist() == [0xFE] * len(values)
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    narrow(nans, codes[:4])
    assert codes[:4].tolist() == [0x7F] * 4


def test_the_example_of_cast_to_fp8() -> None:
    rows = bf16_rows([padded(1.0, -3.5)])
    data, scales = fp8(rows, power_of_two=False)
    assert data[0].tolist() == padded(0x70, 0xFE)
    assert scales.tolist() == [[2.0**-7]]
    rows = bf16_rows([padded(1.0, -3.0)])
    data, scales = fp8(rows, power_of_two=True)
    assert data[0].tolist() == padded(0x70, 0xFC)
    assert scales.tolist() == [[2.0**-7]]
    assert fp8(rows, power_of_two=False)[1].tolist() == [[np.float32(3) * np.float32(1 / 448)]]
    assert fp8(rows, power_of_two=True, as_ue8m0=True)[1].tolist() == [[120]]


@settings(max_examples=150)
@given(row=rows_that_hurt(), power_of_two=st.booleans())
def test_rows_become_fp8_like_torch(row: Array, power_of_two: bool) -> None:
    data, scales = fp8(row[None], power_of_two)
    expected_data, expected_scales = slow_fp8(row[None], power_of_two)
    assert_same_bits(data, expected_data)
    assert_same_bits(scales, expected_scales)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_of_every_amax_become_fp8_like_torch(power_of_two: bool) -> None:
    # A block for each magnitude of bf16, NaN and infinity included, as its last value.
    random = np.random.default_rng(5)
    amax = np.arange(2**15, dtype=np.uint16)[:, None]
    rows = (random.random((2**15, BLOCK)) * (amax + 1)).astype(np.uint16)
    rows[:, -1:] = amax
    rows |= random.choice(np.array([0, 0x8000], np.uint16), rows.shape)
    rows = rows.reshape(256, -1)
    data, scales = fp8(rows, power_of_two)
    expected_data, expected_scales = slow_fp8(rows, power_of_two)
    assert_same_bits(data, expected_data)
    assert_same_bits(scales, expected_scales)


@settings(max_examples=50)
@given(row=rows_that_hurt())
def test_ue8m0_is_the_exponent_of_the_scale(row: Array) -> None:
    data, exponents = fp8(row[None], power_of_two=True, as_ue8m0=True)
    expected_data, scales = slow_fp8(row[None], power_of_two=True)
    assert_same_bits(data, expected_data)
    finite = np.isfinite(scales)
    assert (np.exp2(exponents[finite].astype(np.float64) - 127) == scales[finite]).all()
    assert (exponents[~finite] == 0xFF).all()


def test_four_ue8m0_bytes_are_one_little_endian_int32() -> None:
    rows = bf16_rows([[value] * BLOCK for value in (448.0, 896.0, 1792.0, 3584.0)]).reshape(1, -1)
    packed = fp8(rows, power_of_two=True, as_ue8m0=True)[1].view("<u4")
    assert packed.tolist() == [[127 | 128 << 8 | 129 << 16 | 130 << 24]]


def test_special_values_of_fp8() -> None:
    rows = np.array(
        [[0x7FC0, 0x3F80, 0x7F80, *[0] * 125], [0x7F80, 0xFF80, 0x3F80, 0xBF80, *[0] * 124]], np.uint16
    )
    for power_of_two in (False, True):
        data, scales = fp8(rows, power_of_two)
        assert data[0].tolist() == [0x7F] * BLOCK
        assert data[1].tolist() == padded(0x7E, 0xFE, 0x00, 0x80)
        assert scales.view(np.uint32).tolist() == [[0x7FC00000], [0x7F800000]]
        assert fp8(rows, power_of_two=True, as_ue8m0=True)[1].tolist() == [[0xFF], [0xFF]]


# LogFMT, slowly.


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


def slow_range(amax: np.float32, amin: np.float32) -> tuple[np.float32, np.float32]:
    log_max, log_min = slow_log2(np.array([amax, amin], np.float32))
    log_min = max(log_min, log_max - np.float32(32))
    return log_min, log_max - log_min


def slow_encode(row: Array) -> bytes:
    mask, body = 0, b""
    for number, block in enumerate(row.reshape(-1, BLOCK)):
        values = floats_of(block)
        magnitudes = np.abs(values)
        if not magnitudes.max() < 1:
            body += block.astype("<u2").tobytes()
            continue
        mask |= 1 << number
        nonzero = magnitudes > 0
        codes = np.zeros(BLOCK, np.int64)
        amax = amin = np.float32(0)
        if nonzero.any():
            amax, amin = magnitudes.max(), magnitudes[nonzero].min()
            log_min, octaves = slow_range(amax, amin)
            factor = np.float32(510) / octaves if octaves > 0 else np.float32(0)
            u = (slow_log2(magnitudes[nonzero]) - log_min) * factor
            codes[nonzero] = np.maximum(np.floor(u + np.float32(0.5)) + 1, 0).astype(np.int64)
        assert codes.max() <= 511
        codes += 512 * np.signbit(values)
        tops = [int(code) >> 8 for code in codes]
        body += bf16_rows([amax, amin]).astype("<u2").tobytes()
        body += bytes(int(code) & 0xFF for code in codes)
        body += bytes(
            tops[j] + 4 * tops[j + 32] + 16 * tops[j + 64] + 64 * tops[j + 96] for j in range(BLOCK // 4)
        )
    return mask.to_bytes(16, "little") + body


def slow_decode(message: bytes, hidden: int) -> Array:
    mask, offset = int.from_bytes(message[:16], "little"), 16
    blocks = []
    for number in range(hidden // BLOCK):
        if not mask >> number & 1:
            blocks.append(floats_of(np.frombuffer(message, "<u2", BLOCK, offset)))
            offset += 256
            continue
        amax, amin = floats_of(np.frombuffer(message, "<u2", 2, offset))
        low, high = message[offset + 4 : offset + 132], message[offset + 132 : offset + 164]
        codes = np.array([low[i] | (high[i % 32] >> 2 * (i // 32) & 3) << 8 for i in range(BLOCK)])
        magnitudes, is_negative = codes % 512, codes >= 512
        values = np.zeros(BLOCK, np.float32)
        if amax > 0:
            log_min, octaves = slow_range(amax, amin)
            step = octaves / np.float32(510)
            powers = log_min + (magnitudes - 1).astype(np.float32) * step
            values = np.where(magnitudes > 0, slow_exp2(powers), np.float32(0))
        blocks.append(np.where(is_negative, -values, values))
        offset += 164
    assert offset == len(message)
    return np.concatenate(blocks)


def encode(row: Array) -> bytes:
    """What the kernel gives; it writes nothing behind the message."""
    assert row.flags.c_contiguous
    message = np.full(16 + 2 * len(row) + 64, GUARD, np.uint8)
    num_bytes = encode_one(row.ctypes.data, message.ctypes.data, len(row))
    assert (message[num_bytes:] == GUARD).all()
    return message[:num_bytes].tobytes()


def decode(message: bytes, hidden: int) -> Array:
    bytes_of_message = np.frombuffer(message, np.uint8).copy()
    out = np.full((3, hidden), np.nan, np.float32)
    casts.decode_logfmt_rows(0, 1, bytes_of_message.ctypes.data, 0, out[1:].ctypes.data, hidden)
    assert np.isnan(out[[0, 2]]).all()
    return out[1]


def test_formats() -> None:
    assert (formats.LOGFMT_BLOCK_BYTES, formats.LOGFMT_RAW_BLOCK_BYTES) == (164, 256)
    assert (formats.LOGFMT_MAX_CODE, formats.LOGFMT_NUM_STEPS) == (511, 510)
    assert formats.LOGFMT_MAX_HIDDEN == 16384
    sizes = LowLatencySizes(1, formats.LOGFMT_MAX_HIDDEN, 1)
    num_blocks = formats.LOGFMT_MAX_HIDDEN // BLOCK
    assert formats.LOGFMT_MASK_BYTES + 256 * num_blocks <= sizes.combine_message_bytes


def test_polynomials_are_as_exact_as_said() -> None:
    for coefficients in (formats.LOG2_COEFFICIENTS, formats.EXP2_COEFFICIENTS):
        assert all(float(np.float32(number)) == number for number in coefficients)
    mantissas = np.arange(0x3F800000, 0x40000000, 5, dtype=np.uint32).view(np.float32)
    log_error = np.abs(slow_log2(mantissas) - np.log2(mantissas.astype(np.float64))).max()
    fractions = (np.arange(2**20) / 2**20).astype(np.float32)
    exp_error = np.abs(slow_exp2(fractions) / np.exp2(fractions.astype(np.float64)) - 1).max()
    print(f"log2: absolute error {log_error:.2e}; exp2: relative error {exp_error:.2e}")
    assert log_error <= 4.5e-7
    assert exp_error <= 1.7e-7
    assert slow_log2(np.float32([1, 0.5, 2**-133])).tolist() == [0, -1, -133]
    assert slow_exp2(np.float32([0, -1, -133])).tolist() == [1, 0.5, 2**-133]


def test_logarithms_keep_the_order_of_bf16() -> None:
    # Otherwise a value could get a code above that of the block's largest one, which overflows into the sign.
    assert (np.diff(slow_log2(floats_of(np.arange(1, 0x3F80)))) > 0).all()


def test_the_examples_of_logfmt() -> None:
    row = bf16_rows([padded(0.5, -0.125, 0.25), [2.0] * BLOCK]).reshape(-1)
    rows, messages = np.stack([row, row]), np.zeros((2, 448), np.uint8)
    casts.encode_logfmt_rows(0, 2, rows.ctypes.data, messages.ctypes.data, 448, 256)
    first = messages[0].tobytes()
    assert first[:16] == bytes([1, *[0] * 15])
    assert first[16:20] == bytes([0x00, 0x3F, 0x00, 0x3E])
    assert first[20:148] == bytes([0xFF, 0x01, 0x00, *[0] * 125])
    assert first[148:180] == bytes([0x01, 0x02, 0x01, *[0] * 29])
    assert first[180:436] == bytes([0x00, 0x40] * BLOCK)
    assert encode(row) == first[:436] == messages[1, :436].tobytes()
    values = [*padded(0.5, -0.125, 0.25), *[2.0] * BLOCK]
    out = np.empty((2, 256), np.float32)
    casts.decode_logfmt_rows(0, 2, messages.ctypes.data, 448, out.ctypes.data, 256)
    assert out.tolist() == [values, values]
    messages[0, 16:20] = [0x00, 0x3F, 0x00, 0x3F]
    casts.decode_logfmt_rows(0, 1, messages.ctypes.data, 448, out.ctypes.data, 256)
    assert out.tolist() == [[*padded(0.5, -0.5, 0.5), *[2.0] * BLOCK], values]


def assert_logfmt_like_the_slow_one(row: Array) -> None:
    message = slow_encode(row)
    assert encode(row) == message
    ours, expected = decode(message, len(row)), slow_decode(message, len(row))
    assert_same_bits(ours, expected)


@settings(max_examples=150)
@given(row=rows_that_hurt())
def test_rows_become_logfmt_like_the_slow_one(row: Array) -> None:
    assert_logfmt_like_the_slow_one(row)


def test_blocks_of_every_amax_become_logfmt_like_the_slow_one() -> None:
    # Pairs of amax and amin over all exponents, with all distances, in rows of the largest hidden size.
    random = np.random.default_rng(6)
    amax = random.integers(0, 0x3FA0, 8 * 128)
    amin = amax - (amax * random.random(len(amax)) ** 3).astype(np.int64)
    blocks = random.integers(amin[:, None], amax[:, None] + 1, (len(amax), BLOCK))
    blocks[:, 5], blocks[:, 99] = amax, amin
    blocks[:, 17] = 0
    blocks |= random.choice([0, 0x8000], blocks.shape)
    for row in blocks.astype(np.uint16).reshape(8, formats.LOGFMT_MAX_HIDDEN):
        assert_logfmt_like_the_slow_one(row)


@pytest.mark.parametrize("raw", [(), (0,), (63, 64), (127,), tuple(range(128))])
def test_a_message_has_its_raw_blocks_and_its_encoded_ones(raw: tuple[int, ...]) -> None:
    random = np.random.default_rng(7)
    values = random.uniform(-0.9, 0.9, (128, BLOCK))
    values[list(raw), 3] = 1.0
    row = bf16_rows(values).reshape(-1)
    message = encode(row)
    assert len(message) == 16 + 164 * (128 - len(raw)) + 256 * len(raw)
    assert int.from_bytes(message[:16], "little") == 2**128 - 1 - sum(1 << number for number in raw)
    out = decode(message, len(row)).reshape(128, BLOCK)
    assert_same_bits(out[list(raw)], floats_of(row).reshape(128, BLOCK)[list(raw)])


def test_which_blocks_are_raw() -> None:
    def is_raw(pattern: int) -> bool:
        return encode(np.array([pattern, *[0x3F00] * 127], np.uint16))[0] == 0

    assert [is_raw(pattern) for pattern in (0x3F7F, 0xBF7F, 0x0000, 0x0001)] == [False] * 4
    assert [is_raw(pattern) for pattern in (0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFF81)] == [True] * 6


def test_zeros_survive_logfmt() -> None:
    row = np.array([0, 0x8000] * 64, np.uint16)
    message = encode(row)
    assert message[16:20] == bytes(4)
    assert_same_bits(decode(message, BLOCK), floats_of(row))


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "gauss": lambda random, shape: random.normal(size=shape) * 0.2,
    "uniform": lambda random, shape: random.uniform(-0.99, 0.99, shape),
    "laplace": lambda random, shape: random.laplace(size=shape) * 0.05,
    "lognormal, sigma 1": lambda random, shape: random.lognormal(-5, 1, shape),
    "lognormal, sigma 3": lambda random, shape: random.lognormal(-10, 3, shape),
    "lognormal, sigma 8": lambda random, shape: random.lognormal(-25, 8, shape),
    "student-t": lambda random, shape: random.standard_t(2, shape) * 0.01,
    "sparse": lambda random, shape: random.normal(size=shape) * 0.2 * (random.random(shape) < 0.05),
    "constant": lambda random, shape: np.broadcast_to(random.uniform(-0.99, 0.99, (shape[0], 1)), shape),
    "one outlier": lambda random, shape: np.where(
        np.arange(shape[1]) == 9, 0.9, random.normal(size=shape) * 1e-6
    ),
    "tiny": lambda random, shape: random.normal(size=shape) * 1e-30,
    "subnormal": lambda random, shape: random.normal(size=shape) * 2.0**-129,
    "past the range": lambda random, shape: np.exp2(-random.uniform(0.1, 60, shape)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_errors_of_logfmt(name: str) -> None:
    row = bf16_rows(DISTRIBUTIONS[name](np.random.default_rng(8), (64, BLOCK))).reshape(-1)
    message = encode(row)
    values = floats_of(row).astype(np.float64).reshape(-1, BLOCK)
    decoded = decode(message, len(row)).astype(np.float64).reshape(-1, BLOCK)
    is_encoded = np.array([int.from_bytes(message[:16], "little") >> number & 1 for number in range(64)]) == 1
    assert is_encoded.any()
    np.testing.assert_array_equal(decoded[~is_encoded], values[~is_encoded])
    values, decoded = values[is_encoded], decoded[is_encoded]

    magnitudes = np.abs(values)
    with np.errstate(divide="ignore"):
        logs = np.log2(magnitudes)
    log_max = logs.max(1, keepdims=True)
    log_min = np.maximum(logs.min(1, keepdims=True, where=magnitudes > 0, initial=np.inf), log_max - 32)
    octaves = log_max - log_min
    # What float32 adds to half a step: the polynomials' errors, and roundings of logarithms and of products.
    allowance = 1e-6 + (np.abs(log_min) + 4 * octaves) * 2.0**-23
    relative_bound = np.exp2(octaves / 510 / 2 + allowance) - 1
    half_of_the_last_bit = 2.0**-150
    errors = np.abs(decoded - values)
    in_range = logs >= log_min
    assert (errors <= magnitudes * relative_bound + half_of_the_last_bit)[in_range].all()
    is_under_range = ~in_range & (magnitudes > 0)
    assert (errors < np.exp2(log_max - 32))[is_under_range].all()
    assert (decoded[magnitudes == 0] == 0).all()
    assert (np.signbit(decoded) == np.signbit(values)).all()

    relative = errors[in_range] / magnitudes[in_range]
    noise = np.sqrt((errors**2).sum() / (values**2).sum())
    print(
        f"{name}: {octaves.mean():.1f} octaves, {8 * len(message) / len(row):.2f} bits per value,"
        f" relative error at most {relative.max():.2e} (allowed {relative_bound.max():.2e}),"
        f" mean {relative.mean():.2e}, noise / signal {noise:.2e}, {is_under_range.sum()} under the range"
    )
