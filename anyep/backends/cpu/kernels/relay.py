"""Several nodes: a token crosses the network once per node, to the rank with the sender's index there. That
rank, the relay, forwards it to the ranks of its node that it goes to; in a combine it first sums its node's
rows.

Every rank is sender, relay and receiver at once, in one progress loop that never blocks on one side. Between
nodes rows go through rings: `net[:, channel, node]`; within a node they go to windows, or through rings:
`nvl[:, channel, rank]`. Both are stacks of addresses and counters, in the order of `SEND_ROWS` and so on; an
address of 0 is a ring that is not used. Tails and heads are as in `rings`: a tail lies at the receiver, a
head at the sender. Data for another host is written to the memory that the engine sends from.

These kernels keep their progress in arrays that the caller holds, so a call may be continued after a return.
"""

from __future__ import annotations

import numpy as np

from anyep.backends.cpu.kernels.atomics import back_off, load_acquire, ring_bell, store_release
from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.memory import (
    copy_bytes,
    copy_row,
    drain_stores,
    float32_at,
    int32_at,
    int64_at,
)
from anyep.backends.cpu.kernels.sums import BLOCK, sum_rows, sum_weights
from anyep.backends.cpu.kernels.windows import copy_scales
from anyep.layout import (
    RECV_BASE,
    RECV_HEAD,
    RECV_ROWS,
    RECV_TAIL,
    SEND_BASE,
    SEND_HEAD,
    SEND_ROWS,
    SEND_TAIL,
)

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
def publish(counter, number, peer, doorbells, sleepers):
    """Store a tail or head, such as 7, with release, and wake the peer that reads it if it sleeps."""
    store_release(counter, number)
    ring_bell(doorbells[peer], sleepers[peer])


@inlined
def write_beside(
    slot,
    slot_offsets,
    own_node,
    mask,
    token,
    scales,
    stride_token,
    stride_scale,
    num_scales,
    topk_idx,
    topk_weights,
):
    """Write what travels with a row into its ring entry: source node and mask, scales, global ids, weights.

    Ids have 32 bits there. They were checked before: each is an expert, or -1 for none.
    """
    meta = int32_at(slot + slot_offsets[0], 2)
    meta[0] = own_node
    meta[1] = mask
    if num_scales:
        copy_scales(slot + slot_offsets[1], scales, token, stride_token, stride_scale, num_scales)
    num_topk = topk_idx.shape[1]
    if num_topk:
        ids = int32_at(slot + slot_offsets[2], num_topk)
        weights = float32_at(slot + slot_offsets[3], num_topk)
        for index in range(num_topk):
            ids[index] = topk_idx[token, index]
            weights[index] = topk_weights[token, index]


@inlined
def write_to_window(
    place,
    row,
    x_row,
    row_bytes,
    streaming,
    slot,
    slot_offsets,
    num_scales,
    num_topk,
    first_expert,
    num_experts,
):
    """Write a row and what travels with it to a window; `place` holds the addresses of the window's parts."""
    copy_row(place[0] + row * row_bytes, x_row, row_bytes, streaming)
    copy_bytes(place[1] + META_BYTES * row, slot + slot_offsets[0], META_BYTES)
    if num_topk:
        ids = int32_at(slot + slot_offsets[2], num_topk)
        weights = float32_at(slot + slot_offsets[3], num_topk)
        ids_there = int64_at(place[2] + 8 * row * num_topk, num_topk)
        weights_there = float32_at(place[3] + 4 * row * num_topk, num_topk)
        for index in range(num_topk):
            local = ids[index] - first_expert
            here = 0 <= local < num_experts
            ids_there[index] = local if here else -1
            weights_there[index] = weights[index] if here else np.float32(0.0)
    if num_scales:
        copy_bytes(place[4] + 4 * row * num_scales, slot + slot_offsets[1], 4 * num_scales)


@inlined
def relay_row(
    channel,
    node,
    x_row,
    slot,
    mask,
    nvl,
    nvl_sent,
    nvl_rows,
    places,
    next_row,
    send_nvl_head,
    virtual,
    is_new,
    row_bytes,
    streaming,
    slot_offsets,
    num_scales,
    num_topk,
    first_expert,
    experts_per_rank,
):
    """Forward a row to every rank of this node that it goes to; if some ring is full, do nothing and return
    False.

    With a known routing `send_nvl_head` names these ranks, and the mask is ignored.
    """
    ranks_per_node = places.shape[0]
    if not is_new:
        mask = 0
        for index in range(ranks_per_node):
            mask |= (1 << index) * (send_nvl_head[virtual, index] >= 0)
    for index in range(ranks_per_node):
        if mask >> index & 1 and nvl[SEND_ROWS, channel, index]:
            head = load_acquire(nvl[SEND_HEAD, channel, index]) - nvl[SEND_BASE, channel, index]
            if nvl_sent[channel, index] - head >= nvl_rows:
                return False
    for index in range(ranks_per_node):
        if not mask >> index & 1:
            if is_new:
                send_nvl_head[virtual, index] = -1
            continue
        if is_new:
            row = next_row[channel, node, index]
            next_row[channel, node, index] = row + 1
            send_nvl_head[virtual, index] = row
        else:
            row = send_nvl_head[virtual, index]
        if nvl[SEND_ROWS, channel, index]:
            number = nvl_sent[channel, index]
            to = nvl[SEND_ROWS, channel, index] + number % nvl_rows * slot_offsets[4]
            copy_row(to, x_row, row_bytes, streaming)
            copy_bytes(to + slot_offsets[0], slot + slot_offsets[0], slot_offsets[4] - slot_offsets[0])
            nvl_sent[channel, index] = number + 1
        else:
            write_to_window(
                places[index],
                row,
                x_row,
                row_bytes,
                streaming,
                slot,
                slot_offsets,
                num_scales,
                num_topk,
                first_expert + index * experts_per_rank,
                experts_per_rank,
            )
    return True


@kernel(
    "int64(int64, int64, int64, int64, int64, int64[:,:,::1], int64[:,:,::1], int64[::1],"
    " int64[:,::1], int64[:,::1], int64[:,::1], int64[:,::1], int64[:,::1],"
    " int32[:,::1], int32[:,::1], int64[:,::1], int64[:,:,::1], int64[:,:,::1],"
    " boolean[:,::1], int32[:,::1], int32[:,::1], int64, int64[:,::1], int64[::1], int64[::1],"
    " int64, int64, int64, int64, int64, int64, int64[:,::1], float32[:,::1], int64,"
    " int64, int64, int64[::1], int64[::1], int64)"
)
def dispatch_between_nodes(
    first_channel,
    end_channel,
    num_channels,
    own_node,
    own_index,
    net,
    nvl,
    limits,
    cursor,
    net_sent,
    net_taken,
    nvl_sent,
    nvl_taken,
    net_expected,
    nvl_expected,
    first_virtual,
    next_row,
    next_result,
    in_rank,
    send_rdma_head,
    send_nvl_head,
    is_new,
    places,
    result,
    slot_offsets,
    x,
    row_bytes,
    scales,
    stride_token,
    stride_scale,
    num_scales,
    topk_idx,
    topk_weights,
    experts_per_rank,
    num_spins,
    max_polls,
    sleepers,
    doorbells,
    streaming,
):
    """Send, relay and receive the rows of some channels; returns the number of lanes that are not done yet.

    `limits` are the rows of a ring between nodes, the rows to send there at once, and the same within the
    node. By [channel, node]: `cursor` the next token to look at, `net_sent` and `net_taken` the rows sent to
    and taken from a node, `net_expected` how many come from it, `first_virtual` the number of the first of
    them in `send_nvl_head`. By [channel, rank of the node]: `nvl_sent`, `nvl_taken`, `nvl_expected`.
    `next_row[channel, node, rank]` is the row at a rank of this node for the next row from a node; it is
    written to `send_nvl_head` unless that is known already. `next_result[channel, rank, node]` is the same
    for rows that come through this rank's own rings; `result` has the addresses of x, meta, ids, weights and
    scales.

    It returns after `max_polls` unsuccessful polls; if `max_polls` is negative, after -`max_polls` rounds,
    even if rows are left.

    Example:
        With 2 nodes of 1 rank, one channel, and a token at rank 0 that goes to both: rank 0 writes it to its
        own window as row 0, and to entry 0 of its ring at rank 1, whose tail becomes base + 1; rank 1 writes
        it to row 0 of its window, and the head becomes base + 1.
    """
    num_tokens, num_nodes = send_rdma_head.shape
    ranks_per_node = places.shape[0]
    num_topk = topk_idx.shape[1]
    per_channel = max(1, (num_tokens + num_channels - 1) // num_channels)
    net_rows, net_chunk, nvl_rows, nvl_chunk = limits
    slot_bytes = slot_offsets[4]
    scratch = np.empty(slot_bytes, np.uint8)
    own_slot = scratch.ctypes.data
    first_rank = own_node * ranks_per_node
    first_expert = first_rank * experts_per_rank
    num_polls = num_rounds = 0
    while True:
        # Anything that arrives after this load is either found below or ends the sleep at once.
        bell = load_acquire(doorbells[first_rank + own_index])
        unfinished = 0
        progress = False
        # Keeps `scratch` alive: an array that is no longer used is freed, even if its address still is.
        scratch[0] = 0
        for channel in range(first_channel, end_channel):
            end_token = min(num_tokens, (channel + 1) * per_channel)
            # Send at most one chunk to each other node.
            for node in range(num_nodes):
                token = cursor[channel, node]
                if node == own_node or token >= end_token:
                    continue
                number = net_sent[channel, node]
                first_number = number
                head = load_acquire(net[SEND_HEAD, channel, node]) - net[SEND_BASE, channel, node]
                limit = min(number + net_chunk, head + net_rows)
                while token < end_token:
                    if send_rdma_head[token, node] < 0:
                        token += 1
                        continue
                    if number >= limit:
                        break
                    slot = net[SEND_ROWS, channel, node] + number % net_rows * slot_bytes
                    copy_row(slot, x + token * row_bytes, row_bytes, 0)
                    mask = wanted_by(in_rank, token, node, ranks_per_node)
                    write_beside(
                        slot,
                        slot_offsets,
                        own_node,
                        mask,
                        token,
                        scales,
                        stride_token,
                        stride_scale,
                        num_scales,
                        topk_idx,
                        topk_weights,
                    )
                    number += 1
                    token += 1
                cursor[channel, node] = token
                if number > first_number:
                    net_sent[channel, node] = number
                    drain_stores()
                    tail = net[SEND_BASE, channel, node] + number
                    relay = node * ranks_per_node + own_index
                    publish(net[SEND_TAIL, channel, node], tail, relay, doorbells, sleepers)
                    progress = True
                if token < end_token:
                    unfinished += 1
            # Relay what has come from other nodes, and this rank's own tokens for its own node.
            for node in range(num_nodes):
                number = net_taken[channel, node]
                expected = net_expected[node, channel]
                if number >= expected:
                    continue
                first_number = number
                is_own = node == own_node
                token = cursor[channel, node]
                limit = number + nvl_chunk
                if not is_own:
                    limit = load_acquire(net[RECV_TAIL, channel, node]) - net[RECV_BASE, channel, node]
                while number < min(limit, expected):
                    if is_own:
                        while send_rdma_head[token, node] < 0:
                            token += 1
                        row, slot = x + token * row_bytes, own_slot
                        mask = wanted_by(in_rank, token, node, ranks_per_node)
                        write_beside(
                            slot,
                            slot_offsets,
                            own_node,
                            mask,
                            token,
                            scales,
                            stride_token,
                            stride_scale,
                            num_scales,
                            topk_idx,
                            topk_weights,
                        )
                    else:
                        slot = net[RECV_ROWS, channel, node] + number % net_rows * slot_bytes
                        row, mask = slot, np.int64(int32_at(slot + slot_offsets[0], 2)[1])
                    if not relay_row(
                        channel,
                        node,
                        row,
                        slot,
                        mask,
                        nvl,
                        nvl_sent,
                        nvl_rows,
                        places,
                        next_row,
                        send_nvl_head,
                        first_virtual[channel, node] + number,
                        is_new,
                        row_bytes,
                        streaming,
                        slot_offsets,
                        num_scales,
                        num_topk,
                        first_expert,
                        experts_per_rank,
                    ):
                        break
                    number += 1
                    token += 1
                if is_own:
                    cursor[channel, node] = token
                if number > first_number:
                    net_taken[channel, node] = number
                    progress = True
                    drain_stores()
                    for index in range(ranks_per_node):
                        if nvl[SEND_ROWS, channel, index]:
                            tail = nvl[SEND_BASE, channel, index] + nvl_sent[channel, index]
                            publish(
                                nvl[SEND_TAIL, channel, index], tail, first_rank + index, doorbells, sleepers
                            )
                    if not is_own:
                        head = net[RECV_BASE, channel, node] + number
                        sender = node * ranks_per_node + own_index
                        publish(net[RECV_HEAD, channel, node], head, sender, doorbells, sleepers)
                if number < expected:
                    unfinished += 1
            # Take what has come through the rings of this node.
            for index in range(ranks_per_node):
                number = nvl_taken[channel, index]
                expected = nvl_expected[index, channel]
                if nvl[RECV_ROWS, channel, index] == 0 or number >= expected:
                    continue
                tail = load_acquire(nvl[RECV_TAIL, channel, index]) - nvl[RECV_BASE, channel, index]
                tail = min(tail, expected)
                if tail > number:
                    while number < tail:
                        slot = nvl[RECV_ROWS, channel, index] + number % nvl_rows * slot_bytes
                        node = int32_at(slot + slot_offsets[0], 2)[0]
                        row = next_result[channel, index, node]
                        next_result[channel, index, node] = row + 1
                        write_to_window(
                            result,
                            row,
                            slot,
                            row_bytes,
                            streaming,
                            slot,
                            slot_offsets,
                            num_scales,
                            num_topk,
                            first_expert + own_index * experts_per_rank,
                            experts_per_rank,
                        )
                        number += 1
                    nvl_taken[channel, index] = number
                    head = nvl[RECV_BASE, channel, index] + number
                    publish(nvl[RECV_HEAD, channel, index], head, first_rank + index, doorbells, sleepers)
                    progress = True
                if number < expected:
                    unfinished += 1
        num_rounds += 1
        if unfinished == 0:
            return 0
        if progress and (max_polls >= 0 or num_rounds < -max_polls):
            num_polls = 0
        elif num_polls >= num_spins + max_polls:
            return unfinished
        else:
            rank = first_rank + own_index
            back_off(num_polls, num_spins, doorbells[rank], bell, sleepers[rank])
            num_polls += 1


@inlined
def sum_of_node(
    to,
    channel,
    virtual,
    send_nvl_head,
    x_of,
    weights_of,
    hidden,
    row_bytes,
    dtype,
    num_topk,
    nvl,
    nvl_taken,
    nvl_rows,
    slot_offsets,
    rows,
    weight_rows,
    sums,
    first_rank,
    doorbells,
    sleepers,
):
    """Sum a token's rows on this node into a ring entry; if some have not arrived, do nothing and return
    False.

    Example:
        With the row [1, 2] of rank 0, read in place, and [3, 4] of rank 1, through a ring: the sum is [4, 6],
        added in the order of the ranks, and the head of that ring advances by one.
    """
    count = 0
    for index in range(x_of.shape[0]):
        row = send_nvl_head[virtual, index]
        if row < 0:
            continue
        if x_of[index]:
            rows[count] = x_of[index] + row * row_bytes
            weight_rows[count] = weights_of[index] + 4 * row * num_topk
        else:
            number = nvl_taken[channel, index]
            if load_acquire(nvl[RECV_TAIL, channel, index]) - nvl[RECV_BASE, channel, index] <= number:
                return False
            slot = nvl[RECV_ROWS, channel, index] + number % nvl_rows * slot_offsets[4]
            rows[count] = slot
            weight_rows[count] = slot + slot_offsets[3]
        count += 1
    sum_rows(to, rows, count, 0, 0, hidden, dtype, sums)
    if num_topk:
        sum_weights(float32_at(to + slot_offsets[3], num_topk), weight_rows, count, num_topk)
    for index in range(x_of.shape[0]):
        if send_nvl_head[virtual, index] >= 0 and x_of[index] == 0:
            nvl_taken[channel, index] += 1
            head = nvl[RECV_BASE, channel, index] + nvl_taken[channel, index]
            publish(nvl[RECV_HEAD, channel, index], head, first_rank + index, doorbells, sleepers)
    return True


@kernel(
    "int64(int64, int64, int64, int64, int64, int64[:,:,::1], int64[:,:,::1], int64[::1],"
    " int64[::1], int64[:,::1], int64[:,::1], int64[:,::1], int64[:,::1],"
    " int32[:,::1], int64[:,:,::1], int64[:,:,::1], int64[:,::1], int64[::1],"
    " int32[:,::1], int32[:,::1], int64[::1], int64[::1], int64, int64,"
    " int64[::1], int64, int64, int64, int64, int64, int64, float32[:,::1],"
    " int64, int64, int64[::1], int64[::1], int64)"
)
def combine_between_nodes(
    first_channel,
    end_channel,
    num_channels,
    own_node,
    own_index,
    net,
    nvl,
    limits,
    cursor,
    net_sent,
    net_taken,
    nvl_sent,
    nvl_taken,
    net_expected,
    first_pushed,
    pushed_before,
    first_virtual,
    own_virtual,
    send_rdma_head,
    send_nvl_head,
    x_of,
    weights_of,
    x,
    weights,
    slot_offsets,
    out,
    bias_0,
    bias_1,
    hidden,
    row_bytes,
    dtype,
    combined_weights,
    num_spins,
    max_polls,
    sleepers,
    doorbells,
    streaming,
):
    """Return rows, summed within this node, and sum this rank's own tokens; returns the lanes not done yet.

    The arrays are those of `dispatch_between_nodes`; `cursor[channel]` is the next token to sum,
    `own_virtual[0]` the first of this rank's own tokens in `send_nvl_head`. The rows of a rank of this node
    with `x_of` set are read in place; the other ranks push theirs through rings:
    `first_pushed[channel, rank, node]` is the first row of x that goes back through a rank to a node,
    `pushed_before[channel, rank, node]` how many go before it, with one more entry for the total. Rings carry
    the rows node by node in ascending order, and all ranks then serve the nodes in that order: each waits
    only for earlier rows.

    Example:
        With 2 nodes of 1 rank and a token of rank 0 that went to both: rank 1 rounds 0 + its row, and puts it
        into entry 0 of its ring at rank 0, which adds its own row, rounded in the same way, and that entry.
    """
    num_tokens, num_nodes = send_rdma_head.shape
    ranks_per_node = x_of.shape[0]
    num_topk = combined_weights.shape[1]
    per_channel = max(1, (num_tokens + num_channels - 1) // num_channels)
    net_rows, net_chunk, nvl_rows, nvl_chunk = limits
    slot_bytes = slot_offsets[4]
    first_rank = own_node * ranks_per_node
    most = max(num_nodes, ranks_per_node)
    rows, weight_rows = np.empty(most, np.int64), np.empty(most, np.int64)
    partials, partial_weights = np.empty(most, np.int64), np.empty(most, np.int64)
    scratch = np.empty(slot_bytes, np.uint8)
    own_slot = scratch.ctypes.data
    sums = np.empty(BLOCK, np.float32)
    in_order = False
    for index in range(ranks_per_node):
        in_order = in_order or x_of[index] == 0
    num_polls = num_rounds = 0
    while True:
        # Anything that arrives after this load is either found below or ends the sleep at once.
        bell = load_acquire(doorbells[first_rank + own_index])
        unfinished = 0
        progress = False
        # Keeps `scratch` alive: an array that is no longer used is freed, even if its address still is.
        scratch[0] = 0
        for channel in range(first_channel, end_channel):
            # Push at most one chunk to each rank of this node.
            for index in range(ranks_per_node):
                if nvl[SEND_ROWS, channel, index] == 0:
                    continue
                number = nvl_sent[channel, index]
                num_rows = pushed_before[channel, index, num_nodes]
                if number >= num_rows:
                    continue
                head = load_acquire(nvl[SEND_HEAD, channel, index]) - nvl[SEND_BASE, channel, index]
                limit = min(number + nvl_chunk, head + nvl_rows, num_rows)
                if limit > number:
                    node = 0
                    while number < limit:
                        while pushed_before[channel, index, node + 1] <= number:
                            node += 1
                        row = (
                            first_pushed[channel, index, node] + number - pushed_before[channel, index, node]
                        )
                        slot = nvl[SEND_ROWS, channel, index] + number % nvl_rows * slot_bytes
                        copy_row(slot, x + row * row_bytes, row_bytes, streaming)
                        if num_topk:
                            copy_bytes(slot + slot_offsets[3], weights + 4 * row * num_topk, 4 * num_topk)
                        number += 1
                    nvl_sent[channel, index] = number
                    drain_stores()
                    tail = nvl[SEND_BASE, channel, index] + number
                    publish(nvl[SEND_TAIL, channel, index], tail, first_rank + index, doorbells, sleepers)
                    progress = True
                if number < num_rows:
                    unfinished += 1
            end_token = min(num_tokens, (channel + 1) * per_channel)
            for node in range(num_nodes):
                is_done = True
                if node != own_node:
                    # Return at most one chunk of this node's sums.
                    number = net_sent[channel, node]
                    first_number = number
                    expected = net_expected[node, channel]
                    if number < expected:
                        head = load_acquire(net[SEND_HEAD, channel, node]) - net[SEND_BASE, channel, node]
                        limit = min(number + net_chunk, head + net_rows, expected)
                        while number < limit:
                            if not sum_of_node(
                                net[SEND_ROWS, channel, node] + number % net_rows * slot_bytes,
                                channel,
                                first_virtual[channel, node] + number,
                                send_nvl_head,
                                x_of,
                                weights_of,
                                hidden,
                                row_bytes,
                                dtype,
                                num_topk,
                                nvl,
                                nvl_taken,
                                nvl_rows,
                                slot_offsets,
                                rows,
                                weight_rows,
                                sums,
                                first_rank,
                                doorbells,
                                sleepers,
                            ):
                                break
                            number += 1
                        if number > first_number:
                            net_sent[channel, node] = number
                            tail = net[SEND_BASE, channel, node] + number
                            source = node * ranks_per_node + own_index
                            publish(net[SEND_TAIL, channel, node], tail, source, doorbells, sleepers)
                            progress = True
                        is_done = number >= expected
                else:
                    # Sum the tokens for which the sums of all nodes have arrived.
                    token = cursor[channel]
                    first_token = token
                    while token < end_token:
                        is_there = True
                        for other in range(num_nodes):
                            if send_rdma_head[token, other] < 0 or other == own_node:
                                continue
                            tail = load_acquire(net[RECV_TAIL, channel, other])
                            number = net_taken[channel, other]
                            is_there = is_there and tail - net[RECV_BASE, channel, other] > number
                        if not is_there:
                            break
                        if send_rdma_head[token, own_node] >= 0 and not sum_of_node(
                            own_slot,
                            channel,
                            own_virtual[0] + send_rdma_head[token, own_node],
                            send_nvl_head,
                            x_of,
                            weights_of,
                            hidden,
                            row_bytes,
                            dtype,
                            num_topk,
                            nvl,
                            nvl_taken,
                            nvl_rows,
                            slot_offsets,
                            rows,
                            weight_rows,
                            sums,
                            first_rank,
                            doorbells,
                            sleepers,
                        ):
                            break
                        count = 0
                        for other in range(num_nodes):
                            if send_rdma_head[token, other] < 0:
                                continue
                            slot = own_slot
                            if other != own_node:
                                number = net_taken[channel, other]
                                slot = net[RECV_ROWS, channel, other] + number % net_rows * slot_bytes
                            partials[count] = slot
                            partial_weights[count] = slot + slot_offsets[3]
                            count += 1
                        bias_0_row = bias_0 + token * row_bytes if bias_0 else 0
                        bias_1_row = bias_1 + token * row_bytes if bias_1 else 0
                        sum_rows(
                            out + token * row_bytes,
                            partials,
                            count,
                            bias_0_row,
                            bias_1_row,
                            hidden,
                            dtype,
                            sums,
                        )
                        if num_topk:
                            sum_weights(combined_weights[token], partial_weights, count, num_topk)
                        for other in range(num_nodes):
                            if send_rdma_head[token, other] >= 0 and other != own_node:
                                net_taken[channel, other] += 1
                                head = net[RECV_BASE, channel, other] + net_taken[channel, other]
                                relay = other * ranks_per_node + own_index
                                publish(net[RECV_HEAD, channel, other], head, relay, doorbells, sleepers)
                        token += 1
                    cursor[channel] = token
                    progress = progress or token > first_token
                    is_done = token >= end_token
                if not is_done:
                    unfinished += 1
                    if in_order:
                        break
        num_rounds += 1
        if unfinished == 0:
            return 0
        if progress and (max_polls >= 0 or num_rounds < -max_polls):
            num_polls = 0
        elif num_polls >= num_spins + max_polls:
            return unfinished
        else:
            rank = first_rank + own_index
            back_off(num_polls, num_spins, doorbells[rank], bell, sleepers[rank])
            num_polls += 1
