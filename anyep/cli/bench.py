"""`anyep bench`: how fast AnyEP is here, beside a plain copy of the same bytes and Gloo, in one run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from anyep.cli.checks import check_experts, check_folder
from anyep.errors import InvalidCall, whole_number
from anyep.sizes import CHANNELS_PER_SCALE, check_row_bytes

MODES: Final = {"normal": 512, "low-latency": 128}
"""And their usual numbers of tokens."""


def bench(
    mode: Annotated[str, typer.Option(help="What to measure: normal or low-latency.")] = "normal",
    ranks: Annotated[int, typer.Option(help="Number of ranks, as processes on this machine.")] = 8,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens per rank; 512 in normal mode, 128 in low-latency mode.")
    ] = None,
    hidden: Annotated[int, typer.Option(help="Hidden size, in bf16 values.")] = 7168,
    experts: Annotated[int, typer.Option(help="Experts of all ranks together.")] = 64,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    repeats: Annotated[int, typer.Option(help="Repeats of each case; medians are shown.")] = 15,
    seed: Annotated[int, typer.Option(help="Seed of the data and the routing.")] = 0,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the records to this file; - for stdout.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the result to this .png or .svg file.")
    ] = None,
) -> None:
    """Measure dispatch and combine beside a plain copy of the same bytes and beside Gloo."""
    if mode not in MODES:
        raise InvalidCall(f"mode is {mode!r}: choose {' or '.join(MODES)}")
    if tokens is None:
        tokens = MODES[mode]
    for name, value in (
        ("ranks", ranks),
        ("tokens", tokens),
        ("hidden", hidden),
        ("repeats", repeats),
        ("topk", topk),
    ):
        whole_number(name, value, minimum=1)
    check_row_bytes(2 * hidden)
    if mode == "low-latency" and hidden % CHANNELS_PER_SCALE:
        raise InvalidCall(f"hidden is {hidden}: for FP8 it must be a multiple of {CHANNELS_PER_SCALE}")
    check_experts(experts, ranks, topk)
    if json_file not in (None, "-"):
        check_folder("the records", Path(str(json_file)))
    if plot_file is not None:
        if plot_file.suffix.lower() not in (".png", ".svg"):
            raise InvalidCall(
                f"a plot cannot be written to {str(plot_file)!r}: its name must end in .png or .svg"
            )
        check_folder("the plot", plot_file)
    from anyep.cli.bench_measure import Setup, measure

    setup = Setup(mode, ranks, tokens, hidden, experts, topk, repeats, seed)
    records = measure(setup, show_progress=sys.stderr.isatty())
    if json_file == "-":
        print(json.dumps(records, indent=2))
    else:
        if json_file is not None:
            Path(json_file).write_text(json.dumps(records, indent=2) + "\n")
        _print_table(setup, records)
    if plot_file is not None:
        from anyep.cli.bench_plot import draw

        draw(records, plot_file)


def _print_table(setup: Any, records: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    from anyep.cli.console import console_for_results
    from anyep.cli.units import format_seconds

    console = console_for_results()
    console.print(setup.description())
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("case", "path", "tokens", "median", "GB/s per rank", "of copy", "vs Gloo"):
        table.add_column(heading, justify="left" if heading in ("case", "path") else "right")
    for record in records:
        gloo = record["vs"].get("gloo")
        table.add_row(
            record["case"],
            record["path"],
            str(record["tokens"]),
            format_seconds(record["median_s"]),
            f"{record['gbps']:.2f}" if record["gbps"] else "",
            f"{record['of_copy']:.2f}" if record["of_copy"] else "",
            f"{gloo:.1f}x" if gloo else "",
        )
    console.print(table)
