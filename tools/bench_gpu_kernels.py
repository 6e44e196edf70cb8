"""Times the GPU's kernels between ranks that share one GPU: `python tools/bench_gpu_kernels.py`.

A dispatch is letters, rows into the receivers' windows, and the wait for everyone's rows; a combine is
letters, the sums of rows where they lie, and the wait until everyone has read. Each is launched as it is, and
replayed as a CUDA graph. Results are compared with torch's first. Rates are of received bytes, per rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from anyep.backends.cuda.heap import SymmetricBlock
from anyep.backends.cuda.mps import MultiProcessService

CONTROL_BYTES = 1 << 20
MAILBOXES_AT, ARRIVED_AT, PULLED_AT = 4096, 1 << 16, 1 << 17
LETTER_BYTES, FLAG_BYTES = 256, 128
PATIENCE_NS = 5 * 10**9
TOKENS, HIDDEN, EXPERTS, TOPK = 4096, 7168, 256, 8
DISPATCH_TILES = {2: (16, 1024, 32), 4: (8, 512, 16), 8: (16, 1024, 32)}
COMBINE_TILES = {2: (32, 1024, 32), 4: (8, 1024, 32), 8: (16, 1024, 32)}


class Rank:
    """One rank: its routing, its memory, and the two calls."""

    def __init__(self, rank: int, num_ranks: int, num_programs: int) -> None:
        self.rank, self.num_ranks, self.num_programs = rank, num_ranks, num_programs
        torch.manual_seed(0)
        choices = [torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOPK).indices for _ in range(num_ranks)]
        base = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
        marks = [torch.zeros(TOKENS, num_ranks, dtype=torch.bool, device="cuda") for _ in choices]
        for mark, chosen in zip(marks, choices, strict=True):
            mark.scatter_(1, chosen // (EXPERTS // num_ranks), True)
        counts = torch.stack([mark.sum(0) for mark in marks])  # from, to
        before = (counts.cumsum(0) - counts)[rank]
        self.in_rank = marks[rank]
        self.x = base + rank
        self.send_head = torch.where(self.in_rank, self.in_rank.cumsum(0) - 1 + before, -1).int()
        self.expected = torch.cat([(base + source)[mark[:, rank]] for source, mark in enumerate(marks)])
        block = SymmetricBlock(dist.group.WORLD, CONTROL_BYTES + int(counts.sum(0).max()) * 2 * HIDDEN)
        block.tensor(0, (CONTROL_BYTES,), torch.uint8).zero_()
        torch.cuda.synchronize()
        dist.barrier()
        self.window = block.tensor(CONTROL_BYTES, tuple(self.expected.shape), torch.bfloat16)
        self.number = block.tensor(0, (1,), torch.int64)
        self.bases = torch.tensor(block.addresses, device="cuda")
        self.own = block.address
        self.places = torch.zeros(num_ranks, 5, dtype=torch.int64, device="cuda")
        self.mailboxes = self.bases + MAILBOXES_AT + LETTER_BYTES * rank
        self.flags_there = {at: self.bases + at + FLAG_BYTES * rank for at in (ARRIVED_AT, PULLED_AT)}
        self.outcome = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.letter = torch.zeros(LETTER_BYTES // 8, dtype=torch.int64, device="cuda")
        self.letter[3] = CONTROL_BYTES
        self.sources = torch.zeros(num_ranks, TOKENS * num_ranks, dtype=torch.int32, device="cuda")
        self.places[:, 1] = self.sources.data_ptr()  # source indices go nowhere of interest here
        self.out = torch.empty_like(self.x)
        self.blocks = {"NUM_RANKS": num_ranks, "RANK_BLOCK": max(2, num_ranks), "num_warps": 1}

    def letters(self) -> None:
        from anyep.backends.cuda.kernels.letters import exchange_letters

        exchange_letters[(1,)](
            self.number,
            self.letter,
            self.mailboxes,
            self.own + MAILBOXES_AT,
            LETTER_BYTES * self.num_ranks,
            LETTER_BYTES,
            self.bases,
            self.places,
            5,
            self.outcome,
            PATIENCE_NS,
            self.number,  # letters without counts
            self.number,
            self.number,
            0,
            0,
            0,
            FIRST_AGREEING=1,
            END_AGREEING=3,
            OFFSET_WORD=3,
            NUM_WORDS=LETTER_BYTES // 8,
            **self.blocks,
        )

    def meet(self, flags_at: int) -> None:
        from anyep.backends.cuda.kernels.letters import meet

        meet[(1,)](
            self.flags_there[flags_at],
            self.own + flags_at,
            FLAG_BYTES,
            self.number,
            self.outcome,
            PATIENCE_NS,
            **self.blocks,
        )

    def dispatch(self) -> None:
        from anyep.backends.cuda.kernels.windows import send_to_windows

        self.letters()
        tile_tokens, tile_words, num_warps = DISPATCH_TILES[self.num_ranks]
        send_to_windows[(self.num_programs,)](
            self.x.view(torch.int32),
            self.x,
            self.x,
            self.x,
            self.send_head,
            self.places,
            self.outcome,
            TOKENS,
            HIDDEN // 2,
            0,
            0,
            0,
            0,
            0,
            NUM_RECEIVERS=self.num_ranks,
            SCALE_BLOCK=0,
            TOPK_BLOCK=0,
            TILE_TOKENS=tile_tokens,
            TILE_WORDS=tile_words,
            CHUNK_TOKENS=128,
            num_warps=num_warps,
        )
        self.meet(ARRIVED_AT)

    def combine(self) -> None:
        from anyep.backends.cuda.kernels.sums import pull_and_sum

        self.letters()
        tile_tokens, tile_values, num_warps = COMBINE_TILES[self.num_ranks]
        pull_and_sum[(self.num_programs,)](
            self.out.view(torch.uint16),
            self.send_head,
            self.places,
            5,
            TOKENS,
            HIDDEN,
            NUM_RANKS=self.num_ranks,
            TILE_TOKENS=tile_tokens,
            TILE_VALUES=tile_values,
            num_warps=num_warps,
            enable_fp_fusion=False,
        )
        self.meet(PULLED_AT)

    def check(self) -> None:
        self.window.fill_(torch.nan)
        torch.cuda.synchronize()
        dist.barrier()
        self.dispatch()
        assert torch.equal(self.window, self.expected)
        self.combine()
        total = torch.zeros(TOKENS, HIDDEN, device="cuda")
        for peer in range(self.num_ranks):
            total += torch.where(self.in_rank[:, peer, None], self.x.float(), 0.0)
        assert torch.equal(self.out, total.bfloat16())
        assert int(self.outcome) == 0


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """The median over turns of the slowest rank's time."""
    turns = []
    for _ in range(7):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end) / repeats / 1e3)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        turns.append(float(slowest))
    return statistics.median(turns[1:])


def replayed(work: Callable[[], object], repeats: int) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            work()
    return seconds_of(graph.replay, 1) / repeats


def measure(rank: int, num_ranks: int, num_programs: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(0)
    meeting = dist.FileStore(store, num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=num_ranks)
    here = Rank(rank, num_ranks, num_programs)
    for _ in range(5):
        here.check()
    num_bytes = here.expected.numel() * 2
    source = torch.empty_like(here.window)
    copy = num_bytes / seconds_of(lambda: here.window.copy_(source), 10) / 1e9
    rates = [
        num_bytes / measured(work, 10) / 1e9
        for work in (here.dispatch, here.combine)
        for measured in (seconds_of, replayed)
    ]
    letters = replayed(here.letters, 20)
    assert int(here.outcome) == 0
    if rank == 0:
        print(
            f"{num_ranks} ranks x {num_programs} SMs, GB/s per rank: copy {copy:.0f},"
            f" dispatch {rates[0]:.0f} (graph {rates[1]:.0f}), combine {rates[2]:.0f} (graph {rates[3]:.0f});"
            f" letters {letters * 1e6:.1f} us in a graph",
            flush=True,
        )
    dist.barrier()
    os._exit(0)  # destructors of libraries have nothing to add


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--setups", default="2x24,4x24,8x16", help="ranks x SMs per rank, separated by commas"
    )
    setups = [tuple(map(int, setup.split("x"))) for setup in parser.parse_args().setups.split(",")]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {TOKENS} tokens per rank,"
        f" hidden {HIDDEN} bf16, top-{TOPK} of {EXPERTS} experts",
        flush=True,
    )
    with MultiProcessService() as environment, tempfile.TemporaryDirectory() as folder:
        os.environ.update(environment)
        for num_ranks, num_programs in setups:
            arguments = (num_ranks, num_programs, f"{folder}/{num_ranks}-{num_programs}")
            mp.start_processes(measure, arguments, num_ranks, start_method="spawn")  # type: ignore


if __name__ == "__main__":
    main()
