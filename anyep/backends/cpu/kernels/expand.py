"""The expanded layout: one row per (token, local expert), grouped by expert, each group aligned.

A rank receives one row per token, however many of the token's experts are its own. From the ids that came
with the rows it works out where each copy goes (`place_by_expert`), and writes the copies (`expand_rows`). A
combine goes the other way: the copies of a token are added up before they leave the rank (`reduce_expanded`).

The row of copy (row, choice) is its position, -1 where the expert is elsewhere. Within an expert, positions
ascend with the rows, which lie in the order (source rank, token).
"""

from __future__ import annotations

from anyep.backends.cpu.kernels.borrow import borrowed
from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.groups import CompactRows, ExpandedRows, Positions, ReducedRows
from anyep.backends.cpu.kernels.memory import (
    copy_row,
    drain_stores,
    fill_with_zeros,
    float32_at,
    int32_at,
    stack_bytes,
    uint32_at,
)
from anyep.backends.cpu.kernels.sums import BLOCK, add_block, set_block, store_block


@inlined
def count_by_expert(ids, num_rows, counts):
    """Count the choices of each local expert among the first rows."""
    counts[:] = 0
    num_experts = counts.shape[0]
    for row in range(num_rows):
        for choice in range(ids.shape[1]):
            expert = ids[row, choice]
            if 0 <= expert < num_experts:
                counts[expert] += 1


@inlined
def aligned(count, alignment):
    return (count + alignment - 1) // alignment * alignment


@kernel("int64(int64[:,::1], int64, int64, int32[::1], int32[::1])")
def count_received(ids, num_rows, alignment, counts, ends):
    """Count the rows of each local expert; `ends` are the inclusive prefix sums of the aligned counts.

    Returns the sum of the aligned counts. An id is this rank's local number of an expert, or -1.

    Example:
        With ids [[0, 1], [1, -1], [0, -1]] and alignment 4: counts [2, 2], ends [4, 8]; it returns 8.
    """
    count_by_expert(ids, num_rows, counts)
    end = 0
    for expert in range(counts.shape[0]):
        end += aligned(counts[expert], alignment)
        ends[expert] = end
    return end


@kernel("int64(int64[:,::1], int64, int64, int32[::1], int32[::1], Positions)")
def place_by_expert(ids, num_rows, alignment, counts, ends, positions):
    """Count the rows of each local expert, and find the position of each choice.

    Returns the rows of the expanded result, which include padding.

    The group of an expert starts at a multiple of `alignment`, and ends at `ends`, without its padding. The
    positions of rows past the received ones are -1.

    Example:
        With ids [[0, 1], [1, -1], [0, -1]] and alignment 4: counts [2, 2], ends [2, 6], positions
        [[0, 4], [5, -1], [1, -1]]; it returns 8.
    """
    positions = borrowed(Positions, positions)
    count_by_expert(ids, num_rows, counts)
    start, num_experts = 0, counts.shape[0]
    for expert in range(num_experts):
        # A cursor, which is at the group's end when all rows have been placed.
        ends[expert] = start
        start += aligned(counts[expert], alignment)
    for row in range(ids.shape[0]):
        of_row = int32_at(positions.address + 4 * row * positions.stride, positions.num_topk)
        for choice in range(positions.num_topk):
            expert = ids[row, choice] if row < num_rows else -1
            of_row[choice] = -1
            if 0 <= expert < num_experts:
                of_row[choice] = ends[expert]
                ends[expert] += 1
    return start


@kernel("void(int64, int64, Positions, CompactRows, ExpandedRows, int64)")
def expand_rows(first_row, end_row, positions, compact, expanded, streaming):
    """Read each row once and write it to all its positions, with its weight for each choice, and its scales.

    Addresses of 0 stand for weights or scales that are not there. A position past the last row is left out.

    Example:
        With positions [[0, 4], [5, -1]], row 0 goes to rows 0 and 4 with its weights 0 and 1, and row 1 to
        row 5 with its weight 0.
    """
    positions = borrowed(Positions, positions)
    compact, expanded = borrowed(CompactRows, compact), borrowed(ExpandedRows, expanded)
    row_bytes, num_topk = compact.row_bytes, positions.num_topk
    for row in range(first_row, end_row):
        of_row = int32_at(positions.address + 4 * row * positions.stride, num_topk)
        for choice in range(num_topk):
            position = of_row[choice]
            if not 0 <= position < expanded.num_rows:
                continue
            copy_row(expanded.x + position * row_bytes, compact.x + row * row_bytes, row_bytes, streaming)
            if expanded.weights:
                weight = float32_at(compact.weights + 4 * (row * num_topk + choice), 1)[0]
                float32_at(expanded.weights + 4 * position, 1)[0] = weight
            if expanded.scales:
                copy_scales_of_row(expanded, position, compact.scales, row, compact.num_scales)
    drain_stores()


@inlined
def copy_scales_of_row(expanded, position, scales, row, num_scales):
    """Copy a row's scales, as words of 4 bytes, to those of a position, which have any strides."""
    of_row = uint32_at(scales + 4 * row * num_scales, num_scales)
    start = expanded.scales + 4 * position * expanded.stride_row
    for scale in range(num_scales):
        uint32_at(start + 4 * scale * expanded.stride_scale, 1)[0] = of_row[scale]


@kernel("void(int64, int64, int64, int32[::1], CompactRows, ExpandedRows)")
def zero_padding(first_expert, end_expert, alignment, ends, compact, expanded):
    """Fill what lies between the end of a group and the start of the next one with zeros: rows, weights and
    scales.

    Example:
        With ends [2, 6] and alignment 4, rows 2, 3, 6 and 7 become 0.
    """
    compact, expanded = borrowed(CompactRows, compact), borrowed(ExpandedRows, expanded)
    for expert in range(first_expert, end_expert):
        first, end = ends[expert], min(aligned(ends[expert], alignment), expanded.num_rows)
        if end <= first:
            continue
        fill_with_zeros(expanded.x + first * compact.row_bytes, (end - first) * compact.row_bytes)
        if expanded.weights:
            fill_with_zeros(expanded.weights + 4 * first, 4 * (end - first))
        if expanded.scales:
            for scale in range(compact.num_scales):
                start = expanded.scales + 4 * scale * expanded.stride_scale
                for row in range(first, end):
                    uint32_at(start + 4 * row * expanded.stride_row, 1)[0] = 0


@kernel("void(int64, int64, Positions, ReducedRows, int64)")
def reduce_expanded(first_row, end_row, positions, rows, streaming):
    """Add up the copies of each row in the order of its choices, in float32, and round once.

    The weight of each choice is gathered, 0 where it has no position. Sums start with the first copy. A row
    with one copy is that copy, bit for bit; one without any is 0.

    Example:
        With positions [[0, 4], [5, -1]] and the values and weights [1, ?, ?, ?, 2, 3], the rows are [3, 3]
        and their weights [[1, 2], [3, 0]].
    """
    positions, rows = borrowed(Positions, positions), borrowed(ReducedRows, rows)
    row_bytes, num_topk = rows.row_bytes, positions.num_topk
    sums = float32_at(stack_bytes(4 * BLOCK), BLOCK)
    for row in range(first_row, end_row):
        of_row = int32_at(positions.address + 4 * row * positions.stride, num_topk)
        num_copies, first = 0, 0
        for choice in range(num_topk):
            position = of_row[choice]
            has_position = 0 <= position < rows.num_rows
            if rows.out_weights:
                weight = float32_at(rows.weights + 4 * position, 1)[0] if has_position else 0.0
                float32_at(rows.out_weights + 4 * (row * num_topk + choice), 1)[0] = weight
            if has_position:
                first = first if num_copies else position
                num_copies += 1
        out = rows.out + row * row_bytes
        if num_copies == 0:
            fill_with_zeros(out, row_bytes)
        elif num_copies == 1:
            copy_row(out, rows.x + first * row_bytes, row_bytes, streaming)
        else:
            sum_copies(out, of_row, rows, sums)
    drain_stores()


@inlined
def sum_copies(out, of_row, rows, sums):
    """out = the sum of the rows at these positions, in their order."""
    for start in range(0, rows.hidden, BLOCK):
        count = min(BLOCK, rows.hidden - start)
        is_first = True
        for choice in range(of_row.shape[0]):
            position = of_row[choice]
            if 0 <= position < rows.num_rows:
                source = rows.x + position * rows.row_bytes
                if is_first:
                    set_block(sums, source, start, count, rows.dtype)
                else:
                    add_block(sums, source, start, count, rows.dtype)
                is_first = False
        store_block(out, start, sums, count, rows.dtype)
