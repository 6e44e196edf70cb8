"""The tables of `anyep tune`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from anyep.backends.cuda.tuned import Entry, Rates
from anyep.cli.bench.records import ENOUGH, Setup
from anyep.cli.bench.table import empty_table
from anyep.cli.tune.candidates import KERNELS, LEAST_GAIN, Tile, Tried, in_words
from anyep.cli.tune.records import Found
from anyep.cli.units import format_rate, format_seconds

if TYPE_CHECKING:
    from rich.table import Table


def print_found(found: Found, setup: Setup) -> None:
    from anyep.cli.console import console_for_results

    console = console_for_results()
    console.print(description_of(found, setup))
    console.print(_table_of_tiles(found))
    console.print(_table_of_sms(found))
    for kernel in KERNELS:
        console.print(f"{kernel}: {chosen_in_words(found.choices[kernel].tile, found.rates(kernel))}")
    console.print(
        f"SMs: {found.recommended_sms} per rank reach {ENOUGH * 100:.0f} % of the best rate of both; for"
        f" calls without a config: Buffer.set_num_sms({found.recommended_sms}) on all ranks"
    )


def description_of(found: Found, setup: Setup) -> str:
    shared = f" ({found.ranks_on_gpu} on a GPU)" if found.ranks_on_gpu > 1 else ""
    return (
        f"{', '.join(found.gpus)}: {setup.ranks} ranks{shared}, {setup.tokens} tokens per rank, hidden"
        f" {setup.hidden} bf16, top-{setup.topk} of {setup.experts} experts, {found.sms} SMs per rank;"
        f" medians of {setup.repeats} runs in CUDA graphs, of the slowest rank"
    )


def chosen_in_words(tile: Tile | None, rates: Rates) -> str:
    """What was chosen for a kernel.

    >>> chosen_in_words(None, Rates(600.0, 600.0))
    'the built-in tile, 600 GB/s per rank: no other is at least 2 % faster'
    """
    if tile is None:
        least = f"{100 * (LEAST_GAIN - 1):.0f} %"
        rate = format_rate(rates.before)
        return f"the built-in tile, {rate} GB/s per rank: no other is at least {least} faster"
    return (
        f"{in_words(tile)}: {format_rate(rates.after)} GB/s per rank instead of {format_rate(rates.before)},"
        f" {rates.gain:.2f}x"
    )


def _table_of_tiles(found: Found) -> Table:
    """Every tile; the built-in ones were measured twice. An arrow points to what was chosen."""
    table = empty_table(["case", "tile", "time", "GB/s per rank", "of built-in"])
    for kernel in KERNELS:
        tried = [each for each in found.tried if each.kernel == kernel]
        builtin = [each.median for each in tried if each.is_builtin]
        for each in tried:
            table.add_row(*_cells_of(found, each, sum(builtin) / len(builtin)))
    table.columns[1].justify = "left"
    table.caption = (
        "▸ chosen; the built-in tiles came first and last, and the fastest were measured again beside them"
    )
    return table


def _cells_of(found: Found, tried: Tried, builtin: float) -> Sequence[str]:
    chosen = found.choices[tried.kernel].tile
    is_chosen = tried.is_builtin if chosen is None else tried.tile == chosen
    name = f"{'▸ ' if is_chosen else ''}{in_words(tried.tile)}{' (built-in)' if tried.is_builtin else ''}"
    if tried.problem:
        return tried.kernel, f"{name}: does not run here: {tried.problem}", "", "", ""
    rate = format_rate(found.gbps(tried.median))
    return tried.kernel, name, format_seconds(tried.median), rate, f"{builtin / tried.median:.2f}x"


def _table_of_sms(found: Found) -> Table:
    headings = ["SMs per rank"]
    for kernel in KERNELS:
        headings += [f"{kernel}, GB/s per rank", "of best"]
    table = empty_table(headings)
    for sms in found.by_sms[KERNELS[0]]:
        cells = [str(sms)]
        for kernel in KERNELS:
            rate, best = found.by_sms[kernel][sms], max(found.by_sms[kernel].values())
            arrow = "▸ " if sms == found.enough_sms(kernel) else ""
            cells += [f"{arrow}{format_rate(rate)}", f"{rate / best:.0%}"]
        table.add_row(*cells)
    table.caption = (
        f"▸ the fewest SMs that reach {ENOUGH * 100:.0f} % of the best rate, with the chosen tiles"
    )
    return table


def print_entries(file: str, entries: Sequence[Entry | str]) -> None:
    """What is stored, or what is wrong with an entry."""
    from anyep.cli.console import console_for_results

    console = console_for_results()
    # What a file says is no markup.
    show = partial(console.print, markup=False)
    show(file)
    for entry in entries:
        if isinstance(entry, str):
            show(f"an entry that is not used: {entry}")
            continue
        measured = entry.measured
        show(f"{entry.key}, measured {measured.at}")
        show(f"  dispatch: {chosen_in_words(entry.dispatch, entry.dispatch_rates)}")
        show(f"  combine: {chosen_in_words(entry.combine, entry.combine_rates)}")
        show(f"  SMs: {entry.recommended_sms} per rank are enough (Buffer.set_num_sms)")
        show(
            f"  with {measured.tokens} tokens per rank, hidden {measured.hidden}, top-{measured.topk} of"
            f" {measured.experts} experts, {measured.sms} SMs; torch {measured.torch}, triton"
            f" {measured.triton}, anyep {measured.anyep}"
        )
