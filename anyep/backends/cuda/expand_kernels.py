"""Recipes of the kernels of the expanded layout: rows by local expert (`kernels/expand.py`).

    kernels = ExpandKernels(rounds_in_hardware)
    counting = tuple((recipe, num_topk, local_experts) for recipe in (kernels.count_tiles, kernels.add_tiles))
    placing = (kernels.place_by_expert, num_topk, local_experts, True)
    batches.run((*counting, placing), moment, inputs_of_placing((counts, at), ids, places, alignment))
    values = inputs_of_moving((counts, at), places, compact, expanded, alignment, most_programs)
    batches.run(((kernels.expand_rows, *sizes),), moment, values)

No kernel waits for another program, so there may be more programs than can be resident.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from anyep.backends.cuda.batch import Input, Launch
from anyep.backends.cuda.kernels import expand, origins
from anyep.backends.cuda.kernels.groups import CompactRows, ExpandedRows, Positions, Received
from anyep.backends.cuda.row_kernels import DTYPE_CODES
from anyep.backends.cuda.tiles import block_of
from anyep.backends.expanded import ExpertPlaces, Origins, OriginTensors, RowTensors

PLACED_ROWS: Final = 128
PLACED_EXPERTS: Final = 32
PLACE_WARPS: Final = 8
ADDED_TILES: Final = 256
EXPAND_TILE: Final = (8, 512)
EXPAND_WARPS: Final = 16
UNROLLED_CHOICES: Final = 4
REDUCE_TILE: Final = (8, 1024)
REDUCE_WARPS: Final = 16
GATHERED_ROWS: Final = 256
WORD_BYTES: Final = 4
ORIGIN_WARPS: Final = 4
ORIGIN_ROWS: Final = 256
ORDERED_RANKS: Final = 1024
"""How many ranks of tokens a program puts into order."""
ALIGNED_NUMBERS: Final = 4
"""Numbers of 4 bytes in 16 bytes."""

COUNTS: Final = Input("received", torch.int32)
RECEIVED: Final = Received(COUNTS, Input("received_at"), Input("received_room"))
POSITIONS: Final = Input("positions", torch.int32)
IDS: Final = Input("received_ids", torch.int64)
TILE_COUNTS: Final = Input("tile_counts", torch.int32)
TILES_BEFORE: Final = Input("tiles_before", torch.int32)
EXPERT_COUNTS: Final = Input("expert_counts", torch.int32)
EXPERT_ENDS: Final = Input("expert_ends", torch.int32)
NUM_TILES: Final = Input("num_placed_tiles")
ALIGNMENT: Final = Input("expert_alignment")
MOVING_PROGRAMS: Final = Input("moving_programs")
EXPANDED_ROOM: Final = Input("expanded_room")


class ExpandKernels:
    """The kernels of one rank that group rows by expert."""

    def __init__(self, rounds_in_hardware: bool) -> None:
        self._rounds_in_hardware = rounds_in_hardware

    def tell_origins(self, num_ranks: int, expands: bool) -> Launch:
        """Say where received rows come from."""
        kept = COUNTS if expands else Input("kept_ids", torch.int64)
        return Launch(
            origins.tell_origins,
            ORIGIN_WARPS,
            {"NUM_RANKS": num_ranks, "EXPANDS": expands, "TILE_ROWS": ORIGIN_ROWS},
            (Input("num_origin_tiles"),),
            (
                *(Input("rank_prefix", torch.int32), Input("sources", torch.int32), IDS, COUNTS),
                *(Input("metadata", torch.int32), kept),
                *(Input("rank"), Input("received_room"), Input("num_topk"), Input("most_tokens")),
            ),
        )

    def order_ranks(self, num_ranks: int) -> Launch:
        """Say in which order a combine adds, and where the choices of tokens went."""
        rank_block = block_of(num_ranks)
        return Launch(
            origins.order_ranks,
            ORIGIN_WARPS,
            {
                "NUM_RANKS": num_ranks,
                "RANK_BLOCK": rank_block,
                "TILE_TOKENS": max(1, ORDERED_RANKS // rank_block),
            },
            (Input("num_order_tiles"),),
            (
                *(Input("topk_idx", torch.int64), Input("send_head", torch.int32)),
                *(Input("slots", torch.int32), Input("order", torch.int32)),
                *(Input("num_tokens"), Input("num_topk"), Input("num_local_experts")),
            ),
        )

    def count_tiles(self, num_topk: int, local_experts: int) -> Launch:
        """Count the choices of each expert in each tile of rows."""
        return Launch(
            expand.count_tiles,
            PLACE_WARPS,
            {"TILE_ROWS": PLACED_ROWS, "EXPERT_BLOCK": PLACED_EXPERTS},
            (NUM_TILES, _expert_blocks(local_experts)),
            (IDS, RECEIVED, TILE_COUNTS, num_topk, local_experts),
        )

    def add_tiles(self, num_topk: int, local_experts: int) -> Launch:
        """Add up the counts of the tiles."""
        return Launch(
            expand.add_tiles,
            PLACE_WARPS,
            {"TILE_BLOCK": ADDED_TILES, "EXPERT_BLOCK": PLACED_EXPERTS},
            (_expert_blocks(local_experts),),
            (TILE_COUNTS, TILES_BEFORE, EXPERT_COUNTS, NUM_TILES, local_experts),
        )

    def place_by_expert(self, num_topk: int, local_experts: int, expands: bool) -> Launch:
        """Find where each expert's rows end, and (`expands`) the position of each choice."""
        constants = {
            "EXPANDS": expands,
            "TILE_ROWS": PLACED_ROWS,
            "EXPERT_BLOCK": PLACED_EXPERTS,
            "ALL_EXPERTS": block_of(local_experts),
        }
        positions = _positions(num_topk) if expands else Positions(COUNTS, 0, 0, num_topk)
        return Launch(
            expand.place_by_expert,
            PLACE_WARPS,
            constants,
            (NUM_TILES if expands else 1, _expert_blocks(local_experts)),
            (
                *(IDS, RECEIVED, TILES_BEFORE, EXPERT_COUNTS, EXPERT_ENDS),
                *(positions, local_experts, ALIGNMENT),
            ),
        )

    def expand_rows(
        self,
        num_topk: int,
        local_experts: int,
        row_words: int,
        has_weights: bool,
        num_scales: int,
        pads: bool,
    ) -> Launch:
        """Write the copies of each row; with `pads` the padding of each group becomes 0."""
        tile_rows, tile_words = EXPAND_TILE
        constants = {
            "HAS_WEIGHTS": has_weights,
            "SCALE_BLOCK": block_of(num_scales),
            "PADS": pads,
            "TILE_ROWS": tile_rows,
            "TILE_WORDS": tile_words,
            "UNROLLED": min(UNROLLED_CHOICES, num_topk),
        }
        nothing: Any = COUNTS
        weights = ("compact_weights", "expanded_weights")
        scales = ("compact_scales", "expanded_scales")
        weights_of = [Input(name, torch.float32) if has_weights else nothing for name in weights]
        scales_of = [Input(name, torch.int32) if num_scales else nothing for name in scales]
        strides: tuple[Any, Any] = (Input("stride_row"), Input("stride_scale")) if num_scales else (0, 0)
        compact = CompactRows(Input("compact_x", torch.int32), weights_of[0], scales_of[0], num_scales)
        x = Input("expanded_x", torch.int32)
        expanded = ExpandedRows(x, weights_of[1], scales_of[1], *strides, EXPANDED_ROOM)
        return Launch(
            expand.expand_rows,
            EXPAND_WARPS,
            constants,
            (MOVING_PROGRAMS,),
            (
                *(RECEIVED, _positions(num_topk), compact, expanded),
                *(EXPERT_ENDS, row_words, local_experts, ALIGNMENT),
            ),
        )

    def reduce_expanded(self, num_topk: int, hidden: int, dtype: torch.dtype, has_weights: bool) -> Launch:
        """Add up the copies of each row, and gather their weights."""
        tile_rows, tile_values = REDUCE_TILE
        constants = {
            "DTYPE": DTYPE_CODES[dtype],
            "TOPK_BLOCK": block_of(num_topk) if has_weights else 0,
            "TILE_ROWS": tile_rows,
            "TILE_VALUES": tile_values,
            "CHUNK_ROWS": GATHERED_ROWS,
            "IN_HARDWARE": self._rounds_in_hardware,
        }
        bits = torch.uint16 if dtype.itemsize == 2 else dtype
        weights = ("expanded_weights", "compact_weights")
        weights_of = [Input(name, torch.float32) if has_weights else COUNTS for name in weights]
        return Launch(
            expand.reduce_expanded,
            REDUCE_WARPS,
            constants,
            (MOVING_PROGRAMS,),
            (
                *(RECEIVED, _positions(num_topk), Input("expanded_x", bits), weights_of[0]),
                *(Input("compact_x", bits), weights_of[1], hidden, EXPANDED_ROOM),
            ),
        )


def _positions(num_topk: int) -> Positions:
    return Positions(POSITIONS, Input("first_position"), Input("position_stride"), num_topk)


def _expert_blocks(local_experts: int) -> int:
    return -(-local_experts // PLACED_EXPERTS)


def inputs_of_origins(given: Origins, tensors: OriginTensors) -> dict[str, Any]:
    """The inputs of the kernels that say where rows come from."""
    num_rows, num_topk = given.recv_topk_idx.shape
    num_tokens, num_ranks = given.send_head.shape
    tile_tokens = max(1, ORDERED_RANKS // block_of(num_ranks))
    return {
        "rank_prefix": given.rank_prefix,
        "sources": given.recv_src_idx,
        "send_head": given.send_head,
        "topk_idx": given.topk_idx,
        "received_ids": given.recv_topk_idx,
        "received": tensors.received,
        "metadata": tensors.metadata,
        "slots": tensors.slots,
        "order": tensors.order,
        "kept_ids": tensors.kept_ids,
        "rank": given.rank,
        "received_room": num_rows,
        "num_topk": num_topk,
        "num_tokens": num_tokens,
        "most_tokens": given.num_max_tokens_per_rank,
        "num_local_experts": given.num_experts // num_ranks,
        "num_origin_tiles": max(1, -(-num_rows // ORIGIN_ROWS)),
        "num_order_tiles": max(1, -(-num_tokens // tile_tokens)),
    }


def inputs_of_placing(
    received: tuple[torch.Tensor, int], ids: torch.Tensor, places: ExpertPlaces, alignment: int
) -> dict[str, Any]:
    """The inputs of the kernels that place rows with these local ids.

    `received` is where the number of received rows is: a tensor of int32 counts, and an index."""
    num_tiles = max(1, -(-ids.shape[0] // PLACED_ROWS))
    num_counts = -(-num_tiles * len(places.counts) // ALIGNED_NUMBERS) * ALIGNED_NUMBERS
    scratch = torch.empty((2, num_counts), dtype=torch.int32, device=ids.device)
    return {
        **_inputs_of_rows(received, ids.shape[0], places, alignment),
        "received_ids": ids,
        "num_placed_tiles": num_tiles,
        "tile_counts": scratch[0],
        "tiles_before": scratch[1],
    }


def inputs_of_moving(
    received: tuple[torch.Tensor, int],
    places: ExpertPlaces,
    compact: RowTensors,
    expanded: RowTensors,
    alignment: int,
    most_programs: int,
) -> dict[str, Any]:
    """The inputs of the kernels that write copies of rows, or add them up."""
    num_rows, hidden = compact.x.shape
    tile_rows, tile_bytes = EXPAND_TILE[0], WORD_BYTES * EXPAND_TILE[1]
    num_tiles = -(-num_rows // tile_rows) * -(-hidden * compact.x.element_size() // tile_bytes)
    values = {
        **_inputs_of_rows(received, num_rows, places, alignment),
        "moving_programs": max(1, min(most_programs, num_tiles)),
        "compact_x": compact.x,
        "compact_weights": compact.weights,
        "compact_scales": compact.scales,
        "expanded_x": expanded.x,
        "expanded_weights": expanded.weights,
        "expanded_scales": expanded.scales,
        "expanded_room": expanded.x.shape[0],
    }
    if expanded.scales is not None:
        values["stride_row"], values["stride_scale"] = expanded.scales.stride()
    return values


def _inputs_of_rows(
    received: tuple[torch.Tensor, int], room: int, places: ExpertPlaces, alignment: int
) -> dict[str, Any]:
    counts, at = received
    positions = places.positions
    # Kernels are compiled for pointers to multiples of 16 bytes.
    first = positions.storage_offset() % ALIGNED_NUMBERS
    extent = first + (room - 1) * positions.stride(0) + positions.shape[1] if room else 0
    return {
        "received": counts,
        "received_at": at,
        "received_room": room,
        "positions": positions.as_strided((extent,), (1,), positions.storage_offset() - first),
        "first_position": first,
        "position_stride": positions.stride(0),
        "expert_counts": places.counts,
        "expert_ends": places.ends,
        "expert_alignment": alignment,
    }
