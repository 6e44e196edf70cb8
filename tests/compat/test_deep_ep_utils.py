"""`deep_ep.utils`: what programs that test and measure deep_ep import, each with the meaning it has there."""

from __future__ import annotations

import inspect
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import anyep
from anyep import InvalidCall, NotSupported
from tests.support import elastic_oracle, oracle
from tests.support.depth import examples
from tests.support.elastic_oracle import Reduction, Returned, Shape
from tests.support.programs import ROOT, run_program
from tests.support.world import RankContext, get_world

anyep.install_as_deep_ep()

import deep_ep  # noqa: E402
from deep_ep.utils import comm, envs, gate, refs, testing  # noqa: E402
from deep_ep.utils import math as deep_ep_math  # noqa: E402


def test_signatures() -> None:
    expected = {
        gate.get_unbalanced_scores: "num_tokens, num_experts, num_ranks, num_topk, ratio, precise",
        refs.dispatch: "x, topk_idx, topk_weights, num_max_tokens_per_rank, num_experts",
        refs.combine: "y, topk_idx, num_scaleout_ranks, num_scaleup_ranks, num_experts, bias,"
        " reduce_in_local, reduce_in_scaleup",
        refs.generate_pre_combine_data: "src_token_global_idx, num_max_tokens_per_rank, num_topk, hidden",
        refs.ordered_accumulate: "data, initial_value",
        envs.init_dist: "local_rank, num_local_ranks, seed",
        envs.dist_print: "s, once_in_node",
        testing.bench: "fn, num_warmups, num_tests, post_fn, flush_l2",
        testing.bench_kineto: "fn, kernel_names, num_tests, suppress_kineto_output, trace_path, flush_l2,"
        " barrier_comm_profiling, num_kernels_per_period, barrier",
        comm.get_nccl_comm_handle: "group, force_new_comm",
    }
    for function, names in expected.items():
        assert ", ".join(inspect.signature(function).parameters) == names, function


# Arithmetic and FP8


def test_sizes() -> None:
    assert [deep_ep_math.ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [deep_ep_math.align(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert (deep_ep_math.safe_div(0, 0), deep_ep_math.safe_div(3, 2)) == (0, 1.5)
    with pytest.raises(ZeroDivisionError):
        deep_ep_math.safe_div(1, 0)
    rows, scales = torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.float32)
    assert deep_ep_math.count_bytes(rows, None, (rows, [scales])) == 30 + 30 + 12


def test_differences() -> None:
    x = torch.randn(50)
    assert deep_ep_math.calc_diff(x, x.clone()) == 0
    assert 0 < deep_ep_math.calc_diff(x, x + 0.01) < deep_ep_math.calc_diff(x, x + 0.1) < 1
    # 1 - 2 * 2 * 1 / (4 + 1)
    assert deep_ep_math.calc_diff(torch.tensor([1.0]), torch.tensor([0.0])) == pytest.approx(0.2)


@pytest.mark.parametrize("shape", [(5, 256), (3, 200), (1, 16), (0, 128)])
def test_fp8(shape: tuple[int, int]) -> None:
    x = (torch.randn(shape) * 3).bfloat16()
    x[:, ::7] = 0
    data, scales = deep_ep_math.per_token_cast_to_fp8(x)
    assert (data.dtype, data.shape) == (torch.float8_e4m3fn, x.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (len(x), math.ceil(shape[1] / 128)))
    for row in range(len(x)):
        for block in range(scales.shape[1]):
            part = x[row, 128 * block : 128 * (block + 1)].float()
            assert scales[row, block] == part.abs().max() / 448
            # The largest value of a block is exact; three bits of mantissa are right for the others.
            rounded = data[row, 128 * block : 128 * (block + 1)].float() * scales[row, block]
            torch.testing.assert_close(rounded, part, rtol=2**-4, atol=float(scales[row, block]) * 2**-9)
    back = deep_ep_math.per_token_cast_back(data, scales)
    assert (back.dtype, back.shape) == (torch.bfloat16, x.shape)
    assert oracle.same_bits(back, (data.float() * scales.repeat_interleave(128, 1)[:, : shape[1]]).bfloat16())


def test_fp8_of_nothing_but_zeros() -> None:
    data, scales = deep_ep_math.per_token_cast_to_fp8(torch.zeros(2, 128))
    assert scales.tolist() == [[pytest.approx(1e-4 / 448)]] * 2
    assert not data.float().any()


def test_packed_exponents_as_scales() -> None:
    """Four bytes of exponents in an int32: 127 is 1, 128 is 2, 126 is a half."""
    data = torch.ones(2, 384).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[127, 128, 126, 0], [130, 127, 127, 0]], dtype=torch.uint8)
    back = deep_ep_math.per_token_cast_back(data, exponents.view(torch.int32))
    assert back[:, ::128].tolist() == [[1, 2, 0.5], [8, 1, 1]]


# Unbalanced scores


def test_wrong_rows_and_scales() -> None:
    with pytest.raises(InvalidCall, match=r"x is \[2, 3, 4\]: it must be \[tokens, hidden\]"):
        deep_ep_math.per_token_cast_to_fp8(torch.zeros(2, 3, 4))
    rows = torch.zeros(2, 256).to(torch.float8_e4m3fn)
    # One scale for a row of two blocks would be taken for both of them.
    for scales in (torch.ones(2, 1), torch.ones(2, 3), torch.ones(1, 2), torch.ones(2)):
        with pytest.raises(InvalidCall, match=r"x_scales is .*: rows \[2, 256\] have \[2, 2\] scales"):
            deep_ep_math.per_token_cast_back(rows, scales)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_ranks", "num_topk", "ratio"),
    [
        (4096, 256, 8, 8, 1.0),
        (4096, 256, 8, 6, 2.0),
        (2000, 64, 4, 4, 1.5),
        (2000, 32, 32, 4, 5.0),
        (1000, 8, 2, 1, 3.0),
    ],
)
def test_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> None:
    torch.manual_seed(num_tokens + num_experts)
    scores = gate.get_unbalanced_scores(num_tokens, num_experts, num_ranks, num_topk, ratio, precise)
    assert (scores.shape, scores.dtype) == ((num_tokens, num_experts), torch.float32)
    choices = scores.topk(num_topk).indices
    in_rank = oracle.layout(choices, num_experts, num_ranks)[2]
    counts = in_rank.sum(0).float()
    assert counts[0] / counts[1:].mean() == pytest.approx(ratio, rel=0.1)
    if precise:
        assert counts[1:].max() - counts[1:].min() <= 1
    # Every expert of a rank is as likely as another one.
    of_rank_0 = choices[choices < num_experts // num_ranks].bincount(minlength=num_experts // num_ranks)
    assert of_rank_0.min() > 0.5 * of_rank_0.float().mean()


@examples(20, deep=300)
@given(st.data())
def test_dealt_scores_choose_what_was_dealt(data: st.DataObject) -> None:
    """Exactly top-k experts of a token are above all others."""
    num_ranks, num_local = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    num_experts, num_tokens = num_ranks * num_local, data.draw(st.integers(0, 30))
    num_topk = data.draw(st.integers(1, num_experts))
    ratio = data.draw(st.floats(1, 20))
    scores = gate.get_unbalanced_scores(num_tokens, num_experts, num_ranks, num_topk, ratio, True)
    assert ((scores > gate.CHOSEN).sum(1) == num_topk).all()
    counts = gate.tokens_per_rank(scores, num_ranks, num_topk)
    if num_ranks > 1:
        assert counts[1:].max() - counts[1:].min() <= 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((4, 10, 4, 2, 1.0, False), "num_experts=10 must be a multiple of num_ranks=4"),
        ((4, 8, 4, 9, 1.0, False), "num_topk=9 at most that"),
        ((4, 8, 4, 2, 0.5, True), "ratio=0.5 is less than 1"),
        ((4, 8, 0, 2, 1.0, True), "num_ranks is 0: it must be at least 1"),
        ((-4, 8, 2, 2, 1.0, True), "num_tokens is -4: it must be at least 0"),
    ],
)
def test_wrong_scores(arguments: Any, sentence: str) -> None:
    with pytest.raises(InvalidCall, match=sentence):
        gate.get_unbalanced_scores(*arguments)


# References


def inputs_of(num_ranks: int, num_experts: int, num_topk: int, with_scales: bool) -> list[oracle.RankInput]:
    chance = torch.Generator().manual_seed(num_ranks)
    inputs = []
    for rank in range(num_ranks):
        count = 5 * rank
        scores = torch.rand(count, 2 * num_experts, generator=chance)
        ids = scores.topk(num_topk).indices
        ids = torch.where(ids < num_experts, ids, -1)
        x = torch.randn(count, 32, generator=chance).bfloat16()
        scales = torch.rand(count, 1, generator=chance) if with_scales else None
        inputs.append(
            oracle.RankInput(
                x.to(torch.float8_e4m3fn) if with_scales else x,
                oracle.layout(ids, num_experts, num_ranks)[2],
                scales,
                ids,
                torch.rand(count, num_topk, generator=chance),
            )
        )
    return inputs


def compare_dispatch(context: RankContext, with_scales: bool) -> None:
    shape = Shape(num_experts=2 * context.num_ranks, num_max_tokens_per_rank=20)
    inputs = inputs_of(context.num_ranks, shape.num_experts, 3, with_scales)
    own = inputs[context.rank]
    x = own.x if own.scales is None else (own.x, own.scales)
    assert own.topk_idx is not None
    rows, ids, weights, sources, counts = refs.dispatch(
        x, own.topk_idx, own.topk_weights, 20, shape.num_experts
    )
    expected = elastic_oracle.dispatch(inputs, context.rank, shape)
    data, scales = rows if with_scales else (rows, None)
    assert oracle.same_bits(data, expected.x)
    assert (scales is None) == (expected.scales is None)
    assert scales is None or oracle.same_bits(scales, expected.scales)
    assert ids.tolist() == expected.topk_idx.tolist()
    assert oracle.same_bits(weights, expected.topk_weights)
    assert oracle.same_bits(sources, expected.sources)
    assert oracle.same_bits(counts.cumsum(0, dtype=torch.int32), expected.psum_by_source)
    assert refs.dispatch(own.x.view(torch.uint8), own.topk_idx, None, 20, shape.num_experts)[2] is None


@pytest.mark.parametrize("with_scales", [False, True])
def test_the_reference_of_dispatch(with_scales: bool) -> None:
    get_world(3).run(compare_dispatch, with_scales)


def refuse_what_would_be_wrong(context: RankContext) -> None:
    x, ids = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64)
    for arguments, sentence in (
        ((x, ids[:3], None, 4, 8), "x has 4 tokens and topk_idx 3"),
        ((x, ids, None, 3, 8), "x has 4 tokens, but num_max_tokens_per_rank is 3"),
        ((x, ids + 8, None, 4, 8), "topk_idx has 8 to 8: ids must be 0 to 7"),
        ((x, ids - 2, None, 4, 8), "topk_idx has -2 to -2: ids must be 0 to 7"),
        ((x, ids, None, 4, 7), "num_experts=7 must be a multiple of the 2 ranks"),
        ((x, ids, None, 4, 0), "num_experts=0 must be a multiple"),
    ):
        with pytest.raises(InvalidCall, match=sentence):
            refs.dispatch(*arguments)


def test_wrong_references_of_dispatch() -> None:
    get_world(2).run(refuse_what_would_be_wrong)


def test_wrong_references_of_combine() -> None:
    y, ids = torch.zeros(4, 2, 8), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(InvalidCall, match=r"y is \[3, 2, 8\] and topk_idx \[4, 2\]: both begin with"):
        refs.combine(y[:3], ids, 1, 2, 8, None, True, True)
    for scaleout, scaleup in ((0, 2), (1, 16)):
        with pytest.raises(InvalidCall, match="num_experts=8 must be a multiple of the"):
            refs.combine(y, ids, scaleout, scaleup, 8, None, True, True)


def compare_combine(context: RankContext) -> None:
    """What the experts return for each copy can be computed by everyone."""
    num_ranks, num_topk, hidden = context.num_ranks, 3, 16
    shape = Shape(2 * num_ranks, 20)
    inputs = inputs_of(num_ranks, shape.num_experts, num_topk, False)
    envs.init_seed(7)
    assert (envs.get_global_seed(), envs.get_local_seed()) == (7, 7 + context.rank)

    def values(sources: torch.Tensor) -> torch.Tensor:
        return refs.generate_pre_combine_data(sources, 20, num_topk, hidden)

    expanded = []
    for rank in range(num_ranks):
        there = elastic_oracle.dispatch(inputs, rank, shape)
        rows = torch.zeros(len(there.expanded.x), hidden).bfloat16()
        has_row = there.expanded.positions >= 0
        rows[there.expanded.positions[has_row].long()] = values(there.sources)[has_row]
        expanded.append(rows)
    ids = inputs[context.rank].topk_idx
    assert ids is not None
    own = values(context.rank * 20 + torch.arange(len(ids))) * (ids >= 0).unsqueeze(2)
    biases = torch.randn(2, len(ids), hidden).bfloat16()
    for bias in (None, biases[0], (biases[0], biases[1])):
        given = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        for ranks_per_node, multiple in ((None, True), (None, False), (2, True)):
            nodes = 1 if ranks_per_node is None else num_ranks // ranks_per_node
            result = refs.combine(
                own,
                ids,
                nodes,
                num_ranks // nodes,
                shape.num_experts,
                bias,
                multiple,
                multiple and nodes > 1,
            )
            expected, _ = elastic_oracle.combine(
                Returned(expanded),
                inputs,
                context.rank,
                shape._replace(ranks_per_node=ranks_per_node),
                Reduction(True, multiple),
                given,
            )
            assert torch.equal(result, expected)


def test_the_reference_of_combine() -> None:
    get_world(4).run(compare_combine)


def values_by_hand(context: RankContext) -> None:
    envs.init_seed(0)
    values = refs.generate_pre_combine_data(torch.tensor([3]), 4, 2, 5)
    for choice in range(2):
        slope = ((3 * 2 + choice) * 131071 % 8 + 1) / 8
        expected = torch.tensor([math.sin(slope * channel) for channel in range(1, 6)])
        torch.testing.assert_close(values[0, choice].float(), expected, rtol=0.01, atol=0.01)


def test_values_for_combine_by_hand() -> None:
    get_world(1).run(values_by_hand)


def test_sums_in_order() -> None:
    data = torch.tensor([2.0**24, 1.0, -(2.0**24)]).reshape(1, 3, 1)
    assert refs.ordered_accumulate(data).item() == 0
    assert refs.ordered_accumulate(data[:, [0, 2, 1]]).item() == 1
    assert refs.ordered_accumulate(data[:, [0, 2, 1]], torch.tensor([[6.0]])).item() == 7


# Environment

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from deep_ep.utils.envs import dist_print, get_local_seed, init_dist
rank, num_ranks, group = init_dist(int(sys.argv[1]), 2, seed=40)
total = torch.ones(3)
dist.all_reduce(total, group=group)
dist_print("from one rank", once_in_node=True)
dist_print(json.dumps([rank, num_ranks, group.size(), get_local_seed(), str(total.dtype), total.tolist()]))
"""


def test_joining_a_job(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import subprocess, sys\n"
        f"ranks = [subprocess.Popen([sys.executable, '-c', {SCRIPT!r}, str(rank)]) for rank in range(2)]\n"
        "sys.exit(max(rank.wait() for rank in ranks))\n"
    )
    environment = {
        "PYTHONPATH": str(ROOT),
        "MASTER_PORT": str(free_port()),
        "ANYEP_DEVICE": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    finished = run_program("-m", "anyep.run_as_deep_ep", script, env=environment)
    assert finished.returncode == 0, finished.stderr
    first, *told = finished.stdout.splitlines()
    assert first == "from one rank"
    assert sorted(map(json.loads, told)) == [
        [rank, 2, 2, 40 + rank, "torch.bfloat16", [2.0] * 3] for rank in range(2)
    ]


def free_port() -> int:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port


def test_rates_of_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the machine's tools tell them; 0 where there are no such tools."""
    from anyep import link_rates

    functions = (link_rates.nvlink_gbs, link_rates.rdma_gbs, link_rates.has_fast_atomics)
    monkeypatch.setenv("PATH", str(tmp_path))
    for function in functions:
        function.cache_clear()
    assert (envs.get_nvlink_gbs(), envs.get_rdma_gbs(), envs.check_fast_rdma_atomic_support()) == (
        0,
        0,
        False,
    )
    for name, text in {
        "nvidia-smi": "GPU 0: H\\n Link 0: 26 GB/s\\n Link 1: 24 GB/s\\nGPU 1: H\\n Link 0: 26 GB/s\\n",
        "ibstat": "CA 'mlx5_0'\\n CA type: MT4129\\n Port 1:\\n  Rate: 400\\n"
        "CA 'mlx5_1'\\n CA type: MT4131\\n Port 1:\\n  Rate: 800\\n",
    }.items():
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\nprintf "{text}"\n')
        tool.chmod(0o755)
    for function in functions:
        function.cache_clear()
    assert (envs.get_nvlink_gbs(), envs.get_nvlink_gbs(1.0)) == (45, 50)
    assert (envs.get_rdma_gbs(), envs.check_fast_rdma_atomic_support()) == (50, False)
    monkeypatch.setenv("EP_NIC_NAME", "mlx5_1")
    assert (envs.get_rdma_gbs(), envs.check_fast_rdma_atomic_support()) == (100, True)
    assert envs.get_rdma_gbs("mlx5_7") == 0
    for function in functions:
        function.cache_clear()


def no_communicator(context: RankContext) -> None:
    with pytest.raises(NotSupported, match="this group has no communicator of NCCL"):
        comm.get_nccl_comm_handle(context.group)
    with pytest.raises(NotSupported, match="makes no communicators of NCCL"):
        comm.get_nccl_comm_handle(context.group, force_new_comm=True)
    comm.destroy_all_managed_nccl_comm()


def test_communicators() -> None:
    get_world(1).run(no_communicator)


# Times


def test_times_of_calls() -> None:
    calls: list[str] = []

    def call() -> None:
        calls.append("call")
        time.sleep(0.002)

    average, least, most = testing.bench(
        call, num_warmups=2, num_tests=4, post_fn=lambda: calls.append("after")
    )
    assert calls == ["call"] * 2 + ["call", "after"] * 4
    assert 0.002 <= least <= average <= most


def test_times_of_kernels_are_those_of_calls_on_the_cpu(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arrivals: list[int] = []
    found = testing.bench_kineto(
        lambda: time.sleep(0.003),
        ("dispatch_impl", "combine_impl"),
        num_tests=3,
        trace_path=str(trace),
        barrier_comm_profiling=True,
        barrier=lambda: arrivals.append(1),
    )
    assert len(found) == 2
    assert all(0.003 <= seconds < 1 for seconds in found)
    assert len(arrivals) == 3
    assert json.loads(trace.read_text())["traceEvents"] is not None
    alone = testing.bench_kineto(lambda: None, "dispatch_impl", num_tests=2)
    assert isinstance(alone, float)
    periods = testing.bench_kineto(lambda: None, "dispatch_impl", num_tests=2, num_kernels_per_period=3)
    assert len(periods) == 3


def test_too_few_measurements() -> None:
    with pytest.raises(InvalidCall, match="num_tests is 1: it must be at least 2"):
        testing.bench(lambda: None, num_warmups=0, num_tests=1)
    with pytest.raises(InvalidCall, match="num_tests is 0: it must be at least 1"):
        testing.bench_kineto(lambda: None, "kernel", num_tests=0)
    with pytest.raises(InvalidCall, match="num_kernels_per_period is 0: it must be at least 1"):
        testing.bench_kineto(lambda: None, "kernel", num_kernels_per_period=0)


def test_averages_of_periods() -> None:
    assert testing._averages([1, 10, 3, 30], 1, 0.0) == 11
    assert testing._averages([1, 10, 3, 30], 2, 0.0) == [2, 20]
    assert testing._averages([], 2, 5.0) == [5, 5]


def test_events_are_where_version_2_has_them() -> None:
    from deep_ep.utils.event import EventHandle, EventOverlap

    assert (EventHandle, EventOverlap) == (deep_ep.EventHandle, deep_ep.EventOverlap)
