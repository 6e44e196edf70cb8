"""Times the cases of `anyep bench --device cuda`, and records the results.

All ranks run a case at the same time: launched call by call, or replayed as a CUDA graph of one call. CUDA
events measure the time of a run of calls; in low-latency mode, of each call. Before its first event a rank
makes one more call together with all ranks, to start at the same time. The slowest rank's time is reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist

from anyep.cli.bench_measure import WARM_UP, GpuRecord, ProgressLine, Report, Setup
from anyep.cli.gpus import Placement, in_words
from anyep.cli.histogram import percentile
from anyep.cli.ranks import Rank, run_ranks
from anyep.errors import AnyEPError, InvalidCall

CALLS_IN_A_RUN: Final = {"normal": 10, "low-latency": 40}
SWEPT_SMS: Final = (4, 8, 12, 16, 20, 24, 28, 32)
ENOUGH: Final = 0.8
"""Share of the best rate at which a number of SMs counts as enough."""


@dataclass(frozen=True)
class Label:
    """Describes a case: the bytes of rows that this rank receives, and the cases it is compared with.

    Its bounds are paths of plain copies, whose times add up; its rival is the alternative without AnyEP.
    """

    case: str
    path: str
    tokens: int
    num_bytes: int
    sms: int | None = None
    bounds: tuple[str, ...] = ()
    rival: str = ""
    is_swept: bool = False


@dataclass(frozen=True)
class GpuCase:
    """What is timed, and how its result is checked.

    A case without communication needs a call of all ranks to start them together: `meet`.
    """

    label: Label
    work: Callable[[], Any]
    is_right: Callable[[Any], bool]
    in_graph: bool = False
    meet: Callable[[], Any] | None = None


@dataclass(frozen=True)
class GpuTiming:
    """One case on one rank: seconds per call, for each run or each call."""

    label: Label
    seconds: list[float]


@dataclass(frozen=True)
class RankReport:
    """The results of one rank."""

    gpu: str
    num_sms: int
    sms: int | None
    timings: list[GpuTiming]


def equals(right: torch.Tensor) -> Callable[[Any], bool]:
    """A check that a call returned these rows, alone or as its first result."""
    return lambda result: torch.equal(result[0] if isinstance(result, tuple) else result, right)


def copy_of(source: torch.Tensor, label: Label, meet: Callable[[], Any], in_graph: bool = False) -> GpuCase:
    """The bound: a copy of the received data within the GPU, on all ranks at once."""
    target = torch.empty_like(source)
    return GpuCase(label, lambda: (target.copy_(source),), equals(source), in_graph, meet)


# The command


def measure(setup: Setup, placement: Placement, show_progress: bool) -> Report:
    """Run every case on the GPUs of `placement`."""
    with ProgressLine(show_progress) as progress:

        def on_report(rank: int, doing: Any) -> None:
            if rank == 0:
                progress.show(doing)

        progress.show("starting ranks, preparing kernels")
        by_rank: list[RankReport] = run_ranks(
            setup.ranks,
            _measure_on_rank,
            setup,
            placement.num_gpus,
            on_report=on_report,
            on_compile=progress.show if show_progress else None,
            placement=placement,
        )
    no_rival = setup.mode == "normal" and setup.ranks > placement.num_gpus
    return Report(
        _description(setup, placement, by_rank[0]),
        records_of(setup, by_rank),
        "NCCL refuses ranks that share a GPU: there is nothing else to compare with" if no_rival else "",
    )


def _description(setup: Setup, placement: Placement, report: RankReport) -> str:
    calls = CALLS_IN_A_RUN[setup.mode]
    sms = f" {report.sms} SMs per rank," if report.sms else ""
    times = (
        f"medians of {setup.repeats} runs of {calls} calls"
        if setup.mode == "normal"
        else f"percentiles of {setup.repeats * calls} calls"
    )
    return (
        f"{setup.mode} mode, {setup.ranks} ranks on {in_words(placement.num_gpus)} ({report.gpu},"
        f" {report.num_sms} SMs),{sms} {setup.tokens} tokens per rank, hidden {setup.hidden} bf16,"
        f" top-{setup.topk} of {setup.experts} experts; {times}, of the slowest rank"
    )


def records_of(setup: Setup, by_rank: list[RankReport]) -> list[GpuRecord]:
    """The records of all ranks together; those of the sweep come last."""
    cases = list(zip(*(report.timings for report in by_rank), strict=True))
    slowest = [
        [max(times) for times in zip(*(timing.seconds for timing in timings), strict=True)]
        for timings in cases
    ]
    medians = {
        (timings[0].label.case, timings[0].label.path, timings[0].label.tokens): statistics.median(seconds)
        for timings, seconds in zip(cases, slowest, strict=True)
        if not timings[0].label.is_swept
    }
    records = []
    for timings, seconds in zip(cases, slowest, strict=True):
        label = timings[0].label
        if label.path == "nccl":
            continue  # only for comparison
        median = statistics.median(seconds)
        received = statistics.mean(timing.label.num_bytes for timing in timings)
        bound = sum(medians["copy", copy, label.tokens] for copy in label.bounds)
        rival = medians.get((label.case, label.rival, label.tokens))
        records.append(
            GpuRecord(
                label.case,
                label.path,
                setup.ranks,
                label.tokens,
                setup.hidden,
                round(received),
                median,
                received / median / 1e9,
                bound / median if bound and received else None,
                {label.rival: rival / median} if rival else {},
                setup.device,
                by_rank[0].gpu,
                label.sms,
                percentile(seconds, 0.99) if setup.mode == "low-latency" else None,
                label.is_swept,
            )
        )
    # Records of one case are adjacent, whatever the order of measurement.
    places = {record.case: place for place, record in reversed(list(enumerate(records)))}
    records.sort(key=lambda record: (record.swept, -record.tokens, places[record.case]))
    return _mark_enough(records)


def _mark_enough(records: list[GpuRecord]) -> list[GpuRecord]:
    enough = {}
    for case in {record.case for record in records if record.swept}:
        rates = {record.sms or 0: record.gbps for record in records if record.swept and record.case == case}
        enough[case] = fewest_sms(rates)
    return [replace(record, enough=record.swept and record.sms == enough[record.case]) for record in records]


def fewest_sms(rates: Mapping[int, float]) -> int:
    """The fewest SMs that reach 80 % of the best rate.

    >>> fewest_sms({4: 205.0, 8: 392.0, 16: 701.0, 24: 912.0, 32: 1004.0})
    24
    """
    return min(sms for sms, rate in rates.items() if rate >= ENOUGH * max(rates.values()))


# The ranks


def _measure_on_rank(rank: Rank, setup: Setup, num_gpus: int) -> RankReport:
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    ranks_on_a_gpu = Placement(num_gpus).ranks_on_a_gpu(setup.ranks)
    room = facts.multi_processor_count // ranks_on_a_gpu // 2 * 2
    sms = _sms_of(setup, facts.multi_processor_count, ranks_on_a_gpu, room)
    timings = []
    for case in _cases_of(rank, setup, sms, room, with_nccl=ranks_on_a_gpu == 1):
        label = case.label
        swept = f", {label.sms} SMs" if label.is_swept else ""
        rank.report(f"{label.tokens} tokens: {label.case}, {label.path}{swept}")
        timings.append(GpuTiming(label, _seconds_of(rank, setup, case)))
    return RankReport(facts.name, facts.multi_processor_count, sms, timings)


def _sms_of(setup: Setup, num_sms: int, ranks_on_a_gpu: int, room: int) -> int | None:
    """SMs per rank: as requested, or the default if there is room; low-latency calls choose their own."""
    from anyep.api.buffer import Buffer

    if setup.mode != "normal":
        return None
    if (setup.sms or 2) > room:
        wanted = "a rank needs at least 2 SMs" if setup.sms is None else f"--sms is {setup.sms}"
        raise InvalidCall(
            f"{wanted}, but {ranks_on_a_gpu} ranks on a GPU with {num_sms} SMs have {room}"
            " each, since all of them must run at once: choose fewer SMs or fewer ranks"
        )
    return setup.sms or min(Buffer.num_sms, room)


def _cases_of(rank: Rank, setup: Setup, sms: int | None, room: int, with_nccl: bool) -> Iterator[GpuCase]:
    """Every case; each is finished when the next one is requested."""
    if sms is None:
        from anyep.cli import bench_cuda_low_latency

        for tokens in dict.fromkeys((setup.tokens, 1)):
            yield from bench_cuda_low_latency.cases_of(rank, setup, tokens)
        return
    from anyep.cli import bench_cuda_normal

    for tokens in dict.fromkeys((setup.tokens, 1)):
        yield from bench_cuda_normal.cases_of(rank, setup, tokens, sms, with_nccl)
    if setup.sweep_sms:
        yield from bench_cuda_normal.sweep_of(rank, setup, [swept for swept in SWEPT_SMS if swept <= room])


def _seconds_of(rank: Rank, setup: Setup, case: GpuCase) -> list[float]:
    for _ in range(WARM_UP):
        _check(rank, case, case.work())
    work = case.work
    if case.in_graph:
        work, result = _captured(case.work)
        _spoil(result)
        # No rank may write to the result before `_spoil` has finished.
        torch.cuda.synchronize()
        dist.barrier(rank.group)
        work()
        _check(rank, case, result)
    calls = CALLS_IN_A_RUN[setup.mode]
    portions = [1] * calls if setup.mode == "low-latency" else [calls]
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(len(portions) + 1)]  # type: ignore[no-untyped-call]
    seconds = []
    for _ in range(setup.repeats):
        torch.cuda.synchronize()
        dist.barrier(rank.group)
        (case.meet or work)()
        marks[0].record()
        for portion, mark in zip(portions, marks[1:], strict=True):
            for _ in range(portion):
                work()
            mark.record()
        torch.cuda.synchronize()
        seconds += [
            begin.elapsed_time(end) / portion / 1e3
            for (begin, end), portion in zip(pairwise(marks), portions, strict=True)
        ]
    return seconds


def _captured(work: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """Capture a call as a CUDA graph: returns its replay function and its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


def _check(rank: Rank, case: GpuCase, result: Any) -> None:
    """Raise if the result is wrong. Overwrite a right one, so that stale data cannot pass the next check."""
    if not case.is_right(result):
        raise AnyEPError(
            f"{case.label.case} ({case.label.path}, {case.label.tokens} tokens) gave a wrong result on rank"
            f" {rank.rank}: please report this, with the command"
        )
    _spoil(result)


def _spoil(result: Any) -> None:
    """Overwrite the rows of a result: the first value that a call returns, or a pair."""
    rows = result[0] if isinstance(result, tuple) else None
    for part in rows if isinstance(rows, tuple) else (rows,):
        if isinstance(part, torch.Tensor):
            (part.view(torch.uint8) if part.itemsize == 1 else part).fill_(77)
