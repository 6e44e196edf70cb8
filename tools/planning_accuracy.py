"""Write the tables of docs/planning-accuracy.md: python tools/planning_accuracy.py

It takes what `anyep plan --validate` prints: every figure of published.csv, and groups of those of
deepep_v1_measured.csv.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anyep.cli.validation_report import HEADINGS, cells, summary_lines
from anyep.planning.validation import shipped_figures, summary

PAGE = Path(__file__).resolve().parent.parent / "docs" / "planning-accuracy.md"
BEGIN = "<!-- tables: begin, written by tools/planning_accuracy.py -->"
END = "<!-- tables: end -->"
MEASURED = "aiconfigurator"


def tables() -> str:
    """The part of the page between its two marks."""
    records = [figure.record() for figure in shipped_figures()]
    published = [record for record in records if not record["source"].startswith(MEASURED)]
    measured = [record for record in records if record["source"].startswith(MEASURED)]
    lines = ["## In short", "", *(f"- {line}" for line in summary_lines(records))]
    lines += ["", "## published.csv", "", *_table(HEADINGS, [cells(record) for record in published])]
    lines += ["", "## deepep_v1_measured.csv", "", "All numbers of tokens together.", ""]
    headings = ("machine", "mode", "nodes", "SMs", "what", "used", "figures", "median error", "within 25 %")
    return "\n".join([*lines, *_table(headings, _grouped(measured))])


def page_with(tables_text: str, page: str) -> str:
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables_text}\n\n{END}{after}"


def _grouped(records: list[dict[str, Any]]) -> list[list[str]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        key = tuple(record[name] for name in ("machine", "mode", "nodes", "sms", "what", "calibrated"))
        groups.setdefault(key, []).append(record)
    rows = []
    for (machine, mode, nodes, sms, what, used), group in groups.items():
        result = summary(group)
        name = [machine, mode, str(nodes), str(sms or "-"), what, "yes" if used else "no"]
        rows.append([*name, str(len(group)), f"{result['median']:.1%}", f"{result['within_25']:.0%}"])
    return rows


def _table(headings: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [list(headings), ["---"] * len(headings), *rows]]


if __name__ == "__main__":
    PAGE.write_text(page_with(tables(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
