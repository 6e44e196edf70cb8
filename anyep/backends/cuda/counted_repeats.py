"""Dispatches that count their rows and are like an earlier one, made again with little work of the host.

    repeats.keep(payload, counts, config, header, recipes, ...)   # the earlier call, made step by step
    done = repeats.dispatch(ops, tokens, config)                   # None if it has to be made step by step

What stays the same from call to call are a batch of kernels and the words of the notify message about types
and sizes. The batch finds out the routing, sends the rows and fills the handle, whose source indices get room
for more rows than there were before. The host launches it and waits for the number of rows. Meanwhile it
allocates the tensors of the handle that the next such call will fill.

If there are no rows, or more than the handle has room for, or they need rings, or something is wrong, the
call goes on step by step from there.
"""

from __future__ import annotations

import contextlib
import struct
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from anyep.backends.base import (
    MIN_WINDOW_BYTES,
    CountedDispatch,
    CountedTokens,
    Payload,
    Results,
    StartedDispatch,
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
)
from anyep.backends.cuda.plain import RowKind, is_plain, rows_and_scales
from anyep.backends.cuda.routing import GpuCounts, GpuRouting, new_routing
from anyep.backends.cuda.tiles import HEAD_TOKENS, UNPACK_BLOCK
from anyep.backends.cuda.windows import GpuWindows
from anyep.core.calls import Array, Call, Kind, Phase
from anyep.core.freelist import first_fit
from anyep.core.headers import MAX_OFFERS, NUM_OFFERS, OFFERS, write_offers
from anyep.sizes import Config, TokenLayout, align

ROOM_BLOCK: Final = 64
FIRST_TOTAL: Final = constants.TOTAL_OUTCOME
AFTER_TOTALS: Final = constants.TOTAL_USES_RINGS + 1
# Plain numbers: those of an enumeration take longer.
DISPATCH: Final = int(Kind.DISPATCH)
SEND: Final = int(Phase.SEND)
IDLE: Final = int(Phase.IDLE)
OFFERS_AT: Final = 8 * NUM_OFFERS
OFFERED: Final = [struct.Struct(f"={2 + 2 * count}q") for count in range(MAX_OFFERS + 1)]
"""By the number of offers: that number, a word not in use, and each offer."""
assert OFFERS == NUM_OFFERS + 2
INPUTS: Final = (
    *("message", "ticket", "in_rank", "by_rank", "by_expert", "rank_prefix", "channel_prefix"),
    *("recv_channel_prefix", "handle_in_rank", "digests", "send_head", "num_tokens"),
    *("tokens_per_channel", "fill_programs", "x", "scales", "topk_idx", "topk_weights", "source"),
    *("result_ids", "num_rows", "num_topk", "unpack_programs"),
)
"""In the order in which they are passed."""

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
    header: bytes
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
            batch = Prepared(self._control.batches, recipes, INPUTS)
            kind = config, config.num_channels, rows, payload.token, payload.source_bytes
            self._kept = _Kept(*kind, counts.num_experts, header.tobytes(), batch)
            self._make_room(num_rows)

    def _make_room(self, num_rows: int) -> None:
        """Let the next calls expect about as many rows as this one had."""
        if not num_rows <= self._room <= 2 * num_rows + ROOM_BLOCK:
            self._room = align(num_rows + num_rows // 8, ROOM_BLOCK)

    def dispatch(
        self, ops: GpuNormalOps, tokens: CountedTokens, config: Config
    ) -> CountedDispatch[GpuRouting] | StartedDispatch[GpuRouting, GpuCounts] | None:
        """Make the call, or begin it; None, and nothing has happened, if it is not like the kept one."""
        kept = self._kept
        if kept is None or kept.config is not config:
            return None
        try:
            x, scales = rows_and_scales(tokens.x)
            if not (self._is_like(kept, x, scales, tokens) and ops.is_quiet()):
                return None
        except Exception:
            # Arguments of which not even this can be found out: checks say what is wrong with them.
            return None
        control = self._control.control
        number = control.next_number()
        try:
            return self._dispatch(ops, kept, x, scales, tokens, number)
        except BaseException as error:
            control.ended_by(Call(number, DISPATCH), error)
            raise

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
        )

    def _dispatch(
        self,
        ops: GpuNormalOps,
        kept: _Kept,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        tokens: CountedTokens,
        number: int,
    ) -> CountedDispatch[GpuRouting] | StartedDispatch[GpuRouting, GpuCounts]:
        control, headers, windows = self._control, self._control.headers, self._windows
        _, ids, weights, by_rank, in_rank, by_expert = tokens
        num_tokens = x.shape[0]
        moment = self._stream.whole_call()
        routing = self._new_routing(num_tokens, kept.num_channels, moment.stream_before)
        room = routing.recv_src_idx.shape[0]
        windows.followed = moment.stream_before
        offers = windows.offers(MAX_OFFERS, is_captured=False)
        control.control.publish(number, DISPATCH, SEND)
        at = headers.next_place()
        headers.memory[at : at + len(kept.header)] = kept.header
        words = len(offers), 0, *chain.from_iterable(offers)
        OFFERED[len(offers)].pack_into(headers.memory, at + OFFERS_AT, *words)
        ticket = control.next_ticket()
        prefix, channels, recv_channels, source, handle_in_rank, send_head, digests = routing
        values = (
            *(headers.address + at, ticket, in_rank, by_rank, by_expert, prefix, channels, recv_channels),
            *(handle_in_rank, digests, send_head, num_tokens),
            *(max(1, -(-num_tokens // kept.num_channels)), max(1, -(-num_tokens // HEAD_TOKENS))),
            *(x, scales, ids, weights, source, None, room, kept.token.num_topk),
            max(1, -(-room // UNPACK_BLOCK)),
        )
        kept.batch.run(moment, values)
        # This call needs none of it.
        with contextlib.suppress(torch.OutOfMemoryError):
            self._spare = self._new_spare(routing, num_tokens, kept.num_channels, room, moment.stream_before)
        totals = control.wait_for_totals(ticket)
        outcome, num_rows, uses_rings = totals[FIRST_TOTAL:AFTER_TOTALS].tolist()
        window = None
        if outcome == 0:
            self._make_room(num_rows)
            if uses_rings == 0 and 0 < num_rows <= room:
                sizes = window_for(num_rows, kept.token, kept.source_bytes)
                num_bytes = max(sizes.num_bytes, MIN_WINDOW_BYTES)
                window = first_fit(offers, num_bytes)
        if window is None:
            payload = Payload(x, scales, ids, weights, kept.source_bytes)
            header = np.frombuffer(kept.header, np.int64).copy()
            write_offers(header, offers)
            call = Call(number, DISPATCH)
            rest = GpuCall(ops, call, None, False)
            rest.after_notify(payload, routing, dict(zip(INPUTS, values, strict=True)))
            counts = GpuCounts(in_rank, by_rank, by_expert)
            return StartedDispatch(call, rest, payload, counts, routing, header)
        windows.allocate_at(window, num_bytes)
        received = self._results(kept, window, num_rows, num_bytes, sizes.offsets)
        if num_rows < room:
            source = source[:num_rows]
            routing = GpuRouting(prefix, channels, recv_channels, source, handle_in_rank, send_head, digests)
        num_local = kept.num_experts // control.num_ranks
        counted = totals[constants.TOTAL_BY_EXPERT : constants.TOTAL_BY_EXPERT + num_local].tolist()
        control.control.publish(number, DISPATCH, IDLE)
        rows, new_scales, new_ids, new_weights = received
        return CountedDispatch(Results(rows, source, new_ids, new_weights, new_scales), counted, routing)

    def _results(
        self, kept: _Kept, window: int, num_rows: int, num_bytes: int, offsets: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """The rows, scales, ids and weights in a window."""
        num_topk = kept.token.num_topk
        parts = [
            *kept.rows.parts(num_rows, offsets[X_PART], offsets[SCALES_PART]),
            (offsets[IDS_PART], (num_rows, num_topk), torch.int64),
            (offsets[WEIGHTS_PART], (num_rows, num_topk), torch.float32),
        ]
        rows, *scales, ids, weights = self._windows.lend(window, num_bytes, parts, is_captured=False)
        return rows, scales[0] if scales else None, ids, weights

    # The tensors of handles

    def _new_routing(self, num_tokens: int, num_channels: int, caller: int) -> GpuRouting:
        """A routing that kernels will fill: the spare one, if it can be used."""
        spare, self._spare = self._spare, None
        wanted = num_tokens, num_channels, self._room, caller, torch.is_inference_mode_enabled()
        if spare is not None and spare[: len(wanted)] == wanted:
            return spare.routing
        return self._allocate(num_tokens, num_channels)

    def _new_spare(
        self, like: GpuRouting, num_tokens: int, num_channels: int, room: int, caller: int
    ) -> _Spare:
        """Memory that the current stream may use from now on."""
        empty_like = self._control.gpu.empty_like
        # Torch reads the shape of a tensor faster than arguments.
        routing = GpuRouting(*[empty_like(part) for part in like if part is not None])
        return _Spare(num_tokens, num_channels, room, caller, torch.is_inference_mode_enabled(), routing)

    def _allocate(self, num_tokens: int, num_channels: int) -> GpuRouting:
        empty = self._control.gpu.empty
        routing = new_routing(empty, num_tokens, self._control.num_ranks, num_channels)
        return routing._replace(recv_src_idx=empty((self._room,), torch.int32))
