"""The cases of `anyep bench --device cuda --mode low-latency`: FP8 dispatch, bf16 combine, and both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from anyep.api.buffer import Buffer
from anyep.cli import draw
from anyep.cli.bench_cuda import GpuCase, Label, copy_of, equals
from anyep.cli.bench_measure import Setup
from anyep.cli.demo_decode_reference import through_fp8
from anyep.cli.ranks import Rank
from anyep.sizes import CHANNELS_PER_SCALE

FACTORS: Final = (1.0, 2.0, 4.0, 8.0)


class Decoding:
    """What all ranks send, and the results expected at the experts of each rank and after the combine.

    Expert e multiplies by one of the FACTORS: that is exact, and distinguishes the experts.
    """

    def __init__(self, rank: Rank, setup: Setup, tokens: int) -> None:
        self._setup = setup
        self.num_tokens = tokens
        local = setup.experts // rank.num_ranks
        self.experts = range(rank.rank * local, (rank.rank + 1) * local)
        drawn = [self._drawn(source) for source in range(rank.num_ranks)]
        self.x, self.topk_idx, self.topk_weights = drawn[rank.rank]
        sent = [(through_fp8(x), idx) for x, idx, _ in drawn]
        self.rows = [
            torch.cat([rows[(idx == expert).any(1)] for rows, idx in sent]) for expert in self.experts
        ]
        """The rows that each local expert receives, as float32."""

    def _drawn(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._setup.seed + rank)
        x = draw.normal(generator, self.num_tokens, self._setup.hidden).bfloat16()
        scores = draw.uniform(generator, self.num_tokens, self._setup.experts)
        weights, experts = scores.topk(self._setup.topk, dim=-1)
        device = self._setup.device
        return x.to(device), experts.to(device), weights.to(device)

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for rows in self.rows)

    def outputs(self, shape: torch.Size) -> torch.Tensor:
        """The outputs of the local experts, laid out like the received rows."""
        outputs = torch.zeros(shape, dtype=torch.bfloat16, device=self.x.device)
        for local, (expert, rows) in enumerate(zip(self.experts, self.rows, strict=True)):
            outputs[local, : len(rows)] = rows.bfloat16() * FACTORS[expert % len(FACTORS)]
        return outputs

    def combined(self) -> torch.Tensor:
        """The expected result of combine: weighted, in top-k order, each product and sum rounded."""
        rows = through_fp8(self.x).bfloat16().float()
        factors = torch.tensor(FACTORS, dtype=torch.float32, device=self.x.device)
        total = torch.zeros(self.x.shape, dtype=torch.float32, device=self.x.device)
        for experts, weights in zip(self.topk_idx.unbind(1), self.topk_weights.unbind(1), strict=True):
            total = total + weights[:, None] * (rows * factors[experts % len(FACTORS), None])
        return total.bfloat16()

    def has_come(self, rows: tuple[torch.Tensor, torch.Tensor], counts: torch.Tensor) -> bool:
        if counts.tolist() != [len(expected) for expected in self.rows]:
            return False
        for local, expected in enumerate(self.rows):
            data, scales = (part[local, : len(expected)] for part in rows)
            if not torch.equal(data.float() * scales.repeat_interleave(CHANNELS_PER_SCALE, 1), expected):
                return False
        return True


def cases_of(rank: Rank, setup: Setup, tokens: int) -> Iterator[GpuCase]:
    """Every case at one number of tokens."""
    decoding = Decoding(rank, setup, tokens)
    is_combined = equals(decoding.combined())
    fp8_bytes = decoding.num_rows * (setup.hidden + 4 * (setup.hidden // CHANNELS_PER_SCALE))
    bf16_bytes = decoding.num_rows * setup.row_bytes
    num_bytes = Buffer.get_low_latency_rdma_size_hint(tokens, setup.hidden, rank.num_ranks, setup.experts)
    with Buffer(rank.group, 0, num_bytes, low_latency_mode=True, device=setup.device) as buffer:

        def dispatch() -> Any:
            return buffer.low_latency_dispatch(
                decoding.x, decoding.topk_idx, tokens, setup.experts, use_fp8=True
            )

        received, _, handle, _, _ = dispatch()
        outputs = decoding.outputs(received[0].shape)

        def combine(made_by: Any = handle) -> Any:
            return buffer.low_latency_combine(outputs, decoding.topk_idx, decoding.topk_weights, made_by)

        def both() -> Any:
            return combine(dispatch()[2])

        def is_dispatched(result: Any) -> bool:
            return decoding.has_come(result[0], result[1])

        for path, moved in (("fp8", fp8_bytes), ("bf16", bf16_bytes)):
            source = torch.ones(max(moved, 128), dtype=torch.uint8, device=setup.device)
            yield copy_of(source, Label("copy", path, tokens, moved), dispatch, in_graph=True)
        for name, formats, moved, work, is_right in (
            ("dispatch", ("fp8",), fp8_bytes, dispatch, is_dispatched),
            ("combine", ("bf16",), bf16_bytes, combine, is_combined),
            ("pair", ("fp8", "bf16"), fp8_bytes + bf16_bytes, both, is_combined),
        ):
            path = " + ".join(formats)
            for in_graph in (True, False):
                label = Label(
                    name, f"{path}, {'graph' if in_graph else 'singly'}", tokens, moved, bounds=formats
                )
                yield GpuCase(label, work, is_right, in_graph)
