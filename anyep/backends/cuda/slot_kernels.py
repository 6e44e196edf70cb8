"""Recipes of the kernels of low-latency calls.

kernels = SlotKernels(device_control, device_constants, generations, ranks_on_gpu, can_shrink)
movers = kernels.of_dispatch(tables, Format.BF16, num_tokens, num_topk, has_stats)
batches.run(((kernels.open_call, signature), movers.send), moment, {**movers.numbers, "x": x, ...})

A recipe returns a `Launch` for calls of certain sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from anyep.backends.cuda import constants
from anyep.backends.cuda.batch import Input, Launch
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.gpu import Gpu
from anyep.backends.cuda.kernels import slots as kernels
from anyep.backends.cuda.kernels.groups import LowLatencyCall, Packed, Slots
from anyep.backends.cuda.tiles import block_of
from anyep.core.records import Format
from anyep.layout import NUM_SLOT_SETS, LowLatencySlots

CHANNELS: Final = 128
CAST_BLOCKS: Final = 16
"""Blocks of 128 values that a program casts or copies at once: 16 values per thread."""
SUM_BLOCKS: Final = 8
LIST_CHOICES: Final = 1024
PACK_TILE: Final = (2, 1024, 64)
"""Rows, words and scale words that a program handles at once."""
LIST_TILE: Final = 128
RECORD_TILE: Final = 32
SEARCH_TILE: Final = 32
MOST_SHARES: Final = 64
PROGRAMS_PER_SM: Final = 16

STATE: Final = Input("state", torch.int64)
TOPK_IDX: Final = Input("topk_idx", torch.int64)
NUM_TOKENS: Final = Input("num_tokens")
SRC_INFO: Final = Input("src_info", torch.int32)
LAYOUT_RANGE: Final = Input("layout_range", torch.int64)
Signature = tuple[int, ...]
"""The words of a call's signature: its kind, the sizes of the slots, and how values travel."""


class Movers(NamedTuple):
    """The kernels of calls of certain sizes that send rows and take them."""

    send: tuple[Any, ...]
    take: tuple[Any, ...]
    """Their recipes."""
    numbers: dict[str, int]
    """The inputs that are numbers."""


class SlotTables:
    """The addresses of a layout of slots, by set and then by rank, in tables for kernels."""

    def __init__(self, slots: LowLatencySlots, heap_addresses: Sequence[int], rank: int, gpu: Gpu) -> None:
        self.slots = slots
        sets, ranks = range(NUM_SLOT_SETS), range(slots.num_ranks)
        rows_per_expert = slots.num_ranks * slots.sizes.num_max_tokens
        sizes = (
            slots.message_bytes,
            rows_per_expert * slots.message_bytes,
            slots.num_local_experts,
            rows_per_expert,
        )

        def table(address: Callable[[int, int], int]) -> Any:
            return gpu.table([address(slot_set, other) for slot_set in sets for other in ranks])

        def list_at(slot_set: int, reader: int) -> int:
            return slots.slot_offset(slot_set, 0, reader, 0)

        messages = table(lambda slot_set, other: heap_addresses[other] + slots.row_offset(slot_set, 0))
        lists_for_peers = table(lambda slot_set, other: heap_addresses[rank] + list_at(slot_set, other))
        lists_of_peers = table(lambda slot_set, other: heap_addresses[other] + list_at(slot_set, rank))
        self.for_peers = Slots(messages, lists_for_peers, *sizes)
        """With the lists for each peer, in this rank's own memory."""
        self.of_peers = Slots(messages, lists_of_peers, *sizes)
        """With the lists that each peer keeps for this rank."""
        self.states = tuple(new_state(gpu, slots.sizes.num_experts) for _ in sets)
        """Of calls outside of graphs, by set: no two calls in flight have the same one."""


def new_state(gpu: Gpu, num_experts: int) -> torch.Tensor:
    """The state of a call, with room for the ranges of its completion records; `open_call` fills it."""
    return gpu.empty((constants.RANGES + num_experts,), torch.int64)


class SlotKernels:
    """The kernels of one rank's low-latency calls."""

    def __init__(
        self,
        device_control: DeviceControl,
        device_constants: torch.Tensor,
        generations: torch.Tensor,
        ranks_on_gpu: int,
        can_shrink: bool,
    ) -> None:
        self._device_constants = device_constants
        self._heaps = device_control.heaps
        self._gpu = device_control.gpu
        self._num_ranks = device_control.num_ranks
        self._call = LowLatencyCall(device_constants, device_control.heaps, generations, STATE)
        """The first argument of every kernel."""
        self._blocks = device_control.kernels.blocks
        self._shrink = {"CAN_SHRINK": can_shrink, **self._blocks}
        self._programs = max(1, PROGRAMS_PER_SM * int(self._gpu.num_sms) // ranks_on_gpu)

    def mask_rank(self) -> Launch:
        """Tell the kernels of all ranks the generation of a rank; -1 is no rank."""
        arguments = (self._device_constants, self._heaps, Input("masked"), Input("generation"))
        return Launch(kernels.mask_rank, 1, self._blocks, (1,), arguments)

    def open_call(
        self, signature: Signature, refused: int = 0, posts: bool = False, advances: bool = True
    ) -> Launch:
        """Take the next call number, and wait until its slots are free."""
        aspects = {"ADVANCES": advances, "POSTS": posts, **self._shrink}
        return Launch(kernels.open_call, 1, aspects, (1,), (self._call, *signature, refused))

    def receive_records(self, num_experts: int, has_stats: bool) -> Launch:
        """Wait for the completion records of all ranks."""
        constants = {
            "HAS_STATS": has_stats,
            "TILE_EXPERTS": min(RECORD_TILE, max(2, block_of(num_experts))),
            **self._shrink,
        }
        stats = Input("wait_stats", torch.int64) if has_stats else STATE
        return Launch(kernels.receive_records, 1, constants, (1,), (self._call, stats, num_experts))

    def finish_call(self) -> Launch:
        """Close a call whose rows nobody takes."""
        return Launch(kernels.finish_call, 1, self._shrink, (1,), (self._call,))

    # Dispatch

    def of_dispatch(
        self,
        at: SlotTables,
        travel: Format,
        num_tokens: int,
        num_topk: int,
        num_scale_words: int,
        has_stats: bool,
    ) -> Movers:
        """The kernels of a dispatch; `has_stats`: it counts the rows of each expert."""
        sizes = at.slots.sizes
        num_shares = self._shares(num_tokens, -(-sizes.hidden // (CAST_BLOCKS * CHANNELS)))
        num_programs = sizes.num_experts + num_tokens * num_shares
        return Movers(
            (self.send_tokens, at, travel, num_topk, num_shares),
            (self.pack_tokens, at, travel, num_scale_words, has_stats),
            {"num_tokens": num_tokens, "send_programs": num_programs},
        )

    def send_tokens(self, at: SlotTables, travel: Format, num_topk: int, num_shares: int) -> Launch:
        """Put tokens into messages, list them by expert, and post completion records."""
        topk_block = block_of(num_topk)
        constants = {
            "TRAVEL": int(travel),
            "NUM_TOPK": num_topk,
            "TOPK_BLOCK": topk_block,
            "NUM_SHARES": num_shares,
            "TILE_BLOCKS": CAST_BLOCKS,
            "TILE_TOKENS": max(16, LIST_CHOICES // topk_block),
            **self._blocks,
        }
        x = Input("x", torch.uint16)
        arguments = (self._call, at.for_peers, x, TOPK_IDX, NUM_TOKENS, at.slots.sizes.hidden)
        return Launch(kernels.send_tokens, 4, constants, (Input("send_programs"),), arguments)

    def pack_tokens(self, at: SlotTables, travel: Format, num_scale_words: int, has_stats: bool) -> Launch:
        """Take the rows of each local expert from their senders, and close the call."""
        num_experts = at.slots.num_local_experts
        tile_rows, tile_words, tile_scales = PACK_TILE
        has_scales = travel is not Format.BF16
        most_shares = -(-at.slots.sizes.num_max_tokens // tile_rows)
        # Twice as many, because the work is uneven.
        num_shares = min(2 * self._shares(num_experts * self._num_ranks, most_shares), most_shares)
        constants = {
            "HAS_SCALES": has_scales,
            "HAS_STATS": has_stats,
            "TILE_ROWS": tile_rows,
            "TILE_WORDS": tile_words,
            "TILE_SCALES": tile_scales,
            **self._shrink,
        }
        packed = Packed(
            Input("packed_x", torch.int32),
            Input("packed_scales", torch.int32) if has_scales else STATE,
            SRC_INFO,
            LAYOUT_RANGE,
            Input("counts", torch.int32),
            Input("expert_stats", torch.int32) if has_stats else STATE,
        )
        row_words = at.slots.sizes.hidden // (4 if has_scales else 2)
        arguments = (self._call, at.of_peers, packed, row_words, num_scale_words)
        return Launch(
            kernels.pack_tokens, 4, constants, (num_experts, self._num_ranks, num_shares), arguments
        )

    # Combine

    def of_combine(
        self, at: SlotTables, use_logfmt: bool, zero_copy: bool, num_tokens: int, num_topk: int
    ) -> Movers:
        """The kernels of a combine."""
        tile_blocks = CAST_BLOCKS if use_logfmt else SUM_BLOCKS
        num_shares = self._shares(num_tokens, -(-at.slots.sizes.hidden // (tile_blocks * CHANNELS)))
        return Movers(
            (self.return_rows, at, use_logfmt, num_topk, zero_copy),
            (self.sum_tokens, at, use_logfmt, num_topk),
            {
                "num_ids": num_tokens * num_topk,
                "num_tokens": num_tokens,
                # A call without tokens has to be closed by a program, too.
                "summed_tokens": max(1, num_tokens),
                "sum_shares": num_shares,
            },
        )

    def return_rows(self, at: SlotTables, use_logfmt: bool, num_topk: int, zero_copy: bool) -> Launch:
        """Put the rows of local experts into messages, list them, and post completion records."""
        num_experts = at.slots.num_local_experts
        num_shares = self._shares(num_experts, at.slots.sizes.num_max_tokens)
        constants = {
            "USE_LOGFMT": use_logfmt,
            "NUM_TOPK": num_topk,
            "NUM_SHARES": num_shares,
            "TILE_BLOCKS": CAST_BLOCKS,
            "TILE_ROWS": LIST_TILE,
            **self._blocks,
        }
        arguments = (
            *(self._call, at.for_peers, STATE if zero_copy else Input("x", torch.uint16)),
            *(TOPK_IDX, SRC_INFO, LAYOUT_RANGE, Input("num_ids"), at.slots.sizes.hidden),
        )
        num_programs = num_experts * (self._num_ranks + (0 if zero_copy else num_shares))
        return Launch(kernels.return_rows, 4, constants, (num_programs,), arguments)

    def sum_tokens(self, at: SlotTables, use_logfmt: bool, num_topk: int) -> Launch:
        """Sum each token's rows where they lie, and close the call."""
        constants = {
            "USE_LOGFMT": use_logfmt,
            "NUM_TOPK": num_topk,
            "TOPK_BLOCK": block_of(num_topk),
            "TILE_LIST": SEARCH_TILE,
            "TILE_BLOCKS": CAST_BLOCKS if use_logfmt else SUM_BLOCKS,
            "IN_HARDWARE": self._gpu.rounds_in_hardware,
            **self._shrink,
        }
        arguments = (
            *(self._call, at.of_peers, TOPK_IDX, Input("topk_weights", torch.float32)),
            *(Input("out", torch.uint16), NUM_TOKENS, at.slots.sizes.hidden),
        )
        grid = (Input("summed_tokens"), Input("sum_shares"))
        return Launch(kernels.sum_tokens, 4, constants, grid, arguments)

    def _shares(self, num_pieces: int, most: int) -> int:
        """Programs per piece of work, such that the programs of all ranks fill the GPU."""
        return max(1, min(self._programs // max(1, num_pieces), most, MOST_SHARES))
