"""What Triton's kernels are compiled to, for an H100 that need not be there.

The interpreter tells whether the arithmetic is right, the compiled code whether a GPU would do the same:
flags are released behind a barrier and acquired where they are waited for, rows move 16 bytes at a time, each
product and each sum is rounded, and nothing spills into local memory. What was compiled is kept in Triton's
cache.
"""

from __future__ import annotations

import ast
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

from anyep.backends import cpu
from anyep.backends.cuda import constants
from anyep.backends.cuda.batch import OPTIONS
from anyep.backends.cuda.expand_kernels import (
    ADDED_TILES,
    EXPAND_TILE,
    EXPAND_WARPS,
    GATHERED_ROWS,
    ORDERED_RANKS,
    ORIGIN_ROWS,
    ORIGIN_WARPS,
    PLACE_WARPS,
    PLACED_EXPERTS,
    PLACED_ROWS,
    REDUCE_TILE,
    REDUCE_WARPS,
    UNROLLED_CHOICES,
)
from anyep.backends.cuda.kernels import (
    counting,
    digests,
    expand,
    node_counts,
    node_handles,
    notify,
    origins,
    relay_combine,
    relay_dispatch,
    rings,
    slots,
    sums,
    windows,
)
from anyep.backends.cuda.kernels.groups import NodeHandle, RingResults
from anyep.backends.cuda.slot_kernels import CAST_BLOCKS
from anyep.backends.cuda.tiles import RowTile, SumTile
from anyep.cli.tune.candidates import ROW_TILES, SUM_TILES
from anyep.core import formats
from tests.support.checks import cast_kernels, commands
from tests.support.checks.casts import FP8_MODES
from tests.support.ptx import machine_code_of, ptx_of, spilled_bytes

RELEASE = r"st\.release\.sys\.global"
"""How a kernel tells other ranks, or the host, that what it stored is there."""
ACQUIRE = "ld.acquire.sys.global"
FLAGS = r'elementwise_inline_asm "\{[^"]*@p [^"]*".* -> tensor<([\dx]+)xi\d+, (#\w+)>'
BARRIER = r"bar\.sync|bar\.warp\.sync|barrier\.sync"
LOADS_OF_128_BITS = r"\bld\.global\S*\.v4\.b32|\bld\.global\S*\.b128"
STORES_OF_128_BITS = r"\bst\.global\S*\.v4\.b32|\bst\.global\S*\.b128"


@dataclass(frozen=True)
class Source:
    """A kernel, what it is compiled for, and what its code must be like."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    aspects: tuple[Callable[[str], None], ...] = ()

    def ptx(self) -> str:
        return ptx_of(self.kernel, self.types, self.constants, self.options)

    def with_layouts(self) -> str:
        """Triton's own language for GPUs, which says which threads have which elements."""
        return ptx_of(self.kernel, self.types, self.constants, self.options, "ttgir")


def places_of(pattern: str, text: str) -> list[int]:
    return [match.start() for match in re.finditer(pattern, text)]


# What the code of a kernel must be like


def releases(least: int, most: int, text: str) -> None:
    """So many flags, each behind a barrier that nobody comes around."""
    found = places_of(RELEASE, text)
    assert least <= len(found) <= most
    for release in found:
        # With one warp the barrier may be that of a warp.
        since_barrier = text[max(place for place in places_of(BARRIER, text) if place < release) : release]
        assert "st.global" not in since_barrier
        assert "\n$L__BB" not in since_barrier


def releases_the_record_last(text: str) -> None:
    record = places_of(RELEASE, text)[-1]
    last_store = max(place for place in places_of(r"\bst\.global", text) if place < record)
    assert any(last_store < barrier < record for barrier in places_of(BARRIER, text))


def waits(text: str) -> None:
    assert text.count(ACQUIRE) >= 3, "before the loop, in it, and once more at its end"
    # When the wait begins, and whenever it looks again.
    assert text.count("globaltimer") == 2


def waits_for_record(text: str) -> None:
    assert text.count(ACQUIRE) >= 2, "once before the loop, once in it"
    assert "globaltimer" in text


def asks_by_one_thread(text: str) -> None:
    """One thread reads the abort flag and the outcome for all."""
    alone = re.findall(r"ld\.global\S*acquire\S* (%rd\d+).*\n(?:.*\n){1,4}?.*st\.shared\.b64 .*, \1;", text)
    # The outcome at the beginning; then for each side the abort flag while it waits, and both when it gives
    # up.
    assert len(alone) >= 1 + 2 * 3


def tells_by_its_last_program(text: str) -> None:
    """The last program sees what all have stored, and only it tells others anything."""
    (counted,) = places_of(r"atom\S*acq_rel\S*\.add", text)
    assert ".gpu." in text[counted : counted + 60]
    # Whatever way led there: the barrier lies in the same piece of code.
    label = max(place for place in places_of(r"(?m)^\$L\w+:", text) if place < counted)
    assert any(label < barrier < counted for barrier in places_of(BARRIER, text))
    assert all(place > counted for place in places_of(RELEASE, text))


def moves_words_of_128_bits(num_loads: int, num_stores: int, text: str, narrow: str = "ld|st") -> None:
    """At least so many; and no `narrow` ones, as for rows of 16 bits or pieces of words."""
    assert len(re.findall(LOADS_OF_128_BITS, text)) >= num_loads
    assert len(re.findall(STORES_OF_128_BITS, text)) >= num_stores
    assert not narrow or not re.search(rf"\b({narrow})\.global\S*\.b(8|16)\b", text)


def moves_only(loads: list[str], stores: list[str], text: str, exactly: bool = False) -> None:
    """The widths of all loads and stores in global memory: "v4.b32", "b32", ..."""
    for verb, widths in (("ld", loads), ("st", stores)):
        found = re.findall(rf"\b{verb}\.global\.((?:v\d\.)?b\d+)", text)
        assert set(found) == set(widths)
        assert not exactly or len(found) == len(widths)


def copies_into_shared_memory(widths: set[str], text: str) -> None:
    assert set(re.findall(r"cp\.async\.c[ag]\.\S+ \[.*\], \[.*\], (0x\w+)", text)) == widths


def adds_up(text: str) -> None:
    """Without fusing a product and a sum, and with the smallest numbers."""
    assert "fma.rn.f32" not in text
    assert re.search(r"add(\.rn)?\.f32", text)
    assert not re.search(r"add\S*\.ftz", text)


def rounds_every_step(text: str) -> None:
    assert "fma." not in text
    assert "mul.rn.f32" in text
    # Without a rounding mode a product may be fused with a sum later; with it, never.
    assert not re.search(r"\b(mul|add|sub)(\.ftz)?\.f32", text)
    assert not re.search(r"\b(mul|add|sub)\.rn\.ftz", text)
    assert ".approx" not in text


def divides_exactly(text: str) -> None:
    assert set(re.findall(r"\bdiv\.\w+(?:\.\w+)*\.f32", text)) == {"div.rn.f32"}


def needs_no_more_registers(text: str) -> None:
    assert spilled_bytes(text) == 0


def counts_bits_by_one_instruction(text: str) -> None:
    assert "popc.b64" in text


def finds_the_smallest_missing_row(text: str) -> None:
    assert re.search(r"(atom|red)\S*\.min\.s64", text)


# Casts

CAST_TYPES = {"x": "*u16", "data": "*u8", "scales": "*fp32", "messages": "*u8", "out": "*fp32"}
TILE = {"TILE_BLOCKS": CAST_BLOCKS}
TILE_OF_CASTS = {"tile_blocks": CAST_BLOCKS}
WITHOUT_FUSION = {"num_warps": 4, **OPTIONS}
EXACT = (rounds_every_step, divides_exactly)


def cast(power_of_two: bool, as_ue8m0: bool) -> Source:
    types = CAST_TYPES | ({"scales": "*u8"} if as_ue8m0 else {})
    constants = TILE_OF_CASTS | {"power_of_two": power_of_two, "as_ue8m0": as_ue8m0}
    # Per thread 16 values of bf16, 16 codes; and a few scales.
    moves = partial(moves_only, ["v4.b32"] * 2, ["v4.b32", "b8" if as_ue8m0 else "b32"], exactly=True)
    return Source(cast_kernels.cast_to_fp8_kernel, types, constants, WITHOUT_FUSION, (*EXACT, moves))


def logfmt(kernel: Any, loads: list[str], stores: list[str]) -> Source:
    aspects = (*EXACT, counts_bits_by_one_instruction, partial(moves_only, loads, stores))
    return Source(kernel, CAST_TYPES, TILE_OF_CASTS, WITHOUT_FUSION, aspects)


# Normal mode

BLOCKS = {"NUM_RANKS": 4, "RANK_BLOCK": 4}
INT32 = (
    *("tokens_per_rank", "tokens_per_expert", "position", "rank_prefix", "channel_counts", "by_rank"),
    *("by_expert", "channel_prefix", "recv_channel_prefix", "routing", "send_head", "x", "words"),
    "source",
)
INT64 = (
    *("digests", "topk_idx", "constants", "heaps", "bases", "state", "targets", "inboxes", "net_rows"),
    "ids",
)
NUMBERS_OF_64_BITS = ("told", "offset", "row_bytes", "own_x")
TYPES = {
    "in_rank": "*i8",
    **dict.fromkeys(INT32, "*i32"),
    **dict.fromkeys(INT64, "*i64"),
    **dict.fromkeys(NUMBERS_OF_64_BITS, "i64"),
    **dict.fromkeys(("topk_weights", "out_weights"), "*fp32"),
}


def normal(kernel: Any, num_warps: int, num_releases: int = 0, does_wait: bool = False, **how: Any) -> Source:
    aspects = (partial(releases, num_releases, num_releases), *([waits] if does_wait else []))
    return Source(kernel, TYPES | how.pop("types", {}), how, {"num_warps": num_warps}, aspects)


def exchange(num_releases: int, is_combine: bool = False, is_refused: bool = False, **blocks: int) -> Source:
    """Of notify messages: their flags, this rank's abort flag, the two words of who gives up, a report; and
    totals."""
    how = {"IS_COMBINE": is_combine, "IS_REFUSED": is_refused, "CHANNEL_BLOCK": 0, "EXPERT_BLOCK": 0}
    how["RANKS_PER_NODE"] = BLOCKS["NUM_RANKS"]
    types = {"by_node": "*i32"}
    return normal(notify.exchange_notify, 1, num_releases, True, **BLOCKS, **(how | blocks), types=types)


def barrier(ranks_per_node: int) -> Source:
    how = {"FLAGS_AT": constants.ARRIVED_AT, "UNLESS_RINGS": True, "RANKS_PER_NODE": ranks_per_node}
    return normal(notify.barrier, 1, 7, True, **BLOCKS, **how)


def send(num_ranks: int, tile_tokens: int, tile_words: int, num_warps: int, all_or_none: bool) -> Source:
    source = normal(
        windows.send_to_windows,
        num_warps,
        NUM_RECEIVERS=num_ranks,
        RECEIVER_BLOCK=num_ranks,
        SCALE_BLOCK=64,
        TOPK_BLOCK=8,
        ALL_OR_NONE=all_or_none,
        TILE_TOKENS=tile_tokens,
        TILE_WORDS=tile_words,
        CHUNK_TOKENS=256,
    )
    # A token's row is read once, and written to all.
    moves = partial(moves_words_of_128_bits, 1, num_ranks)
    return replace(source, aspects=(*source.aspects, moves, needs_no_more_registers))


def types_of_sums(dtype: int, num_biases: int) -> dict[str, str]:
    """Biases that are not there are tables."""
    values = "*fp32" if dtype == cpu.FP32 else "*u16"
    biases = [*[values] * num_biases, "*i64", "*i64"]
    types = {"out.x": values, "out.order": "*i32"}
    return types | {"biases.first": biases[0], "biases.second": biases[1]}


def pull(num_ranks: int, tile_tokens: int, dtype: int, num_biases: int, is_ordered: bool = False) -> Source:
    source = normal(
        sums.pull_and_sum,
        32,
        types=types_of_sums(dtype, num_biases),
        TILE_TOKENS=tile_tokens,
        TILE_VALUES=1024,
        CHUNK_TOKENS=256,
        TOPK_BLOCK=8,
        DTYPE=dtype,
        NUM_BIASES=num_biases,
        NUM_RANKS=num_ranks,
        RANK_BLOCK=num_ranks,
        IN_HARDWARE=True,
        ORDERED=is_ordered,
    )
    # Read from all, with biases, and written once.
    moves = partial(moves_words_of_128_bits, num_ranks + num_biases, 1)
    # With biases a few words of a thread go to memory, in sums that are bound by the rows' bytes.
    registers = [] if num_biases else [needs_no_more_registers]
    options = source.options | {"enable_fp_fusion": False}
    return replace(source, options=options, aspects=(*source.aspects, moves, adds_up, *registers))


def copy_for_peers() -> Source:
    how = {"types": {"window": "*i32"}, "NUM_RANKS": 4, "TILE_WORDS": 16384}
    source = normal(sums.copy_for_peers, 32, **how)
    moves = partial(moves_words_of_128_bits, 4, 1)
    return replace(source, aspects=(*source.aspects, moves, needs_no_more_registers))


# Rows by expert

EXPAND_TYPES = {
    **dict.fromkeys(
        ("received.counts", "positions.words", "tile_counts", "before", "counts", "ends"), "*i32"
    ),
    **dict.fromkeys(("compact.x", "compact.scales", "expanded.x", "expanded.scales"), "*i32"),
    **dict.fromkeys(("weights", "out_weights", "compact.weights", "expanded.weights"), "*fp32"),
    "ids": "*i64",
    "room": "i64",
}
PLACING = {"TILE_ROWS": PLACED_ROWS, "EXPERT_BLOCK": PLACED_EXPERTS}


def by_expert(kernel: Any, num_warps: int, *aspects: Callable[[str], None], **how: Any) -> Source:
    types = EXPAND_TYPES | how.pop("types", {})
    return Source(
        kernel, types, how, {"num_warps": num_warps, **OPTIONS}, (needs_no_more_registers, *aspects)
    )


def expand_rows(pads: bool, has_more: bool) -> Source:
    rows, words = EXPAND_TILE
    tile = {"TILE_ROWS": rows, "TILE_WORDS": words, "UNROLLED": UNROLLED_CHOICES}
    # A row is read once, and written for each of the choices that are handled at a time.
    moves = partial(moves_words_of_128_bits, 1, UNROLLED_CHOICES)
    how = {"HAS_WEIGHTS": has_more, "SCALE_BLOCK": 64 if has_more else 0, "PADS": pads}
    return by_expert(expand.expand_rows, EXPAND_WARPS, moves, **how, **tile)


def reduce_expanded(dtype: int, topk_block: int) -> Source:
    rows, values = REDUCE_TILE
    bits = "*fp32" if dtype == cpu.FP32 else "*u16"
    how = {"DTYPE": dtype, "TOPK_BLOCK": topk_block, "CHUNK_ROWS": GATHERED_ROWS, "IN_HARDWARE": True}
    moves = partial(moves_words_of_128_bits, 1, 1)
    return by_expert(
        *(expand.reduce_expanded, REDUCE_WARPS, moves, adds_up),
        types={"x": bits, "out": bits},
        TILE_ROWS=rows,
        TILE_VALUES=values,
        **how,
    )


ORIGINS = {
    **dict.fromkeys(
        ("rank_prefix", "sources", "received", "metadata", "send_head", "slots", "order"), "*i32"
    ),
    **dict.fromkeys(("ids", "kept_ids", "topk_idx"), "*i64"),
}


def of_origins(kernel: Any, **how: Any) -> Source:
    options = {"num_warps": ORIGIN_WARPS, **OPTIONS}
    return Source(kernel, ORIGINS, {"NUM_RANKS": 8, **how}, options, (needs_no_more_registers,))


COUNTING = {"NUM_RANKS": 8, "TOPK_BLOCK": 8, "EXPERT_BLOCK": 32, "TILE_TOKENS": 2048}

# Rings


def ring_aspects(stages: int, num_stores: int) -> tuple[Callable[[str], None], ...]:
    return (
        # Those of tails and heads, and the abort flag of each wait.
        partial(releases, 4, 1000),
        asks_by_one_thread,
        partial(copies_into_shared_memory, set() if stages == 1 else {"0x10"}),
        partial(moves_words_of_128_bits, int(stages == 1), num_stores, narrow="st"),
    )


def ring_dispatch(num_ranks: int, num_warps: int, stages: int, scale_block: int = 0) -> Source:
    blocks = {"NUM_RANKS": num_ranks, "RANK_BLOCK": num_ranks, "SCALE_BLOCK": scale_block, "TOPK_BLOCK": 8}
    tile = {"TILE_TOKENS": 16, "TILE_WORDS": 256, "STAGES": stages}
    # To all receivers, and to the result.
    aspects = ring_aspects(stages, 1 + num_ranks)
    types = TYPES | {f"results.{part}": "i64" for part in RingResults._fields}
    return Source(rings.dispatch_through_rings, types, blocks | tile, {"num_warps": num_warps}, aspects)


def ring_combine(
    num_ranks: int, num_warps: int, stages: int, dtype: int, num_biases: int = 0, is_ordered: bool = False
) -> Source:
    types = TYPES | types_of_sums(dtype, num_biases)
    blocks = {"NUM_RANKS": num_ranks, "RANK_BLOCK": num_ranks, "TOPK_BLOCK": 8}
    # 16 bytes per thread at least.
    tile = {"TILE_TOKENS": 16, "TILE_WORDS": 8 * num_warps, "TILE_VALUES": 16 * num_warps, "STAGES": stages}
    kind = {"DTYPE": dtype, "NUM_BIASES": num_biases, "IN_HARDWARE": True, "ORDERED": is_ordered}
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    aspects = (*ring_aspects(stages, 2), adds_up)
    return Source(rings.combine_through_rings, types, blocks | tile | kind, options, aspects)


def between_nodes(kernel: Any, types: dict[str, str], **blocks: Any) -> Source:
    """Of 2 nodes of 4 ranks. Tails or heads of either side, and the abort flag of each wait, are released."""
    types = TYPES | types | {"send_rdma_head": "*i32", "send_nvl_head": "*i32", "expected": "*i32"}
    types |= {"first_virtual": "*i64", "next_row": "*i64"}
    shape = {"NUM_NODES": 2, "NODE_BLOCK": 2, "RANKS_PER_NODE": 4, "TOPK_BLOCK": 8, "TILE_TOKENS": 16}
    options = {"num_warps": 8, "enable_fp_fusion": False}
    return Source(kernel, types, shape | blocks, options, (partial(releases, 4, 1000), asks_by_one_thread))


def node_dispatch(is_new: bool, scale_block: int = 0) -> Source:
    blocks = {"IS_NEW": is_new, "SCALE_BLOCK": scale_block, "TILE_WORDS": 256, "STAGES": 1}
    return between_nodes(relay_dispatch.dispatch_between_nodes, {}, **blocks)


def node_combine(dtype: int, num_biases: int = 0) -> Source:
    kind = {"DTYPE": dtype, "NUM_BIASES": num_biases, "IN_HARDWARE": True, "TILE_VALUES": 128}
    return between_nodes(relay_combine.combine_between_nodes, types_of_sums(dtype, num_biases), **kind)


WORDS_OF_HANDLES = (
    *NodeHandle._fields,
    *("tokens_per_node", "numbers", "channel_counts", "by_channel", "by_node", "expected"),
)


def of_node_handle(kernel: Any, num_warps: int, **blocks: Any) -> Source:
    """Kernels that fill or read parts of a handle between 2 nodes of 4 ranks; they tell nobody."""
    types = TYPES | dict.fromkeys(WORDS_OF_HANDLES, "*i32")
    types |= {"in_rank": "*i8", "handle_in_rank": "*i8", "first_virtual": "*i64", "next_row": "*i64"}
    shape = {"NUM_NODES": 2, "RANKS_PER_NODE": 4}
    if "RANKS_PER_NODE" not in kernel.arg_names:
        del shape["RANKS_PER_NODE"]
    return Source(kernel, types, shape | blocks, {"num_warps": num_warps}, (partial(releases, 0, 0),))


BETWEEN_NODES = {
    "count_nodes": of_node_handle(node_counts.count_nodes, 32, TILE_TOKENS=2048),
    "place_in_nodes": of_node_handle(node_counts.place_in_nodes, 32, IS_CHECKED=True, TILE_TOKENS=2048),
    "post_node_counts": of_node_handle(node_counts.post_node_counts, 4, BLOCK=128),
    "read_node_counts": of_node_handle(node_counts.read_node_counts, 1, CHANNEL_BLOCK=16),
    "plan_lanes": of_node_handle(node_counts.plan_lanes, 1, CHANNEL_BLOCK=16),
    "digest_node_handle": of_node_handle(
        node_handles.digest_node_handle, 16, CHANNEL_BLOCK=16, TILE_ROWS=2048
    ),
    "unpack_meta": of_node_handle(node_handles.unpack_meta, 4, PAD=True, PAD_IDS=True, BLOCK=1024),
    "exchange of a dispatch": exchange(6, CHANNEL_BLOCK=16, EXPERT_BLOCK=32, RANKS_PER_NODE=2),
    "exchange of a combine": exchange(5, is_combine=True, RANKS_PER_NODE=2),
    "dispatch": node_dispatch(True),
    "dispatch along a handle, with scales": node_dispatch(False, 64),
    "combine": node_combine(cpu.BF16),
    "combine of fp16, with biases": node_combine(cpu.FP16, 2),
    "combine of fp32": node_combine(cpu.FP32),
}

# Commands


def adds_nothing(text: str) -> None:
    """Words of the host are loaded: to add 0 to them could undo what the host stores at the same time."""
    assert not re.search(r"(atom|red)\S*\.add", text)
    assert re.search(r"ld\.global\S*acquire|ld\.acquire\.sys\.global", text)


WORDS = dict.fromkeys(("constants", "commands", "was_put", "words", "wanted", "found"), "*i64")
COMMANDS = {
    # Commands, and the abort flag while they wait for room.
    "put": Source(
        commands.put_many, WORDS, {"room": 8}, {"num_warps": 4}, (partial(releases, 2, 2), adds_nothing)
    ),
    "words of the host": Source(
        commands.acquire_some, WORDS, {"count": 8}, {"num_warps": 8}, (adds_nothing,)
    ),
}

# Low latency

RANKS = {"NUM_RANKS": 8, "RANK_BLOCK": 8}
TOPK = {"NUM_TOPK": 8, "TOPK_BLOCK": 8}
SLOT_INT64 = (
    "constants",
    "heaps",
    "generations",
    "state",
    "topk_idx",
    "lists",
    "messages",
    "layout_range",
)
SLOT_TYPES = {
    **dict.fromkeys((*SLOT_INT64, "stats"), "*i64"),
    "generation": "i64",
    "src_info": "*i32",
    "topk_weights": "*fp32",
    "x": "*u16",
    "out": "*u16",
}
PACK_TYPES = SLOT_TYPES | dict.fromkeys(("x", "scales", "counts", "stats"), "*i32")
PACK = {"TILE_ROWS": 4, "TILE_WORDS": 512, "TILE_SCALES": 64, "CAN_SHRINK": False}
ONE_WARP = {"num_warps": 1}
COPIES_ROWS = partial(moves_words_of_128_bits, 2, 2, narrow="st")


def of_call(kernel: Any, *aspects: Callable[[str], None], **constants: Any) -> Source:
    """A kernel of one warp."""
    return Source(kernel, SLOT_TYPES, RANKS | constants, ONE_WARP, aspects)


def open_call(posts: bool = False, can_shrink: bool = False) -> Source:
    aspects = (waits_for_record, *([releases_the_record_last] if posts else []))
    return of_call(slots.open_call, *aspects, ADVANCES=True, POSTS=posts, CAN_SHRINK=can_shrink)


def receive(has_stats: bool = False, can_shrink: bool = False) -> Source:
    how = {"HAS_STATS": has_stats, "CAN_SHRINK": can_shrink, "TILE_EXPERTS": 32}
    return of_call(slots.receive_records, waits_for_record, **how)


def send_tokens(travel: int) -> Source:
    constants = RANKS | TOPK | TILE | {"NUM_SHARES": 2, "TILE_TOKENS": 128, "TRAVEL": travel}
    aspects = (rounds_every_step, partial(moves_words_of_128_bits, 1, 1, narrow=""), releases_the_record_last)
    if travel == formats.RAW:
        aspects = (COPIES_ROWS, tells_by_its_last_program)
    return Source(slots.send_tokens, SLOT_TYPES, constants, WITHOUT_FUSION, aspects)


def pack(has_scales: bool, has_stats: bool) -> Source:
    constants = RANKS | PACK | {"HAS_SCALES": has_scales, "HAS_STATS": has_stats}
    aspects = (COPIES_ROWS, tells_by_its_last_program)
    return Source(slots.pack_tokens, PACK_TYPES, constants, {"num_warps": 4}, aspects)


def return_rows(use_logfmt: bool) -> Source:
    how = {"USE_LOGFMT": use_logfmt, "NUM_TOPK": 8, "NUM_SHARES": 8, "TILE_ROWS": 128}
    raw = (COPIES_ROWS, releases_the_record_last, tells_by_its_last_program)
    aspects = (rounds_every_step,) if use_logfmt else raw
    return Source(slots.return_rows, SLOT_TYPES, RANKS | TILE | how, WITHOUT_FUSION, aspects)


def add_up(use_logfmt: bool, can_shrink: bool = False) -> Source:
    how = {"USE_LOGFMT": use_logfmt, "CAN_SHRINK": can_shrink, "TILE_LIST": 32, "IN_HARDWARE": True}
    # Each of the 8 slots loads 16 values per thread.
    moves = partial(moves_words_of_128_bits, 0 if use_logfmt else 16, 1, narrow="")
    aspects = (rounds_every_step, moves, tells_by_its_last_program, finds_the_smallest_missing_row)
    return Source(slots.sum_tokens, SLOT_TYPES, RANKS | TOPK | TILE | how, WITHOUT_FUSION, aspects)


SLOTS = {
    "open": open_call(),
    "open and post": open_call(posts=True),
    "open where ranks can be masked": open_call(can_shrink=True),
    "send as it is": send_tokens(formats.RAW),
    "send as FP8": send_tokens(formats.FP8),
    "send as rounded FP8": send_tokens(formats.FP8_ROUNDED),
    "send as UE8M0": send_tokens(formats.FP8_UE8M0),
    "receive": receive(),
    "receive with statistics": receive(has_stats=True),
    "receive where ranks can be masked": receive(has_stats=True, can_shrink=True),
    "pack": pack(False, False),
    "pack with scales": pack(True, True),
    "return as it is": return_rows(False),
    "return in LogFMT": return_rows(True),
    "sum": add_up(False),
    "sum of LogFMT": add_up(True),
    "sum where ranks can be masked": add_up(False, True),
    "finish": of_call(slots.finish_call, CAN_SHRINK=False),
    "finish where ranks can be masked": of_call(slots.finish_call, CAN_SHRINK=True),
    "mask": of_call(slots.mask_rank),
}
KERNELS: dict[str, Source] = {
    **{f"cast to FP8, {mode}": cast(*mode) for mode in FP8_MODES},
    # Blocks begin at multiples of 4 bytes; the mask is two words of 64 bits.
    "encode LogFMT": logfmt(cast_kernels.encode_logfmt_kernel, ["v4.b32"], ["b32", "b64"]),
    "decode LogFMT": logfmt(cast_kernels.decode_logfmt_kernel, ["b32", "b64"], ["v4.b32"]),
    "count_layout": normal(counting.count_layout, 32, 1, **COUNTING),
    "place_tokens": normal(counting.place_tokens, 32, **COUNTING, ARE_DISTINCT=False),
    "place_tokens of distinct experts": normal(counting.place_tokens, 32, **COUNTING, ARE_DISTINCT=True),
    "exchange of a dispatch": exchange(6, CHANNEL_BLOCK=16, EXPERT_BLOCK=32),
    "exchange of a cached dispatch": exchange(5),
    "exchange of a combine": exchange(5, is_combine=True),
    "exchange of a refusal": exchange(5, is_refused=True),
    # At once, or after a wait.
    "barrier": barrier(BLOCKS["NUM_RANKS"]),
    "barrier between nodes": barrier(BLOCKS["NUM_RANKS"] // 2),
    "place_in_new_block": normal(
        notify.place_in_new_block, 1, types={"num_topk": "i64"}, **BLOCKS, SOURCE_BYTES=4
    ),
    "copy_for_peers": copy_for_peers(),
    "fill_send_head": normal(notify.fill_send_head, 4, **BLOCKS, TILE_TOKENS=128),
    "send between 2": send(2, 32, 512, 32, True),
    "send short rows between 2": send(2, 64, 256, 32, False),
    "send between 4": send(4, 8, 512, 16, False),
    "send between 8": send(8, 8, 512, 16, True),
    "unpack_window": normal(windows.unpack_window, 4, NUM_RANKS=8, PAD=True, IF_ALL_FIT=False, BLOCK=1024),
    "unpack_window early": normal(
        windows.unpack_window, 4, NUM_RANKS=8, PAD=False, IF_ALL_FIT=True, BLOCK=1024
    ),
    "digest_handle": normal(digests.digest_handle, 16, NUM_RANKS=8, CHANNEL_BLOCK=16, TILE_ROWS=2048),
    "origins": of_origins(origins.tell_origins, EXPANDS=False, TILE_ROWS=ORIGIN_ROWS),
    "origins of expanded rows": of_origins(origins.tell_origins, EXPANDS=True, TILE_ROWS=ORIGIN_ROWS),
    "order of ranks": of_origins(origins.order_ranks, RANK_BLOCK=8, TILE_TOKENS=ORDERED_RANKS // 8),
    "sums of bf16 between 2": pull(2, 32, cpu.BF16, 0),
    "sums of bf16 between 4": pull(4, 8, cpu.BF16, 0),
    "sums of bf16 between 8": pull(8, 16, cpu.BF16, 2),
    "sums in another order": pull(8, 16, cpu.BF16, 0, is_ordered=True),
    "sums of fp16": pull(4, 8, cpu.FP16, 1),
    "sums of float32": pull(2, 32, cpu.FP32, 2),
    "dispatch through rings between 2": ring_dispatch(2, 32, 3),
    "dispatch through rings between 8": ring_dispatch(8, 16, 4, scale_block=64),
    "dispatch through rings in one stage": ring_dispatch(4, 32, 1),
    "combine of bf16 through rings between 8": ring_combine(8, 16, 4, cpu.BF16),
    "combine through rings in another order": ring_combine(8, 16, 4, cpu.BF16, is_ordered=True),
    "combine of bf16 through rings in one stage": ring_combine(4, 16, 1, cpu.BF16),
    "combine of fp16 through rings": ring_combine(2, 32, 3, cpu.FP16, num_biases=1),
    "combine of float32 through rings": ring_combine(2, 16, 3, cpu.FP32, num_biases=2),
    **COMMANDS,
    **{f"{name} between nodes": source for name, source in BETWEEN_NODES.items()},
    "count_tiles": by_expert(expand.count_tiles, PLACE_WARPS, **PLACING),
    "add_tiles": by_expert(
        expand.add_tiles, PLACE_WARPS, TILE_BLOCK=ADDED_TILES, EXPERT_BLOCK=PLACED_EXPERTS
    ),
    "place_by_expert": by_expert(
        expand.place_by_expert, PLACE_WARPS, EXPANDS=True, ALL_EXPERTS=256, **PLACING
    ),
    "expand_rows": expand_rows(False, False),
    "expand_rows with weights, scales and padding": expand_rows(True, True),
    "reduce_expanded of bf16": reduce_expanded(cpu.BF16, 0),
    "reduce_expanded of fp16": reduce_expanded(cpu.FP16, 8),
    "reduce_expanded of float32": reduce_expanded(cpu.FP32, 8),
    **SLOTS,
}


def flags_have_one_thread_each(source: Source, text: str) -> None:
    """No flag is changed by an atomic operation, since it may be in memory of the host; and no two threads
    load or store the same one, since they could find different values."""
    assert not re.search(r"\b(atom|red)\.(?!\S*shared)\S*\.sys\b", text)
    if "@p ld.acquire" not in text and "@p st.release" not in text:
        return
    layouts = source.with_layouts()
    for shape, layout in re.findall(FLAGS, layouts):
        assert not has_copies([int(length) for length in shape.split("x")], layout, layouts)


def has_copies(shape: list[int], layout: str, text: str) -> bool:
    """Whether several threads have the same element of a tensor."""
    (kind, parts) = re.findall(rf"{layout} = #ttg\.(blocked|linear)<\{{(.*)\}}>", text)[0]
    numbers = {name: ast.literal_eval(part) for name, part in re.findall(r"(\w+) = (\[[\d, \[\]]*\])", parts)}
    if kind == "linear":
        # What each bit of the number of a thread, and of a warp, adds to an element's indices.
        return any(not any(step) for step in (*numbers["lane"], *numbers["warp"]))
    along = zip(*(numbers[name] for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")), strict=True)
    return any(length % math.prod(counts) for length, counts in zip(shape, along, strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_compiled(name: str) -> None:
    text = KERNELS[name].ptx()
    assert ".local" not in text
    flags_have_one_thread_each(KERNELS[name], text)
    for aspect in KERNELS[name].aspects:
        aspect(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_machine_code(name: str) -> None:
    source = KERNELS[name]
    machine = machine_code_of(source.kernel, source.types, source.constants, source.options)
    assert machine.cubin.startswith(b"\x7fELF")
    assert machine.name == source.kernel.fn.__name__
    # Nothing that the launcher would have to provide: scratch memory that is unused may be null.
    assert 0 <= machine.num_unused <= 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_machine_code_by_the_newest_triton(tmp_path: Path) -> None:
    """Kernels are compiled through few interfaces of Triton: the newest version must have them, too."""
    install = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), "--upgrade", "triton"]
    installed = subprocess.run([sys.executable, *install], capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"the newest Triton cannot be installed here: {installed.stderr.strip()[-200:]}")
    tests = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "test_machine_code and not newest",
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    finished = subprocess.run(
        [sys.executable, *tests], capture_output=True, text=True, check=False, env=environment
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
    found = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert found.stdout.startswith(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encode LogFMT", "sum"])
def test_products_would_be_fused_without_the_options(name: str) -> None:
    source = KERNELS[name]
    text = replace(source, options=source.options | {"enable_fp_fusion": True}).ptx()
    assert "fma.rn.f32" in text


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("tile", [*ROW_TILES, *SUM_TILES], ids=str)
def test_tiles_that_a_sweep_tries(tile: RowTile | SumTile, num_ranks: int) -> None:
    """`anyep tune`, in calls by handle: every tile compiles, moves 16 bytes at a time, and fits an SM."""
    if isinstance(tile, RowTile):
        source = send(num_ranks, tile.tokens, tile.words, tile.warps, False)
        of_tile = {"SCALE_BLOCK": 0}
    else:
        source = pull(num_ranks, tile.tokens, cpu.BF16, 0)
        of_tile = {"TILE_VALUES": tile.values}
    by_handle = source.constants | {"TOPK_BLOCK": 0} | of_tile
    source = replace(source, constants=by_handle, options=source.options | {"num_warps": tile.warps})
    text = source.ptx()
    loads, stores = (1, num_ranks) if isinstance(tile, RowTile) else (num_ranks, 1)
    moves_words_of_128_bits(loads, stores, text)
    machine = machine_code_of(source.kernel, source.types, source.constants, source.options)
    assert machine.shared_bytes <= 48 * 1024


ONES = {"NUM_RANKS": 1, "RANK_BLOCK": 2, "NUM_TOPK": 1, "TOPK_BLOCK": 2}
INTEGERS = ("local_experts", "num_scale_words", "max_tokens", "rows_per_expert", "num_experts")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOTS)
def test_one_rank_one_expert_one_choice(name: str) -> None:
    """An integer that is 1 becomes a constant of the kernel."""
    source = SLOTS[name]
    ones = {name: ONES.get(name, 1) for name in (*ONES, *INTEGERS) if name in source.kernel.arg_names}
    assert ".visible .entry" in replace(source, constants=source.constants | ones).ptx()
