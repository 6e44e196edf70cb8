"""The command line: what it prints, and what it says about wrong arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from anyep import Config
from anyep.cli.memory_map import SMALL, control_colours
from anyep.cli.units import parse_bytes
from anyep.layout import ControlRegion
from tests.support.commands import anyep
from tests.support.programs import ROOT

PLAN = ("plan", "--ranks", "8", "--hidden", "7168", "--experts", "256")


SLOW = pytest.mark.slow


def test_plan_json() -> None:
    finished = anyep(*PLAN, "--low-latency-tokens", "128", "--json")
    assert (finished.returncode, finished.stderr) == (0, "")
    plan = json.loads(finished.stdout)
    assert list(plan) == [
        "ranks",
        "config",
        "nvl_bytes",
        "rdma_bytes",
        "low_latency_bytes",
        "token_bytes",
        "parts",
    ]
    assert plan["ranks"] == 8
    assert plan["nvl_bytes"] == 335_709_824
    assert plan["rdma_bytes"] == 0
    assert plan["low_latency_bytes"] == 1_881_147_520
    assert plan["token_bytes"] == 14_416
    assert Config(**plan["config"]["dispatch"]) == Config(20, 6, 256, 6, 128)
    for heap in ("nvl", "rdma", "low_latency"):
        assert sum(plan["parts"][heap].values()) == plan[f"{heap}_bytes"]
    assert sum(plan["parts"]["token"].values()) == plan["token_bytes"]


def test_plan_without_low_latency_says_null() -> None:
    plan = json.loads(anyep(*PLAN, "--json").stdout)
    assert plan["low_latency_bytes"] is None
    assert plan["parts"]["low_latency"] is None


def test_plan_takes_the_larger_of_both_configs() -> None:
    # At 24 ranks dispatch rounds its 128 rows between nodes to 128, combine to 140.
    plan = json.loads(anyep("plan", "--ranks", "24", "--experts", "264", "--json").stdout)
    hints = [
        Config(**plan["config"][call]).get_rdma_buffer_size_hint(14336, 24)
        for call in ("dispatch", "combine")
    ]
    assert hints[0] < hints[1] == plan["rdma_bytes"]


@pytest.mark.parametrize(
    ("dtype", "hidden_bytes", "scale_bytes", "hint_bytes"),
    [
        ("bf16", 14336, 0, 14336),
        ("fp16", 14336, 0, 14336),
        ("fp32", 28672, 0, 28672),
        ("fp8", 7168, 224, 14336),
    ],
)
def test_plan_knows_dtypes(dtype: str, hidden_bytes: int, scale_bytes: int, hint_bytes: int) -> None:
    plan = json.loads(anyep(*PLAN, "--dtype", dtype, "--json").stdout)
    assert plan["parts"]["token"]["hidden"] == hidden_bytes
    assert plan["parts"]["token"]["scales"] == scale_bytes
    assert plan["nvl_bytes"] == Config(20, 6, 256, 6, 128).get_nvl_buffer_size_hint(hint_bytes, 8)


def test_plan_for_several_rank_counts() -> None:
    plans = json.loads(anyep("plan", "--ranks", "8,16,32,64", "--json").stdout)
    assert [plan["ranks"] for plan in plans] == [8, 16, 32, 64]
    printed = anyep("plan", "--ranks", "8,16,32,64").stdout
    rows = [line.split() for line in printed.splitlines()]
    assert [row[:2] for row in rows if row and row[0] in ("8", "16", "32", "64")] == [
        ["8", "1"],
        ["16", "2"],
        ["32", "4"],
        ["64", "8"],
    ]


def test_plan_for_people() -> None:
    printed = anyep("plan", "--ranks", "16", "--low-latency-tokens", "128", "--memory", "1GiB").stdout
    for text in ("377,673,984", "91,887,744", "1,881,147,520", "14,416 bytes", "1.2 GiB too much"):
        assert text in printed


def test_plan_memory() -> None:
    assert json.loads(anyep(*PLAN, "--memory", "1GiB", "--json").stdout)["fits"] is True
    assert json.loads(anyep(*PLAN, "--memory", "300MiB", "--json").stdout)["fits"] is False
    assert "left" in anyep("plan", "--ranks", "8,16", "--memory", "80GiB").stdout


def test_amounts_of_memory() -> None:
    amounts = {"80GiB": 80 * 2**30, "80GB": 80 * 10**9, "512MiB": 2**29, "1.5TiB": 3 * 2**39, "4096": 4096}
    for text, num_bytes in (amounts | {"24 gb": 24 * 10**9, "9007199254740993": 2**53 + 1}).items():
        assert parse_bytes("--memory", text) == num_bytes


@pytest.mark.parametrize(
    ("ending", "extra"),
    [
        (".svg", ()),
        (".png", ("--low-latency-tokens", "128", "--ranks", "16")),
        pytest.param(".png", (), marks=SLOW),
        pytest.param(".svg", ("--ranks", "1"), marks=SLOW),
        pytest.param(".png", ("--ranks", "1"), marks=SLOW),
        pytest.param(".svg", ("--low-latency-tokens", "128", "--ranks", "16"), marks=SLOW),
    ],
)
def test_plan_draws_a_map(tmp_path: Path, ending: str, extra: tuple[str, ...]) -> None:
    path = tmp_path / f"map{ending}"
    finished = anyep("plan", "--map", str(path), *extra)
    assert finished.returncode == 0, finished.stderr
    assert path.read_bytes().startswith({".svg": b"<?xml", ".png": b"\x89PNG"}[ending])
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, 1), (8, 8), (16, 8), (512, 8)])
def test_no_two_parts_of_the_control_region_share_a_colour(num_ranks: int, ranks_per_node: int) -> None:
    sizes: Counter[str] = Counter()
    for region in ControlRegion(num_ranks, ranks_per_node).regions():
        sizes[region.kind] += region.num_bytes
    colours = control_colours(sizes)
    assert len(set(colours.values())) == len(colours)
    assert SMALL not in colours.values()
    uncoloured = [size for kind, size in sizes.items() if kind not in colours]
    assert sum(uncoloured) < 0.05 * sum(sizes.values()), "what is left out is hardly to be seen"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--num-sms", "3"), "--num-sms is 3: it must be even"),
        (("plan", "--num-sms", "0"), "--num-sms is 0"),
        (("plan", "--ranks", "0"), "--ranks is 0: it must be at least 1"),
        (("plan", "--ranks", "-8"), "--ranks is -8"),
        (("plan", "--ranks", "eight"), "--ranks is 'eight'"),
        (("plan", "--ranks", "8,"), "--ranks is '8,'"),
        (("plan", "--ranks", "8,16", "--map", "x.svg"), "a map shows one cluster"),
        (("plan", "--ranks-per-node", "0"), "--ranks-per-node is 0"),
        (("plan", "--hidden", "7"), "a row of 14 bytes is no multiple of 16 bytes"),
        (("plan", "--hidden", "-128"), "--hidden is -128"),
        (("plan", "--hidden", "wide"), "--hidden"),
        (("plan", "--hidden", "16512", "--dtype", "fp8"), "129 scales per token: at most 128"),
        (("plan", "--dtype", "int4"), "--dtype is 'int4': choose one of bf16, fp16, fp32, fp8"),
        (("plan", "--tokens", "-1"), "--tokens is -1"),
        (("plan", "--topk", "-1"), "--topk asks for -1 experts per token: it must be 1 to 128"),
        (("plan", "--topk", "129"), "--topk asks for 129 experts per token: it must be 1 to 128"),
        (
            ("plan", "--topk", "8", "--experts", "4", "--ranks", "4"),
            "--topk is 8, but there are only 4 experts",
        ),
        (("plan", "--experts", "0"), "--experts is 0"),
        (("plan", "--low-latency-tokens", "0"), "--low-latency-tokens is 0"),
        (("plan", "--low-latency-tokens", "-5"), "--low-latency-tokens is -5"),
        (
            ("plan", "--memory", "lots"),
            "--memory is 'lots', which is no amount of memory: write it like 80GiB",
        ),
        (("plan", "--memory", "-1GiB"), "--memory is '-1GiB', which is no amount of memory"),
        (
            ("plan", "--memory", "80"),
            "is 80 bytes, less than a page of memory (4096): write it with its unit, like 80GiB",
        ),
        (("plan", "--memory", "4095"), "is 4095 bytes, less than a page"),
        (("plan", "--memory", "0"), "write it with its unit, like 80GiB"),
        (("plan", "--memory", "80XB"), "--memory is '80XB', which is no amount of memory"),
        (("plan", "--map", "map.pdf"), "its name must end in .svg or .png"),
        (("plan", "--map", "map"), "its name must end in .svg or .png"),
        (("plan", "--map", "/no/such/folder/map.svg"), "there is no folder '/no/such/folder'"),
        (("plan", "--bogus"), "--bogus"),
        (("nonsense",), "nonsense"),
    ],
)
def test_wrong_arguments_get_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    finished = anyep(*arguments)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert words in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_a_map_in_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "map.svg"
    folder.mkdir()
    finished = anyep("plan", "--map", str(folder))
    assert finished.returncode == 2
    assert "cannot be written" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_map_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    finished = anyep("plan", "--map", str(tmp_path / "map.svg"))
    assert finished.returncode == 1
    assert finished.stderr == "anyep: drawing a map needs matplotlib: pip install 'anyep[plot]'\n"


def test_help_and_version() -> None:
    assert "plan" in anyep().stdout
    assert "--low-latency-tokens" in anyep("plan", "--help").stdout
    assert anyep("--version").stdout.startswith("anyep 0.")


def test_the_list_of_commands_is_not_cut() -> None:
    lines = anyep("--help").stdout.split("Commands:\n")[1].splitlines()
    assert len(lines) >= 10
    assert [line for line in lines if "..." in line] == []


def test_a_reader_that_goes_away() -> None:
    finished = subprocess.run(
        f"{sys.executable} -m anyep plan --ranks 8,16,32,64 --json | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stderr == ""


DOCTOR_LINES = {
    "python",
    "cores",
    "memory",
    "/dev/shm",
    "memfd",
    "pidfd",
    "torch",
    "numba",
    "triton",
    "gpu",
    "mps",
    "symmetric memory",
    "nvshmem",
    "nixl",
}


def test_doctor() -> None:
    finished = anyep("doctor", "--json")
    assert finished.returncode == 0, finished.stderr
    findings = json.loads(finished.stdout)
    by_name = {finding["name"]: finding for finding in findings}
    assert set(by_name) >= DOCTOR_LINES
    assert all(finding["state"] in ("ok", "missing", "note") for finding in findings)
    assert all(finding["next_step"] for finding in findings if finding["state"] != "ok")
    for name in ("memfd", "pidfd", "torch", "gloo", "numba"):
        assert by_name[name]["state"] == "ok", by_name[name]
    printed = anyep("doctor").stdout
    assert all(name in printed for name in DOCTOR_LINES)
    assert printed.strip().endswith("AnyEP can run on this machine")


def test_doctor_on_a_bare_machine(tmp_path: Path) -> None:
    """Torch and Numba broken, no tools on the PATH, every file of /proc that it reads unreadable."""
    for name in ("torch", "numba"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('no {name} here')")
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib\n"
        "def refuse(self, *a, **k): raise PermissionError(f'{self}')\n"
        "pathlib.Path.read_text = refuse\n"
    )
    finished = subprocess.run(
        [sys.executable, "-m", "anyep", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PATH": ""},
    )
    assert finished.returncode == 0, finished.stderr
    by_name = {finding["name"]: finding for finding in json.loads(finished.stdout)}
    assert set(by_name) >= DOCTOR_LINES
    assert by_name["torch"]["state"] == "missing"
    assert "pip install" in by_name["torch"]["next_step"]
    assert by_name["numba"]["state"] == "missing"
    assert "could not be examined" in by_name["memory"]["detail"]
