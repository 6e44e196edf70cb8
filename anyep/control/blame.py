"""Which rank a wait is stuck on, and the sentences about ranks that are stuck or lost, for all devices.

`Blame` looks at the status that each rank publishes about itself, at the processes of this host, and at the
transport to others. `anyep.core.diagnosis` has the sentences about ranks that disagree.
"""

from __future__ import annotations

from collections.abc import Sequence

from anyep.control.liveness import Processes
from anyep.control.status import State, StatusBlock
from anyep.core.calls import Call, Stall
from anyep.core.diagnosis import listed
from anyep.errors import (
    AnyEPError,
    PeerLost,
    WaitTimeout,
)
from anyep.transport.remote import SILENT_AFTER_S, Transport


class Blame:
    """Explains why a wait of this rank ends without success."""

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        statuses: Sequence[StatusBlock],
        processes: Processes,
        transport: Transport | None,
        api: str,
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._statuses = statuses
        self._processes = processes
        self._transport = transport
        self._api = api

    def gone(self) -> set[int]:
        """The peers that will send nothing more."""
        ended = {status.rank for status in self._statuses if status.state is not State.ALIVE}
        return ended | self._unreachable() | self._processes.dead()

    def _unreachable(self) -> set[int]:
        return self._transport.lost() if self._transport is not None else set()

    def waits_for(self, peer: int) -> int | None:
        """The rank that a peer waits for according to its status; None if it does not wait."""
        return self._statuses[peer].read(True).waits_for

    def cause(self, stall: Stall) -> Stall:
        """The part of a wait to report: for a peer that waits for no rank, or at least not for this one."""
        if not stall.also:
            return stall
        waits = [self.waits_for(part.peers[0]) for part in stall.parts]
        ranking = [0 if peer is None else 2 if peer == self._rank else 1 for peer in waits]
        return stall.parts[ranking.index(min(ranking))]

    def lost(self, call: Call, peer: int, stall: Stall, phase: str) -> PeerLost:
        """The error for a wait for a peer that is gone."""
        status = self._statuses[peer]
        stall = next((part for part in stall.parts if peer in part.peers), stall)
        whose = "its" if peer in stall.peers else f"rank {stall.peers[0]}'s"
        waiting = f"while rank {self._rank} waited for {whose} {stall.what} in {call}, phase {phase}"
        if status.state is State.FAILED:
            return PeerLost(f"rank {peer} (pid {status.pid}) failed {waiting}: {status.failure}")
        if status.state is State.DESTROYED:
            return PeerLost(f"rank {peer} (pid {status.pid}) destroyed its {self._api} {waiting}")
        if status.state is State.LEFT:
            return PeerLost(
                f"rank {peer} (pid {status.pid}) left its `with {self._api}(...)` block by {status.failure},"
                f" {waiting}"
            )
        if status.state is State.ENDED:
            why = f"; its last uncaught exception: {status.failure}" if status.failure else ""
            return PeerLost(
                f"rank {peer} (pid {status.pid}) is gone: its process ended without destroy(), {waiting}{why}"
            )
        if peer in self._unreachable():
            return PeerLost(
                f"rank {peer} is out of reach: its process or host was lost {waiting};"
                f" its last word: {status.read(True)}"
            )
        if peer in self._processes.dead():
            last = status.read(True)
            return PeerLost(f"rank {peer} (pid {status.pid}) died {waiting}; its last word: {last}")
        return PeerLost(f"rank {peer} (pid {status.pid}) gave up {waiting}")

    def too_late(self, call: Call, stall: Stall, phase: str) -> AnyEPError:
        """The error for a wait that reached its deadline."""
        for part in stall.parts:
            silent = self._silent(part.peers)
            if silent:
                return self._unheard(call, part, silent, phase)
        stall = self.cause(stall)
        peer = stall.peers[0]
        others = f" (and {listed(stall.peers[1:])})" if len(stall.peers) > 1 else ""
        channel = f", channel {stall.channel}" if stall.channel is not None else ""
        return WaitTimeout(
            f"rank {self._rank} waited {self._timeout_s:g} s for the {stall.what} of rank {peer}{others}"
            f" in {call}, phase {phase}{channel}:"
            f" counter {stall.seen} seen, {stall.expected} expected."
            f" Last status of rank {peer}: {self._statuses[peer].read(True)}."
            f" If it only needs longer, set ANYEP_TIMEOUT_S"
        )

    def _unheard(self, call: Call, part: Stall, silent: Sequence[int], phase: str) -> PeerLost:
        heard = self._transport.seconds_since_heard(silent[0]) if self._transport is not None else 0.0
        return PeerLost(
            f"{listed(silent)} {'are' if len(silent) > 1 else 'is'} out of reach: rank {self._rank}"
            f" waited {self._timeout_s:g} s for the {part.what} of {listed(part.peers)} in {call},"
            f" phase {phase}, and heard nothing from rank {silent[0]} for {heard:.1f} s."
            f" Its last status: {self._statuses[silent[0]].read(True)}."
            f" Is the network between the hosts up, and does rank {silent[0]} make the same calls?"
        )

    def _silent(self, peers: Sequence[int]) -> list[int]:
        """The ranks on other hosts among these peers, and among those they wait for, that are silent."""
        transport = self._transport
        if transport is None:
            return []
        concerned = dict.fromkeys([*peers, *(self.waits_for(peer) for peer in peers)])
        silent_s = min(SILENT_AFTER_S, self._timeout_s / 2)
        return [
            peer
            for peer in concerned
            if peer in transport.ranks and transport.seconds_since_heard(peer) > silent_s
        ]
