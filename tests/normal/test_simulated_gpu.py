"""Normal mode on GPUs, without a GPU: windows, the end of a Buffer, wrong calls, what ranks see of others.

Kernels run in Triton's interpreter, in real processes. Results are compared in `tests/normal/test_oracle.py`,
faults are in `tests/faults/test_normal.py`.
"""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.errors import AnyEPError
from tests.support.cases import NVL_BYTES, Case, check_case, poison_windows
from tests.support.commands import wait_until
from tests.support.depth import IS_DEEP
from tests.support.gpu_pairs import soak
from tests.support.gpu_scenarios import (
    GOOD,
    SCENARIOS,
    attempt,
    closing_threads,
    good_arguments,
    good_dispatch,
    hold_results,
    new_buffer,
    warnings_heard,
)
from tests.support.places import Place
from tests.support.world import RankContext, World

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="triton is not installed: pip install 'anyep[cuda]'"
    ),
    pytest.mark.xdist_group("oracle of simulated-3"),
]


def world(num_ranks: int) -> World:
    return Place("simulated", num_ranks).world()


def run_pairs(context: RankContext, num_pairs: int) -> None:
    """As on a GPU, where it is thousands."""
    soak(context, num_pairs, 1 << 20, 3)


@pytest.mark.property
def test_pairs_of_all_kinds() -> None:
    world(2).run(run_pairs, 30 if IS_DEEP else 4)


# Windows


def grow(context: RankContext, first_bytes: int) -> list[int]:
    """The number of blocks of windows after each case; what an earlier one holds stays as it is."""
    from anyep import gpu_connection

    usual = gpu_connection.FIRST_WINDOW_BYTES, gpu_connection.BLOCK_BYTES
    gpu_connection.FIRST_WINDOW_BYTES, gpu_connection.BLOCK_BYTES = first_bytes, 4096  # type: ignore[misc]
    try:
        buffer = new_buffer(context)
        windows, num_blocks, held = buffer.runtime.windows, [], []
        # Rows of 512 bytes: 2 KiB per rank, then 16 KiB, then 64 KiB, on one rank alone at last.
        for tokens in ((2, 2), (16, 16), (16, 16), (60, 60), (3, 3), (200, 0)):
            case = Case(tokens, hidden=256, routing="own rank")
            rows = good_dispatch(buffer, len(held))[0]
            held.append((rows, rows.clone()))
            poison_windows(buffer)
            check_case(context, case, buffer)
            num_blocks.append(windows.num_blocks)
        for rows, as_received in held:
            assert torch.equal(rows, as_received)
            assert windows.offset_of(rows) is not None
        del rows, as_received
        held.clear()
        assert windows.used_bytes == 0
        buffer.destroy()
    finally:
        gpu_connection.FIRST_WINDOW_BYTES, gpu_connection.BLOCK_BYTES = usual  # type: ignore[misc]
    return num_blocks


@pytest.mark.parametrize("first_bytes", [pytest.param(0, marks=pytest.mark.slow), 8192])
def test_windows_grow(first_bytes: int) -> None:
    first, *others = world(2).run(grow, first_bytes)
    assert others == [first]
    assert first == sorted(first)
    assert first[0] == 1
    assert 2 <= first[-1] <= 5
    # A case that was there before needs no more.
    assert first[1] == first[2]
    assert first[3] == first[4]


def test_windows_are_held_by_results() -> None:
    world(3).run(hold_results)


# The end of a Buffer


def blocks_of(buffer: Buffer) -> list[weakref.ref[Any]]:
    """Its memory on the GPU: the heap, and the windows."""
    blocks = (buffer.runtime.device_control.heap, *buffer.runtime.windows._blocks)
    return [weakref.ref(block._own) for block in blocks]


def end_without_garbage_collection(context: RankContext) -> None:
    buffer, destroyed, dropped = (new_buffer(context) for _ in range(3))
    (heap, windows), blocks = blocks_of(buffer), blocks_of(destroyed) + blocks_of(dropped)
    rows, _, _, _, handle, _ = good_dispatch(buffer)
    right = rows.clone()
    dist.barrier(group=context.group)
    gc.disable()
    try:
        buffer.destroy()
        destroyed.destroy()
        del dropped
        for thread in closing_threads():
            thread.join(20)
        new_buffer(context).destroy()
        assert [block() for block in (heap, *blocks)] == [None] * 5
    finally:
        gc.enable()
    assert windows() is not None
    assert torch.equal(rows, right)
    del rows, handle
    gc.collect()
    # A graph may be captured just now.
    assert windows() is not None
    with new_buffer(context):
        assert windows() is None
        dist.barrier(group=context.group)


def test_memory_is_freed_with_the_buffer() -> None:
    """And not when garbage is collected."""
    world(2).run(end_without_garbage_collection)


def drop_while_a_call_is_under_way(context: RankContext) -> None:
    """Peers may write into the windows of a dropped Buffer until its last call is over."""
    buffer = new_buffer(context)
    good_dispatch(buffer)
    dist.barrier(group=context.group)
    over = threading.Event()
    gpu: Any = buffer.runtime.device_control.gpu
    gpu.now = lambda: SimpleNamespace(query=over.is_set)
    # The tables that only kernels of this mode read, and its windows.
    kept = [weakref.ref(part) for part in (buffer.runtime.normal.ops, buffer.runtime.windows)]
    del buffer, gpu
    gc.collect()
    assert all(part() is not None for part in kept)
    over.set()
    for thread in closing_threads():
        thread.join(20)
    with new_buffer(context):
        assert [part() for part in kept] == [None, None]
        dist.barrier(group=context.group)


def test_a_buffer_dropped_while_a_call_is_under_way() -> None:
    world(2).run(drop_while_a_call_is_under_way)


def fail_to_make_a_buffer(context: RankContext, step: str, ranks: list[int]) -> tuple[list[str], list[int]]:
    """Some ranks fail at one step. What is raised, and what is left: heaps, descriptors and threads."""
    from anyep.backends.cuda.device_control import DeviceControl
    from anyep.backends.cuda.gpu import Gpu
    from anyep.backends.cuda.ops_low_latency import GpuLowLatencyOps
    from anyep.backends.cuda.ops_normal import GpuNormalOps
    from anyep.gpu_connection import GpuConnection

    def fail(part: Any, *arguments: Any) -> None:
        heaps.extend(weakref.ref(each.heap._own) for each in (part, *arguments) if hasattr(each, "heap"))
        if context.rank in ranks:
            raise RuntimeError(f"no {step}")
        usual(part, *arguments)

    def new() -> Buffer:
        return Buffer(context.group, NVL_BYTES, 1 << 20, low_latency_mode=True, device="cuda")

    def count() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    owner, method = {
        "gpu": (Gpu, "__init__"),
        "device control": (DeviceControl, "__init__"),
        "windows": (GpuConnection, "_add_windows"),
        "bases": (DeviceControl, "set_window_bases"),
        "normal mode": (GpuNormalOps, "__init__"),
        "low latency": (GpuLowLatencyOps, "__init__"),
    }[step]
    heaps: list[weakref.ref[Any]] = []
    usual = getattr(owner, method)
    gc.collect()
    # It frees what others left.
    new().destroy()
    before = count()
    setattr(owner, method, fail)
    try:
        messages = [attempt(new) for _ in range(3)]
    finally:
        setattr(owner, method, usual)
    with new() as buffer:
        num_left = sum(heap() is not None for heap in heaps)
        check_case(context, GOOD, buffer)
        dist.barrier(group=context.group)
    return messages, [num_left, *(after - was for after, was in zip(count(), before, strict=True))]


def test_nothing_is_left_of_a_buffer_that_has_no_windows() -> None:
    for outcome in world(3).run(fail_to_make_a_buffer, "windows", [0, 1, 2]):
        assert outcome == (["RuntimeError: no windows"] * 3, [0, 0, 0])


@pytest.mark.parametrize(
    "step",
    [
        *("gpu", "low latency"),
        *(pytest.param(step, marks=pytest.mark.slow) for step in ("device control", "bases", "normal mode")),
    ],
)
def test_nothing_is_left_of_a_buffer_that_one_rank_cannot_make(step: str) -> None:
    reason = f"RuntimeError: no {step}"
    for rank, outcome in enumerate(world(3).run(fail_to_make_a_buffer, step, [1])):
        message = reason if rank == 1 else f"rank 1 could not make its Buffer: {reason}"
        assert outcome == ([f"NotSupported: {message}"] * 3, [0, 0, 0])


def end_while_a_graph_is_captured(context: RankContext) -> list[str]:
    """Destroy a Buffer, then drop it; what its peers see of it then, and when the next Buffer is there."""
    buffer, other = new_buffer(context), new_buffer(context)
    good_dispatch(buffer)
    dist.barrier(group=context.group)
    stream, blocks, seen = buffer.runtime.device_control.gpu.stream, blocks_of(buffer), []
    stream.is_capturing = lambda: context.rank == 0
    seen.append(attempt(buffer.destroy) if context.rank == 0 else "")
    if context.rank == 0:
        assert "is idle" in str(buffer.status()[0])
        del buffer
        gc.collect()
        assert all(block() is not None for block in blocks)
        stream.is_capturing = lambda: False
    dist.barrier(group=context.group)
    if context.rank:
        seen.append(str(buffer.status()[0]))
    dist.barrier(group=context.group)
    with new_buffer(context) as third:
        check_case(context, GOOD, third)
        if context.rank:
            seen.append(str(buffer.status()[0]))
        else:
            assert not [block for block in blocks if block() is not None]
        dist.barrier(group=context.group)
    other.destroy()
    return seen


def test_a_buffer_that_ends_while_a_graph_is_captured() -> None:
    (refused,), (_, while_captured, afterwards), _ = world(3).run(end_while_a_graph_is_captured)
    assert refused == (
        "InvalidCall: a Buffer cannot be destroyed while a CUDA graph is captured: do it before or afterwards"
    )
    assert "is idle" in while_captured
    assert "destroyed" in afterwards


def drop_in_another_thread(context: RankContext) -> str:
    """It cannot know whether this one captures a graph."""
    buffer = new_buffer(context)
    blocks = blocks_of(buffer)
    dist.barrier(group=context.group)
    if context.rank == 0:
        held = [buffer]
        del buffer
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
    dist.barrier(group=context.group)
    seen = str(buffer.status()[0]) if context.rank else ""
    dist.barrier(group=context.group)
    assert all(block() is not None for block in blocks)
    with new_buffer(context):
        assert context.rank or not [block for block in blocks if block() is not None]
        dist.barrier(group=context.group)
        seen += ", then " + str(buffer.status()[0]) if context.rank else ""
        dist.barrier(group=context.group)
    return seen


def test_a_buffer_dropped_in_another_thread() -> None:
    assert re.search("is idle.*, then .*destroyed", world(2).run(drop_in_another_thread)[1])


def drop_while_calls_are_under_way(context: RankContext) -> str:
    """What is closed in a thread is freed with the next Buffer."""
    from anyep.backends.cuda.gpu import Gpu

    buffer = new_buffer(context)
    good_dispatch(buffer)
    dist.barrier(group=context.group)
    blocks = blocks_of(buffer)
    over = threading.Event()
    event = SimpleNamespace(query=over.is_set)
    usual, Gpu.now = Gpu.now, lambda _: event  # type: ignore[method-assign,assignment,return-value]
    if context.rank == 0:
        del buffer
        gc.collect()
    Gpu.now = usual  # type: ignore[method-assign]
    dist.barrier(group=context.group)
    seen = str(buffer.status()[0]) if context.rank else ""
    dist.barrier(group=context.group)
    over.set()
    for thread in closing_threads():
        thread.join(20)
    assert all(block() is not None for block in blocks)
    dist.barrier(group=context.group)
    seen += ", then " + str(buffer.status()[0]) if context.rank else ""
    dist.barrier(group=context.group)
    with new_buffer(context) as other:
        check_case(context, GOOD, other)
        assert context.rank or not [block for block in blocks if block() is not None]
        dist.barrier(group=context.group)
    return seen


def test_a_buffer_dropped_while_calls_are_under_way() -> None:
    seen = world(3).run(drop_while_calls_are_under_way)[1]
    assert re.search("is idle.*, then .*destroyed", seen)


# What goes wrong


OFTEN = (
    "rows of 8 bytes",
    "another hidden size",
    "a wider dtype and no choices",
    "contradictory ranks",
    "contradictory experts in the worst case",
    "a refused combine",
    "dispatch and combine",
    "more rows than the worst case allows",
    "a combine with a handle of another dispatch",
    "a handle with rows far outside",
)
"""What differs most; the others in `make test-all`."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in SCENARIOS],
)
def test_wrong_calls(name: str) -> None:
    SCENARIOS[name].check(world(3))


def catch_errors(context: RankContext) -> list[str]:
    """Of each error, what it says, and whether it keeps its caller's variables until garbage is collected:
    they might be graphs, which must not be freed while another one is captured."""

    class Variable:
        pass

    def catch(work: Callable[[], object]) -> tuple[str, weakref.ref[Variable]]:
        variable = Variable()
        try:
            work()
        except AnyEPError as error:
            return str(error), weakref.ref(variable)
        return "nothing was raised", weakref.ref(variable)

    buffer = new_buffer(context)
    arguments = good_arguments(buffer, to_rank_0=True)
    works: list[Callable[[], object]] = [
        lambda: Buffer(context.group, NVL_BYTES, device="cuda", num_window_bytes=-1),
        lambda: buffer.dispatch(**arguments | {"num_tokens_per_rank": arguments["num_tokens_per_rank"] + 1}),
        lambda: buffer.dispatch(**arguments, num_worst_tokens=1),
        lambda: buffer.dispatch(**arguments, num_worst_tokens=100),
    ]
    gc.disable()
    try:
        caught = [catch(work) for work in works]
        return [f"{message}; {'freed' if held() is None else 'kept'}" for message, held in caught]
    finally:
        gc.enable()
        buffer.destroy()


def test_errors_hold_nothing() -> None:
    for made, counted, worst, after in world(3).run(catch_errors):
        assert re.match("num_window_bytes is -1.*; freed$", made)
        assert re.match("num_tokens_per_rank.*; freed$", counted)
        assert worst == "nothing was raised; freed"
        assert re.match("num_worst_tokens is 1 on rank 0.*; freed$", after)


def call_with_many_sms(context: RankContext) -> int:
    """Without a config, with more SMs than a rank has for itself."""
    Buffer.set_num_sms(100)
    try:
        with new_buffer(context) as buffer:
            _, *_, handle, _ = buffer.dispatch(**good_arguments(buffer) | {"config": None})
            return int(handle[1].shape[1])
    finally:
        Buffer.set_num_sms(20)


def test_the_default_config_takes_no_more_than_its_share() -> None:
    assert world(3).run(call_with_many_sms) == [132 // 3 // 2] * 3
    assert world(1).run(call_with_many_sms) == [50]


def call_where_kernels_do_not_see_the_host(context: RankContext) -> list[str]:
    """What is logged when a Buffer is made; and it works."""
    from anyep.backends.cuda.gpu import Gpu

    usual = Gpu.let_kernels_read
    Gpu.let_kernels_read = lambda *_: False  # type: ignore[method-assign]
    try:
        with warnings_heard() as heard, new_buffer(context) as buffer:
            check_case(context, GOOD, buffer)
            dist.barrier(group=context.group)
    finally:
        Gpu.let_kernels_read = usual  # type: ignore[method-assign]
    return heard


def test_kernels_that_do_not_see_the_host() -> None:
    for rank, messages in enumerate(world(3).run(call_where_kernels_do_not_see_the_host)):
        said = [message for message in messages if "cannot read the host's memory" in message]
        assert len(said) == 1
        assert said[0].startswith(f"the kernels of rank {rank} cannot")
        assert "ANYEP_TIMEOUT_S" in said[0]


def look_at_each_other(context: RankContext) -> list[str]:
    """What rank 1 sees while the others wait for it, and when all is done."""
    buffer = new_buffer(context)
    seen = [str(buffer.status()[0])]
    if context.rank == 1:
        wait_until(lambda: buffer.status()[0].phase == "send")
        seen.append(str(buffer.status()[0]))
    good_dispatch(buffer)
    dist.barrier(group=context.group)
    seen.append(str(buffer.status()[0]))
    dist.barrier(group=context.group)
    buffer.destroy()
    return seen


def test_status() -> None:
    before, while_it_waits, after = world(2).run(look_at_each_other)[1]
    assert re.match(r"rank 0 \(pid \d+\) is (idle for .* s; it has not called yet|in dispatch)", before)
    assert re.match(
        r"rank 0 \(pid \d+\) is in dispatch \(call 1\), phase send, for \d+\.\d s$", while_it_waits
    )
    assert re.match(
        r"rank 0 \(pid \d+\) is idle for \d+\.\d s; its last call was dispatch \(call 1\)$", after
    )
