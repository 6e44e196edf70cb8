"""The decode loop of `anyep demo --mode low-latency`: hooks overlap communication with the experts.

A step is a Mixture-of-Experts layer over a few tokens per rank, in two micro-batches. Each call only sends;
its hook receives, later: while the experts work on one micro-batch, the rows of the other are on their way.

    first:   dispatch . . . . . receive  EXPERTS  combine . . . . . . . . . . . . . . .  receive
    second:           dispatch . . . . . . . . . . . . . . receive  EXPERTS  combine . . . . . . receive

On a GPU the host waits at the end of each phase to measure its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.cli import draw
from anyep.cli.demo.decode_reference import Experts, compare, gate_of, layer_in_one_process
from anyep.cli.demo.job import DecodeJob, DecodeProgress, DecodeReport, Difference, now
from anyep.cli.demo.train_reference import weights_of
from anyep.cli.gate import choose
from anyep.cli.ranks import Rank
from anyep.sizes import CHANNELS_PER_SCALE

ROUND_STEPS: Final = 20
"""Steps that run back to back; then all of them are checked, outside of the timed section of any rank."""
WARM_UP_STEPS: Final = 3
"""Steps at the start of each round that are neither timed nor checked: a check leaves caches cold and ranks
out of step."""


class MicroBatch:
    """Some of a rank's tokens on their way through the layer; call its methods in the order of definition."""

    def __init__(self, job: DecodeJob, buffer: Buffer, x: torch.Tensor, report: DecodeReport) -> None:
        self._job = job
        self._buffer = buffer
        self._x = x
        self._report = report
        self._hook: Callable[[], None] | None = None

    def send_tokens(self, gate: torch.Tensor) -> None:
        """Choose experts, and send each token to its experts."""
        with self._report.timed("gate"):
            scores = self._x.float() @ gate
            self.choices = choose(scores, self._job.topk, self._job.nodes)
            self._weights = weights_of(scores, self.choices)
        with self._report.timed("dispatch send"):
            rows, self._counts, self._handle, _, self._hook = self._buffer.low_latency_dispatch(
                self._x,
                self.choices,
                self._job.num_max_tokens,
                self._job.experts,
                use_fp8=True,
                return_recv_hook=True,
            )
        assert isinstance(rows, tuple)
        self._rows, self._scales = rows

    def receive_tokens(self) -> None:
        with self._report.timed("dispatch receive"):
            self._receive()

    def compute(self, experts: Experts) -> None:
        """Apply this rank's experts to their received rows; the contents after these rows are undefined."""
        with self._report.timed("experts"):
            self._outputs = torch.empty(self._rows.shape, dtype=torch.bfloat16, device=self._rows.device)
            for local, (index, count) in enumerate(zip(experts.indices, self._counts.tolist(), strict=True)):
                scales = self._scales[local, :count].repeat_interleave(CHANNELS_PER_SCALE, dim=1)
                rows = self._rows[local, :count].float() * scales
                self._outputs[local, :count] = experts.apply(index, rows).bfloat16()

    def send_results(self) -> None:
        """Send the experts' rows back to their tokens."""
        with self._report.timed("combine send"):
            self._combined, _, self._hook = self._buffer.low_latency_combine(
                self._outputs, self.choices, self._weights, self._handle, return_recv_hook=True
            )

    def receive_results(self) -> torch.Tensor:
        """The layer's output for these tokens."""
        with self._report.timed("combine receive"):
            self._receive()
        return self._combined

    def _receive(self) -> None:
        assert self._hook is not None
        self._hook()


def run_step(
    job: DecodeJob,
    buffer: Buffer,
    x: torch.Tensor,
    gate: torch.Tensor,
    experts: Experts,
    report: DecodeReport,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output for a rank's tokens; also each token's choice of experts."""
    started = now(job.device)
    halves = x[: job.num_max_tokens], x[job.num_max_tokens :]
    first, second = (MicroBatch(job, buffer, half, report) for half in halves)
    first.send_tokens(gate)
    second.send_tokens(gate)
    first.receive_tokens()
    first.compute(experts)  # meanwhile the other one's rows arrive
    first.send_results()
    second.receive_tokens()
    second.compute(experts)  # meanwhile the first one's results arrive
    second.send_results()
    combined = torch.cat([first.receive_results(), second.receive_results()])
    choices = torch.cat([first.choices, second.choices])
    report.step_seconds.append(now(job.device) - started)
    return combined, choices


def tokens_of(job: DecodeJob, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(job.seed * 1_000_003 + step * 1009 + rank)
    return draw.normal(generator, job.tokens, job.hidden).bfloat16()


def decode(rank: Rank, job: DecodeJob) -> DecodeReport:
    """Run rounds of steps on a rank. After each round rank 0 checks the results of all ranks."""
    num_bytes = Buffer.get_low_latency_rdma_size_hint(job.num_max_tokens, job.hidden, job.ranks, job.experts)
    local = job.experts // job.ranks
    gate = gate_of(job)
    gate_here = gate.to(job.device)
    experts = Experts(job, range(rank.rank * local, (rank.rank + 1) * local), job.device)
    all_experts = Experts(job, range(job.experts)) if rank.rank == 0 else None
    report = DecodeReport(job.device)
    place = {"device": job.device, **job.nodes.place}
    with Buffer(rank.group, 0, num_bytes, low_latency_mode=True, **place) as buffer:
        for begin in range(0, job.steps, ROUND_STEPS):
            steps = range(begin, min(begin + ROUND_STEPS, job.steps))
            x = [tokens_of(job, rank.rank, step).to(job.device) for step in steps]
            dist.barrier(rank.group)
            for _ in range(WARM_UP_STEPS):
                run_step(job, buffer, x[0], gate_here, experts, DecodeReport(job.device))
            results = [run_step(job, buffer, tokens, gate_here, experts, report) for tokens in x]
            report.difference += _check(rank, job, steps, results, gate, all_experts)
            rank.report(DecodeProgress(steps[-1], report.difference))
    return report


def _check(
    rank: Rank,
    job: DecodeJob,
    steps: range,
    results: list[tuple[torch.Tensor, torch.Tensor]],
    gate: torch.Tensor,
    all_experts: Experts | None,
) -> Difference:
    """On rank 0, the difference of all ranks' results of these steps from the reference, on the CPU."""
    by_rank: list[list[tuple[torch.Tensor, torch.Tensor]]] | None = (
        [[] for _ in range(job.ranks)] if rank.rank == 0 else None
    )
    there = [(combined.cpu(), choices.cpu()) for combined, choices in results]
    dist.gather_object(there, by_rank, group=rank.group)
    difference = Difference()
    if by_rank is None or all_experts is None:
        return difference
    for index, step in enumerate(steps):
        x = torch.cat([tokens_of(job, other, step) for other in range(job.ranks)])
        combined = torch.cat([theirs[index][0] for theirs in by_rank])
        choices = torch.cat([theirs[index][1] for theirs in by_rank])
        right, misrouted = layer_in_one_process(x, choices, gate, all_experts, job.nodes)
        # A wrong choice of experts is as bad as a wrong result.
        difference += compare(combined, right) + Difference(misrouted)
    return difference
