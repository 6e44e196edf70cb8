"""A case of low-latency mode on a rank: dispatch and combine, compared with the reference."""

from __future__ import annotations

from typing import Any, Final

import torch

from anyep.api.buffer import Buffer
from anyep.cli import draw
from anyep.cli.selftest import reference
from anyep.cli.selftest.plan import LL_HIDDEN, LL_MAX_TOKENS, LowLatencyCase, Place
from anyep.cli.selftest.reference import Tokens, WrongResult, same

LOCAL_EXPERTS: Final = 4


def inputs_of(case: LowLatencyCase, num_ranks: int, seed: int) -> list[Tokens]:
    """What each rank passes."""
    inputs = []
    for rank in range(num_ranks):
        generator = torch.Generator().manual_seed(seed * 4001 + rank)
        tokens, experts = max(1, case.tokens - rank), LOCAL_EXPERTS * num_ranks
        topk = min(case.topk, experts)
        x = draw.normal(generator, tokens, LL_HIDDEN).to(torch.bfloat16)
        ids = draw.uniform(generator, tokens, experts).topk(topk, dim=-1).indices
        inputs.append(Tokens(x, ids, draw.uniform(generator, tokens, topk)))
    return inputs


def run_case(buffer: Buffer, case: LowLatencyCase, place: Place, seed: int) -> None:
    """Make the calls of a case; raise `WrongResult` if one of them returns something else than it should."""
    num_ranks, rank = buffer.group_size, buffer.rank
    experts = LOCAL_EXPERTS * num_ranks
    inputs = inputs_of(case, num_ranks, seed)
    given = inputs[rank].to(place.device)
    recv, counts, handle, event, hook = buffer.low_latency_dispatch(
        given.x,
        given.topk_idx,
        LL_MAX_TOKENS,
        experts,
        use_fp8=case.travel != "bf16",
        round_scale=case.travel == "fp8 ue8m0",
        use_ue8m0=case.travel == "fp8 ue8m0",
        **_how(case),
    )
    _finish(event, hook)
    if case.zero_copy:
        x = buffer.get_next_low_latency_combine_buffer(handle)
    else:
        shape = (LOCAL_EXPERTS, num_ranks * LL_MAX_TOKENS, LL_HIDDEN)
        x = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=place.device)
    for local in range(LOCAL_EXPERTS):
        expert = rank * LOCAL_EXPERTS + local
        chosen = reference.rows_of_expert(inputs, expert)
        right = torch.cat([tokens.x[index] for tokens, index in zip(inputs, chosen, strict=True)])
        if int(counts[local]) != len(right):
            raise WrongResult(f"expert {expert} received {int(counts[local])} rows instead of {len(right)}")
        numbers = _check_rows(recv, local, right, case.travel)
        x[local, : len(right)] = reference.output_of(expert, numbers, torch.bfloat16).to(x.device)
    sums, event, hook = buffer.low_latency_combine(
        x, given.topk_idx, given.topk_weights, handle, zero_copy=case.zero_copy, **_how(case)
    )
    _finish(event, hook)
    same("the sums of a combine", sums, reference.combined_by_choice(inputs[rank], experts, case.travel))


def _how(case: LowLatencyCase) -> dict[str, Any]:
    return {"async_finish": case.how == "async", "return_recv_hook": case.how == "hook"}


def _finish(event: Any, hook: Any) -> None:
    event.current_stream_wait()
    if hook is not None:
        hook()


def _check_rows(recv: Any, local: int, right: torch.Tensor, travel: str) -> torch.Tensor:
    """Compare the rows of an expert; return the numbers that they stand for."""
    data, scales, numbers = reference.travelled(right, travel)
    ours, our_scales = recv if isinstance(recv, tuple) else (recv, None)
    same("the rows of a dispatch", ours[local, : len(right)], data)
    if scales is not None:
        assert our_scales is not None
        same("the scales of a dispatch", our_scales[local, : len(right)], scales)
    return numbers
