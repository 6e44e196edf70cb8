"""Arguments of kernels that travel together. On the host their members are arrays and integers, as the
annotations say; a kernel reads them by name.

    @kernel("int64(int64, RingStack)")
    def rows_sent(channel, rings):
        return borrowed(RingStack, rings).sent[channel].sum()

    rows_sent(*plain(0, rings))

A kernel is called with plain tuples: of other ones Numba would look up the type anew in each call. An address
is a number; 0 is the address of nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple, get_type_hints

import numpy as np
from numba import types

Array = np.ndarray[Any, Any]
Number = Annotated[int, types.int64]
Numbers = Annotated[Array, types.int64[::1]]
Numbers2D = Annotated[Array, types.int64[:, ::1]]
Numbers3D = Annotated[Array, types.int64[:, :, ::1]]
Words = Annotated[Array, types.int32[::1]]
Words2D = Annotated[Array, types.int32[:, ::1]]
Octets2D = Annotated[Array, types.uint8[:, ::1]]
Flags2D = Annotated[Array, types.boolean[:, ::1]]
Floats = Annotated[Array, types.float32[::1]]
Floats2D = Annotated[Array, types.float32[:, ::1]]
NO_ORDER: Final = np.zeros((0, 0), np.int32)


class RingStack(NamedTuple):
    """The rings of a call, one per channel and peer and direction, and how far they are."""

    layers: Numbers3D
    """[layer, channel, peer]: addresses and counters, in the order of `SEND_ROWS` and so on
    (anyep/layout.py). Where the address of the rows is 0, a ring is not used."""
    sent: Numbers2D
    """[channel, peer]: the rows sent since the call began."""
    taken: Numbers2D
    """[channel, peer]: the rows taken since the call began."""
    num_rows: Number
    """The rows of each ring."""
    chunk: Number
    """The most rows to send at a time."""
    first_rank: Number
    """Peer p is rank `first_rank + p * rank_stride`."""
    rank_stride: Number


class EntryParts(NamedTuple):
    """The parts of a ring's entry: a row, then source meta, scales, ids and weights at these offsets."""

    meta_at: Number
    scales_at: Number
    ids_at: Number
    weights_at: Number
    num_bytes: Number
    """The bytes of an entry."""
    row_bytes: Number
    num_scales: Number
    num_topk: Number


class Bells(NamedTuple):
    """How ranks wake each other: addresses by rank."""

    doorbells: Numbers
    sleepers: Numbers
    rank: Number
    """This rank."""


class Payload(NamedTuple):
    """What a dispatch sends: the addresses of rows and scales, ids and weights."""

    x: Number
    row_bytes: Number
    scales: Number
    stride_token: Number
    """From one token's scales to the next one's, in words of 4 bytes; `stride_scale` from scale to scale."""
    stride_scale: Number
    num_scales: Number
    topk_idx: Numbers2D
    topk_weights: Floats2D
    experts_per_rank: Number


class Outputs(NamedTuple):
    """What a combine sums: the addresses of rows and of their weights."""

    x: Number
    """This rank's rows; those that go through rings are read here."""
    topk_weights: Number
    x_of: Numbers
    """By peer: rows that are read in place, or 0 if they come through a ring."""
    weights_of: Numbers


class Sums(NamedTuple):
    """What a combine fills: a row of `hidden` values for each token, and top-k weights."""

    x: Number
    bias_0: Number
    bias_1: Number
    hidden: Number
    row_bytes: Number
    dtype: Number
    topk_weights: Floats2D
    order: Words2D = NO_ORDER
    """[token, ranks]: the ranks in the order in which their rows are added; without rows, ascending."""
    is_keyed: Number = 0
    """Between nodes: whether rows are added in the order of the last of their weights, which is no weight."""


class Scratch(NamedTuple):
    """Memory of a kernel that sums rows; a kernel makes it for itself."""

    rows: Numbers
    """The addresses of the rows to sum."""
    weights: Numbers
    """The addresses of their weights."""
    sums: Floats


class RingTokens(NamedTuple):
    """The tokens of a dispatch through rings."""

    cursor: Numbers2D
    """[channel, peer]: the next token to look at."""
    send_head: Words2D
    """[token, peer]: the row of a token at a peer, or -1."""


class RingResults(NamedTuple):
    """Where the rows go that come through rings."""

    ranges: Words2D
    """[peer * num_channels + channel]: (first row, rows)."""
    places: Numbers
    """The addresses of x, source indices, ids, weights and scales."""


class RingSums(NamedTuple):
    """The tokens that a combine through rings sums, and the rows that it pushes."""

    cursor: Numbers
    """[channel]: the next token to sum."""
    send_head: Words2D
    """[token, peer]: the row of a token at a peer, or -1."""
    ranges: Words2D
    """[peer * num_channels + channel]: (first row, rows) of x that go back to a peer."""


class NodeTokens(NamedTuple):
    """The tokens of a dispatch between nodes, and where they go."""

    cursor: Numbers2D
    """[channel, node]: the next token to look at."""
    in_rank: Flags2D
    """[token, rank]: whether a token goes to a rank."""
    send_rdma_head: Words2D
    """[token, node]: the number of a token among those for a node, or -1."""


class Relayed(NamedTuple):
    """The rows that a rank relays within its node."""

    send_nvl_head: Words2D
    """[virtual token, rank of the node]: the row there, or -1. Virtual tokens are those that this rank
    relays, by source node."""
    first_virtual: Numbers2D
    """[channel, node]: the first virtual token of a lane."""
    expected: Words2D
    """[node, channel]: how many there are."""
    next_row: Numbers3D
    """[channel, node, rank of the node]: in a new dispatch, the row there for the next row from a node."""
    places: Numbers2D
    """[rank of the node]: the addresses of its window's parts, or zeros."""
    is_new: Number
    """1 if `send_nvl_head` is to be filled from `next_row`, 0 if it is known."""


class Received(NamedTuple):
    """The rows that a rank receives through the rings of its own node."""

    expected: Words2D
    """[rank of the node, channel]: how many come through a rank."""
    next_row: Numbers3D
    """[channel, rank of the node, node]: where the next row from a node goes."""
    places: Numbers
    """The addresses of the parts of the results: x, meta, ids, weights and scales."""


class Pushed(NamedTuple):
    """The rows of a combine that a rank pushes through the rings of its own node."""

    first_row: Numbers3D
    """[channel, rank of the node, node]: the first row of x that goes back through a rank to a node."""
    before: Numbers3D
    """[channel, rank of the node, node]: how many go before it; one more entry has the total."""


class NodeSums(NamedTuple):
    """The tokens of a combine between nodes: this rank's own, and those whose sums it returns to other
    nodes."""

    cursor: Numbers
    """[channel]: the next of its own tokens to sum."""
    send_rdma_head: Words2D
    """[token, node]: the number of a token among those of a node, or -1."""
    send_nvl_head: Words2D
    """[virtual token, rank of the node]: the row there, or -1."""
    first_virtual: Numbers2D
    """[channel, node]: the first virtual token of a lane."""
    expected: Words2D
    """[node, channel]: how many there are."""
    own_virtual: Number
    """The first virtual token of this rank itself."""


class NodeHandle(NamedTuple):
    """The parts of a handle between nodes, in the order of `RelayRouting`, which describes them."""

    in_rank: Flags2D
    rdma_prefix: Words2D
    gbl_prefix: Words2D
    recv_rdma_prefix: Words2D
    recv_rdma_sum: Words
    recv_gbl_prefix: Words2D
    recv_gbl_sum: Words
    recv_src_meta: Octets2D
    send_rdma_head: Words2D
    send_nvl_head: Words2D


class Positions(NamedTuple):
    """Where the copies of each received row lie, by choice; -1 for none. They are int32 numbers."""

    address: Number
    stride: Number
    """From one row's positions to the next one's, in numbers."""
    num_topk: Number


class CompactRows(NamedTuple):
    """Rows as they are received: the addresses of rows, weights by choice, and scales, row by row."""

    x: Number
    row_bytes: Number
    weights: Number
    scales: Number
    num_scales: Number


class ExpandedRows(NamedTuple):
    """Rows by expert: the addresses of rows, of one weight per row, and of scales."""

    x: Number
    num_rows: Number
    """The room; nothing is written past it."""
    weights: Number
    scales: Number
    stride_row: Number
    """From one row's scales to the next one's, in words of 4 bytes; `stride_scale` from scale to scale."""
    stride_scale: Number


class ReducedRows(NamedTuple):
    """Rows by expert and their weights, and where their sums and the weights by choice go."""

    x: Number
    num_rows: Number
    weights: Number
    out: Number
    out_weights: Number
    hidden: Number
    row_bytes: Number
    dtype: Number


def plain(*arguments: Any) -> tuple[Any, ...]:
    """The arguments of a call, with plain tuples in place of groups."""
    return tuple(tuple(each) if isinstance(each, tuple) else each for each in arguments)


def members_of(group: Any) -> dict[str, Any]:
    """The types of a group's members, by name."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(group, include_extras=True).items()}


GROUP_TYPES: Final = {
    group.__name__: types.BaseTuple.from_types(list(members_of(group).values()))
    for group in (
        *(RingStack, EntryParts, Bells, Payload, Outputs, Sums, RingTokens, RingResults, RingSums),
        *(NodeTokens, Relayed, Received, Pushed, NodeSums, NodeHandle),
        *(Positions, CompactRows, ExpandedRows, ReducedRows),
    )
}
"""The types of groups, by the names that signatures use."""
