"""Everything works whatever torch's default device and default dtype are, and gives the same bits.

Programs set them for their own tensors (`torch.set_default_device("cuda")`). Here they are "meta", on which a
tensor has no values, and bfloat16: a tensor that was made without a device or a dtype of its own is found out
by the checks against the reference. `tests/unit/test_explicit_devices.py` checks the source for the same;
`tests/normal/test_simulated_default_device.py` and `tests/gpu/test_default_device.py` are about GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import anyep
from anyep.buffer import Buffer
from anyep.nn import ExpertParallelMoE, FeedForward, TopKGate
from tests.faults import test_low_latency as test_low_latency_failure
from tests.layers import test_autograd, test_nn
from tests.support import cases, low_latency_cases
from tests.support.default_device_cases import NORMAL, set_other_defaults
from tests.support.low_latency_cases import FORMATS
from tests.support.world import RankContext, World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, set_other_defaults) as fresh:
        yield fresh


def are_other_defaults(context: RankContext) -> bool:
    made = torch.zeros(1)
    return made.is_meta and made.dtype == torch.bfloat16


def test_the_defaults_are_others(world: World) -> None:
    assert all(world.run(are_other_defaults))


# Normal mode


@pytest.mark.parametrize("num_window_bytes", [None, 0])
@pytest.mark.parametrize("ranks_per_node", [None, 2, 1])
@pytest.mark.parametrize("name", NORMAL)
def test_normal_mode(
    world: World, name: str, ranks_per_node: int | None, num_window_bytes: int | None
) -> None:
    case = replace(NORMAL[name], ranks_per_node=ranks_per_node, num_window_bytes=num_window_bytes)
    world.run(cases.run_case, case)


def device_by_default(context: RankContext) -> str:
    with Buffer(context.group, cases.NVL_BYTES) as buffer:
        cases.check_case(context, NORMAL["plain"], buffer)
        return buffer._device.type


@pytest.mark.skipif(torch.cuda.is_available(), reason="a Buffer works on the GPU that is here")
def test_the_device_of_a_buffer_is_not_the_default_of_torch(world: World) -> None:
    assert world.run(device_by_default) == ["cpu"] * 4


# Low-latency mode


@pytest.mark.parametrize("ranks_per_node", [None, 2])
@pytest.mark.parametrize("how", ["in line", "async", "hook"])
@pytest.mark.parametrize("travel", FORMATS)
def test_low_latency_mode(world: World, travel: str, how: str, ranks_per_node: int | None) -> None:
    case = low_latency_cases.Case((5, 0, 7, 3), hidden=512, travel=travel, how=how, combines=2)
    case = replace(case, ranks_per_node=ranks_per_node)
    for more in ({}, {"use_logfmt": True}, {"zero_copy": True}, {"in_place": True}):
        world.run(low_latency_cases.run_case, replace(case, **more))  # type: ignore[arg-type]


def test_masks(world: World) -> None:
    *outcomes, masked = world.run(test_low_latency_failure.mask_by_hand)
    assert outcomes == ["", "", ""]
    assert "go on without rank 3" in masked


def devices_of_results(context: RankContext) -> set[str]:
    """Those of every tensor that a dispatch of either mode returns."""
    case = low_latency_cases.Case((5, 0, 7, 3))
    given = low_latency_cases.inputs_of(case)[context.rank]
    buffer = low_latency_cases.buffer_for(context)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    rows, counts, handle, *_ = buffer.low_latency_dispatch(
        given.x, given.topk_idx, case.max_tokens, case.num_experts
    )
    layout = buffer.get_dispatch_layout(given.topk_idx, case.num_experts)
    per_rank, _, per_expert, in_rank, _ = layout
    normal = buffer.dispatch(
        given.x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=given.topk_idx,
        topk_weights=given.topk_weights,
    )
    return {str(part.device) for part in _tensors((rows, counts, handle, layout, normal))}


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, tuple):
        for part in thing:
            yield from _tensors(part)


def test_results_are_on_the_device_of_the_buffer(world: World) -> None:
    assert world.run(devices_of_results) == [{"cpu"}] * 4


def words_of_the_host(context: RankContext) -> list[int]:
    from anyep.backends.cuda.pinned import pinned_words

    return list(pinned_words(3))


def test_words_of_the_host(world: World) -> None:
    assert world.run(words_of_the_host) == [[0, 0, 0]] * 4


# What stands on a Buffer


@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_gradients(world: World, ranks_per_node: int | None) -> None:
    world.run(test_autograd.check_against_dense, ranks_per_node)


def gradients_under_both_defaults(context: RankContext) -> None:
    """The same bits."""
    buffer = cases.buffer_for(context, None)
    ours = test_autograd.values_and_gradients(test_autograd.on_ranks, buffer, torch.float32, 1)
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    try:
        usual = test_autograd.values_and_gradients(test_autograd.on_ranks, buffer, torch.float32, 1)
    finally:
        set_other_defaults(context.rank)
    for left, right in zip(ours, usual, strict=True):
        assert cases.oracle.same_bits(left, right)


def test_gradients_have_the_bits_of_the_usual_defaults(world: World) -> None:
    world.run(gradients_under_both_defaults)


@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_layer(world: World, ranks_per_node: int | None) -> None:
    world.run(test_nn.check_layer, 4, 2, "cpu", ranks_per_node)
    assert world.run(test_nn.check_decode, "cpu", ranks_per_node) == list(test_nn.TOKENS)


def parts_of_a_layer(context: RankContext) -> None:
    """Parameters are made as torch.nn makes them: by the defaults, unless a device and a dtype are given."""
    for stated, right in (
        ({}, ("meta", torch.bfloat16)),
        ({"device": "cpu", "dtype": torch.float16}, ("cpu", torch.float16)),
    ):
        for module in (TopKGate(16, 8, 2, **stated), FeedForward(16, 24, **stated)):  # type: ignore[arg-type]
            for parameter in module.parameters():
                assert (parameter.device.type, parameter.dtype) == right


def test_parameters_follow_torch(world: World) -> None:
    world.run(parts_of_a_layer)


def run_as_deep_ep(context: RankContext) -> None:
    anyep.install_as_deep_ep()
    import deep_ep  # type: ignore[import-not-found]

    assert deep_ep.topk_idx_t is torch.int64
    with deep_ep.Buffer(context.group, cases.NVL_BYTES, device="cpu") as buffer:
        cases.check_case(context, NORMAL["plain"], buffer)
    with deep_ep.Buffer(
        context.group, 0, low_latency_cases.RDMA_BYTES, low_latency_mode=True, device="cpu"
    ) as buffer:
        low_latency_cases.check_case(
            context.rank, low_latency_cases.Case((5, 0, 7, 3), travel="fp8", how="hook"), buffer
        )


def test_deep_ep(world: World) -> None:
    world.run(run_as_deep_ep)


# Under autocast


def run_under_autocast(context: RankContext) -> None:
    """The gate chooses and weighs in float32, as its docstring says, and the layer takes part as usual."""
    layer = test_nn.make_layer(context)
    x = test_nn.rows_of(context.rank)
    right_ids, right_weights = layer.gate(x)
    with torch.autocast("cpu", torch.bfloat16):
        ids, weights = layer.gate(x)
        output = layer(x.requires_grad_())
        output.float().pow(3).sum().backward()
    assert cases.oracle.same_bits(ids, right_ids)
    assert cases.oracle.same_bits(weights.detach(), right_weights.detach())
    assert isinstance(layer, ExpertParallelMoE)
    torch.testing.assert_close(output, layer(x), rtol=0.05, atol=0.05)
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_layer_under_autocast(world: World) -> None:
    world.run(run_under_autocast)
