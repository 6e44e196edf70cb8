"""Triton's casts of low-latency messages, without a GPU: interpreted beside the CPU's, and read as PTX.

The interpreter tells whether the arithmetic is right, the compiled code whether a GPU would do the same: each
product and each sum rounded, true divisions, and memory read and written 16 bytes at a time.
"""

from __future__ import annotations

import re

import pytest

from tests.support.checks.cast_checks import CHECKS, FP8_MODES, casts
from tests.support.ptx import ptx_of
from tests.support.triton_interpreter import outcomes_of


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of("tests.support.checks.cast_checks")


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_in_the_interpreter(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


POINTERS = {"x": "*u16", "data": "*u8", "scales": "*fp32", "messages": "*u8", "out": "*fp32"}
TILE = {"TILE_BLOCKS": casts.TILE_BLOCKS}


def cast_ptx(power_of_two: bool, as_ue8m0: bool) -> str:
    pointers = POINTERS | ({"scales": "*u8"} if as_ue8m0 else {})
    constants = TILE | {"POWER_OF_TWO": power_of_two, "AS_UE8M0": as_ue8m0}
    return ptx_of(casts.cast_to_fp8_kernel, pointers, constants, casts.OPTIONS)


def encode_ptx(**options: object) -> str:
    return ptx_of(casts.encode_logfmt_kernel, POINTERS, TILE, casts.OPTIONS | options)


def decode_ptx() -> str:
    return ptx_of(casts.decode_logfmt_kernel, POINTERS, TILE, casts.OPTIONS)


def memory_operations(ptx: str, verb: str) -> list[str]:
    """Widths of loads ("ld") or stores ("st") in global memory: "v4.b32", "b32", ..."""
    return re.findall(rf"\b{verb}\.global\.((?:v\d\.)?b\d+)", ptx)


def assert_rounds_every_step(ptx: str) -> None:
    assert "fma." not in ptx
    # Without a rounding mode a product may be fused with a sum later; with it, never.
    for operation in ("mul", "add", "sub"):
        assert not re.search(rf"\b{operation}(\.ftz)?\.f32", ptx)
        assert f"{operation}.rn.ftz" not in ptx
    divisions = re.findall(r"\bdiv\.\w+(?:\.\w+)*\.f32", ptx)
    assert divisions
    assert set(divisions) == {"div.rn.f32"}
    assert ".approx" not in ptx
    assert ".local" not in ptx


@pytest.mark.parametrize(("power_of_two", "as_ue8m0"), FP8_MODES)
def test_the_compiled_cast_to_fp8(power_of_two: bool, as_ue8m0: bool) -> None:
    ptx = cast_ptx(power_of_two, as_ue8m0)
    assert_rounds_every_step(ptx)
    # Per thread 16 values of bf16, 16 codes; and a few scales.
    assert memory_operations(ptx, "ld") == ["v4.b32", "v4.b32"]
    assert memory_operations(ptx, "st") == ["v4.b32", "b8" if as_ue8m0 else "b32"]


def test_the_compiled_encoding_of_logfmt() -> None:
    ptx = encode_ptx()
    assert_rounds_every_step(ptx)
    assert set(memory_operations(ptx, "ld")) == {"v4.b32"}
    # Blocks begin at multiples of 4 bytes; the mask is two words of 64 bits.
    assert sorted(set(memory_operations(ptx, "st"))) == ["b32", "b64"]


def test_the_compiled_decoding_of_logfmt() -> None:
    ptx = decode_ptx()
    assert_rounds_every_step(ptx)
    assert sorted(set(memory_operations(ptx, "ld"))) == ["b32", "b64"]
    assert set(memory_operations(ptx, "st")) == {"v4.b32"}


def test_bits_are_counted_by_one_instruction() -> None:
    assert "popc.b64" in encode_ptx()
    assert "popc.b64" in decode_ptx()


def test_the_options_matter() -> None:
    assert "fma.rn.f32" in encode_ptx(enable_fp_fusion=True)
