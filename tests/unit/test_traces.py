"""Traces: files that are read and refused, drawn routings, what they send, what placing experts changes."""

from __future__ import annotations

import json
import pickle
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from anyep.errors import InvalidCall, NotSupported
from anyep.planning import sent
from anyep.planning.balancing import LowLatencyShape, Shape, in_place, in_places, load_of, measure, move
from anyep.planning.counts import count_choices
from anyep.planning.placement import place, placement_of
from anyep.planning.traces import Trace, draw_trace, read_trace
from anyep.topology import Topology
from tests.support.commands import anyep
from tests.support.patience import scaled

ROUTING = np.random.default_rng(1).random((2, 4, 16, 32)).argpartition(3, axis=-1)[..., :3]
"""[step, rank, token, top-k]"""


def stored(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    if path.suffix == ".npy":
        np.save(path, content, allow_pickle=True)  # type: ignore[arg-type]
    else:
        torch.save(content, path)
    return path


def tensor_of(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


# Files


def test_files_of_steps(tmp_path: Path) -> None:
    whole = read_trace([stored(tmp_path, "all.npy", ROUTING)])
    by_step = read_trace([stored(tmp_path, f"{step}.npy", ROUTING[step]) for step in range(2)])
    of_torch = read_trace([stored(tmp_path, "all.pt", tensor_of(ROUTING))])
    for trace in (whole, by_step, of_torch):
        assert len(trace.steps) == 2
        assert all(np.array_equal(step, each) for step, each in zip(trace.steps, ROUTING, strict=True))
        assert [counts.tolist() for counts in trace.num_tokens] == [[16] * 4] * 2


def test_files_of_ranks(tmp_path: Path) -> None:
    """Ranks have their own numbers of tokens; a file of torch may list them all."""
    ranks = [ROUTING[0, rank, : 16 - rank] for rank in range(4)]
    files = read_trace([stored(tmp_path, f"rank{rank}.npy", each) for rank, each in enumerate(ranks)])
    listed = read_trace([stored(tmp_path, "ranks.pt", [tensor_of(each) for each in ranks])])
    for trace in (files, listed):
        (step,), (counts,) = trace.steps, trace.num_tokens
        assert counts.tolist() == [16, 15, 14, 13]
        assert np.array_equal(step[3, :13], ranks[3])
        assert (step[3, 13:] == -1).all()


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["trap.npy", "trap.pt"])
def test_nothing_is_executed(tmp_path: Path, name: str) -> None:
    sprung = tmp_path / "sprung"
    content = np.array([Trap(sprung)], object) if name.endswith("npy") else Trap(sprung)
    path = stored(tmp_path, name, content)
    with pytest.raises(InvalidCall, match=r"is no (array of numbers|file of tensors alone)"):
        read_trace([path])
    assert not sprung.exists()
    path.write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(InvalidCall):
        read_trace([path])
    assert not sprung.exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.npy", np.zeros((2, 2, 2)), "has values of float64 in 3 dimensions: topk_idx are whole numbers"),
        ("a.npy", np.int64(3), "has values of int64 in 0 dimensions"),
        ("a.npy", np.zeros(3, int), r"the shapes of the trace do not fit \(a.npy has \[3\]\)"),
        ("a.npy", np.zeros((2, 0, 2), int), r"has no tokens: its shape \[2, 0, 2\] has a zero"),
        ("a.npy", np.zeros((0, 2), int), "the trace has no tokens"),
        ("a.pt", {"topk_idx": 3}, "has a dict: store a tensor of topk_idx"),
        ("a.pt", [], "has no tensors"),
        ("a.pt", [1], "has a int: store a tensor"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: object, said: str) -> None:
    with pytest.raises(InvalidCall, match=said):
        read_trace([stored(tmp_path, name, content)])


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    first = stored(tmp_path, "0.npy", ROUTING[0])
    with pytest.raises(InvalidCall, match=r"'.*1.npy' has 3 ranks and top-3, but '.*0.npy' has 4 and top-3"):
        read_trace([first, stored(tmp_path, "1.npy", ROUTING[0, :3])])
    with pytest.raises(InvalidCall, match="the shapes of the trace do not fit"):
        read_trace([first, stored(tmp_path, "1.npy", ROUTING[0, 0])])
    parts = [ROUTING[0, 0], ROUTING[0, 1, :, :2]]
    files = [stored(tmp_path, f"{rank}.npy", each) for rank, each in enumerate(parts)]
    with pytest.raises(InvalidCall, match=r"have different top-k \(2, 3\): fill up with -1"):
        read_trace(files)
    with pytest.raises(InvalidCall, match=r"cannot be read \(No such file"):
        read_trace([tmp_path / "none.npy"])
    with pytest.raises(InvalidCall, match=r"must end in \.npy, \.pt, \.parquet"):
        read_trace([tmp_path / "none.csv"])


@pytest.mark.skipif(find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_pyarrow(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="needs pyarrow to be read: pip install pyarrow"):
        read_trace([tmp_path / "a.parquet"])


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    order = np.random.default_rng(2).permutation(2 * 4 * 16)
    steps, ranks = (index.reshape(-1)[order] for index in np.indices((2, 4, 16))[:2])
    # Tokens of a rank stay in their order.
    order = np.lexsort((order, ranks, steps))
    table = pyarrow.table(
        {"step": steps[order], "rank": ranks[order], "topk_idx": list(ROUTING.reshape(-1, 3))}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    trace = read_trace([tmp_path / "a.parquet"])
    assert all(np.array_equal(step, each) for step, each in zip(trace.steps, ROUTING, strict=True))


# Drawn routings


def test_a_drawn_routing_follows_its_power_law() -> None:
    trace = draw_trace((8, 2048, 1), 16, skew=1.0, seed=4)
    assert np.array_equal(trace.steps[0], draw_trace((8, 2048, 1), 16, skew=1.0, seed=4).steps[0])
    counts = np.sort(sum(np.bincount(step.reshape(-1), minlength=16) for step in trace.steps))[::-1]
    expected = np.arange(1, 17) ** -1.0
    assert counts / counts.sum() == pytest.approx(expected / expected.sum(), rel=0.15)
    for skew, experts in ((2.0, 16), (0.0, 16), (0.0, 64)):
        several = draw_trace((2, 64, 8), experts, skew, seed=4)
        assert all(len(set(token)) == 8 for token in several.steps[0].reshape(-1, 8).tolist())
    even = draw_trace((8, 4096, 2), 8, skew=0.0, seed=4)
    assert np.bincount(even.steps[0].reshape(-1)) == pytest.approx(8192, rel=0.05)


def test_large_routings_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyep.planning.traces.MOST_SCORES", 2 * 4 * 8 * 100)
    trace = draw_trace((4, 1000, 1), 8, skew=0.1, seed=1, num_steps=2)
    assert [step.shape for step in trace.steps] == [(4, 100, 1)] * 2
    assert trace.scale == 10.0


def test_rows_of_a_sample_stand_for_all_rows() -> None:
    """Messages do not: there is one of each."""
    trace = draw_trace((4, 64, 2), 8, skew=0.0, seed=1)
    topology = Topology(4, 2)
    once, twice = (
        measure(trace._replace(scale=scale), in_place(8, 4), topology, SHAPE) for scale in (1.0, 2.0)
    )
    assert np.array_equal(twice.dispatch.rows, 2 * once.dispatch.rows)
    assert np.array_equal(twice.combine.beside_bytes, 2 * once.combine.beside_bytes)
    assert np.array_equal(twice.dispatch.message_bytes, once.dispatch.message_bytes)
    assert np.array_equal(twice.rank_load, 2 * once.rank_load)
    assert twice.loads()[0].far_rows == 2 * once.loads()[0].far_rows


# Counts


SHAPE = Shape(sent.Rows(64, num_topk=3), sent.Rows(64), 4)


def test_measured() -> None:
    trace = Trace(tuple(ROUTING), (np.full(4, 16),) * 2)
    topology = Topology(4, 2)
    measured = measure(trace, in_place(32, 4), topology, SHAPE)
    calls = [sent.dispatch(count_choices(step, topology, 32), SHAPE.dispatch_rows, 4) for step in ROUTING]
    assert np.array_equal(measured.dispatch.bytes, sum(call.bytes for call in calls))
    assert measured.expert_load.tolist() == (np.bincount(ROUTING.reshape(-1), minlength=32) / 2).tolist()
    assert measured.rank_load.tolist() == measured.expert_load.reshape(4, 8).sum(axis=1).tolist()
    assert measured.node_load.sum() == 4 * 16 * 3
    assert measured.imbalance == measured.rank_load.max() / measured.rank_load.mean()


def test_low_latency_calls() -> None:
    """The bytes are those of `sent`, which a test compares with what a Buffer sends."""
    trace = Trace(tuple(ROUTING), (np.full(4, 16),) * 2)
    topology = Topology(4, 2)
    shape = SHAPE._replace(low_latency=LowLatencyShape(128, 128, 1, 16))
    measured = measure(trace, in_place(32, 4), topology, shape)
    counts = [count_choices(step, topology, 32) for step in ROUTING]
    dispatches = [sent.low_latency_dispatch(each, 128, 1, 16, topology).bytes for each in counts]
    combines = [sent.low_latency_combine(each, 128, 16, topology).bytes for each in counts]
    assert np.array_equal(measured.low_latency["dispatch"].bytes, sum(dispatches))
    assert np.array_equal(measured.low_latency["combine"].bytes, sum(combines))
    assert measure(trace, in_place(32, 4), topology, SHAPE).low_latency == {}


def test_the_most_loaded_link() -> None:
    """All tokens of rank 0 go to rank 3 on the other node, by its relay, rank 2."""
    topology = Topology(4, 2)
    routing = np.full((4, 5, 1), -1)
    routing[0] = 3
    assert load_of(count_choices(routing, topology, 4)) == (5.0, 5.0)
    routing[1] = 3
    # Two relays with five rows each; rank 3 receives all ten.
    assert load_of(count_choices(routing, topology, 4)) == (10.0, 5.0)


def test_replicas_take_turns() -> None:
    placement = placement_of(np.array([0, 1, 0, 2]), 3)
    routing = np.array([[[0, 1], [0, -1], [2, 0]], [[0, 1], [0, 1], [0, 1]]])
    places = in_places(routing, placement)
    assert places.tolist() == [[[0, 1], [2, -1], [3, 0]], [[2, 1], [0, 1], [2, 1]]]


def test_a_measured_placement_computes_all_rows() -> None:
    trace = draw_trace((8, 256, 4), 32, skew=1.0, seed=5)
    topology = Topology(8, 4)
    before = measure(trace, in_place(32, 8), topology, SHAPE)
    after = measure(trace, place(before.expert_load, 40, 2, 8), topology, SHAPE)
    assert np.array_equal(after.expert_load, before.expert_load)
    assert after.rank_load.sum() == before.rank_load.sum()
    assert after.imbalance < 1.1 < before.imbalance


def test_moving() -> None:
    """Ranks 0 and 1 share a node, 2 and 3 the other."""
    before = placement_of(np.array([0, 1, 2, 3]), 4)
    after = placement_of(np.array([0, 0, 1, 2, 1, 3, 3, 2]), 4)
    moved = move(before, after, Topology(4, 2), expert_bytes=10)
    # Rank 1: 2 comes from the other node; 1 stays. Rank 2: 1 from there. Rank 3: 2 from rank 2.
    assert (moved.within_bytes, moved.between_bytes, moved.num_experts) == (20, 20, 3)
    assert move(before, before, Topology(4, 2), 10) == (0, 0, 0, 0, 0)


# The command


def test_the_command(tmp_path: Path) -> None:
    files = [str(stored(tmp_path, f"{step}.npy", ROUTING[step])) for step in range(2)]
    finished = anyep(
        "plan", "--trace", *files, "--experts", "32", "--hidden", "64", "--ranks-per-node", "2", "--json"
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    record = json.loads(finished.stdout)
    assert (record["ranks"], record["nodes"], record["steps"], record["topk"]) == (4, 2, 2, 3)
    assert (record["times"], record["balance"], record["scale"]) == (None, None, 1.0)
    call = record["calls"]["dispatch"]
    total = sum(sum(row) for row in call["bytes"])
    assert total == sum(link["bytes"] for link in call["by_link"].values())
    assert total == sum(sum(each) for each in call["sent_by_rank"].values())
    assert call["bytes_between_nodes"][0][1] == sum(sum(row[2:]) for row in call["bytes"][:2])


def test_balance(tmp_path: Path) -> None:
    picture = tmp_path / "heat.png"
    arguments = (
        "plan",
        "--skew",
        "0.8",
        "--ranks",
        "16",
        "--tokens",
        "256",
        "--machine",
        "H800 CX7",
        "--balance",
    )
    finished = anyep(*arguments, "--json", "--plot", str(picture), "--compute-us", "2000")
    assert (finished.returncode, finished.stderr) == (0, f"wrote {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(finished.stdout)
    assert len(record["times"]["dispatch_us"]) == 2
    balance = record["balance"]
    assert len(balance["experts"]) == 256 + 16
    assert balance["after"]["imbalance"] < 1.1 < 1.5 < balance["before"]["imbalance"]
    saved = balance["before"]["step_us"] - balance["after"]["step_us"]
    assert balance["pays_after_steps"] == -(-balance["move_us"] // saved)
    assert (balance["steps_used"], balance["steps_judged"]) == (1, 1)
    printed = anyep(*arguments).stdout
    assert "balanced by 1 steps, judged by 1 other steps: 272 places" in printed
    assert "moving" in printed
    assert "it pays after" in printed or "it never pays" in printed


def test_a_table_for_people(tmp_path: Path) -> None:
    file = stored(tmp_path, "a.npy", ROUTING[0])
    printed = anyep(
        "plan", "--trace", str(file), "--experts", "32", "--machine", "h100_sxm", "--balance"
    ).stdout
    assert "1 steps of 4 ranks on 1 nodes: 16 tokens per rank, top-3 of 32 experts" in printed
    assert "rows computed by a rank" in printed
    assert "judged by the same step" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--trace", "a.npy", "--ranks", "4"), "--ranks has no effect with --trace"),
        (("--trace", "a.npy", "--experts", "8"), "the trace has the expert 31: experts are 0 to 7"),
        (("--trace", "a.npy", "--experts", "33"), "33 experts cannot be shared by 4 ranks"),
        (("--trace", "a.npy", "--ranks-per-node", "3"), "--ranks-per-node"),
        (("--trace", "a.npy", "--memory", "80GiB"), "--memory has no effect with --trace"),
        (("--trace", "a.npy", "--replicas", "40"), "--replicas is about placing experts: add --balance"),
        (("--trace", "a.npy", "--library", "x"), "--library is about predicted times"),
        (("--trace", "a.npy", "--machine", "H100", "--library", "x"), "no constants of 'x' for normal mode"),
        (
            ("--trace", "a.npy", "--balance", "--experts", "32", "--replicas", "30"),
            "num_replicas is 30, but there",
        ),
        (("--trace", "a.npy", "--balance", "--groups", "0"), "--groups is 0: it must be at least 1"),
        (("--trace", "a.npy", "--balance", "--compute-us", "-1"), "--compute-us is -1"),
        (
            ("--trace", "a.npy", "--balance", "--experts", "32", "--expert-bytes", "x"),
            "--expert-bytes is 'x'",
        ),
        (
            ("--trace", "a.npy", "--experts", "32", "--low-latency-tokens", "8"),
            "--low-latency-tokens is 8, but a rank of the trace has 16 tokens",
        ),
        (("--balance",), "--balance is about a routing: give one with --trace or --skew"),
        (("--seed", "1"), "--seed is about a routing"),
        (("--skew", "-1"), "--skew is -1: it must be from 0"),
        (("--skew", "1", "--ranks", "8,16"), "a routing is drawn for one number of ranks"),
        (("--skew", "1", "--experts", "4", "--ranks", "4"), "--topk is 8, but there are only 4 experts"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    stored(tmp_path, "a.npy", ROUTING[0])
    finished = anyep("plan", *arguments, cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert said in finished.stderr
    assert finished.stderr.count("\n") == 1


@pytest.mark.slow
def test_large_clusters_take_seconds() -> None:
    started = time.monotonic()
    finished = anyep("plan", "--skew", "0.5", "--ranks", "512", "--experts", "512", "--balance", "--json")
    assert finished.returncode == 0
    assert time.monotonic() - started < scaled(40)
