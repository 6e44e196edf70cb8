"""The GPU's kernels without a GPU: the data kernels in Triton's interpreter, and what all compile to."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'anyep[cuda]'")

from tests.ptx import ptx_of
from tests.triton_interpreter import outcomes_of

BLOCKS = {"NUM_RANKS": 4, "RANK_BLOCK": 4}


def test_data_kernels_in_the_interpreter() -> None:
    outcomes = outcomes_of("tests.triton_checks")
    assert set(outcomes) == {"check_layout", "check_windows", "check_sums", "check_counts"}
    for name, problem in outcomes.items():
        assert not problem, f"{name}: {problem}"


def kernels() -> dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Each kernel with the types of its arguments, its constants, and its options."""
    from anyep.backends.cuda.kernels import counting, letters, sums, windows

    return {
        "count_layout": (
            counting.count_layout,
            {"topk_idx": "*i64", "tokens_per_rank": "*i32", "tokens_per_expert": "*i32", "in_rank": "*i8"},
            {"NUM_RANKS": 8, "TOPK_BLOCK": 8, "EXPERT_BLOCK": 512, "TILE_TOKENS": 64},
            {"num_warps": 8},
        ),
        "place_tokens": (
            counting.place_tokens,
            {"in_rank": "*i8", "position": "*i32", "channel_counts": "*i32"},
            {"NUM_RANKS": 8, "TILE_TOKENS": 512},
            {"num_warps": 4},
        ),
        "exchange_letters": (
            letters.exchange_letters,
            {
                "call_number": "*i64",
                "letter": "*i64",
                "mailboxes": "*i64",
                "own_mailboxes": "i64",
                "bases": "*i64",
                "places": "*i64",
                "outcome": "*i64",
                "patience_ns": "i64",
                "counts": "*i32",
                "channel_counts": "*i32",
                "expert_counts": "*i32",
            },
            {
                **BLOCKS,
                "FIRST_AGREEING": 1,
                "END_AGREEING": 11,
                "OFFSET_WORD": 12,
                "NUM_WORDS": 32,
                "CHANNEL_BLOCK": 16,
                "EXPERT_BLOCK": 32,
            },
            {"num_warps": 1},
        ),
        "read_counts": (
            letters.read_counts,
            {
                "letters": "i64",
                "channel_counts": "*i32",
                "rank_prefix": "*i32",
                "channel_prefix": "*i32",
                "recv_channel_prefix": "*i32",
                "totals": "*i32",
            },
            {**BLOCKS, "CHANNEL_BLOCK": 16, "EXPERT_BLOCK": 32},
            {"num_warps": 4},
        ),
        "meet": (
            letters.meet,
            {
                "flags_there": "*i64",
                "flags_here": "i64",
                "number": "*i64",
                "outcome": "*i64",
                "patience_ns": "i64",
            },
            BLOCKS,
            {"num_warps": 1},
        ),
        "send_to_windows": (
            windows.send_to_windows,
            {
                "x": "*i32",
                "scales": "*i32",
                "topk_idx": "*i64",
                "topk_weights": "*fp32",
                "send_head": "*i32",
                "places": "*i64",
                "outcome": "*i64",
            },
            {
                "NUM_RECEIVERS": 4,
                "SCALE_BLOCK": 64,
                "TOPK_BLOCK": 8,
                "TILE_TOKENS": 8,
                "TILE_WORDS": 512,
                "CHUNK_TOKENS": 128,
            },
            {"num_warps": 32},
        ),
        "pull_and_sum": (
            sums.pull_and_sum,
            {"out": "*u16", "send_head": "*i32", "places": "*i64"},
            {"NUM_RANKS": 4, "TILE_TOKENS": 8, "TILE_VALUES": 1024, "IN_HARDWARE": True},
            {"num_warps": 32, "enable_fp_fusion": False},
        ),
    }


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    return {name: ptx_of(*parts) for name, parts in kernels().items()}


def test_nothing_lies_in_local_memory(ptx: dict[str, str]) -> None:
    for name, text in ptx.items():
        assert ".local" not in text, name


@pytest.mark.parametrize("name", ["exchange_letters", "meet"])
def test_a_barrier_before_each_release(ptx: dict[str, str], name: str) -> None:
    pattern = r"(atom|red)\S*(\.sys\.release|\.release\.sys)\S*\.max"
    releases = [match.start() for match in re.finditer(pattern, ptx[name])]
    assert releases
    for place in releases:
        before = ptx[name][:place]
        # With one warp the barrier is that of a warp.
        barrier = max(before.rfind("bar.sync"), before.rfind("bar.warp.sync"), before.rfind("barrier.sync"))
        stores = max(before.rfind("st.global"), 0)
        assert barrier > stores, f"{name}: a store after the last barrier before a release"


@pytest.mark.parametrize("name", ["exchange_letters", "meet"])
def test_flags_are_acquired_in_the_loop_that_waits(ptx: dict[str, str], name: str) -> None:
    assert len(re.findall(r"\.acquire\.sys|\.sys\.acquire", ptx[name])) >= 2, (
        "once before the loop, once in it"
    )
    assert "globaltimer" in ptx[name]


@pytest.mark.parametrize("name", ["send_to_windows", "pull_and_sum"])
def test_rows_move_in_words_of_128_bits(ptx: dict[str, str], name: str) -> None:
    assert re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.b128", ptx[name])
    assert re.search(r"st\.global\S*\.v4\.b32|st\.global\S*\.b128", ptx[name])


def test_sums_are_not_fused(ptx: dict[str, str]) -> None:
    assert "fma.rn.f32" not in ptx["pull_and_sum"]
    assert "add.rn.f32" in ptx["pull_and_sum"] or "add.f32" in ptx["pull_and_sum"]
