"""Who relays what between nodes: the arithmetic of the plan, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from anyep.core.headers import NUM_WORDS, RESULT_ROWS
from anyep.core.relay import RelayPlan
from anyep.errors import InvalidCall
from anyep.topology import Topology

TWO_NODES = Topology(4, 2)


def test_the_part_of_a_rank() -> None:
    plan = RelayPlan(TWO_NODES, rank=3)
    assert (plan.node, plan.index, plan.relays) == (1, 1, [1, 3])


def test_where_the_next_row_goes() -> None:
    """Rank 2 relays for ranks 0 and 2, in two channels; row s of the matrix has the rows from rank s."""
    matrix = np.array([[0, 0, 3, 1], [0, 0, 2, 0], [0, 0, 1, 4], [0, 0, 5, 1]], np.int32)
    # From node 0 (rank 0): 3 rows for rank 2, 2 of them in channel 0; 1 row for rank 3, in channel 1.
    # From node 1 (rank 2): 1 row for rank 2 in channel 0; 4 rows for rank 3, 1 of them in channel 0.
    # The last row of each counts tokens, and does not matter here.
    relayed = np.array([[[2, 1], [0, 1], [2, 1]], [[1, 0], [1, 3], [1, 3]]], np.int32)
    rows = RelayPlan(TWO_NODES, rank=2).next_rows(matrix, relayed)
    # [channel][node][rank of this node]: after the rows of lower ranks, and of earlier channels.
    assert rows.tolist() == [[[0, 0], [5, 1]], [[2, 0], [6, 2]]]


def headers_with(*rows: int) -> np.ndarray:
    headers = np.zeros((4, NUM_WORDS), np.int64)
    headers[:, RESULT_ROWS] = rows
    return headers


TOKENS_BY_NODE = np.array([[0, 3], [0, 2], [1, 4], [0, 0]], np.int32)
"""From each rank to each node: rank 2 relays 3 + 4 tokens to its node, rank 0 one, rank 3 two."""


def test_a_relay_with_enough_room() -> None:
    plan = RelayPlan(TWO_NODES, rank=0)
    plan.check_room(headers_with(1, 0, 7, 2), TOKENS_BY_NODE)
    plan.check_room(headers_with(-1, -1, -1, -1), TOKENS_BY_NODE)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            (1, 0, 6, 2),
            "num_worst_tokens is 6 on rank 2, but it relays 7 tokens to its node: nothing was sent",
        ),
        (
            (1, 0, 7, 1),
            "num_worst_tokens is 1 on rank 3, but it relays 2 tokens to its node: nothing was sent",
        ),
    ],
)
def test_a_relay_without_enough_room(rows: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidCall, match=message):
        RelayPlan(TWO_NODES, rank=0).check_room(headers_with(*rows), TOKENS_BY_NODE)
