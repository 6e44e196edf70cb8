"""The cases of `anyep bench --mode normal`, and how they are timed.

All ranks run a case at the same time. The clock starts when the last rank enters the barrier before the case
and stops when the last rank is done, over all ranks: with more ranks than cores, one rank's own clock would
show anything. The cases are interleaved, so that a slow moment of the machine hits them alike.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from anyep.cli.ranks import Rank, run_ranks
from anyep.machine import num_cores

WARM_UP: Final = 3


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    repeats: int
    seed: int

    def description(self) -> str:
        return (
            f"{self.ranks} ranks on {num_cores()} cores, {self.tokens} tokens per rank,"
            f" hidden {self.hidden} bf16, top-{self.topk} of {self.experts} experts;"
            f" medians of {self.repeats} interleaved repeats"
        )


@dataclass(frozen=True)
class Case:
    """What is timed, and the bytes of rows that it brings to this rank."""

    name: str
    path: str
    tokens: int
    num_bytes: int
    work: Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """One case on one rank: (start, end) in ns per repeat, and the bytes of rows that it received."""

    case: str
    path: str
    tokens: int
    num_bytes: int
    spans: list[tuple[int, int]]


def measure(setup: Setup, show_progress: bool) -> list[dict[str, Any]]:
    """Run every case and return the records, in the order of the table."""

    def on_report(rank: int, done: Any) -> None:
        if show_progress and rank == 0:
            tokens, repeat, repeats = done
            text = f"\r{tokens} tokens: repeat {repeat} of {repeats}   "
            print(text, end="", file=sys.stderr, flush=True)

    by_rank: list[list[Timing]] = run_ranks(setup.ranks, _measure_on_rank, setup, on_report=on_report)
    if show_progress:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
    medians: dict[tuple[str, str, int], float] = {}
    num_bytes: dict[tuple[str, str, int], float] = {}
    for timings in zip(*by_rank, strict=True):
        key = (timings[0].case, timings[0].path, timings[0].tokens)
        durations = [
            (max(end for _, end in spans) - max(start for start, _ in spans)) / 1e9
            for spans in zip(*(timing.spans for timing in timings), strict=True)
        ]
        medians[key] = statistics.median(durations)
        num_bytes[key] = statistics.mean(timing.num_bytes for timing in timings)
    records = []
    for (case, path, tokens), seconds in medians.items():
        if path == "gloo" or case == "copy":
            continue
        copy = medians.get(("copy", "copy", tokens))
        gloo = medians.get((case, "gloo", tokens))
        received = num_bytes[case, path, tokens]
        copies = 2 if case == "pair" else 1
        records.append(
            {
                "case": case,
                "path": path,
                "ranks": setup.ranks,
                "tokens": tokens,
                "hidden": setup.hidden,
                "bytes": round(received),
                "median_s": seconds,
                "gbps": received / seconds / 1e9,
                "of_copy": copies * copy / seconds if copy and received else None,
                "vs": {"gloo": gloo / seconds} if gloo else {},
            }
        )
    return records


class Barrier:
    """A barrier in shared memory: the ranks leave it within microseconds of each other."""

    def __init__(self, rank: Rank) -> None:
        import numpy as np
        import torch.distributed as dist

        from anyep.backends import cpu

        self._cpu = cpu
        own = cpu.OwnBlock("barrier", 128 * (rank.num_ranks + 1))
        addresses: list[Any] = [None] * rank.num_ranks
        dist.all_gather_object(addresses, own.share())
        blocks = [
            own if peer == rank.rank else cpu.open_block(address, peer)
            for peer, address in enumerate(addresses)
        ]
        self._blocks = blocks
        self._theirs = np.array([block.address + 128 * rank.rank for block in blocks], np.int64)
        self._mine = np.array([own.address + 128 * peer for peer in range(rank.num_ranks)], np.int64)
        self._sleepers = np.array([block.address + 128 * rank.num_ranks for block in blocks], np.int64)
        self._own_sleepers = int(self._sleepers[rank.rank])
        self._missing = np.zeros(rank.num_ranks, np.bool_)
        self._count = 0

    def wait(self) -> None:
        self._count += 1
        self._cpu.announce(self._theirs, self._sleepers, self._count)
        while self._cpu.await_counters(self._mine, self._count, self._missing, 0, self._own_sleepers):
            pass


def _measure_on_rank(rank: Rank, setup: Setup) -> list[Timing]:
    barrier = Barrier(rank)
    timings = []
    for tokens in dict.fromkeys((setup.tokens, 1)):
        # One token is about the latency of a loop: each turn of a case is a run of calls.
        timings += _time_cases(rank, setup, barrier, _cases(rank, setup, tokens), 1 if tokens > 1 else 10)
    return timings


def _time_cases(
    rank: Rank, setup: Setup, barrier: Barrier, cases: list[Case], run_length: int
) -> list[Timing]:
    spans: list[list[tuple[int, int]]] = [[] for _ in cases]
    order = list(range(len(cases)))
    # All ranks shuffle alike: no case always follows the same one.
    shuffle = random.Random(setup.seed).shuffle
    for repeat in range(setup.repeats + WARM_UP):
        rank.report((cases[0].tokens, max(0, repeat - WARM_UP + 1), setup.repeats))
        shuffle(order)
        for index in order:
            work = cases[index].work
            for _ in range(run_length):
                barrier.wait()
                start = time.monotonic_ns()
                barrier.wait()
                result = work()
                end = time.monotonic_ns()
                del result
                if repeat >= WARM_UP:
                    spans[index].append((start, end))
    return [
        Timing(case.name, case.path, case.tokens, case.num_bytes, spans[index])
        for index, case in enumerate(cases)
    ]


def _cases(rank: Rank, setup: Setup, tokens: int) -> list[Case]:
    """Every case at one number of tokens."""
    import torch

    from anyep.backends import cpu
    from anyep.buffer import Buffer

    generator = torch.Generator().manual_seed(setup.seed + rank.rank)
    x = torch.randn(tokens, setup.hidden, generator=generator).bfloat16()
    scores = torch.rand(tokens, setup.experts, generator=generator)
    topk_weights, topk_idx = scores.topk(setup.topk, dim=-1)
    hint = Buffer.get_dispatch_config(rank.num_ranks).get_nvl_buffer_size_hint(
        setup.hidden * 2, rank.num_ranks
    )
    by_window = Buffer(rank.group, hint, device="cpu")
    by_ring = Buffer(rank.group, hint, device="cpu", num_window_bytes=0)
    per_rank, _, per_expert, in_rank, _ = by_window.get_dispatch_layout(topk_idx, setup.experts)
    routing = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
    }
    nothing = {
        "num_tokens_per_rank": torch.zeros_like(per_rank),
        "is_token_in_rank": in_rank[:0],
        "num_tokens_per_expert": torch.zeros_like(per_expert),
    }
    received, _, _, _, handle, _ = by_window.dispatch(x, **routing)  # type: ignore[arg-type]
    assert isinstance(received, torch.Tensor)
    assert handle is not None
    private = received.clone()
    row_bytes = setup.hidden * 2
    num_rows = received.shape[0]
    num_bytes = num_rows * row_bytes
    target = cpu.OwnBlock("copy", max(num_bytes, 128))
    gloo = _Gloo(rank, x, in_rank)

    def copy() -> Any:
        cpu.copy_rows(target.address, private.data_ptr(), num_rows, row_bytes, 0)
        return target

    def pair(buffer: Buffer) -> Any:
        rows, _, _, _, new_handle, _ = buffer.dispatch(x, **routing)  # type: ignore[arg-type]
        return buffer.combine(rows, new_handle)  # type: ignore[arg-type]

    def case(name: str, path: str, work: Callable[[], Any], moved: int = num_bytes) -> Case:
        return Case(name, path, tokens, moved, work)

    return [
        case("copy", "copy", copy),
        case("layout", "local", lambda: by_window.get_dispatch_layout(topk_idx, setup.experts), 0),
        case("notify", "letters", lambda: by_window.dispatch(x[:0], **nothing), 0),  # type: ignore[arg-type]
        case("dispatch", "window", lambda: by_window.dispatch(x, **routing)),  # type: ignore[arg-type]
        case("dispatch", "ring", lambda: by_ring.dispatch(x, **routing)),  # type: ignore[arg-type]
        case("dispatch", "gloo", gloo.dispatch),
        case("cached_dispatch", "window", lambda: by_window.dispatch(x, handle=handle)),
        case("cached_dispatch", "ring", lambda: by_ring.dispatch(x, handle=handle)),
        case("cached_dispatch", "gloo", gloo.send_rows),
        case("combine", "window", lambda: by_window.combine(received, handle)),
        case("combine", "staged", lambda: by_window.combine(private, handle)),
        case("combine", "ring", lambda: by_ring.combine(private, handle)),
        case("combine", "gloo", gloo.combine),
        case("pair", "window", lambda: pair(by_window), 2 * num_bytes),
        case("pair", "ring", lambda: pair(by_ring), 2 * num_bytes),
        case("pair", "gloo", lambda: (gloo.dispatch(), gloo.combine()), 2 * num_bytes),
    ]


class _Gloo:
    """The same job as a user would do it with torch.distributed: pack, exchange, add up."""

    def __init__(self, rank: Rank, x: Any, in_rank: Any) -> None:
        import torch

        self._group = rank.group
        self._x = x
        self._order = torch.cat([torch.nonzero(in_rank[:, peer]).flatten() for peer in range(rank.num_ranks)])
        self._to_send = in_rank.sum(0)
        self._to_receive = torch.empty_like(self._to_send)
        self.dispatch()

    def dispatch(self) -> Any:
        """Exchange the counts, then the rows."""
        import torch.distributed as dist

        dist.all_to_all_single(self._to_receive, self._to_send, group=self._group)
        self._received = self.send_rows()
        return self._received

    def send_rows(self) -> Any:
        """Pack the rows by receiver and exchange them."""
        import torch.distributed as dist

        packed = self._x.index_select(0, self._order)
        received = packed.new_empty((int(self._to_receive.sum()), packed.shape[1]))
        dist.all_to_all_single(
            received, packed, self._to_receive.tolist(), self._to_send.tolist(), group=self._group
        )
        return received

    def combine(self) -> Any:
        """Send the rows back and add them up in float32."""
        import torch
        import torch.distributed as dist

        returned = self._x.new_empty((len(self._order), self._x.shape[1]))
        dist.all_to_all_single(
            returned, self._received, self._to_send.tolist(), self._to_receive.tolist(), group=self._group
        )
        total = torch.zeros(self._x.shape, dtype=torch.float32)
        return total.index_add_(0, self._order, returned.float()).to(self._x.dtype)
