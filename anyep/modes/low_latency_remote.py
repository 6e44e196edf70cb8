"""Low latency over the network: rows are put to the ranks that want them, into slots that they keep for it.

Ranks that share memory take rows from where their sender keeps them. A rank on another host cannot: it gets
them, and the lists that say which rows are whose, put into its own memory, each row once, right before the
completion record. There its kernels find both, by addresses that are like those of a sender next door.

Of a dispatch, the message of token t of rank s lies in slot (expert 0, source s, token t) of the reader; of a
combine, the i-th row that expert e of rank s returns lies in slot (e, s, i). Lists have an area of their own:
for each set, rank and expert as many words as there can be tokens; first those that come, then those that go.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anyep.calls import Array, Call
from anyep.control.status import TEXT_BYTES
from anyep.layout import COUNTER_BYTES, NUM_SLOT_SETS, RECORD_HEADER_BYTES, ControlRegion, LowLatencySlots
from anyep.sizes import LOW_LATENCY_HEADER_BYTES
from anyep.transport.remote import Transport

COUNT_MASK = (1 << 32) - 1
Piece = tuple[int, int, int]


class RemoteLists:
    """Where lists lie that came over the network, and where those are put together that go.

    With 2 ranks, 3 local experts and 4 tokens at most, starting at 0: a rank's lists take 48 bytes, a set 96;
    those that come from rank 1 in set 1 are at 144, those that go to it at 336.
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


class LowLatencyTransport:
    """Puts what a call sends to the remote ranks."""

    def __init__(self, transport: Transport, region: ControlRegion, own_rank: int, heap_address: int) -> None:
        self.ranks = transport.ranks
        self._transport = transport
        self._rank = own_rank
        self._heap_address = heap_address
        self._record, self._packed = (
            region.blocks.record,
            region.blocks.packed,
        )

    def tokens(
        self, places: Any, slot_set: int, topk_idx: Array, num_payload_bytes: int
    ) -> dict[int, list[Piece]]:
        """The rows of a dispatch for each rank, each token once, and its lists."""
        slots = places.slots
        # No expert (-1) is on rank -1.
        chosen = topk_idx // slots.num_local_experts
        num_bytes = LOW_LATENCY_HEADER_BYTES + num_payload_bytes
        own = int(places.messages[slot_set][self._rank])
        pieces: dict[int, list[Piece]] = {}
        for rank in self.ranks:
            there = slots.slot_offset(slot_set, 0, self._rank, 0)
            offsets = (np.flatnonzero((chosen == rank).any(axis=1)) * places.message_bytes).tolist()
            pieces[rank] = [(own + offset, there + offset, num_bytes) for offset in offsets]
            pieces[rank].append(self._lists(places, slot_set, rank))
        return pieces

    def rows(self, places: Any, slot_set: int, layout_range: Array) -> dict[int, list[Piece]]:
        """The rows that a combine returns to each rank, and its lists; they begin where the slots do."""
        slots, message_bytes = places.slots, places.message_bytes
        own = int(places.messages[slot_set][self._rank])
        pieces: dict[int, list[Piece]] = {}
        for rank in self.ranks:
            pieces[rank] = [self._lists(places, slot_set, rank)]
            counts = layout_range[:, rank] & COUNT_MASK
            for expert in np.flatnonzero(counts).tolist():
                row = expert * places.rows_per_expert + int(layout_range[expert, rank] >> 32)
                there = slots.slot_offset(slot_set, expert, self._rank, 0)
                pieces[rank].append((own + row * message_bytes, there, int(counts[expert]) * message_bytes))
            self._ranges(rank, slot_set, len(counts))[:] = counts
        return pieces

    def post(self, call: Call, pieces: dict[int, list[Piece]], num_experts: int, refusal: str = "") -> None:
        """Put rows and lists, and then the completion record that kernels left in each outbox; its number
        comes last.

        Of a refused call there are no ranges: its reason stands in their place.
        """
        slot_set = call.number % NUM_SLOT_SETS
        start = self._record.offset(self._rank, slot_set)
        for rank in self.ranks:
            num_bytes = RECORD_HEADER_BYTES + COUNTER_BYTES * num_experts
            if refusal:
                text = refusal.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
                self._transport.outbox(rank, start + RECORD_HEADER_BYTES, TEXT_BYTES)[:] = np.frombuffer(
                    text, np.uint8
                )
                num_bytes = RECORD_HEADER_BYTES + TEXT_BYTES
            here = self._transport.address(rank) + start
            record = (here + COUNTER_BYTES, start + COUNTER_BYTES, num_bytes - COUNTER_BYTES)
            self._transport.put(rank, [*pieces.get(rank, ()), record], [(start, call.number)])

    def tell_packed(self, call: Call) -> None:
        """Tell every rank that nothing of what it put for this call is needed any more."""
        offset = self._packed.offset(self._rank, call.number % NUM_SLOT_SETS)
        for rank in self.ranks:
            self._transport.send(rank, [], [(offset, call.number)])

    def _lists(self, places: Any, slot_set: int, rank: int) -> Piece:
        lists = places.remote_lists
        here = self._heap_address + lists.outgoing(slot_set, rank)
        return here, lists.incoming(slot_set, self._rank), lists.num_bytes

    def _ranges(self, rank: int, slot_set: int, num_experts: int) -> Array:
        """The ranges of the completion record that is put together for a rank."""
        start = self._record.offset(self._rank, slot_set) + RECORD_HEADER_BYTES
        ranges: Array = self._transport.outbox(rank, start, COUNTER_BYTES * num_experts).view(np.int64)
        return ranges
