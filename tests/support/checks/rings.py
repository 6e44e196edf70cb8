"""Checks of the GPU's ring kernels against the CPU's results: on a GPU, or in Triton's interpreter ("cpu").

All ranks wait for each other. On a GPU each has a stream of its own, and rings are tiny. The interpreter runs
the programs of a rank one after the other, so there each rank is a process, and a ring holds what a channel
sends in one call; its counters go around it over several calls. What the CPU's kernels write to windows, or
read there, is the right result: it does not depend on the way that rows take.
"""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from anyep.backends import cpu
from anyep.backends.cpu.kernels import groups
from anyep.backends.cuda import constants
from anyep.backends.cuda.kernels.groups import (
    Beside,
    Biases,
    Outputs,
    Payload,
    Prefixes,
    RingArea,
    RingResults,
    Scales,
    Sums,
    Tables,
)
from anyep.backends.cuda.pinned import pinned_words
from anyep.core import outcomes
from anyep.sizes import TokenLayout
from tests.support.checks import deeper
from tests.support.checks.launching import launch
from tests.support.depth import IS_DEEP

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install anyep[cuda]")
tl = importlib.import_module("triton.language")
atomics = importlib.import_module("anyep.backends.cuda.kernels.atomics")
floats = importlib.import_module("anyep.backends.cuda.kernels.floats")
rings = importlib.import_module("anyep.backends.cuda.kernels.rings")
PARTS = ("beside", "links", "node_rings", "pointers", "relay_combine", "relay_dispatch", "windows")
KERNELS = [
    *(rings, atomics, floats),
    *[importlib.import_module(f"anyep.backends.cuda.kernels.{name}") for name in PARTS],
]

GUARD = 7
TIMEOUT_NS = 20 * 10**9
STRIDE = 128
ABORT_AT, TAIL_AT = 0, 128
EXPERTS_PER_RANK = 3
DTYPES = {torch.bfloat16: cpu.BF16, torch.float16: cpu.FP16, torch.float32: cpu.FP32}


@dataclass(frozen=True)
class Sizes:
    """Of rings, and of the tiles that go through them; the tokens of a call are a call's own."""

    num_ranks: int
    num_channels: int
    ring_rows: int
    tile_tokens: int
    token: TokenLayout
    num_senders: tuple[int, ...] = ()
    """Of each rank, which has as many programs that receive; one per channel unless given."""

    def num_programs(self, rank: int) -> int:
        return 2 * (self.num_senders[rank] if self.num_senders else self.num_channels)

    @property
    def head_at(self) -> int:
        return TAIL_AT + self.num_ranks * STRIDE

    @property
    def rows_at(self) -> int:
        return self.head_at + self.num_ranks * STRIDE

    @property
    def heap_bytes(self) -> int:
        num_entries = self.num_channels * self.num_ranks * self.ring_rows
        return self.rows_at + num_entries * self.token.token_bytes

    @property
    def rank_block(self) -> int:
        return int(triton.next_power_of_2(self.num_ranks))


@dataclass(frozen=True)
class Routing:
    """Which tokens go where; for each rank its choices, and the parts of its handle that kernels read."""

    sizes: Sizes
    topk_idx: list[torch.Tensor]

    @cached_property
    def wanted(self) -> list[torch.Tensor]:
        """[tokens, ranks]."""
        ranks = torch.arange(self.sizes.num_ranks)
        return [(ids[:, :, None] // EXPERTS_PER_RANK == ranks).any(1) for ids in self.topk_idx]

    @cached_property
    def rank_prefix(self) -> torch.Tensor:
        return torch.stack([wanted.sum(0) for wanted in self.wanted]).cumsum(0).int()

    @cached_property
    def send_head(self) -> list[torch.Tensor]:
        before = self.rank_prefix - torch.stack([wanted.sum(0) for wanted in self.wanted]).int()
        return [
            torch.where(wanted, wanted.cumsum(0) - 1 + first, -1).int()
            for wanted, first in zip(self.wanted, before, strict=True)
        ]

    def per_channel(self, rank: int) -> int:
        return max(1, -(-len(self.topk_idx[rank]) // self.sizes.num_channels))

    def recv_channel_prefix(self, rank: int) -> torch.Tensor:
        rows = []
        for sender, wanted in enumerate(self.wanted):
            starts = torch.arange(self.sizes.num_channels) * self.per_channel(sender)
            before = torch.cat([torch.zeros(1), wanted[:, rank].cumsum(0)])
            rows.append(before[starts.clamp(max=len(wanted))])
        return torch.stack(rows).int()

    def num_rows(self, rank: int) -> int:
        return int(self.rank_prefix[-1, rank])


def routing(sizes: Sizes, num_tokens: list[int], seed: int) -> Routing:
    """At random; some choices are no experts."""
    generator = torch.Generator().manual_seed(seed)
    num_experts, num_topk = EXPERTS_PER_RANK * sizes.num_ranks, max(sizes.token.num_topk, 2)
    choices = []
    for count in num_tokens:
        ids = torch.rand(count, num_experts, generator=generator).topk(num_topk, dim=-1).indices
        choices.append(torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -1, ids))
    return Routing(sizes, choices)


@dataclass
class Ranks:
    """All ranks, in one process: their heaps, and how to run something on all of them at a time."""

    sizes: Sizes
    device: str
    heaps: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        num_bytes = self.sizes.heap_bytes
        self.heaps = [self.there(torch.zeros(num_bytes, dtype=torch.uint8)) for _ in range(self.num_ranks)]
        self.bases = self.there(torch.tensor([heap.data_ptr() for heap in self.heaps]))
        state = torch.zeros(constants.NUM_STATES, dtype=torch.int64)
        state[constants.USES_RINGS] = 1
        self.states = [self.there(state) for _ in range(self.num_ranks)]

    @property
    def num_ranks(self) -> int:
        return self.sizes.num_ranks

    @property
    def outcomes(self) -> list[torch.Tensor]:
        return [state[constants.OUTCOME] for state in self.states]

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device; on the CPU where all processes see what one of them writes."""
        return tensor.clone().share_memory_() if self.device == "cpu" else tensor.to(self.device, copy=True)

    def words(self, rank: int, at: int, count: int) -> torch.Tensor:
        return self.heaps[rank][at : at + 8 * count].view(torch.int64)

    def counters(self, kind: str) -> list[list[list[int]]]:
        """The tails, or the heads, that lie at each rank, by [peer][channel]."""
        start = TAIL_AT if kind == "tail" else self.sizes.head_at
        return [
            [
                self.words(rank, start + peer * STRIDE, self.sizes.num_channels).tolist()
                for peer in range(self.num_ranks)
            ]
            for rank in range(self.num_ranks)
        ]

    def set_counters(self, value: int) -> None:
        for heap in self.heaps:
            heap[TAIL_AT : self.sizes.rows_at].view(torch.int64).fill_(value)

    def entry(self, rank: int, channel: int, sender: int, index: int) -> torch.Tensor:
        number = (channel * self.num_ranks + sender) * self.sizes.ring_rows + index
        start = self.sizes.rows_at + number * self.sizes.token.token_bytes
        return self.heaps[rank][start : start + self.sizes.token.token_bytes].cpu()

    def run(self, launch: Callable[[int], None], ranks: list[int] | None = None) -> list[int]:
        """Launch on all ranks, or some, at the same time; the outcomes."""
        ranks = list(range(self.num_ranks)) if ranks is None else ranks
        if self.device == "cpu":
            rewrite_kernels()
            children = [fork(launch, rank) for rank in ranks]
            assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(ranks)
        else:
            # To load a kernel may have to wait for running ones: the first time it does nothing.
            said = [outcome.clone() for outcome in self.outcomes]
            for outcome in self.outcomes:
                outcome.fill_(outcomes.MASKED)
            for rank in ranks:
                launch(rank)
            for outcome, before in zip(self.outcomes, said, strict=True):
                outcome.copy_(before)
            streams = [torch.cuda.Stream() for _ in ranks]  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            for rank, stream in zip(ranks, streams, strict=True):
                with torch.cuda.stream(stream):
                    launch(rank)
            torch.cuda.synchronize()
        return [int(outcome) for outcome in self.outcomes]

    def tables(self, rank: int, targets: torch.Tensor, timeout_ns: int) -> Tables:
        here = torch.zeros(constants.NUM_CONSTANTS, dtype=torch.int64)
        here[constants.RANK], here[constants.OWN_HEAP] = rank, self.heaps[rank].data_ptr()
        here[constants.ABORT_AT], here[constants.TIMEOUT_NS] = ABORT_AT, timeout_ns
        here[constants.TAIL_AT], here[constants.HEAD_AT] = TAIL_AT, self.sizes.head_at
        here[constants.RING_STRIDE] = STRIDE
        return Tables(self.there(here), self.bases, self.states[rank], targets, *[self.bases] * 3)

    @property
    def area(self) -> RingArea:
        sizes = self.sizes
        return RingArea(sizes.rows_at, sizes.ring_rows, sizes.token.token_bytes, sizes.num_channels)

    @property
    def beside(self) -> Beside:
        token = self.sizes.token
        return Beside(*entry_offsets(token), token.num_scales, token.num_topk)


@cache
def rewrite_kernels() -> None:
    """What the interpreter would do in each child, when it calls a function for the first time."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    for module in (*KERNELS, tl.standard):
        for value in list(vars(module).values()):
            if isinstance(value, interpreter.InterpretedFunction):
                interpreter._patch_lang(value.fn)
                value.rewrite()


def fork(function: Callable[[int], None], rank: int) -> int:
    """Run a function in a process of its own; its pid."""
    child = os.fork()
    if child:
        return child
    try:
        function(rank)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def entry_offsets(token: TokenLayout) -> list[int]:
    """Where source meta, scales, ids and weights lie in an entry."""
    return [int(offset) for offset in np.cumsum(list(token.parts().values()))[:4]]


def block_of(count: int) -> int:
    return int(triton.next_power_of_2(count)) if count else 0


def address(tensor: torch.Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None and tensor.numel() else 0


# Dispatch


@dataclass(frozen=True)
class Dispatch:
    """One dispatch: who has a window, and how many of its rows a rank has no room for."""

    routing: Routing
    seed: int
    in_window: tuple[int, ...] = ()
    num_too_many: int = 0
    timeout_ns: int = TIMEOUT_NS

    @property
    def sizes(self) -> Sizes:
        return self.routing.sizes

    @cached_property
    def x(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        words = self.sizes.token.hidden_bytes // 4
        shapes = [(len(ids), words) for ids in self.routing.topk_idx]
        return [torch.randint(-(2**31), 2**31, shape, generator=generator).int() for shape in shapes]

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(ids.shape, generator=generator) for ids in self.routing.topk_idx]

    @cached_property
    def scales(self) -> list[torch.Tensor]:
        """Column by column, as FP8 casts make them."""
        generator = torch.Generator().manual_seed(self.seed)
        width = max(1, self.sizes.token.num_scales)
        return [torch.rand(width, len(ids), generator=generator).t() for ids in self.routing.topk_idx]

    def new_results(self) -> list[list[torch.Tensor]]:
        """Of each rank: x, source indices, ids, weights and scales."""
        token = self.sizes.token
        kinds = (
            (token.hidden_bytes // 4, torch.int32),
            (1, torch.int32),
            (token.num_topk, torch.int64),
            (token.num_topk, torch.float32),
            (token.num_scales, torch.float32),
        )
        return [
            [torch.full((self.routing.num_rows(rank), width), GUARD, dtype=dtype) for width, dtype in kinds]
            for rank in range(self.sizes.num_ranks)
        ]

    def right_results(self) -> list[list[torch.Tensor]]:
        results, token = self.new_results(), self.sizes.token
        table = np.array([[part.data_ptr() for part in parts] for parts in results])
        table[list(self.in_window)] = 0
        for rank, ids in enumerate(self.routing.topk_idx):
            scales = self.scales[rank]
            cpu.send_to_windows(
                *groups.plain(
                    *(0, len(ids), self.routing.send_head[rank].numpy(), table),
                    groups.Payload(
                        *(self.x[rank].data_ptr(), token.hidden_bytes),
                        *(scales.data_ptr(), *scales.stride(), token.num_scales),
                        ids.numpy() if token.num_topk else np.zeros((0, 0), np.int64),
                        self.weights[rank].numpy() if token.num_topk else np.zeros((0, 0), np.float32),
                        EXPERTS_PER_RANK,
                    ),
                    0,
                )
            )
        for parts in results:
            for part in parts:
                part[max(0, len(part) - self.num_too_many) :] = GUARD
        return results

    def run(self, ranks: Ranks, only: list[int] | None = None) -> tuple[list[int], list[list[torch.Tensor]]]:
        """The outcomes, and the results."""
        sizes, token = self.sizes, self.sizes.token
        results = [[ranks.there(part) for part in parts] for parts in self.new_results()]
        places = torch.zeros(sizes.num_ranks, 6, dtype=torch.int64)
        places[list(self.in_window), 0] = GUARD
        places[:, 5] = torch.tensor([self.routing.num_rows(r) for r in range(sizes.num_ranks)])
        places[:, 5] -= self.num_too_many
        # Everything is there before a kernel runs: on a GPU nothing may wait then.
        of_rank = []
        for rank, ids in enumerate(self.routing.topk_idx):
            scales = ranks.there(self.scales[rank].t().contiguous()).t()
            tensors = (
                self.x[rank],
                scales.view(torch.int32) if len(scales) else scales.int(),
                ids,
                self.weights[rank],
                self.routing.send_head[rank],
                places,
                self.routing.rank_prefix,
                self.routing.recv_channel_prefix(rank),
            )
            parts = [part if part is tensors[1] else ranks.there(part) for part in tensors]
            of_rank.append((parts, ranks.tables(rank, parts[5], self.timeout_ns)))

        def launch_on(rank: int) -> None:
            (x, scales, ids, weights, send_head, _, *prefixes), tables = of_rank[rank]
            launch(
                *(rings.dispatch_through_rings, ranks.device, sizes.num_programs(rank)),
                Payload(x, ids, weights),
                Scales(scales, token.num_scales, *scales.stride()),
                *(send_head, tables, RingResults(*map(address, results[rank]))),
                Prefixes(prefixes[0], tables.state, prefixes[1], tables.state),
                *(ranks.area, ranks.beside, len(self.x[rank]), token.hidden_bytes // 4, EXPERTS_PER_RANK),
                num_warps=8,
                NUM_RANKS=sizes.num_ranks,
                RANK_BLOCK=sizes.rank_block,
                SCALE_BLOCK=block_of(token.num_scales),
                TOPK_BLOCK=block_of(token.num_topk),
                TILE_TOKENS=sizes.tile_tokens,
                TILE_WORDS=16,
                STAGES=2,
            )

        said = ranks.run(launch_on, only)
        return said, [[part.cpu() for part in parts] for parts in results]

    def check(self, ranks: Ranks) -> None:
        said, ours = self.run(ranks)
        assert said == [outcomes.GOOD] * self.sizes.num_ranks
        for mine, right in zip(ours, self.right_results(), strict=True):
            for part, expected in zip(mine, right, strict=True):
                assert torch.equal(part, expected)


def check_dispatch_example(device: str) -> None:
    """That of the docstring."""
    sizes = Sizes(2, 1, 3, 2, TokenLayout(hidden_bytes=64))
    choices = [torch.tensor([[0, -1], [0, 3]]), torch.zeros(0, 2, dtype=torch.int64)]
    call = Dispatch(Routing(sizes, choices), 1)
    assert call.routing.send_head[0].tolist() == [[0, -1], [1, 0]]
    ranks = Ranks(sizes, device)
    ranks.set_counters(2)
    call.check(ranks)
    assert ranks.counters("tail") == [[[4], [2]], [[3], [2]]]
    assert ranks.counters("head") == [[[4], [3]], [[2], [2]]]
    for rank, entry, token in ((1, 2, 1), (0, 2, 0), (0, 0, 1)):
        words = ranks.entry(rank, 0, 0, entry).view(torch.int32)
        assert words[:17].tolist() == [*call.x[0][token].tolist(), token]


def all_sizes(device: str, token: TokenLayout) -> list[tuple[Sizes, list[int]]]:
    """Sizes with the tokens of each rank: in the interpreter a ring must hold the rows of a channel.

    Some have fewer programs than channels. In the interpreter a rank with one program per side may be among
    others that have as many as each other: programs there run in the order of their numbers.
    """
    if device == "cpu":
        return [
            (Sizes(2, 1, 5, 4, token), [5, 4]),
            (Sizes(3, 2, 4, 2, token), [7, 0, 5]),
            (Sizes(2, 3, 4, 2, token, (2, 2)), [10, 4]),
            (Sizes(2, 5, 2, 2, token, (1, 3)), [9, 7]),
        ]
    return [
        (Sizes(2, 3, 2, 2, token), [101, 64]),
        (Sizes(2, 12, 2, 2, token, (8, 8)), [101, 640]),
        (Sizes(3, 7, 2, 2, token, (1, 3, 5)), [300, 0, 111]),
        (Sizes(8, 12, 3, 2, token, (8, 1, 8, 3, 8, 2, 5, 7)), [90, 33, 1, 200, 64, 500, 0, 77]),
        (Sizes(3, 2, 3, 2, token), [70, 0, 111]),
        (Sizes(5, 2, 5, 4, token), [90, 33, 1, 200, 64]),
        (Sizes(1, 4, 19, 16, token), [155]),
        (Sizes(1, 9, 2, 2, token, (2,)), [155]),
    ]


TOKENS = (TokenLayout(160), TokenLayout(80, num_scales=3, num_topk=2), TokenLayout(128, num_topk=3))


def step_of(device: str) -> int:
    """In the interpreter every other size may do."""
    return 1 if device != "cpu" or IS_DEEP else 2


def sizes_of_kinds(device: str, tokens: tuple[TokenLayout, ...]) -> list[tuple[int, Sizes, list[int]]]:
    """All sizes with tokens of all kinds, by their number; in the interpreter one kind with each may do."""
    of_kinds = [all_sizes(device, token) for token in tokens]
    return [
        (kind, *of_kinds[kind][index])
        for kind, index in product(range(len(tokens)), range(len(of_kinds[0])))
        if device != "cpu" or IS_DEEP or kind == index % len(tokens)
    ]


@deeper
def check_dispatch(device: str) -> None:
    """Rows and all that goes beside them; the counters go around their rings over several calls."""
    for _, sizes, num_tokens in sizes_of_kinds(device, TOKENS):
        ranks = Ranks(sizes, device)
        for seed in range(3):
            Dispatch(routing(sizes, num_tokens[seed:] + num_tokens[:seed], seed), seed).check(ranks)
        assert_rings_are_empty(ranks)


@deeper
def check_dispatch_beside_windows(device: str) -> None:
    """Who has a window gets nothing through rings, and nobody writes rows that there is no room for."""
    for sizes, num_tokens in all_sizes(device, TOKENS[1])[:: step_of(device)]:
        ranks = Ranks(sizes, device)
        call = Dispatch(routing(sizes, num_tokens, 3), 3, in_window=(0,))
        call.check(ranks)
        assert ranks.counters("tail")[0] == [[0] * sizes.num_channels] * sizes.num_ranks
        Dispatch(call.routing, 4, tuple(range(sizes.num_ranks))).check(ranks)
        Dispatch(call.routing, 5, num_too_many=2).check(ranks)
        assert_rings_are_empty(ranks)


def assert_rings_are_empty(ranks: Ranks) -> None:
    tails, heads = ranks.counters("tail"), ranks.counters("head")
    for receiver in range(ranks.num_ranks):
        for sender in range(ranks.num_ranks):
            assert tails[receiver][sender] == heads[sender][receiver]


# Combine


@dataclass(frozen=True)
class Combine:
    """One combine: who has its rows in a window, and how many of them are missing there."""

    routing: Routing
    seed: int
    dtype: torch.dtype = torch.bfloat16
    num_biases: int = 0
    in_window: tuple[int, ...] = ()
    timeout_ns: int = TIMEOUT_NS
    is_ordered: bool = False
    """Whether each token has an order of its own in which its rows are added."""

    @property
    def sizes(self) -> Sizes:
        return self.routing.sizes

    def order(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + rank)
        shape = len(self.routing.topk_idx[rank]), self.sizes.num_ranks
        return torch.rand(shape, generator=generator).argsort(dim=1).int()

    @property
    def hidden(self) -> int:
        return self.sizes.token.hidden_bytes // self.dtype.itemsize

    def values(self, num_rows: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(97 * self.seed + seed)
        values = torch.randn(num_rows, self.hidden, generator=generator) * 3
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 6e4, -6e4, 1e-7, 3e38])
        hard = torch.rand(values.shape, generator=generator) < 0.2
        chosen = torch.randint(0, len(special), values.shape, generator=generator)
        return torch.where(hard, special[chosen], values).to(self.dtype)

    @cached_property
    def x(self) -> list[torch.Tensor]:
        return [self.values(self.routing.num_rows(rank), rank) for rank in range(self.sizes.num_ranks)]

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(len(x), self.sizes.token.num_topk, generator=generator) for x in self.x]

    def biases(self, rank: int) -> list[torch.Tensor]:
        """Some of them -0.0: where nothing is added they stay so."""
        num_tokens = len(self.routing.topk_idx[rank])
        return [self.values(num_tokens, 10 * rank + number + 50) for number in range(self.num_biases)]

    def right_results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        results = []
        for rank, ids in enumerate(self.routing.topk_idx):
            out = torch.empty(len(ids), self.hidden, dtype=self.dtype)
            weights = torch.empty(len(ids), self.sizes.token.num_topk)
            biases = self.biases(rank)
            cpu.pull_and_sum(
                *groups.plain(
                    *(0, len(ids), self.routing.send_head[rank].numpy()),
                    np.array([part.data_ptr() for part in self.x]),
                    np.array([part.data_ptr() for part in self.weights]),
                    groups.Sums(
                        out.data_ptr(),
                        *[*(bias.data_ptr() for bias in biases), 0, 0][:2],
                        *(self.hidden, self.sizes.token.hidden_bytes, DTYPES[self.dtype], weights.numpy()),
                        self.order(rank).numpy() if self.is_ordered else groups.NO_ORDER,
                    ),
                )
            )
            results.append((out, weights))
        return results

    def run(self, ranks: Ranks, only: list[int] | None = None) -> tuple[list[int], list[list[torch.Tensor]]]:
        """The outcomes, and the sums and weights of each rank."""
        sizes, token = self.sizes, self.sizes.token
        bits = torch.float32 if self.dtype == torch.float32 else torch.uint16
        x = [ranks.there(part) for part in self.x]
        weights = [ranks.there(part) for part in self.weights]
        places = torch.zeros(sizes.num_ranks, 6, dtype=torch.int64)
        windows = {}
        for rank in range(sizes.num_ranks):
            places[rank, 5] = len(x[rank])
            if rank in self.in_window:
                # As staged: without the rank's own rows.
                first = int(self.routing.rank_prefix[rank - 1, rank]) if rank else 0
                windows[rank] = x[rank].clone()
                windows[rank][first : int(self.routing.rank_prefix[rank, rank])] = GUARD
                places[rank, 0], places[rank, 3] = windows[rank].data_ptr(), weights[rank].data_ptr()
        results = []
        of_rank = []
        for rank, ids in enumerate(self.routing.topk_idx):
            out = ranks.there(torch.full((len(ids), self.hidden), GUARD, dtype=self.dtype))
            out_weights = ranks.there(torch.full((len(ids), token.num_topk), GUARD, dtype=torch.float32))
            results.append([out, out_weights])
            biases = [ranks.there(bias).view(bits) for bias in self.biases(rank)]
            parts = (self.routing.rank_prefix, self.routing.recv_channel_prefix(rank))
            rank_prefix, recv_channel_prefix = (ranks.there(part) for part in parts)
            tables = ranks.tables(rank, ranks.there(places), self.timeout_ns)
            orders = (ranks.there(self.order(rank)),) if self.is_ordered else ()
            of_rank.append(
                (
                    Outputs(x[rank].view(torch.int32), weights[rank]),
                    Sums(out.view(bits), out_weights, *orders),
                    Biases(*(biases + [out.view(bits)] * 2)[:2]),
                    ranks.there(self.routing.send_head[rank]),
                    tables,
                    Prefixes(rank_prefix, tables.state, recv_channel_prefix, tables.state),
                )
            )

        def launch_on(rank: int) -> None:
            launch(
                *(rings.combine_through_rings, ranks.device, sizes.num_programs(rank)),
                *of_rank[rank],
                *(ranks.area, ranks.beside, len(self.routing.topk_idx[rank]), self.hidden),
                num_warps=8,
                DTYPE=DTYPES[self.dtype],
                NUM_BIASES=self.num_biases,
                NUM_RANKS=sizes.num_ranks,
                RANK_BLOCK=sizes.rank_block,
                TOPK_BLOCK=block_of(token.num_topk),
                TILE_TOKENS=sizes.tile_tokens,
                TILE_WORDS=16,
                STAGES=2,
                TILE_VALUES=32,
                IN_HARDWARE=ranks.device != "cpu",
                ORDERED=self.is_ordered,
            )

        said = ranks.run(launch_on, only)
        return said, [[part.cpu() for part in parts] for parts in results]

    def check(self, ranks: Ranks) -> None:
        said, ours = self.run(ranks)
        assert said == [outcomes.GOOD] * self.sizes.num_ranks
        for (out, weights), (right, right_weights) in zip(ours, self.right_results(), strict=True):
            assert torch.equal(weights, right_weights)
            assert torch.equal(comparable(out), comparable(right))


def comparable(values: torch.Tensor) -> torch.Tensor:
    """Bits; those of a float32 NaN aside, since an addition makes others on a GPU."""
    if values.dtype == torch.float32:
        values = torch.where(values.isnan(), torch.nan, values)
    return values.view(torch.uint8)


def check_combine_example(device: str) -> None:
    """That of the docstring."""
    sizes = Sizes(2, 1, 3, 2, TokenLayout(hidden_bytes=64))
    choices = [torch.tensor([[0, -1], [0, 3]]), torch.zeros(0, 2, dtype=torch.int64)]
    call = Combine(Routing(sizes, choices), 1)
    ranks = Ranks(sizes, device)
    ranks.set_counters(2)
    call.check(ranks)
    assert ranks.counters("tail") == [[[4], [3]], [[2], [2]]]
    assert ranks.counters("head") == [[[4], [2]], [[3], [2]]]
    for sender, entry, row in ((0, 2, 0), (0, 0, 1), (1, 2, 0)):
        found = ranks.entry(0, 0, sender, entry)[:64]
        assert torch.equal(found, call.x[sender][row].view(torch.uint8))


@deeper
def check_combine(device: str) -> None:
    """Sums of all types, with biases, with weights; the counters go around their rings over several calls."""
    tokens = (TokenLayout(160), TokenLayout(80, num_topk=2), TokenLayout(128, num_topk=3))
    for kind, sizes, num_tokens in sizes_of_kinds(device, tokens):
        ranks = Ranks(sizes, device)
        for seed in range(2):
            of_call = routing(sizes, num_tokens[seed:] + num_tokens[:seed], seed)
            Combine(of_call, seed, [*DTYPES][kind], num_biases=kind, is_ordered=seed == 1).check(ranks)
        assert_rings_are_empty(ranks)


@deeper
def check_combine_beside_windows(device: str) -> None:
    """Rows that lie in a window are read there, and added in the same order as the others."""
    step = step_of(device)
    for sizes, num_tokens in all_sizes(device, TokenLayout(160, num_topk=2))[step - 1 :: step]:
        ranks = Ranks(sizes, device)
        of_call = routing(sizes, num_tokens, 3)
        Combine(of_call, 3, in_window=(0,), num_biases=1, is_ordered=True).check(ranks)
        Combine(of_call, 4, torch.float16, in_window=tuple(range(sizes.num_ranks))).check(ranks)
        Combine(of_call, 5, torch.float32, num_biases=1).check(ranks)
        assert_rings_are_empty(ranks)


# When something goes wrong


def two_ranks() -> Routing:
    sizes = Sizes(2, 1, 4, 2, TokenLayout(hidden_bytes=64, num_topk=2))
    return Routing(sizes, [torch.tensor([[0, 3], [3, 0], [0, -1]]), torch.tensor([[0, 3], [1, 4]])])


LITTLE_PATIENCE_NS = 20 * 10**6
LATE = outcomes.outcome_of(outcomes.LATE, 1)
STOPPED = outcomes.outcome_of(outcomes.STOPPED, 1)


def check_who_waits_in_vain_says_so(device: str) -> None:
    """Rank 1 does not come: rank 0 waits for its rows, and then raises its own abort flag."""
    for kind in (Dispatch, Combine):
        call = replace(kind(two_ranks(), 1), timeout_ns=LITTLE_PATIENCE_NS)
        for abort, expected in ((0, LATE), (2, STOPPED)):
            ranks = Ranks(call.sizes, device)
            ranks.words(0, ABORT_AT, 1).fill_(abort)
            said, _ = call.run(ranks, [0])
            assert said[0] == expected
            assert int(ranks.words(0, ABORT_AT, 1)) == (abort or 1)
        # Or its host says that rank 1 is gone.
        host = pinned_words(1)
        host[0] = 2
        ranks = Ranks(call.sizes, device)
        ranks.words(0, ABORT_AT + 8, 1).fill_(int(host.ctypes.data))
        said, _ = replace(call, timeout_ns=TIMEOUT_NS).run(ranks, [0])
        assert said[0] == STOPPED
        assert int(ranks.words(0, ABORT_AT, 1)) == 2


def check_no_channel_is_begun_after_a_failure(device: str) -> None:
    """Rank 1 does not come. Rank 0 gives up in its first channel, and leaves the second one as it is."""
    sizes = Sizes(2, 2, 4, 2, TokenLayout(hidden_bytes=64, num_topk=2), (1, 1))
    choices = [torch.tensor([[0, 3]] * 6), torch.tensor([[0, 3]] * 6)]
    for kind, counters in ((Dispatch, "head"), (Combine, "head")):
        call = replace(kind(Routing(sizes, choices), 1), timeout_ns=LITTLE_PATIENCE_NS)
        ranks = Ranks(sizes, device)
        # What rank 0 has in its second channel is all there: it could take it.
        ranks.words(0, TAIL_AT + STRIDE + 8, 1).fill_(3)
        assert call.run(ranks, [0])[0][0] == LATE
        # What it took of rank 1's is said there.
        assert ranks.counters(counters)[1][0][1] == 0


def check_who_finds_no_room_says_so(device: str) -> None:
    """The ring to rank 1 has one free entry, and nobody empties it: what is in the others stays."""
    for kind, num_sent in ((Dispatch, 0), (Combine, 1)):  # two tokens make a tile, but rows are pushed singly
        call = replace(kind(two_ranks(), 1), timeout_ns=LITTLE_PATIENCE_NS)
        ranks = Ranks(call.sizes, device)
        num_full = call.sizes.ring_rows - 1
        ranks.words(1, TAIL_AT, 1).fill_(num_full)
        ranks.heaps[1][call.sizes.rows_at :] = GUARD
        assert call.run(ranks, [0])[0][0] == LATE
        assert ranks.counters("tail")[1][0] == [num_full + num_sent]
        for entry in range(num_full + 1):
            assert bool((ranks.entry(1, 0, 0, entry) == GUARD).all()) == (entry < num_full + 1 - num_sent)


def check_nothing_is_done_after_a_failure(device: str) -> None:
    """An outcome that is not 0 stays as it is, and so does everything else; also where all have windows."""
    for kind in (Dispatch, Combine):
        for outcome, uses_rings in ((outcomes.DIFFERENT, 1), (outcomes.GOOD, 0)):
            call = kind(two_ranks(), 1)
            ranks = Ranks(call.sizes, device)
            for state in ranks.states:
                state[constants.OUTCOME], state[constants.USES_RINGS] = outcome, uses_rings
            said, results = call.run(ranks)
            assert said == [outcome] * 2
            assert all((part == GUARD).all() for parts in results for part in parts)
            assert all((heap == 0).all() for heap in ranks.heaps)


def check_rows_that_a_window_does_not_have(device: str) -> None:
    """A combine that needs one says so, and reads none."""
    call = Combine(two_ranks(), 1, in_window=(0, 1))
    call.x[1] = call.x[1][:1].clone()
    ranks = Ranks(call.sizes, device)
    said, _ = call.run(ranks)
    assert said == [outcomes.GOOD] * 2, "all programs take their part"
    bad_rows = [int(state[constants.BAD_ROWS]) for state in ranks.states]
    assert bad_rows == [outcomes.outcome_of(outcomes.BAD_HANDLE, 1)] * 2


# The parts


@triton.jit
def ask_next_channels(outcomes, answers):
    """What `next_channel` says in the example of its docstring; then after a failure."""
    channel = rings.next_channel(1, 8, outcomes)
    tl.store(answers, channel)
    channel = rings.next_channel(channel, 8, outcomes)
    tl.store(answers + 1, channel)
    tl.store(answers + 2, rings.next_channel(channel, 8, outcomes))
    tl.store(answers + 3, rings.next_channel(1, 8, outcomes + 1))


@triton.jit(do_not_specialize=["area"])
def ask_parts(tables: Tables, area: RingArea, prefixes: Prefixes, send_head, answers):
    """What the small functions say in the examples of their docstrings."""
    from_peers = rings.rings_of(tables, area, 0, False, 2, 2)
    to_peers = rings.rings_of(tables, area, 0, True, 2, 2)
    at = tl.arange(0, 2)
    channel = tl.program_id(0) // 2
    tl.store(answers + at, from_peers.rows)
    tl.store(answers + 2 + at, to_peers.rows)
    tl.store(answers + 4 + at, to_peers.ours.to(tl.int64))
    tl.store(answers + 6 + at, to_peers.theirs.to(tl.int64))
    begin, end = rings.lanes(prefixes, 1, channel, 2, to_peers, 2)
    tl.store(answers + 8 + 4 * channel + at, begin)
    tl.store(answers + 10 + 4 * channel + at, end)
    counts, first_rows = rings.rows_of_tile(send_head, at, at < 2, at < 2, at, 2)
    tl.store(answers + 16 + at, counts)
    tl.store(answers + 18 + at, first_rows)
    numbers = tl.arange(0, 4)
    tl.store(answers + 20 + numbers, rings.entries_at(to_peers, 1, at.to(tl.int64) + 3, numbers))
    tl.store(answers + 24, rings.num_tokens_of(area.num_channels, 7))


def check_parts(device: str) -> None:
    def there(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    heaps = there([0, 1024], torch.int64)
    here = there([0] * constants.NUM_CONSTANTS, torch.int64)
    here[constants.RANK], here[constants.OWN_HEAP] = 1, 1024
    here[constants.TAIL_AT], here[constants.HEAD_AT], here[constants.RING_STRIDE] = 16, 48, 8
    answers = there([0] * 25, torch.int64)
    launch(
        *(ask_parts, device, 4),
        Tables(here, *[heaps] * 6),
        RingArea(rows_at=96, ring_rows=3, entry_bytes=16, num_channels=3),
        Prefixes(there([[0, 2], [0, 3]], torch.int32), heaps, there([[0, 1], [0, 0]], torch.int32), heaps),
        there([[4, 0], [-1, 1]], torch.int32),
        answers,
    )
    assert answers.tolist()[24] == 3
    found = answers[:24].view(-1, 2).tolist()
    assert found[:4] == [[1120, 1168], [144, 1168], [24, 1048], [1072, 1080]]
    assert found[4:8] == [[0, 2], [1, 2], [1, 2], [2, 3]]
    assert found[8:] == [[1, 2], [4, 0], [1184, 1200], [1168, 1184]]
    channels = there([0] * 4, torch.int64)
    launch(ask_next_channels, device, 6, there([0, outcomes.DIFFERENT], torch.int64), channels)
    assert channels.tolist()[:2] == [4, 7]
    assert min(channels.tolist()[2:]) >= 8


def check_types(device: str) -> None:
    """Types have the same numbers as in the CPU's kernels."""
    assert (floats.BF16, floats.FP16, floats.FP32) == (cpu.BF16, cpu.FP16, cpu.FP32)
