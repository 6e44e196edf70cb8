"""Notify: sending notify messages to every peer, and waiting for counters.

A notify message lies in the receiver's mailbox: header words, the sender's row of the count matrix, its rows
for the receiver by channel, and its counts for the receiver's experts. Word 0 of the header is the call
number; it is stored last, with release.
"""

from __future__ import annotations

from anyep.backends.cpu.kernels.atomics import (
    NUM_YIELDS,
    count_down,
    fence,
    load_acquire,
    monotonic_ns,
    pause,
    request_wake_up,
    sched_yield,
    sleep_until_woken,
    store_release,
)
from anyep.backends.cpu.kernels.compiler import kernel
from anyep.backends.cpu.kernels.memory import int32_at, int64_at


@kernel("void(int64[::1], int64[::1], int64, int64[::1], int64, int64, int32[::1], int32[:,::1], int32[::1])")
def post_notify(
    mailboxes, wake_ups, topic, header, counts_at, with_counts, counts, channel_counts, expert_counts
):
    """Write one notify message to each peer p; mailboxes[p] is this rank's mailbox there, wake_ups[p] the
    peer's wake-up count.

    Without counts (a short notify message) only the header is written. There may be more counts than peers.

    Example:
        With header [5, 1, ...] and 2 peers, a peer that reads 5 in word 0 finds the rest complete. counts
        [3, 4] goes to both; channel_counts [[1, 2], [4, 0]] goes row by row (peer 0 gets [1, 2]); of
        expert_counts [9, 8, 7, 6] peer 1 gets [7, 6].
    """
    num_peers, num_counts = mailboxes.shape[0], counts.shape[0]
    num_channels = channel_counts.shape[1]
    local_experts = expert_counts.shape[0] // num_peers
    for peer in range(num_peers):
        words = int64_at(mailboxes[peer], header.shape[0])
        for index in range(1, header.shape[0]):
            words[index] = header[index]
        if with_counts:
            row = int32_at(mailboxes[peer] + counts_at, num_counts + num_channels + local_experts)
            for index in range(num_counts):
                row[index] = counts[index]
            for channel in range(num_channels):
                row[num_counts + channel] = channel_counts[peer, channel]
            for expert in range(local_experts):
                row[num_counts + num_channels + expert] = expert_counts[peer * local_experts + expert]
        store_release(mailboxes[peer], header[0])
    fence()
    for peer in range(num_peers):
        count_down(wake_ups[peer], topic)


@kernel("boolean(int64[::1], int64[::1], int64, int64, int64[:,::1])")
def read_headers(mailboxes, own_header, first, end, headers):
    """Copy the header of every peer's notify message (row p comes from peer p); returns whether words
    [first, end) of all headers equal this rank's own.

    Example:
        With the notify messages [5, 0, 7] and [5, 0, 8] from two peers and own_header [5, 0, 7], words [1, 2)
        agree, and words [1, 3) do not.
    """
    agree = True
    for peer in range(mailboxes.shape[0]):
        words = int64_at(mailboxes[peer], headers.shape[1])
        for index in range(headers.shape[1]):
            headers[peer, index] = words[index]
            if first <= index < end and words[index] != own_header[index]:
                agree = False
    return agree


@kernel("void(int64[::1], int64, int32[:,::1], int32[:,::1], int64[::1])")
def read_counts(mailboxes, counts_at, matrix, channel_counts, expert_totals):
    """Gather the count matrix (from, to), the rows of each peer by channel, and each local expert's tokens.

    Example:
        The notify message in the example of `post_notify`, read at peer 1 together with one from a second
        sender that has counts [1, 1], channel_counts row [1, 0] and experts [0, 2], gives matrix
        [[3, 4], [1, 1]], channel_counts [[4, 0], [1, 0]] and expert_totals [7, 8].
    """
    num_peers, num_channels = channel_counts.shape
    num_counts, local_experts = matrix.shape[1], expert_totals.shape[0]
    expert_totals[:] = 0
    for peer in range(num_peers):
        row = int32_at(mailboxes[peer] + counts_at, num_counts + num_channels + local_experts)
        for index in range(num_counts):
            matrix[peer, index] = row[index]
        for channel in range(num_channels):
            channel_counts[peer, channel] = row[num_counts + channel]
        for expert in range(local_experts):
            expert_totals[expert] += row[num_counts + num_channels + expert]


@kernel("void(int64[::1], int64[::1], int64, int64)")
def signal(counters, wake_ups, topic, value):
    """Store `value` with release at each address: a peer that acquires it reads everything stored before.

    Example:
        With counters at two zeroed words and value 5, both hold 5. A peer that sleeps until 3 counters of
        this topic have arrived (its wake-up count is topic << 32 | 3) then waits for 2.
    """
    for index in range(counters.shape[0]):
        store_release(counters[index], value)
    fence()
    for index in range(counters.shape[0]):
        count_down(wake_ups[index], topic)


@kernel("int64(int64[::1], int64, boolean[::1], int64, int64, int64, int64, int64[::1], int64)")
def await_counters(counters, expected, missing, num_spins, max_polls, wake_up, topic, waited, started):
    """Wait a while until every missing counter has reached `expected`; returns how many have not.

    `missing` marks the missing counters, before and after. Unless `waited` is empty, the nanoseconds since
    `started` are added to it for each counter that has arrived.

    Spinning is for ranks that have a core each. If ranks outnumber cores, the peer that is waited for must
    get to run, so `num_spins` is 0. The kernel returns after `max_polls` unsuccessful polls.

    Example:
        With words [5, 4, 0], expected 5 and missing [True, True, False] it returns 1, and missing is
        [False, True, False].
    """
    num_missing = 0
    for index in range(counters.shape[0]):
        num_missing += missing[index]
    num_polls = 0
    asked_for = 0
    while True:
        for index in range(counters.shape[0]):
            if missing[index] and load_acquire(counters[index]) >= expected:
                missing[index] = False
                num_missing -= 1
                num_polls = min(num_polls, num_spins)
                if waited.shape[0]:
                    waited[index] += monotonic_ns() - started
        if asked_for:
            if num_missing == asked_for:
                sleep_until_woken(wake_up)
                num_polls += 1
            else:
                store_release(wake_up, 0)
            asked_for = 0
        elif num_missing == 0 or num_polls >= num_spins + max_polls:
            return num_missing
        elif num_polls < num_spins:
            pause()
            num_polls += 1
        elif num_polls < num_spins + NUM_YIELDS:
            sched_yield()
            num_polls += 1
        else:
            request_wake_up(wake_up, topic, num_missing)
            asked_for = num_missing
