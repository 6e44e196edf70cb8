"""The tiles that `anyep tune` tries, and which of them win. Nothing here needs torch.

Every tile but the built-in one is measured once, and the fastest of them then compete with it: in several
rounds, in which all are measured one after the other, in turns from the first to the last and back. A tile's
gain is the median of its gains of the rounds. So the built-in tile is measured next to every finalist, and a
machine that gets faster or slower meanwhile favours none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple, TypeVar

from anyep.backends.cuda.tiles import RowTile, SumTile, Tiles
from anyep.backends.cuda.tuned import Trial

KERNELS: Final = ("dispatch", "combine")
LEAST_GAIN: Final = 1.02
"""A tile that is less than this faster than the built-in one does not take its place."""
FINALISTS: Final = 2
ROUNDS: Final = 4
"""An even number: in the order of every second round, what follows the built-in tile comes before it."""
ROW_TILES: Final = (
    RowTile(8, 512, 16),
    RowTile(32, 512, 32),
    RowTile(16, 512, 16),
    RowTile(16, 512, 32),
    RowTile(8, 512, 8),
    RowTile(16, 512, 8),
    RowTile(4, 512, 8),
    RowTile(4, 1024, 16),
    RowTile(8, 1024, 16),
    RowTile(8, 1024, 32),
    RowTile(16, 1024, 32),
    RowTile(16, 256, 8),
    RowTile(64, 256, 32),
)
SUM_TILES: Final = (
    SumTile(16, 1024, 32),
    SumTile(32, 1024, 32),
    SumTile(8, 1024, 32),
    SumTile(8, 1024, 16),
    SumTile(16, 1024, 16),
    SumTile(4, 1024, 8),
    SumTile(8, 1024, 8),
    SumTile(8, 2048, 32),
    SumTile(16, 2048, 32),
    SumTile(4, 2048, 16),
    SumTile(16, 512, 16),
    SumTile(32, 512, 32),
    SumTile(64, 512, 32),
)
Tile = RowTile | SumTile
AnyTile = TypeVar("AnyTile", RowTile, SumTile)


class Tried(NamedTuple):
    """A tile that was measured by itself: seconds of each run of calls; or why it does not run."""

    kernel: str
    tile: Tile
    is_builtin: bool
    seconds: Sequence[float]
    problem: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Choice(NamedTuple):
    """A tile in the place of the built-in one, or None; and how much faster it is."""

    tile: Tile | None
    gain: float


def in_words(tile: Tile) -> str:
    """
    >>> in_words(RowTile(8, 512, 16)), in_words(SumTile(16, 1024, 32))
    ('8 tokens x 512 words, 16 warps', '16 tokens x 1024 values, 32 warps')
    """
    unit, columns = ("words", tile.words) if isinstance(tile, RowTile) else ("values", tile.values)
    return f"{tile.tokens} tokens x {columns} {unit}, {tile.warps} warps"


def trials(builtin: Tiles, row_words: int, most: int | None = None) -> list[Trial]:
    """What to try, the built-in tiles first: a tile of each kind at a time, with rows of so many words; at
    most `most` of each kind beside the built-in one.

    A dispatch may use another tile than it was given (`RowTile.fitting`): of tiles that come to the same, the
    first one is tried.
    """
    rows = _others(ROW_TILES, builtin.dispatch, lambda tile: tile.fitting(row_words))[:most]
    sums = _others(SUM_TILES, builtin.combine, lambda tile: tile)[:most]
    pairs = zip_longest(rows, sums)
    return [
        Trial(builtin.dispatch, builtin.combine),
        *(Trial(row or builtin.dispatch, total or builtin.combine) for row, total in pairs),
    ]


def _others(tiles: Iterable[AnyTile], builtin: AnyTile, used: Callable[[AnyTile], Hashable]) -> list[AnyTile]:
    found: dict[Hashable, AnyTile] = {}
    for tile in tiles:
        found.setdefault(used(tile), tile)
    return [tile for key, tile in found.items() if key != used(builtin)]


def finalists(tried: Sequence[Tried], most: int = FINALISTS) -> list[Tile]:
    """The fastest tiles of one kernel, if they are faster than the slower time of the built-in one."""
    limit = max(each.median for each in tried if each.is_builtin)
    able = [each for each in tried if not each.is_builtin and not each.problem and each.median < limit]
    return [each.tile for each in sorted(able, key=lambda each: each.median)[:most]]


def choose(tiles: Sequence[Tile], builtin: Sequence[float], others: Sequence[Sequence[float]]) -> Choice:
    """The fastest of some tiles, if it is enough faster than the built-in one. `others` has the seconds of
    each tile by round, `builtin` those of the built-in one.

    >>> tiles = RowTile(8, 512, 16), RowTile(16, 512, 32)
    >>> choose(tiles, [1.0, 2.0], [[0.99, 1.98], [0.8, 1.6]])
    Choice(tile=RowTile(tokens=16, words=512, warps=32, stages=1), gain=1.25)
    >>> choose(tiles[:1], [1.0, 2.0], [[0.99, 1.98]])
    Choice(tile=None, gain=1.0)
    """
    best = Choice(None, 1.0)
    for tile, seconds in zip(tiles, others, strict=True):
        gain = statistics.median(before / after for before, after in zip(builtin, seconds, strict=True))
        if gain >= LEAST_GAIN and gain > best.gain:
            best = Choice(tile, gain)
    return best
