"""The training of `anyep demo`: an `anyep.nn.ExpertParallelMoE` over all ranks, whose calls are timed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.cli.demo.job import Job, StepReport, finish_work, now
from anyep.cli.demo.train_reference import Reference, descend, networks_of, results_of, tokens_of
from anyep.cli.ranks import Rank
from anyep.nn import ExpertParallelMoE


class TimedBuffer(Buffer):
    """A Buffer that tells a report how long its calls take, and the experts between dispatch and combine.

    In a backward pass a dispatch goes along a handle, and a combine has weights to return.
    """

    report: StepReport
    _dispatched_at: float

    def get_dispatch_layout(self, *arguments: Any, **options: Any) -> Any:
        with self.report.timed("layout"):
            layout = super().get_dispatch_layout(*arguments, **options)
        self.report.sent = layout[0].tolist()
        if layout[1] is not None:
            self.report.sent_to_nodes = layout[1].tolist()
        return layout

    def dispatch(self, *arguments: Any, **options: Any) -> Any:
        is_forward = options.get("handle") is None
        self._start_together()
        with self.report.timed("dispatch" if is_forward else "backward of combine"):
            result = super().dispatch(*arguments, **options)
        if is_forward:
            self.report.received = len(result[0])
            self._dispatched_at = now(self.report.device)
        return result

    def combine(self, x: Any, handle: Any, topk_weights: Any = None, *arguments: Any, **options: Any) -> Any:
        is_forward = topk_weights is None
        if is_forward:
            self.report.seconds["experts"] = now(self.report.device) - self._dispatched_at
        self._start_together()
        with self.report.timed("combine" if is_forward else "backward of dispatch"):
            return super().combine(x, handle, topk_weights, *arguments, **options)

    def _start_together(self) -> None:
        """For the timing only: without it, a phase would include the wait for other ranks' experts."""
        finish_work(self.report.device)
        dist.barrier(self.group)


def train(rank: Rank, job: Job) -> list[StepReport]:
    """Run some steps of training on a rank. Rank 0 also trains the reference, and compares."""
    settings = job.nodes.of_buffer(job.row_bytes)
    gate, all_experts = networks_of(job, job.device)
    local = job.experts // job.ranks
    experts = all_experts[rank.rank * local : (rank.rank + 1) * local]
    reference = Reference(job) if rank.rank == 0 else None
    reports: list[StepReport] = []
    windows = job.num_window_bytes
    buffer = TimedBuffer(rank.group, device=job.device, num_window_bytes=windows, **settings)
    with buffer:
        layer = ExpertParallelMoE(gate, experts, rank.group, buffer=buffer)
        for step in range(job.steps):
            report = buffer.report = StepReport(job.device, step, [], 0)
            x = tokens_of(job, rank.rank, step).to(job.device).requires_grad_()
            output = layer(x)
            loss = output.square().sum() / (job.ranks * job.tokens or 1)
            loss.backward()
            assert gate.weight.grad is not None
            gate.weight.grad = _sum_over_ranks(gate.weight.grad, rank)
            report.loss = float(_sum_over_ranks(loss.detach(), rank))
            results = results_of(output, x, gate, experts)
            report.largest_difference = _compare(rank, step, gate.choices, results, reference)
            descend(layer.parameters())
            if job.nodes.are_several:
                _add_traffic(report, reports, buffer, job)
            reports.append(report)
            rank.report(report)
    return reports


def _add_traffic(report: StepReport, earlier: list[StepReport], buffer: Buffer, job: Job) -> None:
    """Note the bytes sent so far: as counted, or on GPUs, where nobody counts, those of the rows."""
    assert buffer.runtime is not None
    if job.device == "cpu":
        traffic = buffer.runtime.traffic
        report.bytes_within_node = traffic.bytes_within_node
        report.bytes_between_nodes = traffic.bytes_between_nodes
        return
    # Rows are sent in both directions, and so are their gradients.
    there_and_back = 4 * job.row_bytes
    own_node = job.nodes.topology.node_of(buffer.rank)
    num_elsewhere = sum(report.sent_to_nodes) - report.sent_to_nodes[own_node]
    report.bytes_within_node = there_and_back * sum(report.sent)
    report.bytes_between_nodes = there_and_back * num_elsewhere
    if earlier:
        report.bytes_within_node += earlier[-1].bytes_within_node
        report.bytes_between_nodes += earlier[-1].bytes_between_nodes


def _sum_over_ranks(value: torch.Tensor, rank: Rank) -> torch.Tensor:
    total = value.cpu().clone()  # the group is Gloo's
    dist.all_reduce(total, group=rank.group)
    return total.to(value.device)


def _compare(
    rank: Rank, step: int, choices: torch.Tensor, results: list[torch.Tensor], reference: Reference | None
) -> float:
    """On rank 0, the largest difference of all ranks' results of this step from the reference's."""
    by_rank: list[Any] | None = [None] * rank.num_ranks if reference is not None else None
    dist.gather_object((choices.cpu(), [part.cpu() for part in results]), by_rank, group=rank.group)
    if reference is None or by_rank is None:
        return 0.0
    return reference.difference_of(step, by_rank)
