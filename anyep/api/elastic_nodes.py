"""What `ElasticBuffer` does about several nodes.

Between nodes a handle of normal mode does not say which token a row is, so a first dispatch sends the tokens'
numbers beside the rows, as one more scale of 4 bytes. And a relay that adds up rows on their way back does
not know the order: each row has the last choice of its token with it, as one more weight, which rows are
sorted by (`CombineInput.is_keyed`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import torch

from anyep.backends.base import Payload

ONE_NODE: Final = 6
"""The parts of a handle of normal mode on one node; between nodes it has more."""
RANK_PREFIX, RECV_SRC_IDX, SEND_HEAD = 0, 3, 5
NODES_RECV_RANK_PREFIX, NODES_SEND_HEAD = 6, 8


def with_tokens(payload: Payload) -> Payload:
    """The payload with each token's number as its last scale.

    >>> rows = torch.zeros((2, 4), dtype=torch.float32, device="cpu")
    >>> with_tokens(Payload(rows)).scales.tolist()
    [[0], [1]]
    """
    scales = payload.scales
    numbers = torch.arange(payload.num_tokens, dtype=torch.int32, device=payload.x.device)[:, None]
    if scales is not None:
        numbers = torch.cat([scales, numbers.view(scales.dtype)], dim=1)
    return replace(payload, scales=numbers)


def without_tokens(scales: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The scales of received rows without the last one, and that one: the numbers of tokens.

    >>> without_tokens(torch.tensor([[7], [9]], dtype=torch.int32, device="cpu"))[1].tolist()
    [7, 9]
    """
    numbers = scales[:, -1].view(torch.int32)
    return scales[:, :-1] if scales.shape[1] > 1 else None, numbers


class Source(NamedTuple):
    """Where received rows came from, and where this rank's went: the first parts of `Origins`."""

    rank_prefix: torch.Tensor
    recv_src_idx: torch.Tensor
    send_head: torch.Tensor
    """Between nodes [tokens, nodes]: each token's number among those for a node, or -1."""

    @staticmethod
    def of(routing: tuple[torch.Tensor, ...], tokens: torch.Tensor | None) -> Source:
        """From the handle of a dispatch; between nodes it needs the tokens' numbers."""
        if len(routing) == ONE_NODE:
            return Source(routing[RANK_PREFIX], routing[RECV_SRC_IDX], routing[SEND_HEAD])
        assert tokens is not None
        ends = routing[NODES_RECV_RANK_PREFIX]
        # What other ranks receive is not known here, and not needed.
        return Source(ends[:, None].expand(-1, len(ends)), tokens, routing[NODES_SEND_HEAD])


def fold(ends: torch.Tensor, out: torch.Tensor) -> None:
    """Fill the prefix sums by rank of a node, over all nodes, from the prefix sums by rank.

    >>> out = torch.empty(2, dtype=torch.int32, device="cpu")
    >>> fold(torch.tensor([1, 3, 6, 10], dtype=torch.int32, device="cpu"), out)
    >>> out.tolist()
    [4, 10]
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    out.copy_(counts.view(-1, len(out)).sum(dim=0).cumsum(dim=0))
