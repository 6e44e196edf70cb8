"""Low-latency mode on GPUs that share memory: the calls of `low_latency`, with every wait in a kernel.

Each half of a call is two kernels: `open_call` and one that sends; `receive_records` and one that takes rows.
The host never waits. It does not know when a call is over, nor its number, since graphs may be replayed: call
numbers are in the GPU's memory, and kernels derive from them which of the two sets of slots a call uses.
Calls with hooks run on the caller's stream, the others on the communication stream. All halves run in the
order in which the host launched them, whatever their streams.

Where ranks may be masked, kernels mask ranks that do not arrive; the hosts only meet to unmask them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch

from anyep import ending, outcomes
from anyep.backends import cpu
from anyep.backends.cuda import constants
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.kernels import slots as kernels
from anyep.backends.cuda.tiles import block_of
from anyep.calls import Array, Call, Kind, Phase, Stall, name_of_call
from anyep.control import records
from anyep.control.plane import ControlPlane
from anyep.control.records import Format
from anyep.control.reports import Reports, still_missing
from anyep.errors import AnyEPError, BufferBroken, Disagreement, InvalidCall, Masked, no_expert
from anyep.layout import NUM_SLOT_SETS, ControlRegion, LowLatencySlots
from anyep.modes.low_latency import REFUSAL_TEXTS, LowLatency, Outputs, Received, Sent, Tokens
from anyep.modes.masks import Masks, log
from anyep.sizes import LOW_LATENCY_HEADER_BYTES, LowLatencySizes

CHANNELS: Final = 128
CAST_BLOCKS: Final = 16
"""Blocks of 128 values that a program casts or copies at once: 16 values per thread."""
SUM_BLOCKS: Final = 8
LIST_CHOICES: Final = 1024
PACK_TILE: Final = (2, 1024, 64)
"""Rows, words and scale words that a program handles at once."""
LIST_TILE: Final = 128
RECORD_TILE: Final = 32
SEARCH_TILE: Final = 32
MOST_SHARES: Final = 64
PROGRAMS_PER_SM: Final = 16
UNKNOWN_GRAPH: Final = -1
T = TypeVar("T")
Launch = Callable[[Any], None]


@dataclass(frozen=True)
class _Job:
    """A sent call: its state, how to receive it, and the tensors that receiving needs."""

    call: Call
    state: torch.Tensor
    receive: Launch
    tensors: tuple[torch.Tensor | None, ...]
    stream: Any
    is_captured: bool


class GpuLowLatency(LowLatency, ending.Part):
    """Low-latency mode of one rank on a GPU. It does not check what the user passed; `Buffer` does."""

    def __init__(
        self,
        device_control: DeviceControl,
        reports: Reports,
        ranks_on_gpu: int,
        start: int,
        num_bytes: int,
        can_shrink: bool,
    ) -> None:
        self._device_control = device_control
        self._reports = reports
        self._gpu = device_control.gpu
        self._control: ControlPlane = self._reports.control
        self._rank, self._num_ranks = device_control.rank, device_control.num_ranks
        self._region: ControlRegion = device_control.region
        self._heap = device_control.heap
        self._start = start
        self._num_bytes = num_bytes
        self._can_shrink = can_shrink
        self._stream = _InLine()
        self._order = _Order(self._gpu)
        self._unheard: AnyEPError | None = None
        """The error of an earlier call, to be raised by the next call."""
        self._report = self._gpu.words(constants.REPORTED_HEADERS + records.NUM_WORDS * self._num_ranks)
        self._reports.add(self._report, self._error_of)
        self._words = self._constants()
        self._device_constants = self._gpu.table(self._words)
        self._generations = self._gpu.table([0] * self._num_ranks)
        self._blocks = {"NUM_RANKS": self._num_ranks, "RANK_BLOCK": device_control.rank_block}
        self._shrink = {"CAN_SHRINK": can_shrink, **self._blocks}
        self._programs = max(1, PROGRAMS_PER_SM * int(self._gpu.num_sms) // ranks_on_gpu)
        # Tells the kernels of every rank the generation of a rank. A waiting kernel reads its host's, too.
        tell_kernels = partial(
            device_control.launcher(kernels.mask_rank, 1, **self._blocks),
            self._gpu.side_stream,
            (1,),
            self._device_constants,
            device_control.heaps,
        )
        # Load the kernel now: when it is needed, it may be too late to load it.
        tell_kernels(-1, 0)
        self.masks: GpuMasks = GpuMasks(self._control, self._region, self._heap, self._gpu, tell_kernels)

        # The same attributes as in `LowLatency`, whose methods that only read them are inherited.
        self._last_call = 0
        self._all_over_until = 0
        self._in_flight = [None] * NUM_SLOT_SETS
        self._jobs: dict[Call, _Job] = {}
        self._dropped = deque()
        self._num_open = 0
        self._places: Any = None
        self._known_places: dict[LowLatencySizes, _GpuPlaces] = {}
        self._agreed = False
        self._calls_with_places = 0
        self._num_cleanings = 0
        self._unfilled = [None] * NUM_SLOT_SETS
        self._lent_for = None
        ending.register(self)

    def _constants(self) -> list[int]:
        region = self._region
        record, packed = region.blocks.record, region.blocks.packed
        words: list[int] = self._device_control.constants.tolist()
        words[constants.REPORT] = int(self._report.ctypes.data)
        words += [0] * (constants.NUM_LOW_LATENCY_CONSTANTS - len(words))
        # The second word of a block that is otherwise used only in the host's heap.
        words[constants.CALLS_AT] = region.blocks.status.start + 8
        words[constants.RECORD_AT] = record.start
        words[constants.RECORD_STRIDE] = record.stride
        words[constants.RECORD_SET_STRIDE] = record.offset(0, 1) - record.start
        words[constants.PACKED_AT] = packed.start
        words[constants.PACKED_SET_STRIDE] = packed.offset(0, 1) - packed.start
        words[constants.MASK_AT] = region.blocks.mask.start
        words[constants.MASK_STRIDE] = region.blocks.mask.stride
        assert packed.stride == words[constants.FLAG_STRIDE]
        return words

    # Calls

    def begin(self, kind: Kind) -> Call:
        """Take the host's next call number, if a set of slots is free for it."""
        self._control.check_works()
        if not self._gpu.stream.is_capturing():
            self._forget_dropped_hooks()
            self._check_set_is_free(self._last_call + 1)
        self._last_call += 1
        return Call(self._last_call, kind)

    def refuse(self, call: Call, error: AnyEPError) -> None:
        """Tell the peers that this rank's call was wrong; they raise instead of waiting."""
        if self._gpu.stream.is_capturing():
            return
        try:
            self._control.check_works()
        except BufferBroken:
            return
        text = REFUSAL_TEXTS + call.number % NUM_SLOT_SETS
        self._control.publish_refusal(text, str(error))
        state = self._new_state(0)

        def launch(stream: Any) -> None:
            self._open(stream, state, records.record(call.kind), 1 + text, posts=True)
            self._finish_call(stream, state)

        self._in_line(launch)

    def _places_for(self, sizes: LowLatencySizes) -> Any:
        if self._places is None or self._places.slots.sizes != sizes:
            known = self._known_places.get(sizes)
            if known is None:
                if self._gpu.stream.is_capturing():
                    raise InvalidCall(
                        "the first call with these sizes cannot be captured in a CUDA graph:"
                        " make such a call before"
                    )
                slots = LowLatencySlots(self._start, sizes, self._num_ranks)
                known = _GpuPlaces(slots, self._heap.addresses, self._rank, self._gpu)
                self._known_places[sizes] = known
            self._places = known
            self._agreed = False
            self._calls_with_places = 0
        return self._places

    # Dispatch

    def dispatch(self, call: Call, tokens: Tokens, run_async: bool, by_hook: bool) -> tuple[Received, Sent]:
        """Send tokens to their chosen experts, and receive the tokens that chose this rank's experts."""

        def whole_call() -> tuple[Received, Sent]:
            places = self._places_for(tokens.sizes)
            received = self._new_results(places, tokens)
            state = self._new_state(tokens.sizes.num_experts)
            header = records.record(call.kind, tokens.sizes, tokens.travel)

            def send(stream: Any) -> None:
                self._open(stream, state, header)
                self._launch_tokens(stream, state, places, tokens)

            def receive(stream: Any) -> None:
                self._receive_record(stream, state, places.slots.num_local_experts, tokens.wait_stats)
                self._launch_pack(stream, state, places, tokens, received)

            tensors = (tokens.x, tokens.topk_idx, tokens.expert_stats, tokens.wait_stats, *received)
            sent = self._launch(call, state, send, receive, tensors, run_async, by_hook)
            if sent.hook is not None and call in self._jobs:
                self._unfilled[call.number % NUM_SLOT_SETS] = received.layout_range.data_ptr()
            return received, sent

        return self._guarded(call, whole_call)

    def _new_results(self, places: Any, tokens: Tokens) -> Received:
        slots, gpu = places.slots, self._gpu
        num_experts, num_rows = slots.num_local_experts, places.rows_per_expert
        scales = None
        if tokens.travel is not Format.BF16:
            dtype = torch.int32 if tokens.travel is Format.FP8_UE8M0 else torch.float32
            scales = gpu.empty((num_experts, tokens.num_scale_words, num_rows), dtype).transpose(1, 2)
        return Received(
            gpu.empty(
                (num_experts, num_rows, slots.sizes.hidden),
                torch.bfloat16 if scales is None else torch.float8_e4m3fn,
            ),
            scales,
            gpu.empty((num_experts,), torch.int32),
            gpu.empty((num_experts, num_rows), torch.int32),
            gpu.empty((num_experts, self._num_ranks), torch.int64),
        )

    def _launch_tokens(self, stream: Any, state: torch.Tensor, places: Any, tokens: Tokens) -> None:
        num_tokens, num_topk = tokens.topk_idx.shape
        sizes = tokens.sizes
        slot_block = block_of(num_topk)
        num_shares = self._shares(num_tokens, -(-sizes.hidden // (CAST_BLOCKS * CHANNELS)))
        send = self._device_control.launcher(
            kernels.send_tokens,
            4,
            TRAVEL=int(tokens.travel),
            NUM_TOPK=num_topk,
            SLOT_BLOCK=slot_block,
            NUM_SHARES=num_shares,
            TILE_BLOCKS=CAST_BLOCKS,
            TILE_TOKENS=max(16, LIST_CHOICES // slot_block),
            **self._blocks,
        )
        send(
            stream,
            (sizes.num_experts + num_tokens * num_shares,),
            *self._common(state),
            tokens.x.view(torch.uint16),
            tokens.topk_idx,
            places.messages,
            places.lists_for_peers,
            num_tokens,
            sizes.hidden,
            places.message_bytes,
            places.list_stride,
            places.slots.num_local_experts,
        )

    def _launch_pack(
        self, stream: Any, state: torch.Tensor, places: Any, tokens: Tokens, received: Received
    ) -> None:
        num_experts = places.slots.num_local_experts
        tile_rows, tile_words, tile_scales = PACK_TILE
        has_scales, has_stats = received.scales is not None, tokens.expert_stats is not None
        most_shares = -(-tokens.sizes.num_max_tokens // tile_rows)
        # Twice as many, because the work is uneven.
        num_shares = min(2 * self._shares(num_experts * self._num_ranks, most_shares), most_shares)
        pack = self._device_control.launcher(
            kernels.pack_tokens,
            4,
            HAS_SCALES=has_scales,
            HAS_STATS=has_stats,
            TILE_ROWS=tile_rows,
            TILE_WORDS=tile_words,
            TILE_SCALES=tile_scales,
            **self._shrink,
        )
        pack(
            stream,
            (num_experts, self._num_ranks, num_shares),
            *self._common(state),
            places.messages,
            places.lists_of_peers,
            received.x.view(torch.int32),
            received.scales.transpose(1, 2).view(torch.int32) if received.scales is not None else state,
            received.src_info,
            received.layout_range,
            received.counts,
            tokens.expert_stats if has_stats else state,
            places.message_bytes,
            places.list_stride,
            tokens.sizes.hidden * received.x.element_size() // 4,
            tokens.num_scale_words,
            num_experts,
            places.rows_per_expert,
        )

    # Combine

    def combine(
        self, call: Call, outputs: Outputs, run_async: bool, by_hook: bool
    ) -> tuple[torch.Tensor, Sent]:
        """Add up the weighted expert outputs of each of this rank's tokens, in top-k order."""

        def whole_call() -> tuple[torch.Tensor, Sent]:
            places = self._places_for(outputs.sizes)
            out = outputs.out
            if out is None:
                out = self._gpu.empty((outputs.topk_idx.shape[0], outputs.sizes.hidden), torch.bfloat16)
            state = self._new_state(outputs.sizes.num_experts)
            travel = Format.LOGFMT if outputs.use_logfmt else Format.BF16
            header = records.record(call.kind, outputs.sizes, travel)

            def send(stream: Any) -> None:
                self._open(stream, state, header)
                self._launch_rows(stream, state, places, outputs)

            def receive(stream: Any) -> None:
                self._receive_record(stream, state, places.slots.num_local_experts, outputs.wait_stats)
                self._launch_sum(stream, state, places, outputs, out)

            tensors = (
                *(outputs.x, outputs.topk_idx, outputs.topk_weights, outputs.src_info, outputs.layout_range),
                *(outputs.wait_stats, out),
            )
            return out, self._launch(call, state, send, receive, tensors, run_async, by_hook)

        return self._guarded(call, whole_call)

    def check_ids(self, topk_idx: torch.Tensor, num_experts: int) -> None:
        """Does nothing: the kernels check the ids when they read them."""

    def count_rows(self, layout_range: torch.Tensor, src_info: torch.Tensor, max_tokens: int) -> int:
        """The kernels check a handle's contents when they read it; the host does not know its rows."""
        return 0

    def _launch_rows(self, stream: Any, state: torch.Tensor, places: Any, outputs: Outputs) -> None:
        num_experts = places.slots.num_local_experts
        num_shares = self._shares(num_experts, outputs.sizes.num_max_tokens)
        give_back = self._device_control.launcher(
            kernels.return_rows,
            4,
            USE_LOGFMT=outputs.use_logfmt,
            NUM_TOPK=outputs.topk_idx.shape[1],
            NUM_SHARES=num_shares,
            TILE_BLOCKS=CAST_BLOCKS,
            TILE_ROWS=LIST_TILE,
            **self._blocks,
        )
        give_back(
            stream,
            (num_experts * (self._num_ranks + (0 if outputs.zero_copy else num_shares)),),
            *self._common(state),
            outputs.x.view(torch.uint16) if not outputs.zero_copy else state,
            outputs.topk_idx,
            outputs.src_info,
            outputs.layout_range,
            places.messages,
            places.lists_for_peers,
            outputs.topk_idx.numel(),
            outputs.sizes.hidden,
            places.message_bytes,
            places.list_stride,
            num_experts,
            places.rows_per_expert,
        )

    def _launch_sum(
        self, stream: Any, state: torch.Tensor, places: Any, outputs: Outputs, out: torch.Tensor
    ) -> None:
        num_tokens, num_topk = outputs.topk_idx.shape
        hidden = outputs.sizes.hidden
        tile_blocks = CAST_BLOCKS if outputs.use_logfmt else SUM_BLOCKS
        num_shares = self._shares(num_tokens, -(-hidden // (tile_blocks * CHANNELS)))
        add_up = self._device_control.launcher(
            kernels.sum_tokens,
            4,
            USE_LOGFMT=outputs.use_logfmt,
            NUM_TOPK=num_topk,
            SLOT_BLOCK=block_of(num_topk),
            TILE_LIST=SEARCH_TILE,
            TILE_BLOCKS=tile_blocks,
            IN_HARDWARE=self._gpu.rounds_in_hardware,
            **self._shrink,
        )
        add_up(
            stream,
            # A call without tokens has to be closed by a program, too.
            (max(1, num_tokens), num_shares),
            *self._common(state),
            outputs.topk_idx,
            outputs.topk_weights,
            places.messages,
            places.lists_of_peers,
            out.view(torch.uint16),
            num_tokens,
            hidden,
            places.message_bytes,
            places.list_stride,
            places.slots.num_local_experts,
            places.rows_per_expert,
        )

    def _shares(self, num_pieces: int, most: int) -> int:
        """Programs per piece of work, such that the programs of all ranks fill the GPU."""
        return max(1, min(self._programs // max(1, num_pieces), most, MOST_SHARES))

    def next_combine_buffer(self, sizes: LowLatencySizes) -> torch.Tensor:
        """Where the next call, a combine with `zero_copy`, looks for its rows: [experts, rows, hidden].

        Waits for the earlier calls, since only they know which slots come next.
        """
        if self._gpu.stream.is_capturing():
            raise _not_captured("get_next_low_latency_combine_buffer")
        call = Call(self._last_call + 1, Kind.LOW_LATENCY_COMBINE)
        self._control.check_works()
        self._forget_dropped_hooks()
        self._check_set_is_free(call.number)

        def whole_call() -> torch.Tensor:
            places = self._places_for(sizes)
            state = self._new_state(0)
            header = records.record(call.kind, sizes)
            self._in_line(lambda stream: self._open(stream, state, header, advances=False))
            self._settle()
            number = int(state[constants.NUMBER])
            slots = places.slots
            messages: torch.Tensor = self._heap.lend(
                slots.row_offset(number % NUM_SLOT_SETS, 0),
                (slots.num_local_experts * places.rows_per_expert, places.message_bytes // 2),
                torch.bfloat16,
                lambda: None,
            )
            rows = messages[:, LOW_LATENCY_HEADER_BYTES // 2 :][:, : sizes.hidden]
            return rows.view(slots.num_local_experts, places.rows_per_expert, sizes.hidden)

        rows = self._guarded(call, whole_call)
        self._lent_for = (call.number, sizes)
        return rows

    def check_was_lent(self, call: Call, sizes: LowLatencySizes) -> None:
        """Refuse `zero_copy` if the rows cannot be where this call looks for them."""
        if self._gpu.stream.is_capturing():
            raise InvalidCall(
                "zero_copy cannot be captured in a CUDA graph: a replay may find its slots in the other set;"
                " leave zero_copy out"
            )
        super().check_was_lent(call, sizes)

    # Cleaning

    def clean(self, call: Call, sizes: LowLatencySizes) -> None:
        """Let all ranks change to other sizes, once no rank needs the slots of earlier calls any more."""
        if self._gpu.stream.is_capturing():
            raise _not_captured("clean_low_latency_buffer")

        def whole_call() -> None:
            state = self._new_state(0)
            header = records.record(call.kind, sizes)

            def launch(stream: Any) -> None:
                self._open(stream, state, header, posts=True)
                self._receive_record(stream, state, 0, None)
                self._finish_call(stream, state)

            self._in_line(launch)
            self._settle()
            self._num_cleanings += 1
            self._places_for(sizes)
            self._agreed = True

        self._guarded(call, whole_call)

    # Masks

    def unmask(self, ranks: Sequence[int]) -> None:
        """Unmask ranks; all unmasked ranks and the ranks to unmask take part."""
        with contextlib.suppress(Masked):
            self._settle()
        before = self._last_call
        super().unmask(ranks)
        # Skip the reports from the time when this rank was masked.
        self._report[constants.NUM_READ] = self._report[constants.NUM_REPORTS]
        with self.masks.beside_kernels():
            self._generations.copy_(torch.from_numpy(self.masks.generations))
            if self._last_call != before:
                self._number().fill_(self._last_call)
            self._gpu.synchronize()

    def _number(self) -> torch.Tensor:
        number: torch.Tensor = self._heap.tensor(self._words[constants.CALLS_AT], (1,), torch.int64)
        return number

    def _forget_what_is_in_flight(self) -> None:
        super()._forget_what_is_in_flight()
        self._jobs.clear()

    def close(self) -> None:
        """Drop calls that will never be received: they refer to this object, so neither would be freed."""
        self._jobs.clear()

    def is_working(self) -> bool:
        running: bool = self._gpu.is_running(self.last_use())
        return running

    def last_use(self) -> Any:
        """An event after everything that was launched outside of graphs."""
        return self._order.done

    # Steps of a call

    def _guarded(self, call: Call, work: Callable[[], T]) -> T:
        """Launch a call's kernels; if the host itself fails, tell the peers.

        Then raise the error of an earlier call, if there is one. This call is sent nevertheless, which keeps
        the ranks in step whenever each of them learns of the error.
        """
        self._control.enter(call, Phase.SEND)
        result = self._control.guarded(call, work)
        self._control.end(call)
        self._raise_unheard()
        return result

    def _new_state(self, num_experts: int) -> torch.Tensor:
        """The state of a call, with room for the ranges of its completion records."""
        state: torch.Tensor = self._gpu.empty((constants.RANGES + num_experts,), torch.int64)
        return state

    def _common(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The first arguments of every kernel."""
        return self._device_constants, self._device_control.heaps, self._generations, state

    def _in_line(self, launch: Launch) -> None:
        """Run kernels on the communication stream, after earlier and before later work of the caller's."""
        self._gpu.stream.begin(None)
        self._order.run(self._gpu.stream.stream, launch)
        self._gpu.stream.end(False)

    def _launch(
        self,
        call: Call,
        state: torch.Tensor,
        send: Launch,
        receive: Launch,
        tensors: tuple[torch.Tensor | None, ...],
        run_async: bool,
        by_hook: bool,
    ) -> Sent:
        gpu = self._gpu
        self._agreed = True
        self._calls_with_places += 1
        if by_hook:
            stream = gpu.stream.current()
            self._order.run(stream, send)
            job = _Job(call, state, receive, tensors, stream, gpu.stream.is_capturing())
            if not job.is_captured:
                self._jobs[call] = job
                self._in_flight[call.number % NUM_SLOT_SETS] = call
                self._num_open += 1
            return Sent(None, _GpuHook(self, job))

        def both(stream: Any) -> None:
            send(stream)
            receive(stream)

        gpu.stream.begin(None)
        self._order.run(gpu.stream.stream, both)
        event = gpu.stream.end(run_async)
        if run_async:
            self._keep(tensors, state)
        return Sent(event, None)

    def _keep(self, tensors: tuple[torch.Tensor | None, ...], state: torch.Tensor) -> None:
        """Keep memory that two streams use until both have reached this point."""
        for tensor in (*tensors, state):
            if tensor is not None:
                self._gpu.used_by_both(tensor)

    def receive_job(self, job: _Job) -> None:
        """What a hook does."""
        call, is_captured = job.call, job.is_captured
        slot_set = call.number % NUM_SLOT_SETS
        self._control.check_works()
        if not is_captured and self._in_flight[slot_set] != call:
            raise InvalidCall(f"{call} was given up when the other ranks went on without this one")
        self._control.enter(call, Phase.RECEIVE)
        stream = self._gpu.stream.current()
        try:
            self._order.run(stream, job.receive)
        finally:
            if not is_captured:
                self._in_flight[slot_set] = None
                self._unfilled[slot_set] = None
                self._jobs.pop(call, None)
                self._num_open -= 1
        if stream != job.stream:
            self._keep(job.tensors, job.state)
        self._control.end(call)

    def _tell_packed(self, call: Call) -> None:
        """Release the senders of a call whose rows this rank will not take."""
        job = self._jobs.pop(call, None)
        if job is not None:
            self._in_line(lambda stream: self._finish_call(stream, job.state))

    def _open(
        self,
        stream: Any,
        state: torch.Tensor,
        header: Array,
        refused: int = 0,
        posts: bool = False,
        advances: bool = True,
    ) -> None:
        launch = self._device_control.launcher(
            kernels.open_call, 1, ADVANCES=advances, POSTS=posts, **self._shrink
        )
        words = header[records.Field.KIND : records.Field.FORMAT + 1].tolist()
        launch(stream, (1,), *self._common(state), *words, refused)

    def _receive_record(
        self, stream: Any, state: torch.Tensor, num_experts: int, wait_stats: torch.Tensor | None
    ) -> None:
        launch = self._device_control.launcher(
            kernels.receive_records,
            1,
            HAS_STATS=wait_stats is not None,
            TILE_EXPERTS=min(RECORD_TILE, max(2, block_of(num_experts))),
            **self._shrink,
        )
        launch(stream, (1,), *self._common(state), state if wait_stats is None else wait_stats, num_experts)

    def _finish_call(self, stream: Any, state: torch.Tensor) -> None:
        launch = self._device_control.launcher(kernels.finish_call, 1, **self._shrink)
        launch(stream, (1,), *self._common(state))

    # What went wrong

    def _settle(self) -> None:
        """Wait until all calls are over, and raise their error if there is one."""
        self._gpu.synchronize_device()
        self.listen()
        self._raise_unheard()

    def listen(self) -> None:
        """Check for errors of earlier calls; one that ends this rank's part in them is raised at once."""
        self._unheard = self._unheard or self._reported()

    def _raise_unheard(self) -> None:
        error, self._unheard = self._unheard, None
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback holds this frame, and thereby the frames of all callers.
            del error

    def _reported(self) -> AnyEPError | None:
        """The error that a kernel has reported since the last check."""
        error = self._reports.read(self._report, self._error_of)
        if not isinstance(error, Masked):
            return error
        try:
            raise error
        finally:
            del error

    def _error_of(self, call: Call, code: int, rank: int) -> AnyEPError:
        if code == outcomes.DIFFERENT:
            return self._disagreement(call)
        if code == outcomes.MASKED:
            return self.masks.masked_out()
        if code == outcomes.MISSING:
            token, expert = divmod(int(self._report[constants.REPORTED_WRONG]), 1 << 32)
            return InvalidCall(
                f"topk_idx sends token {token} to expert {expert}, which has no row of it: pass the topk_idx"
                f" of the dispatch that the handles come from"
            )
        if code == outcomes.BAD_IDS:
            token, column = divmod(int(self._report[constants.REPORTED_WRONG]), 1 << 32)
            value, num_experts = constants.REPORTED_VALUE, constants.REPORTED_EXPERTS
            return no_expert(token, column, int(self._report[value]), int(self._report[num_experts]))
        if code == outcomes.BAD_HANDLE:
            return InvalidCall(
                f"the contents of the handle of {call} do not fit together: its ranges must follow each"
                f" other, and its source indices be in order, below num_max_dispatch_tokens_per_rank"
            )
        stall, phase = self._stall(call, rank)
        return self._reports.end_of_wait(call, code, stall, phase)

    def _stall(self, call: Call, rank: int) -> tuple[Stall, str]:
        """What a wait waited for, and in which phase."""
        slot_set = call.number % NUM_SLOT_SETS
        if self._report[constants.REPORTED_WAIT] == constants.RECORD_AT:
            what, phase, expected = "completion record", Phase.RECEIVE, call.number
            block = self._region.blocks.record
        else:
            expected = call.number - NUM_SLOT_SETS
            what = f"receipt of {name_of_call(expected)} (by its hook, if it has one)"
            phase = Phase.ACKNOWLEDGE
            block = self._region.blocks.packed
        seen = [self._word_at(block.offset(peer, slot_set)) for peer in range(self._num_ranks)]
        # Where ranks can be masked, late ranks have been masked already.
        missing = [rank] if self._can_shrink else still_missing(seen, expected, rank)
        return Stall(missing, what, seen[missing[0]], expected), phase.name.lower()

    def _word_at(self, offset: int) -> int:
        return int(self._heap.tensor(offset, (1,), torch.int64))

    def _disagreement(self, call: Call) -> AnyEPError:
        headers = self._report[constants.REPORTED_HEADERS :].reshape(self._num_ranks, records.NUM_WORDS)
        if self._calls_with_places <= 1:
            # The ranks may have disagreed about the sizes, and nothing was sent with these sizes before.
            self._agreed = False
        refused = headers[:, records.Field.REFUSED]
        by_handle = np.flatnonzero(refused == kernels.BY_HANDLE)
        if len(by_handle):
            return Disagreement(
                f"rank {int(by_handle[0])} refused its {call}, so rank {self._rank} cannot go on with it: the"
                f" contents of its handle do not fit together"
            )
        by_ids = np.flatnonzero(refused == kernels.BY_IDS)
        if len(by_ids):
            return Disagreement(
                f"rank {int(by_ids[0])} refused its {call}, so rank {self._rank} cannot go on with it: its"
                f" topk_idx has an id that is no expert"
            )
        text = max(0, int(refused.max()) - 1)
        return self._control.disagreement(
            call, headers, text, records.SIGNATURE_WORDS, records.word_for_people
        )


class GpuMasks(Masks):
    """One rank's view of which ranks are masked; hosts tell it to each other and to their GPUs' kernels."""

    def __init__(
        self,
        control: ControlPlane,
        region: ControlRegion,
        heap: Any,
        gpu: Any,
        tell_kernels: Callable[[int, int], None],
    ) -> None:
        super().__init__(cpu, control, region)
        block = region.blocks.mask
        self._gpu = gpu
        self._tell_kernels = tell_kernels
        self._rows = heap.tensor(block.start, (self.num_ranks * block.stride // 8,), torch.int64)

    def adopt(self) -> None:
        """Adopt the masks that peers have published and those that kernels have found."""
        with self.beside_kernels():
            told = self._rows.cpu().numpy().reshape(self.num_ranks, -1)[:, : self.num_ranks].max(axis=0)
        for rank in np.flatnonzero(told > self.generations).tolist():
            self.generations[rank] = told[rank]
            if told[rank] % 2 and not self.masked[rank]:
                log.warning("rank %d goes on without rank %d", self.rank, rank)
            self.masked[rank] = told[rank] % 2 == 1
            # Kernels told kernels: hosts must learn of it before anything else from this rank.
            super()._tell(rank)
        super().adopt()

    def beside_kernels(self) -> contextlib.AbstractContextManager[Any]:
        """Work of torch inside this context does not wait for waiting kernels (but see `side_stream`)."""
        side = self._gpu.side_stream
        return contextlib.nullcontext() if side is None else torch.cuda.stream(side)

    def _tell(self, rank: int) -> None:
        super()._tell(rank)
        self._tell_kernels(rank, int(self.generations[rank]))


class _GpuHook:
    """Receives a sent call; calling it a second time does nothing."""

    def __init__(self, mode: GpuLowLatency, job: _Job) -> None:
        self._left: tuple[GpuLowLatency, _Job] | None = (mode, job)

    def __call__(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            mode, job = left
            mode.receive_job(job)

    def __del__(self) -> None:
        if self._left is not None:
            mode, job = self._left
            if not job.is_captured:
                mode.hook_was_dropped(job.call)


class _Order:
    """Makes kernels run in the order in which the host launches them, whatever their streams."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.done = gpu.now()
        """An event after the last launch outside of graphs."""
        self._done_in_graph = gpu.now()
        self._last: tuple[int, Any] = (0, gpu.stream.stream)
        """The graph that the last launch was captured in, 0 for none, and its stream."""
        self._lock = threading.Lock()

    def run(self, stream: Any, launch: Launch) -> None:
        """Launch kernels on a stream, after everything that was launched before."""
        with self._lock:
            graph = 0
            if self._gpu.stream.is_capturing():
                graph = self._gpu.stream.graph() or UNKNOWN_GRAPH
            last_graph, last_stream = self._last
            done = self._done_in_graph if graph else self.done
            # A graph can only wait for its own work; the caller orders its replays.
            if graph == last_graph != UNKNOWN_GRAPH and stream != last_stream:
                stream.wait_event(done)
            launch(stream)
            done.record(stream)
            self._last = (graph, stream)


class _InLine:
    """Runs at once the work that the CPU's mode runs in its stream."""

    def run(self, work: Callable[[], T]) -> T:
        return work()


class _GpuPlaces:
    """The addresses of a layout of slots, by set and then by rank, in tables for kernels."""

    def __init__(self, slots: LowLatencySlots, heap_addresses: Sequence[int], rank: int, gpu: Any) -> None:
        self.slots = slots
        self.message_bytes = slots.message_bytes
        self.rows_per_expert = slots.num_ranks * slots.sizes.num_max_tokens
        self.list_stride = self.rows_per_expert * slots.message_bytes
        """Bytes from one expert's list to the next."""
        sets, ranks = range(NUM_SLOT_SETS), range(slots.num_ranks)

        def table(address: Callable[[int, int], int]) -> Any:
            return gpu.table([address(slot_set, other) for slot_set in sets for other in ranks])

        def list_at(slot_set: int, reader: int) -> int:
            return slots.slot_offset(slot_set, 0, reader, 0)

        self.messages = table(lambda slot_set, other: heap_addresses[other] + slots.row_offset(slot_set, 0))
        """The address of each rank's first message."""
        self.lists_for_peers = table(lambda slot_set, other: heap_addresses[rank] + list_at(slot_set, other))
        """The address of the list for each peer's first expert, in this rank's own memory."""
        self.lists_of_peers = table(lambda slot_set, other: heap_addresses[other] + list_at(slot_set, rank))
        """The address of the list that each peer keeps for this rank's first expert."""


def _not_captured(function: str) -> InvalidCall:
    return InvalidCall(f"{function} cannot be captured in a CUDA graph: call it before")
