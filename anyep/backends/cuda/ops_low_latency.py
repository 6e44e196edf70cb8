"""The operations of low-latency mode on a GPU: kernels, with every wait in a kernel.

Each half of a call is two kernels, launched as one batch: `open_call` and one that sends, `receive_records`
and one that takes rows. Without a hook, both halves are one batch.
The host waits for nothing. It knows neither when a call is over nor, as graphs may be replayed, what its
number is: the numbers are in the GPU's memory, and which of the two sets of slots a call has is found there.
Calls with hooks run on the caller's stream, the others on the communication stream. All halves run in the
order in which the host made them, whatever their streams.

Where ranks may be masked, kernels mask those that do not come; the hosts wait for
each other only to unmask them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from anyep import ending
from anyep.backends.cuda import constants
from anyep.backends.cuda.batch import Batch, Prepared, Recipes
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.gpu import Gpu
from anyep.backends.cuda.kernels import slots as kernels
from anyep.backends.cuda.masks import GpuMasks
from anyep.backends.cuda.moment import Moment
from anyep.backends.cuda.order import Order
from anyep.backends.cuda.slot_kernels import Movers, Signature, SlotKernels, SlotTables, new_state
from anyep.backends.cuda.templates import template
from anyep.backends.low_latency import (
    Agreement,
    LowLatencyControl,
    LowLatencyInput,
    LowLatencyResults,
    LowLatencyTokens,
    Outline,
)
from anyep.core import diagnosis, outcomes, records
from anyep.core.calls import Array, Call, Phase, Stall, name_of_call
from anyep.core.outcomes import still_missing
from anyep.core.records import REFUSAL_TEXTS, Format
from anyep.errors import AnyEPError, BufferBroken, InvalidCall, Masked, no_expert
from anyep.events import EventHandle
from anyep.layout import NUM_SLOT_SETS, ControlRegion, LowLatencySlots
from anyep.sizes import LOW_LATENCY_HEADER_BYTES, LowLatencySizes

ErrorOf = Callable[[Call, int, int], AnyEPError]
MAX_PLANS: Final = 256
# Plain numbers: those of an enumeration take longer.
SEND: Final = int(Phase.SEND)
IDLE: Final = int(Phase.IDLE)
OF_DISPATCH: Final = (
    *("state", "x", "topk_idx", "packed_x", "packed_scales", "src_info", "layout_range", "counts"),
    *("expert_stats", "wait_stats"),
)
OF_COMBINE: Final = (
    *("state", "x", "topk_idx", "topk_weights", "src_info", "layout_range", "out", "wait_stats"),
)
"""The inputs of both calls, in the order in which they are passed; those that are numbers follow."""


class Reporter(Protocol):
    """Reads what kernels have reported."""

    def add(self, report: Array, error_of: ErrorOf) -> None: ...
    def read(self, report: Array, error_of: ErrorOf) -> AnyEPError | None: ...
    def end_of_wait(self, call: Call, code: int, stall: Stall, phase: str) -> AnyEPError: ...


class WorkingControl(LowLatencyControl, Protocol):
    """A control plane that can be asked whether it still works."""

    def check_works(self) -> None: ...


class Plan(NamedTuple):
    """What calls that differ in addresses only have in common: their batches, and the inputs that are
    numbers, which follow the others."""

    both: Prepared
    """Of both halves."""
    send: Prepared
    receive: Prepared
    numbers: tuple[int, ...]


class Work(NamedTuple):
    """What both halves of a call need."""

    plan: Plan
    values: tuple[Any, ...]
    """Of the inputs; the first one is the call's state."""
    stream: int
    """The caller's, when the call was made."""
    call: Call
    release_with: Callable[[Call, torch.Tensor], None]

    @property
    def release(self) -> Callable[[], None]:
        return partial(self.release_with, self.call, self.values[0])


class GpuLowLatencyOps(ending.Part):
    """Low-latency mode on a GPU."""

    def __init__(
        self,
        device_control: DeviceControl,
        reports: Reporter,
        control: WorkingControl,
        ranks_on_gpu: int,
        can_shrink: bool,
    ) -> None:
        self._device_control = device_control
        self._reports = reports
        self._control = control
        self._gpu = device_control.gpu
        self._rank, self._num_ranks = device_control.rank, device_control.num_ranks
        self._region: ControlRegion = device_control.region
        self._heap = device_control.heap
        self._can_shrink = can_shrink
        self._stream = self._gpu.stream
        self._batches = device_control.batches
        self._order = Order(self._gpu)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._unheard: AnyEPError | None = None
        """The error of an earlier call, for the next one to raise."""
        self._report = self._gpu.words(constants.REPORTED_HEADERS + records.NUM_WORDS * self._num_ranks)
        self._report_words = self._report.data
        """The same, for a look that takes less time."""
        reports.add(self._report, self._error_of)
        self._words = self._constants()
        self._device_constants = self._gpu.table(self._words)
        self._generations = self._gpu.table([0] * self._num_ranks)
        self._kernels = SlotKernels(
            device_control, self._device_constants, self._generations, ranks_on_gpu, can_shrink
        )
        # A batch of its own, which no other one replaces.
        mask_rank = Batch([self._kernels.mask_rank()], self._gpu.index)
        tell_kernels = partial(_run_beside_kernels, self._gpu, mask_rank)
        # When this kernel is needed it may be too late to load it.
        tell_kernels(-1, 0)
        self.kernel_masks = GpuMasks(self._region, self._heap, self._gpu, self._num_ranks, tell_kernels)
        self._known: dict[LowLatencySizes, SlotTables] = {}
        self._at: SlotTables | None = None
        self._calls_with_slots = 0
        self._work_in_flight: dict[int, Work] = {}
        """By call number."""
        self.agreement = Agreement()
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

    # Before and after calls

    @property
    def is_capturing(self) -> bool:
        capturing: bool = self._stream.is_capturing()
        return capturing

    def before_call(self) -> None:
        """Kernels find out whether this rank is masked."""

    def check_ids(self, topk_idx: torch.Tensor, num_experts: int) -> None:
        """Ids are checked where kernels read them."""

    def count_rows(self, layout_range: torch.Tensor, src_info: torch.Tensor, max_tokens: int) -> int:
        """The contents of a handle are checked where kernels read them; the host does not know its rows."""
        return 0

    def check_zero_copy(self) -> None:
        if self.is_capturing:
            raise InvalidCall(
                "zero_copy cannot be captured in a CUDA graph: a replay may find its slots in the other set;"
                " leave zero_copy out"
            )

    def check_not_captured(self, function: str) -> None:
        if self.is_capturing:
            raise InvalidCall(f"{function} cannot be captured in a CUDA graph: call it before")

    def use_slots(self, slots: LowLatencySlots) -> None:
        known = self._known.get(slots.sizes)
        if known is None:
            if self.is_capturing:
                raise InvalidCall(
                    "the first call with these sizes cannot be captured in a CUDA graph:"
                    " make such a call before"
                )
            known = SlotTables(slots, self._heap.addresses, self._rank, self._gpu)
            self._known[slots.sizes] = known
        self._at = known
        self._calls_with_slots = 0

    def refuse(self, call: Call, error: AnyEPError) -> None:
        if self.is_capturing:
            return
        try:
            self._control.check_works()
        except BufferBroken:
            return
        text = REFUSAL_TEXTS + call.number % NUM_SLOT_SETS
        self._control.publish_refusal(text, str(error))
        opening = self._kernels.open_call, _signature(records.header_of(call.kind)), 1 + text, True
        self._in_line((opening, (self._kernels.finish_call,)), new_state(self._gpu, 0))

    def allocator(self, outlines: Sequence[Outline]) -> Callable[[], Sequence[torch.Tensor]]:
        templates = [template(self._gpu, *outline) for outline in outlines]
        empty_like = self._gpu.empty_like
        return lambda: [*map(empty_like, templates)]

    # Work

    def dispatch(self, call: Call, tokens: LowLatencyTokens, results: LowLatencyResults) -> Work:
        x, topk_idx, sizes, travel, expert_stats, wait_stats = tokens
        at, (num_tokens, num_topk) = self._at, topk_idx.shape
        # An integer: the hash of an enumeration takes longer than the rest.
        has_stats = expert_stats is not None
        key = at, int(travel), num_tokens, num_topk, has_stats, wait_stats is None
        plan = self._plans.get(key)
        if plan is None:
            assert at is not None
            words = tokens.num_scale_words
            movers = self._kernels.of_dispatch(at, travel, num_tokens, num_topk, words, has_stats)
            signature = _signature(records.header_of(call.kind, sizes, travel))
            plan = self._new_plan(key, at, signature, movers, wait_stats is not None, OF_DISPATCH)
        packed_x, packed_scales, counts, src_info, layout_range = results
        values = (
            *(self._state_of(call), x, topk_idx, packed_x, packed_scales, src_info, layout_range, counts),
            *(expert_stats, wait_stats, *plan.numbers),
        )
        return Work(plan, values, self._stream.caller(), call, self._release)

    def combine(self, call: Call, combined: LowLatencyInput, out: torch.Tensor) -> Work:
        at, (num_tokens, num_topk) = self._at, combined.topk_idx.shape
        use_logfmt, zero_copy, wait_stats = combined.use_logfmt, combined.zero_copy, combined.wait_stats
        key = at, use_logfmt, zero_copy, num_tokens, num_topk, wait_stats is None, "combine"
        plan = self._plans.get(key)
        if plan is None:
            assert at is not None
            movers = self._kernels.of_combine(at, use_logfmt, zero_copy, num_tokens, num_topk)
            travel = Format.LOGFMT if use_logfmt else Format.BF16
            signature = _signature(records.header_of(call.kind, combined.sizes, travel))
            plan = self._new_plan(key, at, signature, movers, wait_stats is not None, OF_COMBINE)
        # With zero copy no kernel reads x.
        values = (
            *(self._state_of(call), combined.x, combined.topk_idx, combined.topk_weights),
            *(combined.src_info, combined.layout_range, out, wait_stats, *plan.numbers),
        )
        return Work(plan, values, self._stream.caller(), call, self._release)

    def _new_plan(
        self,
        key: tuple[Any, ...],
        at: SlotTables,
        signature: Signature,
        movers: Movers,
        has_wait_stats: bool,
        inputs: tuple[str, ...],
    ) -> Plan:
        kernels = self._kernels
        send = ((kernels.open_call, signature), movers.send)
        receive = ((kernels.receive_records, at.slots.num_local_experts, has_wait_stats), movers.take)
        order, batches = (*inputs, *movers.numbers), self._batches
        both, first, second = (Prepared(batches, each, order) for each in (send + receive, send, receive))
        if len(self._plans) >= MAX_PLANS:
            # The oldest one.
            del self._plans[next(iter(self._plans))]
        plan = self._plans[key] = Plan(both, first, second, tuple(movers.numbers.values()))
        return plan

    def _state_of(self, call: Call) -> torch.Tensor:
        """The state of a call: one that calls of its set share, unless a graph may run it at any time."""
        at = self._at
        assert at is not None
        if call.is_captured:
            return new_state(self._gpu, at.slots.sizes.num_experts)
        return at.states[call.number % NUM_SLOT_SETS]

    def run(self, call: Call, work: Work, run_async: bool, on_end: Callable[[], None]) -> EventHandle | None:
        self._begin(call)
        stream, event = self._stream, None
        moment = stream.moment(True, False) if run_async else stream.whole_call()
        self._order.run(work.plan.both, moment, work.values, call.is_captured)
        if run_async:
            event = stream.end(True)
            self._keep(work.values)
        # The next call runs after this one, whatever the host knows about it.
        on_end()
        self._control.publish(call.number, call.kind, IDLE)
        return event

    def send(self, call: Call, work: Work) -> None:
        self._begin(call)
        self._order.run(work.plan.send, Moment(work.stream), work.values, call.is_captured)
        if not call.is_captured:
            self._work_in_flight[call.number] = work
        self._control.publish(call.number, call.kind, IDLE)

    def receive(self, call: Call, work: Work, on_end: Callable[[], None]) -> None:
        control = self._control
        control.check_works()
        control.enter(call, Phase.RECEIVE)
        stream = self._stream.caller()
        try:
            is_captured = self._stream.is_capturing()
            self._order.run(work.plan.receive, Moment(stream), work.values, is_captured)
        finally:
            self._work_in_flight.pop(call.number, None)
            on_end()
        if stream != work.stream:
            self._keep(work.values)
        control.publish(call.number, call.kind, IDLE)

    def _release(self, call: Call, state: torch.Tensor) -> None:
        """Let the senders go on whose rows will not be received."""
        if self._work_in_flight.pop(call.number, None) is not None:
            self._in_line(((self._kernels.finish_call,),), state)

    def _begin(self, call: Call) -> None:
        self._control.enter(call, Phase.SEND)
        self.agreement.holds = True
        self._calls_with_slots += 1

    def _keep(self, values: Sequence[Any]) -> None:
        """Keep the memory of what two streams use until both are done with it."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._gpu.used_by_both(value)

    def clean(self, call: Call, sizes: LowLatencySizes) -> None:
        self._control.enter(call, Phase.SEND)
        kernels = self._kernels
        opening = kernels.open_call, _signature(records.header_of(call.kind, sizes)), 0, True
        recipes = opening, (kernels.receive_records, 0, False), (kernels.finish_call,)
        self._in_line(recipes, new_state(self._gpu, 0))
        self._settle()
        self._control.end(call)

    def wait_for_earlier(self) -> None:
        """Kernels wait for earlier calls."""

    def next_combine_rows(self, call: Call, slots: LowLatencySlots) -> torch.Tensor:
        """Waits for the earlier calls, since only they know which slots come next."""
        self._control.enter(call, Phase.SEND)
        state = new_state(self._gpu, 0)
        signature = _signature(records.header_of(call.kind, slots.sizes))
        self._in_line(((self._kernels.open_call, signature, 0, False, False),), state)
        self._settle()
        number = int(state[constants.NUMBER])
        messages: torch.Tensor = self._heap.lend(
            slots.row_offset(number % NUM_SLOT_SETS, 0),
            (slots.num_local_experts * slots.rows_per_expert, slots.message_bytes // 2),
            torch.bfloat16,
            lambda: None,
        )
        rows = messages[:, LOW_LATENCY_HEADER_BYTES // 2 :][:, : slots.sizes.hidden]
        self._control.end(call)
        return rows.view(slots.num_local_experts, slots.rows_per_expert, slots.sizes.hidden)

    # Masks

    def before_unmask(self) -> None:
        with contextlib.suppress(Masked):
            self._settle()

    def unmask(self, work: Callable[[], int], generations: Array) -> None:
        # Calls that a masked rank did not receive are given up.
        self._work_in_flight.clear()
        number = work()
        # What this rank was told while it was masked is over.
        self._report[constants.NUM_READ] = self._report[constants.NUM_REPORTS]
        with self.kernel_masks.beside_kernels():
            self._generations.copy_(torch.from_numpy(generations))
            self._heap.tensor(self._words[constants.CALLS_AT], (1,), torch.int64).fill_(number)
            self._gpu.synchronize()

    def _in_line(self, recipes: Recipes, state: torch.Tensor) -> None:
        """Run kernels on the communication stream, after earlier and before later work of the caller's."""
        moment, batch = self._stream.moment(True, True), Prepared(self._batches, recipes)
        self._order.run(batch, moment, {"state": state}, self.is_capturing)

    # What went wrong

    def _settle(self) -> None:
        """Wait until all calls are over, and raise their error if there is one."""
        self._gpu.synchronize_device()
        self.listen()
        self.raise_earlier()

    def listen(self) -> None:
        """Check for errors of earlier calls; one that ends this rank's part in them is raised at once."""
        if self._has_news():
            self._unheard = self._unheard or self._reported()

    def _has_news(self) -> bool:
        words = self._report_words
        return bool(words[constants.NUM_REPORTS] != words[constants.NUM_READ])

    def is_quiet(self) -> bool:
        return self._unheard is None and not self._has_news()

    def raise_earlier(self) -> None:
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
            return diagnosis.masked_out(self._rank)
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
        seen = [self._device_control.word_at(block.offset(peer, slot_set)) for peer in range(self._num_ranks)]
        # Where ranks can be masked, late ranks have been masked already.
        missing = [rank] if self._can_shrink else still_missing(seen, expected, rank)
        return Stall(missing, what, seen[missing[0]], expected), phase.name.lower()

    def _disagreement(self, call: Call) -> AnyEPError:
        headers = self._report[constants.REPORTED_HEADERS :].reshape(self._num_ranks, records.NUM_WORDS)
        if self._calls_with_slots <= 1:
            # The ranks may have disagreed about the sizes, and nothing was sent with these sizes before.
            self.agreement.holds = False
        refused = headers[:, records.Field.REFUSED]
        for code, reason in (
            (kernels.BY_HANDLE, "the contents of its handle do not fit together"),
            (kernels.BY_IDS, "its topk_idx has an id that is no expert"),
        ):
            refusing = np.flatnonzero(refused == code)
            if len(refusing):
                return diagnosis.refused_by_kernel(int(refusing[0]), call, reason, self._rank)
        text = max(0, int(refused.max()) - 1)
        return self._control.disagreement(
            call, headers, text, records.SIGNATURE_WORDS, records.word_for_people
        )

    # The end

    def close(self) -> None:
        """Forget what will never be received: it refers to this object, and neither would be freed."""
        self._work_in_flight.clear()

    def is_working(self) -> bool:
        running: bool = self._gpu.is_running(self.last_use())
        return running

    def last_use(self) -> Any:
        """An event after all that was launched outside of graphs."""
        return self._order.done


def _signature(header: Array) -> Signature:
    """The words of a header that `open_call` takes."""
    return tuple(header[records.Field.KIND : records.Field.FORMAT + 1].tolist())


def _run_beside_kernels(gpu: Gpu, mask_rank: Batch, masked: int, generation: int) -> None:
    """Tell the kernels of all ranks the generation of a rank, beside kernels that wait; -1 is no rank."""
    mask_rank.run(gpu.stream.on(gpu.side_stream), {"masked": masked, "generation": generation})
