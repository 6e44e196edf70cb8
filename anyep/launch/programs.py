"""Start a program as several ranks, each in a new interpreter.

Every rank finds the usual variables of torch.distributed in its environment, so `init_process_group` needs
no arguments. When one rank fails, or the launcher is told to stop, all the others are ended. No process
outlives the launcher, however it ends: the kernel kills a rank whose launcher has died, and a small
guard process kills what the ranks themselves had started.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from anyep.errors import InvalidCall, whole_number
from anyep.launch.output import STDERR, STDOUT, Printer
from anyep.launch.processes import ending_in_words, failed_first, signal_group

GRACE_S: Final = 3.0
"""Time between SIGTERM and SIGKILL for ranks that are ended."""

# Runs in a rank's process before its program. PR_SET_PDEATHSIG (the kernel kills the process with its parent)
# survives the exec, but has no effect if the parent died before it was set: hence the check of the parent
# afterwards. Python ignores SIGPIPE for itself; the program gets the default back.
START_RANK: Final = """\
import ctypes, os, signal, sys
launcher, command = int(sys.argv[1]), sys.argv[2:]
word = ctypes.c_ulong
ctypes.CDLL(None).prctl(1, word(signal.SIGKILL), word(0), word(0), word(0))
if os.getppid() != launcher:
    os._exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"{command[0]} cannot be started: {error.strerror}")
"""

# Collects the ranks' process groups until its input ends: either the launcher has cleaned up and says so,
# or it was killed.
_GUARD: Final = """\
import os, signal, sys
words = sys.stdin.read().split()
for group in [] if "clean" in words else words:
    try:
        os.killpg(int(group), signal.SIGKILL)
    except OSError:
        pass
"""


def launch(
    num_ranks: int, command: Sequence[str], env: Mapping[str, str] | None = None, *, prefix_lines: bool = True
) -> int:
    """Run `command` as `num_ranks` ranks, wait for them, and return one exit code for all.

    The exit code is 0 if every rank ended with 0; else that of the rank that failed first (128 + n if signal
    n killed it), or 128 + n if signal n told the launcher to stop. `env` is added to this process's
    environment. Each line that the ranks print gets a prefix like `[rank 3] `, unless there is only one
    rank or `prefix_lines` is False.
    """
    num_ranks = whole_number("num_ranks", num_ranks, minimum=1)
    if not command:
        raise InvalidCall("the command is empty: name the program to run")
    variables = {**os.environ, **(env or {})}
    if shutil.which(command[0], path=variables.get("PATH")) is None:
        raise InvalidCall(f"there is no program {command[0]!r}: check its name and the PATH")
    num_cores = len(os.sched_getaffinity(0))
    # The output of this process comes before that of the ranks.
    sys.stdout.flush()
    sys.stderr.flush()
    with reserved_port() as port, _Job(num_ranks, prefix_lines) as job:
        for rank in range(num_ranks):
            job.start(command, rank_environment(rank, num_ranks, port, num_cores, variables))
        ending = job.wait()
    if ending.sentence:
        print(f"anyep: {ending.sentence}", file=sys.stderr)
    return ending.exit_code


def rank_environment(
    rank: int, num_ranks: int, port: int, num_cores: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one rank.

    >>> environment = rank_environment(1, 4, 29500, num_cores=9, inherited={"HOME": "/root", "RANK": "7"})
    >>> environment["RANK"], environment["WORLD_SIZE"], environment["OMP_NUM_THREADS"], environment["HOME"]
    ('1', '4', '2', '/root')
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, num_cores // num_ranks)),
        # All ranks are on this machine; Gloo would look up the host name, which fails on many laptops.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return {**defaults, **inherited, **place}


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that no other process gets inside this context.

    The socket stays bound but never listens. With SO_REUSEADDR on both sides, rank 0 can still listen
    there, as torch.distributed does.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


@dataclass(frozen=True)
class _Ending:
    """How a job ended; the sentence is empty if all ranks succeeded."""

    exit_code: int
    sentence: str = ""


class _Job:
    """The ranks of one launch; no process is left after its `with` block."""

    def __init__(self, num_ranks: int, prefix_lines: bool) -> None:
        self._num_ranks = num_ranks
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._pidfds: list[int] = []
        # Like Popen.returncode: negative for a signal. The processes stay unreaped until the end, so the id
        # of a process group is not reused while the launcher may still have to kill that group.
        self._exit_codes: dict[int, int] = {}
        self._stop_signal: int | None = None
        self._old_handlers: dict[int, Any] = {}
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._printer = Printer(on_broken_output=self._ring) if prefix_lines and num_ranks > 1 else None

    def __enter__(self) -> _Job:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._take_signals()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end_ranks()
            if self._printer is not None:
                self._printer.finish()
        finally:
            self._give_signals_back()
            self._close()
        if self._printer is not None and self._printer.output_is_broken:
            raise BrokenPipeError("nobody reads the output of the ranks any more")

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the next rank in its own session: it and its children can be signalled together."""
        rank = len(self._ranks)
        output = None if self._printer is None else subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START_RANK, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL if self._num_ranks > 1 else None,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
        self._ranks.append(process)
        self._tell_guard(str(process.pid))
        self._pidfds.append(os.pidfd_open(process.pid))
        self._poll.register(self._pidfds[rank], select.POLLIN)
        if self._printer is not None and process.stdout is not None and process.stderr is not None:
            self._printer.add(process.stdout.fileno(), STDOUT, f"[rank {rank}] ")
            self._printer.add(process.stderr.fileno(), STDERR, f"[rank {rank}] ")

    def wait(self) -> _Ending:
        """Wait until all ranks have ended, one has failed, or a signal tells the launcher to stop."""
        if self._printer is not None:
            self._printer.start()
        while len(self._exit_codes) < len(self._ranks):
            ended = self._watch()
            if self._stop_signal is not None:
                name = signal.Signals(self._stop_signal).name
                return _Ending(128 + self._stop_signal, f"stopped by {name}; all ranks were ended")
            if self._printer is not None and self._printer.output_is_broken:
                break
            failed = [rank for rank in ended if self._exit_codes[rank] != 0]
            if failed:
                return self._failure_of(failed_first({rank: self._exit_codes[rank] for rank in failed}))
        return _Ending(0)

    def _failure_of(self, rank: int) -> _Ending:
        exit_code = self._exit_codes[rank]
        first = " first" if self._num_ranks > 1 else ""
        sentence = f"rank {rank} failed{first} ({ending_in_words(exit_code)})"
        if len(self._exit_codes) < len(self._ranks):
            sentence += "; the ranks still running were ended"
        return _Ending(exit_code if exit_code > 0 else 128 - exit_code, sentence)

    def _watch(self, seconds: float | None = None) -> list[int]:
        """Wait until something happens, and return the ranks that have ended since the last call."""
        self._poll.poll(None if seconds is None else 1000 * seconds)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        ended = []
        for rank, process in enumerate(self._ranks):
            if rank not in self._exit_codes:
                exit_code = _look_at_exit_code(process.pid)
                if exit_code is not None:
                    self._exit_codes[rank] = exit_code
                    self._poll.unregister(self._pidfds[rank])
                    ended.append(rank)
        return ended

    def _end_ranks(self) -> None:
        for rank, process in enumerate(self._ranks):
            if rank not in self._exit_codes:
                signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while len(self._exit_codes) < len(self._ranks) and time.monotonic() < deadline:
            self._watch(max(0.0, deadline - time.monotonic()))
        # Include the groups of ranks that have ended: their children may still be running.
        for process in self._ranks:
            signal_group(process.pid, signal.SIGKILL)
        self._tell_guard("clean")
        for process in self._ranks:
            process.wait()

    def _tell_guard(self, word: str) -> None:
        # A killed guard is no reason to fail: it is only the second line of defence.
        with contextlib.suppress(BrokenPipeError):
            assert self._guard.stdin is not None
            self._guard.stdin.write(f"{word}\n".encode())
            self._guard.stdin.flush()

    def _close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._guard.communicate()
        for process in self._ranks:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        for descriptor in (*self._pidfds, self._bell):
            os.close(descriptor)

    def _take_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup, SIGHUP is ignored and stays so.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            # The exit codes of children are lost if this is ignored.
            self._old_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _give_signals_back(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._stop_signal is None:
            self._stop_signal = number
        self._ring()

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)


def _look_at_exit_code(pid: int) -> int | None:
    """The exit code of a child that has ended, negative for a signal; the child is not reaped."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
