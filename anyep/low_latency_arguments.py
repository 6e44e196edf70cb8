"""Checks of the arguments that users pass to the low-latency calls of `Buffer`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from anyep import formats
from anyep.arguments import check_devices, check_num_experts, check_tensor, check_topk_idx, check_x
from anyep.backends.base import LowLatencyInput, LowLatencyTokens
from anyep.errors import InvalidCall, whole_number
from anyep.modes.low_latency import LowLatencyMode
from anyep.records import Format
from anyep.sizes import LowLatencySizes, check_fp8_hidden, low_latency_sizes

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


def check_sizes(num_max_tokens: Any, hidden: Any, num_experts: Any, num_ranks: int) -> LowLatencySizes:
    return low_latency_sizes(
        whole_number("num_max_dispatch_tokens_per_rank", num_max_tokens, minimum=1),
        whole_number("hidden", hidden, minimum=1),
        check_num_experts(num_experts, num_ranks),
    )


def check_not_both(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise InvalidCall("async_finish and return_recv_hook do not go together: choose one")


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


def check_tokens(
    mode: LowLatencyMode,
    num_ranks: int,
    x: Any,
    topk_idx: Any,
    num_max_tokens: Any,
    num_experts: Any,
    expert_stats: Any,
    wait_stats: Any,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
) -> LowLatencyTokens:
    """What a dispatch sends."""
    rows = check_x("x", x, (torch.bfloat16,))
    ids = check_topk_idx(topk_idx, rows.shape[0])
    sizes = check_sizes(num_max_tokens, rows.shape[1], num_experts, num_ranks)
    if rows.shape[0] > sizes.num_max_tokens:
        raise InvalidCall(
            f"x has {rows.shape[0]} tokens, but num_max_dispatch_tokens_per_rank is {sizes.num_max_tokens}"
        )
    travel = check_format(use_fp8, round_scale, use_ue8m0, sizes.hidden)
    mode.check_sizes(sizes)
    mode.check_ids(ids, sizes.num_experts)
    return LowLatencyTokens(
        rows,
        ids,
        sizes,
        travel,
        check_stats(
            "cumulative_local_expert_recv_stats",
            expert_stats,
            torch.int32,
            sizes.num_experts // num_ranks,
        ),
        check_stats("dispatch_wait_recv_cost_stats", wait_stats, torch.int64, num_ranks),
    )


def check_handle(mode: LowLatencyMode, num_ranks: int, handle: Any, device: torch.device) -> HandleParts:
    """The contents of a handle, if they are valid; a copy is as good as the original."""
    if not isinstance(handle, tuple | list) or len(handle) != 5:
        raise InvalidCall(
            "handle is not that of a low-latency dispatch: it must be (src_info, layout_range,"
            " num_max_dispatch_tokens_per_rank, hidden, num_experts)"
        )
    src_info, layout_range, num_max_tokens, hidden, num_experts = handle
    check_devices(device, **{"handle[0]": src_info, "handle[1]": layout_range})
    sizes = check_sizes(num_max_tokens, hidden, num_experts, num_ranks)
    mode.check_sizes(sizes)
    local_experts = sizes.num_experts // num_ranks
    source = check_tensor(
        "handle[0]", src_info, (torch.int32,), (local_experts, num_ranks * sizes.num_max_tokens)
    )
    ranges = check_tensor("handle[1]", layout_range, (torch.int64,), (local_experts, num_ranks))
    mode.check_is_filled(ranges)
    source, ranges = source.contiguous(), ranges.contiguous()
    num_rows = mode.count_rows(ranges, source, sizes.num_max_tokens)
    if num_rows < 0:
        raise InvalidCall(f"the handle's contents do not fit together: {WRONG_RANGES[-num_rows]}")
    return HandleParts(source, ranges, num_rows, sizes)


def check_outputs(
    mode: LowLatencyMode,
    num_ranks: int,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    handle: Any,
    use_logfmt: bool,
    zero_copy: bool,
    out: Any,
    wait_stats: Any,
    device: torch.device,
) -> LowLatencyInput:
    """What a combine adds up."""
    if zero_copy and use_logfmt:
        raise InvalidCall(
            "zero_copy and use_logfmt do not go together: what is encoded is copied; choose one"
        )
    parts = check_handle(mode, num_ranks, handle, device)
    sizes = parts.sizes
    shape = (sizes.num_experts // num_ranks, num_ranks * sizes.num_max_tokens, sizes.hidden)
    rows = check_tensor("x", x, (torch.bfloat16,), shape)
    if not zero_copy and not rows.is_contiguous():
        raise InvalidCall("x is not contiguous: pass x.contiguous()")
    if use_logfmt and (sizes.hidden % formats.CHANNELS_PER_BLOCK or sizes.hidden > formats.LOGFMT_MAX_HIDDEN):
        raise InvalidCall(
            f"hidden is {sizes.hidden}: with use_logfmt it must be a multiple of"
            f" {formats.CHANNELS_PER_BLOCK} and at most {formats.LOGFMT_MAX_HIDDEN}"
        )
    ids = check_topk_idx(topk_idx, None)
    if ids.shape[0] > sizes.num_max_tokens:
        raise InvalidCall(
            f"topk_idx has {ids.shape[0]} tokens, but num_max_dispatch_tokens_per_rank is"
            f" {sizes.num_max_tokens}"
        )
    mode.check_ids(ids, sizes.num_experts)
    weights = check_tensor("topk_weights", topk_weights, (torch.float32,), tuple(ids.shape))
    if out is not None:
        checked_out = check_tensor("out", out, (torch.bfloat16,), (ids.shape[0], sizes.hidden))
        if not checked_out.is_contiguous():
            raise InvalidCall("out is not contiguous: it is written in place, pass a contiguous tensor")
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
        check_stats("combine_wait_recv_cost_stats", wait_stats, torch.int64, num_ranks),
    )
