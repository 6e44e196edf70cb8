"""The picture of `anyep plan --machine --plot`: times and rates by number of ranks, and what bounds each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from anyep.errors import NotSupported
from anyep.planning.times import COMBINE, DISPATCH

if TYPE_CHECKING:
    from anyep.cli.plan_times import Row, TimesAsked

COLOURS: Final = {DISPATCH: "#2e86ab", COMBINE: "#8367c7"}
MARKERS: Final = {"start": "D", "SMs": "s", "NVLink": "o", "memory": "o", "network": "^"}
GREY: Final = "#555555"
FAINT: Final = "#d9dee3"


def new_figure(width: float, height: float) -> Any:
    """A figure of matplotlib whose parts do not overlap."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise NotSupported("drawing a plot needs matplotlib: pip install 'anyep[plot]'") from error
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))


def draw_scale(asked: TimesAsked, rows: list[Row], path: Path) -> None:
    """A row of two panels for each mode: time, and logical and physical rates."""
    from anyep.cli.plan_times import title_of

    figure = new_figure(12, 0.9 + 4.3 * len(asked.modes))
    workload = asked.workload
    figure.suptitle(
        f"{asked.machine.names[0]}: hidden {workload.hidden} {workload.dtype}, top-{workload.num_topk} of"
        f" {workload.num_experts} experts, {workload.num_sms} SMs",
        fontweight="bold",
    )
    for number, mode in enumerate(asked.modes):
        chosen = [row for row in rows if row.call.mode == mode]
        times = figure.add_subplot(len(asked.modes), 2, 2 * number + 1)
        rates = figure.add_subplot(len(asked.modes), 2, 2 * number + 2)
        _draw_times(times, chosen, f"time, us: {title_of(chosen)}")
        _draw_rates(rates, chosen)
        for axes in (times, rates):
            _by_ranks(axes, chosen)
    figure.savefig(path, dpi=140)


def _of(rows: list[Row], what: str) -> list[Row]:
    return [row for row in rows if row.call.what == what]


def _draw_times(axes: Any, rows: list[Row], title: str) -> None:
    for what, colour in COLOURS.items():
        chosen = _of(rows, what)
        ranks = [row.call.num_ranks for row in chosen]
        low, high = (list(ends) for ends in zip(*(row.prediction.us for row in chosen), strict=True))
        axes.fill_between(ranks, low, high, color=colour, alpha=0.22, linewidth=0)
        middle = [row.prediction.times.total_us for row in chosen]
        axes.plot(ranks, middle, color=colour, label=what)
        for row in chosen:
            times = row.prediction.times
            axes.plot(
                row.call.num_ranks, times.total_us, MARKERS[row.prediction.bound], color=colour, markersize=6
            )
    used = dict.fromkeys(row.prediction.bound for row in rows)
    for bound in used:
        axes.plot([], [], MARKERS[bound], color=GREY, label=f"bound by {bound}")
    if any(row.prediction.is_range for row in rows):
        axes.fill_between([], [], [], color=GREY, alpha=0.22, linewidth=0, label="a range, not a number")
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(fontsize=8, frameon=False)


def _draw_rates(axes: Any, rows: list[Row]) -> None:
    """Rates of one node count bytes over NVLink, those of several nodes bytes over the network: two lines."""
    for what, colour in COLOURS.items():
        chosen = _of(rows, what)
        for style, kind, name in (("-", "logical_gbs", "logical"), ("--", "physical_gbs", "physical")):
            for part in (True, False):
                some = [row for row in chosen if (row.call.num_nodes == 1) == part]
                if not some:
                    continue
                ranks = [row.call.num_ranks for row in some]
                low, high = zip(*(getattr(row.prediction, kind) for row in some), strict=True)
                axes.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
                middle = [_at_model(row, kind) for row in some]
                label = (
                    f"{what}, {name}" if part or not any(row.call.num_nodes == 1 for row in chosen) else None
                )
                fill = "full" if name == "logical" else "none"
                axes.plot(ranks, middle, style, color=colour, marker="o", fillstyle=fill, label=label)
    axes.set_title("rate per rank, GB/s: NVLink on one node, network on several", loc="left", fontsize=9)
    axes.legend(fontsize=8, frameon=False)


def _at_model(row: Row, kind: str) -> float:
    """The rate at the time that the model gives without doubts."""
    low = getattr(row.prediction, kind)[0]
    return float(low * row.prediction.us[1] / row.prediction.times.total_us)


def _by_ranks(axes: Any, rows: list[Row]) -> None:
    ranks = sorted({row.call.num_ranks for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.minorticks_off()
    axes.set_xlabel("ranks", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
