"""The picture of `anyep plan --trace --plot`: bytes from rank to rank, and the load of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from anyep.cli.plan_plot import new_figure
from anyep.planning.counts import Array
from anyep.topology import Topology

if TYPE_CHECKING:
    from anyep.cli.plan_trace import Balanced, TraceAsked
    from anyep.planning.balancing import Measured

MOST_RANKS: Final = 128
"""With more ranks the map shows nodes."""
BLUE, VIOLET, INK = "#2e86ab", "#8367c7", "#22313f"
MIB: Final = 2**20


def draw_heat(asked: TraceAsked, measured: Measured, balanced: Balanced | None, path: Path) -> None:
    """Left the bytes of a dispatch by source and destination, right what each rank computes."""
    figure = new_figure(13, 5.8)
    topology = asked.topology
    figure.suptitle(
        f"one dispatch of {topology.num_ranks} ranks on {topology.num_nodes} nodes, mean of"
        f" {len(measured.steps)} steps",
        fontweight="bold",
    )
    heat, load = figure.subplots(1, 2, width_ratios=(1.05, 1))
    _draw_map(figure, heat, measured, topology)
    _draw_load(load, measured, balanced)
    figure.savefig(path, dpi=140)


def _draw_map(figure: Any, axes: Any, measured: Measured, topology: Topology) -> None:
    from anyep.cli.plan_trace import by_node

    sent = measured.dispatch.bytes / len(measured.steps) / MIB
    by_nodes = topology.num_ranks > MOST_RANKS
    shown: Array = by_node(sent, topology) if by_nodes else sent
    rows = by_node(measured.dispatch.rows, topology) if by_nodes else measured.dispatch.rows
    image = axes.imshow(np.where(rows > 0, shown, np.nan), vmin=0.0, cmap="viridis_r")
    axes.set_facecolor("#e9ecef")
    bar = figure.colorbar(image, ax=axes, shrink=0.85)
    bar.set_label("MiB per dispatch; grey: no rows, messages only", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    if not by_nodes:
        for node in range(1, topology.num_nodes):
            for line in (axes.axhline, axes.axvline):
                line(node * topology.ranks_per_node - 0.5, color="#555555", linewidth=0.8)
    what = "node" if by_nodes else "rank"
    axes.set_xlabel(f"to {what}", fontsize=8)
    axes.set_ylabel(f"from {what}", fontsize=8)
    between = "" if topology.num_nodes == 1 else "; between nodes a row goes to its relay"
    axes.set_title(f"bytes from {what} to {what}{between}", loc="left", fontsize=9)
    axes.tick_params(labelsize=8)


def _draw_load(axes: Any, measured: Measured, balanced: Balanced | None) -> None:
    ranks = np.arange(measured.topology.num_ranks)
    if balanced is None:
        axes.bar(ranks, measured.rank_load, width=1.0, color=BLUE, edgecolor="white", linewidth=0.3)
        mean = float(measured.rank_load.mean())
        title = f"rows computed by each rank; most: {measured.imbalance:.2f} x the mean"
    else:
        before, after = balanced.before, balanced.after
        axes.stairs(
            before.rank_load, np.arange(len(ranks) + 1) - 0.5, color=BLUE, label="as it is", linewidth=1.4
        )
        axes.stairs(
            after.rank_load,
            np.arange(len(ranks) + 1) - 0.5,
            color=VIOLET,
            label="balanced",
            fill=True,
            alpha=0.35,
        )
        mean = float(before.rank_load.mean())
        most = f"{before.imbalance:.2f}, balanced {after.imbalance:.2f}"
        title = f"rows computed by each rank; most: {most} x the mean"
    axes.axhline(mean, color=INK, linewidth=1, linestyle="--", label="mean")
    for node in range(1, measured.topology.num_nodes):
        axes.axvline(node * measured.topology.ranks_per_node - 0.5, color="#d9dee3", linewidth=0.8, zorder=0)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    axes.set_xlabel("rank", fontsize=8)
    axes.set_ylim(top=1.18 * max(float(measured.rank_load.max()), mean, 1.0))
    axes.set_title(title, loc="left", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
