"""`anyep plan --machine`: predicted times and rates by number of ranks, and what bounds each."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyep.cli.checks import check_experts, check_file, writing
from anyep.cli.memory_plan import Workload
from anyep.errors import InvalidCall, whole_number
from anyep.planning.machines import Machine, find_machine
from anyep.planning.predictions import Prediction, Question, Range, predict
from anyep.planning.times import COMBINE, DISPATCH, LOW_LATENCY, NORMAL, Call
from anyep.topology import check_nodes

PLOT_ENDINGS = (".png", ".svg", ".pdf")
LEAST_WHOLE_RATE = 10
MODE_NAMES = {NORMAL: "normal", LOW_LATENCY: "low latency"}


@dataclass(frozen=True)
class TimesAsked:
    """What the options of the command ask for."""

    workload: Workload
    ranks: tuple[int, ...]
    machine: Machine
    library: str | None
    num_group_nodes: int | None
    compute_us: float

    def __post_init__(self) -> None:
        if not 0 <= self.compute_us < float("inf"):
            raise InvalidCall(f"--compute-us is {self.compute_us:g}: it must be a time, 0 or more")
        if self.num_group_nodes is not None:
            whole_number("--topk-nodes", self.num_group_nodes, minimum=1)
        for mode in self.modes:
            known = self.machine.libraries(mode)
            if self.library is not None and self.library not in known:
                raise InvalidCall(
                    f"{self.machine.file} has no constants of {self.library!r} for {MODE_NAMES[mode]} mode:"
                    f" choose one of {', '.join(known) or 'another machine'}"
                )
        for ranks in self.ranks:
            self.calls(ranks)

    @property
    def modes(self) -> tuple[str, ...]:
        return (NORMAL,) if self.workload.low_latency_tokens is None else (NORMAL, LOW_LATENCY)

    def library_of(self, mode: str) -> str:
        return self.library or next(iter(self.machine.libraries(mode)), "")

    def experts(self, ranks: int) -> int:
        """As many as fill all ranks alike: where ranks are more, experts have replicas."""
        return -(-self.workload.num_experts // ranks) * ranks

    def calls(self, ranks: int) -> list[Call]:
        """The calls that are predicted for a number of ranks."""
        workload = self.workload
        whole_number("--ranks", ranks, minimum=1)
        per_node = min(ranks, workload.ranks_per_node)
        check_nodes(ranks, per_node, "--ranks-per-node")
        nodes, experts = ranks // per_node, self.experts(ranks)
        check_experts(experts, ranks, workload.num_topk)
        groups = min(nodes, self.num_group_nodes or nodes)
        if workload.num_topk > experts // nodes * groups:
            raise InvalidCall(
                f"--topk is {workload.num_topk}, but {groups} of {nodes} nodes have only"
                f" {experts // nodes * groups} experts: raise --topk-nodes"
            )
        return [self._call(mode, what, ranks, nodes) for mode in self.modes for what in (DISPATCH, COMBINE)]

    def _call(self, mode: str, what: str, ranks: int, nodes: int) -> Call:
        workload = self.workload
        tokens = workload.num_tokens if mode == NORMAL else workload.low_latency_tokens or 0
        token = workload.token
        # What comes back from the experts is in bf16 where FP8 went out.
        row = token.hidden_bytes + token.num_scales * 4 if what == DISPATCH else workload.hint_hidden_bytes
        return Call(
            mode,
            what,
            nodes,
            ranks,
            tokens,
            row,
            workload.num_topk,
            self.experts(ranks),
            workload.num_sms,
            self.num_group_nodes,
        )

    def question(self, call: Call) -> Question:
        return Question(self.machine, self.library_of(call.mode), call, self.compute_us)


@dataclass(frozen=True)
class Row:
    """A call and its prediction."""

    call: Call
    library: str
    prediction: Prediction

    def record(self, machine: Machine) -> dict[str, Any]:
        call = self.call
        return {
            "machine": machine.names[0],
            "library": self.library,
            "mode": call.mode,
            "what": call.what,
            "ranks": call.num_ranks,
            "nodes": call.num_nodes,
            "tokens": call.num_tokens,
            "experts": call.num_experts,
            "sms": call.num_sms if call.mode == NORMAL else None,
            **self.prediction.record(),
        }


def show_times(asked: TimesAsked, as_json: bool, plot_file: Path | None) -> None:
    """Predict, draw and print."""
    rows = rows_of(asked)
    if plot_file is not None:
        draw_to("the plot", plot_file, lambda path: _draw(asked, rows, path))
    if as_json:
        print(json.dumps([row.record(asked.machine) for row in rows], indent=2))
    else:
        _print(asked, rows)


def rows_of(asked: TimesAsked) -> list[Row]:
    return [
        Row(call, asked.library_of(call.mode), predict(asked.question(call)))
        for ranks in asked.ranks
        for call in asked.calls(ranks)
    ]


def draw_to(what: str, path: Path, draw: Any) -> None:
    """Write a picture, and say so."""
    if path.suffix.lower() not in PLOT_ENDINGS:
        raise InvalidCall(
            f"{what} cannot be written to {str(path)!r}: its name must end in {', '.join(PLOT_ENDINGS)}"
        )
    check_file(what, path)
    with writing(what, path):
        draw(path)
    print(f"wrote {path}", file=sys.stderr)


def asked_of(
    workload: Workload,
    ranks: list[int],
    machine: str,
    library: str | None,
    num_group_nodes: int | None,
    compute_us: float,
) -> TimesAsked:
    return TimesAsked(workload, tuple(ranks), find_machine(machine), library, num_group_nodes, compute_us)


def title_of(rows: list[Row]) -> str:
    """What the rows of one mode have in common."""
    call = rows[0].call
    return f"{MODE_NAMES[call.mode]} mode, {call.num_tokens} tokens per rank, {rows[0].library}"


def range_text(pair: Range, digits: int = 0) -> str:
    """A number, or a range of two.

    >>> range_text((12.34, 12.34)), range_text((1955, 3700.4))
    ('12', '1955 to 3700')
    """
    low, high = (f"{each:.{digits}f}" for each in pair)
    return low if low == high else f"{low} to {high}"


def _draw(asked: TimesAsked, rows: list[Row], path: Path) -> None:
    from anyep.cli.plan_plot import draw_scale

    draw_scale(asked, rows, path)


def _print(asked: TimesAsked, rows: list[Row]) -> None:
    from rich import box
    from rich.table import Table

    from anyep.cli.console import console_for_results

    console = console_for_results()
    workload = asked.workload
    console.print(
        f"[bold]{asked.machine.names[0]}[/bold]: hidden {workload.hidden} {workload.dtype},"
        f" top-{workload.num_topk} of {workload.num_experts} experts, {workload.num_sms} SMs,"
        f" {workload.ranks_per_node} ranks per node"
    )
    for mode in asked.modes:
        chosen = [row for row in rows if row.call.mode == mode]
        table = Table(
            box=box.SIMPLE_HEAD,
            title=title_of(chosen),
            title_justify="left",
        )
        headings = ["ranks", "nodes", "call", "us", "bound by", "logical GB/s", "physical GB/s"]
        headings += ["SMs enough"] * (mode == NORMAL) + ["exposed us"] * bool(asked.compute_us)
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="left" if number in (2, 4) else "right")
        for row in chosen:
            table.add_row(*_cells(row, mode, bool(asked.compute_us)))
        console.print(table)
    for line in _notes(asked, rows):
        console.print(line)


def _cells(row: Row, mode: str, with_overlap: bool) -> list[str]:
    call, prediction = row.call, row.prediction
    cells = [
        str(call.num_ranks),
        str(call.num_nodes),
        call.what,
        range_text(prediction.us),
        prediction.bound,
        _rate_text(prediction.logical_gbs),
        _rate_text(prediction.physical_gbs),
    ]
    if mode == NORMAL:
        cells.append("-" if prediction.enough_sms is None else str(prediction.enough_sms))
    if with_overlap and prediction.overlap:
        cells.append(range_text(prediction.overlap.exposed_us))
    return cells


def _rate_text(pair: Range) -> str:
    """Slow links have rates of a few GB/s, or less."""
    return range_text(pair, digits=0 if pair[0] >= LEAST_WHOLE_RATE else 1)


def _notes(asked: TimesAsked, rows: list[Row]) -> list[str]:
    doubts = dict.fromkeys(doubt for row in rows for doubt in row.prediction.doubts)
    lines = [f"A range: {doubt}." for doubt in doubts]
    hosts = {row.prediction.host_sync_us for row in rows if row.prediction.host_sync_us}
    lines += [
        f"Not in these times: a dispatch whose host waits for the number of rows takes {range_text(pair)} us"
        f" more."
        for pair in sorted(hosts)
    ]
    if asked.compute_us:
        lines.append(
            f"exposed: by how much {asked.compute_us:g} us of computation and the call beside it take longer"
            f" than the computation alone on all SMs."
        )
    return lines
