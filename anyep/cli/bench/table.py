"""The tables of `anyep bench`: a line per case, and on GPUs the rates by number of SMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from anyep.cli.bench.records import Record, Report
from anyep.cli.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

RIVALS: Final = {"gloo": "Gloo", "nccl": "NCCL", "deep_ep": "deep_ep"}


def print_report(report: Report) -> None:
    from anyep.cli.console import console_for_results

    console = console_for_results()
    console.print(report.description)
    console.print(_table_of(report.cases))
    if report.sweep:
        console.print(_table_of_sweep(report.sweep))
    if report.note:
        console.print(report.note)


def _table_of(records: Sequence[Record]) -> Table:
    rivals = sorted({rival for record in records for rival in record.vs})
    p99 = [record.p99_s for record in records]
    headings = ["case", "path", "tokens", "p50" if any(p99) else "median"]
    headings += ["p99"] if any(p99) else []
    has_host = any(record.host_s for record in records)
    headings += ["host"] if has_host else []
    headings += ["GB/s per rank", "of copy", *(f"vs {RIVALS[rival]}" for rival in rivals)]
    crosses = any(record.bytes_between_nodes is not None for record in records)
    if crosses:
        headings += ["between nodes", "all-to-all's"]
    table = empty_table(headings)
    for record, slowest in zip(records, p99, strict=True):
        cells = [record.case, record.path, str(record.tokens), format_seconds(record.median_s)]
        cells += [format_seconds(slowest)] if slowest else []
        if has_host:
            cells.append(format_seconds(record.host_s) if record.host_s else "")
        cells.append(format_rate(record.gbps) if record.gbps else "")
        cells.append(f"{record.of_copy:.2f}" if record.of_copy else "")
        cells += [f"{record.vs[rival]:.1f}x" if rival in record.vs else "" for rival in rivals]
        if crosses:
            crossed = (record.bytes_between_nodes, record.all_to_all_bytes_between_nodes)
            cells += ["" if num_bytes is None else format_bytes(num_bytes) for num_bytes in crossed]
        table.add_row(*cells)
    return table


def _table_of_sweep(records: Sequence[Record]) -> Table:
    """Rates by number of SMs, in graphs; an arrow points to the fewest SMs that are enough."""
    cases = list(dict.fromkeys(record.case for record in records))
    found = {(record.case, record.sms): record for record in records}
    best = {case: max(record.gbps for record in records if record.case == case) for case in cases}
    headings = ["SMs per rank"]
    for case in cases:
        headings += [f"{case}, GB/s per rank", "of best"]
    table = empty_table(headings)
    for sms in dict.fromkeys(record.sms for record in records):
        cells = [str(sms)]
        for case in cases:
            record = found[case, sms]
            arrow = "▸ " if record.enough else ""
            cells += [f"{arrow}{format_rate(record.gbps)}", f"{record.gbps / best[case]:.0%}"]
        table.add_row(*cells)
    table.caption = "▸ the fewest SMs that reach 80 % of the best rate"
    return table


def empty_table(headings: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, caption_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("case", "path") else "right")
    return table
