"""The commands on a GPU that ranks share, as a user meets them; and that they leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anyep.backends.cuda.mps import MultiProcessService
from tests.support.commands import descendants_of
from tests.support.mps import folders, processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]
# All ranks on one GPU, also where there are several.
ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}
TINY = ("--tokens", "32", "--hidden", "256", "--experts", "8", "--topk", "2")
END_TIMEOUT_S = 40


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A folder of its own: other tests may start services at the same time. The names of sockets are short.
    with tempfile.TemporaryDirectory(prefix="commands-") as name:
        folder = Path(name)
        monkeypatch.setenv("TMPDIR", name)
        yield
        deadline = time.monotonic() + END_TIMEOUT_S
        while (processes(folder) or folders(folder)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert (processes(folder), folders(folder)) == (set(), set())


def anyep(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # The first call on a machine compiles the kernels.
    return subprocess.run(
        [sys.executable, "-m", "anyep", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | ONE_GPU | variables,
    )


def record_of(*arguments: str) -> Any:
    finished = anyep(*arguments)
    assert finished.returncode == 0, finished.stderr
    # Without the service it says how slow that is.
    assert ("take turns" in finished.stderr) is not MultiProcessService.is_installed()
    return json.loads(finished.stdout)


def test_doctor() -> None:
    findings = json.loads(anyep("doctor", "--json").stdout)
    assert all(finding["next_step"] for finding in findings if finding["state"] != "ok")
    by_name = {finding["name"]: finding for finding in findings}
    assert by_name["gpu"]["state"] == by_name["gpu in torch"]["state"] == by_name["triton"]["state"] == "ok"
    assert f"CUDA {torch.version.cuda}" in by_name["gpu in torch"]["detail"]
    assert ("not on the path" in by_name["mps"]["detail"]) is not MultiProcessService.is_installed()
    assert anyep("doctor").stdout.strip().endswith("AnyEP can run on this machine")


@pytest.mark.parametrize("path", ["auto", "window", "ring"])
def test_demo(path: str) -> None:
    record = record_of("demo", "--device", "cuda", "--ranks", "4", "--path", path, "--steps", "3", "--json")
    assert (record["device"], record["gpus"], record["ranks"]) == ("cuda", 1, 4)
    assert record["ok"]
    assert record["losses"][1] < record["losses"][0]


def test_decoding_and_bench_between_nodes(tmp_path: Path) -> None:
    place = ("--mode", "low-latency", "--device", "cuda", "--nodes", "2", "--ranks-per-node", "2")
    record = record_of("demo", *place, "--steps", "3", "--json")
    assert (record["ranks"], record["nodes"], record["ranks_per_node"]) == (4, 2, 2)
    assert record["ok"]
    file = tmp_path / "bench.json"
    finished = anyep("bench", *place, *TINY, "--repeats", "2", "--json", str(file))
    assert finished.returncode == 0, finished.stderr
    assert "low-latency mode, 4 ranks on 2 nodes of 2, on one GPU" in finished.stdout
    records = json.loads(file.read_text())
    assert {(record["case"], record["nodes"]) for record in records} == {
        (case, 2) for case in ("dispatch", "combine", "pair")
    }


def test_demo_for_people() -> None:
    finished = anyep("demo", "--device", "cuda", "--ranks", "2", *TINY, "--steps", "2")
    assert finished.returncode == 0, finished.stderr
    assert "2 ranks on one GPU, 32 tokens per rank" in finished.stdout
    assert "matches the single-process reference" in finished.stdout


def path_without_the_service(folder: Path) -> str:
    """All programs of the path, but for those of the service."""
    for program in (program for place in os.get_exec_path() for program in Path(place).glob("*")):
        link = folder / program.name
        if not program.name.startswith("nvidia-cuda-mps") and not link.is_symlink():
            link.symlink_to(program)
    return str(folder)


@pytest.mark.parametrize("mode", ["normal", "low-latency"])
def test_demo_without_the_service(tmp_path: Path, mode: str) -> None:
    """The ranks take turns: what they compute is right, and what to expect is said first."""
    options = ("--device", "cuda", "--ranks", "2", "--mode", mode, *TINY, "--steps", "2", "--json")
    programs, nobody_serves = tmp_path / "programs", tmp_path / "nobody-serves"
    programs.mkdir()
    nobody_serves.mkdir()
    path = path_without_the_service(programs)
    finished = anyep("demo", *options, PATH=path, CUDA_MPS_PIPE_DIRECTORY=str(nobody_serves))
    assert finished.returncode == 0, finished.stderr
    assert "2 ranks share one GPU without NVIDIA's multi-process service" in finished.stderr
    assert "a few milliseconds for each of them instead of microseconds" in finished.stderr
    assert json.loads(finished.stdout)["ok"]


def test_demo_of_low_latency() -> None:
    record = record_of(
        "demo", "--device", "cuda", "--mode", "low-latency", "--ranks", "4", "--steps", "23", "--json"
    )
    assert (record["device"], record["gpus"], record["ranks"]) == ("cuda", 1, 4)
    assert record["ok"]
    assert record["step"]["samples"] == 4 * 23


def test_bench(tmp_path: Path) -> None:
    file, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    options = (
        "--repeats",
        "2",
        "--sms",
        "8",
        "--sweep-sms",
        "--sweep-tokens",
        "--json",
        str(file),
        "--plot",
        str(plot),
    )
    finished = anyep("bench", "--device", "cuda", "--ranks", "2", *TINY, *options)
    assert finished.returncode == 0, finished.stderr
    assert "8 SMs per rank" in finished.stdout
    assert "NCCL refuses ranks that share a GPU" in finished.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    records = json.loads(file.read_text())
    assert all(record["median_s"] > 0 and record["device"] == "cuda" for record in records)
    cases = [record for record in records if not record["swept"]]
    assert {record["sms"] for record in cases if record["case"] != "copy"} == {8}
    found = {(record["case"], record["path"], record["tokens"]) for record in cases}
    for tokens in (32, 1):
        for case, paths in {
            "copy": ("bf16", "fp8"),
            "layout": ("local", "local, graph"),
            "dispatch": ("window", "window, worst, graph", "ring"),
            "cached_dispatch": (
                "window",
                "window, graph",
                "window, fp8",
                "window, fp8, graph",
                "ring",
            ),
            "combine": ("window", "window, graph", "staged", "staged, graph", "ring"),
        }.items():
            assert {(case, path, tokens) for path in paths} <= found
    for case in ("cached_dispatch", "combine"):
        swept = [record for record in records if record["swept"] == "sms" and record["case"] == case]
        assert [record["sms"] for record in swept] == sorted({record["sms"] for record in swept})
        assert sum(record["enough"] for record in swept) == 1
        over_tokens = [record for record in records if record["swept"] == "tokens" and record["case"] == case]
        assert [(record["path"], record["tokens"]) for record in over_tokens] == [
            ("window, graph", tokens) for tokens in (1, 4, 16, 32)
        ]
        assert all(record["of_copy"] > 0 and not record["enough"] for record in over_tokens)


def test_bench_of_low_latency() -> None:
    records = record_of(
        "bench",
        "--device",
        "cuda",
        "--mode",
        "low-latency",
        "--ranks",
        "2",
        *TINY,
        "--repeats",
        "2",
        "--sweep-tokens",
        "--json",
        "-",
    )
    cases = [record for record in records if not record["swept"]]
    found = {(record["case"], record["path"], record["tokens"]): record for record in cases}
    for tokens in (32, 1):
        for case, path in (("dispatch", "fp8"), ("combine", "bf16"), ("pair", "fp8 + bf16")):
            for how in ("graph", "singly"):
                record = found[case, f"{path}, {how}", tokens]
                assert 0 < record["median_s"] <= record["p99_s"]
                assert record["of_copy"] > 0
    swept = [(record["case"], record["path"], record["tokens"]) for record in records if record["swept"]]
    assert swept == [
        (case, path, tokens)
        for case, path in (
            ("copy", "fp8"),
            ("copy", "bf16"),
            ("dispatch", "fp8, graph"),
            ("combine", "bf16, graph"),
        )
        for tokens in (1, 4, 16, 32)
    ]


def test_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty cache folder: every kernel is compiled."""
    if not MultiProcessService.is_installed():
        pytest.skip("ranks that share a GPU take turns here")
    monkeypatch.setenv("ANYEP_CACHE_DIR", str(tmp_path / "kept"))
    run = ("tune", "--ranks", "2", *TINY, "--sms", "8", "--repeats", "2", "--candidates", "2")
    dry = record_of(*run, "--dry-run", "--json", "-")
    assert dry["file"] is None
    assert not (tmp_path / "kept" / "tuned.json").exists()
    record = record_of(*run, "--json", "-")
    assert record["file"] == str(tmp_path / "kept" / "tuned.json")
    assert record["gpus"] == [torch.cuda.get_device_properties(0).name]
    assert (record["ranks"], record["ranks_on_gpu"], record["sms"]) == (2, 2, 8)
    for kernel in ("dispatch", "combine"):
        tried = [each for each in record["candidates"] if each["kernel"] == kernel]
        assert sum(each["builtin"] for each in tried) == 2
        assert not [each["problem"] for each in tried if each["problem"]]
        assert all(each["median_s"] > 0 for each in tried)
        chosen = record["chosen"][kernel]
        assert chosen["gain"] == 1.0 if chosen["tile"] is None else chosen["gain"] >= 1.02
    assert record["recommended_sms"] in [each["sms"] for each in record["by_sms"]]
    findings = json.loads(anyep("doctor", "--json").stdout)
    (finding,) = [finding for finding in findings if finding["name"] == "tuned"]
    assert finding["detail"].startswith("used for ")
    assert "1 on a GPU" not in anyep("tune", "--show").stdout
    # Buffers that read the file give right results.
    assert record_of("demo", "--device", "cuda", "--ranks", "2", *TINY, "--steps", "2", "--json")["ok"]
    assert "deleted" in anyep("tune", "--reset").stdout


def test_more_sms_than_there_are() -> None:
    finished = anyep("bench", "--device", "cuda", "--ranks", "2", *TINY, "--sms", "256")
    assert finished.returncode == 2
    assert "--sms is 256, but 2 ranks on a GPU with" in finished.stderr


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_demo_leaves_nothing_behind(ending: int) -> None:
    command = ["demo", "--device", "cuda", "--ranks", "3", "--experts", "6", "--steps", "100000"]
    folder = Path(os.environ["TMPDIR"])
    process = subprocess.Popen(
        [sys.executable, "-m", "anyep", *command], stderr=subprocess.DEVNULL, env=os.environ | ONE_GPU
    )
    # The keeper of the service, the service, the fork server, multiprocessing's tracker and the ranks.
    num_expected = 7 if MultiProcessService.is_installed() else 5
    deadline = time.monotonic() + 60
    while len(pids := descendants_of(process.pid)) < num_expected and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(15)  # in the middle of kernels
    assert process.poll() is None
    assert bool(processes(folder)) is MultiProcessService.is_installed()
    os.kill(process.pid, ending)
    process.wait(END_TIMEOUT_S)
    if ending == signal.SIGINT:
        assert process.returncode == 130
    deadline = time.monotonic() + END_TIMEOUT_S
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def test_selftest(tmp_path: Path) -> None:
    """All cases on the GPU, in a CUDA graph, too; and a rank on it that is killed."""
    file = tmp_path / "report.json"
    finished = anyep("selftest", "--quick", "--device", "cuda", "--ranks", "2", "--json", str(file))
    record = json.loads(file.read_text())
    assert finished.returncode == 0, [check for check in record["checks"] if check["state"] == "failed"]
    assert any("CUDA graph" in check["name"] for check in record["checks"])
    assert {finding["name"] for finding in record["hosts"][0]["findings"]} >= {"gpu", "gpudirect"}
