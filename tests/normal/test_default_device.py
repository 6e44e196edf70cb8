"""Everything works whatever torch's default device and default dtype are, and gives the same bits.

Programs set them for their own tensors (`torch.set_default_device("cuda")`). On a GPU they are "cuda" and
bfloat16 here; elsewhere "meta", on which a tensor has no values: a tensor made without an explicit device or
dtype fails the checks against the reference. `tests/unit/test_explicit_devices.py` checks the source for the
same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import anyep
from anyep.api.buffer import Buffer
from anyep.nn import ExpertParallelMoE, FeedForward, TopKGate
from tests.support import cases, dense_gradients, gpu_pairs, low_latency_cases, moe
from tests.support.low_latency_cases import FORMATS
from tests.support.places import Place, buffer_device, tensor_device
from tests.support.world import RankContext

CPU = Place("cpu", 4, other_defaults=True)
SIMULATED = Place("simulated", 2, other_defaults=True)
GPU = Place("cuda", 2, other_defaults=True)
TIMEOUT_S = 200.0
TOKENS = (5, 0, 7, 3)
NORMAL = {
    "plain": cases.Case(TOKENS),
    "float32, biases and weights": cases.Case(
        TOKENS, dtype="float32", num_biases=2, combine_weights=True, num_topk=3
    ),
    "fp8 with scales": cases.Case(TOKENS, dtype="float8_e4m3fn", num_scales=5, strided_scales=True),
    "the worst case, asynchronous": cases.Case(TOKENS, worst=True, run_async=True, combine_weights=True),
    "some choices missing": cases.Case(TOKENS, routing="some missing", num_topk=4, alignment=4),
    "without choices of experts": cases.Case(TOKENS, send_topk=False),
}
COMBINES: tuple[dict[str, Any], ...] = (
    {"how": "in line", "in_place": True},
    {"how": "hook", "use_logfmt": True},
    {"how": "async", "zero_copy": True},
)
IN_ONE_PROCESS = pytest.mark.xdist_group("other defaults")


def param(place: Place, *more: Any, slow: bool = False) -> Any:
    marks = [IN_ONE_PROCESS, *([pytest.mark.slow] if slow else [])]
    return place.param(*more, marks=marks, name="-".join(map(str, (place, *more))))


EVERYWHERE = [param(place) for place in (CPU, SIMULATED, GPU)]
WITH_A_LAYER = [param(place) for place in (CPU, GPU)]
ON_THE_CPU = [param(CPU)]


def are_other_defaults(context: RankContext) -> bool:
    made = torch.zeros(1)
    return made.device.type == ("cuda" if tensor_device() == "cuda" else "meta") and (
        made.dtype == torch.bfloat16
    )


@pytest.mark.parametrize("place", EVERYWHERE)
def test_the_defaults_are_others(place: Place) -> None:
    assert all(place.world().run(are_other_defaults))


# Normal mode


@pytest.mark.parametrize(
    ("place", "name"),
    [
        param(place, name, slow=place == SIMULATED and index > 2)
        for place in (CPU, SIMULATED, GPU)
        for index, name in enumerate(NORMAL)
    ],
)
def test_normal_mode(place: Place, name: str) -> None:
    nodes = (None, 2, 1) if place == CPU else (None,)
    for ranks_per_node in nodes:
        for num_window_bytes in (None,) if place == SIMULATED else (None, 0):
            case = replace(NORMAL[name], tokens=TOKENS if place == CPU else (5, 7))
            case = replace(case, ranks_per_node=ranks_per_node, num_window_bytes=num_window_bytes)
            place.world().run(cases.run_case, case, timeout=TIMEOUT_S)


@pytest.mark.parametrize(("place", "num_pairs"), [param(SIMULATED, 4), param(GPU, 200)])
def test_pairs_of_all_kinds(place: Place, num_pairs: int) -> None:
    place.world().run(gpu_pairs.soak, num_pairs, 1 << 20, 5, timeout=TIMEOUT_S)


def device_by_default(context: RankContext) -> str:
    with Buffer(context.group, cases.NVL_BYTES) as buffer:
        cases.check_case(context, NORMAL["plain"], buffer)
        return buffer._device.type


@pytest.mark.skipif(torch.cuda.is_available(), reason="a Buffer works on the GPU that is here")
@pytest.mark.parametrize("place", ON_THE_CPU)
def test_the_device_of_a_buffer_is_not_the_default_of_torch(place: Place) -> None:
    assert place.world().run(device_by_default) == ["cpu"] * 4


# Low-latency mode


@pytest.mark.parametrize(
    ("place", "travel"),
    [
        param(place, travel, slow=place == SIMULATED and travel != FORMATS[-1])
        for place in (CPU, SIMULATED, GPU)
        for travel in FORMATS
    ],
)
def test_low_latency_mode(place: Place, travel: str) -> None:
    case = low_latency_cases.Case(TOKENS if place == CPU else (4, 3), hidden=512, travel=travel, combines=2)
    for ranks_per_node in (None, 2) if place == CPU else (None,):
        for more in COMBINES:
            changed = replace(case, ranks_per_node=ranks_per_node, **more)
            place.world().run(low_latency_cases.run_case, changed, timeout=TIMEOUT_S)


def mask_by_hand(context: RankContext) -> None:
    case = low_latency_cases.Case(TOKENS, hidden=64)
    last = context.num_ranks - 1
    buffer = low_latency_cases.buffer_for(context, enable_shrink=True)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    torch.distributed.barrier(context.group)
    if context.rank == 0:
        buffer.low_latency_update_mask_buffer(last, mask=True)
    torch.distributed.barrier(context.group)
    mask = torch.zeros(context.num_ranks, dtype=torch.int32, device="cpu")
    buffer.low_latency_query_mask_buffer(mask)
    assert mask.tolist() == [0] * last + [1]
    if context.rank != last:
        low_latency_cases.check_case(context.rank, case, buffer, frozenset([last]))
    torch.distributed.barrier(context.group)
    buffer.low_latency_clean_mask_buffer()
    low_latency_cases.check_case(context.rank, case, buffer)


@pytest.mark.parametrize("place", ON_THE_CPU)
def test_masks(place: Place) -> None:
    place.world().run(mask_by_hand)


def devices_of_results(context: RankContext, device: str) -> set[str]:
    """Those of every tensor that a dispatch of either mode returns."""
    case = low_latency_cases.Case(TOKENS[: context.num_ranks])
    given = low_latency_cases.on(device, low_latency_cases.inputs_of(case)[context.rank])
    num_bytes = low_latency_cases.NVL_BYTES, low_latency_cases.RDMA_BYTES
    with Buffer(context.group, *num_bytes, low_latency_mode=True, device=device) as buffer:
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
        return {part.device.type for part in _tensors((rows, counts, handle, layout, normal))}


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, tuple):
        for part in thing:
            yield from _tensors(part)


@pytest.mark.parametrize(("place", "device"), [param(CPU, "cpu"), param(GPU, "cpu"), param(GPU, "cuda")])
def test_results_are_on_the_device_of_the_buffer(place: Place, device: str) -> None:
    assert place.world().run(devices_of_results, device) == [{device}] * place.num_ranks


def use_the_cpu(context: RankContext) -> None:
    """On a rank that has a GPU."""
    with Buffer(context.group, cases.NVL_BYTES, device="cpu") as buffer:
        cases.check_case(context, replace(NORMAL["plain"], tokens=(5, 7)), buffer, "cpu")
    num_bytes = low_latency_cases.NVL_BYTES, low_latency_cases.RDMA_BYTES
    for travel in FORMATS:
        for more in COMBINES:
            case = low_latency_cases.Case((5, 7), hidden=512, travel=travel, **more)
            with Buffer(context.group, *num_bytes, low_latency_mode=True, device="cpu") as buffer:
                low_latency_cases.check_case(context.rank, case, buffer, device="cpu")


@pytest.mark.parametrize("place", [param(GPU)])
def test_a_buffer_on_the_cpu_beside_a_gpu(place: Place) -> None:
    place.world().run(use_the_cpu, timeout=TIMEOUT_S)


def words_of_the_host(context: RankContext) -> list[int]:
    from anyep.backends.cuda.pinned import pinned_words

    return list(pinned_words(3))


@pytest.mark.parametrize("place", ON_THE_CPU)
def test_words_of_the_host(place: Place) -> None:
    assert place.world().run(words_of_the_host) == [[0, 0, 0]] * 4


# What stands on a Buffer


@pytest.mark.parametrize("place", WITH_A_LAYER)
def test_gradients(place: Place) -> None:
    for ranks_per_node in (None, 2) if place == CPU else (None,):
        place.world().run(dense_gradients.check_against_dense, ranks_per_node, timeout=TIMEOUT_S)


def gradients_under_both_defaults(context: RankContext) -> None:
    """The same bits."""
    buffer = cases.buffer_for(context, None)
    on_ranks, values_of = dense_gradients.on_ranks, dense_gradients.values_and_gradients
    ours = values_of(on_ranks, buffer, torch.float32, 1)
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    try:
        usual = values_of(on_ranks, buffer, torch.float32, 1)
    finally:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.bfloat16)
    for left, right in zip(ours, usual, strict=True):
        assert cases.oracle.same_bits(left, right)


@pytest.mark.parametrize("place", ON_THE_CPU)
def test_gradients_have_the_bits_of_the_usual_defaults(place: Place) -> None:
    place.world().run(gradients_under_both_defaults)


@pytest.mark.parametrize("place", WITH_A_LAYER)
def test_layer(place: Place) -> None:
    for ranks_per_node in (None, 2) if place == CPU else (None,):
        place.world().run(moe.check_layer, 4, 2, ranks_per_node, timeout=TIMEOUT_S)
        decoded = place.world().run(moe.check_decode, ranks_per_node, timeout=TIMEOUT_S)
        assert decoded == list(moe.TOKENS[: place.num_ranks])


def parts_of_a_layer(context: RankContext) -> None:
    """Parameters are made as torch.nn makes them: by the defaults, unless a device and a dtype are given."""
    for stated, right in (
        ({}, ("meta", torch.bfloat16)),
        ({"device": "cpu", "dtype": torch.float16}, ("cpu", torch.float16)),
    ):
        for module in (TopKGate(16, 8, 2, **stated), FeedForward(16, 24, **stated)):  # type: ignore[arg-type]
            for parameter in module.parameters():
                assert (parameter.device.type, parameter.dtype) == right


@pytest.mark.parametrize("place", ON_THE_CPU)
def test_parameters_follow_torch(place: Place) -> None:
    place.world().run(parts_of_a_layer)


def run_as_deep_ep(context: RankContext) -> None:
    anyep.install_as_deep_ep()
    import deep_ep  # type: ignore[import-not-found]

    assert deep_ep.topk_idx_t is torch.int64
    device = buffer_device()
    with deep_ep.Buffer(context.group, cases.NVL_BYTES, device=device) as buffer:
        cases.check_case(context, NORMAL["plain"], buffer)
    num_bytes = low_latency_cases.RDMA_BYTES
    with deep_ep.Buffer(context.group, 0, num_bytes, low_latency_mode=True, device=device) as buffer:
        case = low_latency_cases.Case(TOKENS, travel="fp8", how="hook")
        low_latency_cases.check_case(context.rank, case, buffer)


@pytest.mark.parametrize("place", ON_THE_CPU)
def test_deep_ep(place: Place) -> None:
    place.world().run(run_as_deep_ep)


# Under autocast


def run_under_autocast(context: RankContext) -> None:
    """The gate chooses and weighs in float32, as its docstring says, and the layer takes part as usual."""
    layer = moe.make_layer(context)
    x = moe.rows_of(context.rank)
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


@pytest.mark.parametrize("place", ON_THE_CPU)
def test_layer_under_autocast(place: Place) -> None:
    place.world().run(run_under_autocast)
