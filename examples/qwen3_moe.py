"""A Qwen3-MoE model of Hugging Face transformers, small and random, with its experts spread over ranks.

`shard` exchanges every Mixture-of-Experts block for AnyEP's layer; the rest of the model stays as it is, on
every rank. A rank keeps its own experts only. Parameters have the names of Qwen3-MoE's published
checkpoints (`model.layers.0.mlp.experts.5.up_proj.weight`), so what all ranks hold together is one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter

from anyep.nn import ExpertParallelMoE, make_buffer

VOCABULARY = 64


def make_model(seed: int = 0) -> Qwen3MoeForCausalLM:
    """The same random model on every rank: 2 layers of 8 experts, of which each token takes 3."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        moe_intermediate_size=32,
        max_position_embeddings=256,
        initializer_range=0.1,
        experts_implementation="eager",
    )
    return Qwen3MoeForCausalLM(config)


class Router(Qwen3MoeTopKRouter):
    """The model's own router, with its results in the order that AnyEP's layer wants."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, weights, experts = super().forward(x)
        return experts, weights.float()


class Expert(nn.Module):
    """One expert of the model, taken out of the block that holds them all as one tensor."""

    def __init__(self, experts: Any, index: int) -> None:
        super().__init__()
        gate, up = experts.gate_up_proj[index].chunk(2)
        self.gate_proj, self.up_proj, self.down_proj = map(_linear, (gate, up, experts.down_proj[index]))
        self.activation = experts.act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def _linear(weight: Tensor) -> nn.Linear:
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=False, device=weight.device, dtype=weight.dtype)
    linear.weight.data.copy_(weight.detach())
    return linear


def router_of(block: Qwen3MoeSparseMoeBlock, config: Qwen3MoeConfig) -> Router:
    router = Router(config)
    router.weight = block.gate.weight
    return router


def shard(model: Qwen3MoeForCausalLM, group: dist.ProcessGroup, max_decode_tokens: int = 0) -> None:
    """Leave this rank its part of the experts; all layers talk through one Buffer."""
    config = model.config
    sizes = config.num_experts, config.hidden_size, max_decode_tokens
    buffer = make_buffer(group, config.hidden_size, config.num_experts, max_decode_tokens, device="cpu")
    for layer in model.model.layers:
        block = layer.mlp
        layer.mlp = ExpertParallelMoE(
            router_of(block, config),
            lambda i, all_=block.experts: Expert(all_, i),
            group,
            *sizes,
            buffer=buffer,
        )


def sum_shared_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """What every rank holds, all but the experts, has on each rank the gradient of that rank's tokens."""
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


def reference_gradient(name: str, whole: Qwen3MoeForCausalLM) -> Tensor:
    """The whole model's gradient for a parameter of the sharded one."""
    gradients = {key: parameter.grad for key, parameter in whole.named_parameters()}
    if ".experts." not in name:
        return gradients[name]
    block, _, rest = name.partition(".experts.")
    index, part, _ = rest.split(".")
    if part == "down_proj":
        return gradients[f"{block}.experts.down_proj"][int(index)]
    gate, up = gradients[f"{block}.experts.gate_up_proj"][int(index)].chunk(2)
    return gate if part == "gate_proj" else up


def relative_difference(ours: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((ours - right).detach().abs().max() / right.detach().abs().max())
