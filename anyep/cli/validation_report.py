"""What `anyep plan --validate` prints: published times beside predicted ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyep.planning.validation import figures_of, shipped_figures, summary

Record = dict[str, Any]
GROUPS: tuple[tuple[str, Callable[[Record], bool]], ...] = (
    ("used to set constants", lambda record: record["calibrated"]),
    ("held out", lambda record: not record["calibrated"]),
    ("held out, several nodes", lambda record: not record["calibrated"] and record["nodes"] > 1),
)


def validate(files: list[Path], as_json: bool) -> None:
    """Print the figures of some files, or of all data files of the package."""
    figures = [figure for file in files for figure in figures_of(file)] if files else shipped_figures()
    records = [figure.record() for figure in figures]
    if as_json:
        print(json.dumps(records, indent=2))
    else:
        _print(records)


def summary_lines(records: list[Record]) -> list[str]:
    """One line for each kind of figure that there is."""
    lines = []
    for name, belongs in GROUPS:
        result = summary(record for record in records if belongs(record))
        if result["figures"]:
            lines.append(
                f"{name}: {result['figures']} figures, median error {result['median']:.1%},"
                f" {result['within_25']:.0%} within 25 %"
            )
    return lines


def cells(record: Record) -> list[str]:
    """A row of the table."""
    return [
        *(str(record[name]) for name in ("source", "machine", "mode", "nodes", "tokens")),
        "-" if record["sms"] is None else str(record["sms"]),
        record["what"],
        f"{record['published_us']:.0f}",
        f"{record['predicted_us']:.0f}",
        f"{record['error']:+.1%}",
        "yes" if record["calibrated"] else "no",
        record["bound"],
    ]


HEADINGS = (
    *("source", "machine", "mode", "nodes", "tokens", "SMs", "what"),
    *("published us", "predicted us", "error", "used", "bound by"),
)
NUM_LEFT = 3


def _print(records: list[Record]) -> None:
    from rich import box
    from rich.table import Table

    from anyep.cli.console import console_for_results

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if number < NUM_LEFT else "right")
    for record in records:
        table.add_row(*cells(record))
    console = console_for_results()
    console.print(table)
    for line in summary_lines(records):
        console.print(line)
