"""Normal mode on GPUs that share memory: the calls of `intranode`, with every wait in a kernel.

A call is a few kernels on the communication stream: letters; rows into windows, or sums of rows where they
lie; and a meeting, after which every rank's part is done. Rows without a window go through rings. The host
waits only where a dispatch has to find out how many rows come; other calls can be captured in CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypeVar

import torch

from anyep import ending
from anyep.backends.cuda import facts
from anyep.backends.cuda.kernels import counting, digests, rings, sums, windows
from anyep.backends.cuda.kernels import letters as letter_kernels
from anyep.backends.cuda.launch import Launcher, Seen
from anyep.backends.cuda.tiles import (
    CHUNK_TOKENS,
    COPY_WARPS,
    COPY_WORDS,
    COUNT_WARPS,
    COUNTED_EXPERTS,
    COUNTED_TOKENS,
    DIGEST_TILE,
    DIGEST_WARPS,
    HEAD_TOKENS,
    UNPACK_BLOCK,
    at_most,
    block_of,
    tiles_for,
)
from anyep.errors import AnyEPError, InvalidCall, no_expert
from anyep.events import EventHandle, EventOverlap
from anyep.layout import SOURCE_INDEX_BYTES, RingArea
from anyep.modes.conversation import Array, Call, Conversation
from anyep.modes.gpu_connection import GpuConnection
from anyep.modes.gpu_routing import GpuCounts, GpuRouting, checked_handle, known_digests
from anyep.modes.gpu_windows import GpuWindows
from anyep.modes.intranode import Combined, Outputs, Payload, Received, slot_offsets
from anyep.modes.letters import (
    NUM_OFFERS,
    OFFERS,
    RESULT_ROWS,
    WEIGHTS_OFFSET,
    X_OFFSET,
    dtype_word,
    signature,
)
from anyep.modes.offers import dispatch_header, offer_exactly, offer_what_is_free
from anyep.modes.ring_areas import MAX_KNOWN_AREAS, RingAreas
from anyep.modes.status import Phase
from anyep.sizes import Config, TokenLayout, align, token_layout

T = TypeVar("T")
LOOK_S: Final = 0.002
"""How often a thread asks whether the last calls of a dropped Buffer are over."""
log = logging.getLogger("anyep")
DTYPE_CODES: Final = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


class _Results(NamedTuple):
    """What a dispatch fills; all but the source indices may lie in one window."""

    x: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    scales: torch.Tensor | None


class GpuIntranode(ending.Part):
    """Normal mode of one rank on a GPU. It does not check what the user passed; `Buffer` does."""

    source_bytes = SOURCE_INDEX_BYTES

    def __init__(self, connection: GpuConnection, num_nvl_bytes: int) -> None:
        talk = connection.talk
        self.talk = talk
        self._connection = connection
        self.conversation: Conversation = talk.conversation
        self.windows: GpuWindows = connection.windows
        self._gpu = talk.gpu
        self._rank, self._num_ranks = talk.rank, talk.num_ranks
        self._areas = RingAreas(talk.control.num_bytes, num_nvl_bytes, talk.num_ranks)
        self._tiles = tiles_for(talk.num_ranks, bool(self.windows.num_bytes))
        self._ranks_on_gpu = connection.ranks_on_gpu
        self._share_of_sms: Final = connection.share_of_sms
        self._default_sms: Final = connection.least_share_of_sms
        self._told_of_sms: set[int] = set()
        """Numbers of SMs that are more than the share, and have been spoken of."""
        self._counters: dict[tuple[int, int], Launcher] = {}
        """What counts tokens, by the kernel's identity and the choices of a token."""
        self._known_ring_arguments: dict[int, tuple[RingArea, tuple[Any, ...]]] = {}
        self._smaller_configs: dict[int, tuple[Config, Config]] = {}
        self._unheard: AnyEPError | None = None
        """What went wrong in an earlier call, and nobody has heard yet."""
        self._layout_report = self._gpu.words(facts.NUM_LAYOUT_WORDS)
        """Where the kernel of a layout says that an id is no expert."""
        self._digests = self._gpu.table([0] * (2 * talk.num_ranks))
        """Those of a handle that does not know its own; the calls of a stream follow each other."""
        self.free_what_died: Callable[[], None] = self._gpu.do_postponed
        """For whoever closed this object, when he has let it go."""
        self._closing: threading.Thread | None = None
        self._is_over = threading.Event()
        """The process ends, and nothing is waited for any more."""
        ending.register(self)

    @property
    def communication_stream(self) -> Any:
        """The CUDA stream that calls run on."""
        return self._gpu.stream.stream

    # What a Buffer asks for before and after calls

    def before(self, run_async: bool) -> None:
        """Look for what went wrong in an earlier call. It is raised when this call is launched: if it were
        refused instead, the peers would hear of that later, refuse another one, and so on."""
        if self._unheard is None:
            self._unheard = self.talk.reported()
            if self._unheard is not None:
                self._forget_layout()

    def wait_until_readable(self, previous: EventOverlap | None) -> None:
        """The host reads nothing of what a caller passed; kernels do, in their turn."""

    def refuse(self, call: Call, error: AnyEPError) -> None:
        """Tell the peers that this rank's call was wrong."""
        self.talk.refuse(call, error)

    def check_config(self, config: Config, token: TokenLayout) -> None:
        """Any number of channels is possible; say once if this rank has fewer programs than that takes."""
        num_sms = config.num_sms
        if num_sms <= self._share_of_sms or num_sms in self._told_of_sms:
            return
        self._told_of_sms.add(num_sms)
        log.warning(
            "rank %d uses %d SMs instead of num_sms=%d: %s on a GPU of %d SMs, and all must run at once."
            " The %d channels of the config, the shapes of its handles and all results are as they would be"
            " with %d SMs",
            self._rank,
            self._share_of_sms,
            num_sms,
            "there is one rank" if self._ranks_on_gpu == 1 else f"there are {self._ranks_on_gpu} ranks",
            self._gpu.num_sms,
            config.num_channels,
            num_sms,
        )

    def _num_programs(self, config: Config) -> int:
        """How many programs move the rows of a call: no more than can be resident beside the other ranks'.
        Programs that wait for one that is not would wait for ever."""
        return min(config.num_sms, self._share_of_sms)

    def default_config(self, config: Config) -> Config:
        """The tuned config, with no more SMs than any rank has: all ranks have the same channels."""
        if config.num_sms <= self._default_sms:
            return config
        known = self._smaller_configs.get(id(config))
        if known is None:
            known = (config, dataclasses.replace(config, num_sms=self._default_sms))
            self._smaller_configs[id(config)] = known
        return known[1]

    def stop(self) -> None:
        """End the waits of calls that are still under way."""
        self.conversation.stop()
        self.talk.give_up()

    is_idle = False
    """Whether nothing is under way: to ask could harm a graph that another thread captures."""

    def close_later(self, low_latency: Any) -> None:
        """Close after all calls, without waiting for them; until then the other mode is kept, if there is
        one: its kernels read its tables."""
        if not self._gpu.may_record_events():
            self._gpu.postpone(partial(self.close, low_latency))
            return
        last_uses = [self._gpu.last_use(), self._gpu.now()]
        if low_latency is not None:
            last_uses.append(low_latency.last_use())

        def wait_and_say_so() -> None:
            self._gpu.stream.relax_this_thread()
            try:
                # Not `synchronize`: the interpreter must be able to end while this waits.
                while not all(last_use.query() for last_use in last_uses):
                    if self._is_over.wait(LOOK_S):
                        break
            finally:
                self._say_closed()
                # Not in this thread, as another one may capture a graph.
                self._gpu.postpone(partial(self._free, low_latency))

        self._closing = threading.Thread(target=wait_and_say_so, name="anyep-close", daemon=True)
        self._closing.start()

    def is_working(self) -> bool:
        running: bool = self._gpu.is_running()
        return running

    def stop_at_end(self, last_error: str) -> None:
        # First for people: whose kernel hears of it looks for the reason there.
        self.conversation.stop_at_end(last_error)
        self.talk.give_up()
        self._is_over.set()

    def join_at_end(self, until: float) -> None:
        ending.join(self._closing, until)
        # Kernels that were told to stop do so in moments. If not, they must find their memory.
        ending.keep_for_ever(self)
        while self._gpu.is_running() and time.monotonic() < until:
            time.sleep(LOOK_S)

    def check_can_close(self) -> None:
        """Refuse where nothing can be waited for."""
        if self._gpu.stream.is_capturing():
            raise InvalidCall(
                "a Buffer cannot be destroyed while a CUDA graph is captured: do it before or afterwards"
            )

    def close(self, low_latency: Any) -> None:
        """Finish the calls of both modes that are under way; no kernel of a peer waits for this rank then."""
        try:
            self._free(low_latency)
        finally:
            self._say_closed()

    def _free(self, low_latency: Any) -> None:
        # Some calls are in graphs, or on streams of the caller's.
        self._gpu.synchronize_device()
        self.talk.close()
        if low_latency is not None:
            low_latency.close()

    def _say_closed(self) -> None:
        self.talk.stop_watching()
        # First for people: whose kernel hears of it looks for the reason there.
        self.conversation.close()
        self.talk.give_up()

    def counts_of(
        self,
        payload: Payload,
        in_rank: torch.Tensor,
        per_rank: torch.Tensor,
        per_node: Any,
        per_expert: torch.Tensor,
        num_channels: int,
    ) -> GpuCounts:
        """Where the tokens go; kernels find out whether it fits together."""
        return GpuCounts(in_rank, per_rank, per_expert)

    # What every call does

    def _begin(self, call: Call, previous: EventOverlap | None) -> None:
        """What is launched from here on belongs to the call."""
        self.conversation.enter(call, Phase.SEND)
        self._gpu.stream.begin(previous)

    def _end(self, call: Call, run_async: bool) -> EventHandle | None:
        """All of the call is launched."""
        event: EventHandle | None = self._gpu.stream.end(run_async)
        self.conversation.end(call)
        return event

    def _guarded(self, call: Call, work: Callable[[], T], checks_ids: bool = False) -> T:
        """A whole call; raises what went wrong in an earlier one. One that checks top-k ids itself says more
        of them, on all ranks, than a layout before it, on this rank alone."""
        done = self.conversation.guarded(call, work)
        if self._unheard is not None:
            raise self._heard()
        if not checks_ids:
            self._raise_layout()
        return done

    def _heard(self) -> AnyEPError:
        error, self._unheard = self._unheard, None
        assert error is not None
        return error

    def _raise_layout(self) -> None:
        """Raise what the kernel of an earlier layout found."""
        words = self._layout_report
        if words[facts.NUM_REPORTS] == words[facts.NUM_READ] or self._gpu.stream.is_capturing():
            return
        at = (facts.LAYOUT_TOKEN, facts.LAYOUT_COLUMN, facts.LAYOUT_VALUE, facts.LAYOUT_EXPERTS)
        error = no_expert(*(int(words[index]) for index in at))
        self._forget_layout()
        raise error

    def _forget_layout(self) -> None:
        """The dispatch after a layout has told the same, or something worse."""
        self._layout_report[facts.NUM_READ] = self._layout_report[facts.NUM_REPORTS]

    def _new(self, previous: EventOverlap | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result, to be had before communication waits for the caller's stream: what that still
        has to do may use (and torch may fill) the same memory. Where communication does not wait for it, the
        memory is taken from the communication stream's."""
        if previous is None:
            return self._gpu.empty(shape, dtype)  # type: ignore[no-any-return]
        with self._gpu.on_communication_stream():
            return self._gpu.empty(shape, dtype)  # type: ignore[no-any-return]

    def _keep(self, run_async: bool, previous: EventOverlap | None, *tensors: torch.Tensor | None) -> None:
        """Where two streams use tensors and do not wait for each other, keep them until both are done."""
        if run_async or previous is not None:
            for tensor in tensors:
                if tensor is not None:
                    self._gpu.used_by_both(tensor)

    # Layout

    def layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous: EventOverlap | None,
        run_async: bool,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventHandle | None]:
        """Count tokens per rank and per expert, not per node, and mark which token goes to which rank."""
        self._raise_layout()
        num_tokens, num_topk = topk_idx.shape
        num_ranks = self._num_ranks
        local_experts = num_experts // num_ranks
        per_rank = self._new(previous, (num_ranks,), torch.int32)
        per_expert = self._new(previous, (num_experts,), torch.int32)
        in_rank = self._new(previous, (num_tokens, num_ranks), torch.bool)
        # No peer takes part: where nothing is to overlap, it is one more kernel of the caller's.
        is_apart = run_async or previous is not None or self._gpu.stream.is_capturing()
        if is_apart:
            self._gpu.stream.begin(previous)
        self._counting(counting.count_layout, num_topk)(
            self.communication_stream if is_apart else self._gpu.stream.current(),
            (num_ranks, -(-local_experts // COUNTED_EXPERTS) + 1),
            topk_idx,
            per_rank,
            per_expert,
            Seen(in_rank, torch.int8),
            int(self._layout_report.ctypes.data),
            num_tokens,
            num_topk,
            local_experts,
        )
        self._keep(run_async, previous, topk_idx, per_rank, per_expert, in_rank)
        if is_apart:
            return per_rank, None, per_expert, in_rank, self._gpu.stream.end(run_async)
        # A later call may wait for an event of the caller's from before, and not for his stream.
        self._gpu.stream.begin(None)
        return per_rank, None, per_expert, in_rank, None

    def _counting(self, kernel: Any, num_topk: int) -> Launcher:
        """A kernel that counts tokens with so many choices."""
        launch = self._counters.get((id(kernel), num_topk))
        if launch is None:
            launch = self._counters[id(kernel), num_topk] = self.talk.launcher(
                kernel,
                COUNT_WARPS,
                NUM_RANKS=self._num_ranks,
                TOPK_BLOCK=block_of(num_topk),
                EXPERT_BLOCK=COUNTED_EXPERTS,
                TILE_TOKENS=COUNTED_TOKENS,
            )
        return launch

    # Dispatch

    def dispatch(
        self,
        call: Call,
        payload: Payload,
        counts: GpuCounts,
        config: Config,
        num_worst_tokens: int,
        expert_alignment: int,
        previous: EventOverlap | None,
        run_async: bool,
    ) -> Received:
        """A dispatch that finds out its routing."""

        payload = _aligned_payload(payload)

        def whole_call() -> Received:
            return self._dispatch(
                call, payload, counts, config, num_worst_tokens, expert_alignment, previous, run_async
            )

        return self._guarded(call, whole_call, checks_ids=payload.topk_idx is not None)

    def _dispatch(
        self,
        call: Call,
        payload: Payload,
        counts: GpuCounts,
        config: Config,
        num_worst_tokens: int,
        expert_alignment: int,
        previous: EventOverlap | None,
        run_async: bool,
    ) -> Received:
        num_experts = counts.by_expert.shape[0]
        header = self._dispatch_header(payload, config, num_experts)
        window = -1
        if num_worst_tokens:
            window = offer_exactly(header, self.windows, payload, num_worst_tokens)
        else:
            if self._gpu.stream.is_capturing():
                raise InvalidCall(
                    "a dispatch that waits for its counts cannot be captured in a CUDA graph:"
                    " pass num_worst_tokens, or a handle"
                )
            offer_what_is_free(header, self.windows)
        routing = self._new_routing(payload, config, previous)
        local_experts = num_experts // self._num_ranks
        num_rows, by_expert = num_worst_tokens, []
        if num_worst_tokens:
            results, source = self._new_results(payload, num_rows, window, previous, with_source=True)
        self._begin(call, previous)
        ticket = self._notify(call, header, payload, counts, config, routing, not num_worst_tokens)
        if num_worst_tokens:
            self._transfer(payload, routing, results, source, config, local_experts)
            self.talk.meet(facts.ARRIVED_AT)
        else:
            # Rows are on their way before the host knows how many, if all receivers have windows.
            self._send_to_windows(payload, routing, config, local_experts, all_or_none=True)
            self.talk.meet(facts.ARRIVED_AT, unless_rings=True)
            try:
                totals = self.talk.wait_for_totals(call, ticket)
            except AnyEPError:
                self._forget_layout()
                raise
            num_rows = int(totals[facts.TOTAL_ROWS])
            by_expert = totals[facts.TOTAL_BY_EXPERT :][:local_experts].tolist()
            window = self._take_offered(header, payload, num_rows)
            uses_rings = bool(totals[facts.TOTAL_USES_RINGS])
            if uses_rings and totals[facts.TOTAL_ALL_WAIT]:
                window = self._grow(call, payload, num_rows, window)
            results, source = self._new_results(payload, num_rows, window, previous, with_source=True)
            if previous is None:
                # For the memory that was just taken.
                self._gpu.stream.begin(None)
            if uses_rings:
                self._transfer(payload, routing, results, source, config, local_experts)
                self.talk.meet(facts.ARRIVED_AT)
        routing = routing._replace(recv_src_idx=source)
        self._unpack(routing, results, num_rows, bool(num_worst_tokens))
        event = self._end(call, run_async)
        self._keep(run_async, previous, *self._inputs(payload), *counts, *routing)
        if window < 0:
            self._keep(run_async, previous, *results)
        if expert_alignment > 1:
            by_expert = [align(count, expert_alignment) for count in by_expert]
        return Received(
            results.x,
            results.scales,
            results.topk_idx,
            results.topk_weights,
            by_expert,
            routing,
            event,
        )

    def cached_dispatch(
        self,
        call: Call,
        payload: Payload,
        routing: GpuRouting,
        config: Config,
        previous: EventOverlap | None,
        run_async: bool,
    ) -> Received:
        """A dispatch along a known routing: a short letter, no counts."""
        payload = _aligned_payload(payload)

        def whole_call() -> Received:
            header = self._dispatch_header(payload, config, 0)
            window = offer_exactly(header, self.windows, payload, routing.num_recv_rows)
            results, source = self._new_results(payload, routing.num_recv_rows, window, previous)
            self._begin(call, previous)
            self._exchange_by_handle(header, call, routing, is_combine=False)
            self._transfer(payload, routing, results, source, config, 0)
            self.talk.meet(facts.ARRIVED_AT)
            event = self._end(call, run_async)
            self._keep(run_async, previous, *self._inputs(payload), *routing)
            if window < 0:
                self._keep(run_async, previous, *results)
            return Received(
                results.x,
                results.scales,
                None,
                None,
                [],
                routing,
                event,
            )

        return self._guarded(call, whole_call)

    def _exchange_by_handle(self, header: Array, call: Call, routing: GpuRouting, is_combine: bool) -> None:
        """Exchange short letters, by which kernels find out whether all ranks' handles are of one dispatch.

        A graph finds other contents in a handle in each replay: its digests are made in the graph.
        """
        found = routing.digests
        if found is None or self._gpu.stream.is_capturing():
            found = self._digests
            self._launch_digests(routing, found)
        self.talk.exchange(header, call.kind, routing.rank_prefix_matrix, found, is_combine)

    def _launch_digests(self, routing: GpuRouting, found: torch.Tensor) -> None:
        launch = self.talk.launcher(
            digests.digest_handle,
            DIGEST_WARPS,
            NUM_RANKS=self._num_ranks,
            CHANNEL_BLOCK=block_of(routing.num_channels),
            TILE_ROWS=DIGEST_TILE,
        )
        launch(
            self.communication_stream,
            (self._num_ranks, 2),
            self.talk.facts,
            routing.rank_prefix_matrix,
            routing.channel_prefix_matrix,
            routing.recv_channel_prefix_matrix,
            routing.recv_src_idx,
            routing.send_head,
            found,
            routing.num_tokens,
            routing.num_recv_rows,
            routing.num_channels,
        )

    def _new_routing(self, payload: Payload, config: Config, previous: EventOverlap | None) -> GpuRouting:
        """A routing to be filled, without source indices yet."""
        num_ranks = self._num_ranks
        by_rank = (payload.num_tokens, num_ranks)
        by_channel = (num_ranks, config.num_channels)
        head = self._new(previous, by_rank, torch.int32)
        return GpuRouting(
            self._new(previous, (num_ranks, num_ranks), torch.int32),
            self._new(previous, by_channel, torch.int32),
            self._new(previous, by_channel, torch.int32),
            head,
            self._new(previous, by_rank, torch.bool),
            head,
            self._new(previous, (2 * num_ranks,), torch.int64),
        )

    def _notify(
        self,
        call: Call,
        header: Array,
        payload: Payload,
        counts: GpuCounts,
        config: Config,
        routing: GpuRouting,
        host_waits: bool,
    ) -> int:
        """Number the rows, exchange letters with counts, and fill the routing; the ticket of the letters."""
        assert routing.digests is not None
        num_tokens, num_channels, num_ranks = payload.num_tokens, config.num_channels, self._num_ranks
        local_experts = counts.by_expert.shape[0] // num_ranks
        num_topk = payload.token.num_topk
        checks_experts = -(-local_experts // COUNTED_EXPERTS) + 1 if num_topk else 0
        self._counting(counting.place_tokens, num_topk)(
            self.communication_stream,
            (num_ranks, num_channels + checks_experts),
            Seen(counts.in_rank, torch.int8),
            payload.topk_idx if payload.topk_idx is not None else self.talk.state,
            counts.by_rank,
            counts.by_expert,
            # Numbers and counts of this rank's rows, which the letters turn into places and sums.
            routing.send_head,
            routing.channel_prefix_matrix,
            self.talk.state,
            num_tokens,
            num_channels,
            _tokens_per_channel(num_tokens, config),
            num_topk,
            local_experts,
        )
        ticket = self.talk.exchange_counts(
            header,
            call.kind,
            (routing.rank_prefix_matrix, routing.digests),
            payload.topk_idx,
            (counts.by_rank, counts.by_expert),
            (routing.channel_prefix_matrix, routing.recv_channel_prefix_matrix),
            (num_channels, local_experts),
            host_waits,
        )
        fill = self.talk.launcher(
            letter_kernels.fill_send_head,
            4,
            NUM_RANKS=num_ranks,
            RANK_BLOCK=self.talk.rank_block,
            TILE_TOKENS=HEAD_TOKENS,
        )
        fill(
            self.communication_stream,
            (-(-num_tokens // HEAD_TOKENS),),
            self.talk.facts,
            self.talk.state,
            routing.send_head,
            routing.rank_prefix_matrix,
            # The user may use his mask again; the handle keeps its own.
            Seen(routing.is_token_in_rank, torch.int8),
            routing.digests,
            num_tokens,
        )
        return ticket

    def _dispatch_header(self, payload: Payload, config: Config, num_experts: int) -> Array:
        ring_rows = self.ring_area(config, payload.token).num_rows
        return dispatch_header(payload, num_experts, config.num_channels, ring_rows)

    def _take_offered(self, header: Array, payload: Payload, num_rows: int) -> int:
        """Take the window that every rank chose from this rank's offers; -1 if none was large enough."""
        needed = max(payload.window(num_rows).num_bytes, 128)
        for index in range(int(header[NUM_OFFERS])):
            offset, size = int(header[OFFERS + 2 * index]), int(header[OFFERS + 2 * index + 1])
            if size >= needed:
                self.windows.allocate_at(offset, needed)
                return offset
        return -1

    def _grow(self, call: Call, payload: Payload, num_rows: int, window: int) -> int:
        """Some rank has no window: all ranks, which know it, add windows if they may. This rank's window."""
        needed = max(payload.window(int(rows)).num_bytes for rows in self.talk.rows_of)
        first = self._connection.grow(max(needed, 128), lambda number: self.talk.meet_hosts(call, number))
        if first is None:
            return window
        token = payload.token
        self.talk.place_in_new_block(first, token.hidden_bytes, token.num_topk, token.num_scales)
        if window < 0:
            self.windows.allocate_at(first, max(payload.window(num_rows).num_bytes, 128))
            window = first
        return window

    def _new_results(
        self,
        payload: Payload,
        num_rows: int,
        window: int,
        previous: EventOverlap | None,
        with_source: bool = False,
    ) -> tuple[_Results, torch.Tensor]:
        """The tensors that a dispatch fills: in the window at `window`, or (-1) in own memory; and the source
        indices, which a handle keeps longer than anybody keeps rows."""
        source = self.talk.state
        if with_source or window < 0:
            source = self._new(previous, (num_rows,), torch.int32)
        token, scales = payload.token, payload.scales
        kinds: list[tuple[int, torch.dtype] | None] = [
            (payload.x.shape[1], payload.x.dtype),
            None,
            (token.num_topk, torch.int64) if token.num_topk else None,
            (token.num_topk, torch.float32) if token.num_topk else None,
            (token.num_scales, scales.dtype) if scales is not None else None,
        ]
        places = payload.window(num_rows)
        num_bytes = max(places.num_bytes, 128)
        if window >= 0 and num_rows:
            wanted = [
                (offset, (num_rows, kind[0]), kind[1])
                for kind, offset in zip(kinds, places.offsets, strict=True)
                if kind is not None
            ]
            made = self.windows.lend(window, num_bytes, wanted)
        else:
            made = [self._new(previous, (num_rows, kind[0]), kind[1]) for kind in kinds if kind is not None]
            if window >= 0:
                # There is nothing to put into it.
                self.windows.give_back(window, num_bytes)
        tensors = iter(made)
        x, _, ids, weights, new_scales = (None if kind is None else next(tensors) for kind in kinds)
        assert x is not None
        return _Results(x, ids, weights, new_scales), source

    def _transfer(
        self,
        payload: Payload,
        routing: GpuRouting,
        results: _Results,
        source: torch.Tensor,
        config: Config,
        experts_per_rank: int,
    ) -> None:
        """Move the rows: by window where the receiver has one, else through its rings."""
        if self.windows.num_bytes:
            self._send_to_windows(payload, routing, config, experts_per_rank, all_or_none=False)
        self._send_through_rings(payload, routing, results, source, config, experts_per_rank)

    def _send_to_windows(
        self, payload: Payload, routing: GpuRouting, config: Config, experts_per_rank: int, all_or_none: bool
    ) -> None:
        token, nothing = payload.token, self.talk.state
        row_words, scales = token.hidden_bytes // 4, payload.scales
        tile = self._tiles.dispatch.fitting(row_words)
        send = self.talk.launcher(
            windows.send_to_windows,
            tile.warps,
            NUM_RECEIVERS=self._num_ranks,
            RECEIVER_BLOCK=self.talk.rank_block,
            SCALE_BLOCK=block_of(token.num_scales),
            TOPK_BLOCK=block_of(token.num_topk),
            TILE_TOKENS=tile.tokens,
            TILE_WORDS=tile.words,
            CHUNK_TOKENS=CHUNK_TOKENS,
            ALL_OR_NONE=all_or_none,
        )
        send(
            self.communication_stream,
            (self._num_programs(config),),
            _words(payload.x),
            Seen(scales, torch.int32) if scales is not None else nothing,
            payload.topk_idx if payload.topk_idx is not None else nothing,
            payload.topk_weights if payload.topk_weights is not None else nothing,
            routing.send_head,
            self.talk.places,
            self.talk.state,
            payload.num_tokens,
            row_words,
            token.num_scales,
            *(scales.stride() if scales is not None else (0, 0)),
            token.num_topk,
            experts_per_rank,
        )

    def _unpack(self, routing: GpuRouting, results: _Results, num_rows: int, pad: bool) -> None:
        """Take what must outlive the window out of it, and finish the digests."""
        ids = results.topk_idx
        unpack = self.talk.launcher(
            windows.unpack_window,
            4,
            NUM_RANKS=self._num_ranks,
            PAD=pad and ids is not None,
            BLOCK=UNPACK_BLOCK,
        )
        unpack(
            self.communication_stream,
            (-(-num_rows // UNPACK_BLOCK),),
            self.talk.places,
            self.talk.state,
            self._rank,
            routing.recv_src_idx,
            ids if ids is not None else self.talk.state,
            routing.rank_prefix_matrix,
            routing.digests,
            num_rows,
            ids.shape[1] if ids is not None else 0,
        )

    def _inputs(self, payload: Payload) -> tuple[torch.Tensor | None, ...]:
        return payload.x, payload.scales, payload.topk_idx, payload.topk_weights

    # Combine

    def combine(
        self, call: Call, outputs: Outputs, previous: EventOverlap | None, run_async: bool
    ) -> Combined:
        """The way back: every token's rows, added up at its source."""
        return self._guarded(call, lambda: self._combine(call, outputs, previous, run_async))

    def _combine(
        self, call: Call, outputs: Outputs, previous: EventOverlap | None, run_async: bool
    ) -> Combined:
        outputs = _aligned_outputs(outputs)
        x, routing, weights, biases, config = outputs
        assert isinstance(routing, GpuRouting)
        num_topk = weights.shape[1] if weights is not None else 0
        row_bytes = x.shape[1] * x.element_size()
        token = token_layout(row_bytes, 0, num_topk)
        header = signature(
            row_bytes=row_bytes,
            dtype=dtype_word(x.dtype),
            num_topk=num_topk,
            num_channels=config.num_channels,
            ring_rows=self.ring_area(config, token).num_rows,
        )
        header[RESULT_ROWS] = x.shape[0]
        out = self._new(previous, (routing.num_tokens, x.shape[1]), x.dtype)
        out_weights = None
        if weights is not None:
            out_weights = self._new(previous, (routing.num_tokens, num_topk), torch.float32)
        self._begin(call, previous)
        taken = self._stage(header, outputs)
        self._exchange_by_handle(header, call, routing, is_combine=True)
        if self.windows.num_bytes:
            self._sum(outputs, out, out_weights)
        self._combine_through_rings(outputs, out, out_weights)
        # Until every reader is done, x must stay as it is.
        self.talk.meet(facts.PULLED_AT)
        event = self._end(call, run_async)
        self._keep(run_async, previous, x, weights, out, out_weights, *biases, *routing)
        self._give_back(taken)
        return Combined(out, out_weights, event)

    def _sum(self, outputs: Outputs, out: torch.Tensor, out_weights: torch.Tensor | None) -> None:
        x, routing, _, biases, config = outputs
        assert isinstance(routing, GpuRouting)
        tile = self._tiles.combine
        num_topk = out_weights.shape[1] if out_weights is not None else 0
        pull = self.talk.launcher(
            sums.pull_and_sum,
            tile.warps,
            DTYPE=DTYPE_CODES[x.dtype],
            NUM_BIASES=len(biases),
            NUM_RANKS=self._num_ranks,
            RANK_BLOCK=self.talk.rank_block,
            TOPK_BLOCK=block_of(num_topk),
            TILE_TOKENS=tile.tokens,
            TILE_VALUES=tile.values,
            CHUNK_TOKENS=CHUNK_TOKENS,
            IN_HARDWARE=self._gpu.rounds_in_hardware,
        )
        pull(
            self.communication_stream,
            (self._num_programs(config),),
            _bits(out),
            out_weights if out_weights is not None else self.talk.state,
            *(_bits(bias) for bias in biases),
            *(self.talk.state,) * (2 - len(biases)),
            routing.send_head,
            self.talk.places,
            self.talk.state,
            x.data_ptr(),
            self._rank,
            routing.num_tokens,
            x.shape[1],
            num_topk,
        )

    def _stage(self, header: Array, outputs: Outputs) -> list[tuple[int, int]]:
        """Say where peers can read x and the weights: where they are, if that is a window, else in a copy.

        Returns the windows that the call took. If there is no room, the rows go through rings; so they do,
        even if there are none, where there are no windows at all: somebody has to fill the results.
        """
        header[X_OFFSET], header[WEIGHTS_OFFSET] = -1, -1
        if not self.windows.num_bytes:
            return []
        taken: list[tuple[int, int]] = []
        offsets: list[int] = []
        for tensor in (outputs.x, outputs.topk_weights):
            if tensor is None or tensor.numel() == 0:
                offsets.append(0)
                continue
            offset = self.windows.offset_of(tensor)
            if offset is None:
                num_bytes = tensor.numel() * tensor.element_size()
                offset = self.windows.allocate(num_bytes)
                if offset is None:
                    self._give_back(taken)
                    return []
                taken.append((offset, num_bytes))
                window = self.windows.tensor(offset, tuple(tensor.shape), tensor.dtype)
                if tensor is outputs.x:
                    self._copy_for_peers(outputs, window)
                else:
                    with self._gpu.on_communication_stream():
                        window.copy_(tensor)
            offsets.append(offset)
        header[X_OFFSET], header[WEIGHTS_OFFSET] = offsets
        return taken

    def _copy_for_peers(self, outputs: Outputs, window: torch.Tensor) -> None:
        """Copy the rows that other ranks read; what this rank wants itself, it reads where it is."""
        x, routing, config = outputs.x, outputs.routing, outputs.config
        assert isinstance(routing, GpuRouting)
        launch = self.talk.launcher(
            sums.copy_for_peers, COPY_WARPS, NUM_RANKS=self._num_ranks, TILE_WORDS=COPY_WORDS
        )
        launch(
            self.communication_stream,
            (self._num_programs(config),),
            _words(x),
            _words(window),
            routing.rank_prefix_matrix,
            self._rank,
            x.shape[0],
            x.shape[1] * x.element_size() // 4,
        )

    def _give_back(self, taken: list[tuple[int, int]]) -> None:
        """Later calls on the communication stream come after this one: they may have its windows at once."""
        for window, num_bytes in taken:
            self.windows.give_back(window, num_bytes)

    # Rings

    def ring_area(self, config: Config, token: TokenLayout) -> RingArea:
        """The rings of a call."""
        return self._areas.area_for(config, token)

    def _send_through_rings(
        self,
        payload: Payload,
        routing: GpuRouting,
        results: _Results,
        source: torch.Tensor,
        config: Config,
        experts_per_rank: int,
    ) -> None:
        """Rows for receivers without a window, and what comes if this rank has none; nothing if all have."""
        token, scales, nothing = payload.token, payload.scales, self.talk.state
        area = self.ring_area(config, token)
        tile = self._tiles.ring_dispatch
        launch = self.talk.launcher(
            rings.dispatch_through_rings,
            tile.warps,
            NUM_RANKS=self._num_ranks,
            RANK_BLOCK=self.talk.rank_block,
            SCALE_BLOCK=block_of(token.num_scales),
            TOPK_BLOCK=block_of(token.num_topk),
            TILE_TOKENS=at_most(tile.tokens, area.num_rows),
            TILE_WORDS=tile.words,
            STAGES=tile.stages,
        )
        parts = (results.x, source, results.topk_idx, results.topk_weights, results.scales)
        addresses = [part.data_ptr() if part is not None else 0 for part in parts]
        meta_at, scales_at, ids_at, weights_at, _ = _slot_offsets(token)
        launch(
            self.communication_stream,
            (self._num_programs(config),),
            _words(payload.x),
            Seen(scales, torch.int32) if scales is not None else nothing,
            payload.topk_idx if payload.topk_idx is not None else nothing,
            payload.topk_weights if payload.topk_weights is not None else nothing,
            routing.send_head,
            self.talk.places,
            self.talk.keep_addresses(addresses),
            routing.rank_prefix_matrix,
            routing.recv_channel_prefix_matrix,
            *self._ring_arguments(area),
            config.num_channels,
            meta_at,
            scales_at,
            ids_at,
            weights_at,
            payload.num_tokens,
            _tokens_per_channel(payload.num_tokens, config),
            token.hidden_bytes // 4,
            token.num_scales,
            *(scales.stride() if scales is not None else (0, 0)),
            token.num_topk,
            experts_per_rank,
        )

    def _combine_through_rings(
        self, outputs: Outputs, out: torch.Tensor, out_weights: torch.Tensor | None
    ) -> None:
        """The sums of rows of which some lie in no window; nothing if all do."""
        x, routing, weights, biases, config = outputs
        assert isinstance(routing, GpuRouting)
        num_topk = weights.shape[1] if weights is not None else 0
        token = token_layout(x.shape[1] * x.element_size(), 0, num_topk)
        area = self.ring_area(config, token)
        tile, tile_values = self._tiles.ring_combine
        weights_at = _slot_offsets(token)[3]
        launch = self.talk.launcher(
            rings.combine_through_rings,
            tile.warps,
            DTYPE=DTYPE_CODES[x.dtype],
            NUM_BIASES=len(biases),
            NUM_RANKS=self._num_ranks,
            RANK_BLOCK=self.talk.rank_block,
            TOPK_BLOCK=block_of(num_topk),
            TILE_TOKENS=at_most(tile.tokens, area.num_rows),
            TILE_WORDS=tile.words,
            STAGES=tile.stages,
            TILE_VALUES=tile_values,
            IN_HARDWARE=self._gpu.rounds_in_hardware,
        )
        launch(
            self.communication_stream,
            (self._num_programs(config),),
            _words(x),
            weights if weights is not None else self.talk.state,
            _bits(out),
            out_weights if out_weights is not None else self.talk.state,
            *(_bits(bias) for bias in biases),
            *(self.talk.state,) * (2 - len(biases)),
            routing.send_head,
            self.talk.places,
            routing.rank_prefix_matrix,
            routing.recv_channel_prefix_matrix,
            *self._ring_arguments(area),
            config.num_channels,
            weights_at,
            routing.num_tokens,
            _tokens_per_channel(routing.num_tokens, config),
            x.shape[1],
            num_topk,
        )

    def _ring_arguments(self, area: RingArea) -> tuple[Any, ...]:
        """What both ring kernels take: where the rings are, and how long to wait."""
        known = self._known_ring_arguments.get(id(area))
        if known is not None:
            return known[1]
        talk, control = self.talk, self.talk.control
        tail, head = control.block("ring tail"), control.block("ring head")
        arguments = (
            talk.heaps,
            talk.state,
            talk.alarm,
            talk.patience_ns,
            self._rank,
            area.start,
            tail.start,
            tail.stride,
            head.start,
            head.stride,
            area.num_rows,
            area.token_bytes,
        )
        if len(self._known_ring_arguments) >= MAX_KNOWN_AREAS:
            self._known_ring_arguments.clear()
        # An area is known by its identity as long as it lives, and it is kept alive here.
        self._known_ring_arguments[id(area)] = (area, arguments)
        return arguments

    # Handles

    def routing_of(self, handle: Any, last: tuple[Any, GpuRouting] | None) -> GpuRouting:
        """A client's handle; the last one is known already."""
        if last is not None and handle is last[0]:
            return last[1]._replace(digests=known_digests(handle))
        return checked_handle(handle, self._num_ranks, self._gpu.device)


@lru_cache(maxsize=64)
def _slot_offsets(token: TokenLayout) -> tuple[int, ...]:
    """Where source meta, scales, ids and weights lie in a slot, and the bytes of a slot."""
    return tuple(slot_offsets(token).tolist())


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that begins at a multiple of 16 bytes, as kernels expect rows to; nearly all do."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _aligned_payload(payload: Payload) -> Payload:
    x = _aligned(payload.x)
    return payload if x is payload.x else dataclasses.replace(payload, x=x)


def _aligned_outputs(outputs: Outputs) -> Outputs:
    biases = tuple(_aligned(bias) for bias in outputs.biases)
    return outputs._replace(x=_aligned(outputs.x), biases=biases)


def _tokens_per_channel(num_tokens: int, config: Config) -> int:
    return max(1, -(-num_tokens // config.num_channels))


def _words(x: torch.Tensor) -> Seen:
    """Rows as words of 4 bytes."""
    return Seen(x, torch.int32)


def _bits(x: torch.Tensor) -> Seen:
    """Values as kernels see them: those of 16 bits by their bits."""
    return Seen(x, torch.uint16 if x.element_size() == 2 else x.dtype)
