"""Configs that ask for more SMs than a rank has: checks for ranks on a simulated GPU, and on a real one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from anyep import Config
from anyep.api.buffer import Buffer
from tests.support import oracle
from tests.support.cases import Case, check_case, overlap_of
from tests.support.gpu_scenarios import attempt, device_of, good_arguments, warnings_heard
from tests.support.world import RankContext

HELD = "instead of num_sms="
"""What every message about a rank's share has."""


def check_what_is_said(buffer: Buffer, share: int) -> None:
    """A config that asks for more than the share works, and one message per number of SMs says so."""
    few, many, more = Config(share), Config(share + 2), Config(share + 4)
    other_rings = replace(many, num_max_nvl_chunked_send_tokens=4)
    with warnings_heard() as heard:
        for config in (few, many, other_rings, more, many):
            _, *_, handle, _ = buffer.dispatch(**good_arguments(buffer) | {"config": config})
            assert handle[1].shape[1] == config.num_channels
        buffer.dispatch(good_arguments(buffer)["x"], handle=handle)
    said = [message for message in heard if HELD in message]
    starts = [f"rank {buffer.rank} uses {share} SMs {HELD}{config.num_sms}:" for config in (many, more)]
    assert [message.startswith(start) for message, start in zip(said, starts, strict=True)] == [True, True]


def check_handles_and_configs(context: RankContext, buffer: Buffer, config: Config) -> None:
    """A handle of many channels goes with any config that has them, or with none; others are refused."""
    _, *_, handle, _ = buffer.dispatch(**good_arguments(buffer) | {"config": config})
    x = good_arguments(buffer)["x"]
    rows, *_ = buffer.dispatch(x, handle=handle)
    assert isinstance(rows, torch.Tensor)
    first, _, _ = buffer.combine(rows.clone(), handle)
    again, *_ = buffer.dispatch(x, handle=handle, config=replace(config, num_max_nvl_chunked_send_tokens=3))
    assert isinstance(again, torch.Tensor)
    second, _, _ = buffer.combine(again.clone(), handle, config=config)
    assert torch.equal(first, x)
    assert torch.equal(second, x)
    message = attempt(buffer.combine, rows, handle, config=Config(config.num_sms - 2))
    assert f"but the handle was made with {config.num_channels}" in message


def check_mixed_configs(context: RankContext, buffer: Buffer, configs: list[Config], case: Case) -> None:
    """Calls of one Buffer with more channels than programs, and with fewer, one after the other."""
    for seed, config in enumerate(configs):
        mixed = replace(case, config=config, seed=seed, worst=seed % 3 == 2, run_async=seed % 2 == 1)
        check_case(context, mixed, buffer, device_of(buffer))


def _fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of FP8, with a scale for each 128 values."""
    blocks = x.float().view(len(x), -1, 128)
    scales = blocks.abs().amax(2).clamp(1e-4) / 448
    return (blocks / scales[:, :, None]).view(x.shape).to(torch.float8_e4m3fn), scales


def _from_fp8(rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    if isinstance(rows, torch.Tensor):
        return rows
    values, scales = rows
    return (values.float().view(len(values), -1, 128) * scales[:, :, None]).view(values.shape).bfloat16()


def check_like_an_intranode_test(
    context: RankContext,
    buffer: Buffer,
    config: Config,
    num_tokens: int,
    hidden: int,
    num_topk: int,
    num_experts: int,
    tuned: list[Config],
    is_short: bool = False,
) -> None:
    """The calls of a program that tries all ways to dispatch and combine, and then some configs for speed.

    Every row of a rank is its number, so that a receiver knows the right rows from the handle alone, and sums
    are exact: a token's sum is its rank's number times the ranks that it went to. If `is_short`, two of the
    eight ways are tried.
    """
    rank, num_ranks, device = context.rank, context.num_ranks, device_of(buffer)
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    topk_idx = scores.topk(num_topk, dim=-1).indices.to(device)
    weights = torch.full((num_tokens, num_topk), float(rank), device=device)
    x = torch.full((num_tokens, hidden), float(rank), dtype=torch.bfloat16, device=device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    num_wanted = in_rank.sum(1)
    layout = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "config": config,
    }
    all_per_rank = [torch.empty_like(per_rank.cpu()) for _ in range(num_ranks)]
    torch.distributed.all_gather(all_per_rank, per_rank.cpu(), group=context.group)
    counts = torch.stack(all_per_rank)[:, rank]

    def check_rows(rows: torch.Tensor, handle: Any) -> None:
        assert handle[0].shape == (num_ranks, num_ranks)
        assert handle[1].shape == handle[2].shape == (num_ranks, config.num_channels)
        assert torch.equal(handle[0][:, rank].cpu(), counts.cumsum(0).int())
        sources = torch.repeat_interleave(torch.arange(num_ranks), counts).to(device)
        right = sources[:, None].expand(-1, rows.shape[1])
        assert torch.equal(rows.to(torch.float32), right.to(torch.float32))

    for is_async in (False, True):
        for given in (x, _fp8(x)):
            for with_topk in (False, True):
                if is_short and not is_async == (given is not x) == with_topk:
                    continue
                choices = {"topk_idx": topk_idx, "topk_weights": weights} if with_topk else {}
                recv, ids, recv_weights, _, handle, event = buffer.dispatch(
                    given, **layout, **choices, **overlap_of(buffer, is_async)
                )
                event.current_stream_wait()
                rows = _from_fp8(recv)
                check_rows(rows, handle)
                if with_topk:
                    assert ids is not None
                    assert recv_weights is not None
                    assert ids.max() < num_experts // num_ranks
                    assert torch.equal(recv_weights[ids < 0], torch.zeros_like(recv_weights[ids < 0]))
                    worst, worst_ids, *_, event = buffer.dispatch(
                        given,
                        **layout,
                        **choices,
                        num_worst_tokens=num_ranks * num_tokens,
                        **overlap_of(buffer, is_async),
                    )
                    event.current_stream_wait()
                    assert worst_ids is not None
                    check_rows(_from_fp8(worst)[: len(rows)], handle)
                    assert bool((worst_ids[len(rows) :] == -1).all())
                again, *_, event = buffer.dispatch(
                    given, handle=handle, config=config, **overlap_of(buffer, is_async)
                )
                event.current_stream_wait()
                check_rows(_from_fp8(again), handle)
                combined, combined_weights, event = buffer.combine(
                    rows.clone(),
                    handle,
                    topk_weights=recv_weights if with_topk else None,
                    config=config,
                    **overlap_of(buffer, is_async),
                )
                event.current_stream_wait()
                assert torch.equal(combined.float(), rank * num_wanted[:, None].float().expand(-1, hidden))
                if with_topk:
                    # Each weight comes back from the one rank that has its expert.
                    assert combined_weights is not None
                    assert oracle.same_bits(combined_weights, weights.cpu())
    rows, *_, handle, _ = buffer.dispatch(x, **layout)
    assert isinstance(rows, torch.Tensor)
    for chosen in tuned:
        again, *_ = buffer.dispatch(x, handle=handle, config=chosen)
        assert isinstance(again, torch.Tensor)
        check_rows(again, handle)
        combined, _, _ = buffer.combine(again.clone(), handle, config=chosen)
        assert torch.equal(combined.float(), rank * num_wanted[:, None].float().expand(-1, hidden))
