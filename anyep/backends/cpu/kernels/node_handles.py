"""Handles between nodes: their counts, whether their parts are consistent, and whether all ranks agree.

A rank relays the tokens of the ranks with its own index, one on every node, to the ranks of its node. These
tokens are numbered by source node, then by token; `send_nvl_head` has one row for each.
"""

from __future__ import annotations

import numpy as np

from anyep import digests as words
from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.digests import channel_word, mixed, row_word

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


@kernel(
    "int64(int64, int64, boolean[:,::1], int32[:,::1], int32[:,::1], int32[:,::1], int32[::1], int32[:,::1],"
    " int32[::1], uint8[:,::1], int32[:,::1], int32[:,::1], int64[::1], int32[::1])"
)
def read_node_handle(
    rank,
    ranks_per_node,
    in_rank,
    rdma_prefix,
    gbl_prefix,
    recv_rdma_prefix,
    recv_rdma_sum,
    recv_gbl_prefix,
    recv_gbl_sum,
    recv_src_meta,
    send_rdma_head,
    send_nvl_head,
    digests,
    counts,
):
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
    num_tokens, num_ranks = in_rank.shape
    num_nodes, num_channels = recv_rdma_prefix.shape
    for node in range(num_nodes):
        count = 0
        for token in range(num_tokens):
            is_wanted = False
            for peer in range(node * ranks_per_node, (node + 1) * ranks_per_node):
                is_wanted |= in_rank[token, peer]
            if send_rdma_head[token, node] != (count if is_wanted else -1):
                return 1
            count += is_wanted
    for node in range(num_nodes):
        if not counts_marks(in_rank, node * ranks_per_node, ranks_per_node, rdma_prefix[node]):
            return 2
    for peer in range(num_ranks):
        if not counts_marks(in_rank, peer, 1, gbl_prefix[peer]):
            return 3
    if falls(recv_gbl_sum) or recv_gbl_sum[-1] > recv_src_meta.shape[0]:
        return 4
    for source in range(num_ranks):
        received = recv_gbl_sum[source] - (recv_gbl_sum[source - 1] if source > 0 else 0)
        prefix = recv_gbl_prefix[source]
        if prefix[0] != 0 or falls(prefix) or prefix[-1] > received:
            return 5
    if falls(recv_rdma_sum):
        return 6
    for node in range(num_nodes):
        if falls(recv_rdma_prefix[node]):
            return 6
    if recv_rdma_sum[-1] > send_nvl_head.shape[0]:
        return 7
    for node in range(num_nodes):
        if recv_rdma_prefix[node, -1] != recv_rdma_sum[node] - (recv_rdma_sum[node - 1] if node > 0 else 0):
            return 7
    own_node = rank // ranks_per_node
    for channel in range(num_channels):
        if recv_rdma_prefix[own_node, channel] != rdma_prefix[own_node, channel]:
            return 8

    digests_to = np.empty(num_ranks, np.uint64)
    for peer in range(num_ranks):
        sent, received = np.uint64(0), np.uint64(0)
        first = recv_gbl_sum[peer - 1] if peer > 0 else 0
        for channel in range(num_channels):
            before = gbl_prefix[peer, channel - 1] if channel > 0 else 0
            sent += mixed(channel_word(channel, before))
            received += mixed(channel_word(channel, recv_gbl_prefix[peer, channel]))
        for row in range(first, recv_gbl_sum[peer]):
            meta = recv_src_meta[row]
            received += row_and_mask(row - first, word_in(meta, 4), word_in(meta, 0))
        digests_to[peer] = sent
        digests[num_ranks + peer] = np.int64(received)
        counts[peer] = gbl_prefix[peer, -1]
        counts[num_ranks + peer] = recv_gbl_sum[peer] - first
    for node in range(num_nodes):
        begin = recv_rdma_sum[node - 1] if node > 0 else 0
        for index in range(ranks_per_node):
            first, count = -1, 0
            for token in range(begin, recv_rdma_sum[node]):
                head = send_nvl_head[token, index]
                if head >= 0:
                    if count == 0:
                        first = head
                    if head != first + count:
                        return 9
                    count += 1
            counts[2 * num_ranks + node * ranks_per_node + index] = first
        tokens, relayed = np.uint64(0), np.uint64(0)
        for channel in range(num_channels):
            before = rdma_prefix[node, channel - 1] if channel > 0 else 0
            tokens += mixed(channel_word(channel, before))
            before = recv_rdma_prefix[node, channel - 1] if channel > 0 else 0
            relayed += mixed(channel_word(channel, before))
        for token in range(begin, recv_rdma_sum[node]):
            for index in range(ranks_per_node):
                if send_nvl_head[token, index] >= 0:
                    relayed += mixed(row_word(token - begin, index))
        rows = np.zeros(ranks_per_node, np.int64)
        for token in range(num_tokens):
            if send_rdma_head[token, node] >= 0:
                mask = mask_of(in_rank, token, node * ranks_per_node, ranks_per_node)
                for index in range(ranks_per_node):
                    if in_rank[token, node * ranks_per_node + index]:
                        tokens += mixed(row_word(send_rdma_head[token, node], index))
                        digests_to[node * ranks_per_node + index] += row_and_mask(rows[index], mask, own_node)
                        rows[index] += 1
        digests[2 * num_ranks + node] = np.int64(tokens)
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


@kernel(
    "void(int64, int32[:,::1], int32[::1], int32[:,::1], int32[::1], int32[:,::1],"
    " int64[:,:,::1], int64[:,:,::1], int32[:,::1], int64[:,::1], int64[::1])"
)
def plan_lanes(
    ranks_per_node,
    recv_rdma_prefix,
    recv_rdma_sum,
    recv_gbl_prefix,
    recv_gbl_sum,
    send_nvl_head,
    first_row,
    num_rows,
    relayed,
    first_relayed,
    relayed_to,
):
    """Compute where the rows and tokens of a handle begin, channel by channel, and how many there are.

    `first_row` and `num_rows` [channel, rank of this node, node]: the rows received from a node through a
    rank. `relayed` [node, channel] and `first_relayed` [channel, node]: the tokens that this rank relays.
    `relayed_to` [rank of this node]: the rows that it relays to a rank.

    Example:
        With 2 nodes of 1 rank and 1 channel, and 3 rows from rank 0 and 2 from rank 1, which this rank relays
        to itself: first_row [[[0, 3]]], num_rows [[[3, 2]]], relayed [[3], [2]], first_relayed [[0, 3]],
        relayed_to [5].
    """
    num_nodes, num_channels = recv_rdma_prefix.shape
    for node in range(num_nodes):
        begin = recv_rdma_sum[node - 1] if node > 0 else 0
        for channel in range(num_channels):
            before = recv_rdma_prefix[node, channel - 1] if channel > 0 else 0
            relayed[node, channel] = recv_rdma_prefix[node, channel] - before
            first_relayed[channel, node] = begin + before
        for index in range(ranks_per_node):
            source = node * ranks_per_node + index
            start = recv_gbl_sum[source - 1] if source > 0 else 0
            for channel in range(num_channels):
                first = start + recv_gbl_prefix[source, channel]
                end = recv_gbl_sum[source]
                if channel + 1 < num_channels:
                    end = start + recv_gbl_prefix[source, channel + 1]
                first_row[channel, index, node] = first
                num_rows[channel, index, node] = end - first
    relayed_to[:] = 0
    for token in range(recv_rdma_sum[-1]):
        for index in range(ranks_per_node):
            relayed_to[index] += send_nvl_head[token, index] >= 0
