"""Ranks that are lost, slow or interrupted while a Buffer is made, as data; and what becomes of the others.

    with struck(2, "working", die):
        outcome = make()

A Buffer is made in steps: the ranks exchange results several times, and do a part of the work before
each exchange.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from anyep import AnyEPError
from anyep.api.buffer import Buffer
from anyep.backends.cuda import postponed
from anyep.join.rendezvous import GroupRendezvous

KINDS: Final[dict[str, dict[str, Any]]] = {
    "one node": {},
    "low latency": {"num_rdma_bytes": 1 << 20, "low_latency_mode": True},
    "virtual nodes": {"num_rdma_bytes": 1 << 20, "ranks_per_node": 1},
    "nixl": {"num_rdma_bytes": 1 << 20, "ranks_per_node": 1, "network": "nixl"},
    "simulated gpu": {"device": "cuda", "num_window_bytes": 1 << 20},
}
NUM_STEPS: Final = {"one node": 4, "low latency": 4, "virtual nodes": 5, "nixl": 7, "simulated gpu": 14}
"""How often the ranks exchange results to make such a Buffer."""
SOON_S: Final = 10.0
"""Nobody waits so long for a rank that is lost; tests compare with `scaled(SOON_S)`."""


@dataclass(frozen=True)
class Fault:
    """Which rank is killed in which step of making, and when: step 0 is before it has said who it is."""

    num_ranks: int
    rank: int
    step: int
    moment: str = "exchanging"
    """`working`: before the rank's exchange; `exchanging`: it has sent the size of its result; `exchanged`:
    right after the step; `connecting`: while it opens the memory of the other GPUs in this step."""
    kind: str = "one node"

    def __str__(self) -> str:
        return f"{self.kind}, rank {self.rank} of {self.num_ranks}, step {self.step}, {self.moment}"


@dataclass(frozen=True)
class Outcome:
    """How making a Buffer ended on a rank."""

    error: str
    seconds: float = 0.0
    left_behind: list[str] = field(default_factory=list)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def struck(step: int, moment: str, what: Callable[[], object]) -> Iterator[None]:
    """Let something happen in a step of this rank's exchanges."""
    gather, send = GroupRendezvous.all_gather, GroupRendezvous._gather_tensors
    at = {"step": 0, "sent": 0}

    def all_gather(self: GroupRendezvous, thing: Any) -> list[Any]:
        at["step"] += 1
        at["sent"] = 0
        if (at["step"], moment) == (step, "working"):
            what()
        gathered = gather(self, thing)
        if (at["step"], moment) == (step, "exchanged"):
            what()
        if (at["step"] + 1, moment) == (step, "connecting"):
            from tests.support.simulated_gpu import SimulatedBlock

            SimulatedBlock.connect = lambda *_: what()  # type: ignore[method-assign,assignment]
        return gathered

    def gather_tensors(self: GroupRendezvous, *arguments: Any) -> list[Any]:
        at["sent"] += 1
        if (at["step"], at["sent"], moment) == (step, 2, "exchanging"):
            what()
        return send(self, *arguments)

    GroupRendezvous.all_gather = all_gather  # type: ignore[method-assign]
    GroupRendezvous._gather_tensors = gather_tensors  # type: ignore[method-assign]
    try:
        yield
    finally:
        GroupRendezvous.all_gather = gather  # type: ignore[method-assign]
        GroupRendezvous._gather_tensors = send  # type: ignore[method-assign]


def make(kind: str = "one node", comm: Any = None) -> Outcome:
    """Make a Buffer; what was raised, after how long, and what remains of it."""
    arguments = {"device": "cpu"} | KINDS[kind]
    started = time.monotonic()
    try:
        Buffer(None if comm else dist.group.WORLD, 1 << 20, comm=comm, **arguments).destroy()
    except AnyEPError as error:
        text, seconds = f"{type(error).__name__}: {error}", time.monotonic() - started
    else:
        return Outcome("nothing was raised")
    # Only now, as the error's traceback held what was made.
    return Outcome(text, seconds, what_remains())


def what_remains() -> list[str]:
    """Threads, descriptors and mappings of AnyEP in this process."""
    gc.collect()
    # The memory of GPUs is freed when the next Buffer is made.
    postponed.do_postponed(lambda: None)
    threads = [thread.name for thread in threading.enumerate() if "anyep" in thread.name]
    descriptors = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return threads + [
        line for line in (*descriptors, *mapped) if "memfd:anyep-" in line and "-test-" not in line
    ]
