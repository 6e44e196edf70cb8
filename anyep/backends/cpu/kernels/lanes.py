"""One lane: the rows of one channel that go to a peer, or come from it, through a ring.

The sender fills entries of the ring and advances the tail, the receiver takes them and advances the head. A
tail lies at the receiver and a head at the sender: each lies where it is polled. Both only grow; a row's
entry in the ring is its number since the call began, modulo the rows of the ring. Before a call begins every
ring is empty (tail equals head).
"""

from __future__ import annotations

from anyep.backends.cpu.kernels.atomics import back_off, load_acquire, ring_bell, store_release
from anyep.backends.cpu.kernels.compiler import inlined
from anyep.backends.cpu.kernels.memory import copy_bytes, copy_row, drain_stores
from anyep.backends.cpu.kernels.sums import rank_at
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


@inlined
def end_of_channel(channel, num_channels, num_tokens):
    """The end of a channel's range of tokens: of 5 tokens in 2 channels, channel 0 has 0-2 and ends at 3."""
    per_channel = max(1, (num_tokens + num_channels - 1) // num_channels)
    return min(num_tokens, (channel + 1) * per_channel)


# Rings


@inlined
def sends(rings, channel, peer):
    """Whether rows go to a peer through a ring."""
    return rings.layers[SEND_ROWS, channel, peer] != 0


@inlined
def receives(rings, channel, peer):
    """Whether rows come from a peer through a ring."""
    return rings.layers[RECV_ROWS, channel, peer] != 0


@inlined
def entry_to(rings, parts, channel, peer, number):
    """The address of an entry in the ring to a peer: row 5 of a ring of 4 rows is in entry 1."""
    return rings.layers[SEND_ROWS, channel, peer] + number % rings.num_rows * parts.num_bytes


@inlined
def entry_from(rings, parts, channel, peer, number):
    """The address of an entry in the ring from a peer: row 5 of a ring of 4 rows is in entry 1."""
    return rings.layers[RECV_ROWS, channel, peer] + number % rings.num_rows * parts.num_bytes


@inlined
def end_of_room(rings, channel, peer):
    """The number of the first row that finds no room: if a peer took 3 rows of a ring of 4, this is 7."""
    head = load_acquire(rings.layers[SEND_HEAD, channel, peer]) - rings.layers[SEND_BASE, channel, peer]
    return head + rings.num_rows


@inlined
def end_of_arrived(rings, channel, peer):
    """How many rows have come from a peer: if its tail was 5 at first and is 7 now, these are 2."""
    return load_acquire(rings.layers[RECV_TAIL, channel, peer]) - rings.layers[RECV_BASE, channel, peer]


@inlined
def publish_tail(rings, channel, peer, number, bells):
    """Tell a peer that it has been sent `number` rows in this call: the tail becomes base + `number`."""
    rings.sent[channel, peer] = number
    drain_stores()
    _publish(rings, SEND_TAIL, SEND_BASE, channel, peer, number, bells)


@inlined
def publish_head(rings, channel, peer, number, bells):
    """Tell a peer that `number` of its rows were taken in this call: the head becomes base + `number`."""
    rings.taken[channel, peer] = number
    _publish(rings, RECV_HEAD, RECV_BASE, channel, peer, number, bells)


@inlined
def _publish(rings, counter, base, channel, peer, number, bells):
    """Store a counter with release, and wake the peer that reads it if it sleeps."""
    store_release(rings.layers[counter, channel, peer], rings.layers[base, channel, peer] + number)
    rank = rings.first_rank + peer * rings.rank_stride
    ring_bell(bells.doorbells[rank], bells.sleepers[rank])


# Rounds


@inlined
def own_bell(bells):
    """The value of this rank's doorbell. Anything that arrives after this load either is found in the round
    that begins, or ends the sleep after it at once."""
    return load_acquire(bells.doorbells[bells.rank])


@inlined
def polls_after_round(num_polls, is_progress, num_spins, max_polls, bell, bells):
    """Wait a little after a round that did not finish; returns the unsuccessful polls so far, or -1 to give
    up.

    Example:
        With at most 22 polls: after progress 0, without it one more than before, but -1 after the 22nd.
    """
    if is_progress:
        return 0
    if num_polls >= num_spins + max_polls:
        return -1
    back_off(num_polls, num_spins, bells.doorbells[bells.rank], bell, bells.sleepers[bells.rank])
    return num_polls + 1


# Combine


@inlined
def push_row(entry, parts, outputs, row, streaming):
    """Copy a row of this rank's outputs, and its weights, into an entry of a ring."""
    copy_row(entry, outputs.x + row * parts.row_bytes, parts.row_bytes, streaming)
    if parts.num_topk:
        weights = outputs.topk_weights + 4 * row * parts.num_topk
        copy_bytes(entry + parts.weights_at, weights, 4 * parts.num_topk)


@inlined
def find_rows(heads, token, channel, rings, parts, outputs, scratch, order):
    """Find the rows of a token, in the order given; returns how many, or -1 if some is to come.

    Example:
        With heads [[4, -1, 0]] and no order, token 0 has row 4 of peer 0, read in place if `x_of` names it,
        and the next row in the ring from peer 2: 2 rows.
    """
    count = 0
    for index in range(outputs.x_of.shape[0]):
        peer = rank_at(order, token, index)
        row = heads[token, peer]
        if row < 0:
            continue
        if outputs.x_of[peer]:
            scratch.rows[count] = outputs.x_of[peer] + row * parts.row_bytes
            scratch.weights[count] = outputs.weights_of[peer] + 4 * row * parts.num_topk
        else:
            number = rings.taken[channel, peer]
            if end_of_arrived(rings, channel, peer) <= number:
                return -1
            entry = entry_from(rings, parts, channel, peer, number)
            scratch.rows[count] = entry
            scratch.weights[count] = entry + parts.weights_at
        count += 1
    return count


@inlined
def release_rows(heads, token, channel, rings, outputs, bells):
    """Give back the entries of the rings that `find_rows` found for a token, which has been summed."""
    for peer in range(outputs.x_of.shape[0]):
        if heads[token, peer] >= 0 and outputs.x_of[peer] == 0:
            publish_head(rings, channel, peer, rings.taken[channel, peer] + 1, bells)
