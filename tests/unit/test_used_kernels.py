"""The kernels that earlier processes have used: they are loaded when a Buffer is made; no GPU is needed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

import torch

from anyep.backends.cuda import batch, compiled, tuned, used_kernels
from anyep.backends.cuda.batch import Batches, Input, Launch
from anyep.backends.cuda.compiled import Machine
from anyep.backends.cuda.kernels import sums
from anyep.backends.cuda.moment import Moment
from anyep.backends.cuda.tiles import RowTile, SumTile
from anyep.backends.cuda.used_kernels import UsedKernels
from tests.support.recording_driver import RecordingDriver, recording_driver

KIND = "8 ranks sm90"
WINDOW = torch.zeros(1024, dtype=torch.int32)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("ANYEP_CACHE_DIR", str(tmp_path / "kept"))
    compiled.folder.cache_clear()
    yield tmp_path / "kept"
    compiled.folder.cache_clear()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingDriver]:
    with recording_driver() as found:
        forget_everything(monkeypatch)
        yield found


def forget_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(batch, "_machines", {})
    batch._loaded.cache_clear()


def copying(tile_words: int) -> Launch:
    x, num_rows = Input("x", torch.int32), Input("num_rows")
    constants = {"NUM_RANKS": 2, "TILE_WORDS": tile_words}
    return Launch(sums.copy_for_peers, 4, constants, (2,), (x, WINDOW, WINDOW, 1, num_rows, 64))


def run(batches: Batches, tile_words: int) -> None:
    values: dict[str, Any] = {"x": WINDOW, "num_rows": 3}
    batches.run(((copying, tile_words),), Moment(7), values)


def test_a_new_process_loads_them_before_they_are_used(
    folder: Path, recorder: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Batches(0, KIND)
    first.load_earlier()
    assert recorder.loaded == []
    for tile_words in (1024, 2048):
        run(first, tile_words)
    assert len(recorder.loaded) == 2
    for kind, num_loaded in ((KIND, 2), ("2 ranks sm90", 0)):
        forget_everything(monkeypatch)
        recorder.loaded.clear()
        later = Batches(0, kind)
        later.load_earlier()
        assert len(recorder.loaded) == num_loaded
        for tile_words in (1024, 2048):
            run(later, tile_words)
        assert len(recorder.loaded) == 2


def machines(count: int) -> list[Machine]:
    """Kernels that are in the folder."""
    kept_in = compiled.folder()
    assert kept_in is not None
    made = []
    for index in range(count):
        machine = Machine(f"kernel_{index}", b"code", 0, struct.Struct("@qi"), 2)
        kept_in.write(f"kernel.{index}", "identity", compiled._encoded(machine))
        made.append(machine._replace(file=f"kernel.{index}", identity="identity"))
    return made


def names(kind: str = KIND) -> list[str]:
    return [machine.name for machine in UsedKernels(kind).earlier()]


def test_each_is_remembered_once(folder: Path) -> None:
    first, second = machines(2)
    for _ in range(2):
        used = UsedKernels(KIND)
        used.add(first)
        used.add(second)
        used.add(first)
    assert sorted(names()) == ["kernel_0", "kernel_1"]
    assert names("2 ranks sm90") == []


def test_what_is_gone_or_damaged_is_left_out(folder: Path) -> None:
    used = UsedKernels(KIND)
    for machine in machines(3):
        used.add(machine)
    (gone,) = folder.glob("*/kernel.0")
    gone.unlink()
    (damaged,) = folder.glob("*/kernel.1")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert names() == ["kernel_2"]
    (list_itself,) = folder.glob("*/used.*")
    list_itself.write_bytes(b"damaged")
    assert names() == []
    UsedKernels(KIND).add(machines(3)[2])
    assert names() == ["kernel_2"]


def test_the_oldest_ones_are_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(used_kernels, "MOST", 3)
    used = UsedKernels(KIND)
    for machine in machines(5):
        used.add(machine)
    assert names() == ["kernel_2", "kernel_3", "kernel_4"]


def test_ranks_that_add_at_once_lose_nothing(folder: Path) -> None:
    made = machines(40)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda machine: UsedKernels(KIND).add(machine), made))
    assert len(names()) == 40


def test_what_a_sweep_tries_is_not_remembered(folder: Path) -> None:
    first, second = machines(2)
    used = UsedKernels(KIND)
    with tuned.trial(tuned.Trial(RowTile(8, 512, 16), SumTile(8, 1024, 8))):
        used.add(first)
    assert names() == []
    used.add(second)
    used.add(first)
    assert sorted(names()) == ["kernel_0", "kernel_1"]


def test_without_a_folder_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANYEP_CACHE_DIR", str(tmp_path / "file"))
    compiled.folder.cache_clear()
    try:
        UsedKernels(KIND).add(Machine("kernel", b"code", 0, struct.Struct("@q"), 0, "file", "it"))
        assert names() == []
    finally:
        compiled.folder.cache_clear()


def test_a_kernel_that_cannot_be_loaded_harms_nothing(
    folder: Path, recorder: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    UsedKernels(KIND).add(machines(1)[0])
    recorder.refusals["cuModuleLoadData"] = 200
    Batches(0, KIND).load_earlier()
