"""Normal mode on GPUs, without a GPU: real processes whose kernels run in Triton's interpreter.

The host hears of what kernels find wrong at its next contact with the Buffer. A dispatch that has to find out
its rows is such a contact; a cached dispatch or a combine is one only for what happened before it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings

from anyep import Config
from anyep.buffer import Buffer
from anyep.modes.status import Phase
from tests.cases import NVL_BYTES, Case, buffer_for, check_case, delays
from tests.strategies import cases
from tests.world import RankContext, RankDied, World

# Not loaded here: ranks load this module, too, before they choose to interpret kernels.
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install 'anyep[cuda]'"
)

WINDOW_BYTES: tuple[int | None, ...] = (None,)
NUM_EXAMPLES = {1: 4, 2: 12, 3: 8}
POISON = 0xA5
FEW_SMS = Config(4)
"""The interpreter runs programs one after the other."""


def simulate(context: RankContext, timeout_s: str = "20") -> None:
    """From here on device "cuda" is the simulated GPU, with CPU tensors."""
    # Only in a rank: whoever loads kernels afterwards can do nothing but interpret them.
    from tests.simulated_gpu import use_simulated_gpu

    os.environ["ANYEP_TIMEOUT_S"] = timeout_s
    use_simulated_gpu()
    let_another_thread_raise_the_alarm()


def let_another_thread_raise_the_alarm() -> None:
    """The interpreter runs one kernel at a time: beside one that waits the host writes what another would."""
    from anyep.backends.cuda import facts
    from anyep.modes.gpu_talk import GpuTalk

    def forget(talk: Any, rank: int) -> None:
        given_up = int(talk.facts[facts.GIVEN_UP_AT] + rank * talk.facts[facts.FLAG_STRIDE])
        for offset, value in ((given_up, 1), (int(talk.facts[facts.ALARM_AT]), rank + 1)):
            talk.heap.tensor(offset, (1,), torch.int64).clamp_(min=value)

    GpuTalk.forget = forget  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    with ExitStack() as stack:
        opened = {num_ranks: stack.enter_context(World(num_ranks)) for num_ranks in NUM_EXAMPLES}
        for world in opened.values():
            world.run(simulate)
        yield opened


def new_buffer(context: RankContext) -> Buffer:
    return Buffer(context.group, NVL_BYTES, device="cuda")


def poison_windows(buffer: Buffer) -> None:
    """On every rank, before any rank goes on."""
    buffer.runtime.windows.fill_free(POISON)
    dist.barrier(group=buffer.group)


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


def hold(context: RankContext) -> None:
    """Results of several calls at once, freed in other orders."""
    buffer = new_buffer(context)
    windows = buffer.runtime.windows
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        held = {seed: good_dispatch(buffer, seed) for seed in order}
        right = {seed: received[0].clone() for seed, received in held.items()}
        for seed in order:
            assert all(torch.equal(held[other][0], right[other]) for other in held)
            # One view is enough to keep a window.
            last_row, handle = held[seed][0][-1], held.pop(seed)[4]
            used = windows.used_bytes
            poison_windows(buffer)
            assert torch.equal(last_row, right[seed][-1])
            del last_row
            assert windows.used_bytes < used
            again, *_ = buffer.dispatch(rows_of(buffer, seed), handle=handle, config=FEW_SMS)
            assert torch.equal(again, right[seed])
            del again
    assert windows.used_bytes == 0
    buffer.destroy()


def test_windows_are_held_by_results(worlds: dict[int, World]) -> None:
    worlds[3].run(hold)


# Wrong calls

TOKENS, HIDDEN, TOPK = 6, 32, 2
GOOD = Case((TOKENS,) * 3, hidden=HIDDEN)


def rows_of(buffer: Buffer, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + buffer.rank)
    return torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()


def good_arguments(buffer: Buffer, seed: int = 0, to_rank_0: bool = False) -> dict[str, Any]:
    """Neighbouring experts for each token: with 2 per rank, every token goes to one rank."""
    num_experts = 2 * buffer.group_size
    topk_idx = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % (2 if to_rank_0 else num_experts)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return {
        "x": rows_of(buffer, seed),
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(TOKENS, TOPK),
        "config": FEW_SMS,
    }


def good_dispatch(buffer: Buffer, seed: int = 0) -> tuple[Any, ...]:
    return buffer.dispatch(**good_arguments(buffer, seed))


def attempt(work: Callable[..., Any], *arguments: Any, **more: Any) -> str:
    """What it raises, in words."""
    try:
        work(*arguments, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def call_wrongly(
    context: RankContext, on_ranks: tuple[int, ...], change: dict[str, Any], again: int
) -> list[str]:
    """A dispatch with something else on some ranks; then good ones; then a whole case."""
    buffer = new_buffer(context)
    arguments = good_arguments(buffer)
    if context.rank in on_ranks:
        arguments |= change
    messages = [attempt(buffer.dispatch, **arguments)]
    messages += [attempt(good_dispatch, buffer) for _ in range(again)]
    check_case(context, GOOD, buffer)
    return messages


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.zeros(TOKENS, 4).bfloat16()}, "a row of 8 bytes is no multiple of 16"),
        ({"topk_idx": None}, "topk_weights is given without topk_idx: pass both or neither"),
        ({"num_tokens_per_rank": None}, "num_tokens_per_rank is missing"),
        (
            {"config": Config(46)},
            "num_sms is 46, but 3 ranks share a GPU of 132 SMs: at most 44 per rank can run at once;"
            " use a Config with num_sms=44, or fewer ranks per GPU",
        ),
    ],
)
def test_a_refused_dispatch(worlds: dict[int, World], change: dict[str, Any], sentence: str) -> None:
    outcomes = worlds[3].run(call_wrongly, (1,), change, 1)
    for rank, (first, second) in enumerate(outcomes):
        if rank == 1:
            assert first.startswith(f"InvalidCall: {sentence}")
        else:
            assert first.startswith("Disagreement: rank 1 refused its dispatch (call ")
            assert f"so rank {rank} cannot go on with its dispatch: {sentence}" in first
        assert second == "fine"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"x": torch.zeros(TOKENS, 2 * HIDDEN).bfloat16()},
            "about the bytes of a row (hidden size): 64 on ranks 0, 1; 128 on rank 2",
        ),
        (
            {"x": torch.zeros(TOKENS, HIDDEN).half()},
            "about the dtype: bfloat16 on ranks 0, 1; float16 on rank 2",
        ),
        ({"topk_idx": None, "topk_weights": None}, "about top-k: 2 on ranks 0, 1; 0 on rank 2"),
        ({"config": Config(8)}, "about the number of channels (num_sms // 2): 2 on ranks 0, 1; 4 on rank 2"),
        (
            {"config": Config(4, 6, 100)},
            "about the rows of a ring (config or num_nvl_bytes): 256 on ranks 0, 1; 100 on rank 2",
        ),
    ],
)
def test_ranks_that_disagree(worlds: dict[int, World], change: dict[str, Any], sentence: str) -> None:
    for first, second in worlds[3].run(call_wrongly, (2,), change, 1):
        assert first.startswith("Disagreement: the ranks disagree in call ")
        assert first.endswith(sentence)
        assert second == "fine"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"num_tokens_per_rank": torch.tensor([2, 2, 3]).int()},
            "num_tokens_per_rank and is_token_in_rank disagree about rank 2",
        ),
        (
            {"num_tokens_per_expert": torch.tensor([2, 2, 2, 9, 2, 2]).int()},
            "num_tokens_per_expert and topk_idx disagree about expert 3",
        ),
        (
            {"topk_idx": torch.arange(TOKENS * TOPK).view(TOKENS, TOPK).flip(0) % 6},
            "topk_idx and is_token_in_rank disagree whether token",
        ),
    ],
)
@pytest.mark.parametrize("worst", [0, 50])
def test_counts_that_contradict_each_other(
    worlds: dict[int, World], change: dict[str, Any], problem: str, worst: int
) -> None:
    outcomes = worlds[3].run(call_wrongly_in_the_worst_case, change, worst)
    for rank, messages in enumerate(outcomes):
        # Who waits for no counts hears of it at the next contact.
        at_once, later = messages if not worst else reversed(messages)
        assert later == "fine"
        if rank == 0:
            assert at_once.startswith(f"InvalidCall: {problem}")
            assert at_once.endswith("pass both from one get_dispatch_layout")
        else:
            assert at_once.startswith("Disagreement: rank 0 refused its dispatch (call ")
            assert at_once.endswith("its counts contradict its choices of experts")


def call_wrongly_in_the_worst_case(context: RankContext, change: dict[str, Any], worst: int) -> list[str]:
    """The same on rank 0, and all ranks say how many rows can arrive at most, or (0) do not."""
    buffer = new_buffer(context)
    arguments = good_arguments(buffer) | {"num_worst_tokens": worst}
    if context.rank == 0:
        arguments |= change
    messages = [attempt(buffer.dispatch, **arguments), attempt(good_dispatch, buffer)]
    check_case(context, GOOD, buffer)
    return messages


def call_something_else(context: RankContext, what: str) -> list[str]:
    """The last rank calls another function than the others, or the same with something wrong; then all call
    the right thing a few times."""
    buffer = new_buffer(context)
    rows, *_, handle, _ = good_dispatch(buffer)
    x = rows_of(buffer, 0)
    last = context.rank == context.num_ranks - 1
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: good_dispatch(buffer),
        "cached dispatch": lambda: buffer.dispatch(x, handle=handle, config=FEW_SMS),
        "combine": lambda: buffer.combine(rows, handle, config=FEW_SMS),
        "cached dispatch with a row less": lambda: buffer.dispatch(x[:-1], handle=handle, config=FEW_SMS),
        "combine with a row less": lambda: buffer.combine(rows[:-1], handle, config=FEW_SMS),
    }
    of_others, of_last = what.split(" / ")
    messages = [attempt(calls[of_last if last else of_others])]
    messages += [attempt(calls[of_others]) for _ in range(4)]
    check_case(context, GOOD, buffer)
    return messages


@pytest.mark.parametrize("function", ["cached dispatch", "combine"])
def test_a_refused_call_that_nobody_waits_for(worlds: dict[int, World], function: str) -> None:
    """The others hear of it at their next contact, which is done nevertheless: after it nothing is wrong."""
    outcomes = worlds[3].run(call_something_else, f"{function} / {function} with a row less")
    assert outcomes[2][0].startswith("InvalidCall: x has 5 rows")
    assert outcomes[2][1:] == ["fine"] * 4
    for rank in (0, 1):
        first, second, *others = outcomes[rank]
        assert first == "fine"
        assert second.startswith(f"Disagreement: rank 2 refused its {function} (call ")
        assert "x has 5 rows" in second
        assert others == ["fine"] * 3


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("dispatch / combine", "dispatch on ranks 0, 1; combine on rank 2"),
        ("dispatch / cached dispatch", "dispatch on ranks 0, 1; cached dispatch on rank 2"),
        ("combine / cached dispatch", "combine on ranks 0, 1; cached dispatch on rank 2"),
    ],
)
def test_ranks_that_call_different_functions(worlds: dict[int, World], what: str, sentence: str) -> None:
    for rank, messages in enumerate(worlds[3].run(call_something_else, what)):
        at_once = what.startswith("dispatch") and rank < 2
        heard = messages.pop(0 if at_once else 1)
        assert heard.startswith("Disagreement: the ranks disagree in call ")
        assert heard.endswith(f"about the function called: {sentence}")
        assert messages == ["fine"] * 4


def too_many_for_the_worst_case(context: RankContext) -> list[str]:
    buffer = new_buffer(context)
    arguments = good_arguments(buffer) | {"num_worst_tokens": 3 if context.rank == 1 else 99}
    poison_windows(buffer)
    rows, ids, weights, *_ = buffer.dispatch(**arguments)
    for part in (rows, weights, ids[ids != -1]):
        assert (part.view(torch.uint8) == POISON).all(), "something was written"
    messages = [attempt(good_dispatch, buffer) for _ in range(2)]
    check_case(context, GOOD, buffer)
    return messages


def test_more_rows_than_the_worst_case_allows(worlds: dict[int, World]) -> None:
    for first, second in worlds[3].run(too_many_for_the_worst_case):
        assert first.startswith(
            "InvalidCall: num_worst_tokens is 3 on rank 1, but more rows would arrive there: nothing was sent"
        )
        assert second == "fine"


def call_with_another_handle(context: RankContext, what: str) -> list[str]:
    """Rank 1 has a handle of another dispatch, or one that was changed."""
    buffer = new_buffer(context)
    rows, *_, handle, _ = good_dispatch(buffer)
    other_rows, *_, other_handle, _ = buffer.dispatch(**good_arguments(buffer, to_rank_0=True))
    if context.rank == 1 and what == "another":
        rows, handle = other_rows, other_handle
    if context.rank == 1 and what.startswith("send_head"):
        # Every token of it would be far outside.
        handle = (*handle[:5], handle[5] + 1000)
    if what.endswith("dispatch"):
        messages = [attempt(buffer.dispatch, rows_of(buffer, 0), handle=handle, config=FEW_SMS)]
    else:
        messages = [attempt(buffer.combine, rows, handle, config=FEW_SMS)]
    messages += [attempt(good_dispatch, buffer) for _ in range(2)]
    check_case(context, GOOD, buffer)
    return messages


def test_handles_of_different_dispatches(worlds: dict[int, World]) -> None:
    for first, second, third in worlds[3].run(call_with_another_handle, "another"):
        assert (first, third) == ("fine", "fine")
        pattern = (
            r"Disagreement: the ranks disagree in call \d+ about the routing in the handle: checksum \w+"
        )
        assert re.match(pattern + r" on ranks 0, 2; checksum \w+ on rank 1$", second)


@pytest.mark.parametrize("function", ["cached dispatch", "combine"])
def test_a_handle_with_rows_that_are_not_there(worlds: dict[int, World], function: str) -> None:
    outcomes = worlds[3].run(call_with_another_handle, f"send_head, {function}")
    assert outcomes[0] == outcomes[2] == ["fine"] * 3
    first, second, third = outcomes[1]
    assert (first, third) == ("fine", "fine")
    assert re.match(
        rf"InvalidCall: the handle of {function} \(call \d+\) does not fit together:"
        r" it names rows that rank \d does not have$",
        second,
    )


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
    assert worlds[3].run(call_with_many_sms) == [22, 22, 22]
    assert worlds[1].run(call_with_many_sms) == [50]


# Failures


@dataclass(frozen=True)
class Fault:
    """What happens to a rank when it begins a call: 1 is a dispatch, 2 a cached one, 3 a combine, 4 another
    dispatch, and so on."""

    call: int
    what: str
    rank: int = 1


@dataclass(frozen=True)
class Outcome:
    """How a rank's calls ended."""

    kind: str
    message: str
    seconds: float
    later: str
    status: str


@pytest.fixture
def world() -> Iterator[World]:
    """Three ranks of its own: what happens to them is nobody else's business."""
    with World(3) as fresh:
        yield fresh


def call_until_it_fails(context: RankContext, fault: Fault) -> Outcome:
    """Dispatches, cached dispatches and combines, over and over, until the fault has struck."""
    buffer = new_buffer(context)
    last = [time.monotonic()]

    def strike(call: Any, phase: Phase) -> None:
        last[0] = time.monotonic()
        if (context.rank, call.number) != (fault.rank, fault.call):
            return
        if fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.what == "raise":
            raise ValueError("the experts are on fire")
        elif fault.what == "sleep":
            time.sleep(2.5)

    buffer.runtime.conversation.between_steps = strike
    arguments = good_arguments(buffer)
    received: list[Any] = []
    calls: tuple[Callable[[], Any], ...] = (
        lambda: received.append(buffer.dispatch(**arguments)),
        lambda: buffer.dispatch(arguments["x"], handle=received[-1][4], config=FEW_SMS),
        lambda: buffer.combine(received[-1][0], received[-1][4], config=FEW_SMS),
    )
    try:
        for number in range(1, 13):
            if (context.rank, number, "destroy") == (fault.rank, fault.call, fault.what):
                time.sleep(0.2)  # so that the others wait
                buffer.destroy()
            calls[(number - 1) % 3]()
    except BaseException as error:
        seconds = time.monotonic() - last[0]
        later = attempt(buffer.dispatch, **arguments)
        status = "\n".join(map(str, buffer.status())) if buffer.runtime is not None else ""
        return Outcome(type(error).__name__, str(error), seconds, later, status)
    return Outcome("none", "", 0, "", "")


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_killed_rank(world: World, call: int) -> None:
    world.run(simulate)
    pids = world.pids
    outcomes = world.gather(call_until_it_fails, Fault(call, "kill"), timeout=30)
    assert isinstance(outcomes[1], RankDied)
    for rank in (0, 2):
        assert outcomes[rank].kind == "PeerLost", outcomes[rank]
        assert outcomes[rank].seconds < 3, "much less than the timeout"
        assert f"rank 1 (pid {pids[1]}) died while rank {rank} waited for its" in outcomes[rank].message
        assert outcomes[rank].later.startswith(
            "BufferBroken: this Buffer is broken since an earlier call: rank"
        )
        assert f"rank 1 (pid {pids[1]}) is dead" in outcomes[rank].status


@pytest.mark.parametrize("call", [1, 3])
def test_a_rank_that_raises(world: World, call: int) -> None:
    world.run(simulate)
    outcomes = world.gather(call_until_it_fails, Fault(call, "raise"), timeout=30)
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == ("ValueError" if rank == 1 else "PeerLost")
        assert "the experts are on fire" in outcome.message
        assert outcome.seconds < 3
        assert outcome.later.startswith("BufferBroken")
        assert "rank 1" in outcome.status
        assert "failed: " in outcome.status


@pytest.mark.parametrize(("call", "function"), [(1, "dispatch"), (2, "cached dispatch"), (6, "combine")])
def test_a_slow_rank(world: World, call: int, function: str) -> None:
    world.run(simulate, "1")
    outcomes = world.gather(call_until_it_fails, Fault(call, "sleep"), timeout=30)
    late = [outcome for outcome in outcomes if outcome.kind == "WaitTimeout"]
    assert late, outcomes
    for outcome in late:
        pattern = (
            rf"rank \d waited 1 s for the letter of rank 1 in {function} \(call {call}\), phase notify:"
            rf" counter {max(0, call - 2)} seen, {call} expected\. What rank 1 said last:"
            rf" rank 1 \(pid \d+\) is in {function} \(call {call}\), phase send, for .* s\."
            rf" If it only needs longer, set ANYEP_TIMEOUT_S"
        )
        assert re.match(pattern, outcome.message), outcome.message
    for outcome in outcomes:
        # The slow rank hears that its peers gave up; so does whoever was a little slower than the first.
        assert outcome.kind in ("WaitTimeout", "PeerLost")
        assert outcome.later.startswith("BufferBroken")
    assert outcomes[1].kind == "PeerLost"


@pytest.mark.parametrize("call", [1, 3])
def test_a_rank_that_destroys_its_buffer_while_others_wait(world: World, call: int) -> None:
    world.run(simulate)
    outcomes = world.gather(call_until_it_fails, Fault(call, "destroy"), timeout=30)
    assert outcomes[1].kind == "BufferBroken"
    assert outcomes[1].message == "this Buffer was destroyed: make a new one"
    for rank in (0, 2):
        assert outcomes[rank].kind == "PeerLost", outcomes[rank]
        assert outcomes[rank].seconds < 3
        assert "rank 1" in outcomes[rank].message
        assert f"destroyed its Buffer while rank {rank} waited for its" in outcomes[rank].message
        assert "has destroyed its Buffer" in outcomes[rank].status


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
