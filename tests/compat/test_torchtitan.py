"""torchtitan's files for `HybridEPBuffer` and `ElasticBuffer`, as its wheel has them, on AnyEP under the name
of deep_ep: forward and backward of a layer, on CPU tensors.

A dense layer in one process says what outputs and gradients must be. The operators that these files register
for GPUs are registered for CPUs here as well; nothing else is changed. They are loaded without the package
that they are in, which imports what they do not need. Skipped where torchtitan is not
installed (`pip install --no-deps torchtitan`).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._library import opaque_object

import anyep
from tests.compat.test_megatron import HIDDEN, NUM_EXPERTS, TOPK, Layer, layer_of
from tests.support.world import RankContext, get_world

pytestmark = [
    pytest.mark.skipif(
        find_spec("torchtitan") is None,
        reason="torchtitan is not installed: pip install --no-deps torchtitan",
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="torchtitan's Buffer would be on the GPU"),
]
IMPORT_TIMEOUT_S = 180.0


def on_cpus(context: RankContext, name: str) -> Any:
    """A file of torchtitan, whose operators run on CPU tensors, too."""
    if name not in context.keep:
        anyep.install_as_deep_ep()
        package = find_spec("torchtitan")
        assert package is not None
        assert package.submodule_search_locations is not None
        file = Path(package.submodule_search_locations[0]) / "distributed" / "deepep" / f"{name}.py"
        spec = spec_from_file_location(f"torchtitan_{name}", file)
        assert spec is not None
        assert spec.loader is not None
        module: Any = module_from_spec(spec)
        if not hasattr(opaque_object, "CustomClassBase"):
            # Its name in releases of torch before the one that this torchtitan was written for.
            opaque_object.CustomClassBase = opaque_object.OpaqueBase  # type: ignore[attr-defined]
        # Its data classes look for it there.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        if name == "hybridep":
            for operator in ("dispatch", "combine", "dispatch_bwd", "combine_bwd"):
                implementation = getattr(module, f"_{operator}_impl")
                implementation.register_kernel("cpu")(implementation._init_fn)
        else:
            for operator in ("dispatch", "combine"):
                torch.library.impl(module._lib, operator, "CPU")(getattr(module, f"_{operator}_op_impl"))
        context.keep[name] = module
    return context.keep[name]


def outputs_of(layer: Layer, rows: torch.Tensor, counts: list[int], first: int) -> torch.Tensor:
    """What the experts make of their rows; rows past those that `counts` counts become 0."""
    used = rows[: sum(counts)].split(counts)
    outputs = [
        (group @ layer.up[expert]).relu() @ layer.down[expert] for expert, group in enumerate(used, first)
    ]
    return torch.cat([*outputs, torch.zeros_like(rows[sum(counts) :])])


def hybrid_step(
    context: RankContext, capacity_factor: float | None, pad_multiple: int | None
) -> tuple[torch.Tensor, ...]:
    hybridep: Any = on_cpus(context, "hybridep")
    layer, rank, local = (
        layer_of(context.num_ranks, torch.float32),
        context.rank,
        NUM_EXPERTS // context.num_ranks,
    )
    tokens, probs = layer.tokens[rank], layer.probs[rank]
    hybridep.get_buffer(context.group, HIDDEN, max(map(len, layer.tokens)), local)
    rows, counts, state = hybridep.dispatch_tokens(
        *(tokens, layer.experts[rank], probs, local, NUM_EXPERTS, context.group),
        non_blocking_expert_capacity_factor=capacity_factor,
        pad_multiple=pad_multiple,
    )
    outputs = outputs_of(layer, rows, counts.tolist(), rank * local)
    combined = hybridep.combine_tokens(outputs, state, pad_multiple)
    combined.backward(layer.output_grads[rank])
    grads = (tokens.grad, probs.grad, layer.up.grad, layer.down.grad)
    return (combined.detach(), *(grad for grad in grads if grad is not None))


def elastic_step(context: RankContext, expands: bool) -> tuple[torch.Tensor, ...]:
    deepep: Any = on_cpus(context, "deepep")
    layer, rank, local = (
        layer_of(context.num_ranks, torch.float32),
        context.rank,
        NUM_EXPERTS // context.num_ranks,
    )
    tokens, probs, most = layer.tokens[rank], layer.probs[rank], max(map(len, layer.tokens))
    deepep.get_buffer(context.group, hidden=HIDDEN, num_max_tokens_per_rank=most, num_topk=TOPK)
    with torch.set_grad_enabled(not expands):
        rows, counts, state = deepep.dispatch_tokens(
            *(tokens, layer.experts[rank], probs, local, NUM_EXPERTS),
            num_tokens_per_rank=most,
            cudagraphable=expands,
        )
        outputs = outputs_of(layer, rows, counts.tolist(), rank * local)
        combined = deepep.combine_tokens(outputs, state)
        deepep.sync_combine()
    if expands:
        return (combined,)
    combined.backward(layer.output_grads[rank])
    grads = (tokens.grad, probs.grad, layer.up.grad, layer.down.grad)
    return (combined.detach(), *(grad for grad in grads if grad is not None))


def check_against_dense(layer: Layer, given: list[Any]) -> None:
    up_grads, down_grads = torch.zeros_like(layer.up), torch.zeros_like(layer.down)
    for rank, (combined, *grads) in enumerate(given):
        expected = torch.zeros_like(layer.tokens[rank])
        for expert in range(NUM_EXPERTS):
            weight = (layer.probs[rank] * (layer.experts[rank] == expert)).sum(1, keepdim=True)
            output = (layer.tokens[rank] @ layer.up[expert]).relu() @ layer.down[expert]
            expected = expected + output * weight
        torch.testing.assert_close(combined, expected.detach())
        if grads:
            expected.backward(layer.output_grads[rank])
            torch.testing.assert_close(grads[0], layer.tokens[rank].grad)
            torch.testing.assert_close(grads[1], layer.probs[rank].grad)
            up_grads += grads[2]
            down_grads += grads[3]
    if given[0][1:]:
        torch.testing.assert_close(up_grads, layer.up.grad)
        torch.testing.assert_close(down_grads, layer.down.grad)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("capacity_factor", "pad_multiple"), [(None, None), (None, 8), (1.0, 8)])
def test_hybrid(num_ranks: int, capacity_factor: float | None, pad_multiple: int | None) -> None:
    given = get_world(num_ranks).run(hybrid_step, capacity_factor, pad_multiple, timeout=IMPORT_TIMEOUT_S)
    check_against_dense(layer_of(num_ranks, torch.float32), given)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("expands", [False, True])
def test_elastic(num_ranks: int, expands: bool) -> None:
    given = get_world(num_ranks).run(elastic_step, expands, timeout=IMPORT_TIMEOUT_S)
    check_against_dense(layer_of(num_ranks, torch.float32), given)
