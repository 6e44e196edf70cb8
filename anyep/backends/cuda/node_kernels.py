"""Recipes of the kernels between nodes: counts, handles, and the rows that relays pass on.

nodes = NodeKernels(device_control, rows, rings)
recipe = (nodes.dispatch, rows.sizes(token, config), strides, experts_per_rank, True)
batches.run((recipe, ...), moment, {"x": x, "send_rdma_head": ..., ...})
"""

from __future__ import annotations

from typing import Any, Final

import torch

from anyep.backends.cuda.batch import Input, Launch
from anyep.backends.cuda.control_kernels import block_for
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.kernels import groups, node_counts, node_handles, relay_combine, relay_dispatch
from anyep.backends.cuda.node_routing import NUM_TENSORS, NodeRouting
from anyep.backends.cuda.row_kernels import DTYPE_CODES, NUM_TOKENS, RowKernels, Sizes, Strides
from anyep.backends.cuda.tiles import (
    COUNT_WARPS,
    COUNTED_TOKENS,
    DIGEST_TILE,
    DIGEST_WARPS,
    NODE_COMBINE,
    NODE_DISPATCH,
    UNPACK_BLOCK,
    at_most,
    block_of,
)
from anyep.core.rings import NetworkRings
from anyep.layout import NUM_MAX_CHANNELS

POST_BLOCK: Final = 128
INT8_PARTS: Final = (0,)
"""The parts of a handle that kernels read as bytes; the others as words of 4 bytes."""
HANDLE: Final = groups.NodeHandle(
    *(
        Input(f"handle_{name}", torch.int8 if index in INT8_PARTS else torch.int32)
        for index, name in enumerate(groups.NodeHandle._fields)
    )
)
"""The parts of a handle, as inputs of kernels."""
NUM_CHANNELS: Final = Input("num_channels")
NUM_ROWS: Final = Input("num_rows")
NUM_HEADS: Final = Input("num_heads")


def inputs_of_handle(routing: NodeRouting) -> dict[str, Any]:
    """The inputs that a routing gives."""
    names = [part.name for part in HANDLE]
    return dict(zip(names, routing[:NUM_TENSORS], strict=True)) | {
        "num_channels": routing.num_channels,
        "num_heads": routing.send_nvl_head.shape[0],
    }


class NodeKernels:
    """The kernels of one rank between nodes. What calls leave in its tables is read in the same call only:
    calls run in the order of the stream."""

    def __init__(self, control: DeviceControl, rows: RowKernels, rings: NetworkRings) -> None:
        self._topology = topology = control.topology
        self._tables, self._state = control.kernels.tables, control.kernels.tables.state
        self._rows, self._rings = rows, rings
        self._rounds_in_hardware = control.gpu.rounds_in_hardware
        self._nodes = {"NUM_NODES": topology.num_nodes, "RANKS_PER_NODE": topology.ranks_per_node}
        lanes, gpu = topology.num_nodes * NUM_MAX_CHANNELS, control.gpu
        self._expected = gpu.table([0] * lanes).view(torch.int32)
        self._first_virtual = gpu.table([0] * lanes)
        self._next_row = gpu.table([0] * (lanes * topology.ranks_per_node))
        self.rank_prefix = gpu.table([0] * topology.num_ranks**2).view(torch.int32)
        """Prefix sums of the rows from each rank to each rank, in a call with counts."""
        self.zeros = gpu.table([0] * topology.num_ranks**2).view(torch.int32)
        """In the place of such sums, in a call by handle: no part of these handles is equal on all ranks, and
        no row stays out of a copy for the peers."""

    @property
    def _relayed(self) -> groups.Relayed:
        """What a relay must know; its tables were filled earlier in the call."""
        return groups.Relayed(HANDLE.send_nvl_head, self._first_virtual, self._expected, self._next_row)

    # Counts

    def count_nodes(self) -> Launch:
        """Count the tokens that go to each node."""
        return Launch(
            node_counts.count_nodes,
            COUNT_WARPS,
            {**self._nodes, "TILE_TOKENS": COUNTED_TOKENS},
            (self._topology.num_nodes,),
            (Input("in_rank", torch.int8), Input("by_node", torch.int32), NUM_TOKENS),
        )

    def place_in_nodes(self, num_channels: int, is_checked: bool) -> Launch:
        """Number the tokens for each node, and count them by channel; check the user's counts by node."""
        return Launch(
            node_counts.place_in_nodes,
            COUNT_WARPS,
            {**self._nodes, "IS_CHECKED": is_checked, "TILE_TOKENS": COUNTED_TOKENS},
            (self._topology.num_nodes, num_channels),
            (
                # The user's mask; the handle gets a copy.
                Input("in_rank", torch.int8),
                Input("by_node", torch.int32) if is_checked else self._state,
                HANDLE.send_rdma_head,
                HANDLE.rdma_prefix,
                HANDLE.in_rank,
                self._state,
                NUM_TOKENS,
                NUM_CHANNELS,
                Input("tokens_per_channel"),
            ),
        )

    def post_counts(self) -> Launch:
        """Tell the relays what will come, before the notify message."""
        return Launch(
            node_counts.post_node_counts,
            4,
            {**self._nodes, "BLOCK": POST_BLOCK},
            (self._topology.num_nodes,),
            (self._tables, HANDLE.gbl_prefix, HANDLE.rdma_prefix, NUM_CHANNELS),
        )

    def read_counts(self, num_channels: int) -> Launch:
        """Read what this rank relays, and fill the prefix sums of the handle."""
        return Launch(
            node_counts.read_node_counts,
            1,
            {**self._nodes, "CHANNEL_BLOCK": block_for(num_channels, NUM_MAX_CHANNELS)},
            (1,),
            (self._tables, HANDLE, self._relayed, self.rank_prefix, NUM_CHANNELS),
        )

    def plan_lanes(self, num_channels: int) -> Launch:
        """Find out from a handle what this rank relays."""
        return Launch(
            node_counts.plan_lanes,
            1,
            {
                "NUM_NODES": self._topology.num_nodes,
                "CHANNEL_BLOCK": block_for(num_channels, NUM_MAX_CHANNELS),
            },
            (1,),
            (self._state, HANDLE, self._relayed, NUM_CHANNELS),
        )

    # Handles

    def digest(self, num_channels: int) -> Launch:
        """Compute the digests of a handle."""
        constants = {"CHANNEL_BLOCK": block_for(num_channels, NUM_MAX_CHANNELS), "TILE_ROWS": DIGEST_TILE}
        return Launch(
            node_handles.digest_node_handle,
            DIGEST_WARPS,
            {**self._nodes, **constants},
            (self._topology.num_ranks, 2),
            (
                self._tables.constants,
                HANDLE,
                Input("digests", torch.int64),
                NUM_TOKENS,
                NUM_ROWS,
                NUM_HEADS,
                NUM_CHANNELS,
            ),
        )

    def unpack(self, has_ids: bool, pads: bool) -> Launch:
        """Copy the origins of rows out of the window; with `pads`, mark what is not in use."""
        return Launch(
            node_handles.unpack_meta,
            4,
            {**self._nodes, "PAD": pads, "PAD_IDS": pads and has_ids, "BLOCK": UNPACK_BLOCK},
            (Input("unpack_programs"),),
            (
                self._tables,
                HANDLE,
                Input("result_ids", torch.int64) if has_ids else self._state,
                NUM_ROWS,
                NUM_HEADS,
                Input("num_topk"),
            ),
        )

    # Rows

    def dispatch(self, sizes: Sizes, strides: Strides | None, experts_per_rank: int, is_new: bool) -> Launch:
        """Send this rank's tokens to the relays, and relay to the windows of this node."""
        token, tile = sizes.token, NODE_DISPATCH
        area = self._area(sizes)
        constants = {
            "IS_NEW": is_new,
            **self._of_nodes,
            "SCALE_BLOCK": block_of(token.num_scales),
            "TOPK_BLOCK": block_of(token.num_topk),
            "TILE_TOKENS": at_most(tile.tokens, area.ring_rows),
            "TILE_WORDS": tile.words,
            "STAGES": tile.stages,
        }
        return Launch(
            relay_dispatch.dispatch_between_nodes,
            tile.warps,
            constants,
            (sizes.num_programs,),
            (
                self._rows.payload(token),
                self._rows.scales(token, strides),
                groups.NodeTokens(HANDLE.in_rank, HANDLE.send_rdma_head),
                self._relayed,
                self._tables,
                area,
                sizes.beside,
                NUM_TOKENS,
                sizes.row_words,
                experts_per_rank,
            ),
        )

    def combine(self, sizes: Sizes, dtype: torch.dtype, num_biases: int) -> Launch:
        """Return the sums of this node, and sum what comes from the others."""
        token, tile = sizes.token, NODE_COMBINE
        area = self._area(sizes)
        constants = {
            "DTYPE": DTYPE_CODES[dtype],
            "NUM_BIASES": num_biases,
            **self._of_nodes,
            "TOPK_BLOCK": block_of(token.num_topk),
            "TILE_TOKENS": at_most(tile.tokens, area.ring_rows),
            "TILE_VALUES": tile.values,
            "IN_HARDWARE": self._rounds_in_hardware,
        }
        return Launch(
            relay_combine.combine_between_nodes,
            tile.warps,
            constants,
            (sizes.num_programs,),
            (
                self._rows.sums(token, dtype, False),
                self._rows.biases(dtype, num_biases),
                groups.NodeTokens(self._state, HANDLE.send_rdma_head),
                self._relayed,
                self._tables,
                area,
                sizes.beside,
                Input("own_x"),
                NUM_TOKENS,
                token.hidden_bytes // dtype.itemsize,
            ),
        )

    @property
    def _of_nodes(self) -> dict[str, int]:
        return {**self._nodes, "NODE_BLOCK": block_of(self._topology.num_nodes)}

    def _area(self, sizes: Sizes) -> groups.RingArea:
        """The rings between nodes."""
        area = self._rings.area_for(sizes.config, sizes.token)
        return groups.RingArea(area.start, area.num_rows, area.token_bytes, sizes.config.num_channels)
