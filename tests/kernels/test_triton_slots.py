"""The GPU's low-latency kernels without a GPU: interpreted beside the CPU's, and read as PTX."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

from anyep import formats
from tests.support.checks.slot_checks import CHECKS, casts, gpu
from tests.support.ptx import RELEASE, ptx_of
from tests.support.triton_interpreter import outcomes_of


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of("tests.support.checks.slot_checks")


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_in_the_interpreter(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


RANKS = {"NUM_RANKS": 8, "RANK_BLOCK": 8}
TOPK = {"NUM_TOPK": 8, "SLOT_BLOCK": 8}
TILE = {"TILE_BLOCKS": casts.TILE_BLOCKS}
INT64 = (
    *("facts", "heaps", "generations", "state", "topk_idx", "lists", "messages", "layout_range"),
    *("stats",),
)
POINTERS = {
    **dict.fromkeys(INT64, "*i64"),
    "generation": "i64",
    "src_info": "*i32",
    "topk_weights": "*fp32",
    "x": "*u16",
    "out": "*u16",
}
ROWS_IN = POINTERS | {"x": "*i32", "scales": "*i32", "counts": "*i32", "stats": "*i32"}
PACK = {"TILE_ROWS": 4, "TILE_WORDS": 512, "TILE_SCALES": 64, "CAN_SHRINK": False}
ONE_WARP = {"num_warps": 1}
FOUR_WARPS = {"num_warps": 4}


def open_(posts: bool, can_shrink: bool) -> tuple[Any, ...]:
    how = {"ADVANCES": True, "POSTS": posts, "CAN_SHRINK": can_shrink}
    return gpu.open_call, POINTERS, RANKS | how, ONE_WARP


def receive(has_stats: bool, can_shrink: bool) -> tuple[Any, ...]:
    how = {"HAS_STATS": has_stats, "CAN_SHRINK": can_shrink, "TILE_EXPERTS": 32}
    return gpu.receive_notes, POINTERS, RANKS | how, ONE_WARP


def send(travel: int) -> tuple[Any, ...]:
    tiles = {"NUM_SHARES": 2, "TILE_TOKENS": 128}
    return gpu.send_tokens, POINTERS, RANKS | TOPK | TILE | tiles | {"TRAVEL": travel}, casts.OPTIONS


def pack(has_scales: bool, has_stats: bool) -> tuple[Any, ...]:
    how = {"HAS_SCALES": has_scales, "HAS_STATS": has_stats}
    return gpu.pack_tokens, ROWS_IN, RANKS | PACK | how, FOUR_WARPS


def give_back(use_logfmt: bool) -> tuple[Any, ...]:
    how = {"USE_LOGFMT": use_logfmt, "NUM_TOPK": 8, "NUM_SHARES": 8, "TILE_ROWS": 128}
    return gpu.return_rows, POINTERS, RANKS | TILE | how, casts.OPTIONS


def add_up(use_logfmt: bool, can_shrink: bool = False) -> tuple[Any, ...]:
    how = {"USE_LOGFMT": use_logfmt, "CAN_SHRINK": can_shrink, "TILE_LIST": 32, "IN_HARDWARE": True}
    return gpu.sum_tokens, POINTERS, RANKS | TOPK | TILE | how, casts.OPTIONS


KERNELS: dict[str, tuple[Any, ...]] = {
    "open": open_(False, False),
    "open and post": open_(True, False),
    "open where ranks can be masked": open_(False, True),
    "send as it is": send(formats.RAW),
    "send as FP8": send(formats.FP8),
    "send as rounded FP8": send(formats.FP8_ROUNDED),
    "send as UE8M0": send(formats.FP8_UE8M0),
    "receive": receive(False, False),
    "receive with statistics": receive(True, False),
    "receive where ranks can be masked": receive(True, True),
    "pack": pack(False, False),
    "pack with scales": pack(True, True),
    "return as it is": give_back(False),
    "return in LogFMT": give_back(True),
    "sum": add_up(False),
    "sum of LogFMT": add_up(True),
    "sum where ranks can be masked": add_up(False, True),
    "finish": (gpu.finish_call, POINTERS, RANKS | {"CAN_SHRINK": False}, ONE_WARP),
    "finish where ranks can be masked": (gpu.finish_call, POINTERS, RANKS | {"CAN_SHRINK": True}, ONE_WARP),
    "mask": (gpu.mask_rank, POINTERS, RANKS, ONE_WARP),
}


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    return {name: ptx_of(*parts) for name, parts in KERNELS.items()}


def test_nothing_lies_in_local_memory(ptx: dict[str, str]) -> None:
    for name, text in ptx.items():
        assert ".local" not in text, name


@pytest.mark.parametrize("name", ["send as it is", "pack", "pack with scales", "return as it is"])
def test_rows_are_copied_in_words_of_128_bits(ptx: dict[str, str], name: str) -> None:
    loads = re.findall(r"\bld\.global\.v4\.b32", ptx[name])
    stores = re.findall(r"\bst\.global\.v4\.b32", ptx[name])
    assert len(loads) >= 2
    assert len(stores) >= 2
    # Rows of 16 bits, or pieces of words, would be stored one by one.
    assert not re.search(r"\bst\.global\.(v\d\.)?b(8|16)\b", ptx[name])


def test_codes_of_fp8_are_stored_in_words_of_128_bits(ptx: dict[str, str]) -> None:
    for name in ("send as FP8", "send as rounded FP8", "send as UE8M0"):
        assert re.search(r"\bld\.global\.v4\.b32", ptx[name]), name
        assert re.search(r"\bst\.global\.v4\.b32", ptx[name]), name


def test_rows_are_added_up_in_words_of_128_bits(ptx: dict[str, str]) -> None:
    # Each of the 8 slots loads 16 values per thread.
    assert len(re.findall(r"\bld\.global\.v4\.b32", ptx["sum"])) >= 16
    assert re.search(r"\bst\.global\.v4\.b32", ptx["sum"])
    assert re.search(r"\bst\.global\.v4\.b32", ptx["sum of LogFMT"])


@pytest.mark.parametrize(
    "name",
    ["sum", "sum of LogFMT", "return in LogFMT", "send as FP8", "send as rounded FP8", "send as UE8M0"],
)
def test_products_and_sums_are_rounded(ptx: dict[str, str], name: str) -> None:
    text = ptx[name]
    assert "fma." not in text
    assert "mul.rn.f32" in text
    # Without a rounding mode a product may be fused with a sum later.
    assert not re.search(r"\b(mul|add|sub)(\.ftz)?\.f32", text)
    assert ".approx" not in text


def test_products_would_be_fused_without_the_options() -> None:
    kernel, pointers, constants, options = add_up(False)
    assert "fma.rn.f32" in ptx_of(kernel, pointers, constants, options | {"enable_fp_fusion": True})


BARRIER = r"bar\.sync|bar\.warp\.sync|barrier\.sync"


def places_of(pattern: str, text: str) -> list[int]:
    return [match.start() for match in re.finditer(pattern, text)]


@pytest.mark.parametrize("name", ["open and post", "send as FP8", "return as it is"])
def test_a_barrier_lies_between_the_words_of_a_note_and_its_release(ptx: dict[str, str], name: str) -> None:
    text = ptx[name]
    note = places_of(RELEASE, text)[-1]
    last_store = max(place for place in places_of(r"\bst\.global", text) if place < note)
    assert any(last_store < barrier < note for barrier in places_of(BARRIER, text))


@pytest.mark.parametrize("name", ["send as it is", "pack with scales", "return as it is", "sum"])
def test_the_last_program_sees_what_all_have_stored(ptx: dict[str, str], name: str) -> None:
    text = ptx[name]
    counted = places_of(r"atom\S*acq_rel\S*\.add", text)
    assert len(counted) == 1
    assert ".gpu." in text[counted[0] : counted[0] + 60]
    # Whatever way led there: the barrier lies in the same piece of code.
    label = max(place for place in places_of(r"(?m)^\$L\w+:", text) if place < counted[0])
    assert any(label < barrier < counted[0] for barrier in places_of(BARRIER, text))
    # Only after it is anything told to others.
    assert all(place > counted[0] for place in places_of(RELEASE, text))


@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith(("open", "receive"))])
def test_flags_are_acquired_in_the_loop_that_waits(ptx: dict[str, str], name: str) -> None:
    text = ptx[name]
    assert len(places_of(r"\.acquire\.sys|\.sys\.acquire", text)) >= 2, "once before the loop, once in it"
    assert "globaltimer" in text


def test_a_missing_row_is_the_smallest(ptx: dict[str, str]) -> None:
    assert re.search(r"(atom|red)\S*\.min\.s64", ptx["sum"])


ONES = {"NUM_RANKS": 1, "RANK_BLOCK": 2, "NUM_TOPK": 1, "SLOT_BLOCK": 2}
INTEGERS = ("local_experts", "num_scale_words", "max_tokens", "rows_per_expert", "num_experts")


@pytest.mark.parametrize("name", KERNELS)
def test_one_rank_one_expert_one_choice(name: str) -> None:
    """An integer that is 1 becomes a constant of the kernel."""
    kernel, pointers, constants, options = KERNELS[name]
    ones = {name: ONES.get(name, 1) for name in (*ONES, *INTEGERS) if name in kernel.arg_names}
    assert ".visible .entry" in ptx_of(kernel, pointers, constants | ones, options)
