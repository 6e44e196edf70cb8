"""One case of `HybridEPBuffer`, as data: every rank makes all ranks' inputs from the seed, computes what it
should get from dense maps, and compares, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from anyep.api.hybrid import HybridEPBuffer
from tests.support.elastic_cases import there
from tests.support.places import buffer_device
from tests.support.world import RankContext

MAX_TOKENS, HIDDEN, SCALES = 24, 256, 2


@dataclass(frozen=True)
class HybridCase:
    """What the ranks pass; tokens, one number per rank."""

    tokens: tuple[int, ...]
    local_experts: int = 3
    most_choices: int = 4
    has_probs: bool = True
    is_fp8: bool = False
    as_map: bool = True
    pad_multiple: int | None = None
    capacity: int | None = None
    non_blocking: bool = False
    seed: int = 0

    @property
    def num_experts(self) -> int:
        return self.local_experts * len(self.tokens)


class Inputs(NamedTuple):
    """Of one rank."""

    hidden: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor


def inputs_of(case: HybridCase) -> list[Inputs]:
    random = torch.Generator(device="cpu").manual_seed(case.seed)
    found = []
    for count in case.tokens:
        num_topk = min(case.most_choices, case.num_experts)
        scores = torch.rand((count, case.num_experts), generator=random, device="cpu")
        ids = scores.topk(num_topk, dim=1, sorted=False).indices
        ids[torch.rand(ids.shape, generator=random, device="cpu") < 0.3] = -1
        routing_map = torch.zeros((count, case.num_experts), dtype=torch.bool, device="cpu")
        for token, choices in enumerate(ids.tolist()):
            for expert in choices:
                if expert >= 0:
                    routing_map[token, expert] = True
        probs = torch.rand(routing_map.shape, generator=random, device="cpu") * routing_map
        hidden = torch.randn((count, HIDDEN), generator=random, device="cpu").bfloat16()
        scales = None
        if case.is_fp8:
            hidden = hidden.to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.rand((count, SCALES), generator=random, device="cpu")
        found.append(Inputs(hidden, scales, ids, routing_map, probs))
    return found


def rows_by_expert(case: HybridCase, inputs: list[Inputs], rank: int) -> list[list[tuple[int, int]]]:
    """By local expert: the source and the token of each row, in order."""
    first = rank * case.local_experts
    return [
        [
            (source, token)
            for source, given in enumerate(inputs)
            for token in range(len(given.hidden))
            if given.routing_map[token, first + local]
        ]
        for local in range(case.local_experts)
    ]


def rows_by_token(case: HybridCase, inputs: list[Inputs], rank: int) -> list[tuple[int, int]]:
    here = slice(rank * case.local_experts, (rank + 1) * case.local_experts)
    return [
        (source, token)
        for source, given in enumerate(inputs)
        for token in range(len(given.hidden))
        if given.routing_map[token, here].any()
    ]


def hybrid_buffer(context: RankContext, local_experts: int, num_nodes: int = 1) -> HybridEPBuffer:
    """A buffer that lives as long as the pool."""
    key = ("hybrid", local_experts, num_nodes)
    if key not in context.keep:
        how: dict[str, Any] = {"device": buffer_device()}
        how["num_of_hybrid_ep_ranks_per_nvlink_domain"] = context.num_ranks // num_nodes
        context.keep[key] = HybridEPBuffer(context.group, HIDDEN, MAX_TOKENS, local_experts, **how)
    buffer: HybridEPBuffer = context.keep[key]
    return buffer


def routing_of(case: HybridCase, mine: Inputs) -> dict[str, Any]:
    """The arguments that say where tokens go."""
    if case.as_map:
        return there({"routing_map": mine.routing_map, "probs": mine.probs if case.has_probs else None})
    weights = mine.probs.gather(1, mine.topk_idx.clamp(min=0)) if case.has_probs else None
    return there({"topk_idx": mine.topk_idx.int(), "topk_weights": weights})


def value_of(source: int, token: int, expert: int) -> float:
    """What an expert makes of each value of a token's row: sums of few of them are exact."""
    return float(1 + (5 * source + 3 * token + 7 * expert) % 31)


def check_permuted(context: RankContext, case: HybridCase, num_nodes: int = 1) -> None:
    """A dispatch with permute, the same along its handle, and a combine."""
    buffer, inputs, rank = (
        hybrid_buffer(context, case.local_experts, num_nodes),
        inputs_of(case),
        context.rank,
    )
    mine, by_expert = inputs[rank], rows_by_expert(case, inputs, rank)
    step = case.pad_multiple or 1
    padded = [-(-len(rows) // step) * step for rows in by_expert]
    rows, row_probs, row_scales, counts, handle = buffer.dispatch_with_permute(
        hidden=there(mine.hidden),
        scaling_factor=there(mine.scales),
        pad_multiple=case.pad_multiple,
        num_permuted_tokens=case.capacity,
        non_blocking=case.non_blocking,
        **routing_of(case, mine),
    )
    room = sum(padded) if case.capacity is None else case.capacity
    assert len(handle) == 11
    assert handle[-1].tolist() == [int(_end(padded, by_expert) > room)]
    assert handle[7].tolist() == [len(group) for group in by_expert]
    starts = [sum(padded[:expert]) for expert in range(case.local_experts)]
    assert counts is not None
    assert counts.tolist() == [max(0, min(n, room - at)) for n, at in zip(padded, starts, strict=True)]
    assert (counts.device.type == "cpu") or case.non_blocking
    places = {
        starts[expert] + index: (source, token, expert)
        for expert, group in enumerate(by_expert)
        for index, (source, token) in enumerate(group)
        if starts[expert] + index < room
    }
    outputs = torch.zeros((room, HIDDEN), dtype=torch.bfloat16, device="cpu")
    for row, (source, token, expert) in places.items():
        outputs[row] = value_of(source, token, rank * case.local_experts + expert)

    def check(rows: torch.Tensor, row_probs: torch.Tensor | None, scales: torch.Tensor | None) -> None:
        assert (row_probs is not None, scales is not None) == (case.has_probs, case.is_fp8)
        assert len(rows) == room
        for row in range(min(room, sum(padded))):
            if row in places:
                source, token, expert = places[row]
                given = inputs[source]
                assert torch.equal(rows[row].cpu(), given.hidden[token])
                prob = given.probs[token, rank * case.local_experts + expert]
                assert row_probs is None or row_probs[row].item() == prob
                assert scales is None or torch.equal(scales[row].cpu(), given.scales[token])  # type: ignore[index]
            else:
                assert not rows[row].any(), "padding"
                assert row_probs is None or row_probs[row].item() == 0

    check(rows, row_probs, row_scales)
    again = buffer.dispatch_with_permute(
        hidden=there(mine.hidden),
        scaling_factor=there(mine.scales),
        probs=there(mine.probs) if case.has_probs else None,
        num_permuted_tokens=room if case.capacity is not None else None,
        pad_multiple=case.pad_multiple,
        handle=handle,
    )
    assert again[3] is None
    assert again[4] is handle
    check(*again[:3])
    sums, back = buffer.combine_with_unpermute(hidden=there(outputs), probs=row_probs, handle=handle)
    kept = _kept(case, inputs)
    assert torch.equal(sums.cpu(), _sums(mine, kept, rank))
    assert (back is not None) is case.has_probs
    assert back is None or torch.equal(back.cpu(), mine.probs * _mask(mine, kept, rank))


def check_unpermuted(context: RankContext, case: HybridCase, num_nodes: int = 1) -> None:
    """A dispatch, the same along its handle, and a combine."""
    buffer, inputs, rank = (
        hybrid_buffer(context, case.local_experts, num_nodes),
        inputs_of(case),
        context.rank,
    )
    mine, expected = inputs[rank], rows_by_token(case, inputs, rank)
    x = {"hidden": there(mine.hidden), "scaling_factor": there(mine.scales)}
    rows, row_probs, scales, handle = buffer.dispatch(**x, **routing_of(case, mine))
    assert len(handle) == 7
    assert (len(rows), int(handle[3])) == (len(expected), len(expected))
    here = slice(rank * case.local_experts, (rank + 1) * case.local_experts)

    def check(rows: torch.Tensor, row_probs: torch.Tensor | None, scales: torch.Tensor | None) -> None:
        for row, (source, token) in enumerate(expected):
            given = inputs[source]
            assert torch.equal(rows[row].cpu(), given.hidden[token])
            assert torch.equal(handle[4][row].cpu(), given.routing_map[token, here])
            assert scales is None or torch.equal(scales[row].cpu(), given.scales[token])  # type: ignore[index]
            if row_probs is not None:
                of_node = context.num_ranks // num_nodes * case.local_experts
                dense = torch.zeros(of_node, device="cpu")
                first = rank * case.local_experts % of_node
                dense[first : first + case.local_experts] = given.probs[token, here]
                assert torch.equal(row_probs[row].cpu(), dense)

    check(rows, row_probs, scales)
    probs = there(mine.probs) if case.has_probs else None
    again = buffer.dispatch(**x, probs=probs, handle=handle)
    assert again[3] is handle
    check(*again[:3])
    outputs = torch.zeros((len(expected), HIDDEN), dtype=torch.bfloat16, device="cpu")
    for row, (source, token) in enumerate(expected):
        outputs[row] = value_of(source, token, rank)
    sums, back = buffer.combine(there(outputs), row_probs, handle)
    wanted = mine.routing_map.unflatten(1, (context.num_ranks, case.local_experts)).any(2)
    right = torch.zeros(mine.hidden.shape, device="cpu")
    for token, ranks in enumerate(wanted.tolist()):
        right[token] = sum(value_of(rank, token, there) for there, is_wanted in enumerate(ranks) if is_wanted)
    assert torch.equal(sums.cpu(), right.bfloat16())
    assert (back is not None) is case.has_probs
    assert back is None or torch.equal(back.cpu(), mine.probs)


def _end(padded: list[int], by_expert: list[list[tuple[int, int]]]) -> int:
    """Where the last group ends, without its padding."""
    return sum(padded[:-1]) + len(by_expert[-1])


def _kept(case: HybridCase, inputs: list[Inputs]) -> set[tuple[int, int, int]]:
    """The source, token and expert of each row that found room."""
    kept = set()
    step = case.pad_multiple or 1
    for rank in range(len(case.tokens)):
        at = 0
        for local, group in enumerate(rows_by_expert(case, inputs, rank)):
            for index, (source, token) in enumerate(group):
                if case.capacity is None or at + index < case.capacity:
                    kept.add((source, token, rank * case.local_experts + local))
            at += -(-len(group) // step) * step
    return kept


def _sums(mine: Inputs, kept: set[tuple[int, int, int]], rank: int) -> torch.Tensor:
    sums = torch.zeros(mine.hidden.shape, device="cpu")
    for token, experts in enumerate(mine.routing_map.tolist()):
        sums[token] = sum(
            value_of(rank, token, expert)
            for expert, is_chosen in enumerate(experts)
            if is_chosen and (rank, token, expert) in kept
        )
    return sums.bfloat16()


def _mask(mine: Inputs, kept: set[tuple[int, int, int]], rank: int) -> torch.Tensor:
    mask = torch.zeros(mine.probs.shape, device="cpu")
    for source, token, expert in kept:
        if source == rank:
            mask[token, expert] = 1
    return mask
