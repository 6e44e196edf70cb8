"""The reference of the elastic API: worked examples by hand, and what follows for any routing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import elastic_oracle, oracle
from tests.support.depth import examples
from tests.support.elastic_oracle import Reduction, Returned, Shape

TINY = 2.0**-8
"""Half of the last place of 1 in bfloat16: 1 + TINY rounds to 1, 1 + 2 * TINY does not."""


def two_ranks() -> list[oracle.RankInput]:
    """Experts 0 and 1 are on rank 0, experts 2 and 3 on rank 1. Rank 1 has one token, rank 0 has three."""
    first = torch.tensor([[0, 2], [3, 2], [-1, 1]])
    second = torch.tensor([[1, 0]])
    return [
        oracle.RankInput(
            torch.arange(1.0, 1 + len(ids)).reshape(-1, 1).bfloat16() + 10 * rank,
            oracle.layout(ids, 4, 2)[2],
            topk_idx=ids,
            topk_weights=torch.arange(ids.numel()).reshape(ids.shape) + 100.0 * rank,
        )
        for rank, ids in enumerate((first, second))
    ]


def test_a_dispatch_by_hand() -> None:
    shape = Shape(num_experts=4, num_max_tokens_per_rank=5, expert_alignment=2)
    there = elastic_oracle.dispatch(two_ranks(), 0, shape)
    assert there.x.flatten().tolist() == [1, 3, 11]
    assert there.topk_idx.tolist() == [[0, -1], [-1, 1], [1, 0]]
    assert there.sources.tolist() == [0, 2, 5]
    assert there.last_choice.tolist() == [0, 1, 1]
    assert (there.counts.tolist(), there.aligned_counts) == ([2, 2], [2, 2])
    assert there.psum_by_source.tolist() == [2, 3]
    assert there.expanded.x.flatten().tolist() == [1, 11, 3, 11]
    assert there.expanded.topk_weights is not None
    assert there.expanded.topk_weights.tolist() == [0, 101, 5, 100]
    other = elastic_oracle.dispatch(two_ranks(), 1, shape)
    assert other.psum_by_source.tolist() == [2, 2]
    assert other.expanded.x.flatten().tolist() == [1, 2, 2, 0]
    assert other.expanded.is_padding.tolist() == [False, False, False, True]
    assert other.expanded.psum_by_expert.tolist() == [2, 3]
    assert other.psum_by_expert.tolist() == [2, 4]
    assert other.expanded.positions.tolist() == [[-1, 0], [2, 1]]


MANY = 2.0**24
"""MANY + 1 is MANY in float32."""
FOUR_RANKS = Shape(num_experts=8, num_max_tokens_per_rank=1)
TWO_NODES = FOUR_RANKS._replace(ranks_per_node=2)


@pytest.mark.parametrize(
    ("choices", "shape", "is_multiple", "expected"),
    [
        # The copies of rank 0 are rounded before rank 1's is added, or all three are rounded once.
        ([(0, 1), (1, TINY), (2, TINY)], FOUR_RANKS, True, 1.0),
        ([(0, 1), (1, TINY), (2, TINY)], FOUR_RANKS, False, 1 + 2 * TINY),
        # Ranks 0 and 1 are a node, whose sum is rounded.
        ([(0, 1), (2, TINY), (4, TINY)], FOUR_RANKS, True, 1 + 2 * TINY),
        ([(0, 1), (2, TINY), (4, TINY)], TWO_NODES, True, 1.0),
        ([(0, 1), (2, TINY), (4, TINY)], TWO_NODES, False, 1 + 2 * TINY),
        # Rank 0 is added last, after its last choice; or every choice in its turn.
        ([(0, 1), (2, MANY), (4, -MANY), (1, 0)], FOUR_RANKS, True, 1.0),
        ([(0, 1), (2, MANY), (4, -MANY), (1, 0)], FOUR_RANKS, False, 0.0),
        # Likewise for node 0: rank 1 has its last choice.
        ([(0, 1), (4, MANY), (6, -MANY), (2, 0)], TWO_NODES, True, 1.0),
        ([(4, MANY), (0, 1), (2, 0), (6, -MANY)], TWO_NODES, True, 1.0),
    ],
)
def test_the_levels_and_the_order_of_a_sum(
    choices: list[tuple[int, float]], shape: Shape, is_multiple: bool, expected: float
) -> None:
    """One token, whose choices have an expert and a value each; there are two experts on each rank."""
    experts = [expert for expert, _ in choices]
    ids = torch.tensor([experts])
    token = oracle.RankInput(torch.zeros(1, 1).bfloat16(), oracle.layout(ids, 8, 4)[2], topk_idx=ids)
    nothing = replace(token, x=token.x[:0], topk_idx=ids[:0])
    by_rank = [[value for expert, value in sorted(choices) if expert // 2 == rank] for rank in range(4)]
    returned = Returned([torch.tensor(values).reshape(-1, 1).bfloat16() for values in by_rank])
    reduction = Reduction(is_expanded=True, allow_multiple_reduction=is_multiple)
    inputs = [token, nothing, nothing, nothing]
    combined, _ = elastic_oracle.combine(returned, inputs, 0, shape, reduction)
    assert combined.item() == expected


def test_biases_are_the_start_of_a_sum() -> None:
    inputs = two_ranks()
    nothing = Returned([torch.zeros(3, 1).bfloat16(), torch.zeros(2, 1).bfloat16()])
    biases = (torch.tensor([[1.0], [1.0], [-0.0]]).bfloat16(), torch.tensor([[TINY], [2 * TINY], [-0.0]]))
    combined, _ = elastic_oracle.combine(nothing, inputs, 0, Shape(4, 5), biases=biases)
    assert combined.flatten().tolist() == [1.0, 1 + 2 * TINY, 0.0]


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[oracle.RankInput], Shape]:
    num_ranks, num_local, num_topk = (draw(st.integers(1, most)) for most in (4, 3, 4))
    num_experts = num_ranks * num_local
    chance = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    inputs = []
    for _ in range(num_ranks):
        count = draw(st.integers(0, 6))
        ranked = torch.rand(count, num_experts + num_topk, generator=chance).topk(num_topk).indices
        ids = torch.where(ranked < num_experts, ranked, -1)
        x = torch.randn(count, 4, generator=chance).bfloat16()
        weights = torch.rand(count, num_topk, generator=chance)
        inputs.append(oracle.RankInput(x, oracle.layout(ids, num_experts, num_ranks)[2], None, ids, weights))
    return inputs, Shape(num_experts, 8, draw(st.integers(1, 5)))


@examples(15, deep=200)
@given(routings())
def test_what_the_two_apis_share(case: tuple[list[oracle.RankInput], Shape]) -> None:
    """Rows, ids and counts are those of normal mode; the layouts give the same sums of unchanged rows."""
    inputs, shape = case
    everywhere = [elastic_oracle.dispatch(inputs, rank, shape) for rank in range(len(inputs))]
    for rank, there in enumerate(everywhere):
        normal = oracle.dispatch(inputs, rank, shape.num_experts, shape.expert_alignment)
        assert oracle.same_bits(there.x, normal.x)
        assert there.topk_idx.tolist() == (normal.topk_idx.tolist() if len(normal.x) else [])  # type: ignore
        assert there.aligned_counts == normal.tokens_per_expert
        assert there.psum_by_source[-1] == len(there.x)
        assert (~there.expanded.is_padding).sum() == there.counts.sum() == (there.topk_idx >= 0).sum()
        is_given = inputs[rank].topk_idx >= 0  # type: ignore[operator]
        expanded = Returned(
            [there.expanded.x for there in everywhere],
            [there.expanded.topk_weights for there in everywhere],  # type: ignore[misc]
        )
        reduction = Reduction(is_expanded=True, allow_multiple_reduction=False)
        combined, weights = elastic_oracle.combine(expanded, inputs, rank, shape, reduction)
        times = is_given.sum(1, keepdim=True)
        torch.testing.assert_close(combined, inputs[rank].x * times)
        assert torch.equal(weights, torch.where(is_given, inputs[rank].topk_weights, 0.0))  # type: ignore
        compact = Returned([there.x for there in everywhere], [there.topk_weights for there in everywhere])  # type: ignore[misc]
        _, weights = elastic_oracle.combine(compact, inputs, rank, shape)
        assert torch.equal(weights, torch.where(is_given, inputs[rank].topk_weights, 0.0))  # type: ignore
