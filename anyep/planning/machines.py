"""Machines as data: `anyep/machines/*.toml`, each constant with where it comes from.

    names = ["H800 CX7"]
    [deepep-v1.normal]
    network_gbs = { value = 46.4, source = "..." }
    [[calibrated]]          # the published figures that set constants
    mode = "normal"
    nodes = [1, 2]

A machine's table names a library and a mode, since a kernel's rates are those of both.
"""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files
from typing import Any, NamedTuple

from anyep.errors import InvalidCall


class Machine(NamedTuple):
    """One file of `anyep/machines/`."""

    file: str
    names: tuple[str, ...]
    tables: dict[str, dict[str, dict[str, Any]]]
    """By library, mode and name of the constant: its value and source."""
    calibrated: tuple[dict[str, Any], ...]

    def constants(self, library: str, mode: str) -> dict[str, float]:
        """The values for a library's mode; those of another library if the file does not have this one."""
        candidates = [modes for name, modes in self.tables.items() if name == library and mode in modes]
        candidates += [modes for modes in self.tables.values() if mode in modes]
        if not candidates:
            raise InvalidCall(
                f"anyep/machines/{self.file} has no constants for mode {mode!r}: add a table"
                f" [{library}.{mode}] to it, or choose another machine"
            )
        return {name: float(entry["value"]) for name, entry in candidates[0][mode].items()}

    def was_calibrated_on(self, row: dict[str, Any]) -> bool:
        """Whether a published figure was used to set a constant of this machine."""
        return any(_matches(selector, row) for selector in self.calibrated)


def _matches(selector: dict[str, Any], row: dict[str, Any]) -> bool:
    for name, wanted in selector.items():
        if row[name] not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


@functools.cache
def all_machines() -> tuple[Machine, ...]:
    """Every machine of the package, in the order of the files' names."""
    folder = files("anyep") / "machines"
    found = sorted(
        (file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name
    )
    machines = []
    for file in found:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        names = tuple(tables.pop("names"))
        calibrated = tuple(tables.pop("calibrated", []))
        machines.append(Machine(file.name, names, tables, calibrated))
    return tuple(machines)


def find_machine(name: str) -> Machine:
    """The machine with this name."""
    for machine in all_machines():
        if name in machine.names:
            return machine
    known = ", ".join(sorted(name for machine in all_machines() for name in machine.names))
    raise InvalidCall(f"there is no machine {name!r} in anyep/machines: choose one of {known}, or add a file")
