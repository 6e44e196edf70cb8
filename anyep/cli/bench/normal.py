"""The cases of `anyep bench --mode normal`: what AnyEP does, a plain copy, and the same job without AnyEP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.cli import draw
from anyep.cli.bench.clock import ROUNDINGS, Case, Clock, Group, equals, is_close
from anyep.cli.bench.installed import normal_buffer
from anyep.cli.bench.records import Crossing, Label, Setup
from anyep.cli.bench.rival import AllToAll
from anyep.cli.bench.sweep import swept
from anyep.cli.gate import choose
from anyep.cli.ranks import Rank
from anyep.errors import NotSupported
from anyep.sizes import CHANNELS_PER_SCALE, NUM_BUFFER_ALIGNMENT_BYTES, NUM_MAX_SCALES, align

NUM_WINDOWS: Final = 12
"""Results held at once on a GPU: the last result, the one being received, and the one that each graph keeps.
Windows only grow in a dispatch without a handle, and no case may fall back to rings."""
SWEPT_SMS: Final = (4, 8, 12, 16, 20, 24, 28, 32)


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
        self._in_ranks = [self._in_rank_of(source) for source in range(rank.num_ranks)]
        self.in_rank = self._in_ranks[rank.rank]
        self.rows = self._arriving(self._x_of)

    def _x_of(self, rank: int) -> torch.Tensor:
        return self._base.roll(rank, dims=1)

    def _fp8_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x_of(rank).to(torch.float8_e4m3fn), self._base_scales.roll(rank, dims=0) + rank

    def _topk_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._setup.seed + 1 + rank)
        scores = draw.uniform(generator, self.num_tokens, self._setup.experts)
        experts = choose(scores, self._setup.topk, self._setup.nodes)
        return scores.gather(1, experts).to(self._setup.device), experts.to(self._setup.device)

    def _in_rank_of(self, rank: int) -> torch.Tensor:
        _, experts = self._topk_of(rank)
        marks = torch.zeros(self.num_tokens, self._num_ranks, dtype=torch.bool, device=experts.device)
        return marks.scatter_(1, experts // (self._setup.experts // self._num_ranks), True)

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    @property
    def local_experts(self) -> torch.Tensor:
        """int64 [received rows, top-k]: the local experts of each row, -1 for those of other ranks."""
        num_local = self._setup.experts // self._num_ranks
        experts = self._arriving(lambda source: self._topk_of(source)[1])
        return torch.where(experts // num_local == self._rank, experts % num_local, -1)

    @property
    def combined_by_rank(self) -> torch.Tensor:
        """The same as `combined`, where a rank returns a row for each of a token's experts, which are added
        up there and rounded; no later sum is inexact."""
        num_local = self._setup.experts // self._num_ranks
        owners = self.topk_idx // num_local
        total = torch.zeros(self.x.shape, dtype=torch.float32, device=self.x.device)
        for rank in range(self._num_ranks):
            copies = (owners == rank).sum(dim=1, keepdim=True)
            total += (copies * self.x.float()).bfloat16().float()
        return total.bfloat16()

    def _arriving(self, of: Callable[[int], torch.Tensor]) -> torch.Tensor:
        return torch.cat(
            [of(source)[self._in_ranks[source][:, self._rank]] for source in range(self._num_ranks)]
        )

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * self._setup.row_bytes

    @property
    def most_rows(self) -> int:
        """The number of rows of the rank that receives most."""
        return int(torch.cat(self._in_ranks).sum(0).max())

    @property
    def num_window_bytes(self) -> int | None:
        """Windows for all results that are held at once, on the rank that receives most; the CPU has room."""
        return None if self._setup.device == "cpu" else self.window_bytes(NUM_WINDOWS)

    def window_bytes(self, num_results: int) -> int:
        """The bytes of windows for so many results of the rank that receives most."""
        row_bytes = self._setup.row_bytes + 16 * self._setup.topk
        return align(num_results * (self.most_rows * row_bytes + 4096), NUM_BUFFER_ALIGNMENT_BYTES)

    @property
    def bytes_elsewhere(self) -> int:
        """The bytes of rows that this rank has for ranks of other nodes, with one row per receiving rank."""
        topology = self._setup.nodes.topology
        here = topology.ranks_on(topology.node_of(self._rank))
        return int(self.in_rank.sum() - self.in_rank[:, list(here)].sum()) * self._setup.row_bytes

    @property
    def crossing_bytes(self) -> int:
        """The bytes of rows that this rank sends to other nodes, one row per node."""
        topology = self._setup.nodes.topology
        shape = (len(self.in_rank), topology.num_nodes, topology.ranks_per_node)
        by_node: list[int] = self.in_rank.reshape(shape).any(2).sum(0).tolist()
        return (sum(by_node) - by_node[topology.node_of(self._rank)]) * self._setup.row_bytes

    def combined(self, ranks_per_node: int) -> torch.Tensor:
        """The expected result of combine when every rank returns its received rows unchanged.

        Rows are added in float32 in the order of ranks; the sum of each node is rounded, then the total.
        """
        total = torch.zeros(self.x.shape, dtype=torch.float32, device=self.x.device)
        for of_node in torch.split(self.in_rank, ranks_per_node, dim=1):
            part = torch.zeros_like(total)
            for to_rank in of_node.unbind(1):
                part += torch.where(to_rank[:, None], self.x.float(), 0.0)
            total += part.bfloat16().float() if ranks_per_node < self._num_ranks else part
        return total.bfloat16()

    def fp8(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._fp8_of(self._rank)

    def fp8_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        data = self._arriving(lambda source: self._fp8_of(source)[0].view(torch.uint8))
        return data, self._arriving(lambda source: self._fp8_of(source)[1])


@dataclass(frozen=True)
class Prepared:
    """A Buffer, and what a first dispatch through it gave."""

    buffer: Buffer
    routing: dict[str, Any]
    received: torch.Tensor
    handle: Any


@contextmanager
def prepared(
    rank: Rank, setup: Setup, traffic: Traffic, sms: int | None, num_window_bytes: int | None
) -> Iterator[Prepared]:
    """A Buffer, and what a first dispatch through it gives."""
    with new_buffer(rank, setup, sms, num_window_bytes) as buffer:
        yield first_dispatch(buffer, setup, traffic)


def new_buffer(rank: Rank, setup: Setup, sms: int | None, num_window_bytes: int | None) -> Buffer:
    """A Buffer with these windows, and room for the rings of both calls with this number of SMs."""
    if sms is not None:
        Buffer.set_num_sms(sms)
    sizes = setup.nodes.of_buffer(setup.row_bytes, Buffer.num_sms)
    buffer = Buffer(
        rank.group, device=setup.device, num_window_bytes=num_window_bytes, heap=setup.heap, **sizes
    )
    assert buffer.runtime is not None
    if buffer.runtime.is_heap_on_host and not setup.is_on_host:
        buffer.destroy()
        raise NotSupported(
            "ranks on these GPUs share memory of the host, where there are no windows to measure:"
            " `anyep bench --device cuda --heap host` measures what there is"
        )
    return buffer


def first_dispatch(buffer: Buffer, setup: Setup, traffic: Traffic) -> Prepared:
    """Dispatch once, for a handle and rows."""
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(traffic.topk_idx, setup.experts)
    routing: dict[str, Any] = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": traffic.topk_idx,
        "topk_weights": traffic.topk_weights,
    }
    received, _, _, _, handle, _ = buffer.dispatch(traffic.x, **routing)
    assert isinstance(received, torch.Tensor)
    return Prepared(buffer, routing, received, handle)


class NormalCases:
    """The cases at one number of tokens, by Buffer."""

    def __init__(self, rank: Rank, setup: Setup, clock: Clock, tokens: int) -> None:
        self._rank = rank
        self._setup = setup
        self._clock = clock
        self._path = path_of(setup)
        self._copied_from = ", host" if setup.is_on_host else ""
        self._traffic = Traffic(rank, setup, tokens)
        self._outputs = self._traffic.rows.clone()  # of the experts, in ordinary memory
        self._rivals = tuple(rival for rival in (clock.rival, setup.against) if rival)
        self._is_dispatched = equals(self._traffic.rows)
        self._is_combined = equals(self._traffic.combined(setup.nodes.ranks_per_node))

    @contextmanager
    def by_window(self, sms: int | None = None) -> Iterator[list[Case]]:
        """With the clock's number of SMs, or another one; where there are windows."""
        setup, traffic = self._setup, self._traffic
        with prepared(self._rank, setup, traffic, sms or self._clock.sms, traffic.num_window_bytes) as there:
            buffer, handle, received, x = there.buffer, there.handle, there.received, traffic.x

            def send() -> Any:
                return buffer.dispatch(x, handle=handle)

            layout = Case(
                Label("layout", "local", traffic.num_tokens, 0, self._clock.sms),
                lambda: buffer.get_dispatch_layout(traffic.topk_idx, setup.experts),
                lambda result: torch.equal(result[3], traffic.in_rank),
                barrier=send,
            )
            has_graphs = self._clock.has_graphs
            yield [
                self._copy("bf16", self._outputs, send),
                *self._graph_too(layout),
                *([] if has_graphs else [self._notify(there)]),
                self._case("dispatch", self._path, there, lambda: buffer.dispatch(x, **there.routing)),
                *([self._in_worst_case(there)] if has_graphs else []),
                *self._graph_too(self._case("cached_dispatch", self._path, there, send)),
                *(self._in_fp8(there) if has_graphs else []),
                *self._graph_too(
                    self._case("combine", self._path, there, lambda: buffer.combine(received, handle))
                ),
                *self._graph_too(
                    self._case("combine", "staged", there, lambda: buffer.combine(self._outputs, handle))
                ),
                *([] if has_graphs else [self._pair(self._path, there)]),
            ]

    @contextmanager
    def by_ring(self) -> Iterator[list[Case]]:
        traffic = self._traffic
        with prepared(self._rank, self._setup, traffic, self._clock.sms, num_window_bytes=0) as there:
            buffer, handle, x = there.buffer, there.handle, traffic.x
            yield [
                self._case("dispatch", "ring", there, lambda: buffer.dispatch(x, **there.routing)),
                self._case("cached_dispatch", "ring", there, lambda: buffer.dispatch(x, handle=handle)),
                self._case("combine", "ring", there, lambda: buffer.combine(self._outputs, handle)),
                *([] if self._clock.has_graphs else [self._pair("ring", there)]),
            ]

    @contextmanager
    def by_rival(self) -> Iterator[list[Case]]:
        """The same by Gloo; by NCCL where every rank has its own GPU."""
        name, traffic = self._clock.rival, self._traffic
        group = dist.new_group(backend=name) if name == "nccl" else self._rank.group
        rival = AllToAll(group, traffic.x, traffic.in_rank)
        # It sums all rows at once.
        combined = traffic.combined(self._rank.num_ranks)
        calls: list[tuple[str, Callable[[], Any], torch.Tensor]] = [
            ("dispatch", rival.dispatch, traffic.rows),
            ("cached_dispatch", rival.send_rows, traffic.rows),
            ("combine", rival.combine, combined),
        ]
        if not self._clock.has_graphs:
            calls.append(("pair", lambda: (rival.dispatch(), rival.combine())[1], combined))
        labels = [
            Label(case, name, traffic.num_tokens, traffic.num_bytes, is_listed=False) for case, *_ in calls
        ]
        yield [
            Case(label, work, equals(right)) for label, (_, work, right) in zip(labels, calls, strict=True)
        ]

    @contextmanager
    def by_installed(self) -> Iterator[list[Case]]:
        """The same calls through the library that AnyEP is compared with."""
        setup, traffic, name = self._setup, self._traffic, self._setup.against
        with normal_buffer(name, self._rank, setup, self._clock.sms) as buffer:
            there = first_dispatch(buffer, setup, traffic)
            outputs = traffic.rows.clone()
            is_combined = is_close(traffic.combined(self._rank.num_ranks), ROUNDINGS)
            calls: tuple[tuple[str, Callable[[], Any], Callable[[Any], bool]], ...] = (
                ("dispatch", lambda: buffer.dispatch(traffic.x, **there.routing), self._is_dispatched),
                (
                    "cached_dispatch",
                    lambda: buffer.dispatch(traffic.x, handle=there.handle),
                    self._is_dispatched,
                ),
                ("combine", lambda: buffer.combine(outputs, there.handle), is_combined),
            )
            labels = [
                Label(case, name, traffic.num_tokens, traffic.num_bytes, self._clock.sms, ("bf16",))
                for case, *_ in calls
            ]
            yield [
                Case(label, work, is_right) for label, (_, work, is_right) in zip(labels, calls, strict=True)
            ]

    def _case(
        self, name: str, path: str, there: Prepared, work: Callable[[], Any], rows_moved: int = 1
    ) -> Case:
        """A case that moves all rows once, or there and back."""
        traffic = self._traffic
        label = Label(
            name,
            path,
            traffic.num_tokens,
            rows_moved * traffic.num_bytes,
            self._clock.sms,
            (f"bf16{self._copied_from}",) * rows_moved,
            self._rivals,
            self._crossing(there, work, rows_moved),
        )
        return Case(label, work, self._is_combined if name in ("combine", "pair") else self._is_dispatched)

    def _crossing(self, there: Prepared, work: Callable[[], Any], rows_moved: int) -> Crossing | None:
        if not self._setup.nodes.are_several:
            return None
        if self._setup.device != "cpu":
            # Only the CPU counts what it sends.
            rows = self._traffic
            return Crossing(rows_moved * rows.crossing_bytes, rows_moved * rows.bytes_elsewhere)
        session = there.buffer.runtime
        assert session is not None
        before = session.traffic.bytes_between_nodes
        work()
        sent = session.traffic.bytes_between_nodes - before
        return Crossing(sent, rows_moved * self._traffic.bytes_elsewhere)

    def _copy(self, path: str, source: torch.Tensor, barrier: Callable[[], Any]) -> Case:
        """A plain copy of the received data, on all ranks at once. It is listed among the cases of a GPU.

        Where ranks share memory of the host, it is a copy from there: every row takes this way.
        """
        path += self._copied_from
        label = Label("copy", path, self._traffic.num_tokens, source.nbytes, is_listed=self._clock.has_graphs)
        if not self._setup.is_on_host:
            return Case(label, self._clock.copy_of(source), equals(source), barrier=barrier)
        target, on_host = torch.empty_like(source), source.cpu()
        if torch.cuda.is_available():
            on_host = on_host.pin_memory()

        def copy() -> Any:
            return (target.copy_(on_host, non_blocking=True),)

        return Case(label, copy, equals(source), barrier=barrier)

    def _graph_too(self, case: Case) -> list[Case]:
        return [case, in_graph(case)] if self._clock.has_graphs else [case]

    def _notify(self, there: Prepared) -> Case:
        """A dispatch of no tokens: what remains are the notify messages."""
        x, routing = self._traffic.x[:0], there.routing
        nothing = {
            "num_tokens_per_rank": torch.zeros_like(routing["num_tokens_per_rank"]),
            "is_token_in_rank": routing["is_token_in_rank"][:0],
            "num_tokens_per_expert": torch.zeros_like(routing["num_tokens_per_expert"]),
        }
        return Case(
            Label("notify", "notify messages", self._traffic.num_tokens, 0),
            lambda: there.buffer.dispatch(x, **nothing),
            lambda result: len(result[0]) == 0,
        )

    def _pair(self, path: str, there: Prepared) -> Case:
        def pair() -> Any:
            rows, _, _, _, handle, _ = there.buffer.dispatch(self._traffic.x, **there.routing)
            return there.buffer.combine(rows, handle)  # type: ignore[arg-type]

        return self._case("pair", path, there, pair, rows_moved=2)

    def _in_worst_case(self, there: Prepared) -> Case:
        """Only a dispatch whose host does not wait for counts can be captured."""
        traffic, rows = self._traffic, self._traffic.rows
        most_rows = traffic.most_rows
        case = self._case(
            "dispatch",
            f"{self._path}, worst",
            there,
            lambda: there.buffer.dispatch(traffic.x, num_worst_tokens=most_rows, **there.routing),
        )
        return in_graph(replace(case, is_right=lambda result: torch.equal(result[0][: len(rows)], rows)))

    def _in_fp8(self, there: Prepared) -> list[Case]:
        """A cached dispatch of FP8 data and scales."""
        hidden, traffic = self._setup.hidden, self._traffic
        if hidden % CHANNELS_PER_SCALE or hidden // CHANNELS_PER_SCALE > NUM_MAX_SCALES:
            return []
        pair, (data, scales) = traffic.fp8(), traffic.fp8_rows()

        def send() -> Any:
            return there.buffer.dispatch(pair, handle=there.handle)

        def is_right(result: Any) -> bool:
            return torch.equal(result[0][0].view(torch.uint8), data) and torch.equal(result[0][1], scales)

        both = torch.cat([data.flatten(), scales.view(torch.uint8).flatten()])
        label = Label(
            "cached_dispatch",
            f"{self._path}, fp8",
            traffic.num_tokens,
            both.nbytes,
            self._clock.sms,
            (f"fp8{self._copied_from}",),
        )
        return [
            self._copy("fp8", both.view(1, -1), send),
            *self._graph_too(Case(label, send, is_right)),
        ]


def in_graph(case: Case) -> Case:
    """The same call, captured once and replayed."""
    return replace(case, label=replace(case.label, path=f"{case.label.path}, graph"), in_graph=True)


def groups_of(rank: Rank, setup: Setup, clock: Clock, tokens: int) -> Sequence[Group]:
    """Every case at one number of tokens."""
    cases = NormalCases(rank, setup, clock, tokens)
    groups = [cases.by_window()]
    # On such heaps, and between nodes on GPUs, rows go to windows only.
    windows_only = setup.is_on_host or (setup.device == "cuda" and setup.nodes.are_several)
    if not windows_only:
        groups.append(cases.by_ring())
    groups += [cases.by_rival()] if clock.rival else []
    return groups + ([cases.by_installed()] if setup.against else [])


def sweep_over_sms(rank: Rank, setup: Setup, clock: Clock) -> Sequence[Group]:
    """The calls of the sweeps with each number of SMs that a rank can have."""
    cases = NormalCases(rank, setup, clock, setup.tokens)
    return [
        swept(cases.by_window(sms), "sms", _swept_calls(setup, clock), sms)
        for sms in SWEPT_SMS
        if sms <= clock.most_sms
    ]


def sweep_over_tokens(rank: Rank, setup: Setup, clock: Clock, tokens: int) -> Sequence[Group]:
    """The same calls and a plain copy at one number of tokens."""
    cases = NormalCases(rank, setup, clock, tokens)
    copies = [("copy", "bf16, host" if setup.is_on_host else "bf16")]
    return [swept(cases.by_window(), "tokens", copies + _swept_calls(setup, clock))]


def path_of(setup: Setup) -> str:
    """How rows travel."""
    return "ring" if setup.is_on_host else "window"


def _swept_calls(setup: Setup, clock: Clock) -> list[tuple[str, str]]:
    """Cached dispatch by window and combine by pull; in graphs where there are any."""
    path = f"{path_of(setup)}, graph" if clock.has_graphs else path_of(setup)
    return [("cached_dispatch", path), ("combine", path)]
