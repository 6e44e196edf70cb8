"""The cases of `anyep bench --mode low-latency`: what AnyEP does, plain copies, and the same job by Gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from anyep.api.buffer import Buffer
from anyep.cli import draw
from anyep.cli.bench.clock import ROUNDINGS, Case, Clock, Group, equals, is_close
from anyep.cli.bench.installed import low_latency_buffer
from anyep.cli.bench.records import Label, Setup
from anyep.cli.bench.rival import ByExpert
from anyep.cli.bench.sweep import swept
from anyep.cli.fp8 import from_fp8, to_fp8
from anyep.cli.gate import choose
from anyep.cli.ranks import Rank
from anyep.sizes import CHANNELS_PER_SCALE

FACTORS: Final = (1.0, 2.0, 4.0, 8.0)
FP8_STEPS: Final = 2.0**-3
"""The same for rows in FP8."""
LOGFMT_STEPS: Final = 0.05
"""The same for the results of a combine in LogFMT."""
Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Travelled:
    """Rows as they arrive: bf16, or FP8 with scales; and their values in float32."""

    parts: tuple[torch.Tensor, ...]
    values: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, use_fp8: bool) -> Travelled:
        if not use_fp8:
            return cls((x,), x.float())
        data, scales = to_fp8(x)
        return cls((data.view(torch.uint8), scales), from_fp8(data, scales))


class Decoding:
    """What all ranks send, and the results expected at the experts of each rank and after the combine.

    Expert e multiplies by one of the FACTORS: that is exact, and distinguishes the experts.
    """

    def __init__(self, rank: Rank, setup: Setup, tokens: int) -> None:
        self._setup = setup
        self._drawn = [self._draw(source, tokens) for source in range(rank.num_ranks)]
        self.x, self.topk_idx, self.topk_weights = self._drawn[rank.rank]
        local = setup.experts // rank.num_ranks
        self._experts = range(rank.rank * local, (rank.rank + 1) * local)
        self.counts = [
            sum(int((idx == expert).sum()) for _, idx, _ in self._drawn) for expert in self._experts
        ]
        self.num_rows = sum(self.counts)
        self._rows: dict[bool, list[Travelled]] = {}

    def _draw(self, rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._setup.seed + rank)
        x = draw.normal(generator, tokens, self._setup.hidden).bfloat16()
        scores = draw.uniform(generator, tokens, self._setup.experts)
        experts = choose(scores, self._setup.topk, self._setup.nodes)
        device = self._setup.device
        return x.to(device), experts.to(device), scores.gather(1, experts).to(device)

    def rows(self, use_fp8: bool) -> list[Travelled]:
        """The rows that each local expert receives, in the order of source ranks and tokens."""
        if use_fp8 not in self._rows:
            sent = [(Travelled.of(x, use_fp8), idx) for x, idx, _ in self._drawn]
            self._rows[use_fp8] = [
                Travelled(
                    tuple(torch.cat(parts) for parts in zip(*(rows.parts for rows in chosen), strict=True)),
                    torch.cat([rows.values for rows in chosen]),
                )
                for chosen in (
                    [_of_tokens(rows, (idx == expert).any(1)) for rows, idx in sent]
                    for expert in self._experts
                )
            ]
        return self._rows[use_fp8]

    def fill(self, outputs: torch.Tensor, use_fp8: bool, factors: Sequence[float] = FACTORS) -> torch.Tensor:
        """Write what the local experts make of their rows into a tensor laid out like the received rows."""
        for local, (expert, rows) in enumerate(zip(self._experts, self.rows(use_fp8), strict=True)):
            outputs[local, : len(rows.values)] = rows.values.bfloat16() * factors[expert % len(factors)]
        return outputs

    def factor_of(self, local: int) -> float:
        """What a local expert multiplies by."""
        return FACTORS[self._experts[local] % len(FACTORS)]

    def combined(self, use_fp8: bool, factors: Sequence[float] = FACTORS) -> torch.Tensor:
        """The expected result of combine: weighted, in top-k order, each product and sum rounded."""
        rows = Travelled.of(self.x, use_fp8).values.bfloat16().float()
        of_expert = torch.tensor(factors, dtype=torch.float32, device=self.x.device)
        total = torch.zeros(self.x.shape, dtype=torch.float32, device=self.x.device)
        for experts, weights in zip(self.topk_idx.unbind(1), self.topk_weights.unbind(1), strict=True):
            total = total + weights[:, None] * (rows * of_expert[experts % len(factors), None])
        return total.bfloat16()

    def has_come(self, result: Any, use_fp8: bool) -> bool:
        """Whether a dispatch gave the right rows to every local expert."""
        if result[1].tolist() != self.counts:
            return False
        return all(
            torch.equal(ours, right)
            for expected, received in zip(self.rows(use_fp8), self._received(result), strict=True)
            for ours, right in zip(received, expected.parts, strict=True)
        )

    def spoil(self, result: Any) -> None:
        """Overwrite the received rows; the memory after them is never touched, and may not exist yet."""
        for received in self._received(result):
            for part in received:
                part.fill_(77)

    def _received(self, result: Any) -> Iterator[tuple[torch.Tensor, ...]]:
        parts = result[0] if isinstance(result[0], tuple) else (result[0],)
        for local, count in enumerate(self.counts):
            rows = (part[local, :count] for part in parts)
            yield tuple(part.view(torch.uint8) if part.itemsize == 1 else part for part in rows)


def _of_tokens(rows: Travelled, chosen: torch.Tensor) -> Travelled:
    return Travelled(tuple(part[chosen] for part in rows.parts), rows.values[chosen])


@dataclass(frozen=True)
class Calls:
    """Low-latency calls through one Buffer, and what every combine sends back."""

    buffer: Buffer
    decoding: Decoding
    num_max_tokens: int
    num_experts: int
    handle: Any
    outputs: torch.Tensor
    """Of the experts. On the CPU, bf16 rows that a dispatch received: later ones leave other values there."""

    @classmethod
    def of(cls, buffer: Buffer, decoding: Decoding, tokens: int, num_experts: int, use_fp8: bool) -> Calls:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            decoding.x, decoding.topk_idx, tokens, num_experts, use_fp8=use_fp8
        )
        if isinstance(rows, tuple):
            rows = torch.zeros(rows[0].shape, dtype=torch.bfloat16, device=decoding.x.device)
        return cls(buffer, decoding, tokens, num_experts, handle, decoding.fill(rows, use_fp8))

    def dispatch(self, use_fp8: bool) -> Any:
        return self.buffer.low_latency_dispatch(
            self.decoding.x, self.decoding.topk_idx, self.num_max_tokens, self.num_experts, use_fp8=use_fp8
        )

    def combine(self, outputs: torch.Tensor | None = None, handle: Any = None, **options: Any) -> Any:
        return self.buffer.low_latency_combine(
            self.outputs if outputs is None else outputs,
            self.decoding.topk_idx,
            self.decoding.topk_weights,
            handle or self.handle,
            **options,
        )

    def combine_in_place(self, factors: Sequence[float] = ()) -> Any:
        """A combine of what lies where it takes outputs from; with factors, that is filled first."""
        outputs = self.buffer.get_next_low_latency_combine_buffer(self.handle)
        if factors:
            self.decoding.fill(outputs, use_fp8=False, factors=factors)
        return self.combine(outputs, zero_copy=True)

    def combine_filled(self, factors: Sequence[float] = FACTORS, **options: Any) -> Any:
        """A combine of outputs that are filled first."""
        self.decoding.fill(self.outputs, use_fp8=False, factors=factors)
        return self.combine(**options)

    def pair(self, use_fp8: bool) -> Any:
        received, _, handle, _, _ = self.dispatch(use_fp8)
        # The experts' outputs are bf16 whatever they received.
        return self.combine(None if use_fp8 else received, handle)

    def pair_filled(self) -> Any:
        """An FP8 dispatch, and a combine of outputs that are filled in between."""
        handle = self.dispatch(use_fp8=True)[2]
        return self.combine_filled(handle=handle)


class DecodingCases:
    """The cases at one number of tokens."""

    def __init__(self, rank: Rank, setup: Setup, clock: Clock, tokens: int) -> None:
        self._rank = rank
        self._setup = setup
        self._clock = clock
        self._tokens = tokens
        self._decoding = Decoding(rank, setup, tokens)
        self._row_bytes = {
            "bf16": setup.row_bytes,
            "fp8": setup.hidden + 4 * (setup.hidden // CHANNELS_PER_SCALE),
        }
        num_bytes = max(self._decoding.num_rows, 1) * setup.row_bytes
        self._source = torch.ones(num_bytes, dtype=torch.uint8, device=setup.device)

    @contextmanager
    def by_buffer(self) -> Iterator[list[Case]]:
        setup, tokens, decoding = self._setup, self._tokens, self._decoding
        num_bytes = Buffer.get_low_latency_rdma_size_hint(
            tokens, setup.hidden, self._rank.num_ranks, setup.experts
        )
        place = {"device": setup.device, "heap": setup.heap, **setup.nodes.place}
        with Buffer(self._rank.group, 0, num_bytes, low_latency_mode=True, **place) as buffer:
            use_fp8 = self._clock.has_graphs
            calls = Calls.of(buffer, decoding, tokens, setup.experts, use_fp8)
            is_combined = equals(decoding.combined(use_fp8))
            yield (self._on_gpu if self._clock.has_graphs else self._on_cpu)(calls, is_combined)

    def _on_gpu(self, calls: Calls, is_combined: Check) -> list[Case]:
        """FP8 dispatch, bf16 combine, and both."""

        def dispatch() -> Any:
            return calls.dispatch(use_fp8=True)

        def combine() -> Any:
            return calls.combine()

        def pair() -> Any:
            return calls.pair(use_fp8=True)

        both = ("fp8", "bf16")
        return [
            replace(self._copy("fp8", dispatch), in_graph=True),
            replace(self._copy("bf16", dispatch), in_graph=True),
            *self._graph_and_singly(self._dispatch("fp8", dispatch)),
            *self._graph_and_singly(self._case("combine", "bf16", ("bf16",), combine, is_combined)),
            *self._graph_and_singly(self._case("pair", "fp8 + bf16", both, pair, is_combined)),
        ]

    def _on_cpu(self, calls: Calls, is_combined: Check) -> list[Case]:
        """Every format, and every way to combine. The rows themselves come back, but in checks."""
        ones = (1.0,)
        rows_combined = self._decoding.combined(use_fp8=False, factors=ones)
        bf16, both, half = ("bf16",), ("bf16", "bf16"), ("fp8", "bf16")
        is_about = is_close(rows_combined, LOGFMT_STEPS)
        combine = self._case("combine", "bf16", bf16, calls.combine, is_combined, "gloo")
        in_place = self._case("zero_copy_combine", "bf16", bf16, calls.combine_in_place, is_combined)
        logfmt = self._case(
            "logfmt_combine", "logfmt", bf16, lambda: calls.combine(use_logfmt=True), is_about
        )
        pair = self._case("pair", "fp8", half, lambda: calls.pair(use_fp8=True), is_combined, "gloo fp8")
        return [
            self._copy("bf16"),
            self._copy("fp8"),
            self._dispatch("bf16", lambda: calls.dispatch(use_fp8=False), "gloo bf16"),
            self._dispatch("fp8", lambda: calls.dispatch(use_fp8=True), "gloo fp8"),
            replace(combine, checkable=calls.combine_filled),
            replace(in_place, checkable=lambda: calls.combine_in_place(FACTORS)),
            replace(logfmt, checkable=lambda: calls.combine_filled(ones, use_logfmt=True)),
            self._case(
                "pair", "bf16", both, lambda: calls.pair(use_fp8=False), equals(rows_combined), "gloo bf16"
            ),
            replace(pair, checkable=calls.pair_filled),
        ]

    @contextmanager
    def by_rival(self) -> Iterator[list[Case]]:
        """The same by Gloo; every expert returns its rows."""
        decoding = self._decoding
        gloo = ByExpert(self._rank, decoding.x, decoding.topk_idx, decoding.topk_weights, self._setup.experts)
        rows = torch.cat([rows.values for rows in decoding.rows(use_fp8=False)])
        fp8_rows = torch.cat([rows.values for rows in decoding.rows(use_fp8=True)])
        is_combined = is_close(decoding.combined(use_fp8=False, factors=(1.0,)), ROUNDINGS)

        def is_dispatched_in_fp8(result: Any) -> bool:
            data, scales = result
            return is_close(fp8_rows, FP8_STEPS)(from_fp8(data.view(torch.float8_e4m3fn), scales))

        def pair(use_fp8: bool) -> Any:
            gloo.dispatch(use_fp8)
            return gloo.combine()

        calls: tuple[tuple[str, str, Callable[[], Any], Check], ...] = (
            ("dispatch", "gloo bf16", lambda: gloo.dispatch(use_fp8=False), equals(rows.bfloat16())),
            ("dispatch", "gloo fp8", lambda: gloo.dispatch(use_fp8=True), is_dispatched_in_fp8),
            ("combine", "gloo", gloo.combine, is_combined),
            ("pair", "gloo bf16", lambda: pair(use_fp8=False), is_combined),
            ("pair", "gloo fp8", lambda: pair(use_fp8=True), is_combined),
        )
        num_bytes = self._bytes_of("bf16")
        yield [
            Case(Label(name, path, self._tokens, num_bytes, is_listed=False), work, is_right)
            for name, path, work, is_right in calls
        ]

    @contextmanager
    def by_installed(self) -> Iterator[list[Case]]:
        """FP8 dispatch and bf16 combine through the library that AnyEP is compared with."""
        name, decoding = self._setup.against, self._decoding
        with low_latency_buffer(name, self._rank, self._setup, self._tokens) as buffer:

            def dispatch() -> Any:
                return buffer.low_latency_dispatch(
                    decoding.x, decoding.topk_idx, self._tokens, self._setup.experts, use_fp8=True
                )

            (data, scales), counts, handle, _, _ = dispatch()
            outputs = torch.zeros(data.shape, dtype=torch.bfloat16, device=data.device)
            for local, count in enumerate(counts.tolist()):
                # In the order in which they came, which is not always the same.
                values = from_fp8(data[local, :count], scales[local, :count]).bfloat16()
                outputs[local, :count] = values * decoding.factor_of(local)

            def combine() -> Any:
                return buffer.low_latency_combine(outputs, decoding.topk_idx, decoding.topk_weights, handle)

            is_combined = is_close(decoding.combined(use_fp8=True), ROUNDINGS)
            cases = [
                self._plain_case(
                    "dispatch", f"{name} fp8", "fp8", dispatch, lambda got: got[1].tolist() == decoding.counts
                ),
                self._plain_case("combine", f"{name} bf16", "bf16", combine, is_combined),
            ]
            if self._clock.has_graphs:
                cases = [each for case in cases for each in self._graph_and_singly(case)]
            # What was received must stay for the combine.
            yield [replace(case, spoil=lambda _: None) for case in cases]

    def _plain_case(
        self, name: str, path: str, format_: str, work: Callable[[], Any], is_right: Check
    ) -> Case:
        """A case that is compared with nothing but a copy."""
        return Case(
            Label(name, path, self._tokens, self._bytes_of(format_), bounds=(format_,)), work, is_right
        )

    def _bytes_of(self, *formats: str) -> int:
        return sum(self._decoding.num_rows * self._row_bytes[format_] for format_ in formats)

    def _case(
        self,
        name: str,
        path: str,
        formats: tuple[str, ...],
        work: Callable[[], Any],
        is_right: Check,
        rival: str = "",
    ) -> Case:
        """A case that moves the rows once in each of these formats."""
        against = f"{self._setup.against} {path}" if self._setup.against else ""
        rivals = tuple(other for other in (rival, against) if other)
        label = Label(name, path, self._tokens, self._bytes_of(*formats), bounds=formats, rivals=rivals)
        return Case(label, work, is_right)

    def _dispatch(self, path: str, work: Callable[[], Any], rival: str = "") -> Case:
        use_fp8 = path == "fp8"
        case = self._case(
            "dispatch", path, (path,), work, lambda result: self._decoding.has_come(result, use_fp8), rival
        )
        return replace(case, spoil=self._decoding.spoil)

    def _copy(self, format_: str, barrier: Callable[[], Any] | None = None) -> Case:
        """A plain copy of the same bytes, on all ranks at once. It is listed among the cases of a GPU."""
        num_rows, row_bytes = max(self._decoding.num_rows, 1), self._row_bytes[format_]
        source = self._source[: num_rows * row_bytes].view(num_rows, row_bytes)
        label = Label(
            "copy", format_, self._tokens, self._bytes_of(format_), is_listed=self._clock.has_graphs
        )
        return Case(label, self._clock.copy_of(source), equals(source), barrier=barrier)

    def _graph_and_singly(self, case: Case) -> list[Case]:
        return [
            replace(
                case,
                label=replace(
                    case.label,
                    path=f"{case.label.path}, {how}",
                    rivals=tuple(f"{rival}, {how}" for rival in case.label.rivals),
                ),
                in_graph=how == "graph",
            )
            for how in ("graph", "singly")
        ]


def groups_of(rank: Rank, setup: Setup, clock: Clock, tokens: int) -> Sequence[Group]:
    """Every case at one number of tokens; the rival is Gloo, on the CPU."""
    cases = DecodingCases(rank, setup, clock, tokens)
    groups = [cases.by_buffer(), *([cases.by_rival()] if clock.rival == "gloo" else [])]
    return groups + ([cases.by_installed()] if setup.against else [])


def sweep_over_tokens(rank: Rank, setup: Setup, clock: Clock, tokens: int) -> Sequence[Group]:
    """Dispatch, combine and plain copies at one number of tokens; the calls in graphs where there are any."""
    how = ", graph" if clock.has_graphs else ""
    chosen = [("copy", "bf16"), ("copy", "fp8")]
    chosen += [(case, format_ + how) for case in ("dispatch", "combine") for format_ in ("bf16", "fp8")]
    return [swept(DecodingCases(rank, setup, clock, tokens).by_buffer(), "tokens", chosen)]
