"""Layers that are copied share their Buffer; layers that are pickled leave it out and are given another."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from anyep import InvalidCall
from anyep.nn import ExpertParallelMoE, expert_layers, make_buffer
from tests.support.moe import HIDDEN, NUM_EXPERTS, make_expert, make_gate, make_layer, rows_of
from tests.support.places import Place, tensor_device
from tests.support.world import RankContext, World, get_world


def make_model(context: RankContext) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [make_layer(context) for _ in range(2)]
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), *layers).to(tensor_device())


def check_copies_in_training(context: RankContext) -> None:
    """A copy made between two steps keeps its parameters, and both go on in turns over one Buffer."""
    model, x = make_model(context), rows_of(context.rank).to(tensor_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    before = model(x)
    frozen, shallow = copy.deepcopy(model), copy.copy(model[1])
    assert {layer.buffer for layer in expert_layers(frozen)} == {model[1].buffer}
    assert shallow.buffer is model[1].buffer
    optimizer.step()
    after = model(x)
    assert torch.equal(frozen(x), before)
    assert torch.equal(shallow(model[0](x)), model[1](model[0](x)))
    if len(x):
        assert not torch.equal(after, before)
    # The copy has gradients and hooks of its own.
    frozen(x).square().sum().backward()
    frozen.load_state_dict(model.state_dict())
    assert torch.equal(frozen(x), after)


@pytest.mark.parametrize("place", [Place("cpu", 4).param(), Place("cuda", 2).param()])
def test_copies_share_their_buffer(place: Place) -> None:
    place.world().run(check_copies_in_training, timeout=240.0)


def check_average(context: RankContext) -> None:
    model, x = make_model(context), rows_of(context.rank)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average.update_parameters(model)  # the first time copies
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    average.update_parameters(model)
    for name, tensor in average.module.state_dict().items():
        torch.testing.assert_close(tensor, 2 * first[name])
    model.load_state_dict(average.module.state_dict())
    assert torch.equal(average(x), model(x))


def test_an_averaged_model_runs() -> None:
    get_world(2).run(check_average)


def check_lazy_buffer(context: RankContext) -> None:
    """A copy made before the Buffer uses the one that either of them makes."""
    layer = ExpertParallelMoE(make_gate(1, 1), make_expert, context.group, NUM_EXPERTS, device="cpu")
    other = copy.deepcopy(layer)
    x = rows_of(context.rank)
    output = other(x)
    assert layer.buffer is not None
    assert layer.buffer is other.buffer
    assert torch.equal(layer(x), output)
    made = layer.buffer
    layer.buffer = None
    assert other.buffer is made
    made.destroy()


def test_copies_share_a_buffer_that_is_made_later() -> None:
    get_world(2).run(check_lazy_buffer)


def saved(context: RankContext, how: str) -> tuple[bytes, Tensor]:
    model = make_model(context)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    output = model(rows_of(context.rank)).detach()
    if how == "pickle":
        return pickle.dumps(model), output
    memory = io.BytesIO()
    torch.save(model, memory)
    return memory.getvalue(), output


def loaded(context: RankContext, pickled: list[bytes], how: str) -> Tensor:
    mine = pickled[context.rank]
    model = pickle.loads(mine) if how == "pickle" else torch.load(io.BytesIO(mine), weights_only=False)
    x = rows_of(context.rank)
    assert [layer.buffer for layer in expert_layers(model)] == [None, None]
    sentence = rf"layer was pickled.*layer.buffer = anyep.nn.make_buffer\(group, {HIDDEN}, {NUM_EXPERTS}\)"
    with pytest.raises(InvalidCall, match=sentence):
        model(x)
    with make_buffer(context.group, HIDDEN, NUM_EXPERTS, device="cpu") as buffer:
        for layer in expert_layers(model):
            layer.buffer = buffer
        output: Tensor = model(x)
        output.sum().backward()  # type: ignore[no-untyped-call]
        again = copy.deepcopy(model)(x)
        assert torch.equal(again, output)
        model.load_state_dict(make_model(context).state_dict())
    return output.detach()


def test_a_pickled_model_is_given_a_new_buffer() -> None:
    """In other processes than those that pickled it."""
    with World(2) as other:
        for how in ("pickle", "torch.save"):
            answers = get_world(2).run(saved, how)
            outputs = other.run(loaded, [pickled for pickled, _ in answers], how)
            for output, (_, right) in zip(outputs, answers, strict=True):
                assert torch.equal(output, right)


def give_wrong_buffers(context: RankContext, pickled: bytes) -> None:
    layer = pickle.loads(pickled)[1]
    with make_buffer(context.group, HIDDEN, NUM_EXPERTS, device="cpu") as buffer:
        with pytest.raises(
            InvalidCall, match=f"rank {context.rank} of 4, but the layer holds .* rank 1 of 2:"
        ):
            layer.buffer = buffer
        assert layer.buffer is None
    with pytest.raises(InvalidCall, match="buffer is of type str: it must be"):
        layer.buffer = "a Buffer"
    with pytest.raises(InvalidCall, match="experts is empty"):
        ExpertParallelMoE(make_gate(1, 1), [], context.group)


def test_a_buffer_of_other_ranks_is_refused() -> None:
    _, (pickled, _) = get_world(2).run(saved, "pickle")
    get_world(4).run(give_wrong_buffers, pickled)
