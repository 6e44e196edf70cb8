"""`deep_ep.utils.testing`: how long calls and kernels take, on GPUs and on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from anyep.errors import whole_number

L2_FLUSH_BYTES: Final = 256_000_000
SLEEP_CYCLES: Final = 20_000_000
"""About 10 ms, in which all ranks can launch what comes next."""


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 30,
    num_tests: int = 30,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """The average, least and largest time of a call in seconds, without the first one after the warm-up."""
    whole_number("num_tests", num_tests, minimum=2)
    for _ in range(num_warmups):
        fn()
    on_gpu = _works_on_gpu()
    timed = [_time_of(fn, on_gpu, flush_l2, post_fn) for _ in range(num_tests)]
    times = [measured() for measured in timed][1:]
    return sum(times) / len(times), min(times), max(times)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """The average time of kernels in seconds, by the part of their name; a tuple of names gives a list.

    AnyEP's kernels have names of their own: for a name that no kernel has, and on the CPU, the time is that
    of a whole call. With `num_kernels_per_period` there is a list of so many times for each name: of every
    first kernel of a period, of every second one, and so on.
    """
    whole_number("num_tests", num_tests, minimum=1)
    whole_number("num_kernels_per_period", num_kernels_per_period, minimum=1)
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    on_gpu = _works_on_gpu()
    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    fn()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        timed = []
        for _ in range(num_tests):
            if barrier_comm_profiling:
                _arrive_together(on_gpu, barrier)
            timed.append(_time_of(fn, on_gpu, flush_l2))
        whole = sum(measured() for measured in timed) / num_tests
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    kernels = [event for event in profiler.events() or [] if event.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda event: event.time_range.start)
    found: list[Any] = []
    for name in names:
        durations = [1e-6 * event.time_range.elapsed_us() for event in kernels if name in event.name]
        found.append(_averages(durations, num_kernels_per_period, whole))
    return found[0] if isinstance(kernel_names, str) else found


def _averages(durations: list[float], num_per_period: int, otherwise: float) -> Any:
    """The average, or a list of the averages of every first, second, ... one of a period."""
    parts = [durations[first::num_per_period] for first in range(num_per_period)]
    averages = [sum(part) / len(part) if part else otherwise for part in parts]
    return averages[0] if num_per_period == 1 else averages


def _works_on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _time_of(
    fn: Callable[[], Any], on_gpu: bool, flush_l2: bool, then: Callable[[], Any] | None = None
) -> Callable[[], float]:
    """Call a function; what is returned tells the seconds that it took, waiting for the GPU if need be."""
    if on_gpu and flush_l2:
        torch.empty(L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda").zero_()
    with _clock(on_gpu) as measured:
        fn()
    if then is not None:
        then()
    return measured


@contextmanager
def _clock(on_gpu: bool) -> Iterator[Callable[[], float]]:
    if on_gpu:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()

        def between() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        yield between
        end.record()
        return
    began = time.perf_counter()
    seconds: list[float] = []
    yield lambda: seconds[0]
    seconds.append(time.perf_counter() - began)


def _arrive_together(on_gpu: bool, barrier: Callable[[], Any] | None) -> None:
    if on_gpu:
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    if barrier is not None:
        barrier()
    elif on_gpu:
        dist.all_reduce(torch.ones(1, dtype=torch.float32, device="cuda"))
    else:
        dist.barrier()
