"""The picture of `anyep simulate --plot`: when each stage of one rank works during a call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from anyep.cli.plan_plot import new_figure
from anyep.planning.counts import Array
from anyep.planning.times import COMBINE, DISPATCH

if TYPE_CHECKING:
    from anyep.cli.simulate import Scenario
    from anyep.planning.virtual_time import Result

NUM_BINS: Final = 240
ROWS: Final = {
    "launch": ("launch", "#7b8794"),
    "notify": ("notify", "#f2a541"),
    "pack": ("pack: into rings between nodes", "#2e86ab"),
    "network": ("network: its NIC sends", "#e4572e"),
    "relay": ("relay: rows to the ranks of its node", "#4d9078"),
    "receive": ("receive: rows out of its rings", "#8367c7"),
}
NAMES: Final = {
    (DISPATCH, False, "relay"): "send: its rows to the ranks",
    (COMBINE, True, "relay"): "relay: sums for other nodes",
    (COMBINE, True, "receive"): "add: rows and sums into its tokens",
    (COMBINE, False, "receive"): "add: rows into its tokens",
}
"""Of stages that are called differently, by call and whether there are several nodes."""


def draw_waterfall(scenario: Scenario, result: Result, path: Path) -> None:
    """A row for each stage; its height is the part of the rank's channels, or of its NIC, that works then."""
    call, several = scenario.call, scenario.call.num_nodes > 1
    absent = {"pack"} if call.what == COMBINE else set()
    if not several:
        absent |= {"notify", "pack", "network"} | ({"relay"} if call.what == COMBINE else set())
    # On the way back relays come before the network.
    order = [*ROWS] if call.what == DISPATCH else ["launch", "notify", "relay", "network", "receive"]
    stages = [name for name in order if name not in absent]
    figure = new_figure(11, 1.6 + 0.75 * len(stages))
    axes = figure.add_subplot()
    end = result.total_us
    edges = np.linspace(0.0, end, NUM_BINS + 1)
    for number, name in enumerate(stages):
        bottom = len(stages) - 1 - number
        label, colour = ROWS[name]
        label = NAMES.get((call.what, several, name), label)
        height, busy = _profile(scenario, result, name, edges)
        axes.stairs(bottom + 0.8 * height, edges, baseline=bottom, fill=True, color=colour, alpha=0.9)
        axes.axhline(bottom, color="#d9dee3", linewidth=0.8, zorder=0)
        axes.text(0.0, bottom + 0.84, label, fontsize=8.5, va="bottom", ha="left", color="#22313f")
        axes.text(end * 1.01, bottom + 0.3, busy, fontsize=8.5, va="center", color=colour)
    own = result.finished_us[scenario.watch]
    axes.axvline(own, color="#22313f", linewidth=1, linestyle="--")
    axes.text(
        own, len(stages) + 0.12, f"is finished: {own:.0f} us", fontsize=8.5, ha="right", color="#22313f"
    )
    axes.set_title(
        f"{scenario.name}: one {call.what} at rank {scenario.watch} of {call.num_ranks},"
        f" {call.num_tokens} tokens per rank; full height: all channels work",
        loc="left",
        fontsize=10,
    )
    axes.set_xlim(0, end * 1.1)
    axes.set_ylim(-0.05, len(stages) + 0.45)
    axes.set_yticks([])
    axes.set_xlabel("us", fontsize=8.5)
    axes.tick_params(labelsize=8.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=140)


def _profile(scenario: Scenario, result: Result, name: str, edges: Array) -> tuple[Array, str]:
    """The part of each bin in which a stage works, and in words how long it works."""
    launch, start = scenario.launch_us, scenario.speeds.start_us + scenario.trouble.late_us
    if name in ("launch", "notify"):
        begin, end = (0.0, launch) if name == "launch" else (launch, start)
        return _overlap([(begin, end)], edges), f"{end - begin:.0f} us"
    parallel = 1 if name == "network" else scenario.shape.num_channels
    intervals = result.watched[name]
    height = _overlap(intervals, edges) / parallel
    span = result.total_us - start
    total = sum(end - begin for begin, end in intervals)
    return height, f"{total / parallel / span:.0%} busy" if span > 0 else ""


def _overlap(intervals: list[tuple[float, float]], edges: Array) -> Array:
    """[bin]: the sum of the intervals' parts within each bin, relative to its width.

    >>> _overlap([(0.0, 1.0), (0.5, 2.0)], np.array([0.0, 1.0, 2.0])).tolist()
    [1.5, 1.0]
    """
    if not intervals:
        return np.zeros(len(edges) - 1)
    begins, ends = (np.array(each) for each in zip(*intervals, strict=True))

    def before(times: Any) -> Array:
        """At each edge, how much of all intervals lies before it."""
        ordered = np.sort(times)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        count = np.searchsorted(ordered, edges)
        after: Array = edges * count - sums[count]
        return after

    covered = before(begins) - before(ends)
    overlap: Array = np.diff(covered) / np.diff(edges)
    return overlap
