"""Scripts as a user runs them: by `anyep run`, or as ranks that need no seconds to start.

finished = run_script(path, "--steps", "4", num_ranks=2)
assert finished.returncode == 0, finished.stderr
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from anyep.launch import _reserved_port, rank_environment
from tests.support.programs import ROOT, Program

TIMEOUT_S: Final = 200.0


def launch_script(
    script: Path, *options: str, num_ranks: int = 2, launcher: tuple[str, ...] = ("anyep", "run", "-n")
) -> subprocess.CompletedProcess[str]:
    """From a new interpreter, by a launcher that starts its ranks as new interpreters."""
    return subprocess.run(
        [sys.executable, "-m", *launcher, str(num_ranks), str(script), *options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def run_script(script: Path, *options: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """With the environment that `anyep run` gives to ranks, which are forked from a warm interpreter.

    What the ranks print follows each other in their order; the exit code is the first that is not 0.
    """
    with _reserved_port() as port, ExitStack() as stack:
        programs = []
        for rank in range(num_ranks):
            variables = rank_environment(rank, num_ranks, port, num_ranks, os.environ)
            programs.append(
                stack.enter_context(Program(script, *options, env={**variables, "PYTHONPATH": str(ROOT)}))
            )
        printed = [program.communicate(TIMEOUT_S) for program in programs]
        codes = [program.wait(TIMEOUT_S) for program in programs]
    output, errors = ("".join(texts) for texts in zip(*printed, strict=True))
    return subprocess.CompletedProcess(
        [str(script), *options], next((code for code in codes if code), 0), output, errors
    )
