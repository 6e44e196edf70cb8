"""`anyep calibrate`: constants from known times, and a run on this machine whose file the planner reads."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyep.cli.bench.records import Label, RankReport, Setup, Timing
from anyep.cli.calibrate import _entries, left_out, measured_of
from anyep.planning.calibration import (
    Line,
    Point,
    alone,
    entries_of,
    errors,
    file_text,
    fit_bent_line,
    fit_line,
    gbs_per_sm,
    rows_of,
)
from anyep.planning.machines import find_machine
from anyep.planning.times import Call, time_of
from tests.support.commands import anyep
from tests.support.depth import examples

TOKENS = (1, 4, 16, 64, 256)


@examples(40, deep=400)
@given(st.floats(1, 1000), st.floats(0.1, 500))
def test_a_known_line_is_found(start_us: float, gbs: float) -> None:
    line = Line(start_us, gbs)
    points = [Point(float(rows), line.us(rows * 1000)) for rows in TOKENS]
    found = fit_line(points, 1000)
    assert found.us(256_000) == pytest.approx(line.us(256_000), rel=1e-6)
    assert max(map(abs, errors(points, found, 1000))) < 1e-6


def test_times_that_no_line_has() -> None:
    """Constants stay above 0: times in proportion to rows, and times that fall."""
    steep = fit_line([Point(rows, 2.0 * rows - 1.5) for rows in TOKENS], 1000)
    falling = fit_line([Point(1, 100.0), Point(100, 50.0)], 1000)
    for line in (steep, falling):
        assert line.start_us > 0
        assert line.gbs > 0


def test_caches_bend_the_line() -> None:
    """The first 100,000 bytes are ten times as fast; the model of time has the same bend."""
    known = Line(50.0, 1.0, 10.0, 100_000.0)
    points = [Point(float(rows), known.us(rows * 1000)) for rows in (1, 10, 50, 100, 400, 1000)]
    found = fit_bent_line(points, 1000)
    assert found == pytest.approx(known, rel=1e-6)
    assert max(map(abs, errors(points, found, 1000))) < 1e-9
    assert max(left_out([*points[:3], Point(75, known.us(75_000)), *points[3:]], 1000)) < 1.0
    straight = [Point(float(rows), Line(50.0, 1.0).us(rows * 1000)) for rows in (1, 10, 50, 100, 400, 1000)]
    assert fit_bent_line(straight, 1000).cached_bytes == 0
    constants = {entry.name: entry.value for entry in entries_of({"dispatch": found}, "", 2, {}, True)}
    for tokens in (1, 16, 64, 256):
        call = Call("normal", "dispatch", 1, 2, tokens, 1000, 8, 64)
        rows = rows_of("normal", "dispatch", 2, tokens, 8, 64)
        assert time_of(call, constants).total_us == pytest.approx(known.us(rows * 1000))


def test_ranks_that_share_cores() -> None:
    """Measured with 8 ranks on 2 cores, a machine predicts these times, and shorter ones for fewer ranks."""
    line = Line(400.0, 1.0)
    entries, said = _entries("normal", SETUP, measured_of("normal", SETUP, reports(line)), places=2)
    by_name = {entry.name: entry.value for entry in entries}
    assert by_name["dispatch_start_us"] == pytest.approx(100.0, rel=1e-3)
    assert by_name["dispatch_nvlink_gbs"] == pytest.approx(4.0, rel=1e-3)
    assert by_name["without_sms"] == 1.0
    # Counting takes 40 us more than a call along a handle, when 4 ranks share a core.
    assert by_name["host_sync_us"] == pytest.approx(10.0)
    assert "normal dispatch: 400 us, then 1.00 GB/s per rank" in said[0]
    call = Call("normal", "dispatch", 1, 8, 64, SETUP.row_bytes, SETUP.topk, SETUP.experts)
    rows = rows_of("normal", "dispatch", 8, 64, SETUP.topk, SETUP.experts)
    assert time_of(call, by_name).total_us == pytest.approx(line.us(rows * SETUP.row_bytes), rel=1e-3)
    shared = time_of(call, by_name).start_us
    assert time_of(call._replace(num_ranks=4), by_name).start_us == pytest.approx(shared / 2)
    assert time_of(call._replace(num_ranks=2), by_name).start_us == pytest.approx(shared / 4)
    assert time_of(call._replace(num_ranks=1), by_name).start_us == pytest.approx(shared / 4)


SETUP = Setup("normal", 8, 256, 500, 64, 8, 3, 0, sweep_tokens=True)


def reports(line: Line) -> list[RankReport]:
    """What eight ranks report of calls that take as long as a line says; rank 5 is the last one."""
    timings: list[tuple[Label, float]] = []
    for tokens in TOKENS:
        rows = rows_of("normal", "dispatch", 8, tokens, SETUP.topk, SETUP.experts)
        us = line.us(rows * SETUP.row_bytes)
        calls = ("cached_dispatch", "combine")
        timings += [(Label(case, "window", tokens, 0, sweep="tokens"), us) for case in calls]
        if tokens == 1:
            timings.append((Label("dispatch", "window", 1, 0, sweep="tokens"), us + 40))
    timings.append((Label("copy", "bf16", 256, 0, sweep="tokens"), 1.0))
    return [
        RankReport(
            [Timing(label, [(0.0, us * 1e-6 * (1 if rank == 5 else 0.5))] * 3) for label, us in timings],
            "",
            "",
        )
        for rank in range(8)
    ]


def test_rates_of_sms() -> None:
    """Those with few SMs count; with enough of them something else decides."""
    line = Line(10.0, 100.0)
    by_sms = [(sms, Point(1000, 10.0 + 1000 / min(5.0 * sms, 100.0))) for sms in (4, 8, 16, 24, 32)]
    assert gbs_per_sm(by_sms, line, 1000) == pytest.approx(5.0)
    assert alone(line, 2) == Line(5.0, 200.0)


def test_the_file_can_be_read(tmp_path: Path) -> None:
    entries, _ = _entries("normal", SETUP, measured_of("normal", SETUP, reports(Line(400.0, 1.0))), places=2)
    file = tmp_path / "mine.toml"
    file.write_text(file_text('my "machine" \\ é', {"normal": entries}))
    machine = find_machine(str(file))
    assert machine.names == ('my "machine" \\ é',)
    assert machine.constants("anyep", "normal")["dispatch_start_us"] == pytest.approx(100.0, rel=1e-3)


# The command


@pytest.mark.slow
def test_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    finished = anyep(
        *("calibrate", "--ranks", "2", "--tokens", "16", "--hidden", "512", "--repeats", "3"),
        *("--output", str(file), "--name", "my machine"),
    )
    assert finished.returncode == 0, finished.stderr
    assert f"wrote {file}, after" in finished.stderr
    for call in ("normal dispatch", "normal combine", "low-latency dispatch", "low-latency combine"):
        assert f"{call}: " in finished.stdout
    content = tomllib.loads(file.read_text())
    assert content["names"] == ["my machine"]
    for mode in ("normal", "ll"):
        table = content["anyep"][mode]
        assert all(entry["value"] > 0 and entry["source"] for entry in table.values())
        assert {"dispatch_start_us", "dispatch_nvlink_gbs", "combine_start_us", "places"} <= table.keys()
    finished = anyep("plan", "--machine", str(file), "--ranks", "2,4", "--low-latency-tokens", "16", "--json")
    records = json.loads(finished.stdout)
    assert [record["library"] for record in records] == ["anyep"] * 8
    assert {record["bound"] for record in records} <= {"start", "memory"}
    assert all(record["predicted_us"] and record["enough_sms"] is None for record in records)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--output", "mine.txt"), "--output is 'mine.txt': the name of a machine's file must end in .toml"),
        (("--output", "no/mine.toml"), "there is no folder 'no' to write the machine to"),
        (("--repeats", "1"), "--repeats is 1: it must be at least 3"),
        (("--ranks", "1"), "--ranks is 1: it must be at least 2"),
        (("--tokens", "4"), "--tokens is 4: it must be at least 16"),
        (("--device", "tpu"), "--device is 'tpu'"),
        (("--hidden", "100"), "hidden"),
        (("--name", " "), "--name is empty"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    finished = anyep("calibrate", *arguments, cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert said in finished.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")
def test_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu.toml"
    finished = anyep("calibrate", "--device", "cuda", "--tokens", "1024", "--output", str(file))
    assert finished.returncode == 0, finished.stderr
    table = tomllib.loads(file.read_text())["anyep"]["normal"]
    assert {"dispatch_gbs_per_sm", "combine_gbs_per_sm", "places"} <= table.keys()
    assert "without_sms" not in table
    assert anyep("plan", "--machine", str(file), "--ranks", "2").returncode == 0
