"""Which ranks low-latency calls go on without: masks, and how all ranks agree on them.

Every rank has a generation, which only grows: 2n + 1 says that it was masked after n rounds, 2n that round n
unmasked it. A rank that masks another one writes the new generation into every rank's memory. A rank that
finds a new generation there does the same before anything else. So a masked rank can know that it is masked
before any rank overwrites what it still reads.

Ranks are unmasked in a round, in which they and all unmasked ranks take part. Each sends a rejoin request to
every rank: the number of the round, which ranks to unmask, the generations that it knows, and the layout of
its slots. When all requests have arrived, the ranks go on with the call numbers of the new round. A masked
rank does not know how many rounds it has missed, which ranks were masked, or what was cleaned without it. It
takes all this, and the ranks to unmask, from the requests that name it. Its own request counts once it agrees
with those: an older request may be left from a time when no other rank wanted a round, and from a rank that
has given up since.

Where a network connects the ranks, masks are sent to those on other hosts, and arrive later. A host that
hears nothing from another cannot know whether that one is gone. So ranks go on only if they are on most
hosts, or on half of them with rank 0's: never do two groups of ranks go on, each without the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from anyep.backends import cpu
from anyep.control.plane import ControlPlane
from anyep.core import diagnosis
from anyep.core.calls import CALLS_PER_ROUND, Array, Call, Phase, Stall, Topic
from anyep.core.digests import FACTOR_1, FIRST, SHIFT_3
from anyep.core.majority import has_majority
from anyep.errors import AnyEPError, Disagreement, Masked
from anyep.layout import COUNTER_BYTES, NUM_SLOT_SETS, REJOIN_HEADER_BYTES, ControlRegion
from anyep.transport.remote import Transport

NUM_HEADER_WORDS: Final = REJOIN_HEADER_BYTES // 8
SEQUENCE, VERSION, SIZES, DIGEST = 0, 1, slice(2, 5), 5
"""Words of a rejoin request's header: twice the round's number, the layout of the slots, and a digest of all
other words: over a network a request arrives piece by piece."""
PAUSE_S: Final = 0.001
log = logging.getLogger("anyep")


class Layout(NamedTuple):
    """The sizes that the slots are laid out for, and how often they have been cleaned."""

    version: int
    sizes: tuple[int, int, int]


class KernelMasks(Protocol):
    """The masks that the kernels of a GPU know."""

    def newest(self) -> Array:
        """The newest generation of each rank that a kernel has found or was told."""

    def tell(self, rank: int, generation: int) -> None:
        """Tell every rank's kernels the generation of a rank."""


class Masks:
    """One rank's view of which ranks are masked."""

    def __init__(
        self,
        control: ControlPlane,
        region: ControlRegion,
        kernels: KernelMasks | None = None,
        hosts: Sequence[int] = (),
    ) -> None:
        """`kernels` are those of this rank's GPU, if there is one: they mask ranks, too. `hosts` are the
        ranks' hosts, where some are reached over a network."""
        self.control = control
        self._kernels = kernels
        self._hosts = hosts
        self.transport = control.transport
        self.rank = control.rank
        self.num_ranks = control.num_ranks
        mask, request = region.blocks.mask, region.blocks.rejoin
        self._at_peers = control.peer_counters(mask)
        self._told_at = mask.offset(control.rank)
        """Where this rank's words lie in every rank's heap."""
        self._own = int(control.own_counters(mask)[0])
        self._stride = mask.stride
        sets = range(NUM_SLOT_SETS)
        self.request_at = [request.offset(control.rank, turn) for turn in range(NUM_SLOT_SETS)]
        """Where this rank's requests lie in every rank's heap."""
        self.requests_at_peers = [control.peer_counters(request, turn) for turn in sets]
        self.own_requests = [control.own_counters(request, turn) for turn in sets]
        self.generations = np.zeros(self.num_ranks, np.int64)
        self._changed = np.zeros(self.num_ranks, np.bool_)
        self.far = np.zeros(self.num_ranks, np.bool_)
        """The ranks that are reached over a network."""
        if self.transport is not None:
            self.far[list(self.transport.ranks)] = True
        self.round = 0
        # The caller calls `look` before a call, while the stream may still be running another one.
        self._lock = threading.Lock()
        self.masked = np.zeros(self.num_ranks, np.bool_)

    @property
    def is_masked_out(self) -> bool:
        """Whether this rank is masked: the others go on without it."""
        return bool(self.masked[self.rank])

    def adopt(self) -> None:
        """Adopt the masks that peers have published, and those that kernels have found, and pass them on."""
        if self._kernels is not None:
            self._adopt_from_kernels(self._kernels.newest())
        self.adopt_from_hosts()

    def _adopt_from_kernels(self, newest: Array) -> None:
        for rank in np.flatnonzero(newest > self.generations).tolist():
            self.generations[rank] = newest[rank]
            if newest[rank] % 2 and not self.masked[rank]:
                self._log(rank)
            self.masked[rank] = newest[rank] % 2 == 1
            # Kernels told kernels: hosts must learn of it before anything else from this rank.
            self._tell_hosts(rank)

    def adopt_from_hosts(self) -> None:
        """The same, without masks that only kernels have published."""
        with self._lock:
            state = self.generations, self.masked, self._changed
            if cpu.adopt_masks(self._own, self._stride, self.far, *state):
                for rank in np.flatnonzero(self._changed):
                    self._tell(int(rank))

    def look(self) -> None:
        """Adopt the masks that peers have published, and raise if this rank is masked."""
        self.adopt()
        self._raise_if_masked_out()

    def _raise_if_masked_out(self) -> None:
        if self.is_masked_out:
            raise self.masked_out()
        self.check_majority((), "")

    def check_majority(self, lost: Sequence[int], reason: str) -> None:
        """Raise if this rank cannot go on without these ranks and those that are masked: ranks on other hosts
        may be alive, and go on without this one."""
        masked = self.masked.copy()
        masked[list(lost)] = True
        if self._hosts and not has_majority(self._hosts, masked.tolist()):
            raise diagnosis.cut_off(self.rank, np.flatnonzero(masked).tolist(), reason)

    @property
    def may_put(self) -> bool:
        """Whether ranks are masked that may still put rows into memory of others, over a network."""
        return self.transport is not None and bool(self.masked.any())

    def mask(self, ranks: Sequence[int], reason: str) -> None:
        """Mask ranks, and tell every rank; kernels are not asked, as they may be waiting for these ranks."""
        self.adopt_from_hosts()
        self._raise_if_masked_out()
        self.check_majority(ranks, reason)
        for rank in ranks:
            if not self.masked[rank]:
                self.mask_in(rank, 2 * self.round + 1, reason)

    def mask_in(self, rank: int, generation: int, reason: str) -> None:
        """Mask a rank with the given generation, and tell every rank."""
        self.generations[rank] = generation
        self.masked[rank] = True
        self._tell(rank)
        self._log(rank, reason)

    def _log(self, rank: int, reason: str = "") -> None:
        because = f": {reason}" if reason else ""
        if rank == self.rank:
            log.warning("the others go on without rank %d, which is this one%s", rank, because)
        else:
            log.warning("rank %d goes on without rank %d%s", self.rank, rank, because)

    def _tell(self, rank: int) -> None:
        self._tell_hosts(rank)
        if self._kernels is not None:
            self._kernels.tell(rank, int(self.generations[rank]))

    def _tell_hosts(self, rank: int) -> None:
        generation = int(self.generations[rank])
        self.control.signal(self._at_peers + 8 * rank, Topic.MASK, generation)
        if self.transport is not None:
            for peer in self.transport.ranks:
                self.transport.send(peer, [], [(self._told_at + 8 * rank, generation)])

    def masked_out(self) -> Masked:
        """The error that a masked rank raises."""
        return diagnosis.masked_out(self.rank)

    def take_back(self, call: Call, ranks: Sequence[int], layout: Layout) -> tuple[int, Layout]:
        """Unmask ranks, in a round of these ranks and all unmasked ones; some may not be masked at all.

        Returns the call number and the layout with which all ranks go on. A rank that does not arrive in time
        is masked (again).
        """
        self.adopt()
        self.control.enter(call, Phase.NOTIFY)
        if self.transport is not None:
            self._wait_until_sent(call, self.transport)
        rejoining = _Round(self, list(ranks), layout)
        self.control.wait_until(call, rejoining.step, rejoining.stalled, give_up=rejoining.give_up)
        result = rejoining.finish()
        self.control.end(call)
        return result

    def _wait_until_sent(self, call: Call, transport: Transport) -> None:
        """Wait until nothing is under way to other hosts, or given up for good: rows of a call before the
        round must not arrive after it. The others do the same before they send requests."""
        unsent: list[int] = []

        def step(num_spins: int) -> int:
            transport.poll()
            unsent[:] = [rank for rank in transport.ranks if not transport.is_idle(rank)]
            if unsent:
                time.sleep(PAUSE_S)
            return len(unsent)

        def give_up(peers: Sequence[int], error: AnyEPError) -> None:
            for peer in peers:
                transport.drop(peer, str(error))

        what = "receipt of rows that were put"
        self.control.wait_until(call, step, lambda: Stall(tuple(unsent), what, 0, 0), give_up=give_up)

    def refuse_round(self) -> None:
        """End the others' round at once, with no rank unmasked, because this rank's call was wrong."""
        if not self.is_masked_out:
            _Round(self, [], Layout(0, (0, 0, 0)))
            self.round += 1


def digests_of(requests: Array) -> Array:
    """A digest of each request, of all words but its own.

    >>> one = np.array([[4, 1, 8, 64, 2, 0, 0, 0, 5]])
    >>> digests_of(one) == digests_of(one + [0, 0, 0, 0, 0, 7, 0, 0, 0])
    array([ True])
    >>> digests_of(one) == digests_of(one + [0, 0, 0, 0, 0, 0, 0, 1, -1])
    array([False])
    """
    factors = np.arange(1, 2 * requests.shape[1], 2) * FACTOR_1
    mixed = (requests + FIRST) * factors
    mixed ^= mixed >> SHIFT_3
    mixed[:, DIGEST] = 0
    digests: Array = mixed.sum(axis=1)
    return digests


class _Round:
    """A round that unmasks ranks, from one rank's side."""

    def __init__(self, masks: Masks, ranks: list[int], layout: Layout) -> None:
        self._masks = masks
        self._control = masks.control
        self._rank = masks.rank
        self._returning = np.zeros(masks.num_ranks, np.bool_)
        self._returning[ranks] = True
        self._layout = layout
        own = int(masks.generations[self._rank])
        self._number = max(masks.round, own // 2 if masks.is_masked_out else 0) + 1
        self._words = np.zeros((masks.num_ranks, NUM_HEADER_WORDS + masks.num_ranks), np.int64)
        self._missing = np.zeros(masks.num_ranks, np.bool_)
        self._ignored = np.zeros(masks.num_ranks, np.bool_)
        self._unsent: set[int] = set()
        """The ranks on other hosts to which the request is still to be sent."""
        self._tickets: dict[int, int] = {}
        self._post_request()

    def _post_request(self) -> None:
        masks = self._masks
        header = np.zeros(NUM_HEADER_WORDS, np.int64)
        header[SEQUENCE] = 2 * self._number
        header[VERSION] = self._layout.version
        header[SIZES] = self._layout.sizes
        self._request = words = np.concatenate([header, masks.generations << 1 | self._returning])
        words[DIGEST] = digests_of(words.reshape(1, -1))[0]
        turn = self._number % NUM_SLOT_SETS
        near = ~masks.far
        cpu.post_requests(
            masks.requests_at_peers[turn][near], self._control.wake_ups[near], Topic.REJOIN + turn, words
        )
        self._unsent = set(np.flatnonzero(masks.far).tolist())
        self._send_requests()

    def _send_requests(self) -> None:
        """Send the request to ranks on other hosts, once the one before has left its place in the outbox."""
        transport = self._masks.transport
        assert transport is not None or not self._unsent
        for rank in sorted(self._unsent):
            if transport is not None and transport.is_sent(rank, self._tickets.get(rank, 0)):
                start = self._masks.request_at[self._number % NUM_SLOT_SETS]
                num_bytes = self._request.nbytes
                transport.outbox(rank, start, num_bytes).view(np.int64)[:] = self._request
                after_sequence = (start + COUNTER_BYTES, num_bytes - COUNTER_BYTES)
                self._tickets[rank] = transport.send(
                    rank, [after_sequence], [(start, int(self._request[SEQUENCE]))]
                )
                self._unsent.discard(rank)

    def step(self, num_spins: int) -> int:
        """Look for requests, and wait briefly for missing ones. Returns 0 when all have arrived."""
        masks = self._masks
        masks.adopt()
        self._send_requests()
        # This rank may have been masked before the round, or during it by ranks that want no round.
        is_masked = masks.is_masked_out
        is_named = self._returning[self._rank] and masks.generations[self._rank] <= 2 * self._number
        if is_masked and not is_named:
            raise masks.masked_out()
        self._read(self._number)
        if is_masked and self._follow_others():
            return 1
        # Wait for the ranks that take part and were not masked since the round began.
        view = self._view()
        taking_part = ((view % 2 == 0) | self._returning) & (view <= 2 * self._number) & ~self._ignored
        self._missing[:] = taking_part & ~self._has_request()
        self._taking_part = taking_part
        is_alone = taking_part.sum() == 1
        if not self._missing.any() and not (is_masked and is_alone):
            return self._wait_for_sending(taking_part)
        if is_masked:
            if self._follow_newer_requests():
                return 1
            if is_alone:
                # No rank knows yet that this rank wants to rejoin.
                self._missing[:] = ~self._ignored
                self._missing[self._rank] = False
                if not self._missing.any():
                    raise masks.masked_out()
        turn = self._number % NUM_SLOT_SETS
        waiting = self._missing.copy()
        counters = masks.own_requests[turn]
        if not self._control.await_counters(
            counters, 2 * self._number, waiting, num_spins, Topic.REJOIN + turn
        ):
            # Requests have arrived that do not count, or not for this rank; those that do are still missing.
            time.sleep(PAUSE_S)
        return 1

    def _wait_for_sending(self, taking_part: Array) -> int:
        """All requests are here: wait briefly until this rank's has left for the others. Returns 0 then."""
        waiting = [rank for rank in self._unsent if taking_part[rank]]
        if self._masks.transport is None or not waiting:
            return 0
        self._missing[waiting] = True
        self._masks.transport.poll()
        time.sleep(PAUSE_S)
        return 1

    def _follow_others(self) -> bool:
        """A masked rank adopts the rejoin set of the unmasked ranks."""
        is_request = self._has_request() & ~self._is_maker_masked()
        if not is_request.any():
            return False
        theirs = self._sets()[int(is_request.argmax())]
        if (theirs == self._returning).all():
            return False
        self._returning[:] = theirs
        self._post_request()
        return True

    def _follow_newer_requests(self) -> bool:
        """A masked rank that has missed rounds joins the newest one that names it.

        A request in which this rank is no longer masked says that this rank's round has unmasked it: the
        requests that were missing a moment ago have arrived since, and this rank must not skip that round.
        """
        newest = self._number
        for turn in range(NUM_SLOT_SETS):
            self._read(turn)
            is_masked_there = self._words[:, NUM_HEADER_WORDS + self._rank] >> 1 & 1 == 1
            rounds = self._words[self._names(self._rank) & is_masked_there, SEQUENCE] // 2
            newest = max([newest, *rounds.tolist()])
        if newest == self._number:
            return False
        self._number = newest
        self._post_request()
        return True

    def _read(self, number: int) -> None:
        """Read the requests at the place of this round's; they may belong to an older or newer round."""
        cpu.read_requests(self._masks.own_requests[number % NUM_SLOT_SETS], self._words)
        self._words[digests_of(self._words) != self._words[:, DIGEST], SEQUENCE] = 0

    def _sets(self) -> Array:
        """[sender, rank]: whether the sender of a request wants to unmask a rank."""
        sets: Array = self._words[:, NUM_HEADER_WORDS:] & 1 == 1
        return sets

    def _names(self, rank: int) -> Array:
        """Which ranks have requested to unmask a rank."""
        named: Array = self._sets()[:, rank]
        return named

    def _is_maker_masked(self) -> Array:
        """Which requests are those of masked ranks: by their own account, or as an unmasked rank knows."""
        masks = self._masks
        is_masked: Array = np.diagonal(self._words[:, NUM_HEADER_WORDS:] >> 1) % 2 == 1
        return is_masked if masks.is_masked_out else is_masked | masks.masked

    def _has_request(self) -> Array:
        """Which ranks sent a request that counts for this round; if this rank is masked, it must be named."""
        made: Array = self._words[:, SEQUENCE] == 2 * self._number
        if self._masks.transport is not None:
            # Those to which nothing gets through cannot come back.
            made[list(self._masks.transport.lost())] = False
        made &= ~self._is_maker_masked() | (self._sets() == self._returning).all(axis=1)
        if self._masks.is_masked_out:
            made &= self._names(self._rank)
        return made

    def _view(self) -> Array:
        """The generations that count; a masked rank takes them from the requests of unmasked ranks."""
        masks = self._masks
        view = masks.generations.copy()
        if masks.is_masked_out:
            theirs = self._words[:, NUM_HEADER_WORDS:] >> 1
            theirs = theirs[self._has_request() & ~self._is_maker_masked()]
            if masks.transport is not None and len(theirs):
                # Other hosts may not know which ranks this rank masked while it was masked itself.
                view[:] = 0
            for request in theirs:
                np.maximum(view, request, out=view)
            view[self._rank] = masks.generations[self._rank]
        return view

    def stalled(self) -> Stall:
        counters = self._masks.own_requests[self._number % NUM_SLOT_SETS]
        what = f"readiness for round {self._number}, which takes ranks back,"
        # Where a rank has just turned to another round, it does not know yet who takes part.
        is_other = np.arange(len(self._missing)) != self._rank
        missing = self._missing if self._missing.any() else is_other
        return self._control.stall(counters, missing, what, 2 * self._number)

    def give_up(self, peers: Sequence[int], error: AnyEPError) -> None:
        masks, control = self._masks, self._control
        gone = control.blame.gone()
        # A peer that waits for this rank in a call is not late: this rank is, and will be masked. It is told
        # so before the peer stops waiting for it. So masks are read after the peers' status: in the other
        # order, a peer could go on in between, and this rank would mask it without knowing the reason.
        late = [peer for peer in peers if peer in gone or control.blame.waits_for(peer) != self._rank]
        masks.adopt()
        if not masks.is_masked_out:
            masks.check_majority(late, str(error))
            for peer in late:
                masks.mask_in(peer, 2 * self._number + 1, str(error))
        elif set(peers) <= gone:
            self._ignored[list(peers)] = True
        else:
            # A masked rank must not mask others: they are not late, they just do not want it back yet.
            raise masks.masked_out()

    def finish(self) -> tuple[int, Layout]:
        masks = self._masks
        there = self._taking_part
        requests = self._words[there]
        view = self._view()
        masks.round = self._number
        agree = bool((requests[:, NUM_HEADER_WORDS:] & 1 == self._returning).all())
        if agree:
            if masks.transport is None or not masks.is_masked_out:
                np.maximum(view, masks.generations, out=view)
            masks.generations[:] = np.where(self._returning, np.maximum(view, 2 * self._number), view)
            if masks.transport is not None:
                # What a rank told others before it came back, and they did not hear, no longer counts.
                is_in = there & (masks.generations % 2 == 0)
                masks.generations[is_in] = np.maximum(masks.generations[is_in], 2 * self._number)
            masks.masked[:] = masks.generations % 2 == 1
        newest = requests[int(requests[:, VERSION].argmax())]
        self._layout = Layout(int(newest[VERSION]), tuple(newest[SIZES].tolist()))
        if not agree:
            raise Disagreement("ranks requested different ranks to unmask; none were unmasked")
        return self._number * CALLS_PER_ROUND, self._layout
