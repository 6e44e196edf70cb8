"""The operations of low-latency mode on the CPU.

To send, a rank writes rows and lists of tokens into its own memory, then a completion record to every reader.
To receive, it waits for the completion record of every rank, reads the rows from where they lie, and tells
their senders that it is done (`packed`). Where ranks may be masked, a wait that would end in an error goes on
without the ranks that it is about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from anyep.backends import cpu
from anyep.backends.cpu.heap import Block
from anyep.backends.cpu.memory import WarmMemory
from anyep.backends.cpu.rows import WORTH_SPLITTING_BYTES, WORTH_STREAMING_BYTES, wrong_id
from anyep.backends.cpu.stream import Stream
from anyep.backends.cpu.team import Team
from anyep.backends.low_latency import (
    Agreement,
    LowLatencyControl,
    LowLatencyInput,
    LowLatencyResults,
    LowLatencyTokens,
    Mask,
    Outline,
)
from anyep.core import records
from anyep.core.calls import Array, Call, Phase, Stall, Topic, name_of_call
from anyep.core.records import REFUSAL_TEXTS, Format
from anyep.errors import AnyEPError, InvalidCall
from anyep.events import EventHandle
from anyep.layout import (
    COUNTER_BYTES,
    NUM_SLOT_SETS,
    RECORD_HEADER_BYTES,
    ControlRegion,
    LowLatencySlots,
)
from anyep.sizes import LOW_LATENCY_HEADER_BYTES, LowLatencySizes

NO_STATS: Final = np.zeros(0, np.int32)
NOT_TIMED: Final = np.zeros(0, np.int64)
Pieces = dict[int, list[tuple[int, int, int]]]

"""By rank on another host: (address, offset there, bytes) of what is put there."""


class Written(NamedTuple):
    """What a call has written for its readers."""

    rows: Array
    """[reader, local expert]: the rows, in the lower half of each word."""
    payload_bytes: int = 0
    """The bytes of each row; rows in LogFMT count as bfloat16."""
    beside_bytes: int = 0
    num_ranges: int = 0
    """The ranges that follow the header of a completion record."""
    pieces: Pieces | None = None
    """What to put to other hosts."""


class Work(NamedTuple):
    """The two halves of a call."""

    send: Callable[[], None]
    receive: Callable[[], None]
    release: Callable[[], None]


class RemoteReaders(Protocol):
    """Puts what a call sends to the ranks on other hosts."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    def tokens(
        self, at: SlotAddresses, slot_set: int, topk_idx: Array, payload_bytes: int, scale_bytes: int
    ) -> Pieces: ...
    def rows(self, at: SlotAddresses, slot_set: int, layout_range: Array) -> Pieces: ...
    def post(self, call: Call, pieces: Pieces, num_experts: int, refusal: str = "") -> None: ...
    def tell_packed(self, call: Call) -> None: ...
    def unsent(self, slot_set: int) -> list[int]: ...
    def drop(self, ranks: Sequence[int], why: str) -> None: ...


class CpuLowLatencyOps:
    """Low-latency mode on the CPU."""

    is_capturing = False

    def __init__(
        self,
        control: LowLatencyControl,
        region: ControlRegion,
        heaps: Sequence[Block],
        lists_start: int,
        mask: Mask,
        can_shrink: bool,
        stream: Stream,
        team: Team,
        memory: WarmMemory,
        remote: RemoteReaders | None,
    ) -> None:
        """`lists_start` is where the lists of ranks on other hosts lie, behind the slots."""
        self._control = control
        self._mask = mask
        self._can_shrink = can_shrink
        self._stream = stream
        self._team = team
        self._memory = memory
        self._remote = remote
        self._rank, self._num_ranks = control.rank, control.num_ranks
        self._near = np.ones(control.num_ranks, np.bool_)
        """The ranks that read this rank's memory; what is put to the others is counted there."""
        self._near[list(remote.ranks) if remote is not None else []] = False
        self._sent = control.traffic.low_latency.words
        self._nothing = Written(np.zeros((control.num_ranks, 0), np.int64))
        self._heap = heaps[control.rank]
        self._heap_addresses = np.array([heap.address for heap in heaps], np.int64)
        self._lists_start = lists_start
        record, packed = region.blocks.record, region.blocks.packed
        sets = range(NUM_SLOT_SETS)
        self._records_at_peers = [control.peer_counters(record, slot_set) for slot_set in sets]
        self._own_records = [control.own_counters(record, slot_set) for slot_set in sets]
        self._packed_at_peers = [control.peer_counters(packed, slot_set) for slot_set in sets]
        self._own_packed = [control.own_counters(packed, slot_set) for slot_set in sets]
        self._all_over_until = 0
        """No rank is behind this call: its acknowledgement need not be waited for."""
        self._at: SlotAddresses | None = None
        self.agreement = Agreement()

    # Before and after calls

    def before_call(self) -> None:
        if self._can_shrink:
            self._mask.look()

    def listen(self) -> None:
        """Calls raise their errors themselves."""

    def raise_earlier(self) -> None:
        """Calls raise their errors themselves."""

    def is_quiet(self) -> bool:
        return False

    def check_ids(self, topk_idx: torch.Tensor, num_experts: int) -> None:
        """Refuse ids that are neither experts nor -1."""
        place = cpu.first_wrong_id(topk_idx.numpy(), num_experts)
        if place >= 0:
            raise wrong_id(topk_idx, place, num_experts)

    def count_rows(self, layout_range: torch.Tensor, src_info: torch.Tensor, max_tokens: int) -> int:
        """The rows of a handle; a negative number says what is wrong with its contents."""
        return int(cpu.count_rows(layout_range.numpy(), src_info.numpy(), max_tokens))

    def check_zero_copy(self) -> None:
        """Zero copy is always possible."""

    def check_not_captured(self, function: str) -> None:
        """There are no graphs on the CPU."""

    def use_slots(self, slots: LowLatencySlots) -> None:
        """Later calls have these slots."""
        remote = self._remote.ranks if self._remote is not None else ()
        self._at = SlotAddresses(slots, self._heap_addresses, self._rank, remote, self._lists_start)

    @property
    def _addresses(self) -> SlotAddresses:
        assert self._at is not None
        return self._at

    def allocator(self, outlines: Sequence[Outline]) -> Callable[[], Sequence[torch.Tensor]]:
        memory = self._memory

        def allocate() -> list[torch.Tensor]:
            made = []
            for shape, dtype, is_transposed in outlines:
                stored = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
                tensor = memory.empty(stored, dtype)
                made.append(tensor.transpose(-2, -1) if is_transposed else tensor)
            return made

        return allocate

    # Work

    def dispatch(self, call: Call, tokens: LowLatencyTokens, results: LowLatencyResults) -> Work:
        at = self._addresses
        header = records.header_of(call.kind, tokens.sizes, tokens.travel)

        def send() -> None:
            self._wait_until_writable(call)
            self._control.enter(call, Phase.SEND)
            self._post(call, header, self._send_tokens(call, at, tokens))

        def receive() -> None:
            ranges, num_rows = self._wait_for_records(call, at, header, tokens.wait_stats)
            self._pack(call, at, tokens, ranges, num_rows, results)
            self._finish(call)

        return Work(send, receive, partial(self._tell_packed, call))

    def combine(self, call: Call, combined: LowLatencyInput, out: torch.Tensor) -> Work:
        at = self._addresses
        travel = Format.LOGFMT if combined.use_logfmt else Format.BF16
        header = records.header_of(call.kind, combined.sizes, travel)

        def send() -> None:
            self._wait_until_writable(call)
            self._control.enter(call, Phase.SEND)
            self._post(call, header, self._send_rows(call, at, combined))

        def receive() -> None:
            ranges, _ = self._wait_for_records(call, at, header, combined.wait_stats)
            missing = self._sum(call, at, combined, ranges, out)
            self._finish(call)
            if missing >= 0:
                token, choice = divmod(missing, combined.topk_idx.shape[1])
                raise InvalidCall(
                    f"topk_idx sends token {token} to expert {int(combined.topk_idx[token, choice])}, which"
                    f" has no row of it: pass the topk_idx of the dispatch that the handles come from"
                )

        return Work(send, receive, partial(self._tell_packed, call))

    def run(self, call: Call, work: Work, run_async: bool, on_end: Callable[[], None]) -> EventHandle | None:
        def whole_call() -> None:
            try:
                self._control.guarded(call, work.send)
                self._control.guarded(call, work.receive)
            finally:
                on_end()

        if run_async:
            return self._stream.submit(whole_call)
        self._stream.run(whole_call)
        return None

    def send(self, call: Call, work: Work) -> None:
        self._stream.run(lambda: self._control.guarded(call, work.send))
        self._control.end(call)

    def receive(self, call: Call, work: Work, on_end: Callable[[], None]) -> None:
        def receive() -> None:
            try:
                self._control.guarded(call, work.receive)
            finally:
                on_end()

        self._stream.run(receive)

    def refuse(self, call: Call, error: AnyEPError) -> None:
        def tell() -> None:
            self._wait_until_writable(call)
            slot_set = call.number % NUM_SLOT_SETS
            self._control.publish_refusal(REFUSAL_TEXTS + slot_set, str(error))
            self._post(call, records.header_of(call.kind), refusal=str(error))
            self._tell_packed(call)
            self._control.end(call)

        self._stream.run(lambda: self._control.guarded(call, tell))

    def clean(self, call: Call, sizes: LowLatencySizes) -> None:
        header = records.header_of(call.kind, sizes)

        def whole_call() -> None:
            self._wait_until_writable(call)
            self._post(call, header)
            self._wait_for_records(call, None, header, None)
            self._finish(call)

        self._stream.run(whole_call)

    def wait_for_earlier(self) -> None:
        self._stream.synchronize()

    def next_combine_rows(self, call: Call, slots: LowLatencySlots) -> torch.Tensor:
        def wait() -> None:
            self._wait_until_writable(call)
            self._control.end(call)

        self._stream.run(wait)
        num_rows = slots.num_local_experts * slots.rows_per_expert
        messages = self._heap.tensor(
            slots.row_offset(call.number % NUM_SLOT_SETS, 0),
            (num_rows, slots.message_bytes // 2),
            torch.bfloat16,
        )
        rows: torch.Tensor = messages[:, LOW_LATENCY_HEADER_BYTES // 2 :]
        return rows.view(slots.num_local_experts, slots.rows_per_expert, slots.sizes.hidden)

    # Masks

    def before_unmask(self) -> None:
        """All earlier calls have raised their errors."""

    def unmask(self, work: Callable[[], int], generations: Array) -> None:
        def whole_round() -> None:
            self._all_over_until = work()

        self._stream.run(whole_round)

    # Sending

    def _wait_until_writable(self, call: Call) -> None:
        """Wait until no rank needs what this rank's call before the last one wrote."""
        if self._can_shrink:
            self._mask.look()
        previous = call.number - NUM_SLOT_SETS
        if previous > self._all_over_until:
            self._control.enter(call, Phase.ACKNOWLEDGE)
            slot_set = call.number % NUM_SLOT_SETS
            what = f"receipt of {name_of_call(previous)} (by its hook, if it has one)"
            self._wait(call, self._own_packed[slot_set], previous, Topic.PACKED + slot_set, what)
            if self._remote is not None and self._can_shrink:
                self._wait_until_sent(call, self._remote, slot_set)

    def _wait_until_sent(self, call: Call, remote: RemoteReaders, slot_set: int) -> None:
        """Wait until nothing of a set is under way to masked ranks, or given up for good."""
        control, unsent = self._control, remote.unsent(slot_set)

        def step(num_spins: int) -> int:
            control.poll_until_done(lambda: (len(remote.unsent(slot_set)), False))
            unsent[:] = remote.unsent(slot_set)
            return len(unsent)

        def give_up(peers: Sequence[int], error: AnyEPError) -> None:
            remote.drop(peers, str(error))

        if unsent:
            control.wait_until(
                call,
                step,
                lambda: Stall(tuple(unsent), "receipt of rows that were put", 0, call.number - NUM_SLOT_SETS),
                give_up=give_up,
            )

    def _send_tokens(self, call: Call, at: SlotAddresses, tokens: LowLatencyTokens) -> Written:
        """Write the tokens' messages, and lists beside them."""
        slot_set = call.number % NUM_SLOT_SETS
        sizes = tokens.sizes
        topk_idx = tokens.topk_idx.numpy()
        x, messages = tokens.x.data_ptr(), int(at.messages[slot_set][self._rank])
        self._team.run(
            lambda first, end: cpu.send_tokens(
                first,
                end,
                x,
                sizes.hidden,
                int(tokens.travel),
                topk_idx,
                sizes.num_experts,
                messages,
                at.message_bytes,
            ),
            topk_idx.shape[0],
            worth_splitting=topk_idx.shape[0] * at.message_bytes >= WORTH_SPLITTING_BYTES,
        )
        by_expert = np.empty(sizes.num_experts, np.int64)
        cpu.list_tokens(
            topk_idx,
            at.lists_for_peers[slot_set],
            at.list_strides,
            self._records_at_peers[slot_set],
            self._mask.masked,
            by_expert,
        )
        row_bytes, scale_bytes = 2 * sizes.hidden, 0
        if tokens.travel is not Format.BF16:
            row_bytes, scale_bytes = sizes.hidden, 4 * tokens.num_scale_words
        pieces = None
        if self._remote is not None:
            pieces = self._remote.tokens(at, slot_set, topk_idx, row_bytes, scale_bytes)
        rows = by_expert.reshape(self._num_ranks, -1)
        return Written(rows, row_bytes, scale_bytes, at.slots.num_local_experts, pieces)

    def _send_rows(self, call: Call, at: SlotAddresses, combined: LowLatencyInput) -> Written:
        """Write the experts' rows, and lists beside them."""
        slot_set = call.number % NUM_SLOT_SETS
        layout_range = combined.layout_range.numpy()
        if not combined.zero_copy:
            x, messages = combined.x.data_ptr(), int(at.messages[slot_set][self._rank])
            streaming = int(combined.num_rows * at.message_bytes >= WORTH_STREAMING_BYTES)
            self._team.run(
                lambda first, end: cpu.stage_rows(
                    first,
                    end,
                    x,
                    combined.sizes.hidden,
                    layout_range,
                    at.rows_per_expert,
                    int(combined.use_logfmt),
                    streaming,
                    messages,
                    at.message_bytes,
                ),
                at.slots.num_local_experts,
                worth_splitting=combined.num_rows * at.message_bytes >= WORTH_SPLITTING_BYTES,
            )
        cpu.list_returns(
            combined.src_info.numpy(),
            layout_range,
            at.lists_for_peers[slot_set],
            at.list_strides,
            self._records_at_peers[slot_set],
            self._mask.masked,
        )
        pieces = self._remote.rows(at, slot_set, layout_range) if self._remote is not None else None
        return Written(layout_range.T, 2 * combined.sizes.hidden, 0, at.slots.num_local_experts, pieces)

    def _post(
        self,
        call: Call,
        header: Array,
        written: Written | None = None,
        refusal: str = "",
    ) -> None:
        """Close this rank's sending: a completion record to every rank, after what is put to other hosts."""
        rows, payload_bytes, beside_bytes, num_ranges, pieces = written or self._nothing
        header[records.Field.CALL] = call.number
        slot_set, masked = call.number % NUM_SLOT_SETS, self._mask.masked
        cpu.post_records(
            self._records_at_peers[slot_set],
            masked,
            self._control.wake_ups,
            Topic.RECORD + slot_set,
            header,
        )
        # The call number closes the record: it is a counter.
        message_bytes = RECORD_HEADER_BYTES + COUNTER_BYTES * (num_ranges - 1)
        cpu.count_read(self._sent, self._near, masked, rows, payload_bytes, beside_bytes, message_bytes)
        if self._remote is not None:
            self._remote.post(call, pieces or {}, num_ranges if pieces else 0, refusal)

    # Receiving

    def _wait_for_records(
        self, call: Call, at: SlotAddresses | None, header: Array, wait_stats: torch.Tensor | None
    ) -> tuple[Array, int]:
        """Wait for the completion records of all ranks; returns their ranges by (rank, local expert), and how
        many rows these have. Raises if the ranks disagree."""
        slot_set = call.number % NUM_SLOT_SETS
        self._control.enter(call, Phase.RECEIVE)
        self._wait(
            call,
            self._own_records[slot_set],
            call.number,
            Topic.RECORD + slot_set,
            "completion record",
            wait_stats,
        )
        num_experts = at.slots.num_local_experts if at is not None else 0
        ranges = np.empty((self._num_ranks, num_experts), np.int64)
        headers = np.empty((self._num_ranks, records.NUM_WORDS), np.int64)
        num_rows = cpu.read_records(
            self._own_records[slot_set],
            self._mask.masked,
            header,
            *records.AGREEING_WORDS,
            headers,
            ranges,
        )
        if num_rows < 0:
            error = self._control.disagreement(
                call,
                headers,
                REFUSAL_TEXTS + slot_set,
                records.SIGNATURE_WORDS,
                records.word_for_people,
            )
            self._tell_packed(call)
            raise error
        return ranges, num_rows

    def _pack(
        self,
        call: Call,
        at: SlotAddresses,
        tokens: LowLatencyTokens,
        ranges: Array,
        num_rows: int,
        results: LowLatencyResults,
    ) -> None:
        slot_set = call.number % NUM_SLOT_SETS
        row_bytes = tokens.sizes.hidden * results.x.element_size()
        arguments = (
            ranges,
            at.lists_of_peers[slot_set],
            at.list_strides,
            at.messages[slot_set],
            at.message_bytes,
            row_bytes,
            tokens.num_scale_words,
            int(num_rows * row_bytes >= WORTH_STREAMING_BYTES),
            results.x.data_ptr(),
            results.scales.data_ptr() if results.scales is not None else 0,
            results.src_info.numpy(),
            results.layout_range.numpy(),
            results.counts.numpy(),
            tokens.expert_stats.numpy() if tokens.expert_stats is not None else NO_STATS,
        )
        self._team.run(
            lambda first, end: cpu.pack_tokens(first, end, *arguments),
            at.slots.num_local_experts,
            worth_splitting=num_rows * row_bytes >= WORTH_SPLITTING_BYTES,
        )

    def _sum(
        self, call: Call, at: SlotAddresses, combined: LowLatencyInput, ranges: Array, out: torch.Tensor
    ) -> int:
        """Sum the rows of each token; -1, or the first (token * top-k + choice) that has no row."""
        slot_set = call.number % NUM_SLOT_SETS
        topk_idx = combined.topk_idx.numpy()
        arguments = (
            topk_idx,
            # A hook, or the stream's thread, may run this in another grad mode than the call's.
            combined.topk_weights.detach().numpy(),
            ranges,
            at.lists_of_peers[slot_set],
            at.list_strides,
            at.messages[slot_set],
            at.message_bytes,
            at.rows_per_expert,
            self._mask.masked,
            int(combined.use_logfmt),
            out.data_ptr(),
            combined.sizes.hidden,
        )
        missing: list[int] = []
        self._team.run(
            lambda first, end: missing.append(cpu.sum_tokens(first, end, *arguments)),
            topk_idx.shape[0],
            worth_splitting=topk_idx.size * at.message_bytes >= WORTH_SPLITTING_BYTES,
        )
        return next((place for place in missing if place >= 0), -1)

    def _finish(self, call: Call) -> None:
        if self._can_shrink:
            # A rank that masked this one may have overwritten the rows while they were read.
            self._mask.look()
        self._tell_packed(call)
        self.agreement.holds = True
        self._control.end(call)

    def _tell_packed(self, call: Call) -> None:
        """Tell every rank that this one needs nothing more of what it wrote for this call."""
        slot_set = call.number % NUM_SLOT_SETS
        self._control.signal(self._packed_at_peers[slot_set], Topic.PACKED + slot_set, call.number)
        if self._remote is not None:
            self._remote.tell_packed(call)

    def _wait(
        self,
        call: Call,
        counters: Array,
        expected: int,
        topic: int,
        what: str,
        stats: torch.Tensor | None = None,
    ) -> None:
        """Wait until every unmasked rank has released `expected` in its counter here."""
        control, masked = self._control, self._mask.masked
        missing = ~masked
        waited = stats.numpy() if stats is not None else NOT_TIMED
        started = time.monotonic_ns() if stats is not None else 0

        def step(num_spins: int) -> int:
            if self._can_shrink:
                self._mask.look()
                missing[masked] = False
            return control.await_counters(counters, expected, missing, num_spins, topic, waited, started)

        def give_up(peers: Sequence[int], error: AnyEPError) -> None:
            self._mask.mask(peers, str(error))

        if step(control.num_spins):
            control.wait_until(
                call,
                step,
                lambda: control.stall(counters, missing, what, expected),
                give_up=give_up if self._can_shrink else None,
            )


class SlotAddresses:
    """The addresses of a layout of slots, by set and then by rank.

    What ranks on other hosts send lies in this rank's own memory, and so does what goes to them.
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
        self.rows_per_expert = slots.rows_per_expert
        self.remote_lists = RemoteLists(lists_start, slots)
        self.list_strides = np.full(slots.num_ranks, self.rows_per_expert * slots.message_bytes, np.int64)
        """From the list of one expert to that of the next."""
        self.list_strides[list(remote)] = self.remote_lists.stride
        self.messages: list[Array] = []
        """Of each rank's first message."""
        self.lists_for_peers: list[Array] = []
        """Of the list that this rank keeps for each peer's first expert, in its own memory."""
        self.lists_of_peers: list[Array] = []
        """Of the list that each peer keeps for this rank's first expert."""
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


class RemoteLists:
    """Where the lists of ranks on other hosts lie: first those that arrive, then those to be put there.

    Example:
        With 2 ranks, 3 local experts and at most 4 tokens, starting at 0: the lists of a rank take 48 bytes,
        a set 96. Those that arrive from rank 1 in set 1 lie at 144, those that go to it at 336.
    """

    def __init__(self, start: int, slots: LowLatencySlots) -> None:
        self.stride = 4 * slots.sizes.num_max_tokens
        self.num_bytes = self.stride * slots.num_local_experts
        self._start = start
        self._num_ranks = slots.num_ranks

    def incoming(self, slot_set: int, rank: int) -> int:
        return self._start + (slot_set * self._num_ranks + rank) * self.num_bytes

    def outgoing(self, slot_set: int, rank: int) -> int:
        return self.incoming(NUM_SLOT_SETS + slot_set, rank)
