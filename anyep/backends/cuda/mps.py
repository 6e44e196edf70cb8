"""Many ranks on one GPU: NVIDIA's multi-process service, in a private folder, for as long as it is needed.

Without it the processes take turns on the GPU, a few milliseconds each, and a rank that waits for another
holds it up for the whole of its turn. With it their kernels run side by side.

    with MultiProcessService() as environment:
        subprocess.run(command, env=os.environ | environment)
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from anyep.errors import NotSupported

CONTROL: Final = "nvidia-cuda-mps-control"
PR_SET_PDEATHSIG: Final = 1
START_TIMEOUT_S: Final = 10.0


class MultiProcessService:
    """The service; inside `with` it runs. It ends with this process, also if that is killed."""

    def __init__(self) -> None:
        self._folder = ""
        self._control: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return shutil.which(CONTROL) is not None

    def __enter__(self) -> dict[str, str]:
        """Start it; what the ranks' environment needs to find it."""
        if not self.is_installed():
            raise NotSupported(f"{CONTROL} is not on the path: it comes with NVIDIA's driver")
        self._folder = tempfile.mkdtemp(prefix="anyep-mps-")
        try:
            # In the foreground: then it is a child of this process, and can die with it.
            self._control = subprocess.Popen(
                [CONTROL, "-f"],
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=_die_with_the_parent,  # noqa: PLW1509 - one system call, which takes no lock
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
        assert self._control is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._ask("get_server_list") != 0:
            if self._control.poll() is not None or time.monotonic() > deadline:
                log = Path(self._folder, "control.log")
                words = log.read_text().strip().splitlines()[-3:] if log.exists() else ["it wrote no log"]
                raise NotSupported(f"{CONTROL} did not start: {'; '.join(words)}")
            time.sleep(0.05)

    def _ask(self, question: str) -> int:
        return subprocess.run(
            [CONTROL],
            input=f"{question}\n".encode(),
            env=os.environ | self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=START_TIMEOUT_S,
            check=False,
        ).returncode

    def _stop(self) -> None:
        if self._control is not None:
            if self._control.poll() is None:
                self._ask("quit")
            try:
                self._control.wait(START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._control.kill()
                self._control.wait()
            self._control = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _die_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
