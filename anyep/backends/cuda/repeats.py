"""Calls along a handle that are like an earlier one, made again with little work of the host.

    repeats.keep_dispatch(payload, config, ...)           # the earlier call, made step by step
    again = repeats.dispatch(x, routing, config)          # None if it has to be made step by step
    rows = again(call)

What the steps of a call find out depends on its kind, its config and the type and width of its rows: the
batch of kernels and the header of the notify message. Later calls of this kind differ in addresses and in
numbers of rows only: those of a model, for example, whose handles are new in every step. Everything else is
left to the steps: weights, biases, events, graphs, no room in the windows, errors of earlier calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from anyep.backends.base import CombineInput, Payload, Rows, window_bytes, window_for
from anyep.backends.cuda.batch import Prepared, Recipes
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.normal_call import SCALES_PART
from anyep.backends.cuda.plain import RowKind, rows_and_scales
from anyep.backends.cuda.routing import GpuRouting
from anyep.backends.cuda.templates import template
from anyep.backends.cuda.windows import GpuWindows
from anyep.core.calls import Array, Call, Phase
from anyep.core.headers import RESULT_ROWS, X_OFFSET, write_offers
from anyep.sizes import Config, TokenLayout


class _Dispatch(NamedTuple):
    """A dispatch of rows of one type and width, into windows."""

    config: Config
    num_channels: int
    rows: RowKind
    token: TokenLayout
    source_bytes: int
    header: Array
    batch: Prepared


class _Combine(NamedTuple):
    """A combine of rows of one type and width, in a window or staged into one."""

    config: Config
    num_channels: int
    rows: RowKind
    header: Array
    batch: Prepared


class Repeats:
    """The last calls of one rank that can be repeated."""

    def __init__(self, control: DeviceControl, windows: GpuWindows) -> None:
        self._control = control
        self._windows = windows
        self._stream = control.gpu.stream
        self._index = control.gpu.empty((0,), torch.uint8).get_device()
        self._dispatch: _Dispatch | None = None
        self._combine: _Combine | None = None
        self._staged: _Combine | None = None
        self._sums_of: tuple[int, int, torch.dtype] | None = None
        self._sums = template(control.gpu, (0,), torch.uint8)
        """What the last sums looked like: their rows, columns and type."""

    # The earlier call

    def keep_dispatch(
        self, payload: Payload, config: Config, num_channels: int, header: Array, recipes: Recipes
    ) -> None:
        """A call with these recipes went through windows. Only its sizes are kept, no rows."""
        rows = RowKind.of(payload.x, payload.scales)
        if rows is not None:
            batch = Prepared(self._control.batches, recipes)
            kind = config, num_channels, rows, payload.token, payload.source_bytes
            self._dispatch = _Dispatch(*kind, header.copy(), batch)

    def keep_combine(
        self, combined: CombineInput[GpuRouting], header: Array, recipes: Recipes, is_staged: bool
    ) -> None:
        """The same for a combine; `is_staged` if its rows were copied into a window."""
        rows = RowKind(combined.x.dtype, combined.x.shape[1])
        batch = Prepared(self._control.batches, recipes)
        kept = _Combine(combined.config, combined.routing.num_channels, rows, header.copy(), batch)
        if is_staged:
            self._staged = kept
        else:
            self._combine = kept

    # The later ones

    def dispatch(self, given: Any, routing: GpuRouting, config: Config) -> Callable[[Call], Rows] | None:
        """What makes the call and returns the received rows; None if the call is not like the kept one."""
        kept, num_tokens = self._dispatch, routing.send_head.shape[0]
        x, scales = rows_and_scales(given)
        if kept is None or not self._is_like(kept, x, scales, num_tokens, routing, config):
            return None
        num_rows = routing.recv_src_idx.shape[0]
        window = None
        if num_rows:
            window = self._next_window(window_bytes(num_rows, kept.token, kept.source_bytes))
        return partial(self._send, kept, x, scales, routing, window) if window is not None else None

    def _send(
        self,
        kept: _Dispatch,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        routing: GpuRouting,
        window: int,
        call: Call,
    ) -> Rows:
        control, header, num_rows = self._control.control, kept.header, routing.recv_src_idx.shape[0]
        num_bytes = window_bytes(num_rows, kept.token, kept.source_bytes)
        scales_at = 0
        if scales is not None:
            scales_at = window_for(num_rows, kept.token, kept.source_bytes).offsets[SCALES_PART]
        parts = kept.rows.parts(num_rows, 0, scales_at)
        rows, *new_scales = self._windows.lend(window, num_bytes, parts)
        control.enter(call, Phase.SEND)
        header[RESULT_ROWS] = num_rows
        write_offers(header, [(window, num_bytes)])
        values = {
            **self._of_routing(header, routing),
            "x": x,
            "scales": scales,
            "num_tokens": x.shape[0],
            "to_x": rows.data_ptr(),
            "to_sources": self._control.state.data_ptr(),
            "to_ids": 0,
            "to_weights": 0,
            "to_scales": new_scales[0].data_ptr() if new_scales else 0,
        }
        kept.batch.run(self._stream.moment(True, True), values)
        control.end(call)
        return (rows, new_scales[0]) if new_scales else rows

    def combine(self, x: Any, routing: GpuRouting, config: Config) -> Callable[[Call], torch.Tensor] | None:
        """What makes the call and returns the sums; None if the call is not like a kept one."""
        num_rows = routing.recv_src_idx.shape[0]
        # A tensor of another layout may have no address.
        if not num_rows or x.__class__ is not torch.Tensor or x.layout is not torch.strided:
            return None
        offset = self._windows.offset_of(x)
        kept = self._combine if offset is not None else self._staged
        if kept is None or not self._is_like(kept, x, None, num_rows, routing, config):
            return None
        if offset is not None:
            return partial(self._sum, kept, x, routing, offset, None)
        window = self._next_window(x.numel() * x.element_size())
        if window is None:
            return None
        copy = self._windows.tensor(window, (num_rows, kept.rows.hidden), kept.rows.dtype)
        return partial(self._sum, kept, x, routing, window, copy)

    def _sum(
        self,
        kept: _Combine,
        x: torch.Tensor,
        routing: GpuRouting,
        offset: int,
        copy: torch.Tensor | None,
        call: Call,
    ) -> torch.Tensor:
        """`offset` is where the rows are in the windows, or where they are copied to."""
        control, header, num_tokens = self._control.control, kept.header, routing.send_head.shape[0]
        sums = self._new_sums(num_tokens, kept.rows)
        control.enter(call, Phase.SEND)
        header[RESULT_ROWS], header[X_OFFSET] = x.shape[0], offset
        values = {
            **self._of_routing(header, routing),
            "x": x,
            "window": copy,
            "num_rows": x.shape[0],
            "num_tokens": num_tokens,
            "own_x": x.data_ptr(),
            "out": sums,
        }
        kept.batch.run(self._stream.moment(True, True), values)
        control.end(call)
        if copy is not None:
            self._windows.give_back(offset, x.numel() * x.element_size())
        return sums

    def _is_like(
        self,
        kept: _Dispatch | _Combine,
        x: Any,
        scales: Any,
        num_rows: int,
        routing: GpuRouting,
        config: Config,
    ) -> bool:
        """Whether the steps of the call would be those that are kept, with rows that need no other check."""
        return (
            kept.config is config
            and kept.rows.is_of(x, scales, num_rows, self._index)
            and routing.channel_prefix_matrix.shape[1] == kept.num_channels
            and not self._stream.is_capturing()
            and self._control.control.works_unobserved
        )

    def _new_sums(self, num_tokens: int, rows: RowKind) -> torch.Tensor:
        gpu, wanted = self._control.gpu, (num_tokens, rows.hidden, rows.dtype)
        if self._sums_of != wanted:
            self._sums_of, self._sums = wanted, template(gpu, wanted[:2], rows.dtype)
        return gpu.empty_like(self._sums)

    def _next_window(self, num_bytes: int) -> int | None:
        """A window for a call that follows its caller's stream."""
        self._windows.followed = self._stream.caller()
        return self._windows.allocate(num_bytes)

    def _of_routing(self, header: Array, routing: GpuRouting) -> dict[str, object]:
        """The inputs of kernels that a header and a routing give."""
        return {
            "message": self._control.headers.keep(header, for_good=False),
            "ticket": 0,
            "rank_prefix": routing.rank_prefix_matrix,
            "channel_prefix": routing.channel_prefix_matrix,
            "recv_channel_prefix": routing.recv_channel_prefix_matrix,
            "send_head": routing.send_head,
            "digests": routing.digests,
        }
