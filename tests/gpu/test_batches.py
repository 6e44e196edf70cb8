"""Batches on a real GPU: a batch that is launched as a graph does what its kernels do one by one."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install 'anyep[cuda]'")

import triton
import triton.language as tl

from anyep.backends.cuda import batch as batches
from anyep.backends.cuda import chain
from anyep.backends.cuda.batch import Batch, Input, Launch
from anyep.backends.cuda.moment import Moment
from tests.support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
SIZE, MAX_PROGRAMS = 64, 4
LONG_CYCLES = 50_000_000
"""Longer than the host takes for many launches."""


@triton.jit(do_not_specialize=["number"])
def multiply_and_add(source, target, number, SIZE: tl.constexpr):  # noqa: N803
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target + index, tl.load(source + index) * 3 + number)


def launching(source: Any, target: Any, number: Any, programs: Any = MAX_PROGRAMS) -> Launch:
    return Launch(multiply_and_add, 1, {"SIZE": SIZE}, (programs,), (source, target, number))


def three_kernels(as_graph: bool) -> Batch:
    """The order of the kernels matters, and what earlier runs left behind."""
    source, middle, target = (Input(name, torch.int32) for name in ("source", "middle", "target"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "launches_as_graph", as_graph)
        return Batch(
            [
                launching(source, middle, Input("number"), Input("programs")),
                launching(middle, target, 7),
                launching(target, middle, Input("number")),
            ],
            torch.cuda.current_device(),
        )


def rows() -> torch.Tensor:
    return torch.zeros(SIZE * MAX_PROGRAMS, dtype=torch.int32, device="cuda")


def new_stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class Way:
    """Runs of a batch with tensors of its own, launched as a graph or not."""

    def __init__(self, as_graph: bool) -> None:
        self.batch = three_kernels(as_graph)
        self.stream = new_stream()
        self.sources = [torch.arange(SIZE * MAX_PROGRAMS, device="cuda").int() + shift for shift in (0, 50)]
        self.middles, self.target = [rows(), rows()], rows()
        self.found: list[torch.Tensor] = []
        torch.cuda.synchronize()

    def run(self, chance: random.Random, min_programs: int = 0) -> None:
        values = {
            "source": chance.choice(self.sources),
            "middle": chance.choice(self.middles),
            "target": self.target,
            "number": chance.choice([1, 2, -(2**31), 2**31 - 1]),
            "programs": chance.randint(min_programs, MAX_PROGRAMS),
        }
        assert self.batch.run(Moment(self.stream.cuda_stream), values)

    def keep(self) -> None:
        """Keep what the run has left, without waiting for it."""
        with torch.cuda.stream(self.stream):
            self.found += [self.target.clone(), *(middle.clone() for middle in self.middles)]

    @property
    def has_graph(self) -> bool:
        return self.batch._loaded._chain is not None


def results_of(as_graph: bool, work: Callable[[Way, random.Random], None], seed: int) -> list[list[int]]:
    way = Way(as_graph)
    work(way, random.Random(seed))
    torch.cuda.synchronize()
    assert way.has_graph == as_graph
    return [found.tolist() for found in way.found]


def check_both_ways(work: Callable[[Way, random.Random], None], seed: int = 0) -> None:
    single = results_of(False, work, seed)
    assert results_of(True, work, seed) == single
    assert len({tuple(found) for found in single}) > 1


@pytest.fixture(autouse=True)
def _driver_has_graphs() -> Iterator[None]:
    if not chain.is_possible():
        pytest.skip("the driver is older than CUDA 12.0")
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("seed", range(4))
def test_random_inputs(seed: int) -> None:
    def work(way: Way, chance: random.Random) -> None:
        for _ in range(60):
            way.run(chance)
            way.keep()

    check_both_ways(work, seed)


def test_many_runs_in_flight() -> None:
    """The GPU is busy while the host gives instances other arguments, many times each."""

    def work(way: Way, chance: random.Random) -> None:
        for _ in range(4):
            way.run(chance, 1)
        for _ in range(3):
            with torch.cuda.stream(way.stream):
                torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
            for _ in range(50):
                way.run(chance)
                way.keep()

    check_both_ways(work)


def test_the_host_waits_for_nothing() -> None:
    """Not when graphs are made, nor when their arguments are set while they are in flight, nor when they are
    freed: the GPU may be waiting for a peer that waits for this host."""
    way, chance = Way(True), random.Random(0)
    way.run(chance, 1)
    with torch.cuda.stream(way.stream):
        torch.cuda._sleep(20 * LONG_CYCLES)  # type: ignore[no-untyped-call]
    way.run(chance, 1)
    assert way.has_graph
    assert not way.stream.query(), "it was made"
    for _ in range(20):
        way.run(chance, 1)
    assert not way.stream.query(), "it was launched"
    del way.batch
    assert not way.stream.query(), "it was freed"


@pytest.mark.parametrize("runs_before", [0, 1, 3])
def test_captures(runs_before: int) -> None:
    """The first run, the second one, or one after graphs is captured; the captured one is replayed, and its
    arguments are those of the capture, whatever later runs are given."""

    def work(way: Way, chance: random.Random) -> None:
        for _ in range(runs_before):
            way.run(chance, 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=way.stream):
            way.run(chance)
            way.run(chance)
        for _ in range(6):
            way.run(chance, 1)
            way.keep()
            with torch.cuda.stream(way.stream):
                graph.replay()
            way.keep()
        # Before the graph is freed.
        way.stream.synchronize()

    check_both_ways(work)


def test_a_stream_that_joins_a_capture() -> None:
    """The batch's stream is captured since it waits for an event of a captured one."""

    def work(way: Way, chance: random.Random) -> None:
        for _ in range(3):
            way.run(chance, 1)
        caller, before, after = new_stream(), torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        for event in (before, after):
            event.record(caller)
        values = {"source": way.sources[0], "middle": way.middles[0], "target": way.target}
        moment = Moment(
            way.stream.cuda_stream,
            before.cuda_event,
            caller.cuda_stream,
            event_after=after.cuda_event,
            stream_after=caller.cuda_stream,
        )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=caller):
            assert way.batch.run(moment, {**values, "number": 5, "programs": 2})
        for _ in range(3):
            way.run(chance, 1)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            way.keep()

    check_both_ways(work)


def test_the_default_stream() -> None:
    def work(way: Way, chance: random.Random) -> None:
        way.stream = torch.cuda.default_stream()
        for _ in range(10):
            way.run(chance, 1)
            way.keep()

    check_both_ways(work)


def test_different_streams() -> None:
    """Launches of one instance on two streams, which nothing else orders, do not disturb each other."""
    batch, streams = three_kernels(True), [new_stream(), new_stream()]
    tensors = [{name: rows() for name in ("source", "middle", "target")} for _ in streams]
    torch.cuda.synchronize()
    for number in range(40):
        for stream, mine in zip(streams, tensors, strict=True):
            assert batch.run(Moment(stream.cuda_stream), {**mine, "number": number, "programs": MAX_PROGRAMS})
    torch.cuda.synchronize()
    for mine in tensors:
        assert mine["middle"].tolist() == [(39 * 3 + 7) * 3 + 39] * SIZE * MAX_PROGRAMS


def test_a_batch_that_is_freed_while_it_runs() -> None:
    way = Way(True)
    for number in range(3):
        with torch.cuda.stream(way.stream):
            torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
        way.run(random.Random(number), MAX_PROGRAMS)
    assert way.has_graph
    del way.batch
    gc.collect()
    last = random.Random(2)
    source, middle = last.choice(way.sources), last.choice(way.middles)
    number = last.choice([1, 2, -(2**31), 2**31 - 1])
    torch.cuda.synchronize()
    assert torch.equal(middle, ((source * 3 + number) * 3 + 7) * 3 + number)


def test_while_another_thread_captures() -> None:
    """Graphs are made, launched and freed while another thread captures, as torch captures by default."""
    ways = [Way(True) for _ in range(3)]
    for _ in range(3):
        ways[0].run(random.Random(0), MAX_PROGRAMS)
    ways[1].run(random.Random(0), MAX_PROGRAMS)
    numbers, errors = torch.zeros(8, device="cuda"), []
    gc.collect()

    def work() -> None:
        try:
            torch.cuda.set_device(0)
            for way in ways:
                for seed in range(6):
                    way.run(random.Random(seed), MAX_PROGRAMS)
            del ways[2].batch
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(new_stream()):
        graph.capture_begin(capture_error_mode="global")
        numbers += 1
        thread.start()
        thread.join()
        numbers *= 2
        graph.capture_end()
    assert errors == []
    assert all(way.has_graph for way in ways[:2])
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert numbers.tolist() == [14.0] * 8
    single = Way(False)
    for seed in range(6):
        single.run(random.Random(seed), MAX_PROGRAMS)
    torch.cuda.synchronize()
    assert all(torch.equal(way.target, single.target) for way in ways)
