"""The Mixture-of-Experts layer of `anyep demo`: gate, dispatch, experts, combine, forward and backward.

Each rank has its own tokens and its own experts. The reference is the same layer in one process, on the CPU,
with all experts and all tokens, written as plainly as possible; both start from the same numbers and
take the same steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from anyep.buffer import Buffer
from anyep.cli import draw
from anyep.cli.demo_job import Job, StepReport, finish_work
from anyep.cli.gate import choose, misrouting
from anyep.cli.ranks import Rank

LEARNING_RATE = 0.05


class Weights:
    """A gate and expert networks, all of them; a rank trains its slice of the experts."""

    def __init__(self, job: Job, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(job.seed)
        hidden, inner = job.hidden, 2 * job.hidden

        def normal(*shape: int) -> torch.Tensor:
            scale: float = shape[-2] ** -0.5
            drawn = draw.normal(generator, *shape) * scale
            return drawn.to(device).requires_grad_()

        self.gate = normal(hidden, job.experts)
        self.up = [normal(hidden, inner) for _ in range(job.experts)]
        self.down = [normal(inner, hidden) for _ in range(job.experts)]

    def expert(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        # A smooth function: at a kink, sums that differ in their last bits would have different gradients.
        return functional.silu(rows @ self.up[index]) @ self.down[index]

    def parameters(self) -> list[torch.Tensor]:
        return [self.gate, *self.up, *self.down]


def weights_of(scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The weights of each token's experts: softmax over the chosen ones."""
    return scores.gather(1, experts).softmax(dim=-1)


def _start_together(buffer: Buffer, report: StepReport) -> None:
    """For the timing only: without it, a phase would include the wait for other ranks' experts."""
    finish_work(report.device)
    dist.barrier(buffer.group)


class Dispatch(torch.autograd.Function):
    """Dispatch forward; its gradient is a combine."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weights: Any, experts: Any, buffer: Any, num_experts: Any, report: Any
    ) -> Any:
        with report.timed("layout"):
            per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(experts, num_experts)
        _start_together(buffer, report)
        with report.timed("dispatch"):
            rows, ids, row_weights, _, handle, _ = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=experts,
                topk_weights=weights,
            )
        report.sent = per_rank.tolist()
        report.received = len(rows)
        ctx.buffer, ctx.report = buffer, report
        ctx.save_for_backward(*handle)
        ctx.mark_non_differentiable(ids)
        return rows, row_weights, ids, *handle

    @staticmethod
    def backward(ctx: Any, grad_rows: Any, grad_weights: Any, *_: Any) -> Any:
        _start_together(ctx.buffer, ctx.report)
        with ctx.report.timed("backward of dispatch"):
            grad_x, grad_topk, _ = ctx.buffer.combine(
                grad_rows.contiguous(), ctx.saved_tensors, topk_weights=grad_weights.contiguous()
            )
        return grad_x, grad_topk, None, None, None, None


class Combine(torch.autograd.Function):
    """Combine forward; its gradient is a dispatch along the same routing."""

    @staticmethod
    def forward(ctx: Any, rows: Any, buffer: Any, report: Any, *handle: Any) -> Any:
        ctx.buffer, ctx.report = buffer, report
        ctx.save_for_backward(*handle)
        _start_together(buffer, report)
        with report.timed("combine"):
            combined, _, _ = buffer.combine(rows, handle)
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        _start_together(ctx.buffer, ctx.report)
        with ctx.report.timed("backward of combine"):
            grad_rows, *_ = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.saved_tensors)
        return grad_rows, None, None, *[None] * len(ctx.saved_tensors)


def layer_on_a_rank(
    x: torch.Tensor, weights: Weights, job: Job, rank: int, buffer: Buffer, report: StepReport
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer, with this rank's experts only; also each token's choice of experts."""
    scores = x @ weights.gate
    experts = choose(scores.detach(), job.topk, job.nodes)
    topk_weights = weights_of(scores, experts)
    rows, row_weights, ids, *handle = Dispatch.apply(x, topk_weights, experts, buffer, job.experts, report)  # type: ignore[no-untyped-call]
    local = job.experts // job.ranks
    output = torch.zeros_like(rows)
    with report.timed("experts"):
        for expert in range(local):
            chosen, slot = torch.nonzero(ids == expert, as_tuple=True)
            result = weights.expert(rank * local + expert, rows[chosen])
            output = output.index_add(0, chosen, result * row_weights[chosen, slot].unsqueeze(1))
    combined: torch.Tensor = Combine.apply(output, buffer, report, *handle)  # type: ignore[no-untyped-call]
    return combined, experts


def layer_in_one_process(
    x: torch.Tensor, experts: torch.Tensor, weights: Weights, job: Job
) -> tuple[torch.Tensor, float]:
    """The reference: every token through each of its experts; also how wrong the choice of experts is."""
    scores = x @ weights.gate
    topk_weights = weights_of(scores, experts)
    output = torch.zeros_like(x)
    for expert in range(job.experts):
        chosen, slot = torch.nonzero(experts == expert, as_tuple=True)
        result = weights.expert(expert, x[chosen])
        output = output.index_add(0, chosen, result * topk_weights[chosen, slot].unsqueeze(1))
    return output, misrouting(scores.detach(), experts, job.nodes)


def tokens_of(job: Job, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(job.seed * 1_000_003 + step * 1009 + rank)
    return draw.normal(generator, job.tokens, job.hidden)


def train(rank: Rank, job: Job) -> list[StepReport]:
    """Run some steps of training on a rank. Rank 0 also trains the reference, and compares."""
    settings = job.nodes.of_buffer(job.row_bytes)
    weights = Weights(job, job.device)
    reference = Weights(job) if rank.rank == 0 else None
    reports = []
    with Buffer(rank.group, device=job.device, num_window_bytes=job.num_window_bytes, **settings) as buffer:
        for step in range(job.steps):
            report = StepReport(job.device, step, [], 0)
            x = tokens_of(job, rank.rank, step).to(job.device).requires_grad_()
            output, experts = layer_on_a_rank(x, weights, job, rank.rank, buffer, report)
            loss = output.square().sum() / (job.ranks * job.tokens or 1)
            loss.backward()  # type: ignore[no-untyped-call]
            assert weights.gate.grad is not None
            weights.gate.grad = _sum_over_ranks(weights.gate.grad, rank)
            report.loss = float(_sum_over_ranks(loss.detach(), rank))
            report.largest_difference = _compare(job, step, weights, x, output, experts, rank, reference)
            _descend(weights)
            if job.nodes.are_several:
                assert buffer.runtime is not None
                traffic = buffer.runtime.traffic
                report.bytes_within_node = traffic.bytes_within_node
                report.bytes_between_nodes = traffic.bytes_between_nodes
            reports.append(report)
            rank.report(report)
    return reports


def _sum_over_ranks(value: torch.Tensor, rank: Rank) -> torch.Tensor:
    total = value.cpu().clone()  # the group is Gloo's
    dist.all_reduce(total, group=rank.group)
    return total.to(value.device)


def _compare(
    job: Job,
    step: int,
    weights: Weights,
    x: torch.Tensor,
    output: torch.Tensor,
    experts: torch.Tensor,
    rank: Rank,
    reference: Weights | None,
) -> float:
    """The largest difference of an output or a gradient from the reference's, relative to its largest entry.

    Rank 0 gathers the outputs and the gradients of tokens and experts of all ranks.
    """
    local = job.experts // job.ranks
    mine = range(rank.rank * local, (rank.rank + 1) * local)
    parts = [output.detach(), _gradient(x), _gradient(weights.gate)]
    parts += [_gradient(weights.up[index]) for index in mine] + [
        _gradient(weights.down[index]) for index in mine
    ]
    gathered: list[Any] | None = [None] * job.ranks if rank.rank == 0 else None
    dist.gather_object((experts.cpu(), [part.cpu() for part in parts]), gathered, group=rank.group)
    if reference is None or gathered is None:
        return 0.0
    all_x = torch.cat([tokens_of(job, other, step) for other in range(job.ranks)]).requires_grad_()
    choices = torch.cat([choice for choice, _ in gathered])
    all_output, largest = layer_in_one_process(all_x, choices, reference, job)
    (all_output.square().sum() / (len(all_x) or 1)).backward()  # type: ignore[no-untyped-call]
    assert all_x.grad is not None
    assert reference.gate.grad is not None
    for other, (_, theirs) in enumerate(gathered):
        tokens = slice(other * job.tokens, (other + 1) * job.tokens)
        owned = range(other * local, (other + 1) * local)
        expected = [all_output.detach()[tokens], all_x.grad[tokens], reference.gate.grad]
        expected += [_gradient(reference.up[index]) for index in owned]
        expected += [_gradient(reference.down[index]) for index in owned]
        for ours, right in zip(theirs, expected, strict=True):
            largest = max(largest, _relative_difference(ours, right))
    _descend(reference)
    return largest


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


def _relative_difference(ours: torch.Tensor, right: torch.Tensor) -> float:
    if not right.numel():
        return 0.0
    difference = float((ours - right).abs().max()) / float(right.abs().max().clamp(min=1e-12))
    return difference if difference == difference else float("inf")


def _descend(weights: Weights) -> None:
    with torch.no_grad():
        for parameter in weights.parameters():
            if parameter.grad is not None:
                parameter.sub_(LEARNING_RATE * parameter.grad)
                parameter.grad = None
