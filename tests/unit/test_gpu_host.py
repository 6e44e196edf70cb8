"""What the host does for GPUs, piece by piece; without a GPU."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyep import Config
from anyep.backends.cuda import pinned
from anyep.backends.cuda.constants import WINDOW_BLOCK_BITS
from anyep.backends.cuda.gpu import Use
from anyep.backends.cuda.windows import GpuWindows
from anyep.control.liveness import Watch
from anyep.core import outcomes
from anyep.core.rings import MAX_KNOWN_AREAS, NodeRings
from anyep.layout import nvl_rings
from anyep.sizes import TokenLayout
from tests.support.simulated_gpu import SimulatedBlock, SimulatedGpu

# Outcomes


@given(st.integers(1, 8), st.integers(0, 1 << 20))
def test_an_outcome_is_a_code_and_a_rank(code: int, rank: int) -> None:
    outcome = outcomes.outcome_of(code, rank)
    assert (outcomes.code_of(outcome), outcomes.rank_of(outcome)) == (code, rank)
    assert outcome != outcomes.GOOD


def test_codes_are_different_and_fit() -> None:
    codes = [getattr(outcomes, name) for name in dir(outcomes) if name.isupper() and name != "NUM_CODES"]
    assert sorted(codes) == list(range(len(codes)))
    assert len(codes) <= outcomes.NUM_CODES


# Headers in memory of the host


class Event:
    """A moment of a stream that is waited for, or not."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


class Calls:
    """Headers, and the events that were asked for."""

    def __init__(self) -> None:
        self.memory: list[Any] = []
        self.events: list[Event] = []
        self.headers = pinned.Headers(2, self._new_words, self._now)

    def _new_words(self, count: int) -> Any:
        self.memory.append(np.zeros(count, np.int64))
        return self.memory[-1]

    def _now(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def at(self, address: int) -> list[int]:
        """The header at an address."""
        for words in self.memory:
            place = (address - words.ctypes.data) // 8
            if 0 <= place < len(words):
                return [int(word) for word in words[place : place + 2]]
        raise AssertionError("it lies nowhere")

    def keep(self, number: int, for_good: bool = False) -> int:
        return self.headers.keep(np.array([number, -number]), for_good)


NUM_PLACES = pinned.NUM_PAGES * pinned.HEADERS_PER_PAGE


def test_every_header_has_a_place_of_its_own() -> None:
    calls = Calls()
    addresses = [calls.keep(number) for number in range(NUM_PLACES)]
    assert len(set(addresses)) == NUM_PLACES
    assert [calls.at(address) for address in addresses] == [[n, -n] for n in range(NUM_PLACES)]
    # Nothing is used again yet: waited for is at most what came before all calls.
    assert not any(event.num_waits for event in calls.events[1:])


def test_a_header_may_be_written_as_bytes() -> None:
    """Places for bytes and for words are the same ones, in turns."""
    calls = Calls()
    for number in range(2 * NUM_PLACES):
        if number % 3:
            address = calls.keep(number)
        else:
            at = calls.headers.next_place()
            calls.headers.memory[at : at + 16] = np.array([number, -number]).tobytes()
            address = calls.headers.address + at
        assert calls.at(address) == [number, -number]
        assert (address - calls.headers.address) // 16 == number % NUM_PLACES


def test_a_page_is_used_again_when_its_calls_are_over() -> None:
    calls = Calls()
    first = [calls.keep(number) for number in range(NUM_PLACES)]
    for used_again in range(3):
        for page in range(pinned.NUM_PAGES):
            events = len(calls.events)
            assert calls.keep(7) == first[page * pinned.HEADERS_PER_PAGE]
            # One event for the page that is full now. Waited for was the one that came after this page.
            assert len(calls.events) == events + 1
            after_the_page = calls.events[events - pinned.NUM_PAGES + 1]
            assert after_the_page.num_waits == 1, (used_again, page)
            for place in range(1, pinned.HEADERS_PER_PAGE):
                calls.keep(place)
            assert len(calls.events) == events + 1
    waited_for = [event.num_waits for event in calls.events]
    # The first event came before all calls. Those of the last pages are still to come.
    assert set(waited_for[1 : -pinned.NUM_PAGES + 1]) == {1}
    assert not any(waited_for[-pinned.NUM_PAGES + 1 :])


def test_headers_of_graphs_stay_for_good() -> None:
    calls = Calls()
    count = 6 * NUM_PLACES + 1
    of_graphs = [calls.keep(number, for_good=True) for number in range(count)]
    for number in range(2 * NUM_PLACES):
        calls.keep(-number)
    assert [calls.at(address) for address in of_graphs] == [[n, -n] for n in range(count)]


def test_words_that_kernels_read() -> None:
    words = pinned.pinned_words(5)
    words[3] = 1 << 40
    assert words.dtype == np.int64
    assert words.tolist() == [0, 0, 0, 1 << 40, 0]


# Peers whose processes end


@pytest.fixture
def sleepers() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Processes that do nothing until they are killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "anyep-watch"]


def test_a_death_is_told_once_and_at_once(sleepers: Callable[[], subprocess.Popen[bytes]]) -> None:
    processes = {rank: sleepers() for rank in (0, 2, 5)}
    before, deaths = open_descriptors(), []
    watch = Watch({rank: process.pid for rank, process in processes.items()}, deaths.append)
    time.sleep(0.1)
    assert deaths == []
    for rank, so_far in ((2, [2]), (0, [2, 0])):
        # Not waited for by its parent: its number is still taken.
        processes[rank].kill()
        assert wait_until(lambda so_far=so_far: deaths == so_far), deaths  # type: ignore[misc]
    processes[2].wait()
    time.sleep(0.1)
    assert deaths == [2, 0]
    watch.close()
    watch.close()
    assert not watchers()
    assert open_descriptors() == before
    processes[5].kill()
    time.sleep(0.1)
    assert deaths == [2, 0], "nobody asks any more"


def test_a_process_that_has_come_and_gone(sleepers: Callable[[], subprocess.Popen[bytes]]) -> None:
    gone, alive = sleepers(), sleepers()
    gone.kill()
    gone.wait()
    deaths: list[int] = []
    watch = Watch({1: gone.pid, 2: alive.pid}, deaths.append)
    assert wait_until(lambda: deaths == [1])
    alive.kill()
    assert wait_until(lambda: deaths == [1, 2])
    watch.close()


def test_closed_by_whoever_hears_of_a_death(sleepers: Callable[[], subprocess.Popen[bytes]]) -> None:
    """The garbage collector may drop a Buffer in any thread, this one included."""
    processes = {rank: sleepers() for rank in range(3)}
    deaths: list[int] = []

    def close(rank: int) -> None:
        deaths.append(rank)
        watch.close()

    watch = Watch({rank: process.pid for rank, process in processes.items()}, close)
    processes[1].kill()
    assert wait_until(lambda: not watchers())
    assert deaths == [1]


# Windows


class Capturing:
    """A stream whose calls are recorded into a graph, if that has a number."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.num_begins = 0

    def is_capturing(self) -> bool:
        return self.number is not None

    def graph(self) -> int:
        assert self.number is not None
        return self.number

    def begin(self, previous: None) -> None:
        self.num_begins += 1


class Gpu(SimulatedGpu):
    """It notes which moments calls wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = Capturing()  # type: ignore[assignment]
        self.moments: list[int] = []
        self.waited_for: list[int] = []
        self.forgotten: list[int] = []
        self.current = 5
        """The stream on which tensors are used now."""

    def end_of_use(self) -> Any:
        if self.stream.is_capturing():
            return None
        self.moments.append(len(self.moments))
        return Use(self.moments[-1], 0, self.current)

    def wait_for_use(self, use: Use) -> None:
        self.waited_for.append(use.event)

    def forget_use(self, use: Use) -> None:
        self.forgotten.append(use.event)


class Windows:
    """Blocks of these sizes on a GPU of our own."""

    def __init__(self, *sizes: int) -> None:
        self.gpu = Gpu()
        self.windows = GpuWindows(self.gpu)
        self.firsts = [self.windows.add(SimulatedBlock(size)) for size in sizes]

    def lend(self, num_bytes: int) -> tuple[int, torch.Tensor]:
        window = self.windows.allocate(num_bytes)
        assert window is not None
        return window, self.windows.lend(window, num_bytes, [(0, (num_bytes,), torch.uint8)])[0]


SECOND = 1 << WINDOW_BLOCK_BITS


def test_blocks_are_told_apart_by_the_upper_bits_of_an_offset() -> None:
    made = Windows(4096, 8192)
    windows = made.windows
    assert made.firsts == [0, SECOND]
    assert (windows.num_blocks, windows.num_bytes) == (2, 12288)
    for offset in (256, SECOND + 512):
        tensor = windows.tensor(offset, (2, 3), torch.int32)
        tensor.fill_(offset % 100)
        assert windows.offset_of(tensor) == offset
        assert windows.offset_of(tensor[1:]) == offset + 12
    assert windows.tensor(256, (1,), torch.int32).item() == 56
    assert windows.tensor(SECOND + 512, (1,), torch.int32).item() == SECOND % 100 + 12
    assert windows.offset_of(torch.zeros(3)) is None
    assert windows.offset_of(windows.tensor(0, (0, 4), torch.int32)) is None


def test_the_newest_block_is_offered_and_taken_first() -> None:
    made = Windows(4096, 8192)
    windows = made.windows
    assert windows.offers(8) == [(SECOND, 8192), (0, 4096)]
    assert windows.offers(1) == [(SECOND, 8192)]
    assert windows.allocate(7800) == SECOND
    assert windows.offers(8) == [(SECOND + 7936, 256), (0, 4096)]
    assert windows.allocate(4096) == 0
    assert windows.allocate(257) is None
    windows.free(SECOND)
    windows.allocate_at(SECOND, 1024)
    assert windows.used_bytes == 4096 + 1024
    # Who offers a window takes what was chosen of it.
    assert windows.offers(8) == [(SECOND + 1024, 7168)]


def test_a_window_comes_back_when_the_last_view_is_gone() -> None:
    made = Windows(4096)
    windows, gpu = made.windows, made.gpu
    window, tensor = made.lend(1000)
    view = tensor[128:256].view(torch.int32)
    tensor.fill_(3)
    del tensor
    assert windows.used_bytes == 1024
    assert (view == 0x03030303).all()
    del view
    # The next call waits for what was current when it died.
    assert (gpu.moments, gpu.waited_for) == ([0], [])
    assert windows.offers(8) == [(window, 4096)]
    assert gpu.waited_for == [0]
    assert windows.used_bytes == 0


def test_tensors_in_a_window_share_nothing_but_its_time() -> None:
    made = Windows(4096)
    windows = made.windows
    window = windows.allocate(1024)
    assert window is not None
    parts = [(0, (2, 8), torch.bfloat16), (128, (3,), torch.int64), (256, (5,), torch.uint8)]
    lent = windows.lend(window, 1024, parts)
    for index, (tensor, (offset, shape, dtype)) in enumerate(zip(lent, parts, strict=True)):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert windows.offset_of(tensor) == window + offset
        tensor.fill_(index)
    assert [tensor.unique().tolist() for tensor in lent] == [[0], [1], [2]]
    assert len({tensor.untyped_storage()._cdata for tensor in lent}) == 3
    del tensor
    for num_left in (2, 1, 0):
        lent.pop(num_left // 2)
        assert windows.used_bytes == (1024 if num_left else 0)
    # Each may have been in use on another stream.
    assert made.gpu.waited_for == made.gpu.moments == [0, 1, 2]


def test_windows_may_die_in_any_order_and_thread() -> None:
    made = Windows(8192, 8192)
    windows = made.windows
    lent = [made.lend(1024)[1] for _ in range(16)]
    assert windows.allocate(128) is None
    for index in (3, 15, 0, 7):
        lent[index] = torch.empty(0)
    rest = [lent]
    del lent
    thread = threading.Thread(target=rest.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert windows.used_bytes == 0
    assert windows.offers(8) == [(SECOND, 8192), (0, 8192)]
    assert sorted(made.gpu.waited_for) == list(range(16))


def test_a_call_need_not_wait_for_the_stream_that_it_follows() -> None:
    made = Windows(8192)
    lent = [made.lend(1024)[1] for _ in range(2)]
    lent[0] = torch.empty(0)
    made.gpu.current = 6
    lent[1] = torch.empty(0)
    made.windows.followed = 5
    assert made.windows.used_bytes == 0
    assert (made.gpu.waited_for, made.gpu.forgotten) == ([1], [0, 1])


def test_memory_for_outputs_is_no_call() -> None:
    """Windows that come back meanwhile are free after their use: the next call may not follow that stream."""
    from anyep.backends.cuda.ops_normal import GpuNormalOps

    made = Windows(8192)
    gpu = made.gpu
    gpu.stream.caller = lambda: gpu.current  # type: ignore[attr-defined]
    gpu.stream.end = lambda run_async: None  # type: ignore[attr-defined]
    _, rows = made.lend(4096)
    del rows
    ops: Any = SimpleNamespace(windows=made.windows, gpu=gpu)
    outputs = GpuNormalOps.outputs(ops, (16,), torch.uint8)
    assert made.windows.offset_of(outputs) == 0
    assert gpu.waited_for == [0]


def test_what_only_calls_have_used_is_free_at_once() -> None:
    made = Windows(4096)
    window = made.windows.allocate(512)
    assert window is not None
    made.windows.give_back(window, 512)
    assert made.windows.used_bytes == 0
    assert made.gpu.waited_for == []


def test_windows_of_a_graph_stay_with_it() -> None:
    made = Windows(4096)
    windows, gpu = made.windows, made.gpu
    gpu.stream.number = 7  # type: ignore[attr-defined]
    window, tensor = made.lend(1024)
    staged = windows.allocate(512)
    assert staged == window + 1024
    del tensor
    windows.give_back(staged, 512)
    # Later calls in the same graph may have them again, after whoever reads them.
    begins = gpu.stream.num_begins  # type: ignore[attr-defined]
    assert windows.allocate(600) == window
    assert windows.allocate(512) == staged
    assert gpu.stream.num_begins == begins + 2  # type: ignore[attr-defined]
    windows.give_back(window, 1024)
    windows.give_back(staged, 512)
    for number in (8, 0):
        # Another graph, or one that nobody knows.
        gpu.stream.number = number  # type: ignore[attr-defined]
        another = windows.allocate(512)
        assert another not in (window, staged)
    # Calls outside may not have them either, as the graph may be replayed at any time.
    gpu.stream.number = None  # type: ignore[attr-defined]
    assert windows.used_bytes == 1024 + 3 * 512
    offers = windows.offers(8)
    assert sum(size for _, size in offers) == 4096 - 1024 - 3 * 512


def test_what_dies_while_a_graph_is_captured_is_not_given_away() -> None:
    """A kernel of the graph may read it."""
    made = Windows(4096)
    windows, gpu = made.windows, made.gpu
    _, before = made.lend(512)
    _, earlier = made.lend(512)
    del earlier
    gpu.stream.number = 7  # type: ignore[attr-defined]
    del before
    # What died before waits until the capture is over: its event is not one of the graph.
    assert windows.allocate(2048) == 1024
    assert gpu.waited_for == []
    gpu.stream.number = None  # type: ignore[attr-defined]
    assert windows.used_bytes == 512 + 2048
    assert gpu.waited_for == [0]


def test_only_what_is_free_is_poisoned() -> None:
    made = Windows(1024, 1024)
    _, tensor = made.lend(256)
    tensor.fill_(1)
    made.windows.fill_free(0xA5)
    assert (tensor == 1).all()
    assert (made.windows.tensor(SECOND + 256, (768,), torch.uint8) == 0xA5).all()
    assert (made.windows.tensor(0, (1024,), torch.uint8) == 0xA5).all()


# Ring areas


def test_rings_shrink_to_what_fits() -> None:
    config, token = Config(8, 4, 64), TokenLayout(512, 0, 2)
    wanted = nvl_rings(4096, 4, 3, 1, 64, token.token_bytes)
    per_ring = wanted.num_bytes // 12
    assert NodeRings(4096, wanted.num_bytes, 3).area_for(config, token) == wanted
    assert NodeRings(4096, 10 * wanted.num_bytes, 3).area_for(config, token) == wanted
    small = NodeRings(4096, 12 * (per_ring - token.token_bytes), 3).area_for(config, token)
    assert small == nvl_rings(4096, 4, 3, 1, 63, token.token_bytes)
    assert NodeRings(0, 0, 3).area_for(config, token).num_rows == 0


def test_areas_are_known_by_their_config_and_layout() -> None:
    areas, token = NodeRings(0, 1 << 20, 2), TokenLayout(64)
    configs = [Config(2, 1, rows) for rows in range(2, 2 * MAX_KNOWN_AREAS)]
    first = areas.area_for(configs[0], token)
    assert areas.area_for(configs[0], token) is first
    assert areas.area_for(configs[0], TokenLayout(128)) != first
    for config in configs:
        # However many there were: an area is never that of another one.
        assert areas.area_for(config, token).num_rows == config.num_max_nvl_chunked_recv_tokens
    assert areas.area_for(configs[0], token) == first
