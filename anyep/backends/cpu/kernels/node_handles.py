"""Handles between nodes: their counts, whether their parts are consistent, and whether all ranks agree.

A rank relays the tokens of the ranks with its own index, one on every node, to the ranks of its node. These
tokens are numbered by source node, then by token; `send_nvl_head` has one row for each.
"""

from __future__ import annotations

import numpy as np

from anyep.backends.cpu.kernels.borrow import borrowed
from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.digests import channel_word, mixed, row_word
from anyep.backends.cpu.kernels.groups import NodeHandle
from anyep.core import digests as words

NODE_FACTOR = np.uint64(words.NODE_FACTOR)


@inlined
def row_and_mask(row, mask, node):
    """A hash of a row, its ranks on the receiver's node (a mask of 32 bits), and its source node."""
    word = row_word(row, np.int64(mask) & 0xFFFFFFFF)
    return mixed(np.uint64(word) + np.uint64(node) * NODE_FACTOR)


@inlined
def mask_of(in_rank, token, first, ranks_per_node):
    """The ranks from `first` on that a token goes to, as bits: in_rank [[0, 1, 1]], 2 ranks from 1 on: 3."""
    mask = np.int64(0)
    for index in range(ranks_per_node):
        mask |= np.int64(in_rank[token, first + index]) << index
    return mask


@inlined
def word_in(octets, first):
    """4 bytes as a little-endian number: [1, 1, 0, 0] from 0 on give 257."""
    word = np.int64(0)
    for index in range(4):
        word |= np.int64(octets[first + index]) << (8 * index)
    return word


@kernel("void(boolean[:,::1], int64, int32[:,::1], int32[:,::1])")
def place_in_nodes(in_rank, ranks_per_node, by_channel, numbers):
    """Number the tokens that go to each node, and count them by channel.

    Example:
        With in_rank [[1, 0, 0, 0], [0, 1, 1, 1]], 2 nodes and 2 channels: by_channel [[1, 1], [0, 1]] (node,
        channel) and numbers [[0, -1], [1, 0]] (token, node).
    """
    num_tokens = in_rank.shape[0]
    num_nodes, num_channels = by_channel.shape
    per_channel = max(1, (num_tokens + num_channels - 1) // num_channels)
    by_channel[:] = 0
    for node in range(num_nodes):
        count = np.int32(0)
        for token in range(num_tokens):
            is_wanted = False
            for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node):
                is_wanted |= in_rank[token, rank]
            if is_wanted:
                numbers[token, node] = count
                by_channel[node, token // per_channel] += 1
                count += np.int32(1)
            else:
                numbers[token, node] = -1


@inlined
def counts_marks(marks, column, num_columns, prefix):
    """Whether a row of `prefix` counts, channel by channel, the tokens with a mark in any of some columns.

    Example:
        With marks [[1, 0], [0, 1], [0, 0]] and 2 channels (tokens 0-1 and 2): [2, 2] counts both columns
        together, [1, 1] the first one.
    """
    num_tokens, num_channels = marks.shape[0], prefix.shape[0]
    per_channel = max(1, (num_tokens + num_channels - 1) // num_channels)
    count = 0
    for channel in range(num_channels):
        for token in range(channel * per_channel, min((channel + 1) * per_channel, num_tokens)):
            is_marked = False
            for place in range(column, column + num_columns):
                is_marked |= marks[token, place]
            count += is_marked
        if prefix[channel] != count:
            return False
    return True


@inlined
def falls(prefix):
    """Whether a prefix sum decreases somewhere: [0, 2, 2] does not, [0, 2, 1] and [-1, 0] do."""
    before = 0
    for index in range(prefix.shape[0]):
        if prefix[index] < before:
            return True
        before = prefix[index]
    return False


@inlined
def before_in(prefix, index):
    """What comes before an index according to an inclusive prefix sum: [3, 5] give 0, 3 and 5."""
    return prefix[index - 1] if index > 0 else 0


# What is wrong with a handle


@inlined
def fault_of_sent(handle, ranks_per_node):
    """1 to 3 if the parts about sent tokens are not consistent with the mask, else 0.

    Example:
        With in_rank [[0, 1]] on 2 nodes of 1, a send_rdma_head of [[-1, 0]] numbers the token; [[0, -1]]
        gives 1.
    """
    num_tokens, num_ranks = handle.in_rank.shape
    for node in range(handle.recv_rdma_prefix.shape[0]):
        count = 0
        for token in range(num_tokens):
            is_wanted = mask_of(handle.in_rank, token, node * ranks_per_node, ranks_per_node) != 0
            if handle.send_rdma_head[token, node] != (count if is_wanted else -1):
                return 1
            count += is_wanted
    for node in range(handle.recv_rdma_prefix.shape[0]):
        first = node * ranks_per_node
        if not counts_marks(handle.in_rank, first, ranks_per_node, handle.rdma_prefix[node]):
            return 2
    for peer in range(num_ranks):
        if not counts_marks(handle.in_rank, peer, 1, handle.gbl_prefix[peer]):
            return 3
    return 0


@inlined
def fault_of_received(handle):
    """4 or 5 if the parts about received rows are not consistent, else 0.

    Example:
        With recv_gbl_sum [1, 3] and 2 rows in recv_src_meta this is 4.
    """
    sums = handle.recv_gbl_sum
    if falls(sums) or sums[-1] > handle.recv_src_meta.shape[0]:
        return 4
    for source in range(sums.shape[0]):
        prefix = handle.recv_gbl_prefix[source]
        if prefix[0] != 0 or falls(prefix) or prefix[-1] > sums[source] - before_in(sums, source):
            return 5
    return 0


@inlined
def fault_of_relayed(handle, own_node):
    """6 to 8 if the parts about relayed tokens are not consistent, else 0.

    Example:
        With recv_rdma_sum [2, 1] this is 6; with [1, 2] and 1 row in send_nvl_head it is 7.
    """
    sums, prefixes = handle.recv_rdma_sum, handle.recv_rdma_prefix
    num_nodes, num_channels = prefixes.shape
    if falls(sums):
        return 6
    for node in range(num_nodes):
        if falls(prefixes[node]):
            return 6
    if sums[-1] > handle.send_nvl_head.shape[0]:
        return 7
    for node in range(num_nodes):
        if prefixes[node, -1] != sums[node] - before_in(sums, node):
            return 7
    for channel in range(num_channels):
        if prefixes[own_node, channel] != handle.rdma_prefix[own_node, channel]:
            return 8
    return 0


@inlined
def find_first_rows(handle, num_ranks, ranks_per_node, counts):
    """Note for each source node and rank of this node the first row that is relayed (-1: none); 9 if the rows
    are not consecutive, else 0.

    Example:
        With send_nvl_head [[4], [-1], [5]] from one node the first row is 4; [[4], [-1], [6]] gives 9.
    """
    for node in range(handle.recv_rdma_sum.shape[0]):
        for index in range(ranks_per_node):
            first, count = -1, 0
            for token in range(before_in(handle.recv_rdma_sum, node), handle.recv_rdma_sum[node]):
                head = handle.send_nvl_head[token, index]
                if head >= 0:
                    if count == 0:
                        first = head
                    if head != first + count:
                        return 9
                    count += 1
            counts[2 * num_ranks + node * ranks_per_node + index] = first
    return 0


# What a rank sends about its handle


@inlined
def digest_rows(handle, digests_to, digests, counts):
    """Count and digest the rows to each rank (so far only where channels begin) and from each rank."""
    num_ranks, num_channels = handle.gbl_prefix.shape
    for peer in range(num_ranks):
        sent, received = np.uint64(0), np.uint64(0)
        first = before_in(handle.recv_gbl_sum, peer)
        for channel in range(num_channels):
            sent += mixed(channel_word(channel, before_in(handle.gbl_prefix[peer], channel)))
            received += mixed(channel_word(channel, handle.recv_gbl_prefix[peer, channel]))
        for row in range(first, handle.recv_gbl_sum[peer]):
            meta = handle.recv_src_meta[row]
            received += row_and_mask(row - first, word_in(meta, 4), word_in(meta, 0))
        digests_to[peer] = sent
        digests[num_ranks + peer] = np.int64(received)
        counts[peer] = handle.gbl_prefix[peer, -1]
        counts[num_ranks + peer] = handle.recv_gbl_sum[peer] - first


@inlined
def digest_of_relayed(handle, node, ranks_per_node):
    """A digest of the tokens from a node that this rank relays, with the ranks that each goes to."""
    relayed = np.uint64(0)
    prefix, first = handle.recv_rdma_prefix[node], before_in(handle.recv_rdma_sum, node)
    for channel in range(prefix.shape[0]):
        relayed += mixed(channel_word(channel, before_in(prefix, channel)))
    for token in range(first, handle.recv_rdma_sum[node]):
        for index in range(ranks_per_node):
            if handle.send_nvl_head[token, index] >= 0:
                relayed += mixed(row_word(token - first, index))
    return relayed


@inlined
def digest_of_sent(handle, node, own_node, ranks_per_node, digests_to):
    """A digest of the tokens that go to a node, with its ranks; adds their rows to those of the ranks."""
    tokens = np.uint64(0)
    prefix, first_rank = handle.rdma_prefix[node], node * ranks_per_node
    for channel in range(prefix.shape[0]):
        tokens += mixed(channel_word(channel, before_in(prefix, channel)))
    rows = np.zeros(ranks_per_node, np.int64)
    for token in range(handle.in_rank.shape[0]):
        number = handle.send_rdma_head[token, node]
        if number >= 0:
            mask = mask_of(handle.in_rank, token, first_rank, ranks_per_node)
            for index in range(ranks_per_node):
                if handle.in_rank[token, first_rank + index]:
                    tokens += mixed(row_word(number, index))
                    digests_to[first_rank + index] += row_and_mask(rows[index], mask, own_node)
                    rows[index] += 1
    return tokens


@kernel("int64(int64, int64, NodeHandle, int64[::1], int32[::1])")
def read_node_handle(rank, ranks_per_node, handle, digests, counts):
    """0 if the parts of a handle are consistent, which keeps kernels within bounds; else what is wrong.

    1: send_rdma_head does not number the tokens of in_rank; 2: rdma_prefix or 3: gbl_prefix does not count
    them; 4: recv_gbl_sum decreases, or has more rows than there are; 5: recv_gbl_prefix exceeds the rows of
    its source; 6: recv_rdma_sum or recv_rdma_prefix decreases; 7: recv_rdma_sum does not count the rows of
    send_nvl_head; 8: the tokens that this rank sends to its own node are not those that it relays there; 9:
    send_nvl_head does not number the rows of its sources consecutively.

    If it is 0, `digests` and `counts` hold what this rank sends to all ranks about its handle. The digests
    are those of the rows to each rank and from each rank (each with the other ranks of the receiver's node
    that it goes to), and by node those of the tokens that it sent and of those that it relays (each with the
    ranks that it goes to); all of them include where channels begin. The counts are the rows to each rank and
    from each rank, and for each source node and rank of this node the first row that it relays (-1: none).

    Example:
        For rank 0 of 2 nodes of 1, with 1 token that goes to rank 1 and no row received, in 1 channel:
        in_rank [[0, 1]], rdma_prefix and gbl_prefix [[0], [1]], send_rdma_head [[-1, 0]] and nothing else
        give 0, the digests [m(-1), m(-1) + m(1), m(-1), m(-1), m(-1), m(-1) + m(0), m(-1), m(-1)], where m
        mixes a word, and the counts [0, 1, 0, 0, -1, -1].
    """
    handle = borrowed(NodeHandle, handle)
    num_ranks, num_nodes = handle.in_rank.shape[1], handle.recv_rdma_prefix.shape[0]
    own_node = rank // ranks_per_node
    fault = fault_of_sent(handle, ranks_per_node)
    if fault == 0:
        fault = fault_of_received(handle)
    if fault == 0:
        fault = fault_of_relayed(handle, own_node)
    if fault == 0:
        fault = find_first_rows(handle, num_ranks, ranks_per_node, counts)
    if fault:
        return fault
    digests_to = np.empty(num_ranks, np.uint64)
    digest_rows(handle, digests_to, digests, counts)
    for node in range(num_nodes):
        sent = digest_of_sent(handle, node, own_node, ranks_per_node, digests_to)
        digests[2 * num_ranks + node] = np.int64(sent)
        relayed = digest_of_relayed(handle, node, ranks_per_node)
        digests[2 * num_ranks + num_nodes + node] = np.int64(relayed)
    for peer in range(num_ranks):
        digests[peer] = np.int64(digests_to[peer])
    return 0


@kernel("int64(int64[:,::1], int32[:,::1], int64)")
def first_difference(digests, counts, ranks_per_node):
    """-1 if the handles of all ranks belong to one dispatch; else a code for the first difference.

    Row r of `digests` and `counts` comes from rank r's handle. With n ranks, the code is a * n + b if rank a
    sent a different number of rows to rank b than b received; n * n more if b's rows are different ones, or
    in different channels; 2 n * n more if rank b relays different rows from rank a than a sent.

    Example:
        With 2 nodes of 1 and counts [1, 2, 1, 2, ...] and [2, 3, 7, 3, ...] it returns 1, because rank 0 sent
        2 rows to rank 1, which received 7.
    """
    num_ranks = counts.shape[0]
    num_nodes = num_ranks // ranks_per_node
    for sender in range(num_ranks):
        for receiver in range(num_ranks):
            if counts[sender, receiver] != counts[receiver, num_ranks + sender]:
                return sender * num_ranks + receiver
    for sender in range(num_ranks):
        for receiver in range(num_ranks):
            if digests[sender, receiver] != digests[receiver, num_ranks + sender]:
                return (num_ranks + sender) * num_ranks + receiver
    for relay in range(num_ranks):
        node, index = relay // ranks_per_node, relay % ranks_per_node
        for source_node in range(num_nodes):
            source = source_node * ranks_per_node + index
            sent = digests[source, 2 * num_ranks + node]
            differs = sent != digests[relay, 2 * num_ranks + num_nodes + source_node]
            for other in range(ranks_per_node):
                receiver = node * ranks_per_node + other
                first = -1
                if counts[source, receiver] > 0:
                    first = 0
                    for earlier in range(source):
                        first += counts[receiver, num_ranks + earlier]
                differs |= counts[relay, 2 * num_ranks + source_node * ranks_per_node + other] != first
            if differs:
                return (2 * num_ranks + source) * num_ranks + relay
    return -1


@kernel("void(int64[:,::1], int64, int64[:,::1], int64[:,:], boolean[::1], int64, int64, int64)")
def count_relayed(
    sent, rank, through_network, to_ranks, in_window, payload_bytes, beside_by_window, beside_by_ring
):
    """Add to `sent` what a rank puts into its rings of the network, and its rows to the ranks of its node.

    `through_network` has the rows by (channel, node), which go to the ranks with this NVL rank; `to_ranks`
    adds up to the rows for each rank of this node, and `in_window` says how they go there. `sent` has the
    words of a `Sent` (anyep/core/traffic.py).

    Example:
        Rank 1 of 2 nodes with 2 ranks each puts [[0, 3], [0, 1]] rows into its rings, and has [[5, 6]] for
        the ranks of its node, of which only rank 0 has a window. With 100, 20 and 24 bytes `sent` becomes
        [[5, 6, 0, 4], [500, 600, 0, 400], [100, 144, 0, 96], [0, 0, 0, 0]] from zeros.
    """
    ranks_per_node = in_window.shape[0]
    node, index = rank // ranks_per_node, rank % ranks_per_node
    for to_node in range(through_network.shape[1]):
        num_rows = through_network[:, to_node].sum()
        relay = to_node * ranks_per_node + index
        sent[0, relay] += num_rows
        sent[1, relay] += num_rows * payload_bytes
        sent[2, relay] += num_rows * beside_by_ring
    for neighbour in range(ranks_per_node):
        num_rows = to_ranks[:, neighbour].sum()
        receiver = node * ranks_per_node + neighbour
        sent[0, receiver] += num_rows
        sent[1, receiver] += num_rows * payload_bytes
        sent[2, receiver] += num_rows * (beside_by_window if in_window[neighbour] else beside_by_ring)


@kernel("void(int64, NodeHandle, int64[:,:,::1], int64[:,:,::1], int32[:,::1], int64[:,::1], int64[::1])")
def plan_lanes(ranks_per_node, handle, first_row, num_rows, relayed, first_relayed, relayed_to):
    """Compute where the rows and tokens of a handle begin, channel by channel, and how many there are.

    `first_row` and `num_rows` [channel, rank of this node, node]: the rows received from a node through a
    rank. `relayed` [node, channel] and `first_relayed` [channel, node]: the tokens that this rank relays.
    `relayed_to` [rank of this node]: the rows that it relays to a rank.

    Example:
        With 2 nodes of 1 rank and 1 channel, and 3 rows from rank 0 and 2 from rank 1, which this rank relays
        to itself: first_row [[[0, 3]]], num_rows [[[3, 2]]], relayed [[3], [2]], first_relayed [[0, 3]],
        relayed_to [5].
    """
    handle = borrowed(NodeHandle, handle)
    num_nodes, num_channels = handle.recv_rdma_prefix.shape
    for node in range(num_nodes):
        begin = before_in(handle.recv_rdma_sum, node)
        for channel in range(num_channels):
            before = before_in(handle.recv_rdma_prefix[node], channel)
            relayed[node, channel] = handle.recv_rdma_prefix[node, channel] - before
            first_relayed[channel, node] = begin + before
        for index in range(ranks_per_node):
            source = node * ranks_per_node + index
            start = before_in(handle.recv_gbl_sum, source)
            for channel in range(num_channels):
                first = start + handle.recv_gbl_prefix[source, channel]
                end = handle.recv_gbl_sum[source]
                if channel + 1 < num_channels:
                    end = start + handle.recv_gbl_prefix[source, channel + 1]
                first_row[channel, index, node] = first
                num_rows[channel, index, node] = end - first
    relayed_to[:] = 0
    for token in range(handle.recv_rdma_sum[-1]):
        for index in range(ranks_per_node):
            relayed_to[index] += handle.send_nvl_head[token, index] >= 0
