"""Low-latency mode over the network: rows are put into slots of the ranks that need them.

Ranks that share memory read rows where the sender keeps them. A rank on another host cannot: the sender puts
rows, and the lists that say which expert each row is for, into its memory, each row once, right before the
completion record. Its kernels find both there, at addresses laid out like those of a sender on the same host.

In a dispatch, the message of token t of rank s lies in slot (expert 0, source s, token t) of the reader; in a
combine, the i-th row that expert e of rank s returns lies in slot (e, s, i). Lists have their own area: for
each set, rank and expert as many words as there can be tokens; first incoming lists, then outgoing ones.

Nothing is put to a masked rank: it may still read what was put there before. And what is still under way to
it is read out of this rank's memory, so a set is not written again before that is sent, or given up for good.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anyep.backends.cpu.kernels.slots import COUNT_MASK
from anyep.backends.cpu.ops_low_latency import SlotAddresses
from anyep.core.calls import Array, Call
from anyep.core.traffic import Sent
from anyep.layout import COUNTER_BYTES, NUM_SLOT_SETS, RECORD_HEADER_BYTES, TEXT_BYTES, ControlRegion
from anyep.sizes import LOW_LATENCY_HEADER_BYTES
from anyep.transport.base import Piece
from anyep.transport.remote import Transport


class LowLatencyTransport:
    """Puts the data of a call into the memory of the remote ranks."""

    def __init__(
        self,
        transport: Transport,
        region: ControlRegion,
        own_rank: int,
        heap_address: int,
        sent: Sent,
        masked: Array,
    ) -> None:
        """Nothing is put to the ranks that are `masked`, which may change."""
        self.ranks = transport.ranks
        self._masked = masked
        self._tickets: list[dict[int, int]] = [{} for _ in range(NUM_SLOT_SETS)]
        """By set and rank: that of the last put out of this set."""
        self._transport = transport
        self._rank = own_rank
        self._heap_address = heap_address
        self._sent = sent
        self._record, self._packed = (
            region.blocks.record,
            region.blocks.packed,
        )

    def tokens(
        self, at: SlotAddresses, slot_set: int, topk_idx: Array, payload_bytes: int, scale_bytes: int
    ) -> dict[int, list[Piece]]:
        """The rows of a dispatch for each rank, each token once, and its lists."""
        slots = at.slots
        # The id -1 (no expert) gives rank -1.
        chosen = topk_idx // slots.num_local_experts
        num_bytes = LOW_LATENCY_HEADER_BYTES + payload_bytes + scale_bytes
        own = int(at.messages[slot_set][self._rank])
        pieces: dict[int, list[Piece]] = {}
        for rank in self._readers():
            there = slots.slot_offset(slot_set, 0, self._rank, 0)
            offsets = (np.flatnonzero((chosen == rank).any(axis=1)) * at.message_bytes).tolist()
            pieces[rank] = [(own + offset, there + offset, num_bytes) for offset in offsets]
            pieces[rank].append(self._lists(at, slot_set, rank))
            self._sent.add_rows(rank, len(offsets), payload_bytes, num_bytes - payload_bytes)
        return pieces

    def rows(self, at: SlotAddresses, slot_set: int, layout_range: Array) -> dict[int, list[Piece]]:
        """The rows that a combine returns to each rank, and its lists; rows begin where the slots begin."""
        slots, message_bytes = at.slots, at.message_bytes
        own = int(at.messages[slot_set][self._rank])
        pieces: dict[int, list[Piece]] = {}
        for rank in self._readers():
            pieces[rank] = [self._lists(at, slot_set, rank)]
            counts = layout_range[:, rank] & COUNT_MASK
            for expert in np.flatnonzero(counts).tolist():
                row = expert * at.rows_per_expert + int(layout_range[expert, rank] >> 32)
                there = slots.slot_offset(slot_set, expert, self._rank, 0)
                pieces[rank].append((own + row * message_bytes, there, int(counts[expert]) * message_bytes))
            self._ranges(rank, slot_set, len(counts))[:] = counts
            payload_bytes = message_bytes - LOW_LATENCY_HEADER_BYTES
            self._sent.add_rows(rank, counts.sum(), payload_bytes, LOW_LATENCY_HEADER_BYTES)
        return pieces

    def post(self, call: Call, pieces: dict[int, list[Piece]], num_experts: int, refusal: str = "") -> None:
        """Put rows and lists, then the completion record that kernels wrote into each outbox; its call number
        comes last.

        A refused call has no ranges: the reason is written in their place.
        """
        slot_set = call.number % NUM_SLOT_SETS
        start = self._record.offset(self._rank, slot_set)
        for rank in self._readers():
            num_bytes = RECORD_HEADER_BYTES + COUNTER_BYTES * num_experts
            if refusal:
                text = refusal.encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
                self._transport.outbox(rank, start + RECORD_HEADER_BYTES, TEXT_BYTES)[:] = np.frombuffer(
                    text, np.uint8
                )
                num_bytes = RECORD_HEADER_BYTES + TEXT_BYTES
            here = self._transport.address(rank) + start
            record = (here + COUNTER_BYTES, start + COUNTER_BYTES, num_bytes - COUNTER_BYTES)
            self._sent.add_message(rank, num_bytes - COUNTER_BYTES)
            ticket = self._transport.put(rank, [*pieces.get(rank, ()), record], [(start, call.number)])
            self._tickets[slot_set][rank] = ticket

    def unsent(self, slot_set: int) -> list[int]:
        """The masked ranks to which the rows of a set are still under way: they acknowledge nothing."""
        tickets = self._tickets[slot_set]
        return [
            rank
            for rank in self.ranks
            if self._masked[rank] and not self._transport.is_sent(rank, tickets.get(rank, 0))
        ]

    def drop(self, ranks: Sequence[int], why: str) -> None:
        """Give up what is under way to these ranks, for good."""
        for rank in ranks:
            self._transport.drop(rank, why)

    def _readers(self) -> list[int]:
        """The ranks that rows are put to."""
        return [rank for rank in self.ranks if not self._masked[rank]]

    def tell_packed(self, call: Call) -> None:
        """Tell every rank that this rank no longer needs what was put for this call."""
        offset = self._packed.offset(self._rank, call.number % NUM_SLOT_SETS)
        for rank in self._readers():
            self._transport.send(rank, [], [(offset, call.number)])

    def _lists(self, at: SlotAddresses, slot_set: int, rank: int) -> Piece:
        lists = at.remote_lists
        here = self._heap_address + lists.outgoing(slot_set, rank)
        self._sent.add_message(rank, lists.num_bytes)
        return here, lists.incoming(slot_set, self._rank), lists.num_bytes

    def _ranges(self, rank: int, slot_set: int, num_experts: int) -> Array:
        """The ranges of the completion record that is assembled for a rank."""
        start = self._record.offset(self._rank, slot_set) + RECORD_HEADER_BYTES
        ranges: Array = self._transport.outbox(rank, start, COUNTER_BYTES * num_experts).view(np.int64)
        return ranges
