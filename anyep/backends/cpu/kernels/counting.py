"""Layout: how many tokens each rank receives, and where each token's row will lie."""

from __future__ import annotations

import numpy as np

from anyep.backends.cpu.kernels.compiler import kernel
from anyep.backends.cpu.kernels.digests import channel_word, mixed, row_word


@kernel("int64(int64[:,::1], int64)")
def first_wrong_id(topk_idx, num_experts):
    """The first index (token * top-k + choice) of an id that is neither an expert nor -1; -1 if there is no
    such id.

    Example:
        With 4 experts, topk_idx [[0, -1], [3, 4]] gives 3, and so does [[0, -1], [3, -2]].
    """
    for token in range(topk_idx.shape[0]):
        for slot in range(topk_idx.shape[1]):
            if not -1 <= topk_idx[token, slot] < num_experts:
                return token * topk_idx.shape[1] + slot
    return -1


@kernel("int64(int64[:,::1], int64, int32[::1], int32[::1], boolean[:,::1])")
def count_layout(topk_idx, experts_per_rank, tokens_per_rank, tokens_per_expert, in_rank):
    """Count tokens per rank (a token once per rank) and per expert (every choice), and mark token-in-rank.

    Returns -1; or, if an id is neither an expert nor -1, its index (token * top-k + choice), and nothing is
    counted from there on.

    Example:
        With topk_idx [[0, 1], [3, -1]] and 2 experts per rank on 2 ranks:
        tokens_per_rank [1, 1], tokens_per_expert [1, 1, 0, 1], in_rank [[True, False], [False, True]].
        With topk_idx [[0, 1], [3, 4]] it returns 3.
    """
    num_tokens, num_topk = topk_idx.shape
    num_experts = tokens_per_expert.shape[0]
    tokens_per_rank[:] = 0
    tokens_per_expert[:] = 0
    in_rank[:] = False
    for token in range(num_tokens):
        for slot in range(num_topk):
            expert = topk_idx[token, slot]
            if 0 <= expert < num_experts:
                tokens_per_expert[expert] += 1
                rank = expert // experts_per_rank
                if not in_rank[token, rank]:
                    in_rank[token, rank] = True
                    tokens_per_rank[rank] += 1
            elif expert != -1:
                return token * num_topk + slot
    return -1


@kernel("int64(boolean[:,::1], int32[::1], int32[::1], int32[:,::1], int32[:,::1])")
def place_tokens(in_rank, claimed_counts, rank_counts, channel_counts, position):
    """Number the rows that go to each rank, and count them by channel; returns the first rank whose count
    differs from the claimed one, or -1.

    Channels are contiguous ranges of ceil(tokens / channels) tokens.

    Example:
        With in_rank [[1, 0], [1, 1], [0, 1]] and 2 channels (tokens 0-1 and 2): rank_counts [2, 2],
        channel_counts [[2, 0], [1, 1]] (rank, channel) and position [[0, -1], [1, 0], [-1, 1]].
    """
    num_tokens, num_ranks = in_rank.shape
    num_channels = channel_counts.shape[1]
    per_channel = max(1, (num_tokens + num_channels - 1) // num_channels)
    rank_counts[:] = 0
    channel_counts[:] = 0
    for token in range(num_tokens):
        channel = token // per_channel
        for rank in range(num_ranks):
            if in_rank[token, rank]:
                position[token, rank] = rank_counts[rank]
                rank_counts[rank] += 1
                channel_counts[rank, channel] += 1
            else:
                position[token, rank] = -1
    for rank in range(num_ranks):
        if rank_counts[rank] != claimed_counts[rank]:
            return rank
    return -1


@kernel(
    "void(int64, int32[:,::1], int32[:,::1], int32[:,::1], int32[:,::1],"
    " int32[:,::1], int32[:,::1], int32[:,::1], int32[:,::1])"
)
def fill_handle(
    rank,
    matrix,
    sent_by_channel,
    received_by_channel,
    position,
    rank_prefix,
    channel_prefix,
    recv_channel_prefix,
    send_head,
):
    """Turn counts into the prefix sums of a handle.

    Example:
        For rank 1 of 2 with matrix [[2, 1], [1, 3]] (from, to): rank_prefix [[2, 1], [3, 4]]; sent_by_channel
        [[1, 0], [1, 2]] gives channel_prefix [[1, 1], [1, 3]] (inclusive); received_by_channel
        [[1, 0], [1, 2]] gives recv_channel_prefix [[0, 1], [0, 1]] (exclusive); position [[0, 0]] gives
        send_head [[2, 1]], because the 2 rows that rank 0 sends to rank 0 and the 1 row that it sends to
        rank 1 come before.
    """
    num_ranks, num_channels = sent_by_channel.shape
    for receiver in range(num_ranks):
        rows = np.int32(0)
        for sender in range(num_ranks):
            rows += matrix[sender, receiver]
            rank_prefix[sender, receiver] = rows
    for peer in range(num_ranks):
        sent = np.int32(0)
        received = np.int32(0)
        for channel in range(num_channels):
            sent += sent_by_channel[peer, channel]
            channel_prefix[peer, channel] = sent
            recv_channel_prefix[peer, channel] = received
            received += received_by_channel[peer, channel]
    for token in range(position.shape[0]):
        for peer in range(num_ranks):
            before = rank_prefix[rank - 1, peer] if rank > 0 else np.int32(0)
            place = position[token, peer]
            send_head[token, peer] = place + before if place >= 0 else np.int32(-1)


@kernel("void(int64[:,::1], int32[:,::1], int64, int64, int64[:], int64, int64, int64)")
def count_sent(sent, rank_prefix, rank, is_return, offsets, payload_bytes, beside_by_window, beside_by_ring):
    """Add to `sent` the rows that a rank sends to every peer, their bytes and those beside them.

    A dispatch sends to windows of the peers, a return from the window of this rank. Where the offset of that
    window is negative, rows go through rings. `sent` has the words of a `Sent` (anyep/core/traffic.py).

    Example:
        With rank_prefix [[2, 1], [3, 5]] rank 0 sends 2 rows to itself and 1 to rank 1. With offsets [0, -1]
        and 100, 20 and 24 bytes, `sent` becomes [[2, 1], [200, 100], [40, 24], [0, 0]] from zeros. It returns
        2 rows and 1 row, all by its window: [[2, 1], [200, 100], [40, 20], [0, 0]].
    """
    for peer in range(rank_prefix.shape[0]):
        source, receiver = (peer, rank) if is_return else (rank, peer)
        num_rows = rank_prefix[source, receiver]
        if source > 0:
            num_rows -= rank_prefix[source - 1, receiver]
        has_window = offsets[rank if is_return else peer] >= 0
        sent[0, peer] += num_rows
        sent[1, peer] += num_rows * payload_bytes
        sent[2, peer] += num_rows * (beside_by_window if has_window else beside_by_ring)


@kernel("int64(int64[:,::1], int32[::1], boolean[:,::1])")
def first_contradiction(topk_idx, tokens_per_expert, in_rank):
    """-1 if topk_idx agrees with the counts and with in_rank; else a code for the first contradiction.

    An expert e whose count is wrong gives e. A token t and a rank r for which topk_idx and in_rank disagree
    give -2 - (t * ranks + r). An id that is neither an expert nor -1, as choice k of token t, gives the
    number of experts + (t * top-k + k).

    Example:
        With 1 expert per rank and topk_idx [[0, 1], [1, -1]], the counts [1, 2] and in_rank [[1, 1], [0, 1]]
        are right; the counts [1, 1] give 1; in_rank [[1, 1], [1, 1]] gives -4, because token 1 does not go to
        rank 0. With topk_idx [[0, 1], [1, 2]] it returns 2 + 3.
    """
    num_experts, num_ranks = tokens_per_expert.shape[0], in_rank.shape[1]
    experts_per_rank = num_experts // num_ranks
    counts = np.zeros(num_experts, np.int32)
    wanted = np.zeros(num_ranks, np.bool_)
    for token in range(topk_idx.shape[0]):
        wanted[:] = False
        for slot in range(topk_idx.shape[1]):
            expert = topk_idx[token, slot]
            if 0 <= expert < num_experts:
                counts[expert] += 1
                wanted[expert // experts_per_rank] = True
            elif expert != -1:
                return num_experts + token * topk_idx.shape[1] + slot
        for rank in range(num_ranks):
            if wanted[rank] != in_rank[token, rank]:
                return -2 - (token * num_ranks + rank)
    for expert in range(num_experts):
        if counts[expert] != tokens_per_expert[expert]:
            return expert
    return -1


@kernel(
    "int64(int64, int32[:,::1], int32[:,::1], int32[:,::1], int32[::1], boolean[:,::1], int32[:,::1],"
    " int64[::1])"
)
def check_handle(
    rank, rank_prefix, channel_prefix, recv_channel_prefix, recv_src_idx, in_rank, send_head, digests
):
    """0 if the parts of a handle are consistent, which keeps kernels within bounds; else what is wrong.

    1: rank_prefix decreases somewhere; 2: more rows than recv_src_idx has; 3: send_head of a peer is not
    first, first + 1, ... for its tokens in order; 4: is_token_in_rank and send_head differ; 5: channel_prefix
    does not count the rows of send_head; 6: recv_channel_prefix decreases or exceeds the rows of its peer.

    If it is 0, `digests` holds the digests of the rows to each rank, then those of the rows from each rank.
    They cover the rows with their tokens, and the first row of each channel.

    Example:
        For rank 0 of 1 with 2 tokens in 1 channel: rank_prefix [[2]], channel_prefix [[2]],
        recv_channel_prefix [[0]], recv_src_idx [0, 1], in_rank [[True], [True]] and send_head [[0], [1]] are
        consistent, and both digests are m(-1) + m(0) + m(2**32 + 1), where m mixes a word; with send_head
        [[0], [2]] it returns 3.
    """
    num_tokens, num_ranks = send_head.shape
    num_channels = channel_prefix.shape[1]
    per_channel = max(1, (num_tokens + num_channels - 1) // num_channels)
    for receiver in range(num_ranks):
        before = 0
        for sender in range(num_ranks):
            if rank_prefix[sender, receiver] < before:
                return 1
            before = rank_prefix[sender, receiver]
    if rank_prefix[num_ranks - 1, rank] > recv_src_idx.shape[0]:
        return 2
    for peer in range(num_ranks):
        row = rank_prefix[rank - 1, peer] if rank > 0 else np.int32(0)
        first = row
        channel = 0
        sent = np.uint64(0)
        for token in range(num_tokens):
            while token // per_channel > channel:
                if channel_prefix[peer, channel] != row - first:
                    return 5
                channel += 1
            here = send_head[token, peer]
            if in_rank[token, peer] != (here >= 0):
                return 4
            if here >= 0:
                if here != row:
                    return 3
                sent += mixed(row_word(row, token))
                row += 1
        if row != rank_prefix[rank, peer]:
            return 3
        for rest in range(channel, num_channels):
            if channel_prefix[peer, rest] != row - first:
                return 5
        first_received = rank_prefix[peer - 1, rank] if peer > 0 else np.int32(0)
        received = np.uint64(0)
        before = 0
        for channel in range(num_channels):
            start = recv_channel_prefix[peer, channel]
            if start < before or start > rank_prefix[peer, rank] - first_received:
                return 6
            before = start
            received += mixed(channel_word(channel, np.int64(start)))
            sent += mixed(
                channel_word(channel, np.int64(channel_prefix[peer, channel - 1] if channel else 0))
            )
        for index in range(first_received, rank_prefix[peer, rank]):
            received += mixed(row_word(index, recv_src_idx[index]))
        digests[peer] = np.int64(sent)
        digests[num_ranks + peer] = np.int64(received)
    return 0


@kernel("int64(int64[:,::1])")
def first_difference_of_digests(digests):
    """-1 if the digests of all pairs of ranks agree; else sender * ranks + receiver of the first pair whose
    digests differ.

    Row r of `digests` holds the digests in rank r's handle: of its rows to each rank, then from each rank.

    Example:
        With [[1, 2, 1, 3], [3, 4, 2, 4]] all agree; with [[1, 2, 1, 3], [3, 4, 9, 4]] it returns 1: the rows
        that rank 0 sent to rank 1 are not those that rank 1 received.
    """
    num_ranks = digests.shape[0]
    for sender in range(num_ranks):
        for receiver in range(num_ranks):
            if digests[sender, receiver] != digests[receiver, num_ranks + sender]:
                return sender * num_ranks + receiver
    return -1
