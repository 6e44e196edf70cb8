"""`anyep selftest`: its reference beside that of the tests, failures, the report, the command."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyep import InvalidCall, PeerLost, WaitTimeout
from anyep.cli.doctor import Finding
from anyep.cli.gpus import ON_THE_CPU, Placement
from anyep.cli.nodes import ONE_NODE, Nodes
from anyep.cli.ranks import Rank
from anyep.cli.selftest import command, low_latency, normal, plan, reference
from anyep.cli.selftest.job import Job, job_of
from anyep.cli.selftest.killing import StoreAddress, Trial, lose_a_rank
from anyep.cli.selftest.on_rank import RankOfTest
from anyep.cli.selftest.plan import LowLatencyCase, NormalCase, Plan
from anyep.cli.selftest.reference import WrongResult
from anyep.cli.selftest.report import Check, Host, Report, Timing, advice_about, private_names
from anyep.launch.forked import StoreFile
from tests.support import low_latency_oracle, oracle
from tests.support.commands import anyep, descendants_of
from tests.support.depth import examples
from tests.support.places import Place
from tests.support.programs import run_program
from tests.support.world import RankContext, get_world, start_server

ROUTINGS = ("uniform", "one rank", "none", "some missing")


# The reference


@given(
    st.integers(1, 5),
    st.integers(0, 12),
    st.sampled_from(ROUTINGS),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
@examples(15, deep=200)
def test_normal_reference(
    num_ranks: int, tokens: int, routing: Any, topk: int, has_scales: bool, data: st.DataObject
) -> None:
    """The references of the command and of the tests were written independently, and agree bit for bit."""
    per_node = data.draw(st.sampled_from([size for size in (1, 2, num_ranks) if num_ranks % size == 0]))
    num_biases = data.draw(st.integers(0, 2))
    dtype = data.draw(st.sampled_from(list(normal.DTYPES)))
    case = NormalCase("", tokens, 128, dtype, topk, routing, has_scales, idles=data.draw(st.booleans()))
    inputs = normal.inputs_of(case, num_ranks, seed=tokens)
    experts = normal.LOCAL_EXPERTS * num_ranks
    theirs = [
        oracle.RankInput(
            one.x,
            oracle.layout(one.topk_idx, experts, num_ranks)[2],
            one.scales,
            one.topk_idx,
            one.topk_weights,
        )
        for one in inputs
    ]
    output_dtype = inputs[0].x.dtype if inputs[0].x.element_size() > 1 else torch.bfloat16
    outputs = []
    for rank in range(num_ranks):
        ours, right = reference.received(inputs, rank, experts), oracle.dispatch(theirs, rank, experts)
        assert torch.equal(
            reference.in_rank(inputs[rank].topk_idx, experts, num_ranks), theirs[rank].is_token_in_rank
        )
        for name in ("x", "topk_idx", "topk_weights", "scales"):
            mine, other = getattr(ours, name), getattr(right, name)
            assert (mine is None) == (other is None)
            assert mine is None or oracle.same_bits(mine, other)
        outputs.append(reference.output_of(rank, ours.x, output_dtype))
    for rank, one in enumerate(inputs):
        generator = torch.Generator().manual_seed(rank)
        biases = tuple(
            torch.randn(one.x.shape, generator=generator).to(output_dtype) for _ in range(num_biases)
        )
        masks = [other.is_token_in_rank for other in theirs]
        right = oracle.combine(outputs, masks, rank, biases, per_node)
        assert oracle.same_bits(reference.combined(one, experts, num_ranks, per_node, biases), right)


@pytest.mark.parametrize("travel", ["bf16", "fp8", "fp8 ue8m0"])
def test_low_latency_reference(travel: Any) -> None:
    inputs = low_latency.inputs_of(LowLatencyCase("", 6, travel, topk=3), 2, seed=1)
    experts = 2 * low_latency.LOCAL_EXPERTS
    theirs = [low_latency_oracle.RankInput(one.x, one.topk_idx, one.topk_weights) for one in inputs]
    sources = [low_latency_oracle.rows_of_expert(theirs, expert) for expert in range(experts)]
    outputs = []
    for expert, right in enumerate(sources):
        chosen = reference.rows_of_expert(inputs, expert)
        rows = torch.cat([one.x[index] for one, index in zip(inputs, chosen, strict=True)])
        assert torch.cat(chosen).tolist() == right.source_token.tolist()
        assert oracle.same_bits(rows, right.x)
        data, scales, numbers = reference.travelled(rows, travel)
        outputs.append(reference.output_of(expert, numbers, torch.bfloat16))
        if travel == "bf16":
            assert scales is None
            assert oracle.same_bits(data, rows)
            continue
        right_data, right_scales = low_latency_oracle.fp8(rows, travel == "fp8 ue8m0")
        if travel == "fp8 ue8m0":
            right_scales = low_latency_oracle.ue8m0(right_scales)
        assert scales is not None
        assert oracle.same_bits(data, right_data)
        assert oracle.same_bits(scales, right_scales)
    for rank, one in enumerate(theirs):
        right_sums = low_latency_oracle.combine(one, rank, outputs, sources)
        assert oracle.same_bits(reference.combined_by_choice(inputs[rank], experts, travel), right_sums)


def test_a_difference_in_words() -> None:
    right = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    reference.same("the rows", right.clone(), right)
    with pytest.raises(
        WrongResult, match=r"the rows differs .* in 1 of 4 entries, first at \[1, 0\]: 5.0 instead"
    ):
        reference.same("the rows", torch.tensor([[1.0, 2.0], [5.0, 4.0]]), right)
    with pytest.raises(WrongResult, match=r"is torch.float64 \[2, 2\], and should be torch.float32 \[2, 2\]"):
        reference.same("the rows", right.double(), right)
    with pytest.raises(WrongResult, match="differs"):
        reference.same("zeros", torch.tensor([-0.0]), torch.tensor([0.0]))


def test_cases_have_names_of_their_own() -> None:
    for device in ("cpu", "cuda"):
        for quick in (False, True):
            cases = Plan(quick, 0).normal_cases(device)
            assert len({case.name for case in cases}) == len(cases)
            assert any(case.uses_rings for case in cases)
            assert (device == "cuda") == any(case.how == "graph" for case in cases)


# What ranks do


def go_through(context: RankContext, wrong: str) -> list[Any]:
    """Three cases on one Buffer; rank 1 is wrong in the second one."""
    reported: list[Any] = []
    rank = Rank(context.rank, context.num_ranks, context.group, reported.append)
    of_test = RankOfTest(rank, Plan(True, 3))
    place = plan.Place("cpu", Nodes(1, context.num_ranks))
    made = []

    def new_buffer() -> Any:
        made.append(of_test._normal_buffer(place, uses_rings=False))
        return made[-1]

    def run(buffer: Any, case: NormalCase) -> None:
        if case.name == "second" and context.rank == 1:
            if wrong == "before":
                raise RuntimeError("something else")
            normal.run_case(buffer, replace(case, hidden=128), place, 3)
            raise WrongResult("the rows differ")
        normal.run_case(buffer, case, place, 3)

    cases = [NormalCase(name, 5, 128) for name in ("first", "second", "third")]
    of_test._go_through("normal mode", place, cases, new_buffer, run, None)
    assert len(made) == 2
    assert all(buffer.runtime is None for buffer in made)
    return [check for check in reported if isinstance(check, Check)]


@pytest.mark.parametrize("wrong", ["before", "afterwards"])
def test_a_failed_case(wrong: str) -> None:
    """All ranks report the same: the reason of the rank that failed. The next case has a new Buffer."""
    by_rank = get_world(2).run(go_through, wrong)
    assert [(check.name, check.state) for check in by_rank[0]] == [
        ("first", "passed"),
        ("second", "failed"),
        ("third", "passed"),
    ]
    reason = by_rank[0][1].reason
    expected = (
        "rank 1: RuntimeError: something else (2 of 2"
        if wrong == "before"
        else "rank 1: WrongResult: the rows"
    )
    assert reason.startswith(expected)
    assert [replace(check, seconds=0) for check in by_rank[0]] == [
        replace(check, seconds=0) for check in by_rank[1]
    ]


def lose(trial: Trial, placement: Placement = ON_THE_CPU) -> dict[int, str]:
    with StoreFile() as place:
        store_at = StoreAddress(file=place.path)
        outcomes = lose_a_rank(trial, range(trial.num_ranks), store_at, placement, lambda text: [text])
    return {rank: outcome.problem for rank, outcome in outcomes.items()}


@pytest.mark.parametrize("mode", ["normal mode", "low-latency mode"])
def test_a_rank_is_killed(mode: str) -> None:
    # The servers that stay: the one that ranks are forked from, and one that Python starts with it.
    start_server()
    before = set(descendants_of(os.getpid()))
    assert lose(Trial(mode, "cpu", 3)) == {0: "", 1: ""}
    assert set(descendants_of(os.getpid())) == before


def test_a_rank_of_a_virtual_node_is_killed() -> None:
    trial = Trial("low-latency mode", "cpu", 4, {"ranks_per_node": 2, "network": "loopback"})
    assert lose(trial) == {0: "", 1: "", 2: ""}


@pytest.mark.parametrize(
    ("nodes", "device", "hosts", "modes"),
    [
        (ONE_NODE, "cpu", 1, 2),
        (ONE_NODE, "cpu", 2, 1),
        (Nodes(2, 2), "cpu", 1, 2),
        (Nodes(2, 2, network="loopback"), "cpu", 1, 2),
        (Nodes(2, 2, network="nixl"), "cpu", 1, 1),
        (Nodes(2, 2), "cuda", 1, 1),
    ],
)
def test_where_low_latency_mode_loses_a_rank(nodes: Nodes, device: str, hosts: int, modes: int) -> None:
    trials = command._trials(Plan(True, 0, nodes), device, 4, hosts)
    assert [trial.mode for trial in trials] == ["normal mode", "low-latency mode"][:modes]
    assert all(trial.place == nodes.place for trial in trials)


def test_ranks_that_cannot_start() -> None:
    problems = lose(Trial("normal mode", "cpu", 2, {"ranks_per_node": 3}))
    assert set(problems) == {0, 1}
    assert all("rank 0: InvalidCall: " in problem for problem in problems.values())


# The job


def test_jobs() -> None:
    assert job_of({}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert job_of(torchrun) == Job(3, 8, 1, "a", "1")
    slurm = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    with pytest.raises(InvalidCall, match="MASTER_ADDR is not set"):
        job_of(slurm)
    assert job_of({**slurm, "MASTER_ADDR": "b"}) == Job(9, 16, 1, "b", "29500")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "x"}, "RANK is 'x': it must be a whole number"),
        ({"RANK": "-1"}, "RANK is -1: it must be at least 0"),
        ({"RANK": "8"}, "RANK is 8 and WORLD_SIZE is 8: ranks count from 0"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is '': it must be a whole number"),
        ({"MASTER_PORT": "a"}, "MASTER_PORT is 'a': it must be a whole number"),
        (
            {"MASTER_ADDR": ""},
            "WORLD_SIZE says that this is a rank of a job, but MASTER_ADDR is not set: unset",
        ),
    ],
)
def test_variables_that_are_no_job(variables: dict[str, str], said: str) -> None:
    job = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(InvalidCall, match=said):
        job_of(job | variables)


def test_a_job_that_cannot_be_joined() -> None:
    """Another program listens at the job's port."""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = str(other.getsockname()[1])
        finished = anyep(
            "selftest",
            env={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
    assert (finished.returncode, finished.stdout) == (1, "")
    last = finished.stderr.splitlines()[-1]
    assert f"anyep: rank 0 of 1 cannot join the others at 127.0.0.1:{port} (" in last
    assert "Traceback" not in finished.stderr


# The report


def test_nothing_private_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7.example.com")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    said = "rank 1 on gpu7 (10.1.2.3) of ann: /home/ann/x on gpu7.example.com, driver 10.1.2.33, annex"
    report = Report("1.0", {}, {"ANYEP_CACHE_DIR": "/home/ann/.cache"})
    report.hosts.append(Host([0, 1], [Finding("python", "ok", said)], private_names(2)))
    report.checks.append(Check("normal mode", "all", "cpu", "failed", said))
    text = json.dumps(report.as_json(with_names=False))
    for name in ("gpu7", "10.1.2.3 ", "10.1.2.3)", " ann:", "/home", "example"):
        assert name not in text
    assert "rank 1 on host2 (address) of user: ~/x on host2, driver 10.1.2.33, annex" in text
    assert "~/.cache" in text
    assert "gpu7.example.com" in json.dumps(report.as_json(with_names=True))


def test_what_counts_as_a_failure() -> None:
    report = Report("1.0", {}, {})
    assert report.is_ok
    report.checks.append(Check("a", "b", "c", "skipped", "no GPU"))
    report.hosts.append(Host([0], [Finding("gpu", "note", "none")]))
    assert report.is_ok
    report.hosts.append(Host([1], [Finding("torch", "missing", "not installed")]))
    assert not report.is_ok
    report.hosts.pop()
    report.checks.append(Check("a", "b", "c", "failed", "wrong"))
    assert not report.is_ok


def test_advice() -> None:
    assert "dmesg" in advice_about(PeerLost("gone"))
    assert "idle machine" in advice_about(WaitTimeout("late"))
    assert "send this report" in advice_about(WrongResult("wrong"))


def test_rates() -> None:
    assert Timing("dispatch", "cpu", 1, 1, 0.001, 2_000_000).gbps == pytest.approx(2.0)


# The command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "tpu"), "--device is 'tpu'"),
        (("--network", "nixl"), "--network is for several nodes"),
        (("--network", "tcp", "--nodes", "2"), "--network is 'tcp'"),
        (("--ranks", "0"), "--ranks is 0"),
        (("--json", "/no/such/folder/file"), "there is no folder"),
        (("--json", "/tmp"), "the report cannot be written to '/tmp', a folder"),
        (("--json", ""), "the report cannot be written to '.', a folder"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], said: str) -> None:
    finished = anyep("selftest", *arguments)
    assert finished.returncode == 2
    assert said in finished.stderr


def test_ranks_of_a_launcher_cannot_be_counted() -> None:
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    finished = anyep("selftest", "--ranks", "2", env=variables)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "leave it out under a launcher" in finished.stderr


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    finished = anyep("selftest", "--quick", "--device", "cpu", "--ranks", "2", "--json", str(file))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "works here" in finished.stdout
    record = json.loads(file.read_text())
    assert record["ok"]
    assert {check["state"] for check in record["checks"]} == {"passed"}
    assert {check["group"] for check in record["checks"]} == {
        "normal mode",
        "low-latency mode",
        "a rank is killed",
    }
    assert record["hosts"][0]["ranks"] == [0, 1]
    assert {finding["name"] for finding in record["hosts"][0]["findings"]} >= {
        "torch",
        "packages",
        "rdma",
        "memfd",
    }
    assert all(timing["median_s"] > 0 for timing in record["timings"])
    names = [socket.gethostname()] if len(socket.gethostname()) > 2 else []
    assert not any(name in file.read_text() for name in names if name != "localhost")


def test_one_rank(tmp_path: Path) -> None:
    """What cannot be checked is in the report."""
    file = tmp_path / "report.json"
    finished = anyep("selftest", "--quick", "--device", "cpu", "--ranks", "1", "--json", str(file))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    checks = json.loads(file.read_text())["checks"]
    assert {check["place"] for check in checks} == {"cpu, 1 rank"}
    skipped = [(check["group"], check["reason"]) for check in checks if check["state"] != "passed"]
    assert skipped == [("a rank is killed", "no other rank would notice it")]


@pytest.mark.slow
@pytest.mark.parametrize("launched", [False, True])
def test_the_whole_command(tmp_path: Path, launched: bool) -> None:
    """On one node, on virtual nodes, by way of NIXL; alone, and as ranks of a job."""
    file = tmp_path / "report.json"
    start = ("run", "-n", "4", "-m", "anyep") if launched else ()
    finished = run_program("-m", "anyep", *start, "selftest", "--json", str(file), timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    record = json.loads(file.read_text())
    places = {check["place"] for check in record["checks"] if check["state"] == "passed"}
    assert {"cpu, 4 ranks", "cpu, 2 virtual nodes of 2 ranks, loopback"} <= places


def start_as_rank(context: RankContext, file: str) -> tuple[int, str]:
    """Run the command as a rank of a job, on the host of this rank."""
    variables = {
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.num_ranks),
        "LOCAL_RANK": str(context.rank % 2),
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
    }
    finished = subprocess.run(
        [sys.executable, "-m", "anyep", "selftest", "--quick", "--json", file],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, **variables},
    )
    return finished.returncode, finished.stdout + finished.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_between_hosts(tmp_path: Path) -> None:
    """Rows go through NIXL, a rank on the other host is killed, and both hosts are examined."""
    file = tmp_path / "report.json"
    place = Place("cpu", 4, num_nodes=2, hosts=True)
    with place.new_world() as world:
        ended = world.run(start_as_rank, str(file), timeout=220)
    assert [code for code, _ in ended] == [0] * 4, ended
    text = file.read_text()
    record = json.loads(text)
    assert [host["ranks"] for host in record["hosts"]] == [[0, 1], [2, 3]]
    assert {check["place"] for check in record["checks"]} == {"cpu, 2 nodes of 2 ranks", "cpu, 4 ranks"}
    assert {check["state"] for check in record["checks"]} == {"passed"}
    assert "10.77.0" not in text
    assert "anyep-host" not in text
