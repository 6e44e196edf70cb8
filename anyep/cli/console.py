"""Where commands print what people read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_OF_FILES: Final = 120
"""Width for files and pipes, which have none; tables should not be cut to 80 columns there."""


def console_for_results() -> Console:
    """The console on stdout. Rich is imported here, so that commands with --json need not wait for it."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
