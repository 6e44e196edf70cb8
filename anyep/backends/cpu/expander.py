"""Runs the kernels of the expanded layout over the threads of a rank (`kernels/expand.py`)."""

from __future__ import annotations

from typing import Final

import torch

from anyep.backends import cpu
from anyep.backends.cpu.kernels import groups
from anyep.backends.cpu.rows import WORTH_SPLITTING_BYTES, WORTH_STREAMING_BYTES
from anyep.backends.cpu.team import Team
from anyep.backends.expanded import ExpertPlaces, RowTensors

STREAMED_ALIGNMENT: Final = 16
"""Streaming stores need rows at multiples of so many bytes."""
_DTYPES: Final = {torch.bfloat16: cpu.BF16, torch.float16: cpu.FP16, torch.float32: cpu.FP32}


class Expander:
    """Makes expanded rows of compact ones and back; its kernels are those of `Group.EXPANDED`."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def count(self, ids: torch.Tensor, num_rows: int, alignment: int, places: ExpertPlaces) -> int:
        """Fill the counts by expert, and `ends` with the inclusive prefix sums of the aligned counts. Returns
        the sum of the aligned counts."""
        counts, ends = places.counts.numpy(), places.ends.numpy()
        return int(cpu.count_received(ids.numpy(), num_rows, alignment, counts, ends))

    def place(self, ids: torch.Tensor, num_rows: int, alignment: int, places: ExpertPlaces) -> int:
        """Fill the places from the local ids of the first `num_rows` rows; returns the rows of the expanded
        result, which include padding."""
        positions = tuple(_positions(places))
        counts, ends = places.counts.numpy(), places.ends.numpy()
        return int(cpu.place_by_expert(ids.numpy(), num_rows, alignment, counts, ends, positions))

    def expand(
        self,
        compact: RowTensors,
        num_rows: int,
        places: ExpertPlaces,
        expanded: RowTensors,
        padded_to: int = 0,
    ) -> None:
        """Write the copies of the first `num_rows` rows; if `padded_to` is the alignment of the groups, their
        padding becomes 0."""
        row_bytes = compact.x.shape[1] * compact.x.element_size()
        num_bytes = expanded.x.shape[0] * row_bytes
        positions, rows, out = _positions(places), _compact(compact), _expanded(expanded)
        groups_of_call = tuple(map(tuple, (positions, rows, out)))
        streaming = int(num_bytes >= WORTH_STREAMING_BYTES and _can_stream(expanded.x, row_bytes))
        worth_splitting = num_bytes >= WORTH_SPLITTING_BYTES
        self._team.run(
            lambda first, end: cpu.expand_rows(first, end, *groups_of_call, streaming),
            num_rows,
            worth_splitting=worth_splitting,
        )
        if padded_to > 1:
            ends = places.ends.numpy()
            self._team.run(
                lambda first, end: cpu.zero_padding(first, end, padded_to, ends, *groups_of_call[1:]),
                len(ends),
                worth_splitting=worth_splitting,
            )

    def reduce(self, expanded: RowTensors, num_rows: int, places: ExpertPlaces, compact: RowTensors) -> None:
        """Add up the copies of the first `num_rows` rows, and gather their weights."""
        x, out = expanded.x, compact.x
        row_bytes = x.shape[1] * x.element_size()
        num_bytes = num_rows * row_bytes
        rows = groups.ReducedRows(
            *(x.data_ptr(), x.shape[0], _address(expanded.weights)),
            *(out.data_ptr(), _address(compact.weights)),
            *(x.shape[1], row_bytes, _DTYPES[x.dtype]),
        )
        positions, sums = tuple(_positions(places)), tuple(rows)
        streaming = int(num_bytes >= WORTH_STREAMING_BYTES and _can_stream(out, row_bytes))
        self._team.run(
            lambda first, end: cpu.reduce_expanded(first, end, positions, sums, streaming),
            num_rows,
            worth_splitting=num_bytes >= WORTH_SPLITTING_BYTES,
        )


def _positions(places: ExpertPlaces) -> groups.Positions:
    positions = places.positions
    return groups.Positions(positions.data_ptr(), positions.stride(0), positions.shape[1])


def _compact(rows: RowTensors) -> groups.CompactRows:
    num_scales = rows.scales.shape[1] if rows.scales is not None else 0
    return groups.CompactRows(
        *(rows.x.data_ptr(), rows.x.shape[1] * rows.x.element_size()),
        *(_address(rows.weights), _address(rows.scales), num_scales),
    )


def _expanded(rows: RowTensors) -> groups.ExpandedRows:
    strides = rows.scales.stride() if rows.scales is not None else (0, 0)
    return groups.ExpandedRows(
        *(rows.x.data_ptr(), rows.x.shape[0]), *(_address(rows.weights), _address(rows.scales), *strides)
    )


def _address(tensor: torch.Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0


def _can_stream(rows: torch.Tensor, row_bytes: int) -> bool:
    return (rows.data_ptr() | row_bytes) % STREAMED_ALIGNMENT == 0
