"""`anyep demo`: a Mixture-of-Experts layer over several ranks, checked against one process; its traffic.

In normal mode the layer is trained, in low-latency mode it decodes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import typer

from anyep.cli import options
from anyep.cli.checks import check_experts
from anyep.cli.demo import decode_results, train_results
from anyep.cli.demo.job import DecodeJob, Job, decode_on_rank, train_on_rank
from anyep.cli.gpus import check_device, placed
from anyep.cli.nodes import count_ranks, nodes_of
from anyep.cli.ranks import run_ranks
from anyep.errors import InvalidCall, whole_number
from anyep.sizes import check_fp8_hidden, check_row_bytes

USUAL_RANKS: Final = 8
PATHS: Final = ("auto", "window", "ring")


@dataclass(frozen=True)
class Defaults:
    """Default values of the options of a mode."""

    tokens: int
    hidden: int
    steps: int


MODES: Final = {"normal": Defaults(256, 256, 5), "low-latency": Defaults(8, 512, 200)}


def demo(
    mode: Annotated[
        str,
        typer.Option(metavar="normal|low-latency", help="Train a layer (normal), or decode (low-latency)."),
    ] = "normal",
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks, as processes on this machine; default: 8.")
    ] = None,
    nodes: options.Nodes = None,
    ranks_per_node: options.RanksPerNode = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens per rank and step; default: 256, in low-latency mode 8.")
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(help="Hidden size; default: 256 float32 values, in low-latency mode 512 bf16 values."),
    ] = None,
    experts: Annotated[int, typer.Option(help="Experts of all ranks together.")] = 16,
    topk: options.Topk = 4,
    topk_nodes: options.TopkNodes = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of training or of decoding; default: 5, in low-latency mode 200, where more make"
            " percentiles steadier."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    device: options.Device = "cpu",
    path: Annotated[
        str | None,
        typer.Option(metavar="auto|window|ring", help="How rows travel in normal mode; default: auto."),
    ] = None,
    network: options.Network = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a Mixture-of-Experts layer over several ranks, and check it against one process."""
    if mode not in MODES:
        raise InvalidCall(f"--mode is {mode!r}: choose {' or '.join(MODES)}")
    check_device(device)
    usual = MODES[mode]
    tokens = usual.tokens if tokens is None else tokens
    hidden = usual.hidden if hidden is None else hidden
    steps = usual.steps if steps is None else steps
    for name, value in (("--hidden", hidden), ("--topk", topk), ("--steps", steps)):
        whole_number(name, value, minimum=1)
    counts = count_ranks(ranks, nodes, ranks_per_node, USUAL_RANKS)
    ranks = math.prod(counts)
    check_experts(experts, ranks, topk)
    by_node = nodes_of(counts, device, mode, topk, experts, topk_nodes, network)
    if mode == "normal":
        path = "auto" if path is None else path
        ok = _train(Job(ranks, tokens, hidden, experts, topk, steps, seed, path, device, by_node), as_json)
    elif path is not None:
        raise InvalidCall("--path is for normal mode: low-latency calls have one way only; leave it out")
    else:
        ok = _decode(DecodeJob(ranks, tokens, hidden, experts, topk, steps, seed, device, by_node), as_json)
    if not ok:
        raise typer.Exit(1)


def _train(job: Job, as_json: bool) -> bool:
    """Run normal mode; returns whether the check passed."""
    whole_number("--tokens", job.tokens, minimum=0)
    check_row_bytes(4 * job.hidden)
    if job.path not in PATHS:
        raise InvalidCall(f"--path is {job.path!r}: choose one of {', '.join(PATHS)}")
    if job.path == "ring" and job.device != "cpu" and job.nodes.are_several:
        raise InvalidCall(
            "--path ring is not for several nodes on GPUs: rows go to windows only there; leave it out"
        )

    def describe(report: Any) -> str:
        return f"loss {report.loss:.4f}, difference {report.largest_difference:.1e}"

    with placed(job.device, job.ranks) as placement, _progress(job, describe) as shown:
        by_rank = run_ranks(job.ranks, train_on_rank, job, placement=placement, **shown)
    record = train_results.record_of(job, placement.num_gpus, by_rank)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        train_results.print_record(record)
    return bool(record["ok"])


def _decode(job: DecodeJob, as_json: bool) -> bool:
    """Run low-latency mode; returns whether the check passed."""
    whole_number("--tokens", job.tokens, minimum=1)
    check_fp8_hidden(job.hidden, name="--hidden")

    def describe(report: Any) -> str:
        return f"decoding, difference {report.difference.largest:.1e}"

    with placed(job.device, job.ranks) as placement, _progress(job, describe) as shown:
        by_rank = run_ranks(job.ranks, decode_on_rank, job, placement=placement, **shown)
    record = decode_results.record_of(job, placement.num_gpus, by_rank)
    if as_json:
        print(json.dumps(asdict(record), indent=2))
    else:
        decode_results.print_record(record)
    return record.ok


def _progress(job: Job | DecodeJob, describe: Callable[[Any], str]) -> Any:
    """A progress bar, as the arguments with which `run_ranks` updates it; none without a terminal."""
    if not sys.stderr.isatty():
        return nullcontext({})
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
            # On a GPU the first step may have to compile kernels.
            beginning = "starting ranks" if job.device == "cpu" else "starting ranks, preparing kernels"
            task = self._bar.add_task(beginning, total=job.steps)

            def on_report(rank: int, report: Any) -> None:
                if rank == 0:
                    self._bar.update(task, completed=report.step + 1, description=describe(report))

            def on_compile(sentence: str) -> None:
                self._bar.update(task, description=sentence)

            return {"on_report": on_report, "on_compile": on_compile}

        def __exit__(self, *_: object) -> None:
            self._bar.stop()

    return Live()
