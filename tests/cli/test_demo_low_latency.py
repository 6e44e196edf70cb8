"""`anyep demo --mode low-latency`: what it prints; and that its check can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyep.cli.demo.decode_reference import Experts, compare, gate_of, layer_in_one_process, through_fp8
from anyep.cli.demo.decode_results import TOLERANCE, is_ok
from anyep.cli.demo.job import COMMUNICATION, PHASES, DecodeJob, Difference, decode_on_rank
from anyep.cli.histogram import buckets_of, latency_of, marks_of
from anyep.cli.ranks import Rank
from tests.support import low_latency_oracle as oracle
from tests.support.commands import anyep

DEMO = ("demo", "--mode", "low-latency")
SMALL = ("--ranks", "2", "--hidden", "128", "--experts", "4", "--topk", "2", "--steps", "4")


def options(**values: int) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


# 23 steps are checked in two portions; 1 token leaves a micro-batch empty, 5 make them uneven.
@pytest.mark.parametrize(
    ("ranks", "tokens", "hidden", "experts", "topk", "steps"),
    [
        pytest.param(1, 5, 256, 3, 3, 1, marks=pytest.mark.slow),
        (2, 5, 256, 16, 4, 23),
        pytest.param(2, 8, 512, 16, 4, 23, marks=pytest.mark.slow),
        pytest.param(4, 1, 128, 8, 2, 6, marks=pytest.mark.slow),
    ],
)
def test_demo(ranks: int, tokens: int, hidden: int, experts: int, topk: int, steps: int) -> None:
    sizes = {
        "ranks": ranks,
        "tokens": tokens,
        "hidden": hidden,
        "experts": experts,
        "topk": topk,
        "steps": steps,
    }
    finished = anyep(*DEMO, *options(**sizes), "--json")
    assert (finished.returncode, finished.stderr) == (0, "")
    record: dict[str, Any] = json.loads(finished.stdout)
    assert record["mode"] == "low-latency"
    assert {name: record[name] for name in sizes} == sizes
    assert record["ok"] is True
    assert record["largest_difference"] <= record["tolerance"] == TOLERANCE
    assert record["entries"] == ranks * tokens * hidden * steps
    assert record["different_entries"] <= 0.01 * record["entries"]
    assert record["tokens_per_second"] > 0
    assert list(record["phases"]) == list(PHASES)
    for times in record["phases"].values():
        assert 0 < times["p50_s"] <= times["p99_s"]
    for name, samples in (("step", ranks * steps), ("pair", 2 * ranks * steps)):
        latency = record[name]
        buckets = latency["histogram"]
        assert latency["samples"] == samples == sum(bucket["count"] for bucket in buckets)
        assert buckets[0]["from_s"] <= latency["p50_s"] <= latency["p99_s"] <= buckets[-1]["to_s"]
    # A pair is all of a micro-batch's communication.
    assert record["pair"]["p99_s"] >= max(record["phases"][phase]["p50_s"] for phase in COMMUNICATION)


def test_demo_for_people() -> None:
    finished = anyep(*DEMO, *SMALL)
    assert finished.returncode == 0, finished.stderr
    assert "8 tokens per rank and step, hidden 128" in finished.stdout
    for words in (*PHASES, "█", "◂ p50", "p99", "tokens per second"):
        assert words in finished.stdout
    assert "matches the single-process reference" in finished.stdout


def decode_wrongly(rank: Rank, job: DecodeJob) -> object:
    """With a combine that is off by little, but everywhere."""
    from anyep.api.buffer import Buffer

    right = Buffer.low_latency_combine
    Buffer.low_latency_combine = lambda self, x, *a, **k: right(self, x * 1.005, *a, **k)  # type: ignore
    return decode_on_rank(rank, job)


def test_demo_fails_when_the_check_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyep.cli.demo.command.decode_on_rank", decode_wrongly)
    finished = anyep(*DEMO, *SMALL)
    assert finished.returncode == 1, finished.stderr
    assert "differs from the single-process reference" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hidden", "200"), "--hidden is 200: with use_fp8 it must be a multiple of 128"),
        (("--path", "auto"), "--path is for normal mode: low-latency calls have one way only; leave it out"),
        (("--tokens", "0"), "tokens is 0"),
        (("--steps", "0"), "steps is 0"),
        (("--ranks", "3"), "16 experts do not divide over 3 ranks"),
        (("--mode", "fast"), "--mode is 'fast': choose normal or low-latency"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str) -> None:
    finished = anyep(*DEMO, *arguments)
    assert finished.returncode == 2
    assert words in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_the_command_starts_without_torch() -> None:
    code = "import sys, anyep.cli.demo.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The check


def a_step(tokens: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Experts]:
    job = DecodeJob(1, tokens, 256, 4, 2, 1, 0)
    x = torch.randn(tokens, job.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    gate = gate_of(job)
    return x, (x.float() @ gate).topk(job.topk, dim=-1).indices, gate, Experts(job, range(job.experts))


def test_the_reference_quantises_as_documented() -> None:
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3] = 0
    data, scales = oracle.fp8(x, round_scale=False)
    assert torch.equal(through_fp8(x), data.float() * scales.repeat_interleave(128, dim=1))


def test_right_results_pass() -> None:
    x, choices, gate, experts = a_step()
    right, misrouted = layer_in_one_process(x, choices, gate, experts)
    assert misrouted == 0
    # In other portions sums have other last bits, and some roundings go the other way.
    halves = [layer_in_one_process(x[part], choices[part], gate, experts)[0] for part in ([0], range(1, 24))]
    assert is_ok(compare(right, right))
    assert is_ok(compare(torch.cat(halves), right))


def test_wrong_results_fail() -> None:
    x, choices, gate, experts = a_step()
    right, _ = layer_in_one_process(x, choices, gate, experts)
    swapped = right.clone()
    swapped[[0, 1]] = right[[1, 0]]
    one_entry = right.clone()
    one_entry[5, 7] += 0.05 * right.abs().max()
    missing = right.clone()
    missing[3] = float("nan")
    for wrong in (swapped, one_entry, missing, right * 1.01, torch.zeros_like(right)):
        assert not is_ok(compare(wrong, right))
    assert compare(missing, right).largest == float("inf")
    assert not is_ok(compare(one_entry, right) + Difference(0.0, 0, 10**9))


def test_results_without_fp8_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    x, choices, gate, experts = a_step()
    right, _ = layer_in_one_process(x, choices, gate, experts)
    monkeypatch.setattr("anyep.cli.demo.decode_reference.through_fp8", torch.Tensor.float)
    assert not is_ok(compare(layer_in_one_process(x, choices, gate, experts)[0], right))


def test_a_wrong_choice_of_experts_is_noticed() -> None:
    x, choices, gate, experts = a_step()
    choices[0, 0] = next(iter(set(range(4)) - set(choices[0].tolist())))
    assert layer_in_one_process(x, choices, gate, experts)[1] > TOLERANCE


# The picture


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=50))
def test_buckets_hold_every_value_once(seconds: list[float]) -> None:
    buckets = buckets_of(seconds)
    assert sum(bucket.count for bucket in buckets) == len(seconds)
    assert (buckets[0].from_s, buckets[-1].to_s) == (min(seconds), max(seconds))
    assert all(before.to_s == after.from_s for before, after in pairwise(buckets))


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=50))
def test_each_percentile_is_marked_once(seconds: list[float]) -> None:
    marks = ", ".join(marks_of(latency_of(seconds)))
    assert marks.count("p50") == marks.count("p99") == 1
