"""Programs that end without destroying their Buffers: real processes, whose interpreters really shut down.

    with EndingServer("cpu") as server:
        ranks = server.run(Ending("idle", how="exit"), 2)
        assert [rank.code for rank in ranks] == [3, 3]

The ranks are forked from a server that has loaded torch and AnyEP already. A forked rank returns from the
server's own `main`, so it ends as any program does: Python shuts down, and the process has an exit code. An
`Ending` is data: what state the Buffers are in, what holds them, how the program ends, and in which thread.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist

from anyep import Config
from anyep.launch.processes import die_with_parent
from tests.support.programs import ROOT, Program

EXIT_CODE: Final = 3
CODES: Final = {"return": 0, "exit": EXIT_CODE, "exception": 1}
TIME_LIMIT_S: Final = 90.0
"""Much longer than an ending takes, and shorter than the waits of a Buffer (100 s)."""
HIDDEN: Final = 256
NUM_TOKENS: Final = 4
FEW_SMS: Final = Config(4)
"""Triton's interpreter runs programs one after the other."""


@dataclass(frozen=True)
class Ending:
    """How the ranks of a program end."""

    state: str
    """What their Buffers do then: a name in STATES."""
    how: str = "return"
    """How the function ends that made them: a name in CODES."""
    thread: str = "main"
    """Where that runs: "main"; "another", which the main thread joins; "unjoined": not; "daemon"."""
    held_by: str = "global"
    """What holds the Buffers at the end: "global", "cycle", or "nothing"."""
    leave_group: bool = True
    """Whether `destroy_process_group` is called before the end."""

    def __str__(self) -> str:
        parts = [self.state, self.how, self.thread, self.held_by]
        return ", ".join([*parts, *([] if self.leave_group else ["group stays"])])


@dataclass(frozen=True)
class Ended:
    """How one of them ended."""

    code: int
    """As subprocess says it: below 0 for a signal."""
    seconds: float
    """From the end of its program to the end of its process."""
    output: str
    said: list[str] = field(default_factory=list)
    """What its program had to say, line by line."""
    left_behind: bool = False
    """Whether processes of it remained."""


class EndingServer:
    """Forks ranks, waits for their end, and tells how it was. Their Buffers are on `device`: "cpu", "cuda",
    or "simulated", which is a GPU of CPU tensors. `env` is added to the environment."""

    def __init__(self, device: str, env: dict[str, str] | None = None) -> None:
        theirs, ours = os.pipe()
        self._requests = os.fdopen(ours, "w")
        self._process = Program(
            *("-m", "tests.support.endings", device),
            stdin=theirs,
            stderr=2,
            cwd=ROOT,
            finalizes=True,
            env={**(env or {}), "PYTHONPATH": str(ROOT), "ANYEP_TIMEOUT_S": "100"},
        )
        os.close(theirs)

    def __enter__(self) -> EndingServer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._requests.close()
            self._process.wait()
        finally:
            self._process.__exit__()

    def run(self, ending: Ending, num_ranks: int) -> list[Ended]:
        assert self._process.stdout is not None
        request = {"ending": asdict(ending), "num_ranks": num_ranks}
        print(json.dumps(request), file=self._requests, flush=True)
        return [Ended(**ended) for ended in json.loads(self._process.stdout.readline())]


# The server


def main(device: str) -> None:
    """Serve requests; a forked rank returns from here when its program is over."""

    if device == "simulated":
        from tests.support.simulated_gpu import use_simulated_gpu

        use_simulated_gpu()
    # What was loaded is not looked at by the garbage collector of each rank when that ends.
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        num_ranks, folder = request["num_ranks"], Path(tempfile.mkdtemp(prefix="anyep-endings-"))
        pids: list[int] = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                run_rank(Ending(**request["ending"]), Rank(rank, num_ranks, device, folder))
                return
            pids.append(pid)
        print(json.dumps([asdict(ended) for ended in wait_for(pids, folder)]), flush=True)
        shutil.rmtree(folder)


def wait_for(pids: list[int], folder: Path) -> list[Ended]:
    """How each of these children ended; who does not is asked where it hangs, and killed."""
    ended_at: dict[int, tuple[int, float]] = {}
    deadline = time.monotonic() + TIME_LIMIT_S
    asked = False
    while len(ended_at) < len(pids):
        for pid in pids:
            if pid not in ended_at:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended_at[pid] = (os.waitstatus_to_exitcode(status), time.monotonic())
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL if asked else signal.SIGUSR1)
        if time.monotonic() > deadline:
            asked, deadline = True, time.monotonic() + 2.0
        time.sleep(0.005)
    return [how_it_ended(rank, pid, *ended_at[pid], folder) for rank, pid in enumerate(pids)]


def how_it_ended(rank: int, pid: int, code: int, ended_at: float, folder: Path) -> Ended:
    try:
        os.killpg(pid, signal.SIGKILL)
        left_behind = True
    except ProcessLookupError:
        left_behind = False
    lines = read(folder / f"said-{rank}").splitlines()
    began = [float(line.split()[1]) for line in lines if line.startswith("END ")]
    said = [line for line in lines if not line.startswith("END ")]
    seconds = ended_at - began[-1] if began else -1.0
    return Ended(code, seconds, read(folder / f"output-{rank}"), said, left_behind)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# A rank


@dataclass(frozen=True)
class Rank:
    """What a program knows of the rank that it is."""

    rank: int
    num_ranks: int
    device: str
    folder: Path

    @property
    def tensors_on(self) -> str:
        return "cuda" if self.device == "cuda" else "cpu"

    def say(self, words: str) -> None:
        """Leave a line for the test."""
        with (self.folder / f"said-{self.rank}").open("a") as said:
            print(words, file=said)

    def buffer(self, **options: Any) -> Any:
        from anyep.api.buffer import Buffer

        device = "cpu" if self.device == "cpu" else "cuda"
        return Buffer(dist.group.WORLD, 1 << 20, device=device, **options)

    def is_here(self, name: str) -> bool:
        """Whether some rank has come to a point of this name."""
        return (self.folder / name).exists()

    def come_to(self, name: str) -> None:
        (self.folder / name).touch()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIME_LIMIT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


_held: list[Any] = []
"""What a module global holds."""


def run_rank(ending: Ending, rank: Rank) -> None:
    """The program of a rank."""
    os.setsid()
    die_with_parent()
    output = os.open(rank.folder / f"output-{rank.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if rank.device == "cuda":
        torch.cuda.set_device(0)
    store = f"file://{rank.folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank.rank, world_size=rank.num_ranks)
    try:
        if ending.thread == "main":
            end(ending, rank)
            return
        thread = threading.Thread(target=end, args=(ending, rank), daemon=ending.thread == "daemon")
        thread.start()
        if ending.thread == "another":
            thread.join()
        else:
            rank.wait_until(lambda: rank.is_here(f"in a call {rank.rank}"))
        if ending.how == "exit":
            sys.exit(EXIT_CODE)
    finally:
        rank.say(f"END {time.monotonic()}")


def end(ending: Ending, rank: Rank) -> None:
    """Bring Buffers into a state, and end."""
    buffers = STATES[ending.state](rank)
    if ending.held_by == "global":
        _held.append(buffers)
    elif ending.held_by == "cycle":
        gc.disable()
        circle: list[Any] = [buffers]
        circle.append(circle)
        del circle
    del buffers
    if ending.leave_group:
        dist.destroy_process_group()
    if ending.how == "exit" and ending.thread == "main":
        sys.exit(EXIT_CODE)
    if ending.how == "exception":
        raise ValueError("boom")


# States


def inputs(rank: Rank, buffer: Any) -> dict[str, Any]:
    """A dispatch from everyone to everyone: token t goes to rank t modulo the ranks."""
    topk_idx = (torch.arange(NUM_TOKENS, device=rank.tensors_on) % rank.num_ranks)[:, None]
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, rank.num_ranks)
    x = torch.full((NUM_TOKENS, HIDDEN), 1.0 + rank.rank, device=rank.tensors_on)
    return {
        "x": x,
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(NUM_TOKENS, 1, device=rank.tensors_on),
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "config": FEW_SMS,
    }


def call(rank: Rank, buffer: Any, run_async: bool = False) -> Any:
    """A dispatch and a combine, which brings back each token as it was; the event of the combine."""
    arguments = inputs(rank, buffer)
    rows, *_, handle, _ = buffer.dispatch(**arguments)
    combined, _, event = buffer.combine(rows, handle, config=FEW_SMS, async_finish=run_async)
    if not run_async:
        assert torch.equal(combined, arguments["x"])
    return combined, event


def idle(rank: Rank) -> Any:
    buffer = rank.buffer()
    call(rank, buffer)
    return buffer


def never_called(rank: Rank) -> Any:
    return rank.buffer()


def destroyed(rank: Rank) -> Any:
    buffer = idle(rank)
    buffer.destroy()
    return buffer


def unheard(rank: Rank) -> Any:
    """An asynchronous call may still be under way, and nobody waits for its event."""
    buffer = rank.buffer()
    for _ in range(5):
        call(rank, buffer, run_async=True)
    return buffer


def in_vain(rank: Rank) -> Any:
    """Rank 0 waits, beside its program, for ranks that never come; they stay until it is gone."""
    buffer = rank.buffer()
    arguments = {**inputs(rank, buffer), "num_worst_tokens": 8 * NUM_TOKENS, "async_finish": True}
    # With everyone first: on a GPU no kernel can be loaded while another one waits.
    buffer.dispatch(**arguments)[-1].current_stream_wait()
    call(rank, buffer)
    if rank.rank == 0:
        buffer.dispatch(**arguments)
    else:
        rank.wait_until(lambda: not buffer.status()[0].alive)
    return buffer


def read_at_the_end(rank: Rank) -> Any:
    """Rank 0 ends with a call under way; the others come to that call when the end has begun."""
    buffer = rank.buffer()
    call(rank, buffer)
    arguments = inputs(rank, buffer)
    rows, *_, handle, _ = buffer.dispatch(**arguments)
    synchronize(rank)
    dist.barrier()
    if rank.rank == 0:
        buffer.combine(rows, handle, config=FEW_SMS, async_finish=True)
        atexit.register(rank.come_to, "the end")
        return buffer
    rank.wait_until(lambda: rank.is_here("the end"))
    combined: list[torch.Tensor] = []

    def combine() -> None:
        combined.append(buffer.combine(rows, handle, config=FEW_SMS)[0])
        synchronize(rank)
        # On a GPU the host hears later what went wrong.
        buffer.get_dispatch_layout(arguments["topk_idx"], rank.num_ranks)
        buffer.runtime.normal.ops.before(False)

    hear(rank, combine, times=1)
    rank.say("right" if torch.equal(combined[0], arguments["x"]) else "wrong")
    return buffer


def waited_for(rank: Rank) -> Any:
    """Rank 0 ends; the others wait for it in a call, and say what they heard."""
    buffer = rank.buffer()
    call(rank, buffer)
    if rank.rank:
        hear(rank, lambda: call(rank, buffer))
    else:
        # They make their call first, so that they do wait.
        rank.wait_until(lambda: all(rank.is_here(f"waits {other}") for other in range(1, rank.num_ranks)))
    return buffer


def hear(rank: Rank, wait: Callable[[], Any], times: int = 2) -> None:
    """Say what a wait raises: on a GPU the host hears it at its next contact with the Buffer."""
    from anyep import AnyEPError

    rank.come_to(f"waits {rank.rank}")
    try:
        for _ in range(times):
            wait()
            synchronize(rank)
    except AnyEPError as error:
        rank.say(f"{type(error).__name__}: {error}")


def synchronize(rank: Rank) -> None:
    if rank.device == "cuda":
        torch.cuda.synchronize()


def broken(rank: Rank) -> Any:
    """Rank 1 destroys its Buffer, and the others hear of it."""
    buffer = rank.buffer()
    call(rank, buffer)
    if rank.rank == 1:
        buffer.destroy()
    else:
        hear(rank, lambda: call(rank, buffer))
    return buffer


def several(rank: Rank) -> Any:
    buffers = [rank.buffer() for _ in range(3)]
    for buffer in buffers:
        call(rank, buffer, run_async=True)
    return buffers


def hook_held(rank: Rank) -> Any:
    """A low-latency call that was sent, and whose hook is never called."""
    from anyep.api.buffer import Buffer

    experts = rank.num_ranks
    num_bytes = Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, rank.num_ranks, experts)
    buffer = rank.buffer(num_rdma_bytes=num_bytes, low_latency_mode=True)
    topk_idx = (torch.arange(NUM_TOKENS, device=rank.tensors_on) % experts)[:, None]
    x = torch.ones(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, device=rank.tensors_on)
    sent = buffer.low_latency_dispatch(x, topk_idx, NUM_TOKENS, experts, use_fp8=False, return_recv_hook=True)
    return buffer, sent


def in_a_call(rank: Rank) -> Any:
    """Rank 0 is inside a call when its main thread ends; what it raises then is its own affair."""
    buffer = rank.buffer()
    call(rank, buffer)
    if rank.rank:
        rank.come_to(f"in a call {rank.rank}")
        rank.wait_until(lambda: not buffer.status()[0].alive)
        return buffer
    from anyep import BufferBroken

    arguments = inputs(rank, buffer)
    rank.come_to("in a call 0")
    try:
        buffer.dispatch(**arguments)
    except BufferBroken as error:
        rank.say(f"BufferBroken: {error}")
    return buffer


def goes_on(rank: Rank) -> Any:
    """Calls are made after the main thread has ended."""
    buffer = rank.buffer()
    call(rank, buffer)
    rank.come_to(f"in a call {rank.rank}")
    rank.wait_until(lambda: threading.main_thread().is_alive() is False)
    for run_async in (False, True):
        _, event = call(rank, buffer, run_async)
        event.current_stream_wait()
    rank.say("went on")
    return buffer


def in_a_team(rank: Rank) -> Any:
    """The same where a rank has many cores, and shares the work of a call among threads."""
    import anyep.session
    from anyep.backends.cpu import rows, within_node

    anyep.session.num_cores = lambda: 4 * rank.num_ranks
    rows.WORTH_SPLITTING_BYTES = within_node.WORTH_SPLITTING_BYTES = 0
    return goes_on(rank)


def closing(rank: Rank) -> Any:
    """A Buffer on a simulated GPU is dropped, and a thread waits for its calls, which never end."""
    from anyep.backends.cuda.gpu import Gpu

    buffer = rank.buffer()
    call(rank, buffer)
    dist.barrier()
    Gpu.now = lambda _: SimpleNamespace(query=lambda: False)  # type: ignore[method-assign,assignment]
    del buffer
    assert [thread.name for thread in threading.enumerate() if thread.name == "anyep-close"]


def in_a_block(rank: Rank) -> Any:
    """The program ends in the middle of a `with` block."""
    with rank.buffer() as buffer:
        call(rank, buffer, run_async=True)
        sys.exit(EXIT_CODE)


def over_a_network(rank: Rank) -> Any:
    """Each rank is a node of its own, reached by NIXL."""
    buffer = rank.buffer(num_rdma_bytes=1 << 20, ranks_per_node=1, network="nixl")
    for _ in range(5):
        call(rank, buffer, run_async=True)
    return buffer


def waited_for_over_a_network(rank: Rank) -> Any:
    buffer = rank.buffer(num_rdma_bytes=1 << 20, ranks_per_node=1, network="nixl")
    call(rank, buffer)
    if rank.rank:
        hear(rank, lambda: call(rank, buffer))
    else:
        rank.wait_until(lambda: all(rank.is_here(f"waits {other}") for other in range(1, rank.num_ranks)))
    return buffer


STATES: Final[dict[str, Callable[[Rank], Any]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        never_called,
        idle,
        destroyed,
        unheard,
        in_vain,
        read_at_the_end,
        waited_for,
        broken,
        several,
        hook_held,
        in_a_call,
        goes_on,
        in_a_team,
        in_a_block,
        closing,
        over_a_network,
        waited_for_over_a_network,
    )
}


if __name__ == "__main__":
    main(sys.argv[1])
