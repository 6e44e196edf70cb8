"""Megatron-Core as its wheel is, on AnyEP under the name of deep_ep: fused all-to-all and flex dispatcher.

A dense layer in one process says what outputs and gradients must be. Skipped where megatron-core is not
installed (`pip install --no-deps megatron-core`).
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

import anyep
from tests.support.expert_layer import HIDDEN, INNER, NUM_EXPERTS, TOPK, layer_of
from tests.support.world import RankContext, get_world

pytestmark = [
    pytest.mark.skipif(
        find_spec("megatron") is None or find_spec("megatron.core") is None,
        reason="megatron-core is not installed: pip install --no-deps megatron-core",
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron's Buffer would be on the GPU"),
]

IMPORT_TIMEOUT_S = 180.0


def import_megatron() -> None:
    """As a user of Megatron would, on a machine without compiler, Transformer Engine and Apex."""
    anyep.install_as_deep_ep()
    torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.transformer.moe.token_dispatcher  # noqa: F401


def fused_step(context: RankContext, is_async: bool) -> tuple[torch.Tensor, ...]:
    """Each rank multiplies its rows by the sum of their weights here, and by its number (from 1)."""
    import_megatron()
    from megatron.core.transformer.moe import fused_a2a

    layer, rank = layer_of(context.num_ranks, torch.float32), context.rank
    tokens, probs = layer.tokens[rank], layer.probs[rank]
    overlap = {"async_finish": is_async, "allocate_on_comm_stream": is_async}
    rows, ids, weights, counts, handle = fused_a2a.fused_dispatch(
        tokens, layer.experts[rank], probs, NUM_EXPERTS, context.group, **overlap
    )
    per_expert = NUM_EXPERTS // context.num_ranks
    assert counts.tolist() == [int((ids == expert).sum()) for expert in range(per_expert)]
    here = weights.masked_fill(ids < 0, 0.0).sum(1, keepdim=True)
    combined, _ = fused_a2a.fused_combine(rows * here * (rank + 1), context.group, handle, **overlap)
    combined.backward(layer.output_grads[rank])
    assert tokens.grad is not None
    assert probs.grad is not None
    return combined.detach(), tokens.grad, probs.grad


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fused_dispatch_and_combine(num_ranks: int, is_async: bool) -> None:
    layer = layer_of(num_ranks, torch.float32)
    given = get_world(num_ranks).run(fused_step, is_async, timeout=IMPORT_TIMEOUT_S)
    for rank, (combined, token_grads, prob_grads) in enumerate(given):
        factors = layer.experts[rank] // (NUM_EXPERTS // num_ranks) + 1
        expected = layer.tokens[rank] * (layer.probs[rank] * factors).sum(1, keepdim=True)
        expected.backward(layer.output_grads[rank])
        torch.testing.assert_close(combined, expected.detach())
        torch.testing.assert_close(token_grads, layer.tokens[rank].grad)
        torch.testing.assert_close(prob_grads, layer.probs[rank].grad)


def flex_step(
    context: RankContext, tensor_parallel: int, dtype: torch.dtype, backend: str
) -> tuple[torch.Tensor, ...]:
    """One step of a layer whose experts are divided over ranks, and each over `tensor_parallel` of them."""
    import_megatron()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    num_ranks, rank = context.num_ranks, context.rank
    expert_parallel = num_ranks // tensor_parallel
    grid = torch.arange(num_ranks).view(expert_parallel, tensor_parallel)
    rows_of_grid, _ = dist.new_subgroups_by_enumeration(grid.tolist())
    columns_of_grid, _ = dist.new_subgroups_by_enumeration(grid.T.tolist())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=TOPK,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="flex",
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=tensor_parallel,
        moe_flex_dispatcher_backend=backend,
        add_bias_linear=False,
    )
    layer = layer_of(num_ranks, dtype)
    local = NUM_EXPERTS // expert_parallel
    first = rank // tensor_parallel * local
    inner = INNER // tensor_parallel
    columns = slice(rank % tensor_parallel * inner, (rank % tensor_parallel + 1) * inner)
    groups = ProcessGroupCollection(ep=columns_of_grid, expt_tp=rows_of_grid, tp_ep=context.group)
    dispatcher: Any = MoEFlexTokenDispatcher(local, list(range(first, first + local)), config, groups)

    tokens, probs, experts = layer.tokens[rank], layer.probs[rank], layer.experts[rank]
    spread = torch.zeros(len(tokens), NUM_EXPERTS).scatter(1, experts, probs)
    hidden, token_probs = dispatcher.dispatch_preprocess(tokens.unsqueeze(1), spread > 0, spread)
    hidden, token_probs = dispatcher.token_dispatch(hidden, token_probs)
    hidden, counts, token_probs = dispatcher.dispatch_postprocess(hidden, token_probs)
    outputs = []
    for expert, rows in enumerate(hidden.split(counts.tolist()), first):
        outputs.append((rows @ layer.up[expert, :, columns]).relu() @ layer.down[expert, columns])
    weighted = torch.cat(outputs) * token_probs.unsqueeze(1).to(dtype)
    combined = dispatcher.token_combine(dispatcher.combine_preprocess(weighted))
    combined = dispatcher.combine_postprocess(combined).squeeze(1)
    combined.backward(layer.output_grads[rank])
    grads = (tokens.grad, probs.grad, layer.up.grad, layer.down.grad)
    return (combined.detach(), *(grad for grad in grads if grad is not None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_ranks", "tensor_parallel"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_flex_token_dispatcher(
    num_ranks: int, tensor_parallel: int, dtype: torch.dtype, backend: str
) -> None:
    layer = layer_of(num_ranks, dtype)
    given = get_world(num_ranks).run(flex_step, tensor_parallel, dtype, backend, timeout=IMPORT_TIMEOUT_S)
    near: dict[str, float] = {} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
    up_grads, down_grads = torch.zeros_like(layer.up), torch.zeros_like(layer.down)
    for rank, (combined, token_grads, prob_grads, up_grad, down_grad) in enumerate(given):
        expected = torch.zeros_like(layer.tokens[rank])
        for expert in range(NUM_EXPERTS):
            weight = (layer.probs[rank] * (layer.experts[rank] == expert)).sum(1, keepdim=True).to(dtype)
            output = (layer.tokens[rank] @ layer.up[expert]).relu() @ layer.down[expert]
            expected = expected + output * weight
        expected.backward(layer.output_grads[rank])
        torch.testing.assert_close(combined, expected.detach(), **near)
        torch.testing.assert_close(token_grads, layer.tokens[rank].grad, **near)
        torch.testing.assert_close(prob_grads, layer.probs[rank].grad, **near)
        up_grads += up_grad
        down_grads += down_grad
    near = {} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.2}
    torch.testing.assert_close(up_grads, layer.up.grad, **near)
    torch.testing.assert_close(down_grads, layer.down.grad, **near)
