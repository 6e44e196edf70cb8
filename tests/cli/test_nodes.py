"""The commands that start ranks, across virtual nodes: demo and bench with --nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from anyep import connection
from anyep.cli.bench.records import Setup
from anyep.cli.demo.job import Job, StepReport
from anyep.cli.gate import choose, misrouting
from anyep.cli.nodes import NETWORKS, Nodes
from anyep.cli.ranks import Rank
from tests.support.bench_stand_ins import stand_ins
from tests.support.commands import anyep
from tests.support.places import Place
from tests.support.scripts import code_of, run_script
from tests.support.world import RankContext
from tools.bench_namespaces import measure, report

SIZES = ("--tokens", "24", "--hidden", "32", "--experts", "8", "--topk", "2")
TWO_BY_TWO = ("--nodes", "2", "--ranks-per-node", "2")


@pytest.mark.parametrize("path", ["auto", pytest.param("ring", marks=pytest.mark.slow)])
def test_demo(path: str) -> None:
    finished = anyep("demo", *TWO_BY_TWO, *SIZES, "--steps", "2", "--path", path, "--json")
    assert finished.returncode == 0, finished.stderr
    record = json.loads(finished.stdout)
    assert record["ok"]
    assert record["largest_difference"] < 1e-5
    assert (record["ranks"], record["nodes"], record["ranks_per_node"], record["topk_nodes"]) == (4, 2, 2, 1)
    assert [sum(column) for column in zip(*record["sent"], strict=True)] == record["received"]
    within, between = record["traffic"]["within_nodes"], record["traffic"]["between_nodes"]
    # The last hop of every row is within a node: there and back, twice per step.
    everything = within["all_to_all_bytes"] + between["all_to_all_bytes"]
    assert within["bytes"] == everything > within["all_to_all_bytes"]
    assert between["bytes"] > 0


def test_demo_for_people() -> None:
    printed = anyep("demo", *TWO_BY_TWO, *SIZES, "--steps", "1", "--hidden", "256").stdout
    assert "4 ranks on 2 nodes of 2" in printed
    assert "matches the single-process reference" in printed
    line = next(line for line in printed.splitlines() if "between nodes" in line)
    ours, theirs = (float(words.split()[0]) for words in line.split("nodes")[1].split("KiB")[:2])
    # A token's two experts are on one node, and seldom on one rank: then it crosses once, not twice.
    assert 0.5 < ours / theirs < 0.9


@pytest.mark.parametrize("network", [pytest.param("loopback", marks=pytest.mark.slow), "nixl"])
def test_decoding(network: str) -> None:
    sizes = ("--tokens", "5", "--hidden", "128", "--experts", "8", "--topk", "3", "--steps", "3")
    finished = anyep("demo", "--mode", "low-latency", *TWO_BY_TWO, *sizes, "--network", network, "--json")
    assert finished.returncode == 0, finished.stderr
    record = json.loads(finished.stdout)
    assert record["ok"]
    assert (record["ranks"], record["nodes"], record["ranks_per_node"], record["topk_nodes"]) == (4, 2, 2, 1)
    assert record["network"] == network


def test_decoding_for_people() -> None:
    sizes = ("--tokens", "4", "--hidden", "128", "--experts", "8", "--topk", "2", "--steps", "1")
    printed = " ".join(anyep("demo", "--mode", "low-latency", *TWO_BY_TWO, *sizes).stdout.split())
    assert "4 ranks on 2 nodes of 2, on" in printed
    assert "top-2 of 8 experts on 1 of the nodes, 1 steps" in printed
    assert "matches the single-process reference" in printed


def test_bench_of_low_latency(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ("--mode", "low-latency", "--repeats", "2", "--hidden", "128", "--json", str(file))
    finished = anyep("bench", *TWO_BY_TWO, *SIZES, *options)
    assert finished.returncode == 0, finished.stderr
    assert "low-latency mode, 4 ranks on 2 nodes of 2," in finished.stdout
    assert "between nodes" not in finished.stdout
    records = json.loads(file.read_text())
    assert len(records) == 14
    for record in records:
        assert (record["ranks"], record["nodes"], record["ranks_per_node"]) == (4, 2, 2)
        assert record["of_copy"] > 0
        assert record["bytes_between_nodes"] is None


@pytest.mark.parametrize("plots", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bench(tmp_path: Path, plots: bool) -> None:
    file, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    options = ("--repeats", "2", "--json", str(file), *(("--plot", str(plot)) if plots else ()))
    finished = anyep("bench", *TWO_BY_TWO, *SIZES, *options)
    assert finished.returncode == 0, finished.stderr
    assert "normal mode, 4 ranks on 2 nodes of 2," in finished.stdout
    assert not plots or plot.read_bytes().startswith(b"\x89PNG")
    records = json.loads(file.read_text())
    found = {(record["case"], record["path"], record["tokens"]): record for record in records}
    assert len(found) == 22
    for record in records:
        assert (record["ranks"], record["nodes"], record["ranks_per_node"]) == (4, 2, 2)
        moves = {"layout": 0, "notify": 0, "pair": 2}.get(record["case"], 1)
        assert (record["of_copy"] is not None) == ("gloo" in record["vs"]) == bool(moves)
        if moves:
            # At most all tokens cross once, each with its header; in an all-to-all none crosses thrice.
            most = moves * record["tokens"] * (64 + 48)
            assert 0 <= record["bytes_between_nodes"] <= most
            assert 0 <= record["all_to_all_bytes_between_nodes"] <= 2 * most
            assert record["all_to_all_bytes_between_nodes"] % 16 == 0
    dispatch = found["dispatch", "window", 24]
    assert dispatch["bytes_between_nodes"] == found["dispatch", "ring", 24]["bytes_between_nodes"] > 0
    assert dispatch["bytes_between_nodes"] < dispatch["all_to_all_bytes_between_nodes"] * (64 + 48) / 64


@pytest.mark.slow
def test_bench_between_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes(num_nodes=2, ranks_per_node=2, topk_nodes=1, network="nixl")
    setup = Setup("normal", 4, 8, 64, 8, 2, 1, 0, nodes=nodes)
    rates, records = report(setup, measure(setup, 1 << 20), 1 << 20)
    assert rates.one_way > 0
    assert rates.both_ways > 0
    assert len(records) == 11
    assert all(record.vs["gloo"] > 0 for record in records if record.bytes_between_nodes)
    assert "to the other host in a dispatch" in capsys.readouterr().out


def test_the_example_runs(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code_of("docs/nodes.md"))
    finished = run_script(script, "2", num_ranks=4)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("rows for its experts") == 4


def test_every_network_of_a_buffer_is_offered() -> None:
    assert set(NETWORKS) == {"auto", *connection.NETWORKS}


def test_a_token_goes_to_the_best_experts_of_the_best_nodes() -> None:
    nodes = Nodes(num_nodes=4, topk_nodes=2)
    scores = torch.rand(50, 12, generator=torch.Generator().manual_seed(3))
    experts = choose(scores, 3, nodes)
    for token, chosen in zip(scores.tolist(), experts.tolist(), strict=True):
        best = sorted(range(4), key=lambda node: -max(token[3 * node : 3 * node + 3]))[:2]
        allowed = [expert for expert in range(12) if expert // 3 in best]
        assert sorted(chosen) == sorted(sorted(allowed, key=lambda expert: -token[expert])[:3])
    assert misrouting(scores, experts, nodes) == 0.0


def test_a_wrong_choice_is_noticed() -> None:
    """Of all choices of two experts from one of two nodes only one is right."""
    nodes = Nodes(num_nodes=2, topk_nodes=1)
    scores = torch.tensor([[0.5, 0.25, 0.125, 0.75, 0.0, 1.0]])
    wrong = {
        pair: misrouting(scores, torch.tensor([pair]), nodes)
        for pair in combinations(range(6), 2)
        if pair != (3, 5)
    }
    assert misrouting(scores, torch.tensor([[5, 3]]), nodes) == 0.0
    assert all(amount > 0 for amount in wrong.values()), wrong
    assert wrong[3, 4] == 1.0
    assert wrong[0, 1] == 0.5
    assert wrong[0, 3] == float("inf")


def test_a_node_that_is_allowed_may_stay_unused() -> None:
    nodes = Nodes(num_nodes=3, topk_nodes=2)
    scores = torch.tensor([[1.0, 0.75, 0.5, 0.25, 0.125, 0.0]])
    assert choose(scores, 2, nodes).tolist() == [[0, 1]]
    assert misrouting(scores, torch.tensor([[0, 1]]), nodes) == 0.0
    assert misrouting(scores, torch.tensor([[0, 2]]), nodes) == 0.25
    assert misrouting(scores, torch.tensor([[0, 4]]), nodes) == 0.625


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("demo", "--nodes", "2", "--ranks-per-node", "4", "--ranks", "6"),
            "2 nodes of 4 ranks have 8 ranks, but --ranks is 6",
        ),
        (("demo", "--nodes", "3"), "8 ranks do not fill 3 nodes evenly: say --ranks-per-node instead"),
        (("demo", "--ranks-per-node", "3"), "8 ranks do not fill nodes of 3 evenly: say --nodes, too"),
        (("demo", "--nodes", "0"), "nodes is 0"),
        (
            ("demo", "--nodes", "2", "--device", "cuda", "--path", "ring"),
            "--path ring is not for several nodes on GPUs: rows go to windows only there; leave it out",
        ),
        (("demo", "--nodes", "2", "--ranks-per-node", "-1"), "ranks-per-node is -1"),
        (
            ("demo", "--nodes", "2", "--device", "cuda", "--network", "nixl"),
            "--network nixl is for the CPU so far: leave it out, or --device cuda",
        ),
        (
            (*("demo", "--mode", "low-latency", "--nodes", "2"), "--device", "cuda", "--network", "nixl"),
            "--network nixl is for the CPU so far: leave it out, or --device cuda",
        ),
        (
            ("demo", "--nodes", "4", "--topk-nodes", "5"),
            "--topk-nodes is 5: top-4 of 16 experts on 4 nodes come from 1 to 4 of them",
        ),
        (
            ("demo", "--nodes", "8", "--topk-nodes", "1"),
            "--topk-nodes is 1: top-4 of 16 experts on 8 nodes come from 2 to 8",
        ),
        (("demo", "--topk-nodes", "1"), "--topk-nodes is for several nodes"),
        (("demo", "--nodes", "2", "--network", "string"), "--network is 'string': choose one of auto"),
        (("demo", "--network", "nixl"), "--network is for several nodes"),
        (("bench", "--nodes", "2", "--ranks", "7"), "7 ranks do not fill 2 nodes evenly"),
        (("bench", "--nodes", "2", "--network", "string"), "--network is 'string': choose one of auto"),
        (("bench", "--heap", "gpu"), "--heap is 'gpu': choose one of auto, device, host"),
        (("bench", "--heap", "host"), "--heap is for GPUs: add --device cuda, or leave it out"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str) -> None:
    finished = anyep(*arguments)
    assert finished.returncode == 2
    assert words in finished.stderr
    assert finished.stderr.count("\n") == 1


# On a simulated GPU


def train_on_simulated(context: RankContext, job: Job) -> list[StepReport]:
    from anyep.cli.demo.train import train

    with stand_ins(context.group):
        return train(Rank(context.rank, context.num_ranks, context.group, lambda _: None), job)


@pytest.mark.slow
def test_demo_between_nodes_of_gpus() -> None:
    """The result is that of one process, and what crosses is counted as on the CPU."""
    place = Place("simulated", 4, num_nodes=2)
    job = Job(4, 6, 32, 8, 2, 2, 0, "window", "cuda", Nodes(2, 2, topk_nodes=1))
    by_rank = place.world().run(train_on_simulated, job, timeout=250)
    on_cpu = Place("cpu", 4).world().run(train_on_simulated, replace(job, device="cpu"), timeout=250)
    assert max(mine.largest_difference for reports in by_rank for mine in reports) < 1e-4
    for reports, right in zip(by_rank, on_cpu, strict=True):
        for mine, on in zip(reports, right, strict=True):
            assert (mine.sent, mine.sent_to_nodes) == (on.sent, on.sent_to_nodes)

    def bytes_of(of_ranks: list[list[StepReport]]) -> tuple[int, int]:
        last = [reports[-1] for reports in of_ranks]
        return sum(mine.bytes_within_node for mine in last), sum(mine.bytes_between_nodes for mine in last)

    (within, between), (within_on_cpu, between_on_cpu) = bytes_of(by_rank), bytes_of(on_cpu)
    # The CPU also counts what goes beside rows.
    assert within == within_on_cpu
    assert 0 < between <= between_on_cpu <= 1.5 * between
