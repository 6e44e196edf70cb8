"""Checks of the GPU's kernels between nodes against a dense reference: on a GPU, or interpreted ("cpu").

Ranks and their heaps are those of the checks of rings; here a ring's peers are nodes. All ranks have windows.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from anyep.backends.cuda import constants
from anyep.backends.cuda.kernels.groups import Biases, NodeTokens, Payload, Relayed, Scales, Sums, Tables
from anyep.core import outcomes
from anyep.core.relay import RelayPlan
from anyep.sizes import TokenLayout
from anyep.topology import Topology
from tests.support.checks.launching import launch
from tests.support.checks.rings import (
    DTYPES,
    EXPERTS_PER_RANK,
    GUARD,
    STRIDE,
    TAIL_AT,
    TIMEOUT_NS,
    Dispatch,
    Ranks,
    Routing,
    Sizes,
    address,
    block_of,
    routing,
)

relay_combine = importlib.import_module("anyep.backends.cuda.kernels.relay_combine")
relay_dispatch = importlib.import_module("anyep.backends.cuda.kernels.relay_dispatch")


@dataclass
class NodeRanks(Ranks):
    """All ranks of several nodes."""

    ranks_per_node: int

    @property
    def topology(self) -> Topology:
        return Topology(self.num_ranks, self.ranks_per_node)

    def plan(self, rank: int) -> RelayPlan:
        return RelayPlan(self.topology, rank)

    def node_tables(self, rank: int, targets: torch.Tensor, timeout_ns: int = TIMEOUT_NS) -> Tables:
        tables = self.tables(rank, targets, timeout_ns)
        here, plan = tables.constants, self.plan(rank)
        here[constants.NETWORK_TAIL_AT], here[constants.NETWORK_HEAD_AT] = TAIL_AT, self.sizes.head_at
        here[constants.NETWORK_STRIDE] = STRIDE
        inboxes = torch.full((self.num_ranks,), self.heaps[rank].data_ptr(), dtype=torch.int64)
        words = [word for relay in plan.relays for word in (self.heaps[relay].data_ptr(), plan.node)]
        return tables._replace(
            inboxes=self.there(inboxes), net_rows=self.there(torch.tensor(words, dtype=torch.int64))
        )

    def shape(self) -> dict[str, Any]:
        token, nodes = self.sizes.token, self.topology.num_nodes
        return {
            "NUM_NODES": nodes,
            "NODE_BLOCK": 1 << (nodes - 1).bit_length(),
            "RANKS_PER_NODE": self.ranks_per_node,
            "TOPK_BLOCK": block_of(token.num_topk),
            "TILE_TOKENS": self.sizes.tile_tokens,
        }


def node_ranks(sizes: Sizes, ranks_per_node: int, device: str) -> NodeRanks:
    """Rows go to windows: none through rings within a node."""
    ranks = NodeRanks(sizes, device, ranks_per_node)
    for state in ranks.states:
        state[constants.USES_RINGS] = 0
    return ranks


@dataclass(frozen=True)
class NodeRouting:
    """A routing between nodes: the parts of each rank's handle that kernels read."""

    routing: Routing
    topology: Topology

    @cached_property
    def wanted(self) -> list[torch.Tensor]:
        """[tokens, ranks]."""
        return self.routing.wanted

    @cached_property
    def by_node(self) -> list[torch.Tensor]:
        """[tokens, nodes]."""
        shape = (-1, self.topology.num_nodes, self.topology.ranks_per_node)
        return [wanted.reshape(shape).any(2) for wanted in self.wanted]

    def send_rdma_head(self, rank: int) -> torch.Tensor:
        wanted = self.by_node[rank]
        return torch.where(wanted, wanted.cumsum(0) - 1, -1).int()

    def virtual(self, rank: int) -> list[tuple[int, int]]:
        """The source and the token of each virtual token of a relay."""
        plan = RelayPlan(self.topology, rank)
        return [
            (source, token)
            for source in plan.relays
            for token in self.by_node[source][:, plan.node].nonzero()[:, 0].tolist()
        ]

    def send_nvl_head(self, rank: int) -> torch.Tensor:
        ranks = list(self.topology.ranks_on(self.topology.node_of(rank)))
        heads = [self.routing.send_head[source][token, ranks] for source, token in self.virtual(rank)]
        return torch.stack(heads) if heads else torch.zeros(0, len(ranks), dtype=torch.int32)

    def per_channel(self, source: int, columns: torch.Tensor) -> torch.Tensor:
        """[channel, column]: sums over the tokens of a source's channels."""
        step, channels = self.routing.per_channel(source), self.routing.sizes.num_channels
        return torch.stack([columns[at * step : (at + 1) * step].sum(0) for at in range(channels)])

    def relayed(self, ranks: NodeRanks, rank: int, send_nvl_head: torch.Tensor) -> Relayed:
        plan = ranks.plan(rank)
        here = list(self.topology.ranks_on(plan.node))
        expected = torch.stack(
            [self.per_channel(source, self.by_node[source])[:, plan.node] for source in plan.relays]
        ).int()
        first = (expected.flatten().cumsum(0).reshape(expected.shape) - expected).t().contiguous()
        rows = np.stack(
            [self.per_channel(source, self.wanted[source])[:, here].T.numpy() for source in plan.relays]
        )
        matrix = torch.stack([wanted.sum(0) for wanted in self.wanted]).int().numpy()
        next_row = torch.from_numpy(plan.next_rows(matrix, rows.astype(np.int32)))
        return Relayed(send_nvl_head, ranks.there(first.long()), ranks.there(expected), ranks.there(next_row))


@dataclass(frozen=True)
class NodeDispatch:
    """One dispatch between nodes, new or along a known routing."""

    nodes: NodeRouting
    seed: int
    is_new: bool = True
    num_too_many: int = 0
    timeout_ns: int = TIMEOUT_NS

    @property
    def within(self) -> Dispatch:
        """Its rows."""
        return Dispatch(self.nodes.routing, self.seed)

    def new_results(self) -> list[list[torch.Tensor]]:
        """Of each rank: x, source meta, ids, weights and scales."""
        results = self.within.new_results()
        for parts in results:
            parts[1] = torch.full((len(parts[1]), 2), GUARD, dtype=torch.int32)
        return results

    def right_results(self) -> list[list[torch.Tensor]]:
        """Row by row, in the order of sources and their tokens."""
        call, topology, results = self.within, self.nodes.topology, self.new_results()
        token_layout = self.nodes.routing.sizes.token
        for rank, (x, meta, ids, weights, scales) in enumerate(results):
            here = list(topology.ranks_on(topology.node_of(rank)))
            rows = [
                (source, token)
                for source, wanted in enumerate(self.nodes.wanted)
                for token in wanted[:, rank].nonzero()[:, 0].tolist()
            ]
            for row, (source, token) in enumerate(rows[: len(rows) - self.num_too_many]):
                x[row] = call.x[source][token]
                bits = self.nodes.wanted[source][token, here].int()
                meta[row] = torch.tensor([topology.node_of(source), (bits << torch.arange(len(here))).sum()])
                if token_layout.num_topk:
                    local = self.nodes.routing.topk_idx[source][token] - rank * EXPERTS_PER_RANK
                    is_local = (local >= 0) & (local < EXPERTS_PER_RANK)
                    ids[row] = torch.where(is_local, local, -1)
                    weights[row] = torch.where(is_local, call.weights[source][token], 0.0)
                if token_layout.num_scales:
                    scales[row] = call.scales[source][token]
        return results

    def run(
        self, ranks: NodeRanks, only: list[int] | None = None
    ) -> tuple[list[int], list[list[torch.Tensor]], list[torch.Tensor]]:
        """The outcomes, the results, and what the relays noted in `send_nvl_head`."""
        sizes, token, call, nodes = ranks.sizes, ranks.sizes.token, self.within, self.nodes
        results = [[ranks.there(part) for part in parts] for parts in self.new_results()]
        table = torch.tensor([[address(part) for part in parts] + [0] for parts in results])
        table[:, 0] = torch.tensor([parts[0].data_ptr() or GUARD for parts in results])
        table[:, 5] = torch.tensor([len(parts[0]) - self.num_too_many for parts in results])
        heads, of_rank = [], []
        for rank, ids in enumerate(nodes.routing.topk_idx):
            known = nodes.send_nvl_head(rank)
            heads.append(ranks.there(torch.full_like(known, -9) if self.is_new else known))
            parts = [
                ranks.there(part)
                for part in (
                    *(call.x[rank], ids, call.weights[rank], call.scales[rank].contiguous()),
                    *(nodes.wanted[rank].to(torch.uint8), nodes.send_rdma_head(rank)),
                )
            ]
            tables = ranks.node_tables(rank, ranks.there(table), self.timeout_ns)
            of_rank.append((parts, tables, nodes.relayed(ranks, rank, heads[rank])))

        def launch_on(rank: int) -> None:
            (x, ids, weights, scales, in_rank, send_rdma_head), tables, relayed = of_rank[rank]
            launch(
                *(relay_dispatch.dispatch_between_nodes, ranks.device, sizes.num_programs(rank)),
                Payload(x, ids, weights),
                Scales(scales.view(torch.int32), token.num_scales, *scales.stride()),
                *(NodeTokens(in_rank, send_rdma_head), relayed, tables, ranks.area, ranks.beside),
                *(len(x), token.hidden_bytes // 4, EXPERTS_PER_RANK),
                num_warps=8,
                IS_NEW=self.is_new,
                SCALE_BLOCK=block_of(token.num_scales),
                TILE_WORDS=16,
                STAGES=2,
                **ranks.shape(),
            )

        said = ranks.run(launch_on, only)
        return said, [[part.cpu() for part in parts] for parts in results], [head.cpu() for head in heads]

    def check(self, ranks: NodeRanks) -> None:
        said, ours, heads = self.run(ranks)
        assert said == [outcomes.GOOD] * ranks.num_ranks
        for mine, right in zip(ours, self.right_results(), strict=True):
            for part, expected in zip(mine, right, strict=True):
                assert torch.equal(part, expected)
        for rank, head in enumerate(heads):
            assert torch.equal(head, self.nodes.send_nvl_head(rank))


def nodes_of(sizes: Sizes, ranks_per_node: int, num_tokens: list[int], seed: int) -> NodeRouting:
    return NodeRouting(routing(sizes, num_tokens, seed), Topology(sizes.num_ranks, ranks_per_node))


def ring_rows(device: str) -> int:
    """On a GPU rings are tiny; the interpreter runs programs one after the other."""
    return 7 if device == "cpu" else 3


def check_dispatch_example(device: str) -> None:
    """That of the docstring of `dispatch_between_nodes`."""
    sizes = Sizes(2, 1, 3, 1, TokenLayout(hidden_bytes=64))
    choices = [torch.tensor([[0, 3]]), torch.zeros(0, 2, dtype=torch.int64)]
    call = NodeDispatch(NodeRouting(Routing(sizes, choices), Topology(2, 1)), 1)
    ranks = node_ranks(sizes, 1, device)
    ranks.set_counters(2)
    call.check(ranks)
    assert ranks.counters("tail") == [[[2], [2]], [[3], [2]]]
    assert ranks.counters("head") == [[[2], [3]], [[2], [2]]]
    words = ranks.entry(1, 0, 0, 2).view(torch.int32)
    assert words[:18].tolist() == [*call.within.x[0][0].tolist(), 0, 1]


def check_dispatch_of_two_by_two(device: str) -> None:
    """New, then along the same routing: rings go around, and scales, ids and weights travel along."""
    token = TokenLayout(hidden_bytes=96, num_scales=3, num_topk=3)
    sizes = Sizes(4, 2, ring_rows(device), 2, token)
    ranks = node_ranks(sizes, 2, device)
    for seed, num_tokens in ((1, [9, 0, 13, 4]), (2, [1, 12, 0, 14])):
        nodes = nodes_of(sizes, 2, num_tokens, seed)
        NodeDispatch(nodes, seed).check(ranks)
        NodeDispatch(nodes, seed + 5, is_new=False).check(ranks)


def check_dispatch_of_three_nodes(device: str) -> None:
    sizes = Sizes(3, 2, ring_rows(device), 2, TokenLayout(hidden_bytes=64))
    ranks = node_ranks(sizes, 1, device)
    NodeDispatch(nodes_of(sizes, 1, [14, 3, 8], 3), 3).check(ranks)


def check_rows_without_room_are_left_out(device: str) -> None:
    """The relays note it; nothing is written past the end."""
    sizes = Sizes(2, 1, 8, 2, TokenLayout(hidden_bytes=64))
    ranks = node_ranks(sizes, 1, device)
    call = NodeDispatch(nodes_of(sizes, 1, [6, 6], 4), 4, num_too_many=1)
    said, ours, _ = call.run(ranks)
    assert said == [outcomes.GOOD] * 2
    for mine, right in zip(ours, call.right_results(), strict=True):
        assert all(torch.equal(part, expected) for part, expected in zip(mine, right, strict=True))
    found = [int(state[constants.BAD_ROWS]) for state in ranks.states]
    assert found == [outcomes.BAD_HANDLE, outcomes.BAD_HANDLE + outcomes.NUM_CODES]


def check_a_silent_relay_is_named(device: str) -> None:
    """Of 2 x 2 ranks, ranks 2 and 3 do not take part: each rank misses the one with its own index."""
    sizes = Sizes(4, 1, 14, 2, TokenLayout(hidden_bytes=64))
    ranks = node_ranks(sizes, 2, device)
    call = NodeDispatch(nodes_of(sizes, 2, [6, 6, 6, 6], 5), 5, timeout_ns=10**8)
    said, _, _ = call.run(ranks, [0, 1])
    assert said[:2] == [outcomes.LATE + outcomes.NUM_CODES * rank for rank in (2, 3)]


# Combine


@dataclass(frozen=True)
class NodeCombine:
    """One combine between nodes, of random rows."""

    nodes: NodeRouting
    seed: int
    dtype: torch.dtype = torch.bfloat16
    num_biases: int = 0

    @property
    def sizes(self) -> Sizes:
        return self.nodes.routing.sizes

    @property
    def hidden(self) -> int:
        return self.sizes.token.hidden_bytes // self.dtype.itemsize

    def random(self, num_rows: int, salt: int) -> torch.Tensor:
        """Of different sizes, so that every other order of additions has other bits."""
        generator = torch.Generator().manual_seed(100 * self.seed + salt)
        rows = torch.randn(num_rows, self.hidden, generator=generator)
        return (rows * 4.0 ** torch.randint(-3, 4, rows.shape, generator=generator)).to(self.dtype)

    @cached_property
    def x(self) -> list[torch.Tensor]:
        return [self.random(self.nodes.routing.num_rows(rank), rank) for rank in range(self.sizes.num_ranks)]

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.rand(len(x), self.sizes.token.num_topk, generator=generator) for x in self.x]

    def biases(self, rank: int) -> list[torch.Tensor]:
        count = len(self.nodes.wanted[rank])
        return [self.random(count, 20 + 2 * rank + number) for number in range(self.num_biases)]

    def right_results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each rank: a node's rows are summed, and rounded; then the sums of nodes."""
        topology, results = self.nodes.topology, []
        for source, heads in enumerate(self.nodes.routing.send_head):
            out = torch.zeros(len(heads), self.hidden)
            for bias in self.biases(source):
                out += bias.float()
            weights = torch.zeros(len(heads), self.sizes.token.num_topk)
            for token, rows in enumerate(heads.tolist()):
                for node in range(topology.num_nodes):
                    here = [rank for rank in topology.ranks_on(node) if rows[rank] >= 0]
                    of_node = torch.zeros(self.hidden)
                    weights_of_node = torch.zeros(self.sizes.token.num_topk)
                    for rank in here:
                        of_node += self.x[rank][rows[rank]].float()
                        weights_of_node += self.weights[rank][rows[rank]]
                    if here:
                        out[token] += of_node.to(self.dtype).float()
                        weights[token] += weights_of_node
            results.append((out.to(self.dtype), weights))
        return results

    def run(
        self, ranks: NodeRanks, num_too_many: int = 0
    ) -> tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The outcomes, and the sums. `num_too_many` rows at the end of each rank are not there."""
        bits = torch.float32 if self.dtype == torch.float32 else torch.uint16
        xs, weights = [ranks.there(x) for x in self.x], [ranks.there(part) for part in self.weights]
        table = torch.tensor(
            [
                [x.data_ptr() or GUARD, 0, 0, address(part), 0, len(x) - num_too_many]
                for x, part in zip(xs, weights, strict=True)
            ]
        )
        outs, of_rank = [], []
        for rank, wanted in enumerate(self.nodes.wanted):
            out = ranks.there(torch.zeros(len(wanted), self.hidden, dtype=self.dtype))
            out_weights = ranks.there(torch.zeros(len(wanted), self.sizes.token.num_topk))
            outs.append((out, out_weights))
            biases = [ranks.there(bias).view(bits) for bias in self.biases(rank)]
            # A rank's own rows lie elsewhere: in a window they would not be staged.
            own_table = table.clone()
            own_table[rank, 0] = GUARD
            tables = ranks.node_tables(rank, ranks.there(own_table))
            heads = [
                ranks.there(part(rank)) for part in (self.nodes.send_rdma_head, self.nodes.send_nvl_head)
            ]
            relayed = self.nodes.relayed(ranks, rank, heads[1])
            of_rank.append(((biases + [out.view(bits)] * 2)[:2], heads[0], relayed, tables))

        def launch_on(rank: int) -> None:
            biases, send_rdma_head, relayed, tables = of_rank[rank]
            launch(
                *(relay_combine.combine_between_nodes, ranks.device, self.sizes.num_programs(rank)),
                *(Sums(outs[rank][0].view(bits), outs[rank][1]), Biases(*biases)),
                *(NodeTokens(send_rdma_head, send_rdma_head), relayed, tables, ranks.area, ranks.beside),
                *(xs[rank].data_ptr(), len(outs[rank][0]), self.hidden),
                num_warps=8,
                DTYPE=DTYPES[self.dtype],
                NUM_BIASES=self.num_biases,
                TILE_VALUES=32,
                IN_HARDWARE=ranks.device != "cpu",
                **ranks.shape(),
            )

        said = ranks.run(launch_on)
        return said, [(out.cpu(), weights.cpu()) for out, weights in outs]

    def check(self, ranks: NodeRanks) -> None:
        said, ours = self.run(ranks)
        assert said == [outcomes.GOOD] * ranks.num_ranks
        for (out, weights), (right, right_weights) in zip(ours, self.right_results(), strict=True):
            assert torch.equal(out.view(torch.uint8), right.view(torch.uint8))
            assert torch.equal(weights, right_weights)


def check_combine_example(device: str) -> None:
    """That of the docstring of `combine_between_nodes`."""
    sizes = Sizes(2, 1, 3, 1, TokenLayout(hidden_bytes=64))
    choices = [torch.tensor([[0, 3]]), torch.zeros(0, 2, dtype=torch.int64)]
    call = NodeCombine(NodeRouting(Routing(sizes, choices), Topology(2, 1)), 1, torch.float32)
    ranks = node_ranks(sizes, 1, device)
    ranks.set_counters(2)
    call.check(ranks)
    assert ranks.counters("tail") == [[[2], [3]], [[2], [2]]]
    assert ranks.counters("head") == [[[2], [2]], [[3], [2]]]
    entry = ranks.entry(0, 0, 1, 2).view(torch.float32)
    assert torch.equal(entry[:16], call.x[1][0])


def check_combine_of_two_by_two(device: str) -> None:
    """With weights; rings go around."""
    sizes = Sizes(4, 2, ring_rows(device), 2, TokenLayout(hidden_bytes=96, num_topk=3))
    ranks = node_ranks(sizes, 2, device)
    for seed, num_tokens in ((1, [9, 0, 13, 4]), (2, [1, 12, 0, 14])):
        nodes = nodes_of(sizes, 2, num_tokens, seed)
        NodeCombine(nodes, seed, torch.bfloat16, seed).check(ranks)


def check_combine_of_three_nodes(device: str) -> None:
    sizes = Sizes(3, 2, ring_rows(device), 2, TokenLayout(hidden_bytes=64))
    ranks = node_ranks(sizes, 1, device)
    for seed, dtype in enumerate((torch.float16, torch.float32)):
        NodeCombine(nodes_of(sizes, 1, [14, 3, 8], seed), seed, dtype).check(ranks)


def check_rows_that_are_not_there(device: str) -> None:
    """The ranks that would read them note it."""
    sizes = Sizes(2, 1, 8, 2, TokenLayout(hidden_bytes=64))
    ranks = node_ranks(sizes, 1, device)
    said, _ = NodeCombine(nodes_of(sizes, 1, [6, 6], 4), 4).run(ranks, num_too_many=1)
    assert said == [outcomes.GOOD] * 2
    found = [int(state[constants.BAD_ROWS]) for state in ranks.states]
    assert found == [outcomes.BAD_HANDLE, outcomes.BAD_HANDLE + outcomes.NUM_CODES]
