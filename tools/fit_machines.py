"""Fit the constants of machines again: python tools/fit_machines.py [h100.toml ...]

A constant is fitted if its source begins with "fitted"; the others of its table stay as they are. What is
minimised is the mean square of log(predicted / published) over the figures of the file's [[calibrated]], by
the method of Levenberg and Marquardt, from a start that is off on purpose: first the constants of one node,
on its figures, then those of several nodes on the others; all on all figures where the table has none of
several nodes. Where figures are fewer than constants, dispatch and combine share theirs. The table shows the
file's value beside the fit; nothing is written.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import numpy as np

from anyep.planning.counts import Array
from anyep.planning.machines import Machine, all_machines
from anyep.planning.times import time_of
from anyep.planning.validation import Figure, shipped_figures

BETWEEN_NODES = re.compile("relay|notify|hop|message|softness")
LENT = re.compile("(assumed: )?as ")
START = 1.3
"""The fit begins with so many times the file's constants."""
STEPS = 200
STEP = 1e-4
ENOUGH = 1e-10


def fit(
    figures: list[Figure], constants: dict[str, float], names: list[str], own: list[str]
) -> dict[str, float]:
    """All constants, those with these names as they fit best; `own` are those that no other machine lends."""
    if not any(BETWEEN_NODES.search(name) for name in own):
        return constants | fit_together(figures, constants, names)
    for part in (1, 2):
        mine = [name for name in names if bool(BETWEEN_NODES.search(name)) == (part > 1)]
        there = [figure for figure in figures if (figure.call.num_nodes > 1) == (part > 1)]
        if mine and there:
            constants = constants | fit_together(there, constants, mine)
    return constants


def fit_together(figures: list[Figure], constants: dict[str, float], names: list[str]) -> dict[str, float]:
    """The constants with these names that fit some figures best."""
    if len(figures) < len(names):
        shared = sorted({name.split("_", 1)[1] for name in names})
        of_both = {name: shared.index(name.split("_", 1)[1]) for name in names}
    else:
        of_both = {name: index for index, name in enumerate(names)}
    starts = {index: START * constants[name] for name, index in of_both.items()}

    def constants_of(logs: Array) -> dict[str, float]:
        values = np.exp(logs).tolist()
        return {name: values[index] for name, index in of_both.items()}

    def residuals(logs: Array) -> Array:
        tried = constants | constants_of(logs)
        return np.array(
            [np.log(time_of(figure.call, tried).total_us / figure.published_us) for figure in figures]
        )

    return constants_of(minimised(residuals, np.log([starts[index] for index in sorted(starts)])))


def minimised(residuals: Callable[[Array], Array], start: Array) -> Array:
    """Where the sum of squares is least, near a start.

    >>> minimised(lambda x: np.array([x[0] - 3.0, 2 * x[1] + x[0]]), np.array([0.0, 0.0])).round(3).tolist()
    [3.0, -1.5]
    """
    at, damping = start, 1e-2
    here = residuals(at)
    for _ in range(STEPS):
        slopes = np.stack([(residuals(at + STEP * unit) - here) / STEP for unit in np.eye(len(at))], axis=1)
        square, gradient = slopes.T @ slopes, slopes.T @ here
        step = -np.linalg.lstsq(square + damping * np.eye(len(at)), gradient, rcond=None)[0]
        there = residuals(at + step)
        gain = float(here @ here - there @ there)
        if gain > 0:
            at, here, damping = at + step, there, damping / 4
            if gain < ENOUGH * float(here @ here + ENOUGH):
                break
        elif damping > 1e6:
            break
        else:
            damping *= 4
    return at


def fitted(machine: Machine) -> list[tuple[str, str, str, float, float, int]]:
    """(library, mode, constant, value of the file, fitted value, figures) of a machine."""
    rows = []
    for library, modes in machine.tables.items():
        for mode, table in modes.items():
            names = [name for name, constant in table.items() if constant.source.startswith("fitted")]
            figures = [
                figure
                for figure in shipped_figures()
                if figure.machine in machine.names and (figure.library, figure.call.mode) == (library, mode)
                if figure.record()["calibrated"]
            ]
            if not names or not figures:
                continue
            values = machine.constants(library, mode)
            own = [name for name, entry in table.items() if not LENT.match(entry.source)]
            found = fit(figures, values, names, own)
            rows += [(library, mode, name, values[name], found[name], len(figures)) for name in names]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", help="files of anyep/machines; all where none is given")
    files = parser.parse_args().files
    print("| file | library | mode | constant | in the file | fitted | differs | figures |")
    print("|---|---|---|---|---|---|---|---|")
    for machine in all_machines():
        if files and machine.file not in files:
            continue
        for library, mode, name, value, found, count in fitted(machine):
            print(
                f"| {machine.file} | {library} | {mode} | {name} | {value:g} | {found:.4g} |"
                f" {found / value - 1:+.1%} | {count} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
