"""Checks that several commands make before they start anything."""

from __future__ import annotations

from pathlib import Path

from anyep.errors import InvalidCall
from anyep.sizes import NUM_MAX_TOPK


def check_folder(what: str, file: Path) -> None:
    """Refuse a file that could not be written for want of its folder, before the work is done."""
    if not file.parent.is_dir():
        raise InvalidCall(f"there is no folder {str(file.parent)!r} to write {what} to: create it first")


def check_experts(num_experts: int, num_ranks: int, num_topk: int) -> None:
    """Every rank holds the same number of experts, and a token has at most as many as there are."""
    if num_experts < num_ranks or num_experts % num_ranks:
        raise InvalidCall(
            f"{num_experts} experts cannot be shared by {num_ranks} ranks: choose a multiple of {num_ranks}"
        )
    if num_topk > num_experts:
        raise InvalidCall(f"top-k is {num_topk}, but there are only {num_experts} experts")
    if num_topk > NUM_MAX_TOPK:
        raise InvalidCall(f"top-k is {num_topk}: at most {NUM_MAX_TOPK} experts per token")
