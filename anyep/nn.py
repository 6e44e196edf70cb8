"""A Mixture-of-Experts layer whose experts live on the ranks of a group: to use, or to copy and change.

    gate = TopKGate(hidden, num_experts=64, topk=8)
    experts = [FeedForward(hidden, inner) for _ in range(64 // group.size())]
    layer = ExpertParallelMoE(gate, experts, group)
    y = layer(x)        # each rank with its own tokens; gradients flow to x, the gate and the experts

With R ranks, rank r holds the experts [r * 64 / R, (r + 1) * 64 / R). Their parameters are named
by the expert's number in the whole layer, so the state dicts of all ranks together are that of one process,
and a whole state dict loads into any number of ranks.

Layers of one model share a Buffer: `make_buffer` makes it, and each layer gets it as `buffer`; else each
makes its own, when it is made (given `hidden`) or first called. For decoding, set `low_latency` on every
rank; then at most `max_decode_tokens` tokens per rank and call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyep import autograd
from anyep.agreement import Said, check_agreement
from anyep.arguments import check_num_experts
from anyep.buffer import Buffer
from anyep.errors import InvalidCall, whole_number
from anyep.machine import host_identity
from anyep.modes.connection import chosen_topology, on_all_ranks
from anyep.rendezvous import rendezvous_of
from anyep.settings import RANKS_PER_NODE
from anyep.sizes import size_hints

Expert = Callable[[Tensor], Tensor]


def make_buffer(
    group: Any,
    hidden: int,
    num_experts: int,
    max_decode_tokens: int = 0,
    device: str | torch.device | None = None,
    ranks_per_node: int | None = None,
) -> Buffer:
    """A Buffer for layers of this size, with float32 rows or smaller ones; every rank makes it.

    A node is a host, unless `ranks_per_node` (or `ANYEP_RANKS_PER_NODE`) says that a host is several.
    """
    rendezvous = rendezvous_of(group, None)
    num_ranks = rendezvous.num_ranks
    check_num_experts(num_experts, num_ranks)
    told = on_all_ranks(
        rendezvous, lambda: (host_identity(), RANKS_PER_NODE.choose(ranks_per_node), Buffer.num_sms)
    )
    check_agreement(
        [{"ranks_per_node": Said.of(chosen), "num_sms": Said(num_sms)} for _, chosen, num_sms in told]
    )
    per_node = chosen_topology([host for host, _, _ in told], told[rendezvous.rank][1]).ranks_per_node
    num_nvl_bytes, num_rdma_bytes = size_hints(hidden * 4, num_ranks, per_node, Buffer.num_sms)
    if max_decode_tokens:
        num_decode_bytes = Buffer.get_low_latency_rdma_size_hint(
            max_decode_tokens, hidden, num_ranks, num_experts
        )
        num_rdma_bytes = max(num_rdma_bytes, num_decode_bytes)
    return Buffer(
        group,
        num_nvl_bytes,
        num_rdma_bytes,
        low_latency_mode=max_decode_tokens > 0,
        device=device,
        ranks_per_node=ranks_per_node,
    )


class TopKGate(nn.Module):
    """Chooses each token's experts by softmax scores, and weighs them by their share of the chosen scores.

    With groups of experts (`num_groups`), only the experts of the best `topk_groups` of them are eligible;
    a group is as good as the sum of its two best scores. With a group per rank, or per node, this limits to
    how many of them a token travels.
    """

    def __init__(
        self, hidden: int, num_experts: int, topk: int, num_groups: int = 1, topk_groups: int = 1
    ) -> None:
        super().__init__()
        for name, number in (("hidden", hidden), ("num_experts", num_experts), ("num_groups", num_groups)):
            whole_number(name, number, minimum=1)
        if num_experts % num_groups or not 1 <= topk_groups <= num_groups:
            raise InvalidCall(
                f"{topk_groups} of {num_groups} groups of {num_experts} experts: groups must have equal sizes"
            )
        if not 1 <= topk <= topk_groups * (num_experts // num_groups):
            raise InvalidCall(f"topk is {topk}: that many experts are not in {topk_groups} of the groups")
        self.topk, self.num_groups, self.topk_groups = topk, num_groups, topk_groups
        self.weight = nn.Parameter(torch.randn(num_experts, hidden) * hidden**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row, and their weights in float32."""
        scores = functional.linear(x.float(), self.weight.float()).softmax(dim=-1)
        topk_idx = self._eligible(scores.detach()).topk(self.topk, dim=-1).indices
        weights = scores.gather(-1, topk_idx)
        return topk_idx, weights / weights.sum(dim=-1, keepdim=True)

    def _eligible(self, scores: Tensor) -> Tensor:
        """The scores, with -1 for experts in other groups than the best."""
        if self.topk_groups == self.num_groups:
            return scores
        by_group = scores.view(len(scores), self.num_groups, scores.shape[1] // self.num_groups)
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(dim=-1)
        others = torch.ones_like(best, dtype=torch.bool).scatter(
            -1, best.topk(self.topk_groups, dim=-1).indices, False
        )
        return by_group.masked_fill(others.unsqueeze(-1), -1.0).flatten(-2)


class FeedForward(nn.Module):
    """An expert: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


def run_experts(rows: Tensor, topk_idx: Tensor, weights: Tensor, experts: Sequence[Expert]) -> Tensor:
    """Each row's weighted sum over its experts, in float32, ascending; -1 in `topk_idx` means none.

    Rows are sorted by expert, so that each expert is called once, with all of its rows.

    >>> rows, ids = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [-1, 1]])
    >>> run_experts(rows, ids, torch.ones(2, 2), [lambda x: x, lambda x: 10 * x])
    tensor([[11.],
            [20.]])
    """
    row, slot = torch.nonzero(topk_idx >= 0, as_tuple=True)
    expert_of = topk_idx[row, slot]
    order = expert_of.argsort(stable=True)
    row, slot = row[order], slot[order]
    counts = expert_of.new_zeros(len(experts)).index_add(0, expert_of, torch.ones_like(expert_of))
    parts = torch.split(rows[row], counts.tolist())
    outputs = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    weighted = outputs.float() * weights[row, slot].unsqueeze(-1)
    return torch.zeros_like(rows, dtype=torch.float32).index_add(0, row, weighted).to(rows.dtype)


class ExpertParallelMoE(nn.Module):
    """`gate` chooses, `experts` are this rank's, or a function that makes the one of a number; x is
    [..., hidden].

    A gate returns the experts of each row and their weights in float32. It is the same on all ranks: its
    gradients, like those of everything but the experts, are to be summed over the ranks. Without `hidden` the
    Buffer is made in the first call.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: Callable[[int], nn.Module] | Iterable[nn.Module],
        group: Any,
        num_experts: int | None = None,
        hidden: int | None = None,
        max_decode_tokens: int = 0,
        *,
        buffer: Buffer | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.gate, self._group, self._device = gate, group, device
        self.num_experts, local = _local_experts(experts, group, num_experts)
        self.experts = nn.ModuleDict({str(index): expert for index, expert in local.items()})
        self.max_decode_tokens, self.low_latency = max_decode_tokens, False
        self.buffer = buffer
        if hidden is not None:
            self.ready_buffer(hidden)
        self.register_load_state_dict_pre_hook(_leave_out_other_experts)  # type: ignore[no-untyped-call]

    def ready_buffer(self, hidden: int) -> Buffer:
        """The layer's Buffer; it is made if there is none yet, on every rank."""
        if self.buffer is None:
            self.buffer = make_buffer(
                self._group, hidden, self.num_experts, self.max_decode_tokens, self._device
            )
        return self.buffer

    def forward(self, x: Tensor) -> Tensor:
        if self.low_latency:
            return self.decode(x)
        flat, buffer = x.reshape(-1, x.shape[-1]), self.ready_buffer(x.shape[-1])
        topk_idx, weights = self.gate(flat)
        received = autograd.dispatch(buffer, flat, topk_idx, weights, self.num_experts)
        experts = list(self.experts.values())
        outputs = run_experts(received.x, received.topk_idx, received.topk_weights, experts)
        combined, _ = autograd.combine(buffer, outputs, received.handle)
        return combined.view(x.shape)

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        """The same for a few tokens in bfloat16, in low-latency mode: no gradients.

        An expert's output is rounded to bfloat16; the weighted sum is made in float32, in the order of the
        gate's choice, and rounded once.
        """
        flat, buffer = x.reshape(-1, x.shape[-1]), self.ready_buffer(x.shape[-1])
        topk_idx, weights = self.gate(flat)
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(
            flat.contiguous(), topk_idx, self.max_decode_tokens, self.num_experts, use_fp8=False
        )
        assert isinstance(rows, Tensor)
        outputs = torch.empty_like(rows)
        for local, (expert, count) in enumerate(zip(self.experts.values(), counts.tolist(), strict=True)):
            outputs[local, :count] = expert(rows[local, :count])
        combined, _, _ = buffer.low_latency_combine(outputs, topk_idx, weights, handle)
        return combined.view(x.shape)


def _local_experts(
    experts: Callable[[int], nn.Module] | Iterable[nn.Module], group: Any, num_experts: int | None
) -> tuple[int, dict[int, nn.Module]]:
    """The number of experts of the layer, and this rank's by their numbers."""
    rendezvous = rendezvous_of(group, None)
    num_ranks, rank = rendezvous.num_ranks, rendezvous.rank
    if not isinstance(experts, Iterable):
        if not callable(experts) or isinstance(experts, nn.Module):
            raise InvalidCall(
                f"experts is of type {type(experts).__name__}: pass the modules of this rank's experts, or a"
                f" function that makes the one of a number"
            )
        if num_experts is None:
            raise InvalidCall("num_experts is missing: it tells how many experts to make")
        num_local = check_num_experts(num_experts, num_ranks) // num_ranks
        return num_experts, {
            index: experts(index) for index in range(rank * num_local, (rank + 1) * num_local)
        }
    local = list(experts)
    if num_experts not in (None, len(local) * num_ranks):
        raise InvalidCall(
            f"{len(local)} experts on each of {num_ranks} ranks are not {num_experts}: pass this rank's"
            f" experts only, or a function that makes them"
        )
    return len(local) * num_ranks, dict(enumerate(local, rank * len(local)))


def _leave_out_other_experts(layer: ExpertParallelMoE, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A whole state dict may be loaded: the experts of other ranks are passed over."""
    for index in range(layer.num_experts):
        if str(index) not in layer.experts:
            start = f"{prefix}experts.{index}."
            for key in [key for key in state if key.startswith(start)]:
                del state[key]
