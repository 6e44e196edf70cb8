"""Machines as data: `anyep/machines/*.toml`, each constant with where it comes from.

    names = ["H800 CX7"]
    total_sms = { value = 132, source = "..." }
    [deepep-v1.normal]
    based_on = "h100.toml"      # constants that are not here are those of that file's table
    network_gbs = { value = 46.4, source = "..." }
    [[calibrated]]              # the published figures that set constants
    mode = "normal"
    nodes = [1, 2]

A machine's table names a library and a mode, since a kernel's rates are those of both. A constant that is
known only roughly has `low` and `high` beside its value.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

from anyep.errors import InvalidCall

LIKE: Final = 1.25
"""How far a constant may be off that is another machine's, where this one has figures of its own."""
ASSUMED: Final = 2.0
"""How far it may be off where no figure of this machine, library and mode is known."""
ALIKE: Final = ("network_gbs", "softness", "once_per_node", "host_sync_us", "places", "without_sms")
"""Constants that do not depend on the GPU: the NICs of all machines have 400 Gb/s."""
Tables = dict[str, dict[str, dict[str, "Constant"]]]


class Constant(NamedTuple):
    """A number of the model, its source, and between which numbers it lies if it is known only roughly."""

    value: float
    source: str
    low: float
    high: float


class Machine(NamedTuple):
    """One file of `anyep/machines/`, or of a user."""

    file: str
    names: tuple[str, ...]
    tables: Tables
    """By library, mode and name of the constant."""
    calibrated: tuple[dict[str, Any], ...]
    total_sms: int | None = None
    """Of a GPU, for computing and communicating together; None where a rank is no GPU."""

    def constants(self, library: str, mode: str) -> dict[str, float]:
        """The values for a library's mode; those of another library if the file does not have this one."""
        return {name: entry.value for name, entry in self._table(library, mode).items()}

    def limits(self, library: str, mode: str) -> tuple[dict[str, float], dict[str, float]]:
        """The constants with which calls are shortest, and those with which they are longest."""
        entries = self._table(library, mode).items()
        lows = {name: entry.low for name, entry in entries}
        highs = {name: entry.high for name, entry in entries}
        # Times make a call longer, rates and overlap make it shorter.
        is_time = {name: name.endswith("_us") for name in lows}
        best = {name: lows[name] if is_time[name] else highs[name] for name in lows}
        worst = {name: highs[name] if is_time[name] else lows[name] for name in lows}
        return best, worst

    def libraries(self, mode: str) -> list[str]:
        """Those that the file has constants for."""
        return [library for library, modes in self.tables.items() if mode in modes]

    def _table(self, library: str, mode: str) -> dict[str, Constant]:
        candidates = [modes for name, modes in self.tables.items() if name == library and mode in modes]
        candidates += [modes for modes in self.tables.values() if mode in modes]
        if not candidates:
            raise InvalidCall(
                f"{self.file} has no constants for mode {mode!r}: add a table [{library}.{mode}] to it, or"
                f" choose another machine"
            )
        return candidates[0][mode]

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
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".toml"))
    return tuple(shipped_machine(name) for name in names)


@functools.cache
def shipped_machine(name: str) -> Machine:
    """One file of the package."""
    file = files("anyep") / "machines" / name
    if not file.is_file():
        raise InvalidCall(f"there is no file {name!r} in anyep/machines to be based on: name one of them")
    return _machine(name, file.read_text(encoding="utf-8"))


def find_machine(name: str) -> Machine:
    """The machine with this name, in capitals or not, or of this file if the name ends in .toml.

    >>> find_machine("h100") is find_machine("H100")
    True
    """
    if name.endswith(".toml"):
        path = Path(name)
        try:
            return _machine(name, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise InvalidCall(
                f"the machine {name!r} cannot be read ({reason}): name a file, or a machine in anyep/machines"
            ) from error
    for machine in all_machines():
        if name.lower() in map(str.lower, machine.names):
            return machine
    known = ", ".join(sorted(name for machine in all_machines() for name in machine.names))
    raise InvalidCall(
        f"there is no machine {name!r} in anyep/machines: choose one of {known}, or name a .toml file"
    )


def _machine(file: str, text: str) -> Machine:
    try:
        content = tomllib.loads(text)
        names = tuple(content.pop("names"))
        calibrated = tuple(content.pop("calibrated", []))
        total_sms = content.pop("total_sms", None)
        tables = {
            library: {
                mode: _table(table, mode, any(_is_of(one, library, mode) for one in calibrated))
                for mode, table in modes.items()
            }
            for library, modes in content.items()
        }
        sms = int(total_sms["value"]) if total_sms else None
        return Machine(file, names, tables, calibrated, sms)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidCall(
            f"{file!r} is no machine ({error}): write it like the files of anyep/machines, or with"
            f" `anyep calibrate`"
        ) from None


def _is_of(selector: Mapping[str, Any], library: str, mode: str) -> bool:
    return bool(selector.get("library") == library and selector.get("mode") == mode)


def _table(table: dict[str, Any], mode: str, has_figures: bool) -> dict[str, Constant]:
    """The constants of a table, and those of the table that it is based on."""
    base = table.pop("based_on", None)
    constants = {}
    if base is not None:
        factor = LIKE if has_figures else ASSUMED
        why = "no figure of this machine separates it" if has_figures else "no figure of this machine sets it"
        source = f"{'' if has_figures else 'assumed: '}as {base}: {why}"
        inherited = next(iter(shipped_machine(base).tables.values()))[mode]
        for name, entry in inherited.items():
            away = 1.0 if name in ALIKE else factor
            constants[name] = Constant(entry.value, source, entry.low / away, entry.high * away)
    for name, entry in table.items():
        value = float(entry["value"])
        low, high = float(entry.get("low", value)), float(entry.get("high", value))
        if not 0 < low <= value <= high:
            raise ValueError(f"{name} is {value:g}, between {low:g} and {high:g}")
        constants[name] = Constant(value, str(entry["source"]), low, high)
    return constants
