"""Many ranks on one GPU: NVIDIA's multi-process service (MPS), in a private folder, for as long as needed.

Without it the processes take turns on the GPU, a few milliseconds each, and a rank that waits for another
blocks that rank for its whole turn. With it their kernels run concurrently.

    with MultiProcessService() as environment:
        subprocess.run(command, env=os.environ | environment)

The keeper is a small process that runs the service until the process that started it leaves `with`, exits or
is killed; then it ends the service and removes the folder. The keeper is this file, run as a script:
therefore it imports nothing of the package, and nothing that takes long to load, at the top.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

CONTROL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"
FOLDER_PREFIX: Final = "anyep-mps-"
ENDED_BY_ITSELF: Final = "ended"
"""A file by which the keeper tells the process that waits for the start that the service has ended."""
PR_SET_PDEATHSIG: Final = 1
CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Read by CUDA when a process first uses it: how many hardware queues the streams of a process share."""
MOST_CONNECTIONS: Final = 32
"""The most that CUDA gives a process."""
CONNECTIONS_OF_A_GPU: Final = 64
"""For all ranks that share a GPU: with 128 an H200 is out of memory when the last of them start CUDA."""
ENOUGH_CONNECTIONS: Final = 4
START_TIMEOUT_S: Final = 10.0
END_TIMEOUT_S: Final = 5.0


def connections_for_ranks(environment: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """What ranks that share a GPU need besides this environment: a value that the user has chosen stays.

    >>> connections_for_ranks({}, 2), connections_for_ranks({}, 8), connections_for_ranks({}, 64)
    ({'CUDA_DEVICE_MAX_CONNECTIONS': '32'}, {'CUDA_DEVICE_MAX_CONNECTIONS': '8'}, {})
    >>> connections_for_ranks({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 2)
    {}
    """
    share = min(MOST_CONNECTIONS, CONNECTIONS_OF_A_GPU // num_ranks)
    return {} if environment.get(CONNECTIONS) or share < ENOUGH_CONNECTIONS else {CONNECTIONS: str(share)}


def problem_with_connections(environment: Mapping[str, str]) -> str | None:
    """Why copies may stand still under the service, or None if this environment is as they need it.

    With few queues a copy may lie behind a stream that waits for a peer, which waits for that copy.

    >>> problem_with_connections({"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    """
    value = environment.get(CONNECTIONS)
    if value and value.isdecimal() and int(value) >= ENOUGH_CONNECTIONS:
        return None
    found = f"{CONNECTIONS} is {value}" if value else f"{CONNECTIONS} is not set"
    return (
        f"{found}: under NVIDIA's multi-process service, copies that are started while a stream waits for"
        f" another rank may never run if it is less than {ENOUGH_CONNECTIONS}"
    )


class MultiProcessService:
    """The service, which runs inside `with`. It ends with this process, even if the process is killed."""

    def __init__(self) -> None:
        self._folder = ""
        self._keeper: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return shutil.which(CONTROL) is not None

    @staticmethod
    def is_running() -> bool:
        """Whether a service is running to which this process and its children would connect."""
        return MultiProcessService.is_installed() and _ask("get_server_list", os.environ) is not None

    def __enter__(self) -> dict[str, str]:
        """Start the service; return the environment variables that ranks need to find it."""
        from anyep.errors import NotSupported

        if not self.is_installed():
            raise NotSupported(f"{CONTROL} is not on the path: it comes with NVIDIA's driver")
        self._folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
        try:
            # The service serves all GPUs: with this variable clients choose among the GPUs it has.
            environment = os.environ | self.environment
            environment.pop("CUDA_VISIBLE_DEVICES", None)
            # In its own session: Ctrl-C is for this process; ranks need the service while they shut down.
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, self._folder],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._wait_until_it_answers()
        except BaseException:
            self._stop()
            raise
        return self.environment

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_MPS_PIPE_DIRECTORY": self._folder, "CUDA_MPS_LOG_DIRECTORY": self._folder}

    def _wait_until_it_answers(self) -> None:
        from anyep.errors import NotSupported

        deadline = time.monotonic() + START_TIMEOUT_S
        while _ask("get_server_list", os.environ | self.environment) is None:
            if Path(self._folder, ENDED_BY_ITSELF).exists() or time.monotonic() > deadline:
                log = Path(self._folder, "control.log")
                words = log.read_text().strip().splitlines()[-3:] if log.exists() else ["it wrote no log"]
                raise NotSupported(f"{CONTROL} did not start: {'; '.join(words)}")
            time.sleep(0.05)

    def _stop(self) -> None:
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            try:
                self._keeper.wait(2 * START_TIMEOUT_S + 2 * END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
            self._keeper = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _ask(question: str, environment: Mapping[str, str]) -> str | None:
    """The answer of the service of this environment; None if there is none, or if it hangs."""
    try:
        finished = subprocess.run(
            [CONTROL],
            input=f"{question}\n",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=START_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout


def keep(folder: str) -> None:
    """Run the service until no process holds the other end of stdin any more, then remove its folder."""
    # In the foreground: then it is a child of this process, and ends with it.
    control = subprocess.Popen(
        [CONTROL, "-f"],
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_the_parent,  # noqa: PLW1509 - one system call, which takes no lock
    )
    while control.poll() is None and not _stdin_has_ended(0.1):
        pass
    if control.poll() is None:
        _end(control)
    else:
        Path(folder, ENDED_BY_ITSELF).touch()
        while not _stdin_has_ended(None):
            pass
    shutil.rmtree(folder, ignore_errors=True)


def _stdin_has_ended(timeout_s: float | None) -> bool:
    return bool(select.select([sys.stdin], [], [], timeout_s)[0]) and not os.read(sys.stdin.fileno(), 1)


def _end(control: subprocess.Popen[bytes]) -> None:
    servers = [int(word) for word in (_ask("get_server_list", os.environ) or "").split() if word.isdigit()]
    _ask("quit", os.environ)
    try:
        control.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        control.kill()
        control.wait()
    # A server whose clients died in a kernel may not react to `quit`.
    deadline = time.monotonic() + END_TIMEOUT_S
    while servers := [pid for pid in servers if _is_a_server(pid)]:
        if time.monotonic() > deadline:
            for pid in servers:
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _is_a_server(pid: int) -> bool:
    try:
        return SERVER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _die_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))


if __name__ == "__main__":
    keep(sys.argv[1])
