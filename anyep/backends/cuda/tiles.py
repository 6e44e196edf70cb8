"""How the kernels of normal mode cut their work into tiles, and how many warps a program has.

What was fastest on an H200, by the number of ranks: the more receivers a row has, the more there is to write
for each read.
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
    """Tokens, and words of 4 bytes of their rows, that a program moves at a time."""

    tokens: int
    words: int
    warps: int
    stages: int = 1
    """One more than the pieces that are on their way, in rings."""

    def fitting(self, row_words: int) -> RowTile:
        """A tile of more tokens and fewer words, if less of a row's last piece is empty then.

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
    """Tokens, and values of their rows, that a program adds up at a time."""

    tokens: int
    values: int
    warps: int


class RingSumTile(NamedTuple):
    """Rows that are pushed into rings, as in a `RowTile`, and the values of a tile that is added up."""

    pushed: RowTile
    values: int


class Tiles(NamedTuple):
    """Those of a Buffer's calls."""

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
"""By the largest number of ranks that they are for."""


def tiles_for(num_ranks: int, has_windows: bool) -> Tiles:
    """The tiles of calls between so many ranks.

    With windows most calls have no use for rings. Without pieces on their way a kernel takes no shared
    memory, and the next one need not wait until an SM has another share of it.
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
    """A tile of tokens, halved until a ring has as many slots.

    >>> at_most(16, 5)
    4
    """
    while tile_tokens > ring_rows:
        tile_tokens //= 2
    return tile_tokens


def block_of(count: int) -> int:
    """A power of two that holds so many, 0 for none.

    >>> block_of(0), block_of(1), block_of(8), block_of(9)
    (0, 2, 8, 16)
    """
    return max(2, 1 << (count - 1).bit_length()) if count else 0
