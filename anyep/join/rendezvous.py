"""How ranks find each other: a torch process group, or an mpi4py communicator, behind one small interface.

It is used when a Buffer is made, or its windows grow, never on the path of a call. All data goes through the
collectives of the given group; its store only tells which ranks are present. Errors name a lost rank.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from anyep.errors import AnyEPError, InvalidCall, NotSupported, PeerLost
from anyep.join.roll_call import Board, Process, RollCall, Verdict

LOOK_S: Final = 0.1
INTRODUCTION_BYTES: Final = 1024
FIRST_PAUSE_S: Final = 0.0001
LONGEST_PAUSE_S: Final = 0.005
DEFAULT_TIMEOUT_S: Final = 1800.0
_TIMEOUT: Final = re.compile(r"tim(e|ed)[\s-]?out", re.IGNORECASE)
_GLOO_PLACE: Final = re.compile(r"^\[\S+:\d+\] ")
"""Gloo's errors begin with the file and line of its source code."""
_DUPLICATE_GPU: Final = re.compile(r"duplicate gpu", re.IGNORECASE)
_ONE_GPU_TWICE: Final = (
    "{ranks} have the same GPU, but NCCL, the backend of this process group, works with one rank per GPU:"
    " pass a group of Gloo, dist.new_group(backend='gloo'), or give each rank a GPU by torch.cuda.set_device"
)
_known: WeakKeyDictionary[Any, dict[int, Process]] = WeakKeyDictionary()
"""The processes of groups that were used before: they stay the same as long as the group exists."""


class Rendezvous(Protocol):
    """What a Buffer needs from the group or communicator of its ranks."""

    rank: int
    num_ranks: int

    def arrive(self) -> None:
        """Publish this rank's process, before the first work that may take long."""

    def all_gather(self, thing: Any) -> list[Any]:
        """The list of every rank's object, in rank order."""

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank gives up; it will not take part any more."""

    def say_what(self, doing: str) -> None:
        """Set what the ranks connect for from now on, as the message about a lost rank says it."""

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Limit how long third-party code waits for the store of the group."""


def rendezvous_of(group: Any, comm: Any) -> Rendezvous:
    """The rendezvous of a torch process group, or of an mpi4py communicator if there is no group."""
    if group is None and comm is None:
        raise InvalidCall(
            "neither a group nor a comm is given: pass a torch process group, such as dist.group.WORLD"
        )
    if group is None:
        for name in ("Get_rank", "Get_size", "allgather"):
            if not hasattr(comm, name):
                raise InvalidCall(f"comm is of type {type(comm).__name__}: pass an mpi4py communicator")
        return CommRendezvous(comm)
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):
        raise InvalidCall(
            f"group is of type {type(group).__name__}: pass a torch process group of which"
            f" this rank is a member"
        )
    return GroupRendezvous(group)


class GroupRendezvous:
    """The ranks of a torch process group."""

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()
        self._group = group
        self._device = _device_of(group)
        self._store = _store_of(group)
        self._roll: RollCall | None = None
        self._step = 0

    def arrive(self) -> None:
        self._roll_call()

    def all_gather(self, thing: Any) -> list[Any]:
        roll = self._roll_call()
        try:
            self._step += 1
            roll.enter(self._step)
            if self._step == 1 and self._device.type != "cpu":
                # NCCL blocks until all ranks have arrived, and cannot tell which ones are missing.
                self._wait_until_complete(roll)
                refuse_one_gpu_twice(roll.processes.values())
            if self._step == 1:
                self._introduce(roll)
            return self._gather(roll, thing)
        except AnyEPError:
            raise
        except BaseException as error:
            roll.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        self._roll_call().give_up(error)

    def say_what(self, doing: str) -> None:
        self._roll_call().doing = doing

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        usual = getattr(self._store, "timeout", None)
        if not isinstance(usual, timedelta):
            yield
            return
        self._store.set_timeout(min(usual, timedelta(seconds=seconds)))
        try:
            yield
        finally:
            self._store.set_timeout(usual)

    def _roll_call(self) -> RollCall:
        """Publish this rank's process under keys that are used for this rendezvous only."""
        if self._roll is None:
            own = Process.this(self.rank, _gpu_uuid() if self._device.type == "cuda" else "")
            number = _next_number(self._store, self.rank)
            board = Board(self._store if number else None, f"anyep/{number}")
            board.is_lost = self._store is not None and not number
            self._roll = RollCall(own, self.num_ranks, board, _store_rank(self._group, self._store))
            self._roll.know(_known.get(self._group, {}).values())
            self._roll.arrive()
            for key in ("who", "at"):
                # All ranks have received the keys of the previous rendezvous through its collectives.
                Board(self._store if number > 1 else None, f"anyep/{number - 1}").remove(f"{key}/{self.rank}")
        return self._roll

    def _introduce(self, roll: RollCall) -> None:
        """Tell all ranks each other's processes, even if there is no store, or it ends with a rank."""
        import torch

        text = json.dumps(asdict(roll.own)).encode().ljust(INTRODUCTION_BYTES)
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        texts = [bytes(other.cpu().numpy()) for other in self._gather_tensors(roll, own)]
        roll.know(Process(**json.loads(text)) for text in texts)
        _known[self._group] = dict(roll.processes)

    def _gather(self, roll: RollCall, thing: Any) -> list[Any]:
        """Like `dist.all_gather_object`, but that one waits without checking which ranks are still alive."""
        import torch

        data = bytearray(pickle.dumps(thing))
        size = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        sizes = [int(other) for other in self._gather_tensors(roll, size)]
        padded = data.ljust(max(sizes), b"\0")
        content = torch.frombuffer(padded, dtype=torch.uint8).to(self._device)
        rows = self._gather_tensors(roll, content)
        return [
            pickle.load(io.BytesIO(row.cpu().numpy()[:size].tobytes()))
            for row, size in zip(rows, sizes, strict=True)
        ]

    def _gather_tensors(self, roll: RollCall, tensor: Any) -> list[Any]:
        import torch
        import torch.distributed as dist

        gathered = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        try:
            self._wait(roll, dist.all_gather(gathered, tensor, group=self._group, async_op=True))
        except RuntimeError as error:
            raise self._explain(roll, error) from error
        return gathered

    def _wait(self, roll: RollCall, work: Any) -> None:
        pause, next_look = FIRST_PAUSE_S, time.monotonic() + LOOK_S
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            if time.monotonic() >= next_look:
                self._raise_if_lost(roll, roll.look())
                next_look = time.monotonic() + LOOK_S
        work.wait()

    def _wait_until_complete(self, roll: RollCall) -> None:
        """Wait until every rank has published its process, if there is a store."""
        deadline = time.monotonic() + _timeout_s(self._group, self._device)
        while self._store is not None and not roll.is_complete():
            self._raise_if_lost(roll, roll.look())
            if time.monotonic() >= deadline:
                raise roll.error(roll.call_late(self._step, ""))
            time.sleep(LONGEST_PAUSE_S)

    @staticmethod
    def _raise_if_lost(roll: RollCall, verdict: Verdict | None) -> None:
        if verdict is not None:
            raise roll.error(verdict)

    def _explain(self, roll: RollCall, error: RuntimeError) -> AnyEPError:
        words = _GLOO_PLACE.sub("", str(error)).partition(". This is typically")[0].strip()
        words = words.splitlines()[0] if words else type(error).__name__
        if _DUPLICATE_GPU.search(str(error)):
            return NotSupported(_ONE_GPU_TWICE.format(ranks="some ranks"))
        if _TIMEOUT.search(str(error)):
            verdict = roll.look() or roll.call_late(self._step, words)
        else:
            verdict = roll.hold(words)
        return roll.error(verdict)


class CommRendezvous:
    """The ranks of an mpi4py communicator. MPI calls cannot be left: a lost rank is named if one fails."""

    def __init__(self, comm: Any) -> None:
        self.rank: int = comm.Get_rank()
        self.num_ranks: int = comm.Get_size()
        self._comm = comm
        self._roll = RollCall(Process.this(self.rank), self.num_ranks, Board(None, ""))

    def arrive(self) -> None:
        """Does nothing: there is no store to publish it in."""

    def all_gather(self, thing: Any) -> list[Any]:
        try:
            gathered = self._comm.allgather((self._roll.own, thing))
        except RuntimeError as error:
            if len(self._roll.processes) < self.num_ranks:
                raise PeerLost(
                    f"the communicator failed while {self._roll.doing}, before the ranks knew each other's"
                    f" processes; one may have died: {error}"
                ) from error
            raise self._roll.error(self._roll.hold(str(error))) from error
        self._roll.know(process for process, _ in gathered)
        return [other for _, other in gathered]

    def give_up(self, error: BaseException) -> None:
        """Does nothing: MPI has no other way to tell the other ranks."""

    def say_what(self, doing: str) -> None:
        self._roll.doing = doing

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        yield


def refuse_one_gpu_twice(processes: Any) -> None:
    """Say what to do if ranks of an NCCL group share a GPU: NCCL would fail with an unclear message."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for process in processes:
        if process.gpu:
            ranks_of.setdefault((process.host, process.gpu), []).append(process.rank)
    for ranks in ranks_of.values():
        if len(ranks) > 1:
            raise NotSupported(_ONE_GPU_TWICE.format(ranks=f"ranks {_numbers(sorted(ranks))}"))


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


def _device_of(group: Any) -> Any:
    """The device of tensors for the group's collectives: the CPU if the group has a backend for it."""
    import torch

    types = [device.type for device in group._device_types]
    if not types or "cpu" in types:
        return torch.device("cpu")
    return (
        torch.device(types[0], torch.cuda.current_device()) if types[0] == "cuda" else torch.device(types[0])
    )


def _gpu_uuid() -> str:
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _store_of(group: Any) -> Any:
    """The store that the group was made with; None if torch does not provide it."""
    import torch.distributed.distributed_c10d as c10d

    try:
        store = c10d._get_process_group_store(group)
    except (AttributeError, KeyError):
        return None
    innermost = store
    while hasattr(innermost, "underlying_store"):
        innermost = innermost.underlying_store
    # Groups of torch's MPI backend have a store without any function.
    return None if type(innermost) is c10d.Store else store


def _store_rank(group: Any, store: Any) -> int | None:
    """The rank of the group whose process serves its store: global rank 0, unless a launcher serves it."""
    import torch.distributed as dist

    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if type(store).__name__ != "TCPStore" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    try:
        return int(dist.get_group_rank(group, 0))
    except (ValueError, RuntimeError):
        return None


def _next_number(store: Any, rank: int) -> int:
    """How often this rank has begun a rendezvous on this group, the same on all ranks; 0 without a store."""
    if store is None:
        return 0
    try:
        return int(store.add(f"anyep/meetings/{rank}", 1))
    except RuntimeError:
        return 0


def _timeout_s(group: Any, device: Any) -> float:
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return DEFAULT_TIMEOUT_S
    return timeout.total_seconds()
