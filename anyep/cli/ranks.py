"""Starts ranks for the commands that need some: processes that run one function together and report back.

They are forked from a server that has torch, Numba and AnyEP loaded, which takes a fraction of the time of
fresh interpreters. If one rank fails, or the command is interrupted, all are ended.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from anyep import settings
from anyep.cli.gpus import ON_THE_CPU, Placement, take_gpu
from anyep.cli.interrupts import raise_from_here_on
from anyep.errors import AnyEPError, PeerLost, whole_number
from anyep.progress import compile_sentence
from anyep.requirements import check_requirements

PRELOADED: Final = ["torch.distributed", "anyep.api.buffer", "anyep.backends.cpu.preload"]
PRELOADED_FOR_GPUS: Final = [*PRELOADED, "triton"]
PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class Rank:
    """One rank of a command. `report` sends something to the command while the function still runs."""

    rank: int
    num_ranks: int
    group: Any
    report: Callable[[Any], None]


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    on_report: Callable[[int, Any], None] | None = None,
    on_compile: Callable[[str], None] | None = None,
    placement: Placement = ON_THE_CPU,
) -> list[Any]:
    """Call `function(rank, *arguments)` on every rank at the same time; returns the results in rank order.

    The error of the rank that failed first is raised here. `on_compile` shows a sentence about kernels that
    are being compiled; by default that is a line on stderr.
    """
    num_ranks = whole_number("ranks", num_ranks, minimum=1)
    raise_from_here_on()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_FOR_GPUS if placement.num_gpus else PRELOADED)
    _start_server()
    # The ranks meet through an unnamed file: it cannot collide with another, and nothing of it remains.
    store = os.memfd_create("anyep-store")
    meeting_place = f"/proc/{os.getpid()}/fd/{store}"
    processes = []
    pipes: list[Connection] = []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    rank,
                    num_ranks,
                    placement,
                    meeting_place,
                    theirs,
                    bool(on_compile),
                    function,
                    arguments,
                ),
                daemon=True,
            )
            try:
                process.start()
            except (EOFError, ConnectionError) as error:
                raise AnyEPError(
                    "ranks cannot be started: the process that loads torch and AnyEP for them has ended;"
                    " what it printed tells why, and `anyep doctor` what is missing"
                ) from error
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        results = _collect(pipes, on_report, on_compile)
        for process in processes:
            process.join(10)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()
        os.close(store)


def _start_server() -> None:
    """Start the server that ranks are forked from with Ctrl-C blocked: during its preloading imports it would
    print a traceback. Ranks inherit that; the command ends them all."""
    # Otherwise the server would start the tracker, which unblocks signals again.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _collect(
    pipes: list[Connection],
    on_report: Callable[[int, Any], None] | None,
    on_compile: Callable[[str], None] | None,
) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in results]):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                kind, content = pipes[rank].recv()
            except EOFError:
                raise PeerLost(f"rank {rank} ended without a result: it was killed, or crashed") from None
            if kind == "error":
                raise content
            if kind == "result":
                results[rank] = content
            elif kind == "compile" and on_compile is not None:
                on_compile(compile_sentence(*content))
            elif on_report is not None:
                on_report(rank, content)
    return [results[rank] for rank in range(len(pipes))]


def _serve(
    rank: int,
    num_ranks: int,
    placement: Placement,
    store: str,
    pipe: Connection,
    reports_compilation: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """The main function of a rank's process."""
    _die_with_the_command()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command that started the ranks ends them
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The server that this rank was forked from has the environment of when it started.
    os.environ.update(placement.environment)
    # The options of the command determine where ranks run.
    settings.unset(settings.DEVICE, settings.RANKS_PER_NODE, settings.NETWORK)
    try:
        import torch

        check_requirements()
        import torch.distributed as dist

        if reports_compilation:
            from anyep.backends.cpu.compilation import show_progress_with

            show_progress_with(lambda num_done, num_kernels: pipe.send(("compile", (num_done, num_kernels))))
        torch.set_num_threads(1)
        if placement.num_gpus:
            take_gpu(placement.gpu_of(rank), rank)
        meeting = dist.FileStore(store, num_ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=num_ranks)
        result = function(
            Rank(rank, num_ranks, dist.group.WORLD, lambda thing: pipe.send(("report", thing))), *arguments
        )
        dist.barrier()
        pipe.send(("result", result))
    except BaseException as error:
        pipe.send(("error", _sendable(error)))
    # Exit at once: destructors of libraries are not needed.
    os._exit(0)


def _die_with_the_command() -> None:
    """Let the kernel kill this rank when the command has ended, killed or not.

    A rank's parent is the fork server, which ends when no process holds a certain pipe open any more: the
    command does, and every rank would, too.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    command = multiprocessing.parent_process()
    if command is None or not command.is_alive():
        os._exit(1)


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return AnyEPError(f"{type(error).__name__}: {error}")
    return error
