"""Calls along a handle that are like an earlier one, made again with little work of the host.

    repeats.keep_dispatch(payload, config, ...)           # the earlier call, made step by step
    rows = repeats.dispatch(x, handle, config)            # None if it has to be made step by step

What the steps of a call find out depends on its kind, its config and the type and width of its rows: the
batch of kernels and the header of the notify message. Later calls of this kind differ in addresses and in
numbers of rows only: those of a model, for example, whose handles are new in every step. Everything else is
left to the steps: weights, biases, events, graphs, no room in the windows, errors of earlier calls.

These calls are what the host has time for least: each is one flat function.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from anyep.backends.base import CombineInput, Payload, Rows, window_bytes, window_for
from anyep.backends.cuda.batch import Prepared, Recipes
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.normal_call import SCALES_PART
from anyep.backends.cuda.plain import Part, RowKind, is_plain, rows_and_scales
from anyep.backends.cuda.routing import GpuRouting, known_routing
from anyep.backends.cuda.templates import template
from anyep.backends.cuda.windows import GpuWindows
from anyep.core.calls import Array, Call, Kind, Phase
from anyep.core.headers import NUM_OFFERS, OFFERS, RESULT_ROWS, X_OFFSET
from anyep.sizes import Config, TokenLayout

# Plain numbers: those of an enumeration take longer.
DISPATCH: Final = int(Kind.CACHED_DISPATCH)
COMBINE: Final = int(Kind.COMBINE)
SEND: Final = int(Phase.SEND)
IDLE: Final = int(Phase.IDLE)
ONE_WORD: Final = struct.Struct("=q")
OFFER: Final = struct.Struct("=qqqq")
"""The words of a header that follow each other: how many offers there are, one not in use, and one offer."""
ROWS_AND_PLACE: Final = struct.Struct("=qq")
assert X_OFFSET == RESULT_ROWS + 1
assert OFFERS == NUM_OFFERS + 2
ROWS_AT: Final = 8 * RESULT_ROWS
OFFERS_AT: Final = 8 * NUM_OFFERS
OF_ROUTING: Final = (
    *("message", "ticket", "rank_prefix", "channel_prefix", "recv_channel_prefix", "send_head"),
    "digests",
)
OF_DISPATCH: Final = (
    *OF_ROUTING,
    *("x", "scales", "num_tokens", "to_x", "to_sources", "to_ids", "to_weights", "to_scales"),
)
OF_COMBINE: Final = (*OF_ROUTING, "x", "window", "num_rows", "num_tokens", "own_x", "out")
"""The inputs of both calls, in the order in which they are passed."""
OF_ORDERED_COMBINE: Final = (*OF_COMBINE, "order")


class _Dispatch(NamedTuple):
    """A dispatch of rows of one type and width, into windows."""

    config: Config
    num_channels: int
    rows: RowKind
    token: TokenLayout
    source_bytes: int
    header: bytes
    batch: Prepared


class _Combine(NamedTuple):
    """A combine of rows of one type and width, in a window or staged into one."""

    config: Config
    num_channels: int
    rows: RowKind
    is_ordered: bool
    """Whether it adds in an order of its own, not in that of the ranks."""
    header: bytes
    batch: Prepared


class _Sizes(NamedTuple):
    """The window of so many rows of a kept dispatch."""

    kept: _Dispatch
    num_rows: int
    num_bytes: int
    parts: tuple[Part, ...]


class Repeats:
    """The last calls of one rank that can be repeated."""

    def __init__(self, control: DeviceControl, windows: GpuWindows) -> None:
        self._control = control
        self._num_ranks = control.num_ranks
        self._no_sources = int(control.state.data_ptr())
        """Stands for source indices, which are not sent."""
        self._windows = windows
        self._stream = control.gpu.stream
        self._index = control.gpu.empty((0,), torch.uint8).get_device()
        self._dispatch: _Dispatch | None = None
        self._combine: _Combine | None = None
        self._staged: _Combine | None = None
        self._sizes: _Sizes | None = None
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
            batch = Prepared(self._control.batches, recipes, OF_DISPATCH)
            kind = config, num_channels, rows, payload.token, payload.source_bytes
            self._dispatch = _Dispatch(*kind, header.tobytes(), batch)

    def keep_combine(
        self, combined: CombineInput[GpuRouting], header: Array, recipes: Recipes, is_staged: bool
    ) -> None:
        """The same for a combine; `is_staged` if its rows were copied into a window."""
        rows = RowKind(combined.x.dtype, combined.x.shape[1])
        is_ordered = combined.order is not None
        names = OF_ORDERED_COMBINE if is_ordered else OF_COMBINE
        batch = Prepared(self._control.batches, recipes, names)
        kind = combined.config, combined.routing.num_channels, rows, is_ordered
        kept = _Combine(*kind, header.tobytes(), batch)
        if is_staged:
            self._staged = kept
        else:
            self._combine = kept

    # The later ones

    def dispatch(self, given: Any, handle: Any, config: Config, is_quiet: Callable[[], bool]) -> Rows | None:
        """Make the call and return the received rows; None, and nothing has happened, if it is not like the
        kept one.

        `is_quiet` says whether calls work, whether no earlier one has failed, and whether nothing follows
        their phases or captures them in a graph.
        """
        kept, windows, stream = self._dispatch, self._windows, self._stream
        if kept is None or kept.config is not config:
            return None
        try:
            routing = known_routing(handle)
            if routing is None:
                return None
            num_tokens, num_ranks = routing.send_head.shape
            num_rows = routing.recv_src_idx.shape[0]
            x, scales = (given, None) if given.__class__ is torch.Tensor else rows_and_scales(given)
            if not (
                num_rows
                and num_ranks == self._num_ranks
                and routing.rank_prefix_matrix.get_device() == self._index
                and routing.channel_prefix_matrix.shape[1] == kept.num_channels
                and kept.rows.is_of(x, scales, num_tokens, self._index)
                and is_quiet()
            ):
                return None
            sizes = self._sizes
            if sizes is None or sizes.num_rows != num_rows or sizes.kept is not kept:
                sizes = self._new_sizes(kept, num_rows)
            moment = stream.whole_call()
            windows.followed = moment.stream_before
            window = windows.allocate(sizes.num_bytes, is_captured=False)
        except Exception:
            # Arguments of which not even this can be found out: checks say what is wrong with them.
            return None
        if window is None:
            return None
        control, headers = self._control.control, self._control.headers
        number = control.next_number()
        try:
            rows, *new_scales = windows.lend(window, sizes.num_bytes, sizes.parts, is_captured=False)
            control.publish(number, DISPATCH, SEND)
            at = headers.next_place()
            headers.memory[at : at + len(kept.header)] = kept.header
            ONE_WORD.pack_into(headers.memory, at + ROWS_AT, num_rows)
            OFFER.pack_into(headers.memory, at + OFFERS_AT, 1, 0, window, sizes.num_bytes)
            values = (
                *(headers.address + at, 0, routing.rank_prefix_matrix, routing.channel_prefix_matrix),
                *(routing.recv_channel_prefix_matrix, routing.send_head, routing.digests),
                *(x, scales, num_tokens, rows.data_ptr(), self._no_sources, 0, 0),
                new_scales[0].data_ptr() if new_scales else 0,
            )
            kept.batch.run(moment, values)
            control.publish(number, DISPATCH, IDLE)
        except BaseException as error:
            control.ended_by(Call(number, DISPATCH), error)
            raise
        return (rows, new_scales[0]) if new_scales else rows

    def _new_sizes(self, kept: _Dispatch, num_rows: int) -> _Sizes:
        num_bytes = window_bytes(num_rows, kept.token, kept.source_bytes)
        scales_at = window_for(num_rows, kept.token, kept.source_bytes).offsets[SCALES_PART]
        made = self._sizes = _Sizes(kept, num_rows, num_bytes, tuple(kept.rows.parts(num_rows, 0, scales_at)))
        return made

    def combine(
        self, x: Any, handle: Any, config: Config, is_quiet: Callable[[], bool], order: Any = None
    ) -> torch.Tensor | None:
        """Make the call and return the sums; None, and nothing has happened, if it is not like a kept one.

        `order` is that of the sums, if they are not in the order of the ranks."""
        windows, stream, copy = self._windows, self._stream, None
        # A tensor of another layout may have no address.
        if x.__class__ is not torch.Tensor or x.layout is not torch.strided:
            return None
        try:
            own_x = x.data_ptr()
            place = windows.place_of(own_x)
            kept = self._combine if place is not None else self._staged
            if kept is None or kept.config is not config or kept.is_ordered != (order is not None):
                return None
            routing = known_routing(handle)
            if routing is None:
                return None
            num_tokens, num_ranks = routing.send_head.shape
            num_rows = routing.recv_src_idx.shape[0]
            if not (
                num_rows
                and num_ranks == self._num_ranks
                and routing.rank_prefix_matrix.get_device() == self._index
                and routing.channel_prefix_matrix.shape[1] == kept.num_channels
                and kept.rows.is_of(x, None, num_rows, self._index)
                and (order is None or is_plain(order, torch.int32, (num_tokens, num_ranks), self._index))
                and is_quiet()
            ):
                return None
            moment = stream.whole_call()
            if place is None:
                windows.followed = moment.stream_before
                place = windows.allocate(x.numel() * x.element_size(), is_captured=False)
                if place is None:
                    return None
                copy = windows.tensor(place, (num_rows, kept.rows.hidden), kept.rows.dtype)
        except Exception:
            # As in `dispatch`.
            return None
        control, headers = self._control.control, self._control.headers
        number = control.next_number()
        try:
            sums = self._new_sums(num_tokens, kept.rows)
            control.publish(number, COMBINE, SEND)
            at = headers.next_place()
            headers.memory[at : at + len(kept.header)] = kept.header
            ROWS_AND_PLACE.pack_into(headers.memory, at + ROWS_AT, num_rows, place)
            values: tuple[Any, ...] = (
                *(headers.address + at, 0, routing.rank_prefix_matrix, routing.channel_prefix_matrix),
                *(routing.recv_channel_prefix_matrix, routing.send_head, routing.digests),
                *(x, copy, num_rows, num_tokens, own_x, sums),
            )
            if order is not None:
                values = (*values, order)
            kept.batch.run(moment, values)
            control.publish(number, COMBINE, IDLE)
            if copy is not None:
                windows.free(place)
        except BaseException as error:
            control.ended_by(Call(number, COMBINE), error)
            raise
        return sums

    def _new_sums(self, num_tokens: int, rows: RowKind) -> torch.Tensor:
        gpu, wanted = self._control.gpu, (num_tokens, rows.hidden, rows.dtype)
        if self._sums_of != wanted:
            self._sums_of, self._sums = wanted, template(gpu, wanted[:2], rows.dtype)
        return gpu.empty_like(self._sums)
