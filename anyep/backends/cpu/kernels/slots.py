"""Low latency: rows lie at fixed places in their sender's memory, and readers copy them from there.

A sender puts each row into a message of its own send set, with a list of tokens for each reader and expert,
and closes with a completion record to each reader. The reader waits for all completion records and reads the
rows: a dispatch packs them by expert, a combine sums them by token. Only completion records are written into
the memory of other ranks, at places that never move: a masked rank that does not know it yet can do no harm.
"""

from __future__ import annotations

import numpy as np

from anyep.backends.cpu.kernels.atomics import count_down, fence, store_release
from anyep.backends.cpu.kernels.casts import (
    cast_row_to_fp8,
    decode_logfmt_block,
    encode_logfmt,
    is_logfmt_block_encoded,
)
from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.floats import float_of_bf16
from anyep.backends.cpu.kernels.memory import (
    copy_bytes,
    copy_row,
    drain_stores,
    int32_at,
    int64_at,
    uint16_at,
    uint32_at,
)
from anyep.backends.cpu.kernels.sums import BF16, BLOCK, store_block
from anyep.core.formats import (
    CHANNELS_PER_BLOCK,
    FP8,
    FP8_UE8M0,
    LOGFMT_BLOCK_BYTES,
    LOGFMT_MASK_BYTES,
    LOGFMT_RAW_BLOCK_BYTES,
    RAW,
)
from anyep.layout import RECORD_HEADER_BYTES
from anyep.sizes import LOW_LATENCY_HEADER_BYTES

COUNT_BITS = 32
COUNT_MASK = (1 << COUNT_BITS) - 1


@kernel("void(int64, int64, int64, int64, int64, int64[:,::1], int64, int64, int64)")
def send_tokens(first_token, end_token, x, hidden, travel, topk_idx, num_experts, messages, message_bytes):
    """Put each token that goes to any expert into its message, cast to the format `travel`.

    Example:
        With topk_idx [[1], [-1]] and 2 experts only token 0 is written: as RAW its 2 * hidden bytes follow
        the 16-byte header at `messages`; as FP8 hidden bytes and their scales do. Token 1 would be
        `message_bytes` further on.
    """
    for token in range(first_token, end_token):
        wanted = False
        for choice in range(topk_idx.shape[1]):
            wanted |= 0 <= topk_idx[token, choice] < num_experts
        if wanted:
            source = x + token * 2 * hidden
            payload = messages + token * message_bytes + LOW_LATENCY_HEADER_BYTES
            if travel == RAW:
                copy_bytes(payload, source, 2 * hidden)
            else:
                cast_row_to_fp8(source, payload, payload + hidden, hidden, travel != FP8, travel == FP8_UE8M0)


@kernel("void(int64[:,::1], int64[::1], int64[::1], int64[::1], boolean[::1], int64[::1])")
def list_tokens(topk_idx, lists, list_strides, records, masked, counts):
    """Write a list of this rank's tokens for each expert of each reader, and their counts into the reader's
    completion record.

    lists[r] is the address of the list for reader r's first expert, the next expert's is `list_strides[r]`
    further on. A token that chose an expert twice is listed once. Nothing is written for a masked reader.

    Example:
        With 1 expert on each of 2 readers and topk_idx [[1, 0], [-1, 1]], reader 0 finds the tokens [0] and
        reader 1 finds [0, 1]; the ranges in their completion records are 1 and 2, as are the counts [1, 2].
    """
    num_readers = lists.shape[0]
    local_experts = counts.shape[0] // num_readers
    counts[:] = 0
    for token in range(topk_idx.shape[0]):
        for choice in range(topk_idx.shape[1]):
            expert = topk_idx[token, choice]
            if 0 <= expert < counts.shape[0]:
                reader = expert // local_experts
                if not masked[reader]:
                    local = expert - reader * local_experts
                    tokens = int32_at(lists[reader] + local * list_strides[reader], counts[expert] + 1)
                    if counts[expert] == 0 or tokens[counts[expert] - 1] != token:
                        tokens[counts[expert]] = token
                        counts[expert] += 1
    for reader in range(num_readers):
        if not masked[reader]:
            ranges = int64_at(records[reader] + RECORD_HEADER_BYTES, local_experts)
            for local in range(local_experts):
                ranges[local] = counts[reader * local_experts + local]


@kernel("void(int64[::1], boolean[::1], int64[::1], int64, int64[::1])")
def post_records(records, masked, wake_ups, topic, header):
    """Write the completion record of this rank's sends to every reader that is not masked.

    Example:
        With header [7, 0, 4] a reader that acquires 7 in word 0 of its completion record finds 0 and 4 after
        it, and all that was written before.
    """
    drain_stores()
    for reader in range(records.shape[0]):
        if not masked[reader]:
            words = int64_at(records[reader], header.shape[0])
            for index in range(1, header.shape[0]):
                words[index] = header[index]
            store_release(records[reader], header[0])
    fence()
    for reader in range(records.shape[0]):
        if not masked[reader]:
            count_down(wake_ups[reader], topic)


@kernel("void(int64[:,::1], boolean[::1], boolean[::1], int64[:,:], int64, int64, int64)")
def count_read(sent, near, masked, rows, payload_bytes, beside_bytes, message_bytes):
    """Add to `sent` what the readers take that are near and not masked: rows, their bytes and those beside
    them; of messages the bytes given, and a word of a list for each row.

    `rows[r]` has the rows of reader r by expert, in the lower half of each word. `sent` has the words of a
    `Sent` (anyep/core/traffic.py).

    Example:
        With the rows [[1, 2], [3, 0]], only reader 0 near, and 100, 20 and 8 bytes, `sent` becomes
        [[3, 0], [300, 0], [60, 0], [20, 0]] from zeros.
    """
    for reader in range(rows.shape[0]):
        if near[reader] and not masked[reader]:
            num_rows = 0
            for expert in range(rows.shape[1]):
                num_rows += rows[reader, expert] & COUNT_MASK
            sent[0, reader] += num_rows
            sent[1, reader] += num_rows * payload_bytes
            sent[2, reader] += num_rows * beside_bytes
            sent[3, reader] += num_rows * 4 + message_bytes


@kernel("int64(int64[::1], boolean[::1], int64[::1], int64, int64, int64[:,::1], int64[:,::1])")
def read_records(records, masked, own_header, first, end, headers, ranges):
    """Copy every sender's header and ranges (row s comes from sender s); returns the rows in all ranges.

    It returns -1 if the headers do not agree in the words [first, end). The header and ranges of a masked
    sender are 0.

    Example:
        With the headers [7, 0, 4] and [7, 0, 5] and one row each, words [1, 2) give 2 and words [1, 3) give
        -1.
    """
    num_rows = 0
    agree = True
    for sender in range(records.shape[0]):
        if masked[sender]:
            headers[sender] = 0
            ranges[sender] = 0
        else:
            words = int64_at(records[sender], headers.shape[1])
            for index in range(headers.shape[1]):
                headers[sender, index] = words[index]
                if first <= index < end and words[index] != own_header[index]:
                    agree = False
            theirs = int64_at(records[sender] + RECORD_HEADER_BYTES, ranges.shape[1])
            for local in range(ranges.shape[1]):
                ranges[sender, local] = theirs[local]
                num_rows += theirs[local] & COUNT_MASK
    return num_rows if agree else -1


@kernel(
    "void(int64, int64, int64[:,::1], int64[::1], int64[::1], int64[::1], int64, int64, int64, int64, int64,"
    " int64, int32[:,::1], int64[:,::1], int32[::1], int32[::1])"
)
def pack_tokens(
    first_expert,
    end_expert,
    ranges,
    lists,
    list_strides,
    messages,
    message_bytes,
    row_bytes,
    num_scale_words,
    streaming,
    x,
    scales,
    src_info,
    layout_range,
    counts,
    stats,
):
    """Copy the rows of each local expert from their senders: in order of sender, then token.

    ranges[s, e] counts the rows of sender s for expert e, lists[s] is the address of its list for expert 0,
    messages[s] that of its first message. A row's scales, words of 4 bytes, go to a column: word w of row r
    of expert e to ((e * num_scale_words) + w) * rows_per_expert + r.

    Example:
        With ranges [[2], [1]] and the lists [0, 3] and [1], the rows of expert 0 are tokens 0 and 3 of sender
        0 and token 1 of sender 1: src_info [[0, 3, 1, ...]], layout_range [[2, 2 << 32 | 1]], counts [3], and
        stats (unless it is empty) grows by 3.
    """
    num_senders = ranges.shape[0]
    rows_per_expert = src_info.shape[1]
    max_tokens = rows_per_expert // num_senders
    for expert in range(first_expert, end_expert):
        begin = 0
        for sender in range(num_senders):
            count = ranges[sender, expert] & COUNT_MASK
            layout_range[expert, sender] = begin << COUNT_BITS | count
            theirs = int32_at(lists[sender] + expert * list_strides[sender], count)
            tokens = src_info[expert, begin : begin + count]
            for index in range(count):
                # A sender that has masked this rank may overwrite the list while it is read.
                tokens[index] = min(max(theirs[index], np.int32(0)), np.int32(max_tokens - 1))
                row = expert * rows_per_expert + begin + index
                payload = messages[sender] + tokens[index] * message_bytes + LOW_LATENCY_HEADER_BYTES
                copy_row(x + row * row_bytes, payload, row_bytes, streaming)
            # One word after the other: neighbours in memory are neighbouring rows of the same word.
            for word in range(num_scale_words):
                column = (expert * num_scale_words + word) * rows_per_expert + begin
                to = uint32_at(scales + 4 * column, count)
                for index in range(count):
                    message = messages[sender] + tokens[index] * message_bytes + LOW_LATENCY_HEADER_BYTES
                    to[index] = uint32_at(message + row_bytes + 4 * word, 1)[0]
            begin += count
        counts[expert] = begin
        if stats.shape[0]:
            stats[expert] += begin
    drain_stores()


@kernel("int64(int64[:,::1], int32[:,::1], int64)")
def count_rows(layout_range, src_info, max_tokens):
    """The number of rows of a handle if its ranges and tokens are valid, which keeps kernels within bounds.

    Otherwise -1: a range does not begin where the previous one ends; -2: a range has more than `max_tokens`
    rows; -3: a token is not in [0, max_tokens), or is not larger than the previous one.

    Example:
        With at most 4 tokens and 2 senders, ranges [[2, 2 << 32 | 1]] and src_info [[0, 3, 1, ...]] give 3;
        src_info [[3, 0, 1, ...]] gives -3.
    """
    num_rows = 0
    for expert in range(layout_range.shape[0]):
        begin = 0
        for sender in range(layout_range.shape[1]):
            count = layout_range[expert, sender] & COUNT_MASK
            if layout_range[expert, sender] >> COUNT_BITS != begin:
                return -1
            if count > max_tokens:
                return -2
            before = -1
            for row in range(begin, begin + count):
                token = src_info[expert, row]
                if token <= before or token >= max_tokens:
                    return -3
                before = token
            begin += count
        num_rows += begin
    return num_rows


@kernel("void(int64, int64, int64, int64, int64[:,::1], int64, int64, int64, int64, int64)")
def stage_rows(
    first_expert,
    end_expert,
    x,
    hidden,
    layout_range,
    rows_per_expert,
    use_logfmt,
    streaming,
    messages,
    message_bytes,
):
    """Put the rows of each local expert into the messages of the same index, unchanged or in LogFMT.

    Example:
        With layout_range [[2, 2 << 32 | 1]] rows 0 to 2 of expert 0 are put there.
    """
    last = layout_range.shape[1] - 1
    for expert in range(first_expert, end_expert):
        num_rows = (layout_range[expert, last] >> COUNT_BITS) + (layout_range[expert, last] & COUNT_MASK)
        for index in range(num_rows):
            row = expert * rows_per_expert + index
            message = messages + row * message_bytes
            if use_logfmt:
                encode_logfmt(x + row * 2 * hidden, message, hidden)
            else:
                payload = message + LOW_LATENCY_HEADER_BYTES
                copy_row(payload, x + row * 2 * hidden, 2 * hidden, streaming)
    drain_stores()


@kernel("void(int32[:,::1], int64[:,::1], int64[::1], int64[::1], int64[::1], boolean[::1])")
def list_returns(src_info, layout_range, lists, list_strides, records, masked):
    """Write for each reader the list of its tokens whose rows this rank's experts return, and their ranges.

    lists[r] is the address of reader r's list for expert 0, the next expert's is `list_strides[r]` further
    on.

    Example:
        With src_info [[0, 3, 1]] and layout_range [[2, 2 << 32 | 1]] reader 0 finds the tokens [0, 3] and the
        range 2, reader 1 finds [1] and the range 2 << 32 | 1.
    """
    for reader in range(lists.shape[0]):
        if not masked[reader]:
            ranges = int64_at(records[reader] + RECORD_HEADER_BYTES, layout_range.shape[0])
            for expert in range(layout_range.shape[0]):
                begin = layout_range[expert, reader] >> COUNT_BITS
                count = layout_range[expert, reader] & COUNT_MASK
                ranges[expert] = layout_range[expert, reader]
                place = lists[reader] + expert * list_strides[reader]
                copy_bytes(place, src_info[expert].ctypes.data + 4 * begin, 4 * count)


@inlined
def _add_raw_row(sums, start, count, payload, weight):
    halves = uint16_at(payload + 2 * start, count)
    for index in range(count):
        sums[index] += float_of_bf16(halves[index]) * weight


@inlined
def _add_logfmt_row(sums, start, count, message, block_at, weight, values):
    """Add the blocks of [start, start + count); `block_at` is the address of the first block, the result that
    of the next block after them."""
    for offset in range(0, count, CHANNELS_PER_BLOCK):
        is_encoded = is_logfmt_block_encoded(message, (start + offset) // CHANNELS_PER_BLOCK)
        decode_logfmt_block(block_at, is_encoded, values)
        block_at += LOGFMT_BLOCK_BYTES if is_encoded else LOGFMT_RAW_BLOCK_BYTES
        for index in range(CHANNELS_PER_BLOCK):
            sums[offset + index] += values[index] * weight
    return block_at


@kernel(
    "int64(int64, int64, int64[:,::1], float32[:,::1], int64[:,::1], int64[::1], int64[::1], int64[::1],"
    " int64, int64, boolean[::1], int64, int64, int64)"
)
def sum_tokens(
    first_token,
    end_token,
    topk_idx,
    topk_weights,
    ranges,
    lists,
    list_strides,
    messages,
    message_bytes,
    rows_per_expert,
    masked,
    use_logfmt,
    out,
    hidden,
):
    """Sum each token's rows from their messages: out = 0 + row * weight + ..., in top-k order, in float32.

    ranges[r, e] says which rows of expert e of rank r are this rank's, lists[r] is the address of the list of
    their tokens for expert 0, messages[r] that of the first row's message. Choices that are no expert, and
    experts of masked ranks, are skipped. Returns -1, or token * top-k + choice if the row for that choice was
    not returned.

    Example:
        With 1 expert per rank, topk_idx [[1, 0]], weights [[0.5, 2]] and a row of 4s at rank 1, of 1s at rank
        0, out is a row of 4s: 4 * 0.5 + 1 * 2.
    """
    num_ranks, local_experts = ranges.shape
    num_topk = topk_idx.shape[1]
    taken = np.zeros((num_ranks, local_experts), np.int64)
    rows = np.empty(num_topk, np.int64)
    blocks = np.empty(num_topk, np.int64)
    weights = np.empty(num_topk, np.float32)
    sums = np.empty(BLOCK, np.float32)
    values = np.empty(CHANNELS_PER_BLOCK, np.float32)
    for token in range(first_token, end_token):
        num_rows = 0
        for choice in range(num_topk):
            expert = topk_idx[token, choice]
            if not 0 <= expert < num_ranks * local_experts:
                continue
            rank = expert // local_experts
            if masked[rank]:
                continue
            local = expert - rank * local_experts
            count = ranges[rank, local] & COUNT_MASK
            tokens = int32_at(lists[rank] + local * list_strides[rank], count)
            place = taken[rank, local]
            while place < count and tokens[place] < token:
                place += 1
            if place == count or tokens[place] != token:
                return token * num_topk + choice
            # Do not advance past it: the token may have chosen this expert twice.
            taken[rank, local] = place
            row = local * rows_per_expert + (ranges[rank, local] >> COUNT_BITS) + place
            rows[num_rows] = messages[rank] + row * message_bytes
            blocks[num_rows] = rows[num_rows] + LOGFMT_MASK_BYTES
            weights[num_rows] = topk_weights[token, choice]
            num_rows += 1
        for start in range(0, hidden, BLOCK):
            width = min(BLOCK, hidden - start)
            for index in range(width):
                sums[index] = np.float32(0.0)
            for row in range(num_rows):
                if use_logfmt:
                    blocks[row] = _add_logfmt_row(
                        sums, start, width, rows[row], blocks[row], weights[row], values
                    )
                else:
                    _add_raw_row(sums, start, width, rows[row] + LOW_LATENCY_HEADER_BYTES, weights[row])
            store_block(out + 2 * token * hidden, start, sums, width, BF16)
    return -1
