"""How long the host takes to launch each call on a GPU, measured without one: Python's share.

    python tools/host_time.py [--tokens 128] [--cold] [--profile cached] [--json]
    python tools/host_time.py --against FOLDER [--rounds 5]

One rank calls a Buffer on the tests' simulated GPU. Kernels are compiled for an H100, but the driver is one
that returns at once, so nothing runs and no peer is waited for. On a real GPU, what the driver and CUDA's
allocator take comes on top of it: there, `anyep bench --device cuda` has a column for the host.

With `--cold` other data goes through the processor's caches before each call, as in a program that does
something else between calls. `--against` takes the folder of another copy of the repository; processes that
measure the two copies take turns, and the medians are shown side by side.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import functools
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, os.environ.get("ANYEP_MEASURED_SOURCE", str(Path(__file__).resolve().parent.parent)))

import numba
import numpy as np
import torch
import torch.distributed as dist
from numba import types

HERE = Path(__file__).resolve().parent.parent
SOURCE = "ANYEP_MEASURED_SOURCE"
"""Names the folder of the copy that a process measures."""
NUM_EXPERTS, TOPK, HIDDEN = 256, 8, 7168
NUM_ROWS = 100
CALLS, REPEATS = 200, 15
OTHER_DATA_BYTES = 1 << 23
"""More than the caches of one core hold."""


def driver_that_returns() -> Any:
    """The functions of the driver that launch kernels; those that load them succeed, too."""

    def function(num_arguments: int, kind: Any = types.int64) -> Any:
        compiled: Any = numba.cfunc(types.int32(*(kind,) * num_arguments))
        made = compiled(_returns[num_arguments])
        return made.ctypes

    def ok(*_: Any) -> int:
        return 0

    def get_function(found: Any, *_: Any) -> int:
        found._obj.value = 1
        return 0

    return SimpleNamespace(
        cuLaunchKernel=function(11),
        cuEventRecord=function(2),
        cuStreamWaitEvent=function(3),
        cuCtxPushCurrent_v2=function(1, types.voidptr),
        cuCtxPopCurrent_v2=function(1, types.voidptr),
        cuStreamIsCapturing=function(2),
        cuGraphCreate=function(2),
        cuGraphAddKernelNode_v2=function(5),
        cuGraphInstantiateWithFlags=function(3),
        cuGraphUpload=function(2),
        cuGraphExecKernelNodeSetParams_v2=function(3),
        cuGraphLaunch=function(2),
        cuGraphExecDestroy=function(1),
        cuGraphDestroy=function(1),
        cuDevicePrimaryCtxRetain=get_function,
        cuModuleLoadData=ok,
        cuModuleGetFunction=get_function,
        cuFuncSetAttribute=ok,
    )


_returns = {
    1: lambda a: 0,
    2: lambda a, b: 0,
    3: lambda a, b, c: 0,
    5: lambda a, b, c, d, e: 0,
    11: lambda a, b, c, d, e, f, g, h, i, j, k: 0,
}


def keep_freed_memory() -> None:
    """Let C's allocator keep what is freed, as CUDA's does: tensors of many megabytes would otherwise take a
    system call to allocate, and one to free."""
    mmap_max, trim_threshold = -4, -1
    library = ctypes.CDLL(None)
    library.mallopt(mmap_max, 0)
    library.mallopt(trim_threshold, 2**31 - 1)


def use_driver_that_returns() -> None:
    """Buffers of this process with device "cuda" launch kernels that never run."""
    from anyep.api import options
    from anyep.backends import cpu
    from anyep.backends.cuda import constants, device_control, driver, gpu, stream
    from tests.support import simulated_gpu

    class Gpu(simulated_gpu.SimulatedGpu):
        architecture = "that only returns"
        """What is used here is loaded for no Buffer of another kind."""

        def __init__(self) -> None:
            super().__init__()
            self.stream = stream.Stream()  # type: ignore[assignment]
            self.side_stream = self.stream.stream
            self._events: list[Any] = []
            names = "cuEventRecord", "cuStreamWaitEvent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"
            words = [*map(driver.address_of, names), driver.context_of(0), 0]
            self._driver_words = np.array(words, np.int64)
            self._driver_address = int(self._driver_words.ctypes.data)
            self._record_and_wait = cpu.record_and_wait

        now, last_use = gpu.Gpu.now, gpu.Gpu.last_use
        end_of_use = gpu.Gpu.end_of_use  # type: ignore[assignment]
        wait_for_use, forget_use = gpu.Gpu.wait_for_use, gpu.Gpu.forget_use

        def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

        empty_like = staticmethod(torch.empty_like)  # type: ignore[assignment]

    library = driver_that_returns()
    driver._library = lambda: library  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.Stream = lambda: SimpleNamespace(cuda_stream=1)  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *_: SimpleNamespace(cuda_stream=0)  # type: ignore[assignment]
    torch.cuda.Event = lambda: SimpleNamespace(  # type: ignore[assignment,misc]
        cuda_event=2, record=lambda stream: None, synchronize=lambda: None, query=lambda: True
    )
    # No function of Python's: what they replace is compiled, too.
    torch._C._cuda_getCurrentRawStream = functools.partial(int)
    torch._C._cuda_isCurrentStreamCapturing = functools.partial(bool)
    gpu.Gpu = Gpu  # type: ignore[assignment,misc]
    options.checked_device = lambda device: simulated_gpu.SimulatedDevice()  # type: ignore[assignment,return-value]

    def totals_at_once(control: Any, ticket: int) -> Any:
        """No kernel writes the totals: there are some rows, and none goes through rings."""
        control.totals[constants.TOTAL_ROWS] = NUM_ROWS
        return control.totals

    device_control.DeviceControl.wait_for_totals = totals_at_once  # type: ignore[assignment,method-assign]


def calls(tokens: int) -> dict[str, Callable[[], Any]]:
    """What is measured, by name."""
    from anyep import Buffer

    topk_idx = torch.stack([torch.randperm(NUM_EXPERTS)[:TOPK] for _ in range(tokens)])
    weights = torch.rand(tokens, TOPK)
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    group = dist.group.WORLD
    normal = Buffer(group, 1 << 28, device="cuda")
    slots = Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, 1, NUM_EXPERTS)
    fast = Buffer(group, 0, slots, low_latency_mode=True, device="cuda")
    per_rank, _, per_expert, in_rank, _ = normal.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    in_rank.fill_(True)

    def dispatch(**more: Any) -> Any:
        return normal.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            **more,
        )

    *_, handle, _ = dispatch(num_worst_tokens=tokens)
    rows: Any = normal.dispatch(x, handle=handle)[0]
    sent: Any = fast.low_latency_dispatch(x, topk_idx, tokens, NUM_EXPERTS, use_fp8=False)
    expert_rows, _, fast_handle, *_ = sent

    def fast_dispatch(hooked: bool) -> Any:
        return fast.low_latency_dispatch(x, topk_idx, tokens, NUM_EXPERTS, return_recv_hook=hooked)

    def dispatch_and_receive() -> None:
        hook = fast_dispatch(True)[-1]
        hook()

    def fast_combine() -> Any:
        return fast.low_latency_combine(expert_rows, topk_idx, weights, fast_handle)

    return {
        "layout": lambda: normal.get_dispatch_layout(topk_idx, NUM_EXPERTS),
        "cached dispatch": lambda: normal.dispatch(x, handle=handle),
        "combine": lambda: normal.combine(rows, handle),
        "full dispatch": dispatch,
        "worst-case dispatch": lambda: dispatch(num_worst_tokens=tokens),
        "low-latency dispatch": lambda: fast_dispatch(False),
        "low-latency combine": fast_combine,
        "low-latency dispatch and hook": dispatch_and_receive,
    }


def microseconds(call: Callable[[], Any], is_cold: bool) -> float:
    """The median over several runs, in time of the processor: other processes do not count."""
    found = []
    if is_cold:
        other = np.zeros(OTHER_DATA_BYTES // 8)
        for _ in range(REPEATS * CALLS // 4):
            other += 1
            began = time.perf_counter()
            call()
            found.append((time.perf_counter() - began) * 1e6)
        return statistics.median(found)
    for _ in range(REPEATS):
        began = time.thread_time()
        for _ in range(CALLS):
            call()
        found.append((time.thread_time() - began) / CALLS * 1e6)
    return statistics.median(found)


def compare(options: argparse.Namespace) -> None:
    """Measure this copy and another one in turns; each run is a process of its own."""
    sources = {"there": str(Path(options.against).resolve()), "here": str(HERE)}
    found: dict[str, dict[str, list[float]]] = {}
    command = [sys.executable, __file__, "--json", "--tokens", str(options.tokens)]
    command += ["--cold"] * options.cold
    for turn in range(options.rounds):
        for where in sorted(sources, reverse=turn % 2 == 0):
            environment = {**os.environ, SOURCE: sources[where]}
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            for name, value in json.loads(run.stdout).items():
                found.setdefault(name, {"there": [], "here": []})[where].append(value)
    print(f"{'us, medians':32} {'there':>9} {'here':>9}")
    for name, by_source in found.items():
        there, here = (statistics.median(by_source[where]) for where in ("there", "here"))
        print(f"{name:32} {there:9.1f} {here:9.1f}")


def show_profile(call: Callable[[], Any]) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(2000):
        call()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(90)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--profile", metavar="NAME", help="profile the calls of this name")
    parser.add_argument("--cold", action="store_true", help="other data goes through the caches before calls")
    parser.add_argument("--against", metavar="FOLDER", help="compare with another copy of the repository")
    parser.add_argument("--rounds", type=int, default=5, help="how often each copy is measured")
    parser.add_argument("--json", action="store_true", help="print a record instead of a table")
    options = parser.parse_args()
    if options.against is not None:
        compare(options)
        return 0
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", rank=0, world_size=1, store=torch._C._distributed_c10d.HashStore())
    torch.set_num_threads(1)
    keep_freed_memory()
    use_driver_that_returns()
    found = {}
    for name, call in calls(options.tokens).items():
        if options.profile is not None:
            if options.profile in name:
                show_profile(call)
            continue
        call()
        found[name] = round(microseconds(call, options.cold), 1)
        if not options.json:
            print(f"{name:32} {found[name]:7.1f} us", flush=True)
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
