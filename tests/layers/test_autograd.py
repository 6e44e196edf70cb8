"""Gradients of dispatch and combine, and their compiled forms.

`gradcheck` wants float64, which is no dtype of rows. But both are linear, sums of copies, and so exact on
small whole numbers in float32: there finite differences are no approximation, and must equal the gradients
bit for bit. What is not linear is compared with a dense computation in float64 in one process.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from anyep import BufferBroken, InvalidCall
from anyep.api.buffer import Buffer
from anyep.autograd import combine, combine_buffer, dispatch, dispatch_again, key_of
from tests.support.cases import NVL_BYTES, buffer_for
from tests.support.dense_gradients import (
    HIDDEN,
    LOCAL_EXPERTS,
    TOPK,
    check_against_dense,
    on_ranks,
    routing_of,
    rows_of,
    values_and_gradients,
)
from tests.support.places import Place
from tests.support.world import RankContext, get_world

TIMEOUT_S = 180.0


# Against a dense computation


@pytest.mark.parametrize(
    "place",
    [
        Place("cpu", 1).param(),
        Place("cpu", 4).param(),
        Place("cpu", 4, num_nodes=2).param(),
        Place("cuda", 2).param(),
        Place("cuda", 4).param(),
    ],
)
def test_gradients_are_those_of_a_dense_computation(place: Place) -> None:
    place.world().run(check_against_dense, place.ranks_per_node, timeout=TIMEOUT_S)


# Linear, and exact


def whole_numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator, device="cpu").float()


def total(context: RankContext, value: Tensor) -> float:
    summed = value.detach().double().clone()
    dist.all_reduce(summed, group=context.group)
    return summed.item()


def check_adjoint(context: RankContext) -> None:
    """<dispatch(x, w), (y, v)> == <(x, w), combine(y, v)> over all ranks, for any x, w, y, v."""
    buffer, rank = buffer_for(context, None), context.rank
    ids, _ = routing_of(rank, context.num_ranks)
    x, weights = whole_numbers(len(ids), HIDDEN, seed=rank), whole_numbers(len(ids), TOPK, seed=10 + rank)
    rows, here, row_weights, handle = dispatch(buffer, x, ids, weights, LOCAL_EXPERTS * context.num_ranks)
    y, v = whole_numbers(*rows.shape, seed=20 + rank), whole_numbers(*row_weights.shape, seed=30 + rank)
    # A weight travels only to the rank that holds its expert.
    v = torch.where(here >= 0, v, 0.0)
    combined, combined_weights = combine(buffer, y, handle, v)
    assert combined_weights is not None
    forth = total(context, (rows * y).sum() + (row_weights * v).sum())
    back = total(context, (x * combined).sum() + (weights * combined_weights).sum())
    assert forth == back != 0
    again = dispatch_again(buffer, x, handle)
    assert torch.equal(again, rows)


def test_each_is_the_others_transpose() -> None:
    get_world(4).run(check_adjoint)


def check_finite_differences(context: RankContext) -> int:
    """Each input of each rank moves by 1, and the sum over all ranks moves by its gradient, exactly."""
    buffer, rank = buffer_for(context, None), context.rank
    ids = torch.tensor([[0, 1, -1], [3, 0, 2]]) if rank == 0 else torch.tensor([[2, 2, 1]])
    x, weights = whole_numbers(len(ids), 4, seed=rank), whole_numbers(len(ids), 3, seed=9 + rank)
    x.requires_grad_()
    weights.requires_grad_()

    def value() -> Tensor:
        rows, _, row_weights, handle = dispatch(buffer, x, ids, weights, 4)
        scale = torch.arange(1.0, 1 + len(rows)).unsqueeze(1) * (rank + 1)
        combined, combined_weights = combine(buffer, rows * scale, handle, row_weights * scale)
        assert combined_weights is not None
        # The factors differ by position, so that a gradient at a wrong place shows.
        return (combined * (1 + torch.arange(combined.numel()).view(combined.shape))).sum() + (
            combined_weights * (5 + torch.arange(combined_weights.numel()).view(combined_weights.shape))
        ).sum()

    value().backward()  # type: ignore[no-untyped-call]
    num_nonzero = 0
    with torch.no_grad():
        before = total(context, value())
        for mover, (num_x, num_weights) in enumerate([(8, 6), (4, 3)]):
            for index in range(num_x + num_weights):
                if rank == mover:
                    moved, at = (x, index) if index < num_x else (weights, index - num_x)
                    moved.view(-1)[at] += 1
                after = total(context, value())
                if rank == mover:
                    moved.view(-1)[at] -= 1
                    assert moved.grad is not None
                    assert after - before == moved.grad.view(-1)[at].item()
                    num_nonzero += after != before
    return num_nonzero


def test_finite_differences_are_the_gradients() -> None:
    # All but the weight of the slot that names no expert.
    assert get_world(2).run(check_finite_differences) == [13, 7]


# Compiled


def check_compiled(
    context: RankContext, backend: str, dtype: torch.dtype, num_worst: int, ranks_per_node: int | None
) -> int:
    from torch._dynamo.testing import CompileCounterWithBackend  # only where it is used: it is large

    torch._dynamo.reset()
    buffer = buffer_for(context, None, ranks_per_node=ranks_per_node)

    def function(buffer: Buffer, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
        return on_ranks(buffer, x, ids, weights, num_worst)

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    # Every seed brings another number of rows.
    for seed in range(3):
        eager = values_and_gradients(function, buffer, dtype, seed)
        ours = values_and_gradients(compiled, buffer, dtype, seed)
        assert all(torch.equal(left, right) for left, right in zip(eager, ours, strict=True))
    return int(counter.frame_count)


@pytest.mark.parametrize(
    ("backend", "dtype", "ranks_per_node", "num_worst"),
    [
        ("aot_eager", torch.float32, None, 20),
        pytest.param("aot_eager", torch.bfloat16, 1, 0, marks=pytest.mark.slow),
        pytest.param("aot_eager", torch.float32, None, 0, marks=pytest.mark.slow),
        pytest.param("aot_eager", torch.bfloat16, 1, 20, marks=pytest.mark.slow),
        pytest.param("eager", torch.bfloat16, None, 0, marks=pytest.mark.slow),
        pytest.param("eager", torch.bfloat16, None, 20, marks=pytest.mark.slow),
    ],
)
def test_compiled_gives_the_same_bits(
    backend: str, dtype: torch.dtype, ranks_per_node: int | None, num_worst: int
) -> None:
    arguments = (backend, dtype, num_worst, ranks_per_node)
    counts = get_world(2).run(check_compiled, *arguments, timeout=TIMEOUT_S)
    # Once for all numbers of rows: they are not part of what is compiled.
    assert counts == [1, 1]


def sizes_when_traced(context: RankContext, num_worst: int) -> list[bool]:
    """Whether the number of received rows is a plain number in the graph."""
    torch._dynamo.reset()
    buffer, found = buffer_for(context, None), []

    def backend(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.ops.anyep.dispatch:
                rows, *_ = node.meta["example_value"]
                found.append(isinstance(rows.shape[0], int))
        return graph.forward

    ids, weights = routing_of(context.rank, context.num_ranks)
    compiled = torch.compile(on_ranks, fullgraph=True, backend=backend)
    with torch.no_grad():
        compiled(buffer, rows_of(context.rank), ids, weights, num_worst)
    return found


@pytest.mark.parametrize("num_worst", [0, 20])
def test_shapes_are_static_with_a_worst_case(num_worst: int) -> None:
    assert get_world(2).run(sizes_when_traced, num_worst, timeout=TIMEOUT_S) == [[num_worst > 0]] * 2


def check_operators(context: RankContext, num_worst: int, ranks_per_node: int | None) -> None:
    """PyTorch's own checks of an operator; all ranks run them at once, with the same calls."""
    torch._dynamo.reset()
    buffer = buffer_for(context, None, ranks_per_node=ranks_per_node)
    ids, weights = routing_of(context.rank, context.num_ranks)
    x, weights = rows_of(context.rank).requires_grad_(), weights.requires_grad_()
    key, num_experts = key_of(buffer), LOCAL_EXPERTS * context.num_ranks
    # Undefined rows differ from run to run, so their values are not compared.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    if not num_worst:
        tests = (*tests, "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.anyep.dispatch, (x, ids, weights, key, num_experts, num_worst), test_utils=tests
    )
    with torch.no_grad():
        rows, _, row_weights, handle = dispatch(buffer, x, ids, weights, num_experts, num_worst)
    rows, row_weights = rows.nan_to_num().requires_grad_(), row_weights.nan_to_num().requires_grad_()
    torch.library.opcheck(torch.ops.anyep.combine, (rows, list(handle), row_weights, key), test_utils=tests)
    torch.library.opcheck(torch.ops.anyep.combine, (rows, list(handle), None, key), test_utils=tests)
    torch.library.opcheck(torch.ops.anyep.dispatch_again, (x, list(handle), key), test_utils=tests)


@pytest.mark.parametrize(
    ("num_worst", "num_ranks", "ranks_per_node"),
    [
        (0, 2, None),
        pytest.param(60, 2, None, marks=pytest.mark.slow),
        pytest.param(0, 4, 2, marks=pytest.mark.slow),
        pytest.param(60, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_operators_pass_the_checks_of_pytorch(
    num_worst: int, num_ranks: int, ranks_per_node: int | None
) -> None:
    get_world(num_ranks).run(check_operators, num_worst, ranks_per_node, timeout=TIMEOUT_S)


# Buffers by number


def check_table_of_buffers(context: RankContext) -> None:
    first, second = (Buffer(context.group, NVL_BYTES, device="cpu") for _ in range(2))
    keys = key_of(first), key_of(second)
    assert keys[0] == key_of(first) != keys[1]
    ids, weights = routing_of(context.rank, context.num_ranks)
    x = rows_of(context.rank)
    arguments = (ids, weights, keys[0], LOCAL_EXPERTS * context.num_ranks, 0)
    torch.ops.anyep.dispatch(x, *arguments)
    dist.barrier(context.group)
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    with pytest.raises(BufferBroken, match=f"Buffer number {keys[0]} is gone: keep a reference"):
        torch.ops.anyep.dispatch(x, *arguments)
    with pytest.raises(InvalidCall, match="buffer is of type int: it must be an anyep"):
        dispatch(keys[1], x, ids, weights, LOCAL_EXPERTS * context.num_ranks)  # type: ignore[arg-type]
    dist.barrier(context.group)
    second.destroy()
    with pytest.raises(BufferBroken, match="was destroyed"):
        dispatch(second, x, ids, weights, LOCAL_EXPERTS * context.num_ranks)


def test_the_table_keeps_no_buffer_alive() -> None:
    get_world(2).run(check_table_of_buffers)


def frames_of_a_compiled_step(context: RankContext) -> int:
    """How many functions torch traces where a graph may break: at operators with unknown shapes."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    buffer = buffer_for(context, None)
    ids, weights = routing_of(context.rank, context.num_ranks)
    x = rows_of(context.rank).requires_grad_()
    compiled = torch.compile(on_ranks, backend="eager")
    arguments = buffer, x, ids, weights
    for ours, eager in zip(compiled(*arguments), on_ranks(*arguments), strict=True):
        assert torch.equal(ours, eager)
    compiled(*arguments)[0].sum().backward()
    return int(counters["frames"]["total"])


def test_what_operators_do_is_not_traced() -> None:
    """Tracing it takes half a minute; these are the parts of the user's own function."""
    assert max(get_world(2).run(frames_of_a_compiled_step, timeout=TIMEOUT_S)) < 20


def write_what_was_made_without_gradients(context: RankContext) -> None:
    buffer = buffer_for(context, None)
    ids, weights = routing_of(context.rank, context.num_ranks)
    with torch.no_grad():
        received = dispatch(buffer, rows_of(context.rank), ids, weights, LOCAL_EXPERTS * context.num_ranks)
        outputs = combine_buffer(buffer, received.x, received.handle)
    factor = torch.ones(HIDDEN, requires_grad=True)
    combined, _ = combine(buffer, outputs.copy_(received.x * factor), received.handle)
    combined.sum().backward()
    assert factor.grad is not None
    assert torch.equal(factor.grad, received.x.sum(0))


def test_a_combine_buffer_takes_gradients_whatever_made_it() -> None:
    get_world(2).run(write_what_was_made_without_gradients)
