"""Combines of rows in ordinary memory, without a GPU: they are staged while they are read.

Real processes whose kernels run in Triton's interpreter, one program each; and what the kernel compiles to.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch.distributed as dist

from anyep.backends import cpu
from anyep.errors import AnyEPError
from tests.cases import Case, buffer_for, check_case
from tests.gpu_scenarios import FEW_SMS, good_dispatch, new_buffer, poison_windows, rows_of
from tests.ptx import ptx_of
from tests.test_simulated_gpu import simulate
from tests.world import RankContext, World

# Not loaded here: ranks load this module, too, before they choose to interpret kernels.
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install 'anyep[cuda]'"
)
STEP_TOKENS = 4


def simulate_small_steps(context: RankContext, timeout_s: str = "20") -> None:
    """Tiles and steps so small that a few tokens take several; pieces that no row is a multiple of."""
    simulate(context, timeout_s)
    from anyep.modes import gpu_intranode

    for size in gpu_intranode.STAGING_TILES:
        gpu_intranode.STAGING_TILES[size] = (2, 32, 1, STEP_TOKENS, 64)


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    with ExitStack() as stack:
        opened = {num_ranks: stack.enter_context(World(num_ranks)) for num_ranks in (1, 2, 3)}
        for world in opened.values():
            world.run(simulate_small_steps)
        yield opened


@dataclass(frozen=True)
class Staging:
    """Whose rows lie where in a combine: in ordinary memory, unless the rank is one of these."""

    case: Case
    in_window: tuple[int, ...] = ()
    without_room: tuple[int, ...] = ()


def run_staging(context: RankContext, staging: Staging, num_calls: int = 1) -> int:
    """Several calls of the kind; which ranks staged in the last one, as bits."""
    from anyep.backends.cuda import facts

    buffer = buffer_for(context, None, device="cuda")
    windows = buffer.runtime.windows
    case = replace(staging.case, combine_from_window=context.rank in staging.in_window)
    if context.rank in staging.without_room:
        windows.allocate = lambda num_bytes: None
    try:
        for seed in range(num_calls):
            poison_windows(buffer)
            check_case(context, replace(case, seed=case.seed + seed), buffer)
            state = buffer.runtime.talk.state
            assert state[facts.STAGED : facts.STAGED + facts.NUM_STAGED].tolist() == [0] * facts.NUM_STAGED
    finally:
        windows.__dict__.pop("allocate", None)
    return int(state[facts.STAGERS])


CASES = {
    "several steps": Staging(Case((13, 22))),
    "a step and no more": Staging(Case((STEP_TOKENS, STEP_TOKENS))),
    "some in windows": Staging(Case((9, 14, 5)), in_window=(1,)),
    "one alone stages": Staging(Case((9, 14, 5)), in_window=(0, 2)),
    "nobody stages": Staging(Case((9, 14)), in_window=(0, 1)),
    "float16, two biases, weights": Staging(
        Case((17, 9), dtype="float16", num_biases=2, combine_weights=True, hidden=264)
    ),
    "float32, one bias": Staging(Case((5, 12, 7), dtype="float32", num_biases=1, hidden=40), in_window=(2,)),
    "weights, some in windows": Staging(Case((6, 11), combine_weights=True), in_window=(0,)),
    "the worst case": Staging(Case((8, 3), worst=True, combine_weights=True)),
    "many more tokens here than there": Staging(Case((40, 1))),
    "a rank without tokens": Staging(Case((0, 19, 3), combine_weights=True)),
    "a rank without rows": Staging(Case((13, 6), routing="one rank")),
    "no tokens at all": Staging(Case((0, 0))),
    "tokens that go nowhere": Staging(Case((6, 5), routing="none", num_biases=1)),
    "some choices missing": Staging(Case((12, 21, 9), routing="some missing", num_topk=4)),
    "each to itself": Staging(Case((6, 16), routing="own rank")),
    "asynchronous": Staging(Case((5, 16), run_async=True)),
    "one rank alone": Staging(Case((11,), num_biases=1, combine_weights=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_case(worlds: dict[int, World], name: str) -> None:
    staging = CASES[name]
    num_ranks = staging.case.num_ranks
    found = worlds[num_ranks].run(run_staging, staging)
    assert len(set(found)) == 1, "all ranks know alike who stages"
    if staging.case.routing == "uniform" and any(staging.case.tokens):
        stagers = {rank for rank in range(num_ranks) if rank not in staging.in_window}
        assert {rank for rank in range(num_ranks) if found[0] >> rank & 1} == stagers


def test_rows_of_all_stagers_go_through_rings_if_one_has_no_room(worlds: dict[int, World]) -> None:
    staging = Staging(Case((9, 14, 5), combine_weights=True), in_window=(1,), without_room=(0,))
    assert worlds[3].run(run_staging, staging) == [0, 0, 0]


@pytest.mark.parametrize("in_window", [(), (1,)])
def test_calls_in_a_row(worlds: dict[int, World], in_window: tuple[int, ...]) -> None:
    worlds[2].run(run_staging, Staging(Case((11, 6)), in_window), 5)


def share_work(context: RankContext, num_programs: int) -> None:
    """One rank of two, by hand: its flags say that all is staged, so that no program waits for another. So it
    is with rank 1's rows."""
    import torch

    from anyep.backends.cuda import facts
    from anyep.backends.cuda.kernels import staging

    def int32(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    hidden, num_tokens = 264, 7
    # Of rank 0's tokens all but 2 have a row here; of rank 1's the tokens 1, 5 and 8.
    sources, head = int32([0, 1, 3, 4, 5, 6, 1, 5, 8]), int32([[0, 0], [1, 1], [-1, 2], [2, 3], [3, -1]])
    head = torch.cat([head, int32([[4, 4], [5, 5]])])
    generator = torch.Generator().manual_seed(num_programs)
    x, theirs = (torch.randn(rows, hidden, generator=generator) for rows in (9, 6))
    window = torch.full_like(x, -1.0)
    out = torch.full((num_tokens, hidden), -1.0)
    heaps = torch.zeros(2, 64, dtype=torch.int64)
    call = 5 << 32
    heaps[0, :] = call + 2**32 - 1
    words = torch.zeros(facts.NUM_FACTS, dtype=torch.int64)
    words[facts.OWN_HEAP], words[facts.ALARM_AT], words[facts.FLAG_STRIDE] = heaps[0].data_ptr(), 256, 128
    state = torch.zeros(facts.NUM_STATES, dtype=torch.int64)
    state[facts.NUMBER], state[facts.STAGERS] = 5, 0b11
    places = torch.tensor([[window.data_ptr(), 0, 0, 0, 0, 9], [theirs.data_ptr(), 0, 0, 0, 0, 6]])
    addresses = torch.tensor([heap.data_ptr() for heap in heaps])

    def launch() -> None:
        staging.stage_and_sum[(num_programs,)](
            *(x.view(torch.int32), window.view(torch.int32), out, state, state, state),
            *(head, int32([[6, 6], [9, 6]]), sources, places, words, addresses, state, num_tokens, hidden, 0),
            DTYPE=cpu.FP32,
            NUM_BIASES=0,
            NUM_RANKS=2,
            RANK_BLOCK=2,
            TOPK_BLOCK=0,
            TILE_TOKENS=2,
            TILE_VALUES=64,
            CHUNK_TOKENS=4,
            STEP_TOKENS=2,
            STEPS_AHEAD=1,
            COPY_WORDS=128,
            IN_HARDWARE=False,
        )

    launch()
    assert torch.equal(window[6:], x[6:])
    assert (window[:6] == -1).all(), "nobody else reads them"
    assert int(places[0, 0]) == x.data_ptr()
    assert int(heaps[1, 0]) == call + 2**32 - 1
    for token, (mine, other) in enumerate(head.tolist()):
        expected = torch.zeros(hidden)
        expected += x[mine] if mine >= 0 else 0.0
        expected += theirs[other] if other >= 0 else 0.0
        assert torch.equal(out[token], expected), token
    assert state[facts.STAGED : facts.STAGED + facts.NUM_STAGED].tolist() == [0] * facts.NUM_STAGED
    assert int(state[facts.OUTCOME]) == 0


@pytest.mark.parametrize("num_programs", [1, 2, 3, 16])
def test_programs_share_the_work(worlds: dict[int, World], num_programs: int) -> None:
    worlds[1].run(share_work, num_programs)


def combine_late(context: RankContext) -> str:
    """The letters of rank 1 come, but not what it was to stage."""
    buffer = new_buffer(context)
    received, *_, handle, _ = good_dispatch(buffer)
    if context.rank == 1:
        buffer.runtime._stage_and_sum = lambda *arguments: time.sleep(4)
    dist.barrier(group=context.group)
    try:
        buffer.combine(received.clone(), handle, config=FEW_SMS)
        buffer.dispatch(rows_of(buffer, 0), handle=handle, config=FEW_SMS)
        buffer.combine(received.clone(), handle, config=FEW_SMS)
    except AnyEPError as error:
        return str(error)
    return "nothing was raised"


def test_a_rank_that_does_not_stage_in_time() -> None:
    with World(3) as world:
        world.run(simulate_small_steps, "1")
        messages = world.run(combine_late, timeout=60)
    assert "staged rows" in messages[0], messages
    assert "rank 1" in messages[0], messages
    assert all(message != "nothing was raised" for message in messages), messages


# What it compiles to


def stage(num_ranks: int, dtype: int = cpu.BF16, num_biases: int = 0) -> tuple[Any, ...]:
    from anyep.backends.cuda.kernels import staging
    from anyep.modes.gpu_intranode import STAGING_TILES, STEPS_AHEAD

    tile_tokens, tile_values, num_warps, step_tokens, copy_words = STAGING_TILES[num_ranks]
    values = dict.fromkeys(("out", "bias_0", "bias_1"), "*fp32" if dtype == cpu.FP32 else "*u16")
    types = {
        **dict.fromkeys(("x", "window", "send_head", "rank_prefix", "source_tokens"), "*i32"),
        **dict.fromkeys(("places", "facts", "heaps", "state"), "*i64"),
        **values,
        "out_weights": "*fp32",
    }
    blocks = {"NUM_RANKS": num_ranks, "RANK_BLOCK": num_ranks, "TOPK_BLOCK": 8, "CHUNK_TOKENS": 128}
    tile = {"TILE_TOKENS": tile_tokens, "TILE_VALUES": tile_values, "COPY_WORDS": copy_words}
    steps = {"STEP_TOKENS": step_tokens, "STEPS_AHEAD": STEPS_AHEAD}
    kind = {"DTYPE": dtype, "NUM_BIASES": num_biases, "IN_HARDWARE": True}
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    return staging.stage_and_sum, types, blocks | tile | steps | kind, options


KERNELS = {
    "bf16 between 2": (2,),
    "bf16 between 4": (4,),
    "bf16 between 8": (8,),
    "fp16": (4, cpu.FP16, 1),
    "float32": (2, cpu.FP32, 2),
}


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    return {name: ptx_of(*stage(*arguments)) for name, arguments in KERNELS.items()}


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_lies_in_local_memory(ptx: dict[str, str], name: str) -> None:
    assert ".local" not in ptx[name]


@pytest.mark.parametrize("name", KERNELS)
def test_a_barrier_before_each_release(ptx: dict[str, str], name: str) -> None:
    text = ptx[name]
    releases = [match.start() for match in re.finditer(r"atom\S*(release\S*max|acq_rel\S*add)", text)]
    # The count of programs, the flags, and the alarm of who waits.
    assert len(releases) == 3
    for release in releases:
        since_barrier = text[text.rindex("bar.sync", 0, release) : release]
        assert "st.global" not in since_barrier
        # Nobody comes here without the barrier.
        assert "\n$L__BB" not in since_barrier


@pytest.mark.parametrize("name", KERNELS)
def test_rows_move_in_words_of_128_bits(ptx: dict[str, str], name: str) -> None:
    text = ptx[name]
    constants = stage(*KERNELS[name])[2]
    copied = len(re.findall(r"ld\.global\S*evict_first\S*\.v4\.b32", text))
    assert copied == constants["COPY_WORDS"] // (4 * 32 * stage(*KERNELS[name])[3]["num_warps"])
    loaded = len(re.findall(r"ld\.global\S*\.v4\.b32", text))
    assert loaded >= copied + constants["NUM_RANKS"] + constants["NUM_BIASES"]
    assert len(re.findall(r"st\.global\S*\.v4\.b32", text)) > copied
    assert not re.search(r"(ld|st)\.global\S*\.b(8|16)\b", text)


def test_sums_are_not_fused(ptx: dict[str, str]) -> None:
    for text in ptx.values():
        assert "fma.rn.f32" not in text
        assert re.search(r"add(\.rn)?\.f32", text)
