"""Configs that ask for more SMs than a rank has, on a GPU that ranks share: a rank's share serves them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anyep import Config
from anyep.api.buffer import Buffer
from tests.support.cases import Case, buffer_for, run_case
from tests.support.gpu import NEEDS_GPU
from tests.support.gpu_oracle import Shape, Tally, Truth, experts
from tests.support.gpu_pairs import layout_of
from tests.support.gpu_scenarios import device_of, new_buffer
from tests.support.places import Place
from tests.support.share_checks import (
    check_handles_and_configs,
    check_like_an_intranode_test,
    check_mixed_configs,
    check_what_is_said,
)
from tests.support.world import RankContext

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]

NUM_RANKS = 8
PLACE = Place("cuda", NUM_RANKS)
WINDOW_BYTES: tuple[int | None, ...] = (None, 0, 1 << 16)
CONFIGS = {"24 SMs": Config(24, 6, 64), "tiny rings": Config(24, 1, 2), "128 channels": Config(256, 2, 4)}
TIMEOUT_S = 200.0
CASES = {
    "counted": Case((200,) * NUM_RANKS, num_topk=4, combine_weights=True, num_biases=1),
    "uneven": Case((300, 0, 7, 150, 1, 90, 33, 64), num_topk=4, combine_from="other memory"),
    "worst": Case((60,) * NUM_RANKS, num_topk=4, worst=True, combine_weights=True),
    "asynchronous worst": Case((60,) * NUM_RANKS, num_topk=4, worst=True, run_async=True),
    "fp8": Case((100,) * NUM_RANKS, dtype="float8_e4m3fn", num_scales=4, strided_scales=True, run_async=True),
    "all to one rank": Case((80,) * NUM_RANKS, routing="one rank", dtype="float32"),
    "real rows": Case((100,) * NUM_RANKS, hidden=7168, num_topk=8, local_experts=8, num_biases=2),
}


# Rings of 128 channels for real rows would need a larger Buffer.
@pytest.mark.parametrize("num_window_bytes", WINDOW_BYTES)
@pytest.mark.parametrize(
    ("name", "config"), [pair for pair in product(CASES, CONFIGS) if pair != ("real rows", "128 channels")]
)
def test_case(name: str, config: str, num_window_bytes: int | None) -> None:
    case = replace(CASES[name], config=CONFIGS[config], num_window_bytes=num_window_bytes)
    PLACE.world().run(run_case, case, timeout=TIMEOUT_S)


def mix(context: RankContext, num_window_bytes: int | None) -> None:
    buffer = buffer_for(context, num_window_bytes)
    check_handles_and_configs(context, buffer, Config(24))
    configs = [Config(24), Config(4, 2, 4), Config(16, 6, 64), Config(60, 1, 2), Config(18, 3, 9), Config(24)]
    case = Case((70, 20, 0, 90, 33, 41, 5, 64), num_topk=4, combine_weights=True)
    check_mixed_configs(context, buffer, configs, case)


@pytest.mark.parametrize("num_window_bytes", WINDOW_BYTES)
def test_mixed_configs(num_window_bytes: int | None) -> None:
    PLACE.world().run(mix, num_window_bytes, timeout=TIMEOUT_S)


def try_all_ways(context: RankContext, num_window_bytes: int | None) -> None:
    tuned = [Config(24, chunk, 256) for chunk in range(4, 33, 4)]
    with Buffer(context.group, 1 << 29, device="cuda", num_window_bytes=num_window_bytes) as buffer:
        check_like_an_intranode_test(context, buffer, Config(24, 8, 256), 4096, 7168, 8, 256, tuned)


@pytest.mark.parametrize("num_window_bytes", [None, 0])
def test_like_an_intranode_test(num_window_bytes: int | None) -> None:
    """4096 tokens per rank of 7168 values, 8 of 256 experts each, 24 SMs: as DeepEP's own test."""
    PLACE.world().run(try_all_ways, num_window_bytes, timeout=TIMEOUT_S)


def say_once(context: RankContext) -> None:
    with new_buffer(context) as buffer:
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        check_what_is_said(buffer, num_sms // context.num_ranks // 2 * 2)


@pytest.mark.parametrize("num_ranks", [2, NUM_RANKS])
def test_it_is_said_once(num_ranks: int) -> None:
    Place("cuda", num_ranks).world().run(say_once, timeout=TIMEOUT_S)


def replay(context: RankContext, num_window_bytes: int | None) -> None:
    """A graph of a cached dispatch and a combine with 12 channels: the rows change from replay to replay."""
    buffer = buffer_for(context, num_window_bytes)
    device, shape, config = device_of(buffer), Shape(context.num_ranks, 64), Config(24, 2, 4)
    truths = [Truth(shape, 7, context.rank, device, rows_seed=index) for index in range(10)]
    x = truths[0].x.clone()
    layout: dict[str, Any] = layout_of(buffer, truths[0].topk_idx, shape.num_experts) | {"config": config}
    *_, handle, _ = buffer.dispatch(x, **layout)
    assert handle is not None

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        recv, *_ = buffer.dispatch(x, handle=handle, config=config)
        assert isinstance(recv, torch.Tensor)
        return recv, buffer.combine(experts(recv, context.rank), handle, config=config)[0]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        recv, combined = run()
    tally = Tally(device)
    for number in range(50):
        truth = truths[number % len(truths)]
        x.copy_(truth.x)
        recv.fill_(torch.nan)
        combined.fill_(torch.nan)
        graph.replay()
        tally.compare(number, (recv, truth.rows), (combined, truth.combined))
    tally.check("replays")
    torch.cuda.synchronize()
    dist.barrier(group=context.group)
    del graph, recv, combined


@pytest.mark.parametrize("num_window_bytes", [None, 0])
def test_a_graph(num_window_bytes: int | None) -> None:
    PLACE.world().run(replay, num_window_bytes, timeout=TIMEOUT_S)
