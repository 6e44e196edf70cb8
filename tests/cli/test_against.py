"""`anyep bench --against deep_ep`: the same calls through another library, here AnyEP under that name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import anyep as package
from tests.support.commands import anyep
from tests.support.programs import run_program

DROP_IN = Path(package.__file__).parent / "as_deep_ep"
SIZES = (
    "--ranks",
    "2",
    "--tokens",
    "8",
    "--hidden",
    "256",
    "--experts",
    "4",
    "--topk",
    "2",
    "--repeats",
    "2",
)


@pytest.mark.parametrize(
    ("mode", "paths"),
    [
        (
            "normal",
            [(case, "deep_ep", "window") for case in ("dispatch", "cached_dispatch", "combine")],
        ),
        ("low-latency", [("dispatch", "deep_ep fp8", "fp8"), ("combine", "deep_ep bf16", "bf16")]),
    ],
)
def test_the_drop_in(mode: str, paths: list[tuple[str, str, str]]) -> None:
    finished = run_program(
        *("-m", "anyep", "bench", "--mode", mode, *SIZES, "--against", "deep_ep", "--json", "-"),
        env={"PYTHONPATH": str(DROP_IN)},
    )
    assert finished.returncode == 0, finished.stderr
    records = {
        (record["case"], record["path"], record["tokens"]): record for record in json.loads(finished.stdout)
    }
    for case, theirs, ours in paths:
        for tokens in (8, 1):
            other, own = records[case, theirs, tokens], records[case, ours, tokens]
            assert (other["bytes"], other["vs"]) == (own["bytes"], {})
            assert own["vs"]["deep_ep"] == pytest.approx(other["median_s"] / own["median_s"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--against", "other"), "--against is 'other': choose deep_ep"),
        (
            ("--against", "deep_ep", "--nodes", "2", "--ranks-per-node", "2"),
            "--against is for ranks of one node: leave --nodes out",
        ),
    ],
)
def test_what_cannot_be_compared(options: tuple[str, ...], message: str) -> None:
    finished = anyep("bench", *options)
    assert finished.returncode != 0
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_library_that_is_not_installed() -> None:
    # In a process of its own: tests in this one have installed the drop-in.
    finished = run_program("-m", "anyep", "bench", "--against", "deep_ep")
    assert finished.returncode != 0
    assert "--against is 'deep_ep', but Python finds no module of that name" in finished.stderr
    assert "Traceback" not in finished.stderr
