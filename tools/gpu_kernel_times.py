"""How long each kernel of a call takes on a GPU, and what lies between them: calls of one rank alone.

    python tools/gpu_kernel_times.py [--tokens 1,128] [--calls 200] [--json]

Calls are replayed as a CUDA graph under torch's profiler. With one rank no kernel waits for another rank, so
the times are those of the work itself: what a call of few tokens takes is what every call pays for its
kernels. A "span" is from the start of a call's first kernel to the end of its last one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_ranks import join

NUM_EXPERTS, TOPK, HIDDEN = 256, 8, 7168
WARM_UP = 5


class Kernel(NamedTuple):
    """One run of a kernel, in microseconds."""

    name: str
    start: float
    duration: float


def summary(kernels: Sequence[Kernel], num_calls: int) -> list[tuple[str, float]]:
    """The median time of each kernel of a call, of the gaps in a call together, and of its span.

    `kernels` are those of equal calls, in the order of time.

    >>> runs = [Kernel("a", 0, 2), Kernel("b", 3, 4), Kernel("a", 10, 2), Kernel("b", 13, 4)]
    >>> summary(runs, 2)
    [('a', 2.0), ('b', 4.0), ('gaps', 1.0), ('span', 7.0)]
    """
    per_call = len(kernels) // num_calls
    if per_call * num_calls != len(kernels):
        raise ValueError(f"{len(kernels)} kernels are no whole number for each of {num_calls} calls")
    calls = [kernels[at : at + per_call] for at in range(0, len(kernels), per_call)]
    found = [
        (kernel.name, statistics.median(call[at].duration for call in calls))
        for at, kernel in enumerate(calls[0])
    ]
    spans = [call[-1].start + call[-1].duration - call[0].start for call in calls]
    gaps = [span - sum(k.duration for k in call) for span, call in zip(spans, calls, strict=True)]
    return [*found, ("gaps", statistics.median(gaps)), ("span", statistics.median(spans))]


def calls_of(group: Any, tokens: int) -> dict[str, Callable[[], Any]]:
    """Calls that can be captured, by name."""
    import torch

    from anyep import Buffer

    num_bytes = Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, group.size(), NUM_EXPERTS)
    normal = Buffer(group, 1 << 28, device="cuda", num_window_bytes=1 << 28)
    fast = Buffer(group, 0, num_bytes, low_latency_mode=True, device="cuda")
    generator = torch.Generator().manual_seed(1)
    topk_idx = torch.rand(tokens, NUM_EXPERTS, generator=generator).topk(TOPK, dim=1).indices.cuda()
    weights = torch.rand(tokens, TOPK, device="cuda")
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    per_rank, _, per_expert, in_rank, _ = normal.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    sent: Any = normal.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )
    rows, _, _, _, handle, _ = sent
    fast_sent: Any = fast.low_latency_dispatch(x, topk_idx, tokens, NUM_EXPERTS, use_fp8=False)
    expert_rows, _, fast_handle, *_ = fast_sent
    return {
        "layout": lambda: normal.get_dispatch_layout(topk_idx, NUM_EXPERTS),
        "cached dispatch": lambda: normal.dispatch(x, handle=handle),
        "combine": lambda: normal.combine(rows, handle),
        "low-latency dispatch, FP8": lambda: fast.low_latency_dispatch(x, topk_idx, tokens, NUM_EXPERTS),
        "low-latency combine": lambda: fast.low_latency_combine(expert_rows, topk_idx, weights, fast_handle),
    }


def kernels_of(call: Callable[[], Any], num_calls: int) -> list[Kernel]:
    """The kernels of so many replays of a captured call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(WARM_UP):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    for _ in range(WARM_UP):
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_calls):
            graph.replay()
            torch.cuda.synchronize()
    del kept
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    found = [Kernel(e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") == "kernel"]
    return sorted(found, key=lambda kernel: kernel.start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1,128")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[tuple[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        group = join(0, 1, f"{folder}/store")
        for tokens in map(int, arguments.tokens.split(",")):
            for name, call in calls_of(group, tokens).items():
                kernels = kernels_of(call, arguments.calls)
                found.setdefault(name, {})[str(tokens)] = summary(kernels, arguments.calls)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, by_tokens in found.items():
        for tokens_of, times in by_tokens.items():
            print(f"{name}, {tokens_of} tokens: " + ", ".join(f"{what} {us:.1f}" for what, us in times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
