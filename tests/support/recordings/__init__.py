"""What is recorded (tests/support/recorder.py): rounds of calls as data, and the recordings made of them.

Every public call of a Buffer that yields results is here with every option that changes them, and a set of
refused and contradictory calls with their sentences. Sizes are tiny: the point is that nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
import torch

from tests.support.places import Place
from tests.support.recorder import VARIANTS, Recording, Replay, Round, place_of
from tests.support.recordings.layers import Gradients, Layer
from tests.support.recordings.low_latency import Dropped, InFlight, LowLatency, Masks
from tests.support.recordings.normal import Normal
from tests.support.recordings.state import Sizes, State
from tests.support.recordings.wrong_calls import (
    HEARD_ON_GPUS,
    LOW_LATENCY_HEARD_ON_GPUS,
    WRONG_CALLS,
    WRONG_LOW_LATENCY_CALLS,
    Making,
    Wrong,
)

WAYS: Final = ("windows", "rings", "few-windows", "beside", "rings-beside")
LOW_LATENCY_WAYS: Final = ("windows", "beside", "hooks", "zero-copy")
LOW_LATENCY_BUFFER: Final = {"num_nvl_bytes": 1 << 18, "num_rdma_bytes": 1 << 23, "low_latency_mode": True}
GPUS: Final = ("simulated", "cuda")


def low_latency(name: str, rounds: tuple[Round, ...], **more: Any) -> Recording:
    buffer = LOW_LATENCY_BUFFER | more.pop("buffer", {})
    return Recording(name, rounds, mode="low_latency", buffer=buffer, **more)


_ALL: Final = (
    Recording(
        "sample",
        (
            Normal("a pair", num_biases=1, combine_weights=True),
            Normal("bytes", dtype=torch.uint8, num_scales=2, scales="column-major", worst=True),
        ),
        shapes=("2",),
        variants=("windows", "beside"),
    ),
    Recording(
        "dtypes",
        (
            Normal("bfloat16", hold=True),
            Normal(
                "float16", dtype=torch.float16, num_biases=2, combine_weights=True, num_topk=3, hidden=136
            ),
            Normal("float32", dtype=torch.float32, num_biases=1, copies=True),
            Normal("uint8", dtype=torch.uint8, hidden=48),
            Normal("fp8", dtype=torch.float8_e4m3fn, hidden=128, num_scales=1),
            Normal(
                "fp8, column-major",
                dtype=torch.float8_e4m3fn,
                hidden=256,
                num_scales=2,
                scales="column-major",
            ),
            Normal("fp8, int32", dtype=torch.float8_e5m2, num_scales=5, scales="int32", internode=True),
        ),
        variants=WAYS,
    ),
    Recording(
        "routings",
        (
            Normal("some missing", routing="some missing", num_topk=4, num_biases=1, combine_weights=True),
            Normal("none", routing="none", num_biases=2),
            Normal("all to one rank", tokens=(20, 9, 14), routing="one rank", local_experts=4, copies=True),
            Normal("own rank", routing="own rank", staged=True, hold=True),
            Normal("skewed", routing="skewed", num_topk=3, local_experts=3, send_topk=False),
            Normal("an expert twice", routing="repeated", num_topk=5, alignment=4),
            Normal("no tokens", tokens=(0,)),
            Normal("one rank has tokens", tokens=(0, 6, 0, 0, 0, 0, 0, 0)),
            Normal("worst case", worst=True, combine_weights=True, hold=True),
            Normal("worst case with scales", dtype=torch.uint8, num_scales=3, worst=True, routing="skewed"),
            Normal("many tokens", tokens=(70, 33), num_topk=4, local_experts=4, alignment=8),
            Normal("float32 after all", dtype=torch.float32, staged=True),
        ),
        variants=WAYS,
    ),
    Recording(
        "without configs",
        (
            Normal("tuned", config=None, tokens=(40, 3), copies=True),
            Normal("tuned, without ids", config=None, send_topk=False),
            State("after two pairs"),
        ),
        shapes=("1", "2", "4", "2x2", "2x4"),
        devices=("cpu",),
        variants=("windows", "rings"),
    ),
    Recording(
        "layers",
        (Gradients("gradients"), Gradients("worst case", worst=True), Layer("layer")),
        shapes=("1", "2", "4", "2x2"),
    ),
    Recording(
        "state",
        (State("new"), Normal("a pair"), State("after a pair")),
        shapes=("1", "4", "2x2"),
        devices=("cpu",),
    ),
    Recording("sizes", (Sizes("sizes"),), shapes=("1",), devices=("cpu",)),
    Recording("wrong calls", (*WRONG_CALLS, Making("making")), shapes=("1", "3", "2x2"), devices=("cpu",)),
    Recording("wrong calls on a gpu", HEARD_ON_GPUS, shapes=("3",), devices=GPUS),
    low_latency(
        "sample",
        (LowLatency("bf16", tokens=(3, 2), in_place=True), LowLatency("fp8", tokens=(3, 2), travel="fp8")),
        shapes=("2",),
        variants=("windows", "hooks"),
    ),
    low_latency(
        "formats",
        (
            LowLatency("bf16", hold=True),
            LowLatency("fp8", travel="fp8", hidden=256, in_place=True),
            LowLatency("fp8 rounded", travel="fp8 rounded", hold=True),
            LowLatency("fp8 ue8m0", travel="fp8 ue8m0", hidden=512),
            LowLatency("logfmt", use_logfmt=True, hidden=256),
            LowLatency("special values", special_values=True),
            LowLatency("special values in fp8", travel="fp8", special_values=True),
            LowLatency("special values in rounded fp8", travel="fp8 rounded", special_values=True),
            LowLatency("special values in logfmt", use_logfmt=True, special_values=True),
        ),
        variants=LOW_LATENCY_WAYS,
    ),
    low_latency(
        "routings",
        (
            LowLatency("some missing", routing="some missing", num_topk=4, hidden=64),
            LowLatency("none", routing="none", hidden=64),
            LowLatency("all to one rank", routing="one rank", local_experts=4, hidden=64),
            LowLatency("an expert twice", routing="repeated", num_topk=5, in_place=True, hidden=64),
            LowLatency("no tokens", tokens=(0,), hidden=64),
            LowLatency("one rank has tokens", tokens=(0, 8, 0, 0, 0, 0, 0, 0), hidden=64),
            LowLatency("all slots", tokens=(3,), max_tokens=3, local_experts=1, hidden=8, num_topk=1),
            LowLatency("once more", tokens=(3,), max_tokens=3, local_experts=1, hidden=8, clean=False),
            Normal("normal mode meanwhile"),
            LowLatency("after it", tokens=(3,), max_tokens=3, local_experts=1, hidden=8, clean=False),
        ),
        variants=LOW_LATENCY_WAYS,
    ),
    low_latency(
        "in flight",
        (
            InFlight("two"),
            InFlight("the second first", order=(1, 0)),
            Dropped("dropped hooks"),
            Layer("layer", decode=True),
        ),
        shapes=("1", "2", "4", "2x2"),
    ),
    low_latency(
        "masks",
        (
            LowLatency("before"),
            Masks("with all"),
            Masks("by number", by_name=True),
            LowLatency("at last", travel="fp8"),
        ),
        shapes=("2", "3", "4", "2x2"),
        devices=("cpu",),
        buffer={"enable_shrink": True},
    ),
    low_latency("wrong calls", WRONG_LOW_LATENCY_CALLS, shapes=("1", "3", "2x2"), devices=("cpu",)),
    low_latency("wrong calls on a gpu", LOW_LATENCY_HEARD_ON_GPUS, shapes=("3",), devices=GPUS),
    low_latency(
        "state",
        (State("new"), LowLatency("a pair"), State("after a pair")),
        shapes=("1", "4", "2x2"),
        devices=("cpu",),
        buffer={"enable_shrink": True},
    ),
)
RECORDINGS: Final = {(recording.mode, recording.name): recording for recording in _ALL}
EVERY_WAY: Final = ("4", "2x2")
"""Shapes that are replayed in every way; others in the first, and in one more that differs from shape to
shape."""
SIMULATED_SHAPES: Final = ("1", "2", "3")
CUDA_SHAPES: Final = ("2", "4", "8")


def replays(mode: str) -> Iterator[Replay]:
    """All that can be replayed, first as it was recorded."""
    for recording in RECORDINGS.values():
        if recording.mode == mode:
            for number, shape in enumerate(recording.shapes):
                yield from _of_shape(recording, shape, number)


def _of_shape(recording: Recording, shape: str, number: int) -> Iterator[Replay]:
    first, *more = recording.variants
    some = [first, more[number % len(more)]] if more else [first]
    is_one_node = "x" not in shape
    for device in recording.devices:
        ways = recording.variants if shape in EVERY_WAY else tuple(some)
        if device == "simulated":
            # Interpreted kernels are slow, and have no rings.
            if shape not in SIMULATED_SHAPES:
                continue
            ways = tuple(way for way in (first, *more) if not VARIANTS[way].needs_rings)
        if device == "cuda" and shape not in CUDA_SHAPES and len(recording.shapes) > 1:
            continue
        if device == "cpu" or is_one_node:
            yield from (Replay(recording, shape, place_of(device, shape), way) for way in ways)
    # What a rank on another host said last comes with a heartbeat, so a status may be an older one; and masks
    # are for one host.
    has_words = any(isinstance(part, State | Wrong) for part in recording.rounds)
    has_masks = recording.buffer.get("enable_shrink", False)
    if shape == "2x2" and "cpu" in recording.devices and not has_words and not has_masks:
        yield from (
            Replay(recording, shape, place_of("cpu", shape, hosts=True), way) for way in (first, *more[:1])
        )


def group_of(place: Place) -> Any:
    return pytest.mark.xdist_group(f"recorded-{place.device}-{place.num_ranks}")


def params(mode: str, quick: Sequence[str]) -> list[Any]:
    """For `parametrize`: what is not `quick` is slow. Tests of a place share its ranks."""
    found = list(replays(mode))
    assert set(quick) <= {str(replay) for replay in found}
    return [
        pytest.param(
            replay,
            marks=[
                *replay.place.param().marks,
                *([] if replay.place.hosts else [group_of(replay.place)]),
                *([] if str(replay) in quick or replay.place.device == "cuda" else [pytest.mark.slow]),
            ],
            id=str(replay),
        )
        for replay in found
    ]
