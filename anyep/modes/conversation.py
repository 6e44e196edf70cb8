"""How the ranks of a node talk: call numbers, letters, waits that end, and what happens when something fails.

A `Conversation` is one rank's side. Every normal-mode call takes a number, sends a letter to every peer,
waits for every peer's letter, and only then touches a peer's memory. Two mailboxes alternate: before letter n
is written, every peer's letter n-1 has been seen, so every peer has read letter n-2.

Every wait ends: when what is waited for comes, when a peer that is waited for says that it failed, when such
a peer is dead, at the deadline, or by Ctrl-C. All but the first break the conversation for good, here and,
since this rank then says that it failed, at every peer.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from anyep import ending
from anyep.errors import AnyEPError, BufferBroken, Disagreement, InvalidCall, Masked, PeerLost, WaitTimeout
from anyep.headers import Field
from anyep.layout import (
    COUNTER_BYTES,
    LETTER_HEADER_BYTES,
    NOTE_HEADER_BYTES,
    NUM_MAILBOXES,
    ControlRegion,
)
from anyep.modes.letters import (
    DERIVED_FIELDS,
    NUM_WORDS,
    SIGNATURE,
    SIGNATURE_WORDS,
    signature,
    word_for_people,
)
from anyep.modes.status import (
    FUNCTIONS,
    TEXT_BYTES,
    Phase,
    RankStatus,
    State,
    StatusBlock,
    name_of_call,
)
from anyep.modes.wire import SILENT_AFTER_S, Wire
from anyep.rendezvous import Rendezvous

T = TypeVar("T")
Array = np.ndarray[Any, Any]
AGREEING_WORDS = (int(Field.REFUSED), int(SIGNATURE[-1]) + 1)
NOT_TIMED = np.zeros(0, np.int64)
POLL_S = 0.003
PAUSE_S = 0.00005


Pieces = Mapping[int, Sequence[tuple[int, int]]]
"""For ranks on other hosts: offsets and bytes of what else is to be brought there."""


def _nothing() -> None:
    """Nobody else needs to hear."""


def _no_pieces() -> Pieces:
    return {}


class Topic:
    """What counters tell: who sleeps until they come says which of these he waits for.

    A topic with two sets has two numbers. Plain numbers: kernels take an IntEnum in twenty times the time.
    """

    ROWS: Final = 1
    PULLED: Final = 2
    MASK: Final = 3
    LETTER: Final = 4
    NOTE: Final = 6
    PACKED: Final = 8
    OFFER: Final = 10


class Call(NamedTuple):
    """A call of this rank: its number, and what was called (a `letters.Kind`)."""

    number: int
    kind: int

    def __str__(self) -> str:
        return f"{FUNCTIONS[self.kind]} ({name_of_call(self.number)})"


class Stall(NamedTuple):
    """What a wait still waits for."""

    peers: Sequence[int]
    what: str
    seen: int
    expected: int
    channel: int | None = None
    also: Sequence[Stall] = ()
    """What else it waits for at the same time, from other peers."""

    @property
    def parts(self) -> list[Stall]:
        return [self, *self.also]


class Conversation(ending.Part):
    """One rank's side of the talk with its peers; `heaps` are all ranks' heaps, this rank's own included."""

    def __init__(
        self,
        backend: Any,
        rendezvous: Rendezvous,
        control: ControlRegion,
        heaps: Sequence[Any],
        pids: Sequence[int],
        timeout_s: float,
        num_spins: int,
        wire: Wire | None = None,
    ) -> None:
        self.wire = wire
        """To ranks that are on other hosts; their heaps are outboxes then."""
        self.num_spins = num_spins
        self.rank = rendezvous.rank
        self.num_ranks = rendezvous.num_ranks
        self.timeout_s = timeout_s
        self.between_steps: Callable[[Call, Phase], None] | None = None
        """Called at the start of every phase; tests delay or kill a rank there."""
        self._backend = backend
        self._last_call = 0
        self._stopped_by = ""
        """Why waits end that are still under way."""
        self._last_seen = 0
        self._broken: AnyEPError | None = None
        self.on_failure: Callable[[], None] = _nothing
        """Called when this rank has failed and said so: kernels on a GPU hear of it, too."""
        self.regions: list[int] = [heap.address for heap in heaps]
        """Where every rank's control region lies in this process, as long as this object lives."""
        self._addresses = np.array(self.regions, np.int64)
        self._statuses = [
            StatusBlock(backend, heap, rank, pid)
            for rank, (heap, pid) in enumerate(zip(heaps, pids, strict=True))
        ]
        self._own = self._statuses[self.rank]
        for rank in (self.rank, *(wire.ranks if wire is not None else ())):
            # What a rank on another host says of itself is kept here; it has said nothing yet.
            self._statuses[rank].start()
        self._own_heap = heaps[self.rank]
        self.sleepers = self._at_peers(control.block("sleepers").start)
        self.doorbells = self._at_peers(control.block("doorbell").start)
        self.alarms = self._at_peers(control.block("alarm").start)
        self.own_alarm = int(self.alarms[self.rank])
        mailbox = control.block("mailbox")
        self._mailbox, self._note = mailbox, control.block("low-latency note")
        self._mailboxes_of_peers = [self.peer_counters(mailbox, box) for box in range(2)]
        self._own_mailboxes = [self.own_counters(mailbox, box) for box in range(2)]
        not_here = {self.rank, *(wire.ranks if wire is not None else ())}
        self.pids_of_peers = {rank: pid for rank, pid in enumerate(pids) if rank not in not_here}
        self._missing = np.ones(self.num_ranks, np.bool_)
        self._no_counts = (np.zeros(self.num_ranks, np.int32), np.zeros((self.num_ranks, 1), np.int32))
        self.headers = np.zeros((self.num_ranks, NUM_WORDS), np.int64)
        self._pidfds: dict[int, int] = {}
        self._dead: set[int] = set()
        for rank, pid in self.pids_of_peers.items():
            try:
                self._pidfds[os.pidfd_open(pid)] = rank
            except ProcessLookupError:
                # It has come and gone since the ranks met.
                self._dead.add(rank)
        self._poller = select.poll()
        for descriptor in self._pidfds:
            self._poller.register(descriptor, select.POLLIN)
        ending.register(self)

    def _at_peers(self, offset: int) -> Array:
        """The address of this offset in every rank's heap."""
        return self._addresses + offset

    def peer_counters(self, block: Any, slot_set: int = 0) -> Array:
        """The words of a control block that this rank writes at each peer."""
        return self._at_peers(block.offset(self.rank, slot_set))

    def counters_at(self, ranks: Sequence[int], block: Any, writer: int) -> Array:
        """The words of a control block that its peer number `writer` writes at each of these ranks."""
        counters: Array = self._addresses[list(ranks)] + block.offset(writer)
        return counters

    def counters_of(self, block: Any) -> Array:
        """The words of a control block that each of its peers writes here."""
        offsets = np.array([block.offset(peer) for peer in range(block.num_peers)], np.int64)
        counters: Array = self._addresses[self.rank] + offsets
        return counters

    def own_counters(self, block: Any, slot_set: int = 0) -> Array:
        """The words of a control block that each peer writes here."""
        offsets = np.array([block.offset(peer, slot_set) for peer in range(self.num_ranks)], np.int64)
        counters: Array = self._addresses[self.rank] + offsets
        return counters

    # Calls

    def check_works(self) -> None:
        """Refuse to go on after a failure."""
        if self._broken is not None:
            raise BufferBroken(
                f"this Buffer is broken since an earlier call: {self._broken}"
            ) from self._broken

    @property
    def first_error(self) -> AnyEPError | None:
        """What broke the Buffer, if something did."""
        return self._broken

    def stop(self, why: str = "the Buffer was destroyed") -> None:
        """End the waits of calls that are still under way; they fail."""
        self._stopped_by = self._stopped_by or why

    def begin(self, kind: int) -> Call:
        """Take the next call number."""
        self.check_works()
        self._last_call += 1
        return Call(self._last_call, kind)

    def enter(self, call: Call, phase: Phase) -> None:
        """Say what this rank does now."""
        self._own.enter(call.number, call.kind, phase)
        if self.between_steps is not None and phase is not Phase.IDLE:
            self.between_steps(call, phase)

    def end(self, call: Call) -> None:
        self.enter(call, Phase.IDLE)

    def guarded(self, call: Call, work: Callable[[], T]) -> T:
        """Do a part of a call that touches peers: whatever it raises breaks the conversation for good."""
        self.check_works()
        try:
            return work()
        except (Disagreement, InvalidCall, Masked):
            # Every rank found it in the letters, before any data, or can be taken back: calls can go on.
            self.end(call)
            raise
        except BaseException as error:
            self.fail(call, error)
            raise

    def fail(self, call: Call, error: BaseException) -> None:
        """Say that this rank failed, so that nobody waits for it."""
        reason = str(error) if isinstance(error, AnyEPError) else f"{type(error).__name__}: {error}"
        if self._broken is None:
            self._broken = error if isinstance(error, AnyEPError) else AnyEPError(f"{call} ended by {reason}")
        self._go(State.FAILED, f"{call}: {reason}")
        self.on_failure()

    def leave(self, error: BaseException) -> None:
        """Say that an exception takes this rank out of its `with` block: who waits for it raises that."""
        reason = ending.describe(error)
        self._go(State.LEFT, reason)
        self.stop(f"the `with Buffer(...)` block was left by {reason}")

    def _go(self, how: State, reason: str = "") -> None:
        self._own.go(how, reason)
        if self.wire is not None:
            self.wire.say_status()

    # Letters

    def refuse(self, call: Call, error: AnyEPError) -> None:
        """Tell the peers that this rank's call was wrong; they raise instead of waiting."""
        header = signature()
        header[Field.KIND] = call.kind
        header[Field.REFUSED] = 1
        self.guarded(call, lambda: self._post(call, header, None, refusal=str(error)))
        self.end(call)

    def exchange(
        self,
        call: Call,
        header: Array,
        counts: tuple[Array, Array, Array] | None = None,
        annex: Callable[[], Pieces] = _no_pieces,
    ) -> Array:
        """Send this rank's letter, wait for all others', and return their headers if they agree.

        `counts` are this rank's rows per receiver, those by (receiver, channel), and its tokens per expert.
        `annex` writes what else peers are to find when the letter is there, and says where: for each rank
        offsets and bytes.
        """
        header[Field.KIND] = call.kind
        self._post(call, header, counts, annex=annex)
        mailboxes = self._own_mailboxes[call.number % 2]
        self._wait_for_counters(call, mailboxes, call.number, Topic.LETTER + call.number % 2, "letter")
        self._last_seen = call.number
        if not self._backend.read_headers(mailboxes, header, *AGREEING_WORDS, self.headers):
            raise self._disagreement(call)
        return self.headers

    def read_counts(self, call: Call, matrix: Array, by_channel: Array, by_expert: Array) -> None:
        """The counts of the letters that `exchange` waited for."""
        mailboxes = self._own_mailboxes[call.number % 2]
        self._backend.read_counts(mailboxes, LETTER_HEADER_BYTES, matrix, by_channel, by_expert)

    def _post(
        self,
        call: Call,
        header: Array,
        counts: tuple[Array, Array, Array] | None,
        refusal: str = "",
        annex: Callable[[], Pieces] = _no_pieces,
    ) -> None:
        self.enter(call, Phase.NOTIFY)
        previous = call.number - 1
        if previous > self._last_seen:
            # This rank refused that call, and did not wait for the others then.
            mailboxes = self._own_mailboxes[previous % 2]
            self._wait_for_counters(call, mailboxes, previous, Topic.LETTER + previous % 2, "letter")
        if refusal:
            self.say_refusal(call.number % 2, refusal)
        pieces = annex()
        header[Field.CALL] = call.number
        rows, by_channel, by_expert = counts or (*self._no_counts, self._no_counts[0])
        self._backend.post_letters(
            self._mailboxes_of_peers[call.number % 2],
            self.alarms,
            Topic.LETTER + call.number % 2,
            header,
            LETTER_HEADER_BYTES,
            int(counts is not None),
            rows,
            by_channel,
            by_expert,
        )
        if self.wire is not None:
            num_counts = len(rows) + by_channel.shape[1] + len(by_expert) // self.num_ranks
            self._send_letters(call, pieces, 4 * num_counts if counts is not None else 0, refusal)

    def _send_letters(self, call: Call, pieces: Pieces, num_count_bytes: int, refusal: str) -> None:
        """Bring the letters for ranks on other hosts there; the call's number comes last.

        A refusal has no counts: its reason stands in their place.
        """
        assert self.wire is not None
        start = self._mailbox.offset(self.rank, call.number % 2)
        for rank in self.wire.ranks:
            num_bytes = LETTER_HEADER_BYTES + num_count_bytes
            if refusal:
                text = np.frombuffer(refusal.encode(errors="replace")[:TEXT_BYTES], np.uint8)
                self.wire.outbox(rank, start + LETTER_HEADER_BYTES, TEXT_BYTES)[:] = 0
                self.wire.outbox(rank, start + LETTER_HEADER_BYTES, len(text))[:] = text
                num_bytes += TEXT_BYTES
            letter = (start + COUNTER_BYTES, num_bytes - COUNTER_BYTES)
            self.wire.send(rank, [*pieces.get(rank, ()), letter], [(start, call.number)])

    def _refusal(self, rank: int, text: int) -> str:
        """Why a rank refused a call, as its letter says it did."""
        if self.wire is None or rank not in self.wire.ranks:
            return self._statuses[rank].refusal(text)
        if text < NUM_MAILBOXES:
            start = self._mailbox.offset(rank, text) + LETTER_HEADER_BYTES
        else:
            start = self._note.offset(rank, text - NUM_MAILBOXES) + NOTE_HEADER_BYTES
        reason: bytes = self._own_heap.array(start, TEXT_BYTES, np.uint8).tobytes()
        return reason.rstrip(b"\0").decode(errors="replace")

    def _disagreement(self, call: Call) -> Disagreement:
        """What the letters disagree about; every rank finds the same."""
        return self.disagreement(call, self.headers, call.number % 2, SIGNATURE_WORDS, word_for_people)

    # Refusals and disagreements

    def say_refusal(self, text: int, reason: str) -> None:
        """Write down why this rank refuses a call; a letter or a note then tells peers to look."""
        self._own.refuse(text, reason)

    def disagreement(
        self,
        call: Call,
        headers: Array,
        text: int,
        signature_words: Mapping[Any, str],
        for_people: Callable[[int, Any], str],
    ) -> Disagreement:
        """What the headers of letters or notes, which begin alike, disagree about; every rank finds the same.

        `signature_words` names the fields, the most telling one first; `for_people` says what a header has
        there. Ranks without a header have a call number of 0 there.
        """
        ranks = np.flatnonzero(headers[:, Field.CALL])
        refusing = [int(rank) for rank in ranks if headers[rank, Field.REFUSED]]
        if refusing:
            reason = self._refusal(refusing[0], text)
            function = FUNCTIONS[int(headers[refusing[0], Field.KIND])]
            return Disagreement(
                f"rank {refusing[0]} refused its {function} ({name_of_call(call.number)}),"
                f" so rank {self.rank} cannot go on with its {FUNCTIONS[call.kind]}: {reason}"
            )
        different: dict[int, str] = {}
        for field, name in signature_words.items():
            ranks_by_value: dict[str, list[int]] = {}
            for rank in ranks:
                ranks_by_value.setdefault(for_people(field, headers[rank]), []).append(int(rank))
            if len(ranks_by_value) > 1:
                listing = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items())
                different[int(field)] = f"about {name}: {listing}"
        if not different:
            raise AssertionError("headers that differ agree in every field")
        if Field.KIND in different:
            # Other functions have other fields: only this one can be compared.
            causes = [different[Field.KIND]]
        else:
            causes = [text for field, text in different.items() if field not in DERIVED_FIELDS]
        listing = ", and ".join(causes or different.values())
        return Disagreement(f"the ranks disagree in {name_of_call(call.number)} {listing}")

    # Waiting

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
        """Return when every peer, or each of these ranks, has released this call's number, or what else is
        expected, in its counter."""
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
        """Wait a few milliseconds for the counters that are missing; how many still are."""

        def look(num_spins: int, patience: int) -> int:
            num_missing: int = self._backend.await_counters(
                counters, expected, missing, num_spins, patience, self.own_alarm, topic, waited, started
            )
            return num_missing

        if self.wire is None:
            return look(num_spins, self._backend.PATIENCE)
        return self.poll_until_done(lambda: (look(0, 1), False))

    def poll_until_done(self, look: Callable[[], tuple[int, bool]]) -> int:
        """Look, and poll the wire, for a few milliseconds at most; how many are still missing.

        A look tells how many are missing, and whether there is more to do at once.
        """
        assert self.wire is not None
        until = time.monotonic() + POLL_S
        while True:
            moved = self.wire.poll()
            num_missing, is_busy = look()
            if num_missing == 0 or time.monotonic() > until:
                return num_missing
            if not moved and not is_busy and self.num_spins == 0:
                # Whoever is waited for needs this core.
                time.sleep(PAUSE_S)

    def announce(self, counters: Array, topic: int, value: int, alarms: Array | None = None) -> None:
        """Release a value in these counters, one at each peer, or at each of those with these alarms."""
        self._backend.announce(counters, self.alarms if alarms is None else alarms, topic, value)

    def stall(
        self, counters: Array, missing: Array, what: str, expected: int, ranks: Sequence[int] | None = None
    ) -> Stall:
        """What a wait for counters still waits for: `missing` marks the peers, or the ones of these ranks."""
        peers = [int(peer) for peer in np.flatnonzero(missing)]
        seen = np.zeros((1, 1), np.int64)
        self._backend.read_counters(counters[peers[:1]].reshape(1, 1), seen)
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
        """Run a kernel's step until nothing is missing; it is told how often to look before it sleeps.

        A step waits a few milliseconds at most; between two of them Python runs (Ctrl-C works) and the peers
        that are waited for are looked at. The deadline counts from the last progress. What ends the wait is
        raised; or `give_up` takes it, with the peers to blame, and the wait goes on without them.
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
            self._own.wait_for(self._cause(stall).peers[0])
            gone = self.gone().intersection(peer for part in stall.parts for peer in part.peers)
            # What a peer sent before it ended may have arrived since the step: look once more.
            if gone & suspects:
                for peer in sorted(gone & suspects):
                    lost = self.lost(call, peer, stall, self._phase())
                    if give_up is None:
                        raise lost
                    give_up([peer], lost)
            suspects = gone
            if progress() != done:
                done = progress()
                deadline = time.monotonic() + self.timeout_s
                is_due = False
            elif time.monotonic() > deadline and not gone:
                # If this process did not run for a while, the step may have looked long before the deadline:
                # nobody is blamed before a step that began after it.
                if not is_due:
                    is_due = True
                    continue
                is_due = False
                if give_up is None:
                    raise self.too_late(call, stall, self._phase())
                # Whoever waits for another rank himself may be the one that this wait ends for: once more.
                periods += 1
                to_blame = [peer for peer in stall.peers if periods > 1 or not self._waits(peer)]
                if to_blame:
                    give_up(to_blame, self.too_late(call, stall._replace(peers=to_blame), self._phase()))
                deadline = time.monotonic() + self.timeout_s

    def _waits(self, peer: int) -> bool:
        """Whether a peer says that it waits for a third rank."""
        return self.whom_it_waits_for(peer) not in (None, self.rank)

    def whom_it_waits_for(self, peer: int) -> int | None:
        """The rank that a peer says it waits for; None if it does not wait."""
        return self._statuses[peer].read(True).waits_for

    def _cause(self, stall: Stall) -> Stall:
        """The part of a wait to look at: for a peer that waits for nobody, or at least not for this rank."""
        if not stall.also:
            return stall
        waits = [self.whom_it_waits_for(part.peers[0]) for part in stall.parts]
        ranking = [0 if peer is None else 2 if peer == self.rank else 1 for peer in waits]
        return stall.parts[ranking.index(min(ranking))]

    def gone(self) -> set[int]:
        """Peers that will send nothing more."""
        ended = {status.rank for status in self._statuses if status.state is not State.ALIVE}
        unreachable = self.wire.lost() if self.wire is not None else set()
        return ended | unreachable | self._find_dead()

    def _find_dead(self) -> set[int]:
        """Peers whose processes have ended."""
        self._dead |= {self._pidfds[descriptor] for descriptor, _ in self._poller.poll(0)}
        return self._dead

    def lost(self, call: Call, peer: int, stall: Stall, phase: str) -> PeerLost:
        """What to raise when a peer that is waited for will not come."""
        status = self._statuses[peer]
        stall = next((part for part in stall.parts if peer in part.peers), stall)
        whose = "its" if peer in stall.peers else f"rank {stall.peers[0]}'s"
        waiting = f"while rank {self.rank} waited for {whose} {stall.what} in {call}, phase {phase}"
        if status.state is State.FAILED:
            return PeerLost(f"rank {peer} (pid {status.pid}) failed {waiting}: {status.failure}")
        if status.state is State.DESTROYED:
            return PeerLost(f"rank {peer} (pid {status.pid}) destroyed its Buffer {waiting}")
        if status.state is State.LEFT:
            return PeerLost(
                f"rank {peer} (pid {status.pid}) left its `with Buffer(...)` block by {status.failure},"
                f" {waiting}"
            )
        if status.state is State.ENDED:
            why = f"; its last uncaught exception: {status.failure}" if status.failure else ""
            return PeerLost(
                f"rank {peer} (pid {status.pid}) is gone: its process ended without destroy(), {waiting}{why}"
            )
        if self.wire is not None and peer in self.wire.lost():
            return PeerLost(
                f"rank {peer} is out of reach: its process or host was lost {waiting};"
                f" its last word: {status.read(True)}"
            )
        if peer in self._find_dead():
            last = status.read(True)
            return PeerLost(f"rank {peer} (pid {status.pid}) died {waiting}; its last word: {last}")
        return PeerLost(f"rank {peer} (pid {status.pid}) gave up {waiting}")

    def too_late(self, call: Call, stall: Stall, phase: str) -> AnyEPError:
        """What to raise when a peer that is waited for does not come in time."""
        for part in stall.parts:
            silent = self._silent(part.peers)
            if silent:
                heard = self.wire.seconds_since_heard(silent[0]) if self.wire is not None else 0.0
                return PeerLost(
                    f"{_ranks(silent)} {'are' if len(silent) > 1 else 'is'} out of reach: rank {self.rank}"
                    f" waited {self.timeout_s:g} s for the {part.what} of {_ranks(part.peers)} in {call},"
                    f" phase {phase}, and heard nothing from rank {silent[0]} for {heard:.1f} s."
                    f" What it said last: {self._statuses[silent[0]].read(True)}."
                    f" Is the network between the hosts up, and does rank {silent[0]} make the same calls?"
                )
        stall = self._cause(stall)
        peer = stall.peers[0]
        others = f" (and {_ranks(stall.peers[1:])})" if len(stall.peers) > 1 else ""
        channel = f", channel {stall.channel}" if stall.channel is not None else ""
        return WaitTimeout(
            f"rank {self.rank} waited {self.timeout_s:g} s for the {stall.what} of rank {peer}{others}"
            f" in {call}, phase {phase}{channel}:"
            f" counter {stall.seen} seen, {stall.expected} expected."
            f" What rank {peer} said last: {self._statuses[peer].read(True)}."
            f" If it only needs longer, set ANYEP_TIMEOUT_S"
        )

    def _silent(self, peers: Sequence[int]) -> list[int]:
        """Those of these peers, or of whom they wait for, that are on other hosts and say nothing at all."""
        if self.wire is None:
            return []
        concerned = dict.fromkeys([*peers, *(self.whom_it_waits_for(peer) for peer in peers)])
        patience_s = min(SILENT_AFTER_S, self.timeout_s / 2)
        return [
            peer
            for peer in concerned
            if peer in self.wire.ranks and self.wire.seconds_since_heard(peer) > patience_s
        ]

    def _phase(self) -> str:
        return self._own.read(True).phase

    # The end

    def status(self) -> list[RankStatus]:
        """What every rank is doing, without waiting for any."""
        dead = self._find_dead()
        out_of_reach = self.wire.lost() if self.wire is not None else set()
        return [
            status.read(status.rank not in dead, status.rank not in out_of_reach) for status in self._statuses
        ]

    def stop_at_end(self, last_error: str) -> None:
        self._go(State.ENDED, last_error)
        self.stop("the process ended")
        self._broken = self._broken or BufferBroken("the process ends")

    def close(self) -> None:
        self._own.go(State.DESTROYED)
        if self.wire is not None:
            self.wire.close()
        self._broken = BufferBroken("it was destroyed")
        self.on_failure = _nothing
        for descriptor in self._pidfds:
            os.close(descriptor)
        self._pidfds = {}
        self._poller = select.poll()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
