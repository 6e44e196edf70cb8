"""The list of commands; turns their errors into a one-sentence message and an exit code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Final

import typer

from anyep.cli.bench.command import bench
from anyep.cli.calibrate import calibrate
from anyep.cli.demo.command import demo
from anyep.cli.doctor import doctor
from anyep.cli.interrupts import INTERRUPTED, TERMINATED, Terminated
from anyep.cli.plan import plan
from anyep.cli.run import run
from anyep.cli.selftest.command import selftest
from anyep.cli.simulate import simulate_command
from anyep.cli.tune.command import tune
from anyep.cli.warmup import warmup
from anyep.errors import AnyEPError, InvalidCall
from anyep.version import __version__

app = typer.Typer(
    name="anyep",
    help="Dispatch and combine for Mixture-of-Experts models, on any machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class _Interrupted(Exception):
    """Ctrl-C in a form that typer passes on: it turns KeyboardInterrupt into a silent exit code."""


def _hearing_interrupts(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run_it(*arguments: object, **options: object) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt as error:
            raise _Interrupted from error

    return run_it


COMMANDS: Final[dict[str, tuple[Callable[..., None], str]]] = {
    "run": (run, "Run a Python script as several ranks."),
    "demo": (demo, "Train or decode over several ranks, checked against one."),
    "doctor": (doctor, "Show what this machine has, and what is missing."),
    "selftest": (selftest, "Check a machine or a job; write a report to send."),
    "warmup": (warmup, "Compile all kernels for the CPU now."),
    "plan": (plan, "Memory of a rank; times and traffic on a machine."),
    "simulate": (simulate_command, "Run one dispatch in virtual time."),
    "bench": (bench, "Measure calls beside a plain copy, Gloo and others."),
    "calibrate": (calibrate, "Measure this machine for plan and simulate."),
    "tune": (tune, "Find the fastest tile sizes for the GPUs here."),
}
"""Each command with its line in the list; its docstring is at the top of its own help."""

for _name, (_command, _line) in COMMANDS.items():
    # Options of `run` end at the script's name: the arguments after it belong to the script.
    app.command(_name, short_help=_line, context_settings={"allow_interspersed_args": _name != "run"})(
        _hearing_interrupts(_command)
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"anyep {__version__}")
        raise typer.Exit()


@app.callback()
def _top_level(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def run_command(arguments: list[str]) -> int:
    """Run the command line; its exit code is 0, 1 (it failed), 2 (it was called wrongly) or 130 (Ctrl-C)."""
    try:
        # Without a command, show the list of commands.
        result = app(args=arguments or ["--help"], prog_name="anyep", standalone_mode=False)
    except AnyEPError as error:
        return _refuse(str(error), 2 if isinstance(error, InvalidCall) else 1)
    except (KeyboardInterrupt, _Interrupted, typer.Abort) as error:
        if isinstance(error.__cause__, Terminated):
            return _refuse("stopped by SIGTERM", TERMINATED)
        return _refuse("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader (a pager, `head`) has exited; keep the interpreter from complaining about it at exit.
        sys.stdout = None
        return 141
    except Exception as error:
        # The parser's own errors: their class moved between releases of typer, their shape did not.
        if not hasattr(error, "format_message"):
            raise
        return _refuse(" ".join(error.format_message().split()), 2)
    return result if isinstance(result, int) else 0


def _refuse(sentence: str, exit_code: int) -> int:
    print(f"anyep: {sentence}", file=sys.stderr)
    return exit_code
