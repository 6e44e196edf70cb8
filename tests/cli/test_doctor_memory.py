"""What `anyep doctor` says of memory, where something is wrong with it: tried in namespaces of their own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
MISSING = (
    "mount --rbind /dev /mnt && mount -t tmpfs tmpfs /dev"
    " && for file in null urandom; do touch /dev/$file; mount --bind /mnt/$file /dev/$file; done"
    " && ! test -e /dev/shm"
)


def shell(*lines: str) -> subprocess.CompletedProcess[str]:
    """In a mount namespace."""
    script = "\n".join(["set -e", *lines])
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=ENVIRONMENT,
    )


@cache
def why_not() -> str:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "mount namespaces need root and `unshare`"
    tried = shell("mount -t tmpfs tmpfs /dev/shm")
    return f"mount namespaces are not allowed here: {tried.stderr}" if tried.returncode else ""


def anyep_in(preparation: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if why_not():
        pytest.skip(why_not())
    return shell(preparation, shlex.join([sys.executable, "-m", "anyep", *arguments]))


def finding_of(finished: subprocess.CompletedProcess[str], name: str) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stderr
    (finding,) = (line for line in json.loads(finished.stdout) if line["name"] == name)
    return finding


@pytest.mark.parametrize(
    ("preparation", "words"),
    [
        ("mount -t tmpfs -o ro tmpfs /dev/shm", "cannot be written: Read-only file system"),
        ("mount -t tmpfs -o size=8m tmpfs /dev/shm", "cannot be written: No space left on device"),
        ("mount -t tmpfs -o size=64m tmpfs /dev/shm", "only 64.0 MiB free"),
        (MISSING, "not there"),
    ],
)
def test_a_bad_dev_shm_is_noted(preparation: str, words: str) -> None:
    finished = anyep_in(preparation, "doctor", "--json")
    finding = finding_of(finished, "/dev/shm")
    assert finding["state"] == "note"
    assert words in finding["detail"]
    assert "on one host AnyEP does not need it" in finding["next_step"]
    assert finding_of(finished, "memfd")["state"] == "ok"


def test_a_good_dev_shm() -> None:
    finished = anyep_in("mount -t tmpfs -o size=2g tmpfs /dev/shm", "doctor", "--json")
    finding = finding_of(finished, "/dev/shm")
    assert (finding["state"], finding["detail"]) == ("ok", "2.0 GiB free, and files can be written")


def test_anyep_does_not_need_it() -> None:
    finished = anyep_in(MISSING, "demo", "--ranks", "2", "--steps", "1", "--hidden", "32", "--json")
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["ok"]


def test_memory_that_others_cannot_open() -> None:
    """Ranks open each other's memory through /proc, which is hidden here."""
    finished = anyep_in("mount -t tmpfs tmpfs /proc", "doctor", "--json")
    finding = finding_of(finished, "memfd")
    assert finding["state"] == "missing"
    assert "another process cannot write to this one's memory: FileNotFoundError" in finding["detail"]


def test_address_space_that_is_limited() -> None:
    finished = subprocess.run(
        ["sh", "-c", f"ulimit -v 33554432; {sys.executable} -m anyep doctor --json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=ENVIRONMENT,
    )
    finding = finding_of(finished, "address space")
    assert (finding["state"], finding["detail"]) == ("note", "limited to 32.0 GiB (ulimit -v)")
