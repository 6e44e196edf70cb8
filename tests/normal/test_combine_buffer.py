"""`get_combine_buffer`: memory for the experts' outputs, from which a combine copies nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyep import InvalidCall
from anyep.api.buffer import Buffer
from tests.support import oracle
from tests.support.cases import NVL_BYTES, RDMA_BYTES, Case, inputs_of
from tests.support.places import Place, buffer_device, tensor_device
from tests.support.world import RankContext

PLACES = [Place("cpu", 3), Place("cpu", 4, 2), Place("simulated", 2), Place("cuda", 4)]
HIDDEN = 64
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"hidden": 32, "dtype": torch.int32}, "dtype is torch.int32: a combine adds up rows of"),
    "no columns": ({"hidden": 0}, "hidden is 0"),
    "odd rows": ({"hidden": 12}, "a row of 24 bytes is no multiple of 16 bytes"),
    "hidden": ({"hidden": "many"}, "hidden is 'many'"),
}


def new_buffer(context: RankContext, place: Place, num_window_bytes: int | None) -> Buffer:
    return Buffer(
        context.group,
        NVL_BYTES,
        RDMA_BYTES if place.num_nodes > 1 else 0,
        device=buffer_device(),
        num_window_bytes=num_window_bytes,
        ranks_per_node=place.ranks_per_node,
        network=place.network,
    )


def dispatched(context: RankContext, place: Place, buffer: Buffer) -> tuple[Any, Any]:
    """The received rows and the handle of a dispatch."""
    case = Case(tokens=tuple(11 + 3 * rank for rank in range(context.num_ranks))).at(place)
    given = inputs_of(case)[context.rank]
    assert given.topk_idx is not None
    device = tensor_device()
    ids = given.topk_idx.to(device)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, case.num_experts)
    rows, _, _, _, handle, _ = buffer.dispatch(
        given.x.to(device),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=given.topk_weights.to(device) if given.topk_weights is not None else None,
    )
    return rows, handle


def is_in_a_window(buffer: Buffer, tensor: torch.Tensor) -> bool:
    assert buffer.runtime is not None
    windows: Any = buffer.runtime.windows
    return (windows if hasattr(windows, "offset_of") else windows.block).offset_of(tensor) is not None


def combine_from_everywhere(context: RankContext, place: Place, num_window_bytes: int | None) -> list[bool]:
    """Combines rows of float32 from a combine buffer, twice, and from other memory; the sums are equal.

    Returns whether the buffer was in a window, and whether its window came back.
    """
    with new_buffer(context, place, num_window_bytes) as buffer:
        handle = dispatched(context, place, buffer)[1]
        assert buffer.runtime is not None
        windows: Any = buffer.runtime.windows
        used_bytes = windows.used_bytes
        outputs = buffer.get_combine_buffer(handle, HIDDEN, torch.float32)
        is_inside = is_in_a_window(buffer, outputs)
        outputs.copy_(torch.arange(outputs.numel(), dtype=torch.float32, device="cpu").view(outputs.shape))
        outputs += 0.1 * context.rank
        first, _, _ = buffer.combine(outputs, handle)
        if is_inside:
            # Nothing was staged.
            assert windows.used_bytes == used_bytes + -(-outputs.nbytes // 256) * 256
        assert oracle.same_bits(buffer.combine(outputs.clone(), handle)[0].cpu(), first.cpu())
        assert oracle.same_bits(buffer.combine(outputs, handle)[0].cpu(), first.cpu())
        assert first.abs().sum() > 0
        del outputs
        return [is_inside, windows.used_bytes == used_bytes]


@pytest.mark.parametrize("place", [place.param() for place in PLACES])
def test_a_combine_reads_it_where_it_is(place: Place) -> None:
    for result in place.world().run(combine_from_everywhere, place, None):
        assert result == [True, True]


@pytest.mark.parametrize("place", [place.param() for place in PLACES])
def test_without_windows_it_is_ordinary_memory(place: Place) -> None:
    for result in place.world().run(combine_from_everywhere, place, 0):
        assert result == [False, True]


def ask_wrongly(context: RankContext, place: Place) -> dict[str, str]:
    """Wrong arguments are refused by this rank alone: no peer takes part."""
    messages = {}
    with new_buffer(context, place, None) as buffer:
        rows, handle = dispatched(context, place, buffer)
        for name, (arguments, _) in WRONG.items():
            with pytest.raises(InvalidCall) as caught:
                buffer.get_combine_buffer(handle, **arguments)
            messages[name] = str(caught.value)
        with pytest.raises(InvalidCall) as caught:
            buffer.get_combine_buffer(handle[1:], 32)
        messages["handle"] = str(caught.value)
        assert buffer.get_combine_buffer(handle, 32).shape == (len(rows), 32)
        buffer.combine(rows, handle)
    return messages


@pytest.mark.parametrize("place", [place.param() for place in PLACES])
def test_wrong_arguments(place: Place) -> None:
    for messages in place.world().run(ask_wrongly, place):
        for name, (_, message) in WRONG.items():
            assert messages[name].startswith(message)
        assert "handle" in messages["handle"]
