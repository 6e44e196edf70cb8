"""Dispatch and combine of `ElasticBuffer` as differentiable functions, in both layouts.

    received = elastic_dispatch(buffer, x, topk_idx, topk_weights, num_experts, do_expand=True)
    ...                                     # the experts work on received.x, grouped by expert
    combined, _ = elastic_combine(buffer, outputs, received.handle)

Each is the other's gradient: rows that are copied in one direction are summed in the other, and weights come
back to the choices that they belong to. A backward pass therefore communicates, too: the same tensors must
require gradients on all ranks, and a rank that received no rows still takes part.

`torch.compile` does not trace these calls; it breaks the graph at them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyep.api.elastic import ElasticBuffer
from anyep.api.elastic_handle import EPHandle
from anyep.errors import InvalidCall


class ElasticReceived(NamedTuple):
    """What a dispatch received.

    Attributes:
        x: The received rows: one per token, or grouped by expert with padding of zeros.
        topk_idx: int64 [rows, top-k], ids of local experts, -1 for those of other ranks; None for rows that
            are grouped by expert.
        topk_weights: float32 [rows, top-k], or [rows] for rows that are grouped by expert; None if none were
            passed.
        handle: The routing, for `elastic_combine`.
    """

    x: Tensor
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    handle: EPHandle


def elastic_dispatch(
    buffer: ElasticBuffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    *,
    expert_alignment: int = 1,
    do_expand: bool = False,
) -> ElasticReceived:
    """Send each token to every rank that holds one of its experts; x and topk_weights get gradients.

    Where an expert is on another rank, a row of the compact layout has the weight 0.

    Args:
        buffer: The ElasticBuffer of the ranks.
        x: This rank's tokens [tokens, hidden]: bfloat16, float16 or float32.
        topk_idx: int64 [tokens, top-k], the experts of each token; -1 means "no expert".
        topk_weights: float32 [tokens, top-k], or None on all ranks.
        num_experts: The experts of all ranks together.
        expert_alignment: Groups begin at multiples of this.
        do_expand: Group rows by expert.
    """
    if not isinstance(buffer, ElasticBuffer):
        raise InvalidCall(f"buffer is of type {type(buffer).__name__}: it must be an anyep.ElasticBuffer")
    kept: list[Any] = []
    how: dict[str, Any] = {"num_experts": num_experts, "expert_alignment": expert_alignment}
    rows, weights = _dispatch(x, topk_weights, topk_idx, buffer, None, do_expand, how, kept)
    ids, handle = kept
    return ElasticReceived(rows, ids, weights, handle)


def elastic_combine(
    buffer: ElasticBuffer, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Add up each token's rows at its source, and carry weights back to its choices; both get gradients.

    Args:
        buffer: The ElasticBuffer of the dispatch.
        x: The experts' outputs, one row for each received row.
        handle: That of the dispatch.
        topk_weights: float32, in the shape of the weights of a dispatch; by default none.
    """
    combined, weights = _combine(x, topk_weights, buffer, handle)
    return combined, weights


class _Dispatch(torch.autograd.Function):
    """A dispatch; along a handle if there is one, else it leaves its ids and its handle in `kept`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor | None,
        topk_idx: Tensor | None,
        buffer: ElasticBuffer,
        handle: EPHandle | None,
        do_expand: bool,
        how: dict[str, Any],
        kept: list[Any],
    ) -> tuple[Tensor, Tensor | None]:
        rows, ids, row_weights, handle, _ = buffer.dispatch(
            x.contiguous(),
            topk_idx,
            topk_weights=weights,
            handle=handle,
            do_expand=do_expand,
            # Zeros, so that the padding adds nothing to the gradients of experts.
            do_zero_padding=do_expand,
            **how,
        )
        assert isinstance(rows, Tensor)
        if row_weights is not None and ids is not None:
            row_weights = torch.where(ids >= 0, row_weights, 0.0)
        ctx.buffer, ctx.handle = buffer, handle
        kept += [ids, handle]
        return rows, row_weights

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor | None) -> Any:
        grad_x, grad_topk_weights = _combine(grad_rows, grad_weights, ctx.buffer, ctx.handle)
        return grad_x, grad_topk_weights, None, None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor | None, buffer: ElasticBuffer, handle: EPHandle
    ) -> tuple[Tensor, Tensor | None]:
        ctx.buffer, ctx.handle = buffer, handle
        combined, combined_weights, _ = buffer.combine(x.contiguous(), handle, weights)
        return combined, combined_weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor | None) -> Any:
        handle = ctx.handle
        grad_rows, grad_row_weights = _dispatch(
            grad, grad_weights, None, ctx.buffer, handle, handle.do_expand, {}, []
        )
        return grad_rows, grad_row_weights, None, None


_dispatch: Any = _Dispatch.apply
_combine: Any = _Combine.apply
