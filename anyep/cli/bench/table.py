"""The tables of `anyep bench`: a line per case, and one per number of SMs or of tokens of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from anyep.cli.bench.records import Record, Report, lines_of
from anyep.cli.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

RIVALS: Final = {"gloo": "Gloo", "nccl": "NCCL", "deep_ep": "deep_ep"}


def print_report(report: Report) -> None:
    from anyep.cli.console import console_for_results

    console = console_for_results()
    console.print(report.description)
    console.print(_table_of(report.cases))
    if over_sms := report.swept("sms"):
        console.print(_table_over_sms(over_sms))
    if over_tokens := report.swept("tokens"):
        console.print(_table_over_tokens(over_tokens))
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


def _table_over_sms(records: Sequence[Record]) -> Table:
    """Rates by number of SMs, in graphs; an arrow points to the fewest SMs that are enough."""
    best = {line: max(record.gbps for record in of_line) for line, of_line in lines_of(records).items()}

    def cells_of(line: str, record: Record) -> list[str]:
        arrow = "▸ " if record.enough else ""
        return [f"{arrow}{format_rate(record.gbps)}", f"{record.gbps / best[line]:.0%}"]

    table = _table_of_lines(
        records, "SMs per rank", lambda record: record.sms, ("GB/s per rank", "of best"), cells_of
    )
    table.caption = "▸ the fewest SMs that reach 80 % of the best rate"
    return table


def _table_over_tokens(records: Sequence[Record]) -> Table:
    """Times and rates by number of tokens; the copies are what the rates are compared with."""

    def cells_of(_: str, record: Record) -> list[str]:
        of_copy = f"{record.of_copy:.2f}" if record.of_copy else ""
        return [format_seconds(record.median_s), format_rate(record.gbps), of_copy]

    time = "p50" if any(record.p99_s for record in records) else "median"
    calls = [record for record in records if record.case != "copy"]
    table = _table_of_lines(
        calls, "tokens", lambda record: record.tokens, (time, "GB/s", "of copy"), cells_of
    )
    table.caption = "GB/s per rank"
    return table


def _table_of_lines(
    records: Sequence[Record],
    what_varies: str,
    number_of: Callable[[Record], int | None],
    headings: Sequence[str],
    cells_of: Callable[[str, Record], list[str]],
) -> Table:
    """A row per number of a sweep; for each of its lines, these columns, with its name above the first."""
    lines = lines_of(records)
    columns = [(f"{line}\n{headings[0]}", *headings[1:]) for line in lines]
    table = empty_table([what_varies, *chain.from_iterable(columns)])
    for at_number in zip(*lines.values(), strict=True):
        cells = [cells_of(line, record) for line, record in zip(lines, at_number, strict=True)]
        table.add_row(str(number_of(at_number[0])), *chain.from_iterable(cells))
    return table


def empty_table(headings: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, caption_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("case", "path") else "right")
    return table
