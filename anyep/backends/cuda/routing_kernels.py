"""Recipes of the kernels that count tokens, and that fill routings: counts, places of rows, digests.

kernels = RoutingKernels(device_control.kernels)
batches.run(((kernels.count_layout, num_topk, has_more), ...), moment, {"topk_idx": topk_idx, ...})
"""

from __future__ import annotations

import torch

from anyep.backends.cuda.batch import Input, Launch
from anyep.backends.cuda.control_kernels import PREFIXES, ControlKernels
from anyep.backends.cuda.kernels import counting, digests
from anyep.backends.cuda.kernels import notify as notify_kernels
from anyep.backends.cuda.row_kernels import NUM_TOKENS, SEND_HEAD
from anyep.backends.cuda.tiles import (
    COUNT_WARPS,
    COUNTED_EXPERTS,
    COUNTED_TOKENS,
    DIGEST_TILE,
    DIGEST_WARPS,
    HEAD_TOKENS,
    block_of,
)

TOPK_IDX = Input("topk_idx", torch.int64)
BY_RANK = Input("by_rank", torch.int32)
BY_EXPERT = Input("by_expert", torch.int32)
IN_RANK = Input("in_rank", torch.int8)


class RoutingKernels:
    """The kernels of one rank that count tokens and fill routings."""

    def __init__(self, control: ControlKernels) -> None:
        self._tables = control.tables
        self._num_ranks = control.num_ranks
        self._blocks = control.blocks

    def count_layout(self, num_topk: int, local_experts: int, told: int) -> Launch:
        """Count tokens per rank and per expert. An id that is no expert is reported at the address `told`."""
        return Launch(
            counting.count_layout,
            COUNT_WARPS,
            self._counting(num_topk),
            (self._num_ranks, -(-local_experts // COUNTED_EXPERTS) + 1),
            (TOPK_IDX, BY_RANK, BY_EXPERT, IN_RANK, told, NUM_TOKENS, num_topk, local_experts),
        )

    def place_tokens(
        self, num_topk: int, local_experts: int, num_channels: int, are_distinct: bool = False
    ) -> Launch:
        """Number the rows for each receiver, and check the counts; if they are to be, that the experts of a
        token are distinct."""
        state = self._tables.state
        checks_experts = -(-local_experts // COUNTED_EXPERTS) + 1 if num_topk else 0
        return Launch(
            counting.place_tokens,
            COUNT_WARPS,
            {**self._counting(num_topk), "ARE_DISTINCT": are_distinct},
            (self._num_ranks, num_channels + checks_experts),
            (
                IN_RANK,
                TOPK_IDX if num_topk else state,
                BY_RANK,
                BY_EXPERT,
                # Numbers and counts of this rank's rows: notify messages make places and prefix sums of them.
                SEND_HEAD,
                PREFIXES.channel_prefix,
                state,
                NUM_TOKENS,
                num_channels,
                Input("tokens_per_channel"),
                num_topk,
                local_experts,
            ),
        )

    def _counting(self, num_topk: int) -> dict[str, int]:
        return {
            "NUM_RANKS": self._num_ranks,
            "TOPK_BLOCK": block_of(num_topk),
            "EXPERT_BLOCK": COUNTED_EXPERTS,
            "TILE_TOKENS": COUNTED_TOKENS,
        }

    def fill_send_head(self) -> Launch:
        """Turn the numbers of rows into their places at the receivers."""
        tables = self._tables
        return Launch(
            notify_kernels.fill_send_head,
            4,
            {"TILE_TOKENS": HEAD_TOKENS, **self._blocks},
            (Input("fill_programs"),),
            (
                tables.constants,
                tables.state,
                SEND_HEAD,
                PREFIXES.rank_prefix,
                # The handle keeps a copy of the mask: the user may change it afterwards.
                Input("handle_in_rank", torch.int8),
                PREFIXES.digests,
                NUM_TOKENS,
            ),
        )

    def digest_handle(self, channel_block: int) -> Launch:
        """Compute the digests of a handle; `channel_block` is a power of two that holds its channels."""
        return Launch(
            digests.digest_handle,
            DIGEST_WARPS,
            {"NUM_RANKS": self._num_ranks, "CHANNEL_BLOCK": channel_block, "TILE_ROWS": DIGEST_TILE},
            (self._num_ranks, 2),
            (
                self._tables.constants,
                *PREFIXES[:3],
                Input("source", torch.int32),
                SEND_HEAD,
                PREFIXES.digests,
                NUM_TOKENS,
                Input("num_rows"),
                Input("num_channels"),
            ),
        )
