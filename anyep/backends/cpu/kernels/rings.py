"""Rings: any amount of data through a fixed number of rows, sending and receiving in one progress loop.

A ring for one (channel, sender) lies at the receiver. The sender's counter `tail` lies at the receiver too,
the receiver's counter `head` at the sender: each lies where it is polled. Both only grow; a row's entry in
the ring is its number since the call began, modulo the rows of the ring. Before a call begins every ring is
empty (tail equals head).

These kernels keep their progress in the `sent` and `taken` arrays, so a call may be continued after a return.
"""

from __future__ import annotations

import numpy as np

from anyep.backends.cpu.kernels.atomics import (
    MAX_POLLS,
    back_off,
    load_acquire,
    ring_bell,
    store_release,
)
from anyep.backends.cpu.kernels.compiler import Group, kernel
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


@kernel("void(int64[:,::1], int64[:,::1])", Group.CONTROL)
def read_counters(addresses, values):
    """Read counters: values[i, j] = the counter at addresses[i, j]; an address of 0 gives 0.

    Example:
        With addresses of two words 5 and 7, [[first, 0], [0, second]], values is [[5, 0], [0, 7]].
    """
    for row in range(addresses.shape[0]):
        for column in range(addresses.shape[1]):
            address = addresses[row, column]
            values[row, column] = load_acquire(address) if address else 0


@kernel(
    "int64(int64, int64, int64,"
    " int64[:,::1], int64[:,::1], int64[:,::1], int64[:,::1],"
    " int64[:,::1], int64[:,::1], int64[:,::1], int64[:,::1],"
    " int64[:,::1], int64[:,::1], int64[:,::1], int64, int64, int64[::1],"
    " int32[:,::1], int64, int64, int64, int64, int64, int64, int64[:,::1], float32[:,::1], int64,"
    " int32[:,::1], int64[::1], int64, int64[::1], int64[::1], int64, int64)"
)
def dispatch_through_rings(
    first_channel,
    end_channel,
    num_channels,
    send_rows,
    send_tail,
    send_head_counter,
    send_base,
    recv_rows,
    recv_tail,
    recv_head_counter,
    recv_base,
    cursor,
    sent,
    taken,
    ring_rows,
    send_chunk,
    slot_offsets,
    send_head,
    x,
    row_bytes,
    scales,
    stride_token,
    stride_scale,
    num_scales,
    topk_idx,
    topk_weights,
    experts_per_rank,
    receive_range,
    result,
    num_spins,
    sleepers,
    doorbells,
    own_rank,
    streaming,
):
    """Send and receive the rows of some channels; returns how many (channel, peer) pairs are not done yet.

    Arrays of [channel, peer]: `send_rows` the address of this rank's ring at the peer (0: no rows go there by
    ring), `send_tail` the peer's counter that this rank advances, `send_head_counter` this rank's counter
    that the peer advances, `send_base` their value when the call began; `recv_*` the same for received rows.
    `cursor` is the next token to look at, `sent` and `taken` count rows.
    `receive_range[peer * num_channels + channel]` is (first row, rows) of the result; `result` the addresses
    of x, source indices, ids, weights and scales; `slot_offsets` the offsets of source meta, scales, ids and
    weights in a ring entry, and the bytes of an entry; `sleepers` and `doorbells` those of every rank.

    Example:
        With 1 channel, 2 tokens for a peer and a ring of 2 rows: the sender fills entries 0 and 1 and sets
        tail to base + 2; the receiver copies them to rows first and first + 1 and sets head to base + 2; both
        return 0.
    """
    num_tokens, num_peers = send_head.shape
    num_topk = topk_idx.shape[1]
    per_channel = max(1, (num_tokens + num_channels - 1) // num_channels)
    meta_at, scales_at, ids_at, weights_at, slot_bytes = slot_offsets
    num_polls = 0
    while True:
        # Anything that arrives after this load is either found below or ends the sleep at once.
        bell = load_acquire(doorbells[own_rank])
        unfinished = 0
        progress = False
        for channel in range(first_channel, end_channel):
            end_token = min(num_tokens, (channel + 1) * per_channel)
            for peer in range(num_peers):
                # Send at most one chunk to this peer.
                token = cursor[channel, peer]
                if send_rows[channel, peer] and token < end_token:
                    number = sent[channel, peer]
                    head = load_acquire(send_head_counter[channel, peer]) - send_base[channel, peer]
                    limit = min(number + send_chunk, head + ring_rows)
                    first_number = number
                    while token < end_token:
                        if send_head[token, peer] < 0:
                            token += 1
                            continue
                        if number >= limit:
                            break
                        slot = send_rows[channel, peer] + number % ring_rows * slot_bytes
                        copy_row(slot, x + token * row_bytes, row_bytes, streaming)
                        int32_at(slot + meta_at, 1)[0] = token
                        if num_scales:
                            copy_scales(
                                slot + scales_at, scales, token, stride_token, stride_scale, num_scales
                            )
                        if num_topk:
                            ids = int32_at(slot + ids_at, num_topk)
                            weights = float32_at(slot + weights_at, num_topk)
                            for index in range(num_topk):
                                local = topk_idx[token, index] - peer * experts_per_rank
                                here = 0 <= local < experts_per_rank
                                ids[index] = local if here else -1
                                weights[index] = topk_weights[token, index] if here else 0.0
                        number += 1
                        token += 1
                    cursor[channel, peer] = token
                    if number > first_number:
                        sent[channel, peer] = number
                        drain_stores()
                        store_release(send_tail[channel, peer], send_base[channel, peer] + number)
                        ring_bell(doorbells[peer], sleepers[peer])
                        progress = True
                    if token < end_token:
                        unfinished += 1
                # Take all rows that have arrived from this peer.
                if recv_rows[channel, peer]:
                    first_row = receive_range[peer * num_channels + channel, 0]
                    num_rows = receive_range[peer * num_channels + channel, 1]
                    number = taken[channel, peer]
                    if number < num_rows:
                        tail = load_acquire(recv_tail[channel, peer]) - recv_base[channel, peer]
                        tail = min(tail, num_rows)
                        if tail > number:
                            while number < tail:
                                slot = recv_rows[channel, peer] + number % ring_rows * slot_bytes
                                row = first_row + number
                                copy_row(result[0] + row * row_bytes, slot, row_bytes, streaming)
                                int32_at(result[1] + 4 * row, 1)[0] = int32_at(slot + meta_at, 1)[0]
                                if num_topk:
                                    narrow = int32_at(slot + ids_at, num_topk)
                                    wide = int64_at(result[2] + 8 * row * num_topk, num_topk)
                                    for index in range(num_topk):
                                        wide[index] = narrow[index]
                                    copy_bytes(
                                        result[3] + 4 * row * num_topk, slot + weights_at, 4 * num_topk
                                    )
                                if num_scales:
                                    copy_bytes(
                                        result[4] + 4 * row * num_scales, slot + scales_at, 4 * num_scales
                                    )
                                number += 1
                            taken[channel, peer] = number
                            store_release(recv_head_counter[channel, peer], recv_base[channel, peer] + number)
                            ring_bell(doorbells[peer], sleepers[peer])
                            progress = True
                        if number < num_rows:
                            unfinished += 1
        if unfinished == 0:
            return 0
        if progress:
            num_polls = 0
        elif num_polls >= num_spins + MAX_POLLS:
            return unfinished
        else:
            back_off(num_polls, num_spins, doorbells[own_rank], bell, sleepers[own_rank])
            num_polls += 1


@kernel(
    "int64(int64, int64, int64,"
    " int64[:,::1], int64[:,::1], int64[:,::1], int64[:,::1],"
    " int64[:,::1], int64[:,::1], int64[:,::1], int64[:,::1],"
    " int64[::1], int64[:,::1], int64[:,::1], int64, int64, int64[::1],"
    " int32[:,::1], int64, int64, int32[:,::1], int64[::1], int64[::1],"
    " int64, int64, int64, int64, int64, int64, float32[:,::1], int64, int64[::1], int64[::1], int64, int64)"
)
def combine_through_rings(
    first_channel,
    end_channel,
    num_channels,
    send_rows,
    send_tail,
    send_head_counter,
    send_base,
    recv_rows,
    recv_tail,
    recv_head_counter,
    recv_base,
    cursor,
    sent,
    taken,
    ring_rows,
    send_chunk,
    slot_offsets,
    send_range,
    x,
    weights,
    send_head,
    x_of,
    weights_of,
    out,
    bias_0,
    bias_1,
    hidden,
    row_bytes,
    dtype,
    combined_weights,
    num_spins,
    sleepers,
    doorbells,
    own_rank,
    streaming,
):
    """Push rows back to their sources, and sum this rank's own; returns the number of lanes not done yet.

    The arrays are those of `dispatch_through_rings`; `send_range[peer * num_channels + channel]` is (first
    row, rows) of x that go back to a peer. The rows of a peer with `x_of` set are read in place (pull); the
    rows of other peers come through their rings in the order of this rank's tokens, so a token is summed when
    the next row of every ring that it needs has arrived. `cursor[channel]` is the next token to sum.

    Example:
        With one channel, a token that went to ranks 0 and 1 and rings from both: when both tails are
        base + 1, out is entry 0 of rank 0's ring plus entry 0 of rank 1's ring, and both heads become
        base + 1.
    """
    num_tokens, num_peers = send_head.shape
    num_topk = combined_weights.shape[1]
    per_channel = max(1, (num_tokens + num_channels - 1) // num_channels)
    weights_at, slot_bytes = slot_offsets[3], slot_offsets[4]
    rows = np.empty(num_peers, np.int64)
    weight_rows = np.empty(num_peers, np.int64)
    sums = np.empty(BLOCK, np.float32)
    num_polls = 0
    while True:
        # Anything that arrives after this load is either found below or ends the sleep at once.
        bell = load_acquire(doorbells[own_rank])
        unfinished = 0
        progress = False
        for channel in range(first_channel, end_channel):
            # Push at most one chunk to each peer.
            for peer in range(num_peers):
                if send_rows[channel, peer] == 0:
                    continue
                first_row = send_range[peer * num_channels + channel, 0]
                num_rows = send_range[peer * num_channels + channel, 1]
                number = sent[channel, peer]
                if number >= num_rows:
                    continue
                head = load_acquire(send_head_counter[channel, peer]) - send_base[channel, peer]
                limit = min(number + send_chunk, head + ring_rows, num_rows)
                if limit > number:
                    while number < limit:
                        slot = send_rows[channel, peer] + number % ring_rows * slot_bytes
                        row = first_row + number
                        copy_row(slot, x + row * row_bytes, row_bytes, streaming)
                        if num_topk:
                            copy_bytes(slot + weights_at, weights + 4 * row * num_topk, 4 * num_topk)
                        number += 1
                    sent[channel, peer] = number
                    drain_stores()
                    store_release(send_tail[channel, peer], send_base[channel, peer] + number)
                    ring_bell(doorbells[peer], sleepers[peer])
                    progress = True
                if number < num_rows:
                    unfinished += 1
            # Sum the tokens whose rows have all arrived.
            token = cursor[channel]
            end_token = min(num_tokens, (channel + 1) * per_channel)
            while token < end_token:
                count = 0
                ready = True
                for peer in range(num_peers):
                    row = send_head[token, peer]
                    if row < 0:
                        continue
                    if x_of[peer]:
                        rows[count] = x_of[peer] + row * row_bytes
                        weight_rows[count] = weights_of[peer] + 4 * row * num_topk
                    else:
                        number = taken[channel, peer]
                        if load_acquire(recv_tail[channel, peer]) - recv_base[channel, peer] <= number:
                            ready = False
                            break
                        slot = recv_rows[channel, peer] + number % ring_rows * slot_bytes
                        rows[count] = slot
                        weight_rows[count] = slot + weights_at
                    count += 1
                if not ready:
                    break
                bias_0_row = bias_0 + token * row_bytes if bias_0 else 0
                bias_1_row = bias_1 + token * row_bytes if bias_1 else 0
                sum_rows(out + token * row_bytes, rows, count, bias_0_row, bias_1_row, hidden, dtype, sums)
                if num_topk:
                    sum_weights(combined_weights[token], weight_rows, count, num_topk)
                for peer in range(num_peers):
                    if send_head[token, peer] >= 0 and x_of[peer] == 0:
                        taken[channel, peer] += 1
                        store_release(
                            recv_head_counter[channel, peer], recv_base[channel, peer] + taken[channel, peer]
                        )
                        ring_bell(doorbells[peer], sleepers[peer])
                token += 1
                progress = True
            cursor[channel] = token
            if token < end_token:
                unfinished += 1
        if unfinished == 0:
            return 0
        if progress:
            num_polls = 0
        elif num_polls >= num_spins + MAX_POLLS:
            return unfinished
        else:
            back_off(num_polls, num_spins, doorbells[own_rank], bell, sleepers[own_rank])
            num_polls += 1
