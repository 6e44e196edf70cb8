"""The tool that changes the sources on purpose: its table fits the sources, and it tells what tests catch."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.programs import run_program

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "mutate.py"
AREAS = (("cpu-",), ("gpu-",), ("step-", "ll-", "mask-"), ("arg-",), ("fail-",))
"""What ids begin with: CPU kernels, GPU kernels, steps of the protocols, argument checks, failures."""


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for the module of their annotations.
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


def test_its_examples(mutate: ModuleType) -> None:
    result = doctest.testmod(mutate)
    assert result.attempted >= 5
    assert result.failed == 0


def test_every_change_of_the_table_can_be_made(mutate: ModuleType) -> None:
    """The texts are in the sources, and there is a test for each change."""
    mutations = mutate.load_table(mutate.TABLE, ROOT)
    assert len(mutations) >= 70
    for area in AREAS:
        assert sum(mutation.id.startswith(area) for mutation in mutations) >= 15, area
    for mutation in mutations:
        assert mutation.tests, mutation.id


def test_every_test_of_the_table_is_there(mutate: ModuleType) -> None:
    tests = {test for mutation in mutate.load_table(mutate.TABLE, ROOT) for test in mutation.tests}
    found = run_program(
        "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *sorted(tests), cwd=ROOT
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("old", "occurrence", "sentence"),
    [
        ("c", 0, "there is no 'c'"),
        ("a", 0, "'a' is there 2 times"),
        ("b", 2, "there is no 'b' \\(number 2\\)"),
    ],
)
def test_a_text_that_is_not_in_its_file_once(
    mutate: ModuleType, old: str, occurrence: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        mutate.changed_text("a b a", old, "x", occurrence)


@pytest.mark.parametrize(
    ("file", "old", "new", "kernels"),
    [
        ("counting.py", "tokens_per_rank[:] = 0", "pass", {"counting.count_layout"}),
        ("windows.py", "all_ids[index] = -1", "pass", {"windows.pad_ids", "windows.unpack_window"}),
        ("masks.py", '"""Masks: ', '"""Other masks: ', set()),
        ("sums.py", "BLOCK = 1024", "BLOCK = 512", {"sums.pull_and_sum", "slots.sum_tokens"}),
        (
            "../../../layout.py",
            "RECORD_HEADER_BYTES: Final = 64",
            "RECORD_HEADER_BYTES: Final = 80",
            {"slots.read_records"},
        ),
        ("../../../settings.py", '"ANYEP_"', '"EP_"', set()),
    ],
)
def test_kernels_that_a_change_reaches(
    mutate: ModuleType, file: str, old: str, new: str, kernels: set[str]
) -> None:
    path = (ROOT / "anyep/backends/cpu/kernels" / file).resolve()
    source = mutate.changed_text(path.read_text(), old, new)
    reached = mutate.kernels_reached(ROOT, str(path.relative_to(ROOT)), source)
    assert kernels <= reached
    assert bool(kernels) == bool(reached)
    assert "rings.read_counters" not in reached


TOY = """\
import time

def larger(a, b):
    return a if a > b else b

def add(a, b):
    return a + b

def rest():
    time.sleep(0)
"""
TESTS_OF_THE_TOY = """\
from toy import add, larger, rest

def test_larger():
    assert larger(1, 2) == 2

def test_add():
    assert add(2, 2) == 4

def test_rest():
    rest()

def test_that_fails():
    assert add(2, 2) == 5
"""
CHANGES_OF_THE_TOY = {
    "caught": ("a > b", "a < b", "test_larger"),
    "survives": ("a + b", "a * b", "test_add"),
    "hangs": ("sleep(0)", "sleep(100)", "test_rest"),
    "invalid": ("a + b", "a - b", "test_that_fails"),
}
ENTRY = """\
[[mutation]]
id = "{}"
file = "toy.py"
what = ""
old = "{}"
new = "{}"
tests = ["test_toy.py::{}"]
limit_s = {}
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "test_toy.py").write_text(TESTS_OF_THE_TOY)
    entries = (
        ENTRY.format(name, *change, 3 if name == "hangs" else 60)
        for name, change in CHANGES_OF_THE_TOY.items()
    )
    (tmp_path / "table.toml").write_text("".join(entries))
    return tmp_path


def test_a_toy(mutate: ModuleType, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--root", str(toy), "--table", str(toy / "table.toml"), "--jobs", "1"]
    found = toy / "found.json"
    assert mutate.main([*arguments, "--json", str(found)]) == 2
    outcomes = {result["id"]: (result["outcome"], result["by"]) for result in json.loads(found.read_text())}
    assert outcomes == {
        "caught": ("caught", "test_toy.py::test_larger"),
        "survives": ("SURVIVED", ""),
        "hangs": ("caught", "a hang"),
        "invalid": ("INVALID", "its tests fail without it"),
    }
    printed = capsys.readouterr().out
    assert "2 of 4 were caught, 1 survived" in printed
    assert printed.splitlines()[-2:] == ["SURVIVED: survives (toy.py): ", "INVALID: invalid (toy.py): "]
    assert (toy / "toy.py").read_text() == TOY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "0"], "--jobs must be at least 1, not 0"),
        (["--allow", "-1"], "--allow must not be negative, not -1"),
        (["--only", "caught", "--only", "cuaght"], "no change has the id 'cuaght'; --list shows them all"),
        (["--table", "none.toml"], "cannot read the table none.toml"),
        (["--operators", "none.py"], "there is no none.py"),
        (["--operators", "toy.py"], "there is no tests/unit/test_toy.py"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments(
    mutate: ModuleType, toy: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        mutate.main(["--root", str(toy), "--table", str(toy / "table.toml"), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('new = "a < b"\n', "", "table.toml: number 1 (caught) lacks new"),
        ('"a < b"', '"a ) b"', "table.toml: number 1 (caught, toy.py): unmatched ')'"),
        ('"a > b"', '"a >= b"', "table.toml: number 1 (caught, toy.py): there is no 'a >= b'"),
        ('"toy.py"', '"boy.py"', "table.toml: number 1 (caught, boy.py): [Errno 2] No such file"),
        ('id = "survives"', 'id = "caught"', "table.toml has more than one caught"),
        ("[[mutation]]", "[[mutation]", "cannot read the table"),
    ],
)
def test_wrong_tables(mutate: ModuleType, toy: Path, old: str, new: str, message: str) -> None:
    table = toy / "table.toml"
    table.write_text(table.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=re.escape(message)):
        mutate.load_table(table, toy)
