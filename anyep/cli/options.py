"""Options that several commands share: `topk: options.Topk = 8`."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[
    str,
    typer.Option(
        metavar="cpu|cuda", help="Where ranks compute and communicate; several ranks may share a GPU."
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        help="Virtual nodes to divide the ranks into; default: 1, or what --ranks and --ranks-per-node give."
    ),
]
RanksPerNode = Annotated[int | None, typer.Option(help="Ranks of each virtual node.")]
Topk = Annotated[int, typer.Option(help="Experts per token.")]
TopkNodes = Annotated[
    int | None,
    typer.Option(help="How many nodes the experts of a token may be on; default: half of the nodes."),
]
Heap = Annotated[
    str | None,
    typer.Option(
        metavar="auto|device|host",
        help="Where ranks on GPUs keep what they share: memory of the GPUs (device) or of the host; default:"
        " ANYEP_HEAP, else what CUDA allows.",
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="auto|loopback|nixl",
        help="What joins the nodes: memory (loopback) or a network (nixl); default: memory on one host.",
    ),
]
