"""Which ranks low-latency calls go on without: masks, and how all ranks come to the same ones.

Every rank has a generation, which only grows: odd while it is masked. Who masks a rank writes the next odd
generation into every rank's memory, and everyone adopts the newest that he finds there. Taking a rank back
is a round of all ranks concerned: each writes the next even generation together with the number of its last
call, and when all have, they go on from the largest of these numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from anyep.errors import AnyEPError, Masked
from anyep.layout import ControlRegion
from anyep.modes.conversation import Array, Call, Conversation, Stall, Topic
from anyep.modes.status import Phase

CALL_BITS: Final = 40
"""Of a mask word: below them the last call of a rank that is ready to take another one back."""
log = logging.getLogger("anyep")


class Masks:
    """One rank's view of who is masked."""

    def __init__(self, backend: Any, conversation: Conversation, control: ControlRegion) -> None:
        self._backend = backend
        self._conversation = conversation
        self._rank = conversation.rank
        block = control.block("mask")
        self._at_peers = conversation.peer_counters(block)
        self._own = conversation.own_counters(block)
        self._stride = block.stride
        self._generations = np.zeros(conversation.num_ranks, np.int64)
        self.masked = np.zeros(conversation.num_ranks, np.bool_)

    def adopt(self) -> bool:
        """Take over what peers have said; whether anything is new."""
        found = self._backend.adopt_masks(
            int(self._own[0]), self._stride, CALL_BITS, self._generations, self.masked
        )
        return bool(found)

    def look(self) -> None:
        """Take over what peers have said, and raise if they go on without this rank."""
        self.adopt()
        if self.masked[self._rank]:
            raise self._masked_out()

    def mask(self, ranks: Sequence[int], reason: str) -> None:
        """Go on without these ranks, and tell everyone."""
        self.adopt()
        for rank in ranks:
            if not self.masked[rank]:
                self._mask(rank, reason)

    def _mask(self, rank: int, reason: str) -> None:
        self._generations[rank] += 1 + self._generations[rank] % 2
        self.masked[rank] = True
        self._write(rank, int(self._generations[rank]) << CALL_BITS)
        log.warning("rank %d goes on without rank %d: %s", self._rank, rank, reason)

    def _write(self, rank: int, value: int) -> None:
        self._conversation.announce(self._at_peers + 8 * rank, Topic.MASK, value)

    def _masked_out(self) -> Masked:
        return Masked(
            f"the other ranks go on without rank {self._rank}: it did not answer in time, or was masked by a"
            f" call; all of them together can take it back by"
            f" low_latency_update_mask_buffer({self._rank}, mask=False)"
        )

    def unmask(self, call: Call, ranks: Sequence[int], last_call: int) -> int | None:
        """Take these ranks back, with all of them and all others that are not masked.

        Returns the number of the last call, the largest that any of them had; None if there was nobody to
        take back, and so no round.
        """
        returning = [rank for rank in ranks if self.masked[rank]]
        if not returning:
            return None
        taking_part = ~self.masked
        taking_part[returning] = True
        if not taking_part[self._rank]:
            raise self._masked_out()
        self._conversation.enter(call, Phase.NOTIFY)
        generations = self._generations.copy()
        proposed = {}
        for rank in returning:
            proposed[rank] = int(generations[rank] + 1) << CALL_BITS
            self._write(rank, proposed[rank] | last_call)
        largest = last_call
        for rank in returning:
            largest = max(largest, self._wait_for_round(call, rank, proposed[rank], taking_part, generations))
        self._conversation.end(call)
        return largest

    def _wait_for_round(
        self, call: Call, rank: int, proposed: int, taking_part: Array, generations: Array
    ) -> int:
        """Wait until everyone is ready to take a rank back; the largest call number that they had.

        Whoever does not come is masked (again); if it is that rank, it stays away.
        """
        words = self._own + 8 * rank
        missing = taking_part.copy()

        def step(num_spins: int) -> int:
            self.adopt()
            masked_anew = self._generations > generations
            if masked_anew[self._rank]:
                raise self._masked_out()
            missing[masked_anew] = False
            if masked_anew[rank]:
                return 0
            return self._conversation.await_counters(words, proposed, missing, num_spins, Topic.MASK)

        def stalled() -> Stall:
            return self._conversation.stall(words, missing, f"readiness to take rank {rank} back", proposed)

        def give_up(peers: Sequence[int], error: AnyEPError) -> None:
            for peer in peers:
                self._mask(peer, str(error))

        self._conversation.wait_until(call, step, stalled, give_up=give_up)
        if self._generations[rank] > generations[rank]:
            return 0
        generations[rank] = self._generations[rank] = proposed >> CALL_BITS
        self.masked[rank] = False
        values = np.empty((1, len(words)), np.int64)
        self._backend.read_counters(words.reshape(1, -1), values)
        return int((values[0][taking_part] & ((1 << CALL_BITS) - 1)).max())
