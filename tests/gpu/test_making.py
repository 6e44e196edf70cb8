"""Making a Buffer on GPUs: ranks that are lost meanwhile, and groups of NCCL."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from anyep import AnyEPError
from anyep.api.buffer import Buffer
from anyep.join.rendezvous import GroupRendezvous
from tests.support.gpu import NEEDS_GPU, new_gpu_world, prepare_rank
from tests.support.making import SOON_S, Outcome, die, struck
from tests.support.patience import scaled
from tests.support.world import RankContext, RankDied

pytestmark = NEEDS_GPU
TIMEOUT_S = 5


def make(context: RankContext, group: dist.ProcessGroup) -> str:
    try:
        Buffer(group, 1 << 20).destroy()
    except AnyEPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def make_until_it_fails(context: RankContext, lost: int, step: int, moment: str) -> Outcome:
    prepare_rank()
    os.environ["ANYEP_TIMEOUT_S"] = str(TIMEOUT_S)
    # The first use of a GPU takes long.
    torch.zeros(1, device="cuda")
    dist.barrier(group=context.group)
    if context.rank == lost and moment == "connecting":
        from anyep.backends.cuda.heap import SymmetricBlock

        SymmetricBlock.connect = lambda *_: die()  # type: ignore[method-assign]
    strikes = context.rank == lost and moment != "connecting"
    started = time.monotonic()
    with struck(step, moment, die) if strikes else nullcontext():
        error = make(context, context.group)
    return Outcome(error, time.monotonic() - started)


@pytest.mark.parametrize(
    ("step", "moment"),
    [
        *((1, "exchanging"), (4, "working"), (7, "exchanging"), (9, "working"), (12, "exchanging")),
        (8, "connecting"),
    ],
)
def test_a_killed_rank(step: int, moment: str) -> None:
    """Where a rank dies while torch opens the memory of all, the others wait for it in vain there first."""
    with new_gpu_world(3) as world:
        pid = world.pids[1]
        outcomes = world.gather(make_until_it_fails, 1, step, moment, timeout=120)
    assert isinstance(outcomes[1], RankDied)
    for rank in (0, 2):
        assert outcomes[rank].error == f"PeerLost: rank 1 (pid {pid}) died while the Buffer was being made"
        assert outcomes[rank].seconds < scaled(SOON_S) + (TIMEOUT_S if moment == "connecting" else 0)


def make_with_nccl(context: RankContext) -> str:
    prepare_rank()
    group = dist.new_group(backend="nccl")
    assert isinstance(group, dist.ProcessGroup)
    assert GroupRendezvous(group)._device.type == "cuda"
    try:
        return make(context, group)
    finally:
        dist.destroy_process_group(group)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_a_group_of_nccl() -> None:
    with new_gpu_world(1) as world:
        assert world.run(make_with_nccl, timeout=120) == ["nothing was raised"]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_a_group_of_nccl_with_one_gpu_for_several_ranks() -> None:
    with new_gpu_world(2) as world:
        for message in world.run(make_with_nccl, timeout=120):
            assert message.startswith("NotSupported: ranks 0 and 1 have the same GPU, but NCCL")
            assert "dist.new_group(backend='gloo')" in message


def make_with_both(context: RankContext) -> str:
    prepare_rank()
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert isinstance(group, dist.ProcessGroup)
    assert GroupRendezvous(group)._device.type == "cpu"
    return make(context, group)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_a_group_of_gloo_and_nccl() -> None:
    """Its Gloo half serves, so ranks may share a GPU."""
    with new_gpu_world(2) as world:
        assert world.run(make_with_both, timeout=120) == ["nothing was raised"] * 2
