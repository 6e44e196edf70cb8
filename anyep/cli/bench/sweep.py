"""Sweeps: some cases of a group are measured again, at several numbers of SMs or of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from anyep.cli.bench.clock import Case, Group
from anyep.cli.bench.records import Sweep


@contextmanager
def swept(
    group: Group, sweep: Sweep, chosen: Collection[tuple[str, str]], sms: int | None = None
) -> Iterator[list[Case]]:
    """One point of a sweep: the cases and paths of `group` that are `chosen`, compared with no rival."""
    with group as cases:
        for_sweep = [case for case in cases if (case.label.case, case.label.path) in chosen]
        yield [
            replace(
                case,
                label=replace(case.label, sweep=sweep, sms=sms or case.label.sms, rivals=(), is_listed=True),
            )
            for case in for_sweep
        ]
