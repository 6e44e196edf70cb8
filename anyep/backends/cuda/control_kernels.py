"""Recipes of the kernels of the control plane: notify messages, windows in new blocks, barriers.

kernels = ControlKernels(rank, topology, tables, totals_address, rows_of_address)
recipes = (kernels.exchange_by_handle, is_combine), (kernels.barrier, ARRIVED_AT, False)
batches.run(recipes, moment, values)
"""

from __future__ import annotations

from typing import Final

import torch

from anyep.backends.cuda.batch import Input, Launch
from anyep.backends.cuda.kernels import notify as kernels
from anyep.backends.cuda.kernels.groups import Counts, HostWords, Prefixes, Tables
from anyep.backends.cuda.tiles import block_of
from anyep.layout import NUM_MAX_CHANNELS, SOURCE_INDEX_BYTES
from anyep.sizes import NUM_MAX_LOCAL_EXPERTS, SOURCE_META_BYTES
from anyep.topology import Topology

PREFIXES: Final = Prefixes(
    Input("rank_prefix", torch.int32),
    Input("channel_prefix", torch.int32),
    Input("recv_channel_prefix", torch.int32),
    Input("digests", torch.int64),
)
"""The prefix sums and digests of a routing, as inputs of kernels."""


class ControlKernels:
    """The kernels of one rank's control plane. `totals_address` and `rows_of_address` are where the host
    reads what a dispatch with counts found out."""

    def __init__(
        self, rank: int, topology: Topology, tables: Tables, totals_address: int, rows_of_address: int
    ) -> None:
        self.rank, self.num_ranks = rank, topology.num_ranks
        self.topology = topology
        self.tables = tables
        self.blocks = {"NUM_RANKS": self.num_ranks, "RANK_BLOCK": block_of(self.num_ranks)}
        """Compile-time values that most kernels have."""
        self._totals_address, self._rows_of_address = totals_address, rows_of_address

    def exchange_by_handle(self, is_combine: bool) -> Launch:
        """Exchange notify messages without counts: all ranks use the same routing."""
        state = self.tables.state
        prefixes = Prefixes(PREFIXES.rank_prefix, state, state, PREFIXES.digests)
        return self._exchange(prefixes, Counts(state, state, state, state), (0, 0), is_combine, False)

    def exchange_counts(self, num_channels: int, local_experts: int, has_ids: bool) -> Launch:
        """Exchange notify messages with counts by rank, by expert and by channel (in `channel_prefix`). They
        fill the prefix sums and start the digests. The input `ticket` is one that the host may wait for."""
        ids = Input("topk_idx", torch.int64) if has_ids else self.tables.state
        by_node = (
            Input("handle_rdma_prefix", torch.int32) if self.topology.num_nodes > 1 else self.tables.state
        )
        counts = Counts(Input("by_rank", torch.int32), Input("by_expert", torch.int32), ids, by_node)
        return self._exchange(PREFIXES, counts, (num_channels, local_experts), False, False)

    def exchange_refusals(self) -> Launch:
        """Send messages that refuse this rank's call."""
        state = self.tables.state
        nothing = Prefixes(state, state, state, state), Counts(state, state, state, state)
        return self._exchange(*nothing, (0, 0), False, True)

    def _exchange(
        self,
        prefixes: Prefixes,
        counts: Counts,
        sizes: tuple[int, int],
        is_combine: bool,
        is_refused: bool,
    ) -> Launch:
        """`sizes` is the number of channels and of experts per rank."""
        host = HostWords(Input("message"), self._totals_address, self._rows_of_address, Input("ticket"))
        num_channels, local_experts = sizes
        constants = {
            **self.blocks,
            "IS_COMBINE": is_combine,
            "IS_REFUSED": is_refused,
            "CHANNEL_BLOCK": block_for(num_channels, NUM_MAX_CHANNELS),
            "EXPERT_BLOCK": block_for(local_experts, NUM_MAX_LOCAL_EXPERTS),
            "RANKS_PER_NODE": self.topology.ranks_per_node,
        }
        arguments = (self.tables, prefixes, counts, host, num_channels, local_experts)
        return Launch(kernels.exchange_notify, 1, constants, (1,), arguments)

    def place_in_new_block(self) -> Launch:
        """Give every receiver without a window a window in a new block."""
        tables = self.tables
        numbers = (Input("offset"), Input("row_bytes"), Input("block_topk"))
        arguments = (tables.bases, tables.state, tables.targets, *numbers)
        source_bytes = SOURCE_META_BYTES if self.topology.num_nodes > 1 else SOURCE_INDEX_BYTES
        constants = {**self.blocks, "SOURCE_BYTES": source_bytes}
        return Launch(kernels.place_in_new_block, 1, constants, (1,), arguments)

    def barrier(self, flags_at: int, unless_rings: bool) -> Launch:
        """Wait until every rank of this node has done its part of the call."""
        constants = {
            "FLAGS_AT": flags_at,
            "UNLESS_RINGS": unless_rings,
            **self.blocks,
            "RANKS_PER_NODE": self.topology.ranks_per_node,
        }
        arguments = (self.tables.constants, self.tables.heaps, self.tables.state)
        return Launch(kernels.barrier, 1, constants, (1,), arguments)


def block_for(count: int, most: int) -> int:
    """A power of two that is at least `count`, 0 for none. There are few different values, because kernels
    are compiled for each."""
    if count == 0:
        return 0
    return 16 if count <= 16 else min(1 << (count - 1).bit_length(), 1 << (most - 1).bit_length())
