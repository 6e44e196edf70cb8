"""What may go wrong in normal mode on GPUs, as data: what ranks call, and what each of them must hear.

Run on the simulated GPU and on a real one, between three ranks. The host hears of what kernels find wrong at
its next contact with the Buffer. A dispatch that has to find out its rows is such a contact; a cached
dispatch or a combine is one only for what happened before it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from anyep import Config
from anyep.api.buffer import Buffer
from anyep.core.calls import Phase
from tests.support.cases import NVL_BYTES, POISON, RDMA_BYTES, Case, check_case, poison_windows
from tests.support.world import RankContext, World

NUM_RANKS = 3
TOKENS, HIDDEN, TOPK = 6, 32, 2
GOOD = Case((TOKENS,) * NUM_RANKS, hidden=HIDDEN)
FEW_SMS = Config(4)
"""Triton's interpreter runs programs one after the other."""


def new_buffer(context: RankContext, num_nodes: int = 1) -> Buffer:
    if num_nodes == 1:
        return Buffer(context.group, NVL_BYTES, device="cuda")
    per_node = context.num_ranks // num_nodes
    return Buffer(context.group, NVL_BYTES, RDMA_BYTES, device="cuda", ranks_per_node=per_node)


def device_of(buffer: Buffer) -> str:
    """Where a Buffer's tensors are: the simulated GPU has the CPU's."""
    return str(buffer.runtime.device_control.gpu.device)


def rows_of(buffer: Buffer, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + buffer.rank)
    return torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().to(device_of(buffer))


def good_arguments(buffer: Buffer, seed: int = 0, to_rank_0: bool = False) -> dict[str, Any]:
    """Neighbouring experts for each token: with 2 per rank, every token goes to one rank."""
    device, num_experts = device_of(buffer), 2 * buffer.group_size
    choices = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % (2 if to_rank_0 else num_experts)
    topk_idx = choices.to(device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return {
        "x": rows_of(buffer, seed),
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(TOKENS, TOPK, device=device),
        "config": FEW_SMS,
    }


def good_dispatch(buffer: Buffer, seed: int = 0) -> tuple[Any, ...]:
    return buffer.dispatch(**good_arguments(buffer, seed))


def attempt(work: Callable[..., Any], *arguments: Any, **more: Any) -> str:
    """What it raises, in words. Kernels are done then: what they found wrong is heard of in the next call."""
    try:
        work(*arguments, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return "fine"


@contextmanager
def warnings_heard() -> Iterator[list[str]]:
    """What this rank's log says meanwhile."""
    heard: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("anyep")
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield heard
    finally:
        log.removeHandler(handler)


def closing_threads() -> list[threading.Thread]:
    """They wait for the last calls of Buffers that were dropped."""
    return [thread for thread in threading.enumerate() if thread.name == "anyep-close"]


# Wrong calls


@dataclass(frozen=True)
class Scenario:
    """What ranks do, and for each rank the patterns of what it hears, call by call."""

    calls: Callable[..., list[str]]
    arguments: tuple[Any, ...]
    patterns: Callable[[int], list[str]]

    def check(self, world: World) -> None:
        for rank, messages in enumerate(world.run(self.calls, *self.arguments)):
            patterns = self.patterns(rank)
            assert len(messages) == len(patterns), messages
            for message, pattern in zip(messages, patterns, strict=True):
                assert re.fullmatch(pattern, message), f"rank {rank}: {messages}"


def dispatch_wrongly(context: RankContext, on_rank: int, change: dict[str, Any]) -> list[str]:
    """A dispatch with something else on one rank, then a good one; then a whole case."""
    buffer = new_buffer(context)
    arguments = good_arguments(buffer)
    if context.rank == on_rank:
        device = device_of(buffer)
        arguments |= {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in change.items()
        }
    worst = {"num_worst_tokens": change["num_worst_tokens"]} if "num_worst_tokens" in change else {}
    messages = [attempt(buffer.dispatch, **(arguments | worst)), attempt(good_dispatch, buffer)]
    check_case(context, GOOD, buffer, device_of(buffer))
    buffer.destroy()
    return messages


def refused(change: dict[str, Any], pattern: str) -> Scenario:
    """Rank 1 refuses its dispatch; the others hear of it at once."""

    def patterns(rank: int) -> list[str]:
        if rank == 1:
            return [f"InvalidCall: {pattern}.*", "fine"]
        return [
            rf"Disagreement: rank 1 refused its dispatch \(call 1\), so rank {rank} cannot go on with its"
            rf" dispatch: {pattern}.*",
            "fine",
        ]

    return Scenario(dispatch_wrongly, (1, change), patterns)


def different(change: dict[str, Any], sentence: str) -> Scenario:
    """Rank 2 passes something else than the others; all hear of it at once."""
    pattern = f"Disagreement: the ranks disagree in call 1 about {re.escape(sentence)}"
    return Scenario(dispatch_wrongly, (2, change), lambda rank: [pattern, "fine"])


def contradictory(change: dict[str, Any], problem: str, worst: int = 0) -> Scenario:
    """Rank 0's counts contradict each other. Who waits for no counts hears of it at the next contact."""
    if worst:
        change = change | {"num_worst_tokens": worst}

    def patterns(rank: int) -> list[str]:
        heard = (
            f"InvalidCall: {problem}: pass both from one get_dispatch_layout"
            if rank == 0
            else r"Disagreement: rank 0 refused its dispatch \(call 1\):"
            " its counts contradict its choices of experts"
        )
        return ["fine", heard] if worst else [heard, "fine"]

    return Scenario(dispatch_wrongly, (0, change), patterns)


def call_something_else(context: RankContext, of_others: str, of_last: str) -> list[str]:
    """The last rank calls something else than the others; then all call the right thing a few times."""
    buffer = new_buffer(context)
    rows, *_, handle, _ = good_dispatch(buffer)
    x = rows_of(buffer, 0)
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: good_dispatch(buffer),
        "cached dispatch": lambda: buffer.dispatch(x, handle=handle, config=FEW_SMS),
        "combine": lambda: buffer.combine(rows, handle, config=FEW_SMS),
        "cached dispatch with a row less": lambda: buffer.dispatch(x[:-1], handle=handle, config=FEW_SMS),
        "combine with a row less": lambda: buffer.combine(rows[:-1], handle, config=FEW_SMS),
    }
    is_last = context.rank == context.num_ranks - 1
    messages = [attempt(calls[of_last if is_last else of_others])]
    messages += [attempt(calls[of_others]) for _ in range(4)]
    check_case(context, GOOD, buffer, device_of(buffer))
    buffer.destroy()
    return messages


def other_functions(of_others: str, of_last: str) -> Scenario:
    """A dispatch hears of it at once, other calls at the next contact."""
    names = f"{of_others} on ranks 0, 1; {of_last} on rank 2"
    pattern = f"Disagreement: the ranks disagree in call 2 about the function called: {names}"

    def patterns(rank: int) -> list[str]:
        at_once = of_others == "dispatch" and rank < 2
        return [pattern, *["fine"] * 4] if at_once else ["fine", pattern, *["fine"] * 3]

    return Scenario(call_something_else, (of_others, of_last), patterns)


def refused_later(function: str) -> Scenario:
    """The others hear of it at their next contact. That call is done nevertheless: after it all is well."""

    def patterns(rank: int) -> list[str]:
        sentence = r"x has 5 rows, but the handle('s dispatch gave| was made for) 6"
        if rank == 2:
            return [f"InvalidCall: {sentence}", *["fine"] * 4]
        heard = rf"Disagreement: rank 2 refused its {function} \(call 2\), so rank {rank} .*: {sentence}"
        return ["fine", heard, *["fine"] * 3]

    return Scenario(call_something_else, (function, f"{function} with a row less"), patterns)


def too_many_for_the_worst_case(context: RankContext) -> list[str]:
    buffer = new_buffer(context)
    arguments = good_arguments(buffer) | {"num_worst_tokens": 3 if context.rank == 1 else 99}
    poison_windows(buffer)
    rows, ids, weights, *_ = buffer.dispatch(**arguments)
    for part in (rows, weights, ids[ids != -1]):
        assert (part.view(torch.uint8) == POISON).all(), "something was written"
    messages = [attempt(good_dispatch, buffer) for _ in range(2)]
    check_case(context, GOOD, buffer, device_of(buffer))
    buffer.destroy()
    return messages


TOO_MANY = (
    "InvalidCall: num_worst_tokens is 3 on rank 1, but more rows would arrive there: nothing was sent;"
    " pass at least the largest number of rows that can arrive"
)


def call_with_another_handle(context: RankContext, function: str, handle_of: str) -> list[str]:
    """Rank 1 has a handle of another dispatch, or one that names rows far outside."""
    buffer = new_buffer(context)
    rows, *_, handle, _ = good_dispatch(buffer)
    other_rows, *_, other_handle, _ = buffer.dispatch(**good_arguments(buffer, to_rank_0=True))
    if context.rank == 1 and handle_of == "another dispatch":
        rows, handle = other_rows, other_handle
    elif context.rank == 1:
        handle = (*handle[:5], handle[5] + 1000)
    if function == "combine":
        messages = [attempt(buffer.combine, rows, handle, config=FEW_SMS)]
    else:
        messages = [attempt(buffer.dispatch, rows_of(buffer, 0), handle=handle, config=FEW_SMS)]
    messages += [attempt(good_dispatch, buffer) for _ in range(2)]
    check_case(context, GOOD, buffer, device_of(buffer))
    buffer.destroy()
    return messages


def other_routing(function: str) -> Scenario:
    pattern = (
        r"Disagreement: the ranks disagree in call 3 about the routing in the handle:"
        r" checksum \w+ on ranks 0, 2; checksum \w+ on rank 1"
    )
    return Scenario(
        call_with_another_handle, (function, "another dispatch"), lambda rank: ["fine", pattern, "fine"]
    )


def rows_far_outside(function: str) -> Scenario:
    pattern = (
        r"Disagreement: the ranks disagree in call 3 about the routing in the handle: the rows that rank 1"
        r" sent to rank 0 are of other tokens, or in other channels, in the handle of rank 1 than in that of"
        r" rank 0; pass the handles of one dispatch on all ranks"
    )
    return Scenario(call_with_another_handle, (function, "nowhere"), lambda rank: ["fine", pattern, "fine"])


PLACES = torch.arange(TOKENS * TOPK, dtype=torch.int64, device="cpu").view(TOKENS, TOPK)
IDS_OF_OTHERS = (PLACES % (2 * NUM_RANKS)).roll(1, 0)
WRONG_RANKS = {"num_tokens_per_rank": torch.tensor([2, 2, 3]).int()}
WRONG_EXPERTS = {"num_tokens_per_expert": torch.tensor([2, 2, 2, 9, 2, 2]).int()}
SCENARIOS = {
    "rows of 8 bytes": refused(
        {"x": torch.zeros(TOKENS, 4).bfloat16()}, "a row of 8 bytes is no multiple of 16"
    ),
    "weights alone": refused(
        {"topk_idx": None}, "topk_weights is given without topk_idx: pass both or neither"
    ),
    "no counts": refused({"num_tokens_per_rank": None}, "num_tokens_per_rank is missing"),
    "another hidden size": different(
        {"x": torch.zeros(TOKENS, 2 * HIDDEN).bfloat16()},
        "the hidden size: 32 on ranks 0, 1; 64 on rank 2",
    ),
    "a wider dtype": different(
        {"x": torch.zeros(TOKENS, HIDDEN)}, "the dtype: bfloat16 on ranks 0, 1; float32 on rank 2"
    ),
    "a wider dtype and no choices": different(
        {"x": torch.zeros(TOKENS, HIDDEN), "topk_idx": None, "topk_weights": None},
        "the dtype: bfloat16 on ranks 0, 1; float32 on rank 2, and about top-k: 2 on ranks 0, 1; 0 on rank 2",
    ),
    "another dtype": different(
        {"x": torch.zeros(TOKENS, HIDDEN).half()}, "the dtype: bfloat16 on ranks 0, 1; float16 on rank 2"
    ),
    "no choices": different({"topk_idx": None, "topk_weights": None}, "top-k: 2 on ranks 0, 1; 0 on rank 2"),
    "other channels": different(
        {"config": Config(8)}, "the number of channels (num_sms // 2): 2 on ranks 0, 1; 4 on rank 2"
    ),
    "other rings": different(
        {"config": Config(4, 6, 100)},
        "the rows of a ring (config, num_nvl_bytes or num_rdma_bytes): 256 on ranks 0, 1; 100 on rank 2",
    ),
    "contradictory ranks": contradictory(
        WRONG_RANKS, "num_tokens_per_rank and is_token_in_rank disagree about rank 2"
    ),
    "contradictory experts": contradictory(
        WRONG_EXPERTS, "num_tokens_per_expert and topk_idx disagree about expert 3"
    ),
    "contradictory choices": contradictory(
        {"topk_idx": IDS_OF_OTHERS},
        r"topk_idx and is_token_in_rank disagree whether token \d goes to rank \d",
    ),
    "contradictory experts in the worst case": contradictory(
        WRONG_EXPERTS, "num_tokens_per_expert and topk_idx disagree about expert 3", worst=50
    ),
    "a refused cached dispatch": refused_later("cached dispatch"),
    "a refused combine": refused_later("combine"),
    "dispatch and combine": other_functions("dispatch", "combine"),
    "dispatch and cached dispatch": other_functions("dispatch", "cached dispatch"),
    "combine and cached dispatch": other_functions("combine", "cached dispatch"),
    "more rows than the worst case allows": Scenario(
        too_many_for_the_worst_case, (), lambda rank: [TOO_MANY, "fine"]
    ),
    "a handle of another dispatch": other_routing("cached dispatch"),
    "a combine with a handle of another dispatch": other_routing("combine"),
    "a handle with rows far outside": rows_far_outside("cached dispatch"),
    "a combine with a handle with rows far outside": rows_far_outside("combine"),
}


# Failures


def load_kernels(context: RankContext) -> None:
    """What is compiled takes longer than some ranks wait."""
    if not torch.cuda.is_available():
        return
    usual = os.environ.pop("ANYEP_TIMEOUT_S", None)
    buffer = new_buffer(context)
    if usual is not None:
        os.environ["ANYEP_TIMEOUT_S"] = usual
    x = rows_of(buffer, 0)
    *_, handle, _ = good_dispatch(buffer)
    rows, *_ = buffer.dispatch(x, handle=handle, config=FEW_SMS)
    buffer.combine(rows, handle, config=FEW_SMS)
    torch.cuda.synchronize()
    dist.barrier(group=context.group)
    buffer.destroy()


def fail_from_now_on(buffer: Buffer) -> None:
    """Let this rank's host fail in its next call, before anything of that is launched."""

    def strike(call: Any, phase: Phase) -> None:
        raise ValueError("the experts are on fire")

    buffer.runtime.control.between_steps = strike


def wait_until_gone(buffer: Buffer, rank: int) -> None:
    """Until it is dead, has failed, or has destroyed its Buffer after that."""
    deadline = time.monotonic() + 30
    while buffer.status()[rank].state == "alive" and buffer.status()[rank].alive:
        assert time.monotonic() < deadline, buffer.status()
        time.sleep(0.02)


# Windows


def hold_results(context: RankContext) -> None:
    """Results of several calls at once, freed in other orders."""
    buffer = new_buffer(context)
    windows = buffer.runtime.windows
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        held = {seed: good_dispatch(buffer, seed) for seed in order}
        right = {seed: received[0].clone() for seed, received in held.items()}
        for seed in order:
            assert all(torch.equal(held[other][0], right[other]) for other in held)
            # One view is enough to keep a window.
            last_row, handle = held[seed][0][-1:], held.pop(seed)[4]
            used = windows.used_bytes
            poison_windows(buffer)
            assert torch.equal(last_row, right[seed][-1:])
            del last_row
            # To some of many ranks no row comes, and they hold nothing.
            assert (windows.used_bytes < used) is bool(len(right[seed]))
            again, *_ = buffer.dispatch(rows_of(buffer, seed), handle=handle, config=FEW_SMS)
            assert torch.equal(again, right[seed])
            del again
    assert windows.used_bytes == 0
    buffer.destroy()
