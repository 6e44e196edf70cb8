"""`ElasticBuffer`, the API of DeepEP V2, over the session and modes of `Buffer`.

    with ElasticBuffer(group, num_max_tokens_per_rank=4096, hidden=7168) as buffer:
        recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(x, topk_idx, weights, num_experts=64)
        combined_x, _, event = buffer.combine(outputs, handle)

It works on the CPU, on one node. Here arguments are checked; `elastic_calls` has the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from anyep import link_rates, sizes
from anyep.api import elastic_arguments as checks
from anyep.api import gradients
from anyep.api.arguments import check_config, check_devices, check_payload, check_tensor
from anyep.api.buffer import Buffer
from anyep.api.elastic_absent import AbsentCalls
from anyep.api.elastic_arguments import Streams
from anyep.api.elastic_calls import ElasticCalls, First, Layout, Outputs, Received, wait_for
from anyep.api.elastic_handle import EPHandle
from anyep.api.elastic_hints import SizeHints
from anyep.backends.base import Payload, Rows
from anyep.connection import ELASTIC
from anyep.control.status import RankStatus
from anyep.core import elastic_sizes
from anyep.core.calls import Call, Kind
from anyep.errors import InvalidCall, NotSupported, whole_number
from anyep.events import EventHandle, EventOverlap
from anyep.session import Session
from anyep.sizes import Config

T = TypeVar("T")
Dispatched = tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]


class _Connected(Buffer):
    """What an `ElasticBuffer` is made of; messages name the class that the user made."""

    _api = ELASTIC

    def __init__(self, timeout_s: float, *arguments: Any, **by_name: Any) -> None:
        self._timeout_s = timeout_s
        super().__init__(*arguments, **by_name)


class ElasticBuffer(SizeHints, AbsentCalls):
    """Communication between the ranks of a process group: dispatch tokens to experts, and combine them.

    The constructor is collective, and every rank must make the same calls in the same order.

    Args:
        group: The process group of the ranks. Gloo is enough.
        num_bytes: Bytes of the buffer, a multiple of 2 MiB; by default they follow from the next four.
        num_cpu_bytes: Must be 0: there is no remote table.
        num_max_tokens_per_rank: The most tokens that a rank sends in a call; the default of `dispatch`.
        hidden: The values of a row.
        num_topk: The choices of a token; 0 is 32.
        use_fp8_dispatch: Whether dispatched rows have values of 1 byte.
        deterministic: Accepted: the order of rows is always the same.
        allow_hybrid_mode: Must be True on several nodes; on one both modes are the same.
        allow_multiple_reduction: Must be True on several nodes, where sums of a node are rounded. If False, a
            combine of expanded rows takes as many calls as a token has choices.
        prefer_overlap_with_compute: Whether `get_theoretical_num_sms` may be less than 64.
        sl_idx: Accepted and ignored.
        num_allocated_qps: The most that `get_theoretical_num_qps` returns; 0: as many as DeepEP V2 allocates.
        num_cpu_timeout_secs: Seconds after which a wait without progress gives up, unless ANYEP_TIMEOUT_S is
            set. The same on all ranks.
        num_gpu_timeout_secs: Accepted and ignored.
        explicitly_destroy: Warn if the buffer is dropped without a call of `destroy`.
        device: As for `Buffer`.
        ranks_per_node: As for `Buffer`; several nodes work on CPUs.
        num_window_bytes: As for `Buffer`.
        network: As for `Buffer`, like the next one.
        heap: Where GPUs keep what ranks share.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        device: str | torch.device | None = None,
        ranks_per_node: int | None = None,
        num_window_bytes: int | None = None,
        network: str | None = None,
        heap: str | None = None,
    ) -> None:
        if num_cpu_bytes:
            raise NotSupported("num_cpu_bytes is for remote tables, which AnyEP does not have: pass 0")
        num_ranks = group.size()
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                *(group, num_max_tokens_per_rank, hidden, num_topk),
                *(use_fp8_dispatch, allow_hybrid_mode, allow_multiple_reduction),
            )
        self.num_bytes = checks.checked_num_bytes(num_bytes)
        self._buffer = _Connected(
            float(whole_number("num_cpu_timeout_secs", num_cpu_timeout_secs, minimum=1)),
            group,
            *checks.ring_bytes(self.num_bytes, hidden, group, ranks_per_node),
            explicitly_destroy=explicitly_destroy,
            device=device,
            ranks_per_node=ranks_per_node,
            num_window_bytes=num_window_bytes,
            network=network,
            heap=heap,
        )
        topology = self._buffer.topology
        session = self._session()
        try:
            checks.check_nodes(topology, self._device, allow_hybrid_mode, allow_multiple_reduction)
        except NotSupported:
            self._buffer.destroy()
            raise
        self._calls = ElasticCalls(session.normal, session.elastic, topology, self._buffer.rank)
        self.group = group
        self.rank_idx, self.num_ranks = self._buffer.rank, num_ranks
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps
        self.explicitly_destroy = explicitly_destroy
        self.nccl_comm_handle = None
        """There is no communicator of NCCL."""
        self._domains = domains = elastic_sizes.Domains.of(
            topology.num_nodes, topology.ranks_per_node, allow_hybrid_mode
        )
        self.num_rdma_ranks, self.num_nvlink_ranks = domains.num_rdma_ranks, domains.num_nvlink_ranks
        self.num_scaleout_ranks = domains.num_scaleout_ranks
        self.num_scaleup_ranks = domains.num_scaleup_ranks
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, domains.num_scaleup_ranks)

    @property
    def runtime(self) -> Session | None:
        """What this buffer owns; None after `destroy`."""
        return self._buffer.runtime

    @property
    def _device(self) -> torch.device:
        return self._buffer._device

    @staticmethod
    def capture() -> EventHandle:
        """Record an event on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The communication stream. On the CPU a thread communicates, and the returned stream is unused."""
        return self._buffer.get_comm_stream()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """The SMs that fill the slowest link, if the choices of experts are balanced.

        Args:
            num_experts: The experts of all ranks together.
            num_topk: The choices of a token.
            num_scaleout_topk: Must be 0.
            rdma_gbs: GB/s of a rank's network; 0: as `ibstat` reports, else 50.
            nvlink_gbs: GB/s of a rank's NVLink; 0: as `nvidia-smi` reports, else 430.3.
            sm_read_gbs: GB/s that an SM reads.
            sm_write_gbs: GB/s that an SM writes.
        """
        if num_scaleout_topk:
            raise NotSupported(f"num_scaleout_topk is {num_scaleout_topk}: it must be 0")
        is_gpu = self._device.type == "cuda"
        rates = elastic_sizes.Rates(
            rdma_gbs or (link_rates.rdma_gbs() if is_gpu else 0.0),
            nvlink_gbs or (link_rates.nvlink_gbs() if is_gpu else 0.0),
            *(sm_read_gbs, sm_write_gbs),
        )
        num_sms = sizes.NUM_DEFAULT_SMS
        if is_gpu:
            num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        return elastic_sizes.theoretical_num_sms(
            *(self._domains, num_experts, num_topk, num_sms, rates, self.prefer_overlap_with_compute)
        )

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """The queue pairs that DeepEP V2 uses with so many SMs; AnyEP uses none.

        Args:
            num_sms: The number of SMs.
        """
        num_sms = whole_number("num_sms", num_sms, minimum=0)
        return elastic_sizes.theoretical_num_qps(self._domains, num_sms, self.num_allocated_qps)

    def status(self) -> list[RankStatus]:
        """What every rank is doing, without waiting for any of them."""
        return self._buffer.status()

    def __repr__(self) -> str:
        """The rank, place, sizes and state on one line; does not wait."""
        return repr(self._buffer)

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Wait until all ranks have made this call, after their earlier calls. On a GPU its stream waits.

        Args:
            use_comm_stream: Accepted and ignored.
            with_cpu_sync: On a GPU the host waits as well, before and after; on the CPU it always does.
            sequential: Accepted and ignored.
        """
        session = self._session()
        is_gpu = self._device.type == "cuda"
        if with_cpu_sync and is_gpu:
            torch.cuda.synchronize(self._device)
        call = session.control.begin(Kind.BARRIER)
        session.normal.ops.before(False)
        self._calls.barrier(call, self._config(0, None), self._device)
        if with_cpu_sync and is_gpu:
            torch.cuda.synchronize(self._device)

    # Dispatch

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Dispatched:
        """Send each token once to every rank that holds one of its experts.

        Received rows are ordered by source rank, then source token.

        Args:
            x: Rows [tokens, hidden], or a pair of 1-byte data and its scales.
            topk_idx: int64 [tokens, top-k]; below 0 is "no expert". The experts of a token are distinct.
            topk_weights: float32 [tokens, top-k]; on all ranks or on none.
            cumulative_local_expert_recv_stats: int32 [local experts]; the received counts are added.
            num_experts: The experts of all ranks together; with a handle it may be left out.
            num_max_tokens_per_rank: The same on all ranks; by default that of the constructor.
            expert_alignment: Counts of experts are rounded up to a multiple of this.
            num_sms: A hint, kept in the handle.
            num_qps: Accepted and ignored.
            previous_event: The event after which the call begins.
            previous_event_before_epilogue: Waited for before received rows are laid out.
            async_with_compute_stream: Return as soon as possible, with an event to wait for.
            allocate_on_comm_stream: Accepted and ignored.
            handle: That of an earlier dispatch, whose routing is used again; `topk_idx` must be left out.
            do_handle_copy: Whether the handle has a copy of `topk_idx`, or the tensor itself, which must not
                change while a dispatch along the handle has `topk_weights`.
            do_cpu_sync: False gives the most rows that are possible; rows past the received ones have the
                ids -1, and are otherwise not specified.
            do_expand: One row for each of a token's experts here, grouped by expert; each group begins at a
                multiple of `expert_alignment`. With a handle, as in its dispatch.
            do_zero_padding: Zero the rows between the groups, with their weights and scales; else they are
                not specified. Needs `do_expand`.
            use_tma_aligned_col_major_sf: Scales column by column, each at a multiple of 4 scales.

        Returns:
            Received rows (a pair if x is one); local expert ids (-1: of another rank), None for expanded
            rows; the weights of each row's choices, of which those of other ranks' experts mean nothing, the
            one weight of each expanded row, or None; the handle; an event.
        """
        session = self._session()
        layout = Layout(do_expand, do_zero_padding, use_tma_aligned_col_major_sf)
        if _is_number(num_sms) and _are_absent(
            *(topk_idx, topk_weights, cumulative_local_expert_recv_stats),
            *(num_experts, num_max_tokens_per_rank, expert_alignment),
            *(previous_event, previous_event_before_epilogue),
            *(do_cpu_sync or None, async_with_compute_stream or None),
        ):
            again = self._calls.cached_again(x, handle, layout, self._default_config())
            if again is not None:
                return (*again[:4], EventOverlap(None))
        call = session.control.begin(Kind.DISPATCH if handle is None else Kind.CACHED_DISPATCH)

        def check() -> Callable[[], Received]:
            streams = checks.checked_streams(
                previous_event, previous_event_before_epilogue, async_with_compute_stream
            )
            if do_zero_padding and not do_expand:
                raise InvalidCall(
                    "do_zero_padding is for expanded rows: pass do_expand=True, or leave it out"
                )
            stats = cumulative_local_expert_recv_stats
            check_devices(
                self._device,
                ELASTIC,
                x=x,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                cumulative_local_expert_recv_stats=stats,
            )
            gradients.warn_if_lost(x, topk_weights)
            sms = checks.checked_num_sms(num_sms)
            if handle is not None:
                if topk_idx is not None or stats is not None or do_cpu_sync:
                    raise InvalidCall(
                        "a dispatch with a handle takes no topk_idx, cumulative_local_expert_recv_stats or"
                        " do_cpu_sync=True: leave them out"
                    )
                known = checks.checked_handle(handle, self.num_ranks)
                checks.check_same(
                    known,
                    num_experts=num_experts,
                    num_max_tokens_per_rank=num_max_tokens_per_rank,
                    expert_alignment=expert_alignment,
                )
                checks.check_layout(known, do_expand)
                return self._cached(session, call, x, topk_weights, known, layout, streams)
            # On the CPU the host reads the ids.
            wait_for((streams.previous,))
            most = num_max_tokens_per_rank
            tokens = checks.checked_tokens(
                *(x, topk_idx, topk_weights, num_experts),
                self.num_max_tokens_per_rank if most is None else most,
                *(expert_alignment, self.num_ranks),
                reads_ids=self._device.type == "cpu",
            )
            assert topk_idx is not None
            kept = topk_idx.clone() if do_handle_copy else topk_idx
            stats = checks.checked_stats(stats, tokens.num_experts // self.num_ranks)
            waits = do_cpu_sync is not False
            first = self._first(session, x, tokens, kept, stats, waits, sms, streams.run_async)
            return lambda: self._calls.first(call, first, layout, streams)

        received = self._checked(session, call, check)()
        return (*received[:4], EventOverlap(received.event))

    def _first(
        self,
        session: Session,
        x: Any,
        tokens: checks.Tokens,
        kept_idx: torch.Tensor,
        stats: torch.Tensor | None,
        waits: bool,
        num_sms: int,
        run_async: bool,
    ) -> First:
        """What a dispatch without a handle sends, and where."""
        ops = session.normal.ops
        ops.before(run_async)
        weights = tokens.topk_weights
        sent = weights if weights is not None else torch.zeros_like(tokens.topk_idx, dtype=torch.float32)
        payload = self._calls.sent(check_payload(x, tokens.topk_idx, sent, ops.source_bytes))
        config = self._config(num_sms, None)
        session.normal.check_rings(config, payload.token)
        layout = ops.layout(tokens.topk_idx, tokens.num_experts, None, False)
        counts = ops.counts_of(
            *(payload, layout.in_rank, layout.tokens_per_rank, layout.tokens_per_node),
            *(layout.tokens_per_expert, config.num_channels),
        )
        return First(payload, counts, config, tokens, kept_idx, stats, waits)

    def _cached(
        self,
        session: Session,
        call: Call,
        x: Any,
        topk_weights: Any,
        handle: EPHandle,
        layout: Layout,
        streams: Streams,
    ) -> Callable[[], Received]:
        """The checked dispatch with a handle."""
        ops = session.normal.ops
        ops.before(streams.run_async)
        ids = weights = None
        if topk_weights is not None:
            ids = handle.topk_idx.clamp(min=-1)
            weights = check_tensor("topk_weights", topk_weights, (torch.float32,), tuple(ids.shape))
        payload: Payload = check_payload(x, ids, weights, ops.source_bytes)
        if payload.num_tokens != handle.topk_idx.shape[0]:
            raise InvalidCall(
                f"x has {payload.num_tokens} rows, but the handle was made for {handle.topk_idx.shape[0]}"
            )
        routing = self._calls.routing_of(handle)
        config = self._config(0, routing.num_channels)
        session.normal.check_rings(config, payload.token)
        return lambda: self._calls.cached(call, payload, routing, config, handle, layout, streams)

    # Combine

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Add up each token's rows at its source: in float32, biases first, rounded once.

        The rows of a token are added in order of the last of its choices that is on each rank; expanded rows
        are added on their rank first, in order of the choices, and rounded.

        Args:
            x: The experts' rows, one for each row that the dispatch gave.
            handle: That of the dispatch; all ranks must pass the handles of one dispatch.
            topk_weights: float32 [rows, top-k], of expanded rows [rows]; they are carried back, not
                multiplied.
            bias: One or two tensors [tokens, hidden] of the dtype of x that the sums start from.
            num_sms: Accepted and ignored: the handle's number holds.
            num_qps: Accepted and ignored.
            previous_event: The event after which the call begins.
            previous_event_before_epilogue: Waited for as well.
            async_with_compute_stream: Return at once, with an event to wait for.
            allocate_on_comm_stream: Accepted and ignored.

        Returns:
            The sums [tokens, hidden]; for each choice the weight that its expert's rank sent (0.0 for -0.0),
            0 where there is no expert (None without `topk_weights`); and an event.
        """
        session = self._session()
        if _is_number(num_sms) and _are_absent(
            *(topk_weights, bias, previous_event, previous_event_before_epilogue),
            *(async_with_compute_stream or None, not self.allow_multiple_reduction or None),
        ):
            sums = self._calls.combine_again(x, handle, self._default_config())
            if sums is not None:
                return sums, None, EventOverlap(None)
        call = session.control.begin(Kind.COMBINE)

        def check() -> tuple[Outputs, EPHandle, Config]:
            streams = checks.checked_streams(
                previous_event, previous_event_before_epilogue, async_with_compute_stream
            )
            checks.checked_num_sms(num_sms)
            session.normal.ops.before(streams.run_async)
            check_devices(self._device, ELASTIC, x=x, topk_weights=topk_weights, bias=bias)
            gradients.warn_if_lost(x, topk_weights, bias)
            known = checks.checked_handle(handle, self.num_ranks)
            rows, weights, biases = checks.checked_outputs(x, topk_weights, bias, known)
            routing = self._calls.routing_of(known)
            config = self._config(0, routing.num_channels)
            has_weights = weights is not None
            if known.do_expand and not self.allow_multiple_reduction:
                ready = self._calls.after(streams)
                return Outputs(rows, weights, biases, routing, ready, has_weights), known, config
            compact, weights, ready = self._calls.prepared(rows, weights, known, streams)
            outputs = Outputs(compact, weights, biases, routing, ready, has_weights)
            session.normal.check_rings(config, self._calls.input_of(outputs, known, config).token)
            return outputs, known, config

        outputs, known, config = self._checked(session, call, check)
        run_async = bool(async_with_compute_stream)
        if known.do_expand and not self.allow_multiple_reduction:
            others = partial(session.control.begin, Kind.COMBINE)
            done = self._calls.combine_unsummed(call, others, outputs, known, config, run_async)
        else:
            done = self._calls.combine(call, outputs, known, config, run_async)
        return done.x, done.topk_weights, EventOverlap(done.event)

    # The end

    def destroy(self) -> None:
        """Release what the buffer holds; every rank calls it. Results stay valid."""
        self._buffer.destroy()

    def __enter__(self) -> ElasticBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._buffer.__exit__(kind, error, traceback)

    # Helpers

    def _session(self) -> Session:
        return self._buffer._check_usable()[0]

    def _checked(self, session: Session, call: Call, check: Callable[[], T]) -> T:
        """What `check` returns; if it refuses the arguments, the peers are told."""
        try:
            return check()
        except BaseException as error:
            session.refuse(call, error, session.normal.ops.refuse)
            raise

    def _default_config(self) -> Config:
        return self._session().normal.ops.default_config(Buffer.get_dispatch_config(self.num_ranks))

    def _config(self, num_sms: int, num_channels: int | None) -> Config:
        default = self._default_config()
        if num_sms and num_channels is None:
            return check_config(Config(num_sms), default, None)
        return check_config(None, default, num_channels)


def _is_number(num_sms: Any) -> bool:
    return type(num_sms) is int and num_sms >= 0


def _are_absent(*arguments: Any) -> bool:
    return all(argument is None for argument in arguments)
