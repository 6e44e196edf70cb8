"""The GPU's ring kernels without a GPU: interpreted, one process per rank, and read as PTX."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

from tests.support.checks.ring_checks import CHECKS, cpu, rings
from tests.support.ptx import RELEASE, ptx_of
from tests.support.triton_interpreter import outcomes_of


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of("tests.support.checks.ring_checks")


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_in_the_interpreter(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


INT64 = ("topk_idx", "places", "heaps", "outcome")
INT32 = ("x", "scales", "send_head", "rank_prefix", "recv_channel_prefix")
TYPES = {
    **dict.fromkeys(INT64, "*i64"),
    **dict.fromkeys(INT32, "*i32"),
    **dict.fromkeys(("topk_weights", "out_weights"), "*fp32"),
    **dict.fromkeys(("results", "alarm", "patience_ns"), "i64"),
}


def dispatch(num_ranks: int, num_warps: int, stages: int, scale_block: int = 0) -> tuple[Any, ...]:
    blocks = {"NUM_RANKS": num_ranks, "RANK_BLOCK": num_ranks, "SCALE_BLOCK": scale_block, "TOPK_BLOCK": 8}
    tile = {"TILE_TOKENS": 16, "TILE_WORDS": 256, "STAGES": stages}
    return rings.dispatch_through_rings, TYPES, blocks | tile, {"num_warps": num_warps}


def combine(num_ranks: int, num_warps: int, stages: int, dtype: int, num_biases: int = 0) -> tuple[Any, ...]:
    values = dict.fromkeys(("out", "bias_0", "bias_1"), "*fp32" if dtype == cpu.FP32 else "*u16")
    blocks = {"NUM_RANKS": num_ranks, "RANK_BLOCK": num_ranks, "TOPK_BLOCK": 8}
    # 16 bytes per thread at least.
    tile = {"TILE_TOKENS": 16, "TILE_WORDS": 8 * num_warps, "TILE_VALUES": 16 * num_warps, "STAGES": stages}
    kind = {"DTYPE": dtype, "NUM_BIASES": num_biases, "IN_HARDWARE": True}
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    return rings.combine_through_rings, TYPES | values, blocks | tile | kind, options


KERNELS = {
    "dispatch between 2": dispatch(2, 32, 3),
    "dispatch between 8": dispatch(8, 16, 4, scale_block=64),
    "dispatch in one stage": dispatch(4, 32, 1),
    "combine of bf16 between 8": combine(8, 16, 4, cpu.BF16),
    "combine of bf16 in one stage": combine(4, 16, 1, cpu.BF16),
    "combine of fp16": combine(2, 32, 3, cpu.FP16, num_biases=1),
    "combine of float32": combine(2, 16, 3, cpu.FP32, num_biases=2),
}
SUMS = [name for name in KERNELS if name.startswith("combine")]


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    return {name: ptx_of(*parts) for name, parts in KERNELS.items()}


def test_nothing_lies_in_local_memory(ptx: dict[str, str]) -> None:
    for name, text in ptx.items():
        assert ".local" not in text, name


@pytest.mark.parametrize("name", KERNELS)
def test_a_barrier_before_each_release(ptx: dict[str, str], name: str) -> None:
    text = ptx[name]
    releases = [match.start() for match in re.finditer(RELEASE, text)]
    # Those of tails and heads, and the alarm of each wait.
    assert len(releases) >= 4
    for release in releases:
        since_barrier = text[text.rindex("bar.sync", 0, release) : release]
        assert "st.global" not in since_barrier
        # Nobody comes here without the barrier.
        assert "\n$L__BB" not in since_barrier


@pytest.mark.parametrize("name", KERNELS)
def test_one_thread_reads_the_alarm_and_the_outcome_for_all(ptx: dict[str, str], name: str) -> None:
    alone = re.findall(
        r"ld\.global\S*acquire\S* (%rd\d+).*\n(?:.*\n){1,4}?.*st\.shared\.b64 .*, \1;", ptx[name]
    )
    # The outcome at the beginning; then for each side the alarm while it waits, and both when it gives up.
    assert len(alone) >= 1 + 2 * 3


@pytest.mark.parametrize("name", KERNELS)
def test_rows_move_in_words_of_128_bits(ptx: dict[str, str], name: str) -> None:
    text = ptx[name]
    copies = re.findall(r"cp\.async\.c[ag]\.\S+ \[.*\], \[.*\], (0x\w+)", text)
    assert set(copies) == (set() if "one stage" in name else {"0x10"})
    if "one stage" in name:
        assert re.search(r"ld\.global\.v4\.b32", text)
    # To all receivers, and to the result.
    num_targets = 1 + KERNELS[name][2]["NUM_RANKS"] if name.startswith("dispatch") else 2
    assert len(re.findall(r"st\.global\.v4\.b32", text)) >= num_targets
    # Rows of 16 bits, or pieces of words, would be stored one by one.
    assert not re.search(r"st\.global\.(v\d\.)?b(8|16)\b", text)


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_not_fused(ptx: dict[str, str], name: str) -> None:
    assert "fma.rn.f32" not in ptx[name]
    assert re.search(r"add(\.rn)?\.f32", ptx[name])
