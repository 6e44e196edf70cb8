"""How long a program on GPUs takes to its first calls, with nothing compiled (cold) and from a cache (warm).

    python tools/gpu_first_calls.py [--ranks 8] [--tokens 4096] [--profile] [--json]

Fresh processes import torch, start CUDA, make a Buffer for each mode and make the first call of each kind.
The figures are seconds of the slowest rank. `--profile` shows where the time goes in a rank's first Buffer.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_ranks import AnyEPError, join, outputs_of

T = TypeVar("T")
NUM_EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 256, 8, 7168, 128
Seconds = dict[str, float]


class Stopwatch:
    """Notes how long each step takes."""

    def __init__(self) -> None:
        self.seconds: Seconds = {}

    def time(self, name: str, step: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = step()
        self.seconds[name] = time.perf_counter() - began
        return result


def start_and_call(options: argparse.Namespace) -> Seconds:
    """What a rank does, and how long each step of it takes."""
    watch = Stopwatch()
    torch: Any = watch.time("import torch", lambda: __import__("torch"))
    watch.time("start CUDA", lambda: torch.zeros(1, device="cuda"))
    group = join(options.rank, options.ranks, options.store)
    buffer: Any = watch.time("import anyep and its Buffer", _import_buffer)
    torch.distributed.barrier()
    profile = cProfile.Profile()
    if options.profile and options.rank == 0:
        profile.enable()
    normal: Any = watch.time("first Buffer", lambda: buffer(group, 1 << 28, device="cuda"))
    if options.profile and options.rank == 0:
        profile.disable()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumtime").print_stats(45)
    num_bytes = buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, options.ranks, NUM_EXPERTS)
    fast: Any = watch.time(
        "low-latency Buffer",
        lambda: buffer(group, 0, num_bytes, low_latency_mode=True, device="cuda"),
    )
    x = torch.zeros(options.tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    topk_idx = torch.rand(options.tokens, NUM_EXPERTS, device="cuda").topk(TOPK, dim=1).indices
    weights = torch.rand(options.tokens, TOPK, device="cuda")
    few, few_ids, few_weights = x[:MAX_TOKENS], topk_idx[:MAX_TOKENS], weights[:MAX_TOKENS]

    def first(name: str, call: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        torch.distributed.barrier()
        result = watch.time(f"first {name}", lambda: (call(), torch.cuda.synchronize())[0])
        watch.time(f"second {name}", lambda: (call(), torch.cuda.synchronize())[0])
        return result

    per_rank, _, per_expert, in_rank, _ = first(
        "layout", lambda: normal.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    )
    layout = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }
    rows, _, _, _, handle, _ = first(
        "dispatch", lambda: normal.dispatch(x, topk_idx=topk_idx, topk_weights=weights, **layout)
    )
    first("dispatch with a handle", lambda: normal.dispatch(x, handle=handle))
    first("combine", lambda: normal.combine(rows, handle))
    arguments = few, few_ids, MAX_TOKENS, NUM_EXPERTS
    first("low-latency dispatch, FP8", lambda: fast.low_latency_dispatch(*arguments))
    received, _, fast_handle, *_ = first(
        "low-latency dispatch, bf16", lambda: fast.low_latency_dispatch(*arguments, use_fp8=False)
    )
    first(
        "low-latency combine",
        lambda: fast.low_latency_combine(received, few_ids, few_weights, fast_handle),
    )
    return watch.seconds


def _import_buffer() -> Any:
    """Its parts are imported when they are first used."""
    import anyep

    return anyep.Buffer


def slowest(by_rank: list[Seconds]) -> Seconds:
    """
    >>> slowest([{"a": 1.0, "b": 0.25}, {"a": 0.5, "b": 0.75}])
    {'a': 1.0, 'b': 0.75}
    """
    return {name: round(max(seconds[name] for seconds in by_rank), 3) for name in by_rank[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--profile", action="store_true", help="show where the time of a first Buffer goes")
    parser.add_argument("--json", action="store_true", help="print a record instead of a table")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(start_and_call(options)))
        return 0
    found: dict[str, Seconds] = {}
    arguments = ["--tokens", options.tokens, *(["--profile"] if options.profile else [])]
    with tempfile.TemporaryDirectory() as cache:
        for way in ("cold", "warm"):
            # The second run of the same cache finds everything that the first one has compiled.
            try:
                outputs = outputs_of(__file__, options.ranks, arguments, {"ANYEP_CACHE_DIR": cache})
            except AnyEPError as error:
                parser.error(str(error))
            found[way] = slowest([json.loads(output) for output in outputs])
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{f's, {options.ranks} ranks, the slowest':36}{'cold':>10}{'warm':>10}")
    for name in found["cold"]:
        print(f"{name:36}{found['cold'][name]:10.3f}{found['warm'][name]:10.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
