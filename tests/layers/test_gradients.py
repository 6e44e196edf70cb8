"""A `Buffer` gives no gradients, and says so once where some are expected."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anyep import Config, autograd
from anyep.api import gradients
from anyep.api.buffer import Buffer
from tests.support import moe
from tests.support.low_latency_cases import NVL_BYTES, RDMA_BYTES
from tests.support.world import RankContext, get_world

TOKENS, HIDDEN, TOPK, EXPERTS, MAX_TOKENS = 6, 128, 2, 4, 8
CONFIG = Config(4, 2, 5)
TIMEOUT_S = 120.0


@contextmanager
def heard() -> Iterator[list[tuple[str, str]]]:
    """The warnings that a process which has not warned yet gives: what they say, and of which file."""
    messages: list[tuple[str, str]] = []
    gradients._has_warned = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [
        (str(warning.message), warning.filename) for warning in caught if warning.category is UserWarning
    ]
    gradients._has_warned = False


def check_warned(messages: list[tuple[str, str]]) -> None:
    ((text, file),) = messages
    assert "a tensor that requires gradients was passed to anyep.Buffer" in text
    assert "anyep.autograd" in text
    assert file == __file__


class Calls:
    """A Buffer, and good arguments for each of its calls."""

    def __init__(self, context: RankContext) -> None:
        if "buffer" not in context.keep:
            context.keep["buffer"] = Buffer(
                context.group, NVL_BYTES, RDMA_BYTES, low_latency_mode=True, device="cpu"
            )
        self.buffer: Buffer = context.keep["buffer"]
        self.x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
        self.ids = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % EXPERTS
        self.weights = torch.full((TOKENS, TOPK), 0.5)
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(self.ids, EXPERTS)
        self.routing = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
        }
        self.rows, _, self.row_weights, _, self.handle, _ = self.buffer.dispatch(
            self.x, topk_idx=self.ids, topk_weights=self.weights, config=CONFIG, **self.routing
        )
        self.low_rows, _, self.low_handle, *_ = self.buffer.low_latency_dispatch(
            self.x, self.ids, MAX_TOKENS, EXPERTS, use_fp8=False
        )

    def dispatch(self, **other: Any) -> Any:
        given = {"x": self.x, "topk_idx": self.ids, "topk_weights": self.weights, "config": CONFIG}
        return self.buffer.dispatch(**given | self.routing | other)[0]

    def internode_dispatch(self, **other: Any) -> Any:
        given = {"x": self.x, "topk_idx": self.ids, "topk_weights": self.weights, "config": CONFIG}
        return self.buffer.internode_dispatch(**given | self.routing | other)[0]

    def cached_dispatch(self, **other: Any) -> Any:
        return self.buffer.dispatch(**{"x": self.x, "handle": self.handle, "config": CONFIG} | other)[0]

    def combine(self, **other: Any) -> Any:
        return self.buffer.combine(**{"x": self.rows, "handle": self.handle, "config": CONFIG} | other)[0]

    def internode_combine(self, **other: Any) -> Any:
        given: Any = {"x": self.rows, "handle": self.handle, "config": CONFIG}
        return self.buffer.internode_combine(**given | other)[0]

    def low_latency_dispatch(self, **other: Any) -> Any:
        given = {"x": self.x, "topk_idx": self.ids, "use_fp8": False}
        more = {"num_max_dispatch_tokens_per_rank": MAX_TOKENS, "num_experts": EXPERTS}
        return self.buffer.low_latency_dispatch(**given | more | other)[0]  # type: ignore[arg-type]

    def low_latency_combine(self, **other: Any) -> Any:
        given = {"topk_idx": self.ids, "topk_weights": self.weights, "handle": self.low_handle}
        return self.buffer.low_latency_combine(**{"x": self.low_rows} | given | other)[0]


def trained(tensor: Any) -> Any:
    return tensor.detach().clone().requires_grad_()


ARGUMENTS: dict[str, tuple[str, Callable[[Calls], dict[str, Any]]]] = {
    "dispatch: x": ("dispatch", lambda calls: {"x": trained(calls.x)}),
    "dispatch: scales": (
        "dispatch",
        lambda calls: {"x": (calls.x.view(torch.uint8), trained(torch.ones(TOKENS, 1)))},
    ),
    "dispatch: weights": ("dispatch", lambda calls: {"topk_weights": trained(calls.weights)}),
    "internode_dispatch: x": ("internode_dispatch", lambda calls: {"x": trained(calls.x)}),
    "cached dispatch: x": ("cached_dispatch", lambda calls: {"x": trained(calls.x)}),
    "combine: x": ("combine", lambda calls: {"x": trained(calls.rows)}),
    "combine: weights": ("combine", lambda calls: {"topk_weights": trained(calls.row_weights)}),
    "combine: a bias": ("combine", lambda calls: {"bias": (calls.x, trained(calls.x))}),
    "internode_combine: x": ("internode_combine", lambda calls: {"x": trained(calls.rows)}),
    "low_latency_dispatch: x": ("low_latency_dispatch", lambda calls: {"x": trained(calls.x)}),
    "low_latency_combine: x": ("low_latency_combine", lambda calls: {"x": trained(calls.low_rows)}),
    "low_latency_combine: weights": (
        "low_latency_combine",
        lambda calls: {"topk_weights": trained(calls.weights)},
    ),
}


def call_with_gradients(context: RankContext, name: str) -> None:
    calls = Calls(context)
    function, arguments = ARGUMENTS[name]
    call, given = getattr(calls, function), arguments(calls)
    with heard() as plain:
        right = call(**_detached(given))
    assert plain == []
    with heard() as messages:
        results = [call(**given), call(**given)]  # the second one says nothing
    check_warned(messages)
    for result in results:
        for part, reference in zip(_parts(result), _parts(right), strict=True):
            assert not part.requires_grad
            if function != "low_latency_dispatch":  # which has rows that nobody writes
                assert torch.equal(part, reference)
    for context_manager in (torch.no_grad(), torch.inference_mode()):
        with heard() as messages, context_manager:
            call(**given)
        assert messages == []


def _detached(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(part.detach() for part in thing) if isinstance(thing, tuple) else thing.detach()
        for name, thing in given.items()
    }


def _parts(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_lost_gradients_are_warned_of_once(name: str) -> None:
    get_world(2).run(call_with_gradients, name)


def fill_in_place(context: RankContext) -> None:
    """Where the next combine expects its rows: written by a model that trains."""
    calls = Calls(context)
    lent = calls.buffer.get_next_low_latency_combine_buffer(calls.low_handle)
    lent.copy_(trained(calls.low_rows))
    with heard() as messages:
        calls.low_latency_combine(x=lent, zero_copy=True)
    check_warned(messages)


def test_a_combine_without_a_copy() -> None:
    get_world(2).run(fill_in_place)


class Doubled(torch.autograd.Function):
    """As other libraries use a Buffer."""

    @staticmethod
    def forward(ctx: Any, x: Any, calls: Any) -> Any:
        return calls.dispatch(x=x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, None


def train_properly(context: RankContext) -> None:
    calls = Calls(context)
    x, weights = trained(calls.x), trained(calls.weights)
    layer = moe.make_layer(context)
    rows = moe.rows_of(context.rank)
    with heard() as messages:
        assert Doubled.apply(x, calls).requires_grad  # type: ignore[no-untyped-call]
        received = autograd.dispatch(calls.buffer, x, calls.ids, weights, EXPERTS)
        combined, _ = autograd.combine(calls.buffer, received.x, received.handle, received.topk_weights)
        again = autograd.dispatch_again(calls.buffer, combined, received.handle)
        again.sum().backward()  # type: ignore[no-untyped-call]
        layer(rows.requires_grad_()).sum().backward()
        layer.bfloat16().low_latency = True
        layer(rows.bfloat16())
    assert messages == []
    assert x.grad is not None
    assert rows.grad is not None


def test_nothing_is_said_where_there_are_gradients() -> None:
    get_world(2).run(train_properly, timeout=TIMEOUT_S)


def call_where_warnings_are_errors(context: RankContext) -> str:
    """On rank 0 alone: then it refuses its call, and the other one hears of it."""
    calls = Calls(context)
    gradients._has_warned = False
    dist.barrier(context.group)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if context.rank == 0 else "ignore")
        try:
            calls.dispatch(x=trained(calls.x))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
    calls.dispatch()
    gradients._has_warned = False
    return message


def test_peers_hear_of_a_warning_that_is_an_error() -> None:
    raised, told = get_world(2).run(call_where_warnings_are_errors)
    assert raised.startswith("UserWarning: a tensor that requires gradients")
    assert "a tensor that requires gradients was passed to anyep.Buffer" in told
