"""Tile sizes that `anyep tune` has measured on this machine, kept between processes.

    key = Key("NVIDIA H200", ranks=8, ranks_on_gpu=8)
    store([Entry(key, RowTile(8, 512, 16), None, ...)])      # None: the built-in tile is the fastest
    tiles = with_tuned(tiles_for(8, has_windows=True), key)   # what a Buffer uses

`tuned.json` lies in the base of the user's cache folder, not beside the compiled kernels: it outlives
updates. It holds numbers only, but wrong ones cost speed, so it is as private as the kernels, and its numbers
are checked. A file or an entry that cannot be used is ignored with one warning; built-in tiles are used then.

Each rank reads its own file. The tiles of dispatch into windows and of pull-and-sum may differ from rank to
rank: they only determine how a kernel's own programs share its work. A receiver learns that rows have come
from a message after the kernel, not tile by tile; no program waits for another one; and every sum is in rank
order. (Tiles of rings, where two ranks take turns, are not tuned.)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from anyep.backends.cache_folder import (
    Unusable,
    base_folder,
    check_private,
    private_base_folder,
    read_private,
    write_private,
)
from anyep.backends.cuda.tiles import TILES, RowTile, SumTile, Tiles

log = logging.getLogger("anyep")
NAME: Final = "tuned.json"
VERSION: Final = 1
"""Of an entry. Raise it when tiles mean something else than before."""
WHAT_TO_DO: Final = "run `anyep tune` again, or delete the file"
WARPS: Final = (1, 2, 4, 8, 16, 32)
THREADS_PER_WARP: Final = 32
FACTOR: Final = 2
"""How much larger than the largest built-in tile a tile may be."""
MOST_WORDS: Final = FACTOR * max(tiles.dispatch.tokens * tiles.dispatch.words for tiles in TILES.values())
MOST_VALUES: Final = FACTOR * max(tiles.combine.tokens * tiles.combine.values for tiles in TILES.values())
MOST_PER_THREAD: Final = 64
"""Words or values: more do not fit into the registers of a thread."""
MOST_TOKENS: Final = 256
MOST_COLUMNS: Final = 4096
LEAST_COLUMNS: Final = 64
MOST_GBPS: Final = 1e9


class Damaged(Unusable):
    """The file is not one that `anyep tune` writes."""


class Invalid(ValueError):
    """An entry is not one that `anyep tune` writes; the message says why."""


class Key(NamedTuple):
    """What tiles are the fastest for."""

    gpu: str
    """The name of the GPU, as torch tells it."""
    ranks: int
    """The ranks of the Buffer."""
    ranks_on_gpu: int
    """Those of them that share a GPU."""

    def __str__(self) -> str:
        shared = "" if self.ranks_on_gpu == 1 else f" ({self.ranks_on_gpu} on a GPU)"
        return f"{self.gpu}, {self.ranks} ranks{shared}"


class Rates(NamedTuple):
    """GB/s that a rank receives, with the built-in tile and with the chosen one."""

    before: float
    after: float

    @property
    def gain(self) -> float:
        """How many times as fast the chosen tile is."""
        return self.after / self.before


@dataclass(frozen=True)
class Measured:
    """When and with what an entry was measured."""

    at: str
    tokens: int
    hidden: int
    topk: int
    experts: int
    sms: int
    torch: str
    triton: str
    anyep: str


@dataclass(frozen=True)
class Entry:
    """What was found for one key. A tile is None if the built-in one is as fast."""

    key: Key
    dispatch: RowTile | None
    combine: SumTile | None
    recommended_sms: int
    """Stored for people: Buffers do not change their number of SMs by themselves."""
    dispatch_rates: Rates
    combine_rates: Rates
    measured: Measured

    def as_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            **self.key._asdict(),
            "dispatch": _row_tile_as_json(self.dispatch) if self.dispatch else None,
            "combine": self.combine._asdict() if self.combine else None,
            "recommended_sms": self.recommended_sms,
            "gbps": {
                "dispatch": self.dispatch_rates._asdict(),
                "combine": self.combine_rates._asdict(),
            },
            "measured": asdict(self.measured),
        }

    @classmethod
    def from_json(cls, raw: object) -> Entry:
        """An entry that `as_json` has written; raises Invalid for anything else."""
        entry = _object("an entry", raw)
        if entry.get("version") != VERSION:
            raise Invalid(f"its version is {entry.get('version')!r}, and this AnyEP reads {VERSION}")
        rates = _object("gbps", entry.get("gbps"))
        measured = _object("measured", entry.get("measured"))
        return cls(
            key_of(entry),
            None if entry.get("dispatch") is None else _row_tile(entry["dispatch"]),
            None if entry.get("combine") is None else _sum_tile(entry["combine"]),
            _count("recommended_sms", entry.get("recommended_sms"), most=256),
            _rates("dispatch", rates.get("dispatch")),
            _rates("combine", rates.get("combine")),
            Measured(
                _text("at", measured.get("at")),
                _count("tokens", measured.get("tokens")),
                _count("hidden", measured.get("hidden")),
                _count("topk", measured.get("topk")),
                _count("experts", measured.get("experts")),
                _count("sms", measured.get("sms")),
                _text("torch", measured.get("torch")),
                _text("triton", measured.get("triton")),
                _text("anyep", measured.get("anyep")),
            ),
        )


# The file


def path() -> Path:
    """Where the file is, if there is one; raises Unusable where there is no cache folder."""
    return base_folder() / NAME


def raw_entries() -> list[object]:
    """The entries of the file, unchecked; empty if there is no file. Raises Unusable if it cannot be used."""
    file = path()
    try:
        check_private(file.parent)
        content = read_private(file)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Unusable(f"{file} cannot be read: {error.strerror}") from error
    try:
        entries = json.loads(content)["entries"]
    except (ValueError, KeyError, TypeError, RecursionError):
        entries = None
    if not isinstance(entries, list):
        raise Damaged(f"{file} is damaged")
    return entries


def store(entries: Iterable[Entry]) -> Path:
    """Add entries to the file, in place of those of the same keys. Raises Unusable if that is not possible.

    A file that cannot be used is replaced; entries that this AnyEP does not understand stay in it.
    """
    file = private_base_folder() / NAME
    new = list(entries)
    with _locked(file.parent):
        try:
            old = raw_entries()
        except Unusable:
            old = []
        keys = {entry.key for entry in new}
        kept = [raw for raw in old if isinstance(raw, dict) and _key_or_none(raw) not in keys]
        together = {"entries": [*kept, *(entry.as_json() for entry in new)]}
        write_private(file, (json.dumps(together, indent=2) + "\n").encode())
    return file


def remove() -> bool:
    """Remove the file; returns whether there was one."""
    file = path()
    try:
        file.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise Unusable(f"{file} cannot be removed: {error.strerror}") from error
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other processes that store entries; where folders cannot be locked, none waits."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Unusable(f"{folder} cannot be used: {error.strerror}") from error
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# What a Buffer uses


class Trial(NamedTuple):
    """The tiles of the Buffers of a sweep."""

    dispatch: RowTile
    combine: SumTile


_trial: Trial | None = None
_warned: set[str] = set()


@contextlib.contextmanager
def trial(tiles: Trial) -> Iterator[None]:
    """Let the Buffers that are made in this context use these tiles, whatever the file says. Nothing is
    written, and nothing is remembered of the kernels that they use."""
    global _trial  # noqa: PLW0603
    before, _trial = _trial, tiles
    try:
        yield
    finally:
        _trial = before


def is_trial() -> bool:
    """Whether a sweep is trying tiles in this process."""
    return _trial is not None


def with_tuned(tiles: Tiles, key: Key) -> Tiles:
    """The built-in tiles, with those in their places that were found to be faster on this machine."""
    found: Trial | Entry | None = _trial or find(key)
    if found is None:
        return tiles
    return tiles._replace(dispatch=found.dispatch or tiles.dispatch, combine=found.combine or tiles.combine)


def find(key: Key) -> Entry | None:
    """The entry of a key, or None; warns once about a file or an entry that cannot be used."""
    try:
        mine = [raw for raw in raw_entries() if _key_or_none(raw) == key]
    except Unusable as reason:
        _warn(str(reason), WHAT_TO_DO if isinstance(reason, Damaged) else "")
        return None
    if not mine:
        return None
    try:
        return Entry.from_json(mine[-1])
    except Invalid as reason:
        _warn(f"the entry of {key} in {path()} cannot be used: {reason}", WHAT_TO_DO)
        return None


def _warn(reason: str, advice: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        log.warning("%s; the built-in tile sizes are used%s", reason, advice and f": {advice}")


# Checks


def check_row_tile(tile: RowTile) -> RowTile:
    """Refuse a tile that a kernel cannot be expected to run with.

    >>> check_row_tile(RowTile(8, 512, 16))
    RowTile(tokens=8, words=512, warps=16, stages=1)
    >>> check_row_tile(RowTile(8, 500, 16))
    Traceback (most recent call last):
    anyep.backends.cuda.tuned.Invalid: words is 500: it must be a power of two from 64 to 4096
    """
    _check_tile("words", tile.tokens, tile.words, tile.warps, MOST_WORDS)
    return tile


def check_sum_tile(tile: SumTile) -> SumTile:
    """The same of a tile that is added up."""
    _check_tile("values", tile.tokens, tile.values, tile.warps, MOST_VALUES)
    return tile


def _check_tile(unit: str, tokens: int, columns: int, warps: int, most: int) -> None:
    _check_power_of_two("tokens", tokens, 1, MOST_TOKENS)
    _check_power_of_two(unit, columns, LEAST_COLUMNS, MOST_COLUMNS)
    if type(warps) is not int or warps not in WARPS:
        raise Invalid(f"warps is {warps!r}: it must be one of {', '.join(map(str, WARPS))}")
    if tokens * columns > min(most, MOST_PER_THREAD * THREADS_PER_WARP * warps):
        raise Invalid(f"a tile of {tokens} tokens x {columns} {unit} is too large for {warps} warps")


def _check_power_of_two(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most or value & (value - 1):
        raise Invalid(f"{name} is {value!r}: it must be a power of two from {least} to {most}")


def key_of(raw: Mapping[str, Any]) -> Key:
    """The key of an entry."""
    ranks, on_gpu = (_count(name, raw.get(name)) for name in ("ranks", "ranks_on_gpu"))
    return Key(_text("gpu", raw.get("gpu")), ranks, on_gpu)


def _key_or_none(raw: object) -> Key | None:
    try:
        return key_of(_object("an entry", raw))
    except Invalid:
        return None


def _row_tile_as_json(tile: RowTile) -> dict[str, int]:
    return {"tokens": tile.tokens, "words": tile.words, "warps": tile.warps}


def _row_tile(raw: object) -> RowTile:
    tile = _object("dispatch", raw)
    return check_row_tile(RowTile(*(_count(name, tile.get(name)) for name in ("tokens", "words", "warps"))))


def _sum_tile(raw: object) -> SumTile:
    tile = _object("combine", raw)
    return check_sum_tile(SumTile(*(_count(name, tile.get(name)) for name in ("tokens", "values", "warps"))))


def _rates(name: str, raw: object) -> Rates:
    rates = _object(name, raw)
    before, after = (rates.get(key) for key in ("before", "after"))
    if not (_is_rate(before) and _is_rate(after)):
        raise Invalid(f"the rates of {name} are {before!r} and {after!r}: they must be numbers above 0")
    return Rates(float(before), float(after))  # type: ignore[arg-type]


def _is_rate(value: object) -> bool:
    return type(value) in (int, float) and 0 < value <= MOST_GBPS  # type: ignore[operator]


def _object(name: str, raw: object) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise Invalid(f"{name} is no JSON object")
    return raw


def _count(name: str, value: object, most: int = 2**31 - 1) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise Invalid(f"{name} is {value!r}: it must be a whole number from 1 to {most}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or len(value) > 200:
        raise Invalid(f"{name} is {value!r}: it must be a text of 1 to 200 characters")
    return value
