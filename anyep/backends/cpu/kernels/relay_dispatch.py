"""Several nodes: a token crosses the network once per node, to the rank with the sender's index there. That
rank, the relay, forwards it to the ranks of its node that it goes to.

Every rank is sender, relay and receiver at once, in one progress loop that never blocks on one side. Between
nodes rows go through the rings `net`, whose peers are nodes; within a node they go to windows, or through the
rings `nvl`, whose peers are its ranks. Data for another host is written to the memory that the engine sends
from.

The kernel keeps its progress in the rings and in cursors, so a call may be continued after a return. The way
back is `relay_combine`; what happens in each ring is in `lanes`.
"""

from __future__ import annotations

import numpy as np

from anyep.backends.cpu.kernels.borrow import borrowed
from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.groups import (
    Bells,
    EntryParts,
    NodeTokens,
    Payload,
    Received,
    Relayed,
    RingStack,
)
from anyep.backends.cpu.kernels.lanes import (
    end_of_arrived,
    end_of_channel,
    end_of_room,
    entry_from,
    entry_to,
    own_bell,
    polls_after_round,
    publish_head,
    publish_tail,
    receives,
    sends,
)
from anyep.backends.cpu.kernels.memory import copy_bytes, copy_row, float32_at, int32_at, int64_at
from anyep.backends.cpu.kernels.windows import copy_scales

META_BYTES = 8


@inlined
def wanted_by(in_rank, token, node, ranks_per_node):
    """The ranks of a node that a token goes to, as bits: [.., 1, 0, 1] for ranks 4 to 6 of node 1 gives 5."""
    mask = 0
    for index in range(ranks_per_node):
        if in_rank[token, node * ranks_per_node + index]:
            mask |= 1 << index
    return mask


@inlined
def known_ranks(send_nvl_head, virtual):
    """The ranks of this node that have a row of a virtual token, as bits: heads [4, -1, 0] give 5."""
    mask = 0
    for index in range(send_nvl_head.shape[1]):
        mask |= (1 << index) * (send_nvl_head[virtual, index] >= 0)
    return mask


# What travels with a row


@inlined
def write_beside(entry, parts, payload, token, own_node, mask):
    """Write what travels with a row into its ring entry: source node and mask, scales, global ids, weights.

    Ids have 32 bits there. They were checked before: each is an expert, or -1 for none.
    """
    meta = int32_at(entry + parts.meta_at, 2)
    meta[0] = own_node
    meta[1] = mask
    if parts.num_scales:
        copy_scales(entry + parts.scales_at, payload, token)
    num_topk = parts.num_topk
    if num_topk:
        ids = int32_at(entry + parts.ids_at, num_topk)
        weights = float32_at(entry + parts.weights_at, num_topk)
        for index in range(num_topk):
            ids[index] = payload.topk_idx[token, index]
            weights[index] = payload.topk_weights[token, index]


@inlined
def write_to_window(places, row, x_row, entry, parts, first_expert, num_experts, streaming):
    """Write a row, and what travels with it in `entry`, to a window; `places` are the addresses of its parts.

    Example:
        With experts 4 and 5 here, the ids [5, 1] become [1, -1], and the weights [0.5, 0.25] [0.5, 0].
    """
    copy_row(places[0] + row * parts.row_bytes, x_row, parts.row_bytes, streaming)
    copy_bytes(places[1] + META_BYTES * row, entry + parts.meta_at, META_BYTES)
    num_topk = parts.num_topk
    if num_topk:
        ids = int32_at(entry + parts.ids_at, num_topk)
        weights = float32_at(entry + parts.weights_at, num_topk)
        ids_there = int64_at(places[2] + 8 * row * num_topk, num_topk)
        weights_there = float32_at(places[3] + 4 * row * num_topk, num_topk)
        for index in range(num_topk):
            local = ids[index] - first_expert
            here = 0 <= local < num_experts
            ids_there[index] = local if here else -1
            weights_there[index] = weights[index] if here else np.float32(0.0)
    if parts.num_scales:
        copy_bytes(places[4] + 4 * row * parts.num_scales, entry + parts.scales_at, 4 * parts.num_scales)


# Send


@inlined
def send_to_node(channel, node, net, parts, bells, payload, tokens, own_node):
    """Send at most one chunk to the relay on another node; returns how many rows, and whether all are sent.

    Example:
        With send_rdma_head [[-1, 0], [-1, 1]] and a ring of 1 row: token 0 goes into entry 0 of the ring to
        node 1, and the cursor becomes 1, (1, False).
    """
    cursor, heads = tokens.cursor, tokens.send_rdma_head
    token = cursor[channel, node]
    end_token = end_of_channel(channel, cursor.shape[0], heads.shape[0])
    if node == own_node or token >= end_token:
        return 0, True
    first = net.sent[channel, node]
    number = first
    limit = min(number + net.chunk, end_of_room(net, channel, node))
    while token < end_token:
        if heads[token, node] >= 0:
            if number >= limit:
                break
            entry = entry_to(net, parts, channel, node, number)
            copy_row(entry, payload.x + token * parts.row_bytes, parts.row_bytes, 0)
            mask = wanted_by(tokens.in_rank, token, node, net.rank_stride)
            write_beside(entry, parts, payload, token, own_node, mask)
            number += 1
        token += 1
    cursor[channel, node] = token
    if number > first:
        publish_tail(net, channel, node, number, bells)
    return number - first, token >= end_token


# Relay


@inlined
def has_room(channel, mask, nvl):
    """Whether the rings to all ranks of a mask have room for a row; a rank with a window has no ring."""
    for index in range(nvl.sent.shape[1]):
        if (
            mask >> index & 1
            and sends(nvl, channel, index)
            and nvl.sent[channel, index] >= end_of_room(nvl, channel, index)
        ):
            return False
    return True


@inlined
def row_at(channel, node, index, virtual, relayed):
    """The row of a virtual token at a rank of this node; in a new dispatch the next one, which is noted.

    Example:
        With next_row [[[7]]] in a new dispatch this is 7, next_row becomes [[[8]]], and the head 7.
    """
    if relayed.is_new:
        row = relayed.next_row[channel, node, index]
        relayed.next_row[channel, node, index] = row + 1
        relayed.send_nvl_head[virtual, index] = row
        return row
    return np.int64(relayed.send_nvl_head[virtual, index])


@inlined
def relay_row(channel, node, x_row, entry, mask, nvl, parts, payload, relayed, virtual, streaming):
    """Forward a row to every rank of this node that it goes to; if some ring is full, do nothing and return
    False.

    With a known routing `send_nvl_head` names these ranks, and the mask is ignored.
    """
    if not relayed.is_new:
        mask = known_ranks(relayed.send_nvl_head, virtual)
    if not has_room(channel, mask, nvl):
        return False
    for index in range(relayed.places.shape[0]):
        if not mask >> index & 1:
            if relayed.is_new:
                relayed.send_nvl_head[virtual, index] = -1
            continue
        row = row_at(channel, node, index, virtual, relayed)
        if sends(nvl, channel, index):
            number = nvl.sent[channel, index]
            to = entry_to(nvl, parts, channel, index, number)
            copy_row(to, x_row, parts.row_bytes, streaming)
            copy_bytes(to + parts.meta_at, entry + parts.meta_at, parts.num_bytes - parts.meta_at)
            nvl.sent[channel, index] = number + 1
        else:
            num_experts = payload.experts_per_rank
            first_expert = (nvl.first_rank + index) * num_experts
            write_to_window(
                relayed.places[index], row, x_row, entry, parts, first_expert, num_experts, streaming
            )
    return True


@inlined
def relay_from_node(channel, node, net, nvl, parts, payload, relayed, streaming):
    """Forward the rows that have come from another node, while there is room; returns how many."""
    first = net.taken[channel, node]
    end = min(end_of_arrived(net, channel, node), relayed.expected[node, channel])
    for number in range(first, end):
        entry = entry_from(net, parts, channel, node, number)
        mask = np.int64(int32_at(entry + parts.meta_at, 2)[1])
        virtual = relayed.first_virtual[channel, node] + number
        if not relay_row(channel, node, entry, entry, mask, nvl, parts, payload, relayed, virtual, streaming):
            return number - first
    return max(0, end - first)


@inlined
def relay_own(channel, net, nvl, parts, payload, tokens, relayed, own_node, scratch, streaming):
    """Forward at most one chunk of this rank's own tokens for its own node; returns how many."""
    first = net.taken[channel, own_node]
    end = min(first + nvl.chunk, relayed.expected[own_node, channel])
    token = tokens.cursor[channel, own_node]
    number = first
    while number < end:
        while tokens.send_rdma_head[token, own_node] < 0:
            token += 1
        entry = scratch.ctypes.data
        mask = wanted_by(tokens.in_rank, token, own_node, net.rank_stride)
        write_beside(entry, parts, payload, token, own_node, mask)
        x_row = payload.x + token * parts.row_bytes
        virtual = relayed.first_virtual[channel, own_node] + number
        if not relay_row(
            channel, own_node, x_row, entry, mask, nvl, parts, payload, relayed, virtual, streaming
        ):
            break
        number += 1
        token += 1
    tokens.cursor[channel, own_node] = token
    return number - first


@inlined
def relay_rows(channel, node, net, nvl, parts, bells, payload, tokens, relayed, own_node, scratch, streaming):
    """Relay what has come from a node, or this rank's own tokens; returns how many, and whether these were
    all.

    Example:
        With 1 row in the ring from node 0 that goes to both ranks of this node, one with a window and one
        with a ring: it is in both, the head of the ring from node 0 is base + 1, and so is the tail of the
        other ring; (1, True).
    """
    number, expected = net.taken[channel, node], relayed.expected[node, channel]
    if number >= expected:
        return 0, True
    if node == own_node:
        num_relayed = relay_own(
            channel, net, nvl, parts, payload, tokens, relayed, own_node, scratch, streaming
        )
    else:
        num_relayed = relay_from_node(channel, node, net, nvl, parts, payload, relayed, streaming)
    if num_relayed > 0:
        for index in range(nvl.sent.shape[1]):
            if sends(nvl, channel, index):
                publish_tail(nvl, channel, index, nvl.sent[channel, index], bells)
        if node == own_node:
            net.taken[channel, node] = number + num_relayed
        else:
            publish_head(net, channel, node, number + num_relayed, bells)
    return num_relayed, number + num_relayed >= expected


# Receive


@inlined
def take_from_ring(channel, index, nvl, parts, bells, received, own_expert, num_experts, streaming):
    """Take what has come through the ring from a rank of this node; returns how many rows, and whether all.

    Example:
        With next_row [[[5, 9]]] and a row from node 1 in the ring: it goes to row 9, next_row becomes
        [[[5, 10]]].
    """
    first, expected = nvl.taken[channel, index], received.expected[index, channel]
    if not receives(nvl, channel, index) or first >= expected:
        return 0, True
    end = min(end_of_arrived(nvl, channel, index), expected)
    for number in range(first, end):
        entry = entry_from(nvl, parts, channel, index, number)
        node = int32_at(entry + parts.meta_at, 2)[0]
        row = received.next_row[channel, index, node]
        received.next_row[channel, index, node] = row + 1
        write_to_window(received.places, row, entry, entry, parts, own_expert, num_experts, streaming)
    if end > first:
        publish_head(nvl, channel, index, end, bells)
    return end - first, end >= expected


@kernel(
    "int64(int64, int64, int64, int64, int64, RingStack, RingStack, EntryParts, Bells, Payload, NodeTokens,"
    " Relayed, Received, int64)"
)
def dispatch_between_nodes(
    first_channel,
    end_channel,
    num_spins,
    max_polls,
    own_node,
    net,
    nvl,
    parts,
    bells,
    payload,
    tokens,
    relayed,
    received,
    streaming,
):
    """Send, relay and receive the rows of some channels; returns the number of lanes that are not done yet.

    It returns after `max_polls` unsuccessful polls; if `max_polls` is negative, after -`max_polls` rounds,
    even if rows are left.

    Example:
        With 2 nodes of 1 rank, one channel, and a token at rank 0 that goes to both: rank 0 writes it to its
        own window as row 0, and to entry 0 of its ring at rank 1, whose tail becomes base + 1; rank 1 writes
        it to row 0 of its window, and the head becomes base + 1.
    """
    net = borrowed(RingStack, net)
    nvl = borrowed(RingStack, nvl)
    parts = borrowed(EntryParts, parts)
    bells = borrowed(Bells, bells)
    payload = borrowed(Payload, payload)
    tokens = borrowed(NodeTokens, tokens)
    relayed = borrowed(Relayed, relayed)
    received = borrowed(Received, received)
    num_nodes, ranks_per_node = tokens.cursor.shape[1], relayed.places.shape[0]
    num_experts = payload.experts_per_rank
    scratch = np.empty(parts.num_bytes, np.uint8)
    num_polls = num_rounds = 0
    while True:
        bell = own_bell(bells)
        num_moved = unfinished = 0
        for channel in range(first_channel, end_channel):
            for node in range(num_nodes):
                num_sent, is_done = send_to_node(channel, node, net, parts, bells, payload, tokens, own_node)
                num_moved += num_sent
                unfinished += not is_done
            for node in range(num_nodes):
                num_relayed, is_done = relay_rows(
                    *(channel, node, net, nvl, parts, bells, payload, tokens, relayed, own_node, scratch),
                    streaming,
                )
                num_moved += num_relayed
                unfinished += not is_done
            for index in range(ranks_per_node):
                num_taken, is_done = take_from_ring(
                    *(channel, index, nvl, parts, bells, received, bells.rank * num_experts, num_experts),
                    streaming,
                )
                num_moved += num_taken
                unfinished += not is_done
        num_rounds += 1
        if unfinished == 0:
            return 0
        is_progress = num_moved > 0 and (max_polls >= 0 or num_rounds < -max_polls)
        num_polls = polls_after_round(num_polls, is_progress, num_spins, max_polls, bell, bells)
        if num_polls < 0:
            return unfinished
