"""Chains: when a batch is launched as a graph, and what the driver is asked for then; without a GPU."""

from __future__ import annotations

import gc
import random
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")

import torch

from anyep.backends.cuda import batch as batches
from anyep.backends.cuda import chain
from anyep.backends.cuda.batch import Batch, Input, Launch
from anyep.backends.cuda.kernels import sums
from anyep.backends.cuda.moment import Moment
from tests.support.recording_driver import (
    IMPLICIT,
    GraphLaunched,
    Launched,
    NodeSet,
    Recorded,
    RecordingDriver,
    Waits,
    recording_driver,
)

# What the recorder asserts, it asserts in functions that compiled code calls.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

CONSTANTS = {"NUM_RANKS": 2, "TILE_WORDS": 1024}
ROWS = torch.zeros(64, dtype=torch.int32)
STREAM, OTHER_STREAM = 7, 8


@pytest.fixture
def recorder() -> Iterator[RecordingDriver]:
    with recording_driver() as found:
        yield found


def copying(num_rows: Any, x: Any = ROWS, programs: Any = 24) -> Launch:
    """A kernel whose fifth argument is the number of rows."""
    return Launch(sums.copy_for_peers, 4, CONSTANTS, (programs,), (x, ROWS, ROWS, 1, num_rows, 64))


def two_kernels() -> Batch:
    """Only the first one has an input."""
    return Batch([copying(Input("num_rows")), copying(5)], 0)


def run(batch: Batch, recorder: RecordingDriver, num_rows: int, stream: int = STREAM) -> list[Any]:
    """What the driver is asked for by a run with these rows."""
    recorder.calls.clear()
    batch.run(Moment(stream), {"num_rows": num_rows})
    return list(recorder.calls)


def with_chain(recorder: RecordingDriver) -> Batch:
    """A batch of two kernels that has run twice, with 3 and then 39 rows."""
    batch = two_kernels()
    run(batch, recorder, 3)
    run(batch, recorder, 39)
    recorder.calls.clear()
    return batch


def rows_of(launched: Launched) -> int:
    return int(struct.unpack_from("@qqqiii", launched.packed)[4])


def rows_launched(calls: list[Any]) -> list[int]:
    """The numbers of rows of each kernel that one graph launches."""
    (graph,) = [call for call in calls if isinstance(call, GraphLaunched)]
    return [rows_of(kernel) for kernel in graph.kernels]


def is_graph(calls: list[Any]) -> bool:
    """Whether a run was the launch of a graph; otherwise the kernels were launched one by one."""
    kinds = {type(call) for call in calls} - {NodeSet}
    assert len(kinds) == 1
    return kinds == {GraphLaunched}


def test_the_example_of_run_batch(recorder: RecordingDriver) -> None:
    batch = with_chain(recorder)
    for instance in (0, 1):
        batch.run(Moment(7, 5, 3, 0, 6, 3), {"num_rows": 40})
        before_1, before_2, node, graph, after_1, after_2 = recorder.calls
        assert [before_1, before_2] == [Recorded(5, 3), Waits(7, 5)]
        assert node == NodeSet(instance, 0)
        assert isinstance(graph, GraphLaunched)
        assert graph[:2] == (instance, 7)
        assert rows_launched(recorder.calls) == [40, 5]
        assert [after_1, after_2] == [Recorded(6, 7), Waits(3, 6)]
        recorder.calls.clear()


def test_a_batch_is_a_graph_from_its_third_run_on(recorder: RecordingDriver) -> None:
    batch = two_kernels()
    run(batch, recorder, 3)
    assert recorder.graphs == {}
    run(batch, recorder, 4)
    assert recorder.uploads == [(instance, STREAM) for instance in range(4)]
    calls = run(batch, recorder, 4)
    # What the second run had is in the graph.
    assert [type(call) for call in calls] == [GraphLaunched]
    assert calls[0].kernels == tuple(
        Launched("copy_for_peers", (24, 1, 1), 128, kernel.shared_bytes, STREAM, kernel.packed)
        for kernel in calls[0].kernels
    )
    assert len(recorder.graphs) == 1
    assert rows_launched(calls) == [4, 5]


def test_one_kernel_is_no_graph(recorder: RecordingDriver) -> None:
    batch = Batch([copying(Input("num_rows"))], 0)
    assert not any(is_graph(run(batch, recorder, 3)) for _ in range(4))
    assert recorder.graphs == {}


def test_batches_can_be_made_without_graphs(
    recorder: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "launches_as_graph", False)
    batch = two_kernels()
    monkeypatch.setattr(batches, "launches_as_graph", True)
    assert not any(is_graph(run(batch, recorder, 3)) for _ in range(4))


def test_an_instance_is_given_what_has_changed_since_its_last_launch(recorder: RecordingDriver) -> None:
    batch = with_chain(recorder)
    found = []
    for num_rows in (39, 1, 1, 39, 39, 39, 39, 39, 1):
        sets = [call for call in run(batch, recorder, num_rows) if isinstance(call, NodeSet)]
        assert rows_launched(recorder.calls) == [num_rows, 5]
        found.append(sets)
    # By instance: 39 39 1, 1 39, 1 39, 39 39; a value that came back counts as a change.
    zero, one, two, three = ([NodeSet(instance, 0)] for instance in range(4))
    assert found == [[], one, two, three, zero, one, two, [], zero]


@pytest.mark.parametrize("seed", range(8))
def test_a_graph_launches_what_single_launches_would(recorder: RecordingDriver, seed: int) -> None:
    """Random inputs for three kernels: numbers, addresses, grids, empty grids, captures, refused inputs."""
    chance = random.Random(seed)
    first, second = Input("x", torch.int32), Input("y", torch.int32)
    batch = Batch(
        [
            copying(Input("num_rows"), first, Input("programs")),
            copying(7, second),
            copying(Input("num_rows"), second, Input("more_programs")),
        ],
        0,
    )
    tensors = [torch.zeros(64, dtype=torch.int32) for _ in range(3)]
    num_graphs = 0
    for _ in range(60):
        values: dict[str, Any] = {
            "x": chance.choice(tensors),
            "y": chance.choice(tensors),
            "num_rows": chance.choice([1, 2, -3]),
            "programs": chance.choice([0, 1, 2, 3]),
            "more_programs": chance.choice([1, 2]),
        }
        recorder.calls.clear()
        recorder.capturing = {STREAM: chance.choice([0, 0, 0, 1])}
        if chance.random() < 0.3:
            # Some inputs are stored before the others are found to be wrong.
            if chance.random() < 0.5:
                assert not batch.run(Moment(STREAM), {**values, "y": tensors[0][1:]})
            else:
                with pytest.raises(OverflowError):
                    batch.run(Moment(STREAM), {**values, "num_rows": 2**31})
            assert recorder.calls == []
            continue
        batch.run(Moment(STREAM), values)
        grids = [(programs, 1, 1) for programs in (values["programs"], 24, values["more_programs"])]
        addresses = [values[name].data_ptr() for name in "xyy"]
        rows = (values["num_rows"], 7, values["num_rows"])
        expected = [each for each in zip(grids, addresses, rows, strict=True) if each[0][0]]
        found = [
            (each.grid, struct.unpack_from("@q", each.packed)[0], rows_of(each)) for each in recorder.launched
        ]
        assert found == expected
        num_graphs += any(isinstance(call, GraphLaunched) for call in recorder.calls)
    assert 10 < num_graphs < 50


def test_an_empty_grid_is_no_part_of_a_graph(recorder: RecordingDriver) -> None:
    batch = Batch([copying(4, programs=Input("num_rows")), copying(5)], 0)
    for _ in range(3):
        assert run(batch, recorder, 0) == recorder.launched
    assert recorder.graphs == {}
    for num_programs in (1, 2):
        assert not is_graph(run(batch, recorder, num_programs))
    assert [call.grid for call in run(batch, recorder, 6)[-1].kernels] == [(6, 1, 1), (24, 1, 1)]
    assert len(run(batch, recorder, 0)) == 1
    assert is_graph(run(batch, recorder, 3))
    assert [call.grid for call in recorder.launched] == [(3, 1, 1), (24, 1, 1)]


@pytest.mark.parametrize("status", [1, 2, IMPLICIT])
def test_single_kernels_are_captured(recorder: RecordingDriver, status: int) -> None:
    """Active and invalidated captures, and the answer about the default stream."""
    batch = two_kernels()
    recorder.capturing = {STREAM: status}
    for _ in range(3):
        assert not is_graph(run(batch, recorder, 3))
    assert recorder.graphs == {}
    assert [is_graph(run(batch, recorder, 3, OTHER_STREAM)) for _ in range(3)] == [False, False, True]
    assert not is_graph(run(batch, recorder, 44))
    assert [rows_of(kernel) for kernel in recorder.launched] == [44, 5]
    recorder.capturing = {}
    assert is_graph(run(batch, recorder, 44))
    assert rows_launched(recorder.calls) == [44, 5]


def test_a_stream_is_captured_when_it_waits_for_a_captured_one(recorder: RecordingDriver) -> None:
    """It is asked about after the waits."""
    batch = with_chain(recorder)
    asked: list[list[Any]] = []
    was_capturing = recorder.capturing

    class Streams(dict[int, int]):
        def get(self, *_: Any) -> int:
            asked.append(list(recorder.calls))
            return 1

    recorder.capturing = Streams()
    batch.run(Moment(7, 5, 3, 9), {"num_rows": 3})
    assert asked == [[Recorded(5, 3), Waits(7, 5), Waits(7, 9)]]
    assert [type(call) for call in recorder.calls[3:]] == [Launched, Launched]
    recorder.capturing = was_capturing


@pytest.mark.parametrize("missing", [*chain.LAUNCHING, *chain.MAKING, chain.UPLOAD])
def test_older_drivers(recorder: RecordingDriver, missing: str) -> None:
    """Kernels are launched one by one if the driver lacks a function; only the upload can be done without."""
    delattr(recorder, missing)
    batch = two_kernels()
    launched = [is_graph(run(batch, recorder, 3)) for _ in range(4)]
    assert launched == [False, False, *[missing == chain.UPLOAD] * 2]


@pytest.mark.parametrize(
    "refusing",
    ["cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags", "cuGraphUpload"],
)
def test_graphs_that_cannot_be_made(recorder: RecordingDriver, refusing: str) -> None:
    recorder.refusals = {refusing: 2}
    batch = two_kernels()
    for num_rows in (1, 2, 3, 4):
        assert not is_graph(run(batch, recorder, num_rows))
        assert [rows_of(kernel) for kernel in recorder.launched] == [num_rows, 5]
    gc.collect()
    assert recorder.instances == {}
    assert refusing == "cuGraphCreate" or recorder.graphs == {}
    assert len(recorder.uploads) <= 1, "it is tried once"


@pytest.mark.parametrize(("failing", "kept"), [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)])
def test_nothing_follows_a_call_that_failed(recorder: RecordingDriver, failing: int, kept: int) -> None:
    """Whatever fails, the next runs have the right arguments."""
    batch = with_chain(recorder)
    recorder.statuses = {failing: 700}
    with pytest.raises(
        RuntimeError, match=r"CUDA error 700 in copy_for_peers\+copy_for_peers: what went wrong"
    ):
        batch.run(Moment(7, 5, 3, 0, 6, 3), {"num_rows": 40})
    assert len(recorder.calls) == kept
    assert recorder.context == 0
    for num_rows in (40, 40, 40, 40, 40, 41, 41):
        assert is_graph(run(batch, recorder, num_rows))
        assert rows_launched(recorder.calls) == [num_rows, 5]


def test_a_second_run_that_fails_is_not_counted(recorder: RecordingDriver) -> None:
    batch = two_kernels()
    run(batch, recorder, 3)
    recorder.calls.clear()
    recorder.statuses = {1: 700}
    with pytest.raises(RuntimeError, match="700"):
        batch.run(Moment(STREAM), {"num_rows": 3})
    assert [is_graph(run(batch, recorder, 3)) for _ in range(2)] == [False, True]


def test_graphs_end_with_their_batch(recorder: RecordingDriver) -> None:
    batch, other = with_chain(recorder), with_chain(recorder)
    assert (len(recorder.graphs), len(recorder.instances)) == (2, 8)
    del batch
    gc.collect()
    assert (len(recorder.graphs), len(recorder.instances)) == (1, 4)
    assert is_graph(run(other, recorder, 3))
    assert recorder.context == 0


def test_a_child_process_leaves_the_graphs_alone(
    recorder: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = with_chain(recorder)
    monkeypatch.setattr("os.getpid", lambda: -1)
    del batch
    gc.collect()
    assert len(recorder.instances) == 4


def test_threads_that_run_one_batch(recorder: RecordingDriver) -> None:
    """Each run launches its own numbers of rows, and the driver is called by one thread at a time."""
    batch = Batch([copying(Input("num_rows")), copying(Input("num_rows"))], 0)

    def run_often(first: int) -> None:
        for number in range(200):
            batch.run(Moment(first), {"num_rows": 1000 * first + number})

    threads = [threading.Thread(target=run_often, args=(first,)) for first in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.graphs) == 1
    for first in (1, 2, 3):
        expected = [1000 * first + number for number in range(200) for _ in range(2)]
        assert [rows_of(kernel) for kernel in recorder.launched if kernel.stream == first] == expected
