"""What crosses the network: each token once per node that wants it, and its sum once back. Nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from anyep import Config
from anyep.layout import COUNTER_BYTES, DIGEST_BYTES, NOTIFY_HEADER_BYTES
from anyep.sizes import token_layout
from tests.support.cases import buffer_for
from tests.support.places import Place
from tests.support.world import RankContext, get_world

RANKS, TOKENS, HIDDEN, EXPERTS_PER_RANK = 4, 10, 48, 2
CONFIG = Config(8, 1, 2, 1, 2)
HOSTS = Place("cpu", RANKS, num_nodes=2, hosts=True)
TOKEN = token_layout(2 * HIDDEN, 0, 0)


class Sent(NamedTuple):
    """Rows and bytes that a rank has sent, and the bytes that an engine put to each rank that are remote."""

    rows_between: int
    bytes_between: int
    rows_within: int
    bytes_within: int
    put: dict[int, int]


def masks_of(routing: str, per_node: int) -> list[torch.Tensor]:
    """Which ranks each rank's tokens go to."""
    masks = torch.zeros(RANKS, TOKENS, RANKS, dtype=torch.bool)
    if routing == "all to one node":
        masks[:, :, :per_node] = True
    elif routing == "all nodes":
        masks[:] = True
    elif routing == "one rank of every node":
        masks[:, :, ::per_node] = True
    elif routing == "own node only":
        for rank in range(RANKS):
            masks[rank, :, rank // per_node * per_node :][:, :per_node] = True
    elif routing == "any":
        masks[:] = torch.rand(masks.shape, generator=torch.Generator().manual_seed(5)) < 0.4
    else:
        assert routing == "none"
    return list(masks)


ROUTINGS = ("all to one node", "all nodes", "one rank of every node", "own node only", "none", "any")


def sent_so_far(buffer: Any) -> Sent:
    traffic, transport = buffer.runtime.traffic, buffer.runtime.control.transport
    return Sent(
        traffic.rows_between_nodes,
        traffic.bytes_between_nodes,
        traffic.rows_within_node,
        traffic.bytes_within_node,
        dict(transport.engine.bytes_put) if transport is not None else {},
    )


def since(before: Sent, after: Sent) -> Sent:
    put = {rank: num_bytes - before.put[rank] for rank, num_bytes in after.put.items()}
    return Sent(*(after[index] - before[index] for index in range(4)), put)


def measure(
    context: RankContext, routing: str, per_node: int, num_window_bytes: int | None, network: str | None
) -> tuple[Sent, Sent, Sent]:
    """What a dispatch, a cached dispatch and a combine send."""
    buffer = buffer_for(context, num_window_bytes, ranks_per_node=per_node, network=network)
    in_rank = masks_of(routing, per_node)[context.rank]
    per_rank = in_rank.sum(0, dtype=torch.int32)
    per_expert = torch.zeros(RANKS * EXPERTS_PER_RANK, dtype=torch.int32)
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
    start = sent_so_far(buffer)
    recv, *_, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, config=CONFIG)
    dispatched = sent_so_far(buffer)
    buffer.dispatch(x, handle=handle, config=CONFIG)
    again = sent_so_far(buffer)
    assert isinstance(recv, torch.Tensor)
    assert handle is not None
    buffer.combine(recv, handle, config=CONFIG)
    return since(start, dispatched), since(dispatched, again), since(again, sent_so_far(buffer))


@dataclass(frozen=True)
class Routed:
    """The routing of all ranks, and what it means for one of them."""

    rank: int
    per_node: int
    masks: list[torch.Tensor]

    @property
    def node(self) -> int:
        return self.rank // self.per_node

    def wants(self, rank: int, node: int) -> torch.Tensor:
        """[token, rank of the node]: who on a node wants a rank's tokens."""
        return self.masks[rank][:, node * self.per_node : (node + 1) * self.per_node]

    @property
    def relays(self) -> dict[int, int]:
        """Of each other node, the rank that relays this one's tokens."""
        nodes = RANKS // self.per_node
        index = self.rank % self.per_node
        return {node: node * self.per_node + index for node in range(nodes) if node != self.node}

    def tokens_to(self, node: int) -> int:
        return int(self.wants(self.rank, node).any(1).sum())

    def tokens_from(self, node: int) -> int:
        return int(self.wants(self.relays[node], self.node).any(1).sum())

    def rows_passed_on(self) -> int:
        """Rows that this rank gives to ranks of its node, itself included."""
        sources = [self.rank, *self.relays.values()]
        return int(sum(self.wants(source, self.node).sum() for source in sources))

    def rows_returned(self) -> int:
        """Rows that this rank received, and gives back to the relays on its node."""
        return int(sum(mask[:, self.rank].sum() for mask in self.masks))


@pytest.mark.parametrize("num_window_bytes", [None, 0])
@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_virtual_nodes(routing: str, per_node: int, num_window_bytes: int | None) -> None:
    check(
        get_world(RANKS).run(measure, routing, per_node, num_window_bytes, None),
        routing,
        per_node,
    )


def check(measured: list[tuple[Sent, Sent, Sent]], routing: str, per_node: int) -> None:
    for rank, (dispatched, again, combined) in enumerate(measured):
        routed = Routed(rank, per_node, masks_of(routing, per_node))
        there = sum(map(routed.tokens_to, routed.relays))
        back = sum(map(routed.tokens_from, routed.relays))
        assert dispatched.rows_between == again.rows_between == there
        assert dispatched.bytes_between == again.bytes_between == there * TOKEN.token_bytes
        assert combined.rows_between == back
        assert combined.bytes_between == back * TOKEN.token_bytes
        for sent, rows in (
            (dispatched, routed.rows_passed_on()),
            (again, routed.rows_passed_on()),
            (combined, routed.rows_returned()),
        ):
            assert sent.rows_within == rows
            assert sent.bytes_within == rows * 2 * HIDDEN


@pytest.mark.xdist_group("hosts")
@pytest.mark.parametrize("num_window_bytes", [None, 0])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_bytes_on_the_wire(routing: str, num_window_bytes: int | None) -> None:
    """What the engine has put are the rows, a notify message to every rank, and to the relays counts by
    channel."""
    per_node, nodes, channels = 2, 2, CONFIG.num_channels
    measured = HOSTS.world().run(measure, routing, per_node, num_window_bytes, "nixl")
    check(measured, routing, per_node)
    header = NOTIFY_HEADER_BYTES - COUNTER_BYTES
    message = header + 4 * (RANKS + nodes + channels + EXPERTS_PER_RANK)
    # Two digests of every rank and node, and three counts of every rank.
    notify_by_handle = header + 2 * DIGEST_BYTES * (RANKS + nodes) + 4 * 3 * RANKS
    for rank, (dispatched, again, combined) in enumerate(measured):
        routed = Routed(rank, per_node, masks_of(routing, per_node))
        ((node, relay),) = routed.relays.items()
        for other in range(node * per_node, (node + 1) * per_node):
            there = routed.tokens_to(node) * TOKEN.token_bytes if other == relay else 0
            back = routed.tokens_from(node) * TOKEN.token_bytes if other == relay else 0
            counts = 4 * channels * (per_node + 1) if other == relay else 0
            assert dispatched.put[other] == message + counts + there
            assert again.put[other] == notify_by_handle + there
            assert combined.put[other] == notify_by_handle + back
