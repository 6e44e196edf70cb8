"""`anyep run`: a script or module as several ranks on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from anyep.errors import InvalidCall, whole_number
from anyep.launch import launch


def run(
    num_ranks: Annotated[int, typer.Option("--ranks", "-n", help="Number of ranks.")],
    program: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="What to run: a Python script, or a module with -m."),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Passed on as they are.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
    prefix: Annotated[
        bool, typer.Option("--prefix/--no-prefix", help="Start each line of output with its rank.")
    ] = True,
) -> None:
    """Run a Python script as several ranks, with the environment that torch.distributed expects."""
    whole_number("--ranks (-n)", num_ranks, minimum=1)
    if not program:
        raise InvalidCall(
            "there is no script to run: write it after the number, as in `anyep run -n 8 train.py`"
        )
    if not module and not Path(program).is_file():
        raise InvalidCall(f"there is no script {program!r}: check its name, or add -m if it is a module")
    command = [sys.executable, "-u", *(["-m"] if module else []), program, *(arguments or [])]
    raise typer.Exit(launch(num_ranks, command, _for_ranks_on_one_gpu(num_ranks), prefix_lines=prefix))


def _for_ranks_on_one_gpu(num_ranks: int) -> dict[str, str]:
    """What ranks need in their environment where NVIDIA's multi-process service lets them share a GPU."""
    from anyep.backends.cuda.mps import MultiProcessService, connections_for_ranks

    return connections_for_ranks(os.environ, num_ranks) if MultiProcessService.is_running() else {}
