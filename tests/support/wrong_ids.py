"""Top-k ids that are neither an expert nor -1: every call that takes ids refuses them, on every device.

Each function is run by all ranks; rank 1 passes a wrong id. It returns what each rank hears, call by call.
On a GPU it is heard where the host waits, or at the next contact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyep.api.buffer import Buffer
from tests.support import cases, low_latency_cases
from tests.support.places import Place, tensor_device
from tests.support.world import RankContext

WRONG_RANK = 1
TOKENS, TOPK, HIDDEN, LOCAL_EXPERTS = 5, 3, 128, 2
TOKEN, COLUMN = 3, 2
"""Where the first wrong id is; another one follows."""
VALUES = (-2, 6, 2**32 + 1, -(2**63), 2**63 - 1)


def sentence(value: int, num_ranks: int) -> str:
    return (
        f"InvalidCall: topk_idx is {value} for token {TOKEN} in column {COLUMN}: it must be 0 to"
        f" {LOCAL_EXPERTS * num_ranks - 1}, or -1 for no expert"
    )


def ids_of(context: RankContext, value: int | None) -> torch.Tensor:
    ids = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % (LOCAL_EXPERTS * context.num_ranks)
    ids[0, 1] = -1
    if value is not None and context.rank == WRONG_RANK:
        ids[TOKEN, COLUMN], ids[TOKENS - 1, 0] = value, 99
    return ids.to(tensor_device())


def heard(work: Callable[[], Any]) -> str:
    """What is raised. Kernels are done then."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return "fine"


def rows() -> torch.Tensor:
    return torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=tensor_device())


class Calls:
    """The calls of one rank; ids are right unless a wrong value is given."""

    def __init__(self, context: RankContext, buffer: Buffer) -> None:
        self.context, self.buffer = context, buffer
        self.num_experts = LOCAL_EXPERTS * context.num_ranks

    def layout(self, value: int | None = None, wait: bool = True, **more: Any) -> Any:
        ids = ids_of(self.context, value)
        *parts, event = self.buffer.get_dispatch_layout(ids, self.num_experts, **more)
        if wait:
            event.current_stream_wait()
        return parts

    def dispatch(self, value: int | None = None, counts: Any = None, **more: Any) -> Any:
        per_rank, per_node, per_expert, in_rank = counts or self.layout()
        ids = ids_of(self.context, value)
        *found, event = self.buffer.dispatch(
            rows(),
            None,
            per_rank,
            per_node,
            in_rank,
            per_expert,
            ids,
            torch.ones(ids.shape, device=ids.device),
            **more,
        )
        event.current_stream_wait()
        return found

    def good(self) -> None:
        """A dispatch and a combine that must give the right sums."""
        received, _, _, _, handle = self.dispatch()
        combined, _, event = self.buffer.combine(received, handle)
        event.current_stream_wait()
        ids = ids_of(self.context, None)
        ranks = [
            len({expert // LOCAL_EXPERTS for expert in chosen if expert >= 0}) for chosen in ids.tolist()
        ]
        assert combined[:, 0].tolist() == ranks


def refuse_in_normal_mode(
    context: RankContext, value: int, how: dict[str, Any], names: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    """By name (all, unless some are given): what is heard of a wrong call, and of the next ones."""
    calls = Calls(context, cases.buffer_for(context, None, **how))
    worst = {"num_worst_tokens": TOKENS * context.num_ranks}
    wrong_calls: dict[str, Callable[[], Any]] = {
        "layout": lambda: calls.layout(value),
        "asynchronous layout": lambda: calls.layout(value, async_finish=True),
        "dispatch": lambda: calls.dispatch(value),
        "asynchronous dispatch": lambda: calls.dispatch(value, async_finish=True),
        "worst case": lambda: calls.dispatch(value, **worst),
        # The counts of a wrong layout.
        "both": lambda: calls.dispatch(value, counts=calls.layout(value, wait=False, async_finish=True)),
    }
    assert set(names) <= wrong_calls.keys()
    answers = {}
    for name, wrong in wrong_calls.items():
        if names and name not in names:
            continue
        # What a layout has found is raised where no peer waits for this rank: by the next layout.
        answers[name] = [heard(wrong), heard(calls.layout), heard(calls.dispatch), heard(calls.good)]
        calls.good()
    return answers


def refuse_in_low_latency_mode(
    context: RankContext, value: int, how: dict[str, Any], names: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    buffer = low_latency_cases.buffer_for(context, **how)
    num_experts = LOCAL_EXPERTS * context.num_ranks
    buffer.clean_low_latency_buffer(8, HIDDEN, num_experts)
    x, weights = rows(), torch.full((TOKENS, TOPK), 0.5, device=tensor_device())

    def dispatch(wrong: int | None = None, hooked: bool = False, **more: Any) -> Any:
        ids = ids_of(context, wrong)
        received, _, handle, event, hook = buffer.low_latency_dispatch(
            x, ids, 8, num_experts, use_fp8=False, return_recv_hook=hooked, **more
        )
        event.current_stream_wait()
        if hook is not None:
            hook()
        return received, handle

    def combine(wrong: int | None = None, **more: Any) -> torch.Tensor:
        received, handle = dispatch()
        ids = ids_of(context, wrong)
        combined, event, _ = buffer.low_latency_combine(received, ids, weights, handle, **more)
        event.current_stream_wait()
        return combined

    def good() -> None:
        right = (ids_of(context, None) >= 0).sum(1) * 0.5
        assert combine()[:, 0].tolist() == right.tolist()

    wrong_calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: dispatch(value),
        "asynchronous dispatch": lambda: dispatch(value, async_finish=True),
        "dispatch with a hook": lambda: dispatch(value, hooked=True),
        "combine": lambda: combine(value),
        "asynchronous combine": lambda: combine(value, async_finish=True),
    }
    assert set(names) <= wrong_calls.keys()
    answers = {}
    for name, wrong in wrong_calls.items():
        if names and name not in names:
            continue
        answers[name] = [heard(wrong), heard(good), heard(good)]
        good()
    return answers


def check(place: Place, answers: list[dict[str, list[str]]], value: int) -> None:
    """That ranks heard what they should."""
    (check_on_the_cpu if place.device == "cpu" else check_on_a_gpu)(answers, value)


def check_on_the_cpu(answers: list[dict[str, list[str]]], value: int) -> None:
    """The wrong rank raises before anything is sent, and its peers hear why; then all is well."""
    right = sentence(value, len(answers))
    for rank, by_name in enumerate(answers):
        for name, (first, *later) in by_name.items():
            assert set(later) == {"fine"}, (rank, name, later)
            if rank == WRONG_RANK:
                assert first == right, name
            elif "layout" in name:
                assert first == "fine"
            else:
                reason = right.removeprefix("InvalidCall: ")
                assert first.startswith(f"Disagreement: rank {WRONG_RANK} refused its "), (name, first)
                assert first.endswith(reason), (name, first)


def check_on_a_gpu(answers: list[dict[str, list[str]]], value: int) -> None:
    """Check that errors of calls that the host does not wait for are raised by its next call.

    Errors of a layout concern no peer.
    """
    right = sentence(value, len(answers))
    for rank, by_name in enumerate(answers):
        for name, messages in by_name.items():
            complaints = [message for message in messages if message != "fine"]
            if rank == WRONG_RANK:
                assert complaints == [right], (name, messages)
            elif "layout" in name:
                assert not complaints, (name, messages)
            else:
                (complaint,) = complaints
                assert complaint.startswith(f"Disagreement: rank {WRONG_RANK} refused its "), name
                assert complaint.endswith("its topk_idx has an id that is no expert"), (name, complaint)
            assert messages[-1] == "fine", (name, messages)
