"""An exception inside `with Buffer(...)`: peers that wait for the rank hear its type and its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from anyep import AnyEPError, Config
from anyep.api.buffer import Buffer
from tests.support.places import Place, buffer_device, tensor_device
from tests.support.world import RankContext, get_world

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


def normal_call(buffer: Buffer) -> None:
    device = tensor_device()
    topk_idx = (torch.arange(NUM_TOKENS, device=device) % buffer.group_size)[:, None]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, buffer.group_size)
    x = torch.ones(NUM_TOKENS, HIDDEN, device=device)
    buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, config=FEW_SMS)


def low_latency_call(buffer: Buffer) -> None:
    device = tensor_device()
    topk_idx = (torch.arange(NUM_TOKENS, device=device) % buffer.group_size)[:, None]
    x = torch.ones(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    buffer.low_latency_dispatch(x, topk_idx, NUM_TOKENS, buffer.group_size, use_fp8=False)
    if device == "cuda":
        torch.cuda.synchronize()


def leave(context: RankContext, mode: str, error: str) -> str:
    """Rank 1 leaves its block by an error; the others make calls until they hear of it."""
    ranks = context.num_ranks
    low_latency = mode == "low latency"
    num_bytes = Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, ranks, ranks) if low_latency else 0
    call = low_latency_call if low_latency else normal_call
    try:
        with Buffer(context.group, 1 << 20, num_bytes, low_latency, device=buffer_device()) as buffer:
            call(buffer)
            if context.rank == 1:
                raise ERRORS[error][0]()
            for _ in range(4):
                call(buffer)
    except AnyEPError as heard:
        return f"{type(heard).__name__}: {heard}"
    except BaseException as raised:
        assert context.rank == 1
        return type(raised).__name__
    return "nothing was raised"


@pytest.mark.parametrize(
    ("place", "mode", "error"),
    [
        *(Place("cpu", 3).param("normal", error) for error in ERRORS),
        Place("cpu", 3).param("low latency", "text"),
        *(Place("simulated", 2).param(mode, "text") for mode in MODES),
        *(Place("cuda", 4).param(mode, "text") for mode in MODES),
    ],
)
def test_peers_hear_the_error(place: Place, mode: str, error: str) -> None:
    outcomes = place.world().run(leave, mode, error)
    text = ERRORS[error][1]
    assert outcomes[1] == text.split(":")[0]
    for rank in set(range(place.num_ranks)) - {1}:
        pattern = (
            rf"PeerLost: rank 1 \(pid \d+\) left its `with Buffer\(\.\.\.\)` block by {text},"
            rf" while rank {rank} waited for its \w+"
        )
        assert re.match(pattern, outcomes[rank]), outcomes


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
            # The second call: the notify message of the first one may have come.
            for _ in range(2):
                normal_call(buffer)
    except AnyEPError as heard:
        return f"{state}; {heard}"
    except ValueError:
        return ""
    return "nothing was raised"


def test_the_first_reason_counts() -> None:
    for heard in get_world(3).run(leave_with_a_call_under_way)[::2]:
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
        normal_call(buffer)
        return [status.state for status in buffer.status()]


def test_a_forked_child_says_nothing() -> None:
    for states in get_world(3).run(leave_in_a_child):
        assert "left" not in states
