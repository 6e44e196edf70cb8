"""Normal mode between ranks that share a GPU, against the dense reference, bit for bit: thousands of times,
in CUDA graphs, beside other streams; and when something goes wrong.

ANYEP_SOAK_PAIRS is the number of dispatches and combines of the long test, of all sizes together.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import weakref
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.backends.cuda import postponed
from anyep.events import EventHandle, EventOverlap
from tests.support import gpu_scenarios, node_scenarios
from tests.support.cases import POISON, poison_windows
from tests.support.gpu import NEEDS_GPU, let_die_in_a_capture
from tests.support.gpu_oracle import Shape, Tally, Truth, experts
from tests.support.gpu_pairs import CONFIG, KINDS, check_pair, layout_of, soak
from tests.support.gpu_scenarios import (
    NUM_RANKS,
    SCENARIOS,
    attempt,
    device_of,
    good_dispatch,
    new_buffer,
    rows_of,
)
from tests.support.patience import scaled
from tests.support.places import Place
from tests.support.world import RankContext, World

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")]

TIMEOUT_S = 400.0
SOAK_PAIRS = int(os.environ.get("ANYEP_SOAK_PAIRS", "20000"))
SOAK_SHARES = {2: 0.5, 4: 0.3, 8: 0.2}
NUM_REPLAYS = 200
ON_NODES = pytest.mark.parametrize("num_nodes", [1, 2], ids=["", "nodes"])


@pytest.fixture(scope="module", params=[2, 4, 8])
def world(request: pytest.FixtureRequest) -> World:
    """All tests with so many ranks, before the next ones: to start them takes longer than to use them."""
    return Place("cuda", request.param).world()


# Thousands of calls


@pytest.mark.timeout(100 + SOAK_PAIRS // 50)
@ON_NODES
def test_soak(world: World, num_nodes: int) -> None:
    num_pairs = max(1, int(SOAK_PAIRS * SOAK_SHARES[world.num_ranks] / num_nodes))
    # Windows are small enough to be used again all the time; between nodes none may be missing.
    window_bytes = num_nodes << 21 if num_nodes > 1 else 1 << 20
    seconds = world.run(soak, num_pairs, window_bytes, num_pairs, num_nodes, timeout=90 + SOAK_PAIRS / 50)
    where = f"between {world.num_ranks} ranks on {num_nodes} nodes"
    print(f"{num_pairs} pairs {where}: {max(seconds) / num_pairs * 1e6:.0f} us each")


# Graphs


def capture(work: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of what `work` does; and what that returns, which each replay fills anew."""
    # Kernels are compiled and loaded before.
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = work()
    return graph, results


class Layer:
    """A dispatch, the experts, and a combine, captured in a graph; inputs are copied to where it reads."""

    def __init__(self, buffer: Buffer, truth: Truth, num_worst: int) -> None:
        self.buffer, self.num_worst = buffer, num_worst
        self.inputs = [part.clone() for part in (truth.x, truth.topk_idx, truth.topk_weights)]
        self.num_experts = truth.shape.num_experts
        self.graph, self.results = capture(self._run)

    def _run(self) -> tuple[torch.Tensor, ...]:
        x, topk_idx, topk_weights = self.inputs
        recv, ids, weights, _, handle, _ = self.buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_worst_tokens=self.num_worst,
            **layout_of(self.buffer, topk_idx, self.num_experts),
        )
        assert isinstance(recv, torch.Tensor)
        assert ids is not None
        assert weights is not None
        assert handle is not None
        outputs = experts(recv, self.buffer.rank)
        combined, combined_weights, _ = self.buffer.combine(
            outputs, handle, topk_weights=weights, config=CONFIG
        )
        assert combined_weights is not None
        return recv, ids, weights, combined, combined_weights

    def replay(self, truth: Truth) -> None:
        new_inputs = (truth.x, truth.topk_idx, truth.topk_weights)
        for place, part in zip(self.inputs, new_inputs, strict=True):
            place.copy_(part)
        for result in self.results:
            result.view(torch.uint8).fill_(POISON)
        self.graph.replay()

    def compare(self, truth: Truth, tally: Tally, number: int) -> None:
        recv, ids, weights, combined, combined_weights = self.results
        num_rows = truth.num_rows
        tally.compare(
            number,
            (recv[:num_rows], truth.rows),
            (ids[:num_rows], truth.local_ids),
            (ids[num_rows:], torch.full_like(ids[num_rows:], -1)),
            (weights[:num_rows], truth.local_weights),
            (combined, truth.combined),
            (combined_weights, truth.combined_weights),
        )


def replay_the_worst_case(context: RankContext, num_replays: int, num_nodes: int) -> None:
    """Rows and routing change from replay to replay; calls outside the graph come in between."""
    buffer = new_buffer(context, num_nodes)
    device, shape = device_of(buffer), Shape(context.num_ranks, num_nodes=num_nodes, is_full=True)
    truths = [Truth(shape, 100 + index, context.rank, device) for index in range(30)]
    layer = Layer(buffer, truths[0], shape.most_rows)
    chance, tally = random.Random(1), Tally(device)
    for number in range(num_replays):
        truth = chance.choice(truths)
        layer.replay(truth)
        layer.compare(truth, tally, number)
        if number % 10 == 9:
            check_pair(buffer, chance.choice(truths), chance.choice(KINDS), False, tally, number)
    tally.check("replays")
    torch.cuda.synchronize()
    dist.barrier(group=context.group)
    del layer
    buffer.destroy()


@ON_NODES
def test_a_graph_of_the_worst_case(world: World, num_nodes: int) -> None:
    world.run(replay_the_worst_case, NUM_REPLAYS, num_nodes, timeout=TIMEOUT_S)


def replay_along_a_handle(context: RankContext, num_replays: int, num_nodes: int) -> None:
    """A cached dispatch and a combine: only the rows change."""
    buffer = new_buffer(context, num_nodes)
    device, shape = device_of(buffer), Shape(context.num_ranks, num_nodes=num_nodes)
    truths = [Truth(shape, 7, context.rank, device, rows_seed=index) for index in range(30)]
    x = truths[0].x.clone()
    layout = layout_of(buffer, truths[0].topk_idx, shape.num_experts)
    _, *_, handle, _ = buffer.dispatch(x, **layout)
    assert handle is not None

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        recv, *_ = buffer.dispatch(x, handle=handle, config=CONFIG)
        assert isinstance(recv, torch.Tensor)
        combined, _, _ = buffer.combine(experts(recv, context.rank), handle, config=CONFIG)
        return recv, combined

    graph, (recv, combined) = capture(run)
    chance, tally = random.Random(2), Tally(device)
    for number in range(num_replays):
        truth = chance.choice(truths)
        x.copy_(truth.x)
        recv.fill_(torch.nan)
        combined.fill_(torch.nan)
        graph.replay()
        tally.compare(number, (recv, truth.rows), (combined, truth.combined))
        if number % 10 == 9:
            check_pair(buffer, chance.choice(truths), chance.choice(KINDS), True, tally, number)
    tally.check("replays")
    torch.cuda.synchronize()
    dist.barrier(group=context.group)
    del graph, recv, combined
    buffer.destroy()


@ON_NODES
def test_a_graph_along_a_handle(world: World, num_nodes: int) -> None:
    world.run(replay_along_a_handle, NUM_REPLAYS, num_nodes, timeout=TIMEOUT_S)


def replay_two_graphs(context: RankContext) -> None:
    """Each has windows of its own: what one returned stays while the other one is replayed."""
    buffer = new_buffer(context)
    device, shape = device_of(buffer), Shape(context.num_ranks, is_full=True)
    truths = [Truth(shape, 300 + index, context.rank, device) for index in range(10)]
    layers = [Layer(buffer, truths[0], shape.most_rows) for _ in range(2)]
    chance, tally = random.Random(3), Tally(device)
    for number in range(20):
        of_layers = [chance.choice(truths), chance.choice(truths)]
        for layer, truth in zip(layers, of_layers, strict=True):
            layer.replay(truth)
        for layer, truth in zip(layers, of_layers, strict=True):
            layer.compare(truth, tally, number)
    tally.check("replays")
    torch.cuda.synchronize()
    dist.barrier(group=context.group)
    del layer, layers
    buffer.destroy()


def test_two_graphs(world: World) -> None:
    world.run(replay_two_graphs, timeout=TIMEOUT_S)


def replay_with_too_many_rows(context: RankContext) -> list[str]:
    """A replay that goes wrong is heard of at the next contact; later ones are right."""
    buffer = new_buffer(context)
    # One expert per token, so that half of what could come suffices if not all go to one rank.
    device, shape = device_of(buffer), Shape(context.num_ranks, num_topk=1, is_full=True)
    num_worst, tally, messages = shape.most_rows // 2, Tally(device), []
    truths = [Truth(shape, 500 + index, context.rank, device) for index in range(60)]
    most = torch.tensor([truth.num_rows for truth in truths])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=context.group)
    truths = [truth for truth, rows in zip(truths, most.tolist(), strict=True) if rows <= num_worst]
    too_many = Truth(shape, 1, context.rank, device, all_to=1)
    layer = Layer(buffer, truths[0], num_worst)
    for number in range(6):
        truth = truths[number % len(truths)]
        layer.replay(truth)
        layer.compare(truth, tally, number)
        if number == 2:
            layer.replay(too_many)
            torch.cuda.synchronize()
            messages += [attempt(good_dispatch, buffer) for _ in range(2)]
    tally.check("replays")
    torch.cuda.synchronize()
    dist.barrier(group=context.group)
    del layer
    buffer.destroy()
    return messages


def test_a_replay_with_too_many_rows(world: World) -> None:
    for first, second in world.run(replay_with_too_many_rows, timeout=TIMEOUT_S):
        num_worst = Shape(world.num_ranks).most_rows // 2
        assert first.startswith(
            f"InvalidCall: num_worst_tokens is {num_worst} on rank 1, but more rows would arrive there"
        )
        assert second == "fine"


def capture_what_waits(context: RankContext) -> str:
    """A dispatch that has to find out its rows cannot be part of a graph; and nothing is broken by trying."""
    buffer = new_buffer(context)
    device, shape = device_of(buffer), Shape(context.num_ranks)
    truth, tally = Truth(shape, 7, context.rank, device), Tally(device)
    check_pair(buffer, truth, "counted", False, tally, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    message = "nothing was raised"
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        layout = layout_of(buffer, truth.topk_idx, shape.num_experts)
        try:
            buffer.dispatch(truth.x, **layout)
        except ValueError as error:
            message = str(error)
    del graph, layout
    dist.barrier(group=context.group)
    check_pair(buffer, truth, "cached", False, tally, 1)
    tally.check()
    buffer.destroy()
    return message


def test_a_graph_of_what_waits_is_refused(world: World) -> None:
    for message in world.run(capture_what_waits):
        assert message.startswith("a dispatch that waits for its counts cannot be captured in a CUDA graph")


def die_while_a_graph_is_captured(context: RankContext, what: str) -> None:
    """What dies then is freed later; the graph is not harmed. Nobody asked for it: garbage is collected at
    any time."""
    buffer = new_buffer(context)
    (rows, *_, handle, _), heap = good_dispatch(buffer), weakref.ref(buffer.runtime.device_control.heap)
    local = buffer.get_local_buffer_tensor(torch.float32)
    # Compiled now, and not when it has to be under way.
    buffer.combine(rows, handle, config=gpu_scenarios.FEW_SMS)
    torch.cuda.synchronize()
    dist.barrier(group=context.group)
    if what == "results of a destroyed Buffer":
        buffer.destroy()
        assert not postponed._waiting
        dying: list[Any] = [rows, handle, local]
        del buffer
    elif what == "a Buffer":
        dying = [buffer, rows, handle, local]
        del buffer
    else:
        # It is closed by a thread of its own, when its last call is over: that is while we capture.
        torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]
        buffer.combine(rows, handle, config=gpu_scenarios.FEW_SMS)
        dying = [rows, handle, local]
        del buffer
    del rows, handle, local
    messages: list[str] = []

    def make_another() -> None:
        try:
            new_buffer(context)
        except ValueError as error:
            messages.append(str(error))

    assert let_die_in_a_capture(dying, make_another) == (what == "a Buffer in a call")
    assert messages == ["a Buffer cannot be made while a CUDA graph is captured: make it before"]
    assert (heap() is None) is (what == "results of a destroyed Buffer")
    assert postponed._waiting
    with new_buffer(context) as other:
        assert heap() is None
        assert not postponed._waiting
        device = device_of(other)
        truth, tally = Truth(Shape(context.num_ranks), 7, context.rank, device), Tally(device)
        check_pair(other, truth, "cached", False, tally, 0)
        tally.check()
        dist.barrier(group=context.group)


@pytest.mark.parametrize("what", ["results of a destroyed Buffer", "a Buffer", "a Buffer in a call"])
def test_what_dies_while_a_graph_is_captured(world: World, what: str) -> None:
    world.run(die_while_a_graph_is_captured, what, timeout=TIMEOUT_S)


# Streams


def call_beside_other_work(context: RankContext, num_rounds: int) -> None:
    """x is made on one stream, the call comes from a second one, and a third one reads the results; what they
    are made of is dropped at once, and its memory used for something else."""
    buffer = new_buffer(context)
    device, shape = device_of(buffer), Shape(context.num_ranks, max_tokens=64, hidden=1024)
    chance, tally = random.Random(context.rank), Tally(device)
    truths = [Truth(shape, 700 + index, context.rank, device) for index in range(8)]
    makes, calls, reads = (torch.cuda.Stream() for _ in range(3))  # type: ignore[no-untyped-call]
    numbers = torch.ones(1 << 20, device=device)
    torch.cuda.synchronize()

    def compute() -> None:
        """Work of the user's on the current stream."""
        torch.cuda._sleep(chance.randint(0, 200_000))  # type: ignore[no-untyped-call]
        (numbers * 2).sum()

    def make(source: torch.Tensor) -> tuple[torch.Tensor, EventOverlap]:
        """A copy that is ready much later."""
        with torch.cuda.stream(makes):
            torch.cuda._sleep(chance.randint(0, 1_000_000))  # type: ignore[no-untyped-call]
            return source.clone(), EventOverlap(EventHandle())

    def spoil(like: torch.Tensor) -> None:
        with torch.cuda.stream(makes):
            torch.full_like(like, torch.nan)

    for number in range(num_rounds):
        truth = truths[number % len(truths)]
        x, made = make(truth.x)
        with torch.cuda.stream(calls):
            layout = layout_of(buffer, truth.topk_idx, shape.num_experts)
            compute()
            recv, ids, weights, _, handle, received = buffer.dispatch(
                x,
                topk_idx=truth.topk_idx,
                topk_weights=truth.topk_weights,
                num_worst_tokens=shape.most_rows if number % 2 else 0,
                previous_event=made,
                async_finish=True,
                allocate_on_comm_stream=number % 4 > 1,
                **layout,
            )
            compute()
        del x, layout
        spoil(truth.x)
        assert isinstance(recv, torch.Tensor)
        assert weights is not None
        assert handle is not None
        with torch.cuda.stream(reads):
            received.current_stream_wait()
            rows = truth.num_rows
            tally.compare(number, (recv[:rows], truth.rows), (weights[:rows], truth.local_weights))
            outputs = experts(recv, context.rank)
            ready = buffer.capture()
        with torch.cuda.stream(calls):
            compute()
            combined, _, done = buffer.combine(
                outputs,
                handle,
                config=CONFIG,
                previous_event=ready,
                async_finish=True,
                allocate_on_comm_stream=number % 4 > 1,
            )
            compute()
        with torch.cuda.stream(reads):
            del outputs, recv, ids, weights, handle
            torch.full((shape.most_rows, shape.hidden), torch.nan, device=device, dtype=torch.bfloat16)
            done.current_stream_wait()
            torch.cuda._sleep(chance.randint(0, 1_000_000))  # type: ignore[no-untyped-call]
            tally.compare(number, (combined, truth.combined))
            # Torch knows of the streams that it was called from, and of ours, but not of this one.
            combined.record_stream(reads)
        del combined
    torch.cuda.synchronize()
    tally.check("rounds")
    dist.barrier(group=context.group)
    buffer.destroy()


def test_other_streams(world: World) -> None:
    world.run(call_beside_other_work, 48, timeout=TIMEOUT_S)


# Windows


def test_windows_are_held_by_results(world: World) -> None:
    world.run(gpu_scenarios.hold_results)


def grow(context: RankContext, num_nodes: int) -> list[int]:
    """Calls that need more and more; the windows that there are after each."""
    from anyep import gpu_connection

    usual = gpu_connection.FIRST_WINDOW_BYTES
    gpu_connection.FIRST_WINDOW_BYTES = 2 << 20  # type: ignore[misc]
    try:
        buffer = new_buffer(context, num_nodes)
    finally:
        gpu_connection.FIRST_WINDOW_BYTES = usual  # type: ignore[misc]
    device, num_bytes, tally = device_of(buffer), [], Tally(device_of(buffer))
    for number, tokens in enumerate((16, 512, 512, 2048, 16)):
        shape = Shape(context.num_ranks, tokens, 1024, num_nodes=num_nodes, is_full=True)
        truth = Truth(shape, number, context.rank, device, all_to=0)
        poison_windows(buffer)
        # Only a dispatch that finds out its rows adds windows: others have to get along with what is there.
        check_pair(buffer, truth, "cached", True, tally, number)
        num_bytes.append(buffer.runtime.windows.num_bytes)
    tally.check()
    dist.barrier(group=context.group)
    buffer.destroy()
    return num_bytes


@ON_NODES
def test_windows_grow(world: World, num_nodes: int) -> None:
    first, *others = world.run(grow, num_nodes)
    assert others == [first] * len(others)
    assert first[0] == 2 << 20
    # 512 tokens of each rank are 1 MiB; all of them go to rank 0.
    assert first[0] < first[1] == first[2] < first[3] == first[4]


# What goes wrong


@pytest.fixture
def three_ranks() -> World:
    return Place("cuda", NUM_RANKS).world()


@pytest.mark.parametrize("name", SCENARIOS)
def test_wrong_calls(three_ranks: World, name: str) -> None:
    SCENARIOS[name].check(three_ranks)


@pytest.mark.parametrize("name", node_scenarios.SCENARIOS)
def test_wrong_calls_between_nodes(name: str) -> None:
    node_scenarios.SCENARIOS[name].check(Place("cuda", node_scenarios.NUM_RANKS).world())


def replay_after_a_failure(context: RankContext) -> str:
    """Rank 1 fails before anything of a call is launched, and replays a graph of the same call instead."""
    buffer = new_buffer(context)
    x = rows_of(buffer, 1)
    rows, *_, handle, _ = good_dispatch(buffer)
    again = partial(buffer.dispatch, x, handle=handle, config=gpu_scenarios.FEW_SMS)
    graph, _ = capture(again)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier(group=context.group)
    if context.rank == 1:
        gpu_scenarios.fail_from_now_on(buffer)
        outcome = attempt(again)
        graph.replay()
        torch.cuda.synchronize()
    else:
        time.sleep(0.5)
        assert attempt(again) == "fine", "it is heard of in the next call"
        outcome = attempt(buffer.combine, rows, handle, config=gpu_scenarios.FEW_SMS)
    dist.barrier(group=context.group)
    return outcome


def test_a_graph_replayed_after_a_failure(three_ranks: World) -> None:
    for rank, outcome in enumerate(three_ranks.run(replay_after_a_failure)):
        assert outcome.startswith("ValueError" if rank == 1 else "PeerLost: rank 1 "), outcome
        assert "the experts are on fire" in outcome


def wait_in_vain(context: RankContext) -> tuple[str, str, float]:
    """Rank 0 is interrupted while it waits for rank 2; rank 1 waits as well. Its kernels wait already in the
    call before, and with them the stream that it calls from."""
    gpu_scenarios.load_kernels(context)
    buffer = new_buffer(context)
    interrupted = [0.0]
    # Now, since what torch copies to a GPU waits for the caller's stream, and cannot be interrupted.
    arguments = gpu_scenarios.good_arguments(buffer)
    rows, *_, handle, _ = buffer.dispatch(**arguments)
    torch.cuda.synchronize()
    dist.barrier(group=context.group)
    if context.rank == 2:
        time.sleep(1.5)
    if context.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupt() -> None:
            interrupted[0] = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(0.4, interrupt).start()
    try:
        buffer.combine(rows, handle, config=gpu_scenarios.FEW_SMS)
        for _ in range(2):
            buffer.dispatch(**arguments)
            torch.cuda.synchronize()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - interrupted[0]
    return "none", "", 0.0


def test_ctrl_c_out_of_a_wait_for_two_calls(three_ranks: World) -> None:
    outcomes = three_ranks.run(wait_in_vain)
    kind, _, seconds = outcomes[0]
    assert kind == "KeyboardInterrupt"
    assert seconds < scaled(0.5)
    for kind, message, _ in outcomes[1:]:
        assert kind == "PeerLost"
        assert "rank 0" in message
