"""The picture of `anyep bench --plot`: how close each case is to a plain copy, and how far ahead of others.

On GPUs it also shows the rates themselves. A sweep has panels of its own: rates by number of SMs; times and
rates by number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from anyep.cli.bench.records import Record, Report, lines_of
from anyep.cli.bench.table import RIVALS
from anyep.cli.nodes import nodes_in_words
from anyep.cli.units import format_rate
from anyep.errors import NotSupported

BLUE, VIOLET, GREEN, RED = "#2e86ab", "#8367c7", "#3a9d6e", "#e4572e"
COLOURS: Final = (BLUE, VIOLET, GREEN)
GREYS: Final = ("#555555", "#a0a0a0")
"""Of copies."""

Panel = Callable[[Any], None]
"""Draws into axes of matplotlib."""


@dataclass(frozen=True)
class Bars:
    """A row of bars, one per case. Ratios have a line at 1, which is the speed of `reference`."""

    title: str
    values: dict[str, float]
    in_words: Callable[[float], str]
    colour: str
    reference: str = ""


def draw(report: Report, path: Path) -> None:
    """A row of panels for each kind of bars, and for each sweep; a bar or a line per case."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise NotSupported("drawing a plot needs matplotlib: pip install 'anyep[plot]'") from error
    first = report.records[0]
    rows = _rows_of([record for record in report.cases if record.of_copy and record.tokens == first.tokens])
    # A panel alone in its row has its whole width; two share it.
    panels: list[list[Panel]] = [[partial(_draw_bars, row=row)] for row in rows]
    if over_sms := report.swept("sms"):
        panels.append([partial(_draw_sms, records=over_sms)])
    if over_tokens := report.swept("tokens"):
        panels.append([partial(panel, records=over_tokens) for panel in (_draw_times, _draw_rates)])
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(11, 3.5 * len(panels)), layout=layout)
    place = f" on {first.gpu}" if first.gpu else nodes_in_words(first.nodes, first.ranks_per_node)
    figure.suptitle(
        f"{first.ranks} ranks{place}, {first.tokens} tokens per rank, hidden {first.hidden} bf16",
        fontweight="bold",
    )
    grid = figure.add_gridspec(len(panels), 2)
    for index, row in enumerate(panels):
        for column, draw_panel in enumerate(row):
            axes = figure.add_subplot(grid[index, column : column + 2 // len(row)])
            draw_panel(axes)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)


def _rows_of(records: Sequence[Record]) -> list[Bars]:
    rows = [
        Bars(
            "rate, as a multiple of a plain copy of the same bytes",
            {_name(record): record.of_copy or 0.0 for record in records},
            "{:.2f}".format,
            BLUE,
            "a plain copy",
        )
    ]
    for rival in sorted({rival for record in records for rival in record.vs}):
        values = {_name(record): record.vs[rival] for record in records if rival in record.vs}
        rows.append(
            Bars(f"speed, as a multiple of {RIVALS[rival]}", values, "{:.1f}x".format, VIOLET, RIVALS[rival])
        )
    if any(record.gpu for record in records):
        rates = {_name(record): record.gbps for record in records}
        title = "rate, GB/s per rank of received bytes"
        rows.append(Bars(title, rates, format_rate, GREEN))
    return rows


def _name(record: Record) -> str:
    words = f"{record.case}\n{record.path}"
    return words.replace("_", "\n").replace(", ", "\n")


def _draw_bars(axes: Any, row: Bars) -> None:
    bars = axes.bar(list(row.values), list(row.values.values()), color=row.colour, zorder=2)
    # Labels have a ground of their own, so that the line does not run through them.
    plate = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    words = [row.in_words(value) for value in row.values.values()]
    axes.bar_label(bars, words, fontsize=8, padding=2, bbox=plate, zorder=3)
    if row.reference:
        axes.axhline(1, color=RED, linewidth=1, zorder=1)
        end = axes.get_yaxis_transform()  # x from 0 to 1 over the axes, y in values
        axes.text(1.005, 1, f"1: {row.reference}", transform=end, va="center", fontsize=8, color=RED)
    axes.margins(y=0.1)
    axes.set_title(row.title, loc="left", fontsize=10)


def _draw_sms(axes: Any, records: Sequence[Record]) -> None:
    """The rates by number of SMs; a ring around the fewest SMs that are enough."""
    _draw_lines(axes, records, lambda record: record.sms or 0, lambda record: record.gbps)
    for record in records:
        if record.enough:
            axes.plot(record.sms, record.gbps, marker="o", markersize=14, color=RED, fillstyle="none")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("SMs per rank", fontsize=8)
    axes.set_title(
        "rate by number of SMs, GB/s per rank, in graphs; ringed: the fewest that reach 80 % of the best",
        loc="left",
        fontsize=10,
    )


def _draw_times(axes: Any, records: Sequence[Record]) -> None:
    """The times by number of tokens, on a logarithmic axis."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    _draw_over_tokens(axes, records, lambda record: record.median_s * 1e6, "median time of a call, us")


def _draw_rates(axes: Any, records: Sequence[Record]) -> None:
    """The rates by number of tokens."""
    _draw_over_tokens(axes, records, lambda record: record.gbps, "rate, GB/s per rank of received bytes")
    axes.set_ylim(bottom=0)


def _draw_over_tokens(
    axes: Any, records: Sequence[Record], value_of: Callable[[Record], float], title: str
) -> None:
    axes.set_xscale("log")
    _draw_lines(axes, records, lambda record: record.tokens, value_of)
    axes.minorticks_off()
    axes.set_xlabel("tokens per rank", fontsize=8)
    how = ", in graphs" if records[0].gpu else ""
    axes.set_title(f"{title}{how}", loc="left", fontsize=10)


def _draw_lines(
    axes: Any,
    records: Sequence[Record],
    number_of: Callable[[Record], int],
    value_of: Callable[[Record], float],
) -> None:
    """A line per case, solid; those of plain copies are dashed."""
    colours, greys = cycle(COLOURS), cycle(GREYS)
    for name, line in lines_of(records).items():
        is_copy = line[0].case == "copy"
        axes.plot(
            [number_of(record) for record in line],
            [value_of(record) for record in line],
            linestyle="--" if is_copy else "-",
            marker="." if is_copy else "o",
            color=next(greys if is_copy else colours),
            label=name,
        )
    numbers = sorted({number_of(record) for record in records})
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.legend(fontsize=8, frameon=False)
