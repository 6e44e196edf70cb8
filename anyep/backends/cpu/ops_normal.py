"""The operations of normal mode on the CPU: a queue of steps, drained by the caller or by the stream's
thread.

An operation appends a step to the queue of its call. `totals` runs the steps so far, since the host needs
their result. `end` runs the rest: in the caller's thread, or asynchronously in the thread of the stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import torch

from anyep.backends import cpu
from anyep.backends.base import CombineInput, CountedTokens, DispatchLayout, Payload, Results, Routing, Totals
from anyep.backends.cpu.memory import WarmMemory
from anyep.backends.cpu.rows import (
    CpuCounts,
    Decision,
    NotifyCounts,
    RowMover,
    TokenPlaces,
    ids_of,
    wrong_id,
)
from anyep.backends.cpu.stream import Stream
from anyep.core.calls import Array, Call, Phase
from anyep.core.diagnosis import other_routing
from anyep.core.headers import ROUTING, WEIGHTS_OFFSET, X_OFFSET
from anyep.errors import AnyEPError, InvalidCall
from anyep.events import EventHandle, EventOverlap
from anyep.sizes import Config

Step = Callable[[], None]
NO_EXPERT_COUNTS: Final = np.zeros(0, np.int32)
NO_EXPERT_TOTALS: Final = np.zeros(0, np.int64)


class CpuRouting(Routing, Protocol):
    """A routing whose digests this module compares."""

    @property
    def sources(self) -> Array:
        """The origin of each received row."""

    @property
    def checksum(self) -> int: ...
    @property
    def digest_words(self) -> Array: ...
    def num_rows_for(self, rank: int) -> int: ...


CR = TypeVar("CR", bound=CpuRouting)


class Way(Protocol[CR]):
    """How rows travel: within a node (`WithinNode`), or between nodes (`BetweenNodes`)."""

    source_bytes: int

    def new_node_counts(self) -> torch.Tensor | None: ...
    def count_nodes(self, in_rank: torch.Tensor, counts: torch.Tensor) -> None: ...
    def with_nodes(self, counts: CpuCounts, per_node: Any) -> CpuCounts: ...
    def routing_of(self, handle: Any, last: tuple[Any, CR] | None) -> CR: ...
    def new_routing(self, places: TokenPlaces) -> CR: ...
    def with_rows(self, routing: CR, num_rows: int, is_counted: bool) -> CR: ...
    def difference_between(self, digests: Array) -> str: ...
    def notify(self, call: Call, header: Array, counts: CpuCounts, routing: CR) -> NotifyCounts: ...
    def send_rows(
        self,
        call: Call,
        payload: Payload,
        routing: CR,
        results: Results,
        decision: Decision,
        config: Config,
        experts_per_rank: int,
        is_new: bool,
    ) -> None: ...
    def reduce(
        self,
        call: Call,
        combined: CombineInput[CR],
        headers: Array,
        out: torch.Tensor,
        out_weights: torch.Tensor,
    ) -> None: ...


class CpuNormalOps(Generic[CR]):
    """Normal mode on the CPU."""

    def __init__(self, mover: RowMover, way: Way[CR], stream: Stream, memory: WarmMemory) -> None:
        self.mover = mover
        self.way = way
        self.stream = stream
        self.memory = memory
        self.control = mover.control
        self.windows = mover.windows
        self.source_bytes = way.source_bytes
        self._num_ranks = mover.num_ranks
        no_channels = np.zeros((self._num_ranks, 0), np.int32)
        self._no_channels = no_channels
        self._digests = no_channels
        """The digests of all handles, in a call by handle: row r has the words of rank r."""

    def before(self, run_async: bool) -> None:
        """Raise the error of an earlier asynchronous call that has not been waited for."""
        if not run_async:
            self.stream.synchronize()
        self.stream.raise_unheard()

    def raise_earlier(self, checks_ids: bool = False) -> None:
        """Do nothing: `before` raises errors of earlier calls."""

    def wait_until_readable(self, previous: EventOverlap | None) -> None:
        if previous is not None:
            previous.current_stream_wait()

    def default_config(self, config: Config) -> Config:
        return config

    def check_config(self, config: Config) -> None:
        """Any number of channels works: they are iterations of a loop."""

    def is_quiet(self) -> bool:
        """Every call is made step by step."""
        return False

    def dispatch_again(self, x: Any, handle: Any, config: Config) -> None:
        """Every call is made step by step."""

    def combine_again(self, x: Any, handle: Any, config: Config, order: Any = None) -> None:
        """Every call is made step by step."""

    def counted_again(self, tokens: CountedTokens, config: Config) -> None:
        """Every call is made step by step."""

    def aligned_payload(self, payload: Payload) -> Payload:
        return payload

    def aligned_input(self, combined: CombineInput[CR]) -> CombineInput[CR]:
        return combined

    def refuse(self, call: Call, error: AnyEPError) -> None:
        self.stream.run(lambda: self.control.refuse(call, error))

    def outputs(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # A window is free when its last reader is done: the host waits for peers within the calls.
        window = self.windows.allocate(math.prod(shape) * dtype.itemsize)
        return self.memory.empty(shape, dtype) if window is None else self.windows.lend(window, shape, dtype)

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous: EventOverlap | None, run_async: bool
    ) -> DispatchLayout:
        num_ranks = self._num_ranks
        tokens_per_rank = torch.empty(num_ranks, dtype=torch.int32, device="cpu")
        tokens_per_expert = torch.empty(num_experts, dtype=torch.int32, device="cpu")
        in_rank = torch.empty((topk_idx.shape[0], num_ranks), dtype=torch.bool, device="cpu")
        tokens_per_node = self.way.new_node_counts()

        def count() -> None:
            self.wait_until_readable(previous)
            wrong = cpu.count_layout(
                topk_idx.numpy(),
                num_experts // num_ranks,
                tokens_per_rank.numpy(),
                tokens_per_expert.numpy(),
                in_rank.numpy(),
            )
            if wrong >= 0:
                raise wrong_id(topk_idx, wrong, num_experts)
            if tokens_per_node is not None:
                self.way.count_nodes(in_rank, tokens_per_node)

        event = None
        if run_async:
            event = self.stream.submit(count)
        else:
            count()
        return DispatchLayout(tokens_per_rank, tokens_per_node, tokens_per_expert, in_rank, event)

    def routing_of(self, handle: Any, last: tuple[Any, CR] | None) -> CR:
        return self.way.routing_of(handle, last)

    def counts_of(
        self,
        payload: Payload,
        in_rank: torch.Tensor,
        per_rank: torch.Tensor,
        per_node: Any,
        per_expert: torch.Tensor,
        num_channels: int,
    ) -> CpuCounts:
        """Where each token's rows go; counts that contradict each other are refused."""
        places, wrong = self._place(in_rank, per_rank, num_channels)
        if wrong >= 0:
            raise InvalidCall(
                f"num_tokens_per_rank says {int(per_rank[wrong])} for rank {wrong}, but is_token_in_rank"
                f" marks {places.by_rank[wrong]}: pass both from one get_dispatch_layout"
            )
        counts = per_expert.numpy()
        if payload.topk_idx is not None:
            self._check_ids(payload.topk_idx, ids_of(payload), counts, places.in_rank)
        return self.way.with_nodes(CpuCounts(places, counts), per_node)

    def _place(
        self, is_token_in_rank: torch.Tensor, tokens_per_rank: torch.Tensor, num_channels: int
    ) -> tuple[TokenPlaces, int]:
        """Where each token's rows go, and the first rank whose count is not `tokens_per_rank` (or -1)."""
        rank_counts = np.empty(self._num_ranks, np.int32)
        channel_counts = np.empty((self._num_ranks, num_channels), np.int32)
        in_rank = is_token_in_rank.numpy()
        position = np.empty(in_rank.shape, np.int32)
        wrong = cpu.place_tokens(in_rank, tokens_per_rank.numpy(), rank_counts, channel_counts, position)
        return TokenPlaces(in_rank, rank_counts, channel_counts, position), int(wrong)

    def _check_ids(self, topk_idx: torch.Tensor, ids: Array, per_expert: Array, in_rank: Array) -> None:
        """Refuse ids that are not experts, or that contradict the counts or the mask."""
        wrong = cpu.first_contradiction(ids, per_expert, in_rank)
        if wrong >= len(per_expert):
            raise wrong_id(topk_idx, wrong - len(per_expert), len(per_expert))
        if wrong >= 0:
            raise InvalidCall(
                f"num_tokens_per_expert says {int(per_expert[wrong])} for expert {wrong}, but topk_idx"
                f" has another number: pass both from one get_dispatch_layout"
            )
        if wrong < -1:
            token, rank = divmod(-2 - wrong, self._num_ranks)
            raise InvalidCall(
                f"topk_idx and is_token_in_rank disagree whether token {token} goes to rank {rank}:"
                f" pass both from one get_dispatch_layout"
            )

    def exchange_by_handle(self, call: Call, header: Array, routing: CR) -> Array:
        """Exchange short messages, and check that all ranks' handles are of one dispatch.

        Every rank gets the digests of all handles, so every rank finds the same difference.
        """
        header[ROUTING] = routing.checksum
        own = routing.digest_words
        headers = self.control.exchange(call, header, (own, self._no_channels, NO_EXPERT_COUNTS))
        if self._digests.shape[1] != len(own):
            self._digests = np.empty((self._num_ranks, len(own)), np.int32)
        self.control.read_counts(call, self._digests, self._no_channels, NO_EXPERT_TOTALS)
        difference = self.way.difference_between(self._digests)
        if difference:
            raise other_routing(call, difference)
        return headers

    def start(self, call: Call, previous: EventOverlap | None, run_async: bool) -> CpuCall[CR]:
        return CpuCall(self, call, previous, run_async)


class CpuCall(Generic[CR]):
    """The operations of one call."""

    def __init__(
        self, ops: CpuNormalOps[CR], call: Call, previous: EventOverlap | None, run_async: bool
    ) -> None:
        self._ops = ops
        self._mover, self._way, self._control = ops.mover, ops.way, ops.control
        self._call = call
        self._previous = previous
        self._run_async = run_async
        self._steps: list[Step] = []
        self._decision: Decision | None = None
        self._headers: Array | None = None
        self._staged: list[int] = []

    @property
    def decision(self) -> Decision:
        assert self._decision is not None
        return self._decision

    def prepare_to_wait(self) -> None:
        # The offered windows must still be free when the counts are known.
        self._ops.stream.synchronize()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._ops.memory.empty(shape, dtype)

    def new_routing(self, payload: Payload, counts: CpuCounts, config: Config) -> CR:
        return self._way.new_routing(counts.places)

    def with_rows(self, routing: CR, num_rows: int, is_counted: bool) -> CR:
        return self._way.with_rows(routing, num_rows, is_counted)

    def new_results(self, payload: Payload, routing: CR, window: int) -> Results:
        token, num_rows = payload.token, routing.num_recv_rows
        shape, dtype = (num_rows, payload.x.shape[1]), payload.x.dtype
        ids = weights = scales = None
        if token.num_topk:
            ids = torch.empty((num_rows, token.num_topk), dtype=torch.int64, device="cpu")
            weights = torch.empty((num_rows, token.num_topk), dtype=torch.float32, device="cpu")
        if payload.scales is not None:
            scales = torch.empty((num_rows, token.num_scales), dtype=payload.scales.dtype, device="cpu")
        in_window = window >= 0
        x = self._mover.windows.lend(window, shape, dtype) if in_window else self.empty(shape, dtype)
        return Results(x, routing.sources, ids, weights, scales)

    def begin(self) -> None:
        if self._previous is not None:
            self._steps.append(self._wait_for_previous)

    def _wait_for_previous(self) -> None:
        """Wait until x is complete. If the work that produces it failed, notify the peers instead."""
        assert self._previous is not None
        try:
            self._previous.current_stream_wait()
        except AnyEPError as error:
            self._control.refuse(self._call, error)
            raise

    def notify(
        self,
        header: Array,
        payload: Payload,
        counts: CpuCounts,
        config: Config,
        routing: CR,
        host_waits: bool,
    ) -> None:
        def step() -> None:
            found = self._way.notify(self._call, header, counts, routing)
            self._decision = self._mover.choose_windows(self._control.headers, found, payload)

        self._steps.append(step)

    def notify_by_handle(self, header: Array, payload: Payload | None, routing: CR) -> None:
        def step() -> None:
            self._headers = self._ops.exchange_by_handle(self._call, header, routing)
            if payload is not None:
                # Every message says how many rows its sender takes, so no counts are needed.
                decision = self._mover.choose_windows(self._headers, self._mover.no_counts, payload)
                self._decision = decision._replace(num_rows=routing.num_rows_for(self._mover.rank))

        self._steps.append(step)

    def totals(self, header: Array, payload: Payload) -> Totals:
        self._ops.stream.run(self._run_steps)
        decision = self.decision
        window = int(decision.offsets[self._mover.rank])
        if window >= 0:
            self._mover.windows.allocate_at(window, payload.window(decision.num_rows).num_bytes)
        return Totals(decision.num_rows, decision.counts.by_expert.tolist(), window, may_grow=False)

    def grow(self, payload: Payload, totals: Totals) -> int:
        """The windows of a CPU rank have their full size from the beginning."""
        return totals.window

    def send_rows(
        self,
        payload: Payload,
        routing: CR,
        results: Results,
        config: Config,
        experts_per_rank: int,
        is_new: bool,
    ) -> None:
        self._steps.append(
            lambda: self._way.send_rows(
                self._call, payload, routing, results, self.decision, config, experts_per_rank, is_new
            )
        )

    def stage(self, combined: CombineInput[CR], header: Array) -> None:
        def step() -> None:
            self._control.enter(self._call, Phase.STAGE)
            offsets, self._staged = self._mover.stage((combined.x, combined.topk_weights))
            header[X_OFFSET], header[WEIGHTS_OFFSET] = offsets

        self._steps.append(step)

    def reduce(self, combined: CombineInput[CR], out: torch.Tensor, out_weights: torch.Tensor | None) -> None:
        weights = out_weights
        if weights is None:
            weights = torch.empty((out.shape[0], 0), dtype=torch.float32, device="cpu")

        def step() -> None:
            assert self._headers is not None
            self._way.reduce(self._call, combined, self._headers, out, weights)

        self._steps.append(step)

    def barrier(self, phase: Phase) -> None:
        if phase is Phase.RECEIVE:
            # This rank signalled the arrival of its rows right after sending them.
            self._steps.append(lambda: self._mover.wait_for_arrival(self._call, self.decision))
        else:
            self._steps.append(lambda: self._mover.acknowledge(self._call))

    def unpack(self, payload: Payload, routing: CR, results: Results, is_new: bool, pads: bool) -> None:
        self._steps.append(lambda: self._mover.unpack(payload, results, self.decision, is_new))

    def end(self, *used: torch.Tensor | None) -> EventHandle | None:
        # The steps refer to this object: if it kept them, a call that never runs would be freed late.
        steps, self._steps = self._steps, []
        finish = partial(self._finish, steps)
        if not self._run_async:
            self._ops.stream.run(finish)
            return None
        return self._ops.stream.submit(partial(self._control.guarded, self._call, finish))

    def _finish(self, steps: Sequence[Step]) -> None:
        try:
            for step in steps:
                step()
            self._control.end(self._call)
        finally:
            for window in self._staged:
                self._mover.windows.free(window)

    def _run_steps(self) -> None:
        steps, self._steps = self._steps, []
        for step in steps:
            step()
