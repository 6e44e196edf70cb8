"""What stands on a Buffer works on a GPU as on the CPU: autograd, the layer, and clients of deep_ep."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.compat import test_deep_ep_clients
from tests.layers import test_autograd, test_nn
from tests.support.gpu import NEEDS_GPU, gpu_world, prepare_rank
from tests.support.world import RankContext

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]
TIMEOUT_S = 180.0


def gradients(context: RankContext) -> None:
    prepare_rank()
    test_autograd.check_against_dense(context, None, "cuda")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_are_those_of_a_dense_computation(num_ranks: int) -> None:
    gpu_world(num_ranks).run(gradients, timeout=TIMEOUT_S)


def layer(context: RankContext, num_groups: int, topk_groups: int) -> None:
    prepare_rank()
    test_nn.check_layer(context, num_groups, topk_groups, "cuda")


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_layer_is_that_of_one_process(num_ranks: int, groups: tuple[int, int]) -> None:
    gpu_world(num_ranks).run(layer, *groups, timeout=TIMEOUT_S)


def decode(context: RankContext) -> int:
    prepare_rank()
    return test_nn.check_decode(context, "cuda")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_decode(num_ranks: int) -> None:
    outcomes = gpu_world(num_ranks).run(decode, timeout=TIMEOUT_S)
    assert outcomes == list(test_nn.TOKENS[:num_ranks])


def train(context: RankContext, move_saved: bool) -> object:
    prepare_rank()
    return test_deep_ep_clients.train(context, move_saved, "cuda")


@pytest.mark.parametrize("move_saved", [False, True])
def test_handles_of_deep_ep_survive_autograd(move_saved: bool) -> None:
    outcomes = gpu_world(3).run(train, move_saved, timeout=TIMEOUT_S)
    test_deep_ep_clients.check_trained(outcomes)
