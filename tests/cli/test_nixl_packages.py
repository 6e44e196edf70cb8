"""Which of NIXL's packages is used, tried with fake ones in new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import anyep

FAKE_API = """
class nixl_agent_config:
    def __init__(self, **options): pass

class nixl_agent:
    def __init__(self, name, config): print("agent of", __name__)
    def register_memory(self, region, kind): return region
"""
MAKE_ENGINE = """
import sys, torch
torch.version.cuda = sys.argv[1] or None
from anyep.backends.cpu.heap import OwnBlock
from anyep.network import NixlEngine
NixlEngine(0, OwnBlock("test", 64))
"""
METADATA = """Metadata-Version: 2.1
Name: {}
Version: 7.8.9
"""
ALL = ("nixl", "nixl_cu12", "nixl_cu13")


def install(folder: Path, *names: str) -> dict[str, str]:
    """Fake packages of these names; the others cannot be imported, also if they are installed."""
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
        (folder / name / "_api.py").write_text(FAKE_API)
        info = folder / f"{name}-7.8.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format(name.replace("_", "-")))
    hidden = [name for name in ALL if name not in names]
    (folder / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({hidden}))")
    return {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}


def make_engine(environment: dict[str, str], cuda: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAKE_ENGINE, cuda],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )


@pytest.mark.parametrize(
    ("installed", "cuda", "used"),
    [
        (("nixl_cu12",), "13.0", "nixl_cu12"),
        (("nixl_cu13",), "12.8", "nixl_cu13"),
        (("nixl_cu13",), "", "nixl_cu13"),
        (("nixl",), "13.0", "nixl"),
        (("nixl_cu12", "nixl_cu13"), "12.8", "nixl_cu12"),
        (("nixl_cu12", "nixl_cu13"), "13.0", "nixl_cu13"),
        (ALL, "12.6", "nixl_cu12"),
    ],
)
def test_the_package_for_torch_comes_first(
    tmp_path: Path, installed: tuple[str, ...], cuda: str, used: str
) -> None:
    finished = make_engine(install(tmp_path, *installed), cuda)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout == f"agent of {used}._api\n"


def test_a_package_that_does_not_load_makes_room_for_the_next(tmp_path: Path) -> None:
    environment = install(tmp_path, "nixl_cu12", "nixl_cu13")
    (tmp_path / "nixl_cu13" / "_api.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    finished = make_engine(environment, "13.0")
    assert finished.stdout == "agent of nixl_cu12._api\n"
    (tmp_path / "nixl_cu12" / "_api.py").write_text("raise ImportError('no luck with this one')")
    last_line = make_engine(environment, "13.0").stderr.splitlines()[-1]
    assert "nixl_cu13 7.8.9 cannot be imported: libcudart.so.13 is missing" in last_line
    assert "nixl_cu12 7.8.9 cannot be imported: no luck with this one" in last_line


def test_without_any_there_is_advice(tmp_path: Path) -> None:
    last_line = make_engine(install(tmp_path), "13.0").stderr.splitlines()[-1]
    assert last_line.startswith("anyep.errors.NotSupported: NIXL is not installed")
    for word in ("'anyep[network]'", "'anyep[network-cu13]'", "looked for nixl_cu13, nixl_cu12, nixl"):
        assert word in last_line


@pytest.mark.parametrize(
    ("installed", "state", "words"),
    [
        (("nixl_cu13",), "ok", "nixl_cu13 7.8.9 is used"),
        (("nixl",), "ok", "nixl 7.8.9 is used"),
        (("nixl", "nixl_cu12"), "ok", "nixl_cu12 7.8.9 is used, puts bytes into other hosts' memory; also"),
        ((), "note", "not installed; needed between hosts only"),
    ],
)
def test_doctor_says_which_one(tmp_path: Path, installed: tuple[str, ...], state: str, words: str) -> None:
    finished = anyep("doctor", "--json", env=install(tmp_path, *installed))
    (finding,) = (line for line in json.loads(finished.stdout) if line["name"] == "nixl")
    assert finding["state"] == state
    assert finding["detail"].startswith(words)
    assert state == "ok" or "'anyep[network-cu13]'" in finding["next_step"]
