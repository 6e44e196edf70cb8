"""From measured times to a machine's file: the arithmetic behind `anyep calibrate`.

    fit = fit_line([Point(rows=8, us=60.0), Point(rows=1024, us=2700.0)], row_bytes=14336)
    fit.start_us, fit.gbs

A call takes a start time, and then the time of its rows; where ranks share cores or GPUs, both are those of a
rank that has one alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from anyep.planning.times import Call, expected_load

LEAST_START_US: Final = 0.1
LEAST_POINTS_TO_BEND: Final = 5
BENT: Final = 0.5
"""A bend must leave at most this part of the squares of a straight line's errors."""
STEEP: Final = 0.8
"""A rate with few SMs counts for the rate per SM while it is below this part of the best one."""


class Point(NamedTuple):
    """One measured time, of a call that moves some rows at the most loaded rank."""

    rows: float
    us: float


class Line(NamedTuple):
    """A start time and a rate; and for the first bytes another rate, if caches hold them."""

    start_us: float
    gbs: float
    cached_gbs: float = 0.0
    cached_bytes: float = 0.0

    def us(self, num_bytes: float) -> float:
        cached = min(num_bytes, self.cached_bytes)
        cached_us = cached / self.cached_gbs / 1e3 if cached else 0.0
        return self.start_us + cached_us + (num_bytes - cached) / self.gbs / 1e3


class Entry(NamedTuple):
    """A constant of the file."""

    name: str
    value: float
    source: str


def rows_of(mode: str, what: str, ranks: int, tokens: int, topk: int, experts: int) -> float:
    """The rows of the most loaded rank, as the model of time counts them, on one node."""
    return expected_load(Call(mode, what, 1, ranks, tokens, 0, topk, experts)).near_rows


def fit_line(points: Sequence[Point], row_bytes: int) -> Line:
    """The start and rate with the least relative errors.

    >>> line = fit_line([Point(1, 101.0), Point(100, 200.0), Point(1000, 1100.0)], row_bytes=1000)
    >>> round(line.start_us), round(line.gbs, 3)
    (100, 1.0)
    """
    us = np.array([point.us for point in points])
    rows = np.array([point.rows for point in points])
    terms = np.stack([1 / us, rows / us], axis=1)
    start, per_row = np.linalg.lstsq(terms, np.ones(len(points)), rcond=None)[0]
    if start < LEAST_START_US:
        # All of it looks like rows: then the rate alone is fitted.
        start = LEAST_START_US
        per_row = float(np.median((us - start) / rows))
    if per_row <= 0:
        # Times that do not grow with the rows: half of the shortest is the start.
        start = us.min() / 2
        per_row = float(((us - start) / rows).min())
    return Line(float(start), row_bytes / float(per_row) / 1e3)


def fit_bent_line(points: Sequence[Point], row_bytes: int) -> Line:
    """A line whose first bytes are faster, where that is much nearer to the points; else a straight one.

    >>> times = [(1, 101.0), (50, 150.0), (100, 200.0), (200, 1200.0), (400, 3200.0)]
    >>> line = fit_bent_line([Point(*each) for each in times], row_bytes=1000)
    >>> round(line.start_us), round(line.cached_gbs, 2), round(line.gbs, 2), round(line.cached_bytes)
    (100, 1.0, 0.1, 100000)
    """
    straight = fit_line(points, row_bytes)
    if len(points) < LEAST_POINTS_TO_BEND:
        return straight
    us = np.array([point.us for point in points])
    rows = np.array([point.rows for point in points])
    best, least = straight, BENT * float(np.square(errors(points, straight, row_bytes)).sum())
    for bend in sorted(rows)[1:-1]:
        terms = np.stack([1 / us, np.minimum(rows, bend) / us, np.maximum(rows - bend, 0) / us], axis=1)
        start, near, far = np.linalg.lstsq(terms, np.ones(len(points)), rcond=None)[0]
        if start < LEAST_START_US or not 0 < near < far:
            continue
        gbs, cached_gbs = (row_bytes / float(each) / 1e3 for each in (far, near))
        line = Line(float(start), gbs, cached_gbs, float(bend) * row_bytes)
        squares = float(np.square(errors(points, line, row_bytes)).sum())
        if squares < least:
            best, least = line, squares
    return best


def errors(points: Sequence[Point], line: Line, row_bytes: int) -> list[float]:
    """The relative errors of a line at some points; positive where it is too long."""
    return [line.us(point.rows * row_bytes) / point.us - 1 for point in points]


def gbs_per_sm(by_sms: Sequence[tuple[int, Point]], line: Line, row_bytes: int) -> float:
    """The rate of one SM, from calls with few SMs, in which the SMs decide.

    >>> few = [(4, Point(1000, 110.0)), (8, Point(1000, 60.0)), (24, Point(1000, 30.0))]
    >>> round(gbs_per_sm(few, Line(10.0, 50.0), 1000), 1)
    2.5
    """
    rates = [
        (sms, point.rows * row_bytes / max(point.us - line.start_us, 1e-3) / 1e3) for sms, point in by_sms
    ]
    best = max(rate for _, rate in rates)
    return statistics.median(
        [rate / sms for sms, rate in rates if rate < STEEP * best] or [rate / sms for sms, rate in rates]
    )


def alone(line: Line, share: float) -> Line:
    """The line of a rank that has a core or GPU alone, where `share` ranks shared one."""
    return Line(line.start_us / share, line.gbs * share, line.cached_gbs * share, line.cached_bytes)


def file_text(name: str, tables: dict[str, list[Entry]]) -> str:
    """The TOML of a machine whose constants are AnyEP's, by mode."""
    lines = [
        "# Written by `anyep calibrate`: AnyEP on this machine, on one node.",
        "",
        f"names = [{_quoted(name)}]",
    ]
    for mode, entries in tables.items():
        lines += ["", f"[anyep.{mode}]"]
        lines += [
            f"{entry.name} = {{ value = {entry.value:.6g}, source = {_quoted(entry.source)} }}"
            for entry in entries
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A string of TOML; its escapes are those of JSON."""
    import json

    return json.dumps(text, ensure_ascii=True)


def entries_of(
    lines: dict[str, Line], source: str, places: int, sms: dict[str, float], is_cpu: bool
) -> list[Entry]:
    """The constants of one mode. `places` is the number of cores or GPUs; `sms` has rates per SM, if any."""
    entries = [Entry("places", float(places), "the cores or GPUs that the ranks share")]
    if not sms and is_cpu:
        entries.append(Entry("without_sms", 1.0, "ranks on CPUs copy with one thread each"))
    for what, line in lines.items():
        entries += [
            Entry(f"{what}_nvlink_gbs", line.gbs, source),
            Entry(f"{what}_start_us", line.start_us, source),
        ]
        if line.cached_bytes:
            bend = "calls with fewer bytes are faster: caches hold them"
            entries += [
                Entry(f"{what}_cached_gbs", line.cached_gbs, source),
                Entry(f"{what}_cached_bytes", line.cached_bytes, bend),
            ]
        if what in sms:
            entries.append(Entry(f"{what}_gbs_per_sm", sms[what], source))
    return entries
