"""Ctrl-C while a command is still starting: one line and exit code 130, never a traceback. And SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT
from tests.support.world import hear_interrupts

ANYEP = (sys.executable, "-m", "anyep")

# As a user's terminal would send it, in the middle of an import: when the module is looked for, the process
# sends itself the signal, or says that it has come so far.
HOOK = """
import os, signal, sys

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("INTERRUPT_AT"):
            os.kill(os.getpid(), signal.SIGINT)
        if name == os.environ.get("SAY_AT"):
            os.write(int(os.environ["SAY_TO"]), b"!")

sys.meta_path.insert(0, Hook())
"""
# A library that turns whatever happens in it into an error of its own.
SWALLOWING = """
try:
    import swallowed
except BaseException as error:
    raise RuntimeError(f"cannot be initialised: {error!r}")
"""
IN_BACKGROUND = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
COMMANDS = {
    "plan": ("plan", "--ranks", "8"),
    "doctor": ("doctor",),
    "demo": ("demo", "--ranks", "2", "--experts", "4", "--topk", "2", "--steps", "100000"),
    "bench": ("bench", "--ranks", "2", "--experts", "4", "--topk", "2", "--repeats", "100000"),
    "run": ("run", "-n", "2", "-m", "timeit", "-n", "1", "-s", "import time", "time.sleep(100)"),
}


def environment(folder: Path, **variables: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(HOOK)
    return os.environ | variables | {"PYTHONPATH": f"{folder}:{ROOT}"}


def run(folder: Path, *program: str, interrupt_at: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter: what it imports is the point."""
    hear_interrupts()
    return subprocess.run(
        program,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(folder, INTERRUPT_AT=interrupt_at),
    )


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("plan", "anyep.cli.app"),
        ("plan", "typer"),
        ("plan", "anyep.cli.memory_plan"),
        ("plan", "rich.table"),
        ("doctor", "anyep.cli.doctor"),
        ("doctor", "torch"),
        ("doctor", "torch._C"),
        pytest.param("doctor", "numba", marks=pytest.mark.slow),
        ("demo", "anyep.cli.demo.job"),
        ("demo", "anyep.cli.ranks"),
        ("bench", "anyep.cli.bench.measure"),
        ("run", "anyep.launch.programs"),
        ("run", "anyep.cli.interrupts"),
    ],
)
def test_an_interrupted_import(tmp_path: Path, command: str, module: str) -> None:
    finished = run(tmp_path, *ANYEP, *COMMANDS[command], interrupt_at=module)
    assert (finished.returncode, finished.stderr) == (130, "anyep: interrupted\n")


def test_a_library_that_makes_another_error_of_it(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(SWALLOWING)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('it takes seconds to import')")
    finished = run(tmp_path, *ANYEP, "doctor", interrupt_at="swallowed")
    assert (finished.returncode, finished.stderr) == (130, "anyep: interrupted\n")


def early_interrupts() -> list[Any]:
    """Every command early; some of them when they have begun, or are about to end. The rest is slow."""
    quick = {("plan", 0.1), ("doctor", 0.3), ("demo", 0.0), ("demo", 1.0), ("bench", 0.3), ("run", 0.1)}
    return [
        pytest.param(command, delay_s, marks=[] if (command, delay_s) in quick else pytest.mark.slow)
        for command in COMMANDS
        for delay_s in (0.0, 0.03, 0.1, 0.3, 1.0)
    ]


@pytest.mark.parametrize(("command", "delay_s"), early_interrupts())
def test_an_early_interrupt(tmp_path: Path, command: str, delay_s: float) -> None:
    """A terminal sends it to all processes of the command, also to those that ranks are forked from."""
    hear_interrupts()
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*ANYEP, *COMMANDS[command]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[writing],
        process_group=0,
        env=environment(tmp_path, SAY_AT="anyep.cli.app", SAY_TO=str(writing)),
    )
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"!"
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        os.close(reading)
        process.kill()
    # At the very end of its shutdown Python gives the signal back its default: a silent end.
    if process.returncode in (0, -signal.SIGINT) and not errors:
        assert command in ("plan", "doctor")
        pytest.skip("it was done before the signal came")
    assert process.returncode == 130
    lines = ["anyep: interrupted\n"]
    if command == "run":
        lines.append("anyep: stopped by SIGINT; all ranks were ended\n")
    assert errors in lines


def test_the_server_that_ranks_are_forked_from_does_not_hear_it(tmp_path: Path) -> None:
    """It imports torch, which the command itself does not, and must not print a traceback then."""
    demo = ("demo", "--ranks", "2", "--hidden", "32", "--steps", "1", "--json")
    finished = run(tmp_path, *ANYEP, *demo, interrupt_at="torch")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert json.loads(finished.stdout)["ok"]


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """This is how a shell starts background jobs."""
    script = f"trap '' INT; exec {sys.executable} -m anyep plan --json"
    finished = run(tmp_path, "sh", "-c", script, interrupt_at="typer")
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize("in_background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_terminated_command_leaves_nothing(tmp_path: Path, in_background: bool) -> None:
    """The folder by which ranks are started is in TMPDIR. In the background Ctrl-C is ignored."""
    small = ("--tokens", "4", "--hidden", "128")
    process = subprocess.Popen(
        [*(IN_BACKGROUND if in_background else ()), *ANYEP, *COMMANDS["bench"], *small],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    try:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob("*/listener-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(tmp_path.iterdir()) != []
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (143, "anyep: stopped by SIGTERM\n")
    assert list(tmp_path.iterdir()) == []
