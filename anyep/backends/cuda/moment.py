"""Where and when a batch of kernels runs."""

from __future__ import annotations

from typing import NamedTuple

from anyep.backends.cpu.kernels.driver_calls import NO_STREAM


class Moment(NamedTuple):
    """Where and when a batch runs: raw CUDA streams, and raw events, 0 for none."""

    stream: int
    event_before: int = 0
    """Recorded on `stream_before`; the batch waits for it."""
    stream_before: int = 0
    also_wait_for: int = 0
    """Another event that the batch waits for."""
    event_after: int = 0
    """Recorded after the batch."""
    stream_after: int = NO_STREAM
    """A stream that waits for `event_after`."""
