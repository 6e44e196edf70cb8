"""The control plane of one rank: call numbers, notify messages, waits with deadlines, and failures.

Every normal-mode call takes a number, sends a notify message to every peer, waits for every peer's message,
and only then touches a peer's memory. Two mailboxes alternate: before message n is written, message n-1 of
every peer has been read, so every peer has read message n-2.

A wait ends when its counters arrive, when a peer that it waits for fails or dies, at its deadline,
or by Ctrl-C. All but the first break the control plane permanently. This rank then reports a failure, which
ends the waits of its peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from anyep import ending
from anyep.backends import cpu
from anyep.backends.cpu.heap import Block
from anyep.control.blame import Blame
from anyep.control.liveness import Processes
from anyep.control.notify import word_for_people, words_of
from anyep.control.status import RankStatus, State, StatusBlock
from anyep.core import diagnosis
from anyep.core.calls import Array, Call, Phase, Stall, Topic
from anyep.core.headers import NUM_WORDS, SIGNATURE, Field, signature
from anyep.core.traffic import Traffic
from anyep.errors import AnyEPError, BufferBroken, Disagreement, InvalidCall, Masked
from anyep.join.rendezvous import Rendezvous
from anyep.layout import (
    COUNTER_BYTES,
    NOTIFY_HEADER_BYTES,
    NUM_MAILBOXES,
    RECORD_HEADER_BYTES,
    TEXT_BYTES,
    ControlBlock,
    ControlRegion,
)
from anyep.transport.remote import Transport

T = TypeVar("T")
AGREEING_WORDS: Final = (int(Field.REFUSED), int(SIGNATURE[-1]) + 1)
NOT_TIMED: Final = np.zeros(0, np.int64)
POLL_S: Final = 0.003
PAUSE_S: Final = 0.00005
Counts = tuple[Array, Array, Array]
"""This rank's rows per receiver, the same by (receiver, channel), and its tokens per expert."""
Pieces = Mapping[int, Sequence[tuple[int, int]]]
"""For ranks on other hosts: offsets and bytes of data that has to arrive before their message."""


def _nothing() -> None:
    pass


def _no_pieces() -> Pieces:
    return {}


class ControlPlane(ending.Part):
    """One rank's side; `heaps` are the heaps of all ranks, with an outbox for each rank on another host."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        region: ControlRegion,
        heaps: Sequence[Block],
        pids: Sequence[int],
        timeout_s: float,
        traffic: Traffic,
        num_spins: int,
        transport: Transport | None = None,
        api: str = "Buffer",
    ) -> None:
        """`api` is the class that the user made, as messages name it."""
        self._api = api
        self.transport = transport
        """To the ranks on other hosts, if there are any."""
        self.num_spins = num_spins
        self.traffic = traffic
        self.rank = rendezvous.rank
        self.num_ranks = rendezvous.num_ranks
        self.timeout_s = timeout_s
        self.between_steps: Callable[[Call, Phase], None] | None = None
        """Called at the start of every phase; tests delay or kill a rank there."""
        self.on_failure: Callable[[], None] = _nothing
        """Called after this rank has reported a failure, to stop the kernels of its GPU as well."""
        self.regions: list[int] = [heap.address for heap in heaps]
        """The address of every rank's control region in this process, valid as long as this object lives."""
        self.headers = np.zeros((self.num_ranks, NUM_WORDS), np.int64)
        """The headers of the last notify messages, by rank."""
        self._last_call = 0
        self._last_seen = 0
        self._stopped_by = ""
        """Why the current waits have to end."""
        self._broken: AnyEPError | None = None
        self._addresses = np.array(self.regions, np.int64)
        self._own_heap = heaps[self.rank]
        remote = transport.ranks if transport is not None else ()
        self._statuses = [
            StatusBlock(heap, rank, pid) for rank, (heap, pid) in enumerate(zip(heaps, pids, strict=True))
        ]
        self._own = self._statuses[self.rank]
        self.publish: Callable[[int, int, int], None] = self._own.enter
        """Publish the number, kind and phase of the call that this rank is in; `enter` tells an observer,
        too."""
        for rank in (self.rank, *remote):
            # The status of a rank on another host is kept in its outbox here, and is still empty.
            self._statuses[rank].start()
        blocks = region.blocks
        self.sleepers = self._addresses + blocks.sleepers.start
        self.doorbells = self._addresses + blocks.doorbell.start
        self.wake_ups = self._addresses + blocks.wake_up.start
        self.own_wake_up = int(self.wake_ups[self.rank])
        self._mailbox, self._record = blocks.mailbox, blocks.record
        self._mailboxes_of_peers = [self.peer_counters(blocks.mailbox, box) for box in range(NUM_MAILBOXES)]
        self._own_mailboxes = [self.own_counters(blocks.mailbox, box) for box in range(NUM_MAILBOXES)]
        self.pids_of_peers = {
            rank: pid for rank, pid in enumerate(pids) if rank != self.rank and rank not in remote
        }
        self._missing = np.ones(self.num_ranks, np.bool_)
        self._no_counts = (np.zeros(self.num_ranks, np.int32), np.zeros((self.num_ranks, 1), np.int32))
        self._processes = Processes(self.pids_of_peers)
        self.blame = Blame(self.rank, timeout_s, self._statuses, self._processes, transport, api)
        ending.register(self)

    # Counters

    def peer_counters(self, block: ControlBlock, slot_set: int = 0) -> Array:
        """The words of a block that this rank writes at each rank."""
        counters: Array = self._addresses + block.offset(self.rank, slot_set)
        return counters

    def counters_at(self, ranks: Sequence[int], block: ControlBlock, writer: int) -> Array:
        """The words of a block that its peer number `writer` writes at each of these ranks."""
        counters: Array = self._addresses[list(ranks)] + block.offset(writer)
        return counters

    def own_counters(self, block: ControlBlock, slot_set: int = 0) -> Array:
        """The words of a block that each of its peers writes here."""
        offsets = np.array([block.offset(peer, slot_set) for peer in range(block.num_peers)], np.int64)
        counters: Array = self._addresses[self.rank] + offsets
        return counters

    # Calls

    def check_works(self) -> None:
        """Refuse to go on after a failure."""
        if self._broken is not None:
            raise diagnosis.broken(self._broken, self._api) from self._broken

    @property
    def works_unobserved(self) -> bool:
        """Whether calls work, and nobody follows their phases."""
        return self._broken is None and self.between_steps is None

    @property
    def first_error(self) -> AnyEPError | None:
        """The error that broke the Buffer, or None."""
        return self._broken

    def stop(self, why: str = "") -> None:
        """End the waits of running calls; these calls fail."""
        self._stopped_by = self._stopped_by or why or f"the {self._api} was destroyed"

    def begin(self, kind: int) -> Call:
        """Take the next call number."""
        self.check_works()
        return Call(self.next_number(), kind)

    def next_number(self) -> int:
        """The number of a call, while calls work."""
        self._last_call += 1
        return self._last_call

    def enter(self, call: Call, phase: Phase) -> None:
        """Publish what this rank is doing now."""
        self._own.enter(call.number, call.kind, phase)
        if self.between_steps is not None:
            self.between_steps(call, phase)

    def end(self, call: Call) -> None:
        self._own.enter(call.number, call.kind, Phase.IDLE)

    def guarded(self, call: Call, work: Callable[[], T]) -> T:
        """Do a part of a call that touches peers; an unexpected error breaks the control plane for good."""
        self.check_works()
        try:
            return work()
        except BaseException as error:
            self.ended_by(call, error)
            raise

    def ended_by(self, call: Call, error: BaseException) -> None:
        """An error has ended a part of a call that touches peers; it is raised afterwards."""
        if isinstance(error, Disagreement | InvalidCall | Masked):
            # Later calls still work: all ranks raise these before any data moves, or this rank can rejoin.
            self.end(call)
        else:
            self.fail(call, error)

    def fail(self, call: Call, error: BaseException) -> None:
        """Report that this rank failed, so that no peer waits for it."""
        reason = str(error) if isinstance(error, AnyEPError) else f"{type(error).__name__}: {error}"
        if self._broken is None:
            self._broken = error if isinstance(error, AnyEPError) else AnyEPError(f"{call} ended by {reason}")
        self._go(State.FAILED, f"{call}: {reason}")
        self.on_failure()

    def leave(self, error: BaseException) -> None:
        """Report that an exception ends the `with` block of this rank; peers that wait for it raise."""
        reason = ending.describe(error)
        self._go(State.LEFT, reason)
        self.stop(f"the `with {self._api}(...)` block was left by {reason}")

    def _go(self, how: State, reason: str = "") -> None:
        self._own.go(how, reason)
        if self.transport is not None:
            self.transport.say_status()

    # Notify messages

    def refuse(self, call: Call, error: AnyEPError) -> None:
        """Send a message that refuses this rank's call; the peers raise instead of waiting."""
        header = signature()
        header[Field.KIND] = call.kind
        header[Field.REFUSED] = 1
        self.guarded(call, lambda: self._post(call, header, None, refusal=str(error)))
        self.end(call)

    def exchange(
        self,
        call: Call,
        header: Array,
        counts: Counts | None = None,
        annex: Callable[[], Pieces] = _no_pieces,
    ) -> Array:
        """Send this rank's message, wait for those of all others, and return their headers if they agree.

        `annex` writes further data for the peers before the message is sent, and returns where it lies.
        """
        header[Field.KIND] = call.kind
        self._post(call, header, counts, annex=annex)
        box = call.number % NUM_MAILBOXES
        mailboxes = self._own_mailboxes[box]
        self._wait_for_counters(call, mailboxes, call.number, Topic.NOTIFY + box, "notify message")
        self._last_seen = call.number
        if not cpu.read_headers(mailboxes, header, *AGREEING_WORDS, self.headers):
            raise self.disagreement(call, self.headers, box, words_of(call.kind), word_for_people)
        return self.headers

    def read_counts(self, call: Call, matrix: Array, by_channel: Array, by_expert: Array) -> None:
        """Read the counts of the messages that `exchange` waited for."""
        mailboxes = self._own_mailboxes[call.number % NUM_MAILBOXES]
        cpu.read_counts(mailboxes, NOTIFY_HEADER_BYTES, matrix, by_channel, by_expert)

    def _post(
        self,
        call: Call,
        header: Array,
        counts: Counts | None,
        refusal: str = "",
        annex: Callable[[], Pieces] = _no_pieces,
    ) -> None:
        self.enter(call, Phase.NOTIFY)
        previous = call.number - 1
        if previous > self._last_seen:
            # This rank refused that call, so it did not wait for the messages of the others.
            box = previous % NUM_MAILBOXES
            mailboxes = self._own_mailboxes[box]
            self._wait_for_counters(call, mailboxes, previous, Topic.NOTIFY + box, "notify message")
        box = call.number % NUM_MAILBOXES
        if refusal:
            self.publish_refusal(box, refusal)
        pieces = annex()
        header[Field.CALL] = call.number
        rows, by_channel, by_expert = counts or (*self._no_counts, self._no_counts[0])
        cpu.post_notify(
            self._mailboxes_of_peers[box],
            self.wake_ups,
            Topic.NOTIFY + box,
            header,
            NOTIFY_HEADER_BYTES,
            int(counts is not None),
            rows,
            by_channel,
            by_expert,
        )
        num_counts = len(rows) + by_channel.shape[1] + len(by_expert) // self.num_ranks
        num_count_bytes = 4 * num_counts if counts is not None else 0
        # The call number closes the message: it is a counter.
        num_bytes = NOTIFY_HEADER_BYTES - COUNTER_BYTES + num_count_bytes
        self.traffic.normal.add_message_to_all(num_bytes)
        if self.transport is not None:
            self._send_messages(self.transport, call, pieces, num_count_bytes, refusal)

    def _send_messages(
        self, transport: Transport, call: Call, pieces: Pieces, num_count_bytes: int, refusal: str
    ) -> None:
        """Put the messages for ranks on other hosts into their memory; the call number comes last.

        A refusal has no counts: its reason takes their place.
        """
        start = self._mailbox.offset(self.rank, call.number % NUM_MAILBOXES)
        for rank in transport.ranks:
            num_bytes = NOTIFY_HEADER_BYTES + num_count_bytes
            if refusal:
                text = np.frombuffer(refusal.encode(errors="replace")[:TEXT_BYTES], np.uint8)
                transport.outbox(rank, start + NOTIFY_HEADER_BYTES, TEXT_BYTES)[:] = 0
                transport.outbox(rank, start + NOTIFY_HEADER_BYTES, len(text))[:] = text
                num_bytes += TEXT_BYTES
            message = (start + COUNTER_BYTES, num_bytes - COUNTER_BYTES)
            transport.send(rank, [*pieces.get(rank, ()), message], [(start, call.number)])

    # Refusals and disagreements

    def publish_refusal(self, text: int, reason: str) -> None:
        """Write why this rank refuses a call, before a message or record that refers to it."""
        self._own.refuse(text, reason)

    def _refusal(self, rank: int, text: int) -> str:
        """Why a rank refused a call."""
        if self.transport is None or rank not in self.transport.ranks:
            return self._statuses[rank].refusal(text)
        if text < NUM_MAILBOXES:
            start = self._mailbox.offset(rank, text) + NOTIFY_HEADER_BYTES
        else:
            start = self._record.offset(rank, text - NUM_MAILBOXES) + RECORD_HEADER_BYTES
        reason: bytes = self._own_heap.array(start, TEXT_BYTES, np.uint8).tobytes()
        return reason.rstrip(b"\0").decode(errors="replace")

    def disagreement(
        self,
        call: Call,
        headers: Array,
        text: int,
        signature_words: Mapping[Any, str],
        for_people: Callable[[int, Any], str],
    ) -> Disagreement:
        """What headers disagree about; `text` is where a rank that refused its call has written why."""
        return diagnosis.disagreement(
            self.rank, call, headers, lambda rank: self._refusal(rank, text), signature_words, for_people
        )

    # Waits

    def signal(self, counters: Array, topic: int, value: int, wake_ups: Array | None = None) -> None:
        """Release a value in these counters, one at each rank, or at each rank of these wake-up counts."""
        cpu.signal(counters, self.wake_ups if wake_ups is None else wake_ups, topic, value)

    def wait_for_counters(
        self,
        call: Call,
        phase: Phase,
        counters: Array,
        topic: int,
        what: str,
        ranks: Sequence[int] | None = None,
        expected: int | None = None,
    ) -> None:
        """Return when every peer, or each of these ranks, has released this call's number (or `expected`)."""
        self.enter(call, phase)
        expected = call.number if expected is None else expected
        self._wait_for_counters(call, counters, expected, topic, what, ranks)

    def _wait_for_counters(
        self,
        call: Call,
        counters: Array,
        expected: int,
        topic: int,
        what: str,
        ranks: Sequence[int] | None = None,
    ) -> None:
        missing = self._missing[: len(counters)]
        missing[:] = True

        def step(num_spins: int) -> int:
            return self.await_counters(counters, expected, missing, num_spins, topic)

        if step(self.num_spins):
            self.wait_until(call, step, lambda: self.stall(counters, missing, what, expected, ranks))

    def await_counters(
        self,
        counters: Array,
        expected: int,
        missing: Array,
        num_spins: int,
        topic: int,
        waited: Array = NOT_TIMED,
        started: int = 0,
    ) -> int:
        """Wait a few milliseconds for the missing counters. Returns how many are still missing."""

        def look(num_spins: int, max_polls: int) -> int:
            num_missing: int = cpu.await_counters(
                counters, expected, missing, num_spins, max_polls, self.own_wake_up, topic, waited, started
            )
            return num_missing

        if self.transport is None:
            return look(num_spins, cpu.MAX_POLLS)
        return self.poll_until_done(lambda: (look(0, 1), False))

    def poll_until_done(self, look: Callable[[], tuple[int, bool]]) -> int:
        """Call `look` and poll the transport for a few milliseconds at most. Returns how many are missing.

        `look` returns how many are missing, and whether there is more to do at once.
        """
        assert self.transport is not None
        until = time.monotonic() + POLL_S
        while True:
            moved = self.transport.poll()
            num_missing, is_busy = look()
            if num_missing == 0 or time.monotonic() > until:
                return num_missing
            if not moved and not is_busy and self.num_spins == 0:
                # Ranks share cores: the awaited rank may need this core.
                time.sleep(PAUSE_S)

    def stall(
        self, counters: Array, missing: Array, what: str, expected: int, ranks: Sequence[int] | None = None
    ) -> Stall:
        """What a wait for counters is still missing; `missing` marks the peers, or positions in `ranks`."""
        peers = [int(peer) for peer in np.flatnonzero(missing)]
        seen = np.zeros((1, 1), np.int64)
        cpu.read_counters(counters[peers[:1]].reshape(1, 1), seen)
        return Stall(
            peers if ranks is None else [ranks[peer] for peer in peers], what, int(seen[0, 0]), expected
        )

    def wait_until(
        self,
        call: Call,
        step: Callable[[int], int],
        stalled: Callable[[], Stall],
        progress: Callable[[], int] = lambda: 0,
        give_up: Callable[[Sequence[int], AnyEPError], None] | None = None,
    ) -> None:
        """Run a kernel's step until nothing is missing; its argument is how often it polls before it sleeps.

        A step takes a few milliseconds at most. Between two steps Python runs (Ctrl-C works), and the peers
        that are waited for are checked. The deadline counts from the last progress. The error that ends the
        wait is raised; or `give_up` takes it, with the peers to blame, and the wait goes on without them.
        """
        if step(self.num_spins) == 0:
            return
        deadline = time.monotonic() + self.timeout_s
        done = progress()
        suspects: set[int] = set()
        periods = 0
        is_due = False
        while step(0):
            if self._stopped_by:
                raise BufferBroken(f"{self._stopped_by} while {call} was under way")
            stall = stalled()
            self._own.wait_for(self.blame.cause(stall).peers[0])
            awaited = {peer for part in stall.parts for peer in part.peers}
            gone = self.blame.gone() & awaited
            # Data that a peer sent before it ended may have arrived since the step: look once more.
            for peer in sorted(gone & suspects):
                lost = self.blame.lost(call, peer, stall, self._phase())
                if give_up is None:
                    raise lost
                give_up([peer], lost)
            suspects = gone
            if progress() != done:
                done = progress()
                deadline = time.monotonic() + self.timeout_s
                is_due = False
            elif time.monotonic() > deadline and not gone:
                # If this process was not scheduled for a while, the step may have looked long before the
                # deadline: a peer is blamed only after a step that began after the deadline.
                if not is_due:
                    is_due = True
                    continue
                is_due = False
                if give_up is None:
                    raise self.blame.too_late(call, stall, self._phase())
                # A peer that waits for a third rank may be released when its own wait ends: try once more.
                periods += 1
                to_blame = [peer for peer in stall.peers if periods > 1 or not self._may_still_come(peer)]
                if to_blame:
                    late = self.blame.too_late(call, stall._replace(peers=to_blame), self._phase())
                    give_up(to_blame, late)
                deadline = time.monotonic() + self.timeout_s

    def _may_still_come(self, peer: int) -> bool:
        """Whether a peer waits for a third rank. Between hosts, where not all wait for the same ranks, it may
        also have done so until a moment ago."""
        status = self._statuses[peer].read(True)
        if status.waits_for not in (None, self.rank):
            return True
        return self.transport is not None and status.seconds_in_phase < self.timeout_s / 2

    def _phase(self) -> str:
        return self._own.read(True).phase

    # The end

    def status(self) -> list[RankStatus]:
        """The status of every rank, without waiting for any."""
        dead = self._processes.dead()
        unreachable = self.transport.lost() if self.transport is not None else set()
        return [
            status.read(status.rank not in dead, status.rank not in unreachable) for status in self._statuses
        ]

    def stop_at_end(self, last_error: str) -> None:
        self._go(State.ENDED, last_error)
        self.stop("the process ended")
        self._broken = self._broken or BufferBroken("the process ends")

    def close(self) -> None:
        self._own.go(State.DESTROYED)
        if self.transport is not None:
            self.transport.close()
        self._broken = BufferBroken("it was destroyed")
        self.on_failure = _nothing
        self._processes.close()
