"""`Buffer`, the API of DeepEP V1. It checks arguments, calls the session's modes and returns the documented
tuples.

    with Buffer(group, num_nvl_bytes=1 << 24) as buffer:
        layout = buffer.get_dispatch_layout(topk_idx, num_experts)
        ...
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar

import torch

from anyep.requirements import check_requirements

check_requirements()

# ruff: noqa: E402 - the imports below need a torch that is new enough
from anyep import ending, sizes
from anyep.api import arguments, options
from anyep.api.arguments import check_events
from anyep.api.low_latency_arguments import Handle as LowLatencyHandle
from anyep.api.low_latency_arguments import LowLatencyArguments
from anyep.api.normal_arguments import AT_ONCE, Handle, Layout, NormalArguments, Streams
from anyep.api.unfilled import Unfilled
from anyep.backends.base import Rows
from anyep.backends.low_latency import LowLatencyResults
from anyep.connection import Options
from anyep.control.status import RankStatus
from anyep.core.calls import Kind
from anyep.errors import BufferBroken, InvalidCall, PeerLost, whole_number
from anyep.events import EventHandle, EventOverlap
from anyep.join.rendezvous import rendezvous_of
from anyep.modes.low_latency import LowLatencyMode, Sent
from anyep.modes.normal import Dispatched
from anyep.session import Session
from anyep.sizes import Config, LowLatencySizes

_generation = object()
"""Replaced by a new object in a forked child; reading the process id would cost a system call per call."""


def _mark_child() -> None:
    global _generation  # noqa: PLW0603 - the hook has no object to keep it in
    _generation = object()


os.register_at_fork(after_in_child=_mark_child)


class Buffer:
    """Communication between the ranks of a process group: dispatch tokens to experts, and combine them.

    The constructor is collective. A Buffer holds memory that the ranks share; calls on it are numbered, and
    every rank must make the same calls in the same order. A Buffer is a context manager: `destroy` is called
    at the end of the block.

    Args:
        group: The process group of the ranks. Gloo is enough, also for GPUs.
        num_nvl_bytes: Bytes for the rings of normal mode within a node, a multiple of 128. Rows that fit a
            window need no ring; rings shrink to what fits, down to 2 rows.
        num_rdma_bytes: Bytes for the rings between nodes, or for the slots of low-latency mode
            (`get_low_latency_rdma_size_hint`); a multiple of 128.
        low_latency_mode: Whether low-latency calls can be made.
        num_qps_per_rank: Accepted and ignored: a hint for hardware.
        allow_nvlink_for_low_latency_mode: Accepted and ignored, like the next two.
        allow_mnnvl: Accepted and ignored.
        use_fabric: Accepted and ignored.
        explicitly_destroy: Warn if the Buffer is dropped without a call of `destroy`.
        enable_shrink: Whether low-latency calls go on without ranks that do not answer (masks).
        comm: An mpi4py communicator, instead of `group`.
        device: "cpu" or "cuda"; by default CUDA where there is a GPU.
        ranks_per_node: Makes virtual nodes of so many ranks; by default nodes are the hosts.
        num_window_bytes: Bytes of the windows that results lie in. By default they grow to what calls need,
            up to a quarter of the memory that is free now; 0 means rings only.
        network: The engine between nodes, "nixl" or "loopback"; by default what reaches the other ranks.
        heap: Where ranks on GPUs keep what they share: in memory of the GPUs ("device"), or of the host
            ("host"), where there are no windows. By default ("auto") the host's if some GPU cannot reach
            another one's memory.

    `device`, `ranks_per_node`, `num_window_bytes`, `network` and `heap` default to environment variables
    (docs/settings.md) first.
    """

    num_sms: ClassVar[int] = sizes.NUM_DEFAULT_SMS
    _api: ClassVar[str] = "Buffer"
    """The class that users made, as messages name it."""
    _timeout_s: float | None = None

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
        heap: str | None = None,
    ) -> None:
        self.runtime: Session | None = None
        """What this Buffer owns; None after `destroy`."""
        self._unfilled = Unfilled()
        self._repeats = False
        """Whether calls like earlier ones are made with less work."""
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

        given = options.Given(
            num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode,
            enable_shrink,
            device,
            ranks_per_node,
            num_window_bytes,
            network,
            heap,
            self._api,
            self._timeout_s,
        )

        def chosen_options() -> Options:
            self._device, chosen = options.chosen_options(given)
            return chosen

        self.runtime = session = Session(group, rendezvous, chosen_options)
        self._normal: NormalArguments | None = NormalArguments(
            session.normal, self._device, self.group_size, self._unfilled
        )
        self._low_latency: LowLatencyArguments | None = None
        if session.low_latency is not None:
            self._low_latency = LowLatencyArguments(
                session.low_latency,
                self._device,
                self.group_size,
                self._unfilled,
                session.before_low_latency,
                session.is_quiet,
            )
        self._repeats = self._device.type == "cuda"
        self.topology = session.topology
        """Which ranks are on which node."""
        self._is_made = True

    # Sizes and settings

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the number of SMs for calls without a config, on every Buffer of this process.

        Args:
            new_num_sms: An even number, two per channel.
        """
        Buffer.num_sms = Config(new_num_sms).num_sms

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: FP8 data is always supported."""
        return True

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The tuned config for dispatch between `num_ranks` ranks.

        Args:
            num_ranks: The ranks of the group; any number.
        """
        return sizes.get_dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The tuned config for combine between `num_ranks` ranks.

        Args:
            num_ranks: The ranks of the group; any number.
        """
        return sizes.get_combine_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes for `num_rdma_bytes` that suffice for low-latency calls of these sizes.

        Args:
            num_max_dispatch_tokens_per_rank: The most tokens that a rank passes to one call.
            hidden: Values per token.
            num_ranks: The ranks of the group.
            num_experts: The experts of all ranks together.
        """
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
        return self._check_usable()[0].communication_stream

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """This rank's NVL (or RDMA) bytes as a tensor that starts at `offset` (in bytes).

        Args:
            dtype: The tensor's dtype.
            size: The tensor's shape; by default one dimension, up to the end of the bytes.
            offset: Bytes before the tensor, a multiple of the size of a value.
            use_rdma_buffer: Take the RDMA bytes instead of the NVL bytes.
        """
        session, _ = self._check_usable()
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
        return self._check_usable()[0].control.status()

    def __repr__(self) -> str:
        """The rank, place, sizes and state of the Buffer on one line; does not wait."""
        try:
            return f"<{self._api} of {self._place()}; {self._extent()}; {self._state()}>"
        except Exception:
            # A Buffer whose constructor failed may have no rank, or sizes that are not numbers.
            return f"<{self._api} that was not made, at {id(self):#x}>"

    def _place(self) -> str:
        nodes = self.topology.num_nodes
        place = f"rank {self.rank} of {self.group_size} on {self._device.type}"
        return place + (f", on {nodes} nodes" if nodes > 1 else ", on 1 node")

    def _extent(self) -> str:
        modes = "normal and low-latency modes" if self.low_latency_mode else "normal mode"
        masks = " with masks" if self.low_latency_mode and self.enable_shrink else ""
        is_on_host = self.runtime is not None and self.runtime.is_heap_on_host
        where = " in memory of the host" if is_on_host else ""
        return f"{self.num_nvl_bytes:,} NVL bytes, {self.num_rdma_bytes:,} RDMA bytes{where}; {modes}{masks}"

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

        Args:
            topk_idx: int64 [tokens, top-k], the experts of each token. -1 means "no expert"; any other id
                outside of the experts is refused. On a GPU a kernel checks the ids, and the next use of this
                Buffer raises the error.
            num_experts: The experts of all ranks together, a multiple of the number of ranks.
            previous_event: The event after which the call begins; by default it follows the current stream.
            async_finish: Return at once, with an event to wait for.
            allocate_on_comm_stream: Allocate results on the communication stream. Needs a `previous_event`
                and `async_finish`.

        Returns:
            Tokens per rank (int32 [ranks]; a token counts once per rank), per node (int32 [nodes]; None on
            one node) and per expert (int32 [num_experts]), which token goes to which rank (bool [tokens,
            ranks]), and an event.
        """
        session, checks = self._check_usable()
        previous = None
        if previous_event is not None or allocate_on_comm_stream:
            previous = check_events(previous_event, async_finish, allocate_on_comm_stream)
        topk_idx, num_experts = checks.layout(topk_idx, num_experts)
        session.control.check_works()
        layout = session.normal.ops.layout(topk_idx, num_experts, previous, async_finish)
        tokens_per_rank, tokens_per_node, tokens_per_expert, in_rank, event = layout
        if event is not None:
            self._unfilled.add(tokens_per_rank, event)
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

        Received rows are ordered by source rank, then source token.

        Args:
            x: Rows [tokens, hidden] of bfloat16, float16, float32 or 1-byte data; or a pair of 1-byte data
                and its scales ([tokens, scales], float32 or int32).
            handle: That of an earlier dispatch: its routing is used again and only x is sent. All ranks must
                pass the handles of one dispatch, and neither a layout nor top-k.
            num_tokens_per_rank: From `get_dispatch_layout`, like the next three.
            num_tokens_per_rdma_rank: Needed between nodes.
            is_token_in_rank: Which token goes to which rank.
            num_tokens_per_expert: Tokens per expert, of all experts.
            topk_idx: int64 [tokens, top-k]; -1 means "no expert", any other id outside of the experts is
                refused. May be left out, together with `topk_weights`.
            topk_weights: float32 [tokens, top-k].
            expert_alignment: Counts per expert are rounded up to a multiple of this.
            num_worst_tokens: If above 0, exactly so many rows are returned, and the host does not wait for
                counts: needed in a CUDA graph. Needs `topk_idx`, which is -1 in rows that are not in use.
            config: SMs and chunk sizes; by default `get_dispatch_config`.
            previous_event: The event after which the call begins; by default it follows the current stream.
            async_finish: Return at once, with an event to wait for.
            allocate_on_comm_stream: Allocate results on the communication stream. Needs a `previous_event`
                and `async_finish`.

        Returns:
            Received rows (a pair if x is one); local expert ids (-1: of another rank) and weights of each
            row; the number of tokens of each local expert; the handle; and an event. With a `handle` all but
            rows and event are None.
        """
        session, checks = self._check_usable()
        mode, streams = session.normal, (previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            if self._repeats and streams == AT_ONCE and topk_idx is None and topk_weights is None:
                again = checks.dispatch_again(x, handle, config, self.get_dispatch_config)
                if again is not None:
                    return again, None, None, None, None, EventOverlap()
            call = session.control.begin(Kind.CACHED_DISPATCH)
            try:
                cached, previous = checks.cached_dispatch(
                    x, handle, topk_idx, topk_weights, config, self.get_dispatch_config, Streams(*streams)
                )
            except BaseException as error:
                session.refuse(call, error, mode.ops.refuse)
                raise
            received = mode.cached_dispatch(call, *cached, previous, async_finish)
            rows = received.x if received.scales is None else (received.x, received.scales)
            return rows, None, None, None, None, EventOverlap(received.event)
        layout = Layout(
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert
        )
        dispatched: Dispatched[Any] | None = None
        if self._repeats and streams == AT_ONCE and type(num_worst_tokens) is int and num_worst_tokens == 0:
            dispatched = checks.counted_again(
                x, topk_idx, topk_weights, layout, expert_alignment, config, self.get_dispatch_config
            )
        if dispatched is None:
            call = session.control.begin(Kind.DISPATCH)
            try:
                request, previous = checks.dispatch(
                    x,
                    topk_idx,
                    topk_weights,
                    layout,
                    expert_alignment,
                    num_worst_tokens,
                    config,
                    self.get_dispatch_config,
                    Streams(*streams),
                )
            except BaseException as error:
                session.refuse(call, error, mode.ops.refuse)
                raise
            dispatched = mode.dispatch(call, request, previous, async_finish)
        rows = dispatched.x if dispatched.scales is None else (dispatched.x, dispatched.scales)
        new_handle = dispatched.routing.tensors()
        checks.remember(new_handle, dispatched.routing)
        if dispatched.event is not None:
            self._unfilled.add(new_handle[0], dispatched.event)
        return (
            rows,
            dispatched.topk_idx,
            dispatched.topk_weights,
            dispatched.tokens_per_expert,
            new_handle,
            EventOverlap(dispatched.event),
        )

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

        Args:
            x: The experts' rows, one for each row that the dispatch gave.
            handle: That of the dispatch; all ranks must pass the handles of one dispatch.
            topk_weights: float32 [rows, top-k], added up for each token and top-k slot; may be left out.
            bias: One or two tensors [tokens, hidden] of the dtype of x that the sums start from.
            config: SMs and chunk sizes; by default `get_combine_config`.
            previous_event: The event after which the call begins; by default it follows the current stream.
            async_finish: Return at once, with an event to wait for.
            allocate_on_comm_stream: Allocate results on the communication stream. Needs a `previous_event`
                and `async_finish`.

        Returns:
            The sums [tokens, hidden], the sums of weights (None without `topk_weights`), and an event.
        """
        session, checks = self._check_usable()
        mode, streams = session.normal, (previous_event, async_finish, allocate_on_comm_stream)
        if self._repeats and streams == AT_ONCE and topk_weights is None and bias is None:
            again = checks.combine_again(x, handle, config, self.get_combine_config)
            if again is not None:
                return again, None, EventOverlap()
        call = session.control.begin(Kind.COMBINE)
        try:
            request, previous = checks.combine(
                x, handle, topk_weights, bias, config, self.get_combine_config, Streams(*streams)
            )
        except BaseException as error:
            session.refuse(call, error, mode.ops.refuse)
            raise
        combined = mode.combine(call, request, previous, async_finish)
        return combined.x, combined.topk_weights, EventOverlap(combined.event)

    def get_combine_buffer(
        self, handle: Handle, hidden: int, dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        """Uninitialised memory for the experts' outputs, where `combine` reads them without a copy.

        A combine of rows in other memory first copies those that other ranks read. If no window has room,
        the result is in other memory, and works the same way. It is an ordinary tensor: it may be used for
        several combines, or for none, and is freed when it and its views are gone. On a GPU the current
        stream waits for the earlier calls of this Buffer: call it before those that are to overlap.

        Args:
            handle: That of the dispatch; it says how many rows there are.
            hidden: The values of a row.
            dtype: bfloat16, float16 or float32.

        Returns:
            A tensor [received rows, hidden].
        """
        session, checks = self._check_usable()
        session.control.check_works()
        rows = session.normal.ops.outputs(checks.outputs(handle, hidden, dtype), dtype)
        # Not a view for autograd, so that it may be written in place with gradients.
        return rows.detach()

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
        """`dispatch`, with the same arguments; the config is required."""
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
        """`combine`, with the same arguments; the config is required."""
        self._check_config_is_given(Kind.COMBINE, config)
        return self.combine(
            x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream
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

        At most two low-latency calls may be in flight.

        Args:
            x: bfloat16 [tokens, hidden].
            topk_idx: int64 [tokens, top-k]; -1 means "no expert", any other id outside of the experts is
                refused.
            num_max_dispatch_tokens_per_rank: The most tokens of any rank; the same on all ranks.
            num_experts: The experts of all ranks together.
            cumulative_local_expert_recv_stats: int32 [local experts]; the received tokens are added to it.
            dispatch_wait_recv_cost_stats: int64 [ranks]; the ns waited for each rank are added to it.
            use_fp8: Cast rows to float8 (e4m3fn), with a scale for each 128 values.
            round_scale: Round scales up to powers of two.
            use_ue8m0: Return scales as exponents, 4 in an int32. Needs `round_scale`.
            async_finish: Return at once, with an event to wait for.
            return_recv_hook: Only send; the hook that is returned receives.

        Returns:
            Rows [local experts, ranks * num_max_dispatch_tokens_per_rank, hidden] (with FP8 a pair of data
            and scales); the number of rows of each local expert; the handle for the combine; an event; and
            the hook, or None.
        """
        session, mode, checks = self._check_low_latency()
        fp8 = use_fp8, round_scale, use_ue8m0
        if self._repeats and not async_finish:
            stats = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
            numbers = num_max_dispatch_tokens_per_rank, num_experts
            again = checks.dispatch_again(x, topk_idx, *numbers, *stats, fp8, return_recv_hook)
            if again is not None:
                return _dispatched_in_slots(*again)
        call = mode.begin(Kind.LOW_LATENCY_DISPATCH)
        try:
            tokens = checks.dispatch(
                x,
                topk_idx,
                num_max_dispatch_tokens_per_rank,
                num_experts,
                cumulative_local_expert_recv_stats,
                dispatch_wait_recv_cost_stats,
                fp8,
                async_finish,
                return_recv_hook,
            )
        except BaseException as error:
            session.refuse(call, error, mode.refuse)
            raise
        received, sent = mode.dispatch(call, tokens, async_finish, return_recv_hook)
        if sent.event is not None:
            self._unfilled.add(received.layout_range, sent.event)
        return _dispatched_in_slots(received, sent, tokens.sizes)

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

        Args:
            x: The experts' rows, bfloat16, in the shape of the rows that the dispatch gave.
            topk_idx: That of the dispatch; -1 means "no expert".
            topk_weights: float32 [tokens, top-k].
            handle: That of the dispatch.
            use_logfmt: Send rows in 10 bits per value, on a logarithmic scale.
            zero_copy: The rows are in the tensor of `get_next_low_latency_combine_buffer`, not in x.
            async_finish: Return at once, with an event to wait for.
            return_recv_hook: Only send; the hook that is returned receives.
            out: bfloat16 [tokens, hidden], written in place; by default a new tensor.
            combine_wait_recv_cost_stats: int64 [ranks]; the ns waited for each rank are added to it.

        Returns:
            The sums [tokens, hidden], an event, and the hook, or None.
        """
        session, mode, checks = self._check_low_latency()
        formats = use_logfmt, zero_copy
        if self._repeats and not async_finish:
            parts = x, topk_idx, topk_weights, handle
            stats = combine_wait_recv_cost_stats
            again = checks.combine_again(*parts, formats, out, stats, return_recv_hook)
            if again is not None:
                return again[0], EventOverlap(), again[1].hook
        call = mode.begin(Kind.LOW_LATENCY_COMBINE)
        try:
            outputs = checks.combine(
                call,
                x,
                topk_idx,
                topk_weights,
                handle,
                formats,
                out,
                combine_wait_recv_cost_stats,
                async_finish,
                return_recv_hook,
            )
        except BaseException as error:
            session.refuse(call, error, mode.refuse)
            raise
        combined, sent = mode.combine(call, outputs, async_finish, return_recv_hook)
        return combined, EventOverlap(sent.event), sent.hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """The tensor to fill with rows before a `low_latency_combine` with `zero_copy`, the next call.

        Args:
            handle: That of the dispatch.
        """
        _, mode, checks = self._check_low_latency()
        return mode.next_combine_buffer(checks.handle(handle).sizes)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Lay out the slots for calls of these sizes; every rank calls it, with nothing in flight.

        Args:
            num_max_dispatch_tokens_per_rank: The most tokens of any rank.
            hidden: The values of a row.
            num_experts: The experts of all ranks together.
        """
        session, mode, checks = self._check_low_latency()
        call = mode.begin(Kind.CLEAN)
        try:
            new_sizes = checks.clean(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        except BaseException as error:
            session.refuse(call, error, mode.refuse)
            raise
        mode.clean(call, new_sizes)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank (`mask=True`), or unmask it; to unmask, all ranks make this call, that rank included.

        Masked ranks that are not being unmasked must not make this call.

        Args:
            rank_to_mask: The rank.
            mask: Whether calls go on without it from now on.
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
        """Write 1 for each rank that is masked, and 0 for the others.

        Args:
            mask_status: int32 [ranks], written in place.
        """
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

    def _check_low_latency(self) -> tuple[Session, LowLatencyMode, LowLatencyArguments]:
        session, checks = self.runtime, self._low_latency
        if session is None or checks is None or self._generation is not _generation:
            self._check_usable()
            raise InvalidCall("this Buffer has no low-latency mode: make it with low_latency_mode=True")
        assert session.low_latency is not None
        return session, session.low_latency, checks

    def _check_shrinking(self) -> tuple[Session, LowLatencyMode]:
        session, mode, _ = self._check_low_latency()
        if not self.enable_shrink:
            raise InvalidCall("this Buffer has no masks: make it with enable_shrink=True")
        return session, mode

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
        self.runtime = self._normal = self._low_latency = None
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
                f"{options.with_article(self._api)} made with explicitly_destroy=True was dropped without"
                " destroy()",
                stacklevel=1,
            )
        if session.is_idle:
            del session
            self.destroy()
        else:
            # The last calls may be waiting for this very rank.
            self.runtime = None
            session.close_later()

    # Helpers

    def _check_usable(self) -> tuple[Session, NormalArguments]:
        if self.runtime is None or self._normal is None:
            raise BufferBroken(f"this {self._api} was destroyed: make a new one")
        if self._generation is not _generation:
            raise BufferBroken(
                f"this {self._api} belongs to process {self._pid}: a forked child must make its own"
            )
        return self.runtime, self._normal

    def _check_config_is_given(self, kind: Kind, config: Config | None) -> None:
        """Refuse a call without a config; like any refused call it has a number and is told to the peers."""
        session, _ = self._check_usable()
        if config is None:
            name = "get_combine_config" if kind is Kind.COMBINE else "get_dispatch_config"
            try:
                raise InvalidCall(f"config is missing: pass one, such as Buffer.{name}({self.group_size})")
            except InvalidCall as error:
                session.refuse(session.control.begin(kind), error, session.normal.ops.refuse)
                raise


def _dispatched_in_slots(
    received: LowLatencyResults, sent: Sent, sizes: LowLatencySizes
) -> tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
    """What a low-latency dispatch returns."""
    x, scales, counts, src_info, layout_range = received
    handle = src_info, layout_range, sizes.num_max_tokens, sizes.hidden, sizes.num_experts
    return x if scales is None else (x, scales), counts, handle, EventOverlap(sent.event), sent.hook
