"""Where the command line starts.

Ctrl-C ends a command with one line and exit code 130, also while its modules are still being imported: hence
this module imports next to nothing, and the commands are in `app.py`.
"""

import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    try:
        from anyep.cli import interrupts

        interrupts.leave_at_once()
        from anyep.cli.app import run_command

        exit_code = run_command(sys.argv[1:])
        # Ctrl-C during the interpreter's shutdown should not print a traceback.
        interrupts.leave_at_once()
    except KeyboardInterrupt:
        print("anyep: interrupted", file=sys.stderr)
        exit_code = 130
    sys.exit(exit_code)
