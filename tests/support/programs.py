"""Programs in processes of their own, without the seconds in which Python imports torch.

    finished = run_program("-m", "anyep", "plan", "--json", env={"ANYEP_TIMEOUT": "3"})
    assert finished.returncode == 0

`run_program` is `subprocess.run([sys.executable, ...], capture_output=True, text=True)`, and `Program` is
`subprocess.Popen`, except that the process is forked from an interpreter that has torch and Numba loaded
(and AnyEP, with `has_anyep`). It runs its program as `__main__`; at the end it waits for its threads and
calls its atexit functions. The finalization of all modules, which takes a third of a second more, is done
only with `finalizes`. Environment, folder, arguments, standard streams and signals are its own. The servers
that multiprocessing forks from are processes of their own, and also forked from it.

Where a new interpreter is the point (what is imported, which packages are found, options such as -X), use
subprocess. What torch and Numba read from the environment when they are imported is that of the tests, except
for OMP_NUM_THREADS.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).parents[2]
PRELOADED: Final = ("torch.distributed", "numba", "rich.console", "typer")
PRELOADED_WITH_ANYEP: Final = ("torch._dynamo", "anyep.nn", "anyep.backends.cpu.preload")
START_TIMEOUT_S: Final = 120.0
_LENGTH_BYTES: Final = 8
_PR_SET_PDEATHSIG: Final = 1


def run_program(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 120.0,
    has_anyep: bool = False,
    finalizes: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` prints and returns; `env` is added to the environment of the tests."""
    with Program(*arguments, env=env, cwd=cwd, has_anyep=has_anyep, finalizes=finalizes) as program:
        output, errors = program.communicate(timeout)
        return subprocess.CompletedProcess(
            [sys.executable, *map(str, arguments)], program.wait(timeout), output, errors
        )


class Program:
    """A running `python *arguments`, where arguments begin with -c, -m or a path.

    As a context manager it is killed at the end. Its standard output and errors are pipes that are read here,
    unless files are given for them; its standard input is empty, unless a file is given for it.
    """

    def __init__(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        has_anyep: bool = False,
        finalizes: bool = False,
    ) -> None:
        request = {
            "arguments": [str(argument) for argument in arguments],
            "env": {**os.environ, **(env or {})},
            "cwd": str(cwd or Path.cwd()),
            "finalizes": finalizes,
        }
        self._status, theirs = socket.socketpair()
        self.stdout, out = _pipe_unless(stdout)
        self.stderr, err = _pipe_unless(stderr)
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            source = nothing if stdin is None else stdin
            _warm_interpreter(has_anyep).send(request, [source, out, err, theirs.fileno()])
        finally:
            theirs.close()
            os.close(nothing)
            for ours, descriptor in ((self.stdout, out), (self.stderr, err)):
                if ours is not None:
                    os.close(descriptor)
        self.returncode: int | None = None
        self._words = b""
        self.pid = int(self._word(START_TIMEOUT_S))

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        self.wait()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self._status.close()

    def poll(self) -> int | None:
        """As that of Popen: the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float = 120.0) -> int:
        """As that of Popen: the exit code; negative for a signal."""
        if self.returncode is None:
            self.returncode = int(self._word(timeout))
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To the process, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        """All that it prints until nobody has its outputs open any more."""
        texts: dict[Any, bytearray] = {
            stream: bytearray() for stream in (self.stdout, self.stderr) if stream is not None
        }
        waiting = set(texts)
        deadline = time.monotonic() + timeout
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                heard = b"\n".join(bytes(text) for text in texts.values()).decode(errors="replace")
                raise TimeoutError(f"the program did not end within {timeout:g} s; it had printed:\n{heard}")
            for stream in ready:
                part = os.read(stream.fileno(), 1 << 16)
                texts[stream] += part
                if not part:
                    waiting.remove(stream)
        return tuple(  # type: ignore[return-value]
            "" if stream is None else bytes(texts[stream]).decode() for stream in (self.stdout, self.stderr)
        )

    def _word(self, timeout: float) -> str:
        """The next word about the process: first its pid, then its exit code."""
        deadline = time.monotonic() + timeout
        while b" " not in self._words:
            if not select.select([self._status], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired("program", timeout)
            part = self._status.recv(64)
            if not part:
                raise RuntimeError("the warm interpreter has ended")
            self._words += part
        word, _, self._words = self._words.partition(b" ")
        return word.decode()


def _pipe_unless(descriptor: int | None) -> tuple[IO[bytes] | None, int]:
    """Our end and theirs."""
    if descriptor is not None:
        return None, descriptor
    ours, theirs = os.pipe()
    return os.fdopen(ours, "rb", buffering=0), theirs


class _WarmInterpreter:
    """The process from which programs are forked; it ends with this one. One that has AnyEP is itself forked
    from one that has not."""

    def __init__(self, has_anyep: bool) -> None:
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            f"from tests.support import programs\nprograms._serve(0, {has_anyep})"
        )
        self._process: Program | subprocess.Popen[bytes] = (
            Program("-c", code, cwd=ROOT, stdin=theirs.fileno(), stdout=1, stderr=2, finalizes=True)
            if has_anyep
            else subprocess.Popen([sys.executable, "-c", code], stdin=theirs.fileno())
        )
        theirs.close()

    def send(self, request: dict[str, Any], descriptors: list[int]) -> None:
        text = json.dumps(request).encode("utf-8", "surrogateescape")
        self._socket.sendall(len(text).to_bytes(_LENGTH_BYTES, "little"))
        socket.send_fds(self._socket, [text[:1]], descriptors)
        self._socket.sendall(text[1:])

    def close(self) -> None:
        self._socket.close()
        if self.owner == os.getpid():
            self._process.wait(10)


_warm: dict[bool, _WarmInterpreter] = {}


def _warm_interpreter(has_anyep: bool) -> _WarmInterpreter:
    if has_anyep not in _warm or _warm[has_anyep].owner != os.getpid():
        _warm[has_anyep] = _WarmInterpreter(has_anyep)
        atexit.register(_warm[has_anyep].close)
    return _warm[has_anyep]


def _serve(descriptor: int, has_anyep: bool) -> None:
    """The warm interpreter's own program: returns only in the processes that it forks, as their program."""
    import ctypes
    import importlib

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for name in (*PRELOADED, *(PRELOADED_WITH_ANYEP if has_anyep else ())):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _load_what_numba_loads_late()
    # The garbage collectors of programs need not look at what was loaded.
    gc.freeze()
    requests = socket.socket(fileno=descriptor)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    children: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 1 << 12)
        for child in list(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                with contextlib.suppress(OSError), children.pop(pid) as listener:
                    listener.sendall(f"{os.waitstatus_to_exitcode(status)} ".encode())
        if requests not in ready:
            continue
        request, descriptors = _receive(requests)
        if request is None:
            os._exit(0)
        warm = os.getpid()
        pid = os.fork()
        if pid:
            *streams, listener = descriptors
            for stream in streams:
                os.close(stream)
            children[pid] = socket.socket(fileno=listener)
            with contextlib.suppress(OSError):
                children[pid].sendall(f"{pid} ".encode())
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != warm:
            os._exit(1)
        for end in (woken, wake, descriptors[3]):
            os.close(end)
        requests.close()
        for child in children.values():
            child.close()
        if not request["finalizes"]:
            _run_and_leave(request, descriptors[:3])
        _run(request, descriptors[:3])
        return


def _load_what_numba_loads_late() -> None:
    """Its registries, which the first function that is compiled or read from a cache fills."""
    import numba

    numba.njit("int64()")(lambda: 0)


def _fork_servers_of_multiprocessing() -> None:
    """Fork them from this process, where multiprocessing would start new interpreters."""
    import threading
    import traceback
    from itertools import pairwise
    from multiprocessing import forkserver, util

    start_interpreter = util.spawnv_passfds

    def start(path: Any, arguments: Any, descriptors: Any) -> int:
        code = arguments[arguments.index("-c") + 1]
        if "multiprocessing.forkserver" not in code and "multiprocessing.resource_tracker" not in code:
            # The "spawn" method asks for a new interpreter.
            return start_interpreter(path, arguments, descriptors)
        pid = os.fork()
        if pid:
            return pid
        try:
            forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
            for kept, next_kept in pairwise([*sorted({0, 1, 2, *descriptors}), os.sysconf("SC_OPEN_MAX")]):
                os.closerange(kept + 1, next_kept)
            exec(code, {"__name__": "__main__"})
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()
        os._exit(0)

    util.spawnv_passfds = start  # type: ignore[assignment]


def _receive(requests: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    head = _exactly(requests, _LENGTH_BYTES)
    if not head:
        return None, []
    first, descriptors, _, _ = socket.recv_fds(requests, 1, 4)
    rest = _exactly(requests, int.from_bytes(head, "little") - 1)
    return json.loads((first + rest).decode("utf-8", "surrogateescape")), list(array.array("i", descriptors))


def _exactly(source: socket.socket, count: int) -> bytes:
    text = b""
    while len(text) < count:
        part = source.recv(count - len(text))
        if not part:
            return b""
        text += part
    return text


def _run_and_leave(request: dict[str, Any], streams: list[int]) -> None:
    """End as an interpreter does, without finalization."""
    import threading
    import traceback

    code: object = None
    try:
        _run(request, streams)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        # By a signal, which Python sends itself at the very end.
        raise
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit((code or 0) & 0xFF if isinstance(code, int | None) else 1)


def _run(request: dict[str, Any], streams: list[int]) -> None:
    """What `python` does with its arguments."""
    import runpy

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "OMP_NUM_THREADS" in os.environ:
        # Torch has read it already.
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    arguments = request["arguments"]
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    # As set up by _WarmInterpreter: the repository, the folder of -c, then those of PYTHONPATH.
    inherited = [folder for folder in sys.path if folder not in ("", str(ROOT))]
    sys.path[:] = [*folders, *(folder for folder in inherited if folder not in folders)]
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    main = sys.modules["__main__"]
    _fork_servers_of_multiprocessing()
    if arguments[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = [arguments[1], *arguments[2:]]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    if arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        code = compile(arguments[1], "<string>", "exec")
    else:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        sys.argv = list(arguments)
        code = compile(Path(arguments[0]).read_bytes(), arguments[0], "exec")
        main.__file__ = arguments[0]
    main.__dict__.pop("programs", None)
    exec(code, main.__dict__)
