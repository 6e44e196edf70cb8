"""`ElasticBuffer` between ranks that share a GPU: what the CPU gives, bit for bit, at sizes of real layers,
and in CUDA graphs whose routing changes from replay to replay."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.support.gpu import NEEDS_GPU
from tests.support.gpu_elastic import (
    Layer,
    Results,
    Shape,
    Way,
    assert_same_results,
    inputs_of,
    new_buffers,
    run_layer,
)
from tests.support.places import Place, tensor_device
from tests.support.world import RankContext, World

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]

TIMEOUT_S = 400.0
NUM_REPLAYS = 60
SHAPES = {
    "a small layer": Shape(num_tokens=33, hidden=256, num_topk=4, local_experts=4),
    "many experts": Shape(num_tokens=500, hidden=1024, num_topk=8, local_experts=32, alignment=128),
    "wide rows": Shape(num_tokens=300, hidden=7168, num_topk=8, local_experts=8, alignment=16),
    "FP8": Shape(num_tokens=300, hidden=2048, num_topk=6, local_experts=8, alignment=128, num_scales=16),
    "through rings": Shape(num_tokens=300, hidden=512, num_topk=6, local_experts=4, num_window_bytes=0),
}


@pytest.fixture(scope="module", params=[1, 2, 4, 8])
def world(request: pytest.FixtureRequest) -> World:
    """All tests with so many ranks, before the next ones: to start them takes longer than to use them."""
    return Place("cuda", request.param).world()


def compare_with_the_cpu(context: RankContext, shape: Shape) -> None:
    """Every way to call a layer, each with another routing."""
    gpu, cpu = new_buffers(context, shape)
    for seed, (expands, waits, run_async) in enumerate(product((False, True), repeat=3)):
        way = Way(expands, waits, run_async, has_column_major_scales=seed % 2 == 0)
        given = inputs_of(shape, context, seed)
        found = run_layer(gpu, tuple(part.to(tensor_device()) for part in given), shape, way)
        assert_same_results(found, run_layer(cpu, given, shape, way._replace(run_async=False)), shape, way)
        del found
    gpu.destroy()
    cpu.destroy()


@pytest.mark.parametrize("name", SHAPES)
def test_what_the_cpu_gives(world: World, name: str) -> None:
    world.run(compare_with_the_cpu, SHAPES[name], timeout=TIMEOUT_S)


def capture(work: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
    """A graph of what `work` does."""
    # Kernels are compiled and loaded before.
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = work()
    return graph.replay, results


def replay_with_other_routings(context: RankContext, shape: Shape, way: Way, num_replays: int) -> None:
    """Calls outside the graph come in between."""
    gpu, cpu = new_buffers(context, shape)
    inputs = [inputs_of(shape, context, seed) for seed in range(12)]
    truths = [run_layer(cpu, given, shape, way._replace(run_async=False)) for given in inputs]
    layer = Layer(gpu, inputs[0], shape, way, capture)
    chance = random.Random(1)
    for number in range(num_replays):
        index = chance.randrange(len(inputs))
        assert_same_results(layer.replay(inputs[index]), truths[index], shape, way)
        if number % 10 == 9:
            given = tuple(part.to(tensor_device()) for part in inputs[index])
            found = run_layer(gpu, given, shape, way._replace(waits=True))
            assert_same_results(found, truths[index], shape, way)
            del found
    torch.cuda.synchronize()
    dist.barrier(group=context.group)
    del layer
    gpu.destroy()
    cpu.destroy()


@pytest.mark.parametrize("run_async", [False, True])
@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("name", ["many experts", "FP8", "through rings"])
def test_a_graph_with_other_routings(world: World, name: str, expands: bool, run_async: bool) -> None:
    way = Way(expands, waits=False, run_async=run_async)
    world.run(replay_with_other_routings, SHAPES[name], way, NUM_REPLAYS, timeout=TIMEOUT_S)
