"""Tile sizes that are stored for this machine: the file, what is refused in it, what a Buffer takes of it."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep.backends.cache_folder import Unusable
from anyep.backends.cuda import tuned
from anyep.backends.cuda.tiles import RowTile, SumTile, tiles_for
from anyep.backends.cuda.tuned import Entry, Invalid, Key, Measured, Rates, Trial, with_tuned

KEY = Key("NVIDIA Stand-in", 8, 4)
MEASURED = Measured("2026-11-19T06:00:00+00:00", 4096, 7168, 8, 256, 16, "2.11.0", "3.6.0", "0.2.0")
ENTRY = Entry(
    KEY, RowTile(16, 256, 8), SumTile(4, 2048, 16), 12, Rates(600.0, 660.0), Rates(500.0, 510.0), MEASURED
)
BUILTIN = tiles_for(8, has_windows=True)


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYEP_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(tuned, "_warned", set())
    return tmp_path / "kept"


def write(content: str) -> Path:
    """The file, as somebody else would write it."""
    file = tuned.path()
    file.parent.mkdir(mode=0o700, exist_ok=True)
    file.write_text(content)
    file.chmod(0o600)
    return file


def test_without_a_file_nothing_changes(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert with_tuned(BUILTIN, KEY) is BUILTIN
    assert not base.exists()
    assert not tuned.remove()
    assert not caplog.records


def test_what_is_stored_is_used(base: Path) -> None:
    file = tuned.store([ENTRY])
    assert file == base / "tuned.json"
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert tuned.find(KEY) == ENTRY
    tiles = with_tuned(BUILTIN, KEY)
    assert tiles == BUILTIN._replace(dispatch=ENTRY.dispatch, combine=ENTRY.combine)
    assert list(base.iterdir()) == [file]
    assert tuned.remove()
    assert with_tuned(BUILTIN, KEY) is BUILTIN


@pytest.mark.parametrize(
    "other", [KEY._replace(gpu="NVIDIA Other"), KEY._replace(ranks=4), KEY._replace(ranks_on_gpu=8)]
)
def test_other_machines_are_not_affected(other: Key, caplog: pytest.LogCaptureFixture) -> None:
    tuned.store([ENTRY])
    assert with_tuned(BUILTIN, other) is BUILTIN
    assert not caplog.records


def test_a_built_in_tile_is_not_stored() -> None:
    """Later versions may have a better one."""
    tuned.store([replace(ENTRY, dispatch=None)])
    tiles = with_tuned(BUILTIN, KEY)
    assert (tiles.dispatch, tiles.combine) == (BUILTIN.dispatch, ENTRY.combine)


def test_entries_of_other_keys_stay() -> None:
    others = [replace(ENTRY, key=KEY._replace(ranks=ranks)) for ranks in (2, 4)]
    tuned.store(others)
    tuned.store([ENTRY])
    newer = replace(ENTRY, combine=None)
    tuned.store([newer])
    assert [Entry.from_json(raw) for raw in tuned.raw_entries()] == [*others, newer]


def test_processes_that_store_at_once_lose_nothing() -> None:
    entries = [replace(ENTRY, key=KEY._replace(ranks=ranks)) for ranks in range(1, 21)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda entry: tuned.store([entry]), entries))
    assert {Entry.from_json(raw).key.ranks for raw in tuned.raw_entries()} == set(range(1, 21))


def test_trials_reach_buffers_without_the_file(base: Path) -> None:
    trial = Trial(RowTile(4, 512, 8), SumTile(8, 1024, 8))
    assert not tuned.is_trial()
    with tuned.trial(trial):
        assert tuned.is_trial()
        tiles = with_tuned(BUILTIN, KEY)
        with tuned.trial(Trial(BUILTIN.dispatch, BUILTIN.combine)):
            assert with_tuned(BUILTIN, KEY) == BUILTIN
        assert with_tuned(BUILTIN, KEY) == tiles
    assert (tiles.dispatch, tiles.combine) == trial
    assert with_tuned(BUILTIN, KEY) is BUILTIN
    assert not base.exists()


def test_a_trial_wins_over_the_file() -> None:
    tuned.store([ENTRY])
    with tuned.trial(Trial(BUILTIN.dispatch, BUILTIN.combine)):
        assert with_tuned(BUILTIN, KEY) == BUILTIN


# Files that cannot be used

DAMAGED = ("", "{", "[]", "null", "7", '{"entries": 7}', '{"entrie', "[" * 100_000)


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file(content: str, caplog: pytest.LogCaptureFixture) -> None:
    file = write(content)
    for _ in range(3):
        assert with_tuned(BUILTIN, KEY) is BUILTIN
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"{file} is damaged; the built-in tile sizes are used: run `anyep tune` again, or delete the file"
    )
    tuned.store([ENTRY])
    assert tuned.find(KEY) == ENTRY


def test_binary_content(caplog: pytest.LogCaptureFixture) -> None:
    write("").write_bytes(b"\xff\xfe\x00")
    assert with_tuned(BUILTIN, KEY) is BUILTIN
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write(mode: int, caplog: pytest.LogCaptureFixture) -> None:
    file = tuned.store([ENTRY])
    file.chmod(mode)
    assert with_tuned(BUILTIN, KEY) is BUILTIN
    assert f"other users can write {file} (to change that: chmod go-w {file})" in caplog.text
    tuned.store([ENTRY])
    assert tuned.find(KEY) == ENTRY


def test_a_folder_that_others_can_write(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuned.store([ENTRY])
    base.chmod(0o770)
    assert with_tuned(BUILTIN, KEY) is BUILTIN
    assert f"other users can write {base}" in caplog.text
    with pytest.raises(Unusable, match="other users can write"):
        tuned.store([ENTRY])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user(caplog: pytest.LogCaptureFixture) -> None:
    file = tuned.store([ENTRY])
    os.chown(file, 12345, -1)
    assert with_tuned(BUILTIN, KEY) is BUILTIN
    assert f"{file} belongs to user 12345" in caplog.text


def test_a_link(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuned.store([ENTRY]).rename(tmp_path / "elsewhere")
    (base / "tuned.json").symlink_to(tmp_path / "elsewhere")
    assert with_tuned(BUILTIN, KEY) is BUILTIN
    assert "cannot be read" in caplog.text


def test_a_file_in_place_of_the_folder(base: Path) -> None:
    base.touch(mode=0o600)
    with pytest.raises(Unusable, match="is not a folder"):
        tuned.store([ENTRY])


# Entries that cannot be used


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(json.dumps(ENTRY.as_json()))
    change(raw)
    return raw


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda raw: raw.update(version=2), "its version is 2, and this AnyEP reads 1"),
    "no version": (lambda raw: raw.pop("version"), "its version is None"),
    "not a power of two": (lambda raw: raw["dispatch"].update(words=500), "words is 500: it must be a power"),
    "too wide": (lambda raw: raw["combine"].update(values=8192), "values is 8192"),
    "no tokens": (lambda raw: raw["dispatch"].update(tokens=0), "tokens is 0"),
    "a fraction": (lambda raw: raw["dispatch"].update(tokens=8.0), "tokens is 8.0"),
    "a truth": (lambda raw: raw["dispatch"].update(tokens=True), "tokens is True"),
    "a text": (lambda raw: raw["combine"].update(warps="8"), "warps is '8'"),
    "warps": (lambda raw: raw["combine"].update(warps=12), "warps is 12: it must be one of 1, 2, 4, 8"),
    "too large": (
        lambda raw: raw["dispatch"].update(tokens=256, words=4096, warps=32),
        "256 tokens x 4096 words is too large for 32 warps",
    ),
    "too large for its threads": (
        lambda raw: raw["combine"].update(warps=1),
        "4 tokens x 2048 values is too large for 1 warps",
    ),
    "no tile": (lambda raw: raw.update(dispatch=[8, 512, 16]), "dispatch is no JSON object"),
    "no SMs": (lambda raw: raw.update(recommended_sms=None), "recommended_sms is None"),
    "no rates": (lambda raw: raw.pop("gbps"), "gbps is no JSON object"),
    "a rate of 0": (lambda raw: raw["gbps"]["combine"].update(before=0), "the rates of combine are 0 and"),
    "a rate that is none": (lambda raw: raw["gbps"]["dispatch"].update(after=float("nan")), "and nan"),
    "a rate beyond floats": (lambda raw: raw["gbps"]["dispatch"].update(after=10**400), "the rates of"),
    "no tokens measured": (lambda raw: raw["measured"].update(tokens=-1), "tokens is -1"),
    "control characters": (lambda raw: raw["measured"].update(torch="\x1b[31m"), "torch is '"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry(name: str, caplog: pytest.LogCaptureFixture) -> None:
    change, words = WRONG[name]
    raw, other = changed(change), replace(ENTRY, key=KEY._replace(ranks=2))
    with pytest.raises(Invalid):
        Entry.from_json(raw)
    file = write(json.dumps({"entries": [raw, other.as_json()]}))
    for _ in range(3):
        assert with_tuned(BUILTIN, KEY) is BUILTIN
    (record,) = caplog.records
    assert words in record.getMessage()
    assert f"the entry of {KEY} in {file} cannot be used" in record.getMessage()
    assert "run `anyep tune` again, or delete the file" in record.getMessage()
    assert tuned.find(other.key) == other
    tuned.store([ENTRY])
    assert tuned.find(KEY) == ENTRY


def test_entries_of_a_later_version_stay() -> None:
    later = changed(lambda raw: raw.update(version=2, ranks=2, more="unknown"))
    write(json.dumps({"entries": [later, 7, {"no": "key"}]}))
    tuned.store([ENTRY])
    assert tuned.raw_entries() == [later, {"no": "key"}, ENTRY.as_json()]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*ENTRY.as_json()]), inner),
    max_leaves=10,
)


@given(JSON, st.sampled_from([*ENTRY.as_json()]), JSON)
def test_anything_else_is_refused_or_harmless(whole: object, name: str, part: object) -> None:
    for raw in (whole, ENTRY.as_json() | {name: part}):
        try:
            found = Entry.from_json(raw)
        except Invalid:
            continue
        assert Entry.from_json(found.as_json()) == found


def test_the_built_in_tiles_are_valid() -> None:
    for num_ranks in (1, 2, 3, 4, 8, 16):
        tiles = tiles_for(num_ranks, has_windows=True)
        assert tuned.check_row_tile(tiles.dispatch) == tiles.dispatch
        assert tuned.check_sum_tile(tiles.combine) == tiles.combine
