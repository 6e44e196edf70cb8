"""Files that commands write: refused before the work where possible, else with a sentence after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anyep.cli.checks import check_file, write_text, writing
from anyep.errors import InvalidCall, NotSupported
from tests.support.commands import anyep


def test_places_for_a_file(tmp_path: Path) -> None:
    check_file("the report", tmp_path / "new")
    (tmp_path / "old").touch()
    check_file("the report", tmp_path / "old")
    check_file("the report", Path("/dev/null"))
    with pytest.raises(InvalidCall, match=r"there is no folder .* to write the report to: create it first"):
        check_file("the report", tmp_path / "no" / "file")
    with pytest.raises(InvalidCall, match=r"the report cannot be written to .*, a folder: add the name"):
        check_file("the report", tmp_path)


def test_a_place_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer stands for another user's: root may write everywhere."""
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    for name in ("old", "new"):
        (tmp_path / "old").touch()
        with pytest.raises(
            InvalidCall, match=rf"the report cannot be written to .*{name}': this user may not"
        ):
            check_file("the report", tmp_path / name)
    assert asked == [(tmp_path / "old", os.W_OK), (tmp_path, os.W_OK)]


def test_what_only_the_attempt_tells(tmp_path: Path) -> None:
    write_text("the report", str(tmp_path / "file"), "text")
    assert (tmp_path / "file").read_text() == "text\n"
    with pytest.raises(
        NotSupported, match=r"the report cannot .*/dev/full' \(No space left on device\): choose"
    ):
        write_text("the report", "/dev/full", "text")
    with pytest.raises(ZeroDivisionError), writing("the report", tmp_path):
        _ = 1 // 0


def test_a_full_disk_hides_no_result() -> None:
    """The table of a bench is printed before its file is written."""
    small = ("--ranks", "2", "--tokens", "4", "--hidden", "128", "--experts", "4", "--topk", "2")
    finished = anyep("bench", *small, "--repeats", "1", "--json", "/dev/full")
    assert finished.returncode == 1
    assert "GB/s" in finished.stdout
    said = "the records cannot be written to '/dev/full' (No space left on device): choose another place"
    assert finished.stderr == f"anyep: {said}\n"
