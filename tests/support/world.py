"""A pool of living rank processes, so that hundreds of cases run in minutes.

    def add_ranks(context: RankContext, start: int) -> float:
        total = torch.tensor([start + context.rank])
        dist.all_reduce(total, group=context.group)
        return total.item()

    assert get_world(4).run(add_ranks, 10) == [46, 46, 46, 46]

`run` calls a module-level function on every rank at the same time and returns what each returned. If any
rank raises, dies or does not answer, it raises `RankErrors`, which shows every rank's traceback or stack.
`gather` returns exceptions instead of raising them, and goes on with the survivors when a rank dies.

Ranks are forked from a server that has torch, Numba and AnyEP already loaded, and live until the end of
the pytest session. Their environment is that of the first use of a pool. They die with pytest, however it
ends, and leave no file: the rendezvous and the stacks are in memory (memfd).

Tensors travel by value, as bytes: what arrives is a contiguous tensor on the CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import pickle
import signal
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from anyep.launch import forked
from anyep.launch.forked import ForkedRank, StoreFile, end_all, enter_rank, join_group

# What ranks need not import themselves; a name that is not there is passed over.
PRELOADED: Final = (
    "torch.distributed",
    "torch._dynamo",  # with a layer or autograd, torch imports it late
    "numba",
    "pytest",
    "hypothesis",
    "anyep.api.buffer",
    "anyep.backends.cpu.preload",
    "tests.support.frozen",
)
MAX_SHARED_WORLDS: Final = 3
START_TIMEOUT_S: Final = 120.0
CLOSE_TIMEOUT_S: Final = 3.0
STACK_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True)
class RankContext:
    """What a function learns about the rank that it runs on."""

    rank: int
    num_ranks: int
    group: dist.ProcessGroup
    """Gloo, of exactly these ranks; created once per pool."""
    keep: dict[Any, Any] = field(default_factory=dict)
    """Lives as long as the rank's process: for Buffers that later cases use again."""


def hear_interrupts() -> None:
    """Let processes that are started from here hear Ctrl-C, also where a shell runs the tests in the
    background, and lets them ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start_server() -> None:
    """Start the process that ranks are forked from, unless it runs. It takes seconds, once."""
    forked.start_server(PRELOADED)


def set_environment(variables: dict[str, str], rank: int) -> None:
    """To prepare a rank: before anything is imported that reads them."""
    os.environ.update(variables)


class RankDied(Exception):
    """The rank's process ended while it should have answered."""


class RankHung(Exception):
    """The rank did not answer in time; the message shows where it was."""


class RankErrors(Exception):
    """Some ranks failed: `errors` has the exception of each of them."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        super().__init__(_report(errors))
        self.errors = errors


def get_world(num_ranks: int) -> World:
    """The pool of this size, on the CPU, that all tests share."""
    return shared_world(("cpu", num_ranks, False), lambda: World(num_ranks))


def shared_world(key: Hashable, new_world: Callable[[], World]) -> World:
    """The pool of this name that all tests share; the one not used for longest makes room for a new one."""
    world = _shared.pop(key, None) or new_world()
    _shared[key] = world
    while len(_shared) > MAX_SHARED_WORLDS:
        _, oldest = _shared.popitem(last=False)
        oldest.close()
    return world


def close_shared_worlds() -> None:
    """End all pools that tests share; they start again when they are used."""
    while _shared:
        _shared.popitem()[1].close()


class World:
    """Rank processes that wait for functions to run.

    They start with the first use, and again with the first use after close(). As a context manager, the
    world closes itself. Before a rank meets the others, its process calls `prepare(rank)`.
    """

    def __init__(self, num_ranks: int, prepare: Callable[[int], None] | None = None) -> None:
        self.num_ranks = num_ranks
        self._prepare = prepare
        self._pool: _Pool | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """`function(context, *args)` on every rank; the results in the order of the ranks."""
        return self._run([_pickled((function, args))] * self.num_ranks, timeout)

    def run_each(
        self,
        function: Callable[..., Any],
        args_of_ranks: Sequence[tuple[Any, ...]],
        *,
        timeout: float = 60.0,
    ) -> list[Any]:
        """As `run`, with other arguments on each rank."""
        if len(args_of_ranks) != self.num_ranks:
            raise ValueError(f"{len(args_of_ranks)} tuples of arguments for {self.num_ranks} ranks")
        return self._run([_pickled((function, args)) for args in args_of_ranks], timeout)

    def gather(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """As `run`, but a rank's exception stands where its result would be.

        A rank that dies (or died in an earlier `gather`) gives `RankDied`; the others are waited for. Only
        a rank that does not answer in time raises.
        """
        request = _pickled((function, args))
        answers = self._call([request] * self.num_ranks, timeout, survive=True)
        return [answer.value if answer.error is None else answer.error for answer in answers]

    def restart(self) -> None:
        """Start fresh processes: for when a failure has left the ranks in different states."""
        self._drop_pool(politely=False)
        self._living_pool()

    def revive(self) -> None:
        """Start dead ranks again. The others lose what they kept, and meet them anew."""
        if self._pool is None or not self._pool.dead:
            return
        try:
            self._pool.revive()
        except BaseException:
            self._drop_pool(politely=False)
            raise

    def close(self) -> None:
        """End the processes."""
        self._drop_pool(politely=True)

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks."""
        return [process.pid for process in self._living_pool().processes]

    def _run(self, requests: list[bytes], timeout: float) -> list[Any]:
        if self._pool is not None and self._pool.dead:
            self._drop_pool(politely=False)
        answers = self._call(requests, timeout, survive=False)
        errors = {rank: answer.error for rank, answer in enumerate(answers) if answer.error is not None}
        if errors:
            raise RankErrors(errors)
        return [answer.value for answer in answers]

    def _call(self, requests: list[bytes], timeout: float, survive: bool) -> list[_Answer]:
        pool = self._living_pool()
        try:
            return pool.call(requests, timeout, survive)
        except BaseException:
            # Ranks that owe an answer cannot be used again: it would be taken for that of the next call.
            self._drop_pool(politely=False)
            raise

    def _living_pool(self) -> _Pool:
        if self._pool is None:
            pool = _Pool(self.num_ranks, self._prepare)
            try:
                pool.start()
            except BaseException:
                pool.kill()
                raise
            self._pool = pool
        return self._pool

    def _drop_pool(self, politely: bool) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            if politely:
                pool.ask_to_leave()
            pool.kill()


_shared: OrderedDict[Hashable, World] = OrderedDict()
_pools: set[_Pool] = set()
_OWNER: Final = os.getpid()


@dataclass(frozen=True)
class _Answer:
    value: Any = None
    error: BaseException | None = None


class _Pool:
    """The processes of one World between two starts."""

    def __init__(self, num_ranks: int, prepare: Callable[[int], None] | None) -> None:
        self.dead: dict[int, RankDied] = {}
        self._prepare = prepare
        self._places = [StoreFile()]
        self._stacks = [os.memfd_create(f"anyep-test-stack-{rank}") for rank in range(num_ranks)]
        self.processes: list[ForkedRank] = []

    def start(self) -> None:
        _pools.add(self)
        for rank in range(len(self._stacks)):
            self.processes.append(self._new_process(rank))
        self._wait_until_they_met()

    def revive(self) -> None:
        # The old one stays open: a rank that drops its group reads the group's store once more.
        self._places.append(StoreFile())
        request = _pickled((_join_again, (self._places[-1].path,)))
        for rank, process in enumerate(self.processes):
            if rank not in self.dead:
                # A rank that has died since is found by the one who waits for it.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    process.pipe.send_bytes(request)
                continue
            process.close()
            self.processes[rank] = self._new_process(rank)
        self.dead.clear()
        self._wait_until_they_met()

    def _new_process(self, rank: int) -> ForkedRank:
        start_server()
        places = (self._places[-1].path, f"/proc/{os.getpid()}/fd/{self._stacks[rank]}")
        return ForkedRank(rank, _live_as_rank, len(self._stacks), *places, self._prepare)

    def _wait_until_they_met(self) -> None:
        answers = self._collect(set(range(len(self._stacks))), START_TIMEOUT_S, survive=False)
        errors = {rank: answer.error for rank, answer in answers.items() if answer.error is not None}
        if errors:
            raise RankErrors(errors)

    def call(self, requests: list[bytes], timeout: float, survive: bool) -> list[_Answer]:
        waiting = set(range(len(requests))) - self.dead.keys()
        for rank in waiting:
            # A rank that has died will be found by the one who waits for it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.processes[rank].pipe.send_bytes(requests[rank])
        answers = self._collect(waiting, timeout, survive)
        answers.update({rank: _Answer(error=error) for rank, error in self.dead.items()})
        return [answers[rank] for rank in range(len(requests))]

    def _collect(self, waiting: set[int], timeout: float, survive: bool) -> dict[int, _Answer]:
        """One answer of each rank in `waiting`, except of those that die."""
        waiting = set(waiting)
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            sources = [self.processes[rank].pipe for rank in waiting]
            sentinels = [self.processes[rank].sentinel for rank in waiting]
            ready = wait([*sources, *sentinels], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankErrors(self._errors(answers) | self._where_they_hang(waiting, timeout))
            for rank in sorted(waiting):
                # What a rank said before it died counts: so look at its words first.
                if self.processes[rank].pipe in ready or self.processes[rank].sentinel in ready:
                    answer = self._receive(rank)
                    if answer is None:
                        self.dead[rank] = self._obituary(rank)
                    else:
                        answers[rank] = answer
                    waiting.remove(rank)
            if self.dead and not survive:
                raise RankErrors(self._errors(answers))
        return answers

    def _receive(self, rank: int) -> _Answer | None:
        """The answer that has arrived from a rank, or None where it died without one."""
        pipe = self.processes[rank].pipe
        try:
            message = pipe.recv_bytes() if pipe.poll() else None
        except (EOFError, ConnectionResetError):
            return None
        if message is None:
            return None
        try:
            answer: _Answer = pickle.loads(message)
        except Exception as error:
            error.add_note(f"rank {rank} gave an answer that cannot be read here:\n{traceback.format_exc()}")
            return _Answer(error=error)
        return answer

    def _errors(self, answers: dict[int, _Answer]) -> dict[int, BaseException]:
        raised = {rank: answer.error for rank, answer in answers.items() if answer.error is not None}
        return {**raised, **self.dead}

    def _obituary(self, rank: int) -> RankDied:
        how = self.processes[rank].how_it_ended(CLOSE_TIMEOUT_S)
        return RankDied(f"rank {rank} died: {how}\n{_text_of(self._stacks[rank])}".strip())

    def _where_they_hang(self, ranks: set[int], timeout: float) -> dict[int, BaseException]:
        lengths = {rank: os.fstat(self._stacks[rank]).st_size for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_TIMEOUT_S
        texts: dict[int, str] = {}
        # A stack is written line by line: it is whole when it has stopped growing.
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, texts = texts, {rank: _text_of(self._stacks[rank], lengths[rank]) for rank in ranks}
            if texts == before and all(texts.values()):
                break
        return {
            rank: RankHung(
                f"rank {rank} did not answer within {timeout:g} s; it was here:\n{text or 'unknown'}"
            )
            for rank, text in texts.items()
        }

    def ask_to_leave(self) -> None:
        """Let the ranks end by themselves, so that what they keep is destroyed in order."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.pipe.send_bytes(b"")
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self.processes:
            process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        _pools.discard(self)
        end_all(self.processes)
        for place in self._places:
            place.close()
        for descriptor in self._stacks:
            os.close(descriptor)


@atexit.register
def _close_all() -> None:
    # A process forked from pytest has copies of the pools, but not the right to end them.
    if os.getpid() != _OWNER:
        return
    for pool in list(_pools):
        pool.ask_to_leave()
        pool.kill()
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        # It would go by itself, but takes a second to unload torch.
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def _live_as_rank(
    connection: Connection,
    rank: int,
    num_ranks: int,
    place: str,
    stack: str,
    prepare: Callable[[int], None] | None,
) -> None:
    """What a rank's process does from its first to its last moment."""
    enter_rank()
    # A session of its own: a rank's own children can be killed with it.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    stack_file = Path(stack).open("ab", buffering=0)  # noqa: SIM115 -- open as long as the process lives
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file)
    try:
        if prepare is not None:
            prepare(rank)
        context = RankContext(rank, num_ranks, join_group(place, rank, num_ranks))
    except Exception as error:
        connection.send_bytes(_pickled_error(error))
        return
    connection.send_bytes(_pickled(_Answer()))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while request := connection.recv_bytes():
            answer = _answer(context, request)
            # What the function printed belongs to the test that is running now.
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(answer)
    context.keep.clear()
    dist.destroy_process_group()
    # Last of all: the processes that functions have started here, and this one.
    os.killpg(0, signal.SIGKILL)


def _join_again(context: RankContext, place: str) -> None:
    """On a rank that survived others: what it kept was made with them."""
    context.keep.clear()
    gc.collect()
    dist.destroy_process_group()
    object.__setattr__(context, "group", join_group(place, context.rank, context.num_ranks))


def _answer(context: RankContext, request: bytes) -> bytes:
    try:
        function, args = pickle.loads(request)
        return _pickled(_Answer(function(context, *args)))
    except BaseException as error:
        return _pickled_error(error)


def _pickled_error(error: BaseException) -> bytes:
    """The error with its traceback as a note; one that does not survive the journey goes as its text."""
    text = "".join(traceback.format_exception(error))
    error.add_note(text)
    try:
        pickled = _pickled(_Answer(error=error))
        pickle.loads(pickled)
    except Exception:
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        substitute.add_note(text)
        return _pickled(_Answer(error=substitute))
    return pickled


class _Pickler(pickle.Pickler):
    """Pickles tensors by value, only the part that they show of their memory."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor) or thing.layout != torch.strided:
            return NotImplemented
        values = thing.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content = bytearray(values.reshape(-1).view(torch.uint8).numpy())
        return _tensor, (content, thing.dtype, tuple(thing.shape), thing.requires_grad)


def _tensor(
    content: bytearray, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype, device="cpu", requires_grad=requires_grad)
    values = torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)
    return values.requires_grad_(requires_grad)


def _pickled(thing: Any) -> bytes:
    memory = io.BytesIO()
    _Pickler(memory, protocol=5).dump(thing)
    return memory.getvalue()


def _report(errors: dict[int, BaseException]) -> str:
    """What each rank says; ranks that say the same share a paragraph."""
    ranks_of: dict[str, list[str]] = {}
    for rank, error in sorted(errors.items()):
        text = getattr(error, "__notes__", [str(error)])[-1]
        ranks_of.setdefault(text.strip(), []).append(str(rank))
    return "\n".join(f"--- rank {', '.join(ranks)} ---\n{text}" for text, ranks in ranks_of.items())


def _text_of(descriptor: int, start: int = 0) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, start).decode(errors="replace")
