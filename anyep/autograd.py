"""Dispatch and combine as differentiable functions, which `torch.compile` traces through.

    rows, ids, weights, handle = dispatch(buffer, x, topk_idx, topk_weights, num_experts)
    ...                                        # the experts work on the rows
    combined, _ = combine(buffer, outputs, handle)

Each is the other's gradient: rows that are copied in one direction are summed in the other. A backward pass
therefore communicates too, and every rank must make the same calls there: the same tensors require gradients
on all ranks, and a rank that received no rows still takes part.

In a compiled function the number of received rows is a data-dependent size; with `num_worst_tokens` it is
always that number. Operators accept integers but not Buffers, so a Buffer is passed as its key in a table
that does not keep it alive. `elastic_dispatch` and `elastic_combine` do the same with an `ElasticBuffer`.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from anyep.api.buffer import Buffer
from anyep.api.normal_arguments import Handle
from anyep.elastic_autograd import ElasticReceived as ElasticReceived
from anyep.elastic_autograd import elastic_combine as elastic_combine
from anyep.elastic_autograd import elastic_dispatch as elastic_dispatch
from anyep.errors import BufferBroken, InvalidCall
from anyep.sizes import SOURCE_META_BYTES

RECEIVED_PART: Final = {6: 3, 10: 7}
"""By the number of parts of a handle (one node, several nodes): the part as long as the received rows."""
TOKENS_PART: Final = {6: 4, 10: 0}
"""The same for the part that is as long as the tokens."""
Function = TypeVar("Function", bound=Callable[..., Any])
MULTIPLE_OF_FLOATS: Final = 4
"""Rows travel in multiples of 16 bytes."""


class Received(NamedTuple):
    """What a dispatch received; `topk_idx` has ids of local experts, and -1 for experts of other ranks.

    Attributes:
        x: The received rows [rows, hidden].
        topk_idx: int64 [rows, top-k], ids of local experts; -1 for experts of other ranks.
        topk_weights: float32 [rows, top-k].
        handle: The routing, for `combine`, `dispatch_again` and `combine_buffer`.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    handle: Handle


def dispatch(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    num_worst_tokens: int = 0,
) -> Received:
    """Send each token to every rank that holds one of its experts; x and topk_weights get gradients.

    Args:
        buffer: The Buffer of the ranks.
        x: This rank's tokens [tokens, hidden]: bfloat16, float16 or float32.
        topk_idx: int64 [tokens, top-k], the experts of each token; -1 means "no expert".
        topk_weights: float32 [tokens, top-k].
        num_experts: The experts of all ranks together.
        num_worst_tokens: If above 0, exactly so many rows are returned, and the host does not wait for
            counts.
    """
    rows, ids, weights, handle = torch.ops.anyep.dispatch(
        x, topk_idx, topk_weights, key_of(buffer), num_experts, num_worst_tokens
    )
    return Received(rows, ids, weights, tuple(handle))


def combine(
    buffer: Buffer, x: Tensor, handle: Handle, topk_weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Add up each token's rows, and weights where given, at its source; both get gradients.

    Args:
        buffer: The Buffer of the dispatch.
        x: The experts' outputs, one row for each received row.
        handle: That of the dispatch.
        topk_weights: float32 [rows, top-k] to be added up as well; by default none.
    """
    combined, weights = torch.ops.anyep.combine(x, list(handle), topk_weights, key_of(buffer))
    return combined, None if topk_weights is None else weights


def dispatch_again(buffer: Buffer, x: Tensor, handle: Handle) -> Tensor:
    """Send other rows along the routing of an earlier dispatch; x gets a gradient.

    Args:
        buffer: The Buffer of the earlier dispatch.
        x: As many rows as in the earlier dispatch.
        handle: That of the earlier dispatch.
    """
    rows: Tensor = torch.ops.anyep.dispatch_again(x, list(handle), key_of(buffer))
    return rows


def combine_buffer(buffer: Buffer, like: Tensor, handle: Handle) -> Tensor:
    """Memory for the experts' outputs, with the columns and the dtype of `like`: see
    `Buffer.get_combine_buffer`. What is written to it in place has gradients as usual.

    Args:
        buffer: The Buffer of the dispatch.
        like: A tensor with the columns and the dtype that the outputs have.
        handle: That of the dispatch.
    """
    # `like` itself is no argument, since the result does not depend on what it was computed from.
    rows: Tensor = torch.ops.anyep.combine_buffer(list(handle), like.shape[1], like.dtype, key_of(buffer))
    return rows


# Buffers by number

_numbers: weakref.WeakKeyDictionary[Buffer, int] = weakref.WeakKeyDictionary()
_buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
_new_numbers = itertools.count(1)


def key_of(buffer: Buffer) -> int:
    """The integer that identifies a Buffer in operators."""
    if not isinstance(buffer, Buffer):
        raise InvalidCall(f"buffer is of type {type(buffer).__name__}: it must be an anyep.Buffer")
    key = _numbers.get(buffer)
    if key is None:
        key = _numbers[buffer] = next(_new_numbers)
        _buffers[key] = buffer
    return key


# A compiled function calls it once, when it is traced, and is traced again for another Buffer. This is the
# effect of torch.compiler.assume_constant_result, which would import torch._dynamo; that takes seconds.
key_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _buffer_of(key: int) -> Buffer:
    buffer = _buffers.get(key)
    if buffer is None:
        raise BufferBroken(f"Buffer number {key} is gone: keep a reference to it for as long as it is used")
    return buffer


# The operators


def _operator(name: str) -> Callable[[Function], Function]:
    """Make a function an operator, for every device.

    `torch.library.custom_op` does the same, but its operators import torch._dynamo in their first call; that
    takes seconds. Once it is imported, it must not trace what an operator does: a compiled function calls an
    operator whose shapes depend on data while it still traces what is called.
    """

    def define(function: Function) -> Function:
        schema = torch.library.infer_schema(function, mutates_args=())
        shielded = torch._disable_dynamo(function)  # type: ignore[attr-defined]

        def call(*arguments: Any) -> Any:
            return (shielded if "torch._dynamo" in sys.modules else function)(*arguments)

        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "default", call)
        return function

    return define


@_operator("anyep::dispatch")
def _dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buffer: int, num_experts: int, num_worst_tokens: int
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    there = _buffer_of(buffer)
    per_rank, per_node, per_expert, in_rank, _ = there.get_dispatch_layout(topk_idx, num_experts)
    rows, ids, weights, _, handle, _ = there.dispatch(
        x.contiguous(),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_worst_tokens=num_worst_tokens,
    )
    assert isinstance(rows, Tensor)
    assert ids is not None
    assert weights is not None
    assert handle is not None
    return rows, ids, weights, list(handle)


@_operator("anyep::dispatch_again")
def _dispatch_again(x: Tensor, handle: list[Tensor], buffer: int) -> Tensor:
    rows, *_ = _buffer_of(buffer).dispatch(x.contiguous(), handle=tuple(handle))
    assert isinstance(rows, Tensor)
    return rows


@_operator("anyep::combine")
def _combine(
    x: Tensor, handle: list[Tensor], topk_weights: Tensor | None, buffer: int
) -> tuple[Tensor, Tensor]:
    combined, weights, _ = _buffer_of(buffer).combine(x.contiguous(), tuple(handle), topk_weights)
    # An operator returns only tensors: a tensor without columns means "no weights".
    return combined, combined.new_empty(len(combined), 0) if weights is None else weights


@_operator("anyep::combine_buffer")
def _combine_buffer(handle: list[Tensor], hidden: int, dtype: torch.dtype, buffer: int) -> Tensor:
    return _buffer_of(buffer).get_combine_buffer(tuple(handle), hidden, dtype)


# Shapes of the operators' results, for tracing


def _shapes_of_dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buffer: int, num_experts: int, num_worst_tokens: int
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    there = _buffer_of(buffer)
    num_rows = num_worst_tokens or torch.library.get_ctx().new_dynamic_size()
    handle = _handle_like(there, x, num_rows, num_worst_tokens)
    ids = topk_idx.new_empty((num_rows, topk_idx.shape[1]))
    return x.new_empty((num_rows, x.shape[1])), ids, topk_weights.new_empty(ids.shape), handle


def _handle_like(buffer: Buffer, x: Tensor, num_rows: Any, num_worst_tokens: int) -> list[Tensor]:
    """Uninitialised tensors with the shapes of a handle."""
    ranks, tokens = buffer.group_size, x.shape[0]
    session = buffer.runtime
    assert session is not None
    channels = session.normal.ops.default_config(buffer.get_dispatch_config(ranks)).num_channels
    topology = buffer.topology
    nodes = topology.num_nodes

    def empty(*shape: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    in_rank = empty(tokens, ranks, dtype=torch.bool)
    by_rank, by_node = (ranks, channels), (nodes, channels)
    if nodes == 1:
        return [
            empty(ranks, ranks),
            empty(*by_rank),
            empty(*by_rank),
            empty(num_rows),
            in_rank,
            empty(tokens, ranks),
        ]
    num_relayed = num_worst_tokens or torch.library.get_ctx().new_dynamic_size()
    return [
        in_rank,
        empty(*by_node),
        empty(*by_rank),
        empty(*by_node),
        empty(nodes),
        empty(*by_rank),
        empty(ranks),
        empty(num_rows, SOURCE_META_BYTES, dtype=torch.uint8),
        empty(tokens, nodes),
        empty(num_relayed, topology.ranks_per_node),
    ]


def _shapes_of_dispatch_again(x: Tensor, handle: list[Tensor], buffer: int) -> Tensor:
    return x.new_empty((handle[RECEIVED_PART[len(handle)]].shape[0], x.shape[1]))


def _shapes_of_combine(
    x: Tensor, handle: list[Tensor], topk_weights: Tensor | None, buffer: int
) -> tuple[Tensor, Tensor]:
    tokens = handle[TOKENS_PART[len(handle)]].shape[0]
    if topk_weights is None:
        return x.new_empty((tokens, x.shape[1])), x.new_empty((tokens, 0))
    return x.new_empty((tokens, x.shape[1])), topk_weights.new_empty((tokens, topk_weights.shape[1]))


def _shapes_of_combine_buffer(handle: list[Tensor], hidden: int, dtype: torch.dtype, buffer: int) -> Tensor:
    received = handle[RECEIVED_PART[len(handle)]]
    return received.new_empty((received.shape[0], hidden), dtype=dtype)


# Gradients of the operators. Each reads the saved tensors once: activation checkpointing requires it.


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, ids, _, handle = output
    ctx.buffer = inputs[3]
    ctx.mark_non_differentiable(ids)
    ctx.save_for_backward(ids, *handle)


def _gradient_of_dispatch(ctx: Any, grad_rows: Tensor, _ids: Any, grad_weights: Tensor, _handle: Any) -> Any:
    ids, *handle = ctx.saved_tensors
    # Where an expert is on another rank, dispatch returned 0 whatever the weight was.
    own = torch.where(ids >= 0, grad_weights, 0.0)
    grad_x, grad_topk_weights = torch.ops.anyep.combine(grad_rows, handle, own, ctx.buffer)
    return grad_x, None, grad_topk_weights, None, None, None


def _keep_for_dispatch_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, handle, ctx.buffer = inputs
    ctx.save_for_backward(*handle)


def _gradient_of_dispatch_again(ctx: Any, grad_rows: Tensor) -> Any:
    handle = list(ctx.saved_tensors)
    grad, _ = torch.ops.anyep.combine(grad_rows, handle, None, ctx.buffer)
    return grad, [None] * len(handle), None


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, handle, weights, ctx.buffer = inputs
    ctx.num_topk = None if weights is None else weights.shape[1]
    ctx.save_for_backward(*handle)


def _gradient_of_combine(ctx: Any, grad: Tensor, grad_weights: Tensor) -> Any:
    handle = list(ctx.saved_tensors)
    grad_rows = torch.ops.anyep.dispatch_again(grad, handle, ctx.buffer)
    if ctx.num_topk is None:
        return grad_rows, [None] * len(handle), None, None
    # A dispatch by handle carries no weights, so they are sent as rows.
    padded = functional.pad(grad_weights, (0, -ctx.num_topk % MULTIPLE_OF_FLOATS))
    grad_row_weights = torch.ops.anyep.dispatch_again(padded, handle, ctx.buffer)
    return grad_rows, [None] * len(handle), grad_row_weights[:, : ctx.num_topk].contiguous(), None


for name, shapes, gradient, keep in (
    ("anyep::dispatch", _shapes_of_dispatch, _gradient_of_dispatch, _keep_for_dispatch),
    (
        "anyep::dispatch_again",
        _shapes_of_dispatch_again,
        _gradient_of_dispatch_again,
        _keep_for_dispatch_again,
    ),
    ("anyep::combine", _shapes_of_combine, _gradient_of_combine, _keep_for_combine),
):
    torch.library.register_fake(name, shapes)
    torch.library.register_autograd(name, gradient, setup_context=keep)
torch.library.register_fake("anyep::combine_buffer", _shapes_of_combine_buffer)
