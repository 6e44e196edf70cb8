"""Ranks that are forked from a server, which has torch, Numba and AnyEP loaded.

    start_server(["torch.distributed", "anyep.api.buffer"])
    with StoreFile() as place:
        ranks = [ForkedRank(rank, main, 4, place.path) for rank in range(4)]
        ranks[0].pipe.recv()
        ...
        end_all(ranks)

That takes a fraction of the time of new interpreters. `main(pipe, rank, 4, path)` begins with `enter_rank`,
and joins the other ranks' process group with `join_group(path, rank, 4)`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any, Final

from anyep.errors import AnyEPError
from anyep.launch.processes import die_with_parent, ending_in_words, signal_group

KILL_TIMEOUT_S: Final = 5.0
"""A killed process of a GPU whose kernel still waits for peers ends only with that kernel."""


def start_server(preloaded: Sequence[str]) -> None:
    """Start the process that ranks are forked from, unless it runs; a module that is missing is passed over.

    Ctrl-C is blocked there: during its imports the server would print a traceback.
    """
    multiprocessing.set_forkserver_preload(list(preloaded))
    # Otherwise the server would start the tracker, which unblocks signals again.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class StoreFile:
    """An unnamed file in which ranks find each other: it cannot collide with another, and leaves nothing."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("anyep-store")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> StoreFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkedRank:
    """The process of a rank, and this process's end of a pipe to it.

    Where the rank has made a session of its own, what it has started is ended with it.
    """

    def __init__(self, rank: int, main: Callable[..., None], *arguments: Any) -> None:
        """Start `main(pipe, rank, *arguments)` there."""
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=main, args=(theirs, rank, *arguments), name=f"rank {rank}", daemon=True
        )
        try:
            self._process.start()
        except (EOFError, ConnectionError) as error:
            self.pipe.close()
            raise AnyEPError(
                "ranks cannot be started: the process that loads torch and AnyEP for them has ended; what it"
                " printed tells why, and `anyep doctor` what is missing"
            ) from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def sentinel(self) -> int:
        """Ready to be read when the process has ended."""
        return self._process.sentinel

    def wait(self, seconds: float) -> None:
        self._process.join(seconds)

    def how_it_ended(self, patience_s: float) -> str:
        """In words; for a rank that has stopped answering. What it had started is ended."""
        self.wait(patience_s)
        if self._process.exitcode is None:
            return "still running"
        signal_group(self.pid, signal.SIGKILL)
        return ending_in_words(self._process.exitcode)

    def kill(self) -> None:
        """End the process and what it has started; `close` waits for it."""
        if self._process.exitcode is None:
            signal_group(self.pid, signal.SIGKILL)
            self._process.kill()

    def close(self) -> None:
        """Wait for the end of a killed process, but not for one that its GPU holds: it is gone when the
        service by which it shares the GPU ends, which may be the next thing to do."""
        self._process.join(KILL_TIMEOUT_S)
        if self._process.exitcode is not None:
            self._process.close()
        self.pipe.close()


def end_all(ranks: Sequence[ForkedRank]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.close()


# On the rank


def enter_rank() -> None:
    """What a rank does first: from here on it ends with the process that started it, and hears no Ctrl-C.

    A rank's parent is the server, which ends when no process holds a certain pipe open any more: the process
    that started it does, and every rank would, too.

    A rank stays in the session of that process: Linux gives each session its share of the cores (autogroups),
    and ranks in many sessions share them in another way, which shows in the figures of `anyep bench`.
    """
    die_with_parent()
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    starter = multiprocessing.parent_process()
    if starter is None or not starter.is_alive():
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    # All ranks are on this machine; Gloo would look up the host name, which fails on many laptops.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def join_group(path: str, rank: int, num_ranks: int) -> Any:
    """The process group of all ranks, over Gloo, by way of their store's file."""
    import torch.distributed as dist

    store = dist.FileStore(path, num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    return dist.group.WORLD
