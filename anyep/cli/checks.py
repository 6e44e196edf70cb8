"""Checks of several commands before they start anything, and the files that they write at their end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anyep.errors import InvalidCall, NotSupported
from anyep.sizes import check_num_experts, check_num_topk


def check_file(what: str, file: Path) -> None:
    """Refuse a file that cannot be written, before the work is done."""
    if not file.parent.is_dir():
        raise InvalidCall(f"there is no folder {str(file.parent)!r} to write {what} to: create it first")
    if file.is_dir():
        raise InvalidCall(f"{what} cannot be written to {str(file)!r}, a folder: add the name of a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InvalidCall(
            f"{what} cannot be written to {str(file)!r}: this user may not; choose another place"
        )


@contextmanager
def writing(what: str, file: Path) -> Iterator[None]:
    """Turns an error while a file is written into a sentence; for what only the attempt can tell."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise NotSupported(
            f"{what} cannot be written to {str(file)!r} ({reason}): choose another place"
        ) from error


def write_text(what: str, file: str, text: str) -> None:
    """Write a command's result to a file, with a line break at its end."""
    with writing(what, Path(file)):
        Path(file).write_text(text + "\n")


def check_experts(num_experts: int, num_ranks: int, num_topk: int) -> None:
    """Refuse what a Buffer would refuse, and more experts per token than experts."""
    check_num_experts(num_experts, num_ranks, "--experts")
    check_num_topk("--topk asks for", num_topk)
    if num_topk > num_experts:
        raise InvalidCall(f"--topk is {num_topk}, but there are only {num_experts} experts")
