"""The obvious reference of the elastic API: what each rank must get in both layouts, in dense PyTorch.

    expected = dispatch(inputs, rank, Shape(num_experts=8, num_max_tokens_per_rank=64))
    expected.x, expected.expanded.x              # compact rows; rows grouped by local expert
    combine(rows, inputs, rank, shape, Reduction(is_expanded=True))

Token by token and choice by choice, on the CPU. Nothing here knows how rows travel. Results are compared bit
for bit (`oracle.same_bits`), padding rows and rows past the received ones left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from tests.support.oracle import RankInput


class Shape(NamedTuple):
    """What all ranks agree on."""

    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int = 1
    ranks_per_node: int | None = None
    """The ranks of a scale-up domain, None for all: one node, or direct mode."""


class Reduction(NamedTuple):
    """How a combine adds up rows."""

    is_expanded: bool = False
    allow_multiple_reduction: bool = True


COMPACT: Final = Reduction()


@dataclass(frozen=True)
class Expanded:
    """Rows grouped by local expert. Padding is zero here; a call zeroes it only if told to."""

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    scales: torch.Tensor | None
    is_padding: torch.Tensor
    """bool [rows]."""
    positions: torch.Tensor
    """int32 [received rows, top-k]: the row of each copy, -1 where the expert is elsewhere."""
    psum_by_expert: torch.Tensor
    """int32 [local experts]: where each expert's rows end, without its padding."""


@dataclass(frozen=True)
class Received:
    """What one rank gets from a dispatch. Compact rows are in order of source rank, then source token."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    """This rank's local number of each choice's expert, -1 where it is elsewhere."""
    topk_weights: torch.Tensor | None
    """The sender's weights of all choices; those of experts elsewhere mean nothing."""
    scales: torch.Tensor | None
    sources: torch.Tensor
    """int32: source rank x num_max_tokens_per_rank + source token."""
    last_choice: torch.Tensor
    """The last of each token's choices that is on this rank."""
    counts: torch.Tensor
    """int32 [local experts]: the copies of each expert, without padding."""
    aligned_counts: list[int]
    psum_by_expert: torch.Tensor
    """int32 [local experts]: inclusive prefix sums of the aligned counts."""
    psum_by_source: torch.Tensor
    """int32 [scale-up ranks]: inclusive prefix sums of the rows from each index within a node."""
    expanded: Expanded


def dispatch(inputs: Sequence[RankInput], rank: int, shape: Shape) -> Received:
    """What `rank` receives."""
    num_ranks = len(inputs)
    num_local = shape.num_experts // num_ranks
    scaleup = shape.ranks_per_node or num_ranks
    per_source = [0] * scaleup
    tokens: list[tuple[int, int]] = []
    local_ids: list[list[int]] = []
    for source, given in enumerate(inputs):
        assert given.topk_idx is not None
        for token, experts in enumerate(given.topk_idx.tolist()):
            local = [e - rank * num_local if e >= 0 and e // num_local == rank else -1 for e in experts]
            if any(expert >= 0 for expert in local):
                tokens.append((source, token))
                local_ids.append(local)
                per_source[source % scaleup] += 1
    counts = [sum(local.count(expert) for local in local_ids) for expert in range(num_local)]
    aligned_counts = [_align(count, shape.expert_alignment) for count in counts]
    assert inputs[rank].topk_idx is not None
    num_topk = inputs[rank].topk_idx.shape[1]
    compact = _Rows.gather(inputs, tokens)
    return Received(
        x=compact.x,
        topk_idx=torch.tensor(local_ids, dtype=torch.int64, device="cpu").reshape(-1, num_topk),
        topk_weights=compact.weights,
        scales=compact.scales,
        sources=_int32(source * shape.num_max_tokens_per_rank + token for source, token in tokens),
        last_choice=_int32(_last(local) for local in local_ids),
        counts=_int32(counts),
        aligned_counts=aligned_counts,
        psum_by_expert=_int32(aligned_counts).cumsum(0, dtype=torch.int32),
        psum_by_source=_int32(per_source).cumsum(0, dtype=torch.int32),
        expanded=_expand(compact, local_ids, aligned_counts, num_topk),
    )


class _Rows(NamedTuple):
    x: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None

    @staticmethod
    def gather(inputs: Sequence[RankInput], tokens: list[tuple[int, int]]) -> _Rows:
        def gather(name: str) -> torch.Tensor | None:
            parts = [getattr(given, name) for given in inputs]
            if parts[0] is None:
                return None
            rows = [parts[source][token] for source, token in tokens]
            return torch.stack(rows) if rows else parts[0].new_empty((0, *parts[0].shape[1:]))

        x = gather("x")
        assert x is not None
        return _Rows(x, gather("topk_weights"), gather("scales"))


def _expand(rows: _Rows, local_ids: list[list[int]], aligned_counts: list[int], num_topk: int) -> Expanded:
    num_rows = sum(aligned_counts)
    x = rows.x.new_zeros((num_rows, *rows.x.shape[1:]))
    weights = None if rows.weights is None else rows.weights.new_zeros(num_rows)
    scales = None if rows.scales is None else rows.scales.new_zeros((num_rows, rows.scales.shape[1]))
    is_padding = torch.ones(num_rows, dtype=torch.bool, device="cpu")
    positions = torch.full((len(local_ids), num_topk), -1, dtype=torch.int32, device="cpu")
    ends = []
    for expert, start in enumerate(_starts(aligned_counts)):
        position = start
        for row, local in enumerate(local_ids):
            for choice, chosen in enumerate(local):
                if chosen != expert:
                    continue
                x[position] = rows.x[row]
                if weights is not None and rows.weights is not None:
                    weights[position] = rows.weights[row, choice]
                if scales is not None and rows.scales is not None:
                    scales[position] = rows.scales[row]
                is_padding[position] = False
                positions[row, choice] = position
                position += 1
        ends.append(position)
    return Expanded(x, weights, scales, is_padding, positions, _int32(ends))


class Returned(NamedTuple):
    """What the experts' ranks pass to combine, in one layout: `rows[r]` and `weights[r]` by rank r."""

    rows: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor] | None = None


class _Addend(NamedTuple):
    choice: int
    """The last of the choices that this is the sum of."""
    owner: int
    """A rank that these choices' experts are on."""
    row: torch.Tensor


def combine(
    returned: Returned,
    inputs: Sequence[RankInput],
    rank: int,
    shape: Shape,
    reduction: Reduction = COMPACT,
    biases: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `rank` gets: for each token the sum of its rows, and the weight that came back for each choice.

    Sums are in float32; those of a token begin with its biases, else with 0. Groups are added in order of the
    last of their choices. With `allow_multiple_reduction` the copies of each rank are added first (the sum
    begins with the first one), then the ranks of each node (the sum begins with 0), and these are rounded.
    """
    topk_idx = inputs[rank].topk_idx
    assert topk_idx is not None
    num_tokens, num_topk = topk_idx.shape
    num_local, dtype = shape.num_experts // len(inputs), returned.rows[rank].dtype
    received = [dispatch(inputs, owner, shape) for owner in range(len(inputs))]
    row_of = [{source: row for row, source in enumerate(there.sources.tolist())} for there in received]
    combined = returned.rows[rank].new_empty((num_tokens, returned.rows[rank].shape[1]))
    weights = torch.zeros((num_tokens, num_topk), dtype=torch.float32, device="cpu")
    for token, experts in enumerate(topk_idx.tolist()):
        addends = []
        for choice, expert in enumerate(experts):
            if expert < 0:
                continue
            owner = expert // num_local
            row = row_of[owner][rank * shape.num_max_tokens_per_rank + token]
            position = int(received[owner].expanded.positions[row, choice]) if reduction.is_expanded else row
            # A compact row stands for all choices of its rank, and counts as the last of them.
            if reduction.is_expanded or choice == received[owner].last_choice[row]:
                addends.append(_Addend(choice, owner, returned.rows[owner][position]))
            if returned.weights is not None:
                given = returned.weights[owner]
                weights[token, choice] = given[position] if reduction.is_expanded else given[position, choice]
        if reduction.allow_multiple_reduction:
            addends = _sums(addends, lambda owner: owner, None, dtype)
            if shape.ranks_per_node is not None:
                addends = _sums(addends, lambda owner: owner // shape.ranks_per_node, 0.0, dtype)
        combined[token] = _sum([addend.row for addend in addends], _start(biases, token)).to(dtype)
    return combined, weights if returned.weights is not None else None


def _sums(
    addends: list[_Addend], group_of: Callable[[int], int], start: float | None, dtype: torch.dtype
) -> list[_Addend]:
    """The rounded sum of each group, in order of the groups' last choices. One row is not changed at all."""
    sums = []
    for group in {group_of(addend.owner) for addend in addends}:
        members = [addend for addend in addends if group_of(addend.owner) == group]
        rows = [addend.row for addend in members]
        total = rows[0] if len(rows) == 1 else _sum(rows, start).to(dtype)
        sums.append(_Addend(members[-1].choice, members[-1].owner, total))
    return sorted(sums, key=lambda addend: addend.choice)


def _start(biases: Sequence[torch.Tensor], token: int) -> torch.Tensor | float:
    if not biases:
        return 0.0
    first, *others = (bias[token].float() for bias in biases)
    return sum(others, start=first)


def _sum(rows: Sequence[torch.Tensor], start: torch.Tensor | float | None) -> torch.Tensor:
    if start is None:
        start, rows = rows[0].float(), rows[1:]
    total = torch.as_tensor(start, dtype=torch.float32, device="cpu")
    for row in rows:
        total = total + row.float()
    return total


def _starts(aligned_counts: list[int]) -> list[int]:
    return [sum(aligned_counts[:expert]) for expert in range(len(aligned_counts))]


def _last(local_ids: list[int]) -> int:
    return max(choice for choice, expert in enumerate(local_ids) if expert >= 0)


def _align(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


def _int32(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cpu")
