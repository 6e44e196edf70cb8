"""`anyep bench`: the speed of AnyEP here, compared with a plain copy of the same bytes and Gloo or NCCL."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from anyep import settings
from anyep.cli import options
from anyep.cli.bench.measure import measure
from anyep.cli.bench.records import Report, Setup
from anyep.cli.bench.table import print_report
from anyep.cli.checks import check_experts, check_file, write_text, writing
from anyep.cli.gpus import check_device, placed
from anyep.cli.nodes import count_ranks, nodes_of
from anyep.errors import InvalidCall, NotSupported, whole_number
from anyep.layout import check_num_sms
from anyep.sizes import check_fp8_hidden, check_row_bytes

MODES: Final = ("normal", "low-latency")
APIS: Final = ("buffer", "elastic")
LIBRARIES: Final = ("deep_ep",)
RECORDS: Final = "the records"
PLOT: Final = "the plot"


@dataclass(frozen=True)
class Defaults:
    """Default values of the options."""

    ranks: int
    tokens: int
    experts: int


USUAL: Final = {
    ("cpu", "normal"): Defaults(8, 512, 64),
    ("cpu", "low-latency"): Defaults(8, 128, 64),
    ("cuda", "normal"): Defaults(2, 4096, 256),
    ("cuda", "low-latency"): Defaults(8, 128, 256),
}


def bench(
    mode: Annotated[str, typer.Option(metavar="normal|low-latency", help="The calls to measure.")] = "normal",
    api: Annotated[
        str,
        typer.Option(metavar="buffer|elastic", help="The class: Buffer, or ElasticBuffer on one node."),
    ] = "buffer",
    device: options.Device = "cpu",
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks, as processes on this machine; default: 8, on cuda in normal mode 2."
        ),
    ] = None,
    nodes: options.Nodes = None,
    ranks_per_node: options.RanksPerNode = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per rank; default: 512, on cuda 4096, in low-latency mode 128."),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Hidden size, in bf16 values.")] = 7168,
    experts: Annotated[
        int | None, typer.Option(help="Experts of all ranks together; default: 64, on cuda 256.")
    ] = None,
    topk: options.Topk = 8,
    topk_nodes: options.TopkNodes = None,
    repeats: Annotated[int, typer.Option(help="Repeats of each case; medians are shown.")] = 15,
    seed: Annotated[int, typer.Option(help="Seed of the data and the routing.")] = 0,
    sms: Annotated[
        int | None, typer.Option(help="SMs per rank, on cuda in normal mode; an even number.")
    ] = None,
    sweep_sms: Annotated[
        bool, typer.Option("--sweep-sms", help="Also measure with 4 to 32 SMs per rank, on cuda.")
    ] = False,
    sweep_tokens: Annotated[
        bool,
        typer.Option("--sweep-tokens", help="Also measure with 1, 4, 16 ... --tokens tokens per rank."),
    ] = False,
    network: options.Network = None,
    heap: options.Heap = None,
    against: Annotated[
        str | None,
        typer.Option(help="Also run the cases through an installed library with the same API: deep_ep."),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the records to this file; - for stdout.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the result to this .png or .svg file.")
    ] = None,
) -> None:
    """Measure dispatch and combine beside a plain copy of the same bytes, and beside Gloo or NCCL."""
    usual = _defaults_of(mode, device)
    counts = count_ranks(ranks, nodes, ranks_per_node, usual.ranks)
    setup = Setup(
        mode,
        math.prod(counts),
        usual.tokens if tokens is None else tokens,
        hidden,
        usual.experts if experts is None else experts,
        topk,
        repeats,
        seed,
        device,
        sms,
        sweep_sms,
        sweep_tokens=sweep_tokens,
        api=api,
    )
    check_sizes(setup)
    by_node = nodes_of(counts, device, mode, topk, setup.experts, topk_nodes, network)
    setup = replace(setup, nodes=by_node, heap=_checked_heap(heap, device))
    setup = replace(setup, against=_checked_library(against, setup))
    _check_api(setup)
    _check_sms(setup)
    _check_sweep_of_tokens(setup)
    _check_files(json_file, plot_file)
    with placed(device, setup.ranks) as placement:
        report = measure(setup, placement, show_progress=sys.stderr.isatty())
    _show(report, json_file, plot_file)


def _defaults_of(mode: str, device: str) -> Defaults:
    if mode not in MODES:
        raise InvalidCall(f"--mode is {mode!r}: choose {' or '.join(MODES)}")
    check_device(device)
    return USUAL[device, mode]


def check_sizes(setup: Setup) -> None:
    for name, value in (
        ("--tokens", setup.tokens),
        ("--hidden", setup.hidden),
        ("--repeats", setup.repeats),
        ("--topk", setup.topk),
    ):
        whole_number(name, value, minimum=1)
    check_row_bytes(setup.row_bytes)
    if setup.mode == "low-latency":
        check_fp8_hidden(setup.hidden, name="--hidden")
    check_experts(setup.experts, setup.ranks, setup.topk)


def _checked_heap(heap: str | None, device: str) -> str:
    if heap is not None and heap not in settings.HEAPS:
        raise InvalidCall(f"--heap is {heap!r}: choose one of {', '.join(settings.HEAPS)}")
    if heap is not None and device == "cpu":
        raise InvalidCall("--heap is for GPUs: add --device cuda, or leave it out")
    return str(settings.HEAP.choose(heap).value)


def _checked_library(name: str | None, setup: Setup) -> str:
    """The library to compare with; empty for none."""
    if name is None:
        return ""
    if name not in LIBRARIES:
        raise InvalidCall(f"--against is {name!r}: choose {' or '.join(LIBRARIES)}")
    if setup.nodes.are_several:
        raise InvalidCall("--against is for ranks of one node: leave --nodes out")
    if find_spec(name) is None:
        raise NotSupported(
            f"--against is {name!r}, but Python finds no module of that name: install it for"
            f" the Python that runs anyep ({sys.executable})"
        )
    return name


def _check_api(setup: Setup) -> None:
    if setup.api not in APIS:
        raise InvalidCall(f"--api is {setup.api!r}: choose {' or '.join(APIS)}")
    chosen = setup.mode, setup.against, setup.sms, setup.sweep_sms
    is_usual = chosen == ("normal", "", None, False)
    if setup.api == "elastic" and (not is_usual or setup.nodes.are_several):
        raise InvalidCall(
            "--api elastic measures on one node: leave out --mode, --nodes, --against and --sms"
        )


def _check_sms(setup: Setup) -> None:
    if (setup.sms is not None or setup.sweep_sms) and (setup.device, setup.mode) != ("cuda", "normal"):
        raise InvalidCall(
            "--sms and --sweep-sms are for --device cuda in normal mode: add that, or leave them out"
        )
    if setup.sms is not None:
        check_num_sms("--sms", setup.sms)


def _check_sweep_of_tokens(setup: Setup) -> None:
    if setup.sweep_tokens and setup.tokens == 1:
        raise InvalidCall(
            "--sweep-tokens measures from 1 token to --tokens, which is 1: choose more, or leave it out"
        )


def _check_files(json_file: str | None, plot_file: Path | None) -> None:
    if json_file not in (None, "-"):
        check_file(RECORDS, Path(str(json_file)))
    if plot_file is not None:
        if plot_file.suffix.lower() not in (".png", ".svg"):
            raise InvalidCall(
                f"a plot cannot be written to {str(plot_file)!r}: its name must end in .png or .svg"
            )
        check_file(PLOT, plot_file)


def _show(report: Report, json_file: str | None, plot_file: Path | None) -> None:
    records = json.dumps([record.as_json() for record in report.records], indent=2)
    if json_file == "-":
        print(records)
    else:
        print_report(report)
        if json_file is not None:
            write_text(RECORDS, json_file, records)
    if plot_file is not None:
        from anyep.cli.bench.plot import draw

        with writing(PLOT, plot_file):
            draw(report, plot_file)
