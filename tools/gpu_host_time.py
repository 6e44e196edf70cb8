"""Host time per call on a real GPU, with kernels launched as CUDA graphs and one by one, side by side.

    python tools/gpu_host_time.py [--ranks 2] [--tokens 128] [--rounds 9] [--json]
    python tools/gpu_host_time.py --against FOLDER [--turns 3]

The host of a shared machine may be twice as fast in one second as in the next. So both ways have Buffers of
their own, and take turns in every round; the median over all calls counts, and the fastest one is shown, too.
Each figure is the time until a function returns, on an idle GPU and on the slowest rank. A dispatch that
counts its rows waits for its peers meanwhile; that wait has a line of its own.

`--against` takes the folder of another copy of the repository: ranks that import the one or the other take
turns, and the medians of both are shown side by side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_ranks import SOURCE, AnyEPError, join, outputs_of

NUM_EXPERTS, TOPK, HIDDEN = 256, 8, 7168
CALLS, WARM_UP = 20, 6
WINDOW_BYTES = 1 << 28
WAYS = {"graphs": True, "one by one": False}
Times = dict[str, list[float]]
Found = dict[str, dict[str, list[float]]]


def calls_of(group: Any, tokens: int, times: Times) -> dict[str, Callable[[], Any]]:
    """The calls of Buffers that are made now; waits for totals are added to `times`."""
    import torch

    from anyep import Buffer

    num_bytes = Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, group.size(), NUM_EXPERTS)
    normal = Buffer(group, WINDOW_BYTES, device="cuda", num_window_bytes=WINDOW_BYTES)
    fast = Buffer(group, 0, num_bytes, low_latency_mode=True, device="cuda")
    generator = torch.Generator().manual_seed(group.rank())
    topk_idx = torch.rand(tokens, NUM_EXPERTS, generator=generator).topk(TOPK, dim=1).indices.cuda()
    weights = torch.rand(tokens, TOPK, device="cuda")
    x = torch.zeros(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    per_rank, _, per_expert, in_rank, _ = normal.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    control: Any = normal.runtime.device_control  # type: ignore[union-attr]
    wait_for_totals = control.wait_for_totals

    def wait(ticket: int) -> Any:
        began = time.perf_counter()
        found = wait_for_totals(ticket)
        times.setdefault("wait in it for totals", []).append(time.perf_counter() - began)
        return found

    control.wait_for_totals = wait

    def dispatch() -> Any:
        return normal.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )

    rows, _, _, _, handle, _ = dispatch()
    sent: Any = fast.low_latency_dispatch(x, topk_idx, tokens, NUM_EXPERTS, use_fp8=False)
    expert_rows, _, fast_handle, *_ = sent

    def send_and_receive() -> None:
        *_, hook = fast.low_latency_dispatch(x, topk_idx, tokens, NUM_EXPERTS, return_recv_hook=True)
        began = time.perf_counter()
        hook()  # type: ignore[misc]
        times.setdefault("hook in it", []).append(time.perf_counter() - began)

    return {
        "layout": lambda: normal.get_dispatch_layout(topk_idx, NUM_EXPERTS),
        "dispatch with a handle": lambda: normal.dispatch(x, handle=handle),
        "combine": lambda: normal.combine(rows, handle),
        "full dispatch": dispatch,
        "low-latency dispatch": lambda: fast.low_latency_dispatch(x, topk_idx, tokens, NUM_EXPERTS),
        "low-latency combine": lambda: fast.low_latency_combine(expert_rows, topk_idx, weights, fast_handle),
        "low-latency dispatch and hook": send_and_receive,
    }


def measure(rank: int, num_ranks: int, store: str, tokens: int, rounds: int) -> None:
    """One rank; rank 0 prints the result as JSON."""
    import torch
    import torch.distributed as dist

    from anyep.backends.cuda import batch

    group = join(rank, num_ranks, store)
    times: dict[str, Times] = {way: {} for way in WAYS}
    calls = {}
    for way, as_graph in WAYS.items():
        batch.launches_as_graph = as_graph
        calls[way] = calls_of(group, tokens, times[way])
        for call in calls[way].values():
            for _ in range(WARM_UP):
                call()
        times[way].clear()
    for _ in range(rounds):
        for name in calls["graphs"]:
            for way in WAYS:
                for _ in range(CALLS):
                    torch.cuda.synchronize()
                    dist.barrier()
                    began = time.perf_counter()
                    calls[way][name]()
                    times[way].setdefault(name, []).append(time.perf_counter() - began)
    by_rank: list[Any] = [None] * num_ranks
    dist.all_gather_object(by_rank, times)
    if rank == 0:
        print(json.dumps(summary(by_rank)))


def summary(by_rank: list[dict[str, Times]]) -> Found:
    """By call and way: the median and the least of the slowest rank's times, in microseconds.

    >>> summary([{"graphs": {"layout": [1e-6, 4e-6, 3e-6]}}, {"graphs": {"layout": [2e-6, 2e-6, 2e-6]}}])
    {'layout': {'graphs': [3.0, 2.0]}}
    """
    found: Found = {}
    for way, of_first in by_rank[0].items():
        for name in of_first:
            calls = zip(*(times[way][name] for times in by_rank), strict=True)
            slowest = [max(call) for call in calls]
            both = statistics.median(slowest), min(slowest)
            found.setdefault(name, {})[way] = [round(seconds * 1e6, 1) for seconds in both]
    return found


def compare(options: argparse.Namespace, arguments: tuple[Any, ...]) -> None:
    """Measure another copy and this one in turns, and show the medians over the turns."""
    here = str(Path(__file__).resolve().parent.parent)
    sources = {"there": str(Path(options.against).resolve()), "here": here}
    found: dict[tuple[str, str], dict[str, list[list[float]]]] = {}
    for turn in range(options.turns):
        for where in sorted(sources, reverse=turn % 2 == 0):
            ranks = outputs_of(__file__, options.ranks, arguments, {SOURCE: sources[where]})
            for name, by_way in json.loads(ranks[0]).items():
                for way, both in by_way.items():
                    found.setdefault((name, way), {"there": [], "here": []})[where].append(both)
    print(f"{'us, median (fastest)':44}" + "".join(f"{where:>18}" for where in sources))
    for (name, way), by_source in found.items():
        line = f"{name + ', ' + way:44}"
        for where in sources:
            medians, fastest = zip(*by_source[where], strict=True)
            line += f"{statistics.median(medians):10.1f} ({min(fastest):5.1f})"
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--against", metavar="FOLDER", help="compare with another copy of the repository")
    parser.add_argument("--turns", type=int, default=3, help="how often each copy is measured")
    parser.add_argument("--json", action="store_true", help="print a record instead of a table")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.rank, options.ranks, options.store, options.tokens, options.rounds)
        return 0
    try:
        arguments = "--tokens", options.tokens, "--rounds", options.rounds
        if options.against is not None:
            compare(options, arguments)
            return 0
        found: Found = json.loads(outputs_of(__file__, options.ranks, arguments)[0])
    except AnyEPError as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{'us, median (fastest)':32}" + "".join(f"{way:>18}" for way in WAYS))
    for name, by_way in found.items():
        print(f"{name:32}" + "".join(f"{by_way[way][0]:10.1f} ({by_way[way][1]:5.1f})" for way in WAYS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
