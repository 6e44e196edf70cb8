"""Low-latency mode on GPUs without a GPU: real processes, kernels in Triton's interpreter, shared memory."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings

from anyep.buffer import Buffer
from tests.low_latency import test_low_latency as on_cpu
from tests.support.gpu_scenarios import NVL_BYTES, closing_threads, wait_until_gone
from tests.support.low_latency_cases import (
    FORMATS,
    RDMA_BYTES,
    Case,
    buffer_for,
    check_case,
    inputs_of,
    run_case,
)
from tests.support.patience import patience_s
from tests.support.strategies import low_latency_cases
from tests.support.world import RankContext, RankDied, World

# Ranks import this module, and must not have loaded Triton before they choose its interpreter.
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: pip install anyep[cuda]"
)
TIMEOUT_S = 240.0
"""For tests in which deadlines pass, or are not to pass: interpreted kernels are slow on a busy machine."""
NUM_EXAMPLES = {1: 3, 2: 14, 3: 4, 4: 3}
_worlds: dict[int, World] = {}


def use_simulated_gpus(context: RankContext) -> None:
    from tests.support.simulated_gpu import use_simulated_gpu

    use_simulated_gpu()
    context.keep["device"] = "cuda"


def simulated_world(num_ranks: int) -> World:
    world = World(num_ranks)
    world.run(use_simulated_gpus)
    return world


def shared_world(num_ranks: int) -> World:
    for other in [size for size in _worlds if size != num_ranks]:
        _worlds.pop(other).close()
    if num_ranks not in _worlds:
        _worlds[num_ranks] = simulated_world(num_ranks)
    return _worlds[num_ranks]


@pytest.fixture(scope="module", autouse=True)
def close_worlds() -> Iterator[None]:
    yield
    for world in _worlds.values():
        world.close()
    _worlds.clear()


@pytest.fixture
def world() -> Iterator[World]:
    """Ranks of its own: what happens to them is nobody else's business."""
    with simulated_world(3) as fresh:
        yield fresh


# Results


@pytest.mark.parametrize("num_ranks", NUM_EXAMPLES)
def test_any_case(num_ranks: int) -> None:
    @settings(
        max_examples=NUM_EXAMPLES[num_ranks],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(low_latency_cases(num_ranks, max_tokens=5))
    def check(case: Case) -> None:
        shared_world(num_ranks).run(run_case, replace(case, delay_seed=None))

    check()


@pytest.mark.parametrize("travel", FORMATS)
def test_every_format(travel: str) -> None:
    for index, how in enumerate(("in line", "hook", "async")):
        case = Case(tokens=(5, 3), hidden=512, travel=travel, use_logfmt=index == 1, how=how, seed=index)
        shared_world(2).run(run_case, replace(case, zero_copy=index == 2))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_calls_in_flight(order: tuple[int, int]) -> None:
    shared_world(2).run(on_cpu.two_in_flight, order)


@pytest.mark.parametrize(
    "function", [on_cpu.hold_results, on_cpu.normal_calls_beside_one_in_flight, on_cpu.drop_hooks]
)
def test_as_on_the_cpu(function: Callable[..., None]) -> None:
    shared_world(2).run(function)


def test_modes_mix_in_any_order() -> None:
    shared_world(2).run(on_cpu.mix_modes, 3)


def odd_numbers_of_calls(context: RankContext) -> None:
    """A dispatch may have either set of slots, and so may its combine."""
    buffer = buffer_for(context)
    case = Case(tokens=(4,) * context.num_ranks, hidden=64, combines=2)
    buffer.clean_low_latency_buffer(8, 64, case.num_experts)
    for seed in range(3):
        check_case(context.rank, replace(case, seed=seed), buffer)


def test_odd_numbers_of_calls() -> None:
    shared_world(2).run(odd_numbers_of_calls)


def test_statistics_say_who_was_waited_for() -> None:
    for rank, parts in enumerate(shared_world(3).run(on_cpu.who_was_late, 1)):
        for waited in parts:
            assert all(nanoseconds >= 5 for nanoseconds in waited)
            if rank != 1:
                assert waited[1] > 0.1e9
                assert waited[1] > max(waited[0], waited[2])


def end_without_garbage_collection(context: RankContext, how: str) -> None:
    buffer = new_buffer(context)
    case = Case(tokens=(3,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    held: list[Any] = []
    if "hook" in how:
        held = [on_cpu.dispatch_by_hook(buffer, case, context.rank)[-1]]
        if how == "a hook that was called":
            held[0]()
        elif how == "a dropped hook":
            held.clear()
    dist.barrier(group=context.group)
    # What the interpreter of kernels left; the Buffer itself must leave nothing of the kind.
    gc.collect()
    heap = weakref.ref(buffer.runtime.talk.heap._own)
    gc.disable()
    try:
        buffer.destroy()
        assert (heap() is None) is (how != "a hook that was not called")
        if held:
            message = message_of(held.pop())
            assert message.startswith("nothing" if how == "a hook that was called" else "BufferBroken")
        with new_buffer(context):
            assert heap() is None
            dist.barrier(group=context.group)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "how", ["calls in line", "a hook that was called", "a hook that was not called", "a dropped hook"]
)
def test_memory_is_freed_with_the_buffer(how: str) -> None:
    shared_world(2).run(end_without_garbage_collection, how)


def drop_while_a_call_is_under_way(context: RankContext) -> None:
    """What kernels of low-latency calls read lives as long as they do."""
    buffer = new_buffer(context)
    check_case(context.rank, Case(tokens=(3,) * context.num_ranks, hidden=64), buffer)
    dist.barrier(group=context.group)
    mode = weakref.ref(buffer._low_latency)
    over = threading.Event()
    buffer._low_latency._order.done = SimpleNamespace(query=over.is_set)  # type: ignore[union-attr]
    del buffer
    gc.collect()
    assert mode() is not None
    over.set()
    for thread in closing_threads():
        thread.join(20)
    gc.collect()
    assert mode() is not None
    with new_buffer(context):
        assert mode() is None
        dist.barrier(group=context.group)


def test_a_buffer_dropped_while_a_call_is_under_way() -> None:
    shared_world(2).run(drop_while_a_call_is_under_way)


# What goes wrong is raised by the next call


def message_of(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    try:
        call(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def new_buffer(
    context: RankContext, enable_shrink: bool = False, timeout_s: float = 100, num_nvl_bytes: int = 0
) -> Buffer:
    os.environ["ANYEP_TIMEOUT_S"] = str(timeout_s)
    modes = {"low_latency_mode": True, "enable_shrink": enable_shrink}
    return Buffer(context.group, num_nvl_bytes, RDMA_BYTES, **modes, device="cuda")


def disagree(context: RankContext, about: str) -> str:
    """Every rank calls rightly, but the last one otherwise than the others; then all call alike."""
    rank, ranks = context.rank, context.num_ranks
    is_odd = rank == ranks - 1
    buffer = new_buffer(context)
    case = Case(tokens=(3,) * ranks, hidden=128)
    topk_idx = torch.zeros(3, 1, dtype=torch.int64)

    def dispatch(hidden: int = 128, max_tokens: int = case.max_tokens, use_fp8: bool = False) -> Any:
        x = torch.ones(3, hidden, dtype=torch.bfloat16)
        return buffer.low_latency_dispatch(x, topk_idx, max_tokens, case.num_experts, use_fp8=use_fp8)

    message = ""
    if not is_odd:
        dispatch()
    elif about == "hidden":
        dispatch(hidden=256)
    elif about == "format":
        dispatch(use_fp8=True)
    elif about == "refusal":
        message = message_of(dispatch, max_tokens=2)
    else:
        # It waits for the others, so it hears at once.
        message = message_of(buffer.clean_low_latency_buffer, case.max_tokens, 128, case.num_experts)
    if message:
        rows, *_ = dispatch()
        assert rows.shape[-1] == 128
    else:
        message = message_of(dispatch)
    check_case(rank, case, buffer)
    return message


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ("hidden", "about the hidden size: 128 on rank 0; 256 on rank 1"),
        ("format", "about how values travel (use_fp8, round_scale, use_ue8m0, use_logfmt)"),
        ("function", "about the function called"),
        ("refusal", "rank 1 refused its low-latency dispatch (call 1)"),
    ],
)
def test_ranks_that_disagree(about: str, sentence: str) -> None:
    for rank, message in enumerate(shared_world(2).run(disagree, about)):
        if about == "refusal" and rank == 1:
            assert message.startswith("InvalidCall: x has 3 tokens, but num_max")
        else:
            assert message.startswith("Disagreement: ")
            assert sentence in message


def pass_wrong_things(context: RankContext, what: str) -> list[str]:
    """Rank 0 combines with a handle that cannot be, or asks for a row that is not there."""
    buffer = new_buffer(context)
    case = Case(tokens=(4,) * context.num_ranks, hidden=64)
    check_case(context.rank, case, buffer)
    given_ = inputs_of(case)[context.rank]
    topk_idx = torch.zeros(4, 1, dtype=torch.int64)
    weights = torch.ones(4, 1)
    received, _, handle, _, _ = buffer.low_latency_dispatch(
        given_.x, topk_idx, case.max_tokens, case.num_experts, use_fp8=False
    )
    if context.rank == 0:
        source, ranges, *sizes = handle
        if what == "row":
            topk_idx = torch.tensor([[0], [0], [1], [0]])
        elif what == "ranges":
            handle = (source, ranges.roll(1, 1).contiguous(), *sizes)
        elif what == "counts":
            handle = (source, ranges + 1000, *sizes)
        else:
            handle = (source.flip(1).contiguous(), ranges, *sizes)
    messages = [message_of(buffer.low_latency_combine, received, topk_idx, weights, handle)]
    for _ in range(2):
        dispatch = (given_.x, given_.topk_idx, case.max_tokens, case.num_experts)
        messages.append(message_of(buffer.low_latency_dispatch, *dispatch, use_fp8=False))
    check_case(context.rank, case, buffer)
    return messages


@pytest.mark.parametrize("what", ["ranges", "counts", "tokens"])
def test_a_handle_that_cannot_be(what: str) -> None:
    wrong, right = shared_world(2).run(pass_wrong_things, what)
    assert wrong[0] == right[0] == "nothing was raised"
    assert wrong[1].startswith("InvalidCall: the contents of the handle of low-latency combine (call 4)")
    assert right[1].startswith("Disagreement: rank 0 refused its low-latency combine (call 4)")
    assert wrong[2] == right[2] == "nothing was raised"


def test_a_row_that_is_not_there() -> None:
    wrong, right = shared_world(2).run(pass_wrong_things, "row")
    assert right == ["nothing was raised"] * 3
    assert wrong[0] == wrong[2] == "nothing was raised"
    assert wrong[1].startswith("InvalidCall: topk_idx sends token 2 to expert 1, which has no row of it")


def send_a_third_call(context: RankContext) -> str:
    buffer = buffer_for(context)
    case = Case(tokens=(3,) * context.num_ranks, hidden=64)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    sent = [on_cpu.dispatch_by_hook(buffer, case, context.rank) for _ in range(2)]
    message = message_of(on_cpu.dispatch_by_hook, buffer, case, context.rank)
    for *_, hook in sent:
        hook()
    check_case(context.rank, case, buffer)
    return message


def test_a_third_call_in_flight() -> None:
    for message in shared_world(2).run(send_a_third_call):
        assert "At most 2 low-latency calls may be in flight" in message


# Ranks that die, sleep or are masked


def patient_s(context: RankContext, least_s: float) -> float:
    """How long ranks wait for each other where one of them is to be late: the others never are."""
    case = Case(tokens=(5,) * context.num_ranks, hidden=128, travel="fp8")
    with new_buffer(context) as buffer:
        # Interpreted kernels take long: a few times as long as a pair of calls is long enough.
        return patience_s(context, lambda: check_case(context.rank, case, buffer), least_s, factor=3, turns=1)


def go_on_in_normal_mode(context: RankContext) -> list[str]:
    """Rank 1 does not come to a low-latency call; the others hear of it in a call of the other mode."""
    buffer = new_buffer(context, False, patient_s(context, 2), NVL_BYTES)
    case = Case(tokens=(3,) * context.num_ranks, hidden=128)
    given_ = inputs_of(case)[context.rank]
    messages = []
    if context.rank != 1:
        dispatch = (given_.x, given_.topk_idx, case.max_tokens, case.num_experts)
        layout = buffer.get_dispatch_layout(given_.topk_idx, case.num_experts)
        normal = partial(
            buffer.dispatch,
            given_.x,
            topk_idx=given_.topk_idx,
            topk_weights=torch.ones(given_.topk_idx.shape),
            num_tokens_per_rank=layout[0],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
        )
        calls = (partial(buffer.low_latency_dispatch, *dispatch), normal, normal)
        messages = [message_of(call) for call in calls]
    torch.distributed.barrier(context.group)
    return messages


def test_normal_mode_tells_what_low_latency_mode_waited_for(world: World) -> None:
    for rank, messages in enumerate(world.run(go_on_in_normal_mode, timeout=TIMEOUT_S)):
        if rank != 1:
            assert messages[0] == "nothing was raised"
            pattern = r"(WaitTimeout|PeerLost): .*rank 1\b.* in low-latency dispatch \(.*\), phase receive"
            assert re.match(pattern, messages[1]), messages
            assert messages[2].startswith("BufferBroken: ")


def die_at(context: RankContext, enable_shrink: bool) -> tuple[list[str], list[int]]:
    """Rank 1 dies before its second pair of calls. The others notice it: no deadline passes."""
    buffer = new_buffer(context, enable_shrink, 2 * TIMEOUT_S)
    case = Case(tokens=(4,) * context.num_ranks, hidden=128)
    check_case(context.rank, case, buffer)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    given_ = inputs_of(case)[context.rank]
    dispatch = (given_.x, given_.topk_idx, case.max_tokens, case.num_experts)
    messages = [message_of(buffer.low_latency_dispatch, *dispatch) for _ in range(2)]
    mask = torch.zeros(context.num_ranks, dtype=torch.int32)
    if enable_shrink:
        buffer.low_latency_query_mask_buffer(mask)
        for seed in range(3):
            check_case(context.rank, replace(case, seed=seed), buffer, frozenset([1]))
    return messages, mask.tolist()


def test_a_killed_rank(world: World) -> None:
    outcomes = world.gather(die_at, False, timeout=TIMEOUT_S)
    assert isinstance(outcomes[1], RankDied)
    for rank in (0, 2):
        messages, _ = outcomes[rank]
        assert messages[0] == "nothing was raised"
        assert messages[1].startswith("PeerLost: rank 1")


def die_before_a_slow_rank_comes(context: RankContext) -> str:
    """Rank 1 dies. Rank 2 stops waiting for it and for rank 0, which comes later, and fails for the same
    reason before rank 2 looks for its own."""
    buffer = new_buffer(context)
    case = Case(tokens=(4,) * context.num_ranks, hidden=128)
    check_case(context.rank, case, buffer)
    dist.barrier(group=context.group)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    given_ = inputs_of(case)[context.rank]
    dispatch = (given_.x, given_.topk_idx, case.max_tokens, case.num_experts)
    time.sleep(1.0 if context.rank == 0 else 0.0)
    assert message_of(buffer.low_latency_dispatch, *dispatch) == "nothing was raised"
    if context.rank == 2:
        wait_until_gone(buffer, 0)
    return message_of(buffer.low_latency_dispatch, *dispatch)


def test_who_died_is_named_and_not_who_failed_because_of_it(world: World) -> None:
    outcomes = world.gather(die_before_a_slow_rank_comes)
    for rank in (0, 2):
        pattern = rf"PeerLost: rank 1 \(pid \d+\) died while rank {rank} waited for its note"
        assert re.match(pattern, outcomes[rank]), outcomes


def test_the_others_go_on_without_a_killed_rank(world: World) -> None:
    outcomes = world.gather(die_at, True, timeout=TIMEOUT_S)
    assert isinstance(outcomes[1], RankDied)
    for rank in (0, 2):
        assert outcomes[rank] == (["nothing was raised"] * 2, [0, 1, 0])


def come_back(context: RankContext, by_hand: bool) -> list[list[int]]:
    """Rank 2 is masked, by hand or since it is late; the others go on, then all take it back. Twice."""
    buffer = new_buffer(context, True, 100 if by_hand else patient_s(context, 5))
    case = Case(tokens=(5, 0, 7), hidden=128, travel="fp8")
    masks = []

    def read_mask() -> None:
        mask = torch.full((3,), 7, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(mask)
        masks.append(mask.tolist())

    for _ in range(2):
        check_case(context.rank, case, buffer)
        torch.distributed.barrier(context.group)
        if by_hand and context.rank == 0:
            buffer.low_latency_update_mask_buffer(2, mask=True)
        torch.distributed.barrier(context.group)
        if context.rank != 2:
            for seed in range(2):
                check_case(context.rank, replace(case, seed=seed), buffer, frozenset([2]))
        if not by_hand:
            torch.distributed.barrier(context.group)
        if context.rank == 2:
            given_ = inputs_of(case)[2]
            dispatch = (given_.x, given_.topk_idx, case.max_tokens, case.num_experts)
            buffer.low_latency_dispatch(*dispatch)
            assert "go on without rank 2" in message_of(buffer.low_latency_dispatch, *dispatch)
            assert "go on without rank 2" in message_of(buffer.low_latency_dispatch, *dispatch)
        read_mask()
        torch.distributed.barrier(context.group)
        if by_hand:
            buffer.low_latency_clean_mask_buffer()
        else:
            buffer.low_latency_update_mask_buffer(2)
        read_mask()
        for seed in range(3):
            check_case(context.rank, replace(case, seed=seed), buffer)
        torch.distributed.barrier(context.group)
    return masks


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_rank_comes_back(world: World, by_hand: bool) -> None:
    for masks in world.run(come_back, by_hand, timeout=TIMEOUT_S):
        assert masks == [[0, 0, 1], [0, 0, 0]] * 2


def late(context: RankContext) -> list[str]:
    buffer = new_buffer(context, False, 0.5)
    case = Case(tokens=(3,) * context.num_ranks, hidden=128)
    given_ = inputs_of(case)[context.rank]
    dispatch = (given_.x, given_.topk_idx, case.max_tokens, case.num_experts)
    if context.rank == 1:
        time.sleep(2)
    messages = [message_of(buffer.low_latency_dispatch, *dispatch) for _ in range(3)]
    torch.distributed.barrier(context.group)
    return messages


def test_a_slow_rank(world: World) -> None:
    for rank, messages in enumerate(world.run(late)):
        # To rank 1, which comes later, the first call looks good.
        heard = messages[1 if rank != 1 else 2]
        assert heard.startswith(("WaitTimeout: ", "PeerLost: "))
        assert "note" in heard
        if rank != 1:
            assert messages[2].startswith("BufferBroken: ")
