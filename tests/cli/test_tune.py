"""`anyep tune` without a GPU: which tiles win, the sweep on a simulated GPU, and what it stores and shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep.backends.cache_folder import Unusable
from anyep.backends.cuda import tuned
from anyep.backends.cuda.tiles import TILES, RowTile, tiles_for
from anyep.backends.cuda.tuned import Entry, Key, Measured, Rates, Trial
from anyep.cli.gpus import ON_THE_CPU
from anyep.cli.ranks import Rank
from anyep.cli.tune import command
from anyep.cli.tune.candidates import (
    KERNELS,
    LEAST_GAIN,
    ROUNDS,
    ROW_TILES,
    SUM_TILES,
    Choice,
    Tried,
    choose,
    finalists,
    trials,
)
from anyep.cli.tune.records import Found, Job
from tests.support.bench_stand_ins import stand_ins
from tests.support.commands import anyep
from tests.support.places import become_simulated

FAST, SLOW, OTHER = RowTile(8, 512, 16), RowTile(16, 512, 16), RowTile(4, 512, 8)
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYEP_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


# What is tried


@pytest.mark.parametrize("num_ranks", TILES)
@pytest.mark.parametrize("hidden", [7168, 4096, 2048, 128])
def test_candidates(num_ranks: int, hidden: int) -> None:
    builtin, row_words = tiles_for(num_ranks, has_windows=True), hidden // 2
    tried = trials(builtin, row_words)
    assert tried[0] == Trial(builtin.dispatch, builtin.combine)
    rows = list(dict.fromkeys(trial.dispatch.fitting(row_words) for trial in tried))
    sums = list(dict.fromkeys(trial.combine for trial in tried))
    assert set(rows) == {tile.fitting(row_words) for tile in (*ROW_TILES, builtin.dispatch)}
    assert set(sums) == {*SUM_TILES, builtin.combine}
    # What stands in a list twice stands for the built-in tile.
    assert len(tried) == max(len(rows), len(sums))
    for trial in tried:
        tuned.check_row_tile(trial.dispatch)
        tuned.check_sum_tile(trial.combine)


def test_fewer_candidates() -> None:
    assert len(trials(tiles_for(8, has_windows=True), 3584, 3)) == 4


# What wins


def tried(tile: RowTile, *seconds: float, is_builtin: bool = False, problem: str = "") -> Tried:
    return Tried("dispatch", tile, is_builtin, seconds, problem)


def test_finalists() -> None:
    builtin = [tried(FAST, 1.0, 1.0, 9.0, is_builtin=True), tried(FAST, 1.2, is_builtin=True)]
    rest = [
        tried(SLOW, 1.3),
        tried(OTHER, 1.1, 1.1, 0.1),
        tried(RowTile(1, 64, 1), problem="too large"),
        tried(RowTile(2, 64, 1), 0.9),
        tried(RowTile(4, 64, 1), 1.1),
    ]
    assert finalists([*builtin, *rest]) == [RowTile(2, 64, 1), OTHER]
    assert finalists([*builtin, *rest], 9) == [RowTile(2, 64, 1), OTHER, RowTile(4, 64, 1)]
    assert finalists([*builtin, rest[0]]) == []


def test_two_percent_are_needed() -> None:
    assert choose([SLOW], [1.02] * 4, [[1.0] * 4]) == Choice(SLOW, 1.02)
    assert choose([SLOW], [1.0] * 4, [[0.985] * 4]) == Choice(None, 1.0)
    assert choose([], [1.0] * 4, []) == Choice(None, 1.0)


def test_the_first_of_equals_wins() -> None:
    assert choose([SLOW, OTHER], [1.0] * 4, [[0.5] * 4, [0.5] * 4]) == Choice(SLOW, 2.0)


def test_one_bad_round_does_not_decide() -> None:
    assert choose([SLOW], [5.0, 1.0, 1.0, 1.0], [[1.0] * 4]).tile is None
    assert choose([SLOW], [1.1, 1.1, 1.1, 1.1], [[1.0, 9.0, 1.0, 1.0]]).tile == SLOW


@given(st.floats(-0.02, 0.02), st.integers(1, 3), st.floats(0.5, 1.5))
def test_drift_does_not_decide(drift: float, num_tiles: int, start: float) -> None:
    """A machine that gets steadily slower or faster: equal tiles do not win, in the order of the sweep."""
    seconds: list[list[float]] = [[] for _ in range(1 + num_tiles)]
    now = start
    for round_ in range(ROUNDS):
        order = list(range(1 + num_tiles))
        for index in order if round_ % 2 == 0 else reversed(order):
            seconds[index].append(now)
            now += drift * start
    assert choose([FAST, SLOW, OTHER][:num_tiles], seconds[0], seconds[1:]).tile is None


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), min_size=1, max_size=3))
def test_a_winner_is_faster(others: list[list[float]]) -> None:
    tiles = [FAST, SLOW, OTHER][: len(others)]
    found = choose(tiles, [1.0] * 4, others)
    if found.tile is not None:
        assert found.gain >= LEAST_GAIN
    else:
        assert found.gain == 1.0


# The command, on a simulated GPU

SMALL = ("--ranks", "2", "--tokens", "3", "--hidden", "128", "--experts", "4", "--topk", "2", "--sms", "2")
BUILTIN = tiles_for(2, has_windows=True)
FIRST, SECOND = trials(BUILTIN, 64, 2)[1:]
RUN = ("tune", *SMALL, "--repeats", "1", "--candidates", "2")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def tune_on_simulated(
    rank: Rank,
    job: Job,
    num_gpus: int,
    milliseconds: Callable[[], float] = lambda: 1.0,
    changes: Callable[[int], Any] = lambda rank: nullcontext(),
) -> Found:
    """The sweep on a GPU per rank, with few rounds."""
    become_simulated(rank.rank)
    from anyep.cli.tune import sweep

    with ExitStack() as stack:
        stack.enter_context(stand_ins(rank.group, milliseconds))
        stack.enter_context(mock.patch.object(sweep, "ROUNDS", 2))
        stack.enter_context(changes(rank.rank))
        found = sweep.tune_on_rank(rank, job, rank.num_ranks)
        assert not tuned.is_trial()
        return found


@pytest.fixture
def on_simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The command starts its ranks on simulated GPUs; arguments are those of `tune_on_simulated`."""

    def start(**how: Any) -> None:
        monkeypatch.setattr(command, "tune_on_rank", partial(tune_on_simulated, **how))
        monkeypatch.setattr(command, "count_gpus", lambda otherwise: 2)
        monkeypatch.setattr(command, "placed", lambda device, num_ranks: nullcontext(ON_THE_CPU))

    return start


def first_is_fast() -> float:
    """The first candidates take 0.8 of the time of the others."""
    trial = tuned._trial
    return 0.8 if trial is not None and trial.dispatch == FIRST.dispatch else 1.0


@needs_triton
def test_the_sweep(on_simulated: Callable[..., None], base: Path, tmp_path: Path) -> None:
    on_simulated(milliseconds=first_is_fast)
    file = tmp_path / "tune.json"
    finished = anyep(*RUN, "--json", str(file))
    assert finished.returncode == 0, finished.stderr
    record = json.loads(file.read_text())
    assert (record["gpus"], record["ranks"], record["ranks_on_gpu"], record["sms"]) == (["Stand-in"], 2, 1, 2)
    by_kernel = {
        kernel: [each for each in record["candidates"] if each["kernel"] == kernel] for kernel in KERNELS
    }
    for tried_ones in by_kernel.values():
        assert [each["builtin"] for each in tried_ones] == [True, False, False, True]
        assert all(each["median_s"] > 0 and each["gbps"] > 0 and not each["problem"] for each in tried_ones)
    for kernel in KERNELS:
        tile = {name: value for name, value in getattr(FIRST, kernel)._asdict().items() if name != "stages"}
        assert record["chosen"][kernel]["tile"] == tile
        assert record["chosen"][kernel]["gain"] == pytest.approx(1.25)
    assert [each["sms"] for each in record["by_sms"]] == [4, 8]
    assert record["recommended_sms"] == 4
    assert record["file"] == str(base / "tuned.json")
    # What Buffers find.
    entry = tuned.find(Key("Stand-in", 2, 1))
    assert entry is not None
    assert (entry.dispatch, entry.combine, entry.recommended_sms) == (FIRST.dispatch, FIRST.combine, 4)
    assert entry.dispatch_rates.gain == pytest.approx(1.25)
    assert (entry.measured.tokens, entry.measured.hidden, entry.measured.sms) == (3, 128, 2)
    for words in ("1.25x", "Buffer.set_num_sms(4)", f"stored in {base / 'tuned.json'}"):
        assert words in finished.stdout.replace("\n", " ")


@needs_triton
def test_nothing_is_stored_by_a_dry_run(on_simulated: Callable[..., None], base: Path) -> None:
    """And equal tiles leave the built-in ones where they are."""
    on_simulated()
    finished = anyep(*RUN[:-1], "1", "--dry-run", "--json", "-")
    assert finished.returncode == 0, finished.stderr
    record = json.loads(finished.stdout)
    assert record["file"] is None
    assert all(chosen == record["chosen"]["combine"] for chosen in record["chosen"].values())
    assert record["chosen"]["dispatch"]["tile"] is None
    assert record["chosen"]["dispatch"]["gain"] == 1.0
    assert not base.exists()


@needs_triton
def test_results_that_cannot_be_stored_are_shown(
    on_simulated: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_simulated()
    full = mock.Mock(side_effect=Unusable("the disk is full"))
    monkeypatch.setattr(tuned, "store", full)
    finished = anyep(*RUN[:-1], "1")
    assert finished.returncode == 1
    assert finished.stdout.endswith("nothing was stored\n")
    assert "of built-in" in finished.stdout
    assert finished.stderr.endswith("anyep: tile sizes cannot be kept: the disk is full\n")


@contextmanager
def first_dispatch_does_not_run(rank: int, on_ranks: tuple[int, ...]) -> Iterator[None]:
    from anyep.backends.cuda.row_kernels import RowKernels

    right = RowKernels.send_to_windows

    def send(self: RowKernels, *arguments: Any) -> Any:
        if rank in on_ranks and self._tiles.dispatch == FIRST.dispatch:
            raise RuntimeError("CUDA error 701 in send_to_windows: too many resources\nmore")
        return right(self, *arguments)

    with mock.patch.object(RowKernels, "send_to_windows", send):
        yield


@needs_triton
@pytest.mark.parametrize("on_ranks", [(0, 1), (1,)])
def test_a_tile_that_does_not_run_is_left_out(
    on_simulated: Callable[..., None], on_ranks: tuple[int, ...]
) -> None:
    """Also if only one rank fails. The tile of the other kernel that came with it is tried by itself."""
    on_simulated(milliseconds=first_is_fast, changes=partial(first_dispatch_does_not_run, on_ranks=on_ranks))
    finished = anyep(*RUN, "--json", "-")
    assert finished.returncode == 0, finished.stderr
    record = json.loads(finished.stdout)
    (problem,) = [each for each in record["candidates"] if each["problem"]]
    assert problem["kernel"] == "dispatch"
    assert problem["problem"] == "RuntimeError: CUDA error 701 in send_to_windows: too many resources"
    assert problem["median_s"] is None
    assert sum(each["kernel"] == "combine" for each in record["candidates"]) == 4
    assert record["chosen"]["dispatch"]["tile"] is None


@contextmanager
def second_combine_is_wrong(rank: int) -> Iterator[None]:
    from anyep.api.buffer import Buffer

    right = Buffer.combine

    def spoiled(self: Buffer, *arguments: Any, **options: Any) -> Any:
        x, *rest = right(self, *arguments, **options)
        if rank == 1 and tuned._trial is not None and tuned._trial.combine == SECOND.combine:
            x[-1] *= 1.01
        return x, *rest

    with mock.patch.object(Buffer, "combine", spoiled):
        yield


@needs_triton
def test_a_wrong_result_is_an_error(on_simulated: Callable[..., None], base: Path) -> None:
    on_simulated(changes=second_combine_is_wrong)
    finished = anyep(*RUN)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert "combine (window, " in finished.stderr
    assert "gave a wrong result on rank 1: please report this, with the command" in finished.stderr
    assert finished.stderr.count("\n") == 1
    assert not (base / "tuned.json").exists()


# What it shows

ENTRY = Entry(
    Key("NVIDIA Stand-in", 8, 4),
    RowTile(16, 256, 8),
    None,
    12,
    Rates(600.0, 660.0),
    Rates(500.0, 500.0),
    Measured("2026-11-19T06:00:00+00:00", 4096, 7168, 8, 256, 16, "2.11.0", "3.6.0", "0.2.0"),
)


def test_show_and_reset(base: Path) -> None:
    finished = anyep("tune", "--show")
    assert finished.returncode == 0
    assert finished.stdout.startswith(f"{base / 'tuned.json'} has no entries: Buffers use the built-in tile")
    tuned.store([ENTRY, replace(ENTRY, key=ENTRY.key._replace(ranks=2))])
    printed = anyep("tune", "--show").stdout
    for words in (
        str(base / "tuned.json"),
        "NVIDIA Stand-in, 8 ranks (4 on a GPU), measured 2026-11-19T06:00:00+00:00",
        "dispatch: 16 tokens x 256 words, 8 warps: 660 GB/s per rank instead of 600, 1.10x",
        "combine: the built-in tile, 500 GB/s per rank: no other is at least 2 % faster",
        "SMs: 12 per rank",
    ):
        assert words in printed
    record = json.loads(anyep("tune", "--show", "--json", "-").stdout)
    assert record["entries"][0] == ENTRY.as_json()
    assert len(record["entries"]) == 2
    assert anyep("tune", "--reset").stdout.startswith(f"deleted {base / 'tuned.json'}")
    assert anyep("tune", "--reset").stdout.startswith(f"there was no {base / 'tuned.json'}")
    assert json.loads(anyep("tune", "--reset", "--json", "-").stdout)["deleted"] is False


def test_show_with_a_damaged_file(base: Path) -> None:
    tuned.store([ENTRY]).write_text("{")
    finished = anyep("tune", "--show")
    assert (finished.returncode, finished.stdout) == (1, "")
    assert f"{base / 'tuned.json'} is damaged" in finished.stderr


def test_show_with_an_entry_of_another_version(base: Path) -> None:
    entries = [ENTRY.as_json() | {"version": 9}]
    tuned.store([ENTRY]).write_text(json.dumps({"entries": entries}))
    assert "an entry that is not used: its version is 9" in anyep("tune", "--show").stdout


def test_show_with_words_that_look_like_markup(base: Path) -> None:
    entries = [ENTRY.as_json() | {"version": "[/x]"}]
    tuned.store([ENTRY]).write_text(json.dumps({"entries": entries}))
    assert "an entry that is not used: its version is '[/x]'" in anyep("tune", "--show").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "0"), "--ranks is 0: it must be at least 1"),
        (("--ranks", "3"), "256 experts do not divide over 3 ranks"),
        (("--tokens", "0"), "--tokens is 0"),
        (("--hidden", "4"), "a row of 8 bytes is no multiple of 16 bytes"),
        (("--sms", "3"), "--sms is 3: it must be even"),
        (("--repeats", "0"), "--repeats is 0"),
        (("--candidates", "0"), "--candidates is 0: it must be at least 1"),
        (("--topk", "300"), "--topk asks for 300 experts per token"),
        (("--show", "--reset"), "--show, --reset and --dry-run exclude each other"),
        (("--json", "/tmp"), "the result cannot be written to '/tmp', a folder: add the name of a file"),
        (("--json", "/no/such/folder/x.json"), "there is no folder '/no/such/folder' to write the result"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str) -> None:
    finished = anyep("tune", *arguments, env=NO_GPU)
    assert finished.returncode == 2
    assert words in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_without_a_gpu(base: Path) -> None:
    finished = anyep("tune", env=NO_GPU)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith("anyep: there is no GPU to use: ")
    assert "run `anyep tune` on the machine whose GPUs you use, and see `anyep doctor`" in finished.stderr
    assert not base.exists()


def test_ranks_that_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "count_gpus", lambda otherwise: 3)
    finished = anyep("tune", "--ranks", "4")
    assert finished.returncode == 2
    assert "--ranks is 4, which do not divide over 3 GPUs" in finished.stderr


def test_ranks_that_take_turns(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    """Without the service that lets them run side by side, times say nothing about tiles."""
    monkeypatch.setattr(command, "count_gpus", lambda otherwise: 1)
    monkeypatch.setattr("anyep.cli.gpus.count_gpus", lambda: 1)
    finished = anyep("tune", "--ranks", "2", env={"PATH": "", "CUDA_MPS_PIPE_DIRECTORY": str(base)})
    assert (finished.returncode, finished.stdout) == (1, "")
    last_line = finished.stderr.splitlines()[-1]
    assert last_line.startswith("anyep: 2 ranks share one GPU and take turns, which hides what tiles change")
    assert "--ranks 1" in last_line


def test_a_folder_that_cannot_be_used_is_found_first(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    monkeypatch.setattr(command, "count_gpus", lambda otherwise: 2)
    base.mkdir(mode=0o777)
    base.chmod(0o777)
    finished = anyep("tune")
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith(f"anyep: tile sizes cannot be kept: other users can write {base}")


# Doctor


def tuned_findings(**environment: str) -> list[dict[str, Any]]:
    finished = anyep("doctor", "--json", env=environment)
    assert finished.returncode == 0, finished.stderr
    return [finding for finding in json.loads(finished.stdout) if finding["name"] == "tuned"]


def a_gpu(folder: Path) -> str:
    """A path with a program that lists a GPU."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA Stand-in, 1024 MiB, 1.2.3'\n")
    program.chmod(0o755)
    return str(folder)


def test_doctor_without_stored_tiles(tmp_path: Path) -> None:
    (finding,) = tuned_findings(PATH="", **NO_GPU)
    assert finding["state"] == "ok"
    assert finding["detail"] == "Buffers on GPUs use the built-in tile sizes"
    (finding,) = tuned_findings(PATH=a_gpu(tmp_path))
    assert finding["detail"].endswith("; `anyep tune` measures whether others are faster here")


def test_doctor_with_stored_tiles(tmp_path: Path, base: Path) -> None:
    tuned.store([ENTRY, replace(ENTRY, key=ENTRY.key._replace(gpu="NVIDIA Other"))])
    used, other = tuned_findings(PATH=a_gpu(tmp_path))
    assert used == {
        "name": "tuned",
        "state": "ok",
        "detail": "used for NVIDIA Stand-in, 8 ranks (4 on a GPU): dispatch 1.10x as fast, combine as built"
        f" in; 12 SMs per rank are enough ({base / 'tuned.json'})",
        "next_step": "",
        "file": str(base / "tuned.json"),
        "gpu": "NVIDIA Stand-in",
        "ranks": 8,
        "ranks_on_gpu": 4,
        "dispatch_gain": pytest.approx(1.1),
        "combine_gain": 1.0,
        "recommended_sms": 12,
    }
    assert other["detail"].startswith("not used, there is no such GPU here: NVIDIA Other, 8 ranks")


def test_doctor_with_what_cannot_be_used(tmp_path: Path, base: Path) -> None:
    file = tuned.store([ENTRY])
    file.write_text(json.dumps({"entries": [ENTRY.as_json() | {"version": 9}]}))
    (finding,) = tuned_findings(PATH=a_gpu(tmp_path))
    assert finding["state"] == "note"
    assert finding["detail"] == f"an entry of {file} is not used: its version is 9, and this AnyEP reads 1"
    assert finding["next_step"] == "run `anyep tune` again, or delete the file"
    file.write_text("{")
    (finding,) = tuned_findings(PATH=a_gpu(tmp_path))
    assert finding["detail"] == f"not used: {file} is damaged"
