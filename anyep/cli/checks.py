"""Checks that several commands make before they start anything."""

from __future__ import annotations

from pathlib import Path

from anyep.errors import InvalidCall
from anyep.sizes import check_num_experts, check_num_topk


def check_folder(what: str, file: Path) -> None:
    """Refuse a file whose folder does not exist, before the work is done."""
    if not file.parent.is_dir():
        raise InvalidCall(f"there is no folder {str(file.parent)!r} to write {what} to: create it first")


def check_experts(num_experts: int, num_ranks: int, num_topk: int) -> None:
    """Refuse what a Buffer would refuse, and more experts per token than experts."""
    check_num_experts(num_experts, num_ranks, "--experts")
    check_num_topk("--topk asks for", num_topk)
    if num_topk > num_experts:
        raise InvalidCall(f"--topk is {num_topk}, but there are only {num_experts} experts")
