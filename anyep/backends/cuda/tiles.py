"""How the kernels of normal mode split their work into tiles, and how many warps a program has.

The values were measured to be the fastest on an H200, by the number of ranks: the more receivers a row has,
the more writes there are for each read.
"""

from __future__ import annotations

from typing import Final, NamedTuple

COPY_WARPS: Final = 32
COPY_WORDS: Final = 16384
CHUNK_TOKENS: Final = 256
COUNTED_TOKENS: Final = 2048
COUNTED_EXPERTS: Final = 32
COUNT_WARPS: Final = 32
HEAD_TOKENS: Final = 128
DIGEST_TILE: Final = 2048
DIGEST_WARPS: Final = 16
UNPACK_BLOCK: Final = 1024


class RowTile(NamedTuple):
    """The tokens, and the 4-byte words of their rows, that a program moves at a time."""

    tokens: int
    words: int
    warps: int
    stages: int = 1
    """One more than the number of pieces in flight; used in rings."""

    def fitting(self, row_words: int) -> RowTile:
        """A tile of more tokens and fewer words, if that leaves less of a row's last piece empty.

        >>> RowTile(32, 512, 32).fitting(1792)
        RowTile(tokens=64, words=256, warps=32, stages=1)
        >>> RowTile(32, 512, 32).fitting(3584).words
        512
        """
        half = self.words // 2
        if -(-row_words // half) * half < -(-row_words // self.words) * self.words:
            return RowTile(2 * self.tokens, half, self.warps, self.stages)
        return self


class SumTile(NamedTuple):
    """The tokens, and the values of their rows, that a program adds up at a time."""

    tokens: int
    values: int
    warps: int


class RingSumTile(NamedTuple):
    """Rows that are pushed into rings, as in a `RowTile`, and the values of a tile that is added up."""

    pushed: RowTile
    values: int


class Tiles(NamedTuple):
    """The tiles of a Buffer's calls."""

    dispatch: RowTile
    combine: SumTile
    ring_dispatch: RowTile
    ring_combine: RingSumTile


TILES: Final = {
    2: Tiles(
        RowTile(32, 512, 32),
        SumTile(32, 1024, 32),
        RowTile(32, 512, 32),
        RingSumTile(RowTile(32, 512, 32), 1024),
    ),
    4: Tiles(
        RowTile(8, 512, 16),
        SumTile(8, 1024, 32),
        RowTile(32, 512, 32, stages=3),
        RingSumTile(RowTile(32, 512, 32), 256),
    ),
    8: Tiles(
        RowTile(8, 512, 16),
        SumTile(16, 1024, 32),
        RowTile(16, 512, 16, stages=4),
        RingSumTile(RowTile(16, 512, 16, stages=4), 256),
    ),
}
"""By the largest number of ranks that the tiles are for."""


NODE_DISPATCH: Final = RowTile(16, 512, 16, stages=4)
NODE_COMBINE: Final = SumTile(16, 256, 16)
"""Between nodes; larger tiles of sums do not fit into registers, with 8 ranks per node. Not measured yet."""


def tiles_for(num_ranks: int, has_windows: bool) -> Tiles:
    """The tiles of calls between `num_ranks` ranks.

    With windows, most calls do not use rings. The ring kernels then have no pieces in flight and take no
    shared memory, so the next kernel need not wait until an SM has changed its share of it.
    """
    tiles = TILES[min((most for most in TILES if most >= num_ranks), default=max(TILES))]
    if not has_windows:
        return tiles
    pushed, values = tiles.ring_combine
    return tiles._replace(
        ring_dispatch=tiles.ring_dispatch._replace(stages=1),
        ring_combine=RingSumTile(pushed._replace(stages=1), values),
    )


def at_most(tile_tokens: int, ring_rows: int) -> int:
    """The number of tokens of a tile, halved until it is at most `ring_rows`.

    >>> at_most(16, 5)
    4
    """
    while tile_tokens > ring_rows:
        tile_tokens //= 2
    return tile_tokens


def block_of(count: int) -> int:
    """A power of two that is at least `count` (and at least 2); 0 for none.

    >>> block_of(0), block_of(1), block_of(8), block_of(9)
    (0, 2, 8, 16)
    """
    return max(2, 1 << (count - 1).bit_length()) if count else 0
