"""`anyep tune`: measures which tile sizes are the fastest on this machine, and stores them for Buffers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from anyep.backends.cache_folder import Unusable, private_base_folder
from anyep.backends.cuda import tuned
from anyep.backends.cuda.tuned import Entry, Invalid
from anyep.cli import options
from anyep.cli.bench.command import check_sizes
from anyep.cli.bench.measure import ProgressLine
from anyep.cli.bench.records import Setup
from anyep.cli.checks import check_file, write_text
from anyep.cli.gpus import Placement, count_gpus, in_words, placed
from anyep.cli.nodes import Nodes
from anyep.cli.ranks import Rank, run_ranks
from anyep.cli.tune.records import Found, Job, as_json, entries_of
from anyep.cli.tune.table import print_entries, print_found
from anyep.errors import InvalidCall, NotSupported, whole_number
from anyep.layout import check_num_sms

FEWEST_RANKS: Final = 2
"""By default, on a machine with one GPU."""
RESULT: Final = "the result"
NO_GPU: Final = (
    "only GPUs have tiles to tune: run `anyep tune` on the machine whose GPUs you use, and see `anyep doctor`"
)


def tune(
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks of your Buffers; default: as many as there are GPUs, with one GPU 2."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens per rank.")] = 4096,
    hidden: Annotated[int, typer.Option(help="Hidden size, in bf16 values.")] = 7168,
    experts: Annotated[int, typer.Option(help="Experts of all ranks together.")] = 256,
    topk: options.Topk = 8,
    sms: Annotated[
        int | None, typer.Option(help="SMs per rank while tiles are compared; an even number.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Repeats of each measurement; medians are compared.")] = 15,
    candidates: Annotated[
        int | None, typer.Option(help="Tile sizes to try for each of the two kernels; all by default.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, but store nothing.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only show what is stored.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Only delete what is stored.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the result to this file; - for stdout.")
    ] = None,
) -> None:
    """Find the fastest tile sizes for the GPUs here, and store them in the cache folder for all Buffers."""
    if show + reset + dry_run > 1:
        raise InvalidCall("--show, --reset and --dry-run exclude each other: choose one")
    if json_file not in (None, "-"):
        check_file(RESULT, Path(str(json_file)))
    try:
        if show:
            _show(json_file)
        elif reset:
            _reset(json_file)
        else:
            setup = Setup("normal", ranks or 1, tokens, hidden, experts, topk, repeats, 0, "cuda", sms)
            _check(setup, ranks, candidates)
            _tune(setup, ranks, candidates, stores=not dry_run, json_file=json_file)
    except Unusable as reason:
        raise NotSupported(f"tile sizes cannot be kept: {reason}") from None


def _check(setup: Setup, ranks: int | None, candidates: int | None) -> None:
    if ranks is not None:
        whole_number("--ranks", ranks, minimum=1)
    if candidates is not None:
        whole_number("--candidates", candidates, minimum=1)
    if setup.sms is not None:
        check_num_sms("--sms", setup.sms)
    check_sizes(setup)


def _tune(
    setup: Setup, ranks: int | None, candidates: int | None, stores: bool, json_file: str | None
) -> None:
    num_gpus = count_gpus(NO_GPU)
    num_ranks = ranks or (num_gpus if num_gpus > 1 else FEWEST_RANKS)
    setup = replace(setup, ranks=num_ranks, nodes=Nodes(1, num_ranks))
    check_sizes(setup)
    if num_ranks > num_gpus and num_ranks % num_gpus:
        raise InvalidCall(
            f"--ranks is {num_ranks}, which do not divide over {in_words(num_gpus)}: the best tiles depend on"
            " how many ranks share a GPU, so all GPUs must have the same number"
        )
    if stores:
        # Before anything is measured.
        private_base_folder()
    with placed("cuda", num_ranks) as placement:
        _check_no_turns(num_ranks, num_gpus, placement)
        found = _found_by_ranks(Job(setup, candidates), placement, show_progress=sys.stderr.isatty())
    file, problem = _stored(entries_of(found, setup)) if stores else (None, None)
    if json_file != "-":
        print_found(found, setup)
        print(f"stored in {file}; Buffers use it from now on" if file else "nothing was stored")
    if json_file is not None:
        _write(as_json(found, setup, file), json_file)
    if problem is not None:
        raise problem


def _stored(entries: list[Entry]) -> tuple[str | None, Unusable | None]:
    """Where the entries are now, or why they could not be stored: what was measured is shown first."""
    try:
        return str(tuned.store(entries)), None
    except Unusable as problem:
        return None, problem


def _check_no_turns(num_ranks: int, num_gpus: int, placement: Placement) -> None:
    if num_ranks <= num_gpus or placement.environment:
        return
    from anyep.backends.cuda.mps import MultiProcessService

    if not MultiProcessService.is_running():
        raise NotSupported(
            f"{num_ranks} ranks share {in_words(num_gpus)} and take turns, which hides what tiles"
            " change: start NVIDIA's multi-process service (`anyep doctor` tells how), or choose --ranks"
            f" {num_gpus}"
        )


def _found_by_ranks(job: Job, placement: Placement, show_progress: bool) -> Found:
    with ProgressLine(show_progress) as progress:

        def on_report(rank: int, doing: Any) -> None:
            if rank == 0:
                progress.show(doing)

        progress.show("starting ranks, preparing kernels")
        by_rank: list[Found] = run_ranks(
            job.setup.ranks,
            tune_on_rank,
            job,
            placement.num_gpus,
            on_report=on_report,
            on_compile=progress.show if show_progress else None,
            placement=placement,
        )
    return by_rank[0]


def tune_on_rank(rank: Rank, job: Job, num_gpus: int) -> Found:
    """The sweep. Only ranks import torch."""
    from anyep.cli.tune import sweep

    return sweep.tune_on_rank(rank, job, num_gpus)


def _write(record: object, json_file: str) -> None:
    text = json.dumps(record, indent=2)
    if json_file == "-":
        print(text)
    else:
        write_text(RESULT, json_file, text)


def _show(json_file: str | None) -> None:
    file, raw = tuned.path(), tuned.raw_entries()
    if json_file is not None:
        _write({"file": str(file), "entries": raw}, json_file)
    elif raw:
        print_entries(str(file), [_entry_or_reason(entry) for entry in raw])
    else:
        print(f"{file} has no entries: Buffers use the built-in tile sizes; `anyep tune` measures others")


def _entry_or_reason(raw: object) -> Entry | str:
    try:
        return Entry.from_json(raw)
    except Invalid as reason:
        return str(reason)


def _reset(json_file: str | None) -> None:
    file = tuned.path()
    was_there = tuned.remove()
    if json_file is not None:
        _write({"file": str(file), "deleted": was_there}, json_file)
    elif was_there:
        print(f"deleted {file}: Buffers use the built-in tile sizes")
    else:
        print(f"there was no {file}: Buffers use the built-in tile sizes")
