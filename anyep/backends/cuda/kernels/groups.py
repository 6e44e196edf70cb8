"""Arguments of kernels that travel together. On the host their members are tensors and integers, in a kernel
pointers and numbers.

A kernel declares a group by an annotation: `tables: Tables`. Where a tensor is not needed, any other takes
its place.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Tables(NamedTuple):
    """The tables of a Buffer in normal mode (anyep/backends/cuda/constants.py)."""

    constants: Any
    heaps: Any
    """Where this rank writes words for each rank: memory laid out like that rank's control region."""
    state: Any
    """The state of the call."""
    targets: Any
    """Where each rank's results, or its rows for a combine, lie in this call."""
    bases: Any
    """The address of each rank's blocks of windows."""
    inboxes: Any
    """Where the words arrive that each rank writes for this one: memory laid out like a control region."""
    net_rows: Any
    """Where rows for the relay on each node are written, by node: the address to which the offset of the
    rings is added, and the index of the ring among those of a channel."""


class Payload(NamedTuple):
    """What a dispatch sends: rows, ids and weights."""

    x: Any
    topk_idx: Any
    topk_weights: Any


class Scales(NamedTuple):
    """The scales of a dispatch's rows, as words of 4 bytes: `count` per row, with strides in words."""

    words: Any
    count: Any
    stride_token: Any
    stride_scale: Any


class Prefixes(NamedTuple):
    """Prefix sums and digests of a routing, as in a handle."""

    rank_prefix: Any
    channel_prefix: Any
    recv_channel_prefix: Any
    digests: Any


class Counts(NamedTuple):
    """How many tokens of a dispatch go to each rank and to each expert, and the ids that say so."""

    by_rank: Any
    by_expert: Any
    topk_idx: Any
    by_node: Any
    """[node, channel]: between nodes, the tokens that go to each node."""


class HostWords(NamedTuple):
    """Addresses in memory of the host that the kernel of notify messages uses."""

    message: Any
    """The header of this rank's message."""
    totals: Any
    """Where the host finds its totals."""
    rows_of: Any
    """Where the host finds the rows of all ranks."""
    ticket: Any
    """The number that closes the totals; 0 if the host does not wait for them."""


class RingArea(NamedTuple):
    """Where the rows of rings lie in every heap, and their sizes."""

    rows_at: Any
    ring_rows: Any
    entry_bytes: Any
    num_channels: Any


class Beside(NamedTuple):
    """What follows the row in an entry of a ring: offsets in bytes, and counts."""

    meta_at: Any
    scales_at: Any
    ids_at: Any
    weights_at: Any
    num_scales: Any
    num_topk: Any


class RingResults(NamedTuple):
    """The addresses of what a rank receives through rings; 0 for parts that it does not need."""

    x: Any
    sources: Any
    topk_idx: Any
    topk_weights: Any
    scales: Any


class NodeTokens(NamedTuple):
    """Where a rank's tokens go between nodes."""

    in_rank: Any
    """[token, rank]: whether a token goes to a rank, as bytes."""
    send_rdma_head: Any
    """[token, node]: the number of a token among those for a node, or -1."""


class NodeHandle(NamedTuple):
    """The ten parts of a handle between nodes, in their order."""

    in_rank: Any
    rdma_prefix: Any
    gbl_prefix: Any
    recv_rdma_prefix: Any
    recv_rdma_sum: Any
    recv_gbl_prefix: Any
    recv_gbl_sum: Any
    recv_src_meta: Any
    """Two words of 4 bytes for each row: its source node, and the ranks of this node that have it as bits."""
    send_rdma_head: Any
    send_nvl_head: Any


class Relayed(NamedTuple):
    """The virtual tokens that a rank relays within its node: by source node, then by token."""

    send_nvl_head: Any
    """[virtual token, rank of the node]: the row there, or -1."""
    first_virtual: Any
    """[channel, node]: the first virtual token of a lane."""
    expected: Any
    """[node, channel]: how many there are."""
    next_row: Any
    """[channel, node, rank of the node]: in a new dispatch, the row there for the first row of a lane."""


class Outputs(NamedTuple):
    """What a combine sums: the experts' rows, and top-k weights."""

    x: Any
    topk_weights: Any


class Sums(NamedTuple):
    """What a combine fills: a row per token, and top-k weights."""

    x: Any
    topk_weights: Any
    order: Any = 0
    """[token, rank]: the ranks in the order in which their rows are added; 0 where ranks ascend."""


class Biases(NamedTuple):
    """Where the sums of a combine start."""

    first: Any
    second: Any


class Received(NamedTuple):
    """How many rows a rank has received: one of several counts in the GPU's memory."""

    counts: Any
    at: Any
    """The index of the count."""
    room: Any
    """The number of rows is at most this."""


class Positions(NamedTuple):
    """Where the copies of each received row lie, by choice; -1 for none."""

    words: Any
    first: Any
    """The index of the first row's first position."""
    stride: Any
    """From one row's positions to the next one's."""
    num_topk: Any


class CompactRows(NamedTuple):
    """Rows as they are received, with weights by choice, and scales row by row."""

    x: Any
    weights: Any
    scales: Any
    num_scales: Any


class ExpandedRows(NamedTuple):
    """Rows by expert, with one weight each, and scales of any strides."""

    x: Any
    weights: Any
    scales: Any
    stride_row: Any
    stride_scale: Any
    num_rows: Any
    """The room; nothing is written or read past it."""


class LowLatencyCall(NamedTuple):
    """The tables of a low-latency call; its state is its own."""

    constants: Any
    heaps: Any
    generations: Any
    """Which ranks are masked: those whose number is odd."""
    state: Any


class Slots(NamedTuple):
    """The slots of low-latency calls: tables of addresses by set and rank, and sizes."""

    messages: Any
    """The first message of each rank."""
    lists: Any
    """The lists for each rank, or of each rank, of the first expert."""
    message_bytes: Any
    list_stride: Any
    """Bytes from one expert's list to the next."""
    local_experts: Any
    rows_per_expert: Any


class Packed(NamedTuple):
    """What a low-latency dispatch fills: rows by expert, and where they came from."""

    x: Any
    scales: Any
    src_info: Any
    layout_range: Any
    counts: Any
    stats: Any
    """The tokens of each expert, over all calls."""
