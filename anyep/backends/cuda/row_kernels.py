"""Recipes of the kernels that move rows in normal mode: into windows and out of them, or through rings.

rows = RowKernels(device_control.kernels, rings, tiles, share_of_sms, rounds_in_hardware)
recipe = (rows.send_to_windows, rows.sizes(token, config), all_or_none)
batches.run((recipe, ...), moment, {"x": x, "send_head": ..., ...})

A recipe returns a `Launch` for calls of certain sizes; its inputs are what differs between these calls.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, NamedTuple

import torch

from anyep.backends.cuda.batch import Input, Launch
from anyep.backends.cuda.control_kernels import PREFIXES, ControlKernels
from anyep.backends.cuda.kernels import groups, rings, sums, windows
from anyep.backends.cuda.tiles import (
    CHUNK_TOKENS,
    COPY_WARPS,
    COPY_WORDS,
    UNPACK_BLOCK,
    Tiles,
    at_most,
    block_of,
)
from anyep.core.rings import Rings, part_offsets
from anyep.layout import RingArea
from anyep.sizes import Config, TokenLayout

DTYPE_CODES: Final = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
MAX_KNOWN_SIZES: Final = 256

X: Final = Input("x", torch.int32)
"""Rows as words of 4 bytes."""
SEND_HEAD: Final = Input("send_head", torch.int32)
NUM_TOKENS: Final = Input("num_tokens")
RESULTS: Final = ("x", "sources", "ids", "weights", "scales")
"""What a rank may receive through rings."""


class Sizes:
    """The sizes of a call that its kernels are compiled for. Equal sizes are one object, so that they are
    compared in no time."""

    def __init__(self, token: TokenLayout, config: Config, num_programs: int, area: RingArea) -> None:
        self.token = token
        self.config = config
        self.num_programs = num_programs
        """How many programs move the rows of a call: no more than can be resident beside those of the other
        ranks. Programs would wait forever for one that is not resident."""
        self.row_words = token.hidden_bytes // 4
        self.area = area
        """Its rings."""

    @property
    def ring_area(self) -> groups.RingArea:
        """The same as the kernels take it."""
        area = self.area
        return groups.RingArea(area.start, area.num_rows, area.token_bytes, self.config.num_channels)

    @property
    def beside(self) -> groups.Beside:
        """Where metadata, scales, ids and weights lie in a place of a ring."""
        meta_at, scales_at, ids_at, weights_at, _ = part_offsets(self.token).tolist()
        token = self.token
        return groups.Beside(meta_at, scales_at, ids_at, weights_at, token.num_scales, token.num_topk)


class Strides(NamedTuple):
    """The strides of scales, in words."""

    of_tokens: int
    of_scales: int


class RowKernels:
    """The kernels of one rank that move rows; it has `share_of_sms` SMs of its GPU."""

    def __init__(
        self,
        control: ControlKernels,
        all_rings: Rings,
        tiles: Tiles,
        share_of_sms: int,
        rounds_in_hardware: bool,
    ) -> None:
        self._tables, self._state = control.tables, control.tables.state
        self._rank, self._num_ranks = control.rank, control.num_ranks
        self._ranks = control.blocks
        self._rounds_in_hardware = rounds_in_hardware
        self._rings = all_rings
        self._tiles = tiles
        self._share_of_sms = share_of_sms
        self._known: dict[tuple[int, int], Sizes] = {}
        self._by_value: dict[Hashable, Sizes] = {}

    def sizes(self, token: TokenLayout, config: Config) -> Sizes:
        """The sizes of calls with rows like these."""
        # Most calls of the same sizes pass identical objects, so their ids are looked up first; sizes keep
        # both alive. A config that was made for one call is looked up by its value.
        found = self._known.get((id(token), id(config)))
        if found is not None:
            return found
        found = self._by_value.get((token, config))
        if found is None:
            if len(self._by_value) >= MAX_KNOWN_SIZES:
                self._known.clear()
                self._by_value.clear()
            num_programs = min(config.num_sms, self._share_of_sms)
            found = Sizes(token, config, num_programs, self._rings.node.area_for(config, token))
            self._by_value[token, config] = found
            self._known[id(token), id(config)] = found
        return found

    def send_to_windows(
        self, sizes: Sizes, strides: Strides | None, experts_per_rank: int, all_or_none: bool
    ) -> Launch:
        """Send each row to the windows of its receivers; with `all_or_none`, only if all have one."""
        token = sizes.token
        tile = self._tiles.dispatch.fitting(sizes.row_words)
        constants = {
            "NUM_RECEIVERS": self._num_ranks,
            "RECEIVER_BLOCK": self._ranks["RANK_BLOCK"],
            "SCALE_BLOCK": block_of(token.num_scales),
            "TOPK_BLOCK": block_of(token.num_topk),
            "TILE_TOKENS": tile.tokens,
            "TILE_WORDS": tile.words,
            "CHUNK_TOKENS": CHUNK_TOKENS,
            "ALL_OR_NONE": all_or_none,
        }
        return Launch(
            windows.send_to_windows,
            tile.warps,
            constants,
            (sizes.num_programs,),
            (
                self.payload(token),
                self.scales(token, strides),
                SEND_HEAD,
                self._tables,
                NUM_TOKENS,
                sizes.row_words,
                token.num_topk,
                experts_per_rank,
            ),
        )

    def send_through_rings(self, sizes: Sizes, strides: Strides | None, experts_per_rank: int) -> Launch:
        """Send rows to receivers without a window, and receive rows if this rank has none. The kernel does
        nothing if all ranks have windows."""
        token, tile = sizes.token, self._tiles.ring_dispatch
        constants = {
            **self._ranks,
            "SCALE_BLOCK": block_of(token.num_scales),
            "TOPK_BLOCK": block_of(token.num_topk),
            "TILE_TOKENS": at_most(tile.tokens, sizes.area.num_rows),
            "TILE_WORDS": tile.words,
            "STAGES": tile.stages,
        }
        return Launch(
            rings.dispatch_through_rings,
            tile.warps,
            constants,
            (sizes.num_programs,),
            (
                self.payload(token),
                self.scales(token, strides),
                SEND_HEAD,
                self._tables,
                groups.RingResults(*(Input(f"to_{part}") for part in RESULTS)),
                PREFIXES._replace(digests=self._state),
                sizes.ring_area,
                sizes.beside,
                NUM_TOKENS,
                sizes.row_words,
                experts_per_rank,
            ),
        )

    def payload(self, token: TokenLayout) -> groups.Payload:
        """What a dispatch sends, as its kernels take it."""
        if not token.num_topk:
            return groups.Payload(X, self._state, self._state)
        return groups.Payload(X, Input("topk_idx", torch.int64), Input("topk_weights", torch.float32))

    def scales(self, token: TokenLayout, strides: Strides | None) -> groups.Scales:
        """Its scales."""
        if strides is None:
            return groups.Scales(self._state, 0, 0, 0)
        return groups.Scales(Input("scales", torch.int32), token.num_scales, *strides)

    def unpack(self, has_ids: bool, pads: bool, if_all_fit: bool = False) -> Launch:
        """Copy the source indices out of the window, and finish the digests; with `if_all_fit`, only if all
        rows are in windows, and the results have room for those of this rank."""
        constants = {
            "NUM_RANKS": self._num_ranks,
            "PAD": pads and has_ids,
            "IF_ALL_FIT": if_all_fit,
            "BLOCK": UNPACK_BLOCK,
        }
        return Launch(
            windows.unpack_window,
            4,
            constants,
            (Input("unpack_programs"),),
            (
                self._tables.targets,
                self._state,
                self._rank,
                Input("source", torch.int32),
                Input("result_ids", torch.int64) if has_ids else self._state,
                PREFIXES.rank_prefix,
                PREFIXES.digests,
                Input("num_rows"),
                Input("num_topk"),
            ),
        )

    # Combine

    def copy_for_peers(self, sizes: Sizes) -> Launch:
        """Copy the rows that other ranks read into a window."""
        return Launch(
            sums.copy_for_peers,
            COPY_WARPS,
            {"NUM_RANKS": self._num_ranks, "TILE_WORDS": COPY_WORDS},
            (sizes.num_programs,),
            (
                X,
                Input("window", torch.int32),
                PREFIXES.rank_prefix,
                self._rank,
                Input("num_rows"),
                sizes.row_words,
            ),
        )

    def pull_and_sum(
        self, sizes: Sizes, dtype: torch.dtype, num_biases: int, is_ordered: bool = False
    ) -> Launch:
        """Sum the rows of each token where they lie, by rank or in an order of ranks of its own; the kernel
        does nothing if some come through rings."""
        token, tile = sizes.token, self._tiles.combine
        constants = {
            "DTYPE": DTYPE_CODES[dtype],
            "NUM_BIASES": num_biases,
            **self._ranks,
            "TOPK_BLOCK": block_of(token.num_topk),
            "TILE_TOKENS": tile.tokens,
            "TILE_VALUES": tile.values,
            "CHUNK_TOKENS": CHUNK_TOKENS,
            "IN_HARDWARE": self._rounds_in_hardware,
            "ORDERED": is_ordered,
        }
        return Launch(
            sums.pull_and_sum,
            tile.warps,
            constants,
            (sizes.num_programs,),
            (
                self.sums(token, dtype, is_ordered),
                self.biases(dtype, num_biases),
                SEND_HEAD,
                self._tables,
                Input("own_x"),
                self._rank,
                NUM_TOKENS,
                token.hidden_bytes // dtype.itemsize,
                token.num_topk,
            ),
        )

    def combine_through_rings(
        self, sizes: Sizes, dtype: torch.dtype, num_biases: int, is_ordered: bool = False
    ) -> Launch:
        """Sum rows if some of them are not in windows; the kernel does nothing if all are."""
        token = sizes.token
        tile, tile_values = self._tiles.ring_combine
        constants = {
            "DTYPE": DTYPE_CODES[dtype],
            "NUM_BIASES": num_biases,
            **self._ranks,
            "TOPK_BLOCK": block_of(token.num_topk),
            "TILE_TOKENS": at_most(tile.tokens, sizes.area.num_rows),
            "TILE_WORDS": tile.words,
            "STAGES": tile.stages,
            "TILE_VALUES": tile_values,
            "IN_HARDWARE": self._rounds_in_hardware,
            "ORDERED": is_ordered,
        }
        weights = Input("weights", torch.float32) if token.num_topk else self._state
        return Launch(
            rings.combine_through_rings,
            tile.warps,
            constants,
            (sizes.num_programs,),
            (
                groups.Outputs(X, weights),
                self.sums(token, dtype, is_ordered),
                self.biases(dtype, num_biases),
                SEND_HEAD,
                self._tables,
                PREFIXES._replace(digests=self._state),
                sizes.ring_area,
                sizes.beside,
                NUM_TOKENS,
                token.hidden_bytes // dtype.itemsize,
            ),
        )

    def sums(self, token: TokenLayout, dtype: torch.dtype, is_ordered: bool) -> groups.Sums:
        """What a combine fills."""
        weights = Input("out_weights", torch.float32) if token.num_topk else self._state
        order = Input("order", torch.int32) if is_ordered else self._state
        return groups.Sums(Input("out", _bits(dtype)), weights, order)

    def biases(self, dtype: torch.dtype, num_biases: int) -> groups.Biases:
        """Where its sums start."""
        given: list[Any] = [Input(name, _bits(dtype)) for name in ("bias_0", "bias_1")[:num_biases]]
        first, second = (*given, self._state, self._state)[:2]
        return groups.Biases(first, second)


def _bits(dtype: torch.dtype) -> torch.dtype:
    """How kernels read values of a type: 16-bit values as their bits."""
    return torch.uint16 if dtype.itemsize == 2 else dtype
