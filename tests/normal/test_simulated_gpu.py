"""Normal mode on GPUs, without a GPU: real processes whose kernels run in Triton's interpreter.

Rings are no part of it: the interpreter runs the programs of a kernel one after the other, so one that waits
for another would wait for ever.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings

from anyep import Config
from anyep.backends.cuda import facts
from anyep.buffer import Buffer
from anyep.errors import AnyEPError
from anyep.modes.letters import Kind, signature
from anyep.modes.status import Phase
from anyep.outcomes import OUT, code_of
from tests.support.cases import Case, buffer_for, check_case, delays
from tests.support.gpu_pairs import soak
from tests.support.gpu_scenarios import (
    FEW_SMS,
    GOOD,
    NUM_RANKS,
    NVL_BYTES,
    SCENARIOS,
    attempt,
    check_a_killed_rank,
    check_a_rank_that_destroys_its_buffer,
    check_a_rank_that_raises,
    check_a_slow_rank,
    check_who_destroyed_his_buffer_is_named,
    closing_threads,
    fail_from_now_on,
    good_arguments,
    good_dispatch,
    hold_results,
    new_buffer,
    poison_windows,
    rows_of,
    wait_until_gone,
    warnings_heard,
)
from tests.support.strategies import cases
from tests.support.world import RankContext, RankDied, World

# Not loaded here: ranks load this module, too, before they choose to interpret kernels.
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install 'anyep[cuda]'"
)

WINDOW_BYTES: tuple[int | None, ...] = (None,)
NUM_EXAMPLES = {1: 3, 2: 8, 3: 5}


def simulate(context: RankContext, timeout_s: str = "20") -> None:
    """From here on device "cuda" is the simulated GPU, with CPU tensors."""
    # Only in a rank: whoever loads kernels afterwards can do nothing but interpret them.
    from tests.support.simulated_gpu import use_simulated_gpu

    os.environ["ANYEP_TIMEOUT_S"] = timeout_s
    use_simulated_gpu()
    # Memory that nobody has written yet holds NaN and the like: who reads it is found out. Only now, since
    # it loads Triton.
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    with ExitStack() as stack:
        opened = {num_ranks: stack.enter_context(World(num_ranks)) for num_ranks in NUM_EXAMPLES}
        for world in opened.values():
            world.run(simulate)
        yield opened


def run_simulated_case(context: RankContext, case: Case) -> None:
    buffer = buffer_for(context, case.num_window_bytes, device="cuda")
    poison_windows(buffer)
    conversation = buffer.runtime.conversation
    conversation.between_steps = None if case.delay_seed is None else delays(case.delay_seed, context.rank)
    try:
        check_case(context, case, buffer)
    finally:
        conversation.between_steps = None


CASES = {
    "as simple as can be": Case((3, 4)),
    "float16, two biases, weights": Case(
        (17, 9), dtype="float16", num_biases=2, combine_weights=True, num_topk=3, hidden=1040
    ),
    "float32, one bias": Case((5, 12, 7), dtype="float32", num_biases=1, hidden=272),
    "bytes": Case((4, 6), dtype="uint8", hidden=48),
    "fp8 with strided scales": Case(
        (9, 3, 14), dtype="float8_e4m3fn", num_scales=5, strided_scales=True, combine_from_window=False
    ),
    "the worst case": Case((8, 3), worst=True, combine_weights=True),
    "the worst case of bytes with scales": Case((2, 0, 5), dtype="uint8", num_scales=3, worst=True),
    "asynchronous": Case((5, 6), run_async=True, num_biases=1),
    "asynchronous worst case": Case((5, 6, 1), run_async=True, worst=True),
    "without choices of experts": Case((7, 2), send_topk=False),
    "alignment": Case((9, 9), alignment=4, num_topk=4),
    "a rank without tokens": Case((0, 7, 3), combine_weights=True),
    "no tokens at all": Case((0, 0)),
    "tokens that go nowhere": Case((6, 5), routing="none", num_biases=2),
    "some choices missing": Case((12, 11, 9), routing="some missing", num_topk=4, num_biases=1),
    "all to one rank": Case((30, 20, 10), routing="one rank"),
    "each to itself": Case((6, 6), routing="own rank", combine_from_window=False),
    "more slots than experts": Case((6, 5), num_topk=7, local_experts=1),
    "many tokens": Case((200, 150), num_topk=4, local_experts=4, config=Config(8, 2, 9)),
    "one rank alone": Case((11,), num_biases=1, combine_weights=True),
}


@pytest.mark.parametrize("num_window_bytes", WINDOW_BYTES)
@pytest.mark.parametrize("name", CASES)
def test_case(worlds: dict[int, World], name: str, num_window_bytes: int | None) -> None:
    case = replace(CASES[name], num_window_bytes=num_window_bytes)
    worlds[case.num_ranks].run(run_simulated_case, case)


@pytest.mark.parametrize("num_ranks", NUM_EXAMPLES)
def test_any_case(worlds: dict[int, World], num_ranks: int) -> None:
    @settings(
        max_examples=NUM_EXAMPLES[num_ranks],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(cases(num_ranks, max_tokens=12))
    def check(case: Case) -> None:
        window_bytes = case.num_window_bytes if case.num_window_bytes in WINDOW_BYTES else None
        worlds[num_ranks].run(run_simulated_case, replace(case, num_window_bytes=window_bytes))

    check()


def run_pairs(context: RankContext, num_pairs: int) -> None:
    """As on a GPU, where it is thousands."""
    soak(context, num_pairs, 1 << 20, 3)


def test_pairs_of_all_kinds(worlds: dict[int, World]) -> None:
    worlds[2].run(run_pairs, 8)


# Windows


def grow(context: RankContext, first_bytes: int) -> list[int]:
    """The number of blocks of windows after each case; what an earlier one holds stays as it is."""
    from anyep.modes import gpu_connection

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


def fail_to_grow(context: RankContext, step: int) -> str:
    """Rank 1 has all letters of a dispatch that needs windows, and fails in a step before it adds any: before
    it has told the others that it will, or after that. Rank 2 is late."""
    buffer = new_buffer(context)
    runtime, steps = buffer.runtime, []
    assert runtime.windows.allocate(runtime.windows.num_bytes) is not None

    def strike(call: Any, phase: Phase) -> None:
        if phase is Phase.NOTIFY:
            steps.append(phase)
            if context.rank == 1 and len(steps) == step:
                raise ValueError("the experts are on fire")
            if context.rank == 2:
                time.sleep(0.5)

    arguments = good_arguments(buffer)
    runtime.conversation.between_steps = strike
    outcome = attempt(buffer.dispatch, **arguments)
    assert runtime.windows.num_blocks == 1
    return outcome


@pytest.mark.parametrize("step", [1, 2])
def test_a_rank_that_fails_before_windows_grow(world: World, step: int) -> None:
    world.run(simulate)
    for rank, outcome in enumerate(world.run(fail_to_grow, step)):
        assert outcome.startswith("ValueError" if rank == 1 else "PeerLost"), outcome
        assert "the experts are on fire" in outcome
        if rank != 1:
            assert f"rank {rank} waited for its word that it adds windows in dispatch (call 1)" in outcome


@pytest.mark.parametrize("first_bytes", [0, 8192])
def test_windows_grow(worlds: dict[int, World], first_bytes: int) -> None:
    first, *others = worlds[2].run(grow, first_bytes)
    assert others == [first]
    assert first == sorted(first)
    assert first[0] == 1
    assert 2 <= first[-1] <= 5
    # A case that was there before needs no more.
    assert first[1] == first[2]
    assert first[3] == first[4]


def test_windows_are_held_by_results(worlds: dict[int, World]) -> None:
    worlds[3].run(hold_results)


# The end of a Buffer


def blocks_of(buffer: Buffer) -> list[weakref.ref[Any]]:
    """Its memory on the GPU: the heap, and the windows."""
    blocks = (buffer.runtime.talk.heap, *buffer.runtime.windows._blocks)
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


def test_memory_is_freed_with_the_buffer(worlds: dict[int, World]) -> None:
    """And not when garbage is collected."""
    worlds[2].run(end_without_garbage_collection)


def fail_to_make_a_buffer(context: RankContext, step: str, ranks: list[int]) -> tuple[list[str], list[int]]:
    """Some ranks fail at one step. What is raised, and what is left: heaps, descriptors and threads."""
    from anyep.backends.cuda.gpu import Gpu
    from anyep.modes.gpu_connection import GpuConnection
    from anyep.modes.gpu_intranode import GpuIntranode
    from anyep.modes.gpu_low_latency import GpuLowLatency
    from anyep.modes.gpu_talk import GpuTalk

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
        "talk": (GpuTalk, "__init__"),
        "windows": (GpuConnection, "_add_windows"),
        "bases": (GpuTalk, "set_window_bases"),
        "normal mode": (GpuIntranode, "__init__"),
        "low latency": (GpuLowLatency, "__init__"),
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


def test_nothing_is_left_of_a_buffer_that_has_no_windows(worlds: dict[int, World]) -> None:
    for outcome in worlds[3].run(fail_to_make_a_buffer, "windows", [0, 1, 2]):
        assert outcome == (["RuntimeError: no windows"] * 3, [0, 0, 0])


@pytest.mark.parametrize("step", ["gpu", "talk", "bases", "normal mode", "low latency"])
def test_nothing_is_left_of_a_buffer_that_one_rank_cannot_make(worlds: dict[int, World], step: str) -> None:
    reason = f"RuntimeError: no {step}"
    for rank, outcome in enumerate(worlds[3].run(fail_to_make_a_buffer, step, [1])):
        message = reason if rank == 1 else f"rank 1 could not make its Buffer: {reason}"
        assert outcome == ([f"NotSupported: {message}"] * 3, [0, 0, 0])


def end_while_a_graph_is_captured(context: RankContext) -> list[str]:
    """Destroy a Buffer, then drop it; what its peers see of it then, and when the next Buffer is there."""
    buffer, other = new_buffer(context), new_buffer(context)
    good_dispatch(buffer)
    dist.barrier(group=context.group)
    stream, blocks, seen = buffer.runtime.talk.gpu.stream, blocks_of(buffer), []
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


def test_a_buffer_that_ends_while_a_graph_is_captured(worlds: dict[int, World]) -> None:
    (refused,), (_, while_captured, afterwards), _ = worlds[3].run(end_while_a_graph_is_captured)
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


def test_a_buffer_dropped_in_another_thread(worlds: dict[int, World]) -> None:
    assert re.search("is idle.*, then .*destroyed", worlds[2].run(drop_in_another_thread)[1])


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


def test_a_buffer_dropped_while_calls_are_under_way(worlds: dict[int, World]) -> None:
    seen = worlds[3].run(drop_while_calls_are_under_way)[1]
    assert re.search("is idle.*, then .*destroyed", seen)


# What goes wrong


@pytest.mark.parametrize("name", SCENARIOS)
def test_wrong_calls(worlds: dict[int, World], name: str) -> None:
    SCENARIOS[name].check(worlds[NUM_RANKS])


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


def test_errors_hold_nothing(worlds: dict[int, World]) -> None:
    for made, counted, worst, after in worlds[NUM_RANKS].run(catch_errors):
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


def test_the_default_config_takes_no_more_than_its_share(worlds: dict[int, World]) -> None:
    assert worlds[3].run(call_with_many_sms) == [132 // 3 // 2] * 3
    assert worlds[1].run(call_with_many_sms) == [50]


# Failures


@pytest.fixture
def world() -> Iterator[World]:
    """Three ranks of its own: what happens to them is nobody else's business."""
    with World(NUM_RANKS) as fresh:
        yield fresh


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_killed_rank(world: World, call: int) -> None:
    world.run(simulate)
    check_a_killed_rank(world, call)


@pytest.mark.parametrize("call", [1, 3])
def test_a_rank_that_raises(world: World, call: int) -> None:
    world.run(simulate)
    check_a_rank_that_raises(world, call)


def take_part_after_a_failure(context: RankContext) -> tuple[str, int]:
    """Rank 1 fails before anything of its second call is launched; then it launches what a graph would."""
    buffer = new_buffer(context)
    rows, *_, handle, _ = good_dispatch(buffer)
    runtime, routing = buffer.runtime, handle[0]
    if context.rank == 1:
        fail_from_now_on(buffer)
    outcome = attempt(buffer.dispatch, rows_of(buffer, 1), handle=handle, config=FEW_SMS)
    if context.rank == 1:
        digests = torch.zeros(2 * context.num_ranks, dtype=torch.int64)
        runtime.talk.exchange(signature(), Kind.CACHED_DISPATCH, routing, digests, is_combine=False)
        runtime.talk.meet(facts.ARRIVED_AT)
    else:
        outcome = attempt(buffer.combine, rows, handle, config=FEW_SMS)
    dist.barrier(group=context.group)
    return outcome, int(runtime.talk.state[facts.OUTCOME])


def test_no_kernel_takes_part_after_a_failure(world: World) -> None:
    world.run(simulate)
    for rank, (outcome, code) in enumerate(world.run(take_part_after_a_failure)):
        assert outcome.startswith("ValueError" if rank == 1 else "PeerLost: rank 1 "), outcome
        assert "the experts are on fire" in outcome
        assert code_of(code) == OUT


def refuse_alone(context: RankContext) -> list[str]:
    """Rank 0 refuses its call, in which rank 2 does not take part."""
    buffer = new_buffer(context)
    arguments = good_arguments(buffer)
    dist.barrier(group=context.group)
    outcomes = []
    if context.rank == 0:
        outcomes.append(attempt(buffer.dispatch, **(arguments | {"topk_idx": None})))
    if context.rank != 2:
        outcomes += [attempt(buffer.dispatch, **arguments) for _ in range(1 + context.rank)]
    dist.barrier(group=context.group)
    return outcomes


def test_who_did_not_come_to_a_refused_call_is_named(world: World) -> None:
    world.run(simulate, "1")
    (refused, heard), (late, broken), _ = world.run(refuse_alone)
    assert refused.startswith("InvalidCall: ")
    assert re.match(r"WaitTimeout: rank 0 waited 1 s for the letter of rank 2 in dispatch \(call 1\)", heard)
    assert re.match(r"(WaitTimeout|PeerLost): .* rank 2('s letter)? in dispatch \(call 1\)", late), late
    assert broken.startswith("BufferBroken: ")


@pytest.mark.parametrize(("call", "function"), [(1, "dispatch"), (2, "cached dispatch"), (6, "combine")])
def test_a_slow_rank(world: World, call: int, function: str) -> None:
    world.run(simulate, "1")
    check_a_slow_rank(world, call, function)


@pytest.mark.parametrize("call", [1, 3])
def test_a_rank_that_destroys_its_buffer_while_others_wait(world: World, call: int) -> None:
    world.run(simulate)
    check_a_rank_that_destroys_its_buffer(world, call)


def test_who_destroyed_his_buffer_is_named(world: World) -> None:
    world.run(simulate)
    check_who_destroyed_his_buffer_is_named(world)


def die_in_a_call(context: RankContext) -> str:
    """Rank 0 dies in a combine, when its letter is there. Rank 1 stops waiting for the letter of rank 2,
    which comes later, and has failed when rank 1 looks for the reason."""
    buffer = new_buffer(context)
    arguments = good_arguments(buffer)
    rows, *_, handle, _ = buffer.dispatch(**arguments)
    dist.barrier(group=context.group)
    if context.rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    time.sleep(2.0 if context.rank == 2 else 0.0)
    assert attempt(buffer.combine, rows, handle, config=FEW_SMS) == "fine"
    if context.rank == 1:
        wait_until_gone(buffer, 2)
    return attempt(buffer.dispatch, **arguments)


def test_who_died_in_a_call_is_named(world: World) -> None:
    world.run(simulate)
    died, *outcomes = world.gather(die_in_a_call)
    assert isinstance(died, RankDied)
    waits = ((1, "rank 2's letter"), (2, "its acknowledgement"))
    for outcome, (rank, whose) in zip(outcomes, waits, strict=True):
        pattern = rf"PeerLost: rank 0 \(pid \d+\) died while rank {rank} waited for {whose} in combine"
        assert re.match(pattern, outcome), outcomes


def finish_and_exit(context: RankContext) -> str:
    """Rank 0 leaves for good as soon as its own last call is done; the others are slower."""
    buffer = context.keep["buffer"] = new_buffer(context)
    if context.rank:
        buffer.runtime.conversation.between_steps = lambda call, phase: time.sleep(0.02)
    for seed in range(3):
        check_case(context, replace(GOOD, seed=seed), buffer)
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    return "\n".join(map(str, buffer.status()))


def test_a_rank_that_is_done_may_die(world: World) -> None:
    world.run(simulate)
    outcomes = world.gather(finish_and_exit)
    assert isinstance(outcomes[0], RankDied)
    for status in outcomes[1:]:
        assert status.count("is dead") == 1
        assert status.count("its last call was combine (call 9)") == 2


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


def test_kernels_that_do_not_see_the_host(worlds: dict[int, World]) -> None:
    for rank, messages in enumerate(worlds[3].run(call_where_kernels_do_not_see_the_host)):
        said = [message for message in messages if "cannot read the host's memory" in message]
        assert len(said) == 1
        assert said[0].startswith(f"the kernels of rank {rank} cannot")
        assert "ANYEP_TIMEOUT_S" in said[0]


def look_at_each_other(context: RankContext) -> list[str]:
    """What rank 1 sees while the others wait for it, and when all is done."""
    buffer = new_buffer(context)
    seen = [str(buffer.status()[0])]
    if context.rank == 1:
        time.sleep(0.6)
        seen.append(str(buffer.status()[0]))
    good_dispatch(buffer)
    dist.barrier(group=context.group)
    seen.append(str(buffer.status()[0]))
    dist.barrier(group=context.group)
    buffer.destroy()
    return seen


def test_status(worlds: dict[int, World]) -> None:
    before, while_it_waits, after = worlds[2].run(look_at_each_other)[1]
    assert re.match(r"rank 0 \(pid \d+\) is (idle for .* s; it has not called yet|in dispatch)", before)
    assert re.match(r"rank 0 \(pid \d+\) is in dispatch \(call 1\), phase send, for 0\.\d s$", while_it_waits)
    assert re.match(r"rank 0 \(pid \d+\) is idle for 0\.\d s; its last call was dispatch \(call 1\)$", after)
