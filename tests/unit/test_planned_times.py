"""The planner's model of time: what holds for all machines, and how near published figures it is."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep.errors import InvalidCall
from anyep.planning.counts import count_choices
from anyep.planning.expectation import Reach, largest
from anyep.planning.machines import Machine, all_machines, find_machine
from anyep.planning.times import Call, constant, slowest_of, time_of
from anyep.planning.validation import figures_of, shipped_figures, summary
from anyep.topology import Topology
from tests.support.commands import anyep
from tests.support.programs import ROOT

FIGURES = ROOT / "anyep" / "machines" / "figures"


# Expectations


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_reach_is_the_mean_of_counts(nodes: int) -> None:
    topology = Topology(4 * nodes, 4)
    rng = np.random.default_rng(1)
    tokens, experts, topk = 500, 64, 4
    routing = rng.random((topology.num_ranks, tokens, experts)).argpartition(topk, axis=-1)[..., :topk]
    counts = count_choices(routing, topology, experts)
    reach = Reach(topology.num_ranks, nodes, experts, topk)
    assert counts.to_ranks.sum(axis=1).mean() / tokens == pytest.approx(reach.ranks, rel=0.02)
    assert counts.crossing().sum(axis=1).mean() / tokens == pytest.approx(reach.other_nodes, rel=0.03)


def test_a_limited_gate_reaches_no_more_nodes_than_it_may() -> None:
    assert Reach(64, 8, 256, 8, 4).nodes == pytest.approx(Reach(32, 4, 128, 8).nodes)
    assert Reach(64, 8, 256, 8, 1).nodes == pytest.approx(1)
    assert Reach(16, 2, 256, 8, 4).nodes == Reach(16, 2, 256, 8).nodes


def test_the_most_loaded_rank() -> None:
    drawn = np.random.default_rng(2).poisson(1000, (4000, 64)).max(axis=1).mean()
    assert largest(1000, 64) == pytest.approx(drawn, rel=0.005)


# The model


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=4), st.floats(1, 8))
def test_the_slowest_part_decides(times: list[float], softness: float) -> None:
    assert max(times) * (1 - 1e-9) <= slowest_of(times, softness) <= sum(times) * (1 + 1e-9)


def call_of(**changes: object) -> Call:
    call = Call("normal", "dispatch", 2, 16, 4096, 7392, 8, 256)
    return call._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("machine", all_machines(), ids=lambda machine: machine.file)
def test_machines(machine) -> None:  # type: ignore[no-untyped-def]
    """Each constant has a value and a source; calls with more to do take longer."""
    for library, modes in machine.tables.items():
        for mode, table in modes.items():
            for name, entry in table.items():
                assert 0 < entry.low <= entry.value <= entry.high, name
                assert len(entry.source) > 10
            constants = machine.constants(library, mode)
            for what in ("dispatch", "combine"):
                times = [
                    time_of(call_of(mode=mode, what=what, num_tokens=tokens), constants).total_us
                    for tokens in (0, 1, 16, 128, 1024, 8192)
                ]
                assert times == sorted(times)
                assert times[0] == time_of(call_of(mode=mode, what=what, num_tokens=0), constants).start_us
                longer = call_of(mode=mode, what=what, num_nodes=4, num_ranks=32)
                assert time_of(longer, constants).total_us > times[3]


@pytest.mark.parametrize("machine", all_machines(), ids=lambda machine: machine.file)
def test_constants_are_what_their_sources_say(machine: Machine) -> None:
    """Where a source names another file, the value is the one there. What is "fitted" has figures that were
    used for it, and fitted rates of relays are not copies of those on one node."""
    for library, modes in machine.tables.items():
        for mode, table in modes.items():
            used = {
                figure.call.num_nodes
                for figure in shipped_figures()
                if figure.library == library and figure.call.mode == mode and figure.record()["calibrated"]
                if figure.machine in machine.names
            }
            for name, entry in table.items():
                named = [other for other in all_machines() if re.search(rf"\b{other.file}", entry.source)]
                if named:
                    assert entry.value in values_of(name, mode, named), (library, mode, name)
                if entry.source.startswith("fitted"):
                    needed = 2 if re.search("relay|notify|hop|network|message", name) else 1
                    assert max(used, default=0) >= needed, (library, mode, name)
                    assert "relay" not in name or entry.value != table[name.replace("_relay", "")].value


def values_of(name: str, mode: str, machines: list[Machine]) -> list[float]:
    """What the tables of some machines have for a constant."""
    tables = [modes[mode] for machine in machines for modes in machine.tables.values() if mode in modes]
    return [table[name].value for table in tables if name in table]


def test_fewer_sms_take_longer() -> None:
    constants = find_machine("h100_sxm").constants("deepep-v1", "normal")
    few, many = (time_of(call_of(num_sms=sms), constants) for sms in (4, 24))
    assert few.sms_us == pytest.approx(6 * many.sms_us)
    assert few.bound == "SMs"
    assert few.total_us > 3 * many.total_us


def test_no_machine_and_no_constant() -> None:
    with pytest.raises(InvalidCall, match=r"no machine 'H1000' in anyep/machines: choose one of .*H800 CX7"):
        find_machine("H1000")
    with pytest.raises(InvalidCall, match="no constant 'network_gbs': add it"):
        constant({}, "network_gbs")


# Validation


def test_errors_of_held_out_figures() -> None:
    """The promise of the page, with a margin for new figures."""
    records = [figure.record() for figure in shipped_figures()]
    held_out = summary(record for record in records if not record["calibrated"])
    assert held_out["figures"] > 500
    assert held_out["median"] < 0.10
    assert held_out["within_25"] > 0.95
    for record in records:
        if record["nodes"] >= 4:
            assert not record["calibrated"], record
            assert abs(record["error"]) < 0.15, record


def test_published_rates_become_times() -> None:
    """Two rows by hand: logical rates between nodes count tokens for each node, the own one included."""
    by_key = {
        (figure.machine, figure.call.mode, figure.call.num_nodes, figure.call.what): figure.published_us
        for figure in figures_of(FIGURES / "published.csv")
    }
    nodes = 2 * (1 - math.comb(128, 8) / math.comb(256, 8))
    expected_us = 4096 * nodes * 7392 / 43e3
    assert by_key["H800 CX7", "normal", 2, "dispatch"] == pytest.approx(expected_us)
    assert by_key["H100", "ll", 2, "combine"] == pytest.approx(128 * 8 * 14336 / 73e3)


def test_json_of_a_file(tmp_path: Path) -> None:
    """Notify is added, and a call of one line gives two records."""
    rows = list(csv.DictReader((FIGURES / "deepep_v1_measured.csv").open()))
    row = next(row for row in rows if row["nodes"] == "2" and row["sms"] == "24" and row["tokens"] == "4096")
    file = tmp_path / "one.csv"
    file.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    finished = anyep("plan", "--validate", str(file), "--json", "-")
    assert (finished.returncode, finished.stderr) == (0, "")
    records = json.loads(finished.stdout)
    assert [record["what"] for record in records] == ["dispatch", "combine"]
    wanted = {"source", "machine", "mode", "nodes", "ranks", "tokens", "what"}
    for record in records:
        assert record.keys() >= wanted | {"published_us", "predicted_us", "error", "calibrated"}
        us = float(row[f"{record['what']}_us"]) + float(row[f"{record['what']}_notify_us"])
        assert record["published_us"] == pytest.approx(us, abs=0.1)
        assert record["error"] == pytest.approx(record["predicted_us"] / us - 1, abs=1e-3)
        assert (record["machine"], record["ranks"], record["calibrated"]) == ("h100_sxm", 16, False)


HEADER = "system,nodes,mode,tokens,hidden,topk,experts,sms,dispatch_us,dispatch_notify_us,combine_us"
HEADER += ",combine_notify_us,source"
PUBLISHED, PUBLISHED_LINE = (FIGURES / "published.csv").read_text().splitlines()[:3:2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "lacks the columns combine_notify_us, "),
        (
            f"{HEADER}\nh100_sxm,1,fast,1,7168,8,256,4,1,0,1,0,x\n",
            "line 2 .*mode is 'fast', not normal or ll",
        ),
        (f"{HEADER}\nh100_sxm,1,ll,1,7168,8,4,4,1,0,1,0,x\n", "8 ranks, 1 nodes, 4 experts and top-8 do not"),
        (f"{HEADER}\nZX81,1,ll,1,7168,8,256,4,1,0,1,0,x\n", "there is no machine 'ZX81'"),
        (f"{HEADER}\nh100_sxm,1,ll,1,7168,8,256,4,-1,0,1,0,x\n", "dispatch_us is '-1', not a number above 0"),
        (
            f"{HEADER}\nh100_sxm,1,ll,1,7168,8,256,4,1,-1,1,0,x\n",
            "dispatch_notify_us is '-1', not a number of",
        ),
        (
            f"{HEADER}\nh100_sxm,1,normal,1,7168,8,256,0,1,0,1,0,x\n",
            "line 2 .*sms is 0: it must be at least 1",
        ),
        (f"{HEADER}\nh100_sxm,1,normal,1,7168,8,256,-2,1,0,1,0,x\n", "sms is -2: it must be at least 1"),
        (
            f"{HEADER}\n\nh100_sxm,1,normal,1.5,7168,8,256,4,1,0,1,0,x\n",
            "line 3 .*tokens is '1.5', not a whole",
        ),
        (f"{HEADER}\nh100_sxm,1,ll,1,,8,256,4,1\n", "line 2 .*hidden is '', not a whole number"),
        (f"{HEADER}\n{'x' * 200_000}\n", "line 2 of .* cannot be read as CSV"),
        (f"{HEADER}\n", "has no figures: add lines"),
        (f"{PUBLISHED}\n{PUBLISHED_LINE.replace('43', '0')}\n", "dispatch_gbs is '0', not a number above 0"),
        (
            f"{PUBLISHED}\n{PUBLISHED_LINE.replace('fp8', 'fp9')}\n",
            "dispatch_dtype is 'fp9', not fp8 or bf16",
        ),
        (f"{PUBLISHED}\n{PUBLISHED_LINE.replace('rdma', 'rmda')}\n", "basis is 'rmda logical', not one of"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "figures.csv"
    file.write_text(text)
    with pytest.raises(InvalidCall, match=said):
        figures_of(file)


def test_files_without_validate_are_refused() -> None:
    finished = anyep("plan", "figures.csv")
    assert finished.returncode == 2
    assert "only with --validate" in finished.stderr
    assert anyep("plan", "--validate", "no-such-file.csv").returncode == 2


@pytest.mark.parametrize("option", [("--ranks", "8"), ("--map", "x.svg"), ("--memory", "80GiB")])
def test_options_that_validate_would_pass_over(option: tuple[str, str]) -> None:
    finished = anyep("plan", "--validate", *option)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert f"{option[0]} has no effect with --validate" in finished.stderr


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidCall, match=r"\(Is a directory\): name a file with the columns of"):
        figures_of(tmp_path)
    file = tmp_path / "figures.csv"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidCall, match=r"\(it is no text in UTF-8\)"):
        figures_of(file)


def test_the_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location(
        "planning_accuracy", ROOT / "tools" / "planning_accuracy.py"
    )
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = tool.PAGE.read_text()
    assert page == tool.page_with(tool.tables(), page), "run python tools/planning_accuracy.py"
