"""Dispatches in virtual time: the protocol's own steps, what trouble does to them, and the formula."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep.planning.simulated_combine import simulate_combine
from anyep.planning.simulation import Rules, simulate
from anyep.planning.virtual_time import Result, Shape, Speeds, Trouble, units_of
from anyep.topology import Topology
from tests.model.relay import Combine, Dispatch
from tests.support.commands import anyep
from tests.support.depth import examples
from tests.support.patience import scaled

FAST = Speeds(10.0, 40.0, 25.0, 40.0, 300.0, 46.0)


def run(topk_idx: np.ndarray, shape: Shape, **options: object) -> Result:
    """One dispatch of ranks with one expert each."""
    units = units_of(topk_idx, shape.topology.num_ranks, shape)
    return simulate(units, shape, options.pop("speeds", FAST), **options)  # type: ignore[arg-type]


def routing(shape: tuple[int, int, int], num_experts: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, num_experts, shape)


# The same protocol as the model's


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Shape, Trouble]:
    per_node = draw(st.integers(1, 3))
    topology = Topology(draw(st.integers(1, 3)) * per_node, per_node)
    ranks = topology.num_ranks
    rows = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    topk_idx = routing(
        (ranks, draw(st.integers(0, 6)), draw(st.integers(1, 3))), ranks, draw(st.integers(0, 99))
    )
    trouble = Trouble(
        slow_rank=0, slow_by=draw(st.sampled_from([1.0, 50.0])), late_us=draw(st.sampled_from([0.0, 5.0]))
    )
    trouble = trouble._replace(jitter=draw(st.sampled_from([0.0, 1.0])), seed=draw(st.integers(0, 99)))
    return topk_idx, Shape(topology, 1, 1, *rows, 1000), trouble


@examples(60, deep=1000)
@given(cases())
def test_every_step_is_one_of_the_model(case: tuple[np.ndarray, Shape, Trouble]) -> None:
    """With one channel and chunks of one token, the model allows each step, and then is finished."""
    topk_idx, shape, trouble = case
    masks = tuple(
        tuple(frozenset(int(rank) for rank in token if rank >= 0) for token in tokens) for tokens in topk_idx
    )
    model = Dispatch(masks, shape.topology.ranks_per_node, shape.net_rows, shape.nvl_rows)
    state = model.start()
    result = run(topk_idx, shape, trouble=trouble, with_steps=True)
    assert not result.stuck
    for step in result.steps:
        allowed = {(each.rank, each.action, each.peer): after for each, after in model.steps(state)}
        assert step in allowed
        state = allowed[step]
    assert model.is_finished(state)


@examples(60, deep=1000)
@given(cases())
def test_every_step_of_a_combine_is_one_of_the_model(case: tuple[np.ndarray, Shape, Trouble]) -> None:
    topk_idx, shape, trouble = case
    masks = tuple(
        tuple(frozenset(int(rank) for rank in token if rank >= 0) for token in tokens) for tokens in topk_idx
    )
    nodes = frozenset(range(shape.topology.num_nodes))
    model = Combine(masks, shape.topology.ranks_per_node, shape.net_rows, 0, windows=nodes)
    state = model.start()
    units = units_of(topk_idx, shape.topology.num_ranks, shape)
    result = simulate_combine(units, shape, FAST, trouble, with_steps=True)
    assert not result.stuck
    for step in result.steps:
        allowed = {(each.rank, each.action, each.peer): after for each, after in model.steps(state)}
        assert step in allowed
        state = allowed[step]
    assert model.is_finished(state)


def test_a_broken_rule_stands_still() -> None:
    """The hole that the model finds as well: ranks that take nothing before they have relayed everything."""
    topk_idx = np.broadcast_to(np.arange(4), (4, 6, 4))
    shape = Shape(Topology(4, 2), 1, 1, 1, 1, 1000)
    assert not run(topk_idx, shape).stuck
    stuck = run(topk_idx, shape, rules=Rules(both_at_once=False)).stuck
    assert any("lacks" in sentence for sentence in stuck)
    assert "the relay of rank 0, channel 0, waits for room in a ring within its node" in stuck
    assert "the sender of rank 0, channel 0, waits for room in a ring between nodes" in stuck


# Times


def test_one_row_by_hand() -> None:
    """Rank 0 packs, its NIC sends, rank 2 relays, and rank 3 takes a row of 1,000 bytes."""
    topk_idx = np.array([[[3]], [[-1]], [[-1]], [[-1]]])
    speeds = Speeds(10.0, 1.0, 0.5, 0.25, 2.0, 0.1, nvlink_latency_us=3.0, network_latency_us=7.0)
    result = run(topk_idx, Shape(Topology(4, 2), 1, 1, 1, 1, 1000), speeds=speeds)
    expected = 10 + 1 / 1 + 1 / 0.1 + 7 + 1 / 0.5 + 1 / 2 + 3 + 1 / 0.25
    assert result.total_us == result.finished_us[3] == pytest.approx(expected)
    assert result.finished_us[:3] == [10.0] * 3
    span = expected - 10
    assert result.busy["pack"][0] == pytest.approx(1 / span)
    assert result.busy["network"][0] == pytest.approx(10 / span)
    assert result.busy["relay"][2] == pytest.approx(2 / span)
    assert result.busy["receive"][3] == pytest.approx(4 / span)
    assert sum(map(sum, result.busy.values())) == pytest.approx(17 / span)


def test_one_sum_by_hand() -> None:
    """Rank 2 sums a row of rank 3 for rank 0."""
    topk_idx = np.array([[[3]], [[-1]], [[-1]], [[-1]]])
    speeds = Speeds(10.0, 1.0, 0.5, 0.25, 2.0, 0.1, nvlink_latency_us=3.0, network_latency_us=7.0)
    shape = Shape(Topology(4, 2), 1, 1, 1, 1, 1000)
    result = simulate_combine(units_of(topk_idx, 4, shape), shape, speeds)
    # Reading over NVLink takes longer than the sum.
    assert result.total_us == result.finished_us[0] == pytest.approx(10 + (0.5 + 3) + 10 + 7)
    assert result.busy["relay"][2] * (result.total_us - 10) == pytest.approx(2.0)
    slow_sum = simulate_combine(units_of(topk_idx, 4, shape), shape, speeds._replace(relay_gbs=0.05))
    assert slow_sum.total_us == pytest.approx(10 + 20 + 10 + 7)


ROUTING = np.random.default_rng(3).random((16, 256, 16)).argpartition(4, axis=-1)[..., :4]
SHAPE = Shape(Topology(16, 4), 4, 8, 64, 64, 7392)
USUAL = run(ROUTING, SHAPE)


def test_bytes_over_rates_are_a_bound() -> None:
    """No rank can have its rows before its NIC has sent its own."""
    tokens = [
        sum(len({r // 4 for r in token} - {rank // 4}) for token in ROUTING[rank]) for rank in range(16)
    ]
    least = max(tokens) * 7392 / 46e3
    assert USUAL.total_us > 10 + least
    assert sum(USUAL.busy["network"]) * (USUAL.total_us - 10) == pytest.approx(sum(tokens) * 7392 / 46e3)


def test_small_rings_wait() -> None:
    """With room for one chunk, a sender waits for the credit's way back each time."""
    small = run(ROUTING, SHAPE._replace(net_rows=8))
    assert small.total_us > 1.05 * USUAL.total_us
    assert small.waits.sender_us > USUAL.waits.sender_us
    narrow = run(ROUTING, SHAPE._replace(nvl_rows=8), speeds=FAST._replace(receive_gbs=3.0))
    assert narrow.waits.relay_us > 10 > USUAL.waits.relay_us


def test_a_slow_rank_delays_the_others() -> None:
    slow = run(ROUTING, SHAPE, trouble=Trouble(slow_rank=5, slow_by=8.0))
    assert slow.total_us > 1.5 * USUAL.total_us
    late = run(ROUTING, SHAPE, trouble=Trouble(slow_rank=5, late_us=300.0))
    assert late.total_us == pytest.approx(USUAL.total_us + 300)


def test_a_slow_link_delays_who_needs_it() -> None:
    slow = run(ROUTING, SHAPE, trouble=Trouble(slow_link=5, link_share=0.25))
    assert slow.total_us > 2 * USUAL.total_us
    assert slow.busy["network"][5] > 0.9
    assert max(slow.busy["network"][:5]) < 0.6


def test_jitter_is_repeatable_and_costs_time() -> None:
    first, again, other = (
        run(ROUTING, SHAPE, trouble=Trouble(jitter=1.0, seed=seed)).total_us for seed in (1, 1, 2)
    )
    assert first == again != other
    assert min(first, other) > USUAL.total_us


def test_watched_stages() -> None:
    result = run(ROUTING, SHAPE, watch=6)
    assert result.total_us == USUAL.total_us
    for stage, intervals in result.watched.items():
        busy = math.fsum(end - begin for begin, end in intervals)
        parallel = 1 if stage == "network" else 4
        assert busy / parallel / (result.total_us - 10) == pytest.approx(result.busy[stage][6])


# The command


SIMULATE = ("simulate", "--machine", "H800 CX7", "--dtype", "fp8", "--tokens", "512")


@pytest.mark.parametrize("ranks", [8, 16, 32])
@pytest.mark.parametrize("what", ["dispatch", "combine"])
def test_near_the_formula(ranks: int, what: str) -> None:
    options = ("--combine",) if what == "combine" else ()
    finished = anyep(*SIMULATE, "--tokens", "1024", "--ranks", str(ranks), "--json", *options)
    record = json.loads(finished.stdout)
    assert (finished.returncode, finished.stderr, record["stuck"]) == (0, "", [])
    assert record["what"] == what
    assert abs(record["difference"]) < 0.12
    assert record["difference"] == pytest.approx(record["simulated_us"] / record["formula_us"] - 1, abs=1e-3)
    assert len(record["finished_us"]) == ranks
    assert max(record["finished_us"]) == record["simulated_us"]


def test_a_waterfall(tmp_path: Path) -> None:
    picture = tmp_path / "waterfall.png"
    finished = anyep(
        *SIMULATE, "--ranks", "16", "--plot", str(picture), "--slow-rank", "3", "--late-us", "50"
    )
    assert (finished.returncode, finished.stderr) == (0, f"wrote {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "a dispatch takes" in finished.stdout
    assert "a channel waits for room in rings" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("simulate",), "on which machine? Name it with --machine"),
        ((*SIMULATE, "--ranks", "1024"), "--ranks is 1024: at most 512 are simulated"),
        ((*SIMULATE, "--ranks", "12"), "--ranks-per-node"),
        (
            (*SIMULATE, "--chunk", "64", "--net-ring", "32"),
            "--chunk is 64, but the smallest ring has 32 rows",
        ),
        ((*SIMULATE, "--net-ring", "0"), "--net-ring is 0: it must be at least 1"),
        ((*SIMULATE, "--slow-rank", "64"), "--slow-rank is 64, but the ranks are 0 to 63"),
        ((*SIMULATE, "--watch", "-1"), "--watch is -1, but the ranks are 0 to 63"),
        ((*SIMULATE, "--slow-by", "2"), "name it with --slow-rank"),
        ((*SIMULATE, "--slow-rank", "1", "--slow-by", "0"), "--slow-by is 0: it must be from 1"),
        ((*SIMULATE, "--slow-link", "1", "--link-share", "0"), "--link-share is 0: it must be from 0.001"),
        ((*SIMULATE, "--jitter", "-1"), "--jitter is -1: it must be from 0"),
        ((*SIMULATE, "--skew", "9"), "--skew is 9: it must be from 0"),
        ((*SIMULATE, "--seed", "-1"), "--seed is -1: it must be at least 0"),
        ((*SIMULATE, "--tokens", "0"), "--tokens is 0: it must be at least 1"),
        ((*SIMULATE, "--network-latency-us", "-1"), "--network-latency-us is -1"),
        ((*SIMULATE, "--ranks", "512", "--tokens", "1000000"), "would take minutes: lower one of them"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], said: str) -> None:
    finished = anyep(*arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert said in finished.stderr
    assert finished.stderr.count("\n") == 1


@pytest.mark.slow
def test_64_ranks_take_seconds() -> None:
    started = time.monotonic()
    record = json.loads(anyep(*SIMULATE, "--tokens", "4096", "--json").stdout)
    assert time.monotonic() - started < scaled(30)
    assert abs(record["difference"]) < 0.1
