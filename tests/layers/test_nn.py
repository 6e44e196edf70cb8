"""The layer over ranks, against the same layer in one process, written as plainly as possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anyep import Disagreement, InvalidCall
from anyep.nn import ExpertParallelMoE, TopKGate, make_buffer, run_experts
from tests.support.depth import examples
from tests.support.moe import (
    HIDDEN,
    NUM_EXPERTS,
    TOKENS,
    check_decode,
    check_layer,
    make_expert,
    make_gate,
    make_layer,
    num_nodes,
    rows_of,
    run_layer,
)
from tests.support.places import Place
from tests.support.world import RankContext, get_world

TIMEOUT_S = 180.0
State = dict[str, Tensor]
PLACES = [
    Place("cpu", 1).param(),
    Place("cpu", 4).param(),
    Place("cpu", 4, num_nodes=2).param(),
    Place("cpu", 4, num_nodes=2, hosts=True).param(marks=pytest.mark.slow),
    Place("cuda", 2).param(),
    Place("cuda", 4).param(),
]


# The gate


@examples(20, deep=200)
@given(
    st.integers(0, 2**31),
    st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4), (8, 5), (2, 1)]),
    st.integers(1, 5),
)
def test_gate_chooses_from_the_best_groups(seed: int, groups: tuple[int, int], topk: int) -> None:
    num_groups, topk_groups = groups
    num_experts = 8 if num_groups == 8 else 16
    size = num_experts // num_groups
    topk = min(topk, topk_groups * size)
    torch.manual_seed(seed)
    gate = TopKGate(HIDDEN, num_experts, topk, num_groups, topk_groups)
    x = torch.randn(3, HIDDEN)
    topk_idx, weights = gate(x)
    for row, chosen, shares in zip(x, topk_idx.tolist(), weights, strict=True):
        scores = torch.exp(gate.weight @ row).detach()
        goodness = [sum(sorted(scores[at : at + size])[-2:]) for at in range(0, num_experts, size)]
        best = sorted(range(num_groups), key=lambda group: goodness[group])[-topk_groups:]
        eligible = [index for index in range(num_experts) if index // size in best]
        assert chosen == sorted(eligible, key=lambda index: -scores[index])[:topk]
        right = scores[chosen] / scores[chosen].sum()
        torch.testing.assert_close(shares.detach(), right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("topk", "num_groups", "topk_groups", "sentence"),
    [
        (1, 3, 1, "1 of 3 groups of 8 experts: groups must have equal sizes"),
        (1, 4, 5, "5 of 4 groups of 8 experts: groups must have equal sizes"),
        (5, 4, 2, "topk is 5: that many experts are not in 2 of the groups"),
        (0, 1, 1, "topk is 0: that many experts are not in 1 of the groups"),
        (1, 0, 1, "num_groups is 0: it must be at least 1"),
    ],
)
def test_gates_that_cannot_be(topk: int, num_groups: int, topk_groups: int, sentence: str) -> None:
    with pytest.raises(InvalidCall, match=sentence):
        TopKGate(HIDDEN, 8, topk, num_groups, topk_groups)


def ranks_per_node(place: Place) -> int | None:
    """What a Buffer is told: between hosts it finds out."""
    return None if place.hosts else place.ranks_per_node


# Normal mode


@pytest.mark.parametrize("place", PLACES)
def test_layer_is_that_of_one_process(place: Place) -> None:
    for groups in ((1, 1), (4, 2)):
        place.world().run(check_layer, *groups, ranks_per_node(place), timeout=TIMEOUT_S)
    assert place.world().run(num_nodes, ranks_per_node(place)) == [place.num_nodes] * place.num_ranks


def disagree_about_nodes(context: RankContext) -> None:
    sentence = "the ranks disagree about ranks_per_node: 1 on rank 0; 2 on rank 1"
    with pytest.raises(Disagreement, match=sentence):
        make_buffer(context.group, HIDDEN, NUM_EXPERTS, device="cpu", ranks_per_node=1 + context.rank)


def test_all_ranks_say_the_same_of_nodes() -> None:
    get_world(2).run(disagree_about_nodes)


def check_compiled_layer(context: RankContext) -> None:
    torch._dynamo.reset()
    layer, x = make_layer(context), rows_of(context.rank)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled = run_layer(torch.compile(layer, fullgraph=True, backend="aot_eager"), x)
    for ours, eager in zip(compiled, run_layer(layer, x), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.slow
def test_compiled_layer_gives_the_same_bits() -> None:
    get_world(2).run(check_compiled_layer, timeout=TIMEOUT_S)


class Checkpointed(torch.nn.Module):
    """The layer, run again in the backward pass instead of being remembered."""

    def __init__(self, layer: ExpertParallelMoE) -> None:
        super().__init__()
        self.layer, self.gate, self.experts = layer, layer.gate, layer.experts
        self.num_runs = 0

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        output: Tensor = self.layer(x)
        return output


def check_checkpointed_layer(context: RankContext) -> int:
    layer, x = make_layer(context), rows_of(context.rank)
    again = Checkpointed(layer)
    for ours, plain in zip(run_layer(again, x), run_layer(layer, x), strict=True):
        assert torch.equal(ours, plain)
    return again.num_runs


def test_checkpointed_layer_gives_the_same_bits() -> None:
    assert get_world(4).run(check_checkpointed_layer) == [2] * 4


# State dicts


def state_of(context: RankContext) -> State:
    """The state of a layer within a model, changed so that nobody can make it from a seed."""
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), make_layer(context))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 + 1 / (1 + sum(name.encode()) % 13))
    return dict(model.state_dict())


def output_with(context: RankContext, state: State) -> Tensor:
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), make_layer(context))
    before = set(state)
    model.load_state_dict(state)
    assert set(state) == before
    # Every rank has the tokens of all.
    result: Tensor = model(torch.cat([rows_of(rank) for rank in range(4)])).detach()
    return result


def test_states_of_all_ranks_are_that_of_one_process() -> None:
    (whole,) = get_world(1).run(state_of)
    assert f"1.experts.{NUM_EXPERTS - 1}.down.weight" in whole
    (right,) = get_world(1).run(output_with, whole)
    for num_ranks in (2, 4):
        shards = get_world(num_ranks).run(state_of)
        assert [len(shard) - 3 for shard in shards] == [(len(whole) - 3) // num_ranks] * num_ranks
        merged = {name: tensor for shard in shards for name, tensor in shard.items()}
        assert merged.keys() == whole.keys()
        experts = [name for name in whole if ".experts." in name]
        assert all(torch.equal(merged[name], whole[name]) for name in experts)
        for output in get_world(num_ranks).run(output_with, whole):
            torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-6)


def load_with_a_hole(context: RankContext) -> str:
    layer = make_layer(context)
    state = dict(layer.state_dict())
    state.pop(f"experts.{NUM_EXPERTS - 1}.down.weight", None)
    state["experts.99.down.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as caught:
        layer.load_state_dict(state)
    return str(caught.value)


def test_a_state_with_a_hole_is_refused() -> None:
    first, second = get_world(2).run(load_with_a_hole)
    assert 'Unexpected key(s) in state_dict: "experts.99.down.weight"' in first
    assert f'Missing key(s) in state_dict: "experts.{NUM_EXPERTS - 1}.down.weight"' in second


# Low-latency mode


@pytest.mark.parametrize("place", PLACES)
def test_decode(place: Place) -> None:
    outcomes = place.world().run(check_decode, ranks_per_node(place), timeout=TIMEOUT_S)
    assert outcomes == list(TOKENS[: place.num_ranks])


def decode_without_room(context: RankContext) -> None:
    layer = ExpertParallelMoE(make_gate(1, 1), make_expert, context.group, NUM_EXPERTS, HIDDEN, device="cpu")
    layer.low_latency = True
    with pytest.raises(InvalidCall, match="low_latency_mode=True"):
        layer(rows_of(context.rank).bfloat16())
    layer.buffer.destroy()


def test_decode_needs_room() -> None:
    get_world(2).run(decode_without_room)


def make_wrong_ones(context: RankContext) -> None:
    gate, group = make_gate(1, 1), context.group
    with pytest.raises(InvalidCall, match="9 experts do not divide over 2 ranks"):
        ExpertParallelMoE(gate, make_expert, group, 9, HIDDEN, device="cpu")
    with pytest.raises(InvalidCall, match="9 experts do not divide over 2 ranks"):
        make_buffer(group, HIDDEN, 9, device="cpu")
    for experts in (3, make_expert(0)):
        with pytest.raises(InvalidCall, match="pass the modules of this rank's experts, or a function"):
            ExpertParallelMoE(gate, experts, group, NUM_EXPERTS, HIDDEN, device="cpu")  # type: ignore[arg-type]
    for no_group, sentence in ((None, "neither a group nor a comm"), ("g", "group is of type str")):
        with pytest.raises(InvalidCall, match=sentence):
            make_buffer(no_group, HIDDEN, NUM_EXPERTS, device="cpu")
        with pytest.raises(InvalidCall, match=sentence):
            ExpertParallelMoE(gate, make_expert, no_group, NUM_EXPERTS, HIDDEN, device="cpu")


def test_layers_that_cannot_be() -> None:
    get_world(2).run(make_wrong_ones)


def layers_of_both_kinds(context: RankContext) -> tuple[Tensor, Tensor]:
    """One with this rank's experts and a Buffer of its own, and one that makes its experts."""
    num_local = NUM_EXPERTS // context.num_ranks
    mine = [make_expert(context.rank * num_local + index) for index in range(num_local)]
    layer = ExpertParallelMoE(make_gate(4, 2), torch.nn.Sequential(*mine), context.group, device="cpu")
    assert layer.buffer is None
    assert layer.num_experts == NUM_EXPERTS
    x = rows_of(context.rank)
    result = layer(x), make_layer(context)(x)
    assert layer.buffer is not None
    layer.buffer.destroy()
    with pytest.raises(InvalidCall, match="2 experts on each of 4 ranks are not 9"):
        ExpertParallelMoE(make_gate(4, 2), mine, context.group, 9)
    with pytest.raises(InvalidCall, match="num_experts is missing"):
        ExpertParallelMoE(make_gate(4, 2), make_expert, context.group)
    return result


def test_experts_that_are_there_or_are_made() -> None:
    for there, made in get_world(4).run(layers_of_both_kinds, timeout=TIMEOUT_S):
        assert torch.equal(there, made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_write_to_given_memory(dtype: torch.dtype) -> None:
    """Where they write changes neither their results nor gradients."""
    ids = torch.tensor([[1, 0], [-1, 1], [-1, -1]])
    results = []
    for out in (None, torch.full((3, 4), 7.0, dtype=dtype)):
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(3, 4, generator=generator).to(dtype).requires_grad_()
        weights = torch.rand(3, 2, generator=generator).requires_grad_()
        made = run_experts(rows, ids, weights, [lambda x: x * x, lambda x: 3 * x], out)
        assert out is None or made.data_ptr() == out.data_ptr()
        made.float().square().sum().backward()
        results.append((made.detach(), rows.grad, weights.grad))
    for plain, in_place in zip(*results, strict=True):
        assert torch.equal(plain, in_place)
