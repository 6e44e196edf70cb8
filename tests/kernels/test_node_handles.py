"""The kernels that read handles between nodes: their examples, and all ranks' handles of any routing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep.backends import cpu
from anyep.backends.cpu.kernels import node_handles
from anyep.backends.cpu.relay_routing import (
    NOTHING,
    WHAT_DOES_NOT_FIT,
    RelayRouting,
    checked,
    difference_between,
    relay_routing_of,
)
from anyep.core.digests import mixed
from anyep.errors import InvalidCall
from anyep.sizes import SOURCE_META_BYTES
from anyep.topology import Topology
from tests.support.arrays import Array, flags, from_python, int32, int64
from tests.support.depth import examples


def test_place_in_nodes() -> None:
    by_channel, numbers = np.empty((2, 2), np.int32), np.empty((2, 2), np.int32)
    node_handles.place_in_nodes(flags([[1, 0, 0, 0], [0, 1, 1, 1]]), 2, by_channel, numbers)
    assert by_channel.tolist() == [[1, 1], [0, 1]]
    assert numbers.tolist() == [[0, -1], [1, 0]]


def test_count_relayed() -> None:
    """The example, and the same with the rows for ranks of the node by channel, twice."""
    expected = int64([[5, 6, 0, 4], [500, 600, 0, 400], [100, 144, 0, 96], [0, 0, 0, 0]])
    through_network, sent = int64([[0, 3], [0, 1]]), np.zeros((4, 4), np.int64)
    for times, to_ranks in ((1, [[5, 6]]), (2, [[5, 2], [0, 4]])):
        rows = int64(to_ranks)
        node_handles.count_relayed(sent, 1, through_network, rows, flags([1, 0]), 100, 20, 24)
        assert sent.tolist() == (times * expected).tolist()


def test_helpers() -> None:
    """What kernels call; from here each is compiled with its first call."""
    assert from_python(node_handles.mask_of)(flags([[0, 1, 1]]), 0, 1, 2) == 3
    word_in = from_python(node_handles.word_in)
    assert word_in(np.array([9, 1, 1, 0, 0], np.uint8), 1) == 257
    assert word_in(np.array([255] * 4, np.uint8), 0) == 2**32 - 1
    hash_of = from_python(node_handles.row_and_mask)
    hashes = {hash_of(row, mask, node) for row in range(3) for mask in (1, 2, -1) for node in range(3)}
    assert len(hashes) == 27
    assert hash_of(2, -1, 0) == hash_of(2, 2**32 - 1, 0)
    marks, counts_marks = flags([[1, 0], [0, 1], [0, 0]]), from_python(node_handles.counts_marks)
    assert counts_marks(marks, 0, 2, int32([2, 2]))
    assert counts_marks(marks, 0, 1, int32([1, 1]))
    assert not counts_marks(marks, 0, 1, int32([1, 2]))
    falls = from_python(node_handles.falls)
    assert [falls(int32(prefix)) for prefix in ([0, 2, 2], [0, 2, 1], [-1, 0])] == [False, True, True]


ONE_TOKEN = RelayRouting(
    is_token_in_rank=flags([[0, 1]]),
    rdma_channel_prefix_matrix=int32([[0], [1]]),
    gbl_channel_prefix_matrix=int32([[0], [1]]),
    recv_rdma_channel_prefix_matrix=int32([[0], [0]]),
    recv_rdma_rank_prefix_sum=int32([0, 0]),
    recv_gbl_channel_prefix_matrix=int32([[0], [0]]),
    recv_gbl_rank_prefix_sum=int32([0, 0]),
    recv_src_meta=np.zeros((0, SOURCE_META_BYTES), np.uint8),
    send_rdma_head=int32([[-1, 0]]),
    send_nvl_head=np.zeros((0, 1), np.int32),
)


def test_read_node_handle() -> None:
    said = checked(ONE_TOKEN, Topology(2, 1), 0).digest_words
    none, token = mixed(-1), mixed(-1) + mixed(0)
    # Rank 0 of its node is all that wants it.
    row = mixed(-1) + mixed(1)
    digests = [none, row, none, none, none, token, none, none]
    assert said[:16].view(np.uint64).tolist() == [digest % 2**64 for digest in digests]
    assert said[16:].tolist() == [0, 1, 0, 0, -1, -1]


def test_first_difference() -> None:
    digests, counts = np.zeros((2, 8), np.int64), int32([[1, 2, 1, 2, 0, 0], [2, 3, 7, 3, 0, 0]])
    assert node_handles.first_difference(digests, counts, 1) == 1
    said = np.concatenate([digests.view(np.int32), counts], axis=1)
    assert (
        difference_between(said, Topology(2, 1))
        == "in that of rank 0 it sent 2 rows to rank 1, which got 7 according to its own"
    )


def test_plan_lanes() -> None:
    lanes = ONE_TOKEN._replace(
        recv_rdma_channel_prefix_matrix=int32([[3], [2]]),
        recv_rdma_rank_prefix_sum=int32([3, 5]),
        recv_gbl_rank_prefix_sum=int32([3, 5]),
        send_nvl_head=int32([[0], [1], [2], [3], [4]]),
    ).lanes(Topology(2, 1))
    assert [part.tolist() for part in lanes] == [[[[0, 3]]], [[[3, 2]]], [[3], [2]], [[0, 3]], [5]]


# Every rank's handle of a routing, made as plainly as possible.


def channel_of(token: int, num_tokens: int, num_channels: int) -> int:
    return token // max(1, -(-num_tokens // num_channels))


def handles_of(masks: list[Array], topology: Topology, num_channels: int) -> list[RelayRouting]:
    ranks, nodes, per_node = topology.num_ranks, topology.num_nodes, topology.ranks_per_node
    sent = np.zeros((ranks, ranks, num_channels), np.int32)
    tokens = np.zeros((ranks, nodes, num_channels), np.int32)
    for source, mask in enumerate(masks):
        for token, wanted in enumerate(mask):
            channel = channel_of(token, len(mask), num_channels)
            sent[source, wanted, channel] += 1
            tokens[source, wanted.reshape(nodes, per_node).any(axis=1), channel] += 1
    return [_handle_of(rank, masks, topology, sent, tokens) for rank in range(ranks)]


def _handle_of(rank: int, masks: list[Array], topology: Topology, sent: Array, tokens: Array) -> RelayRouting:
    nodes, per_node = topology.num_nodes, topology.ranks_per_node
    node, index = divmod(rank, per_node)
    here = range(node * per_node, (node + 1) * per_node)
    heads: list[list[int]] = []
    for source in range(index, topology.num_ranks, per_node):
        next_row = {receiver: int(sent[:source, receiver].sum()) for receiver in here}
        for wanted in masks[source]:
            if wanted[list(here)].any():
                heads.append([next_row[peer] if wanted[peer] else -1 for peer in here])
                for peer in here:
                    next_row[peer] += int(wanted[peer])
    in_node = masks[rank].reshape(-1, nodes, per_node).any(axis=2)
    bits = 1 << np.arange(per_node)
    meta = [
        (source // per_node, int(wanted[list(here)] @ bits))
        for source, mask in enumerate(masks)
        for wanted in mask
        if wanted[rank]
    ]
    relayed = tokens[index::per_node, node]
    received = sent[:, rank]
    return RelayRouting(
        is_token_in_rank=masks[rank],
        rdma_channel_prefix_matrix=int32(np.cumsum(tokens[rank], axis=1)),
        gbl_channel_prefix_matrix=int32(np.cumsum(sent[rank], axis=1)),
        recv_rdma_channel_prefix_matrix=int32(np.cumsum(relayed, axis=1)),
        recv_rdma_rank_prefix_sum=int32(np.cumsum(relayed.sum(axis=1))),
        recv_gbl_channel_prefix_matrix=int32(np.cumsum(received, axis=1) - received),
        recv_gbl_rank_prefix_sum=int32(np.cumsum(received.sum(axis=1))),
        recv_src_meta=int32(meta).reshape(-1, 2).view(np.uint8),
        send_rdma_head=int32(np.where(in_node, np.cumsum(in_node, axis=0) - 1, -1)),
        send_nvl_head=int32(heads).reshape(-1, per_node),
    )


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[Array], Topology, int]:
    nodes, per_node = draw(st.sampled_from([(2, 1), (2, 2), (3, 2), (2, 3)]))
    ranks, seed = nodes * per_node, draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    density = draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    counts = draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    masks = [random.random((count, ranks)) < density for count in counts]
    return masks, Topology(ranks, per_node), draw(st.integers(1, 4))


def same(one: RelayRouting, other: RelayRouting) -> bool:
    return all(np.array_equal(*parts) for parts in zip(one[:10], other[:10], strict=True))


def said_by(handles: list[RelayRouting], topology: Topology) -> Array:
    return np.stack([checked(handle, topology, rank).digest_words for rank, handle in enumerate(handles)])


@examples(40, deep=400)
@given(routings())
def test_handles_of_one_dispatch_fit_and_agree(routing: tuple[list[Array], Topology, int]) -> None:
    masks, topology, num_channels = routing
    handles = handles_of(masks, topology, num_channels)
    assert difference_between(said_by(handles, topology), topology) == ""
    for rank, handle in enumerate(handles):
        by_channel = np.empty((topology.num_nodes, num_channels), np.int32)
        numbers = np.empty((len(masks[rank]), topology.num_nodes), np.int32)
        cpu.place_in_nodes(masks[rank], topology.ranks_per_node, by_channel, numbers)
        assert np.array_equal(np.cumsum(by_channel, axis=1), handle.rdma_channel_prefix_matrix)
        assert np.array_equal(numbers, handle.send_rdma_head)
        lanes = handle.lanes(topology)
        relayed = [handle.recv_rdma_channel_prefix_matrix[:, channel] for channel in range(num_channels)]
        assert np.array_equal(np.cumsum(lanes.relayed, axis=1).T, relayed)
        assert lanes.relayed_to.tolist() == (handle.send_nvl_head >= 0).sum(axis=0).tolist()
        # Rows follow each other by source (node, then rank of the node), then by channel.
        firsts, counts = (part.transpose(2, 1, 0).ravel() for part in (lanes.first_row, lanes.num_rows))
        ends = np.cumsum(counts)
        assert np.array_equal(firsts, ends - counts)
        assert ends[-1] == handle.num_recv_rows
        tokens = lanes.relayed.ravel()
        assert np.array_equal(lanes.first_relayed.T.ravel(), np.cumsum(tokens) - tokens)


@examples(40, deep=400)
@given(routings(), st.randoms(use_true_random=False))
def test_a_handle_of_another_dispatch_is_found(
    routing: tuple[list[Array], Topology, int], random: Any
) -> None:
    """One handle after a token less or more for some rank, the others' before: they do not agree."""
    masks, topology, num_channels = routing
    handles = handles_of(masks, topology, num_channels)
    sources = [rank for rank, mask in enumerate(masks) if len(mask)]
    if not sources:
        return
    source = random.choice(sources)
    token, wanted = random.randrange(len(masks[source])), random.randrange(topology.num_ranks)
    changed = [mask.copy() for mask in masks]
    changed[source][token, wanted] ^= True
    other = handles_of(changed, topology, num_channels)
    concerned = [rank for rank, pair in enumerate(zip(handles, other, strict=True)) if not same(*pair)]
    assert {source, wanted} <= {*concerned}
    for rank in concerned:
        mixed = [*handles]
        mixed[rank] = other[rank]
        agree = difference_between(said_by(mixed, topology), topology) == ""
        assert agree == (len(concerned) == 1)


@examples(40, deep=400)
@given(routings(), st.randoms(use_true_random=False))
def test_a_handle_of_another_dispatch_with_the_same_counts_is_found(
    routing: tuple[list[Array], Topology, int], random: Any
) -> None:
    """Two tokens of a channel change places: all counts stay. One handle after that, the others before."""
    masks, topology, num_channels = routing
    places = [
        (rank, one, other)
        for rank, mask in enumerate(masks)
        for one in range(len(mask))
        for other in range(one)
        if channel_of(one, len(mask), num_channels) == channel_of(other, len(mask), num_channels)
        and (mask[one] != mask[other]).any()
    ]
    if not places:
        return
    source, one, other = random.choice(places)
    changed = [mask.copy() for mask in masks]
    changed[source][[one, other]] = changed[source][[other, one]]
    handles, others = (handles_of(each, topology, num_channels) for each in (masks, changed))
    concerned = [rank for rank, pair in enumerate(zip(handles, others, strict=True)) if not same(*pair)]
    assert source in concerned
    # What a source alone knows is which of its tokens the rows are: what others know must not have changed.
    known = [rank for rank in concerned if rank != source]
    for rank in concerned:
        mixed_handles = [*handles]
        mixed_handles[rank] = others[rank]
        agree = difference_between(said_by(mixed_handles, topology), topology) == ""
        assert agree == (not known)


PARTS = RelayRouting._fields[: len(ONE_TOKEN) - 1]


@examples(40, deep=400)
@given(routings(), st.sampled_from([part for part in PARTS if part != "recv_src_meta"]), st.data())
def test_a_changed_part_is_refused_or_stays_inside(
    routing: tuple[list[Array], Topology, int], name: str, data: st.DataObject
) -> None:
    """Whatever is changed, what passes keeps kernels within the rows and the lines that there are."""
    masks, topology, num_channels = routing
    rank = data.draw(st.integers(0, topology.num_ranks - 1))
    handle = handles_of(masks, topology, num_channels)[rank]
    part = getattr(handle, name).copy()
    if not part.size:
        return
    place = data.draw(st.integers(0, part.size - 1))
    if part.dtype == np.bool_:
        part.flat[place] ^= True
    else:
        part.flat[place] += data.draw(st.sampled_from([-(2**20), -2, -1, 1, 2, 2**20]))
    changed = handle._replace(**{name: part})
    try:
        checked(changed, topology, rank)
    except InvalidCall:
        return
    assert np.array_equal(changed.send_rdma_head, handle.send_rdma_head)
    lanes = changed.lanes(topology)
    assert lanes.num_rows.min() >= 0
    assert lanes.first_row.min() >= 0
    assert (lanes.first_row + lanes.num_rows).max() <= changed.num_recv_rows
    assert lanes.relayed.min() >= 0
    assert (lanes.first_relayed.T + lanes.relayed).max() <= len(changed.send_nvl_head)


@pytest.mark.parametrize("code", WHAT_DOES_NOT_FIT)
def test_each_thing_that_does_not_fit(code: int) -> None:
    """Rank 1 of 2 nodes of 2, in 2 channels: one part changed at a time."""
    topology = Topology(4, 2)
    masks = [flags([[1, 1, 1, 1]] * 3)] * 4
    handle = handles_of(masks, topology, 2)[1]
    name, place, value = {
        1: ("send_rdma_head", (1, 0), 2),
        2: ("rdma_channel_prefix_matrix", (0, 0), 1),
        3: ("gbl_channel_prefix_matrix", (3, 1), 2),
        4: ("recv_gbl_rank_prefix_sum", (3,), 13),
        5: ("recv_gbl_channel_prefix_matrix", (2, 1), 4),
        6: ("recv_rdma_channel_prefix_matrix", (1, 0), -1),
        7: ("recv_rdma_rank_prefix_sum", (0,), 2),
        8: ("recv_rdma_channel_prefix_matrix", (0, 0), 1),
        9: ("send_nvl_head", (1, 1), -1),
    }[code]
    part = getattr(handle, name).copy()
    part[place] = value
    with pytest.raises(InvalidCall) as caught:
        checked(handle._replace(**{name: part}), topology, 1)
    assert str(caught.value).endswith(WHAT_DOES_NOT_FIT[code])


def test_a_handle_goes_through_its_tensors() -> None:
    topology = Topology(4, 2)
    handle = handles_of([flags([[1, 0, 1, 1]] * 3)] * 4, topology, 2)[2]
    tensors = handle.tensors()
    assert len(tensors) == 10
    again = relay_routing_of(tensors, topology)
    assert again.digest_words is NOTHING
    assert same(handle, again)
