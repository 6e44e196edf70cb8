"""Buffers with tile sizes that were stored for their machine: the same bits, whatever tiles each rank has."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from anyep import Config
from anyep.api.buffer import Buffer
from anyep.backends.cuda import tuned
from anyep.backends.cuda.tiles import RowTile, SumTile, tiles_for
from anyep.backends.cuda.tuned import Entry, Key, Measured, Rates
from tests.support.cases import NVL_BYTES, Case, check_case
from tests.support.places import Place
from tests.support.world import RankContext

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install 'anyep[cuda]'"
)
CONFIG = Config(4, 2, 5)
CASES = (
    Case((5, 9), hidden=64, config=CONFIG),
    Case((20, 3), hidden=704, dtype="uint8", config=CONFIG, num_scales=3),
    Case((7, 6), hidden=1032, dtype="float32", config=CONFIG, combine_weights=True),
    Case((0, 4), hidden=264, config=CONFIG, num_biases=2, combine_from="combine buffer"),
    Case((6, 6), hidden=264, config=CONFIG, combine_from="other memory", worst=True),
)
TILES_OF_RANKS = (
    (RowTile(1, 64, 1), SumTile(2, 64, 1)),
    (RowTile(8, 256, 4), SumTile(4, 128, 2)),
)
MEASURED = Measured("2026-11-19T06:00:00+00:00", 4096, 7168, 8, 256, 16, "2.11.0", "3.6.0", "0.2.0")


def check_with_tiles(context: RankContext, folder: str, cases: tuple[Case, ...]) -> None:
    """Every rank has a cache folder of its own, with other tiles in it."""
    base = Path(folder, str(context.rank))
    row_tile, sum_tile = TILES_OF_RANKS[context.rank]
    key = Key("simulated", context.num_ranks, context.num_ranks)
    entry = Entry(key, row_tile, sum_tile, 12, Rates(1.0, 2.0), Rates(1.0, 2.0), MEASURED)
    with mock.patch.dict("os.environ", ANYEP_CACHE_DIR=str(base)):
        tuned.store([entry])
        buffer = Buffer(context.group, NVL_BYTES, device="cuda")
    with buffer:
        assert buffer.runtime is not None
        tiles = buffer.runtime.normal.ops.rows._tiles  # type: ignore[attr-defined]
        builtin = tiles_for(context.num_ranks, has_windows=True)
        assert tiles == builtin._replace(dispatch=row_tile, combine=sum_tile)
        for case in cases:
            check_case(context, case, buffer)


def test_results_are_the_same(tmp_path: Path) -> None:
    """The oracle's bits, which are those of the built-in tiles."""
    Place("simulated", 2).world().run(check_with_tiles, str(tmp_path), CASES, timeout=200)


def check_number_of_sms(context: RankContext, folder: str) -> None:
    before = Buffer.num_sms
    check_with_tiles(context, folder, ())
    assert Buffer.num_sms == before


def test_buffers_keep_their_number_of_sms(tmp_path: Path) -> None:
    """The entry recommends another one."""
    Place("simulated", 2).world().run(check_number_of_sms, str(tmp_path))
