"""What `anyep demo --mode low-latency` shows: latencies, in numbers and as pictures, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from anyep.cli.demo.job import COMMUNICATION, PHASES, DecodeJob, DecodeReport, Difference
from anyep.cli.gpus import in_words
from anyep.cli.histogram import Latency, bar, latency_of, marks_of, percentile
from anyep.cli.nodes import limit_in_words, nodes_in_words
from anyep.cli.units import format_seconds
from anyep.machine import num_cores

if TYPE_CHECKING:
    from rich.console import Console

TOLERANCE: Final = 2.0**-6
"""Largest difference from the reference, relative to the largest entry.

Both round to bf16 twice, an expert's output and the sum of a token's outputs, after float32 sums that may
differ in their last bits. Each rounding may therefore differ by one bf16 step, at most 2**-7 of an entry.
"""
MAX_DIFFERENT_SHARE: Final = 0.02
"""Largest share of entries that differ at all. Such roundings are rare, fewer than 1 in 100: many small
differences indicate an error that the tolerance would hide."""
BAR_WIDTH: Final = 40


@dataclass(frozen=True)
class PhaseTimes:
    """A phase of a micro-batch, over all ranks and steps."""

    p50_s: float
    p99_s: float


@dataclass(frozen=True)
class DecodeRecord:
    """All results of the demo; `--json` prints them."""

    mode: str
    device: str
    gpus: int
    ranks: int
    nodes: int
    ranks_per_node: int
    topk_nodes: int
    network: str | None
    cores: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    steps: int
    ok: bool
    largest_difference: float
    tolerance: float
    entries: int
    different_entries: int
    max_different_share: float
    tokens_per_second: float
    phases: dict[str, PhaseTimes]
    step: Latency
    pair: Latency


def is_ok(difference: Difference) -> bool:
    return (
        difference.largest <= TOLERANCE
        and difference.num_different <= MAX_DIFFERENT_SHARE * difference.num_entries
    )


def record_of(job: DecodeJob, num_gpus: int, by_rank: list[DecodeReport]) -> DecodeRecord:
    difference = sum((report.difference for report in by_rank), Difference())
    phases = {phase: [s for report in by_rank for s in report.phase_seconds[phase]] for phase in PHASES}
    pairs = [sum(parts) for parts in zip(*(phases[phase] for phase in COMMUNICATION), strict=True)]
    slowest = max(sum(report.step_seconds) for report in by_rank)
    return DecodeRecord(
        "low-latency",
        job.device,
        num_gpus,
        job.ranks,
        job.nodes.num_nodes,
        job.ranks // job.nodes.num_nodes,
        job.nodes.topk_nodes,
        job.nodes.network if job.nodes.are_several else None,
        num_cores(),
        job.tokens,
        job.hidden,
        job.experts,
        job.topk,
        job.steps,
        is_ok(difference),
        difference.largest,
        TOLERANCE,
        difference.num_entries,
        difference.num_different,
        MAX_DIFFERENT_SHARE,
        job.ranks * job.tokens * job.steps / slowest,
        {
            phase: PhaseTimes(percentile(seconds, 0.5), percentile(seconds, 0.99))
            for phase, seconds in phases.items()
        },
        latency_of([seconds for report in by_rank for seconds in report.step_seconds]),
        latency_of(pairs),
    )


def print_record(record: DecodeRecord) -> None:
    from rich import box
    from rich.table import Table

    from anyep.cli.console import console_for_results

    console = console_for_results()
    place = in_words(record.gpus) if record.gpus else f"{record.cores} cores"
    nodes = nodes_in_words(record.nodes, record.ranks_per_node, ",")
    limit = limit_in_words(record.nodes, record.topk_nodes)
    console.print(
        f"[bold]{record.ranks} ranks[/bold]{nodes} on {place}, {record.tokens} tokens"
        f" per rank and step, hidden {record.hidden}, top-{record.topk} of {record.experts} experts{limit},"
        f" {record.steps} steps"
    )
    table = Table(box=box.SIMPLE_HEAD, title="a micro-batch (half of a rank's tokens)", title_justify="left")
    for heading in ("phase", "p50", "p99"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for phase, times in record.phases.items():
        table.add_row(phase, format_seconds(times.p50_s), format_seconds(times.p99_s))
    console.print(table)
    _print_histogram(console, "a step: both micro-batches, overlapping", record.step)
    _print_histogram(console, "one dispatch and combine: a micro-batch's sends and receives", record.pair)
    console.print(f"{record.tokens_per_second:.0f} tokens per second, all ranks together")
    verdict = "[green]matches[/green]" if record.ok else "[bold red]differs from[/bold red]"
    console.print(
        f"{verdict} the single-process reference: largest relative difference of an output"
        f" {record.largest_difference:.1e} (at most {record.tolerance:.1e} is allowed),"
        f" {record.different_entries} of {record.entries} entries of all steps differ"
        f" (at most {record.max_different_share:.0%})"
    )


def _print_histogram(console: Console, title: str, latency: Latency) -> None:
    console.print(
        f"{title}: [bold]p50 {format_seconds(latency.p50_s)}, p99 {format_seconds(latency.p99_s)}[/bold]"
    )
    most = max(bucket.count for bucket in latency.histogram)
    for bucket, mark in zip(latency.histogram, marks_of(latency), strict=True):
        line = bar(bucket.count, most, BAR_WIDTH)
        pointer = f"  [bold]◂ {mark}[/bold]" if mark else ""
        console.print(f"  from {format_seconds(bucket.from_s):>8} {line} {bucket.count or ''}{pointer}")
    console.print()
