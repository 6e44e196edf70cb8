"""The expanded layout: one row per (token, local expert), grouped by expert, each group aligned.

A rank receives one row per token, however many of the token's experts are its own. From the ids that came
with the rows it works out where each copy goes: `count_tiles`, `add_tiles`, `place_by_expert`. `expand_rows`
writes the copies. A combine goes the other way: `reduce_expanded` adds up the copies of a token before they
leave the rank. The results are those of the CPU's kernels.

The row of copy (row, choice) is its position, -1 where the expert is elsewhere. Within an expert, positions
ascend with the rows, which lie in the order (source rank, token). The number of received rows may be known on
the GPU only; the host gives the room for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyep.backends.cuda.kernels.floats import BF16, FP16, FP32, as_floats, bf16_of_float, fp16_of_float
from anyep.backends.cuda.kernels.groups import CompactRows, ExpandedRows, Positions, Received


@triton.jit
def num_received(received):
    """The number of received rows."""
    count = tl.load(received.counts + received.at).to(tl.int32)
    return tl.maximum(tl.minimum(count, received.room.to(tl.int32)), 0)


@triton.jit
def chosen_experts(ids, rows, is_row, choice, num_topk, experts):
    """Whether a choice of some rows is each of some experts, as 0 or 1.

    Example:
        Of rows with the choices 3 and -1, the experts [2, 3] are [[0, 1], [0, 0]].
    """
    chosen = tl.load(ids + rows.to(tl.int64) * num_topk + choice, mask=is_row, other=-1)
    return (chosen[:, None] == experts[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["received", "num_topk", "num_experts"])
def count_tiles(
    ids,
    received: Received,
    tile_counts,
    num_topk,
    num_experts,
    TILE_ROWS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
):
    """Count the choices of each local expert in each tile of `TILE_ROWS` rows.

    There is one program per tile and `EXPERT_BLOCK` experts. An id is this rank's local number of an expert,
    or -1.

    Example:
        With tiles of 2 rows, ids [[0, 1], [1, -1], [0, -1]] give the counts [[1, 2], [1, 0]].
    """
    tile = tl.program_id(0)
    rows = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = rows < num_received(received)
    experts = tl.program_id(1) * EXPERT_BLOCK + tl.arange(0, EXPERT_BLOCK)
    chosen = tl.zeros((TILE_ROWS, EXPERT_BLOCK), tl.int32)
    for choice in range(num_topk):
        chosen += chosen_experts(ids, rows, is_row, choice, num_topk, experts)
    counts = tl.sum(chosen, axis=0)
    tl.store(tile_counts + tile * num_experts + experts, counts, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_tiles", "num_experts"])
def add_tiles(
    tile_counts,
    before,
    counts,
    num_tiles,
    num_experts,
    TILE_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
):
    """Add up the tiles' counts: `before` gets the sums of the tiles before each, `counts` those of all.

    There is one program per `EXPERT_BLOCK` experts; it looks at `TILE_BLOCK` tiles at a time.

    Example:
        Tile counts [[1, 2], [1, 0]] give before [[0, 0], [1, 2]] and counts [2, 2].
    """
    experts = tl.program_id(0) * EXPERT_BLOCK + tl.arange(0, EXPERT_BLOCK)
    is_expert = experts < num_experts
    total = tl.zeros((EXPERT_BLOCK,), tl.int32)
    for start in range(0, num_tiles, TILE_BLOCK):
        tiles = start + tl.arange(0, TILE_BLOCK)
        at = tiles[:, None] * num_experts + experts[None, :]
        is_count = (tiles < num_tiles)[:, None] & is_expert[None, :]
        of_tile = tl.load(tile_counts + at, mask=is_count, other=0)
        tl.store(before + at, total[None, :] + tl.cumsum(of_tile, axis=0) - of_tile, mask=is_count)
        total += tl.sum(of_tile, axis=0)
    tl.store(counts + experts, total, mask=is_expert)


@triton.jit(do_not_specialize=["received", "positions", "num_experts", "alignment"])
def place_by_expert(
    ids,
    received: Received,
    before,
    counts,
    ends,
    positions: Positions,
    num_experts,
    alignment,
    EXPANDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    ALL_EXPERTS: tl.constexpr,
):
    """Find the position of each choice, and where each expert's rows end.

    The group of an expert starts at a multiple of `alignment`, and ends at `ends`, without its padding. The
    positions of rows past the received ones are -1. There is one program per tile and `EXPERT_BLOCK` experts;
    `ALL_EXPERTS` is a power of two that holds all. If EXPANDS is not set, `ends` are the inclusive prefix
    sums of the aligned counts, there are no positions, and one tile is enough.

    Example:
        With ids [[0, 1], [1, -1], [0, -1]], tiles of 2 rows, before [[0, 0], [1, 2]], counts [2, 2] and
        alignment 4: ends [2, 6] and positions [[0, 4], [5, -1], [1, -1]]. Not expanded, ends are [4, 8].
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    every = tl.arange(0, ALL_EXPERTS)
    earlier = tl.load(counts + every, mask=(every < num_experts) & (every < block * EXPERT_BLOCK), other=0)
    experts = block * EXPERT_BLOCK + tl.arange(0, EXPERT_BLOCK)
    is_expert = experts < num_experts
    own = tl.load(counts + experts, mask=is_expert, other=0)
    padded = (own + alignment - 1) // alignment * alignment
    first = tl.sum((earlier + alignment - 1) // alignment * alignment, axis=0)
    starts = first + tl.cumsum(padded, axis=0) - padded
    if tile == 0:
        tl.store(ends + experts, starts + (own if EXPANDS else padded), mask=is_expert)
    if EXPANDS:
        rows = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        is_row = rows < num_received(received)
        chosen = tl.zeros((TILE_ROWS, EXPERT_BLOCK), tl.int32)
        num_topk = positions.num_topk
        for choice in range(num_topk):
            chosen += chosen_experts(ids, rows, is_row, choice, num_topk, experts)
        starts += tl.load(before + tile * num_experts + experts, mask=is_expert, other=0)
        place = starts[None, :] + tl.cumsum(chosen, axis=0) - chosen
        to = positions.words + positions.first + rows.to(tl.int64) * positions.stride
        for choice in range(num_topk):
            of_choice = chosen_experts(ids, rows, is_row, choice, num_topk, experts)
            of_choice = tl.where(is_expert[None, :], of_choice, 0)
            is_here = tl.sum(of_choice, axis=1) > 0
            tl.store(to + choice, tl.sum(of_choice * place, axis=1), mask=is_here)
            # A token that names an expert twice has two rows there.
            place += of_choice
            chosen_id = tl.load(ids + rows.to(tl.int64) * num_topk + choice, mask=is_row, other=-1)
            is_none = (chosen_id < 0) | (chosen_id >= num_experts)
            if block == 0:
                is_stored = is_none & (rows < received.room)
                tl.store(to + choice, tl.full((TILE_ROWS,), -1, tl.int32), mask=is_stored)


@triton.jit(do_not_specialize=["received", "positions", "compact", "expanded", "num_experts", "alignment"])
def expand_rows(
    received: Received,
    positions: Positions,
    compact: CompactRows,
    expanded: ExpandedRows,
    ends,
    row_words,
    num_experts,
    alignment,
    HAS_WEIGHTS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    PADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Read each row once and write it to all its positions, with its weight for each choice, and its scales.

    x is read as words of 4 bytes. A program takes tiles of `TILE_ROWS` rows, and a tile in pieces of
    `TILE_WORDS` columns. `SCALE_BLOCK` is a power of two that holds a row's scales, 0 if there are none.
    `UNROLLED` choices are handled at a time. With PADS the padding of each group becomes 0.

    Example:
        With positions [[0, 4], [5, -1]], row 0 goes to rows 0 and 4 with its weights 0 and 1, and row 1 to
        row 5 with its weight 0. With ends [2, 6] and alignment 4, padding is rows 2, 3, 6 and 7.
    """
    num_rows = num_received(received)
    num_pieces = tl.cdiv(row_words, TILE_WORDS)
    num_tiles = tl.cdiv(num_rows, TILE_ROWS) * num_pieces
    columns = tl.arange(0, TILE_WORDS)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        rows = tile // num_pieces * TILE_ROWS + tl.arange(0, TILE_ROWS)
        is_row = rows < num_rows
        rows = rows.to(tl.int64)
        words = (tile % num_pieces * TILE_WORDS + columns).to(tl.int32)
        is_word = words < row_words
        source = compact.x + rows[:, None] * row_words + words[None, :]
        values = tl.load(source, mask=is_row[:, None] & is_word[None, :])
        is_first = tile % num_pieces == 0
        if SCALE_BLOCK:
            scale = tl.arange(0, SCALE_BLOCK)
            is_scale = is_first & (scale < compact.num_scales)
            at = rows[:, None] * compact.num_scales + scale[None, :]
            carried = tl.load(compact.scales + at, mask=is_row[:, None] & is_scale[None, :])
        for first in range(0, positions.num_topk, UNROLLED):
            for offset in tl.static_range(UNROLLED):
                choice = first + offset
                of_choice = positions.first + rows * positions.stride + choice
                is_choice = is_row & (choice < positions.num_topk)
                position = tl.load(positions.words + of_choice, mask=is_choice, other=-1)
                position = position.to(tl.int64)
                is_there = (position >= 0) & (position < expanded.num_rows)
                target = expanded.x + position[:, None] * row_words + words[None, :]
                tl.store(target, values, mask=is_there[:, None] & is_word[None, :])
                if HAS_WEIGHTS:
                    is_stored = is_there & is_first
                    weight = tl.load(compact.weights + rows * positions.num_topk + choice, mask=is_stored)
                    tl.store(expanded.weights + position, weight, mask=is_stored)
                if SCALE_BLOCK:
                    to = position[:, None] * expanded.stride_row + scale[None, :] * expanded.stride_scale
                    tl.store(expanded.scales + to, carried, mask=is_there[:, None] & is_scale[None, :])
    if PADS:
        pad_groups(
            compact,
            expanded,
            ends,
            row_words,
            num_experts,
            alignment,
            HAS_WEIGHTS,
            SCALE_BLOCK,
            TILE_ROWS,
            TILE_WORDS,
        )


@triton.jit
def pad_groups(
    compact,
    expanded,
    ends,
    row_words,
    num_experts,
    alignment,
    HAS_WEIGHTS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Fill what lies between the end of a group and the start of the next one with zeros."""
    num_pieces = tl.cdiv(row_words, TILE_WORDS)
    # Last programs first: they had fewer tiles.
    first_share = tl.num_programs(0) - 1 - tl.program_id(0)
    for share in range(first_share, num_experts * num_pieces, tl.num_programs(0)):
        end = tl.load(ends + share // num_pieces)
        start_of_next = tl.minimum((end + alignment - 1) // alignment * alignment, expanded.num_rows)
        words = share % num_pieces * TILE_WORDS + tl.arange(0, TILE_WORDS)
        is_word = words < row_words
        is_first = share % num_pieces == 0
        for start in range(end, start_of_next, TILE_ROWS):
            rows = start + tl.arange(0, TILE_ROWS)
            is_row = rows < start_of_next
            rows = rows.to(tl.int64)
            target = expanded.x + rows[:, None] * row_words + words[None, :]
            zeros = tl.zeros((TILE_ROWS, TILE_WORDS), tl.int32)
            tl.store(target, zeros, mask=is_row[:, None] & is_word[None, :])
            if HAS_WEIGHTS:
                none = tl.zeros((TILE_ROWS,), tl.float32)
                tl.store(expanded.weights + rows, none, mask=is_row & is_first)
            if SCALE_BLOCK:
                scale = tl.arange(0, SCALE_BLOCK)
                is_scale = is_row[:, None] & (is_first & (scale < compact.num_scales))[None, :]
                to = rows[:, None] * expanded.stride_row + scale[None, :] * expanded.stride_scale
                tl.store(expanded.scales + to, tl.zeros((TILE_ROWS, SCALE_BLOCK), tl.int32), mask=is_scale)


@triton.jit(do_not_specialize=["received", "positions", "room"])
def reduce_expanded(
    received: Received,
    positions: Positions,
    x,
    weights,
    out,
    out_weights,
    hidden,
    room: tl.int64,
    DTYPE: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    IN_HARDWARE: tl.constexpr = True,
):
    """Add up the copies of each row in the order of its choices, in float32, and round once.

    The weight of each choice is gathered, 0 where it has no position. Sums start with the first copy. A row
    with one copy is that copy, bit for bit; one without any is 0. x has `room` rows. `TOPK_BLOCK` is a power
    of two that holds a row's choices, 0 if there are no weights, which are gathered `CHUNK_ROWS` at a time.

    Example:
        With positions [[0, 4], [5, -1]] and the values and weights [1, ?, ?, ?, 2, 3], the rows are [3, 3]
        and their weights [[1, 2], [3, 0]].
    """
    num_rows = num_received(received)
    num_pieces = tl.cdiv(hidden, TILE_VALUES)
    num_tiles = tl.cdiv(num_rows, TILE_ROWS) * num_pieces
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        rows = tile // num_pieces * TILE_ROWS + tl.arange(0, TILE_ROWS)
        is_row = rows < num_rows
        rows = rows.to(tl.int64)
        columns = (tile % num_pieces * TILE_VALUES + tl.arange(0, TILE_VALUES)).to(tl.int32)
        is_column = columns < hidden
        add_copies(positions, x, out, rows, is_row, columns, is_column, hidden, room, DTYPE, IN_HARDWARE)
    if TOPK_BLOCK:
        gather_weights(positions, weights, out_weights, num_rows, room, TOPK_BLOCK, CHUNK_ROWS)


@triton.jit
def add_copies(
    positions,
    x,
    out,
    rows,
    is_row,
    columns,
    is_column,
    hidden,
    room,
    DTYPE: tl.constexpr,
    IN_HARDWARE: tl.constexpr,
):
    """Add up one piece of the copies of some rows.

    Example:
        With positions [[3], [-1]], the piece of row 3 goes to row 0 as it is, and zeros go to row 1.
    """
    target = out + rows[:, None] * hidden + columns[None, :]
    is_value = is_row[:, None] & is_column[None, :]
    nothing = tl.zeros((rows.shape[0], columns.shape[0]), tl.uint32)
    # Where nothing is added to -0.0, it changes no sum.
    sums = (nothing + 0x80000000).to(tl.float32, bitcast=True)
    bits = nothing
    num_copies = tl.zeros((rows.shape[0],), tl.int32)
    for choice in range(positions.num_topk):
        at = positions.first + rows * positions.stride + choice
        position = tl.load(positions.words + at, mask=is_row, other=-1).to(tl.int64)
        is_there = (position >= 0) & (position < room)
        is_copy = is_there[:, None] & is_column[None, :]
        values = tl.load(x + position[:, None] * hidden + columns[None, :], mask=is_copy, other=0)
        sums += as_floats(values, is_copy, DTYPE)
        num_copies += is_there.to(tl.int32)
        if DTYPE == FP32:
            bits |= values.to(tl.uint32, bitcast=True)
        else:
            bits |= values.to(tl.uint32)
    is_sum = num_copies[:, None] > 1
    if DTYPE == BF16:
        rounded = bf16_of_float(sums, IN_HARDWARE)
        tl.store(target, tl.where(is_sum, rounded, bits.to(tl.uint16)), mask=is_value)
    elif DTYPE == FP16:
        rounded = fp16_of_float(sums)
        tl.store(target, tl.where(is_sum, rounded, bits.to(tl.uint16)), mask=is_value)
    else:
        single = bits.to(tl.float32, bitcast=True)
        tl.store(target, tl.where(is_sum, sums, single), mask=is_value)


@triton.jit
def gather_weights(
    positions, weights, out_weights, num_rows, room, TOPK_BLOCK: tl.constexpr, CHUNK_ROWS: tl.constexpr
):
    """Put the weight of each copy back to its row and choice; 0 where there is no copy.

    Example:
        With positions [[1, -1]] and the weights [2, 3], row 0 has the weights [3, 0].
    """
    choices = tl.arange(0, TOPK_BLOCK)
    is_choice = (choices < positions.num_topk)[None, :]
    # Last programs first: they had fewer tiles.
    first_chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    for chunk in range(first_chunk, tl.cdiv(num_rows, CHUNK_ROWS), tl.num_programs(0)):
        rows = chunk * CHUNK_ROWS + tl.arange(0, CHUNK_ROWS)
        is_weight = (rows < num_rows)[:, None] & is_choice
        rows = rows.to(tl.int64)
        at = positions.first + rows[:, None] * positions.stride + choices[None, :]
        position = tl.load(positions.words + at, mask=is_weight, other=-1).to(tl.int64)
        is_copy = (position >= 0) & (position < room)
        found = tl.load(weights + position, mask=is_copy, other=0.0)
        tl.store(out_weights + rows[:, None] * positions.num_topk + choices[None, :], found, mask=is_weight)
