"""`Buffer`, the public API. It checks arguments, chooses the mode and returns the documented tuples."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import torch

from anyep.requirements import check_requirements

check_requirements()

# ruff: noqa: E402 - the imports below need a torch that is new enough
from anyep import arguments, ending, gradients, low_latency_arguments, settings, sizes
from anyep.backends.base import CombineInput, LowLatencyInput, LowLatencyTokens, NormalOps, Payload
from anyep.calls import Call, Kind
from anyep.connection import NETWORKS, Options
from anyep.control.status import RankStatus
from anyep.errors import AnyEPError, BufferBroken, InvalidCall, NotSupported, PeerLost, whole_number
from anyep.events import EventHandle, EventOverlap
from anyep.modes.low_latency import LowLatencyMode
from anyep.modes.normal import Dispatch
from anyep.rendezvous import rendezvous_of
from anyep.session import Session
from anyep.sizes import Config, LowLatencySizes, token_layout

MAX_ROWS = 2**31 - 1
RANK_PREFIX, LAYOUT_RANGE = 0, 1
"""Parts of a normal-mode and of a low-latency handle."""
T = TypeVar("T")
Handle = tuple[torch.Tensor, ...]
LowLatencyHandle = low_latency_arguments.Handle
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


_generation = object()
"""Replaced by a new object in a forked child; reading the process id would cost a system call per call."""


def _mark_child() -> None:
    global _generation  # noqa: PLW0603 - the hook has no object to keep it in
    _generation = object()


os.register_at_fork(after_in_child=_mark_child)


class Buffer:
    """Communication between the ranks of a process group: dispatch tokens to experts, and combine them.

    The constructor is collective. A Buffer holds memory that the ranks share; calls on it are numbered, and
    every rank must make the same calls in the same order.

    `device`, `ranks_per_node`, `num_window_bytes` and `network` default to environment variables
    (docs/settings.md).
    """

    num_sms: ClassVar[int] = sizes.NUM_DEFAULT_SMS

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: float = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        device: str | torch.device | None = None,
        ranks_per_node: int | None = None,
        num_window_bytes: int | None = None,
        network: str | None = None,
    ) -> None:
        self.runtime: Session | None = None
        """What this Buffer owns; None after `destroy`."""
        self._last_handle: tuple[Handle, Any] | None = None
        self._unfilled: dict[int, EventHandle] = {}
        self._pid = os.getpid()
        self._generation = _generation
        self._is_made = False
        rendezvous = rendezvous_of(group, comm)
        self.group = group
        self.rank = rendezvous.rank
        self.group_size = rendezvous.num_ranks
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink

        def checked_options() -> Options:
            if ending.has_begun():
                raise InvalidCall("a Buffer cannot be made while the process ends")
            settings.warn_of_unknown_variables()
            chosen: dict[str, settings.Chosen[Any]] = {
                "device": settings.DEVICE.choose(None if device is None else str(device)),
                "ranks_per_node": settings.RANKS_PER_NODE.choose(ranks_per_node),
                "num_window_bytes": settings.NUM_WINDOW_BYTES.choose(num_window_bytes),
                "network": settings.NETWORK.choose(network),
                "timeout_s": settings.TIMEOUT_S.choose(),
            }
            try:
                self._device = _checked_device(device if device is not None else chosen["device"].value)
            except AnyEPError as error:
                raise chosen["device"].explain(error) from None
            if network not in (None, *NETWORKS):
                raise InvalidCall(
                    f"network is {network!r}: it must be {' or '.join(map(repr, NETWORKS))}, or left out"
                )
            window_bytes = chosen["num_window_bytes"].value
            return Options(
                self._device.type,
                arguments.check_num_bytes("num_nvl_bytes", num_nvl_bytes),
                arguments.check_num_bytes("num_rdma_bytes", num_rdma_bytes),
                bool(low_latency_mode),
                bool(enable_shrink),
                chosen["ranks_per_node"].value,
                None if window_bytes is None else arguments.check_num_bytes("num_window_bytes", window_bytes),
                chosen["network"].value,
                chosen["timeout_s"].value,
                {name: setting.source for name, setting in chosen.items()},
            )

        self.runtime = Session(group, rendezvous, checked_options)
        self.topology = self.runtime.topology
        """Which ranks are on which node."""
        self._is_made = True

    # Sizes and settings

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the number of SMs for calls without a config, on every Buffer of this process."""
        Buffer.num_sms = Config(new_num_sms).num_sms

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: FP8 data is always supported."""
        return True

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The tuned config for dispatch between `num_ranks` ranks."""
        return sizes.get_dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The tuned config for combine between `num_ranks` ranks."""
        return sizes.get_combine_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes for `num_rdma_bytes` that suffice for low-latency calls of these sizes."""
        return sizes.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    @staticmethod
    def capture() -> EventOverlap:
        """Record an event on the current stream."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> Any:
        """The communication stream. On the CPU a thread communicates, and the returned stream is unused."""
        if self._device.type == "cpu":
            return torch.cpu.current_stream()
        return self._check_usable().communication_stream

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """This rank's NVL (or RDMA) bytes as a tensor that starts at `offset` (in bytes)."""
        session = self._check_usable()
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        start = session.region.num_bytes + (self.num_nvl_bytes if use_rdma_buffer else 0)
        if not isinstance(dtype, torch.dtype):
            raise InvalidCall(f"dtype is {dtype!r}: it must be a torch.dtype")
        offset = whole_number("offset", offset, minimum=0)
        if offset > num_bytes or offset % dtype.itemsize:
            raise InvalidCall(
                f"offset is {offset}: it must be a multiple of {dtype.itemsize} in 0 to {num_bytes}"
            )
        if size is None:
            size = torch.Size([(num_bytes - offset) // dtype.itemsize])
        if not isinstance(size, tuple | list):
            raise InvalidCall(f"size is {size!r}: it must be a torch.Size")
        shape = tuple(whole_number("size", length, minimum=0) for length in size)
        wanted = math.prod(shape) * dtype.itemsize
        if wanted > num_bytes - offset:
            raise InvalidCall(
                f"size {list(shape)} takes {wanted} bytes, but only {num_bytes - offset} are there"
            )
        # It has its own storage, which may outlive the Buffer.
        lent: torch.Tensor = session.heap.lend(start + offset, (wanted,), torch.uint8, lambda: None)
        return lent.view(dtype).view(shape)

    def status(self) -> list[RankStatus]:
        """What every rank is doing, without waiting for any of them; `print(*buffer.status(), sep="\\n")`."""
        return self._check_usable().control.status()

    def __repr__(self) -> str:
        """The rank, place, sizes and state of the Buffer on one line; does not wait."""
        try:
            return f"<Buffer of {self._place()}; {self._extent()}; {self._state()}>"
        except Exception:
            # A Buffer whose constructor failed may have no rank, or sizes that are not numbers.
            return f"<Buffer that was not made, at {id(self):#x}>"

    def _place(self) -> str:
        nodes = self.topology.num_nodes
        place = f"rank {self.rank} of {self.group_size} on {self._device.type}"
        return place + (f", on {nodes} nodes" if nodes > 1 else ", on 1 node")

    def _extent(self) -> str:
        modes = "normal and low-latency modes" if self.low_latency_mode else "normal mode"
        masks = " with masks" if self.low_latency_mode and self.enable_shrink else ""
        return f"{self.num_nvl_bytes:,} NVL bytes, {self.num_rdma_bytes:,} RDMA bytes; {modes}{masks}"

    def _state(self) -> str:
        if self._generation is not _generation:
            return f"inherited from process {self._pid} by a forked child, which cannot use it"
        if self.runtime is None:
            return "destroyed" if self._is_made else "not made"
        error = self.runtime.control.first_error
        return "working" if error is None else f"broken: {ending.describe(error)}"

    # Normal mode

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count tokens per rank and per expert, and mark which token goes to which rank. No communication.

        In `topk_idx` -1 means "no expert"; any other id outside of the experts is refused. On a GPU a kernel
        checks the ids, and the next use of this Buffer raises the error.
        """
        session = self._check_usable()
        previous = arguments.check_events(previous_event, async_finish, allocate_on_comm_stream)
        arguments.check_devices(self._device, topk_idx=topk_idx)
        topk_idx = arguments.check_topk_idx(topk_idx, None)
        num_experts = arguments.check_num_experts(num_experts, self.group_size)
        session.control.check_works()
        layout = session.normal.ops.layout(topk_idx, num_experts, previous, async_finish)
        tokens_per_rank, tokens_per_node, tokens_per_expert, in_rank, event = layout
        if event is not None:
            self._fills_later(tokens_per_rank, event)
        return tokens_per_rank, tokens_per_node, tokens_per_expert, in_rank, EventOverlap(event)

    def dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """Send each token to every rank that holds one of its experts.

        Received rows are ordered by source rank, then source token. With a `handle` of an earlier dispatch
        the routing is taken from it and only x is sent; all ranks must pass the handles of one dispatch. In
        `topk_idx` -1 means "no expert"; any other id outside of the experts is refused.
        """
        session = self._check_usable()
        mode = session.normal
        if handle is not None:
            return self._cached_dispatch(
                session,
                x,
                handle,
                topk_idx,
                topk_weights,
                config,
                previous_event,
                async_finish,
                allocate_on_comm_stream,
            )
        call = session.control.begin(Kind.DISPATCH)

        def check() -> tuple[Dispatch, EventOverlap | None]:
            mode.ops.before(async_finish)
            previous = arguments.check_events(previous_event, async_finish, allocate_on_comm_stream)
            mode.ops.wait_until_readable(previous)
            arguments.check_devices(
                self._device,
                x=x,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_tokens_per_rank=num_tokens_per_rank,
                num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
                is_token_in_rank=is_token_in_rank,
                num_tokens_per_expert=num_tokens_per_expert,
            )
            gradients.warn_if_lost(x, topk_weights)
            payload = arguments.check_payload(x, topk_idx, topk_weights, mode.ops.source_bytes)
            default = mode.ops.default_config(self.get_dispatch_config(self.group_size))
            chosen = arguments.check_config(config, default, None)
            mode.check_rings(chosen, payload.token)
            counts = self._check_routing(
                mode.ops,
                payload,
                num_tokens_per_rank,
                num_tokens_per_rdma_rank,
                is_token_in_rank,
                num_tokens_per_expert,
                chosen,
            )
            worst = whole_number("num_worst_tokens", num_worst_tokens, 0)
            if worst > MAX_ROWS:
                raise InvalidCall(f"num_worst_tokens is {worst}: at most {MAX_ROWS} rows are possible")
            if worst and payload.topk_idx is None:
                raise InvalidCall("num_worst_tokens needs topk_idx: that is how padding rows are told apart")
            alignment = whole_number("expert_alignment", expert_alignment, 1)
            return Dispatch(payload, counts, chosen, worst, alignment), previous

        request, previous = self._refusing(session, call, check)
        received = mode.dispatch(call, request, previous, async_finish)
        rows = received.x if received.scales is None else (received.x, received.scales)
        new_handle = received.routing.tensors()
        self._last_handle = (new_handle, received.routing)
        if received.event is not None:
            self._fills_later(new_handle[0], received.event)
        return (
            rows,
            received.topk_idx,
            received.topk_weights,
            received.tokens_per_expert,
            new_handle,
            EventOverlap(received.event),
        )

    def _cached_dispatch(
        self,
        session: Session,
        x: Rows,
        handle: Handle,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        config: Config | None,
        previous_event: EventOverlap | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> tuple[Rows, None, None, None, None, EventOverlap]:
        mode = session.normal
        call = session.control.begin(Kind.CACHED_DISPATCH)

        def check() -> tuple[Payload, Any, Config, EventOverlap | None]:
            mode.ops.before(async_finish)
            previous = arguments.check_events(previous_event, async_finish, allocate_on_comm_stream)
            arguments.check_devices(self._device, x=x)
            if topk_idx is not None or topk_weights is not None:
                raise InvalidCall(
                    "a dispatch with a handle takes no top-k: they were sent with the first dispatch"
                )
            gradients.warn_if_lost(x)
            payload = arguments.check_payload(x, None, None, mode.ops.source_bytes)
            parts = self._routing_of(mode.ops, handle)
            if payload.num_tokens != parts.num_tokens:
                raise InvalidCall(
                    f"x has {payload.num_tokens} rows, but the handle was made for {parts.num_tokens}"
                )
            default = mode.ops.default_config(self.get_dispatch_config(self.group_size))
            chosen = arguments.check_config(config, default, parts.num_channels)
            mode.check_rings(chosen, payload.token)
            return payload, parts, chosen, previous

        payload, parts, chosen, previous = self._refusing(session, call, check)
        received = mode.cached_dispatch(call, payload, parts, chosen, previous, async_finish)
        rows = received.x if received.scales is None else (received.x, received.scales)
        return rows, None, None, None, None, EventOverlap(received.event)

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Add up each token's rows at its source: in float32, biases first, ranks ascending, rounded once.

        All ranks must pass the handles of one dispatch.
        """
        session = self._check_usable()
        mode = session.normal
        call = session.control.begin(Kind.COMBINE)

        def check() -> tuple[CombineInput, EventOverlap | None]:
            mode.ops.before(async_finish)
            previous = arguments.check_events(previous_event, async_finish, allocate_on_comm_stream)
            arguments.check_devices(self._device, x=x, topk_weights=topk_weights, bias=bias)
            gradients.warn_if_lost(x, topk_weights, bias)
            rows = arguments.check_x("x", x, arguments.FLOAT_DTYPES)
            parts = self._routing_of(mode.ops, handle)
            if rows.shape[0] != parts.num_recv_rows:
                raise InvalidCall(
                    f"x has {rows.shape[0]} rows, but the handle's dispatch gave {parts.num_recv_rows}"
                )
            weights = topk_weights
            if weights is not None:
                weights = arguments.check_tensor(
                    "topk_weights", weights, (torch.float32,), (rows.shape[0], "top-k")
                )
                if not 1 <= weights.shape[1] <= sizes.NUM_MAX_TOPK:
                    raise InvalidCall(
                        f"topk_weights has {weights.shape[1]} columns: it must be 1 to {sizes.NUM_MAX_TOPK}"
                    )
                weights = weights.contiguous()
            biases = arguments.check_biases(bias, (parts.num_tokens, rows.shape[1]), rows.dtype)
            default = mode.ops.default_config(self.get_combine_config(self.group_size))
            chosen = arguments.check_config(config, default, parts.num_channels)
            num_topk = weights.shape[1] if weights is not None else 0
            token = token_layout(rows.shape[1] * rows.element_size(), 0, num_topk)
            mode.check_rings(chosen, token)
            return CombineInput(rows, parts, weights, biases, chosen), previous

        request, previous = self._refusing(session, call, check)
        combined = mode.combine(call, request, previous, async_finish)
        return combined.x, combined.topk_weights, EventOverlap(combined.event)

    def internode_dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """`dispatch` with a required config."""
        self._check_config_is_given(Kind.DISPATCH if handle is None else Kind.CACHED_DISPATCH, config)
        return self.dispatch(
            x,
            handle,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    def internode_combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """`combine` with a required config."""
        self._check_config_is_given(Kind.COMBINE, config)
        return self.combine(
            x,
            handle,
            topk_weights,
            bias,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    # Low-latency mode

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Send each token to each of its experts; received rows are packed by expert, in a fixed order.

        In `topk_idx` -1 means "no expert"; any other id outside of the experts is refused. With
        `return_recv_hook` the call only sends, and the hook that it returns receives. At most two calls may
        be in flight.
        """
        session, mode = self._check_low_latency()
        call = mode.begin(Kind.LOW_LATENCY_DISPATCH)

        def check() -> LowLatencyTokens:
            self._before_low_latency(session, mode, async_finish)
            low_latency_arguments.check_not_both(async_finish, return_recv_hook)
            arguments.check_devices(
                self._device,
                x=x,
                topk_idx=topk_idx,
                cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
                dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            )
            gradients.warn_if_lost(x)
            return low_latency_arguments.check_tokens(
                mode,
                self.group_size,
                x,
                topk_idx,
                num_max_dispatch_tokens_per_rank,
                num_experts,
                cumulative_local_expert_recv_stats,
                dispatch_wait_recv_cost_stats,
                use_fp8,
                round_scale,
                use_ue8m0,
            )

        tokens = self._refusing(session, call, check, mode.refuse)
        received, sent = mode.dispatch(call, tokens, async_finish, return_recv_hook)
        if sent.event is not None:
            self._fills_later(received.layout_range, sent.event)
        handle = (
            received.src_info,
            received.layout_range,
            tokens.sizes.num_max_tokens,
            tokens.sizes.hidden,
            tokens.sizes.num_experts,
        )
        rows = received.x if received.scales is None else (received.x, received.scales)
        return rows, received.counts, handle, EventOverlap(sent.event), sent.hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Add up each token's rows at its source: weighted, in float32, in top-k order, rounded once.

        `topk_idx` is that of the dispatch; -1 means "no expert".
        """
        session, mode = self._check_low_latency()
        call = mode.begin(Kind.LOW_LATENCY_COMBINE)

        def check() -> LowLatencyInput:
            self._before_low_latency(session, mode, async_finish)
            low_latency_arguments.check_not_both(async_finish, return_recv_hook)
            arguments.check_devices(
                self._device,
                x=x,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                out=out,
                combine_wait_recv_cost_stats=combine_wait_recv_cost_stats,
            )
            gradients.warn_if_lost(x, topk_weights)
            self._wait_until_handle_is_filled(handle, LAYOUT_RANGE)
            outputs = low_latency_arguments.check_outputs(
                mode,
                self.group_size,
                x,
                topk_idx,
                topk_weights,
                handle,
                use_logfmt,
                zero_copy,
                out,
                combine_wait_recv_cost_stats,
                self._device,
            )
            if zero_copy:
                mode.check_was_lent(call, outputs.sizes)
            return outputs

        outputs = self._refusing(session, call, check, mode.refuse)
        combined, sent = mode.combine(call, outputs, async_finish, return_recv_hook)
        return combined, EventOverlap(sent.event), sent.hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """The tensor to fill with rows before a `low_latency_combine` with `zero_copy`, the next call."""
        _, mode = self._check_low_latency()
        self._wait_until_handle_is_filled(handle, LAYOUT_RANGE)
        parts = low_latency_arguments.check_handle(mode, self.group_size, handle, self._device)
        return mode.next_combine_buffer(parts.sizes)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Lay out the slots for calls of these sizes; every rank calls it, with nothing in flight."""
        session, mode = self._check_low_latency()
        call = mode.begin(Kind.CLEAN)

        def check() -> LowLatencySizes:
            self._before_low_latency(session, mode, False)
            mode.check_nothing_in_flight()
            checked = low_latency_arguments.check_sizes(
                num_max_dispatch_tokens_per_rank, hidden, num_experts, self.group_size
            )
            mode.check_room(checked)
            return checked

        mode.clean(call, self._refusing(session, call, check, mode.refuse))

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank (`mask=True`), or unmask it; to unmask, all ranks make this call, that rank included.

        Masked ranks that are not being unmasked must not make this call.
        """
        session, mode = self._check_shrinking()
        session.control.check_works()
        try:
            rank = whole_number("rank_to_mask", rank_to_mask, minimum=0)
            if rank >= self.group_size:
                raise InvalidCall(
                    f"rank_to_mask is {rank}: there are {self.group_size} ranks, counted from 0"
                )
        except InvalidCall:
            if not mask:
                mode.masks.refuse_round()
            raise
        if mask:
            mode.masks.mask([rank], "it was masked by a call")
            return
        mode.unmask([rank])
        if mode.masks.masked[rank]:
            raise PeerLost(f"rank {rank} did not come back in time, and stays masked; the others can go on")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each rank that is masked, and 0 for the others."""
        _, mode = self._check_shrinking()
        arguments.check_devices(self._device, mask_status=mask_status)
        status = arguments.check_tensor("mask_status", mask_status, (torch.int32,), (self.group_size,))
        mode.masks.adopt()
        status.copy_(torch.from_numpy(mode.masks.masked))

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask every masked rank that is alive; all ranks make this call. Dead ranks stay masked."""
        session, mode = self._check_shrinking()
        session.control.check_works()
        mode.unmask(range(self.group_size))

    def _check_low_latency(self) -> tuple[Session, LowLatencyMode]:
        session = self._check_usable()
        if session.low_latency is None:
            raise InvalidCall("this Buffer has no low-latency mode: make it with low_latency_mode=True")
        return session, session.low_latency

    def _before_low_latency(self, session: Session, mode: LowLatencyMode, run_async: bool) -> None:
        """Raise errors of earlier calls."""
        session.normal.ops.before(run_async)
        mode.listen()

    def _check_shrinking(self) -> tuple[Session, LowLatencyMode]:
        found = self._check_low_latency()
        if not self.enable_shrink:
            raise InvalidCall("this Buffer has no masks: make it with enable_shrink=True")
        return found

    # The end

    def destroy(self) -> None:
        """Release what the Buffer holds; every rank calls it. Peers that still wait for this rank raise.

        Asynchronous calls that are under way are finished first. Results stay valid.
        """
        session = self.runtime
        if session is None:
            return
        if self._generation is not _generation:
            self.runtime = None
            return
        session.check_can_close()
        self.runtime = self._last_handle = None
        free_what_died = session.close()
        del session  # the last reference
        free_what_died()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self.runtime is not None and self._generation is _generation:
            # After an error: report it to the peers, and do not wait for calls whose peers may never arrive.
            try:
                self.runtime.leave(error)
            finally:
                self.destroy()
        else:
            self.destroy()

    def __del__(self) -> None:
        session: Session | None = getattr(self, "runtime", None)
        if (
            sys.is_finalizing()
            or ending.has_begun()
            or session is None
            or self._generation is not _generation
        ):
            return
        if self.explicitly_destroy:
            warnings.warn(
                "a Buffer made with explicitly_destroy=True was dropped without destroy()", stacklevel=1
            )
        if session.is_idle:
            del session
            self.destroy()
        else:
            # The last calls may be waiting for this very rank.
            self.runtime = None
            session.close_later()

    # Helpers

    def _fills_later(self, tensor: torch.Tensor, event: EventHandle) -> None:
        """Remember that a result is not complete: a later call that reads it synchronously must wait."""
        if event.finished is None:
            # On a GPU a kernel reads it, in stream order.
            return
        self._unfilled = {at: other for at, other in self._unfilled.items() if not other.is_finished}
        self._unfilled[tensor.data_ptr()] = event

    def _wait_until_filled(self, tensor: Any) -> None:
        if self._unfilled and isinstance(tensor, torch.Tensor):
            event = self._unfilled.pop(tensor.data_ptr(), None)
            if event is not None:
                event.current_stream_wait()

    def _wait_until_handle_is_filled(self, handle: Any, part: int) -> None:
        """Wait for the asynchronous dispatch that fills a handle; waiting for one part covers all parts."""
        if isinstance(handle, tuple | list) and len(handle) > part:
            self._wait_until_filled(handle[part])

    def _routing_of(self, ops: NormalOps, handle: Any) -> Any:
        """The routing of a handle."""
        self._wait_until_handle_is_filled(handle, RANK_PREFIX)
        return ops.routing_of(handle, self._last_handle)

    def _check_usable(self) -> Session:
        if self.runtime is None:
            raise BufferBroken("this Buffer was destroyed: make a new one")
        if self._generation is not _generation:
            raise BufferBroken(
                f"this Buffer belongs to process {self._pid}: a forked child must make its own"
            )
        return self.runtime

    def _refusing(
        self,
        session: Session,
        call: Call,
        check: Callable[[], T],
        refuse: Callable[[Call, AnyEPError], None] | None = None,
    ) -> T:
        """Check a call's arguments; if they are wrong, notify the peers before this rank raises."""
        try:
            return check()
        except Exception as error:
            reason = (
                error if isinstance(error, AnyEPError) else InvalidCall(f"{type(error).__name__}: {error}")
            )
            try:
                (refuse or session.normal.ops.refuse)(call, reason)
            except BaseException as worse:
                session.control.fail(call, worse)
                raise
            raise
        except BaseException as error:
            session.control.fail(call, error)
            raise

    def _check_config_is_given(self, kind: Kind, config: Config | None) -> None:
        """Refuse a call without a config; like any refused call it has a number and is told to the peers."""
        session = self._check_usable()
        if config is None:

            def refuse() -> None:
                name = "get_combine_config" if kind is Kind.COMBINE else "get_dispatch_config"
                raise InvalidCall(f"config is missing: pass one, such as Buffer.{name}({self.group_size})")

            self._refusing(session, session.control.begin(kind), refuse)

    def _check_routing(
        self,
        ops: NormalOps,
        payload: Payload,
        num_tokens_per_rank: Any,
        num_tokens_per_rdma_rank: Any,
        is_token_in_rank: Any,
        num_tokens_per_expert: Any,
        config: Config,
    ) -> Any:
        for name, value in (
            ("num_tokens_per_rank", num_tokens_per_rank),
            ("is_token_in_rank", is_token_in_rank),
            ("num_tokens_per_expert", num_tokens_per_expert),
        ):
            if value is None:
                raise InvalidCall(f"{name} is missing: pass what get_dispatch_layout returned, or a handle")
        self._wait_until_filled(num_tokens_per_rank)
        ranks, tokens = self.group_size, payload.num_tokens
        per_rank = arguments.check_tensor(
            "num_tokens_per_rank", num_tokens_per_rank, (torch.int32,), (ranks,)
        )
        in_rank = arguments.check_tensor("is_token_in_rank", is_token_in_rank, (torch.bool,), (tokens, ranks))
        per_expert = arguments.check_tensor(
            "num_tokens_per_expert", num_tokens_per_expert, (torch.int32,), ("experts",)
        )
        per_rank, in_rank, per_expert = per_rank.contiguous(), in_rank.contiguous(), per_expert.contiguous()
        arguments.check_num_experts(per_expert.shape[0], ranks)
        return ops.counts_of(
            payload, in_rank, per_rank, num_tokens_per_rdma_rank, per_expert, config.num_channels
        )


def _checked_device(device: str | torch.device | None) -> torch.device:
    """The device of a Buffer: by default the current GPU, if there is one. Torch's default device is meant
    for the program's own tensors and is ignored."""
    try:
        wanted = torch.device(
            device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        )
    except (RuntimeError, TypeError):
        raise InvalidCall(f"device is {device!r}: pass device='cpu' or device='cuda'") from None
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise NotSupported(f"device is {str(device)!r}: AnyEP works on 'cpu' and 'cuda'")
    if not torch.cuda.is_available():
        raise NotSupported("device is 'cuda', but torch finds no GPU here: pass device='cpu'")
    if find_spec("triton") is None:
        raise NotSupported("kernels for GPUs are compiled by Triton, which is missing: pip install triton")
    if torch.cuda.is_current_stream_capturing():
        raise InvalidCall("a Buffer cannot be made while a CUDA graph is captured: make it before")
    current = torch.cuda.current_device()
    if wanted.index not in (None, current):
        raise InvalidCall(
            f"device is {str(wanted)!r}, but the current device is {current}:"
            f" call torch.cuda.set_device({wanted.index}) first"
        )
    return torch.device("cuda", current)
