"""Commands of AnyEP in the process of the tests, where starting one is not the point.

    finished = anyep("plan", "--ranks", "8", "--json", env={"COLUMNS": "80"})
    assert (finished.returncode, finished.stderr) == (0, "")

The ranks of `demo` and `bench` are forked from the server that pools of ranks come from (`world.py`), with
its environment; those of `run` are new interpreters. For signals, and for what an interpreter imports or
finds, start a process: `run_program("-m", "anyep", ...)`, or subprocess.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from anyep.cli import doctor
from anyep.cli.app import run_command
from tests.support.world import start_server


def anyep(
    *arguments: str, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What a command prints and returns; `env` is added to the environment, None takes a variable out."""
    start_server()
    doctor._list_gpus.cache_clear()
    with _environment(env or {}), contextlib.chdir(cwd or Path.cwd()), _captured() as texts:
        code = run_command(list(arguments))
    return subprocess.CompletedProcess(["anyep", *arguments], code, *texts)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and that nobody has waited for yet."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants_of(pid: int) -> list[int]:
    return [descendant for child in children_of(pid) for descendant in (child, *descendants_of(child))]


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    # Dead and waiting for somebody to ask for its exit code.
    return state in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Much longer than it takes: a busy machine must not make it fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    before = dict(os.environ)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """The standard output and errors of this process and of those that it starts, when this is left."""
    texts: list[str] = []
    with contextlib.ExitStack() as stack:
        files = []
        for number, redirect in ((1, contextlib.redirect_stdout), (2, contextlib.redirect_stderr)):
            file = stack.enter_context(os.fdopen(os.memfd_create("output"), "w+", buffering=1))
            usual = os.dup(number)
            stack.callback(os.close, usual)
            os.dup2(file.fileno(), number)
            stack.callback(os.dup2, usual, number)
            stack.enter_context(redirect(file))
            files.append(file)
        yield texts
        for file in files:
            file.flush()
            file.seek(0)
            texts.append(file.read())
