"""Dispatches that count their rows and are like an earlier one, made again with little work of the host.

    repeats.keep(payload, counts, config, header, recipes, ...)   # the earlier call, made step by step
    again = repeats.start(ops, tokens, config)                     # None if it has to be made step by step
    done = again(call)

What stays the same from call to call are a batch of kernels and the words of the notify message about types
and sizes. The batch finds out the routing, sends the rows and fills the handle, whose source indices get room
for more rows than there were before. The host launches it and waits for the number of rows. Meanwhile it
allocates the tensors of the handle that the next such call will fill.

If there are no rows, or more than the handle has room for, or they need rings, or something is wrong, the
call goes on step by step from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from anyep.backends.base import (
    CountedDispatch,
    CountedTokens,
    Payload,
    Results,
    StartedDispatch,
    window_bytes,
    window_for,
)
from anyep.backends.cuda import constants
from anyep.backends.cuda.batch import Prepared, Recipes
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.normal_call import (
    IDS_PART,
    SCALES_PART,
    WEIGHTS_PART,
    X_PART,
    GpuCall,
    inputs_of_counting,
    inputs_of_unpacking,
)
from anyep.backends.cuda.plain import RowKind, is_plain, rows_and_scales
from anyep.backends.cuda.routing import GpuCounts, GpuRouting, new_routing
from anyep.backends.cuda.windows import GpuWindows
from anyep.core.calls import Array, Call, Phase
from anyep.core.freelist import first_fit
from anyep.core.headers import MAX_OFFERS, write_offers
from anyep.sizes import Config, TokenLayout, align

ROOM_BLOCK: Final = 64
FIRST_TOTAL: Final = constants.TOTAL_OUTCOME
AFTER_TOTALS: Final = constants.TOTAL_USES_RINGS + 1

if TYPE_CHECKING:
    from anyep.backends.cuda.ops_normal import GpuNormalOps


class _Kept(NamedTuple):
    """A dispatch of rows of one type and width to one number of experts, into windows."""

    config: Config
    num_channels: int
    rows: RowKind
    token: TokenLayout
    source_bytes: int
    num_experts: int
    header: Array
    batch: Prepared


class _Spare(NamedTuple):
    """The tensors of a handle that no call has filled, and where they may be used."""

    num_tokens: int
    num_channels: int
    room: int
    """The received rows that it has source indices for."""
    stream: int
    is_inference: bool
    routing: GpuRouting


class CountedRepeats:
    """The last counted dispatch of one rank that can be repeated."""

    def __init__(self, control: DeviceControl, windows: GpuWindows) -> None:
        self._control = control
        self._windows = windows
        self._stream = control.gpu.stream
        self._index = control.gpu.empty((0,), torch.uint8).get_device()
        self._kept: _Kept | None = None
        self._room = 0
        """The received rows that a new handle has source indices for."""
        self._spare: _Spare | None = None

    def keep(
        self,
        payload: Payload,
        counts: GpuCounts,
        config: Config,
        header: Array,
        recipes: Recipes,
        num_rows: int,
    ) -> None:
        """A call sent its rows into windows; with these kernels, one like it needs no other ones. Only its
        sizes are kept."""
        rows = RowKind.of(payload.x, payload.scales)
        if rows is not None:
            # Kernels that are missing are compiled now, not in the next call.
            self._control.batches.made(recipes)
            batch = Prepared(self._control.batches, recipes)
            kind = config, config.num_channels, rows, payload.token, payload.source_bytes
            self._kept = _Kept(*kind, counts.num_experts, header.copy(), batch)
            self._make_room(num_rows)

    def _make_room(self, num_rows: int) -> None:
        """Let the next calls expect about as many rows as this one had."""
        if not num_rows <= self._room <= 2 * num_rows + ROOM_BLOCK:
            self._room = align(num_rows + num_rows // 8, ROOM_BLOCK)

    def start(
        self, ops: GpuNormalOps, tokens: CountedTokens, config: Config
    ) -> Callable[[Call], CountedDispatch[GpuRouting] | StartedDispatch[GpuRouting, GpuCounts]] | None:
        """The call, to be made at once; None if it is not like the kept one."""
        kept = self._kept
        x, scales = rows_and_scales(tokens.x)
        if kept is None or kept.config is not config or not self._is_like(kept, x, scales, tokens):
            return None
        return partial(self._dispatch, ops, kept, x, scales, tokens)

    def _is_like(self, kept: _Kept, x: Any, scales: Any, tokens: CountedTokens) -> bool:
        """Whether the steps of the call would be those that are kept, with tensors that need no other
        check."""
        if x.__class__ is not torch.Tensor or x.dim() != 2:
            return False
        count, index, num_ranks = x.shape[0], self._index, self._control.num_ranks
        by_topk = count, kept.token.num_topk
        return (
            kept.rows.is_of(x, scales, count, index)
            and is_plain(tokens.topk_idx, torch.int64, by_topk, index)
            and is_plain(tokens.topk_weights, torch.float32, by_topk, index)
            and is_plain(tokens.num_tokens_per_rank, torch.int32, (num_ranks,), index)
            and is_plain(tokens.is_token_in_rank, torch.bool, (count, num_ranks), index)
            and is_plain(tokens.num_tokens_per_expert, torch.int32, (kept.num_experts,), index)
            and not self._stream.is_capturing()
            and self._control.control.works_unobserved
        )

    def _dispatch(
        self,
        ops: GpuNormalOps,
        kept: _Kept,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        tokens: CountedTokens,
        call: Call,
    ) -> CountedDispatch[GpuRouting] | StartedDispatch[GpuRouting, GpuCounts]:
        control, header, num_topk = self._control, kept.header, kept.token.num_topk
        routing = self._new_routing(x.shape[0], kept.num_channels)
        self._windows.followed = self._stream.caller()
        offers = self._windows.offers(MAX_OFFERS)
        write_offers(header, offers)
        control.control.enter(call, Phase.SEND)
        counts = GpuCounts(tokens.is_token_in_rank, tokens.num_tokens_per_rank, tokens.num_tokens_per_expert)
        ticket = control.next_ticket()
        message = control.headers.keep(header, for_good=False)
        values = inputs_of_counting(message, ticket, counts, routing)
        values["x"], values["scales"] = x, scales
        values["topk_idx"], values["topk_weights"] = tokens.topk_idx, tokens.topk_weights
        values |= inputs_of_unpacking(routing, None, num_topk)
        kept.batch.run(self._stream.moment(True, True), values)
        # This call needs none of it.
        with contextlib.suppress(torch.OutOfMemoryError):
            self._spare = self._new_spare(routing)
        words = control.wait_for_totals(ticket)
        outcome, num_rows, uses_rings = words[FIRST_TOTAL:AFTER_TOTALS].tolist()
        window = None
        room = routing.recv_src_idx.shape[0]
        if outcome == 0 and uses_rings == 0 and 0 < num_rows <= room:
            num_bytes = window_bytes(num_rows, kept.token, kept.source_bytes)
            window = first_fit(offers, num_bytes)
        if outcome == 0:
            self._make_room(num_rows)
        if window is None:
            payload = Payload(x, scales, tokens.topk_idx, tokens.topk_weights, kept.source_bytes)
            rest = GpuCall(ops, call, None, False).after_notify(payload, routing, values)
            return StartedDispatch(rest, payload, counts, routing, header.copy())
        self._windows.allocate_at(window, num_bytes)
        received = self._results(kept, window, num_rows, num_bytes)
        if num_rows < room:
            routing = routing._replace(recv_src_idx=routing.recv_src_idx[:num_rows])
        num_local = kept.num_experts // control.num_ranks
        by_expert = words[constants.TOTAL_BY_EXPERT : constants.TOTAL_BY_EXPERT + num_local].tolist()
        control.control.end(call)
        rows, new_scales, ids, weights = received
        return CountedDispatch(
            Results(rows, routing.recv_src_idx, ids, weights, new_scales), by_expert, routing
        )

    def _results(
        self, kept: _Kept, window: int, num_rows: int, num_bytes: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """The rows, scales, ids and weights in a window."""
        offsets, num_topk = window_for(num_rows, kept.token, kept.source_bytes).offsets, kept.token.num_topk
        parts = [
            *kept.rows.parts(num_rows, offsets[X_PART], offsets[SCALES_PART]),
            (offsets[IDS_PART], (num_rows, num_topk), torch.int64),
            (offsets[WEIGHTS_PART], (num_rows, num_topk), torch.float32),
        ]
        rows, *scales, ids, weights = self._windows.lend(window, num_bytes, parts)
        return rows, scales[0] if scales else None, ids, weights

    # The tensors of handles

    def _new_routing(self, num_tokens: int, num_channels: int) -> GpuRouting:
        """A routing that kernels will fill: the spare one, if it can be used."""
        spare, self._spare = self._spare, None
        wanted = num_tokens, num_channels, self._room, *self._where()
        if spare is not None and spare[: len(wanted)] == wanted:
            return spare.routing
        return self._allocate(num_tokens, num_channels)

    def _new_spare(self, like: GpuRouting) -> _Spare:
        """Memory that the current stream may use from now on."""
        num_tokens, num_channels = like.num_tokens, like.num_channels
        # Torch reads the shape of a tensor faster than arguments.
        empty_like = self._control.gpu.empty_like
        routing = GpuRouting(*[empty_like(part) for part in like if part is not None])
        return _Spare(num_tokens, num_channels, like.num_recv_rows, *self._where(), routing)

    def _where(self) -> tuple[int, bool]:
        return self._stream.caller(), torch.is_inference_mode_enabled()

    def _allocate(self, num_tokens: int, num_channels: int) -> GpuRouting:
        empty = self._control.gpu.empty
        routing = new_routing(empty, num_tokens, self._control.num_ranks, num_channels)
        return routing._replace(recv_src_idx=empty((self._room,), torch.int32))
