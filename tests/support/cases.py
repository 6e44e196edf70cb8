"""One case of dispatch and combine, as data: every rank makes all ranks' inputs from the seed, runs the real
thing, and compares what it got with the reference, bit for bit.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from anyep import Config
from anyep.api.buffer import Buffer
from tests.support import oracle
from tests.support.places import Place, buffer_device, tensor_device
from tests.support.world import RankContext

NVL_BYTES = RDMA_BYTES = 1 << 22
POISON = 0xA5
SMALL_CONFIG = Config(4, 2, 5)
COMBINE_FROM = ("received rows", "combine buffer", "other memory")
ROUTINGS = ("uniform", "one rank", "none", "some missing", "skewed", "own rank")
ROW_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "uint8": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Case:
    """What the ranks of one call pass; tokens, one number per rank."""

    tokens: tuple[int, ...]
    hidden: int = 32
    dtype: str = "bfloat16"
    num_topk: int = 2
    local_experts: int = 2
    routing: str = "uniform"
    send_topk: bool = True
    num_scales: int = 0
    strided_scales: bool = False
    alignment: int = 1
    worst: bool = False
    num_biases: int = 0
    combine_weights: bool = False
    combine_from: str = "received rows"
    """Where the experts' outputs are: one of COMBINE_FROM."""
    config: Config = SMALL_CONFIG
    num_window_bytes: int | None = None
    run_async: bool = False
    delay_seed: int | None = None
    ranks_per_node: int | None = None
    network: str | None = None
    seed: int = 0

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // (self.ranks_per_node or self.num_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.local_experts

    def at(self, place: Place) -> Case:
        """The same on the nodes of a place."""
        return replace(self, ranks_per_node=place.ranks_per_node, network=place.network)


def inputs_of(case: Case) -> list[oracle.RankInput]:
    """Every rank's input."""
    return [_input_of(case, rank) for rank in range(case.num_ranks)]


def _input_of(case: Case, rank: int) -> oracle.RankInput:
    generator = torch.Generator().manual_seed(case.seed * 1000 + rank)
    tokens = case.tokens[rank]
    topk_idx = _routing(case, rank, generator)
    in_rank = oracle.layout(topk_idx, case.num_experts, case.num_ranks)[2]
    x = _rows(case.dtype, (tokens, case.hidden), generator)
    scales = None
    if case.num_scales:
        scales = _uniform((tokens, case.num_scales), generator)
        if case.strided_scales:
            scales = scales.t().contiguous().t()
    weights = _uniform((tokens, case.num_topk), generator)
    if not case.send_topk:
        return oracle.RankInput(x, in_rank, scales)
    return oracle.RankInput(x, in_rank, scales, topk_idx, weights)


def _routing(case: Case, rank: int, generator: torch.Generator) -> torch.Tensor:
    tokens, topk, experts = case.tokens[rank], case.num_topk, case.num_experts
    scores = _uniform((tokens, experts), generator)
    if case.routing == "one rank":
        scores[:, : case.local_experts] += 1
    if case.routing == "own rank":
        scores[:, rank * case.local_experts : (rank + 1) * case.local_experts] += 1
    if case.routing == "skewed":
        scores *= torch.linspace(1, 0.2, experts, dtype=torch.float32, device="cpu")
    if topk <= experts:
        topk_idx = scores.topk(topk, dim=-1).indices
    else:
        # An expert may come twice.
        topk_idx = torch.randint(0, experts, (tokens, topk), generator=generator, device="cpu")
    if case.routing == "one rank":
        topk_idx = torch.where(topk_idx < case.local_experts, topk_idx, -1)
    if case.routing == "none":
        topk_idx = torch.full_like(topk_idx, -1)
    if case.routing == "some missing":
        keep = _uniform(topk_idx.shape, generator) < 0.5
        topk_idx = torch.where(keep, topk_idx, -1)
    return topk_idx


def _rows(dtype: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    kind = ROW_DTYPES[dtype]
    if kind.itemsize == 1:
        data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device="cpu")
        return data.view(kind)
    return (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * 3).to(kind)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")


def buffer_for(
    context: RankContext,
    num_window_bytes: int | None,
    num_nvl_bytes: int = NVL_BYTES,
    device: str | None = None,
    ranks_per_node: int | None = None,
    network: str | None = None,
) -> Buffer:
    """A Buffer that lives as long as the pool, on the device of its ranks unless another one is given."""
    device = buffer_device() if device is None else device
    key = ("buffer", num_window_bytes, num_nvl_bytes, device, ranks_per_node, network)
    if key not in context.keep:
        context.keep[key] = Buffer(
            context.group,
            num_nvl_bytes,
            0 if ranks_per_node is None else RDMA_BYTES,
            device=device,
            num_window_bytes=num_window_bytes,
            ranks_per_node=ranks_per_node,
            network=network,
        )
    return context.keep[key]  # type: ignore[no-any-return]


def delays(seed: int, rank: int) -> Any:
    """Sleeps at random between the steps of the protocol."""
    chance = random.Random(seed * 100 + rank)

    def sleep(call: object, phase: object) -> None:
        if chance.random() < 0.4:
            time.sleep(chance.random() * 0.004)

    return sleep


def run_case(context: RankContext, case: Case) -> None:
    """Dispatch, dispatch again by handle, and combine; assert that every result has the right bits."""
    buffer = buffer_for(
        context, case.num_window_bytes, ranks_per_node=case.ranks_per_node, network=case.network
    )
    if buffer_device() == "cuda":
        poison_windows(buffer)
    control = buffer.runtime.control
    control.between_steps = None if case.delay_seed is None else delays(case.delay_seed, context.rank)
    try:
        check_case(context, case, buffer)
    finally:
        control.between_steps = None


def poison_windows(buffer: Buffer) -> None:
    """Fill the windows that are free on a GPU, on every rank, before any rank goes on."""
    buffer.runtime.windows.fill_free(POISON)
    buffer.runtime.device_control.gpu.synchronize_device()
    dist.barrier(group=buffer.group)


def check_case(context: RankContext, case: Case, buffer: Buffer, device: str | None = None) -> None:
    """The same, with a Buffer and tensors on its device."""
    device = tensor_device() if device is None else device
    rank = context.rank
    inputs = inputs_of(case)
    given = inputs[rank].to(device)
    expected = oracle.dispatch(inputs, rank, case.num_experts, case.alignment)
    topk_idx = _routing_of(case, rank).to(device)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, case.num_experts)
    if case.num_nodes == 1:
        assert per_node is None
    else:
        assert per_node is not None
        in_node = in_rank.reshape(len(in_rank), case.num_nodes, case.ranks_per_node or 1).any(2)
        assert oracle.same_bits(per_node, in_node.sum(0, dtype=torch.int32))
    for mine, reference in zip(
        (per_rank, per_expert, in_rank),
        oracle.layout(topk_idx.cpu(), case.num_experts, case.num_ranks),
        strict=True,
    ):
        assert oracle.same_bits(mine, reference)
    check_storages(per_rank, per_node, per_expert, in_rank)
    rows = given.x if given.scales is None else (given.x, given.scales)
    num_worst = sum(case.tokens) + 1 if case.worst and case.send_topk else 0
    recv, recv_ids, recv_weights, counts, handle, event = buffer.dispatch(
        rows,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=given.topk_idx,
        topk_weights=given.topk_weights,
        expert_alignment=case.alignment,
        num_worst_tokens=num_worst,
        config=case.config,
        **overlap_of(buffer, case.run_async),
    )
    assert handle is not None
    event.current_stream_wait()
    num_rows = len(expected.x)
    recv_x, recv_scales = recv if isinstance(recv, tuple) else (recv, None)
    check_storages(given.x, recv_x, recv_scales, recv_ids, recv_weights, *handle)
    assert recv_x.shape == (num_worst or num_rows, case.hidden)
    assert oracle.same_bits(recv_x[:num_rows], expected.x)
    if expected.scales is not None:
        assert recv_scales is not None
        assert recv_scales.is_contiguous()
        assert oracle.same_bits(recv_scales[:num_rows], expected.scales)
    if expected.topk_idx is None or expected.topk_weights is None:
        assert recv_ids is None
        assert recv_weights is None
    else:
        assert recv_ids is not None
        assert recv_weights is not None
        assert oracle.same_bits(recv_ids[:num_rows], expected.topk_idx)
        assert oracle.same_bits(recv_weights[:num_rows], expected.topk_weights)
        assert (recv_ids[num_rows:] == -1).all()
        assert counts == ([] if num_worst else expected.tokens_per_expert)
    if case.num_nodes == 1:
        check_handle(case, inputs, rank, tuple(part.cpu() for part in handle), expected)
    else:
        check_node_handle(case, inputs, rank, handle, expected)

    overlap = overlap_of(buffer, case.run_async)
    again, *nothing, event = buffer.dispatch(rows, handle=handle, config=case.config, **overlap)
    event.current_stream_wait()
    assert nothing == [None] * 4
    again_x, again_scales = again if isinstance(again, tuple) else (again, None)
    assert oracle.same_bits(again_x[:num_rows], expected.x)
    if expected.scales is not None:
        assert again_scales is not None
        assert oracle.same_bits(again_scales[:num_rows], expected.scales)

    check_combine(case, inputs, rank, buffer, handle, recv_x, device)


def overlap_of(buffer: Buffer, is_async: bool) -> dict[str, Any]:
    """What makes one call asynchronous, after the work so far: each call needs an event of its own."""
    if not is_async:
        return {}
    return {"previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}


def check_storages(*tensors: torch.Tensor | None) -> None:
    """That no two share one: torch refuses operators whose results do."""
    # Without values none is needed.
    storages = [part.untyped_storage()._cdata for part in tensors if part is not None and part.numel()]
    assert len(set(storages)) == len(storages)


def check_combine(
    case: Case,
    inputs: list[oracle.RankInput],
    rank: int,
    buffer: Buffer,
    handle: Any,
    recv_x: torch.Tensor,
    device: str = "cpu",
) -> None:
    """The experts are a function of (expert rank, row), so that every rank knows all their outputs."""
    dtype = case.dtype if case.dtype in ("bfloat16", "float16", "float32") else "bfloat16"
    received = [oracle.dispatch(inputs, other, case.num_experts) for other in range(case.num_ranks)]
    outputs, weights = [], []
    for other, output in enumerate(received):
        generator = torch.Generator().manual_seed(case.seed * 77 + other)
        outputs.append(_rows(dtype, (len(output.x), case.hidden), generator))
        weights.append(_uniform((len(output.x), 3), generator))
    generator = torch.Generator().manual_seed(case.seed * 99 + rank)
    shape = (case.tokens[rank], case.hidden)
    biases = tuple(_rows(dtype, shape, generator) for _ in range(case.num_biases))
    biases_there = tuple(bias.to(device) for bias in biases)
    in_rank = [given.is_token_in_rank for given in inputs]
    num_rows = len(outputs[rank])
    if case.combine_from == "combine buffer":
        x = buffer.get_combine_buffer(handle, case.hidden, outputs[rank].dtype)
    elif case.combine_from == "received rows" and recv_x.dtype == outputs[rank].dtype:
        x = recv_x
    else:
        x = torch.zeros(recv_x.shape, dtype=outputs[rank].dtype, device=device)
    x[:num_rows] = outputs[rank]
    own_weights = None
    if case.combine_weights:
        own_weights = torch.zeros(len(x), 3, dtype=torch.float32, device=device)
        own_weights[:num_rows] = weights[rank]
    combined, combined_weights, event = buffer.combine(
        x,
        handle,
        topk_weights=own_weights,
        bias=None if not biases else biases_there[0] if len(biases) == 1 else biases_there,  # type: ignore
        config=case.config,
        **overlap_of(buffer, case.run_async),
    )
    event.current_stream_wait()
    nodes = case.ranks_per_node
    assert oracle.same_bits(combined, oracle.combine(outputs, in_rank, rank, biases, nodes))
    if case.combine_weights:
        assert combined_weights is not None
        assert oracle.same_bits(combined_weights, oracle.combine(weights, in_rank, rank, (), nodes))
    else:
        assert combined_weights is None


def check_handle(
    case: Case, inputs: list[oracle.RankInput], rank: int, handle: Any, expected: oracle.RankOutput
) -> None:
    """The six tensors, as the contract says."""
    rank_prefix, channel_prefix, recv_channel_prefix, source, in_rank, send_head = handle
    matrix = torch.stack([given.is_token_in_rank.sum(0) for given in inputs])
    assert torch.equal(rank_prefix, matrix.cumsum(0).int())
    channels = case.config.num_channels
    assert torch.equal(channel_prefix, _by_channel(inputs[rank].is_token_in_rank, channels).cumsum(1).int())
    received = torch.stack([_by_channel(given.is_token_in_rank, channels)[rank] for given in inputs])
    assert torch.equal(recv_channel_prefix, (received.cumsum(1) - received).int())
    assert torch.equal(source[: len(expected.source)], expected.source)
    assert torch.equal(in_rank, inputs[rank].is_token_in_rank)
    assert torch.equal(send_head >= 0, in_rank)
    for peer in range(case.num_ranks):
        first = int(matrix[:rank, peer].sum())
        rows = send_head[:, peer][in_rank[:, peer]]
        assert torch.equal(rows, torch.arange(first, first + len(rows), dtype=torch.int32, device="cpu"))


def check_node_handle(
    case: Case, inputs: list[oracle.RankInput], rank: int, handle: Any, expected: oracle.RankOutput
) -> None:
    """The ten tensors of several nodes, as the contract says."""
    assert len(handle) == 10
    in_rank, rdma_prefix, gbl_prefix, recv_rdma_prefix, recv_rdma_sum, *received = handle
    recv_gbl_prefix, recv_gbl_sum, meta, rdma_head, nvl_head = received
    nodes, per_node, channels = case.num_nodes, case.ranks_per_node or 1, case.config.num_channels
    own_node, own_index = divmod(rank, per_node)
    masks = [given.is_token_in_rank for given in inputs]
    in_node = [mask.reshape(len(mask), nodes, per_node).any(2) for mask in masks]
    assert torch.equal(in_rank, masks[rank])
    assert torch.equal(gbl_prefix, _by_channel(masks[rank], channels).cumsum(1).int())
    assert torch.equal(rdma_prefix, _by_channel(in_node[rank], channels).cumsum(1).int())
    relayed = [in_node[node * per_node + own_index][:, own_node] for node in range(nodes)]
    by_channel = torch.cat([_by_channel(marks[:, None], channels) for marks in relayed])
    assert torch.equal(recv_rdma_prefix, by_channel.cumsum(1).int())
    assert torch.equal(recv_rdma_sum, by_channel.sum(1).cumsum(0).int())
    rows = torch.stack([_by_channel(mask, channels)[rank] for mask in masks])
    assert torch.equal(recv_gbl_prefix, (rows.cumsum(1) - rows).int())
    assert torch.equal(recv_gbl_sum, rows.sum(1).cumsum(0).int())
    assert torch.equal(rdma_head >= 0, in_node[rank])
    for node in range(nodes):
        numbers = rdma_head[:, node][in_node[rank][:, node]]
        assert torch.equal(numbers, torch.arange(len(numbers), dtype=torch.int32, device="cpu"))
    # Where at the ranks of this node the relayed rows went.
    matrix = torch.stack([mask.sum(0) for mask in masks])
    heads = []
    for node in range(nodes):
        source = node * per_node + own_index
        here = masks[source][relayed[node]][:, own_node * per_node : (own_node + 1) * per_node]
        first = matrix[:source, own_node * per_node : (own_node + 1) * per_node].sum(0)
        heads.append(torch.where(here, first + here.cumsum(0) - 1, -1).int())
    assert torch.equal(nvl_head[: int(recv_rdma_sum[-1])], torch.cat(heads))
    words = meta[: len(expected.source)].clone().flatten().view(torch.int32).reshape(-1, 2)
    assert torch.equal(words[:, 0], (expected.source_rank // per_node).int())
    for (_, bits), source, token in zip(
        words.tolist(), expected.source_rank.tolist(), expected.source.tolist(), strict=True
    ):
        wanted = masks[source][token, own_node * per_node : (own_node + 1) * per_node]
        assert bits == sum(1 << index for index, is_wanted in enumerate(wanted.tolist()) if is_wanted)


def _by_channel(in_rank: torch.Tensor, channels: int) -> torch.Tensor:
    per_channel = max(1, -(-in_rank.shape[0] // channels))
    parts = [
        in_rank[channel * per_channel : (channel + 1) * per_channel].sum(0) for channel in range(channels)
    ]
    return torch.stack(parts, dim=1)


def _routing_of(case: Case, rank: int) -> torch.Tensor:
    topk_idx = _input_of(replace(case, send_topk=True), rank).topk_idx
    assert topk_idx is not None
    return topk_idx
