"""`anyep calibrate`: measures AnyEP on this machine, and writes a file that `anyep plan --machine` reads."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from anyep.cli import options
from anyep.cli.bench.command import check_sizes
from anyep.cli.bench.measure import ProgressLine
from anyep.cli.bench.records import RankReport, Setup, Timing, durations_of
from anyep.cli.checks import check_file, writing
from anyep.cli.gpus import Placement, check_device, placed
from anyep.cli.histogram import percentile
from anyep.cli.ranks import Rank, run_ranks
from anyep.cli.units import format_bytes
from anyep.errors import InvalidCall, whole_number
from anyep.machine import num_cores
from anyep.planning.calibration import (
    Entry,
    Line,
    Point,
    alone,
    entries_of,
    errors,
    file_text,
    fit_bent_line,
    gbs_per_sm,
    rows_of,
)
from anyep.planning.times import COMBINE, DISPATCH, LOW_LATENCY, NORMAL

THE_FILE: Final = "the machine"
BENCH_MODES: Final = {NORMAL: "normal", LOW_LATENCY: "low-latency"}
CASES: Final = {
    (NORMAL, "cached_dispatch"): DISPATCH,
    (NORMAL, "combine"): COMBINE,
    (LOW_LATENCY, "dispatch"): DISPATCH,
    (LOW_LATENCY, "combine"): COMBINE,
}
"""The measured calls behind the constants, by mode."""
MOST_CPU_RANKS: Final = 8
TOKENS: Final = {
    ("cpu", NORMAL): 512,
    ("cpu", LOW_LATENCY): 64,
    ("cuda", NORMAL): 4096,
    ("cuda", LOW_LATENCY): 128,
}
TOPK: Final = 8
EXPERTS_PER_RANK: Final = 32
LEAST_REPEATS: Final = 3
QUARTILE: Final = 0.25
"""Of the repeats: other programs make calls longer, never shorter."""


@dataclass(frozen=True)
class Measured:
    """Times of one mode, by call: in order of tokens; and by number of SMs where they vary."""

    points: dict[str, list[Point]]
    by_sms: dict[str, list[tuple[int, Point]]]
    host_sync_us: float | None
    gpu: str


def calibrate(
    device: options.Device = "cpu",
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks; default: one for each core, at most 8; one for each GPU, at least 2."
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Hidden size, in bf16 values.")] = 7168,
    tokens: Annotated[
        int | None, typer.Option(help="Most tokens per rank in normal mode; default: 512, on cuda 4096.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Repeats of each call; the lower quartile is used.")] = 7,
    name: Annotated[str, typer.Option(help="What the machine is called.")] = "this machine",
    output: Annotated[Path, typer.Option(help="The file to write, which must end in .toml.")] = Path(
        "this-machine.toml"
    ),
) -> None:
    """Measure AnyEP on this machine, in less than a minute, and write a file for `anyep plan --machine`."""
    check_device(device)
    if output.suffix != ".toml":
        raise InvalidCall(f"--output is {str(output)!r}: the name of a machine's file must end in .toml")
    check_file(THE_FILE, output)
    whole_number("--repeats", repeats, minimum=LEAST_REPEATS)
    if not name.strip():
        raise InvalidCall("--name is empty: say what the machine is called")
    started = time.monotonic()
    tables: dict[str, list[Entry]] = {}
    lines: list[str] = []
    for mode in (NORMAL, LOW_LATENCY):
        with placed(device, ranks or 2) as placement:
            places = placement.num_gpus or num_cores()
            setup = _setup(mode, device, _count(ranks, device, places), hidden, tokens, repeats)
            measured = _measure(mode, setup, placement)
        entries, said = _entries(mode, setup, measured, places)
        tables[mode] = entries
        lines += said
    with writing(THE_FILE, output):
        output.write_text(file_text(name, tables), encoding="utf-8")
    _print(lines)
    print(f"wrote {output}, after {time.monotonic() - started:.0f} s", file=sys.stderr)


def _count(ranks: int | None, device: str, places: int) -> int:
    if ranks is not None:
        return whole_number("--ranks", ranks, minimum=2)
    return max(2, min(places, MOST_CPU_RANKS) if device == "cpu" else places)


def _setup(mode: str, device: str, ranks: int, hidden: int, tokens: int | None, repeats: int) -> Setup:
    most = TOKENS[device, mode]
    if tokens is not None:
        tokens = whole_number("--tokens", tokens, minimum=16)
        most = tokens if mode == NORMAL else min(most, tokens)
    setup = Setup(
        BENCH_MODES[mode],
        ranks,
        most,
        hidden,
        EXPERTS_PER_RANK * ranks,
        TOPK,
        repeats,
        0,
        device,
        sweep_sms=mode == NORMAL and device == "cuda",
        sweep_tokens=True,
    )
    check_sizes(setup)
    return setup


def _measure(mode: str, setup: Setup, placement: Placement) -> Measured:
    with ProgressLine(sys.stderr.isatty()) as progress:
        progress.show(f"measuring {BENCH_MODES[mode]} mode with {setup.ranks} ranks")
        reports: list[RankReport] = run_ranks(
            setup.ranks, measure_on_rank, setup, placement.num_gpus, placement=placement
        )
    return measured_of(mode, setup, reports)


def measure_on_rank(rank: Rank, setup: Setup, num_gpus: int) -> RankReport:
    """Calls by number of tokens, a dispatch that counts its rows, and on GPUs calls by number of SMs."""
    from anyep.cli.bench import low_latency, normal
    from anyep.cli.bench.clock import clock_of
    from anyep.cli.bench.sweep import swept

    clock = clock_of(rank, setup, num_gpus)
    timings: list[Timing] = []
    is_normal = setup.mode == BENCH_MODES[NORMAL]
    sweep = normal.sweep_over_tokens if is_normal else low_latency.sweep_over_tokens
    for tokens in setup.swept_tokens:
        timings += clock.time(tokens, sweep(rank, setup, clock, tokens))
    if is_normal:
        cases = normal.NormalCases(rank, setup, clock, 1)
        timings += clock.time(1, [swept(cases.by_window(), "tokens", [("dispatch", "window")])])
    if setup.sweep_sms:
        timings += clock.time(setup.tokens, normal.sweep_over_sms(rank, setup, clock))
    return clock.report(timings)


def measured_of(mode: str, setup: Setup, reports: list[RankReport]) -> Measured:
    """Times of the calls that the constants come from."""
    points: dict[str, list[Point]] = {DISPATCH: [], COMBINE: []}
    by_sms: dict[str, list[tuple[int, Point]]] = {}
    counting_us, cached_us = None, None
    for timings in zip(*(report.timings for report in reports), strict=True):
        label = timings[0].label
        us = percentile(durations_of(timings), QUARTILE) * 1e6
        what = CASES.get((mode, label.case))
        if mode == NORMAL and label.case == "dispatch":
            counting_us = us
            continue
        if what is None or (mode == LOW_LATENCY and not label.path.startswith("bf16")):
            continue
        rows = rows_of(mode, what, setup.ranks, label.tokens, setup.topk, setup.experts)
        if label.sweep == "sms":
            by_sms.setdefault(what, []).append((label.sms or 0, Point(rows, us)))
        else:
            points[what].append(Point(rows, us))
            if (what, label.tokens) == (DISPATCH, 1):
                cached_us = us
    waits = counting_us - cached_us if counting_us is not None and cached_us is not None else None
    return Measured(points, by_sms, waits if waits and waits > 0 else None, reports[0].gpu)


def _entries(mode: str, setup: Setup, measured: Measured, places: int) -> tuple[list[Entry], list[str]]:
    """The constants of a mode, and for each call a line that says how well they fit."""
    share = max(1.0, setup.ranks / places)
    where = measured.gpu or f"{places} cores"
    source = (
        f"measured with {setup.ranks} ranks on {where}, 1 to {setup.tokens} tokens, hidden {setup.hidden}"
        f" bf16, top-{setup.topk} of {setup.experts} experts"
    )
    lines: dict[str, Line] = {}
    sms: dict[str, float] = {}
    said = []
    for what, points in measured.points.items():
        line = fit_bent_line(points, setup.row_bytes)
        off = left_out(points, setup.row_bytes)
        lines[what] = alone(line, share)
        if what in measured.by_sms:
            sms[what] = share * gbs_per_sm(measured.by_sms[what], line, setup.row_bytes)
        said.append(
            f"{BENCH_MODES[mode]} {what}: {line.start_us:.0f} us, then {_rates_in_words(line)} per rank; a"
            f" time that a fit leaves out differs by {statistics.median(off):.0%} (median)"
        )
    entries = entries_of(lines, source, places, sms, setup.device == "cpu")
    if measured.host_sync_us is not None:
        waits = "what a dispatch that counts its rows takes longer than one along a handle, with one token"
        entries.append(Entry("host_sync_us", measured.host_sync_us / share, waits))
    return entries, said


def left_out(points: list[Point], row_bytes: int) -> list[float]:
    """For each point but the first and last, how far a fit to the others is from it: relative errors."""
    off = []
    for index in range(1, len(points) - 1):
        others = points[:index] + points[index + 1 :]
        off += [abs(error) for error in errors([points[index]], fit_bent_line(others, row_bytes), row_bytes)]
    return off


def _rates_in_words(line: Line) -> str:
    if not line.cached_bytes:
        return f"{line.gbs:.2f} GB/s"
    size = format_bytes(round(line.cached_bytes))
    return f"{line.cached_gbs:.2f} GB/s up to {size}, {line.gbs:.2f} GB/s beyond,"


def _print(lines: list[str]) -> None:
    from anyep.cli.console import console_for_results

    console: Any = console_for_results()
    for line in lines:
        console.print(line)
