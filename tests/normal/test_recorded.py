"""Calls of normal mode return what they returned when they were recorded (tests/support/recorder.py)."""

from __future__ import annotations

import pytest
import torch

from tests.support.recorder import Replay, differences, digest, load, place_of
from tests.support.recordings import RECORDINGS, params

QUICK = (
    "dtypes-cpu-4-windows",
    "sample-simulated-2-windows",
    "dtypes-cpu-4-2nodes-rings-beside",
    "routings-cpu-4-few-windows",
    "routings-cpu-4-2nodes-windows",
    "layers-cpu-4-windows",
    "state-cpu-4-windows",
    "sizes-cpu-1-windows",
    "wrong-calls-cpu-3-windows",
)


@pytest.mark.parametrize("replay", params("normal", QUICK))
def test_as_recorded(replay: Replay) -> None:
    assert replay.differences() == []


def test_a_changed_bit_is_found() -> None:
    """In a row that rank 0 sends: where it arrives, in the calls that send it, and nowhere else."""
    recording = RECORDINGS["normal", "dtypes"]
    changed = Replay(recording, "2", place_of("cpu", "2"), "windows").run(flips_bit=True)
    found = differences(load(recording)["2"], changed)
    assert found
    assert {line.split(" of ")[0].split(": ")[1] for line in found} == {
        "dispatch",
        "again",
        "again by a copy",
    }
    assert all(" recv_x of " in line or ": after destroy: tensor of " in line for line in found)
    missing = {call: parts for call, parts in changed.items() if call != "float32: combine"}
    assert "float32: combine: it was not made now" in differences(changed, missing)


def test_what_a_digest_stands_for() -> None:
    rows = torch.arange(6, dtype=torch.int32, device="cpu").view(2, 3)
    others = [rows.view(3, 2), rows.view(torch.float32), rows.flip(0), rows + torch.eye(2, 3).int()]
    assert digest(rows) == digest(rows.t().contiguous().t())
    assert len({digest(tensor) for tensor in (rows, *others)}) == 5
