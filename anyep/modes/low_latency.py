"""Low-latency mode, on every device: rows lie at fixed places, so that no exchange precedes them.

A call is first sent, then received. Calls alternate between two sets of slots: before a set is written again,
every reader has finished the call before the last one. So two calls may be sent and not yet received.
Low-latency calls have numbers of their own, and completion records instead of notify messages.

What happens is decided here, how it is done in a backend (`LowLatencyOps`). This module does not check what
the user passed, except against the state of the mode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch

from anyep.backends.low_latency import (
    LowLatencyInput,
    LowLatencyOps,
    LowLatencyResults,
    LowLatencyTokens,
    LowLatencyWork,
    Outline,
    num_scale_words,
)
from anyep.control.plane import ControlPlane
from anyep.core.calls import Call, Kind
from anyep.core.records import Format
from anyep.errors import AnyEPError, InvalidCall
from anyep.events import EventHandle
from anyep.layout import NUM_SLOT_SETS, LowLatencySlots
from anyep.modes.masks import Layout, Masks
from anyep.sizes import LowLatencySizes, low_latency_sizes

T = TypeVar("T")
Hook = Callable[[], None]
New = Callable[[], Sequence[torch.Tensor]]
MAX_IN_FLIGHT: Final = NUM_SLOT_SETS
# Plain numbers: those of an enumeration take longer.
DISPATCH: Final = int(Kind.LOW_LATENCY_DISPATCH)
COMBINE: Final = int(Kind.LOW_LATENCY_COMBINE)


class Sent(NamedTuple):
    """How a call goes on: by itself (`event`), when its hook is called, or not at all: it is over."""

    event: EventHandle | None
    hook: Hook | None


NOTHING_LEFT: Final = Sent(None, None)


class LowLatencyMode:
    """Low-latency mode of one rank; its slots take `num_bytes` of the heap, from `start` on."""

    def __init__(
        self, control: ControlPlane, ops: LowLatencyOps[Any], masks: Masks, start: int, num_bytes: int
    ) -> None:
        self.ops = ops
        self.masks = masks
        self._control = control
        self._rank, self._num_ranks = control.rank, control.num_ranks
        self._start = start
        self._num_bytes = num_bytes
        self._last_call = 0
        self._in_flight: list[Call | None] = [None] * NUM_SLOT_SETS
        """The calls that were sent and whose hooks have not been called."""
        self._unfilled: list[int | None] = [None] * NUM_SLOT_SETS
        """The addresses of the layout ranges that these calls will fill."""
        self._dropped: deque[tuple[Call, Callable[[], None]]] = deque()
        """Calls whose hooks were dropped, and what releases their slots."""
        self._num_open = 0
        """Calls that may not be over yet."""
        self._slots: LowLatencySlots | None = None
        self._new_results: dict[int, New] = {}
        """What allocates the results of dispatches with these slots, by how rows travel."""
        self._new_sums: dict[int, New] = {}
        """What allocates the sums of combines, by the number of tokens."""
        self._num_cleanings = 0
        self._lent_for: tuple[int, LowLatencySizes] | None = None
        """The call that may find its rows in the memory that `next_combine_buffer` returned."""

    # Before a call

    def begin(self, kind: Kind) -> Call:
        """Take the next call number, if a set of slots is free for it."""
        self._control.check_works()
        self.ops.before_call()
        is_captured = self.ops.is_capturing
        if not is_captured:
            self._forget_dropped_hooks()
            self._check_set_is_free(self._last_call + 1)
        self._last_call += 1
        return Call(self._last_call, kind, is_captured)

    def listen(self) -> None:
        """Look for errors of earlier calls."""
        self.ops.listen()

    def refuse(self, call: Call, error: AnyEPError) -> None:
        """Tell the peers that this rank's call was wrong; they raise instead of waiting."""
        self.ops.refuse(call, error)

    def _check_set_is_free(self, number: int) -> None:
        unreceived = self._in_flight[number % NUM_SLOT_SETS]
        if unreceived is not None:
            raise InvalidCall(
                f"{unreceived} was sent and is not yet received, and its slots are needed: call its hook."
                f" At most {MAX_IN_FLIGHT} low-latency calls may be in flight"
            )

    def check_nothing_in_flight(self) -> None:
        for unreceived in self._in_flight:
            if unreceived is not None:
                raise InvalidCall(f"{unreceived} was sent and is not yet received: call its hook first")

    def check_room(self, sizes: LowLatencySizes) -> None:
        """Refuse sizes that the Buffer has no room for."""
        if sizes.total_bytes > self._num_bytes:
            raise InvalidCall(
                f"num_rdma_bytes is {self._num_bytes}, too small: {sizes.num_max_tokens} tokens per rank,"
                f" hidden {sizes.hidden} and {sizes.num_experts} experts need {sizes.total_bytes} bytes;"
                f" Buffer.get_low_latency_rdma_size_hint tells it"
            )

    def check_sizes(self, sizes: LowLatencySizes) -> None:
        """Refuse sizes that are not those of the slots."""
        if self._slots is not None and sizes is self._slots.sizes:
            return
        self.check_room(sizes)
        may_change = not self.ops.agreement.holds and self._num_open == 0 and not self.masks.may_put
        if self._slots is not None and sizes != self._slots.sizes and not may_change:
            raise InvalidCall(
                f"this call is for {_in_words(sizes)}, but the slots are for {_in_words(self._slots.sizes)}:"
                f" call clean_low_latency_buffer on every rank before the sizes change"
            )

    def check_ids(self, topk_idx: torch.Tensor, num_experts: int) -> None:
        """Refuse ids that are neither experts nor -1."""
        self.ops.check_ids(topk_idx, num_experts)

    def is_filled(self, layout_range: torch.Tensor) -> bool:
        """Whether a handle is not that of a dispatch that was sent and not yet received."""
        return layout_range.data_ptr() not in self._unfilled

    def check_is_filled(self, layout_range: torch.Tensor) -> None:
        """Refuse the handle of a dispatch that was sent and not yet received."""
        if not self.is_filled(layout_range):
            raise InvalidCall("the handle's dispatch is not yet received: call its hook first")

    def count_rows(self, layout_range: torch.Tensor, src_info: torch.Tensor, max_tokens: int) -> int:
        """The rows of a handle; a negative number says what is wrong with its contents."""
        return self.ops.count_rows(layout_range, src_info, max_tokens)

    def check_was_lent(self, call: Call, sizes: LowLatencySizes) -> None:
        """Refuse `zero_copy` where the rows cannot be where this call looks for them."""
        self.ops.check_zero_copy()
        if self._lent_for != (call.number, sizes):
            raise InvalidCall(
                "zero_copy needs get_next_low_latency_combine_buffer before this call: the buffer it gave"
                " is for the very next low-latency call, and none may lie between"
            )

    def _slots_for(self, sizes: LowLatencySizes) -> LowLatencySlots:
        slots = self._slots
        if slots is None or (slots.sizes is not sizes and slots.sizes != sizes):
            slots = LowLatencySlots(self._start, sizes, self._num_ranks)
            self.ops.use_slots(slots)
            self._slots = slots
            self._new_results.clear()
            self._new_sums.clear()
            self.ops.agreement.holds = False
        return slots

    # Calls

    def dispatch(
        self, call: Call, tokens: LowLatencyTokens, run_async: bool, by_hook: bool
    ) -> tuple[LowLatencyResults, Sent]:
        """Send tokens to the experts that they chose, and get those that chose this rank's experts."""

        def whole_call() -> tuple[LowLatencyResults, Sent]:
            results = self._results(self._slots_for(tokens.sizes), tokens.travel)
            work = self.ops.dispatch(call, tokens, results)
            sent = self._run(call, work, run_async, by_hook)
            if self._in_flight[call.number % NUM_SLOT_SETS] == call:
                self._unfilled[call.number % NUM_SLOT_SETS] = results.layout_range.data_ptr()
            return results, sent

        return self._guarded(call, whole_call)

    def _results(self, slots: LowLatencySlots, travel: Format) -> LowLatencyResults:
        new = self._new_results.get(int(travel))
        if new is None:
            outlines = _results_of_dispatch(slots, travel)
            new = self._new_results[int(travel)] = self.ops.allocator(outlines)
        x, counts, src_info, layout_range, *scales = new()
        return LowLatencyResults(x, scales[0] if scales else None, counts, src_info, layout_range)

    def _sums(self, num_tokens: int, hidden: int) -> torch.Tensor:
        new = self._new_sums.get(num_tokens)
        if new is None:
            # As many as there are numbers of tokens: at most `num_max_tokens`, and each takes a few words.
            outline = Outline((num_tokens, hidden), torch.bfloat16)
            new = self._new_sums[num_tokens] = self.ops.allocator([outline])
        return new()[0]

    def combine(
        self, call: Call, combined: LowLatencyInput, run_async: bool, by_hook: bool
    ) -> tuple[torch.Tensor, Sent]:
        """Sum what the experts made of each of this rank's tokens, weighted, in top-k order."""

        def whole_call() -> tuple[torch.Tensor, Sent]:
            self._slots_for(combined.sizes)
            out = combined.out
            if out is None:
                out = self._sums(combined.topk_idx.shape[0], combined.sizes.hidden)
            work = self.ops.combine(call, combined, out)
            return out, self._run(call, work, run_async, by_hook)

        return self._guarded(call, whole_call)

    # Calls like earlier ones, with less work, where nothing has gone wrong and no graph is captured. They
    # return None where that is not possible; then nothing has happened.

    def dispatch_again(
        self, tokens: LowLatencyTokens, by_hook: bool
    ) -> tuple[LowLatencyResults, Sent] | None:
        """The results of a dispatch that is not asynchronous."""
        number, new = self._last_call + 1, self._new_results.get(int(tokens.travel))
        if new is None or not self._can_repeat(number, tokens.sizes):
            return None
        self._last_call = number
        call = Call(number, DISPATCH)
        try:
            x, counts, src_info, layout_range, *scales = new()
            results = LowLatencyResults(x, scales[0] if scales else None, counts, src_info, layout_range)
            work = self.ops.dispatch(call, tokens, results)
            if not by_hook:
                self.ops.run(call, work, False, _nothing)
                return results, NOTHING_LEFT
            sent = self._send_again(call, work)
            self._unfilled[number % NUM_SLOT_SETS] = layout_range.data_ptr()
            return results, sent
        except BaseException as error:
            self._control.ended_by(call, error)
            raise

    def combine_again(self, combined: LowLatencyInput, by_hook: bool) -> tuple[torch.Tensor, Sent] | None:
        """The same for a combine: its sums."""
        number, out = self._last_call + 1, combined.out
        new = self._new_sums.get(combined.topk_idx.shape[0])
        if new is None or not self._can_repeat(number, combined.sizes):
            return None
        self._last_call = number
        call = Call(number, COMBINE)
        try:
            if out is None:
                out = new()[0]
            work = self.ops.combine(call, combined, out)
            if not by_hook:
                self.ops.run(call, work, False, _nothing)
                return out, NOTHING_LEFT
            return out, self._send_again(call, work)
        except BaseException as error:
            self._control.ended_by(call, error)
            raise

    def _can_repeat(self, number: int, sizes: LowLatencySizes) -> bool:
        """Whether the slots are laid out for these sizes, and the call can have its set at once."""
        slots = self._slots
        return (
            slots is not None
            and slots.sizes is sizes
            and not self._dropped
            and self._in_flight[number % NUM_SLOT_SETS] is None
        )

    def _send_again(self, call: Call, work: LowLatencyWork) -> Sent:
        self.ops.send(call, work)
        self._num_open += 1
        self._in_flight[call.number % NUM_SLOT_SETS] = call
        return Sent(None, _Hook(self, call, work))

    def next_combine_buffer(self, sizes: LowLatencySizes) -> torch.Tensor:
        """Where the next call, a combine with `zero_copy`, looks for its rows: [experts, rows, hidden]."""
        self.ops.check_not_captured("get_next_low_latency_combine_buffer")
        call = Call(self._last_call + 1, Kind.LOW_LATENCY_COMBINE)
        self._control.check_works()
        self._forget_dropped_hooks()
        self._check_set_is_free(call.number)
        self.ops.wait_for_earlier()
        rows = self._guarded(call, lambda: self.ops.next_combine_rows(call, self._slots_for(sizes)))
        self._lent_for = (call.number, sizes)
        return rows

    def clean(self, call: Call, sizes: LowLatencySizes) -> None:
        """Let all ranks change to other sizes, when no rank needs the slots of earlier calls any more."""
        self.ops.check_not_captured("clean_low_latency_buffer")

        def whole_call() -> None:
            self.ops.clean(call, sizes)
            if self._slots is not None and sizes != self._slots.sizes and self.masks.may_put:
                raise InvalidCall(
                    "the sizes cannot change while ranks are masked that a network connects: they may still"
                    " put rows where the slots are now; take them back first, or make a new Buffer"
                )
            self._num_cleanings += 1
            self._slots_for(sizes)
            self.ops.agreement.holds = True

        self._guarded(call, whole_call)

    def _guarded(self, call: Call, work: Callable[[], T]) -> T:
        """A whole call. An error of an earlier one is raised at the end: this call is sent all the same, so
        that the ranks stay in step, whenever each of them learns of the error."""
        result = self._control.guarded(call, work)
        self.ops.raise_earlier()
        return result

    # Sending and receiving

    def _run(self, call: Call, work: LowLatencyWork, run_async: bool, by_hook: bool) -> Sent:
        if not by_hook:
            self._num_open += 1
            return Sent(self.ops.run(call, work, run_async, self._call_is_over), None)
        self.ops.send(call, work)
        if not call.is_captured:
            self._num_open += 1
            self._in_flight[call.number % NUM_SLOT_SETS] = call
        return Sent(None, _Hook(self, call, work))

    def _call_is_over(self) -> None:
        self._num_open -= 1

    def check_can_receive(self, call: Call) -> None:
        """Refuse to receive a call in a graph that does not send it: nothing would have been received."""
        if not call.is_captured and self.ops.is_capturing:
            self.ops.check_not_captured(f"the hook of {call}, which was sent outside,")

    def receive(self, call: Call, work: LowLatencyWork) -> None:
        """What a hook does."""
        if call.is_captured:
            self.ops.receive(call, work, _nothing)
            return
        slot_set = call.number % NUM_SLOT_SETS
        self._control.check_works()
        if self._in_flight[slot_set] != call:
            raise InvalidCall(f"{call} was given up when the other ranks went on without this one")
        try:
            self.ops.receive(call, work, self._call_is_over)
        finally:
            # Not before: a call in another thread that needs these slots has to wait for its turn.
            self._in_flight[slot_set] = None
            self._unfilled[slot_set] = None

    def hook_was_dropped(self, call: Call, work: LowLatencyWork) -> None:
        """Called by the garbage collector, at any time and in any thread: appending is all that is safe."""
        if not call.is_captured:
            self._dropped.append((call, work.release))

    def _forget_dropped_hooks(self) -> None:
        """Free the slots of calls that can no longer be received; the ranks that wait for that are told."""
        while self._dropped:
            call, release = self._dropped.popleft()
            slot_set = call.number % NUM_SLOT_SETS
            if self._in_flight[slot_set] == call:
                self._in_flight[slot_set] = None
                self._unfilled[slot_set] = None
                self._call_is_over()
                release()

    # Masks

    def unmask(self, ranks: Sequence[int]) -> None:
        """Unmask ranks, together with all unmasked ranks and with those ranks themselves."""
        self.ops.before_unmask()
        self.masks.adopt()
        self._forget_dropped_hooks()
        if self.masks.is_masked_out:
            if self._rank not in ranks:
                self.masks.look()
            self._forget_what_is_in_flight()
        try:
            self.check_nothing_in_flight()
        except InvalidCall:
            self.masks.refuse_round()
            raise
        call = Call(self._last_call, Kind.UNMASK)
        sizes = self._slots.sizes if self._slots is not None and self.ops.agreement.holds else None

        def whole_round() -> int:
            layout = Layout(self._num_cleanings, _as_words(sizes))
            self._last_call, layout = self.masks.take_back(call, ranks, layout)
            if layout.version > self._num_cleanings:
                # This rank was masked while the others laid out their slots anew.
                self._num_cleanings = layout.version
                self._slots_for(low_latency_sizes(*layout.sizes))
                self.ops.agreement.holds = True
            return self._last_call

        self.ops.unmask(lambda: self._control.guarded(call, whole_round), self.masks.generations)

    def _forget_what_is_in_flight(self) -> None:
        """A masked rank no longer receives: the others have gone on."""
        self._num_open -= sum(call is not None for call in self._in_flight)
        self._in_flight = [None] * NUM_SLOT_SETS
        self._unfilled = [None] * NUM_SLOT_SETS


class _Hook:
    """Receives a call that was sent; a second time it does nothing."""

    def __init__(self, mode: LowLatencyMode, call: Call, work: LowLatencyWork) -> None:
        self._left: tuple[LowLatencyMode, Call, LowLatencyWork] | None = (mode, call, work)

    def __call__(self) -> None:
        if self._left is not None:
            mode, call, work = self._left
            mode.check_can_receive(call)
            self._left = None
            mode.receive(call, work)

    def __del__(self) -> None:
        if self._left is not None:
            mode, call, work = self._left
            mode.hook_was_dropped(call, work)


def _results_of_dispatch(slots: LowLatencySlots, travel: Format) -> list[Outline]:
    """The results of a dispatch: rows, counts, src_info, layout_range and, if values are cast, scales."""
    experts, num_rows = slots.num_local_experts, slots.rows_per_expert
    is_cast = travel is not Format.BF16
    outlines = [
        Outline((experts, num_rows, slots.sizes.hidden), torch.float8_e4m3fn if is_cast else torch.bfloat16),
        Outline((experts,), torch.int32),
        Outline((experts, num_rows), torch.int32),
        Outline((experts, slots.num_ranks), torch.int64),
    ]
    if is_cast:
        dtype = torch.int32 if travel is Format.FP8_UE8M0 else torch.float32
        num_words = num_scale_words(slots.sizes.hidden, travel)
        outlines.append(Outline((experts, num_rows, num_words), dtype, is_transposed=True))
    return outlines


def _nothing() -> None:
    pass


def _as_words(sizes: LowLatencySizes | None) -> tuple[int, int, int]:
    return (sizes.num_max_tokens, sizes.hidden, sizes.num_experts) if sizes is not None else (0, 0, 0)


def _in_words(sizes: LowLatencySizes) -> str:
    return (
        f"{sizes.num_max_tokens} tokens per rank at most, hidden {sizes.hidden}, {sizes.num_experts} experts"
    )
