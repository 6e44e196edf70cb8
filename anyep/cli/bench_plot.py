"""The picture of `anyep bench --plot`: how close each case is to a plain copy, and how far ahead of Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anyep.errors import NotSupported


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Two rows of bars: the rate of a plain copy is 1, the time of Gloo is 1."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotSupported("drawing a plot needs matplotlib: pip install 'anyep[plot]'") from error
    first = records[0]
    large = [record for record in records if record["of_copy"] and record["tokens"] == first["tokens"]]
    figure = Figure(figsize=(11, 7))
    figure.suptitle(
        f"{first['ranks']} ranks, {first['tokens']} tokens per rank, hidden {first['hidden']} bf16",
        fontweight="bold",
    )
    for index, (title, values, unit) in enumerate(
        (
            (
                "rate, as a multiple of a plain copy of the same bytes",
                [r["of_copy"] for r in large],
                "{:.2f}",
            ),
            ("speed, as a multiple of Gloo", [r["vs"].get("gloo", 0) for r in large], "{:.1f}x"),
        )
    ):
        axes = figure.add_subplot(2, 1, index + 1)
        names = [f"{record['case']}\n{record['path']}" for record in large]
        bars = axes.bar(names, values, color="#2e86ab" if index == 0 else "#8367c7")
        axes.bar_label(bars, [unit.format(value) for value in values], fontsize=8)
        axes.axhline(1, color="#e4572e", linewidth=1)
        axes.set_title(title, loc="left", fontsize=10)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
