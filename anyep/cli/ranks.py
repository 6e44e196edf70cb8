"""Starts ranks for the commands that need some: processes that run one function together and report back.

If one rank fails, or the command is interrupted, all are ended.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from anyep import settings
from anyep.cli.gpus import ON_THE_CPU, Placement, take_gpu
from anyep.cli.interrupts import raise_from_here_on
from anyep.errors import AnyEPError, PeerLost, whole_number
from anyep.launch.forked import ForkedRank, StoreFile, end_all, enter_rank, join_group, start_server
from anyep.progress import compile_sentence
from anyep.requirements import check_requirements

PRELOADED: Final = ["torch.distributed", "anyep.api.buffer", "anyep.backends.cpu.preload"]
PRELOADED_FOR_GPUS: Final = [*PRELOADED, "triton"]
LEAVE_TIMEOUT_S: Final = 10.0
"""Ranks that have returned their result leave by themselves within this time, or are ended."""


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
    start_server(PRELOADED_FOR_GPUS if placement.num_gpus else PRELOADED)
    ranks: list[ForkedRank] = []
    with StoreFile() as place:
        try:
            work = (function, arguments)
            for rank in range(num_ranks):
                # One by one: those that have started are ended where another cannot start.
                arguments_of_rank = (num_ranks, place.path, placement, bool(on_compile), work)
                ranks.append(ForkedRank(rank, _serve, *arguments_of_rank))
            results = _collect(ranks, on_report, on_compile)
            for forked in ranks:
                forked.wait(LEAVE_TIMEOUT_S)
            return results
        finally:
            end_all(ranks)


def _collect(
    ranks: Sequence[ForkedRank],
    on_report: Callable[[int, Any], None] | None,
    on_compile: Callable[[str], None] | None,
) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        ready = wait([forked.pipe for rank, forked in enumerate(ranks) if rank not in results])
        messages = {rank: _message_of(forked) for rank, forked in enumerate(ranks) if forked.pipe in ready}
        # Peers of a rank that died complain at once: it comes before them.
        for rank, (kind, content) in sorted(messages.items(), key=lambda item: item[1][0] != "died"):
            if kind == "died":
                raise PeerLost(f"rank {rank} ended without a result: {content}")
            if kind == "error":
                raise content
            if kind == "result":
                results[rank] = content
            elif kind == "compile" and on_compile is not None:
                on_compile(compile_sentence(*content))
            elif on_report is not None:
                on_report(rank, content)
    return [results[rank] for rank in range(len(ranks))]


def _message_of(forked: ForkedRank) -> tuple[str, Any]:
    """What a rank has sent: its kind and its content."""
    try:
        message: tuple[str, Any] = forked.pipe.recv()
    except (EOFError, ConnectionResetError):
        return "died", forked.how_it_ended(LEAVE_TIMEOUT_S)
    return message


def _serve(
    pipe: Connection,
    rank: int,
    num_ranks: int,
    place: str,
    placement: Placement,
    reports_compilation: bool,
    work: tuple[Callable[..., Any], tuple[Any, ...]],
) -> None:
    """The main function of a rank's process."""
    enter_rank()
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
        group = join_group(place, rank, num_ranks)
        function, arguments = work
        result = function(
            Rank(rank, num_ranks, group, lambda thing: pipe.send(("report", thing))), *arguments
        )
        dist.barrier()
        pipe.send(("result", result))
    except BaseException as error:
        pipe.send(("error", _sendable(error)))
    # Exit at once: destructors of libraries are not needed.
    os._exit(0)


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return AnyEPError(f"{type(error).__name__}: {error}")
    return error
