"""Low-latency mode of ranks that share memory: rows lie at fixed places, so no exchange precedes them.

A call is first sent, then received. To send, a rank writes rows and lists of tokens into its own memory, then
a completion record to every reader. To receive, it waits for the completion record of every rank, reads the
rows from where they lie, and tells their senders that it is done (`packed`). Calls alternate between two
sets: before a set is written again, every reader is done with the call before the last one. So two calls may
be sent and not yet received. Low-latency calls have their own numbers, and no notify messages.

Where ranks may be masked, a wait that would end in an error goes on without the ranks that caused it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from anyep import formats
from anyep.backends.cpu.memory import WarmMemory
from anyep.backends.cpu.rows import wrong_id
from anyep.calls import Array, Call, Kind, Phase, Topic, name_of_call
from anyep.control import records
from anyep.control.plane import NOT_TIMED, ControlPlane
from anyep.control.records import Format
from anyep.errors import AnyEPError, InvalidCall
from anyep.events import EventHandle
from anyep.layout import NUM_SLOT_SETS, ControlRegion, LowLatencySlots
from anyep.modes.low_latency_remote import LowLatencyTransport, Piece, RemoteLists
from anyep.modes.masks import Layout, Masks
from anyep.sizes import LOW_LATENCY_HEADER_BYTES, LowLatencySizes, low_latency_sizes

WORTH_SPLITTING_BYTES = 1 << 20
WORTH_STREAMING_BYTES = 1 << 22
NO_STATS = np.zeros(0, np.int32)
REFUSAL_TEXTS = 2
"""The first refusal text of low-latency calls; the texts before it are those of normal-mode calls."""
Hook = Callable[[], None]
_Pieces = dict[int, list[Piece]]


@dataclass(frozen=True)
class Tokens:
    """What a dispatch sends, and the statistics that it keeps."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    sizes: LowLatencySizes
    travel: Format
    expert_stats: torch.Tensor | None
    wait_stats: torch.Tensor | None

    @property
    def num_scale_words(self) -> int:
        """Words of 4 bytes that travel with each row."""
        if self.travel is Format.BF16:
            return 0
        num_scales = self.sizes.hidden // formats.CHANNELS_PER_BLOCK
        return num_scales // 4 if self.travel is Format.FP8_UE8M0 else num_scales


class Received(NamedTuple):
    """What a dispatch receives: rows by expert, and where they came from."""

    x: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor


@dataclass(frozen=True)
class Outputs:
    """What a combine adds up, where it writes the sums, and the statistics that it keeps."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor
    num_rows: int
    sizes: LowLatencySizes
    use_logfmt: bool
    zero_copy: bool
    out: torch.Tensor | None
    wait_stats: torch.Tensor | None


class Sent(NamedTuple):
    """How a sent call continues: by itself (`event`), when its hook is called, or not at all (it is over)."""

    event: EventHandle | None
    hook: Hook | None


class LowLatency:
    """Low-latency mode of one rank. It does not check what the user passed; `Buffer` does."""

    def __init__(
        self,
        backend: Any,
        control: ControlPlane,
        region: ControlRegion,
        heaps: list[Any],
        start: int,
        num_bytes: int,
        stream: Any,
        team: Any,
        memory: WarmMemory,
        can_shrink: bool,
    ) -> None:
        """`start` and `num_bytes` are those of the slots; lists received over a network lie after them."""
        self.masks = Masks(backend, control, region)
        self._can_shrink = can_shrink
        self._backend = backend
        self._control = control
        self._stream = stream
        self._team = team
        self._memory = memory
        self._rank = control.rank
        self._num_ranks = control.num_ranks
        self._heap = heaps[control.rank]
        self._heap_addresses = np.array([heap.address for heap in heaps], np.int64)
        self._start = start
        self._num_bytes = num_bytes
        record, packed = region.blocks.record, region.blocks.packed
        sets = range(NUM_SLOT_SETS)
        self._record_at_peers = [control.peer_counters(record, slot_set) for slot_set in sets]
        self._own_record = [control.own_counters(record, slot_set) for slot_set in sets]
        self._packed_at_peers = [control.peer_counters(packed, slot_set) for slot_set in sets]
        self._own_packed = [control.own_counters(packed, slot_set) for slot_set in sets]

        self._transport: LowLatencyTransport | None = None
        if control.transport is not None:
            self._transport = LowLatencyTransport(control.transport, region, self._rank, self._heap.address)

        self._last_call = 0
        self._all_over_until = 0
        """No rank still reads the slots of calls up to this number: there is no need to wait for `packed`."""
        self._in_flight: list[Call | None] = [None] * NUM_SLOT_SETS
        """The calls that were sent but whose hooks have not been called yet."""
        self._dropped: deque[Call] = deque()
        self._num_open = 0
        self._places: _Places | None = None
        self._agreed = False
        """Whether a call with these places has succeeded on all ranks."""
        self._num_cleanings = 0
        self._unfilled: list[int | None] = [None] * NUM_SLOT_SETS
        """The addresses of the layout ranges that those calls will fill."""
        self._lent_for: tuple[int, LowLatencySizes] | None = None
        """The call whose rows may be in the buffer that `next_combine_buffer` returned."""

    # Calls

    def begin(self, kind: Kind) -> Call:
        """Take the next call number, if a set of slots is free for it."""
        self._control.check_works()
        if self._can_shrink:
            self.masks.look()
        self._forget_dropped_hooks()
        self._check_set_is_free(self._last_call + 1)
        self._last_call += 1
        return Call(self._last_call, kind)

    def listen(self) -> None:
        """Check for errors of earlier calls; nothing to do here, since calls raise their own errors."""

    def _forget_dropped_hooks(self) -> None:
        """Free the slots of calls that can no longer be received, and tell the ranks that wait for them."""
        while self._dropped:
            call = self._dropped.popleft()
            slot_set = call.number % NUM_SLOT_SETS
            if self._in_flight[slot_set] == call:
                self._in_flight[slot_set] = None
                self._unfilled[slot_set] = None
                self._num_open -= 1
                self._tell_packed(call)

    def hook_was_dropped(self, call: Call) -> None:
        """Called by the garbage collector at any time and in any thread, so only appending is safe."""
        self._dropped.append(call)

    def _check_set_is_free(self, number: int) -> None:
        unreceived = self._in_flight[number % NUM_SLOT_SETS]
        if unreceived is not None:
            raise InvalidCall(
                f"{unreceived} was sent and is not yet received, and its slots are needed: call its hook."
                f" At most {NUM_SLOT_SETS} low-latency calls may be in flight"
            )

    def check_room(self, sizes: LowLatencySizes) -> None:
        """Refuse sizes that the Buffer has no room for."""
        if sizes.total_bytes > self._num_bytes:
            raise InvalidCall(
                f"num_rdma_bytes is {self._num_bytes}, too small: {sizes.num_max_tokens} tokens per rank,"
                f" hidden {sizes.hidden} and {sizes.num_experts} experts need {sizes.total_bytes} bytes;"
                f" Buffer.get_low_latency_rdma_size_hint tells it"
            )

    def check_sizes(self, sizes: LowLatencySizes) -> None:
        """Refuse sizes that differ from those of the slots."""
        self.check_room(sizes)
        if self._places is not None and sizes != self._places.slots.sizes and not self._may_change():
            current = self._places.slots.sizes
            raise InvalidCall(
                f"this call is for {_sizes_text(sizes)}, but the slots are for {_sizes_text(current)}:"
                f" call clean_low_latency_buffer on every rank before the sizes change"
            )

    def check_ids(self, topk_idx: torch.Tensor, num_experts: int) -> None:
        """Refuse ids that are neither experts nor -1."""
        place = self._backend.first_wrong_id(topk_idx.numpy(), num_experts)
        if place >= 0:
            raise wrong_id(topk_idx, place, num_experts)

    def _may_change(self) -> bool:
        return not self._agreed and self._num_open == 0

    def _places_for(self, sizes: LowLatencySizes) -> _Places:
        if self._places is None or self._places.slots.sizes != sizes:
            slots = LowLatencySlots(self._start, sizes, self._num_ranks)
            remote = self._transport.ranks if self._transport is not None else ()
            lists_start = self._start + self._num_bytes
            self._places = _Places(slots, self._heap_addresses, self._rank, remote, lists_start)
            self._agreed = False
        return self._places

    def refuse(self, call: Call, error: AnyEPError) -> None:
        """Tell the peers that this rank's call was wrong; they raise instead of waiting."""

        def tell() -> None:
            self._wait_until_writable(call)
            slot_set = call.number % NUM_SLOT_SETS
            self._control.publish_refusal(REFUSAL_TEXTS + slot_set, str(error))
            self._post(call, records.record(call.kind), refusal=str(error))
            self._tell_packed(call)
            self._control.end(call)

        self._stream.run(lambda: self._control.guarded(call, tell))

    # Dispatch

    def dispatch(self, call: Call, tokens: Tokens, run_async: bool, by_hook: bool) -> tuple[Received, Sent]:
        """Send tokens to their chosen experts, and receive the tokens that chose this rank's experts."""
        places = self._places_for(tokens.sizes)
        received = self._new_results(places, tokens)
        header = records.record(call.kind, tokens.sizes, tokens.travel)

        def send() -> None:
            self._wait_until_writable(call)
            self._control.enter(call, Phase.SEND)
            self._post(call, header, self._send_tokens(call, places, tokens))

        def receive() -> None:
            ranges, num_rows = self._wait_for_records(call, places, header, tokens.wait_stats)
            self._pack(call, places, tokens, ranges, num_rows, received)
            self._finish(call)

        sent = self._run(call, send, receive, run_async, by_hook)
        if by_hook:
            self._unfilled[call.number % NUM_SLOT_SETS] = received.layout_range.data_ptr()
        return received, sent

    def _new_results(self, places: _Places, tokens: Tokens) -> Received:
        slots = places.slots
        num_experts, num_rows = slots.num_local_experts, places.rows_per_expert
        scales = None
        if tokens.travel is not Format.BF16:
            dtype = torch.int32 if tokens.travel is Format.FP8_UE8M0 else torch.float32
            scales = self._memory.empty((num_experts, tokens.num_scale_words, num_rows), dtype).transpose(
                1, 2
            )
        return Received(
            self._memory.empty(
                (num_experts, num_rows, slots.sizes.hidden),
                torch.bfloat16 if scales is None else torch.float8_e4m3fn,
            ),
            scales,
            torch.empty(num_experts, dtype=torch.int32, device="cpu"),
            self._memory.empty((num_experts, num_rows), torch.int32),
            torch.empty((num_experts, self._num_ranks), dtype=torch.int64, device="cpu"),
        )

    def _send_tokens(self, call: Call, places: _Places, tokens: Tokens) -> _Pieces:
        """Write tokens into their messages, and the lists; return the parts that must go over the network."""
        slot_set = call.number % NUM_SLOT_SETS
        sizes = tokens.sizes
        topk_idx = tokens.topk_idx.numpy()
        x, messages = tokens.x.data_ptr(), int(places.messages[slot_set][self._rank])
        self._team.run(
            lambda first, end: self._backend.send_tokens(
                first,
                end,
                x,
                sizes.hidden,
                int(tokens.travel),
                topk_idx,
                sizes.num_experts,
                messages,
                places.message_bytes,
            ),
            topk_idx.shape[0],
            worth_splitting=topk_idx.shape[0] * places.message_bytes >= WORTH_SPLITTING_BYTES,
        )
        self._backend.list_tokens(
            topk_idx,
            places.lists_for_peers[slot_set],
            places.list_strides,
            self._record_at_peers[slot_set],
            self.masks.masked,
            np.empty(sizes.num_experts, np.int64),
        )
        if self._transport is None:
            return {}
        row_bytes = sizes.hidden * (2 if tokens.travel is Format.BF16 else 1)
        return self._transport.tokens(places, slot_set, topk_idx, row_bytes + 4 * tokens.num_scale_words)

    def _pack(
        self,
        call: Call,
        places: _Places,
        tokens: Tokens,
        ranges: Array,
        num_rows: int,
        received: Received,
    ) -> None:
        slot_set = call.number % NUM_SLOT_SETS
        row_bytes = tokens.sizes.hidden * received.x.element_size()
        arguments = (
            ranges,
            places.lists_of_peers[slot_set],
            places.list_strides,
            places.messages[slot_set],
            places.message_bytes,
            row_bytes,
            tokens.num_scale_words,
            int(num_rows * row_bytes >= WORTH_STREAMING_BYTES),
            received.x.data_ptr(),
            received.scales.data_ptr() if received.scales is not None else 0,
            received.src_info.numpy(),
            received.layout_range.numpy(),
            received.counts.numpy(),
            tokens.expert_stats.numpy() if tokens.expert_stats is not None else NO_STATS,
        )
        self._team.run(
            lambda first, end: self._backend.pack_tokens(first, end, *arguments),
            places.slots.num_local_experts,
            worth_splitting=num_rows * row_bytes >= WORTH_SPLITTING_BYTES,
        )

    # Combine

    def combine(
        self, call: Call, outputs: Outputs, run_async: bool, by_hook: bool
    ) -> tuple[torch.Tensor, Sent]:
        """Add up the weighted expert outputs of each of this rank's tokens, in top-k order."""
        places = self._places_for(outputs.sizes)
        num_tokens, hidden = outputs.topk_idx.shape[0], outputs.sizes.hidden
        out = outputs.out
        if out is None:
            out = self._memory.empty((num_tokens, hidden), torch.bfloat16)
        travel = Format.LOGFMT if outputs.use_logfmt else Format.BF16
        header = records.record(call.kind, outputs.sizes, travel)

        def send() -> None:
            self._wait_until_writable(call)
            self._control.enter(call, Phase.SEND)
            self._post(call, header, self._send_rows(call, places, outputs))

        def receive() -> None:
            ranges, _ = self._wait_for_records(call, places, header, outputs.wait_stats)
            missing = self._sum(call, places, outputs, ranges, out)
            self._finish(call)
            if missing >= 0:
                token, slot = divmod(missing, outputs.topk_idx.shape[1])
                raise InvalidCall(
                    f"topk_idx sends token {token} to expert {int(outputs.topk_idx[token, slot])}, which has"
                    f" no row of it: pass the topk_idx of the dispatch that the handles come from"
                )

        return out, self._run(call, send, receive, run_async, by_hook)

    def check_is_filled(self, layout_range: torch.Tensor) -> None:
        """Refuse the handle of a dispatch that was sent and not yet received."""
        if layout_range.data_ptr() in self._unfilled:
            raise InvalidCall("the handle's dispatch is not yet received: call its hook first")

    def count_rows(self, layout_range: torch.Tensor, src_info: torch.Tensor, max_tokens: int) -> int:
        """The number of rows of a handle; a negative value says what is wrong with its contents."""
        return int(self._backend.count_rows(layout_range.numpy(), src_info.numpy(), max_tokens))

    def _send_rows(self, call: Call, places: _Places, outputs: Outputs) -> _Pieces:
        """Write the experts' rows into their messages, and the lists; return the parts that must go over the
        network."""
        slot_set = call.number % NUM_SLOT_SETS
        layout_range = outputs.layout_range.numpy()
        if not outputs.zero_copy:
            x, messages = outputs.x.data_ptr(), int(places.messages[slot_set][self._rank])
            streaming = int(outputs.num_rows * places.message_bytes >= WORTH_STREAMING_BYTES)
            self._team.run(
                lambda first, end: self._backend.stage_rows(
                    first,
                    end,
                    x,
                    outputs.sizes.hidden,
                    layout_range,
                    places.rows_per_expert,
                    int(outputs.use_logfmt),
                    streaming,
                    messages,
                    places.message_bytes,
                ),
                places.slots.num_local_experts,
                worth_splitting=outputs.num_rows * places.message_bytes >= WORTH_SPLITTING_BYTES,
            )
        self._backend.list_returns(
            outputs.src_info.numpy(),
            layout_range,
            places.lists_for_peers[slot_set],
            places.list_strides,
            self._record_at_peers[slot_set],
            self.masks.masked,
        )
        return self._transport.rows(places, slot_set, layout_range) if self._transport is not None else {}

    def _sum(self, call: Call, places: _Places, outputs: Outputs, ranges: Array, out: torch.Tensor) -> int:
        """Add up. Returns -1, or the first (token * top-k + choice) that has no row."""
        slot_set = call.number % NUM_SLOT_SETS
        topk_idx = outputs.topk_idx.numpy()
        arguments = (
            topk_idx,
            outputs.topk_weights.numpy(),
            ranges,
            places.lists_of_peers[slot_set],
            places.list_strides,
            places.messages[slot_set],
            places.message_bytes,
            places.rows_per_expert,
            self.masks.masked,
            int(outputs.use_logfmt),
            out.data_ptr(),
            outputs.sizes.hidden,
        )
        missing: list[int] = []
        self._team.run(
            lambda first, end: missing.append(self._backend.sum_tokens(first, end, *arguments)),
            topk_idx.shape[0],
            worth_splitting=topk_idx.size * places.message_bytes >= WORTH_SPLITTING_BYTES,
        )
        return next((place for place in missing if place >= 0), -1)

    def next_combine_buffer(self, sizes: LowLatencySizes) -> torch.Tensor:
        """Where the next call, a combine with `zero_copy`, looks for its rows: [experts, rows, hidden]."""
        call = Call(self._last_call + 1, Kind.LOW_LATENCY_COMBINE)
        self._control.check_works()
        self._check_set_is_free(call.number)
        places = self._places_for(sizes)

        def wait() -> None:
            self._wait_until_writable(call)
            self._control.end(call)

        self._stream.run(lambda: self._control.guarded(call, wait))
        self._lent_for = (call.number, sizes)
        slots = places.slots
        num_rows = slots.num_local_experts * places.rows_per_expert
        messages = self._heap.tensor(
            slots.row_offset(call.number % NUM_SLOT_SETS, 0),
            (num_rows, places.message_bytes // 2),
            torch.bfloat16,
        )
        rows: torch.Tensor = messages[:, LOW_LATENCY_HEADER_BYTES // 2 :]
        return rows.view(slots.num_local_experts, places.rows_per_expert, sizes.hidden)

    def check_was_lent(self, call: Call, sizes: LowLatencySizes) -> None:
        """Refuse `zero_copy` if the rows cannot be where this call looks for them."""
        if self._lent_for != (call.number, sizes):
            raise InvalidCall(
                "zero_copy needs get_next_low_latency_combine_buffer before this call: the buffer it gave"
                " is for the very next low-latency call, and none may lie between"
            )

    # Cleaning

    def clean(self, call: Call, sizes: LowLatencySizes) -> None:
        """Let all ranks change to other sizes, once no rank needs the slots of earlier calls any more."""
        header = records.record(call.kind, sizes)

        def whole_call() -> None:
            self._wait_until_writable(call)
            self._post(call, header)
            self._wait_for_records(call, None, header, None)
            self._finish(call)
            self._num_cleanings += 1
            self._places_for(sizes)
            self._agreed = True

        self._stream.run(lambda: self._control.guarded(call, whole_call))

    def check_nothing_in_flight(self) -> None:
        for unreceived in self._in_flight:
            if unreceived is not None:
                raise InvalidCall(f"{unreceived} was sent and is not yet received: call its hook first")

    # Masks

    def unmask(self, ranks: Sequence[int]) -> None:
        """Unmask ranks; all unmasked ranks and the ranks to unmask take part."""
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
        sizes = self._places.slots.sizes if self._places is not None and self._agreed else None

        def whole_round() -> None:
            layout = Layout(self._num_cleanings, _as_words(sizes))
            self._last_call, layout = self.masks.take_back(call, ranks, layout)
            self._all_over_until = self._last_call
            if layout.version > self._num_cleanings:
                # The other ranks changed the layout of their slots while this rank was masked.
                self._num_cleanings = layout.version
                self._places_for(low_latency_sizes(*layout.sizes))
                self._agreed = True

        self._stream.run(lambda: self._control.guarded(call, whole_round))

    def _forget_what_is_in_flight(self) -> None:
        """Drop sent calls: a masked rank does not receive them, since the other ranks have gone on."""
        self._num_open -= sum(call is not None for call in self._in_flight)
        self._in_flight = [None] * NUM_SLOT_SETS
        self._unfilled = [None] * NUM_SLOT_SETS

    # Steps of a call

    def _run(
        self,
        call: Call,
        send: Callable[[], None],
        receive: Callable[[], None],
        run_async: bool,
        by_hook: bool,
    ) -> Sent:
        control = self._control
        self._num_open += 1

        def end_after(*parts: Callable[[], None]) -> None:
            try:
                for part in parts:
                    control.guarded(call, part)
            finally:
                self._num_open -= 1

        if run_async:
            return Sent(self._stream.submit(lambda: end_after(send, receive)), None)
        if not by_hook:
            self._stream.run(lambda: end_after(send, receive))
            return Sent(None, None)
        try:
            self._stream.run(lambda: control.guarded(call, send))
        except BaseException:
            self._num_open -= 1
            raise
        self._in_flight[call.number % NUM_SLOT_SETS] = call
        control.end(call)
        return Sent(None, _Hook(self, call, lambda: end_after(receive)))

    def receive_now(self, call: Call, receive: Callable[[], None]) -> None:
        """What a hook does."""
        slot_set = call.number % NUM_SLOT_SETS
        if self._in_flight[slot_set] != call:
            raise InvalidCall(f"{call} was given up when the other ranks went on without this one")
        try:
            self._stream.run(receive)
        finally:
            # Not earlier: a call in another thread that needs these slots has to wait until now.
            self._in_flight[slot_set] = None
            self._unfilled[slot_set] = None

    def _wait_until_writable(self, call: Call) -> None:
        """Wait until no rank needs what this rank's call before the last one wrote."""
        if self._can_shrink:
            self.masks.look()
        previous = call.number - NUM_SLOT_SETS
        if previous > self._all_over_until:
            self._control.enter(call, Phase.ACKNOWLEDGE)
            slot_set = call.number % NUM_SLOT_SETS
            what = f"receipt of {name_of_call(previous)} (by its hook, if it has one)"
            self._wait(call, self._own_packed[slot_set], previous, Topic.PACKED + slot_set, what)

    def _post(self, call: Call, header: Array, pieces: _Pieces | None = None, refusal: str = "") -> None:
        """Finish sending: write a completion record to every rank, after the parts that use the network."""
        header[records.Field.CALL] = call.number
        slot_set = call.number % NUM_SLOT_SETS
        self._backend.post_records(
            self._record_at_peers[slot_set],
            self.masks.masked,
            self._control.wake_ups,
            Topic.RECORD + slot_set,
            header,
        )
        if self._transport is not None:
            num_experts = self._places.slots.num_local_experts if pieces and self._places is not None else 0
            self._transport.post(call, pieces or {}, num_experts, refusal)

    def _wait_for_records(
        self, call: Call, places: _Places | None, header: Array, wait_stats: torch.Tensor | None
    ) -> tuple[Array, int]:
        """Wait for the completion record of every rank. Returns their ranges, by (rank, local expert), and
        the total number of rows.

        Raises `Disagreement` if the ranks do not agree.
        """
        control = self._control
        slot_set = call.number % NUM_SLOT_SETS
        control.enter(call, Phase.RECEIVE)
        self._wait(
            call,
            self._own_record[slot_set],
            call.number,
            Topic.RECORD + slot_set,
            "completion record",
            wait_stats,
        )
        num_experts = places.slots.num_local_experts if places is not None else 0
        ranges = np.empty((self._num_ranks, num_experts), np.int64)
        headers = np.empty((self._num_ranks, records.NUM_WORDS), np.int64)
        num_rows = self._backend.read_records(
            self._own_record[slot_set],
            self.masks.masked,
            header,
            *records.AGREEING_WORDS,
            headers,
            ranges,
        )
        if num_rows < 0:
            error = control.disagreement(
                call,
                headers,
                REFUSAL_TEXTS + slot_set,
                records.SIGNATURE_WORDS,
                records.word_for_people,
            )
            self._tell_packed(call)
            raise error
        return ranges, num_rows

    def _tell_packed(self, call: Call) -> None:
        """Tell every rank that this rank no longer needs what it wrote for this call."""
        slot_set = call.number % NUM_SLOT_SETS
        self._control.signal(self._packed_at_peers[slot_set], Topic.PACKED + slot_set, call.number)
        if self._transport is not None:
            self._transport.tell_packed(call)

    def _finish(self, call: Call) -> None:
        if self._can_shrink:
            # A rank that masked this one may have overwritten the rows while this rank read them.
            self.masks.look()
        self._tell_packed(call)
        self._agreed = True
        self._control.end(call)

    def _wait(
        self,
        call: Call,
        counters: Array,
        expected: int,
        topic: int,
        what: str,
        stats: torch.Tensor | None = None,
    ) -> None:
        """Wait until every rank that is not masked has released `expected` in its counter here."""
        control, masked = self._control, self.masks.masked
        missing = ~masked
        waited = stats.numpy() if stats is not None else NOT_TIMED
        started = time.monotonic_ns() if stats is not None else 0

        def step(num_spins: int) -> int:
            if self._can_shrink:
                self.masks.look()
                missing[masked] = False
            return control.await_counters(counters, expected, missing, num_spins, topic, waited, started)

        def give_up(peers: Sequence[int], error: AnyEPError) -> None:
            self.masks.mask(peers, str(error))

        if step(control.num_spins):
            control.wait_until(
                call,
                step,
                lambda: control.stall(counters, missing, what, expected),
                give_up=give_up if self._can_shrink else None,
            )


class _Hook:
    """Receives a sent call; calling it a second time does nothing."""

    def __init__(self, mode: LowLatency, call: Call, receive: Callable[[], None]) -> None:
        self._mode = mode
        self._call = call
        self._receive: Callable[[], None] | None = receive

    def __call__(self) -> None:
        receive, self._receive = self._receive, None
        if receive is not None:
            self._mode.receive_now(self._call, receive)

    def __del__(self) -> None:
        if self._receive is not None:
            self._mode.hook_was_dropped(self._call)


class _Places:
    """The addresses of a layout of slots, by set and then by rank.

    Data from the ranks `remote` lies in this rank's own memory, and so does data for them.
    """

    def __init__(
        self,
        slots: LowLatencySlots,
        heap_addresses: Array,
        rank: int,
        remote: Sequence[int],
        lists_start: int,
    ) -> None:
        self.slots = slots
        self.message_bytes = slots.message_bytes
        self.rows_per_expert = slots.num_ranks * slots.sizes.num_max_tokens
        self.remote_lists = RemoteLists(lists_start, slots)
        self.list_strides = np.full(slots.num_ranks, self.rows_per_expert * slots.message_bytes, np.int64)
        """Bytes from one expert's list to the next."""
        self.list_strides[list(remote)] = self.remote_lists.stride
        self.messages: list[Array] = []
        """The address of each rank's first message."""
        self.lists_for_peers: list[Array] = []
        """The address of the list for each peer's first expert, in this rank's own memory."""
        self.lists_of_peers: list[Array] = []
        """The address of the list that each peer keeps for this rank's first expert."""
        for slot_set in range(NUM_SLOT_SETS):
            by_reader = [slots.slot_offset(slot_set, 0, reader, 0) for reader in range(slots.num_ranks)]
            self.messages.append(heap_addresses + slots.row_offset(slot_set, 0))
            self.lists_for_peers.append(heap_addresses[rank] + np.array(by_reader, np.int64))
            self.lists_of_peers.append(heap_addresses + by_reader[rank])
            for other in remote:
                own = heap_addresses[rank]
                self.messages[slot_set][other] = own + by_reader[other]
                self.lists_of_peers[slot_set][other] = own + self.remote_lists.incoming(slot_set, other)
                self.lists_for_peers[slot_set][other] = own + self.remote_lists.outgoing(slot_set, other)


def _as_words(sizes: LowLatencySizes | None) -> tuple[int, int, int]:
    return (sizes.num_max_tokens, sizes.hidden, sizes.num_experts) if sizes is not None else (0, 0, 0)


def _sizes_text(sizes: LowLatencySizes) -> str:
    return (
        f"{sizes.num_max_tokens} tokens per rank at most, hidden {sizes.hidden}, {sizes.num_experts} experts"
    )
