"""Options that several commands share: `topk: options.Topk = 8`."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[
    str, typer.Option(help="Where ranks compute and communicate: cpu or cuda; they may share a GPU.")
]
Nodes = Annotated[
    int | None,
    typer.Option(
        help="Virtual nodes to put the ranks on; in normal mode a token crosses once from one to another."
    ),
]
RanksPerNode = Annotated[int | None, typer.Option(help="Ranks of each virtual node.")]
Topk = Annotated[int, typer.Option(help="Experts per token.")]
TopkNodes = Annotated[
    int | None,
    typer.Option(help="Nodes that a token's experts may be on; half of them where not given."),
]
Network = Annotated[str | None, typer.Option(help="What joins the nodes: auto, loopback or nixl.")]
