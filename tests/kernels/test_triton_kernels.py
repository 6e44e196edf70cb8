"""The GPU's kernels for normal mode without a GPU: in Triton's interpreter, and what they compile to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'anyep[cuda]'")

from anyep.backends import cpu
from anyep.backends.cuda import facts
from tests.support.checks import letter_checks, triton_checks
from tests.support.ptx import RELEASE, ptx_of, spilled_bytes
from tests.support.triton_interpreter import outcomes_of

MODULES = (triton_checks, letter_checks)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return {name: problem for module in MODULES for name, problem in outcomes_of(module.__name__).items()}


@pytest.mark.parametrize("name", [check.__name__ for module in MODULES for check in module.CHECKS])
def test_in_the_interpreter(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


BLOCKS = {"NUM_RANKS": 4, "RANK_BLOCK": 4}
INT8 = ("in_rank",)
INT32 = (
    "tokens_per_rank",
    "tokens_per_expert",
    "position",
    "rank_prefix",
    "channel_counts",
    "counts",
    "expert_counts",
    "channel_prefix",
    "recv_channel_prefix",
    "routing",
    "send_head",
    "x",
    "scales",
    "source",
)
INT64 = ("digests", "topk_idx", "facts", "heaps", "bases", "state", "places", "ids")
NUMBERS_OF_64_BITS = ("told", "letter", "totals", "rows_of", "ticket", "offset", "row_bytes", "own_x")
TYPES = {
    **dict.fromkeys(INT8, "*i8"),
    **dict.fromkeys(INT32, "*i32"),
    **dict.fromkeys(INT64, "*i64"),
    **dict.fromkeys(NUMBERS_OF_64_BITS, "i64"),
    **dict.fromkeys(("topk_weights", "out_weights"), "*fp32"),
}
Parts = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]


def exchange(
    is_combine: bool, channel_block: int = 0, expert_block: int = 0, is_refused: bool = False
) -> Parts:
    from anyep.backends.cuda.kernels import letters

    constants = {"IS_COMBINE": is_combine, "IS_REFUSED": is_refused}
    constants |= {"CHANNEL_BLOCK": channel_block, "EXPERT_BLOCK": expert_block}
    return letters.exchange_letters, TYPES, BLOCKS | constants, {"num_warps": 1}


def send(num_ranks: int, tile_tokens: int, tile_words: int, num_warps: int, all_or_none: bool) -> Parts:
    from anyep.backends.cuda.kernels import windows

    tile = {"TILE_TOKENS": tile_tokens, "TILE_WORDS": tile_words, "CHUNK_TOKENS": 256}
    blocks = {
        "NUM_RECEIVERS": num_ranks,
        "RECEIVER_BLOCK": num_ranks,
        "SCALE_BLOCK": 64,
        "TOPK_BLOCK": 8,
        "ALL_OR_NONE": all_or_none,
    }
    return windows.send_to_windows, TYPES, blocks | tile, {"num_warps": num_warps}


def pull(num_ranks: int, tile_tokens: int, dtype: int, num_biases: int) -> Parts:
    from anyep.backends.cuda.kernels import sums

    values = dict.fromkeys(("out", "bias_0", "bias_1"), "*fp32" if dtype == cpu.FP32 else "*u16")
    unused = {f"bias_{index}": "*i64" for index in range(num_biases, 2)}
    tile = {"TILE_TOKENS": tile_tokens, "TILE_VALUES": 1024, "CHUNK_TOKENS": 256, "TOPK_BLOCK": 8}
    kind = {
        "DTYPE": dtype,
        "NUM_BIASES": num_biases,
        "NUM_RANKS": num_ranks,
        "RANK_BLOCK": num_ranks,
        "IN_HARDWARE": True,
    }
    return (
        sums.pull_and_sum,
        TYPES | values | unused,
        tile | kind,
        {"num_warps": 32, "enable_fp_fusion": False},
    )


def kernels() -> dict[str, Parts]:
    """Each kernel with the types of its arguments, its constants, and its options."""
    from anyep.backends.cuda.kernels import counting, digests, letters, sums, windows

    one_warp = {"num_warps": 1}
    return {
        "count_layout": (
            counting.count_layout,
            TYPES,
            {"NUM_RANKS": 8, "TOPK_BLOCK": 8, "EXPERT_BLOCK": 32, "TILE_TOKENS": 2048},
            {"num_warps": 32},
        ),
        "place_tokens": (
            counting.place_tokens,
            TYPES,
            {"NUM_RANKS": 8, "TOPK_BLOCK": 8, "EXPERT_BLOCK": 32, "TILE_TOKENS": 2048},
            {"num_warps": 32},
        ),
        "exchange of a dispatch": exchange(False, 16, 32),
        "exchange of a cached dispatch": exchange(False),
        "exchange of a combine": exchange(True),
        "exchange of a refusal": exchange(False, is_refused=True),
        "meet": (
            letters.meet,
            TYPES,
            {**BLOCKS, "FLAGS_AT": facts.ARRIVED_AT, "UNLESS_RINGS": True},
            one_warp,
        ),
        "place_in_new_block": (
            letters.place_in_new_block,
            TYPES | {"num_topk": "i64", "num_scales": "i64"},
            BLOCKS,
            one_warp,
        ),
        "send back: copy": (
            sums.copy_for_peers,
            TYPES | {"window": "*i32"},
            {"NUM_RANKS": 4, "TILE_WORDS": 16384},
            {"num_warps": 32},
        ),
        "fill_send_head": (letters.fill_send_head, TYPES, {**BLOCKS, "TILE_TOKENS": 128}, {"num_warps": 4}),
        "send between 2": send(2, 32, 512, 32, True),
        "send short rows between 2": send(2, 64, 256, 32, False),
        "send between 4": send(4, 8, 512, 16, False),
        "send between 8": send(8, 8, 512, 16, True),
        "unpack_window": (
            windows.unpack_window,
            TYPES,
            {"NUM_RANKS": 8, "PAD": True, "BLOCK": 1024},
            {"num_warps": 4},
        ),
        "digest_handle": (
            digests.digest_handle,
            TYPES,
            {"NUM_RANKS": 8, "CHANNEL_BLOCK": 16, "TILE_ROWS": 2048},
            {"num_warps": 16},
        ),
        "sums of bf16 between 2": pull(2, 32, cpu.BF16, 0),
        "sums of bf16 between 4": pull(4, 8, cpu.BF16, 0),
        "sums of bf16 between 8": pull(8, 16, cpu.BF16, 2),
        "sums of fp16": pull(4, 8, cpu.FP16, 1),
        "sums of float32": pull(2, 32, cpu.FP32, 2),
    }


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    return {name: ptx_of(*parts) for name, parts in kernels().items()}


# The flags that each kernel releases: letters, this rank's alarm, the two words of who gives up (in `meet` at
# once, or after a wait), totals, a report; and so on. All of these kernels wait.
RELEASES = {
    "count_layout": 1,
    "exchange of a dispatch": 6,
    "exchange of a cached dispatch": 5,
    "exchange of a combine": 5,
    "exchange of a refusal": 5,
    "meet": 7,
}
NAMES = tuple(kernels())
ROWS = [name for name in NAMES if name.startswith(("send", "sums"))]
SUMS = [name for name in NAMES if name.startswith("sums")]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_lies_in_local_memory(ptx: dict[str, str], name: str) -> None:
    assert ".local" not in ptx[name]


@pytest.mark.parametrize("name", [name for name in ROWS if not kernels()[name][2].get("NUM_BIASES")])
def test_registers_suffice(ptx: dict[str, str], name: str, tmp_path: Path) -> None:
    """With biases a few words of a thread go to memory, in sums that are bound by the rows' bytes."""
    assert spilled_bytes(ptx[name], tmp_path) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_barrier_before_each_release(ptx: dict[str, str], name: str) -> None:
    text = ptx[name]
    releases = [match.start() for match in re.finditer(RELEASE, text)]
    assert len(releases) == RELEASES.get(name, 0)
    for release in releases:
        # With one warp the barrier may be that of a warp.
        barriers = [text.rfind(word, 0, release) for word in ("bar.sync", "bar.warp.sync", "barrier.sync")]
        since_barrier = text[max(barriers) : release]
        assert max(barriers) >= 0
        assert "st.global" not in since_barrier
        # Nobody comes here without the barrier.
        assert "\n$L__BB" not in since_barrier


@pytest.mark.parametrize("name", [name for name in RELEASES if name != "count_layout"])
def test_flags_are_acquired_in_the_loop_that_waits(ptx: dict[str, str], name: str) -> None:
    acquired = re.findall(r"atom\S*(?:\.acquire\.sys|\.sys\.acquire)\S*add", ptx[name])
    assert len(acquired) >= 3, "before the loop, in it, and once more at its end"
    # When the wait begins, and whenever it looks again.
    assert ptx[name].count("globaltimer") == 2


@pytest.mark.parametrize("name", ROWS)
def test_rows_move_in_words_of_128_bits(ptx: dict[str, str], name: str) -> None:
    text, constants = ptx[name], kernels()[name][2]
    num_loads = len(re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.b128", text))
    num_stores = len(re.findall(r"st\.global\S*\.v4\.b32|st\.global\S*\.b128", text))
    # A token's row is read once, and written to all; or read from all, with biases, and written once.
    assert num_loads >= constants.get("NUM_RANKS", 1) + constants.get("NUM_BIASES", 0)
    assert num_stores >= constants.get("NUM_RECEIVERS", 1)
    # Values of 16 bits would be moved one by one.
    assert not re.search(r"(ld|st)\.global\S*\.b(8|16)\b", text)


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_not_fused(ptx: dict[str, str], name: str) -> None:
    assert "fma.rn.f32" not in ptx[name]
    assert re.search(r"add(\.rn)?\.f32", ptx[name])


@pytest.mark.parametrize("name", SUMS)
def test_sums_keep_the_smallest_numbers(ptx: dict[str, str], name: str) -> None:
    assert not re.search(r"add\S*\.ftz", ptx[name])
