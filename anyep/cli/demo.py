"""`anyep demo`: a Mixture-of-Experts layer over several ranks, checked against one process; what it moved."""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import nullcontext
from typing import Annotated, Any, Final

import typer

from anyep.cli.checks import check_experts
from anyep.cli.demo_job import Job, train_on_rank
from anyep.cli.ranks import run_ranks
from anyep.errors import InvalidCall, whole_number
from anyep.sizes import check_row_bytes

PATHS: Final = ("auto", "window", "ring")
TOLERANCE: Final = 1e-4
"""Largest difference from the reference, relative; both add up float32, in different orders."""
SHADES: Final = (" ", "░", "▒", "▓", "█")


def demo(
    ranks: Annotated[int, typer.Option(help="Number of ranks, as processes on this machine.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens per rank and step.")] = 256,
    hidden: Annotated[int, typer.Option(help="Hidden size, in float32 values.")] = 256,
    experts: Annotated[int, typer.Option(help="Experts of all ranks together.")] = 16,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    path: Annotated[str, typer.Option(help="How rows travel: auto, window or ring.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a Mixture-of-Experts layer over several ranks, and check it against one process."""
    for name, value in (("ranks", ranks), ("hidden", hidden), ("topk", topk), ("steps", steps)):
        whole_number(name, value, minimum=1)
    whole_number("tokens", tokens, minimum=0)
    check_row_bytes(4 * hidden)
    check_experts(experts, ranks, topk)
    if path not in PATHS:
        raise InvalidCall(f"path is {path!r}: choose one of {', '.join(PATHS)}")
    job = Job(ranks, tokens, hidden, experts, topk, steps, seed, path)
    with _progress(steps) as on_report:
        by_rank = run_ranks(ranks, train_on_rank, job, on_report=on_report)
    record = _record(job, by_rank)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        _print(record)
    if not record["ok"]:
        raise typer.Exit(1)


def _progress(steps: int) -> Any:
    """A progress bar on the terminal; nothing where there is none."""
    if not sys.stderr.isatty():
        return nullcontext(None)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    class Live:
        def __enter__(self) -> Any:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} steps"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            task = self._bar.add_task("starting ranks", total=steps)

            def on_report(rank: int, report: Any) -> None:
                if rank == 0:
                    text = f"loss {report.loss:.4f}, difference {report.largest_difference:.1e}"
                    self._bar.update(task, completed=report.step + 1, description=text)

            return on_report

        def __exit__(self, *_: object) -> None:
            self._bar.stop()

    return Live()


def _record(job: Job, by_rank: list[list[Any]]) -> dict[str, Any]:
    last = [reports[-1] for reports in by_rank]
    difference = max(report.largest_difference for reports in by_rank for report in reports)
    received = [report.received for report in last]
    phases = {}
    for phase in last[0].seconds:
        # The first step warms everything up.
        times = [report.seconds[phase] for reports in by_rank for report in reports[1:] or reports]
        seconds = statistics.median(times)
        moved = statistics.mean(received) * job.row_bytes if phase not in ("layout", "experts") else 0
        phases[phase] = {"median_s": seconds, "gbps": moved / seconds / 1e9 if moved else None}
    return {
        "ranks": job.ranks,
        "tokens": job.tokens,
        "hidden": job.hidden,
        "experts": job.experts,
        "topk": job.topk,
        "steps": job.steps,
        "path": job.path,
        "ok": difference <= TOLERANCE,
        "largest_difference": difference,
        "tolerance": TOLERANCE,
        "losses": [report.loss for report in by_rank[0]],
        "sent": [report.sent for report in last],
        "received": received,
        "phases": phases,
    }


def _print(record: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    from anyep.cli.console import console_for_results

    console = console_for_results()
    console.print(
        f"[bold]{record['ranks']} ranks[/bold], {record['tokens']} tokens per rank,"
        f" hidden {record['hidden']}, top-{record['topk']} of {record['experts']} experts,"
        f" {record['steps']} steps, path {record['path']}"
    )
    most = max([count for row in record["sent"] for count in row] + [1])
    table = Table(
        box=box.SIMPLE_HEAD, title="tokens from rank (row) to rank (column), last step", title_justify="left"
    )
    table.add_column("")
    for rank in range(record["ranks"]):
        table.add_column(str(rank), justify="right")
    table.add_column("sent", justify="right")
    for rank, row in enumerate(record["sent"]):
        cells = [f"{SHADES[min(4, count * 5 // (most + 1))]} {count}" for count in row]
        table.add_row(str(rank), *cells, str(sum(row)))
    table.add_row("received", *(str(count) for count in record["received"]), "", style="dim")
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD, title="median over ranks and steps", title_justify="left")
    for heading in ("phase", "time", "GB/s per rank"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for phase, numbers in record["phases"].items():
        rate = f"{numbers['gbps']:.2f}" if numbers["gbps"] else ""
        table.add_row(phase, f"{numbers['median_s'] * 1e3:.2f} ms", rate)
    console.print(table)
    losses = " -> ".join(f"{loss:.4f}" for loss in record["losses"])
    console.print(f"loss {losses}")
    verdict = "[green]matches[/green]" if record["ok"] else "[bold red]differs from[/bold red]"
    console.print(
        f"{verdict} the single-process reference: largest relative difference of an output or gradient"
        f" {record['largest_difference']:.1e} (at most {record['tolerance']:.0e} is allowed)"
    )
