"""What `anyep demo` shows of a training run: traffic between ranks, times, losses and the verdict."""

from __future__ import annotations

import statistics
from typing import Any, Final

from anyep.cli.demo.job import Job
from anyep.cli.gpus import in_words
from anyep.cli.nodes import limit_in_words, nodes_in_words
from anyep.cli.units import format_bytes

TOLERANCE: Final = 1e-4
"""Largest difference from the reference, relative; both add up float32, in different orders."""
SHADES: Final = (" ", "░", "▒", "▓", "█")


def record_of(job: Job, num_gpus: int, by_rank: list[list[Any]]) -> dict[str, Any]:
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
        "mode": "normal",
        "device": job.device,
        "gpus": num_gpus,
        "ranks": job.ranks,
        "nodes": job.nodes.num_nodes,
        "ranks_per_node": job.nodes.ranks_per_node,
        "topk_nodes": job.nodes.topk_nodes,
        "network": job.nodes.network if job.nodes.are_several else None,
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
        "traffic": _traffic_of(job, by_rank) if job.nodes.are_several else None,
    }


def _traffic_of(job: Job, by_rank: list[list[Any]]) -> dict[str, dict[str, int]]:
    """The bytes of all steps, beside those of a plain all-to-all, which sends each row to each receiver."""
    topology = job.nodes.topology
    within, between = 0, 0
    for rank, reports in enumerate(by_rank):
        for report in reports:
            for other, rows in enumerate(report.sent):
                if topology.node_of(other) == topology.node_of(rank):
                    within += rows
                else:
                    between += rows
    # Rows are sent in both directions, and so are their gradients.
    there_and_back = 4 * job.row_bytes
    last = [reports[-1] for reports in by_rank]
    return {
        "within_nodes": {
            "bytes": sum(report.bytes_within_node for report in last),
            "all_to_all_bytes": within * there_and_back,
        },
        "between_nodes": {
            "bytes": sum(report.bytes_between_nodes for report in last),
            "all_to_all_bytes": between * there_and_back,
        },
    }


def print_record(record: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    from anyep.cli.console import console_for_results

    console = console_for_results()
    place = nodes_in_words(record["nodes"], record["ranks_per_node"])
    if record["gpus"]:
        place = f" on {in_words(record['gpus'])}"
    limit = limit_in_words(record["nodes"], record["topk_nodes"])
    console.print(
        f"[bold]{record['ranks']} ranks[/bold]{place}, {record['tokens']} tokens per rank,"
        f" hidden {record['hidden']}, top-{record['topk']} of {record['experts']} experts{limit},"
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
    if record["traffic"]:
        table = Table(box=box.SIMPLE_HEAD, title="rows sent, all steps, there and back", title_justify="left")
        for heading in ("", "AnyEP", "plain all-to-all"):
            table.add_column(heading, justify="right" if heading else "left")
        for place, sent in record["traffic"].items():
            ours, theirs = format_bytes(sent["bytes"]), format_bytes(sent["all_to_all_bytes"])
            table.add_row(place.replace("_", " "), ours, theirs)
        console.print(table)
    losses = " -> ".join(f"{loss:.4f}" for loss in record["losses"])
    console.print(f"loss {losses}")
    verdict = "[green]matches[/green]" if record["ok"] else "[bold red]differs from[/bold red]"
    console.print(
        f"{verdict} the single-process reference: largest relative difference of an output or gradient"
        f" {record['largest_difference']:.1e} (at most {record['tolerance']:.0e} is allowed)"
    )
