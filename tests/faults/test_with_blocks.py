"""An exception inside `with Buffer(...)`: peers that wait for the rank hear its type and its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from anyep import AnyEPError, Config
from anyep.buffer import Buffer
from tests.support.gpu import NEEDS_GPU, new_gpu_world
from tests.support.world import RankContext, World

HIDDEN, NUM_TOKENS = 256, 4
FEW_SMS = Config(4)
MODES = ("normal", "low latency")


class Strange(Exception):
    """It cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "text": (partial(ValueError, "boom"), "ValueError: boom"),
    "no text": (KeyboardInterrupt, "KeyboardInterrupt"),
    "exit": (partial(SystemExit, 7), "SystemExit: 7"),
    "lines": (partial(RuntimeError, "first line\n  second line"), "RuntimeError: first line second line"),
    "strange": (Strange, r"Strange: \(its text is not available\)"),
    "surrogates": (partial(OSError, "no \udcff"), r"OSError: no \?"),
    "long": (partial(ValueError, "x" * 10_000), "ValueError: x{380,400}"),
}


def prepare(context: RankContext, device: str) -> None:
    if device == "simulated":
        from tests.support.simulated_gpu import use_simulated_gpu

        use_simulated_gpu()
    elif device == "cuda":
        torch.cuda.set_device(0)


def normal_call(buffer: Buffer, device: str) -> None:
    topk_idx = (torch.arange(NUM_TOKENS, device=device) % buffer.group_size)[:, None]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, buffer.group_size)
    x = torch.ones(NUM_TOKENS, HIDDEN, device=device)
    buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, config=FEW_SMS)


def low_latency_call(buffer: Buffer, device: str) -> None:
    topk_idx = (torch.arange(NUM_TOKENS, device=device) % buffer.group_size)[:, None]
    x = torch.ones(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    buffer.low_latency_dispatch(x, topk_idx, NUM_TOKENS, buffer.group_size, use_fp8=False)
    if device == "cuda":
        torch.cuda.synchronize()


def leave(context: RankContext, device: str, mode: str, error: str) -> str:
    """Rank 1 leaves its block by an error; the others make calls until they hear of it."""
    ranks = context.num_ranks
    on_device = "cpu" if device == "cpu" else "cuda"
    tensors_on = "cuda" if device == "cuda" else "cpu"
    low_latency = mode == "low latency"
    num_bytes = Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, ranks, ranks) if low_latency else 0
    call = low_latency_call if low_latency else normal_call
    try:
        with Buffer(context.group, 1 << 20, num_bytes, low_latency, device=on_device) as buffer:
            call(buffer, tensors_on)
            if context.rank == 1:
                raise ERRORS[error][0]()
            for _ in range(4):
                call(buffer, tensors_on)
    except AnyEPError as heard:
        return f"{type(heard).__name__}: {heard}"
    except BaseException as raised:
        assert context.rank == 1
        return type(raised).__name__
    return "nothing was raised"


def check_who_hears(world: World, device: str, mode: str, error: str) -> None:
    outcomes = world.run(leave, device, mode, error)
    text = ERRORS[error][1]
    assert outcomes[1] == text.split(":")[0]
    for rank in (0, 2):
        pattern = (
            rf"PeerLost: rank 1 \(pid \d+\) left its `with Buffer\(\.\.\.\)` block by {text},"
            rf" while rank {rank} waited for its \w+"
        )
        assert re.match(pattern, outcomes[rank]), outcomes


@pytest.fixture(scope="module")
def cpu() -> Iterator[World]:
    with World(3) as world:
        yield world


@pytest.fixture(scope="module")
def simulated_gpu() -> Iterator[World]:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'anyep[cuda]'")
    with World(3) as world:
        world.run(prepare, "simulated")
        yield world


@pytest.fixture(scope="module")
def gpu() -> Iterator[World]:
    with new_gpu_world(3) as world:
        world.run(prepare, "cuda")
        yield world


@pytest.mark.parametrize("error", ERRORS)
def test_any_error(cpu: World, error: str) -> None:
    check_who_hears(cpu, "cpu", "normal", error)


def test_low_latency(cpu: World) -> None:
    check_who_hears(cpu, "cpu", "low latency", "text")


@pytest.mark.parametrize("mode", MODES)
def test_on_a_simulated_gpu(simulated_gpu: World, mode: str) -> None:
    check_who_hears(simulated_gpu, "simulated", mode, "text")


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=NEEDS_GPU) for mode in MODES])
def test_on_a_gpu(gpu: World, mode: str) -> None:
    check_who_hears(gpu, "cuda", mode, "text")


def leave_with_a_call_under_way(context: RankContext) -> str:
    """What the error ends beside the program is no reason of its own: the peers hear the first one."""
    try:
        with Buffer(context.group, 1 << 20, device="cpu") as buffer:
            if context.rank == 1:
                topk_idx = torch.zeros(NUM_TOKENS, 1, dtype=torch.int64)
                per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, context.num_ranks)
                x, weights = torch.ones(NUM_TOKENS, HIDDEN), torch.ones(NUM_TOKENS, 1)
                buffer.dispatch(
                    x,
                    None,
                    per_rank,
                    None,
                    in_rank,
                    per_expert,
                    topk_idx,
                    weights,
                    num_worst_tokens=99,
                    async_finish=True,
                )
                raise ValueError("boom")
            while buffer.status()[1].state == "alive":
                pass
            state = str(buffer.status()[1])
            # The second call: the letter of the first one may have come.
            for _ in range(2):
                normal_call(buffer, "cpu")
    except AnyEPError as heard:
        return f"{state}; {heard}"
    except ValueError:
        return ""
    return "nothing was raised"


def test_the_first_reason_counts(cpu: World) -> None:
    for heard in cpu.run(leave_with_a_call_under_way)[::2]:
        left = r"rank 1 \(pid \d+\) left its `with Buffer\(\.\.\.\)` block by ValueError: boom"
        assert re.match(rf"{left}; {left}, while|{left}; the ranks disagree", heard), heard


def leave_in_a_child(context: RankContext) -> Any:
    """A forked child leaves the block of its parent, which goes on."""
    import os

    with Buffer(context.group, 1 << 20, device="cpu") as buffer:
        child = os.fork()
        if child == 0:
            try:
                buffer.__exit__(SystemExit, SystemExit(0), None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        normal_call(buffer, "cpu")
        return [status.state for status in buffer.status()]


def test_a_forked_child_says_nothing(cpu: World) -> None:
    for states in cpu.run(leave_in_a_child):
        assert "left" not in states
