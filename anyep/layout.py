"""Where everything lies in a rank's heap: the one source of truth for offsets.

A heap is cut into areas, an area into regions:

    control region | NVL rings | RDMA rings (received, to send)     normal mode
    control region | ............ low-latency slots (set 0, 1)      low-latency mode

The control region holds every live flag, counter, notify message and status word. Its offsets depend only on
the number of ranks and on fixed maxima, so calls with different configs agree on them. The other areas hold
rows. They follow the classic layout to the byte, but their head, tail, prefix and signal fields stay
reserved: the live ones are 64-bit and lie in the control region, where no row of a later call can overwrite
them.

The kernels take their offsets from here, the planner draws this layout, and the size tests add it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, SupportsIndex

from anyep.errors import InvalidCall, whole_number
from anyep.sizes import (
    NUM_BUFFER_ALIGNMENT_BYTES,
    NUM_MAX_LOCAL_EXPERTS,
    RDMA_META_BYTES,
    ROW_ALIGNMENT_BYTES,
    Config,
    LowLatencySizes,
    TokenLayout,
    align,
    check_even_sms,
    experts_per_rank,
    num_nodes,
    num_ranks_of_a_node,
)

NUM_MAX_CHANNELS: Final = 128
NUM_MAILBOXES: Final = 2
NUM_SLOT_SETS: Final = 2
STATUS_BYTES: Final = 8192
TEXT_BYTES: Final = 1080
"""Of a reason for a failure or a refusal."""
NOTIFY_HEADER_BYTES: Final = 256
RECORD_HEADER_BYTES: Final = 64
REJOIN_HEADER_BYTES: Final = 64
SOURCE_INDEX_BYTES: Final = 4
DIGEST_BYTES: Final = 8
COUNTER_BYTES: Final = 8
"""Every live flag, head, tail, prefix and signal is 64-bit and only grows."""


class StatusWord(IntEnum):
    """The words of a status block, by index."""

    STATE = 0
    CALL = 1
    KIND = 2
    PHASE = 3
    SINCE_NS = 4
    WAITS_FOR = 5
    FAILURE_BYTES = 6
    NO_WAKE_UP = 7
    """Always 0, since no rank sleeps on a status word."""
    REFUSAL_BYTES = 8
    """The first of several words, one for each text."""


def check_num_sms(name: str, num_sms: SupportsIndex) -> int:
    """Refuse a number of SMs that no call can use; `name` is the caller's name for it.

    >>> check_num_sms("num_sms", 258)
    Traceback (most recent call last):
    anyep.errors.InvalidCall: num_sms is 258: at most 256 are possible
    """
    count = check_even_sms(name, num_sms)
    if count > 2 * NUM_MAX_CHANNELS:
        raise InvalidCall(f"{name} is {count}: at most {2 * NUM_MAX_CHANNELS} are possible")
    return count


@dataclass(frozen=True)
class Region:
    """A named piece of a heap. `peer` is a rank in NVL rings and mailboxes, a node in RDMA rings."""

    area: str
    kind: str
    offset: int
    num_bytes: int
    channel: int | None = None
    peer: int | None = None
    slot_set: int | None = None

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


SEND_ROWS, SEND_TAIL, SEND_HEAD, SEND_BASE, RECV_ROWS, RECV_TAIL, RECV_HEAD, RECV_BASE = range(8)
"""The layers of a stack of rings, [layer, channel, peer], as kernels between nodes take it.

First for the rings to a peer, then for those from it: the addresses of the rows, of the tail and of the head,
and the value at the start of the call of the counter that this rank advances (tail, then head).
"""
NUM_RING_LAYERS: Final = 8


@dataclass(frozen=True)
class RingArea:
    """A ring per (channel, peer): first all rows, channel by channel, then the reserved control fields.

    With 2 channels, 2 peers, 3 rows of 32 bytes and control fields of 4 + 4 bytes, starting at 0: rows of
    (0,0) at 0, (0,1) at 96, (1,0) at 192, (1,1) at 288; fields from 384 on, 8 bytes per ring; 416 in all.
    """

    name: str
    start: int
    num_channels: int
    num_peers: int
    num_rows: int
    token_bytes: int
    control_fields: tuple[tuple[str, int], ...]

    @property
    def ring_bytes(self) -> int:
        return self.num_rows * self.token_bytes

    @property
    def control_bytes(self) -> int:
        """Reserved bytes per ring."""
        return sum(num_bytes for _, num_bytes in self.control_fields)

    @property
    def num_bytes(self) -> int:
        return self.num_channels * self.num_peers * (self.ring_bytes + self.control_bytes)

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    def rows_offset(self, channel: int, peer: int) -> int:
        return self.start + self._ring_index(channel, peer) * self.ring_bytes

    def control_offset(self, channel: int, peer: int) -> int:
        rows_end = self.start + self.num_channels * self.num_peers * self.ring_bytes
        return rows_end + self._ring_index(channel, peer) * self.control_bytes

    def regions(self) -> Iterator[Region]:
        rings = [(channel, peer) for channel in range(self.num_channels) for peer in range(self.num_peers)]
        for channel, peer in rings:
            yield Region(self.name, "data", self.rows_offset(channel, peer), self.ring_bytes, channel, peer)
        for channel, peer in rings:
            offset = self.control_offset(channel, peer)
            for kind, num_bytes in self.control_fields:
                yield Region(self.name, kind, offset, num_bytes, channel, peer)
                offset += num_bytes

    def _ring_index(self, channel: int, peer: int) -> int:
        return channel * self.num_peers + peer


def nvl_rings(
    start: int, num_channels: int, num_peers: int, nodes: int, num_rows: int, token_bytes: int
) -> RingArea:
    """The rings within a node: a ring per (channel, rank of the node)."""
    fields = (("prefix start", 4 * nodes), ("prefix end", 4 * nodes), ("head", 4), ("tail", 4))
    return RingArea("nvl", start, num_channels, num_peers, num_rows, token_bytes, fields)


def rdma_rings(
    name: str, start: int, num_channels: int, nodes: int, num_rows: int, token_bytes: int
) -> RingArea:
    """The rings between nodes: a ring per (channel, node)."""
    fields = (("meta", RDMA_META_BYTES), ("head", 8), ("tail", 8))
    return RingArea(name, start, num_channels, nodes, num_rows, token_bytes, fields)


def ring_rows_that_fit(area: RingArea, area_bytes: int) -> int:
    """The rows per ring, at most those of `area`, with which such an area fits in `area_bytes`.

    >>> area = nvl_rings(0, num_channels=2, num_peers=2, nodes=1, num_rows=100, token_bytes=32)
    >>> ring_rows_that_fit(area, 2 * 2 * (7 * 32 + 16)), ring_rows_that_fit(area, 10**6)
    (7, 100)
    """
    bytes_per_ring = area_bytes // (area.num_channels * area.num_peers) - area.control_bytes
    return min(area.num_rows, max(0, bytes_per_ring // area.token_bytes))


@dataclass(frozen=True)
class Window:
    """The results of one dispatch side by side: x, its sources, top-k ids, top-k weights, scales.

    A row's source is a token's index, or between nodes (8 bytes) its node and the ranks there that need it.

    >>> window = Window(num_rows=3, row_bytes=64, num_topk=2, num_scales=1)
    >>> window.offsets, window.num_bytes
    ((0, 256, 384, 512, 640), 768)
    """

    num_rows: int
    row_bytes: int
    num_topk: int
    num_scales: int
    source_bytes: int = SOURCE_INDEX_BYTES

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each result."""
        per_row = (
            self.row_bytes,
            self.source_bytes,
            8 * self.num_topk,
            4 * self.num_topk,
            4 * self.num_scales,
        )
        return tuple(self.num_rows * num_bytes for num_bytes in per_row)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each result begins."""
        aligned = [align(size, NUM_BUFFER_ALIGNMENT_BYTES) for size in self.sizes]
        return tuple(sum(aligned[:index]) for index in range(len(aligned)))

    @cached_property
    def num_bytes(self) -> int:
        return sum(align(size, NUM_BUFFER_ALIGNMENT_BYTES) for size in self.sizes)


@lru_cache(maxsize=256)
def window_of(
    num_rows: int, row_bytes: int, num_topk: int, num_scales: int, source_bytes: int = SOURCE_INDEX_BYTES
) -> Window:
    """A `Window`; calls with the same sizes share the object and its cached properties.

    >>> window_of(3, 64, 2, 1) is window_of(3, 64, 2, 1)
    True
    """
    return Window(num_rows, row_bytes, num_topk, num_scales, source_bytes)


@dataclass(frozen=True)
class LowLatencySlots:
    """Fixed places for messages, in two sets that alternate: send 0, send 1, receive 0, receive 1, signals.

    A send set holds messages by row: the tokens of a dispatch, or the experts' outputs, in the order of x. A
    rank that can read this memory takes its rows from there. It also finds the list of its tokens there,
    where this rank's slots for messages from that rank begin. A receive set has a slot per (local expert,
    source rank, token). With 2 local experts, 2 ranks and at most 4 tokens, the message of (expert 1, source
    0, token 3) is slot (1*2 + 0)*4 + 3 = 11 of its set.
    """

    start: int
    sizes: LowLatencySizes
    num_ranks: int

    def __post_init__(self) -> None:
        experts_per_rank(self.sizes.num_experts, self.num_ranks)

    @cached_property
    def num_local_experts(self) -> int:
        return self.sizes.num_experts // self.num_ranks

    @cached_property
    def message_bytes(self) -> int:
        return max(self.sizes.dispatch_message_bytes, self.sizes.combine_message_bytes)

    @cached_property
    def rows_per_expert(self) -> int:
        """The rows that an expert has room for."""
        return self.num_ranks * self.sizes.num_max_tokens

    def send_offset(self, slot_set: int) -> int:
        return self.start + slot_set * self.sizes.send_bytes

    def recv_offset(self, slot_set: int) -> int:
        return self.send_offset(NUM_SLOT_SETS) + slot_set * self.sizes.recv_bytes

    def signal_offset(self, slot_set: int) -> int:
        return self.recv_offset(NUM_SLOT_SETS) + slot_set * align(
            self.sizes.signal_bytes, ROW_ALIGNMENT_BYTES
        )

    @property
    def end(self) -> int:
        return self.signal_offset(NUM_SLOT_SETS - 1) + self.sizes.signal_bytes

    def row_offset(self, slot_set: int, row: int) -> int:
        """Where the message of a row begins in a send set; its payload follows a header."""
        return self.send_offset(slot_set) + row * self.message_bytes

    def slot_offset(self, slot_set: int, local_expert: int, source: int, token: int) -> int:
        slot = (local_expert * self.num_ranks + source) * self.sizes.num_max_tokens + token
        return self.recv_offset(slot_set) + slot * self.message_bytes

    def regions(self) -> Iterator[Region]:
        offsets_and_sizes = (
            ("send", self.send_offset, self.sizes.send_bytes),
            ("receive", self.recv_offset, self.sizes.recv_bytes),
            ("signal", self.signal_offset, self.sizes.signal_bytes),
        )
        for kind, offset_of, num_bytes in offsets_and_sizes:
            for slot_set in range(NUM_SLOT_SETS):
                yield Region("low latency", kind, offset_of(slot_set), num_bytes, slot_set=slot_set)


@dataclass(frozen=True)
class ControlBlock:
    """One kind of words in the control region: `num_bytes` for each peer that writes them, per set.

    >>> ControlBlock("mailbox", start=4096, num_bytes=200, num_peers=2, num_sets=2).offset(peer=1, slot_set=1)
    4864
    """

    kind: str
    start: int
    num_bytes: int
    num_peers: int
    num_sets: int

    @property
    def stride(self) -> int:
        """Bytes from one peer's words to the next peer's."""
        return align(self.num_bytes, NUM_BUFFER_ALIGNMENT_BYTES)

    @property
    def end(self) -> int:
        return self.offset(0, self.num_sets)

    def offset(self, peer: int, slot_set: int = 0) -> int:
        return self.start + (slot_set * self.num_peers + peer) * self.stride


class ControlBlocks(NamedTuple):
    """The blocks of a control region, in the order of the heap."""

    status: ControlBlock
    wake_up: ControlBlock
    """The wake-up count of a sleeping CPU rank: which counters it waits for, and how many are missing."""
    abort: ControlBlock
    """The abort flag for waiting GPU kernels, and the address of the word by which the host sets it."""
    sleepers: ControlBlock
    doorbell: ControlBlock
    mailbox: ControlBlock
    arrival: ControlBlock
    pulled: ControlBlock
    ring_tail: ControlBlock
    ring_head: ControlBlock
    network_tail: ControlBlock
    network_head: ControlBlock
    network_counts: ControlBlock
    record: ControlBlock
    packed: ControlBlock
    mask: ControlBlock
    given_up: ControlBlock
    rejoin: ControlBlock


@dataclass(frozen=True)
class ControlRegion:
    """The flags, counters, notify messages and status words of one rank, at the start of its heap.

    A rank polls its own control region and writes into those of its peers, so each block is divided by
    writer: the words of two peers never share a 128-byte line.

    Args:
        num_ranks: The ranks of the group.
        ranks_per_node: The ranks of a node.
    """

    num_ranks: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        whole_number("num_ranks", self.num_ranks, minimum=1)
        whole_number("ranks_per_node", self.ranks_per_node, minimum=1)

    @property
    def notify_bytes(self) -> int:
        """Header, the sender's rows of two count matrices, its rows by channel, its counts for experts; or,
        with a handle, two digests for every rank and node, and three counts for every rank."""
        nodes = num_nodes(self.num_ranks, self.ranks_per_node)
        counts = 2 * self.num_ranks + NUM_MAX_CHANNELS + NUM_MAX_LOCAL_EXPERTS
        by_handle = 2 * DIGEST_BYTES * (self.num_ranks + nodes) + 3 * 4 * self.num_ranks
        return align(NOTIFY_HEADER_BYTES + max(4 * counts, by_handle), NUM_BUFFER_ALIGNMENT_BYTES)

    @property
    def record_bytes(self) -> int:
        """Header, and a range of rows for each local expert; it closes the sending of a low-latency call."""
        return RECORD_HEADER_BYTES + NUM_MAX_LOCAL_EXPERTS * COUNTER_BYTES

    @cached_property
    def blocks(self) -> ControlBlocks:
        """The kinds of words, in the order of the heap."""
        nodes = num_nodes(self.num_ranks, self.ranks_per_node)
        node_ranks = num_ranks_of_a_node(self.num_ranks, self.ranks_per_node)
        per_channel = NUM_MAX_CHANNELS * COUNTER_BYTES
        # (kind, bytes that one peer writes, number of peers, number of alternating sets)
        kinds = (
            ("status", STATUS_BYTES, 1, 1),
            ("wake-up count", COUNTER_BYTES, 1, 1),
            ("abort flag", 2 * COUNTER_BYTES, 1, 1),
            ("sleepers", COUNTER_BYTES, 1, 1),
            ("doorbell", COUNTER_BYTES, 1, 1),
            ("mailbox", self.notify_bytes, self.num_ranks, NUM_MAILBOXES),
            ("window arrival", COUNTER_BYTES, node_ranks, 1),
            ("window pulled", COUNTER_BYTES, node_ranks, 1),
            ("ring tail", per_channel, node_ranks, 1),
            ("ring head", per_channel, node_ranks, 1),
            ("network tail", per_channel, nodes, 1),
            ("network head", per_channel, nodes, 1),
            ("network counts", NUM_MAX_CHANNELS * 4 * (node_ranks + 1), nodes, NUM_MAILBOXES),
            ("completion record", self.record_bytes, self.num_ranks, NUM_SLOT_SETS),
            ("low-latency packed", COUNTER_BYTES, self.num_ranks, NUM_SLOT_SETS),
            ("mask", self.num_ranks * COUNTER_BYTES, self.num_ranks, 1),
            ("given up", COUNTER_BYTES, self.num_ranks, 1),
            (
                "rejoin request",
                REJOIN_HEADER_BYTES + self.num_ranks * COUNTER_BYTES,
                self.num_ranks,
                NUM_SLOT_SETS,
            ),
        )
        blocks = []
        offset = 0
        for kind, num_bytes, num_peers, num_sets in kinds:
            blocks.append(ControlBlock(kind, offset, num_bytes, num_peers, num_sets))
            offset = blocks[-1].end
        return ControlBlocks(*blocks)

    def regions(self) -> Iterator[Region]:
        for block in self.blocks:
            for slot_set in range(block.num_sets):
                for peer in range(block.num_peers):
                    offset = block.offset(peer, slot_set)
                    yield Region("control", block.kind, offset, block.num_bytes, peer=peer, slot_set=slot_set)

    @cached_property
    def num_bytes(self) -> int:
        return self.blocks[-1].end


@dataclass(frozen=True)
class NormalHeap:
    """A rank's heap in normal mode. Rows from other nodes have one area, rows for other nodes a second.

    Args:
        control: The control region, at the start.
        nvl: The rings within the node.
        rdma: The rings between nodes, received and to send; empty on one node.
    """

    control: ControlRegion
    nvl: RingArea
    rdma: tuple[RingArea, ...]

    def regions(self) -> Iterator[Region]:
        yield from self.control.regions()
        yield from self.nvl.regions()
        for area in self.rdma:
            yield from area.regions()

    @property
    def end(self) -> int:
        return self.rdma[-1].end if self.rdma else self.nvl.end


def normal_heap(config: Config, num_ranks: int, ranks_per_node: int, token: TokenLayout) -> NormalHeap:
    """The heap of a dispatch or combine with this config and these tokens.

    Args:
        config: The config of the call.
        num_ranks: The ranks of the group.
        ranks_per_node: The ranks of a node.
        token: The parts of one token.
    """
    control = ControlRegion(num_ranks, ranks_per_node)
    nodes = num_nodes(num_ranks, ranks_per_node)
    nvl = nvl_rings(
        control.num_bytes,
        config.num_channels,
        num_ranks_of_a_node(num_ranks, ranks_per_node),
        nodes,
        config.num_max_nvl_chunked_recv_tokens,
        token.token_bytes,
    )
    if nodes == 1:
        return NormalHeap(control, nvl, ())
    areas: list[RingArea] = []
    start = align(nvl.end, NUM_BUFFER_ALIGNMENT_BYTES)
    for name in ("rdma receive", "rdma send"):
        area = rdma_rings(
            name,
            start,
            config.num_channels,
            nodes,
            config.num_max_rdma_chunked_recv_tokens,
            token.token_bytes,
        )
        areas.append(area)
        start = align(area.end, NUM_BUFFER_ALIGNMENT_BYTES)
    return NormalHeap(control, nvl, tuple(areas))


@dataclass(frozen=True)
class LowLatencyHeap:
    """A rank's heap in low-latency mode.

    Args:
        control: The control region, at the start.
        slots: Two sets of slots for calls in turn.
    """

    control: ControlRegion
    slots: LowLatencySlots

    def regions(self) -> Iterator[Region]:
        yield from self.control.regions()
        yield from self.slots.regions()


def low_latency_heap(sizes: LowLatencySizes, num_ranks: int, ranks_per_node: int) -> LowLatencyHeap:
    """The heap of low-latency calls of these sizes.

    Args:
        sizes: The sizes of the calls.
        num_ranks: The ranks of the group.
        ranks_per_node: The ranks of a node.
    """
    control = ControlRegion(num_ranks, ranks_per_node)
    return LowLatencyHeap(control, LowLatencySlots(control.num_bytes, sizes, num_ranks))
