"""The tool that sets up the environment: what it shows of pip, and what it does not hide."""

from __future__ import annotations

import doctest
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "make_venv.py"


@pytest.fixture(scope="module")
def make_venv() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_venv", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_examples(make_venv: ModuleType) -> None:
    result = doctest.testmod(make_venv)
    assert result.attempted >= 5
    assert result.failed == 0


def test_packages_are_counted_while_they_are_installed(make_venv: ModuleType, tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"

    def install(name: str) -> None:
        folder = packages / f"{name}.dist-info"
        folder.mkdir(parents=True)
        (folder / "INSTALLER").touch()

    install("pip-1")
    installation = make_venv.Installation(tmp_path)
    assert installation.read("Installing collected packages: a, b, c\n") == "installing a (1 of 3)"
    install("a-1")
    assert installation.now() == "installing b (2 of 3)"
    install("b-1")
    install("c-1")
    assert installation.now() == "installing c (3 of 3)"


def test_only_an_environment_of_the_same_python_is_kept(make_venv: ModuleType, tmp_path: Path) -> None:
    assert not make_venv.is_usable(tmp_path, False)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    # Half an environment, as an interruption leaves it.
    assert not make_venv.is_usable(tmp_path, False)
    # In place of pip, which takes seconds to install.
    (next(tmp_path.glob("lib/python*/site-packages")) / "pip.py").touch()
    assert make_venv.is_usable(tmp_path, False)
    assert not make_venv.is_usable(tmp_path, True)


def test_a_failure_is_shown_in_full(make_venv: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('Collecting x'); print('why it failed', file=sys.stderr); sys.exit(3)"
    with pytest.raises(SystemExit) as end:
        make_venv.run([sys.executable, "-c", code], "installing", make_venv.Progress())
    assert str(end.value.code).startswith("Setting up failed at: ")
    errors = capfd.readouterr().err
    assert "Collecting x\n" in errors
    assert "why it failed\n" in errors


def test_a_line_every_few_seconds(
    make_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_venv, "BETWEEN_LINES_S", 0.2)
    monkeypatch.setattr(make_venv, "TICK_S", 0.05)
    code = "import time; print('Collecting torch==2.13.0', flush=True); time.sleep(1)"
    installation = make_venv.Installation(Path("nowhere"))
    make_venv.run([sys.executable, "-c", code], "asking for packages", make_venv.Progress(), installation)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert lines[0].endswith("s] asking for packages")
    assert lines[-1].endswith("s] asking for torch")


def test_it_uses_the_standard_library_alone() -> None:
    code = f"import runpy; runpy.run_path({str(TOOL)!r}, run_name='tool')"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
