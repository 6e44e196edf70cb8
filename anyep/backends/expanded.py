"""The tensors of the expanded layout, which every backend fills: one row per (token, local expert).

places = ExpertPlaces.allocate(num_local_experts, metadata[:, 2:])
num_rows = expander.place(ids, num_received, alignment, places)
expander.expand(RowTensors(x, weights, scales), num_received, places, RowTensors(*expanded), alignment)
expander.reduce(RowTensors(*expanded), num_received, places, RowTensors(x, weights))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

SCALE_ROWS = 4
"""Column-major scales have a stride that is a multiple of so many rows."""


class ExpertPlaces(NamedTuple):
    """Which rows each local expert has, and where the copies of each received row lie among them."""

    counts: torch.Tensor
    """int32 [local experts]: the rows of each."""
    ends: torch.Tensor
    """int32 [local experts]: where each expert's rows end, before the padding of its group."""
    positions: torch.Tensor
    """int32 [received rows, top-k]: the row of each copy, -1 for none. Rows may have a stride."""

    @staticmethod
    def allocate(num_local_experts: int, positions: torch.Tensor) -> ExpertPlaces:
        """New counts on the device of `positions`."""
        counts = torch.empty(num_local_experts, dtype=torch.int32, device=positions.device)
        return ExpertPlaces(counts, torch.empty_like(counts), positions)


class RowTensors(NamedTuple):
    """Rows with what belongs to them. Compact rows have a weight for each choice and contiguous scales;
    expanded rows have one weight each, and scales with any strides."""

    x: torch.Tensor
    weights: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    """4 bytes each."""


def empty_scales(
    num_rows: int, num_scales: int, dtype: torch.dtype, is_column_major: bool, device: torch.device
) -> torch.Tensor:
    """Room for the scales of rows; column by column, each column begins at a multiple of 4 scales.

    >>> empty_scales(5, 3, torch.float32, True, torch.device("cpu")).stride()
    (1, 8)
    """
    if not is_column_major:
        return torch.empty((num_rows, num_scales), dtype=dtype, device=device)
    stride = -(-num_rows // SCALE_ROWS) * SCALE_ROWS
    return torch.empty((num_scales, stride), dtype=dtype, device=device).T[:num_rows]


class Origins(NamedTuple):
    """What a dispatch of normal mode found out, once its rows are there."""

    rank_prefix: torch.Tensor
    """int32 [ranks, ranks]: by source and destination, the rows from this source and those before it."""
    recv_src_idx: torch.Tensor
    """int32 [received rows]: the token that each row is at its source."""
    send_head: torch.Tensor
    """int32 [tokens, ranks]: the row of each token at each rank, or -1."""
    topk_idx: torch.Tensor
    """int64 [tokens, top-k]: the experts of this rank's tokens."""
    recv_topk_idx: torch.Tensor
    """int64 [received rows, top-k]: local experts, or -1."""
    rank: int
    """This rank."""
    num_experts: int
    num_max_tokens_per_rank: int


class OriginTensors(NamedTuple):
    """The tensors of a handle that follow from it, as `EPHandle` describes them."""

    received: torch.Tensor
    """`psum_num_recv_tokens_per_scaleup_rank`."""
    metadata: torch.Tensor
    """`recv_src_metadata`; if rows are expanded, `place` fills the columns of choices."""
    slots: torch.Tensor
    """`dst_buffer_slot_idx`."""
    order: torch.Tensor
    kept_ids: torch.Tensor | None
    """A copy of the received ids; None if rows are expanded."""


class ElasticOps(Protocol):
    """What a device does for the elastic API beside the calls of normal mode.

    `follow` runs work in the order of these calls; the operations below it are for such work. The number of
    received rows is the last number of `received`, which a device reads when the work runs.
    """

    def follow(self, work: Callable[[], None], previous: Sequence[Any], run_async: bool) -> Any:
        """Do work after earlier calls and after these events (None: nothing to wait for).

        Returns its event if it is asynchronous, else None."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result."""

    def tell_origins(self, origins: Origins, tensors: OriginTensors) -> None:
        """Fill the tensors."""

    def place(
        self,
        ids: torch.Tensor,
        received: torch.Tensor,
        alignment: int,
        places: ExpertPlaces,
        expands: bool,
    ) -> None:
        """Fill the places from the local ids of the received rows. If they are not expanded there are no
        positions, and `ends` are the inclusive prefix sums of the aligned counts."""

    def expand(
        self,
        compact: RowTensors,
        received: torch.Tensor,
        places: ExpertPlaces,
        expanded: RowTensors,
        padded_to: int,
    ) -> None:
        """Write the copies of the received rows; if `padded_to` is the alignment of the groups, their
        padding becomes 0."""

    def reduce(
        self, expanded: RowTensors, received: torch.Tensor, places: ExpertPlaces, compact: RowTensors
    ) -> None:
        """Add up the copies of the received rows, and gather their weights."""
