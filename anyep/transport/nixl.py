"""Puts bytes and signals into another host's memory by NIXL (UCX underneath: InfiniBand, RoCE or TCP).

    engine = NixlEngine(rank, heap)
    engine.register(x.data_ptr(), x.nbytes)                   # further memory that is sent from
    engine.connect(everyone's engine.describe())
    ticket = engine.put(peer, [(x.data_ptr(), 4096, x.nbytes)], signals=[(64, 7)])
    while engine.num_done(peer) < ticket:                     # from then on x may be overwritten
        engine.poll()

When the peer polls, the word at 64 in its heap becomes 7, and x is at 4096. A process that waits must poll:
nothing arrives, and nothing leaves, unless it does.

A put is one WRITE whose notification carries the signals. A small put is only a notification, which carries
the pieces, too, and arrives in half the time. Notifications may overtake each other (a small put is done
before a large one), so they are numbered and the receiver applies them in order.

Peers put into the heap, and into what was given to `expose`; this and what is sent from may be memory of a
GPU: `engine.register(x.data_ptr(), x.nbytes, MemoryKind.GPU)`. NIXL copies between one kind of memory and
another in a transfer of its own, so a put may have several parts. Bytes of a GPU are never in notifications.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from anyep.backends.cpu.heap import Block
from anyep.backends.cpu.kernels.signals import raise_words
from anyep.errors import InvalidCall, NotSupported, PeerLost
from anyep.nixl_packages import load_nixl
from anyep.transport.base import OFFSET_MASK, MemoryKind, Piece, Signal, split_place

_LOOK: Final = (
    "see whether UCX_NET_DEVICES and UCX_TLS, where they are set, name what is there and up;"
    " NIXL_LOG_LEVEL=INFO and UCX_LOG_LEVEL=INFO tell more"
)
_DESCRIPTION: Final = struct.Struct("<QI")
"""Before the agent's metadata: the rank, and the number of regions that peers can put into."""
_REGION: Final = struct.Struct("<QQ4sI")
"""Then these regions: address, size, kind of memory, and the index of its GPU."""
_HEADER: Final = struct.Struct("<cQ")
"""Before a notification's content: its kind, and the ticket of the put."""
_SIGNALS: Final = struct.Struct("<I")
"""Then the number of signals, and the signals: offset and value."""
_PIECE: Final = struct.Struct("<QI")
"""Then the pieces that are in the notification: place, number of bytes, and the bytes."""
_ON_HOSTS: Final = (MemoryKind.HOST, MemoryKind.HOST)
MOST_INLINE_BYTES: Final = 6144
_PUT: Final = b"p"
_WORDS: Final = b"w"


class _Range(NamedTuple):
    """A range of memory, and where it is."""

    address: int
    num_bytes: int
    kind: MemoryKind
    device: int


_Descriptor = tuple[int, int, int]
"""Address, bytes, and the index of the GPU, as NIXL takes them."""


class _Copies(NamedTuple):
    """The pieces of a put between one kind of memory here and one there."""

    own: list[_Descriptor]
    there: list[_Descriptor]
    places: list[int]
    """What names the memory there, for a notification."""


@dataclass
class _Peer:
    """What this rank knows about another one, both as a receiver and as a sender of puts."""

    rank: int
    agent: str
    regions: list[_Range]
    """What this rank can put into; the first one is the heap."""
    last_heard: float
    num_tickets: int = 0
    num_done: int = 0
    running: deque[tuple[int, Any]] = field(default_factory=deque)
    """Ticket and transfer, oldest first. Transfers after the first may be done already."""
    num_applied: int = 0
    early: dict[int, bytes] = field(default_factory=dict)
    """Signals of puts that arrived before those of an earlier put."""


class NixlEngine:
    """Puts data into the heaps of ranks on other hosts, and receives what they put into this rank's."""

    def __init__(self, rank: int, heap: Block) -> None:
        """`heap` is this rank's own memory, which peers put into; it may also be the source of puts. It is in
        the host's memory, since signals are stored there."""
        self.lost: dict[int, str] = {}
        """Ranks to which a transfer has failed, with the error message."""
        self.bytes_put: dict[int, int] = {}
        self.num_puts: dict[int, int] = {}
        self._rank = rank
        self._heap = heap
        self._lock = threading.RLock()
        self._peers: dict[int, _Peer] = {}
        self._rank_of: dict[str, int] = {}
        self._heard: list[tuple[int, bytes]] = []
        self._registered: list[Any] = []
        self._own_ranges: list[_Range] = []
        self._exposed: list[_Range] = []
        """What peers can put into."""
        self._agent = _make_agent(f"anyep {rank} {secrets.token_hex(8)}")
        self.expose(heap.address, heap.num_bytes)

    def register(
        self, address: int, num_bytes: int, kind: MemoryKind = MemoryKind.HOST, device: int = 0
    ) -> None:
        """Allow puts from this memory; `device` is the index of its GPU. Must be called before `describe`."""
        if num_bytes == 0:
            return
        with self._lock:
            region = [(address, num_bytes, device, "")]
            self._registered.append(self._agent.register_memory(region, kind.value))
            self._own_ranges.append(_Range(address, num_bytes, kind, device))

    def expose(
        self, address: int, num_bytes: int, kind: MemoryKind = MemoryKind.HOST, device: int = 0
    ) -> int:
        """Allow puts from this memory, and of peers into it. Returns the number of its region, by which peers
        name it (`place`); the heap is region 0. Must be called before `describe`."""
        self.register(address, num_bytes, kind, device)
        self._exposed.append(_Range(address, num_bytes, kind, device))
        return len(self._exposed) - 1

    def describe(self) -> bytes:
        """What peers need to know about this rank; they pass it to `connect`."""
        with self._lock:
            head = _DESCRIPTION.pack(self._rank, len(self._exposed))
            for address, num_bytes, kind, device in self._exposed:
                head += _REGION.pack(address, num_bytes, kind.encode(), device)
            return head + bytes(self._agent.get_agent_metadata())

    def connect(self, descriptions: Mapping[int, bytes]) -> None:
        """Register the ranks on other hosts, each with its description."""
        with self._lock:
            for rank, description in descriptions.items():
                told_rank, num_regions = _DESCRIPTION.unpack_from(description)
                if told_rank != rank:
                    raise InvalidCall(f"the description of rank {rank} is that of rank {told_rank}")
                end = _DESCRIPTION.size + num_regions * _REGION.size
                regions = [
                    _Range(address, num_bytes, MemoryKind(kind.decode()), device)
                    for address, num_bytes, kind, device in _REGION.iter_unpack(
                        description[_DESCRIPTION.size : end]
                    )
                ]
                agent = _text(self._agent.add_remote_agent(description[end:]))
                self._peers[rank] = _Peer(rank, agent, regions, time.monotonic())
                self._rank_of[agent] = rank
                self.bytes_put[rank] = self.num_puts[rank] = 0
                with self._losing(rank):
                    self._agent.make_connection(agent)

    def put(self, peer: int, pieces: Sequence[Piece], signals: Sequence[Signal] = ()) -> int:
        """Start to copy pieces (own address, place in the peer's memory, bytes); then signals are stored.

        A place is an offset in the peer's heap, or in another region that it has exposed (`place`). A signal
        is an offset in the peer's heap and the value that the 64-bit word there is raised to. It does not
        become visible before all pieces and signals of this and of every earlier put to this peer.

        Returns at once, with a ticket, which grows with every put to a peer. The pieces must not change
        until `num_done(peer)` has reached the ticket.
        """
        with self._lock:
            if self._is_closed:
                raise InvalidCall("the engine is closed: nothing can be sent any more")
            other = self._peers[peer]
            self._raise_if_lost(peer)
            parts = self._parts(other, pieces)
            for offset, _ in signals:
                _find_there(other, offset, 8)
            self._send(other, parts, signals)
            self._raise_if_lost(peer)
            return other.num_tickets

    def num_done(self, peer: int) -> int:
        """Puts up to this ticket are done here: their memory may be overwritten.

        It no longer changes when the peer is lost.
        """
        return self._peers[peer].num_done

    def is_idle(self, peer: int) -> bool:
        """Whether every put to this peer is done here."""
        other = self._peers[peer]
        return other.num_done == other.num_tickets

    def drop(self, peer: int, why: str) -> None:
        """Give up a peer for good, as if a transfer had failed.

        NIXL sends the notification of a transfer when this rank finds it done: signals of those that are
        under way never arrive, and so no later ones do.
        """
        with self._lock:
            self._lose(peer, why)

    def say(self, peer: int, words: bytes) -> None:
        """Send bytes that the peer's `heard` returns. If they cannot be sent, nothing happens."""
        with self._lock:
            if peer not in self.lost and not self._is_closed:
                with self._losing(peer):
                    self._agent.send_notif(self._peers[peer].agent, _HEADER.pack(_WORDS, 0) + words)

    def poll(self) -> bool:
        """Make progress: finish transfers, store received signals. Returns whether there were any."""
        with self._lock:
            if self._is_closed:
                return False
            moved = False
            for peer in self._peers.values():
                if peer.running:
                    with self._losing(peer.rank):
                        moved |= self._finish(peer)
            for agent, messages in self._agent.get_new_notifs().items():
                rank = self._rank_of.get(_text(agent))
                if rank is not None:
                    moved = True
                    self._take(self._peers[rank], messages)
            return moved

    def heard(self) -> list[tuple[int, bytes]]:
        """The (rank, bytes) that peers sent by `say` and `poll` received since the last call."""
        with self._lock:
            heard, self._heard = self._heard, []
            return heard

    def last_heard(self, peer: int) -> float:
        """When this peer was last heard from, by `time.monotonic`; initially, when it was connected."""
        return self._peers[peer].last_heard

    def close(self) -> None:
        """Release all resources. Data that is still in flight may or may not arrive."""
        with self._lock:
            if self._is_closed:
                return
            agent, self._agent = self._agent, None
            for peer in self._peers.values():
                while peer.running:
                    _, transfer = peer.running.popleft()
                    with contextlib.suppress(Exception):
                        agent.release_xfer_handle(transfer)
            for region in self._registered:
                with contextlib.suppress(Exception):
                    agent.deregister_memory(region)
            for peer in self._peers.values():
                with contextlib.suppress(Exception):
                    agent.remove_remote_agent(peer.agent)

    @property
    def _is_closed(self) -> bool:
        return self._agent is None

    def _parts(self, peer: _Peer, pieces: Sequence[Piece]) -> dict[tuple[MemoryKind, MemoryKind], _Copies]:
        """The pieces of a put, checked, by the kinds of memory here and there: at least one part, for signals
        without pieces."""
        parts: dict[tuple[MemoryKind, MemoryKind], _Copies] = {}
        for address, at, num_bytes in join_pieces(pieces):
            own, there = self._find_own(address, num_bytes), _find_there(peer, at, num_bytes)
            part = parts.get((own.kind, there.kind))
            if part is None:
                part = parts[own.kind, there.kind] = _Copies([], [], [])
            part.own.append((address, num_bytes, own.device))
            part.there.append((there.address + (at & OFFSET_MASK), num_bytes, there.device))
            part.places.append(at)
        return parts or {_ON_HOSTS: _Copies([], [], [])}

    def _send(
        self, peer: _Peer, parts: Mapping[tuple[MemoryKind, MemoryKind], _Copies], signals: Sequence[Signal]
    ) -> None:
        """Send one part after the other; the signals come with the last one, and are not stored before all
        parts have arrived."""
        with self._losing(peer.rank):
            for number, (kinds, copies) in enumerate(parts.items(), 1):
                self._send_part(peer, kinds, copies, signals if number == len(parts) else ())

    def _send_part(
        self, peer: _Peer, kinds: tuple[MemoryKind, MemoryKind], copies: _Copies, signals: Sequence[Signal]
    ) -> None:
        """Send copies between one kind of memory here and one there, and signals."""
        peer.num_tickets += 1
        content = _HEADER.pack(_PUT, peer.num_tickets) + _SIGNALS.pack(len(signals))
        content += np.array(signals, np.int64).tobytes()
        total = sum(num_bytes for _, num_bytes, _ in copies.own)
        if kinds == _ON_HOSTS and total <= MOST_INLINE_BYTES:
            for (address, num_bytes, _), at in zip(copies.own, copies.places, strict=True):
                content += _PIECE.pack(at, num_bytes) + ctypes.string_at(address, num_bytes)
            self._agent.send_notif(peer.agent, content)
            self._finish(peer)
        else:
            self._start(peer, kinds, copies, content)
        self.bytes_put[peer.rank] += total
        self.num_puts[peer.rank] += total > 0

    def _start(
        self, peer: _Peer, kinds: tuple[MemoryKind, MemoryKind], copies: _Copies, content: bytes
    ) -> None:
        here = self._agent.get_xfer_descs(copies.own, kinds[0].value)
        there = self._agent.get_xfer_descs(copies.there, kinds[1].value)
        transfer = self._agent.initialize_xfer("WRITE", here, there, peer.agent, content)
        peer.running.append((peer.num_tickets, transfer))
        if self._agent.transfer(transfer) == "ERR":
            raise RuntimeError("the transfer could not be started")

    def _finish(self, peer: _Peer) -> bool:
        """Release finished transfers. Returns whether there were any."""
        num_before = peer.num_done
        while peer.running:
            state = self._agent.check_xfer_state(peer.running[0][1])
            if state == "ERR":
                raise RuntimeError("the transfer failed")
            if state != "DONE":
                break
            ticket, transfer = peer.running.popleft()
            self._agent.release_xfer_handle(transfer)
            peer.num_done = ticket
        if not peer.running:
            peer.num_done = peer.num_tickets
        return peer.num_done > num_before

    def _take(self, peer: _Peer, messages: list[bytes]) -> None:
        peer.last_heard = time.monotonic()
        for message in messages:
            kind, ticket = _HEADER.unpack_from(message)
            content = message[_HEADER.size :]
            if kind == _WORDS:
                self._heard.append((peer.rank, content))
            else:
                peer.early[ticket] = content
        while peer.num_applied + 1 in peer.early:
            peer.num_applied += 1
            self._apply(peer.early.pop(peer.num_applied))

    def _apply(self, content: bytes) -> None:
        """Copy the pieces of a notification into the heap, then store its signals."""
        (num_signals,) = _SIGNALS.unpack_from(content)
        start = _SIGNALS.size + 16 * num_signals
        while start < len(content):
            at, num_bytes = _PIECE.unpack_from(content, start)
            start += _PIECE.size
            region, offset = split_place(at)
            address = self._exposed[region].address + offset
            ctypes.memmove(address, content[start : start + num_bytes], num_bytes)
            start += num_bytes
        if num_signals:
            words = np.frombuffer(content, np.int64, 2 * num_signals, _SIGNALS.size).reshape(-1, 2).T.copy()
            raise_words(self._heap.address, words[0], words[1])

    def _find_own(self, address: int, num_bytes: int) -> _Range:
        """The registered memory that has these bytes."""
        for own in self._own_ranges:
            if own.address <= address and address + num_bytes <= own.address + own.num_bytes:
                return own
        raise InvalidCall(f"{num_bytes} bytes at {address:#x} cannot be sent: register that memory first")

    def _raise_if_lost(self, peer: int) -> None:
        if peer in self.lost:
            raise PeerLost(f"rank {peer} is out of reach ({self.lost[peer]}): its process or host is gone")

    @contextlib.contextmanager
    def _losing(self, peer: int) -> Iterator[None]:
        """An exception of NIXL inside this context means that the peer is lost permanently."""
        try:
            yield
        except Exception as error:
            self._lose(peer, f"{type(error).__name__}: {error}")

    def _lose(self, peer: int, why: str) -> None:
        self.lost.setdefault(peer, why)
        running = self._peers[peer].running
        while running:
            _, transfer = running.popleft()
            with contextlib.suppress(Exception):
                self._agent.release_xfer_handle(transfer)


def join_pieces(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Merge pieces that are adjacent both here and at the peer; leave out empty ones.

    >>> list(join_pieces([(1000, 0, 10), (1010, 10, 20), (1030, 64, 5), (0, 0, 0)]))
    [(1000, 0, 30), (1030, 64, 5)]
    """
    own, offset, size = 0, 0, 0
    for next_own, next_offset, next_size in pieces:
        if size and (next_own, next_offset) == (own + size, offset + size):
            size += next_size
        elif next_size:
            if size:
                yield own, offset, size
            own, offset, size = next_own, next_offset, next_size
    if size:
        yield own, offset, size


def _make_agent(name: str) -> Any:
    # Read once, when the library is loaded. AnyEP reports a failure itself, once and not per transfer.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    _, api = load_nixl(torch.version.cuda)
    try:
        # NIXL's progress thread competes with the ranks for the cores: a tenth of the speed on two cores.
        return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False))
    except Exception as error:
        raise NotSupported(f"NIXL cannot be used here ({error}): {_LOOK}") from error


def _find_there(peer: _Peer, at: int, num_bytes: int) -> _Range:
    """The memory of a peer that has these bytes."""
    region, offset = split_place(at)
    if not 0 <= region < len(peer.regions):
        raise InvalidCall(f"rank {peer.rank} has no memory {region}: it has exposed {len(peer.regions)}")
    found = peer.regions[region]
    if offset + num_bytes > found.num_bytes:
        what = "the heap" if region == 0 else f"memory {region}"
        raise InvalidCall(
            f"{num_bytes} bytes at {offset} are not in {what} of rank {peer.rank},"
            f" which has {found.num_bytes} bytes"
        )
    return found


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
