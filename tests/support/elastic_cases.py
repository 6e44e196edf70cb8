"""One case of the elastic API, as data: every rank makes all ranks' inputs from the seed, runs the real
thing, and compares what it got with the oracle, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from anyep.api.elastic import ElasticBuffer
from anyep.api.elastic_handle import EPHandle
from anyep.core.elastic_sizes import expanded_rows
from anyep.events import EventOverlap
from tests.support import elastic_oracle, oracle
from tests.support.elastic_oracle import Reduction, Returned, Shape
from tests.support.places import buffer_device, tensor_device
from tests.support.world import RankContext

NUM_BYTES = 2 << 20
TM = 24
LARGE = 2.0**26


@dataclass(frozen=True)
class ElasticCase:
    """What the ranks of one dispatch and its combine pass; tokens, one number per rank."""

    tokens: tuple[int, ...]
    hidden: int = 24
    num_topk: int = 3
    local_experts: int = 2
    num_scales: int = 0
    has_weights: bool = True
    alignment: int = 1
    waits: bool = True
    num_biases: int = 0
    expands: bool = False
    pads: bool = False
    has_column_major_scales: bool = False
    run_async: bool = False
    num_nodes: int = 1
    sums_on_the_way: bool = True
    missing: float = 0.2
    """The share of choices without an expert."""
    num_window_bytes: int | None = None
    seed: int = 0

    @property
    def shape(self) -> Shape:
        per_node = len(self.tokens) // self.num_nodes if self.num_nodes > 1 else None
        return Shape(self.local_experts * len(self.tokens), TM, self.alignment, per_node)


def inputs_of(case: ElasticCase) -> list[oracle.RankInput]:
    """What every rank passes to dispatch."""
    random = torch.Generator(device="cpu").manual_seed(case.seed)
    num_ranks = len(case.tokens)
    num_experts = num_ranks * case.local_experts
    num_topk = min(case.num_topk, num_experts)
    given = []
    for count in case.tokens:
        scores = torch.rand((count, num_experts), generator=random, device="cpu")
        ids = scores.topk(num_topk, dim=1, sorted=False).indices
        shuffled = torch.rand(ids.shape, generator=random, device="cpu").argsort(dim=1)
        ids = ids.gather(1, shuffled)
        ids[torch.rand(ids.shape, generator=random, device="cpu") < case.missing] = -1
        x = torch.randn((count, case.hidden), generator=random, device="cpu").bfloat16()
        scales = None
        if case.num_scales:
            x = x.repeat(1, 2).to(torch.float8_e4m3fn)
            scales = torch.rand((count, case.num_scales), generator=random, device="cpu")
        weights = torch.rand(ids.shape, generator=random, device="cpu") if case.has_weights else None
        in_rank = oracle.layout(ids, num_experts, num_ranks)[2]
        given.append(oracle.RankInput(x, in_rank, scales, ids, weights))
    return given


def outputs_of(case: ElasticCase, expected: list[elastic_oracle.Received]) -> Returned:
    """What the ranks' experts return. Half of the values are 2**26 or -2**26, beside which float32 loses the
    others: what remains where two of these cancel depends on the order in which rows are added."""
    random = torch.Generator(device="cpu").manual_seed(case.seed + 1)
    rows, weights = [], []
    for there in expected:
        count, num_topk = there.topk_idx.shape
        count = len(there.expanded.x) if case.expands else count
        values = torch.randn((count, case.hidden), generator=random, device="cpu")
        chance = torch.rand((count, case.hidden), generator=random, device="cpu")
        rows.append(torch.where(chance < 0.5, LARGE * values.sign(), values).bfloat16())
        shape = (count,) if case.expands else (count, num_topk)
        weights.append(torch.rand(shape, generator=random, device="cpu"))
    return Returned(rows, weights if case.has_weights else None)


def elastic_buffer(
    context: RankContext,
    num_window_bytes: int | None = None,
    num_nodes: int = 1,
    sums_on_the_way: bool = True,
) -> ElasticBuffer:
    """A buffer that lives as long as the pool."""
    key = ("elastic", num_window_bytes, num_nodes, sums_on_the_way)
    if key not in context.keep:
        context.keep[key] = ElasticBuffer(
            context.group,
            NUM_BYTES,
            num_max_tokens_per_rank=TM,
            hidden=256,
            device=buffer_device(),
            num_window_bytes=num_window_bytes,
            allow_multiple_reduction=sums_on_the_way,
            ranks_per_node=context.num_ranks // num_nodes,
        )
    buffer: ElasticBuffer = context.keep[key]
    return buffer


def check_case(context: RankContext, case: ElasticCase, buffer: ElasticBuffer | None = None) -> None:
    """A dispatch, the same along its handle, and a combine."""
    buffer = buffer or elastic_buffer(context, case.num_window_bytes, case.num_nodes, case.sums_on_the_way)
    inputs, rank = inputs_of(case), context.rank
    expected = [elastic_oracle.dispatch(inputs, each, case.shape) for each in range(context.num_ranks)]
    mine, given = expected[rank], inputs[rank]
    x: Any = given.x if given.scales is None else (given.x, given.scales)
    x, topk_idx, topk_weights = there((x, given.topk_idx, given.topk_weights))
    stats = torch.ones(case.local_experts, dtype=torch.int32, device=tensor_device())
    how: Any = {
        "do_expand": case.expands,
        "do_zero_padding": case.pads,
        "use_tma_aligned_col_major_sf": case.has_column_major_scales,
        "async_with_compute_stream": case.run_async,
    }
    received = buffer.dispatch(
        x,
        topk_idx,
        topk_weights,
        stats,
        num_experts=case.shape.num_experts,
        expert_alignment=case.alignment,
        do_cpu_sync=case.waits,
        **how,
    )
    handle = received[3]
    check_received(case, mine, received)
    assert (stats - 1).tolist() == mine.counts.tolist()
    check_handle(here(handle), case, inputs, expected, rank)
    assert handle.topk_idx.data_ptr() != topk_idx.data_ptr() or not topk_idx.numel()
    if received[1] is not None:
        received[1].fill_(7)  # the handle does not depend on what the caller does with the results
    again = buffer.dispatch(x, topk_weights=topk_weights, handle=handle, **how)
    assert again[3] is handle
    check_received(case, mine, again)

    returned = outputs_of(case, expected)
    rows, back = room_for(returned.rows[rank], handle), None
    if returned.weights is not None:
        back = room_for(returned.weights[rank], handle)
    random = torch.Generator(device="cpu").manual_seed(case.seed + 2 + rank)
    biases = tuple(
        torch.randn((case.tokens[rank], case.hidden), generator=random, device="cpu").bfloat16()
        for _ in range(case.num_biases)
    )
    bias: Any = (None, biases[0] if biases else None, biases)[case.num_biases]
    combined, combined_weights, event = buffer.combine(
        there(rows), handle, there(back), there(bias), async_with_compute_stream=case.run_async
    )
    check_event(case, event)
    combined, combined_weights = here((combined, combined_weights))
    reduction = Reduction(case.expands, case.sums_on_the_way)
    sums, sum_weights = elastic_oracle.combine(returned, inputs, rank, case.shape, reduction, biases)
    assert oracle.same_bits(combined, sums)
    assert (combined_weights is None) == (sum_weights is None)
    if combined_weights is not None:
        assert oracle.same_bits(combined_weights, sum_weights)


def there(things: Any) -> Any:
    """Tensors, and tuples of them, on the device of this rank's tensors."""
    return _moved(things, tensor_device())


def here(things: Any) -> Any:
    """The same on the CPU."""
    return _moved(things, "cpu")


def _moved(things: Any, device: str) -> Any:
    if isinstance(things, tuple):
        return tuple(_moved(thing, device) for thing in things)
    if isinstance(things, EPHandle):
        parts = {name: _moved(part, device) for name, part in vars(things).items()}
        return replace(things, **parts)
    return things.to(device) if isinstance(things, torch.Tensor) else things


def check_event(case: ElasticCase, event: EventOverlap) -> None:
    """Wait for an asynchronous call."""
    assert (event.event is not None) == case.run_async
    event.current_stream_wait()


def check_received(case: ElasticCase, mine: elastic_oracle.Received, received: Any) -> None:
    *results, event = received
    check_event(case, event)
    strides_there = received[0][1].stride() if mine.scales is not None else None
    rows, ids, weights, handle = here(tuple(results))
    scales = None
    if mine.scales is not None:
        rows, scales = rows
        strides = (1, -(-len(rows) // 4) * 4) if case.has_column_major_scales else (scales.shape[1], 1)
        assert strides_there == strides or not len(rows)
    if case.expands:
        assert ids is None
        check_expanded(case, mine.expanded, (rows, weights, scales), handle)
        return
    num_rows = len(mine.x)
    assert oracle.same_bits(rows[:num_rows], mine.x)
    if scales is not None:
        assert oracle.same_bits(scales[:num_rows].contiguous(), mine.scales)
    assert oracle.same_bits(ids[:num_rows], mine.topk_idx)
    assert bool((ids[num_rows:] == -1).all()) or received[3].num_recv_tokens == num_rows
    is_local = mine.topk_idx >= 0
    assert (weights is not None) == case.has_weights
    if weights is not None:
        assert mine.topk_weights is not None
        assert oracle.same_bits(weights[:num_rows][is_local], mine.topk_weights[is_local])


def check_expanded(case: ElasticCase, mine: elastic_oracle.Expanded, received: Any, handle: EPHandle) -> None:
    """Rows, weights and scales; those of padding only if it is to be zero."""
    num_rows = len(mine.x)
    assert all(part is None or len(part) == handle.num_expanded_tokens for part in received)
    checked = torch.ones_like(mine.is_padding) if case.pads else ~mine.is_padding
    for part, wanted in zip(received, (mine.x, mine.topk_weights, mine.scales), strict=True):
        assert (part is None) == (wanted is None)
        if part is not None:
            # Boolean masks do not work with all 1-byte types.
            assert oracle.same_bits(words(part[:num_rows])[checked], words(wanted)[checked])


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype)


def room_for(rows: torch.Tensor, handle: EPHandle) -> torch.Tensor:
    """The rows, followed by rows that are not in use."""
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    whole = rows.new_full((num_rows, *rows.shape[1:]), float("nan"))
    whole[: len(rows)] = rows
    return whole


def check_handle(
    handle: EPHandle,
    case: ElasticCase,
    inputs: list[oracle.RankInput],
    expected: list[elastic_oracle.Received],
    rank: int,
) -> None:
    mine, num_ranks = expected[rank], len(expected)
    num_rows, ids = len(mine.x), inputs[rank].topk_idx
    assert ids is not None
    num_topk = ids.shape[1]
    assert torch.equal(handle.topk_idx, ids)
    assert handle.num_recv_tokens == (num_rows if case.waits else num_ranks * TM)
    assert handle.num_recv_tokens_per_expert_list == (mine.aligned_counts if case.waits else [])
    most = expanded_rows(num_ranks * TM, num_topk, case.local_experts, case.alignment)
    assert handle.num_expanded_tokens == (sum(mine.aligned_counts) if case.waits else most)
    assert handle.do_expand == case.expands
    assert oracle.same_bits(handle.psum_num_recv_tokens_per_scaleup_rank, mine.psum_by_source)
    ends = mine.expanded.psum_by_expert if case.expands else mine.psum_by_expert
    assert oracle.same_bits(handle.psum_num_recv_tokens_per_expert, ends)
    assert oracle.same_bits(handle.num_unaligned_recv_tokens_per_expert, mine.counts)
    metadata = handle.recv_src_metadata
    assert metadata.shape == (handle.num_recv_tokens, 2 + num_topk)
    assert oracle.same_bits(metadata[:num_rows, 0].contiguous(), mine.sources)
    assert (metadata[:num_rows, 1]).tolist() == (mine.sources // TM * num_topk + mine.last_choice).tolist()
    positions = mine.expanded.positions if case.expands else torch.full((num_rows, num_topk), -1)
    assert metadata[:num_rows, 2:].tolist() == positions.tolist()
    if case.num_nodes > 1:
        return
    for token, experts in enumerate(ids.tolist()):
        for choice, expert in enumerate(experts):
            at = int(handle.dst_buffer_slot_idx[token, choice])
            if expert < 0:
                assert at == -1
            else:
                assert int(expected[expert // case.local_experts].sources[at]) == rank * TM + token
