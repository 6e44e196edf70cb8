"""What `anyep selftest` tests, as data: where ranks are, and which calls they make. It needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from anyep.cli.nodes import ONE_NODE, Nodes

CombineFrom = Literal["received rows", "combine buffer", "other memory"]
Routing = Literal["uniform", "one rank", "none", "some missing"]
How = Literal["in line", "async", "hook", "graph"]
Travel = Literal["bf16", "fp8", "fp8 ue8m0"]
LL_MAX_TOKENS: Final = 64
LL_HIDDEN: Final = 2048


@dataclass(frozen=True)
class NormalCase:
    """A dispatch, a dispatch along its handle, and a combine. Ranks have different numbers of tokens, the
    last one none if it `idles`."""

    name: str
    tokens: int
    hidden: int
    dtype: str = "bfloat16"
    topk: int = 2
    routing: Routing = "uniform"
    has_scales: bool = False
    has_weights: bool = False
    num_biases: int = 0
    is_worst_case: bool = False
    combine_from: CombineFrom = "received rows"
    how: How = "in line"
    uses_rings: bool = False
    idles: bool = False

    def tokens_of(self, rank: int, num_ranks: int) -> int:
        """The tokens of a rank.

        >>> [NormalCase("", 10, 128, idles=True).tokens_of(rank, 4) for rank in range(4)]
        [10, 9, 8, 0]
        """
        if self.idles and num_ranks > 1 and rank == num_ranks - 1:
            return 0
        return max(1, self.tokens - rank)


@dataclass(frozen=True)
class LowLatencyCase:
    """A dispatch and a combine in low-latency mode."""

    name: str
    tokens: int
    travel: Travel = "bf16"
    how: How = "in line"
    zero_copy: bool = False
    topk: int = 4


_QUICK_NORMAL: Final = (
    NormalCase("1 token of 128 values", 1, 128),
    NormalCase("128 tokens of 2048, top-8, weights", 128, 2048, topk=8, has_weights=True),
    NormalCase("FP8 rows with scales", 64, 1024, "float8_e4m3fn", has_scales=True),
    NormalCase("tokens without experts, an idle rank", 33, 256, routing="some missing", idles=True),
    NormalCase("outputs are staged, two biases", 64, 512, num_biases=2, combine_from="other memory"),
    NormalCase("outputs in the combine buffer", 64, 512, combine_from="combine buffer"),
    NormalCase("worst case", 48, 256, is_worst_case=True),
    NormalCase("asynchronous", 64, 512, how="async"),
    NormalCase("rings", 96, 1024, topk=4, has_weights=True, uses_rings=True),
)
_MORE_NORMAL: Final = (
    NormalCase("512 tokens of 7168, top-8", 512, 7168, topk=8, has_weights=True),
    NormalCase("float32", 100, 384, "float32", topk=3),
    NormalCase("float16", 100, 384, "float16", topk=3),
    NormalCase("all tokens to one rank", 120, 512, routing="one rank"),
    NormalCase("no token anywhere", 16, 128, routing="none"),
    NormalCase("rings, FP8 rows with scales", 64, 1024, "float8_e4m3fn", has_scales=True, uses_rings=True),
    NormalCase("rings, 300 tokens of 7168", 300, 7168, topk=8, uses_rings=True),
    NormalCase("rings, all tokens to one rank", 120, 512, routing="one rank", uses_rings=True),
)
_QUICK_LOW_LATENCY: Final = (
    LowLatencyCase("bf16", 48),
    LowLatencyCase("FP8, hooks", 64, "fp8", "hook"),
)
_MORE_LOW_LATENCY: Final = (
    LowLatencyCase("1 token", 1),
    LowLatencyCase("bf16, asynchronous, zero copy", 64, how="async", zero_copy=True, topk=8),
    LowLatencyCase("FP8, scales as exponents", 64, "fp8 ue8m0"),
)
GRAPHS: Final = NormalCase("CUDA graph of dispatch and combine", 64, 1024, how="graph")


@dataclass(frozen=True)
class Plan:
    """What the ranks of a test do, the same on all of them."""

    quick: bool
    seed: int
    nodes: Nodes = ONE_NODE
    """Virtual nodes, if there is more than one; else the hosts are the nodes."""

    @property
    def num_rounds(self) -> int:
        """How often a call is timed."""
        return 5 if self.quick else 30

    @property
    def timed_tokens(self) -> tuple[int, ...]:
        return (128,) if self.quick else (1, 512)

    def normal_cases(self, device: str) -> tuple[NormalCase, ...]:
        """The cases of normal mode, those that share a Buffer next to each other."""
        cases = [*_QUICK_NORMAL]
        if not self.quick:
            cases += _MORE_NORMAL
        if device == "cuda":
            cases.append(GRAPHS)
        return tuple(sorted(cases, key=lambda case: case.uses_rings))

    def low_latency_cases(self) -> tuple[LowLatencyCase, ...]:
        return _QUICK_LOW_LATENCY if self.quick else _QUICK_LOW_LATENCY + _MORE_LOW_LATENCY


@dataclass(frozen=True)
class Place:
    """Where the cases run: a device, nodes, and an engine; `hosts` is the number of hosts."""

    device: str
    nodes: Nodes
    hosts: int = 1
    heap: str | None = None
    """Where ranks on GPUs keep what they share, if not where Buffers choose."""

    def __str__(self) -> str:
        """
        >>> print(Place("cpu", Nodes(1, 1))), print(Place("cpu", Nodes(2, 2, network="nixl")))
        cpu, 1 rank
        cpu, 2 virtual nodes of 2 ranks, nixl
        (None, None)
        """
        if not self.nodes.are_several:
            count = self.nodes.num_ranks
            heap = f", heaps on the {self.heap}" if self.heap else ""
            return f"{self.device}, {count} {'rank' if count == 1 else 'ranks'}{heap}"
        kind = "virtual nodes" if self.hosts == 1 else "nodes"
        network = "" if self.nodes.network == "auto" else f", {self.nodes.network}"
        return f"{self.device}, {self.nodes.num_nodes} {kind} of {self.nodes.ranks_per_node} ranks{network}"


def places_of(plan: Plan, device: str, num_ranks: int, hosts: int) -> Iterator[Place]:
    """Where the cases run: as the options say, or on one host on one node and then on two virtual nodes.

    >>> for place in places_of(Plan(False, 0), "cpu", 4, 1): print(place)
    cpu, 4 ranks
    cpu, 2 virtual nodes of 2 ranks, loopback
    cpu, 2 virtual nodes of 2 ranks, nixl
    >>> for place in places_of(Plan(False, 0), "cpu", 16, 2): print(place)
    cpu, 2 nodes of 8 ranks
    >>> for place in places_of(Plan(False, 0), "cuda", 3, 1): print(place)
    cuda, 3 ranks
    cuda, 3 ranks, heaps on the host
    """
    if plan.nodes.are_several:
        yield Place(device, plan.nodes, hosts)
        return
    if hosts > 1:
        yield Place(device, Nodes(hosts, num_ranks // hosts), hosts)
        return
    yield Place(device, Nodes(1, num_ranks))
    if device == "cuda" and not plan.quick:
        yield Place(device, Nodes(1, num_ranks), heap="host")
    if num_ranks % 2 == 0 and not plan.quick:
        halves = Nodes(2, num_ranks // 2, network="loopback")
        yield Place(device, halves)
        yield Place(device, replace(halves, network="nixl"))
