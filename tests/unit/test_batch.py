"""Batches of kernels: what the driver is asked to do, in which order, with which arguments; without a GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

import torch

from anyep.backends.cuda.batch import Batch, Batches, Input, Launch, Prepared, leaves_of, values_of
from anyep.backends.cuda.compiled import Leaf
from anyep.backends.cuda.kernels import groups, notify, sums
from anyep.backends.cuda.moment import Moment
from tests.support.recording_driver import Launched, Recorded, RecordingDriver, Waits, recording_driver

CONSTANTS = {"NUM_RANKS": 2, "TILE_WORDS": 1024}
PREFIX = torch.zeros(4, dtype=torch.int32)


@pytest.fixture
def recorder() -> Iterator[RecordingDriver]:
    with recording_driver() as found:
        yield found


def copying(x: Any = Input("x", torch.int32), programs: Any = 24) -> Launch:  # noqa: B008
    """A kernel with three pointers, then the rank, the number of rows, and the words of a row."""
    window = Input("window", torch.int32)
    return Launch(
        sums.copy_for_peers, 4, CONSTANTS, (programs,), (x, window, PREFIX, 1, Input("num_rows"), 64)
    )


def rows(num_rows: int = 3, first: int = 0) -> dict[str, Any]:
    x = torch.zeros(num_rows * 64 + first, dtype=torch.int32)[first:]
    return {"x": x, "window": torch.zeros(num_rows * 64, dtype=torch.int32), "num_rows": num_rows}


def arguments_of(call: Any) -> tuple[int, ...]:
    assert isinstance(call, Launched)
    return struct.unpack_from("@qqqiii", call.packed)


def test_the_example_of_run_batch(recorder: RecordingDriver) -> None:
    values = rows()
    assert Batch([copying()], 0).run(Moment(7, 5, 3, 0, 6, 3), values)
    before_1, before_2, launched, after_1, after_2 = recorder.calls
    assert [before_1, before_2] == [Recorded(5, 3), Waits(7, 5)]
    assert isinstance(launched, Launched)
    assert launched[:5] == ("copy_for_peers", (24, 1, 1), 128, launched.shared_bytes, 7)
    x, window = values["x"].data_ptr(), values["window"].data_ptr()
    assert arguments_of(launched) == (x, window, PREFIX.data_ptr(), 1, 3, 64)
    assert [after_1, after_2] == [Recorded(6, 7), Waits(3, 6)]


def test_a_batch_may_wait_for_nothing_and_be_waited_for_by_nobody(recorder: RecordingDriver) -> None:
    batch = Batch([copying()], 0)
    batch.run(Moment(7), rows())
    batch.run(Moment(0, also_wait_for=9, event_after=8), rows())
    first, wait, second, record = recorder.calls
    assert isinstance(first, Launched)
    assert isinstance(second, Launched)
    assert (first.stream, second.stream) == (7, 0)
    assert (wait, record) == (Waits(0, 9), Recorded(8, 0))


def test_each_run_has_its_own_inputs(recorder: RecordingDriver) -> None:
    """All launches of a batch get the same inputs, and no run leaves anything to the next one."""
    batch = Batch([copying(), copying(programs=Input("programs"))], 0)
    given = [rows(5), rows(9)]
    for number, values in enumerate(given):
        batch.run(Moment(7), {**values, "programs": 100 + number})
    found = [(call.grid[0], arguments_of(call)) for call in recorder.calls if isinstance(call, Launched)]
    expected = []
    for number, values in enumerate(given):
        packed = (
            values["x"].data_ptr(),
            values["window"].data_ptr(),
            PREFIX.data_ptr(),
            1,
            values["num_rows"],
            64,
        )
        expected += [(24, packed), (100 + number, packed)]
    assert found == expected


def test_a_kernel_without_programs_is_left_out(recorder: RecordingDriver) -> None:
    batch = Batch([copying(programs=Input("programs")), copying()], 0)
    batch.run(Moment(7), {**rows(), "programs": 0})
    assert [call.grid for call in recorder.calls if isinstance(call, Launched)] == [(24, 1, 1)]


def test_misaligned_rows_get_a_kernel_of_their_own(recorder: RecordingDriver) -> None:
    """A kernel that expects multiples of 16 is never launched with another address."""
    assert not Batch([copying()], 0).run(Moment(7, 5, 3), rows(first=1))
    assert recorder.calls == []
    batches, addresses = Batches(0, "a test"), []
    for first in (0, 1, 4, 2):
        values = rows(first=first)
        batches.run(((copying,),), Moment(7), values)
        addresses.append(values["x"].data_ptr())
    assert [arguments_of(call)[0] for call in recorder.calls] == addresses
    assert len({id(batch) for batch in batches._known.values()}) == 2


def test_prepared_recipes_run_what_a_look_up_would(
    recorder: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the addresses are, and even if the batch was forgotten meanwhile."""
    monkeypatch.setattr("anyep.backends.cuda.batch.MAX_BATCHES", 1)
    batches = Batches(0, "a test")
    prepared, other = (Prepared(batches, recipes) for recipes in (((copying,),), ((copying,), (copying,))))
    addresses = []
    for first in (0, 1, 0, 4, 2, 0):
        values = rows(first=first)
        prepared.run(Moment(7), values)
        addresses.append(values["x"].data_ptr())
    assert [arguments_of(call)[0] for call in recorder.calls] == addresses
    recorder.calls.clear()
    other.run(Moment(7), rows())
    prepared.run(Moment(7, 5, 3), rows())
    assert len(recorder.calls) == 5
    assert list(batches._known) == [((copying,), (copying,))]


def test_values_may_be_passed_in_an_order(recorder: RecordingDriver) -> None:
    """Names that are no inputs do not matter, whatever stands in their places; other addresses work, too."""
    batches = Batches(0, "a test")
    order = ("nothing", "num_rows", "x", "window", "nothing else")
    prepared = Prepared(batches, ((copying,),), order)
    expected = []
    for first in (0, 1, 0):
        values = rows(first=first)
        x, window = values["x"], values["window"]
        prepared.run(Moment(7), (None, 3, x, window, "some text"))
        expected.append((x.data_ptr(), window.data_ptr(), PREFIX.data_ptr(), 1, 3, 64))
    assert [arguments_of(call) for call in recorder.calls] == expected


@pytest.mark.parametrize("names", [(), ("x",), ("x", "num_rows")])
def test_values_are_looked_up_by_name(names: tuple[str, ...]) -> None:
    assert tuple(values_of(names)({"num_rows": 3, "x": 4})) == (4, 3)[: len(names)]


@pytest.mark.parametrize(("failing", "kept"), [(0, 1), (1, 2), (2, 3), (3, 4), (5, 6)])
def test_nothing_follows_a_call_that_failed(recorder: RecordingDriver, failing: int, kept: int) -> None:
    """Events, waits, kernels: whichever fails is the last thing that was asked for, and is named."""
    batch = Batch([copying(), copying()], 0)
    recorder.statuses = {failing: 700}
    with pytest.raises(
        RuntimeError, match=r"CUDA error 700 in copy_for_peers\+copy_for_peers: what went wrong"
    ):
        batch.run(Moment(7, 5, 3, 0, 6, 3), rows())
    assert len(recorder.calls) == kept
    recorder.calls.clear()
    batch.run(Moment(7, 5, 3, 0, 6, 3), rows())
    assert len(recorder.calls) == 6


def test_whatever_thread_runs_a_batch_it_runs_on_its_gpu(recorder: RecordingDriver) -> None:
    """Its context is current while the driver is called (the recorder checks that), and not afterwards."""
    batch = Batch([copying()], 0)
    batch.run(Moment(7, 5, 3, 0, 6, 3), rows())
    assert len(recorder.calls) == 5
    recorder.statuses = {5: 700}
    with pytest.raises(RuntimeError, match="700"):
        batch.run(Moment(7, 5, 3), rows())
    assert recorder.context == 0


def test_numbers_that_do_not_fit_are_refused(recorder: RecordingDriver) -> None:
    batch = Batch([copying()], 0)
    for number in (2**31, -(2**31) - 1):
        with pytest.raises(OverflowError, match=r"copy_for_peers: one of .*num_rows.* more than 32 bits"):
            batch.run(Moment(7), {**rows(), "num_rows": number})
    assert recorder.calls == []
    for number in (2**31 - 1, -(2**31)):
        batch.run(Moment(7), {**rows(), "num_rows": number})
    assert [arguments_of(call)[4] for call in recorder.calls] == [2**31 - 1, -(2**31)]


def test_only_the_oldest_batch_is_forgotten(
    recorder: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyep.backends.cuda.batch.MAX_BATCHES", 3)
    batches = Batches(0, "a test")
    for number in (1, 2, 3, 4, 2):
        batches.run(((copying, *copying().arguments[:1], number),), Moment(7), rows())
    assert [recipes[0][2] for recipes in batches._known] == [2, 3, 4]


def test_a_number_that_a_kernel_is_compiled_for_is_no_input(recorder: RecordingDriver) -> None:
    launch = copying()
    changed = launch._replace(arguments=(*launch.arguments[:5], Input("row_words")))
    with pytest.raises(TypeError, match="row_words differs from call to call"):
        Batch([changed], 0)


def test_leaves_of_arguments() -> None:
    """Groups keep their type; numbers that vary have a fixed width; inputs are aligned by default."""
    words, counts = torch.zeros(4, dtype=torch.int64), Input("counts", torch.int32)
    is_aligned = words.data_ptr() % 16 == 0
    arguments = (
        groups.Tables(*[words] * 7),
        groups.Prefixes(counts, counts, counts, Input("digests", torch.int64)),
        groups.Counts(counts, counts, words, counts),
        groups.HostWords(Input("message"), 1, 16, Input("ticket")),
        16,
        1,
    )
    leaves: list[Any] = leaves_of(Launch(notify.exchange_notify, 1, {}, (1,), arguments), {"digests": False})
    assert leaves[0] == groups.Tables(*[Leaf("*i64", is_aligned)] * 7)
    assert leaves[1] == groups.Prefixes(*[Leaf("*i32", True)] * 3, Leaf("*i64", False))
    assert leaves[3] == groups.HostWords(*[Leaf("i64", False)] * 4)
    assert leaves[4:] == [Leaf("i32", False)] * 2
    assert type(leaves[0]) is groups.Tables
