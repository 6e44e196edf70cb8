"""Machine code of GPU kernels: what it is compiled for, and how it is kept; no GPU is needed."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

import torch

from anyep import Config
from anyep.backends.cuda import compiled, driver
from anyep.backends.cuda.compiled import Leaf, Machine, number
from anyep.backends.cuda.kernels import notify, sums
from anyep.backends.cuda.launch import Fixed, Launcher, Seen, flattener, for_triton
from anyep.backends.cuda.plans import Plan, Plans
from anyep.sizes import token_layout

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
COPY = {"NUM_RANKS": 2, "TILE_WORDS": 1024}
POINTERS = [Leaf("*i32", True)] * 3
NUMBERS = [number(0, True, False), number(9, True, False), number(64, False, False)]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("ANYEP_CACHE_DIR", str(tmp_path / "kept"))
    compiled._folder.cache_clear()
    yield tmp_path / "kept"
    compiled._folder.cache_clear()


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
    compiled._folder.cache_clear()
    machine = compiled.compiled(sums.copy_for_peers, [*POINTERS, *NUMBERS], COPY, OPTIONS, 90)
    compiled._folder.cache_clear()
    assert machine.name == "copy_for_peers"


def test_leaves_of_arguments() -> None:
    """Groups keep their type; numbers that vary have a fixed width."""
    launcher = Launcher(notify.exchange_notify, 1, {})
    groups = importlib.import_module("anyep.backends.cuda.kernels.groups")
    words, counts = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    address = words.data_ptr() % 16 == 0
    leaves = launcher.leaves(
        (
            Fixed(groups.Tables(words, words, words, words, words)),
            groups.Prefixes(counts, counts, counts, words),
            groups.Counts(counts, counts, words),
            groups.HostWords(words.data_ptr(), 1, 16, 7),
            16,
            1,
        )
    )
    assert leaves[0] == groups.Tables(*[Leaf("*i64", address)] * 5)
    assert [leaf.kind for leaf in leaves[1]] == ["*i32", "*i32", "*i32", "*i64"]
    assert leaves[3] == groups.HostWords(*[Leaf("i64", False)] * 4)
    assert leaves[4:] == [Leaf("i32", False)] * 2
    assert type(leaves[0]) is groups.Tables


def test_arguments_for_the_interpreter() -> None:
    groups = importlib.import_module("anyep.backends.cuda.kernels.groups")
    x = torch.zeros(4, 2, dtype=torch.float32)
    (biases, fixed, whole) = for_triton(
        (groups.Biases(Seen(x, torch.int32), 5), Fixed(groups.Sums(x, x)), Seen(x, torch.uint8))
    )
    assert isinstance(biases, groups.Biases)
    assert (biases.first.dtype, biases.second) == (torch.int32, 5)
    assert fixed.x is x
    assert whole.shape == (4, 8)


def test_a_kernel_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the driver, the error says what is missing."""
    try:
        driver._library()
    except OSError:
        with pytest.raises(OSError, match="libcuda"):
            driver.load(b"", "nothing", 0, 1, 0, struct.Struct("@q"))
    else:
        with pytest.raises(RuntimeError, match=r"CUDA error [0-9]+ in kernel nothing: "):
            driver.load(b"no machine code", "nothing", 0, 1, 0, struct.Struct("@q"))


def test_fixed_numbers_that_vary_are_no_part_of_the_key() -> None:
    x = torch.zeros(2, dtype=torch.int32)
    first, second = Fixed((x, 7)), Fixed((x, 8))
    free, compiled_in = flattener((first,), [True]), flattener((first,), [False])
    assert free(first)[1] == free(second)[1] == (torch.int32,)
    assert free(second)[0] == (x.data_ptr(), 8)
    assert compiled_in(first)[1] != compiled_in(second)[1]


def test_plans_are_found_by_value() -> None:
    """A config that is made anew for each call makes no new plan."""
    plans, token, made = Plans(), token_layout(64, 0, 2), []

    def new_plan(config: Config) -> Plan:
        made.append(config)
        return Plan(token, config, Launcher(sums.copy_for_peers, 1, {}), (1,))

    configs = [Config(4, 2, 5), Config(4, 2, 5), Config(6, 2, 5)]
    found = [plans.get("send", token, config, lambda config=config: new_plan(config)) for config in configs]
    assert found[0] is found[1]
    assert found[2].config == configs[2]
    assert plans.get("sum", token, configs[0], lambda: new_plan(configs[0])) is not found[0]
    assert len(made) == 3
