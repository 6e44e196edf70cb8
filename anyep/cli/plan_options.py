"""The options of `anyep plan`, by what they are about: `ranks: plan_options.Ranks = "8"`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anyep.cli.memory_plan import ELEMENT_BYTES

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE",
        help="With --validate: files of published figures; by default those in the package. With"
        " --trace: further files of the trace.",
    ),
]
Ranks = Annotated[str, typer.Option(help="Number of ranks; several as 8,16,32.")]
Hidden = Annotated[int, typer.Option(help="Hidden size: values per token.")]
Dtype = Annotated[str, typer.Option(help=f"What travels: {', '.join(ELEMENT_BYTES)}.")]
Tokens = Annotated[int, typer.Option(help="Tokens per rank in one dispatch.")]
Experts = Annotated[int, typer.Option(help="Experts of all ranks together.")]
NumSms = Annotated[int, typer.Option(help="SMs for communication; two make a channel.")]
RanksPerNode = Annotated[int, typer.Option(help="Ranks that share memory.")]
LowLatencyTokens = Annotated[
    int | None, typer.Option(help="Also plan low-latency mode, for at most this many tokens per rank.")
]
Memory = Annotated[
    str | None, typer.Option(help="Memory of a rank, like 80GiB or 512MiB: say whether the plan fits.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: an object, or a list of them.")]
MapFile = Annotated[
    Path | None, typer.Option("--map", help="Draw one rank's memory to this .svg or .png file.")
]
Validate = Annotated[
    bool, typer.Option("--validate", help="Compare predicted times with published ones instead.")
]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine", help="Predict times on this machine: a name in anyep/machines, or a .toml file."
    ),
]
Library = Annotated[
    str | None, typer.Option(help="With --machine: whose kernels; default: the first in the machine's file.")
]
TopkNodes = Annotated[
    int | None,
    typer.Option(help="With --machine: how many nodes a token's experts may be on; default: all."),
]
ComputeUs = Annotated[
    float,
    typer.Option(
        help="A computation in microseconds: with --machine one beside each call, with --balance that of the"
        " experts of a rank with a mean load."
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot", help="Draw to this file: with --machine times and rates, with --trace bytes and loads."
    ),
]
TraceFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace",
        metavar="TRACE",
        help="Count what a routing sends: topk_idx in .npy, .pt or .parquet; further files may follow.",
    ),
]
Skew = Annotated[
    float | None,
    typer.Option(help="Count a drawn routing: the n-th most popular expert has a weight of n ** -skew."),
]
Seed = Annotated[int, typer.Option(help="With --skew: seed of the drawn routing.")]
WithBalance = Annotated[
    bool, typer.Option("--balance", help="With a trace: place experts by load, and show what changes.")
]
Replicas = Annotated[
    int | None,
    typer.Option(
        help="With --balance: experts and replicas in all; default: one more per rank than experts."
    ),
]
Groups = Annotated[
    int, typer.Option(help="With --balance: groups of experts that a limited gate chooses from.")
]
ExpertBytes = Annotated[
    str | None,
    typer.Option(help="With --balance: an expert's weights, like 44MB; default: 3 x hidden x 2048 values."),
]
