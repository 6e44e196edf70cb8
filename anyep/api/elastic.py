"""`ElasticBuffer`, the API of DeepEP V2, over the session and modes of `Buffer`.

    with ElasticBuffer(group, num_max_tokens_per_rank=4096, hidden=7168) as buffer:
        recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(x, topk_idx, weights, num_experts=64)
        combined_x, _, event = buffer.combine(outputs, handle)

Here: the compact layout on the CPU, on one node. Calls are finished when they return.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from anyep.api import elastic_arguments as checks
from anyep.api import gradients
from anyep.api.arguments import check_config, check_devices, check_payload, check_tensor
from anyep.api.buffer import Buffer
from anyep.api.elastic_handle import EPHandle, order_of_ranks, rows_at_owners, source_metadata
from anyep.backends.base import CombineInput, Payload, Rows
from anyep.core import elastic_sizes
from anyep.core.calls import Call, Kind
from anyep.core.terms import Terms
from anyep.errors import InvalidCall, NotSupported
from anyep.events import EventHandle, EventOverlap
from anyep.modes.normal import Dispatch, Dispatched
from anyep.session import Session
from anyep.sizes import Config

T = TypeVar("T")
Received = tuple[Rows, torch.Tensor, torch.Tensor | None, EPHandle, EventOverlap]


class ElasticBuffer:
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
        allow_hybrid_mode: Accepted: on one node both modes are the same.
        allow_multiple_reduction: Accepted: rows of the compact layout are rounded once on one node.
        prefer_overlap_with_compute: Accepted and ignored, like the next five.
        sl_idx: Accepted and ignored.
        num_allocated_qps: Accepted and ignored.
        num_cpu_timeout_secs: Accepted and ignored: ANYEP_TIMEOUT_S is the deadline of waits.
        num_gpu_timeout_secs: Accepted and ignored.
        explicitly_destroy: Warn if the buffer is dropped without a call of `destroy`.
        device: "cpu".
        ranks_per_node: Must be left out, or the number of ranks.
        num_window_bytes: As for `Buffer`.
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
    ) -> None:
        if num_cpu_bytes:
            raise NotSupported("num_cpu_bytes is for remote tables, which AnyEP does not have: pass 0")
        num_ranks = group.size()
        if num_bytes is None:
            domains = elastic_sizes.Domains.of(1, num_ranks, allow_hybrid_mode)
            num_bytes = elastic_sizes.buffer_bytes(
                *(domains, num_max_tokens_per_rank, hidden, num_topk),
                *(use_fp8_dispatch, allow_multiple_reduction),
            )
        self.num_bytes = checks.checked_num_bytes(num_bytes)
        self._buffer = Buffer(
            group,
            checks.ring_bytes(self.num_bytes, hidden, num_ranks),
            explicitly_destroy=explicitly_destroy,
            device=device,
            ranks_per_node=ranks_per_node,
            num_window_bytes=num_window_bytes,
        )
        topology = self._buffer.topology
        if topology.num_nodes > 1 or self._device.type != "cpu":
            place = "several nodes" if topology.num_nodes > 1 else "GPUs"
            self._buffer.destroy()
            raise NotSupported(f"ElasticBuffer does not work on {place} yet: use anyep.Buffer")
        self.group = group
        self.rank_idx, self.num_ranks = self._buffer.rank, num_ranks
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps
        self.explicitly_destroy = explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = 1, num_ranks
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = 1, num_ranks

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
    ) -> Received:
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
            previous_event_before_epilogue: Waited for as well.
            async_with_compute_stream: Return an event to wait for; the call has finished all the same.
            allocate_on_comm_stream: Accepted and ignored.
            handle: That of an earlier dispatch, whose routing is used again; `topk_idx` must be left out.
            do_handle_copy: Whether the handle has a copy of `topk_idx`, or the tensor itself, which must not
                change while a dispatch along the handle has `topk_weights`.
            do_cpu_sync: False gives the most rows that are possible; rows past the received ones have the
                ids -1, and are otherwise not specified.
            do_expand: Must be False.
            do_zero_padding: Must be False.
            use_tma_aligned_col_major_sf: Must be False.

        Returns:
            Received rows (a pair if x is one); local expert ids (-1: of another rank); the weights of each
            row's choices, of which those of other ranks' experts mean nothing, or None; the handle; an event.
        """
        session = self._session()
        call = session.control.begin(Kind.DISPATCH if handle is None else Kind.CACHED_DISPATCH)

        def check() -> Callable[[], Received]:
            checks.wait_for((previous_event, previous_event_before_epilogue))
            if do_expand or do_zero_padding or use_tma_aligned_col_major_sf:
                raise NotSupported(
                    "do_expand, do_zero_padding and use_tma_aligned_col_major_sf are not there yet:"
                    " leave them out"
                )
            check_devices(self._device, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
            gradients.warn_if_lost(x, topk_weights)
            sms = checks.checked_num_sms(num_sms)
            stats = cumulative_local_expert_recv_stats
            if handle is not None:
                if topk_idx is not None or stats is not None or do_cpu_sync:
                    raise InvalidCall(
                        "a dispatch with a handle takes no topk_idx, cumulative_local_expert_recv_stats or"
                        " do_cpu_sync=True: leave them out"
                    )
                checks.check_same(
                    checks.checked_handle(handle, self.num_ranks),
                    num_experts=num_experts,
                    num_max_tokens_per_rank=num_max_tokens_per_rank,
                    expert_alignment=expert_alignment,
                )
                return self._cached(session, call, x, topk_weights, handle)
            most = num_max_tokens_per_rank
            tokens = checks.checked_tokens(
                *(x, topk_idx, topk_weights, num_experts),
                self.num_max_tokens_per_rank if most is None else most,
                *(expert_alignment, self.num_ranks),
            )
            assert topk_idx is not None
            kept = topk_idx.clone() if do_handle_copy else topk_idx
            stats = checks.checked_stats(stats, tokens.num_experts // self.num_ranks)
            return self._first(session, call, x, tokens, kept, stats, do_cpu_sync is not False, sms)

        received = self._checked(session, call, check)()
        return (*received[:4], EventOverlap(EventHandle() if async_with_compute_stream else None))

    def _first(
        self,
        session: Session,
        call: Call,
        x: Any,
        tokens: checks.Tokens,
        kept_idx: torch.Tensor,
        stats: torch.Tensor | None,
        waits: bool,
        num_sms: int,
    ) -> Callable[[], Received]:
        """The checked dispatch without a handle."""
        ops = session.normal.ops
        ops.before(False)
        weights = tokens.topk_weights
        sent = weights if weights is not None else torch.zeros_like(tokens.topk_idx, dtype=torch.float32)
        payload = check_payload(x, tokens.topk_idx, sent, ops.source_bytes)
        config = self._config(num_sms, None)
        session.normal.check_rings(config, payload.token)
        layout = ops.layout(tokens.topk_idx, tokens.num_experts, None, False)
        counts = ops.counts_of(
            *(payload, layout.in_rank, layout.tokens_per_rank, layout.tokens_per_node),
            *(layout.tokens_per_expert, config.num_channels),
        )
        most = 0 if waits else tokens.num_max_tokens_per_rank * self.num_ranks
        terms = Terms(tokens.num_max_tokens_per_rank, weights is not None)
        request = Dispatch(payload, counts, config, most, 1, terms.word)

        def work() -> Received:
            done = session.normal.dispatch(call, request, None, False)
            handle = self._new_handle(done, tokens, kept_idx, waits, config.num_sms)
            if stats is not None:
                stats.add_(handle.num_unaligned_recv_tokens_per_expert)
            assert done.topk_idx is not None
            return _received(done, done.topk_idx, weights is not None, handle)

        return work

    def _new_handle(
        self,
        done: Dispatched[Any],
        tokens: checks.Tokens,
        kept_idx: torch.Tensor,
        waits: bool,
        num_sms: int,
    ) -> EPHandle:
        routing = done.routing.tensors()
        rank_prefix, _, _, recv_src_idx, _, send_head = routing
        ids = done.topk_idx
        assert ids is not None
        num_local = tokens.num_experts // self.num_ranks
        by_rank = rank_prefix[:, self.rank_idx].contiguous()
        counts = torch.bincount(ids.flatten() + 1, minlength=num_local + 1)[1:].to(torch.int32)
        aligned = -(-counts // tokens.alignment) * tokens.alignment
        most = elastic_sizes.expanded_rows(ids.shape[0], ids.shape[1], num_local, tokens.alignment)
        return EPHandle(
            do_expand=False,
            num_experts=tokens.num_experts,
            expert_alignment=tokens.alignment,
            num_max_tokens_per_rank=tokens.num_max_tokens_per_rank,
            num_sms=num_sms,
            topk_idx=kept_idx,
            num_recv_tokens=ids.shape[0],
            num_expanded_tokens=int(aligned.sum()) if waits else most,
            num_recv_tokens_per_expert_list=aligned.tolist() if waits else [],
            psum_num_recv_tokens_per_scaleup_rank=by_rank,
            psum_num_recv_tokens_per_expert=aligned.cumsum(0, dtype=torch.int32),
            num_unaligned_recv_tokens_per_expert=counts,
            recv_src_metadata=source_metadata(recv_src_idx, ids, by_rank, tokens.num_max_tokens_per_rank),
            dst_buffer_slot_idx=rows_at_owners(tokens.topk_idx, send_head, tokens.num_experts),
            routing=routing,
            recv_topk_idx=ids.clone(),
            order=order_of_ranks(tokens.topk_idx, tokens.num_experts, self.num_ranks),
        )

    def _cached(
        self, session: Session, call: Call, x: Any, topk_weights: Any, handle: EPHandle
    ) -> Callable[[], Received]:
        """The checked dispatch with a handle."""
        ops = session.normal.ops
        ops.before(False)
        ids = weights = None
        if topk_weights is not None:
            ids = handle.topk_idx.clamp(min=-1)
            weights = check_tensor("topk_weights", topk_weights, (torch.float32,), tuple(ids.shape))
        payload: Payload = check_payload(x, ids, weights, ops.source_bytes)
        if payload.num_tokens != handle.topk_idx.shape[0]:
            raise InvalidCall(
                f"x has {payload.num_tokens} rows, but the handle was made for {handle.topk_idx.shape[0]}"
            )
        routing = ops.routing_of(handle.routing, None)
        config = self._config(0, routing.num_channels)
        session.normal.check_rings(config, payload.token)
        num_experts = handle.num_experts if ids is not None else 0

        def work() -> Received:
            done = session.normal.cached_dispatch(call, payload, routing, config, None, False, num_experts)
            return _received(done, handle.recv_topk_idx.clone(), weights is not None, handle)

        return work

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

        The rows of a token are added in order of the last of its choices that is on each rank.

        Args:
            x: The experts' rows, one for each row that the dispatch gave.
            handle: That of the dispatch; all ranks must pass the handles of one dispatch.
            topk_weights: float32 [rows, top-k]; they are carried back, not multiplied.
            bias: One or two tensors [tokens, hidden] of the dtype of x that the sums start from.
            num_sms: Accepted and ignored: the handle's number holds.
            num_qps: Accepted and ignored.
            previous_event: The event after which the call begins.
            previous_event_before_epilogue: Waited for as well.
            async_with_compute_stream: Return an event to wait for; the call has finished all the same.
            allocate_on_comm_stream: Accepted and ignored.

        Returns:
            The sums [tokens, hidden]; for each choice the weight that its expert's rank sent (0.0 for -0.0),
            0 where there is no expert (None without `topk_weights`); and an event.
        """
        session = self._session()
        call = session.control.begin(Kind.COMBINE)

        def check() -> CombineInput[Any]:
            checks.wait_for((previous_event, previous_event_before_epilogue))
            checks.checked_num_sms(num_sms)
            ops = session.normal.ops
            ops.before(False)
            check_devices(self._device, x=x, topk_weights=topk_weights, bias=bias)
            gradients.warn_if_lost(x, topk_weights, bias)
            known = checks.checked_handle(handle, self.num_ranks)
            rows, weights, biases = checks.checked_outputs(x, topk_weights, bias, known)
            if weights is not None:
                weights = torch.where(known.recv_topk_idx >= 0, weights, 0.0)
            routing = ops.routing_of(known.routing, None)
            config = self._config(0, routing.num_channels)
            combined = CombineInput(rows, routing, weights, biases, config, known.order)
            session.normal.check_rings(config, combined.token)
            return combined

        done = session.normal.combine(call, self._checked(session, call, check), None, False)
        event = EventHandle() if async_with_compute_stream else None
        return done.x, done.topk_weights, EventOverlap(event)

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

    def _config(self, num_sms: int, num_channels: int | None) -> Config:
        default = Buffer.get_dispatch_config(self.num_ranks)
        if num_sms and num_channels is None:
            return check_config(Config(num_sms), default, None)
        return check_config(None, default, num_channels)


def _received(done: Dispatched[Any], ids: torch.Tensor, has_weights: bool, handle: EPHandle) -> Received:
    rows: Rows = done.x if done.scales is None else (done.x, done.scales)
    return rows, ids, done.topk_weights if has_weights else None, handle, EventOverlap()
