"""Calls along a handle that are repeated with less work give the same bits as step by step.

Calls that are not like an earlier one are made step by step, whatever is different."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from anyep import Config, EventOverlap
from anyep.api.buffer import Buffer
from tests.support.gpu_scenarios import FEW_SMS, attempt, good_arguments, new_buffer
from tests.support.places import Place
from tests.support.repeats import (
    PLACES,
    Watched,
    arguments_for,
    column_major,
    pair_of,
    shifted,
    without_gradients,
)
from tests.support.world import RankContext


def follow_handles(context: RankContext) -> None:
    """Handles of many sizes, in turns: rows in windows and elsewhere, results that are held or dropped."""
    with new_buffer(context) as buffer:
        watched = Watched(buffer)
        made = [arguments_for(buffer, tokens, tokens) for tokens in (5, 1, 17, 9)]
        handles = [buffer.dispatch(**arguments)[4] for arguments in made]
        held = []
        for turn in range(12):
            arguments, handle = made[turn % len(made)], handles[turn % len(made)]
            x = (arguments["x"].float() * (turn + 1)).bfloat16()

            def send(x: torch.Tensor = x, handle: Any = handle) -> torch.Tensor:
                return buffer.dispatch(x, handle=handle, config=FEW_SMS)[0]  # type: ignore[return-value]

            expected = watched.step_by_step(send)
            before = watched.num_repeats
            rows = send()
            assert watched.num_repeats == before + (len(rows) > 0)
            assert torch.equal(rows, expected)
            outputs = (rows.float() + context.rank).bfloat16()
            for given in (outputs, rows):

                def give_back(given: torch.Tensor = given, handle: Any = handle) -> torch.Tensor:
                    return buffer.combine(given, handle, config=FEW_SMS)[0]

                right = watched.step_by_step(give_back)
                assert torch.equal(give_back(), right)
                if turn > 0:
                    before = watched.num_repeats
                    assert torch.equal(give_back(), right)
                    assert watched.num_repeats == before + (len(rows) > 0)
            if turn % 3 == 0:
                held.append((rows, expected.clone()))
        for rows, expected in held:
            assert torch.equal(rows, expected)


@pytest.mark.parametrize("place", PLACES)
def test_the_same_bits(place: Place) -> None:
    place.world().run(follow_handles, timeout=200)


@dataclass(frozen=True)
class Change:
    """What is different from the repeatable call; a repeat would be wrong, or is not supported."""

    name: str
    of_x: Callable[[torch.Tensor], Any] = lambda x: x
    of_handle: Callable[[Any], Any] = lambda handle: handle
    more: Callable[[Buffer], dict[str, Any]] = lambda buffer: {}
    is_repeated: bool = False

    def __str__(self) -> str:
        return self.name


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], dim=2)[:, :, 0]


def touched(handle: Any) -> Any:
    handle[3].add_(0)
    return handle


CHANGES = [
    Change("nothing", is_repeated=True),
    Change("other rows", lambda x: x * 2, is_repeated=True),
    Change("another type", lambda x: x.half()),
    Change("wider rows", lambda x: torch.cat([x, x], dim=1)),
    Change("an address", shifted),
    Change("a gradient", lambda x: x.clone().requires_grad_()),
    Change("a copied handle", of_handle=lambda handle: tuple(part.clone() for part in handle)),
    Change("a list", of_handle=list),
    Change("a handle that was written to", of_handle=touched),
    Change("another config", more=lambda buffer: {"config": Config(FEW_SMS.num_sms, 4, 8)}),
    Change("an equal config", more=lambda buffer: {"config": Config(**vars(FEW_SMS))}),
    Change("asynchronous", more=lambda buffer: {"async_finish": True}),
    Change("an event", more=lambda buffer: {"previous_event": buffer.capture()}),
    Change("an empty event", more=lambda buffer: {"previous_event": EventOverlap()}),
]


def try_changes(context: RankContext) -> None:
    with new_buffer(context) as buffer:
        watched = Watched(buffer)
        arguments = arguments_for(buffer, 7, 3)
        for change in CHANGES:
            handle = buffer.dispatch(**arguments)[4]
            for _ in range(2):
                rows = buffer.dispatch(arguments["x"], handle=handle, config=FEW_SMS)[0]
                assert isinstance(rows, torch.Tensor)
                buffer.combine(rows, handle, config=FEW_SMS)
            x, changed = change.of_x(arguments["x"]), change.of_handle(handle)
            more = {"config": FEW_SMS, **change.more(buffer)}
            before = watched.num_repeats
            found, *_, event = buffer.dispatch(x, handle=changed, **more)
            event.current_stream_wait()
            assert watched.num_repeats == before + change.is_repeated, change
            right, *_, event = watched.step_by_step(
                lambda x=x, handle=handle, more=more: buffer.dispatch(x, handle=handle, **more)
            )
            event.current_stream_wait()
            assert torch.equal(found.contiguous(), right.contiguous()), change
            outputs = change.of_x(rows.clone())
            more = {"config": FEW_SMS, **change.more(buffer)}
            total, _, event = buffer.combine(outputs, changed, **more)
            event.current_stream_wait()
            right, _, event = watched.step_by_step(
                lambda x=outputs, handle=handle, more=more: buffer.combine(x, handle, **more)
            )
            event.current_stream_wait()
            assert torch.equal(total, right), change


@pytest.mark.parametrize("place", PLACES)
def test_whatever_is_different(place: Place) -> None:
    place.world().run(try_changes, timeout=200)


PAIRS = [
    Change("nothing", is_repeated=True),
    Change("other scales", lambda x: (x[0], x[1] * 2), is_repeated=True),
    Change("the address of scales", lambda x: (x[0], shifted(x[1])), is_repeated=True),
    Change("the address of data", lambda x: (shifted(x[0]), x[1])),
    Change("a list", list),
    Change("integers", lambda x: (x[0], x[1].view(torch.int32))),
    Change("two scales", lambda x: (x[0], x[1].repeat(1, 2))),
    Change("scales by column", lambda x: (x[0], column_major(x[1].repeat(1, 2)))),
    Change("another type", lambda x: (x[0].view(torch.int8), x[1])),
    Change("no scales", lambda x: x[0]),
]


def try_pairs(context: RankContext) -> None:
    with new_buffer(context) as buffer:
        watched = Watched(buffer)
        arguments = arguments_for(buffer, 7, 3, hidden=128)
        handle = buffer.dispatch(**arguments)[4]
        pair = pair_of(arguments["x"])
        for change in PAIRS:
            for _ in range(2):
                buffer.dispatch(pair, handle=handle, config=FEW_SMS)
            x = change.of_x(pair)  # type: ignore[arg-type]

            def send(x: Any = x) -> Any:
                rows = buffer.dispatch(x, handle=handle, config=FEW_SMS)[0]
                return rows if isinstance(rows, tuple) else (rows,)

            before = watched.num_repeats
            found = send()
            assert watched.num_repeats == before + change.is_repeated, change
            right = watched.step_by_step(send)
            assert all(map(torch.equal, found, right)), change
            assert len(found) == len(right)


@pytest.mark.parametrize("place", PLACES)
def test_pairs(place: Place) -> None:
    place.world().run(try_pairs, timeout=200)


def require_gradients(context: RankContext) -> None:
    with new_buffer(context) as buffer:
        watched = Watched(buffer)
        arguments = arguments_for(buffer, 7, 3)
        x, handle = arguments["x"].requires_grad_(), buffer.dispatch(**arguments)[4]

        def there_and_back() -> Any:
            rows = buffer.dispatch(x, handle=handle, config=FEW_SMS)[0]
            outputs = (rows * 2).requires_grad_()  # type: ignore[operator]
            return rows, buffer.combine(outputs, handle, config=FEW_SMS)[0]

        without_gradients(there_and_back)
        before = watched.num_repeats
        found = without_gradients(there_and_back)
        assert watched.num_repeats == before + 2
        right = watched.step_by_step(lambda: without_gradients(there_and_back))
        assert all(map(torch.equal, found, right))
        assert not any(each.requires_grad for each in found)


@pytest.mark.parametrize("place", PLACES)
def test_in_autograd_functions(place: Place) -> None:
    place.world().run(require_gradients, timeout=200)


def mix_up(context: RankContext) -> list[str]:
    """Rank 0 repeats a call with a handle of another dispatch; wrong arguments after calls that were good."""
    with new_buffer(context) as buffer:
        watched = Watched(buffer)
        first, second = (arguments_for(buffer, 6, seed) for seed in (1, 2))
        handles = [buffer.dispatch(**arguments)[4] for arguments in (first, second)]
        x = first["x"]
        for _ in range(2):
            buffer.dispatch(x, handle=handles[0], config=FEW_SMS)
        said = []
        before = watched.num_repeats
        chosen = handles[1] if context.rank == 0 else handles[0]
        said.append(attempt(lambda: buffer.dispatch(x, handle=chosen, config=FEW_SMS)))
        assert watched.num_repeats == before + 1
        # It is heard of here, and this call is made all the same.
        said.append(attempt(lambda: buffer.dispatch(x, handle=handles[0], config=FEW_SMS)))
        assert watched.num_repeats == before + 1
        said.append(attempt(lambda: buffer.dispatch(x, handle=handles[0], config=FEW_SMS)))
        assert watched.num_repeats == before + 2
        said.append(attempt(lambda: buffer.dispatch(x[:-1], handle=handles[0], config=FEW_SMS)))
        said.append(attempt(lambda: buffer.dispatch(x.double(), handle=handles[0], config=FEW_SMS)))
        said.append(attempt(lambda: buffer.dispatch(strided(x), handle=handles[0], config=FEW_SMS)))
        rows = buffer.dispatch(x, handle=handles[0], config=FEW_SMS)[0]
        assert isinstance(rows, torch.Tensor)
        buffer.combine(rows, handles[0], config=FEW_SMS)
        said.append(attempt(lambda: buffer.combine(rows[:-1], handles[0], config=FEW_SMS)))
        said.append(attempt(lambda: buffer.combine(rows, handles[0], config=FEW_SMS)))
        # Tensors without addresses.
        said.append(attempt(lambda: buffer.combine(rows.float().to_sparse(), handles[0], config=FEW_SMS)))
        said.append(
            attempt(lambda: buffer.dispatch(x.float().to_sparse(), handle=handles[0], config=FEW_SMS))
        )
        said.append(attempt(lambda: buffer.combine(rows, handles[0], config=FEW_SMS)))
        return said


@pytest.mark.parametrize("place", PLACES)
def test_wrong_calls(place: Place) -> None:
    for said in place.world().run(mix_up, timeout=200):
        mixed, heard, fine, short, wide, apart, few, good, *sparse, last = said
        assert (mixed, fine, good, last) == ("fine", "fine", "fine", "fine")
        assert all("x is sparse: pass x.to_dense()" in message for message in sparse)
        assert "handle" in heard
        assert "rows, but the handle was made for" in short
        assert "float64" in wide
        assert "x is not contiguous" in apart
        assert "rows, but the handle's dispatch gave" in few


def end_with_it(context: RankContext) -> str:
    buffer = new_buffer(context)
    arguments = good_arguments(buffer)
    handle = buffer.dispatch(**arguments)[4]
    for _ in range(3):
        buffer.dispatch(arguments["x"], handle=handle, config=FEW_SMS)
    buffer.destroy()
    return attempt(lambda: buffer.dispatch(arguments["x"], handle=handle, config=FEW_SMS))


@pytest.mark.parametrize("place", PLACES)
def test_a_destroyed_buffer_repeats_nothing(place: Place) -> None:
    for said in place.world().run(end_with_it, timeout=200):
        assert said == "BufferBroken: this Buffer was destroyed: make a new one"


def pass_what_cannot_be_looked_at(context: RankContext) -> list[str]:
    with new_buffer(context) as buffer:
        arguments = arguments_for(buffer, 6, 1)
        x, handle = arguments["x"], buffer.dispatch(**arguments)[4]
        for _ in range(2):
            buffer.dispatch(x, handle=handle, config=FEW_SMS)
        ops = buffer.runtime.normal.ops
        usual, said = ops.is_quiet, []

        def fail() -> bool:
            raise RuntimeError("nothing can be found out")

        for look in (fail, usual):
            ops.is_quiet = look if context.rank == 0 else usual
            said.append(attempt(lambda: buffer.dispatch(x, handle=handle, config=FEW_SMS)))
        return said


@pytest.mark.parametrize("place", PLACES)
def test_arguments_that_cannot_be_looked_at(place: Place) -> None:
    """Such a call is made step by step: the ranks stay in step."""
    assert place.world().run(pass_what_cannot_be_looked_at, timeout=200) == [["fine"] * 2] * place.num_ranks
