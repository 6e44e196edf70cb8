"""Kills a rank, and checks that the others name it in time. The ranks are started for that, beside those of
the test: no process of a user's job is killed.

    store_at = StoreFile() or the address of a store
    outcomes = lose_a_rank(Trial("normal mode", "cpu", 4), range(4), store_at, ON_THE_CPU, agree)

In a job every rank starts one further process, and these find each other by a store of the first rank; else
the command starts all of them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from anyep import settings
from anyep.cli.gpus import Placement, take_gpu
from anyep.cli.ranks import PRELOADED, PRELOADED_FOR_GPUS
from anyep.errors import AnyEPError, PeerLost
from anyep.launch.forked import ForkedRank, end_all, enter_rank, join_group, start_server

START_S: Final = 240.0
"""The longest that ranks may take to make a Buffer; kernels may have to be compiled."""
NAMED_S: Final = 20.0
"""A lost rank has to be named within this time."""
HEAD_START_S: Final = 0.5
"""How long the others wait for the rank before it is killed."""
TOKENS: Final = 32
HIDDEN: Final = 256
LL_HIDDEN: Final = 512
LOCAL_EXPERTS: Final = 2
READY: Final = "ready"
GO: Final = "go"


@dataclass(frozen=True)
class StoreAddress:
    """Where ranks find each other: a file, or the address of a store."""

    file: str = ""
    host: str = ""
    port: int = 0


@dataclass(frozen=True)
class Trial:
    """A mode, and the arguments of the Buffer that loses its last rank."""

    mode: str
    device: str
    num_ranks: int
    place: Mapping[str, Any] = field(default_factory=dict)

    @property
    def victim(self) -> int:
        return self.num_ranks - 1


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: seconds after the end of the killed rank; and its problem, empty if there is none."""

    seconds: float = 0.0
    problem: str = ""


def lose_a_rank(
    trial: Trial,
    mine: Iterable[int],
    store_at: StoreAddress,
    placement: Placement,
    agree: Callable[[str], list[str]],
) -> dict[int, Outcome]:
    """Start the ranks `mine`, kill the victim when all are ready, and tell how the others ended.

    `agree` gathers a text from all processes that have started ranks; one that is not empty is a problem.
    """
    start_server(PRELOADED_FOR_GPUS if placement.num_gpus else PRELOADED)
    ranks: dict[int, ForkedRank] = {}
    try:
        problem = ""
        try:
            for rank in mine:
                ranks[rank] = ForkedRank(rank, _take_part, trial, store_at, placement)
            for rank, forked in ranks.items():
                problem = problem or _answer(forked, READY, rank, time.monotonic() + START_S)
        except AnyEPError as error:
            problem = str(error)
        problems = [text for text in agree(problem) if text]
        if problems:
            return dict.fromkeys(ranks, Outcome(problem=problems[0]))
        for rank, forked in ranks.items():
            if rank != trial.victim:
                forked.pipe.send(GO)
        time.sleep(HEAD_START_S)
        agree("")
        return _survivors(trial, ranks)
    finally:
        end_all(list(ranks.values()))


def _survivors(trial: Trial, ranks: Mapping[int, ForkedRank]) -> dict[int, Outcome]:
    """Kill the victim, if it is one of these ranks, and wait for the others."""
    began = time.monotonic()
    if trial.victim in ranks:
        ranks[trial.victim].kill()
    outcomes = {}
    for rank, forked in ranks.items():
        if rank != trial.victim:
            problem = _answer(forked, "", rank, began + NAMED_S)
            outcomes[rank] = Outcome(time.monotonic() - began, problem)
    return outcomes


def _answer(forked: ForkedRank, expected: str, rank: int, until: float) -> str:
    """What is wrong with a rank's next message; empty if it is the one that is expected."""
    if not forked.pipe.poll(max(0.0, until - time.monotonic())):
        return f"rank {rank} did not answer in time"
    try:
        answer = str(forked.pipe.recv())
    except (EOFError, ConnectionResetError):
        return f"rank {rank} ended: {forked.how_it_ended(5.0)}"
    return "" if answer == expected else f"rank {rank}: {answer}"


# On the ranks


def _take_part(
    pipe: Connection, rank: int, trial: Trial, store_at: StoreAddress, placement: Placement
) -> None:
    """The main function of a rank's process."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    enter_rank()
    if not store_at.file and interface is None:
        # The ranks are on several hosts.
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(placement.environment)
    settings.unset(settings.DEVICE, settings.RANKS_PER_NODE, settings.NETWORK)
    try:
        import torch

        torch.set_num_threads(1)
        # What they would say of the lost rank is in the report.
        logging.getLogger("anyep").setLevel(logging.ERROR)
        if placement.num_gpus:
            take_gpu(placement.gpu_of(rank), rank)
        group = _join_group(store_at, rank, trial.num_ranks)
        trials = {"normal mode": _lose_in_normal_mode, "low-latency mode": _go_on_without}
        pipe.send(trials[trial.mode](pipe, trial, group, rank))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def _join_group(store_at: StoreAddress, rank: int, num_ranks: int) -> Any:
    if store_at.file:
        return join_group(store_at.file, rank, num_ranks)
    import torch.distributed as dist

    store = dist.TCPStore(store_at.host, store_at.port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    return dist.group.WORLD


def _wait_for_start(pipe: Connection, trial: Trial, rank: int) -> None:
    """Say that this rank is ready; the victim waits here until it is killed."""
    pipe.send(READY)
    while rank == trial.victim:
        time.sleep(1.0)
    pipe.recv()


def _lose_in_normal_mode(pipe: Connection, trial: Trial, group: Any, rank: int) -> str:
    """Dispatch without the victim: the error must name it. Returns what is wrong."""
    import torch

    from anyep.api.buffer import Buffer

    experts = LOCAL_EXPERTS * trial.num_ranks
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=trial.device)
    ids = torch.arange(TOKENS * 2, dtype=torch.int64, device=trial.device).view(TOKENS, 2) % experts
    weights = torch.ones(TOKENS, 2, dtype=torch.float32, device=trial.device)
    with Buffer(group, 1 << 22, 1 << 22, device=trial.device, **trial.place) as buffer:
        layout = buffer.get_dispatch_layout(ids, experts)[:4]
        per_rank, per_node, per_expert, in_rank = layout

        def dispatch() -> None:
            buffer.dispatch(x, None, per_rank, per_node, in_rank, per_expert, ids, weights)

        dispatch()
        _wait_for_start(pipe, trial, rank)
        try:
            dispatch()
        except PeerLost as error:
            is_named = f"rank {trial.victim}" in str(error)
            return "" if is_named else f"another rank is named: {error}"
        return "the dispatch ended without an error"


def _go_on_without(pipe: Connection, trial: Trial, group: Any, rank: int) -> str:
    """Low-latency calls with masks go on without the victim. Returns what is wrong."""
    import torch

    from anyep.api.buffer import Buffer

    experts = LOCAL_EXPERTS * trial.num_ranks
    slots = Buffer.get_low_latency_rdma_size_hint(TOKENS, LL_HIDDEN, trial.num_ranks, experts)
    x = torch.zeros(TOKENS, LL_HIDDEN, dtype=torch.bfloat16, device=trial.device)
    # Every rank has a token for every expert.
    ids = (torch.arange(TOKENS, dtype=torch.int64, device=trial.device) % experts).view(TOKENS, 1)
    from_each = TOKENS // experts + (
        torch.arange(experts, dtype=torch.int64, device="cpu") < TOKENS % experts
    )
    own = from_each[rank * LOCAL_EXPERTS : (rank + 1) * LOCAL_EXPERTS]
    buffer = Buffer(
        group, 0, slots, low_latency_mode=True, enable_shrink=True, device=trial.device, **trial.place
    )
    with buffer:

        def counts() -> list[int]:
            _, found, _, event, _ = buffer.low_latency_dispatch(x, ids, TOKENS, experts, use_fp8=False)
            event.current_stream_wait()
            return [int(count) for count in found.tolist()]

        counts()
        _wait_for_start(pipe, trial, rank)
        for _ in range(2):
            left = counts()
        masked = torch.zeros(trial.num_ranks, dtype=torch.int32, device=trial.device)
        buffer.low_latency_query_mask_buffer(masked)
        if torch.nonzero(masked).flatten().tolist() != [trial.victim]:
            return f"the masks are {masked.tolist()}, and only rank {trial.victim} is gone"
        right = (own * (trial.num_ranks - 1)).tolist()
        return (
            "" if left == right else f"experts received {left} rows from the other ranks instead of {right}"
        )
