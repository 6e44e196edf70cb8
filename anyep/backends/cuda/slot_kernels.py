"""Launches the kernels of low-latency calls.

kernels = SlotKernels(device_control, device_constants, generations, ranks_on_gpu, can_shrink)
kernels.open(stream, state, header)
kernels.send_tokens(stream, state, tables, tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from anyep.backends.base import LowLatencyInput, LowLatencyResults, LowLatencyTokens
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.gpu import Gpu
from anyep.backends.cuda.kernels import slots as kernels
from anyep.backends.cuda.kernels.groups import LowLatencyCall, Packed, Slots
from anyep.backends.cuda.launch import Fixed, Seen
from anyep.backends.cuda.tiles import block_of
from anyep.core import records
from anyep.core.calls import Array
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
        self.for_peers = Fixed(Slots(messages, lists_for_peers, *sizes))
        """With the lists for each peer, in this rank's own memory."""
        self.of_peers = Fixed(Slots(messages, lists_of_peers, *sizes))
        """With the lists that each peer keeps for this rank."""


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
        self._device_control = device_control
        self._device_constants = device_constants
        self._generations = generations
        self._gpu = device_control.gpu
        self._num_ranks = device_control.num_ranks
        self._blocks = {"NUM_RANKS": self._num_ranks, "RANK_BLOCK": device_control.rank_block}
        self._shrink = {"CAN_SHRINK": can_shrink, **self._blocks}
        self._programs = max(1, PROGRAMS_PER_SM * int(self._gpu.num_sms) // ranks_on_gpu)

    def mask_rank(self, masked: int, generation: int) -> None:
        """Tell the kernels of all ranks the generation of a rank; -1 is no rank."""
        launch = self._device_control.launcher(kernels.mask_rank, 1, **self._blocks)
        heaps = self._device_control.heaps
        launch(self._gpu.side_stream, (1,), self._device_constants, heaps, masked, generation)

    def open(
        self,
        stream: Any,
        state: torch.Tensor,
        header: Array,
        refused: int = 0,
        posts: bool = False,
        advances: bool = True,
    ) -> None:
        launch = self._device_control.launcher(
            kernels.open_call, 1, ADVANCES=advances, POSTS=posts, **self._shrink
        )
        words = header[records.Field.KIND : records.Field.FORMAT + 1].tolist()
        launch(stream, (1,), self._common(state), *words, refused)

    def receive_records(
        self, stream: Any, state: torch.Tensor, num_experts: int, wait_stats: torch.Tensor | None
    ) -> None:
        launch = self._device_control.launcher(
            kernels.receive_records,
            1,
            HAS_STATS=wait_stats is not None,
            TILE_EXPERTS=min(RECORD_TILE, max(2, block_of(num_experts))),
            **self._shrink,
        )
        launch(stream, (1,), self._common(state), state if wait_stats is None else wait_stats, num_experts)

    def finish_call(self, stream: Any, state: torch.Tensor) -> None:
        launch = self._device_control.launcher(kernels.finish_call, 1, **self._shrink)
        launch(stream, (1,), self._common(state))

    def send_tokens(self, stream: Any, state: torch.Tensor, at: SlotTables, tokens: LowLatencyTokens) -> None:
        num_tokens, num_topk = tokens.topk_idx.shape
        sizes = tokens.sizes
        slot_block = block_of(num_topk)
        num_shares = self._shares(num_tokens, -(-sizes.hidden // (CAST_BLOCKS * CHANNELS)))
        send = self._device_control.launcher(
            kernels.send_tokens,
            4,
            TRAVEL=int(tokens.travel),
            NUM_TOPK=num_topk,
            SLOT_BLOCK=slot_block,
            NUM_SHARES=num_shares,
            TILE_BLOCKS=CAST_BLOCKS,
            TILE_TOKENS=max(16, LIST_CHOICES // slot_block),
            **self._blocks,
        )
        send(
            stream,
            (sizes.num_experts + num_tokens * num_shares,),
            self._common(state),
            at.for_peers,
            Seen(tokens.x, torch.uint16),
            tokens.topk_idx,
            num_tokens,
            sizes.hidden,
        )

    def pack_tokens(
        self,
        stream: Any,
        state: torch.Tensor,
        at: SlotTables,
        tokens: LowLatencyTokens,
        results: LowLatencyResults,
    ) -> None:
        num_experts = at.slots.num_local_experts
        tile_rows, tile_words, tile_scales = PACK_TILE
        has_scales, has_stats = results.scales is not None, tokens.expert_stats is not None
        most_shares = -(-tokens.sizes.num_max_tokens // tile_rows)
        # Twice as many, because the work is uneven.
        num_shares = min(2 * self._shares(num_experts * self._num_ranks, most_shares), most_shares)
        pack = self._device_control.launcher(
            kernels.pack_tokens,
            4,
            HAS_SCALES=has_scales,
            HAS_STATS=has_stats,
            TILE_ROWS=tile_rows,
            TILE_WORDS=tile_words,
            TILE_SCALES=tile_scales,
            **self._shrink,
        )
        pack(
            stream,
            (num_experts, self._num_ranks, num_shares),
            self._common(state),
            at.of_peers,
            Packed(
                Seen(results.x, torch.int32),
                Seen(results.scales, torch.int32) if results.scales is not None else state,
                results.src_info,
                results.layout_range,
                results.counts,
                tokens.expert_stats if has_stats else state,
            ),
            tokens.sizes.hidden * results.x.element_size() // 4,
            tokens.num_scale_words,
        )

    def return_rows(
        self, stream: Any, state: torch.Tensor, at: SlotTables, combined: LowLatencyInput
    ) -> None:
        num_experts = at.slots.num_local_experts
        num_shares = self._shares(num_experts, combined.sizes.num_max_tokens)
        give_back = self._device_control.launcher(
            kernels.return_rows,
            4,
            USE_LOGFMT=combined.use_logfmt,
            NUM_TOPK=combined.topk_idx.shape[1],
            NUM_SHARES=num_shares,
            TILE_BLOCKS=CAST_BLOCKS,
            TILE_ROWS=LIST_TILE,
            **self._blocks,
        )
        give_back(
            stream,
            (num_experts * (self._num_ranks + (0 if combined.zero_copy else num_shares)),),
            self._common(state),
            at.for_peers,
            Seen(combined.x, torch.uint16) if not combined.zero_copy else state,
            combined.topk_idx,
            combined.src_info,
            combined.layout_range,
            combined.topk_idx.numel(),
            combined.sizes.hidden,
        )

    def sum_tokens(
        self, stream: Any, state: torch.Tensor, at: SlotTables, combined: LowLatencyInput, out: torch.Tensor
    ) -> None:
        num_tokens, num_topk = combined.topk_idx.shape
        hidden = combined.sizes.hidden
        tile_blocks = CAST_BLOCKS if combined.use_logfmt else SUM_BLOCKS
        num_shares = self._shares(num_tokens, -(-hidden // (tile_blocks * CHANNELS)))
        add_up = self._device_control.launcher(
            kernels.sum_tokens,
            4,
            USE_LOGFMT=combined.use_logfmt,
            NUM_TOPK=num_topk,
            SLOT_BLOCK=block_of(num_topk),
            TILE_LIST=SEARCH_TILE,
            TILE_BLOCKS=tile_blocks,
            IN_HARDWARE=self._gpu.rounds_in_hardware,
            **self._shrink,
        )
        add_up(
            stream,
            # A call without tokens has to be closed by a program, too.
            (max(1, num_tokens), num_shares),
            self._common(state),
            at.of_peers,
            combined.topk_idx,
            combined.topk_weights,
            Seen(out, torch.uint16),
            num_tokens,
            hidden,
        )

    def _shares(self, num_pieces: int, most: int) -> int:
        """Programs per piece of work, such that the programs of all ranks fill the GPU."""
        return max(1, min(self._programs // max(1, num_pieces), most, MOST_SHARES))

    def _common(self, state: torch.Tensor) -> LowLatencyCall:
        """The first argument of every kernel."""
        return LowLatencyCall(self._device_constants, self._device_control.heaps, self._generations, state)
