"""The picture of `anyep bench --plot`: how close each case is to a plain copy, and how far ahead of others.

On GPUs it also shows the rates themselves, and how they grow with the number of SMs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from anyep.cli.bench.records import Record, Report
from anyep.cli.bench.table import RIVALS
from anyep.cli.nodes import nodes_in_words
from anyep.cli.units import format_rate
from anyep.errors import NotSupported

BLUE, VIOLET, GREEN, RED = "#2e86ab", "#8367c7", "#3a9d6e", "#e4572e"
COLOURS: Final = (BLUE, VIOLET)


@dataclass(frozen=True)
class Bars:
    """A row of bars, one per case. Ratios have a line at 1."""

    title: str
    values: dict[str, float]
    in_words: Callable[[float], str]
    colour: str
    are_ratios: bool = True


def draw(report: Report, path: Path) -> None:
    """Rows of bars over the cases, and a row of lines over the numbers of SMs where there were several."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotSupported("drawing a plot needs matplotlib: pip install 'anyep[plot]'") from error
    first = report.records[0]
    rows = _rows_of([record for record in report.cases if record.of_copy and record.tokens == first.tokens])
    num_rows = len(rows) + bool(report.sweep)
    figure = Figure(figsize=(11, 3.5 * num_rows))
    place = f" on {first.gpu}" if first.gpu else nodes_in_words(first.nodes, first.ranks_per_node)
    figure.suptitle(
        f"{first.ranks} ranks{place}, {first.tokens} tokens per rank, hidden {first.hidden} bf16",
        fontweight="bold",
    )
    for index in range(num_rows):
        axes = figure.add_subplot(num_rows, 1, index + 1)
        if index < len(rows):
            _draw_bars(axes, rows[index])
        else:
            _draw_sweep(axes, report.sweep)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def _rows_of(records: Sequence[Record]) -> list[Bars]:
    rows = [
        Bars(
            "rate, as a multiple of a plain copy of the same bytes",
            {_name(record): record.of_copy or 0.0 for record in records},
            "{:.2f}".format,
            BLUE,
        )
    ]
    for rival in sorted({rival for record in records for rival in record.vs}):
        values = {_name(record): record.vs[rival] for record in records if rival in record.vs}
        rows.append(Bars(f"speed, as a multiple of {RIVALS[rival]}", values, "{:.1f}x".format, VIOLET))
    if any(record.gpu for record in records):
        rates = {_name(record): record.gbps for record in records}
        title = "rate, GB/s per rank of received bytes"
        rows.append(Bars(title, rates, format_rate, GREEN, are_ratios=False))
    return rows


def _name(record: Record) -> str:
    words = f"{record.case}\n{record.path}"
    return words.replace("_", "\n").replace(", ", "\n")


def _draw_bars(axes: Any, row: Bars) -> None:
    bars = axes.bar(list(row.values), list(row.values.values()), color=row.colour)
    axes.bar_label(bars, [row.in_words(value) for value in row.values.values()], fontsize=8)
    if row.are_ratios:
        axes.axhline(1, color=RED, linewidth=1)
    axes.set_title(row.title, loc="left", fontsize=10)


def _draw_sweep(axes: Any, records: Sequence[Record]) -> None:
    """The rates by number of SMs; a ring around the fewest SMs that are enough."""
    for case, colour in zip(dict.fromkeys(record.case for record in records), COLOURS, strict=False):
        of_case = [record for record in records if record.case == case]
        axes.plot(
            [record.sms for record in of_case],
            [record.gbps for record in of_case],
            marker="o",
            color=colour,
            label=case,
        )
        for record in of_case:
            if record.enough:
                axes.plot(record.sms, record.gbps, marker="o", markersize=14, color=RED, fillstyle="none")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({record.sms or 0 for record in records}))
    axes.set_xlabel("SMs per rank", fontsize=8)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(
        "rate by number of SMs, GB/s per rank, in graphs; ringed: the fewest that reach 80 % of the best",
        loc="left",
        fontsize=10,
    )
