"""One case of low-latency dispatch and combine, as data: every rank makes all ranks' inputs from the seed,
runs the real thing, and compares what it got with the reference, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from anyep.api.buffer import Buffer
from tests.support import cases, low_latency_oracle, oracle
from tests.support.places import Place, buffer_device, tensor_device
from tests.support.slow_logfmt import slow_decode, slow_encode
from tests.support.world import RankContext

NVL_BYTES = 1 << 20
RDMA_BYTES = 1 << 25
FORMATS = ("bf16", "fp8", "fp8 rounded", "fp8 ue8m0")


@dataclass(frozen=True)
class Case:
    """What the ranks of one dispatch and combine pass; tokens, one number per rank."""

    tokens: tuple[int, ...]
    max_tokens: int = 8
    hidden: int = 128
    num_topk: int = 2
    local_experts: int = 2
    routing: str = "uniform"
    travel: str = "bf16"
    use_logfmt: bool = False
    zero_copy: bool = False
    in_place: bool = False
    how: str = "in line"
    """in line, async or hook."""
    stats: bool = True
    combines: int = 1
    delay_seed: int | None = None
    ranks_per_node: int | None = None
    network: str | None = None
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.local_experts

    @property
    def hidden_multiple(self) -> int:
        return 512 if self.travel == "fp8 ue8m0" else 128 if self.travel != "bf16" or self.use_logfmt else 8

    def at(self, place: Place) -> Case:
        """The same on the nodes of a place."""
        return replace(self, ranks_per_node=place.ranks_per_node, network=place.network)


def in_process_of(place: Place) -> pytest.MarkDecorator:
    """Lets tests of one place, of both modes, run in one process of pytest-xdist: they share its ranks."""
    return pytest.mark.xdist_group("hosts" if place.hosts else f"oracle of {place.device}-{place.num_ranks}")


def inputs_of(case: Case) -> list[low_latency_oracle.RankInput]:
    normal = cases.Case(
        case.tokens,
        case.hidden,
        num_topk=case.num_topk,
        local_experts=case.local_experts,
        routing=case.routing,
        seed=case.seed,
    )
    inputs = []
    for given in cases.inputs_of(normal):
        assert given.topk_idx is not None
        assert given.topk_weights is not None
        inputs.append(low_latency_oracle.RankInput(given.x, given.topk_idx, given.topk_weights))
    return inputs


def buffer_for(
    context: RankContext,
    enable_shrink: bool = False,
    ranks_per_node: int | None = None,
    network: str | None = None,
) -> Buffer:
    """A Buffer that lives as long as the pool, on the device of its ranks."""
    key = ("low-latency buffer", enable_shrink, ranks_per_node, network)
    if key not in context.keep:
        context.keep[key] = Buffer(
            context.group,
            NVL_BYTES,
            RDMA_BYTES,
            low_latency_mode=True,
            enable_shrink=enable_shrink,
            device=buffer_device(),
            ranks_per_node=ranks_per_node,
            network=network,
        )
    return context.keep[key]  # type: ignore[no-any-return]


def run_case(context: RankContext, case: Case, clean: bool = True) -> None:
    """Lay out the slots for the case, dispatch and combine; assert that every result has the right bits."""
    buffer = buffer_for(context, ranks_per_node=case.ranks_per_node, network=case.network)
    assert buffer.runtime is not None
    control = buffer.runtime.control
    control.between_steps = None
    if clean:
        buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    if case.delay_seed is not None:
        control.between_steps = cases.delays(case.delay_seed, context.rank)
    try:
        check_case(context.rank, case, buffer)
    finally:
        control.between_steps = None


def how_to_call(case: Case) -> dict[str, bool]:
    return {"async_finish": case.how == "async", "return_recv_hook": case.how == "hook"}


def finish(event: Any, hook: Any) -> None:
    event.current_stream_wait()
    if hook is not None:
        hook()


def dispatch_by_hook(buffer: Buffer, case: Case, rank: int) -> tuple[Any, Any, Any, Any]:
    """A dispatch that is sent: its rows, counts and handle, and the hook that receives them."""
    given = on(tensor_device(), inputs_of(case)[rank])
    received, counts, handle, event, hook = buffer.low_latency_dispatch(
        given.x, given.topk_idx, case.max_tokens, case.num_experts, use_fp8=False, return_recv_hook=True
    )
    assert event.event is None
    return received, counts, handle, hook


def on(device: str, given: low_latency_oracle.RankInput) -> low_latency_oracle.RankInput:
    return low_latency_oracle.RankInput(
        given.x.to(device), given.topk_idx.to(device), given.topk_weights.to(device)
    )


def check_case(
    rank: int, case: Case, buffer: Buffer, absent: frozenset[int] = frozenset(), device: str | None = None
) -> None:
    """Dispatch and combine, with tensors on the device of the rank unless told otherwise."""
    device = tensor_device() if device is None else device
    inputs = inputs_of(case)
    given = on(device, inputs[rank])
    expert_stats = wait_stats = None
    if case.stats:
        expert_stats = torch.full((case.local_experts,), 3, dtype=torch.int32, device=device)
        wait_stats = torch.zeros(case.num_ranks, dtype=torch.int64, device=device)
    received, counts, handle, event, hook = buffer.low_latency_dispatch(
        given.x,
        given.topk_idx,
        case.max_tokens,
        case.num_experts,
        expert_stats,
        wait_stats,
        use_fp8=case.travel != "bf16",
        round_scale=case.travel in ("fp8 rounded", "fp8 ue8m0"),
        use_ue8m0=case.travel == "fp8 ue8m0",
        **how_to_call(case),
    )
    assert (hook is not None) == (case.how == "hook")
    finish(event, hook)
    check_received(rank, case, inputs, received, counts, handle, absent)
    if expert_stats is not None and wait_stats is not None:
        assert torch.equal(expert_stats, counts + 3)
        assert (wait_stats >= 0).all()
    for again in range(case.combines):
        check_combine(rank, replace(case, seed=case.seed + again), inputs, buffer, handle, absent, device)


def check_received(
    rank: int,
    case: Case,
    inputs: list[low_latency_oracle.RankInput],
    received: Any,
    counts: torch.Tensor,
    handle: Any,
    absent: frozenset[int] = frozenset(),
) -> None:
    src_info, layout_range, *sizes = handle
    src_info, layout_range, counts = src_info.cpu(), layout_range.cpu(), counts.cpu()
    assert sizes == [case.max_tokens, case.hidden, case.num_experts]
    num_rows = case.num_ranks * case.max_tokens
    data, scales = received if isinstance(received, tuple) else (received, None)
    assert data.shape == (case.local_experts, num_rows, case.hidden)
    assert data.is_contiguous()
    if scales is not None:
        assert scales.stride(-2) == 1
        scales = scales.cpu()
    data = data.cpu()
    assert counts.dtype == torch.int32
    for local in range(case.local_experts):
        expected = low_latency_oracle.rows_of_expert(inputs, rank * case.local_experts + local, absent)
        count = len(expected.x)
        assert int(counts[local]) == count
        assert src_info[local, :count].tolist() == expected.source_token.tolist()
        begin = 0
        for source in range(case.num_ranks):
            from_source = int((expected.source_rank == source).sum())
            assert int(layout_range[local, source]) == begin << 32 | from_source
            begin += from_source
        if case.travel == "bf16":
            assert oracle.same_bits(data[local, :count], expected.x)
            continue
        right, right_scales = low_latency_oracle.fp8(expected.x, case.travel != "fp8")
        assert oracle.same_bits(data[local, :count], right)
        if case.travel == "fp8 ue8m0":
            right_scales = low_latency_oracle.ue8m0(right_scales)
        assert scales.shape == (case.local_experts, num_rows, right_scales.shape[-1])
        assert oracle.same_bits(scales[local, :count].contiguous(), right_scales.contiguous())


def outputs_of(case: Case, expert: int, num_rows: int) -> torch.Tensor:
    """What an expert makes of its rows: anything, as long as every rank knows it."""
    generator = torch.Generator().manual_seed(case.seed * 131 + expert)
    scale = 0.2 if expert % 2 else 3.0  # with LogFMT some blocks are encoded and some are not
    shape = (num_rows, case.hidden)
    rows = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return (rows * scale).bfloat16()


def through_logfmt(rows: torch.Tensor) -> torch.Tensor:
    """What arrives of rows that travel in LogFMT; the cast itself has tests of its own."""
    halves = rows.view(torch.int16).numpy().view(np.uint16)
    decoded = [slow_decode(slow_encode(row), len(row)) for row in halves]
    return torch.from_numpy(np.stack(decoded)) if decoded else torch.empty(rows.shape, device="cpu")


def check_combine(
    rank: int,
    case: Case,
    inputs: list[low_latency_oracle.RankInput],
    buffer: Buffer,
    handle: Any,
    absent: frozenset[int] = frozenset(),
    device: str | None = None,
) -> None:
    device = tensor_device() if device is None else device
    given = on(device, inputs[rank])
    sources = [
        low_latency_oracle.rows_of_expert(inputs, expert, absent) for expert in range(case.num_experts)
    ]
    outputs = [outputs_of(case, expert, len(rows.x)) for expert, rows in enumerate(sources)]
    if case.zero_copy:
        x = buffer.get_next_low_latency_combine_buffer(handle)
    else:
        num_rows = case.num_ranks * case.max_tokens
        shape = (case.local_experts, num_rows, case.hidden)
        x = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
    for local in range(case.local_experts):
        mine = outputs[rank * case.local_experts + local]
        x[local, : len(mine)] = mine.to(device)
    out = torch.full_like(given.x, torch.nan) if case.in_place else None
    wait_stats = torch.zeros(case.num_ranks, dtype=torch.int64, device=device) if case.stats else None
    combined, event, hook = buffer.low_latency_combine(
        x,
        given.topk_idx,
        given.topk_weights,
        handle,
        use_logfmt=case.use_logfmt,
        zero_copy=case.zero_copy,
        out=out,
        combine_wait_recv_cost_stats=wait_stats,
        **how_to_call(case),
    )
    finish(event, hook)
    assert out is None or combined is out
    if case.use_logfmt:
        outputs = [through_logfmt(rows) for rows in outputs]
    missing = frozenset(
        expert for expert in range(case.num_experts) if expert // case.local_experts in absent
    )
    right = low_latency_oracle.combine(inputs[rank], rank, outputs, sources, missing)
    assert oracle.same_bits(combined.cpu(), right)
