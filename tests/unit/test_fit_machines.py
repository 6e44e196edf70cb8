"""tools/fit_machines.py: it finds the constants of the machines' files again."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from anyep.planning.machines import Machine, all_machines
from anyep.planning.times import time_of
from anyep.planning.validation import shipped_figures
from tests.support.programs import ROOT


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_machines", ROOT / "tools" / "fit_machines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def largest_difference(tool: ModuleType, machine: Machine) -> float:
    """Between the times of the file's constants and of fitted ones, over all figures of a machine."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for library, mode, name, _, value, _ in tool.fitted(machine):
        found.setdefault((library, mode), {})[name] = value
    differences = [0.0]
    for figure in shipped_figures():
        key = figure.library, figure.call.mode
        if figure.machine in machine.names and key in found:
            constants = machine.constants(*key)
            before, after = (
                time_of(figure.call, each).total_us for each in (constants, constants | found[key])
            )
            differences.append(abs(after / before - 1))
    return max(differences)


@pytest.mark.parametrize("file", ["h800.toml", "efa.toml", "mi300x.toml"])
def test_few_figures(tool: ModuleType, file: str) -> None:
    (machine,) = [machine for machine in all_machines() if machine.file == file]
    assert tool.fitted(machine)
    assert largest_difference(tool, machine) < 0.01


@pytest.mark.slow
def test_all_machines(tool: ModuleType) -> None:
    for machine in all_machines():
        limit = 0.05 if machine.file == "h100.toml" else 0.01
        assert largest_difference(tool, machine) < limit, machine.file
