"""Checks of the arguments that users pass to the normal-mode calls of `Buffer`, and what is remembered for
them between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from anyep import sizes
from anyep.api import gradients
from anyep.api.accepted import Accepted
from anyep.api.arguments import (
    FLOAT_DTYPES,
    check_biases,
    check_config,
    check_devices,
    check_events,
    check_num_experts,
    check_payload,
    check_tensor,
    check_topk_idx,
    check_x,
)
from anyep.api.unfilled import Unfilled
from anyep.backends.base import CombineInput, CountedTokens, Payload
from anyep.errors import InvalidCall, whole_number
from anyep.events import EventOverlap
from anyep.modes.normal import Dispatch, Dispatched, NormalMode
from anyep.sizes import Config, token_layout

MAX_ROWS: Final = 2**31 - 1
RANK_PREFIX: Final = 0
"""The part of a handle that stands for all."""
Handle = tuple[torch.Tensor, ...]
Tuned = Callable[[int], Config]
"""Gives the tuned config for a number of ranks."""


class Streams(NamedTuple):
    """How a call is ordered with other work, as the user passed it."""

    previous_event: Any
    async_finish: bool
    allocate_on_comm_stream: bool

    def checked(self) -> EventOverlap | None:
        """The event that the call follows."""
        return check_events(self.previous_event, self.async_finish, self.allocate_on_comm_stream)


AT_ONCE: Final = Streams(None, False, False)
"""After the caller's work so far, which continues after the call."""


class Layout(NamedTuple):
    """What `get_dispatch_layout` returned, as the user passed it on."""

    num_tokens_per_rank: Any
    num_tokens_per_rdma_rank: Any
    is_token_in_rank: Any
    num_tokens_per_expert: Any


class CachedDispatch(NamedTuple):
    """The checked arguments of a dispatch with a handle."""

    payload: Payload
    routing: Any
    config: Config


class NormalArguments:
    """Checks the arguments of one Buffer's calls."""

    def __init__(
        self, mode: NormalMode[Any, Any], device: torch.device, num_ranks: int, unfilled: Unfilled
    ) -> None:
        self._mode = mode
        self._device = device
        self._num_ranks = num_ranks
        self._unfilled = unfilled
        self._last_handle: tuple[Handle, Any] | None = None
        self._counted, self._dispatched, self._resent, self._combined = (Accepted(device) for _ in range(4))
        """What layouts, dispatches, dispatches with a handle, and combines have accepted."""
        self._num_counted_experts = 0
        """The number of experts that the last layout accepted."""
        self._last_configs: dict[Tuned, tuple[Config | None, Config, int | None, Config]] = {}
        """For dispatches and for combines, by what tunes them: a user's config, the tuned one, the channels
        of a handle, and the config that was chosen."""

    def remember(self, handle: Handle, routing: Any) -> None:
        """Keep the routing of the handle that a dispatch returns: the next call often passes it back."""
        self._last_handle = (handle, routing)

    def layout(self, topk_idx: Any, num_experts: Any) -> tuple[torch.Tensor, int]:
        """The arguments of `get_dispatch_layout`."""
        is_number = type(num_experts) is int
        if is_number and num_experts == self._num_counted_experts and self._counted.covers(topk_idx):
            return topk_idx, num_experts
        check_devices(self._device, topk_idx=topk_idx)
        ids, number = check_topk_idx(topk_idx, None), check_num_experts(num_experts, self._num_ranks)
        if is_number and ids is topk_idx:
            self._counted.remember(topk_idx)
            self._num_counted_experts = number
        return ids, number

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        layout: Layout,
        expert_alignment: Any,
        num_worst_tokens: Any,
        config: Config | None,
        default: Tuned,
        streams: Streams,
    ) -> tuple[Dispatch[Any], EventOverlap | None]:
        """The arguments of a dispatch without a handle, and the event that it follows."""
        ops = self._mode.ops
        ops.before(streams.async_finish)
        previous = streams.checked()
        ops.wait_until_readable(previous)
        self._unfilled.wait_for(layout.num_tokens_per_rank)
        given = (*_parts_of(x), topk_idx, topk_weights, *layout)
        if is_known := self._dispatched.covers(*given):
            payload = Payload(*_parts_of(x), topk_idx, topk_weights, ops.source_bytes)
        else:
            check_devices(self._device, x=x, topk_idx=topk_idx, topk_weights=topk_weights, **layout._asdict())
            gradients.warn_if_lost(x, topk_weights)
            payload = check_payload(x, topk_idx, topk_weights, ops.source_bytes)
            layout = self._checked_layout(payload, layout)
        chosen = self._config(config, default, None)
        self._mode.check_rings(chosen, payload.token)
        counts = self._counts(payload, layout, chosen)
        if not is_known and _are_same((*_parts_of_payload(payload), *layout), given):
            self._dispatched.remember(*given)
        worst = whole_number("num_worst_tokens", num_worst_tokens, 0)
        if worst > MAX_ROWS:
            raise InvalidCall(f"num_worst_tokens is {worst}: at most {MAX_ROWS} rows are possible")
        if worst and payload.topk_idx is None:
            raise InvalidCall("num_worst_tokens needs topk_idx: that is how padding rows are told apart")
        alignment = whole_number("expert_alignment", expert_alignment, 1)
        return Dispatch(payload, counts, chosen, worst, alignment), previous

    def cached_dispatch(
        self,
        x: Any,
        handle: Any,
        topk_idx: Any,
        topk_weights: Any,
        config: Config | None,
        default: Tuned,
        streams: Streams,
    ) -> tuple[CachedDispatch, EventOverlap | None]:
        """The arguments of a dispatch with a handle, and the event that it follows."""
        ops = self._mode.ops
        ops.before(streams.async_finish)
        previous = streams.checked()
        parts = _parts_of(x)
        if topk_idx is None and topk_weights is None and self._resent.covers(*parts):
            payload = Payload(*parts, None, None, ops.source_bytes)
        else:
            check_devices(self._device, x=x)
            if topk_idx is not None or topk_weights is not None:
                raise InvalidCall(
                    "a dispatch with a handle takes no top-k: they were sent with the first dispatch"
                )
            gradients.warn_if_lost(x)
            payload = check_payload(x, None, None, ops.source_bytes)
            self._resent.remember(*parts)
        routing = self._routing(handle)
        if payload.num_tokens != routing.num_tokens:
            raise InvalidCall(
                f"x has {payload.num_tokens} rows, but the handle was made for {routing.num_tokens}"
            )
        chosen = self._config(config, default, routing.num_channels)
        self._mode.check_rings(chosen, payload.token)
        return CachedDispatch(payload, routing, chosen), previous

    def combine(
        self,
        x: Any,
        handle: Any,
        topk_weights: Any,
        bias: Any,
        config: Config | None,
        default: Tuned,
        streams: Streams,
    ) -> tuple[CombineInput[Any], EventOverlap | None]:
        """The arguments of a combine, and the event that it follows."""
        self._mode.ops.before(streams.async_finish)
        previous = streams.checked()
        is_known = bias is None and topk_weights is None and self._combined.covers(x)
        if is_known:
            rows = x
        else:
            check_devices(self._device, x=x, topk_weights=topk_weights, bias=bias)
            gradients.warn_if_lost(x, topk_weights, bias)
            rows = check_x("x", x, FLOAT_DTYPES)
            self._combined.remember(x)
        routing = self._routing(handle)
        if rows.shape[0] != routing.num_recv_rows:
            raise InvalidCall(
                f"x has {rows.shape[0]} rows, but the handle's dispatch gave {routing.num_recv_rows}"
            )
        weights = topk_weights
        if weights is not None:
            weights = check_tensor("topk_weights", weights, (torch.float32,), (rows.shape[0], "top-k"))
            if not 1 <= weights.shape[1] <= sizes.NUM_MAX_TOPK:
                raise InvalidCall(
                    f"topk_weights has {weights.shape[1]} columns: it must be 1 to {sizes.NUM_MAX_TOPK}"
                )
            weights = weights.contiguous()
        biases = check_biases(bias, (routing.num_tokens, rows.shape[1]), rows.dtype)
        chosen = self._config(config, default, routing.num_channels)
        num_topk = weights.shape[1] if weights is not None else 0
        token = token_layout(rows.shape[1] * rows.element_size(), 0, num_topk)
        self._mode.check_rings(chosen, token)
        return CombineInput(rows, routing, weights, biases, chosen), previous

    def dispatch_again(self, x: Any, handle: Any, config: Config | None, default: Tuned) -> Any:
        """The rows of a dispatch with a handle, made at once if it is like an earlier one; or None."""
        chosen = self._last_config(config, default)
        return self._mode.ops.dispatch_again(x, handle, chosen) if chosen is not None else None

    def combine_again(self, x: Any, handle: Any, config: Config | None, default: Tuned) -> Any:
        """The same for a combine: its sums."""
        chosen = self._last_config(config, default)
        return self._mode.ops.combine_again(x, handle, chosen) if chosen is not None else None

    def counted_again(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        layout: Layout,
        expert_alignment: Any,
        config: Config | None,
        default: Tuned,
    ) -> Dispatched[Any] | None:
        """The results of a dispatch without a handle, made at once if it is like an earlier one; or None."""
        chosen = self._last_config(config, default)
        if chosen is None or type(expert_alignment) is not int or expert_alignment < 1:
            return None
        per_rank, per_node, in_rank, per_expert = layout
        if per_node is not None:
            return None
        tokens = CountedTokens(x, topk_idx, topk_weights, per_rank, in_rank, per_expert)
        return self._mode.counted_again(tokens, chosen, expert_alignment)

    def outputs(self, handle: Any, hidden: Any, dtype: Any) -> tuple[int, int]:
        """The shape of the rows that a combine takes with this handle; `dtype` is theirs."""
        self._mode.ops.before(True)
        if dtype not in FLOAT_DTYPES:
            names = ", ".join(str(known) for known in FLOAT_DTYPES)
            raise InvalidCall(f"dtype is {dtype!r}: a combine adds up rows of {names}")
        columns = whole_number("hidden", hidden, minimum=1)
        sizes.check_row_bytes(columns * dtype.itemsize)
        return self._routing(handle).num_recv_rows, columns

    def _last_config(self, config: Config | None, default: Tuned) -> Config | None:
        """The config that was chosen last time, if the user passes the same one (or none) again."""
        last = self._last_configs.get(default)
        is_same = last is not None and last[0] is config and last[1] is default(self._num_ranks)
        return last[3] if last is not None and is_same else None

    def _config(self, config: Config | None, default: Tuned, num_channels: int | None) -> Config:
        tuned, last = default(self._num_ranks), self._last_configs.get(default)
        if last is not None and last[0] is config and last[1] is tuned and last[2] == num_channels:
            return last[3]
        chosen = check_config(config, self._mode.ops.default_config(tuned), num_channels)
        self._last_configs[default] = config, tuned, num_channels, chosen
        return chosen

    def _routing(self, handle: Any) -> Any:
        """The routing of a handle."""
        self._unfilled.wait_for_handle(handle, RANK_PREFIX)
        return self._mode.ops.routing_of(handle, self._last_handle)

    def _checked_layout(self, payload: Payload, layout: Layout) -> Layout:
        """The layout with counts of the right types and shapes; the backend checks those per node."""
        for name in ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"):
            if getattr(layout, name) is None:
                raise InvalidCall(f"{name} is missing: pass what get_dispatch_layout returned, or a handle")
        ranks, tokens = self._num_ranks, payload.num_tokens
        per_rank = check_tensor("num_tokens_per_rank", layout.num_tokens_per_rank, (torch.int32,), (ranks,))
        in_rank = check_tensor("is_token_in_rank", layout.is_token_in_rank, (torch.bool,), (tokens, ranks))
        per_expert = check_tensor(
            "num_tokens_per_expert", layout.num_tokens_per_expert, (torch.int32,), ("experts",)
        )
        check_num_experts(per_expert.shape[0], ranks)
        per_node = layout.num_tokens_per_rdma_rank
        return Layout(per_rank.contiguous(), per_node, in_rank.contiguous(), per_expert.contiguous())

    def _counts(self, payload: Payload, layout: Layout, config: Config) -> Any:
        """How many tokens go where; the backend refuses counts that contradict each other."""
        per_rank, per_node, in_rank, per_expert = layout
        num_channels = config.num_channels
        return self._mode.ops.counts_of(payload, in_rank, per_rank, per_node, per_expert, num_channels)


def _parts_of(x: Any) -> tuple[Any, Any]:
    """Rows and scales, as the user passed them; what is no pair of both is refused elsewhere."""
    is_pair = isinstance(x, tuple | list) and len(x) == 2 and x[1] is not None
    return (x[0], x[1]) if is_pair else (x, None)


def _parts_of_payload(payload: Payload) -> tuple[Any, ...]:
    return payload.x, payload.scales, payload.topk_idx, payload.topk_weights


def _are_same(checked: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
    """Whether the checks made nothing new of what was given."""
    return all(one is other for one, other in zip(checked, given, strict=True))
