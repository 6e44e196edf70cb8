"""Both modes under a default device of "cuda", which programs set, and a default dtype of bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from anyep.buffer import Buffer
from tests.layers import test_autograd, test_nn
from tests.support import cases, gpu_pairs, low_latency_cases
from tests.support.default_device_cases import NORMAL
from tests.support.gpu import NEEDS_GPU, new_gpu_world, prepare_rank, run_gpu_case
from tests.support.low_latency_cases import FORMATS
from tests.support.world import RankContext, World

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]
TIMEOUT_S = 200.0
COMBINES: tuple[dict[str, Any], ...] = (
    {"how": "in line"},
    {"how": "hook", "use_logfmt": True},
    {"how": "async", "zero_copy": True},
)


def use_cuda_by_default(context: RankContext) -> None:
    prepare_rank()
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with new_gpu_world(2) as fresh:
        fresh.run(use_cuda_by_default)
        yield fresh


@pytest.mark.parametrize("num_window_bytes", [None, 0])
@pytest.mark.parametrize("name", NORMAL)
def test_normal_mode(world: World, name: str, num_window_bytes: int | None) -> None:
    case = replace(NORMAL[name], tokens=(5, 7), num_window_bytes=num_window_bytes)
    world.run(run_gpu_case, case, timeout=TIMEOUT_S)


def test_pairs_of_all_kinds(world: World) -> None:
    world.run(gpu_pairs.soak, 200, 1 << 20, 5, timeout=TIMEOUT_S)


def run_low_latency(context: RankContext, device: str, case: low_latency_cases.Case) -> None:
    num_bytes = low_latency_cases.NVL_BYTES, low_latency_cases.RDMA_BYTES
    with Buffer(context.group, *num_bytes, low_latency_mode=True, device=device) as buffer:
        for seed in range(2):
            low_latency_cases.check_case(context.rank, replace(case, seed=seed), buffer, device=device)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("travel", FORMATS)
def test_low_latency_mode(world: World, travel: str, device: str) -> None:
    for more in COMBINES:
        case = low_latency_cases.Case((5, 7), hidden=512, travel=travel, **more)
        world.run(run_low_latency, device, case, timeout=TIMEOUT_S)


def devices_of_results(context: RankContext, device: str) -> set[str]:
    case = low_latency_cases.Case((5, 7))
    given = low_latency_cases.on(device, low_latency_cases.inputs_of(case)[context.rank])
    num_bytes = low_latency_cases.NVL_BYTES, low_latency_cases.RDMA_BYTES
    with Buffer(context.group, *num_bytes, low_latency_mode=True, device=device) as buffer:
        rows, counts, handle, *_ = buffer.low_latency_dispatch(
            given.x, given.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
        )
    return {part.device.type for part in (rows, counts, *handle) if isinstance(part, torch.Tensor)}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_results_are_on_the_device_of_the_buffer(world: World, device: str) -> None:
    assert world.run(devices_of_results, device, timeout=TIMEOUT_S) == [{device}] * 2


def test_a_buffer_on_the_cpu(world: World) -> None:
    world.run(cases.run_case, replace(NORMAL["plain"], tokens=(5, 7)), timeout=TIMEOUT_S)


def test_gradients(world: World) -> None:
    world.run(test_autograd.check_against_dense, None, "cuda", timeout=TIMEOUT_S)


def test_layer(world: World) -> None:
    world.run(test_nn.check_layer, 4, 2, "cuda", timeout=TIMEOUT_S)
    assert world.run(test_nn.check_decode, "cuda", timeout=TIMEOUT_S) == list(test_nn.TOKENS[:2])
