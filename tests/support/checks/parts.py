"""Checks of the small functions that GPU kernels share, by the examples in their docstrings."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from anyep.backends import cpu
from anyep.backends.cuda import constants
from anyep.backends.cuda.kernels.groups import Beside, Biases, Payload, Relayed, RingArea, Scales, Tables
from anyep.core import outcomes
from tests.support.checks.launching import launch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")
tl = importlib.import_module("triton.language")
beside_rows = importlib.import_module("anyep.backends.cuda.kernels.beside")
floats = importlib.import_module("anyep.backends.cuda.kernels.floats")
node_rings = importlib.import_module("anyep.backends.cuda.kernels.node_rings")
relay_combine = importlib.import_module("anyep.backends.cuda.kernels.relay_combine")
rings = importlib.import_module("anyep.backends.cuda.kernels.rings")
windows = importlib.import_module("anyep.backends.cuda.kernels.windows")

GUARD = 7


def words(values: Any, device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@triton.jit
def ask_ranks(answers):
    tl.store(answers, node_rings.relay_on(2, 6, 4))
    tl.store(answers + 1, node_rings.rank_beside(6, 1, 4))


def check_ranks_of_nodes(device: str) -> None:
    answers = words([GUARD] * 2, device)
    launch(ask_ranks, device, 1, answers)
    assert answers.tolist() == [10, 5]


@triton.jit(do_not_specialize=["area"])
def ask_rings(heaps, counters, area: RingArea, relayed: Relayed, answers):
    """On node 0 of 2, whose rank is 0 of 2."""
    at = tl.arange(0, 2)
    there = tl.load(heaps + at)
    here = rings.rings_in(area, at, at == 1, there, 1, there, there, 2)
    tl.store(answers + at, here.rows)
    tl.store(answers + 2 + at, here.ours.to(tl.int64))
    left, first = node_rings.lanes_of_nodes(relayed, here, 1, 2, 2, 2)
    tl.store(answers + 4 + at, left)
    tl.store(answers + 6 + at, first)
    theirs = tl.load(counters).to(tl.pointer_type(tl.int64)) + at
    tails = rings.Rings(at, at >= 0, at, theirs, theirs, area.ring_rows.to(tl.int32), 16)
    heads = rings.Rings(at, at >= 0, at, theirs + 2, theirs + 2, area.ring_rows.to(tl.int32), 16)
    many = tl.full((2,), 5, tl.int32)
    tl.store(answers + 8 + at, rings.num_ready(heads, tl.load(theirs), many, True, 4))
    tl.store(answers + 10 + at, rings.num_ready(tails, tl.load(theirs + 2), many, False, 4))
    tl.store(answers + 12 + at, rings.num_ready(tails, tl.load(theirs + 2), many, False, 1))
    tl.store(answers + 14 + at, rings.num_ready(tails, tl.load(theirs + 2), at, False, 4))


def check_rings_of_a_channel(device: str) -> None:
    """Of two rings that are alike, tails are at 4 and heads at 2; tiles of 4 rows, then of 1."""
    counters = words([4, 4, 2, 2], device)
    relayed = Relayed(
        *(counters, words([[0, 4], [3, 6]], device), words([[3, 1], [2, 4]], device, torch.int32), counters)
    )
    answers = words([GUARD] * 16, device)
    launch(
        *(ask_rings, device, 1, words([0, 1024], device), words([counters.data_ptr()], device)),
        *(RingArea(rows_at=96, ring_rows=3, entry_bytes=16, num_channels=3), relayed, answers),
    )
    found = answers.view(-1, 2).tolist()
    assert found[:2] == [[144, 1168], [16, 1040]]
    assert found[2:4] == [[0, 4], [0, 6]]
    assert found[4:] == [[1, 1], [2, 2], [1, 1], [0, 1]]


@triton.jit(do_not_specialize=["beside"])
def carry(
    payload: Payload,
    scales: Scales,
    beside: Beside,
    tables: Tables,
    scale_block: tl.constexpr,
    topk_block: tl.constexpr,
):
    """Two tokens go into two entries, and from there to rows 3 and 1 of the results of rank 2."""
    at = tl.arange(0, 2)
    sent = beside_rows.carried_by_tokens(payload, scales, beside, at, at >= 0, scale_block, topk_block)
    entries = tl.load(tables.heaps) + 64 * at
    beside_rows.store_in_entries(sent, entries, at >= 0, beside, scale_block, topk_block)
    found = beside_rows.carried_in_entries(entries, beside, at >= 0, scale_block, topk_block)
    beside_rows.store_in_results(
        beside_rows.carried_to(found, 2, 2),
        3 - 2 * at,
        at >= 0,
        tl.load(tables.targets + 2),
        tl.load(tables.targets + 3),
        tl.load(tables.targets + 4),
        beside,
        scale_block,
        topk_block,
    )


def check_what_rows_carry(device: str) -> None:
    """The example of `local_choices`: experts 4 and 5 are at rank 2. What is not needed is not written."""
    entries = words([0] * 16, device)
    here = words([entries.data_ptr()], device)
    x, ids = words([0], device, torch.int32), words([[5, 1], [4, -1]], device)
    payload = Payload(x, ids, words([[0.5, 0.25], [1.0, 2.0]], device, torch.float32))
    scales = Scales(words([[10, 11, 12], [20, 21, 22]], device, torch.int32), 3, 3, 1)
    beside = Beside(meta_at=0, scales_at=16, ids_at=32, weights_at=48, num_scales=3, num_topk=2)
    for needed in (True, False):
        results = [
            words([[GUARD] * 2] * 4, device),
            words([[GUARD] * 2] * 4, device, torch.float32),
            words([[GUARD] * 3] * 4, device, torch.int32),
        ]
        targets = words([0, 0, *(part.data_ptr() if needed else 0 for part in results), 4], device)
        tables = Tables(here, here, here, targets, *[here] * 3)
        launch(
            *(carry, device, 1, payload, scales, beside, tables),
            scale_block=4 if needed else 0,
            topk_block=2,
        )
        assert entries.view(torch.int32).view(2, 16)[:, 8:10].tolist() == ids.tolist()
        for part, (third, first) in zip(
            results, (([1, -1], [0, -1]), ([0.5, 0], [1, 0]), ([10, 11, 12], [20, 21, 22])), strict=True
        ):
            untouched = [GUARD] * part.shape[1]
            right = [untouched, first, untouched, third] if needed else [untouched] * 4
            assert part.tolist() == right


@triton.jit
def start_sums(biases: Biases, answers, dtype: tl.constexpr):
    at = tl.arange(0, 2)
    for count in tl.static_range(3):
        tl.store(answers + 2 * count + at, floats.sum_of_biases(biases, at, at >= 0, dtype, count))


def check_where_sums_start(device: str) -> None:
    biases = Biases(words([1, 2], device, torch.float32), words([3, 4], device, torch.float32))
    answers = words([GUARD] * 6, device, torch.float32)
    launch(start_sums, device, 1, biases, answers, dtype=cpu.FP32)
    assert answers.tolist() == [0, 0, 1, 2, 4, 6]


@triton.jit
def refuse(state, ranks):
    windows.refuse_rows_of(state, tl.load(ranks), tl.load(ranks) == 3)


def check_a_rank_that_lacks_a_row(device: str) -> None:
    for rank in (3, 2):
        state = words([0] * constants.NUM_STATES, device)
        launch(refuse, device, 1, state, words([rank], device, torch.int32))
        expected = outcomes.outcome_of(outcomes.BAD_HANDLE, 3) if rank == 3 else 0
        assert int(state[constants.BAD_ROWS]) == expected


@triton.jit
def ask_sources(tables: Tables, relayed: Relayed, own_x: tl.int64, answers):
    """On rank 1 of a node of 2."""
    at = tl.arange(0, 2)
    waiting = rings.waiting_of(tables)
    here = relay_combine.sources_here(relayed, tables, at, at >= 0, own_x, waiting, 16, 2)
    tl.store(answers + at, here[0])
    tl.store(answers + 2 + at, here[1])


@triton.jit
def ask_sums(rows, sums, dtype: tl.constexpr):
    at = tl.arange(0, 2)
    first, second = tl.load(rows) + 0 * at, tl.load(rows + 1) + 0 * at
    sources = tl.tuple((tl.where(at == 0, first, 0), second))
    found = relay_combine.sums_here(sources, at, 2, dtype, 2)
    tl.store(sums + 2 * at[:, None] + at[None, :], found)


def check_sums_of_a_node(device: str) -> None:
    """Rank 1's own rows lie at 2048, whatever its target says. If rank 0 has 4 rows, it lacks row 4."""
    heads = words([[4, -1], [-1, 0]], device, torch.int32)
    relayed = Relayed(heads, heads, heads, heads)
    constants_here = words([0] * constants.NUM_CONSTANTS, device)
    constants_here[constants.RANK] = 1
    for num_rows, problem in ((5, 0), (4, outcomes.outcome_of(outcomes.BAD_HANDLE, 0))):
        state = words([0] * constants.NUM_STATES, device)
        targets = words([1024, 0, 0, 0, 0, num_rows, GUARD, 0, 0, 0, 0, 1], device)
        tables = Tables(constants_here, heads, state, targets, *[heads] * 3)
        answers = words([GUARD] * 4, device)
        launch(ask_sources, device, 1, tables, relayed, 2048, answers)
        assert answers.tolist() == [0 if problem else 1088, 0, 0, 2048]
        assert int(state[constants.BAD_ROWS]) == problem
    rows = words([[1, 2], [3, 4]], device, torch.float32)
    sums = words([[GUARD] * 2] * 2, device, torch.float32)
    # Rows begin at multiples of 16 bytes on a GPU as well: a copy of the second one does.
    second = rows[1].clone()
    launch(ask_sums, device, 1, words([rows.data_ptr(), second.data_ptr()], device), sums, dtype=cpu.FP32)
    assert sums.tolist() == [[4, 6], [3, 4]]
