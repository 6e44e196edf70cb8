"""A Buffer's life: windows that are lent and come back, events, overlap, several Buffers, small functions."""

from __future__ import annotations

import gc
import inspect
import os
import random
import threading
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import anyep
from anyep import Config
from anyep.api.buffer import Buffer
from anyep.core.calls import Phase
from anyep.core.freelist import FreeList
from tests.support import oracle
from tests.support.cases import Case, buffer_for, check_case, inputs_of
from tests.support.communicator import FakeComm
from tests.support.world import RankContext, get_world

CASE = Case(tokens=(30, 20, 10), hidden=64)
WAIT_S = 30.0


def dispatch(buffer: Buffer, case: Case, rank: int, **more: Any) -> tuple[Any, ...]:
    given = inputs_of(case)[rank]
    assert given.topk_idx is not None
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(given.topk_idx, case.num_experts)
    return buffer.dispatch(
        given.x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=given.topk_idx,
        topk_weights=given.topk_weights,
        **more,
    )


def used_bytes(buffer: Buffer) -> int:
    assert buffer.runtime is not None
    gc.collect()
    return buffer.runtime.windows.used_bytes


def hold_and_drop(context: RankContext, seed: int) -> bool:
    """Keep results for long, drop them in any order; what is kept stays as it was, all else comes back."""
    chance = random.Random(seed)
    with Buffer(context.group, 1 << 20, device="cpu", num_window_bytes=1 << 20) as buffer:
        assert buffer.runtime is not None
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        was_in_a_window = False
        for number in range(60):
            case = Case(tokens=(chance.randrange(40),) * context.num_ranks, hidden=256, seed=number)
            recv, *_, handle, _ = dispatch(buffer, case, context.rank)
            was_in_a_window |= buffer.runtime.windows.block.offset_of(recv) is not None
            kept = chance.choice([recv, recv[:3], recv.view(-1), recv.view(torch.int16)])
            held.append((kept, kept.clone()))
            del recv
            combined = buffer.combine(
                buffer.dispatch(inputs_of(case)[context.rank].x, handle=handle)[0], handle
            )
            del combined, handle
            while len(held) > 1 and chance.random() < 0.4:
                held.pop(chance.randrange(len(held)))
            for tensor, copy in held:
                assert oracle.same_bits(tensor, copy)
        del kept
        del tensor, copy
        held.clear()
        assert used_bytes(buffer) == 0
    return was_in_a_window


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_windows_come_back(seed: int) -> None:
    assert all(get_world(3).run(hold_and_drop, seed))


def keep_after_destroy(context: RankContext) -> None:
    buffer = Buffer(context.group, 1 << 20, device="cpu")
    recv = dispatch(buffer, CASE, context.rank)[0]
    expected = oracle.dispatch(inputs_of(CASE), context.rank, CASE.num_experts).x
    buffer.destroy()
    del buffer
    gc.collect()
    assert oracle.same_bits(recv, expected)


def test_results_outlive_the_buffer() -> None:
    get_world(3).run(keep_after_destroy)


def a_handle_does_not_hold_a_window(context: RankContext) -> None:
    with Buffer(context.group, 1 << 20, device="cpu") as buffer:
        recv, ids, weights, _, handle, _ = dispatch(buffer, CASE, context.rank)
        assert used_bytes(buffer) > 0
        del recv
        assert used_bytes(buffer) == 0
        assert len(ids) == len(weights) == len(handle[3])


def test_a_handle_does_not_hold_a_window() -> None:
    get_world(3).run(a_handle_does_not_hold_a_window)


def copies_of_a_handle(context: RankContext) -> None:
    """As autograd does: saved, unpacked into other tensor objects, used again and again."""
    buffer = buffer_for(context, None)
    recv, *_, handle, _ = dispatch(buffer, CASE, context.rank)
    copy = tuple(part.clone() for part in handle)
    first = buffer.combine(recv, handle)[0]
    for _ in range(3):
        assert oracle.same_bits(buffer.combine(recv, copy)[0], first)
    given = inputs_of(CASE)[context.rank]
    assert oracle.same_bits(buffer.dispatch(given.x, handle=copy)[0], recv)  # type: ignore[arg-type]
    assert oracle.same_bits(buffer.combine(recv, list(copy))[0], first)  # type: ignore[arg-type]


def test_copies_of_a_handle() -> None:
    get_world(3).run(copies_of_a_handle)


def overlap(context: RankContext) -> None:
    """The caller goes on while a call's communication is held up, unless the call is in line."""
    with Buffer(context.group, 1 << 20, device="cpu") as buffer:
        recv, *_, handle, _ = dispatch(buffer, CASE, context.rank)
        x = inputs_of(CASE)[context.rank].x
        released = threading.Event()

        def hold_up(call: object, phase: Phase) -> None:
            if phase in (Phase.PULL, Phase.SEND):
                assert released.wait(WAIT_S)

        buffer.runtime.control.between_steps = hold_up
        for call in (
            lambda: buffer.combine(recv, handle, async_finish=True),
            lambda: buffer.dispatch(x, handle=handle, async_finish=True),
            lambda: dispatch(buffer, CASE, context.rank, async_finish=True),
        ):
            *_, event = call()
            assert not event.event.is_finished
            with event:
                released.set()
            assert event.event.is_finished
            released.clear()
        threading.Timer(0.1, released.set).start()
        buffer.combine(recv, handle)
        assert released.is_set()


def test_communication_overlaps_with_the_caller() -> None:
    get_world(3).run(overlap)


def async_calls_in_a_row(context: RankContext) -> None:
    """Nobody waits in between: calls keep their order, and every result is right."""
    buffer = buffer_for(context, None)
    recv, *_, handle, _ = dispatch(buffer, CASE, context.rank)
    x = inputs_of(CASE)[context.rank].x
    expected = buffer.combine(recv, handle)[0]
    previous = buffer.capture()
    results = []
    for _ in range(10):
        rows, *_, event = buffer.dispatch(
            x, handle=handle, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        combined, _, event = buffer.combine(rows, handle, async_finish=True)  # type: ignore[arg-type]
        results.append((rows, combined, event))
        previous = event
    for rows, combined, event in results:
        event.current_stream_wait()
        assert oracle.same_bits(rows, recv)  # type: ignore[arg-type]
        assert oracle.same_bits(combined, expected)
    check_case(context, CASE, buffer)


def test_async_calls_in_a_row() -> None:
    get_world(3).run(async_calls_in_a_row)


def layout_beside_the_caller(context: RankContext) -> None:
    buffer = buffer_for(context, None)
    given = inputs_of(CASE)[context.rank]
    assert given.topk_idx is not None
    per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(
        given.topk_idx, CASE.num_experts, previous_event=buffer.capture(), async_finish=True
    )
    recv = buffer.dispatch(
        given.x,
        None,
        per_rank,
        None,
        in_rank,
        per_expert,
        given.topk_idx,
        given.topk_weights,
        previous_event=event,
    )[0]
    assert oracle.same_bits(recv, oracle.dispatch(inputs_of(CASE), context.rank, CASE.num_experts).x)  # type: ignore[arg-type]


def test_layout_beside_the_caller() -> None:
    for _ in range(5):
        get_world(3).run(layout_beside_the_caller)


def results_that_are_not_there_yet(context: RankContext) -> None:
    """Handles and layouts of calls that still run are used at once, without any event."""
    buffer = buffer_for(context, None)
    assert buffer.runtime is not None
    given = inputs_of(CASE)[context.rank]
    assert given.topk_idx is not None
    expected = oracle.dispatch(inputs_of(CASE), context.rank, CASE.num_experts).x
    in_line = buffer.combine(*dispatch(buffer, CASE, context.rank)[::4][:2])[0]
    buffer.runtime.control.between_steps = lambda call, phase: time.sleep(0.01)
    for _ in range(3):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            given.topk_idx, CASE.num_experts, async_finish=True
        )
        rows, *_, handle, _ = buffer.dispatch(
            given.x,
            None,
            per_rank,
            None,
            in_rank,
            per_expert,
            given.topk_idx,
            given.topk_weights,
            num_worst_tokens=100,
            async_finish=True,
        )
        assert handle is not None
        combined = buffer.combine(rows, handle)[0]  # type: ignore[arg-type]
        assert oracle.same_bits(rows[: len(expected)], expected)  # type: ignore[arg-type, index]
        assert oracle.same_bits(combined, in_line)
    buffer.runtime.control.between_steps = None


def test_results_that_are_not_there_yet() -> None:
    get_world(3).run(results_that_are_not_there_yet)


def an_error_nobody_waited_for(context: RankContext) -> list[str]:
    buffer = buffer_for(context, None)
    messages = []
    dispatch(buffer, CASE, context.rank, num_worst_tokens=1, async_finish=True)
    for _ in range(2):
        try:
            dispatch(buffer, CASE, context.rank)
            messages.append("worked")
        except anyep.AnyEPError as error:
            messages.append(str(error))
    return messages


def test_an_error_that_nobody_waited_for_is_raised_by_the_next_call() -> None:
    for first, second in get_world(3).run(an_error_nobody_waited_for):
        assert "num_worst_tokens is 1 on rank" in first
        assert second == "worked"


def late_previous_event(context: RankContext) -> None:
    buffer = buffer_for(context, None)
    recv, *_, handle, _ = dispatch(buffer, CASE, context.rank)
    x = inputs_of(CASE)[context.rank].x
    for call in (
        lambda **more: buffer.combine(recv, handle, **more),
        lambda **more: buffer.dispatch(x, handle, **more),
    ):
        later = anyep.EventHandle.pending()
        *_, event = call(previous_event=anyep.EventOverlap(later), async_finish=True)
        time.sleep(0.02)
        assert not event.event.is_finished
        later.finish()
        event.current_stream_wait()
        assert event.event.is_finished


def test_a_previous_event_is_waited_for_beside_the_caller() -> None:
    get_world(3).run(late_previous_event)


def what_a_process_holds() -> tuple[int, int]:
    """Its descriptors, and its maps of shared memory."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "anyep" in line]
    return len(list(Path("/proc/self/fd").iterdir())), len(maps)


def nothing_is_left(context: RankContext) -> None:
    gc.collect()
    threads = set(threading.enumerate())
    before = what_a_process_holds()
    for _ in range(3):
        with pytest.raises(anyep.NotSupported):
            Buffer(context.group, 1 << 20, device="cpu", num_window_bytes=1 << 62)
        buffer = Buffer(context.group, 1 << 20, device="cpu")
        check_case(context, CASE, buffer)
        dispatch(buffer, CASE, context.rank, async_finish=True)[-1].current_stream_wait()
        buffer.destroy()
        gc.collect()
        assert what_a_process_holds() == before  # also while the destroyed Buffer is held
    assert set(threading.enumerate()) <= threads


def test_nothing_is_left_of_buffers() -> None:
    get_world(3).run(nothing_is_left)


def drop_while_it_waits(context: RankContext) -> list[str]:
    """A Buffer is dropped while a call on it waits for whoever drops it."""
    before = threading.enumerate()
    buffer = Buffer(context.group, 1 << 20, device="cpu")
    later = anyep.EventHandle.pending()
    topk_idx = torch.zeros(4, 1, dtype=torch.int64)
    *_, event = buffer.get_dispatch_layout(
        topk_idx, context.num_ranks, previous_event=anyep.EventOverlap(later), async_finish=True
    )
    del buffer
    gc.collect()
    later.finish()
    event.current_stream_wait()
    deadline = time.monotonic() + WAIT_S
    while alive := [
        thread.name
        for thread in threading.enumerate()
        if thread.name == "anyep-stream" and thread not in before
    ]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return alive


def test_a_buffer_dropped_while_it_waits() -> None:
    assert get_world(2).run(drop_while_it_waits) == [[], []]


def wide_weights(context: RankContext) -> float:
    """Rows of weights that are no multiple of 16 bytes, and more than 4 MiB of them."""
    buffer = buffer_for(context, None)
    case = Case(
        tokens=(34_000,) * context.num_ranks, hidden=16, num_topk=1, local_experts=1, routing="own rank"
    )
    recv, *_, handle, _ = dispatch(buffer, case, context.rank)
    weights = torch.full((len(recv), 33), 2.0)
    combined = buffer.combine(recv, handle, topk_weights=weights)[1]
    assert combined is not None
    return float(combined.min())


def test_wide_weights() -> None:
    assert get_world(2).run(wide_weights) == [2.0, 2.0]


def under_another_default_device(context: RankContext) -> None:
    buffer = buffer_for(context, None)
    given = inputs_of(CASE)[context.rank]
    with torch.device("meta"):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(given.topk_idx, CASE.num_experts)  # type: ignore[arg-type]
        recv, *_, handle, _ = buffer.dispatch(
            given.x, None, per_rank, None, in_rank, per_expert, given.topk_idx, given.topk_weights
        )
        combined = buffer.combine(recv, handle)[0]  # type: ignore[arg-type]
    assert recv.device.type == combined.device.type == "cpu"  # type: ignore[union-attr]


def test_another_default_device() -> None:
    get_world(3).run(under_another_default_device)


def use_the_mask_again(context: RankContext) -> None:
    buffer = buffer_for(context, None)
    given = inputs_of(CASE)[context.rank]
    assert given.topk_idx is not None
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(given.topk_idx, CASE.num_experts)
    recv, *_, handle, _ = buffer.dispatch(given.x, None, per_rank, None, in_rank, per_expert)
    assert handle is not None
    in_rank.zero_()
    buffer.combine(recv, handle)  # type: ignore[arg-type]


def test_the_mask_may_be_used_again() -> None:
    get_world(3).run(use_the_mask_again)


def several_buffers(context: RankContext) -> None:
    buffers = [
        Buffer(context.group, 1 << 20, device="cpu", num_window_bytes=size) for size in (None, 0, 1 << 16)
    ]
    for seed in range(4):
        for buffer in buffers:
            check_case(context, Case(tokens=(7, 0, 9), seed=seed), buffer)
    events = []
    for buffer in buffers:
        recv, *_, handle, _ = dispatch(buffer, CASE, context.rank)
        events.append(buffer.combine(recv, handle, async_finish=True)[-1])
    for event in reversed(events):
        event.current_stream_wait()
    for buffer in buffers:
        buffer.destroy()


def test_several_buffers_at_once() -> None:
    get_world(3).run(several_buffers)


def small_functions(context: RankContext) -> None:
    buffer = buffer_for(context, None)
    assert (buffer.rank, buffer.group_size, buffer.group) == (context.rank, context.num_ranks, context.group)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 22, 0)
    assert not buffer.low_latency_mode
    assert not buffer.explicitly_destroy
    assert not buffer.enable_shrink
    assert buffer.get_comm_stream() is not None
    mine = buffer.get_local_buffer_tensor(torch.float32)
    assert mine.numel() == (1 << 22) // 4
    mine[5] = 7.0
    part = buffer.get_local_buffer_tensor(torch.float32, size=torch.Size([2, 3]), offset=16)
    assert part.shape == (2, 3)
    assert part[0, 1] == 7.0
    statuses = buffer.status()
    assert [status.rank for status in statuses] == [0, 1, 2]
    assert all(status.alive and status.state == "alive" for status in statuses)
    assert statuses[context.rank].pid == os.getpid()
    event = anyep.EventOverlap(anyep.EventHandle())
    event.current_stream_wait()
    with event as same:
        assert same is event
    event.event = None
    assert anyep.EventOverlap().event is None
    assert buffer.get_dispatch_layout(torch.zeros(1, 1, dtype=torch.int64), 3)[-1].event is None
    # Hints for hardware that is not here are taken and ignored.
    with Buffer(context.group, 1 << 20, 0, False, 24.0, False, True, True, device="cpu"):  # type: ignore[arg-type]
        pass


def test_small_functions() -> None:
    get_world(3).run(small_functions)


def test_static_functions() -> None:
    assert Buffer.is_sm90_compiled()
    assert Buffer.get_dispatch_config(8) == Config(20, 6, 256, 6, 128)
    assert Buffer.get_combine_config(16) == Config(20, 2, 288, 28, 128)
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == 1_881_147_520
    try:
        object.__new__(Buffer).set_num_sms(24)  # through an instance, too
        assert Buffer.num_sms == 24
        assert Buffer.get_dispatch_config(8).num_channels == 12
        with pytest.raises(anyep.InvalidCall, match="num_sms is 3: it must be even"):
            Buffer.set_num_sms(3)
    finally:
        Buffer.set_num_sms(20)
    assert anyep.topk_idx_t is torch.int64
    assert anyep.Buffer is Buffer


def test_signatures_are_those_of_the_api() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)[1:]

    assert names(Buffer.__init__) == [
        "group",
        "num_nvl_bytes",
        "num_rdma_bytes",
        "low_latency_mode",
        "num_qps_per_rank",
        "allow_nvlink_for_low_latency_mode",
        "allow_mnnvl",
        "use_fabric",
        "explicitly_destroy",
        "enable_shrink",
        "comm",
        "device",
        "ranks_per_node",
        "num_window_bytes",
        "network",
        "heap",
    ]
    events = ["previous_event", "async_finish", "allocate_on_comm_stream"]
    assert names(Buffer.get_dispatch_layout) == ["topk_idx", "num_experts", *events]
    assert names(Buffer.dispatch) == [
        "x",
        "handle",
        "num_tokens_per_rank",
        "num_tokens_per_rdma_rank",
        "is_token_in_rank",
        "num_tokens_per_expert",
        "topk_idx",
        "topk_weights",
        "expert_alignment",
        "num_worst_tokens",
        "config",
        *events,
    ]
    assert names(Buffer.combine) == ["x", "handle", "topk_weights", "bias", "config", *events]


def with_a_communicator(context: RankContext) -> None:
    with Buffer(None, 1 << 20, comm=FakeComm(context.group), device="cpu") as buffer:
        check_case(context, CASE, buffer)


def test_a_communicator_instead_of_a_group() -> None:
    get_world(3).run(with_a_communicator)


def test_an_undestroyed_buffer_warns() -> None:
    warned = get_world(1).run(forget_a_buffer)
    assert warned == ["a Buffer made with explicitly_destroy=True was dropped without destroy()"]


def forget_a_buffer(context: RankContext) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer = Buffer(context.group, 1 << 20, device="cpu", explicitly_destroy=True)
        del buffer
        gc.collect()
    return str(caught[0].message)


def test_the_free_list_merges_and_reuses() -> None:
    chance = random.Random(5)
    num_bytes = (1 << 16) + 100
    heap = FreeList(num_bytes)
    used: dict[int, int] = {}
    for _ in range(2000):
        if used and chance.random() < 0.5:
            offset = chance.choice(list(used))
            del used[offset]
            heap.free(offset)
        else:
            size = chance.randrange(1, 3000)
            offset_or_none = heap.allocate(size)
            if offset_or_none is not None:
                used[offset_or_none] = min(-(-size // 256) * 256, num_bytes - offset_or_none)
        spans = sorted([*used.items(), *heap.blocks()])
        assert all(start % 256 == 0 for start, _ in spans)
        assert all(start + size == following for (start, size), (following, _) in pairwise(spans))
        assert sum(size for _, size in spans) == num_bytes
        assert heap.used_bytes == sum(used.values())
        offers = heap.offers(3)
        assert len(offers) <= 3
        assert not heap.blocks() or max(heap.blocks(), key=lambda block: block[1]) in offers
    with pytest.raises(ValueError, match="no free block"):
        heap.allocate_at(1, 1)
    exact = FreeList(640)
    assert exact.allocate(640) == 0
    assert exact.blocks() == []


# Tensors with gradients, where grad mode is off


def weights_with_gradients(context: RankContext) -> None:
    """Grad mode belongs to a thread: calls that another thread finishes must not depend on it."""
    mine = inputs_of(CASE)[context.rank]
    assert mine.topk_weights is not None
    buffer = buffer_for(context, None)
    expected = dispatch(buffer, CASE, context.rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.topk_idx, CASE.num_experts)
    counts = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert}
    with torch.no_grad():
        for run_async in (False, True):
            rows, _, weights, _, handle, event = buffer.dispatch(
                mine.x.clone().requires_grad_(),
                **counts,
                is_token_in_rank=in_rank,
                topk_idx=mine.topk_idx,
                topk_weights=mine.topk_weights.clone().requires_grad_(),
                async_finish=run_async,
            )
            event.current_stream_wait()
            assert torch.equal(rows, expected[0])
            assert torch.equal(weights, expected[2])
            sums = [
                buffer.combine(rows, handle, topk_weights=given, async_finish=run_async)
                for given in (weights, weights.clone().requires_grad_())
            ]
            for *_, event in sums:
                event.current_stream_wait()
            assert torch.equal(sums[0][0], sums[1][0])
            assert torch.equal(sums[0][1], sums[1][1])


def test_weights_with_gradients() -> None:
    get_world(3).run(weights_with_gradients)
