"""Times the cases of `anyep bench`, and records the results.

All ranks run a case at the same time. The clock starts when the last rank enters the barrier before the case
and stops when the last rank is done: with more ranks than cores, the clock of a single rank is meaningless.
The cases are interleaved, so that a slow moment of the machine affects them alike.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from anyep.cli.nodes import ONE_NODE, Nodes, limit_in_words, nodes_in_words
from anyep.cli.ranks import Rank, run_ranks
from anyep.machine import num_cores

WARM_UP: Final = 3


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    mode: str
    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    repeats: int
    seed: int
    device: str = "cpu"
    sms: int | None = None
    sweep_sms: bool = False
    nodes: Nodes = ONE_NODE

    @property
    def row_bytes(self) -> int:
        return 2 * self.hidden

    def description(self) -> str:
        nodes = self.nodes
        place = nodes_in_words(nodes.num_nodes, nodes.ranks_per_node, ",")
        limit = limit_in_words(nodes.num_nodes, nodes.topk_nodes)
        return (
            f"{self.mode} mode, {self.ranks} ranks{place} on {num_cores()} cores,"
            f" {self.tokens} tokens per rank, hidden {self.hidden} bf16, top-{self.topk} of {self.experts}"
            f" experts{limit}; medians of {self.repeats} interleaved repeats"
        )


class Crossing(NamedTuple):
    """Bytes that a rank sends to other nodes; and in a plain all-to-all, with one row per receiving rank."""

    num_bytes: int
    all_to_all_bytes: int


@dataclass(frozen=True)
class Case:
    """What is timed, the bytes of rows that this rank receives, and the cases that it is compared with.

    Its bound is a plain copy, or several, and its rival is the alternative without AnyEP; both are paths.
    """

    name: str
    path: str
    tokens: int
    num_bytes: int
    work: Callable[[], Any]
    bound: tuple[str, ...] = ()
    rival: str = ""
    crossing: Crossing | None = None


@dataclass(frozen=True)
class Timing:
    """One case on one rank: (start, end) in ns per repeat, and the bytes of rows that it received."""

    case: str
    path: str
    tokens: int
    num_bytes: int
    bound: tuple[str, ...]
    rival: str
    crossing: Crossing | None
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class Record:
    """One line of the table: bytes and rate are those that a rank receives, on average."""

    case: str
    path: str
    ranks: int
    tokens: int
    hidden: int
    bytes: int
    median_s: float
    gbps: float
    of_copy: float | None
    vs: dict[str, float]


@dataclass(frozen=True)
class NodesRecord(Record):
    """The same across nodes. Bytes between nodes are those that a rank sends there, on average."""

    nodes: int
    ranks_per_node: int
    topk_nodes: int
    network: str
    bytes_between_nodes: int | None
    all_to_all_bytes_between_nodes: int | None


@dataclass(frozen=True)
class GpuRecord(Record):
    """The same on GPUs, where the median may be that of single calls; then there is a p99 too.

    A record of the sweep over numbers of SMs is `swept`, and `enough` if it has the fewest SMs that are fast
    enough.
    """

    device: str
    gpu: str
    sms: int | None
    p99_s: float | None
    swept: bool = False
    enough: bool = False


@dataclass(frozen=True)
class Report:
    """A description of the measurement; the records in the order of the table; further notes."""

    description: str
    records: Sequence[Record]
    note: str = ""

    @property
    def cases(self) -> list[Record]:
        return [record for record in self.records if not (isinstance(record, GpuRecord) and record.swept)]

    @property
    def sweep(self) -> list[GpuRecord]:
        return [record for record in self.records if isinstance(record, GpuRecord) and record.swept]


class ProgressLine:
    """Shows what rank 0 is doing, in one terminal line that is rewritten, and erased at the end."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._width = 0

    def show(self, text: str) -> None:
        if self._is_shown:
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")
        self.show("")


def measure(setup: Setup, show_progress: bool) -> Report:
    """Run every case."""
    with ProgressLine(show_progress) as progress:

        def on_report(rank: int, done: Any) -> None:
            if rank == 0:
                tokens, repeat, repeats = done
                progress.show(f"{tokens} tokens: repeat {repeat} of {repeats}")

        progress.show("starting ranks")
        on_compile = progress.show if show_progress else None
        by_rank: list[list[Timing]] = run_ranks(
            setup.ranks, measure_on_rank, setup, on_report=on_report, on_compile=on_compile
        )
    return Report(setup.description(), records_of(setup, by_rank))


def medians_of(by_rank: list[list[Timing]]) -> dict[tuple[str, str, int], float]:
    """Seconds of each case, by its name, path and tokens."""
    medians: dict[tuple[str, str, int], float] = {}
    for timings in zip(*by_rank, strict=True):
        durations = [
            (max(end for _, end in spans) - max(start for start, _ in spans)) / 1e9
            for spans in zip(*(timing.spans for timing in timings), strict=True)
        ]
        medians[timings[0].case, timings[0].path, timings[0].tokens] = statistics.median(durations)
    return medians


def records_of(setup: Setup, by_rank: list[list[Timing]]) -> list[Record]:
    """The measurements of all ranks, in the order of the table."""
    medians = medians_of(by_rank)
    records: list[Record] = []
    for timings in zip(*by_rank, strict=True):
        case, path, tokens = timings[0].case, timings[0].path, timings[0].tokens
        if not timings[0].bound and not timings[0].rival and timings[0].num_bytes:
            continue  # a copy or a rival: only for comparison
        seconds = medians[case, path, tokens]
        received = statistics.mean(timing.num_bytes for timing in timings)
        bound = sum(medians["copy", copy, tokens] for copy in timings[0].bound)
        rival = medians.get((case, timings[0].rival, tokens))
        record = Record(
            case,
            path,
            setup.ranks,
            tokens,
            setup.hidden,
            round(received),
            seconds,
            received / seconds / 1e9,
            bound / seconds if bound and received else None,
            {"gloo": rival / seconds} if rival else {},
        )
        records.append(_with_nodes(record, setup, timings) if setup.nodes.are_several else record)
    return records


def _with_nodes(record: Record, setup: Setup, timings: Sequence[Timing]) -> NodesRecord:
    nodes = setup.nodes
    crossings = [timing.crossing for timing in timings if timing.crossing is not None]
    sent, plain = (
        [round(statistics.mean(numbers)) for numbers in zip(*crossings, strict=True)]
        if crossings
        else (None, None)
    )
    return NodesRecord(
        **vars(record),
        nodes=nodes.num_nodes,
        ranks_per_node=nodes.ranks_per_node,
        topk_nodes=nodes.topk_nodes,
        network=nodes.network,
        bytes_between_nodes=sent,
        all_to_all_bytes_between_nodes=plain,
    )


class Barrier:
    """A barrier in shared memory: the ranks leave it within microseconds of each other."""

    def __init__(self, rank: Rank) -> None:
        import numpy as np
        import torch.distributed as dist

        from anyep.backends import cpu

        self._cpu = cpu
        own = cpu.OwnBlock("barrier", 128 * (rank.num_ranks + 1))
        addresses: list[Any] = [None] * rank.num_ranks
        dist.all_gather_object(addresses, own.share())
        blocks = [
            own if peer == rank.rank else cpu.open_block(address, peer)
            for peer, address in enumerate(addresses)
        ]
        self._blocks = blocks
        self._theirs = np.array([block.address + 128 * rank.rank for block in blocks], np.int64)
        self._mine = np.array([own.address + 128 * peer for peer in range(rank.num_ranks)], np.int64)
        self._wake_ups = np.array([block.address + 128 * rank.num_ranks for block in blocks], np.int64)
        self._own_wake_up = int(self._wake_ups[rank.rank])
        self._missing = np.ones(rank.num_ranks, np.bool_)
        self._untimed = np.zeros(0, np.int64)
        self._count = 0

    def wait(self) -> None:
        self._count += 1
        self._cpu.signal(self._theirs, self._wake_ups, 0, self._count)
        self._missing[:] = True
        arguments = (
            self._mine,
            self._count,
            self._missing,
            0,
            self._cpu.MAX_POLLS,
            self._own_wake_up,
            0,
            self._untimed,
            0,
        )
        while self._cpu.await_counters(*arguments):
            pass


def measure_on_rank(rank: Rank, setup: Setup) -> list[Timing]:
    """Every case, timed on this rank together with all others."""
    if setup.mode == "normal":
        from anyep.cli.bench_normal import cases_of
    else:
        from anyep.cli.bench_low_latency import cases_of
    barrier = Barrier(rank)
    timings = []
    for tokens in dict.fromkeys((setup.tokens, 1)):
        # With one token, the latency in a loop is measured: each repeat of a case is a run of calls.
        timings += time_cases(rank, setup, barrier, cases_of(rank, setup, tokens), 1 if tokens > 1 else 10)
    return timings


def time_cases(
    rank: Rank, setup: Setup, barrier: Barrier, cases: list[Case], run_length: int
) -> list[Timing]:
    """Repeat the cases, each time in another order, which is the same on every rank."""
    spans: list[list[tuple[int, int]]] = [[] for _ in cases]
    order = list(range(len(cases)))
    # All ranks shuffle alike. Shuffling prevents a case from always following the same one.
    shuffle = random.Random(setup.seed).shuffle
    for repeat in range(setup.repeats + WARM_UP):
        rank.report((cases[0].tokens, max(0, repeat - WARM_UP + 1), setup.repeats))
        shuffle(order)
        for index in order:
            work = cases[index].work
            for _ in range(run_length):
                barrier.wait()
                start = time.monotonic_ns()
                barrier.wait()
                result = work()
                end = time.monotonic_ns()
                del result
                if repeat >= WARM_UP:
                    spans[index].append((start, end))
    # The Buffers are dropped with the cases, but not before every rank has left its last call.
    barrier.wait()
    return [
        Timing(
            case.name,
            case.path,
            case.tokens,
            case.num_bytes,
            case.bound,
            case.rival,
            case.crossing,
            spans[index],
        )
        for index, case in enumerate(cases)
    ]
