"""Low-latency calls return what they returned when they were recorded (tests/support/recorder.py)."""

from __future__ import annotations

import pytest

from tests.support.recorder import Replay, differences, load, place_of
from tests.support.recordings import RECORDINGS, params

QUICK = (
    "formats-cpu-4-hooks",
    "sample-simulated-2-windows",
    "routings-cpu-4-zero-copy",
    "routings-cpu-4-2nodes-windows",
    "in-flight-cpu-4-windows",
    "masks-cpu-4-windows",
    "state-cpu-4-windows",
    "wrong-calls-cpu-3-windows",
)


@pytest.mark.parametrize("replay", params("low_latency", QUICK))
def test_as_recorded(replay: Replay) -> None:
    assert replay.differences() == []


def test_a_changed_bit_is_found() -> None:
    recording = RECORDINGS["low_latency", "formats"]
    changed = Replay(recording, "2", place_of("cpu", "2"), "hooks").run(flips_bit=True)
    found = differences(load(recording)["2"], changed)
    assert any(line.startswith("bf16: dispatch: recv_x of ") for line in found)
    assert not any("combine" in line or "layout_range" in line for line in found)
