"""The casts of low-latency messages, on every backend; and how exact LogFMT is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyep.core import formats
from anyep.sizes import LowLatencySizes
from tests.support.checks.casts import (
    BLOCK,
    KINDS,
    SPECIAL,
    Array,
    Numba,
    assert_fp8_like_the_slow_one,
    assert_logfmt_like_the_slow_one,
    slow_e4m3,
)
from tests.support.depth import examples
from tests.support.slow_logfmt import bf16_rows, floats_of, slow_exp2, slow_log2


@st.composite
def rows_that_hurt(draw: st.DrawFn) -> Array:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5))
    row = np.concatenate([KINDS[kind](random, BLOCK) for kind in kinds]).astype(np.uint16)
    places = st.integers(0, len(row) - 1)
    for place, pattern in draw(st.dictionaries(places, st.sampled_from(SPECIAL), max_size=4)).items():
        row[place] = pattern
    return row


@examples(30, deep=300)
@given(rows_that_hurt())
def test_any_row(row: Array) -> None:
    assert_fp8_like_the_slow_one(Numba(), row[None])
    assert_logfmt_like_the_slow_one(Numba(), row[None])


@pytest.mark.parametrize("scale", [1.0, 448.0, 2.0**-6, 2.0**-9, 1 / 3, 1e-4, 2.0**120, 2.0**-126])
def test_every_bf16_narrows_like_torch(scale: float) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        values = floats_of(np.arange(65536)) * np.float32(scale)
    assert (Numba().narrow(values) == slow_e4m3(torch.from_numpy(values)).numpy()).all()


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
    message = Numba().encode(row[None], 2 * len(row) + 64)
    values = floats_of(row).astype(np.float64).reshape(-1, BLOCK)
    decoded = Numba().decode(message, len(row)).astype(np.float64).reshape(-1, BLOCK)
    is_encoded = np.unpackbits(message[0, :8], bitorder="little") == 1
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
        f"{name}: {octaves.mean():.1f} octaves, {is_encoded.mean():.0%} encoded,"
        f" relative error at most {relative.max():.2e} (allowed {relative_bound.max():.2e}),"
        f" mean {relative.mean():.2e}, noise / signal {noise:.2e}, {is_under_range.sum()} under the range"
    )
