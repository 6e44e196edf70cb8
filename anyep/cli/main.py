"""Where the command line starts: the list of commands, and how errors end the process."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from anyep.cli.bench import bench
from anyep.cli.demo import demo
from anyep.cli.doctor import doctor
from anyep.cli.plan import plan
from anyep.cli.run import run
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
app.command()(plan)
app.command()(demo)
app.command()(bench)
app.command()(doctor)
app.command()(warmup)
# Options end at the script's name: what follows is the script's own.
app.command(context_settings={"allow_interspersed_args": False})(run)


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


def main() -> None:
    """Run the command line and leave with its exit code: 0, 1 (it failed) or 2 (it was called wrongly)."""
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    try:
        # Without a command there is nothing to do: show what there is.
        result = app(args=arguments or ["--help"], prog_name="anyep", standalone_mode=False)
    except AnyEPError as error:
        return _refuse(str(error), 2 if isinstance(error, InvalidCall) else 1)
    except (KeyboardInterrupt, typer.Abort):
        return _refuse("interrupted", 130)
    except BrokenPipeError:
        # The reader (a pager, `head`) has gone; keep the interpreter from complaining about it at exit.
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
