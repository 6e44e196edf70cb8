"""The commands that start ranks: demo and bench."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anyep.cli.bench.measure import measure_on_rank
from anyep.cli.bench.records import Setup
from anyep.cli.demo.job import Job, train_on_rank
from anyep.cli.ranks import Rank
from tests.support.commands import anyep, descendants_of, is_gone, wait_until
from tests.support.programs import ROOT, Program

SIZES = ("--tokens", "24", "--hidden", "32", "--experts", "6", "--topk", "2", "--steps", "2")
SMALL_DEMO = ("demo", "--ranks", "3", *SIZES)
TINY_DEMO = ("demo", "--ranks", "1", *SIZES)


@pytest.mark.parametrize("path", ["auto", "window", "ring"])
def test_demo(path: str) -> None:
    finished = anyep(*SMALL_DEMO, "--path", path, "--json")
    assert finished.returncode == 0, finished.stderr
    record = json.loads(finished.stdout)
    assert record["ok"]
    assert record["largest_difference"] < 1e-5
    assert record["losses"][1] < record["losses"][0]
    assert [sum(column) for column in zip(*record["sent"], strict=True)] == record["received"]
    assert set(record["phases"]) == {
        "layout",
        "dispatch",
        "experts",
        "combine",
        "backward of combine",
        "backward of dispatch",
    }


def test_demo_for_people() -> None:
    printed = anyep(*SMALL_DEMO).stdout
    assert "tokens from rank (row) to rank (column)" in printed
    assert "matches the single-process reference" in printed


def test_demo_with_another_seed_does_something_else() -> None:
    once, again, other = (
        json.loads(anyep(*TINY_DEMO, "--json", "--seed", str(seed)).stdout)["losses"] for seed in (0, 0, 1)
    )
    assert once == again != other


def train_wrongly(rank: Rank, job: Job) -> object:
    """With a combine that is off by a little."""
    from anyep.api.buffer import Buffer

    right = Buffer.combine

    def spoiled(self: Buffer, *arguments: Any, **options: Any) -> Any:
        x, *rest = right(self, *arguments, **options)
        return x * 1.01, *rest

    Buffer.combine = spoiled  # type: ignore[method-assign]
    return train_on_rank(rank, job)


def test_demo_fails_when_the_check_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo must notice it, and say so by its exit code."""
    monkeypatch.setattr("anyep.cli.demo.command.train_on_rank", train_wrongly)
    finished = anyep(*SMALL_DEMO)
    assert finished.returncode == 1, finished.stderr
    assert "differs from the single-process reference" in finished.stdout


def others_and_swept(
    records: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[tuple[str, str, int]]]:
    """The ordinary records; case, path and tokens of those of a sweep, which come last."""
    others = [record for record in records if "swept" not in record]
    swept = records[len(others) :]
    for record in swept:
        assert record["swept"] == "tokens"
        assert record["median_s"] > 0
        assert record["case"] == "copy" or record["of_copy"] > 0
    return others, [(record["case"], record["path"], record["tokens"]) for record in swept]


def test_bench_of_the_elastic_api() -> None:
    """Every case in both layouts; the command checks that their results are right."""
    sizes = ("--ranks", "2", "--tokens", "8", "--hidden", "64", "--experts", "4", "--topk", "2")
    finished = anyep("bench", "--api", "elastic", *sizes, "--repeats", "1", "--sweep-tokens", "--json", "-")
    assert finished.returncode == 0, finished.stderr
    records, swept = others_and_swept(json.loads(finished.stdout))
    paths = {
        "dispatch": ["compact", "compact, no sync", "expanded", "expanded, no sync"],
        "cached_dispatch": ["compact", "expanded"],
        "combine": ["compact", "compact, staged", "expanded"],
    }
    assert [(record["case"], record["path"], record["tokens"]) for record in records] == [
        (case, path, tokens) for tokens in (8, 1) for case, of_case in paths.items() for path in of_case
    ]
    assert all(record["vs"]["gloo"] > 0 and record["of_copy"] is not None for record in records)
    cases = [("combine", "expanded"), ("copy", "bf16"), ("copy", "expanded"), ("dispatch", "expanded")]
    assert sorted(swept) == [(*case, tokens) for case in cases for tokens in (1, 4, 8)]


def test_bench(tmp_path: Path) -> None:
    file, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    sizes = ("--ranks", "2", "--tokens", "16", "--hidden", "64", "--experts", "4", "--topk", "2")
    options = ("--repeats", "2", "--sweep-tokens", "--json", str(file), "--plot", str(plot))
    finished = anyep("bench", *sizes, *options)
    assert finished.returncode == 0, finished.stderr
    records, swept = others_and_swept(json.loads(file.read_text()))
    assert swept == [
        (case, path, tokens)
        for case, path in (("cached_dispatch", "window"), ("combine", "window"), ("copy", "bf16"))
        for tokens in (1, 4, 16)
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
    keys = {"case", "path", "ranks", "tokens", "hidden", "bytes", "median_s", "gbps", "of_copy", "vs"}
    assert all(set(record) == keys for record in records)
    assert {record["case"] for record in records} == {
        "layout",
        "notify",
        "dispatch",
        "cached_dispatch",
        "combine",
        "pair",
    }
    found = {(record["case"], record["path"], record["tokens"]) for record in records}
    for tokens in (16, 1):
        for case, paths in {
            "dispatch": ("window", "ring"),
            "cached_dispatch": ("window", "ring"),
            "combine": ("window", "staged", "ring"),
            "pair": ("window", "ring"),
        }.items():
            assert {(case, path, tokens) for path in paths} <= found
    for record in records:
        assert record["median_s"] > 0
        if record["case"] in ("dispatch", "cached_dispatch", "combine", "pair"):
            assert record["of_copy"] > 0
            assert record["vs"]["gloo"] > 0
    assert "vs Gloo" in finished.stdout


@pytest.mark.parametrize("plots", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bench_of_low_latency(tmp_path: Path, plots: bool) -> None:
    file, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    sizes = ("--ranks", "2", "--tokens", "4", "--hidden", "256", "--experts", "4", "--topk", "2")
    options = ("--repeats", "2", "--json", str(file), *(("--plot", str(plot)) if plots else ()))
    finished = anyep("bench", "--mode", "low-latency", *sizes, *options, "--sweep-tokens")
    assert finished.returncode == 0, finished.stderr
    records, swept = others_and_swept(json.loads(file.read_text()))
    assert swept == [
        (case, path, tokens)
        for case, paths in (("dispatch", ("bf16", "fp8")), ("combine", ("bf16",)), ("copy", ("bf16", "fp8")))
        for path in paths
        for tokens in (1, 4)
    ]
    assert not plots or plot.read_bytes().startswith(b"\x89PNG")
    keys = {"case", "path", "ranks", "tokens", "hidden", "bytes", "median_s", "gbps", "of_copy", "vs"}
    assert all(set(record) == keys for record in records)
    found = {(record["case"], record["path"], record["tokens"]): record for record in records}
    for tokens in (4, 1):
        for key in (("dispatch", "bf16"), ("dispatch", "fp8"), ("combine", "bf16"), ("pair", "bf16")):
            record = found[(*key, tokens)]
            assert record["median_s"] > 0
            assert record["of_copy"] > 0
            assert record["vs"]["gloo"] > 0
        assert (
            found["dispatch", "fp8", tokens]["bytes"] * 512
            == found["dispatch", "bf16", tokens]["bytes"] * 264
        )
    assert "low-latency mode, 2 ranks" in finished.stdout


def measure_wrongly(rank: Rank, setup: Setup, num_gpus: int) -> object:
    """With calls whose last row is off by a little."""
    from anyep.api.buffer import Buffer

    for name in ("combine", "low_latency_combine"):
        right = getattr(Buffer, name)

        def spoiled(*arguments: Any, right: Any = right, **options: Any) -> Any:
            x, *rest = right(*arguments, **options)
            x[-1] *= 1.01
            return x, *rest

        setattr(Buffer, name, spoiled)
    return measure_on_rank(rank, setup, num_gpus)


@pytest.mark.parametrize("mode", ["normal", "low-latency"])
def test_bench_fails_when_a_result_is_wrong(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr("anyep.cli.bench.measure.measure_on_rank", measure_wrongly)
    sizes = ("--ranks", "2", "--tokens", "4", "--hidden", "128", "--experts", "4", "--topk", "2")
    finished = anyep("bench", "--mode", mode, *sizes, "--repeats", "1")
    assert (finished.returncode, finished.stdout) == (1, "")
    assert "4 tokens) gave a wrong result on rank" in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_bench_prints_json() -> None:
    sizes = ("--ranks", "1", "--tokens", "4", "--hidden", "16", "--experts", "4", "--topk", "2")
    printed = anyep("bench", *sizes, "--repeats", "1", "--json", "-").stdout
    assert json.loads(printed)[0]["case"] == "layout"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--ranks", "0"), "--ranks is 0"),
        (
            ("demo", "--ranks", "3", "--experts", "16"),
            "16 experts do not divide over 3 ranks",
        ),
        (("demo", "--topk", "17"), "--topk is 17, but there are only 16 experts"),
        (("demo", "--hidden", "3"), "a row of 12 bytes is no multiple of 16 bytes"),
        (("demo", "--path", "road"), "--path is 'road': choose one of auto, window, ring"),
        (("demo", "--tokens", "-1"), "tokens is -1"),
        (("bench", "--mode", "fast"), "--mode is 'fast': choose normal or low-latency"),
        (("bench", "--api", "v2"), "--api is 'v2': choose buffer or elastic"),
        (("bench", "--api", "elastic", "--nodes", "2"), "--api elastic measures on one node"),
        (
            ("bench", "--mode", "low-latency", "--hidden", "64"),
            "--hidden is 64: with use_fp8 it must be a multiple of 128",
        ),
        (("bench", "--ranks", "3"), "64 experts do not divide over 3 ranks"),
        (("bench", "--repeats", "0"), "repeats is 0"),
        (("bench", "--hidden", "4"), "a row of 8 bytes is no multiple of 16 bytes"),
        (("demo", "--experts", "0"), "--experts is 0: it must be at least 1"),
        (
            ("demo", "--topk", "200", "--experts", "256"),
            "--topk asks for 200 experts per token: it must be 1 to 128",
        ),
        (
            ("bench", "--json", "/no/such/folder/x.json"),
            "there is no folder '/no/such/folder' to write the records",
        ),
        (
            ("bench", "--plot", "/no/such/folder/x.png"),
            "there is no folder '/no/such/folder' to write the plot",
        ),
        (("bench", "--json", "/tmp"), "the records cannot be written to '/tmp', a folder: add the name"),
        (("bench", "--plot", "x.pdf"), "its name must end in .png or .svg"),
        (("demo", "--device", "tpu"), "--device is 'tpu': choose cpu or cuda"),
        (("bench", "--device", "tpu"), "--device is 'tpu': choose cpu or cuda"),
        (("bench", "--sms", "8"), "sms are for --device cuda in normal mode"),
        (("bench", "--sweep-sms"), "sms are for --device cuda in normal mode"),
        (
            ("bench", "--sweep-tokens", "--tokens", "1"),
            "to --tokens, which is 1: choose more, or leave it out",
        ),
        (
            ("bench", "--device", "cuda", "--mode", "low-latency", "--sms", "8"),
            "sms are for --device cuda in normal mode",
        ),
        (("bench", "--device", "cuda", "--sms", "3"), "--sms is 3: it must be even"),
        (("bench", "--device", "cuda", "--sms", "0"), "--sms is 0: it must be at least 1"),
        (("bench", "--device", "cuda", "--sms", "258"), "--sms is 258: at most 256 are possible"),
        (("bench", "--device", "cuda", "--ranks", "3"), "256 experts do not divide over 3 ranks"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str) -> None:
    finished = anyep(*arguments)
    assert finished.returncode == 2
    assert words in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_a_torch_that_is_broken(tmp_path: Path) -> None:
    """An error other than ImportError ends the server that ranks are forked from."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('this torch is broken')")
    finished = subprocess.run(
        [sys.executable, "-m", "anyep", *SMALL_DEMO],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert finished.returncode == 1
    assert "this torch is broken" in finished.stderr
    assert finished.stderr.splitlines()[-1].startswith(
        "anyep: ranks cannot be started: the process that loads"
    )


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_demo_leaves_nothing_behind(ending: int) -> None:
    command = ("demo", "--ranks", "3", "--experts", "6", "--steps", "100000")
    with Program("-m", "anyep", *command, has_anyep=True) as process:
        # The server that ranks are forked from, multiprocessing's tracker and the ranks, which have begun.
        wait_until(lambda: len(descendants_of(process.pid)) == 5)
        pids = descendants_of(process.pid)
        wait_until(lambda: all(is_mapped("memfd:anyep-", pid) for pid in pids[-3:]))
        process.send_signal(ending)
        assert process.wait() == (130 if ending == signal.SIGINT else -ending)
        wait_until(lambda: all(is_gone(pid) for pid in pids))


def is_mapped(words: str, pid: int) -> bool:
    try:
        return words in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
