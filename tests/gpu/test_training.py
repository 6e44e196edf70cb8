"""Training and copies of layers on a GPU that several ranks share; gradients go through Gloo."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.examples import test_training
from tests.layers import test_balance, test_layer_copies
from tests.support.gpu import NEEDS_GPU, gpu_world, prepare_rank
from tests.support.world import RankContext

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]
TIMEOUT_S = 240.0


def train(context: RankContext) -> tuple[list[float], test_training.State]:
    prepare_rank()
    return test_training.train(context, "ddp", "cuda")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parameters_are_those_of_one_process(num_ranks: int) -> None:
    answers = gpu_world(num_ranks).run(train, timeout=TIMEOUT_S)
    test_training.check_trained(answers, rtol=1e-3, atol=1e-5)


def copies(context: RankContext) -> None:
    prepare_rank()
    test_layer_copies.check_copies_in_training(context, "cuda")


def test_copies_share_their_buffer() -> None:
    gpu_world(2).run(copies, timeout=TIMEOUT_S)


def logits(context: RankContext) -> None:
    prepare_rank()
    test_balance.check_logits(context, "cuda")


def test_layer_returns_logits_when_asked() -> None:
    gpu_world(2).run(logits, timeout=TIMEOUT_S)
