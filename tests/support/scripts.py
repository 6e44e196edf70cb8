"""Scripts as a user runs them: by `anyep run`, or as ranks that need no seconds to start.

    finished = run_script(path, "--steps", "4", num_ranks=2)
    assert finished.returncode == 0, finished.stderr

`code_of` is the first program of a page of the docs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from anyep.launch import rank_environment
from anyep.launch.programs import reserved_port
from tests.support.programs import ROOT, Program

TIMEOUT_S: Final = 200.0


def code_of(page: str) -> str:
    """The first program on a page of the docs."""
    return (ROOT / page).read_text().split("```python\n")[1].split("```")[0]


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


def run_script(
    *program: str | Path, num_ranks: int = 2, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python *program` with the environment that `anyep run` gives to ranks, forked from a warm interpreter.

    What the ranks print follows each other in their order; the exit code is the first that is not 0.
    """
    with reserved_port() as port, ExitStack() as stack:
        programs = []
        for rank in range(num_ranks):
            variables = rank_environment(rank, num_ranks, port, num_ranks, os.environ)
            variables |= {"PYTHONPATH": str(ROOT), **(env or {})}
            programs.append(stack.enter_context(Program(*program, env=variables, has_anyep=True)))
        printed = [program.communicate(TIMEOUT_S) for program in programs]
        codes = [program.wait(TIMEOUT_S) for program in programs]
    output, errors = ("".join(texts) for texts in zip(*printed, strict=True))
    return subprocess.CompletedProcess(
        list(map(str, program)), next((code for code in codes if code), 0), output, errors
    )
