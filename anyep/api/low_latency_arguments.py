"""Checks of the arguments that users pass to the low-latency calls of `Buffer`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from anyep.api import gradients
from anyep.api.accepted import Accepted
from anyep.api.arguments import check_devices, check_num_experts, check_tensor, check_topk_idx, check_x
from anyep.api.unfilled import Unfilled
from anyep.backends.low_latency import LowLatencyInput, LowLatencyResults, LowLatencyTokens
from anyep.core import formats
from anyep.core.calls import Call
from anyep.core.records import Format
from anyep.errors import InvalidCall, whole_number
from anyep.modes.low_latency import LowLatencyMode, Sent
from anyep.sizes import LowLatencySizes, check_fp8_hidden, low_latency_sizes

NUM_PARTS: Final = 5
LAYOUT_RANGE: Final = 1
"""The part of a handle that stands for all."""
WRONG_RANGES = (
    "",
    "its ranges do not follow each other",
    "it has more rows of a rank than num_max_dispatch_tokens_per_rank",
    "its source indices are not in order, or not below num_max_dispatch_tokens_per_rank",
)
Handle = tuple[torch.Tensor, torch.Tensor, int, int, int]


class HandleParts(NamedTuple):
    """The contents of a handle."""

    src_info: torch.Tensor
    layout_range: torch.Tensor
    num_rows: int
    sizes: LowLatencySizes


class KnownDispatch(NamedTuple):
    """What a dispatch accepted: tensors, the numbers and options of its user, and what they mean."""

    tensors: Accepted
    numbers: tuple[Any, ...]
    sizes: LowLatencySizes
    travel: Format


class KnownCombine(NamedTuple):
    """The same for a combine; its handle is among the tensors and the numbers."""

    tensors: Accepted
    numbers: tuple[Any, ...]
    sizes: LowLatencySizes
    use_logfmt: bool
    zero_copy: bool


def check_sizes(num_max_tokens: Any, hidden: Any, num_experts: Any, num_ranks: int) -> LowLatencySizes:
    return low_latency_sizes(
        whole_number("num_max_dispatch_tokens_per_rank", num_max_tokens, minimum=1),
        whole_number("hidden", hidden, minimum=1),
        check_num_experts(num_experts, num_ranks),
    )


def check_stats(name: str, stats: Any, dtype: torch.dtype, length: int) -> torch.Tensor | None:
    if stats is None:
        return None
    checked = check_tensor(name, stats, (dtype,), (length,))
    if not checked.is_contiguous():
        raise InvalidCall(f"{name} is not contiguous: it is added to in place, pass a contiguous tensor")
    return checked


def check_format(use_fp8: bool, round_scale: bool, use_ue8m0: bool, hidden: int) -> Format:
    """The format in which a dispatch sends rows."""
    if not use_fp8:
        return Format.BF16
    if use_ue8m0 and not round_scale:
        raise InvalidCall("use_ue8m0 needs round_scale=True: only powers of two have no mantissa")
    check_fp8_hidden(hidden, use_ue8m0)
    if use_ue8m0:
        return Format.FP8_UE8M0
    return Format.FP8_ROUNDED if round_scale else Format.FP8


class LowLatencyArguments:
    """Checks the arguments of one Buffer's calls; `before` raises the errors of its earlier calls, and
    `is_quiet` says whether calls like earlier ones may be repeated with less work."""

    def __init__(
        self,
        mode: LowLatencyMode,
        device: torch.device,
        num_ranks: int,
        unfilled: Unfilled,
        before: Callable[[bool], None],
        is_quiet: Callable[[], bool],
    ) -> None:
        self._mode = mode
        self._device = device
        self._num_ranks = num_ranks
        self._unfilled = unfilled
        self._before = before
        self._is_quiet = is_quiet
        # Each is replaced as a whole: calls may be made in several threads.
        self._last_dispatch: KnownDispatch | None = None
        self._last_combine: KnownCombine | None = None

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max_tokens: Any,
        num_experts: Any,
        expert_stats: Any,
        wait_stats: Any,
        fp8: tuple[bool, bool, bool],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> LowLatencyTokens:
        """What a dispatch sends. `fp8` is the caller's (use_fp8, round_scale, use_ue8m0)."""
        self._begin(async_finish, return_recv_hook)
        given, numbers = (x, topk_idx, expert_stats, wait_stats), (num_max_tokens, num_experts, *fp8)
        known, are_plain = self._last_dispatch, type(num_max_tokens) is type(num_experts) is int
        if known is not None and are_plain and known.numbers == numbers and known.tensors.covers(*given):
            _, _, sizes, travel = known
            self._mode.check_sizes(sizes)
            self._mode.check_ids(topk_idx, sizes.num_experts)
            return LowLatencyTokens(x, topk_idx, sizes, travel, expert_stats, wait_stats)
        check_devices(
            self._device,
            x=x,
            topk_idx=topk_idx,
            cumulative_local_expert_recv_stats=expert_stats,
            dispatch_wait_recv_cost_stats=wait_stats,
        )
        gradients.warn_if_lost(x)
        rows = check_x("x", x, (torch.bfloat16,))
        ids = check_topk_idx(topk_idx, rows.shape[0])
        sizes = check_sizes(num_max_tokens, rows.shape[1], num_experts, self._num_ranks)
        if rows.shape[0] > sizes.num_max_tokens:
            raise InvalidCall(
                f"x has {rows.shape[0]} tokens, but num_max_dispatch_tokens_per_rank is"
                f" {sizes.num_max_tokens}"
            )
        travel = check_format(*fp8, sizes.hidden)
        self._mode.check_sizes(sizes)
        self._mode.check_ids(ids, sizes.num_experts)
        local_experts = sizes.num_experts // self._num_ranks
        tokens = LowLatencyTokens(
            rows,
            ids,
            sizes,
            travel,
            check_stats("cumulative_local_expert_recv_stats", expert_stats, torch.int32, local_experts),
            check_stats("dispatch_wait_recv_cost_stats", wait_stats, torch.int64, self._num_ranks),
        )
        if rows is x and ids is topk_idx:
            self._last_dispatch = KnownDispatch(self._accepted(given), numbers, sizes, travel)
        return tokens

    def dispatch_again(
        self,
        x: Any,
        topk_idx: Any,
        num_max_tokens: Any,
        num_experts: Any,
        expert_stats: Any,
        wait_stats: Any,
        fp8: tuple[bool, bool, bool],
        by_hook: bool,
    ) -> tuple[LowLatencyResults, Sent, LowLatencySizes] | None:
        """The results of a dispatch, made at once if one like it was accepted; or None."""
        known = self._last_dispatch
        if known is None:
            return None
        try:
            if not (
                type(num_max_tokens) is type(num_experts) is int
                and known.numbers == (num_max_tokens, num_experts, *fp8)
                and known.tensors.covers(x, topk_idx, expert_stats, wait_stats)
                and self._is_quiet()
            ):
                return None
        except Exception:
            # Arguments of which not even this can be found out: checks say what is wrong with them.
            return None
        sizes = known.sizes
        tokens = LowLatencyTokens(x, topk_idx, sizes, known.travel, expert_stats, wait_stats)
        done = self._mode.dispatch_again(tokens, by_hook)
        return (*done, sizes) if done is not None else None

    def combine_again(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: Any,
        formats_wanted: tuple[bool, bool],
        out: Any,
        wait_stats: Any,
        by_hook: bool,
    ) -> tuple[torch.Tensor, Sent] | None:
        """The same for a combine, of rows that are not in the slots already: its sums."""
        known = self._last_combine
        if known is None or known.zero_copy:
            return None
        try:
            src_info, layout_range, num_max_tokens, hidden, num_experts = handle
            if not (
                handle.__class__ is tuple
                and type(num_max_tokens) is type(hidden) is type(num_experts) is int
                and known.numbers == (num_max_tokens, hidden, num_experts, *formats_wanted)
                and known.tensors.covers(x, topk_idx, topk_weights, src_info, layout_range, out, wait_stats)
                and self._mode.is_filled(layout_range)
                and self._is_quiet()
            ):
                return None
        except Exception:
            # As in `dispatch_again`.
            return None
        parts = x, topk_idx, topk_weights, src_info, layout_range
        combined = LowLatencyInput(*parts, 0, known.sizes, known.use_logfmt, False, out, wait_stats)
        return self._mode.combine_again(combined, by_hook)

    def combine(
        self,
        call: Call,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: Any,
        formats_wanted: tuple[bool, bool],
        out: Any,
        wait_stats: Any,
        async_finish: bool,
        return_recv_hook: bool,
    ) -> LowLatencyInput:
        """What a combine adds up. `formats_wanted` is the caller's (use_logfmt, zero_copy)."""
        self._begin(async_finish, return_recv_hook)
        given: tuple[Any, ...] = ()
        numbers: tuple[Any, ...] = ()
        if handle.__class__ is tuple and len(handle) == NUM_PARTS:
            src_info, layout_range, num_max_tokens, hidden, num_experts = handle
            numbers = num_max_tokens, hidden, num_experts, *formats_wanted
            given = x, topk_idx, topk_weights, src_info, layout_range, out, wait_stats
            known = self._last_combine
            are_plain = type(num_max_tokens) is type(hidden) is type(num_experts) is int
            if known is not None and are_plain and known.numbers == numbers and known.tensors.covers(*given):
                return self._combine_again(call, known, given)
        parts = x, topk_idx, topk_weights, handle
        combined = self._check_combine(call, *parts, formats_wanted, out, wait_stats)
        accepted = (*combined[:NUM_PARTS], out, combined.wait_stats)
        if given and all(map(operator.is_, given, accepted)):
            options = combined.use_logfmt, combined.zero_copy
            self._last_combine = KnownCombine(self._accepted(given), numbers, combined.sizes, *options)
        return combined

    def _combine_again(self, call: Call, known: KnownCombine, given: tuple[Any, ...]) -> LowLatencyInput:
        """A combine whose tensors look like those of an accepted one: only their contents are checked."""
        _, _, sizes, use_logfmt, zero_copy = known
        x, topk_idx, topk_weights, src_info, layout_range, out, wait_stats = given
        self._unfilled.wait_for(layout_range)
        self._mode.check_sizes(sizes)
        self._mode.check_is_filled(layout_range)
        num_rows = self._count_rows(src_info, layout_range, sizes)
        self._mode.check_ids(topk_idx, sizes.num_experts)
        if zero_copy:
            self._mode.check_was_lent(call, sizes)
        return LowLatencyInput(
            x,
            topk_idx,
            topk_weights,
            src_info,
            layout_range,
            num_rows,
            sizes,
            use_logfmt,
            zero_copy,
            out,
            wait_stats,
        )

    def _check_combine(
        self,
        call: Call,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: Any,
        formats_wanted: tuple[bool, bool],
        out: Any,
        wait_stats: Any,
    ) -> LowLatencyInput:
        """Check every argument of a combine."""
        check_devices(
            self._device,
            x=x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            out=out,
            combine_wait_recv_cost_stats=wait_stats,
        )
        gradients.warn_if_lost(x, topk_weights)
        use_logfmt, zero_copy = formats_wanted
        if zero_copy and use_logfmt:
            raise InvalidCall(
                "zero_copy and use_logfmt do not go together: what is encoded is copied; choose one"
            )
        parts = self.handle(handle)
        sizes = parts.sizes
        rows = self._check_rows(x, sizes, use_logfmt, zero_copy)
        ids = check_topk_idx(topk_idx, None)
        if ids.shape[0] > sizes.num_max_tokens:
            raise InvalidCall(
                f"topk_idx has {ids.shape[0]} tokens, but num_max_dispatch_tokens_per_rank is"
                f" {sizes.num_max_tokens}"
            )
        self._mode.check_ids(ids, sizes.num_experts)
        weights = check_tensor("topk_weights", topk_weights, (torch.float32,), tuple(ids.shape))
        if out is not None:
            checked_out = check_tensor("out", out, (torch.bfloat16,), (ids.shape[0], sizes.hidden))
            if not checked_out.is_contiguous():
                raise InvalidCall("out is not contiguous: it is written in place, pass a contiguous tensor")
        checked_stats = check_stats("combine_wait_recv_cost_stats", wait_stats, torch.int64, self._num_ranks)
        if zero_copy:
            self._mode.check_was_lent(call, sizes)
        return LowLatencyInput(
            rows,
            ids,
            weights.contiguous(),
            parts.src_info,
            parts.layout_range,
            parts.num_rows,
            sizes,
            bool(use_logfmt),
            bool(zero_copy),
            out,
            checked_stats,
        )

    def clean(self, num_max_tokens: Any, hidden: Any, num_experts: Any) -> LowLatencySizes:
        """The sizes that the slots shall have."""
        self._before(False)
        self._mode.check_nothing_in_flight()
        sizes = check_sizes(num_max_tokens, hidden, num_experts, self._num_ranks)
        self._mode.check_room(sizes)
        return sizes

    def handle(self, handle: Any) -> HandleParts:
        """The contents of a handle, if they are valid; a copy is as good as the original."""
        self._unfilled.wait_for_handle(handle, LAYOUT_RANGE)
        if not isinstance(handle, tuple | list) or len(handle) != NUM_PARTS:
            raise InvalidCall(
                "handle is not that of a low-latency dispatch: it must be (src_info, layout_range,"
                " num_max_dispatch_tokens_per_rank, hidden, num_experts)"
            )
        src_info, layout_range, num_max_tokens, hidden, num_experts = handle
        check_devices(self._device, **{"handle[0]": src_info, "handle[1]": layout_range})
        sizes = check_sizes(num_max_tokens, hidden, num_experts, self._num_ranks)
        self._mode.check_sizes(sizes)
        num_ranks, local_experts = self._num_ranks, sizes.num_experts // self._num_ranks
        source = check_tensor(
            "handle[0]", src_info, (torch.int32,), (local_experts, num_ranks * sizes.num_max_tokens)
        )
        ranges = check_tensor("handle[1]", layout_range, (torch.int64,), (local_experts, num_ranks))
        self._mode.check_is_filled(ranges)
        source, ranges = source.contiguous(), ranges.contiguous()
        return HandleParts(source, ranges, self._count_rows(source, ranges, sizes), sizes)

    def _count_rows(self, src_info: torch.Tensor, layout_range: torch.Tensor, sizes: LowLatencySizes) -> int:
        """The rows of a handle, as far as the host knows them, if its contents fit together."""
        num_rows = self._mode.count_rows(layout_range, src_info, sizes.num_max_tokens)
        if num_rows < 0:
            raise InvalidCall(f"the handle's contents do not fit together: {WRONG_RANGES[-num_rows]}")
        return num_rows

    def _accepted(self, tensors: tuple[Any, ...]) -> Accepted:
        accepted = Accepted(self._device)
        accepted.remember(*tensors)
        return accepted

    def _begin(self, async_finish: bool, return_recv_hook: bool) -> None:
        self._before(async_finish)
        if async_finish and return_recv_hook:
            raise InvalidCall("async_finish and return_recv_hook do not go together: choose one")

    def _check_rows(self, x: Any, sizes: LowLatencySizes, use_logfmt: bool, zero_copy: bool) -> torch.Tensor:
        """The experts' outputs."""
        num_rows = self._num_ranks * sizes.num_max_tokens
        shape = (sizes.num_experts // self._num_ranks, num_rows, sizes.hidden)
        rows = check_tensor("x", x, (torch.bfloat16,), shape)
        if not zero_copy and not rows.is_contiguous():
            raise InvalidCall("x is not contiguous: pass x.contiguous()")
        block, most = formats.CHANNELS_PER_BLOCK, formats.LOGFMT_MAX_HIDDEN
        if use_logfmt and (sizes.hidden % block or sizes.hidden > most):
            raise InvalidCall(
                f"hidden is {sizes.hidden}: with use_logfmt it must be a multiple of {block}"
                f" and at most {most}"
            )
        return rows
