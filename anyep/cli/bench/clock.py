"""How a device takes the times of the cases of `anyep bench`.

A case says what to call and what must come back; a `Clock` calls it often enough, checks the first results,
and returns times. Cases come in groups that share a Buffer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist

from anyep.backends import cpu
from anyep.cli.bench.records import Label, RankReport, Setup, Timing
from anyep.cli.gpus import Placement, in_words
from anyep.cli.nodes import nodes_in_words
from anyep.cli.ranks import Rank
from anyep.core.diagnosis import listed
from anyep.errors import AnyEPError, InvalidCall, WaitTimeout
from anyep.machine import num_cores
from anyep.settings import TIMEOUT_S

WARM_UP: Final = 3
"""Calls of a case before it is timed; their results are checked."""
UNCHECKED: Final = 1
"""On the CPU the last of them are not: a check leaves other data in the caches than a call does."""
ROUNDINGS: Final = 2.0**-6
"""How far a bf16 result may differ from another that was rounded elsewhere, relative to the largest."""
CALLS_IN_A_LOOP: Final = 10
"""On the CPU with one token, each repeat of a case is a run of calls: the latency in a loop is measured. In a
sweep over tokens each repeat is one too, whatever the number, so that its points can be compared."""
CALLS_IN_A_RUN: Final = {"normal": 10, "low-latency": 40}
"""On a GPU."""


def spoil_rows(result: Any) -> None:
    """Overwrite the rows of a result: the first value that a call returns, or a pair."""
    rows = result[0] if isinstance(result, tuple) else None
    for part in rows if isinstance(rows, tuple) else (rows,):
        if isinstance(part, torch.Tensor):
            (part.view(torch.uint8) if part.itemsize == 1 else part).fill_(77)


@dataclass(frozen=True)
class Case:
    """What is timed, and how its result is checked.

    `spoil` overwrites a right result, so that stale data cannot pass the next check. A case without
    communication needs a call of all ranks to start them together on a GPU: `barrier`. `checkable` is the
    same call with values that can be checked, where providing them would cost time in every call.
    """

    label: Label
    work: Callable[[], Any]
    is_right: Callable[[Any], bool]
    in_graph: bool = False
    barrier: Callable[[], Any] | None = None
    checkable: Callable[[], Any] | None = None
    spoil: Callable[[Any], None] = spoil_rows


class WrongResult(AnyEPError):
    """A case gave a result that is not right."""


Group = AbstractContextManager[Sequence[Case]]
"""Cases that share a Buffer, which lives inside the context; entered on all ranks together."""


def equals(right: torch.Tensor) -> Callable[[Any], bool]:
    """A check that a call returned these rows, alone or as its first result."""
    return lambda result: torch.equal(result[0] if isinstance(result, tuple) else result, right)


def is_close(right: torch.Tensor, tolerance: float) -> Callable[[Any], bool]:
    """A check that a call returned about these rows, alone or as its first result."""

    def check(result: Any) -> bool:
        ours = result[0] if isinstance(result, tuple) else result
        if ours.shape != right.shape or not right.numel():
            return bool(ours.shape == right.shape)
        distance = (ours.float() - right.float()).abs().max()
        return bool(distance <= tolerance * right.float().abs().max())

    return check


class Clock(Protocol):
    """How a device takes times."""

    sms: int | None
    """SMs per rank in normal mode, on a GPU."""
    most_sms: int
    """The SMs that each rank can have, since all ranks of a GPU must run at once; 0 on the CPU."""
    has_graphs: bool
    """Whether calls can be captured and replayed."""
    rival: str
    """What a user would otherwise call: gloo or nccl; empty where it cannot run."""

    def time(self, tokens: int, groups: Iterable[Group]) -> list[Timing]:
        """Time every case of all groups, together with all other ranks."""

    def copy_of(self, source: torch.Tensor) -> Callable[[], Any]:
        """The bound: a plain copy of the rows of `source` [rows, row size], as its result."""

    def report(self, timings: list[Timing]) -> RankReport:
        """The results of this rank."""


def clock_of(rank: Rank, setup: Setup, num_gpus: int) -> Clock:
    """The clock of this rank; collective."""
    return CudaClock(rank, setup, num_gpus) if setup.device == "cuda" else CpuClock(rank, setup)


class CpuClock:
    """All ranks run a case at the same time, between shared-memory barriers.

    The clock starts when the last rank enters the barrier before the case and stops when the last rank is
    done: with more ranks than cores, the clock of a single rank is meaningless. The cases are interleaved, so
    that a slow moment of the machine affects them alike, and shuffled, so that none always follows the same
    one.
    """

    sms: int | None = None
    most_sms = 0
    has_graphs = False
    rival = "gloo"

    def __init__(self, rank: Rank, setup: Setup) -> None:
        self._rank = rank
        self._setup = setup
        self._barrier = Barrier(rank)
        self._block: cpu.OwnBlock | None = None

    def time(self, tokens: int, groups: Iterable[Group]) -> list[Timing]:
        with ExitStack() as stack:
            cases = [case for group in groups for case in stack.enter_context(group)]
            in_a_loop = tokens == 1 or cases[0].label.sweep == "tokens"
            return self.time_cases(cases, CALLS_IN_A_LOOP if in_a_loop else 1)

    def time_cases(self, cases: Sequence[Case], run_length: int) -> list[Timing]:
        """Repeat the cases, each time in another order, which is the same on every rank."""
        spans: list[list[tuple[float, float]]] = [[] for _ in cases]
        order = list(range(len(cases)))
        shuffle = random.Random(self._setup.seed).shuffle
        repeats = self._setup.repeats
        for repeat in range(repeats + WARM_UP):
            at = max(0, repeat - WARM_UP + 1)
            self._rank.report(f"{cases[0].label.tokens} tokens: repeat {at} of {repeats}")
            is_timed = repeat >= WARM_UP
            shuffle(order)
            for index in order:
                for _ in range(run_length):
                    span = self._time_call(cases[index], is_checked=repeat < WARM_UP - UNCHECKED)
                    if is_timed:
                        spans[index].append(span)
        # The Buffers end with the cases, but not before every rank has left its last call.
        self._barrier.wait()
        return [Timing(case.label, times) for case, times in zip(cases, spans, strict=True)]

    def _time_call(self, case: Case, is_checked: bool) -> tuple[float, float]:
        work = (case.checkable or case.work) if is_checked else case.work
        self._barrier.wait()
        start = time.monotonic_ns()
        self._barrier.wait()
        result = work()
        end = time.monotonic_ns()
        if is_checked:
            check(self._rank, case, result)
        return start / 1e9, end / 1e9

    def copy_of(self, source: torch.Tensor) -> Callable[[], Any]:
        num_rows, row_bytes = source.shape[0], source.shape[1] * source.itemsize
        # Copies share one target: the less memory is in use, the less the caches matter to all cases.
        if self._block is None or self._block.num_bytes < source.nbytes:
            self._block = cpu.OwnBlock("copy", max(source.nbytes, 128))
        block = self._block
        target = block.tensor(0, tuple(source.shape), source.dtype)

        def copy() -> Any:
            cpu.copy_rows(block.address, source.data_ptr(), num_rows, row_bytes, 0)
            return (target,)

        return copy

    def report(self, timings: list[Timing]) -> RankReport:
        nodes = self._setup.nodes
        return RankReport(
            timings,
            f"{nodes_in_words(nodes.num_nodes, nodes.ranks_per_node, ',')} on {num_cores()} cores",
            f"medians of {self._setup.repeats} interleaved repeats",
        )


class Barrier:
    """A barrier in shared memory: the ranks leave it within microseconds of each other."""

    def __init__(self, rank: Rank) -> None:
        own = cpu.OwnBlock("barrier", 128 * (rank.num_ranks + 1))
        addresses: list[Any] = [None] * rank.num_ranks
        dist.all_gather_object(addresses, own.share(), group=rank.group)
        self._blocks = [
            own if peer == rank.rank else cpu.open_block(address, peer)
            for peer, address in enumerate(addresses)
        ]
        self._theirs = np.array([block.address + 128 * rank.rank for block in self._blocks], np.int64)
        self._mine = np.array([own.address + 128 * peer for peer in range(rank.num_ranks)], np.int64)
        self._wake_ups = np.array([block.address + 128 * rank.num_ranks for block in self._blocks], np.int64)
        self._own_wake_up = int(self._wake_ups[rank.rank])
        self._missing = np.ones(rank.num_ranks, np.bool_)
        self._untimed = np.zeros(0, np.int64)
        self._count = 0
        self._timeout_s = TIMEOUT_S.choose().value

    def wait(self) -> None:
        """Wait for all ranks; `WaitTimeout` names those that have not come in time."""
        self._count += 1
        cpu.signal(self._theirs, self._wake_ups, 0, self._count)
        self._missing[:] = True
        arguments = (
            self._mine,
            self._count,
            self._missing,
            0,
            cpu.MAX_POLLS,
            self._own_wake_up,
            0,
            self._untimed,
            0,
        )
        deadline = time.monotonic() + self._timeout_s
        while cpu.await_counters(*arguments):
            if time.monotonic() > deadline:
                late = listed(np.flatnonzero(self._missing).tolist())
                raise WaitTimeout(
                    f"for {self._timeout_s:g} s the ranks have waited for {late} to start a case together."
                    f" If a case only takes longer, set ANYEP_TIMEOUT_S"
                )


class CudaClock:
    """All ranks run a case at the same time: launched call by call, or replayed as a graph of one call.

    CUDA events measure the time of a run of calls; in low-latency mode, of each call. Before its first event
    a rank makes one more call together with all ranks, to start at the same time. The slowest rank's time
    counts.
    """

    has_graphs = True

    def __init__(self, rank: Rank, setup: Setup, num_gpus: int) -> None:
        self._rank = rank
        self._setup = setup
        self._num_gpus = num_gpus
        self._facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        ranks_on_a_gpu = Placement(num_gpus).ranks_on_a_gpu(setup.ranks)
        self.most_sms = self._facts.multi_processor_count // ranks_on_a_gpu // 2 * 2
        self.sms = self._choose_sms(ranks_on_a_gpu)
        self.rival = "nccl" if ranks_on_a_gpu == 1 else ""

    def _choose_sms(self, ranks_on_a_gpu: int) -> int | None:
        """SMs per rank: as requested, or the default if there is room; low-latency calls choose their own."""
        from anyep.api.buffer import Buffer

        setup, room = self._setup, self.most_sms
        if setup.mode != "normal":
            return None
        if (setup.sms or 2) > room:
            wanted = "a rank needs at least 2 SMs" if setup.sms is None else f"--sms is {setup.sms}"
            raise InvalidCall(
                f"{wanted}, but {ranks_on_a_gpu} ranks on a GPU with {self._facts.multi_processor_count} SMs"
                f" have {room} each, since all of them must run at once: choose fewer SMs or fewer ranks"
            )
        return setup.sms or min(Buffer.num_sms, room)

    def time(self, tokens: int, groups: Iterable[Group]) -> list[Timing]:
        timings = []
        for group in groups:
            with group as cases:
                for case in cases:
                    label = case.label
                    swept = f", {label.sms} SMs" if label.sweep == "sms" else ""
                    self._rank.report(f"{tokens} tokens: {label.case}, {label.path}{swept}")
                    self.warm_up(case)
                    seconds, host = self.seconds_of(case)
                    timings.append(Timing(label, [(0.0, duration) for duration in seconds], host))
        return timings

    def warm_up(self, case: Case) -> None:
        """Call a case a few times, and check what it gives."""
        for _ in range(WARM_UP):
            check(self._rank, case, (case.checkable or case.work)())

    def seconds_of(self, case: Case) -> tuple[list[float], list[float]]:
        """Seconds per call of a warm case, for each run or each call; and those of the host, by run, unless a
        graph is replayed."""
        work = case.work
        if case.in_graph:
            work, result = _captured(case.work)
            case.spoil(result)
            # No rank may write to the result before it has been spoilt.
            torch.cuda.synchronize()
            dist.barrier(self._rank.group)
            work()
            check(self._rank, case, result)
        calls = CALLS_IN_A_RUN[self._setup.mode]
        portions = [1] * calls if self._setup.mode == "low-latency" else [calls]
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(len(portions) + 1)]  # type: ignore[no-untyped-call]
        seconds, host = [], []
        for _ in range(self._setup.repeats):
            torch.cuda.synchronize()
            dist.barrier(self._rank.group)
            (case.barrier or work)()
            marks[0].record()
            started = time.perf_counter()
            for portion, mark in zip(portions, marks[1:], strict=True):
                for _ in range(portion):
                    work()
                mark.record()
            host.append((time.perf_counter() - started) / calls)
            torch.cuda.synchronize()
            seconds += [
                begin.elapsed_time(end) / portion / 1e3
                for (begin, end), portion in zip(pairwise(marks), portions, strict=True)
            ]
        return seconds, [] if case.in_graph else host

    def copy_of(self, source: torch.Tensor) -> Callable[[], Any]:
        """A copy within the GPU."""
        target = torch.empty_like(source)
        return lambda: (target.copy_(source),)

    def report(self, timings: list[Timing]) -> RankReport:
        calls, repeats = CALLS_IN_A_RUN[self._setup.mode], self._setup.repeats
        times = (
            f"medians of {repeats} runs of {calls} calls"
            if self._setup.mode == "normal"
            else f"percentiles of {repeats * calls} calls"
        )
        gpu = f"{self._facts.name}, {self._facts.multi_processor_count} SMs"
        nodes = nodes_in_words(self._setup.nodes.num_nodes, self._setup.nodes.ranks_per_node, ",")
        sms = f", {self.sms} SMs per rank" if self.sms else ""
        return RankReport(
            timings,
            f"{nodes} on {in_words(self._num_gpus)} ({gpu}){sms}",
            f"{times}, of the slowest rank",
            self._facts.name,
        )


def _captured(work: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """Capture a call as a CUDA graph: returns its replay function and its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


def check(rank: Rank, case: Case, result: Any) -> None:
    """Raise if the result is wrong; otherwise spoil it."""
    if not case.is_right(result):
        label = case.label
        raise WrongResult(
            f"{label.case} ({label.path}, {label.tokens} tokens) gave a wrong result on rank {rank.rank}:"
            " please report this, with the command"
        )
    case.spoil(result)
