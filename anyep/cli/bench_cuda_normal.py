"""The cases of `anyep bench --device cuda` in normal mode, and the same calls with other numbers of SMs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.cli import draw
from anyep.cli.bench_cuda import GpuCase, Label, copy_of, equals
from anyep.cli.bench_measure import Setup
from anyep.cli.bench_rival import AllToAll
from anyep.cli.ranks import Rank
from anyep.sizes import CHANNELS_PER_SCALE, NUM_BUFFER_ALIGNMENT_BYTES, NUM_MAX_SCALES, align, size_hints

NUM_WINDOWS: Final = 12
"""Results held at once: the last result, the one being received, and the one that each graph keeps. Windows
only grow in a dispatch without a handle, and no case may fall back to rings."""


class Traffic:
    """What all ranks send, and the results expected at each rank."""

    def __init__(self, rank: Rank, setup: Setup, tokens: int) -> None:
        self._rank = rank.rank
        self._num_ranks = rank.num_ranks
        self._setup = setup
        self.num_tokens = tokens
        generator = torch.Generator().manual_seed(setup.seed)
        self._base = draw.normal(generator, tokens, setup.hidden).bfloat16().to(setup.device)
        num_scales = max(1, setup.hidden // CHANNELS_PER_SCALE)
        self._base_scales = draw.uniform(generator, tokens, num_scales).to(setup.device)
        self.x = self._x_of(rank.rank)
        self.topk_weights, self.topk_idx = self._topk_of(rank.rank)
        self.in_rank = self._in_rank_of(rank.rank)
        self.rows = self._arriving(self._x_of)

    def _x_of(self, rank: int) -> torch.Tensor:
        return self._base.roll(rank, dims=1)

    def _fp8_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x_of(rank).to(torch.float8_e4m3fn), self._base_scales.roll(rank, dims=0) + rank

    def _topk_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._setup.seed + 1 + rank)
        scores = draw.uniform(generator, self.num_tokens, self._setup.experts)
        weights, experts = scores.topk(self._setup.topk, dim=-1)
        return weights.to(self._setup.device), experts.to(self._setup.device)

    def _in_rank_of(self, rank: int) -> torch.Tensor:
        _, experts = self._topk_of(rank)
        marks = torch.zeros(self.num_tokens, self._num_ranks, dtype=torch.bool, device=experts.device)
        return marks.scatter_(1, experts // (self._setup.experts // self._num_ranks), True)

    def _arriving(self, of: Callable[[int], torch.Tensor]) -> torch.Tensor:
        return torch.cat(
            [of(source)[self._in_rank_of(source)[:, self._rank]] for source in range(self._num_ranks)]
        )

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * self._setup.row_bytes

    @property
    def most_rows(self) -> int:
        """The number of rows of the rank that receives most."""
        by_rank = torch.cat([self._in_rank_of(source) for source in range(self._num_ranks)]).sum(0)
        return int(by_rank.max())

    @property
    def num_window_bytes(self) -> int:
        """Windows for all results that are held at once, on the rank that receives most."""
        row_bytes = self._setup.row_bytes + 16 * self._setup.topk
        return align(NUM_WINDOWS * (self.most_rows * row_bytes + 4096), NUM_BUFFER_ALIGNMENT_BYTES)

    def combined(self) -> torch.Tensor:
        """The expected result of combine when every rank returns its received rows unchanged."""
        total = torch.zeros(self.x.shape, dtype=torch.float32, device=self.x.device)
        for to_rank in self.in_rank.unbind(1):
            total += torch.where(to_rank[:, None], self.x.float(), 0.0)
        return total.bfloat16()

    def fp8(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._fp8_of(self._rank)

    def fp8_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        data = self._arriving(lambda source: self._fp8_of(source)[0].view(torch.uint8))
        return data, self._arriving(lambda source: self._fp8_of(source)[1])


def _buffer_for(rank: Rank, setup: Setup, num_window_bytes: int) -> Buffer:
    """A Buffer with these windows, and room for the rings of both calls with the configured number of SMs."""
    hint, _ = size_hints(setup.row_bytes, rank.num_ranks, rank.num_ranks, Buffer.num_sms)
    return Buffer(rank.group, hint, device=setup.device, num_window_bytes=num_window_bytes)


def _routing(buffer: Buffer, traffic: Traffic, setup: Setup) -> dict[str, Any]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(traffic.topk_idx, setup.experts)
    return {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": traffic.topk_idx,
        "topk_weights": traffic.topk_weights,
    }


def cases_of(rank: Rank, setup: Setup, tokens: int, sms: int, with_nccl: bool) -> Iterator[GpuCase]:
    """Every case at one number of tokens."""
    Buffer.set_num_sms(sms)
    traffic = Traffic(rank, setup, tokens)
    x, rows, combined = traffic.x, traffic.rows, traffic.combined()
    is_dispatched, is_combined = equals(rows), equals(combined)
    most_rows = traffic.most_rows

    def case(
        name: str,
        path: str,
        work: Callable[[], Any],
        is_right: Callable[[Any], bool],
        in_graph: bool = False,
    ) -> GpuCase:
        label = Label(name, path, tokens, traffic.num_bytes, sms, ("bf16",), "nccl" if with_nccl else "")
        return GpuCase(label, work, is_right, in_graph)

    with _buffer_for(rank, setup, traffic.num_window_bytes) as buffer:
        routing = _routing(buffer, traffic, setup)
        received, _, _, _, handle, _ = buffer.dispatch(x, **routing)
        assert isinstance(received, torch.Tensor)
        assert handle is not None
        outputs = rows.clone()  # in ordinary memory

        def send() -> Any:
            return buffer.dispatch(x, handle=handle)

        yield copy_of(rows, Label("copy", "bf16", tokens, rows.nbytes), send)
        for path in ("local", "local, graph"):
            yield GpuCase(
                Label("layout", path, tokens, 0, sms),
                lambda: buffer.get_dispatch_layout(traffic.topk_idx, setup.experts),
                lambda result: torch.equal(result[3], traffic.in_rank),
                in_graph="graph" in path,
                meet=send,
            )
        yield case("dispatch", "window", lambda: buffer.dispatch(x, **routing), is_dispatched)
        # Only a dispatch whose host does not wait for counts can be captured.
        yield case(
            "dispatch",
            "window, worst, graph",
            lambda: buffer.dispatch(x, num_worst_tokens=most_rows, **routing),
            lambda result: torch.equal(result[0][: len(rows)], rows),
            in_graph=True,
        )
        yield case("cached_dispatch", "window", send, is_dispatched)
        yield case("cached_dispatch", "window, graph", send, is_dispatched, in_graph=True)
        if setup.hidden % CHANNELS_PER_SCALE == 0 and setup.hidden // CHANNELS_PER_SCALE <= NUM_MAX_SCALES:
            yield from _fp8_cases(buffer, traffic, handle, sms)
        yield case("combine", "window", lambda: buffer.combine(received, handle), is_combined)
        yield case(
            "combine", "window, graph", lambda: buffer.combine(received, handle), is_combined, in_graph=True
        )
        for path in ("staged", "staged, graph"):
            yield case(
                "combine",
                path,
                lambda: buffer.combine(outputs, handle),
                is_combined,
                in_graph="graph" in path,
            )
    with _buffer_for(rank, setup, num_window_bytes=0) as by_ring:
        yield case("dispatch", "ring", lambda: by_ring.dispatch(x, **routing), is_dispatched)
        yield case("cached_dispatch", "ring", lambda: by_ring.dispatch(x, handle=handle), is_dispatched)
        yield case("combine", "ring", lambda: by_ring.combine(outputs, handle), is_combined)
    if with_nccl:
        yield from _nccl_cases(traffic, combined)


def _fp8_cases(buffer: Buffer, traffic: Traffic, handle: Any, sms: int) -> Iterator[GpuCase]:
    """A cached dispatch of FP8 data and scales."""
    pair, (data, scales) = traffic.fp8(), traffic.fp8_rows()

    def send() -> Any:
        return buffer.dispatch(pair, handle=handle)

    def is_right(result: Any) -> bool:
        return torch.equal(result[0][0].view(torch.uint8), data) and torch.equal(result[0][1], scales)

    both = torch.cat([data.flatten(), scales.view(torch.uint8).flatten()])
    yield copy_of(both, Label("copy", "fp8", traffic.num_tokens, both.nbytes), send)
    for path in ("window, fp8", "window, fp8, graph"):
        label = Label("cached_dispatch", path, traffic.num_tokens, both.nbytes, sms, ("fp8",))
        yield GpuCase(label, send, is_right, in_graph="graph" in path)


def _nccl_cases(traffic: Traffic, combined: torch.Tensor) -> Iterator[GpuCase]:
    """The alternative with NCCL, where every rank has its own GPU."""
    nccl = AllToAll(dist.new_group(backend="nccl"), traffic.x, traffic.in_rank)
    cases: tuple[tuple[str, Callable[[], torch.Tensor], torch.Tensor], ...] = (
        ("dispatch", nccl.dispatch, traffic.rows),
        ("cached_dispatch", nccl.send_rows, traffic.rows),
        ("combine", nccl.combine, combined),
    )
    for name, work, right in cases:
        label = Label(name, "nccl", traffic.num_tokens, traffic.num_bytes)
        yield GpuCase(label, work, equals(right))


def sweep_of(rank: Rank, setup: Setup, numbers_of_sms: list[int]) -> Iterator[GpuCase]:
    """Cached dispatch by window and combine by pull, in graphs, with each number of SMs."""
    traffic = Traffic(rank, setup, setup.tokens)
    combined = traffic.combined()
    for sms in numbers_of_sms:
        yield from _with_sms(rank, setup, traffic, combined, sms)


def _with_sms(
    rank: Rank, setup: Setup, traffic: Traffic, combined: torch.Tensor, sms: int
) -> Iterator[GpuCase]:
    Buffer.set_num_sms(sms)
    with _buffer_for(rank, setup, traffic.num_window_bytes) as buffer:
        received, _, _, _, handle, _ = buffer.dispatch(traffic.x, **_routing(buffer, traffic, setup))
        assert isinstance(received, torch.Tensor)
        assert handle is not None
        calls: tuple[tuple[str, Callable[[], Any], torch.Tensor], ...] = (
            ("cached_dispatch", lambda: buffer.dispatch(traffic.x, handle=handle), traffic.rows),
            ("combine", lambda: buffer.combine(received, handle), combined),
        )
        for name, work, right in calls:
            label = Label(
                name, "window, graph", traffic.num_tokens, traffic.num_bytes, sms, ("bf16",), is_swept=True
            )
            yield GpuCase(label, work, equals(right), in_graph=True)
