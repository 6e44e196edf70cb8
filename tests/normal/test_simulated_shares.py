"""Configs that ask for more SMs than a rank has, without a GPU: kernels run in Triton's interpreter.

The programs of a rank run one after the other there, those of different ranks side by side. So rows may go
through rings that hold all rows of a channel, and each rank has as many programs as the others, or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from anyep import Config
from anyep.api.buffer import Buffer
from tests.support.cases import NVL_BYTES, Case, check_case, poison_windows
from tests.support.depth import IS_DEEP
from tests.support.gpu_scenarios import good_arguments
from tests.support.places import Place
from tests.support.share_checks import (
    check_handles_and_configs,
    check_like_an_intranode_test,
    check_mixed_configs,
    check_what_is_said,
)
from tests.support.world import RankContext, World

# Not loaded here: ranks load this module, too, before they choose to interpret kernels.
pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="triton is not installed: pip install 'anyep[cuda]'"
    ),
    pytest.mark.xdist_group("oracle of simulated-2"),
]

MANY_SMS = Config(24, 6, 64)
"""12 channels, and rings that hold all rows of any of them."""
TIMEOUT_S = 240.0


def world(num_ranks: int) -> World:
    return Place("simulated", num_ranks).world()


@contextmanager
def new_buffer(
    context: RankContext, num_sms: int, num_window_bytes: int | None, gpu: str = "simulated"
) -> Iterator[Buffer]:
    """A Buffer of ranks that share a GPU with so many SMs."""
    from tests.support.simulated_gpu import SimulatedGpu

    usual = SimulatedGpu.num_sms, SimulatedGpu.identity
    SimulatedGpu.num_sms, SimulatedGpu.identity = num_sms, gpu
    try:
        with Buffer(context.group, NVL_BYTES, device="cuda", num_window_bytes=num_window_bytes) as buffer:
            yield buffer
    finally:
        SimulatedGpu.num_sms, SimulatedGpu.identity = usual


@contextmanager
def programs_of_kernels() -> Iterator[dict[str, set[int]]]:
    """How many programs each kernel is launched with meanwhile."""
    from anyep.backends.cuda import batch

    launched: dict[str, set[int]] = {}
    interpret = batch.interpret

    def interpret_and_note(launch: batch.Launch, values: Mapping[str, Any]) -> None:
        (first, *_) = launch.grid
        num_programs = first if isinstance(first, int) else values[first.name]
        launched.setdefault(launch.kernel.fn.__name__, set()).add(num_programs)
        interpret(launch, values)

    batch.interpret = interpret_and_note
    try:
        yield launched
    finally:
        batch.interpret = interpret


MOVERS = {
    None: {"send_to_windows", "pull_and_sum", "copy_for_peers"},
    0: {"dispatch_through_rings", "combine_through_rings"},
}
"""The kernels that move rows, by windows and by rings."""


def run_case(context: RankContext, case: Case, num_sms: int, share: int) -> None:
    with new_buffer(context, num_sms, case.num_window_bytes) as buffer, programs_of_kernels() as launched:
        poison_windows(buffer)
        check_case(context, case, buffer)
        for kernel in MOVERS[case.num_window_bytes]:
            assert launched[kernel] == {share}, kernel


CASES = {
    "simple": (12, Case((14, 9), combine_from="other memory")),
    "the worst case": (7, Case((8, 13), worst=True, combine_weights=True, combine_from="other memory")),
    "fp8, asynchronous": (8, Case((9, 20), dtype="float8_e4m3fn", num_scales=5, run_async=True)),
    "fewer tokens than channels": (12, Case((5, 0, 7), num_biases=1, combine_from="other memory")),
}
"""With the SMs of the GPU that the ranks share."""


@pytest.mark.parametrize(
    ("name", "num_window_bytes"),
    [
        ("simple", 0),
        ("fp8, asynchronous", None),
        *(
            pytest.param(name, size, marks=pytest.mark.slow)
            for name in CASES
            for size in (None, 0)
            if (name, size) not in (("simple", 0), ("fp8, asynchronous", None))
        ),
    ],
)
def test_case(name: str, num_window_bytes: int | None) -> None:
    """Results and handles are those of 12 channels, whatever number of programs serves them."""
    num_sms, case = CASES[name]
    case = replace(case, config=MANY_SMS, num_window_bytes=num_window_bytes)
    share = max(2, num_sms // case.num_ranks // 2 * 2)
    world(case.num_ranks).run(run_case, case, num_sms, share, timeout=TIMEOUT_S)


def say_once(context: RankContext) -> None:
    # Each Buffer speaks for itself.
    for _ in range(2 if IS_DEEP else 1):
        with new_buffer(context, 4, None) as buffer:
            check_what_is_said(buffer, 2)


@pytest.mark.property
def test_it_is_said_once() -> None:
    world(2).run(say_once, timeout=TIMEOUT_S)


def mix(context: RankContext, num_window_bytes: int | None) -> None:
    with new_buffer(context, 8, num_window_bytes) as buffer:
        check_handles_and_configs(context, buffer, Config(10, 6, 64))
        configs = [Config(10, 6, 64), Config(4, 6, 64), Config(14, 4, 64)]
        check_mixed_configs(context, buffer, configs, Case((11, 20), combine_weights=True))


@pytest.mark.parametrize("num_window_bytes", [None, pytest.param(0, marks=pytest.mark.slow)])
def test_mixed_configs(num_window_bytes: int | None) -> None:
    world(2).run(mix, num_window_bytes, timeout=TIMEOUT_S)


def share_unevenly(context: RankContext, num_window_bytes: int | None) -> list[int]:
    """Ranks 0 and 1 share a GPU, and rank 2 has one for itself. The programs, and the default's channels."""
    gpu = "alone" if context.rank == 2 else "simulated"
    with new_buffer(context, 4, num_window_bytes, gpu) as buffer, programs_of_kernels() as launched:
        case = Case((9, 13, 6), config=Config(10, 6, 64), num_biases=1, combine_weights=True)
        check_case(context, case, buffer)
        kernel = "send_to_windows" if num_window_bytes is None else "dispatch_through_rings"
        (num_programs,) = launched[kernel]
        _, *_, handle, _ = buffer.dispatch(**good_arguments(buffer) | {"config": None})
        return [num_programs, handle[1].shape[1]]


@pytest.mark.parametrize("num_window_bytes", [None, pytest.param(0, marks=pytest.mark.slow)])
def test_ranks_with_different_shares(num_window_bytes: int | None) -> None:
    """Each has its own number of programs; but a config that none has chosen has one number of channels."""
    found = world(3).run(share_unevenly, num_window_bytes, timeout=TIMEOUT_S)
    assert found == [[2, 1], [2, 1], [4, 1]]


def try_all_ways(context: RankContext, num_window_bytes: int | None) -> None:
    config, tuned = Config(24, 8, 64), [Config(24, 4, 64)]
    with new_buffer(context, 8, num_window_bytes) as buffer:
        check_like_an_intranode_test(context, buffer, config, 26, 256, 4, 8, tuned, is_short=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_window_bytes", [None, 0])
def test_like_an_intranode_test(num_window_bytes: int | None) -> None:
    world(2).run(try_all_ways, num_window_bytes, timeout=TIMEOUT_S)


def test_shares() -> None:
    from anyep.gpu_connection import share_of_sms

    for num_sms in (1, 2, 78, 132, 144):
        for num_ranks in (1, 2, 3, 8, 16):
            share = share_of_sms(num_sms, num_ranks)
            assert share % 2 == 0
            assert share == 2 or share * num_ranks <= num_sms
