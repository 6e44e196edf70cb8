"""Which ranks are present while ranks connect, and which are lost.

Every rank publishes its process and its host. From then on the ranks of its host detect when its process
ends, and tell the others by a verdict in the store of the process group. The first verdict stands: all
survivors name the same rank, even those that read the verdict after other survivors have left.

    roll = RollCall(Process.this(rank=2), num_ranks=4, board=Board(store, "anyep/1"))
    roll.arrive()
    ...
    verdict = roll.look()         # now and then while waiting for the others
    if verdict is not None:
        raise roll.error(verdict)

A slow rank is not lost. Where a rank cannot be watched (it is alone on another host, or died before it
arrived), `hold` asks all ranks to report after a failure of the group, and names those that do not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from anyep.errors import AnyEPError, PeerLost, WaitTimeout
from anyep.machine import host_identity

SEARCH_S: Final = 5.0
"""How long a killed process may take to end after its connections are closed, and a rank to report."""
LINGER_S: Final = 1.0
"""How long a rank that detected a loss stays, so the others learn of the loss before this rank ends."""
GRACE_S: Final = 0.5
"""How long the last data may take to arrive of a rank that ended after it had sent all that others need."""
PAUSE_S: Final = 0.02
MOST_WORDS: Final = 300
_STATE, _START_TIME = 0, 19
"""Fields of /proc/<pid>/stat after the name of the program."""


@dataclass(frozen=True)
class Process:
    """A rank's process, as its peers know it."""

    rank: int
    pid: int
    start_time: int
    """Distinguishes it from a later process with the same pid."""
    host: str
    namespace: str
    """The namespace in which its pid is valid."""
    gpu: str = ""
    """The GPU that the group's collectives use; empty where they use none."""

    @classmethod
    def this(cls, rank: int, gpu: str = "") -> Process:
        fields = _fields(os.getpid())
        try:
            namespace = str(Path("/proc/self/ns/pid").readlink())
        except OSError:
            namespace = ""
        return cls(
            rank, os.getpid(), int(fields[_START_TIME]) if fields else 0, host_identity(), namespace, gpu
        )

    def has_ended(self) -> bool:
        """Whether the process has ended; a zombie, which its parent has not reaped yet, has."""
        fields = _fields(self.pid)
        return fields is None or fields[_STATE] in "ZX" or int(fields[_START_TIME]) != self.start_time

    def is_near(self, other: Process) -> bool:
        """Whether each of the two can detect the other's end."""
        return (self.host, self.namespace) == (other.host, other.namespace)


def _fields(pid: int) -> list[str] | None:
    """What the kernel says about a process, or None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


class Board:
    """Notes that ranks leave for each other in the store of their group; empty when the store is gone."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.is_lost = False
        """There was a store, and it ended with the process that served it."""

    @property
    def is_there(self) -> bool:
        return self._store is not None

    def write(self, key: str, note: Any) -> None:
        self._do(lambda store: store.set(self._key(key), json.dumps(note)))

    def write_first(self, key: str, note: Any) -> Any:
        """Write the note unless the key has one already. Returns the note that is stored then."""
        text = self._do(lambda store: store.compare_set(self._key(key), "", json.dumps(note)))
        return json.loads(text) if text else note

    def read(self, key: str) -> Any:
        """The note, or None if there is none."""
        if not self._do(lambda store: store.check([self._key(key)])):
            return None
        text = self._do(lambda store: store.get(self._key(key)))
        return json.loads(text) if text else None

    def remove(self, key: str) -> None:
        self._do(lambda store: store.delete_key(self._key(key)))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _do(self, work: Any) -> Any:
        if self._store is None:
            return None
        try:
            return work(self._store)
        except RuntimeError:
            self._store = None
            self.is_lost = True
            return None


class Fate(StrEnum):
    """What happened to the ranks of a verdict."""

    DIED = "died"
    ABSENT = "absent"
    """At least one of them is lost."""
    GAVE_UP = "gave up"
    LATE = "late"
    NONE = "none"
    """All ranks are present, but the group failed."""


@dataclass(frozen=True)
class Verdict:
    """Why the ranks cannot go on; the same for all of them."""

    fate: Fate
    ranks: tuple[int, ...]
    words: str = ""


class RollCall:
    """One rank's view of which ranks are present."""

    def __init__(self, own: Process, num_ranks: int, board: Board, store_rank: int | None = None) -> None:
        self.own = own
        self.num_ranks = num_ranks
        self._store_rank = store_rank
        """The rank whose process serves the store, if one does."""
        self.doing = "the Buffer was being made"
        """What the ranks have connected for, as messages say it."""
        self.processes: dict[int, Process] = {own.rank: own}
        self._board = board
        self._ended_at: float | None = None

    def arrive(self) -> None:
        """Publish this rank's process and host."""
        self._board.write(f"who/{self.own.rank}", asdict(self.own))

    def enter(self, step: int) -> None:
        """Publish the step that this rank has reached."""
        self._board.write(f"at/{self.own.rank}", step)

    def know(self, processes: Iterable[Process]) -> None:
        """Store the processes of the other ranks, as they described themselves."""
        self.processes |= {process.rank: process for process in processes}

    def is_complete(self) -> bool:
        """Whether every rank has published its process."""
        for rank in self._others():
            if rank not in self.processes and (note := self._board.read(f"who/{rank}")) is not None:
                self.processes[rank] = Process(**note)
        return len(self.processes) == self.num_ranks

    def look(self) -> Verdict | None:
        """The verdict if a rank is known to be lost by now. A waiting rank calls this regularly."""
        self.is_complete()
        ended = self._ended()
        if ended and self._ended_at is None:
            self._ended_at = time.monotonic()
        if ended and self._ended_at is not None and time.monotonic() - self._ended_at >= GRACE_S:
            # Ranks that detected it earlier may have ended since: their verdict counts.
            return self._settle(Verdict(Fate.DIED, ended))
        verdict = self._verdict()
        if verdict is None and self._board.read("failed") is not None:
            return self.hold("the collective of another rank failed")
        if verdict is None and self._board.is_lost:
            return self.hold("the store of the process group is gone")
        return verdict

    def hold(self, words: str) -> Verdict:
        """Find out which ranks are lost after a failure; `words` is the message of that failure."""
        self._board.write_first("failed", self.own.rank)
        self._board.write(f"here/{self.own.rank}", True)
        deadline = time.monotonic() + SEARCH_S
        while time.monotonic() < deadline:
            self.is_complete()
            ended = self._ended()
            if ended:
                return self._settle(Verdict(Fate.DIED, ended))
            verdict = self._verdict()
            if verdict is not None:
                return verdict
            time.sleep(PAUSE_S)
        absent = tuple(rank for rank in self._others() if not self._is_here(rank))
        if self._board.is_lost and self._store_rank in absent:
            absent = (self._store_rank,)
        return self._settle(Verdict(Fate.ABSENT if absent else Fate.NONE, absent, words[:MOST_WORDS]))

    def call_late(self, step: int, words: str) -> Verdict:
        """Find out which ranks the group did not reach before its own deadline."""
        at = {rank: self._board.read(f"at/{rank}") for rank in self._others()}
        late = tuple(rank for rank, reached in at.items() if reached is None or reached < step)
        return self._settle(Verdict(Fate.LATE, late, words[:MOST_WORDS]))

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank gives up."""
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._settle(Verdict(Fate.GAVE_UP, (self.own.rank,), words[:MOST_WORDS]))

    def error(self, verdict: Verdict) -> AnyEPError:
        """The verdict as an exception; waits a moment first, until the others have learned of it."""
        self._linger()
        doubtful = verdict.ranks
        if verdict.fate is Fate.ABSENT:
            doubtful = tuple(rank for rank in verdict.ranks if not self._is_known_to_live(rank))
        names = [self._name(rank) for rank in doubtful]
        words = f" ({verdict.words})" if verdict.words else ""
        if verdict.fate is Fate.DIED:
            return PeerLost(f"{_listing(names, 'and')} died while {self.doing}")
        if verdict.fate is Fate.GAVE_UP:
            return PeerLost(f"{_listing(names, 'and')} gave up while {self.doing}: {verdict.words}")
        if verdict.fate is Fate.LATE and self.own.rank in verdict.ranks:
            return WaitTimeout(
                f"rank {self.own.rank} came too late: the others waited for it while {self.doing}, until the"
                f" timeout of the process group, and gave up{words}"
            )
        if verdict.fate is Fate.LATE:
            awaited = _listing(names, "and") if names else "other ranks"
            return WaitTimeout(
                f"rank {self.own.rank} waited for {awaited} while {self.doing}, until the timeout of the"
                f" process group{words}: every rank must make the Buffer; if they only need longer, pass a"
                f" longer timeout to init_process_group or new_group"
            )
        if names:
            return PeerLost(f"{_listing(names, 'or')} died, or is out of reach, while {self.doing}{words}")
        return PeerLost(
            f"the process group failed while {self.doing}, though every rank is there{words}: look at the"
            f" network between the ranks, and make a new group"
        )

    def _settle(self, verdict: Verdict) -> Verdict:
        note = self._board.write_first("verdict", asdict(verdict))
        return _verdict_of(note)

    def _verdict(self) -> Verdict | None:
        note = self._board.read("verdict")
        return None if note is None else _verdict_of(note)

    def _linger(self) -> None:
        self._board.write(f"here/{self.own.rank}", True)
        deadline = time.monotonic() + LINGER_S
        while time.monotonic() < deadline:
            living = [rank for rank in self._others() if self._is_known_to_live(rank)]
            if self._board.is_there and all(self._board.read(f"here/{rank}") for rank in living):
                return
            time.sleep(PAUSE_S)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.own.rank]

    def _ended(self) -> tuple[int, ...]:
        """The ranks near this one whose processes have ended."""
        return tuple(
            rank
            for rank, process in sorted(self.processes.items())
            if process.is_near(self.own) and process.has_ended()
        )

    def _is_known_to_live(self, rank: int) -> bool:
        process = self.processes.get(rank)
        return process is not None and process.is_near(self.own) and not process.has_ended()

    def _is_here(self, rank: int) -> bool:
        return self._is_known_to_live(rank) or bool(self._board.read(f"here/{rank}"))

    def _name(self, rank: int) -> str:
        process = self.processes.get(rank)
        if process is None:
            return f"rank {rank}"
        if process.host == self.own.host:
            return f"rank {rank} (pid {process.pid})"
        return f"rank {rank} (pid {process.pid} on host {process.host.split()[0]})"


def _verdict_of(note: dict[str, Any]) -> Verdict:
    return Verdict(Fate(note["fate"]), tuple(note["ranks"]), note["words"])


def _listing(names: Sequence[str], last: str) -> str:
    """
    >>> _listing(["a"], "or"), _listing(["a", "b"], "or"), _listing(["a", "b", "c"], "and")
    ('a', 'a or b', 'a, b and c')
    """
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
