"""What `anyep tune` measures and finds. Nothing here needs torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from anyep.backends.cuda.tiles import RowTile, SumTile
from anyep.backends.cuda.tuned import Entry, Key, Measured, Rates
from anyep.cli.bench.records import Setup, fewest_sms
from anyep.cli.tune.candidates import KERNELS, Choice, Tile, Tried
from anyep.version import __version__

UNKNOWN: Final = "unknown"


@dataclass(frozen=True)
class Job:
    """What is tried: calls like those of `anyep bench`, and how many tiles of each kind."""

    setup: Setup
    most_candidates: int | None = None


@dataclass(frozen=True)
class Found:
    """What the ranks have found together."""

    gpus: tuple[str, ...]
    """The names of the GPUs of all ranks, each name once."""
    ranks_on_gpu: int
    sms: int
    """Of the calls by which tiles were compared."""
    num_bytes: float
    """Bytes of rows that a rank receives, on average."""
    tried: Sequence[Tried]
    choices: Mapping[str, Choice]
    """By kernel."""
    builtin_seconds: Mapping[str, float]
    """Of a call with the built-in tile, by kernel."""
    by_sms: Mapping[str, Mapping[int, float]]
    """GB/s per rank with the chosen tiles, by kernel and number of SMs."""

    def gbps(self, seconds: float) -> float:
        return self.num_bytes / seconds / 1e9

    def rates(self, kernel: str) -> Rates:
        before = self.gbps(self.builtin_seconds[kernel])
        return Rates(before, before * self.choices[kernel].gain)

    def enough_sms(self, kernel: str) -> int:
        return fewest_sms(self.by_sms[kernel])

    @property
    def recommended_sms(self) -> int:
        """The fewest SMs that are enough for both kernels."""
        return max(self.enough_sms(kernel) for kernel in KERNELS)


def entries_of(found: Found, setup: Setup) -> list[Entry]:
    """What is stored: an entry for each kind of GPU."""
    row_tile, sum_tile = (found.choices[kernel].tile for kernel in KERNELS)
    assert not isinstance(row_tile, SumTile)
    assert not isinstance(sum_tile, RowTile)
    measured = Measured(
        datetime.now(UTC).isoformat(timespec="seconds"),
        setup.tokens,
        setup.hidden,
        setup.topk,
        setup.experts,
        found.sms,
        _version("torch"),
        _version("triton"),
        __version__,
    )
    return [
        Entry(
            Key(gpu, setup.ranks, found.ranks_on_gpu),
            row_tile,
            sum_tile,
            found.recommended_sms,
            found.rates("dispatch"),
            found.rates("combine"),
            measured,
        )
        for gpu in found.gpus
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def as_json(found: Found, setup: Setup, file: str | None) -> dict[str, Any]:
    """All of it, for programs; `file` is where it was stored."""
    sizes = {
        name: getattr(setup, name) for name in ("ranks", "tokens", "hidden", "topk", "experts", "repeats")
    }
    return {
        "gpus": list(found.gpus),
        "ranks_on_gpu": found.ranks_on_gpu,
        **sizes,
        "sms": found.sms,
        "candidates": [_tried_as_json(found, tried) for tried in found.tried],
        "chosen": {kernel: _choice_as_json(found, kernel) for kernel in KERNELS},
        "by_sms": [
            {"sms": sms, **{f"{kernel}_gbps": found.by_sms[kernel][sms] for kernel in KERNELS}}
            for sms in found.by_sms[KERNELS[0]]
        ],
        "recommended_sms": found.recommended_sms,
        "file": file,
    }


def _tried_as_json(found: Found, tried: Tried) -> dict[str, Any]:
    return {
        "kernel": tried.kernel,
        "tile": tile_as_json(tried.tile),
        "builtin": tried.is_builtin,
        "median_s": None if tried.problem else tried.median,
        "gbps": None if tried.problem else found.gbps(tried.median),
        "problem": tried.problem,
    }


def _choice_as_json(found: Found, kernel: str) -> dict[str, Any]:
    tile, rates = found.choices[kernel].tile, found.rates(kernel)
    return {
        "tile": tile_as_json(tile) if tile else None,
        "gbps_before": rates.before,
        "gbps_after": rates.after,
        "gain": rates.gain,
    }


def tile_as_json(tile: Tile) -> dict[str, int]:
    return {name: value for name, value in tile._asdict().items() if name != "stages"}
