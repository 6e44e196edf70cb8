"""What `anyep doctor` says of memory, where something is wrong with it: tried in namespaces of their own."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from typing import Any

import pytest

from tests.support.programs import run_program

MISSING = (
    "mount --rbind /dev /mnt && mount -t tmpfs tmpfs /dev"
    " && for file in null urandom; do touch /dev/$file; mount --bind /mnt/$file /dev/$file; done"
    " && ! test -e /dev/shm"
)
IN_A_MOUNT_NAMESPACE = """
import ctypes, subprocess, sys
libc, newns, private = ctypes.CDLL(None, use_errno=True), 0x00020000, ctypes.c_ulong(0x4000 | 0x40000)
assert libc.unshare(newns) == 0 and libc.mount(None, b"/", None, private, None) == 0, ctypes.get_errno()
subprocess.run(["sh", "-e", "-c", sys.argv.pop(1)], check=True)
"""
WITH_LESS_ADDRESS_SPACE = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))
"""
COMMAND = "from anyep.cli.main import main; main()"


@cache
def why_not() -> str:
    if os.geteuid() != 0:
        return "mount namespaces need root"
    tried = run_program("-c", IN_A_MOUNT_NAMESPACE, "mount -t tmpfs tmpfs /dev/shm")
    return f"mount namespaces are not allowed here: {tried.stderr}" if tried.returncode else ""


def anyep_in(preparation: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if why_not():
        pytest.skip(why_not())
    return run_program("-c", IN_A_MOUNT_NAMESPACE + COMMAND, preparation, *arguments)


def finding_of(finished: subprocess.CompletedProcess[str], name: str) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stderr
    (finding,) = (line for line in json.loads(finished.stdout) if line["name"] == name)
    return finding


@pytest.mark.parametrize(
    ("preparation", "words"),
    [
        ("mount -t tmpfs -o ro tmpfs /dev/shm", "cannot be written: Read-only file system"),
        pytest.param(
            "mount -t tmpfs -o size=8m tmpfs /dev/shm",
            "cannot be written: No space left on device",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mount -t tmpfs -o size=64m tmpfs /dev/shm", "only 64.0 MiB free", marks=pytest.mark.slow
        ),
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
    finished = run_program("-c", WITH_LESS_ADDRESS_SPACE + COMMAND, "doctor", "--json")
    finding = finding_of(finished, "address space")
    assert (finding["state"], finding["detail"]) == ("note", "limited to 32.0 GiB (ulimit -v)")
