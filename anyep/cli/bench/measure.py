"""Runs the cases of `anyep bench` on ranks, and records the results."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from anyep.cli.bench.records import RankReport, Report, Setup, Timing, description_of, records_of
from anyep.cli.gpus import Placement
from anyep.cli.ranks import Rank, run_ranks

if TYPE_CHECKING:
    from anyep.cli.bench.clock import Clock


class ProgressLine:
    """Shows what rank 0 is doing, in one terminal line that is rewritten, and erased at the end."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._width = 0

    def show(self, text: str) -> None:
        if self._is_shown:
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")
        self.show("")


def measure(setup: Setup, placement: Placement, show_progress: bool) -> Report:
    """Run every case on the CPU, or on the GPUs of `placement`."""
    with ProgressLine(show_progress) as progress:

        def on_report(rank: int, doing: Any) -> None:
            if rank == 0:
                progress.show(doing)

        progress.show("starting ranks" if setup.device == "cpu" else "starting ranks, preparing kernels")
        by_rank: list[RankReport] = run_ranks(
            setup.ranks,
            measure_on_rank,
            setup,
            placement.num_gpus,
            on_report=on_report,
            on_compile=progress.show if show_progress else None,
            placement=placement,
        )
    has_no_rival = (setup.device, setup.mode) == ("cuda", "normal") and setup.ranks > placement.num_gpus
    return Report(
        description_of(setup, by_rank[0]),
        records_of(setup, by_rank),
        "NCCL refuses ranks that share a GPU: there is nothing else to compare with" if has_no_rival else "",
    )


def measure_on_rank(rank: Rank, setup: Setup, num_gpus: int) -> RankReport:
    """Every case, timed on this rank together with all others. Only ranks import torch."""
    from anyep.cli.bench.clock import clock_of

    clock = clock_of(rank, setup, num_gpus)
    return clock.report(_timings_of(rank, setup, clock))


def _timings_of(rank: Rank, setup: Setup, clock: Clock) -> list[Timing]:
    from anyep.cli.bench import elastic, low_latency, normal

    timings: list[Timing] = []
    cases = elastic if setup.api == "elastic" else normal if setup.mode == "normal" else low_latency
    for tokens in setup.numbers_of_tokens:
        timings += clock.time(tokens, cases.groups_of(rank, setup, clock, tokens))
    if setup.sweep_sms:
        timings += clock.time(setup.tokens, normal.sweep_over_sms(rank, setup, clock))
    for tokens in setup.swept_tokens:
        timings += clock.time(tokens, cases.sweep_over_tokens(rank, setup, clock, tokens))
    return timings
