"""Several nodes, the way back: the rows of a token are summed within each node, by the relay that forwarded
it, and one row per node crosses the network back to the token's source, which sums these.

Every rank pushes rows within its node, returns sums to other nodes, and sums its own tokens, in one progress
loop that never blocks on one side. The rings are those of `relay_dispatch`. The kernel keeps its progress in
them and in a cursor, so a call may be continued after a return.
"""

from __future__ import annotations

import numpy as np

from anyep.backends.cpu.kernels.borrow import borrowed
from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.groups import Bells, EntryParts, NodeSums, Outputs, Pushed, RingStack, Sums
from anyep.backends.cpu.kernels.lanes import (
    end_of_arrived,
    end_of_channel,
    end_of_room,
    entry_from,
    entry_to,
    find_rows,
    own_bell,
    polls_after_round,
    publish_head,
    publish_tail,
    push_row,
    release_rows,
    sends,
)
from anyep.backends.cpu.kernels.memory import float32_at, stack_bytes
from anyep.backends.cpu.kernels.sums import scratch_at, scratch_bytes, sum_rows, sum_token, sum_weights


@inlined
def push_to_relay(channel, index, nvl, parts, bells, outputs, pushed, streaming):
    """Push at most one chunk of rows to a rank of this node; returns how many, and whether all are pushed.

    Example:
        With first_row [[[5, 9]]] and before [[[0, 2, 3]]]: rows 5, 6 and 9 go into the ring, in this order.
    """
    before = pushed.before[channel, index]
    num_rows = before[before.shape[0] - 1]
    first = nvl.sent[channel, index]
    if not sends(nvl, channel, index) or first >= num_rows:
        return 0, True
    end = min(first + nvl.chunk, end_of_room(nvl, channel, index), num_rows)
    node = 0
    for number in range(first, end):
        while before[node + 1] <= number:
            node += 1
        row = pushed.first_row[channel, index, node] + number - before[node]
        push_row(entry_to(nvl, parts, channel, index, number), parts, outputs, row, streaming)
    if end > first:
        publish_tail(nvl, channel, index, end, bells)
    return end - first, end >= num_rows


@inlined
def key_at(weights, num_topk):
    """The last of a row's weights."""
    return float32_at(weights + 4 * (num_topk - 1), 1)[0]


@inlined
def sort_by_key(scratch, num_rows, num_topk):
    """Sort rows by the last of their weights; those with the same one stay as they are.

    Example:
        With the weights [0.5, 2] of row 0 and [0.7, 1] of row 1, row 1 comes first.
    """
    for index in range(1, num_rows):
        row, weights = scratch.rows[index], scratch.weights[index]
        key, place = key_at(weights, num_topk), index
        while place > 0 and key_at(scratch.weights[place - 1], num_topk) > key:
            scratch.rows[place] = scratch.rows[place - 1]
            scratch.weights[place] = scratch.weights[place - 1]
            place -= 1
        scratch.rows[place], scratch.weights[place] = row, weights


@inlined
def sum_of_node(to, channel, virtual, nvl, parts, bells, outputs, sums, tokens, scratch):
    """Sum a token's rows on this node into a ring entry; if some have not arrived, do nothing and return
    False.

    Example:
        With the row [1, 2] of rank 0, read in place, and [3, 4] of rank 1, through a ring: the sum is [4, 6],
        added in the order of the ranks, and the head of that ring advances by one.
    """
    heads, ascending = tokens.send_nvl_head, sums.order[:0]
    num_rows = find_rows(heads, virtual, channel, nvl, parts, outputs, scratch, ascending)
    if num_rows < 0:
        return False
    if sums.is_keyed:
        sort_by_key(scratch, num_rows, parts.num_topk)
    sum_rows(to, scratch.rows, num_rows, 0, 0, sums.hidden, sums.dtype, scratch.sums)
    if parts.num_topk:
        weights = float32_at(to + parts.weights_at, parts.num_topk)
        sum_weights(weights, scratch.weights, num_rows, parts.num_topk)
        if sums.is_keyed and num_rows:
            weights[parts.num_topk - 1] = key_at(scratch.weights[num_rows - 1], parts.num_topk)
    release_rows(tokens.send_nvl_head, virtual, channel, nvl, outputs, bells)
    return True


@inlined
def return_sums(channel, node, net, nvl, parts, bells, outputs, sums, tokens, scratch):
    """Return at most one chunk of this node's sums to another node; returns how many, and whether all.

    Example:
        With 2 tokens of node 1 that were relayed here, and only the rows of the first one here by now: its
        sum goes into entry 0 of the ring to node 1, (1, False).
    """
    first, expected = net.sent[channel, node], tokens.expected[node, channel]
    if first >= expected:
        return 0, True
    number = first
    limit = min(number + net.chunk, end_of_room(net, channel, node), expected)
    while number < limit:
        entry = entry_to(net, parts, channel, node, number)
        virtual = tokens.first_virtual[channel, node] + number
        if not sum_of_node(entry, channel, virtual, nvl, parts, bells, outputs, sums, tokens, scratch):
            break
        number += 1
    if number > first:
        publish_tail(net, channel, node, number, bells)
    return number - first, number >= expected


@inlined
def sums_have_come(channel, heads, own_node, net):
    """Whether the sums of a token have come from every other node that it went to: with heads [0, -1, 3] on
    node 0, whether the ring from node 2 has a row."""
    for node in range(heads.shape[0]):
        if (
            heads[node] >= 0
            and node != own_node
            and end_of_arrived(net, channel, node) <= net.taken[channel, node]
        ):
            return False
    return True


@inlined
def sum_of_nodes(token, channel, own_node, own_entry, net, parts, bells, sums, tokens, scratch):
    """Sum the rows of all nodes for a token: this node's lies in `own_entry`, those of others in their rings.

    Example:
        On node 0, with [1, 2] in `own_entry` and [3, 4] from node 1: the sum is [4, 6], and the head of the
        ring from node 1 advances by one.
    """
    heads = tokens.send_rdma_head[token]
    count = 0
    for node in range(heads.shape[0]):
        if heads[node] >= 0:
            entry = own_entry
            if node != own_node:
                entry = entry_from(net, parts, channel, node, net.taken[channel, node])
            scratch.rows[count] = entry
            scratch.weights[count] = entry + parts.weights_at
            count += 1
    if sums.is_keyed:
        sort_by_key(scratch, count, parts.num_topk)
    sum_token(token, count, sums, scratch)
    for node in range(heads.shape[0]):
        if heads[node] >= 0 and node != own_node:
            publish_head(net, channel, node, net.taken[channel, node] + 1, bells)


@inlined
def sum_own(channel, own_node, net, nvl, parts, bells, outputs, sums, tokens, scratch, own_row):
    """Sum the tokens of this rank for which the sums of all nodes have come; returns how many, and whether
    all.

    Example:
        With send_rdma_head [[0, 0], [-1, 1]] on node 0 and one row in the ring from node 1: token 0 is
        summed, and the cursor becomes 1, (1, False).
    """
    first = tokens.cursor[channel]
    token = first
    own_entry = own_row.ctypes.data
    end_token = end_of_channel(channel, tokens.cursor.shape[0], tokens.send_rdma_head.shape[0])
    while token < end_token:
        heads = tokens.send_rdma_head[token]
        if not sums_have_come(channel, heads, own_node, net):
            break
        virtual = tokens.own_virtual + heads[own_node]
        if heads[own_node] >= 0 and not sum_of_node(
            own_entry, channel, virtual, nvl, parts, bells, outputs, sums, tokens, scratch
        ):
            break
        sum_of_nodes(token, channel, own_node, own_entry, net, parts, bells, sums, tokens, scratch)
        token += 1
    tokens.cursor[channel] = token
    return token - first, token >= end_token


@kernel(
    "int64(int64, int64, int64, int64, int64, RingStack, RingStack, EntryParts, Bells, Outputs, Sums, Pushed,"
    " NodeSums, int64)"
)
def combine_between_nodes(
    first_channel,
    end_channel,
    num_spins,
    max_polls,
    own_node,
    net,
    nvl,
    parts,
    bells,
    outputs,
    sums,
    pushed,
    tokens,
    streaming,
):
    """Return rows, summed within this node, and sum this rank's own tokens; returns the lanes not done yet.

    `max_polls` is that of `dispatch_between_nodes`. Rings within
    the node carry the rows node by node in ascending order, and where there are any, all ranks serve the
    nodes in that order: each waits only for earlier rows.

    Example:
        With 2 nodes of 1 rank and a token of rank 0 that went to both: rank 1 rounds 0 + its row, and puts it
        into entry 0 of its ring at rank 0, which adds its own row, rounded in the same way, and that entry.
    """
    net = borrowed(RingStack, net)
    nvl = borrowed(RingStack, nvl)
    parts = borrowed(EntryParts, parts)
    bells = borrowed(Bells, bells)
    outputs = borrowed(Outputs, outputs)
    sums = borrowed(Sums, sums)
    pushed = borrowed(Pushed, pushed)
    tokens = borrowed(NodeSums, tokens)
    num_nodes, ranks_per_node = tokens.send_rdma_head.shape[1], outputs.x_of.shape[0]
    in_order = (outputs.x_of == 0).any()
    most = max(num_nodes, ranks_per_node)
    scratch = scratch_at(stack_bytes(scratch_bytes(most)), most)
    own_row = np.empty(parts.num_bytes, np.uint8)
    num_polls = num_rounds = 0
    while True:
        bell = own_bell(bells)
        num_moved = unfinished = 0
        for channel in range(first_channel, end_channel):
            for index in range(ranks_per_node):
                num_pushed, is_done = push_to_relay(
                    channel, index, nvl, parts, bells, outputs, pushed, streaming
                )
                num_moved += num_pushed
                unfinished += not is_done
            for node in range(num_nodes):
                if node == own_node:
                    num_done, is_done = sum_own(
                        channel, own_node, net, nvl, parts, bells, outputs, sums, tokens, scratch, own_row
                    )
                else:
                    num_done, is_done = return_sums(
                        channel, node, net, nvl, parts, bells, outputs, sums, tokens, scratch
                    )
                num_moved += num_done
                unfinished += not is_done
                if in_order and not is_done:
                    break
        num_rounds += 1
        if unfinished == 0:
            return 0
        is_progress = num_moved > 0 and (max_polls >= 0 or num_rounds < -max_polls)
        num_polls = polls_after_round(num_polls, is_progress, num_spins, max_polls, bell, bells)
        if num_polls < 0:
            return unfinished
