"""What may go wrong between nodes on GPUs, as data: what ranks call, and what each of them must hear.

Run on the simulated GPU and on a real one, between two nodes of two ranks. `attempt`, `Scenario` and when a
host hears of what kernels found are those of `gpu_scenarios`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from anyep import Config
from anyep.api.buffer import Buffer
from tests.support.cases import NVL_BYTES, POISON, RDMA_BYTES, Case, check_case, poison_windows
from tests.support.gpu_scenarios import Scenario, attempt, device_of
from tests.support.world import RankContext

NUM_RANKS, RANKS_PER_NODE = 4, 2
TOKENS, HIDDEN, TOPK, LOCAL_EXPERTS = 6, 32, 2, 2
CONFIG = Config(4)
GOOD = Case((TOKENS, 0, 9, 3), hidden=HIDDEN, ranks_per_node=RANKS_PER_NODE)
NUM_PARTS = 10
"""Of a handle."""


def new_node_buffer(context: RankContext, num_window_bytes: int | None = None) -> Buffer:
    return Buffer(
        context.group,
        NVL_BYTES,
        RDMA_BYTES,
        device="cuda",
        ranks_per_node=RANKS_PER_NODE,
        num_window_bytes=num_window_bytes,
    )


def arguments_of(buffer: Buffer, shift: int = 0) -> dict[str, Any]:
    """Every token goes to two ranks; which ones depends on `shift`."""
    device, num_experts = device_of(buffer), LOCAL_EXPERTS * buffer.group_size
    tokens = torch.arange(TOKENS, dtype=torch.int64, device="cpu")[:, None]
    experts = torch.tensor([[0, 3]], dtype=torch.int64, device="cpu")
    topk_idx = ((tokens * (1 + shift) + experts + buffer.rank) % num_experts).to(device)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    generator = torch.Generator().manual_seed(buffer.rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float32, device="cpu")
    return {
        "x": x.bfloat16().to(device),
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(TOKENS, TOPK, dtype=torch.float32, device=device),
        "config": CONFIG,
    }


def dispatch(buffer: Buffer, shift: int = 0) -> tuple[Any, ...]:
    return buffer.dispatch(**arguments_of(buffer, shift))


def finish(context: RankContext, buffer: Buffer) -> None:
    """What comes after the wrong call is right."""
    check_case(context, GOOD, buffer, device_of(buffer))
    buffer.destroy()


def count_wrongly(context: RankContext, worst: int) -> list[str]:
    """Rank 1 passes other counts by node than its mask says."""
    buffer = new_node_buffer(context)
    arguments = arguments_of(buffer)
    if context.rank == 1:
        arguments["num_tokens_per_rdma_rank"] = arguments["num_tokens_per_rdma_rank"] + 1
    messages = [attempt(buffer.dispatch, **arguments, num_worst_tokens=worst), attempt(dispatch, buffer)]
    finish(context, buffer)
    return messages


def heard_of_counts(worst: int) -> Callable[[int], list[str]]:
    def patterns(rank: int) -> list[str]:
        heard = (
            "InvalidCall: num_tokens_per_rdma_rank and is_token_in_rank disagree about node 0: pass both .*"
            if rank == 1
            else r"Disagreement: rank 1 refused its dispatch \(call 1\): its counts contradict its choices .*"
        )
        return ["fine", heard] if worst else [heard, "fine"]

    return patterns


def count_for_other_nodes(context: RankContext) -> list[str]:
    """Rank 2 passes counts by node of another shape, or of another type; then none."""
    buffer = new_node_buffer(context)
    messages = []
    for change in (lambda counts: counts[:1], lambda counts: counts.long(), lambda counts: None):
        arguments = arguments_of(buffer)
        if context.rank == 2:
            arguments["num_tokens_per_rdma_rank"] = change(arguments["num_tokens_per_rdma_rank"])
        messages.append(attempt(buffer.dispatch, **arguments))
    finish(context, buffer)
    return messages


def heard_of_shapes(rank: int) -> list[str]:
    if rank == 2:
        return [
            r"InvalidCall: num_tokens_per_rdma_rank has shape \[1\]: it must be \[2\]",
            "InvalidCall: num_tokens_per_rdma_rank must be the int32 tensor of get_dispatch_layout",
            "fine",
        ]
    return [*["Disagreement: rank 2 refused its dispatch .*"] * 2, "fine"]


def call_with_another_handle(
    context: RankContext, function: str, on_rank: int, part: int | None
) -> list[str]:
    """One rank has the handle of another dispatch, or one of which a number in one part is different."""
    buffer = new_node_buffer(context)
    arguments = arguments_of(buffer)
    rows, *_, handle, _ = buffer.dispatch(**arguments)
    other_rows, *_, other_handle, _ = dispatch(buffer, shift=1)
    if context.rank == on_rank:
        if part is None:
            rows, handle = other_rows, other_handle
        else:
            changed = handle[part].clone()
            flat = changed.view(-1)
            flat[-1] = ~flat[-1] if changed.dtype == torch.bool else flat[-1] + 1
            handle = (*handle[:part], changed, *handle[part + 1 :])
    if function == "combine":
        messages = [attempt(buffer.combine, rows, handle, config=CONFIG)]
    else:
        messages = [attempt(buffer.dispatch, arguments["x"], handle=handle, config=CONFIG)]
    messages += [attempt(dispatch, buffer) for _ in range(2)]
    finish(context, buffer)
    return messages


OTHER_HANDLE = (
    r"Disagreement: the ranks disagree in call 3 about the routing in the handle: the rows that rank \d sent"
    r" to rank \d are of other tokens, or in other channels, .*"
)


def other_handle(function: str, on_rank: int, part: int | None = None) -> Scenario:
    """The other ranks may hear of it in another order than the one that has the handle."""
    return Scenario(
        call_with_another_handle, (function, on_rank, part), lambda rank: ["fine", OTHER_HANDLE, "fine"]
    )


def send_too_much(context: RankContext, limit: int) -> list[str]:
    """Rank 1 allows for fewer rows than arrive there, or than it relays."""
    buffer = new_node_buffer(context)
    arguments = arguments_of(buffer) | {"num_worst_tokens": limit if context.rank == 1 else 99}
    poison_windows(buffer)
    rows, ids, *_ = buffer.dispatch(**arguments)
    assert (rows.view(torch.uint8) == POISON).all(), "something was written"
    assert (ids[ids != -1].view(torch.uint8) == POISON).all(), "something was written"
    messages = [attempt(dispatch, buffer) for _ in range(2)]
    finish(context, buffer)
    return messages


def relay_too_much(context: RankContext) -> list[str]:
    """All tokens of ranks 1 and 3 go to rank 0, so rank 1 relays them all, and receives nothing."""
    buffer = new_node_buffer(context)
    device = device_of(buffer)
    choice = torch.zeros(TOKENS, 1, dtype=torch.int64, device=device)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(choice, 2 * NUM_RANKS)
    messages = [
        attempt(
            buffer.dispatch,
            torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device),
            None,
            *(per_rank, per_node, in_rank, per_expert, choice),
            torch.ones(TOKENS, 1, dtype=torch.float32, device=device),
            num_worst_tokens=worst if context.rank == 1 else 99,
            config=CONFIG,
        )
        for worst in (2 * TOKENS - 1, 2 * TOKENS)
    ]
    messages.append(attempt(dispatch, buffer))
    finish(context, buffer)
    return messages


def too_many(limit: int) -> str:
    return (
        f"InvalidCall: num_worst_tokens is {limit} on rank 1, but more rows would arrive there, or it would"
        " relay more: nothing was sent; pass at least the largest number of rows that can arrive at any rank"
        " of the node"
    )


def lack_windows(context: RankContext, of_rank_2: int) -> list[str]:
    """Rank 2 has little room for windows, or none; all hear of it, whichever call they make."""
    buffer = new_node_buffer(context, num_window_bytes=of_rank_2)
    arguments = arguments_of(buffer)
    messages = [attempt(buffer.dispatch, **arguments)]
    messages.append(attempt(buffer.dispatch, **arguments, num_worst_tokens=50))
    messages.append(attempt(buffer.get_dispatch_layout, arguments["topk_idx"], 2 * NUM_RANKS))
    messages.append(attempt(buffer.dispatch, **arguments))
    buffer.destroy()
    return messages


NO_WINDOW = (
    r"InvalidCall: {} has no window for its rows in dispatch \(call {}\): between nodes rows on GPUs go to"
    " windows only, and nothing was sent; pass a larger num_window_bytes, or free results of earlier"
    r" dispatches \(there are no windows with heap='host'\)"
)


def fail_before_rows(context: RankContext) -> list[str]:
    """Rank 1 fails when all have its counts and wait for its rows: through rings, or at the end."""
    from anyep.backends.cuda.node_call import GpuNodeCall

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("the experts are on fire")

    buffer = new_node_buffer(context)
    dispatch(buffer)
    usual = GpuNodeCall.send_rows
    if context.rank == 1:
        GpuNodeCall.send_rows = fail  # type: ignore[method-assign]
    try:
        messages = [attempt(dispatch, buffer), attempt(dispatch, buffer)]
    finally:
        GpuNodeCall.send_rows = usual  # type: ignore[method-assign]
    buffer.destroy()
    return messages


def heard_of_failure(rank: int) -> list[str]:
    failed = "ValueError: the experts are on fire"
    if rank == 1:
        return [failed, f"BufferBroken: .*{failed}.*"]
    # In rings for rows of the other node, or at the end for the ranks of their own; of those, one may have
    # failed before, for this very reason.
    waited = r"failed while rank [023] waited for .* in dispatch \(call 2\), phase (rings|receive)"
    return ["fine", rf"PeerLost: (rank [023] .*: )?rank 1 \(pid \d+\) {waited}: .*{failed}"]


WITHOUT_WINDOWS = (
    "InvalidCall: between nodes rows on GPUs go to windows, and this Buffer has none: leave out"
    " num_window_bytes=0 and heap='host'"
)


def heard_of_windows(rank: int) -> list[str]:
    # The second dispatch does not wait. A later call would raise its error, if it had not its own.
    return [NO_WINDOW.format("a rank", 1), "fine", "fine", NO_WINDOW.format("a rank", 3)]


SCENARIOS = {
    "wrong counts by node": Scenario(count_wrongly, (0,), heard_of_counts(0)),
    "wrong counts by node in the worst case": Scenario(count_wrongly, (99,), heard_of_counts(99)),
    "counts of other nodes": Scenario(count_for_other_nodes, (), heard_of_shapes),
    "a cached dispatch with a handle of another dispatch": other_handle("cached dispatch", 1),
    "a combine with a handle of another dispatch": other_handle("combine", 2),
    **{
        f"a combine with another part {part} of a handle": other_handle("combine", part % NUM_RANKS, part)
        for part in range(NUM_PARTS)
    },
    "more rows than the worst case allows": Scenario(
        send_too_much, (3,), lambda rank: [re.escape(too_many(3)), "fine"]
    ),
    "more rows to relay than the worst case allows": Scenario(
        relay_too_much, (), lambda rank: ["fine", re.escape(too_many(2 * TOKENS - 1)), "fine"]
    ),
    "no windows": Scenario(
        lack_windows, (0,), lambda rank: [WITHOUT_WINDOWS, WITHOUT_WINDOWS, "fine", WITHOUT_WINDOWS]
    ),
    "a failure before rows are sent": Scenario(fail_before_rows, (), heard_of_failure),
    "small windows": Scenario(lack_windows, (256,), heard_of_windows),
}
