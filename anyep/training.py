"""What training over ranks needs besides the layer: gradients, clipping and checkpoints of sharded experts.

    model = data_parallel(model)                   # experts stay out of it; or fully_shard, docs/training.md
    loss_of(model(tokens)).backward()              # the mean over this rank's tokens
    average_expert_gradients(model, num_ranks)     # once per step: now all gradients are those of the mean
    clip_grad_norm(model, 1.0, group)              # over all ranks, each parameter counted once
    optimizer.step()
    dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=path)

Experts differ from rank to rank; everything else is one model on all ranks, replicated by
DistributedDataParallel or sharded by FSDP2. Neither may average or shard the experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from anyep.nn import ExpertParallelMoE


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of this rank's experts by their names in the model; no other rank has them.

    Exclude them from FSDP2: `fully_shard(..., ignored_params=set(expert_parameters(model).values()))`.
    If FSDP2 shards the rest of the model, give the experts their own parameter group in the optimizer: an
    optimizer may process a whole group at once, and cannot mix sharded and plain tensors there.

    Args:
        model: The model, wrapped or not.
    """
    return {
        f"{prefix}{name}": parameter
        for prefix, experts in _experts_of(model)
        for name, parameter in experts.named_parameters()
    }


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap the model in DistributedDataParallel, which averages all gradients except those of experts.

    Args:
        model: The model with its expert-parallel layers.
        options: Arguments of DistributedDataParallel, such as `process_group` or `device_ids`.
    """
    apart = [
        f"{prefix}{name}"
        for prefix, experts in _experts_of(model)
        for named in (experts.named_parameters(), experts.named_buffers())
        for name, _ in named
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, apart)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(model, **options)


@torch.no_grad()
def average_expert_gradients(
    model: nn.Module, num_ranks: int, replicas: dist.ProcessGroup | None = None
) -> None:
    """Turn the experts' gradients from sums over the ranks' losses into gradients of the mean loss.

    Each of R ranks calls `backward` on its own loss, and the loss of the batch is the mean of these. An
    expert's gradient is then the sum over the ranks, since its tokens come from all of them: R times too
    large. This divides it by R. Call it once per step, after the last `backward` and before clipping.

    Args:
        model: The model with its expert-parallel layers.
        num_ranks: R, the number of ranks whose losses are averaged, which is all data-parallel ranks.
        replicas: If several groups of ranks hold the same experts, the ranks that hold this rank's experts.
            An expert only received the tokens of its own group, so gradients are first summed over the
            replicas. R still counts the ranks of all groups.
    """
    for parameter in expert_parameters(model).values():
        if replicas is not None and parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=replicas)
        if parameter.grad is not None:
            parameter.grad.div_(num_ranks)


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, group: dist.ProcessGroup) -> Tensor:
    """Scale all gradients to a norm over all ranks of at most `max_norm`; returns the norm before scaling.

    The norm is that of the whole model's gradient, each parameter counted once, and the same on all ranks:
    squares of experts are summed over the ranks of `group`; a parameter that every rank has is counted from
    this rank's copy; one sharded by FSDP2 is summed over its own mesh. `torch.nn.utils.clip_grad_norm_` would
    compute a different norm on each rank, and the ranks' copies would diverge. Every rank makes this call.

    Args:
        model: The model with its expert-parallel layers.
        max_norm: The largest norm that gradients have afterwards.
        group: The ranks over which the experts are spread.
    """
    apart = {id(parameter) for parameter in expert_parameters(model).values()}
    experts: list[nn.Parameter] = []
    replicated: list[nn.Parameter] = []
    sharded: list[nn.Parameter] = []
    for parameter in model.parameters():
        if id(parameter) in apart:
            experts.append(parameter)
        else:
            (sharded if isinstance(parameter, DTensor) else replicated).append(parameter)
    # Without gradients the norm is on the CPU, which not every group supports.
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    square = _norm_of(experts).to(device).square()
    dist.all_reduce(square, group=group)
    for parameters in (replicated, sharded):
        square = square + _norm_of(parameters).to(device).square()
    norm = square.sqrt()
    for parameters in (experts, replicated, sharded):
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


class TrainingState(Stateful):
    """Model and optimizer for `torch.distributed.checkpoint`, which loads them into any number of ranks.

        dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=path)
        dcp.load({"training": TrainingState(model, optimizer)}, checkpoint_id=path)

    An expert's tensors are named by its number in the whole layer: each rank writes the experts that it has,
    and reads those that it needs, including those that other ranks wrote. The rest is written once, or by
    shards if FSDP2 sharded it. Names are those of the unwrapped model: FSDP2 or a single process can read
    what DDP wrote.

    Args:
        model: The model, wrapped or not.
        optimizer: The optimizer of its parameters.
    """

    # By parameter, not by group: the lists of parameters in an optimizer's groups differ from rank to rank.
    _OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self._OPTIONS)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put loaded tensors into the model and the optimizer.

        Args:
            state_dict: What `state_dict` returned, with the tensors as loaded.
        """
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
            options=self._OPTIONS,
        )


def _experts_of(model: nn.Module) -> list[tuple[str, nn.ModuleDict]]:
    """The experts of each layer, with the prefix of their names in the model."""
    return [
        (f"{name}.experts." if name else "experts.", module.experts)
        for name, module in model.named_modules()
        if isinstance(module, ExpertParallelMoE)
    ]


def _norm_of(parameters: list[nn.Parameter]) -> Tensor:
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).float()
