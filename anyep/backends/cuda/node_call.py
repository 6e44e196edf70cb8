"""One call of normal mode between nodes on a GPU: what differs from a call within a node.

A token crosses once for each node that wants it, to its relay there. Rows go to windows only: if a rank has
none, no rank sends anything, and all of them raise.

    notify        place_tokens, place_in_nodes, post_node_counts, exchange_notify, read_node_counts
    by handle     digest_node_handle (where its digests are not known), exchange_notify, plan_lanes
    dispatch      dispatch_between_nodes, barrier, unpack_meta, digest_node_handle (the last two if it is new)
    combine       copy_for_peers (before the notify message), combine_between_nodes, barrier
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from anyep.backends.base import CombineInput, Payload, Results, Totals
from anyep.backends.cuda import constants
from anyep.backends.cuda.node_kernels import NodeKernels, inputs_of_handle
from anyep.backends.cuda.node_routing import new_node_routing
from anyep.backends.cuda.normal_call import GpuCall, strides_of
from anyep.backends.cuda.routing import GpuCounts
from anyep.backends.cuda.tiles import UNPACK_BLOCK
from anyep.core.calls import Array, Call
from anyep.core.diagnosis import no_window
from anyep.events import EventOverlap
from anyep.sizes import SOURCE_META_BYTES, Config

if TYPE_CHECKING:
    from anyep.backends.cuda.ops_normal import GpuNormalOps
RESULTS_AT_ONCE: Final = 3
"""Windows grow until so many results of a dispatch fit: those, those of a dispatch along the handle, and rows
that a combine stages."""


class GpuNodeCall(GpuCall):
    """The operations of one call between nodes."""

    __slots__ = ("_lacks_windows", "_nodes")

    def __init__(
        self,
        ops: GpuNormalOps,
        call: Call,
        previous: EventOverlap | None,
        run_async: bool,
        nodes: NodeKernels,
    ) -> None:
        super().__init__(ops, call, previous, run_async)
        self._nodes = nodes
        self._lacks_windows = False
        """Whether some rank has no window for its rows."""

    def new_routing(self, payload: Payload, counts: GpuCounts, config: Config) -> Any:
        topology = self._ops.device_control.topology
        return new_node_routing(self.empty, payload.num_tokens, config.num_channels, topology)

    def with_rows(self, routing: Any, num_rows: int, is_counted: bool) -> Any:
        """Add room for received and relayed rows; the most of both are as many as are received."""
        control = self._ops.device_control
        num_relayed = int(control.totals[constants.TOTAL_RELAYED]) if is_counted else num_rows
        made = routing._replace(
            recv_src_meta=self.empty((num_rows, SOURCE_META_BYTES), torch.uint8),
            send_nvl_head=self.empty((num_relayed, control.topology.ranks_per_node), torch.int32),
        )
        self._used += made[:-1]
        return made

    # Notify

    def notify(
        self,
        header: Array,
        payload: Payload,
        counts: GpuCounts,
        config: Config,
        routing: Any,
        host_waits: bool,
    ) -> None:
        ops, control, values = self._ops, self._ops.device_control, self._values
        num_topk, num_channels = payload.token.num_topk, config.num_channels
        local_experts = counts.num_experts // ops.num_ranks
        position = self.empty((payload.num_tokens, ops.num_ranks), torch.int32)
        values |= inputs_of_handle(routing)
        values |= {
            "message": control.keep_header(header, self._call.kind),
            "ticket": control.next_ticket() if host_waits else 0,
            "in_rank": counts.in_rank,
            "by_rank": counts.by_rank,
            "by_node": counts.by_node,
            "by_expert": counts.by_expert,
            "rank_prefix": self._nodes.rank_prefix,
            "channel_prefix": routing.gbl_channel_prefix_matrix,
            "recv_channel_prefix": routing.recv_gbl_channel_prefix_matrix,
            "digests": routing.digests,
            "send_head": position,
            "tokens_per_channel": max(1, -(-payload.num_tokens // num_channels)),
        }
        self._use_rows(payload)
        self._recipes += (
            (ops.kernels.place_tokens, num_topk, local_experts, num_channels),
            (self._nodes.place_in_nodes, num_channels, counts.by_node is not None),
            (self._nodes.post_counts,),
            (control.kernels.exchange_counts, num_channels, local_experts, num_topk > 0),
            (self._nodes.read_counts, num_channels),
        )
        self._used += [*counts, *routing, position]
        if host_waits:
            self._launch()

    def _use_rows(self, payload: Payload) -> None:
        values = self._values
        values["x"], values["scales"] = payload.x, payload.scales
        values["topk_idx"], values["topk_weights"] = payload.topk_idx, payload.topk_weights
        values["num_tokens"] = payload.num_tokens

    def notify_by_handle(self, header: Array, payload: Payload | None, routing: Any) -> None:
        """In a graph, the contents of a handle may differ in each replay: the graph computes its digests."""
        ops, values = self._ops, self._values
        values |= inputs_of_handle(routing)
        values["rank_prefix"], values["num_rows"] = self._nodes.zeros, routing.num_recv_rows
        values["message"], values["ticket"] = ops.device_control.keep_header(header, self._call.kind), 0
        values["num_tokens"] = routing.num_tokens
        if payload is not None:
            self._use_rows(payload)
        found = routing.digests
        if found is None or ops.gpu.stream.is_capturing():
            found = ops.scratch_digests
            self._recipes.append((self._nodes.digest, routing.num_channels))
        values["digests"] = found
        self._recipes += (
            (ops.device_control.kernels.exchange_by_handle, payload is None),
            (self._nodes.plan_lanes, routing.num_channels),
        )
        self._used += routing

    def totals(self, header: Array, payload: Payload) -> Totals:
        found = super().totals(header, payload)
        # The host has waited before any row was sent.
        self._is_sent = False
        control = self._ops.device_control
        self._lacks_windows = bool(control.totals[constants.TOTAL_USES_RINGS])
        # Later calls cannot add windows, and have no other way: there should be room for them.
        most = max(payload.window_bytes(int(rows)) for rows in control.rows_of)
        is_little = self._ops.windows.num_bytes < RESULTS_AT_ONCE * most
        may_grow = is_little and bool(control.totals[constants.TOTAL_ALL_WAIT])
        return found._replace(may_grow=found.may_grow or may_grow)

    def without_windows(self, totals: Totals) -> int:
        if not self._lacks_windows:
            return totals.window
        if totals.window >= 0:
            self._ops.windows.free(totals.window)
        raise no_window(self._call, None)

    # Rows

    def send_rows(
        self,
        payload: Payload,
        routing: Any,
        results: Results,
        config: Config,
        experts_per_rank: int,
        is_new: bool,
    ) -> None:
        self._values |= inputs_of_handle(routing)
        sizes = self._ops.rows.sizes(payload.token, config)
        recipe = (self._nodes.dispatch, sizes, strides_of(payload), experts_per_rank, is_new)
        self._recipes.append(recipe)

    def unpack(self, payload: Payload, routing: Any, results: Results, is_new: bool, pads: bool) -> None:
        """Copy the origins of rows out of the window, and compute the digests of a new handle."""
        if not is_new:
            return
        ids, num_rows = results.topk_idx, routing.num_recv_rows
        self._values |= {
            "result_ids": ids,
            "num_rows": num_rows,
            "num_topk": payload.token.num_topk,
            "unpack_programs": max(1, -(-2 * num_rows // UNPACK_BLOCK)),
        }
        self._recipes += (
            (self._nodes.unpack, ids is not None, pads),
            (self._nodes.digest, routing.num_channels),
        )

    # Combine

    def stage(self, combined: CombineInput[Any], header: Array) -> None:
        self._values["rank_prefix"] = self._nodes.zeros
        self.stage_rows(combined, header)

    def reduce(
        self, combined: CombineInput[Any], out: torch.Tensor, out_weights: torch.Tensor | None
    ) -> None:
        self.use_sums(combined, out, out_weights)
        sizes = self._ops.rows.sizes(combined.token, combined.config)
        self._recipes.append((self._nodes.combine, sizes, out.dtype, len(combined.biases)))
