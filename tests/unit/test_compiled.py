"""Machine code of GPU kernels: what it is compiled for, and how it is kept; no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")


from anyep.backends.cuda import compiled, driver
from anyep.backends.cuda.compiled import Leaf, Machine, number
from anyep.backends.cuda.kernels import sums

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
COPY = {"NUM_RANKS": 2, "TILE_WORDS": 1024}
POINTERS = [Leaf("*i32", True)] * 3
NUMBERS = [number(0, True, False), number(9, True, False), number(64, False, False)]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("ANYEP_CACHE_DIR", str(tmp_path / "kept"))
    compiled.folder.cache_clear()
    yield tmp_path / "kept"
    compiled.folder.cache_clear()


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    compile_now = compiled.compile_now

    def compile_and_count(kernel: Any, *how: Any) -> Machine:
        made.append(kernel.fn.__name__)
        return compile_now(kernel, *how)

    monkeypatch.setattr(compiled, "compile_now", compile_and_count)
    return made


def test_machine_code_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_compilations(monkeypatch)
    first = compiled.compiled(sums.copy_for_peers, [*POINTERS, *NUMBERS], COPY, OPTIONS, 90)
    again = compiled.compiled(sums.copy_for_peers, [*POINTERS, *NUMBERS], COPY, OPTIONS, 90)
    assert made == ["copy_for_peers"]
    assert first.cubin.startswith(b"\x7fELF")
    assert (first.name, first.cubin, first.shared_bytes) == (again.name, again.cubin, again.shared_bytes)
    assert (first.parameters.format, first.num_unused) == (again.parameters.format, again.num_unused)
    # Three pointers, three numbers, and what Triton adds.
    assert first.parameters.format == "@qqqiii" + "q" * first.num_unused
    for change in (
        ([Leaf("*i32", False), *POINTERS[1:], *NUMBERS], COPY, OPTIONS),
        ([*POINTERS, *NUMBERS], COPY | {"TILE_WORDS": 2048}, OPTIONS),
        ([*POINTERS, *NUMBERS], COPY, OPTIONS | {"num_warps": 8}),
    ):
        compiled.compiled(sums.copy_for_peers, *change, 90)
    assert len(made) == 4


def test_damaged_machine_code_is_compiled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_compilations(monkeypatch)
    for _ in range(2):
        compiled.compiled(sums.copy_for_peers, [*POINTERS, *NUMBERS], COPY, OPTIONS, 90)
        (kept,) = folder.glob("*/copy_for_peers.*")
        kept.write_bytes(kept.read_bytes()[:-1])
    assert len(made) == 2


def test_without_a_folder_everything_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANYEP_CACHE_DIR", str(tmp_path / "file"))
    compiled.folder.cache_clear()
    machine = compiled.compiled(sums.copy_for_peers, [*POINTERS, *NUMBERS], COPY, OPTIONS, 90)
    compiled.folder.cache_clear()
    assert machine.name == "copy_for_peers"


def test_a_kernel_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the driver, the error says what is missing."""
    try:
        driver._library()
    except OSError:
        with pytest.raises(OSError, match="libcuda"):
            driver.context_of(0)
    else:
        with pytest.raises(RuntimeError, match=r"CUDA error [0-9]+ in nothing: "):
            driver.load(b"no machine code", "nothing", driver.context_of(0), 0)
