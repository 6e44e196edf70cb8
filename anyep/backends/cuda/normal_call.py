"""One call of normal mode on a GPU: its operations, as batches of kernels on the communication stream.

An operation adds the recipe of a kernel to the next batch, and gives the values of its inputs. A call is one
batch, launched when it `end`s; a dispatch that must know its row count is two, with the host's wait for the
totals between them. One kernel exchanges notify messages, one writes rows into windows or sums rows in place,
and a barrier waits until every rank has done its part. Rows without a window go through rings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from anyep.backends.base import CombineInput, Payload, Results, Totals
from anyep.backends.cuda import constants
from anyep.backends.cuda.batch import Recipes
from anyep.backends.cuda.routing import GpuCounts, GpuRouting, new_routing
from anyep.backends.cuda.row_kernels import Strides
from anyep.backends.cuda.tiles import HEAD_TOKENS, UNPACK_BLOCK, block_of
from anyep.core.calls import Array, Call, Phase
from anyep.core.headers import EXPERTS, NUM_OFFERS, OFFERS, ROUTING, WEIGHTS_OFFSET, X_OFFSET
from anyep.errors import AnyEPError, InvalidCall
from anyep.events import EventHandle, EventOverlap
from anyep.sizes import Config

if TYPE_CHECKING:
    from anyep.backends.cuda.ops_normal import GpuNormalOps

log = logging.getLogger("anyep")
X_PART, IDS_PART, WEIGHTS_PART, SCALES_PART = 0, 2, 3, 4
"""The parts of a window that are lent; its second part is copied."""
FLAGS_OF: Final = {Phase.RECEIVE: constants.ARRIVED_AT, Phase.ACKNOWLEDGE: constants.PULLED_AT}
"""By phase of a barrier: the device constant that holds the offset of its flags."""


class GpuCall:
    """The operations of one call."""

    __slots__ = (
        "_begins",
        "_call",
        "_header",
        "_is_sent",
        "_keep",
        "_ops",
        "_previous",
        "_recipes",
        "_repeatable",
        "_run_async",
        "_source",
        "_staged",
        "_used",
        "_values",
    )

    def __init__(self, ops: GpuNormalOps, call: Call, previous: EventOverlap | None, run_async: bool) -> None:
        self._ops = ops
        self._call = call
        self._previous = previous
        self._run_async = run_async
        self._recipes: list[tuple[Any, ...]] = []
        """The kernels of the next batch."""
        self._values: dict[str, Any] = {}
        """The inputs of kernels, by name."""
        self._begins = True
        """Whether the next batch must wait for the caller's stream, or for the previous event."""
        self._used: list[torch.Tensor | None] = []
        """Tensors to keep until the call is over."""
        self._staged: list[tuple[int, int]] = []
        """The windows that hold staged copies, with their bytes."""
        self._source: torch.Tensor | None = None
        """The source indices of a new routing."""
        self._header: Array | None = None
        """The header of a call that may be repeated."""
        self._keep: Callable[[Recipes], None] | None = None
        """Keeps the call, so that one like it can be made with less work; takes what its last batch was."""
        self._repeatable: tuple[Payload, GpuCounts, Config, Array, Recipes] | None = None
        """What is kept of a counted dispatch, once it is known that its rows went to windows."""
        self._is_sent = False
        """Whether all rows were sent before the host knew the totals."""

    def prepare_to_wait(self) -> None:
        if self._ops.gpu.stream.is_capturing():
            raise InvalidCall(
                "a dispatch that waits for its counts cannot be captured in a CUDA graph:"
                " pass num_worst_tokens, or a handle"
            )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._previous is None:
            # The caller's pending work may still use this memory.
            self._begins = True
        return self._ops.empty(self._previous, shape, dtype)

    def begin(self) -> None:
        self._ops.device_control.control.enter(self._call, Phase.SEND)

    def _launch(self, ends: bool = False) -> Recipes:
        """Run the kernels so far as one batch; returns what it consisted of."""
        moment = self._ops.gpu.stream.moment(self._begins, ends and not self._run_async, self._previous)
        recipes = tuple(self._recipes)
        self._ops.device_control.batches.run(recipes, moment, self._values)
        if self._keep is not None:
            try:
                self._keep(recipes)
            except Exception as error:
                # The call itself is not concerned.
                log.info("%s cannot be repeated: %s", self._call, error)
        self._recipes.clear()
        self._begins = False
        return recipes

    def new_routing(self, payload: Payload, counts: GpuCounts, config: Config) -> GpuRouting:
        """A routing that kernels will fill, without source indices yet."""
        return new_routing(self.empty, payload.num_tokens, self._ops.num_ranks, config.num_channels)

    def with_rows(self, routing: GpuRouting, num_rows: int, is_counted: bool) -> GpuRouting:
        """Add the source indices. They are not in a window, because a handle outlives the rows."""
        source = self.empty((num_rows,), torch.int32)
        self._used.append(source)
        self._source = source
        return routing._replace(recv_src_idx=source)

    def new_results(self, payload: Payload, routing: GpuRouting, window: int) -> Results:
        token, scales, num_rows = payload.token, payload.scales, routing.num_recv_rows
        # The part of a window, its columns and their type.
        parts = [(X_PART, payload.x.shape[1], payload.x.dtype)]
        if token.num_topk:
            parts += [(IDS_PART, token.num_topk, torch.int64), (WEIGHTS_PART, token.num_topk, torch.float32)]
        if scales is not None:
            parts.append((SCALES_PART, token.num_scales, scales.dtype))
        if window >= 0 and num_rows:
            offsets = payload.window(num_rows).offsets
            wanted = [(offsets[part], (num_rows, columns), dtype) for part, columns, dtype in parts]
            made = self._ops.windows.lend(window, payload.window_bytes(num_rows), wanted)
        else:
            made = [self.empty((num_rows, columns), dtype) for _, columns, dtype in parts]
            if window >= 0:
                # No rows: the window is not needed.
                self._ops.windows.give_back(window, payload.window_bytes(num_rows))
        if window < 0:
            self._used += made
        x, *rest = made
        ids, weights = rest[:2] if token.num_topk else (None, None)
        new_scales = rest[-1] if scales is not None else None
        source = self._source
        if source is None:
            # A handle has them already, but the ring kernels write them again.
            source = self._ops.device_control.state
            if window < 0:
                source = self.empty((num_rows,), torch.int32)
                self._used.append(source)
        return Results(x, source, ids, weights, new_scales)

    # Notify

    def notify(
        self,
        header: Array,
        payload: Payload,
        counts: GpuCounts,
        config: Config,
        routing: GpuRouting,
        host_waits: bool,
    ) -> None:
        ops, control = self._ops, self._ops.device_control
        num_topk, num_channels = payload.token.num_topk, config.num_channels
        local_experts = counts.num_experts // ops.num_ranks
        message = control.keep_header(header, self._call.kind)
        ticket = control.next_ticket() if host_waits else 0
        self._values |= inputs_of_counting(message, ticket, counts, routing)
        self._use_payload(payload, routing)
        self._recipes += (
            # An API that has terms wants the experts of a token to be distinct.
            (ops.kernels.place_tokens, num_topk, local_experts, num_channels, bool(header[ROUTING])),
            (control.kernels.exchange_counts, num_channels, local_experts, num_topk > 0),
            (ops.kernels.fill_send_head,),
        )
        self._used += [*counts, *routing]
        if host_waits:
            # If all receivers have windows, rows are sent before the host knows how many there are.
            self._send_to_windows(payload, config, local_experts, all_or_none=True)
            self._recipes.append((control.kernels.barrier, constants.ARRIVED_AT, True))
            self._is_sent = True
            sent = self._launch()
            if self._previous is None and not self._run_async and num_topk:
                recipes = (*sent, (ops.rows.unpack, False, False, True))
                self._repeatable = payload, counts, config, header, recipes

    def after_notify(self, payload: Payload, routing: GpuRouting, values: dict[str, Any]) -> GpuCall:
        """This call, whose notify messages were sent by a batch with these values."""
        self._values = values
        self._use_payload(payload, routing)
        self._begins = False
        return self

    def _use_payload(self, payload: Payload, routing: GpuRouting) -> None:
        values = self._values
        values["x"], values["scales"] = payload.x, payload.scales
        values["topk_idx"], values["topk_weights"] = payload.topk_idx, payload.topk_weights
        values["send_head"], values["num_tokens"] = routing.send_head, payload.num_tokens

    def notify_by_handle(self, header: Array, payload: Payload | None, routing: GpuRouting) -> None:
        """In a graph, the contents of a handle may differ in each replay: the graph computes its digests."""
        ops, values = self._ops, self._values
        prefixes = routing[:3]
        values["rank_prefix"], values["channel_prefix"], values["recv_channel_prefix"] = prefixes
        values["message"], values["ticket"] = ops.device_control.keep_header(header, self._call.kind), 0
        if payload is not None:
            self._use_payload(payload, routing)
        else:
            values["send_head"], values["num_tokens"] = routing.send_head, routing.num_tokens
        found = routing.digests
        if found is None or ops.gpu.stream.is_capturing():
            found = ops.scratch_digests
            values["source"], values["num_rows"] = routing.recv_src_idx, routing.num_recv_rows
            values["num_channels"] = routing.num_channels
            self._recipes.append((ops.kernels.digest_handle, block_of(routing.num_channels)))
        elif self._previous is None and not self._run_async:
            self._header = header
        values["digests"] = found
        self._recipes.append((ops.device_control.kernels.exchange_by_handle, payload is None))
        self._used += routing

    def totals(self, header: Array, payload: Payload) -> Totals:
        words = self._ops.device_control.wait_for_totals(self._values["ticket"])
        if words[constants.TOTAL_OUTCOME]:
            # Kernels of the call may still write to memory that is now free and may be allocated again.
            self._ops.gpu.stream.end(False)
            try:
                self._ops.raise_reported()
            except AnyEPError:
                self._ops.forget_layout()
                raise
        num_rows = int(words[constants.TOTAL_ROWS])
        num_local = int(header[EXPERTS]) // self._ops.num_ranks
        by_expert = words[constants.TOTAL_BY_EXPERT : constants.TOTAL_BY_EXPERT + num_local].tolist()
        uses_rings = bool(words[constants.TOTAL_USES_RINGS])
        self._is_sent = not uses_rings
        window = self._take_offered(header, payload, num_rows)
        return Totals(num_rows, by_expert, window, uses_rings and bool(words[constants.TOTAL_ALL_WAIT]))

    def _take_offered(self, header: Array, payload: Payload, num_rows: int) -> int:
        """Take the window that every rank chose from this rank's offers; -1 if none was large enough."""
        needed = payload.window_bytes(num_rows)
        for index in range(int(header[NUM_OFFERS])):
            offset, size = int(header[OFFERS + 2 * index]), int(header[OFFERS + 2 * index + 1])
            if size >= needed:
                self._ops.windows.allocate_at(offset, needed)
                return offset
        return -1

    def grow(self, payload: Payload, totals: Totals) -> int:
        """Some rank has no window, and all ranks know it: they add windows if allowed. Return this rank's
        window."""
        control = self._ops.device_control
        needed = max(payload.window_bytes(int(rows)) for rows in control.rows_of)
        first = self._ops.grow(self._call, needed)
        if first is None:
            return self.without_windows(totals)
        token = payload.token
        control.place_in_new_block(first, token.hidden_bytes, token.num_topk)
        if totals.window >= 0:
            return totals.window
        self._ops.windows.allocate_at(first, payload.window_bytes(totals.num_rows))
        return first

    def without_windows(self, totals: Totals) -> int:
        """Some rank has no window and gets none: its rows go through rings. Return this rank's window."""
        return totals.window

    # Rows

    def send_rows(
        self,
        payload: Payload,
        routing: GpuRouting,
        results: Results,
        config: Config,
        experts_per_rank: int,
        is_new: bool,
    ) -> None:
        if self._is_sent:
            return
        if self._ops.windows.num_bytes:
            self._send_to_windows(payload, config, experts_per_rank, all_or_none=False)
        values = self._values
        values["to_x"], values["to_sources"] = results.x.data_ptr(), results.source.data_ptr()
        values["to_ids"], values["to_weights"] = _address(results.topk_idx), _address(results.topk_weights)
        values["to_scales"] = _address(results.scales)
        header = self._header
        # A dispatch along a handle that is repeated has no top-k; those of the elastic API may have one.
        has_topk = payload.topk_idx is not None
        if header is not None and header[NUM_OFFERS] and results.x.shape[0] and not has_topk:
            of_call = payload, config, routing.num_channels, header
            self._keep = partial(self._ops.repeats.keep_dispatch, *of_call)
        rows = self._ops.rows
        self._recipes.append(
            (
                rows.send_through_rings,
                rows.sizes(payload.token, config),
                strides_of(payload),
                experts_per_rank,
            )
        )

    def _send_to_windows(
        self, payload: Payload, config: Config, experts_per_rank: int, all_or_none: bool
    ) -> None:
        rows = self._ops.rows
        sizes = rows.sizes(payload.token, config)
        self._recipes.append(
            (rows.send_to_windows, sizes, strides_of(payload), experts_per_rank, all_or_none)
        )

    def unpack(
        self, payload: Payload, routing: GpuRouting, results: Results, is_new: bool, pads: bool
    ) -> None:
        """Copy the source indices out of the window and finish the digests; a user's handle has both
        already."""
        if not is_new:
            return
        ids = results.topk_idx
        self._values |= inputs_of_unpacking(routing, ids, payload.token.num_topk)
        num_rows = routing.num_recv_rows
        if self._is_sent and num_rows and self._repeatable is not None:
            keep = partial(self._ops.counted_repeats.keep, *self._repeatable, num_rows)
            self._keep = lambda _: keep()
        self._recipes.append((self._ops.rows.unpack, ids is not None, pads))

    # Combine

    def stage(self, combined: CombineInput[GpuRouting], header: Array) -> None:
        """Copy rows into a window for the peers. If it has no room, rows go through rings. Without any
        windows the ring kernel runs even if there are no rows, because the results must be filled."""
        self._values["rank_prefix"] = combined.routing.rank_prefix_matrix
        self.stage_rows(combined, header)

    def stage_rows(self, combined: CombineInput[Any], header: Array) -> None:
        """Make rows and weights readable by peers; an input of the kernel says which rows it leaves out."""
        x = combined.x
        self._values["x"], self._values["weights"] = x, combined.topk_weights
        self._values["num_rows"] = x.shape[0]
        header[X_OFFSET], header[WEIGHTS_OFFSET] = -1, -1
        gpu_windows = self._ops.windows
        if not gpu_windows.num_bytes:
            return
        offsets: list[int] = []
        for tensor in (x, combined.topk_weights):
            if tensor is None or tensor.numel() == 0:
                offsets.append(0)
                continue
            offset = gpu_windows.offset_of(tensor)
            if offset is None:
                num_bytes = tensor.numel() * tensor.element_size()
                offset = gpu_windows.allocate(num_bytes)
                if offset is None:
                    self._give_back()
                    self._recipes.clear()
                    return
                self._staged.append((offset, num_bytes))
                self._copy_to(offset, tensor, combined)
            offsets.append(offset)
        header[X_OFFSET], header[WEIGHTS_OFFSET] = offsets

    def _copy_to(self, offset: int, tensor: torch.Tensor, combined: CombineInput[GpuRouting]) -> None:
        """Copy rows or weights into a window; of the rows those that other ranks read, since this rank reads
        its own where they are."""
        window = self._ops.windows.tensor(offset, tuple(tensor.shape), tensor.dtype)
        if tensor is combined.x:
            self._values["window"] = window
            rows = self._ops.rows
            sizes = rows.sizes(combined.token, combined.config)
            self._recipes.append((rows.copy_for_peers, sizes))
            return
        self._ops.gpu.stream.begin(self._previous)
        with self._ops.gpu.on_communication_stream():
            window.copy_(tensor)

    def _give_back(self) -> None:
        """Free the staged windows at once: later calls on the communication stream run after this one."""
        for window, num_bytes in self._staged:
            self._ops.windows.give_back(window, num_bytes)
        self._staged = []

    def reduce(
        self, combined: CombineInput[GpuRouting], out: torch.Tensor, out_weights: torch.Tensor | None
    ) -> None:
        rows = self._ops.rows
        self.use_sums(combined, out, out_weights)
        of_call: tuple[Any, ...] = (
            rows.sizes(combined.token, combined.config),
            out.dtype,
            len(combined.biases),
        )
        if combined.order is not None:
            self._values["order"] = combined.order
            self._used.append(combined.order)
            of_call += (True,)
        if self._ops.windows.num_bytes:
            self._recipes.append((rows.pull_and_sum, *of_call))
            header, is_plain = self._header, combined.topk_weights is None and not combined.biases
            if header is not None and is_plain and combined.x.shape[0] and header[X_OFFSET] >= 0:
                is_staged = bool(self._staged)
                self._keep = partial(self._ops.repeats.keep_combine, combined, header, is_staged=is_staged)
        self._recipes.append((rows.combine_through_rings, *of_call))

    def use_sums(
        self, combined: CombineInput[Any], out: torch.Tensor, out_weights: torch.Tensor | None
    ) -> None:
        """Take these tensors as inputs of the kernels that sum rows."""
        values = self._values
        values["out"], values["out_weights"] = out, out_weights
        values["own_x"] = combined.x.data_ptr()
        for index, bias in enumerate(combined.biases):
            values[f"bias_{index}"] = bias

    # The end

    def barrier(self, phase: Phase) -> None:
        if not self._is_sent:
            self._recipes.append((self._ops.device_control.kernels.barrier, FLAGS_OF[phase], False))

    def end(self, *used: torch.Tensor | None) -> EventHandle | None:
        ops = self._ops
        self._launch(ends=True)
        event: EventHandle | None = ops.gpu.stream.end(True) if self._run_async else None
        ops.device_control.control.end(self._call)
        if self._run_async or self._previous is not None:
            ops.keep(True, self._previous, *used, *self._used)
        self._give_back()
        return event


def inputs_of_counting(message: int, ticket: int, counts: GpuCounts, routing: GpuRouting) -> dict[str, Any]:
    """The inputs of the kernels that exchange counts and fill a routing."""
    num_tokens = routing.num_tokens
    return {
        "message": message,
        "ticket": ticket,
        "in_rank": counts.in_rank,
        "by_rank": counts.by_rank,
        "by_expert": counts.by_expert,
        "rank_prefix": routing.rank_prefix_matrix,
        "channel_prefix": routing.channel_prefix_matrix,
        "recv_channel_prefix": routing.recv_channel_prefix_matrix,
        "handle_in_rank": routing.is_token_in_rank,
        "digests": routing.digests,
        "send_head": routing.send_head,
        "num_tokens": num_tokens,
        "tokens_per_channel": max(1, -(-num_tokens // routing.num_channels)),
        "fill_programs": max(1, -(-num_tokens // HEAD_TOKENS)),
    }


def inputs_of_unpacking(routing: GpuRouting, ids: torch.Tensor | None, num_topk: int) -> dict[str, Any]:
    """The inputs of the kernel that copies source indices out of a window and finishes the digests."""
    num_rows = routing.num_recv_rows
    return {
        "source": routing.recv_src_idx,
        "result_ids": ids,
        "rank_prefix": routing.rank_prefix_matrix,
        "digests": routing.digests,
        "num_rows": num_rows,
        "num_topk": num_topk,
        "unpack_programs": max(1, -(-num_rows // UNPACK_BLOCK)),
    }


def strides_of(payload: Payload) -> Strides | None:
    return Strides(*payload.scales.stride()) if payload.scales is not None else None


def _address(tensor: torch.Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0
