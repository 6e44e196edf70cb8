"""The CPU's kernels of the expanded layout for any ids; `tests/support/checks/expand.py` has fixed cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

from anyep.backends.cpu import Group, compile_kernels
from anyep.backends.expanded import RowTensors
from tests.support.checks.expand import (
    Case,
    Run,
    assert_same,
    right_expansion,
    right_reduction,
    special_rows,
)
from tests.support.depth import examples


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    num_topk, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    # Ids that name no local expert, among them some that no sender would write.
    choice = st.integers(-1, num_experts - 1) | st.sampled_from([num_experts, -(2**63), 2**63 - 1])
    row = st.lists(choice, min_size=num_topk, max_size=num_topk)
    ids = torch.tensor(draw(st.lists(row, max_size=12)), dtype=torch.int64).view(-1, num_topk)
    return Case(
        ids,
        num_experts,
        alignment=draw(st.integers(1, 9)),
        hidden=8 * draw(st.sampled_from([1, 2, 17, 129])),
        num_scales=draw(st.integers(0, 3)),
        is_column_major=draw(st.booleans()),
        has_weights=draw(st.booleans()),
        pads=draw(st.booleans()),
        num_spare_rows=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.property
@examples(60, deep=1000)
@given(drawn_cases())
def test_there_and_back(case: Case) -> None:
    compile_kernels(Group.EXPANDED)
    run = Run(case, "numba")
    run.place()
    assert torch.equal(run.places.positions, case.right_positions())
    expanded = run.expand(case.starts[-1])
    for part, right in zip(expanded, right_expansion(case, case.starts[-1]), strict=True):
        assert_same(part, right)
    experts = special_rows(max(case.starts[-1], 1), case)
    for part, right in zip(run.reduce(experts), right_reduction(case, experts), strict=True):
        assert_same(part, right)


def test_a_token_of_one_expert_comes_back_bit_for_bit() -> None:
    """Whatever its bits are, NaNs included."""
    compile_kernels(Group.EXPANDED)
    every_value = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(64, 1024).view(torch.bfloat16)
    case = Case(torch.arange(64).view(-1, 1) % 5, 5, alignment=16, hidden=1024)
    run = Run(case, "numba")
    run.place()
    run.compact = RowTensors(every_value, case.compact.weights)
    assert_same(run.reduce(run.expand(case.starts[-1])).x, every_value)
