"""Experts on rows that are grouped by expert, as `elastic_dispatch(..., do_expand=True)` gives them.

    outputs = run_grouped_experts(received.x, received.handle.num_recv_tokens_per_expert_list, experts)

Where all experts are `FeedForward`s of one shape, and torch has grouped products for the rows, each of the
three products is one call for all experts (`grouped_mm`); else each expert is called with its rows (`loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from anyep.errors import InvalidCall
from anyep.feed_forward import FeedForward

GROUPED_MM: Final = "grouped_mm"
LOOP: Final = "loop"
ROW_ALIGNMENT: Final = 16
"""Groups that begin at multiples of so many rows suit grouped products of every type."""


def way_of(rows: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]) -> str:
    """How experts would be run on these rows: "grouped_mm" or "loop".

    Grouped products are chosen for bfloat16 rows on a GPU; on the CPU torch loops over the groups itself.

    Args:
        rows: The rows [rows, hidden].
        experts: This rank's experts.
    """
    is_fast = rows.device.type == "cuda" and rows.dtype is torch.bfloat16 and len(rows) > 0
    return GROUPED_MM if is_fast and hasattr(torch, "_grouped_mm") and _are_alike(rows, experts) else LOOP


def run_grouped_experts(
    rows: Tensor,
    counts: Sequence[int],
    experts: Sequence[Callable[[Tensor], Tensor]],
    way: str | None = None,
) -> Tensor:
    """The experts' outputs for rows that are grouped by expert; gradients flow to the rows and the experts.

    Args:
        rows: The rows [rows, hidden], group after group.
        counts: The rows of each group, with their padding.
        experts: This rank's experts, one for each group; each maps rows to rows.
        way: "grouped_mm" or "loop"; by default what `way_of` says.

    >>> rows = torch.tensor([[1.0], [2.0], [3.0]], device="cpu")
    >>> run_grouped_experts(rows, [1, 2], [lambda x: x, lambda x: 10 * x]).flatten().tolist()
    [1.0, 20.0, 30.0]
    """
    if len(counts) != len(experts) or sum(counts) != len(rows):
        raise InvalidCall(
            f"counts are {len(counts)} groups of {sum(counts)} rows together: there are {len(experts)}"
            f" experts and {len(rows)} rows; pass handle.num_recv_tokens_per_expert_list"
        )
    if (way or way_of(rows, experts)) == LOOP:
        groups = torch.split(rows, list(counts))
        return torch.cat([expert(group) for expert, group in zip(experts, groups, strict=True)])
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=rows.device)

    def product(inputs: Tensor, name: str) -> Tensor:
        modules: Any = experts
        weights = torch.stack([getattr(expert, name).weight for expert in modules])
        outputs: Tensor = torch._grouped_mm(inputs, weights.transpose(-2, -1), offs=ends)
        return outputs

    return product(functional.silu(product(rows, "gate")) * product(rows, "up"), "down")


def _are_alike(rows: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]) -> bool:
    """Whether all are feed-forward layers of one shape and of the rows' type."""
    shapes = set()
    for expert in experts:
        if type(expert) is not FeedForward:
            return False
        parts = (expert.gate.weight, expert.up.weight, expert.down.weight)
        shapes.add(tuple((part.shape, part.dtype, part.device) for part in parts))
    return len(shapes) == 1 and next(iter(shapes))[0][1:] == (rows.dtype, rows.device)
