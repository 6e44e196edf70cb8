"""What `anyep demo` runs and what its ranks report, without the layers themselves, which need torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from anyep.cli.nodes import ONE_NODE, Nodes
from anyep.sizes import align


def finish_work(device: str) -> None:
    """Wait for all work launched on a device; on the CPU there is nothing to wait for."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def now(device: str) -> float:
    """The time in seconds, after all work launched on the device is done."""
    finish_work(device)
    return time.perf_counter()


# Normal mode: a layer is trained.


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
    device: str
    nodes: Nodes

    @property
    def row_bytes(self) -> int:
        return self.hidden * 4

    @property
    def num_window_bytes(self) -> int | None:
        """No bytes for rings; for windows enough for every result of a step, however uneven the routing."""
        if self.path == "auto":
            return None
        rows = self.ranks * (self.tokens + 1)
        return 0 if self.path == "ring" else align(16 * rows * (self.row_bytes + 16 * self.topk), 128)


@dataclass
class StepReport:
    """What one rank measured in one step."""

    device: str
    step: int
    sent: list[int]
    received: int
    seconds: dict[str, float] = field(default_factory=dict)
    largest_difference: float = 0.0
    loss: float = 0.0
    bytes_within_node: int = 0
    bytes_between_nodes: int = 0
    """The traffic sent in this and all earlier steps; counted if there are several nodes."""
    sent_to_nodes: list[int] = field(default_factory=list)
    """The tokens for each node, if there are several."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = now(self.device)
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now(self.device) - started


def train_on_rank(rank: Any, job: Job) -> list[StepReport]:
    """Run the demo on a rank. Only ranks import the layer: the command itself starts without torch."""
    from anyep.cli.demo.train import train

    return train(rank, job)


# Low-latency mode: a layer decodes.

COMMUNICATION: Final = ("dispatch send", "dispatch receive", "combine send", "combine receive")
PHASES: Final = ("gate", *COMMUNICATION[:2], "experts", *COMMUNICATION[2:])
"""The phases of a micro-batch, in order."""


@dataclass(frozen=True)
class DecodeJob:
    """What the demo runs in low-latency mode."""

    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    steps: int
    seed: int
    device: str = "cpu"
    nodes: Nodes = ONE_NODE

    @property
    def num_max_tokens(self) -> int:
        """The number of tokens in the larger micro-batch of a rank."""
        return (self.tokens + 1) // 2


@dataclass(frozen=True)
class Difference:
    """How much results differ from the right ones, relative to the largest entry; and how many entries do."""

    largest: float = 0.0
    num_different: int = 0
    num_entries: int = 0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            max(self.largest, other.largest),
            self.num_different + other.num_different,
            self.num_entries + other.num_entries,
        )


@dataclass(frozen=True)
class DecodeProgress:
    """The progress of a rank."""

    step: int
    difference: Difference


@dataclass
class DecodeReport:
    """What one rank measured: seconds of every step, and of every phase of every micro-batch."""

    device: str
    step_seconds: list[float] = field(default_factory=list)
    phase_seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    difference: Difference = field(default_factory=Difference)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = now(self.device)
        yield
        self.phase_seconds[phase].append(now(self.device) - started)


def decode_on_rank(rank: Any, job: DecodeJob) -> DecodeReport:
    """Run the demo in low-latency mode on a rank; only ranks import its layer."""
    from anyep.cli.demo.decode import decode

    return decode(rank, job)
