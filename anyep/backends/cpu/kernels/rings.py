"""Rows that go through rings, between any two ranks of a node: dispatch, and combine.

These kernels keep their progress in `sent`, `taken` and the cursor, so a call may be continued after a
return. What happens in each ring is in `lanes`.
"""

from __future__ import annotations

from anyep.backends.cpu.kernels.atomics import MAX_POLLS, load_acquire
from anyep.backends.cpu.kernels.borrow import borrowed
from anyep.backends.cpu.kernels.compiler import Group, inlined, kernel
from anyep.backends.cpu.kernels.groups import (
    Bells,
    EntryParts,
    Outputs,
    Payload,
    RingResults,
    RingStack,
    RingSums,
    RingTokens,
    Sums,
)
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
    receives,
    release_rows,
    sends,
)
from anyep.backends.cpu.kernels.memory import (
    copy_bytes,
    copy_row,
    float32_at,
    int32_at,
    int64_at,
    stack_bytes,
)
from anyep.backends.cpu.kernels.sums import scratch_at, scratch_bytes, sum_token
from anyep.backends.cpu.kernels.windows import copy_scales, write_local_ids


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


@inlined
def lane_of(ranges, channel, peer, rings):
    """The first row and the number of rows of a lane: in one channel, ranges [[0, 2], [2, 3]] give peer 1
    (2, 3)."""
    lane = peer * rings.sent.shape[0] + channel
    return ranges[lane, 0], ranges[lane, 1]


# Dispatch


@inlined
def write_entry(entry, parts, payload, token, peer, streaming):
    """Write a token into an entry of the ring to a peer: its row, its index, scales, local ids and
    weights."""
    copy_row(entry, payload.x + token * parts.row_bytes, parts.row_bytes, streaming)
    int32_at(entry + parts.meta_at, 1)[0] = token
    if parts.num_scales:
        copy_scales(entry + parts.scales_at, payload, token)
    if parts.num_topk:
        ids = int32_at(entry + parts.ids_at, parts.num_topk)
        weights = float32_at(entry + parts.weights_at, parts.num_topk)
        write_local_ids(ids, weights, payload, token, peer)


@inlined
def read_entry(entry, parts, places, row, streaming):
    """Copy an entry of a ring to a row of the results; its ids get 64 bits."""
    copy_row(places[0] + row * parts.row_bytes, entry, parts.row_bytes, streaming)
    int32_at(places[1] + 4 * row, 1)[0] = int32_at(entry + parts.meta_at, 1)[0]
    num_topk = parts.num_topk
    if num_topk:
        narrow = int32_at(entry + parts.ids_at, num_topk)
        wide = int64_at(places[2] + 8 * row * num_topk, num_topk)
        for index in range(num_topk):
            wide[index] = narrow[index]
        copy_bytes(places[3] + 4 * row * num_topk, entry + parts.weights_at, 4 * num_topk)
    if parts.num_scales:
        copy_bytes(places[4] + 4 * row * parts.num_scales, entry + parts.scales_at, 4 * parts.num_scales)


@inlined
def send_chunk(channel, peer, rings, parts, bells, payload, tokens, streaming):
    """Send at most one chunk of a channel to a peer; returns how many rows were sent, and whether all are.

    Example:
        With send_head [[0], [-1], [1]] and a ring of 1 row: token 0 is sent, and the cursor becomes 2, where
        the next row finds no room: (1, False).
    """
    cursor, send_head = tokens.cursor, tokens.send_head
    token = cursor[channel, peer]
    end_token = end_of_channel(channel, cursor.shape[0], send_head.shape[0])
    if not sends(rings, channel, peer) or token >= end_token:
        return 0, True
    first = rings.sent[channel, peer]
    number = first
    limit = min(number + rings.chunk, end_of_room(rings, channel, peer))
    while token < end_token:
        if send_head[token, peer] >= 0:
            if number >= limit:
                break
            entry = entry_to(rings, parts, channel, peer, number)
            write_entry(entry, parts, payload, token, peer, streaming)
            number += 1
        token += 1
    cursor[channel, peer] = token
    if number > first:
        publish_tail(rings, channel, peer, number, bells)
    return number - first, token >= end_token


@inlined
def take_arrived(channel, peer, rings, parts, bells, results, streaming):
    """Take all rows that have come from a peer; returns how many, and whether these were the last.

    Example:
        With 3 rows expected from row 5 on, and 2 in the ring: these go to rows 5 and 6, (2, False).
    """
    first_row, num_rows = lane_of(results.ranges, channel, peer, rings)
    first = rings.taken[channel, peer]
    if not receives(rings, channel, peer) or first >= num_rows:
        return 0, True
    end = min(end_of_arrived(rings, channel, peer), num_rows)
    for number in range(first, end):
        entry = entry_from(rings, parts, channel, peer, number)
        read_entry(entry, parts, results.places, first_row + number, streaming)
    if end > first:
        publish_head(rings, channel, peer, end, bells)
    return end - first, end >= num_rows


@kernel("int64(int64, int64, int64, RingStack, EntryParts, Bells, Payload, RingTokens, RingResults, int64)")
def dispatch_through_rings(
    first_channel, end_channel, num_spins, rings, parts, bells, payload, tokens, results, streaming
):
    """Send and receive the rows of some channels; returns how many (channel, peer) pairs are not done yet.

    Example:
        With 1 channel, 2 tokens for a peer and a ring of 2 rows: the sender fills entries 0 and 1 and sets
        tail to base + 2; the receiver copies them to rows first and first + 1 and sets head to base + 2; both
        return 0.
    """
    rings = borrowed(RingStack, rings)
    parts = borrowed(EntryParts, parts)
    bells = borrowed(Bells, bells)
    payload = borrowed(Payload, payload)
    tokens = borrowed(RingTokens, tokens)
    results = borrowed(RingResults, results)
    num_peers = tokens.cursor.shape[1]
    num_polls = 0
    while True:
        bell = own_bell(bells)
        num_moved = unfinished = 0
        for channel in range(first_channel, end_channel):
            for peer in range(num_peers):
                num_sent, all_sent = send_chunk(
                    channel, peer, rings, parts, bells, payload, tokens, streaming
                )
                num_taken, all_taken = take_arrived(channel, peer, rings, parts, bells, results, streaming)
                num_moved += num_sent + num_taken
                unfinished += (not all_sent) + (not all_taken)
        if unfinished == 0:
            return 0
        num_polls = polls_after_round(num_polls, num_moved > 0, num_spins, MAX_POLLS, bell, bells)
        if num_polls < 0:
            return unfinished


# Combine


@inlined
def push_chunk(channel, peer, rings, parts, bells, outputs, ranges, streaming):
    """Push at most one chunk of rows back to a peer; returns how many, and whether all are pushed.

    Example:
        With 3 rows to push from row 5 on, and a ring of 2 rows: rows 5 and 6 go to entries 0 and 1, (2,
        False).
    """
    first_row, num_rows = lane_of(ranges, channel, peer, rings)
    first = rings.sent[channel, peer]
    if not sends(rings, channel, peer) or first >= num_rows:
        return 0, True
    end = min(first + rings.chunk, end_of_room(rings, channel, peer), num_rows)
    for number in range(first, end):
        push_row(entry_to(rings, parts, channel, peer, number), parts, outputs, first_row + number, streaming)
    if end > first:
        publish_tail(rings, channel, peer, end, bells)
    return end - first, end >= num_rows


@inlined
def sum_arrived(channel, rings, parts, bells, outputs, sums, tokens, scratch):
    """Sum the tokens of a channel whose rows have all come; returns how many, and whether these were the
    last.

    Example:
        With send_head [[0], [1]] and one row in the ring from peer 0: token 0 is summed, and the cursor
        becomes 1, (1, False).
    """
    cursor, send_head = tokens.cursor, tokens.send_head
    first = cursor[channel]
    token = first
    end_token = end_of_channel(channel, cursor.shape[0], send_head.shape[0])
    while token < end_token:
        num_rows = find_rows(send_head, token, channel, rings, parts, outputs, scratch, sums.order)
        if num_rows < 0:
            break
        sum_token(token, num_rows, sums, scratch)
        release_rows(send_head, token, channel, rings, outputs, bells)
        token += 1
    cursor[channel] = token
    return token - first, token >= end_token


@kernel("int64(int64, int64, int64, RingStack, EntryParts, Bells, Outputs, Sums, RingSums, int64)")
def combine_through_rings(
    first_channel, end_channel, num_spins, rings, parts, bells, outputs, sums, tokens, streaming
):
    """Push rows back to their sources, and sum this rank's own; returns the number of lanes not done yet.

    Rows that are not read in place (pull) come through their rings in the order of this rank's tokens, so a
    token is summed when the next row of every ring that it needs has arrived.

    Example:
        With one channel, a token that went to ranks 0 and 1 and rings from both: when both tails are
        base + 1, out is entry 0 of rank 0's ring plus entry 0 of rank 1's ring, and both heads become
        base + 1.
    """
    rings = borrowed(RingStack, rings)
    parts = borrowed(EntryParts, parts)
    bells = borrowed(Bells, bells)
    outputs = borrowed(Outputs, outputs)
    sums = borrowed(Sums, sums)
    tokens = borrowed(RingSums, tokens)
    num_peers = tokens.send_head.shape[1]
    scratch = scratch_at(stack_bytes(scratch_bytes(num_peers)), num_peers)
    num_polls = 0
    while True:
        bell = own_bell(bells)
        num_moved = unfinished = 0
        for channel in range(first_channel, end_channel):
            for peer in range(num_peers):
                num_pushed, all_pushed = push_chunk(
                    channel, peer, rings, parts, bells, outputs, tokens.ranges, streaming
                )
                num_moved += num_pushed
                unfinished += not all_pushed
            num_summed, all_summed = sum_arrived(channel, rings, parts, bells, outputs, sums, tokens, scratch)
            num_moved += num_summed
            unfinished += not all_summed
        if unfinished == 0:
            return 0
        num_polls = polls_after_round(num_polls, num_moved > 0, num_spins, MAX_POLLS, bell, bells)
        if num_polls < 0:
            return unfinished
