"""Dispatch by window: rows go directly to their final place in the receiver's memory."""

from __future__ import annotations

from anyep.backends.cpu.kernels.borrow import borrowed
from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.groups import Payload
from anyep.backends.cpu.kernels.memory import (
    copy_bytes,
    copy_row,
    drain_stores,
    float32_at,
    int32_at,
    int64_at,
    uint32_at,
)


@inlined
def copy_scales(destination, payload, token):
    """Copy one token's scales, of any stride, to `destination`, row-major."""
    to = uint32_at(destination, payload.num_scales)
    start = payload.scales + 4 * token * payload.stride_token
    for scale in range(payload.num_scales):
        to[scale] = uint32_at(start + 4 * scale * payload.stride_scale, 1)[0]


@inlined
def write_local_ids(ids, weights, payload, token, receiver):
    """Write a token's ids as a receiver's local ids, and its weights; -1 and 0 for experts of other ranks.

    Example:
        With 2 experts per rank, the ids [3, 1] are [1, -1] for receiver 1, and the weights [0.5, 0.25] are
        [0.5, 0].
    """
    first_expert = receiver * payload.experts_per_rank
    for choice in range(payload.topk_idx.shape[1]):
        local = payload.topk_idx[token, choice] - first_expert
        here = 0 <= local < payload.experts_per_rank
        ids[choice] = local if here else -1
        weights[choice] = payload.topk_weights[token, choice] if here else 0.0


@kernel("void(int64, int64, int32[:,::1], int64[:,::1], Payload, int64)")
def send_to_windows(first_token, end_token, send_head, places, payload, streaming):
    """Read each token's row once and write it to every receiver with a window.

    `places[r]` holds the addresses of receiver r's x, source indices, top-k ids, top-k weights and scales, or
    zeros if r has no window. An expert id is written as the receiver's local id; if the receiver does not
    have the expert, the id is -1 and the weight 0.

    Example:
        With send_head [[0, 2], [-1, 3]] row 0 of x goes to row 0 at receiver 0 and to row 2 at receiver 1;
        row 1 goes to row 3 at receiver 1; the source indices there are 0, 0 and 1.
    """
    payload = borrowed(Payload, payload)
    num_receivers, row_bytes = places.shape[0], payload.row_bytes
    num_topk = payload.topk_idx.shape[1]
    for token in range(first_token, end_token):
        source = payload.x + token * row_bytes
        for receiver in range(num_receivers):
            row = send_head[token, receiver]
            if row < 0 or places[receiver, 0] == 0:
                continue
            copy_row(places[receiver, 0] + row * row_bytes, source, row_bytes, streaming)
            int32_at(places[receiver, 1] + 4 * row, 1)[0] = token
            if num_topk:
                ids = int64_at(places[receiver, 2] + 8 * row * num_topk, num_topk)
                weights = float32_at(places[receiver, 3] + 4 * row * num_topk, num_topk)
                write_local_ids(ids, weights, payload, token, receiver)
            if payload.num_scales:
                copy_scales(places[receiver, 4] + 4 * row * payload.num_scales, payload, token)
    drain_stores()


@kernel("void(int64, int64, int64, int64, int64)")
def copy_rows(destination, source, num_rows, row_bytes, streaming):
    """Copy rows one by one.

    Example:
        2 rows of 16 bytes are 32 bytes.
    """
    for row in range(num_rows):
        copy_row(destination + row * row_bytes, source + row * row_bytes, row_bytes, streaming)
    drain_stores()


@kernel(
    "int64(int64[:,::1], int32[:,::1], int64, int64, int64,"
    " int64[::1], int64[::1], int64[::1], int64[::1], int64[:,::1])"
)
def choose_windows(
    headers, matrix, result_rows_at, num_offers_at, offers_at, bytes_per_row, bases, num_rows, offsets, places
):
    """Decide for each receiver where in its window heap its rows go; every rank makes the same decision.

    A receiver has `result_rows` of its notify message, or (if that is -1) as many rows as the matrix says.
    Its window holds the results side by side, each aligned to 128 bytes, in the first of its window offers
    that is large enough; if none is, offsets is -1 and places are 0: its rows go through rings. Returns the
    first receiver that would receive more rows than its notify message allows, or -1.

    Example:
        With one receiver of 3 rows, bytes_per_row [64, 4, 0, 0, 0] (256 + 128 bytes) and the offers (0, 256)
        and (512, 1024) in a heap at 4096: num_rows [3], offsets [512], places
        [[4608, 4864, 4992, 4992, 4992]].
    """
    for receiver in range(headers.shape[0]):
        rows = headers[receiver, result_rows_at]
        arriving = 0
        for sender in range(matrix.shape[0]):
            arriving += matrix[sender, receiver]
        if rows < 0:
            rows = arriving
        if arriving > rows:
            return receiver
        num_rows[receiver] = arriving
        needed = 0
        for index in range(bytes_per_row.shape[0]):
            needed += (rows * bytes_per_row[index] + 127) // 128 * 128
        needed = max(needed, 128)
        offsets[receiver] = -1
        for offer in range(headers[receiver, num_offers_at]):
            if headers[receiver, offers_at + 2 * offer + 1] >= needed:
                offsets[receiver] = headers[receiver, offers_at + 2 * offer]
                break
        place = bases[receiver] + offsets[receiver]
        for index in range(bytes_per_row.shape[0]):
            places[receiver, index] = place if offsets[receiver] >= 0 else 0
            place += (rows * bytes_per_row[index] + 127) // 128 * 128
    return -1


@kernel("void(int64, int64, int64, int64)")
def pad_ids(ids, num_rows, num_result_rows, num_topk):
    """Set the top-k ids past the received rows to -1.

    Example:
        With 1 row received of 2, [[3], [9]] becomes [[3], [-1]].
    """
    all_ids = int64_at(ids, num_result_rows * num_topk)
    for index in range(num_rows * num_topk, num_result_rows * num_topk):
        all_ids[index] = -1


@kernel("void(int64[::1], int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def unpack_window(
    places, num_rows, num_result_rows, source_bytes, num_topk, num_scales, source, ids, weights, scales
):
    """Copy what came with the rows out of a window: sources, top-k ids and weights, scales.

    `places` are the addresses of the window's parts, the last four arguments those of the results. Sources
    belong to the handle; if the handle is not new, they stay unchanged (`source_bytes` is 0).

    Example:
        With 1 row received, room for 2, and ids [[3], [?]] in the window, the ids become [[3], [-1]].
    """
    copy_bytes(source, places[1], source_bytes * num_rows)
    if num_topk:
        copy_bytes(ids, places[2], 8 * num_rows * num_topk)
        copy_bytes(weights, places[3], 4 * num_rows * num_topk)
        pad_ids(ids, num_rows, num_result_rows, num_topk)
    if num_scales:
        copy_bytes(scales, places[4], 4 * num_rows * num_scales)
