"""Executes the commands of a rank's kernels, which cannot write to another host themselves.

    kernels       ---- commands in memory of the host --->  proxy  ---- puts of an engine --->  ranks on
    kernels poll  <--- counters in the inbox -------------  proxy  <--- signals --------------  other hosts

The inbox is memory of the host laid out like a control region: words of all ranks on other hosts for this one
arrive there, since no two ranks write the same words. Rows go from memory of a GPU to memory of a GPU.

A thread does all this. It looks for commands in compiled code, without the interpreter's lock, and
gathers what has accumulated: one put per rank, however many commands there are, because a put takes about
as long as tens of them. It spins while there is traffic, and sleeps a little when there has been none for
some time. Kernels wait without ever asking the host, so the thread also tells them which ranks are gone,
and that a rank gave up.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from anyep import ending
from anyep.core.commands import FIELDS, NO_COUNTER, CommandSizes
from anyep.errors import AnyEPError, PeerLost
from anyep.transport.base import Engine, Piece, is_done

LOOK_S: Final = 0.02
GRACE_S: Final = 0.25
"""What a rank that is gone has sent before may still arrive: its last words overtake it, on another way."""
DRAIN_S: Final = 1.0
log = logging.getLogger("anyep")


class Rhythm(NamedTuple):
    """How the thread looks for commands between two polls of the engine: for how long, and how often."""

    patience_ns: int
    nap_us: int


BUSY: Final = Rhythm(20_000, 0)
BUSY_WITHOUT_CORE: Final = Rhythm(50_000, 10)
"""Where ranks outnumber cores, a thread that spins keeps another rank from what it waits for."""
QUIET: Final = Rhythm(200_000, 50)
IDLE: Final = Rhythm(1_000_000, 250)
QUIET_AFTER_S: Final = 0.002
IDLE_AFTER_S: Final = 0.1


class Commands(NamedTuple):
    """The rings of commands, in memory of the host that kernels write to."""

    address: int
    sizes: CommandSizes
    take: Callable[[int, int, int, Any, int, int], int]
    """The compiled loop that takes commands out of all rings."""


class Peers(Protocol):
    """What the proxy needs to know about ranks on other hosts, and tells this rank's kernels."""

    def gone(self) -> Iterable[int]:
        """The ranks that will send nothing more."""

    def forget(self, rank: int) -> None:
        """Let this rank's kernels stop waiting, because a rank is gone."""


class GpuProxy(ending.Part):
    """The proxy of one rank, and its thread. It owns the engine.

    `abort_at` is the address of the word of the inbox by which a rank on another host says that it gives up.
    `begin_thread` prepares the thread for calls of CUDA.
    """

    def __init__(
        self,
        rank: int,
        engine: Engine,
        commands: Commands,
        abort_at: int,
        peers: Peers,
        has_core: bool = True,
        begin_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.engine = engine
        self.num_commands = 0
        self.num_puts = 0
        self.error: BaseException | None = None
        """What ended the thread, if it did not end in order."""
        self._commands = commands
        self._abort_at = abort_at
        self._peers = peers
        self._busy = BUSY if has_core else BUSY_WITHOUT_CORE
        self._begin_thread = begin_thread
        self._taken = np.zeros((commands.sizes.most_commands, FIELDS), np.int64)
        self._gone_since: dict[int, float] = {}
        self._forgotten: set[int] = set()
        self._stop = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="anyep proxy", daemon=True)
        self._thread.start()
        ending.register(self)

    def _run(self) -> None:
        try:
            self._begin_thread()
            self._serve()
        except BaseException as error:
            self.error = error
            log.error(
                "the proxy of rank %d has failed, and its kernels stop: %s", self.rank, ending.describe(error)
            )
            self._peers.forget(self.rank)

    def _serve(self) -> None:
        moved_at = looked_at = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            quiet_s = now - moved_at
            rhythm = self._busy if quiet_s < QUIET_AFTER_S else QUIET if quiet_s < IDLE_AFTER_S else IDLE
            if self.step(rhythm):
                moved_at = time.monotonic()
            if now - looked_at > LOOK_S:
                looked_at = now
                self._look_for_the_gone(now)

    def step(self, rhythm: Rhythm) -> bool:
        """Take commands and post them; let the engine make progress. Returns whether anything happened."""
        commands = self._commands
        count = commands.take(commands.address, *commands.sizes, self._taken, *rhythm)
        if count:
            self._post(self._taken[:count].tolist())
        moved = self.engine.poll()
        self._pass_on_abort()
        return moved or count > 0

    def _post(self, commands: list[list[int]]) -> None:
        self.num_commands += len(commands)
        for peer, (pieces, counters) in puts_of(commands).items():
            self.num_puts += 1
            # `_look_for_the_gone` finds a rank that the engine has lost.
            with contextlib.suppress(PeerLost):
                self.engine.put(peer, pieces, list(counters.items()))

    def _pass_on_abort(self) -> None:
        """Tell this rank's kernels that a kernel on another host gave up."""
        flag = ctypes.c_int64.from_address(self._abort_at).value
        if flag:
            self._forget(flag - 1)

    def _look_for_the_gone(self, now: float) -> None:
        for rank in (*self.engine.lost, *self._peers.gone()):
            if now - self._gone_since.setdefault(rank, now) > GRACE_S:
                self._forget(rank)

    def _forget(self, rank: int) -> None:
        if rank not in self._forgotten:
            self._forgotten.add(rank)
            self._peers.forget(rank)

    # The end

    def close(self) -> None:
        """Send what kernels have asked for, and release the engine. No kernel may be running any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        until = time.monotonic() + DRAIN_S
        try:
            while self._has_work() and time.monotonic() < until:
                pass
        except AnyEPError as error:
            log.error("the last commands of rank %d were not executed: %s", self.rank, error)
        self.engine.close()

    def _has_work(self) -> bool:
        return self.step(QUIET) or not self._is_idle()

    def _is_idle(self) -> bool:
        return all(is_done(self.engine, rank) for rank in self.engine.bytes_put)

    def is_working(self) -> bool:
        return self._thread.is_alive() and not self._is_idle()

    def join_at_end(self, until: float) -> None:
        self._stop.set()
        ending.join(self._thread, until)


def puts_of(commands: Iterable[list[int]]) -> Mapping[int, tuple[list[Piece], dict[int, int]]]:
    """One put for each rank: the pieces of all commands, and the highest value of each counter.

    >>> commands = [[3, 4096, 0, 128, 64, 5], [1, 0, 0, 0, 8, 1], [3, 5120, 256, 128, 64, 6]]
    >>> puts_of(commands)
    {3: ([(4096, 0, 128), (5120, 256, 128)], {64: 6}), 1: ([], {8: 1})}
    """
    puts: dict[int, tuple[list[Piece], dict[int, int]]] = {}
    for peer, source, place, num_bytes, counter_at, counter in commands:
        pieces, counters = puts.setdefault(peer, ([], {}))
        if num_bytes:
            pieces.append((source, place, num_bytes))
        if counter_at != NO_COUNTER:
            counters[counter_at] = max(counter, counters.get(counter_at, counter))
    return puts
