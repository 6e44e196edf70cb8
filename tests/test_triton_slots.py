"""The GPU's low-latency kernels without a GPU: interpreted beside the CPU's, and read as PTX.

The interpreter has no clock of a GPU, so `await_notes` is only compiled.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

from anyep import formats
from tests.ptx import ptx_of
from tests.slot_checks import CHECKS, casts, gpu
from tests.triton_interpreter import outcomes_of


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of("tests.slot_checks")


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_in_the_interpreter(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


RANKS = {"NUM_RANKS": 8, "RANK_BLOCK": 8}
TOPK = {"NUM_TOPK": 8, "SLOT_BLOCK": 8}
TILE = {"TILE_BLOCKS": casts.TILE_BLOCKS}
INT64 = (
    *("topk_idx", "lists", "messages", "notes", "ranges", "layout_range", "counts", "rows", "num_rows"),
    *("number", "header", "own_header", "headers", "missing", "outcome"),
)
POINTERS = {
    **dict.fromkeys(INT64, "*i64"),
    "masked": "*i8",
    "src_info": "*i32",
    "topk_weights": "*fp32",
    "x": "*u16",
    "out": "*u16",
    "patience_ns": "i64",
}
ROWS_OUT = POINTERS | {"messages": "*u8"}
ROWS_IN = POINTERS | {"x": "*i32", "scales": "*i32", "counts": "*i32", "stats": "*i32"}
PACK = {"NUM_SENDERS": 8, "SENDER_BLOCK": 8, "TILE_ROWS": 4, "TILE_WORDS": 512, "TILE_SCALES": 64}
AGREE = {"FIRST_AGREEING": 1, "END_AGREEING": 7, "NUM_WORDS": 8}


def send(travel: int) -> tuple[Any, ...]:
    return gpu.send_tokens, ROWS_OUT, TOPK | TILE | {"TRAVEL": travel}, casts.OPTIONS


def stage(use_logfmt: bool) -> tuple[Any, ...]:
    return gpu.stage_rows, ROWS_OUT, TILE | {"USE_LOGFMT": use_logfmt, "NUM_SENDERS": 8}, casts.OPTIONS


def add_up(use_logfmt: bool) -> tuple[Any, ...]:
    constants = {"USE_LOGFMT": use_logfmt, "NUM_RANKS": 8, "TILE_LIST": 32, "IN_HARDWARE": True}
    return gpu.sum_tokens, POINTERS, TOPK | TILE | constants, casts.OPTIONS


KERNELS: dict[str, tuple[Any, ...]] = {
    "send as it is": send(formats.RAW),
    "send as FP8": send(formats.FP8),
    "send as rounded FP8": send(formats.FP8_ROUNDED),
    "send as UE8M0": send(formats.FP8_UE8M0),
    "list tokens": (gpu.list_tokens, POINTERS, TOPK | {"TILE_TOKENS": 128}, {"num_warps": 4}),
    "post notes": (gpu.post_notes, POINTERS, RANKS | {"NUM_WORDS": 8}, {"num_warps": 1}),
    "post notes with four warps": (gpu.post_notes, POINTERS, RANKS | {"NUM_WORDS": 8}, {"num_warps": 4}),
    "await notes": (gpu.await_notes, POINTERS, RANKS, {"num_warps": 1}),
    "read notes": (
        gpu.read_notes,
        POINTERS,
        RANKS | AGREE | {"TILE_EXPERTS": 32},
        {"num_warps": 4},
    ),
    "pack": (gpu.pack_tokens, ROWS_IN, PACK | {"scales": None, "stats": None}, {"num_warps": 4}),
    "pack with scales": (gpu.pack_tokens, ROWS_IN, PACK, {"num_warps": 4}),
    "count rows": (gpu.count_rows, POINTERS, {"NUM_SENDERS": 8, "TILE_ROWS": 128}, {"num_warps": 4}),
    "stage as it is": stage(False),
    "stage in LogFMT": stage(True),
    "list returns": (gpu.list_returns, POINTERS, {"NUM_READERS": 8, "TILE_ROWS": 128}, {"num_warps": 4}),
    "sum": add_up(False),
    "sum of LogFMT": add_up(True),
}


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    return {name: ptx_of(*parts) for name, parts in KERNELS.items()}


def test_nothing_lies_in_local_memory(ptx: dict[str, str]) -> None:
    for name, text in ptx.items():
        assert ".local" not in text, name


@pytest.mark.parametrize("name", ["send as it is", "pack", "pack with scales", "stage as it is"])
def test_rows_are_copied_in_words_of_128_bits(ptx: dict[str, str], name: str) -> None:
    loads = re.findall(r"\bld\.global\.v4\.b32", ptx[name])
    stores = re.findall(r"\bst\.global\.v4\.b32", ptx[name])
    assert loads
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
    ["sum", "sum of LogFMT", "stage in LogFMT", "send as FP8", "send as rounded FP8", "send as UE8M0"],
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


@pytest.mark.parametrize("name", ["post notes", "post notes with four warps"])
def test_a_barrier_lies_between_the_words_of_a_note_and_its_release(ptx: dict[str, str], name: str) -> None:
    text = ptx[name]
    pattern = r"(atom|red)\S*(\.sys\.release|\.release\.sys)\S*\.max"
    releases = [match.start() for match in re.finditer(pattern, text)]
    assert releases
    first, last = releases[0], releases[-1]
    barriers = [match.start() for match in re.finditer(r"bar\.sync|bar\.warp\.sync|barrier\.sync", text)]
    stores = [match.start() for match in re.finditer(r"\bst\.global", text)]
    assert stores
    assert any(max(stores) < barrier < first for barrier in barriers)
    assert max(stores) < last


def test_notes_are_acquired_in_the_loop_that_waits(ptx: dict[str, str]) -> None:
    text = ptx["await notes"]
    assert len(re.findall(r"\.acquire\.sys|\.sys\.acquire", text)) >= 2, "once before the loop, once in it"
    assert "globaltimer" in text


def test_a_missing_row_is_the_smallest(ptx: dict[str, str]) -> None:
    assert re.search(r"(atom|red)\S*\.min\.s64", ptx["sum"])


ONES = ("NUM_RANKS", "RANK_BLOCK", "NUM_SENDERS", "SENDER_BLOCK", "NUM_READERS", "NUM_TOPK", "SLOT_BLOCK")
INTEGERS = ("local_experts", "num_scale_words", "max_tokens", "rows_per_expert", "num_experts")


@pytest.mark.parametrize("name", KERNELS)
def test_one_rank_one_expert_one_choice(name: str) -> None:
    """An integer that is 1 becomes a constant of the kernel."""
    kernel, pointers, constants, options = KERNELS[name]
    ones = {name: 1 for name in (*ONES, *INTEGERS) if name in kernel.arg_names}
    assert ".visible .entry" in ptx_of(kernel, pointers, constants | ones, options)
