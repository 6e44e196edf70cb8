"""The cases of `anyep bench --api elastic`: `ElasticBuffer` in both layouts, plain copies, and Gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from anyep.api.elastic import ElasticBuffer
from anyep.api.elastic_handle import EPHandle
from anyep.cli.bench.clock import Case, Clock, Group, equals
from anyep.cli.bench.normal import NUM_WINDOWS, NormalCases, Traffic, in_graph
from anyep.cli.bench.records import Label, Setup
from anyep.cli.bench.sweep import swept
from anyep.cli.ranks import Rank
from anyep.sizes import NUM_BUFFER_ALIGNMENT_BYTES, align

COMPACT: Final = "compact"
EXPANDED: Final = "expanded"
WITHOUT_SYNC: Final = ", no sync"
STAGED: Final = "compact, staged"


class ElasticCases:
    """The cases at one number of tokens."""

    def __init__(self, rank: Rank, setup: Setup, clock: Clock, tokens: int) -> None:
        self._rank, self._setup, self._clock = rank, setup, clock
        self._traffic = traffic = Traffic(rank, setup, tokens)
        self._per_rank = setup.experts // rank.num_ranks
        self._expanded = _expanded(traffic.rows, traffic.local_experts)
        self._compact_outputs = traffic.rows.clone()

    @contextmanager
    def by_layout(self) -> Iterator[list[Case]]:
        """Every call, along windows."""
        setup, traffic = self._setup, self._traffic
        with ElasticBuffer(
            self._rank.group,
            num_max_tokens_per_rank=traffic.num_tokens,
            hidden=setup.hidden,
            num_topk=setup.topk,
            device=setup.device,
            num_window_bytes=self._num_window_bytes,
        ) as buffer:
            cases = [
                self._copy("bf16", self._compact_outputs, buffer),
                self._copy(EXPANDED, self._expanded, buffer),
            ]
            for layout in (COMPACT, EXPANDED):
                cases += self._of_layout(buffer, layout)
            yield cases

    @property
    def _num_window_bytes(self) -> int | None:
        """On a GPU windows only grow where the host waits for counts: they have room for the most rows."""
        setup, traffic = self._setup, self._traffic
        if setup.device == "cpu":
            return None
        most_rows = traffic.num_ranks * traffic.num_tokens
        num_bytes = NUM_WINDOWS * (most_rows * (setup.row_bytes + 16 * setup.topk) + 4096)
        return align(num_bytes, NUM_BUFFER_ALIGNMENT_BYTES)

    def _of_layout(self, buffer: ElasticBuffer, layout: str) -> list[Case]:
        traffic, expands = self._traffic, layout == EXPANDED
        rows = self._expanded if expands else traffic.rows

        def dispatch(waits: bool = True) -> Any:
            return buffer.dispatch(
                traffic.x,
                traffic.topk_idx,
                traffic.topk_weights,
                num_experts=self._setup.experts,
                do_expand=expands,
                do_cpu_sync=waits,
            )

        received, _, _, handle, _ = dispatch()
        is_dispatched = equals(rows)
        is_combined = equals(traffic.combined_by_rank if expands else traffic.combined(traffic.num_ranks))

        def is_begun(result: Any) -> bool:
            return torch.equal(result[0][: len(rows)], rows)

        return [
            self._case("dispatch", layout, dispatch, is_dispatched),
            *self._graph_too(
                self._case("dispatch", layout + WITHOUT_SYNC, lambda: dispatch(waits=False), is_begun)
            ),
            *self._graph_too(
                self._case(
                    "cached_dispatch",
                    layout,
                    lambda: buffer.dispatch(traffic.x, handle=handle, do_expand=expands),
                    is_dispatched,
                )
            ),
            *self._graph_too(
                self._case("combine", layout, lambda: buffer.combine(received, handle), is_combined)
            ),
            *self._staged(buffer, handle, is_combined, layout),
        ]

    def _graph_too(self, case: Case) -> list[Case]:
        return [case, in_graph(case)] if self._clock.has_graphs else [case]

    def _staged(
        self, buffer: ElasticBuffer, handle: EPHandle, is_combined: Callable[[Any], bool], layout: str
    ) -> list[Case]:
        """Outputs in other memory; the sums of expanded rows go to a window, wherever the rows are."""
        outputs = self._compact_outputs
        if layout == EXPANDED:
            return []
        return [self._case("combine", STAGED, lambda: buffer.combine(outputs, handle), is_combined)]

    def _case(self, name: str, path: str, work: Callable[[], Any], is_right: Callable[[Any], bool]) -> Case:
        """Bytes are those of the received rows, whatever becomes of them; expanded rows are copied again."""
        traffic = self._traffic
        bounds = ("bf16", EXPANDED) if path.startswith(EXPANDED) else ("bf16",)
        rivals = (self._clock.rival,) if self._clock.rival else ()
        label = Label(name, path, traffic.num_tokens, traffic.num_bytes, self._clock.sms, bounds, rivals)
        return Case(label, work, is_right)

    def _copy(self, path: str, source: torch.Tensor, buffer: ElasticBuffer) -> Case:
        label = Label("copy", path, self._traffic.num_tokens, source.nbytes, is_listed=False)
        return Case(label, self._clock.copy_of(source), equals(source), barrier=buffer.barrier)


def _expanded(rows: torch.Tensor, local_experts: torch.Tensor) -> torch.Tensor:
    """The rows grouped by expert, from each row's local experts (-1: none).

    >>> rows = torch.tensor([[1.0], [2.0]], device="cpu")
    >>> _expanded(rows, torch.tensor([[1, 0], [-1, 1]], device="cpu")).flatten().tolist()
    [1.0, 1.0, 2.0]
    """
    row, slot = torch.nonzero(local_experts >= 0, as_tuple=True)
    order = local_experts[row, slot].argsort(stable=True)
    return rows[row[order]]


def groups_of(rank: Rank, setup: Setup, clock: Clock, tokens: int) -> Sequence[Group]:
    """Every case at one number of tokens."""
    groups = [ElasticCases(rank, setup, clock, tokens).by_layout()]
    return groups + ([NormalCases(rank, setup, clock, tokens).by_rival()] if clock.rival else [])


def sweep_over_tokens(rank: Rank, setup: Setup, clock: Clock, tokens: int) -> Sequence[Group]:
    """Dispatch and combine of expanded rows, and a plain copy, at one number of tokens."""
    chosen = [("copy", "bf16"), ("copy", EXPANDED), ("dispatch", EXPANDED), ("combine", EXPANDED)]
    return [swept(ElasticCases(rank, setup, clock, tokens).by_layout(), "tokens", chosen)]
