"""Packages that are too old are refused in one sentence, wherever torch is first needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from anyep.errors import NotSupported, Outdated
from anyep.requirements import MINIMUM, check_requirements, how_to_install, is_older
from tests.support.programs import ROOT as REPOSITORY
from tests.support.programs import run_program

OLD_TORCH = {
    "torch/__init__.py": "__version__ = '2.9.1+cpu'\nclass Tensor: pass\n",
    "torch/nn/__init__.py": "",
    "torch/nn/functional.py": "",
}
"""As little as lets `import torch` and its like succeed."""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder, REPOSITORY)))},
    )


@pytest.fixture
def old_torch(tmp_path: Path) -> Path:
    for name, text in OLD_TORCH.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def sentence_about_torch(folder: Path) -> str:
    return (
        f"torch 2.9.1+cpu (loaded from {folder}/torch/__init__.py) is too old,"
        " AnyEP needs 2.11 or later: pip install 'torch>=2.11'"
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import anyep.api.buffer",
        "import anyep.events",
        "import anyep.autograd",
        "import anyep.nn",
        "from anyep import Buffer",
        "import anyep; anyep.EventOverlap",
        "import anyep; anyep.nn",
        "import anyep; anyep.install_as_deep_ep()",
    ],
)
def test_an_old_torch(old_torch: Path, statement: str) -> None:
    finished = python(old_torch, "-c", statement)
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1] == f"anyep.errors.Outdated: {sentence_about_torch(old_torch)}"


def test_an_old_torch_is_an_import_error(old_torch: Path) -> None:
    """Programs that can do without AnyEP catch that."""
    code = "try: from anyep import Buffer\nexcept ImportError as error: print(type(error).__name__)"
    assert python(old_torch, "-c", code).stdout == "Outdated\n"
    assert issubclass(Outdated, NotSupported)


def test_an_old_torch_does_not_matter_before_it_is_needed(old_torch: Path) -> None:
    assert python(old_torch, "-c", "import anyep; anyep.sizes; anyep.Config()").returncode == 0
    assert python(old_torch, "-m", "anyep", "plan").returncode == 0


def test_doctor_says_it_in_the_same_words(old_torch: Path) -> None:
    findings = json.loads(python(old_torch, "-m", "anyep", "doctor", "--json").stdout)
    (finding,) = [finding for finding in findings if finding["name"] == "torch"]
    assert finding["state"] == "missing"
    assert f"{finding['detail']}: {finding['next_step']}" == sentence_about_torch(old_torch)


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_commands_refuse_an_old_torch(old_torch: Path, command: str) -> None:
    finished = python(old_torch, "-m", "anyep", command)
    assert finished.returncode == 1
    assert finished.stderr == f"anyep: {sentence_about_torch(old_torch)}\n"


@pytest.mark.parametrize(("package", "version"), [("numba", "0.59.1"), ("numpy", "1.25.2")])
def test_other_old_packages(tmp_path: Path, package: str, version: str) -> None:
    """Told by what is installed, before they are loaded."""
    folder = tmp_path / f"{package}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    code = f"import sys; del sys.modules[{package!r}]\nfrom anyep.requirements import *; check_requirements()"
    finished = run_program("-c", code, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"})
    minimum = ".".join(map(str, MINIMUM[package]))
    assert finished.stderr.splitlines()[-1] == (
        f"anyep.errors.Outdated: {package} {version} is too old,"
        f" AnyEP needs {minimum} or later: pip install '{package}>={minimum}'"
    )


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.11.0+cu130", False),
        ("2.13.0a0+git1a2b3c4", False),
        ("2.11", False),
        ("3.0.0", False),
        ("2.10.1", True),
        ("2.9.0+cpu", True),
        ("1.13.1", True),
        ("built by hand", False),
    ],
)
def test_versions(version: str, expected: bool) -> None:
    assert is_older(version, (2, 11)) == expected


def test_what_is_here_is_new_enough() -> None:
    check_requirements()


def test_the_versions_are_those_of_the_distribution() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"\W", needs)[0]: needs for needs in project["dependencies"]}
    for package in MINIMUM:
        assert how_to_install(package) == f"pip install '{needed[package]}'"
