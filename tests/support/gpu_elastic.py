"""Layers of `ElasticBuffer` at sizes of real ones: a dispatch, experts, and a combine. What a layer gives on
the CPU is the truth for a GPU, bit for bit; the CPU is compared with the dense oracle elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from anyep.api.elastic import ElasticBuffer
from tests.support.oracle import same_bits
from tests.support.places import buffer_device, tensor_device
from tests.support.world import RankContext

NUM_BYTES = 16 << 20
LARGE = 2.0**26


@dataclass(frozen=True)
class Shape:
    """A layer; `num_tokens` on rank 0, and fewer on the others."""

    num_tokens: int
    hidden: int
    num_topk: int
    local_experts: int
    alignment: int = 1
    num_scales: int = 0
    num_window_bytes: int | None = None


class Way(NamedTuple):
    """How a layer is called."""

    expands: bool = False
    waits: bool = True
    run_async: bool = False
    has_column_major_scales: bool = False


class Results(NamedTuple):
    """What a layer gives; rows past the received ones are not specified."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    weights: torch.Tensor
    combined: torch.Tensor
    combined_weights: torch.Tensor
    of_handle: tuple[torch.Tensor, ...]
    """The received rows by source, the ends and counts of experts; the metadata; the places of choices."""


def new_buffers(context: RankContext, shape: Shape) -> tuple[ElasticBuffer, ElasticBuffer]:
    """On this rank's device and on the CPU."""
    how: Any = {
        "num_max_tokens_per_rank": shape.num_tokens,
        "hidden": shape.hidden,
        "num_window_bytes": shape.num_window_bytes,
    }
    return (
        ElasticBuffer(context.group, NUM_BYTES, device=buffer_device(), **how),
        ElasticBuffer(context.group, NUM_BYTES, device="cpu", **how),
    )


def inputs_of(shape: Shape, context: RankContext, seed: int) -> tuple[torch.Tensor, ...]:
    """Rows, ids and weights, and scales if there are any; a tenth of the choices is no expert."""
    num_tokens = max(1, shape.num_tokens - 5 * context.rank)
    random = torch.Generator(device="cpu").manual_seed(100 * seed + context.rank)
    scores = torch.rand((num_tokens, shape.local_experts * context.num_ranks), generator=random, device="cpu")
    ids = scores.topk(min(shape.num_topk, scores.shape[1]), dim=1).indices
    ids = torch.where(torch.rand(ids.shape, generator=random, device="cpu") < 0.1, -1, ids)
    x = torch.randn((num_tokens, shape.hidden), generator=random, device="cpu")
    weights = torch.rand(ids.shape, generator=random, device="cpu")
    if not shape.num_scales:
        return x.bfloat16(), ids, weights
    scales = torch.rand((num_tokens, shape.num_scales), generator=random, device="cpu")
    return x.to(torch.float8_e4m3fn), ids, weights, scales


def experts(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """Operations that are exact on every device. Some values are 2**26 or -2**26: what remains where these
    cancel depends on the order of addition."""
    numbers = torch.arange(rows.shape[0], device=rows.device)[:, None]
    columns = torch.arange(rows.shape[1], device=rows.device)[None, :]
    sign = 1 - 2 * ((numbers + rank) % 2)
    is_large = (numbers + columns + rank) % 3 == 0
    return torch.where(is_large, LARGE * sign, rows.bfloat16() * 2).bfloat16()


def run_layer(buffer: ElasticBuffer, given: tuple[torch.Tensor, ...], shape: Shape, way: Way) -> Results:
    """A dispatch, the same along its handle, and a combine."""
    x, ids, weights, *scales = given
    how: Any = {
        "do_expand": way.expands,
        "do_zero_padding": way.expands,
        "use_tma_aligned_col_major_sf": way.has_column_major_scales,
        "async_with_compute_stream": way.run_async,
    }
    sent: Any = (x, scales[0]) if scales else x
    rows, recv_ids, recv_weights, handle, event = buffer.dispatch(
        sent,
        ids,
        weights,
        num_experts=shape.local_experts * buffer.num_ranks,
        expert_alignment=shape.alignment,
        do_cpu_sync=way.waits,
        **how,
    )
    event.current_stream_wait()
    again, _, _, _, event = buffer.dispatch(sent, handle=handle, **how)
    event.current_stream_wait()
    recv_scales = None
    if scales:
        (rows, recv_scales), again = rows, again[0]
    outputs = experts(again, buffer.rank_idx)
    combined, combined_weights, event = buffer.combine(
        outputs, handle, recv_weights, async_with_compute_stream=way.run_async
    )
    event.current_stream_wait()
    assert recv_weights is not None
    assert combined_weights is not None
    of_handle = (
        handle.psum_num_recv_tokens_per_scaleup_rank,
        handle.psum_num_recv_tokens_per_expert,
        handle.num_unaligned_recv_tokens_per_expert,
        handle.recv_src_metadata,
        handle.dst_buffer_slot_idx,
    )
    return Results(rows, recv_scales, recv_ids, recv_weights, combined, combined_weights, of_handle)


def assert_same_results(found: Results, truth: Results, shape: Shape, way: Way) -> None:
    """`truth` is on the CPU."""
    received, ends, counts, metadata, slots = truth.of_handle
    num_rows = int(received[-1])
    found_received, found_ends, found_counts, found_metadata, found_slots = found.of_handle
    assert same_bits(found_received, received)
    assert same_bits(found_ends, ends)
    assert same_bits(found_counts, counts)
    assert same_bits(found_metadata[:num_rows], metadata[:num_rows])
    assert bool((found_metadata[num_rows:] == -1).all())
    assert same_bits(found_slots, slots)
    num_valid = -(-int(ends[-1]) // shape.alignment) * shape.alignment if way.expands else num_rows
    assert same_bits(found.rows[:num_valid], truth.rows[:num_valid])
    if truth.scales is not None:
        assert found.scales is not None
        assert same_bits(found.scales[:num_valid].contiguous(), truth.scales[:num_valid].contiguous())
    if truth.topk_idx is not None:
        assert found.topk_idx is not None
        assert same_bits(found.topk_idx[:num_rows], truth.topk_idx[:num_rows])
        assert bool((found.topk_idx[num_rows:] == -1).all())
    assert same_bits(found.weights[:num_valid], truth.weights[:num_valid])
    assert same_bits(found.combined, truth.combined)
    assert same_bits(found.combined_weights, truth.combined_weights)


Capture = Callable[[Callable[[], Results]], tuple[Callable[[], None], Results]]
"""Makes what replays some work, and the results that each replay fills anew."""


class Layer:
    """A layer without CPU sync whose inputs change from replay to replay."""

    def __init__(
        self,
        buffer: ElasticBuffer,
        given: tuple[torch.Tensor, ...],
        shape: Shape,
        way: Way,
        capture: Capture,
    ) -> None:
        self._inputs = tuple(part.to(tensor_device()).clone() for part in given)
        self._replay, self.results = capture(lambda: run_layer(buffer, self._inputs, shape, way))

    def replay(self, given: tuple[torch.Tensor, ...]) -> Results:
        for place, part in zip(self._inputs, given, strict=True):
            place.copy_(part)
        for part in (self.results.rows, self.results.combined, self.results.weights):
            part.view(torch.uint8).fill_(0x55)
        self._replay()
        return self.results
