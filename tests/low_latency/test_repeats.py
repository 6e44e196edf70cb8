"""Low-latency calls like earlier ones do less work on the host: they give the same results, and are refused
for the same reasons, as calls of a Buffer that remembers none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from anyep.api import gradients
from anyep.api.accepted import Accepted
from anyep.api.buffer import Buffer
from tests.support.low_latency_cases import buffer_for, in_process_of
from tests.support.places import Place, tensor_device
from tests.support.world import RankContext

PLACES = [
    place.param(marks=in_process_of(place))
    for place in (Place("cpu", 2), Place("simulated", 2), Place("cuda", 2), Place("cuda", 8))
]
MAX_TOKENS, HIDDEN, TOPK = 4, 512, 2
"""Rows that every format can carry."""
TIMEOUT_S = 300.0
Arguments = dict[str, Any]


class Watched:
    """A Buffer, and how many of its calls had arguments like earlier ones."""

    def __init__(self, buffer: Buffer) -> None:
        self.num_known = 0
        self.checks: Any = buffer._low_latency
        self.mode: Any = buffer.runtime.low_latency

    def forget(self) -> None:
        """Make the next call as if it were the first one."""
        checks, mode = self.checks, self.mode
        checks._last_dispatch = checks._last_combine = None
        mode._new_results.clear()
        mode._new_sums.clear()
        if hasattr(mode.ops, "_plans"):
            mode.ops._plans.clear()
            mode.ops._known.clear()
            mode.ops.use_slots(mode._slots)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls whose tensors were accepted without a check."""
        covers = Accepted.covers

        def counted(accepted: Accepted, *tensors: Any) -> bool:
            is_known = covers(accepted, *tensors)
            self.num_known += is_known
            return is_known

        Accepted.covers = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            Accepted.covers = covers  # type: ignore[method-assign]


class Setting:
    """The arguments of one dispatch, and of a combine of what it gave."""

    def __init__(self, context: RankContext, seed: int) -> None:
        generator = torch.Generator().manual_seed(31 * seed + context.rank)
        self.rank, self.num_ranks, self.device = context.rank, context.num_ranks, tensor_device()
        self.num_experts = 2 * context.num_ranks
        scores = torch.rand(MAX_TOKENS, self.num_experts, generator=generator, device="cpu")
        self.x = self._normal(generator, MAX_TOKENS, HIDDEN)
        self.topk_idx = scores.topk(TOPK, dim=1).indices.to(self.device)
        weights = torch.rand(MAX_TOKENS, TOPK, generator=generator, dtype=torch.float32, device="cpu")
        self.topk_weights = weights.to(self.device)
        self.outputs = self._normal(generator, 2, context.num_ranks * MAX_TOKENS, HIDDEN)

    def _normal(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return made.bfloat16().to(self.device)

    def zeros(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype, device=self.device)

    def of_dispatch(self) -> Arguments:
        return {
            "x": self.x,
            "topk_idx": self.topk_idx,
            "num_max_dispatch_tokens_per_rank": MAX_TOKENS,
            "num_experts": self.num_experts,
            "use_fp8": False,
        }

    def of_combine(self, handle: Any) -> Arguments:
        return {
            "x": self.outputs,
            "topk_idx": self.topk_idx,
            "topk_weights": self.topk_weights,
            "handle": handle,
        }


def finish(event: Any, hook: Any) -> None:
    event.current_stream_wait()
    if hook is not None:
        hook()


def parts_of_dispatch(returned: Any) -> list[torch.Tensor]:
    """The rows that a dispatch received, with their scales, and where they came from."""
    rows, counts, handle, event, hook = returned
    finish(event, hook)
    source, ranges, *_ = handle
    per_row = [*(rows if isinstance(rows, tuple) else [rows]), source]
    bits = [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in per_row]
    return [
        counts.clone(),
        ranges.clone(),
        *(part[expert, :count].clone() for part in bits for expert, count in enumerate(counts.tolist())),
    ]


def parts_of_combine(returned: Any) -> list[torch.Tensor]:
    sums, event, hook = returned
    finish(event, hook)
    return [sums.clone()]


Outcome = tuple[list[torch.Tensor] | str, list[str]]
"""The parts of a result or an error, and the warnings."""


def outcome_of(parts_of: Callable[[Any], list[torch.Tensor]], call: Callable[[], Any]) -> Outcome:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients._has_warned = False
        try:
            found: list[torch.Tensor] | str = parts_of(call())
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    return found, [str(warning.message) for warning in caught]


def are_alike(one: Outcome, other: Outcome) -> bool:
    if isinstance(one[0], str) or isinstance(other[0], str):
        return one == other
    bits = (
        a.shape == b.shape and a.dtype == b.dtype and a.contiguous().equal(b.contiguous())
        for a, b in zip(one[0], other[0], strict=True)
    )
    return all(bits) and one[1] == other[1]


@dataclass(frozen=True)
class Change:
    """What is different from the call before, which was good."""

    name: str
    of: Callable[[Setting, Arguments], Arguments] = lambda setting, arguments: {}
    is_known: bool = False
    """Whether its arguments are still like those of the call before."""
    is_heard: bool = False
    """Whether a kernel finds the error, so that a GPU gives no result, and raises in the next call."""


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at an address that is no multiple of 16."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    memory[1:] = tensor.flatten()
    return memory[1:].view(tensor.shape)


def with_a_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def wrong_id(setting: Setting, arguments: Arguments) -> Arguments:
    ids = arguments["topk_idx"].clone()
    ids[1, 1] = setting.num_experts + 3
    return {"topk_idx": ids}


class Other(torch.Tensor):
    """A type of tensor that somebody else made."""


OF_BOTH = [
    Change("nothing", is_known=True),
    Change("other rows", lambda s, a: {"x": a["x"] * 2}, is_known=True),
    Change("an address of rows", lambda s, a: {"x": shifted(a["x"])}, is_known=True),
    Change("an address of ids", lambda s, a: {"topk_idx": shifted(a["topk_idx"])}, is_known=True),
    Change("strides of rows", lambda s, a: {"x": strided(a["x"])}),
    Change("strides of ids", lambda s, a: {"topk_idx": strided(a["topk_idx"])}),
    Change("the type of rows", lambda s, a: {"x": a["x"].half()}),
    Change("the type of ids", lambda s, a: {"topk_idx": a["topk_idx"].int()}),
    Change("wider rows", lambda s, a: {"x": torch.cat([a["x"], a["x"]], dim=-1)}),
    Change("more dimensions", lambda s, a: {"x": a["x"][None]}),
    Change("a gradient", lambda s, a: {"x": with_a_gradient(a["x"])}),
    Change("a class of tensors", lambda s, a: {"x": a["x"].as_subclass(Other)}),
    Change("another device", lambda s, a: {"x": a["x"].to("meta")}),
    Change("no tensor", lambda s, a: {"x": None}),
    Change("a wrong id", wrong_id, is_known=True, is_heard=True),
    Change("asynchronous", lambda s, a: {"async_finish": True}, is_known=True),
    Change("by hook", lambda s, a: {"return_recv_hook": True}, is_known=True),
    Change("both", lambda s, a: {"async_finish": True, "return_recv_hook": True}),
]
OF_DISPATCH = [
    *OF_BOTH,
    Change("fewer tokens", lambda s, a: {"x": a["x"][:2], "topk_idx": a["topk_idx"][:2]}),
    Change("no tokens", lambda s, a: {"x": a["x"][:0], "topk_idx": a["topk_idx"][:0]}),
    Change("tokens without ids", lambda s, a: {"topk_idx": a["topk_idx"][:-1]}),
    Change("one choice", lambda s, a: {"topk_idx": a["topk_idx"][:, :1].contiguous()}),
    Change("too many tokens", lambda s, a: {name: torch.cat([a[name]] * 2) for name in ("x", "topk_idx")}),
    Change("fewer at most", lambda s, a: {"num_max_dispatch_tokens_per_rank": MAX_TOKENS - 1}),
    Change("more experts", lambda s, a: {"num_experts": 2 * s.num_experts}),
    Change("a number that is no integer", lambda s, a: {"num_experts": float(s.num_experts)}),
    Change("a number of another type", lambda s, a: {"num_experts": torch.tensor(s.num_experts)}),
    Change("FP8", lambda s, a: {"use_fp8": True}),
    Change("FP8, rounded", lambda s, a: {"use_fp8": True, "round_scale": True}),
    Change("FP8, exponents", lambda s, a: {"use_fp8": True, "round_scale": True, "use_ue8m0": True}),
    Change("exponents of no powers", lambda s, a: {"use_fp8": True, "use_ue8m0": True}),
    Change("a truth of another type", lambda s, a: {"use_fp8": 0}, is_known=True),
    Change("counts", lambda s, a: {"cumulative_local_expert_recv_stats": s.zeros(2, torch.int32)}),
    Change("wrong counts", lambda s, a: {"cumulative_local_expert_recv_stats": s.zeros(2, torch.int64)}),
    Change("waits", lambda s, a: {"dispatch_wait_recv_cost_stats": s.zeros(s.num_ranks, torch.int64)}),
    Change("wrong waits", lambda s, a: {"dispatch_wait_recv_cost_stats": s.zeros(1, torch.int64)}),
]


def handle_with(arguments: Arguments, **parts: Any) -> Arguments:
    names = ("src_info", "layout_range", "num_max_tokens", "hidden", "num_experts")
    return {"handle": tuple({**dict(zip(names, arguments["handle"], strict=True)), **parts}.values())}


def copied(setting: Setting, arguments: Arguments) -> Arguments:
    source, ranges, *_ = arguments["handle"]
    return handle_with(arguments, src_info=source.clone(), layout_range=ranges.clone())


def touched(setting: Setting, arguments: Arguments) -> Arguments:
    arguments["handle"][1].add_(0)
    return {}


def few_weights(setting: Setting, arguments: Arguments) -> Arguments:
    return {name: arguments[name][:2] for name in ("topk_idx", "topk_weights")}


OF_COMBINE = [
    *OF_BOTH,
    Change("fewer tokens", few_weights),
    Change("weights without ids", lambda s, a: {"topk_weights": a["topk_weights"][:-1]}),
    Change("strides of weights", lambda s, a: {"topk_weights": strided(a["topk_weights"])}),
    Change("an address of weights", lambda s, a: {"topk_weights": shifted(a["topk_weights"])}, is_known=True),
    Change("the type of weights", lambda s, a: {"topk_weights": a["topk_weights"].double()}),
    Change("a gradient of weights", lambda s, a: {"topk_weights": with_a_gradient(a["topk_weights"])}),
    Change("a copied handle", copied, is_known=True),
    Change("a list", lambda s, a: {"handle": list(a["handle"])}),
    Change("a handle that was written to", touched, is_known=True),
    Change("a short handle", lambda s, a: {"handle": a["handle"][:4]}),
    Change("no handle", lambda s, a: {"handle": None}),
    Change("a handle for fewer tokens", lambda s, a: handle_with(a, num_max_tokens=MAX_TOKENS - 1)),
    Change("a handle of other rows", lambda s, a: handle_with(a, hidden=HIDDEN // 2)),
    Change("a handle without numbers", lambda s, a: handle_with(a, num_experts=None)),
    Change("a handle with floats", lambda s, a: handle_with(a, hidden=float(HIDDEN))),
    Change("a handle of another type", lambda s, a: handle_with(a, src_info=a["handle"][0].long())),
    Change("a short source", lambda s, a: handle_with(a, src_info=a["handle"][0][:1])),
    Change("an address of a handle", lambda s, a: handle_with(a, src_info=shifted(a["handle"][0])), True),
    Change("strides of a handle", lambda s, a: handle_with(a, layout_range=strided(a["handle"][1]))),
    Change("wrong ranges", lambda s, a: handle_with(a, layout_range=a["handle"][1] + 1000), True, True),
    Change("a tensor for the sums", lambda s, a: {"out": torch.zeros_like(s.x)}),
    Change("a short one", lambda s, a: {"out": torch.zeros_like(s.x)[1:]}),
    Change("a strided one", lambda s, a: {"out": strided(torch.zeros_like(s.x))}),
    Change("waits", lambda s, a: {"combine_wait_recv_cost_stats": s.zeros(s.num_ranks, torch.int64)}),
    Change("wrong waits", lambda s, a: {"combine_wait_recv_cost_stats": s.zeros(1, torch.int64)}),
    Change("LogFMT", lambda s, a: {"use_logfmt": True}),
    Change("zero copy of nothing", lambda s, a: {"zero_copy": True}),
    Change("zero copy in LogFMT", lambda s, a: {"use_logfmt": True, "zero_copy": True}),
]


def try_changes(context: RankContext, function: str) -> None:
    """After a good call, each changed one is made twice: with and without memory of that call."""
    buffer = buffer_for(context)
    watched, setting = Watched(buffer), Setting(context, 1)
    buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, setting.num_experts)
    handle = buffer.low_latency_dispatch(**setting.of_dispatch())[2]
    usual = setting.of_dispatch() if function == "dispatch" else setting.of_combine(handle)
    parts_of = parts_of_dispatch if function == "dispatch" else parts_of_combine
    call = getattr(buffer, f"low_latency_{function}")
    right = outcome_of(parts_of, lambda: call(**usual))
    assert not isinstance(right[0], str), right
    for change in OF_DISPATCH if function == "dispatch" else OF_COMBINE:
        found = []
        for remembers in (True, False):
            arguments = {**usual, **change.of(setting, usual)}
            if not remembers:
                watched.forget()
            before = watched.num_known
            with watched.counting():
                first = outcome_of(parts_of, lambda arguments=arguments: call(**arguments))
            is_known = watched.num_known > before
            assert is_known == (remembers and change.is_known), (change.name, remembers)
            # What a kernel finds is heard of now; the call that hears of it is made all the same.
            second = outcome_of(parts_of, lambda: call(**usual))
            if change.is_heard and buffer._device.type != "cpu":
                assert isinstance(second[0], str), change.name
                first = ("a kernel found an error", [])
                second = (second[0].replace(f"call {watched.mode._last_call - 1})", "call)"), second[1])
            else:
                assert are_alike(second, right), (change.name, second)
            found += [first, second]
            assert are_alike(outcome_of(parts_of, lambda: call(**usual)), right), change.name
        assert are_alike(found[0], found[2]), (change.name, found[0], found[2])
        assert are_alike(found[1], found[3]), (change.name, found[1], found[3])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", ["dispatch", "combine"])
def test_whatever_is_different(place: Place, function: str) -> None:
    place.world().run(try_changes, function, timeout=TIMEOUT_S)


def call_what_changes(context: RankContext) -> None:
    """What must be checked in every call: what is in flight, the slots, where zero copy looks for rows."""
    buffer = buffer_for(context)
    setting = Setting(context, 2)
    buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, setting.num_experts)
    for _ in range(2):
        handle = buffer.low_latency_dispatch(**setting.of_dispatch())[2]
        right = parts_of_combine(buffer.low_latency_combine(**setting.of_combine(handle)))

    def said(call: Callable[..., Any], **arguments: Any) -> str:
        found, _ = outcome_of(lambda returned: [], lambda: call(**arguments))
        return found if isinstance(found, str) else "fine"

    *_, unfilled, _, hook = buffer.low_latency_dispatch(**setting.of_dispatch(), return_recv_hook=True)
    assert hook is not None
    message = said(buffer.low_latency_combine, **setting.of_combine(unfilled))
    assert message.startswith("InvalidCall: the handle's dispatch is not yet received"), message
    message = said(buffer.low_latency_dispatch, **setting.of_dispatch())
    assert message.startswith("InvalidCall: low-latency dispatch (call"), message
    hook()
    (sums,) = parts_of_combine(buffer.low_latency_combine(**setting.of_combine(unfilled)))
    assert torch.equal(sums, right[0])

    for is_lent in (True, False, True):
        if is_lent:
            rows = buffer.get_next_low_latency_combine_buffer(handle)
            rows.copy_(setting.outputs)
        given = {**setting.of_combine(handle), "zero_copy": True}
        if not is_lent:
            message = said(buffer.low_latency_combine, **given)
            assert message.startswith("InvalidCall: zero_copy needs get_next"), message
            continue
        (sums,) = parts_of_combine(buffer.low_latency_combine(**given))
        assert torch.equal(sums, right[0])

    buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN // 2, setting.num_experts)
    half = {**setting.of_dispatch(), "x": setting.x[:, : HIDDEN // 2].contiguous()}
    narrow = buffer.low_latency_dispatch(**half)[2]
    for call, given in (
        (buffer.low_latency_dispatch, setting.of_dispatch()),
        (buffer.low_latency_combine, setting.of_combine(handle)),
    ):
        message = said(call, **given)
        assert f"but the slots are for {MAX_TOKENS} tokens per rank" in message, message
    outputs = setting.outputs[..., : HIDDEN // 2].contiguous()
    (sums,) = parts_of_combine(
        buffer.low_latency_combine(outputs, setting.topk_idx, setting.topk_weights, narrow)
    )
    assert torch.equal(sums, right[0][:, : HIDDEN // 2])

    buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, setting.num_experts)
    handle = buffer.low_latency_dispatch(**setting.of_dispatch())[2]
    (sums,) = parts_of_combine(buffer.low_latency_combine(**setting.of_combine(handle)))
    assert torch.equal(sums, right[0])


@pytest.mark.parametrize("place", PLACES)
def test_what_is_checked_in_every_call(place: Place) -> None:
    place.world().run(call_what_changes, timeout=TIMEOUT_S)


def hold_what_calls_gave(context: RankContext) -> None:
    """Results lie in memory of their own, whatever earlier ones looked like, and look as they always do."""
    buffer = buffer_for(context)
    setting = Setting(context, 3)
    buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, setting.num_experts)
    held = []
    for turn in range(6):
        setting.x.add_(turn)
        arguments = {**setting.of_dispatch(), "use_fp8": turn % 3 > 0, "round_scale": True}
        rows, counts, handle, *_ = buffer.low_latency_dispatch(**arguments, use_ue8m0=turn % 3 == 2)
        sums = buffer.low_latency_combine(**setting.of_combine(handle))[0]
        num_rows = context.num_ranks * MAX_TOKENS
        parts = [*(rows if isinstance(rows, tuple) else [rows]), counts, *handle[:2], sums]
        looks = [(tuple(part.shape), part.stride(), part.dtype) for part in parts]
        row_strides = (num_rows * HIDDEN, HIDDEN, 1)
        values = torch.float8_e4m3fn if turn % 3 else torch.bfloat16
        expected: list[Any] = [((2, num_rows, HIDDEN), row_strides, values)]
        if turn % 3:
            width, dtype = (1, torch.int32) if turn % 3 == 2 else (4, torch.float32)
            expected.append(((2, num_rows, width), (width * num_rows, 1, num_rows), dtype))
        expected += [
            ((2,), (1,), torch.int32),
            ((2, num_rows), (num_rows, 1), torch.int32),
            ((2, context.num_ranks), (context.num_ranks, 1), torch.int64),
            ((MAX_TOKENS, HIDDEN), (HIDDEN, 1), torch.bfloat16),
        ]
        assert looks == expected
        assert not any(part.requires_grad or part.is_inference() for part in parts)
        filled = (counts, handle[1], sums)
        held += [(part, part.clone()) for part in filled]
    addresses = {part.data_ptr() for part, _ in held}
    assert len(addresses) == len(held)
    for part, copy in held:
        assert torch.equal(part, copy)


@pytest.mark.parametrize("place", PLACES)
def test_results_are_their_own(place: Place) -> None:
    place.world().run(hold_what_calls_gave, timeout=TIMEOUT_S)
