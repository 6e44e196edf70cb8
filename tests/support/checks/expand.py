"""The kernels of the expanded layout do what their examples and a plain reference say, bit for bit.

A check takes a backend: "numba", or the device of Triton's kernels ("cpu" is the interpreter).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from anyep.backends.cpu.expander import Expander
from anyep.backends.cpu.team import Team
from anyep.backends.cuda.batch import Batches
from anyep.backends.cuda.elastic import GpuElasticOps
from anyep.backends.cuda.gpu import Gpu
from anyep.backends.expanded import ExpertPlaces, RowTensors, empty_scales
from tests.support.checks import deeper
from tests.support.depth import IS_DEEP
from tests.support.simulated_gpu import SimulatedGpu

GUARD = 7
FIRST_POSITION = 2
"""Positions lie behind the two other columns of a table."""


@dataclass(frozen=True)
class Case:
    """Rows that a rank has received, and how they are expanded."""

    ids: torch.Tensor
    num_experts: int
    alignment: int = 1
    hidden: int = 16
    num_scales: int = 0
    is_column_major: bool = False
    has_weights: bool = True
    pads: bool = False
    num_spare_rows: int = 0
    """Room for more rows than were received."""
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @cached_property
    def compact(self) -> RowTensors:
        """Received rows with spare ones, which hold anything."""
        generator = torch.Generator().manual_seed(self.seed)
        room, num_topk = len(self.ids) + self.num_spare_rows, self.ids.shape[1]
        bits = torch.int32 if self.dtype.itemsize == 4 else torch.int16
        limits = torch.iinfo(bits)
        drawn = torch.randint(limits.min, limits.max, (room, self.hidden), generator=generator)
        weights = torch.rand(room, num_topk, generator=generator) if self.has_weights else None
        scales = torch.rand(room, self.num_scales, generator=generator) if self.num_scales else None
        return RowTensors(drawn.to(bits).view(self.dtype), weights, scales)

    @cached_property
    def roomy_ids(self) -> torch.Tensor:
        """The ids with spare rows, whose ids mean nothing."""
        spare = torch.zeros(self.num_spare_rows, self.ids.shape[1], dtype=torch.int64)
        return torch.cat([self.ids, spare])

    @cached_property
    def copies(self) -> list[list[tuple[int, int]]]:
        """By expert: the row and choice of each copy, in their order."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for row, choices in enumerate(self.ids.tolist()):
            for choice, expert in enumerate(choices):
                if 0 <= expert < self.num_experts:
                    found[expert].append((row, choice))
        return found

    def padded(self, count: int) -> int:
        return -(-count // self.alignment) * self.alignment

    @cached_property
    def counts(self) -> list[int]:
        return [len(rows) for rows in self.copies]

    @cached_property
    def starts(self) -> list[int]:
        """Of each group; one more entry has the rows of the whole result."""
        starts = [0]
        for count in self.counts:
            starts.append(starts[-1] + self.padded(count))
        return starts

    def right_positions(self) -> torch.Tensor:
        positions = torch.full(self.roomy_ids.shape, -1, dtype=torch.int32)
        for expert, copies in enumerate(self.copies):
            for index, (row, choice) in enumerate(copies):
                positions[row, choice] = self.starts[expert] + index
        return positions


def example(**changes: Any) -> Case:
    return Case(torch.tensor([[0, 1], [1, -1], [0, -1]]), 2, **({"alignment": 4} | changes))


def random_ids(num_rows: int, num_topk: int, num_experts: int, seed: int) -> torch.Tensor:
    """Distinct experts, of which some are elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    everywhere = torch.rand(num_rows, 2 * num_experts + num_topk, generator=generator)
    ids = everywhere.topk(num_topk, dim=1).indices
    return torch.where(ids < num_experts, ids, -1)


def cases(is_slow: bool) -> Iterator[Case]:
    yield example()
    yield example(pads=True, num_scales=3, is_column_major=True)
    # A rank that receives nothing; one choice; experts without rows; a token that names an expert twice.
    yield Case(
        torch.zeros(0, 3, dtype=torch.int64), 4, alignment=8, num_scales=2, pads=True, num_spare_rows=3
    )
    yield Case(torch.tensor([[5], [5], [0]]), 7, pads=True, has_weights=False)
    yield Case(torch.tensor([[1, 1, -1], [2, 1, 1]]), 3, alignment=2, num_spare_rows=2)
    sizes = [
        # rows, choices, experts, alignment, hidden, scales, spare rows
        (37, 3, 6, 8, 24, 5, 0),
        (70, 9, 33, 1, 136, 0, 11),
        (21, 2, 70, 16, 40, 57, 4),
        (11, 17, 4, 128, 264, 3, 0),
    ]
    if IS_DEEP or not is_slow:
        sizes += [(300, 8, 32, 64, 512, 56, 20), (50, 128, 256, 3, 16, 1, 0), (1000, 6, 13, 1, 1048, 9, 1)]
    for index, (num_rows, num_topk, num_experts, alignment, hidden, num_scales, spare) in enumerate(sizes):
        yield Case(
            *(random_ids(num_rows, num_topk, num_experts, index), num_experts, alignment, hidden, num_scales),
            *(index % 2 == 1, index % 3 != 2, index % 2 == 0, spare, torch.bfloat16, index),
        )


@cache
def gpu_ops(backend: str) -> GpuElasticOps:
    gpu: Any = Gpu() if backend == "cuda" else SimulatedGpu()
    return GpuElasticOps(gpu, Batches(gpu.index, "checks"), share_of_sms=1)


@dataclass
class Run:
    """A case on a backend: places, and what is made with them."""

    case: Case
    backend: str

    def __post_init__(self) -> None:
        case = self.case
        self.device = torch.device("cpu" if self.backend == "numba" else self.backend)
        room = len(case.roomy_ids)
        self.metadata = self.guarded((room, FIRST_POSITION + case.ids.shape[1]), torch.int32)
        self.places = ExpertPlaces.allocate(case.num_experts, self.metadata[:, FIRST_POSITION:])
        self.received = torch.tensor([-5, len(case.ids)], dtype=torch.int32, device=self.device)
        self.compact = RowTensors(*map(self.there, case.compact))
        self.ids = case.roomy_ids.to(self.device)

    def there(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor.to(self.device) if tensor is not None else None

    def guarded(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), GUARD, dtype=dtype, device=self.device)

    @cached_property
    def expander(self) -> Expander:
        return Expander(Team(2))

    @cached_property
    def on_gpu(self) -> GpuElasticOps:
        """The same of a GPU, or of Triton's interpreter."""
        return gpu_ops(self.backend)

    def place(self) -> None:
        case = self.case
        if self.backend == "numba":
            rows = self.expander.place(self.ids, len(case.ids), case.alignment, self.places)
            assert rows == case.starts[-1]
        else:
            self.on_gpu.place(self.ids, self.received, case.alignment, self.places, expands=True)

    def count(self) -> None:
        case = self.case
        if self.backend == "numba":
            rows = self.expander.count(self.ids, len(case.ids), case.alignment, self.places)
            assert rows == case.starts[-1]
        else:
            self.on_gpu.place(self.ids, self.received, case.alignment, self.places, expands=False)

    def expand(self, num_rows: int) -> RowTensors:
        """The result, with room for `num_rows`."""
        case = self.case
        bits = torch.int32 if case.dtype.itemsize == 4 else torch.int16
        x = self.guarded((num_rows, case.hidden), bits).view(case.dtype)
        weights = self.guarded((num_rows,), torch.float32) if case.has_weights else None
        scales = None
        if case.num_scales:
            how = (num_rows, case.num_scales, torch.float32, case.is_column_major, self.device)
            scales = empty_scales(*how).fill_(GUARD)
        expanded = RowTensors(x, weights, scales)
        padded_to = case.alignment if case.pads else 0
        if self.backend == "numba":
            self.expander.expand(self.compact, len(case.ids), self.places, expanded, padded_to)
        else:
            self.on_gpu.expand(self.compact, self.received, self.places, expanded, padded_to)
        return expanded

    def reduce(self, expanded: RowTensors) -> RowTensors:
        case = self.case
        bits = torch.int32 if case.dtype.itemsize == 4 else torch.int16
        x = self.guarded(case.compact.x.shape, bits).view(case.dtype)
        weights = self.guarded(case.roomy_ids.shape, torch.float32) if case.has_weights else None
        compact = RowTensors(x, weights)
        if self.backend == "numba":
            self.expander.reduce(expanded, len(case.ids), self.places, compact)
        else:
            self.on_gpu.reduce(expanded, self.received, self.places, compact)
        return compact


def assert_same(found: torch.Tensor | None, right: torch.Tensor | None) -> None:
    """The same bits."""
    assert (found is None) == (right is None)
    if found is not None and right is not None:
        bits = torch.int32 if right.dtype.itemsize == 4 else torch.int16
        assert torch.equal(found.cpu().contiguous().view(bits), right.contiguous().view(bits))


def is_slow(backend: str) -> bool:
    return backend == "cpu"


@deeper
def check_places(backend: str) -> None:
    """place_by_expert and the kernels before it: counts, ends and positions."""
    assert example().counts == [2, 2]
    assert example().right_positions().tolist() == [[0, 4], [5, -1], [1, -1]]
    for case in cases(is_slow(backend)):
        run = Run(case, backend)
        run.place()
        assert run.places.counts.tolist() == case.counts
        starts_and_counts = zip(case.starts, case.counts, strict=False)
        assert run.places.ends.tolist() == [start + count for start, count in starts_and_counts]
        assert torch.equal(run.places.positions.cpu(), case.right_positions())
        assert (run.metadata[:, :FIRST_POSITION] == GUARD).all()


def check_counts(backend: str) -> None:
    """count_received; or on a GPU place_by_expert that does not expand."""
    assert example().starts == [0, 4, 8]
    for case in cases(is_slow(backend)):
        run = Run(case, backend)
        run.count()
        assert run.places.counts.tolist() == case.counts
        assert run.places.ends.tolist() == case.starts[1:]
        assert (run.metadata == GUARD).all()


@deeper
def check_expansion(backend: str) -> None:
    """expand_rows: rows, weights, scales and padding; nothing else is written, and nothing past the room."""
    for case in cases(is_slow(backend)):
        for num_rows in {case.starts[-1], case.starts[-1] + 5, case.starts[-1] // 2}:
            run = Run(case, backend)
            run.place()
            expanded = run.expand(num_rows)
            right = right_expansion(case, num_rows)
            for part, right_part in zip(expanded, right, strict=True):
                assert_same(part, right_part)
            if case.num_scales and num_rows > 1:
                assert expanded.scales is not None
                stride = -(-num_rows // 4) * 4 if case.is_column_major else case.num_scales
                expected = (1, stride) if case.is_column_major else (stride, 1)
                assert expanded.scales.stride() == expected


def right_expansion(case: Case, num_rows: int) -> RowTensors:
    bits = torch.int32 if case.dtype.itemsize == 4 else torch.int16
    x = torch.full((num_rows, case.hidden), GUARD, dtype=bits).view(case.dtype)
    weights, scales = (
        torch.full((num_rows,), float(GUARD)),
        torch.full((num_rows, case.num_scales), float(GUARD)),
    )
    compact = case.compact
    for expert, copies in enumerate(case.copies):
        end = case.starts[expert] + len(copies)
        for position in range(case.starts[expert], case.starts[expert + 1]):
            if position >= num_rows or (position >= end and not case.pads):
                continue
            if position >= end:
                x[position], weights[position], scales[position] = 0, 0, 0
                continue
            row, choice = copies[position - case.starts[expert]]
            x[position] = compact.x[row]
            if compact.weights is not None:
                weights[position] = compact.weights[row, choice]
            if compact.scales is not None:
                scales[position] = compact.scales[row]
    return RowTensors(x, weights if case.has_weights else None, scales if case.num_scales else None)


@deeper
def check_reduction(backend: str) -> None:
    """reduce_expanded: sums in the order of choices, single rows as they are, weights by choice."""
    for case in cases(is_slow(backend)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if case.alignment == 8 else (case.dtype,):
            of_type = Case(**{**vars_of(case), "dtype": dtype, "hidden": case.hidden})
            run = Run(of_type, backend)
            run.place()
            num_rows = max(of_type.starts[-1], 1)
            experts = special_rows(num_rows, of_type)
            found = run.reduce(RowTensors(*map(run.there, experts)))
            right = right_reduction(of_type, experts)
            for part, right_part in zip(found, right, strict=True):
                assert_same(without_nans(part), without_nans(right_part))


def without_nans(part: torch.Tensor | None) -> torch.Tensor | None:
    """Which NaN a float32 sum is depends on the machine."""
    return torch.where(part.isnan(), 7.0, part) if part is not None and part.dtype.itemsize == 4 else part


def vars_of(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


def special_rows(num_rows: int, case: Case) -> RowTensors:
    """Rows by expert with zeros of both signs, infinities and NaNs among other values."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    x = torch.randn(num_rows, case.hidden, generator=generator)
    special = torch.tensor([0.0, -0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38])
    chosen = special[torch.randint(len(special), x.shape, generator=generator)]
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.3, chosen, x)
    weights = torch.randn(num_rows, generator=generator) if case.has_weights else None
    return RowTensors(x.to(case.dtype), weights)


def right_reduction(case: Case, experts: RowTensors) -> RowTensors:
    positions = case.right_positions()
    bits = torch.int32 if case.dtype.itemsize == 4 else torch.int16
    x = torch.full(case.compact.x.shape, GUARD, dtype=bits).view(case.dtype)
    weights = torch.full(positions.shape, float(GUARD))
    for row in range(len(case.ids)):
        copies = [position for position in positions[row].tolist() if position >= 0]
        total = torch.zeros(case.hidden, dtype=case.dtype)
        if len(copies) == 1:
            total = experts.x[copies[0]]
        elif copies:
            added = experts.x[copies[0]].float()
            for position in copies[1:]:
                added = added + experts.x[position].float()
            total = with_one_nan(added.to(case.dtype))
        x[row] = total
        if experts.weights is not None:
            weights[row] = torch.where(positions[row] >= 0, experts.weights[positions[row].clamp(min=0)], 0.0)
    return RowTensors(x, weights if case.has_weights else None)


def with_one_nan(rows: torch.Tensor) -> torch.Tensor:
    """16-bit sums have one NaN each."""
    if rows.dtype.itemsize == 4:
        return rows
    quiet = torch.tensor({torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}[rows.dtype], dtype=torch.int16)
    return torch.where(rows.isnan(), quiet, rows.view(torch.int16)).view(rows.dtype)
