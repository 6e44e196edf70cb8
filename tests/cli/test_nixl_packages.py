"""Which of NIXL's packages is used, tried with fake ones."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from anyep.backends.cpu.heap import OwnBlock
from anyep.errors import NotSupported
from anyep.transport import NixlEngine
from tests.support.commands import anyep

Install = Callable[..., None]
FAKE_API = """
class nixl_agent_config:
    def __init__(self, **options): pass

class nixl_agent:
    def __init__(self, name, config): pass
    def register_memory(self, region, kind): return region
"""
METADATA = """Metadata-Version: 2.1
Name: {}
Version: 7.8.9
"""
ALL = ("nixl", "nixl_cu12", "nixl_cu13")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs fake packages; the others cannot be imported, also if they are installed."""

    def is_of_nixl(module: str) -> bool:
        return module.split(".")[0] in ALL

    def install(*names: str) -> None:
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").touch()
            (tmp_path / name / "_api.py").write_text(FAKE_API)
            info = tmp_path / f"{name}-7.8.9.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(METADATA.format(name.replace("_", "-")))
        sys.modules.update(dict.fromkeys(set(ALL) - set(names)))  # type: ignore[arg-type]
        importlib.invalidate_caches()

    before = {name: module for name, module in sys.modules.items() if is_of_nixl(name)}
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    for name in [name for name in sys.modules if is_of_nixl(name)]:
        del sys.modules[name]
    sys.modules.update(before)


def make_engine(monkeypatch: pytest.MonkeyPatch, cuda: str) -> str:
    """The module of the agent that an engine uses, where torch is of this CUDA."""
    monkeypatch.setattr(torch.version, "cuda", cuda or None)
    monkeypatch.setenv("NIXL_LOG_LEVEL", "FATAL")
    return type(NixlEngine(0, OwnBlock("test", 64))._agent).__module__


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
    install: Install, monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], cuda: str, used: str
) -> None:
    install(*installed)
    assert make_engine(monkeypatch, cuda) == f"{used}._api"


def test_a_package_that_does_not_load_makes_room_for_the_next(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("nixl_cu12", "nixl_cu13")
    (tmp_path / "nixl_cu13" / "_api.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    assert make_engine(monkeypatch, "13.0") == "nixl_cu12._api"
    del sys.modules["nixl_cu12._api"]
    (tmp_path / "nixl_cu12" / "_api.py").write_text("raise ImportError('no luck with this one')")
    with pytest.raises(NotSupported) as caught:
        make_engine(monkeypatch, "13.0")
    assert "nixl_cu13 7.8.9 cannot be imported: libcudart.so.13 is missing" in str(caught.value)
    assert "nixl_cu12 7.8.9 cannot be imported: no luck with this one" in str(caught.value)


def test_without_any_there_is_advice(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    with pytest.raises(NotSupported, match="NIXL is not installed") as caught:
        make_engine(monkeypatch, "13.0")
    for word in ("'anyep[network]'", "'anyep[network-cu13]'", "looked for nixl_cu13, nixl_cu12, nixl"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("installed", "state", "words"),
    [
        (("nixl_cu13",), "ok", "nixl_cu13 7.8.9 is used"),
        (("nixl",), "ok", "nixl 7.8.9 is used"),
        (("nixl", "nixl_cu12"), "ok", "nixl_cu12 7.8.9 is used, puts bytes into other hosts' memory; also"),
        ((), "note", "not installed; needed between hosts only"),
    ],
)
def test_doctor_says_which_one(install: Install, installed: tuple[str, ...], state: str, words: str) -> None:
    install(*installed)
    finished = anyep("doctor", "--json")
    (finding,) = (line for line in json.loads(finished.stdout) if line["name"] == "nixl")
    assert finding["state"] == state
    assert finding["detail"].startswith(words)
    assert state == "ok" or "'anyep[network-cu13]'" in finding["next_step"]
