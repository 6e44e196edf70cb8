"""Combine: add the rows of a token, in float32, in the order given, and round once."""

from __future__ import annotations

import numpy as np

from anyep.backends.cpu.kernels.borrow import borrowed
from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.floats import bf16_of_float, float_of_bf16, float_of_fp16, fp16_of_float
from anyep.backends.cpu.kernels.groups import Scratch, Sums
from anyep.backends.cpu.kernels.memory import float32_at, int64_at, stack_bytes, uint16_at

BF16, FP16, FP32 = 1, 2, 3
BLOCK = 1024
"""Values that are summed at a time: their float32 sums stay in the first-level cache."""


@inlined
def add_block(sums, row, start, count, dtype):
    """sums[:count] += row[start : start + count]."""
    if dtype == BF16:
        halves = uint16_at(row + 2 * start, count)
        for index in range(count):
            sums[index] += float_of_bf16(halves[index])
    elif dtype == FP16:
        halves = uint16_at(row + 2 * start, count)
        for index in range(count):
            sums[index] += float_of_fp16(halves[index])
    else:
        values = float32_at(row + 4 * start, count)
        for index in range(count):
            sums[index] += values[index]


@inlined
def set_block(sums, row, start, count, dtype):
    """sums[:count] = row[start : start + count]."""
    if dtype == BF16:
        halves = uint16_at(row + 2 * start, count)
        for index in range(count):
            sums[index] = float_of_bf16(halves[index])
    elif dtype == FP16:
        halves = uint16_at(row + 2 * start, count)
        for index in range(count):
            sums[index] = float_of_fp16(halves[index])
    else:
        values = float32_at(row + 4 * start, count)
        for index in range(count):
            sums[index] = values[index]


@inlined
def store_block(row, start, sums, count, dtype):
    """row[start : start + count] = sums[:count], rounded to nearest even."""
    if dtype == BF16:
        halves = uint16_at(row + 2 * start, count)
        for index in range(count):
            halves[index] = bf16_of_float(sums[index])
    elif dtype == FP16:
        halves = uint16_at(row + 2 * start, count)
        for index in range(count):
            halves[index] = fp16_of_float(sums[index])
    else:
        values = float32_at(row + 4 * start, count)
        for index in range(count):
            values[index] = sums[index]


@inlined
def sum_rows(out, rows, num_rows, bias_0, bias_1, hidden, dtype, sums):
    """out = bias_0 + bias_1 + rows[0] + rows[1] + ...; an address of 0 means no bias (then from +0.0)."""
    for start in range(0, hidden, BLOCK):
        count = min(BLOCK, hidden - start)
        if bias_0:
            set_block(sums, bias_0, start, count, dtype)
        else:
            for index in range(count):
                sums[index] = np.float32(0.0)
        if bias_1:
            add_block(sums, bias_1, start, count, dtype)
        for row in range(num_rows):
            add_block(sums, rows[row], start, count, dtype)
        store_block(out, start, sums, count, dtype)


@inlined
def sum_weights(out, rows, num_rows, num_topk):
    """out[k] = rows[0][k] + rows[1][k] + ..., from +0.0, in float32."""
    for choice in range(num_topk):
        out[choice] = np.float32(0.0)
    for row in range(num_rows):
        weights = float32_at(rows[row], num_topk)
        for choice in range(num_topk):
            out[choice] += weights[choice]


@inlined
def rank_at(order, token, index):
    """The rank whose row of a token is added at place `index`; `order` is that of `Sums`.

    Example:
        With the order [[2, 0, 1]], rank 2 comes first; without an order it is rank 0.
    """
    return order[token, index] if order.shape[0] else index


@inlined
def scratch_bytes(num_rows):
    """The bytes of a `Scratch` for at most `num_rows` rows."""
    return 16 * num_rows + 4 * BLOCK


@inlined
def scratch_at(address, num_rows):
    """A `Scratch` in this memory. Its arrays have no reference counts, which would cost time per row."""
    weights_at, sums_at = address + 8 * num_rows, address + 16 * num_rows
    return Scratch(int64_at(address, num_rows), int64_at(weights_at, num_rows), float32_at(sums_at, BLOCK))


@inlined
def sum_token(token, num_rows, sums, scratch):
    """Sum the rows that `scratch` names, and their weights, to the place of a token.

    Example:
        With the rows [1, 2] and [3, 4] and no bias, row `token` of the sums becomes [4, 6].
    """
    start = token * sums.row_bytes
    bias_0 = sums.bias_0 + start if sums.bias_0 else 0
    bias_1 = sums.bias_1 + start if sums.bias_1 else 0
    sum_rows(sums.x + start, scratch.rows, num_rows, bias_0, bias_1, sums.hidden, sums.dtype, scratch.sums)
    num_topk = sums.topk_weights.shape[1]
    if num_topk:
        sum_weights(sums.topk_weights[token], scratch.weights, num_rows, num_topk)


@kernel("void(int64, int64, int32[:,::1], int64[::1], int64[::1], Sums)")
def pull_and_sum(first_token, end_token, send_head, x_of, weights_of, sums):
    """Read the rows of each token in place at the peers, and sum them in the order of `sums`.

    `x_of[r]` is the address of rank r's rows. Top-k weights are summed likewise, per choice.

    Example:
        With send_head [[0, 2], [-1, 3]] the first row of the sums is row 0 of rank 0 plus row 2 of rank 1,
        and the second one is row 3 of rank 1.
    """
    sums = borrowed(Sums, sums)
    num_ranks = x_of.shape[0]
    num_topk = sums.topk_weights.shape[1]
    scratch = scratch_at(stack_bytes(scratch_bytes(num_ranks)), num_ranks)
    rows, weights = scratch.rows, scratch.weights
    for token in range(first_token, end_token):
        num_rows = 0
        for index in range(num_ranks):
            rank = rank_at(sums.order, token, index)
            row = send_head[token, rank]
            if row >= 0:
                rows[num_rows] = x_of[rank] + row * sums.row_bytes
                weights[num_rows] = weights_of[rank] + 4 * row * num_topk
                num_rows += 1
        sum_token(token, num_rows, sums, scratch)
