"""Heaps in memory of the host, for GPUs that cannot reach each other's memory: when they are chosen, what is
there, and that nothing is left behind.

On a simulated GPU. More results are compared in the oracles' tests, ranks are killed in those of faults.
"""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.backends.cuda import driver, reach
from anyep.cli import doctor
from anyep.errors import AnyEPError
from tests.support.cases import NVL_BYTES
from tests.support.cases import Case as NormalCase
from tests.support.cases import check_case as check_normal_case
from tests.support.gpu_scenarios import attempt, warnings_heard
from tests.support.low_latency_cases import Case, check_case
from tests.support.places import Place
from tests.support.world import RankContext

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.xdist_group("low latency on simulated-2"),
]
PLACE = Place("simulated", 2)
CASE = Case((3, 2), hidden=128)
RDMA_BYTES = 1 << 22


def new_buffer(context: RankContext, **arguments: Any) -> Buffer:
    return Buffer(context.group, 1 << 20, RDMA_BYTES, low_latency_mode=True, device="cuda", **arguments)


def what_is_held() -> tuple[int, int, int]:
    """Descriptors, mapped heaps, and memory that kernels may use."""
    from tests.support.simulated_gpu import registered

    maps = Path("/proc/self/maps").read_text()
    return len(list(Path("/proc/self/fd").iterdir())), maps.count("heap for kernels"), len(registered)


def use_and_leave(context: RankContext) -> None:
    new_buffer(context).destroy()
    gc.collect()
    before = what_is_held()
    buffer = new_buffer(context, heap="host")
    assert buffer.runtime is not None
    assert "RDMA bytes in memory of the host; normal and" in repr(buffer)
    check_case(context.rank, CASE, buffer)
    # Of all ranks; and the region that hosts share.
    assert what_is_held()[1:] == (before[1] + 2, before[2] + 3)
    rest = buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
    assert rest.shape == (RDMA_BYTES,)
    # Peers may still read what they combine.
    dist.barrier(group=context.group)
    rest.fill_(7)
    buffer.destroy()
    del buffer
    new_buffer(context).destroy()
    assert what_is_held()[1:] == (before[1] + 2, before[2] + 2), "a lent tensor keeps its heap"
    assert int(rest[-1]) == 7
    del rest
    gc.collect()
    # It frees what others left.
    new_buffer(context).destroy()
    assert what_is_held() == before


def test_nothing_is_left_behind() -> None:
    PLACE.world().run(use_and_leave)


def make_where_gpus_are_apart(context: RankContext, heap: str | None) -> tuple[str, list[str]]:
    """On rank 1 CUDA says that two GPUs cannot reach each other. What is raised, or made, and logged."""
    from anyep.backends.cuda.gpu import Gpu

    usual = Gpu.why_not_shared
    if context.rank == 1:
        Gpu.why_not_shared = lambda *_: "GPU 0 and GPU 1 are far apart"  # type: ignore[method-assign]
    try:
        with warnings_heard() as heard, new_buffer(context, heap=heap) as buffer:
            assert buffer.runtime is not None
            check_case(context.rank, CASE, buffer)
            dist.barrier(group=context.group)
            assert "in memory of the host" in repr(buffer)
            return type(buffer.runtime.heap).__name__, heard
    except AnyEPError as error:
        return f"{type(error).__name__}: {error}", heard
    finally:
        Gpu.why_not_shared = usual  # type: ignore[method-assign]


@pytest.mark.parametrize("heap", [None, pytest.param("auto", marks=pytest.mark.slow)])
def test_gpus_that_cannot_reach_each_other(heap: str | None) -> None:
    (first, heard), other = PLACE.world().run(make_where_gpus_are_apart, heap)
    assert (first, other) == ("HostBlock", ("HostBlock", []))
    assert [line for line in heard if "share a GPU" not in line] == [
        "rows go through memory of the host, because GPU 0 and GPU 1 are far apart"
    ]


def test_gpus_that_must_reach_each_other() -> None:
    why = (
        "NotSupported: heap is 'device', but GPU 0 and GPU 1 are far apart: pass heap='host'"
        " (ANYEP_HEAP=host), or leave it out"
    )
    assert PLACE.world().run(make_where_gpus_are_apart, "device") == [(why, [])] * 2


def fail_to_make(context: RankContext, what: str) -> tuple[list[str], tuple[int, ...]]:
    """What is raised if rank 1 cannot make its heap, or open the other one's, and what is left."""
    from anyep import gpu_connection
    from anyep.backends.cuda.gpu import Gpu
    from tests.support.simulated_gpu import registered

    def refuse(gpu: Gpu, address: int, num_bytes: int) -> bool:
        nonlocal num_left
        num_left -= num_bytes > RDMA_BYTES
        return (num_left >= 0 or num_bytes < RDMA_BYTES) and usual(gpu, address, num_bytes)

    usual, usual_memory = Gpu.let_kernels_read, gpu_connection.free_memory_bytes
    new_buffer(context).destroy()
    gc.collect()
    before = what_is_held()
    num_left = {"its own": 0, "the other one's": 1}.get(what, 0)
    if context.rank == 1:
        if what == "memory":
            gpu_connection.free_memory_bytes = lambda: 1 << 20
        else:
            Gpu.let_kernels_read = refuse  # type: ignore[method-assign]
    messages = [attempt(lambda: new_buffer(context, heap="host"))]
    Gpu.let_kernels_read, gpu_connection.free_memory_bytes = usual, usual_memory  # type: ignore[method-assign]
    gc.collect()
    new_buffer(context).destroy()
    assert len(registered) == before[2]
    return messages, tuple(after - was for after, was in zip(what_is_held(), before, strict=True))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("memory", "heaps in memory of the host take 1"),
        pytest.param("its own", "rank 1 could not let its GPU use 5,", marks=pytest.mark.slow),
        ("the other one's", "rank 1 could not let its GPU use 5,"),
    ],
)
def test_heaps_that_cannot_be_made(what: str, reason: str) -> None:
    for rank, ((message,), left) in enumerate(PLACE.world().run(fail_to_make, what)):
        prefix = "" if rank == 1 else "rank 1 could not make its Buffer: "
        assert message.startswith(f"NotSupported: {prefix}{reason}")
        assert "num_nvl_bytes" in message
        assert left == (0, 0, 0)


def fail_to_open(context: RankContext) -> str:
    """CUDA cannot be asked about GPUs that a rank does not see: what is wrong shows when they are used."""
    from tests.support.simulated_gpu import SimulatedBlock

    def refuse(block: SimulatedBlock, group: Any) -> None:
        usual(block, group)
        if context.rank == 1:
            raise RuntimeError("CUDA error: peer access is not supported")

    usual = SimulatedBlock.connect
    SimulatedBlock.connect = refuse  # type: ignore[method-assign]
    try:
        return attempt(lambda: new_buffer(context))
    finally:
        SimulatedBlock.connect = usual  # type: ignore[method-assign]


def test_memory_that_cannot_be_opened() -> None:
    other, own = PLACE.world().run(fail_to_open)
    why = (
        "the memory of other ranks' GPUs cannot be opened (CUDA error: peer access is not supported): where"
        " GPUs cannot reach each other's memory, pass heap='host' (ANYEP_HEAP=host)"
    )
    assert own == f"NotSupported: {why}"
    assert other == f"NotSupported: rank 1 could not make its Buffer: {why}"


# Normal mode, with few rows: on a simulated GPU no ring can be emptied while it is filled


def run_normal_mode(context: RankContext, case: NormalCase) -> None:
    with Buffer(context.group, NVL_BYTES, device="cuda", heap="host", num_window_bytes=1 << 20) as buffer:
        assert buffer.runtime is not None
        assert buffer.runtime.windows.num_bytes == 0
        check_normal_case(context, case, buffer)
        dist.barrier(group=context.group)


@pytest.mark.parametrize(
    "case",
    [
        NormalCase((3, 2), hidden=64),
        pytest.param(
            NormalCase((2, 3), hidden=128, num_biases=1, worst=True), marks=pytest.mark.slow, id="worst"
        ),
    ],
)
def test_normal_mode(case: NormalCase) -> None:
    PLACE.world().run(run_normal_mode, case)


# What CUDA says


def gpus(monkeypatch: pytest.MonkeyPatch, reached: set[tuple[int, int]], attributes: dict[int, int]) -> None:
    """Three GPUs, a, b and c."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _Properties("abc"[index]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair in reached)
    monkeypatch.setattr(driver, "attribute", lambda number, device: attributes.get(number, 1))


class _Properties:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


def test_why_gpus_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    all_pairs = {(one, other) for one in range(3) for other in range(3)}
    gpus(monkeypatch, all_pairs, {})
    assert reach.why_not_shared(0, "abc") == ""
    gpus(monkeypatch, all_pairs - {(2, 0)}, {})
    assert reach.why_not_shared(0, "abc") == "GPU 0 and GPU 2 cannot reach each other's memory"
    assert reach.why_not_shared(0, "ab") == ""
    assert reach.why_not_shared(1, "abc") == ""
    assert reach.why_not_shared(0, ["a", "a GPU that is not visible"]) == ""
    gpus(monkeypatch, all_pairs, {reach.SHARES_MEMORY: 0})
    assert "GPU 1 cannot be shared with other processes" in reach.why_not_shared(1, "b")


@pytest.mark.parametrize(
    ("wanted", "are_apart", "state", "words"),
    [
        ("", False, "ok", "ranks share memory of the GPUs"),
        ("device", False, "ok", "ranks share memory of the GPUs"),
        ("host", False, "ok", "as ANYEP_HEAP says; ranks on these GPUs could share their own as well"),
        ("host", True, "ok", "could not share their own, because GPU 1 and GPU 2 cannot reach"),
        ("auto", True, "note", "share memory of the host, because GPU 1 and GPU 2 cannot reach each other's"),
        (
            "device",
            True,
            "note",
            "ANYEP_HEAP is device, but GPU 1 and GPU 2 cannot reach each other's memory",
        ),
        ("gpu", True, "", ""),
    ],
)
def test_doctor(
    monkeypatch: pytest.MonkeyPatch, wanted: str, are_apart: bool, state: str, words: str
) -> None:
    all_pairs = {(one, other) for one in range(3) for other in range(3)}
    gpus(monkeypatch, all_pairs - ({(2, 1)} if are_apart else set()), {})
    monkeypatch.setenv("ANYEP_HEAP", wanted)
    findings = list(doctor.check_heap())
    assert [finding.state for finding in findings] == ([state] if state else [])
    for finding in findings:
        assert finding.name == "heap"
        assert words in finding.detail


def test_a_heap_that_is_nowhere() -> None:
    place = Place("cpu", 2)
    message = "heap is 'gpu': it must be 'auto', 'device' or 'host', or left out"
    assert place.world().run(_make_on_the_cpu, "gpu") == [
        f"InvalidCall: {message}",
        f"InvalidCall: {message}",
    ]


def _make_on_the_cpu(context: RankContext, heap: str) -> str:
    return attempt(lambda: Buffer(context.group, 1 << 20, device="cpu", heap=heap).destroy())
