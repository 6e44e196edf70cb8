"""A Mixture-of-Experts layer with experts spread over the ranks of a group: to use, or to copy and change.

    gate = TopKGate(hidden, num_experts=64, topk=8)
    experts = [FeedForward(hidden, inner) for _ in range(64 // group.size())]
    layer = ExpertParallelMoE(gate, experts, group)
    y = layer(x)        # each rank with its own tokens; gradients flow to x, the gate and the experts

With R ranks, rank r holds the experts [r * 64 / R, (r + 1) * 64 / R). Their parameters are named
by the expert's number in the whole layer, so the state dicts of all ranks together form that of one process,
and a whole state dict loads into any number of ranks.

Layers of one model share a Buffer: `make_buffer` makes it, and each layer gets it as `buffer`. A layer
without one makes its own, in its constructor (given `hidden`) or in its first call. For decoding, set
`low_latency` on every rank; then each rank may pass at most `max_decode_tokens` tokens per call.

A copy of a layer (`copy.deepcopy`, an averaged model) uses the Buffer of the original. A pickled layer
(`torch.save` of the module) does not contain it, and needs a new one after loading: `layer.buffer = ...`.

`layer(x, output_router_logits=True)` returns the router's logits as well; `anyep.balance` has losses computed
from them, and `anyep.training` has what training over ranks needs besides. Both are reachable from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyep import autograd
from anyep.api.arguments import check_num_experts
from anyep.api.buffer import Buffer
from anyep.api.elastic import ElasticBuffer
from anyep.balance import expert_counts, load_balancing_loss, router_z_loss, update_bias
from anyep.connection import chosen_topology, on_all_ranks
from anyep.errors import InvalidCall, NotSupported, whole_number
from anyep.feed_forward import FeedForward
from anyep.grouped_experts import ROW_ALIGNMENT, run_grouped_experts, way_of
from anyep.join.agreement import RankValue, check_agreement
from anyep.join.rendezvous import rendezvous_of
from anyep.machine import host_identity
from anyep.settings import RANKS_PER_NODE
from anyep.sizes import size_hints

__all__ = [
    "ExpertParallelMoE",
    "FeedForward",
    "TopKGate",
    "expert_counts",
    "expert_layers",
    "load_balancing_loss",
    "make_buffer",
    "router_z_loss",
    "run_experts",
    "run_grouped_experts",
    "update_bias",
]

Expert = Callable[[Tensor], Tensor]


def make_buffer(
    group: Any,
    hidden: int,
    num_experts: int,
    max_decode_tokens: int = 0,
    device: str | torch.device | None = None,
    ranks_per_node: int | None = None,
) -> Buffer:
    """Make a Buffer for layers of this size, with rows of float32 or a smaller dtype; collective.

    A node is a host, unless `ranks_per_node` (or `ANYEP_RANKS_PER_NODE`) splits a host into several nodes.

    Args:
        group: The process group of the ranks.
        hidden: Values per row.
        num_experts: The experts of all ranks together, a multiple of the number of ranks.
        max_decode_tokens: The most tokens that a rank passes to one `decode`; 0: no low-latency mode.
        device: "cpu" or "cuda"; by default CUDA where there is a GPU.
        ranks_per_node: The ranks of a virtual node.
    """
    rendezvous = rendezvous_of(group, None)
    num_ranks = rendezvous.num_ranks
    check_num_experts(num_experts, num_ranks)
    told = on_all_ranks(
        rendezvous, lambda: (host_identity(), RANKS_PER_NODE.choose(ranks_per_node), Buffer.num_sms)
    )
    check_agreement(
        [{"ranks_per_node": RankValue.of(chosen), "num_sms": RankValue(sms)} for _, chosen, sms in told]
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
    """Chooses each token's experts by softmax scores, and weights them by their share of the chosen scores.

    With groups of experts (`num_groups`), only the experts of the best `topk_groups` groups are eligible;
    a group's score is the sum of its two best scores. With one group per rank, or per node, this limits the
    number of ranks or nodes that a token is sent to.

    With `has_bias` the gate has a buffer `bias`, one float32 number per expert, zero at first. It is added to
    the scores for the choice only, not for the weights, and gets no gradient: `update_bias` changes it after
    each step. Keep it in float32 when the model is converted to a smaller dtype.

    `device` and `dtype` are those of the weight; as in torch.nn, they default to torch's defaults.

    Args:
        hidden: Values per row.
        num_experts: The experts of all ranks together.
        topk: The experts of each token.
        num_groups: Groups of equally many experts.
        topk_groups: The groups whose experts are eligible.
        has_bias: Add a bias per expert to the scores that decide the choice.
        device: Of the weight.
        dtype: Of the weight.
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        num_groups: int = 1,
        topk_groups: int = 1,
        has_bias: bool = False,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
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
        drawn = torch.randn(num_experts, hidden, device=device, dtype=dtype)
        self.weight = nn.Parameter(drawn * hidden**-0.5)
        bias = torch.zeros(num_experts, dtype=torch.float32, device=self.weight.device) if has_bias else None
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor, output_router_logits: bool = False) -> tuple[Tensor, ...]:
        """The experts of each row, their weights in float32, and on request the logits.

        Logits are computed in float32, also under autocast: a rounded logit changes the choice.

        Args:
            x: Rows [tokens, hidden].
            output_router_logits: Return the logits as a third result.
        """
        device = x.device.type
        has_autocast = torch.amp.is_autocast_available(device)
        with torch.autocast(device, enabled=False) if has_autocast else nullcontext():
            logits = functional.linear(x.float(), self.weight.float())
        topk_idx, weights = self.choose(logits)
        return (topk_idx, weights, logits) if output_router_logits else (topk_idx, weights)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The experts and weights for these logits; deterministic as long as `bias` does not change.

        Args:
            logits: float32 [tokens, num_experts].
        """
        scores = logits.softmax(dim=-1)
        ranking = scores.detach() if self.bias is None else scores.detach() + self.bias
        topk_idx = self._eligible(ranking).topk(self.topk, dim=-1).indices
        weights = scores.gather(-1, topk_idx)
        # A bias can choose experts whose scores are all 0 in float32.
        total = weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        return topk_idx, weights / total

    def _eligible(self, scores: Tensor) -> Tensor:
        """The scores, with -inf for experts outside the best groups."""
        if self.topk_groups == self.num_groups:
            return scores
        by_group = scores.view(*scores.shape[:-1], self.num_groups, scores.shape[-1] // self.num_groups)
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(dim=-1)
        others = torch.ones_like(best, dtype=torch.bool).scatter(
            -1, best.topk(self.topk_groups, dim=-1).indices, False
        )
        return by_group.masked_fill(others.unsqueeze(-1), float("-inf")).flatten(-2)


def run_experts(
    rows: Tensor,
    topk_idx: Tensor,
    weights: Tensor,
    experts: Sequence[Expert],
    out: Tensor | None = None,
) -> Tensor:
    """Each row's weighted sum over its experts, in float32, by ascending expert; -1 in `topk_idx` means none.

    Rows are sorted by expert, and each expert is called once with all of its rows. The result is written to
    `out` if that is given, such as to a combine buffer.

    Args:
        rows: The received rows [rows, hidden].
        topk_idx: int64 [rows, top-k], ids of local experts; -1: none.
        weights: float32 [rows, top-k].
        experts: This rank's experts, in order; each maps rows to rows.
        out: Where the result is written; by default a new tensor of the rows' dtype.

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
    if out is not None and out.dtype is torch.float32:
        return out.zero_().index_add_(0, row, weighted)
    total = torch.zeros_like(rows, dtype=torch.float32).index_add(0, row, weighted)
    return total.to(rows.dtype) if out is None else out.copy_(total)


class _Link:
    """The group and Buffer of a layer.

    Copies of a layer share it, so they also share a Buffer that one of them makes. A pickle contains an
    empty one, since a Buffer belongs to its process.
    """

    def __init__(self, group: Any = None, buffer: Buffer | ElasticBuffer | None = None) -> None:
        self.group, self.buffer = group, buffer

    def __deepcopy__(self, memo: dict[int, Any]) -> _Link:
        return self

    def __reduce__(self) -> tuple[type[_Link], tuple[()]]:
        return _Link, ()


class ExpertParallelMoE(nn.Module):
    """A Mixture-of-Experts layer; every rank of `group` makes it, and calls it with its own tokens.

    Args:
        gate: Chooses the experts. It is called with rows [tokens, hidden] and returns the experts of each
            row, int64 [tokens, topk], and their weights in float32; with `output_router_logits=True` it also
            returns the logits, as a third result. It is the same on all ranks: its gradients, like those of
            everything but the experts, must be summed over the ranks.
        experts: The modules of this rank's experts, from rows to rows, or a function that makes the expert
            with a given number; then `num_experts` is the number of experts on all ranks together.
        group: The process group of the ranks.
        num_experts: The experts of all ranks together; needed where `experts` is a function.
        hidden: If given, the Buffer is made by the constructor, else by the first call.
        max_decode_tokens: The most tokens that a rank may pass to `decode`; 0 disables low-latency mode.
        buffer: A Buffer to use; layers of one model share one (`make_buffer`). With an `ElasticBuffer` the
            layer works on rows that are grouped by expert.
        device: The device of the Buffer if the layer makes it, "cpu" or "cuda".
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
        buffer: Buffer | ElasticBuffer | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.expert_way: str | None = None
        """How the last call with an ElasticBuffer ran the experts: "grouped_mm" or "loop"."""
        self.gate, self._device = gate, device
        self.num_experts, local = _local_experts(experts, group, num_experts)
        self.experts = nn.ModuleDict({str(index): expert for index, expert in local.items()})
        self.max_decode_tokens, self.low_latency = max_decode_tokens, False
        self._link = _Link(group)
        self.buffer = buffer
        if hidden is not None:
            self.ready_buffer(hidden)
        self.register_load_state_dict_pre_hook(_leave_out_other_experts)  # type: ignore[no-untyped-call]

    @property
    def buffer(self) -> Buffer | ElasticBuffer | None:
        """The Buffer, which copies of the layer share; None before it is made, and after unpickling.

        Setting it changes only this layer.
        """
        return self._link.buffer

    @buffer.setter
    def buffer(self, buffer: Buffer | ElasticBuffer | None) -> None:
        if buffer is not None:
            self._check_fits(buffer)
        self._link = _Link(self._link.group if buffer is None else buffer.group, buffer)

    def ready_buffer(self, hidden: int) -> Buffer | ElasticBuffer:
        """The layer's Buffer; makes it if there is none yet (collective).

        Args:
            hidden: Values per row.
        """
        link = self._link
        if link.buffer is None:
            if link.group is None:
                raise InvalidCall(
                    "this layer was pickled, which leaves out its Buffer: give it one on every rank before it"
                    f" is called, layer.buffer = anyep.nn.make_buffer(group, {hidden}, {self.num_experts})"
                )
            link.buffer = make_buffer(
                link.group, hidden, self.num_experts, self.max_decode_tokens, self._device
            )
        return link.buffer

    def forward(self, x: Tensor, output_router_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's output for `x` [..., hidden]; uses low-latency mode if `low_latency` is set.

        Args:
            x: This rank's tokens [..., hidden].
            output_router_logits: Return `(output, logits)`, the logits in float32 [tokens, num_experts] with
                the leading dimensions of x flattened, for the losses of `anyep.balance`.
        """
        if self.low_latency:
            return self.decode(x, output_router_logits)
        flat, buffer = x.reshape(-1, x.shape[-1]), self.ready_buffer(x.shape[-1])
        topk_idx, weights, logits = self._chosen(flat, output_router_logits)
        if isinstance(buffer, ElasticBuffer):
            output = self._by_expert(buffer, flat, topk_idx, weights).view(x.shape)
            return output if logits is None else (output, logits)
        received = autograd.dispatch(buffer, flat, topk_idx, weights, self.num_experts)
        experts = list(self.experts.values())
        out = autograd.combine_buffer(buffer, received.x, received.handle)
        outputs = run_experts(received.x, received.topk_idx, received.topk_weights, experts, out)
        combined, _ = autograd.combine(buffer, outputs, received.handle)
        output = combined.view(x.shape)
        return output if logits is None else (output, logits)

    def _by_expert(self, buffer: ElasticBuffer, flat: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        """The layer's output, on rows that are grouped by expert.

        Each row is weighted in float32 and rounded; those of a token are added on their rank and rounded, and
        then at the token's source."""
        received = autograd.elastic_dispatch(
            buffer, flat, topk_idx, weights, self.num_experts, do_expand=True, expert_alignment=ROW_ALIGNMENT
        )
        experts, counts = list(self.experts.values()), received.handle.num_recv_tokens_per_expert_list
        self.expert_way = way_of(received.x, experts)
        outputs = run_grouped_experts(received.x, counts, experts, self.expert_way)
        assert received.topk_weights is not None
        weighted = (outputs.float() * received.topk_weights[:, None]).to(flat.dtype)
        combined, _ = autograd.elastic_combine(buffer, weighted, received.handle)
        return combined

    @torch.no_grad()
    def decode(self, x: Tensor, output_router_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Like `forward`, for a few tokens in bfloat16, in low-latency mode and without gradients.

        An expert's output is rounded to bfloat16; the weighted sum is computed in float32, in the order of
        the gate's choice, and rounded once.

        Args:
            x: bfloat16 [..., hidden], at most `max_decode_tokens` tokens.
            output_router_logits: Return the logits as well, as `forward` does.
        """
        flat, buffer = x.reshape(-1, x.shape[-1]), self.ready_buffer(x.shape[-1])
        if isinstance(buffer, ElasticBuffer):
            raise NotSupported(
                "an ElasticBuffer has no low-latency mode: call the layer without low_latency, or give it a"
                " Buffer (make_buffer)"
            )
        topk_idx, weights, logits = self._chosen(flat, output_router_logits)
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(
            flat.contiguous(), topk_idx, self.max_decode_tokens, self.num_experts, use_fp8=False
        )
        assert isinstance(rows, Tensor)
        outputs = torch.empty_like(rows)
        for local, (expert, count) in enumerate(zip(self.experts.values(), counts.tolist(), strict=True)):
            outputs[local, :count] = expert(rows[local, :count])
        combined, _, _ = buffer.low_latency_combine(outputs, topk_idx, weights, handle)
        output = combined.view(x.shape)
        return output if logits is None else (output, logits)

    def _chosen(self, flat: Tensor, output_router_logits: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gate's results for each row; the logits only on request, since not every gate has them."""
        if not output_router_logits:
            topk_idx, weights = self.gate(flat)
            return topk_idx, weights, None
        topk_idx, weights, logits = self.gate(flat, output_router_logits=True)
        return topk_idx, weights, logits

    def _check_fits(self, buffer: Buffer | ElasticBuffer) -> None:
        """Refuse a Buffer of other ranks: it would send tokens to ranks without their experts."""
        if not isinstance(buffer, Buffer | ElasticBuffer):
            raise InvalidCall(f"buffer is of type {type(buffer).__name__}: it must be an anyep.Buffer")
        if isinstance(buffer, ElasticBuffer):
            place = buffer.rank_idx, buffer.num_ranks
        else:
            place = buffer.rank, buffer.group_size
        num_local = len(self.experts)
        rank, num_ranks = int(next(iter(self.experts))) // num_local, self.num_experts // num_local
        if place != (rank, num_ranks):
            raise InvalidCall(
                f"the Buffer is that of rank {place[0]} of {place[1]}, but the layer holds the"
                f" experts of rank {rank} of {num_ranks}: load its state dict into a new layer, it fits any"
                " number of ranks"
            )


def expert_layers(model: nn.Module) -> list[ExpertParallelMoE]:
    """The expert-parallel layers of a model, for example to give all of them one Buffer after unpickling.

    Args:
        model: The model; its submodules are searched.
    """
    return [module for module in model.modules() if isinstance(module, ExpertParallelMoE)]


def _local_experts(
    experts: Callable[[int], nn.Module] | Iterable[nn.Module], group: Any, num_experts: int | None
) -> tuple[int, dict[int, nn.Module]]:
    """The number of experts of the layer, and this rank's experts by their numbers."""
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
    if not local:
        raise InvalidCall("experts is empty: every rank holds the same number of experts, at least 1")
    if num_experts not in (None, len(local) * num_ranks):
        raise InvalidCall(
            f"{len(local)} experts on each of {num_ranks} ranks are not {num_experts}: pass this rank's"
            f" experts only, or a function that makes them"
        )
    return len(local) * num_ranks, dict(enumerate(local, rank * len(local)))


def _leave_out_other_experts(layer: ExpertParallelMoE, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove the experts of other ranks, so that a whole state dict can be loaded."""
    for index in range(layer.num_experts):
        if str(index) not in layer.experts:
            start = f"{prefix}experts.{index}."
            for key in [key for key in state if key.startswith(start)]:
                del state[key]
