"""`anyep bench --device cuda` without a GPU: its cases on a simulated one, and what it makes of times."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep.cli.bench.measure import measure_on_rank
from anyep.cli.bench.plot import draw
from anyep.cli.bench.records import (
    Label,
    RankReport,
    Report,
    Setup,
    Timing,
    description_of,
    fewest_sms,
    records_of,
)
from anyep.cli.bench.table import print_report
from anyep.cli.nodes import Nodes
from anyep.cli.ranks import Rank
from anyep.errors import NotSupported
from tests.support.bench_stand_ins import stand_ins
from tests.support.places import Place
from tests.support.world import RankContext

NORMAL = Setup("normal", 2, 64, 256, 8, 2, 2, 0, "cuda", 16, True)
MEGABYTE = 10**6
NORMAL_PATHS = (
    *(("copy", path) for path in ("bf16", "fp8")),
    *(("layout", path) for path in ("local", "local, graph")),
    *(("dispatch", path) for path in ("window", "window, worst, graph", "ring")),
    *(
        ("cached_dispatch", path)
        for path in ("window", "window, graph", "window, fp8", "window, fp8, graph", "ring")
    ),
    *(("combine", path) for path in ("window", "window, graph", "staged", "staged, graph", "ring")),
)
PATHS_ON_HOST = (
    *(("copy", path) for path in ("bf16, host", "fp8, host")),
    *(("layout", path) for path in ("local", "local, graph")),
    *(("dispatch", path) for path in ("ring", "ring, worst, graph")),
    *(("cached_dispatch", path) for path in ("ring", "ring, graph", "ring, fp8", "ring, fp8, graph")),
    *(("combine", path) for path in ("ring", "ring, graph", "staged", "staged, graph")),
)
"""Those of heaps in memory of the host."""
LOW_LATENCY_PATHS = (
    *(("copy", path) for path in ("fp8", "bf16")),
    *(("dispatch", path) for path in ("fp8, graph", "fp8, singly")),
    *(("combine", path) for path in ("bf16, graph", "bf16, singly")),
    *(("pair", path) for path in ("fp8 + bf16, graph", "fp8 + bf16, singly")),
)
NORMAL_SWEPT = (("copy", "bf16"), ("cached_dispatch", "window, graph"), ("combine", "window, graph"))
LOW_LATENCY_SWEPT = (
    *(("copy", path) for path in ("fp8", "bf16")),
    ("dispatch", "fp8, graph"),
    ("combine", "bf16, graph"),
)
SMS = (4, 8)
"""Of the sweep, on a stand-in with 8 SMs per rank."""
RATES = {4: 205.0, 8: 392.0, 16: 701.0, 24: 912.0, 32: 1004.0}


def a_run(*timings: tuple[Label, list[float]], slower: float = 1.5) -> list[RankReport]:
    """Two ranks; the second takes longer, and gets three times as much."""

    def on_rank(times: int, factor: float) -> RankReport:
        return RankReport(
            [
                Timing(
                    replace(label, num_bytes=times * label.num_bytes),
                    [(0.0, factor * second) for second in seconds],
                )
                for label, seconds in timings
            ],
            " on a stand-in",
            "medians",
            "Stand-in",
        )

    return [on_rank(1, 1.0), on_rank(3, slower)]


def the_normal_run() -> list[RankReport]:
    case = Label("combine", "window, graph", 64, MEGABYTE, 16, ("bf16",), ("nccl",))
    swept = [
        (replace(case, sms=sms, rivals=(), sweep="sms"), [2 * MEGABYTE / rate / 1e9] * 2)
        for sms, rate in RATES.items()
    ]
    return a_run(
        (Label("copy", "bf16", 64, MEGABYTE), [1e-3, 1e-3]),
        (Label("layout", "local", 64, 0, 16), [1e-5, 1e-5]),
        (case, [1e-3, 3e-3]),
        (replace(case, path="nccl", rivals=(), is_listed=False), [8e-3, 8e-3]),
        (replace(case, path="ring", rivals=("nccl",)), [4e-3, 4e-3]),
        *swept,
        *over_tokens(case, in_copies=2e-3),
        slower=1.0,
    )


def over_tokens(call: Label, in_copies: float) -> list[tuple[Label, list[float]]]:
    """Two points of a sweep: a copy takes 1e-3 s, the call its time in such copies."""
    return [
        (replace(label, tokens=tokens, rivals=(), sweep="tokens"), [seconds, seconds])
        for tokens in (1, 64)
        for label, seconds in (
            (Label("copy", "bf16", 0, MEGABYTE), 1e-3),
            (replace(call, bounds=("bf16",)), in_copies),
        )
    ]


def test_the_slowest_rank_counts() -> None:
    label = Label("copy", "bf16", 64, MEGABYTE)
    record = records_of(NORMAL, a_run((label, [1e-3, 2e-3, 10e-3])))[0]
    assert record.median_s == pytest.approx(3e-3)
    assert record.bytes == 2 * MEGABYTE
    assert record.gbps == pytest.approx(2 * MEGABYTE / 3e-3 / 1e9)
    assert record.p99_s is None


def test_comparisons() -> None:
    records = {(record.case, record.path): record for record in records_of(NORMAL, the_normal_run())}
    assert ("combine", "nccl") not in records
    record = records["combine", "ring"]
    assert record.of_copy == pytest.approx(0.25)
    assert record.vs == {"nccl": pytest.approx(2.0)}
    assert (record.device, record.gpu, record.sms) == ("cuda", "Stand-in", 16)
    assert records["layout", "local"].of_copy is None
    assert records["copy", "bf16"].vs == {}


def test_percentiles_in_low_latency_mode() -> None:
    label = Label("dispatch", "fp8, graph", 4, MEGABYTE)
    setup = replace(NORMAL, mode="low-latency", sms=None, sweep_sms=False)
    seconds = [1e-3] * 97 + [9e-3] * 3
    (record,) = records_of(setup, a_run((label, seconds), slower=1.0))
    assert (record.median_s, record.p99_s) == (1e-3, 9e-3)


def test_the_time_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Calls that are launched one by one have one; replays of a graph have none."""
    single, graph = Label("combine", "window", 4, MEGABYTE), Label("combine", "window, graph", 4, MEGABYTE)
    run = a_run((single, [1e-3, 2e-3]), (graph, [1e-3, 1e-3]))
    for report, times in zip(run, ([40e-6, 50e-6], [70e-6, 30e-6]), strict=True):
        report.timings[0].host.extend(times)
    records = records_of(replace(NORMAL, ranks=2), run)
    assert [record.host_s for record in records] == [pytest.approx(60e-6), None]
    print_report(Report("what was measured", records))
    printed = capsys.readouterr().out
    lines = [line.split()[:7] for line in printed.splitlines()]
    assert ["combine", "window", "4", "2.25", "ms", "60.0", "us"] in lines
    assert "host" in printed


def test_the_bounds_of_a_pair_add_up() -> None:
    setup = replace(NORMAL, mode="low-latency", sms=None, sweep_sms=False)
    run = a_run(
        (Label("copy", "fp8", 4, MEGABYTE), [1e-3]),
        (Label("copy", "bf16", 4, 2 * MEGABYTE), [2e-3]),
        (Label("pair", "fp8 + bf16, graph", 4, 3 * MEGABYTE, bounds=("fp8", "bf16")), [6e-3]),
    )
    assert records_of(setup, run)[-1].of_copy == pytest.approx(0.5)


def test_cases_stand_together_and_sweeps_come_last() -> None:
    label = Label("dispatch", "window", 64, MEGABYTE, 16)
    run = a_run(
        (label, [1e-3]),
        (replace(label, case="combine"), [1e-3]),
        (replace(label, path="ring"), [1e-3]),
        (replace(label, tokens=1), [1e-3]),
        *over_tokens(label, in_copies=1e-3),
        (replace(label, sweep="sms"), [1e-3]),
        (Label("copy", "bf16", 1, MEGABYTE, is_listed=False), [1e-3]),
    )
    assert [
        (record.case, record.path, record.tokens, record.swept) for record in records_of(NORMAL, run)
    ] == [
        ("dispatch", "window", 64, None),
        ("dispatch", "ring", 64, None),
        ("combine", "window", 64, None),
        ("dispatch", "window", 1, None),
        ("dispatch", "window", 64, "sms"),
        ("dispatch", "window", 1, "tokens"),
        ("dispatch", "window", 64, "tokens"),
        ("copy", "bf16", 1, "tokens"),
        ("copy", "bf16", 64, "tokens"),
    ]


def test_the_sweep_marks_the_fewest_sms() -> None:
    records = records_of(NORMAL, the_normal_run())
    swept = [record for record in records if record.swept == "sms"]
    assert {record.sms: record.gbps for record in swept} == pytest.approx(RATES)
    assert [record for record in records if record.enough] == [swept[3]]
    assert swept[3].sms == 24


def test_a_sweep_over_tokens_is_compared_with_its_own_copies() -> None:
    """A copy outside the sweep, of as many tokens, was measured at another time."""
    call, copy = Label("combine", "window, graph", 64, MEGABYTE), Label("copy", "bf16", 64, MEGABYTE)
    run = a_run((copy, [9e-3]), *over_tokens(call, in_copies=4e-3), slower=1.0)
    found = {(record.case, record.tokens): record for record in records_of(NORMAL, run) if record.swept}
    assert [found["combine", tokens].of_copy for tokens in (1, 64)] == [pytest.approx(0.25)] * 2
    assert found["copy", 64].gbps == pytest.approx(2.0)


@given(st.integers(1, 10**6))
def test_numbers_of_tokens_of_a_sweep(tokens: int) -> None:
    """From 1 to as many as requested, growing by a factor of at most 4."""
    swept = replace(NORMAL, tokens=tokens, sweep_tokens=True).swept_tokens
    assert (swept[0], swept[-1]) == (1, tokens)
    assert all(fewer < more <= 4 * fewer for fewer, more in pairwise(swept))
    assert replace(NORMAL, tokens=tokens).swept_tokens == ()


def test_records_of_the_cpu_leave_out_what_does_not_apply() -> None:
    call = Label("combine", "window", 64, MEGABYTE)
    run = a_run((call, [1e-3]), (replace(call, sweep="tokens"), [1e-3]))
    ordinary, swept = (record.as_json() for record in records_of(replace(NORMAL, device="cpu"), run))
    assert set(swept) - set(ordinary) == {"swept"}
    assert swept["swept"] == "tokens"


@given(st.dictionaries(st.integers(2, 64), st.floats(1, 1000), min_size=1))
def test_fewest_sms(rates: dict[int, float]) -> None:
    fewest = fewest_sms(rates)
    best = max(rates.values())
    assert rates[fewest] >= 0.8 * best
    assert all(rate < 0.8 * best for sms, rate in rates.items() if sms < fewest)


def a_report(mode: str) -> Report:
    if mode == "normal":
        return Report("what was measured", records_of(NORMAL, the_normal_run()), "something to say")
    setup = replace(NORMAL, mode=mode, sms=None, sweep_sms=False)
    copy = Label("copy", "fp8", 128, 8 * MEGABYTE)
    graph = Label("dispatch", "fp8, graph", 128, 8 * MEGABYTE, bounds=("fp8",))
    singly = replace(graph, path="fp8, singly")
    swept = [
        (replace(label, tokens=tokens, sweep="tokens"), [seconds * tokens**0.5 * 1e-6])
        for tokens in (1, 64, 128)
        for label, seconds in ((copy, 2.0), (graph, 8.0))
    ]
    run = a_run((copy, [20e-6]), (graph, [40.4e-6]), (singly, [200e-6]), *swept, slower=1.0)
    return Report("what was measured", records_of(setup, run))


def test_the_table_of_normal_mode(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(a_report("normal"))
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines() if line]
    assert ["combine", "ring", "64", "4.00", "ms", "0.50", "0.25", "2.0x"] in lines
    assert ["24", "▸", "912", "91%"] in lines
    assert ["32", "1004", "100%"] in lines
    assert ["64", "2.00", "ms", "1.00", "0.50"] in lines
    assert "combine window" in printed
    assert "copy bf16" not in printed
    assert "vs NCCL" in printed
    assert "p99" not in printed
    assert printed.endswith("something to say\n")


def test_the_table_of_low_latency_mode(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(a_report("low-latency"))
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines() if line]
    assert ["dispatch", "fp8,", "graph", "128", "40.4", "us", "40.4", "us", "396", "0.50"] in lines
    assert ["dispatch", "fp8,", "singly", "128", "200", "us", "200", "us", "80.00", "0.10"] in lines
    assert ["64", "64.0", "us", "250", "0.25"] in lines
    assert "dispatch fp8 " in printed
    assert "p50" in printed
    assert "vs" not in printed


@pytest.mark.parametrize(
    ("mode", "ending"),
    [
        ("normal", ".svg"),
        ("low-latency", ".png"),
        pytest.param("normal", ".png", marks=pytest.mark.slow),
        pytest.param("low-latency", ".svg", marks=pytest.mark.slow),
    ],
)
def test_the_picture(tmp_path: Path, mode: str, ending: str) -> None:
    path = tmp_path / f"bench{ending}"
    draw(a_report(mode), path)
    assert path.read_bytes().startswith({".svg": b"<?xml", ".png": b"\x89PNG"}[ending])
    if ending == ".svg":
        drawn = path.read_text()
        assert ("SMs per rank" in drawn) is (mode == "normal")
        for words in ("tokens per rank -->", "median time of a call, us, in graphs", "rate, GB/s per rank"):
            assert words in drawn
        assert drawn.count("<!-- 1: a plain copy -->") == drawn.count("as a multiple of a plain copy") > 0


def test_records_are_those_of_gpus() -> None:
    keys = {"device", "gpu", "sms", "p99_s", "host_s", "swept", "enough"}
    for record in a_report("normal").records:
        assert keys <= set(record.as_json())
        assert "nodes" not in record.as_json()
    assert len(a_report("normal").swept("sms")) == len(RATES)
    assert len(a_report("normal").swept("tokens")) == 4


# On a simulated GPU


def measure_on_simulated(context: RankContext, setup: Setup) -> tuple[RankReport, list[str]]:
    """Every case on a GPU per rank; their results are checked there."""
    doing: list[str] = []
    with stand_ins(context.group):
        report = measure_on_rank(
            Rank(context.rank, context.num_ranks, context.group, doing.append), setup, context.num_ranks
        )
    return report, doing


@pytest.mark.parametrize(
    ("mode", "nodes", "heap"),
    [
        ("normal", Nodes(1, 2), "auto"),
        ("low-latency", Nodes(1, 2), "auto"),
        pytest.param("low-latency", Nodes(2, 1, topk_nodes=1), "auto", marks=pytest.mark.slow),
        pytest.param("normal", Nodes(1, 2), "host", marks=pytest.mark.slow),
        pytest.param("low-latency", Nodes(1, 2), "host", marks=pytest.mark.slow),
        pytest.param("normal", Nodes(2, 1, topk_nodes=1), "auto", marks=pytest.mark.slow),
    ],
)
def test_every_case_on_a_simulated_gpu(mode: str, nodes: Nodes, heap: str) -> None:
    sweeps = mode == "normal"
    is_on_host = heap == "host"
    setup = Setup(mode, 2, 3, 128, 4, 2, 1, 0, "cuda", sms=2 if sweeps else None, sweep_sms=sweeps)
    setup = replace(setup, nodes=nodes, sweep_tokens=True, heap=heap)
    found = Place("simulated", 2).world().run(measure_on_simulated, setup, timeout=250)
    records = records_of(setup, [report for report, _ in found])
    assert {record.median_s for record in records} == {5e-4 if sweeps else 1e-3}
    cases = [(record.case, record.path, record.tokens) for record in records if not record.swept]
    paths = (PATHS_ON_HOST if is_on_host else NORMAL_PATHS) if sweeps else LOW_LATENCY_PATHS
    if nodes.are_several:
        paths = tuple((case, path) for case, path in paths if path != "ring")
        # With one rank per node, a plain all-to-all sends the same rows.
        sent = [record.bytes_between_nodes for record in records if record.case == "combine"]
        plain = [record.all_to_all_bytes_between_nodes for record in records if record.case == "combine"]
        assert not sweeps or None not in sent
        assert sent == plain
    assert cases == [(case, path, tokens) for tokens in (3, 1) for case, path in paths]
    swept = [(record.case, record.path, record.sms) for record in records if record.swept == "sms"]
    calls = ("cached_dispatch", "combine")
    path = "ring, graph" if is_on_host else "window, graph"
    assert swept == ([(case, path, sms) for case in calls for sms in SMS] if sweeps else [])
    over_tokens = [
        (record.case, record.path, record.tokens) for record in records if record.swept == "tokens"
    ]
    swept_on_host = (("copy", "bf16, host"), ("cached_dispatch", path), ("combine", path))
    normal_swept = swept_on_host if is_on_host else NORMAL_SWEPT
    assert over_tokens == [
        (case, path, tokens)
        for case, path in (normal_swept if sweeps else LOW_LATENCY_SWEPT)
        for tokens in (1, 3)
    ]
    assert {record.as_json()["heap"] for record in records} == {heap}
    assert ("heaps in memory of the host" in description_of(setup, found[0][0])) == is_on_host
    assert found[0][1][0].startswith("3 tokens: copy, ")


def measure_where_gpus_are_apart(context: RankContext) -> str:
    from anyep.backends.cuda.gpu import Gpu

    usual = Gpu.why_not_shared
    Gpu.why_not_shared = lambda *_: "they are far apart"  # type: ignore[method-assign]
    try:
        measure_on_simulated(context, replace(NORMAL, sms=2, tokens=3, hidden=128))
    except NotSupported as error:
        return str(error)
    finally:
        Gpu.why_not_shared = usual  # type: ignore[method-assign]
    return "measured"


def test_gpus_that_are_apart() -> None:
    for message in Place("simulated", 2).world().run(measure_where_gpus_are_apart, timeout=100):
        assert "no windows to measure: `anyep bench --device cuda --heap host`" in message
