"""What `anyep demo` runs and what its ranks report; apart from the layer itself, which needs torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from anyep.sizes import align


@dataclass(frozen=True)
class Job:
    """What the demo runs."""

    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    steps: int
    seed: int
    path: str

    @property
    def row_bytes(self) -> int:
        return self.hidden * 4

    @property
    def num_window_bytes(self) -> int | None:
        """For rings none; for windows enough for every result of a step, however uneven the routing."""
        if self.path == "auto":
            return None
        rows = self.ranks * (self.tokens + 1)
        return 0 if self.path == "ring" else align(16 * rows * (self.row_bytes + 16 * self.topk), 128)


@dataclass
class StepReport:
    """What one rank saw in one step."""

    step: int
    sent: list[int]
    received: int
    seconds: dict[str, float] = field(default_factory=dict)
    largest_difference: float = 0.0
    loss: float = 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started


def train_on_rank(rank: Any, job: Job) -> list[StepReport]:
    """Run the demo on a rank. Only ranks import the layer: the command itself starts without torch."""
    from anyep.cli.demo_layer import train

    return train(rank, job)
