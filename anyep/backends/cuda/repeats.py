"""Calls along a handle that are like an earlier one, made again with little work of the host.

    repeats.keep_dispatch(payload, config, header, recipes)      # the earlier call, made step by step
    rows = repeats.dispatch(x, routing, config)                  # None if it has to be made step by step

What the steps of a call find out depends on its kind, its config and the type and width of its rows: the
batch of kernels and the header of the notify message. Later calls of this kind differ in addresses and in
numbers of rows only: those of a model, for example, whose handles are new in every step. Everything else is
left to the steps: weights, biases, events, graphs, rows without a window, errors of earlier calls.
"""

from __future__ import annotations

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
from anyep.core.calls import Array, Kind, Phase
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

    def keep_combine(self, combined: CombineInput, header: Array, recipes: Recipes, is_staged: bool) -> None:
        """The same for a combine; `is_staged` if its rows were copied into a window."""
        rows = RowKind(combined.x.dtype, combined.x.shape[1])
        batch = Prepared(self._control.batches, recipes)
        kept = _Combine(combined.config, combined.routing.num_channels, rows, header.copy(), batch)
        if is_staged:
            self._staged = kept
        else:
            self._combine = kept

    # The later ones

    def dispatch(self, given: Any, routing: GpuRouting, config: Config) -> Rows | None:
        """The received rows; None if the call is not like the kept one, and then nothing has happened."""
        kept, num_tokens = self._dispatch, routing.send_head.shape[0]
        x, scales = rows_and_scales(given)
        if kept is None or not self._is_like(kept, x, scales, num_tokens, routing, config):
            return None
        num_rows = routing.recv_src_idx.shape[0]
        windows, num_bytes = self._windows, window_bytes(num_rows, kept.token, kept.source_bytes)
        window = self._next_window(num_bytes) if num_rows else None
        if window is None:
            return None
        control = self._control.control
        call = control.begin(Kind.CACHED_DISPATCH)
        try:
            scales_at = 0
            if scales is not None:
                scales_at = window_for(num_rows, kept.token, kept.source_bytes).offsets[SCALES_PART]
            rows, *new_scales = windows.lend(window, num_bytes, kept.rows.parts(num_rows, 0, scales_at))
            control.enter(call, Phase.SEND)
            header, state = kept.header, self._control.state
            header[RESULT_ROWS] = num_rows
            write_offers(header, [(window, num_bytes)])
            kept.batch.run(
                self._stream.moment(True, True),
                {
                    **self._of_routing(header, routing),
                    "x": x,
                    "scales": scales,
                    "num_tokens": num_tokens,
                    "to_x": rows.data_ptr(),
                    "to_sources": state.data_ptr(),
                    "to_ids": 0,
                    "to_weights": 0,
                    "to_scales": new_scales[0].data_ptr() if new_scales else 0,
                },
            )
            control.end(call)
        except BaseException as error:
            control.fail(call, error)
            raise
        return (rows, new_scales[0]) if new_scales else rows

    def combine(self, x: torch.Tensor, routing: GpuRouting, config: Config) -> torch.Tensor | None:
        """The sums; None if the call is not like the kept one, and then nothing has happened."""
        num_rows = routing.recv_src_idx.shape[0]
        offset = self._windows.offset_of(x) if num_rows and x.__class__ is torch.Tensor else None
        kept = self._combine if offset is not None else self._staged
        if num_rows == 0 or kept is None or not self._is_like(kept, x, None, num_rows, routing, config):
            return None
        windows, num_tokens = self._windows, routing.send_head.shape[0]
        copy: torch.Tensor | None = None
        num_bytes = x.numel() * x.element_size()
        window = -1
        if offset is None:
            found = self._next_window(num_bytes)
            if found is None:
                return None
            window = offset = found
            copy = windows.tensor(window, (num_rows, kept.rows.hidden), kept.rows.dtype)
        control = self._control.control
        call = control.begin(Kind.COMBINE)
        try:
            sums = self._new_sums(num_tokens, kept.rows)
            control.enter(call, Phase.SEND)
            header = kept.header
            header[RESULT_ROWS], header[X_OFFSET] = num_rows, offset
            kept.batch.run(
                self._stream.moment(True, True),
                {
                    **self._of_routing(header, routing),
                    "x": x,
                    "window": copy,
                    "num_rows": num_rows,
                    "num_tokens": num_tokens,
                    "own_x": x.data_ptr(),
                    "out": sums,
                },
            )
            control.end(call)
        except BaseException as error:
            control.fail(call, error)
            raise
        if copy is not None:
            windows.give_back(window, num_bytes)
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
            and self._control.control.is_quiet
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
