"""A case of normal mode on a rank: dispatch, dispatch along the handle, combine; against the reference."""

from __future__ import annotations

from typing import Any, Final

import torch

from anyep.api.buffer import Buffer
from anyep.cli import draw
from anyep.cli.demo.job import finish_work
from anyep.cli.selftest import reference
from anyep.cli.selftest.plan import NormalCase, Place
from anyep.cli.selftest.reference import Tokens, WrongResult, same
from anyep.sizes import Config

LOCAL_EXPERTS: Final = 4
NUM_REPLAYS: Final = 3
DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
RING_CONFIG: Final = Config(4, 6, 32)
"""Few channels with small chunks, so that also small cases go around their rings."""


def inputs_of(case: NormalCase, num_ranks: int, seed: int) -> list[Tokens]:
    """What each rank passes."""
    return [_tokens_of(case, rank, num_ranks, seed) for rank in range(num_ranks)]


def _tokens_of(case: NormalCase, rank: int, num_ranks: int, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    tokens, experts = case.tokens_of(rank, num_ranks), LOCAL_EXPERTS * num_ranks
    dtype = DTYPES[case.dtype]
    if dtype.itemsize == 1:
        shape = (tokens, case.hidden)
        x = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device="cpu").view(dtype)
    else:
        x = draw.normal(generator, tokens, case.hidden).to(dtype)
    scores = draw.uniform(generator, tokens, experts)
    if case.routing == "one rank":
        scores[:, :LOCAL_EXPERTS] += 1
    topk = min(case.topk, LOCAL_EXPERTS if case.routing == "one rank" else experts)
    topk_idx = scores.topk(topk, dim=-1).indices
    if case.routing == "none":
        topk_idx = torch.full_like(topk_idx, -1)
    if case.routing == "some missing":
        keep = draw.uniform(generator, tokens, topk) < 0.5
        topk_idx = torch.where(keep, topk_idx, -1)
    scales = draw.uniform(generator, tokens, case.hidden // 128) if case.has_scales else None
    return Tokens(x, topk_idx, draw.uniform(generator, tokens, topk), scales)


def run_case(buffer: Buffer, case: NormalCase, place: Place, seed: int) -> None:
    """Make the calls of a case; raise `WrongResult` if one of them returns something else than it should."""
    num_ranks, rank = buffer.group_size, buffer.rank
    experts = LOCAL_EXPERTS * num_ranks
    inputs = inputs_of(case, num_ranks, seed)
    given = inputs[rank].to(place.device)
    right = reference.received(inputs, rank, experts)
    rows, results = _dispatched(buffer, case, given, experts, sum(len(tokens.x) for tokens in inputs))
    recv, ids, weights, counts, handle, _ = results
    num_rows = len(right.x)
    _check_rows(recv, right, "the rows of a dispatch")
    same("the experts of received rows", ids[:num_rows], right.topk_idx)
    same("the weights of received rows", weights[:num_rows], right.topk_weights)
    if not case.is_worst_case:
        _check_counts(counts, right.topk_idx)
    if case.how == "graph":
        _check_graph(buffer, rows, handle, right, _expected(case, inputs, rank, place))
        return
    again, *_, event = buffer.dispatch(rows, handle=handle, **_how(buffer, case))
    event.current_stream_wait()
    _check_rows(again, right, "the rows of a dispatch along a handle")
    generator = torch.Generator().manual_seed(seed * 2003 + rank)
    shape = (len(given.x), case.hidden)
    dtype = _output_dtype(recv)
    biases = tuple(draw.normal(generator, *shape).to(dtype) for _ in range(case.num_biases))
    biases_there = tuple(bias.to(place.device) for bias in biases)
    x = _outputs(buffer, case, recv, handle, right.x)
    combined, combined_weights, event = buffer.combine(
        x,
        handle,
        topk_weights=weights if case.has_weights else None,
        bias=biases_there[0] if len(biases) == 1 else biases_there or None,  # type: ignore[arg-type]
        **_how(buffer, case),
    )
    event.current_stream_wait()
    expected = reference.combined(inputs[rank], experts, num_ranks, place.nodes.ranks_per_node, biases)
    same("the sums of a combine", combined, expected)
    if case.has_weights:
        assert combined_weights is not None
        same("the weights of a combine", combined_weights, inputs[rank].topk_weights)


def _how(buffer: Buffer, case: NormalCase) -> dict[str, Any]:
    """The further arguments of a call."""
    how: dict[str, Any] = {"config": RING_CONFIG} if case.uses_rings else {}
    if case.how == "async":
        how |= {"previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}
    return how


def _dispatched(buffer: Buffer, case: NormalCase, given: Tokens, experts: int, all_tokens: int) -> Any:
    """The argument and the results of a first dispatch."""
    per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(given.topk_idx, experts)
    same("the layout", is_in_rank, reference.in_rank(given.topk_idx.cpu(), experts, buffer.group_size))
    rows = given.x if given.scales is None else (given.x, given.scales)
    results = buffer.dispatch(
        rows,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=given.topk_idx,
        topk_weights=given.topk_weights,
        num_worst_tokens=all_tokens if case.is_worst_case else 0,
        **_how(buffer, case),
    )
    results[-1].current_stream_wait()
    return rows, results


def _check_rows(recv: Any, right: Tokens, name: str) -> None:
    x, scales = recv if isinstance(recv, tuple) else (recv, None)
    same(name, x[: len(right.x)], right.x)
    if right.scales is not None:
        same(f"the scales of {name}", scales[: len(right.x)], right.scales)


def _check_counts(counts: list[int], topk_idx: torch.Tensor) -> None:
    right = [int((topk_idx == expert).sum()) for expert in range(LOCAL_EXPERTS)]
    if counts != right:
        raise WrongResult(f"the counts per expert are {counts} instead of {right}")


def _output_dtype(recv: Any) -> torch.dtype:
    x = recv[0] if isinstance(recv, tuple) else recv
    return x.dtype if x.element_size() > 1 else torch.bfloat16


def _outputs(buffer: Buffer, case: NormalCase, recv: Any, handle: Any, right: torch.Tensor) -> torch.Tensor:
    """What this rank's experts return, where the case wants it."""
    recv_x = recv[0] if isinstance(recv, tuple) else recv
    dtype = _output_dtype(recv)
    if case.combine_from == "combine buffer":
        x = buffer.get_combine_buffer(handle, case.hidden, dtype)
    elif case.combine_from == "received rows" and recv_x.dtype == dtype:
        x = recv_x
    else:
        x = torch.zeros(recv_x.shape, dtype=dtype, device=recv_x.device)
    x[: len(right)] = reference.output_of(buffer.rank, right, dtype).to(x.device)
    return x


def _expected(case: NormalCase, inputs: list[Tokens], rank: int, place: Place) -> torch.Tensor:
    experts = LOCAL_EXPERTS * len(inputs)
    return reference.combined(inputs[rank], experts, len(inputs), place.nodes.ranks_per_node)


def _check_graph(buffer: Buffer, rows: Any, handle: Any, right: Tokens, expected: torch.Tensor) -> None:
    """Capture a dispatch along a handle and a combine in a CUDA graph, and replay it."""
    factor = 1.0 + 0.375 * buffer.rank

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        received: Any = buffer.dispatch(rows, handle=handle)[0]
        outputs = (received.float() * factor).to(received.dtype)
        return received, buffer.combine(outputs, handle)[0]

    step()
    finish_work("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        received, sums = step()
    for _ in range(NUM_REPLAYS):
        sums.zero_()
        graph.replay()
        finish_work("cuda")
        same("the rows of a replayed dispatch", received, right.x)
        same("the sums of a replayed combine", sums, expected)
