"""Ctrl-C while a command is still starting: one line and exit code 130, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.world import hear_interrupts

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
COMMANDS = {
    "plan": ("plan", "--ranks", "8"),
    "doctor": ("doctor",),
    "demo": ("demo", "--ranks", "2", "--experts", "4", "--topk", "2", "--steps", "100000"),
    "bench": ("bench", "--ranks", "2", "--experts", "4", "--topk", "2", "--repeats", "100000"),
    "run": ("run", "-n", "2", "-m", "timeit", "-n", "1", "-s", "import time", "time.sleep(100)"),
}


def environment(folder: Path, **variables: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(HOOK)
    return os.environ | variables | {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}


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
        ("doctor", "numba"),
        ("demo", "anyep.cli.demo_job"),
        ("demo", "anyep.cli.ranks"),
        ("bench", "anyep.cli.bench_measure"),
        ("run", "anyep.launch"),
        ("run", "anyep.cli.interrupts"),
    ],
)
def test_an_interrupted_import(tmp_path: Path, command: str, module: str) -> None:
    hear_interrupts()
    finished = subprocess.run(
        [sys.executable, "-m", "anyep", *COMMANDS[command]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(tmp_path, INTERRUPT_AT=module),
    )
    assert (finished.returncode, finished.stderr) == (130, "anyep: interrupted\n")


def test_a_library_that_makes_another_error_of_it(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(SWALLOWING)
    hear_interrupts()
    finished = subprocess.run(
        [sys.executable, "-m", "anyep", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(tmp_path, INTERRUPT_AT="swallowed"),
    )
    assert (finished.returncode, finished.stderr) == (130, "anyep: interrupted\n")


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_early_interrupt(tmp_path: Path, command: str, delay_s: float) -> None:
    """A terminal sends it to all processes of the command, also to those that ranks are forked from."""
    hear_interrupts()
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "anyep", *COMMANDS[command]],
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
    hear_interrupts()
    finished = subprocess.run(
        [sys.executable, "-m", "anyep", "demo", "--ranks", "2", "--hidden", "32", "--steps", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(tmp_path, INTERRUPT_AT="torch"),
    )
    assert (finished.returncode, finished.stderr) == (0, "")


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """A shell starts jobs in the background so."""
    script = f"trap '' INT; exec {sys.executable} -m anyep plan --json"
    finished = subprocess.run(
        ["sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(tmp_path, INTERRUPT_AT="typer"),
    )
    assert (finished.returncode, finished.stderr) == (0, "")
